"""Attention on examples whose result was worked out on paper, never by another implementation.

Three devices make exact arithmetic possible: a zero query (all scores equal, so every row is the
mean of the values it may see), scale = log 3 (scores 1 and 0 become weights 3/4 and 1/4), and a
huge scale (the best key takes all).
"""

import math

import numpy as np
import pytest
from support.helpers import compute_type, unit_roundoff

import sdpa

pytestmark = pytest.mark.usefixtures("isa")


def near(actual, expected, dtype):
    """A dozen roundings in the arithmetic, two to dtype, of numbers up to the largest expected."""
    expected = np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    size = np.max(np.abs(expected), initial=1, where=np.isfinite(expected))
    atol = size * (12 * unit_roundoff(compute_type(dtype)) + 2 * unit_roundoff(dtype))
    np.testing.assert_allclose(actual.astype(np.float64), expected, rtol=0, atol=atol)


def column(values, dtype):
    """(n, 1): vectors with one element."""
    return np.array(values, dtype)[:, None]


# ------------------------------------------------------------------------------------ forward


def test_equal_scores_give_the_mean(dtype):
    out, lse = sdpa.attention_forward(
        np.zeros((2, 3), dtype), np.ones((3, 3), dtype), column([1, 2, 6], dtype)
    )
    near(out, [[3], [3]], dtype)
    near(lse, [math.log(3)] * 2, compute_type(dtype))
    assert out.dtype == dtype
    assert lse.dtype == compute_type(dtype)


def test_three_quarters(dtype):
    q, k, v = column([1], dtype), column([1, 0], dtype), column([4, 8], dtype)
    out, lse = sdpa.attention_forward(q, k, v, scale=math.log(3))
    near(out, [[5]], dtype)
    near(lse, [math.log(4)], compute_type(dtype))
    near(sdpa.attention_weights(q, k, scale=math.log(3)), [[0.75, 0.25]], dtype)
    near(sdpa.attention(q, k, v, scale=-math.log(3)), [[7]], dtype)
    near(sdpa.attention(q, k, v, scale=0), [[6]], dtype)
    bias = np.array([[math.log(3), 0]], compute_type(dtype))
    near(sdpa.attention(0 * q, k, v, bias), [[5]], dtype)


def test_default_scale_divides_by_sqrt_d_k(dtype):
    q, k = np.full((1, 4), 2, dtype), np.array([[1] * 4, [0] * 4], dtype)
    out, lse = sdpa.attention_forward(q, k, column([1, 0], dtype))
    near(out, [[1 / (1 + math.exp(-4))]], dtype)  # scores 8 / sqrt(4) and 0
    near(lse, [4 + math.log1p(math.exp(-4))], compute_type(dtype))
    near(sdpa.attention_weights(q, k, stage="scores"), [[4, 0]], dtype)


@pytest.mark.parametrize("score", [-3000, -57.3, 0.1, 33.7, 900, 3000])
def test_one_key_weighs_one(dtype, score):
    """A single key has weight 1 for any score, even if other keys weigh nothing beside it."""
    q, k, v = column([1] * 5, dtype), column([1, -1], dtype), column([7, 3], dtype)
    near(sdpa.attention_weights(q, k[:1], scale=score), [[1]] * 5, dtype)
    near(sdpa.attention(q, k[:1], v[:1], scale=score), [[7]] * 5, dtype)
    if abs(score) > 20:
        winner = [[1, 0]] if score > 0 else [[0, 1]]
        near(sdpa.attention_weights(q, k, scale=score), winner * 5, dtype)
        near(sdpa.attention(q, k, v, scale=score), [[7 if score > 0 else 3]] * 5, dtype)


@pytest.mark.parametrize("n", [1, 5, 64, 150, 300])
def test_the_best_key_takes_all(dtype, n):
    """Query i is unit vector i, key j is unit vector (n - 1 - j): a permutation of the values."""
    q = np.eye(n, dtype=dtype)
    v = np.arange(3 * n).reshape(n, 3) % 251
    out, lse = sdpa.attention_forward(q, q[::-1], v.astype(dtype), scale=1000)
    np.testing.assert_array_equal(out.astype(np.float64), v[::-1])
    near(lse, np.full(n, 1000), compute_type(dtype))
    weights = sdpa.attention_weights(q, q[::-1], scale=1000)
    np.testing.assert_array_equal(weights.astype(np.float64), np.eye(n)[::-1])


