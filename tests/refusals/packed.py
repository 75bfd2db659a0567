"""Refusals of packed sequences by the functions on attention."""

import inspect

import numpy as np
from refusals.attention import taken
from support.calls import ATTENTION, ones

import sdpa

TOGETHER = "expected an array, since cu_seqlens_q and cu_seqlens_k go together, got None"


def packed(**changed):
    """Two sequences of 2 and 3 queries, 4 and 3 keys, with something wrong."""
    return {
        "query": ones(5, 4, 8),
        "key": ones(7, 4, 8),
        "cu_seqlens_q": [0, 2, 5],
        "cu_seqlens_k": [0, 4, 7],
    } | changed


PACKED = {
    "no cu_seqlens_k": (
        ValueError,
        f"cu_seqlens_k: {TOGETHER}",
        packed(cu_seqlens_k=None),
    ),
    "no cu_seqlens_q": (
        ValueError,
        f"cu_seqlens_q: {TOGETHER}",
        packed(cu_seqlens_q=None),
    ),
    "packed query axes": (
        ValueError,
        "query: expected (total_q, heads, d_k) with cu_seqlens_q, got (2, 4, 5, 8)",
        packed(query=ones(2, 4, 5, 8)),
    ),
    "packed key axes": (
        ValueError,
        "key: expected (total_k, heads, d_k) with cu_seqlens_k, got (7, 8); write key[:, None]",
        packed(key=ones(7, 8)),
    ),
    "packed query of a batch": (
        ValueError,
        "query: expected (total_q, heads, d_k) with cu_seqlens_q, got (1, 5, 4, 8); write query[0]",
        packed(query=ones(1, 5, 4, 8)),
    ),
    "packed value axes": (
        ValueError,
        "value: expected (total_k, heads, d_v) with cu_seqlens_k, got (3,)",
        packed(value=ones(3)),
    ),
    "packed d_k": (
        ValueError,
        "key: expected (..., 8) to match query's last axis, got (7, 4, 6)",
        packed(key=ones(7, 4, 6)),
    ),
    "packed values": (
        ValueError,
        "value: expected (7, ...) to match key's rows, got (6, 4, 3)",
        packed(value=ones(6, 4, 3)),
    ),
    "packed key heads": (
        ValueError,
        "key: expected 1 or 4 heads, got (7, 3, 8)",
        packed(key=ones(7, 3, 8)),
    ),
    "packed groups not enabled": (
        ValueError,
        "key: expected 1 or 4 heads, or enable_gqa=True for groups of query heads, got (7, 2, 8)",
        packed(key=ones(7, 2, 8)),
    ),
    "packed value heads": (
        ValueError,
        "value: expected key's number of heads, 2, got (7, 4, 3)",
        packed(key=ones(7, 2, 8), value=ones(7, 4, 3), enable_gqa=True),
    ),
    "packed groups do not divide": (
        ValueError,
        "key: expected a number of heads that divides query's 4, got (7, 3, 8)",
        packed(key=ones(7, 3, 8), enable_gqa=True),
    ),
    "cu_seqlens float": (
        TypeError,
        "cu_seqlens_q: expected integers, got float64",
        packed(cu_seqlens_q=[0.0, 5.0]),
    ),
    "cu_seqlens number": (
        ValueError,
        "cu_seqlens_q: expected shape (sequences + 1,), got the number 5",
        packed(cu_seqlens_q=5),
    ),
    "cu_seqlens axes": (
        ValueError,
        "cu_seqlens_k: expected shape (sequences + 1,), got (1, 3)",
        packed(cu_seqlens_k=[[0, 4, 7]]),
    ),
    "cu_seqlens empty": (
        ValueError,
        "cu_seqlens_q: expected shape (sequences + 1,), got (0,)",
        packed(cu_seqlens_q=np.zeros(0, int)),
    ),
    "cu_seqlens empty list": (
        ValueError,
        "cu_seqlens_q: expected shape (sequences + 1,), got (0,)",
        packed(cu_seqlens_q=[]),
    ),
    "cu_seqlens first": (
        ValueError,
        "cu_seqlens_q: expected 0 as its first element, got 1",
        packed(cu_seqlens_q=[1, 2, 5]),
    ),
    "cu_seqlens decrease": (
        ValueError,
        "cu_seqlens_k: expected elements that do not decrease, got 4 after 5",
        packed(cu_seqlens_k=[0, 5, 4, 7]),
    ),
    "cu_seqlens beyond": (
        ValueError,
        "cu_seqlens_k: expected at most key's number of rows, 7, as its last element, got 8",
        packed(cu_seqlens_k=[0, 4, 8]),
    ),
    "cu_seqlens of other sequences": (
        ValueError,
        "cu_seqlens_k: expected cu_seqlens_q's shape (3,), got (2,)",
        packed(cu_seqlens_k=[0, 7]),
    ),
    "packed mask": (
        ValueError,
        "attn_mask: expected None with cu_seqlens_q, got (5, 7); use mask_mod or score_mod",
        packed(attn_mask=ones(5, 7)),
    ),
    "packed sinks": (
        ValueError,
        "sinks: expected a shape that broadcasts to (..., heads), (4,), got (2, 4)",
        packed(sinks=ones(2, 4)),
    ),
    "packed lengths": (
        ValueError,
        "key_lengths: expected integers from 0 to Lk, which is 3 in sequence 1, got 4",
        packed(key_lengths=4),
    ),
    "packed lengths below 0": (
        ValueError,
        "key_lengths: expected integers from 0 to Lk, which is 4 in sequence 0, got -1",
        packed(key_lengths=[-1, 2]),
    ),
    "packed lengths of other sequences": (
        ValueError,
        "key_lengths: expected one integer, or a shape that broadcasts to the sequences, (2,), "
        "got (3,)",
        packed(key_lengths=[1, 2, 3]),
    ),
    "packed offsets": (
        ValueError,
        "query_offset: expected one integer, or a shape that broadcasts to the sequences, (2,), "
        "got (1, 2)",
        packed(query_offset=[[1, 2]]),
    ),
    "packed dropout": (
        ValueError,
        "dropout_p: expected a probability from 0 to 1, got 2",
        packed(dropout_p=2, rng=0),
    ),
}

SEQUENCE = {
    "sequence alone": (
        ValueError,
        "sequence: expected None without cu_seqlens_q, got 1",
        {"sequence": 1},
    ),
    "no sequence": (
        ValueError,
        "sequence: expected one of the 2 sequences of cu_seqlens_q, got None",
        packed(),
    ),
    "sequence 2": (
        ValueError,
        "sequence: expected one of the 2 sequences of cu_seqlens_q, from 0 on, got 2",
        packed(sequence=2),
    ),
    "sequence -1": (
        ValueError,
        "sequence: expected one of the 2 sequences of cu_seqlens_q, from 0 on, got -1",
        packed(sequence=-1),
    ),
    "sequence float": (
        TypeError,
        "sequence: expected an integer, got 1.0",
        packed(sequence=1.0),
    ),
}


def with_value(function, rows):
    """The rows of packed arguments with a right value, where the function takes one."""
    if "value" not in inspect.signature(function).parameters:
        return rows
    value = {"value": ones(7, 4, 3)}
    return {
        case: (exception, text, value | changed)
        for case, (exception, text, changed) in rows.items()
    }


TABLE = [(function, taken(function, with_value(function, PACKED))) for function in ATTENTION]
TABLE.append((sdpa.attention_weights, SEQUENCE))
