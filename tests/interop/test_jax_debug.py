"""jax.debug_nans and jax.debug_infs: right values, or the name of the operation that is wrong."""

import warnings

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    jax = pytest.importorskip("jax", reason="needs jax: pip install '.[peers]'")

import jax.numpy as jnp
from support.in_jax import x64  # noqa: F401

from sdpa.interop import jax as interop

HEADS, N_Q, N_K, D = 2, 5, 6, 4
FLAGS = ("debug_nans", "debug_infs")
KEEP = np.ones((N_Q, N_K), bool)
KEEP[:, 3] = False
ROW = np.ones((N_Q, N_K), bool)
ROW[1] = False
NOTHING = np.zeros((N_Q, N_K), bool)
BIAS = np.where(KEEP, 0.5, -np.inf)


@pytest.fixture
def x(rng):
    shapes = [(2, HEADS, n, D) for n in (N_Q, N_K, N_K)]
    return [jnp.asarray(rng.standard_normal(shape)) for shape in shapes]


def with_masked(x, what):
    """These operands with another key and value 3, which must not matter."""
    query, key, value = x
    return [query, key.at[:, :, 3].set(what), value.at[:, :, 3].set(what)]


# Options, and the contents of key and value 3 if they are masked.
LEGITIMATE = {
    "plain": ({}, None),
    "row without keys": ({"attn_mask": ROW}, None),
    "no keys at all": ({"attn_mask": NOTHING}, None),
    "no key lengths": ({"key_lengths": np.array([0, 3])}, None),
    "masked nan": ({"attn_mask": KEEP}, np.nan),
    "masked inf": ({"attn_mask": KEEP}, np.inf),
    "bias of -inf": ({"attn_mask": BIAS}, np.nan),
    "bias of -inf for a row": ({"attn_mask": np.where(ROW, 1.0, -np.inf), "softcap": 2.0}, None),
    "sinks of -inf": ({"attn_mask": ROW, "sinks": np.full(HEADS, -np.inf)}, None),
    "dropout": ({"attn_mask": ROW, "dropout_p": 0.5, "rng": 1}, None),
    "packed": ({"cu_seqlens_q": [0, 0, 5], "cu_seqlens_k": [0, 6, 6]}, None),
}


def sine(f):
    return lambda *x: jnp.sin(f(*x)).sum()


def gradients(f):
    return jax.grad(sine(f), (0, 1, 2))


def hvp(f):
    return lambda *x: jax.jvp(gradients(f), x, tuple(jnp.cos(jnp.nan_to_num(a)) for a in x))


# vmap and two derivatives of it; jit inside and around a derivative.
WAYS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "grad": gradients,
    "jit of grad": lambda f: jax.jit(gradients(f)),
    "grad of jit": lambda f: gradients(jax.jit(f)),
    "hvp": hvp,
    "jit of hvp": lambda f: jax.jit(hvp(f)),
    "vmap": lambda f: jax.vmap(f),
    "grad of vmap": lambda f: gradients(jax.vmap(f)),
    "vmap of grad": lambda f: jax.vmap(gradients(f)),
}


