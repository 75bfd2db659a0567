"""Exact attention and its gradients for NumPy arrays.

The functions are those of the C extension; `sdpa.reference` defines in plain NumPy what each of
them computes.
"""

import atexit

from sdpa import _core, _threads
from sdpa._core import (
    AttentionForward,
    AttentionGradients,
    AttentionSecondGradients,
    AttentionStatistics,
    AttentionTangent,
    __version__,
    attention,
    attention_backward,
    attention_double_backward,
    attention_forward,
    attention_jvp,
    attention_statistics,
    attention_weights,
    get_num_threads,
    log_softmax,
    log_softmax_backward,
    logsumexp,
    logsumexp_backward,
    merge_attention,
    scaled_dot_product_attention,
    set_num_threads,
    show_config,
    softmax,
    softmax_backward,
    softmax_jacobian,
)

__all__ = [
    "AttentionForward",
    "AttentionGradients",
    "AttentionSecondGradients",
    "AttentionStatistics",
    "AttentionTangent",
    "__version__",
    "attention",
    "attention_backward",
    "attention_double_backward",
    "attention_forward",
    "attention_jvp",
    "attention_statistics",
    "attention_weights",
    "get_num_threads",
    "log_softmax",
    "log_softmax_backward",
    "logsumexp",
    "logsumexp_backward",
    "merge_attention",
    "scaled_dot_product_attention",
    "set_num_threads",
    "show_config",
    "softmax",
    "softmax_backward",
    "softmax_jacobian",
]

atexit.register(_core._close_pool)
_threads.register()
