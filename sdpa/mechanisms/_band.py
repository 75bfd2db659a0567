"""Computes attention with relative positions: its far parts, and the band of distances in blocks.

shaw.py defines the result and the parts. In a block the scores of relative rows go to the kernel as
a bias. The kernel applies softcap before it adds biases, and counts the pairs of dropout from the
first pair of a call; with these options the pairs of a block are written out in NumPy instead.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import numpy as np

from sdpa import _arguments, _core, _warnings
from sdpa._arguments import checked_like_query, pop_query_offset
from sdpa._arrays import (
    Array,
    broadcast_shapes,
    is_narrow,
    native,
    product_skipping_zeros,
    repeat_heads,
    rounded,
    sum_heads,
    sum_to,
    weight_gradient,
    widen,
    widened_options,
)
from sdpa._compose import Upstream, composed_backward
from sdpa._philox import dropout_factors
from sdpa._table import OPTIONS
from sdpa.mechanisms._scores import changed_scores, changes_scores

_SHARED = {"key_lengths", *(name for name, option in OPTIONS.items() if option.kind == "call")}
# Queries in a block of the band; fewer if its arrays would have more elements than this.
_BLOCK_ROWS, _BLOCK_ELEMENTS = 128, 1 << 21


class Problem:
    """The arguments of the forward, checked, and the geometry of their distances."""

    def __init__(
        self,
        query: Array,
        key: Array,
        value: Array,
        rel_key: Array,
        rel_value: Array | None,
        options: dict[str, Any],
    ) -> None:
        self.options = options
        self.query, self.key, self.value = query, key, value
        self.rel_key, self.rel_value = rel_key, rel_value
        _core._check_attention(self.query, self.key, self.value, **options)
        self._check("rel_key", self.rel_key, "key", self.key)
        if self.rel_value is not None:
            self._check("rel_value", self.rel_value, "value", self.value)
            if self.rel_value.shape[-2] != self.rel_key.shape[-2]:
                raise ValueError(
                    f"rel_value: expected {self.rel_key.shape[-2]} rows like rel_key, "
                    f"got {self.rel_value.shape}"
                )
        self.n_q, self.n_k = self.query.shape[-2], self.key.shape[-2]
        self.farthest = self.rel_key.shape[-2] // 2
        self.offset = pop_query_offset(dict(options), self.n_q, self.n_k)
        scale = options.get("scale")
        self.scale = (
            _arguments.default_scale(self.query.shape[-1])
            if scale is None
            else _arguments.finite("scale", scale)
        )
        # The options that a block of the band shares with the whole.
        self.block_options: dict[str, Any] = {"scale": self.scale}
        for name in options.keys() & _SHARED:
            self.block_options[name] = options[name]
        if self.block_options.get("key_lengths") is not None:
            lengths = _arguments.integers("key_lengths", options["key_lengths"])
            self.block_options["key_lengths"] = lengths
        self.dropout_p, rng = float(options.get("dropout_p", 0.0)), options.get("rng")
        self.seed = None if rng is None else _arguments.seed(rng)
        # Whether the kernel can compute the band, with the scores of relative rows as a bias.
        self.is_plain = self.dropout_p == 0 and not changes_scores(options)

    @functools.cached_property
    def slopes(self) -> Array | None:
        """alibi_slopes, one for each query head, (..., heads, 1, 1)."""
        slopes = self.options.get("alibi_slopes")
        if slopes is None:
            return None
        dtype = widen(self.query[:0]).dtype
        # The slope of arrays without heads may have one axis, as it may in the kernel.
        x: Array = slopes if self.lead else slopes.reshape(())
        return x[..., None, None].astype(dtype)

    def alibi(self, distances: Array) -> Array:
        """The bias of ALiBi at these distances, (..., heads, *distances.shape)."""
        slopes = cast(Array, self.slopes)
        added: Array = -slopes * abs(distances).astype(slopes.dtype)
        return added

    @functools.cached_property
    def mask(self) -> Array | None:
        """attn_mask for widened operands."""
        mask: Array | None = widened_options(self.options, self.query.dtype).get("attn_mask")
        return mask

    def _check(self, name: str, x: Array, owner: str, tokens: Array) -> None:
        checked_like_query(name, x, self.query)
        width = tokens.shape[-1]
        if x.ndim not in (2, 3) or x.shape[-1] != width or x.shape[-2] % 2 == 0:
            raise ValueError(
                f"{name}: expected (2 D + 1, {width}) or (heads, 2 D + 1, {width}), got {x.shape}"
            )
        heads = tokens.shape[-3] if tokens.ndim > 2 else 1
        if x.ndim == 3 and (tokens.ndim < 3 or x.shape[0] not in (1, heads)):
            raise ValueError(f"{name}: expected {owner}'s number of heads, {heads}, got {x.shape}")

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading axes of the result."""
        shapes = [x.shape[:-2] for x in (self.query, self.key, self.value)]
        if self.options.get("enable_gqa") and shapes[0]:
            shapes[1:] = [(*s[:-1], 1) for s in shapes[1:]]
        return broadcast_shapes(*shapes)

    def parts(self) -> Iterator[tuple[int | None, int, int]]:
        """The visible parts: (row of rel_key, or None for the band; least and largest distance)."""
        left, right = _arguments.window("window", self.options.get("window"))
        low, high = 1 - self.n_q - self.offset, self.n_k - 1 - self.offset
        low = low if left is None else max(low, -left)
        high = high if right is None else min(high, right)
        if self.options.get("is_causal"):
            high = min(high, 0)
        d = self.farthest
        parts: list[tuple[int | None, int, int]] = [(None, low, high)]
        if self.n_k > _BLOCK_ROWS + 2 * d:  # else a block's band holds nearly all keys
            parts = [(0, low, -d), (None, 1 - d, d - 1), (2 * d, max(d, 1), high)]
        for row, a, b in parts:
            a, b = max(a, low), min(b, high)
            if a <= b:
                yield row, a, b

    def far_part(self, row: int, a: int, b: int) -> FarPart:
        """The part whose distances are a to b, which share one relative row."""
        key, value = widen(self.key) + widen(self.rel_key)[..., row, None, :], widen(self.value)
        if self.rel_value is not None:
            value = value + widen(self.rel_value)[..., row, None, :]
        # A window includes its own diagonal, so the diagonal moves to the distance nearest to 0.
        diagonal = min(max(a, 0), b)
        options = self.options | {
            "scale": self.scale,
            "attn_mask": self.mask,
            "is_causal": False,
            "window": (diagonal - a, b - diagonal),
            "query_offset": self.offset + diagonal,
            "sinks": None,  # they are added where the parts are merged
            "rng": self.seed,
        }
        lse_shift = 0.0 if self.slopes is None else self.alibi(np.array([diagonal]))[..., 0]
        return FarPart(key, value, options, lse_shift)

    def blocks(self, a: int, b: int) -> Iterator[Block]:
        """The band of distances a to b, in blocks of queries and the keys that they meet there."""
        width = min(self.n_k, b - a + _BLOCK_ROWS)
        rows = _BLOCK_ELEMENTS // max(1, math.prod(self.lead) * width)
        rows = min(_BLOCK_ROWS, max(16, rows))
        for start in range(0, self.n_q, rows):
            stop = min(start + rows, self.n_q)
            first = max(0, start + self.offset + a)
            last = min(self.n_k, stop + self.offset + b)
            if first < last:
                yield Block(self, a, b, slice(start, stop), slice(first, last))

    def for_query_heads(self, x: Array) -> Array:
        """Rows of keys, of values or of their relative vectors for every query head."""
        if not self.options.get("enable_gqa") or self.query.ndim < 3:
            return x
        return cast(Array, repeat_heads(x, self.query.shape[-3]))


