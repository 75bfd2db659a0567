"""Integers of any size: bounds that exclude nothing, and offsets at their limits.

The oracle compares distances with the bounds, so that its numbers stay within int64.
"""

import sys

import numpy as np
import pytest
from support.calls import message
from support.helpers import normal

import sdpa
from sdpa import _arguments, bias, blocks, reference

LARGEST = 2**60
LEAD, N_Q, N_K, D = (2, 4), 9, 11, 8

BOUNDS = [None, 0, 5, LARGEST - 4, LARGEST, LARGEST + 3, 2**62 - 1, 2**62, sys.maxsize, 2**70]
WINDOWS = [*[(left, 2) for left in BOUNDS], *[(2, right) for right in BOUNDS], (2**70, 2**70)]
OFFSETS = [None, 3, LARGEST, -LARGEST, 5 - LARGEST, np.array([LARGEST, -LARGEST]), [LARGEST, 1]]
CAUSAL = [{}, {"is_causal": True}]


def operands(rng):
    return [normal(rng, (*LEAD, n, D), np.float64) for n in (N_Q, N_K, N_K)]


def gradients_of(saved):
    return np.random.default_rng(7).standard_normal(saved.out.shape)


def assert_close(found, true):
    np.testing.assert_allclose(found, true, rtol=0, atol=1e-12)


@pytest.mark.parametrize("offset", OFFSETS, ids=str)
@pytest.mark.parametrize("causal", CAUSAL, ids=str)
def test_attention_itself(offset, causal, rng):
    x = operands(rng)
    for window in WINDOWS:
        options = {"window": window, "query_offset": offset, **causal}
        assert_close(sdpa.attention(*x, **options), reference.attention(*x, **options))


@pytest.mark.parametrize("offset", OFFSETS, ids=str)
@pytest.mark.parametrize("causal", CAUSAL, ids=str)
def test_blocks(offset, causal, rng):
    x = operands(rng)
    for window in WINDOWS:
        options = {"window": window, "query_offset": offset, **causal}
        saved = reference.attention_forward(*x, **options)
        got = blocks.attend(*x, block=4, **options)
        assert_close(got.out, saved.out)
        assert_close(got.lse, saved.lse)


@pytest.mark.parametrize("offset", OFFSETS, ids=str)
def test_gradients_of_blocks(offset, rng):
    x = operands(rng)
    for window in ((5, sys.maxsize), (LARGEST, None), (None, LARGEST - 4), (2**70, 2)):
        options = {"window": window, "query_offset": offset}
        saved = sdpa.attention_forward(*x, **options)
        grad = gradients_of(saved)
        true = reference.attention_backward(grad, *x, *saved, **options)
        got = blocks.attend_backward(grad, *x, *saved, block=4, **options)
        for name in ("query", "key", "value"):
            assert_close(getattr(got, name), getattr(true, name))


@pytest.mark.parametrize("offset", [LARGEST, -LARGEST, [LARGEST, 2]], ids=str)
def test_blocks_with_alibi(offset, rng):
    """Slopes of 0, so that distances whose neighbours float64 does not tell apart do not count."""
    x = operands(rng)
    options = {"query_offset": offset, "alibi_slopes": np.zeros(4), "window": (sys.maxsize, 3)}
    assert_close(blocks.attend(*x, block=4, **options).out, reference.attention(*x, **options))


def test_blocks_of_sequences(rng):
    x = [a[0].swapaxes(0, 1) for a in operands(rng)]
    options = {"window": (5, sys.maxsize), "query_offset": [LARGEST, -3]}
    options |= {"cu_seqlens_q": [0, 4, N_Q], "cu_seqlens_k": np.array([0, 6, N_K], np.uint8)}
    expected = sdpa.attention(*x, **options)
    assert_close(blocks.attend(*x, block=4, **options).out, expected)


def test_small_unsigned_integers_do_not_wrap(rng):
    """They become int64 before anything is subtracted from them."""
    x = operands(rng)
    for dtype in (np.uint8, np.int8, np.uint64):
        options = {"key_lengths": np.array([3, 11], dtype), "is_causal": "lower_right"}
        expected = reference.attention(*x, **options | {"key_lengths": np.array([3, 11])})
        assert_close(blocks.attend(*x, block=4, **options).out, expected)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("offset", [None, LARGEST, -LARGEST, LARGEST - 3], ids=str)
