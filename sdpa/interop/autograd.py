"""The routines as primitives of `autograd`, so that whole models train with NumPy only.

Each function computes what its namesake in `sdpa` does and can be differentiated by
`autograd.grad`, `autograd.make_jvp` and the others, as often and in any mixture of reverse and
forward mode:

>>> import autograd.numpy as np
>>> from autograd import grad
>>> from sdpa.interop.autograd import attention
>>> query, key, value = np.ones((3, 4)), np.eye(4), np.arange(8.0).reshape(4, 2)
>>> loss = lambda query: np.sum(attention(query, key, value) ** 2)
>>> grad(loss)(query).shape
(3, 4)

Arrays that are differentiated come as positional arguments or as `sinks`. Gradients have the dtype
of their argument, whatever autograd made of the upstream one.

Where a derivative comes from
-----------------------------
============================== =====================================================================
reverse                        `attention_backward`
forward                        `attention_jvp`
reverse of reverse, reverse    `attention_double_backward`: the Hessian of <g, out> is symmetric, so
of forward, forward of reverse that it serves for all three
all others                     autograd itself, through the formula composed of its own operations
============================== =====================================================================

The last line holds the (Lq, Lk) matrix: forward over forward, third derivatives, tangents of lse.
There a NaN or Inf in a masked key or value can be felt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

import sdpa

try:
    import autograd.numpy as anp
    from autograd import make_jvp, make_vjp
    from autograd.builtins import tuple as traced_tuple
    from autograd.extend import defjvp, defjvp_argnums, defvjp, defvjp_argnums, primitive
except ImportError as error:
    raise ImportError(
        "sdpa.interop.autograd needs autograd: pip install 'sdpa[autograd]'"
    ) from error

__all__ = ["attention", "attention_forward", "log_softmax", "logsumexp", "softmax"]

Function = Callable[..., Any]

_OPERANDS = ("query", "key", "value", "attn_mask", "sinks")


# ------------------------------------------------------------------------------ attention


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool | str = False,
    *,
    sinks: Any = None,
    rng: int | np.random.Generator | None = None,
    **options: Any,
) -> Any:
    """`sdpa.attention`, differentiable in query, key, value, a floating attn_mask and sinks.

    Parameters
    ----------
    query, key, value, attn_mask, dropout_p, is_causal, sinks
        As in `sdpa.attention`.
    rng : int, numpy.random.Generator or None
        Seed of dropout. From a Generator or None one seed is drawn, which all derivatives use.
    **options
        scale, enable_gqa, softcap, window, alibi_slopes, key_lengths, query_offset and workers, as
        in `sdpa.attention`. They are constants.

    Returns
    -------
    (..., heads, Lq, d_v) array
        softmax(scale query key^T + attn_mask) value: Vaswani et al., "Attention is all you need"
        (2017), equation 1.

    Raises
    ------
    TypeError, ValueError
        As `sdpa.attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from autograd import grad
    >>> from sdpa.interop.autograd import attention
    >>> value = np.array([[1.0], [3.0]])  # equal scores: out is the mean of the values
    >>> grad(lambda value: attention(np.zeros((1, 2)), np.zeros((2, 2)), value)[0, 0])(value)
    array([[0.5],
           [0.5]])
    """
    call = _Call(dropout_p, is_causal, rng, options)
    return _attention(call, query, key, value, attn_mask, sinks)


def attention_forward(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool | str = False,
    *,
    sinks: Any = None,
    rng: int | None = None,
    **options: Any,
) -> Any:
    """`sdpa.attention_forward`: the tuple (out, lse), both differentiable.

    Parameters and errors are those of `attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from autograd import grad
    >>> from sdpa.interop.autograd import attention_forward
    >>> query, key, value = np.zeros((1, 2)), np.eye(2), np.ones((2, 1))
    >>> loss = lambda query: attention_forward(query, key, value, scale=1.0)[1][0]
    >>> grad(loss)(query)  # the mean of the keys, for the weights are equal
    array([[0.5, 0.5]])
    """
    call = _Call(dropout_p, is_causal, rng, options)
    return _attention_forward(call, query, key, value, attn_mask, sinks)


class _Call:
    """The options of one call, and its results: what every derivative of it shares.

    The kernels' derivatives take out and lse as what the forward left, not as variables of their
    own, so here they are kept as plain arrays, however many levels of differentiation there are.
    """

    def __init__(
        self,
        dropout_p: float,
        is_causal: bool | str,
        rng: int | np.random.Generator | None,
        options: dict[str, Any],
    ) -> None:
        if "out" in options:
            raise TypeError("out: an array that is differentiated through cannot be written to")
        if dropout_p and rng is None:
            rng = np.random.default_rng()
        if isinstance(rng, np.random.Generator):
            rng = int.from_bytes(rng.bytes(8), "little")  # as sdpa.attention draws it
        self.options = options | {"dropout_p": dropout_p, "is_causal": is_causal, "rng": rng}
        self.out = self.lse = np.zeros(0)

    def forward(self, *operands: Any) -> None:
        *given, sinks = operands
        self.out, self.lse = sdpa.attention_forward(*given, sinks=sinks, **self.options)


@primitive
def _attention(call: _Call, *operands: Any) -> Any:
    call.forward(*operands)
    return call.out


@primitive
def _attention_forward(call: _Call, *operands: Any) -> Any:
    call.forward(*operands)
    return call.out, call.lse


@primitive
def _backward(
    call: _Call, needs: tuple[str, ...], grad_out: Any, grad_lse: Any, *operands: Any
) -> Any:
    """Gradients of <grad_out, out> + <grad_lse, lse> to the operands in `needs`, a tuple."""
    *given, sinks = operands
    grads = sdpa.attention_backward(
        *(np.asarray(grad_out, call.out.dtype), *given[:3], call.out, call.lse, given[3]),
        **call.options,
        sinks=sinks,
        grad_lse=None if grad_lse is None else np.asarray(grad_lse, call.lse.dtype),
        needs=needs,
    )
    return tuple(getattr(grads, name) for name in needs)


@primitive
def _jvp(call: _Call, names: tuple[str, ...], tangents: Any, *operands: Any) -> Any:
    """Tangent of out along the tangents of the operands called `names`."""
    t = dict.fromkeys(_OPERANDS) | dict(zip(names, tangents, strict=True))
    *given, sinks = operands
    return sdpa.attention_jvp(
        *(*given[:3], t["query"], t["key"], t["value"], given[3]),
        **call.options,
        sinks=sinks,
        attn_mask_t=t["attn_mask"],
        sinks_t=t["sinks"],
    ).out_t


@primitive
def _double_backward(
    call: _Call,
    needs: tuple[str, ...],
    names: tuple[str, ...],
    tangents: Any,
    grad_out: Any,
    grad_lse: Any,
    *operands: Any,
) -> Any:
    """Gradients of <tangents, `_backward` to names> to grad_out and the operands in `needs`."""
    t = dict.fromkeys(_OPERANDS) | dict(zip(names, tangents, strict=True))
    *given, sinks = operands
    second = sdpa.attention_double_backward(
        *(t["query"], t["key"], t["value"], np.asarray(grad_out, call.out.dtype)),
        *(*given[:3], call.out, call.lse, given[3]),
        **call.options,
        sinks=sinks,
        gg_attn_mask=t["attn_mask"],
        gg_sinks=t["sinks"],
        grad_lse=None if grad_lse is None else np.asarray(grad_lse, call.lse.dtype),
        needs=needs,
    )
    return tuple(getattr(second, name) for name in needs)


def _names(argnums: Sequence[int], first: int) -> tuple[str, ...]:
    """Of the operands at these positions, where query is at `first`."""
    return tuple(_OPERANDS[i - first] for i in argnums if i >= first)


def _attention_vjp(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Function:
    call, *operands = args
    return lambda g: _backward(call, _names(argnums, 1), g, None, *operands)


def _attention_jvp(argnums: Any, tangents: Any, ans: Any, args: Any, kwargs: Any) -> Any:
    call, *operands = args
    return _jvp(call, _names(argnums, 1), traced_tuple(tangents), *operands)


def _attention_forward_vjp(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Function:
    call, *operands = args
    return lambda g: _backward(call, _names(argnums, 1), g[0], g[1], *operands)


def _attention_forward_jvp(argnums: Any, tangents: Any, ans: Any, args: Any, kwargs: Any) -> Any:
    call, *operands = args
    out_t = _jvp(call, _names(argnums, 1), traced_tuple(tangents), *operands)
    lse_t = _lse_jvp(call, _names(argnums, 1), tangents, operands)
    return traced_tuple((out_t, lse_t))


def _lse_jvp(call: _Call, names: Sequence[str], tangents: Any, operands: Sequence[Any]) -> Any:
    moved = [(_OPERANDS.index(n), t) for n, t in zip(names, tangents, strict=True) if n != "value"]
    if not moved:
        return np.zeros_like(call.lse)
    positions, tangents = zip(*moved, strict=True)
    return make_jvp(partial(_composed_lse, call), positions)(*operands)(traced_tuple(tangents))[1]


def _backward_vjp(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Function:
    call, needs, grad_out, grad_lse, *operands = args
    names = ("grad_out",) * (2 in argnums) + _names(argnums, 4)

    def vjp(g: Any) -> Any:
        found: dict[Any, Any] = {}
        if names:
            second = _double_backward(call, names, needs, g, grad_out, grad_lse, *operands)
            found = {name: second[i] for i, name in enumerate(names)}
        if 3 in argnums:
            found["grad_lse"] = _lse_jvp(call, needs, [g[i] for i in range(len(needs))], operands)
        return [found[("grad_out", "grad_lse", *_OPERANDS)[i - 2]] for i in argnums]

    return vjp


def _backward_jvp(argnums: Any, tangents: Any, ans: Any, args: Any, kwargs: Any) -> Any:
    call, needs, grad_out, grad_lse, *operands = args
    t = dict(zip(argnums, tangents, strict=True))
    parts = []
    if 2 in t or 3 in t:
        grad_out_t = t[2] if 2 in t else np.zeros_like(call.out)
        parts.append(_backward(call, needs, grad_out_t, t.get(3), *operands))
    names = _names(argnums, 4)
    if names:
        moved = traced_tuple(t[i] for i in argnums if i >= 4)
        parts.append(_double_backward(call, needs, names, moved, grad_out, grad_lse, *operands))
    return traced_tuple(
        sum((part[i] for part in parts[1:]), start=parts[0][i]) for i in range(len(needs))
    )


def _jvp_vjp(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Function:
    call, names, tangents, *operands = args
    needs = _names(argnums, 3)

    def vjp(g: Any) -> Any:
        grads = [_backward(call, names, g, None, *operands)] if 2 in argnums else []
        if needs:
            second = _double_backward(call, needs, names, tangents, g, None, *operands)
            grads += [second[i] for i in range(len(needs))]
        return grads

    return vjp


def _composed(call: _Call, *operands: Any) -> Any:
    """(out, lse) by autograd's own operations, on the (Lq, Lk) matrix."""
    query, key, value, attn_mask, sinks = operands
    options = dict(call.options)
    dropout_p, rng = options.pop("dropout_p"), options.pop("rng")
    scale, softcap = options.pop("scale", None), options.pop("softcap", None)
    # What masks and ALiBi do to a score of 0, and what dropout does to equal weights.
    enable_gqa = options.get("enable_gqa", False)
    q, k = (np.zeros(anp.shape(x), anp.result_type(x)) for x in (query, key))
    fixed = sdpa.attention_weights(q, k, stage="biased", **options)
    factors = sdpa.attention_weights(q, k, None, dropout_p, rng=rng, enable_gqa=enable_gqa)
    factors = np.where(factors > 0, 1 / (1 - dropout_p) if dropout_p < 1 else 0, 0)
    factors = factors.astype(fixed.dtype)

    if enable_gqa:
        groups = anp.shape(query)[-3] // anp.shape(key)[-3]
        key, value = (anp.repeat(x, groups, axis=anp.ndim(x) - 3) for x in (key, value))
    scale = max(anp.shape(query)[-1], 1) ** -0.5 if scale is None else scale
    s = scale * anp.matmul(query, anp.swapaxes(key, -1, -2))
    if softcap is not None:
        s = softcap * anp.tanh(s / softcap)
    seen = np.broadcast_to(fixed > -np.inf, anp.shape(s))
    s = s + np.where(seen, fixed, 0)
    if attn_mask is not None and anp.result_type(attn_mask).kind == "b":
        seen = seen & attn_mask
    elif attn_mask is not None:
        unmasked = _plain(attn_mask) > -np.inf
        seen = seen & unmasked
        s = s + anp.where(unmasked, attn_mask, 0)
    n_k = anp.shape(s)[-1]
    if sinks is not None:
        column = anp.zeros((*anp.shape(s)[:-1], 1)) + anp.array(sinks)[..., None, None]
        s = anp.concatenate([s, column], axis=-1)
        seen = np.concatenate([seen, np.ones((*seen.shape[:-1], 1), bool)], axis=-1)
    weights = softmax(s, where=seen)[..., :n_k]
    return traced_tuple((anp.matmul(weights * factors, value), logsumexp(s, where=seen)))


