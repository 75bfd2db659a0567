"""Refusals of the functions on attention: operands, masks, options, names, `out`."""

import inspect

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided
from support.calls import ATTENTION, F32, FLOATS, ones, read_only
from support.helpers import BFLOAT16, LAYOUTS
from support.protocols import elsewhere

import sdpa

GQA = "; enable_gqa=True lets groups of query heads share a key head"
BROADCAST = "attn_mask: expected a shape that broadcasts to (2, 4, 5, 7), got "
INTEGER_MASK = (
    f"attn_mask: expected bool (True = attend) or, to be added to the scores, {FLOATS}, got {{}}; "
    "write attn_mask != 0 for a mask of ones and zeros, attn_mask.astype(query.dtype) for a bias"
)
CAUSAL = "is_causal: expected False, True, 'upper_left' or 'lower_right', got "
PER_ENTRY = "expected one integer, or a shape that broadcasts to the axes before heads, (2,), got "

THREE_AXES = {"query": ones(2, 5, 8), "key": ones(2, 7, 8), "value": ones(2, 7, 3)}
BATCH = "; of three axes the first is heads, so a batch of one head is x[:, None]"

HEADS = "expected a shape that broadcasts to (..., heads), (2, 4), got "
SEED = "rng: expected an int from 0 to 2^64 - 1"

MADE = "if np.sqrt(d), a table or np.zeros made {} float64"

# case: (exception, message, changes to a valid call)
# Key and value may have 16 bits beside a float32 query, if they agree.
DTYPES = {
    "key dtype": (
        TypeError,
        "key: expected query's dtype float32, float16 or bfloat16, got float64; write "
        f"key.astype(query.dtype) {MADE.format('key')}",
        {"key": ones(2, 4, 7, 8, dtype=np.float64)},
    ),
    "float16 keys, float64 query": (
        TypeError,
        "key: expected query's dtype float64, got float16; write query.astype(key.dtype) "
        f"{MADE.format('query')}",
        {"query": ones(2, 4, 5, 8, dtype=np.float64), "key": ones(2, 4, 7, 8, dtype=np.float16)},
    ),
    "float32 keys, float16 query": (
        TypeError,
        "key: expected query's dtype float16, got float32; write key.astype(query.dtype)",
        {"query": ones(2, 4, 5, 8, dtype=np.float16)},
    ),
    "bfloat16 keys, float16 query": (
        TypeError,
        "key: expected query's dtype float16, got bfloat16; write key.astype(query.dtype)",
        {"query": ones(2, 4, 5, 8, dtype=np.float16), "key": ones(2, 4, 7, 8, dtype=BFLOAT16)},
    ),
    "float64 query": (
        TypeError,
        "key: expected query's dtype float64, got float32; write query.astype(key.dtype) "
        f"{MADE.format('query')}",
        {"query": ones(2, 4, 5, 8, dtype=np.float64)},
    ),
    "float64 value": (
        TypeError,
        "value: expected key's dtype float32, got float64; write value.astype(key.dtype) "
        f"{MADE.format('value')}",
        {"value": ones(2, 4, 7, 3, dtype=np.float64)},
    ),
    "value dtype": (
        TypeError,
        "value: expected key's dtype float32, got bfloat16; write value.astype(key.dtype)",
        {"value": ones(2, 4, 7, 3, dtype=BFLOAT16)},
    ),
    "float32 value of float16 keys": (
        TypeError,
        "value: expected key's dtype float16, got float32; write value.astype(key.dtype)",
        {"key": ones(2, 4, 7, 8, dtype=np.float16)},
    ),
    "bfloat16 value of float16 keys": (
        TypeError,
        "value: expected key's dtype float16, got bfloat16; write value.astype(key.dtype)",
        {"key": ones(2, 4, 7, 8, dtype=np.float16), "value": ones(2, 4, 7, 3, dtype=BFLOAT16)},
    ),
}
RANGE = "the range of float32 arithmetic"
MOST, TINY = np.finfo(np.float32).max, np.finfo(np.float32).tiny
MOST_SCALE = float(MOST) / 1.4426950408889634  # kernels take it in units of log2

