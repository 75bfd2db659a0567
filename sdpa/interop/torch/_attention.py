"""The public functions on the family of `sdpa.attention`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd import Function, forward_ad

import sdpa
from sdpa import _arguments, _table
from sdpa._table import DIFFERENTIABLE, Option
from sdpa.interop.torch._arrays import check_tensor, under_autocast
from sdpa.interop.torch._functions import FUNCTIONS, OPERATORS, forward_without_lse
from sdpa.interop.torch._layout import is_fused
from sdpa.interop.torch._operators import ABSENT, NUMBER, keywords_of, split
from sdpa.interop.torch._packed import is_packed, one_sequence

_INT64 = torch.iinfo(torch.int64)
_REAL = (int, np.integer, torch.SymInt, float, np.floating, torch.SymFloat)


class AttentionForward(NamedTuple):
    """Result of `attention_forward`."""

    out: torch.Tensor
    lse: torch.Tensor


class _Underived(Function):
    """A tensor itself, for forward mode to meet on each of its levels."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, _: str) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, str], output: Any) -> None:
        ctx.name = inputs[1]

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(f"{ctx.name}: has no derivative; pass a number")


def number(name: str, x: Any, expected: str = "a number or None") -> Any:
    """Return `x` as a number: itself, or a tensor of one element that has no derivative."""
    if isinstance(x, _REAL):
        return x
    if not isinstance(x, torch.Tensor) or x.numel() != 1:
        raise TypeError(f"{name}: expected {expected}, got {x!r}")
    if x.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(f"{name}: has no derivative; pass a number")
    if forward_ad._current_level >= 0:
        x = _Underived.apply(x, name)
    return x.item()


