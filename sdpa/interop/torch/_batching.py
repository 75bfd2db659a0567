"""vmap of PyTorch's fused kernel: one call, where PyTorch has a loop that warns of its slowness.

PyTorch takes no rule for operators whose mask is a keyword. So its kernel for batches calls an
operator of ours that has the same arguments without keywords, and the rule is this one's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sdpa.interop.torch._operators import LIBRARY

FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
BACKWARD = f"{FORWARD}_backward"

_QKV = "Tensor query, Tensor key, Tensor value"
_OPTIONS = "float dropout_p, bool is_causal, Tensor? attn_mask, float? scale"
_SCHEMAS = {
    FORWARD: f"({_QKV}, {_OPTIONS}) -> (Tensor, Tensor)",
    BACKWARD: f"(Tensor grad_out, {_QKV}, Tensor out, Tensor logsumexp, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor)",
}
_N_OPTIONS = 4


def _call(name: str, args: Sequence[Any]) -> Any:
    """PyTorch's operator on the arguments of ours."""
    *positional, attn_mask, scale = args
    return getattr(torch.ops.aten, name)(*positional, attn_mask=attn_mask, scale=scale)


def _merged(x: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    """`x` with the axis of the batch of vmap merged into its first one."""
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _merged_mask(mask: Any, dim: int | None, size: int, batch: int) -> Any:
    if mask is None or (dim is None and (mask.ndim == 2 or mask.shape[0] == 1)):
        return mask
    x = mask.expand(size, *mask.shape) if dim is None else mask.movedim(dim, 0)
    if x.ndim == 3:
        x = x[:, None, None]
    return x.expand(size, batch, *x.shape[2:]).flatten(0, 1)


def _rule(name: str, info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
    size = info.batch_size
    tensors, (dropout_p, is_causal, mask, scale) = args[:-_N_OPTIONS], args[-_N_OPTIONS:]
    merged = [_merged(x, dim, size) for x, dim in zip(tensors, in_dims, strict=False)]
    batch = len(merged[0]) // size
    mask = _merged_mask(mask, in_dims[-2], size, batch)
    found = _call(name, (*merged, dropout_p, is_causal, mask, scale))
    # Contiguous, as PyTorch stacks the results of its loop.
    return tuple(x.unflatten(0, (size, batch)).contiguous() for x in found), (0,) * len(found)


def _define(name: str, schema: str) -> Callable[..., Any]:
    """The kernel for batches of PyTorch's operator of this name."""

    def rule(*args: Any) -> Any:
        return _rule(name, *args)

    def composite(*args: Any) -> Any:
        return _call(name, args)

    LIBRARY.define(name + schema)
    LIBRARY.impl(name, composite, "CompositeImplicitAutograd")
    torch.library.register_vmap(f"sdpa::{name}", rule, lib=LIBRARY)
    return getattr(torch.ops.sdpa, name).default


_forward, _backward = (_define(name, schema) for name, schema in _SCHEMAS.items())


def _forward_of_batch(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> Any:
    return _forward(query, key, value, dropout_p, is_causal, attn_mask, scale)


def _backward_of_batch(
    grad_out: Any, *args: Any, attn_mask: Any = None, scale: float | None = None
) -> Any:
    if grad_out is None:  # PyTorch's undefined gradient, which is 0
        return tuple(map(torch.zeros_like, args[:3]))
    return _backward(grad_out, *args, attn_mask, scale)


KERNELS: dict[str, Callable[..., Any]] = {FORWARD: _forward_of_batch, BACKWARD: _backward_of_batch}


def put(library: torch.library.Library) -> None:
    """Give PyTorch's operators these kernels for batches while `library` exists."""
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, "FuncTorchBatched")
