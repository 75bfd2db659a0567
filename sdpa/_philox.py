"""Dropout's factors in NumPy, equal to those that the kernels draw.

`sdpa.reference.logits` implements them independently; the tests compare the two.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85


def dropout_factors(
    shape: tuple[int, ...],
    dropout_p: float,
    seed: int,
    first: tuple[int, int],
    dtype: DTypeLike,
) -> NDArray[Any]:
    """0 for each pair that is dropped, 1 / (1 - dropout_p) for the others: (..., rows, keys).

    `shape` is the shape of a block of pairs (query, key), and `first` its first pair.
    """
    if dropout_p == 0:
        return np.ones(shape, dtype)
    *lead, rows, keys = shape
    heads = lead.pop() if lead else 1
    batches = int(np.prod(lead))
    # A Philox block holds the words of four consecutive keys.
    block, skipped = divmod(first[1], 4)
    blocks = -(-(skipped + keys) // 4)
    batch, head, i, j = np.ogrid[
        :batches, :heads, first[0] : first[0] + rows, block : block + blocks
    ]
    words = _philox4x32([i, j, head, batch], seed)
    words = words.reshape(batches, heads, rows, 4 * blocks)[..., skipped : skipped + keys]
    dropped = words.reshape(shape) < np.rint(dropout_p * 2.0**32)
    kept = 1 / (1 - dropout_p) if dropout_p < 1 else 0
    return np.where(dropped, 0, kept).astype(dtype)


def _philox4x32(counter: list[NDArray[Any]], seed: int) -> NDArray[np.uint64]:
    """The four words of each counter, along a new last axis; the seed's halves are the key.

    Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).
    """
    shape = np.broadcast_shapes(*(c.shape for c in counter))
    words = np.empty((*shape, 4), np.uint64)
    for n, c in enumerate(counter):
        words[..., n] = c.astype(np.uint64) & _LOW
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(_ROUNDS):
        left, right = words[..., 0] * _MULTIPLIERS[0], words[..., 2] * _MULTIPLIERS[1]
        words[..., 0] = (right >> np.uint64(32)) ^ words[..., 1] ^ np.uint64(key[0])
        words[..., 2] = (left >> np.uint64(32)) ^ words[..., 3] ^ np.uint64(key[1])
        words[..., 1], words[..., 3] = right & _LOW, left & _LOW
        key = [(k + step) & 0xFFFFFFFF for k, step in zip(key, _KEY_STEPS, strict=True)]
    return words
