"""`sdpa.MultiHeadAttention` for autograd: composed of products, norm, rotation, `attention`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import autograd.numpy as anp
import numpy as np

import sdpa
from sdpa._arguments import checked_options, checked_rows
from sdpa._options import LayerOptions
from sdpa.interop.autograd._attention import attention
from sdpa.interop.autograd._modes import plain
from sdpa.interop.autograd._scores import rotary_embedding
from sdpa.mechanisms._multi_head_arguments import check_names, positions_of
from sdpa.mechanisms.cosine import row_scales

__all__ = ["multi_head_attention"]


def multi_head_attention(
    layer: sdpa.MultiHeadAttention,
    parameters: Mapping[str, Any],
    x: Any,
    context: Any = None,
    *,
    positions: Any = None,
    context_positions: Any = None,
    **options: Any,
) -> Any:
    """The layer with other parameters, differentiable in these and in its arrays.

    Parameters
    ----------
    layer : sdpa.MultiHeadAttention
        Defines the heads, the scale of scores and the projections.
    parameters : mapping
        Like `layer.parameters`, which can serve as the starting point.
    x, context
        As in `sdpa.MultiHeadAttention.forward`. float32 or float64: 16-bit arrays would be rounded
        after each product.
    positions, context_positions : optional
        As in `sdpa.MultiHeadAttention.forward`; they have no derivative.
    **options
        As in `sdpa.MultiHeadAttention.forward`, differentiable where those of `attention` are.

    Returns
    -------
    (..., L, d_model) array

    Raises
    ------
    TypeError, ValueError
        As `sdpa.attention` and NumPy's matrix product; also if the parameters have other names than
        the layer's, or if an option is not one of the layer.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> from autograd import grad
    >>> from sdpa.interop.autograd import multi_head_attention
    >>> layer, x = sdpa.MultiHeadAttention(8, 2, dtype=np.float64, rng=0), np.eye(5, 8)
    >>> loss = lambda parameters: np.sum(multi_head_attention(layer, parameters, x) ** 2)
    >>> gradient = grad(loss)(layer.parameters)
    >>> for name in gradient:
    ...     layer.parameters[name] -= 0.1 * gradient[name]
    """
    options = checked_options(multi_head_attention, options, LayerOptions.__annotations__)
    check_names(layer, plain(parameters))
    for name, y, width in (("x", x, layer.d_model), ("context", context, layer.d_context)):
        if y is not None:
            checked_rows(name, np.asarray(plain(y)), f"L, {width}")
    source = x if context is None else context
    context_rows = None if context is None else anp.shape(context)[:-1]
    given = (None if y is None else np.asarray(y) for y in (positions, context_positions))
    at = positions_of(layer, anp.shape(x)[:-1], context_rows, *given)
    query = _placed(layer, parameters, "query", _heads(layer, parameters, "query", x), at[0])
    key = _placed(layer, parameters, "key", _heads(layer, parameters, "key", source), at[1])
    of_value = x if layer.swap_roles else source
    value = _heads(layer, parameters, "key" if layer.tied_kv else "value", of_value)
    if layer.swap_roles:
        query, key = key, query
    scale = layer._kernel_scale(parameters)
    options |= {"scale": scale, "enable_gqa": layer.kv_heads != layer.heads}
    out = anp.swapaxes(attention(query, key, value, **options), -3, -2)
    merged = anp.reshape(out, (*anp.shape(out)[:-2], layer.heads * layer.d_v))
    return _product(parameters, "out", merged)


def _product(parameters: Mapping[str, Any], kind: str, x: Any) -> Any:
    """x w, and the bias if there is one."""
    product = anp.matmul(x, parameters[f"w_{kind}"])
    return product + parameters[f"b_{kind}"] if f"b_{kind}" in parameters else product


def _heads(layer: sdpa.MultiHeadAttention, parameters: Mapping[str, Any], kind: str, x: Any) -> Any:
    """The product, its columns split into heads: (..., heads, L, width)."""
    heads = layer.heads if kind == "query" else layer.kv_heads
    product = _product(parameters, kind, x)
    *rows, columns = anp.shape(product)
    return anp.swapaxes(anp.reshape(product, (*rows, heads, columns // heads)), -3, -2)


def _placed(
    layer: sdpa.MultiHeadAttention, parameters: Mapping[str, Any], kind: str, x: Any, at: Any
) -> Any:
    """Queries or keys, normalised, then rotated."""
    if layer.qk_norm:
        power, least = row_scales(np.asarray(plain(x)), math.sqrt(layer.norm_eps))
        x = x * power
        square = anp.mean(x * x, axis=-1, keepdims=True) + np.square(least).astype(power.dtype)
        x = x / anp.sqrt(square) * parameters[f"g_{kind}"]
    return x if at is None else rotary_embedding(x, at, **layer._rotation)
