"""Few queries over many keys: heads folded into rows, keys cut into parts."""

import numpy as np
import pytest
from support import oracle
from support.helpers import assert_same_bits, assert_within, compute_type, normal

import sdpa

pytestmark = pytest.mark.usefixtures("isa")

PART = 1024  # PART_KEYS of src/forward.c: keys of a part for four queries or more, for one 4 PART

# query heads, key heads, queries, keys, d_k, d_v
SHAPES = {
    "one query": (3, 3, 1, 150, 40, 24),
    "one query, grouped": (8, 2, 1, 150, 64, 64),
    "few queries, odd widths": (4, 2, 3, 77, 33, 20),
    "one query, three runs": (2, 2, 1, 2500, 64, 300),
    "as many as are few": (2, 1, 6, 77, 24, 72),
    "one more": (2, 1, 7, 77, 24, 72),
    "as many as are few, avx512": (2, 1, 8, 77, 24, 72),
    "one more, avx512": (2, 1, 9, 77, 24, 72),
    "one query, two parts": (1, 1, 1, 8 * PART + 99, 16, 9),
    "one query, grouped, two parts": (4, 1, 1, 2 * PART + 99, 16, 9),
    "many queries, three parts": (1, 1, 250, 3 * PART, 8, 8),
}


def options(rng, name, shape, dtype):
    h, _, n_q, n_k, _, _ = shape
    real = compute_type(dtype)
    return {
        "plain": {},
        "lower right": {"is_causal": "lower_right"},
        "offsets": {"is_causal": True, "query_offset": np.array([n_k - 5, 4])},
        "window": {"window": (n_k // 2, 10), "query_offset": n_k - n_q - 20},
        "lengths": {"key_lengths": np.array([0, n_k // 2])},
        "sinks": {"sinks": normal(rng, (h,), real)},
        "alibi": {"alibi_slopes": np.linspace(0.01, 0.5, h), "query_offset": n_k - n_q},
        "softcap, negative scale": {"softcap": 2.0, "scale": -0.3},
        "bool": {"attn_mask": rng.random((2, h, n_q, n_k)) < 0.1},
        "bias": {"attn_mask": normal(rng, (h, n_q, n_k), real)},
        "bias of keys": {"attn_mask": normal(rng, (n_k,), real)},
        "dropout": {"dropout_p": 0.3, "rng": 5},
    }[name]


def operands(rng, shape, dtype):
    h, h_k, n_q, n_k, d_k, d_v = shape
    lead = [(2, h, n_q, d_k), (2, h_k, n_k, d_k), (2, h_k, n_k, d_v)]
    return [normal(rng, size, dtype) for size in lead], {"enable_gqa": h != h_k}


NAMES = (
    "plain",
    "lower right",
    "offsets",
    "window",
    "lengths",
    "sinks",
    "alibi",
    "softcap, negative scale",
    "bool",
    "bias",
    "bias of keys",
    "dropout",
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_few_queries_against_the_oracle(rng, compute_dtype, shape, name):
    (q, k, v), gqa = operands(rng, shape, compute_dtype)
    given = options(rng, name, shape, compute_dtype) | gqa
    got = sdpa.attention_forward(q, k, v, workers=1, **given)
    expected = oracle.attention_forward(q, k, v, **given)
    bounds = oracle.bounds(q, k, v, **given)
    assert_within(got.out, expected.out, bounds.out, "out")
    assert_within(got.lse, expected.lse, bounds.lse, "lse")
    two = sdpa.attention_forward(q, k, v, workers=2, **given)
    assert_same_bits(got.out, two.out)
    assert_same_bits(got.lse, two.lse)


@pytest.mark.parametrize("shape", ["one query, grouped", "one query, grouped, two parts"])
def test_sixteen_bits(rng, dtype, shape):
    (q, k, v), gqa = operands(rng, SHAPES[shape], dtype)
    got = sdpa.attention_forward(q, k, v, **gqa)
    expected = oracle.attention_forward(q, k, v, **gqa)
    bounds = oracle.bounds(q, k, v, **gqa)
    assert_within(got.out, expected.out, bounds.out, "out")
    assert_within(got.lse, expected.lse, bounds.lse, "lse")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_nan_propagates_only_from_within_the_length(rng, compute_dtype, shape):
    (q, k, v), gqa = operands(rng, shape, compute_dtype)
    n = shape[3] // 2
    expected = sdpa.attention_forward(q, k, v, key_lengths=n, **gqa)
    k[..., n:, :] = np.nan
    v[..., n:, :] = np.inf
    got = sdpa.attention_forward(q, k, v, key_lengths=n, **gqa)
    assert_same_bits(got.out, expected.out)
    assert_same_bits(got.lse, expected.lse)
    seen = sdpa.attention_forward(q, k, v, **gqa)
    assert np.isnan(seen.out).all()
    assert np.isnan(seen.lse).all()


@pytest.mark.parametrize("d_v", [9, 24, 72, 128, 264])
@pytest.mark.parametrize("n_q", [1, 3, 6, 7, 8, 9])
def test_masked_values_change_no_bit(rng, compute_dtype, n_q, d_v):
    """Products sum in the same order whether or not they skip NaN."""
    q, k = (normal(rng, (n, 16), compute_dtype) for n in (n_q, 75))
    v = normal(rng, (75, d_v), compute_dtype)
    mask = rng.random((n_q, 75)) < 0.7
    mask[:, 40] = False
    expected = sdpa.attention(q, k, v, mask)
    v[40] = np.nan
    assert_same_bits(sdpa.attention(q, k, v, mask), expected)


@pytest.mark.parametrize(("d_k", "d_v"), [(0, 0), (0, 3), (3, 0)])
def test_no_columns(compute_dtype, d_k, d_v):
    q, k, v = (np.ones(shape, compute_dtype) for shape in ((1, d_k), (5, d_k), (5, d_v)))
    assert_same_bits(sdpa.attention(q, k, v), np.ones((1, d_v), compute_dtype))
    np.testing.assert_allclose(
        sdpa.attention_weights(q, k), 0.2, rtol=4 * np.finfo(compute_dtype).eps
    )


def test_one_infinite_score_in_one_part(compute_dtype):
    """A key whose score far exceeds all others takes the row, whichever part it is in."""
    n = 12 * PART
    q = np.ones((1, 8), compute_dtype)
    k = np.zeros((n, 8), compute_dtype)
    v = np.arange(n, dtype=compute_dtype)[:, None] * np.ones(8, compute_dtype)
    for j in (0, 4 * PART + 1, n - 1):
        k[j] = 1e4
        np.testing.assert_array_equal(sdpa.attention(q, k, v)[0], v[j])
        k[j] = 0


def test_gradients_of_few_queries_use_the_same_lse(rng, compute_dtype):
    """The backward uses the merged lse; gradients stay within the bounds of one sweep."""
    shape = SHAPES["one query, grouped, two parts"]
    (q, k, v), gqa = operands(rng, shape, compute_dtype)
    out, lse = sdpa.attention_forward(q, k, v, **gqa)
    grad_out = normal(rng, out.shape, compute_dtype)
    got = sdpa.attention_backward(grad_out, q, k, v, out, lse, **gqa)
    expected = oracle.attention_backward(grad_out, q, k, v, out, lse, **gqa)
    bounds = oracle.bounds(q, k, v, grad_out=grad_out, **gqa)
    for name in ("query", "key", "value"):
        bound = getattr(bounds, name)
        assert_within(getattr(got, name), getattr(expected, name), bound, name)
