"""Tensors as arrays and back, without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def check_tensor(name: str, x: Any) -> torch.Tensor:
    """`x`, if it is a tensor on the CPU."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if not x.is_cpu:
        raise ValueError(f"{name}: expected a tensor on the CPU, got {x.device}")
    return x


def bfloat16() -> Any:
    """NumPy's bfloat16, which only tensors of that type need."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError("bfloat16 tensors need ml_dtypes: pip install ml_dtypes") from error
    return ml_dtypes.bfloat16


def to_array(x: torch.Tensor | None) -> Any:
    """A view of the memory of `x`, with its strides."""
    if x is None:
        return None
    x = x.detach().resolve_neg()
    if x.dtype == torch.bfloat16:
        return x.view(torch.uint16).numpy().view(bfloat16())
    return x.numpy()


def to_tensor(x: np.ndarray[Any, Any]) -> torch.Tensor:
    """A tensor on the memory of `x`."""
    if x.dtype.kind == "V":  # bfloat16
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(x)
