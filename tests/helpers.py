"""What several test files share: error bounds, comparison, ways to lay an array out in memory."""

from typing import NamedTuple

import ml_dtypes
import numpy as np

import sdpa
from sdpa import reference
from sdpa.reference import arrays, logits

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

# Where a kernel may change its path: a vector of either type, a query block (48, 96), a key block
# (128), and their neighbours.
SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 47, 48, 49, 95, 96, 97, 127, 128, 129)


def compute_type(dtype):
    """float32, or float64 for float64: the type of the arithmetic and of lse."""
    return np.dtype(np.float64) if dtype == np.float64 else np.dtype(np.float32)


def unit_roundoff(dtype):
    """Largest relative error of rounding to `dtype`."""
    return float(ml_dtypes.finfo(dtype).eps) / 2


def normal(rng, shape, dtype, std=1.0):
    """N(0, std^2) rounded to dtype: what the routines and the oracle both get."""
    return (std * rng.standard_normal(shape)).astype(dtype)


# ---------------------------------------------------------------------------------------- bounds


class Bounds(NamedTuple):
    """For each result, the largest error that the arithmetic can make, element by element."""

    out: np.ndarray
    lse: np.ndarray
    weights: np.ndarray
    query: np.ndarray | None = None
    key: np.ndarray | None = None
    value: np.ndarray | None = None
    attn_mask: np.ndarray | None = None


def attention_bounds(
    query,
    key,
    value,
    attn_mask=None,
    grad_out=None,
    *,
    grad_lse=None,
    scale=None,
    enable_gqa=False,
    **options,
):
    """Worst-case rounding errors of attention, to first order, for any order of its sums.

    u is the unit roundoff of the arithmetic (plus that of the oracle, which errs in the same way),
    u_out that of the result; S = |scale| sum |q||k|, b the bias, p the weights; M the largest
    S + |b| of a row plus log Lk, which bounds the shift m and lse. A sum of n products errs by at
    most n u times the sum of their magnitudes, in any order, with or without FMA (Higham,
    "Accuracy and Stability of Numerical Algorithms", section 3.1).

    a = s - m  The sum over d_k may start from -m; scale, log2(e), bias and shift add a handful
               of roundings of numbers below S + |b| + M: |error| <= h = 2 (d_k + 8) u M
    e = exp a  relative expm1(h) + 8 u, polynomial and range reduction; below the smallest normal
               number absolute. m need not be the maximum, only l >= 2^-60: `tiny` is that error
               relative to l.
    p = e / l  l sums Lk positive terms:    relative r = expm1(2 h) + (Lk + 24) u
    lse        = m + log l:                 h + (Lk + 16) u + 4 u M
    out        = sum p v:                   (r + (Lk + 2) u) sum p |v| + Lk tiny max |v|
    p again    = exp(s - lse):              relative r' = expm1(2 h + error of lse) + 24 u
    delta      = sum grad_out out:          e = sum |grad_out| error of out
                                                + d_v u sum |grad_out out|
    ds         = p (dp - delta + grad_lse): (r' + (d_v + 8) u) A + p e, where
               A = p (sum |grad_out||v| + sum |grad_out out| + |grad_lse|) bounds |ds|
    dq         = scale sum ds k:            |scale| sum (error of ds + (n + 4) u A) |k|, n terms;
               dk, dv and the gradient of the bias in the same way.

    The results are rounded at the end: u_out times their magnitude, plus half a smallest
    subnormal number.
    """
    dtype = np.asarray(query).dtype
    u = unit_roundoff(compute_type(dtype)) + unit_roundoff(np.float64)
    tiny = float(np.finfo(compute_type(dtype)).tiny) * 2.0**60

    def rounded(error, magnitude, dtype):
        grain = float(ml_dtypes.finfo(dtype).smallest_subnormal)
        return error + unit_roundoff(dtype) * (magnitude + error) + grain / 2

    # Rows that see a NaN or Inf have no bound; here it must only not spoil the others. What a
    # score of -inf hides stays hidden.
    q, k = arrays.broadcast(*arrays.float64(query, key), enable_gqa=enable_gqa)
    with np.errstate(invalid="ignore"):
        hidden = logits.scores_of(q, k, scale) == -np.inf
    query, key, value = (_finite(x) for x in (query, key, value))
    q, k, v = arrays.broadcast(query, key, value, enable_gqa=enable_gqa)
    bias, bias_dtype = np.zeros(()), dtype
    if attn_mask is not None and np.asarray(attn_mask).dtype != bool:
        bias, bias_dtype = _finite(attn_mask), attn_mask.dtype
        attn_mask = np.where(np.asarray(attn_mask, np.float64) == -np.inf, -np.inf, bias)
    s = np.where(hidden, -np.inf, logits.logits_of(q, k, attn_mask, scale=scale, **options))
    visible = s != -np.inf
    p = reference.softmax(s)
    out = p @ v
    d_k, d_v, n_q, n_k = q.shape[-1], v.shape[-1], q.shape[-2], k.shape[-2]
    scale = abs(logits.scale_of(scale, q))
    lead = s.shape[:-2]

    size = np.where(visible, scale * (abs(q) @ _t(abs(k))) + abs(bias), 0)
    m = size.max(axis=-1, initial=0) + np.log(max(n_k, 1))
    h = 2 * (d_k + 8) * u * m
    r = np.expm1(2 * h)[..., None] + (n_k + 24) * u
    e_lse = h + (n_k + 16) * u + 4 * u * m
    e_out = (r + (n_k + 2) * u) * (p @ abs(v))
    e_out += n_k * tiny * abs(v).max(axis=-2, keepdims=True, initial=0)
    e_out = rounded(e_out, abs(out), dtype)
    e_weights = rounded(r * p + tiny, p, dtype)
    if grad_out is None:
        return Bounds(e_out, e_lse, e_weights)

    g = abs(_finite(grad_out))
    p = np.where(visible, p + tiny, 0)
    r = np.expm1(2 * h + e_lse)[..., None] + 24 * u
    g_out = (g * abs(out)).sum(axis=-1)
    e_delta = (g * e_out).sum(axis=-1) + d_v * u * g_out
    g_lse = 0 if grad_lse is None else abs(_finite(grad_lse))
    a = p * (g @ _t(abs(v)) + (g_out + g_lse)[..., None])
    e_ds = (r + (d_v + 8) * u) * a + p * e_delta[..., None]

    def gradient(error, magnitude, terms, x, x_dtype=dtype):
        """Summed to the shape of argument x, with the errors of that sum and of the result."""
        terms *= np.prod(lead) / max(1, np.prod(x.shape[:-2]))
        terms = 1 if x.shape == magnitude.shape and x is bias else terms
        error = arrays.sum_to(error + (terms + 4) * u * magnitude, x.shape)
        return rounded(error, arrays.sum_to(magnitude, x.shape), x_dtype)

    return Bounds(
        e_out,
        e_lse,
        e_weights,
        gradient(scale * (e_ds @ abs(k)), scale * (a @ abs(k)), n_k, query),
        gradient(scale * (_t(e_ds) @ abs(q)), scale * (_t(a) @ abs(q)), n_q, key),
        gradient(_t(p * r) @ g, _t(p) @ g, n_q, value),
        gradient(e_ds, a, n_q * n_k, bias, bias_dtype),
    )


