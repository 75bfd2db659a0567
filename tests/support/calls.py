"""For every public function the arguments of a valid call; tests change one of them."""

import numpy as np
import pytest

import sdpa
from sdpa import bias

F32 = np.float32
FLOATS = "float16, bfloat16, float32 or float64"


def ones(*shape, dtype=F32):
    return np.ones(shape, dtype)


def read_only(*shape):
    x = ones(*shape)
    x.flags.writeable = False
    return x


def message(exception, function, *args, **kwargs):
    """The message with which the call raises exactly this exception."""
    with pytest.raises(exception) as caught:
        function(*args, **kwargs)
    assert caught.type is exception
    return str(caught.value)


# -------------------------------------------------------------------------- functions on attention


def operands():
    """Lq = 5, Lk = 7, d_k = 8, d_v = 3; two batch entries, four heads."""
    return {"query": ones(2, 4, 5, 8), "key": ones(2, 4, 7, 8), "value": ones(2, 4, 7, 3)}


def key_operands():
    x = operands()
    del x["value"]
    return x


def with_saved(forward, x):
    """The arguments of a backward: the gradient, x, and the results of the forward of x."""
    out, lse = forward(**x)
    return {"grad_out": np.ones_like(out), **x, "out": out, "lse": lse}


def backward_operands():
    return with_saved(sdpa.attention_forward, operands())


def jvp_operands():
    x = operands()
    return x | {f"{name}_t": a for name, a in x.items()}


def double_operands():
    return {f"gg_{name}": a for name, a in operands().items()} | backward_operands()


ATTENTION = {
    sdpa.attention: operands,
    sdpa.attention_forward: operands,
    sdpa.attention_backward: backward_operands,
    sdpa.attention_jvp: jvp_operands,
    sdpa.attention_double_backward: double_operands,
    sdpa.attention_weights: key_operands,
    sdpa.attention_received: key_operands,
    sdpa.attention_statistics: key_operands,
}


# -------------------------------------------------------------------------------- other mechanisms


def additive_operands():
    """Lq = 5, Lk = 7, d_q = 8, d_k = 6, d_v = 3, h = 4."""
    return {
        "query": ones(2, 5, 8),
        "key": ones(2, 7, 6),
        "value": ones(2, 7, 3),
        "w_query": ones(8, 4),
        "w_key": ones(6, 4),
        "w_score": ones(4),
        "bias": ones(4),
    }


def bilinear_operands():
    return operands() | {"query": ones(2, 4, 5, 6), "weight": ones(6, 8)}


def shaw_operands():
    return operands() | {"rel_key": ones(9, 8), "rel_value": ones(9, 3)}


def t5_operands():
    saved = {"grad_out": ones(2, 4, 5, 3), "out": ones(2, 4, 5, 3), "lse": ones(2, 4, 5)}
    return operands() | saved | {"table": ones(32, 4)}


ADDITIVE = {
    sdpa.additive_attention: additive_operands,
    sdpa.additive_attention_forward: additive_operands,
    sdpa.additive_attention_backward: lambda: with_saved(
        sdpa.additive_attention_forward, additive_operands()
    ),
}
COSINE = {
    sdpa.cosine_attention: operands,
    sdpa.cosine_attention_forward: operands,
    sdpa.cosine_attention_backward: lambda: with_saved(sdpa.cosine_attention_forward, operands()),
}
BILINEAR = {
    sdpa.bilinear_attention: bilinear_operands,
    sdpa.bilinear_attention_forward: bilinear_operands,
    sdpa.bilinear_attention_backward: lambda: with_saved(
        sdpa.bilinear_attention_forward, bilinear_operands()
    ),
}
SHAW = {
    sdpa.shaw_attention: shaw_operands,
    sdpa.shaw_attention_forward: shaw_operands,
    sdpa.shaw_attention_backward: lambda: with_saved(sdpa.shaw_attention_forward, shaw_operands()),
}
ROTARY = {
    sdpa.rotary_embedding: lambda: {"x": np.ones((2, 5, 8)), "positions": np.arange(5)},
    sdpa.rotary_embedding_backward: lambda: {
        "grad": np.ones((2, 5, 8)),
        "positions": np.arange(5),
    },
}
BIAS = {
    bias.alibi: lambda: {"heads": 4},
    bias.t5_relative: lambda: {"table": np.ones((32, 4)), "query_length": 3, "key_length": 4},
    bias.t5_relative_backward: lambda: {"grad_bias": np.ones((4, 3, 4)), "num_buckets": 32},
    bias.t5_attention_backward: t5_operands,
}

# Its methods are keys of the tables, so all tests share one layer.
LAYER = sdpa.MultiHeadAttention(8, 2, d_context=6, rng=0)


ROTATED_LAYER = sdpa.MultiHeadAttention(
    8, 2, bias=True, qk_norm=True, rotary=True, scale="learned", rng=0
)


