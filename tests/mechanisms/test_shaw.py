"""Attention with relative positions: against the oracle in derived bounds, by hand, edges."""

import tracemalloc
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.calls import F32
from support.helpers import (
    LAYOUTS,
    assert_same_bits,
    assert_within,
    compute_type,
    native,
    normal,
    unit_roundoff,
)
from support.shaw_bounds import roundoff, shaw_bounds

import sdpa
from sdpa import reference
from sdpa.mechanisms import _band
from sdpa.reference.positions import ShawPairs

NAMES = ("query", "key", "value", "rel_key", "rel_value")
N_Q, N_K, D_K, D_V = 21, 37, 12, 7


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks in problems of a few rows."""
    monkeypatch.setattr(_band, "_BLOCK_ROWS", 8)


def draw(rng, dtype, q_lead=(2,), k_lead=(2,), far=4, heads=(), n_q=N_Q, n_k=N_K):
    shapes = {
        "query": (*q_lead, n_q, D_K),
        "key": (*k_lead, n_k, D_K),
        "value": (*k_lead, n_k, D_V),
        "rel_key": (*heads, 2 * far + 1, D_K),
        "rel_value": (*heads, 2 * far + 1, D_V),
    }
    return {name: normal(rng, shape, dtype) for name, shape in shapes.items()}


# ------------------------------------------------------------------------------- oracle


def check(rng, x, /, **options):
    """Forward and backward against the oracle."""
    dtype = native(x["query"].dtype)
    expected = reference.shaw_attention_forward(*x.values(), **options)
    got = sdpa.shaw_attention_forward(*x.values(), **options)
    grad_out = normal(rng, expected.out.shape, dtype)
    grad_lse = normal(rng, expected.lse.shape, compute_type(dtype))
    bounds = shaw_bounds(x, grad_out, grad_lse, options)
    assert got.out.dtype == dtype
    assert got.lse.dtype == compute_type(dtype)
    assert_within(got.out, expected.out, bounds["out"], "out")
    assert_within(got.lse, expected.lse, bounds["lse"], "lse")
    assert_same_bits(sdpa.shaw_attention(*x.values(), **options), got.out)

    of = x | {name: options[name] for name in ("attn_mask", "sinks") if name in options}
    needs = tuple(name for name in of if name in bounds)
    options |= {"grad_lse": grad_lse, "needs": needs}
    grads = sdpa.shaw_attention_backward(grad_out, *x.values(), *got, **options)
    true = reference.shaw_attention_backward(grad_out, *x.values(), *expected, **options)
    for name in needs:
        grad = getattr(grads, name)
        assert grad.shape == of[name].shape, name
        assert grad.dtype == native(of[name].dtype), name
        assert_within(grad, getattr(true, name), bounds[name], f"gradient of {name}")
    return got, grads


CASES = {
    "plain": lambda rng, t: {},
    "causal": lambda rng, t: {"is_causal": True, "query_offset": 3},
    "lower right": lambda rng, t: {"is_causal": "lower_right", "key_lengths": 30},
    "before all keys": lambda rng, t: {"query_offset": -40},
    "after all keys": lambda rng, t: {"query_offset": 60},
    "window": lambda rng, t: {"window": (9, 2), "query_offset": 4},
    "window within the band": lambda rng, t: {"window": (1, 1)},
    "window to one side": lambda rng, t: {"window": (None, 0)},
    "lengths": lambda rng, t: {"key_lengths": 17},
    "nothing": lambda rng, t: {"key_lengths": 0},
    "bool": lambda rng, t: {"attn_mask": rng.random((2, N_Q, N_K)) < 0.5},
    "bias of pairs": lambda rng, t: {"attn_mask": normal(rng, (N_Q, N_K), t)},
    "bias of rows": lambda rng, t: {"attn_mask": normal(rng, (N_Q, 1), t)},
    "bias of keys": lambda rng, t: {"attn_mask": normal(rng, (N_K,), t)},
    "sinks": lambda rng, t: {"sinks": normal(rng, (2,), F32), "scale": -0.2},
    "softcap": lambda rng, t: {"softcap": 1.5, "query_offset": 4},
    "alibi": lambda rng, t: {"alibi_slopes": np.array([0.5, 0.125]), "query_offset": 4},
    "one slope": lambda rng, t: {"alibi_slopes": 0.25, "is_causal": "lower_right"},
    "dropout": lambda rng, t: {"dropout_p": 0.3, "rng": 2**40 + 7, "query_offset": 4},
    "all dropped": lambda rng, t: {"dropout_p": 1.0, "rng": 1},
    "all": lambda rng, t: {
        "attn_mask": normal(rng, (N_Q, N_K), t), "is_causal": True, "query_offset": 18,
        "window": (30, 3), "key_lengths": 33, "sinks": normal(rng, (2,), F32), "softcap": 2.0,
        "alibi_slopes": np.array([0.5, 0.125]), "dropout_p": 0.25, "rng": 3, "scale": -0.4,
    },
}  # fmt: skip

WRITTEN_OUT = {"softcap": 2.0, "dropout_p": 0.25, "rng": 2**33 + 1}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("isa", "small_blocks")
def test_options(rng, compute_dtype, case):
    check(rng, draw(rng, compute_dtype), **CASES[case](rng, compute_dtype))


@pytest.mark.parametrize("far", [0, 1, 2, 20, 60])
@pytest.mark.parametrize(("n_q", "n_k"), [(N_Q, N_K), (1, 50), (50, 1), (30, 9)])
@pytest.mark.usefixtures("small_blocks")
def test_distances(rng, far, n_q, n_k):
    check(rng, draw(rng, np.float64, far=far, n_q=n_q, n_k=n_k))


@pytest.mark.usefixtures("isa")
def test_dtypes(rng, dtype):
    """Blocks of the real size: 300 queries make three."""
    check(rng, draw(rng, dtype, far=5, n_q=300, n_k=40), is_causal="lower_right")
    mask = normal(rng, (2, N_Q, N_K), dtype)
    check(rng, draw(rng, dtype, far=5, heads=(2,)), attn_mask=mask, window=(20, 20))


@pytest.mark.parametrize("rel_value", [False, True])
@pytest.mark.parametrize(
    ("q_lead", "k_lead", "heads", "gqa"),
    [
        ((), (), (), False),
        ((2, 3), (3,), (3,), False),
        ((), (2,), (2,), False),
        ((3, 2), (1, 2), (1,), False),
        ((2, 4), (2, 2), (), True),
        ((2, 4), (2, 2), (2,), True),
        ((2, 4), (2, 1), (1,), True),
        ((2, 0), (2, 2), (2,), True),
    ],
    ids=str,
)
@pytest.mark.usefixtures("small_blocks")
def test_leading_axes(rng, q_lead, k_lead, heads, gqa, rel_value):
    x = draw(rng, np.float32, q_lead, k_lead, heads=heads)
    if not rel_value:
        x["rel_value"] = None
    lead = q_lead if gqa else np.broadcast_shapes(q_lead, k_lead)
    mask = normal(rng, (*lead[-1:], N_Q, N_K), np.float32)
    check(rng, x, attn_mask=mask, enable_gqa=gqa)
    slopes = np.linspace(0.1, 0.4, *lead[-1:]) if lead else 0.1
    more = {"softcap": 2.0, "dropout_p": 0.25, "rng": 5, "alibi_slopes": slopes}
    check(rng, x, enable_gqa=gqa, **more)


@pytest.mark.parametrize(
    ("lead", "n_q", "n_k", "d_k", "d_v"),
    [
        ((2,), 0, 5, 3, 2),
        ((2,), 5, 0, 3, 2),
        ((2,), 5, 6, 0, 2),
        ((2,), 5, 6, 3, 0),
        ((0, 2), 5, 6, 3, 2),
        ((0,), 5, 6, 3, 2),
        ((2, 0), 5, 6, 3, 2),
    ],
)
@pytest.mark.parametrize("n_rows", [1, 7])
def test_nothing(rng, lead, n_q, n_k, d_k, d_v, n_rows):
    """With an axis of length 0, results are empty, 0, or those of equal scores."""
    shapes = ((*lead, n_q, d_k), (*lead, n_k, d_k), (*lead, n_k, d_v), (n_rows, d_k), (n_rows, d_v))
    check(rng, {n: normal(rng, s, F32) for n, s in zip(NAMES, shapes, strict=True)})
    check(
        rng,
        {n: normal(rng, s, F32) for n, s in zip(NAMES, shapes, strict=True)},
        enable_gqa=True,
    )


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("more", [{}, WRITTEN_OUT], ids=["", "written out"])
@pytest.mark.usefixtures("small_blocks")
def test_numbers_of_the_head_of_two_axes(rng, shape, more):
    """Arrays without an axis of heads have one head, for slopes and sinks too."""
    x = draw(rng, np.float64, q_lead=(), k_lead=())
    options = more | {"alibi_slopes": np.full(shape, 0.3), "sinks": np.full(shape, 0.2)}
    check(rng, x, **options)


@pytest.mark.usefixtures("small_blocks")
def test_no_heads(rng):
    x = draw(rng, np.float64, q_lead=(0,), k_lead=(0,), heads=(0,))
    none = np.zeros(0)
    check(rng, x, **WRITTEN_OUT, alibi_slopes=none, sinks=none)
    check(rng, x, attn_mask=np.zeros((1, 1)), alibi_slopes=none, enable_gqa=True)


@pytest.mark.usefixtures("small_blocks")
def test_value_alone_has_leading_axes(rng):
    """Then key has no heads, and rel_value has those of value."""
    x = draw(rng, np.float64)
    x |= {"query": x["query"][0], "key": x["key"][0]}
    check(rng, x)
    check(rng, x | {"rel_value": rng.standard_normal((2, 9, D_V))})
    check(rng, x, attn_mask=rng.standard_normal((2, N_Q, N_K)))


@st.composite
def problems(draw):
    """(seed, sizes, rows of a block, options) of any geometry of distances."""
    options = {"is_causal": draw(st.sampled_from([False, False, True, "lower_right"]))}
    n_q, n_k = draw(st.integers(0, 30)), draw(st.integers(0, 50))
    if options["is_causal"] != "lower_right":
        options["query_offset"] = draw(st.integers(-60, 60))
    if draw(st.booleans()):
        options["window"] = tuple(draw(st.one_of(st.none(), st.integers(0, 40))) for _ in range(2))
    if draw(st.booleans()):
        options["key_lengths"] = draw(st.integers(0, n_k))
    seed, far, rows = (draw(st.integers(0, n)) for n in (2**32 - 1, 25, 12))
    return seed, far, n_q, n_k, rows + 1, options


@given(problems())
@settings(max_examples=100)
def test_any_geometry(problem):
    """The geometry decides which blocks and parts there are. float64, to 1e-11."""
    seed, far, n_q, n_k, rows, options = problem
    rng = np.random.default_rng(seed)
    x = draw(rng, np.float64, far=far, n_q=n_q, n_k=n_k)
    grad_out = rng.standard_normal((2, n_q, D_V))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_band, "_BLOCK_ROWS", rows)
        saved = sdpa.shaw_attention_forward(*x.values(), **options)
        grads = sdpa.shaw_attention_backward(grad_out, *x.values(), *saved, **options)
    expected = reference.shaw_attention_forward(*x.values(), **options)
    true = reference.shaw_attention_backward(
        grad_out, *x.values(), *expected, **options, needs=NAMES
    )
    for ours, theirs in zip([*saved, *grads[:5]], [*expected, *true[:5]], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-11)


# ------------------------------------------------------------------------------- properties


@pytest.mark.parametrize("options", [{}, WRITTEN_OUT | {"alibi_slopes": 0.2}], ids=["", "more"])
@pytest.mark.usefixtures("small_blocks")
def test_vectors_of_zero_are_attention(rng, compute_dtype, options):
    """Vectors of zero give plain attention, with the same pairs dropped."""
    x = draw(rng, compute_dtype)
    zero = np.zeros((9, D_K), compute_dtype), np.zeros((9, D_V), compute_dtype)
    qkv = [x[name] for name in NAMES[:3]]
    out = sdpa.shaw_attention(*qkv, *zero, **options)
    # Merged of three parts, all errors of which are some dozen roundings.
    np.testing.assert_allclose(
        out, sdpa.attention(*qkv, **options), rtol=0, atol=100 * unit_roundoff(compute_dtype)
    )
    np.testing.assert_array_equal(sdpa.shaw_attention(*qkv, zero[0], **options), out)


def test_dropout_may_be_a_decimal(rng):
    x, options = rng.standard_normal((4, 5, 3)), {"rng": 1}
    half, other = (sdpa.shaw_attention(*x, dropout_p=p, **options) for p in (0.5, Decimal("0.5")))
    assert_same_bits(half, other)


def test_a_cap_beyond_the_range_is_none(rng, compute_dtype):
    x, cap = draw(rng, compute_dtype), float(np.finfo(np.float64).max)
    capped = sdpa.shaw_attention_forward(*x.values(), softcap=cap)
    grads = sdpa.shaw_attention_backward(capped.out, *x.values(), *capped, softcap=cap)
    plain = sdpa.shaw_attention_forward(*x.values())
    expected = sdpa.shaw_attention_backward(plain.out, *x.values(), *plain)
    for a, b in zip([*capped, *grads[:5]], [*plain, *expected[:5]], strict=True):
        atol = 1000 * unit_roundoff(compute_dtype) * abs(b).max()
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def test_dropout_without_a_seed_draws_anew(rng):
    x = draw(rng, np.float32, n_q=300, n_k=300)
    one, two = (sdpa.shaw_attention(*x.values(), dropout_p=0.5) for _ in range(2))
    assert not np.array_equal(one, two)


@pytest.mark.parametrize("size", [1e3, 1e6, 1e12])
@pytest.mark.parametrize("more", [{}, {"dropout_p": 1e-9, "rng": 0}, {"softcap": 1e13}], ids=str)
def test_weights_of_large_scores_sum_to_one(compute_dtype, size, more):
    """Equal scores in the band and beside it: float32 has too few digits for their lse."""
    x = np.zeros((200, 1), compute_dtype), *np.ones((2, 300, 1), compute_dtype)
    x[0][:] = size
    rel_key, rel_value = np.zeros((5, 1), compute_dtype), np.ones((5, 1), compute_dtype)
    out = sdpa.shaw_attention(*x, rel_key, rel_value, scale=1.0, **more)
    np.testing.assert_allclose(out, np.full_like(out, 2), rtol=1e-5)


def test_one_vector_moves_all_keys_and_values(rng):
    """With D = 0 the weights do not change, and rel_value is added to each output."""
    x = draw(rng, np.float64, far=0)
    expected = sdpa.attention(*(x[name] for name in NAMES[:3])) + x["rel_value"]
    np.testing.assert_allclose(sdpa.shaw_attention(*x.values()), expected, rtol=0, atol=1e-13)


def test_by_hand():
    """Scores log 2 behind the query, 0 at it, log 3 ahead; values are the distances, clipped."""
    query, key, value = np.ones((3, 1)), np.zeros((3, 1)), np.zeros((3, 1))
    rel_key, rel_value = np.log([[2.0], [1.0], [3.0]]), np.array([[-1.0], [0.0], [1.0]])
    out, lse = sdpa.shaw_attention_forward(query, key, value, rel_key, rel_value, scale=1.0)
    np.testing.assert_allclose(out[:, 0], [6 / 7, 1 / 6, -4 / 5], rtol=1e-14)
    np.testing.assert_allclose(np.exp(lse), [7, 6, 5], rtol=1e-14)


def test_decoding_one_query_at_a_time(rng):
    """The last row of causal attention is that of the last query with its offset."""
    x = draw(rng, np.float64, n_q=N_K)
    whole = sdpa.shaw_attention(*x.values(), is_causal=True)
    x["query"] = x["query"][:, -1:]
    one = sdpa.shaw_attention(*x.values(), query_offset=N_K - 1)
    np.testing.assert_allclose(one[:, 0], whole[:, -1], rtol=0, atol=1e-13)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("small_blocks")
def test_layouts_do_not_matter_and_inputs_are_not_written(rng, dtype, layout):
    x = draw(rng, dtype, heads=(2,))
    grad_out = normal(rng, (2, N_Q, D_V), dtype)
    expected = sdpa.shaw_attention_forward(*x.values())
    grads = sdpa.shaw_attention_backward(grad_out, *x.values(), *expected)
    laid = {name: LAYOUTS[layout](y) for name, y in x.items()}
    before = {name: y.tobytes() for name, y in laid.items()}
    got = sdpa.shaw_attention_forward(*laid.values())
    got_grads = sdpa.shaw_attention_backward(LAYOUTS[layout](grad_out), *laid.values(), *got)
    assert {name: y.tobytes() for name, y in laid.items()} == before
    # NumPy's products of arrays laid out differently may sum in another order.
    bounds = shaw_bounds(x, grad_out, None, {})
    for name in ("out", "lse"):
        assert_within(getattr(got, name), np.float64(getattr(expected, name)), 2 * bounds[name])
    for name in NAMES:
        assert_within(
            getattr(got_grads, name), np.float64(getattr(grads, name)), 2 * bounds[name], name
        )


@pytest.mark.parametrize("workers", [1, 2])
def test_same_bits_for_any_number_of_workers(rng, workers):
    x = draw(rng, np.float32, n_q=300, n_k=300)
    got = sdpa.shaw_attention_forward(*x.values(), workers=workers)
    for a, b in zip(got, sdpa.shaw_attention_forward(*x.values()), strict=True):
        assert_same_bits(a, b)


def test_memory_grows_with_the_length(rng):
    """8192 x 8192 in float32 would be 256 MiB; 64 rel rows of each query 2 MiB."""
    n = 8192
    x = [normal(rng, (1, n, 8), np.float32) for _ in range(4)]
    rel = [normal(rng, (65, 8), np.float32) for _ in range(2)]
    tracemalloc.start()
    out, lse = sdpa.shaw_attention_forward(*x[:3], *rel)
    forward = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    sdpa.shaw_attention_backward(x[3], *x[:3], *rel, out, lse)
    backward = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(forward, backward) < 6 << 20


# ------------------------------------------------------------------------------- masked


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["bool", "bias", "lengths", "causal"])
@pytest.mark.parametrize("more", [{}, WRITTEN_OUT], ids=["", "written out"])
@pytest.mark.usefixtures("isa", "small_blocks")
def test_masked_positions_cannot_matter(rng, compute_dtype, kind, bad, more):
    """Masked keys and values, queries that see nothing, distances that no visible pair has."""
    x = draw(rng, compute_dtype)
    visible = np.ones((N_Q, N_K), bool)
    options = dict(more)
    if kind in ("bool", "bias"):
        visible[:, [2, 8]] = visible[3] = False
        t = np.arange(N_K) - np.arange(N_Q)[:, None]
        visible &= t != 1
        mask = np.where(visible, 0, -np.inf).astype(compute_dtype)
        options["attn_mask"] = visible if kind == "bool" else mask
    if kind == "lengths":
        visible[:, 20:] = False
        options["key_lengths"] = 20
    if kind == "causal":
        visible = np.tril(visible)
        options["is_causal"] = True
    grad_out = normal(rng, (2, N_Q, D_V), compute_dtype)

    def call():
        saved = sdpa.shaw_attention_forward(*x.values(), **options)
        grads = sdpa.shaw_attention_backward(grad_out, *x.values(), *saved, **options)
        return [*saved, *grads[:5]]

    clean = call()
    pairs = ShawPairs(*x.values(), **options)
    seen = np.zeros(9, bool)
    seen[pairs.rows[visible]] = True
    hidden_keys, hidden_queries = ~visible.any(axis=0), ~visible.any(axis=1)
    assert hidden_keys.any()
    for name, hidden in zip(
        NAMES, (hidden_queries, hidden_keys, hidden_keys, ~seen, ~seen), strict=True
    ):
        x[name][..., hidden, :] = bad
    dirty = call()
    # Sums may have another order on the path that leaves NaN out.
    for a, b in zip(clean, dirty, strict=True):
        finite = np.isfinite(a)
        tolerance = N_K * N_Q * roundoff(compute_dtype) * abs(a[finite]).max()
        np.testing.assert_allclose(b[finite], a[finite], rtol=0, atol=tolerance)
        np.testing.assert_array_equal(np.isfinite(b), finite)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("more", [{}, WRITTEN_OUT], ids=["", "written out"])
@pytest.mark.usefixtures("small_blocks")
def test_hidden_elements_of_a_bias_cannot_matter(rng, compute_dtype, bad, more):
    x = draw(rng, compute_dtype)
    bias = normal(rng, (N_Q, N_K), compute_dtype)
    t = np.arange(N_K) - np.arange(N_Q)[:, None]
    spoilt = np.where((t <= 0) & (t >= -9), bias, compute_dtype.type(bad))
    grad_out = normal(rng, (2, N_Q, D_V), compute_dtype)
    results = []
    for mask in (bias, spoilt):
        options = more | {"attn_mask": mask, "is_causal": True, "window": (9, 3)}
        saved = sdpa.shaw_attention_forward(*x.values(), **options)
        needs = [*NAMES, "attn_mask"]
        grads = sdpa.shaw_attention_backward(grad_out, *x.values(), *saved, needs=needs, **options)
        results.append([*saved, *grads[:6]])
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


def test_vectors_affect_only_the_pairs_of_their_distance(rng):
    """NaN at distance 1: the last query has no key there, all others have."""
    x = draw(rng, np.float64, n_q=N_K, far=4)
    for name in ("rel_key", "rel_value"):
        bad = x[name].copy()
        bad[5, 0] = np.nan
        out, lse = sdpa.shaw_attention_forward(*(x | {name: bad}).values())
        assert np.isfinite(out[:, -1]).all()
        assert np.isnan(out[:, :-1, 0]).all()
        grads = sdpa.shaw_attention_backward(
            np.ones_like(out), *(x | {name: bad}).values(), out, lse
        )
        assert np.isfinite(grads.query[:, -1]).all()
        assert np.isnan(grads.query[:, :-1]).any(axis=-1).all()


@pytest.mark.parametrize("more", [{}, WRITTEN_OUT], ids=["", "written out"])
@pytest.mark.usefixtures("small_blocks")
def test_a_query_of_nan_affects_only_the_keys_that_it_sees(rng, more):
    x, options = draw(rng, np.float64), more | {"is_causal": True}
    x["query"][:, 4] = np.nan
    saved = sdpa.shaw_attention_forward(*x.values(), **options)
    grads = sdpa.shaw_attention_backward(saved.out, *x.values(), *saved, **options)
    for grad in (grads.key, grads.value):
        np.testing.assert_array_equal(np.isnan(grad).any(axis=(0, 2)), np.arange(N_K) <= 4)


# ------------------------------------------------------------------------------- gradients


def composed(torch, x, bias, visible, rows, scale):
    """(out, lse) from PyTorch's elementary operations, with a key and a value for every pair."""
    keys = x["key"][..., None, :, :] + x["rel_key"][..., rows, :]
    values = x["value"][..., None, :, :] + x["rel_value"][..., rows, :]
    s = scale * torch.einsum("...id,...ijd->...ij", x["query"], keys) + bias
    s = s.masked_fill(~visible, -torch.inf)
    out = torch.einsum("...ij,...ijd->...id", torch.softmax(s, -1), values)
    return out, torch.logsumexp(s, -1)


