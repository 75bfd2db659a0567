"""sdpa.interop.autograd: autograd's own checks to second order in both modes, and PyTorch."""

import numpy as np
import pytest

pytest.importorskip("autograd", reason="needs autograd: pip install '.[autograd]'")

import autograd.numpy as anp
from autograd import grad, make_jvp, make_vjp
from autograd.test_util import check_grads
from support.helpers import assert_same_bits
from support.problems import (
    CASES,
    D_K,
    FUNCTIONS,
    N_K,
    N_Q,
    OPERATIONS,
    WITH_FINITE_LSE,
    positional,
    problem,
    problem_with_functions,
)

import sdpa
from sdpa.interop import autograd as interop
from sdpa.interop.autograd import _attention

HAS_ARRAYS = ("attn_mask", "sinks", "scale")


@pytest.fixture(autouse=True)
def autograd_draws_from_the_seed(rng):
    """autograd.test_util takes its random vectors from NumPy's global generator."""
    np.random.seed(rng.integers(2**31))  # noqa: NPY002


@pytest.mark.parametrize("name", CASES)
def test_attention_to_second_order(rng, name):
    """Both modes, and every combination of two of them, against finite differences."""
    operands, options = problem(rng, name)
    f = positional(interop.attention, operands, options)
    check_grads(f, tuple(range(len(operands))), modes=["fwd", "rev"], order=2)(*operands.values())


@pytest.mark.parametrize("name", WITH_FINITE_LSE)
def test_out_and_lse_together_to_second_order(rng, name):
    operands, options = problem(rng, name)
    f = positional(interop.attention_forward, operands, options)

    def both(*x):
        out, lse = f(*x)
        return anp.sum(out * anp.cos(out)) + anp.sum(lse**2)

    check_grads(both, tuple(range(len(operands))), modes=["fwd", "rev"], order=2)(
        *operands.values()
    )


def with_functions(f, options, n_args):
    """f of query, key, value and then score_args."""
    return lambda *x: f(*x[:3], score_args=x[3:] if n_args else None, **options)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_the_user(rng, name):
    """Both modes, and every combination of two of them, against finite differences."""
    operands, args, options = problem_with_functions(rng, name)
    x = (*operands, *args)
    f = with_functions(interop.attention, options, len(args))
    np.testing.assert_array_equal(
        f(*x), sdpa.attention(*operands, score_args=tuple(args), **options)
    )
    check_grads(f, tuple(range(len(x))), modes=["fwd", "rev"], order=2)(*x)

    def both(*x):
        out, lse = with_functions(interop.attention_forward, options, len(args))(*x)
        return anp.sum(out * anp.cos(out)) + anp.sum(anp.where(np.isfinite(lse), lse, 0) ** 2)

    if name != "packed":
        check_grads(both, tuple(range(len(x))), modes=["fwd", "rev"], order=2)(*x)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_third_order_of_functions_of_the_user(rng, name):
    operands, args, options = problem_with_functions(rng, name)
    check_third_order(
        rng, with_functions(interop.attention, options, len(args)), (*operands, *args)
    )


# No finite difference takes a score for a constant.
@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "detached"])
def test_third_order_of_each_operation(rng, name):
    x = [np.asarray(rng.standard_normal(s)) for s in ((2, N_Q, 3), *[(2, N_K, 3)] * 2, N_K)]
    check_third_order(rng, with_functions(interop.attention, {"score_mod": OPERATIONS[name]}, 1), x)


def check_third_order(rng, f, x):
    every = tuple(range(len(x)))
    g, t = rng.standard_normal(f(*x).shape), rng.standard_normal(len(x))

    def directed(*x):
        first = make_vjp(f, every)(*x)[0](g)
        return sum(t[i] * anp.sum(first[i]) for i in every)

    def second(*x):
        return make_vjp(directed, every)(*x)[0](1.0)[0]

    check_grads(second, every, modes=["fwd", "rev"], order=1)(*x)


def test_functions_that_are_refused(rng):
    x = np.ones((4, 3))
    with pytest.raises(ValueError, match="score_args: expected None without score_mod"):
        interop.attention(x, x, x, score_args=(x,))
    with pytest.raises(TypeError, match="score_args: expected a tuple of arrays"):
        interop.attention(x, x, x, score_mod=lambda s, b, h, q, k, t: s + t[k], score_args=x)
    slopes = anp.ones(3)

    def loss(t):
        return anp.sum(interop.attention(x, x, x, score_mod=lambda s, b, h, q, k: s + t[h]))

    with pytest.raises(TypeError, match=r"score_mod: expected .*pass it in score_args"):
        grad(loss)(slopes)


