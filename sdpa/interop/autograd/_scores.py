"""Other mechanisms as primitives of autograd: cosine, bilinear, additive, relative, positions.

Reverse mode uses the backward functions of `sdpa`. The derivative of reverse mode, and forward
mode, differentiate a composed formula, one for each mechanism. A formula that calls `attention`
holds no (Lq, Lk) matrix.
"""

from __future__ import annotations

from functools import partial
from inspect import signature
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd import make_vjp
from autograd.extend import defjvp, defjvp_argnums, defvjp, defvjp_argnums, primitive

import sdpa
from sdpa import _arguments, _warnings
from sdpa.interop.autograd._attention import (
    attention,
    composed_softmax,
    of_query_heads,
    scale_of,
    spread,
)
from sdpa.interop.autograd._modes import (
    Function,
    TracedCall,
    jvp_of,
    plain,
    rounded,
    vjp_of,
    widened,
)
from sdpa.mechanisms.cosine import row_scales

__all__ = [
    "additive_attention",
    "bilinear_attention",
    "cosine_attention",
    "rotary_embedding",
    "shaw_attention",
    "t5_relative",
]


class _Mechanism:
    """A mechanism of `sdpa`, whose arguments with gradients are those of its named tuple.

    composed(call, arguments) is out in terms of operations that autograd can differentiate.
    """

    def __init__(self, name: str, gradients: Any, composed: Function) -> None:
        self.name = name
        self.composed = composed
        self.names: tuple[str, ...] = gradients._fields
        taken = signature(getattr(sdpa, f"{name}_attention_forward")).parameters.values()
        self.positional = tuple(
            x.name for x in taken if x.kind is x.POSITIONAL_OR_KEYWORD and x.name in self.names
        )

    def function(self, way: str) -> Function:
        """Its function in this direction, "forward" or "backward"."""
        found: Function = getattr(sdpa, f"{self.name}_attention_{way}")
        return found

    def split(self, operands: Any) -> tuple[Any, dict[str, Any]]:
        named = dict(zip(self.names, operands, strict=True))
        return [named.pop(name) for name in self.positional], {
            name: x for name, x in named.items() if x is not None
        }

    def __call__(self, operands: dict[str, Any], options: dict[str, Any]) -> Any:
        """Out, from the operands that have places and the options."""
        own = {name: options.pop(name) for name in self.names if name in options}
        return _forward(self, TracedCall(options), *map((operands | own).get, self.names))


@primitive
def _forward(mechanism: _Mechanism, call: TracedCall, *operands: Any) -> Any:
    arrays, keywords = mechanism.split(operands)
    call.out, call.lse = mechanism.function("forward")(*arrays, **keywords, **call.options)
    return call.out


@primitive
@_warnings.silenced()  # the forward has warned
def _backward(
    mechanism: _Mechanism,
    call: TracedCall,
    needs: tuple[str, ...],
    grad_out: Any,
    *operands: Any,
) -> Any:
    """A tuple: gradients of <grad_out, out> for the operands in `needs`."""
    arrays, keywords = mechanism.split(operands)
    grads = mechanism.function("backward")(
        *(np.asarray(grad_out, call.out.dtype), *arrays, call.out, call.lse),
        **keywords,
        **call.options,
        needs=needs,
    )
    return tuple(getattr(grads, name) for name in needs)