def _finite(x):
    return np.nan_to_num(np.asarray(x, np.float64), nan=0.0, posinf=0.0, neginf=0.0)


def _t(x):
    return np.swapaxes(x, -1, -2)


def assert_within(actual, expected, bound, what=""):
    """The same shape, the same NaN and Inf, and everything else at most `bound` away."""
    actual = np.asarray(actual)
    assert actual.shape == expected.shape, f"{what}: {actual.shape}, expected {expected.shape}"
    actual = actual.astype(np.float64)
    bound = np.broadcast_to(bound, expected.shape)
    finite = np.isfinite(expected)
    with np.errstate(invalid="ignore"):
        error = np.where(finite, abs(actual - expected), 0)
        same = np.where(finite, error <= bound, (actual == expected) | np.isnan(actual + expected))
        same &= np.isnan(actual) == np.isnan(expected)
    if same.all():
        return
    at = tuple(int(i) for i in np.argwhere(~same)[0])
    raise AssertionError(
        f"{what}: {np.count_nonzero(~same)} of {same.size} elements differ; at {at} "
        f"{actual[at]:.9g} for {expected[at]:.9g}, error {error[at]:.3g}, bound {bound[at]:.3g}"
    )


def check_attention(query, key, value, attn_mask=None, *, grad_out=None, grad_lse=None, **options):
    """Forward, backward and weights against the oracle: dtypes, shapes, and values in the bounds.

    grad_out None: forward and weights only. Returns the result of the forward.
    """
    dtype = np.dtype(query.dtype).newbyteorder("=") if query.dtype != BFLOAT16 else BFLOAT16
    operands = (query, key, value)
    bounds = attention_bounds(*operands, attn_mask, grad_out, grad_lse=grad_lse, **options)

    expected = reference.attention_forward(*operands, attn_mask, **options)
    got = sdpa.attention_forward(*operands, attn_mask, **options)
    assert got.out.dtype == dtype
    assert got.lse.dtype == compute_type(dtype)
    assert_within(got.out, expected.out, bounds.out, "out")
    assert_within(got.lse, expected.lse, bounds.lse, "lse")
    assert_same_bits(sdpa.attention(*operands, attn_mask, **options), got.out)

    # Where value alone has more leading axes, the mask may, too, and is none for these weights.
    unmasked = reference.attention_weights(query, key, enable_gqa=options.get("enable_gqa", False))
    if unmasked.shape == bounds.weights.shape:
        weights = reference.attention_weights(query, key, attn_mask, **options)
        got_weights = sdpa.attention_weights(query, key, attn_mask, **options)
        assert got_weights.dtype == dtype
        assert_within(got_weights, weights, bounds.weights, "weights")

    if grad_out is not None:
        biased = attn_mask is not None and attn_mask.dtype != bool
        options["needs"] = ("query", "key", "value") + ("attn_mask",) * biased
        options["grad_lse"] = grad_lse
        grads = sdpa.attention_backward(grad_out, *operands, *got, attn_mask, **options)
        expected = reference.attention_backward(
            grad_out, *operands, *expected, attn_mask, **options
        )
        for name in options["needs"]:
            of = {"query": query, "key": key, "value": value, "attn_mask": attn_mask}[name]
            grad = getattr(grads, name)
            assert grad.shape == of.shape
            assert grad.dtype == (of.dtype if of.dtype == BFLOAT16 else of.dtype.newbyteorder("="))
            assert_within(grad, getattr(expected, name), getattr(bounds, name), f"grad {name}")
    return got


