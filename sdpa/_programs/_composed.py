"""Expressions by the functions of another library, which differentiates them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

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


@np.errstate(all="ignore")  # of hidden pairs, of which the kernels do not warn either
def composed(
    library: Library,
    is_mask: bool,
    function: Any,
    args: Sequence[Any],
    like: Sequence[Any],
    seen: Any = True,
    **inputs: Any,
) -> Any:
    """What a function of scores or masks computes, in operations of a library.

    Parameters
    ----------
    args : sequence of arrays
        Of the library.
    like : sequence of ndarray
        Arrays of their shapes and types.
    seen : bool array
        The pairs that no mask hides. The others have no derivatives, nor have those whose score
        becomes -inf: the function's own may be NaN there.
    **inputs : arrays
        score, batch, head, query and key, which broadcast. An index that is out of range is
        brought to its axis, because other functions say which pairs are hidden.
    """
    if isinstance(function, Program):
        entry, captured = function._entry, function._captured
    else:
        entry, captured = entry_of(is_mask, function, given_arrays(is_mask, tuple(like))[1])
    arrays = [*args, *captured]
    if is_mask:
        return _evaluate(library, entry.root, inputs, arrays)
    detached = library.detached
    fixed = {name: detached(x) for name, x in inputs.items()}
    values = _evaluate(library, entry.root, fixed, [detached(x) for x in arrays])
    kept = seen & (values != -math.inf)

    def keep(x: Any) -> Any:
        shape = np.broadcast_shapes(*map(library.numpy.shape, (x, kept)))
        x = _spread(library, x, shape)
        return library.numpy.where(kept, x, detached(x))

    inputs["score"] = keep(inputs["score"])
    return keep(_evaluate(library, entry.root, inputs, arrays, keep))


def _spread(library: Library, x: Any, shape: tuple[int, ...]) -> Any:
    """x of this shape; autograd's where has no derivative of parts that it broadcasts."""
    return x if library.numpy.shape(x) == shape else x + np.zeros(shape, bool)


def _evaluate(
    library: Library,
    root: Node,
    inputs: Mapping[str, Any],
    arrays: Any,
    keep: Callable[[Any], Any] = lambda x: x,
) -> Any:
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
            element = library.numpy.reshape(arrays[node.payload.number], -1)[args[0]]
            found[node] = keep(element) if node.op == "gather_r" else element
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
    if node.op.startswith("select_"):
        shape = np.broadcast_shapes(*map(numpy.shape, args))
        branches = (y if isinstance(y, int | float) else _spread(library, y, shape) for y in rest)
        return numpy.where(x, *branches)
    compute = TABLE[node.op].compute
    if compute in _OPERATORS:
        return compute(*args)
    return getattr(numpy, compute.__name__)(*args)
