"""The softmax family as primitives of autograd."""

from __future__ import annotations

from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.extend import defjvp, defjvp_argnums, defvjp, defvjp_argnums, primitive

import sdpa
from sdpa import _weighted
from sdpa.interop.autograd._modes import Function, jvp_of, plain, vjp_of

__all__ = ["log_softmax", "logsumexp", "softmax"]


def softmax(x: Any, axis: Any = -1, *, temperature: float = 1.0, where: Any = None) -> Any:
    """`sdpa.softmax`, differentiable in x; the other arguments are constants.

    Examples
    --------
    >>> import numpy as np
    >>> from autograd import grad
    >>> from sdpa.interop.autograd import softmax
    >>> grad(lambda x: softmax(x)[0])(np.zeros(2))
    array([ 0.25, -0.25])
    """
    return _softmax(x, axis, temperature=temperature, where=where)


def log_softmax(x: Any, axis: Any = -1, *, temperature: float = 1.0, where: Any = None) -> Any:
    """`sdpa.log_softmax`, differentiable in x; the other arguments are constants.

    Examples
    --------
    >>> import numpy as np
    >>> from autograd import grad
    >>> from sdpa.interop.autograd import log_softmax
    >>> grad(lambda x: log_softmax(x)[0])(np.zeros(2))
    array([ 0.5, -0.5])
    """
    return _log_softmax(x, axis, temperature=temperature, where=where)


def logsumexp(
    x: Any, axis: Any = -1, *, b: Any = None, where: Any = None, keepdims: bool = False
) -> Any:
    """`sdpa.logsumexp`, differentiable in x and b; the other arguments are constants.

    Examples
    --------
    >>> import numpy as np
    >>> from autograd import grad
    >>> from sdpa.interop.autograd import logsumexp
    >>> grad(logsumexp)(np.zeros(2))
    array([0.5, 0.5])
    """
    if b is None:
        return _logsumexp(x, axis, where, keepdims)
    zeros = _weighted.common(*(_weighted.operand(n, plain(y)) for n, y in (("x", x), ("b", b))))
    return _weighted_logsumexp(x + zeros, b + zeros, axis, where, keepdims)


# Of a primitive's arguments autograd sees those by place as variables, and no keywords.


@primitive
def _softmax(x: Any, axis: Any, **options: Any) -> Any:
    return sdpa.softmax(x, axis, **options)


@primitive
def _log_softmax(x: Any, axis: Any, **options: Any) -> Any:
    return sdpa.log_softmax(x, axis, **options)


@primitive
def _logsumexp(x: Any, axis: Any, where: Any, keepdims: bool) -> Any:
    return sdpa.logsumexp(x, axis, where=where, keepdims=keepdims)


@primitive
def _weighted_logsumexp(x: Any, b: Any, axis: Any, where: Any, keepdims: bool) -> Any:
    """With x and b in one shape, so that broadcasting is left to autograd."""
    return sdpa.logsumexp(x, axis, b=b, where=where, keepdims=keepdims)


# The derivatives are primitives again. The Jacobian of softmax is symmetric, so one function serves
# both modes.


@primitive
def _softmax_backward(g: Any, p: Any, axis: Any, temperature: float) -> Any:
    return sdpa.softmax_backward(np.asarray(g, p.dtype), p, axis, temperature=temperature)


def _composed_softmax_backward(g: Any, p: Any, axis: Any, temperature: float) -> Any:
    return p * (g - anp.sum(g * p, axis=axis, keepdims=True)) / temperature


@primitive
def _log_softmax_backward(g: Any, log_p: Any, axis: Any, temperature: float) -> Any:
    g = np.asarray(g, log_p.dtype)
    return sdpa.log_softmax_backward(g, log_p, axis, temperature=temperature)


def _composed_log_softmax_backward(g: Any, log_p: Any, axis: Any, temperature: float) -> Any:
    g = anp.where(plain(log_p) == -np.inf, 0, g)
    return (g - anp.exp(log_p) * anp.sum(g, axis=axis, keepdims=True)) / temperature