def test_a_row_without_keys_passes_no_gradient_of_lse(rng):
    operands, options = problem(rng, "row without keys")
    lse = lambda q, k, v: interop.attention_forward(q, k, v, **options)[1]  # noqa: E731
    vjp, value = make_vjp(lse, (0, 1))(*operands.values())
    assert np.isneginf(value[..., 1]).all()
    grad_query, grad_key = vjp(np.ones_like(value))
    assert np.isfinite(grad_key).all()
    assert not grad_query[..., 1, :].any()
    assert grad_query[..., 0, :].any()


@pytest.mark.parametrize("name", ["plain", "all", "packed"])
def test_third_order(rng, name):
    """A gradient of a Hessian-vector product."""
    operands, options = problem(rng, name)
    f = positional(interop.attention, operands, options)
    names = tuple(range(len(operands)))
    g, t = rng.standard_normal(f(*operands.values()).shape), rng.standard_normal(len(operands))

    def directed(*x):
        first = make_vjp(f, names)(*x)[0](g)
        return sum(t[i] * anp.sum(first[i]) for i in names)

    def second(*x):
        return make_vjp(directed, names)(*x)[0](1.0)[0]

    check_grads(second, names, modes=["fwd", "rev"], order=1)(*operands.values())


@pytest.mark.filterwarnings("ignore:Output seems independent")  # it is
def test_third_order_of_padding_alone(rng):
    """No sequence, and rows that belong to none."""
    q, k, v = (rng.standard_normal((3, 2, 4)) for _ in range(3))

    def f(q):
        out, lse = interop.attention_forward(q, k, v, cu_seqlens_q=[0], cu_seqlens_k=[0])
        assert out.shape == q.shape
        assert lse.shape == (2, 3)
        return anp.sum(out**2)

    assert not grad(lambda q: anp.sum(grad(lambda q: anp.sum(grad(f)(q)))(q)))(q).any()


def test_constants_of_a_formula_may_be_lists(rng):
    query, key, value = rng.standard_normal((3, 2, 4, 3))
    options = {"scale": [1.0, 2.0], "sinks": [0.1, 0.2], "where": [[[True] * 3 + [False]]] * 2}
    options |= {"attn_mask": [0.0, 1.0, -np.inf, 2.0]}

    def twice(*rest, **options):
        def once(x):
            return make_jvp(lambda x: interop.attention(x, *rest, **options))(x)(query)[1]

        return make_jvp(once)(query)(query)[1]

    arrays = {name: np.array(x) for name, x in options.items()}
    found = twice(key.tolist(), value.tolist(), **options)
    assert_same_bits(found, twice(key, value, **arrays))


def test_tangents_of_another_type(rng):
    """autograd's own functions may make them wider."""
    operands, options = problem(rng, "bias", np.float32)
    attend = positional(interop.attention, operands, options)
    every = tuple(range(len(operands)))

    def through(*x):
        return attend(*(anp.where(anp.isfinite(y), y, 0) for y in x))

    tangents = tuple(rng.standard_normal(x.shape).astype(np.float32) for x in operands.values())
    (value, found), (out, expected) = (
        make_jvp(f, every)(*operands.values())(tangents) for f in (through, attend)
    )
    assert_same_bits(value, out)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("option", [{"sinks": np.ones(2)}, {"scale": np.array(0.5)}, {}], ids=str)
def test_the_tangent_of_lse_has_its_type(rng, dtype, option):
    query, key, value = rng.standard_normal((3, 2, 4, 3)).astype(dtype)
    found, tangent = make_jvp(lambda x: interop.attention_forward(x, key, value, **option)[1])(
        query
    )(query)
    assert found.dtype == tangent.dtype


def test_out_and_lse_of_a_batch_that_value_alone_has(rng):
    operands = {
        n: rng.standard_normal((batch, 2, 4, 3)) for n, batch in (("q", 1), ("k", 1), ("v", 3))
    }
    options = {"dropout_p": 0.4, "rng": 5, "sinks": rng.random((3, 2)), "is_causal": True}

    def both(*x):
        out, lse = interop.attention_forward(*x, **options)
        return anp.sum(out * anp.cos(out)) + anp.sum(np.arange(1.0, 4)[:, None, None] * lse**2)

    check_grads(both, (0, 1, 2), modes=["fwd", "rev"], order=2)(*operands.values())


