"""The order in memory of results: that of PyTorch's own function, on which models rely."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import sdpa
from sdpa.interop.torch._arrays import to_array, to_tensor

_C: Any = torch._C  # its types name no function that sets the trace

# Since then PyTorch's fused kernel also takes operands without a batch, and one head of keys for
# all of the query.
_SINCE_2_14 = torch.__version__ >= "2.14"
_RANKS = (3, 4) if _SINCE_2_14 else (4,)


def is_fused(arguments: dict[str, Any]) -> bool:
    """Whether PyTorch would take its fused kernel for these operands and options.

    Its output has the strides of `torch.empty_like(query)`, and in its gradients L comes before
    the heads. Everywhere else PyTorch's output is contiguous.
    """
    trace = _C._get_tracing_state()
    if trace is None:
        return _is_fused(arguments)
    _C._set_tracing_state(None)  # within torch.jit.trace lengths warn of being compared
    try:
        return _is_fused(arguments)
    finally:
        _C._set_tracing_state(trace)


def _is_fused(arguments: dict[str, Any]) -> bool:
    query, key, value = arguments["query"], arguments["key"], arguments["value"]
    if not query.ndim == key.ndim == value.ndim or query.ndim not in _RANKS:
        return False
    if arguments["dropout_p"] or not query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
        return False
    *batch, heads, _, d = query.shape
    if not (list(key.shape[:-3]) == list(value.shape[:-3]) == batch):
        return False
    if not key.shape[-1] == value.shape[-1] == d or key.shape[-3] != value.shape[-3]:
        return False
    if query.numel() == 0 or key.numel() == 0:
        return False
    if key.shape[-3] != heads and not arguments["enable_gqa"]:
        return _SINCE_2_14 and key.shape[-3] == 1 and _is_constant(arguments, (*batch, heads))
    return _is_constant(arguments, (*batch, heads))


def _is_constant(arguments: dict[str, Any], leading: tuple[int, ...]) -> bool:
    """Whether the fused kernel takes the mask beside a query with these leading axes."""
    mask = arguments["attn_mask"]
    if mask is None:
        return True
    if mask.requires_grad or mask.ndim not in (range(5) if len(leading) == 1 else (2, 4)):
        return False
    own = reversed(mask.shape[:-2])
    return all(n in (1, m) for n, m in zip(own, (*reversed(leading), 1), strict=False))


def forward_like(query: torch.Tensor, *arrays: Any, **options: Any) -> tuple[torch.Tensor, Any]:
    """(out, lse) of `sdpa.attention_forward`, out with the strides of `torch.empty_like(query)`."""
    if query.is_contiguous():
        array, lse = sdpa.attention_forward(*arrays, **options)
        out = to_tensor(array)
        if out.stride() != query.stride():  # of axes of length 1
            out = out.as_strided(out.shape, query.stride())
    else:
        out = torch.empty_like(query)
        _, lse = sdpa.attention_forward(*arrays, **options, out=to_array(out))
    return out, lse


def rows_of_heads(x: np.ndarray[Any, Any], heads: int = -3) -> np.ndarray[Any, Any]:
    """A copy of `x` in whose memory the axis behind that of the heads comes before it."""
    return x.swapaxes(heads, heads + 1).copy().swapaxes(heads, heads + 1)


def empty_rows_of_heads(x: torch.Tensor) -> torch.Tensor:
    """A tensor like `x` (..., heads, L, d) with the layout of `rows_of_heads`."""
    return x.new_empty(x.transpose(-3, -2).shape).transpose(-3, -2)
