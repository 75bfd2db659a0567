"""The routines as functions of PyTorch, with derivatives, for tensors on the CPU.

>>> import torch
>>> from sdpa.interop.torch import attention
>>> query, key, value = torch.ones(3, 4), torch.eye(4), torch.arange(8.0).reshape(4, 2)
>>> torch.func.grad(lambda query: attention(query, key, value).square().sum())(query).shape
torch.Size([3, 4])

Tensors are not copied, and results have their type. Gradients, tangents and second derivatives
exist wherever `sdpa.attention_backward` has a gradient, under autograd, `torch.func`,
`torch.autograd.forward_ad` and `torch.compile`. Third derivatives and forward mode over forward
mode do not exist.

`install` puts sdpa behind PyTorch's own function, so that models need no edit.
"""

from __future__ import annotations

try:
    import torch  # noqa: F401
except ImportError as _error:
    raise ImportError("sdpa.interop.torch needs PyTorch: pip install torch") from _error

from sdpa._public import publish
from sdpa.interop.torch import _flops  # noqa: F401
from sdpa.interop.torch._additive import additive_attention
from sdpa.interop.torch._attention import (
    AttentionForward,
    attention,
    attention_forward,
    attention_weights,
    scaled_dot_product_attention,
)
from sdpa.interop.torch._flex import flex_attention
from sdpa.interop.torch._install import Installation, install, uninstall

__all__ = [
    "AttentionForward",
    "Installation",
    "additive_attention",
    "attention",
    "attention_forward",
    "attention_weights",
    "flex_attention",
    "install",
    "scaled_dot_product_attention",
    "uninstall",
]


def __dir__() -> list[str]:
    return __all__


publish(__name__, globals())
