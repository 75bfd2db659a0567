"""The operators as functions of autograd that also have forward mode and vmap.

`torch.compile` refuses functions that define forward mode, so it traces the operators, which have
the same derivatives. Everywhere else these functions wrap them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import Function, forward_ad

from sdpa import _table
from sdpa._table import DIFFERENTIABLE
from sdpa.interop.torch import _derivatives, _operators
from sdpa.interop.torch._derivatives import Routines, no_higher, save
from sdpa.interop.torch._operators import (
    ARGUMENTS,
    LEADING,
    LIBRARY,
    N_DIFFERENTIABLE,
    OPTIONS,
    split,
)
from sdpa.interop.torch._packed import is_packed

_TENSORS = (torch.Tensor, torch.nn.Parameter)
# Number of axes behind (..., heads) of tensor arguments; -1 if one has no axis of heads.
_RANKS = dict.fromkeys((*_table.OPERANDS, "grad_out", "out"), 2) | {"lse": 1, "grad_lse": 1}
_RANKS |= {name: x.n_inner for name, x in _table.OPTIONS.items() if x.is_array and x.axes != "s"}
_RANKS |= {text.format(name): _RANKS[name] for name in DIFFERENTIABLE for text in ("{}_t", "gg_{}")}


def _shape(x: Any, dim: int | None) -> tuple[int, ...]:
    """The shape of one entry of the batch."""
    return tuple(x.shape) if dim is None else tuple(x.movedim(dim, 0).shape[1:])


def _expanded(x: Any, dim: int | None, size: int, rank: int) -> torch.Tensor:
    """`x` as (size, ...) with `rank` axes behind the first, as a view."""
    x = x.unsqueeze(0) if dim is None else x.movedim(dim, 0)
    x = x[(slice(None), *(None,) * (rank - x.ndim + 1))]
    return x.expand(size, *x.shape[1:])


def _vmap(name: str, apply: Callable[..., Any], info: Any, in_dims: Any, *args: Any) -> Any:
    """Make one call for the whole batch, whose axis becomes the first of the leading axes."""
    leading, operands, options = split(args)
    if options[OPTIONS.index("dropout_p")]:
        raise RuntimeError("dropout_p: dropout is not available under torch.func.vmap")
    if is_packed((*operands, *options)):
        return call_by_call(apply, info.batch_size, in_dims, args)
    axes = [_RANKS.get(argument) for argument in (*LEADING[name], *ARGUMENTS)]
    shapes = [
        None if n is None or x is None else _shape(x, dim)
        for x, dim, n in zip(args, in_dims, axes, strict=True)
    ]
    ranks = [len(shape) for shape in shapes[len(leading) :][: len(_table.OPERANDS)] if shape]
    size, rank = info.batch_size, max(3, *ranks)
    found = apply(
        *(
            x if shape is None or n is None else _expanded(x, dim, size, rank - 2 + n)
            for x, dim, n, shape in zip(args, in_dims, axes, shapes, strict=True)
        )
    )
    if "backward" in name:
        # Each gradient has the shape of its argument: grad_out's, if it is there, comes first.
        own = shapes[len(leading) :][:N_DIFFERENTIABLE]
        own = own if name == "backward" else [shapes[N_DIFFERENTIABLE], *own]
        return _own_shapes(found, leading[-1], own, size)
    if max(ranks) == 2:  # remove the axis of heads, which no argument had
        found = tuple(x.squeeze(1) for x in found) if name == "forward" else found.squeeze(1)
    return found, (0, 0) if name == "forward" else 0


def call_by_call(apply: Callable[..., Any], size: int, in_dims: Any, args: Any) -> Any:
    """Make a call for each entry of the batch, because packed sequences have no batch axes."""
    calls = [
        apply(
            *(
                x.select(d, i) if isinstance(x, torch.Tensor) and d is not None else x
                for x, d in zip(args, in_dims, strict=True)
            )
        )
        for i in range(size)
    ]
    if not isinstance(calls[0], tuple):
        return torch.stack(calls), 0
    return tuple(map(torch.stack, zip(*calls, strict=True))), (0,) * len(calls[0])


def _own_shapes(grads: Sequence[Any], needs: Sequence[bool], shapes: Any, size: int) -> Any:
    """The gradients that are needed as (size, *shape); the others are empty and have no batch."""
    shaped = (
        grad.reshape(size, *shape) if need else grad
        for grad, need, shape in zip(grads, needs, shapes, strict=True)
    )
    return tuple(shaped), tuple(0 if need else None for need in needs)


def is_plain(args: Sequence[Any]) -> bool:
    """Whether nothing is differentiated or batched, so that the operator alone is enough."""
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    return not torch.is_grad_enabled() or not any(
        x.requires_grad for x in args if isinstance(x, torch.Tensor)
    )


def _is_alone(args: Sequence[Any]) -> bool:
    """Whether no mode, trace or profile sees operators, nor a subclass of tensors stands for data.

    Then the kernel is called without the dispatcher, which costs more than a small attention.
    """
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._ops._len_torch_dispatch_stack_pre_dispatch()
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_tracing()
        or torch.autograd.profiler._is_profiler_enabled
    ) and all(_is_data(x) for x in args if isinstance(x, torch.Tensor))


def _is_data(x: torch.Tensor) -> bool:
    """Whether `x` stands for its own memory, not for a batch of `gradcheck`'s older vmap either."""
    return type(x) in _TENSORS and not torch._C._functorch.is_legacy_batchedtensor(x)


