"""Every option, alone and with others, in every function, on every ISA and dtype.

Compared with the oracle, which test_reference.py compares with PyTorch's autograd, within the
bounds of support/bounds.py.
"""

import itertools

import numpy as np
import pytest
from support.helpers import (
    ARGUMENTS,
    AttentionBounds,
    along,
    assert_within,
    check_attention,
    compute_type,
    differentiable,
    normal,
)

import sdpa
from sdpa import reference

pytestmark = pytest.mark.usefixtures("isa")

HEADS = 4
SHAPES = [(37, 150, 19, 7), (130, 67, 8, 33), (3, 300, 16, 5), (1, 2, 3, 2)]

# The shapes of array options; rows and columns stand for Lq and Lk.
MASKS = {
    "mask": "bhqk",
    "mask over rows": "bh1k",
    "mask over keys": "bhq1",
    "mask over heads": "b1qk",
    "mask over the batch": "hqk",
    "mask over all but keys": "k",
    "one mask for all": "1",
    "mask without axes": "",
}
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True, "query_offset": 5},
    "lower right": {"is_causal": "lower_right"},
    "window": {"window": (20, 3)},
    "window, causal, offsets": {"window": (40, 2), "is_causal": True, "query_offset": [9, -30]},
    "lengths": {"key_lengths": [2, 1]},
    "no keys": {"key_lengths": 0},
    "scale": {"scale": -0.4},
    "scale 0": {"scale": 0.0},
    "scale of each head": {"scale": (HEADS,)},
    "scale of each entry, softcap": {"scale": (2, 1), "softcap": 1.3},
    "scale without axes": {"scale": ()},
    "softcap": {"softcap": 1.3},
    "wide softcap": {"softcap": 300.0},
    "sinks": {"sinks": (HEADS,)},
    "sinks of each entry": {"sinks": (2, 1)},
    "ALiBi": {"alibi_slopes": (HEADS,), "query_offset": -3},
    "ALiBi of each entry": {"alibi_slopes": (2, HEADS), "is_causal": "lower_right"},
    "dropout": {"dropout_p": 0.3, "rng": 2**40 + 77},
    "boolean mask": {"attn_mask": "bool"},
    "where": {"where": "b1qk"},
    "where over keys": {"where": "hq1", "attn_mask": "bool"},
    "where, mask": {"where": "hqk", "attn_mask": "b1qk", "is_causal": True, "query_offset": 5},
    **{name: {"attn_mask": axes} for name, axes in MASKS.items()},
    "softcap, window": {"softcap": 2.0, "window": (10, 0)},
    "sinks, dropout": {"sinks": (HEADS,), "dropout_p": 0.5, "rng": 3},
    "all": {
        "softcap": 1.7,
        "sinks": (HEADS,),
        "alibi_slopes": (HEADS,),
        "attn_mask": "hqk",
        "dropout_p": 0.3,
        "rng": 5,
        "scale": (HEADS,),
        "where": "b11k",
        "key_lengths": [1, 2],
        "window": (60, 20),
        "is_causal": True,
        "query_offset": [0, 40],
    },
}


def problem(rng, dtype, name, n_q, n_k, d_k, d_v):
    """Arguments of check_attention: two batch entries that share a key, two query heads a head."""
    options = dict(OPTIONS[name])
    x = {
        "query": normal(rng, (2, HEADS, n_q, d_k), dtype),
        "key": normal(rng, (1, 2, n_k, d_k), dtype),
        "value": normal(rng, (2, 2, n_k, d_v), dtype),
        "enable_gqa": True,
    }
    for name, axes in options.items():
        if name in ("sinks", "alibi_slopes") or (name == "scale" and isinstance(axes, tuple)):
            options[name] = np.asarray(normal(rng, axes, dtype))
    if "key_lengths" in options:
        options["key_lengths"] = np.array(options["key_lengths"]) * n_k // 2
    sizes = {"b": 2, "h": HEADS, "q": n_q, "k": n_k, "1": 1}
    if "where" in options:
        options["where"] = rng.random([sizes[axis] for axis in options["where"]]) < 0.8
    axes = options.get("attn_mask")
    if axes == "bool":
        options["attn_mask"] = rng.random((2, 1, n_q, n_k)) < 0.6
    elif axes is not None:
        mask = np.asarray(normal(rng, [sizes[axis] for axis in axes], dtype))
        if mask.size > 1:
            mask[rng.random(mask.shape) < 0.1] = -np.inf
        options["attn_mask"] = mask
    arguments = [x["query"], x["key"], x["value"], *differentiable(options).values()]
    return x | options | {
        "tangents": [None if y is None else normal(rng, y.shape, y.dtype) for y in arguments],
        "grad_out": normal(rng, (2, HEADS, n_q, d_v), dtype),
        "grad_lse": normal(rng, (2, HEADS, n_q), compute_type(dtype)),
    }  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_every_function(rng, dtype, name):
    """Forward, stages of the weights, statistics, backward, forward mode, double backward."""
    for shape in SHAPES:
        check_attention(**problem(rng, dtype, name, *shape))


