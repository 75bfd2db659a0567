"""The parts of the laboratory's models besides attention, as primitives of autograd.

Composed of autograd's own operations, each would take several passes over memory; a primitive takes
one forward and one backward. All keep the dtype of their input.
"""

from __future__ import annotations

from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.extend import defvjp, primitive

import sdpa


@primitive
def linear(x: Any, w: Any) -> Any:
    """x w: (..., d), (d, h) -> (..., h), as one product of matrices."""
    return (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], w.shape[-1])


defvjp(
    linear,
    lambda y, x, w: lambda g: linear(g, w.T),
    lambda y, x, w: lambda g: x.reshape(-1, x.shape[-1]).T @ g.reshape(-1, g.shape[-1]),
)


@primitive
def linear_each(x: Any, w: Any) -> Any:
    """x w with a matrix of its own for every model: (models, ..., d), (models, d, h).

    Where x has fewer leading entries, model i has entry i mod len(x): nothing is copied.
    """
    product = _flat(x) @ w.reshape(-1, len(x), *w.shape[1:])
    return product.reshape(len(w), *x.shape[1:-1], w.shape[-1])


def _flat(x: Any) -> Any:
    """(models, ..., d) -> (models, tokens, d)."""
    return x.reshape(len(x), -1, x.shape[-1])


def _linear_each_vjp(y: Any, x: Any, w: Any) -> Any:
    def vjp(g: Any) -> Any:
        g = _flat(g).reshape(-1, *_flat(x).shape[:2], w.shape[-1])
        return (_flat(x).swapaxes(-1, -2) @ g).reshape(w.shape)

    return vjp


defvjp(
    linear_each,
    lambda y, x, w: lambda g: (_flat(g) @ w.swapaxes(-1, -2)).reshape(-1, *x.shape).sum(axis=0),
    _linear_each_vjp,
)


@primitive
def embed(table: Any, index: Any) -> Any:
    """Rows of a table: (n, d), (...) int -> (..., d)."""
    return table[index]


def _embed_vjp(rows: Any, table: Any, index: Any) -> Any:
    def vjp(g: Any) -> Any:
        # A product with ones is faster than NumPy's unbuffered addition.
        picked = (index.ravel() == np.arange(len(table))[:, None]).astype(g.dtype)
        return picked @ g.reshape(-1, g.shape[-1])

    return vjp


defvjp(embed, _embed_vjp)


@primitive
def relu(x: Any) -> Any:
    """max(x, 0)."""
    return np.maximum(x, 0)


defvjp(relu, lambda y, x: lambda g: g * (y > 0))


@primitive
def rms_norm(x: Any) -> Any:
    """Each row divided by the root of its mean square plus 1e-5: Zhang and Sennrich (2019)."""
    return x * _inverse_rms(x)


def _inverse_rms(x: Any) -> Any:
    mean_square = np.einsum("...i,...i->...", x, x)[..., None] / np.float32(x.shape[-1])
    return (mean_square + np.float32(1e-5)) ** np.float32(-0.5)


def _rms_norm_vjp(y: Any, x: Any) -> Any:
    def vjp(g: Any) -> Any:
        mean = np.einsum("...i,...i->...", g, y)[..., None] / np.float32(x.shape[-1])
        return (g - y * mean) * _inverse_rms(x)

    return vjp


defvjp(rms_norm, _rms_norm_vjp)


@primitive
def cross_entropy(logits: Any, target: Any) -> Any:
    """-log softmax(logits)[target] in nats: (..., n), (...) int -> (...)."""
    log_p = sdpa.log_softmax(logits)
    return -np.take_along_axis(log_p, target[..., None], axis=-1)[..., 0]


def _cross_entropy_vjp(loss: Any, logits: Any, target: Any) -> Any:
    def vjp(g: Any) -> Any:
        grad = np.ascontiguousarray(sdpa.softmax(logits))
        grad.reshape(-1, grad.shape[-1])[np.arange(target.size), target.ravel()] -= 1
        grad *= g[..., None]
        return grad

    return vjp


defvjp(cross_entropy, _cross_entropy_vjp)


def split_heads(x: Any, heads: int) -> Any:
    """(..., L, heads d) -> (..., heads, L, d), a view."""
    *lead, n, width = x.shape
    return anp.swapaxes(anp.reshape(x, (*lead, n, heads, width // heads)), -3, -2)


def join_heads(x: Any) -> Any:
    """(..., heads, L, d) -> (..., L, heads d)."""
    *lead, heads, n, d = x.shape
    return anp.reshape(anp.swapaxes(x, -3, -2), (*lead, n, heads * d))
