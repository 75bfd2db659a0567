"""How attention is called: `out`, names and positions, things that are not arrays, `needs`.

tests/refusals lists the arguments that are refused.
"""

import inspect

import numpy as np
import pytest
from support.calls import CALLS, F32, backward_operands, message, ones, operands
from support.helpers import BFLOAT16, compute_type, without_memory
from support.protocols import OnDevice

import sdpa
from sdpa import _core


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask"])
def test_out_that_overlaps_an_input_is_refused(name):
    buffer = np.ones(200, F32)
    out = buffer[99:].reshape(-1)[:30].reshape(5, 6)
    x = {"query": ones(5, 6), "key": ones(5, 6), "value": ones(5, 6), "attn_mask": ones(5, 5)}
    size = x[name].size
    x[name] = buffer[100 - size :][:size].reshape(x[name].shape)  # its last element is out's first
    expected = f"out: expected memory not shared with an input, got an array that overlaps {name}"
    assert message(ValueError, sdpa.attention, **x, out=out) == expected
    x[name] = buffer[99 - size :][:size].reshape(x[name].shape)
    sdpa.attention(**x, out=out)


# ------------------------------------------------------------------- the call itself


def python_function(function):
    """A Python function with the name and the signature of a compiled one."""
    namespace = {}
    exec(f"def {function.__name__}{inspect.signature(function)}: pass", namespace)
    return namespace[function.__name__]


# (positional arguments, keywords, message of attention)
MISUSED = {
    "one missing": (2, {}, "missing 1 required positional argument: 'value'"),
    "two missing": (1, {}, "missing 2 required positional arguments: 'key' and 'value'"),
    "three missing": (
        0,
        {"scale": None},
        "missing 3 required positional arguments: 'query', 'key', and 'value'",
    ),
    "given twice": (3, {"key": None}, "got multiple values for argument 'key'"),
    "given twice and too many": (7, {"key": None}, "got multiple values for argument 'key'"),
    "too many": (7, {}, "takes from 3 to 6 positional arguments but 7 were given"),
    "too many and a keyword": (
        8,
        {"scale": None},
        "takes from 3 to 6 positional arguments but 8 positional arguments "
        "(and 1 keyword-only argument) were given",
    ),
    "too many and two keywords": (
        7,
        {"scale": None, "enable_gqa": None},
        "takes from 3 to 6 positional arguments but 7 positional arguments "
        "(and 2 keyword-only arguments) were given",
    ),
    "unexpected": (1, {"nonsense": None}, "got an unexpected keyword argument 'nonsense'"),
    "unexpected and too many": (7, {"zzz": None}, "got an unexpected keyword argument 'zzz'"),
}


@pytest.mark.parametrize("case", MISUSED)
def test_misuse_gets_the_words_of_cpython(case):
    n, keywords, expected = MISUSED[case]
    assert message(TypeError, sdpa.attention, *[None] * n, **keywords) == f"attention() {expected}"
    for function in (sdpa.attention, sdpa.scaled_dot_product_attention):
        words = message(TypeError, python_function(function), *[None] * n, **keywords)
        assert message(TypeError, function, *[None] * n, **keywords) == words


@pytest.mark.parametrize("function", [sdpa.merge_attention, sdpa.set_num_threads])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 4])
def test_misuse_of_functions_without_options(function, n):
    if n == len(inspect.signature(function).parameters):
        return
    words = message(TypeError, python_function(function), *[None] * n)
    assert message(TypeError, function, *[None] * n) == words


def test_keywords_need_not_be_interned():
    x = {"".join(list(name)): a for name, a in operands().items()}
    np.testing.assert_array_equal(sdpa.attention(**x), sdpa.attention(*x.values()))


def test_argument_that_is_no_array():
    class Broken:
        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("on another device")

    x = operands() | {"key": Broken()}
    got = message(TypeError, sdpa.attention, **x)
    assert got.startswith("key: expected an array, got <class ")
    assert got.endswith("which NumPy cannot take: on another device")
    with pytest.raises(TypeError) as caught:
        sdpa.attention(**x)
    assert isinstance(caught.value.__cause__, RuntimeError)
    ragged = message(TypeError, sdpa.attention, **(operands() | {"value": [[1.0], [1.0, 2.0]]}))
    assert ragged.startswith(
        "value: expected an array, got <class 'list'>, which NumPy cannot take"
    )


def test_interruption_in_a_conversion_passes():
    class Interrupted:
        def __array__(self, dtype=None, copy=None):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sdpa.attention(Interrupted(), ones(7, 8), ones(7, 3))


def test_nothing_is_written_without_memory():
    out = np.full((2, 4, 5, 3), 7, F32)
    _core._alloc_fail_after(0)
    try:
        message(MemoryError, sdpa.attention, **operands(), out=out)
    finally:
        _core._alloc_fail_after(-1)
    assert (out == 7).all()


# ------------------------------------------------------------------- backward