def second_order(x):
    """(function, its positional and other arguments) of forward mode, double backward, figures."""
    x = dict(x)
    tangents, g, g_lse = (x.pop(name) for name in ("tangents", "grad_out", "grad_lse"))
    operands = [x.pop(name) for name in ("query", "key", "value")]
    saved = sdpa.attention_forward(*operands, **x)
    needs = ("grad_out", *ARGUMENTS)
    undropped = {name: value for name, value in x.items() if name not in ("dropout_p", "rng")}
    return [
        (sdpa.attention_jvp, [*operands, *tangents[:3]],
         x | along(tangents, "{}_t")),
        (sdpa.attention_double_backward, [*tangents[:3], g, *operands, *saved],
         x | along(tangents, "gg_{}") | {"grad_lse": g_lse, "needs": needs}),
        (sdpa.attention_statistics, operands[:2], undropped),
    ]  # fmt: skip


def test_second_order_does_not_depend_on_workers(rng, dtype):
    x = problem(rng, dtype, "all", 200, 333, 24, 20)
    for function, arguments, options in second_order(x):
        one = [x.tobytes() for x in function(*arguments, **options, workers=1) if x is not None]
        for n in (2, 3, 5):
            again = [
                x.tobytes() for x in function(*arguments, **options, workers=n) if x is not None
            ]
            assert again == one, (function.__name__, n)


@pytest.mark.parametrize("which", ["grad_out", *ARGUMENTS])
def test_each_second_derivative_alone_equals_the_one_among_all(rng, dtype, which):
    _, (function, arguments, options), _ = second_order(problem(rng, dtype, "all", 40, 140, 8, 9))
    everything = function(*arguments, **options)
    alone = function(*arguments, **options | {"needs": [which]})
    np.testing.assert_array_equal(getattr(alone, which), getattr(everything, which))
    assert [name for name in alone._fields if getattr(alone, name) is not None] == [which]


def test_a_tangent_that_is_none_is_zero(rng, dtype):
    jvp, double, _ = second_order(problem(rng, dtype, "all", 20, 140, 8, 9))
    for first, (function, arguments, options) in ((3, jvp), (0, double)):
        for i in range(first, first + 3):
            zero = [*arguments]
            zero[i] = None
            none = function(*zero, **options)
            zero[i] = np.zeros_like(arguments[i])
            for a, b in zip(none, function(*zero, **options), strict=True):
                np.testing.assert_array_equal(a, b)
        for name in [*along(range(6), "{}_t"), *along(range(6), "gg_{}")]:
            if name in options:
                none = function(*arguments, **options | {name: None})
                zeros = function(*arguments, **options | {name: np.zeros_like(options[name])})
                for a, b in zip(none, zeros, strict=True):
                    np.testing.assert_array_equal(a, b)


def test_a_masked_row_with_a_sink(dtype):
    q, v = np.ones((2, 3, 4), dtype), np.full((2, 3, 4), np.nan, dtype)
    sinks = np.array([0.5, -2.0], dtype)
    out, lse = sdpa.attention_forward(q, q, v, sinks=sinks, key_lengths=0)
    assert (out == 0).all()
    assert (lse == np.array([[0.5], [-2.0]])).all()
    grads = sdpa.attention_backward(
        q, q, q, v, out, lse, sinks=sinks, key_lengths=0, needs=("query", "sinks"),
        grad_lse=np.ones((2, 3), lse.dtype),
    )  # fmt: skip
    assert (grads.query == 0).all()
    assert (grads.sinks == 3).all()  # lse is the sink


