"""PyTorch's layers of attention on sdpa, where they return weights or have a path of their own.

Such a layer computes the matrix by a softmax that is NaN in rows without keys. Asked for no weights
it calls `scaled_dot_product_attention`: a copy of PyTorch's function calls ours by that name, which
also keeps the weights.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function

from sdpa import _warnings
from sdpa.interop.torch._attention import attention_weights, scaled_dot_product_attention

_NAME = "multi_head_attention_forward"
# PyTorch's function asks the classes of these whether they override it.
_OVERRIDING = (
    *("query", "key", "value", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v"),
    *("out_proj_weight", "out_proj_bias"),
)


class _Attention:
    """`scaled_dot_product_attention` that keeps the weights of its last call."""

    weights: torch.Tensor | None = None

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
    ) -> torch.Tensor:
        options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal}
        if dropout_p:  # one pattern for both
            options["rng"] = int(torch.randint(2**62, ()))
        out = scaled_dot_product_attention(query, key, value, attn_mask, **options)
        with _warnings.silenced():
            self.weights = attention_weights(query, key, attn_mask=attn_mask, **options)
        return out


def _with_weights(theirs: FunctionType, given: inspect.BoundArguments) -> Any:
    """(output, weights) of PyTorch's function, from its arguments, by our attention."""
    average = given.arguments.get("average_attn_weights", True)
    given.arguments["need_weights"] = False
    if given.arguments.get("attn_mask") is not None:
        given.arguments["is_causal"] = False  # a hint that would leave out keys that the layer adds
    attention = _Attention()
    names = F.__dict__ | {"scaled_dot_product_attention": attention}
    function = FunctionType(theirs.__code__, names, argdefs=theirs.__defaults__)
    out, _ = function(*given.args, **given.kwargs)
    weights = attention.weights
    if weights is not None and average:
        weights = weights.mean(dim=1)
    if weights is not None and given.arguments["query"].ndim == 2:  # without a batch
        weights = weights.squeeze(0)
    return out, weights


class Layers:
    """From `put` until `undo` the layers run on sdpa, for operands that `takes` accepts."""

    def __init__(self, takes: Callable[[torch.Tensor], bool]) -> None:
        self._theirs = theirs = getattr(F, _NAME)
        self._has_fast_path = torch.backends.mha.get_fastpath_enabled()
        signature = inspect.signature(theirs)

        @functools.wraps(theirs)
        def ours(*args: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling():
                return theirs(*args, **options)
            given = signature.bind(*args, **options)
            if not given.arguments.get("need_weights", True) or not takes(given.arguments["query"]):
                return theirs(*args, **options)
            operands = tuple(given.arguments[name] for name in _OVERRIDING)
            if has_torch_function(operands):
                # Classes and modes, such as a default device, come first: they call this function
                # in their turn, while the copy would ask them without its request for weights.
                return handle_torch_function(ours, operands, *args, **options)
            return _with_weights(theirs, given)

        self._ours = ours

    def put(self) -> None:
        """Put ours in front of PyTorch's own way."""
        setattr(F, _NAME, self._ours)
        # It computes attention within one operator for the whole layer.
        torch.backends.mha.set_fastpath_enabled(False)

    def undo(self) -> None:
        """Put PyTorch's own way back."""
        setattr(F, _NAME, self._theirs)
        torch.backends.mha.set_fastpath_enabled(self._has_fast_path)
