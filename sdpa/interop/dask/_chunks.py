"""Chunks of Dask arrays and of stores: the blocks of the tasks, and where these may write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import dask.array as da
import numpy as np
import zarr
from dask.delayed import delayed

from sdpa import _arguments, blocks
from sdpa._stream import Operand

Chunks = tuple[tuple[int, ...], ...]

COMPLETE = "complete"
"""The attribute of a target that is True once all of it has been written."""


def chunks_of(shape: Sequence[int], axis: int, sizes: Sequence[int]) -> Chunks:
    chunks: list[tuple[int, ...]] = [(n,) for n in shape]
    chunks[axis] = tuple(sizes)
    return tuple(chunks)


def flags_of(chunks: Sequence[Sequence[int]]) -> Chunks:
    """Chunks of one element per block."""
    return tuple((1,) * len(sizes) for sizes in chunks)


def bounds_of(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(n) for n in np.cumsum([0, *sizes]))


def region(ndim: int, axis: int, part: slice) -> tuple[slice, ...]:
    found = [slice(None)] * ndim
    found[axis] = part
    return tuple(found)


def lse_axes(x: Any, axis: int) -> Any:
    """Swap the axes of lse, (..., heads, Lq), to out's order or back; only packed ones differ."""
    return x.T if axis == -3 else x


def numbers_of(ndim: int, axis: int, n: int) -> Any:
    """The numbers of the blocks along an axis, one per block."""
    shape = [1] * ndim
    shape[axis] = n
    return da.from_array(np.arange(n).reshape(shape), chunks=1, inline_array=True)


def unit_of(x: Any, axis: int) -> int | None:
    """Rows that are stored, and so written, together; None for an array without chunks."""
    if isinstance(x, da.Array):
        return int(max(x.chunks[axis]))
    stored = getattr(x, "shards", None) or getattr(x, "chunks", None)
    return int(stored[axis]) if stored else None


def sizes_of(operand: Operand, chunks: int | None, target: Any = None) -> tuple[int, ...]:
    """Lengths of the blocks of an operand that is a store."""
    n = operand.length
    if chunks is None:
        whole = unit_of(target, operand.axis) if target is not None else None
        size = whole or unit_of(operand.source, operand.axis) or blocks.BLOCK
    else:
        size = _arguments.count("chunks", chunks, 1)
    return tuple(min(size, n - start) for start in range(0, n, size)) or (0,)


def in_chunks(query: Operand, chunks: int | None) -> tuple[Any, tuple[int, ...]]:
    """The queries as a Dask array, and the lengths of its blocks."""
    if isinstance(query.source, da.Array):
        if chunks is not None:
            raise ValueError("chunks: expected None, because query is a Dask array and has its own")
        return query.source, own_chunks("query", query)
    sizes = sizes_of(query, chunks)
    made = chunks_of(query.shape, query.axis, sizes)
    meta = np.empty((0,) * len(query.shape), query.dtype)  # else Dask asks a store for its ndim
    return da.from_array(query.source, chunks=made, inline_array=True, meta=meta), sizes


def own_chunks(name: str, operand: Operand) -> tuple[int, ...]:
    """Lengths of the blocks of a Dask array along the axis of queries or keys."""
    chunks = operand.source.chunks
    if len(chunks[-1]) != 1:
        raise ValueError(
            f"{name}: expected one chunk along the last axis, got {chunks[-1]}; "
            "rechunk({-1: -1}) joins them"
        )
    return tuple(int(n) for n in chunks[operand.axis])


def key_sizes(call: blocks.BlockProblem, block: int) -> tuple[int, ...]:
    """Lengths of the blocks of keys and values."""
    if not isinstance(call.keys.source, da.Array):
        return sizes_of(call.keys, block)
    key, value = own_chunks("key", call.keys), own_chunks("value", call.values)
    if key != value:
        raise ValueError(f"value: expected the chunks of key, {key}, got {value}")
    return key


# ------------------------------------------------------------------------------- targets


def out_targets(
    out: Any,
    return_lse: bool,
    call: blocks.BlockProblem,
    shape: tuple[int, ...],
    sizes: Sequence[int],
) -> list[Any] | None:
    """The targets of out and lse, after their checks."""
    if out is None:
        return None
    pair = isinstance(out, (tuple, list))
    if pair != return_lse or (pair and len(out) != 2):
        form = "a pair (out, lse)" if return_lse else "one array, as return_lse is False"
        raise TypeError(f"out: expected {form}, got {out!r}")
    targets = list(out) if pair else [out]
    lse = (shape[1], shape[0]) if call.query.axis == -3 else shape[:-1]
    wanted: list[tuple[tuple[int, ...], Any, int]] = [
        (shape, call.query.dtype, call.query.axis),
        (lse, call.compute_type(), -1),
    ]
    names = ("out[0]", "out[1]") if pair else ("out",)
    for label, target, (expected, kind, axis) in zip(names, targets, wanted, strict=False):
        check_target(label, target, expected, kind)
        check_blocks(label, target, axis, sizes)
    check_apart(dict(zip(names, targets, strict=True)), inputs_of(call))
    return targets


