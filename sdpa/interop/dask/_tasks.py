"""The tasks of a worker: attention of a block, its gradients, merging, and writing a block."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import dask.array as da
import numpy as np

from sdpa import _core, _warnings, blocks
from sdpa._arrays import Array, widen
from sdpa._stream import NO_KEYS, Operand
from sdpa._table import OPERANDS
from sdpa.interop.dask._chunks import Chunks, bounds_of, key_sizes, lse_axes, numbers_of, region

ROW_TERMS = "row terms"

MERGED = 4
"""Results over parts of the keys that one task of the tree merges."""


def tasks_at_a_time() -> int:
    """Threads of the `distributed` worker that runs this; 1 under Dask's other schedulers."""
    if "distributed" not in sys.modules:
        return 1
    from distributed import get_worker

    try:
        return int(get_worker().state.nthreads)
    except ValueError:
        return 1


class Part:
    """A block in memory, indexed by its place in the whole array."""

    def __init__(self, block: Array, part: slice, shape: tuple[int, ...], axis: int) -> None:
        block = np.asarray(block)  # a store's may be labelled, or another library's
        self.block, self.start, self.axis = (
            block.reshape(block.shape[-len(shape) :]),
            part.start,
            axis,
        )
        self.shape, self.dtype = shape, block.dtype

    def __getitem__(self, index: tuple[slice, ...]) -> Array:
        inner = list(index)
        wanted = inner[self.axis]
        # An empty index gives an empty array, wherever it lies.
        start = wanted.start - self.start if wanted.stop > wanted.start else 0
        inner[self.axis] = slice(start, start + wanted.stop - wanted.start)
        return self.block[tuple(inner)]


@dataclass(frozen=True)
class Task:
    """The data that all tasks of a call have in common."""

    shape: tuple[int, ...]  # of the operand that is cut
    axis: int
    bounds: tuple[int, ...]
    block: int
    options: Mapping[str, Any]
    given: tuple[str, ...] = ()  # options that are Dask arrays, which the scheduler hands over

    def with_options(self, arrays: Sequence[Array]) -> Task:
        return replace(self, options={**self.options, **dict(zip(self.given, arrays, strict=True))})

    def numbered(self, number: int) -> slice:
        return slice(self.bounds[number], self.bounds[number + 1])

    def own_options(self) -> Mapping[str, Any]:
        """Those with which a worker computes: its threads are either Dask's or the task's."""
        tasks, threads = tasks_at_a_time(), self.options.get("workers")
        if tasks == 1:
            return self.options
        if threads not in (None, 1):
            raise ValueError(
                f"workers: expected None or 1 on a Dask worker of {tasks} threads, got {threads}; "
                "for more threads per task, start workers of one thread"
            )
        return {**self.options, "workers": 1}

    def query(self, q: Array, rows: slice) -> Part:
        return Part(q, rows, self.shape, self.axis)

    def out_and_lse(self, result: _core.AttentionForward) -> Array:
        """Both in one array."""
        lse = lse_axes(result.lse, self.axis)[..., None]
        return np.concatenate([result.out.astype(lse.dtype, copy=False), lse], axis=-1)

    def write(self, result: _core.AttentionForward, rows: slice, targets: Sequence[Any]) -> Array:
        for target, x, axis in zip(targets, result, (self.axis, -1), strict=False):
            target[region(target.ndim, axis, rows)] = x
        return np.ones((1,) * result.out.ndim, int)


@dataclass(frozen=True)
class Attend:
    """Attention of a block of queries, which streams keys and values."""

    task: Task
    key: Any
    value: Any
    targets: Sequence[Any] | None

    @_warnings.silenced()
    def __call__(self, number: Array, q: Array, *given: Array) -> Array:
        task, rows = self.task.with_options(given), self.task.numbered(number.item())
        result = blocks.attend(
            task.query(q, rows), self.key, self.value,
            block=task.block, rows=rows, **task.own_options(),
        )  # fmt: skip
        if self.targets is None:
            return task.out_and_lse(result)
        return task.write(result, rows, self.targets)


