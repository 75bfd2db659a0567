"""Helpers of several tests in JAX, which import this file after checking for JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest


def enabled_x64(enabled=True):
    """The context manager, which JAX 0.6.1 has elsewhere."""
    manager = getattr(jax, "enable_x64", None)
    if manager is None:
        from jax.experimental import enable_x64 as manager
    return manager(enabled)


@pytest.fixture(autouse=True)
def x64():
    """Use 64-bit types, and turn off XLA's optimisation, which takes most of the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    with enabled_x64():
        yield
    jax.config.update("jax_disable_most_optimizations", False)


def normal(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape))


def assert_close(found, expected):
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(found) == len(expected) > 0
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-11)


def moving(f):
    """A scalar of all operands at once, which is not symmetric in any of them."""
    return lambda *x: jnp.sin(f(*x)).sum()


def hvp_of(f, x):
    """The gradient of `moving` and its derivative along the cosines."""
    gradient = jax.grad(moving(f), argnums=tuple(range(len(x))))
    return jax.jvp(gradient, x, tuple(map(jnp.cos, x)))


def hvp(f):
    return lambda *x: hvp_of(f, x)