def _log_softmax_jvp(t: Any, log_p: Any, x: Any, axis: Any, temperature: float, where: Any) -> Any:
    left_out = plain(log_p) == -np.inf
    t = anp.where(left_out, 0, t) / temperature
    return anp.where(left_out, 0, t - anp.sum(anp.exp(log_p) * t, axis=axis, keepdims=True))


@primitive
def _logsumexp_backward(g: Any, x: Any, lse: Any, axis: Any, where: Any) -> Any:
    x = x if where is None else np.where(where, x, -np.inf)
    return sdpa.logsumexp_backward(np.asarray(g, lse.dtype), x, lse, axis)


def _seen(x: Any, where: Any) -> Any:
    """Which elements are in the sum."""
    return (plain(x) > -np.inf) & (True if where is None else where)


def _composed_logsumexp_backward(g: Any, x: Any, lse: Any, axis: Any, where: Any) -> Any:
    kept = np.sum(np.zeros(anp.shape(x)), axis=axis, keepdims=True).shape
    g, lse = anp.reshape(g, kept), anp.reshape(lse, kept)
    # Without the rows of weights 0, whose terms are infinite.
    seen = _seen(x, where) & (plain(lse) > -np.inf)
    return anp.where(seen, g * anp.exp(anp.where(seen, x - lse, 0)), 0)


def _logsumexp_jvp(t: Any, lse: Any, x: Any, axis: Any, where: Any, keepdims: bool) -> Any:
    p = _logsumexp_backward(anp.ones(anp.shape(lse)), x, lse, axis, where)
    return anp.sum(anp.where(plain(p) > 0, p * t, 0), axis=axis, keepdims=keepdims)


@primitive
def _weighted_backward(of: str, g: Any, x: Any, b: Any, lse: Any, axis: Any, where: Any) -> Any:
    x = x if where is None else np.where(where, x, -np.inf)
    return getattr(sdpa.logsumexp_backward(np.asarray(g, lse.dtype), x, lse, axis, b=b), of)


def _composed_weighted_backward(
    of: str, g: Any, x: Any, b: Any, lse: Any, axis: Any, where: Any
) -> Any:
    by_b = _composed_logsumexp_backward(g, x, lse, axis, where)
    return by_b if of == "b" else b * by_b


def _weighted_derivatives(of: str) -> tuple[Function, Function]:
    """Reverse and forward mode of the weighted log-sum-exp in x or b."""

    def vjp(lse: Any, x: Any, b: Any, axis: Any, where: Any, keepdims: bool) -> Function:
        return lambda g: _weighted_backward(of, g, x, b, lse, axis, where)

    def jvp(t: Any, lse: Any, x: Any, b: Any, axis: Any, where: Any, keepdims: bool) -> Any:
        slope = _weighted_backward(of, anp.ones(anp.shape(lse)), x, b, lse, axis, where)
        return anp.sum(anp.where(_seen(x, where), slope * t, 0), axis=axis, keepdims=keepdims)

    return vjp, jvp


defvjp(
    _softmax,
    lambda p, x, axis, temperature, where: lambda g: _softmax_backward(g, p, axis, temperature),
)
defjvp(
    _softmax,
    lambda t, p, x, axis, temperature, where: _softmax_backward(t, p, axis, temperature),
)
defvjp(
    _log_softmax,
    lambda log_p, x, axis, temperature, where: (
        lambda g: _log_softmax_backward(g, log_p, axis, temperature)
    ),
)
defjvp(_log_softmax, _log_softmax_jvp)
defvjp(
    _logsumexp,
    lambda lse, x, axis, where, keepdims: lambda g: _logsumexp_backward(g, x, lse, axis, where),
)
defjvp(_logsumexp, _logsumexp_jvp)
_IN_X, _IN_B = _weighted_derivatives("x"), _weighted_derivatives("b")
defvjp(_weighted_logsumexp, _IN_X[0], _IN_B[0])
defjvp(_weighted_logsumexp, _IN_X[1], _IN_B[1])

for _routine, _formula in (
    (_softmax_backward, _composed_softmax_backward),
    (_log_softmax_backward, _composed_log_softmax_backward),
    (_logsumexp_backward, _composed_logsumexp_backward),
    (_weighted_backward, _composed_weighted_backward),
):
    defvjp_argnums(_routine, vjp_of(_formula))
    defjvp_argnums(_routine, jvp_of(_formula))
