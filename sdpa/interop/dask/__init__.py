"""Attention on Dask arrays and on Zarr arrays that are larger than any machine's memory.

Each task computes a block of queries, or a block of keys in the backward, and streams the other
side from the store by `sdpa.blocks`. Tasks are pure: they need no results of one another, their
sums have a fixed order, and a task that runs again, after a failure or because a worker was lost,
writes the same bits to the same place.

Threads are either Dask's or those of a task, never both: give each worker process one Dask thread
and set `workers` to its cores, or as many Dask threads as cores and `workers=1`. On a `distributed`
worker of several threads a task computes with one, and more are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Unpack

try:
    import dask.array as da
    import zarr  # noqa: F401
except ImportError as _error:
    raise ImportError(
        "sdpa.interop.dask needs dask.array and zarr: pip install 'dask[array]' zarr"
    ) from _error

import numpy as np

from sdpa import _arguments, _core, _warnings, blocks
from sdpa._arguments import checked_needs
from sdpa._options import BlockOptions
from sdpa._stream import check_known
from sdpa._table import OPERANDS, PROGRAMS
from sdpa.interop.dask._chunks import (
    bounds_of,
    check_blocks,
    check_cuts,
    chunks_of,
    finished,
    flags_of,
    gradient_targets,
    in_chunks,
    inputs_of,
    lse_axes,
    native,
    numbers_of,
    out_targets,
    sizes_of,
)
from sdpa.interop.dask._leading import MASKS, Leading, Parts, every, kept
from sdpa.interop.dask._tasks import (
    ROW_TERMS,
    Attend,
    Gradients,
    RowTerms,
    Task,
    Work,
    Write,
    merged_pairs,
    per_block,
)

__all__ = ["attention", "attention_backward"]


def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    out: Any = None,
    return_lse: bool = False,
    split: Literal["queries", "keys"] = "queries",
    block: int = blocks.BLOCK,
    chunks: int | None = None,
    **options: Unpack[BlockOptions],
) -> Any:
    """Attention of Dask arrays or stores; nothing is computed before `compute()`.

    The result is that of `sdpa.attention`, to rounding. Equal blocks give equal bits on one
    instruction set, wherever the tasks run and however often.

    Parameters
    ----------
    query : dask.array.Array or store, (..., heads, Lq, d_k)
        A Dask array may be cut along all axes but the last, and gets one task per chunk along Lq
        and block of the leading axes. Such a block ends where a chunk of any Dask array ends.
    key, value : store or dask.array.Array, (..., heads, Lk, d_k) and (..., heads, Lk, d_v)
        Stores, such as arrays of Zarr, are opened by the workers, which read what they need and
        nothing that causality, windows or key lengths hide. Dask arrays must have the same chunks
        along Lk, and get one task per pair of chunks along Lq and Lk. Arrays of NumPy, copied now
        as Dask copies them, and mapped files travel with the tasks.
    out : Zarr array or pair of them, optional
        Where the result is to be written; (out, lse) if return_lse is True. Neither is an input.
        Their attribute "complete" is False from now on, and True once everything has been written.
    return_lse : bool, default False
        Also return, or write, the log-sum-exp.
    split : {"queries", "keys"}, default "queries"
        "queries": one task per block of queries. "keys": one per pair of blocks of queries and
        keys, and a tree of tasks that merge their results; for few queries over long keys.
    block : int, default 8192
        Number of keys that are read at a time and, if split is "keys", of a task.
    chunks : int, optional
        Number of queries of a task if query is a store; the default is that of its chunks or
        shards.
    **options
        Those of `sdpa.blocks.attend`: arrays of NumPy or Dask or, for masks, a store. Of a Dask
        array each task gets all that belongs to its block of the leading axes. `workers` is the
        number of threads of a task. score_mod and mask_mod get positions, b and h of the whole;
        score_args and mask_args are arrays of NumPy, of which every task gets all.

    Returns
    -------
    dask.array.Array, or pair of them
        out (..., heads, Lq, d_v), of query's dtype, and lse (..., heads, Lq), float32 (float64 for
        float64). If `out` is given: a `dask.delayed.Delayed` that writes them. Pass retries= to
        `compute` if stores may fail.

    Raises
    ------
    TypeError, ValueError
        Before any task runs: as `sdpa.blocks.attend`; if chunks cannot be used as they are; if a
        target is an input; if the blocks are not whole chunks or shards of a target, in which tasks
        would overwrite each other's data. By the tasks: if workers is more than 1 on a worker of
        several threads, or if a Dask array among the options holds what is refused.

    Examples
    --------
    >>> import dask.array as da
    >>> import numpy as np, sdpa
    >>> from sdpa.interop.dask import attention
    >>> rng = np.random.default_rng(0)
    >>> query, key, value = rng.standard_normal((3, 2, 1000, 16), np.float32)
    >>> lazy = attention(da.from_array(query, (1, 250, 16)), key, value, is_causal=True)
    >>> lazy.shape, lazy.dtype, lazy.chunksize
    ((2, 1000, 16), dtype('float32'), (1, 250, 16))
    >>> np.allclose(lazy.compute(), sdpa.attention(query, key, value, is_causal=True), atol=1e-5)
    True
    """
    split = _arguments.choice("split", split, ("queries", "keys"))
    return_lse = _arguments.boolean("return_lse", return_lse)
    in_memory = [isinstance(x, da.Array) for x in (key, value)]
    if in_memory[0] != in_memory[1]:
        kinds = [type(x).__name__ for x in (key, value)]
        raise TypeError(f"value: expected {kinds[0]} like key, got {kinds[1]}")
    call = blocks.BlockProblem(attention, query, key, value, _with_stand_ins(options))
    leading, size = Leading(call, options), _arguments.count("block", block, 1)
    bounds = leading.bounds(leading.arrays, {})
    _, sizes = in_chunks(call.query, chunks)
    targets = out_targets(out, return_lse, call, call.out_shape(), sizes)
    for name, target in zip(("out", "lse"), targets or (), strict=False):
        check_cuts(name, leading.axes(name, target.ndim), target, bounds)
    made = _Forward(split, size, sizes, chunks, return_lse)
    with _warnings.silenced():  # all were warned of as a whole
        parts = [made.part(leading, part, targets) for part in every(bounds)]
    if targets is not None:
        return finished(parts, targets)
    out_and_lse = leading.joined("out", parts, bounds)
    result = out_and_lse[..., :-1].astype(native(call.query.dtype))
    lse = lse_axes(out_and_lse[..., -1], call.query.axis).astype(call.compute_type())
    return (result, lse) if return_lse else result


class _Forward(NamedTuple):
    """The graph of `attention` for a block of the leading axes."""

    split: str
    block: int
    sizes: tuple[int, ...]
    chunks: int | None
    return_lse: bool

    def part(self, leading: Leading, part: Parts, targets: Sequence[Any] | None) -> Any:
        """out and lse in one array, or what stands for their having been written."""
        query, key, value = (leading.part(name, leading.arrays[name], part) for name in OPERANDS)
        options = leading.options_of(part)
        if targets is not None:
            names = "out", "lse"
            targets = [leading.part(n, x, part) for n, x in zip(names, targets, strict=False)]
        call = blocks.BlockProblem(attention, query, key, value, _with_stand_ins(options))
        query, _ = in_chunks(call.query, self.chunks)
        shape = call.out_shape()
        known, given = _apart(options)
        task = Task(
            call.query.shape,
            call.query.axis,
            bounds_of(self.sizes),
            self.block,
            known,
            tuple(given),
        )
        # out and lse are columns of one array, so that one task computes both.
        columns = chunks_of((*shape[:-1], shape[-1] + 1), task.axis, self.sizes)
        query = query[(None,) * (len(shape) - query.ndim)]
        numbers = numbers_of(len(shape), task.axis, len(self.sizes))
        kind, extra = call.compute_type(), list(given.values())
        work: Work = Attend(task, key, value, targets)
        if self.split == "keys" or isinstance(key, da.Array):
            query, extra = merged_pairs(task, call, query, columns, extra), []
            if targets is None:
                return query
            work = Write(replace(task, given=()), targets)
        if targets is not None:
            columns, kind = flags_of(columns), np.dtype(int)
        return per_block(work, [numbers, query], extra, columns, kind)


def attention_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    *,
    into: Mapping[str, Any] | None = None,
    block: int = blocks.BLOCK,
    chunks: int | None = None,
    grad_lse: Any = None,
    needs: Iterable[str] = ("query", "key", "value"),
    **options: Unpack[BlockOptions],
) -> Any:
    """Gradients of `attention`; nothing is computed before `compute()`.

    A task computes the gradient of a block of queries, or the gradients of a block of keys and
    values, by `sdpa.blocks.attend_backward`. No task adds to the result of another. This takes
    seven matrix products per pair of blocks instead of five. An out of 16 bits is too coarse for
    gradients, so out is computed again, for two or four products more.

    Parameters
    ----------
    grad_out, out : store or dask.array.Array, (..., heads, Lq, d_v)
        Of query's dtype. Every task reads blocks of all operands. Of Dask arrays, which may be cut
        along the leading axes alone, it gets all that belongs to its block of these, so that block
        must fit into a worker: write longer arrays to a store first.
    query : store or dask.array.Array, (..., heads, Lq, d_k)
        float16, bfloat16, float32 or float64.
    key, value : store or dask.array.Array, (..., heads, Lk, d_k) and (..., heads, Lk, d_v)
        Where they are broadcast or shared by a group of heads, a task computes their gradient for
        all that share them.
    lse : store or dask.array.Array, (..., heads, Lq)
        As written by `attention`.
    into : mapping from names of gradients to Zarr arrays, optional
        Where the gradients in `needs` are to be written, each of its argument's shape and dtype;
        none is an input. Their attribute "complete" is False from now on, and True once all have
        been written.
    block : int, default 8192
        Number of keys, or queries, that are read at a time.
    chunks : int, optional
        Number of queries, or keys, of a task; the default is that of the chunks or shards of the
        target, or without a target those of the operand.
    grad_lse : store or dask.array.Array, (..., heads, Lq), optional
        Gradient with respect to lse.
    needs : sequence of {"query", "key", "value"}
        The gradients to compute.
    **options
        Those of the forward call.

    Returns
    -------
    AttentionGradients
        Dask arrays, None where not in needs. If `into` is given: a `dask.delayed.Delayed` that
        writes them.

    Raises
    ------
    TypeError, ValueError
        Before any task runs, as `attention`.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> from sdpa.interop.dask import attention_backward
    >>> rng = np.random.default_rng(0)
    >>> query, key, value, grad = rng.standard_normal((4, 2, 1000, 16), np.float32)
    >>> saved = sdpa.attention_forward(query, key, value)
    >>> lazy = attention_backward(grad, query, key, value, *saved, chunks=250)
    >>> whole = sdpa.attention_backward(grad, query, key, value, *saved)
    >>> np.allclose(lazy.key.compute(), whole.key, atol=1e-5)
    True
    """
    needs = checked_needs(needs, OPERANDS)
    call = blocks.BlockProblem(attention_backward, query, key, value, _with_stand_ins(options))
    upstream = blocks.UpstreamOperands(call, grad_out, out, lse, grad_lse, needs)
    leading, size = Leading(call, options), _arguments.count("block", block, 1)
    operands: dict[str, Any] = {name: leading.arrays[name] for name in OPERANDS}
    operands |= {x.name: kept(x.source) for x in upstream.operands if x is not None}
    operands.setdefault("grad_lse", None)
    leading.check_whole_rows(operands)
    into = gradient_targets(into, needs, call, operands | inputs_of(call))
    given = leading.arrays | {name: x for name, x in operands.items() if x is not None}
    found, flags = {}, []
    # One task computes both, as columns of one array, where they have their rows in common.
    is_pair = call.keys.shape[:-1] == call.values.shape[:-1]
    for names in (("query",), *([("key", "value")] if is_pair else [("key",), ("value",)])):
        wanted = {name: operands[name] for name in names if name in needs}
        if not wanted:
            continue
        bounds = leading.bounds(given, wanted)
        for name in set(wanted) & set(into):
            axes = leading.axes(name, into[name].ndim)
            check_cuts(f"into[{name!r}]", axes, into[name], bounds)
        made = _Backward(operands, tuple(wanted), into, size, chunks, upstream.rounds)
        with _warnings.silenced():  # all were warned of as a whole
            parts = [made.part(leading, part) for part in every(bounds)]
        if into:
            flags += parts
            continue
        ends = np.cumsum([0] + [x.shape[-1] for x in wanted.values()])
        joined = leading.joined(next(iter(wanted)), parts, bounds)
        for name, (start, end) in zip(wanted, pairwise(ends), strict=True):
            found[name] = joined[..., int(start) : int(end)]
    if into:
        return finished(flags, list(into.values()))
    return _core.AttentionGradients(*map(found.get, _core.AttentionGradients._fields))


class _Backward(NamedTuple):
    """The graph of gradients for a block of the leading axes."""

    operands: Mapping[str, Any]
    wanted: tuple[str, ...]
    into: Mapping[str, Any]
    block: int
    chunks: int | None
    rounds: bool
    """out has 16 bits."""

    def part(self, leading: Leading, part: Parts) -> Any:
        """The gradients in one array, or what stands for their having been written."""
        operands: dict[str, Any] = {
            name: x if x is None else leading.part(name, x, part)
            for name, x in self.operands.items()
        }
        targets = {
            name: leading.part(name, self.into[name], part) for name in self.wanted if self.into
        }
        options = leading.options_of(part)
        query, key, value = (operands[name] for name in OPERANDS)
        call = blocks.BlockProblem(attention_backward, query, key, value, _with_stand_ins(options))
        first = call.operand(self.wanted[0])
        sizes = sizes_of(first, self.chunks, targets.get(self.wanted[0]))
        for name, target in targets.items():
            check_blocks(f"into[{name!r}]", target, first.axis, sizes)
        known, given = _apart(options)
        task = Task(first.shape, first.axis, bounds_of(sizes), self.block, known, tuple(given))
        stores, arrays = _apart(operands)
        if "query" not in self.wanted and self.rounds:
            # The tasks look for it behind the operands, before the options.
            arrays[ROW_TERMS] = self._row_terms(call, task, stores, arrays, given)
        work = Gradients(task, stores, tuple(arrays), self.wanted, list(targets.values()))
        numbers = numbers_of(len(first.shape), first.axis, len(sizes))
        width = sum(call.operand(name).shape[-1] for name in self.wanted)
        columns = chunks_of((*first.shape[:-1], width), first.axis, sizes)
        kind = native(first.dtype)
        if self.into:
            columns, kind = flags_of(columns), np.dtype(int)
        return per_block(work, [numbers], [*arrays.values(), *given.values()], columns, kind)

    def _row_terms(
        self,
        call: blocks.BlockProblem,
        task: Task,
        stores: dict[str, Any],
        arrays: dict[str, Any],
        given: Mapping[str, Any],
    ) -> Any:
        """The array that `tasks.RowTerms` computes for blocks of queries."""
        query, lse = call.query, (stores | arrays)["lse"]
        sizes, axis = sizes_of(query, self.chunks), len(lse.shape) - 1
        task = replace(task, shape=query.shape, axis=query.axis, bounds=bounds_of(sizes))
        numbers = numbers_of(len(lse.shape), axis, len(sizes))
        return per_block(
            RowTerms(task, stores, tuple(arrays)), [numbers], [*arrays.values(), *given.values()],
            chunks_of(lse.shape, axis, sizes), native(lse.dtype),
        )  # fmt: skip


def _with_stand_ins(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with zeros for Dask arrays, on which all is checked but what these hold."""
    for name in "score_args", "mask_args":
        given = options.get(name)
        for i, x in enumerate(given if isinstance(given, (tuple, list)) else ()):
            if isinstance(x, da.Array):
                raise TypeError(
                    f"{name}[{i}]: expected an array in memory, of which every task gets all, got "
                    "a Dask array; pass its compute()"
                )
    for name, x in options.items():
        if isinstance(x, da.Array):
            check_known(name, x.shape)
    found = {
        name: np.broadcast_to(np.zeros((), x.dtype), x.shape)
        if isinstance(x, da.Array) and name not in (*MASKS, *PROGRAMS)
        else x
        for name, x in options.items()
    }
    lengths = found.get("key_lengths")
    if lengths is not None and isinstance(options.get("cu_seqlens_k"), da.Array):
        # Sequences of 0 keys have no others.
        found["key_lengths"] = np.zeros_like(_arguments.arrays(key_lengths=lengths)[0])
    return found


def _apart(named: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What travels with the tasks, and the Dask arrays."""
    given = {name: x for name, x in named.items() if isinstance(x, da.Array)}
    return {name: x for name, x in named.items() if name not in given}, given


def __dir__() -> list[str]:
    return __all__
