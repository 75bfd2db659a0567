"""What the functions on attention refuse: one test per input, message included."""

import gc
import inspect
import sys

import ml_dtypes
import numpy as np
import pytest
from calls import F32, FLOATS, backward_operands, message, ones, operands
from helpers import BFLOAT16, LAYOUTS

import sdpa
from sdpa import _core


def read_only(*shape):
    x = ones(*shape)
    x.flags.writeable = False
    return x


GQA = "; enable_gqa=True lets groups of query heads share a key head"
BROADCAST = "attn_mask: expected a shape that broadcasts to (2, 4, 5, 7), got "
INTEGER_MASK = (
    "attn_mask: expected bool (True = attend) or, to be added to the scores, float32, got {}; "
    "write attn_mask != 0 for a mask of ones and zeros, attn_mask.astype(query.dtype) for a bias"
)
CAUSAL = "is_causal: expected False, True, 'upper_left' or 'lower_right', got "
PER_ENTRY = "expected one integer, or a shape that broadcasts to the axes before heads, (2,), got "

# (exception, message, what differs from operands())
REFUSED = {
    "query axes": (
        ValueError,
        "query: expected at least two axes, (..., Lq, d_k), got (8,)",
        {"query": ones(8)},
    ),
    "key axes": (
        ValueError,
        "key: expected at least two axes, (..., Lk, d_k), got ()",
        {"key": F32(1)},
    ),
    "value axes": (
        ValueError,
        "value: expected at least two axes, (..., Lk, d_v), got (3,)",
        {"value": ones(3)},
    ),
    "d_k": (
        ValueError,
        "key: expected (..., 7, 8) to match query's last axis 8, got (..., 7, 6)",
        {"key": ones(2, 4, 7, 6)},
    ),
    "Lk": (
        ValueError,
        "value: expected (..., 7, 3) to match key's rows 7, got (..., 6, 3)",
        {"value": ones(2, 4, 6, 3)},
    ),
    "key batch": (
        ValueError,
        "key: expected leading axes that broadcast with (2, 4), got (3, 4)",
        {"key": ones(3, 4, 7, 8)},
    ),
    "value batch": (
        ValueError,
        "value: expected leading axes that broadcast with (2, 4), got (3, 1)",
        {"value": ones(3, 1, 7, 3)},
    ),
    "key heads": (
        ValueError,
        "key: expected leading axes that broadcast with (2, 4), got (2, 3)",
        {"key": ones(2, 3, 7, 8)},
    ),
    "groups not enabled": (
        ValueError,
        "key: expected leading axes that broadcast with (2, 4), got (2, 2)" + GQA,
        {"key": ones(2, 2, 7, 8)},
    ),
    "groups do not divide": (
        ValueError,
        "key: expected a number of heads that divides query's 4, got (2, 3, 7, 8)",
        {"key": ones(2, 3, 7, 8), "value": ones(2, 3, 7, 3), "enable_gqa": True},
    ),
    "no key heads": (
        ValueError,
        "key: expected a number of heads that divides query's 4, got (2, 0, 7, 8)",
        {"key": ones(2, 0, 7, 8), "value": ones(2, 0, 7, 3), "enable_gqa": True},
    ),
    "fewer query than key heads": (
        ValueError,
        "key: expected a number of heads that divides query's 1, got (2, 4, 7, 8)",
        {"query": ones(2, 1, 5, 8), "enable_gqa": True},
    ),
    "value heads": (
        ValueError,
        "value: expected key's number of heads, 2, got (2, 4, 7, 3)",
        {"key": ones(2, 2, 7, 8), "enable_gqa": True},
    ),
    "int64": (
        TypeError,
        f"query: expected {FLOATS}, got int64",
        {"query": ones(2, 4, 5, 8, dtype=np.int64)},
    ),
    "bool": (TypeError, f"query: expected {FLOATS}, got bool", {"query": ones(5, 8, dtype=bool)}),
    "complex": (
        TypeError,
        f"key: expected {FLOATS}, got complex64",
        {"key": ones(2, 4, 7, 8, dtype=np.complex64)},
    ),
    "longdouble": (
        TypeError,
        f"value: expected {FLOATS}, got {np.dtype(np.longdouble)}",
        {"value": ones(2, 4, 7, 3, dtype=np.longdouble)},
    ),
    "object": (TypeError, f"query: expected {FLOATS}, got object", {"query": [[None]]}),
    "string": (TypeError, f"key: expected {FLOATS}, got <U3", {"key": [["abc"]]}),
    "another 2-byte type": (
        TypeError,
        f"query: expected {FLOATS}, got [('x', '<i2')]",
        {"query": np.zeros((5, 8), [("x", "<i2")])},
    ),
    "float8": (
        TypeError,
        f"query: expected {FLOATS}, got float8_e4m3",
        {"query": ones(5, 8, dtype=ml_dtypes.float8_e4m3)},
    ),
    "key dtype": (
        TypeError,
        "key: expected query's dtype float32, got float64",
        {"key": ones(2, 4, 7, 8, dtype=np.float64)},
    ),
    "value dtype": (
        TypeError,
        "value: expected query's dtype float32, got bfloat16",
        {"value": ones(2, 4, 7, 3, dtype=BFLOAT16)},
    ),
    "mask batch": (ValueError, BROADCAST + "(3, 1, 5, 7)", {"attn_mask": ones(3, 1, 5, 7)}),
    "mask heads": (ValueError, BROADCAST + "(2, 5, 7)", {"attn_mask": ones(2, 5, 7)}),
    "mask rows": (ValueError, BROADCAST + "(4, 7)", {"attn_mask": ones(4, 7)}),
    "mask columns": (ValueError, BROADCAST + "(5, 8)", {"attn_mask": ones(5, 8)}),
    "mask axes": (ValueError, BROADCAST + "(1, 2, 4, 5, 7)", {"attn_mask": ones(1, 2, 4, 5, 7)}),
    "int64 mask": (
        TypeError,
        INTEGER_MASK.format("int64"),
        {"attn_mask": ones(5, 7, dtype=np.int64)},
    ),
    "uint8 mask": (
        TypeError,
        INTEGER_MASK.format("uint8"),
        {"attn_mask": ones(5, 7, dtype=np.uint8)},
    ),
    "float64 mask": (
        TypeError,
        "attn_mask: expected bool, float32 or query's dtype float32, got float64",
        {"attn_mask": ones(5, 7, dtype=np.float64)},
    ),
    "float16 mask": (
        TypeError,
        "attn_mask: expected bool, float32 or query's dtype float32, got float16",
        {"attn_mask": ones(5, 7, dtype=np.float16)},
    ),
    "dropout above 1": (
        ValueError,
        "dropout_p: expected a probability from 0 to 1, got 1.5",
        {"dropout_p": 1.5},
    ),
    "negative dropout": (
        ValueError,
        "dropout_p: expected a probability from 0 to 1, got -0.1",
        {"dropout_p": -0.1},
    ),
    "dropout nan": (
        ValueError,
        "dropout_p: expected a finite number, got nan",
        {"dropout_p": np.nan},
    ),
    "alignment": (ValueError, CAUSAL + "'upper'", {"is_causal": "upper"}),
    "is_causal 1": (TypeError, CAUSAL + "1", {"is_causal": 1}),
    "is_causal None": (TypeError, CAUSAL + "None", {"is_causal": None}),
    "scale nan": (ValueError, "scale: expected a finite number, got nan", {"scale": np.nan}),
    "scale inf": (ValueError, "scale: expected a finite number, got -inf", {"scale": -np.inf}),
    "scale beyond": (
        ValueError,
        "scale: expected a finite number, got an integer beyond float64",
        {"scale": 10**400},
    ),
    "scale text": (TypeError, "scale: expected a finite number, got 'x'", {"scale": "x"}),
    "scale complex": (TypeError, "scale: expected a finite number, got 1j", {"scale": 1j}),
    "enable_gqa 1": (TypeError, "enable_gqa: expected True or False, got 1", {"enable_gqa": 1}),
    "window number": (TypeError, "window: expected a pair (left, right), got 3", {"window": 3}),
    "window text": (TypeError, "window: expected a pair (left, right), got 'ab'", {"window": "ab"}),
    "window of one": (
        TypeError,
        "window: expected a pair (left, right), got (1,)",
        {"window": (1,)},
    ),
    "window float": (TypeError, "window: expected an integer, got 0.5", {"window": (0.5, 1)}),
    "negative window": (
        ValueError,
        "window: expected bounds of at least 0, or None for no bound, got (0, -1)",
        {"window": (0, -1)},
    ),
    "long key": (
        ValueError,
        "key_lengths: expected integers from 0 to Lk = 7, got 8",
        {"key_lengths": 8},
    ),
    "long keys": (
        ValueError,
        "key_lengths: expected integers from 0 to Lk = 7, got -1",
        {"key_lengths": [7, -1]},
    ),
    "huge key": (
        ValueError,
        "key_lengths: expected integers from 0 to Lk = 7, got 9223372036854775807",
        {"key_lengths": 2**70},
    ),
    "uint64 keys": (
        ValueError,
        "key_lengths: expected integers below 2^63, got 18446744073709551615",
        {"key_lengths": np.array([1, 2**64 - 1], np.uint64)},
    ),
    "float keys": (
        TypeError,
        "key_lengths: expected integers, got float64",
        {"key_lengths": [1.0, 2.0]},
    ),
    "bool keys": (TypeError, "key_lengths: expected integers, got bool", {"key_lengths": True}),
    "key_lengths shape": (
        ValueError,
        f"key_lengths: {PER_ENTRY}(3,)",
        {"key_lengths": [1, 2, 3]},
    ),
    "key_lengths per head": (
        ValueError,
        f"key_lengths: {PER_ENTRY}(2, 4)",
        {"key_lengths": ones(2, 4, dtype=np.int32)},
    ),
    "far offset": (
        ValueError,
        f"query_offset: expected integers from -2^60 to 2^60, got {2**60 + 1}",
        {"query_offset": 2**60 + 1},
    ),
    "far offsets": (
        ValueError,
        f"query_offset: expected integers from -2^60 to 2^60, got {-(2**60) - 1}",
        {"query_offset": [0, -(2**60) - 1]},
    ),
    "offset float": (
        TypeError,
        "query_offset: expected integers, got float64",
        {"query_offset": 1.0},
    ),
    "offset shape": (
        ValueError,
        f"query_offset: {PER_ENTRY}(1, 2)",
        {"query_offset": [[1, 2]]},
    ),
    "two offsets": (
        ValueError,
        "query_offset: expected None with is_causal='lower_right', which sets the offset itself",
        {"query_offset": 0, "is_causal": "lower_right"},
    ),
    "no workers": (
        ValueError,
        "workers: expected None, -1 (all CPUs) or at least 1, got 0",
        {"workers": 0},
    ),
    "workers -2": (
        ValueError,
        "workers: expected None, -1 (all CPUs) or at least 1, got -2",
        {"workers": -2},
    ),
    "workers float": (TypeError, "workers: expected an integer, got 1.0", {"workers": 1.0}),
    "temperature": (
        TypeError,
        "attention() got an unknown argument 'temperature'; known are: query, key, value, "
        "attn_mask, dropout_p, is_causal, scale, enable_gqa, softcap, window, sinks, alibi_slopes, "
        "key_lengths, query_offset, rng, workers, out",
        {"temperature": 1.0},
    ),
    "mask": (
        TypeError,
        "attention() got an unknown argument 'mask'; did you mean 'attn_mask'?",
        {"mask": None},
    ),
    "causal": (
        TypeError,
        "attention() got an unknown argument 'iscausal'; did you mean 'is_causal'?",
        {"iscausal": True},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    exception, expected, differences = REFUSED[case]
    assert message(exception, sdpa.attention, **(operands() | differences)) == expected


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_the_other_functions_too(case):
    """The same checks, whatever the function; names of functions and of what each takes differ."""
    exception, expected, differences = REFUSED[case]
    if "unknown argument" in expected:
        expected = expected.split("()")[1].split("known are")[0]
    x = operands() | differences
    assert expected in message(exception, sdpa.attention_forward, **x)
    backward = backward_operands() | differences
    assert expected in message(exception, sdpa.attention_backward, **backward)
    if "value" not in differences and "value" not in expected:
        del x["value"]
        assert expected in message(exception, sdpa.attention_weights, **x)
    torch = inspect.signature(sdpa.scaled_dot_product_attention).parameters
    if set(differences) <= set(torch):
        x = operands() | differences
        assert expected in message(exception, sdpa.scaled_dot_product_attention, **x)


def aligned_by_one(*shape):
    return LAYOUTS["unaligned"](ones(*shape))


REFUSED_OUT = {
    "list": (TypeError, "out: expected a numpy.ndarray, got <class 'list'>", lambda: [1.0]),
    "shape": (
        ValueError,
        "out: expected shape (2, 4, 5, 3), got (2, 4, 5, 8)",
        lambda: ones(2, 4, 5, 8),
    ),
    "axes": (ValueError, "out: expected shape (2, 4, 5, 3), got (5, 3)", lambda: ones(5, 3)),
    "dtype": (
        ValueError,
        "out: expected dtype float32 in native byte order, got float64",
        lambda: ones(2, 4, 5, 3, dtype=float),
    ),
    "byte order": (
        ValueError,
        "out: expected dtype float32 in native byte order, got >f4",
        lambda: ones(2, 4, 5, 3, dtype=">f4"),
    ),
    "read-only": (
        ValueError,
        "out: expected a writable array, got a read-only one",
        lambda: read_only(2, 4, 5, 3),
    ),
    "unaligned": (
        ValueError,
        "out: expected an aligned array, got an unaligned one",
        lambda: aligned_by_one(2, 4, 5, 3),
    ),
    "itself": (
        ValueError,
        "out: expected elements that do not share memory, got strides (60, 0, 12, 4) for shape "
        "(2, 4, 5, 3)",
        lambda: np.lib.stride_tricks.as_strided(ones(2, 1, 5, 3), (2, 4, 5, 3), (60, 0, 12, 4)),
    ),
    "sliding": (
        ValueError,
        "out: expected elements that do not share memory, got strides (80, 20, 4, 4) for shape "
        "(2, 4, 5, 3)",
        lambda: np.lib.stride_tricks.as_strided(ones(60), (2, 4, 5, 3), (80, 20, 4, 4)),
    ),
}


@pytest.mark.parametrize("case", REFUSED_OUT)
def test_refused_out(case):
    exception, expected, make = REFUSED_OUT[case]
    for function in (sdpa.attention, sdpa.attention_forward):
        assert message(exception, function, **operands(), out=make()) == expected


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask"])
def test_out_that_overlaps_an_input_is_refused(name):
    buffer = np.ones(200, F32)
    out = buffer[99:].reshape(-1)[:30].reshape(5, 6)
    x = {"query": ones(5, 6), "key": ones(5, 6), "value": ones(5, 6), "attn_mask": ones(5, 5)}
    size = x[name].size
    x[name] = buffer[100 - size :][:size].reshape(x[name].shape)  # its last element is out's first
    expected = f"out: expected memory of its own, got an array that overlaps {name}"
    assert message(ValueError, sdpa.attention, **x, out=out) == expected
    x[name] = buffer[99 - size :][:size].reshape(x[name].shape)
    sdpa.attention(**x, out=out)


def test_nothing_is_written_when_a_call_is_refused():
    for exception, _, differences in REFUSED.values():
        out = np.full((2, 4, 5, 3), 7, F32)
        message(exception, sdpa.attention, **(operands() | differences), out=out)
        assert (out == 7).all()
    out = np.full((2, 4, 5, 3), 7, F32)
    _core._alloc_fail_after(0)
    try:
        message(MemoryError, sdpa.attention, **operands(), out=out)
    finally:
        _core._alloc_fail_after(-1)
    assert (out == 7).all()


@pytest.mark.parametrize(
    "call",
    [
        lambda: sdpa.attention(**operands()),
        lambda: sdpa.attention_backward(**backward_operands()),
        lambda: sdpa.attention_weights(ones(5, 8), ones(7, 8)),
        lambda: sdpa.merge_attention([ones(5, 3)], [ones(5)]),
    ],
    ids=["attention", "backward", "weights", "merge"],
)
def test_no_memory(call):
    needed = 1
    while True:
        _core._alloc_fail_after(needed - 1)
        try:
            call()
            break
        except MemoryError:
            needed += 1
        finally:
            _core._alloc_fail_after(-1)
    assert needed > 1
    call()


# ------------------------------------------------------------------- the call itself


def test_missing_argument():
    expected = "attention() misses its argument 'value'"
    assert message(TypeError, sdpa.attention, ones(5, 8), ones(7, 8)) == expected
    assert message(TypeError, sdpa.attention) == "attention() misses its argument 'query'"


def test_argument_given_twice():
    x = operands()
    expected = "attention() got 'key' both by position and by name"
    assert message(TypeError, sdpa.attention, *x.values(), key=x["key"]) == expected


def test_too_many_by_position():
    x = operands().values()
    expected = "attention() takes at most 6 arguments by position, got 7"
    assert message(TypeError, sdpa.attention, *x, None, 0.0, False, 0.125) == expected
    expected = "scaled_dot_product_attention() takes at most 6 arguments by position, got 7"
    call = sdpa.scaled_dot_product_attention
    assert message(TypeError, call, *x, None, 0.0, False, 0.125) == expected


def test_keywords_need_not_be_interned():
    x = {"".join(list(name)): a for name, a in operands().items()}
    np.testing.assert_array_equal(sdpa.attention(**x), sdpa.attention(*x.values()))


def test_argument_that_is_no_array():
    class Broken:
        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("on another device")

    x = operands() | {"key": Broken()}
    got = message(TypeError, sdpa.attention, **x)
    assert got.startswith("key: expected an array, got <class ")
    assert got.endswith("which NumPy cannot take: on another device")
    with pytest.raises(TypeError) as caught:
        sdpa.attention(**x)
    assert isinstance(caught.value.__cause__, RuntimeError)
    ragged = message(TypeError, sdpa.attention, **(operands() | {"value": [[1.0], [1.0, 2.0]]}))
    assert ragged.startswith(
        "value: expected an array, got <class 'list'>, which NumPy cannot take"
    )


def test_interruption_in_a_conversion_passes():
    class Interrupted:
        def __array__(self, dtype=None, copy=None):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sdpa.attention(Interrupted(), ones(7, 8), ones(7, 3))


def count_references(arguments):
    gc.collect()  # exceptions and the frames in their tracebacks refer to one another
    return {name: sys.getrefcount(value) for name, value in arguments.items()}


def test_references():
    x = operands() | {"attn_mask": ones(5, 7), "out": ones(2, 4, 5, 3)}
    before = count_references(x)
    for _ in range(3):
        sdpa.attention(**x)
        sdpa.attention_forward(**x)
    assert count_references(x) == before
    for exception, _, differences in REFUSED.values():
        message(exception, sdpa.attention, **(x | differences))
    assert count_references(x) == before
