"""The routines as primitives of `autograd`, so that whole models train with NumPy only.

Each function computes the result of its namesake in `sdpa` and can be differentiated by
`autograd.grad`, `autograd.make_jvp` and the others, any number of times and in any mixture of
reverse and forward mode:

>>> import autograd.numpy as np
>>> from autograd import grad
>>> from sdpa.interop.autograd import attention
>>> query, key, value = np.ones((3, 4)), np.eye(4), np.arange(8.0).reshape(4, 2)
>>> loss = lambda query: np.sum(attention(query, key, value) ** 2)
>>> grad(loss)(query).shape
(3, 4)

Gradients have the dtype of their argument, even where autograd has changed the dtype of the
incoming gradient.

Where a derivative comes from
-----------------------------
========================================================== =========================================
reverse                                                    `attention_backward`
forward                                                    `attention_jvp`
reverse of reverse, reverse of forward, forward of reverse `attention_double_backward`, for all
                                                           three, as the Hessian of <g, out> is
                                                           symmetric
all others                                                 autograd itself, through a formula
                                                           composed of its operations
========================================================== =========================================

The derivatives in the last line (forward over forward, third derivatives, tangents of lse) hold the
(Lq, Lk) matrix, and a NaN or Inf in a masked key or value reaches their result.

The other mechanisms use the backward functions of `sdpa` in reverse mode, and a composed formula
for all other derivatives. The formulas of `cosine_attention` and `bilinear_attention` call
`attention`, so they hold no matrix where `attention` holds none.
"""

from __future__ import annotations

try:
    import autograd  # noqa: F401
except ImportError as _error:
    raise ImportError("sdpa.interop.autograd needs autograd: pip install autograd") from _error

from sdpa._public import publish
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


def __dir__() -> list[str]:
    return __all__


publish(__name__, globals())
