"""What options and derivatives of attention refuse: one test per input, message included."""

import gc
import sys

import numpy as np
import pytest
from calls import F32, FLOATS, backward_operands, message, ones, operands

import sdpa
from sdpa import _core

HEADS = "expected a shape that broadcasts to (..., heads), (2, 4), got "
SEED = "rng: expected an int from 0 to 2^64 - 1"
GENERATOR = np.random.default_rng(0)


def jvp_operands():
    x = operands()
    return x | {f"{name}_t": a for name, a in x.items()}


def double_operands():
    x = operands()
    return {f"gg_{name}": a for name, a in x.items()} | backward_operands()


def key_operands():
    x = operands()
    del x["value"]
    return x


FUNCTIONS = {
    sdpa.attention: operands,
    sdpa.attention_forward: operands,
    sdpa.attention_backward: backward_operands,
    sdpa.attention_jvp: jvp_operands,
    sdpa.attention_double_backward: double_operands,
    sdpa.attention_weights: key_operands,
    sdpa.attention_statistics: key_operands,
}
EVERY = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)

# (exception, message, options), refused by every function
REFUSED = {
    "scale nan": (ValueError, "scale: expected a finite number, got nan", {"scale": np.nan}),
    "scale inf": (ValueError, "scale: expected a finite number, got inf", {"scale": np.inf}),
    "scale text": (TypeError, "scale: expected a finite number, got 'x'", {"scale": "x"}),
    "softcap 0": (
        ValueError,
        "softcap: expected a number above 0, or None for no cap, got 0",
        {"softcap": 0},
    ),
    "softcap negative": (
        ValueError,
        "softcap: expected a number above 0, or None for no cap, got -1.5",
        {"softcap": -1.5},
    ),
    "softcap nan": (ValueError, "softcap: expected a finite number, got nan", {"softcap": np.nan}),
    "softcap inf": (ValueError, "softcap: expected a finite number, got inf", {"softcap": np.inf}),
    "softcap text": (TypeError, "softcap: expected a finite number, got '30'", {"softcap": "30"}),
    "dropout above 1": (
        ValueError,
        "dropout_p: expected a probability from 0 to 1, got 1.5",
        {"dropout_p": 1.5, "rng": 1},
    ),
    "dropout below 0": (
        ValueError,
        "dropout_p: expected a probability from 0 to 1, got -0.1",
        {"dropout_p": -0.1, "rng": 1},
    ),
    "dropout nan": (
        ValueError,
        "dropout_p: expected a finite number, got nan",
        {"dropout_p": np.nan},
    ),
    "dropout None": (
        TypeError,
        "dropout_p: expected a finite number, got None",
        {"dropout_p": None},
    ),
    "rng -1": (ValueError, f"{SEED}, got -1", {"rng": -1}),
    "rng 2^64": (ValueError, f"{SEED}, got {2**64}", {"rng": 2**64}),
    "sinks int": (TypeError, f"sinks: expected {FLOATS}, got int64", {"sinks": [1, 2, 3, 4]}),
    "sinks bool": (TypeError, f"sinks: expected {FLOATS}, got bool", {"sinks": True}),
    "sinks complex": (TypeError, f"sinks: expected {FLOATS}, got complex128", {"sinks": 1j}),
    "sinks longdouble": (
        TypeError,
        f"sinks: expected {FLOATS}, got {np.dtype(np.longdouble)}",
        {"sinks": np.longdouble(1)},
    ),
    "sinks text": (TypeError, f"sinks: expected {FLOATS}, got <U1", {"sinks": "x"}),
    "sinks heads": (ValueError, f"sinks: {HEADS}(3,)", {"sinks": ones(3)}),
    "sinks batch": (ValueError, f"sinks: {HEADS}(3, 4)", {"sinks": ones(3, 4)}),
    "sinks axes": (ValueError, f"sinks: {HEADS}(1, 2, 4)", {"sinks": ones(1, 2, 4)}),
    "alibi int": (
        TypeError,
        f"alibi_slopes: expected {FLOATS}, got int64",
        {"alibi_slopes": [1, 2, 3, 4]},
    ),
    "alibi object": (
        TypeError,
        f"alibi_slopes: expected {FLOATS}, got object",
        {"alibi_slopes": [None]},
    ),
    "alibi heads": (ValueError, f"alibi_slopes: {HEADS}(5,)", {"alibi_slopes": ones(5)}),
    "alibi axes": (ValueError, f"alibi_slopes: {HEADS}(4, 1, 1)", {"alibi_slopes": ones(4, 1, 1)}),
    "window": (
        ValueError,
        "window: expected bounds of at least 0, or None for no bound, got (-1, None)",
        {"window": (-1, None)},
    ),
    "two offsets": (
        ValueError,
        "query_offset: expected None with is_causal='lower_right', which sets the offset itself",
        {"query_offset": 2, "is_causal": "lower_right"},
    ),
    "alignment": (
        ValueError,
        "is_causal: expected False, True, 'upper_left' or 'lower_right', got 'lower_left'",
        {"is_causal": "lower_left"},
    ),
    "lengths": (
        ValueError,
        "key_lengths: expected integers from 0 to Lk = 7, got 8",
        {"key_lengths": [7, 8]},
    ),
    "integer mask": (
        TypeError,
        "attn_mask: expected bool (True = attend) or, to be added to the scores, float32, got "
        "int64; write attn_mask != 0 for a mask of ones and zeros, "
        "attn_mask.astype(query.dtype) for a bias",
        {"attn_mask": ones(5, 7, dtype=np.int64)},
    ),
    "workers": (
        ValueError,
        "workers: expected None, -1 (all CPUs) or at least 1, got 0",
        {"workers": 0},
    ),
    "key heads": (
        ValueError,
        "key: expected a number of heads that divides query's 4, got (2, 3, 7, 8)",
        {"key": ones(2, 3, 7, 8), "enable_gqa": True},
    ),
    "complex": (
        TypeError,
        f"query: expected {FLOATS}, got complex64",
        {"query": ones(5, 8, dtype=np.complex64)},
    ),
    "longdouble": (
        TypeError,
        f"key: expected {FLOATS}, got {np.dtype(np.longdouble)}",
        {"key": ones(7, 8, dtype=np.longdouble)},
    ),
    "object": (TypeError, f"query: expected {FLOATS}, got object", {"query": [[None]]}),
    "string": (TypeError, f"query: expected {FLOATS}, got <U3", {"query": [["abc"]]}),
}


