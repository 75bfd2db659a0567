"""Refusals of the options of the functions on attention: numbers, windows, lengths, seeds."""

import numpy as np
from support.calls import FLOATS, ones
from support.protocols import elsewhere, no_number

import sdpa

CAUSAL = "is_causal: expected False, True, 'upper_left' or 'lower_right', got "
PER_ENTRY = "expected one integer, or a shape that broadcasts to the axes before heads, (2,), got "
HEADS = "expected a shape that broadcasts to (..., heads), (2, 4), got "
SEED = "rng: expected an int from 0 to 2^64 - 1"

RANGE = "the range of float32 arithmetic"
MOST, TINY = np.finfo(np.float32).max, np.finfo(np.float32).tiny
MOST_SCALE = float(MOST) / 1.4426950408889634  # kernels take it in units of log2

# case: (exception, message, changes to a valid call)
OPTIONS = {
    **elsewhere("key_lengths"),
    **elsewhere("sinks"),
    **elsewhere("alibi_slopes"),
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
    "no key_lengths": (ValueError, f"key_lengths: {PER_ENTRY}(0,)", {"key_lengths": []}),
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
    "scale +inf": (ValueError, "scale: expected a finite number, got inf", {"scale": np.inf}),
    "softcap 0": (
        ValueError,
        "softcap: expected a number above 0, or None for no cap, got 0",
        {"softcap": 0},
    ),
    "softcap negative": (
        ValueError,
        "softcap: expected a number above 0, or None for no cap, got -1.5",
        {"softcap": -1.5},
    ),
    "softcap nan": (ValueError, "softcap: expected a finite number, got nan", {"softcap": np.nan}),
    "softcap inf": (ValueError, "softcap: expected a finite number, got inf", {"softcap": np.inf}),
    **no_number("softcap"),
    "scale out of range": (
        ValueError,
        f"scale: expected a magnitude up to {MOST_SCALE}, {RANGE}, got -1e+39",
        {"scale": -1e39},
    ),
    "softcap out of range": (
        ValueError,
        f"softcap: expected at least {float(TINY)}, {RANGE}, got 1e-39",
        {"softcap": 1e-39},
    ),
    "sinks out of range": (
        ValueError,
        f"sinks: expected magnitudes up to {float(MOST)}, {RANGE}, got 1e+39",
        {"sinks": [0.0, 1e39, 0.0, 0.0]},
    ),
    "alibi out of range, float32": (
        ValueError,
        f"alibi_slopes: expected magnitudes up to {MOST_SCALE}, {RANGE}, got {float(MOST)}",
        {"alibi_slopes": MOST},
    ),
    "alibi out of range": (
        ValueError,
        f"alibi_slopes: expected magnitudes up to {MOST_SCALE}, {RANGE}, got -1e+39",
        {"alibi_slopes": -1e39},
    ),
    "dropout above 1, seed": (
        ValueError,
        "dropout_p: expected a probability from 0 to 1, got 1.5",
        {"dropout_p": 1.5, "rng": 1},
    ),
    "dropout below 0": (
        ValueError,
        "dropout_p: expected a probability from 0 to 1, got -0.1",
        {"dropout_p": -0.1, "rng": 1},
    ),
    "dropout None": (
        TypeError,
        "dropout_p: expected a finite number, got None",
        {"dropout_p": None},
    ),
    "rng -1": (ValueError, f"{SEED}, got -1", {"rng": -1}),
    "rng 2^64": (ValueError, f"{SEED}, got {2**64}", {"rng": 2**64}),
    "sinks int": (
        TypeError,
        f"sinks: expected {FLOATS}, got int64; write sinks.astype(np.float32)",
        {"sinks": [1, 2, 3, 4]},
    ),
    "sinks bool": (TypeError, f"sinks: expected {FLOATS}, got bool", {"sinks": True}),
    "sinks complex": (TypeError, f"sinks: expected {FLOATS}, got complex128", {"sinks": 1j}),
    "sinks longdouble": (
        TypeError,
        f"sinks: expected {FLOATS}, got {np.dtype(np.longdouble)}; write sinks.astype(np.float64)",
        {"sinks": np.longdouble(1)},
    ),
    "sinks text": (TypeError, f"sinks: expected {FLOATS}, got <U1", {"sinks": "x"}),
    "sinks heads": (ValueError, f"sinks: {HEADS}(3,)", {"sinks": ones(3)}),
    "sinks batch": (ValueError, f"sinks: {HEADS}(3, 4)", {"sinks": ones(3, 4)}),
    "sinks batch, one axis": (
        ValueError,
        f"sinks: {HEADS}(2,); write sinks[:, None]",
        {"sinks": ones(2)},
    ),
    "sinks axes": (ValueError, f"sinks: {HEADS}(1, 2, 4)", {"sinks": ones(1, 2, 4)}),
    "alibi int": (
        TypeError,
        f"alibi_slopes: expected {FLOATS}, got int64; write alibi_slopes.astype(np.float32)",
        {"alibi_slopes": [1, 2, 3, 4]},
    ),
    "alibi object": (
        TypeError,
        f"alibi_slopes: expected {FLOATS}, got object",
        {"alibi_slopes": [None]},
    ),
    "alibi heads": (ValueError, f"alibi_slopes: {HEADS}(5,)", {"alibi_slopes": ones(5)}),
    "alibi axes": (
        ValueError,
        f"alibi_slopes: {HEADS}(4, 1, 1); write alibi_slopes[..., 0, 0]",
        {"alibi_slopes": ones(4, 1, 1)},
    ),
    "alibi axes of other heads": (
        ValueError,
        f"alibi_slopes: {HEADS}(5, 1, 1)",
        {"alibi_slopes": ones(5, 1, 1)},
    ),
    "window -1": (
        ValueError,
        "window: expected bounds of at least 0, or None for no bound, got (-1, None)",
        {"window": (-1, None)},
    ),
    "two offsets, 2": (
        ValueError,
        "query_offset: expected None with is_causal='lower_right', which sets the offset itself",
        {"query_offset": 2, "is_causal": "lower_right"},
    ),
    "lower_left": (
        ValueError,
        "is_causal: expected False, True, 'upper_left' or 'lower_right', got 'lower_left'",
        {"is_causal": "lower_left"},
    ),
    "lengths per entry": (
        ValueError,
        "key_lengths: expected integers from 0 to Lk = 7, got 8",
        {"key_lengths": [7, 8]},
    ),
}

