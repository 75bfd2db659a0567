"""Keys and values of past positions, kept between the steps of a decoder."""

from __future__ import annotations

import copy
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from sdpa import _arguments
from sdpa._arguments import arrays, checked_float
from sdpa._arrays import Array

__all__ = ["KVCache"]


class KVCache:
    """Keys and values of a batch of sequences, in memory that is allocated once.

    `append` writes new positions behind the old ones; `key` and `value` are views of all positions
    held, which attention reads in place. Sequences may have different lengths. One call serves
    prompts, single tokens and windows:

        sdpa.attention(query, cache.key, cache.value, is_causal=True, key_lengths=cache.lengths,
                       query_offset=cache.query_offset, window=cache.window)

    is the attention of the positions that the last `append` added (queries in the same order) over
    everything appended so far. A single token without a window sees every key that is held, and
    needs key_lengths alone.

    With a window a full cache drops positions that no later query sees, so it never holds more than
    `capacity` and never fills up. The remaining positions then move to the front, which
    `query_offset` takes into account; the move costs one copy of the window per capacity - left new
    positions. The window is that of Beltagy, Peters and Cohan, "Longformer" (2020), section 3.1.

    Parameters
    ----------
    batch, heads : int
        Number of sequences and of key heads.
    d_k, d_v : int
        Widths of keys and values; None for d_v means d_k.
    capacity : int
        Positions per sequence for which there is memory. With a window it must exceed `left`; twice
        that is a good choice.
    dtype : dtype, default float32
        float16, bfloat16, float32 or float64. Appended keys and values are rounded to it. Attention
        over a 16-bit cache also takes float32 queries, and reads half the bytes.
    window : (left, right), optional
        The window of every call of attention over this cache: a query does not see keys more than
        `left` positions before it. None, also for `left`, keeps everything.

    Attributes
    ----------
    capacity, window : int, tuple or None
        As given, but for bounds of the window that exclude nothing, which are None.

    Raises
    ------
    TypeError
        An argument has a type or dtype that is not accepted.
    ValueError
        A value is out of range.

    Examples
    --------
    A prompt of five tokens, then one token after the other; the last three positions are seen:

    >>> import numpy as np, sdpa
    >>> rng = np.random.default_rng(0)
    >>> query, key, value = rng.standard_normal((3, 2, 4, 12, 8))
    >>> cache = sdpa.KVCache(2, 4, 8, capacity=7, dtype=np.float64, window=(2, 0))
    >>> out = []
    >>> for step in (slice(0, 5), *(slice(i, i + 1) for i in range(5, 12))):
    ...     cache.append(key[:, :, step], value[:, :, step])
    ...     out.append(sdpa.attention(query[:, :, step], cache.key, cache.value, is_causal=True,
    ...                               key_lengths=cache.lengths, query_offset=cache.query_offset,
    ...                               window=cache.window))
    >>> whole = sdpa.attention(query, key, value, is_causal=True, window=(2, 0))
    >>> np.allclose(np.concatenate(out, axis=2), whole), cache.positions, cache.key.shape
    (True, array([12, 12]), (2, 4, 7, 8))
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        d_k: int,
        d_v: int | None = None,
        *,
        capacity: int,
        dtype: DTypeLike = np.float32,
        window: tuple[int | None, int | None] | None = None,
    ) -> None:
        sizes = {"batch": batch, "heads": heads, "d_k": d_k, "d_v": d_k if d_v is None else d_v}
        sizes = {name: _arguments.size(name, size) for name, size in sizes.items()}
        self.capacity: int = _arguments.size("capacity", capacity)
        bounds = _arguments.window("window", window)
        self.window: tuple[int | None, int | None] | None = None if window is None else bounds
        self._left = bounds[0]
        if self._left is not None and self._left >= self.capacity:
            raise ValueError(
                f"capacity: expected more than the {self._left} positions that "
                f"window={self.window} looks back, got {self.capacity}"
            )
        dtype = _arguments.float_dtype("dtype", dtype)
        rows = (sizes["batch"], sizes["heads"], 0)
        self._key = _with_room(np.zeros((*rows, sizes["d_k"]), dtype), self.capacity)
        self._value = _with_room(np.zeros((*rows, sizes["d_v"]), dtype), self.capacity)
        # These three are replaced, never written to.
        self._lengths = np.zeros(sizes["batch"], np.int64)
        self._positions = self._lengths
        self._counts = self._lengths  # of the last append

    def copy(self) -> Self:
        """An equal cache that is independent of this one; so are those of `copy` and `pickle`.

        It takes memory for the positions held; the rest is taken as it is filled.

        Returns
        -------
        KVCache

        Examples
        --------
        Two answers to one prompt:

        >>> import numpy as np, sdpa
        >>> prompt, token = np.ones((1, 1, 5, 4)), np.ones((1, 1, 1, 4))
        >>> first = sdpa.KVCache(1, 1, 4, capacity=8)
        >>> first.append(prompt, prompt)
        >>> second = first.copy()
        >>> second.append(token, token)
        >>> first.lengths, second.lengths
        (array([5]), array([6]))
        """
        return copy.copy(self)

    def __getstate__(self) -> dict[str, Any]:
        """All attributes, with keys and values of the positions held alone."""
        return vars(self) | {"_key": self.key, "_value": self.value}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._key = _with_room(state["_key"], self.capacity)
        self._value = _with_room(state["_value"], self.capacity)

    @property
    def key(self) -> Array:
        """The keys held, a view (batch, heads, L, d_k), L the longest of `lengths`.

        Beyond a sequence's length the contents are arbitrary; key_lengths masks them.
        """
        return self._key[:, :, : self._longest]

    @property
    def value(self) -> Array:
        """The values held, a view (batch, heads, L, d_v) like `key`."""
        return self._value[:, :, : self._longest]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of positions held for each sequence, (batch,): the option key_lengths."""
        return self._lengths.copy()

    @property
    def positions(self) -> NDArray[np.int64]:
        """Number of positions appended to each sequence so far, (batch,), including dropped ones.

        This is the position of its next token, for `rotary_embedding`.
        """
        return self._positions.copy()

    @property
    def query_offset(self) -> NDArray[np.int64]:
        """Place of the last `append` among the keys held, (batch,): the option query_offset."""
        return self._lengths - self._counts

    @property
    def _longest(self) -> int:
        return int(self._lengths.max(initial=0))

    def append(self, key: ArrayLike, value: ArrayLike, lengths: ArrayLike | None = None) -> None:
        """Add positions to every sequence.

        Parameters
        ----------
        key : array_like, (batch, heads, n, d_k)
            float16, bfloat16, float32 or float64, rounded to the cache's dtype.
        value : array_like, (batch, heads, n, d_v)
            As key.
        lengths : array_like of int, (batch,), optional
            Number of the n positions that each sequence gets, if they differ; the rest is padding.

        Raises
        ------
        TypeError
            An argument has a dtype that is not accepted.
        ValueError
            A shape does not match, or there is no room: a cache without a window holds `capacity`
            positions in all, one with a window the new positions and `left` old ones. The cache
            stays unchanged.

        Examples
        --------
        >>> import numpy as np, sdpa
        >>> cache = sdpa.KVCache(2, 1, 4, capacity=8)
        >>> cache.append(np.ones((2, 1, 5, 4)), np.ones((2, 1, 5, 4)), lengths=[5, 3])
        >>> cache.append(np.ones((2, 1, 1, 4)), np.ones((2, 1, 1, 4)))
        >>> cache.lengths, cache.query_offset
        (array([6, 4]), array([5, 3]))
        """
        if lengths is None:
            key, value = arrays(key=key, value=value)
        else:
            key, value, lengths = arrays(key=key, value=value, lengths=lengths)
        n = key.shape[2] if key.ndim == 4 else 0
        for name, x, own in (("key", key, self._key), ("value", value, self._value)):
            checked_float(name, x)
            if x.ndim != 4 or x.shape != (*own.shape[:2], n, own.shape[3]):
                batch, heads, _, d = own.shape
                rows = "n" if name == "key" else n
                raise ValueError(f"{name}: expected ({batch}, {heads}, {rows}, {d}), got {x.shape}")
        counts = self._checked_counts(lengths, n)
        kept = self._kept(counts)
        # key or value may be a view of this cache, whose positions are about to move.
        if np.may_share_memory(key, self._key) or np.may_share_memory(value, self._value):
            key, value = key.copy(), value.copy()
        self._drop(kept)
        _write(self._key, key, self._lengths, counts)
        _write(self._value, value, self._lengths, counts)
        self._lengths = self._lengths + counts
        self._positions = self._positions + counts
        self._counts = counts

    def _checked_counts(self, lengths: ArrayLike | None, n: int) -> NDArray[np.int64]:
        if lengths is None:
            return np.full(self._lengths.shape, n, np.int64)
        return self._per_sequence("lengths", lengths, n)

    def _per_sequence(self, name: str, value: ArrayLike, most: int) -> NDArray[np.int64]:
        """One integer per sequence, from 0 to most."""
        x = _arguments.integers(name, value)
        if x.shape != self._lengths.shape:
            raise ValueError(f"{name}: expected {self._lengths.shape}, got {x.shape}")
        outside = x[(x < 0) | (x > most)]
        if outside.size:
            raise ValueError(f"{name}: expected integers from 0 to {most}, got {outside[0]}")
        return x

    def _kept(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of old positions of each sequence that stay, so that the new ones fit."""
        full = self._lengths + counts > self.capacity
        window = self._lengths if self._left is None else np.minimum(self._left, self._lengths)
        kept = np.where(full, window, self._lengths)
        lacking = np.flatnonzero(kept + counts > self.capacity)
        if lacking.size:
            b = lacking[0]
            raise ValueError(
                f"key: expected at most {self.capacity - kept[b]} new positions of sequence {b}, "
                f"which keeps {kept[b]} of capacity={self.capacity}, got {counts[b]}"
            )
        return kept

    def _drop(self, kept: NDArray[np.int64]) -> None:
        """Move the last `kept` positions of each sequence to its front."""
        for b in np.flatnonzero(kept < self._lengths):
            held = slice(self._lengths[b] - kept[b], self._lengths[b])
            for x in (self._key, self._value):
                x[b, :, : kept[b]] = x[b, :, held]
        self._lengths = kept

    def reorder(self, index: ArrayLike) -> None:
        """Let each sequence continue from another one, as a beam search does.

        Parameters
        ----------
        index : array_like of int, (batch,)
            Sequence b becomes a copy of sequence index[b]; several may continue from the same one.

        Raises
        ------
        TypeError
            index does not hold integers.
        ValueError
            index has another shape, or names a sequence that does not exist. The cache stays
            unchanged.

        Examples
        --------
        >>> import numpy as np, sdpa
        >>> cache = sdpa.KVCache(3, 1, 1, capacity=2)
        >>> token = np.arange(3.0).reshape(3, 1, 1, 1)
        >>> cache.append(token, token)
        >>> cache.reorder([2, 2, 0])
        >>> cache.key.ravel()
        array([2., 2., 0.], dtype=float32)
        """
        index = self._per_sequence("index", index, len(self._lengths) - 1)
        moved = np.flatnonzero(index != np.arange(len(index)))
        for x in (self.key, self.value):
            x[moved] = x[index[moved]]
        self._lengths = self._lengths[index]
        self._positions = self._positions[index]
        self._counts = self._counts[index]


def _with_room(held: Array, capacity: int) -> Array:
    """A copy of (batch, heads, L, d) with room for `capacity` positions."""
    batch, heads, n, d = held.shape
    # Zeroed pages take no memory until they are written.
    whole = np.zeros((batch, heads, capacity, d), held.dtype)
    whole[:, :, :n] = held
    return whole


@np.errstate(all="ignore")
def _write(to: Array, new: Array, at: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
    """Write the first counts[b] positions of new[b] to to[b], from at[b] on."""
    n = new.shape[2]
    if len(at) and (at == at[0]).all() and (counts == n).all():
        start = int(at[0])
        to[:, :, start : start + n] = new
        return
    for b, (start, count) in enumerate(zip(at, counts, strict=True)):
        to[b, :, start : start + count] = new[b, :, :count]
