"""Refusals of rotary embedding, ALiBi, T5's bias, the layer, and two settings of the process."""

import numpy as np
from support.calls import FLOATS, LAYER, ROTATED_LAYER, ones
from support.protocols import elsewhere, no_number

import sdpa
from sdpa import bias

X = np.ones((2, 5, 8))


def rotary(x):
    """The rows for the function whose first argument has this name."""
    return {
        **elsewhere(x),
        **elsewhere("positions"),
        f"{x} dtype": (
            TypeError,
            f"{x}: expected {FLOATS}, got int64; write {x}.astype(np.float32)",
            {x: X.astype(int)},
        ),
        f"{x} axes": (
            ValueError,
            f"{x}: expected at least two axes, (..., L, d), got (8,); write {x}[None]",
            {x: X[0, 0], "positions": [0]},
        ),
        "odd last axis": (
            ValueError,
            f"rotary_dim: expected an even number from 0 to {x}'s last axis 7, got 7",
            {x: X[..., :7]},
        ),
        "rotary_dim beyond": (
            ValueError,
            f"rotary_dim: expected an even number from 0 to {x}'s last axis 8, got 10",
            {"rotary_dim": 10},
        ),
        "rotary_dim float": (
            TypeError,
            "rotary_dim: expected an integer, got 2.5",
            {"rotary_dim": 2.5},
        ),
        "positions": (
            ValueError,
            "positions: expected a shape that broadcasts to (2, 5), got (6,)",
            {"positions": np.arange(6)},
        ),
        "positions batch": (
            ValueError,
            "positions: expected a shape that broadcasts to (2, 5), got (3, 1, 5)",
            {"positions": np.ones((3, 1, 5))},
        ),
        "positions of a batch": (
            ValueError,
            "positions: expected a shape that broadcasts to (2, 3, 5), got (2, 5); "
            "write positions[:, None, :]",
            {x: np.ones((2, 3, 5, 8)), "positions": np.ones((2, 5))},
        ),
        "positions bool": (
            TypeError,
            "positions: expected integers or floating point, got bool",
            {"positions": np.ones(5, bool)},
        ),
        "base": (ValueError, "base: expected a number above 0, got 0", {"base": 0}),
        "base tiny": (
            ValueError,
            "base: expected a number above 0 with a finite reciprocal, got 1e-310",
            {"base": 1e-310},
        ),
        **no_number("base"),
        "base huge": (
            ValueError,
            "base: expected a finite number, got an integer beyond float64",
            {"base": 10**400},
        ),
        "interleaved": (
            TypeError,
            "interleaved: expected True or False, got 'x'",
            {"interleaved": "x"},
        ),
    }


