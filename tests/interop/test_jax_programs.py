"""Functions of the user in sdpa.interop.jax, against the formula in jax.numpy."""

import warnings

import numpy as np
import pytest
from support import problems
from support.problems import FUNCTIONS, N_K, N_Q, OPERATIONS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    jax = pytest.importorskip("jax", reason="needs jax: pip install '.[peers]'")

import jax.numpy as jnp
from jax.test_util import check_grads
from support.in_jax import assert_close, enabled_x64, hvp, hvp_of, moving, normal, x64  # noqa: F401

import sdpa
from sdpa.interop import jax as interop


def functions_problem(rng, name):
    """(attention of query, key, value and then score_args; these operands; the other options)."""
    operands, args, options = problems.problem_with_functions(rng, name)
    x = [jnp.asarray(a) for a in (*operands, *args)]
    return lambda *x: interop.attention(*x[:3], score_args=x[3:], **options), tuple(x), options


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_the_user(rng, name):
    """Values, and every mixture of two modes, against finite differences."""
    f, x, options = functions_problem(rng, name)
    arrays = [np.asarray(a) for a in x]
    expected = sdpa.attention(*arrays[:3], score_args=tuple(arrays[3:]), **options)
    for run in f, jax.jit(f):
        np.testing.assert_allclose(run(*x), expected, rtol=0, atol=1e-14)
    check_grads(jax.jit(f), x, order=2, modes=["fwd", "rev"])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_of_functions_by_the_formula(rng, name):
    """Forward over forward and third derivatives against those that the kernels have."""
    f, x, _ = functions_problem(rng, name)
    along = compared_with_the_formula(rng, f, x)
    check_grads(jax.jit(jax.grad(along, tuple(range(len(x))))), x, order=1, modes=["rev"])


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("is_program", [False, True], ids=["function", "program"])
def test_each_operation_by_the_formula(rng, name, is_program):
    x = tuple(jnp.asarray(rng.standard_normal(s)) for s in ((2, N_Q, 3), *[(2, N_K, 3)] * 2, N_K))
    score_mod = OPERATIONS[name]
    if is_program:
        score_mod = sdpa.score_program(score_mod, (np.asarray(x[3]),))

    def f(*x):
        return interop.attention(*x[:3], score_mod=score_mod, score_args=x[3:])

    compared_with_the_formula(rng, f, x)


def test_a_batch_that_value_alone_has_by_the_formula(rng):
    """b counts the entries of the result."""
    shapes = ((1, 2, N_Q, 3), (1, 2, N_K, 3), (3, 2, N_K, 3), (3, 2))
    x = tuple(jnp.asarray(rng.standard_normal(s)) for s in shapes)

    def f(*x):
        return interop.attention(
            *x[:3], score_mod=lambda s, b, h, q, k, t: s * t[b, h], score_args=x[3:]
        )

    compared_with_the_formula(rng, f, x)


def compared_with_the_formula(rng, f, x):
    """Compare forward over forward mode with the kernels' second derivatives; return the loss."""
    g = jnp.asarray(rng.standard_normal(f(*x).shape))
    t = tuple(jnp.asarray(rng.standard_normal(a.shape)) for a in x)

    def along(*x):
        return (g * jax.jvp(f, x, t)[1]).sum()

    twice = jax.jvp(along, x, t)[1]
    over = jax.jvp(lambda *x: jax.vjp(f, *x)[1](g), x, t)[1]
    expected = sum((a * b).sum() for a, b in zip(over, t, strict=True))
    np.testing.assert_allclose(twice, expected, rtol=1e-9)
    return along


def test_functions_under_vmap(rng):
    """Each call has b and h of its own, whether its arguments or its queries are mapped."""
    f, x, _ = functions_problem(rng, "score_mod")
    loss = lambda *x: (f(*x) ** 2).sum()  # noqa: E731
    table = jnp.stack([x[3], 2 * x[3], -x[3]])
    gradients = jax.vmap(jax.grad(loss, (0, 3)), (None, None, None, 0, None))(*x[:3], table, x[4])
    for i in range(3):
        one = jax.grad(loss, (0, 3))(*x[:3], table[i], x[4])
        for ours, true in zip(gradients, one, strict=True):
            np.testing.assert_allclose(ours[i], true, rtol=0, atol=1e-12)
    query = jnp.stack([x[0], 3 * x[0]])
    for ours, one in zip(jax.vmap(f, (0, *[None] * 4))(query, *x[1:]), query, strict=True):
        np.testing.assert_allclose(ours, f(one, *x[1:]), rtol=0, atol=1e-14)


