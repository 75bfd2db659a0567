"""Functions of the user: operands of their own, and calls through Python.

XLA's handlers know no functions, so calls with them go to `sdpa` by `jax.pure_callback`; their
derivatives are those of the same primitives. A function is static, and its arguments are operands:
floating ones of scores are `score_args[i]`, which are differentiated, others `score_fixed[i]`, and
those of masks `mask_args[i]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import sdpa
from sdpa import _warnings
from sdpa._programs import FOREIGN, Foreign, Library, composed
from sdpa._table import DIFFERENTIABLE, DIFFERENTIABLE_OPTIONS, OPERANDS

_PREFIXES = ("score_args[", "score_fixed[", "mask_args[")
_LIBRARY = Library(jnp, jax.lax.stop_gradient)


def _converted(x: Any) -> Any:
    """An array that a function captures, in NumPy."""
    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"score_mod, mask_mod: expected functions that capture no traced array, got {x.aval}; "
            "pass it in score_args or mask_args"
        )
    return np.asarray(x)


FOREIGN[jax.Array] = Foreign(
    describe=lambda x: (np.dtype(x.dtype), x.shape),
    convert=_converted,
    is_constant=lambda x: x.ndim == 0,
)


class Functions(NamedTuple):
    """Those of a call, which are static."""

    score_mod: Any = None
    mask_mod: Any = None


def is_argument(name: str) -> bool:
    """Whether the operand is an argument of a function."""
    return name.startswith(_PREFIXES)


def is_differentiable(name: str) -> bool:
    """Whether an operand has a derivative."""
    return name in DIFFERENTIABLE or (name.startswith("score_args[") and name.endswith("]"))


def differentiable(names: Any) -> list[str]:
    """The operands that have derivatives."""
    return [name for name in names if is_differentiable(name)]


def named_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the functions by the names of the operands, as arrays of JAX."""
    found = {}
    for option in "score_args", "mask_args":
        for i, x in enumerate(given[option] or ()):
            x = x if isinstance(x, jax.Array) else jnp.asarray(x)
            is_fixed = option == "score_args" and not jnp.issubdtype(x.dtype, jnp.floating)
            found[f"{'score_fixed' if is_fixed else option}[{i}]"] = x
    return found


def _arguments(named: Mapping[str, Any], option: str) -> tuple[Any, ...]:
    """Those of the function, in their order."""
    prefixes = ("score_args[", "score_fixed[") if option == "score_args" else ("mask_args[",)
    own = {int(n[n.index("[") + 1 : -1]): x for n, x in named.items()
           if n.startswith(prefixes) and n.endswith("]")}  # fmt: skip
    return tuple(own[i] for i in sorted(own))


def shown(functions: Functions, named: Mapping[str, Any], visible: Any, **inputs: Any) -> Any:
    """The visible pairs that mask_mod lets through."""
    if functions.mask_mod is None:
        return visible
    return visible & _evaluated(functions.mask_mod, named, True, visible, inputs)


def changed(functions: Functions, named: Mapping[str, Any], visible: Any, **inputs: Any) -> Any:
    """The scores after score_mod."""
    if functions.score_mod is None:
        return inputs["score"]
    found = _evaluated(functions.score_mod, named, False, visible, inputs)
    return found + jnp.zeros_like(inputs["score"])


def _evaluated(
    function: Any, named: Mapping[str, Any], is_mask: bool, visible: Any, inputs: dict[str, Any]
) -> Any:
    args = _arguments(named, "mask_args" if is_mask else "score_args")
    like = [np.broadcast_to(np.zeros((), x.dtype), x.shape) for x in args]
    return composed(_LIBRARY, is_mask, function, args, like, visible, **inputs)


# ------------------------------------------------------------------------------- calls


def call(
    short: str, args: Sequence[Any], names: Any, options: Any, lead: Any, results: Any
) -> list[Any]:
    """A primitive, computed by Python; `results` are {name: (shape, dtype)}."""
    types = tuple(np.dtype(x.dtype) for x in args)
    struct: Any = jax.ShapeDtypeStruct  # it has no types
    like = [
        struct((*shape, 2), np.uint32) if np.dtype(dtype).itemsize == 8 else struct(shape, dtype)
        for shape, dtype in results.values()
    ]
    shapes = {name: shape for name, (shape, _) in results.items()}

    def run(*given: Any) -> list[Any]:
        arrays = [_from_halves(x, kind) for x, kind in zip(given, types, strict=True)]
        named = dict(zip(names, arrays, strict=True))
        return [_in_halves(x) for x in _computed(short, named, options, tuple(lead), shapes)]

    found = jax.pure_callback(run, like, *map(_halved, args))
    return [
        jax.lax.bitcast_convert_type(x, dtype) if np.dtype(dtype).itemsize == 8 else x
        for x, (_, dtype) in zip(found, results.values(), strict=True)
    ]


