"""Cosine and bilinear attention: against the oracle in derived bounds, by hand, at the edges."""

import tracemalloc

import numpy as np
import pytest
from support.bounds import AttentionBounds, Number
from support.calls import F32, bilinear_operands, operands
from support.helpers import (
    LAYOUTS,
    assert_same_bits,
    assert_within,
    compute_type,
    normal,
    unit_roundoff,
)

import sdpa
from sdpa import _options, reference
from sdpa._table import options_of
from sdpa.reference import arrays
from sdpa.reference import scores as oracle

pytestmark = pytest.mark.usefixtures("isa")

# name: options, mask ("bool", "bias", None), leading axes of query and of key and value
CASES = {
    "plain": ({}, None, (2,), (2,)),
    "causal": ({"is_causal": True, "query_offset": 3}, None, (2,), (2,)),
    "window and lengths": ({"window": (9, 4), "key_lengths": 29}, None, (2,), (2,)),
    "bool": ({}, "bool", (2,), (2,)),
    "bias": ({}, "bias", (2,), (2,)),
    "grouped": ({"enable_gqa": True}, "bias", (2, 4), (2, 2)),
    "keys broadcast": ({}, None, (2, 3), (3,)),
    "queries broadcast": ({}, None, (), (2,)),
}
N_Q, N_K, D_Q, D_K, D_V = 21, 37, 11, 24, 7


def problem(rng, case, dtype, d_q=D_K):
    """(operands, grad_out, grad_lse, attn_mask, options)"""
    options, kind, q_lead, k_lead = CASES[case]
    lead = q_lead if "enable_gqa" in options else np.broadcast_shapes(q_lead, k_lead)
    operands = [
        normal(rng, (*q_lead, N_Q, d_q), dtype),
        normal(rng, (*k_lead, N_K, D_K), dtype),
        normal(rng, (*k_lead, N_K, D_V), dtype),
    ]
    grad_out = normal(rng, (*lead, N_Q, D_V), dtype)
    grad_lse = normal(rng, (*lead, N_Q), compute_type(dtype))
    mask = None
    if kind == "bool":
        mask = rng.random((N_Q, N_K)) < 0.6
        mask[:, 0] = True
    if kind == "bias":
        mask = normal(rng, (*lead[:-1], 1, N_Q, N_K), dtype)
    return operands, grad_out, grad_lse, mask, options


def roundoff(dtype):
    """Unit roundoff of the arithmetic, and that of the oracle."""
    return unit_roundoff(compute_type(dtype)) + unit_roundoff(np.float64)


def check_forward(got, expected, bounds, dtype):
    assert got.out.dtype == dtype
    assert got.lse.dtype == compute_type(dtype)
    assert_within(got.out, expected.out, bounds.out, "out")
    assert_within(got.lse, expected.lse, bounds.lse, "lse")


def check_gradients(grads, expected, bounds, like):
    """Each gradient has its argument's shape and dtype and is within its bound."""
    for name, bound in bounds.items():
        grad = getattr(grads, name)
        assert grad.shape == like[name].shape
        assert grad.dtype == like[name].dtype
        assert_within(grad, getattr(expected, name), bound, f"grad {name}")


# ------------------------------------------------------------------------------- cosine


def unit_number(x, u):
    """x / norm x: the norm errs by (d / 2 + 2) u of itself, so a component by (d / 2 + 6) u."""
    unit = abs(oracle.unit(x, 1e-12))
    return Number(unit, (x.shape[-1] / 2 + 6) * u * unit, u)


def unit_backward_number(g, x, u):
    """(g - unit <unit, g>) / norm x, where 1 / norm x errs as the components of unit do."""
    unit, norm = unit_number(x, u), np.linalg.norm(x, axis=-1, keepdims=True)
    inverse = Number(1 / norm, (x.shape[-1] / 2 + 6) * u / norm, u)
    return (g + unit * (unit * g).sum(axis=-1)) * inverse