@pytest.mark.parametrize("n", [1, 7, 16, 100, 129, 400])
def test_causal_means(dtype, n):
    """Row i is the mean of 0 .. i, which is i / 2."""
    zero, v = np.zeros((n, 5), dtype), column(np.arange(n), dtype)
    v_sum = np.cumsum(v.astype(np.float64)) / np.arange(1, n + 1)
    out, lse = sdpa.attention_forward(zero, zero, v, is_causal=True)
    if dtype in (np.float32, np.float64):
        np.testing.assert_array_equal(v_sum, np.arange(n) / 2)
    near(out[:, 0], v_sum, dtype)
    near(lse, np.log(np.arange(1, n + 1)), compute_type(dtype))


MEANS = [2, 3, 5, 4]  # of the first 1, 2, 3, 4 elements of:
VALUES = [2, 4, 9, 1]


@pytest.mark.parametrize(
    ("n_q", "n_k", "is_causal", "expected"),
    [
        (4, 4, False, [4, 4, 4, 4]),
        (4, 4, True, [2, 3, 5, 4]),
        (4, 4, "lower_right", [2, 3, 5, 4]),
        (2, 4, True, [2, 3]),
        (2, 4, "upper_left", [2, 3]),
        (2, 4, "lower_right", [5, 4]),
        (1, 4, "lower_right", [4]),
        (4, 2, True, [2, 3, 3, 3]),
        (4, 2, "lower_right", [0, 0, 2, 3]),
    ],
)
def test_causal_alignments(dtype, n_q, n_k, is_causal, expected):
    q, k, v = np.zeros((n_q, 3), dtype), np.ones((n_k, 3), dtype), column(VALUES[:n_k], dtype)
    out, lse = sdpa.attention_forward(q, k, v, is_causal=is_causal)
    near(out[:, 0], expected, dtype)
    seen = {0: -np.inf} | {mean: math.log(n + 1) for n, mean in enumerate(MEANS)}
    near(lse, [seen[mean] for mean in expected], compute_type(dtype))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"window": (0, 0)}, [2, 4, 9, 1]),
        ({"window": (1, 0)}, [2, 3, 6.5, 5]),
        ({"window": (0, 1)}, [3, 6.5, 5, 1]),
        ({"window": (None, 0)}, [2, 3, 5, 4]),
        ({"window": (None, None)}, [4, 4, 4, 4]),
        ({"window": (1, 1), "is_causal": True}, [2, 3, 6.5, 5]),
        ({"window": (0, 0), "query_offset": 1}, [4, 9, 1, 0]),
        ({"is_causal": True, "query_offset": 2}, [5, 4, 4, 4]),
        ({"is_causal": True, "query_offset": -1}, [0, 2, 3, 5]),
        ({"key_lengths": 3}, [5, 5, 5, 5]),
        ({"key_lengths": 0}, [0, 0, 0, 0]),
        ({"key_lengths": 3, "is_causal": True}, [2, 3, 5, 5]),
        ({"key_lengths": 3, "is_causal": "lower_right"}, [0, 2, 3, 5]),
        ({"key_lengths": 3, "is_causal": "lower_right", "window": (0, None)}, [0, 2, 4, 9]),
        ({"key_lengths": 2, "window": (1, 0)}, [2, 3, 4, 0]),
    ],
    ids=str,
)
def test_windows_offsets_and_lengths(dtype, options, expected):
    zero, v = np.zeros((4, 3), dtype), column(VALUES, dtype)
    near(sdpa.attention(zero, zero, v, **options)[:, 0], expected, dtype)


