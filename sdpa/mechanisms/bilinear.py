"""Attention whose scores are bilinear forms of query and key.

The query is projected once, in memory that grows with L d; the kernel of `sdpa.attention` does the
rest. No Lq x Lk matrix is held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Unpack, cast

import numpy as np
from numpy.typing import ArrayLike

from sdpa import _core
from sdpa._arguments import (
    checked_float,
    checked_like_query,
    checked_needs,
    checked_options,
    checked_rows,
    converted,
)
from sdpa._arrays import (
    Array,
    broadcast_shapes,
    rounded,
    sum_to,
    weight_gradient,
    widen,
)
from sdpa._compose import (
    checked_upstream,
    composed_backward,
    forward,
    seeded,
)
from sdpa._options import BilinearOptions
from sdpa._public import publish
from sdpa._repr import shown

__all__ = [
    "BilinearGradients",
    "bilinear_attention",
    "bilinear_attention_backward",
    "bilinear_attention_forward",
]


@shown
class BilinearGradients(NamedTuple):
    """Gradients of bilinear attention, each with its argument's shape; None if not asked for."""

    query: Array | None
    key: Array | None
    value: Array | None
    weight: Array | None
    attn_mask: Array | None
    sinks: Array | None


def bilinear_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    weight: ArrayLike,
    **options: Unpack[BilinearOptions],
) -> Array:
    """Attention whose scores are bilinear forms of query and key.

    out = softmax(scale query weight key^T + attn_mask) value: the score "general" of Luong et al.,
    "Effective approaches to attention-based neural machine translation" (2015), section 3.1.
    Each query is multiplied by weight once; attention of the products follows. The widths d_q of
    queries and d_k of keys may differ.

    Parameters
    ----------
    query : array_like, (..., heads, Lq, d_q)
        float16, bfloat16, float32 or float64.
    key : array_like, (..., heads, Lk, d_k)
        Of query's dtype or, beside a float32 query, float16 or bfloat16.
    value : array_like, (..., heads, Lk, d_v)
        Of key's dtype.
    weight : array_like, (d_q, d_k) or (heads, d_q, d_k)
        Of query's dtype. Its leading axes broadcast with query's; with enable_gqa its heads are
        query's as well.
    **options : attn_mask, dropout_p, is_causal, enable_gqa, window, sinks, ...
        As in `attention_forward`, but without out, lse_dtype, invariant, cu_seqlens_q,
        cu_seqlens_k, score_mod and mask_mod. scale None is 1 / sqrt(d_k), which gives scores of
        variance 1 if query weight and key have independent components of mean 0 and variance 1.
        rng=None draws a seed.

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
    bilinear_attention_forward : out and the log-sum-exp of each row.
    bilinear_attention_backward : gradients.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> query, key = np.array([[1.0, 0.0, 0.0]]), np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> weight = np.log(3) * np.array([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    >>> sdpa.bilinear_attention(query, key, np.array([[1.0], [0.0]]), weight, scale=1.0)
    array([[0.75]])
    """
    return _forward(bilinear_attention, query, key, value, weight, seeded(options)).out


def bilinear_attention_forward(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    weight: ArrayLike,
    **options: Unpack[BilinearOptions],
) -> _core.AttentionForward:
    """Bilinear attention and the log-sum-exp of each row of scores.

    Parameters
    ----------
    query, key, value, weight : array_like
        As in `bilinear_attention`.
    **options : attn_mask, dropout_p, is_causal, enable_gqa, window, sinks, ...
        As in `bilinear_attention`, but dropout_p needs rng, an int, which the backward repeats.

    Returns
    -------
    AttentionForward
        Named tuple: out (..., heads, Lq, d_v), and lse (..., heads, Lq) in float32 (float64 for
        float64).

    Raises
    ------
    TypeError, ValueError
        As `bilinear_attention`.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> x, weight = np.ones((2, 3)), np.zeros((3, 3))
    >>> sdpa.bilinear_attention_forward(x, x, x, weight).lse  # scores 0: log 2
    array([0.69314718, 0.69314718])
    """
    return _forward(bilinear_attention_forward, query, key, value, weight, options)


