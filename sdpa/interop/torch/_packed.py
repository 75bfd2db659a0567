"""Packed sequences, one at a time, for functions that need the matrix of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from sdpa.interop.torch._operators import OPERANDS, OPTIONS

_NAMES = (*OPERANDS, *OPTIONS)
Spans = list[tuple[int, int]]


def is_packed(args: Sequence[Any]) -> bool:
    """Whether these arguments, OPERANDS and OPTIONS, describe packed sequences."""
    return any(args[_NAMES.index(f"cu_seqlens_{x}")] is not None for x in ("q", "k"))


def heads_first(x: Any, args: Sequence[Any]) -> Any:
    """`x`, with rows and heads swapped if the arguments describe packed sequences."""
    return x.transpose(0, 1) if x is not None and is_packed(args) else x


def spans(args: Sequence[Any]) -> tuple[Spans, Spans]:
    """(rows of the queries, rows of the keys) of each sequence."""
    queries, keys = (
        list(pairwise(args[_NAMES.index(f"cu_seqlens_{x}")].tolist())) for x in ("q", "k")
    )
    return queries, keys


def rows(x: Any, span: tuple[int, int]) -> Any:
    """These rows of a packed array."""
    return x if x is None else x[slice(*span)]


def one_sequence(args: Sequence[Any], sequence: int) -> tuple[Any, ...]:
    """The arguments with the rows of this sequence alone.

    Empty sequences replace those before it, because dropout counts them.
    """
    named = dict(zip(_NAMES, args, strict=True))
    for names, x, own in zip((["query"], ["key", "value"]), ("q", "k"), spans(args), strict=True):
        start, end = own[sequence]
        named |= {name: rows(named[name], (start, end)) for name in names}
        cumulative = torch.zeros(sequence + 2, dtype=torch.int64)
        cumulative[-1] = end - start
        named[f"cu_seqlens_{x}"] = cumulative
    if named["key_lengths"] is not None:
        lengths = torch.zeros(sequence + 1, dtype=torch.int64)
        lengths[-1] = named["key_lengths"].expand(len(own))[sequence]
        named["key_lengths"] = lengths
    if named["query_offset"] is not None:
        named["query_offset"] = named["query_offset"].expand(len(own))[: sequence + 1]
    return tuple(named.values())
