"""Helpers of all mechanisms: checks before anything is computed, types, backward calls, sums.

Each mechanism prepares the operands of `sdpa.attention_forward` and `attention_backward`, which do
the rest. 16-bit operands are widened to float32 once, so that prepared operands are not rounded
twice; results are rounded to the operands' dtype at the end.
"""

from __future__ import annotations

import difflib
import inspect
import math
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sdpa import _arguments, _core

Array = NDArray[Any]

# ------------------------------------------------------------------------------- arguments


def arrays(**arguments: ArrayLike) -> list[Array]:
    """Each argument as an array; a TypeError names the one that NumPy cannot convert.

    Converting one may run code that changes another, so all are converted before any is looked at.
    """
    return _core._arrays(**arguments)


def converted(
    options: Mapping[str, Any], optional: Mapping[str, Any], **arguments: ArrayLike
) -> tuple[list[Array], list[Array | None], dict[str, Any]]:
    """`arrays` of the arguments, of the optional ones, which may be None, and of the options."""
    own = {name: options[name] for name in _ARRAYS if name in options}
    given = {name: x for name, x in {**optional, **own}.items() if x is not None}
    found = dict(zip([*arguments, *given], arrays(**arguments, **given), strict=True))
    whole = {**options, **{name: found.get(name) for name in own}}
    return [found[name] for name in arguments], [found.get(name) for name in optional], whole


_ARRAYS = ("attn_mask", "sinks", "alibi_slopes")


def checked_options(
    function: Callable[..., Any], options: Mapping[str, Any], known: Collection[str]
) -> dict[str, Any]:
    """A copy of `function`'s options; a TypeError if one is unknown."""
    for name in options:
        if name not in known:
            raise TypeError(_unexpected(function, name, known))
    return dict(options)


def seeded(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a function that returns out alone, with a seed for its dropout."""
    if "dropout_p" not in options or options.get("rng") is not None:
        return dict(options)
    return {**options, "rng": secrets.randbits(64)}


def _unexpected(function: Callable[..., Any], name: str, known: Collection[str]) -> str:
    """CPython's message for an unknown keyword, as the functions of the extension word it."""
    parameters = inspect.signature(function).parameters.values()
    own = [p.name for p in parameters if p.default is not p.empty]
    close = difflib.get_close_matches(name, [*own, *known], 1)
    hint = f". Did you mean '{close[0]}'?" if close else ""
    return f"{function.__qualname__}() got an unexpected keyword argument '{name}'{hint}"


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


def diagonal_offset(options: dict[str, Any], n_q: int, n_k: int) -> int:
    """Remove the position of query 0 among the keys from the options, and return it.

    It is one integer, because functions composed around distances have one diagonal for the whole
    batch.
    is_causal="lower_right" becomes True.
    """
    offset = options.pop("query_offset", None)
    if options.get("is_causal") != "lower_right":
        return 0 if offset is None else _arguments.offset("query_offset", offset)
    if offset is not None:
        raise ValueError(
            "query_offset: expected None with is_causal='lower_right', which sets the offset itself"
        )
    options["is_causal"] = True
    length = options.get("key_lengths")
    return (n_k if length is None else _arguments.integer("key_lengths", length)) - n_q


def positive(name: str, value: float) -> float:
    """Return a number above 0 that is finite, and so is its reciprocal; raise otherwise."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{name}: expected a finite number, got {value!r}") from None
    if not 0 < number < math.inf or math.isinf(1 / number):
        raise ValueError(f"{name}: expected a number above 0, got {value!r}")
    return number


def checked_float(name: str, x: Array) -> None:
    """Raise a TypeError for a dtype that the kernels do not accept."""
    if x.dtype.name not in ("float16", "bfloat16", "float32", "float64"):
        raise TypeError(f"{name}: expected float16, bfloat16, float32 or float64, got {x.dtype}")


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
    dtype = compute_type(x.dtype)
    if x.dtype == dtype:
        return x
    return np.broadcast_to(distinct(x).astype(dtype), x.shape)


def distinct(x: Array, axes: int | None = None) -> Array:
    """x with length 1 along those of its first `axes` axes (default: all) whose stride is 0."""
    sizes = zip(x.strides[:axes], x.shape[:axes], strict=True)
    return x[tuple(slice(0, 1) if stride == 0 and n > 1 else slice(None) for stride, n in sizes)]


def widened_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options for widened operands: an additive mask of 16 bits is widened as well."""
    mask = options.get("attn_mask")
    if mask is None or mask.dtype == bool:
        return options
    return options | {"attn_mask": widen(mask)}


@np.errstate(all="ignore")
def rounded(x: Array | None, like: Array | None) -> Array | None:
    """x in the dtype of `like`, in native byte order; None if there is no x."""
    if x is None or like is None:
        return None
    return x.astype(native(like.dtype), copy=False)


def forward(
    query: Array, key: Array, value: Array, options: dict[str, Any], like: Array
) -> _core.AttentionForward:
    """attention_forward of widened operands, out in the dtype of `like`."""
    out, lse = _core.attention_forward(query, key, value, **widened_options(options))
    return _core.AttentionForward(cast(Array, rounded(out, like)), lse)


# ------------------------------------------------------------------------------- backward


class Upstream(NamedTuple):
    """The rows of a backward call: the incoming gradients, and the results of the forward."""

    grad_out: Array
    out: Array
    lse: Array
    grad_lse: Array | None

    def block(self, rows: slice) -> Upstream:
        """The rows of a block of queries."""
        index = (..., rows, slice(None))
        grad_lse = None if self.grad_lse is None else self.grad_lse[..., rows]
        return Upstream(self.grad_out[index], self.out[index], self.lse[..., rows], grad_lse)


def checked_upstream(
    grad_out: Array,
    operands: tuple[Array, Array, Array],
    out: Array,
    lse: Array,
    grad_lse: Array | None,
    needs: Iterable[str],
    options: Mapping[str, Any],
) -> Upstream:
    """The rows after all checks of `attention_backward`.

    grad_out is widened. out is not: where it was rounded to 16 bits, attention_backward takes
    <grad_out, out> from the weights instead.
    """
    _core._check_attention_backward(
        grad_out, *operands, out, lse, grad_lse=grad_lse, needs=tuple(needs), **options
    )
    return Upstream(widen(grad_out), out, lse, grad_lse)


def composed_backward(
    upstream: Upstream,
    operands: tuple[Array, Array, Array],
    needs: Iterable[str],
    options: dict[str, Any],
) -> _core.AttentionGradients:
    """attention_backward of widened operands."""
    return _core.attention_backward(
        upstream.grad_out, *operands, upstream.out, upstream.lse, grad_lse=upstream.grad_lse,
        needs=tuple(needs), **widened_options(options),
    )  # fmt: skip


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
            lead = np.broadcast_shapes(x.shape[:-1], grad.shape[:-1])
            left, right = (
                np.broadcast_to(y, (*lead, y.shape[-1])).reshape(math.prod(lead), y.shape[-1])
                for y in (x, grad)
            )
            return cast(Array, (left.T @ right).reshape(shape))
        return sum_to(np.swapaxes(x, -1, -2) @ grad, shape)

    result = product(x)
    return result if np.isfinite(result).all() else product(np.where(rows_in_use(grad), x, 0))