@dataclass(frozen=True)
class Pair:
    """Attention of a block of queries to a block of keys."""

    task: Task
    keys: Task
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    stores: tuple[Any, Any] | None

    @_warnings.silenced()
    def __call__(self, q: Array, i: Array, j: Array, *arrays: Array) -> Array:
        rows, columns = self.task.numbered(int(i[0])), self.keys.numbered(int(j[0]))
        n_given = len(self.task.given)
        in_memory, given = arrays[: len(arrays) - n_given], arrays[len(arrays) - n_given :]
        key, value = self.stores or (
            Part(x, columns, shape, self.keys.axis)
            for x, shape in zip(in_memory, self.shapes, strict=True)
        )
        query, task = self.task.query(q, rows), self.task.with_options(given)
        call = blocks.BlockProblem(blocks.attend, query, key, value, task.own_options())
        first, q = int(j[0]) == 0, query.block  # by its number, as an empty block may lie before
        nothing = call.read(rows, NO_KEYS)
        result = call.forward(rows, NO_KEYS, q, *nothing, first=first)
        if call.whole.sees(rows, columns):
            part = call.forward(rows, columns, q, *call.read(rows, columns))
            if first:
                call.merge(result, part)
            else:
                result = part
        return task.out_and_lse(result)[None]


@dataclass(frozen=True)
class Write:
    """Writes a block of results."""

    task: Task
    targets: Sequence[Any] | None

    def __call__(self, number: Array, out_and_lse: Array) -> Array:
        out, lse = out_and_lse[..., :-1], lse_axes(out_and_lse[..., -1], self.task.axis)
        rows, targets = self.task.numbered(number.item()), self.targets or ()
        return self.task.write(_core.AttentionForward(out, lse), rows, targets)


@dataclass(frozen=True)
class Gradients:
    """Gradients of a block of queries, or of a block of keys and values."""

    task: Task
    operands: Mapping[str, Any]
    given: tuple[str, ...]  # operands that the scheduler hands over
    needs: tuple[str, ...]
    targets: Sequence[Any]

    @_warnings.silenced()
    def __call__(self, number: Array, *given: Array) -> Array:
        part, n = self.task.numbered(number.item()), len(self.given)
        task = self.task.with_options(given[n:])
        operands = {**self.operands, **dict(zip(self.given, given, strict=False))}
        row_terms = operands.pop(ROW_TERMS, None)
        if row_terms is not None:
            # Of out's wide type, whatever that of lse.
            nothing = np.broadcast_to(np.float32(0), operands["out"].shape)
            operands |= {"out": nothing, "grad_lse": row_terms}
        found = blocks.attend_backward(
            **_plural(operands), block=task.block, needs=self.needs,
            rows=part, columns=part, **task.own_options(),
        )._asdict()  # fmt: skip
        gradients = [found[name] for name in self.needs]
        if not self.targets:
            return np.concatenate(gradients, axis=-1)
        for target, gradient in zip(self.targets, gradients, strict=True):
            target[region(target.ndim, self.task.axis, part)] = gradient
        return np.ones((1,) * number.ndim, int)


@dataclass(frozen=True)
class RowTerms:
    """grad_lse - rowsum(grad_out out) of a block of queries, with an out that was not rounded.

    It is all that gradients of keys need of out, which each of their tasks would compute again.
    """

    task: Task
    operands: Mapping[str, Any]
    given: tuple[str, ...]

    @_warnings.silenced()
    def __call__(self, number: Array, *given: Array) -> Array:
        task, rows = (
            self.task.with_options(given[len(self.given) :]),
            self.task.numbered(number.item()),
        )
        operands = {**self.operands, **dict(zip(self.given, given, strict=False))}
        axis = task.axis
        query, key, value = (operands[name] for name in OPERANDS)
        grad_out = widen(Operand("grad_out", operands["grad_out"], axis).read(rows))
        out = np.empty_like(grad_out)
        blocks.attend(
            query, key, value, block=task.block, rows=rows, out=out, **task.own_options()
        )  # fmt: skip
        terms = lse_axes(-np.einsum("...i,...i->...", grad_out, out), axis)
        if operands["grad_lse"] is None:
            return terms
        return terms + Operand("grad_lse", operands["grad_lse"], -1).read(rows)