def _plain(x: Any) -> Any:
    """The array inside any number of autograd's boxes."""
    while hasattr(x, "_value"):
        x = x._value
    return x


def _composed_out(call: _Call, *operands: Any) -> Any:
    return _composed(call, *operands)[0]


def _composed_lse(call: _Call, *operands: Any) -> Any:
    return _composed(call, *operands)[1]


def _composed_jvp(call: _Call, names: Any, tangents: Any, *operands: Any) -> Any:
    positions = [_OPERANDS.index(name) for name in names]
    moved = traced_tuple(tangents[i] for i in range(len(names)))
    return make_jvp(partial(_composed_out, call), positions)(*operands)(moved)[1]


def _composed_backward(
    call: _Call, needs: Any, grad_out: Any, grad_lse: Any, *operands: Any
) -> Any:
    positions = [_OPERANDS.index(name) for name in needs]
    grad_lse = np.zeros_like(call.lse) if grad_lse is None else grad_lse
    return make_vjp(partial(_composed, call), positions)(*operands)[0](
        traced_tuple((grad_out, grad_lse))
    )


def _composed_double_backward(
    call: _Call, needs: Any, names: Any, tangents: Any, *rest: Any
) -> Any:
    positions = [0 if name == "grad_out" else 2 + _OPERANDS.index(name) for name in needs]
    return make_vjp(partial(_composed_backward, call, names), positions)(*rest)[0](tangents)


