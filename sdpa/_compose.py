"""What the mechanisms around the kernel share: checks before anything is computed, types, sums.

Each of them prepares the operands of `sdpa.attention_forward` and `attention_backward`, which do
the rest. 16-bit operands are widened to float32 once, so that what is prepared is not rounded
twice; results are rounded to the operands' dtype at the end.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sdpa import _core

Array = NDArray[Any]


class AttentionOptions(TypedDict, total=False):
    """Options of `sdpa.attention_forward` that do not depend on how the scores come about."""

    attn_mask: ArrayLike | None
    dropout_p: float
    is_causal: bool | Literal["upper_left", "lower_right"]
    enable_gqa: bool
    softcap: float | None
    window: tuple[int | None, int | None] | None
    sinks: ArrayLike | None
    alibi_slopes: ArrayLike | None
    key_lengths: int | ArrayLike | None
    query_offset: int | ArrayLike | None
    rng: int | None
    workers: int | None


class ScaledOptions(AttentionOptions, total=False):
    """The same, and the scale."""

    scale: float | None


# ------------------------------------------------------------------------------- arguments


def arrays(**arguments: ArrayLike) -> list[Array]:
    """Each argument as an array; what NumPy cannot take is a TypeError that names it."""
    return [_core._array(name, value) for name, value in arguments.items()]


def checked_options(
    function: str, options: Mapping[str, Any], known: Iterable[str]
) -> dict[str, Any]:
    """A copy of the options, mask and sinks as arrays; a TypeError for one that is not known."""
    for name in options:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument '{name}'")
    checked = dict(options)
    for name in ("attn_mask", "sinks"):
        if checked.get(name) is not None:
            checked[name] = _core._array(name, checked[name])
    return checked


def checked_needs(needs: Iterable[str], known: Sequence[str]) -> tuple[str, ...]:
    """The names of the gradients that are asked for."""
    if isinstance(needs, str):
        raise TypeError(
            f"needs: expected a sequence of names such as {tuple(known[:2])}, got {needs!r}"
        )
    needs = tuple(needs)
    for name in needs:
        if name not in known:
            raise ValueError(
                f"needs: expected names among {', '.join(map(repr, known))}, got {name!r}"
            )
    return needs


def integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected one integer, got {value!r}") from None


def diagonal_offset(options: dict[str, Any], n_q: int, n_k: int) -> int:
    """The position of query 0 among the keys, taken out of the options.

    One integer: what is composed around distances has one diagonal for the whole batch.
    is_causal="lower_right" becomes True.
    """
    offset = options.pop("query_offset", None)
    if options.get("is_causal") != "lower_right":
        return 0 if offset is None else integer("query_offset", offset)
    if offset is not None:
        raise ValueError(
            "query_offset: expected None with is_causal='lower_right', which sets the offset itself"
        )
    options["is_causal"] = True
    length = options.get("key_lengths")
    return (n_k if length is None else integer("key_lengths", length)) - n_q


def positive(name: str, value: float) -> float:
    """A finite number above 0 whose reciprocal is finite, too."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{name}: expected a finite number, got {value!r}") from None
    if not 0 < number < math.inf or math.isinf(1 / number):
        raise ValueError(f"{name}: expected a number above 0, got {value!r}")
    return number


def checked_float(name: str, x: Array) -> None:
    """A TypeError for a dtype that the kernels do not take."""
    if x.dtype.name not in ("float16", "bfloat16", "float32", "float64"):
        raise TypeError(f"{name}: expected float16, bfloat16, float32 or float64, got {x.dtype}")


# ------------------------------------------------------------------------------- types


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The same in native byte order."""
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def widen(x: Array) -> Array:
    """x in the type of the arithmetic, float32 or float64; broadcast axes stay broadcast."""
    dtype = np.float64 if native(x.dtype) == np.float64 else np.float32
    if x.dtype == dtype:
        return x
    return np.broadcast_to(distinct(x).astype(dtype), x.shape)


def distinct(x: Array, axes: int | None = None) -> Array:
    """x without repetitions along its first `axes` axes (all): length 1 where the stride is 0."""
    sizes = zip(x.strides[:axes], x.shape[:axes], strict=True)
    return x[tuple(slice(0, 1) if stride == 0 and n > 1 else slice(None) for stride, n in sizes)]


def widened_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options for widened operands: an additive mask of 16 bits is widened, too."""
    mask = options.get("attn_mask")
    if mask is None or mask.dtype == bool:
        return options
    return options | {"attn_mask": widen(mask)}


@np.errstate(all="ignore")
def rounded(x: Array | None, like: Array) -> Array | None:
    """x in the dtype of `like`, in native byte order."""
    return None if x is None else x.astype(native(like.dtype), copy=False)


def forward(
    query: Array, key: Array, value: Array, options: dict[str, Any], like: Array
) -> _core.AttentionForward:
    """attention_forward of widened operands, out in the dtype of `like`."""
    out, lse = _core.attention_forward(query, key, value, **widened_options(options))
    return _core.AttentionForward(cast(Array, rounded(out, like)), lse)


# ------------------------------------------------------------------------------- sums


def sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """x summed over the axes along which `shape` was broadcast."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    axes = tuple(a for a, n in enumerate(shape) if n == 1 and x.shape[a] != 1)
    return x.sum(axis=axes, keepdims=True) if axes else x


def felt_rows(grad: Array) -> Array:
    """(..., L, 1) bool: whether a row's gradient says that the row was felt, NaN included."""
    return cast(Array, (grad != 0).any(axis=-1, keepdims=True))


@np.errstate(all="ignore")
def felt_product(x: Array, y: Array) -> Array:
    """x @ y, in which a 0 of x does not feel what y holds, NaN included."""
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
    whatever x holds there: masked rows may hold NaN.
    """

    def product(x: Array) -> Array:
        if math.prod(shape[:-2]) == 1:
            lead = np.broadcast_shapes(x.shape[:-1], grad.shape[:-1])
            left, right = (
                np.broadcast_to(y, (*lead, y.shape[-1])).reshape(math.prod(lead), y.shape[-1])
                for y in (x, grad)
            )
            return cast(Array, (left.T @ right).reshape(shape))
        return sum_to(np.swapaxes(x, -1, -2) @ grad, shape)

    result = product(x)
    return result if np.isfinite(result).all() else product(np.where(felt_rows(grad), x, 0))
