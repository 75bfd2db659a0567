"""Attention for models of transformers: `attn_implementation="c_attention"`.

After `register()` every model that takes its attention from transformers' registry can run on
sdpa, by `Model.from_pretrained(..., attn_implementation="c_attention")` or
`model.set_attn_implementation("c_attention")`: softcap, sinks, sliding windows and position biases
included, in training and in `generate`.

The pattern travels with the mask: `c_attention_mask` returns a tensor that stands for the mask of
eager attention, and whose attributes tell `c_attention` the padding, causality and window behind
it. The flags of modules, is_causal and sliding_window, are not asked, because eager attention
ignores them, so that models lack them or contradict their own mask.

Padding stays a vector over keys, and causality and windows are options, so no (Lq, Lk) mask is
built. Other patterns (chunks, prefixes, packed sequences, static caches) are boolean masks, built
once per call of the model. Where a model cuts, joins or adds to its mask, it gets eager's.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

try:
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        PreTrainedModel,
        masking_utils,
    )
    from transformers.utils import logging
except ImportError as _error:
    raise ImportError(
        "sdpa.interop.transformers needs transformers: pip install transformers"
    ) from _error

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # an older version, whose models tell every part
    _active_collector = None

import torch

from sdpa.interop.torch import attention, attention_forward, attention_weights

__all__ = ["c_attention", "c_attention_mask", "register"]

NAME = "c_attention"

# Eager attention reads none of these: they are about other things, or the mask says them.
_UNREAD = frozenset(
    {
        *("is_causal", "sliding_window", "position_ids", "cache_position", "use_cache"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
        *("num_items_in_batch", "deterministic", "input_ids", "logits_to_keep", "grid_thw"),
        *("token_type_ids", "mm_token_type_ids", "labels"),
    }
)
# What PyTorch says of a tensor without reading it.
_METADATA = frozenset(
    {
        *(getattr(torch.Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device")),
        *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.stride, torch.Tensor.__len__),
    }
)
_LOGGER = logging.get_logger(__name__)
_check = PreTrainedModel.get_correct_attn_implementation


def register() -> None:
    """Add "c_attention" to the attention and mask functions of transformers.

    A model that is loaded with this name but does not ask the registry keeps its own attention, and
    `model.config._attn_implementation` says so. One that looks for the name in a table of its own
    raises ValueError.

    Examples
    --------
    >>> from sdpa.interop.transformers import register
    >>> register()
    >>> from transformers import AttentionInterface
    >>> "c_attention" in AttentionInterface().valid_keys()
    True
    """
    AttentionInterface.register(NAME, c_attention)
    AttentionMaskInterface.register(NAME, c_attention_mask)
    PreTrainedModel.get_correct_attn_implementation = _checked


@functools.wraps(_check)
def _checked(self: Any, requested_attention: str | None, is_init_check: bool = False) -> str:
    found: str = _check(self, requested_attention, is_init_check)
    if found != NAME or not is_init_check:
        return found
    kind = type(self)
    modules = [sys.modules.get(base.__module__) for base in kind.__mro__]
    for name, table in [each for module in modules if module for each in vars(module).items()]:
        if name.endswith("ATTENTION_CLASSES") and NAME not in table:
            raise ValueError(
                f"attn_implementation: expected one of {', '.join(table)} for {kind.__name__}, by "
                f"its own {name}, got {NAME}; load it with one of these, after which "
                "set_attn_implementation switches the parts without such a table"
            )
    if self._can_set_attn_implementation():
        return found
    _LOGGER.warning_once(f"{kind.__name__} keeps its own attention: it does not ask the registry")
    return "eager"


class _Mask(torch.Tensor):
    """Eager's mask (batch, 1, Lq, Lk), 0 or the least number of its dtype, which is not built.

    Every function of PyTorch gets it built. Its `options` are the arguments of `attention` that
    say the same: attn_mask, is_causal and window.
    """

    options: dict[str, Any]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _METADATA:
            name = func.__name__
            in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
            if isinstance(args[0] if in_place and args else kwargs.get("out"), _Mask):
                raise NotImplementedError(
                    f"attention_mask: expected to stay as it is with {NAME}, got {name}; change a "
                    "clone of it"
                )
            args, kwargs = _built(args), {key: _built(x) for key, x in kwargs.items()}
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _built(x: Any) -> Any:
    """`x` with the masks in it built."""
    if isinstance(x, (list, tuple)):
        return type(x)([_built(part) for part in x])
    return _eagers(x, x.options) if isinstance(x, _Mask) else x


def _eagers(mask: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Eager's mask, of shape and dtype of `mask`, that says what the options say."""
    shape, dtype = mask.shape, mask.dtype
    n_q, n_k = shape[2:]
    # How far a key is after a query.
    after = torch.arange(n_k) - torch.arange(n_k - n_q, n_k)[:, None]
    seen = torch.ones((*shape[:2], 1, 1), dtype=torch.bool)
    if options["attn_mask"] is not None:
        seen = seen & options["attn_mask"]
    if options["is_causal"]:
        seen = seen & (after <= 0)
    if options["window"] is not None:
        left, right = options["window"]
        seen = seen & (after >= -left) & (after <= (n_k if right is None else right))
    return torch.where(seen.expand(shape), torch.zeros((), dtype=dtype), torch.finfo(dtype).min)