@pytest.mark.parametrize("cuts", [(0, 150), (0, 40, 150), (0, 0, 128, 129, 150)])
def test_merge_with_options(rng, dtype, cuts):
    """Keys a .. b-1 alone are a problem whose queries are a further back; one has the sink."""
    x = problem(rng, dtype, "all", 37, 150, 19, 7)
    q, k, v = (x[name] for name in ("query", "key", "value"))
    common = {"softcap": 1.7, "scale": x["scale"], "enable_gqa": True, "window": (60, 20)}
    common |= {"alibi_slopes": x["alibi_slopes"], "is_causal": True}
    mask, offset = x["attn_mask"], np.array([0, 40])
    own = {"query_offset": offset, "sinks": x["sinks"], "where": x["where"]}
    whole = (q, k, v, mask), common | own
    parts = []
    for a, b in itertools.pairwise(cuts):
        options = common | {"query_offset": offset - a}
        options |= {"sinks": x["sinks"]} if b == cuts[-1] else {}
        options["where"] = x["where"][..., a:b]
        parts.append(((q, k[..., a:b, :], v[..., a:b, :], mask[..., a:b]), options))
    got = sdpa.merge_attention(
        *zip(*[sdpa.attention_forward(*p, **o) for p, o in parts], strict=True)
    )
    exact = [reference.attention_forward(*p, **o) for p, o in parts]
    bounds = [AttentionBounds(*p, **o) for p, o in parts]
    expected = reference.attention_forward(*whole[0], **whole[1])
    merged = reference.merge_attention(*zip(*exact, strict=True))
    np.testing.assert_allclose(merged.out, expected.out, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(merged.lse, expected.lse, rtol=1e-12)
    # Weights of the parts are at most 1, sum to 1, and err by twice the error of lse.
    u = np.finfo(got.lse.dtype).eps
    seen = [np.isfinite(e.lse) for e in exact]
    e_lse = np.max([np.where(s, b.lse, 0) for s, b in zip(seen, bounds, strict=True)], axis=0)
    e_lse = e_lse + u * (8 + np.abs(expected.lse))
    e_out = 2 * np.max([b.out for b in bounds], axis=0)
    e_out += 4 * e_lse[..., None] * np.max([np.abs(e.out) for e in exact], axis=0)
    assert_within(got.out, expected.out, e_out, "out")
    assert_within(got.lse, expected.lse, e_lse, "lse")


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "is_causal": "lower_right"}], ids=str)
def test_statistics_at_65536_keys(rng, compute_dtype, options):
    """Against the matrix of scores itself, a block of queries at a time."""
    n_q, n_k, block = 20, 65536, 5
    q, k = normal(rng, (n_q, 16), compute_dtype), normal(rng, (n_k, 16), compute_dtype)
    options = options | {"scale": 1.0, "alibi_slopes": np.array([1e-4])}
    got = sdpa.attention_statistics(q, k, sinks=np.array([4.0], compute_dtype), **options)
    if options.get("is_causal"):
        options |= {"is_causal": True}
    for i in range(0, n_q, block):
        here = options | {"query_offset": i + (n_k - n_q if "is_causal" in options else 0)}
        x = (q[i : i + block], k)
        here["sinks"] = np.array([4.0])
        expected = reference.attention_statistics(*x, **here)
        bounds = AttentionBounds(*x, np.zeros((n_k, 0), compute_dtype), **here).statistics
        for name, theirs, bound in zip(got._fields, expected, bounds, strict=True):
            assert_within(getattr(got, name)[i : i + block], theirs, bound, name)


