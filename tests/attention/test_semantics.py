"""The table of semantics: hidden contents, propagation of NaN, extreme numbers."""

import numpy as np
import pytest
from support.helpers import (
    BFLOAT16,
    SIZES,
    AttentionBounds,
    assert_same_bits,
    assert_within,
    check_attention,
    compute_type,
    normal,
    unit_roundoff,
)

import sdpa
from sdpa import reference

pytestmark = pytest.mark.usefixtures("isa")

# One block, several blocks, and blocks that masks cut.
SHAPES = [(5, 7), (20, 40), (40, 150), (150, 300)]


def operands(rng, dtype, n_q, n_k, d=16, lead=(2,)):
    shapes = ((n_q, d), (n_k, d), (n_k, d + 3), (n_q, d + 3))
    return [normal(rng, (*lead, *shape), dtype) for shape in shapes]


def gradients(g, q, k, v, attn_mask=None, *, grad_lse=None, **options):
    out, lse = sdpa.attention_forward(q, k, v, attn_mask, **options)
    biased = attn_mask is not None and attn_mask.dtype != bool
    needs = ("query", "key", "value") + ("attn_mask",) * biased
    return sdpa.attention_backward(
        g, q, k, v, out, lse, attn_mask, grad_lse=grad_lse, needs=needs, **options
    )


# ------------------------------------------------------------------------------------ masks


@pytest.mark.parametrize("n", [11, 40])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_beyond_the_diagonal_cannot_matter(rng, dtype, poison, n):
    """Poison in the last key affects only the last query, in the first query only the first key."""
    q, k, v, g = operands(rng, dtype, n, n)
    plain = check_attention(q, k, v, grad_out=g, is_causal=True)
    k[:, -1] = poison
    v[:, -1, ::2] = poison
    got = check_attention(q, k, v, grad_out=g, is_causal=True)
    np.testing.assert_array_equal(got.out[:, :-1], plain.out[:, :-1])
    q[:, 0] = poison
    g[:, 0, 1::2] = poison
    check_attention(q, k, v, grad_out=g, is_causal=True)


