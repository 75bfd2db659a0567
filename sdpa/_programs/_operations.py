"""The operations of programs: their kinds, what they compute in NumPy, their names in a message.

Kinds are "r" (real), "i" (integer) and "b" (boolean): one value per pair of a query and a key.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from sdpa import _core

NUMBERS: dict[str, int] = {name: number for number, name in enumerate(_core._operations())}

INPUTS = {"batch": "b", "head": "h", "query": "q", "key": "k"} | {
    name: name for name in ("score", "tangent", "upstream", "second")
}
GATHERS = {"r": "gather_r", "i": "gather_i", "b": "gather_b"}

# What reads its second operand, one of keys, as it is. Its payload: whether that comes first.
OF_KEYS = ("difference_i", "difference_r", "less_key", "less_equal_key", "equal_key", "within")

# The sections of a code: what depends on batch and head only, also on the query, on the key, on the
# pair. That of a result is the union of those of its operands.
UNIT, QUERY, KEY, TILE = range(4)


class Operation(NamedTuple):
    """Kinds of the result and of the operands; the NumPy function; how a message writes it."""

    kind: str
    operands: str
    compute: Callable[..., Any]
    text: str
    """An operator between two operands or before one, or the name of a function."""


def _floor_divide(a: Any, b: Any) -> Any:
    return np.where(b == 0, 0, np.floor_divide(a, np.where(b == 0, 1, b)))


def _remainder(a: Any, b: Any) -> Any:
    return np.where(b == 0, 0, np.remainder(a, np.where(b == 0, 1, b)))


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def _integer(x: Any) -> Any:
    # As the core does. NumPy's result beyond the integers is that of the processor.
    return np.int64(x if abs(x) < 2.0**63 else -(2**63))


_PLAIN: dict[str, tuple[str, Callable[..., Any], str]] = {
    "negative": ("", operator.neg, "-"),
    "absolute": ("", np.abs, "abs"),
    "add": ("2", operator.add, "+"),
    "subtract": ("2", operator.sub, "-"),
    "multiply": ("2", operator.mul, "*"),
    "minimum": ("2", np.minimum, "minimum"),
    "maximum": ("2", np.maximum, "maximum"),
    "less": ("c", np.less, "<"),
    "less_equal": ("c", np.less_equal, "<="),
    "equal": ("c", np.equal, "=="),
    "not_equal": ("c", np.not_equal, "!="),
}

TABLE: dict[str, Operation] = {
    f"{name}_{kind}": Operation(
        "b" if count == "c" else kind, kind * (2 if count else 1), compute, text
    )
    for name, (count, compute, text) in _PLAIN.items()
    for kind in "ri"
} | {
    "sqrt": Operation("r", "r", np.sqrt, "sqrt"),
    "exp": Operation("r", "r", np.exp, "exp"),
    "log": Operation("r", "r", np.log, "log"),
    "tanh": Operation("r", "r", np.tanh, "tanh"),
    "divide": Operation("r", "rr", np.divide, "/"),
    "floor_divide": Operation("i", "ii", _floor_divide, "//"),
    "remainder": Operation("i", "ii", _remainder, "%"),
    "bitwise_and": Operation("i", "ii", operator.and_, "&"),
    "bitwise_or": Operation("i", "ii", operator.or_, "|"),
    "bitwise_xor": Operation("i", "ii", operator.xor, "^"),
    "left_shift": Operation("i", "ii", operator.lshift, "<<"),
    "right_shift": Operation("i", "ii", operator.rshift, ">>"),
    "logical_and": Operation("b", "bb", np.logical_and, "&"),
    "logical_or": Operation("b", "bb", np.logical_or, "|"),
    "logical_xor": Operation("b", "bb", np.logical_xor, "^"),
    "logical_not": Operation("b", "b", np.logical_not, "~"),
    "select_r": Operation("r", "brr", np.where, "where"),
    "select_i": Operation("i", "bii", np.where, "where"),
    "real_of_i": Operation("r", "i", np.float64, "float"),
    "real_of_b": Operation("r", "b", np.float64, "float"),
    "integer_of_b": Operation("i", "b", np.int64, "int"),
    "integer_of_r": Operation("i", "r", _integer, "int"),
    # The next have derivatives of their own, and become several operations of the core.
    "sign": Operation("r", "r", np.sign, "sign"),
    "floor": Operation("r", "r", np.floor, "floor"),
    "log1p": Operation("r", "r", np.log1p, "log1p"),
    "expm1": Operation("r", "r", np.expm1, "expm1"),
    "sigmoid": Operation("r", "r", _sigmoid, "sigmoid"),
    "detached": Operation("r", "r", operator.pos, "detach"),
    "power": Operation("r", "r", np.power, "**"),  # the exponent, a float, is its payload
}