def bilinear_attention_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    weight: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    grad_lse: ArrayLike | None = None,
    needs: Iterable[str] = ("query", "key", "value", "weight"),
    **options: Unpack[BilinearOptions],
) -> BilinearGradients:
    """Gradients of <grad_out, out> + <grad_lse, lse> of bilinear attention.

    With g the gradient of attention to its query p = query weight:

        query: g weight^T    weight: query^T g    key: scale dS^T p    value: P^T grad_out

    each summed over the axes along which its argument was broadcast.

    Parameters
    ----------
    grad_out : array_like, (..., heads, Lq, d_v)
        Gradient with respect to out, of query's dtype.
    query, key, value, weight : array_like
        As in the forward call.
    out, lse : array_like
        Results of `bilinear_attention_forward`.
    grad_lse : array_like, (..., heads, Lq), optional
        Gradient with respect to lse, of its dtype; None means zero.
    needs : sequence of {"query", "key", "value", "weight", "attn_mask", "sinks"}
        The gradients to compute.
    **options : attn_mask, dropout_p, is_causal, enable_gqa, window, sinks, ...
        As in the forward call.

    Returns
    -------
    BilinearGradients
        Named tuple (query, key, value, weight, attn_mask, sinks), each with the shape and dtype of
        its argument, None where not in needs.

    Raises
    ------
    TypeError, ValueError
        As `bilinear_attention`, and if an argument does not fit the forward call.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> query, key, weight = np.ones((1, 2)), np.array([[1.0, 0.0], [0.0, 1.0]]), np.zeros((2, 2))
    >>> value, grad_out = np.array([[1.0], [-1.0]]), np.ones((1, 1))
    >>> out, lse = sdpa.bilinear_attention_forward(query, key, value, weight, scale=1.0)
    >>> g = sdpa.bilinear_attention_backward(
    ...     grad_out, query, key, value, weight, out, lse, scale=1.0
    ... )
    >>> g.weight
    array([[ 0.5, -0.5],
           [ 0.5, -0.5]])
    """
    checked = checked_options(bilinear_attention_backward, options, BilinearOptions.__annotations__)
    needs = checked_needs(needs, BilinearGradients._fields)
    (grad_out, query, key, value, weight, out, lse), (grad_lse,), checked = converted(
        checked, {"grad_lse": grad_lse},
        grad_out=grad_out, query=query, key=key, value=value, weight=weight, out=out, lse=lse,
    )  # fmt: skip
    inner = {"query" if name == "weight" else name for name in needs}
    operands = (_projected_shape(query, key, weight), key, value)
    upstream = checked_upstream(grad_out, operands, out, lse, grad_lse, inner, checked)

    with np.errstate(all="ignore"):
        x, w = widen(query), widen(weight)
        g = composed_backward(upstream, (x @ w, widen(key), widen(value)), inner, checked)
        grad_query = grad_weight = None
        projected = cast(Array, g.query)
        if "query" in needs:
            grad_query = rounded(sum_to(projected @ np.swapaxes(w, -1, -2), query.shape), query)
        if "weight" in needs:
            grad_weight = rounded(weight_gradient(x, projected, weight.shape), weight)
    return BilinearGradients(
        grad_query,
        rounded(g.key, key),
        rounded(g.value, value),
        grad_weight,
        rounded(g.attn_mask, checked.get("attn_mask")),
        g.sinks,
    )


def _forward(
    function: Callable[..., Any],
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    weight: ArrayLike,
    options: Mapping[str, Any],
) -> _core.AttentionForward:
    checked = checked_options(function, options, BilinearOptions.__annotations__)
    (query, key, value, weight), _, checked = converted(
        checked, {}, query=query, key=key, value=value, weight=weight
    )
    _core._check_attention(_projected_shape(query, key, weight), key, value, **checked)
    with np.errstate(all="ignore"):
        projected = widen(query) @ widen(weight)
    return forward(projected, widen(key), widen(value), checked, query)


def _projected_shape(query: Array, key: Array, weight: Array) -> Array:
    """An array of query weight's shape that takes no memory, once the product is possible.

    attention's own checks can then run before the product is computed.
    """
    checked_float("query", query)
    checked_like_query("weight", weight, query)
    for name, x, text in (
        ("query", query, "Lq, d_q"),
        ("key", key, "Lk, d_k"),
        ("weight", weight, "d_q, d_k"),
    ):
        checked_rows(name, x, text)
    d_q, d_k = query.shape[-1], key.shape[-1]
    if weight.shape[-2:] != (d_q, d_k):
        raise ValueError(
            f"weight: expected (..., {d_q}, {d_k}) to match query's last axis {d_q} and key's "
            f"last axis {d_k}, got (..., {weight.shape[-2]}, {weight.shape[-1]})"
        )
    try:
        lead = broadcast_shapes(query.shape[:-2], weight.shape[:-2])
    except ValueError:
        raise ValueError(
            f"weight: expected leading axes that broadcast with {query.shape[:-2]}, "
            f"got {weight.shape[:-2]}"
        ) from None
    return np.broadcast_to(np.zeros((), query.dtype), (*lead, query.shape[-2], d_k))


publish("sdpa", globals())
