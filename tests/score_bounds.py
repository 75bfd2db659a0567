"""Error bounds of what is composed around attention: operands that are themselves results."""

import ml_dtypes
import numpy as np
from helpers import Bounds, attention_bounds, compute_type, unit_roundoff

from sdpa import reference
from sdpa.reference import arrays, logits


def composed_bounds(
    operands,
    errors,
    attn_mask=None,
    grad_out=None,
    *,
    dtype,
    grad_lse=None,
    scale=None,
    enable_gqa=False,
    **options,
):
    """`attention_bounds` in the arithmetic of `dtype`, and what errors of the operands add to them.

    operands are query, key and value in float64, errors the largest error of each element of them,
    all finite. To first order, by the derivation of `attention_bounds`, p the weights:

    s    = scale q k:         |scale| (error of q |k| + |q| error of k), its row maximum e
    p    : relative           r = expm1(2 e)
    out  = sum p v:           r sum p |v| + sum p error of v
    lse  :                    e
    ds   = p (dp - delta):    r A + p (sum |grad_out| error of v + sum |grad_out| error of out)
    dq   = scale sum ds k:    |scale| (sum error of ds |k| + sum A error of k); dk in the same way
    dv   = sum p grad_out:    sum r p |grad_out|
    """
    computed = [x.astype(compute_type(dtype)) for x in operands]
    own = attention_bounds(
        *computed, attn_mask, grad_out, grad_lse=grad_lse, scale=scale, enable_gqa=enable_gqa,
        **options,
    )  # fmt: skip
    q, k, v = arrays.broadcast(*operands, enable_gqa=enable_gqa)
    e_q, e_k, e_v = arrays.broadcast(*errors, enable_gqa=enable_gqa)
    p = reference.attention_weights(q, k, attn_mask, scale=scale, **options)
    scale = abs(logits.scale_of(scale, q))
    t = arrays.transpose

    e = np.where(p > 0, scale * (e_q @ t(abs(k)) + abs(q) @ t(e_k)), 0).max(axis=-1, initial=0)
    r = np.expm1(2 * e)[..., None]
    out = r * (p @ abs(v)) + p @ e_v
    if grad_out is None:
        return Bounds(own.out + out, own.lse + e, own.weights + r * p)

    g = abs(np.asarray(grad_out, np.float64))
    g_out = (g * abs(p @ v)).sum(axis=-1)
    g_lse = 0 if grad_lse is None else abs(np.asarray(grad_lse, np.float64))
    a = p * (g @ t(abs(v)) + (g_out + g_lse)[..., None])
    # The backward gets out as it was returned, rounded to dtype.
    saved = out + unit_roundoff(dtype) * abs(p @ v)
    e_ds = r * a + p * (g @ t(e_v) + (g * saved).sum(axis=-1)[..., None])

    def to(x, operand):
        return arrays.sum_to(x, operand.shape)

    query, key, value = operands
    mask = attn_mask if own.attn_mask.ndim else np.zeros(())
    return Bounds(
        own.out + out,
        own.lse + e,
        own.weights + r * p,
        own.query + to(scale * (e_ds @ abs(k) + a @ e_k), query),
        own.key + to(scale * (t(e_ds) @ abs(q) + t(a) @ e_q), key),
        own.value + to(t(p * r) @ g, value),
        own.attn_mask + to(e_ds, mask),
    )


def roundoff(dtype):
    """Unit roundoff of the arithmetic, and that of the oracle."""
    return unit_roundoff(compute_type(dtype)) + unit_roundoff(np.float64)


def rounded(bound, expected, dtype):
    """A bound, and the rounding of a result to dtype."""
    grain = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    return bound + unit_roundoff(dtype) * (abs(expected) + bound) + grain / 2