@pytest.mark.parametrize("case", CASES)
def test_cosine_against_the_oracle(rng, dtype, case):
    operands, grad_out, grad_lse, mask, options = problem(rng, case, dtype)
    options = options | {"attn_mask": mask}
    like = dict(zip(("query", "key", "value"), operands, strict=True)) | {"attn_mask": mask}
    expected = reference.cosine_attention_forward(*operands, temperature=0.3, **options)
    got = sdpa.cosine_attention_forward(*operands, temperature=0.3, **options)

    q, k = arrays.float64(*operands[:2])
    u = roundoff(dtype)
    unit_q, unit_k = (unit_number(x, u) for x in (q, k))
    bounds = AttentionBounds(
        oracle.unit(q, 1e-12),
        oracle.unit(k, 1e-12),
        operands[2],
        grad_out=grad_out,
        grad_lse=grad_lse,
        scale=1 / 0.3,
        errors=(unit_q.error, unit_k.error, 0, 0),
        dtype=dtype,
        **options,
    )
    check_forward(got, expected, bounds, dtype)
    assert_same_bits(sdpa.cosine_attention(*operands, temperature=0.3, **options), got.out)

    needs = ("query", "key", "value", "temperature") + ("attn_mask",) * (case == "bias")
    options |= {"temperature": 0.3, "grad_lse": grad_lse, "needs": needs}
    grads = sdpa.cosine_attention_backward(grad_out, *operands, *got, **options)
    expected = reference.cosine_attention_backward(grad_out, *operands, *expected, **options)
    dq, dk = bounds.dq.summed_to(q.shape), bounds.dk.summed_to(k.shape)
    of = {
        "query": unit_backward_number(dq, q, u).rounded(dtype),
        "key": unit_backward_number(dk, k, u).rounded(dtype),
        "value": bounds.value,
    }
    if "attn_mask" in needs:
        of["attn_mask"] = bounds.attn_mask
    check_gradients(grads, expected, of, like)
    along = (unit_q * dq).sum(axis=-1)
    assert abs(grads.temperature - expected.temperature) <= along.error.sum() / 0.3


def test_cosine_by_hand():
    """Cosines 1, 0 and -1 of two units of temperature: weights e^(1/2), 1, e^(-1/2)."""
    query, key = np.array([[0.0, 5.0]]), np.array([[0.0, 2.0], [7.0, 0.0], [0.0, -0.1]])
    out, lse = sdpa.cosine_attention_forward(query, key, np.eye(3), temperature=2.0)
    weights = np.exp([0.5, 0.0, -0.5])
    np.testing.assert_allclose(out[0], weights / weights.sum(), rtol=1e-15)
    np.testing.assert_allclose(lse, np.log(weights.sum()), rtol=1e-15)


@pytest.mark.parametrize("power", [-149, -130, -64, 0, 64, 125])
def test_cosine_ignores_lengths(rng, power):
    """Rows times 2^power, exactly: the same bits, though squares overflow and underflow."""
    query = rng.integers(-3, 4, (5, 6)).astype(np.float32)
    query[:, 0] = 1
    key, value = normal(rng, (7, 6), np.float32), normal(rng, (7, 3), np.float32)
    expected = sdpa.cosine_attention_forward(query, key, value, eps=1e-300)
    scaled = np.ldexp(query, power)
    assert scaled.any()
    got = sdpa.cosine_attention_forward(scaled, key, value, eps=1e-300)
    if power > -126:  # no length below the smallest normal number, the least eps
        for a, b in zip(got, expected, strict=True):
            assert_same_bits(a, b)
        grads = [
            sdpa.cosine_attention_backward(got.out, x, key, value, *got, eps=1e-300)
            for x in (query, scaled)
        ]
        assert_same_bits(grads[1].key, grads[0].key)
        np.testing.assert_allclose(
            np.ldexp(grads[1].query.astype(np.float64), power),
            grads[0].query,
            atol=np.ldexp(1.0, power - 149),
        )
    assert all(np.isfinite(x).all() for x in got)