def _function(name: str, **rules: Callable[..., Any]) -> Any:
    """A function of autograd around the operator of this name, with these rules."""
    operator = getattr(OPERATORS, name)
    kernel, _ = _operators.KERNELS[f"attention_{name}"]

    def forward(*args: Any) -> Any:
        return kernel(*args) if _is_alone(args) else operator(*args)

    # Without this attribute autograd would derive it at every call.
    forward.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    static: dict[str, Any] = {name: partial(rule, FUNCTIONS) for name, rule in rules.items()}
    static |= {"forward": forward, "setup_context": save}
    static = {name: staticmethod(rule) for name, rule in static.items()}
    function: Any = type(f"sdpa_{name}", (Function,), static)
    function.vmap = staticmethod(partial(_vmap, name, function.apply))

    def call(*args: Any) -> Any:
        return forward(*args) if is_plain(args) else function.apply(*args)

    return call


OPERATORS = Routines(
    forward=_operators.forward,
    weights=_operators.weights,
    backward=_operators.backward,
    jvp=_operators.jvp,
    double_backward=_operators.double_backward,
)
_RULES: dict[str, Callable[..., Any]] = {
    "forward": _derivatives.forward_vjp,
    "weights": _derivatives.weights_vjp,
    "backward": _derivatives.backward_vjp,
    "jvp": _derivatives.jvp_vjp,
    "double_backward": no_higher,
}
for _name, _rule in _RULES.items():
    torch.library.register_autograd(
        f"sdpa::attention_{_name}", partial(_rule, OPERATORS), setup_context=save, lib=LIBRARY
    )

# Derivatives of one function call the others, so the set is made before its members.
FUNCTIONS = Routines(*(no_higher,) * 5)
FUNCTIONS.forward = _function(
    "forward", backward=_derivatives.forward_vjp, jvp=_derivatives.forward_jvp
)
FUNCTIONS.weights = _function(
    "weights", backward=_derivatives.weights_vjp, jvp=_derivatives.weights_jvp
)
FUNCTIONS.backward = _function(
    "backward", backward=_derivatives.backward_vjp, jvp=_derivatives.backward_jvp
)
FUNCTIONS.jvp = _function("jvp", backward=_derivatives.jvp_vjp, jvp=no_higher)
FUNCTIONS.double_backward = _function("double_backward", backward=no_higher, jvp=no_higher)

# The tangent of lse needs the matrix of the weights; callers that drop lse use this function.
forward_without_lse = _function(
    "forward", backward=_derivatives.forward_vjp, jvp=_derivatives.forward_jvp_without_lse
)
