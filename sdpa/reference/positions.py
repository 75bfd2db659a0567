"""Functions of positions: rotary embedding, T5's buckets, vectors of relative positions."""

from typing import NamedTuple

import numpy as np

from sdpa.reference.arrays import broadcast, float64, sum_to, sum_to_heads
from sdpa.reference.derivatives import attention_backward
from sdpa.reference.forward import AttentionForward, attention_forward
from sdpa.reference.logits import dropout_factors, logits_of


def rotary_embedding(x, positions, *, base=10000.0, interleaved=False, rotary_dim=None):
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


def rotary_embedding_backward(grad, positions, **options):
    """The transpose of a rotation is its inverse, the rotation by the negative angles."""
    return rotary_embedding(grad, -np.asarray(positions, np.float64), **options)


def t5_bucket(relative, num_buckets, *, bidirectional=True, max_distance=128):
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
    # A range may begin at a whole number; the factor allows for rounding there.
    return start + exact - 1 + np.count_nonzero(begins <= distance * (1 + 1e-6))


def t5_relative(
    table, query_length, key_length, *, bidirectional=True, max_distance=128, query_offset=0
):
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

    query: np.ndarray | None
    key: np.ndarray | None
    value: np.ndarray | None
    rel_key: np.ndarray | None
    rel_value: np.ndarray | None
    attn_mask: np.ndarray | None
    sinks: np.ndarray | None


@np.errstate(all="ignore")
def shaw_attention_forward(query, key, value, rel_key, rel_value=None, **options):
    """Attention with keys key_j + rel_key[c] and values value_j + rel_value[c]: (out, lse).

    c = clip(j - i - query_offset, -D, D) + D is the row of the distance. Shaw et al.,
    "Self-attention with relative position representations" (2018), section 3.1.
    """
    pairs = ShawPairs(query, key, value, rel_key, rel_value, **options)
    out, lse = attention_forward(*pairs.operands, **pairs.options)
    return AttentionForward(out[..., 0, :], lse[..., 0])


@np.errstate(all="ignore")
def shaw_attention_backward(
    grad_out,
    query,
    key,
    value,
    rel_key,
    rel_value,
    out,
    lse,
    *,
    grad_lse=None,
    needs=("query", "key", "value", "rel_key"),
    **options,
):
    """Gradients of <grad_out, out> + <grad_lse, lse> with respect to the arguments in `needs`."""
    pairs = ShawPairs(query, key, value, rel_key, rel_value, **options)
    grad_out, out = (np.asarray(x)[..., None, :] for x in (grad_out, out))
    lse, grad_lse = (None if x is None else np.asarray(x)[..., None] for x in (lse, grad_lse))
    inner = {"query", "key", "value", *needs} - {"rel_key", "rel_value"}
    g = attention_backward(
        grad_out, *pairs.operands, out, lse, grad_lse=grad_lse, needs=tuple(inner), **pairs.options
    )
    sums = {
        "query": lambda: sum_to(g.query[..., 0, :], np.shape(query)),
        "key": lambda: sum_to(g.key.sum(axis=-3), np.shape(key)),
        "value": lambda: sum_to((g.value * pairs.factors).sum(axis=-3), np.shape(value)),
        "rel_key": lambda: sum_to(pairs.by_distance(g.key), np.shape(rel_key)),
        "rel_value": lambda: sum_to(
            pairs.by_distance(g.value * pairs.factors), np.shape(rel_value)
        ),
        "attn_mask": lambda: sum_to(g.attn_mask[..., 0, :], np.shape(options["attn_mask"])),
        "sinks": lambda: sum_to_heads(g.sinks, np.shape(options["sinks"])),
    }
    return ShawGradients(*(f() if name in needs else None for name, f in sums.items()))


class ShawPairs:
    """Shaw's attention as plain attention in which every query has separate keys and values.

    operands  (..., heads, Lq, 1, d_k), (..., heads, Lq, Lk, d_k), (..., heads, Lq, Lk, d_v)
    options   for `attention_forward` of these; all masks are one additive attn_mask
    """

    def __init__(
        self,
        query,
        key,
        value,
        rel_key,
        rel_value=None,
        *,
        attn_mask=None,
        scale=None,
        enable_gqa=False,
        sinks=None,
        softcap=None,
        dropout_p=0.0,
        rng=None,
        **masks,
    ):
        query, key, value, rel_key = float64(query, key, value, rel_key)
        self.n_rows = rel_key.shape[-2]
        if rel_value is None:
            rel_value = np.zeros((self.n_rows, value.shape[-1]))
        rel = rel_key, np.asarray(rel_value, np.float64)
        q, k, v, *self.rel = broadcast(query, key, value, *rel, enable_gqa=enable_gqa)
        n_q, n_k = q.shape[-2], k.shape[-2]
        offset = masks.get("query_offset") or 0
        if masks.get("is_causal") == "lower_right":
            length = masks.get("key_lengths")
            offset = (n_k if length is None else length) - n_q
        far = self.n_rows // 2
        self.rows = np.clip(np.arange(n_k) - np.arange(n_q)[:, None] - offset, -far, far) + far
        keys, values = (
            x[..., None, :, :] + r[..., self.rows, :] for x, r in zip((k, v), self.rel, strict=True)
        )
        # Each pair has its own value here, which can hold its factor of dropout.
        self.factors = dropout_factors((*q.shape[:-1], n_k), dropout_p, rng)[..., None]
        self.operands = q[..., None, :], keys, values * self.factors
        mask = logits_of(np.zeros_like(q), np.zeros_like(k), attn_mask, **masks)
        self.options = {"attn_mask": mask[..., None, :], "scale": scale, "softcap": softcap}
        if sinks is not None:
            lead = q.shape[:-2]
            sinks = np.broadcast_to(sinks, lead or (1,)).reshape(*lead, 1)
            self.options["sinks"] = np.broadcast_to(sinks, (*lead, n_q))

    def by_distance(self, x):
        """(..., Lq, Lk, d) summed over the pairs of each distance: (..., 2 D + 1, d)."""
        sums = [x[..., self.rows == row, :].sum(axis=-2) for row in range(self.n_rows)]
        return np.stack(sums, axis=-2)
