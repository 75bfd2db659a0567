"""Additive attention against its definition: sizes, dtypes, options, layouts, non-finite values."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.additive import ARGUMENTS, LARGEST, additive_bounds, check_additive, draw
from support.bounds import compute_type
from support.helpers import BFLOAT16, LAYOUTS, assert_same_bits, assert_within, normal

import sdpa
from sdpa import reference

# (Lq, Lk, d_q, d_k, d_v, h): edges of vectors, of a tile of keys, of blocks of 48, 96 and 128.
SHAPES = [
    (1, 1, 1, 1, 1, 1),
    (5, 7, 3, 4, 2, 6),
    (16, 4, 8, 8, 8, 8),
    (49, 130, 5, 9, 17, 3),
    (97, 129, 16, 49, 8, 15),
]
EMPTY = [
    (0, 3, 2, 2, 2, 2),
    (3, 0, 2, 2, 2, 2),
    (3, 3, 0, 0, 2, 2),
    (3, 3, 2, 2, 0, 2),
    (3, 3, 2, 2, 2, 0),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(isa, dtype, rng, shape):
    x = draw(rng, dtype, *shape)
    check_additive(x, normal(rng, (2, shape[0], shape[4]), dtype))


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_empty_axes(rng, shape):
    x = draw(rng, np.float32, *shape)
    check_additive(x, normal(rng, (2, shape[0], shape[4]), np.float32))


@pytest.mark.parametrize("std", [0.01, 4.0, 30.0])
def test_projections_of_any_size(isa, compute_dtype, rng, std):
    """At 30 some exceed the range of float32's exponentials, with opposite signs."""
    x = draw(rng, compute_dtype, 50, 70, 8, 8, 4, 6, std=std)
    if std == 30:
        x["w_query"] *= LARGEST[compute_dtype.type] / 43
        x["w_key"] *= LARGEST[compute_dtype.type] / 43
        a = x["query"].astype(float) @ x["w_query"]
        assert (abs(a) > LARGEST[compute_dtype.type]).mean() > 0.05
    check_additive(x, normal(rng, (2, 50, 4), compute_dtype))


OPTIONS = {
    "mask": lambda rng, t: {"attn_mask": rng.random((2, 40, 60)) < 0.5},
    "mask of some rows": lambda rng, t: {"attn_mask": np.tile(np.arange(40)[:, None] > 32, 60)},
    "bias": lambda rng, t: {"attn_mask": normal(rng, (40, 60), t)},
    "bias of rows": lambda rng, t: {"attn_mask": normal(rng, (40, 1), t)},
    "bias of keys": lambda rng, t: {"attn_mask": normal(rng, (60,), t)},
    "causal": lambda rng, t: {"is_causal": True, "query_offset": 3},
    "lower right": lambda rng, t: {"is_causal": "lower_right"},
    "window": lambda rng, t: {"window": (5, 2)},
    "scale": lambda rng, t: {"scale": -0.3},
    "scale 0": lambda rng, t: {"scale": 0.0},
    "softcap": lambda rng, t: {"softcap": 1.5, "scale": 2.0},
    "sinks": lambda rng, t: {"sinks": normal(rng, (2,), t)},
    "alibi": lambda rng, t: {"alibi_slopes": np.array([0.5, 0.25])},
    "lengths": lambda rng, t: {"key_lengths": 33},
    "nothing visible": lambda rng, t: {"key_lengths": 0},
    "dropout": lambda rng, t: {"dropout_p": 0.3, "rng": 7},
    "all": lambda rng, t: {
        "attn_mask": normal(rng, (40, 60), t), "is_causal": True, "query_offset": 20,
        "sinks": normal(rng, (2,), t), "softcap": 3.0, "scale": -0.7, "window": (30, 3),
        "key_lengths": 50,
    },
}  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
def test_options(isa, compute_dtype, rng, option):
    x = draw(rng, compute_dtype, 40, 60, 6, 8, 5, 7)
    grad_lse = normal(rng, (2, 40), compute_dtype)
    check_additive(
        x,
        normal(rng, (2, 40, 5), compute_dtype),
        grad_lse=grad_lse,
        **OPTIONS[option](rng, compute_dtype),
    )


def test_narrow_types_with_options(rng):
    for dtype in (np.dtype(np.float16), BFLOAT16):
        x = draw(rng, dtype, 40, 60, 6, 8, 5, 7, lead=(2, 2))
        x["query"] = x["query"][:1]
        g = normal(rng, (2, 2, 40, 5), dtype)
        mask = normal(rng, (40, 60), dtype)
        check_additive(x, g, attn_mask=mask, is_causal=True, sinks=normal(rng, (2,), np.float32))


