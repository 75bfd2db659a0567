"""Keys and values of past positions, kept between the steps of a decoder."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable
from itertools import starmap
from operator import setitem
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from sdpa import _arguments, _core
from sdpa._arguments import checked_float
from sdpa._arrays import Array, allocating
from sdpa._public import publish
from sdpa._repr import shown

__all__ = ["KVCache"]


@shown
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
    Such a cache also takes prompts that are longer than it is; see `append`.

    An interrupt, or a lack of memory, leaves a cache as it was before the call or as after it.

    Parameters
    ----------
    batch, heads : int
        Number of sequences, and heads of key and value (kv_heads of a layer with grouped heads).
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
    MemoryError
        There is no memory for `capacity` positions.

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
        self._key = _with_room(_zeros((*rows, sizes["d_k"]), dtype), self.capacity)
        self._value = _with_room(_zeros((*rows, sizes["d_v"]), dtype), self.capacity)
        # These arrays are replaced, never written to.
        self._lengths = self._dropped = np.zeros(sizes["batch"], np.int64)
        self._counts = self._lengths  # of the last append
        self._count: int | None = 0  # that of all sequences, if they had the same
        self._longest: int = 0
        self._alike: bool = True  # whether all have the same length

    def _shown(self) -> tuple[dict[str, Any], str]:
        batch, heads, capacity, d_k = self._key.shape
        settings = {"batch": batch, "heads": heads, "d_k": d_k, "d_v": self._value.shape[-1]}
        settings |= {"capacity": capacity, "dtype": self._key.dtype, "window": self.window}
        held, appended = (
            " to ".join(map(str, sorted({int(n.min()), int(n.max())}) if n.size else [0]))
            for n in (self.lengths, self.positions)
        )
        size = (self._key.nbytes + self._value.nbytes) / 1e6
        return settings, f"holds {held} positions of {appended} appended, in {size:.3g} MB"

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
        return self._lengths + self._dropped

    @property
    def query_offset(self) -> NDArray[np.int64]:
        """Place of the last `append` among the keys held, (batch,): the option query_offset.

        Raises
        ------
        ValueError
            The last `append` was longer than what fits beside the keys that its queries see.
        """
        offset = self._lengths - self._counts
        left, count = self._left, self._count
        if left is not None and (count is None or left + count > self.capacity):
            seen = np.minimum(left, offset + self._dropped)
            lacking = np.flatnonzero(offset < seen)
            if lacking.size:
                b = lacking[0]
                raise ValueError(
                    f"query_offset: expected at most {self.capacity - seen[b]} positions in the "
                    f"last append to sequence {b}, beside {seen[b]} of capacity={self.capacity} "
                    f"that its queries see, got {self._counts[b]}; attend over the keys held and "
                    "the new ones before they are appended"
                )
        return offset

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
            A shape does not match, or there is no room: a cache that drops nothing holds `capacity`
            positions in all. The cache stays unchanged.

        Notes
        -----
        With a window a cache keeps the last positions of what is longer than it is. Their queries
        see keys that are dropped, so the caller attends over the keys held and the new ones before
        they are appended; `query_offset` is refused after such a call. `positions` counts all.

        Examples
        --------
        >>> import numpy as np, sdpa
        >>> cache = sdpa.KVCache(2, 1, 4, capacity=8)
        >>> cache.append(np.ones((2, 1, 5, 4)), np.ones((2, 1, 5, 4)), lengths=[5, 3])
        >>> cache.append(np.ones((2, 1, 1, 4)), np.ones((2, 1, 1, 4)))
        >>> cache.lengths, cache.query_offset
        (array([6, 4]), array([5, 3]))

        A prompt of nine tokens for a cache of five, then one token:

        >>> rng = np.random.default_rng(0)
        >>> query, key, value = rng.standard_normal((3, 1, 2, 10, 4))
        >>> options = {"is_causal": True, "window": (2, 0)}
        >>> cache = sdpa.KVCache(1, 2, 4, capacity=5, dtype=np.float64, window=(2, 0))
        >>> at = slice(0, 9)
        >>> prompt = sdpa.attention(query[:, :, at], key[:, :, at], value[:, :, at], **options)
        >>> cache.append(key[:, :, at], value[:, :, at])
        >>> cache.lengths, cache.positions
        (array([5]), array([9]))
        >>> cache.append(key[:, :, 9:], value[:, :, 9:])
        >>> token = sdpa.attention(query[:, :, 9:], cache.key, cache.value, **options,
        ...                        query_offset=cache.query_offset)
        >>> whole = sdpa.attention(query, key, value, **options)
        >>> np.allclose(np.concatenate([prompt, token], axis=2), whole)
        True
        """
        given = {"key": key, "value": value}
        key, value, *rest = _core._arrays(
            **(given if lengths is None else given | {"lengths": lengths})
        )
        n = key.shape[2] if key.ndim == 4 else 0
        for name, x, own in (("key", key, self._key), ("value", value, self._value)):
            checked_float(name, x)
            if x.shape != (*own.shape[:2], n, own.shape[3]):
                batch, heads, _, d = own.shape
                rows = "n" if name == "key" else n
                hint = ""
                if x.ndim == 4 and x.shape[1] != heads:
                    hint = f"; heads={heads} of the cache are the heads of key and value"
                raise ValueError(
                    f"{name}: expected ({batch}, {heads}, {rows}, {d}), got {x.shape}{hint}"
                )
        if not key.dtype == value.dtype == self._key.dtype:
            key, value = _rounded(self._key.dtype, key, value)
        if rest:
            self._append(key, value, self._per_sequence("lengths", rest[0], n), None)
        elif self._longest + n <= self.capacity:
            self._append_behind(key, value, n)
        else:
            self._append(key, value, self._counts_of(n), n)

    def _append_behind(self, key: Array, value: Array, n: int) -> None:
        """Write n positions of each sequence where nothing has to move: the way of most tokens."""
        at: tuple[Any, ...]
        if self._alike:
            at = (..., slice(self._longest, self._longest + n), slice(None))
            # NumPy sees to a view of the array itself; keys must not be written over the values.
            if np.may_share_memory(value, self._key):
                value = value.copy()
            self._key[at] = key
            self._value[at] = value
        else:
            key, value = self._apart(key, value)
            for b, start in enumerate(self._lengths.tolist()):
                at = (b, slice(None), slice(start, start + n))
                self._key[at] = key[b]
                self._value[at] = value[b]
        counts = self._counts_of(n)
        lengths, longest = self._lengths + counts, self._longest + (n if counts.size else 0)
        self._change(_lengths=lengths, _longest=longest, _counts=counts, _count=n)

    def _append(
        self, key: Array, value: Array, counts: NDArray[np.int64], count: int | None
    ) -> None:
        """Write counts[b] positions of each sequence; `count` is their number if it is the same."""
        kept = self._kept(counts)
        key, value = self._apart(key, value)
        new = np.minimum(counts, self.capacity)
        writes = self._moves(kept)
        for b, (start, most, end) in enumerate(np.stack([kept, new, counts], axis=1).tolist()):
            for own, x in ((self._key, key), (self._value, value)):
                writes.append((own[b, :, start : start + most], x[b, :, end - most : end]))
        dropped = self._dropped + (self._lengths - kept) + (counts - new)
        self._change(
            writes, **_of_lengths(kept + new), _dropped=dropped, _counts=counts, _count=count
        )

    def _apart(self, key: Array, value: Array) -> tuple[Array, Array]:
        """Key and value, copied if one may be a view of this cache, whose contents change."""
        pairs = ((x, own) for x in (key, value) for own in (self._key, self._value))
        if any(np.may_share_memory(*pair) for pair in pairs):
            return key.copy(), value.copy()
        return key, value

    def _change(self, writes: Iterable[tuple[Array, Array]] = (), **attributes: Any) -> None:
        """Write to parts of key and value, and set attributes.

        All in one call of C, with nothing to allocate: an interrupt comes before it or after it.
        """
        steps: list[tuple[Any, ...]] = [(own, ..., x) for own, x in writes]
        steps += [(vars(self), name, x) for name, x in attributes.items()]
        deque(starmap(setitem, steps), maxlen=0)

    def _counts_of(self, n: int) -> NDArray[np.int64]:
        """n for each sequence."""
        return self._counts if self._count == n else np.full(self._lengths.shape, n, np.int64)

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
        full = np.flatnonzero(self._lengths + counts > self.capacity)
        if full.size and self._left is None:
            b = full[0]
            raise ValueError(
                f"key: expected at most {self.capacity - self._lengths[b]} new positions of "
                f"sequence {b}, which keeps {self._lengths[b]} of capacity={self.capacity}, "
                f"got {counts[b]}"
            )
        kept = self._lengths.copy()
        for b in full:
            kept[b] = min(kept[b], self._left, max(self.capacity - counts[b], 0))
        return kept

    def _moves(self, kept: NDArray[np.int64]) -> list[tuple[Array, Array]]:
        """What moves the last `kept` positions of each sequence to its front."""
        moved = np.flatnonzero(kept < self._lengths).tolist()
        places = [(b, int(kept[b]), int(self._lengths[b])) for b in moved]
        return [
            (x[b, :, :n], x[b, :, end - n : end].copy())
            for b, n, end in places
            for x in (self._key, self._value)
        ]

    def truncate(self, lengths: ArrayLike) -> None:
        """Take back the last positions of sequences, such as rejected tokens of a draft.

        Without a window each position can be taken back. A cache with a window drops positions when
        it is full; from then on it refuses to go back so far that the next query would not have the
        `left` positions that it sees, even if all that goes came by the last `append`.

        Parameters
        ----------
        lengths : int or array_like of int, (batch,)
            Number of positions that each sequence holds afterwards, at most those of `lengths`:
            cache.lengths - n takes n back.

        Raises
        ------
        TypeError
            lengths does not hold integers.
        ValueError
            lengths has another shape, or a number is negative, more than the sequence holds, or too
            few for the window. The cache stays unchanged.

        Examples
        --------
        Of a draft of four tokens the first sequence accepts three, the second one:

        >>> import numpy as np, sdpa
        >>> cache = sdpa.KVCache(2, 1, 4, capacity=16)
        >>> cache.append(np.ones((2, 1, 6, 4)), np.ones((2, 1, 6, 4)))
        >>> cache.append(np.ones((2, 1, 4, 4)), np.ones((2, 1, 4, 4)))
        >>> cache.truncate(cache.lengths - [1, 3])
        >>> cache.lengths, cache.positions
        (array([9, 7]), array([9, 7]))
        """
        x = _arguments.integers("lengths", lengths)
        held = self._lengths
        if x.shape not in ((), held.shape):
            raise ValueError(f"lengths: expected one integer or {held.shape}, got {x.shape}")
        x = np.broadcast_to(x, held.shape).copy()
        least = np.where(self._dropped > 0, self._left or 0, 0)
        for b in np.flatnonzero((x < least) | (x > held)):
            because = (
                f"; its next query sees {least[b]} before it, and earlier ones are dropped: "
                "go on from a copy() made earlier"
            )
            raise ValueError(
                f"lengths: expected integers from {least[b]} to {held[b]} for sequence {b}, "
                f"got {x[b]}{because if 0 <= x[b] < least[b] else ''}"
            )
        counts = np.maximum(self._counts - (held - x), 0)
        self._change(**_of_lengths(x), _counts=counts, _count=None)

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
        writes = [
            pair
            for x in (self.key, self.value)
            for pair in zip((x[b] for b in moved), x[index[moved]], strict=True)
        ]
        self._change(
            writes,
            **_of_lengths(self._lengths[index]),
            _dropped=self._dropped[index],
            _counts=self._counts[index],
            _count=None,
        )


def _of_lengths(lengths: NDArray[np.int64]) -> dict[str, Any]:
    """The attributes that say how many positions are held."""
    longest = int(lengths.max(initial=0))
    alike = bool((lengths == longest).all())
    return {"_lengths": lengths, "_longest": longest, "_alike": alike}


def _with_room(held: Array, capacity: int) -> Array:
    """A copy of (batch, heads, L, d) with room for `capacity` positions."""
    batch, heads, n, d = held.shape
    # Zeroed pages take no memory until they are written.
    whole = _zeros((batch, heads, capacity, d), held.dtype)
    whole[:, :, :n] = held
    return whole


def _zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    with allocating(shape, dtype):
        return np.zeros(shape, dtype)


@np.errstate(all="ignore")
def _rounded(dtype: np.dtype[Any], *x: Array) -> list[Array]:
    """The arrays in this dtype, those that have it uncopied."""
    return [y.astype(dtype, copy=False) for y in x]


publish("sdpa", globals())