# Of functions whose scale may be an array, which those of additive attention are not.
SCALES = {
    "scales out of range": (
        ValueError,
        f"scale: expected magnitudes up to {MOST_SCALE}, {RANGE}, got 1e+39",
        {"scale": [0.0, 1e39, 0.0, 0.0]},
    ),
    "scales not finite": (
        ValueError,
        f"scale: expected magnitudes up to {MOST_SCALE}, {RANGE}, got nan",
        {"scale": [1.0, np.nan, 1.0, 1.0]},
    ),
    "scales int": (
        TypeError,
        f"scale: expected {FLOATS}, got int64; write scale.astype(np.float32)",
        {"scale": [1, 2, 3, 4]},
    ),
    "scales heads": (ValueError, f"scale: {HEADS}(3,)", {"scale": ones(3)}),
    "scales batch": (
        ValueError,
        f"scale: {HEADS}(2,); write scale[:, None]",
        {"scale": ones(2)},
    ),
    "where float": (
        TypeError,
        "where: expected bool (True = attend), got float64; write where != 0",
        {"where": np.ones((5, 7))},
    ),
    "where int": (
        TypeError,
        "where: expected bool (True = attend), got uint8; write where != 0",
        {"where": np.ones((5, 7), np.uint8)},
    ),
    "where text": (TypeError, "where: expected bool (True = attend), got <U3", {"where": "yes"}),
    "where shape": (
        ValueError,
        "where: expected a shape that broadcasts to (2, 4, 5, 7), got (5, 6)",
        {"where": np.ones((5, 6), bool)},
    ),
}

INVARIANT = {
    "invariant None": (
        TypeError,
        "invariant: expected True or False, got None",
        {"invariant": None},
    ),
}


class Generator:
    """An object like a numpy.random.Generator whose `bytes` returns a given value."""

    bit_generator = None

    def __init__(self, drawn):
        self.drawn = drawn

    def bytes(self, n):
        return self.drawn


def rngs(function):
    """Only attention takes a Generator: the results of the others have to be reproducible."""
    refused = [np.random, 1.0, True, "1", [1]]
    if function is sdpa.attention:
        kinds = ", a numpy.random.Generator or None"
    else:
        kinds = " or None"
        refused.append(np.random.default_rng(0))
    return {
        f"rng {type(rng).__name__}": (TypeError, f"{SEED}{kinds}, got {rng!r}", {"rng": rng})
        for rng in refused
    }


DRAWN = {
    f"rng that draws {drawn!r}": (
        TypeError,
        f"rng: expected its method bytes(8) to return 8 bytes, got {drawn!r}",
        {"dropout_p": 0.5, "rng": Generator(drawn)},
    )
    for drawn in (b"", b"1234567", b"123456789", 8)
}
