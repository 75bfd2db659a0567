"""Derivatives of attention: backward, forward mode, double backward.

The notation is that of docs/derivations.md; rows are queries i, columns are keys j:

===== ======================================================================================
x     scale q k^T, the scores
f     capped(x), or score_mod of it
z     f + bias, the logits; -inf where masked
p     exp(z - lse), the weights; p_sink = exp(sink - lse) that of the sink
r     dropout's factors
slope df / dx
===== ======================================================================================
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from sdpa.reference.arrays import (
    Array,
    Gradient,
    Mask,
    broadcast,
    float64,
    per_head,
    shape_of,
    sum_to,
    sum_to_heads,
    sum_visible,
    transpose,
)
from sdpa.reference.forward import attention_forward
from sdpa.reference.logits import (
    cap_bend,
    cap_slope,
    capped,
    dropout_factors,
    logits_of,
    positions_of,
    scale_of,
    scores_of,
)
from sdpa.reference.programs import Moved, indices_of


class AttentionGradients(NamedTuple):
    """Result of `attention_backward`; None where a gradient was not asked for."""

    query: Gradient
    key: Gradient
    value: Gradient
    attn_mask: Gradient
    sinks: Gradient
    scale: Gradient
    score_args: Gradient


class AttentionTangent(NamedTuple):
    """Result of `attention_jvp`."""

    out: Array
    out_t: Array


class AttentionSecondGradients(NamedTuple):
    """Result of `attention_double_backward`; None where a derivative was not asked for."""

    grad_out: Gradient
    query: Gradient
    key: Gradient
    value: Gradient
    attn_mask: Gradient
    sinks: Gradient
    scale: Gradient
    score_args: Gradient


@np.errstate(all="ignore")
def attention_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    *,
    grad_lse: ArrayLike | None = None,
    needs: Collection[str] = ("query", "key", "value"),
    enable_gqa: bool = False,
    sinks: ArrayLike | None = None,
    rng: int | None = None,
    **options: Any,
) -> AttentionGradients:
    """Gradients of <grad_out, out> + <grad_lse, lse> with respect to the arguments in `needs`.

    Each gradient has the shape of its argument: it is summed over the axes along which the argument
    was broadcast. The forward does not keep the weights, so they are computed again from lse, as in
    Dao et al., "FlashAttention" (2022), appendix B.4. The passes run backwards, and each quotes the
    line of the forward that it inverts.

    Parameters
    ----------
    grad_out : (..., heads, Lq, d_v)
    out, lse
        Results of `attention_forward` on the same arguments.
    grad_lse : (..., heads, Lq), None
        None means zero.
    needs : sequence of {"query", "key", "value", "attn_mask", "sinks", "scale", "score_args"}
    """
    grad_out, query, key, value, out, lse = float64(grad_out, query, key, value, out, lse)
    q, k, v = broadcast(query, key, value, enable_gqa=enable_gqa)

    # Pass 2 was: p = softmax(z), which is exp(z - lse)
    visible, p, r = _weights_again(q, k, lse, attn_mask, dropout_p, rng, options)

    # Pass 3 was: out = (r * p) @ v
    grad_p = r * (grad_out @ transpose(v))
    grad_v = sum_visible(transpose(r * p), grad_out, transpose(visible))

    # Pass 2 was: p = softmax(z); lse = logsumexp(z)
    # In each row d p_j / d z_k = p_j (delta_jk - p_k) and d lse / d z_k = p_k. The resulting sum,
    # sum_j grad_p_j p_j, equals <grad_out, out>.
    shift = _shift(grad_out, out, grad_lse)
    grad_z = np.where(visible, p * (grad_p - shift[..., None]), 0)

    # Pass 1 was: x = scale * (q @ k^T); z = f(x) + attn_mask
    scale = scale_of(options.get("scale"), q)
    moved = MovedScore(scores_of(q, k, **options), visible, options)
    grad_x = np.where(visible, moved.slope * grad_z, 0)
    grad_q = scale * sum_visible(grad_x, k, visible)
    grad_k = scale * sum_visible(transpose(grad_x), q, transpose(visible))

    def grad_sinks() -> Array:
        # A sink is a key without a value: its grad_p is 0.
        return sum_to_heads(-_sink_weight(sinks, lse) * shift, shape_of(sinks))

    def grad_scale() -> Array:
        by_row = np.where(visible, grad_x * (q @ transpose(k)), 0).sum(axis=-1)
        return sum_to_heads(by_row, shape_of(options["scale"]))

    return AttentionGradients(
        sum_to(grad_q, query.shape) if "query" in needs else None,
        sum_to(grad_k, key.shape) if "key" in needs else None,
        sum_to(grad_v, value.shape) if "value" in needs else None,
        sum_to(grad_z, shape_of(attn_mask)) if "attn_mask" in needs else None,
        grad_sinks() if "sinks" in needs else None,
        grad_scale() if "scale" in needs else None,
        moved.of_arguments(grad_z) if "score_args" in needs else None,
    )


@np.errstate(all="ignore")
def attention_jvp(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    query_t: ArrayLike | None,
    key_t: ArrayLike | None,
    value_t: ArrayLike | None,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    *,
    attn_mask_t: ArrayLike | None = None,
    sinks_t: ArrayLike | None = None,
    scale_t: ArrayLike | None = None,
    score_args_t: Sequence[ArrayLike | None] | None = None,
    enable_gqa: bool = False,
    sinks: ArrayLike | None = None,
    rng: int | None = None,
    **options: Any,
) -> AttentionTangent:
    """out, and its derivative out_t, when each argument moves along its tangent.

    Forward-mode differentiation: Griewank and Walther, "Evaluating derivatives" (2008), section
    3.1. A tangent that is None is zero.
    """
    out, lse = attention_forward(
        query, key, value, attn_mask, dropout_p, enable_gqa=enable_gqa, sinks=sinks, rng=rng,
        **options,
    )  # fmt: skip
    tensors = _with_tangents((query, key, value), (query_t, key_t, value_t), enable_gqa)
    q, k, *_ = tensors
    visible, p, r = _weights_again(q, k, lse, attn_mask, dropout_p, rng, options)
    sink_t = _sink_weight(sinks, lse) * _sink_tangent(sinks_t, lse)
    tangents = {"bias": attn_mask_t, "sink": sink_t, "scale": scale_t, "args": score_args_t}
    *_, out_t = _forward_mode(tensors, visible, p, r, tangents, options)
    return AttentionTangent(out, out_t)


@np.errstate(all="ignore")
def attention_double_backward(
    gg_query: ArrayLike | None,
    gg_key: ArrayLike | None,
    gg_value: ArrayLike | None,
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    *,
    gg_attn_mask: ArrayLike | None = None,
    gg_sinks: ArrayLike | None = None,
    gg_scale: ArrayLike | None = None,
    gg_score_args: Sequence[ArrayLike | None] | None = None,
    grad_lse: ArrayLike | None = None,
    needs: Collection[str] = ("grad_out", "query", "key", "value"),
    enable_gqa: bool = False,
    sinks: ArrayLike | None = None,
    rng: int | None = None,
    **options: Any,
) -> AttentionSecondGradients:
    """Derivatives of phi = <gg, attention_backward(grad_out, ...)>, its gradients together.

    A gradient times a direction is a directional derivative, so phi is the derivative of the loss
    <grad_out, out> + <grad_lse, lse> along gg, by forward mode:

        phi = <grad_out, out_t> + <grad_lse, lse_t>.

    The results are the derivatives of phi (Griewank and Walther, "Evaluating derivatives" (2008),
    section 5.1; line by line in docs/derivations.md).

    Parameters
    ----------
    gg_query, gg_key, gg_value, gg_attn_mask, gg_sinks, gg_scale, gg_score_args
        Directions, each of its argument's shape; None means zero.
    needs : sequence of {"grad_out", "query", "key", "value", "attn_mask", "sinks", "scale", \
            "score_args"}
    """
    grad_out, query, key, value, out, lse = float64(grad_out, query, key, value, out, lse)
    tensors = _with_tangents((query, key, value), (gg_query, gg_key, gg_value), enable_gqa)
    q, k, v, q_t, k_t, v_t = tensors
    visible, p, r = _weights_again(q, k, lse, attn_mask, dropout_p, rng, options)
    p_sink, sink_t = _sink_weight(sinks, lse), _sink_tangent(gg_sinks, lse)
    tangents: dict[str, Any] = {"bias": gg_attn_mask, "sink": p_sink * sink_t, "scale": gg_scale}
    tangents["args"] = gg_score_args
    moved, z_t, lse_t, p_t, out_t = _forward_mode(tensors, visible, p, r, tangents, options)

    # A row of phi is sum_j p (y - shift) z_t + sum_j p y_t, with y = r <grad_out, v> and
    # y_t = r <grad_out, v_t>. Its derivative with respect to z_t is grad_z of the backward:
    y, y_t = r * (grad_out @ transpose(v)), r * (grad_out @ transpose(v_t))
    shift = _shift(grad_out, out, grad_lse)
    by_z_t = np.where(visible, p * (y - shift[..., None]), 0)

    # With respect to z, through p and through shift, which depends on p as well:
    mean = (grad_out * out_t).sum(axis=-1)
    by_z = (z_t - lse_t[..., None]) * (y - shift[..., None]) + y_t - mean[..., None]
    by_z = np.where(visible, p * by_z, 0)
    by_sink = -p_sink * ((sink_t - lse_t) * shift + mean)

    # z and z_t both depend on x, z_t through the slope.
    by_x_t = np.where(visible, moved.slope * by_z_t, 0)
    by_x = np.where(visible, moved.slope * by_z + moved.bend * by_z_t, 0)

    # x = scale q k^T, and x_t = scale (q_t k^T + q k_t^T) + scale_t q k^T.
    scale, scale_t = scale_of(options.get("scale"), q), _scale_tangent(gg_scale, q)
    by_product, by_product_t = scale * by_x + scale_t * by_x_t, scale * by_x_t
    by_q = sum_visible(by_product, k, visible) + sum_visible(by_product_t, k_t, visible)
    t = transpose(visible)
    by_k = sum_visible(transpose(by_product), q, t) + sum_visible(transpose(by_product_t), q_t, t)
    by_v = sum_visible(transpose(r * p_t), grad_out, t)

    def by_scale() -> Array:
        product_t = q_t @ transpose(k) + q @ transpose(k_t)
        by_pair = by_x * (q @ transpose(k)) + by_x_t * product_t
        return sum_to_heads(np.where(visible, by_pair, 0).sum(axis=-1), shape_of(options["scale"]))

    return AttentionSecondGradients(
        out_t if "grad_out" in needs else None,
        sum_to(by_q, query.shape) if "query" in needs else None,
        sum_to(by_k, key.shape) if "key" in needs else None,
        sum_to(by_v, value.shape) if "value" in needs else None,
        sum_to(by_z, shape_of(attn_mask)) if "attn_mask" in needs else None,
        sum_to_heads(by_sink, shape_of(sinks)) if "sinks" in needs else None,
        by_scale() if "scale" in needs else None,
        moved.of_arguments(by_z, by_z_t) if "score_args" in needs else None,
    )


class MovedScore:
    """f(x) and what moves with it: the cap and the function of the user, one behind the other.

    Attributes
    ----------
    slope : df / dx
    tangent : slope x_t, and what the tangents of score_args bring
    bend : d tangent / dx
    """

    def __init__(
        self,
        x: Array,
        visible: Mask,
        options: dict[str, Any],
        x_t: Array | float = 0.0,
        args_t: Sequence[ArrayLike | None] | None = None,
    ) -> None:
        self.slope, bend = cap_slope(x, **options), cap_bend(x, **options)
        self.tangent: Array = self.slope * x_t
        self.bend: Array = bend * x_t
        self._own = None
        if options.get("score_mod") is None:
            return
        _, offset = positions_of(x.shape, **options)
        own = self._own = Moved(
            capped(x, **options), visible, indices_of(x.shape, offset), options["score_mod"],
            options.get("score_args"), self.tangent, args_t,
        )  # fmt: skip
        self.bend = own.bend * self.slope + own.slope * self.bend
        self.tangent, self.slope = own.tangent, own.slope * self.slope

    def of_arguments(self, by_f: Array, by_tangent: Array | None = None) -> Gradient:
        """Gradients of sum by_f f + by_tangent tangent: a tuple, as of `Moved`."""
        return self._own and self._own.of_arguments(by_f, by_tangent)


def _weights_again(
    q: Array,
    k: Array,
    lse: Array,
    attn_mask: ArrayLike | None,
    dropout_p: float,
    rng: int | None,
    options: dict[str, Any],
) -> tuple[Mask, Array, Array]:
    """(visible, p, r): which pairs are visible, their weights from lse, dropout's factors."""
    z = logits_of(q, k, attn_mask, **options)
    visible = z != -np.inf
    p = np.where(visible, np.exp(z - lse[..., None]), 0)
    return visible, p, dropout_factors(z.shape, dropout_p, rng)


