"""Integers of any size and kind in sdpa.interop.jax, whose own have 32 bits or 64."""

import sys
import warnings

import numpy as np
import pytest
from support.calls import message

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    jax = pytest.importorskip("jax", reason="needs jax: pip install '.[peers]'")

import jax.numpy as jnp
from support.in_jax import enabled_x64

import sdpa
from sdpa.interop import jax as interop
from sdpa.interop.jax import _attention, _formula

Q = jnp.ones((2, 3, 4))


@pytest.fixture(params=[False, True], ids=["32 bits", "64 bits"], autouse=True)
def x64(request):
    with enabled_x64(request.param):
        yield request.param


@pytest.fixture
def x(rng):
    shapes = [(2, 3, n, 4) for n in (6, 7, 7)]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


class Index:
    def __index__(self):
        return 2


INTEGERS = {
    "window": {"window": (5, sys.maxsize)},
    "window beyond int64": {"window": (2**70, 1)},
    "window beyond int32": {"window": (2**40, 1)},
    "window by protocol": {"window": (Index(), 0)},
    "workers beyond int64": {"workers": 2**70},
    "workers beyond int32": {"workers": 2**40},
    "offset": {"query_offset": -(2**60), "is_causal": True},
    "offset of 32 bits": {"query_offset": 2**31 - 1, "is_causal": True},
    "unsigned offset": {"query_offset": np.uint32(2**32 - 1), "is_causal": True},
    "offsets beyond int32": {"query_offset": np.array([2**40 + 3, -(2**40)]), "is_causal": True},
    "offset and window": {"query_offset": 2**40, "window": (2**40 - 2, 0)},
    "another offset and window": {"query_offset": [-(2**60), 1], "window": (1, 2**60 - 3)},
    "seed of NumPy": {"dropout_p": 0.5, "rng": np.int64(3)},
    "seed by protocol": {"dropout_p": 0.5, "rng": Index()},
}


@pytest.mark.parametrize("case", INTEGERS)
def test_integers_as_in_the_function_on_arrays(case, x):
    expected = sdpa.attention(*x, **INTEGERS[case])
    np.testing.assert_array_equal(interop.attention(*x, **INTEGERS[case]), expected)


@pytest.mark.parametrize("offset", [2**32 - 1, 2**31, 2])
def test_traced_unsigned_offsets_do_not_wrap(offset, x):
    f = jax.jit(lambda n: interop.attention(*x, query_offset=n, is_causal=True))
    expected = sdpa.attention(*x, query_offset=offset, is_causal=True)
    np.testing.assert_array_equal(f(np.uint32(offset)), expected)


def test_alibi_needs_offsets_that_jax_has(x, x64):
    options = {"query_offset": np.array([1, 2**40]), "alibi_slopes": np.ones(3, np.float32)}
    if x64:
        expected = sdpa.attention(*x, **options)
        np.testing.assert_array_equal(interop.attention(*x, **options), expected)
        return
    assert message(ValueError, interop.attention, *x, **options) == (
        f"query_offset: expected integers of 32 bits with alibi_slopes, got {2**40}; "
        "jax_enable_x64 gives 64"
    )


@pytest.mark.parametrize("name", ["key_lengths", "query_offset"])
def test_integers_beyond_int64_are_refused_as_in_the_function_on_arrays(name, x):
    expected = message(ValueError, sdpa.attention, *x, **{name: -(2**70)})
    assert message(ValueError, interop.attention, *x, **{name: -(2**70)}) == expected


def test_known_lengths_beside_traced_sequences_are_not_cut_to_32_bits():
    lengths = np.array([1, 2**32 + 1])
    f = jax.jit(
        lambda n: interop.attention(Q, Q, Q, cu_seqlens_q=n, cu_seqlens_k=n, key_lengths=lengths)
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="key_lengths: expected integers from 0"):
        f(jnp.array([0, 1, 2])).block_until_ready()


# ------------------------------------------------------------------------------------- the formula