@EVERY
@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, function):
    exception, expected, differences = REFUSED[case]
    assert message(exception, function, **(FUNCTIONS[function]() | differences)) == expected


@EVERY
@pytest.mark.parametrize("rng", [GENERATOR, np.random, 1.0, True, "1", [1]], ids=str)
def test_refused_rng(function, rng):
    """Only attention takes a Generator: what the others compute has to be repeated."""
    if function is sdpa.attention and rng is GENERATOR:
        sdpa.attention(**operands(), dropout_p=0.5, rng=rng)
        return
    kinds = ", a numpy.random.Generator or None" if function is sdpa.attention else " or None"
    got = message(TypeError, function, **FUNCTIONS[function](), rng=rng)
    assert got.startswith(f"{SEED}{kinds}, got ")


@pytest.mark.parametrize("drawn", [b"", b"1234567", b"123456789", 8])
def test_generator_that_returns_no_eight_bytes(drawn):
    class Generator:
        bit_generator = None

        def bytes(self, n):
            return drawn

    expected = f"rng: expected its method bytes(8) to return 8 bytes, got {drawn!r}"
    x = operands() | {"dropout_p": 0.5, "rng": Generator()}
    assert message(TypeError, sdpa.attention, **x) == expected


@EVERY
@pytest.mark.parametrize(
    ("wrong", "right"),
    [("sofcap", "softcap"), ("sink", "sinks"), ("alibi_slope", "alibi_slopes"), ("rngs", "rng")],
)
def test_unknown_keyword(function, wrong, right):
    expected = f"{function.__name__}() got an unknown argument '{wrong}'; did you mean '{right}'?"
    assert message(TypeError, function, **FUNCTIONS[function](), **{wrong: None}) == expected


