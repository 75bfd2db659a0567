"""Bounds on the errors of attention with relative positions, derived from those of attention."""

import numpy as np
from support.bounds import AttentionBounds, Number
from support.helpers import compute_type, native, unit_roundoff

from sdpa.reference import arrays
from sdpa.reference.positions import ShawPairs


def roundoff(dtype):
    """Unit roundoff of the arithmetic, and that of the oracle."""
    return unit_roundoff(compute_type(dtype)) + unit_roundoff(np.float64)


class PartsBounds(AttentionBounds):
    """The bounds for three parts; each merge adds the errors of two log-sum-exps."""

    @property
    def lse(self):
        return super().lse + 3 * (4 * self.u * self.m + 8 * self.u)

    @property
    def relative(self):
        merges = (1 + np.expm1(2 * self.lse) + 8 * self.u) ** 3
        return (1 + super().relative) * merges - 1


def shaw_bounds(x, grad_out, grad_lse, options):
    """{result: largest error}. Notation of `AttentionBounds`, of each pair's own key and value.

    Products with key and rel_key, value and rel_value are separate sums, so that each rounding
    is relative to |key| + |rel_key|: as if that key erred, by u for every term of the sums.
    """
    dtype = native(x["query"].dtype)
    u = roundoff(dtype)
    pairs = ShawPairs(*x.values(), **options)
    magnitudes = {name: None if y is None else abs(np.float64(y)) for name, y in x.items()}
    _, keys, values = ShawPairs(*magnitudes.values(), **options).operands
    n_k, d_k, d_v = keys.shape[-2], keys.shape[-1], values.shape[-1]
    inner = {"grad_lse": None if grad_lse is None else grad_lse[..., None]}
    b = PartsBounds(
        *pairs.operands,
        grad_out=grad_out[..., None, :],
        errors=(0, (n_k + d_k + 16) * u * keys, (n_k + d_v + 16) * u * values, 0),
        dtype=dtype,
        **pairs.options,
        **inner,
    )

    def row(number):
        return Number(number.size[..., 0, :], number.error[..., 0, :], u)

    def over_queries(number):
        total = number.sum(-3)
        return Number(total.size[..., 0, :, :], total.error[..., 0, :, :], u)

    def by_distance(number):
        size, error = pairs.by_distance(number.size), pairs.by_distance(number.error)
        return number._after(size, error, pairs.by_distance(np.ones(number.size.shape)))

    bounds = {"out": b.out[..., 0, :], "lse": b.lse[..., 0]}
    dv = Number(b.dv.size * pairs.factors, b.dv.error * pairs.factors, u)
    numbers = {
        "query": row(b.dq),
        "key": over_queries(b.dk),
        "value": over_queries(dv),
        "rel_key": by_distance(b.dk),
        "rel_value": by_distance(dv),
        "attn_mask": row(b._dz),
    }
    arguments = x | {"attn_mask": options.get("attn_mask")}
    for name, number in numbers.items():
        y = arguments[name]
        if y is not None and y.dtype != bool:
            bounds[name] = number.summed_to(y.shape).rounded(native(y.dtype))
    if "sinks" in options:
        sinks = options["sinks"]
        sink = b._again[1] * b._delta
        number = Number(sink.size[..., 0, 0], sink.error[..., 0, 0], u).summed_to(
            sinks.shape, arrays.sum_to_heads
        )
        bounds["sinks"] = number.rounded(sinks.dtype)
    return bounds
