"""The primitives: their operands and results, the handlers that compute them, batching.

Operands are canonical: all have the same number of batch axes, then (heads, L, d) or the axes of
their kind, each of the full size or 1. Packed sequences are one array with rows_first and without
batch axes; key_lengths and query_offset then have one element per sequence. The parameter `names`
lists the operands of a primitive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from sdpa import _core
from sdpa._table import DIFFERENTIABLE, OPERANDS
from sdpa.interop.jax._functions import Functions, call, is_argument

Named = dict[str, Any]
Shapes = tuple[tuple[str, tuple[int, ...]], ...]


_XLA: dict[str, Any] = _core._xla_arguments()
NUMBERS: tuple[str, ...] = _XLA["numbers"]


class Options(NamedTuple):
    """The options that are known when a function is traced, by the names of src/xla.h."""

    numbers: tuple[float, ...]
    integers: tuple[int, ...]
    functions: Functions | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Options:
        """Those with these values; others are 0."""
        return cls(
            tuple(float(values.get(name) or 0) for name in NUMBERS),
            tuple(int(values.get(name) or 0) for name in _XLA["integers"]),
            values.get("functions"),
        )

    def __getattr__(self, name: str) -> Any:
        for key in "numbers", "integers":
            if name in _XLA[key]:
                return getattr(self, key)[_XLA[key].index(name)]
        raise AttributeError(name)


# Number of axes behind (batch, heads) of each operand; -1 if it has no axis of heads either.
# Tangents of one direction end in _t, of a second one in _u.
INNER: dict[str, int] = _XLA["operands"] | {
    f"{name}_u": n for name, n in _XLA["operands"].items() if name in DIFFERENTIABLE
}
_ORDER = tuple(INNER)  # of the bits of src/xla.h
_RESULTS: tuple[str, ...] = _XLA["results"]


def with_suffix(named: Mapping[str, Any], suffix: str) -> Named:
    """The tangents with this suffix, under the names without it."""
    return {n.removesuffix(suffix): x for n, x in named.items() if n.endswith(suffix)}


def add_suffix(named: Mapping[str, Any], suffix: str) -> Named:
    return {n + suffix: x for n, x in named.items()}


def lead_of(named: Mapping[str, Any], options: Options) -> tuple[int, ...]:
    """Sizes of the batch axes and of the query heads."""
    batch = [
        x.shape[: x.ndim - INNER[n] - 1]
        for n, x in named.items()
        if n != "seed" and not is_argument(n)
    ]
    if "cu_seqlens_q" in named:  # lengths and offsets belong to sequences, not batch entries
        batch = []
    axis = -2 if options.rows_first else -3
    heads = [named[name].shape[axis] for name in OPERANDS]
    return (*np.broadcast_shapes(*batch), max(heads) if all(heads) else 0)


def results_of(name: str, named: Named, options: Options, shapes: Shapes) -> dict[str, Any]:
    """{name: (shape, dtype)} of the results of a primitive."""
    if shapes:
        return {n: (shape, named[n].dtype) for n, shape in shapes}
    query, value = named["query"], named["value"]
    *batch, heads = lead_of(named, options)
    n_q = query.shape[-3 if options.rows_first else -2]
    lengths = (n_q, heads) if options.rows_first else (heads, n_q)
    out = (*batch, *lengths, value.shape[-1]), query.dtype
    if name != "forward":
        return {"out_t": out}
    wide = np.dtype("float64" if query.dtype == np.float64 else "float32")
    return {"out": out, "lse": ((*batch, heads, n_q), wide)}


# ------------------------------------------------------------------------------- NaN and inf

_asked: ContextVar[tuple[bool, bool] | None] = ContextVar("sdpa_debug", default=None)


def _checks() -> tuple[bool, bool]:
    """Whether the caller asked JAX to look for NaN, and for inf."""
    asked = _asked.get()
    config: Any = jax.config
    return (config.jax_debug_nans, config.jax_debug_infs) if asked is None else asked


@contextmanager
def unchecked() -> Iterator[None]:
    """Within it only results of the primitives are looked at, even if JAX was asked to look at all.

    The steps around them may hold NaN and inf: masked keys, a bias of -inf, the lse of a row that
    sees no key. They broadcast arrays of several ranks, whatever the caller forbids his own.
    """
    asked, config = _checks(), jax.config
    if not any(asked) and config.jax_numpy_rank_promotion == "allow":  # type: ignore[attr-defined]
        yield
        return
    token = _asked.set(asked)
    try:
        with jax.debug_nans(False), jax.debug_infs(False), jax.numpy_rank_promotion("allow"):
            yield
    finally:
        _asked.reset(token)


def check_values(name: str, results: Iterable[Any]) -> None:
    """Raise JAX's error if it was asked to look for NaN or inf, and one of the results has some."""
    kinds = [
        (kind, test)
        for kind, test, asked in zip(("nan", "inf"), (np.isnan, np.isinf), _checks(), strict=True)
        if asked
    ]
    for x in results if kinds else ():
        if isinstance(x, jax.core.Tracer):
            continue  # when it has a value, a compiled function returns it, at which JAX looks
        for shard in x.addressable_shards:
            for kind, test in kinds:
                if test(np.asarray(shard.data)).any():
                    raise FloatingPointError(f"invalid value ({kind}) encountered in {name}")


