"""The order in memory of results: that of PyTorch's own function, on which models rely."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import sdpa
from sdpa.interop.torch._arrays import to_array, to_tensor

_C: Any = torch._C  # its types name no function that sets the trace


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
    if not query.ndim == key.ndim == value.ndim == 4:
        return False
    if arguments["dropout_p"] or not query.stride(3) == key.stride(3) == value.stride(3) == 1:
        return False
    batch, heads, n_q, d = query.shape
    if not (key.shape[0] == value.shape[0] == batch and key.shape[3] == value.shape[3] == d):
        return False
    if key.shape[1] != value.shape[1] or n_q == 0 or key.shape[2] == 0:
        return False
    if key.shape[1] != heads and not arguments["enable_gqa"]:
        return False
    mask = arguments["attn_mask"]
    return mask is None or _is_constant(mask, (batch, heads))


def _is_constant(mask: torch.Tensor, leading: tuple[int, int]) -> bool:
    """Whether the fused kernel takes this mask."""
    if mask.ndim == 4 and any(n not in (1, m) for n, m in zip(mask.shape, leading, strict=False)):
        return False
    return mask.ndim in (2, 4) and not mask.requires_grad


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