def test_lse_dtype_follows_the_operands():
    for dtype in (np.float16, BFLOAT16, np.float64):
        x = {name: a.astype(dtype) for name, a in operands().items()}
        out, lse = sdpa.attention_forward(**x)
        assert out.dtype == dtype
        assert lse.dtype == compute_type(dtype)
    assert sdpa.attention_forward(**operands(), lse_dtype=np.float32).lse.dtype == np.float32
    expected = "lse: expected float64, got float32; write lse.astype(query.dtype)"
    call = (out, *x.values(), out, lse.astype(np.float32))
    assert message(TypeError, sdpa.attention_backward, *call) == expected


def test_needs():
    x = backward_operands() | {"attn_mask": ones(4, 1, 7)}
    full = sdpa.attention_backward(**x, needs=("query", "key", "value", "attn_mask"))
    assert full._fields == ("query", "key", "value", "attn_mask", "sinks", "scale", "score_args")
    assert full.sinks is None
    for name in ("query", "key", "value", "attn_mask"):
        assert getattr(full, name).shape == x[name].shape
        alone = sdpa.attention_backward(**x, needs=iter([name, name]))
        np.testing.assert_array_equal(getattr(alone, name), getattr(full, name))
        assert all(getattr(alone, other) is None for other in full._fields if other != name)
    assert sdpa.attention_backward(**x, needs=()) == (None,) * 7
    assert sdpa.attention_backward(**x).attn_mask is None


@pytest.mark.parametrize(
    "scale",
    [0.5, 1, np.float32(0.5), np.array(0.5), np.int64(1), np.longdouble(0.5)],
    ids=repr,
)
def test_derivatives_of_a_scale_that_is_a_number(rng, scale):
    """It is an array without axes, of its own type if that has gradients."""
    q, k, v, g = (rng.standard_normal((4, 5, 8)).astype(np.float32) for _ in range(4))
    x = (g, q, k, v, *sdpa.attention_forward(q, k, v, scale=scale))
    of_heads = np.full(4, scale, float)
    found = sdpa.attention_backward(*x, scale=scale, needs=("query", "scale")).scale
    dtype = found.dtype
    assert found.shape == ()
    assert dtype == (np.float32 if isinstance(scale, np.float32) else np.float64)
    expected = sdpa.attention_backward(*x, scale=of_heads, needs=("scale",)).scale
    np.testing.assert_allclose(found, expected.sum(), rtol=1e-5)

    def moved(scale, scale_t):
        return sdpa.attention_jvp(q, k, v, None, None, None, scale=scale, scale_t=scale_t).out_t

    expected = moved(of_heads, np.ones(4))
    np.testing.assert_allclose(moved(scale, np.ones((), dtype)), expected, rtol=1e-5, atol=1e-6)
    assert abs(expected).max() > 0.01


class Broken:
    """A number that cannot be had, by an exception that says so."""

    def __index__(self):
        raise RuntimeError("broken")

    __float__ = __index__
    bit_generator = None

    def bytes(self, n):
        raise RuntimeError("broken")


class BrokenMembers:
    """Neither an array nor a generator, for all that one can know."""

    def __getattr__(self, name):
        raise RuntimeError("broken")


class BrokenType:
    @property
    def dtype(self):
        raise RuntimeError("broken")


class BrokenPair(tuple):
    """A pair without the member `at`."""

    at = 0

    def __getitem__(self, i):
        if i == self.at:
            raise RuntimeError("broken")
        return super().__getitem__(i)


@pytest.mark.parametrize(
    "options",
    [
        {"scale": Broken()},
        {"workers": Broken()},
        {"window": BrokenPair((1, 1))},
        {"window": type("Second", (BrokenPair,), {"at": 1})((1, 1)), "is_causal": True},
        {"rng": Broken(), "dropout_p": 0.5},
        {"rng": BrokenMembers()},
        {"scale": BrokenMembers(), "workers": 1},
    ],
    ids=lambda options: "-".join(options),
)
def test_an_exception_of_an_argument_passes(options):
    with pytest.raises(RuntimeError, match="broken"):
        sdpa.attention(**(operands() | options))


def test_an_exception_of_chosen_queries_passes():
    with pytest.raises(RuntimeError, match="broken"):
        sdpa.attention_weights(**CALLS[sdpa.attention_weights](), queries=slice(Broken(), None))


def test_an_exception_of_a_dtype_passes_where_numpy_lets_it():
    """NumPy 2.0 puts a TypeError of its own in its place, which is told with the option's name."""
    with pytest.raises((RuntimeError, TypeError)) as of_numpy:
        np.dtype(BrokenType())
    passes = of_numpy.type is RuntimeError
    with pytest.raises(of_numpy.type, match="broken" if passes else "^lse_dtype: "):
        sdpa.attention_forward(**CALLS[sdpa.attention_forward](), lse_dtype=BrokenType())


def test_an_interruption_in_a_class_passes():
    class Meta(type):
        @property
        def __module__(cls):
            raise KeyboardInterrupt

    class Interrupted(metaclass=Meta):
        pass

    with pytest.raises(KeyboardInterrupt):
        sdpa.attention(Interrupted(), ones(7, 8), ones(7, 3))