@pytest.mark.parametrize("largest", [1e300, 1e-300])
def test_cosine_of_float64_extremes(rng, largest):
    query, key = largest * rng.standard_normal((4, 3)), rng.standard_normal((5, 3)) / largest
    out = sdpa.cosine_attention(query, key, np.eye(5), eps=1e-305)
    expected = sdpa.cosine_attention(query / largest, key * largest, np.eye(5))
    np.testing.assert_allclose(out, expected, rtol=1e-13)


def test_cosine_of_rows_below_eps(rng, compute_dtype):
    """x / eps, a linear function: its gradient is g / eps; a row of zeros has cosine 0."""
    eps = 0.5
    query = np.array([[0, 0], [0.125, 0.25], [3, 4]], compute_dtype)
    key, value = normal(rng, (4, 2), compute_dtype), normal(rng, (4, 2), compute_dtype)
    out, lse = sdpa.cosine_attention_forward(query, key, value, eps=eps)
    # A few dozen roundings of numbers below 10.
    few = 10 * 64 * roundoff(compute_dtype)
    np.testing.assert_allclose(out[0], value.mean(axis=0), rtol=0, atol=few)
    grad_out = np.ones_like(out)
    g = sdpa.cosine_attention_backward(grad_out, query, key, value, out, lse, eps=eps)
    unit = query / np.array([[eps], [eps], [5]], compute_dtype)
    unit_key = key / np.maximum(np.linalg.norm(key, axis=-1, keepdims=True), eps)
    inner = sdpa.attention_backward(grad_out, unit, unit_key, value, out, lse, scale=1.0)
    np.testing.assert_allclose(g.query[:2], inner.query[:2] / eps, rtol=0, atol=few)
    assert abs((g.query * query).sum(axis=-1)[2]) < few


def test_an_eps_below_the_smallest_normal_number_is_that_number(rng, compute_dtype):
    query, key = normal(rng, (2, 5, 3), compute_dtype)
    query[0], least = 0, np.finfo(compute_dtype).tiny
    for tiny in (1e-310, 5e-324):
        outs = [sdpa.cosine_attention(query, key, key, eps=eps) for eps in (tiny, float(least))]
        assert_same_bits(*outs)


# ------------------------------------------------------------------------------- bilinear


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads", ["shared", "per head"])
def test_bilinear_against_the_oracle(rng, dtype, case, heads):
    operands, grad_out, grad_lse, mask, options = problem(rng, case, dtype, D_Q)
    lead = () if heads == "shared" else (grad_out.shape[-3],)
    inputs = (*operands, normal(rng, (*lead, D_Q, D_K), dtype, D_Q**-0.5))
    names = ("query", "key", "value", "weight")
    like = dict(zip(names, inputs, strict=True)) | {"attn_mask": mask}
    options = options | {"attn_mask": mask}
    expected = reference.bilinear_attention_forward(*inputs, **options)
    got = sdpa.bilinear_attention_forward(*inputs, **options)

    q, w = arrays.float64(operands[0], inputs[3])
    query, weight = (Number(abs(x), 0 * x, roundoff(dtype)) for x in (q, w))
    bounds = AttentionBounds(
        q @ w,
        *operands[1:],
        grad_out=grad_out,
        grad_lse=grad_lse,
        errors=((query @ weight).error, 0, 0, 0),
        dtype=dtype,
        **options,
    )
    check_forward(got, expected, bounds, dtype)
    assert_same_bits(sdpa.bilinear_attention(*inputs, **options), got.out)

    needs = names + ("attn_mask",) * (case == "bias")
    options |= {"grad_lse": grad_lse, "needs": needs}
    grads = sdpa.bilinear_attention_backward(grad_out, *inputs, *got, **options)
    expected = reference.bilinear_attention_backward(grad_out, *inputs, *expected, **options)
    dq = bounds.dq.summed_to((q @ w).shape)
    of = {
        "query": (dq @ weight.t).summed_to(q.shape).rounded(dtype),
        "key": bounds.key,
        "value": bounds.value,
        "weight": (query.t @ dq).summed_to(w.shape).rounded(dtype),
    }
    if "attn_mask" in needs:
        of["attn_mask"] = bounds.attn_mask
    check_gradients(grads, expected, of, like)