def _forward_vjp(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Function:
    mechanism, call, *operands = args
    needs = tuple(mechanism.names[i - 2] for i in argnums)
    return lambda g: _backward(mechanism, call, needs, g, *operands)


def _composed(mechanism: _Mechanism, call: TracedCall, *operands: Any) -> Any:
    arguments = dict(zip(mechanism.names, map(widened, operands), strict=True))
    return rounded(mechanism.composed(call, arguments), operands[0])


def _composed_backward(
    mechanism: _Mechanism, call: TracedCall, needs: Any, grad_out: Any, *operands: Any
) -> Any:
    positions = [mechanism.names.index(name) for name in needs]
    composed = partial(_composed, mechanism, call)
    return make_vjp(composed, positions)(*operands)[0](grad_out)


defvjp_argnums(_forward, _forward_vjp)
defjvp_argnums(_forward, jvp_of(_composed))
defvjp_argnums(_backward, vjp_of(_composed_backward))
defjvp_argnums(_backward, jvp_of(_composed_backward))


# ------------------------------------------------------------------------------ composed formulas


def _cosine(call: TracedCall, x: dict[str, Any]) -> Any:
    options = dict(call.options)
    eps = options.pop("eps")
    # A temperature of another type does not change that of the query.
    query = rounded(_unit(x["query"], eps) / x.pop("temperature"), x["query"])
    x["query"], x["key"] = query, _unit(x["key"], eps)
    return attention(**x, scale=1.0, **options)


def _unit(x: Any, eps: float) -> Any:
    power, least = row_scales(np.asarray(plain(x)), eps)
    x = x * power
    squared, least = anp.sum(x**2, axis=-1, keepdims=True), np.square(least).astype(power.dtype)
    return x / anp.sqrt(anp.where(plain(squared) >= least, squared, least))


def _bilinear(call: TracedCall, x: dict[str, Any]) -> Any:
    x["query"] = anp.matmul(x["query"], x.pop("weight"))
    return attention(**x, **call.options)


def _additive(call: TracedCall, x: dict[str, Any]) -> Any:
    query = x["query"]
    key, value = (of_query_heads(call, x[name], query) for name in ("key", "value"))
    sums = anp.matmul(query, x["w_query"])[..., :, None, :]
    sums = sums + anp.matmul(key, x["w_key"])[..., None, :, :]
    sums = sums if x["bias"] is None else sums + x["bias"]
    s = scale_of(call, 1.0, x.get("scale")) * anp.matmul(anp.tanh(sums), x["w_score"])
    weights, _ = composed_softmax(call, spread(s, value), x)
    return anp.matmul(weights, value)


def _shaw(call: TracedCall, x: dict[str, Any]) -> Any:
    query, rel_key = x["query"], x["rel_key"]
    n_q, n_k, d_k = anp.shape(query)[-2], anp.shape(x["key"])[-2], anp.shape(query)[-1]
    offset = _arguments.pop_query_offset(dict(call.options), n_q, n_k)
    n_rows = anp.shape(rel_key)[-2]
    t = np.clip(np.arange(n_k) - np.arange(n_q)[:, None] - offset, -(n_rows // 2), n_rows // 2)
    # (Lq, Lk, 2 D + 1): which row of rel_key and rel_value a pair has.
    has = np.eye(n_rows, dtype=anp.result_type(query))[t + n_rows // 2]

    key, value, rel_key, rel_value = (
        of_query_heads(call, y, query) for y in (x["key"], x["value"], rel_key, x["rel_value"])
    )
    by_row = anp.matmul(query, anp.swapaxes(rel_key, -1, -2))
    by_pair = anp.matmul(has, by_row[..., None])[..., 0]
    scale = scale_of(call, _arguments.default_scale(d_k), x.get("scale"))
    s = scale * (anp.matmul(query, anp.swapaxes(key, -1, -2)) + by_pair)
    weights, _ = composed_softmax(call, spread(s, value), x)
    out = anp.matmul(weights, value)
    if rel_value is not None:
        of_rows = anp.matmul(weights[..., None, :], has)[..., 0, :]
        out = out + anp.matmul(of_rows, rel_value)
    return out


_COSINE = _Mechanism("cosine", sdpa.CosineGradients, _cosine)
_BILINEAR = _Mechanism("bilinear", sdpa.BilinearGradients, _bilinear)
_ADDITIVE = _Mechanism("additive", sdpa.AdditiveGradients, _additive)
_SHAW = _Mechanism("shaw", sdpa.ShawGradients, _shaw)


# ------------------------------------------------------------------------------ mechanisms


def cosine_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    temperature: Any = 1.0,
    eps: float = 1e-12,
    **options: Any,
) -> Any:
    """`sdpa.cosine_attention`, differentiable in its arrays and the temperature.

    Examples
    --------
    >>> import numpy as np
    >>> from autograd import grad
    >>> from sdpa.interop.autograd import cosine_attention
    >>> query, key, value = np.array([[3.0, 4.0]]), np.eye(2), np.array([[1.0], [0.0]])
    >>> g = grad(lambda query: cosine_attention(query, key, value)[0, 0])(query)
    >>> bool(abs((g * query).sum()) < 1e-12)  # the length of a query has no effect
    True
    """
    operands = {"query": query, "key": key, "value": value, "temperature": temperature}
    return _COSINE(operands, options | {"eps": eps})


def bilinear_attention(
    query: Any,
    key: Any,
    value: Any,
    weight: Any,
    **options: Any,
) -> Any:
    """`sdpa.bilinear_attention`, differentiable in its arrays.

    Examples
    --------
    >>> import numpy as np
    >>> from autograd import grad
    >>> from sdpa.interop.autograd import bilinear_attention
    >>> query, key, value = np.ones((1, 2)), np.eye(2), np.array([[1.0], [-1.0]])
    >>> out = lambda weight: bilinear_attention(query, key, value, weight, scale=1.0)[0, 0]
    >>> grad(out)(np.zeros((2, 2)))
    array([[ 0.5, -0.5],
           [ 0.5, -0.5]])
    """
    operands = {"query": query, "key": key, "value": value, "weight": weight}
    return _BILINEAR(operands, options)


def additive_attention(
    query: Any,
    key: Any,
    value: Any,
    w_query: Any,
    w_key: Any,
    w_score: Any,
    bias: Any = None,
    **options: Any,
) -> Any:
    """`sdpa.additive_attention`, differentiable in its arrays.

    Forward mode and second order hold an (Lq, Lk, h) array.

    Examples
    --------
    >>> import numpy as np
    >>> from autograd import grad
    >>> from sdpa.interop.autograd import additive_attention
    >>> query, key, value = np.zeros((1, 1)), np.zeros((2, 1)), np.array([[1.0], [3.0]])
    >>> out = lambda value: additive_attention(query, key, value, *np.ones((2, 1, 4)), np.ones(4))
    >>> grad(lambda value: out(value)[0, 0])(value)  # equal scores: the mean
    array([[0.5],
           [0.5]])
    """
    operands = {"query": query, "key": key, "value": value, "bias": bias}
    operands |= {"w_query": w_query, "w_key": w_key, "w_score": w_score}
    return _ADDITIVE(operands, options)


def shaw_attention(
    query: Any,
    key: Any,
    value: Any,
    rel_key: Any,
    rel_value: Any = None,
    **options: Any,
) -> Any:
    """`sdpa.shaw_attention`, differentiable in its arrays.

    Forward mode and second order hold an (Lq, Lk, 2 D + 1) array.

    Examples
    --------
    >>> import numpy as np
    >>> from autograd import grad
    >>> from sdpa.interop.autograd import shaw_attention
    >>> query, key, value = np.ones((2, 1)), np.zeros((2, 1)), np.eye(2)
    >>> out = lambda rel_key: shaw_attention(query, key, value, rel_key)
    >>> grad(lambda rel_key: out(rel_key)[0, 1])(np.zeros((3, 1)))  # key 1, one ahead of query 0
    array([[ 0.  ],
           [-0.25],
           [ 0.25]])
    """
    operands = {"query": query, "key": key, "value": value}
    return _SHAW(operands | {"rel_key": rel_key, "rel_value": rel_value}, options)


# ------------------------------------------------------------------------------ positions


def rotary_embedding(x: Any, positions: Any, **options: Any) -> Any:
    """`sdpa.rotary_embedding`, differentiable in x, of which it is a linear function.

    Examples
    --------
    >>> import numpy as np
    >>> from autograd import grad
    >>> from sdpa.interop.autograd import rotary_embedding
    >>> out = lambda x: rotary_embedding(x, [np.pi / 2])
    >>> grad(lambda x: out(x)[0, 1])(np.ones((1, 2))).round(12)
    array([[1., 0.]])
    """
    return _rotary_embedding(x, options | {"positions": positions})


@primitive
def _rotary_embedding(x: Any, options: Any) -> Any:
    return sdpa.rotary_embedding(x, **options)


@primitive
def _rotary_embedding_backward(g: Any, like: Any, options: Any) -> Any:
    return sdpa.rotary_embedding_backward(np.asarray(g, like), **options)


defvjp(
    _rotary_embedding,
    lambda ans, x, options: lambda g: _rotary_embedding_backward(g, anp.result_type(x), options),
    argnums=(0,),
)
defjvp(
    _rotary_embedding,
    lambda t, ans, x, options: _rotary_embedding(t, options),
    argnums=(0,),
)
defvjp(
    _rotary_embedding_backward,
    lambda ans, g, like, options: lambda gg: _rotary_embedding(gg, options),
    argnums=(0,),
)
defjvp(
    _rotary_embedding_backward,
    lambda t, ans, g, *rest: _rotary_embedding_backward(t, *rest),
    argnums=(0,),
)


def t5_relative(table: Any, query_length: int, key_length: int, **options: Any) -> Any:
    """`sdpa.bias.t5_relative`, differentiable in table, of which it is a linear function.

    Its reverse mode receives a gradient of shape (heads, Lq, Lk); `sdpa.bias.t5_attention_backward`
    needs no such array.

    Examples
    --------
    >>> import numpy as np
    >>> from autograd import grad
    >>> from sdpa.interop.autograd import t5_relative
    >>> total = lambda table: np.sum(t5_relative(table, 2, 6, max_distance=4))
    >>> grad(total)(np.zeros((8, 1))).ravel()  # how many pairs each bucket has
    array([2., 1., 0., 0., 0., 2., 2., 5.])
    """
    return _t5_relative(table, query_length, key_length, options)


@primitive
def _t5_relative(table: Any, query_length: int, key_length: int, options: Any) -> Any:
    return sdpa.bias.t5_relative(table, query_length, key_length, **options)


@primitive
def _t5_relative_backward(g: Any, like: Any, num_buckets: int, options: Any) -> Any:
    return sdpa.bias.t5_relative_backward(np.asarray(g, like), num_buckets, **options)


defvjp(
    _t5_relative,
    lambda ans, table, n_q, n_k, options: (
        lambda g: _t5_relative_backward(g, anp.result_type(table), anp.shape(table)[0], options)
    ),
    argnums=(0,),
)
defjvp(
    _t5_relative,
    lambda t, ans, table, n_q, n_k, options: _t5_relative(t, n_q, n_k, options),
    argnums=(0,),
)
defvjp(
    _t5_relative_backward,
    lambda ans, g, like, num_buckets, options: (
        lambda gg: _t5_relative(gg, *anp.shape(g)[-2:], options)
    ),
    argnums=(0,),
)
defjvp(
    _t5_relative_backward,
    lambda t, ans, g, *rest: _t5_relative_backward(t, *rest),
    argnums=(0,),
)
