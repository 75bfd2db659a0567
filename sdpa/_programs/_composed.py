"""Expressions by the functions of another library, which differentiates them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from sdpa._programs._graph import Node, reached
from sdpa._programs._operations import INPUTS, TABLE
from sdpa._programs._program import Program, entry_of, given_arrays

_OPERATORS = {getattr(operator, name) for name in ("neg", "add", "sub", "mul", "and_", "or_")} | {
    getattr(operator, name) for name in ("xor", "lshift", "rshift")
}


class Library(NamedTuple):
    """What differs between libraries."""

    numpy: Any
    """Its functions, with NumPy's names."""
    detached: Callable[[Any], Any]
    """The value without a derivative."""


def composed_score(
    library: Library, score_mod: Any, score_args: Sequence[Any], like: Sequence[Any], **inputs: Any
) -> Any:
    """What a function of scores computes, in operations of a library.

    Parameters
    ----------
    score_args : sequence of arrays
        Of the library.
    like : sequence of ndarray
        Arrays of their shapes and types.
    **inputs : arrays
        score, batch, head, query and key, which broadcast. An index that is out of range is
        brought to its axis, because other functions say which pairs are hidden.
    """
    if isinstance(score_mod, Program):
        entry, captured = score_mod._entry, score_mod._captured
    else:
        entry, captured = entry_of(False, score_mod, given_arrays(False, tuple(like))[1])
    return _evaluate(library, entry.root, inputs, [*score_args, *captured])


def _evaluate(library: Library, root: Node, inputs: Mapping[str, Any], arrays: Any) -> Any:
    found: dict[Node, Any] = {}
    for node in reached([root]):
        args = [found[arg] for arg in node.args]
        if node.op in INPUTS:
            found[node] = inputs[node.op]
        elif node.is_constant:
            found[node] = node.payload
        elif node.op == "index":
            source, axis = node.payload
            size = source.shape[axis]
            at = library.numpy.clip(args[0], 0, size - 1)
            found[node] = at * math.prod(source.shape[axis + 1 :])
        elif node.op.startswith("gather_"):
            found[node] = library.numpy.reshape(arrays[node.payload.number], -1)[args[0]]
        else:
            found[node] = _computed(library, node, args)
    return found[root]


def _computed(library: Library, node: Node, args: list[Any]) -> Any:
    numpy, (x, *rest) = library.numpy, args
    if node.op == "detached":
        return library.detached(x)
    if node.op == "integer_of_r":
        return library.detached(x).astype(int)
    if node.op == "integer_of_b":
        return numpy.where(x, 1, 0)
    if node.op in ("real_of_i", "real_of_b"):
        return x * 1.0
    if node.op == "sigmoid":
        return 1 / (1 + numpy.exp(-x))
    if node.op == "power":
        return x**node.payload
    if node.op in ("floor_divide", "remainder"):
        known = getattr(numpy, node.op)(x, numpy.where(rest[0] == 0, 1, rest[0]))
        return numpy.where(rest[0] == 0, 0, known)
    compute = TABLE[node.op].compute
    if compute in _OPERATORS:
        return compute(*args)
    return getattr(numpy, compute.__name__)(*args)
