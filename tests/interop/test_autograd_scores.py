"""The other mechanisms through autograd: its own checks to second order, values, types."""

from functools import partial

import numpy as np
import pytest

pytest.importorskip("autograd", reason="needs autograd: pip install '.[autograd]'")

import autograd.numpy as anp
from autograd import grad, make_jvp, make_vjp
from autograd.test_util import check_grads
from support.calls import message
from support.helpers import assert_same_bits, native

import sdpa
from sdpa.interop import autograd as interop
from sdpa.interop.autograd import _attention

HEADS, N_Q, N_K, D_K, D_V, FAR, WIDTH = 2, 3, 5, 4, 3, 2, 3
OWN = {
    "cosine": {"temperature": ()},
    "bilinear": {"weight": (HEADS, D_K, D_K)},
    "additive": {"w_query": (D_K, WIDTH), "w_key": (D_K, WIDTH), "w_score": (WIDTH,)},
    "additive with bias": {
        "w_query": (D_K, WIDTH),
        "w_key": (D_K, WIDTH),
        "w_score": (WIDTH,),
        "bias": (WIDTH,),
    },
    "shaw": {"rel_key": (2 * FAR + 1, D_K)},
    "shaw of values": {"rel_key": (1, 2 * FAR + 1, D_K), "rel_value": (2 * FAR + 1, D_V)},
}
CASES = {
    "plain": {},
    "bias and sinks": {"attn_mask": (2, 1, N_Q, N_K), "sinks": (HEADS,)},
    "boolean mask": {"attn_mask": np.arange(N_Q * N_K).reshape(N_Q, N_K) % 3 > 0},
    "row without keys": {"attn_mask": np.ones((N_Q, N_K), bool) & (np.arange(N_Q) != 1)[:, None]},
    "grouped": {"enable_gqa": True, "is_causal": True, "query_offset": 1},
    "lower right": {"is_causal": "lower_right", "key_lengths": 4},
    "window": {"window": (1, 2)},
    "scale": {"scale": -0.7},
    "softcap and dropout": {"softcap": 0.8, "dropout_p": 0.4, "rng": 11},
}
# Options that one of the mechanisms does not take.
NOT_TAKEN = {"cosine": {"scale"}}


def problem(rng, name, case, dtype=np.float64):
    """(function of sdpa.interop.autograd, its operands by name, the other options)"""
    options = dict(CASES[case])
    kv_heads = 1 if options.get("enable_gqa") else HEADS
    shapes = {
        "query": (2, HEADS, N_Q, D_K),
        "key": (2, kv_heads, N_K, D_K),
        "value": (kv_heads, N_K, D_V),
    } | OWN[name]
    for option in ("attn_mask", "sinks"):
        if isinstance(options.get(option), tuple):
            shapes[option] = options.pop(option)
    operands = {n: rng.standard_normal(s).astype(dtype) for n, s in shapes.items()}
    if "temperature" in operands:
        operands["temperature"] = 0.7
    return f"{name.split()[0]}_attention", operands, options


def function(f, operands, options):
    """f of positional arguments, as autograd differentiates them."""
    return lambda *x: f(**dict(zip(operands, x, strict=True)), **options)


EVERY = [
    (name, case)
    for name in OWN
    for case, options in CASES.items()
    if not NOT_TAKEN.get(name.split()[0], set()) & set(options)
]


@pytest.fixture(autouse=True)
def autograd_draws_from_the_seed(rng):
    """autograd.test_util takes its random vectors from NumPy's global generator."""
    np.random.seed(rng.integers(2**31))  # noqa: NPY002


@pytest.mark.parametrize(("name", "case"), EVERY)
def test_to_second_order(rng, name, case):
    """Both modes, and every combination of two of them, against finite differences."""
    f, operands, options = problem(rng, name, case)
    f = function(getattr(interop, f), operands, options)
    check_grads(f, tuple(range(len(operands))), modes=["fwd", "rev"], order=2)(*operands.values())


@pytest.mark.parametrize("name", OWN)
def test_a_cap_beyond_the_range_is_none_to_second_order(rng, name):
    f, operands, _ = problem(rng, name, "plain", np.float32)

    query, *rest = operands.values()

    def second(**more):
        g = grad(lambda x: anp.sin(function(getattr(interop, f), operands, more)(x, *rest)).sum())
        return grad(lambda x: (g(x) ** 2).sum())(query)

    expected = second()
    np.testing.assert_allclose(
        second(softcap=1e300), expected, rtol=0, atol=1e-4 * abs(expected).max()
    )