def _parts(mask_function: Any) -> list[Any]:
    """The function and those that it combines, which are hidden while a graph is traced."""
    if torch.compiler.is_compiling() or not inspect.isfunction(mask_function):
        return [mask_function]
    return [
        mask_function,
        *inspect.getclosurevars(mask_function).nonlocals.get("mask_functions", ()),
    ]


def _names(mask_function: Any) -> list[str | None]:
    return [getattr(part, "__qualname__", None) for part in _parts(mask_function)]


_BIDIRECTIONAL = getattr(masking_utils, "bidirectional_mask_function", None)
_WINDOWS = [
    _names(getattr(masking_utils, f"sliding_window_{name}_mask_function")(1))
    for name in ("causal", "bidirectional")
    if hasattr(masking_utils, f"sliding_window_{name}_mask_function")
]


def _options(mask_function: Any) -> dict[str, Any] | None:
    """The options of `attention` that say the pattern, or None if they cannot.

    Causality and windows suppose that the last query is at the last key, and a window of both sides
    that there are as many of both.
    """
    if mask_function is masking_utils.causal_mask_function:
        return {"is_causal": "lower_right"}
    if mask_function is _BIDIRECTIONAL:
        return {}
    if _names(mask_function) not in _WINDOWS:
        return None
    width = inspect.getclosurevars(_parts(mask_function)[1]).nonlocals["sliding_window"]
    if _names(mask_function) == _WINDOWS[0]:  # the width counts the query's own key; 0 hides it
        return {"is_causal": "lower_right", "window": (width - 1, None)} if width > 0 else None
    return {"window": (width, width)}


def _number(x: Any) -> Any:
    """A number that may be a tensor; a size, which may be any number in a graph, stays one."""
    return int(x) if isinstance(x, torch.Tensor) else x


def _last_query_is_at_last_key(where: dict[str, Any], kv_end: int) -> bool:
    """Whether the last query is at the last key, for any version of transformers."""
    if "cache_position" in where:
        last = where["cache_position"][-1]
    else:
        last = where.get("q_offset", 0) + where["q_length"] - 1
    if isinstance(last, torch.Tensor) and torch.compiler.is_compiling():
        return False  # only known when the graph runs
    return bool(_number(last) + 1 == kv_end)


def _has_values() -> bool:
    """Whether tensors may be asked: a graph serves all values, and torch.func a batch of them."""
    return not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())


def _padding(attention_mask: torch.Tensor | None, kv_length: int, kv_offset: int) -> Any:
    """The padding (batch, 1, 1, kv_length), or None if all keys are there."""
    if attention_mask is None:
        return None
    padding = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    padding = torch.nn.functional.pad(padding, (0, kv_length - padding.shape[1]))
    return None if _has_values() and padding.all() else padding[:, None, None, :]


