"""Attention block by block: the place of a block in the whole, the keys it sees, and reading ahead.

Each block of the (Lq, Lk) matrix of scores is a separate call. Its options are those of the whole
call, moved to the block's corner by `ScoreMatrix`. `stream` reads one block while another is
computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np

from sdpa import _arguments, _core
from sdpa._arrays import Array
from sdpa._programs import Program, beyond_keys, given_arrays

T = TypeVar("T")

NO_KEYS = slice(0, 0)


# ------------------------------------------------------------------------------- operands


class Operand:
    """An array, or another object with shape, dtype and slices, cut along one axis.

    Parameters
    ----------
    name : str
        The argument's name, for errors.
    source : array_like or store
        A store returns arrays: `source[index]` with a slice for each axis.
    axis : int
        The axis of queries or keys, from the end.
    """

    def __init__(self, name: str, source: Any, axis: int = -2) -> None:
        self.name: str = name
        self.axis: int = axis
        self.source: Any = source
        self.is_mapped: bool = isinstance(source, np.memmap)
        dtype = _dtype(source)
        if dtype is None or isinstance(source, np.ndarray):
            (self.source,) = _core._arrays(**{name: source})
            dtype = self.source.dtype
        elif hasattr(source, "__dlpack_device__"):
            # An array of another library, which must lie on the CPU.
            _core._arrays(**{name: source[(slice(0, 0),) * len(source.shape)]})
        self.dtype: np.dtype[Any] = dtype
        shape = self.source.shape
        if not isinstance(shape, Sequence):
            raise TypeError(f"{name}: expected a store with a shape, got {shape!r}")
        check_known(name, shape)
        self.shape: tuple[int, ...] = tuple(_arguments.size(f"{name}.shape", n) for n in shape)

    @property
    def length(self) -> int:
        return self.shape[self.axis]

    @property
    def unread(self) -> Array:
        """The array itself if it is in memory, else one element repeated to its shape."""
        if isinstance(self.source, np.ndarray):
            return self.source
        return np.broadcast_to(np.empty((), self.dtype), self.shape)

    def index(self, part: slice) -> tuple[slice, ...]:
        index = [slice(None)] * len(self.shape)
        index[self.axis] = part
        return tuple(index)

    def read(self, part: slice) -> Array:
        """The block from part.start to part.stop along the axis."""
        return self.read_at(self.index(part))

    def read_at(self, index: tuple[slice, ...]) -> Array:
        block = self.source[index]
        if isinstance(self.source, np.ndarray):
            # Touch the pages of a mapped file now, in the thread that reads ahead.
            return np.array(block) if self.is_mapped else block
        (block,) = _core._arrays(**{self.name: block})
        expected = tuple(
            len(range(*part.indices(n))) for part, n in zip(index, self.shape, strict=True)
        )
        if block.shape != expected or block.dtype != self.dtype:
            raise ValueError(
                f"{self.name}: expected its slice to be {expected} of {self.dtype}, "
                f"got {block.shape} of {block.dtype}"
            )
        return block


def check_known(name: str, shape: Sequence[Any]) -> None:
    """Raise a ValueError for a shape of Dask's that is known only once it is computed."""
    if any(n != n for n in shape):
        raise ValueError(
            f"{name}: expected known lengths, got shape {tuple(shape)}; those of a Dask array are "
            "found by its compute_chunk_sizes()"
        )


def _dtype(source: Any) -> np.dtype[Any] | None:
    """The dtype of an object that can be sliced like a NumPy array; None for other objects."""
    if not (hasattr(source, "shape") and hasattr(source, "__getitem__")):
        return None
    try:
        found: np.dtype[Any] = np.dtype(source.dtype)
    except (AttributeError, TypeError):
        return None
    return found


class Mask(Operand):
    """An attn_mask, whose axes of length 1 and missing axes are broadcast."""

    def cut(self, rows: slice, columns: slice) -> tuple[slice, ...]:
        """The index of the mask for a block of queries and keys."""
        index = [slice(None)] * len(self.shape)
        for axis, part in ((-2, rows), (-1, columns)):
            if len(self.shape) >= -axis and self.shape[axis] != 1:
                index[axis] = part
        return tuple(index)

    def block(self, rows: slice, columns: slice) -> Array:
        return self.read_at(self.cut(rows, columns))


# ------------------------------------------------------------------------------- places


