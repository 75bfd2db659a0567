"""What every routine of the package means: its definition in float64 NumPy.

Read this page first. It is slow, it builds the whole (Lq, Lk) matrix, and the tests hold every
kernel against it.

Shapes
------
========= ===================== ==========================================================
query     (..., heads, Lq, d_k) leading axes broadcast as in NumPy; (L, d) alone works too
key       (..., heads, Lk, d_k)
value     (..., heads, Lk, d_v)
attn_mask (..., Lq, Lk)         boolean, True = attend; or floating, added to the scores
out       (..., heads, Lq, d_v)
lse       (..., heads, Lq)      log of the sum of the exponentials of a row of scores
========= ===================== ==========================================================

Arguments of any real type are converted to float64, and so are the results. Nothing is checked.

Masked pairs
------------
The score of a pair (query i, key j) that some mask forbids is -inf. The reverse holds too: a
score of -inf counts as masked, wherever it comes from. What is masked is left out of every sum,
never multiplied by zero (0 * NaN would be NaN), so that whatever a masked key or value holds cannot
be felt. A row without any visible key has weights 0, out 0, lse -inf and passes no gradient.

Options
-------
The functions on attention take the options of `attention_weights`, explained there, as **options.
"""

from typing import NamedTuple

import numpy as np

__all__ = [
    "AttentionForward",
    "AttentionGradients",
    "attention",
    "attention_backward",
    "attention_forward",
    "attention_weights",
    "log_softmax",
    "log_softmax_backward",
    "logsumexp",
    "logsumexp_backward",
    "merge_attention",
    "softmax",
    "softmax_backward",
    "softmax_jacobian",
]


class AttentionForward(NamedTuple):
    """Result of `attention_forward`."""

    out: np.ndarray
    lse: np.ndarray


class AttentionGradients(NamedTuple):
    """Result of `attention_backward`; None where a gradient was not asked for."""

    query: np.ndarray | None
    key: np.ndarray | None
    value: np.ndarray | None
    attn_mask: np.ndarray | None


# ---------------------------------------------------------------------- attention


def attention(query, key, value, attn_mask=None, **options):
    """softmax(scale query key^T + attn_mask) value: (..., heads, Lq, d_v).

    Vaswani et al., "Attention is all you need" (2017), equation 1.

    Examples
    --------
    >>> import numpy as np
    >>> from sdpa import reference
    >>> key = np.zeros((3, 2))  # all scores equal, so the mean of the values
    >>> reference.attention(np.ones((1, 2)), key, np.array([[1.0], [2.0], [6.0]]))
    array([[3.]])
    """
    return attention_forward(query, key, value, attn_mask, **options).out


@np.errstate(all="ignore")
def attention_forward(query, key, value, attn_mask=None, *, enable_gqa=False, **options):
    """Attention and the log-sum-exp of each row of scores: (out, lse)."""
    q, k, v = _broadcast(*_float64(query, key, value), enable_gqa=enable_gqa)

    # Pass 1: scores, (..., heads, Lq, Lk); -inf where masked.
    s = _scores(q, k, attn_mask, **options)

    # Pass 2: each row becomes a distribution over its visible keys.
    p = softmax(s)
    lse = logsumexp(s)

    # Pass 3: each row of the output is the mean of the visible values under that distribution.
    out = _sum_visible(p, v, s != -np.inf)
    return AttentionForward(out, lse)


@np.errstate(all="ignore")
def attention_backward(
    grad_out,
    query,
    key,
    value,
    out,
    lse,
    attn_mask=None,
    *,
    grad_lse=None,
    needs=("query", "key", "value"),
    scale=None,
    enable_gqa=False,
    **options,
):
    """Gradients of <grad_out, out> + <grad_lse, lse> with respect to the arguments in `needs`.

    Each has the shape of its argument: it is summed over the axes along which that was broadcast.
    The weights are not kept by the forward but computed again from lse, as in Dao et al.,
    "FlashAttention" (2022), appendix B.4. The passes run backwards, and each quotes the line of the
    forward that it inverts.

    Parameters
    ----------
    grad_out : (..., heads, Lq, d_v)
    out, lse
        Results of `attention_forward` on the same arguments.
    grad_lse : (..., heads, Lq), None
        None is zero.
    needs : sequence of {"query", "key", "value", "attn_mask"}
    """
    grad_out, query, key, value, out, lse = _float64(grad_out, query, key, value, out, lse)
    q, k, v = _broadcast(query, key, value, enable_gqa=enable_gqa)
    s = _scores(q, k, attn_mask, scale=scale, **options)
    visible = s != -np.inf

    # Pass 2 was: p = softmax(s), which is exp(s - lse)
    p = np.where(visible, np.exp(s - lse[..., None]), 0)

    # Pass 3 was: out = p @ v
    grad_p = grad_out @ _transpose(v)
    grad_v = _sum_visible(_transpose(p), grad_out, _transpose(visible))

    # Pass 2 was: p = softmax(s); lse = logsumexp(s)
    # In a row: d p_j / d s_k = p_j (delta_jk - p_k), d lse / d s_k = p_k, and the sum that appears,
    # sum_j grad_p_j p_j, is <grad_out, out>.
    shift = (grad_out * out).sum(axis=-1)
    if grad_lse is not None:
        shift = shift - np.asarray(grad_lse, np.float64)
    grad_s = np.where(visible, p * (grad_p - shift[..., None]), 0)

    # Pass 1 was: s = scale * (q @ k^T) + attn_mask
    grad_q = _scale(scale, q) * _sum_visible(grad_s, k, visible)
    grad_k = _scale(scale, q) * _sum_visible(_transpose(grad_s), q, _transpose(visible))

    return AttentionGradients(
        _sum_to(grad_q, query.shape) if "query" in needs else None,
        _sum_to(grad_k, key.shape) if "key" in needs else None,
        _sum_to(grad_v, value.shape) if "value" in needs else None,
        _sum_to(grad_s, np.shape(attn_mask)) if "attn_mask" in needs else None,
    )


