"""Attention forward, the matrix of weights, its rows and columns, the union of sets of keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sdpa.reference.arrays import Array, broadcast, float64, per_head, sum_visible
from sdpa.reference.logits import capped, dropout_factors, logits_of, scores_of
from sdpa.reference.rows import logsumexp, softmax

Index: TypeAlias = slice | NDArray[np.intp] | None


class AttentionForward(NamedTuple):
    """Result of `attention_forward`."""

    out: Array
    lse: Array


class AttentionStatistics(NamedTuple):
    """Result of `attention_statistics`: one number per row in each, (..., heads, Lq)."""

    lse: Array
    entropy: Array
    max_weight: Array
    sum_p2: Array
    sum_p3: Array
    score_mean: Array
    score_var: Array


class AttentionReceived(NamedTuple):
    """Result of `attention_received`: one number per key in each, (..., heads, Lk)."""

    total: Array
    largest: Array


def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = None,
    **options: Any,
) -> Array:
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
def attention_forward(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    *,
    enable_gqa: bool = False,
    sinks: ArrayLike | None = None,
    rng: int | None = None,
    **options: Any,
) -> AttentionForward:
    """Attention and the log-sum-exp of each row of logits: (out, lse)."""
    q, k, v = broadcast(*float64(query, key, value), enable_gqa=enable_gqa)

    # Pass 1: logits, (..., heads, Lq, Lk); -inf where masked.
    z = logits_of(q, k, attn_mask, **options)

    # Pass 2: each row becomes a distribution over its visible keys and the sink.
    row = with_sink(z, sinks)
    p, lse = softmax(row)[..., : z.shape[-1]], logsumexp(row)

    # Pass 3: each row of the output is the mean of the visible values under that distribution,
    # after dropout has removed a random part of the weights.
    r = dropout_factors(z.shape, dropout_p, rng)
    out = sum_visible(r * p, v, z != -np.inf)
    return AttentionForward(out, lse)


@np.errstate(all="ignore")
def attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    *,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    enable_gqa: bool = False,
    sinks: ArrayLike | None = None,
    rng: int | None = None,
    stage: str = "weights",
    heads: Index = None,
    queries: Index = None,
    **options: Any,
) -> Array:
    """The (..., heads, Lq, Lk) matrix itself, at one of its stages.

    Parameters
    ----------
    query, key : (..., heads, Lq, d_k), (..., heads, Lk, d_k)
    attn_mask, **options
        As in `sdpa.reference.logits.logits_of`.
    dropout_p : float
        Probability with which a weight becomes 0; the others are multiplied by 1 / (1 - dropout_p).
    enable_gqa : bool
        Key and value may have fewer heads than query; each then serves a group of consecutive query
        heads.
    sinks : broadcastable to (..., heads), None
        One more logit in every row, not scaled, like a key that takes weight but has no value.
    rng : int
        Seed of dropout, 0 to 2^64 - 1; see `sdpa.reference.logits.dropout_factors`.
    stage : {"scores", "capped", "biased", "weights"}
        "scores" is scale * query key^T; "capped" applies softcap; "biased" adds mask and ALiBi,
        with -inf where any mask forbids; "weights" is their softmax, with the sink in the
        denominator, after dropout.
    heads, queries : slice or array of int, None
        The heads and queries to return.
    """
    q, k = broadcast(*float64(query, key), enable_gqa=enable_gqa)
    z = logits_of(q, k, attn_mask, **options)
    if stage in ("scores", "capped"):
        x = scores_of(q, k, **options)
        x = x if stage == "scores" else capped(x, **options)
    elif stage == "biased":
        x = z
    else:
        x = dropout_factors(z.shape, dropout_p, rng) * softmax(with_sink(z, sinks))[..., :-1]
    x = x if heads is None else x[..., heads, :, :]
    return x if queries is None else x[..., queries, :]


def attention_received(query: ArrayLike, key: ArrayLike, **options: Any) -> AttentionReceived:
    """Sum and maximum of each column of `attention_weights`: what a key gets from the queries."""
    w = attention_weights(query, key, **options)
    return AttentionReceived(w.sum(axis=-2), w.max(axis=-2, initial=0))


@np.errstate(all="ignore")
def attention_statistics(
    query: ArrayLike,
    key: ArrayLike,
    *,
    attn_mask: ArrayLike | None = None,
    enable_gqa: bool = False,
    sinks: ArrayLike | None = None,
    **options: Any,
) -> AttentionStatistics:
    """Statistics of each row p of weights, before dropout, and of its visible logits z.

    lse, entropy -sum p ln p, largest weight, sum p^2, sum p^3; mean and variance of z. A sink takes
    its share of the weight (and of lse) and enters no other sum. A row without a visible key has
    weights 0, and mean and variance nan.
    """
    q, k = broadcast(*float64(query, key), enable_gqa=enable_gqa)
    z = logits_of(q, k, attn_mask, **options)
    row = with_sink(z, sinks)
    p, lse = softmax(row)[..., :-1], logsumexp(row)
    visible = z != -np.inf
    n = visible.sum(axis=-1)
    mean = np.where(visible, z, 0).sum(axis=-1) / n
    deviation = np.where(visible, z - mean[..., None], 0)
    return AttentionStatistics(
        lse=lse,
        entropy=np.where(visible, p * (lse[..., None] - z), 0).sum(axis=-1),
        max_weight=p.max(axis=-1, initial=0),
        sum_p2=(p**2).sum(axis=-1),
        sum_p3=(p**3).sum(axis=-1),
        score_mean=mean,
        score_var=(deviation**2).sum(axis=-1) / n,
    )


@np.errstate(all="ignore")
def merge_attention(
    outs: Sequence[ArrayLike] | Array, lses: Sequence[ArrayLike] | Array
) -> AttentionForward:
    """Attention over the union of disjoint sets of keys, from the (out, lse) over each of them.

    lse = log sum_t exp(lses[t]) and out = sum_t exp(lses[t] - lse) outs[t]; the associative sum of
    Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), section 3.1. A part
    whose lse is -inf has seen no key and is left out.
    """
    outs, lses = np.stack(float64(*outs)), np.stack(float64(*lses))
    p = softmax(lses, axis=0)[..., None]
    out = np.where(lses[..., None] == -np.inf, 0, p * outs).sum(axis=0)
    return AttentionForward(out, logsumexp(lses, axis=0))


def with_sink(z: Array, sinks: ArrayLike | None = None) -> Array:
    """z with one more column, the sink of its head; -inf if there is none, which is like no key."""
    sinks = -np.inf if sinks is None else np.asarray(sinks, np.float64)
    column = np.broadcast_to(per_head(sinks, z.shape[:-2]), (*z.shape[:-1], 1))
    return np.concatenate([z, column], axis=-1)
