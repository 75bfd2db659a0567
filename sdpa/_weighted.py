"""log-sum-exp with weights and signs, which the compiled functions leave to NumPy.

Weights may have both signs, so that terms cancel. The sums are therefore float64 for every type:
arrays of the size of x are made.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from sdpa import _core
from sdpa._arguments import check_overlap
from sdpa._arrays import Array, broadcast_shapes, compute_type, native, sum_to

Axis = int | tuple[int, ...] | None


class _Operand(NamedTuple):
    """An argument in its own type, integers in float64."""

    array: Array
    given: Array
    # A Python number takes the type of the others.
    is_number: bool

    @property
    def wide(self) -> Array:
        return self.array.astype(np.float64, copy=False)


def operand(name: str, value: Any) -> _Operand:
    """An argument of logsumexp, checked."""
    (given,) = _core._arrays(**{name: value})
    x = given
    if x.dtype.kind in "biu":
        x = x.astype(np.float64)
    elif x.dtype.name != "bfloat16" and (x.dtype.kind != "f" or x.dtype.itemsize > 8):
        raise TypeError(
            f"{name}: expected float16, bfloat16, float32, float64, an integer type or bool, "
            f"got {x.dtype}"
        )
    return _Operand(x, given, isinstance(value, int | float))


def common(x: _Operand, b: _Operand) -> Array:
    """A zero in the shape and dtype that x and b have together."""
    dtypes = [native(o.array.dtype) for o in (x, b) if not o.is_number] or [x.array.dtype]
    try:
        dtype = np.result_type(*dtypes)
    except TypeError:
        raise TypeError(
            f"b: expected a dtype that has a common one with {x.array.dtype} of x, "
            f"got {b.array.dtype}"
        ) from None
    try:
        shape = broadcast_shapes(x.array.shape, b.array.shape)
    except ValueError:
        raise ValueError(
            f"b: expected a shape that broadcasts with {x.array.shape} of x, got {b.array.shape}"
        ) from None
    return np.broadcast_to(np.zeros((), dtype), shape)


def logsumexp(
    x: ArrayLike,
    axis: Axis = -1,
    *,
    b: ArrayLike | None = None,
    return_sign: bool = False,
    where: ArrayLike | None = None,
    keepdims: bool = False,
    out: Array | None = None,
) -> Array | _core.LogsumexpForward:
    """`sdpa.logsumexp` with weights, or with the sign."""
    options: dict[str, Any] = {"where": where, "keepdims": keepdims, "out": out}
    if b is None:
        lse = _core.logsumexp(x, axis, **options)
        # A NaN stays.
        sign = np.where(np.isnan(lse), lse, lse > -np.inf).astype(native(lse.dtype), copy=False)
        return _core.LogsumexpForward(lse, sign[()])
    operands = operand("x", x), operand("b", b)
    if where is not None:
        (options["where"],) = _core._arrays(where=where)
    check_overlap(out, {name: o.given for name, o in zip("xb", operands, strict=True)})
    zero = common(*operands)
    # It checks the other arguments, and has the shape and dtype of the result.
    like = np.asarray(_core.logsumexp(zero, axis, **options))
    axis = _for_numpy(axis, zero)
    lse, sign = _signed(operands[0].wide, operands[1].wide, axis, options["where"])
    if not return_sign:
        lse = np.where(sign < 0, np.nan, lse)
    with np.errstate(all="ignore"):
        lse, sign = (y.reshape(like.shape).astype(native(like.dtype)) for y in (lse, sign))
    if out is not None:
        out[...] = lse
    found = lse[()] if out is None else out
    return _core.LogsumexpForward(found, sign[()]) if return_sign else found


def _for_numpy(axis: Axis, x: Array) -> Axis:
    """The axes of x, checked, for NumPy, which takes none of a scalar's in a tuple."""
    return axis if x.ndim else None


