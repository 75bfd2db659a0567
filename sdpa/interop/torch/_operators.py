"""Operators of the namespace `sdpa`, for the dispatcher: schemas, kernels and shapes.

All operators end in the same arguments, OPERANDS and then OPTIONS, which derivatives pass on
unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import sdpa
from sdpa import _warnings
from sdpa.interop.torch._arrays import to_array, to_tensor

# Gradients exist for the first five; the other operands are constants.
DIFFERENTIABLE = ("query", "key", "value", "attn_mask", "sinks")
OPERANDS = (
    *DIFFERENTIABLE,
    *("alibi_slopes", "key_lengths", "query_offset", "cu_seqlens_q", "cu_seqlens_k", "seed"),
)
OPTIONS = (
    *("dropout_p", "is_causal", "scale", "enable_gqa", "softcap", "left", "right", "invariant"),
    *("workers", "quiet"),
)
SUFFIX = (
    "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? sinks, "
    "Tensor? alibi_slopes, Tensor? key_lengths, Tensor? query_offset, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? seed, float dropout_p, str is_causal, float? scale, "
    "bool enable_gqa, float? softcap, SymInt? left, SymInt? right, bool invariant, "
    "SymInt? workers, bool quiet"
)
ALIGNMENTS: dict[str, bool | str] = {
    "none": False,
    "upper_left": True,
    "lower_right": "lower_right",
}

Tensors = tuple[torch.Tensor, ...]

LIBRARY = torch.library.Library("sdpa", "DEF")
LIBRARY.define(f"attention_forward({SUFFIX}) -> (Tensor out, Tensor lse)")
LIBRARY.define(f"attention_weights(str stage, {SUFFIX}) -> Tensor")
LIBRARY.define(
    f"attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, bool[] needs, "
    f"{SUFFIX}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    f"attention_jvp(Tensor? query_t, Tensor? key_t, Tensor? value_t, Tensor? attn_mask_t, "
    f"Tensor? sinks_t, Tensor out, Tensor lse, {SUFFIX}) -> Tensor"
)
LIBRARY.define(
    f"attention_double_backward(Tensor? gg_query, Tensor? gg_key, Tensor? gg_value, "
    f"Tensor? gg_attn_mask, Tensor? gg_sinks, Tensor grad_out, Tensor? grad_lse, Tensor out, "
    f"Tensor lse, bool[] needs, {SUFFIX}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def split(args: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Split the arguments of an operator into (the first ones, operands, options)."""
    n = len(args) - len(OPTIONS)
    return args[: n - len(OPERANDS)], args[n - len(OPERANDS) : n], args[n:]


