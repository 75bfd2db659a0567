"""Attention with other scores than the dot product: cosine and bilinear.

Both prepare query and key, in memory that grows with L d, and leave the rest to the kernel of
`sdpa.attention`: no Lq x Lk matrix is held. Relative positions are in `sdpa.relative`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Unpack, cast

import numpy as np
from numpy.typing import ArrayLike

from sdpa import _core
from sdpa._compose import (
    Array,
    AttentionOptions,
    ScaledOptions,
    arrays,
    checked_needs,
    checked_options,
    distinct,
    felt_rows,
    forward,
    native,
    positive,
    rounded,
    sum_to,
    weight_gradient,
    widen,
    widened_options,
)

__all__ = [
    "BilinearGradients",
    "CosineGradients",
    "bilinear_attention",
    "bilinear_attention_backward",
    "bilinear_attention_forward",
    "cosine_attention",
    "cosine_attention_backward",
    "cosine_attention_forward",
]

# ------------------------------------------------------------------------------- cosine


class CosineGradients(NamedTuple):
    """Gradients of cosine attention, each of its argument's shape; None where not asked for."""

    query: Array | None
    key: Array | None
    value: Array | None
    temperature: float | None
    attn_mask: Array | None
    sinks: Array | None


def cosine_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    temperature: float = 1.0,
    eps: float = 1e-12,
    **options: Unpack[AttentionOptions],
) -> Array:
    """Attention whose scores are cosines of the angles between queries and keys.

    out = softmax(C / temperature + attn_mask) value with
    C_ij = q_i . k_j / (max(norm q_i, eps) max(norm k_j, eps)), Euclidean norms over the last axis:
    Luo et al., "Cosine normalization" (2018), section 2; in attention Henry et al., "Query-key
    normalization for transformers" (2020), section 3, where 1 / temperature is learned. Scores lie
    in [-1, 1] / temperature whatever the width d_k, so that no 1 / sqrt(d_k) is needed; but with
    temperature 1 no weight is more than e^2 times another.

    Norms neither overflow nor underflow: rows are scaled by powers of two first.

    Parameters
    ----------
    query : array_like, (..., heads, Lq, d_k)
        float16, bfloat16, float32 or float64.
    key : array_like, (..., heads, Lk, d_k)
        Of query's dtype.
    value : array_like, (..., heads, Lk, d_v)
        Of query's dtype.
    temperature : float, default 1.0
        Divides the cosines; above 0.
    eps : float, default 1e-12
        Least length that is divided by, so that a row of zeros has cosine 0 with every other; above
        0. Below the smallest normal number of the arithmetic it counts as that.
    **options : attn_mask, dropout_p, is_causal, enable_gqa, softcap, window, sinks, ...
        Those of `attention_forward`, with the same meaning, but scale and out.

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
    cosine_attention_forward : the same and the log-sum-exp of each row.
    cosine_attention_backward : gradients.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> query = np.array([[2.0, 0.0]])
    >>> key, value = np.array([[9.0, 0.0], [0.0, 9.0]]), np.array([[1.0], [0.0]])
    >>> sdpa.cosine_attention(query, key, value, temperature=1 / np.log(3))  # weights 3 : 1
    array([[0.75]])
    """
    name = "cosine_attention"
    return _cosine_forward(name, query, key, value, temperature, eps, dict(options)).out


def cosine_attention_forward(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    temperature: float = 1.0,
    eps: float = 1e-12,
    **options: Unpack[AttentionOptions],
) -> _core.AttentionForward:
    """Cosine attention and the log-sum-exp of each row of scores.

    Parameters
    ----------
    query, key, value : array_like
        As of `cosine_attention`.
    temperature, eps : float
        As of `cosine_attention`.
    **options : attn_mask, dropout_p, is_causal, enable_gqa, softcap, window, sinks, ...
        As of `cosine_attention`.

    Returns
    -------
    AttentionForward
        Named tuple: out (..., heads, Lq, d_v), and lse (..., heads, Lq) in float32 (float64 for
        float64), the log of the sum of the exponentials of cosines / temperature.

    Raises
    ------
    TypeError, ValueError
        As `cosine_attention`.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> key = np.array([[9.0, 0.0], [-4.0, 0.0]])
    >>> sdpa.cosine_attention_forward(np.array([[0.0, 1.0]]), key, key).lse  # cosines 0: log 2
    array([0.69314718])
    """
    name = "cosine_attention_forward"
    return _cosine_forward(name, query, key, value, temperature, eps, dict(options))


