"""Refusals of additive, cosine, bilinear and Shaw's attention."""

import numpy as np
from refusals.attention import BATCH, DTYPES, OPERANDS, PADDING
from refusals.options import MOST_SCALE, OPTIONS, RANGE
from support.calls import ADDITIVE, BILINEAR, COSINE, F32, FLOATS, SHAW, ones
from support.helpers import BFLOAT16
from support.protocols import elsewhere, no_number

import sdpa

EVERY = OPERANDS | PADDING | DTYPES | OPTIONS
WITHOUT_SCALE = {case: row for case, row in EVERY.items() if "scale" not in row[2]}
# With another query, or last axis of key, the message is about the weight instead.
WITHOUT_QUERY = {
    case: row
    for case, row in EVERY.items()
    if "query" not in row[2] and case not in ("d_k", "string")
}
WITHOUT_WHERE = {case: row for case, row in EVERY.items() if "where" not in row[2]}
# The operands of additive attention have no heads and one dtype.
SCALARS = {"dropout_p", "is_causal", "rng", "scale", "softcap", "window", "workers"}
WITHOUT_HEADS = {
    case: row
    for case, row in (OPERANDS | OPTIONS).items()
    if case == "query axes" or row[0] is TypeError or row[2].keys() <= SCALARS
}

# case: (exception, message, changes to a valid call)
ADDITIVE_ROWS = {
    **elsewhere("w_score"),
    "padding mask": (
        ValueError,
        "attn_mask: expected a shape that broadcasts to (2, 5, 7), got (2, 7); "
        "write attn_mask[:, None, :]",
        {"attn_mask": ones(2, 7)},
    ),
    "lengths of three axes": (
        ValueError,
        "key_lengths: expected one integer, or a shape that broadcasts to the axes before heads, "
        f"(), got (2,){BATCH}",
        {"key_lengths": [7, 3]},
    ),
    "Lk": (
        ValueError,
        "value: expected (..., 7, 3) to match key's rows 7, got (..., 6, 3)",
        {"value": ones(2, 6, 3)},
    ),
    "leading axes": (
        ValueError,
        "key: expected leading axes that broadcast with (2,), got (3,)",
        {"query": ones(2, 5, 8), "key": ones(3, 7, 6)},
    ),
    "d_q": (
        ValueError,
        "w_query: expected (8, h) to match query's last axis 8, got (6, 4)",
        {"w_query": ones(6, 4)},
    ),
    "axes of w_query": (
        ValueError,
        "w_query: expected (8, h) to match query's last axis 8, got (2, 8, 4)",
        {"w_query": ones(2, 8, 4)},
    ),
    "d_k": (
        ValueError,
        "w_key: expected (6, 4) to match key's last axis and w_query's, got (8, 4)",
        {"w_key": ones(8, 4)},
    ),
    "h of w_key": (
        ValueError,
        "w_key: expected (6, 4) to match key's last axis and w_query's, got (6, 5)",
        {"w_key": ones(6, 5)},
    ),
    "w_score": (
        ValueError,
        "w_score: expected (4,) to match w_query's last axis 4, got (4, 1)",
        {"w_score": ones(4, 1)},
    ),
    "bias": (
        ValueError,
        "bias: expected (4,) to match w_query's last axis 4, got ()",
        {"bias": F32(1)},
    ),
    "dtype of keys": (
        TypeError,
        "key: expected query's dtype float32, got float16; write key.astype(query.dtype)",
        {"key": ones(2, 7, 6, dtype=np.float16), "value": ones(2, 7, 3, dtype=np.float16)},
    ),
    "dtype of values": (
        TypeError,
        "value: expected key's dtype float32, got bfloat16; write value.astype(key.dtype)",
        {"value": ones(2, 7, 3).astype(BFLOAT16)},
    ),
    "dtype of weights": (
        TypeError,
        "w_key: expected query's dtype float32, got float64; write w_key.astype(query.dtype)",
        {"w_key": ones(6, 4, dtype=np.float64)},
    ),
    "dtype of bias": (
        TypeError,
        "bias: expected query's dtype float32, got bfloat16; write bias.astype(query.dtype)",
        {"bias": ones(4).astype(BFLOAT16)},
    ),
    "mask": (
        ValueError,
        "attn_mask: expected a shape that broadcasts to (2, 5, 7), got (5, 6)",
        {"attn_mask": ones(5, 6)},
    ),
}