@pytest.mark.parametrize("additive", [False, True])
def test_mask_and_fully_masked_row(dtype, additive):
    mask = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1]], bool)
    visible = mask.copy()
    if additive:
        mask = np.where(mask, 0, -np.inf).astype(dtype)
    zero, v = np.zeros((4, 2), dtype), column(VALUES, dtype)
    out, lse = sdpa.attention_forward(zero, zero, v, mask)
    near(out[:, 0], [1.5, 0, 4, 4], dtype)
    near(lse, [math.log(2), -np.inf, 0, math.log(4)], compute_type(dtype))
    weights = sdpa.attention_weights(zero, zero, attn_mask=mask)
    near(weights, visible / np.array([[2], [1], [1], [4]]), dtype)
    # Together with the causal mask, row 0 sees key 0 and row 3 still sees all.
    near(sdpa.attention(zero, zero, v, mask, is_causal=True)[:, 0], [2, 0, 4, 4], dtype)


def test_mask_over_heads_and_batch(dtype):
    """Head h of batch b may see key (b + h) % 4 alone."""
    b, h, j = np.ogrid[:2, :3, :4]
    mask = ((b + h) % 4 == j)[:, :, None, :]
    q, k, v = np.zeros((2, 3, 2, 1), dtype), np.zeros((4, 1), dtype), column(VALUES, dtype)
    out = sdpa.attention(q, k, v, mask)
    expected = np.array(VALUES)[(b + h)[:, :, 0] % 4]
    near(out[:, :, :, 0], np.stack([expected, expected], axis=-1), dtype)


def test_grouped_query_heads_are_consecutive(dtype):
    q, k = np.zeros((1, 6, 2, 3), dtype), np.zeros((1, 2, 4, 3), dtype)
    v = np.broadcast_to(np.array([10, 20], dtype)[:, None, None], (1, 2, 4, 5))
    out = sdpa.attention(q, k, v, enable_gqa=True)
    near(out[0, :, 0, 0], [10, 10, 10, 20, 20, 20], dtype)


def test_batch_axes_broadcast(dtype):
    q = np.zeros((3, 1, 2, 4), dtype)
    v = np.arange(4).astype(dtype).reshape(1, 2, 2, 1)  # heads (0, 1) and (2, 3)
    out = sdpa.attention(q, np.zeros((2, 4), dtype), v)
    near(out, np.broadcast_to(np.array([[0.5], [2.5]])[:, None], (3, 2, 2, 1)), dtype)


def test_no_columns_in_the_keys(dtype):
    """d_k = 0: uniform weights."""
    out, lse = sdpa.attention_forward(
        np.zeros((2, 0), dtype), np.zeros((4, 0), dtype), column(VALUES, dtype)
    )
    near(out, [[4], [4]], dtype)
    near(lse, [math.log(4)] * 2, compute_type(dtype))


def test_no_keys(dtype):
    out, lse = sdpa.attention_forward(
        np.ones((2, 3), dtype), np.ones((0, 3), dtype), np.ones((0, 5), dtype)
    )
    near(out, np.zeros((2, 5)), dtype)
    near(lse, [-np.inf] * 2, compute_type(dtype))


@pytest.mark.parametrize("stage", ["scores", "capped", "biased", "weights"])
def test_stages_of_the_matrix(dtype, stage):
    q, k = column([1, 2], dtype), column([1, 0, 3], dtype)
    bias = np.array([[0, 1, 0], [0, -np.inf, 0]], np.float32)
    got = sdpa.attention_weights(q, k, attn_mask=bias, is_causal=True, scale=2, stage=stage)
    near(
        got,
        {
            "scores": [[2, 0, 6], [4, 0, 12]],
            "capped": [[2, 0, 6], [4, 0, 12]],
            "biased": [[2, -np.inf, -np.inf], [4, -np.inf, -np.inf]],
            "weights": [[1, 0, 0], [1, 0, 0]],
        }[stage],
        dtype,
    )


