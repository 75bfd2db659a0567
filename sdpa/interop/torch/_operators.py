"""Operators of the namespace `sdpa`, for the dispatcher: schemas, kernels and shapes.

All operators end in the same arguments, OPERANDS and then OPTIONS, which derivatives pass on
unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

import sdpa
from sdpa import _arguments, _table, _warnings
from sdpa._table import DIFFERENTIABLE, DIFFERENTIABLE_OPTIONS
from sdpa.interop.torch._arrays import to_array, to_tensor
from sdpa.interop.torch._layout import empty_rows_of_heads, forward_like, rows_of_heads

Tensors = tuple[torch.Tensor, ...]

# The types of options that are no arrays. An array that may be a number has an option for that.
_TYPES = {"float": "float", "float | None": "float?", "bool": "bool", "int | None": "SymInt?"}
# Options that operators take in another form.
_FORMS = {
    "is_causal": {"is_causal": "str"},
    "window": {"left": "SymInt?", "right": "SymInt?"},
    "rng": {},  # an operand
}
NUMBER = "_number"
"""Ends the name of the option for the number instead of an operand."""


def _types() -> dict[str, str]:
    """{name: type} of the options, which are constants of a graph."""
    found: dict[str, str] = {}
    for name, option in _table.OPTIONS.items():
        if option.takes_number:
            found[name + NUMBER] = "float?"
        elif not option.is_array:
            found |= _FORMS[name] if name in _FORMS else {name: _TYPES[option.annotation]}
    return found


# like_query: the results have the layout of PyTorch's fused kernel. quiet: nothing warns.
_OPTION_TYPES = {**_types(), "like_query": "bool", "quiet": "bool"}
N_DIFFERENTIABLE = len(DIFFERENTIABLE)
# Gradients exist for the first ones; the other operands are constants.
OPERANDS = (*DIFFERENTIABLE, *_table.CONSTANTS, "seed")
OPTIONS = tuple(_OPTION_TYPES)
_LIKE_QUERY, _QUIET = map(OPTIONS.index, ("like_query", "quiet"))
ARGUMENTS = (*OPERANDS, *OPTIONS)

_ROWS = {"out": "Tensor", "lse": "Tensor"}
_UPSTREAM = {"grad_out": "Tensor", "grad_lse": "Tensor?", **_ROWS, "needs": "bool[]"}
# {name: type} of the first arguments of each operator, and how many tensors it returns.
LEADING: dict[str, dict[str, str]] = {
    "forward": {},
    "weights": {"stage": "str"},
    "backward": _UPSTREAM,
    "jvp": {**{f"{name}_t": "Tensor?" for name in DIFFERENTIABLE}, **_ROWS},
    "double_backward": {**{f"gg_{name}": "Tensor?" for name in DIFFERENTIABLE}, **_UPSTREAM},
}
_RESULTS: dict[str, str | int] = {
    "forward": "(Tensor out, Tensor lse)",
    "weights": "Tensor",
    "backward": N_DIFFERENTIABLE,
    "jvp": "Tensor",
    "double_backward": 1 + N_DIFFERENTIABLE,
}

LIBRARY = torch.library.Library("sdpa", "DEF")


def define(name: str, leading: Mapping[str, str], results: str | int) -> None:
    """Define an operator by {name: type} of its first arguments, and its results."""
    types = {name: "Tensor" if name in _table.OPERANDS else "Tensor?" for name in OPERANDS}
    arguments = {**leading, **types, **_OPTION_TYPES}
    if isinstance(results, int):
        results = f"({', '.join(['Tensor'] * results)})"
    texts = ", ".join(f"{kind} {name}" for name, kind in arguments.items())
    LIBRARY.define(f"{name}({texts}) -> {results}")


for _name, _leading in LEADING.items():
    define(f"attention_{_name}", _leading, _RESULTS[_name])


def split(args: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Split the arguments of an operator into (the first ones, operands, options)."""
    n = len(args) - len(OPTIONS)
    return args[: n - len(OPERANDS)], args[n - len(OPERANDS) : n], args[n:]


def named(args: Sequence[Any]) -> dict[str, Any]:
    """OPERANDS and OPTIONS by their names."""
    return dict(zip(ARGUMENTS, args, strict=True))


