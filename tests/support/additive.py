"""Additive attention against the oracle, within bounds derived from the arithmetic."""

from types import SimpleNamespace

import numpy as np
from support.bounds import AttentionBounds, Number, compute_type, finite, unit_roundoff
from support.helpers import (
    BFLOAT16,
    assert_same_bits,
    assert_within,
    named_alignment,
    native,
    normal,
)

import sdpa
from sdpa import reference
from sdpa.reference import additive, arrays

ARGUMENTS = ("query", "key", "value", "w_query", "w_key", "w_score", "bias", "attn_mask", "sinks")

# |error| of a tanh beyond that of its argument, in units of u; see src/kernels/additive.h.
TANH = 8
# Beyond it the exponential of a projection overflows, and projections are added directly.
LARGEST = {np.float32: 125 / 2 * np.log(2), np.float64: 1020 / 2 * np.log(2)}


def draw(rng, dtype, n_q, n_k, d_q, d_k, d_v, h, *, lead=(2,), std=1.0, bias=True):
    """Arguments whose projections have this standard deviation, by name."""
    shapes = {
        "query": (*lead, n_q, d_q),
        "key": (*lead, n_k, d_k),
        "value": (*lead, n_k, d_v),
        "w_query": (d_q, h),
        "w_key": (d_k, h),
        "w_score": (h,),
        "bias": (h,),
    }
    stds = {"w_query": std / max(d_q, 1) ** 0.5, "w_key": std / max(d_k, 1) ** 0.5, "bias": std}
    x = {name: normal(rng, s, dtype, stds.get(name, 1.0)) for name, s in shapes.items()}
    return x if bias else x | {"bias": None}


def _tanh_of_sums(q, k, w_query, w_key, bias, compute, u):
    """(t, its error, 1 - t^2), each (..., Lq, Lk, h): see `additive_bounds`."""
    u64 = unit_roundoff(np.float64)

    def projected(tokens, weight, bias=0):
        a = tokens @ weight + bias
        error = 2 * (weight.shape[0] + 3) * u64 * (abs(tokens) @ abs(weight) + abs(bias))
        return a, error, abs(a) > LARGEST[compute.type] * (1 - 1e-6)

    a, a_error, a_large = projected(q, w_query, bias)
    b, b_error, b_large = projected(k, w_key)
    a, a_error, a_large = (y[..., :, None, :] for y in (a, a_error, a_large))
    b, b_error, b_large = (y[..., None, :, :] for y in (b, b_error, b_large))
    direct = a_large | b_large
    shift = a_error + b_error + np.where(direct, 2 * u * (abs(a) + abs(b)), 0)
    flat = np.minimum(1, 4 * np.exp(-2 * np.maximum(abs(a + b) - shift, 0)))
    with np.errstate(over="ignore"):
        t, slope = np.tanh(a + b), np.cosh(a + b) ** -2.0
    t_error = np.minimum(flat * shift + TANH * u, 2)
    return t, t_error, slope


def _visible(shape, options):
    """The visible pairs among scores of this shape, (..., Lq, Lk)."""
    names = ("attn_mask", "is_causal", "key_lengths", "query_offset", "window")
    masks = {name: options[name] for name in names if name in options}
    zeros = np.zeros((*shape[:-1], 1)), np.zeros((shape[-1], 1))
    return reference.logits.logits_of(*zeros, **masks) != -np.inf


