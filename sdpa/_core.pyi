# Written by `make stubs`; see tools/stubs.py.
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

__version__: str
_Axis = int | tuple[int, ...] | None

class AdditiveGradients(NamedTuple):
    query: NDArray[Any] | None
    key: NDArray[Any] | None
    value: NDArray[Any] | None
    w_query: NDArray[Any] | None
    w_key: NDArray[Any] | None
    w_score: NDArray[Any] | None
    bias: NDArray[Any] | None
    attn_mask: NDArray[Any] | None
    sinks: NDArray[Any] | None

class AttentionForward(NamedTuple):
    out: NDArray[Any]
    lse: NDArray[Any]

class AttentionGradients(NamedTuple):
    query: NDArray[Any] | None
    key: NDArray[Any] | None
    value: NDArray[Any] | None
    attn_mask: NDArray[Any] | None
    sinks: NDArray[Any] | None
    scale: NDArray[Any] | None
    score_args: tuple[NDArray[Any] | None, ...] | None

class AttentionReceived(NamedTuple):
    total: NDArray[Any]
    largest: NDArray[Any]

class AttentionSecondGradients(NamedTuple):
    grad_out: NDArray[Any] | None
    query: NDArray[Any] | None
    key: NDArray[Any] | None
    value: NDArray[Any] | None
    attn_mask: NDArray[Any] | None
    sinks: NDArray[Any] | None
    scale: NDArray[Any] | None
    score_args: tuple[NDArray[Any] | None, ...] | None

class AttentionStatistics(NamedTuple):
    lse: NDArray[Any]
    entropy: NDArray[Any]
    max_weight: NDArray[Any]
    sum_p2: NDArray[Any]
    sum_p3: NDArray[Any]
    score_mean: NDArray[Any]
    score_var: NDArray[Any]

class AttentionTangent(NamedTuple):
    out: NDArray[Any]
    out_t: NDArray[Any]

class LogsumexpForward(NamedTuple):
    lse: NDArray[Any]
    sign: NDArray[Any]

class LogsumexpGradients(NamedTuple):
    x: NDArray[Any]
    b: NDArray[Any]

def additive_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    w_query: ArrayLike,
    w_key: ArrayLike,
    w_score: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | Literal["upper_left", "lower_right"] = False,
    where: ArrayLike | None = None,
    scale: float | None = 1.0,
    enable_gqa: bool = False,
    softcap: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    key_lengths: int | ArrayLike | None = None,
    query_offset: int | ArrayLike | None = None,
    rng: int | np.random.Generator | None = None,
    workers: int | None = None,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]: ...
def additive_attention_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    w_query: ArrayLike,
    w_key: ArrayLike,
    w_score: ArrayLike,
    bias: ArrayLike | None,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | Literal["upper_left", "lower_right"] = False,
    where: ArrayLike | None = None,
    scale: float | None = 1.0,
    enable_gqa: bool = False,
    softcap: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    key_lengths: int | ArrayLike | None = None,
    query_offset: int | ArrayLike | None = None,
    rng: int | None = None,
    workers: int | None = None,
    grad_lse: ArrayLike | None = None,
    needs: Iterable[str] | None = None,
) -> AdditiveGradients: ...
def additive_attention_forward(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    w_query: ArrayLike,
    w_key: ArrayLike,
    w_score: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | Literal["upper_left", "lower_right"] = False,
    where: ArrayLike | None = None,
    scale: float | None = 1.0,
    enable_gqa: bool = False,
    softcap: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    key_lengths: int | ArrayLike | None = None,
    query_offset: int | ArrayLike | None = None,
    rng: int | None = None,
    workers: int | None = None,
    out: NDArray[Any] | None = None,
) -> AttentionForward: ...
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | Literal["upper_left", "lower_right"] = False,
    *,
    where: ArrayLike | None = None,
    scale: float | ArrayLike | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    key_lengths: int | ArrayLike | None = None,
    query_offset: int | ArrayLike | None = None,
    cu_seqlens_q: ArrayLike | None = None,
    cu_seqlens_k: ArrayLike | None = None,
    score_mod: Callable[..., Any] | None = None,
    score_args: Sequence[ArrayLike] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    mask_args: Sequence[ArrayLike] | None = None,
    rng: int | np.random.Generator | None = None,
    invariant: bool = False,
    workers: int | None = None,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]: ...