ALIBI = {
    "heads": (ValueError, "heads: expected at least 1, got 0", {"heads": 0}),
    "heads float": (TypeError, "heads: expected an integer, got 2.0", {"heads": 2.0}),
    "heads huge": (ValueError, f"heads: expected at most 2^48, got {2**70}", {"heads": 2**70}),
}
BUCKETS = np.ones((32, 4))
T5 = {
    **elsewhere("table"),
    "table dtype": (
        TypeError,
        f"table: expected {FLOATS}, got int64; write table.astype(np.float32)",
        {"table": BUCKETS.astype(int)},
    ),
    "table axes": (
        ValueError,
        "table: expected (num_buckets, heads), got (32,)",
        {"table": BUCKETS[:, 0]},
    ),
    "odd number of buckets": (
        ValueError,
        "table: expected an even number of at least 4 buckets, got 7",
        {"table": BUCKETS[:7]},
    ),
    "one bucket": (
        ValueError,
        "table: expected at least 2 buckets, got 1",
        {"table": BUCKETS[:1], "bidirectional": False},
    ),
    "max_distance": (
        ValueError,
        "max_distance: expected more than the 8 distances that have a bucket each, got 8",
        {"max_distance": 8},
    ),
    "max_distance None": (
        TypeError,
        "max_distance: expected an integer, got None",
        {"max_distance": None},
    ),
    "query_length": (
        ValueError,
        "query_length: expected at least 0, got -1",
        {"query_length": -1},
    ),
    "key_length": (TypeError, "key_length: expected an integer, got 4.5", {"key_length": 4.5}),
    "query_offset": (
        TypeError,
        "query_offset: expected an integer, got [1]",
        {"query_offset": [1]},
    ),
    "query_offset bool": (
        TypeError,
        "query_offset: expected integers, got bool",
        {"query_offset": True},
    ),
    "bidirectional": (
        TypeError,
        "bidirectional: expected True or False, got 'no'",
        {"bidirectional": "no"},
    ),
    "query_offset beyond": (
        ValueError,
        f"query_offset: expected integers from -2^60 to 2^60, got {2**60 + 1}",
        {"query_offset": 2**60 + 1},
    ),
    "key_length huge": (
        ValueError,
        f"key_length: expected at most 2^48, got {2**48 + 1}",
        {"key_length": 2**48 + 1},
    ),
}
T5_BACKWARD = {
    "num_buckets huge": (
        ValueError,
        f"num_buckets: expected at most 2^48, got {2**70}",
        {"num_buckets": 2**70},
    ),
    "num_buckets": (
        ValueError,
        "num_buckets: expected an even number of at least 4 buckets, got 7",
        {"num_buckets": 7},
    ),
    "negative num_buckets": (
        ValueError,
        "num_buckets: expected at least 2, got -4",
        {"num_buckets": -4},
    ),
    "grad_bias dtype": (
        TypeError,
        f"grad_bias: expected {FLOATS}, got int64; write grad_bias.astype(np.float32)",
        {"grad_bias": np.ones((1, 3, 4), int)},
    ),
    "grad_bias axes": (
        ValueError,
        "grad_bias: expected at least three axes, (..., heads, Lq, Lk), got (3, 4)",
        {"grad_bias": np.ones((3, 4))},
    ),
}
T5_ATTENTION = {
    "key_lengths": (
        ValueError,
        f"key_lengths: expected integers from 0 to Lk = 7, got {2**63 - 1}",
        {"is_causal": "lower_right", "key_lengths": 2**70},
    ),
    "query_offset bool": (
        TypeError,
        "query_offset: expected integers, got bool",
        {"query_offset": True},
    ),
    "table heads": (
        ValueError,
        "table: expected (num_buckets, 4), a column for each head of query, got (32, 3)",
        {"table": ones(32, 3)},
    ),
    "query_offset": (
        TypeError,
        "query_offset: expected an integer, got array([1, 2])",
        {"query_offset": np.array([1, 2])},
    ),
    "lengths on the lower right": (
        TypeError,
        "key_lengths: expected one integer with is_causal='lower_right', got array([3, 4]); "
        "call each batch entry by itself",
        {"is_causal": "lower_right", "key_lengths": np.array([3, 4])},
    ),
    "dropout": (
        TypeError,
        "{function}() got an unexpected keyword argument 'dropout_p'",
        {"dropout_p": 0.5},
    ),
    "max_distances": (
        TypeError,
        "{function}() got an unexpected keyword argument 'max_distances'. "
        "Did you mean 'max_distance'?",
        {"max_distances": 64},
    ),
    "two offsets": (
        ValueError,
        "query_offset: expected None with is_causal='lower_right', which sets the offset itself",
        {"is_causal": "lower_right", "query_offset": 1},
    ),
    "key axes": (
        ValueError,
        "key: expected at least two axes, (..., Lk, d_k), got (8,); write key[None]",
        {"key": ones(8)},
    ),
}
SCALES = (
    "scale: expected a number, '1/sqrt d_k', '1/d_k', '1/log d_k', '1/(2 sqrt d_k)' or 'learned'"
)


def not_of_layers(name, remedy):
    text = f"{{function}}() got an unexpected keyword argument '{name}'{remedy}"
    return {f"unknown {name}": (TypeError, text, {name: None})}


