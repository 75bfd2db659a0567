"""Exact attention and its gradients for NumPy arrays, (..., heads, L, d).

Attention
    attention, attention_forward, scaled_dot_product_attention, merge_attention
Its derivatives
    attention_backward, attention_jvp, attention_double_backward
What it does
    attention_weights, attention_statistics, attention_received; figures: plot
Functions of your own
    score_program, mask_program; options score_mod and mask_mod
Other scores, each with NAME_forward and NAME_backward
    additive_attention, bilinear_attention, cosine_attention, shaw_attention
Positions
    rotary_embedding, rotary_embedding_backward; ALiBi and T5: bias
Layers and decoding
    MultiHeadAttention, KVCache
Softmax
    softmax, log_softmax, logsumexp, each with NAME_backward; softmax_jacobian
Longer than memory
    blocks
Inside other libraries
    interop: autograd, dask, jax, onnx, torch, transformers
Definitions in plain NumPy
    reference
Threads and kernels
    show_config, get_num_threads, set_num_threads

`help(sdpa.attention)` has all options. Classes that end in Forward, Gradients, Statistics,
Received and Tangent are results: named tuples.
"""

import atexit
import importlib
from typing import TYPE_CHECKING, Any

try:
    importlib.import_module("sdpa._core")
except ModuleNotFoundError as error:
    if error.name != "sdpa._core":
        raise
    # Python searches the folder that it is started in first.
    raise ImportError(
        f"sdpa: expected the extension _core in {__path__[0]}, got none; if this is a clone, which "
        "hides an installed sdpa, start Python in another folder, or build here: "
        "pip install --editable ."
    ) from None

from sdpa import _core, _threads
from sdpa._core import (
    AdditiveGradients,
    AttentionForward,
    AttentionGradients,
    AttentionReceived,
    AttentionSecondGradients,
    AttentionStatistics,
    AttentionTangent,
    LogsumexpForward,
    LogsumexpGradients,
    __version__,
    additive_attention,
    additive_attention_backward,
    additive_attention_forward,
    attention,
    attention_backward,
    attention_double_backward,
    attention_forward,
    attention_jvp,
    attention_received,
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
    from sdpa import bias, blocks, interop, plot, reference
    from sdpa._cache import KVCache
    from sdpa._programs._program import mask_program, score_program
    from sdpa.mechanisms.bilinear import (
        BilinearGradients,
        bilinear_attention,
        bilinear_attention_backward,
        bilinear_attention_forward,
    )
    from sdpa.mechanisms.cosine import (
        CosineGradients,
        cosine_attention,
        cosine_attention_backward,
        cosine_attention_forward,
    )
    from sdpa.mechanisms.multi_head import (
        MultiHeadAttention,
        MultiHeadForward,
        MultiHeadGradients,
    )
    from sdpa.mechanisms.rotary import rotary_embedding, rotary_embedding_backward
    from sdpa.mechanisms.shaw import (
        ShawGradients,
        shaw_attention,
        shaw_attention_backward,
        shaw_attention_forward,
    )

__all__ = [
    "AdditiveGradients",
    "AttentionForward",
    "AttentionGradients",
    "AttentionReceived",
    "AttentionSecondGradients",
    "AttentionStatistics",
    "AttentionTangent",
    "BilinearGradients",
    "CosineGradients",
    "KVCache",
    "LogsumexpForward",
    "LogsumexpGradients",
    "MultiHeadAttention",
    "MultiHeadForward",
    "MultiHeadGradients",
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
    "attention_received",
    "attention_statistics",
    "attention_weights",
    "bias",
    "bilinear_attention",
    "bilinear_attention_backward",
    "bilinear_attention_forward",
    "blocks",
    "cosine_attention",
    "cosine_attention_backward",
    "cosine_attention_forward",
    "get_num_threads",
    "interop",
    "log_softmax",
    "log_softmax_backward",
    "logsumexp",
    "logsumexp_backward",
    "mask_program",
    "merge_attention",
    "plot",
    "reference",
    "rotary_embedding",
    "rotary_embedding_backward",
    "scaled_dot_product_attention",
    "score_program",
    "set_num_threads",
    "shaw_attention",
    "shaw_attention_backward",
    "shaw_attention_forward",
    "show_config",
    "softmax",
    "softmax_backward",
    "softmax_jacobian",
]

# The module of each name that is imported on first use, to keep `import sdpa` fast.
_LAZY = {
    "BilinearGradients": "sdpa.mechanisms.bilinear",
    "CosineGradients": "sdpa.mechanisms.cosine",
    "KVCache": "sdpa._cache",
    "MultiHeadAttention": "sdpa.mechanisms.multi_head",
    "MultiHeadForward": "sdpa.mechanisms.multi_head",
    "MultiHeadGradients": "sdpa.mechanisms.multi_head",
    "ShawGradients": "sdpa.mechanisms.shaw",
    "bilinear_attention": "sdpa.mechanisms.bilinear",
    "bilinear_attention_backward": "sdpa.mechanisms.bilinear",
    "bilinear_attention_forward": "sdpa.mechanisms.bilinear",
    "cosine_attention": "sdpa.mechanisms.cosine",
    "cosine_attention_backward": "sdpa.mechanisms.cosine",
    "cosine_attention_forward": "sdpa.mechanisms.cosine",
    "mask_program": "sdpa._programs._program",
    "rotary_embedding": "sdpa.mechanisms.rotary",
    "rotary_embedding_backward": "sdpa.mechanisms.rotary",
    "score_program": "sdpa._programs._program",
    "shaw_attention": "sdpa.mechanisms.shaw",
    "shaw_attention_backward": "sdpa.mechanisms.shaw",
    "shaw_attention_forward": "sdpa.mechanisms.shaw",
}


def __getattr__(name: str) -> Any:
    if name in ("bias", "blocks", "interop", "plot", "reference"):
        return importlib.import_module(f"sdpa.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'sdpa' has no attribute '{name}'")
    found = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__


# Pickles and help then do not depend on where a function is compiled.
for _name, _found in vars(_core).items():
    if not _name.startswith("_") and callable(_found):
        _found.__module__ = "sdpa"
del _name, _found

atexit.register(_core._close_pool)
_threads.register()