BAND = {
    "causal": {"is_causal": True},
    "window beyond int32": {"window": (2**40, 1)},
    "window of 62 bits": {"window": (2**62 - 1, 1)},
    "left": {"window": (2**31 + 1, None)},
    "left of 31 bits": {"window": (2**31 - 3, 2)},
    "right": {"window": (2, 2**31 - 2)},
    "right beyond int32": {"window": (None, 2**31 + 2)},
}
OFFSETS = [None, 2**31 - 1, -(2**31), 2, [2**31 - 1, -(2**31)], [2**31 - 2, 1], [-(2**31) + 3, 0]]


@pytest.mark.parametrize("offset", OFFSETS, ids=str)
@pytest.mark.parametrize("options", BAND.values(), ids=BAND)
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_the_formula_sees_what_the_kernel_sees(options, offset, alibi, packed, x, monkeypatch):
    """Third derivatives use the formula; its output is that of the primitive on equal operands."""
    calls = []

    def noted(named, options):
        calls.append((named, options))
        return forward(named, options)

    forward = _attention.FORWARD
    monkeypatch.setattr(_attention, "FORWARD", noted)
    if alibi:  # slopes of 0, because distances of 2^31 leave no digits for scores in float32
        options = options | {"alibi_slopes": jnp.zeros(3)}
    if packed:
        x = [a[0].swapaxes(0, 1) for a in x]
        options = options | {"cu_seqlens_q": [0, 2, 6], "cu_seqlens_k": [0, 5, 7]}
    offset = offset if offset is None else jnp.asarray(offset, jnp.int32)
    out = interop.attention(*x, query_offset=offset, **options)
    (call,) = calls
    np.testing.assert_allclose(_formula.attention(*call), out, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------------- jax.nn's own function


@pytest.fixture
def plain(rng):
    return jnp.asarray(rng.standard_normal((2, 9, 3, 4)).astype(np.float32))


@pytest.mark.parametrize(
    "width", [np.int64(3), np.int8(3), Index()], ids=["int64", "int8", "protocol"]
)
def test_the_size_of_a_local_window_is_any_integer(width, plain):
    n = width.__index__()
    expected = interop.dot_product_attention(plain, plain, plain, local_window_size=(n, n))
    found = interop.dot_product_attention(plain, plain, plain, local_window_size=width)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("width", [2**70, (sys.maxsize, 2**62)], ids=str)
def test_a_local_window_that_excludes_nothing(width, plain):
    found = interop.dot_product_attention(plain, plain, plain, local_window_size=width)
    np.testing.assert_array_equal(found, interop.dot_product_attention(plain, plain, plain))


REFUSED = {
    "window": ({"local_window_size": 2.0}, "local_window_size: expected an integer, got 2.0"),
    "three bounds": (
        {"local_window_size": (1, 2, 3)},
        "local_window_size: expected a pair (left, right), got (1, 2, 3)",
    ),
    "negative window": (
        {"local_window_size": -1},
        "local_window_size: expected bounds of at least 0, or None for no bound, got (-1, -1)",
    ),
    "lengths": (
        {"key_value_seq_lengths": np.array([3, -1])},
        "key_value_seq_lengths: expected integers from 0 to S = 9, got -1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, plain):
    options, expected = REFUSED[case]
    with pytest.raises((TypeError, ValueError)) as caught:
        interop.dot_product_attention(plain, plain, plain, **options)
    assert str(caught.value) == expected


def test_long_lengths(plain):
    """They are not cut to 32 bits: a query's may be beyond its rows, a key's are refused."""
    lengths = np.array([3, 2**32 + 4])
    found = interop.dot_product_attention(plain, plain, plain, query_seq_lengths=lengths)
    expected = interop.dot_product_attention(
        plain, plain, plain, query_seq_lengths=np.array([3, 9])
    )
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(ValueError, match="key_value_seq_lengths: expected integers from 0 to S"):
        interop.dot_product_attention(plain, plain, plain, key_value_seq_lengths=lengths)