class Function:
    """A function of the user, traced once for all blocks.

    Parameters
    ----------
    name : {"score", "mask"}
    options : dict
        Loses the function and its arguments.
    first_key : int or ndarray
        Of the whole call: one number, or one for each packed sequence.
    """

    def __init__(self, name: str, options: dict[str, Any], first_key: Any) -> None:
        self.name: str = name
        given = {n: options.pop(n) for n in (f"{name}_mod", f"{name}_args") if n in options}
        self.whole: dict[str, Any] = {f"{name}_args": None} | given
        self.args: tuple[Array, ...] = given_arrays(name == "mask", given.get(f"{name}_args"))[0]
        first = np.asarray(first_key, np.int64)
        moved = beyond_keys(name == "mask", given[f"{name}_mod"], first.ndim > 0)
        self._program = Program(name == "mask", moved, (first, *self.args))

    def block(self, first_key: Any) -> dict[str, Any]:
        """The options of a block, in which positions count from its first key."""
        first = np.asarray(first_key, np.int64)
        return {f"{self.name}_mod": self._program, f"{self.name}_args": (first, *self.args)}


class ScoreMatrix:
    """The matrix of scores of one call, and the calls for its blocks.

    Parameters
    ----------
    n_q, n_k : int
        Lengths of queries and keys; of packed sequences, all together.
    options : mapping
        Checked options of `attention`, without attn_mask and out.
    """

    def __init__(self, n_q: int, n_k: int, options: Mapping[str, Any]) -> None:
        self.options: dict[str, Any] = {name: x for name, x in options.items() if x is not None}
        self.n_q: int = n_q
        self.n_k: int = n_k
        packed = [self.options.get(f"cu_seqlens_{side}") for side in "qk"]
        self.packed: bool = packed[0] is not None
        self._cu = [_arguments.integers("cu_seqlens", x) for x in packed if x is not None]
        ends: list[Any] = [(x[:-1], x[1:]) for x in self._cu] or [(0, n_q), (0, n_k)]
        # Per sequence; arguments that are not packed count as one sequence.
        (self._first_q, self._end_q), (self._first_k, self._end_k) = ends
        self._length = self.options.get("key_lengths")
        if self._length is not None:
            self._length = _arguments.integers("key_lengths", self._length)
        self._offset = _arguments.integers("query_offset", self.options.get("query_offset", 0))
        if self.options.get("is_causal") == "lower_right":
            self._offset = self._lengths() - (self._end_q - self._first_q)
            self.options["is_causal"] = True
        bounds = _arguments.window("window", self.options.get("window"))
        self.functions: list[Function] = [
            Function(name, self.options, self._first_k)
            for name in ("score", "mask")
            if f"{name}_mod" in self.options
        ]
        needs_positions = "alibi_slopes" in self.options or self.functions
        if not needs_positions:
            self._offset, bounds = _arguments.nearer(self._offset, bounds, n_q + n_k)
        self._left, self._right = self.options["window"] = bounds
        self._diagonal = (
            needs_positions
            or bounds != (None, None)
            or self.options.get("is_causal", False) is not False
        )

    @property
    def functions_given(self) -> dict[str, Any]:
        """The functions of the user and their arguments, as given."""
        return {name: x for function in self.functions for name, x in function.whole.items()}

    def _lengths(self) -> Any:
        """The number of keys of each sequence that take part."""
        return self._end_k - self._first_k if self._length is None else self._length

    def block(self, rows: slice, columns: slice, *, first: bool = False) -> dict[str, Any]:
        """The options of the block, without its masks; the first block alone has the sinks."""
        options = {name: x for name, x in self.options.items() if first or name != "sinks"}
        # Queries and keys of the sequence that lie before the block.
        skipped_q = np.maximum(rows.start - self._first_q, 0)
        skipped_k = np.maximum(columns.start - self._first_k, 0)
        if self._diagonal:
            offset, most = self._offset + skipped_q - skipped_k, _arguments.LARGEST_OFFSET
            options["query_offset"] = np.clip(offset, -most, most)
        present = columns.stop - columns.start
        if self.packed:
            cuts = [
                np.clip(cu - part.start, 0, part.stop - part.start)
                for cu, part in zip(self._cu, (rows, columns), strict=True)
            ]
            options["cu_seqlens_q"], options["cu_seqlens_k"] = cuts
            present = np.diff(cuts[1])
        if self._length is not None:
            options["key_lengths"] = np.clip(self._length - skipped_k, 0, present)
        for function in self.functions:
            options |= function.block(skipped_k)
        return options

    def sees(self, rows: slice, columns: slice) -> bool:
        """Whether any of these queries sees any of these keys, apart from the mask."""
        first = np.maximum(rows.start - self._first_q, 0)
        last = np.minimum(rows.stop, self._end_q) - self._first_q - 1
        low, high = np.zeros((), np.int64), np.asarray(self._lengths())
        if self._left is not None:
            low = np.maximum(low, first + self._offset - self._left)
        ahead = [
            n for n in (self._right, 0 if self.options.get("is_causal") else None) if n is not None
        ]
        if ahead:
            high = np.minimum(high, last + self._offset + min(ahead) + 1)
        low = np.maximum(low, columns.start - self._first_k)
        high = np.minimum(high, columns.stop - self._first_k)
        return bool(((low < high) & (first <= last)).any())

    def key_blocks(self, rows: slice, size: int) -> Iterator[slice]:
        """The blocks of keys that any of these queries sees."""
        return (columns for columns in grid(self.n_k, size) if self.sees(rows, columns))

    def query_blocks(self, columns: slice, size: int) -> Iterator[slice]:
        """The blocks of queries that see any of these keys."""
        return (rows for rows in grid(self.n_q, size) if self.sees(rows, columns))


