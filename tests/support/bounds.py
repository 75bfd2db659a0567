"""How far from the exact result attention may be: error bounds derived from the arithmetic.

u is the unit roundoff of the arithmetic (plus that of the oracle, which errs in the same way). A
sum of n terms errs by at most n u times the sum of their magnitudes, in any order, with or without
FMA (Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1). `Number` carries that
through a formula (running error analysis, section 3.3), and `AttentionBounds` writes down the
kernels' formulas once more, in Numbers. Bounds hold to first order, for any order of the sums.
"""

import functools
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from support.machine import ROUNDS_TO_BFLOAT16

from sdpa import _core, reference
from sdpa.reference import arrays, logits


def compute_type(dtype):
    """float32, or float64 for float64: the type of the arithmetic and of lse."""
    return np.dtype(np.float64) if dtype == np.float64 else np.dtype(np.float32)


def unit_roundoff(dtype):
    """Largest relative error of rounding to `dtype`."""
    return float(ml_dtypes.finfo(dtype).eps) / 2


def weights_roundoff(dtype):
    """How the kernels in use round weights before they multiply them with values, or 0.

    To bfloat16 beside that type; for AMX beside float16 to two bfloat16, which have 16 bits.
    """
    isa = _core.show_config("dicts")["isa"]
    if dtype == np.float16 and isa in ("amx", "amx_model"):
        return 2.0**-17
    pairs = dtype == ml_dtypes.bfloat16 and isa in ROUNDS_TO_BFLOAT16
    return unit_roundoff(dtype) if pairs else 0.0


def gradients_roundoff(dtype):
    """How the kernels in use round weights and their gradients before the last products, or 0."""
    isa = _core.show_config("dicts")["isa"]
    return weights_roundoff(dtype) if isa in ("amx", "amx_model") else 0.0


def finite(x):
    """x in float64 with 0 for NaN and Inf: results that see these have no bound, others must."""
    return np.nan_to_num(np.asarray(x, np.float64), nan=0.0, posinf=0.0, neginf=0.0)


@dataclass(frozen=True)
class Number:
    """A computed array, with a bound of its error.

    size   bounds its exact magnitude and that of all partial sums of which it is made
    error  bounds the distance from computed to exact
    u      unit roundoff of one operation
    """

    size: np.ndarray
    error: np.ndarray
    u: float

    def _after(self, size, error, roundings):
        return Number(size, error + roundings * self.u * (size + error), self.u)

    def __add__(self, other):
        """The bound of a sum or a difference."""
        return self._after(self.size + other.size, self.error + other.error, 1)

    def __mul__(self, other):
        error = self.size * other.error + self.error * (other.size + other.error)
        return self._after(self.size * other.size, error, 1)

    def __matmul__(self, other):
        error = self.size @ other.error + self.error @ (other.size + other.error)
        return self._after(self.size @ other.size, error, self.size.shape[-1] + 2)

    def sum(self, axis):
        """The sum along one axis, kept with length 1."""
        size, error = (x.sum(axis=axis, keepdims=True) for x in (self.size, self.error))
        return self._after(size, error, self.size.shape[axis])

    def times(self, factor):
        """Multiplied with a number that is itself rounded."""
        return self._after(abs(factor) * self.size, abs(factor) * self.error, 2)

    @property
    def t(self):
        return Number(arrays.transpose(self.size), arrays.transpose(self.error), self.u)

    def summed_to(self, shape, sum_to=arrays.sum_to):
        """Summed over the axes along which an argument of this shape was broadcast."""
        size, error = sum_to(self.size, shape), sum_to(self.error, shape)
        return self._after(size, error, self.size.size / max(1, size.size))

    def rounded(self, dtype):
        """The largest error once stored as dtype: half an ulp, or half a smallest subnormal."""
        grain = float(ml_dtypes.finfo(dtype).smallest_subnormal)
        return self.error + unit_roundoff(dtype) * (self.size + self.error) + grain / 2