@pytest.mark.parametrize(("n_q", "n_k"), SHAPES)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["bool", "bias", "one row"])
def test_nan_and_inf_under_a_mask_cannot_matter(rng, dtype, kind, poison, n_q, n_k):
    """Keys hidden from every query, and queries that see nothing, may hold anything."""
    q, k, v, g = operands(rng, dtype, n_q, n_k)
    mask = rng.random((n_q, n_k)) < 0.8
    hidden = rng.random(n_k) < 0.2
    hidden[[0, n_k // 2, -1]] = True
    blind = rng.random(n_q) < 0.2
    blind[-1] = True
    mask[:, hidden] = False
    mask[blind] = False
    k[:, hidden] = poison
    v[:, hidden, ::2] = poison
    q[:, blind] = poison
    g[:, blind, 1::2] = poison
    if kind == "bias":
        mask = np.where(mask, normal(rng, mask.shape, np.float32), -np.inf).astype(np.float32)
    if kind == "one row":  # the same keys hidden from every query
        mask = ~hidden[None]
        q[:, blind] = g[:, blind] = 1
    got = check_attention(q, k, v, mask, grad_out=g)
    assert np.isfinite(got.out.astype(np.float64)).all()
    grads = gradients(g, q, k, v, mask)
    for grad in grads[:3]:
        assert np.isfinite(grad.astype(np.float64)).all()
    assert not np.any(grads.key[:, hidden])
    assert not np.any(grads.value[:, hidden])
    if kind != "one row":
        assert not np.any(grads.query[:, blind])


@pytest.mark.parametrize("d_v", [3, 40, 72, 136])
@pytest.mark.parametrize("n_q", [1, 3, 9])
def test_poison_under_a_mask_changes_no_bit(rng, compute_dtype, n_q, d_v):
    """Products that skip masked pairs sum in the same order, for few rows and any width."""
    q, k = (normal(rng, (2, n, 16), compute_dtype) for n in (n_q, 60))
    v, g = (normal(rng, (2, n, d_v), compute_dtype) for n in (60, n_q))
    mask = np.tile(np.arange(60) != 7, (n_q, 1))
    poisoned = v.copy()
    poisoned[:, 7] = np.nan
    clean, dirty = (sdpa.attention_forward(q, k, x, mask) for x in (v, poisoned))
    assert_same_bits(dirty.out, clean.out)
    clean, dirty = (gradients(g, q, k, x, mask) for x in (v, poisoned))
    for a, b in zip(dirty[:3], clean[:3], strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize(("n_q", "n_k"), SHAPES)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("is_causal", [True, "lower_right"])
def test_the_future_cannot_matter(rng, dtype, is_causal, poison, n_q, n_k):
    """Compares only queries before a poisoned key, and only keys after a poisoned query."""
    q, k, v, g = operands(rng, dtype, n_q, n_k)
    shift = n_k - n_q if is_causal == "lower_right" else 0
    for last in {0, n_q // 2, n_q - 1}:
        k_bad, v_bad = k.copy(), v.copy()
        k_bad[:, last + shift + 1 :] = poison
        v_bad[:, last + shift + 1 :] = poison
        clean = reference.attention(q, k, v, is_causal=is_causal)
        dirty = sdpa.attention(q, k_bad, v_bad, is_causal=is_causal)
        bound = AttentionBounds(q, k, v, is_causal=is_causal).out
        past = np.s_[:, : last + 1]
        assert_within(dirty[past], clean[past], bound[past])
    q[:, 0] = poison
    grads = gradients(g, q, k, v, is_causal=is_causal)
    after = shift + 1
    assert np.isfinite(grads.key[:, after:].astype(np.float64)).all()
    assert np.isfinite(grads.value[:, after:].astype(np.float64)).all()
    assert np.isfinite(grads.query[:, 1:].astype(np.float64)).all()


@pytest.mark.parametrize(("n_q", "n_k"), SHAPES)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_keys_beyond_lengths_and_windows_cannot_matter(rng, dtype, poison, n_q, n_k):
    q, k, v, g = operands(rng, dtype, n_q, n_k)
    length = n_k // 2
    k[0, length:] = v[0, length:] = poison
    k[1, length - 1 :] = v[1, length - 1 :] = poison
    for is_causal in (False, True, "lower_right"):
        options = {"key_lengths": [length, length - 1], "is_causal": is_causal}
        got = check_attention(q[:, None], k[:, None], v[:, None], grad_out=g[:, None], **options)
        assert np.isfinite(got.out.astype(np.float64)).all()
    # With this offset no window reaches a poisoned key, and some reach no key at all.
    options = {"window": (2, 1), "query_offset": length - 2 - n_q}
    got = check_attention(q, k, v, grad_out=g, **options)
    assert np.isfinite(got.out.astype(np.float64)).all()


@pytest.mark.parametrize(("n_q", "n_k"), SHAPES)
@pytest.mark.parametrize("which", ["query", "key", "value", "grad_out"])
def test_nan_reaches_what_sees_it_and_nothing_else(rng, dtype, which, n_q, n_k):
    """A NaN here and there under a random mask: results are NaN exactly where the oracle's are."""
    x = dict(
        zip(("query", "key", "value", "grad_out"), operands(rng, dtype, n_q, n_k), strict=True)
    )
    rows = x[which].shape[-2]
    for row in {0, rows // 3, rows - 1}:
        x[which][0, row, row % x[which].shape[-1]] = np.nan
    mask = rng.random((n_q, n_k)) < 0.3
    bias = np.where(mask, normal(rng, mask.shape, np.float32), -np.inf).astype(np.float32)
    check_attention(**x)
    check_attention(**x, is_causal=True)
    check_attention(**x, attn_mask=mask)
    check_attention(**x, attn_mask=bias)
    check_attention(**x, attn_mask=mask, is_causal="lower_right")


TANGENTS = ("query_t", "key_t", "value_t")


@pytest.mark.parametrize(("n_q", "n_k"), SHAPES)
@pytest.mark.parametrize("which", ["query", "key", "value", "grad_out", *TANGENTS])
def test_nan_reaches_what_sees_it_in_further_derivatives(rng, compute_dtype, which, n_q, n_k):
    """The same along tangents and for second derivatives."""
    names = ("query", "key", "value", "grad_out")
    x = dict(zip(names, operands(rng, compute_dtype, n_q, n_k), strict=True))
    x |= dict(zip(TANGENTS, operands(rng, compute_dtype, n_q, n_k)[:3], strict=True))
    rows = x[which].shape[-2]
    for row in {rows // 3, rows - 1}:
        x[which][0, row, row % x[which].shape[-1]] = np.nan
    primals, tangents = [x[name] for name in names[:3]], [x[name] for name in TANGENTS]
    for options in ({"is_causal": True}, {"attn_mask": rng.random((n_q, n_k)) < 0.3}, {}):
        saved = sdpa.attention_forward(*primals, **options)
        second = (*tangents, x["grad_out"], *primals, *saved)
        got = (
            *sdpa.attention_jvp(*primals, *tangents, **options),
            *sdpa.attention_double_backward(*second, **options),
        )
        want = (
            *reference.attention_jvp(*primals, *tangents, **options),
            *reference.attention_double_backward(*second, **options),
        )
        assert sum(y is not None for y in got) == 6
        for ours, exact in zip(got, want, strict=True):
            if ours is not None:
                np.testing.assert_array_equal(np.isnan(ours), np.isnan(exact))


def test_nan_bias_propagates(rng, dtype):
    q, k, v, _ = operands(rng, dtype, 20, 150)
    bias = normal(rng, (20, 150), compute_type(dtype))
    bias[3, 140] = np.nan
    bias[4, 0] = np.inf
    nan = np.isnan(sdpa.attention(q, k, v, bias).astype(np.float64)).all(axis=(0, 2))
    np.testing.assert_array_equal(np.flatnonzero(nan), [3, 4])


@pytest.mark.parametrize("n_k", [n for n in SIZES if 0 < n < 50] + [127, 128, 129])
def test_nan_propagates_at_every_length(rng, dtype, n_k):
    """Any key, and any path that a length takes."""
    q, k, v, _ = operands(rng, dtype, 3, n_k, d=5, lead=())
    for j in range(n_k) if n_k < 50 else (0, 63, n_k - 1):
        bad = v.copy()
        bad[j, 2] = np.nan
        out, lse = (x.astype(np.float64) for x in sdpa.attention_forward(q, k, bad))
        assert np.isnan(out[:, 2]).all()
        assert np.isfinite(np.delete(out, 2, axis=1)).all()
        assert np.isfinite(lse).all()
        bad = k.copy()
        bad[j, 1] = np.nan
        out, lse = (x.astype(np.float64) for x in sdpa.attention_forward(q, bad, v))
        assert np.isnan(out).all()
        assert np.isnan(lse).all()
    bad = q.copy()
    bad[1, 4] = np.nan
    out, lse = (x.astype(np.float64) for x in sdpa.attention_forward(bad, k, v))
    np.testing.assert_array_equal(np.isnan(out), np.array([[0], [1], [0]], bool) & (v[0] == v[0]))
    np.testing.assert_array_equal(np.isnan(lse), [False, True, False])


@pytest.mark.parametrize(("n_q", "n_k"), SHAPES)
def test_fully_masked_rows(rng, dtype, n_q, n_k):
    q, k, v, g = operands(rng, dtype, n_q, n_k)
    mask = rng.random((n_q, n_k)) < 0.5
    blind = np.arange(n_q) % 3 == 1
    mask[blind] = False
    g_lse = normal(rng, (2, n_q), compute_type(dtype))
    for m in (mask, np.where(mask, 0, -np.inf).astype(dtype)):
        out, lse = check_attention(q, k, v, m, grad_out=g, grad_lse=g_lse)
        assert not np.any(out[:, blind])
        assert (lse[:, blind] == -np.inf).all()
        assert not np.any(sdpa.attention_weights(q, k, attn_mask=m)[:, blind])
        grads = gradients(g, q, k, v, m, grad_lse=g_lse)
        assert not np.any(grads.query[:, blind])
        if m.dtype != bool:
            assert not np.any(grads.attn_mask[blind])
    out, lse = check_attention(q, k, v, np.zeros((n_q, n_k), bool), grad_out=g, grad_lse=g_lse)
    assert not np.any(out)
    assert (lse == -np.inf).all()
    q, k, v, g = operands(rng, dtype, n_k, n_q)
    out, lse = check_attention(q, k, v, grad_out=g, is_causal="lower_right")
    assert not np.any(out[:, : n_k - n_q])
    assert (lse[:, : n_k - n_q] == -np.inf).all()


def test_row_of_lowest_finite_bias_is_not_masked(dtype):
    """finfo.min is a number: a row of nothing else is uniform, elsewhere it weighs nothing."""
    n = 150
    q, k = np.zeros((3, 4), dtype), np.ones((n, 4), dtype)
    v = (np.arange(n) % 5).astype(dtype)[:, None]
    bias = np.zeros((3, n), compute_type(dtype))
    bias[1] = bias[2, 10:] = np.finfo(bias.dtype).min
    out, lse = sdpa.attention_forward(q, k, v, bias)
    np.testing.assert_allclose(out[:, 0].astype(np.float64), [2, 2, 2], rtol=2e-7)
    np.testing.assert_allclose(lse, [np.log(n), bias[1, 0], np.log(10)], rtol=1e-6)


# ------------------------------------------------------------------------------------ scores


@pytest.mark.parametrize("n_k", [1, 7, 130])
def test_score_of_minus_infinity_counts_as_masked(rng, dtype, n_k):
    q, k, v, _ = operands(rng, dtype, 9, n_k + 1, d=4, lead=())
    q[:, 0] = 1
    k[n_k // 2, 0] = -np.inf
    v[n_k // 2] = 7
    check_attention(q, k, v)
    out, lse = sdpa.attention_forward(q, k[[n_k // 2]], v[[n_k // 2]])
    assert not np.any(out)
    assert (lse == -np.inf).all()
    left = np.arange(n_k + 1) != n_k // 2
    figures, wanted = sdpa.attention_statistics(q, k), sdpa.attention_statistics(q, k[left])
    for name, figure in figures._asdict().items():
        np.testing.assert_allclose(figure, getattr(wanted, name), 1e-5, 1e-5, err_msg=name)


def test_score_of_plus_infinity_is_nan(rng, dtype):
    q, k, v, _ = operands(rng, dtype, 9, 140, d=4, lead=())
    q[:, 0] = [1, -1, 1, -1, 1, -1, 1, -1, 1]
    k[77, 0] = np.inf
    out = sdpa.attention(q, k, v).astype(np.float64)
    assert np.isnan(out[::2]).all()
    assert np.isfinite(out[1::2]).all()


@pytest.mark.parametrize("n_k", [1, 7, 300])
def test_sink_of_plus_infinity_is_nan(rng, isa, compute_dtype, n_k):
    """In every result of its head, as such a score is in its row."""
    q, k, v, _ = operands(rng, compute_dtype, 9, n_k, d=4, lead=(2,))
    options = {"sinks": np.array([1, np.inf], compute_dtype)}
    rows = sdpa.attention_statistics(q, k, **options)
    tangent = sdpa.attention_jvp(q, k, v, q, k, v, **options)
    results = {
        **sdpa.attention_forward(q, k, v, **options)._asdict(),
        "weights": sdpa.attention_weights(q, k, **options),
        **sdpa.attention_received(q, k, **options)._asdict(),
        **{name: x for name, x in rows._asdict().items() if not name.startswith("score")},
        "out of jvp": tangent.out,
        "out_t": tangent.out_t,
    }
    for name, x in results.items():
        assert np.isfinite(x[0]).all(), name
        assert np.isnan(x[1]).all(), name


@pytest.mark.parametrize(("n_q", "n_k"), SHAPES)
@pytest.mark.parametrize("std", [25, 900])
@pytest.mark.parametrize("is_causal", [False, True])
def test_spread_scores(rng, dtype, std, is_causal, n_q, n_k):
    q, k, v, g = operands(rng, dtype, n_q, n_k)
    q = (q.astype(np.float64) * std).astype(dtype)
    got = check_attention(q, k, v, grad_out=g, is_causal=is_causal)
    assert np.isfinite(got.out.astype(np.float64)).all()


@pytest.mark.parametrize("n_k", [1, 4, 150])
@pytest.mark.parametrize("std", [1, 25, 900])
def test_rows_of_weights_sum_to_one(rng, compute_dtype, std, n_k):
    """A row is divided by its own sum, so widely spread scores do not make it less exact."""
    q = normal(rng, (2, 100, 3), compute_dtype, std)
    weights = sdpa.attention_weights(q, normal(rng, (2, n_k, 3), compute_dtype))
    total = weights.astype(np.longdouble).sum(axis=-1)
    u = unit_roundoff(compute_dtype)
    assert np.abs(total - 1).max() <= (n_k + 24) * u


SPREADS = [1, 10, 20, 30, 35, 40, 42, 45, 60, 80, 88, 100, 200, 2000, 60000]


@pytest.mark.parametrize("order", ["rising", "falling", "shuffled"])
@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_spread_scores_with_extreme_values(rng, dtype, order, size):
    """The largest score comes early, late or anywhere: no partial sum may overflow or vanish."""
    if dtype == np.float16:
        size = {1e30: 3e4, 1e-30: 1e-4}[size]
    n = 700
    for spread in SPREADS:
        s = np.linspace(-spread / 2, spread / 2, n)
        s = {"rising": s, "falling": s[::-1], "shuffled": rng.permutation(s)}[order]
        q = np.array([[1], [-1], [0.5]] * 20, dtype)
        k = s.astype(dtype)[:, None]
        v = (rng.uniform(0.5, 1, (n, 3)) * size).astype(dtype)
        got = check_attention(q, k, v, scale=1)
        out = got.out.astype(np.float64)
        assert (out > 0.49 * size).all()
        assert (out < 1.01 * size).all()


@pytest.mark.parametrize("scale", [0, 1e-30, 1e4, 1e6, 1e8, 1e9, 1e12, 1e18, 1e25, 1e30, 1e35])
@pytest.mark.parametrize("sign", [1, -1])
def test_extreme_scales(dtype, scale, sign):
    """Integer scores 0, 2, 4, ..., exact in any order: uniform, or the winner takes all."""
    n = 150
    q, k = np.ones((20, 2), dtype), np.stack([np.arange(n) % 140] * 2, axis=-1).astype(dtype)
    v = (np.arange(n) % 3).astype(dtype)[:, None]
    winner = [1]
    if scale >= 1:
        winner = v[139] if sign > 0 else (v[0] + v[140]) / dtype.type(2)
    out, _ = sdpa.attention_forward(q, k, v, scale=sign * scale)
    np.testing.assert_allclose(
        out.astype(np.float64), np.broadcast_to(winner, (20, 1)).astype(np.float64), rtol=1e-6
    )


@pytest.mark.parametrize("scale", [-3.0, -0.1, 0.0, 5.0])
@pytest.mark.parametrize("is_causal", [False, True])
def test_any_finite_scale(rng, dtype, scale, is_causal):
    q, k, v, g = operands(rng, dtype, 70, 140)
    mask = rng.random((70, 140)) < 0.5
    for m in (None, mask):
        check_attention(q, k, v, m, grad_out=g, scale=scale, is_causal=is_causal)


# ------------------------------------------------------------------------------------ bits


def test_inputs_are_never_written(rng, dtype):
    """Neither elements nor the gaps between them are written."""
    whole = [rng.standard_normal((2, 60, 40)).astype(dtype) for _ in range(6)]
    before = [x.tobytes() for x in whole]
    q, k, v, g = (x[:, ::2, 1:33:2] for x in whole[:4])
    bias = whole[5][:, ::2, :30]
    for m in (None, bias, bias > 0):
        out, lse = sdpa.attention_forward(q, k, v, m, is_causal=True)
        saved = out.tobytes(), lse.tobytes()
        needs = ("query", "key", "value") + (() if m is None or m.dtype == bool else ("attn_mask",))
        sdpa.attention_backward(g, q, k, v, out, lse, m, is_causal=True, needs=needs)
        sdpa.attention_weights(q, k, attn_mask=m)
        sdpa.merge_attention([out, out], [lse, lse])
        assert saved == (out.tobytes(), lse.tobytes())
    assert before == [x.tobytes() for x in whole]


@pytest.mark.parametrize(("n_q", "n_k"), SHAPES)
def test_the_same_call_gives_the_same_bits(rng, dtype, n_q, n_k):
    q, k, v, g = operands(rng, dtype, n_q, n_k)
    one = sdpa.attention_forward(q, k, v, is_causal=True)
    grads = sdpa.attention_backward(g, q, k, v, *one, is_causal=True)
    for _ in range(3):
        two = sdpa.attention_forward(q.copy(), k.copy(), v.copy(), is_causal=True)
        again = sdpa.attention_backward(g.copy(), q, k, v, *two, is_causal=True)
        for a, b in zip((*one, *grads[:3]), (*two, *again[:3]), strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize(("n_q", "n_k"), SHAPES)
@pytest.mark.parametrize("change", ["other", "huge", "nan", "inf"])
def test_a_query_row_changes_no_other_row(rng, dtype, change, n_q, n_k):
    q, k, v, g = operands(rng, dtype, n_q, n_k)
    row = n_q // 2
    others = np.arange(n_q) != row
    new = q.copy()
    new[0, row] = {
        "other": -new[0, row],
        "huge": new[0, row] * dtype.type(900),
        "nan": np.nan,
        "inf": np.inf,
    }[change]
    for is_causal in (False, True):
        one = sdpa.attention_forward(q, k, v, is_causal=is_causal)
        two = sdpa.attention_forward(new, k, v, is_causal=is_causal)
        for a, b in zip(one, two, strict=True):
            assert_same_bits(a[0, others], b[0, others])
            assert_same_bits(a[1], b[1])
        one = sdpa.attention_backward(g, q, k, v, *one, is_causal=is_causal)
        two = sdpa.attention_backward(g, new, k, v, *two, is_causal=is_causal)
        assert_same_bits(one.query[0, others], two.query[0, others])
        for a, b in zip(one[:3], two[:3], strict=True):
            assert_same_bits(a[1], b[1])


@pytest.mark.parametrize(("n_q", "n_k"), SHAPES)
def test_results_are_new_native_contiguous_arrays(rng, dtype, n_q, n_k):
    other = dtype if dtype == BFLOAT16 else dtype.newbyteorder()
    q, k, v, g = (x.astype(other) for x in operands(rng, dtype, n_q, n_k))
    out, lse = sdpa.attention_forward(q, k, v)
    grads = sdpa.attention_backward(g, q, k, v, out, lse)
    for x in (out, lse, *grads[:3], sdpa.attention_weights(q, k)):
        assert x.flags.c_contiguous
        assert x.flags.owndata
        assert x.flags.writeable
        assert x.dtype.isnative


def test_rows_at_odd_distances(rng, isa):
    """Fields of records: rows that are aligned, but no multiple of an element apart."""
    record = np.dtype({"names": ["x"], "formats": [("f4", (8,))], "itemsize": 33})
    x = np.zeros((3, 40), record)["x"]
    x[...] = rng.standard_normal(x.shape)
    assert x.strides[1:] == (33, 4)
    whole = [np.ascontiguousarray(a) for a in x]
    assert sdpa.attention(*x).tobytes() == sdpa.attention(*whole).tobytes()


def test_a_scale_beyond_what_small_problems_take(rng, isa):
    q, k, v = rng.standard_normal((3, 5, 8), np.float32)
    small = sdpa.attention(q * np.float32(2.0**-70), k, v, scale=2.0**70)
    np.testing.assert_allclose(small, sdpa.attention(q, k, v, scale=1.0), rtol=1e-5, atol=1e-6)


def test_statistics_of_a_row_with_nan(isa):
    q, k = np.ones((2, 4), np.float32), np.ones((9, 4), np.float32)
    k[3] = np.nan
    assert np.isnan(sdpa.attention_statistics(q, k).lse).all()


def test_groups_without_heads(rng):
    x = rng.standard_normal((5, 8), np.float32)
    assert np.array_equal(sdpa.attention(x, x, x, enable_gqa=True), sdpa.attention(x, x, x))
