"""Rules of attention that are operations on arrays, of NumPy or of another library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def repeat_heads(x: Any, n_heads: int, repeat: Callable[..., Any] = np.repeat) -> Any:
    """x (..., heads, L, d) with each head repeated for the query heads that share it.

    x without an axis of heads stays as it is. `repeat` is called with an array, a number and an
    axis: np.repeat, or what other libraries have in its place.
    """
    if x.ndim < 3:
        return x
    return repeat(x, max(1, n_heads // max(1, x.shape[-3])), x.ndim - 3)


def sum_heads(x: Any, n_heads: int) -> Any:
    """x (..., query heads, L, d) summed over those that share a head: what undoes `repeat_heads`.

    It is the gradient of the heads from the gradients of their copies.
    """
    groups = (n_heads, x.shape[-3] // max(1, n_heads))
    return x.reshape((*x.shape[:-3], *groups, *x.shape[-2:])).sum(-3)


def softcapped(scores: Any, cap: Any, tanh: Callable[[Any], Any] = np.tanh) -> tuple[Any, Any]:
    """cap tanh(scores / cap), and its slope with respect to scores."""
    bent = tanh(scores / cap)
    return cap * bent, 1 - bent * bent