Work = Attend | Write | Gradients | RowTerms


def _plural(operands: Mapping[str, Any]) -> dict[str, Any]:
    """The operands under the names that `sdpa.blocks` uses: keys and values."""
    plural = {"key": "keys", "value": "values"}
    return {plural.get(name, name): x for name, x in operands.items()}


def merged_pairs(
    task: Task, call: blocks.BlockProblem, query: Any, columns: Chunks, options: Sequence[Any]
) -> Any:
    """A task per pair of blocks, and a tree of their unions."""
    sizes, kind = key_sizes(call, task.block), np.dtype(np.float64)  # that of lse in `forward`
    keys = replace(task, shape=call.keys.shape, bounds=bounds_of(sizes))
    in_memory = [x.source for x in (call.keys, call.values) if isinstance(x.source, da.Array)]
    stores = None if in_memory else (call.keys.source, call.values.source)
    pair = Pair(task, keys, (call.keys.shape, call.values.shape), stores)
    # Names of the axes: the axes of the result are numbered, "i" and "j" count the blocks.
    axes = list(_names(len(columns)))
    axes[task.axis], axes[-1] = "i", "out and lse"
    given: list[Any] = [query, (*axes[:-1], "d_k"), numbers_of(1, 0, len(task.bounds) - 1), ("i",)]
    given += [numbers_of(1, 0, len(sizes)), ("j",)]
    for name, x in zip(("key", "value"), in_memory, strict=False):
        own = [f"{name} {n}" for n in range(x.ndim)]
        own[task.axis] = "j"
        given += [x, tuple(own)]
    given += _whole(options)
    lengths = dict(zip(axes, columns, strict=True))
    width = lengths.pop("out and lse")
    parts = da.blockwise(
        pair, ("j", *axes), *given, token="pair", new_axes={"out and lse": width[0]},
        adjust_chunks={"j": 1} | lengths, concatenate=True, align_arrays=False,
        dtype=kind, meta=np.empty((0,) * (len(axes) + 1), kind),
    )  # fmt: skip
    return da.reduction(
        parts, chunk=_as_it_is, combine=_merged, aggregate=_merged, axis=0, dtype=kind,
        split_every=MERGED, concatenate=True, meta=np.empty((0,) * len(axes), kind),
    )  # fmt: skip


def _as_it_is(x: Array, axis: Any, keepdims: bool) -> Array:
    return x


def _merged(x: Array, axis: tuple[int, ...], keepdims: bool) -> Array:
    """The union of results over parts of the keys, which lie along the first axis."""
    if not x.size:
        return x.sum(axis=axis, keepdims=keepdims)
    out, lse = _core.merge_attention(x[..., :-1], x[..., -1])
    merged = np.concatenate([out, lse[..., None]], axis=-1)
    return merged[None] if keepdims else merged


def per_block(
    work: Work, arrays: Sequence[Any], given: Sequence[Any], chunks: Chunks, kind: Any
) -> Any:
    """One task per block of the arrays, with results of these chunks; each gets all of `given`."""
    axes, meta = _names(len(chunks)), np.empty((0,) * len(chunks), kind)
    blocked = [part for x in arrays for part in (x, axes)]
    return da.blockwise(
        work, axes, *blocked, *_whole(given), token=type(work).__name__.lower(),
        adjust_chunks=dict(zip(axes, chunks, strict=True)), concatenate=True, align_arrays=False,
        dtype=meta.dtype, meta=meta,
    )  # fmt: skip


def _names(n: int) -> tuple[str, ...]:
    return tuple(f"axis {i}" for i in range(n))


def _whole(arrays: Sequence[Any]) -> list[Any]:
    """Arguments of blockwise for arrays that every task gets, with axes of their own."""
    return [
        part
        for n, x in enumerate(arrays)
        for part in (x, tuple(f"given {n} {axis}" for axis in range(x.ndim)))
    ]