def _constant(name: str, x: Any, dtype: torch.dtype | None = None) -> torch.Tensor | None:
    """An operand, which may be a number, as a tensor."""
    if x is None or isinstance(x, torch.Tensor):
        return x if x is None else check_tensor(name, x)
    try:
        return torch.as_tensor(x, dtype=dtype, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: expected a tensor or numbers, got {x!r}") from error


def _integers(name: str, x: Any) -> torch.Tensor | None:
    """Integers, which may be numbers, as a tensor."""
    if isinstance(x, int):
        x = torch.tensor(x if isinstance(x, bool) else _arguments.integer(name, x), device="cpu")
    return _constant(name, x)


def _seed(rng: Any, dropout_p: float) -> torch.Tensor | None:
    """The seed of dropout as a tensor, so that a new seed does not cause a recompilation."""
    is_drawn = rng is None or isinstance(rng, torch.Generator)
    seed = 0 if is_drawn else _arguments.seed(rng, ", a torch.Generator or None")
    if not dropout_p:
        return None
    if is_drawn:
        return torch.randint(_INT64.min, _INT64.max, (), generator=rng, device="cpu")
    return torch.tensor(seed - 2**64 if seed > _INT64.max else seed, device="cpu")


def _window(name: str, x: Any) -> dict[str, Any]:
    return dict(zip(("left", "right"), _arguments.window(name, x), strict=True))


# {annotation: conversion} of options that are no arrays.
_READERS: dict[str, Callable[[str, Any], Any]] = {
    "float": lambda name, x: number(name, x, "a number"),
    "float | None": number,
    "bool": _arguments.boolean,
    "int | None": _arguments.integer,
}


def _converter(option: Option) -> Callable[[str, Any, torch.Tensor], dict[str, Any]]:
    """What makes the arguments of the operators, by name, from an option and query."""
    name = option.name
    if name == "is_causal":
        return lambda name, x, query: {name: _arguments.alignment(x)}
    if name == "window":
        return lambda name, x, query: _window(name, x)
    if option.is_integers:
        return lambda name, x, query: {name: _integers(name, x)}
    if not option.is_array:
        read = _READERS[option.annotation]
        return lambda name, x, query: {name: read(name, x)}
    if "q" in str(option.axes):
        return lambda name, x, query: {name: check_tensor(name, x)}
    if name not in DIFFERENTIABLE:
        return lambda name, x, query: {name: _constant(name, x, torch.float64)}
    if not option.takes_number:
        return lambda name, x, query: {name: _constant(name, x, query.dtype)}

    def convert(name: str, x: Any, query: torch.Tensor) -> dict[str, Any]:
        if isinstance(x, _REAL):
            return {name + NUMBER: x}
        return {name: _constant(name, x, query.dtype)}

    return convert


_STAGES = _table.options_of("attention_weights")["stage"].words
_CONVERT = {name: _converter(option) for name, option in _table.OPTIONS.items() if name != "rng"}
_OPTIONAL = {name for name, option in _table.OPTIONS.items() if option.default is None}


def _without_causal_bias(given: dict[str, Any], query: torch.Tensor, key: torch.Tensor) -> None:
    """Put its alignment in the place of a CausalBias, which is a tensor only by name."""
    bias: Any = given.get("attn_mask")
    variant = getattr(bias, "variant", None)
    if variant is None:
        return
    alignment = variant.name.lower()
    if given.get("is_causal"):
        raise ValueError(
            f"is_causal: expected False beside a CausalBias, got {given['is_causal']!r}; leave one "
            "of them out"
        )
    made, own = (bias.seq_len_q, bias.seq_len_kv), (*query.shape[-2:-1], *key.shape[-2:-1])
    if alignment == "lower_right" and made != own:
        raise ValueError(
            f"attn_mask: expected a CausalBias for (Lq, Lk) = {own}, got one made for {made}; "
            "make it for these lengths, or write is_causal='lower_right'"
        )
    given |= {"attn_mask": None, "is_causal": alignment}


def _named_arguments(
    query: Any, key: Any, value: Any, args: Sequence[Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """`arguments_of` by name."""
    given = _table.given(attention, args, options)
    query, key, value = under_autocast(
        check_tensor("query", query), check_tensor("key", key), check_tensor("value", value)
    )
    _without_causal_bias(given, query, key)
    rng = given.pop("rng", None)
    found = {**ABSENT, "query": query, "key": key, "value": value}
    for name, x in given.items():
        if x is not None or name not in _OPTIONAL:
            found |= _CONVERT[name](name, x, query)
    found["seed"] = _seed(rng, found["dropout_p"])
    return found


def arguments_of(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> tuple[Any, ...]:
    """OPERANDS and OPTIONS of the operators, from the arguments of `sdpa.attention`."""
    return tuple(_named_arguments(query, key, value, args, options).values())


def _laid_out(
    query: Any, key: Any, value: Any, *args: Any, quiet: bool = False, **options: Any
) -> tuple[Any, ...]:
    """`arguments_of` for results with the layout of PyTorch's."""
    found = _named_arguments(query, key, value, args, options)
    found["quiet"] = quiet
    found["like_query"] = is_fused(found)
    return tuple(found.values())


def attention(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> torch.Tensor:
    """`sdpa.attention` on tensors, with the gradients of `sdpa.attention_backward`.

    Parameters
    ----------
    query, key, value : torch.Tensor
        On the CPU, of float16, bfloat16, float32 or float64, of any strides; shapes as in
        `sdpa.attention`.
    *args, **options
        The options of `sdpa.attention` except out. Those that are arrays there are tensors here;
        attn_mask may be a `torch.nn.attention.bias.CausalBias`, instead of is_causal. rng may be a
        torch.Generator; None draws the seed from PyTorch's global one.

    Returns
    -------
    (..., heads, Lq, d_v) torch.Tensor
        softmax(scale query key^T + attn_mask) value, of query's dtype: Vaswani et al., "Attention
        is all you need" (2017), equation 1. With cu_seqlens_q it is (total_q, heads, d_v).

    Raises
    ------
    TypeError, ValueError
        As `sdpa.attention`; also if an argument is not a tensor on the CPU.

    Examples
    --------
    >>> import torch
    >>> from sdpa.interop.torch import attention
    >>> value = torch.tensor([[1.0], [3.0]], requires_grad=True)  # equal scores: their mean
    >>> out = attention(torch.zeros(1, 2), torch.zeros(2, 2), value, softcap=5.0)
    >>> out.sum().backward()
    >>> out.item(), value.grad.tolist()
    (2.0, [[0.5], [0.5]])
    """
    return _out(_laid_out(query, key, value, *args, **options))


def _out(arguments: tuple[Any, ...]) -> torch.Tensor:
    forward = OPERATORS.forward if torch.compiler.is_compiling() else forward_without_lse
    out: torch.Tensor = forward(*arguments)[0]
    return out


def attention_forward(
    query: Any, key: Any, value: Any, *args: Any, **options: Any
) -> AttentionForward:
    """`sdpa.attention_forward` on tensors: (out, lse), both differentiable.

    Parameters and errors are those of `attention`. The tangent of lse in forward mode and second
    derivatives that pass through the gradient of lse hold the (Lq, Lk) matrix.

    Examples
    --------
    >>> import torch
    >>> from sdpa.interop.torch import attention_forward
    >>> query = torch.zeros(1, 2, requires_grad=True)
    >>> _, lse = attention_forward(query, torch.eye(2), torch.ones(2, 1), scale=1.0)
    >>> lse.sum().backward()
    >>> query.grad.tolist()  # the mean of the keys, because the weights are equal
    [[0.5, 0.5]]
    """
    arguments = _laid_out(query, key, value, *args, **options)
    use = OPERATORS if torch.compiler.is_compiling() else FUNCTIONS
    out, lse = use.forward(*arguments)
    return AttentionForward(out, lse.to(torch.promote_types(query.dtype, torch.float32)))


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **options: Any,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, with the options of `attention` added.

    Parameters
    ----------
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        As in PyTorch. Unlike there, a mask and is_causal may be given together, and a row without
        keys is 0.
    **options
        The other options of `attention`.

    Returns
    -------
    (..., heads, Lq, d_v) torch.Tensor
        Of query's dtype.

    Raises
    ------
    TypeError, ValueError
        As `attention`.

    Examples
    --------
    >>> import torch
    >>> import torch.nn.functional as F
    >>> from sdpa.interop.torch import scaled_dot_product_attention
    >>> q, k, v = torch.rand(3, 2, 4, 6, 8)
    >>> theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(scaled_dot_product_attention(q, k, v, is_causal=True), theirs, atol=1e-6)
    True
    """
    options |= {"scale": scale, "enable_gqa": enable_gqa}
    # quiet, since PyTorch's signature keeps its meaning
    args = attn_mask, dropout_p, is_causal
    return _out(_laid_out(query, key, value, *args, quiet=True, **options))


def attention_weights(
    query: Any,
    key: Any,
    *,
    stage: str = "weights",
    sequence: int | None = None,
    **options: Any,
) -> torch.Tensor:
    """`sdpa.attention_weights` on tensors: the (..., heads, Lq, Lk) matrix.

    Parameters
    ----------
    query, key : torch.Tensor
        As in `attention`.
    **options
        The options of `attention`.
    stage : {"weights", "scores", "capped", "biased"}
        As in `sdpa.attention_weights`. Only the weights are differentiable, by attention whose
        values are the rows of the identity.
    sequence : int, optional
        Required with cu_seqlens_q: the sequence whose matrix to return.

    Returns
    -------
    (..., heads, Lq, Lk) torch.Tensor
        Of query's dtype.

    Raises
    ------
    TypeError, ValueError
        As `attention`.
    NotImplementedError
        For derivatives of another stage.

    Examples
    --------
    >>> import torch
    >>> from sdpa.interop.torch import attention_weights
    >>> attention_weights(torch.zeros(1, 2), torch.zeros(2, 2)).tolist()
    [[0.5, 0.5]]
    """
    stage = _arguments.choice("stage", stage, _STAGES)
    arguments = arguments_of(query, key, key, **options)
    if sequence is not None or is_packed(arguments):
        arguments = _of_sequence(arguments, sequence)
    use = OPERATORS if torch.compiler.is_compiling() else FUNCTIONS
    return use.weights(stage, *arguments)


def _memory(x: Any) -> Any:
    """The tensor under the wrappers of torch.func; zeros of its shape for one of a batch."""
    functorch = torch._C._functorch
    while isinstance(x, torch.Tensor) and functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return torch.zeros((), dtype=x.dtype, device="cpu").expand(x.shape)
        x = functorch.get_unwrapped(x)
    return x


def _of_sequence(arguments: Sequence[Any], sequence: Any) -> tuple[Any, ...]:
    """The arguments with the rows of this sequence alone, after checking all of them."""
    _, operands, options = split(arguments)
    with torch._C._DisableFuncTorch():
        (query, key, _), keywords = keywords_of(list(map(_memory, operands)), options)
        no_rows = slice(0, 0)
        sdpa.attention_weights(query, key, **keywords, sequence=sequence, queries=no_rows)
    return one_sequence(arguments, _arguments.integer("sequence", sequence))


_function: Any
for _function in attention, attention_forward:
    _function.__signature__ = _table.signature(_function.__annotations__["return"])
