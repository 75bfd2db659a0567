"""sdpa as the kernel behind PyTorch's own function."""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import Any

import torch

import sdpa
from sdpa.interop.torch._arrays import to_array, to_tensor

_NAME = "_scaled_dot_product_flash_attention_for_cpu"
_installed: list[torch.library.Library] = []


def _rows_of_heads(x: Any) -> torch.Tensor:
    """The array `x` (batch, heads, L, ...) as a tensor in whose memory L comes before the heads.

    The compiler relies on this layout, because PyTorch's kernel has it.
    """
    batch, heads, n, *rest = x.shape
    source = to_tensor(x)
    return source.new_empty(batch, n, heads, *rest).transpose(1, 2).copy_(source)


def _options(query: Any, key: Any, dropout_p: float, is_causal: bool, mask: Any, scale: Any) -> Any:
    if dropout_p:
        raise RuntimeError(f"{_NAME}: expected dropout_p 0, got {dropout_p}")
    return {
        "attn_mask": to_array(mask),
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": query.shape[1] != key.shape[1],
    }


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    options = _options(query, key, dropout_p, is_causal, attn_mask, scale)
    out = torch.empty_like(query)
    arrays = map(to_array, (query, key, value))
    _, lse = sdpa.attention_forward(*arrays, **options, out=to_array(out))
    return out, _rows_of_heads(lse)


def _backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    options = _options(query, key, dropout_p, is_causal, attn_mask, scale)
    arrays = map(to_array, (grad_out, query, key, value, out, logsumexp))
    grads = sdpa.attention_backward(*arrays, **options)
    return tuple(map(_rows_of_heads, grads[:3]))


class Installation:
    """Result of `install`: a context manager whose exit undoes it."""

    def __init__(self, is_new: bool) -> None:
        self._is_new = is_new

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_new:
            uninstall()


def install() -> Installation:
    """Make sdpa the kernel behind PyTorch's fused attention on the CPU, in the whole process.

    From then on `torch.nn.functional.scaled_dot_product_attention` runs on sdpa wherever PyTorch
    would choose its own fused kernel, forward and backward, in eager mode, under `torch.compile`
    and `torch.func.grad`; so does every model that calls it. PyTorch still uses its own code for
    tensors without exactly four axes, dropout, masks that need a gradient, d_v != d_k and vmap, and
    still refuses forward mode and second derivatives of the fused kernel.

    Returns
    -------
    Installation
        A context manager whose exit is `uninstall`, unless sdpa was installed before.

    Examples
    --------
    >>> import torch
    >>> import torch.nn.functional as F
    >>> from sdpa.interop.torch import install
    >>> q, k, v = torch.rand(3, 2, 4, 6, 8)
    >>> theirs = F.scaled_dot_product_attention(q, k, v)
    >>> with install():
    ...     ours = F.scaled_dot_product_attention(q, k, v)
    >>> torch.allclose(ours, theirs, atol=1e-6)
    True
    """
    if _installed:
        return Installation(False)
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # PyTorch warns about every kernel that is replaced, but here that is the purpose.
        warnings.filterwarnings("ignore", message=r"\s*(Warning only once|Overriding)")
        library.impl(_NAME, _forward, "CPU", allow_override=True)
        library.impl(f"{_NAME}_backward", _backward, "CPU", allow_override=True)
    _installed.append(library)
    return Installation(True)


def uninstall() -> None:
    """Undo `install`: PyTorch runs its own kernel again.

    Examples
    --------
    >>> from sdpa.interop.torch import install, uninstall
    >>> _ = install()
    >>> uninstall()
    """
    while _installed:
        _installed.pop()._destroy()