@pytest.mark.parametrize("size", [1e10, 1e30])
def test_statistics_of_huge_scores(rng, compute_dtype, size):
    """The largest score takes all the weight, whatever its rounding error."""
    q = normal(rng, (9, 20), compute_dtype) * compute_dtype.type(size)
    k = normal(rng, (70, 20), compute_dtype)
    got = sdpa.attention_statistics(q, k)
    scores = q.astype(np.float64) @ k.T.astype(np.float64) / 20**0.5
    np.testing.assert_allclose(got.lse, scores.max(-1), rtol=100 * np.finfo(compute_dtype).eps)
    for name, value in {"entropy": 0, "max_weight": 1, "sum_p2": 1, "sum_p3": 1}.items():
        np.testing.assert_array_equal(getattr(got, name), value, name)


def test_statistics_where_the_scale_makes_a_score_infinite(compute_dtype):
    """A score that scaling turns into -inf is hidden; the other key gives the result alone."""
    x = np.array([[-np.finfo(compute_dtype).max / 4], [1]], compute_dtype)
    got = sdpa.attention_statistics(x, np.array([[1], [0.5], [0]], compute_dtype), scale=10.0)
    assert got.max_weight[0] == 1
    assert got.entropy[0] == 0
    assert got.score_mean[0] == 0
    alone = sdpa.attention_statistics(x[1:], np.array([[1], [0.5], [0]], compute_dtype), scale=10.0)
    for both, one in zip(got, alone, strict=True):
        assert both[1] == one[0]


@pytest.mark.parametrize("n_k", [3, 70, 1000])
@pytest.mark.parametrize("power", [61, 63, 64, 100, 123])
def test_moments_of_scores_whose_squares_overflow(rng, isa, n_k, power):
    """Mean and variance are exact where the type holds them, else inf; NaN stays in its row."""
    q = np.array([[2.0**power, 0], [0, 1], [np.nan, 0], [2.0 ** (power - 1), 1]], np.float32)
    k = normal(rng, (n_k, 2), np.float32)
    k[-1] = 1
    for mask in (None, np.arange(n_k) != 1):
        got = sdpa.attention_statistics(q, k, attn_mask=mask, scale=1.0)
        exact = reference.attention_statistics(q, k, attn_mask=mask, scale=1.0)
        for name, theirs in exact._asdict().items():
            ours = getattr(got, name)
            with np.errstate(over="ignore"):
                theirs = theirs.astype(np.float32)
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-30, err_msg=name)


def test_moments_of_float64_scores_whose_squares_overflow():
    q, k = np.array([[1e200], [1e160], [1e153]]), np.array([[1.0], [-1], [0.5], [0.25]])
    got = sdpa.attention_statistics(q, k, scale=1.0)
    np.testing.assert_allclose(got.score_mean, [1.875e199, 1.875e159, 1.875e152], rtol=1e-14)
    np.testing.assert_allclose(got.score_var, [np.inf, np.inf, 0.54296875e306], rtol=1e-14)


@pytest.mark.parametrize("size", [1, 1e3, 2.0**100])
@pytest.mark.parametrize("n_k", [7, 33, 129, 300])
def test_the_variance_of_equal_scores_is_not_negative(compute_dtype, n_k, size):
    """Its square root is taken: of what rounding leaves below 0 it would be NaN."""
    q, k = np.linspace(-1, 1, 99, dtype=compute_dtype)[:, None], np.ones((n_k, 1), compute_dtype)
    got = sdpa.attention_statistics(q * compute_dtype.type(size), k, scale=1.1)
    assert (got.score_var >= 0).all()


def test_gradients_of_sinks_without_keys_and_widths(isa, compute_dtype):
    """The one gradient that there is needs memory of its own, which the widths do not give."""
    q, k = np.zeros((2, 3, 0), compute_dtype), np.zeros((2, 0, 0), compute_dtype)
    options = {"sinks": np.ones(2, compute_dtype), "scale": 1.0}
    check_attention(q, k, k, **options)
    out, lse = sdpa.attention_forward(q, k, k, **options)
    options |= {"grad_lse": np.ones_like(lse), "needs": ("sinks",)}
    assert (sdpa.attention_backward(out, q, k, k, out, lse, **options).sinks == 3).all()
    twice = sdpa.attention_double_backward(q, k, k, out, q, k, k, out, lse, **options)
    assert not twice.sinks.any()
