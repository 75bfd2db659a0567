"""Small problems with every option, for the bridges to other libraries."""

import numpy as np

HEADS, N_Q, N_K, D_K, D_V = 2, 3, 5, 4, 3
KEEP = np.arange(N_Q * N_K).reshape(N_Q, N_K) % 3 > 0

# A tuple is the shape of an operand that is differentiated.
CASES = {
    "plain": {},
    "causal": {"is_causal": True, "query_offset": 1},
    "lower right": {"is_causal": "lower_right", "key_lengths": np.array([5, 4])},
    "window": {"window": (1, 2), "scale": -0.7},
    "softcap": {"softcap": 0.8, "scale": 1.0},
    "boolean mask": {"attn_mask": KEEP},
    "row without keys": {"attn_mask": KEEP & (np.arange(N_Q) != 1)[:, None]},
    "bias": {"attn_mask": (2, 1, N_Q, N_K)},
    "bias of keys": {"attn_mask": (HEADS, 1, N_K)},
    "bias of one axis": {"attn_mask": (N_K,)},
    # Without a sink a number that is added to all scores would have no effect.
    "bias without axes": {"attn_mask": (), "sinks": (HEADS,)},
    "sinks": {"sinks": (HEADS,)},
    "scale": {"scale": (HEADS,), "softcap": 0.8},
    "scale of each entry": {"scale": (2, 1)},
    "scale without axes": {"scale": ()},
    "where": {"where": KEEP},
    "where, bias": {
        "where": np.arange(2 * N_K).reshape(2, 1, 1, N_K) % 4 > 0,
        "attn_mask": (HEADS, N_Q, N_K),
    },
    "alibi": {"alibi_slopes": np.array([0.3, 0.1]), "query_offset": 2},
    "grouped": {"enable_gqa": True, "key_lengths": np.array([2, 5])},
    "dropout": {"dropout_p": 0.4, "rng": 11},
    "all but dropout": {
        "enable_gqa": True,
        "is_causal": True,
        "query_offset": np.array([2, 1]),
        "attn_mask": (HEADS, 1, N_K),
        "sinks": (HEADS,),
        "scale": (HEADS,),
        "where": KEEP | (np.arange(HEADS) == 0)[:, None, None],
        "softcap": 1.5,
        "workers": 2,
    },
}
CASES["all"] = CASES["all but dropout"] | {"dropout_p": 0.3, "rng": 2**64 - 3}
CASES["packed"] = {
    "cu_seqlens_q": np.array([0, 1, 1, 3]),
    "cu_seqlens_k": np.array([0, 2, 3, 5]),
    "key_lengths": np.array([1, 1, 2]),
    "enable_gqa": True,
    "is_causal": "lower_right",
    "alibi_slopes": np.array([0.3, 0.1]),
    "sinks": (HEADS,),
    "scale": (HEADS,),
    "softcap": 1.5,
}
CASES["packed, padded"] = CASES["packed"] | {
    "cu_seqlens_q": np.array([0, 1, 1, 2]),
    "cu_seqlens_k": np.array([0, 2, 3, 4]),
    "key_lengths": np.array([1, 1, 1]),
}
# Functions of the user: score_args are differentiated, in `FUNCTIONS`.
FUNCTIONS = {
    "score_mod": {
        "score_mod": lambda s, b, h, q, k, t, u: s * u[b] + t[h, q - k + 5] * np.tanh(s),
        "shapes": ((HEADS, 10), (2,)),
    },
    "both": {
        "score_mod": lambda s, b, h, q, k, t: np.where(k > 0, s * s + np.exp(s * t[b, h, k]), s),
        "mask_mod": lambda b, h, q, k, m: m[q] | (k != 2),
        "mask_args": (np.arange(20) % 2 > 0,),
        "shapes": ((2, HEADS, N_K),),
        "is_causal": True,
        "query_offset": np.array([2, 4]),
        "sinks": np.array([0.5, -1.0]),
        "softcap": 1.5,
    },
    "hidden pairs without a score": {
        "score_mod": lambda s, b, h, q, k, t: s * np.sqrt(k - q + 0.5) * t[k],
        "mask_mod": lambda b, h, q, k: k >= q,
        "shapes": ((N_K,),),
    },
    "packed": {
        "score_mod": lambda s, b, h, q, k, t: s * t[b] - abs(q - k) * t[0] + np.square(t[k]),
        "shapes": ((3,),),
        "cu_seqlens_q": np.array([0, 1, 1, 3]),
        "cu_seqlens_k": np.array([0, 2, 3, 5]),
        "is_causal": "lower_right",
    },
}
# Operations that libraries write otherwise than NumPy, in functions of scores; t has N_K elements.
OPERATIONS = {
    "integer of a score": lambda s, b, h, q, k, t: s * s.astype(int) + t[k],
    "integer of a relation": lambda s, b, h, q, k, t: s * (2 - (s > t[k]).astype(int)),
    "real of a relation": lambda s, b, h, q, k, t: s * ((q > k) + t[k]),
    "no divisor": lambda s, b, h, q, k, t: s * t[k] + q // (k - 1) + q % (k - 1),
    "sigmoid": lambda s, b, h, q, k, t: s.sigmoid() * t[k],
    "power": lambda s, b, h, q, k, t: s**3 * t[k],
    "bits": lambda s, b, h, q, k, t: np.where(((q ^ k) & 1) == (h << 1), s * t[k], s),
    "branch of an element": lambda s, b, h, q, k, t: np.where(q > k, s * s, t[k]),
    "score of -inf": lambda s, b, h, q, k, t: np.log(
        np.maximum(k - 1.0, 0) * (2 + np.tanh(s * t[k]))
    ),
    "detached": lambda s, b, h, q, k, t: s * s.detach() * t[k],
}


def problem_with_functions(rng, name, dtype=np.float64):
    """(query, key and value; arrays of score_args; the other options)."""
    options = dict(FUNCTIONS[name])
    args = [np.asarray(rng.standard_normal(s)).astype(dtype) for s in options.pop("shapes")]
    operands, _ = problem(rng, "packed, padded" if "cu_seqlens_q" in options else "plain", dtype)
    operands = [operands[name] for name in ("query", "key", "value")]
    return operands, args, options


CASES["packed, dropout"] = CASES["packed"] | {"dropout_p": 0.3, "rng": 3}
# lse of a row without keys, as of one behind the last sequence, has no finite difference.
WITH_FINITE_LSE = [name for name in CASES if name not in ("row without keys", "packed, padded")]


def problem(rng, name, dtype=np.float64):
    """(operands that are differentiated, by name; the other options)."""
    options = dict(CASES[name])
    kv_heads = 1 if options.get("enable_gqa") else HEADS
    if "cu_seqlens_q" in options:
        shapes = [(N_Q, HEADS, D_K), (N_K, kv_heads, D_K), (N_K, kv_heads, D_V)]
    else:
        # The value is shared by the batch, so that its gradient is a sum.
        shapes = [(2, HEADS, N_Q, D_K), (2, kv_heads, N_K, D_K), (kv_heads, N_K, D_V)]
    sizes = dict(zip(("query", "key", "value"), shapes, strict=True))
    for option in ("attn_mask", "sinks", "scale"):
        if isinstance(options.get(option), tuple):
            sizes[option] = options.pop(option)
    operands = {n: np.asarray(rng.standard_normal(s)).astype(dtype) for n, s in sizes.items()}
    return operands, options


def positional(f, names, options):
    """f of the operands by position, as libraries differentiate functions."""
    return lambda *x: f(**dict(zip(names, x, strict=True)), **options)
