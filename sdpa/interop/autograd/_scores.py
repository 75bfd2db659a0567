"""Other mechanisms as primitives of autograd: cosine, bilinear, additive, relative, positions.

Reverse mode uses the backward functions of `sdpa`. The derivative of reverse mode, and forward
mode, differentiate a composed formula, one for each mechanism. A formula that calls `attention`
holds no (Lq, Lk) matrix.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import autograd.numpy as anp
import numpy as np
from autograd import make_vjp
from autograd.extend import defjvp, defjvp_argnums, defvjp, defvjp_argnums, primitive

import sdpa
from sdpa import _warnings
from sdpa._arguments import pop_query_offset
from sdpa.interop.autograd._attention import attention, composed_softmax, of_query_heads
from sdpa.interop.autograd._modes import Call, Function, jvp_of, plain, vjp_of

__all__ = [
    "additive_attention",
    "bilinear_attention",
    "cosine_attention",
    "rotary_embedding",
    "shaw_attention",
    "t5_relative",
]


class _Mechanism(NamedTuple):
    """name_forward and name_backward of sdpa, their differentiable arguments, a composed formula.

    composed(call, *arguments) is out in terms of operations that autograd can differentiate.
    """

    name: str
    positional: tuple[str, ...]
    composed: Function
    keywords: tuple[str, ...] = ("attn_mask", "sinks")

    @property
    def names(self) -> tuple[str, ...]:
        return self.positional + self.keywords

    def split(self, operands: Any) -> tuple[Any, dict[str, Any]]:
        n = len(self.positional)
        return operands[:n], dict(zip(self.keywords, operands[n:], strict=True))


@primitive
def _forward(mechanism: _Mechanism, call: Call, *operands: Any) -> Any:
    arrays, keywords = mechanism.split(operands)
    forward = getattr(sdpa, mechanism.name + "_forward")
    call.out, call.lse = forward(*arrays, **keywords, **call.options)
    return call.out


@primitive
@_warnings.silenced()  # the forward has warned
def _backward(
    mechanism: _Mechanism,
    call: Call,
    needs: tuple[str, ...],
    grad_out: Any,
    *operands: Any,
) -> Any:
    """A tuple: gradients of <grad_out, out> for the operands in `needs`."""
    arrays, keywords = mechanism.split(operands)
    grads = getattr(sdpa, mechanism.name + "_backward")(
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


def _composed(mechanism: _Mechanism, call: Call, *operands: Any) -> Any:
    return mechanism.composed(call, *operands)


def _composed_backward(
    mechanism: _Mechanism, call: Call, needs: Any, grad_out: Any, *operands: Any
) -> Any:
    positions = [mechanism.names.index(name) for name in needs]
    composed = partial(_composed, mechanism, call)
    return make_vjp(composed, positions)(*operands)[0](grad_out)


defvjp_argnums(_forward, _forward_vjp)
defjvp_argnums(_forward, jvp_of(_composed))
defvjp_argnums(_backward, vjp_of(_composed_backward))
defjvp_argnums(_backward, jvp_of(_composed_backward))


# ------------------------------------------------------------------------------ composed formulas


def _cosine(
    call: Call,
    query: Any,
    key: Any,
    value: Any,
    temperature: Any,
    attn_mask: Any,
    sinks: Any,
) -> Any:
    options = dict(call.options)
    eps = options.pop("eps")
    query, key = _unit(query, eps) / temperature, _unit(key, eps)
    return attention(query, key, value, attn_mask, sinks=sinks, scale=1.0, **options)


def _unit(x: Any, eps: float) -> Any:
    squared = anp.sum(x**2, axis=-1, keepdims=True)
    return x / anp.sqrt(anp.where(plain(squared) >= eps**2, squared, eps**2))


def _bilinear(
    call: Call, query: Any, key: Any, value: Any, weight: Any, attn_mask: Any, sinks: Any
) -> Any:
    query = anp.matmul(query, weight)
    return attention(query, key, value, attn_mask, sinks=sinks, **call.options)


def _additive(
    call: Call,
    query: Any,
    key: Any,
    value: Any,
    w_query: Any,
    w_key: Any,
    w_score: Any,
    bias: Any,
    attn_mask: Any,
    sinks: Any,
) -> Any:
    key, value = (of_query_heads(call, x, query) for x in (key, value))
    sums = anp.matmul(query, w_query)[..., :, None, :] + anp.matmul(key, w_key)[..., None, :, :]
    sums = sums if bias is None else sums + bias
    scale = call.options.get("scale")
    s = (1.0 if scale is None else scale) * anp.matmul(anp.tanh(sums), w_score)
    weights, _ = composed_softmax(call, s, attn_mask, sinks)
    return anp.matmul(weights, value)


def _shaw(
    call: Call,
    query: Any,
    key: Any,
    value: Any,
    rel_key: Any,
    rel_value: Any,
    attn_mask: Any,
    sinks: Any,
) -> Any:
    n_q, n_k, d_k = anp.shape(query)[-2], anp.shape(key)[-2], anp.shape(query)[-1]
    offset = pop_query_offset(dict(call.options), n_q, n_k)
    n_rows = anp.shape(rel_key)[-2]
    t = np.clip(np.arange(n_k) - np.arange(n_q)[:, None] - offset, -(n_rows // 2), n_rows // 2)
    # (Lq, Lk, 2 D + 1): which row of rel_key and rel_value a pair has.
    has = np.eye(n_rows, dtype=anp.result_type(query))[t + n_rows // 2]

    key, value, rel_key, rel_value = (
        of_query_heads(call, x, query) for x in (key, value, rel_key, rel_value)
    )
    by_row = anp.matmul(query, anp.swapaxes(rel_key, -1, -2))
    by_pair = anp.matmul(has, by_row[..., None])[..., 0]
    scale = call.options.get("scale")
    scale = max(d_k, 1) ** -0.5 if scale is None else scale
    s = scale * (anp.matmul(query, anp.swapaxes(key, -1, -2)) + by_pair)
    weights, _ = composed_softmax(call, s, attn_mask, sinks)
    out = anp.matmul(weights, value)
    if rel_value is not None:
        of_rows = anp.matmul(weights[..., None, :], has)[..., 0, :]
        out = out + anp.matmul(of_rows, rel_value)
    return out


_COSINE = _Mechanism(
    "cosine_attention", ("query", "key", "value"), _cosine, ("temperature", "attn_mask", "sinks")
)
_BILINEAR = _Mechanism("bilinear_attention", ("query", "key", "value", "weight"), _bilinear)
_ADDITIVE = _Mechanism(
    "additive_attention",
    ("query", "key", "value", "w_query", "w_key", "w_score", "bias"),
    _additive,
)
_SHAW = _Mechanism("shaw_attention", ("query", "key", "value", "rel_key", "rel_value"), _shaw)


# ------------------------------------------------------------------------------ mechanisms


def cosine_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    temperature: Any = 1.0,
    eps: float = 1e-12,
    attn_mask: Any = None,
    sinks: Any = None,
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
    options |= {"eps": eps}
    return _forward(_COSINE, Call(options), query, key, value, temperature, attn_mask, sinks)


def bilinear_attention(
    query: Any,
    key: Any,
    value: Any,
    weight: Any,
    *,
    attn_mask: Any = None,
    sinks: Any = None,
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
    return _forward(_BILINEAR, Call(options), query, key, value, weight, attn_mask, sinks)


def additive_attention(
    query: Any,
    key: Any,
    value: Any,
    w_query: Any,
    w_key: Any,
    w_score: Any,
    bias: Any = None,
    *,
    attn_mask: Any = None,
    sinks: Any = None,
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
    operands = (query, key, value, w_query, w_key, w_score, bias, attn_mask, sinks)
    return _forward(_ADDITIVE, Call(options), *operands)


def shaw_attention(
    query: Any,
    key: Any,
    value: Any,
    rel_key: Any,
    rel_value: Any = None,
    *,
    attn_mask: Any = None,
    sinks: Any = None,
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
    return _forward(_SHAW, Call(options), query, key, value, rel_key, rel_value, attn_mask, sinks)


# ------------------------------------------------------------------------------ positions


@primitive
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
    return sdpa.rotary_embedding(x, positions, **options)


@primitive
def _rotary_embedding_backward(g: Any, positions: Any, like: Any, options: Any) -> Any:
    return sdpa.rotary_embedding_backward(np.asarray(g, like), positions, **options)


defvjp(
    rotary_embedding,
    lambda ans, x, positions, **options: (
        lambda g: _rotary_embedding_backward(g, positions, anp.result_type(x), options)
    ),
    argnums=(0,),
)
defjvp(
    rotary_embedding,
    lambda t, ans, x, positions, **options: rotary_embedding(t, positions, **options),
    argnums=(0,),
)
defvjp(
    _rotary_embedding_backward,
    lambda ans, g, positions, like, options: lambda gg: rotary_embedding(gg, positions, **options),
    argnums=(0,),
)
defjvp(
    _rotary_embedding_backward,
    lambda t, ans, g, *rest: _rotary_embedding_backward(t, *rest),
    argnums=(0,),
)


@primitive
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
    return sdpa.bias.t5_relative(table, query_length, key_length, **options)


@primitive
def _t5_relative_backward(g: Any, like: Any, num_buckets: int, options: Any) -> Any:
    return sdpa.bias.t5_relative_backward(np.asarray(g, like), num_buckets, **options)


defvjp(
    t5_relative,
    lambda ans, table, n_q, n_k, **options: (
        lambda g: _t5_relative_backward(g, anp.result_type(table), anp.shape(table)[0], options)
    ),
    argnums=(0,),
)
defjvp(
    t5_relative,
    lambda t, ans, table, n_q, n_k, **options: t5_relative(t, n_q, n_k, **options),
    argnums=(0,),
)
defvjp(
    _t5_relative_backward,
    lambda ans, g, like, num_buckets, options: (
        lambda gg: t5_relative(gg, *anp.shape(g)[-2:], **options)
    ),
    argnums=(0,),
)
defjvp(
    _t5_relative_backward,
    lambda t, ans, g, *rest: _t5_relative_backward(t, *rest),
    argnums=(0,),
)