# The thread of a callback may not know that JAX's 64-bit types are enabled, and would lose half of
# their bits. They travel as two halves.


def _halved(x: Any) -> Any:
    return jax.lax.bitcast_convert_type(x, np.uint32) if x.dtype.itemsize == 8 else x


def _from_halves(x: Any, dtype: Any) -> Any:
    x = np.asarray(x)
    return np.ascontiguousarray(x).view(dtype)[..., 0] if dtype.itemsize == 8 else x


def _in_halves(x: Any) -> Any:
    if x.dtype.itemsize != 8:
        return x
    return np.ascontiguousarray(x[..., None]).view(np.uint32)


@_warnings.silenced()
def _computed(
    short: str, named: dict[str, Any], options: Any, lead: Any, shapes: Mapping[str, Any]
) -> list[Any]:
    # Other operands may have batch axes that query is broadcast over.
    for name in ("query", "query_t"):
        if name in named and not options.rows_first:
            x = named[name]
            named[name] = np.broadcast_to(x, (*lead, *x.shape[-2:]))
    keywords = _keywords(named, options, lead)
    operands = [named[name] for name in OPERANDS]
    found: Any
    moved: list[Any] = [named.get(f"{name}_t") for name in OPERANDS]
    if short == "forward":
        return list(sdpa.attention_forward(*operands, **keywords))
    if short == "tangent":
        extra = _tangents(named, "{}_t")
        return [sdpa.attention_jvp(*(*operands, *moved), **keywords | extra).out_t]
    needs = list(dict.fromkeys(n.partition("[")[0] for n in shapes))
    saved = named["grad_out"], *operands, named["out"], named["lse"]
    if short == "backward":
        found = sdpa.attention_backward(*saved, needs=needs, **keywords)
    else:
        extra = _tangents(named, "gg_{}")
        found = sdpa.attention_double_backward(
            *(*moved, *saved), **keywords | extra | {"needs": needs}
        )
    return [_sum_to(_gradient(found, name), shape) for name, shape in shapes.items()]


def _keywords(named: Mapping[str, Any], options: Any, lead: Sequence[int]) -> dict[str, Any]:
    """The options of `sdpa.attention`."""
    functions = options.functions
    left = -int(options.lower) if options.has_lower else None
    right = int(options.upper) if options.has_upper else None
    found: dict[str, Any] = {
        name: named[name]
        for name in (*DIFFERENTIABLE_OPTIONS, "where", "alibi_slopes", "cu_seqlens_q",
                     "cu_seqlens_k", "key_lengths", "query_offset")
        if name in named
    }  # fmt: skip
    if "cu_seqlens_q" not in named:
        for name in {"key_lengths", "query_offset"} & set(found):
            found[name] = np.broadcast_to(found[name], lead[:-1])
    if "seed" in named:
        low, high = (int(x) for x in named["seed"])
        found |= {"dropout_p": options.dropout_p, "rng": low + (high << 32)}
    for option, function in zip(("score", "mask"), functions, strict=True):
        if function is not None:
            found[f"{option}_mod"] = function
            found[f"{option}_args"] = _arguments(named, f"{option}_args")
    return {
        "scale": options.scale,
        "softcap": options.softcap or None,
        "window": (left, right),
        "enable_gqa": _is_grouped(named, lead),
        "invariant": bool(options.invariant),
        "workers": options.workers or None,
    } | found


def _is_grouped(named: Mapping[str, Any], lead: Sequence[int]) -> bool:
    """Whether key and value have heads of their own number; else heads are broadcast."""
    axis = -2 if "cu_seqlens_q" in named else -3
    query, key, value = (named[name].shape[axis:][:1] for name in OPERANDS)
    return bool(query == (lead[-1],) and key == value)


def _tangents(named: Mapping[str, Any], pattern: str) -> dict[str, Any]:
    """Tangents of the options."""
    found = {
        pattern.format(name): named[f"{name}_t"]
        for name in DIFFERENTIABLE_OPTIONS
        if f"{name}_t" in named
    }
    own = [n for n in named if n.startswith("score_args[") and n.endswith("_t")]
    if own:
        n_args = len(_arguments(named, "score_args"))
        found[pattern.format("score_args")] = [
            named.get(f"score_args[{i}]_t") for i in range(n_args)
        ]
    return found


def _gradient(found: Any, name: str) -> Any:
    option, _, number = name.partition("[")
    x = getattr(found, option)
    return x[int(number[:-1])] if number else x


def _sum_to(x: Any, shape: Sequence[int]) -> Any:
    axes = tuple(i for i, (n, to) in enumerate(zip(x.shape, shape, strict=True)) if n != to)
    return x.sum(axes, keepdims=True, dtype=x.dtype) if axes else x
