"""sdpa.interop.jax with packed sequences, against one call per sequence."""

import itertools
import warnings

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    jax = pytest.importorskip("jax", reason="needs jax: pip install '.[peers]'")

import jax.numpy as jnp
from support.in_jax import assert_close, hvp, moving, normal, x64  # noqa: F401

import sdpa
from sdpa.interop import jax as interop

CU_Q, CU_K = np.array([0, 2, 2, 7, 8]), np.array([0, 3, 5, 9, 9])
OPTIONS = {
    "plain": {},
    "lengths, lower right": {
        "is_causal": "lower_right",
        "key_lengths": np.array([2, 1, 4, 0]),
        "alibi_slopes": np.arange(6) / 6,
    },
    "offsets, window": {"query_offset": np.array([1, 0, -2, 3]), "window": (2, 1), "softcap": 2.0},
    "one of each": {"query_offset": 1, "is_causal": True, "key_lengths": 0},
}


def operands(rng):
    """Four sequences, one without queries and one without keys; three query heads to a key head."""
    return normal(rng, 8, 6, 4), normal(rng, 9, 2, 4), normal(rng, 9, 2, 3)


def together(options):
    def f(q, k, v, cu_q=CU_Q, cu_k=CU_K):
        cu = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
        return interop.attention(q, k, v, enable_gqa=True, **cu, **options)

    return f


def apart(options):
    """One call per sequence, on arrays that JAX cuts and joins."""

    def f(q, k, v):
        outs = []
        for s, (rows, keys) in enumerate(
            zip(itertools.pairwise(CU_Q), itertools.pairwise(CU_K), strict=True)
        ):
            own = options | {
                n: options[n][s]
                for n in ("key_lengths", "query_offset")
                if np.ndim(options.get(n, 0))
            }
            parts = [
                x[slice(*span)].swapaxes(0, 1) for x, span in ((q, rows), (k, keys), (v, keys))
            ]
            outs.append(interop.attention(*parts, enable_gqa=True, **own).swapaxes(0, 1))
        return jnp.concatenate(outs)

    return f


EVERY_OPTION = pytest.mark.parametrize("name", OPTIONS)
TRANSFORMS = {
    "grad": lambda f: jax.grad(moving(f), (0, 1, 2)),
    "jvp": lambda f: lambda *x: jax.jvp(f, x, tuple(map(jnp.cos, x))),
    "hessian-vector product": hvp,
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(f, 0), 1),
    "third order": lambda f: jax.grad(lambda *x: jnp.sin(hvp(f)(*x)[1][0]).sum(), (0, 2)),
}


@EVERY_OPTION
def test_forward(rng, name):
    """The bits of sdpa, compiled too, and with cu_seqlens that are known only when it runs."""
    x = operands(rng)
    cu = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}
    expected = sdpa.attention(*map(np.asarray, x), enable_gqa=True, **cu, **OPTIONS[name])
    f = together(OPTIONS[name])
    assert np.array_equal(f(*x), expected)
    assert np.array_equal(jax.jit(f)(*x), expected)
    if name != "one of each":
        assert np.array_equal(jax.jit(f)(*x, CU_Q, jnp.asarray(CU_K, jnp.int32)), expected)


@pytest.mark.slow
@EVERY_OPTION
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_derivatives(rng, name, transform):
    """Derivatives by the kernels and by the formula equal those of one call per sequence."""
    x = operands(rng)
    functions = (f(OPTIONS[name]) for f in (together, apart))
    assert_close(*(jax.jit(TRANSFORMS[transform](f))(*x) for f in functions))


def test_vmap(rng):
    """A batch of queries, and a batch of sequence starts."""
    q, k, v = operands(rng)
    queries = jnp.stack([q, 2 * q, -q], 1)
    for f in together({}), jax.grad(moving(together({})), (0, 1)):
        found = jax.vmap(f, (1, None, None))(queries, k, v)
        expected = [f(queries[:, i], k, v) for i in range(3)]
        for one, many in zip(
            jax.tree.leaves(found), zip(*map(jax.tree.leaves, expected), strict=True), strict=True
        ):
            assert np.array_equal(one, jnp.stack(many))
    starts = jnp.asarray([CU_Q, [0, 1, 4, 4, 8]])
    found = jax.vmap(together({}), (None, None, None, 0))(q, k, v, starts)
    assert np.array_equal(found, jnp.stack([together({})(q, k, v, cu) for cu in starts]))


