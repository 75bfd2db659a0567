"""Expressions of a program: a graph in which equal expressions are one node."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from sdpa._programs._operations import GATHERS, INPUTS, KEY, QUERY, TABLE, TILE, UNIT

_SECTIONS = {"batch": UNIT, "head": UNIT, "query": QUERY, "key": KEY}
_INT64 = np.iinfo(np.int64)
# Operands that change nothing: (position, value) of each operation.
_NEUTRAL = {
    "add_r": ((0, 0), (1, 0)),
    "add_i": ((0, 0), (1, 0)),
    "subtract_r": ((1, 0),),
    "subtract_i": ((1, 0),),
    "multiply_r": ((0, 1), (1, 1)),
    "multiply_i": ((0, 1), (1, 1)),
    "divide": ((1, 1),),
    "floor_divide": ((1, 1),),
    "logical_and": ((0, True), (1, True)),
    "logical_or": ((0, False), (1, False)),
    "left_shift": ((1, 0),),
    "right_shift": ((1, 0),),
}
# Operands that alone decide the result: that value.
_ABSORBING = {"logical_and": False, "logical_or": True}
_SHIFTS = ("left_shift", "right_shift")
_INVERSE = ("negative_r", "negative_i", "logical_not")
_DEPTH, _WIDTH = 7, 72


class Node:
    """An operation, its operands, and what else it needs: a constant, an array, an axis."""

    __slots__ = ("args", "kind", "number", "op", "payload", "section")

    def __init__(
        self, op: str, args: tuple[Node, ...], payload: Any, kind: str, number: int, section: int
    ) -> None:
        self.op, self.args, self.payload = op, args, payload
        self.kind, self.number, self.section = kind, number, section

    @property
    def is_constant(self) -> bool:
        return self.op.startswith("constant_")

    def is_value(self, value: complex) -> bool:
        return self.is_constant and self.payload == value


class Source:
    """An array of a program: what a message calls it, its kind, its shape.

    Attributes
    ----------
    value : array, None
        One that the function captures.
    number : int
        Its place in the core, once the whole function is known; -1 if nothing reads it.
    """

    __slots__ = ("kind", "name", "number", "shape", "value")

    def __init__(self, name: str, kind: str, shape: tuple[int, ...], value: Any = None) -> None:
        self.name, self.kind, self.shape, self.value = name, kind, shape, value
        self.number = -1


class Graph:
    """The nodes of one function.

    Parameters
    ----------
    argument, function : str
        What a message names: "score_mod" or "mask_mod", and the user's function.

    Attributes
    ----------
    dtypes : dict
        Types of another library by kind, for functions that ask a value for its dtype.
    foreign : callable
        What stands for an array of another library; None if the value is none.
    unseen : str
        Arrays that the function can reach and the program cannot.
    """

    def __init__(self, argument: str, function: str) -> None:
        self.argument, self.function = argument, function
        self.dtypes: dict[str, Any] = {}
        self.foreign: Callable[[Any], Any] = lambda value: None
        self.unseen = ""
        # Comparisons that were written the other way round.
        self.turned: set[Node] = set()
        self._nodes: dict[Any, Node] = {}

    # ------------------------------------------------------------------------- nodes

    def make(self, op: str, *args: Node, payload: Any = None, kind: str = "") -> Node:
        """The node, new or found."""
        same = payload.hex() if isinstance(payload, float) else payload
        key = (op, same, *[node.number for node in args])
        found = self._nodes.get(key)
        if found is None:
            if op in _SECTIONS:
                section = _SECTIONS[op]
            elif op in INPUTS:
                section = TILE
            else:
                section = functools.reduce(operator.or_, [node.section for node in args], UNIT)
            kind = kind or TABLE[op].kind
            found = Node(op, args, payload, kind, len(self._nodes), section)
            self._nodes[key] = found
        return found

    def input(self, name: str) -> Node:
        """One of the values that the core provides."""
        return self.make(name, kind="i" if name in ("batch", "head", "query", "key") else "r")

    def constant(self, kind: str, value: Any) -> Node:
        """A number of the program."""
        if kind == "i":
            value = int(value)
            if not _INT64.min <= value <= _INT64.max:
                raise self.refused("integers that fit in 64 bits", str(value))
        else:
            value = float(value) if kind == "r" else bool(value)
        return self.make(f"constant_{kind}", payload=value, kind=kind)

    def gather(self, source: Source, indices: Iterable[Node]) -> Node:
        """The element of an array, given one index per axis."""
        flat = None
        for axis, node in enumerate(indices):
            part = self.make("index", node, payload=(source, axis), kind="i")
            flat = part if flat is None else self.make("add_i", flat, part)
        flat = self.constant("i", 0) if flat is None else flat
        return self.make(GATHERS[source.kind], flat, payload=source, kind=source.kind)

    def apply(self, op: str, *args: Node, payload: Any = None) -> Node:
        """The node of an operation; simpler where that changes no value."""
        if op in _SHIFTS and args[1].is_constant and not 0 <= args[1].payload < 64:
            raise self.refused("shifts by 0 to 63", self.text(self.make(op, *args)))
        if all(node.is_constant for node in args):
            return self._folded(op, args, payload)
        for position, value in _NEUTRAL.get(op, ()):
            if args[position].is_value(value):
                return args[1 - position]
        if op in _ABSORBING and any(node.is_value(_ABSORBING[op]) for node in args):
            return self.constant("b", _ABSORBING[op])
        if op in _INVERSE and args[0].op == op:
            return args[0].args[0]
        if op in ("subtract_r", "subtract_i") and args[0].is_value(0):
            return self.apply(f"negative_{op[-1]}", args[1])
        if op in ("multiply_r", "multiply_i"):
            for one, other in (args, args[::-1]):
                if one.is_value(-1):
                    return self.apply(f"negative_{op[-1]}", other)
        if op.startswith("select_"):
            condition, yes, no = args
            if condition.is_constant:
                return yes if condition.payload else no
            if yes is no:
                return yes
        return self.make(op, *args, payload=payload)

    @np.errstate(all="ignore")
    def _folded(self, op: str, args: tuple[Node, ...], payload: Any) -> Node:
        values = [node.payload for node in args]
        kind = TABLE[op].kind
        if TABLE[op].operands[0] == "r":
            values = [np.float64(value) if type(value) is float else value for value in values]
        if payload is not None:
            values.append(payload)
        value = TABLE[op].compute(*values)
        if op == "integer_of_r" and not math.isfinite(args[0].payload):
            raise self.refused("a finite number to make an integer of", str(args[0].payload))
        return self.constant(kind, value)

    # ------------------------------------------------------------------------- messages

    def refused(self, expected: str, got: str, remedy: str = "") -> TypeError:
        """The exception for what a program cannot do."""
        end = f"; {remedy}" if remedy else ""
        return TypeError(f"{self.argument}: expected {expected} in {self.function}, got {got}{end}")

    def text(self, node: Node, names: dict[Node, str] | None = None) -> str:
        """The expression, shortened in the middle where it is long; `names` are not spelt out."""
        found = self._text(node, _DEPTH, names or {}, top=True)
        if len(found) <= _WIDTH:
            return found
        half = (_WIDTH - 5) // 2
        return f"{found[:half]} ... {found[-half:]}"

    def _text(self, node: Node, depth: int, names: dict[Node, str], top: bool = False) -> str:
        if node in names:
            return names[node]
        if node.op in INPUTS:
            return INPUTS[node.op]
        if node.is_constant:
            return repr(node.payload)
        if not depth:
            return "..."
        if node.op.startswith("gather_"):
            return self._gather_text(node, depth, names)
        parts = [self._text(arg, depth - 1, names) for arg in node.args]
        word = TABLE[node.op].text
        if node.op == "power":
            parts.append(repr(node.payload))
        if word[0].isalpha():
            return f"{word}({', '.join(_bare(part) for part in parts)})"
        if node in self.turned:
            word, parts = word.replace("<", ">"), parts[::-1]
        found = f"{word}{parts[0]}" if len(parts) == 1 else f" {word} ".join(parts)
        return found if top else f"({found})"

    def _gather_text(self, node: Node, depth: int, names: dict[Node, str]) -> str:
        indices: dict[int, str] = {}
        stack = list(node.args)
        while stack:
            part = stack.pop()
            if part.op == "index":
                indices[part.payload[1]] = _bare(self._text(part.args[0], depth - 1, names))
            else:
                stack.extend(part.args)
        array = ("d " if node.op == "gather_tangent" else "") + node.payload.name
        inner = ", ".join(indices[axis] for axis in sorted(indices))
        return f"{array}[{inner}]" if inner else array


def _bare(text: str) -> str:
    """The text without a pair of parentheses around the whole of it."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for position, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth and position < len(text) - 1:
            return text
    return text[1:-1]


def reached(roots: Iterable[Node]) -> list[Node]:
    """All nodes that the roots need, operands first."""
    found: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.args)
    return sorted(found, key=lambda node: node.number)