class FarPart(NamedTuple):
    """Operands and options of attention over distances that share one relative row."""

    key: Array
    value: Array
    options: dict[str, Any]
    # The kernel measures ALiBi from the part's diagonal. This is the rest: (..., heads, 1) or 0.
    lse_shift: Array | float


class Block:
    """A block of queries of the band, and the keys that they meet there.

    An array (..., rows, relative) has a column for each row of rel_key that is needed, an array
    (..., rows, keys) one for each key: the relative row of a pair is its distance, clipped. Between
    the two is a buffer with a column per distance, in which each query's keys begin one column to
    the left of those of the query before it.
    """

    def __init__(self, problem: Problem, a: int, b: int, rows: slice, keys: slice) -> None:
        self.problem, self.rows, self.keys = problem, rows, keys
        self.n_rows, self.n_keys = rows.stop - rows.start, keys.stop - keys.start
        # Buffer column m holds distance m - zero.
        zero = self.n_rows - 1 - keys.start + rows.start + problem.offset
        low, high = max(a, -zero), min(b, self.n_rows + self.n_keys - 2 - zero)
        self.columns = slice(low + zero, high + zero + 1)
        farthest = problem.farthest
        relative = np.arange(low, high + 1).clip(-farthest, farthest) + farthest
        self.rel_rows = slice(int(relative[0]), int(relative[-1]) + 1)
        # The first column of each relative row, if some serve more than one distance.
        starts = np.flatnonzero(np.diff(relative, prepend=-1))
        self.starts = starts if len(starts) < len(relative) else None
        self.relative = relative - relative[0]
        self.query = widen(problem.query[..., rows, :])
        self.key = widen(problem.key[..., keys, :])
        self.value = widen(problem.value[..., keys, :])
        self.rel_key, self.rel_value = (
            None if rel is None else problem.for_query_heads(widen(rel[..., self.rel_rows, :]))
            for rel in (problem.rel_key, problem.rel_value)
        )
        scores = self.query @ np.swapaxes(cast(Array, self.rel_key), -1, -2)
        self.relative_scores = self._to_keys(scores * scores.dtype.type(problem.scale), -np.inf)
        distances = (
            np.arange(self.n_keys) - np.arange(self.n_rows)[:, None] - zero + self.n_rows - 1
        )
        self.bias = self._bias(distances)
        self.options = dict(problem.block_options)
        lengths = self.options.get("key_lengths")
        if lengths is not None:
            self.options["key_lengths"] = np.clip(lengths - keys.start, 0, self.n_keys)

    def _bias(self, distances: Array) -> Array:
        """The bias of the scores of query and key: relative rows, ALiBi and mask."""
        bias = self.relative_scores
        if changes_scores(self.problem.options):
            # The option applies to the sum with the relative scores, so `_logits` adds them.
            bias = np.where(bias == -np.inf, bias, bias.dtype.type(0))
        if self.problem.slopes is not None:
            bias = _plus(bias, self.problem.alibi(distances))
        if self.problem.mask is None:
            return bias
        mask = self.problem.mask[self.mask_index]
        if mask.dtype == bool:
            return np.where(mask, bias, bias.dtype.type(-np.inf))
        return _plus(bias, mask)

    @property
    def mask_index(self) -> tuple[Any, ...]:
        """The index of this block in the mask, where one row or column serves for all."""
        shape = cast(Array, self.problem.mask).shape[-2:]
        own = (self.rows, self.keys)[2 - len(shape) :]
        return (..., *(slice(None) if n == 1 else s for n, s in zip(shape, own, strict=True)))

    def _shifted(self, buffer: Array, *, writeable: bool = False) -> Array:
        *lead, by_row, step = buffer.strides
        return np.lib.stride_tricks.as_strided(
            buffer[..., self.n_rows - 1 :],
            (*buffer.shape[:-1], self.n_keys),
            (*lead, by_row - step, step),
            writeable=writeable,
        )

    def _to_keys(self, x: Array, fill: float) -> Array:
        """(..., rows, relative) -> (..., rows, keys), `fill` at distances outside the band."""
        buffer = np.full((*x.shape[:-1], self.n_rows + self.n_keys - 1), fill, x.dtype)
        buffer[..., self.columns] = x if self.starts is None else x[..., self.relative]
        return self._shifted(buffer)

    def _to_relative(self, x: Array) -> Array:
        """(..., rows, keys) -> (..., rows, relative): the transpose of `_to_keys`, a sum."""
        buffer = np.zeros((*x.shape[:-1], self.n_rows + self.n_keys - 1), x.dtype)
        self._shifted(buffer, writeable=True)[...] = x
        of_distances = buffer[..., self.columns]
        if self.starts is None:
            return of_distances
        summed: Array = np.add.reduceat(of_distances, self.starts, axis=-1)
        return summed

    @_warnings.silenced()  # its mask is composed
    def _logits(self) -> tuple[Array, Array | None]:
        """Logits (..., rows, keys), and the slope of `changed_scores`; None means 1."""
        query = np.broadcast_to(self.query, (*self.problem.lead, *self.query.shape[-2:]))
        if not changes_scores(self.problem.options):
            x = _core.attention_weights(
                query, self.key, attn_mask=self.bias, stage="biased", **self.options
            )
            return x, None
        # With queries of width 0 the kernel returns the bias and its masks alone.
        bias = _core.attention_weights(
            query[..., :0],
            self.key[..., :0],
            attn_mask=self.bias,
            stage="biased",
            **self.options,
        )
        scores = query @ np.swapaxes(self.problem.for_query_heads(self.key), -1, -2)
        scores = bias.dtype.type(self.problem.scale) * scores + self.relative_scores
        changed, slope = changed_scores(scores, self.problem.options)
        return np.where(bias == -np.inf, bias, changed + bias), slope

    @functools.cached_property
    def _factors(self) -> Array:
        """Dropout's factors of the weights, (..., rows, keys)."""
        problem, first = self.problem, (self.rows.start, self.keys.start)
        shape = (*problem.lead, self.n_rows, self.n_keys)
        return dropout_factors(shape, problem.dropout_p, problem.seed or 0, first, self.query.dtype)

    def weights(self, lse: Array) -> Array:
        """exp(scores - lse), (..., rows, keys)."""
        return _exponential(self._logits()[0], lse)

    @_warnings.silenced()
    def forward(self) -> _core.AttentionForward:
        """Attention of these queries to these keys alone."""
        if self.problem.is_plain:
            part = _core.attention_forward(
                self.query, self.key, self.value, self.bias, **self.options, lse_dtype=np.float64
            )
            if self.rel_value is None:
                return part
            weights = _core.softmax(self._logits()[0])
            out = part.out
        else:
            logits = self._logits()[0]
            part = _core.AttentionForward(logits, _core.logsumexp(logits.astype(np.float64)))
            weights = _core.softmax(logits) * self._factors
            out = product_skipping_zeros(weights, self.problem.for_query_heads(self.value))
        if self.rel_value is not None:
            out = out + product_skipping_zeros(self._to_relative(weights), self.rel_value)
        return _core.AttentionForward(out, part.lse)

    def backward(self, upstream: Upstream, needs: tuple[str, ...]) -> dict[str, Array]:
        """The share of each gradient that comes from these pairs."""
        by_block = self._by_kernel if self.problem.is_plain else self._by_pairs
        grads, by_scores = by_block(upstream, needs)
        by_relative = self._to_relative(by_scores) * by_scores.dtype.type(self.problem.scale)
        if "query" in needs:
            through = product_skipping_zeros(by_relative, cast(Array, self.rel_key))
            grads["query"] = grads["query"] + sum_to(through, self.query.shape)
        if "rel_key" in needs:
            grads["rel_key"] = _rows_gradient(by_relative, self.query, self.problem.rel_key)
        return grads

    def _by_kernel(
        self, upstream: Upstream, needs: tuple[str, ...]
    ) -> tuple[dict[str, Array], Array]:
        """Gradients without the share of rel_key in the scores, and the gradient of the scores."""
        inner = {name.removeprefix("rel_") for name in needs} - {"sinks", "attn_mask"}
        operands, options = (self.query, self.key, self.value), {"attn_mask": self.bias}
        g = composed_backward(upstream, operands, (*inner, "attn_mask"), options | self.options)
        grads: dict[str, Array] = {n: x for n, x in g._asdict().items() if x is not None}
        if self.rel_value is not None:
            weights = self.weights(upstream.lse)
            if "rel_value" in needs:
                rel_value = cast(Array, self.problem.rel_value)
                by_row = self._to_relative(weights)
                grads["rel_value"] = _rows_gradient(by_row, upstream.grad_out, rel_value)
            # The kernel knows <grad_out, value> of each pair; <grad_out, rel_value> is added here.
            products = upstream.grad_out @ np.swapaxes(self.rel_value, -1, -2)
            more = weights * self._to_keys(products, 0)
            if not np.isfinite(products).all():
                np.copyto(more, 0, where=weights == 0)
            grads["attn_mask"] = grads["attn_mask"] + sum_to(more, self.bias.shape)
            for name, x in zip(("query", "key"), self._through_scores(more), strict=True):
                if name in grads:
                    grads[name] = grads[name] + sum_to(x, grads[name].shape)
        return grads, grads["attn_mask"]

    def _by_pairs(
        self, upstream: Upstream, needs: tuple[str, ...]
    ) -> tuple[dict[str, Array], Array]:
        """The result of `_by_kernel`, written out for the options that the kernel cannot apply."""
        grad_out, out, lse, grad_lse = upstream
        logits, slope = self._logits()
        weights = _exponential(logits, lse)
        products = grad_out @ np.swapaxes(self.problem.for_query_heads(self.value), -1, -2)
        if self.rel_value is not None:
            products = products + self._to_keys(grad_out @ np.swapaxes(self.rel_value, -1, -2), 0)
        delta = np.einsum("...i,...i->...", grad_out, out)
        if grad_lse is not None:
            delta = delta - grad_lse
        grad = weights * (self._factors * products - delta[..., None])
        # Masked pairs may hold NaN.
        np.copyto(grad, 0, where=weights == 0)
        kept = weights * self._factors
        grads = {"attn_mask": grad}
        if "value" in needs:
            grads["value"] = self._through_keys(kept, grad_out, self.value)
        if self.rel_value is not None and "rel_value" in needs:
            rel_value = cast(Array, self.problem.rel_value)
            grads["rel_value"] = _rows_gradient(self._to_relative(kept), grad_out, rel_value)
        if slope is not None:
            grad = np.where(grad == 0, grad, grad * slope)
        for name, x in zip(("query", "key"), self._through_scores(grad), strict=True):
            if name in needs:
                grads[name] = sum_to(x, getattr(self, name).shape)
        return grads, grad

    def _through_scores(self, grad: Array) -> tuple[Array, Array]:
        """From the gradient of scale query key^T, (..., heads, rows, keys), to query and key."""
        grad = grad * grad.dtype.type(self.problem.scale)
        by_query = product_skipping_zeros(grad, self.problem.for_query_heads(self.key))
        return by_query, self._through_keys(grad, self.query, self.key)

    def _through_keys(self, x: Array, y: Array, like: Array) -> Array:
        """x^T y, of (..., heads, rows, keys) and rows of queries, summed to the heads of `like`."""
        y = np.broadcast_to(y, (*x.shape[:-1], y.shape[-1]))
        if self.problem.options.get("enable_gqa") and like.ndim > 2:
            # One long axis of the queries of all heads that share a key head.
            heads = like.shape[-3]
            lead = (*x.shape[:-3], heads, x.shape[-3] // max(heads, 1) * self.n_rows)
            x, y = (z.reshape(*lead, z.shape[-1]) for z in (x, y))
        return product_skipping_zeros(np.swapaxes(x, -1, -2), y)


def _plus(bias: Array, more: Array) -> Array:
    """The sum of two biases, -inf where either hides a pair, whatever the other holds there."""
    hidden = (bias == -np.inf) | (more == -np.inf)
    return np.where(hidden, bias.dtype.type(-np.inf), bias + more)


def _exponential(logits: Array, lse: Array) -> Array:
    """exp(logits - lse), 0 at masked pairs even if lse is NaN; in the memory of logits."""
    np.subtract(logits, lse[..., None], out=logits, where=logits != -np.inf)
    return np.exp(logits, out=logits)


def forward(problem: Problem) -> _core.AttentionForward:
    """out in query's dtype, and lse."""
    out, lse = _merged(problem)
    return _core.AttentionForward(cast(Array, rounded(out, problem.query)), lse.astype(out.dtype))


def unrounded(problem: Problem, upstream: Upstream) -> Upstream:
    """The rows with out in the compute type, computed again where it was rounded to 16 bits.

    A part holds too few of the weights to take <grad_out, out> from them.
    """
    narrow = is_narrow(upstream.out.dtype)
    return upstream._replace(out=_merged(problem).out) if narrow else upstream


def _merged(problem: Problem) -> _core.AttentionForward:
    """The parts, merged: out in the compute type, lse in float64.

    The weights of parts are exponentials of lse: digits that it loses are theirs.
    """
    query, value, lead = widen(problem.query), widen(problem.value), problem.lead
    # Attention to no key, or to the sinks alone; the parts are merged into it.
    out = np.zeros((*lead, problem.n_q, value.shape[-1]), native(query.dtype))
    lse = np.full(out.shape[:-1], -np.inf, np.float64)
    sinks = problem.options.get("sinks")
    if sinks is not None:
        lse[...] = np.broadcast_to(sinks, lead or (1,)).reshape(*lead, 1)
    for row, a, b in problem.parts():
        if row is not None:
            far = problem.far_part(row, a, b)
            part = _core.attention_forward(
                query, far.key, far.value, **far.options, lse_dtype=np.float64
            )
            part = part._replace(lse=part.lse + far.lse_shift)
        else:
            part = _core.AttentionForward(np.zeros_like(out), np.full_like(lse, -np.inf))
            for block in problem.blocks(a, b):
                part.out[..., block.rows, :], part.lse[..., block.rows] = block.forward()
        out, lse = _core.merge_attention((out, part.out), (lse, part.lse))
    return _core.AttentionForward(out, lse)


class Backward:
    """Gradients of <grad_out, out> + <grad_lse, lse>, added up over the parts."""

    def __init__(self, problem: Problem, needs: tuple[str, ...], upstream: Upstream) -> None:
        self.problem, self.needs, self.upstream = problem, needs, upstream
        given, dtype = vars(problem) | problem.options, native(upstream.lse.dtype)
        self.arguments: dict[str, Array] = {name: given[name] for name in needs}
        self.total = {name: np.zeros(x.shape, dtype) for name, x in self.arguments.items()}

    def result(self) -> dict[str, Array | None]:
        """Each gradient in the shape and dtype of its argument."""
        for row, a, b in self.problem.parts():
            if row is not None:
                self._add_far_part(row, a, b)
            else:
                for block in self.problem.blocks(a, b):
                    self._add_block(block)
        if "sinks" in self.needs:
            self._add_sinks()
        return {name: rounded(x, self.arguments[name]) for name, x in self.total.items()}

    def _add_far_part(self, row: int, a: int, b: int) -> None:
        far = self.problem.far_part(row, a, b)
        # The gradients of keys and values give those of the relative rows, too.
        inner = {name.removeprefix("rel_") for name in self.needs} - {"sinks"}
        upstream = self.upstream._replace(lse=self.upstream.lse - far.lse_shift)
        operands = (widen(self.problem.query), far.key, far.value)
        g = composed_backward(upstream, operands, inner, far.options)
        for name in self.needs:
            if name.startswith("rel_"):
                tokens = cast(Array, getattr(g, name.removeprefix("rel_")))
                by_row = _sum_to_rel(tokens.sum(axis=-2, keepdims=True), self.arguments[name])
                self.total[name][..., row, None, :] += by_row
            elif name != "sinks":
                self.total[name] += cast(Array, getattr(g, name))

    def _add_block(self, block: Block) -> None:
        rows, keys = (..., block.rows, slice(None)), (..., block.keys, slice(None))
        rel = (..., block.rel_rows, slice(None))
        index = {"query": rows, "key": keys, "value": keys, "rel_key": rel, "rel_value": rel}
        if self.problem.mask is not None:
            index["attn_mask"] = block.mask_index
        grads = block.backward(self.upstream.block(block.rows), self.needs)
        for name in self.needs:
            if name != "sinks":
                total = self.total[name][index[name]]
                total += sum_to(grads[name], total.shape)

    def _add_sinks(self) -> None:
        """A sink is a key without a value: its weight times -<grad_out, out> + grad_lse."""
        grad_out, out, lse, grad_lse = self.upstream
        lead = lse.shape[:-1] or (1,)
        logits = np.broadcast_to(self.arguments["sinks"], lead).astype(lse.dtype)[..., None]
        weight = np.where(logits == -np.inf, 0, np.exp(logits - lse))
        slope = -np.einsum("...i,...i->...", grad_out, out)
        if grad_lse is not None:
            slope = slope + grad_lse
        total = self.total["sinks"]
        total += sum_to((weight * slope).sum(axis=-1), total.shape)


def _rows_gradient(x: Array, y: Array, rel: Array) -> Array:
    """x^T y, of (..., rows, distances) and (..., rows, d), for these distances' rows of `rel`."""
    heads = broadcast_shapes(x.shape[:-2], y.shape[:-2])[-1:] if rel.ndim == 3 else ()
    grad = weight_gradient(y, x, (*heads, y.shape[-1], x.shape[-1]))
    return _sum_to_rel(np.swapaxes(grad, -1, -2), rel)


def _sum_to_rel(grad: Array, rel: Array) -> Array:
    """A gradient of rows for every query or key head, summed to the heads of `rel`."""
    if rel.ndim == 3 and grad.ndim > 2 and grad.shape[-3] != rel.shape[0]:
        grad = sum_heads(grad, rel.shape[0])
    return sum_to(grad, (*rel.shape[:-2], *grad.shape[-2:]))