def test_no_sequences():
    x, none = jnp.ones((0, 2, 4)), np.zeros(1, np.int32)
    f = jax.jit(lambda x, cu: interop.attention(x, x, x, cu_seqlens_q=cu, cu_seqlens_k=cu))
    assert f(x, none).shape == (0, 2, 4)


BAD = {
    "first": ([1, 2, 2, 7, 8], "cu_seqlens_q: expected 0 as its first element, got 1"),
    "decreasing": (
        [0, 3, 2, 7, 8],
        "cu_seqlens_q: expected elements that do not decrease, got 2 after 3",
    ),
    "last": (
        [0, 2, 2, 7, 9],
        "cu_seqlens_q: expected at most query's number of rows, 8, as its last element, got 9",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_starts(rng, what):
    """Refused at once where they are known, else when they are."""
    x, (bad, message) = operands(rng), BAD[what]
    with pytest.raises(ValueError, match=f"^{message}$"):
        together({})(*x, np.array(bad))
    late = "cu_seqlens_q: expected elements from 0 to the number of rows, 8, that do not decrease"
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=late):
        jax.jit(together({}))(*x, np.array(bad)).block_until_ready()


def test_lengths_beyond_a_sequence(rng):
    x = operands(rng)
    lengths = jnp.array([3, 2, 5, 0])
    message = "key_lengths: expected integers from 0 to Lk"
    with pytest.raises(ValueError, match=message):
        together({"key_lengths": lengths})(*x)
    f = jax.jit(lambda n: together({"key_lengths": n})(*x))
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=message):
        f(lengths).block_until_ready()


@pytest.mark.parametrize("cu", [[0.0, 8.0], 8, [[0, 8]]], ids=["float", "number", "axes"])
def test_traced_starts_have_their_type_and_shape(rng, cu):
    x = operands(rng)
    with pytest.raises((TypeError, ValueError), match=r"^cu_seqlens_q: expected (integers|shape)"):
        jax.jit(together({}))(*x, jnp.asarray(cu))


def padded(x, n):
    """x with n more rows, of NaN."""
    return jnp.concatenate([x, jnp.full((n, *x.shape[1:]), jnp.nan)])


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_padding_at_the_end(rng, name, transform):
    """Rows behind the last sequence get zeros, and NaN there reaches nothing, tangents included."""
    q, k, v = operands(rng)

    def ours(q, k, v):
        return together(OPTIONS[name])(padded(q, 3), padded(k, 2), padded(v, 2))

    np.testing.assert_array_equal(ours(q, k, v)[8:], 0)
    cut = lambda *x: ours(*x)[:8]  # noqa: E731
    found, expected = (
        jax.jit(TRANSFORMS[transform](f))(q, k, v) for f in (cut, together(OPTIONS[name]))
    )
    assert_close(found, expected)


def test_gradients_of_padding(rng):
    """They are 0, whatever padding holds, forward over reverse as well."""
    x = [padded(y, n) for y, n in zip(operands(rng), (3, 2, 2), strict=True)]
    f = together({"is_causal": True})

    def loss(q, k, v):  # whose gradient is NaN in rows of padding
        out = f(q, k, v)
        return (out * padded(jnp.ones((8, *out.shape[1:])), 3)).sum()

    for found in (jax.grad(loss, (0, 1, 2))(*x), jax.jvp(jax.grad(loss, (0, 1, 2)), x, x)[1]):
        for g, n in zip(found, (8, 9, 9), strict=True):
            assert np.isfinite(g).all()
            np.testing.assert_array_equal(g[n:], 0)


def test_padding_with_traced_starts(rng):
    x = [padded(y, n) for y, n in zip(operands(rng), (3, 2, 2), strict=True)]
    expected = together({})(*x)
    assert np.isfinite(expected).all()
    found = jax.jit(together({}))(*x, jnp.asarray(CU_Q), jnp.asarray(CU_K))
    assert np.array_equal(found, expected)
