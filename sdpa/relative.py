"""Attention with learned vectors for relative positions, in scores and output (Shaw et al., 2018).

The distance t = j - i - query_offset of query i and key j is clipped to -D ... D, so beyond D - 1 a
vector is the same for all keys: there attention is that of keys key + rel_key[end] and values
value + rel_value[end], to the kernel's liking. What remains is a band of diagonals around t = 0,
taken in blocks of queries with the few keys that they meet there: its part of the scores is
query rel_key^T, one product per query and distance, read along diagonals as an additive mask (with
a softcap or dropout its pairs are written out, a block at a time). The parts, over disjoint sets of
keys, are merged by their log-sum-exps. Where there are no more keys
than a block of the band has anyway, all of them are in the band.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike

from sdpa import _core
from sdpa._compose import Array, arrays, checked_needs, checked_options, widen
from sdpa._relative import Backward, Problem, forward

__all__ = [
    "ShawGradients",
    "shaw_attention",
    "shaw_attention_backward",
    "shaw_attention_forward",
]


class ShawOptions(TypedDict, total=False):
    """Options of `shaw_attention`."""

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


class ShawGradients(NamedTuple):
    """Gradients of Shaw's attention, each of its argument's shape; None where not asked for."""

    query: Array | None
    key: Array | None
    value: Array | None
    rel_key: Array | None
    rel_value: Array | None
    attn_mask: Array | None
    sinks: Array | None


def shaw_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    rel_key: ArrayLike,
    rel_value: ArrayLike | None = None,
    **options: Unpack[ShawOptions],
) -> Array:
    """Attention with vectors for relative positions added to keys and values.

    With c = clip(j - i - query_offset, -D, D) + D:

        out_i = sum_j p_ij (value_j + rel_value[c]),
        p = softmax_j(scale query_i . (key_j + rel_key[c]) + attn_mask)

    Shaw, Uszkoreit and Vaswani, "Self-attention with relative position representations" (2018),
    section 3.1. No Lq x Lk array is made: beyond the result the memory is O(L d) and one block of
    about 128 queries and 128 + 2 D keys per head.

    Parameters
    ----------
    query : array_like, (..., heads, Lq, d_k)
        float16, bfloat16, float32 or float64.
    key : array_like, (..., heads, Lk, d_k)
        Of query's dtype.
    value : array_like, (..., heads, Lk, d_v)
        Of query's dtype.
    rel_key : array_like, (2 D + 1, d_k) or (heads, 2 D + 1, d_k)
        Of query's dtype; vectors of the distances -D ... D, keys before the query first. Heads are
        those of key.
    rel_value : array_like, (2 D + 1, d_v) or (heads, 2 D + 1, d_v), optional
        The same for values; None is zero.
    **options : attn_mask, is_causal, scale, enable_gqa, window, sinks, key_lengths, ...
        Those of `attention_forward`, with the same meaning, but out. query_offset is one int, and
        sets the distance 0, too; so does is_causal="lower_right", with one key length. A softcap
        bends scale query . (key + rel_key); dropout leaves out the pairs that it does there.

    Returns
    -------
    out : ndarray, (..., heads, Lq, d_v)
        Of query's dtype, computed in float32 (float64 for float64).

    Raises
    ------
    TypeError
        An argument of a dtype or type that is not taken, or an unknown one.
    ValueError
        Shapes that do not fit, or a value that is not legal.

    See Also
    --------
    shaw_attention_forward : the same and the log-sum-exp of each row.
    shaw_attention_backward : gradients.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> query, key, value = np.ones((3, 1)), np.zeros((3, 1)), np.eye(3)
    >>> rel_key = np.log([[2.0], [1.0], [1.0]])  # twice the weight for keys before the query
    >>> sdpa.shaw_attention(query, key, value, rel_key)[2]
    array([0.4, 0.4, 0.2])
    """
    name = "shaw_attention"
    return _forward(name, query, key, value, rel_key, rel_value, options).out


def shaw_attention_forward(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    rel_key: ArrayLike,
    rel_value: ArrayLike | None = None,
    **options: Unpack[ShawOptions],
) -> _core.AttentionForward:
    """Shaw's attention and the log-sum-exp of each row of scores.

    Parameters
    ----------
    query, key, value, rel_key, rel_value : array_like
        As of `shaw_attention`.
    **options : attn_mask, is_causal, scale, enable_gqa, window, sinks, key_lengths, ...
        As of `shaw_attention`.

    Returns
    -------
    AttentionForward
        Named tuple: out (..., heads, Lq, d_v), and lse (..., heads, Lq) in float32 (float64 for
        float64).

    Raises
    ------
    TypeError, ValueError
        As `shaw_attention`.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> x, rel_key = np.zeros((2, 1)), np.zeros((3, 1))
    >>> sdpa.shaw_attention_forward(x, x, x, rel_key).lse  # scores 0: log 2
    array([0.69314718, 0.69314718])
    """
    name = "shaw_attention_forward"
    return _forward(name, query, key, value, rel_key, rel_value, options)


def shaw_attention_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    rel_key: ArrayLike,
    rel_value: ArrayLike | None,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    grad_lse: ArrayLike | None = None,
    needs: Iterable[str] | None = None,
    **options: Unpack[ShawOptions],
) -> ShawGradients:
    """Gradients of <grad_out, out> + <grad_lse, lse> of Shaw's attention.

    With dS of attention for the keys key_j + rel_key[c] and values value_j + rel_value[c],

        query: scale dS (key + rel_key)
        rel_key[c]: scale sum of dS_ij query_i over the pairs of c
        rel_value[c]: sum of p_ij grad_out_i over the pairs of c

    and key and value as ever. In the same parts as the forward, with the log-sum-exp of the whole.

    Parameters
    ----------
    grad_out : array_like, (..., heads, Lq, d_v)
        Gradient with respect to out, of query's dtype.
    query, key, value, rel_key, rel_value : array_like
        As of the forward call.
    out, lse : array_like
        Results of `shaw_attention_forward`.
    grad_lse : array_like, (..., heads, Lq), optional
        Gradient with respect to lse, of its dtype; None is zero.
    needs : sequence of {"query", "key", "value", "rel_key", "rel_value", "attn_mask", "sinks"}
        The gradients to compute; None is the first four, and rel_value where it is given.
    **options : attn_mask, is_causal, scale, enable_gqa, window, sinks, key_lengths, ...
        Those of the forward call.

    Returns
    -------
    ShawGradients
        Named tuple (query, key, value, rel_key, rel_value, attn_mask, sinks), each with the shape
        and dtype of its argument, None where not in needs.

    Raises
    ------
    TypeError, ValueError
        As `shaw_attention`, and for what does not fit the forward call.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> rng = np.random.default_rng(0)
    >>> query, key, value, grad_out = rng.standard_normal((4, 2, 5, 8))  # 2 heads
    >>> rel_key, rel_value = rng.standard_normal((2, 7, 8))  # distances -3 to 3
    >>> out, lse = sdpa.shaw_attention_forward(query, key, value, rel_key, rel_value)
    >>> g = sdpa.shaw_attention_backward(
    ...     grad_out, query, key, value, rel_key, rel_value, out, lse
    ... )
    >>> g.rel_value.shape
    (7, 8)
    """
    names = ShawGradients._fields
    if needs is None:
        needs = names[:4] if rel_value is None else names[:5]
    needs = checked_needs(needs, names)
    if "rel_value" in needs and rel_value is None:
        raise ValueError("needs: 'rel_value' has a gradient only where it is given, got None")
    checked = checked_options("shaw_attention_backward", options, ShawOptions.__annotations__)
    problem = Problem(query, key, value, rel_key, rel_value, checked)
    grad_out, out, lse = arrays(grad_out=grad_out, out=out, lse=lse)
    if grad_lse is not None:
        (grad_lse,) = arrays(grad_lse=grad_lse)
    inner = tuple(name for name in needs if not name.startswith("rel_"))
    _core._check_attention_backward(
        grad_out, problem.query, problem.key, problem.value, out, lse, grad_lse=grad_lse,
        needs=inner, **checked,
    )  # fmt: skip
    with np.errstate(all="ignore"):
        of = Backward(problem, needs, widen(grad_out), widen(out), lse, grad_lse)
        return ShawGradients(**dict.fromkeys(names) | of.result())


def _forward(
    function: str,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    rel_key: ArrayLike,
    rel_value: ArrayLike | None,
    options: Mapping[str, Any],
) -> _core.AttentionForward:
    checked = checked_options(function, options, ShawOptions.__annotations__)
    problem = Problem(query, key, value, rel_key, rel_value, checked)
    with np.errstate(all="ignore"):
        return forward(problem)
