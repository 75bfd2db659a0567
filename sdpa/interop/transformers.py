"""Attention for models of transformers: `attn_implementation="c_attention"`.

After `register()` every model that takes its attention from transformers' registry can run on
sdpa, by `Model.from_pretrained(..., attn_implementation="c_attention")` or
`model.set_attn_implementation("c_attention")`: softcap, sinks, sliding windows and position biases
included, in training and in `generate`.

Padding stays a vector over keys, and causal masks and sliding windows become options, so no (Lq,
Lk) mask is built. Other patterns (chunks, prefixes, packed sequences, static caches) arrive as the
boolean mask that transformers builds for them.
"""

from __future__ import annotations

import inspect
from typing import Any

try:
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
except ImportError as _error:
    raise ImportError(
        "sdpa.interop.transformers needs transformers: pip install transformers"
    ) from _error

import torch

from sdpa.interop.torch import attention, attention_weights

NAME = "c_attention"

_PLAIN = [
    getattr(masking_utils, f"{name}_mask_function", None) for name in ("causal", "bidirectional")
]
_WINDOW = masking_utils.sliding_window_causal_mask_function(1)


def register() -> None:
    """Add "c_attention" to the attention and mask functions of transformers.

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


def _parts(mask_function: Any) -> list[str]:
    """The names of the functions that are combined in a mask function."""
    combined = inspect.getclosurevars(mask_function).nonlocals.get("mask_functions", ())
    return [function.__qualname__ for function in combined]


def _is_option(mask_function: Any) -> bool:
    """Whether is_causal and sliding_window of the module express the pattern."""
    return mask_function in _PLAIN or (
        mask_function.__qualname__ == _WINDOW.__qualname__
        and _parts(mask_function) == _parts(_WINDOW)
    )


def _last_query_is_at_last_key(where: dict[str, Any], kv_end: int) -> bool:
    """Whether the last query is at the last key, for any version of transformers."""
    if "cache_position" in where:
        last = where["cache_position"][-1]
    else:
        last = where.get("q_offset", 0) + where["q_length"] - 1
    if isinstance(last, torch.Tensor) and torch.compiler.is_compiling():
        return False  # only known when the graph runs
    return int(last) + 1 == kv_end


def c_attention_mask(
    batch_size: int,
    kv_length: int,
    kv_offset: Any = 0,
    mask_function: Any = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """The mask of one call of a model: the padding (batch, Lk), or None if there is none.

    A pattern that options cannot express, or whose last query is not at the last key, becomes a
    boolean mask (batch, 1, Lq, Lk) that includes the padding. `options` has the place of the
    queries: q_length and q_offset, or cache_position before transformers 5.4.
    """
    kv_offset = int(kv_offset)
    ends_together = _last_query_is_at_last_key(options, kv_offset + kv_length)
    if not ends_together or not _is_option(mask_function):
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return masking_utils.sdpa_mask(
            batch_size=batch_size,
            kv_length=kv_length,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **options,
        )
    if attention_mask is None:
        return None
    attention_mask = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    # A graph must serve all values of the padding.
    is_compiling = torch.compiler.is_compiling()
    return None if not is_compiling and attention_mask.all() else attention_mask


def _with_bias(mask: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor | None:
    if mask is None or bias is None:
        return bias if mask is None else mask
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else mask + bias


def c_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out (batch, Lq, heads, d_v), weights or None), as transformers calls its functions."""
    for name in "cache", "cu_seq_lens_q":
        if options.get(name) is not None:
            raise NotImplementedError(f"{name}: not available with {NAME}")
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    if attention_mask is not None and attention_mask.ndim == 2:
        attention_mask = attention_mask[:, None, None, :]
    elif attention_mask is not None:  # the whole pattern
        is_causal = False
    ours: dict[str, Any] = {
        "attn_mask": _with_bias(attention_mask, position_bias),
        "dropout_p": dropout,
        "is_causal": "lower_right" if is_causal else False,
        "window": (sliding_window - 1, None) if is_causal and sliding_window else None,
        "scale": scaling,
        "softcap": softcap,
        "sinks": None if s_aux is None else s_aux.to(query.dtype),
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    if dropout:
        ours["rng"] = int(torch.randint(2**63 - 1, ()))  # the same for out and weights
    out = attention(query, key, value, **ours).transpose(1, 2).contiguous()
    return out, attention_weights(query, key, **ours) if options.get("output_attentions") else None
