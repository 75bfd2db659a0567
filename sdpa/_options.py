"""Options of the composed functions. Written by `make stubs`; see tools/stubs.py."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict

from numpy.typing import ArrayLike


class CosineOptions(TypedDict, total=False):
    """Options of `cosine_attention`: the temperature is its scale."""

    attn_mask: ArrayLike | None
    dropout_p: float
    is_causal: bool | Literal["upper_left", "lower_right"]
    where: ArrayLike | None
    enable_gqa: bool
    softcap: float | None
    window: tuple[int | None, int | None] | None
    sinks: ArrayLike | None
    alibi_slopes: ArrayLike | None
    key_lengths: int | ArrayLike | None
    query_offset: int | ArrayLike | None
    rng: int | None
    workers: int | None


class BilinearOptions(TypedDict, total=False):
    """Options of `bilinear_attention`."""

    attn_mask: ArrayLike | None
    dropout_p: float
    is_causal: bool | Literal["upper_left", "lower_right"]
    where: ArrayLike | None
    scale: float | ArrayLike | None
    enable_gqa: bool
    softcap: float | None
    window: tuple[int | None, int | None] | None
    sinks: ArrayLike | None
    alibi_slopes: ArrayLike | None
    key_lengths: int | ArrayLike | None
    query_offset: int | ArrayLike | None
    rng: int | None
    workers: int | None


class BlockOptions(TypedDict, total=False):
    """Options of `sdpa.blocks.attend`: the mask may lie in a store, too. Blocks change bits."""

    attn_mask: Any
    dropout_p: float
    is_causal: bool | Literal["upper_left", "lower_right"]
    where: Any
    scale: float | ArrayLike | None
    enable_gqa: bool
    softcap: float | None
    window: tuple[int | None, int | None] | None
    sinks: ArrayLike | None
    alibi_slopes: ArrayLike | None
    key_lengths: int | ArrayLike | None
    query_offset: int | ArrayLike | None
    cu_seqlens_q: ArrayLike | None
    cu_seqlens_k: ArrayLike | None
    score_mod: Callable[..., Any] | None
    score_args: Sequence[ArrayLike] | None
    mask_mod: Callable[..., Any] | None
    mask_args: Sequence[ArrayLike] | None
    rng: int | None
    workers: int | None


class LayerOptions(TypedDict, total=False):
    """Options of `MultiHeadAttention.forward`: heads and scale are the layer's."""

    attn_mask: ArrayLike | None
    dropout_p: float
    is_causal: bool | Literal["upper_left", "lower_right"]
    where: ArrayLike | None
    softcap: float | None
    window: tuple[int | None, int | None] | None
    sinks: ArrayLike | None
    alibi_slopes: ArrayLike | None
    key_lengths: int | ArrayLike | None
    query_offset: int | ArrayLike | None
    rng: int | None
    workers: int | None


class ShawOptions(TypedDict, total=False):
    """Options of `shaw_attention`: one diagonal for the whole batch."""

    attn_mask: ArrayLike | None
    dropout_p: float
    is_causal: bool | Literal["upper_left", "lower_right"]
    scale: float | None
    enable_gqa: bool
    softcap: float | None
    window: tuple[int | None, int | None] | None
    sinks: ArrayLike | None
    alibi_slopes: ArrayLike | None
    key_lengths: int | ArrayLike | None
    query_offset: int | None
    rng: int | None
    workers: int | None


class T5Options(TypedDict, total=False):
    """Options of `t5_attention_backward`: one diagonal, and no other bias than T5's.

    Dropout is left out because its pattern depends on the index of the query.
    """

    is_causal: bool | Literal["upper_left", "lower_right"]
    scale: float | ArrayLike | None
    enable_gqa: bool
    softcap: float | None
    window: tuple[int | None, int | None] | None
    sinks: ArrayLike | None
    key_lengths: int | ArrayLike | None
    query_offset: int
    workers: int | None
