"""Further refusals of derivatives, weights, statistics and merge_attention."""

import numpy as np
from support.calls import FLOATS, jvp_operands, ones
from support.protocols import OnDevice, elsewhere

import sdpa

# case: (exception, message, changes to a valid call)
BACKWARD = {
    **elsewhere("grad_out"),
    **elsewhere("lse"),
    "needs grad_out, which is of double backward alone": (
        ValueError,
        "needs: expected names among 'query', 'key', 'value', 'attn_mask', 'sinks', 'scale', "
        "'score_args', got 'grad_out'",
        {"needs": ["grad_out"]},
    ),
    "grad_out shape": (
        ValueError,
        "grad_out: expected (2, 4, 5, 3), got (4, 5, 3)",
        {"grad_out": ones(4, 5, 3)},
    ),
    "grad_out dtype": (
        TypeError,
        "grad_out: expected float32, got float64; write grad_out.astype(query.dtype)",
        {"grad_out": ones(2, 4, 5, 3, dtype=float)},
    ),
    "out shape": (
        ValueError,
        "out: expected (2, 4, 5, 3), got (2, 4, 5, 8)",
        {"out": ones(2, 4, 5, 8)},
    ),
    "out dtype": (
        TypeError,
        "out: expected float32, got int64; write out.astype(query.dtype)",
        {"out": ones(2, 4, 5, 3, dtype=np.int64)},
    ),
    "lse shape": (
        ValueError,
        "lse: expected (2, 4, 5), got (2, 4, 5, 1)",
        {"lse": ones(2, 4, 5, 1)},
    ),
    "lse dtype": (
        TypeError,
        "lse: expected float32 or float64, got float16; write lse.astype(query.dtype)",
        {"lse": ones(2, 4, 5, dtype=np.float16)},
    ),
    "grad_lse shape": (
        ValueError,
        "grad_lse: expected (2, 4, 5), got (5,)",
        {"grad_lse": ones(5)},
    ),
    "grad_lse dtype": (
        TypeError,
        "grad_lse: expected float32 or float64, got float16; write grad_lse.astype(query.dtype)",
        {"grad_lse": ones(2, 4, 5, dtype=np.float16)},
    ),
    "needs": (
        ValueError,
        "needs: expected names among 'query', 'key', 'value', 'attn_mask', 'sinks', 'scale', "
        "'score_args', got 'bias'",
        {"needs": ["query", "bias"]},
    ),
    "needs w_query, which is of additive attention alone": (
        ValueError,
        "needs: expected names among 'query', 'key', 'value', 'attn_mask', 'sinks', 'scale', "
        "'score_args', got 'w_query'",
        {"needs": ["w_query"]},
    ),
    "needs sinks": (
        ValueError,
        "needs: 'sinks' has a gradient only where it is given, got None",
        {"needs": ["sinks"]},
    ),
    "needs text": (
        TypeError,
        "needs: expected a sequence of names such as ('query', 'key'), got 'query'",
        {"needs": "query"},
    ),
    "needs None": (
        TypeError,
        "needs: expected a sequence of names such as ('query', 'key'), got None",
        {"needs": None},
    ),
    "needs no mask": (
        ValueError,
        "needs: 'attn_mask' has a gradient only where it is given, got None",
        {"needs": ["attn_mask"]},
    ),
    "needs boolean mask": (
        ValueError,
        "needs: 'attn_mask' has a gradient only where it is added to the scores, got a boolean one",
        {"needs": ["attn_mask"], "attn_mask": ones(5, 7, dtype=bool)},
    ),
}

