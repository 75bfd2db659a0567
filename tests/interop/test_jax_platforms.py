"""sdpa.interop.jax where JAX's settings, devices or files are not the usual ones."""

import warnings

import numpy as np
import pytest
from support import problems
from support.problems import CASES, positional

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    jax = pytest.importorskip("jax", reason="needs jax: pip install '.[peers]'")

import jax.numpy as jnp
from jax import export
from jax.test_util import check_grads
from support.in_jax import assert_close, normal, x64  # noqa: F401

from sdpa.interop.jax import attention, dot_product_attention

PRIMITIVES = ("forward", "tangent", "backward", "second")
UNCHECKED = [
    export.DisabledSafetyCheck.custom_call(f"sdpa_attention_{name}") for name in PRIMITIVES
]


def total(q, k, v):
    return jnp.sin(attention(q, k, v, is_causal=True)).sum()


FUNCTIONS = {
    "forward": lambda *x: attention(*x, is_causal=True),
    "gradient": jax.grad(total, (0, 1, 2)),
    "tangent": lambda *x: jax.jvp(total, x, x),
    "second": lambda *x: jax.jvp(jax.grad(total), x, x),
    "jax.nn": lambda *x: dot_product_attention(*x, is_causal=True),
}
EVERY_FUNCTION = pytest.mark.parametrize("name", FUNCTIONS)


def operands(rng):
    return [normal(rng, 2, 3, 6, 8) for _ in range(3)]


@EVERY_FUNCTION
@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu"])
def test_other_platforms_are_refused_with_the_remedy(platform, name, rng):
    traced = jax.jit(FUNCTIONS[name]).trace(*operands(rng))
    with pytest.raises(NotImplementedError) as raised:
        traced.lower(lowering_platforms=(platform,))
    text = str(raised.value)
    assert text.startswith("sdpa_attention_")
    assert text.partition(": ")[2] == (
        "expected a computation on the CPU, which the kernels of sdpa are for, got one for "
        f"{platform}; move the operands by jax.device_put(x, jax.devices('cpu')[0]), or start with "
        "JAX_PLATFORMS=cpu"
    )


@EVERY_FUNCTION
def test_export_to_a_file_and_back(name, rng):
    x, f = operands(rng), jax.jit(FUNCTIONS[name])
    written = export.export(f, disabled_checks=UNCHECKED)(*x).serialize()
    found, expected = export.deserialize(written).call(*x), f(*x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(a, b)


def test_an_exported_function_keeps_its_gradient(rng):
    x = operands(rng)
    f = jax.jit(FUNCTIONS["forward"])
    written = export.export(f, disabled_checks=UNCHECKED)(*x).serialize(vjp_order=1)
    again = export.deserialize(written)
    found = jax.grad(lambda *x: jnp.sin(again.call(*x)).sum(), (0, 1, 2))(*x)
    assert_close(found, jax.grad(total, (0, 1, 2))(*x))


@EVERY_FUNCTION
def test_symbolic_shapes_are_refused(name):
    shape = export.symbolic_shape("batch, 3, n, 8")
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    with pytest.raises(NotImplementedError) as raised:
        export.export(jax.jit(FUNCTIONS[name]), disabled_checks=UNCHECKED)(x, x, x)
    assert str(raised.value) == (
        "query: expected known sizes, got the symbolic shape (batch, 3, n, 8); export the function "
        "once for each shape"
    )


DERIVATIVES = {
    "forward": lambda f, x: f(*x),
    "gradient": lambda f, x: jax.grad(lambda *x: jnp.sin(f(*x)).sum(), tuple(range(len(x))))(*x),
    "second": lambda f, x: jax.jvp(jax.grad(lambda *x: jnp.sin(f(*x)).sum()), x, x)[1],
    "by the formula": lambda f, x: jax.jvp(lambda *x: jax.jvp(f, x, x)[1], x, x)[1],
    "batched": lambda f, x: jax.vmap(f)(*(jnp.stack([a, 2 * a]) for a in x)),
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("name", [name for name in CASES if "dropout_p" not in CASES[name]])
def test_callers_that_forbid_promotion_of_ranks(name, derivative, rng):
    """What they forbid themselves is none of what happens inside."""
    arrays, options = problems.problem(rng, name)
    arrays = {n: jnp.asarray(x, jnp.float64) for n, x in arrays.items()}
    f = positional(attention, arrays, options)
    x = tuple(arrays.values())
    expected = DERIVATIVES[derivative](f, x)
    with jax.numpy_rank_promotion("raise"):
        found = DERIVATIVES[derivative](f, x)
    assert_close(found, expected)


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "local_window_size": (2, 1)}])
def test_check_grads_of_jax_nn_s_function(options, rng):
    x = [normal(rng, 2, 5, n, 4) for n in (4, 2, 2)]
    bias = normal(rng, 1, 4, 5, 5)

    def f(*x):
        return dot_product_attention(*x, **options)

    check_grads(f, (*x, bias), order=2, modes=("fwd", "rev"))
