"""Derivatives of the primitives, in terms of the primitives.

With F(x) = out for the operands x, tangents t and u of them, and a gradient g of out:

================ ========================= ============================ =========================
primitive        computes                  along x                      transposed
================ ========================= ============================ =========================
FORWARD          F(x)                      TANGENT                      in value: BACKWARD
TANGENT          DF(x) t                   CURVATURE                    in t: BACKWARD
BACKWARD         DF(x)^T g                 SECOND                       in g: TANGENT
SECOND           gradient of <g, DF(x) t>  by the formula               in g: CURVATURE,
                                                                        in t: SECOND
CURVATURE        D^2 F(x) [t, u]           by the formula               in t or u: SECOND
================ ========================= ============================ =========================

The first four run in O(block) memory. Reverse over forward traces CURVATURE, but runs its
transpose, SECOND. Forward over forward runs CURVATURE, and third derivatives go through the
derivatives of SECOND; both use the formula, on the (Lq, Lk) matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, mlir

from sdpa._table import CONSTANTS
from sdpa.interop.jax import _formula
from sdpa.interop.jax._functions import differentiable
from sdpa.interop.jax._primitives import (
    BACKWARD,
    CURVATURE,
    FORWARD,
    SECOND,
    TANGENT,
    Named,
    Options,
    Shapes,
    add_suffix,
    check_values,
    sum_to,
    unchecked,
    with_suffix,
)


def _zero(x: Any) -> Any:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _nonzero(names: Any, values: Any) -> Named:
    return {n: x for n, x in zip(names, values, strict=True) if not isinstance(x, ad.Zero)}


def _among(named: Named, names: Any) -> Named:
    return {n: named[n] for n in names if n in named}


def _moving(named: Named) -> Named:
    return _among(named, differentiable(named))


def _without(named: Named, *suffixes: str) -> Named:
    return {n: x for n, x in named.items() if not n.endswith(suffixes)}


def _sum(parts: list[Any], like: Any) -> Any:
    """The sum of lists of tangents."""
    if not parts:
        return [_zero(x) for x in like]
    return [reduce(add, same) for same in zip(*parts, strict=True)]


def _refuse_constants(moved: Named) -> None:
    """Raise if a number that has no derivative moves: JAX would take it to be 0."""
    for name in moved:
        if name in CONSTANTS and jnp.issubdtype(moved[name].dtype, jnp.floating):
            raise NotImplementedError(
                f"{name}: has no derivative; wrap it in jax.lax.stop_gradient, or add its bias as "
                "attn_mask"
            )


# --------------------------------------------------------------------------------- along operands


def _forward_jvp(primals: Any, tangents: Any, *, names: Any, options: Options, shapes: Any) -> Any:
    named = dict(zip(names, primals, strict=True))
    out, lse = FORWARD(named, options)
    moved = _nonzero(names, tangents)
    _refuse_constants(moved)
    moved, parts = _moving(moved), []
    if moved:
        kept = lse
        if isinstance(lse, jax.core.Tracer):
            # A compiled function may return what is kept, and JAX may look for inf in it. For a
            # row that sees no key any number serves.
            kept = jnp.where(lse == -jnp.inf, 0, lse)
        named |= {"out": out, "lse": kept} | add_suffix(moved, "_t")
        parts.append(TANGENT(named, options))
    # The public functions that return lse stop its gradient.
    return [out, lse], [*_sum(parts, [out]), _zero(lse)]


def _tangent_jvp(primals: Any, tangents: Any, *, names: Any, options: Options, shapes: Any) -> Any:
    named, moved = dict(zip(names, primals, strict=True)), _nonzero(names, tangents)
    found, parts = TANGENT(named, options), []
    directions = add_suffix(with_suffix(moved, "_t"), "_t")
    if directions:
        parts.append(TANGENT(_without(named, "_t") | directions, options))
    along = _moving(moved)
    if along:
        parts.append(CURVATURE(named | add_suffix(along, "_u"), options))
    return found, _sum(parts, found)


def _backward_jvp(
    primals: Any, tangents: Any, *, names: Any, options: Options, shapes: Shapes
) -> Any:
    """out and lse follow from the operands; their tangents are accounted for."""
    named, moved = dict(zip(names, primals, strict=True)), _nonzero(names, tangents)
    found, parts = BACKWARD(named, options, shapes), []
    if "grad_out" in moved:
        parts.append(BACKWARD(named | {"grad_out": moved["grad_out"]}, options, shapes))
    along = _moving(moved)
    if along:
        parts.append(SECOND(named | add_suffix(along, "_t"), options, shapes))
    return found, _sum(parts, found)


def _formula_jvp(
    primitive: Any,
    formula: Callable[..., Any],
    primals: Any,
    tangents: Any,
    *,
    names: Any,
    options: Options,
    shapes: Shapes,
) -> Any:
    named, moved = dict(zip(names, primals, strict=True)), _nonzero(names, tangents)
    moved = {n: x for n, x in moved.items() if n not in ("out", "lse")}
    found = primitive(named, options, shapes)
    if not moved:
        return found, [_zero(x) for x in found]

    def along(x: Named) -> Any:
        return formula(named | x, options, shapes)

    with unchecked():
        tangents = jax.jvp(along, (_among(named, moved),), (moved,))[1]
    check_values(primitive.name, tangents)
    return found, tangents


# ------------------------------------------------------------------------------------- transposed


def _linear(names: Any, args: Any) -> tuple[Named, Named]:
    """(operands that the primitive is transposed in, the others)."""
    pairs = list(zip(names, args, strict=True))
    linear = {n: x.aval for n, x in pairs if isinstance(x, ad.UndefinedPrimal)}
    return linear, {n: x for n, x in pairs if n not in linear}


def _shapes_of(tangents: Named) -> Shapes:
    return tuple((name, tangents[name].shape) for name in differentiable(tangents))


def _cotangents(names: Any, linear: Named, found: Named) -> list[Any]:
    return [found.get(n, ad.Zero(linear[n])) if n in linear else None for n in names]


def _gradients(primitive: Any, named: Named, options: Options, linear: Named, suffix: str) -> Named:
    """The cotangents of the tangents of this suffix."""
    shapes = _shapes_of(with_suffix(linear, suffix))
    grads = primitive(named, options, shapes)
    return {n + suffix: x for (n, _), x in zip(shapes, grads, strict=True)}


def _forward_transpose(cts: Any, *args: Any, names: Any, options: Options, shapes: Any) -> Any:
    """Transposed in value alone: out is linear in it, and lse does not depend on it."""
    linear, named = _linear(names, args)
    if set(linear) != {"value"}:
        raise NotImplementedError(f"attention is linear in value alone, not in {[*linear]}")
    if isinstance(cts[0], ad.Zero):
        return _cotangents(names, linear, {})
    value = linear["value"]
    named["value"] = jnp.zeros(value.shape, value.dtype)
    out, lse = FORWARD(named, options)
    named |= {"grad_out": cts[0], "out": out, "lse": lse}
    (found,) = BACKWARD(named, options, _shapes_of(linear))
    return _cotangents(names, linear, {"value": found})


def _tangent_transpose(cts: Any, *args: Any, names: Any, options: Options, shapes: Any) -> Any:
    linear, named = _linear(names, args)
    if isinstance(cts[0], ad.Zero):
        return _cotangents(names, linear, {})
    named = _without(named, "_t") | {"grad_out": cts[0]}
    return _cotangents(names, linear, _gradients(BACKWARD, named, options, linear, "_t"))


def _backward_transpose(cts: Any, *args: Any, names: Any, options: Options, shapes: Shapes) -> Any:
    linear, named = _linear(names, args)
    tangents = _nonzero([n for n, _ in shapes], cts)
    if not tangents:
        return _cotangents(names, linear, {})
    (found,) = TANGENT(named | add_suffix(tangents, "_t"), options)
    return _cotangents(names, linear, {"grad_out": sum_to(found, linear["grad_out"].shape)})


def _second_transpose(cts: Any, *args: Any, names: Any, options: Options, shapes: Shapes) -> Any:
    linear, named = _linear(names, args)
    tangents = _nonzero([n for n, _ in shapes], cts)
    if not tangents:
        return _cotangents(names, linear, {})
    if "grad_out" not in linear:
        named = _without(named, "_t") | add_suffix(tangents, "_t")
        return _cotangents(names, linear, _gradients(SECOND, named, options, linear, "_t"))
    (found,) = CURVATURE(named | add_suffix(tangents, "_u"), options)
    return _cotangents(names, linear, {"grad_out": sum_to(found, linear["grad_out"].shape)})


def _curvature_transpose(cts: Any, *args: Any, names: Any, options: Options, shapes: Any) -> Any:
    linear, named = _linear(names, args)
    if isinstance(cts[0], ad.Zero):
        return _cotangents(names, linear, {})
    moving, fixed = ("_t", "_u") if with_suffix(linear, "_t") else ("_u", "_t")
    fixed_tangents = add_suffix(with_suffix(named, fixed), "_t")
    named = _without(named, "_t", "_u") | fixed_tangents | {"grad_out": cts[0]}
    return _cotangents(names, linear, _gradients(SECOND, named, options, linear, moving))


ad.primitive_jvps[FORWARD] = _forward_jvp
ad.primitive_jvps[TANGENT] = _tangent_jvp
ad.primitive_jvps[BACKWARD] = _backward_jvp
ad.primitive_jvps[SECOND] = partial(_formula_jvp, SECOND, _formula.second)
ad.primitive_jvps[CURVATURE] = partial(_formula_jvp, CURVATURE, _formula.curvature)
ad.primitive_transposes[FORWARD] = _forward_transpose
ad.primitive_transposes[TANGENT] = _tangent_transpose
ad.primitive_transposes[BACKWARD] = _backward_transpose
ad.primitive_transposes[SECOND] = _second_transpose
ad.primitive_transposes[CURVATURE] = _curvature_transpose


@unchecked()
def _run_curvature(*args: Any, names: Any, options: Options, shapes: Shapes) -> Any:
    return _formula.curvature(dict(zip(names, args, strict=True)), options, shapes)


mlir.register_lowering(CURVATURE, mlir.lower_fun(_run_curvature, multiple_results=True))