@pytest.mark.parametrize("name", OWN)
def test_values_and_gradients_are_those_of_the_library(rng, dtype, name):
    f, operands, options = problem(rng, name, "bias and sinks", dtype)
    saved = getattr(sdpa, f"{f}_forward")(**operands)
    vjp, out = make_vjp(
        function(getattr(interop, f), operands, options), tuple(range(len(operands)))
    )(*operands.values())
    assert_same_bits(out, saved.out)
    g = rng.standard_normal(out.shape).astype(dtype)
    given = operands | ({"bias": None} if name == "additive" else {})
    given |= {"rel_value": None} if name == "shaw" else {}
    grads = getattr(sdpa, f"{f}_backward")(
        g, **given, out=saved.out, lse=saved.lse, needs=tuple(operands)
    )
    # autograd may pass on a gradient of a wider type.
    for n, ours in zip(operands, vjp(g.astype(np.float64)), strict=True):
        if n == "temperature":
            assert ours == grads.temperature
        else:
            assert_same_bits(ours, getattr(grads, n), n)


def forward_mode(f, operands, options, tangents):
    """The tangent of f along these tangents of all operands."""
    every = tuple(range(len(operands)))
    found = make_jvp(function(getattr(interop, f), operands, options), every)
    return found(*operands.values())(tuple(tangents.values()))[1]


@pytest.mark.parametrize("name", OWN)
def test_forward_mode_in_every_type(rng, dtype, name):
    """The formulas compute as the kernels do, and round once."""
    f, operands, options = problem(rng, name, "bias and sinks", dtype)
    tangents = {n: np.asarray(rng.standard_normal(np.shape(x))) for n, x in operands.items()}
    arrays = {n for n, x in operands.items() if isinstance(x, np.ndarray)}
    tangents |= {n: tangents[n].astype(dtype) for n in arrays}
    wide, wide_t = (x | {n: x[n].astype(np.float64) for n in arrays} for x in (operands, tangents))
    found = forward_mode(f, operands, options, tangents)
    assert found.dtype == native(np.dtype(dtype))
    expected = forward_mode(f, wide, options, wide_t)
    unit = {2: 2.0**-8, 4: 1e-6, 8: 1e-14}[found.dtype.itemsize]
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=unit, atol=4 * unit)


def test_a_temperature_of_another_type(rng):
    """A number of NumPy's, which is float64 beside a float32 query."""
    x = rng.standard_normal((3, 2, 4, 3)).astype(np.float32)
    found, expected = (
        make_jvp(lambda q, t=t: interop.cosine_attention(q, *x[1:], temperature=t))(x[0])(x[0])[1]
        for t in (np.float64(0.7), 0.7)
    )
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", OWN)
def test_constants_may_be_lists(rng, name):
    f, operands, _ = problem(rng, name, "bias and sinks")
    value = operands.pop("value")
    found, expected = (
        make_jvp(lambda x, f=f, given=given: getattr(interop, f)(**given, value=x))(value)(value)[1]
        for given in ({n: np.asarray(x).tolist() for n, x in operands.items()}, operands)
    )
    assert_same_bits(found, expected)


@pytest.mark.parametrize("name", OWN)
def test_a_batch_that_value_alone_has(rng, name):
    """The pattern of dropout, key lengths and slopes are those of the result's entries."""
    f, operands, options = problem(rng, name, "softcap and dropout")
    operands |= {n: operands[n][:1] for n in ("query", "key")}
    operands["value"] = rng.standard_normal((3, HEADS, N_K, D_V))
    options |= {"key_lengths": np.array([2, N_K, 4]), "alibi_slopes": rng.random((3, HEADS))}
    tangents = {n: rng.standard_normal(np.shape(x)) for n, x in operands.items()}
    found = forward_mode(f, operands, options, tangents)
    g = rng.standard_normal(found.shape)
    attend = function(getattr(interop, f), operands, options)
    grads = make_vjp(attend, tuple(range(len(operands))))(*operands.values())[0](g)
    along = sum(np.sum(x * t) for x, t in zip(grads, tangents.values(), strict=True))
    np.testing.assert_allclose(np.sum(g * found), along, rtol=1e-12)


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_lengths_of_cosine_attention_neither_overflow_nor_underflow(rng, size):
    f, operands, options = problem(rng, "cosine", "plain", np.float32)
    tangents = {n: np.float32(rng.standard_normal(np.shape(x))) for n, x in operands.items()}
    options["eps"] = 1e-30
    expected = forward_mode(f, operands, options, tangents)
    for values in (operands, tangents):
        values |= {n: values[n] * np.float32(size) for n in ("query", "key")}
    assert np.abs(expected).max() > 0.1
    found = forward_mode(f, operands, options, tangents)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["cosine", "bilinear"])
