"""The routines as primitives of `autograd`, so that whole models train with NumPy only.

Each function computes what its namesake in `sdpa` does and can be differentiated by
`autograd.grad`, `autograd.make_jvp` and the others, as often and in any mixture of reverse and
forward mode:

>>> import autograd.numpy as np
>>> from autograd import grad
>>> from sdpa.interop.autograd import attention
>>> query, key, value = np.ones((3, 4)), np.eye(4), np.arange(8.0).reshape(4, 2)
>>> loss = lambda query: np.sum(attention(query, key, value) ** 2)
>>> grad(loss)(query).shape
(3, 4)

Arrays that are differentiated come as positional arguments or as `sinks`. Gradients have the dtype
of their argument, whatever autograd made of the upstream one.

Where a derivative comes from
-----------------------------
============================== =====================================================================
reverse                        `attention_backward`
forward                        `attention_jvp`
reverse of reverse, reverse    `attention_double_backward`: the Hessian of <g, out> is symmetric, so
of forward, forward of reverse that it serves for all three
all others                     autograd itself, through the formula composed of its own operations
============================== =====================================================================

The last line holds the (Lq, Lk) matrix: forward over forward, third derivatives, tangents of lse.
There a NaN or Inf in a masked key or value can be felt.

The other mechanisms have their library's backward in reverse mode, and all other derivatives by
their composed formula; `cosine_attention` and `bilinear_attention` are composed of `attention`, so
that they hold no matrix where that does not.
"""

from __future__ import annotations

try:
    import autograd  # noqa: F401
except ImportError as error:
    raise ImportError(
        "sdpa.interop.autograd needs autograd: pip install 'sdpa[autograd]'"
    ) from error

from sdpa.interop.autograd._attention import attention, attention_forward
from sdpa.interop.autograd._layers import multi_head_attention
from sdpa.interop.autograd._scores import (
    additive_attention,
    bilinear_attention,
    cosine_attention,
    rotary_embedding,
    shaw_attention,
    t5_relative,
)
from sdpa.interop.autograd._softmax import log_softmax, logsumexp, softmax

__all__ = [
    "additive_attention",
    "attention",
    "attention_forward",
    "bilinear_attention",
    "cosine_attention",
    "log_softmax",
    "logsumexp",
    "multi_head_attention",
    "rotary_embedding",
    "shaw_attention",
    "softmax",
    "t5_relative",
]