def c_attention_mask(
    batch_size: int,
    kv_length: int,
    kv_offset: Any = 0,
    mask_function: Any = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **where: Any,
) -> torch.Tensor | None:
    """The mask (batch, 1, Lq, Lk) of one call of a model, or None if every query sees every key.

    Causality, windows and padding take one vector (batch, Lk) of memory, other patterns one byte
    for each pair. So does a mask whose last query is not at the last key, or that may not be left
    out: that of a static cache, which must be of one kind from the first token to the last.
    `where` has the place of the queries: q_length and q_offset, or cache_position before
    transformers 5.4.
    """
    kv_offset = _number(kv_offset)
    n_q = where["q_length"] if "q_length" in where else where["cache_position"].shape[0]
    options = _options(mask_function)
    if options and not (
        (allow_is_causal_skip or allow_is_bidirectional_skip)
        and _last_query_is_at_last_key(where, kv_offset + kv_length)
        and (options.get("is_causal") or n_q == kv_length)
    ):
        options = None
    if options is None:
        options = {
            "attn_mask": masking_utils.sdpa_mask(
                batch_size=batch_size,
                kv_length=kv_length,
                kv_offset=kv_offset,
                mask_function=mask_function,
                attention_mask=attention_mask,
                allow_is_causal_skip=False,
                allow_is_bidirectional_skip=False,
                **where,
            )
        }
    else:
        padding = _padding(attention_mask, kv_length, kv_offset)
        if padding is None and not options and allow_is_bidirectional_skip:
            return None
        options["attn_mask"] = padding
    options = {"is_causal": False, "window": None} | options
    zeros = torch.zeros((), dtype=dtype).expand(batch_size, 1, n_q, kv_length)
    if type(zeros) is not torch.Tensor:  # of a class that torch.export needs
        return _eagers(zeros, options)
    mask = zeros.as_subclass(_Mask)
    mask.options = options
    return mask


def _with_bias(mask: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor | None:
    if mask is None or bias is None:
        return bias if mask is None else mask
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else mask + bias


def _only(indices: torch.Tensor | None, n_k: int, dtype: torch.dtype) -> torch.Tensor | None:
    """The bias that hides all keys but those whose indices (batch, Lq, n) are given."""
    if indices is None:
        return None
    hidden = torch.full((*indices.shape[:2], n_k), -torch.inf, dtype=dtype)
    return hidden.scatter(-1, indices.long(), 0.0)[:, None]


def _are_collected() -> bool:
    """Whether the model at work collects weights, of which it does not tell every part."""
    if _active_collector is None or (
        torch.compiler.is_compiling() and not _active_collector.compiling
    ):
        return False
    return any(name.endswith("attentions") for name in _active_collector.get() or ())


def c_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out (batch, Lq, heads, d_v), weights or None), as transformers calls its functions.

    The mask is the whole pattern, whatever is_causal and sliding_window are; `indices` (batch, Lq,
    n) are the only keys of it that each query sees. Where it sees none, out is the mean of all
    values, as in eager attention; a lone query, which follows a cache, gets 0.
    """
    for name, x in others.items():
        if x is not None and name not in _UNREAD:
            raise NotImplementedError(
                f"{name}: expected None with {NAME}, got {type(x).__name__}; "
                "use attn_implementation='eager'"
            )
    n_q, n_k = query.shape[2], key.shape[2]
    ours: dict[str, Any] = {
        "attn_mask": attention_mask,
        "dropout_p": dropout if module.training else 0.0,
        "scale": scaling,
        "softcap": softcap,
        "sinks": None if s_aux is None else s_aux.to(query.dtype),
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    if isinstance(attention_mask, _Mask):
        is_ours = attention_mask.shape[2:] == (n_q, n_k)
        ours |= attention_mask.options if is_ours else {"attn_mask": _built(attention_mask)}
    for bias in position_bias, _only(indices, n_k, query.dtype):
        ours["attn_mask"] = _with_bias(ours["attn_mask"], bias)
    weights = None
    if others.get("output_attentions") or _are_collected():
        if ours["dropout_p"]:
            # The same for out and weights. Left out, it is drawn without a break of the graph.
            ours["rng"] = int(torch.randint(2**63 - 1, ()))
        weights = attention_weights(query, key, **ours)
    if ours["attn_mask"] is None or n_q == 1 or n_k == 0:
        out = attention(query, key, value, **ours)
    else:
        out, lse = attention_forward(query, key, value, **ours)
        blind = lse.isneginf()[..., None]
        if not _has_values() or blind.any():
            mean = value.mean(2, keepdim=True).to(out.dtype)  # under autocast another than value's
            out = torch.where(blind, mean.repeat_interleave(query.shape[1] // key.shape[1], 1), out)
            weights = None if weights is None else torch.where(blind, 1 / n_k, weights)
    return out.transpose(1, 2).contiguous(), weights


def __dir__() -> list[str]:
    return __all__