@pytest.mark.parametrize("order", ["fwd", "rev over rev", "fwd over rev"])
def test_no_matrix_is_held(rng, monkeypatch, name, order):
    """To second order, except forward over forward, the composed softmax is never called."""

    def refuse(*_):
        raise AssertionError("composed")

    monkeypatch.setattr(_attention, "composed_softmax", refuse)
    f, operands, options = problem(rng, name, "plain")
    every, x = tuple(range(len(operands))), tuple(operands.values())
    attend = function(getattr(interop, f), operands, options)
    square = lambda *x: anp.sum(attend(*x) ** 2)  # noqa: E731
    reverse = lambda *x: make_vjp(square, every)(*x)[0](1.0)  # noqa: E731
    if order == "fwd":
        result = make_jvp(square, every)(*x)(x)[1:]
    elif order == "fwd over rev":
        result = make_jvp(reverse, every)(*x)(x)[1]
    else:
        along = lambda *x: sum(anp.sum(a * b) for a, b in zip(reverse(*x), x, strict=True))  # noqa: E731
        result = make_vjp(along, every)(*x)[0](1.0)
    assert all(np.abs(part).max() > 1e-6 for part in result)


def test_the_composed_formula_of_shaw_takes_unsigned_lengths(rng):
    """Lq is subtracted from int64, so that 3 - 5 of uint8 is -2."""
    q, k, v, rel_key = (rng.standard_normal((n, 4)) for n in (5, 7, 7, 3))

    def f(q, length):
        options = {"is_causal": "lower_right", "key_lengths": length}
        return interop.shaw_attention(q, k, v, rel_key, **options)

    tangents = (make_jvp(f)(q, length)(q)[1] for length in (np.uint8(3), 3))
    np.testing.assert_array_equal(*tangents)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding(rng, interleaved):
    at = rng.uniform(-9, 9, (2, 5))
    f = lambda x: interop.rotary_embedding(x, at, interleaved=interleaved, rotary_dim=4)  # noqa: E731
    check_grads(f, modes=["fwd", "rev"], order=2)(rng.standard_normal((2, 5, 6)))


def test_t5_relative(rng):
    f = lambda table: interop.t5_relative(table, 4, 7, max_distance=6, query_offset=2)  # noqa: E731
    check_grads(f, modes=["fwd", "rev"], order=2)(rng.standard_normal((8, 2)))


def test_positions_through_attention(rng):
    """A layer with rotary embedding and a bias, to second order."""
    x, table = rng.standard_normal((2, 4, 6)), rng.standard_normal((8, 2))

    def layer(x, table):
        turned = interop.rotary_embedding(x, np.arange(4))
        return interop.attention(turned, turned, x, interop.t5_relative(table, 4, 4))

    check_grads(layer, (0, 1), modes=["fwd", "rev"], order=2)(x, table)


@pytest.mark.parametrize("name", ["rotary_embedding", "t5_relative"])
def test_positions_keep_the_type(rng, dtype, name):
    x = rng.standard_normal((8, 4)).astype(dtype)
    rest = (np.arange(8),) if name == "rotary_embedding" else (3, 5)
    vjp, value = make_vjp(getattr(interop, name))(x, *rest)
    assert value.dtype == dtype
    assert vjp(np.ones(value.shape)).dtype == native(x.dtype)


LAYERS = {
    "plain": {},
    "grouped": {"kv_heads": 1, "scale": "1/d_k"},
    "learned": {"scale": "learned", "d_v": 3},
    "cross": {"d_context": 5, "fold_scale": True},
    "tied": {"tied_kv": True, "scale": 1.0},
    "swapped": {"swap_roles": True, "d_context": 5},
    "biased": {"bias": True, "d_context": 5},
    "biased tied": {"bias": True, "tied_kv": True},
    "rotary": {"rotary": True, "rotary_interleaved": True, "kv_heads": 1},
    "normed": {"qk_norm": True, "norm_eps": 0.1, "scale": "learned"},
    "all": {"bias": True, "qk_norm": True, "rotary": True, "scale": "learned", "d_context": 5},
}


