"""sdpa.interop.jax.dot_product_attention against jax.nn's function of the same name."""

import inspect
import warnings

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    jax = pytest.importorskip("jax", reason="needs jax: pip install '.[peers]'")

import jax.numpy as jnp

from sdpa.interop.jax import dot_product_attention as ours

theirs = jax.nn.dot_product_attention
HAS_RESIDUAL = "return_residual" in inspect.signature(theirs).parameters
B, T, S, N, H = 2, 6, 7, 4, 8

CASES = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "bias": {"bias": (B, N, T, S)},
    "bias of the batch": {"bias": (1, N, T, S)},
    "bias of keys": {"bias": (B, 1, 1, S)},
    "mask": {"mask": np.arange(T * S).reshape(1, 1, T, S) % 3 > 0},
    "bias and mask": {
        "bias": (1, N, T, S),
        "mask": np.arange(B * S).reshape(B, 1, 1, S) % 3 > 0,
        "scale": -0.5,
    },
    "lengths": {
        "query_seq_lengths": np.array([T, 3], np.int32),
        "key_value_seq_lengths": np.array([4, S], np.int32),
    },
    "lengths of keys": {"key_value_seq_lengths": np.array([4, S], np.int32), "is_causal": True},
    "window": {"local_window_size": (2, 1)},
    "symmetric window": {"local_window_size": 2, "is_causal": True},
    "everything": {
        "bias": (B, N, T, S),
        "mask": np.arange(T * S).reshape(1, 1, T, S) % 5 != 3,
        "is_causal": True,
        "query_seq_lengths": np.array([T, 3], np.int32),
        "key_value_seq_lengths": np.array([4, S], np.int32),
        "local_window_size": (4, 0),
        "scale": 0.7,
    },
}
# Sums of at most H + S terms and exponentials of scores below 8, by both, in float32.
TOLERANCE = 4 * (H + S) * 2**-24


def problem(rng, name, kv_heads=N, dtype="float32"):
    """(query, key, value, bias or None), options."""
    options = dict(CASES[name])
    shapes = [(B, T, N, H), (B, S, kv_heads, H), (B, S, kv_heads, H)]
    bias = options.pop("bias", None)
    shapes += [bias] if bias else []
    x = [jnp.asarray(rng.standard_normal(shape)).astype(dtype) for shape in shapes]
    return x, options


def applied(f, name, options):
    """`f` of the differentiated arguments, compiled."""
    if f is theirs and name == "window":  # JAX 0.6.1 does not apply it without a mask
        options = options | {"mask": np.ones((1, 1, T, S), bool)}
    return jax.jit(lambda *x: f(*x, **options))


def gradient(f, name, options, argnums):
    """Gradients of a scalar that is not symmetric in any operand, compiled."""

    def total(*x):
        return sum(jnp.sin(y).sum() for y in jax.tree.leaves(applied(f, name, options)(*x)))

    return jax.jit(jax.grad(total, argnums))


def assert_close(found, expected):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=0, atol=TOLERANCE * max(abs(y).max(), 1))