class AttentionBounds:
    """Largest errors of all that can be computed of one problem, by the names of the results.

    Takes the arguments of the oracle's functions; what needs grad_out, or tangents (query, key,
    value, attn_mask, sinks, scale; None is zero), is there where they are given. Notation as in
    docs/derivations.md. With S = |scale| |q| |k|^T:

    x      scale q k^T: (d_k + 4) u S
    h      tanh(x / cap), whose derivative is at most 1: the error of its argument, 4 ulp of its own
    z      + bias, ALiBi: that of x or cap h, and 12 u (S or |cap h|, + |bias| + |alibi|)
    a      z - m, m near the maximum: that and 8 u M, where M bounds a row's |z|, sink and lse
    exp a  relative expm1(2 a's error) + 8 u; below the smallest normal number absolute. m need not
           be the maximum, only l >= 2^-60: `tiny` is that error relative to l
    p      exp a / l, where l sums Lk + 1 positive terms: (Lk + 24) u more; out has that. Where
           products of bfloat16 round p, out has that rounding twice: in sum p v, and, times |out|,
           in the sum of the rounded p by which it is divided
    lse    m + log l: the error of a, (Lk + 16) u, and 4 u M
    p again, as exp(z - lse): that of lse more, and (Lk + 32) u for rows scaled to a sum of 1
    """

    def __init__(
        self,
        query,
        key,
        value,
        attn_mask=None,
        grad_out=None,
        *,
        grad_lse=None,
        tangents=None,
        scale=None,
        softcap=None,
        enable_gqa=False,
        sinks=None,
        dropout_p=0.0,
        rng=None,
        errors=(0, 0, 0, 0),
        dtype=None,
        **options,
    ):
        """errors: of query, key, value, grad_out, where they are results, computed as for dtype."""
        self.dtype = np.asarray(query).dtype if dtype is None else dtype
        self.u = unit_roundoff(compute_type(self.dtype)) + unit_roundoff(np.float64)
        self.arguments = {"query": query, "key": key, "value": value, "sinks": sinks}
        if isinstance(scale, np.ndarray):
            self.arguments["scale"] = scale
        self.grad_out, self.grad_lse, self.tangents = grad_out, grad_lse, tangents

        # Pairs that a score of -inf hides stay hidden when infinities are replaced.
        q, k, _ = arrays.broadcast(*arrays.float64(query, key, value), enable_gqa=enable_gqa)
        with np.errstate(invalid="ignore"):
            x = logits.scores_of(q, k, scale)
            hidden = (x == -np.inf) if softcap is None else np.zeros(x.shape, bool)
        self.enable_gqa = enable_gqa
        q, k, v = self._spread(query, key, value)
        bias = np.zeros(())
        if attn_mask is not None and np.asarray(attn_mask).dtype != bool:
            self.arguments["attn_mask"] = attn_mask
            bias = finite(attn_mask)
            attn_mask = np.where(np.asarray(attn_mask, np.float64) == -np.inf, -np.inf, bias)
        z = logits.logits_of(q, k, attn_mask, scale=scale, softcap=softcap, **options)
        z = np.where(hidden, -np.inf, z)
        self.visible = z != -np.inf
        self.lead, self.n_k = z.shape[:-2], z.shape[-1]
        self.scale = abs(logits.scale_of(scale, q))
        self.grad_out_error = errors[3]
        errors = (
            np.broadcast_to(e, np.shape(y))
            for e, y in zip(errors[:3], (query, key, value), strict=True)
        )
        errors = self._spread(*errors)
        self.q, self.k, self.v = (
            Number(abs(y), e, self.u) for y, e in zip((q, k, v), errors, strict=True)
        )

        self.softcap, self.z = softcap, z
        size = self._logits(logits.scores_of(q, k, scale), bias)
        self._softmax(reference.forward.with_sink(z, sinks), size)
        factors = logits.dropout_factors(z.shape, dropout_p, rng)
        self.r = Number(factors, self.u * factors, self.u)
        self.true_out = abs((factors * self.p) @ v)

    def _logits(self, scores, bias):
        """Scores, capped and biased; returns the magnitude of all that a logit is the sum of."""
        x = (self.q @ self.k.t).times(self.scale)
        self.scores = self.capped = x
        softcap, z, visible = self.softcap, self.z, self.visible
        capped = logits.capped(scores, softcap)
        if softcap is not None:
            argument = x.times(1 / softcap)
            h = abs(capped) / softcap
            error = np.minimum(argument.error + 8 * self.u * h, 2)
            self.h = Number(h, error, self.u)
            self.capped = self.h.times(softcap)
            slope = 1 - h**2
            error = np.minimum((2 * h + error) * error + 2 * self.u, 1)
            self.slope = Number(slope, error, self.u)
        alibi = abs(np.where(visible, z, 0) - capped - bias)
        size = np.where(visible, self.capped.size + abs(bias) + alibi, 0)
        error = np.where(visible, self.capped.error + 12 * self.u * size, 0)
        self.biased = Number(abs(np.where(visible, z, 0)), error, self.u)
        return size

    def _softmax(self, row, size):
        """The weights of rows of logits, the sink's last, of which `size` bounds the magnitude."""
        sink = abs(finite(row[..., -1]))
        self.m = size.max(axis=-1, initial=0) + sink + np.log(self.n_k + 1)
        self.a = self.biased.error.max(axis=-1, initial=0) + 8 * self.u * self.m
        self.true_lse = reference.logsumexp(row)
        p = reference.softmax(row)
        self.p, self.p_sink = p[..., :-1], p[..., -1]
        self.tiny = float(np.finfo(compute_type(self.dtype)).tiny) * 2.0**60

    def _spread(self, query, key, value):
        return arrays.broadcast(
            finite(query), finite(key), finite(value), enable_gqa=self.enable_gqa
        )

    def number(self, x):
        """An argument, which is exact."""
        return Number(abs(x), np.zeros(np.shape(x)), self.u)

    def _weights(self, relative):
        """p, masked pairs being exactly 0, and the sink's as a column: with this relative error."""
        relative = relative[..., None]
        p = Number(self.p, np.where(self.visible, relative * self.p + self.tiny, 0), self.u)
        sink = self.p_sink[..., None]
        return p, Number(sink, np.where(sink > 0, relative * sink + self.tiny, 0), self.u)

    # ------------------------------------------------------------------------------- forward

    @functools.cached_property
    def relative(self):
        return np.expm1(2 * self.a) + (self.n_k + 24) * self.u

    @functools.cached_property
    def lse(self):
        return self.a + (self.n_k + 16) * self.u + 4 * self.u * self.m

    @functools.cached_property
    def _out(self):
        out = (self.r * self._weights(self.relative)[0]) @ self.v
        rounding = weights_roundoff(self.dtype)
        rounded = rounding * (out.size + self.true_out + 2 * out.error)
        return Number(self.true_out, out.error + rounded, self.u)

    @functools.cached_property
    def out(self):
        return self._out.rounded(self.dtype)

    @functools.cached_property
    def stages(self):
        """Bounds of attention_weights, by the names of its stages."""
        weights = self.r * self._weights(self.relative)[0]
        numbers = {"scores": self.scores, "capped": self.capped, "biased": self.biased}
        numbers["weights"] = weights
        return {stage: number.rounded(self.dtype) for stage, number in numbers.items()}

    @functools.cached_property
    def received(self):
        """Bounds of attention_received, of each weight on the way to its key: (total, largest).

        A weight of the total is rounded less than 8 times more: in the panel's sum, when that and
        its rounding error are added, and at the end. The oracle adds the rows one after another.
        """
        p = self.r * self._weights(self.relative)[0]
        oracle = p.size.shape[-2] * unit_roundoff(np.float64)
        return p.error + (8 * self.u + oracle) * (p.size + p.error), p.error

    @functools.cached_property
    def statistics(self):
        """Bounds of attention_statistics, in the order of its fields.

        entropy = sum p (m - z) + log l, terms of one sign; a sum of powers multiplies the relative
        errors of p. A deviation of z from the mean errs by e, that of z and of a sum of Lk + 16, so
        the variance by 2 sigma e + e^2.
        """
        u, n, r = self.u, self.n_k, self.relative
        with np.errstate(invalid="ignore", divide="ignore"):
            deficit = np.where(self.visible, self.true_lse[..., None] - self.z, 0)
            count = self.visible.sum(axis=-1)
            mean = np.where(self.visible, self.z, 0).sum(axis=-1) / count
            z = np.where(self.visible, self.z - mean[..., None], 0)
            var = (z**2).sum(axis=-1) / count
        entropy = (self.p * abs(deficit)).sum(axis=-1)
        e = self.a + (n + 16) * u * self.m
        sums = [(self.p**power).sum(axis=-1) for power in (2, 3)]
        return (
            self.lse,
            (r + n * u) * entropy + 2 * self.a + r + 8 * u + n * self.tiny * (1 + self.m),
            r * self.p.max(axis=-1, initial=0) + self.tiny,
            *(
                np.expm1(power * np.log1p(r + n * u)) * s + n * self.tiny
                for power, s in zip((2, 3), sums, strict=True)
            ),
            e,
            2 * np.sqrt(var) * e + e**2 + (n + 16) * u * var,
        )

    # ------------------------------------------------------------------------------- derivatives

    @functools.cached_property
    def _again(self):
        """p and p_sink as exp(z - lse)."""
        return self._weights(np.expm1(2 * self.a + self.lse) + (self.n_k + 32) * self.u)

    @functools.cached_property
    def _g(self):
        g = finite(self.grad_out)
        return Number(abs(g), np.broadcast_to(self.grad_out_error, g.shape), self.u)

    @functools.cached_property
    def _delta(self):
        out = Number(self.true_out, self.out, self.u)
        delta = (self._g * out).sum(axis=-1)
        if self.grad_lse is not None:
            delta += self.number(finite(self.grad_lse)[..., None])
        return delta

    def _sloped(self, number):
        return number if self.softcap is None else self.slope * number

    def _gradient(self, name, number):
        """Summed to the shape of argument `name`, and stored in its dtype."""
        x = np.asarray(self.arguments[name])
        if name in ("sinks", "scale"):
            number = Number(number.size[..., 0], number.error[..., 0], self.u)
            return number.summed_to(x.shape, arrays.sum_to_heads).rounded(x.dtype)
        return number.summed_to(x.shape).rounded(x.dtype)

    @functools.cached_property
    def _dz(self):
        y = self.r * (self._g @ self.v.t)
        return self._again[0] * (y + self._delta)

    def _rounded(self, number):
        """As an operand of the last products of the backward."""
        rounding = gradients_roundoff(self.dtype) * (number.size + number.error)
        return Number(number.size, number.error + rounding, self.u)

    @functools.cached_property
    def _dx(self):
        return self._rounded(self._sloped(self._dz))

    @functools.cached_property
    def dq(self):
        """The gradient of query, before it is summed and stored."""
        return (self._dx @ self.k).times(self.scale)

    @functools.cached_property
    def dk(self):
        return (self._dx.t @ self.q).times(self.scale)

    @functools.cached_property
    def query(self):
        return self._gradient("query", self.dq)

    @functools.cached_property
    def key(self):
        return self._gradient("key", self.dk)

    @functools.cached_property
    def dv(self):
        return self._rounded(self.r * self._again[0]).t @ self._g

    @functools.cached_property
    def value(self):
        return self._gradient("value", self.dv)

    @functools.cached_property
    def attn_mask(self):
        return self._gradient("attn_mask", self._dz)

    @functools.cached_property
    def sinks(self):
        return self._gradient("sinks", self._again[1] * self._delta)

    @functools.cached_property
    def scale_gradient(self):
        """Computed as rows of q times what scale makes dq of."""
        by_row = (self.q * (self._dx @ self.k)).sum(axis=-1)
        return self._gradient("scale", by_row)

    # ------------------------------------------------------------------------------- tangents

    @functools.cached_property
    def _directions(self):
        """q_t, k_t, v_t, the tangent of the mask, those of sink and scale as (..., heads, 1, 1)."""
        names = ("query", "key", "value")
        given = [
            np.zeros(np.shape(self.arguments[name])) if t is None else t
            for name, t in zip(names, self.tangents, strict=False)
        ]
        mask_t, *per_head = (0 if t is None else finite(t) for t in self.tangents[3:])
        per_head = [arrays.per_head(t, self.lead) for t in per_head]
        return [self.number(x) for x in (*self._spread(*given), mask_t, *per_head)]

    @functools.cached_property
    def _x_t(self):
        q_t, k_t, *_, scale_t = self._directions
        moved = (q_t @ self.k.t + self.q @ k_t.t).times(self.scale)
        return moved + scale_t * (self.q @ self.k.t)

    @functools.cached_property
    def _z_t(self):
        """Tangent of the logits, and that of lse."""
        z_t = self._sloped(self._x_t) + self._directions[3]
        z_t = Number(*(np.where(self.visible, x, 0) for x in (z_t.size, z_t.error)), self.u)
        p, p_sink = self._weights(self.relative)
        return z_t, (p * z_t).sum(axis=-1) + p_sink * self._directions[4]

    def _tangent(self, out):
        """r p z_t v - lse_t out + r p v_t, the first and last divided by l at the end."""
        z_t, lse_t = self._z_t
        p = self._weights(self.relative)[0]
        return (self.r * (p * z_t)) @ self.v + lse_t * out + (self.r * p) @ self._directions[2]

    @functools.cached_property
    def out_t(self):
        return self._tangent(self._out).rounded(self.dtype)

    @functools.cached_property
    def second(self):
        """Bounds of attention_double_backward: {name of the argument: bound}."""
        q_t, k_t, v_t, _, sink_t, scale_t = self._directions
        p, p_sink = self._again
        z_t, lse_t = self._z_t
        centred, dz = z_t + lse_t, self._dz
        out_t = self._tangent(Number(self.true_out, self.out, self.u))
        mean = (self._g * out_t).sum(axis=-1)
        y, y_t = self.r * (self._g @ self.v.t), self.r * (self._g @ v_t.t)
        by_z = p * (centred * (y + self._delta) + y_t + mean)
        by_x = by_z
        if self.softcap is not None:
            by_x = self.slope * (by_z + (self.h * self._x_t * dz).times(2 / self.softcap))
        by_x_t = self._sloped(dz)
        by_product, by_product_t = (
            by_x.times(self.scale) + by_x_t * scale_t,
            by_x_t.times(self.scale),
        )
        numbers = {
            "query": by_product @ self.k + by_product_t @ k_t,
            "key": by_product.t @ self.q + by_product_t.t @ q_t,
            "scale": (self.q * (by_x @ self.k + by_x_t @ k_t) + q_t * (by_x_t @ self.k)).sum(
                axis=-1
            ),
            "value": (self.r * (p * centred)).t @ self._g,
            "attn_mask": by_z,
            "sinks": p_sink * ((sink_t + lse_t) * self._delta + mean),
        }
        given = {name: x for name, x in numbers.items() if self.arguments.get(name) is not None}
        bounds = {name: self._gradient(name, x) for name, x in given.items()}
        return bounds | {"grad_out": out_t.rounded(self.dtype)}
