"""Attention with functions of the user, and its derivatives.

A function of Python cannot be an argument of an operator, so these are functions of autograd alone.
All of them end in the same arguments: query, key, value, the tensors that score_mod captures, those
that mask_mod captures. The first argument is the `Call`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.autograd import Function, forward_ad

import sdpa
from sdpa import _table
from sdpa._programs import FOREIGN, Foreign, Program, lifted
from sdpa.interop.torch._arrays import check_tensor, to_array, to_tensor
from sdpa.interop.torch._derivatives import no_higher, save
from sdpa.interop.torch._functions import call_by_call, is_plain
from sdpa.interop.torch._layout import empty_in_order, has_all_axes

Tensors = tuple[Any, ...]
_OPERANDS = _table.OPERANDS
_N = len(_OPERANDS)


def _is_constant(x: torch.Tensor) -> bool:
    """Whether it is one number that nothing is differentiated by."""
    if x.ndim or x.requires_grad or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    return forward_ad._current_level < 0 or forward_ad.unpack_dual(x).tangent is None


def _described(x: torch.Tensor) -> tuple[Any, tuple[int, ...]]:
    check_tensor("score_mod, mask_mod", x)
    return x.dtype, tuple(x.shape)


FOREIGN[torch.Tensor] = Foreign(_described, to_array, _is_constant)


@dataclass(frozen=True)
class Call:
    """What a call of attention is, apart from its tensors.

    Attributes
    ----------
    score_mod, mask_mod : Program, None
        Their arguments are the tensors that the functions capture.
    captured : tuple of torch.Tensor
        Those of score_mod, as the function has them.
    n_masking : int
        How many tensors mask_mod captures.
    options : dict
        Of `sdpa.attention_forward`.
    wants_lse : bool
        Whether lse is a result, whose tangent costs a second pass.
    """

    score_mod: Program | None
    mask_mod: Program | None
    captured: Tensors
    n_masking: int
    options: dict[str, Any]
    wants_lse: bool

    @property
    def n_moving(self) -> int:
        """How many of the tensors have gradients, the first ones."""
        return _N + len(self.captured)

    def split(self, args: Tensors) -> tuple[Tensors, Tensors]:
        """(what precedes the tensors of the call, these)."""
        n = len(args) - self.n_moving - self.n_masking
        return args[:n], args[n:]


def program_of(is_mask: bool, function: Any, query: torch.Tensor) -> tuple[Program | None, Tensors]:
    """The program of a function, and the tensors that it captures; for None nothing."""
    if function is None:
        return None, ()
    score = torch.promote_types(query.dtype, torch.float32)
    dtypes = (("r", score), ("i", torch.int64), ("b", torch.bool))
    program, captured = lifted(is_mask, function, (), dtypes)
    return program, tuple(captured)


def prepared(call: Call, tensors: Tensors) -> tuple[list[Any], dict[str, Any]]:
    """(query, key, value) and the options of `sdpa`."""
    arrays = list(map(to_array, tensors))
    options = dict(call.options)
    if call.score_mod is not None:
        options |= {"score_mod": call.score_mod, "score_args": tuple(arrays[_N : call.n_moving])}
    if call.mask_mod is not None:
        options |= {"mask_mod": call.mask_mod, "mask_args": tuple(arrays[call.n_moving :])}
    return arrays[:_N], options


def _names(needs: Sequence[bool], first: Sequence[str]) -> list[str]:
    """The gradients to ask for."""
    names = [name for name, need in zip(first, needs, strict=False) if need]
    return names + ["score_args"] * any(needs[len(first) :])


def _gradients(found: Any, first: Sequence[str], needs: Sequence[bool]) -> Tensors:
    """Those that are needed; an empty tensor for each of the others."""
    grads = [getattr(found, name) for name in first]
    grads += found.score_args or [None] * (len(needs) - len(first))
    return tuple(
        to_tensor(grad) if need and grad is not None else torch.empty(0, device="cpu")
        for grad, need in zip(grads, needs, strict=True)
    )


def _tangents(tangents: Tensors, name: str) -> tuple[list[Any], dict[str, Any]]:
    """Those of the operands, and those of the captured tensors as an option of this name."""
    arrays = [None if x is None else to_array(x) for x in tangents]
    others = arrays[_N:]
    return arrays[:_N], {name: others} if any(x is not None for x in others) else {}


def _forward(call: Call, *tensors: Any) -> Tensors:
    query, key, value = tensors[:_N]
    arrays, options = prepared(call, tensors)
    options["lse_dtype"] = np.float64  # all digits, for the backward
    is_whole = has_all_axes(query, key, value, grouped=options["enable_gqa"])
    if query.is_contiguous() or not is_whole:
        array, lse = sdpa.attention_forward(*arrays, **options)
        return to_tensor(array), to_tensor(lse)
    out = empty_in_order(query, value.shape[-1])
    _, lse = sdpa.attention_forward(*arrays, **options, out=to_array(out))
    return out, to_tensor(lse)


def _backward(
    call: Call, needs: Any, grad_out: Any, grad_lse: Any, out: Any, lse: Any, *tensors: Any
) -> Tensors:
    arrays, options = prepared(call, tensors)
    found = sdpa.attention_backward(
        *(to_array(grad_out), *arrays, to_array(out), to_array(lse)),
        **options,
        grad_lse=to_array(grad_lse),
        needs=_names(needs, _OPERANDS),
    )
    return _gradients(found, _OPERANDS, needs)


def _largest_weights(call: Call, *tensors: Any) -> torch.Tensor:
    (query, key, _), options = prepared(call, tensors)
    return to_tensor(sdpa.attention_statistics(query, key, **options).max_weight)


def _jvp(call: Call, *args: Any) -> torch.Tensor:
    (*tangents, _, _), tensors = call.split(args)
    arrays, options = prepared(call, tensors)
    own, others = _tangents(tuple(tangents), "score_args_t")
    return to_tensor(sdpa.attention_jvp(*(*arrays, *own), **(options | others)).out_t)


def _double_backward(call: Call, needs: Any, *args: Any) -> Tensors:
    (*tangents, grad_out, grad_lse, out, lse), tensors = call.split(args)
    arrays, options = prepared(call, tensors)
    own, others = _tangents(tuple(tangents), "gg_score_args")
    first = ("grad_out", *_OPERANDS)
    found = sdpa.attention_double_backward(
        *(*own, to_array(grad_out), *arrays, to_array(out), to_array(lse)),
        **(options | others),
        grad_lse=to_array(grad_lse),
        needs=_names(needs, first),
    )
    return _gradients(found, first, needs)


# ------------------------------------------------------------------------------- derivatives


def _saved(ctx: Any) -> tuple[Call, Tensors, Tensors, Tensors]:
    """(call, first arguments, tensors, results)."""
    n = len(ctx.constants)
    found = ctx.saved_tensors
    call, *args = (c if x is None else x for x, c in zip(found[:n], ctx.constants, strict=True))
    first, tensors = call.split(tuple(args))
    return call, first, tensors, found[n:]


def _only(needs: Sequence[bool], grads: Sequence[Any]) -> list[Any]:
    return [x if need else None for need, x in zip(needs, grads, strict=True)]


def _rest(grads: Sequence[Any], tensors: Tensors) -> Tensors:
    """These gradients, then None for the tensors of mask_mod."""
    return *grads, *(None,) * (len(tensors) - len(grads))


def _own(ctx: Any, call: Call, tensors: Tensors) -> list[bool]:
    """Which gradients of the tensors that may have one are needed."""
    return list(call.split(ctx.needs_input_grad)[1][: call.n_moving])


def _forward_vjp(ctx: Any, grad_out: Any, grad_lse: Any) -> Tensors:
    call, _, tensors, (out, lse) = _saved(ctx)
    needs = _own(ctx, call, tensors)
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    grads = BACKWARD(call, needs, grad_out, grad_lse, out, lse, *tensors)
    return None, *_rest(_only(needs, grads), tensors)


def _forward_jvp(ctx: Any, _: Any, *tangents: Any) -> Tensors:
    call, _, tensors, (out, lse) = _saved(ctx)
    tangents = tangents[: call.n_moving]
    out_t = JVP(call, *tangents, out, lse, *tensors)
    if not call.wants_lse:
        return out_t, torch.zeros_like(lse)
    return out_t, _lse_tangent(call, tangents, lse, tensors)


def _backward_vjp(ctx: Any, *tangents: Any) -> Tensors:
    call, (needs, grad_out, grad_lse, out, lse), tensors, _ = _saved(ctx)
    tangents = tuple(_only(needs, tangents))
    of_out, of_lse = ctx.needs_input_grad[2:4]
    wants = [of_out, *_own(ctx, call, tensors)]
    grads: Sequence[Any] = (None,) * len(wants)
    if any(wants):
        found = DOUBLE_BACKWARD(call, wants, *tangents, grad_out, grad_lse, out, lse, *tensors)
        grads = _only(wants, found)
    lse_t = _lse_tangent(call, tangents, lse, tensors) if of_lse else None
    return None, None, grads[0], lse_t, None, None, *_rest(grads[1:], tensors)


def _backward_jvp(ctx: Any, *moved: Any) -> Tensors:
    call, (needs, grad_out, grad_lse, out, lse), tensors, results = _saved(ctx)
    grad_out_t, grad_lse_t = moved[2:4]
    tangents = call.split(moved)[1][: call.n_moving]
    found = [torch.zeros_like(x) for x in results]
    if grad_out_t is not None or grad_lse_t is not None:
        if grad_out_t is None:
            grad_out_t = torch.zeros_like(out)
        found = list(BACKWARD(call, needs, grad_out_t, grad_lse_t, out, lse, *tensors))
    if any(x is not None for x in tangents):
        wants = [False, *needs]
        _, *more = DOUBLE_BACKWARD(call, wants, *tangents, grad_out, grad_lse, out, lse, *tensors)
        found = [x + y for x, y in zip(found, more, strict=True)]
    return tuple(found)


def _jvp_vjp(ctx: Any, grad_out: Any) -> Tensors:
    call, (*tangents, out, lse), tensors, _ = _saved(ctx)
    n = call.n_moving
    of_tangents, of_tensors = list(ctx.needs_input_grad[1 : 1 + n]), _own(ctx, call, tensors)
    first: Sequence[Any] = (None,) * n
    second: Sequence[Any] = (None,) * n
    if grad_out is not None and any(of_tangents):
        found = BACKWARD(call, of_tangents, grad_out, None, out, lse, *tensors)
        first = _only(of_tangents, found)
    if grad_out is not None and any(of_tensors):
        wants = [False, *of_tensors]
        _, *found = DOUBLE_BACKWARD(call, wants, *tangents, grad_out, None, out, lse, *tensors)
        second = _only(of_tensors, found)
    return None, *first, None, None, *_rest(second, tensors)


def _lse_tangent(call: Call, tangents: Tensors, lse: Any, tensors: Tensors) -> Any:
    """The tangent of lse, without the matrix.

    With scores that are less by lse, a sink of 0 and values of 1, the output of every query is
    p = Z / (Z + 1) with log Z = 0, and its tangent that of log Z times p (1 - p) = 1 / 4.
    """
    query, key, value = tensors[:_N]
    is_empty = lse == -torch.inf
    level = torch.where(is_empty, 0, lse.detach())
    n_heads = query.shape[-3] if query.ndim > 2 else 1
    by_row = level.reshape(-1, n_heads, lse.shape[-1])
    program, captured = program_of(False, _lowered(call.score_mod, by_row), query)
    moving = zip(call.captured, tensors[_N : call.n_moving], tangents[_N:], strict=True)
    values = {id(by_row): (by_row, None)} | {id(x): (own, own_t) for x, own, own_t in moving}
    own, own_t = zip(*(values[id(x)] for x in captured), strict=True)
    lowered = replace(
        call,
        score_mod=program,
        captured=captured,
        options=call.options | {"sinks": np.zeros(n_heads, np.float32)},
    )
    ones = value.new_ones((*value.shape[:-1], 1))
    half = torch.where(is_empty, 0.0, 0.5).to(query.dtype)[..., None]
    total = torch.where(is_empty, 0.0, np.log(2.0)).to(lse.dtype)
    masks = tensors[call.n_moving :]
    out_t = JVP(lowered, *tangents[:2], None, *own_t, half, total, query, key, ones, *own, *masks)
    return 4 * out_t[..., 0].to(lse.dtype)


def _lowered(program: Program | None, level: torch.Tensor) -> Callable[..., Any]:
    function = program._function if program is not None else None

    def lowered(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        own = function(score, b, h, q, k) if function is not None else score
        return own - level[b, h, q]

    return lowered


# ------------------------------------------------------------------------------- functions


def _is_legacy_batch(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(x)


def _legacy_vmap(call: Callable[..., Any], args: Tensors) -> Any:
    """A call for each entry of a batch of PyTorch's older vmap, that of `is_grads_batched`.

    It has rules for operators alone, and none of these is one.
    """
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    in_dims = [0 if _is_legacy_batch(x) else None for x in args]
    own = [
        torch._remove_batch_dim(x, level, 1, 0) if dim == 0 else x
        for x, dim in zip(args, in_dims, strict=True)
    ]
    size = next(len(x) for x, dim in zip(own, in_dims, strict=True) if dim == 0)
    found, _ = call_by_call(call, size, in_dims, own)
    if not isinstance(found, tuple):
        return torch._add_batch_dim(found, 0, level)
    return tuple(torch._add_batch_dim(x, 0, level) for x in found)


def _function(kernel: Callable[..., Any], **rules: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel as a function of autograd with these rules."""

    def forward(*args: Any) -> Any:
        return kernel(*args)

    # Without this attribute autograd would derive it at every call.
    forward.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    members: dict[str, Any] = {**rules, "forward": forward, "setup_context": save}
    members = {name: staticmethod(member) for name, member in members.items()}
    function: Any = type(f"sdpa_programs{kernel.__name__}", (Function,), members)

    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return call_by_call(function.apply, info.batch_size, in_dims, args)

    function.vmap = staticmethod(vmap)

    def call(*args: Any) -> Any:
        if any(map(_is_legacy_batch, args)):
            return _legacy_vmap(call, args)
        return kernel(*args) if is_plain(args) else function.apply(*args)

    return call


FORWARD = _function(_forward, backward=_forward_vjp, jvp=_forward_jvp)
BACKWARD = _function(_backward, backward=_backward_vjp, jvp=_backward_jvp)
JVP = _function(_jvp, backward=_jvp_vjp, jvp=no_higher)
DOUBLE_BACKWARD = _function(_double_backward, backward=no_higher, jvp=no_higher)
LARGEST_WEIGHTS = _function(_largest_weights, backward=no_higher, jvp=no_higher)
