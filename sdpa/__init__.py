"""Exact attention and its gradients for NumPy arrays.

Most functions are those of the C extension; cosine, bilinear and relative attention are composed
around them. `sdpa.reference` defines in plain NumPy what each of them computes.
"""

import atexit
import importlib
from typing import TYPE_CHECKING, Any

from sdpa import _core, _threads
from sdpa._core import (
    AdditiveGradients,
    AttentionForward,
    AttentionGradients,
    AttentionSecondGradients,
    AttentionStatistics,
    AttentionTangent,
    __version__,
    additive_attention,
    additive_attention_backward,
    additive_attention_forward,
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

if TYPE_CHECKING:
    from sdpa import bias
    from sdpa.layers import (
        MultiHeadAttention,
        MultiHeadForward,
        MultiHeadGradients,
        MultiHeadSaved,
    )
    from sdpa.relative import (
        ShawGradients,
        shaw_attention,
        shaw_attention_backward,
        shaw_attention_forward,
    )
    from sdpa.rotary import rotary_embedding, rotary_embedding_backward
    from sdpa.scores import (
        BilinearGradients,
        CosineGradients,
        bilinear_attention,
        bilinear_attention_backward,
        bilinear_attention_forward,
        cosine_attention,
        cosine_attention_backward,
        cosine_attention_forward,
    )

__all__ = [
    "AdditiveGradients",
    "AttentionForward",
    "AttentionGradients",
    "AttentionSecondGradients",
    "AttentionStatistics",
    "AttentionTangent",
    "BilinearGradients",
    "CosineGradients",
    "MultiHeadAttention",
    "MultiHeadForward",
    "MultiHeadGradients",
    "MultiHeadSaved",
    "ShawGradients",
    "__version__",
    "additive_attention",
    "additive_attention_backward",
    "additive_attention_forward",
    "attention",
    "attention_backward",
    "attention_double_backward",
    "attention_forward",
    "attention_jvp",
    "attention_statistics",
    "attention_weights",
    "bias",
    "bilinear_attention",
    "bilinear_attention_backward",
    "bilinear_attention_forward",
    "cosine_attention",
    "cosine_attention_backward",
    "cosine_attention_forward",
    "get_num_threads",
    "log_softmax",
    "log_softmax_backward",
    "logsumexp",
    "logsumexp_backward",
    "merge_attention",
    "rotary_embedding",
    "rotary_embedding_backward",
    "scaled_dot_product_attention",
    "set_num_threads",
    "shaw_attention",
    "shaw_attention_backward",
    "shaw_attention_forward",
    "show_config",
    "softmax",
    "softmax_backward",
    "softmax_jacobian",
]

# Imported where they are first used, for `import sdpa` is to be quick.
_LAZY = ("scores", "layers", "relative", "rotary")


def __getattr__(name: str) -> Any:
    if name == "bias":
        return importlib.import_module("sdpa.bias")
    if name in __all__:
        for module in _LAZY:
            found = vars(importlib.import_module(f"sdpa.{module}")).get(name)
            if found is not None:
                globals()[name] = found
                return found
    raise AttributeError(f"module 'sdpa' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


atexit.register(_core._close_pool)
_threads.register()