def test_bilinear_with_the_identity_is_attention(rng, dtype):
    query, key, value = (normal(rng, (2, 9, 8), dtype) for _ in range(3))
    out = sdpa.bilinear_attention(query, key, value, np.eye(8, dtype=dtype))
    assert_same_bits(out, sdpa.attention(query, key, value))


def test_bilinear_default_scale_is_of_the_keys_width():
    query, key = np.ones((1, 2)), np.array([[8.0, 0.0, 0.0, 0.0], [0.0] * 4])
    weight = np.ones((2, 4))
    out = sdpa.bilinear_attention(query, key, np.array([[1.0], [0.0]]), weight)
    np.testing.assert_allclose(out, 1 / (1 + np.exp(-16 / 2)), rtol=1e-14)


# ------------------------------------------------------------------------------- both

FUNCTIONS = {
    "cosine": (sdpa.cosine_attention_forward, sdpa.cosine_attention_backward, {"temperature": 0.5}),
    "bilinear": (sdpa.bilinear_attention_forward, sdpa.bilinear_attention_backward, {}),
}


@pytest.fixture(params=FUNCTIONS)
def mechanism(request):
    return request.param


def call(mechanism, operands, grad_out=None, weight=None, **options):
    """Results of the forward, or with grad_out the gradients as well."""
    forward, backward, own = FUNCTIONS[mechanism]
    inputs = operands if mechanism == "cosine" else (*operands, weight)
    saved = forward(*inputs, **own, **options)
    if grad_out is None:
        return saved
    return saved, backward(grad_out, *inputs, *saved, **own, **options)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_masked_keys_and_queries_cannot_matter(rng, dtype, mechanism, bad):
    query, key, value = (normal(rng, (2, n, 8), dtype) for n in (5, 9, 9))
    weight, grad_out = normal(rng, (8, 8), dtype), normal(rng, (2, 5, 8), dtype)
    mask = np.ones((5, 9), bool)
    mask[3] = mask[:, [2, 8]] = False
    clean = call(mechanism, (query, key, value), grad_out, weight, attn_mask=mask)
    for x in (key, value):
        x[:, [2, 8]] = bad
    query[:, 3] = bad
    dirty = call(mechanism, (query, key, value), grad_out, weight, attn_mask=mask)
    # Sums of at most nine terms may have another order on the path that leaves NaN out.
    roundings = 2 * unit_roundoff(dtype) + 2 * 9 * roundoff(dtype)
    for a, b in zip(clean[0] + clean[1], dirty[0] + dirty[1], strict=True):
        if a is not None:
            a, b = np.float64(a), np.float64(b)
            largest = abs(a[np.isfinite(a)]).max()
            np.testing.assert_allclose(b, a, rtol=0, atol=3 * roundings * largest)
    assert (dirty[0].out[:, 3] == 0).all()
    assert np.isneginf(dirty[0].lse[:, 3]).all()
    assert (dirty[1].query[:, 3] == 0).all()
    assert (dirty[1].key[:, [2, 8]] == 0).all()


def test_visible_nan_propagates(rng, compute_dtype, mechanism):
    query, key, value = (normal(rng, (n, 8), compute_dtype) for n in (5, 9, 9))
    key[4, 1] = np.nan
    weight = np.eye(8, dtype=compute_dtype)
    (out, lse), grads = call(
        mechanism, (query, key, value), np.ones((5, 8), compute_dtype), weight, is_causal=True
    )
    assert np.isnan(out[4]).all()
    assert np.isnan(lse[4])
    assert np.isfinite(out[:4]).all()
    assert np.isnan(grads.key[4]).all()
    assert np.isfinite(grads.query[:4]).all()


