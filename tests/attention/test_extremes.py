"""Numbers at the ends of the range: weights, lse and gradients as near as their types allow.

A row's logits may be so large that lse, rounded to its type, holds no digit after the point; its
weights then follow from the logits themselves.
"""

import numpy as np
import pytest
from support.helpers import compute_type, normal, unit_roundoff

import sdpa
from sdpa import reference

SHAPES = [(5, 9), (1, 300), (40, 30), (70, 300), (130, 140)]


def in_range(dtype, *powers):
    """These powers of ten and nearly the largest number that has log2 units, both signs."""
    numbers = [*(10.0**p for p in powers), 0.69 * float(np.finfo(dtype).max)]
    return [sign * number for number in numbers for sign in (1, -1)]


def softmax_with_sink(z, sinks):
    """Weights of keys and of the sink, and lse, in float64; without cancellation."""
    if sinks is None:
        sinks = np.array(-np.inf)
    column = np.broadcast_to(np.float64(sinks)[..., None, None], (*z.shape[:-1], 1))
    z = np.concatenate([z, column], -1)
    m = z.max(-1, keepdims=True)
    e = np.exp(z - m)
    total = e.sum(-1, keepdims=True)
    return e[..., :-1] / total, e[..., -1] / total[..., 0], (m + np.log(total))[..., 0]


def logits_of(q, k, mask, dtype):
    """Logits as the arithmetic rounds them, in float64."""
    s = (np.float64(q) @ np.float64(k).swapaxes(-1, -2)) / np.sqrt(q.shape[-1])
    return s if mask is None else np.float64(s.astype(dtype) + mask.astype(dtype))


def check(q, k, v, g, *, attn_mask=None, sinks=None):
    dtype = compute_type(q.dtype)
    options = {"attn_mask": attn_mask, "sinks": sinks}
    with np.errstate(over="ignore"):
        z = logits_of(q, k, attn_mask, dtype)
    p, sunk, lse = softmax_with_sink(z, sinks)
    got = sdpa.attention_forward(q, k, v, **options)
    np.testing.assert_allclose(got.lse, lse, rtol=1e-6 if dtype == np.float32 else 1e-14)
    atol = 40 * unit_roundoff(dtype)
    weights = sdpa.attention_weights(q, k, **options)
    # Biased logits are rounded as such, which moves weights by a factor.
    rounding = 0 if attn_mask is None else 8 * unit_roundoff(dtype) * abs(z[np.isfinite(z)]).max()
    np.testing.assert_allclose(weights, p, rtol=rounding, atol=atol * 100)
    if attn_mask is not None:
        p = np.float64(weights)
        p /= p.sum(-1, keepdims=True)
    np.testing.assert_allclose(got.out, p @ v, rtol=0, atol=atol * 100)

    needs = ("query", "key", "value")
    needs += ("attn_mask",) * (attn_mask is not None) + ("sinks",) * (sinks is not None)
    ones = np.ones_like(got.lse)
    grads = sdpa.attention_backward(g, q, k, v, *got, **options, grad_lse=ones, needs=needs)
    # In float64, from lse's own definition: dS = P (dP - delta), delta = rowsum(P dP) - dlse.
    dp = np.float64(g) @ np.float64(v).swapaxes(-1, -2)
    delta = (p * dp).sum(-1, keepdims=True) - 1
    ds = p * (dp - delta)
    scale = 1 / np.sqrt(q.shape[-1])
    expected = {
        "query": scale * ds @ k,
        "key": scale * ds.swapaxes(-1, -2) @ q,
        "value": p.swapaxes(-1, -2) @ g,
        "attn_mask": ds.sum(0),
        "sinks": -(sunk[..., None] * delta).sum((-1, -2)),
    }
    for name in needs:
        x = expected[name]
        np.testing.assert_allclose(
            getattr(grads, name),
            x,
            rtol=0,
            atol=400 * unit_roundoff(dtype) * abs(x).max(),
            err_msg=name,
        )
    if sinks is not None:
        second = sdpa.attention_double_backward(
            None, None, None, g, q, k, v, *got, sinks=sinks, gg_sinks=np.ones_like(sinks)
        )
        assert all(np.isfinite(x).all() for x in second if x is not None)
        tangent = sdpa.attention_jvp(
            q, k, v, None, None, None, sinks=sinks, sinks_t=np.ones_like(sinks)
        )
        # d out / d sink = -P_sink out
        np.testing.assert_allclose(
            tangent.out_t, -sunk[..., None] * got.out, rtol=0, atol=100 * atol
        )
        parts = [
            sdpa.attention_forward(q, k[:, :4], v[:, :4], sinks=sinks),
            sdpa.attention_forward(q, k[:, 4:], v[:, 4:]),
        ]
        merged = sdpa.merge_attention(*zip(*parts, strict=True))
        np.testing.assert_allclose(merged.lse, lse, rtol=1e-6)
        np.testing.assert_allclose(merged.out, p @ v, rtol=0, atol=atol * 100)


