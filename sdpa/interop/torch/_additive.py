"""Additive attention.

The gradient is `additive_attention_backward`, in O(block) memory. Everything beyond it (gradients
that are differentiated again, forward mode, vmap) goes through a formula of PyTorch's operations
that holds an (Lq, Lk, h) tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import Function

import sdpa
from sdpa import _warnings
from sdpa._arrays import softcapped
from sdpa.interop.torch._arrays import check_tensor, to_array, to_tensor, under_autocast
from sdpa.interop.torch._attention import arguments_of
from sdpa.interop.torch._derivatives import no_higher, repeated_heads, save, saved, scale_of
from sdpa.interop.torch._functions import FUNCTIONS, is_plain
from sdpa.interop.torch._operators import (
    ARGUMENTS,
    LIBRARY,
    NUMBER,
    define,
    fake_forward,
    fake_gradients,
    gradients,
    keywords_of,
    split,
)

_DIFFERENTIABLE = sdpa.AdditiveGradients._fields
WEIGHTS = {"w_query": "Tensor", "w_key": "Tensor", "w_score": "Tensor", "bias": "Tensor?"}
_ARGUMENTS = (*WEIGHTS, *ARGUMENTS)
_UPSTREAM = {"grad_out": "Tensor", "out": "Tensor", "lse": "Tensor", "needs": "bool[]"}
define("additive_forward", WEIGHTS, "(Tensor out, Tensor lse)")
define("additive_backward", {**_UPSTREAM, **WEIGHTS}, len(_DIFFERENTIABLE))


def _differentiable(args: Sequence[Any]) -> list[Any]:
    """The arguments of the forward that have gradients, in the order of _DIFFERENTIABLE."""
    named = dict(zip(_ARGUMENTS, args, strict=True))
    return [named[name] for name in _DIFFERENTIABLE]


def _prepared(args: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The operands and options of `sdpa`, from the arguments of the forward."""
    weights, operands, options = split(args)
    arrays, keywords = keywords_of(operands, options)
    return [*arrays, *map(to_array, weights)], keywords


def _forward(*args: Any) -> tuple[torch.Tensor, ...]:
    arrays, keywords = _prepared(args)
    out, lse = sdpa.additive_attention_forward(*arrays, **keywords)
    return to_tensor(out), to_tensor(lse)


@_warnings.silenced()  # the forward has warned
def _backward(grad_out: Any, out: Any, lse: Any, needs: Any, *args: Any) -> Any:
    arrays, keywords = _prepared(args)
    found = sdpa.additive_attention_backward(
        *(to_array(grad_out), *arrays, to_array(out), to_array(lse)),
        **keywords,
        needs=[name for name, need in zip(_DIFFERENTIABLE, needs, strict=True) if need],
    )
    return gradients(found, _DIFFERENTIABLE, _differentiable(args))


def _fake_backward(grad_out: Any, out: Any, lse: Any, needs: Any, *args: Any) -> Any:
    return fake_gradients(needs, _differentiable(args))


_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "additive_forward": (_forward, lambda *args: fake_forward(*args[len(WEIGHTS) :])),
    "additive_backward": (_backward, _fake_backward),
}
for _name, (_kernel, _fake) in _KERNELS.items():
    LIBRARY.impl(_name, _kernel, "CPU")
    torch.library.register_fake(f"sdpa::{_name}", _fake, lib=LIBRARY)
_forward_operator = torch.ops.sdpa.additive_forward.default
_backward_operator = torch.ops.sdpa.additive_backward.default


def _composed(*args: Any) -> Any:
    """(out, lse), with the scores as the additive mask of an attention of width 0."""
    x = dict(zip(_ARGUMENTS, args, strict=True))
    w_query, w_key, w_score, bias = (x.pop(name) for name in WEIGHTS)
    query, key, attn_mask = x["query"], x["key"], x["attn_mask"]
    keys = repeated_heads(key, query) if x["enable_gqa"] else key
    hidden = (query @ w_query).unsqueeze(-2) + (keys @ w_key).unsqueeze(-3)
    s = torch.tanh(hidden if bias is None else hidden + bias) @ w_score
    s = s * scale_of(x, 1.0)
    if x["softcap"] is not None:
        s = softcapped(s, x["softcap"], torch.tanh)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        s = torch.where(attn_mask, s, -torch.inf)
    elif attn_mask is not None:
        s = s + attn_mask
    x |= {"query": query[..., :0], "key": key[..., :0], "attn_mask": s}
    x |= {name: None for name in ("softcap", "scale", "scale" + NUMBER) if name in x}
    return FUNCTIONS.forward(*x.values())