def test_drop_in_signature(dtype):
    """Every argument in the place that it has in PyTorch."""
    q, k, v = column([1], dtype), column([1, 0], dtype), column([4, 8], dtype)
    got = sdpa.scaled_dot_product_attention(q, k, v, None, 0.0, False, scale=math.log(3))
    near(got, [[5]], dtype)
    mask = np.array([[False, True]])
    near(sdpa.scaled_dot_product_attention(q, k, v, mask, 0.0, False), [[8]], dtype)
    near(sdpa.scaled_dot_product_attention(q, k, v, None, 0.0, True), [[4]], dtype)
    near(sdpa.attention(q, k, v, None, 0.0, "upper_left"), [[4]], dtype)


def test_out_is_filled_and_returned(dtype):
    q, k, v = column([1], dtype), column([1, 0], dtype), column([4, 8], dtype)
    out = np.full((1, 1), 99, dtype)
    assert sdpa.attention(q, k, v, scale=math.log(3), out=out) is out
    near(out, [[5]], dtype)


# ------------------------------------------------------------------------------------ backward


def gradients(g, q, k, v, attn_mask=None, grad_lse=None, **options):
    out, lse = sdpa.attention_forward(q, k, v, attn_mask, **options)
    needs = ("query", "key", "value")
    if attn_mask is not None and attn_mask.dtype != bool:
        needs += ("attn_mask",)
    return sdpa.attention_backward(
        g, q, k, v, out, lse, attn_mask, grad_lse=grad_lse, needs=needs, **options
    )


def test_gradients_of_the_mean(dtype):
    """Weights 1/2, 1/2 and values 0, 4: ds = p (v - mean) = (-1, 1)."""
    g, v = column([1], dtype), column([0, 4], dtype)
    grads = gradients(g, column([1], dtype), column([2, 2], dtype), v, scale=3)
    near(grads.query, [[0]], dtype)  # 3 (-1 * 2 + 1 * 2)
    near(grads.key, [[-3], [3]], dtype)  # 3 ds q
    near(grads.value, [[0.5], [0.5]], dtype)
    assert grads.attn_mask is None

    grads = gradients(g, column([0], dtype), column([1, 3], dtype), v, scale=3)
    near(grads.query, [[6]], dtype)  # 3 (-1 * 1 + 1 * 3)
    near(grads.key, [[0], [0]], dtype)


def test_gradients_of_three_quarters(dtype):
    """Weights 3/4, 1/4, values 4, 8, mean 5: ds = (3/4 * -1, 1/4 * 3) times g = 2."""
    q, k, v = column([1], dtype), column([1, 0], dtype), column([4, 8], dtype)
    grads = gradients(column([2], dtype), q, k, v, scale=math.log(3))
    near(grads.query, [[-1.5 * math.log(3)]], dtype)
    near(grads.key, [[-1.5 * math.log(3)], [1.5 * math.log(3)]], dtype)
    near(grads.value, [[1.5], [0.5]], dtype)


def test_gradient_of_the_bias_and_of_lse(dtype):
    """d lse / d bias = p; here p = (1/4, 3/4) and out does not depend on the scores."""
    g, q, k, v = (
        column([1], dtype),
        column([0], dtype),
        column([5, 7], dtype),
        column([2, 2], dtype),
    )
    bias = np.array([[0, math.log(3)]], compute_type(dtype))
    grads = gradients(g, q, k, v, bias, grad_lse=np.array([4], compute_type(dtype)), scale=1)
    near(grads.attn_mask, [[1, 3]], dtype)
    assert grads.attn_mask.dtype == bias.dtype
    near(grads.query, [[1 * 5 + 3 * 7]], dtype)
    near(grads.key, [[0], [0]], dtype)


def test_gradients_are_summed_over_what_was_broadcast(dtype):
    """Two batch entries and two query heads share everything but the query."""
    g, q = np.ones((2, 2, 3, 1), dtype), np.ones((2, 2, 3, 1), dtype)
    k, v = np.full((1, 1, 2, 1), 2, dtype), np.array([0, 4], dtype).reshape(2, 1)
    bias = np.zeros((1, 2), dtype)
    grads = gradients(g, q, k, v, bias, scale=1)
    near(grads.query, np.zeros(q.shape), dtype)
    near(grads.key, np.array([-12, 12]).reshape(k.shape), dtype)  # 2 * 2 * 3 rows of (-1, 1)
    near(grads.value, np.array([6, 6]).reshape(v.shape), dtype)
    near(grads.attn_mask, [[-12, 12]], dtype)

    k = np.concatenate([k, k], axis=1)
    v = np.stack([v, v])[None]
    grads = gradients(
        np.tile(g, (1, 2, 1, 1)), np.tile(q, (1, 2, 1, 1)), k, v, enable_gqa=True, scale=1
    )
    near(grads.key, np.tile(np.array([-12, 12]).reshape(2, 1), (1, 2, 1, 1)), dtype)
    near(grads.value, np.full((1, 2, 2, 1), 6), dtype)