def _vjp_of(composed: Function) -> Function:
    """Reverse mode of a primitive through a function of the same arguments."""

    def vjp_argnums(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Function:
        def vjp(g: Any) -> Any:
            grads = make_vjp(composed, argnums)(*args, **kwargs)[0](g)
            return [grads[i] for i in range(len(argnums))]

        return vjp

    return vjp_argnums


def _jvp_of(composed: Function) -> Function:
    """Forward mode of a primitive through a function of the same arguments."""

    def jvp_argnums(argnums: Any, tangents: Any, ans: Any, args: Any, kwargs: Any) -> Any:
        return make_jvp(composed, argnums)(*args, **kwargs)(traced_tuple(tangents))[1]

    return jvp_argnums


defvjp_argnums(_attention, _attention_vjp)
defjvp_argnums(_attention, _attention_jvp)
defvjp_argnums(_attention_forward, _attention_forward_vjp)
defjvp_argnums(_attention_forward, _attention_forward_jvp)
defvjp_argnums(_backward, _backward_vjp)
defjvp_argnums(_backward, _backward_jvp)
defvjp_argnums(_jvp, _jvp_vjp)
defjvp_argnums(_jvp, _jvp_of(_composed_jvp))
defvjp_argnums(_double_backward, _vjp_of(_composed_double_backward))
defjvp_argnums(_double_backward, _jvp_of(_composed_double_backward))


# -------------------------------------------------------------------------------- softmax


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


# Their derivatives are primitives again. The Jacobian of softmax is symmetric: one function serves
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
    g = anp.where(_plain(log_p) == -np.inf, 0, g)
    return (g - anp.exp(log_p) * anp.sum(g, axis=axis, keepdims=True)) / temperature


def _log_softmax_jvp(t: Any, log_p: Any, x: Any, axis: Any = -1, **options: Any) -> Any:
    left_out = _plain(log_p) == -np.inf
    t = anp.where(left_out, 0, t) / options.get("temperature", 1.0)
    return anp.where(left_out, 0, t - anp.sum(anp.exp(log_p) * t, axis=axis, keepdims=True))


@primitive
def _logsumexp_backward(g: Any, x: Any, lse: Any, axis: Any, where: Any) -> Any:
    x = x if where is None else np.where(where, x, -np.inf)
    return sdpa.logsumexp_backward(np.asarray(g, lse.dtype), x, lse, axis)


def _composed_logsumexp_backward(g: Any, x: Any, lse: Any, axis: Any, where: Any) -> Any:
    kept = np.sum(np.zeros(anp.shape(x)), axis=axis, keepdims=True).shape
    g, lse = anp.reshape(g, kept), anp.reshape(lse, kept)
    seen = (_plain(x) > -np.inf) & (True if where is None else where)
    return anp.where(seen, g * anp.exp(anp.where(seen, x - lse, 0)), 0)


def _logsumexp_jvp(
    t: Any, lse: Any, x: Any, axis: Any = -1, *, where: Any = None, keepdims: bool = False
) -> Any:
    p = _logsumexp_backward(anp.ones(anp.shape(lse)), x, lse, axis, where)
    return anp.sum(anp.where(_plain(p) > 0, p * t, 0), axis=axis, keepdims=keepdims)


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
    defvjp_argnums(_routine, _vjp_of(_formula))
    defjvp_argnums(_routine, _jvp_of(_formula))