@np.errstate(all="ignore")
def _signed(x: Array, b: Array, axis: Axis, where: Array | None) -> tuple[Array, Array]:
    """log |sum b exp(x)| and the sign of the sum, which keep their axes."""
    shape = broadcast_shapes(x.shape, b.shape)
    x, b = np.broadcast_to(x, shape), np.broadcast_to(b, shape)
    left_out = (b == 0) | (x == -np.inf)
    if where is not None:
        left_out = left_out | ~where
    sizes = np.where(left_out, -np.inf, x + np.log(abs(b)))
    largest = sizes.max(axis=axis, keepdims=True, initial=-np.inf)
    shift = np.where(np.isfinite(largest), largest, 0)
    # In two halves, because exp(x - shift) overflows where b is below the smallest normal number.
    half = np.exp((x - shift) / 2)
    terms = np.where(left_out, 0, b * half * half)
    # Beside an infinite term the finite ones do not count.
    infinite = np.where(sizes == np.inf, np.copysign(np.inf, b), 0)
    terms = np.where(largest == np.inf, infinite, terms)
    # The largest terms apart keep the digits of a sum that is nearly 1.
    is_largest = sizes == largest
    lead = np.where(is_largest, terms, 0).sum(axis=axis, keepdims=True)
    rest = np.where(is_largest, 0, terms).sum(axis=axis, keepdims=True)
    total, ratio = lead + rest, rest / lead
    apart = (ratio > -0.5) & (ratio < np.inf)
    logarithm = np.where(apart, np.log(abs(lead)) + np.log1p(ratio), np.log(abs(total)))
    return shift + logarithm, np.sign(total)


def logsumexp_backward(
    grad: ArrayLike,
    x: ArrayLike,
    lse: ArrayLike,
    axis: Axis = -1,
    *,
    b: ArrayLike,
    sign: ArrayLike | None = None,
) -> _core.LogsumexpGradients:
    """`sdpa.logsumexp_backward` with weights."""
    operands = operand("x", x), operand("b", b)
    like = common(*operands)
    for name, value in (("grad", grad), ("lse", lse)):
        _check_rows(operand(name, value), name, like)
    _core.logsumexp_backward(grad, like, lse, axis)
    axis = _for_numpy(axis, like)
    without, rows = (like.sum(axis=axis, keepdims=keepdims).shape for keepdims in (False, True))
    signs = operand("sign", 1.0 if sign is None else sign).wide
    if sign is not None and signs.shape not in (without, rows):
        raise ValueError(
            f"sign: expected shape {without} or {rows}, one value per row of x, got {signs.shape}"
        )
    g, total = (y.astype(np.float64).reshape(rows) for y in _core._arrays(grad=grad, lse=lse))
    return _gradients(*operands, g * (signs if sign is None else signs.reshape(rows)), total)


def _check_rows(rows: _Operand, name: str, like: Array) -> None:
    """Raise a TypeError in words of x and b, where the compiled function knows one array alone."""
    known = dict.fromkeys((native(like.dtype), compute_type(like.dtype)))
    if not rows.is_number and native(rows.array.dtype) not in known:
        raise TypeError(
            f"{name}: expected dtype {' or '.join(map(str, known))}, of x and b together, "
            f"got {rows.array.dtype}"
        )


@np.errstate(all="ignore")
def _gradients(x: _Operand, b: _Operand, g: Array, lse: Array) -> _core.LogsumexpGradients:
    """b exp(x - lse) g, and exp(x - lse) g, where g has the sign."""
    half = np.exp((x.wide - lse) / 2)
    unseen = x.wide == -np.inf
    by_x = np.where(unseen | (b.wide == 0), 0, b.wide * half * half * g)
    by_b = np.where(unseen | (g == 0), 0, half * half * g)  # of a sum of 0 it is infinite
    found = (
        sum_to(np.broadcast_to(y, broadcast_shapes(y.shape, o.array.shape)), o.array.shape)
        .astype(native(o.array.dtype))
        for y, o in ((by_x, x), (by_b, b))
    )  # fmt: skip
    return _core.LogsumexpGradients(*found)