@pytest.mark.parametrize("name", CASES)
def test_values_and_first_derivatives_are_those_of_the_library(rng, dtype, isa, name):
    operands, options = problem(rng, name, dtype)
    arrays = {n: operands.get(n, options.get(n)) for n in HAS_ARRAYS}
    rest = {n: x for n, x in options.items() if n not in HAS_ARRAYS}
    q, k, v = (operands[n] for n in ("query", "key", "value"))
    out, lse = sdpa.attention_forward(q, k, v, **arrays, **rest)
    g, g_lse = (rng.standard_normal(x.shape).astype(x.dtype) for x in (out, lse))
    f = positional(interop.attention_forward, operands, options)
    vjp, values = make_vjp(f, tuple(range(len(operands))))(*operands.values())
    assert_same_bits(values[0], out)
    assert_same_bits(values[1], lse)
    grads = sdpa.attention_backward(
        g, q, k, v, out, lse, **arrays, **rest, grad_lse=g_lse, needs=tuple(operands)
    )
    # autograd may pass on a gradient of a wider type.
    for n, grad_n in zip(operands, vjp((g.astype(np.float64), g_lse)), strict=True):
        assert_same_bits(grad_n, getattr(grads, n), n)

    tangents = {n: rng.standard_normal(x.shape).astype(dtype) for n, x in operands.items()}
    f = positional(interop.attention, operands, options)
    value, tangent = make_jvp(f, tuple(range(len(operands))))(*operands.values())(
        tuple(tangents.values())
    )
    t = {n + "_t": x for n, x in tangents.items()}
    jvp = sdpa.attention_jvp(q, k, v, **t, **arrays, **rest)
    assert_same_bits(value, out)
    assert_same_bits(tangent, jvp.out_t)


@pytest.mark.parametrize("order", ["rev", "fwd over rev", "rev over fwd"])
def test_no_matrix_is_held(rng, monkeypatch, order):
    """To second order, except forward over forward, the composed formula is never called."""

    def refuse(*_):
        raise AssertionError("composed")

    monkeypatch.setattr(_attention, "_composed", refuse)
    x = tuple(rng.standard_normal((3, 6, 4)) for _ in range(3))
    square = lambda *x: anp.sum(interop.attention(*x, is_causal=True) ** 2)  # noqa: E731
    reverse = lambda *x: make_vjp(square, (0, 1, 2))(*x)[0](1.0)  # noqa: E731
    forward = lambda *x: make_jvp(square, (0, 1, 2))(*x)(x)[1]  # noqa: E731
    if order == "rev":
        first = reverse(*x)
    elif order == "fwd over rev":
        first = make_jvp(reverse, (0, 1, 2))(*x)(x)[1]
    else:
        first = make_vjp(forward, (0, 1, 2))(*x)[0](1.0)
    assert all(np.abs(part).max() > 1e-3 for part in first)


@pytest.mark.parametrize("name", ["plain", "bias", "softcap"])
def test_hessian_vector_product_against_torch(torch, rng, name):
    operands, options = problem(rng, name)
    f = positional(interop.attention, operands, options)
    loss = lambda *x: anp.sum(anp.sin(f(*x)))  # noqa: E731
    names = tuple(range(len(operands)))
    t = [rng.standard_normal(x.shape) for x in operands.values()]
    ours = make_jvp(lambda *x: make_vjp(loss, names)(*x)[0](1.0), names)(*operands.values())(
        tuple(t)
    )[1]

    def composed(q, k, v, bias=None):
        s = options.get("scale", D_K**-0.5) * q @ k.transpose(-1, -2)
        if "softcap" in options:
            s = options["softcap"] * torch.tanh(s / options["softcap"])
        s = s if bias is None else s + bias
        return torch.sin(torch.softmax(s, -1) @ v).sum()

    tensors = tuple(torch.tensor(x) for x in operands.values())
    _, theirs = torch.autograd.functional.hvp(composed, tensors, tuple(map(torch.tensor, t)))
    for a, b in zip(ours, theirs, strict=True):
        # Some hundred roundings of numbers of size 1 to 10.
        np.testing.assert_allclose(a, b.numpy(), rtol=0, atol=1e-12 * np.abs(b.numpy()).max())


def test_a_generator_gives_the_seed_that_sdpa_draws(rng):
    x = rng.standard_normal((4, 30, 8))
    ours = interop.attention(x, x, x, dropout_p=0.5, rng=np.random.default_rng(7))
    theirs = sdpa.attention(x, x, x, dropout_p=0.5, rng=np.random.default_rng(7))
    np.testing.assert_array_equal(ours, theirs)


def test_fresh_dropout_is_the_same_in_forward_and_backward(rng):
    """A value gets no gradient from a query that dropped it."""
    x = rng.standard_normal((1, 40, 8))
    out = lambda v: interop.attention(x, x, v, dropout_p=0.5)[0, 0]  # noqa: E731
    vjp, value = make_vjp(out)(x)
    grad_v = vjp(np.eye(8)[0])
    np.testing.assert_allclose((grad_v[..., :1] * x).sum(axis=1)[0], value, rtol=1e-12)
    assert 5 < (grad_v[0, :, 0] == 0).sum() < 35


def test_out_is_refused():
    x = np.ones((2, 3))
    with pytest.raises(TypeError, match=r"^out: "):
        interop.attention(x, x, x, out=np.ones((2, 3)))


