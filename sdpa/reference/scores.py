"""Attention with other scores: cosine, bilinear."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from sdpa.reference.arrays import Array, Gradient, float64, in_use, sum_to, transpose
from sdpa.reference.derivatives import attention_backward
from sdpa.reference.forward import AttentionForward, attention_forward


class CosineGradients(NamedTuple):
    """Result of `cosine_attention_backward`; None where a gradient was not asked for."""

    query: Gradient
    key: Gradient
    value: Gradient
    temperature: float | None
    attn_mask: Gradient
    sinks: Gradient


class BilinearGradients(NamedTuple):
    """Result of `bilinear_attention_backward`; None where a gradient was not asked for."""

    query: Gradient
    key: Gradient
    value: Gradient
    weight: Gradient
    attn_mask: Gradient
    sinks: Gradient


def cosine_attention_forward(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    temperature: float = 1.0,
    eps: float = 1e-12,
    **options: Any,
) -> AttentionForward:
    """softmax(cos(q_i, k_j) / temperature + attn_mask) value, and the log-sum-exp of its rows.

    A length below eps counts as eps. Henry et al., "Query-key normalization for transformers"
    (2020), section 3.
    """
    q, k = (unit(x, eps) for x in float64(query, key))
    return attention_forward(q, k, value, scale=1 / temperature, **options)


@np.errstate(all="ignore")
def cosine_attention_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    temperature: float = 1.0,
    eps: float = 1e-12,
    needs: Collection[str] = ("query", "key", "value"),
    **options: Any,
) -> CosineGradients:
    """Gradients of <grad_out, out> + <grad_lse, lse> with respect to the arguments in `needs`."""
    query, key = float64(query, key)
    q, k = unit(query, eps), unit(key, eps)
    inner = {"query", "key", *needs} - {"temperature"}
    g = attention_backward(
        grad_out, q, k, value, out, lse, scale=1 / temperature, needs=tuple(inner), **options
    )
    return CosineGradients(
        unit_backward(g.query, query, eps) if "query" in needs else None,
        unit_backward(g.key, key, eps) if "key" in needs else None,
        g.value,
        # The scores are q . k / temperature, so d/d temperature is -1/temperature times <q, d/dq>.
        -np.where(in_use(g.query), q * g.query, 0).sum() / temperature
        if "temperature" in needs
        else None,
        g.attn_mask,
        g.sinks,
    )


@np.errstate(all="ignore")
def bilinear_attention_forward(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, weight: ArrayLike, **options: Any
) -> AttentionForward:
    """softmax(scale query weight key^T + attn_mask) value, and the log-sum-exp of its rows.

    Luong et al., "Effective approaches to attention-based neural machine translation" (2015),
    section 3.1, the score "general".
    """
    query, weight = float64(query, weight)
    return attention_forward(query @ weight, key, value, **options)


@np.errstate(all="ignore")
def bilinear_attention_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    weight: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    needs: Collection[str] = ("query", "key", "value", "weight"),
    **options: Any,
) -> BilinearGradients:
    """Gradients of <grad_out, out> + <grad_lse, lse> with respect to the arguments in `needs`."""
    query, weight = float64(query, weight)
    inner = {"query", *needs} - {"weight"}
    g = attention_backward(
        grad_out, query @ weight, key, value, out, lse, needs=tuple(inner), **options
    )
    # The forward was: projected = query @ weight
    used_query = np.where(in_use(g.query), query, 0)
    return BilinearGradients(
        sum_to(g.query @ transpose(weight), query.shape) if "query" in needs else None,
        g.key,
        g.value,
        sum_to(transpose(used_query) @ g.query, weight.shape) if "weight" in needs else None,
        g.attn_mask,
        g.sinks,
    )


@np.errstate(all="ignore")
def unit(x: Array, eps: float) -> Array:
    """x / max(norm x, eps), row by row."""
    return x / np.maximum(_norm(x), eps)


@np.errstate(all="ignore")
def unit_backward(grad: Array, x: Array, eps: float) -> Array:
    """Gradient of `unit`: (g - u <u, g>) / norm, where the norm is at least eps; else g / eps."""
    norm, u = _norm(x), unit(x, eps)
    across = grad - np.where(norm >= eps, u * (u * grad).sum(axis=-1, keepdims=True), 0)
    return np.where(in_use(grad), across / np.maximum(norm, eps), 0)


def _norm(x: Array) -> Array:
    largest = abs(x).max(axis=-1, keepdims=True, initial=0)
    largest = np.where(largest > 0, largest, 1)
    squares: Array = ((x / largest) ** 2).sum(axis=-1, keepdims=True)
    return largest * np.sqrt(squares)