DOUBLE = {
    "grad_out": (
        ValueError,
        "grad_out: expected (2, 4, 5, 3), got (4, 5, 3)",
        {"grad_out": ones(4, 5, 3)},
    ),
    "lse": (
        TypeError,
        "lse: expected float32 or float64, got float16; write lse.astype(query.dtype)",
        {"lse": ones(2, 4, 5, dtype=np.float16)},
    ),
    "grad_lse": (
        ValueError,
        "grad_lse: expected (2, 4, 5), got (5,)",
        {"grad_lse": ones(5)},
    ),
    "needs": (
        ValueError,
        "needs: expected names among 'query', 'key', 'value', 'attn_mask', 'sinks', 'scale', "
        "'score_args', 'grad_out', got 'bias'",
        {"needs": ["bias"]},
    ),
    "needs sinks": (
        ValueError,
        "needs: 'sinks' has a gradient only where it is given, got None",
        {"needs": ["sinks"]},
    ),
    "needs mask": (
        ValueError,
        "needs: 'attn_mask' has a gradient only where it is given, got None",
        {"needs": ["attn_mask"]},
    ),
}

MERGE = {
    "part on a GPU": (
        TypeError,
        f"lses[1]: expected an array on the CPU, got {OnDevice} on cuda:0",
        {"outs": [ones(5, 3)] * 2, "lses": [ones(5), OnDevice(2, 0)]},
    ),
    "number": (
        TypeError,
        "outs: expected a sequence of arrays, got 3",
        {"outs": 3},
    ),
    "none": (ValueError, "outs: expected at least one part, got none", {"outs": [], "lses": []}),
    "counts": (
        ValueError,
        "lses: expected as many parts as outs, 1, got 2",
        {"outs": [ones(5, 3)], "lses": [ones(5), ones(5)]},
    ),
    "axes": (
        ValueError,
        "outs[0]: expected at least two axes, (..., Lq, d_v), got (5,); write outs[0][None]",
        {"outs": [ones(5)], "lses": [ones(5)]},
    ),
    "out dtype": (
        TypeError,
        f"outs[0]: expected {FLOATS}, got int64",
        {"outs": [ones(5, 3, dtype=np.int64)], "lses": [ones(5)]},
    ),
    "out dtypes": (
        TypeError,
        "outs[1]: expected float32, got float64; write outs[1].astype(outs[0].dtype)",
        {"outs": [ones(5, 3), ones(5, 3, dtype=float)], "lses": [ones(5), ones(5)]},
    ),
    "out shapes": (
        ValueError,
        "outs[1]: expected (5, 3) to match outs[0], got (5, 4)",
        {"outs": [ones(5, 3), ones(5, 4)], "lses": [ones(5), ones(5)]},
    ),
    "lse dtype": (
        TypeError,
        "lses[0]: expected float32 or float64, got float16; write lses[0].astype(np.float32)",
        {"outs": [ones(5, 3)], "lses": [ones(5, dtype=np.float16)]},
    ),
    "lse below float64": (
        TypeError,
        "lses[0]: expected float64, got float32; write lses[0].astype(np.float64)",
        {"outs": [ones(5, 3, dtype=float)], "lses": [ones(5)]},
    ),
    "lse shape": (
        ValueError,
        "lses[1]: expected (2, 5) to match outs[0], got (5,)",
        {"outs": [ones(2, 5, 3)] * 2, "lses": [ones(2, 5), ones(5)]},
    ),
}

STAGES = {
    "stage": (
        ValueError,
        "stage: expected 'scores', 'capped', 'biased' or 'weights', got 'p'",
        {"stage": "p"},
    ),
    "stage number": (
        TypeError,
        "stage: expected 'scores', 'capped', 'biased' or 'weights', got 3",
        {"stage": 3},
    ),
}

