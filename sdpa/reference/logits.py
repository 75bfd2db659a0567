"""From query and key to the logits of a row: scores, their cap, biases, masks; and dropout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sdpa.reference.arrays import Array, per_head, transpose
from sdpa.reference.programs import indices_of, let_through, modified


def scale_of(scale: ArrayLike | None, q: Array) -> float | Array:
    """The factor of the products, for each head if it is an array: (..., heads, 1, 1).

    None means 1 / sqrt(d_k), or 1 where d_k is 0.
    """
    if scale is None:
        return float(1 / np.sqrt(max(q.shape[-1], 1)))
    return scale if isinstance(scale, float) else per_head(np.asarray(scale, float), q.shape[:-2])


# The next four functions ignore the options of `logits_of` that do not concern them.


def scores_of(q: Array, k: Array, scale: ArrayLike | None = None, **_: Any) -> Array:
    """scale * q k^T: (..., heads, Lq, Lk)."""
    return scale_of(scale, q) * (q @ transpose(k))


def capped(x: Array, softcap: float | None = None, **_: Any) -> Array:
    """softcap * tanh(x / softcap), which is close to x for small x and never exceeds softcap."""
    return x if softcap is None else softcap * np.tanh(x / softcap)


def cap_slope(x: Array, softcap: float | None = None, **_: Any) -> Array:
    """Derivative of `capped` with respect to x: 1 - tanh^2(x / softcap)."""
    return np.ones_like(x) if softcap is None else 1 - np.tanh(x / softcap) ** 2


def cap_bend(x: Array, softcap: float | None = None, **_: Any) -> Array:
    """Derivative of `cap_slope` with respect to x."""
    if softcap is None:
        return np.zeros_like(x)
    return -2 / softcap * np.tanh(x / softcap) * cap_slope(x, softcap)


def logits_of(
    q: Array,
    k: Array,
    attn_mask: ArrayLike | None = None,
    *,
    where: ArrayLike | None = None,
    is_causal: bool | str = False,
    scale: ArrayLike | None = None,
    softcap: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    alibi_slopes: ArrayLike | None = None,
    key_lengths: ArrayLike | None = None,
    query_offset: ArrayLike | None = None,
    score_mod: Callable[..., Any] | None = None,
    score_args: Sequence[ArrayLike] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    mask_args: Sequence[ArrayLike] | None = None,
) -> Array:
    """The argument of softmax: capped scores with everything added, -inf where any mask forbids.

    Parameters
    ----------
    attn_mask : broadcastable to (..., heads, Lq, Lk), None
        Boolean: True = attend. Floating: added to the capped scores, and -inf masks.
    where : boolean, broadcastable to (..., heads, Lq, Lk), None
        True = attend, beside any attn_mask.
    is_causal : {False, True, "upper_left", "lower_right"}
        True is "upper_left": query i sees the keys j <= i + query_offset. "lower_right": the last
        query meets the last key, so the offset is Lk - Lq (key_lengths - Lq where these are given).
    scale : float or broadcastable to (..., heads), None
        None means 1 / sqrt(d_k), or 1 where d_k is 0.
    softcap : float, None
        Scaled scores x become softcap * tanh(x / softcap) before anything is added to them.
    window : (left, right), None
        Query i sees the keys i + offset - left <= j <= i + offset + right; None means no bound.
    alibi_slopes : broadcastable to (..., heads), None
        -slope * abs(i + offset - j) is added. Press, Smith and Lewis, "Train short, test long:
        attention with linear biases" (2022), section 3.
    key_lengths : int or array that broadcasts to the leading axes without heads, None
        Only the first key_lengths keys take part; None means all.
    query_offset : int or array that broadcasts to the leading axes without heads, None
        Position of query 0 among the keys; None means 0.
    score_mod : callable, None
        ``score_mod(score, b, h, q, k, *score_args)`` takes the place of the capped score, before
        anything is added to it; see `sdpa.reference.programs.indices_of` for b, h, q and k.
    mask_mod : callable, None
        Pairs for which ``mask_mod(b, h, q, k, *mask_args)`` is True take part. Neither function
        is asked about a pair that a mask has forbidden.
    score_args, mask_args : sequence of array_like, None
    """
    z = capped(scores_of(q, k, scale), softcap)
    lead, (n_q, n_k) = z.shape[:-2], z.shape[-2:]
    length, offset = positions_of(z.shape, is_causal, key_lengths, query_offset)

    # Query i is at i + offset among the keys; the sum with a bound of the window may overflow.
    j = np.arange(n_k)
    distance = j - np.arange(n_q)[:, None] - offset
    visible = j < length
    if is_causal:
        visible = visible & (distance <= 0)
    left, right = window or (None, None)
    if left is not None:
        visible = visible & (distance >= -left)
    if right is not None:
        visible = visible & (distance <= right)

    if where is not None:
        visible = visible & np.broadcast_to(where, z.shape)
    mask = np.asarray(True if attn_mask is None else attn_mask)
    bias = np.zeros(()) if mask.dtype == bool else mask.astype(np.float64)
    visible = visible & (mask if mask.dtype == bool else bias != -np.inf)
    visible = np.broadcast_to(visible, z.shape)

    if mask_mod is not None:
        visible = let_through(visible, indices_of(z.shape, offset), mask_mod, mask_args)
    if score_mod is not None:
        z = modified(z, visible, indices_of(z.shape, offset), score_mod, score_args)
    if alibi_slopes is not None:
        slopes = per_head(np.asarray(alibi_slopes, np.float64), lead)
        z = z - slopes * abs(distance)
    return np.where(visible, z + bias, -np.inf)


def positions_of(
    shape: tuple[int, ...],
    is_causal: bool | str = False,
    key_lengths: ArrayLike | None = None,
    query_offset: ArrayLike | None = None,
    **_: Any,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Number of keys and offset of the queries of each batch entry: (..., 1, 1, 1) each."""
    *lead, n_q, n_k = shape
    batch, rest = tuple(lead[:-1]), (1,) * min(3, len(shape))
    length = n_k if key_lengths is None else key_lengths
    offset = 0 if query_offset is None else query_offset
    length, offset = (np.broadcast_to(x, batch).reshape(batch + rest) for x in (length, offset))
    return length, (length - n_q if is_causal == "lower_right" else offset)