def keywords_of(
    operands: Sequence[Any], options: Sequence[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """(query, key, value), and the options by the names that sdpa has for them."""
    named = dict(zip(OPERANDS, operands, strict=True))
    seed = named.pop("seed")
    arrays = {name: to_array(x) for name, x in named.items()}
    packing = {name: arrays.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    if any(x is not None for x in packing.values()):
        arrays |= packing
    dropout_p, is_causal, scale, enable_gqa, softcap, left, right, invariant, workers, _ = options
    if invariant:  # additive attention lacks this option
        arrays["invariant"] = True
    return [arrays.pop(name) for name in ("query", "key", "value")], arrays | {
        "dropout_p": dropout_p,
        "is_causal": ALIGNMENTS[is_causal],
        "scale": scale,
        "enable_gqa": enable_gqa,
        "softcap": softcap,
        "window": None if left is right is None else (left, right),
        "rng": None if seed is None else int(seed) % 2**64,
        "workers": workers,
    }


def gradients(found: Any, names: Sequence[str], like: Sequence[Any]) -> Tensors:
    """The gradients with these names; an empty tensor for each that was not asked for."""
    grads = (getattr(found, name) for name in names)
    return tuple(
        torch.empty(0, device="cpu") if grad is None else to_tensor(grad).to(x.dtype)
        for grad, x in zip(grads, like, strict=True)
    )


def _forward(*args: Any) -> Tensors:
    _, operands, options = split(args)
    arrays, keywords = keywords_of(operands, options)
    with _warnings.silenced(options[OPTIONS.index("quiet")]):
        out, lse = sdpa.attention_forward(*arrays, **keywords)
    return to_tensor(out), to_tensor(lse)


def _weights(stage: Any, *args: Any) -> torch.Tensor:
    _, operands, options = split(args)
    (query, key, _), keywords = keywords_of(operands, options)
    if "cu_seqlens_q" in keywords:  # the last sequence has all rows
        keywords["sequence"] = len(keywords["cu_seqlens_q"]) - 2
    return to_tensor(sdpa.attention_weights(query, key, stage=stage, **keywords))


@_warnings.silenced()  # the forward has warned
def _backward(*args: Any) -> Tensors:
    (grad_out, grad_lse, out, lse, needs), operands, options = split(args)
    arrays, keywords = keywords_of(operands, options)
    found = sdpa.attention_backward(
        *(to_array(grad_out), *arrays, to_array(out), to_array(lse)),
        **keywords,
        grad_lse=to_array(grad_lse),
        needs=[name for name, need in zip(DIFFERENTIABLE, needs, strict=True) if need],
    )
    return gradients(found, DIFFERENTIABLE, operands[:5])


@_warnings.silenced()
def _jvp(*args: Any) -> torch.Tensor:
    (*tangents, _, _), operands, options = split(args)
    arrays, keywords = keywords_of(operands, options)
    *tangents, mask_t, sinks_t = map(to_array, tangents)
    found = sdpa.attention_jvp(
        *(*arrays, *tangents), **keywords, attn_mask_t=mask_t, sinks_t=sinks_t
    )
    return to_tensor(found.out_t)


@_warnings.silenced()
def _double_backward(*args: Any) -> Tensors:
    (*tangents, grad_out, grad_lse, out, lse, needs), operands, options = split(args)
    arrays, keywords = keywords_of(operands, options)
    *tangents, gg_mask, gg_sinks = map(to_array, tangents)
    names = ("grad_out", *DIFFERENTIABLE)
    found = sdpa.attention_double_backward(
        *(*tangents, to_array(grad_out), *arrays, to_array(out), to_array(lse)),
        **keywords,
        gg_attn_mask=gg_mask,
        gg_sinks=gg_sinks,
        grad_lse=to_array(grad_lse),
        needs=[name for name, need in zip(names, needs, strict=True) if need],
    )
    return gradients(found, names, (grad_out, *operands[:5]))


def _shape(operands: Sequence[Any], options: Sequence[Any]) -> tuple[int, ...]:
    """(..., heads, Lq) of the result."""
    query, key, value = operands[:3]
    enable_gqa = options[OPTIONS.index("enable_gqa")]
    if operands[OPERANDS.index("cu_seqlens_q")] is not None:
        n_q, n_heads = query.shape[:2]
        if not enable_gqa:
            (n_heads,) = torch.broadcast_shapes(*(x.shape[1:2] for x in (query, key, value)))
        return n_heads, n_q
    if enable_gqa and query.ndim > 2:
        batch = torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
        return (*batch, *query.shape[-3:-1])
    return (
        *torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value))),
        query.shape[-2],
    )


def fake_forward(*args: Any) -> Tensors:
    _, operands, options = split(args)
    query, _, value = operands[:3]
    shape = _shape(operands, options)
    rows = shape if operands[OPERANDS.index("cu_seqlens_q")] is None else shape[::-1]
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty((*rows, value.shape[-1])), query.new_empty(shape, dtype=wide)


def _fake_weights(stage: str, *args: Any) -> torch.Tensor:
    _, operands, options = split(args)
    query, key, _, *others = operands
    n_k = key.shape[-2 if operands[OPERANDS.index("cu_seqlens_q")] is None else 0]
    return query.new_empty((*_shape((query, key, key, *others), options), n_k))


def fake_gradients(needs: Sequence[bool], like: Sequence[Any]) -> Tensors:
    return tuple(
        x.new_empty(x.shape) if need else torch.empty(0, device="cpu")
        for need, x in zip(needs, like, strict=True)
    )


def _fake_backward(*args: Any) -> Tensors:
    (*_, needs), operands, _ = split(args)
    return fake_gradients(needs, operands[:5])


def _fake_jvp(*args: Any) -> torch.Tensor:
    (*_, out, _), _, _ = split(args)
    return out.new_empty(out.shape)


def _fake_double_backward(*args: Any) -> Tensors:
    (*_, grad_out, _, _, _, needs), operands, _ = split(args)
    return fake_gradients(needs, (grad_out, *operands[:5]))


_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "attention_forward": (_forward, fake_forward),
    "attention_weights": (_weights, _fake_weights),
    "attention_backward": (_backward, _fake_backward),
    "attention_jvp": (_jvp, _fake_jvp),
    "attention_double_backward": (_double_backward, _fake_double_backward),
}
for _name, (_kernel, _fake) in _KERNELS.items():
    LIBRARY.impl(_name, _kernel, "CPU")
    torch.library.register_fake(f"sdpa::{_name}", _fake, lib=LIBRARY)

forward = torch.ops.sdpa.attention_forward.default
weights = torch.ops.sdpa.attention_weights.default
backward = torch.ops.sdpa.attention_backward.default
jvp = torch.ops.sdpa.attention_jvp.default
double_backward = torch.ops.sdpa.attention_double_backward.default