OPERANDS = {
    "query axes": (
        ValueError,
        "query: expected at least two axes, (..., Lq, d_k), got (8,); write query[None]",
        {"query": ones(8)},
    ),
    "key axes": (
        ValueError,
        "key: expected at least two axes, (..., Lk, d_k), got ()",
        {"key": F32(1)},
    ),
    "value axes": (
        ValueError,
        "value: expected at least two axes, (..., Lk, d_v), got (3,); write value[None]",
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
        f"query: expected {FLOATS}, got int64; write query.astype(np.float32)",
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
        f"value: expected {FLOATS}, got {np.dtype(np.longdouble)}; write value.astype(np.float64)",
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
    "mask batch": (ValueError, BROADCAST + "(3, 1, 5, 7)", {"attn_mask": ones(3, 1, 5, 7)}),
    "mask heads": (ValueError, BROADCAST + "(3, 5, 7)", {"attn_mask": ones(3, 5, 7)}),
    "mask batch and rows": (
        ValueError,
        BROADCAST + "(2, 5, 7); write attn_mask[:, None, :, :]",
        {"attn_mask": ones(2, 5, 7)},
    ),
    "padding of three axes": (
        ValueError,
        "attn_mask: expected a shape that broadcasts to (2, 5, 7), got (2, 7); "
        "write attn_mask[:, None, :]",
        THREE_AXES | {"attn_mask": ones(2, 7, dtype=bool)},
    ),
    "mask rows": (ValueError, BROADCAST + "(4, 7)", {"attn_mask": ones(4, 7)}),
    "mask columns": (ValueError, BROADCAST + "(5, 8)", {"attn_mask": ones(5, 8)}),
    "mask columns, fewer": (ValueError, BROADCAST + "(5, 6)", {"attn_mask": ones(5, 6)}),
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
    "complex mask": (
        TypeError,
        f"attn_mask: expected bool (True = attend) or, to be added to the scores, {FLOATS}, got "
        "complex64",
        {"attn_mask": ones(5, 7, dtype=np.complex64)},
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
}

for name in ("query", "key", "value", "attn_mask", "key_lengths"):
    OPERANDS |= elsewhere(name)

# (..., L, heads, d): the axis read as rows agrees, and the one read as heads does not.
AFTER = "; write x.swapaxes(-3, -2) if the axes are (..., L, heads, d)"
LAYOUT = {
    "heads after the rows": (
        ValueError,
        f"key: expected leading axes that broadcast with (2, 5), got (2, 7){AFTER}",
        {"query": ones(2, 5, 4, 8), "key": ones(2, 7, 4, 8), "value": ones(2, 7, 4, 3)},
    ),
    "heads after the rows, no batch": (
        ValueError,
        f"key: expected leading axes that broadcast with (5,), got (7,){AFTER}",
        {"query": ones(5, 4, 8), "key": ones(7, 4, 8), "value": ones(7, 4, 3)},
    ),
    "heads after the rows, or groups": (
        ValueError,
        f"key: expected leading axes that broadcast with (2, 6), got (2, 3){GQA}{AFTER}",
        {"query": ones(2, 6, 4, 8), "key": ones(2, 3, 4, 8), "value": ones(2, 3, 4, 3)},
    ),
    "groups of heads after the rows": (
        ValueError,
        f"key: expected a number of heads that divides query's 5, got (2, 7, 2, 8){AFTER}",
        {
            "query": ones(2, 5, 4, 8),
            "key": ones(2, 7, 2, 8),
            "value": ones(2, 7, 2, 3),
            "enable_gqa": True,
        },
    ),
}

# Masks of keys, by functions that take key_lengths, too.
PADDING = {
    "padding mask": (
        ValueError,
        BROADCAST + "(2, 7); write attn_mask[:, None, None, :], or key_lengths= for keys that are "
        "padded at the end",
        {"attn_mask": ones(2, 7, dtype=bool)},
    ),
    "padding bias": (
        ValueError,
        BROADCAST + "(2, 7); write attn_mask[:, None, None, :], or key_lengths= for keys that are "
        "padded at the end",
        {"attn_mask": ones(2, 7)},
    ),
    "padding where": (
        ValueError,
        "where: expected a shape that broadcasts to (2, 4, 5, 7), got (2, 1); "
        "write where[:, None, None, :], or key_lengths= for keys that are padded at the end",
        {"where": np.ones((2, 1), bool)},
    ),
    "two batch axes, padding": (
        ValueError,
        "attn_mask: expected a shape that broadcasts to (6, 2, 4, 5, 7), got (6, 2, 7); write "
        "attn_mask[:, :, None, None, :], or key_lengths= for keys that are padded at the end",
        {"query": ones(6, 2, 4, 5, 8), "attn_mask": ones(6, 2, 7, dtype=bool)},
    ),
    "lengths of three axes": (
        ValueError,
        "key_lengths: expected one integer, or a shape that broadcasts to the axes before heads, "
        f"(), got (2,){BATCH}",
        THREE_AXES | {"key_lengths": [7, 3]},
    ),
    "offsets of three axes": (
        ValueError,
        "query_offset: expected one integer, or a shape that broadcasts to the axes before heads, "
        f"(), got (2,){BATCH}",
        THREE_AXES | {"query_offset": [7, 3], "is_causal": True},
    ),
    "lengths of two axes": (
        ValueError,
        "key_lengths: expected one integer, or a shape that broadcasts to the axes before heads, "
        "(), got (2,)",
        {"query": ones(5, 8), "key": ones(7, 8), "value": ones(7, 3), "key_lengths": [7, 3]},
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

OPTIONS = {
    **elsewhere("sinks"),
    **elsewhere("alibi_slopes"),
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
    "softcap text": (TypeError, "softcap: expected a finite number, got '30'", {"softcap": "30"}),
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
    "groups do not divide, one value": (
        ValueError,
        "key: expected a number of heads that divides query's 4, got (2, 3, 7, 8)",
        {"key": ones(2, 3, 7, 8), "enable_gqa": True},
    ),
    "complex query": (
        TypeError,
        f"query: expected {FLOATS}, got complex64",
        {"query": ones(5, 8, dtype=np.complex64)},
    ),
    "longdouble key": (
        TypeError,
        f"key: expected {FLOATS}, got {np.dtype(np.longdouble)}; write key.astype(np.float64)",
        {"key": ones(7, 8, dtype=np.longdouble)},
    ),
    "string query": (TypeError, f"query: expected {FLOATS}, got <U3", {"query": [["abc"]]}),
}

INVARIANT = {
    "invariant None": (
        TypeError,
        "invariant: expected True or False, got None",
        {"invariant": None},
    ),
}

OUT = {
    "out list": (TypeError, "out: expected a numpy.ndarray, got <class 'list'>", {"out": [1.0]}),
    "out shape": (
        ValueError,
        "out: expected shape (2, 4, 5, 3), got (2, 4, 5, 8)",
        {"out": ones(2, 4, 5, 8)},
    ),
    "out axes": (ValueError, "out: expected shape (2, 4, 5, 3), got (5, 3)", {"out": ones(5, 3)}),
    "out dtype": (
        ValueError,
        "out: expected dtype float32 in native byte order, got float64",
        {"out": ones(2, 4, 5, 3, dtype=float)},
    ),
    "out byte order": (
        ValueError,
        "out: expected dtype float32 in native byte order, got >f4",
        {"out": ones(2, 4, 5, 3, dtype=">f4")},
    ),
    "out read-only": (
        ValueError,
        "out: expected a writable array, got a read-only one",
        {"out": read_only(2, 4, 5, 3)},
    ),
    "out unaligned": (
        ValueError,
        "out: expected an aligned array, got an unaligned one",
        {"out": LAYOUTS["unaligned"](ones(2, 4, 5, 3))},
    ),
    "out itself": (
        ValueError,
        "out: expected elements that do not share memory, got strides (60, 0, 12, 4) for shape "
        "(2, 4, 5, 3)",
        {"out": as_strided(ones(2, 1, 5, 3), (2, 4, 5, 3), (60, 0, 12, 4))},
    ),
    "out sliding": (
        ValueError,
        "out: expected elements that do not share memory, got strides (80, 20, 4, 4) for shape "
        "(2, 4, 5, 3)",
        {"out": as_strided(ones(60), (2, 4, 5, 3), (80, 20, 4, 4))},
    ),
}


def unknown(name, nearest=None):
    """The row for an argument that the function does not have; `nearest`: a name or a remedy."""
    text = f"{{function}}() got an unexpected keyword argument '{name}'"
    if nearest and nearest.isidentifier():
        nearest = f". Did you mean '{nearest}'?"
    return TypeError, text + (nearest or ""), {name: None}


MISSPELT = {
    "mask": "attn_mask",
    "iscausal": "is_causal",
    "sofcap": "softcap",
    "sink": "sinks",
    "alibi_slope": "alibi_slopes",
    "rngs": "rng",
}


# Words of other libraries: the parameter, or the whole remedy.
SYNONYMS = {
    "q": "query",
    "k": "key",
    "v": "value",
    "attention_mask": "attn_mask",
    "bias": "attn_mask",
    "causal": "is_causal",
    "dropout": "dropout_p",
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "temperature": ". Did you mean 'scale'? The scores are multiplied by it",
    "key_padding_mask": ". Did you mean 'attn_mask'? There True means ignore, here attend: "
    "~key_padding_mask[:, None, None, :]",
    "logit_cap": "softcap",
    "window_size": "window",
    "s_aux": "sinks",
    "alibi": "alibi_slopes",
    "cache_seqlens": "key_lengths",
    "start_pos": "query_offset",
    "seed": "rng",
    "num_threads": "workers",
    "n_jobs": "workers",
    "layout": "; axes are (..., heads, L, d): write x.swapaxes(-3, -2) for (..., L, heads, d)",
}
RETURNED = {
    "need_weights": "; use sdpa.attention_weights for the matrix of weights",
    "return_weights": "; use sdpa.attention_weights for the matrix of weights",
    "return_lse": "; use sdpa.attention_forward, which returns out and lse",
}
VALUE = {"value": "; leave it out, since weights do not depend on it"}


def synonyms(function):
    """The rows for words of other libraries, of those parameters that the function has."""
    names = inspect.signature(function).parameters
    words = {w: x for w, x in SYNONYMS.items() if x in names or not x.isidentifier()}
    words |= RETURNED if "value" in names else VALUE
    return {f"synonym {word}": unknown(word, meant) for word, meant in words.items()}


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


def taken(function, rows):
    """The rows about arguments that the function has."""
    names = inspect.signature(function).parameters.keys()
    return {
        case: (exception, text, changed)
        for case, (exception, text, changed) in rows.items()
        if {text.partition(":")[0], *changed} <= names
    }


TABLE = [
    *(
        (function, OPERANDS | PADDING | DTYPES | OPTIONS | SCALES | rngs(function))
        for function in ATTENTION
    ),
    *((function, LAYOUT) for function in ATTENTION),
    *((function, INVARIANT) for function in ATTENTION),
    (sdpa.scaled_dot_product_attention, OPERANDS | DTYPES | LAYOUT),
]
TABLE = [(function, taken(function, rows)) for function, rows in TABLE]
for function in ATTENTION:
    TABLE.append((function, synonyms(function)))
    TABLE.append((function, {a: unknown(a, b) for a, b in MISSPELT.items()}))
TABLE += [
    (sdpa.attention, DRAWN | OUT),
    (sdpa.attention_forward, OUT),
    (sdpa.attention_weights, {"out": unknown("out")}),
]
