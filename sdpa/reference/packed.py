"""Packed sequences: the meaning of cu_seqlens_q and cu_seqlens_k in functions on attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

CumulativeLengths: TypeAlias = Sequence[int] | NDArray[np.integer]

# The names of packed arrays, (total, heads, d), by the kind of their rows; lse is (heads, total_q).
_QUERIES = ("query", "grad_out", "out", "query_t", "gg_query", "out_t")
_KEYS = ("key", "value", "key_t", "value_t", "gg_key", "gg_value")
_PER_QUERY = ("lse", "grad_lse")
_PER_SEQUENCE = ("key_lengths", "query_offset")
_RECEIVED = ("total", "largest")  # (heads, total_k)
_PER_HEAD = ("sinks", "sinks_t", "gg_sinks", "scale", "scale_t", "gg_scale")

# Of a row that sees nothing; all other results are 0 there.
_PADDING = {"lse": -np.inf, "score_mean": np.nan, "score_var": np.nan}


def packed(
    function: Callable[..., Any],
    cu_seqlens_q: CumulativeLengths,
    cu_seqlens_k: CumulativeLengths,
    **arguments: Any,
) -> Any:
    """The result of `function` over one sequence after the other, joined.

    Sequence s consists of queries cu_seqlens_q[s] to cu_seqlens_q[s + 1] - 1 and keys
    cu_seqlens_k[s] to cu_seqlens_k[s + 1] - 1. It is a separate call, with its entry of key_lengths
    and query_offset if these are arrays. Dropout's pattern is that of entry s of a batch. Gradients
    of sinks, which all sequences share, are added in the order of the sequences. Rows behind the
    last sequence are padding: they have no part in anything, and their results are those of a row
    without keys and without a sink.

    Parameters
    ----------
    function : callable
        `attention_forward`, `attention_backward`, `attention_jvp`, `attention_double_backward`,
        `attention_received` or `attention_statistics`, of this package or of `sdpa`.
    cu_seqlens_q, cu_seqlens_k : (sequences + 1,) of int
    **arguments
        The arguments of the function, by name; (total, heads, d) instead of (heads, L, d).

    Examples
    --------
    >>> import numpy as np
    >>> from sdpa import reference
    >>> x = np.arange(3.0).reshape(3, 1, 1)  # sequences of one and two tokens
    >>> reference.packed(
    ...     reference.attention_forward, [0, 1, 3], [0, 1, 3], query=0 * x, key=0 * x, value=x
    ... ).out[:, 0, 0]
    array([0. , 1.5, 1.5])
    """
    parts = [
        one_sequence(function, s, cu_seqlens_q, cu_seqlens_k, **arguments)
        for s in range(len(cu_seqlens_q) - 1)
    ]
    fields = zip(parts[0]._fields, zip(*parts, strict=True), strict=True)
    totals = len(arguments["query"]), len(arguments["key"])
    return type(parts[0])(*(_joined(name, found, totals) for name, found in fields))


def _joined(name: str, found: Sequence[Any], totals: tuple[int, int]) -> Any:
    """One array for what every sequence has found under this name, with the rows of padding."""
    if found[0] is None:
        return None
    if name in _PER_HEAD:
        return functools.reduce(np.add, found)
    if name == "score_args":
        return tuple(_summed(each) for each in zip(*found, strict=True))
    is_row = name in _QUERIES + _KEYS
    joined = np.concatenate([x.swapaxes(0, 1) if is_row else x for x in found], 0 if is_row else -1)
    total = totals[name in _KEYS + _RECEIVED]
    widths = [(0, 0)] * joined.ndim
    widths[0 if is_row else -1] = (0, total - joined.shape[0 if is_row else -1])
    return np.pad(joined, widths, constant_values=_PADDING.get(name, 0))


def _summed(gradients: Sequence[Any]) -> Any:
    return None if gradients[0] is None else functools.reduce(np.add, gradients)


def one_sequence(
    function: Callable[..., Any],
    s: int,
    cu_seqlens_q: CumulativeLengths,
    cu_seqlens_k: CumulativeLengths,
    **arguments: Any,
) -> Any:
    """The result of `function` over sequence s, of arrays (heads, L, d)."""
    own = sequence_arguments(s, cu_seqlens_q, cu_seqlens_k, **arguments)
    if not own.get("dropout_p"):
        return function(**_of_entry(s, own))
    # Dropout's pattern depends on the batch entry, so take entry s of a batch of equal ones.
    for name in _QUERIES + _KEYS + _PER_QUERY + _PER_HEAD:
        if own.get(name) is not None and np.ndim(own[name]):
            own[name] = np.broadcast_to(own[name], (s + 1, *np.shape(own[name])))
    for name in ("grad_out", "grad_lse"):
        if own.get(name) is not None:  # score_args gets a sum over the batch
            entry = (np.arange(s + 1) == s).reshape(-1, *[1] * (own[name].ndim - 1))
            own[name] = np.where(entry, own[name], 0)
    found = function(**own)
    if isinstance(found, np.ndarray):
        return found[s]
    fields = zip(found._fields, found, strict=True)
    return type(found)(*(x if x is None or n == "score_args" else x[s] for n, x in fields))


def _of_entry(s: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with functions of the user that are asked about entry s of a batch."""
    score, mask = arguments.get("score_mod"), arguments.get("mask_mod")
    own: dict[str, Any] = {}
    if score is not None:
        own["score_mod"] = lambda x, b, *others: score(x, b + s, *others)
    if mask is not None:
        own["mask_mod"] = lambda b, *others: mask(b + s, *others)
    return arguments | own


def sequence_arguments(
    s: int, cu_seqlens_q: CumulativeLengths, cu_seqlens_k: CumulativeLengths, **arguments: Any
) -> dict[str, Any]:
    """The arguments of sequence s: slices of arrays, its own lengths and offsets, all the rest."""
    queries, keys = (slice(*cu[s : s + 2]) for cu in (cu_seqlens_q, cu_seqlens_k))
    own = dict(arguments)
    for name, x in arguments.items():
        if x is None:
            continue
        if name in _QUERIES:
            own[name] = np.swapaxes(x[queries], 0, 1)
        elif name in _KEYS:
            own[name] = np.swapaxes(x[keys], 0, 1)
        elif name in _PER_QUERY:
            own[name] = x[:, queries]
        elif name in _PER_SEQUENCE and np.ndim(x):
            own[name] = int(np.broadcast_to(x, len(cu_seqlens_q) - 1)[s])
    return own