def _out_of(args: Sequence[Any], places: Sequence[int]) -> Callable[..., Any]:
    """The output, composed, as a function of the arguments at these places."""

    def out(*moved: Any) -> Any:
        changed = list(args)
        for i, x in zip(places, moved, strict=True):
            changed[i] = x
        return _composed(*changed)[0]

    return out


def _vjp(is_last: bool, ctx: Any, grad_out: Any, _: Any) -> tuple[Any, ...]:
    """The gradients, by the operator unless they are to be differentiated again."""
    args, (out, lse) = saved(ctx)
    grads: list[Any] = [None] * len(args)
    places = [i for i, need in enumerate(ctx.needs_input_grad) if need]
    if grad_out is None or not places:
        return tuple(grads)
    if is_last or not torch.is_grad_enabled():
        needs = _differentiable(ctx.needs_input_grad)
        found = _backward_operator(grad_out, out, lse, needs, *args)
        named = dict(zip(_differentiable(range(len(args))), found, strict=True))
    else:
        moved = [args[i] for i in places]
        found = torch.func.vjp(_out_of(args, places), *moved)[1](grad_out)
        named = dict(zip(places, found, strict=True))
    for i in places:
        grads[i] = named[i]
    return tuple(grads)


def _jvp(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
    """The tangent of out, as the transpose of its gradient, because levels of jvp do not nest."""
    args, (out, lse) = saved(ctx)
    places = [i for i, x in enumerate(tangents) if isinstance(x, torch.Tensor)]
    moved, directions = [args[i] for i in places], tuple(tangents[i] for i in places)

    def gradient(grad_out: Any) -> Any:
        return torch.func.vjp(_out_of(args, places), *moved)[1](grad_out)

    (out_t,) = torch.func.vjp(gradient, torch.zeros_like(out))[1](directions)
    return out_t, torch.zeros_like(lse)


class _Additive(Function):
    """The operator with forward mode and vmap."""

    forward = staticmethod(lambda *args: _forward_operator(*args))
    setup_context = staticmethod(save)
    backward = staticmethod(partial(_vjp, False))
    jvp = staticmethod(_jvp)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return torch.func.vmap(_composed, tuple(in_dims))(*args), (0, 0)


torch.library.register_autograd(
    "sdpa::additive_forward", partial(_vjp, True), setup_context=save, lib=LIBRARY
)
torch.library.register_autograd(
    "sdpa::additive_backward", no_higher, setup_context=save, lib=LIBRARY
)


def additive_attention(
    query: Any,
    key: Any,
    value: Any,
    w_query: Any,
    w_key: Any,
    w_score: Any,
    bias: Any = None,
    *,
    scale: float | torch.Tensor | None = 1.0,
    **options: Any,
) -> torch.Tensor:
    """`sdpa.additive_attention` on tensors, differentiable in all of them.

    Parameters
    ----------
    query, key, value, w_query, w_key, w_score, bias : torch.Tensor
        On the CPU, of one type; shapes as in `sdpa.additive_attention`.
    scale : float or torch.Tensor, default 1
        Factor of the scores; a tensor of one number is differentiated, too.
    **options
        attn_mask, dropout_p, is_causal and the keyword options of `attention`.

    Returns
    -------
    (..., heads, Lq, d_v) torch.Tensor
        Bahdanau, Cho and Bengio, "Neural machine translation by jointly learning to align and
        translate" (2015), appendix A.1.2.

    Raises
    ------
    TypeError, ValueError
        As `sdpa.additive_attention`; also if an argument is not a tensor on the CPU.

    Notes
    -----
    Forward mode, vmap and gradients with create_graph=True, such as those of `torch.func`, hold an
    (Lq, Lk, h) tensor.

    Examples
    --------
    >>> import torch
    >>> from sdpa.interop.torch import additive_attention
    >>> w = torch.ones(2, 3, requires_grad=True)
    >>> value = torch.tensor([[1.0], [3.0]])
    >>> out = additive_attention(torch.ones(1, 2), torch.eye(2), value, w, w, torch.ones(3))
    >>> out.sum().backward()
    >>> out.item(), w.grad.shape
    (2.0, torch.Size([2, 3]))
    """
    if isinstance(scale, torch.Tensor) and scale.numel() == 1:
        # The kernel has no gradient of it, but one of what it is a factor of.
        factor, w_score = check_tensor("scale", scale), check_tensor("w_score", w_score)
        w_score, scale = w_score * factor.to(w_score.dtype).reshape(()), 1.0
    named = dict(zip(WEIGHTS, (w_query, w_key, w_score, bias), strict=True))
    weights = [
        None if x is None and name == "bias" else check_tensor(name, x) for name, x in named.items()
    ]
    args = (*under_autocast(*weights), *arguments_of(query, key, value, scale=scale, **options))
    if torch.compiler.is_compiling() or is_plain(args):
        return _forward_operator(*args)[0]
    return _Additive.apply(*args)[0]
