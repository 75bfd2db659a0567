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

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Unpack

try:
    import dask.array as da
    import zarr  # noqa: F401
except ImportError as _error:
    raise ImportError(
        "sdpa.interop.dask needs dask.array and zarr: pip install 'dask[array]' zarr"
    ) from _error

import numpy as np

from sdpa import _arguments, _core, blocks
from sdpa._arguments import checked_needs
from sdpa._options import BlockOptions
from sdpa._table import OPERANDS
from sdpa.interop.dask import _chunks as cut
from sdpa.interop.dask import _tasks as tasks

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
        A Dask array gets one task per chunk along Lq and must have one chunk along every other
        axis. For batches that are cut, `dask.array.map_blocks(sdpa.attention, ...)` is enough.
    key, value : store or dask.array.Array, (..., heads, Lk, d_k) and (..., heads, Lk, d_v)
        Stores, such as arrays of Zarr, are opened by the workers, which read what they need and
        nothing that causality, windows or key lengths hide. Dask arrays must have the same chunks
        along Lk, and get one task per pair of chunks. Arrays of NumPy and mapped files travel with
        the tasks.
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
        Those of `sdpa.blocks.attend`: NumPy arrays or, for attn_mask, a store. `workers` is the
        number of threads of a task.

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
        several threads.

    Examples
    --------
    >>> import dask.array as da
    >>> import numpy as np, sdpa
    >>> from sdpa.interop.dask import attention
    >>> rng = np.random.default_rng(0)
    >>> query, key, value = rng.standard_normal((3, 2, 1000, 16), np.float32)
    >>> lazy = attention(da.from_array(query, (2, 250, 16)), key, value, is_causal=True)
    >>> lazy.shape, lazy.dtype, lazy.chunksize
    ((2, 1000, 16), dtype('float32'), (2, 250, 16))
    >>> np.allclose(lazy.compute(), sdpa.attention(query, key, value, is_causal=True), atol=1e-5)
    True
    """
    split = _arguments.choice("split", split, ("queries", "keys"))
    return_lse = _arguments.boolean("return_lse", return_lse)
    in_memory = [isinstance(x, da.Array) for x in (key, value)]
    if in_memory[0] != in_memory[1]:
        kinds = [type(x).__name__ for x in (key, value)]
        raise TypeError(f"value: expected {kinds[0]} like key, got {kinds[1]}")
    for name, x in options.items():
        if isinstance(x, da.Array):
            raise TypeError(f"{name}: expected an array or a store, got a Dask array")
    call = blocks.BlockProblem(attention, query, key, value, options)
    query, sizes = cut.in_chunks(call.query, chunks)
    shape = call.out_shape()
    bounds, size = cut.bounds_of(sizes), _arguments.count("block", block, 1)
    task = tasks.Task(call.query.shape, call.query.axis, bounds, size, options)
    targets = cut.out_targets(out, return_lse, call, shape, sizes)
    # out and lse are columns of one array, so that one task computes both.
    columns = cut.chunks_of((*shape[:-1], shape[-1] + 1), task.axis, sizes)
    query = query[(None,) * (len(shape) - query.ndim)]
    work: tasks.Work = tasks.Attend(task, key, value, targets)
    if split == "keys" or in_memory[0]:
        query = tasks.merged_pairs(task, call, query, columns)
        work = tasks.Write(task, targets)
    if targets is not None:
        return cut.finished([tasks.per_block(work, query, cut.flags_of(columns), int)], targets)
    packed = query
    if isinstance(work, tasks.Attend):
        packed = tasks.per_block(work, query, columns, call.compute_type())
    result = packed[..., :-1].astype(cut.native(call.query.dtype))
    return (result, cut.lse_axes(packed[..., -1], task.axis)) if return_lse else result


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
    grad_out, out : store, (..., heads, Lq, d_v)
        Of query's dtype. Every task reads blocks of all operands, so Dask arrays are refused: write
        them to a store first.
    query : store, (..., heads, Lq, d_k)
        float16, bfloat16, float32 or float64.
    key, value : store, (..., heads, Lk, d_k) and (..., heads, Lk, d_v)
        As in `attention`.
    lse : store, (..., heads, Lq)
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
    grad_lse : store, (..., heads, Lq), optional
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
    operands = {"grad_out": grad_out, "query": query, "key": key, "value": value, "out": out}
    operands |= {"lse": lse, "grad_lse": grad_lse}
    for name, x in operands.items():
        if isinstance(x, da.Array):
            raise TypeError(
                f"{name}: expected a store, of which tasks read blocks, got a Dask array"
            )
    needs = checked_needs(needs, OPERANDS)
    call = blocks.BlockProblem(attention_backward, query, key, value, options)
    upstream = blocks.UpstreamOperands(call, grad_out, out, lse, grad_lse, needs)
    into = cut.gradient_targets(into, needs, call, operands | cut.inputs_of(call))
    size, found, flags = _arguments.count("block", block, 1), {}, []
    for names in (("query",), ("key", "value")):
        wanted = tuple(name for name in names if name in needs)
        if not wanted:
            continue
        first = call.operand(wanted[0])
        sizes = cut.sizes_of(first, chunks, into.get(wanted[0]))
        for name in set(wanted) & set(into):
            cut.check_blocks(f"into[{name!r}]", into[name], first.axis, sizes)
        task = tasks.Task(first.shape, first.axis, cut.bounds_of(sizes), size, options)
        work = tasks.Gradients(task, operands, wanted, [into[name] for name in wanted if into])
        row_terms = None
        if "query" not in wanted and upstream.rounds:
            row_terms = _row_terms(call, operands, upstream, size, chunks, options)
        numbers = cut.numbers_of(len(first.shape), first.axis, len(sizes))
        # Gradients of keys and values are columns of one array, so that one task computes both.
        ends = np.cumsum([0] + [call.operand(name).shape[-1] for name in wanted])
        columns = cut.chunks_of((*first.shape[:-1], int(ends[-1])), first.axis, sizes)
        if into:
            flags.append(tasks.per_number(work, numbers, cut.flags_of(columns), int, row_terms))
            continue
        packed = tasks.per_number(work, numbers, columns, first.dtype, row_terms)
        for name, start, end in zip(wanted, ends, ends[1:], strict=False):
            found[name] = packed[..., int(start) : int(end)]
    if into:
        return cut.finished(flags, list(into.values()))
    return _core.AttentionGradients(*map(found.get, _core.AttentionGradients._fields))


def _row_terms(
    call: blocks.BlockProblem,
    operands: Mapping[str, Any],
    upstream: blocks.UpstreamOperands,
    block: int,
    chunks: int | None,
    options: Mapping[str, Any],
) -> Any:
    """The array that `tasks.RowTerms` computes for blocks of queries."""
    query, lse = call.query, upstream.lse
    sizes = cut.sizes_of(query, chunks)
    task = tasks.Task(query.shape, query.axis, cut.bounds_of(sizes), block, options)
    numbers = cut.numbers_of(len(lse.shape), lse.axis, len(sizes))
    columns = cut.chunks_of(lse.shape, lse.axis, sizes)
    return tasks.per_block(tasks.RowTerms(task, operands), numbers, columns, lse.dtype)
