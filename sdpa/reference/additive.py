"""Additive attention: scores are w_score^T tanh(query w_query + key w_key + bias)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from sdpa.reference.arrays import (
    Array,
    Gradient,
    Mask,
    broadcast,
    float64,
    in_use,
    shape_of,
    sum_to,
    transpose,
)
from sdpa.reference.derivatives import attention_backward
from sdpa.reference.forward import AttentionForward, attention_forward
from sdpa.reference.logits import logits_of


class AdditiveGradients(NamedTuple):
    """Result of `additive_attention_backward`; None where a gradient was not asked for."""

    query: Gradient
    key: Gradient
    value: Gradient
    w_query: Gradient
    w_key: Gradient
    w_score: Gradient
    bias: Gradient
    attn_mask: Gradient
    sinks: Gradient


def additive_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    w_query: ArrayLike,
    w_key: ArrayLike,
    w_score: ArrayLike,
    bias: ArrayLike | None = None,
    **options: Any,
) -> Array:
    """softmax(scale tanh(query w_query + key w_key + bias) w_score) value: (..., heads, Lq, d_v).

    Bahdanau, Cho and Bengio, "Neural machine translation by jointly learning to align and
    translate" (2015), appendix A.1.2.

    Parameters
    ----------
    query, key, value : (..., heads, Lq, d_q), (..., heads, Lk, d_k), (..., heads, Lk, d_v)
    w_query, w_key, w_score : (d_q, h), (d_k, h), (h,)
    bias : (h,), None
        None means zero.
    **options
        Those of `attention_weights` and `logits_of`, by name; scale is 1 by default.

    Examples
    --------
    >>> import numpy as np
    >>> from sdpa import reference
    >>> weights = np.ones((2, 4)), np.ones((2, 4)), np.ones(4)
    >>> query, key, value = np.ones((1, 2)), np.zeros((3, 2)), np.array([[1.0], [2.0], [6.0]])
    >>> reference.additive_attention(query, key, value, *weights)
    array([[3.]])
    """
    return additive_attention_forward(
        query, key, value, w_query, w_key, w_score, bias, **options
    ).out


def additive_sums(
    query: ArrayLike,
    key: ArrayLike,
    w_query: ArrayLike,
    w_key: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    enable_gqa: bool = False,
) -> Array:
    """query w_query + key w_key + bias of each pair: (..., heads, Lq, Lk, h)."""
    q, k = broadcast(*float64(query, key), enable_gqa=enable_gqa)
    w_query, w_key, bias = float64(w_query, w_key, 0 if bias is None else bias)
    return (q @ w_query)[..., :, None, :] + (k @ w_key)[..., None, :, :] + bias


def _as_dot_products(
    tanh: Array, w_score: ArrayLike, options: dict[str, Any]
) -> tuple[Array, Array, Mask]:
    """(query, key) with the additive scores as their products: the scores, and the unit matrix.

    The score of a masked pair is replaced by 0, so that its NaN or Inf enters no product.
    """
    scores = tanh @ float64(w_score)[0]
    n_k = scores.shape[-1]
    masks = {name: x for name, x in options.items() if name not in _NOT_MASKS}
    visible = logits_of(np.zeros((*scores.shape[:-1], 1)), np.zeros((n_k, 1)), **masks) != -np.inf
    return np.where(visible, scores, 0), np.eye(n_k), visible


_NOT_MASKS = ("scale", "dropout_p", "rng", "sinks", "enable_gqa", "needs", "grad_lse")


@np.errstate(all="ignore")
def additive_attention_forward(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    w_query: ArrayLike,
    w_key: ArrayLike,
    w_score: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    scale: float | None = 1.0,
    **options: Any,
) -> AttentionForward:
    """Additive attention and the log-sum-exp of each row of logits: (out, lse)."""
    gqa = {"enable_gqa": options.get("enable_gqa", False)}
    tanh = np.tanh(additive_sums(query, key, w_query, w_key, bias, **gqa))
    s, one, _ = _as_dot_products(tanh, w_score, options)
    return AttentionForward(*attention_forward(s, one, value, scale=scale, **options))


@np.errstate(all="ignore")
def additive_attention_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    w_query: ArrayLike,
    w_key: ArrayLike,
    w_score: ArrayLike,
    bias: ArrayLike | None,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    scale: float | None = 1.0,
    needs: Collection[str] = ("query", "key", "value", "w_query", "w_key", "w_score", "bias"),
    **options: Any,
) -> AdditiveGradients:
    """Gradients of <grad_out, out> + <grad_lse, lse> with respect to the arguments in `needs`.

    Each has the shape of its argument; bias has one if it is given.
    """
    gqa = {"enable_gqa": options.get("enable_gqa", False)}
    sums = additive_sums(query, key, w_query, w_key, bias, **gqa)
    tanh, slope = np.tanh(sums), np.cosh(sums) ** -2.0
    s, one, visible = _as_dot_products(tanh, w_score, options)
    of_pairs = ("query", "value", *(name for name in needs if name in ("attn_mask", "sinks")))
    pairs = attention_backward(
        grad_out, s, one, value, out, lse, scale=scale, needs=of_pairs, **options
    )

    # s = tanh(a + b) @ w_score, with projections a of the queries and b of the keys
    grad_s, seen = pairs.query[..., None], visible[..., None]
    w_query, w_key, w_score = float64(w_query, w_key, w_score)
    grad_w_score = _sum_rows(np.where(seen, grad_s * tanh, 0))
    grad_sum = np.where(seen, grad_s * w_score * slope, 0)
    grad_a, grad_b = grad_sum.sum(axis=-2), grad_sum.sum(axis=-3)

    # a = query @ w_query + bias; b = key @ w_key
    q, k = broadcast(*float64(query, key), **gqa)
    q, k = (np.where(in_use(grad), x, 0) for x, grad in ((q, grad_a), (k, grad_b)))
    gradients: dict[str, Callable[[], Gradient]] = {
        "query": lambda: sum_to(grad_a @ w_query.T, shape_of(query)),
        "key": lambda: sum_to(grad_b @ w_key.T, shape_of(key)),
        "value": lambda: pairs.value,
        "w_query": lambda: sum_to(transpose(q) @ grad_a, w_query.shape),
        "w_key": lambda: sum_to(transpose(k) @ grad_b, w_key.shape),
        "w_score": lambda: grad_w_score,
        "bias": lambda: None if bias is None else _sum_rows(grad_a),
        "attn_mask": lambda: pairs.attn_mask,
        "sinks": lambda: pairs.sinks,
    }
    return AdditiveGradients(
        **{name: gradient() if name in needs else None for name, gradient in gradients.items()}
    )


def _sum_rows(x: Array) -> Array:
    """Over all axes but the last."""
    total: Array = x.sum(axis=tuple(range(x.ndim - 1)))
    return total
