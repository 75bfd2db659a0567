"""Gradients of 16-bit types are those of exact arithmetic, rounded once.

Values have mean 64, so that dS = P (dP - delta) is a small difference of large numbers. With
delta = rowsum(dO O) from an O that was rounded to 16 bits it would be lost: off by a tenth in
float16, by all of it in bfloat16.
"""

from functools import partial

import numpy as np
import pytest
from support.helpers import BFLOAT16, normal, unit_roundoff

import sdpa
from sdpa import bias, blocks

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
DROPOUT = {"dropout_p": 0.25, "rng": 7}
# The first keys of a row, whose maximum is kept, lie far below its last.
FALLING = {"is_causal": "lower_right", "alibi_slopes": np.float32(1.3)}


def _operands(rng, dtype, n_q, n_k):
    shapes = {
        "grad_out": (2, 4, n_q, 24), "query": (2, 4, n_q, 16), "key": (2, 2, n_k, 16),
        "value": (2, 2, n_k, 24),
    }  # fmt: skip
    x = {name: normal(rng, shape, F32) for name, shape in shapes.items()}
    x["value"] += 64
    return {name: a.astype(dtype) for name, a in x.items()}


def _attention(x, **options):
    """attention_backward, whose out is of query's dtype."""
    x = dict(x)
    grad_out = x.pop("grad_out")
    out, lse = sdpa.attention_forward(**x, enable_gqa=True, **options)
    return sdpa.attention_backward(
        grad_out, *x.values(), out, lse, enable_gqa=True, **options
    )._asdict()


def _additive(x, draws, **options):
    w = normal(draws, (16, 12), x["query"].dtype), normal(draws, (16, 12), x["query"].dtype)
    w_score = normal(draws, (12,), x["query"].dtype)
    whole = {name: a for name, a in x.items() if name != "grad_out"}
    whole |= {name: np.repeat(whole[name], 2, axis=1) for name in ("key", "value")}
    out, lse = sdpa.additive_attention_forward(*whole.values(), *w, w_score, **options)
    return sdpa.additive_attention_backward(
        x["grad_out"], *whole.values(), *w, w_score, None, out, lse, **options
    )._asdict()


def _bilinear(x, draws, **options):
    weight = normal(draws, (16, 16), x["query"].dtype, 0.25)
    arguments = (x["query"], x["key"], x["value"], weight)
    options |= {"enable_gqa": True}
    saved = sdpa.bilinear_attention_forward(*arguments, **options)
    return sdpa.bilinear_attention_backward(x["grad_out"], *arguments, *saved, **options)._asdict()


def _cosine(x, draws, **options):
    arguments = (x["query"], x["key"], x["value"])
    options |= {"enable_gqa": True, "temperature": 0.5}
    saved = sdpa.cosine_attention_forward(*arguments, **options)
    return sdpa.cosine_attention_backward(x["grad_out"], *arguments, *saved, **options)._asdict()


def _shaw(x, draws, **options):
    rel = [normal(draws, (9, d), x["query"].dtype) for d in (16, 24)]
    arguments = (x["query"], x["key"], x["value"], *rel)
    options |= {"enable_gqa": True}
    saved = sdpa.shaw_attention_forward(*arguments, **options)
    return sdpa.shaw_attention_backward(x["grad_out"], *arguments, *saved, **options)._asdict()


def _t5(x, draws):
    table = normal(draws, (32, 4), x["query"].dtype)
    arguments = (x["query"], x["key"], x["value"])
    n_q, n_k = x["query"].shape[-2], x["key"].shape[-2]
    mask = bias.t5_relative(table, n_q, n_k)
    saved = sdpa.attention_forward(*arguments, mask, enable_gqa=True)
    return bias.t5_attention_backward(
        x["grad_out"], *arguments, table, *saved, enable_gqa=True
    )._asdict()


def _blocks(x, draws, **options):
    """One call for queries, and one for each of two parts of the keys."""
    options |= {"enable_gqa": True, "block": 40}
    arguments = (x["query"], x["key"], x["value"])
    saved = blocks.attend(*arguments, **options)
    backward = partial(blocks.attend_backward, x["grad_out"], *arguments, *saved, **options)
    parts = [
        backward(needs=("key", "value"), columns=columns)
        for columns in (slice(0, 50), slice(50, None))
    ]
    return {"query": backward(needs=("query",)).query} | {
        name: np.concatenate([getattr(part, name) for part in parts], axis=-2)
        for name in ("key", "value")
    }


def _unrounded(x, draws, **options):
    """With an out that attend did not round."""
    arguments = (x["query"], x["key"], x["value"])
    wide = np.promote_types(x["query"].dtype, F32) if x["query"].dtype != BFLOAT16 else F32
    options |= {"enable_gqa": True, "block": 40}
    saved = blocks.attend(*arguments, out=np.empty(x["grad_out"].shape, wide), **options)
    assert saved.out.dtype == wide
    return blocks.attend_backward(x["grad_out"], *arguments, *saved, **options)._asdict()


FUNCTIONS = {
    "attention": lambda x, draws: _attention(x),
    "dropout": lambda x, draws: _attention(x, **DROPOUT),
    "dropout, causal": lambda x, draws: _attention(x, is_causal="lower_right", **DROPOUT),
    "alibi": lambda x, draws: _attention(x, **FALLING),
    "additive": _additive,
    "additive, dropout": partial(_additive, **DROPOUT),
    "bilinear": _bilinear,
    "bilinear, dropout": partial(_bilinear, **DROPOUT),
    "cosine": _cosine,
    "shaw": _shaw,
    "shaw, softcap": partial(_shaw, softcap=5.0),
    "shaw, dropout": partial(_shaw, **DROPOUT),
    "t5": _t5,
    "blocks": _blocks,
    "blocks, window": partial(_blocks, window=(30, 10)),
    "blocks, unrounded": _unrounded,
}