def test_an_axis_that_raises():
    with pytest.raises(RuntimeError, match="broken"):
        sdpa.softmax(np.ones(3), axis=Broken())


def test_needs_that_raise():
    def needs():
        raise RuntimeError("broken")
        yield

    x = np.ones((3, 4), F32)
    lse = np.zeros(3, F32)
    with pytest.raises(RuntimeError, match="broken"):
        sdpa.attention_backward(x, x, x, x, x, lse, needs=needs())


def test_workers_far_below_zero():
    text = message(ValueError, sdpa.attention, **operands(), workers=-(10**30))
    assert text.startswith("workers: expected None, -1 (all CPUs) or at least 1, got -1000")


def test_no_key_heads():
    x, none = np.ones((3, 2, 4), F32), np.ones((0, 2, 4), F32)
    text = "key: expected leading axes that broadcast with (3,), got (0,)"
    assert message(ValueError, sdpa.attention, x, none, none) == text
    cu = {"cu_seqlens_q": [0, 2], "cu_seqlens_k": [0, 2]}
    text = message(ValueError, sdpa.attention, *(a.swapaxes(0, 1) for a in (x, none, none)), **cu)
    assert text.startswith("key: expected 1 or 3 heads, got")


def test_a_tangent_that_is_no_array():
    x = np.ones((3, 4), F32)
    text = message(TypeError, sdpa.attention_jvp, x, x, x, OnDevice(2, 1), x, x)
    assert text.startswith("query_t: expected an array on the CPU")


def test_functions_without_their_arguments():
    for function in (
        sdpa.additive_attention,
        sdpa.additive_attention_forward,
        sdpa.additive_attention_backward,
        sdpa.attention_double_backward,
    ):
        with pytest.raises(TypeError, match="missing"):
            function()


X, NO_KEYS = np.ones((4, 5, 8)), np.ones((4, 0, 8))
LSE = np.ones((4, 5), int)
SHORT = X.astype(np.float16)
LEADING = "value: expected leading axes that broadcast with (4,), got (3,)"
REFUSED = {
    "no query": (
        TypeError,
        sdpa.attention,
        (None, X, X),
        "query: expected float16, bfloat16, float32 or float64, got object",
    ),
    "heads of few axes": (ValueError, sdpa.attention, (X[0], X, X[:3]), LEADING),
    "heads of a key of few axes": (ValueError, sdpa.attention, (X, X[0], X[:3]), LEADING),
    "heads of no keys": (
        ValueError,
        sdpa.attention,
        (X[:3], NO_KEYS, NO_KEYS),
        "key: expected leading axes that broadcast with (3,), got (4,)",
    ),
    "lse": (
        TypeError,
        sdpa.attention_backward,
        (*[SHORT] * 5, LSE),
        "lse: expected float32 or float64, got int64; write lse.astype(np.float32)",
    ),
    "complex tangent": (
        TypeError,
        sdpa.attention_jvp,
        (X, X, X, X * 1j, X, X),
        "query_t: expected query's dtype float64, got complex128",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    exception, function, args, text = REFUSED[case]
    assert message(exception, function, *args) == text


def test_a_scale_beyond_float64s_units_of_log2():
    text = message(ValueError, sdpa.attention, X, X, X, scale=1.7e308)
    assert text.startswith("scale: expected a magnitude up to 1.24606592794178")
    assert text.endswith("e+308, the range of float64 arithmetic, got 1.7e+308")


def test_key_lengths_that_are_not_of_heads_either():
    text = message(ValueError, sdpa.attention, X, X, X, key_lengths=np.ones(3, int))
    assert text.endswith("broadcasts to the axes before heads, (), got (3,)")


def test_a_word_that_additive_attention_has_nothing_for():
    """Other functions name one for the weights."""
    weight = np.ones((8, 2))
    text = message(
        TypeError, sdpa.additive_attention, *X[:3], weight, weight, np.ones(2), need_weights=True
    )
    assert text == "additive_attention() got an unexpected keyword argument 'need_weights'"


def test_tiles_of_nothing():
    rows = X.swapaxes(0, 1)
    cu = [0, 5]
    text = message(ValueError, _core._pattern, rows, rows, cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert text == "cu_seqlens_q: expected None, since tiles belong to one sequence"
    few = X[:, :4]  # one tile of any instruction set
    for query, key, shape in ((few, NO_KEYS, (4, 1, 0)), (few[:0], few[:0], (0, 1, 1))):
        assert _core._pattern(query, key)[0].shape == shape
    (kinds, _), needed = without_memory(lambda: _core._pattern(X, X))
    assert needed == 1
    assert (kinds == 2).all()


def test_own_functions_check_their_arguments():
    assert message(TypeError, _core._arrays, 1, x=X) == "expected arguments by keyword"
    message(TypeError, _core._hint, 3)
