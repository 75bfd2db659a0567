"""Functions of the user, on every instruction set: values and all derivatives.

The oracle is the same Python function on NumPy arrays in float64, and for derivatives central
differences of it along random directions.
"""

import itertools

import numpy as np
import pytest
from support.helpers import normal

import sdpa

pytestmark = pytest.mark.usefixtures("isa")

F32, F64 = np.float32, np.float64
SHAPE = (2, 4)  # batch, heads
SLOPES = 2.0 ** -np.arange(1, 5)
TABLE = np.random.default_rng(3).standard_normal((4, 601))
FACTORS = np.array([0.5, -0.7])
DOCUMENTS = np.sort(np.random.default_rng(4).integers(0, 4, 300))
GRAPH = np.random.default_rng(5).random((4, 300, 300)) < 0.4


def relative(s, b, h, q, k, table):
    return s + table[h, q - k + 300]


SCORES = {
    "identity": (lambda s, b, h, q, k: s, ()),
    "alibi": (lambda s, b, h, q, k, slopes: s - slopes[h] * abs(q - k), (SLOPES,)),
    "cap": (lambda s, b, h, q, k: 5 * np.tanh(s / 5), ()),
    "relative": (relative, (TABLE,)),
    "gate": (
        lambda s, b, h, q, k, table: s * (1 + np.tanh(table[h, q - k + 300] * s)),
        (TABLE,),
    ),
    "square": (
        lambda s, b, h, q, k, table, u: (
            s * s / 5 + table[h, abs(q - k)] * np.exp(-s * s) * u[b] + np.sqrt(1 + s * s)
        ),
        (TABLE, FACTORS),
    ),
    "causal": (lambda s, b, h, q, k: np.where(q >= k, s, -np.inf), ()),
    "decay": (lambda s, b, h, q, k: s - np.log(1 + (q - k) ** 2 / 7), ()),
}
MASKS = {
    "all": (None, ()),
    "documents": (lambda b, h, q, k, d: (d[q] == d[k]) & (q >= k), (DOCUMENTS,)),
    "band": (lambda b, h, q, k: abs(q - k) <= 9, ()),
    "neighbours": (
        lambda b, h, q, k: (abs(q // 17 - k // 17) <= 2) & (abs(q % 17 - k % 17) <= 3),
        (),
    ),
    "heads": (lambda b, h, q, k: (h % 2 == 0) | (k < 50), ()),
    "graph": (lambda b, h, q, k, g: g[h, q, k] | (q == k), (GRAPH,)),
}

SMALL = np.random.default_rng(6).integers(-40, 40, 300)
HUGE = np.where(np.arange(300) % 3, SMALL, SMALL << 54)  # beyond what intervals know exactly
LEAST, MOST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
ENDS = np.resize([MOST, LEAST, 7, MOST, 40, LEAST, -3], 300)
REALS = np.random.default_rng(7).normal(150, 60, 300).clip(0, 299).astype(F32)
SPECIAL = np.where(np.arange(300) // 50 % 2, REALS, np.resize([1, np.nan, np.inf, -np.inf], 300))
EVEN = np.arange(300) % 2 == 0


def whole(t, at):
    """Integers of which intervals know nothing."""
    return np.floor(t[at]).astype(int)


def truncated(x):
    """Beyond the integers NumPy's result is that of the processor, here the least."""
    if isinstance(x, np.ndarray):
        x = np.where(abs(x) < 2.0**63, x, -(2.0**63))
    return x.astype(int)


# An operation each, of what is known of a tile, of what is not, and of what is at some tiles only.
OPERATIONS = {
    "and": (lambda b, h, q, k: ((q & 24) == 8) & ((k & -4) > 31), ()),
    "and of unknown": (
        lambda b, h, q, k, n, t: (whole(t, q) & whole(t, k)) + (n[k] & -8) > 3,
        (SMALL, REALS),
    ),
    "or": (lambda b, h, q, k: (q | k) % 5 > (q ^ 7) - k, ()),
    "left shift": (lambda b, h, q, k: ((k << 2) > q) & ((1 << (q % 9)) > k), ()),
    "far shifts": (lambda b, h, q, k: ((q << 54) > (k << 53)) & (q >> 60 < 1), ()),
    "right shift": (lambda b, h, q, k, n: ((q >> 3) > 9) | ((n[q] >> (k % 4)) == -3), (SMALL,)),
    "shift of one head": (lambda b, h, q, k: (h > 0) & ((q << (h - 1)) > (k >> (h - 1))), ()),
    "shift by unknown": (lambda b, h, q, k, t: (q >> whole(t, k)) > 0, (REALS / 64,)),
    "divide": (lambda b, h, q, k: ((q - 150) // -7 > k // 9) | (-q // 50 == -3), ()),
    "divide across 0": (lambda b, h, q, k: (q - 90) // (k - 100) > 1, ()),
    "divide unknown": (lambda b, h, q, k, n: (n[q] // 3 > k // 20) | (k // n[k] > n[q]), (HUGE,)),
    "remainder": (lambda b, h, q, k: ((q - 150) % -7 < -3) | (k % 100 < 30), ()),
    "remainder across 0": (lambda b, h, q, k: (q - 90) % (k - 100) > 40, ()),
    "remainder by 0": (lambda b, h, q, k: (q % 0 == 0) & (q // 0 > -1) & (k > 4), ()),
    "remainder unknown": (lambda b, h, q, k, n: (n[q] % 64 > 9) & (k % n[k] > n[q] % -9), (HUGE,)),
    "negative": (lambda b, h, q, k, n: (abs(n[q]) > -n[k]) & (-((q + 70_000) ** 2) < k), (HUGE,)),
    "beyond": (lambda b, h, q, k: -((q + 2000) ** 5) + (k + 2000) ** 5 > 0, ()),
    "at least": (lambda b, h, q, k, t: np.maximum(whole(t, q), 5) * 2 > k, (REALS,)),
    "product": (lambda b, h, q, k, t: (whole(t, q) * k > 999) & (q * whole(t, k) > 0), (REALS,)),
    "choice": (lambda b, h, q, k: np.where(k >= 128, q, np.where(h < 9, k, 0)) > 40, ()),
    "clipped": (lambda b, h, q, k, n, t: n[whole(t, q).clip(9, 70)] < n[k], (SMALL, REALS)),
    "unknown index": (lambda b, h, q, k, e, t: e[whole(t, k)] ^ e[q], (EVEN, REALS)),
    "truth": (lambda b, h, q, k: ((q > k).astype(int) * 3 + (h > 0) > 2) ^ (k >= 0), ()),
    "truth and truth": (lambda b, h, q, k, e: e[q] ^ (k > 99) ^ (q > 199), (EVEN,)),
    "not equal": (lambda b, h, q, k, n: (q != k + 3) & (n[q] != n[k]) & (n[q] <= n[k]), (HUGE,)),
    "equal to a float": (
        lambda b, h, q, k, n: np.where(h % 2, n[k] == 2.0**24, n[q] != 2.0**24 + 1),
        (2**24 + np.arange(300) % 3,),
    ),
    "less than the ends": (
        lambda b, h, q, k, n: np.where(h % 2, q < n[k], n[k] < q) ^ (n[q] < n[k]),
        (ENDS,),
    ),
    "real": (lambda b, h, q, k, t: (t[q] <= t[k]) & (t[k] != t[q]) & (q / 2 != 70.5), (REALS,)),
    "real of truth": (lambda b, h, q, k, t: (q > k) * 0.5 < t[k] - 150, (REALS,)),
    "real of large": (
        lambda b, h, q, k, t: (q * 2_000_000 < t[k] * 9e5) | (-q * 2_000_000 > t[q]),
        (REALS,),
    ),
    "finite": (lambda b, h, q, k, t: (abs(t[k]) < np.inf) & (t[q] <= np.inf), (SPECIAL,)),
    "not NaN": (lambda b, h, q, k, t: (t[k] <= np.inf) & (-np.inf <= t[q]), (SPECIAL,)),
    "truncated": (lambda b, h, q, k, t: truncated(t[k]) * 1e-9 < q, (SPECIAL * 1e17,)),
}


# Results without a score, or of the query alone; exponentials near the largest number.
OTHERS = {
    "bias alone": (lambda s, b, h, q, k, table: table[h, q - k + 300], (TABLE,)),
    "of a query": (lambda s, b, h, q, k, factors: factors[b] * np.sqrt(q), (FACTORS,)),
    "large": (lambda s, b, h, q, k: s + 1e-38 * np.exp(88.4 + s / 1000), ()),
    "largest": (lambda s, b, h, q, k: s + np.minimum(np.exp(1000 + s), 3), ()),
    "buckets": (
        lambda s, b, h, q, k, table: (
            s + table[h, np.floor(4 * np.log2(1.3 + abs(q - k))).astype(int)]
        ),
        (TABLE,),
    ),
}


def options_of(score, mask, **more):
    f, args = SCORES[score]
    m, mask_args = MASKS[mask]
    found = more | {"score_mod": f}
    found |= {"score_args": args} if args else {}
    return found | ({"mask_mod": m} if m else {}) | ({"mask_args": mask_args} if mask_args else {})


def logits(query, key, options, offset=0):
    """The logits by definition, in float64."""
    s = query.astype(F64) @ key.astype(F64).swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    cap = options.get("softcap")
    if cap:
        s = cap * np.tanh(s / cap)
    b, h, q, k = np.ogrid[tuple(slice(n) for n in s.shape)]
    q, seen = q + offset, np.ones(s.shape, bool)
    if f := options.get("score_mod"):
        s = f(s, b, h, q, k, *options.get("score_args", ()))
    if m := options.get("mask_mod"):
        seen &= m(b, h, q, k, *options.get("mask_args", ()))
    if options.get("is_causal"):
        seen &= k <= q
    return np.where(seen, s, -np.inf)


def weights_of(z):
    most = z.max(-1, keepdims=True, initial=-np.inf)
    e = np.exp(z - np.where(np.isfinite(most), most, 0))
    total = e.sum(-1, keepdims=True)
    return np.divide(e, total, out=np.zeros_like(e), where=total > 0)


def attend(query, key, value, options):
    return weights_of(logits(query, key, options)) @ value.astype(F64)


def operands(rng, dtype, n_q, n_k, d):
    return [normal(rng, (*SHAPE, n, d), dtype) for n in (n_q, n_k, n_k)]


def bound(dtype):
    """Of values of order 1: results are rounded, and sums and programs have tens of roundings."""
    return {"float64": 1e-13, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}[
        np.dtype(dtype).name
    ]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_values(rng, dtype, score, mask):
    for n_q, n_k, d in ((150, 150, 16), (7, 130, 8), (61, 300, 33)):
        for more in ({}, {"softcap": 3.0}, {"is_causal": True}):
            options = options_of(score, mask, **more)
            query, key, value = operands(rng, dtype, n_q, n_k, d)
            z = logits(query, key, options)
            out, lse = sdpa.attention_forward(query, key, value, **options)
            weights = sdpa.attention_weights(query, key, **options)
            np.testing.assert_allclose(
                out.astype(F64), weights_of(z) @ value.astype(F64), rtol=0, atol=bound(dtype)
            )
            np.testing.assert_allclose(weights, weights_of(z), rtol=0, atol=bound(dtype))
            seen = np.isfinite(z).any(-1)
            assert (lse[~seen] == -np.inf).all()
            biased = sdpa.attention_weights(query, key, stage="biased", **options)
            assert (np.isfinite(biased) == np.isfinite(z)).all()
            received = sdpa.attention_received(query, key, **options)
            np.testing.assert_allclose(
                received.total, weights_of(z).sum(-2), rtol=0, atol=3 * n_q * bound(F32)
            )
            statistics = sdpa.attention_statistics(query, key, **options)
            np.testing.assert_allclose(
                statistics.max_weight, weights_of(z).max(-1), rtol=0, atol=2e-5
            )


@pytest.mark.parametrize("score", OTHERS)
@np.errstate(over="ignore")
def test_other_values(rng, dtype, score):
    options = dict(zip(("score_mod", "score_args"), OTHERS[score], strict=True))
    query, key, value = operands(rng, dtype, 61, 300, 8)
    expected = attend(query, key, value, options)
    got = sdpa.attention(query, key, value, **options).astype(F64)
    np.testing.assert_allclose(got, expected, rtol=0, atol=bound(dtype))


def central(function, x, direction, step=1e-6):
    """The derivative of a function of several arrays along a direction."""

    def at(t):
        return function(*[a + t * d for a, d in zip(x, direction, strict=True)])

    return (at(step) - at(-step)) / (2 * step)


@pytest.mark.parametrize("mask", ["all", "documents", "band"])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_derivatives(rng, score, mask, softcap):
    options = options_of(score, mask, softcap=softcap)
    args = options.pop("score_args", ())
    primals = operands(rng, F64, 70, 130, 8)
    x, n_args = [*primals, *args], len(args)
    direction = [normal(rng, a.shape, F64) for a in x]
    grad_out = normal(rng, (*SHAPE, 70, 8), F64)
    arguments = {"score_args": args} if args else {}
    tangents = {"score_args_t": direction[3:]} if args else {}
    needs = ("query", "key", "value", *(["score_args"] if args else []))

    def flat(found, first):
        return [*found[first : first + 3], *(found.score_args or ())]

    def gradients(*x):
        own = options | ({"score_args": x[3:]} if n_args else {})
        out, lse = sdpa.attention_forward(*x[:3], **own)
        return sdpa.attention_backward(grad_out, *x[:3], out, lse, needs=needs, **own)

    def composed(*x):
        return attend(*x[:3], options | {"score_args": x[3:]})

    got = gradients(*x)
    slope = central(composed, x, direction)
    expected = (slope * grad_out).sum()
    along = sum((g * d).sum() for g, d in zip(flat(got, 0), direction, strict=True))
    np.testing.assert_allclose(along, expected, rtol=1e-6, atol=1e-6)
    moved = sdpa.attention_jvp(*primals, *direction[:3], **options, **arguments, **tangents)
    np.testing.assert_allclose(moved.out_t, slope, rtol=0, atol=2e-7 * (1 + abs(slope).max()))

    saved = sdpa.attention_forward(*primals, **options, **arguments)
    second = sdpa.attention_double_backward(
        *direction[:3], grad_out, *primals, *saved, needs=("grad_out", *needs),
        **options, **arguments, **({"gg_score_args": direction[3:]} if args else {}),
    )  # fmt: skip
    np.testing.assert_allclose(second.grad_out, moved.out_t, rtol=0, atol=1e-10)
    other = [normal(rng, a.shape, F64) for a in x]

    def along_direction(*x):
        return sum((g * d).sum() for g, d in zip(flat(gradients(*x), 0), direction, strict=True))

    expected = central(along_direction, x, other)
    got = sum((g * d).sum() for g, d in zip(flat(second, 1), other, strict=True))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("score", SCORES)
def test_types_and_threads(rng, dtype, score):
    """Derivatives of each type are near those of float64, with the same bits for any threads."""
    options = options_of(score, "documents")
    primals = operands(rng, dtype, 200, 200, 16)
    direction = operands(rng, dtype, 200, 200, 16)
    grad_out = normal(rng, (*SHAPE, 200, 16), dtype)
    needs = ("query", "key", "value", *(["score_args"] if "score_args" in options else []))

    def derivatives(primals, direction, grad_out, workers):
        own = options | {"workers": workers}
        saved = sdpa.attention_forward(*primals, **own)
        first = sdpa.attention_backward(grad_out, *primals, *saved, needs=needs, **own)
        moved = sdpa.attention_jvp(*primals, *direction, **own)
        second = sdpa.attention_double_backward(
            *direction, grad_out, *primals, *saved, needs=("grad_out", *needs), **own
        )
        of_functions = [*(first.score_args or ()), *(second.score_args or ())]
        return [*first[:3], moved.out_t, *second[:4], *of_functions]

    given = (primals, direction, grad_out)
    one = derivatives(*given, 1)
    for workers in (2, 5):
        again = derivatives(*given, workers)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(again, one, strict=True))
    wide = [[x.astype(F64) for x in arrays] for arrays in given[:2]]
    exact = derivatives(*wide, grad_out.astype(F64), 1)
    for ours, true in zip(one, exact, strict=True):
        scale = 1 + abs(true).max()
        np.testing.assert_allclose(
            ours.astype(F64) / scale, true / scale, rtol=0, atol=bound(dtype)
        )


def test_packed_sequences(rng, dtype):
    """Positions are counted in each sequence, and b is the sequence."""
    lengths = [40, 0, 90, 1, 33]
    cu = np.concatenate([[0], np.cumsum(lengths)])
    factors = np.linspace(0.5, 1.5, len(lengths))

    def score(s, b, h, q, k, factors, table):
        return s * factors[b] + table[h, q - k + 300]

    def seen(b, h, q, k):
        return (q >= k) | (b == 2)

    query, key, value, grad_out = (normal(rng, (cu[-1], 4, 16), dtype) for _ in range(4))
    bounds = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    functions = {"score_mod": score, "score_args": (factors, TABLE), "mask_mod": seen}
    needs = ("query", "key", "value", "score_args")
    out, lse = sdpa.attention_forward(query, key, value, **functions, **bounds)
    found = sdpa.attention_backward(
        grad_out, query, key, value, out, lse, needs=needs, **functions, **bounds
    )
    sums = [np.zeros(factors.shape), np.zeros(TABLE.shape)]
    for i, (first, end) in enumerate(itertools.pairwise(cu)):
        x = [a[first:end].swapaxes(0, 1)[None] for a in (query, key, value)]
        own = {
            "score_mod": lambda s, b, h, q, k, f, t, i=i: score(s, b + i, h, q, k, f, t),
            "score_args": (factors, TABLE),
            "mask_mod": lambda b, h, q, k, i=i: seen(b + i, h, q, k),
        }
        saved = sdpa.attention_forward(*x, **own)
        np.testing.assert_array_equal(saved.out[0].swapaxes(0, 1), out[first:end])
        g = grad_out[first:end].swapaxes(0, 1)[None]
        one = sdpa.attention_backward(g, *x, *saved, needs=needs, **own)
        np.testing.assert_array_equal(one.key[0].swapaxes(0, 1), found.key[first:end])
        for total, part in zip(sums, one.score_args, strict=True):
            total += part
    for total, ours in zip(sums, found.score_args, strict=True):
        np.testing.assert_allclose(ours, total, rtol=0, atol=1e-9 + 40 * bound(dtype))


def test_grouped_heads_and_offsets(rng):
    query, key, value = (normal(rng, (2, n, 60, 8), F64) for n in (4, 2, 2))
    options = options_of("relative", "documents")
    wide = [np.repeat(x, 2, axis=1) for x in (key, value)]
    got = sdpa.attention(query, key, value, enable_gqa=True, **options)
    np.testing.assert_array_equal(got, sdpa.attention(query, *wide, **options))
    offset = np.array([3, 40])
    got = sdpa.attention(query, *wide, query_offset=offset, **options)
    for i, by in enumerate(offset):
        z = logits(query[i : i + 1], wide[0][i : i + 1], options, by)
        np.testing.assert_allclose(got[i : i + 1], weights_of(z) @ wide[1][i : i + 1], atol=1e-13)


def test_invariant(rng, dtype):
    """A row's bits do not depend on other rows, nor on keys that it does not see."""
    options = options_of("relative", "documents", invariant=True)
    query, key, value = operands(rng, dtype, 300, 300, 16)
    whole = sdpa.attention(query, key, value, **options)
    some = sdpa.attention(query[..., 40:47, :], key, value, query_offset=40, **options)
    np.testing.assert_array_equal(some, whole[..., 40:47, :])
    n = np.searchsorted(DOCUMENTS, DOCUMENTS[46], side="right")
    fewer = sdpa.attention(
        query[..., 40:47, :], key[..., :n, :], value[..., :n, :], query_offset=40, **options
    )
    np.testing.assert_array_equal(fewer, some)


def test_nan_of_masked_pairs_is_not_seen(rng, dtype):
    """A masked pair never sees what the function makes of it, nor NaN in its key."""
    query, key, value = operands(rng, dtype, 50, 80, 8)
    bad_key, bad_value = key.copy(), value.copy()
    bad_key[..., 60:, :] = bad_value[..., 60:, :] = np.nan
    options = {
        "score_mod": lambda s, b, h, q, k: np.where(k < 60, s, -np.inf) + 0 * (1.0 / (k - 70)),
        "mask_mod": lambda b, h, q, k: k < 60,
    }
    ours = sdpa.attention(query, bad_key, bad_value, **options)
    np.testing.assert_array_equal(ours, sdpa.attention(query, key, value, **options))
    alone = {"score_mod": lambda s, b, h, q, k: np.where(k < 60, s, -np.inf)}
    np.testing.assert_array_equal(
        sdpa.attention(query, bad_key, bad_value, **alone),
        sdpa.attention(query, key, value, **alone),
    )


def test_integers_beyond_int32(rng):
    """Products of positions leave int32; the results do not."""
    query, key, value = operands(rng, F32, 70, 70, 8)
    options = {
        "score_mod": lambda s, b, h, q, k: s - ((q + 90000) * (k + 90000) % 1000) / 1000,
        "mask_mod": lambda b, h, q, k: (q + 100000) * (k + 100000) % 3 > 0,
    }
    z = logits(query, key, options)
    np.testing.assert_allclose(
        sdpa.attention(query, key, value, **options), weights_of(z) @ value, atol=2e-5
    )


def seen(query, key, mask, args):
    """The pairs that the kernels let through."""
    biased = sdpa.attention_weights(query, key, stage="biased", mask_mod=mask, mask_args=args)
    return np.isfinite(biased)


LARGE = 2**31 - 1


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("sign", [1, -1])
def test_division_of_integers(rng, dtype, sign):
    """Of 32 bits, to the last one, by positive and by negative numbers; a rest also by 0."""
    query, key, _ = operands(rng, dtype, 70, 300, 8)
    a = rng.integers(-LARGE, LARGE, 70) >> rng.integers(0, 31, 70)
    b = rng.integers(1, LARGE, 300) >> rng.integers(0, 31, 300)
    b = sign * np.maximum(b, 1)
    a[:6], b[:4] = (-LARGE, LARGE, 0, -1, 1, b[9] * 3), (sign, 2 * sign, sign * LARGE, 3 * sign)
    a[6:40] = a[6:40] // b[6:40] * b[6:40] + rng.integers(-1, 2, 34)
    args = (np.clip(a, -LARGE, LARGE), b)

    def quotients(_b, h, q, k, a, b):
        return a[q] // b[k] % 1009 < 400

    def rests(_b, h, q, k, a, b):
        return a[q] % b[k] % 1009 < 400

    q, k = np.ogrid[:70, :300]
    for mask in (quotients, rests):
        expected = np.broadcast_to(mask(0, 0, q, k, *args), (*SHAPE, 70, 300))
        np.testing.assert_array_equal(seen(query, key, mask, args), expected)
    args[1][::7] = 0
    with np.errstate(divide="ignore"):
        expected = np.broadcast_to(rests(0, 0, q, k, *args), (*SHAPE, 70, 300))
    np.testing.assert_array_equal(seen(query, key, rests, args), expected)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_distances_of_integers(rng, dtype):
    """As far as 32 bits reach, and within less than 0."""
    query, key, _ = operands(rng, dtype, 70, 90, 8)
    a = rng.integers(-(2**30), 2**30, 90)
    b = a + rng.integers(-8, 9, 90)
    a[:2], b[:2] = 2**30 - 1, 1 - 2**30
    args = (a, np.clip(b, 1 - 2**30, 2**30 - 1), np.array([-3, 5, LARGE - 2, LARGE]))

    def mask(_b, h, q, k, a, b, most):
        return (abs(a[q] - b[k]) <= most[h]) | (q == k + 1)

    h, q, k = np.ogrid[: SHAPE[1], :70, :90]
    expected = np.broadcast_to(mask(0, h, q, k, *args), (*SHAPE, 70, 90))
    np.testing.assert_array_equal(seen(query, key, mask, args), expected)


@pytest.mark.parametrize("mask", [name for name in (MASKS | OPERATIONS) if name != "all"])
@np.errstate(all="ignore")
def test_tiles(rng, mask):
    """A tile is skipped only if nobody sees it, and counts as whole only if everybody does."""
    m, args = (MASKS | OPERATIONS)[mask]
    b, h, q, k = np.ogrid[:1, :2, :300, :300]
    seen = np.broadcast_to(m(b, h, q, k, *args), (1, 2, 300, 300))[0]
    for dtype in (F32, F64):
        query, key = (normal(rng, (2, 300, 8), dtype) for _ in range(2))
        options = {"mask_mod": m, "mask_args": args or None}
        biased = sdpa.attention_weights(query, key, stage="biased", **options)
        np.testing.assert_array_equal(np.isfinite(biased), seen)
        kinds, (rows, columns) = sdpa._core._pattern(query, key, **options)
        for head, i, j in np.ndindex(kinds.shape):
            tile = seen[head, i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            assert kinds[head, i, j] == 1 or tile.all() == tile.any() == (kinds[head, i, j] == 2)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_panels_of_any_width(rng, dtype):
    """What belongs to a query is there in every row of a tile; one vector of queries has most."""
    factors = rng.standard_normal(20).astype(dtype)
    options = {"score_mod": lambda s, b, h, q, k, u: s * u[q], "score_args": (factors,)}
    for n_q in range(1, 20):
        query, key, value = operands(rng, dtype, n_q, 90, 8)
        out = sdpa.attention(query, key, value, **options)
        expected = attend(query, key, value, options)
        np.testing.assert_allclose(out, expected, rtol=0, atol=bound(dtype))


def test_long_band(rng):
    """A band of a long sequence takes no array of pairs."""
    n = 20_000
    query, key, value = (normal(rng, (n, 8), F32) for _ in range(3))
    options = {"mask_mod": lambda b, h, q, k: abs(q - k) <= 32}
    np.testing.assert_allclose(
        sdpa.attention(query, key, value, **options),
        sdpa.attention(query, key, value, window=(32, 32)),
        atol=1e-5,
    )


REFUSED = {
    "score_args: expected None without score_mod": {"score_args": (np.zeros(3),)},
    "mask_args: expected None without mask_mod": {"mask_args": (np.zeros(3),)},
    "query_offset: expected positions from -2^31": {
        "score_mod": SCORES["identity"][0],
        "query_offset": 2**31,
    },
}


@pytest.mark.parametrize("text", REFUSED)
def test_refused(text):
    x = np.ones((4, 3))
    with pytest.raises(ValueError, match=text.replace("^", r"\^")):
        sdpa.attention(x, x, x, **REFUSED[text])


@pytest.mark.parametrize("name", ["score_mod", "score_args", "mask_mod", "mask_args"])
def test_mechanisms_refuse_functions(name):
    x, layer = np.ones((2, 4, 8)), sdpa.MultiHeadAttention(8, 2)
    given = {name: SCORES["identity"][0] if name.endswith("mod") else ()}
    calls = {
        "cosine_attention": lambda: sdpa.cosine_attention(x, x, x, **given),
        "bilinear_attention": lambda: sdpa.bilinear_attention(x, x, x, np.eye(8), **given),
        "shaw_attention": lambda: sdpa.shaw_attention(x, x, x, np.ones((3, 8)), **given),
        "MultiHeadAttention.forward": lambda: layer(x, **given),
    }
    for function, call in calls.items():
        text = rf"{function}\(\) got an unexpected keyword argument '{name}'; sdpa.attention has"
        with pytest.raises(TypeError, match=text):
            call()


@pytest.mark.parametrize("lse_dtype", [F32, F64])
def test_threads_pass_ranges_that_a_mask_hides(rng, lse_dtype):
    """A long head, of whose keys each unit sees some ranges and not others."""
    query, key, value, grad_out = rng.standard_normal((4, 1, 9000, 16), np.float32)
    own = {"mask_mod": lambda b, h, q, k: q // 1000 == k // 1000, "lse_dtype": lse_dtype}
    out, lse = sdpa.attention_forward(query, key, value, **own, workers=1)
    del own["lse_dtype"]
    given = grad_out, query, key, value, out, lse
    alone, *others = (sdpa.attention_backward(*given, **own, workers=n) for n in (1, 2, 3))
    for other in others:
        for a, b in zip(alone[:3], other[:3], strict=True):
            np.testing.assert_array_equal(a, b)