def attention_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | Literal["upper_left", "lower_right"] = False,
    *,
    where: ArrayLike | None = None,
    scale: float | ArrayLike | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    key_lengths: int | ArrayLike | None = None,
    query_offset: int | ArrayLike | None = None,
    cu_seqlens_q: ArrayLike | None = None,
    cu_seqlens_k: ArrayLike | None = None,
    score_mod: Callable[..., Any] | None = None,
    score_args: Sequence[ArrayLike] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    mask_args: Sequence[ArrayLike] | None = None,
    rng: int | None = None,
    invariant: bool = False,
    workers: int | None = None,
    grad_lse: ArrayLike | None = None,
    needs: Iterable[str] = ("query", "key", "value"),
) -> AttentionGradients: ...
def attention_double_backward(
    gg_query: ArrayLike | None,
    gg_key: ArrayLike | None,
    gg_value: ArrayLike | None,
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | Literal["upper_left", "lower_right"] = False,
    *,
    where: ArrayLike | None = None,
    scale: float | ArrayLike | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    key_lengths: int | ArrayLike | None = None,
    query_offset: int | ArrayLike | None = None,
    cu_seqlens_q: ArrayLike | None = None,
    cu_seqlens_k: ArrayLike | None = None,
    score_mod: Callable[..., Any] | None = None,
    score_args: Sequence[ArrayLike] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    mask_args: Sequence[ArrayLike] | None = None,
    rng: int | None = None,
    invariant: bool = False,
    workers: int | None = None,
    gg_attn_mask: ArrayLike | None = None,
    gg_sinks: ArrayLike | None = None,
    gg_scale: ArrayLike | None = None,
    gg_score_args: Sequence[ArrayLike | None] | None = None,
    grad_lse: ArrayLike | None = None,
    needs: Iterable[str] = ("grad_out", "query", "key", "value"),
) -> AttentionSecondGradients: ...
def attention_forward(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | Literal["upper_left", "lower_right"] = False,
    *,
    where: ArrayLike | None = None,
    scale: float | ArrayLike | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    key_lengths: int | ArrayLike | None = None,
    query_offset: int | ArrayLike | None = None,
    cu_seqlens_q: ArrayLike | None = None,
    cu_seqlens_k: ArrayLike | None = None,
    score_mod: Callable[..., Any] | None = None,
    score_args: Sequence[ArrayLike] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    mask_args: Sequence[ArrayLike] | None = None,
    rng: int | None = None,
    invariant: bool = False,
    workers: int | None = None,
    out: NDArray[Any] | None = None,
    lse_dtype: DTypeLike | None = None,
) -> AttentionForward: ...
def attention_jvp(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    query_t: ArrayLike | None = None,
    key_t: ArrayLike | None = None,
    value_t: ArrayLike | None = None,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | Literal["upper_left", "lower_right"] = False,
    *,
    where: ArrayLike | None = None,
    scale: float | ArrayLike | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    key_lengths: int | ArrayLike | None = None,
    query_offset: int | ArrayLike | None = None,
    cu_seqlens_q: ArrayLike | None = None,
    cu_seqlens_k: ArrayLike | None = None,
    score_mod: Callable[..., Any] | None = None,
    score_args: Sequence[ArrayLike] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    mask_args: Sequence[ArrayLike] | None = None,
    rng: int | None = None,
    invariant: bool = False,
    workers: int | None = None,
    attn_mask_t: ArrayLike | None = None,
    sinks_t: ArrayLike | None = None,
    scale_t: ArrayLike | None = None,
    score_args_t: Sequence[ArrayLike | None] | None = None,
) -> AttentionTangent: ...
def attention_received(
    query: ArrayLike,
    key: ArrayLike,
    *,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | Literal["upper_left", "lower_right"] = False,
    where: ArrayLike | None = None,
    scale: float | ArrayLike | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    key_lengths: int | ArrayLike | None = None,
    query_offset: int | ArrayLike | None = None,
    cu_seqlens_q: ArrayLike | None = None,
    cu_seqlens_k: ArrayLike | None = None,
    score_mod: Callable[..., Any] | None = None,
    score_args: Sequence[ArrayLike] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    mask_args: Sequence[ArrayLike] | None = None,
    rng: int | None = None,
    invariant: bool = False,
    workers: int | None = None,
    heads: slice | ArrayLike | None = None,
    queries: slice | ArrayLike | None = None,
) -> AttentionReceived: ...
def attention_statistics(
    query: ArrayLike,
    key: ArrayLike,
    *,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | Literal["upper_left", "lower_right"] = False,
    where: ArrayLike | None = None,
    scale: float | ArrayLike | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    key_lengths: int | ArrayLike | None = None,
    query_offset: int | ArrayLike | None = None,
    cu_seqlens_q: ArrayLike | None = None,
    cu_seqlens_k: ArrayLike | None = None,
    score_mod: Callable[..., Any] | None = None,
    score_args: Sequence[ArrayLike] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    mask_args: Sequence[ArrayLike] | None = None,
    rng: int | None = None,
    invariant: bool = False,
    workers: int | None = None,
) -> AttentionStatistics: ...
def attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    *,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | Literal["upper_left", "lower_right"] = False,
    where: ArrayLike | None = None,
    scale: float | ArrayLike | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    key_lengths: int | ArrayLike | None = None,
    query_offset: int | ArrayLike | None = None,
    cu_seqlens_q: ArrayLike | None = None,
    cu_seqlens_k: ArrayLike | None = None,
    sequence: int | None = None,
    score_mod: Callable[..., Any] | None = None,
    score_args: Sequence[ArrayLike] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    mask_args: Sequence[ArrayLike] | None = None,
    rng: int | None = None,
    invariant: bool = False,
    workers: int | None = None,
    stage: Literal["scores", "capped", "biased", "weights"] = "weights",
    heads: slice | ArrayLike | None = None,
    queries: slice | ArrayLike | None = None,
) -> NDArray[Any]: ...
def get_num_threads() -> int: ...
def log_softmax(
    x: ArrayLike,
    axis: _Axis = -1,
    *,
    temperature: float = 1.0,
    where: ArrayLike | None = None,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]: ...