# ------------------------------------------------------------------------------- primitives


class Attention(Primitive):
    """One of the primitives, with parameters names, options, and shapes of gradients."""

    def __init__(self, name: str) -> None:
        super().__init__(f"sdpa_attention_{name}")
        self.short = name
        self.multiple_results = True
        primitive: Any = self
        primitive.def_impl(self._run)
        primitive.def_abstract_eval(self._evaluate)
        batching.primitive_batchers[self] = self._batch

    def __call__(self, named: Mapping[str, Any], options: Options, shapes: Shapes = ()) -> Any:
        names = tuple(name for name in _ORDER if name in named)
        names += tuple(name for name in named if name not in INNER)
        args = _same_variance([named[name] for name in names])
        bind: Any = self.bind
        return bind(*args, names=names, options=options, shapes=shapes)

    def _run(self, *args: Any, **params: Any) -> Any:
        # Compile even under disable_jit, because only compiled code can call the handlers. JAX
        # would answer a NaN by calling this rule again.
        with jax.disable_jit(False), unchecked():
            found = _compiled(self, **params)(*args)
        self._check(found)
        return found

    def _check(self, found: Sequence[Any]) -> None:
        """Look for NaN and inf, but not in lse, which is -inf in a row that sees no key."""
        check_values(self.name, found[:1] if self.short == "forward" else found)

    def _evaluate(self, *avals: Any, names: Any, options: Options, shapes: Shapes) -> list[Any]:
        found = results_of(self.short, dict(zip(names, avals, strict=True)), options, shapes)
        return [_like(avals[0], shape, dtype) for shape, dtype in found.values()]

    @unchecked()
    def _batch(
        self, args: Any, dims: Any, *, names: Any, options: Options, shapes: Shapes
    ) -> tuple[Any, Any]:
        """Make one call for the whole batch, whose axis comes first."""
        moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
        size = next(x.shape[0] for x, d in zip(moved, dims, strict=True) if d is not None)
        if options.dropout_p or options.functions or "cu_seqlens_q" in names:
            # The pattern of dropout depends on the batch entry, as functions of the user may, and
            # packed sequences have no batch axis, so these calls run one after another.
            batched = {n: x for n, x, d in zip(names, moved, dims, strict=True) if d is not None}
            others = {n: x for n, x, d in zip(names, moved, dims, strict=True) if d is None}
            found = jax.lax.map(lambda one: self(others | one, options, shapes), batched)
            self._check(found)
        else:
            named = {
                name: x if d is not None or name == "seed" else x[None]
                for name, x, d in zip(names, moved, dims, strict=True)
            }
            shapes = tuple((name, (size, *shape)) for name, shape in shapes)
            found = self(named, options, shapes)
        return found, [0] * len(found)