@np.errstate(all="ignore")
def attention_weights(
    query,
    key,
    attn_mask=None,
    *,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    window=None,
    key_lengths=None,
    query_offset=None,
    stage="weights",
):
    """The (..., heads, Lq, Lk) matrix itself, at one of its stages.

    Parameters
    ----------
    query, key : (..., heads, Lq, d_k), (..., heads, Lk, d_k)
    attn_mask : broadcastable to (..., heads, Lq, Lk)
        Boolean: True = attend. Floating: added to the scaled scores, and -inf masks.
    is_causal : {False, True, "upper_left", "lower_right"}
        True is "upper_left": query i sees the keys j <= i + query_offset. "lower_right": the last
        query meets the last key, so the offset is Lk - Lq (key_lengths - Lq where these are given).
    scale : float, None
        None is 1 / sqrt(d_k), or 1 where d_k is 0.
    enable_gqa : bool
        Key and value may have fewer heads than query; each serves as many consecutive query heads.
    window : (left, right), None
        Query i sees the keys i + offset - left <= j <= i + offset + right; None is no bound.
    key_lengths : int or array that broadcasts to the leading axes without heads, None
        Only the first key_lengths keys are there; None is all.
    query_offset : int or array that broadcasts to the leading axes without heads, None
        Position of query 0 among the keys; None is 0.
    stage : {"scores", "capped", "biased", "weights"}
        scale * query key^T; the same; that with the mask, -inf where any mask forbids; its softmax.
    """
    q, k = _broadcast(*_float64(query, key), enable_gqa=enable_gqa)
    if stage in ("scores", "capped"):
        return _scores(q, k, scale=scale)
    s = _scores(q, k, attn_mask, is_causal, scale, window, key_lengths, query_offset)
    return s if stage == "biased" else softmax(s)


@np.errstate(all="ignore")
def merge_attention(outs, lses):
    """Attention over the union of disjoint sets of keys, from the (out, lse) over each of them.

    lse = log sum_t exp(lses[t]) and out = sum_t exp(lses[t] - lse) outs[t]; the associative sum of
    Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), section 3.1. A part
    whose lse is -inf has seen no key and is left out.
    """
    outs, lses = np.stack(_float64(*outs)), np.stack(_float64(*lses))
    p = softmax(lses, axis=0)[..., None]
    out = np.where(lses[..., None] == -np.inf, 0, p * outs).sum(axis=0)
    return AttentionForward(out, logsumexp(lses, axis=0))


def _scores(
    q,
    k,
    attn_mask=None,
    is_causal=False,
    scale=None,
    window=None,
    key_lengths=None,
    query_offset=None,
):
    """Scores with every mask applied: (..., heads, Lq, Lk)."""
    s = _scale(scale, q) * (q @ _transpose(k))
    n_q, n_k = s.shape[-2:]

    # Which keys a query may see: one length and offset per batch entry, as (..., 1, 1, 1).
    batch, rest = s.shape[:-3], (1,) * min(3, s.ndim)
    length = n_k if key_lengths is None else key_lengths
    offset = 0 if query_offset is None else query_offset
    length, offset = (np.broadcast_to(x, batch).reshape(batch + rest) for x in (length, offset))
    if is_causal == "lower_right":
        offset = length - n_q
    j = np.arange(n_k)
    diagonal = np.arange(n_q)[:, None] + offset
    visible = j < length
    if is_causal:
        visible = visible & (j <= diagonal)
    left, right = window or (None, None)
    if left is not None:
        visible = visible & (j >= diagonal - left)
    if right is not None:
        visible = visible & (j <= diagonal + right)

    if attn_mask is not None:
        mask = np.broadcast_to(attn_mask, s.shape)
        if mask.dtype == bool:
            visible = visible & mask
        else:
            bias = mask.astype(np.float64)
            visible = visible & (bias != -np.inf)
            s = s + bias
    return np.where(visible, s, -np.inf)


def _scale(scale, q):
    return 1 / np.sqrt(max(q.shape[-1], 1)) if scale is None else scale


def _float64(*arrays):
    return [np.asarray(x, np.float64) for x in arrays]


def _transpose(x):
    return np.swapaxes(x, -1, -2)