def log_softmax_backward(
    grad: ArrayLike, log_weights: ArrayLike, axis: _Axis = -1, *, temperature: float = 1.0
) -> NDArray[Any]: ...
@overload
def logsumexp(
    x: ArrayLike,
    axis: _Axis = -1,
    *,
    b: ArrayLike | None = None,
    return_sign: Literal[False] = False,
    where: ArrayLike | None = None,
    keepdims: bool = False,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]: ...
@overload
def logsumexp(
    x: ArrayLike,
    axis: _Axis = -1,
    *,
    b: ArrayLike | None = None,
    return_sign: Literal[True],
    where: ArrayLike | None = None,
    keepdims: bool = False,
    out: NDArray[Any] | None = None,
) -> LogsumexpForward: ...
@overload
def logsumexp(
    x: ArrayLike,
    axis: _Axis = -1,
    *,
    b: ArrayLike | None = None,
    return_sign: bool,
    where: ArrayLike | None = None,
    keepdims: bool = False,
    out: NDArray[Any] | None = None,
) -> NDArray[Any] | LogsumexpForward: ...
@overload
def logsumexp_backward(
    grad: ArrayLike,
    x: ArrayLike,
    lse: ArrayLike,
    axis: _Axis = -1,
    *,
    b: None = None,
    sign: ArrayLike | None = None,
) -> NDArray[Any]: ...
@overload
def logsumexp_backward(
    grad: ArrayLike,
    x: ArrayLike,
    lse: ArrayLike,
    axis: _Axis = -1,
    *,
    b: ArrayLike,
    sign: ArrayLike | None = None,
) -> LogsumexpGradients: ...
def merge_attention(
    outs: Sequence[ArrayLike] | NDArray[Any], lses: Sequence[ArrayLike] | NDArray[Any]
) -> AttentionForward: ...
def scaled_dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | Literal["upper_left", "lower_right"] = False,
    *,
    scale: float | ArrayLike | None = None,
    enable_gqa: bool = False,
) -> NDArray[Any]: ...
def set_num_threads(n: int) -> None: ...
@overload
def show_config(mode: Literal["stdout"] = "stdout") -> None: ...
@overload
def show_config(mode: Literal["dicts"]) -> dict[str, Any]: ...
def softmax(
    x: ArrayLike,
    axis: _Axis = -1,
    *,
    temperature: float = 1.0,
    where: ArrayLike | None = None,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]: ...