CHOICES = {
    **elsewhere("heads"),
    **elsewhere("queries"),
    "one query": (
        ValueError,
        "queries: expected a slice or integers along one axis, got 3",
        {"queries": 3},
    ),
    "axes of heads": (
        ValueError,
        "heads: expected a slice or integers along one axis, got [[0], [1]]",
        {"heads": [[0], [1]]},
    ),
    "query numbers": (TypeError, "queries: expected integers, got float64", {"queries": [0.5]}),
    "mask of heads": (TypeError, "heads: expected integers, got bool", {"heads": [True] * 4}),
    "query 5": (ValueError, "queries: expected integers from -5 to 4, got 5", {"queries": [0, 5]}),
    "query -6": (ValueError, "queries: expected integers from -5 to 4, got -6", {"queries": [-6]}),
    "head 4": (ValueError, "heads: expected integers from -4 to 3, got 4", {"heads": [4]}),
    "slice of text": (
        ValueError,
        "heads: expected a slice of integers with a step that is not 0, got slice('a', None, None)",
        {"heads": slice("a", None)},
    ),
    "slice without a step": (
        ValueError,
        "queries: expected a slice of integers with a step that is not 0, got slice(None, None, 0)",
        {"queries": slice(None, None, 0)},
    ),
    "no heads": (
        ValueError,
        "heads: expected None, since query and key have no axis of heads",
        {"query": ones(5, 8), "key": ones(7, 8), "heads": [0]},
    ),
}

STATISTICS = {
    "dropout": (
        ValueError,
        "dropout_p: expected 0, since statistics describe the weights before dropout",
        {"dropout_p": 0.5, "rng": 1},
    ),
}

SEED = {
    "no seed": (
        ValueError,
        "rng: expected an int from 0 to 2^64 - 1, the same forward and backward, since dropout_p "
        "is not 0, got None",
        {"dropout_p": 0.5},
    ),
}


def tangents(prefix, suffix):
    """A tangent has its argument's shape and dtype, and needs its argument to be given."""
    rows = {}
    for primal in ("query", "key", "value"):
        name = prefix + primal + suffix
        x = jvp_operands()[primal]
        rows[f"{name} shape"] = (
            ValueError,
            f"{name}: expected {primal}'s shape {x.shape}, got {x.shape[1:]}",
            {name: x[0]},
        )
        rows[f"{name} dtype"] = (
            TypeError,
            f"{name}: expected {primal}'s dtype float32, got float64; "
            f"write {name}.astype({primal}.dtype)",
            {name: x.astype(float)},
        )
    for primal, x in {"attn_mask": ones(4, 1, 7), "sinks": ones(4)}.items():
        name = prefix + primal + suffix
        rows[f"{name} alone"] = (
            ValueError,
            f"{name}: expected None, since {primal} is not given",
            {name: x},
        )
        rows[f"{name} shape"] = (
            ValueError,
            f"{name}: expected {primal}'s shape {x.shape}, got {x[:1].shape}",
            {primal: x, name: x[:1]},
        )
        rows[f"{name} dtype"] = (
            TypeError,
            f"{name}: expected {primal}'s dtype float32, got float16; "
            f"write {name}.astype({primal}.dtype)",
            {primal: x, name: x.astype(np.float16)},
        )
    name = f"{prefix}attn_mask{suffix}"
    rows[f"{name} of a boolean mask"] = (
        ValueError,
        f"{name}: expected None, since attn_mask is boolean",
        {"attn_mask": ones(5, 7, dtype=bool), name: ones(5, 7)},
    )
    return rows


TABLE = [
    (sdpa.attention_forward, SEED),
    (sdpa.additive_attention_forward, SEED),
    (sdpa.cosine_attention_forward, SEED),
    (sdpa.bilinear_attention_forward, SEED),
    (sdpa.shaw_attention_forward, SEED),
    (sdpa.attention_backward, BACKWARD | SEED),
    (sdpa.attention_jvp, tangents("", "_t") | SEED),
    (sdpa.attention_double_backward, DOUBLE | tangents("gg_", "") | SEED),
    (sdpa.attention_weights, STAGES | CHOICES),
    (sdpa.attention_received, CHOICES),
    (sdpa.attention_statistics, STATISTICS),
    (sdpa.merge_attention, MERGE),
]
