"""The order in memory of results: that of PyTorch's own function, on which models rely."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import sdpa
from sdpa._arguments import broadcasts
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
    of_query, of_key = query.shape, key.shape
    rank = len(of_query)
    if rank not in _RANKS or len(of_key) != rank or of_key != value.shape:
        return False
    if arguments["cu_seqlens_q"] is not None:
        return False
    if arguments["dropout_p"] or not query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
        return False
    if 0 in of_query or 0 in of_key or of_query[-1] != of_key[-1]:
        return False
    if rank == 4 and of_query[0] != of_key[0]:
        return False
    if of_query[-3] != of_key[-3] and not (
        arguments["enable_gqa"] or (_SINCE_2_14 and of_key[-3] == 1)
    ):
        return False
    mask = arguments["attn_mask"]
    return mask is None or _is_constant(mask, of_query[:-2])


def _is_constant(mask: torch.Tensor, leading: tuple[int, ...]) -> bool:
    """Whether the fused kernel takes this mask beside a query with these leading axes."""
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


def has_all_axes(query: torch.Tensor, *others: torch.Tensor, grouped: bool) -> bool:
    """Whether the result has no axis of the batch or the heads from `others` alone."""
    n_inner = 3 if grouped else 2  # groups of heads share one of the others' heads
    return all(
        x.ndim <= query.ndim and broadcasts(x.shape[:-n_inner], query.shape[:-n_inner])
        for x in others
    )


def empty_in_order(query: torch.Tensor, d: int) -> torch.Tensor:
    """A tensor with rows of this width whose axes lie in memory in the order of query's."""
    order = sorted(range(query.ndim), key=query.stride, reverse=True)
    shape = (*query.shape[:-1], d)
    out = query.new_empty([shape[axis] for axis in order])
    return out.permute([order.index(axis) for axis in range(query.ndim)])


def rows_of_heads(x: np.ndarray[Any, Any], heads: int = -3) -> np.ndarray[Any, Any]:
    """A copy of `x` in whose memory the axis behind that of the heads comes before it."""
    return x.swapaxes(heads, heads + 1).copy().swapaxes(heads, heads + 1)


def empty_rows_of_heads(x: torch.Tensor) -> torch.Tensor:
    """A tensor like `x` (..., heads, L, d) with the layout of `rows_of_heads`."""
    return x.new_empty(x.transpose(-3, -2).shape).transpose(-3, -2)
