"""Attention whose scores are cosines of the angles between queries and keys.

Query and key are normalised, in memory that grows with L d; the kernel of `sdpa.attention` does the
rest. No Lq x Lk matrix is held.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Unpack, cast

import numpy as np
from numpy.typing import ArrayLike

from sdpa import _core
from sdpa._arguments import (
    checked_needs,
    checked_options,
    converted,
    positive,
)
from sdpa._arrays import (
    Array,
    compute_type,
    distinct,
    rounded,
    rows_in_use,
    widen,
)
from sdpa._compose import (
    checked_upstream,
    composed_backward,
    forward,
    seeded,
)
from sdpa._options import CosineOptions
from sdpa._public import publish
from sdpa._repr import shown

__all__ = [
    "CosineGradients",
    "cosine_attention",
    "cosine_attention_backward",
    "cosine_attention_forward",
]


@shown
class CosineGradients(NamedTuple):
    """Gradients of cosine attention, each with its argument's shape; None if not asked for."""

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
    **options: Unpack[CosineOptions],
) -> Array:
    """Attention whose scores are cosines of the angles between queries and keys.

    out = softmax(C / temperature + attn_mask) value with
    C_ij = q_i . k_j / (max(norm q_i, eps) max(norm k_j, eps)), Euclidean norms over the last axis:
    Luo et al., "Cosine normalization" (2018), section 2; in attention Henry et al., "Query-key
    normalization for transformers" (2020), section 3, where 1 / temperature is learned. Scores lie
    in [-1, 1] / temperature for every width d_k, so no 1 / sqrt(d_k) is needed; but with
    temperature 1 no weight is more than e^2 times another.

    Norms neither overflow nor underflow, because rows are scaled by powers of two first.

    Parameters
    ----------
    query : array_like, (..., heads, Lq, d_k)
        float16, bfloat16, float32 or float64.
    key : array_like, (..., heads, Lk, d_k)
        Of query's dtype or, beside a float32 query, float16 or bfloat16.
    value : array_like, (..., heads, Lk, d_v)
        Of key's dtype.
    temperature : float, default 1.0
        Divides the cosines; above 0.
    eps : float, default 1e-12
        Smallest length to divide by, above 0, so that a row of zeros has cosine 0 with every other.
        If it is below the smallest normal number of the arithmetic, that number is used.
    **options : attn_mask, dropout_p, is_causal, enable_gqa, window, sinks, ...
        As in `attention_forward`, but without scale, out, lse_dtype, invariant, cu_seqlens_q,
        cu_seqlens_k, score_mod and mask_mod. rng=None draws a seed.

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
    cosine_attention_forward : out and the log-sum-exp of each row.
    cosine_attention_backward : gradients.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> query = np.array([[2.0, 0.0]])
    >>> key, value = np.array([[9.0, 0.0], [0.0, 9.0]]), np.array([[1.0], [0.0]])
    >>> sdpa.cosine_attention(query, key, value, temperature=1 / np.log(3))  # weights 3 : 1
    array([[0.75]])
    """
    return _forward(cosine_attention, query, key, value, temperature, eps, seeded(options)).out


def cosine_attention_forward(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    temperature: float = 1.0,
    eps: float = 1e-12,
    **options: Unpack[CosineOptions],
) -> _core.AttentionForward:
    """Cosine attention and the log-sum-exp of each row of scores.

    Parameters
    ----------
    query, key, value : array_like
        As in `cosine_attention`.
    temperature, eps : float
        As in `cosine_attention`.
    **options : attn_mask, dropout_p, is_causal, enable_gqa, window, sinks, ...
        As in `cosine_attention`, but dropout_p needs rng, an int, which the backward repeats.

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
    return _forward(cosine_attention_forward, query, key, value, temperature, eps, options)


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
    **options: Unpack[CosineOptions],
) -> CosineGradients:
    """Gradients of <grad_out, out> + <grad_lse, lse> of cosine attention.

    With u = x / norm x for x a query or a key and g the gradient of attention to u,

        dx = (g - u <u, g>) / norm x    (g / eps where norm x < eps),

    and temperature receives -sum_i <u_i, g_i> / temperature over the queries. dx is
    orthogonal to x: the length of a query or key has no effect.

    Parameters
    ----------
    grad_out : array_like, (..., heads, Lq, d_v)
        Gradient with respect to out, of query's dtype.
    query, key, value : array_like
        As in the forward call.
    out, lse : array_like
        Results of `cosine_attention_forward`.
    temperature, eps : float
        As in the forward call.
    grad_lse : array_like, (..., heads, Lq), optional
        Gradient with respect to lse, of its dtype; None means zero.
    needs : sequence of {"query", "key", "value", "temperature", "attn_mask", "sinks"}
        The gradients to compute.
    **options : attn_mask, dropout_p, is_causal, enable_gqa, window, sinks, ...
        As in the forward call.

    Returns
    -------
    CosineGradients
        Named tuple (query, key, value, temperature, attn_mask, sinks), each with the shape and
        dtype of its argument (temperature a float), None where not in needs.

    Raises
    ------
    TypeError, ValueError
        As `cosine_attention`, and if an argument does not fit the forward call.

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
    checked = checked_options(cosine_attention_backward, options, CosineOptions.__annotations__)
    needs = checked_needs(needs, CosineGradients._fields)
    (grad_out, query, key, value, out, lse), (grad_lse,), checked = converted(
        checked, {"grad_lse": grad_lse},
        grad_out=grad_out, query=query, key=key, value=value, out=out, lse=lse,
    )  # fmt: skip
    temperature, eps = positive("temperature", temperature), positive("eps", eps)
    checked["scale"] = _scale(temperature, query)
    inner = {"query" if name == "temperature" else name for name in needs}
    upstream = checked_upstream(grad_out, (query, key, value), out, lse, grad_lse, inner, checked)

    q, k = _Unit(query, eps), _Unit(key, eps)
    g = composed_backward(upstream, (q.vector, k.vector, widen(value)), inner, checked)
    return CosineGradients(
        rounded(q.backward(g.query), query) if "query" in needs else None,
        rounded(k.backward(g.key), key) if "key" in needs else None,
        rounded(g.value, value),
        -q.inner(g.query) / temperature if "temperature" in needs else None,
        rounded(g.attn_mask, checked.get("attn_mask")),
        g.sinks,
    )