COSINE_ROWS = {
    "temperature 0": (
        ValueError,
        "temperature: expected a number above 0, got 0",
        {"temperature": 0},
    ),
    "temperature nan": (
        ValueError,
        "temperature: expected a finite number, got nan",
        {"temperature": np.nan},
    ),
    "temperature so small that 1 / temperature overflows": (
        ValueError,
        f"temperature: expected at least {1 / MOST_SCALE}, {RANGE}, got 1e-320",
        {"temperature": 1e-320},
    ),
    "temperature out of range": (
        ValueError,
        f"temperature: expected at least {1 / MOST_SCALE}, {RANGE}, got 1e-39",
        {"temperature": 1e-39},
    ),
    "temperature text": (
        TypeError,
        "temperature: expected a finite number, got 'warm'",
        {"temperature": "warm"},
    ),
    **no_number("eps"),
    "temperature text of a number": (
        TypeError,
        "temperature: expected a finite number, got '1'",
        {"temperature": "1"},
    ),
    "eps": (ValueError, "eps: expected a number above 0, got -1e-12", {"eps": -1e-12}),
    "eps None": (TypeError, "eps: expected a finite number, got None", {"eps": None}),
}

BILINEAR_ROWS = {
    "query of integers": (
        TypeError,
        "query: expected float16, bfloat16, float32 or float64, got int64; write "
        "query.astype(np.float32)",
        {"query": np.ones((2, 5, 6), int)},
    ),
    "weight missing": (
        TypeError,
        "weight: expected query's dtype float32, got object",
        {"weight": None},
    ),
    **elsewhere("query"),
    **elsewhere("weight"),
    "weight sizes": (
        ValueError,
        "weight: expected (..., 6, 8) to match query's last axis 6 and key's last axis 8, "
        "got (..., 8, 6)",
        {"weight": ones(8, 6)},
    ),
    "weight axes": (
        ValueError,
        "weight: expected at least two axes, (..., d_q, d_k), got (8,); write weight[None]",
        {"weight": ones(8)},
    ),
    "query axes": (
        ValueError,
        "query: expected at least two axes, (..., Lq, d_q), got (6,); write query[None]",
        {"query": ones(6)},
    ),
    "key of one axis": (
        ValueError,
        "key: expected at least two axes, (..., Lk, d_k), got (8,); write key[None]",
        {"key": ones(8)},
    ),
    "weight heads": (
        ValueError,
        "weight: expected leading axes that broadcast with (2, 4), got (3,)",
        {"weight": ones(3, 6, 8)},
    ),
    "weight dtype": (
        TypeError,
        "weight: expected query's dtype float32, got float16; write weight.astype(query.dtype)",
        {"weight": ones(6, 8, dtype=np.float16)},
    ),
    "integers": (
        TypeError,
        f"query: expected {FLOATS}, got int64; write query.astype(np.float32)",
        {"query": np.ones((2, 4, 5, 8), int), "weight": np.ones((8, 8), int)},
    ),
    "complex query": (
        TypeError,
        f"query: expected {FLOATS}, got complex64",
        {"query": ones(2, 4, 5, 6, dtype=np.complex64)},
    ),
}

SHAW_ROWS = {
    "rel_key missing": (
        TypeError,
        "rel_key: expected query's dtype float32, got object",
        {"rel_key": None},
    ),
    **elsewhere("rel_value"),
    "rel_key of another width": (
        ValueError,
        "rel_key: expected (2 D + 1, 8) or (heads, 2 D + 1, 8), got (9, 6)",
        {"rel_key": ones(9, 6)},
    ),
    "rel_key of an even number of rows": (
        ValueError,
        "rel_key: expected (2 D + 1, 8) or (heads, 2 D + 1, 8), got (8, 8)",
        {"rel_key": ones(8, 8)},
    ),
    "rel_key of four axes": (
        ValueError,
        "rel_key: expected (2 D + 1, 8) or (heads, 2 D + 1, 8), got (1, 1, 9, 8)",
        {"rel_key": ones(1, 1, 9, 8)},
    ),
    "rel_key of other heads": (
        ValueError,
        "rel_key: expected key's number of heads, 4, got (3, 9, 8)",
        {"rel_key": ones(3, 9, 8)},
    ),
    "rel_key of another dtype": (
        TypeError,
        "rel_key: expected query's dtype float32, got float64; write rel_key.astype(query.dtype)",
        {"rel_key": np.ones((9, 8))},
    ),
    "rel_value of another width": (
        ValueError,
        "rel_value: expected (2 D + 1, 3) or (heads, 2 D + 1, 3), got (9, 8)",
        {"rel_value": ones(9, 8)},
    ),
    "rel_value of other rows": (
        ValueError,
        "rel_value: expected 9 rows like rel_key, got (7, 3)",
        {"rel_value": ones(7, 3)},
    ),
    "rel_value of other heads": (
        ValueError,
        "rel_value: expected value's number of heads, 4, got (2, 9, 3)",
        {"rel_value": ones(2, 9, 3)},
    ),
    "query_offset": (
        TypeError,
        "query_offset: expected an integer, got [0, 1]",
        {"query_offset": [0, 1]},
    ),
}