# What an operator gets for an option that is not given.
ABSENT: dict[str, Any] = dict.fromkeys(ARGUMENTS) | {
    **{name: x.default for name, x in _table.OPTIONS.items() if name in OPTIONS},
    "is_causal": _arguments.ALIGNMENTS[0],
    "like_query": False,
    "quiet": False,
}
_ABSENT = tuple(ABSENT[name] for name in OPTIONS)
_ALIGNMENT: dict[str, bool | str] = {"upper_left": True, "lower_right": "lower_right"}


def keywords_of(
    operands: Sequence[Any], options: Sequence[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """(query, key, value), and the options that are given by the names that sdpa has for them."""
    found = {n: to_array(x) for n, x in zip(OPERANDS, operands, strict=True) if x is not None}
    arrays = [found.pop(name) for name in _table.OPERANDS]
    seed = found.pop("seed", None)
    if seed is not None:
        found["rng"] = int(seed) % 2**64
    given = {n: x for n, x, y in zip(OPTIONS, options, _ABSENT, strict=True) if x != y}
    for name in ("like_query", "quiet"):
        given.pop(name, None)
    if "is_causal" in given:
        given["is_causal"] = _ALIGNMENT[given["is_causal"]]
    if "left" in given or "right" in given:
        found["window"] = given.pop("left", None), given.pop("right", None)
    return arrays, found | {name.removesuffix(NUMBER): x for name, x in given.items()}


def _named_arrays(names: Iterable[str], tensors: Sequence[Any]) -> dict[str, Any]:
    """The arrays of tensors that are given."""
    found = zip(names, tensors, strict=True)
    return {name: to_array(x) for name, x in found if x is not None}


def gradients(found: Any, names: Sequence[str], like: Sequence[Any]) -> Tensors:
    """The gradients with these names; an empty tensor for each that was not asked for."""
    grads = (getattr(found, name) for name in names)
    return tuple(
        torch.empty(0, device="cpu") if grad is None else to_tensor(grad).to(x.dtype)
        for grad, x in zip(grads, like, strict=True)
    )


def _forward(*args: Any) -> Tensors:
    _, operands, options = split(args)
    arrays, keywords = keywords_of(operands, options)
    keywords["lse_dtype"] = np.float64  # all digits, for the backward
    with _warnings.silenced(options[_QUIET]):
        if options[_LIKE_QUERY]:
            out, lse = forward_like(operands[0], *arrays, **keywords)
        else:
            array, lse = sdpa.attention_forward(*arrays, **keywords)
            out = to_tensor(array)
    return out, to_tensor(lse)


def _weights(stage: Any, *args: Any) -> torch.Tensor:
    _, operands, options = split(args)
    (query, key, _), keywords = keywords_of(operands, options)
    if "cu_seqlens_q" in keywords:  # the last sequence has all rows
        keywords["sequence"] = len(keywords["cu_seqlens_q"]) - 2
    return to_tensor(sdpa.attention_weights(query, key, stage=stage, **keywords))


@_warnings.silenced()  # the forward has warned
def _backward(*args: Any) -> Tensors:
    (grad_out, grad_lse, out, lse, needs), operands, options = split(args)
    arrays, keywords = keywords_of(operands, options)
    found = sdpa.attention_backward(
        *(to_array(grad_out), *arrays, to_array(out), to_array(lse)),
        **keywords,
        grad_lse=to_array(grad_lse),
        needs=[name for name, need in zip(DIFFERENTIABLE, needs, strict=True) if need],
    )
    if options[_LIKE_QUERY]:
        own = [(name, getattr(found, name)) for name in _table.OPERANDS]
        rows: dict[str, Any] = {name: rows_of_heads(x) for name, x in own if x is not None}
        found = found._replace(**rows)
    return gradients(found, DIFFERENTIABLE, operands[:N_DIFFERENTIABLE])


@_warnings.silenced()
def _jvp(*args: Any) -> torch.Tensor:
    (*tangents, _, _), operands, options = split(args)
    arrays, keywords = keywords_of(operands, options)
    n = len(arrays)
    keywords |= _named_arrays((f"{name}_t" for name in DIFFERENTIABLE_OPTIONS), tangents[n:])
    found = sdpa.attention_jvp(*(*arrays, *map(to_array, tangents[:n])), **keywords)
    return to_tensor(found.out_t)


@_warnings.silenced()
def _double_backward(*args: Any) -> Tensors:
    (*tangents, grad_out, grad_lse, out, lse, needs), operands, options = split(args)
    arrays, keywords = keywords_of(operands, options)
    n, names = len(arrays), ("grad_out", *DIFFERENTIABLE)
    keywords |= _named_arrays((f"gg_{name}" for name in DIFFERENTIABLE_OPTIONS), tangents[n:])
    found = sdpa.attention_double_backward(
        *(*map(to_array, (*tangents[:n], grad_out)), *arrays, to_array(out), to_array(lse)),
        **keywords,
        grad_lse=to_array(grad_lse),
        needs=[name for name, need in zip(names, needs, strict=True) if need],
    )
    return gradients(found, names, (grad_out, *operands[:N_DIFFERENTIABLE]))


def shape_of(operands: Sequence[Any], options: Sequence[Any]) -> tuple[int, ...]:
    """(..., heads, Lq) of the result."""
    query, key, value = operands[: len(_table.OPERANDS)]
    enable_gqa = options[OPTIONS.index("enable_gqa")]
    if operands[OPERANDS.index("cu_seqlens_q")] is not None:
        n_q, n_heads = query.shape[:2]
        if not enable_gqa:
            (n_heads,) = torch.broadcast_shapes(*(x.shape[1:2] for x in (query, key, value)))
        return n_heads, n_q
    if enable_gqa and query.ndim > 2:
        batch = torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
        return (*batch, *query.shape[-3:-1])
    return (
        *torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value))),
        query.shape[-2],
    )


