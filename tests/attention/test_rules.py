"""Small rules of attention that stand once, against the compiled functions and other libraries."""

import importlib

import numpy as np
import pytest
from support.helpers import assert_same_bits

import sdpa
from sdpa import _arguments, _arrays


@pytest.mark.parametrize("d_k", [0, 1, 2, 3, 7, 64, 1000])
def test_default_scale(rng, d_k):
    query, key, value = (rng.standard_normal((3, n)) for n in (d_k, d_k, 2))
    assert_same_bits(
        sdpa.attention(query, key, value, scale=_arguments.default_scale(d_k)),
        sdpa.attention(query, key, value),
    )
    assert _arguments.default_scale(d_k) == 1 / np.sqrt(max(d_k, 1))


@pytest.mark.parametrize("key_lengths", [None, np.array([4, 0, 7])])
def test_diagonal_offset(rng, key_lengths):
    query, key, value = (rng.standard_normal((3, 2, n, 4)) for n in (5, 7, 7))
    offset = _arguments.diagonal_offset(5, 7, key_lengths)
    assert_same_bits(
        sdpa.attention(
            query, key, value, is_causal=True, query_offset=offset, key_lengths=key_lengths
        ),
        sdpa.attention(query, key, value, is_causal="lower_right", key_lengths=key_lengths),
    )


@pytest.mark.parametrize("as_array", [np.array, list, tuple])
def test_sequences(rng, as_array):
    cu = [0, 3, 3, 8], [0, 2, 6, 7]
    query, key, value = (rng.standard_normal((n, 2, 4)) for n in (8, 7, 7))
    whole = sdpa.attention(query, key, value, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1])
    found = list(_arguments.sequences(*map(as_array, cu)))
    assert found == [
        (slice(0, 3), slice(0, 2)),
        (slice(3, 3), slice(2, 6)),
        (slice(3, 8), slice(6, 7)),
    ]
    for rows, keys in found:
        own = (x.swapaxes(0, 1) for x in (query[rows], key[keys], value[keys]))
        np.testing.assert_allclose(sdpa.attention(*own).swapaxes(0, 1), whole[rows], atol=1e-13)
    with pytest.raises(ValueError, match="longer"):
        list(_arguments.sequences([0, 1], [0, 1, 2]))


def test_heads_are_repeated_and_summed(rng):
    query, key, value, grad = (
        rng.standard_normal((2, heads, n, 4)) for heads, n in ((6, 5), (3, 7), (3, 7), (6, 5))
    )
    saved = sdpa.attention_forward(query, key, value, enable_gqa=True)
    repeated = [_arrays.repeat_heads(x, 6) for x in (key, value)]
    own = sdpa.attention_forward(query, *repeated)
    assert_same_bits(own.out, saved.out)
    of_copies = sdpa.attention_backward(grad, query, *repeated, *own)
    whole = sdpa.attention_backward(grad, query, key, value, *saved, enable_gqa=True)
    summed = _arrays.sum_heads(of_copies.key, 3)
    np.testing.assert_allclose(summed, whole.key, atol=1e-14)
    # <repeat(x), y> = <x, sum(y)>
    assert np.isclose((repeated[0] * of_copies.key).sum(), (key * summed).sum())


@pytest.mark.parametrize("shape", [(0, 7, 4), (2, 0, 7, 4), (1, 7, 4), (4, 7, 4), (7, 4)])
def test_heads_of_unusual_numbers(shape):
    """No head, one head, and no axis of heads, for as many query heads as they divide."""
    x = np.ones(shape)
    if len(shape) < 3:
        assert _arrays.repeat_heads(x, 4) is x
        return
    heads = shape[-3]
    for n in (0, heads, 3 * heads):
        repeated = _arrays.repeat_heads(x, n)
        assert repeated.shape[-3] == n
        assert _arrays.sum_heads(repeated, heads).shape == shape


@pytest.mark.parametrize(
    ("library", "array", "repeat"),
    [
        ("torch", "tensor", "repeat_interleave"),
        ("jax.numpy", "array", "repeat"),
        ("autograd.numpy", "array", "repeat"),
    ],
)
def test_other_libraries(library, array, repeat):
    """Their arrays go through the same functions."""
    try:
        module = importlib.import_module(library)
    except ImportError:
        pytest.skip(f"needs {library}: pip install '.[peers]'")
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    theirs = getattr(module, array)(x)
    repeated = _arrays.repeat_heads(theirs, 4, getattr(module, repeat))
    np.testing.assert_array_equal(np.asarray(repeated), np.repeat(x, 2, axis=0))
    np.testing.assert_array_equal(np.asarray(_arrays.sum_heads(repeated, 2)), 2 * x)
    found = _arrays.softcapped(theirs, 3.0, module.tanh)
    for own, other in zip(_arrays.softcapped(x, 3.0), found, strict=True):
        np.testing.assert_allclose(np.asarray(other), own, atol=1e-6)
    assert list(_arguments.sequences(getattr(module, array)([0, 2, 5]))) == [
        (slice(0, 2),),
        (slice(2, 5),),
    ]


def test_slope_of_softcap(rng):
    scores, step = 5 * rng.standard_normal(50), 1e-6
    _, slope = _arrays.softcapped(scores, 2.0)
    ends = (_arrays.softcapped(scores + by, 2.0)[0] for by in (step, -step))
    np.testing.assert_allclose(slope, np.subtract(*ends) / (2 * step), atol=1e-8)
