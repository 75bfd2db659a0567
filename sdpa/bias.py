"""Biases that depend on the distance of query and key: ALiBi's slopes, T5's buckets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Unpack, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sdpa import _arguments, _core, _warnings
from sdpa._arguments import (
    arrays,
    checked_float,
    checked_needs,
    checked_options,
    converted,
    pop_query_offset,
)
from sdpa._arrays import (
    Array,
    native,
    rounded,
    widen,
)
from sdpa._compose import Upstream, checked_upstream, composed_backward
from sdpa._options import T5Options
from sdpa._repr import shown

__all__ = [
    "T5Gradients",
    "alibi",
    "t5_attention_backward",
    "t5_relative",
    "t5_relative_backward",
]

# The elements of the bias whose gradients are held at a time, and the fewest rows of a block.
_BLOCK_ELEMENTS, _BLOCK_ROWS = 1 << 21, 32


def alibi(heads: int) -> NDArray[np.float64]:
    """Slopes of attention with linear biases, for the option alibi_slopes.

    Press, Smith and Lewis, "Train short, test long: attention with linear biases enables input
    length extrapolation" (2022), section 3: head h = 1 ... n has slope 2^(-8 h / n) where n is a
    power of two. For other numbers of heads the slopes for the next lower power of two come first,
    then every other slope for twice that power (as in their code).

    Parameters
    ----------
    heads : int
        At least 1.

    Returns
    -------
    ndarray, (heads,), float64

    Raises
    ------
    TypeError
        heads is not an integer.
    ValueError
        heads is below 1.

    Examples
    --------
    >>> import sdpa
    >>> sdpa.bias.alibi(4)
    array([0.25      , 0.0625    , 0.015625  , 0.00390625])
    """
    heads = _arguments.size("heads", heads, 1)
    power = 1 << (heads.bit_length() - 1)
    own = np.exp2(-8 * np.arange(1, power + 1) / power)
    between = np.exp2(-4 * np.arange(1, 2 * power, 2) / power)
    return np.concatenate([own, between[: heads - power]])


def t5_relative(
    table: ArrayLike,
    query_length: int,
    key_length: int,
    *,
    bidirectional: bool = True,
    max_distance: int = 128,
    query_offset: int = 0,
) -> Array:
    """T5's relative position bias, for attn_mask: a view of one number per distance.

    bias[h, i, j] = table[bucket(j - i - query_offset), h], Raffel et al., "Exploring the limits of
    transfer learning with a unified text-to-text transformer" (2020), section 2.1. Of n buckets
    for one direction, n // 2 hold one distance each, from 0; the others hold ranges that grow
    logarithmically up to max_distance, and the last of them everything beyond. If bidirectional,
    half of the buckets are for keys up to the query's position and half for keys after it. If not,
    all are for keys up to it, and keys after it share bucket 0 with distance 0. Computed in
    float32, as the published models were.

    Rows are strided views of one line, so the memory is O(heads (Lq + Lk)), and the kernels read
    the view directly. T5 does not scale its scores: use it with scale=1.0.

    Parameters
    ----------
    table : array_like, (num_buckets, heads)
        float16, bfloat16, float32 or float64.
    query_length, key_length : int
        Lq and Lk.
    bidirectional : bool, default True
        False in decoders, with is_causal=True.
    max_distance : int, default 128
        From this distance on, all keys share the last bucket.
    query_offset : int, default 0
        Position of query 0 among the keys.

    Returns
    -------
    ndarray, (heads, Lq, Lk)
        Of table's dtype; a read-only view.

    Raises
    ------
    TypeError
        table has a dtype that is not accepted, or a size is not an integer.
    ValueError
        Sizes do not fit.

    See Also
    --------
    t5_relative_backward : gradient of table from the gradient of the bias.
    t5_attention_backward : all gradients of attention with this bias, without an Lq x Lk array.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> table = np.arange(8.0)[:, None]  # of one head
    >>> sdpa.bias.t5_relative(table, 2, 6, max_distance=4)[0]
    array([[0., 5., 6., 7., 7., 7.],
           [1., 0., 5., 6., 7., 7.]])
    """
    (table,) = arrays(table=table)
    _check_table(table)
    n_q = _arguments.size("query_length", query_length)
    n_k = _arguments.size("key_length", key_length)
    buckets = _buckets("table", len(table), n_q, n_k, bidirectional, max_distance, query_offset)
    line = np.ascontiguousarray(table[buckets].T, dtype=native(table.dtype))
    return _toeplitz(line, n_q, n_k)


def t5_relative_backward(
    grad_bias: ArrayLike,
    num_buckets: int,
    *,
    bidirectional: bool = True,
    max_distance: int = 128,
    query_offset: int = 0,
) -> Array:
    """Gradient of <grad_bias, t5_relative(table, ...)> with respect to table.

    It sums each diagonal of grad_bias, then the diagonals of each bucket. To avoid an Lq x Lk
    gradient, add up blocks of queries, each with the position of its first query as query_offset,
    as `t5_attention_backward` does.

    Parameters
    ----------
    grad_bias : array_like, (..., heads, Lq, Lk)
        Summed over the leading axes.
    num_buckets : int
        Rows of table.
    bidirectional, max_distance, query_offset : optional
        As in the forward call.

    Returns
    -------
    ndarray, (num_buckets, heads)
        Of grad_bias's dtype, summed in float64.

    Raises
    ------
    TypeError, ValueError
        As `t5_relative`.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> sdpa.bias.t5_relative_backward(np.ones((1, 2, 6)), 8, max_distance=4).ravel()
    array([2., 1., 0., 0., 0., 2., 2., 5.])
    """
    (grad,) = arrays(grad_bias=grad_bias)
    checked_float("grad_bias", grad)
    if grad.ndim < 3:
        raise ValueError(
            f"grad_bias: expected at least three axes, (..., heads, Lq, Lk), got {grad.shape}"
        )
    n_q, n_k = grad.shape[-2:]
    num_buckets = _arguments.size("num_buckets", num_buckets, 2)
    buckets = _buckets(
        "num_buckets", num_buckets, n_q, n_k, bidirectional, max_distance, query_offset
    )
    total = _sum_buckets(grad, buckets, num_buckets)
    return cast(Array, rounded(total, grad))


@shown
class T5Gradients(NamedTuple):
    """Gradients of attention with T5's bias, each with its argument's shape; None if not needed."""

    query: Array | None
    key: Array | None
    value: Array | None
    table: Array | None
    sinks: Array | None


def t5_attention_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    table: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    bidirectional: bool = True,
    max_distance: int = 128,
    grad_lse: ArrayLike | None = None,
    needs: Iterable[str] = ("query", "key", "value", "table"),
    **options: Unpack[T5Options],
) -> T5Gradients:
    """Gradients of attention with attn_mask = t5_relative(table, Lq, Lk), down to the table.

    It calls `attention_backward` for one block of queries at a time and sums each block's gradient
    of the bias into buckets, so the memory is O(heads block Lk), never O(Lq Lk).

    Parameters
    ----------
    grad_out, query, key, value : array_like
        As in `attention_backward`.
    table : array_like, (num_buckets, heads)
        Of any floating dtype; its heads are query's, 1 where query has no axis of heads.
    out, lse, grad_lse : array_like
        As in `attention_backward`.
    bidirectional, max_distance : optional
        As in `t5_relative`.
    needs : sequence of {"query", "key", "value", "table", "sinks"}
        The gradients to compute.
    **options : is_causal, scale, enable_gqa, window, sinks, key_lengths, query_offset, ...
        As in the forward call. query_offset is one int, the same as in `t5_relative`. dropout_p is
        not accepted, because its pattern depends on the index of the query; nor is attn_mask, since
        the bias takes its place.

    Returns
    -------
    T5Gradients
        Named tuple (query, key, value, table, sinks), each with the shape and dtype of its
        argument, None where not in needs.

    Raises
    ------
    TypeError, ValueError
        As `attention_backward` and `t5_relative`.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> rng = np.random.default_rng(0)
    >>> query, key, value, grad_out = rng.standard_normal((4, 2, 5, 8))  # 2 heads
    >>> table = rng.standard_normal((32, 2))
    >>> bias = sdpa.bias.t5_relative(table, 5, 5)
    >>> out, lse = sdpa.attention_forward(query, key, value, bias, scale=1.0)
    >>> g = sdpa.bias.t5_attention_backward(
    ...     grad_out, query, key, value, table, out, lse, scale=1.0
    ... )
    >>> g.table.shape
    (32, 2)
    """
    checked = checked_options(t5_attention_backward, options, T5Options.__annotations__)
    needs = checked_needs(needs, T5Gradients._fields)
    (grad_out, query, key, value, table, out, lse), (grad_lse,), checked = converted(
        checked, {"grad_lse": grad_lse},
        grad_out=grad_out, query=query, key=key, value=value, table=table, out=out, lse=lse,
    )  # fmt: skip
    _core._check_attention(query, key, value, **checked)
    _check_table(table)
    has_heads = _check_heads(table, query, key, value)
    n_q, n_k = query.shape[-2], key.shape[-2]
    offset = pop_query_offset(checked, n_q, n_k)
    buckets = _buckets("table", len(table), n_q, n_k, bidirectional, max_distance, offset)
    # Blocks of queries add to the offset, which has a limit.
    bounds = _arguments.window("window", checked.get("window"))
    near, checked["window"] = _arguments.nearer(offset, bounds, n_q + n_k)
    checked["query_offset"] = int(near)
    like_bias = np.broadcast_to(np.zeros((), table.dtype), (table.shape[1], n_q, n_k))
    inner = tuple("attn_mask" if name == "table" else name for name in needs)
    mask = {"attn_mask": like_bias if has_heads else like_bias[0]}
    upstream = checked_upstream(
        grad_out, (query, key, value), out, lse, grad_lse, inner, checked | mask
    )

    bias = _toeplitz(np.ascontiguousarray(widen(table)[buckets].T), n_q, n_k)
    operands = (widen(query), widen(key), widen(value))
    if not has_heads:
        operands = (operands[0][None], operands[1][None], operands[2][None])
        one_head = {name: x[None] for name, x in upstream._asdict().items() if x is not None}
        upstream = upstream._replace(**one_head)
    total = _summed_over_blocks(upstream, operands, bias, buckets, len(table), inner, checked)
    arguments = {"query": query, "key": key, "value": value, "table": table}
    found: dict[str, Any] = dict.fromkeys(T5Gradients._fields) | total
    for name, x in arguments.items():
        if name in total:
            found[name] = cast(Array, rounded(total[name], x)).reshape(x.shape)
    return T5Gradients(**found)


@np.errstate(all="ignore")
@_warnings.silenced()  # the mask is the table's
def _summed_over_blocks(
    upstream: Upstream,
    operands: tuple[Array, Array, Array],
    bias: Array,
    buckets: Array,
    num_buckets: int,
    needs: tuple[str, ...],
    options: dict[str, Any],
) -> dict[str, Array]:
    """Compute the gradients of attention with this bias, one block of queries at a time.

    "table" is the gradient of the bias, summed into its buckets block by block, in float64.
    """
    query, key, value = operands
    heads, n_q, n_k = bias.shape
    step = max(_BLOCK_ROWS, _BLOCK_ELEMENTS // max(1, n_k * heads))
    total: dict[str, Array] = {}
    by_query: list[Array] = []
    for start in range(0, max(n_q, 1), step):
        block = slice(start, start + step)
        here = {"attn_mask": bias[:, block], "query_offset": options["query_offset"] + start}
        g = composed_backward(
            upstream.block(block), (query[..., block, :], key, value), needs, options | here
        )
        parts = {"key": g.key, "value": g.value, "sinks": g.sinks}
        if g.query is not None:
            by_query.append(g.query)
        if g.attn_mask is not None:
            first = n_q - min(start + step, n_q)
            of_block = buckets[first : n_q - start + n_k - 1]
            parts["table"] = _sum_buckets(g.attn_mask, of_block, num_buckets)
        for name, part in parts.items():
            if part is not None:
                total[name] = total[name] + part if name in total else part
    if by_query:
        total["query"] = np.concatenate(by_query, axis=-2)
    return total


def _check_table(table: Array) -> None:
    checked_float("table", table)
    if table.ndim != 2:
        raise ValueError(f"table: expected (num_buckets, heads), got {table.shape}")


def _check_heads(table: Array, *operands: Array) -> bool:
    """Raise a ValueError unless the table has their heads; return whether they have an axis."""
    heads = [x.shape[-3] for x in operands if x.ndim > 2]
    n = 0 if 0 in heads else max(heads, default=1)
    if table.shape[1] not in (1, n):
        raise ValueError(
            f"table: expected (num_buckets, {n}), a column for each head of query, "
            f"got {table.shape}"
        )
    return bool(heads)


def _buckets(
    name: str,
    num_buckets: int,
    n_q: int,
    n_k: int,
    bidirectional: bool,
    max_distance: int,
    offset: int,
) -> Array:
    """The bucket of every distance: entry p belongs to the pairs with j - i + Lq - 1 = p.

    `name` is the argument that determines the number of buckets.
    """
    offset = _arguments.offset("query_offset", offset)
    max_distance = _arguments.integer("max_distance", max_distance)
    bidirectional = _arguments.boolean("bidirectional", bidirectional)
    n = num_buckets // 2 if bidirectional else num_buckets
    if n < 2 or (bidirectional and num_buckets % 2):
        least = "an even number of at least 4" if bidirectional else "at least 2"
        raise ValueError(f"{name}: expected {least} buckets, got {num_buckets}")
    exact = n // 2
    if max_distance <= exact:
        raise ValueError(
            f"max_distance: expected more than the {exact} distances that have a bucket each, "
            f"got {max_distance}"
        )
    relative = np.arange(1 - n_q, max(n_k, 1 - n_q)) - offset
    distance = abs(relative) if bidirectional else np.maximum(-relative, 0)
    ratio = np.log(np.maximum(distance, exact).astype(np.float32) / np.float32(exact))
    far = ratio / np.float32(np.log(max_distance / exact)) * np.float32(n - exact)
    bucket = np.where(distance < exact, distance, np.minimum(exact + far.astype(np.int64), n - 1))
    return np.where(bidirectional & (relative > 0), bucket + n, bucket)


def _toeplitz(line: Array, n_q: int, n_k: int) -> Array:
    """A view of line (heads, Lq + Lk - 1) whose [h, i, j] is line[h, j - i + Lq - 1]."""
    if not n_q or not n_k:
        return np.zeros((line.shape[0], n_q, n_k), line.dtype)
    by_head, step = line.strides
    return np.lib.stride_tricks.as_strided(
        line[:, n_q - 1 :], (line.shape[0], n_q, n_k), (by_head, -step, step), writeable=False
    )


@np.errstate(all="ignore")
def _sum_buckets(grad: Array, buckets: Array, num_buckets: int) -> Array:
    """Sums of a bias's gradient (..., heads, Lq, Lk) over each bucket: (num_buckets, heads)."""
    heads, n_q, n_k = grad.shape[-3:]
    line, lead = np.zeros((len(buckets), heads)), tuple(range(grad.ndim - 3))
    for i in range(n_q):
        row = grad[..., i, :].sum(axis=lead, dtype=np.float64)
        line[n_q - 1 - i : n_q - 1 - i + n_k] += row.T
    total = np.zeros((num_buckets, heads))
    np.add.at(total, buckets, line)
    return total


def __dir__() -> list[str]:
    return __all__