@pytest.mark.usefixtures("isa", "small_blocks")
def test_autograd_of_the_composed_formula(torch, rng):
    """float64: to 1e-11 of the largest element."""
    n_q, n_k, far = 17, 23, 3
    x = draw(rng, np.float64, far=far, heads=(2,), n_q=n_q, n_k=n_k)
    x["attn_mask"] = rng.standard_normal((n_q, n_k))
    grad_out, grad_lse = rng.standard_normal((2, n_q, D_V)), rng.standard_normal((2, n_q))
    options = {"attn_mask": x["attn_mask"], "window": (8, 5), "query_offset": 2, "scale": 0.4}
    inputs = [x[name] for name in NAMES]
    saved = sdpa.shaw_attention_forward(*inputs, **options)
    grads = sdpa.shaw_attention_backward(
        grad_out, *inputs, *saved, grad_lse=grad_lse, needs=tuple(x), **options
    )
    t = torch.arange(n_k) - torch.arange(n_q)[:, None] - 2
    leaves = {name: torch.tensor(y, requires_grad=True) for name, y in x.items()}
    out, lse = composed(
        torch, leaves, leaves["attn_mask"], (t >= -8) & (t <= 5), t.clamp(-far, far) + far, 0.4
    )
    np.testing.assert_allclose(saved.out, out.detach().numpy(), rtol=0, atol=1e-13)
    loss = (out * torch.tensor(grad_out)).sum() + (lse * torch.tensor(grad_lse)).sum()
    for name, true in zip(x, torch.autograd.grad(loss, list(leaves.values())), strict=True):
        error = abs(getattr(grads, name) - true.numpy()).max()
        assert error < 1e-11 * true.abs().max().item(), name


