"""Exact attention over keys and values that do not fit into memory.

Keys and values may be any objects with shape, dtype and slices: arrays of Zarr or h5py, files
mapped into memory, arrays of NumPy. They are read block by block, and only if a query sees the
block; a thread reads each block while attention to the previous one is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Unpack, cast

import numpy as np

from sdpa import _arguments, _core, _warnings
from sdpa._arguments import checked_needs, checked_options, converted
from sdpa._arrays import (
    Array,
    compute_type,
    is_narrow,
    rounded,
    widen,
    widened_options,
)
from sdpa._options import BlockOptions
from sdpa._stream import (
    NO_KEYS,
    Mask,
    Operand,
    ScoreMatrix,
    chosen,
    grid,
    progress_bar,
    stream,
)
from sdpa._table import DIFFERENTIABLE_OPTIONS, OPTIONS

__all__ = ["attend", "attend_backward"]

BLOCK = 8192
Masks = dict[str, Any]
_MASKS = tuple(name for name, option in OPTIONS.items() if option.axes == "hqk")
MERGED_ROWS = 1024
"""Queries whose results are merged at a time."""


def attend(
    query: Any,
    keys: Any,
    values: Any,
    *,
    block: int = BLOCK,
    rows: slice | None = None,
    progress: bool = False,
    out: Array | None = None,
    **options: Unpack[BlockOptions],
) -> _core.AttentionForward:
    """Attention over keys and values that are read block by block, and its log-sum-exp.

    The result is that of `sdpa.attention_forward`, to rounding, whatever the blocks: with (out_b,
    lse_b) the results over block b alone,

        lse = log sum_b exp(lse_b)    out = sum_b exp(lse_b - lse) out_b,

    merged one block after the other by `sdpa.merge_attention`: Milakov and Gimelshein, "Online
    normalizer calculation for softmax" (2018), section 3.1. Equal blocks give equal bits on one
    instruction set, wherever they are computed and by however many threads.

    Blocks that causality, windows or key lengths hide from all queries are never read. Memory
    beside the result is that of the queries, of one more result in float32 (float64 for float64),
    and of two to three blocks of keys and values.

    Parameters
    ----------
    query : array_like or store, (..., heads, Lq, d_k)
        float16, bfloat16, float32 or float64. The part that `rows` selects is read at once.
    keys : array_like or store, (..., heads, Lk, d_k)
        Of query's dtype or, beside a float32 query, float16 or bfloat16. A store has shape and
        dtype, and returns arrays for `keys[index]` with a slice per axis. They stay as they are
        while others are read: a store that fills one buffer each time returns copies of it.
    values : array_like or store, (..., heads, Lk, d_v)
        Of keys' dtype.
    block : int, default 8192
        Keys of a block. If it is a multiple of the store's chunks, each is read once per call.
    rows : slice, optional
        The queries to compute. Options keep the meaning that they have for all queries, so calls
        for one block of queries after the other give what one call for all of them gives.
    progress : bool, default False
        Show a bar on stderr, which needs tqdm.
    out : ndarray, (..., heads, rows, d_v), optional
        Array for the output: of query's dtype or, not rounded to it, of lse's; any strides, sharing
        no memory with an input.
    **options : attn_mask, is_causal, scale, enable_gqa, softcap, window, sinks, ...
        As in `sdpa.attention`, but without dropout. attn_mask and where may be stores, of which
        only the parts that belong to the blocks are read. score_mod and mask_mod get the positions
        of the whole; blocks that mask_mod hides are read.

    Returns
    -------
    AttentionForward
        Named tuple (out, lse).
    out : ndarray, (..., heads, rows, d_v)
        The argument out or an array of query's dtype. Sums are float32 (float64 for float64),
        rounded once.
    lse : ndarray, (..., heads, rows)
        float32 (float64 for float64).

    Raises
    ------
    TypeError, ValueError
        As `sdpa.attention`, and for dropout, naming the argument, before anything is read. While
        reading, if a store returns another shape or dtype than it declares.
    IndexError
        As `sdpa.attention`.
    ImportError
        progress is True and tqdm is not installed.

    See Also
    --------
    attend_backward : gradients.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> from sdpa import blocks
    >>> rng = np.random.default_rng(0)
    >>> query, keys, values = rng.standard_normal((3, 2, 1000, 16), np.float32)
    >>> whole = sdpa.attention(query, keys, values, is_causal=True)
    >>> out, lse = blocks.attend(query, keys, values, block=256, is_causal=True)
    >>> np.allclose(out, whole, atol=1e-5)
    True
    >>> last = blocks.attend(query, keys, values, block=256, rows=slice(900, None), is_causal=True)
    >>> np.allclose(last.out, whole[:, 900:], atol=1e-5)
    True
    """
    problem = BlockProblem(attend, query, keys, values, options)
    size, part = _arguments.count("block", block, 1), chosen("rows", rows, problem.whole.n_q)
    bar = progress_bar(_arguments.boolean("progress", progress), "attend")
    problem.check_out(part, out)
    q = problem.query.read(part)
    total = _unrounded(problem, part, q, size, bar)
    lse = total.lse.astype(problem.compute_type(), copy=False)
    if out is None:
        return _core.AttentionForward(cast(Array, _rounded(total.out, problem.query)), lse)
    out[...] = rounded(total.out, out)
    return _core.AttentionForward(out, lse)


def _unrounded(
    problem: BlockProblem, rows: slice, q: Array, size: int, bar: Any
) -> _core.AttentionForward:
    """Attention of these queries in the compute type, over blocks of keys."""
    total = problem.start(rows, q)

    def take(columns: slice, data: tuple[Array, Array, Masks]) -> None:
        problem.merge(total, problem.forward(rows, columns, q, *data))

    columns = partial(problem.whole.key_blocks, rows, size)
    stream(columns(), lambda c: problem.read(rows, c), take, bar(columns()))
    return total


def attend_backward(
    grad_out: Any,
    query: Any,
    keys: Any,
    values: Any,
    out: Any,
    lse: Any,
    *,
    block: int = BLOCK,
    rows: slice | None = None,
    columns: slice | None = None,
    progress: bool = False,
    grad_lse: Any = None,
    needs: Iterable[str] = ("query", "key", "value"),
    **options: Unpack[BlockOptions],
) -> _core.AttentionGradients:
    """Gradients of `attend`, for a block of queries or a block of keys.

    These are the gradients of <grad_out, out> + <grad_lse, lse>, by the formula of
    `sdpa.attention_backward`. Gradients of queries are summed over blocks of keys and values;
    gradients of keys and values over blocks of queries, grad_out, out and lse. Neither needs the
    other's result: the gradients of all blocks can be computed on any machine in any order, and
    each has the same bits every time.

    An out of 16 bits is too coarse for gradients: the rows that a gradient needs are computed
    again, in float32, from all their keys and values. `attend` can return such an out.

    Parameters
    ----------
    grad_out : array_like or store, (..., heads, Lq, d_v)
        Of query's dtype.
    out : array_like or store, (..., heads, Lq, d_v)
        Result of `attend`: of query's dtype or, not rounded to it, of lse's.
    query : array_like or store, (..., heads, Lq, d_k)
        As in `attend`.
    keys, values : array_like or store, (..., heads, Lk, d_k) and (..., heads, Lk, d_v)
        As in `attend`.
    lse : array_like or store, (..., heads, Lq)
        Result of `attend`: float32 (float64 for float64).
    block : int, default 8192
        Number of keys, or queries, in a block that is read.
    rows : slice, optional
        The queries whose gradient is computed; their part of every operand is read at once.
    columns : slice, optional
        The keys and values whose gradients are computed; they are read at once.
    progress : bool, default False
        Show a bar on stderr, which needs tqdm.
    grad_lse : array_like or store, (..., heads, Lq), optional
        Gradient with respect to lse.
    needs : sequence of {"query", "key", "value", "attn_mask", "sinks", "scale", "score_args"}
        The gradients to compute. Those of options are the share of `rows`: where all queries have a
        mask, a sink, a scale or score_args in common, add up the shares of all rows.
    **options : attn_mask, is_causal, scale, enable_gqa, softcap, window, sinks, ...
        Those of the forward call.

    Returns
    -------
    AttentionGradients
        Named tuple (query, key, value, attn_mask, sinks, scale, score_args), None where not in
        needs. query has the shape and dtype of query[rows], key and value those of keys[columns]
        and values[columns], attn_mask those of the rows of the mask. score_args is a tuple, None
        for integers; its sums are float64, rounded once.

    Raises
    ------
    TypeError, ValueError, IndexError, ImportError
        As `attend`.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> from sdpa import blocks
    >>> rng = np.random.default_rng(0)
    >>> query, keys, values, grad = rng.standard_normal((4, 2, 1000, 16), np.float32)
    >>> saved = blocks.attend(query, keys, values)
    >>> g = blocks.attend_backward(grad, query, keys, values, *saved, columns=slice(100, 200),
    ...                            needs=("key", "value"))
    >>> g.key.shape
    (2, 100, 16)
    >>> whole = sdpa.attention_backward(grad, query, keys, values, *saved)
    >>> np.allclose(g.key, whole.key[:, 100:200], atol=1e-5)
    True
    """
    needs = checked_needs(needs, _core.AttentionGradients._fields)
    problem = BlockProblem(attend_backward, query, keys, values, options)
    if "score_args" in needs and not problem.score_args:
        raise ValueError("needs: 'score_args' have gradients only where they are given, got None")
    upstream = UpstreamOperands(problem, grad_out, out, lse, grad_lse, needs)
    progress = _arguments.boolean("progress", progress)
    size, bar = _arguments.count("block", block, 1), progress_bar(progress, "attend_backward")
    seen = chosen("rows", rows, problem.whole.n_q), chosen("columns", columns, problem.whole.n_k)
    of_queries = {name for name in needs if name not in ("key", "value")}
    found: dict[str, Any] = dict.fromkeys(_core.AttentionGradients._fields)
    if of_queries:
        found |= _query_gradients(problem, upstream, seen[0], size, of_queries, bar)
    if of_keys := set(needs) - of_queries:
        found |= _key_gradients(problem, upstream, seen[1], size, of_keys, bar)
    return _core.AttentionGradients(**found)


def _query_gradients(
    problem: BlockProblem,
    upstream: UpstreamOperands,
    rows: slice,
    size: int,
    needs: set[str],
    bar: Any,
) -> dict[str, Any]:
    """Gradients of queries, of their mask and of options per head, over blocks of keys."""
    q, given = problem.query.read(rows), upstream.read(rows)
    _unround(problem, upstream, given, rows, q, size)
    # Start from attention to no key: the sink already has a gradient, the others are 0.
    nothing = problem.read(rows, NO_KEYS)
    total = problem.backward(rows, NO_KEYS, q, *nothing, given, needs, first=True)
    parts, per_head = needs - {"sinks"}, needs - {"query", "attn_mask", "score_args"}
    mask = problem.mask_like(rows) if "attn_mask" in needs else None

    def take(columns: slice, data: tuple[Array, Array, Masks]) -> None:
        part = problem.backward(rows, columns, q, *data, given, parts)
        for name in ("query", *(per_head & parts)):
            _add(getattr(total, name), getattr(part, name))
        for sums, own in zip(total.score_args or (), part.score_args or (), strict=True):
            _add(sums, own)
        if mask is not None:
            # The ellipsis makes it a view even of a mask without axes.
            here: Any = (..., *problem.masks["attn_mask"].cut(slice(None), columns))
            _add(mask[here], part.attn_mask)

    columns = partial(problem.whole.key_blocks, rows, size)
    if parts:
        stream(columns(), lambda c: problem.read(rows, c), take, bar(columns()))
    return {
        "query": _rounded(total.query, problem.query),
        "attn_mask": None if mask is None else _rounded(mask, problem.masks["attn_mask"]),
        "score_args": total.score_args and problem.rounded_score_args(total.score_args),
        **{name: problem.rounded_per_head(name, getattr(total, name)) for name in per_head},
    }


def _key_gradients(
    problem: BlockProblem,
    upstream: UpstreamOperands,
    columns: slice,
    size: int,
    needs: set[str],
    bar: Any,
) -> dict[str, Array | None]:
    """Gradients of keys and values, over blocks of queries."""
    # Sums of 16-bit gradients are float32, like the gradient of a widened key.
    k, v = widen(problem.keys.read(columns)), widen(problem.values.read(columns))
    none = slice(0, 0)
    nothing = problem.query.read(none), k, v, problem.read_masks(none, columns)
    total = problem.backward(none, columns, *nothing, upstream.read(none), needs)

    def read(rows: slice) -> tuple[Array, Masks, list[Array | None]]:
        return problem.query.read(rows), problem.read_masks(rows, columns), upstream.read(rows)

    def take(rows: slice, data: tuple[Array, Masks, list[Array | None]]) -> None:
        q, masks, given = data
        _unround(problem, upstream, given, rows, q, size)
        part = problem.backward(rows, columns, q, k, v, masks, given, needs)
        _add(total.key, part.key)
        _add(total.value, part.value)

    rows = partial(problem.whole.query_blocks, columns, size)
    stream(rows(), read, take, bar(rows()))
    return {
        "key": _rounded(total.key, problem.keys),
        "value": _rounded(total.value, problem.values),
    }


def _unround(
    problem: BlockProblem,
    upstream: UpstreamOperands,
    given: list[Array | None],
    rows: slice,
    q: Array,
    size: int,
) -> None:
    """Replace an out of 16 bits by that of the compute type."""
    if upstream.rounds:
        given[1] = _unrounded(problem, rows, q, size, progress_bar(False, "")).out


@np.errstate(all="ignore")
def _add(total: Array | None, part: Array | None) -> None:
    if total is not None and part is not None:
        total += part


def _rounded(x: Array | None, operand: Operand) -> Array | None:
    return rounded(x, np.empty(0, operand.dtype))


class BlockProblem:
    """Operands and options of one call, checked but not read.

    Its methods compute one block: `rows` and `columns` are the place of q, k and v in the whole.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        query: Any,
        keys: Any,
        values: Any,
        options: Mapping[str, Any],
    ) -> None:
        options = dict(options)
        masks = {name: options.pop(name) for name in _MASKS if name in options}
        options = checked_options(function, options, BlockOptions.__annotations__)
        _, _, options = converted(options, {})
        packed = options.get("cu_seqlens_q") is not None
        axis = -3 if packed else -2
        self.query: Operand = Operand("query", query, axis)
        self.keys: Operand = Operand("key", keys, axis)
        self.values: Operand = Operand("value", values, axis)
        self.masks: dict[str, Mask] = {
            name: Mask(name, mask) for name, mask in masks.items() if mask is not None
        }
        seed = 0 if options.get("rng") is None else options["rng"]  # dropout is refused below
        _core._check_attention(
            self.query.unread, self.keys.unread, self.values.unread,
            **options | self.unread_masks | {"rng": seed},
        )  # fmt: skip
        if options.pop("dropout_p", 0.0) != 0:
            raise ValueError(
                "dropout_p: expected 0, because the pattern of dropout depends on the index of a "
                "key in its call, which blocks change"
            )
        # Sums of their gradients have the compute type. A number is not among them.
        self.per_head: dict[str, Any] = {
            name: options[name]
            for name in DIFFERENTIABLE_OPTIONS
            if isinstance(options.get(name), np.ndarray)
        }
        options |= {
            name: x.astype(self.sum_type(x), copy=False) for name, x in self.per_head.items()
        }
        self.whole: ScoreMatrix = ScoreMatrix(self.query.length, self.keys.length, options)

        self.score_args: tuple[Array, ...] = next(
            (f.args for f in self.whole.functions if f.name == "score"), ()
        )

    def rounded_score_args(self, grads: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
        """Gradients of score_args in their types."""
        return tuple(rounded(g, x) for g, x in zip(grads, self.score_args, strict=True))

    def rounded_per_head(self, name: str, grad: Array | None) -> Array | None:
        """A gradient in its option's dtype; that of a number stays."""
        return rounded(grad, self.per_head[name]) if name in self.per_head else grad

    @property
    def unread_masks(self) -> Masks:
        return {name: mask.unread for name, mask in self.masks.items()}

    def check_out(self, rows: slice, out: Array | None) -> None:
        """Check the result's array like `attention_forward`.

        It is written when all has been read: a store may read from the same memory, or the same
        file, which nothing here can know.
        """
        if out is None:
            return
        operands = (self.query, self.keys, self.values, *self.masks.values())
        # Of options, those that the check below gets as copies, or not at all.
        given = {x.name: x.source for x in operands} | self.whole.options | self.per_head
        for f in self.whole.functions:
            given |= {f"{f.name}_args[{i}]": x for i, x in enumerate(f.args)}
        _arguments.check_overlap(out, given)
        query, key, value, options = self._without_keys(rows)
        if getattr(out, "dtype", None) == self.compute_type():
            query = widen(query)
        with _warnings.silenced():  # all were warned of as a whole
            _core._check_attention(query, key, value, out=out, **options)

    def out_shape(self) -> tuple[int, ...]:
        """(..., heads, Lq, d_v) after broadcasting."""
        query, key, value, options = self._without_keys(slice(0, 0))
        with _warnings.silenced():  # all were warned of as a whole
            shape = list(_core.attention(query, key, value, **options).shape)
        shape[self.query.axis] = self.whole.n_q
        return tuple(shape)

    def compute_type(self) -> np.dtype[Any]:
        """The dtype of sums and lse."""
        return compute_type(self.query.dtype)

    def sum_type(self, x: Array | Mask) -> np.dtype[Any]:
        """The dtype of sums of an option's gradient: no narrower than those of the operands."""
        return np.promote_types(compute_type(x.dtype), self.compute_type())

    def operand(self, name: str) -> Operand:
        return {"query": self.query, "key": self.keys, "value": self.values}[name]

    def _without_keys(self, rows: slice) -> tuple[Array, Array, Array, dict[str, Any]]:
        """Operands and options of attention of these queries to no key; nothing is read."""
        query, key, value = (
            operand.unread[operand.index(part)]
            for operand, part in ((self.query, rows), (self.keys, NO_KEYS), (self.values, NO_KEYS))
        )
        masks = {name: mask.unread[mask.cut(rows, NO_KEYS)] for name, mask in self.masks.items()}
        return query, key, value, self.whole.block(rows, NO_KEYS) | masks

    def read(self, rows: slice, columns: slice) -> tuple[Array, Array, Masks]:
        """Keys, values and masks of a block."""
        return self.keys.read(columns), self.values.read(columns), self.read_masks(rows, columns)

    def read_masks(self, rows: slice, columns: slice) -> Masks:
        return {name: mask.block(rows, columns) for name, mask in self.masks.items()}

    def mask_like(self, rows: slice) -> Array:
        """Zeros for the gradient of the mask of these queries."""
        mask = self.masks["attn_mask"]
        shape = mask.unread[mask.cut(rows, slice(None))].shape
        return np.zeros(shape, self.sum_type(mask))

    def start(self, rows: slice, q: Array) -> _core.AttentionForward:
        """Attention to no key: out is 0, lse that of the sinks."""
        return self.forward(rows, NO_KEYS, q, *self.read(rows, NO_KEYS), first=True)

    @_warnings.silenced()  # all were warned of as a whole
    def forward(
        self,
        rows: slice,
        columns: slice,
        q: Array,
        k: Array,
        v: Array,
        masks: Masks,
        *,
        first: bool = False,
    ) -> _core.AttentionForward:
        """Attention of one block, out in float32 or float64, lse in float64.

        The weights of blocks are exponentials of lse: digits that it loses are theirs.
        """
        options = self.whole.block(rows, columns, first=first)
        return _core.attention_forward(widen(q), k, v, **masks, **options, lse_dtype=np.float64)

    def merge(self, total: _core.AttentionForward, part: _core.AttentionForward) -> None:
        """Make total the union of both, in place but for a few rows at a time."""
        # Those of packed sequences are (total, heads, d).
        outs = [x.out.swapaxes(-3, -2) if self.whole.packed else x.out for x in (total, part)]
        lses = [total.lse, part.lse]
        for rows in grid(total.lse.shape[-1], MERGED_ROWS):
            found = _core.merge_attention(
                [x[..., rows, :] for x in outs], [x[..., rows] for x in lses]
            )
            outs[0][..., rows, :], lses[0][..., rows] = found

    @_warnings.silenced()  # all were warned of as a whole
    def backward(
        self,
        rows: slice,
        columns: slice,
        q: Array,
        k: Array,
        v: Array,
        masks: Masks,
        upstream: list[Array | None],
        needs: Iterable[str],
        *,
        first: bool = False,
    ) -> _core.AttentionGradients:
        """Gradients of one block, in float32 or float64, except those of 16-bit keys."""
        grad_out, out, lse, grad_lse = upstream
        options = self.whole.block(rows, columns, first=first)
        if "score_args" in needs:
            # Gradients have their types, and sums of blocks more digits.
            options["score_args"] = tuple(_in_float64(x) for x in options["score_args"])
        found = _core.attention_backward(
            widen(cast(Array, grad_out)), widen(q), k, v, cast(Array, out), cast(Array, lse),
            grad_lse=grad_lse, needs=tuple(needs), **widened_options(masks, q.dtype),
            **options,
        )  # fmt: skip
        if found.score_args is None:
            return found
        return found._replace(score_args=found.score_args[1:])  # the first is the block's place


def _in_float64(x: Array) -> Array:
    return x if x.dtype.kind in "biu" else x.astype(np.float64)


class UpstreamOperands:
    """grad_out, out, lse and grad_lse of the whole call, checked but not read."""

    def __init__(
        self,
        problem: BlockProblem,
        grad_out: Any,
        out: Any,
        lse: Any,
        grad_lse: Any,
        needs: Iterable[str],
    ) -> None:
        rows = problem.query.axis
        self.out: Operand = Operand("out", out, rows)
        self.lse: Operand = Operand("lse", lse, -1)
        self.operands: list[Operand | None] = [
            Operand("grad_out", grad_out, rows),
            self.out,
            self.lse,
            None if grad_lse is None else Operand("grad_lse", grad_lse, -1),
        ]
        grad_out, out, lse, grad_lse = (None if x is None else x.unread for x in self.operands)
        whole = slice(0, problem.whole.n_q), slice(0, problem.whole.n_k)
        _core._check_attention_backward(
            grad_out, problem.query.unread, problem.keys.unread, problem.values.unread, out, lse,
            grad_lse=grad_lse, needs=tuple(needs), **problem.unread_masks,
            **problem.whole.block(*whole, first=True) | problem.whole.functions_given,
        )  # fmt: skip

    @property
    def rounds(self) -> bool:
        """Whether out was rounded to 16 bits."""
        return is_narrow(self.out.dtype)

    def read(self, rows: slice) -> list[Array | None]:
        return [None if x is None else x.read(rows) for x in self.operands]


def __dir__() -> list[str]:
    return __all__