def grid(n: int, block: int) -> Iterator[slice]:
    """Blocks of `block` positions, the last one shorter."""
    return (slice(start, min(start + block, n)) for start in range(0, n, block))


def chosen(name: str, part: slice | None, n: int) -> slice:
    """A slice of n positions with start and stop."""
    if part is None:
        return slice(0, n)
    if not isinstance(part, slice):
        raise TypeError(f"{name}: expected a slice, got {part!r}")
    try:
        start, stop, step = part.indices(n)
    except TypeError:
        raise TypeError(f"{name}: expected a slice of integers, got {part}") from None
    if step != 1:
        raise ValueError(f"{name}: expected a slice of step 1, got {part}")
    return slice(start, max(start, stop))


# ------------------------------------------------------------------------------- reading


# Seconds between two looks for an interrupt, and those for which one waits for a read under way.
_POLL, _GRACE = 0.1, 0.5


class Reader(Generic[T]):
    """A thread that reads blocks; the caller reads where no thread can be started.

    Not an executor of Python's, which waits for its threads: a store that hangs would hold up an
    interrupt, and the end of the process.
    """

    def __init__(self, read: Callable[[slice], T]) -> None:
        self._read: Callable[[slice], T] = read
        self._asked: SimpleQueue[tuple[Future[T], slice] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def __enter__(self) -> Reader[T]:
        try:
            # In the caller's context, by which a store may read, and NumPy judge its errors.
            run = copy_context().run
            thread = Thread(target=run, args=(self._serve,), name="sdpa-read", daemon=True)
            thread.start()
        except RuntimeError:  # by the system, by this interpreter, or at its end
            return self
        except BaseException:
            self._asked.put(None)  # start waits for the thread, which may run already
            raise
        self._thread = thread
        return self

    def begin(self, part: slice) -> Callable[[], T]:
        """Begin to read a block. The function that is returned waits for it."""
        if self._thread is None:
            return partial(self._read, part)
        found: Future[T] = Future()
        self._asked.put((found, part))
        return partial(_result, found)

    def _serve(self) -> None:
        while (asked := self._asked.get()) is not None:
            found, part = asked
            try:
                found.set_result(self._read(part))
            except BaseException as error:
                found.set_exception(error)
            del asked, found  # else the block would live until the next is asked for

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        """Wait until the thread has ended; after an interrupt, not for longer than the grace."""
        if self._thread is None:
            return
        self._asked.put(None)
        if kind is not None and not issubclass(kind, Exception):
            self._thread.join(_GRACE)
            return
        while self._thread.is_alive():
            self._thread.join(_POLL)


def _result(found: Future[T]) -> T:
    try:
        # Windows interrupts no waiting, only what comes after it.
        while not wait((found,), _POLL).done:
            pass
        return found.result()
    finally:
        del found  # whose exception would keep this frame, and thus itself, alive


def stream(
    parts: Iterator[slice],
    read: Callable[[slice], T],
    take: Callable[[slice, T], None],
    bar: AbstractContextManager[Any],
) -> None:
    """Call take(part, read(part)) for each part in order, while a thread reads the next one."""
    with bar as move, Reader(read) as reader:
        upcoming = ((part, reader.begin(part)) for part in parts)
        following = next(upcoming, None)
        try:
            while following is not None:
                part, data = following[0], following[1]()
                following = next(upcoming, None)
                take(part, data)
                del data  # before the one after next is read
                if move is not None:
                    move.update()
        finally:
            following = None  # whose exception would keep this frame, and all that was read, alive


def progress_bar(wanted: bool, what: str) -> Callable[[Iterable[Any]], AbstractContextManager[Any]]:
    """Return a function that makes a bar for these parts, which it counts."""
    if not wanted:
        return lambda parts: nullcontext()
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError("progress=True needs tqdm: pip install tqdm") from error
    return lambda parts: tqdm(total=sum(1 for _ in parts), desc=what, unit="block")