@pytest.mark.usefixtures("small_blocks")
def test_gradcheck(torch, rng):
    """PyTorch's own check against differences, on out and on lse, through a Function."""
    x = draw(rng, np.float64, (2,), (1,), far=2, n_q=4, n_k=9)
    options = {"enable_gqa": True, "is_causal": "lower_right"}

    class Shaw(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.x = [t.detach().numpy() for t in tensors]
            ctx.saved = sdpa.shaw_attention_forward(*ctx.x, **options)
            return tuple(torch.tensor(y) for y in ctx.saved)

        @staticmethod
        def backward(ctx, grad_out, grad_lse):
            grads = sdpa.shaw_attention_backward(
                grad_out.numpy(), *ctx.x, *ctx.saved, grad_lse=grad_lse.numpy(), **options
            )
            return tuple(torch.tensor(getattr(grads, name)) for name in NAMES)

    tensors = [torch.tensor(y, requires_grad=True) for y in x.values()]
    assert torch.autograd.gradcheck(Shaw.apply, tensors)


@pytest.mark.parametrize("name", [*NAMES, "attn_mask", "sinks"])
@pytest.mark.parametrize("more", [{}, WRITTEN_OUT], ids=["", "written out"])
@pytest.mark.usefixtures("small_blocks")
def test_each_gradient_alone_equals_the_one_among_all(rng, name, more):
    x = draw(rng, np.float32)
    options = {"attn_mask": normal(rng, (N_Q, N_K), F32), "sinks": normal(rng, (2,), F32)} | more
    grad_out, saved = (
        normal(rng, (2, N_Q, D_V), F32),
        sdpa.shaw_attention_forward(*x.values(), **options),
    )
    arguments = (grad_out, *x.values(), *saved)
    needs = [*NAMES, "attn_mask", "sinks"]
    everything = sdpa.shaw_attention_backward(*arguments, **options, needs=needs)
    alone = sdpa.shaw_attention_backward(*arguments, **options, needs=[name])
    assert_same_bits(getattr(alone, name), getattr(everything, name))
    assert [n for n in alone._fields if getattr(alone, n) is not None] == [name]


def test_default_needs(rng):
    x = draw(rng, np.float32)
    for rel_value, last in ((x["rel_value"], 5), (None, 4)):
        inputs = [*list(x.values())[:4], rel_value]
        saved = sdpa.shaw_attention_forward(*inputs)
        grads = sdpa.shaw_attention_backward(saved.out, *inputs, *saved)
        assert type(saved) is sdpa.AttentionForward
        assert type(grads) is sdpa.ShawGradients
        assert tuple(n for n in grads._fields if getattr(grads, n) is not None) == NAMES[:last]
