"""How the compiler cuts a primitive over devices: along batch and heads, which are independent.

A function under `jax.jit` keeps operands that are sharded along these axes where they are; those
that are sharded along others are gathered. The gradient of an operand that is shared along an axis
that is cut is summed over the devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from math import prod
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from sdpa._table import OPERANDS
from sdpa.interop.jax._primitives import (
    BACKWARD,
    FORWARD,
    INNER,
    SECOND,
    TANGENT,
    Attention,
    Options,
    Shapes,
    lead_of,
    lower,
    results_of,
)

# They have no types.
_custom_partitioning: Any = custom_partitioning
_spec: Any = PartitionSpec
_psum: Any = jax.lax.psum

_ROWS = frozenset({*OPERANDS, "out", "grad_out"})
"""Whose heads lie behind their rows with rows_first."""


class Partition:
    """The rules for one call of a primitive."""

    def __init__(
        self,
        primitive: Attention,
        named: Mapping[str, Any],
        options: Options,
        shapes: Shapes,
        call: Callable[..., Any],
    ) -> None:
        self.call, self.names, self.options = call, tuple(named), options
        self.results = tuple(results_of(primitive.short, dict(named), options, shapes))
        self.lead: tuple[int, ...] = lead_of(named, options)
        self.is_packed = "cu_seqlens_q" in named
        # A group of heads shares a key; 0 if there are no groups, or one alone.
        n = named["key"].shape[self.axes("key", named["key"])[-1]]
        self.groups = int(n) if 1 < n < self.lead[-1] else 0

    def axes(self, name: str, x: Any) -> list[Any]:
        """The array's own axis for each batch axis and then the heads, None where it has none."""
        name = name.removesuffix("_t").removesuffix("_u")
        inner, ndim, n_batch = INNER[name], len(x.shape), len(self.lead) - 1
        if name == "seed" or name.startswith("cu_seqlens") or (self.is_packed and inner < 0):
            return [None] * (n_batch + 1)
        heads: int | None = ndim - 1 - inner
        if inner < 0:
            heads = None
        elif self.options.rows_first and name in _ROWS:
            heads = ndim - 2
        return [*range(n_batch), heads]

    def rule(self, mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        """Shardy's rule: names of the axes along which arrays are cut together."""
        alone = (f"x{i}" for i in count())
        sides = [
            ", ".join(
                " ".join(self._factor(name, x, axis) or next(alone) for axis in range(len(x.shape)))
                for name, x in zip(names, arrays, strict=True)
            )
            for names, arrays in ((self.names, operands), (self.results, results))
        ]
        groups = {"g": self.lead[-1] // self.groups} if self.groups else {}
        return " -> ".join(sides), groups

    def _factor(self, name: str, x: Any, axis: int) -> str | None:
        own, n, heads = self.axes(name, x), x.shape[axis], len(self.lead) - 1
        if axis not in own or n == 1 or self.options.dropout_p:
            return None
        i = own.index(axis)
        if i < heads:
            return f"b{i}"
        if n < self.lead[i]:
            return "k"
        return "(k g)" if self.groups else "h"

    def cuts(self, mesh: Any, arrays: Sequence[tuple[str, Any]]) -> list[tuple[str, ...]]:
        """The axes of the mesh along which each leading axis is cut."""
        found: list[tuple[str, ...]] = [()] * len(self.lead)
        if self.options.dropout_p:  # its pattern depends on the place in the whole batch
            return found
        taken: set[str] = set()
        for name, x in arrays:
            spec = [*x.sharding.spec, *[None] * len(x.shape)]
            for i, own in enumerate(self.axes(name, x)):
                if own is None or found[i] or x.shape[own] != self.lead[i]:
                    continue
                axes = (spec[own],) if isinstance(spec[own], str) else tuple(spec[own] or ())
                n = prod(mesh.shape[axis] for axis in axes)
                units = self.groups if i == len(self.lead) - 1 and self.groups else self.lead[i]
                if units % n == 0 and not taken & set(axes):
                    found[i] = axes
                    taken |= set(axes)
        return found

    def shardings(self, mesh: Any, named: Mapping[str, Any], cuts: Sequence[Any]) -> list[Any]:
        found = []
        for name, x in named.items():
            spec: list[Any] = [None] * len(x.shape)
            for own, cut in zip(self.axes(name, x), cuts, strict=True):
                if own is not None and x.shape[own] > 1:
                    spec[own] = cut or None
            found.append(NamedSharding(mesh, _spec(*spec)))
        return found

    def infer(self, mesh: Any, operands: Any, results: Any) -> Any:
        """The shardings of the results, for the partitioner before Shardy."""
        cuts = self.cuts(mesh, list(zip(self.names, operands, strict=True)))
        return self.shardings(mesh, dict(zip(self.results, results, strict=True)), cuts)

    def __call__(self, mesh: Any, operands: Any, results: Any) -> Any:
        """What each device computes, and where operands and results lie."""
        given = dict(zip(self.names, operands, strict=True))
        found = dict(zip(self.results, results, strict=True))
        cuts = self.cuts(mesh, [*given.items(), *found.items()])

        def local(*args: Any) -> Any:
            parts = zip(self.call(*args), found.items(), strict=True)
            return [self._summed(x, name, whole, cuts) for x, (name, whole) in parts]

        return (
            mesh,
            local,
            self.shardings(mesh, found, cuts),
            tuple(self.shardings(mesh, given, cuts)),
        )

    def _summed(self, x: Any, name: str, whole: Any, cuts: Sequence[Any]) -> Any:
        """A gradient, summed over the devices that share its operand."""
        shared = [
            axis
            for own, cut in zip(self.axes(name, whole), cuts, strict=True)
            if own is None or whole.shape[own] == 1
            for axis in cut
        ]
        return _psum(x, tuple(shared)) if shared else x


def _lower(primitive: Attention, ctx: Any, *operands: Any, **params: Any) -> Any:
    """A call of the handler or, where there are several devices, one on each of them."""
    context = ctx.module_context.axis_context
    devices = getattr(context, "device_assignment", None) or ()
    if len(devices) < 2 or getattr(context, "abstract_mesh", None) is None:
        return lower(primitive.name, ctx, *operands, **params)
    if params["options"].functions:
        raise NotImplementedError(
            "score_mod, mask_mod: expected a computation on one device, got one for "
            f"{len(devices)}; call attention in jax.shard_map, where b and h are those of a device"
        )

    bind: Any = primitive.bind

    def call(*args: Any) -> Any:
        given = dict(zip(params["names"], args, strict=True))
        shapes = tuple((name, given[name].shape) for name, _ in params["shapes"])
        return bind(*args, **params | {"shapes": shapes})

    named = dict(zip(params["names"], ctx.avals_in, strict=True))
    rules = Partition(primitive, named, params["options"], params["shapes"], call)
    made = _custom_partitioning(call)
    made.def_partition(rules, rules.infer, sharding_rule=rules.rule)
    return mlir.lower_fun(made, multiple_results=True)(ctx, *operands)


try:
    from jax._src.dispatch import prim_requires_devices_during_lowering as _asks_for_devices
except ImportError:  # then the devices are not known, and operands are gathered
    _asks_for_devices = set()

for _primitive in FORWARD, TANGENT, BACKWARD, SECOND:
    _asks_for_devices.add(_primitive)
    mlir.register_lowering(_primitive, partial(_lower, _primitive), platform="cpu")