def operands(rng, dtype, n_q, n_k):
    return [normal(rng, (2, n, 16), dtype) for n in (n_q, n_k, n_k, n_q)]


@pytest.mark.parametrize(("n_q", "n_k"), SHAPES)
@pytest.mark.usefixtures("isa")
def test_sinks(rng, compute_dtype, n_q, n_k):
    q, k, v, g = operands(rng, compute_dtype, n_q, n_k)
    for sink in in_range(compute_dtype, 4, 8, 10, 20, 30):
        check(q, k, v, g, sinks=np.full(2, sink, compute_dtype))


@pytest.mark.parametrize(("n_q", "n_k"), SHAPES)
@pytest.mark.usefixtures("isa")
def test_a_bias_over_whole_rows(rng, compute_dtype, n_q, n_k):
    q, k, v, g = operands(rng, compute_dtype, n_q, n_k)
    largest = float(np.finfo(compute_dtype).max)
    for bias in (*in_range(compute_dtype, 6, 10, 20), largest, -largest):
        check(q, k, v, g, attn_mask=np.full((n_q, n_k), bias, compute_dtype))
    half = np.zeros((n_q, n_k), compute_dtype)
    half[:, ::2] = np.finfo(compute_dtype).max
    check(q, k, v, g, attn_mask=half)


@pytest.mark.parametrize(("n_q", "n_k"), SHAPES)
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.usefixtures("isa")
def test_scores(rng, compute_dtype, n_q, n_k, with_sink):
    """Few bits, whose logits are exact: the rounding of a near tie would decide its weights."""
    q, k, v, g = operands(rng, compute_dtype, n_q, n_k)
    q, k = np.rint(64 * q) / 64, np.rint(64 * k) / 64
    for power in (20, 27, 33, 66, 99):
        size = compute_dtype.type(2.0**power)
        sinks = np.full(2, size, compute_dtype) if with_sink else None
        check(q * size, k, v, g, sinks=sinks)


@pytest.mark.usefixtures("isa")
def test_parts_of_rows_whose_lse_is_far(rng, compute_dtype):
    """A part of the keys beside which, by lse, others outweigh all of its own has weight 0."""
    q, k, v, g = operands(rng, compute_dtype, 9, 60)
    q *= compute_dtype.type(1e10)
    out, lse = sdpa.attention_forward(q, k, v)
    whole = sdpa.attention_backward(g, q, k, v, out, lse)
    parts = [
        sdpa.attention_backward(g, q, k[:, part], v[:, part], out, lse)
        for part in (slice(0, 20), slice(20, 60))
    ]
    key = np.concatenate([part.key for part in parts], axis=1)
    value = np.concatenate([part.value for part in parts], axis=1)
    u = 400 * unit_roundoff(compute_dtype)
    np.testing.assert_allclose(value, whole.value, rtol=0, atol=u * abs(whole.value).max())
    np.testing.assert_allclose(key, whole.key, rtol=0, atol=u * abs(q).max())