@pytest.mark.parametrize(
    "function",
    [sdpa.attention_backward, sdpa.attention_jvp, sdpa.attention_double_backward],
    ids=lambda f: f.__name__,
)
def test_derivatives_need_the_seed(function):
    expected = "rng: expected the int of the forward call, since dropout_p is not 0, got None"
    assert message(ValueError, function, **FUNCTIONS[function](), dropout_p=0.5) == expected
    function(**FUNCTIONS[function](), dropout_p=0.5, rng=2**64 - 1)


def test_statistics_refuse_dropout():
    expected = "dropout_p: expected 0, since statistics are of the weights before dropout"
    x = key_operands()
    assert message(ValueError, sdpa.attention_statistics, **x, dropout_p=0.5, rng=1) == expected


@pytest.mark.parametrize(
    ("function", "prefix", "suffix"),
    [(sdpa.attention_jvp, "", "_t"), (sdpa.attention_double_backward, "gg_", "")],
    ids=["jvp", "double_backward"],
)
class TestTangents:
    def test_operands(self, function, prefix, suffix):
        x = FUNCTIONS[function]()
        for of in ("query", "key", "value"):
            name = prefix + of + suffix
            shape = x[of].shape
            wrong = x | {name: x[of][0]}
            expected = f"{name}: expected {of}'s shape {shape}, got {shape[1:]}"
            assert message(ValueError, function, **wrong) == expected
            wrong = x | {name: x[of].astype(float)}
            expected = f"{name}: expected {of}'s dtype float32, got float64"
            assert message(TypeError, function, **wrong) == expected
            function(**(x | {name: None}))  # zero

    @pytest.mark.parametrize(("of", "a"), [("attn_mask", ones(4, 1, 7)), ("sinks", ones(4))])
    def test_options(self, function, prefix, suffix, of, a):
        x = FUNCTIONS[function]()
        name = prefix + of + suffix
        expected = f"{name}: expected None, since {of} is not given"
        assert message(ValueError, function, **x, **{name: a}) == expected
        expected = f"{name}: expected {of}'s shape {a.shape}, got {a[:1].shape}"
        assert message(ValueError, function, **x, **{of: a, name: a[:1]}) == expected
        expected = f"{name}: expected {of}'s dtype float32, got float16"
        wrong = {of: a, name: a.astype(np.float16)}
        assert message(TypeError, function, **x, **wrong) == expected
        function(**x, **{of: a, name: a})

    def test_boolean_mask_has_none(self, function, prefix, suffix):
        name = f"{prefix}attn_mask{suffix}"
        x = FUNCTIONS[function]() | {"attn_mask": ones(5, 7, dtype=bool), name: ones(5, 7)}
        expected = f"{name}: expected None, since attn_mask is boolean"
        assert message(ValueError, function, **x) == expected


REFUSED_DOUBLE = {
    "grad_out": (
        ValueError,
        "grad_out: expected (2, 4, 5, 3), got (4, 5, 3)",
        {"grad_out": ones(4, 5, 3)},
    ),
    "lse": (
        TypeError,
        "lse: expected float32, got float64",
        {"lse": ones(2, 4, 5, dtype=float)},
    ),
    "grad_lse": (
        ValueError,
        "grad_lse: expected (2, 4, 5), got (5,)",
        {"grad_lse": ones(5)},
    ),
    "needs": (
        ValueError,
        "needs: expected names among 'query', 'key', 'value', 'attn_mask', 'sinks', 'grad_out', "
        "got 'bias'",
        {"needs": ["bias"]},
    ),
    "needs sinks": (
        ValueError,
        "needs: 'sinks' has a gradient only where sinks are given, got None",
        {"needs": ["sinks"]},
    ),
    "needs mask": (
        ValueError,
        "needs: 'attn_mask' has a gradient only where it is added to the scores, got None",
        {"needs": ["attn_mask"]},
    ),
}


