"""Packed sequences, one at a time, for functions that need the matrix of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sdpa import _arguments, _table
from sdpa.interop.torch._operators import ARGUMENTS, named

_PER_SEQUENCE = [name for name, option in _table.OPTIONS.items() if option.axes == ""]
_BOUNDS = [ARGUMENTS.index(f"cu_seqlens_{x}") for x in "qk"]


def is_packed(args: Sequence[Any]) -> bool:
    """Whether these arguments, OPERANDS and OPTIONS, describe packed sequences."""
    return any(args[i] is not None for i in _BOUNDS)


def heads_first(x: Any, args: Sequence[Any]) -> Any:
    """`x`, with rows and heads swapped if the arguments describe packed sequences."""
    return x.transpose(0, 1) if x is not None and is_packed(args) else x


def spans(args: Sequence[Any]) -> list[tuple[slice, ...]]:
    """(rows of the queries, rows of the keys) of each sequence."""
    return list(_arguments.sequences(*(args[i] for i in _BOUNDS)))


def rows(x: Any, span: slice) -> Any:
    """These rows of a packed array."""
    return x if x is None else x[span]


def one_sequence(args: Sequence[Any], sequence: int) -> tuple[Any, ...]:
    """The arguments with the rows of this sequence alone.

    Empty sequences replace those before it, because dropout counts them.
    """
    own, parts = named(args), spans(args)
    for names, x, part in zip((["query"], ["key", "value"]), "qk", parts[sequence], strict=True):
        own |= {name: rows(own[name], part) for name in names}
        cumulative = torch.zeros(sequence + 2, dtype=torch.int64, device="cpu")
        cumulative[-1] = part.stop - part.start
        own[f"cu_seqlens_{x}"] = cumulative
    for name in _PER_SEQUENCE:
        if own[name] is not None:
            own[name] = own[name].expand(len(parts))[: sequence + 1]
    if own["key_lengths"] is not None:
        lengths = torch.zeros(sequence + 1, dtype=torch.int64, device="cpu")
        lengths[-1] = own["key_lengths"][-1]
        own["key_lengths"] = lengths
    return tuple(own.values())