@pytest.mark.usefixtures("isa")
def test_rows_whose_lse_is_far_forget_the_call_before(rng, compute_dtype):
    """Whose maxima were greater: the weights of each row still add up to 1."""
    q, k, v, g = operands(rng, compute_dtype, 9, 60)
    far = compute_dtype.type(1e4 / np.finfo(compute_dtype).eps)
    for x in (abs(q) * far, -abs(q) * far):
        out, lse = sdpa.attention_forward(x, abs(k), v)
        grads = sdpa.attention_backward(g, x, abs(k), v, out, lse, workers=1)
        np.testing.assert_allclose(grads.value.sum(axis=-2), g.sum(axis=-2), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("isa")
def test_a_sink_above_a_logit_at_the_largest_number(rng, compute_dtype):
    """The keys' weights are 0, also that of a logit at which others would saturate."""
    q, k, v, g = operands(rng, compute_dtype, 8, 8)
    largest = np.finfo(compute_dtype).max
    mask = np.zeros((8, 8), compute_dtype)
    mask[:, 0] = largest / compute_dtype.type(1.2)
    options = {"attn_mask": mask, "sinks": np.full(2, largest / compute_dtype.type(1.05))}
    if compute_dtype == np.float64:  # sinks are taken in units of log2
        options = {n: x / 2 for n, x in options.items()}
    assert not sdpa.attention_weights(q, k, **options).any()
    assert not sdpa.attention_received(q, k, **options).total.any()
    assert not sdpa.attention_statistics(q, k, **options).max_weight.any()
    out, lse = sdpa.attention_forward(q, k, v, **options)
    assert not out.any()
    grads = sdpa.attention_backward(g, q, k, v, out, lse, **options)
    second = sdpa.attention_double_backward(q, k, v, g, q, k, v, out, lse, **options)
    assert not any(x.any() for x in (*grads[:3], *second[:4]))


def partly_masked(n_q, n_k, dtype):
    """Options under which some blocks of keys have masks or biases, and others have none."""
    seen = np.ones((n_q, n_k), bool)
    seen[:, n_k // 2 :: 3] = False
    return {
        "causal": {"is_causal": "lower_right"},
        "window": {"window": (n_k // 2, None)},
        "lengths": {"key_lengths": n_k - 1},
        "boolean": {"attn_mask": seen},
        "bias": {"attn_mask": np.where(seen, 0, -np.inf).astype(dtype)},
        "program": {"mask_mod": lambda b, h, q, k: (k < n_k // 2) | (k % 3 > 0)},
        "causal, sinks": {"is_causal": "upper_left", "sinks": np.zeros(2, dtype)},
        "causal, capped": {"is_causal": "upper_left", "softcap": 1e30},
    }


@pytest.mark.parametrize("name", partly_masked(2, 3, np.float32))
@pytest.mark.parametrize(("n_q", "n_k"), [(1, 3000), (5, 300), (40, 40), (60, 129), (130, 300)])
@pytest.mark.usefixtures("isa")
def test_equal_logits_weigh_the_same_in_all_blocks(rng, compute_dtype, n_q, n_k, name):
    """Large integers, so that many logits of a row are equal and all others are far from them."""
    options = partly_masked(n_q, n_k, compute_dtype)[name]
    q, k, v, g = (np.rint(3 * x) for x in operands(rng, compute_dtype, n_q, n_k))
    q, k = q[..., :1], k[..., :1]
    for power in (20, 30, 90):
        x = {"query": q * compute_dtype.type(2.0**power), "key": k, "scale": 0.3, **options}
        p = reference.attention_weights(**x)
        mean = p @ np.float64(v)
        atol = 100 * unit_roundoff(compute_dtype) * abs(mean).max()
        got = sdpa.attention_forward(value=v, **x)
        np.testing.assert_allclose(got.out, mean, rtol=0, atol=atol)
        np.testing.assert_allclose(sdpa.attention_weights(**x), p, rtol=0, atol=atol)
        total = sdpa.attention_received(**x).total
        np.testing.assert_allclose(total, p.sum(-2), rtol=0, atol=n_q * atol)
        rows = sdpa.attention_statistics(**x)
        np.testing.assert_allclose(rows.max_weight, p.max(-1), rtol=0, atol=atol)
        tangent = sdpa.attention_jvp(value=v, value_t=v, **x)
        np.testing.assert_allclose(tangent.out_t, mean, rtol=0, atol=atol)
        grads = sdpa.attention_backward(grad_out=g, value=v, out=got.out, lse=got.lse, **x)
        expected = p.swapaxes(-1, -2) @ np.float64(g)
        np.testing.assert_allclose(grads.value, expected, rtol=0, atol=10 * n_q * atol)


# -------------------------------------------------------------------------- beyond the range


@pytest.mark.usefixtures("isa")
def test_a_softcap_near_or_beyond_the_largest_number_is_none(rng, dtype):
    q, k = normal(rng, (2, 5, 8), dtype), normal(rng, (2, 7, 8), dtype)
    plain = sdpa.attention_weights(q, k)
    for cap in (1e37, 2.4e38, 3e38, 1e39, 1e308):
        np.testing.assert_allclose(
            np.float64(sdpa.attention_weights(q, k, softcap=cap)), np.float64(plain), rtol=1e-2
        )
    # The smallest caps leave nothing of the scores.
    np.testing.assert_allclose(
        np.float64(sdpa.attention_weights(q, k, softcap=1.2e-38, scale=1e3)), 1 / 7, rtol=1e-2
    )


@pytest.mark.parametrize("n_k", [400, 1300])
@pytest.mark.parametrize("lse_dtype", [np.float32, np.float64])
@pytest.mark.parametrize("window", [None, (60, 60)])
def test_hidden_keys_beside_rows_whose_lse_is_far(rng, n_k, lse_dtype, window):
    """Logits of 0 or 2^30, exact in both types; hidden: a block of keys, a part of one, a row."""
    q = np.full((150, 1), 2.0**15, np.float32)
    k = (rng.integers(0, 2, (n_k, 1)) * 2.0**15).astype(np.float32)
    v, g = (rng.standard_normal((n, 4)).astype(np.float32) for n in (n_k, 150))
    seen = np.ones((150, n_k), bool)
    seen[:, 128:256] = seen[:48, 256:384] = seen[100] = False
    options = {"attn_mask": seen, "scale": 1.0, "window": window}
    out, lse = sdpa.attention_forward(q, k, v, **options, lse_dtype=lse_dtype)
    found = sdpa.attention_backward(g, q, k, v, out, lse, **options)
    exact = [x.astype(np.float64) for x in (q, k, v)]
    saved = sdpa.attention_forward(*exact, **options)
    expected = sdpa.attention_backward(g.astype(np.float64), *exact, *saved, **options)
    for ours, true, size in zip(found[:3], expected[:3], (2.0**15, 2.0**15, 1), strict=True):
        np.testing.assert_allclose(ours, true, rtol=0, atol=1e-5 * size)


@pytest.mark.usefixtures("isa")
def test_second_derivative_of_a_sink_that_outweighs_its_keys(rng):
    """The sink's weight is 1 but for less than its rounding, which is all there is."""
    shapes = (7, 5), (9, 5), (9, 3), (7, 3)
    q, k, v, g = (abs(normal(rng, shape, np.float32)) for shape in shapes)  # nothing cancels
    sinks, scale = (np.array(x, np.float32) for x in (35, 0.5))
    options = {"sinks": sinks, "scale": scale}
    got = sdpa.attention_forward(q, k, v, **options)
    options |= {"grad_lse": np.ones_like(got.lse), "gg_scale": scale, "needs": ("sinks", "scale")}
    second = sdpa.attention_double_backward(None, None, None, g, q, k, v, *got, **options)
    exact = (np.float64(x) for x in (g, q, k, v, *got))
    expected = sdpa.reference.attention_double_backward(None, None, None, *exact, **options)
    assert 0 < abs(expected.sinks) < unit_roundoff(np.float32)
    rtol = 1000 * unit_roundoff(np.float32)
    np.testing.assert_allclose(second.sinks, expected.sinks, rtol=rtol)
    np.testing.assert_allclose(second.scale, expected.scale, rtol=rtol)


@pytest.mark.parametrize("program", [False, True])
@pytest.mark.parametrize("softcap", [0.7, 2.0, 3.0, 1e-34])
@pytest.mark.parametrize(("n_q", "n_k"), [(2, 3), (1, 200), (130, 140)])
@pytest.mark.usefixtures("isa")
def test_a_softcap_holds_scores_beyond_the_range(rng, compute_dtype, n_q, n_k, softcap, program):
    """Products that overflow, and those whose rounding error, too, is beyond the largest number."""
    large = compute_dtype.type(np.finfo(compute_dtype).max ** 0.6)
    q, v, g = (normal(rng, (n, 1), compute_dtype) for n in (n_q, n_k, n_q))
    sign = rng.choice([-1, 1], (n_k, 1)).astype(compute_dtype)
    options = {"softcap": softcap, "scale": 0.3}
    if program:
        options["score_mod"] = lambda score, b, h, q, k: 2 * score
    for size in (1, large):
        q, k = np.sign(q) * large, sign * size
        expected = softcap * np.sign(q) * sign.T
        np.testing.assert_allclose(
            sdpa.attention_weights(q, k, stage="capped", **options), expected, rtol=1e-5
        )
        p, _, lse = softmax_with_sink((2 if program else 1) * expected, None)
        got = sdpa.attention_forward(q, k, v, **options)
        np.testing.assert_allclose(got.lse, lse, rtol=1e-5)
        np.testing.assert_allclose(got.out, p @ v, rtol=0, atol=1e-4)
        grads = sdpa.attention_backward(g, q, k, v, *got, **options)
        assert not grads.query.any()
        assert not grads.key.any()
        np.testing.assert_allclose(grads.value, p.T @ g, rtol=0, atol=1e-4)
        assert not sdpa.attention_jvp(q, k, v, np.ones_like(q), **options).out_t.any()