@pytest.mark.parametrize("name", LAYERS)
def test_multi_head_attention(rng, name):
    """Values and gradients of the layer, to 1e-12 of the largest; second order by differences."""
    layer = sdpa.MultiHeadAttention(4, 2, **LAYERS[name], dtype=np.float64, rng=1)
    x = rng.standard_normal((2, 3, 4))
    context = rng.standard_normal((2, 4, 5)) if layer.d_context == 5 else None
    options = {"is_causal": True, "query_offset": 1, "sinks": np.array([0.1, -0.2])}
    for n in layer.parameters.keys() & {"b_query", "b_key", "b_value", "b_out", "g_query", "g_key"}:
        layer.parameters[n] += rng.standard_normal(layer.parameters[n].shape)
    if layer.rotary:
        options["positions"] = rng.integers(0, 9, (2, 3))

    def f(parameters, x, context, sinks):
        given = options | {"sinks": sinks}
        return interop.multi_head_attention(layer, parameters, x, context, **given)

    out, saved = layer.forward(x, context, **options)
    arguments = (layer.parameters, x, context, options["sinks"])
    every = tuple(i for i, argument in enumerate(arguments) if argument is not None)
    vjp, ours = make_vjp(f, every)(*arguments)
    np.testing.assert_allclose(ours, out, rtol=0, atol=1e-12 * abs(out).max())
    g = rng.standard_normal(out.shape)
    grads = layer.backward(g, saved, needs=("parameters", "x", "context", "sinks"))
    by_name = dict(zip(every, vjp(g), strict=True))
    pairs = [(by_name[0][n], true) for n, true in grads.parameters.items()]
    pairs += [(by_name[i], true) for i, true in ((1, grads.x), (3, grads.sinks))]
    pairs += [] if context is None else [(by_name[2], grads.context)]
    for got, true in pairs:
        np.testing.assert_allclose(got, true, rtol=0, atol=1e-12 * abs(true).max())
    check_grads(f, every, modes=["fwd", "rev"], order=2)(*arguments)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_large_queries_have_a_norm(rng, dtype):
    layer = sdpa.MultiHeadAttention(4, 2, qk_norm=True, dtype=dtype, rng=1)
    x = rng.standard_normal((5, 4)).astype(dtype) * np.finfo(dtype).max ** dtype(0.6)
    out, expected = interop.multi_head_attention(layer, layer.parameters, x), layer(x)
    assert abs(out - expected).max() <= 100 * np.finfo(dtype).eps * abs(expected).max()


@pytest.mark.parametrize("name", ["w_query", "b_out"])
def test_a_layer_needs_all_of_its_parameters(name):
    """Without a bias the layer would be another one."""
    layer = sdpa.MultiHeadAttention(4, 2, bias=True, dtype=np.float64, rng=1)
    given = {n: x for n, x in layer.parameters.items() if n != name}
    expected = message(ValueError, layer.forward, np.ones((3, 4)), parameters=given)
    assert expected.startswith("parameters: expected ['b_key', ")
    call = partial(interop.multi_head_attention, layer, x=np.ones((3, 4)))
    assert message(ValueError, call, given) == expected
    grads = grad(lambda p: anp.sum(call(p)))
    assert message(ValueError, grads, given) == expected


@pytest.mark.parametrize("name", ["scale", "enable_gqa"])
def test_what_the_layer_defines_is_no_option(name):
    layer, x = sdpa.MultiHeadAttention(4, 2, dtype=np.float64, rng=1), np.ones((3, 4))
    call = partial(interop.multi_head_attention, layer, layer.parameters, x)
    text = f"multi_head_attention() got an unexpected keyword argument '{name}'"
    assert message(TypeError, call, **{name: 2.0}).startswith(text)


@pytest.mark.parametrize("name", ["x", "context"])
def test_a_layer_needs_rows(name):
    layer = sdpa.MultiHeadAttention(4, 2, dtype=np.float64, rng=1)
    given = {"x": np.ones((3, 4))} | {name: np.ones(4)}
    text = message(ValueError, interop.multi_head_attention, layer, layer.parameters, **given)
    assert text == f"{name}: expected at least two axes, (..., L, 4), got (4,); write {name}[None]"


KEYWORDS = {
    "softmax": (lambda x: interop.softmax(x=x), lambda x: interop.softmax(x)),
    "log_softmax": (lambda x: interop.log_softmax(x=x), lambda x: interop.log_softmax(x)),
    "rotary_embedding": (
        lambda x: interop.rotary_embedding(x=x, positions=[0, 1, 2, 3, 4, 5, 6, 7]),
        lambda x: interop.rotary_embedding(x, [0, 1, 2, 3, 4, 5, 6, 7]),
    ),
    "t5_relative": (
        lambda x: interop.t5_relative(table=x, query_length=2, key_length=3),
        lambda x: interop.t5_relative(x, 2, 3),
    ),
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_arguments_may_be_given_by_name(rng, name):
    x = rng.standard_normal((8, 2))
    named, placed = ((lambda x, f=f: anp.sum(f(x) ** 2)) for f in KEYWORDS[name])
    np.testing.assert_array_equal(grad(named)(x), grad(placed)(x))


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_a_temperature_is_a_constant(name):
    function = getattr(interop, name)
    call = grad(lambda t: anp.sum(function(np.ones(3), temperature=t)))
    assert message(TypeError, call, 2.0).startswith("temperature: expected a finite number, got ")


def test_errors_are_those_of_the_library():
    x = np.ones((2, 3))
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'scale'"):
        interop.cosine_attention(x, x, x, scale=0.5)
    with pytest.raises(TypeError, match=r"^out: "):
        interop.cosine_attention(x, x, x, out=np.ones((2, 3)))
    with pytest.raises(ValueError, match=r"^weight: expected"):
        grad(lambda w: anp.sum(interop.bilinear_attention(x, x, x, w)))(np.ones((2, 2)))