def assert_same_bits(a, b, what=""):
    assert a.dtype == b.dtype, what
    assert a.shape == b.shape, what
    assert a.tobytes() == b.tobytes(), f"{what}: bits differ"


# ---------------------------------------------------------------------------------------- layouts


def _strided(x):
    big = np.full([2 * n + 1 for n in x.shape], np.nan, x.dtype)
    big[tuple(slice(1, None, 2) for _ in x.shape)] = x
    return big[tuple(slice(1, None, 2) for _ in x.shape)]


def _unaligned(x):
    buffer = np.zeros(x.nbytes + 1, np.uint8)[1:]
    y = np.ndarray(x.shape, x.dtype, buffer)
    y[...] = x
    return y


def _read_only(x):
    y = x.copy()
    y.flags.writeable = False
    return y


def _other_byte_order(x):
    # ml_dtypes knows bfloat16 in native order only.
    return x.copy() if x.dtype == BFLOAT16 else x.astype(x.dtype.newbyteorder())


# The same values, laid out differently.
LAYOUTS = {
    "contiguous": np.ascontiguousarray,
    "fortran": np.asfortranarray,
    "reversed": lambda x: np.flip(np.flip(x).copy()),
    "strided": _strided,
    "columns reversed": lambda x: x[..., ::-1].copy()[..., ::-1],
    "rows reversed": lambda x: x[..., ::-1, :].copy()[..., ::-1, :],
    "heads after length": lambda x: x.swapaxes(-3, -2).copy().swapaxes(-3, -2) if x.ndim > 2 else x,
    "unaligned": _unaligned,
    "other byte order": _other_byte_order,
    "read-only": _read_only,
}


# ---------------------------------------------------------------------------- independent oracles


def visible_pairs(n_q, n_k, is_causal=False, window=None, key_length=None, query_offset=None):
    """(n_q, n_k) bool: the table in the design, pair by pair, without NumPy's broadcasting."""
    length = n_k if key_length is None else key_length
    offset = 0 if query_offset is None else query_offset
    if is_causal == "lower_right":
        offset = length - n_q
    left, right = window or (None, None)
    visible = np.zeros((n_q, n_k), bool)
    for i in range(n_q):
        for j in range(n_k):
            visible[i, j] = (
                j < length
                and not (is_causal and j > i + offset)
                and not (left is not None and j < i + offset - left)
                and not (right is not None and j > i + offset + right)
            )
    return visible


def torch_composed(torch, query, key, value, visible, bias=None, scale=None):
    """(out, lse) from PyTorch's elementary operations, differentiable; heads are not repeated."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    s = scale * (query @ key.transpose(-1, -2))
    s = s if bias is None else s + bias
    visible = visible.expand(s.shape)
    some = visible.any(-1, keepdim=True)
    # A row without keys would be 0/0: give it any finite scores and drop it afterwards.
    s = torch.where(some, s.masked_fill(~visible, -torch.inf), 0)
    p = torch.where(some, torch.softmax(s, -1), 0)
    lse = torch.where(some[..., 0], torch.logsumexp(s, -1), -torch.inf)
    return p @ value, lse
