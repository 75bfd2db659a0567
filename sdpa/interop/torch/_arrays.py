"""Tensors as arrays and back, without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Those that NumPy has too. What is no float is judged as an array.
_TYPES = frozenset(
    {*_FLOATS, torch.bool, torch.complex64, torch.complex128}
    | {getattr(torch, f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
)


def check_tensor(name: str, x: Any) -> torch.Tensor:
    """Return `x` if it is a dense tensor on the CPU and NumPy has its type; raise otherwise."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if not x.is_cpu:
        raise ValueError(f"{name}: expected a tensor on the CPU, got {x.device}")
    if x.is_nested or x.layout is not torch.strided:
        kind = "a nested one" if x.is_nested else x.layout
        raise TypeError(f"{name}: expected a dense tensor, got {kind}")
    if x.dtype not in _TYPES:
        names = "float16, bfloat16, float32 or float64"
        raise TypeError(f"{name}: expected {names}, got {str(x.dtype).removeprefix('torch.')}")
    return x


def under_autocast(*tensors: Any) -> tuple[Any, ...]:
    """The tensors in autocast's type if it is on, as PyTorch converts for its own function.

    Like there, float64 stays.
    """
    if not torch.is_autocast_enabled("cpu"):
        return tensors
    dtype = torch.get_autocast_dtype("cpu")
    return tuple(x if x is None or x.dtype not in _FLOATS[:3] else x.to(dtype) for x in tensors)


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
    if x.dtype is torch.bfloat16:
        return x.detach().resolve_neg().view(torch.uint16).numpy().view(bfloat16())
    return x.numpy(force=True)  # although it may need a gradient, or stand for its negative


def to_tensor(x: np.ndarray[Any, Any]) -> torch.Tensor:
    """A tensor on the memory of `x`."""
    if x.dtype.kind == "V":  # bfloat16
        tensor = torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(x)
    # The strides of an empty array are 0, which PyTorch's are not.
    return tensor if x.size else tensor.new_empty(x.shape)