def rotated_operands():
    at = {"positions": np.arange(5), "context_positions": np.arange(7)}
    return {"x": ones(2, 5, 8), "context": ones(2, 7, 8)} | at


def layer_operands():
    return {"x": ones(2, 5, 8), "context": ones(2, 7, 6)}


MULTI_HEAD = {
    sdpa.MultiHeadAttention: lambda: {"d_model": 8, "heads": 4},
    LAYER.forward: layer_operands,
    ROTATED_LAYER.attention_weights: rotated_operands,
    LAYER.backward: lambda: {
        "grad_out": ones(2, 5, 8),
        "saved": LAYER.forward(**layer_operands()).saved,
    },
    LAYER.learning_rate_factors: lambda: {"optimizer": "sgd"},
}

# A window, so that it never ends. Its methods are keys of the tables as well.
KV_CACHE = sdpa.KVCache(2, 4, 8, 3, capacity=9, window=(2, 0))
# One that has dropped positions; a valid call changes nothing.
TRUNCATED = sdpa.KVCache(2, 4, 8, 3, capacity=9, window=(2, 0))
TRUNCATED.append(ones(2, 4, 8, 8), ones(2, 4, 8, 3))
TRUNCATED.append(ones(2, 4, 4, 8), ones(2, 4, 4, 3), lengths=[4, 3])
CACHE = {
    sdpa.KVCache: lambda: {"batch": 2, "heads": 4, "d_k": 8, "capacity": 9},
    KV_CACHE.append: lambda: {"key": ones(2, 4, 7, 8), "value": ones(2, 4, 7, 3)},
    KV_CACHE.reorder: lambda: {"index": np.array([1, 0])},
    TRUNCATED.truncate: lambda: {"lengths": np.array([6, 5])},
}

# -------------------------------------------------------------------------------------- all others


def rows(name):
    """A gradient, and weights under the function's own name for them."""
    return lambda: {"grad": ones(3, 4), name: ones(3, 4)}


SOFTMAX = {
    sdpa.softmax: lambda: {"x": ones(3, 4)},
    sdpa.log_softmax: lambda: {"x": ones(3, 4)},
    sdpa.logsumexp: lambda: {"x": ones(3, 4)},
    sdpa.softmax_backward: rows("weights"),
    sdpa.log_softmax_backward: rows("log_weights"),
    sdpa.logsumexp_backward: lambda: {"grad": ones(3), "x": ones(3, 4), "lse": ones(3)},
    sdpa.softmax_jacobian: lambda: {"weights": ones(3, 4)},
}
MERGE = {sdpa.merge_attention: lambda: {"outs": [ones(5, 3)], "lses": [ones(5)]}}
SETTINGS = {
    sdpa.set_num_threads: lambda: {"n": sdpa.get_num_threads()},
    sdpa.show_config: lambda: {"mode": "dicts"},
}


def _plus_table(score, b, h, q, k, table):
    return score + table[h, q - k]


def _same_document(b, h, q, k, document):
    return document[q] == document[k]


PROGRAMS = {
    sdpa.score_program: lambda: {"score_mod": _plus_table, "score_args": (ones(4, 9),)},
    sdpa.mask_program: lambda: {"mask_mod": _same_document, "mask_args": (np.arange(5),)},
}

CALLS = ATTENTION | ADDITIVE | COSINE | BILINEAR | SHAW | ROTARY | BIAS | MULTI_HEAD
CALLS |= {sdpa.scaled_dot_product_attention: operands} | CACHE | SOFTMAX | MERGE | SETTINGS
CALLS |= PROGRAMS


def everything(function):
    """A valid call with every option that holds an array."""
    x = CALLS[function]()
    positions = {"alibi_slopes": ones(2, 4), "key_lengths": np.array([7, 6])}
    if function in ATTENTION:
        x |= {"attn_mask": ones(4, 5, 7), "sinks": ones(4), "rng": 2**63} | positions
    elif function in COSINE | BILINEAR | SHAW:
        x |= {"attn_mask": ones(4, 5, 7), "sinks": ones(4)} | positions
    elif function is bias.t5_attention_backward:
        x |= {"sinks": ones(4), "key_lengths": np.array([7, 6])}
    elif function is LAYER.forward:
        alibi = {"alibi_slopes": ones(2), "key_lengths": np.array([7, 6])}
        x |= {"attn_mask": ones(5, 7), "sinks": ones(2)} | alibi
    elif function in ADDITIVE:
        x |= {"attn_mask": ones(5, 7), "sinks": ones(2), "rng": 2**63}
    if function is sdpa.attention_jvp:
        x |= {"attn_mask_t": ones(4, 5, 7), "sinks_t": ones(4)}
    elif function is sdpa.attention_double_backward:
        x |= {"gg_attn_mask": ones(4, 5, 7), "gg_sinks": ones(4), "grad_lse": ones(2, 4, 5)}
    elif function in (sdpa.attention, sdpa.attention_forward):
        x |= {"out": ones(2, 4, 5, 3)}
    return x