@pytest.mark.parametrize("dtype", [F16, BFLOAT16], ids=["f16", "bf16"])
@pytest.mark.parametrize(("n_q", "n_k"), [(1, 100), (3, 100), (100, 120), (60, 300)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_rounded_once(isa, name, n_q, n_k, dtype, rng):
    """The root mean square of the errors is at most that of one rounding.

    Rounding moves each element by at most u of itself, and by half of that on average, which leaves
    as much again for float32's own errors.
    """
    x = _operands(rng, dtype, n_q, n_k)
    seed = rng.integers(1 << 32)
    found = FUNCTIONS[name](x, Rounded(seed, dtype))
    exact = FUNCTIONS[name](
        {name: a.astype(np.float64) for name, a in x.items()}, Rounded(seed, dtype)
    )
    for gradient, expected in exact.items():
        if expected is None or gradient == "temperature":
            continue
        assert found[gradient].dtype == dtype
        error = np.linalg.norm(found[gradient].astype(np.float64) - expected)
        assert error <= unit_roundoff(dtype) * np.linalg.norm(expected), gradient


class Rounded:
    """Draws that both calls have in common: rounded to the narrow dtype, whatever is asked for."""

    def __init__(self, seed, dtype):
        self.rng, self.dtype = np.random.default_rng(seed), dtype

    def standard_normal(self, shape):
        return self.rng.standard_normal(shape).astype(self.dtype).astype(np.float64)


def _large_scores(rng, dtype, n_q, n_k):
    """Operands and a mask of -size, beside which the scores, near size, leave a small lse.

    float32's scores are then off by about sqrt(64) 2^-24 size, which is u.
    """
    size = unit_roundoff(dtype) * 2.0**21
    x = {
        name: normal(rng, (2, n, d), F32)
        for name, n, d in [
            ("grad_out", n_q, 24), ("query", n_q, 64), ("key", n_k, 64), ("value", n_k, 24),
        ]
    }  # fmt: skip
    x["query"][..., 0] = size**0.5
    x["key"][..., 0] = np.float32(8 * size**0.5).astype(dtype)
    x["value"] += 64
    x = {name: a.astype(dtype) for name, a in x.items()}
    mask = np.full((n_q, n_k), -np.float64(x["query"][0, 0, 0]) * x["key"][0, 0, 0] / 8, F32)
    return x, mask, size


@pytest.mark.parametrize("dtype", [F16, BFLOAT16], ids=["f16", "bf16"])
@pytest.mark.parametrize(("n_q", "n_k"), [(4, 120), (100, 20), (100, 120), (100, 1100)])
def test_of_large_scores(isa, n_q, n_k, dtype, rng):
    """As good as float32's, rounded once, although the weights of a row do not sum to 1.

    The scores are not those of the forward, whose sums are in another order. What keys have in
    common makes dQ a small difference again, unless dS sums to 0.
    """
    x, mask, _ = _large_scores(rng, dtype, n_q, n_k)
    found, wide, exact = (
        _attention({name: a.astype(t) for name, a in x.items()}, attn_mask=mask.astype(m))
        for t, m in [(dtype, F32), (F32, F32), (np.float64, np.float64)]
    )
    for name in ("query", "key", "value"):
        error, own = (
            np.linalg.norm(g[name].astype(np.float64) - exact[name]) for g in (found, wide)
        )
        assert error <= unit_roundoff(dtype) * np.linalg.norm(exact[name]) + own, name


@pytest.mark.parametrize("dtype", [F16, BFLOAT16], ids=["f16", "bf16"])
@pytest.mark.parametrize("n_k", [120, 1100])
def test_of_keys_with_little_weight_elsewhere(isa, n_k, dtype, rng):
    """Parts of rows that may pass for whole ones at large scores: a delta from their weights is
    taken only if out does not contradict, and both are off by no more than the rounding of out."""
    n_q, part = 100, slice(0, n_k - 16)
    x, mask, size = _large_scores(rng, dtype, n_q, n_k)
    mask[:, part.stop :] -= np.linspace(0, 16, n_q, dtype=F32)[:, None]
    grad_out, query, key, value = x.values()
    out, lse = sdpa.attention_forward(query, key, value, mask)
    found = sdpa.attention_backward(
        grad_out, query, key[:, part], value[:, part], out, lse, mask[None, :, part].repeat(2, 0),
        needs=("attn_mask",),
    ).attn_mask  # fmt: skip
    grad_out, query, key, value = (a.astype(np.float64) for a in x.values())
    mask = mask.astype(np.float64)
    weights = sdpa.attention_weights(query, key, attn_mask=mask)[..., part]
    exact = sdpa.attention_backward(
        grad_out, query, key, value, *sdpa.attention_forward(query, key, value, mask),
        mask[None].repeat(2, 0), needs=("attn_mask",),
    ).attn_mask[..., part]  # fmt: skip
    off = unit_roundoff(dtype) * abs(grad_out * out.astype(np.float64)).sum(-1, keepdims=True)
    rounding = 2 * unit_roundoff(F32) * 9 * size
    assert (abs(found - exact) <= 2 * off * weights + 2 * rounding * abs(exact)).all()