def fake_forward(*args: Any) -> Tensors:
    _, operands, options = split(args)
    query, _, value = operands[: len(_table.OPERANDS)]
    shape = shape_of(operands, options)
    lse = query.new_empty(shape, dtype=torch.float64)
    if options[_LIKE_QUERY]:
        return torch.empty_like(query), lse
    rows = shape if operands[OPERANDS.index("cu_seqlens_q")] is None else shape[::-1]
    return query.new_empty((*rows, value.shape[-1])), lse


def _fake_weights(stage: str, *args: Any) -> torch.Tensor:
    _, operands, options = split(args)
    query, key, _, *others = operands
    n_k = key.shape[-2 if operands[OPERANDS.index("cu_seqlens_q")] is None else 0]
    return query.new_empty((*shape_of((query, key, key, *others), options), n_k))


def fake_gradients(needs: Sequence[bool], like: Sequence[Any]) -> Tensors:
    return tuple(
        x.new_empty(x.shape) if need else torch.empty(0, device="cpu")
        for need, x in zip(needs, like, strict=True)
    )


def _fake_backward(*args: Any) -> Tensors:
    (*_, needs), operands, options = split(args)
    grads = fake_gradients(needs, operands[:N_DIFFERENTIABLE])
    if options[_LIKE_QUERY]:
        n = len(_table.OPERANDS)
        own = zip(grads[:n], needs[:n], strict=True)
        grads = (*(empty_rows_of_heads(x) if need else x for x, need in own), *grads[n:])
    return grads


def _fake_jvp(*args: Any) -> torch.Tensor:
    (*_, out, _), _, _ = split(args)
    return out.new_empty(out.shape)


def _fake_double_backward(*args: Any) -> Tensors:
    (*_, grad_out, _, _, _, needs), operands, _ = split(args)
    return fake_gradients(needs, (grad_out, *operands[:N_DIFFERENTIABLE]))


KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "attention_forward": (_forward, fake_forward),
    "attention_weights": (_weights, _fake_weights),
    "attention_backward": (_backward, _fake_backward),
    "attention_jvp": (_jvp, _fake_jvp),
    "attention_double_backward": (_double_backward, _fake_double_backward),
}
for _name, (_kernel, _fake) in KERNELS.items():
    LIBRARY.impl(_name, _kernel, "CPU")
    torch.library.register_fake(f"sdpa::{_name}", _fake, lib=LIBRARY)

forward = torch.ops.sdpa.attention_forward.default
weights = torch.ops.sdpa.attention_weights.default
backward = torch.ops.sdpa.attention_backward.default
jvp = torch.ops.sdpa.attention_jvp.default
double_backward = torch.ops.sdpa.attention_double_backward.default
