"""Softmax, its logarithm and its normaliser along any axes; their gradients."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from sdpa.reference.arrays import Array, Axis, float64, sum_to


@np.errstate(all="ignore")
def softmax(
    x: ArrayLike, axis: Axis = -1, *, temperature: float = 1.0, where: ArrayLike | None = None
) -> Array:
    """p = exp(x / temperature) / sum exp(x / temperature) over `axis`: int, several, None (all).

    An element is left out, with p = 0, where `where` is False or x is -inf. If none is left, all p
    are 0.
    """
    x = included(x, where) / temperature
    e = np.exp(x - finite_max(x, axis))
    total = e.sum(axis=axis, keepdims=True)
    return np.where(x == -np.inf, 0, e / total)


@np.errstate(all="ignore")
def log_softmax(
    x: ArrayLike, axis: Axis = -1, *, temperature: float = 1.0, where: ArrayLike | None = None
) -> Array:
    """Log of `softmax`: x / temperature - logsumexp(x / temperature), -inf where x is left out."""
    x = included(x, where) / temperature
    lse = logsumexp(x, axis, keepdims=True)
    return np.where(x == -np.inf, x, np.where(lse == np.inf, np.nan, x - lse))


@np.errstate(all="ignore")
def logsumexp(
    x: ArrayLike, axis: Axis = -1, *, where: ArrayLike | None = None, keepdims: bool = False
) -> Array:
    """log sum exp(x) over `axis`, as m + log sum exp(x - m), m the maximum; -inf over nothing."""
    x = included(x, where)
    m = finite_max(x, axis)
    lse = m + np.log(np.exp(x - m).sum(axis=axis, keepdims=True))
    lse = np.where(m == np.inf, m, lse)
    return lse if keepdims else lse.squeeze(axis)


@np.errstate(all="ignore")
def weighted_logsumexp(
    x: ArrayLike, b: ArrayLike, axis: Axis = -1, *, where: ArrayLike | None = None
) -> tuple[Array, Array]:
    """log |sum b exp(x)| over `axis`, and the sign of the sum; b = 0 leaves an element out.

    b exp(x) is sign(b) exp(z) with z = x + log |b|; beside an infinite term others do not count.
    """
    x, b = np.broadcast_arrays(*float64(x, b))
    x = included(x, where)
    z = np.where((b == 0) | (x == -np.inf), -np.inf, x + np.log(abs(b)))
    m = finite_max(z, axis)
    terms = np.sign(b) * np.where(z == np.inf, np.inf, np.exp(z - m))
    terms = np.where(z == -np.inf, 0, terms)
    total: Array = terms.sum(axis=axis, keepdims=True)
    return (m + np.log(abs(total))).squeeze(axis), np.sign(total).squeeze(axis)


@np.errstate(all="ignore")
def softmax_backward(
    grad: ArrayLike, weights: ArrayLike, axis: Axis = -1, *, temperature: float = 1.0
) -> Array:
    """Gradient of softmax, p = exp(x / temperature) / sum: dx = p (g - sum g p) / temperature."""
    g, p = float64(grad, weights)
    mean: Array = (g * p).sum(axis=axis, keepdims=True)
    return p * (g - mean) / temperature


@np.errstate(all="ignore")
def log_softmax_backward(
    grad: ArrayLike, log_weights: ArrayLike, axis: Axis = -1, *, temperature: float = 1.0
) -> Array:
    """Gradient of log_softmax, log p = x / temperature - lse: dx = (g - p sum g) / temperature.

    An element that was left out (log p = -inf) has gradient 0, and its g enters no sum.
    """
    g, log_p = float64(grad, log_weights)
    g = np.where(log_p == -np.inf, 0, g)
    total: Array = g.sum(axis=axis, keepdims=True)
    return np.where(log_p == -np.inf, 0, g - np.exp(log_p) * total) / temperature


@np.errstate(all="ignore")
def logsumexp_backward(grad: ArrayLike, x: ArrayLike, lse: ArrayLike, axis: Axis = -1) -> Array:
    """Gradient of logsumexp: dx = g exp(x - lse); grad, lse with or without the summed axes."""
    g, x, lse = float64(grad, x, lse)
    g, lse = (y.reshape(x.sum(axis=axis, keepdims=True).shape) for y in (g, lse))
    return np.where(x == -np.inf, 0, g * np.exp(x - lse))


@np.errstate(all="ignore")
def weighted_logsumexp_backward(
    grad: ArrayLike, x: ArrayLike, b: ArrayLike, lse: ArrayLike, sign: ArrayLike, axis: Axis = -1
) -> tuple[Array, Array]:
    """Gradients of weighted_logsumexp: dx = g sign b exp(x - lse), db = g sign exp(x - lse).

    Where g or the sign is 0, so is db, even that of a sum of 0.
    """
    g, x, b, lse, sign = float64(grad, x, b, lse, sign)
    rows = (x + b).sum(axis=axis, keepdims=True).shape
    g, lse, sign = (y.reshape(rows) for y in (g, lse, sign))
    x_all, b_all = np.broadcast_arrays(x, b)
    p, left_out = g * sign * np.exp(x_all - lse), x_all == -np.inf
    dx = np.where(left_out | (b_all == 0), 0, b_all * p)
    db = np.where(left_out | (g * sign == 0), 0, p)
    return sum_to(dx, x.shape), sum_to(db, b.shape)


@np.errstate(all="ignore")
def softmax_jacobian(weights: ArrayLike, axis: int = -1, *, temperature: float = 1.0) -> Array:
    """J[..., i, j] = d p_i / d x_j = p_i (delta_ij - p_j) / temperature, its two axes last."""
    p = np.moveaxis(np.asarray(weights, np.float64), axis, -1)
    return (p[..., :, None] * (np.eye(p.shape[-1]) - p[..., None, :])) / temperature


def included(x: ArrayLike, where: ArrayLike | None) -> Array:
    """x as float64, -inf where it is left out."""
    x = np.asarray(x, np.float64)
    return x if where is None else np.where(where, x, -np.inf)


def finite_max(x: Array, axis: Axis) -> Array:
    """Maximum along `axis`, kept as an axis; 0 where it is -inf, so that x minus it stays -inf."""
    m = x.max(axis=axis, keepdims=True, initial=-np.inf)
    return np.where(m == -np.inf, 0, m)
