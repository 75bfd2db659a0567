"""Blocks along the leading axes, batch entries and heads, which are calls of their own.

A cut lies where a chunk of any Dask array ends. Along an axis several entries of the result may
share one entry of an operand: all of them where the operand is broadcast, a group of heads under
`enable_gqa`, else one. That number is called `share` here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from mmap import mmap
from typing import Any

import dask.array as da
import numpy as np
from numpy.lib.array_utils import byte_bounds

from sdpa import blocks
from sdpa._arguments import arrays
from sdpa._arrays import distinct
from sdpa._programs import of_part
from sdpa._table import OPTIONS, PROGRAMS

Parts = tuple[slice, ...]

MASKS = tuple(name for name, option in OPTIONS.items() if option.axes == "hqk")


@dataclass(frozen=True)
class View:
    """A part of a store or of a target, with what tasks ask of the whole."""

    source: Any
    parts: Parts

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.parts)

    @property
    def ndim(self) -> int:
        return len(self.parts)

    @property
    def dtype(self) -> Any:
        return self.source.dtype

    @property
    def chunks(self) -> Any:
        return getattr(self.source, "chunks", None)

    @property
    def shards(self) -> Any:
        return getattr(self.source, "shards", None)

    def _moved(self, index: Parts) -> Parts:
        inner = (part.indices(n) for part, n in zip(index, self.shape, strict=True))
        return tuple(
            slice(part.start + start, part.start + stop)
            for part, (start, stop, _) in zip(self.parts, inner, strict=True)
        )

    def __getitem__(self, index: Parts) -> Any:
        return self.source[self._moved(index)]

    def __setitem__(self, index: Parts, x: Any) -> None:
        self.source[self._moved(index)] = x


def part_of(x: Any, parts: Parts) -> Any:
    """The part of an array or store; of a store it is read by the tasks."""
    if all(part == slice(0, n) for part, n in zip(parts, x.shape, strict=True)):
        return x
    return x[parts] if isinstance(x, (np.ndarray, da.Array)) else View(x, parts)


def kept(x: Any) -> Any:
    """An array that its owner may change before the tasks run, as it is now.

    Dask copies arrays for the same reason. Mapped files stay, which are as large as stores, and so
    do views with fewer elements in memory than in their shape, such as those of `sdpa.bias`.
    """
    if not isinstance(x, np.ndarray) or _is_mapped(x):
        return x
    own = distinct(x)
    low, high = byte_bounds(own)
    return x if high - low < own.nbytes else np.broadcast_to(own.copy(), x.shape)


def _is_mapped(x: Any) -> bool:
    return isinstance(x, (np.memmap, mmap)) or (isinstance(x, np.ndarray) and _is_mapped(x.base))


class Leading:
    """The leading axes of the result of a call, and where those of other arrays lie on them."""

    def __init__(self, call: blocks.BlockProblem, options: Mapping[str, Any]) -> None:
        shape = call.out_shape()
        self.is_packed: bool = call.whole.packed
        self.shape: tuple[int, ...] = shape[-2:-1] if self.is_packed else shape[:-2]
        operands = {"query": call.query, "key": call.keys, "value": call.values, **call.masks}
        self.arrays: dict[str, Any] = {name: kept(x.source) for name, x in operands.items()}
        self.options: dict[str, Any] = {name: x for name, x in options.items() if x is not None}
        for name in set(self.options) - set(self.arrays) - set(PROGRAMS):
            if OPTIONS[name].is_array:
                x = self.options[name]
                self.arrays[name] = x if isinstance(x, da.Array) else kept(arrays(**{name: x})[0])
        for function in call.whole.functions:
            self.options[f"{function.name}_args"] = tuple(map(kept, function.args))

    def axes(self, name: str, ndim: int) -> dict[int, int]:
        """{axis of the result's leading ones: the array's own axis}."""
        option, end = OPTIONS.get(name), len(self.shape)
        if name in ("lse", "grad_lse"):
            n_own = ndim - 1
        elif option is None:
            if self.is_packed:
                return {0: ndim - 2}
            n_own = ndim - 2
        elif option.axes == "s":
            return {}
        else:
            end -= option.axes == ""
            n_own = ndim - max(option.n_inner, 0)
        own = range(max(n_own, 0))
        return {end - len(own) + i: i for i in own if end - len(own) + i >= 0}

    def share(self, name: str, x: Any, axis: int) -> int:
        """Entries of the result along the axis that share one entry of the array."""
        own, n = self.axes(name, len(x.shape)), self.shape[axis]
        return max(n // max(int(x.shape[own[axis]]), 1) if axis in own else n, 1)

    def bounds(self, given: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[list[int]]:
        """Where blocks end along each axis.

        Of the arrays in `wanted` every entry belongs to one block, so that none needs a sum.
        """
        found = []
        for axis, n in enumerate(self.shape):
            ends = {0, n}
            for name, x in given.items():
                own = self.axes(name, len(x.shape)).get(axis)
                if isinstance(x, da.Array) and own is not None:
                    share = self.share(name, x, axis)
                    ends |= {int(end) * share for end in np.cumsum(x.chunks[own])}
            for name, x in wanted.items():
                share = self.share(name, x, axis)
                ends = {end for end in ends if end % share == 0 or end == n}
            groups = self.share("key", self.arrays["key"], axis)
            for start, end in pairwise(sorted(ends)):
                # Either a part of one group of heads, or whole groups.
                inner = (-(-start // groups) * groups, end // groups * groups)
                ends |= {cut for cut in inner if start < cut < end}
            found.append(sorted(ends) if n else [0, 0])
        return found

    def check_whole_rows(self, arrays: Mapping[str, Any]) -> None:
        """Raise a ValueError if a Dask array is cut along another axis."""
        for name, x in arrays.items():
            if not isinstance(x, da.Array):
                continue
            for axis in set(range(x.ndim)) - set(self.axes(name, x.ndim).values()):
                if len(x.chunks[axis]) > 1:
                    raise ValueError(
                        f"{name}: expected one chunk along axis {axis}, all of which every task "
                        f"reads, got {x.chunks[axis]}; rechunk({{{axis}: -1}}) joins them, or "
                        "write it to a store"
                    )

    def parts(self, name: str, x: Any, block: Parts) -> Parts:
        """The part of an array that belongs to a block of the result's leading axes."""
        parts = [slice(0, int(n)) for n in x.shape]
        for axis, own in self.axes(name, len(x.shape)).items():
            if parts[own].stop == 1:  # also of a result without entries
                continue
            share = self.share(name, x, axis)
            parts[own] = slice(block[axis].start // share, -(-block[axis].stop // share))
        return tuple(parts)

    def part(self, name: str, x: Any, block: Parts) -> Any:
        found = part_of(x, self.parts(name, x, block))
        if isinstance(found, da.Array):  # chunks without entries would be blocks of their own
            own = self.axes(name, found.ndim).values()
            found = found.rechunk({axis: -1 for axis in own if 0 in found.chunks[axis]})
        return found

    def options_of(self, block: Parts) -> dict[str, Any]:
        """The options of the call for a block."""
        found = dict(self.options)
        for name in set(found) & set(self.arrays):
            part = self.part(name, self.arrays[name], block)
            # Numbers in lists have no type of their own.
            is_list = isinstance(found[name], (int, float, list, tuple)) and name not in MASKS
            found[name] = part.tolist() if is_list else part
        for word in "score", "mask":
            if f"{word}_mod" in found:
                found[f"{word}_mod"] = of_part(word == "mask", found[f"{word}_mod"])
                found[f"{word}_args"] = (*self._place(block), *found.get(f"{word}_args", ()))
        return found

    def _place(self, block: Parts) -> tuple[Any, Any]:
        """For each b of the block that of the whole call, and its first head."""
        *batch, heads = block or (slice(0, 1),)
        if self.is_packed:
            return np.arange(self.arrays["cu_seqlens_q"].shape[0] - 1), np.int64(heads.start)
        shape = self.shape[:-1]
        whole = np.arange(int(np.prod(shape))).reshape(shape)
        return whole[tuple(batch)].ravel(), np.int64(heads.start)

    def joined(self, name: str, parts: Sequence[Any], bounds: Sequence[Sequence[int]]) -> Any:
        """One array of its parts, which are in the order of `every`."""
        found, own = list(parts), self.axes(name, parts[0].ndim)
        for axis, ends in reversed(list(enumerate(bounds))):
            n = len(ends) - 1
            if n > 1:
                starts = range(0, len(found), n)
                found = [da.concatenate(found[i : i + n], own[axis]) for i in starts]
        return found[0]


def every(bounds: Sequence[Sequence[int]]) -> Iterator[Parts]:
    """The blocks of the leading axes, the last axis fastest."""
    return product(*([slice(*ends) for ends in pairwise(axis)] for axis in bounds))
