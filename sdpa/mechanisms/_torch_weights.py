"""Weights from and to `torch.nn.MultiheadAttention`, for the methods of `sdpa.MultiHeadAttention`.

These import this module, and with it PyTorch, when they are called. It is here and not in
`sdpa.interop.torch`, which builds on the layer and knows nothing of weights. Numbers travel as
float64, which holds those of every type exactly.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np

from sdpa._arguments import float_dtype
from sdpa._arrays import Array
from sdpa.mechanisms._definition import Definition
from sdpa.mechanisms._multi_head_arguments import checked_parameters

try:
    import torch
except ImportError as _error:
    raise ImportError(
        "weights from and to PyTorch need PyTorch itself: pip install torch"
    ) from _error

Layer = TypeVar("Layer", bound=Definition)

_KINDS = ("query", "key", "value")
# What the module computes, as attributes of the layer.
_OF_MODULE = {
    "scale": "1/sqrt d_k",
    "fold_scale": False,
    "tied_kv": False,
    "swap_roles": False,
    "qk_norm": False,
    "rotary": False,
}


def from_module(cls: type[Layer], module: Any) -> Layer:
    """The layer that computes what the module does, with copies of its weights."""
    _check(module)
    if module.kdim == module.embed_dim:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    tensors = {f"w_{kind}": w for kind, w in zip(_KINDS, weights, strict=True)}
    tensors["w_out"] = module.out_proj.weight
    own = module.in_proj_bias, module.out_proj.bias
    has_bias = any(b is not None for b in own)
    if has_bias:
        # One that was taken away afterwards is 0.
        sizes = 3 * module.embed_dim, module.embed_dim
        b_in, b_out = (torch.zeros(n) if b is None else b for n, b in zip(sizes, own, strict=True))
        tensors |= {f"b_{kind}": b for kind, b in zip(_KINDS, b_in.chunk(3), strict=True)}
        tensors["b_out"] = b_out
    dtype = _dtype(module.out_proj.weight.dtype)
    layer = cls(
        module.embed_dim,
        module.num_heads,
        d_context=module.kdim,
        bias=has_bias,
        dtype=dtype,
        rng=0,
    )
    layer.parameters = {name: _array(x, dtype) for name, x in tensors.items()}
    return layer


def _check(module: Any) -> None:
    if not isinstance(module, torch.nn.MultiheadAttention):
        raise TypeError(
            f"module: expected a torch.nn.MultiheadAttention, got {type(module).__name__}"
        )
    if type(module).forward is not torch.nn.MultiheadAttention.forward:
        raise TypeError(
            "module: expected the forward of torch.nn.MultiheadAttention, got "
            f"{type(module).__name__}, which has its own; if that computes the same, load its "
            "state_dict into a torch.nn.MultiheadAttention"
        )
    for name, has in (
        ("add_bias_kv", module.bias_k is not None),
        ("add_zero_attn", module.add_zero_attn),
    ):
        if has:
            raise ValueError(f"module: expected {name}=False, got True")
    if module.kdim != module.vdim:
        raise ValueError(
            f"module: expected keys and values of one context, kdim = vdim, got "
            f"kdim={module.kdim}, vdim={module.vdim}"
        )
    device = module.out_proj.weight.device
    if device.type == "meta":
        raise ValueError("module: expected weights, got a module on meta, which has none")


def _dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """NumPy's type of the same name."""
    name = str(dtype).removeprefix("torch.")
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError as error:
            raise ImportError("bfloat16 weights need ml_dtypes: pip install ml_dtypes") from error
        return float_dtype("module", ml_dtypes.bfloat16)
    return float_dtype("module", name)


def _array(x: torch.Tensor, dtype: np.dtype[Any]) -> Array:
    return np.array(x.detach().cpu().double().numpy().T, dtype, order="C")


def to_module(layer: Definition) -> torch.nn.MultiheadAttention:
    """The module that computes what the layer does, with copies of its parameters."""
    width = layer.d_model // layer.heads
    expected = {"kv_heads": layer.heads, "d_k": width, "d_v": width} | _OF_MODULE
    for name, value in expected.items():
        own = getattr(layer, name)
        if (
            name == "scale"
            and isinstance(own, float)
            and math.isclose(own, width**-0.5, rel_tol=1e-15)
        ):
            continue
        if own != value:
            raise ValueError(
                f"{name}: expected {value!r}, as torch.nn.MultiheadAttention has it, got {own!r}"
            )
    module = torch.nn.MultiheadAttention(
        layer.d_model,
        layer.heads,
        bias=layer.bias,
        kdim=layer.d_context,
        vdim=layer.d_context,
        batch_first=True,
        dtype=getattr(torch, layer.dtype.name),
    )
    weights = {
        name: torch.from_numpy(np.array(y.T, np.float64))
        for name, y in checked_parameters(layer, layer.parameters).items()
    }
    state = {"out_proj.weight": weights["w_out"]}
    if layer.d_context == layer.d_model:
        state["in_proj_weight"] = torch.cat([weights[f"w_{kind}"] for kind in _KINDS])
    else:
        state |= {f"{kind[0]}_proj_weight": weights[f"w_{kind}"] for kind in _KINDS}
    if layer.bias:
        state["in_proj_bias"] = torch.cat([weights[f"b_{kind}"] for kind in _KINDS])
        state["out_proj.bias"] = weights["b_out"]
    module.load_state_dict(state)
    return module
