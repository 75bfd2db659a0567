"""Functions of the user on scores and on masks, and the derivatives of the former."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sdpa._programs import traced_score
from sdpa._programs._evaluate import evaluate
from sdpa._programs._variants import Derivatives
from sdpa.reference.arrays import Array, Mask

Indices = NDArray[np.int64]


def indices_of(shape: tuple[int, ...], offset: ArrayLike) -> tuple[Indices, ...]:
    """(b, h, q, k) of each pair, of shape (..., heads, Lq, Lk).

    b counts the leading axes as one, h the query heads. k is the key's index, q that of the query
    plus `offset`, which broadcasts to the shape: its position among the keys.
    """
    *lead, n_q, n_k = shape
    heads = lead[-1] if lead else 1
    b, h, i, j = np.ogrid[: math.prod(lead[:-1]), :heads, :n_q, :n_k]
    whole = (math.prod(lead[:-1]), heads, n_q, n_k)
    b, h, i, j = (np.broadcast_to(x, whole).reshape(shape) for x in (b, h, i, j))
    return b, h, i + np.asarray(offset), j


def arguments(args: Sequence[ArrayLike] | None) -> list[NDArray[Any]]:
    """The further arguments, floating ones in float64."""
    arrays = [np.asarray(x) for x in args or ()]
    return [x if x.dtype.kind in "iub" else x.astype(np.float64) for x in arrays]


def let_through(
    visible: Mask,
    indices: Sequence[Indices],
    mask_mod: Callable[..., Any],
    mask_args: Sequence[ArrayLike] | None = None,
) -> Mask:
    """visible, without the pairs that mask_mod(b, h, q, k, *mask_args) forbids.

    The function is asked about visible pairs only.
    """
    found = np.zeros(visible.shape, bool)
    found[visible] = mask_mod(*(x[visible] for x in indices), *arguments(mask_args))
    return found


def modified(
    score: Array,
    visible: Mask,
    indices: Sequence[Indices],
    score_mod: Callable[..., Any],
    score_args: Sequence[ArrayLike] | None = None,
) -> Array:
    """score_mod(score, b, h, q, k, *score_args) of visible pairs."""
    found = np.full(score.shape, -np.inf)
    at = (x[visible] for x in indices)
    found[visible] = score_mod(score[visible], *at, *arguments(score_args))
    return found


class Moved:
    """f = score_mod(score, b, h, q, k, *score_args) of visible pairs, and what moves with it.

    Parameters
    ----------
    score : (..., heads, Lq, Lk)
    visible : (..., heads, Lq, Lk) of bool
        Elsewhere all results are 0.
    indices : (b, h, q, k)
        As from `indices_of`.
    score_t : (..., heads, Lq, Lk), None
        Tangent of score; None is zero.
    args_t : sequence of array or None, None
        Tangents of the floating arguments.
    """

    def __init__(
        self,
        score: Array,
        visible: Mask,
        indices: Sequence[Indices],
        score_mod: Callable[..., Any],
        score_args: Sequence[ArrayLike] | None = None,
        score_t: Array | None = None,
        args_t: Sequence[ArrayLike | None] | None = None,
    ) -> None:
        self.visible, self.args = visible, arguments(score_args)
        entry, captured = traced_score(score_mod, self.args)
        self._n_args = len(self.args)
        self._arrays = [*self.args, *captured]
        moves = args_t or [None] * self._n_args
        self._tangents = [
            np.zeros(x.shape) if t is None else np.asarray(t, np.float64)
            for x, t in zip(self.args, moves, strict=True)
        ]
        names = ("batch", "head", "query", "key")
        self._inputs: dict[str, Any] = {
            name: x[visible] for name, x in zip(names, indices, strict=True)
        }
        self._inputs |= {
            "score": score[visible],
            "tangent": np.zeros(score.shape)[visible] if score_t is None else score_t[visible],
        }
        self._nodes = Derivatives(entry.graph, entry.root, self._n_args)

    def _value(self, node: Any) -> Array:
        found = np.zeros(self.visible.shape)
        if node is not None:
            found[self.visible] = evaluate([node], self._inputs, self._arrays, self._tangents)[0]
        return found

    @property
    def slope(self) -> Array:
        """df / dscore."""
        return self._value(self._nodes.slope)

    @property
    def tangent(self) -> Array:
        """The tangent of f."""
        return self._value(self._nodes.tangent)

    @property
    def bend(self) -> Array:
        """d tangent / dscore."""
        return self._value(self._nodes.bend)

    def of_arguments(self, by_f: Array, by_tangent: Array | None = None) -> tuple[Any, ...]:
        """Gradients of sum by_f f + by_tangent tangent; None for arguments of integers."""
        first, both = self._nodes.changes()
        inputs = dict(self._inputs)
        if by_tangent is None:
            inputs["upstream"] = by_f[self.visible]
        else:
            inputs |= {"second": by_f[self.visible], "upstream": by_tangent[self.visible]}
        found = [np.zeros(x.shape) if x.dtype.kind == "f" else None for x in self.args]
        for leaf, change in first if by_tangent is None else both:
            nodes = [leaf.args[0], change]
            place, added = evaluate(nodes, inputs, self._arrays, self._tangents)
            place, added = np.broadcast_arrays(place, added, self._inputs["key"])[:2]
            total = found[leaf.payload.number]
            assert total is not None
            np.add.at(total.reshape(-1), place, added)
        return tuple(found)
