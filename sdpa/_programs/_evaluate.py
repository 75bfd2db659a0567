"""Expressions evaluated on arrays, in NumPy's float64 and int64."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sdpa._programs._graph import Node, Source, reached
from sdpa._programs._operations import INPUTS, TABLE

_TYPES: dict[str, Any] = {"r": np.float64, "i": np.int64, "b": np.bool_}


@np.errstate(all="ignore")
def evaluate(
    roots: Sequence[Node],
    inputs: Mapping[str, Any],
    arrays: Sequence[Any],
    tangents: Sequence[Any] = (),
) -> list[Any]:
    """The values of expressions.

    Parameters
    ----------
    inputs : dict
        Arrays that broadcast with one another, by the names of `INPUTS`.
    arrays, tangents : sequence of array
        Those of the program, in the order of the core.

    Raises
    ------
    IndexError
        An index is beyond its axis, or negative.
    """
    found: dict[Node, Any] = {}
    for node in reached(roots):
        args = [found[arg] for arg in node.args]
        if node.op in INPUTS:
            found[node] = np.asarray(inputs[node.op])
        elif node.is_constant:
            found[node] = _TYPES[node.kind](node.payload)
        elif node.op == "index":
            source, axis = node.payload
            found[node] = _offset(source, axis, args[0])
        elif node.op == "gather_tangent":
            found[node] = np.asarray(tangents[node.payload.number]).reshape(-1)[args[0]]
        elif node.op.startswith("gather_"):
            flat = np.asarray(arrays[node.payload.number]).reshape(-1)
            found[node] = flat[args[0]].astype(_TYPES[node.kind])
        else:
            extra = [] if node.payload is None else [node.payload]
            found[node] = TABLE[node.op].compute(*args, *extra)
    return [found[root] for root in roots]


def _offset(source: Source, axis: int, index: Any) -> Any:
    """What an index adds to the place of an element in a contiguous array."""
    size = source.shape[axis]
    wrong = index[(index < 0) | (index >= size)] if np.ndim(index) else index
    if np.size(wrong) and not 0 <= np.ravel(wrong)[0] < size:
        raise IndexError(
            f"{source.name}: expected indices of axis {axis} from 0 to {size - 1}, "
            f"got {np.ravel(wrong)[0]}"
        )
    return index * math.prod(source.shape[axis + 1 :])