def softmax_backward(
    grad: ArrayLike, weights: ArrayLike, axis: _Axis = -1, *, temperature: float = 1.0
) -> NDArray[Any]: ...
def softmax_jacobian(
    weights: ArrayLike, axis: _Axis = -1, *, temperature: float = 1.0
) -> NDArray[Any]: ...
def _alloc_fail_after(n: int, /) -> None: ...
def _arrays(**arguments: ArrayLike) -> list[NDArray[Any]]: ...
def _check_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | Literal["upper_left", "lower_right"] = False,
    *,
    where: ArrayLike | None = None,
    scale: float | ArrayLike | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    key_lengths: int | ArrayLike | None = None,
    query_offset: int | ArrayLike | None = None,
    cu_seqlens_q: ArrayLike | None = None,
    cu_seqlens_k: ArrayLike | None = None,
    score_mod: Callable[..., Any] | None = None,
    score_args: Sequence[ArrayLike] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    mask_args: Sequence[ArrayLike] | None = None,
    rng: int | np.random.Generator | None = None,
    invariant: bool = False,
    workers: int | None = None,
    out: NDArray[Any] | None = None,
    lse_dtype: DTypeLike | None = None,
) -> None: ...
def _check_attention_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | Literal["upper_left", "lower_right"] = False,
    *,
    where: ArrayLike | None = None,
    scale: float | ArrayLike | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    key_lengths: int | ArrayLike | None = None,
    query_offset: int | ArrayLike | None = None,
    cu_seqlens_q: ArrayLike | None = None,
    cu_seqlens_k: ArrayLike | None = None,
    score_mod: Callable[..., Any] | None = None,
    score_args: Sequence[ArrayLike] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    mask_args: Sequence[ArrayLike] | None = None,
    rng: int | np.random.Generator | None = None,
    invariant: bool = False,
    workers: int | None = None,
    grad_lse: ArrayLike | None = None,
    needs: Iterable[str] = ("query", "key", "value"),
) -> None: ...
def _close_pool() -> None: ...
def _hint(keyword: ArrayLike, names: ArrayLike, /) -> str: ...
def _isas() -> dict[str, bool]: ...
def _operations() -> tuple[str, ...]: ...
def _options() -> tuple[tuple[str, str, str, bool, str, tuple[str, ...], str | None], ...]: ...
def _pattern(
    query: ArrayLike,
    key: ArrayLike,
    *,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | Literal["upper_left", "lower_right"] = False,
    where: ArrayLike | None = None,
    scale: float | ArrayLike | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    key_lengths: int | ArrayLike | None = None,
    query_offset: int | ArrayLike | None = None,
    cu_seqlens_q: ArrayLike | None = None,
    cu_seqlens_k: ArrayLike | None = None,
    score_mod: Callable[..., Any] | None = None,
    score_args: Sequence[ArrayLike] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    mask_args: Sequence[ArrayLike] | None = None,
    rng: int | np.random.Generator | None = None,
    invariant: bool = False,
    workers: int | None = None,
) -> tuple[NDArray[Any], NDArray[np.int64]]: ...
def _use_isa(name: str, /) -> str: ...
def _views(*objects: object) -> tuple[NDArray[Any], ...]: ...
def _xla_arguments() -> dict[str, Any]: ...
def _xla_handlers() -> dict[str, Any]: ...
