"""Numbers with a tangent, on which functions of the user give their derivatives.

Griewank and Walther, "Evaluating derivatives" (2008), section 3.1. Value and tangent may be such
numbers again, and the tangent of the tangent is then a second derivative. None is a tangent that
is zero, so that nothing is multiplied by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

Tangent = Any


class Dual(NDArrayOperatorsMixin):
    """An array and its tangent, in NumPy's arithmetic."""

    def __init__(self, value: Any, tangent: Tangent = None) -> None:
        self.value, self.tangent = value, tangent

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *args: Any, **_: Any) -> Any:
        values, tangents = zip(*(_parts(x) for x in args), strict=True)
        result = ufunc(*values)
        rule = _RULES.get(ufunc.__name__)
        return result if rule is None else Dual(result, rule(result, *values, *tangents))

    def __array_function__(
        self, function: Callable[..., Any], _: Any, args: Any, options: Any
    ) -> Any:
        if function is np.where:
            condition, *branches = args
            (a, da), (b, db) = (_parts(x) for x in branches)
            return Dual(np.where(condition, a, b), _choice(condition, da, db))
        if function is np.clip:
            x, *bounds = args
            given = dict(zip(("min", "max"), bounds, strict=False))
            given |= {name.removeprefix("a_"): bound for name, bound in options.items()}
            for bounded, bound in ((np.maximum, given.get("min")), (np.minimum, given.get("max"))):
                x = x if bound is None else bounded(x, bound)
            return x
        return NotImplemented

    def astype(self, dtype: Any) -> Any:
        """The value alone as integers; floats are themselves."""
        return self if np.dtype(dtype).kind == "f" else self.value.astype(dtype)


def _parts(x: Any) -> tuple[Any, Tangent]:
    return (x.value, x.tangent) if isinstance(x, Dual) else (x, None)


def _times(tangent: Tangent, factor: Any) -> Tangent:
    return None if tangent is None else tangent * factor


def _plus(x: Tangent, y: Tangent) -> Tangent:
    if x is None or y is None:
        return y if x is None else x
    return x + y


def _choice(condition: Any, yes: Tangent, no: Tangent) -> Tangent:
    if yes is None and no is None:
        return None
    return np.where(condition, 0.0 if yes is None else yes, 0.0 if no is None else no)


def _absolute(_: Any, x: Any, dx: Tangent) -> Tangent:
    return _choice(x > 0, dx, _choice(x < 0, _times(dx, -1), None))


def _power(y: Any, a: Any, b: Any, da: Tangent, db: Tangent) -> Tangent:
    by_base = None if da is None else da * (b * np.power(a, b - 1))
    return _plus(by_base, None if db is None else db * (y * np.log(a)))


def _slope(function: Callable[[Any, Any], Any]) -> Callable[..., Tangent]:
    """The rule of y = f(x) from function(y, x) = dy / dx."""
    return lambda y, x, dx: None if dx is None else dx * function(y, x)


# (result, *operands, *their tangents) -> tangent. Other functions move in steps only.
_RULES: dict[str, Callable[..., Tangent]] = {
    "add": lambda y, a, b, da, db: _plus(da, db),
    "subtract": lambda y, a, b, da, db: _plus(da, _times(db, -1)),
    "multiply": lambda y, a, b, da, db: _plus(_times(da, b), _times(db, a)),
    "divide": lambda y, a, b, da, db: _plus(_times(da, 1 / b), _times(db, -y / b)),
    "negative": _slope(lambda y, x: -1),
    "positive": _slope(lambda y, x: 1),
    "absolute": _absolute,
    "fabs": _absolute,
    "maximum": lambda y, a, b, da, db: _choice(a > b, da, db),
    "minimum": lambda y, a, b, da, db: _choice(a < b, da, db),
    "power": _power,
    "float_power": _power,
    "sqrt": _slope(lambda y, x: 0.5 / y),
    "square": _slope(lambda y, x: 2 * x),
    "reciprocal": _slope(lambda y, x: -y * y),
    "exp": _slope(lambda y, x: y),
    "exp2": _slope(lambda y, x: y * np.log(2)),
    "expm1": _slope(lambda y, x: np.exp(x)),
    "log": _slope(lambda y, x: 1 / x),
    "log2": _slope(lambda y, x: 1 / (x * np.log(2))),
    "log10": _slope(lambda y, x: 1 / (x * np.log(10))),
    "log1p": _slope(lambda y, x: 1 / (1 + x)),
    "tanh": _slope(lambda y, x: 1 - y * y),
}


class Rows:
    """An array that is indexed by one array per axis, at once or one after the other.

    Parameters
    ----------
    element : callable
        What an element is, from its indices.
    """

    def __init__(self, ndim: int, element: Callable[..., Any], indices: Sequence[Any] = ()) -> None:
        self._ndim, self._element, self._indices = ndim, element, tuple(indices)

    def __getitem__(self, index: Any) -> Any:
        indices = (*self._indices, *(index if isinstance(index, tuple) else (index,)))
        if len(indices) < self._ndim:
            return Rows(self._ndim, self._element, indices)
        return self._element(*indices)
