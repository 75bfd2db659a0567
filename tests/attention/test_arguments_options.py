"""Accepted arguments of options and derivatives of attention: seeds, tangents, empty axes."""

import numpy as np
import pytest
from support.calls import ATTENTION, F32, double_operands, message, ones, operands

import sdpa

EVERY = pytest.mark.parametrize("function", ATTENTION, ids=lambda f: f.__name__)


@pytest.mark.parametrize(
    "function",
    [sdpa.attention_backward, sdpa.attention_jvp, sdpa.attention_double_backward],
    ids=lambda f: f.__name__,
)
def test_the_largest_seed(function):
    function(**ATTENTION[function](), dropout_p=0.5, rng=2**64 - 1)


def test_attention_takes_a_generator():
    sdpa.attention(**operands(), dropout_p=0.5, rng=np.random.default_rng(0))


@pytest.mark.parametrize(
    ("function", "prefix", "suffix"),
    [(sdpa.attention_jvp, "", "_t"), (sdpa.attention_double_backward, "gg_", "")],
    ids=["jvp", "double_backward"],
)
def test_tangents(function, prefix, suffix):
    """None means zero; a given mask or sinks may have a tangent."""
    x = ATTENTION[function]()
    for primal in ("query", "key", "value"):
        function(**(x | {prefix + primal + suffix: None}))
    for primal, a in {"attn_mask": ones(4, 1, 7), "sinks": ones(4)}.items():
        function(**x, **{primal: a, prefix + primal + suffix: a})


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_a_tangent_left_out_is_zero(rng, name):
    x = {n: rng.standard_normal(a.shape) for n, a in operands().items()}
    tangent = rng.standard_normal(x[name].shape)
    got = sdpa.attention_jvp(*x.values(), **{f"{name}_t": tangent})
    others = [tangent if n == name else np.zeros_like(a) for n, a in x.items()]
    expected = sdpa.attention_jvp(*x.values(), *others)
    assert expected.out_t.any()
    np.testing.assert_allclose(got.out_t, expected.out_t, rtol=0, atol=1e-14)
    others = [tangent if n == name else None for n in x]
    np.testing.assert_array_equal(sdpa.attention_jvp(*x.values(), *others).out_t, got.out_t)
    assert not sdpa.attention_jvp(*x.values()).out_t.any()


def test_double_backward_computes_what_it_needs():
    x = double_operands() | {"attn_mask": ones(4, 1, 7), "sinks": ones(4), "scale": ones(4)}
    names = ("grad_out", "query", "key", "value", "attn_mask", "sinks", "scale")
    full = sdpa.attention_double_backward(**x, needs=names)
    for name in names:
        assert getattr(full, name).shape == x[name].shape
        alone = sdpa.attention_double_backward(**x, needs=[name])
        np.testing.assert_array_equal(getattr(alone, name), getattr(full, name))
        assert all(getattr(alone, other) is None for other in names if other != name)
    assert sdpa.attention_double_backward(**x, needs=()) == (None,) * 8


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes", "key_lengths", "query_offset"])
def test_out_that_overlaps_an_input_is_refused(name):
    """Integers too, although the call has a copy: they would be written."""
    out = np.zeros((2, 4, 5, 3), F32)
    expected = f"out: expected memory not shared with an input, got an array that overlaps {name}"
    integers = name in ("key_lengths", "query_offset")
    own = out.reshape(-1).view(np.int64)[:2] if integers else out.reshape(-1)[:4]
    for function in (sdpa.attention, sdpa.attention_forward):
        assert message(ValueError, function, **operands(), **{name: own}, out=out) == expected
    assert not out.any()


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_out_that_overlaps_the_ends_of_sequences_is_refused(name):
    out = np.zeros((2, 2, 3), F32)
    cu = out.reshape(-1).view(np.int64)[:2]
    cu[1] = 2
    x = dict.fromkeys(("query", "key", "value"), ones(2, 2, 3))
    ends = {"cu_seqlens_q": [0, 2], "cu_seqlens_k": [0, 2]} | {name: cu}
    expected = f"out: expected memory not shared with an input, got an array that overlaps {name}"
    assert message(ValueError, sdpa.attention, **x, **ends, out=out) == expected


