"""Dropout: a fixed function of (seed, batch, head, i, j), the same in all functions that use it."""

import numpy as np
import pytest
from support.helpers import normal

import sdpa
from sdpa import _philox
from sdpa.reference.logits import dropout_factors, philox4x32

pytestmark = pytest.mark.usefixtures("isa")

SEED = 2**60 + 12345


def kept(n_batch, heads, n_q, n_k, p, seed=SEED, dtype=np.float32):
    """The mask of weights that attention_weights keeps, with equal scores."""
    zero = np.zeros((n_batch, heads, n_q, 1), dtype), np.zeros((n_batch, heads, n_k, 1), dtype)
    return sdpa.attention_weights(*zero, dropout_p=p, rng=seed) != 0


def test_known_answers():
    """The block of counter 0 and key 0 in Random123's kat_vectors holds words of pairs 0 .. 3."""
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [int(word) for word in philox4x32((0, 0, 0, 0), (0, 0))] == words
    for word in words:
        at, above = (kept(1, 1, 1, 4, p, seed=0) for p in (word / 2**32, (word + 1) / 2**32))
        np.testing.assert_array_equal(at[0, 0, 0], [w >= word for w in words])
        np.testing.assert_array_equal(above[0, 0, 0], [w > word for w in words])


@pytest.mark.parametrize("seed", [0, 1, 2**32, SEED, 2**64 - 1])
def test_pattern_is_that_of_its_definition(dtype, seed):
    shape = (3, 2, 130, 261)
    expected = dropout_factors(shape, 0.37, seed) != 0
    np.testing.assert_array_equal(kept(*shape, 0.37, seed, dtype), expected)


@pytest.mark.parametrize("p", [0.0, 0.37, 1.0])
@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (2, 2, 3)])
@pytest.mark.parametrize("seed", [0, SEED, 2**64 - 1])
def test_factors_of_a_block_are_those_of_the_oracle(lead, p, seed, dtype):
    """The package's own NumPy implementation shares no code with the oracle."""
    whole = dropout_factors((*lead, 9, 23), p, seed).astype(dtype)
    for i, j, n_q, n_k in ((0, 0, 9, 23), (0, 0, 1, 1), (5, 4, 3, 8), (2, 7, 7, 9), (8, 22, 1, 1)):
        block = _philox.dropout_factors((*lead, n_q, n_k), p, seed, (i, j), dtype)
        assert block.dtype == dtype
        np.testing.assert_array_equal(block, whole[..., i : i + n_q, j : j + n_k])


def test_pattern_does_not_depend_on_the_lengths():
    large = kept(3, 4, 200, 300, 0.5)
    for n_batch, heads, n_q, n_k in ((1, 1, 1, 1), (2, 3, 7, 130), (3, 4, 97, 5)):
        small = kept(n_batch, heads, n_q, n_k, 0.5)
        np.testing.assert_array_equal(small, large[:n_batch, :heads, :n_q, :n_k])


@pytest.mark.parametrize("p", [0.02, 0.1, 0.5, 0.9])
def test_share_that_is_kept(p):
    """Shares over everything, seeds, heads and rows are binomial, to five standard deviations."""
    n = 300
    patterns = np.stack([kept(2, 2, n, n, p, seed) for seed in (1, 2)])
    sigma = np.sqrt(p * (1 - p))
    for axis in (None, (1, 2, 3, 4), (0, 1, 3, 4), (0, 1, 2, 4), (0, 1, 2, 3)):
        share = patterns.mean(axis=axis)
        count = patterns.size / share.size
        assert np.abs(share - (1 - p)).max() < 5 * sigma / np.sqrt(count)
    # Neighbours in any direction are independent.
    x = (patterns - (1 - p)) / sigma
    for axis in range(x.ndim):
        a = np.take(x, range(x.shape[axis] - 1), axis) * np.take(x, range(1, x.shape[axis]), axis)
        assert abs(a.mean()) < 5 / np.sqrt(a.size)


def arguments(rng, dtype, n=40):
    """query, key, value, and a direction for each; d_v = n, so that a value may be the identity."""
    shapes = ((2, 3, n, 8), (2, 3, n, 8), (2, 3, n, n))
    return [normal(rng, shape, dtype) for _ in range(2) for shape in shapes]


def test_same_pattern_everywhere(rng, dtype):
    """A dropped pair contributes to no derivative."""
    q, k, v, a, b, c = arguments(rng, dtype)
    n = v.shape[-1]
    one = np.broadcast_to(np.eye(n, dtype=dtype), v.shape)
    options = {"dropout_p": 0.4, "rng": SEED}
    pattern = sdpa.attention_weights(q, k, **options) != 0
    assert 0.4 < pattern.mean() < 0.8
    out, lse = sdpa.attention_forward(q, k, one, **options)
    # Weights may round to 0 in float16, so this checks "0 where dropped", not the reverse.
    results = {"forward": out}
    grads = sdpa.attention_backward(one, q, k, one, out, lse, **options)
    results["gradient of value"] = grads.value.swapaxes(-1, -2)
    results["forward mode"] = sdpa.attention_jvp(q, k, v, None, None, one, **options).out_t
    out, lse = sdpa.attention_forward(q, k, v, **options)
    second = sdpa.attention_double_backward(a, b, c, one, q, k, v, out, lse, **options)
    results["second derivative by value"] = second.value.swapaxes(-1, -2)
    for name, result in results.items():
        assert (result[~pattern] == 0).all(), name
        assert (result[pattern] != 0).mean() > 0.9, name


def everything(x, **options):
    q, k, v, a, b, c = x
    out, lse = sdpa.attention_forward(q, k, v, **options)
    yield from (out, lse, sdpa.attention_weights(q, k, **options))
    yield from sdpa.attention_backward(c, q, k, v, out, lse, **options)[:3]
    yield from sdpa.attention_jvp(q, k, v, a, b, c, **options)
    yield from sdpa.attention_double_backward(a, b, c, v, q, k, v, out, lse, **options)[:4]


def test_workers_change_no_bit(rng, dtype):
    x = arguments(rng, dtype, 150)
    options = {"dropout_p": 0.3, "rng": SEED, "is_causal": True}
    one = [y.tobytes() for y in everything(x, **options, workers=1)]
    for workers in (2, 3, 5):
        assert [y.tobytes() for y in everything(x, **options, workers=workers)] == one


def test_probability_0_is_no_dropout(rng, dtype):
    x = arguments(rng, dtype)
    for a, b in zip(everything(x), everything(x, dropout_p=0.0, rng=SEED), strict=True):
        assert a.tobytes() == b.tobytes()


def test_probability_1_drops_everything(rng, dtype):
    """Only lse is left, and the gradient through it."""
    x = arguments(rng, dtype)
    names = ["out", "lse", "weights", "query", "key", "value", "out", "out_t"]
    names += ["grad_out", "query", "key", "value"]
    lse = sdpa.attention_forward(*x[:3]).lse
    results = zip(names, everything(x, dropout_p=1.0, rng=SEED), strict=True)
    for name, result in results:
        np.testing.assert_array_equal(result, lse if name == "lse" else 0, err_msg=name)
    q, k, v = x[:3]
    zero, g_lse = np.zeros_like(v), np.ones_like(lse)
    # Invariant calls go one way with and without dropout; others would differ by rounding.
    through_lse = [
        sdpa.attention_backward(
            zero, q, k, v, zero, lse, grad_lse=g_lse, invariant=True, **options
        ).query
        for options in ({}, {"dropout_p": 1.0, "rng": SEED})
    ]
    assert through_lse[0].any()
    np.testing.assert_array_equal(*through_lse)