LAYERS = {
    **not_of_layers("num_heads", ". Did you mean 'heads'?"),
    **not_of_layers("embed_dim", ". Did you mean 'd_model'?"),
    **not_of_layers("qknorm", ". Did you mean 'qk_norm'?"),
    **not_of_layers("nothing", ""),
    **not_of_layers("dropout_p", "; options of attention are arguments of the layer's calls"),
    "d_model": (ValueError, "d_model: expected at least 1, got 0", {"d_model": 0}),
    "heads": (ValueError, "heads: expected at least 1, got 0", {"heads": 0}),
    "heads do not divide": (
        ValueError,
        "d_model: expected a multiple of heads=3, got 8",
        {"heads": 3},
    ),
    "d_k": (ValueError, "d_k: expected at least 1, got 0", {"d_k": 0}),
    "d_model float": (TypeError, "d_model: expected an integer, got 8.0", {"d_model": 8.0}),
    "heads float": (TypeError, "heads: expected an integer, got 4.0", {"heads": 4.0}),
    "d_v float": (TypeError, "d_v: expected an integer, got 2.0", {"d_v": 2.0}),
    "d_context text": (TypeError, "d_context: expected an integer, got '6'", {"d_context": "6"}),
    "d_k huge": (ValueError, f"d_k: expected at most 2^48, got {2**70}", {"d_k": 2**70}),
    "kv_heads": (
        ValueError,
        "kv_heads: expected a number that divides heads=4, got 3",
        {"kv_heads": 3},
    ),
    "d_v": (
        ValueError,
        "d_v: expected d_k=2 with tied_kv=True, got 5",
        {"tied_kv": True, "d_v": 5},
    ),
    "kv_heads of swapped roles": (
        ValueError,
        "kv_heads: expected heads=4 with swap_roles=True, got 2",
        {"swap_roles": True, "kv_heads": 2},
    ),
    "d_context": (
        ValueError,
        "d_context: expected d_model=8 with swap_roles=True and tied_kv=True, got 6",
        {"swap_roles": True, "tied_kv": True, "d_context": 6},
    ),
    "init": (
        ValueError,
        "init: expected '1/d_model', 'xavier_normal' or 'xavier_uniform', got 'he'",
        {"init": "he"},
    ),
    "scale": (
        ValueError,
        f"{SCALES}, got 'sqrt'",
        {"scale": "sqrt"},
    ),
    **{
        f"scale as a divisor, {word}": (
            ValueError,
            f"{SCALES}, got {word!r}; scores are multiplied by it: write {factor}",
            {"scale": word},
        )
        for word, factor in {
            "1": "1.0",
            "sqrt d_k": "'1/sqrt d_k'",
            "2 sqrt d_k": "'1/(2 sqrt d_k)'",
            "d_k": "'1/d_k'",
            "log d_k": "'1/log d_k'",
        }.items()
    },
    "scale, nan": (ValueError, "scale: expected a finite number, got nan", {"scale": np.nan}),
    "scale of no kind": (
        TypeError,
        "scale: expected a finite number, got [0.5]",
        {"scale": [0.5]},
    ),
    "scale of 0": (
        ValueError,
        "scale: expected another rule for d_k=1, got '1/log d_k', which divides by 0",
        {"scale": "1/log d_k", "d_k": 1},
    ),
    "fold_scale": (
        ValueError,
        "fold_scale: expected False with scale='learned', got True",
        {"scale": "learned", "fold_scale": True},
    ),
    "dtype": (
        TypeError,
        "dtype: expected float16, bfloat16, float32 or float64, got int32",
        {"dtype": np.int32},
    ),
    "no dtype": (
        TypeError,
        "dtype: expected float16, bfloat16, float32 or float64, got 'wide'",
        {"dtype": "wide"},
    ),
    "dtype of broken text": (
        TypeError,
        "dtype: expected float16, bfloat16, float32 or float64, got 'f4,,'",
        {"dtype": "f4,,"},
    ),
    "folded norm": (
        ValueError,
        "fold_scale: expected False with qk_norm=True, which divides it out again, got True",
        {"qk_norm": True, "fold_scale": True},
    ),
    "odd rotation": (
        ValueError,
        "rotary_dim: expected an even number from 0 to d_k=3, got 3",
        {"rotary": True, "d_k": 3},
    ),
    "wide rotation": (
        ValueError,
        "rotary_dim: expected an even number from 0 to d_k=2, got 4",
        {"rotary": True, "rotary_dim": 4},
    ),
    "rotary_dim": (TypeError, "rotary_dim: expected an integer, got 2.0", {"rotary_dim": 2.0}),
    "rotary_dim alone": (
        ValueError,
        "rotary_dim: expected None without rotary=True, got 2",
        {"rotary_dim": 2},
    ),
    "rotary_base": (
        ValueError,
        "rotary_base: expected a number above 0, got 0",
        {"rotary": True, "rotary_base": 0},
    ),
    "rotary_base tiny": (
        ValueError,
        "rotary_base: expected a number above 0 with a finite reciprocal, got 1e-310",
        {"rotary": True, "rotary_base": 1e-310},
    ),
    "rotary_base alone": (
        ValueError,
        "rotary_base: expected 10000.0 without rotary=True, got 500000.0",
        {"rotary_base": 500000},
    ),
    "pairs alone": (
        ValueError,
        "rotary_interleaved: expected False without rotary=True, got True",
        {"rotary_interleaved": True},
    ),
    "norm_eps": (
        ValueError,
        "norm_eps: expected a number above 0, got 0.0",
        {"qk_norm": True, "norm_eps": 0.0},
    ),
    "norm_eps alone": (
        ValueError,
        "norm_eps: expected 1e-06 without qk_norm=True, got 0.1",
        {"norm_eps": 0.1},
    ),
    "flag": (TypeError, "tied_kv: expected True or False, got 'no'", {"tied_kv": "no"}),
    "bias": (TypeError, "bias: expected True or False, got 1", {"bias": 1}),
    "rng": (
        TypeError,
        "rng: expected an int of at least 0, a numpy.random.Generator or None, got 1.5",
        {"rng": 1.5},
    ),
    "negative rng": (
        ValueError,
        "rng: expected an int of at least 0, a numpy.random.Generator or None, got -1",
        {"rng": -1},
    ),
}
FORWARD = {
    **elsewhere("x"),
    **elsewhere("context"),
    "x axes": (
        ValueError,
        "x: expected at least two axes, (..., L, 8), got (8,); write x[None]",
        {"x": ones(8)},
    ),
    "x": (ValueError, "x: expected (..., L, 8), got (2, 5, 6)", {"x": ones(2, 5, 6)}),
    "x of as many axes as NumPy has": (
        ValueError,
        "x: expected at most 63 axes, beside which NumPy has one for heads, got 64",
        {"x": ones(*[1] * 62, 5, 8)},
    ),
    "context of as many": (
        ValueError,
        "context: expected at most 63 axes, beside which NumPy has one for heads, got 64",
        {"context": ones(*[1] * 62, 7, 6)},
    ),
    "x missing": (
        TypeError,
        "x: expected the layer's dtype float32, got object; write x.astype(layer.dtype)",
        {"x": None},
    ),
    "x dtype": (
        TypeError,
        "x: expected the layer's dtype float32, got float64; write x.astype(layer.dtype)",
        {"x": np.ones((5, 8))},
    ),
    "context": (
        ValueError,
        "context: expected (..., L, 6), got (2, 7, 8)",
        {"context": ones(2, 7, 8)},
    ),
    "context batch": (
        ValueError,
        "context: expected leading axes that broadcast with (2,), got (3,)",
        {"context": ones(3, 7, 6)},
    ),
    "no context": (ValueError, "x: expected (..., L, 6), got (2, 5, 8)", {"context": None}),
    "no rotation": (
        ValueError,
        "positions: expected None without rotary=True, got an array of shape (5,)",
        {"positions": np.arange(5)},
    ),
    "attn_mask": (
        ValueError,
        "attn_mask: expected a shape that broadcasts to (2, 2, 5, 7), got (5, 5)",
        {"attn_mask": ones(5, 5)},
    ),
    "scale": (
        TypeError,
        "{function}() got an unexpected keyword argument 'scale'",
        {"scale": 1.0},
    ),
    "parameter": (
        TypeError,
        "{function}() got an unexpected keyword argument 'parameter'. Did you mean 'parameters'?",
        {"parameter": None},
    ),
    "parameters": (
        ValueError,
        "parameters: expected ['w_key', 'w_out', 'w_query', 'w_value'], got ['w_query']",
        {"parameters": {"w_query": ones(8, 8)}},
    ),
    "parameters of numbers": (
        ValueError,
        "parameters: expected ['w_key', 'w_out', 'w_query', 'w_value'], got [0, 'w_query']",
        {"parameters": {"w_query": ones(8, 8), 0: ones(8, 8)}},
    ),
    "parameters alone": (
        TypeError,
        "parameters: expected a mapping of ['w_key', 'w_out', 'w_query', 'w_value'], "
        "got <class 'numpy.ndarray'>",
        {"parameters": ones(8, 8)},
    ),
    "shape of a parameter": (
        ValueError,
        "parameters['w_key']: expected (6, 8), got (8, 8)",
        {"parameters": dict.fromkeys(("w_key", "w_out", "w_query", "w_value"), ones(8, 8))},
    ),
}
ROTATED = {
    **elsewhere("positions"),
    **elsewhere("context_positions"),
    "positions": (
        ValueError,
        "positions: expected a shape that broadcasts to (2, 5), got (7,)",
        {"positions": np.arange(7)},
    ),
    "positions dtype": (
        TypeError,
        "positions: expected integers or floating point, got bool",
        {"positions": np.ones(5, bool)},
    ),
    "context_positions": (
        ValueError,
        "context_positions: expected a shape that broadcasts to (2, 7), got (5,)",
        {"context_positions": np.arange(5)},
    ),
    "no context": (
        ValueError,
        "context_positions: expected None without context, got an array of shape (5,)",
        {"context": None, "context_positions": np.arange(5)},
    ),
    "parameters": (
        ValueError,
        "parameters: expected ['b_key', 'b_out', 'b_query', 'b_value', 'g_key', 'g_query', "
        "'scale', 'w_key', 'w_out', 'w_query', 'w_value'], got ['w_query']",
        {"parameters": {"w_query": ones(8, 8)}},
    ),
    "learned scale": (
        ValueError,
        "scale: expected magnitudes up to 2.3586574916681825e+38, the range of float32 arithmetic, "
        "got nan",
        {"parameters": ROTATED_LAYER.parameters | {"scale": np.full(2, np.nan, np.float32)}},
    ),
}
TURNED = sdpa.MultiHeadAttention(8, 2, d_context=6, rotary=True, rng=0)
BACKWARD = {
    "grad_out": (ValueError, "grad_out: expected (2, 5, 8), got (5, 8)", {"grad_out": ones(5, 8)}),
    "grad_out dtype": (
        TypeError,
        "grad_out: expected float32, got float64; write grad_out.astype(x.dtype)",
        {"grad_out": np.ones((2, 5, 8))},
    ),
    "grad_out missing": (
        TypeError,
        "grad_out: expected float32, got object; write grad_out.astype(x.dtype)",
        {"grad_out": None},
    ),
    "saved": (
        TypeError,
        "saved: expected the saved of a forward call, got <class 'numpy.ndarray'>",
        {"saved": ones(2, 5, 8)},
    ),
    "saved of another width": (
        ValueError,
        "saved: expected that of a layer with d_context=6, got one with d_context=8; each layer "
        "takes what its own forward has saved",
        {"saved": sdpa.MultiHeadAttention(8, 2, rng=0).forward(ones(2, 5, 8)).saved},
    ),
    "saved of rotated queries": (
        ValueError,
        "saved: expected that of a layer with rotary=False, got one with rotary=True; each layer "
        "takes what its own forward has saved",
        {"saved": TURNED.forward(ones(2, 5, 8), ones(2, 7, 6)).saved},
    ),
    "needs": (
        ValueError,
        "needs: expected names among 'parameters', 'x', 'context', 'attn_mask', 'sinks', "
        "got 'w_query'",
        {"needs": ["w_query"]},
    ),
}
RATES = {
    "optimizer": (
        ValueError,
        "optimizer: expected 'sgd' or 'adam', got 'lion'",
        {"optimizer": "lion"},
    ),
}
THREADS = {
    "none": (ValueError, "n: expected at least 1, got 0", {"n": 0}),
    "float": (TypeError, "n: expected an integer, got 1.5", {"n": 1.5}),
}
CONFIG = {
    "mode": (ValueError, "mode: expected 'stdout' or 'dicts', got 'json'", {"mode": "json"}),
}

TABLE = [
    (sdpa.rotary_embedding, rotary("x")),
    (sdpa.rotary_embedding_backward, rotary("grad")),
    (bias.alibi, ALIBI),
    (bias.t5_relative, T5),
    (bias.t5_relative_backward, T5_BACKWARD),
    (bias.t5_attention_backward, T5_ATTENTION),
    (sdpa.MultiHeadAttention, LAYERS),
    (LAYER.forward, FORWARD),
    (ROTATED_LAYER.attention_weights, ROTATED),
    (LAYER.backward, BACKWARD),
    (LAYER.learning_rate_factors, RATES),
    (sdpa.set_num_threads, THREADS),
    (sdpa.show_config, CONFIG),
]