def _shift(grad_out: Array, out: Array, grad_lse: ArrayLike | None) -> Array:
    """sum_j grad_p_j p_j of each row, less the gradient of its lse: (..., heads, Lq)."""
    shift: Array = (grad_out * out).sum(axis=-1)
    return shift if grad_lse is None else shift - np.asarray(grad_lse, np.float64)


def _forward_mode(
    tensors: Sequence[Array],
    visible: Mask,
    p: Array,
    r: Array,
    tangents: dict[str, Any],
    options: dict[str, Any],
) -> tuple[MovedScore, Array, Array, Array, Array]:
    """(f, z_t, lse_t, p_t, out_t), each line the derivative of one of the forward's."""
    q, k, v, q_t, k_t, v_t = tensors
    x_t = scores_of(q_t, k, **options) + scores_of(q, k_t, **options)
    x_t = x_t + _scale_tangent(tangents["scale"], q) * (q @ transpose(k))
    f = MovedScore(scores_of(q, k, **options), visible, options, x_t, tangents["args"])
    bias_t = tangents["bias"]
    z_t = f.tangent + (0 if bias_t is None else np.asarray(bias_t, np.float64))
    z_t = np.where(visible, z_t, 0)
    lse_t = (p * z_t).sum(axis=-1) + tangents["sink"]
    p_t = p * (z_t - lse_t[..., None])
    out_t = sum_visible(r * p_t, v, visible) + sum_visible(r * p, v_t, visible)
    return f, z_t, lse_t, p_t, out_t


