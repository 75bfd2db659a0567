"""Attention as a primitive of autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd import make_jvp, make_vjp
from autograd.builtins import tuple as traced_tuple
from autograd.extend import defjvp_argnums, defvjp_argnums, primitive

import sdpa
from sdpa import _arguments, _warnings
from sdpa._arrays import compute_type, repeat_heads
from sdpa._programs import Library, composed
from sdpa._table import (
    DIFFERENTIABLE,
    DIFFERENTIABLE_OPTIONS,
    OPERANDS,
    OPTIONS,
    WITH_PROGRAMS,
    given,
    options_of,
    signature,
)
from sdpa.interop.autograd._modes import (
    Function,
    TracedCall,
    array,
    jvp_of,
    plain,
    refuse_out,
    rounded,
    vjp_of,
    widened,
)
from sdpa.interop.autograd._softmax import logsumexp, softmax
from sdpa.mechanisms._scores import changed_scores

__all__ = ["attention", "attention_forward"]

_POSITIONS, _PACKING = (
    {name for name, option in options_of("attention_weights").items() if option.kind == wanted}
    for wanted in ("position", "packing")
)
_POSITIONS |= {"mask_mod", "mask_args"}
_MASKS = [name for name, option in OPTIONS.items() if option.axes == "hqk"]


def attention(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
    """`sdpa.attention`, with the gradients of `sdpa.attention_backward`.

    Parameters
    ----------
    query, key, value
        As in `sdpa.attention`.
    *args, **options
        The options of `sdpa.attention` except out. Those without a gradient are constants. Where
        rng is a Generator or None one seed is drawn, and all derivatives use it. Arrays in
        score_args have gradients; score_mod and mask_mod cannot capture arrays of autograd.

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
    return _attention(*_call(attention, (query, key, value), args, options))


