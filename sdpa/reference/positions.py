"""Functions of positions: rotary embedding, T5's buckets, vectors of relative positions."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sdpa.reference.arrays import (
    Array,
    Gradient,
    broadcast,
    float64,
    shape_of,
    sum_to,
    sum_to_heads,
)
from sdpa.reference.derivatives import attention_backward
from sdpa.reference.forward import AttentionForward, attention_forward
from sdpa.reference.logits import dropout_factors, logits_of


@np.errstate(all="ignore")
def rotary_embedding(
    x: ArrayLike,
    positions: ArrayLike,
    *,
    base: float = 10000.0,
    interleaved: bool = False,
    rotary_dim: int | None = None,
) -> Array:
    """Pair i of components as a complex number, times exp(1j position base^(-2 i / rotary_dim)).

    Su et al., "RoFormer" (2021), section 3.2.2.
    """
    x = np.asarray(x, np.float64)
    r = x.shape[-1] if rotary_dim is None else rotary_dim
    if interleaved:
        first, second = np.arange(0, r, 2), np.arange(1, r, 2)
    else:
        first, second = np.arange(r // 2), np.arange(r // 2, r)
    angles = np.asarray(positions, np.float64)[..., None] * base ** (
        -np.arange(0, r, 2) / max(r, 1)
    )
    turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)
    out = x.copy()
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def rotary_embedding_backward(grad: ArrayLike, positions: ArrayLike, **options: Any) -> Array:
    """The transpose of a rotation is its inverse, the rotation by the negative angles."""
    return rotary_embedding(grad, -np.asarray(positions, np.float64), **options)


def t5_bucket(
    relative: int, num_buckets: int, *, bidirectional: bool = True, max_distance: int = 128
) -> int:
    """The bucket of one distance relative = j - i, an int. Raffel et al. (2020), section 2.1.

    Of n buckets, n // 2 hold one distance each; the k-th of the others begins at the distance
    exact (max_distance / exact)^(k / (n - exact)), exact = n // 2, and the last has no end.
    """
    start, n = 0, num_buckets
    if bidirectional:
        n //= 2
        start, relative = (n if relative > 0 else 0), -abs(relative)
    distance, exact = max(-relative, 0), n // 2
    if distance < exact:
        return start + distance
    begins = exact * (max_distance / exact) ** (np.arange(n - exact) / (n - exact))
    # The factor allows for rounding, since a range may begin at a whole number.
    return start + exact - 1 + int(np.count_nonzero(begins <= distance * (1 + 1e-6)))


def t5_relative(
    table: ArrayLike,
    query_length: int,
    key_length: int,
    *,
    bidirectional: bool = True,
    max_distance: int = 128,
    query_offset: int = 0,
) -> Array:
    """bias[h, i, j] = table[t5_bucket(j - i - query_offset), h]: (heads, Lq, Lk)."""
    table = np.asarray(table, np.float64)
    bias = np.empty((table.shape[1], query_length, key_length))
    for i, j in np.ndindex(query_length, key_length):
        bucket = t5_bucket(
            j - i - query_offset,
            len(table),
            bidirectional=bidirectional,
            max_distance=max_distance,
        )
        bias[:, i, j] = table[bucket]
    return bias


class ShawGradients(NamedTuple):
    """Result of `shaw_attention_backward`; None where a gradient was not asked for."""

    query: Gradient
    key: Gradient
    value: Gradient
    rel_key: Gradient
    rel_value: Gradient
    attn_mask: Gradient
    sinks: Gradient


@np.errstate(all="ignore")
def shaw_attention_forward(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    rel_key: ArrayLike,
    rel_value: ArrayLike | None = None,
    **options: Any,
) -> AttentionForward:
    """Attention with keys key_j + rel_key[c] and values value_j + rel_value[c]: (out, lse).

    c = clip(j - i - query_offset, -D, D) + D is the row of the distance. Shaw et al.,
    "Self-attention with relative position representations" (2018), section 3.1.
    """
    pairs = ShawPairs(query, key, value, rel_key, rel_value, **options)
    out, lse = attention_forward(*pairs.operands, **pairs.options)
    return AttentionForward(out[..., 0, :], lse[..., 0])


@np.errstate(all="ignore")
def shaw_attention_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    rel_key: ArrayLike,
    rel_value: ArrayLike | None,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    grad_lse: ArrayLike | None = None,
    needs: Collection[str] = ("query", "key", "value", "rel_key"),
    **options: Any,
) -> ShawGradients:
    """Gradients of <grad_out, out> + <grad_lse, lse> with respect to the arguments in `needs`."""
    pairs = ShawPairs(query, key, value, rel_key, rel_value, **options)
    grad_out, out = (np.asarray(x)[..., None, :] for x in (grad_out, out))
    lse = np.asarray(lse)[..., None]
    grad_lse = None if grad_lse is None else np.asarray(grad_lse)[..., None]
    inner = {"query", "key", "value", *needs} - {"rel_key", "rel_value"}
    g = attention_backward(
        grad_out, *pairs.operands, out, lse, grad_lse=grad_lse, needs=tuple(inner), **pairs.options
    )
    sums: dict[str, Callable[[], Gradient]] = {
        "query": lambda: sum_to(g.query[..., 0, :], shape_of(query)),
        "key": lambda: sum_to(g.key.sum(axis=-3), shape_of(key)),
        "value": lambda: sum_to((g.value * pairs.factors).sum(axis=-3), shape_of(value)),
        "rel_key": lambda: sum_to(pairs.by_distance(g.key), shape_of(rel_key)),
        "rel_value": lambda: sum_to(
            pairs.by_distance(g.value * pairs.factors), shape_of(rel_value)
        ),
        "attn_mask": lambda: sum_to(g.attn_mask[..., 0, :], shape_of(options["attn_mask"])),
        "sinks": lambda: sum_to_heads(g.sinks, shape_of(options["sinks"])),
    }
    return ShawGradients(*(f() if name in needs else None for name, f in sums.items()))


class ShawPairs:
    """Shaw's attention as plain attention in which every query has separate keys and values.

    operands  (..., heads, Lq, 1, d_k), (..., heads, Lq, Lk, d_k), (..., heads, Lq, Lk, d_v)
    options   for `attention_forward` of these; all masks are one additive attn_mask
    """

    def __init__(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        rel_key: ArrayLike,
        rel_value: ArrayLike | None = None,
        *,
        attn_mask: ArrayLike | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        sinks: ArrayLike | None = None,
        softcap: float | None = None,
        dropout_p: float = 0.0,
        rng: int | None = None,
        **masks: Any,
    ) -> None:
        query, key, value, rel_key = float64(query, key, value, rel_key)
        self.n_rows: int = rel_key.shape[-2]
        if rel_value is None:
            rel_value = np.zeros((self.n_rows, value.shape[-1]))
        rel = [rel_key, np.asarray(rel_value, np.float64)]
        q, k, v, *rel = broadcast(query, key, value, *rel, enable_gqa=enable_gqa)
        n_q, n_k = q.shape[-2], k.shape[-2]
        offset = masks.get("query_offset") or 0
        if masks.get("is_causal") == "lower_right":
            length = masks.get("key_lengths")
            offset = (n_k if length is None else length) - n_q
        far = self.n_rows // 2
        distances = np.arange(n_k) - np.arange(n_q)[:, None] - offset
        self.rows: NDArray[np.int64] = np.clip(distances, -far, far) + far
        keys, values = (
            x[..., None, :, :] + r[..., self.rows, :] for x, r in zip((k, v), rel, strict=True)
        )
        # Each pair has its own value here, which can hold its factor of dropout.
        self.factors: Array = dropout_factors((*q.shape[:-1], n_k), dropout_p, rng)[..., None]
        self.operands: tuple[Array, Array, Array] = q[..., None, :], keys, values * self.factors
        mask = logits_of(np.zeros_like(q), np.zeros_like(k), attn_mask, **masks)
        self.options: dict[str, Any] = {
            "attn_mask": mask[..., None, :],
            "scale": scale,
            "softcap": softcap,
        }
        if sinks is not None:
            lead = q.shape[:-2]
            sinks = np.broadcast_to(sinks, lead or (1,)).reshape(*lead, 1)
            self.options["sinks"] = np.broadcast_to(sinks, (*lead, n_q))

    def by_distance(self, x: Array) -> Array:
        """(..., Lq, Lk, d) summed over the pairs of each distance: (..., 2 D + 1, d)."""
        sums = [x[..., self.rows == row, :].sum(axis=-2) for row in range(self.n_rows)]
        return np.stack(sums, axis=-2)