@pytest.mark.parametrize("case", REFUSED_DOUBLE)
def test_refused_by_double_backward(case):
    exception, expected, differences = REFUSED_DOUBLE[case]
    x = double_operands() | differences
    assert message(exception, sdpa.attention_double_backward, **x) == expected


def test_needs_grad_out_is_of_double_backward_alone():
    expected = (
        "needs: expected names among 'query', 'key', 'value', 'attn_mask', 'sinks', got 'grad_out'"
    )
    x = backward_operands()
    assert message(ValueError, sdpa.attention_backward, **x, needs=["grad_out"]) == expected


def test_double_backward_computes_what_it_needs():
    x = double_operands() | {"attn_mask": ones(4, 1, 7), "sinks": ones(4)}
    names = ("grad_out", "query", "key", "value", "attn_mask", "sinks")
    full = sdpa.attention_double_backward(**x, needs=names)
    for name in names:
        assert getattr(full, name).shape == x[name].shape
        alone = sdpa.attention_double_backward(**x, needs=[name])
        np.testing.assert_array_equal(getattr(alone, name), getattr(full, name))
        assert all(getattr(alone, other) is None for other in names if other != name)
    assert sdpa.attention_double_backward(**x, needs=()) == (None,) * 6


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_out_that_overlaps_an_input_is_refused(name):
    out = ones(2, 4, 5, 3)
    expected = f"out: expected memory of its own, got an array that overlaps {name}"
    x = operands() | {name: out.reshape(-1)[:4]}
    for function in (sdpa.attention, sdpa.attention_forward):
        assert message(ValueError, function, **x, out=out) == expected
    assert (out == 1).all()


# ------------------------------------------------------------------- what is taken


@EVERY
@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_numbers_per_head(function, name):
    """Any float dtype, a Python number and a 0-d array, which broadcast over heads."""
    x = FUNCTIONS[function]()
    want = function(**x, **{name: np.full((2, 4), 0.5, F32)})
    for a in (0.5, np.array(0.5), [0.5], [0.5] * 4, np.float16(0.5), np.full((2, 1), 0.5, F32)):
        got = function(**x, **{name: a})
        for g, w in zip(got, want, strict=True):
            np.testing.assert_array_equal(g, w)


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


# ------------------------------------------------------------------- memory


@EVERY
def test_no_memory(function):
    x = FUNCTIONS[function]()
    needed = 0
    while True:
        _core._alloc_fail_after(needed)
        try:
            function(**x, sinks=0.5, softcap=3.0)
            break
        except MemoryError:
            needed += 1
        finally:
            _core._alloc_fail_after(-1)
    assert needed > 0
    function(**x)


@EVERY
def test_references(function):
    x = FUNCTIONS[function]() | {
        "attn_mask": ones(4, 5, 7),
        "sinks": ones(4),
        "alibi_slopes": ones(2, 4),
        "key_lengths": np.array([7, 6]),
        "rng": 2**63,
    }
    if function is sdpa.attention_jvp:
        x |= {"attn_mask_t": ones(4, 5, 7), "sinks_t": ones(4)}
    elif function is sdpa.attention_double_backward:
        x |= {"gg_attn_mask": ones(4, 5, 7), "gg_sinks": ones(4), "grad_lse": ones(2, 4, 5)}

    def count():
        gc.collect()  # exceptions and the frames in their tracebacks refer to one another
        return {name: sys.getrefcount(value) for name, value in x.items()}

    before = count()
    for _ in range(3):
        function(**x)
    assert count() == before
    for exception, _, differences in REFUSED.values():
        message(exception, function, **(x | differences))
    assert count() == before