def gradient_targets(
    into: Mapping[str, Any] | None,
    needs: Sequence[str],
    call: blocks.BlockProblem,
    inputs: Mapping[str, Any],
) -> dict[str, Any]:
    if into is None:
        return {}
    if not isinstance(into, Mapping):
        raise TypeError(
            f"into: expected a mapping from names of gradients to Zarr arrays, got {type(into)}"
        )
    if set(into) != set(needs):
        raise ValueError(f"into: expected arrays for {sorted(needs)}, got {list(into)}")
    for name, target in into.items():
        operand = call.operand(name)
        check_target(f"into[{name!r}]", target, operand.shape, operand.dtype)
    check_apart({f"into[{name!r}]": target for name, target in into.items()}, inputs)
    return dict(into)


def check_target(name: str, target: Any, shape: tuple[int, ...], kind: Any) -> None:
    """Raise an exception unless workers can write this array."""
    if not isinstance(target, zarr.Array):
        raise TypeError(f"{name}: expected a Zarr array, got {type(target).__name__}")
    if target.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {target.shape}")
    if native(target.dtype) != native(kind):  # Zarr converts from one byte order to the other
        raise TypeError(f"{name}: expected {native(kind)}, got {target.dtype}")
    if isinstance(target.store, zarr.storage.MemoryStore):
        raise ValueError(f"{name}: expected a store that all workers see, got a MemoryStore")
    if isinstance(target.store, zarr.storage.ZipStore):
        raise ValueError(f"{name}: expected a store that several workers can write, got a ZipStore")
    if target.read_only:
        raise ValueError(f"{name}: expected a store that can be written, got a read-only one")


def native(kind: Any) -> np.dtype[Any]:
    return np.dtype(kind).newbyteorder("=")


def inputs_of(call: blocks.BlockProblem) -> dict[str, Any]:
    operands = (call.query, call.keys, call.values, *call.masks.values())
    return {x.name: x.source for x in operands}


def check_apart(targets: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    """An exception if a task would write what another one reads or writes."""
    known = {place_of(x): name for name, x in inputs.items() if isinstance(x, zarr.Array)}
    for name, target in targets.items():
        place = place_of(target)
        if place in known:
            raise ValueError(
                f"{name}: expected another array than {known[place]}, got the same one, {place}"
            )
        known[place] = name


def place_of(array: Any) -> str:
    """What two arrays of Zarr that are stored in one place have in common."""
    if isinstance(array.store, zarr.storage.LocalStore):
        return str((array.store.root / array.path).resolve())
    return str(array.store_path)


def check_blocks(name: str, target: Any, axis: int, sizes: Sequence[int]) -> None:
    """Raise an exception unless blocks are whole chunks, so that no two tasks write to one file."""
    unit = unit_of(target, axis) or 1
    inner = bounds_of(sizes)[1:-1]
    cut = [bound for bound in inner if bound % unit]
    if cut:
        stored = "shards" if getattr(target, "shards", None) else "chunks"
        raise ValueError(
            f"{name}: expected {stored} along axis {axis} that end where the blocks of the tasks "
            f"do, got {stored} of {unit} and blocks that end at {cut[0]}: two tasks would write to "
            "the same one, and data would be lost"
        )


def check_cuts(
    name: str, axes: Mapping[int, int], target: Any, bounds: Sequence[Sequence[int]]
) -> None:
    """`check_blocks` along the leading axes; `axes` has those of the target."""
    for axis, own in axes.items():
        check_blocks(name, target, own, [int(n) for n in np.diff(bounds[axis])])


def finished(flags: Sequence[Any], targets: Sequence[Any]) -> Any:
    """Mark the targets as incomplete now, and return a task that marks them complete at the end."""
    mark(targets, False)
    return delayed(finish)(targets, *flags)


def finish(targets: Sequence[Any], *flags: Any) -> None:
    for target in targets:
        remove_half_written(target)
    mark(targets, True)


def remove_half_written(target: Any) -> None:
    """Removes files to which killed workers had not given their names, as Zarr does in the end."""
    if isinstance(target.store, zarr.storage.LocalStore):
        for path in (target.store.root / target.path).rglob("*.partial"):
            path.unlink(missing_ok=True)


def mark(targets: Sequence[Any], complete: bool) -> None:
    for target in targets:
        target.attrs[COMPLETE] = complete