def test_shaw(window, offset, rng):
    x, rel_key = operands(rng), rng.standard_normal((5, D))
    options = {"window": window, "query_offset": offset}
    true = reference.shaw_attention_forward(*x, rel_key, **options).out
    assert_close(sdpa.shaw_attention(*x, rel_key, **options), true)


def test_shaw_with_unsigned_lengths(rng):
    x = [np.repeat(a, 30, axis=-2) for a in operands(rng)]
    rel_key = rng.standard_normal((5, D))
    true = reference.shaw_attention_forward(*x, rel_key, key_lengths=np.array([3, 200])).out
    found = sdpa.shaw_attention(*x, rel_key, key_lengths=np.array([3, 200], np.uint8))
    assert_close(found, true)


@pytest.mark.parametrize("seed", [np.int8(3), np.uint64(2**64 - 1)], ids=repr)
def test_seeds_of_shaw(seed, rng):
    x, rel_key = operands(rng), rng.standard_normal((5, D))
    options = {"dropout_p": 0.5}
    expected = sdpa.shaw_attention(*x, rel_key, rng=int(seed), **options)
    np.testing.assert_array_equal(sdpa.shaw_attention(*x, rel_key, rng=seed, **options), expected)


@pytest.mark.parametrize("offset", [LARGEST, -LARGEST, 7 - LARGEST])
@pytest.mark.parametrize("window", [None, (LARGEST + 2, 3), (3, LARGEST + 2), (2**70, 0)], ids=str)
def test_t5(offset, window, rng, monkeypatch):
    """Blocks of queries add to the offset, which is at its limit already."""
    monkeypatch.setattr(bias, "_BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(bias, "_BLOCK_ROWS", 2)
    x, table = operands(rng), rng.standard_normal((8, 4))
    options = {"window": window, "query_offset": offset}
    mask = bias.t5_relative(table, N_Q, N_K, query_offset=offset)
    np.testing.assert_array_equal(mask, reference.t5_relative(table, N_Q, N_K, query_offset=offset))
    saved = sdpa.attention_forward(*x, mask, **options)
    grad = gradients_of(saved)
    true = reference.attention_backward(
        grad, *x, *saved, attn_mask=mask, needs=("query", "attn_mask"), **options
    )
    got = bias.t5_attention_backward(grad, *x, table, *saved, **options)
    assert_close(got.query, true.query)
    by_table = bias.t5_relative_backward(true.attn_mask, len(table), query_offset=offset)
    assert_close(got.table, by_table)


def test_t5_takes_any_distance():
    table = np.random.default_rng(0).standard_normal((8, 2))
    last = bias.t5_relative(table, 3, 4, max_distance=2**63 - 1)
    np.testing.assert_array_equal(bias.t5_relative(table, 3, 4, max_distance=2**2000), last)


@pytest.mark.parametrize("window", [(2**62, 0), (sys.maxsize, 0), (2**70, 1)])
def test_a_cache_whose_window_excludes_nothing_keeps_everything(window, rng):
    cache = sdpa.KVCache(2, 4, D, capacity=N_K, window=window, dtype=np.float64)
    query, key, value = operands(rng)
    cache.append(key, value)
    np.testing.assert_array_equal(cache.lengths, N_K)
    options = {"key_lengths": cache.lengths, "query_offset": cache.query_offset}
    out = sdpa.attention(query, cache.key, cache.value, window=cache.window, **options)
    assert_close(out, reference.attention(query, key, value, window=window))
    text = message(ValueError, cache.append, key[:, :, :1], value[:, :, :1])
    assert text == (
        "key: expected at most 0 new positions of sequence 0, which keeps 11 of capacity=11, got 1"
    )


class Index:
    """An integer by its protocol alone."""

    def __index__(self):
        return 3


def test_every_kind_of_integer():
    for three in (3, np.int8(3), np.uint64(3), np.array(3), Index()):
        assert _arguments.integer("n", three) == 3
        assert type(_arguments.integer("n", three)) is int
        assert _arguments.window("window", [three, None]) == (3, None)
        assert _arguments.seed(three) == 3
    for value in (3.0, "3", None, [3], np.array([3]), np.float64(3)):
        text = message(TypeError, _arguments.integer, "n", value)
        assert text == f"n: expected an integer, got {value!r}"
    assert _arguments.integer("n", -(2**70)) == -(2**63)
    assert _arguments.integer("n", 2**70) == 2**63 - 1


def refused(exception, **options):
    """The message of a compiled function."""
    x = dict(zip(("query", "key", "value"), np.ones((3, 1, 2, 4)), strict=True))
    return message(exception, sdpa.attention, **x, **options)


def test_the_words_are_those_of_c():
    """Each reader beside the call of a compiled function that refuses the same."""
    windows = {5: TypeError, (1,): TypeError, (1.5, 0): TypeError, (-1, 2): ValueError}
    windows |= {(0, -(2**70)): ValueError, (None, "x"): TypeError, "ab": TypeError}
    for window, exception in windows.items():
        text = message(exception, _arguments.window, "window", window)
        assert text == refused(exception, window=window)
    large = np.array([1, 2**63 + 1], np.uint64)
    for value, exception in ((large, ValueError), (1.5, TypeError), (True, TypeError)):
        text = message(exception, _arguments.integers, "key_lengths", value)
        assert text == refused(exception, key_lengths=value)
    for offset in (2**60 + 1, -(2**70)):
        text = message(ValueError, _arguments.offset, "query_offset", offset)
        assert text == refused(ValueError, query_offset=offset)
    others = ", a numpy.random.Generator or None"
    for seed, exception in ((2**64, ValueError), (-1, ValueError), (True, TypeError)):
        text = message(exception, _arguments.seed, seed, others)
        assert text == refused(exception, rng=seed, dropout_p=0.5)
    assert message(TypeError, _arguments.integer, "workers", 1.5) == refused(TypeError, workers=1.5)


class Number:
    """A number by its protocol alone."""

    def __float__(self):
        return 0.5


def test_other_readers_have_the_words_of_c():
    for true in (True, np.True_):
        assert _arguments.boolean("n", true) is True
        assert _arguments.alignment(true) == "upper_left"
    for half in (0.5, np.float32(0.5), np.array(0.5), Number()):
        assert _arguments.finite("n", half) == _arguments.positive("n", half) == 0.5
        assert type(_arguments.finite("n", half)) is float
    for value in (1, "yes", None, [True], 0.0):
        text = message(TypeError, _arguments.boolean, "enable_gqa", value)
        assert text == refused(TypeError, enable_gqa=value)
    numbers = {"1": TypeError, None: TypeError, b"1": TypeError, (1.0,): TypeError, 1j: TypeError}
    numbers |= {np.nan: ValueError, -np.inf: ValueError, 10**400: ValueError}
    for value, exception in numbers.items():
        for read in (_arguments.finite, _arguments.positive):
            text = message(exception, read, "dropout_p", value)
            assert text == refused(exception, dropout_p=value)
    for value in (0, -1.0):
        text = message(ValueError, _arguments.positive, "softcap", value)
        assert text == f"softcap: expected a number above 0, got {value!r}"
    assert _arguments.positive("eps", 5e-324) == 5e-324
    text = message(ValueError, _arguments.rotary_base, "base", 5e-324)
    assert text == "base: expected a number above 0 with a finite reciprocal, got 5e-324"
    corners = {1: TypeError, None: TypeError, "none": ValueError, "lower": ValueError}
    for value, exception in corners.items():
        text = message(exception, _arguments.alignment, value)
        assert text == refused(exception, is_causal=value)
    assert _arguments.alignment("lower_right") == "lower_right"
    assert _arguments.alignment(False) == "none"
    stages = "scores", "capped", "biased", "weights"
    x = np.ones((2, 2))
    for value, exception in (("softmax", ValueError), (["scores"], TypeError), (None, TypeError)):
        text = message(exception, _arguments.choice, "stage", value, stages)
        assert text == message(exception, sdpa.attention_weights, x, x, stage=value)
    assert _arguments.choice("stage", "biased", stages) == "biased"


def test_an_empty_list_is_integers(rng):
    """NumPy makes it an array of float64, and takes it as an index."""
    q, k = normal(rng, (2, 4, 5, 8), np.float32), normal(rng, (2, 4, 7, 8), np.float32)
    assert sdpa.attention_weights(q, k, queries=[]).shape == (2, 4, 0, 7)
    assert sdpa.attention_weights(q, k, heads=[]).shape == (2, 0, 5, 7)
    received = sdpa.attention_received(q, k, queries=[])
    np.testing.assert_array_equal(received[0], np.zeros((2, 4, 7)))
    none = sdpa.attention(q[:0], k[:0], k[:0], key_lengths=[], query_offset=[], is_causal=True)
    assert none.shape == (0, 4, 5, 8)