def dropout_factors(
    shape: tuple[int, ...], dropout_p: float = 0.0, rng: int | None = None
) -> Array:
    """0 with probability dropout_p, or else 1 / (1 - dropout_p), for each pair: (..., Lq, Lk).

    Pair (i, j) of a head takes word j % 4 of the Philox block whose counter is (i, j // 4, head,
    batch), batch counting all leading axes but heads as one, and whose key is the low and the high
    half of the seed `rng`. It is dropped if the word is below dropout_p 2^32, rounded to an
    integer.
    """
    if dropout_p == 0:
        return np.ones(shape)
    seed = rng or 0
    n_q, n_k = shape[-2:]
    heads = shape[-3] if len(shape) > 2 else 1
    n_batch, blocks = int(np.prod(shape[:-3])), -(-n_k // 4)
    b, h, i, block = np.ogrid[:n_batch, :heads, :n_q, :blocks]
    words = philox4x32((i, block, h, b), (seed & 0xFFFFFFFF, seed >> 32))
    each = np.stack(words, axis=-1).reshape(n_batch, heads, n_q, 4 * blocks)
    each = each[..., :n_k].reshape(shape)
    kept = 1 / (1 - dropout_p) if dropout_p < 1 else 0
    return np.where(each < np.rint(dropout_p * 2.0**32), 0, kept)


def philox4x32(
    counter: Sequence[ArrayLike], key: Sequence[int], rounds: int = 10
) -> list[NDArray[np.uint64]]:
    """Four random words of 32 bits for each counter of four, under a key of two.

    Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011), section
    3.3. Each round multiplies two of the words by constants to 64 bits, of which the high halves
    are mixed with the other two words and the round's key, and the low halves kept.

    Parameters
    ----------
    counter : four integer arrays that broadcast with one another
    key : two integers
        All of them modulo 2^32.

    Returns
    -------
    list of four uint64 arrays, each element below 2^32

    Examples
    --------
    >>> from sdpa.reference.logits import philox4x32
    >>> [hex(word) for word in philox4x32((0, 0, 0, 0), (0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(c).astype(np.uint64) & low for c in counter))
    k0, k1 = (int(k) & 0xFFFFFFFF for k in key)
    for _ in range(rounds):
        one, two = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c2 = (two >> half) ^ c1 ^ np.uint64(k0), (one >> half) ^ c3 ^ np.uint64(k1)
        c1, c3 = two & low, one & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]
