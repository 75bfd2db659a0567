"""Derivatives of the operators, in terms of the operators.

============================== =====================================================================
reverse                        `attention_backward`
forward                        `attention_jvp`
reverse of reverse, reverse    `attention_double_backward`, which serves for all three because the
of forward, forward of reverse Hessian of <g, out> is symmetric
tangent of lse                 composed here, on the (Lq, Lk) matrix of the weights
============================== =====================================================================

They are written once for two sets of routines: the operators, and the functions around these, which
also have forward mode and vmap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sdpa import _arguments, _arrays, _table
from sdpa._table import DIFFERENTIABLE
from sdpa.interop.torch._operators import (
    ARGUMENTS,
    LEADING,
    N_DIFFERENTIABLE,
    NUMBER,
    OPERANDS,
    named,
    split,
)
from sdpa.interop.torch._packed import heads_first, is_packed, one_sequence, rows, spans

Gradients = tuple[Any, ...]

_HIGHER = (
    "sdpa.interop.torch: third derivatives and forward mode over forward mode are not available"
)


@dataclass
class Routines:
    """One of the two sets: the operators, or the functions around them."""

    forward: Callable[..., Any]
    weights: Callable[..., Any]
    backward: Callable[..., Any]
    jvp: Callable[..., Any]
    double_backward: Callable[..., Any]


def save(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    """Keep the tensors of a call, and the rest of its arguments, for its derivatives."""
    outputs = output if isinstance(output, tuple) else (output,)
    tensors = [x if isinstance(x, torch.Tensor) else None for x in (*inputs, *outputs)]
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.constants = [None if isinstance(x, torch.Tensor) else x for x in inputs]
    ctx.set_materialize_grads(False)


def _refuse_constants(args: Sequence[bool]) -> None:
    """Raise if one of the moving arguments, given by these flags, has no derivative."""
    _, operands, _ = split(args)
    for name, moves in zip(OPERANDS[N_DIFFERENTIABLE:], operands[N_DIFFERENTIABLE:], strict=True):
        if moves:
            instead = ", or add its bias as attn_mask" if _is_bias(name) else ""
            raise NotImplementedError(f"{name}: has no derivative; detach it{instead}")


def _is_bias(name: str) -> bool:
    return _table.OPTIONS[name].kind == "position"


def saved(ctx: Any) -> tuple[list[Any], Sequence[Any]]:
    """(arguments, results) of the call."""
    n = len(ctx.constants)
    _refuse_constants(ctx.needs_input_grad[:n])
    tensors = ctx.saved_tensors
    pairs = zip(tensors[:n], ctx.constants, strict=True)
    return [constant if x is None else x for x, constant in pairs], tensors[n:]


def _rest(grads: Sequence[Any]) -> Gradients:
    """These gradients of the first operands, then None for the remaining arguments."""
    return (*grads, *(None,) * (len(ARGUMENTS) - len(grads)))


def _moved(args: Sequence[Any]) -> tuple[Any, ...]:
    """What belongs to the differentiable operands, of a value for each argument of an operator."""
    return tuple(split(args)[1][:N_DIFFERENTIABLE])


def _only(needs: Sequence[bool], grads: Sequence[Any]) -> list[Any]:
    return [x if need else None for need, x in zip(needs, grads, strict=True)]


def forward_vjp(use: Routines, ctx: Any, grad_out: Any, grad_lse: Any) -> Gradients:
    args, (out, lse) = saved(ctx)
    needs = list(_moved(ctx.needs_input_grad))
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    return _rest(_only(needs, use.backward(grad_out, grad_lse, out, lse, needs, *args)))


def forward_jvp(use: Routines, ctx: Any, *tangents: Any) -> Gradients:
    _refuse_constants([x is not None for x in tangents])
    args, (out, lse) = saved(ctx)
    tangents = _moved(tangents)
    return use.jvp(*tangents, out, lse, *args), lse_tangent(use, tangents, lse, args)


def forward_jvp_without_lse(use: Routines, ctx: Any, *tangents: Any) -> Gradients:
    _refuse_constants([x is not None for x in tangents])
    args, (out, lse) = saved(ctx)
    return use.jvp(*_moved(tangents), out, lse, *args), torch.zeros_like(lse)


def backward_vjp(use: Routines, ctx: Any, *tangents: Any) -> Gradients:
    (grad_out, grad_lse, out, lse, needs, *args), _ = saved(ctx)
    tangents = tuple(_only(needs, tangents))
    wants = ctx.needs_input_grad
    of_operands = [wants[0], *_moved(wants)]
    grads: Sequence[Any] = (None,) * len(of_operands)
    if any(of_operands):
        grads = use.double_backward(*tangents, grad_out, grad_lse, out, lse, of_operands, *args)
        grads = _only(of_operands, grads)
    of_lse = lse_tangent(use, tangents, lse, args) if wants[1] else None
    return grads[0], of_lse, None, None, None, *_rest(grads[1:])


def backward_jvp(use: Routines, ctx: Any, *tangents: Any) -> Gradients:
    _refuse_constants([x is not None for x in tangents])
    (grad_out, grad_lse, out, lse, needs, *args), results = saved(ctx)
    grad_out_t, grad_lse_t = tangents[:2]
    tangents = _moved(tangents)
    found = [torch.zeros_like(x) for x in results]
    if grad_out_t is not None or grad_lse_t is not None:
        if grad_out_t is None:
            grad_out_t = torch.zeros_like(out)
        found = list(use.backward(grad_out_t, grad_lse_t, out, lse, needs, *args))
    if any(x is not None for x in tangents):
        wants = [False, *needs]
        moved = use.double_backward(*tangents, grad_out, grad_lse, out, lse, wants, *args)
        found = [x + y for x, y in zip(found, moved[1:], strict=True)]
    return tuple(found)


def jvp_vjp(use: Routines, ctx: Any, grad_out: Any) -> Gradients:
    (*tangents, out, lse), operands, options = split(saved(ctx)[0])
    args = (*operands, *options)
    if grad_out is None:
        return *(None,) * len(LEADING["jvp"]), *_rest(())
    of_tangents = list(ctx.needs_input_grad[:N_DIFFERENTIABLE])
    of_operands = list(_moved(ctx.needs_input_grad))
    first: Sequence[Any] = (None,) * N_DIFFERENTIABLE
    second: Sequence[Any] = first
    if any(of_tangents):
        first = use.backward(grad_out, None, out, lse, of_tangents, *args)
        first = _only(of_tangents, first)
    if any(of_operands):
        wants = [False, *of_operands]
        _, *second = use.double_backward(*tangents, grad_out, None, out, lse, wants, *args)
        second = _only(of_operands, second)
    return *first, None, None, *_rest(second)


def _as_attention(use: Routines, args: Sequence[Any]) -> tuple[Any, list[Any]]:
    """(lse, arguments) of the attention whose output is the matrix of the weights.

    Its values are the rows of the identity. The lse does not depend on values.
    """
    stage, *arguments = args
    # These values are not as wide as query, whose layout the results would have.
    query, key, _, *rest = (named(arguments) | {"like_query": False}).values()
    if stage != "weights":
        raise NotImplementedError(f"stage: only 'weights' can be differentiated, got '{stage}'")
    lse = use.forward(query, key, key[..., :0], *rest)[1]
    shape = heads_first(key, args[1:]).shape
    identity = torch.eye(shape[-2], dtype=key.dtype, device=key.device)
    identity = heads_first(identity.expand(*shape[:-1], shape[-2]), args[1:])
    return lse, [query, key, identity, *rest]


def weights_vjp(use: Routines, ctx: Any, grad: Any) -> Gradients:
    args, (weights,) = saved(ctx)
    if grad is None:
        return None, *_rest(())
    needs = list(_moved(ctx.needs_input_grad))
    needs[DIFFERENTIABLE.index("value")] = False
    lse, args = _as_attention(use, args)
    grad, weights = heads_first(grad, args), heads_first(weights, args)
    return None, *_rest(_only(needs, use.backward(grad, None, weights, lse, needs, *args)))


def weights_jvp(use: Routines, ctx: Any, *tangents: Any) -> Any:
    _refuse_constants([x is not None for x in tangents])
    args, (weights,) = saved(ctx)
    lse, args = _as_attention(use, args)
    weights = heads_first(weights, args)
    moved = dict(zip(DIFFERENTIABLE, _moved(tangents), strict=True)) | {"value": None}
    found = use.jvp(*moved.values(), weights, lse, *args)
    return heads_first(found, args)


def no_higher(*_: Any) -> Any:
    raise NotImplementedError(_HIGHER)


def repeated_heads(key: Any, query: Any) -> Any:
    """The keys of every query head."""
    return _arrays.repeat_heads(key, query.shape[-3] if query.ndim > 2 else 1, _repeat)


def _repeat(x: Any, n: int, axis: int) -> Any:
    return x.repeat_interleave(n, dim=axis)


def scale_of(arguments: dict[str, Any], default: float) -> Any:
    """The factor of the scores: a number, or a tensor for (..., heads, Lq, Lk)."""
    x = arguments["scale"]
    if isinstance(x, torch.Tensor):
        return x[..., None, None]
    x = arguments.get("scale" + NUMBER, x)
    return default if x is None else x


def lse_tangent(use: Routines, tangents: Sequence[Any], lse: Any, args: Sequence[Any]) -> Any:
    """The tangent of lse: the mean of the scores' tangents with the weights before dropout."""
    if not is_packed(args):
        return _own_lse_tangent(use, tangents, lse, args)
    query_t, key_t, value_t, *others = tangents
    parts = [
        _own_lse_tangent(
            use,
            (rows(query_t, queries), rows(key_t, keys), value_t, *others),
            lse[:, queries],
            one_sequence(args, s),
        )
        for s, (queries, keys) in enumerate(spans(args))
    ]
    padding = torch.zeros_like(lse[:, sum(x.shape[-1] for x in parts) :])
    return torch.cat((*parts, padding), -1)