def _scale(temperature: float, query: Array) -> float:
    """1 / temperature, in the range of the arithmetic."""
    scale = 1 / temperature
    kind = compute_type(query.dtype)
    most = float(np.finfo(kind).max) / math.log2(math.e)  # as attention's scale
    if scale > most:
        raise ValueError(
            f"temperature: expected at least {1 / most}, the range of {kind} arithmetic, "
            f"got {temperature!r}"
        )
    return scale


def _forward(
    function: Callable[..., Any],
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    temperature: float,
    eps: float,
    options: Mapping[str, Any],
) -> _core.AttentionForward:
    checked = checked_options(function, options, CosineOptions.__annotations__)
    (query, key, value), _, checked = converted(checked, {}, query=query, key=key, value=value)
    temperature, eps = positive("temperature", temperature), positive("eps", eps)
    checked["scale"] = _scale(temperature, query)
    _core._check_attention(query, key, value, **checked)
    q, k = _Unit(query, eps).vector, _Unit(key, eps).vector
    return forward(q, k, widen(value), checked, query)


@np.errstate(all="ignore")
def row_scales(x: Array, eps: float) -> tuple[Array, Array]:
    """Powers of two (..., 1) that make the squares of rows safe, and the eps of the scaled rows.

    x = 2^e y with the largest |y| of a row near 1, so that no square overflows or underflows. e is
    limited to the range where both 2^e and 2^-e are normal numbers, which leaves the largest |y|
    between 2^-52 and 4. The results are 2^-e and 2^-e eps.
    """
    limits = np.finfo(x.dtype)
    eps = max(eps, float(limits.tiny))
    largest = np.abs(x).max(axis=-1, keepdims=True, initial=0).astype(np.float64)
    exponent = np.frexp(np.maximum(largest, eps))[1]
    exponent = np.clip(exponent, limits.minexp, -limits.minexp)
    return np.ldexp(x.dtype.type(1), -exponent), np.ldexp(eps, -exponent)


class _Unit:
    """Rows divided by max(their norm, eps), and the derivative of that.

    vector = y / max(norm y, 2^-e eps), with the scaled rows y of `row_scales`.
    """

    @np.errstate(all="ignore")
    def __init__(self, x: Array, eps: float) -> None:
        shape, x = x.shape, widen(distinct(x, -1))
        self._power, least = row_scales(x, eps)
        # Use one layout for every layout of x, because the order of einsum's sums depends on it.
        y = np.multiply(x, self._power, order="C")
        norm = np.sqrt(np.einsum("...i,...i->...", y, y))[..., None]
        self._long = norm >= least
        self._inverse = (1 / np.maximum(norm, least)).astype(x.dtype)
        y *= self._inverse
        self.vector = np.broadcast_to(y, shape)

    @np.errstate(all="ignore")
    def backward(self, grad: Array | None) -> Array:
        """The gradient with respect to x from the gradient with respect to vector."""
        g = cast(Array, grad)
        along = np.einsum("...i,...i->...", self.vector, g)[..., None]
        result = self.vector * np.where(self._long, -along, 0)
        result += g
        result *= self._inverse
        result *= self._power
        # Rows without influence on the result may hold NaN.
        np.copyto(result, 0, where=~rows_in_use(g))
        return result

    @np.errstate(all="ignore")
    def inner(self, grad: Array | None) -> float:
        """sum <vector, grad> over the rows that have influence on the result."""
        g = cast(Array, grad)
        along = np.einsum("...i,...i->...", self.vector, g)
        return float(along.sum(where=rows_in_use(g)[..., 0], dtype=np.float64))


publish("sdpa", globals())
