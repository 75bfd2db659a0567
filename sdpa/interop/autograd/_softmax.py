"""The softmax family as primitives of autograd."""

from __future__ import annotations

from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.extend import defjvp, defjvp_argnums, defvjp, defvjp_argnums, primitive

import sdpa
from sdpa.interop.autograd._modes import jvp_of, plain, vjp_of

__all__ = ["log_softmax", "logsumexp", "softmax"]


@primitive
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
    return sdpa.softmax(x, axis, temperature=temperature, where=where)


@primitive
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
    return sdpa.log_softmax(x, axis, temperature=temperature, where=where)


@primitive
def logsumexp(x: Any, axis: Any = -1, *, where: Any = None, keepdims: bool = False) -> Any:
    """`sdpa.logsumexp`, differentiable in x; the other arguments are constants.

    Examples
    --------
    >>> import numpy as np
    >>> from autograd import grad
    >>> from sdpa.interop.autograd import logsumexp
    >>> grad(logsumexp)(np.zeros(2))
    array([0.5, 0.5])
    """
    return sdpa.logsumexp(x, axis, where=where, keepdims=keepdims)


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


def _log_softmax_jvp(t: Any, log_p: Any, x: Any, axis: Any = -1, **options: Any) -> Any:
    left_out = plain(log_p) == -np.inf
    t = anp.where(left_out, 0, t) / options.get("temperature", 1.0)
    return anp.where(left_out, 0, t - anp.sum(anp.exp(log_p) * t, axis=axis, keepdims=True))


@primitive
def _logsumexp_backward(g: Any, x: Any, lse: Any, axis: Any, where: Any) -> Any:
    x = x if where is None else np.where(where, x, -np.inf)
    return sdpa.logsumexp_backward(np.asarray(g, lse.dtype), x, lse, axis)


def _composed_logsumexp_backward(g: Any, x: Any, lse: Any, axis: Any, where: Any) -> Any:
    kept = np.sum(np.zeros(anp.shape(x)), axis=axis, keepdims=True).shape
    g, lse = anp.reshape(g, kept), anp.reshape(lse, kept)
    seen = (plain(x) > -np.inf) & (True if where is None else where)
    return anp.where(seen, g * anp.exp(anp.where(seen, x - lse, 0)), 0)


def _logsumexp_jvp(
    t: Any, lse: Any, x: Any, axis: Any = -1, *, where: Any = None, keepdims: bool = False
) -> Any:
    p = _logsumexp_backward(anp.ones(anp.shape(lse)), x, lse, axis, where)
    return anp.sum(anp.where(plain(p) > 0, p * t, 0), axis=axis, keepdims=keepdims)


defvjp(
    softmax,
    lambda p, x, axis=-1, *, temperature=1.0, where=None: (
        lambda g: _softmax_backward(g, p, axis, temperature)
    ),
)
defjvp(
    softmax,
    lambda t, p, x, axis=-1, *, temperature=1.0, where=None: _softmax_backward(
        t, p, axis, temperature
    ),
)
defvjp(
    log_softmax,
    lambda log_p, x, axis=-1, *, temperature=1.0, where=None: (
        lambda g: _log_softmax_backward(g, log_p, axis, temperature)
    ),
)
defjvp(log_softmax, _log_softmax_jvp)
defvjp(
    logsumexp,
    lambda lse, x, axis=-1, *, where=None, keepdims=False: (
        lambda g: _logsumexp_backward(g, x, lse, axis, where)
    ),
)
defjvp(logsumexp, _logsumexp_jvp)

for _routine, _formula in (
    (_softmax_backward, _composed_softmax_backward),
    (_log_softmax_backward, _composed_log_softmax_backward),
    (_logsumexp_backward, _composed_logsumexp_backward),
):
    defvjp_argnums(_routine, vjp_of(_formula))
    defjvp_argnums(_routine, jvp_of(_formula))