def additive_bounds(x, grad_out=None, *, grad_lse=None, scale=1.0, **options):
    """{result: largest error}, as `AttentionBounds`, for the arguments `x` by name.

    Additive attention is attention whose score matrix plays the query and the unit matrix the key
    (which allows a score Lk + 4 roundings more than there are). With projections a and b in
    float64, each off by at most da, db (d terms and, where the type's exponentials end, rounded),
    t = tanh(a + b) and s = t w:

    t      da + db, at most 4 exp(-2 (|a + b| - da - db)) of it where tanh is flat, and 8 u
    s      that times |w|, and (h + 4) u |t| |w|
    1-t^2  from t, and 3 u
    """
    gqa = options.get("enable_gqa", False)
    dtype = native(np.asarray(x["query"]).dtype)
    compute = compute_type(dtype)
    u = unit_roundoff(compute) + unit_roundoff(np.float64)
    q, k, _ = arrays.broadcast(*(finite(x[n]) for n in ARGUMENTS[:3]), enable_gqa=gqa)
    w_query, w_key, w, bias = (
        np.zeros(1) if x[n] is None else finite(x[n]) for n in ARGUMENTS[3:7]
    )
    t, t_error, slope = _tanh_of_sums(q, k, w_query, w_key, bias, compute, u)
    s = t @ w
    s_error = t_error @ abs(w) + (w.size + 4) * u * (abs(t) @ abs(w))

    visible = _visible(s.shape, options)
    pairs = AttentionBounds(
        np.where(visible, s, 0), np.eye(s.shape[-1]), x["value"], grad_out=grad_out,
        grad_lse=grad_lse, errors=(s_error, 0.0, 0.0, 0.0), scale=scale, dtype=dtype, **options,
    )  # fmt: skip
    bounds = SimpleNamespace(out=pairs.out, lse=pairs.lse)
    if grad_out is None:
        return bounds

    def number(size, error=0.0):
        return Number(abs(size), np.broadcast_to(error, np.shape(size)), u)

    ds = pairs._sloped(pairs._dz).times(abs(scale))
    ds = Number(*(np.where(visible, y, 0)[..., None] for y in (ds.size, ds.error)), u)
    slope = number(slope, (2 * abs(t) + t_error) * t_error + 3 * u)
    per_pair = (ds * slope) * number(w)

    def total(y, axis):
        y = y.sum(axis)
        return Number(y.size.squeeze(axis), y.error.squeeze(axis), u)

    by_a, by_b = total(per_pair, -2), total(per_pair, -3)
    grads = {
        "query": by_a @ number(w_query.T),
        "key": by_b @ number(w_key.T),
        "w_query": number(arrays.transpose(q)) @ by_a,
        "w_key": number(arrays.transpose(k)) @ by_b,
        "w_score": total(total(ds * number(t, t_error), -2), -2),
        "bias": total(by_a, -2),
    }
    for name, grad in grads.items():
        if x[name] is not None:
            setattr(bounds, name, grad.summed_to(np.shape(x[name])).rounded(dtype))
    bounds.value = pairs.value
    for name in ("attn_mask", "sinks"):
        if options.get(name) is not None and np.asarray(options[name]).dtype != bool:
            setattr(bounds, name, getattr(pairs, name))
    return bounds


def check_additive(x, grad_out=None, *, grad_lse=None, **options):
    """Forward and, where grad_out is given, backward against the oracle; returns the forward."""
    dtype = native(x["query"].dtype)
    options |= named_alignment(x["query"], options)
    bounds = additive_bounds(x, grad_out, grad_lse=grad_lse, **options)
    true = reference.additive_attention_forward(*x.values(), **options)
    got = sdpa.additive_attention_forward(*x.values(), **options)
    assert got.out.dtype == dtype
    assert got.lse.dtype == compute_type(dtype)
    assert_within(got.out, true.out, bounds.out, "out")
    assert_within(got.lse, true.lse, bounds.lse, "lse")
    assert_same_bits(sdpa.additive_attention(*x.values(), **options), got.out)
    if grad_out is None:
        return got
    of = x | {name: options.get(name) for name in ("attn_mask", "sinks")}
    if of["attn_mask"] is not None and of["attn_mask"].dtype == bool:
        of["attn_mask"] = None
    needs = tuple(name for name in ARGUMENTS if of[name] is not None)
    options |= {"needs": needs, "grad_lse": grad_lse}
    ours = sdpa.additive_attention_backward(grad_out, *x.values(), *got, **options)
    expected = reference.additive_attention_backward(grad_out, *x.values(), *true, **options)
    for name in ARGUMENTS:
        grad = getattr(ours, name)
        if name not in needs:
            assert grad is None
            continue
        assert grad.shape == of[name].shape, name
        assert grad.dtype == (BFLOAT16 if of[name].dtype == BFLOAT16 else native(of[name].dtype))
        assert_within(grad, getattr(expected, name), getattr(bounds, name), f"gradient of {name}")
    return got


def scores_of(x):
    """The scores of `x` in float64, (..., Lq, Lk)."""
    sums = additive.additive_sums(x["query"], x["key"], x["w_query"], x["w_key"], x["bias"])
    return np.tanh(sums) @ np.asarray(x["w_score"], np.float64)