def _broadcast(q, *operands, enable_gqa):
    """q and the operands on common leading axes, each key head repeated for its query heads."""
    if enable_gqa:
        operands = tuple(np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in operands)
    lead = np.broadcast_shapes(q.shape[:-2], *(x.shape[:-2] for x in operands))
    return [np.broadcast_to(x, lead + x.shape[-2:]) for x in (q, *operands)]


def _sum_visible(weights, x, visible):
    """sum_j weights[i, j] x[j] over visible (i, j): (..., I, J), (..., J, d) -> (..., I, d)."""
    finite = np.isfinite(x)
    total = np.where(visible, weights, 0) @ np.where(finite, x, 0)
    # A matrix product would let 0 * NaN through, so rows that hold NaN or Inf go one by one.
    for j in np.unique(np.nonzero(~finite)[-2]):
        felt = visible[..., j, None] & ~finite[..., j, None, :]
        total += np.where(felt, weights[..., j, None] * x[..., j, None, :], 0)
    return total


def _sum_to(grad, shape):
    """Sum over the axes along which `shape` was broadcast, and over groups of query heads."""
    if len(shape) > 2 and grad.shape[-3] != shape[-3]:
        groups = (shape[-3], grad.shape[-3] // shape[-3])
        grad = grad.reshape(*grad.shape[:-3], *groups, *grad.shape[-2:]).sum(axis=-3)
    grad = grad.sum(axis=tuple(range(grad.ndim - len(shape))))
    return grad.sum(axis=tuple(a for a, n in enumerate(shape) if n == 1), keepdims=True)


# ---------------------------------------------------------------------- softmax


@np.errstate(all="ignore")
def softmax(x, axis=-1, *, temperature=1.0, where=None):
    """p = exp(x / temperature) / sum exp(x / temperature) over `axis`: int, several, None (all).

    An element is left out, its p 0, when `where` is False there or x is -inf. None left: all are 0.
    """
    x = _included(x, where) / temperature
    e = np.exp(x - _finite_max(x, axis))
    total = e.sum(axis=axis, keepdims=True)
    return np.where(x == -np.inf, 0, e / total)


@np.errstate(all="ignore")
def log_softmax(x, axis=-1, *, temperature=1.0, where=None):
    """Log of `softmax`: x / temperature - logsumexp(x / temperature), -inf for what is left out."""
    x = _included(x, where) / temperature
    return np.where(x == -np.inf, x, x - logsumexp(x, axis, keepdims=True))


@np.errstate(all="ignore")
def logsumexp(x, axis=-1, *, where=None, keepdims=False):
    """log sum exp(x) over `axis`, as m + log sum exp(x - m), m the maximum; -inf of nothing."""
    x = _included(x, where)
    m = _finite_max(x, axis)
    lse = m + np.log(np.exp(x - m).sum(axis=axis, keepdims=True))
    lse = np.where(m == np.inf, m, lse)
    return lse if keepdims else lse.squeeze(axis)


@np.errstate(all="ignore")
def softmax_backward(grad, weights, axis=-1, *, temperature=1.0):
    """Gradient of softmax, p = exp(x / temperature) / sum: dx = p (g - sum g p) / temperature."""
    g, p = _float64(grad, weights)
    return p * (g - (g * p).sum(axis=axis, keepdims=True)) / temperature


@np.errstate(all="ignore")
def log_softmax_backward(grad, log_weights, axis=-1, *, temperature=1.0):
    """Gradient of log_softmax, log p = x / temperature - lse: dx = (g - p sum g) / temperature.

    What was left out (log p = -inf) is constant: its gradient is 0, and its g enters no sum.
    """
    g, log_p = _float64(grad, log_weights)
    g = np.where(log_p == -np.inf, 0, g)
    return (g - np.exp(log_p) * g.sum(axis=axis, keepdims=True)) / temperature


@np.errstate(all="ignore")
def logsumexp_backward(grad, x, lse, axis=-1):
    """Gradient of logsumexp: dx = g exp(x - lse); grad, lse with or without the summed axes."""
    g, x, lse = _float64(grad, x, lse)
    g, lse = (y.reshape(x.sum(axis=axis, keepdims=True).shape) for y in (g, lse))
    return np.where(x == -np.inf, 0, g * np.exp(x - lse))


def softmax_jacobian(weights, axis=-1, *, temperature=1.0):
    """J[..., i, j] = d p_i / d x_j = p_i (delta_ij - p_j) / temperature, its two axes last."""
    p = np.moveaxis(np.asarray(weights, np.float64), axis, -1)
    return (p[..., :, None] * (np.eye(p.shape[-1]) - p[..., None, :])) / temperature


def _included(x, where):
    """x as float64, -inf where it is left out."""
    x = np.asarray(x, np.float64)
    return x if where is None else np.where(where, x, -np.inf)


def _finite_max(x, axis):
    """Maximum along `axis`, kept as an axis; 0 where it is -inf, so that x minus it stays -inf."""
    m = x.max(axis=axis, keepdims=True, initial=-np.inf)
    return np.where(m == -np.inf, 0, m)