def cosine_attention_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    temperature: float = 1.0,
    eps: float = 1e-12,
    grad_lse: ArrayLike | None = None,
    needs: Iterable[str] = ("query", "key", "value"),
    **options: Unpack[AttentionOptions],
) -> CosineGradients:
    """Gradients of <grad_out, out> + <grad_lse, lse> of cosine attention.

    With u = x / norm x for x a query or a key and g the gradient of attention to u,

        dx = (g - u <u, g>) / norm x    (g / eps where norm x < eps),

    and temperature receives -sum_i <u_i, g_i> / temperature over the queries. dx is
    orthogonal to x: the length of a query or key cannot be felt.

    Parameters
    ----------
    grad_out : array_like, (..., heads, Lq, d_v)
        Gradient with respect to out, of query's dtype.
    query, key, value : array_like
        As of the forward call.
    out, lse : array_like
        Results of `cosine_attention_forward`.
    temperature, eps : float
        As of the forward call.
    grad_lse : array_like, (..., heads, Lq), optional
        Gradient with respect to lse, of its dtype; None is zero.
    needs : sequence of {"query", "key", "value", "temperature", "attn_mask", "sinks"}
        The gradients to compute.
    **options : attn_mask, dropout_p, is_causal, enable_gqa, softcap, window, sinks, ...
        Those of the forward call.

    Returns
    -------
    CosineGradients
        Named tuple (query, key, value, temperature, attn_mask, sinks), each with the shape and
        dtype of its argument (temperature a float), None where not in needs.

    Raises
    ------
    TypeError, ValueError
        As `cosine_attention`, and for what does not fit the forward call.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> query, key = np.array([[3.0, 4.0]]), np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> value, grad_out = np.array([[1.0], [2.0]]), np.ones((1, 1))
    >>> out, lse = sdpa.cosine_attention_forward(query, key, value)
    >>> g = sdpa.cosine_attention_backward(grad_out, query, key, value, out, lse)
    >>> bool(abs((g.query * query).sum()) < 1e-12)
    True
    """
    known = ("query", "key", "value", "temperature", "attn_mask", "sinks")
    checked = _cosine_options("cosine_attention_backward", temperature, eps, dict(options))
    needs = checked_needs(needs, known)
    query, key, value = arrays(query=query, key=key, value=value)
    grad_out, out, lse = arrays(grad_out=grad_out, out=out, lse=lse)
    inner = {"query" if n == "temperature" else n for n in needs}
    saved: dict[str, Any] = {"grad_lse": grad_lse, "needs": tuple(inner)}
    _core._check_attention_backward(grad_out, query, key, value, out, lse, **checked, **saved)

    q, k = _Unit(query, eps), _Unit(key, eps)
    g = _core.attention_backward(
        widen(grad_out), q.vector, k.vector, widen(value), widen(out), lse,
        **widened_options(checked), **saved,
    )  # fmt: skip
    mask = checked.get("attn_mask")
    return CosineGradients(
        rounded(q.backward(g.query), query) if "query" in needs else None,
        rounded(k.backward(g.key), key) if "key" in needs else None,
        rounded(g.value, value) if "value" in needs else None,
        -q.inner(g.query) / float(temperature) if "temperature" in needs else None,
        rounded(g.attn_mask, mask) if mask is not None else None,
        g.sinks,
    )


def _cosine_options(
    function: str, temperature: float, eps: float, options: dict[str, Any]
) -> dict[str, Any]:
    checked = checked_options(function, options, AttentionOptions.__annotations__)
    checked["scale"] = 1 / positive("temperature", temperature)
    positive("eps", eps)
    return checked


def _cosine_forward(
    function: str,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    temperature: float,
    eps: float,
    options: dict[str, Any],
) -> _core.AttentionForward:
    checked = _cosine_options(function, temperature, eps, options)
    query, key, value = arrays(query=query, key=key, value=value)
    _core._check_attention(query, key, value, **checked)
    q, k = _Unit(query, eps).vector, _Unit(key, eps).vector
    return forward(q, k, widen(value), checked, query)