def _with_tangents(
    operands: Sequence[ArrayLike], tangents: Sequence[ArrayLike | None], enable_gqa: bool
) -> list[Array]:
    """query, key, value and their tangents on common leading axes; a tangent None is zero."""
    pairs = zip(operands, tangents, strict=True)
    moves = [np.zeros(shape_of(x)) if t is None else t for x, t in pairs]
    return [
        *broadcast(*float64(*operands), enable_gqa=enable_gqa),
        *broadcast(*float64(*moves), enable_gqa=enable_gqa),
    ]


def _scale_tangent(tangent: ArrayLike | None, q: Array) -> Array | float:
    return 0.0 if tangent is None else scale_of(np.asarray(tangent, np.float64), q)


def _sink_weight(sinks: ArrayLike | None, lse: Array) -> Array:
    """exp(sink - lse) of each row: (..., heads, Lq); 0 without a sink."""
    if sinks is None:
        return np.zeros_like(lse)
    sink = per_head(np.asarray(sinks, np.float64), lse.shape[:-1])[..., 0]
    return np.where(sink == -np.inf, 0, np.exp(sink - lse))


def _sink_tangent(tangent: ArrayLike | None, lse: Array) -> Array | float:
    return 0 if tangent is None else per_head(float64(tangent)[0], lse.shape[:-1])[..., 0]