BROADCASTS = [
    ((3, 1, 4, 5), (1, 2, 6, 5), (6, 3), (3, 2)),
    ((4, 5), (2, 3, 6, 5), (3, 6, 3), (2, 3)),
    ((2, 3, 4, 5), (6, 5), (1, 3, 6, 3), (2, 3)),
    ((1, 1, 4, 5), (1, 1, 6, 5), (2, 2, 6, 3), (2, 2)),
]


@pytest.mark.parametrize(("q", "k", "v", "lead"), BROADCASTS, ids=str)
def test_broadcasting(dtype, rng, q, k, v, lead):
    x = draw(rng, dtype, 4, 6, 5, 5, 3, 4)
    for name, shape in zip(ARGUMENTS, (q, k, v), strict=False):
        x[name] = normal(rng, shape, dtype)
    check_additive(x, normal(rng, (*lead, 4, 3), dtype))


def test_broadcast_views_are_arguments_of_their_own(rng):
    """A view of stride 0 from np.broadcast_to gets a gradient for each copy."""
    x = draw(rng, np.float32, 4, 6, 5, 5, 3, 4)
    x["query"] = np.broadcast_to(x["query"][:1], (2, 4, 5))
    x["key"] = np.broadcast_to(x["key"][:, :1], (2, 6, 5))
    x["w_key"] = np.broadcast_to(x["w_key"][:1], (5, 4))
    x["w_score"] = np.broadcast_to(x["w_score"][:1], (4,))
    check_additive(x, normal(rng, (2, 4, 3), np.float32))