def _like(aval: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """The abstract value of a result, which varies along the same axes as the operands."""
    spec: Any = jax.sharding.PartitionSpec
    sharding = jax.sharding.NamedSharding(aval.sharding.mesh, spec(*(None,) * len(shape)))
    return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


@functools.lru_cache(maxsize=4096)
def _compiled(primitive: Attention, **params: Any) -> Callable[..., Any]:
    return jax.jit(functools.partial(primitive.bind, **params))


def _varying(x: Any) -> frozenset[str]:
    """The axes of a surrounding shard_map along which `x` differs."""
    aval = jax.typeof(x)
    axes = getattr(aval, "vma", None)  # until JAX 0.8
    return frozenset(aval.manual_axis_type.varying if axes is None else axes)


def _same_variance(args: Sequence[Any]) -> list[Any]:
    """The arguments, each varying along every axis along which one of them does."""
    own = [_varying(x) for x in args]
    every = frozenset().union(*own)
    if not every:
        return list(args)
    lax: Any = jax.lax  # pvary is the name until JAX 0.8
    cast = functools.partial(lax.pcast, to="varying") if hasattr(lax, "pcast") else lax.pvary
    return [
        cast(x, tuple(sorted(every - axes))) if every - axes else x
        for x, axes in zip(args, own, strict=True)
    ]


def _bits(names: Sequence[str], order: Sequence[str]) -> int:
    return sum(1 << order.index(name) for name in names)


def lower(
    target: str, ctx: Any, *operands: Any, names: Any, options: Options, shapes: Shapes
) -> Any:
    """A call of the handler, whose attributes src/xla.h describes."""
    named = dict(zip(names, ctx.avals_in, strict=True))
    if options.functions:
        short = target.rpartition("_")[2]
        found = results_of(short, named, options, shapes)
        lead = lead_of(named, options)

        def run(*args: Any) -> list[Any]:
            return call(short, args, names, options, lead, found)

        return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)
    results = tuple(results_of(target.rpartition("_")[2], named, options, shapes))
    bits = [_bits(names, _ORDER), _bits(results, _RESULTS)]
    rule = jax.ffi.ffi_lowering(target)
    return rule(
        ctx,
        *operands,
        integers=np.array([*bits, *options.integers, *lead_of(named, options)], np.int64),
        numbers=np.array(options.numbers, np.float64),
    )


def _refuse(name: str, ctx: Any, *operands: Any, **params: Any) -> Any:
    """The lowering for all platforms but the CPU."""
    given = ", ".join(ctx.module_context.platforms)
    raise NotImplementedError(
        f"{name}: expected a computation on the CPU, which the kernels of sdpa are for, got one "
        f"for {given}; move the operands by jax.device_put(x, jax.devices('cpu')[0]), or start "
        "with JAX_PLATFORMS=cpu"
    )


def check_sizes(**operands: Any) -> None:
    """Raise a NotImplementedError for shapes of `jax.export.symbolic_shape`."""
    for name, x in operands.items():
        if not all(isinstance(n, int) for n in x.shape):
            sizes = ", ".join(map(str, x.shape))
            raise NotImplementedError(
                f"{name}: expected known sizes, got the symbolic shape ({sizes}); export the "
                "function once for each shape"
            )


def sum_to(x: Any, shape: Sequence[int]) -> Any:
    """`x` summed over the axes that have size 1 in `shape`."""
    axes = tuple(i for i, (n, to) in enumerate(zip(x.shape, shape, strict=True)) if n != to)
    return jnp.sum(x, axes, keepdims=True) if axes else x


FORWARD = Attention("forward")
TANGENT = Attention("tangent")
BACKWARD = Attention("backward")
SECOND = Attention("second")
CURVATURE = Attention("curvature")  # has no handler: _derivatives.py

for _primitive in FORWARD, TANGENT, BACKWARD, SECOND:
    jax.ffi.register_ffi_target(
        _primitive.name, _core._xla_handlers()[_primitive.short], platform="cpu"
    )
    mlir.register_lowering(_primitive, functools.partial(_refuse, _primitive.name))
