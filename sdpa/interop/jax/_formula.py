"""Attention in jax.numpy, on the whole matrix, for derivatives that have no kernel."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sdpa import _arrays, _table
from sdpa._table import OPERANDS
from sdpa.interop.jax._functions import changed, differentiable, shown
from sdpa.interop.jax._primitives import (
    Named,
    Options,
    Shapes,
    lead_of,
    sum_to,
    with_suffix,
)

_MASKS = [name for name, option in _table.OPTIONS.items() if option.axes == "hqk"]


def _per_head(x: Any, dtype: Any) -> Any:
    return x.astype(dtype)[..., None, None]


def _places(cu_seqlens: Any, n: int) -> tuple[Any, Any]:
    """(sequence, place in it) of each row of packed sequences."""
    rows = jnp.arange(n)
    sequence = jnp.searchsorted(cu_seqlens, rows, side="right") - 1
    return sequence, rows - cu_seqlens[sequence]


def _pairs(named: Named, n_q: int, n_k: int) -> tuple[Any, Any, Any, Any]:
    """(j - i, offset, j < key_lengths, i and j in one sequence), for (..., Lq, Lk)."""
    offset, lengths = named.get("query_offset"), named.get("key_lengths")
    if "cu_seqlens_q" not in named:
        i, j, together = jnp.arange(n_q), jnp.arange(n_k), True
        offset, lengths = (x if x is None else x[..., None, None, None] for x in (offset, lengths))
    else:
        of_query, i = _places(named["cu_seqlens_q"], n_q)
        of_key, j = _places(named["cu_seqlens_k"], n_k)
        offset = None if offset is None else offset[of_query, None]
        lengths = None if lengths is None else lengths[of_key]
        together = of_query[:, None] == of_key
    return j - i[:, None], offset, True if lengths is None else j < lengths, together


def _in_use(x: Any, cu_seqlens: Any) -> Any:
    """x (..., L, d) with zeros in rows of padding, whatever it and its tangents hold there."""
    return jnp.where(jnp.arange(x.shape[-2])[:, None] < cu_seqlens[-1], x, 0)


def _seen(x: Any, visible: Any) -> Any:
    """x (..., Lk, d) with zeros in rows that no query sees: their weights of 0 would keep NaN."""
    return jnp.where(visible.any(-2)[..., None], x, 0)


def _limit(bound: int, offset: Any, n_q: int, n_k: int) -> Any:
    """bound + offset for comparisons with j - i, so limited to -Lq to Lk, without overflow."""
    if offset is None:
        return min(max(bound, -n_q), n_k)
    # The offsets at which it reaches its limits, of which some may not have the type of offsets.
    low, high, can = -n_q - bound, n_k - bound, np.iinfo(offset.dtype)
    if low > can.max or high < can.min:
        return -n_q if low > can.max else n_k
    if low >= can.min:
        return jnp.clip(offset, low, min(high, can.max)) - low - n_q
    return n_k - (high - jnp.clip(offset, can.min, high))


def _visible(named: Named, options: Options, n_q: int, n_k: int) -> Any:
    """The pairs that band and lengths let through, to be broadcast to (..., heads, Lq, Lk)."""
    distance, offset, there, together = _pairs(named, n_q, n_k)
    visible = jnp.full((1, 1), True) & there & together
    if options.has_lower:
        visible &= distance >= _limit(options.lower, offset, n_q, n_k)
    if options.has_upper:
        visible &= distance <= _limit(options.upper, offset, n_q, n_k)
    return visible


def _distances(named: Named, n_q: int, n_k: int) -> Any:
    """|j - (i + offset)|, of offsets that leave room for it in their type."""
    distance, offset, _, _ = _pairs(named, n_q, n_k)
    if offset is None:
        return abs(distance)
    most = np.iinfo(offset.dtype).max
    return abs(distance - jnp.clip(offset, n_k - most, most - n_q))


def _inputs(named: Named, shape: Any) -> dict[str, Any]:
    """batch, head, query and key of each pair, for (..., heads, Lq, Lk)."""
    *batch, heads, n_q, n_k = shape
    found = {"head": jnp.arange(heads)[:, None, None]}
    offset = named.get("query_offset")
    if "cu_seqlens_q" in named:
        sequence, i = _places(named["cu_seqlens_q"], n_q)
        j = _places(named["cu_seqlens_k"], n_k)[1]
        offset = 0 if offset is None else offset[sequence]
        return found | {"batch": sequence[:, None], "query": (i + offset)[:, None], "key": j}
    offset = 0 if offset is None else offset[..., None, None, None]
    number = jnp.arange(math.prod(batch)).reshape(batch)[..., None, None, None]
    positions = {"query": jnp.arange(n_q)[:, None] + offset, "key": jnp.arange(n_k)}
    return found | {"batch": number} | positions


def _weights(s: Any, visible: Any, sinks: Any) -> Any:
    """Softmax over the visible keys and the sink; 0 in rows that see nothing."""
    s = jnp.where(visible, s, -jnp.inf)
    m = s.max(-1, keepdims=True, initial=-jnp.inf)
    m = m if sinks is None else jnp.maximum(m, sinks)
    m = jax.lax.stop_gradient(jnp.where(jnp.isfinite(m), m, 0))
    p = jnp.where(visible, jnp.exp(s - m), 0)
    total = p.sum(-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sinks - m)
    return p / jnp.where(total == 0, 1, total)


def attention(named: Named, options: Options) -> Any:
    """Attention of named operands: out."""
    if options.dropout_p:
        raise NotImplementedError(
            "dropout_p: third derivatives and forward mode over forward mode are not available "
            "with dropout"
        )
    named = {name: jnp.asarray(x) for name, x in named.items()}  # constants are indexed, too
    q, k, v = (named[name] for name in OPERANDS)
    wide = jnp.float64 if q.dtype == np.float64 else jnp.float32
    dtype = q.dtype
    q, k, v = (x.swapaxes(-3, -2) if options.rows_first else x for x in (q, k, v))
    q, k, v = (x.astype(wide) for x in (q, k, v))
    is_packed = "cu_seqlens_q" in named
    if is_packed:
        q = _in_use(q, named["cu_seqlens_q"])
        k, v = (_in_use(x, named["cu_seqlens_k"]) for x in (k, v))
    n_heads = lead_of(named, options)[-1]  # query may have one, which is broadcast
    k, v = (_arrays.repeat_heads(x, n_heads, jnp.repeat) for x in (k, v))

    n_q, n_k = q.shape[-2], k.shape[-2]
    visible = _visible(named, options, n_q, n_k)
    biases = []
    for mask in (named[name] for name in _MASKS if name in named):
        if mask.dtype != bool:
            biases.append(mask.astype(wide))
        visible &= mask if mask.dtype == bool else biases[-1] != -jnp.inf
    inputs: dict[str, Any] = {}
    if options.functions:
        # Value may have axes of the batch that query and key lack.
        lead = np.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v)))
        inputs = _inputs(named, (*lead, n_q, n_k))
        visible = shown(options.functions, named, visible, **inputs)
    k, v = (_seen(x, visible) for x in (k, v))

    scale = _per_head(named["scale"], wide) if "scale" in named else options.scale
    s = scale * (q @ k.mT)
    if options.softcap:
        s = _arrays.softcapped(s, options.softcap, jnp.tanh)[0]
    if options.functions:
        s = changed(options.functions, named, visible, score=s, **inputs)
    if "alibi_slopes" in named:
        s -= _per_head(named["alibi_slopes"], wide) * _distances(named, n_q, n_k)
    for bias in biases:
        s += bias
    sinks = _per_head(named["sinks"], wide) if "sinks" in named else None
    out = (_weights(s, visible, sinks) @ v).astype(dtype)
    if is_packed:
        out = _in_use(out, named["cu_seqlens_q"])
    return out.swapaxes(-3, -2) if options.rows_first else out


def _expanded(named: Named, shapes: Shapes) -> tuple[Named, list[Named]]:
    """(the operands that move, two sets of tangents), all of one shape, zero where absent.

    A tangent or the gradient may have batch axes that its operand is broadcast over.
    """
    tangents = [with_suffix(named, suffix) for suffix in ("_t", "_u")]
    moved = {
        name: jnp.broadcast_to(named[name], jnp.broadcast_shapes(*all_shapes))
        for name in differentiable(named)
        if name in tangents[0] or name in tangents[1] or name in dict(shapes)
        for all_shapes in [
            [x.shape for x in (named[name], *(t[name] for t in tangents if name in t))]
            + [shape for other, shape in shapes if other == name]
        ]
    }
    full = [
        {n: jnp.broadcast_to(t.get(n, jnp.zeros((), x.dtype)), x.shape) for n, x in moved.items()}
        for t in tangents
    ]
    return moved, full


def second(named: Named, options: Options, shapes: Shapes) -> list[Any]:
    """The gradients of <grad_out, tangent of out>."""
    moved, (along, _) = _expanded(named, shapes)

    def product(x: Named) -> Any:
        out = attention(named | x, options)
        return (named["grad_out"].astype(out.dtype) * out).sum()

    found = jax.jvp(jax.grad(product), (moved,), (along,))[1]
    return [sum_to(found[name], shape) for name, shape in shapes]


def curvature(named: Named, options: Options, shapes: Shapes = ()) -> list[Any]:
    """The second derivative of out along both tangents."""
    moved, (first, other) = _expanded(named, shapes)

    def tangent(x: Named) -> Any:
        return jax.jvp(lambda x: attention(named | x, options), (x,), (first,))[1]

    return [jax.jvp(tangent, (moved,), (other,))[1]]
