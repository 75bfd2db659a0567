"""Multi-head layers of every kind, for the tests of sdpa.MultiHeadAttention."""

import numpy as np
from support.helpers import normal

import sdpa

D_MODEL, HEADS, D_CONTEXT = 12, 4, 10

# name: (arguments of the layer, whether there is a context)
LAYERS = {
    "self": ({}, False),
    "cross": ({"d_context": D_CONTEXT}, True),
    "widths": ({"d_k": 5, "d_v": 2}, False),
    "grouped": ({"kv_heads": 2, "d_v": 5}, False),
    "learned": ({"scale": "learned"}, False),
    "learned grouped": ({"scale": "learned", "kv_heads": 2, "d_context": D_CONTEXT}, True),
    "tied": ({"tied_kv": True}, False),
    "tied cross": ({"tied_kv": True, "d_context": D_CONTEXT}, True),
    "swapped": ({"swap_roles": True}, False),
    "swapped cross": ({"swap_roles": True, "d_context": D_CONTEXT, "d_v": 6}, True),
    "swapped tied cross": ({"swap_roles": True, "tied_kv": True}, True),
    "swapped tied learned": ({"swap_roles": True, "tied_kv": True, "scale": "learned"}, False),
    "folded": ({"fold_scale": True, "scale": "1/d_k"}, False),
    "biased": ({"bias": True}, False),
    "biased cross": ({"bias": True, "kv_heads": 2, "d_v": 5, "d_context": D_CONTEXT}, True),
    "biased tied": ({"bias": True, "tied_kv": True, "d_context": D_CONTEXT}, True),
    "biased swapped": ({"bias": True, "swap_roles": True, "d_context": D_CONTEXT}, True),
    "biased folded": ({"bias": True, "fold_scale": True}, False),
    "rotary": ({"rotary": True, "d_k": 6}, False),
    "rotary part": (
        {
            "rotary": True,
            "d_k": 6,
            "rotary_dim": 4,
            "rotary_base": 50.0,
            "rotary_interleaved": True,
        },
        True,
    ),
    "normed": ({"qk_norm": True}, False),
    "normed learned": ({"qk_norm": True, "scale": "learned", "norm_eps": 0.25}, True),
    "all": (
        {
            "bias": True,
            "qk_norm": True,
            "rotary": True,
            "d_k": 4,
            "kv_heads": 2,
            "scale": "learned",
        },
        False,
    ),
    "all swapped tied": (
        {
            "bias": True,
            "qk_norm": True,
            "rotary": True,
            "d_k": 4,
            "swap_roles": True,
            "tied_kv": True,
        },
        True,
    ),
}


def made(rng, name, dtype=np.float64, n_q=5, n_k=7):
    """(layer, x, context or None); a learned scale differs from head to head.

    Biases are not 0, gains not 1.
    """
    kwargs, cross = LAYERS[name]
    layer = sdpa.MultiHeadAttention(D_MODEL, HEADS, **kwargs, dtype=dtype, rng=rng)
    if "scale" in layer.parameters:
        layer.parameters["scale"] *= np.linspace(0.5, 2, HEADS).astype(dtype)
    for n, y in layer.parameters.items():
        if n[:2] in ("b_", "g_"):
            y += normal(rng, y.shape, dtype)
    x = normal(rng, (2, n_q, D_MODEL), dtype)
    return layer, x, normal(rng, (2, n_k, layer.d_context), dtype) if cross else None