class _Unit:
    """Rows divided by max(their norm, eps), and the derivative of that.

    x = 2^e y with the largest |y| of a row near 1, so that no square overflows or underflows;
    vector = y / max(norm y, 2^-e eps). e is kept where both 2^e and 2^-e are normal numbers, which
    leaves |y| between 2^-52 and 4.
    """

    @np.errstate(all="ignore")
    def __init__(self, x: Array, eps: float) -> None:
        shape, x = x.shape, widen(distinct(x, -1))
        limits = np.finfo(x.dtype)
        eps = max(eps, float(limits.tiny))
        largest = np.abs(x).max(axis=-1, keepdims=True, initial=0).astype(np.float64)
        exponent = np.frexp(np.maximum(largest, eps))[1]
        exponent = np.clip(exponent, limits.minexp, -limits.minexp)
        self._power = np.ldexp(x.dtype.type(1), -exponent)
        # In one layout whatever that of x: einsum sums in an order that depends on it.
        y = np.multiply(x, self._power, order="C")
        norm = np.sqrt(np.einsum("...i,...i->...", y, y))[..., None]
        least = np.ldexp(eps, -exponent)
        self._long = norm >= least
        self._inverse = (1 / np.maximum(norm, least)).astype(x.dtype)
        y *= self._inverse
        self.vector = np.broadcast_to(y, shape)

    @np.errstate(all="ignore")
    def backward(self, grad: Array | None) -> Array:
        """The gradient with respect to x, from that with respect to vector."""
        g = cast(Array, grad)
        along = np.einsum("...i,...i->...", self.vector, g)[..., None]
        result = self.vector * np.where(self._long, -along, 0)
        result += g
        result *= self._inverse
        result *= self._power
        # A row that was not felt may hold NaN.
        np.copyto(result, 0, where=~felt_rows(g))
        return result

    @np.errstate(all="ignore")
    def inner(self, grad: Array | None) -> float:
        """sum <vector, grad> over the rows that were felt."""
        g = cast(Array, grad)
        along = np.einsum("...i,...i->...", self.vector, g)
        return float(along.sum(where=felt_rows(g)[..., 0], dtype=np.float64))


# ------------------------------------------------------------------------------- bilinear


class BilinearGradients(NamedTuple):
    """Gradients of bilinear attention, each of its argument's shape; None where not asked for."""

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
    **options: Unpack[ScaledOptions],
) -> Array:
    """Attention whose scores are bilinear forms of query and key.

    out = softmax(scale query weight key^T + attn_mask) value: the score "general" of Luong et al.,
    "Effective approaches to attention-based neural machine translation" (2015), section 3.1.
    Computed as attention of query weight, once per query, so that widths d_q of queries and d_k of
    keys may differ.

    Parameters
    ----------
    query : array_like, (..., heads, Lq, d_q)
        float16, bfloat16, float32 or float64.
    key : array_like, (..., heads, Lk, d_k)
        Of query's dtype.
    value : array_like, (..., heads, Lk, d_v)
        Of query's dtype.
    weight : array_like, (d_q, d_k) or (heads, d_q, d_k)
        Of query's dtype; leading axes broadcast with those of query (with enable_gqa, heads are
        query's).
    **options : attn_mask, dropout_p, is_causal, scale, enable_gqa, softcap, window, sinks, ...
        Those of `attention_forward`, with the same meaning, but out. scale None is 1 / sqrt(d_k),
        which gives scores of variance 1 where query weight and key have independent components of
        mean 0 and variance 1.

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
    bilinear_attention_forward : the same and the log-sum-exp of each row.
    bilinear_attention_backward : gradients.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> query, key = np.array([[1.0, 0.0, 0.0]]), np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> weight = np.log(3) * np.array([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    >>> sdpa.bilinear_attention(query, key, np.array([[1.0], [0.0]]), weight, scale=1.0)
    array([[0.75]])
    """
    return _bilinear_forward("bilinear_attention", query, key, value, weight, dict(options)).out


