"""Broadcasting, sums over visible pairs, and the sums that broadcasting becomes in a gradient."""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]
Axis: TypeAlias = int | tuple[int, ...] | None
Gradient: TypeAlias = Any
"""An array; None where it was not asked for."""

T = TypeVar("T", bound=np.generic)


def float64(*arrays: ArrayLike) -> list[Array]:
    return [np.asarray(x, np.float64) for x in arrays]


def shape_of(x: ArrayLike | None) -> tuple[int, ...]:
    return np.asarray(x).shape


def transpose(x: NDArray[T]) -> NDArray[T]:
    return np.swapaxes(x, -1, -2)


def broadcast(q: Array, *operands: Array, enable_gqa: bool) -> list[Array]:
    """q and the operands on common leading axes, each key head repeated for its query heads."""
    if enable_gqa:
        operands = tuple(_repeat_heads(x, q) for x in operands)
    lead = np.broadcast_shapes(q.shape[:-2], *(x.shape[:-2] for x in operands))
    return [np.broadcast_to(x, lead + x.shape[-2:]) for x in (q, *operands)]


def _repeat_heads(x: Array, q: Array) -> Array:
    heads = q.shape[-3] if q.ndim > 2 else 1
    return x if x.ndim < 3 else np.repeat(x, heads // max(x.shape[-3], 1), axis=-3)


def per_head(x: ArrayLike, lead: tuple[int, ...]) -> Array:
    """Numbers (..., heads) as a column of matrices: (..., heads, 1, 1), or (1, 1) without heads."""
    return np.broadcast_to(x, lead or (1,)).reshape(*lead, 1, 1)


def sum_visible(weights: Array, x: Array, visible: Mask) -> Array:
    """sum_j weights[i, j] x[j] over visible (i, j): (..., I, J), (..., J, d) -> (..., I, d)."""
    finite = np.isfinite(x)
    total = np.where(visible, weights, 0) @ np.where(finite, x, 0)
    # A matrix product would let 0 * NaN through, so rows with NaN or Inf are added one by one.
    for j in np.unique(np.nonzero(~finite)[-2]):
        reached = visible[..., j, None] & ~finite[..., j, None, :]
        total += np.where(reached, weights[..., j, None] * x[..., j, None, :], 0)
    return total


def sum_to(grad: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes along which `shape` was broadcast, and over groups of query heads."""
    if len(shape) > 2 and grad.shape[-3] != shape[-3]:
        groups = (shape[-3], grad.shape[-3] // max(shape[-3], 1))
        grad = grad.reshape(*grad.shape[:-3], *groups, *grad.shape[-2:]).sum(axis=-3)
    grad = grad.sum(axis=tuple(range(grad.ndim - len(shape))))
    kept: Array = grad.sum(axis=tuple(a for a, n in enumerate(shape) if n == 1), keepdims=True)
    return kept


def sum_to_heads(grad: Array, shape: tuple[int, ...]) -> Array:
    """The reverse of `per_head`: rows (..., heads, Lq) summed to the shape of (..., heads)."""
    grad = grad.sum(axis=-1)
    return sum_to(grad if grad.ndim else grad.reshape(1), shape)


def in_use(grad: Array) -> Mask:
    """Rows whose gradient is not 0; what the others hold must not matter, even NaN."""
    rows: Mask = (grad != 0).any(axis=-1, keepdims=True)
    return rows