def test_grouped_heads(compute_dtype, rng):
    x = draw(rng, compute_dtype, 20, 30, 6, 6, 5, 8, lead=(2, 2))
    x["query"] = normal(rng, (2, 6, 20, 6), compute_dtype)
    check_additive(x, normal(rng, (2, 6, 20, 5), compute_dtype), enable_gqa=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(dtype, rng, layout):
    """Strides, alignment and byte order of operands and weights do not change a bit."""
    x = draw(rng, dtype, 19, 33, 6, 9, 5, 7)
    g = normal(rng, (2, 19, 5), dtype)
    out, lse = sdpa.additive_attention_forward(*x.values())
    grads = sdpa.additive_attention_backward(g, *x.values(), out, lse)
    vectors = ("w_score", "bias")
    y = {
        n: LAYOUTS[layout](a.reshape(1, -1))[0] if n in vectors else LAYOUTS[layout](a)
        for n, a in x.items()
    }
    before = {name: a.tobytes() for name, a in y.items()}
    got = sdpa.additive_attention_forward(*y.values())
    assert_same_bits(got.out, out)
    assert_same_bits(got.lse, lse)
    same = sdpa.additive_attention_backward(LAYOUTS[layout](g), *y.values(), *got)
    for a, b in zip(same[:7], grads[:7], strict=True):
        assert_same_bits(a, b)
    assert before == {name: a.tobytes() for name, a in y.items()}


def test_out_argument(rng):
    x = draw(rng, np.float32, 19, 33, 6, 9, 5, 7)
    big = np.full((2, 19, 10), np.nan, np.float32)
    assert sdpa.additive_attention(*x.values(), out=big[..., ::2]) is not None
    assert_same_bits(np.ascontiguousarray(big[..., ::2]), sdpa.additive_attention(*x.values()))
    assert np.isnan(big[..., 1::2]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_masked_pairs_do_not_matter(isa, compute_dtype, rng, bad):
    """NaN and Inf in masked pairs are skipped and change results only by rounding."""
    x = draw(rng, compute_dtype, 50, 60, 6, 8, 5, 7)
    g = normal(rng, (2, 50, 5), compute_dtype)
    mask = rng.random((50, 60)) < 0.5
    mask[:, [3, 59]] = False
    mask[[7, 48]] = False
    clean = check_additive(x, g, attn_mask=mask)
    bounds = additive_bounds(x, g, attn_mask=mask)
    clean_grads = sdpa.additive_attention_backward(g, *x.values(), *clean, attn_mask=mask)
    x["key"][..., [3, 59], 2] = bad
    x["value"][..., [3, 59], 1] = bad
    x["query"][..., [7, 48], 0] = bad
    g[..., [7, 48], 3] = bad
    spoilt = sdpa.additive_attention_forward(*x.values(), attn_mask=mask)
    assert_within(spoilt.out, clean.out, 2 * bounds.out, "out")
    assert_same_bits(spoilt.lse, clean.lse)
    # Gradients of the weights sum over all tokens: an unseen one adds nothing.
    grads = sdpa.additive_attention_backward(g, *x.values(), *spoilt, attn_mask=mask)
    for name, true in zip(grads._fields[:7], clean_grads[:7], strict=True):
        assert_within(getattr(grads, name), true, 2 * getattr(bounds, name), name)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_hidden_elements_of_a_bias_do_not_matter(isa, compute_dtype, rng, bad):
    """50 queries do not fill their vectors, whose other lanes see pairs that no query sees."""
    x = draw(rng, compute_dtype, 50, 60, 6, 8, 5, 7)
    g = normal(rng, (2, 50, 5), compute_dtype)
    bias = normal(rng, (50, 60), compute_dtype)
    where = rng.random((50, 60)) < 0.5
    spoilt = np.where(where & np.tri(50, 60, dtype=bool), bias, compute_dtype.type(bad))
    results = []
    for mask in (bias, spoilt):
        options = {"attn_mask": mask, "where": where, "is_causal": True}
        saved = sdpa.additive_attention_forward(*x.values(), **options)
        grads = sdpa.additive_attention_backward(g, *x.values(), *saved, **options)
        results.append((*saved, *grads[:7]))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


def test_nan_propagates(isa, compute_dtype, rng):
    x = draw(rng, compute_dtype, 20, 30, 6, 8, 5, 7)
    x["query"][0, 4, 1] = np.nan
    x["key"][1, 29, 0] = np.nan
    out = sdpa.additive_attention(*x.values())
    nan = np.zeros((2, 20), bool)
    nan[0, 4] = nan[1] = True
    np.testing.assert_array_equal(np.isnan(out), np.broadcast_to(nan[..., None], out.shape))


def test_rows_do_not_depend_on_one_another(isa, compute_dtype, rng):
    """Rows keep their bits even where the exponentials of another query overflow."""
    x = draw(rng, compute_dtype, 50, 140, 6, 8, 5, 7)
    out = sdpa.additive_attention(*x.values())
    x["query"][:, 3] *= 1000
    other = sdpa.additive_attention(*x.values())
    rows = np.arange(50) != 3
    assert_same_bits(other[:, rows], out[:, rows])
    assert not np.array_equal(other[:, 3], out[:, 3])


@pytest.mark.parametrize("causal", [False, True])
def test_bits_do_not_depend_on_workers(dtype, rng, causal):
    x = draw(rng, dtype, 300, 260, 16, 16, 16, 32)
    g = normal(rng, (2, 300, 16), dtype)
    results = []
    for workers in (1, 2, 3, 7):
        options = {"workers": workers, "is_causal": causal}
        out, lse = sdpa.additive_attention_forward(*x.values(), **options)
        grads = sdpa.additive_attention_backward(g, *x.values(), out, lse, **options)
        results.append((out, lse, *grads[:7]))
    for result in results[1:]:
        for a, b in zip(result, results[0], strict=True):
            assert_same_bits(a, b)


@pytest.mark.usefixtures("isa")
def test_needs(compute_dtype, rng):
    x = draw(rng, compute_dtype, 20, 30, 6, 8, 5, 7)
    g = normal(rng, (2, 20, 5), compute_dtype)
    fwd = sdpa.additive_attention_forward(*x.values())
    full = sdpa.additive_attention_backward(g, *x.values(), *fwd)
    for name in ARGUMENTS[:7]:
        one = sdpa.additive_attention_backward(g, *x.values(), *fwd, needs=(name,))
        assert_same_bits(getattr(one, name), getattr(full, name))
        assert sum(y is not None for y in one) == 1
    none = sdpa.additive_attention_backward(g, *x.values(), *fwd, needs=())
    assert all(y is None for y in none)


@settings(max_examples=60)
@given(data=st.data())
def test_any_combination(isa, data):
    """Sizes, broadcasting, dtypes and options drawn together."""
    draw_from = data.draw
    rng = np.random.default_rng(draw_from(st.integers(0, 2**32 - 1)))
    dtype = draw_from(
        st.sampled_from(
            [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]
        )
    )
    sizes = st.sampled_from([1, 2, 3, 7, 8, 9, 17])
    n_q, n_k = (draw_from(st.sampled_from([1, 2, 5, 8, 31, 50, 100, 129])) for _ in range(2))
    d_q, d_k, d_v, h = (draw_from(sizes) for _ in range(4))
    lead = draw_from(st.sampled_from([(), (1,), (2,), (2, 2)]))
    std = draw_from(st.sampled_from([0.1, 1.0, 5.0, 25.0]))
    x = draw(
        rng, dtype, n_q, n_k, d_q, d_k, d_v, h, lead=lead, std=std, bias=draw_from(st.booleans())
    )
    options = {}
    if draw_from(st.booleans()):
        options["scale"] = draw_from(st.sampled_from([-1.0, 0.1, 2.0]))
    if draw_from(st.booleans()):
        options["is_causal"] = draw_from(st.sampled_from([True, "lower_right"]))
    if draw_from(st.booleans()):
        options["window"] = draw_from(st.sampled_from([(3, None), (None, 4), (20, 10)]))
    if draw_from(st.booleans()):
        options["softcap"] = 2.0
    if draw_from(st.booleans()):
        options["sinks"] = normal(rng, lead[-1:], np.float32)
    if draw_from(st.booleans()):
        options["key_lengths"] = draw_from(st.integers(0, n_k))
    kind = draw_from(st.sampled_from(["none", "bool", "bias"]))
    if kind != "none":
        keep = rng.random((n_q, n_k)) < 0.7
        options["attn_mask"] = (
            keep
            if kind == "bool"
            else np.where(keep, normal(rng, (n_q, n_k), dtype), -np.inf).astype(dtype)
        )
    g = normal(rng, (*lead, n_q, d_v), dtype) if draw_from(st.booleans()) else None
    check_additive(x, g, **options)


def test_gradients_by_finite_differences(rng):
    """Central differences of the oracle in float64: this tests the oracle's formulas."""
    x = draw(rng, np.float64, 4, 5, 3, 2, 3, 3)
    g = normal(rng, (2, 4, 3), np.float64)
    mask = normal(rng, (4, 5), np.float64)
    options = {"attn_mask": mask, "softcap": 2.0, "scale": 1.3}
    fwd = reference.additive_attention_forward(*x.values(), **options)
    grads = reference.additive_attention_backward(
        g, *x.values(), *fwd, needs=(*ARGUMENTS[:7], "attn_mask"), **options
    )
    step = 1e-5
    for name in (*ARGUMENTS[:7], "attn_mask"):
        at = x | {"attn_mask": mask}

        def loss(direction, at=at, name=name):
            y = at | {name: at[name] + direction}
            rest = options | {"attn_mask": y.pop("attn_mask")}
            return (g * reference.additive_attention(*y.values(), **rest)).sum()

        direction = rng.standard_normal(at[name].shape)
        slope = (loss(step * direction) - loss(-step * direction)) / (2 * step)
        # Truncation is of the order step^2, rounding of the order of 1e-16 / step.
        assert slope == pytest.approx((direction * getattr(grads, name)).sum(), abs=1e-7)


def test_torch_gradcheck(torch, isa):
    """PyTorch's own finite differences, through an autograd.Function."""

    class Additive(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            ctx.arrays = [a.detach().numpy() for a in args]
            ctx.result = sdpa.additive_attention_forward(*ctx.arrays, is_causal=True)
            return tuple(map(torch.from_numpy, ctx.result))

        @staticmethod
        def backward(ctx, grad_out, grad_lse):
            grads = sdpa.additive_attention_backward(
                grad_out.numpy(),
                *ctx.arrays,
                *ctx.result,
                grad_lse=grad_lse.numpy(),
                is_causal=True,
            )
            return tuple(map(torch.from_numpy, grads[:7]))

    rng = np.random.default_rng(3)
    x = draw(rng, np.float64, 5, 6, 3, 2, 3, 4)
    args = [torch.tensor(a, requires_grad=True) for a in x.values()]
    assert torch.autograd.gradcheck(Additive.apply, args)


def test_compute_type_of_lse(dtype, rng):
    x = draw(rng, dtype, 3, 4, 2, 2, 2, 2)
    assert sdpa.additive_attention_forward(*x.values()).lse.dtype == compute_type(dtype)


def test_many_channels(rng):
    """A line of sums is longer than a block of the gradients of weights."""
    x = draw(rng, np.float32, 2, 3, 2, 2, 2, 1200)
    check_additive(x, normal(rng, (2, 2, 2), np.float32))
