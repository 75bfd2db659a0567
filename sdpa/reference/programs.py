"""Functions of the user on scores and on masks, and the derivatives of the former."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sdpa.reference.arrays import Array, Mask
from sdpa.reference.dual import Dual, Rows

Indices = NDArray[np.int64]
Args = Sequence[ArrayLike] | None


def indices_of(shape: tuple[int, ...], offset: ArrayLike) -> tuple[Indices, ...]:
    """(b, h, q, k) of each pair, of shape (..., heads, Lq, Lk).

    b counts the leading axes as one, h the query heads. k is the key's index, q that of the query
    plus `offset`, which broadcasts to the shape: its position among the keys.
    """
    *lead, n_q, n_k = shape
    heads = lead[-1] if lead else 1
    whole = (math.prod(lead[:-1]), heads, n_q, n_k)
    b, h, i, j = (np.broadcast_to(x, whole).reshape(shape) for x in np.indices(whole, sparse=True))
    return b, h, i + np.asarray(offset), j


def let_through(
    visible: Mask, indices: Sequence[Indices], mask_mod: Callable[..., Any], mask_args: Args = None
) -> Mask:
    """visible, without the pairs that mask_mod(b, h, q, k, *mask_args) forbids.

    The function is asked about visible pairs only.
    """
    found = np.zeros(visible.shape, bool)
    found[visible] = mask_mod(*(x[visible] for x in indices), *_elements(mask_args))
    return found


def modified(
    score: Array,
    visible: Mask,
    indices: Sequence[Indices],
    score_mod: Callable[..., Any],
    score_args: Args = None,
) -> Array:
    """score_mod(score, b, h, q, k, *score_args) of visible pairs."""
    found = np.full(score.shape, -np.inf)
    at = (x[visible] for x in indices)
    found[visible] = score_mod(score[visible], *at, *_elements(score_args))
    return found


def _arrays(args: Args) -> list[NDArray[Any]]:
    """The further arguments, floating ones in float64."""
    arrays = [np.asarray(x) for x in args or ()]
    return [x if x.dtype.kind in "iub" else x.astype(np.float64) for x in arrays]


def _elements(args: Args) -> list[Any]:
    def element(x: NDArray[Any], *indices: Any) -> Any:
        return x[indices]

    return [Rows(x.ndim, functools.partial(element, x)) if x.ndim else x[()] for x in _arrays(args)]


class Moved:
    """f = score_mod(score, b, h, q, k, *score_args) of visible pairs, and what moves with it.

    Parameters
    ----------
    score : (..., heads, Lq, Lk)
    visible : (..., heads, Lq, Lk) of bool
        Elsewhere all results are 0.
    indices : (b, h, q, k)
        As from `indices_of`.
    score_t : (..., heads, Lq, Lk)
        Tangent of score.
    args_t : sequence of array or None, None
        Tangents of the floating arguments; None is zero.

    Attributes
    ----------
    slope : df / dscore
    tangent : the tangent of f
    bend : d tangent / dscore
    """

    def __init__(
        self,
        score: Array,
        visible: Mask,
        indices: Sequence[Indices],
        score_mod: Callable[..., Any],
        score_args: Args,
        score_t: Array,
        args_t: Sequence[ArrayLike | None] | None,
    ) -> None:
        self._visible, self._function, self._args = visible, score_mod, _arrays(score_args)
        self._at = [x[visible] for x in indices]
        self._score, self._score_t = score[visible], score_t[visible]
        moves = args_t or [None] * len(self._args)
        self._args_t = [None if t is None else np.asarray(t, np.float64) for t in moves]
        # What the function reads: (argument, indices) in the order of its reading.
        self._read: list[tuple[int, tuple[Any, ...]]] = []
        self.tangent, self.slope, self.bend = self._run(None)

    def _run(self, read: int | None) -> tuple[Array, Array, Array]:
        """(tangent, f', tangent'), ' with respect to an element that is read, or to the score."""
        self._read = []

        def element(number: int, *indices: Any) -> Any:
            x, x_t = self._args[number], self._args_t[number]
            if x.dtype.kind != "f":
                return x[indices]
            self._read.append((number, indices))
            seed = Dual(1.0) if len(self._read) - 1 == read else None
            return Dual(Dual(x[indices], None if x_t is None else x_t[indices]), seed)

        score = Dual(Dual(self._score, self._score_t), Dual(1.0) if read is None else None)
        args = [
            Rows(x.ndim, functools.partial(element, n)) if x.ndim else element(n)
            for n, x in enumerate(self._args)
        ]
        found = self._function(score, *self._at, *args)
        if not isinstance(found, Dual):
            found = Dual(Dual(found))
        first = Dual(None) if found.tangent is None else found.tangent
        first = first if isinstance(first, Dual) else Dual(first)
        inner = found.value if isinstance(found.value, Dual) else Dual(found.value)
        return self._whole(inner.tangent), self._whole(first.value), self._whole(first.tangent)

    def _whole(self, x: Any) -> Array:
        found = np.zeros(self._visible.shape)
        found[self._visible] = 0 if x is None else x
        return found

    def of_arguments(self, by_f: Array, by_tangent: Array | None = None) -> tuple[Any, ...]:
        """Gradients of sum by_f f + by_tangent tangent; None for arguments of integers."""
        found: list[Any] = [np.zeros(x.shape) if x.dtype.kind == "f" else None for x in self._args]
        for read in range(len(self._read)):
            _, slope, bend = self._run(read)
            change = by_f * slope + (0 if by_tangent is None else by_tangent * bend)
            number, indices = self._read[read]
            np.add.at(found[number], indices, change[self._visible])
        return tuple(found)
