"""Types of arrays, sums over their axes, and rules of attention that are operations on arrays.

The rules take arrays of NumPy or of another library.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]

# ------------------------------------------------------------------------------- types


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """dtype in native byte order."""
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def compute_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type of the arithmetic on this dtype: float64 for float64, float32 for the others."""
    return np.dtype(np.float64 if native(dtype) == np.float64 else np.float32)


def is_narrow(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype of floats has 16 bits: too few of out for gradients."""
    return dtype.itemsize == 2


def widen(x: Array) -> Array:
    """x in the compute type; broadcast axes stay broadcast."""
    return _converted(x, compute_type(x.dtype))


@np.errstate(all="ignore")
def _converted(x: Array, dtype: np.dtype[Any]) -> Array:
    if x.dtype == dtype:
        return x
    return np.broadcast_to(distinct(x).astype(dtype), x.shape)


def distinct(x: Array, axes: int | None = None) -> Array:
    """x with length 1 along those of its first `axes` axes (default: all) whose stride is 0."""
    sizes = zip(x.strides[:axes], x.shape[:axes], strict=True)
    return x[tuple(slice(0, 1) if stride == 0 and n > 1 else slice(None) for stride, n in sizes)]


def widened_options(options: dict[str, Any], dtype: np.dtype[Any]) -> dict[str, Any]:
    """The options for operands widened from `dtype`: an additive mask has their compute type.

    The kernels read a mask of any type; this is for sums in NumPy, also of its gradient.
    """
    mask = options.get("attn_mask")
    if mask is None or mask.dtype == bool:
        return options
    return options | {"attn_mask": _converted(mask, compute_type(dtype))}


@np.errstate(all="ignore")
def rounded(x: Array | None, like: Array | None) -> Array | None:
    """x in the dtype of `like`, in native byte order; None if there is no x."""
    if x is None or like is None:
        return None
    return x.astype(native(like.dtype), copy=False)


# ------------------------------------------------------------------------------- memory


@contextlib.contextmanager
def allocating(shape: tuple[int, ...], dtype: DTypeLike) -> Iterator[None]:
    """MemoryError where an array of checked sizes has more bytes than NumPy has a number for."""
    try:
        yield
    except ValueError:
        raise MemoryError(f"no memory for an array of shape {shape} of {np.dtype(dtype)}") from None


# ------------------------------------------------------------------------------- shapes


def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape to which these broadcast, of any number of axes: NumPy's function takes 32."""
    found: list[int] = []
    for sizes in zip_longest(*map(reversed, shapes), fillvalue=1):
        size = next((n for n in sizes if n != 1), 1)
        if any(n not in (1, size) for n in sizes):
            raise ValueError(f"shapes that do not broadcast: {shapes}")
        found.append(size)
    return tuple(reversed(found))


# ------------------------------------------------------------------------------- sums


def sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """x summed over the axes along which `shape` was broadcast."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    axes = tuple(a for a, n in enumerate(shape) if n == 1 and x.shape[a] != 1)
    return x.sum(axis=axes, keepdims=True) if axes else x


def rows_in_use(grad: Array) -> Array:
    """(..., L, 1) bool: whether a row's gradient is not zero; NaN counts as not zero."""
    return cast(Array, (grad != 0).any(axis=-1, keepdims=True))


@np.errstate(all="ignore")
def product_skipping_zeros(x: Array, y: Array) -> Array:
    """x @ y where a 0 in x gives 0 even if y holds NaN there."""
    product = x @ y
    finite = np.isfinite(y)
    if finite.all():
        return product
    product = x @ np.where(finite, y, 0)
    for j in np.unique(np.nonzero(~finite)[-2]):
        left, right = x[..., j, None], y[..., None, j, :]
        product += np.where((left != 0) & ~np.isfinite(right), left * right, 0)
    return product


@np.errstate(all="ignore")
def weight_gradient(x: Array, grad: Array, shape: tuple[int, ...]) -> Array:
    """x^T grad, the gradient of W in x W: summed over rows and over axes that W lacks.

    x is (..., L, d), grad (..., L, h), shape (..., d, h). A row whose gradient is 0 adds nothing,
    whatever x holds there, since masked rows may hold NaN.
    """

    def product(x: Array) -> Array:
        if math.prod(shape[:-2]) == 1:
            lead = broadcast_shapes(x.shape[:-1], grad.shape[:-1])
            left, right = (
                np.broadcast_to(y, (*lead, y.shape[-1])).reshape(math.prod(lead), y.shape[-1])
                for y in (x, grad)
            )
            return cast(Array, (left.T @ right).reshape(shape))
        return sum_to(np.swapaxes(x, -1, -2) @ grad, shape)

    result = product(x)
    return result if np.isfinite(result).all() else product(np.where(rows_in_use(grad), x, 0))


# ------------------------------------------------------------------------------- rules


def repeat_heads(x: Any, n_heads: int, repeat: Callable[..., Any] = np.repeat) -> Any:
    """x (..., heads, L, d) with each head repeated for the query heads that share it.

    x without an axis of heads stays as it is. `repeat` is called with an array, a number and an
    axis: np.repeat, or what other libraries have in its place.
    """
    if x.ndim < 3:
        return x
    return repeat(x, n_heads // max(1, x.shape[-3]), x.ndim - 3)


def sum_heads(x: Any, n_heads: int) -> Any:
    """x (..., query heads, L, d) summed over those that share a head: what undoes `repeat_heads`.

    It is the gradient of the heads from the gradients of their copies.
    """
    groups = (n_heads, x.shape[-3] // max(1, n_heads))
    return x.reshape((*x.shape[:-3], *groups, *x.shape[-2:])).sum(-3)


def softcapped(scores: Any, cap: Any, tanh: Callable[[Any], Any] = np.tanh) -> tuple[Any, Any]:
    """cap tanh(scores / cap), and its slope with respect to scores.

    A cap beyond the range of their type is none, as in the kernels, which take it in units of log2.
    """
    kind = np.float64 if scores.dtype.itemsize == 8 else np.float32
    if cap > float(np.finfo(kind).max) / math.log2(math.e):
        return scores, 1
    bent = tanh(scores / cap)
    return cap * bent, 1 - bent * bent