@pytest.mark.parametrize("kv_heads", [N, 2, 1])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(rng, name, kv_heads):
    x, options = problem(rng, name, kv_heads)
    places = tuple(range(len(x)))
    assert_close(*(applied(f, name, options)(*x) for f in (ours, theirs)))
    assert_close(*(gradient(f, name, options, places)(*x) for f in (ours, theirs)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_types(rng, dtype):
    """Beside the same in float64, ours errs at most one rounding more than theirs.

    JAX's function does not compile in float16 on a CPU.
    """
    manager = getattr(jax, "enable_x64", None)
    if manager is None:
        from jax.experimental import enable_x64 as manager
    with manager(True):
        x, options = problem(rng, "causal", 2, dtype)
        wide = [a.astype("float64") for a in x]
        for f in applied, lambda *args: gradient(*args, (0, 1, 2)):
            true, found, other = (
                jax.tree.leaves(f(g, "causal", options)(*y))
                for g, y in ((ours, wide), (ours, x), (theirs, x))
            )
            for a, b, c in zip(true, found, other, strict=True):
                assert b.dtype == c.dtype == jnp.dtype(dtype)
                errors = [abs(np.asarray(y, np.float64) - a).max() for y in (b, c)]
                assert errors[0] <= errors[1] + float(jnp.finfo(dtype).eps) * abs(a).max()


@pytest.mark.parametrize("bias_dtype", ["float16", "bfloat16", "float32"])
def test_types_of_bias(rng, bias_dtype):
    """A bias of any type is added in float32; its gradient has the bias's type."""
    x, _ = problem(rng, "bias", dtype="bfloat16")
    bias = x.pop().astype(bias_dtype)
    gradient = jax.grad(lambda bias: ours(*x, bias).sum().astype(jnp.float32))(bias)
    assert gradient.dtype == jnp.dtype(bias_dtype)
    assert np.array_equal(ours(*x, bias), ours(*x, bias.astype(jnp.float32)))


@pytest.mark.parametrize("name", ["plain", "causal", "bias and mask", "lengths", "window"])
def test_without_batch(rng, name):
    x, options = problem(rng, name)
    plain = [a[0] for a in x[:3]]
    for n in ("query_seq_lengths", "key_value_seq_lengths"):
        if n in options:
            options[n] = options[n][1:]
    if name == "bias and mask":
        x[3], options["mask"] = x[3][0], options["mask"][:1]
    found, expected = (applied(f, name, options)(*plain, *x[3:]) for f in (ours, theirs))
    assert found.shape == (T, N, H)
    assert_close(found, expected)


@pytest.mark.skipif(not HAS_RESIDUAL, reason="this JAX has no return_residual")
@pytest.mark.parametrize("name", ["plain", "bias and mask", "lengths of keys"])
def test_residual(rng, name):
    x, options = problem(rng, name)
    options["return_residual"] = True
    assert_close(*(applied(f, name, options)(*x) for f in (ours, theirs)))
    squeezed = {n: v for n, v in options.items() if n in ("return_residual", "is_causal", "scale")}
    plain = [a[0] for a in x[:3]]
    assert_close(*(applied(f, name, squeezed)(*plain) for f in (ours, theirs)))
    assert_close(*(gradient(f, name, options, 0)(*x) for f in (ours, theirs)))


def test_what_padding_of_queries_holds(rng):
    """NaN there reaches neither results nor gradients, nor does debug_nans report it."""
    x, options = problem(rng, "lengths")
    padded = [x[0].at[1, 3:].set(jnp.nan), *x[1:]]
    for f in applied, lambda *args: gradient(*args, (0, 1, 2)):
        with jax.debug_nans(True):
            found = f(ours, "lengths", options)(*padded)
        assert_close(found, f(ours, "lengths", options)(*x))


def test_residual_of_padding(rng):
    x, options = problem(rng, "lengths")
    out, residual = ours(*x, **options, return_residual=True)
    assert residual.shape == (B, T, N)
    assert np.isneginf(residual[1, 3:]).all()
    assert not out[1, 3:].any()
    assert np.isfinite(residual[0]).all()


def test_rows_without_keys(rng):
    x, _ = problem(rng, "plain")
    mask = np.ones((1, 1, T, S), bool)
    mask[:, :, 2] = False
    out, back = jax.vjp(lambda *x: ours(*x, mask=mask), *x)
    assert not out[:, 2].any()
    assert all(np.isfinite(g).all() for g in back(out))


def test_same_signature():
    found = inspect.signature(ours).parameters
    expected = inspect.signature(theirs).parameters
    assert list(expected) == [name for name in found if name in expected]
    for name, parameter in expected.items():
        assert parameter.kind == found[name].kind
        assert parameter.default == found[name].default


Q = np.zeros((B, T, N, H), np.float32)
REFUSED = {
    "axes": (lambda: ours(Q[0, 0], Q, Q), "query: expected shape (B, T, N, H) or (T, N, H), got"),
    "batch": (lambda: ours(Q, Q[:1], Q), "key: expected shape (2, S, K, 8), got (1, 6, 4, 8)"),
    "width": (lambda: ours(Q, Q[..., :3], Q), "key: expected shape (2, S, K, 8), got (2, 6, 4, 3)"),
    "value": (
        lambda: ours(Q, Q, Q[:, :2]),
        "value: expected shape (2, 6, 4, H), got (2, 2, 4, 8)",
    ),
    "heads": (
        lambda: ours(Q, Q[:, :, :3], Q[:, :, :3]),
        "key: expected a number of heads that divides query's 4, got 3",
    ),
    "implementation": (
        lambda: ours(Q, Q, Q, implementation="cudnn"),
        "implementation: expected None, got 'cudnn'; jax.nn.dot_product_attention has the others",
    ),
    "residual": (
        lambda: ours(Q, Q, Q, return_residual="no"),
        "return_residual: expected True or False, got 'no'",
    ),
    "lengths": (
        lambda: ours(Q, Q, Q, key_value_seq_lengths=np.ones(3, np.int32)),
        "key_value_seq_lengths: expected shape (2,), got (3,)",
    ),
    "values of lengths": (
        lambda: ours(Q, Q, Q, key_value_seq_lengths=np.array([7, 1], np.int32)),
        "key_value_seq_lengths: expected integers from 0 to S = 6, got 7",
    ),
    "type of lengths": (
        lambda: ours(Q, Q, Q, query_seq_lengths=np.ones(2, np.float32)),
        "query_seq_lengths: expected integers, got float32",
    ),
    "mask": (
        lambda: ours(Q, Q, Q, mask=np.ones((1, 1, T, T), np.int32)),
        "mask: expected bool (True = attend), got int32; see bias",
    ),
    "bias": (
        lambda: ours(Q, Q, Q, np.ones((1, 1, T, T), bool)),
        "bias: expected a floating type, got bool",
    ),
    "shape of bias": (
        lambda: ours(Q, Q, Q, np.ones((1, 3, T, T), np.float32)),
        "bias: expected a shape that broadcasts to (2, 4, 6, 6), got (1, 3, 6, 6)",
    ),
    "axes of mask": (
        lambda: ours(Q[0], Q[0], Q[0], mask=np.ones((2, 1, T, T), bool)),
        "mask: expected a shape that broadcasts to (1, 4, 6, 6), got (2, 1, 6, 6)",
    ),
    "another diagonal": (
        lambda: ours(Q, Q, Q, is_causal="lower_right"),
        "is_causal: expected True or False, got 'lower_right'",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    call, message = REFUSED[what]
    with pytest.raises((TypeError, ValueError)) as raised:
        call()
    assert str(raised.value).startswith(message)


def test_lengths_that_a_compiled_function_closes_over():
    x = jnp.ones((B, T, N, H))
    lengths = jnp.array([3, 6])
    compiled = jax.jit(lambda x: ours(x, x, x, key_value_seq_lengths=lengths))
    assert jnp.array_equal(compiled(x), ours(x, x, x, key_value_seq_lengths=lengths))


def test_without_promotion_of_ranks():
    x = jnp.ones((B, T, N, H))
    lengths = {"query_seq_lengths": jnp.array([3, 6]), "key_value_seq_lengths": jnp.array([6, 3])}
    with jax.numpy_rank_promotion("raise"):
        out = ours(x, x, x, **lengths)
    assert jnp.array_equal(out, ours(x, x, x, **lengths))