@pytest.mark.parametrize("n", [3, 70, 200])
def test_causal_gradients(dtype, n):
    """Row i sees 0 .. i with equal weights, so value j receives sum over i >= j of 1 / (i + 1)."""
    zero, g = np.zeros((n, 2), dtype), np.ones((n, 1), dtype)
    grads = gradients(g, zero, zero, np.ones((n, 1), dtype), is_causal=True)
    harmonic = np.cumsum(1 / np.arange(1, n + 1)[::-1])[::-1]
    near(grads.value[:, 0], harmonic, dtype)
    near(grads.query, np.zeros((n, 2)), dtype)


def test_fully_masked_rows_pass_no_gradient(dtype):
    g, q, k = column([1, 1], dtype), column([1, 1], dtype), column([2, 2], dtype)
    mask = np.array([[False, False], [True, True]])
    for m in (mask, np.where(mask, 0, -np.inf).astype(dtype)):
        grads = gradients(g, q, k, column([0, 4], dtype), m, scale=3)
        near(grads.query, [[0], [0]], dtype)
        near(grads.key, [[-3], [3]], dtype)
        near(grads.value, [[0.5], [0.5]], dtype)
    near(grads.attn_mask, [[0, 0], [-1, 1]], dtype)


def test_only_what_is_needed(dtype):
    x = np.ones((2, 2), dtype)
    out, lse = sdpa.attention_forward(x, x, x)
    grads = sdpa.attention_backward(x, x, x, x, out, lse, needs=("value",))
    assert grads.query is None
    assert grads.key is None
    near(grads.value, np.ones((2, 2)), dtype)


# ------------------------------------------------------------------------------------ merge


def test_merge(dtype):
    """Parts with 1 and 3 units of weight, and one that saw nothing."""
    outs = [np.array([[4.0]], dtype), np.array([[8.0]], dtype), np.array([[0.0]], dtype)]
    lses = [np.array([x], compute_type(dtype)) for x in (0, math.log(3), -np.inf)]
    out, lse = sdpa.merge_attention(outs, lses)
    near(out, [[7]], dtype)
    near(lse, [math.log(4)], compute_type(dtype))
    assert out.dtype == dtype
    assert lse.dtype == compute_type(dtype)
    out, lse = sdpa.merge_attention(outs[2:] * 2, lses[2:] * 2)
    near(out, [[0]], dtype)
    near(lse, [-np.inf], compute_type(dtype))


@pytest.mark.parametrize("lead", [(0,), (2, 0), (0, 3), (0, 0)])
@pytest.mark.parametrize(("n_q", "n_k", "d"), [(1, 5, 4), (1, 0, 0), (3, 5, 4), (0, 1, 1)])
def test_no_heads_or_no_batch(lead, n_q, n_k, d, dtype):
    q, k = np.zeros((*lead, n_q, d), dtype), np.zeros((*lead, n_k, d), dtype)
    for enable_gqa in (False, True):
        out, lse = sdpa.attention_forward(q, k, k, enable_gqa=enable_gqa)
        assert out.shape == q.shape
        assert lse.shape == q.shape[:-1]
        grads = sdpa.attention_backward(out, q, k, k, out, lse, enable_gqa=enable_gqa)
        assert [g.shape for g in grads[:3]] == [q.shape, k.shape, k.shape]
        assert sdpa.attention_weights(q, k, enable_gqa=enable_gqa).shape == (*lead, n_q, n_k)
