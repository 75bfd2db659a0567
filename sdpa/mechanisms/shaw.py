"""Attention with learned vectors for relative positions, in scores and output (Shaw et al., 2018).

The distance t = j - i - query_offset of query i and key j is clipped to -D ... D, so from D on all
keys share one relative row: there it is ordinary attention over key + rel_key[end] and value +
rel_value[end], which the kernel handles directly. The rest is a band of diagonals around t = 0. It
is computed in blocks of queries with the few keys that they meet there: the relative scores query
rel_key^T are one product per query and distance, and the kernel reads them along diagonals as an
additive mask. With dropout, or an option that changes scores, the pairs of a block are written out
in NumPy instead. The parts cover disjoint sets of keys and are merged by their log-sum-exps. If a
block of the band would hold all keys anyway, the band is the only part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Unpack

import numpy as np
from numpy.typing import ArrayLike

from sdpa import _core
from sdpa._arguments import checked_needs, checked_options, converted
from sdpa._arrays import Array
from sdpa._compose import checked_upstream, seeded
from sdpa._options import ShawOptions
from sdpa._public import publish
from sdpa._repr import shown
from sdpa.mechanisms._band import Backward, Problem, forward, unrounded

__all__ = [
    "ShawGradients",
    "shaw_attention",
    "shaw_attention_backward",
    "shaw_attention_forward",
]


@shown
class ShawGradients(NamedTuple):
    """Gradients of Shaw's attention, each with its argument's shape; None if not asked for."""

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
    section 3.1. No Lq x Lk array is made: beyond the result, the memory is O(L d) and one block of
    about 128 queries and 128 + 2 D keys per head.

    Parameters
    ----------
    query : array_like, (..., heads, Lq, d_k)
        float16, bfloat16, float32 or float64.
    key : array_like, (..., heads, Lk, d_k)
        Of query's dtype or, beside a float32 query, float16 or bfloat16.
    value : array_like, (..., heads, Lk, d_v)
        Of key's dtype.
    rel_key : array_like, (2 D + 1, d_k) or (heads, 2 D + 1, d_k)
        Of query's dtype. One vector for each distance -D ... D, keys before the query first. Its
        heads are key's.
    rel_value : array_like, (2 D + 1, d_v) or (heads, 2 D + 1, d_v), optional
        The vectors added to values; None means zero.
    **options : attn_mask, is_causal, scale, enable_gqa, window, sinks, key_lengths, ...
        As in `attention_forward`, but without where, out, lse_dtype, invariant, cu_seqlens_q,
        cu_seqlens_k, score_mod and mask_mod. scale is one number, and query_offset one int, which
        also determines where the distance is 0; so does is_causal="lower_right", with one key
        length. Options that change scores apply to scale query . (key + rel_key). Dropout drops the
        same pairs as in `attention_forward`; rng=None draws a seed.

    Returns
    -------
    ndarray, (..., heads, Lq, d_v)
        Of query's dtype, computed in float32 (float64 for float64).

    Raises
    ------
    TypeError
        An argument has a dtype or type that is not accepted, or its name is unknown.
    ValueError
        Shapes do not fit, or a value is out of range.

    See Also
    --------
    shaw_attention_forward : out and the log-sum-exp of each row.
    shaw_attention_backward : gradients.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> query, key, value = np.ones((3, 1)), np.zeros((3, 1)), np.eye(3)
    >>> rel_key = np.log([[2.0], [1.0], [1.0]])  # twice the weight for keys before the query
    >>> sdpa.shaw_attention(query, key, value, rel_key)[2]
    array([0.4, 0.4, 0.2])
    """
    return _forward(shaw_attention, query, key, value, rel_key, rel_value, seeded(options)).out


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
        As in `shaw_attention`.
    **options : attn_mask, is_causal, scale, enable_gqa, window, sinks, key_lengths, ...
        As in `shaw_attention`, but dropout_p needs rng, an int, which the backward repeats.

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
    return _forward(shaw_attention_forward, query, key, value, rel_key, rel_value, options)


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

    With dS the gradient of the scores of attention over key_j + rel_key[c] and value_j +
    rel_value[c],

        query: scale dS (key + rel_key)
        rel_key[c]: scale sum of dS_ij query_i over the pairs of c
        rel_value[c]: sum of p_ij grad_out_i over the pairs of c

    The gradients of key and value are those of ordinary attention. All are computed in the same
    parts as the forward, with the log-sum-exp of the whole.

    Parameters
    ----------
    grad_out : array_like, (..., heads, Lq, d_v)
        Gradient with respect to out, of query's dtype.
    query, key, value, rel_key, rel_value : array_like
        As in the forward call.
    out, lse : array_like
        Results of `shaw_attention_forward`.
    grad_lse : array_like, (..., heads, Lq), optional
        Gradient with respect to lse, of its dtype; None means zero.
    needs : sequence of {"query", "key", "value", "rel_key", "rel_value", "attn_mask", "sinks"}
        The gradients to compute; None means the first four, and rel_value if it is given.
    **options : attn_mask, is_causal, scale, enable_gqa, window, sinks, key_lengths, ...
        As in the forward call.

    Returns
    -------
    ShawGradients
        Named tuple (query, key, value, rel_key, rel_value, attn_mask, sinks), each with the shape
        and dtype of its argument, None where not in needs.

    Raises
    ------
    TypeError, ValueError
        As `shaw_attention`, and if an argument does not fit the forward call.

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
    checked = checked_options(shaw_attention_backward, options, ShawOptions.__annotations__)
    (grad_out, query, key, value, rel_key, out, lse), (rel_value, grad_lse), checked = converted(
        checked, {"rel_value": rel_value, "grad_lse": grad_lse},
        grad_out=grad_out, query=query, key=key, value=value, rel_key=rel_key, out=out, lse=lse,
    )  # fmt: skip
    problem = Problem(query, key, value, rel_key, rel_value, checked)
    operands = (problem.query, problem.key, problem.value)
    inner = [name for name in needs if not name.startswith("rel_")]
    upstream = checked_upstream(grad_out, operands, out, lse, grad_lse, inner, checked)
    with np.errstate(all="ignore"):
        gradients = Backward(problem, needs, unrounded(problem, upstream)).result()
    return ShawGradients(**dict.fromkeys(names) | gradients)


def _forward(
    function: Callable[..., Any],
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    rel_key: ArrayLike,
    rel_value: ArrayLike | None,
    options: Mapping[str, Any],
) -> _core.AttentionForward:
    checked = checked_options(function, options, ShawOptions.__annotations__)
    (query, key, value, rel_key), (rel_value,), checked = converted(
        checked, {"rel_value": rel_value}, query=query, key=key, value=value, rel_key=rel_key
    )
    problem = Problem(query, key, value, rel_key, rel_value, checked)
    with np.errstate(all="ignore"):
        return forward(problem)


publish("sdpa", globals())