def attention_forward(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
    """`sdpa.attention_forward`: the tuple (out, lse), both differentiable.

    Parameters and errors are those of `attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from autograd import grad
    >>> from sdpa.interop.autograd import attention_forward
    >>> query, key, value = np.zeros((1, 2)), np.eye(2), np.ones((2, 1))
    >>> loss = lambda query: attention_forward(query, key, value, scale=1.0)[1][0]
    >>> grad(loss)(query)  # the mean of the keys, because the weights are equal
    array([[0.5, 0.5]])
    """
    return _attention_forward(*_call(attention_forward, (query, key, value), args, options))


_function: Any
for _function in attention, attention_forward:
    _function.__signature__ = signature(Any, WITH_PROGRAMS)


def _call(function: Function, operands: Any, args: Any, options: Any) -> tuple[Any, ...]:
    """The call and its operands, those of DIFFERENTIABLE and then score_args."""
    refuse_out(options)
    options = given(function, args, options, WITH_PROGRAMS)
    extra = [options.pop(name, None) for name in DIFFERENTIABLE_OPTIONS]
    score_args = options.pop("score_args", None)
    if score_args is not None and (
        not isinstance(score_args, (tuple, list)) or options.get("score_mod") is None
    ):
        return TracedCall(options | {"score_args": score_args}), *operands, *extra  # is refused
    return TracedCall(options), *operands, *extra, *(score_args or ())


def _split(call: TracedCall, operands: Any) -> tuple[Any, dict[str, Any]]:
    """(query, key, value), and all options that are given."""
    n = len(OPERANDS)
    extra: dict[str, Any] = dict(zip(DIFFERENTIABLE_OPTIONS, operands[n:], strict=False))
    if len(operands) > len(DIFFERENTIABLE):
        extra["score_args"] = operands[len(DIFFERENTIABLE) :]
    return operands[:n], {name: x for name, x in extra.items() if x is not None} | call.options


def _name(position: int) -> str | int:
    """Of an operand: that of DIFFERENTIABLE, or the number of an array in score_args."""
    n = len(DIFFERENTIABLE)
    return DIFFERENTIABLE[position] if position < n else position - n


def _position(name: str | int) -> int:
    return DIFFERENTIABLE.index(name) if isinstance(name, str) else len(DIFFERENTIABLE) + name


def _tangents(
    pattern: str, names: Any, tangents: Any, operands: Sequence[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Tangents of query, key and value, and of the options under names of this pattern.

    They get their operands' types, which autograd may have changed.
    """
    t: dict[str | int, Any] = {
        name: np.asarray(x, getattr(operands[_position(name)], "dtype", None))
        for name, x in zip(names, tangents, strict=True)
    }
    extra = {pattern.format(name): x for name, x in t.items() if name in DIFFERENTIABLE_OPTIONS}
    if any(isinstance(name, int) for name in t):
        n_args = len(operands) - len(DIFFERENTIABLE)
        extra[pattern.format("score_args")] = [t.get(i) for i in range(n_args)]
    return [t.get(name) for name in OPERANDS], extra


def _needs(names: Any) -> list[str]:
    """What the library calls the gradients of these operands."""
    return list(dict.fromkeys("score_args" if isinstance(x, int) else x for x in names))


def _found(gradients: Any, names: Any) -> Any:
    return tuple(
        gradients.score_args[name] if isinstance(name, int) else getattr(gradients, name)
        for name in names
    )


def _run(call: TracedCall, *operands: Any) -> None:
    arrays, keywords = _split(call, operands)
    # The derivatives get all digits of lse, the caller those of its type.
    call.out, call.lse = sdpa.attention_forward(*arrays, **keywords, lse_dtype=np.float64)


@primitive
def _attention(call: TracedCall, *operands: Any) -> Any:
    _run(call, *operands)
    return call.out


@primitive
def _attention_forward(call: TracedCall, *operands: Any) -> Any:
    _run(call, *operands)
    return call.out, call.lse.astype(compute_type(call.out.dtype), copy=False)


@primitive
@_warnings.silenced()  # the forward has warned
def _backward(
    call: TracedCall, needs: tuple[str | int, ...], grad_out: Any, grad_lse: Any, *operands: Any
) -> Any:
    """A tuple: gradients of <grad_out, out> + <grad_lse, lse> for the operands in `needs`."""
    arrays, keywords = _split(call, operands)
    grads = sdpa.attention_backward(
        *(np.asarray(grad_out, call.out.dtype), *arrays, call.out, call.lse),
        **keywords,
        grad_lse=None if grad_lse is None else np.asarray(grad_lse, call.lse.dtype),
        needs=_needs(needs),
    )
    return _found(grads, needs)


@primitive
@_warnings.silenced()  # the forward has warned
def _jvp(call: TracedCall, names: tuple[str | int, ...], tangents: Any, *operands: Any) -> Any:
    """Tangent of out along the tangents of the operands called `names`."""
    arrays, keywords = _split(call, operands)
    moved, moved_extra = _tangents("{}_t", names, tangents, operands)
    return sdpa.attention_jvp(*(*arrays, *moved), **keywords | moved_extra).out_t


@primitive
@_warnings.silenced()  # the forward has warned
def _double_backward(
    call: TracedCall,
    needs: tuple[str | int, ...],
    names: tuple[str | int, ...],
    tangents: Any,
    grad_out: Any,
    grad_lse: Any,
    *operands: Any,
) -> Any:
    """Gradients of <tangents, `_backward` for names>, for grad_out and the operands in `needs`."""
    arrays, keywords = _split(call, operands)
    moved, moved_extra = _tangents("gg_{}", names, tangents, operands)
    second = sdpa.attention_double_backward(
        *(*moved, np.asarray(grad_out, call.out.dtype), *arrays, call.out, call.lse),
        **keywords | moved_extra,
        grad_lse=None if grad_lse is None else np.asarray(grad_lse, call.lse.dtype),
        needs=_needs(needs),
    )
    return _found(second, needs)


def _names(argnums: Sequence[int], first: int) -> tuple[str | int, ...]:
    """The operands at these positions, where query is at `first`."""
    return tuple(_name(i - first) for i in argnums if i >= first)


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


def _lse_jvp(
    call: TracedCall, names: Sequence[str | int], tangents: Any, operands: Sequence[Any]
) -> Any:
    moved = [(_position(n), t) for n, t in zip(names, tangents, strict=True) if n != "value"]
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
        places = {2: "grad_out", 3: "grad_lse"}
        return [found[places[i] if i in places else _name(i - 4)] for i in argnums]

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


def _composed(call: TracedCall, *operands: Any) -> Any:
    """(out, lse) by autograd's own operations, on the (Lq, Lk) matrix."""
    if call.options.get("cu_seqlens_q") is not None and "sequence" not in call.options:
        return _composed_packed(call, *operands)
    wide = [widened(x) for x in operands]
    x: dict[str, Any] = dict(zip(DIFFERENTIABLE, wide, strict=False))
    x["score_args"] = wide[len(DIFFERENTIABLE) :]
    query = x["query"]
    key, value = (of_query_heads(call, x[name], query) for name in ("key", "value"))
    scale = scale_of(call, _arguments.default_scale(anp.shape(query)[-1]), x.get("scale"))
    s = spread(scale * anp.matmul(query, anp.swapaxes(key, -1, -2)), value)
    weights, lse = composed_softmax(call, s, x)
    out = rounded(anp.matmul(weights, value), operands[0])
    return traced_tuple((out, rounded(lse, query)))


def spread(s: Any, value: Any) -> Any:
    """The scores of every entry of the result, whose batch and heads may be value's alone."""
    own = anp.shape(s)[:-2]
    lead = np.broadcast_shapes(own, anp.shape(value)[:-2])
    return s if lead == own else s + np.zeros((*lead, 1, 1), anp.result_type(s))


def scale_of(call: TracedCall, default: float, x: Any = None) -> Any:
    """The factor of the scores, for (..., heads, Lq, Lk)."""
    x = call.options.get("scale") if x is None else x
    if x is None:
        return default
    return x[..., None, None] if anp.ndim(x) else x


def _composed_packed(call: TracedCall, *operands: Any) -> Any:
    """`_composed` sequence by sequence; operands are (total, heads, d), lse (heads, total)."""
    query, key, value, *extra = operands
    cu_seqlens = (np.asarray(call.options[f"cu_seqlens_{x}"]) for x in "qk")
    outs, lses = [], []
    for s, (i, j) in enumerate(_arguments.sequences(*cu_seqlens)):
        own = (anp.swapaxes(x, 0, 1) for x in (query[i], key[j], value[j]))
        out, lse = _composed(TracedCall(call.options | {"sequence": s}), *own, *extra)
        outs.append(anp.swapaxes(out, 0, 1))
        lses.append(lse)
    padding = anp.shape(query)[0] - sum(anp.shape(x)[-1] for x in lses)
    heads, dtype = anp.shape(query)[1], np.dtype(anp.result_type(query))
    outs.append(np.zeros((padding, heads, anp.shape(value)[-1]), dtype))
    lses.append(np.full((heads, padding), -np.inf, compute_type(dtype)))
    return traced_tuple((anp.concatenate(outs), anp.concatenate(lses, axis=-1)))


def of_query_heads(call: TracedCall, x: Any, query: Any) -> Any:
    """x with each head repeated for the query heads that share it."""
    if x is None or anp.ndim(x) < 3 or not call.options.get("enable_gqa"):
        return x
    return repeat_heads(x, anp.shape(query)[-3], anp.repeat)


def composed_softmax(call: TracedCall, s: Any, extra: Mapping[str, Any]) -> Any:
    """(weights, lse) of the scores s (..., heads, Lq, Lk), by autograd's own operations.

    `extra` has the differentiable options, and may have more.
    """
    positions, packing = (
        {name: x for name, x in call.options.items() if name in names}
        for names in (_POSITIONS, _PACKING)
    )
    dropout_p = call.options.get("dropout_p")
    # The effect of masks and ALiBi on scores of 0, and of dropout on equal weights.
    *lead, n_q, n_k = anp.shape(s)
    shapes = [(*lead, n, 1) for n in (n_q, n_k)]
    if "sequence" in packing:
        shapes = [(packing[name][-1], *lead, 1) for name in ("cu_seqlens_q", "cu_seqlens_k")]
    q, k = (np.zeros(shape, anp.result_type(s)) for shape in shapes)
    fixed = sdpa.attention_weights(q, k, stage="biased", **positions, **packing)
    if dropout_p:
        rng = call.options["rng"]
        factors = sdpa.attention_weights(q, k, dropout_p=dropout_p, rng=rng, **packing)
        factors = np.where(factors > 0, 1 / (1 - dropout_p) if dropout_p < 1 else 0, 0)
        factors = factors.astype(fixed.dtype)

    masks = [extra[name] if name in extra else array(call.options.get(name)) for name in _MASKS]
    biases, seen = [], fixed > -np.inf
    for mask in (x for x in masks if x is not None):
        if anp.result_type(mask).kind == "b":
            seen = seen & mask
        else:
            seen = seen & (plain(mask) != -np.inf)
            biases.append(mask)
    s, _ = changed_scores(s, call.options, anp.tanh)
    if call.options.get("score_mod") is not None:
        s = _scored(call, s, extra["score_args"], seen)
    s = s + np.where(seen, fixed, 0)
    for bias in biases:
        s = s + anp.where(plain(bias) != -np.inf, bias, 0)
    sinks = extra.get("sinks")
    if sinks is not None:
        column = anp.zeros((*anp.shape(s)[:-1], 1)) + anp.array(sinks)[..., None, None]
        s = anp.concatenate([s, column], axis=-1)
        seen = np.concatenate([seen, np.ones((*seen.shape[:-1], 1), bool)], axis=-1)
    weights = softmax(s, where=seen)[..., :n_k]
    return weights * factors if dropout_p else weights, logsumexp(s, where=seen)


_LIBRARY = Library(anp, plain)


def _scored(call: TracedCall, s: Any, score_args: Any, seen: Any) -> Any:
    """score_mod of the scores s (..., heads, Lq, Lk), at their positions."""
    options, shape = call.options, anp.shape(s)
    lead, (n_q, n_k) = shape[:-3], shape[-2:]
    lengths, offset = options.get("key_lengths"), options.get("query_offset")
    sequence = options.get("sequence")
    if sequence is not None:
        of_entries: list[Any] = [lengths, offset]
        lengths, offset = (x if np.ndim(x) == 0 else np.asarray(x)[sequence] for x in of_entries)
    if options.get("is_causal") == "lower_right":
        offset = _arguments.diagonal_offset(n_q, n_k, lengths)
    batch = np.arange(int(np.prod(lead))).reshape(lead) if sequence is None else sequence
    batch, offset = (
        np.asarray(x)[..., None, None, None] for x in (batch, 0 if offset is None else offset)
    )
    heads = shape[-3] if len(shape) > 2 else 1
    found = composed(
        _LIBRARY,
        False,
        options["score_mod"],
        score_args,
        [np.asarray(plain(x)) for x in score_args],
        seen,
        score=s,
        batch=batch,
        head=np.arange(heads)[:, None, None],
        query=np.arange(n_q)[:, None] + offset,
        key=np.arange(n_k),
    )
    return anp.reshape(found + np.zeros((*lead, heads, n_q, n_k)), shape)


def _composed_out(call: TracedCall, *operands: Any) -> Any:
    return _composed(call, *operands)[0]


def _composed_lse(call: TracedCall, *operands: Any) -> Any:
    return _composed(call, *operands)[1]


def _composed_jvp(call: TracedCall, names: Any, tangents: Any, *operands: Any) -> Any:
    positions = [_position(name) for name in names]
    moved = traced_tuple(tangents[i] for i in range(len(names)))
    return make_jvp(partial(_composed_out, call), positions)(*operands)(moved)[1]


def _composed_backward(
    call: TracedCall, needs: Any, grad_out: Any, grad_lse: Any, *operands: Any
) -> Any:
    positions = [_position(name) for name in needs]
    grad_lse = np.zeros_like(call.lse) if grad_lse is None else grad_lse
    return make_vjp(partial(_composed, call), positions)(*operands)[0](
        traced_tuple((grad_out, grad_lse))
    )


def _composed_double_backward(
    call: TracedCall, needs: Any, names: Any, tangents: Any, *rest: Any
) -> Any:
    positions = [0 if name == "grad_out" else 2 + _position(name) for name in needs]
    return make_vjp(partial(_composed_backward, call, names), positions)(*rest)[0](tangents)


defvjp_argnums(_attention, _attention_vjp)
defjvp_argnums(_attention, _attention_jvp)
defvjp_argnums(_attention_forward, _attention_forward_vjp)
defjvp_argnums(_attention_forward, _attention_forward_jvp)
defvjp_argnums(_backward, _backward_vjp)
defjvp_argnums(_backward, _backward_jvp)
defvjp_argnums(_jvp, _jvp_vjp)
defjvp_argnums(_jvp, jvp_of(_composed_jvp))
defvjp_argnums(_double_backward, vjp_of(_composed_double_backward))
defjvp_argnums(_double_backward, jvp_of(_composed_double_backward))