def _read_by(place, row):
    """Options whose function reads the array, and the array's name."""
    if place == "score_args":
        options = {"score_mod": lambda s, b, h, q, k, t: s + t[k], "score_args": (row,)}
        return options, "t of score_mod"
    if place == "captured":
        return {"score_mod": lambda s, b, h, q, k: s + row[k]}, "row of score_mod"
    options = {"mask_mod": lambda b, h, q, k, m: m[k] > 0, "mask_args": (row,)}
    return options, "m of mask_mod"


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.int64, np.int8, bool])
@pytest.mark.parametrize("place", ["score_args", "captured", "mask_args"])
def test_out_that_overlaps_an_array_of_a_function_is_refused(place, dtype):
    """Of every type, although the call has a copy of some: they would be written."""
    out = np.zeros((2, 4, 5, 3), F32)
    row = out.reshape(-1).view(dtype)[:7]  # as long as the keys
    options, name = _read_by(place, row)
    expected = f"out: expected memory not shared with an input, got an array that overlaps {name}"
    for function in (sdpa.attention, sdpa.attention_forward):
        assert message(ValueError, function, **operands(), **options, out=out) == expected
    assert not out.any()


# ------------------------------------------------------------------- accepted


@EVERY
@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_numbers_per_head(function, name):
    """Any float dtype, a Python number and a 0-d array, which broadcast over heads."""
    x = ATTENTION[function]()
    want = function(**x, **{name: np.full((2, 4), 0.5, F32)})
    for a in (0.5, np.array(0.5), [0.5], [0.5] * 4, np.float16(0.5), np.full((2, 1), 0.5, F32)):
        got = function(**x, **{name: a})
        for g, w in zip(got, want, strict=True):
            np.testing.assert_array_equal(g, w)


def test_no_heads_of_queries_for_groups():
    x = ones(0, 5, 8), ones(2, 7, 8), ones(2, 7, 3)
    out, lse = sdpa.attention_forward(*x, enable_gqa=True)
    assert out.shape == (0, 5, 3)
    grads = sdpa.attention_backward(out, *x, out, lse, enable_gqa=True)
    for grad, like in zip(grads[:3], x, strict=True):
        np.testing.assert_array_equal(grad, np.zeros_like(like))


EMPTY = {
    "Lq": {"n_q": 0},
    "Lk": {"n_k": 0},
    "d_k": {"d_k": 0},
    "d_v": {"d_v": 0},
    "heads": {"heads": 0},
    "batch": {"batch": 0},
    "all": {"n_q": 0, "n_k": 0, "d_k": 0, "d_v": 0, "heads": 0, "batch": 0},
}


@pytest.mark.parametrize("case", EMPTY)
@pytest.mark.parametrize(
    "options",
    [{}, {"sinks": F32(0.25), "softcap": 2.0}],
    ids=str,
)
def test_empty(case, options):
    sizes = {"batch": 2, "heads": 4, "n_q": 5, "n_k": 7, "d_k": 8, "d_v": 3} | EMPTY[case]
    b, h, n_q, n_k, d_k, d_v = sizes.values()
    x = [ones(b, h, n_q, d_k), ones(b, h, n_k, d_k), ones(b, h, n_k, d_v)]
    out, lse = sdpa.attention_forward(*x, **options)
    got, out_t = sdpa.attention_jvp(*x, *x, **options)
    np.testing.assert_array_equal(got, out)
    assert out_t.shape == (b, h, n_q, d_v)
    grad_out = ones(b, h, n_q, d_v)
    second = sdpa.attention_double_backward(*x, grad_out, *x, out, lse, **options)
    for a, like in zip(second[:4], [grad_out, *x], strict=True):
        assert a.shape == like.shape
        assert np.isfinite(a).all()
    statistics = sdpa.attention_statistics(*x[:2], **options)
    assert all(a.shape == (b, h, n_q) for a in statistics)
    np.testing.assert_array_equal(statistics.lse, lse)
    if n_k == 0:
        assert (out_t == 0).all()
        assert all((a == 0).all() for a in second[:4])
        assert (lse == options.get("sinks", -np.inf)).all()
    elif d_k == 0 and not options:
        np.testing.assert_allclose(statistics.max_weight, 1 / n_k, rtol=1e-6)