def _products_where(seen: Any, q: Any, k: Any) -> Any:
    """The products of rows, NaN where one is not finite and the pair is seen.

    Elsewhere numbers stand for what is not finite, which gradients would multiply with 0.
    """
    clean_q, clean_k = (torch.where(x.isfinite(), x, 0) for x in (q, k))
    odd_q, odd_k = (~x.isfinite().all(-1) for x in (q, k))
    with torch.autocast("cpu", enabled=False):
        found = clean_q @ clean_k.mT
    return torch.where(seen & (odd_q[..., :, None] | odd_k[..., None, :]), torch.nan, found)


def _own_lse_tangent(use: Routines, tangents: Sequence[Any], lse: Any, args: Sequence[Any]) -> Any:
    """`lse_tangent` of arrays that are not packed, or that hold one sequence."""
    own, t = named(args), dict(zip(DIFFERENTIABLE, tangents, strict=True))
    query, key = heads_first(own["query"], args), own["key"]
    # Value, which is not needed here, may have axes of the batch that query lacks.
    query = heads_first(query.expand(*lse.shape, query.shape[-1]), args)
    own["query"] = query
    scale = scale_of(own, _arguments.default_scale(query.shape[-1]))
    without_dropout = (own | {"dropout_p": 0.0}).values()
    weights = use.weights("weights", *without_dropout).to(lse.dtype)
    seen = weights != 0

    def products(q: Any, k: Any) -> Any:
        q, k = heads_first(q, args), heads_first(k, args)
        if own["enable_gqa"]:
            k = repeated_heads(k, q)
        return _products_where(seen, q.to(lse.dtype), k.to(lse.dtype))

    moved: Any = lse.new_zeros(())
    if t["query"] is not None:
        moved = moved + scale * products(t["query"], key)
    if t["key"] is not None:
        moved = moved + scale * products(query, t["key"])
    if t.get("scale") is not None:
        moved = moved + t["scale"][..., None, None] * products(query, key)
    if own["softcap"] is not None and moved.ndim:
        scores = scale * products(query, key)
        moved = moved * _arrays.softcapped(scores, own["softcap"], torch.tanh)[1]
    if t["attn_mask"] is not None:
        moved = moved + t["attn_mask"]
    # A hidden pair may hold NaN, also of tangents, which a product with its weight 0 would keep.
    lse_t = (weights * torch.where(seen, moved, 0)).sum(-1)
    if t["sinks"] is not None:
        lse_t = lse_t + torch.exp(own["sinks"][..., None] - lse) * t["sinks"][..., None]
    # A mask or sink may have a wider type.
    return lse_t.to(lse.dtype)