@pytest.mark.parametrize(
    "options",
    [
        {"attn_mask": np.linspace(-1, 1, 45).reshape(5, 9)},
        {"is_causal": "lower_right"},
        {"is_causal": True, "query_offset": np.array([1, -2])},
        {"window": (2, 1), "query_offset": 4},
        {"key_lengths": np.array([3, 8])},
        {"softcap": 0.7, "sinks": np.array([0.3, -1, 2.0])},
        {"alibi_slopes": np.array([0.3, 0.1, 0.2])},
        {"dropout_p": 0.4, "rng": 77},
        {"workers": 2, "enable_gqa": True},
    ],
    ids=lambda options: " ".join(options),
)
def test_every_option_reaches_the_oracle(rng, mechanism, options):
    """float64: to 1e-11 of the largest element, which rounding cannot reach and an option that is
    lost or read differently cannot pass."""
    heads = 1 if "enable_gqa" in options else 3
    operands = [normal(rng, (2, h, n, 8), np.float64) for h, n in ((3, 5), (heads, 9), (heads, 9))]
    weight, grad_out = normal(rng, (3, 8, 8), np.float64), normal(rng, (2, 3, 5, 8), np.float64)
    needs = ["query", "key", "value", *(set(options) & {"attn_mask", "sinks"})]
    if isinstance(options.get("attn_mask"), np.ndarray):
        assert "attn_mask" in needs
    forward, backward, own = FUNCTIONS[mechanism]
    names = [f.__name__ for f in (forward, backward)]
    their_forward, their_backward = (getattr(reference, name) for name in names)
    inputs = operands if mechanism == "cosine" else (*operands, weight)
    theirs = {n: x for n, x in options.items() if n != "workers"}
    saved = forward(*inputs, **own, **options)
    expected = their_forward(*inputs, **own, **theirs)
    grads = backward(grad_out, *inputs, *saved, **own, **options, needs=needs)
    their_grads = their_backward(grad_out, *inputs, *expected, **own, **theirs, needs=needs)
    pairs = [(saved.out, expected.out), (saved.lse, expected.lse)]
    pairs += [(getattr(grads, name), getattr(their_grads, name)) for name in needs]
    for ours, true in pairs:
        np.testing.assert_allclose(
            ours, true, rtol=0, atol=1e-11 * abs(true[np.isfinite(true)]).max()
        )


def test_same_bits_for_any_number_of_workers(rng, compute_dtype, mechanism):
    """NumPy computes the projection, which does not depend on the number of workers."""
    operands = [normal(rng, (2, 130, 8), compute_dtype) for _ in range(3)]
    weight, grad_out = normal(rng, (8, 8), compute_dtype), normal(rng, (2, 130, 8), compute_dtype)
    one, *others = (call(mechanism, operands, grad_out, weight, workers=n) for n in (1, 2, 3))
    for other in others:
        for a, b in zip(one[0] + one[1], other[0] + other[1], strict=True):
            assert a is b is None or a.tobytes() == b.tobytes()


@pytest.mark.parametrize(
    ("n_q", "n_k", "d_k", "d_v"), [(0, 3, 4, 2), (3, 0, 4, 2), (3, 4, 0, 2), (2, 3, 4, 0)]
)
def test_nothing(rng, dtype, mechanism, n_q, n_k, d_k, d_v):
    operands = [normal(rng, shape, dtype) for shape in ((n_q, d_k), (n_k, d_k), (n_k, d_v))]
    grad_out, weight = normal(rng, (n_q, d_v), dtype), normal(rng, (d_k, d_k), dtype)
    (out, lse), grads = call(mechanism, operands, grad_out, weight)
    assert out.shape == (n_q, d_v)
    assert lse.shape == (n_q,)
    for x, grad in zip(operands, grads, strict=False):
        assert grad.shape == x.shape
    if n_k == 0:
        assert (out == 0).all()
        assert np.isneginf(lse).all()
    if d_k == 0:  # all scores are 0
        assert_same_bits(out, sdpa.attention(*operands))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_are_not_written_and_layouts_do_not_matter(rng, dtype, mechanism, layout):
    operands = [normal(rng, (2, 3, 6, 8), dtype) for _ in range(3)]
    weight, grad_out = normal(rng, (3, 8, 8), dtype), normal(rng, (2, 3, 6, 8), dtype)
    expected = call(mechanism, operands, grad_out, weight)
    laid = [LAYOUTS[layout](x) for x in (*operands, grad_out, weight)]
    before = [x.copy() for x in laid]
    got = call(mechanism, laid[:3], *laid[3:])
    for x, y in zip(laid, before, strict=True):
        np.testing.assert_array_equal(x, y)
    # NumPy's products of arrays laid out differently may sum in another order: some 8 terms here,
    # after which come sums of 8, 6 and 6.
    tolerance = 100 * roundoff(dtype) + 2 * unit_roundoff(dtype)
    for a, b in zip(got[0] + got[1], expected[0] + expected[1], strict=True):
        if a is None or mechanism == "cosine":
            assert a is b is None or a.tobytes() == b.tobytes()
        else:
            assert a.dtype == b.dtype
            a, b = np.float64(a), np.float64(b)
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(abs(b).max(), 1))