def unknown(name, remedy=""):
    """The row for an option that a composed function does not take."""
    text = f"{{function}}() got an unexpected keyword argument '{name}'{remedy}"
    return {f"unknown {name}": (TypeError, text, {name: 1.0})}


DIVIDES = ". Did you mean 'temperature'? The scores are divided by it"
MULTIPLIES = ". Did you mean 'scale'? The scores are multiplied by it"
ELSEWHERE = "; sdpa.attention has this option"


# The closest of the names that may still be given.
MISSPELT = {
    sdpa.cosine_attention: ("temperatur", "temperature"),
    sdpa.cosine_attention_forward: ("soft_cap", "softcap"),
    sdpa.cosine_attention_backward: ("grad_lses", "grad_lse"),
    sdpa.bilinear_attention: ("scal", "scale"),
    sdpa.bilinear_attention_forward: ("is_casual", "is_causal"),
    sdpa.bilinear_attention_backward: ("need", "needs"),
    sdpa.shaw_attention: ("rel_values", "rel_value"),
    sdpa.shaw_attention_forward: ("sm_scale", "scale"),
    sdpa.shaw_attention_backward: ("dropout", "dropout_p"),
}


def misspelt(wrong, right):
    text = f"{{function}}() got an unexpected keyword argument '{wrong}'. Did you mean '{right}'?"
    return {wrong: (TypeError, text, {wrong: None})}


def unknown_needs(wrong, *names):
    """The row for a gradient that does not exist; the message lists those that do."""
    names = ", ".join(map(repr, names))
    text = f"needs: expected names among {names}, got '{wrong}'"
    return {"needs": (ValueError, text, {"needs": [wrong]})}


ADDITIVE_BACKWARD = {
    "out": (ValueError, "out: expected (2, 5, 3), got (5, 3)", {"out": ones(5, 3)}),
    "needs mask": (
        ValueError,
        "needs: 'attn_mask' has a gradient only where it is given, got None",
        {"needs": ("attn_mask",)},
    ),
    "needs bias": (
        ValueError,
        "needs: 'bias' has a gradient only where it is given, got None",
        {"bias": None, "needs": ["bias"]},
    ),
    **unknown_needs(
        "gain",
        *("query", "key", "value", "attn_mask", "sinks", "w_query", "w_key", "w_score", "bias"),
    ),
}
COMPOSED_BACKWARD = {
    "grad_out": (
        ValueError,
        "grad_out: expected (2, 4, 5, 3), got (2, 4, 5, 2)",
        {"grad_out": ones(2, 4, 5, 2)},
    ),
    "lse": (
        TypeError,
        "lse: expected float32 or float64, got float16; write lse.astype(query.dtype)",
        {"lse": np.ones((2, 4, 5), np.float16)},
    ),
    "needs mask": (
        ValueError,
        "needs: 'attn_mask' has a gradient only where it is given, got None",
        {"needs": ["attn_mask"]},
    ),
    "needs text": (
        TypeError,
        "needs: expected a sequence of names such as ('query', 'key'), got 'query'",
        {"needs": "query"},
    ),
    "no seed": (
        ValueError,
        "rng: expected an int from 0 to 2^64 - 1, the same forward and backward, since dropout_p "
        "is not 0, got None",
        {"dropout_p": 0.5},
    ),
}
SHAW_BACKWARD = {
    "needs rel_value": (
        ValueError,
        "needs: 'rel_value' has a gradient only where it is given, got None",
        {"rel_value": None, "needs": ["rel_value"]},
    ),
}

TABLE = [
    *((function, WITHOUT_HEADS | ADDITIVE_ROWS) for function in ADDITIVE),
    *((function, WITHOUT_SCALE | COSINE_ROWS | unknown("scale", DIVIDES)) for function in COSINE),
    *((function, unknown("scope")) for function in COSINE),
    *((function, unknown("score_mod", ELSEWHERE)) for function in (*ADDITIVE, *COSINE)),
    *((function, WITHOUT_QUERY | BILINEAR_ROWS) for function in BILINEAR),
    *(
        (function, WITHOUT_WHERE | SHAW_ROWS | unknown("temperature", MULTIPLIES))
        for function in SHAW
    ),
    (sdpa.additive_attention_backward, ADDITIVE_BACKWARD),
    (sdpa.shaw_attention_backward, SHAW_BACKWARD),
    *((function, misspelt(*names)) for function, names in MISSPELT.items()),
]
for functions, own in (
    (COSINE, ["temperature"]),
    (BILINEAR, ["weight"]),
    (SHAW, ["rel_key", "rel_value"]),
):
    *forward, backward = functions
    names = ("query", "key", "value", *own, "attn_mask", "sinks")
    TABLE += [(function, unknown("out")) for function in forward]
    TABLE.append((backward, COMPOSED_BACKWARD | unknown_needs("wkey", *names)))