@pytest.mark.parametrize("lead", [(), (4,), (3, 4)], ids=str)
def test_functions_with_shared_operands(rng, lead):
    """Keys, masks and integers that are broadcast, and gradients of all of them."""
    heads, d = (lead or (1,))[-1], 8
    x = {
        "query": rng.standard_normal((*lead, N_Q, d)),
        "key": rng.standard_normal((*((2,) if heads == 4 else ()), N_K, d)),
        "value": rng.standard_normal((*((2,) if heads == 4 else ()), N_K, d)),
        "attn_mask": rng.standard_normal((N_K,)),
        "scale": rng.standard_normal((heads,)),
        "sinks": rng.standard_normal((heads,)),
    }
    if not lead:
        del x["sinks"]
        x["scale"] = np.float64(0.3)
    table = rng.standard_normal((heads, 30))
    options = {
        "score_mod": lambda s, b, h, q, k, t, n: s * t[h, q - k + 15] + b + n[k],
        "mask_mod": lambda b, h, q, k, m: m[k] | (q == k),
        "mask_args": (np.arange(N_K) % 2 > 0,),
        "enable_gqa": True,
        "query_offset": 2,
        "window": (3, None),
    }
    integers = np.arange(N_K)
    arrays = {n: np.asarray(a) for n, a in x.items()}

    def loss(x, table):
        return (interop.attention(**x, score_args=(table, integers), **options) ** 2).sum()

    saved = sdpa.attention_forward(**arrays, score_args=(table, integers), **options)
    true = sdpa.attention_backward(
        2 * saved.out, **arrays, out=saved.out, lse=saved.lse, needs=[*x, "score_args"],
        score_args=(table, integers), **options,
    )  # fmt: skip
    ours, of_table = jax.jit(jax.grad(loss, (0, 1)))(
        {n: jnp.asarray(a) for n, a in x.items()}, table
    )
    np.testing.assert_allclose(of_table, true.score_args[0], rtol=0, atol=1e-11)
    for name, gradient in ours.items():
        np.testing.assert_allclose(gradient, getattr(true, name), rtol=0, atol=1e-11)


BROADCAST = {
    "one head of values": ((3, N_Q, 4), (3, N_K, 4), (1, N_K, 2)),
    "no heads of values": ((3, N_Q, 4), (3, N_K, 4), (N_K, 2)),
    "one head of keys": ((3, N_Q, 4), (1, N_K, 4), (3, N_K, 2)),
    "one query head": ((1, N_Q, 4), (3, N_K, 4), (3, N_K, 2)),
    "one query head, packed": ((N_Q, 1, 4), (N_K, 3, 4), (N_K, 3, 2)),
    "one head of values, packed": ((N_Q, 3, 4), (N_K, 3, 4), (N_K, 1, 2)),
}


@pytest.mark.parametrize("name", BROADCAST)
def test_functions_beside_heads_that_are_broadcast(rng, name):
    x = [rng.standard_normal(shape) for shape in BROADCAST[name]]
    options = {
        "score_mod": lambda s, b, h, q, k: s * (1 + h) + b,
        "mask_mod": lambda b, h, q, k: k > 0,
    }
    if "packed" in name:
        options |= {"cu_seqlens_q": np.array([0, 2, N_Q]), "cu_seqlens_k": np.array([0, 2, N_K])}
    saved = sdpa.attention_forward(*x, **options)
    grad_out = rng.standard_normal(saved.out.shape)
    true = sdpa.attention_backward(grad_out, *x, *saved, **options)
    out, back = jax.vjp(lambda *x: interop.attention(*x, **options), *map(jnp.asarray, x))
    assert_close((out, *back(jnp.asarray(grad_out))), (saved.out, *true[:3]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_types_with_functions(rng, dtype):
    query, key, value = (jnp.asarray(rng.standard_normal((2, 5, 8)), dtype) for _ in range(3))
    table = jnp.asarray(rng.standard_normal((2, 5)), dtype)
    f = lambda t: interop.attention(  # noqa: E731
        query, key, value, score_mod=lambda s, b, h, q, k, t: s + t[h, k], score_args=(t,)
    )
    out, gradient = f(table), jax.grad(lambda t: (f(t).astype("float32") ** 2).sum())(table)
    assert out.dtype == gradient.dtype == dtype
    biased = interop.attention(query, key, value, table[:, None])
    np.testing.assert_allclose(out.astype("float32"), biased.astype("float32"), atol=1e-2)


def test_arrays_that_functions_capture(rng):
    """Those of JAX are constants; traced ones are refused by name."""
    x, t = jnp.asarray(rng.standard_normal((3, 2, 5, 8)), "float32"), jnp.arange(5.0)
    ours = interop.attention(*x, score_mod=lambda s, b, h, q, k: s + t[k])
    np.testing.assert_allclose(ours, interop.attention(*x, t), atol=1e-6)

    @jax.jit
    def traced(t):
        return interop.attention(*x, score_mod=lambda s, b, h, q, k: s + t[k])

    with pytest.raises(TypeError, match=r"capture no traced array.*pass it in score_args"):
        traced(t)


def test_functions_that_are_refused(rng):
    x = jnp.asarray(rng.standard_normal((3, 2, 5, 8)), "float32")
    with pytest.raises(ValueError, match="score_args: expected None without score_mod"):
        interop.attention(*x, score_args=(x,))
    with pytest.raises(TypeError, match="score_mod: expected a function of"):
        interop.attention(*x, score_mod=3)
    failing = jax.jit(
        lambda t: interop.attention(
            *x, score_mod=lambda s, b, h, q, k, t: s + t[k], score_args=(t,)
        )
    )
    with pytest.raises(Exception, match=r"reads t out of range: .* got 3 at b = 0"):
        jax.block_until_ready(failing(jnp.ones(3)))
