"""`flex_attention` with PyTorch's signature, and sdpa behind PyTorch's own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from sdpa.interop.torch._arrays import check_tensor, under_autocast
from sdpa.interop.torch._attention import number
from sdpa.interop.torch._programs import FORWARD, LARGEST_WEIGHTS, Call, program_of

_WITHOUT_LENGTH = 1 << 30  # the blocks of a mask that PyTorch makes for any length
_REASON = "flex_attention: sdpa traces its functions itself, outside of graphs; drop fullgraph=True"


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """`torch.nn.attention.flex_attention.flex_attention` on the CPU, with all its derivatives.

    Parameters
    ----------
    query, key, value : torch.Tensor
        On the CPU; shapes as in `attention`.
    score_mod : callable, optional
        f(score, b, h, q, k) -> score. It becomes a program, as in `sdpa.score_program`, whose rules
        it must keep; it may call PyTorch's functions. Gradients flow to the floating tensors that
        it captures.
    block_mask : BlockMask or callable, optional
        What PyTorch's `create_block_mask` returns, or the function f(b, h, q, k) -> boolean itself,
        which is enough: blocks that nobody sees are found from the function. The blocks of a
        BlockMask count only if it has no function.
    scale : float, optional
        Default: 1 / sqrt(d).
    enable_gqa : bool, default False
        Let several query heads share a head of key and value.
    return_lse : bool, default False
        Return (out, lse).
    kernel_options : optional
        Ignored, since it chooses among kernels of GPUs.
    return_aux : torch.nn.attention.flex_attention.AuxRequest, optional
        Return (out, AuxOutput), with lse and max_scores as requested; max_scores has no gradient.

    Returns
    -------
    torch.Tensor, (..., heads, Lq, d_v)
        softmax(score_mod(scale query key^T)) value over the visible keys, of query's dtype, with
        query's order of axes in memory. A row without keys is 0, and its lse is -inf.

    Raises
    ------
    TypeError, ValueError
        As `attention`; for what a program cannot compute; for a mask made for other lengths; for
        return_lse beside return_aux.
    IndexError
        A function indexes a tensor beyond its axis, at a pair that is not masked.

    Notes
    -----
    Under `torch.compile` the call is a break of the graph, and with fullgraph=True an error of the
    compiler. Third derivatives, and forward mode over forward mode, do not exist.

    Examples
    --------
    >>> import torch
    >>> from sdpa.interop.torch import flex_attention
    >>> bias = torch.zeros(7, requires_grad=True)
    >>> def relative(score, b, h, q, k):
    ...     return score + bias[q - k + 3]
    >>> query, key, value = torch.ones(3, 1, 2, 4, 8)
    >>> out = flex_attention(query, key, value, relative, lambda b, h, q, k: q >= k)
    >>> out.square().sum().backward()
    >>> bias.grad.shape
    torch.Size([7])
    """
    run: Any = _flex_attention
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=_REASON)  # with fullgraph=True an error with these words
        run = torch.compiler.disable(run)
    return run(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, return_aux)


def _flex_attention(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any,
    block_mask: Any,
    scale: Any,
    enable_gqa: Any,
    return_lse: Any,
    return_aux: Any,
) -> Any:
    if not hasattr(return_aux, "max_scores") and return_aux is not None:
        raise TypeError(f"return_aux: expected an AuxRequest or None, got {return_aux!r}")
    if return_lse and return_aux is not None:
        raise ValueError("return_lse: expected False beside return_aux, got True; leave it out")
    query, key, value = under_autocast(
        check_tensor("query", query), check_tensor("key", key), check_tensor("value", value)
    )
    score_program, captured = program_of(False, score_mod, query)
    mask_program, masking = program_of(True, _mask_mod(block_mask, query, key), query)
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    scale = None if scale is None else number("scale", scale)
    options = {"scale": scale, "enable_gqa": enable_gqa}
    call = Call(score_program, mask_program, captured, len(masking), options, wants_lse)
    tensors = (query, key, value, *captured, *masking)
    out, lse = FORWARD(call, *tensors)
    lse = lse.to(torch.promote_types(query.dtype, torch.float32))
    if return_aux is None:
        return (out, lse) if return_lse else out
    largest = _largest_scores(call, tensors, lse) if return_aux.max_scores else None
    return out, _theirs("AuxOutput")(lse=lse if wants_lse else None, max_scores=largest)


def _largest_scores(call: Call, tensors: Any, lse: torch.Tensor) -> torch.Tensor:
    weights = LARGEST_WEIGHTS(call, *(x.detach() for x in tensors))
    return lse.detach() + weights.log()


def _mask_mod(block_mask: Any, query: torch.Tensor, key: torch.Tensor) -> Any:
    """The function of a mask, or None."""
    function = getattr(block_mask, "mask_mod", None)
    if function is None:
        return block_mask
    if getattr(function, "__name__", None) == "_sliced_mask_mod_error":
        raise ValueError(
            "block_mask: expected one with its function, got a slice of a BlockMask, which has "
            "none; set its mask_mod, or pass a function"
        )
    made, given = tuple(block_mask.shape[-2:]), (query.shape[-2], key.shape[-2])
    if made != given and set(block_mask.BLOCK_SIZE) != {_WITHOUT_LENGTH}:
        raise ValueError(
            f"block_mask: expected one for (Lq, Lk) = {given}, got one made for {made}; make it "
            "with create_block_mask for these lengths, or pass its function"
        )
    return _of_blocks(block_mask) if function is _theirs("noop_mask") else function


def _theirs(name: str) -> Any:
    """An attribute of PyTorch's module of flex_attention, which is imported where it is needed."""
    return getattr(importlib.import_module("torch.nn.attention.flex_attention"), name)


def _of_blocks(block_mask: Any) -> Any:
    """The function of a mask that consists of its blocks alone; None if it has all of them."""
    blocks = block_mask.to_dense().bool()
    if bool(blocks.all()):
        return None
    rows, columns = block_mask.BLOCK_SIZE
    n_batch, n_heads = blocks.shape[:2]
    return lambda b, h, q, k: blocks[b % n_batch, h % n_heads, q // rows, k // columns]


class Flex:
    """From `put` until `undo` PyTorch's function runs on sdpa, for tensors on the CPU.

    Its code is exchanged, because modules that have imported the function hold the function itself.
    """

    theirs: FunctionType | None = None
    """PyTorch's own, while it is installed."""

    def __init__(self) -> None:
        self._function: Any = _theirs("flex_attention")
        function, self._own = self._function, {}
        for name in ("__defaults__", "__kwdefaults__", "__code__"):
            self._own[name] = getattr(function, name)

    def put(self) -> None:
        """Put our code in the place of PyTorch's."""
        function = self._function
        theirs = FunctionType(function.__code__, function.__globals__, function.__name__)
        theirs.__defaults__, theirs.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
        Flex.theirs = theirs
        function.__code__ = _instead.__code__
        function.__defaults__ = function.__kwdefaults__ = None

    def undo(self) -> None:
        """Put PyTorch's own code back."""
        for name, own in self._own.items():
            setattr(self._function, name, own)
        Flex.theirs = None


def _instead(*args, **options):  # type: ignore[no-untyped-def]
    # This code runs among the globals of PyTorch's module.
    from sdpa.interop.torch._flex import chosen

    return chosen(*args, **options)


def chosen(query: Any, *args: Any, **options: Any) -> Any:
    """The function that computes for this query: ours on the CPU, or PyTorch's."""
    run: Any = flex_attention if query.is_cpu or Flex.theirs is None else Flex.theirs
    return run(query, *args, **options)
