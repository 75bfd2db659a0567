"""What `sdpa.MultiHeadAttention` computes around its attention: products, norm and rotation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import numpy as np

from sdpa._arrays import Array, rows_in_use, widen
from sdpa.mechanisms._definition import Definition, Positions
from sdpa.mechanisms.cosine import row_scales
from sdpa.mechanisms.rotary import rotary_embedding, rotary_embedding_backward


def product(x: Array, w: Array) -> Array:
    """x w as one matrix product over all rows: (..., L, d), (d, h) -> (..., L, h)."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return (rows @ w).reshape(*x.shape[:-1], w.shape[-1])


def by_heads(x: Array, w: Array, b: Array | None, heads: int) -> Array:
    """x w + b, its columns split into heads: (..., L, d) -> (..., heads, L, width), a view."""
    projected = product(widen(x), widen(w))
    if b is not None:
        projected += widen(b)
    return np.swapaxes(projected.reshape(*x.shape[:-1], heads, w.shape[-1] // heads), -3, -2)


def merged(x: Array) -> Array:
    """The reverse of the split: (..., heads, L, width) -> (..., L, heads width)."""
    x = np.swapaxes(x, -3, -2)
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


class RootMeanSquare:
    """Rows divided by the square root of their mean square plus eps, and the derivative of that."""

    def __init__(self, x: Array, eps: float) -> None:
        self._power, least = row_scales(x, math.sqrt(eps))
        y = x * self._power
        square = np.einsum("...i,...i->...", y, y, dtype=np.float64)[..., None] / x.shape[-1]
        self._inverse = (1 / np.sqrt(square + least**2)).astype(x.dtype)
        self.unit = y * self._inverse

    def backward(self, grad: Array) -> Array:
        """The gradient with respect to x from that with respect to unit."""
        along = np.einsum("...i,...i->...", self.unit, grad)[..., None] / grad.shape[-1]
        result = (grad - self.unit * along) * self._inverse * self._power
        # Rows without influence on the result may hold NaN.
        return np.where(rows_in_use(grad), result, 0)

    def gain_gradient(self, grad: Array) -> Array:
        """The gradient (d,) of the gain in unit * gain from that with respect to the product."""
        products = np.where(rows_in_use(grad), grad * self.unit, 0)
        return cast(Array, products.sum(axis=tuple(range(products.ndim - 1))))


def _heads(layer: Definition, given: Mapping[str, Array], kind: str, x: Array) -> Array:
    """x's product of a kind, by heads."""
    heads = layer.heads if kind == "query" else layer.kv_heads
    return by_heads(x, given[f"w_{kind}"], given.get(f"b_{kind}"), heads)


@np.errstate(all="ignore")
def project(
    layer: Definition, given: Mapping[str, Array], x: Array, source: Array, at: Positions
) -> tuple[Array, Array, Array]:
    """Query, key and value for the kernel."""
    query, key = _heads(layer, given, "query", x), _heads(layer, given, "key", source)
    of_value = x if layer.swap_roles else source
    if layer.tied_kv and of_value is source:
        value = key
    else:
        value = _heads(layer, given, "key" if layer.tied_kv else "value", of_value)
    query = _placed(layer, given, "query", query, at[0])
    key = _placed(layer, given, "key", key, at[1])
    return (key, query, value) if layer.swap_roles else (query, key, value)


def _placed(
    layer: Definition,
    given: Mapping[str, Array],
    kind: str,
    x: Array,
    positions: Array | None,
) -> Array:
    """Queries or keys, normalised, then rotated."""
    if layer.qk_norm:
        x = RootMeanSquare(x, layer.norm_eps).unit * widen(given[f"g_{kind}"])
    return x if positions is None else rotary_embedding(x, positions, **layer._rotation)


def backward_placed(
    layer: Definition,
    given: Mapping[str, Array],
    kind: str,
    x: Array,
    positions: Array | None,
    by: Array,
) -> tuple[Array, dict[str, Array]]:
    """The gradient of x's product from that of `_placed`, and that of the gain if there is one."""
    if positions is not None:
        by = rotary_embedding_backward(by, positions, **layer._rotation)
    if not layer.qk_norm:
        return by, {}
    gain = f"g_{kind}"
    norm = RootMeanSquare(_heads(layer, given, kind, x), layer.norm_eps)
    return norm.backward(by * widen(given[gain])), {gain: norm.gain_gradient(by)}