def test_errors_are_those_of_the_library():
    with pytest.raises(ValueError, match=r"^key: expected"):
        grad(lambda q: anp.sum(interop.attention(q, np.ones((2, 5)), np.ones((2, 3)))))(
            np.ones((2, 3))
        )


SOFTMAX_CASES = {
    "last": {},
    "first": {"axis": 0},
    "several": {"axis": (0, 2)},
    "all": {"axis": None},
    "where": {"where": np.arange(24).reshape(2, 3, 4) % 5 > 0},
}


@pytest.mark.parametrize("case", SOFTMAX_CASES)
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_softmax_family_to_second_order(rng, name, case):
    options = SOFTMAX_CASES[case]
    variants = [{"temperature": 0.6}, {}] if "softmax" in name else [{"keepdims": True}, {}]
    for variant in variants:
        f = lambda x: getattr(interop, name)(x, **options, **variant)  # noqa: B023, E731
        if name == "log_softmax" and case == "where":
            # lse is -inf for queries without keys, which has no finite difference.
            f = lambda x, f=f: anp.where(options["where"], f(x), 0)  # noqa: E731
        check_grads(f, modes=["fwd", "rev"], order=2)(rng.standard_normal((2, 3, 4)))


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_softmax_family_keeps_its_type(rng, name, dtype):
    x = rng.standard_normal((3, 4)).astype(dtype)
    vjp, value = make_vjp(getattr(interop, name))(x)
    assert_same_bits(value, getattr(sdpa, name)(x))
    assert vjp(np.ones(value.shape)).dtype == dtype


@pytest.mark.parametrize("case", SOFTMAX_CASES)
@pytest.mark.parametrize("shape", [(2, 3, 4), (3, 1), (5, 1, 1, 1)])
def test_weighted_logsumexp_to_second_order(rng, case, shape):
    """In x and in b, either of which may be broadcast along the other."""
    options = SOFTMAX_CASES[case] | ({"axis": (1, 3)} if len(shape) == 4 else {})
    b = rng.uniform(0.5, 2, shape)
    b.flat[0] = 0 if b.size > 20 else 1
    for variant in {"keepdims": True}, {}:
        f = lambda x, b: interop.logsumexp(x, b=b, **options, **variant)  # noqa: B023, E731
        check_grads(f, argnum=(0, 1), modes=["fwd", "rev"], order=2)(
            rng.standard_normal((2, 3, 4)), b
        )


def test_a_row_of_weights_0_has_no_slope(rng):
    """It has the value -inf beside rows with finite ones, of which the loss is made."""
    x, b = rng.standard_normal((3, 4)), np.arange(12.0).reshape(3, 4)
    b[0] = b[1, 1] = 0
    check_grads(lambda x: interop.logsumexp(x, b=b)[1:], modes=["fwd", "rev"], order=2)(x)


def test_weighted_logsumexp_is_that_of_the_library(rng):
    x, b = rng.standard_normal((2, 3, 4)).astype(np.float32), np.array([1, -0.5, 0, 2])
    vjp, value = make_vjp(lambda x: interop.logsumexp(x, b=b))(x)
    assert_same_bits(value, sdpa.logsumexp(x, b=b))
    grad_out = rng.standard_normal(value.shape)
    lse, sign = sdpa.logsumexp(x, b=b, return_sign=True)
    keep = sign > 0  # the value is NaN elsewhere
    theirs = sdpa.logsumexp_backward(grad_out, x, lse, b=b, sign=sign)
    np.testing.assert_allclose(vjp(grad_out)[keep], theirs.x[keep], rtol=1e-6)
    assert interop.logsumexp(x, b=2.0).dtype == np.float32
    with pytest.raises(ValueError, match=r"^b: expected a shape that broadcasts"):
        interop.logsumexp(x, b=np.ones(3))


def test_a_small_model_descends(rng):
    """One layer learns to copy the token before: the loss falls by two thirds in 60 steps."""
    x = rng.standard_normal((16, 8, 6))
    position = np.eye(8)
    weights = [0.3 * rng.standard_normal(s) for s in [(8, 5), (8, 5), (6, 6)]]

    def loss(weights):
        w_query, w_key, w_value = weights
        out = interop.attention(position @ w_query, position @ w_key, x @ w_value)
        return anp.mean((out[:, 1:] - x[:, :-1]) ** 2)

    first = loss(weights)
    for _ in range(60):
        weights = [w - 2.0 * g for w, g in zip(weights, grad(loss)(weights), strict=True)]
    assert loss(weights) < first / 3


@pytest.mark.parametrize("name", ["", *interop.__all__])
def test_each_has_an_example(name):
    assert ">>> " in (getattr(interop, name) if name else interop).__doc__
