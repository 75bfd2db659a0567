"""Refusals of the functions on attention: operands, masks, names, `out`."""

import inspect

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided
from refusals.options import DRAWN, INVARIANT, OPTIONS, SCALES, rngs
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

THREE_AXES = {"query": ones(2, 5, 8), "key": ones(2, 7, 8), "value": ones(2, 7, 3)}
BATCH = "; of three axes the first is heads, so a batch of one head is x[:, None]"

MADE = "if np.sqrt(d), which is applied already, a table or np.zeros made {} float64"

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

for name in ("query", "key", "value", "attn_mask"):
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

# PyTorch's signature has no key_lengths.
PADDING_OF_TORCH = {
    "padding mask": (
        ValueError,
        BROADCAST + "(2, 7); write attn_mask[:, None, None, :]",
        {"attn_mask": ones(2, 7, dtype=bool)},
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
    (sdpa.scaled_dot_product_attention, OPERANDS | DTYPES | OPTIONS | LAYOUT | PADDING_OF_TORCH),
]
TABLE = [(function, taken(function, rows)) for function, rows in TABLE]
for function in ATTENTION:
    TABLE.append((function, synonyms(function)))
    TABLE.append((function, {a: unknown(a, b) for a, b in MISSPELT.items()}))
TABLE += [
    (sdpa.attention, DRAWN | OUT),
    (sdpa.attention_forward, OUT),
    (sdpa.attention_weights, {"out": unknown("out")}),
    (
        sdpa.scaled_dot_product_attention,
        {"elsewhere": unknown("window", "; sdpa.attention has this option")},
    ),
]