def problem(x, case, way):
    """(function, operands); under vmap the operands are stacked."""
    options, masked = LEGITIMATE[case]
    if masked is not None:
        x = with_masked(x, masked)
    if case == "packed":
        x = [a[0].swapaxes(0, 1) for a in x]
    if "vmap" in way:
        x = [jnp.stack([a, a]) for a in x]
    return WAYS[way](lambda *x: interop.attention(*x, **options)), x


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", LEGITIMATE)
def test_right_values(x, case, way, flag):
    f, x = problem(x, case, way)
    expected = f(*x)
    with getattr(jax, flag)(True):
        found = f(*x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.isfinite(a).all()


@pytest.mark.parametrize("way", ["eager", "jit", "grad", "jit of grad", "vmap"])
def test_two_axes_and_masked_nan(x, way):
    """An axis of heads is added to operands of two axes before the kernel sees them."""
    x = [a[0, 0] for a in with_masked(x, np.nan)]
    if way == "vmap":
        x = [jnp.stack([a, a]) for a in x]
    f = WAYS[way](lambda *x: interop.attention(*x, KEEP))
    expected = f(*x)
    with jax.debug_nans(True):
        np.testing.assert_array_equal(jax.tree.leaves(f(*x))[0], jax.tree.leaves(expected)[0])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("which", range(3))
def test_the_operation_is_named(x, which, way):
    x[which] = x[which].at[0, 0, 2, 1].set(np.nan)
    if "vmap" in way:
        x = [jnp.stack([a, a]) for a in x]
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as caught:
        WAYS[way](interop.attention)(*x)
    assert str(caught.value) == "invalid value (nan) encountered in sdpa_attention_forward"


@pytest.mark.parametrize("way", ["eager", "jit", "vmap", "grad"])
def test_infinite_results_are_named(x, way):
    x[2] = x[2].at[0, 0, 2, 1].set(np.inf)
    if "vmap" in way:
        x = [jnp.stack([a, a]) for a in x]
    with jax.debug_infs(True), pytest.raises(FloatingPointError) as caught:
        WAYS[way](interop.attention)(*x)
    assert str(caught.value) == "invalid value (inf) encountered in sdpa_attention_forward"


def test_a_wrong_gradient_is_named(x):
    """The output is finite, and the gradient that comes in is not."""
    out, vjp = jax.vjp(interop.attention, *x)
    g = out.at[0, 0, 0, 0].set(jnp.nan)
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as caught:
        vjp(g)
    assert str(caught.value) == "invalid value (nan) encountered in sdpa_attention_backward"


def test_forward_over_forward(x):
    """By the formula, which has -inf where a pair is masked."""
    f = lambda q: interop.attention(q, *x[1:], ROW)  # noqa: E731
    second = lambda q: jax.jvp(lambda q: jax.jvp(f, (q,), (q,))[1], (q,), (q,))[1]  # noqa: E731
    expected = second(x[0])
    for flag in FLAGS:
        with getattr(jax, flag)(True):
            np.testing.assert_array_equal(second(x[0]), expected)
    q = x[0].at[0, 0, 0, 0].set(1e30)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"encountered in"):
        jax.jvp(lambda q: jax.jvp(f, (q,), (q * jnp.inf,))[1], (q,), (q,))


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("residual", [False, True])
def test_dot_product_attention(x, flag, residual):
    """Padding has -inf in the residual; a bias and a mask are joined with it."""
    x = [a.swapaxes(1, 2) for a in with_masked(x, np.nan)]
    lengths = np.array([3, N_Q])

    def f(*x):
        return interop.dot_product_attention(
            *x, BIAS, KEEP, query_seq_lengths=lengths, return_residual=residual
        )

    expected = f(*x)
    with getattr(jax, flag)(True):
        found = f(*x)
        jitted = jax.jit(lambda *x: jax.tree.leaves(f(*x))[0])(*x)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    np.testing.assert_array_equal(jitted, jax.tree.leaves(expected)[0])


def test_the_flags_stay_as_they_were(x):
    for nans, infs in ((True, False), (False, True), (True, True)):
        with jax.debug_nans(nans), jax.debug_infs(infs):
            interop.attention(*x)
            with pytest.raises(TypeError):
                interop.attention(*x, window=3)
            assert jax.config.jax_debug_nans == nans
            assert jax.config.jax_debug_infs == infs
            if nans:
                with pytest.raises(FloatingPointError):
                    jnp.zeros(2) / jnp.zeros(2)


def test_under_disable_jit(x):
    query = x[0].at[0].set(jnp.nan)
    with jax.debug_nans(True), jax.disable_jit():
        np.testing.assert_array_equal(interop.attention(*x, ROW)[:, :, 1], 0)
        with pytest.raises(FloatingPointError, match="in sdpa_attention_forward"):
            interop.attention(query, *x[1:])
