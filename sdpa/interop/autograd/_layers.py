"""`sdpa.MultiHeadAttention` for autograd: composed of matrix products and `attention`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import autograd.numpy as anp

import sdpa
from sdpa.interop.autograd._attention import attention

__all__ = ["multi_head_attention"]


def multi_head_attention(
    layer: sdpa.MultiHeadAttention,
    parameters: Mapping[str, Any],
    x: Any,
    context: Any = None,
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
    **options
        As in `sdpa.MultiHeadAttention.forward`, differentiable where those of `attention` are.

    Returns
    -------
    (..., L, d_model) array

    Raises
    ------
    KeyError
        A parameter is missing.
    TypeError, ValueError
        As `sdpa.attention` and NumPy's matrix product.

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
    source = x if context is None else context
    query = _heads(x, parameters["w_query"], layer.heads)
    key = _heads(source, parameters["w_key"], layer.kv_heads)
    w_value = parameters["w_key" if layer.tied_kv else "w_value"]
    value = _heads(x if layer.swap_roles else source, w_value, layer.kv_heads)
    if layer.scale == "learned":
        query = query * parameters["scale"][:, None, None]
    if layer.swap_roles:
        query, key = key, query
    options |= {"scale": layer._kernel_scale, "enable_gqa": layer.kv_heads != layer.heads}
    out = anp.swapaxes(attention(query, key, value, **options), -3, -2)
    merged = anp.reshape(out, (*anp.shape(out)[:-2], layer.heads * layer.d_v))
    return anp.matmul(merged, parameters["w_out"])


def _heads(x: Any, w: Any, heads: int) -> Any:
    """x w, its columns split into heads: (..., heads, L, width)."""
    width = anp.shape(w)[-1] // heads
    return anp.swapaxes(anp.reshape(anp.matmul(x, w), (*anp.shape(x)[:-1], heads, width)), -3, -2)