def bilinear_attention_forward(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    weight: ArrayLike,
    **options: Unpack[ScaledOptions],
) -> _core.AttentionForward:
    """Bilinear attention and the log-sum-exp of each row of scores.

    Parameters
    ----------
    query, key, value, weight : array_like
        As of `bilinear_attention`.
    **options : attn_mask, dropout_p, is_causal, scale, enable_gqa, softcap, window, sinks, ...
        As of `bilinear_attention`.

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
    name = "bilinear_attention_forward"
    return _bilinear_forward(name, query, key, value, weight, dict(options))


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
    **options: Unpack[ScaledOptions],
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
        As of the forward call.
    out, lse : array_like
        Results of `bilinear_attention_forward`.
    grad_lse : array_like, (..., heads, Lq), optional
        Gradient with respect to lse, of its dtype; None is zero.
    needs : sequence of {"query", "key", "value", "weight", "attn_mask", "sinks"}
        The gradients to compute.
    **options : attn_mask, dropout_p, is_causal, scale, enable_gqa, softcap, window, sinks, ...
        Those of the forward call.

    Returns
    -------
    BilinearGradients
        Named tuple (query, key, value, weight, attn_mask, sinks), each with the shape and dtype of
        its argument, None where not in needs.

    Raises
    ------
    TypeError, ValueError
        As `bilinear_attention`, and for what does not fit the forward call.

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
    known = ("query", "key", "value", "weight", "attn_mask", "sinks")
    name = "bilinear_attention_backward"
    checked = checked_options(name, dict(options), ScaledOptions.__annotations__)
    needs = checked_needs(needs, known)
    query, key, value, weight = arrays(query=query, key=key, value=value, weight=weight)
    grad_out, out, lse = arrays(grad_out=grad_out, out=out, lse=lse)
    inner = {"query" if n == "weight" else n for n in needs}
    saved: dict[str, Any] = {"grad_lse": grad_lse, "needs": tuple(inner)}
    like_projected = _check_weight(query, key, weight)
    _core._check_attention_backward(
        grad_out, like_projected, key, value, out, lse, **checked, **saved
    )

    with np.errstate(all="ignore"):
        x, w = widen(query), widen(weight)
        g = _core.attention_backward(
            widen(grad_out), x @ w, widen(key), widen(value), widen(out), lse,
            **widened_options(checked), **saved,
        )  # fmt: skip
        grad_query = grad_weight = None
        projected = cast(Array, g.query)
        if "query" in needs:
            grad_query = rounded(sum_to(projected @ np.swapaxes(w, -1, -2), query.shape), query)
        if "weight" in needs:
            grad_weight = rounded(weight_gradient(x, projected, weight.shape), weight)
    mask = checked.get("attn_mask")
    return BilinearGradients(
        grad_query,
        rounded(g.key, key),
        rounded(g.value, value),
        grad_weight,
        rounded(g.attn_mask, mask) if mask is not None else None,
        g.sinks,
    )


def _bilinear_forward(
    function: str,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    weight: ArrayLike,
    options: dict[str, Any],
) -> _core.AttentionForward:
    checked = checked_options(function, options, ScaledOptions.__annotations__)
    query, key, value, weight = arrays(query=query, key=key, value=value, weight=weight)
    _core._check_attention(_check_weight(query, key, weight), key, value, **checked)
    with np.errstate(all="ignore"):
        projected = widen(query) @ widen(weight)
    return forward(projected, widen(key), widen(value), checked, query)


def _check_weight(query: Array, key: Array, weight: Array) -> Array:
    """Check what attention does not; an array without memory of the shape of query weight."""
    for name, x, text in (
        ("query", query, "Lq, d_q"),
        ("key", key, "Lk, d_k"),
        ("weight", weight, "d_q, d_k"),
    ):
        if x.ndim < 2:
            raise ValueError(f"{name}: expected at least two axes, (..., {text}), got {x.shape}")
    if native(weight.dtype) != native(query.dtype):
        raise TypeError(f"weight: expected query's dtype {query.dtype}, got {weight.dtype}")
    d_q, d_k = query.shape[-1], key.shape[-1]
    if weight.shape[-2:] != (d_q, d_k):
        raise ValueError(
            f"weight: expected (..., {d_q}, {d_k}) to match query's last axis {d_q} and key's "
            f"last axis {d_k}, got (..., {weight.shape[-2]}, {weight.shape[-1]})"
        )
    try:
        lead = np.broadcast_shapes(query.shape[:-2], weight.shape[:-2])
    except ValueError:
        raise ValueError(
            f"weight: expected leading axes that broadcast with {query.shape[:-2]}, "
            f"got {weight.shape[:-2]}"
        ) from None
    return np.broadcast_to(np.zeros((), query.dtype), (*lead, query.shape[-2], d_k))