@pytest.mark.parametrize("axis", [0, 1])
def test_broadcast_views_are_not_copied(rng, dtype, mechanism, axis):
    """Repeated rows are computed once; each row of the view gets its gradient."""
    shape = [(1, 3, 6, 8), (2, 1, 6, 8)][axis]
    one = [normal(rng, shape, dtype) for _ in range(3)]
    views = [np.broadcast_to(x, (2, 3, 6, 8)) for x in one]
    weight, grad_out = normal(rng, (8, 8), dtype), normal(rng, (2, 3, 6, 8), dtype)
    got = call(mechanism, views, grad_out, weight)
    expected = call(mechanism, [x.copy() for x in views], grad_out, weight)
    tolerance = 100 * roundoff(dtype) + 2 * unit_roundoff(dtype)
    for a, b in zip(got[0] + got[1], expected[0] + expected[1], strict=True):
        if a is not None:
            a, b = np.float64(a), np.float64(b)
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(abs(b).max(), 1))


def test_memory_grows_with_the_length(rng, mechanism):
    """8192 x 8192 in float32 would be 256 MiB; an operand or result of these is 1/4 MiB."""
    query, key, value, grad_out = (normal(rng, (1, 8192, 8), np.float32) for _ in range(4))
    weight = np.eye(8, dtype=np.float32)
    tracemalloc.start()
    call(mechanism, (query, key, value), grad_out, weight)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 << 20


# ------------------------------------------------------------------------ arguments and results


def test_options_are_those_of_the_table():
    """They are attention's, but for some; of cosines also no scale."""
    options = options_of("attention")
    table = {name for name, option in options.items() if option.kind not in ("packing", "program")}
    table -= {"out", "invariant"}
    assert set(_options.BilinearOptions.__annotations__) == table
    assert set(_options.CosineOptions.__annotations__) == table - {"scale"}


def test_whatever_numpy_takes_is_taken():
    x = operands()
    lists = {name: y.astype(np.float64).tolist() for name, y in x.items()}
    expected = sdpa.cosine_attention(**{name: y.astype(np.float64) for name, y in x.items()})
    np.testing.assert_array_equal(sdpa.cosine_attention(**lists), expected)
    buffers = {name: memoryview(y) for name, y in x.items()}
    assert sdpa.cosine_attention(**buffers).dtype == F32
    weight = np.eye(8).tolist()
    np.testing.assert_array_equal(
        sdpa.bilinear_attention(**lists, weight=weight),
        sdpa.attention(*lists.values()),
    )


def test_results_are_named_tuples():
    x = operands()
    saved = sdpa.cosine_attention_forward(**x)
    assert type(saved) is sdpa.AttentionForward
    grads = sdpa.cosine_attention_backward(saved.out, *x.values(), *saved)
    assert type(grads) is sdpa.CosineGradients
    x = bilinear_operands()
    saved = sdpa.bilinear_attention_forward(*x.values())
    assert type(saved) is sdpa.AttentionForward
    grads = sdpa.bilinear_attention_backward(saved.out, *x.values(), *saved)
    assert type(grads) is sdpa.BilinearGradients
