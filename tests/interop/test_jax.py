"""sdpa.interop.jax: every transformation of JAX against the formula in jax.numpy."""

import functools
import itertools
import math
import warnings

import numpy as np
import pytest
from support import problems
from support.calls import message
from support.helpers import visible_pairs
from support.problems import CASES, N_K, N_Q, positional

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    jax = pytest.importorskip("jax", reason="needs jax: pip install '.[peers]'")

import jax.numpy as jnp
from jax.test_util import check_grads
from support.in_jax import (
    assert_close,
    enabled_x64,
    hvp,
    hvp_of,
    moving,
    normal,
    x64,  # noqa: F401
)

import sdpa
from sdpa.interop import jax as interop

EVERY_CASE = pytest.mark.parametrize("name", CASES)
CASES_OF_FORMULA = [
    name for name in CASES if "dropout_p" not in CASES[name] and "packed" not in name
]
DTYPES = ("float16", "bfloat16", "float32", "float64")


def problem(rng, name, dtype="float64"):
    """(operands that are differentiated, by name; the other options), as arrays of JAX."""
    operands, options = problems.problem(rng, name)
    return {n: jnp.asarray(x).astype(dtype) for n, x in operands.items()}, options


def visible_in(options, n_batch):
    """(batch, 1, Lq, Lk) of the options that say who sees whom."""
    lengths = np.broadcast_to(options.get("key_lengths", N_K), n_batch)
    offsets = np.broadcast_to(options.get("query_offset", 0), n_batch)
    causal, window = options.get("is_causal", False), options.get("window")
    return np.stack(
        [
            visible_pairs(N_Q, N_K, causal, window, n, offset)[None]
            for n, offset in zip(lengths, offsets, strict=True)
        ]
    )


def formula(query, key, value, attn_mask=None, sinks=None, scale=None, **options):
    """Attention by jax.numpy's operations."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else jnp.asarray(scale)[..., None, None]
    s = scale * (query @ key.mT)
    if options.get("softcap"):
        s = options["softcap"] * jnp.tanh(s / options["softcap"])
    if "alibi_slopes" in options:
        i, j = np.ogrid[:N_Q, :N_K]
        distance = abs(i + options.get("query_offset", 0) - j)
        s -= options["alibi_slopes"][:, None, None] * distance
    visible = visible_in(options, query.shape[0] if query.ndim == 4 else 1)
    visible = visible if query.ndim == 4 else visible[0]
    visible = visible & options.get("where", True)
    if attn_mask is not None and attn_mask.dtype == bool:
        visible = visible & attn_mask
    elif attn_mask is not None:
        s = s + attn_mask
    s = jnp.where(visible, s, -1e9)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[..., None, None], (*s.shape[:-1], 1))
        s = jnp.concatenate([s, column], -1)
    p = jax.nn.softmax(s, -1)[..., :N_K]
    return jnp.where(visible, p, 0) @ value


def assert_same(transform, functions, x):
    """Assert that a transformation gives the same for both functions, compiled."""
    assert_close(*(jax.jit(transform(f))(*x) for f in functions))


# ---------------------------------------------------------------------------------- the results


@EVERY_CASE
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_and_gradients_are_those_of_sdpa(rng, name, dtype):
    operands, options = problem(rng, name, dtype)
    arrays = {n: np.asarray(x) for n, x in operands.items()}
    out, lse = sdpa.attention_forward(**arrays, **options)
    grad_out = np.cos(out.astype(np.float64)).astype(out.dtype)
    expected = sdpa.attention_backward(
        grad_out,
        **{n: arrays.pop(n) for n in ("query", "key", "value")},
        **{"out": out, "lse": lse, "needs": tuple(operands)},
        **arrays,
        **options,
    )
    f = positional(interop.attention, operands, options)
    found, back = jax.vjp(f, *operands.values())
    assert found.dtype == jnp.dtype(dtype)
    assert np.array_equal(found, out)
    assert np.array_equal(jax.jit(f)(*operands.values()), out)
    for n, x in zip(operands, back(jnp.asarray(grad_out)), strict=True):
        assert x.dtype == operands[n].dtype
        assert np.array_equal(x, getattr(expected, n)), n


def test_without_x64(rng):
    """JAX's default types: integers of 32 bits, float32 for float64."""
    q = rng.standard_normal((2, 2, 3, 4)).astype(np.float32)
    options = {"key_lengths": np.array([2, 3]), "query_offset": 1, "is_causal": True}
    expected = sdpa.attention(q, q, q, **options)
    with enabled_x64(False):
        traced = jax.jit(lambda n: interop.attention(q, q, q, **options | {"key_lengths": n}))
        assert np.array_equal(interop.attention(q, q, q, **options), expected)
        assert np.array_equal(traced(options["key_lengths"]), expected)
        assert interop.attention(*(q.astype(np.float64),) * 3).dtype == np.float32


SHAPES = {
    "no heads": ((3, 4), (5, 4), (5, 2), (3, 2)),
    "some without heads": ((3, 4), (2, 5, 4), (5, 2), (2, 3, 2)),
    "broadcast": ((2, 1, 3, 4), (7, 1, 1, 5, 4), (1, 6, 5, 2), (7, 2, 6, 3, 2)),
    "no queries": ((2, 0, 4), (2, 5, 4), (2, 5, 2), (2, 0, 2)),
    "no keys": ((2, 3, 4), (2, 0, 4), (2, 0, 2), (2, 3, 2)),
    "no width": ((2, 3, 0), (2, 5, 0), (2, 5, 0), (2, 3, 0)),
    "no batch": ((0, 2, 3, 4), (2, 5, 4), (2, 5, 2), (0, 2, 3, 2)),
    "no heads at all": ((0, 3, 4), (0, 5, 4), (0, 5, 2), (0, 3, 2)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(rng, name):
    *shapes, expected = SHAPES[name]
    x = [normal(rng, *shape) for shape in shapes]
    out, back = jax.vjp(interop.attention, *x)
    assert out.shape == expected
    assert np.array_equal(out, sdpa.attention(*map(np.asarray, x)))
    for grad, operand in zip(back(out), x, strict=True):
        assert grad.shape == operand.shape
        assert np.isfinite(grad).all()


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_by_the_formula(rng, name):
    """Forward over forward gives the same for operands that are broadcast as for copies."""
    *shapes, expected = SHAPES[name]
    x = tuple(normal(rng, *shape) for shape in shapes)

    def curved(f):
        tangents = tuple(map(jnp.cos, x))
        return jax.jvp(lambda *x: jax.jvp(f, x, tuple(map(jnp.sin, x)))[1], x, tangents)

    def copied(*x):
        return interop.attention(*(jnp.broadcast_to(y, (*expected[:-2], *y.shape[-2:])) for y in x))

    assert_close(*(curved(f) for f in (interop.attention, copied)))


def test_inputs_are_not_modified(rng):
    operands, options = problem(rng, "all")
    before = {n: np.array(x) for n, x in operands.items()}
    f = jax.jit(positional(interop.attention, operands, options))
    jax.hessian(lambda *x: f(*x).sum())(*operands.values())
    for n, x in operands.items():
        assert np.array_equal(x, before[n])


def test_dropout_by_key(rng):
    q = normal(rng, 2, 5, 4)

    @jax.jit
    def f(key):
        return interop.attention(q, q, q, dropout_p=0.5, rng=key)

    first, second = f(jax.random.key(1)), f(jax.random.key(2))
    assert not np.array_equal(first, second)
    assert np.array_equal(first, f(jax.random.PRNGKey(1)))
    low, high = map(int, jax.random.bits(jax.random.key(1), (2,), jnp.uint32))
    assert np.array_equal(first, interop.attention(q, q, q, None, 0.5, rng=high << 32 | low))
    of_numbers = [interop.attention(q, q, q, None, 0.5, rng=n) for n in (5, jnp.uint32(5))]
    assert np.array_equal(*of_numbers)


def test_disable_jit(rng):
    q = normal(rng, 2, 5, 4)
    with jax.disable_jit():
        out = interop.attention(q, q, q)
    assert np.array_equal(out, interop.attention(q, q, q))


# -------------------------------------------------------------------------------- derivatives


@EVERY_CASE
def test_check_grads(rng, name):
    operands, options = problem(rng, name)
    f = positional(interop.attention, operands, options)
    modes = ("fwd", "rev") if "dropout_p" not in options else ("rev",)
    check_grads(f, tuple(operands.values()), order=2, modes=modes)


def scanned(f):
    def total(*x):
        def step(state, _):
            return state + f(x[0] + state.mean(), *x[1:]), None

        return jax.lax.scan(step, f(*x), None, length=3)[0].sum()

    return jax.grad(total, argnums=tuple(range(5)))


ALL = tuple(range(6))
TRANSFORMS = {
    "none": lambda f: f,
    "grad": lambda f: jax.grad(moving(f), ALL),
    "grad of jit": lambda f: jax.grad(moving(jax.jit(f)), ALL),
    "vjp": lambda f: lambda *x: jax.vjp(f, *x)[1](jnp.cos(f(*x))),
    "jvp": lambda f: lambda *x: jax.jvp(f, x, tuple(map(jnp.cos, x))),
    "linearize": lambda f: lambda *x: jax.linearize(f, *x)[1](*map(jnp.cos, x)),
    "transposed": lambda f: (
        lambda *x: jax.linear_transpose(lambda v: f(*x[:2], v, *x[3:]), x[2])(f(*x))
    ),
    "jacrev": lambda f: jax.jacrev(f, ALL),
    "jacfwd": lambda f: jax.jacfwd(f, ALL),
    "hessian": lambda f: jax.hessian(moving(f), ALL),
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(f, (0, 3)), (1, 4)),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f, (0, 3)), (0, 1, 4)),
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f, 1), (0, 2, 3)),
    "gradient of a gradient": lambda f: jax.grad(
        lambda *x: jnp.sin(jax.grad(moving(f), 1)(*x)).sum(), ALL
    ),
    "hessian-vector product": hvp,
    "checkpoint": lambda f: jax.grad(moving(jax.checkpoint(f)), ALL),
    "scan": scanned,
    "third order, reverse": lambda f: jax.grad(
        lambda *x: jnp.sin(hvp(f)(*x)[1][0]).sum(), argnums=(0, 2, 4)
    ),
    "third order, forward": lambda f: jax.jacfwd(jax.hessian(moving(f), 3), 4),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transformations(rng, transform):
    """Each transformation gives the same result on the formula."""
    x = tuple(normal(rng, *s) for s in [(2, 3, 4), (2, 5, 4), (2, 5, 3), (2, 3, 5), (2,), (2,)])
    functions = [
        lambda *x, f=f: f(*x[:4], sinks=x[4], scale=x[5], softcap=1.5)
        for f in (interop.attention, formula)
    ]
    assert_same(TRANSFORMS[transform], functions, x)
    if transform in ("none", "grad", "jvp"):
        assert_close(*(TRANSFORMS[transform](f)(*x) for f in functions))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES_OF_FORMULA)
def test_derivatives_of_every_case(rng, name):
    """Second derivatives by the kernels and by the formula, and third ones."""
    operands, options = problem(rng, name)
    x, places = tuple(operands.values()), tuple(range(len(operands)))
    functions = [positional(f, operands, options) for f in (interop.attention, formula)]

    def derivatives(f):
        second = hvp_of(f, x)
        forward = jax.jacfwd(lambda *x: jax.jvp(moving(f), x, tuple(map(jnp.cos, x))), 1)(*x)
        third = jax.grad(lambda *x: sum(jnp.sin(y).sum() for y in hvp_of(f, x)[1]), places)(*x)
        return second, forward, third

    assert_close(*(jax.jit(derivatives, static_argnums=0)(f) for f in functions))


# --------------------------------------------------------------------------------------- vmap

BATCHED = {
    **{
        f"{name} alone": (name,)
        for name in ("query", "key", "value", "attn_mask", "sinks", "scale")
    },
    "query and key": ("query", "key"),
    "all but value": ("query", "key", "attn_mask", "sinks"),
    "all": ("query", "key", "value", "attn_mask", "sinks", "scale"),
}


@pytest.mark.parametrize("of", BATCHED)
@pytest.mark.parametrize("place", [0, -1])
def test_vmap(rng, of, place):
    """Values, gradients per sample and Hessian-vector products, whichever operand is batched."""
    operands, options = problem(rng, "all but dropout")
    axes = {n: place if n in BATCHED[of] else None for n in operands}
    x = [
        jnp.moveaxis(normal(rng, 4, *y.shape), 0, place) if axes[n] is not None else y
        for n, y in operands.items()
    ]
    for transform in (
        lambda f: f,
        lambda f: jax.grad(moving(f), ALL),
        lambda f: lambda *x: jax.jvp(f, x, tuple(map(jnp.cos, x)))[1],
        hvp,
    ):
        functions = [
            jax.vmap(transform(positional(f, operands, options)), tuple(axes.values()))
            for f in (interop.attention, formula)
        ]
        assert_same(lambda f: f, functions, x)


HIDDEN = {
    "key_lengths": {"key_lengths": 3, "softcap": 2.0},
    "mask": {"attn_mask": np.arange(N_K) < 3},
    "bias": {"attn_mask": np.where(np.arange(N_K) < 3, 0.5, -np.inf)},
    "mask_mod": {"mask_mod": lambda b, h, q, k: k < 3},
}


@pytest.mark.parametrize("name", HIDDEN)
def test_padding_by_the_formula(rng, name):
    """What keys and values that no query sees hold, and their tangents, reaches no derivative."""
    q = normal(rng, 2, N_Q, 4)
    rest = normal(rng, 4, 2, N_K, 4)  # key, value and their tangents

    def curved(q, k, v, k_t, v_t):
        def f(k, v):
            return jnp.sin(interop.attention(q, k, v, **HIDDEN[name])).sum()

        def moved(k, v):
            return jax.jvp(f, (k, v), (k_t, v_t))[1]

        return jax.jvp(moved, (k, v), (k_t, v_t))[1]

    both = jax.jit(jax.value_and_grad(curved))
    assert_close(both(q, *rest.at[:, :, 3:].set(jnp.nan)), both(q, *rest))


@pytest.mark.parametrize("transform", ["grad", "hessian-vector product"])
def test_derivative_of_vmap(rng, transform):
    """An operand that is not batched has the sum as its gradient."""
    operands, options = problem(rng, "all but dropout")
    x = list(operands.values())
    x[1] = normal(rng, 4, *x[1].shape)
    functions = [
        jax.vmap(positional(f, operands, options), (None, 0, None, None, None, None))
        for f in (interop.attention, formula)
    ]
    assert_same(TRANSFORMS[transform], functions, x)


OF_INTEGERS = {
    "key_lengths": jnp.array([[1, 5], [2, 0], [3, 3]]),
    "query_offset": jnp.array([[1, -2], [0, 4], [2, 2]]),
    "alibi_slopes": np.arange(6).reshape(3, 2) / 7,
}


@pytest.mark.parametrize("name", OF_INTEGERS)
@pytest.mark.parametrize("is_causal", [False, True, "lower_right"])
def test_vmap_of_constants(rng, name, is_causal):
    if name == "query_offset" and is_causal == "lower_right":
        is_causal = False
    q, k = normal(rng, 2, 2, N_Q, 4), normal(rng, 2, 2, N_K, 4)
    values = jnp.asarray(OF_INTEGERS[name])

    def f(q, x):
        return interop.attention(q, k, k, is_causal=is_causal, **{name: x}, window=(4, None))

    for g in f, jax.jacrev(f):
        found = jax.vmap(g, (None, 0))(q, values)
        assert np.array_equal(found, jnp.stack([g(q, x) for x in values]))


def test_vmap_of_dropout(rng):
    """A batch gives the results of its entries one by one, with one seed or several."""
    q, k = normal(rng, 3, 2, N_Q, 4), normal(rng, 2, N_K, 4)
    keys = jax.random.split(jax.random.key(0), 3)

    def f(q, rng):
        return interop.attention(q, k, k, dropout_p=0.5, rng=rng)

    for g in f, jax.grad(moving(f)):
        found = jax.vmap(g, (0, None))(q, keys[0])
        assert np.array_equal(found, jnp.stack([g(x, keys[0]) for x in q]))
        found = jax.vmap(g)(q, keys)
        assert np.array_equal(found, jnp.stack([g(*x) for x in zip(q, keys, strict=True)]))


def test_nested_vmap(rng):
    q, k = normal(rng, 7, 2, 3, 4), normal(rng, 6, 2, 5, 4)
    nested = jax.vmap(jax.vmap(interop.attention, (0, None, None)), (None, 0, 0))
    for i, j in itertools.product(range(6), range(7)):
        assert np.array_equal(nested(q, k, k)[i, j], interop.attention(q[j], k[i], k[i]))


# ------------------------------------------------------------------------------- what is refused

Q = np.zeros((2, 3, 4), np.float32)
REFUSED = {
    "type": (
        lambda: interop.attention(Q, Q.astype(np.float16), Q),
        TypeError,
        "value: expected key's dtype float16, got float32; write value.astype(key.dtype)",
    ),
    "integers": (
        lambda: interop.attention(*(Q.astype(np.int32),) * 3),
        TypeError,
        "query: expected float16, bfloat16, float32 or float64, got int32; "
        "write query.astype(np.float32)",
    ),
    "width": (
        lambda: interop.attention(Q, Q[..., :3], Q),
        ValueError,
        "key: expected (..., 3, 4) to match query's last axis 4, got (..., 3, 3)",
    ),
    "integer mask": (
        lambda: interop.attention(Q, Q, Q, np.ones((3, 3), np.int32)),
        TypeError,
        "attn_mask: expected bool (True = attend) or, to be added to the scores, float16, "
        "bfloat16, float32 or float64, got int32; write attn_mask != 0 for a mask of ones and "
        "zeros, attn_mask.astype(query.dtype) for a bias",
    ),
    "lengths": (
        lambda: interop.attention(Q, Q, Q, key_lengths=4),
        ValueError,
        "key_lengths: expected integers from 0 to Lk = 3, got 4",
    ),
    "seed": (
        lambda: interop.attention(Q, Q, Q, dropout_p=0.5, rng=-1),
        ValueError,
        "rng: expected an int from 0 to 2^64 - 1, got -1",
    ),
    "seed that nobody needs": (
        lambda: interop.attention(Q, Q, Q, rng="x"),
        TypeError,
        "rng: expected an int from 0 to 2^64 - 1 or a key of jax.random with dropout_p > 0, "
        "got 'x'",
    ),
    "keys": (
        lambda: interop.attention(
            Q, Q, Q, dropout_p=0.5, rng=jax.random.split(jax.random.key(0), 3)
        ),
        ValueError,
        "rng: expected one key of jax.random, got an array of keys of shape (3,); jax.vmap gives "
        "each call its own",
    ),
    "no seed": (
        lambda: interop.attention(Q, Q, Q, dropout_p=0.5),
        TypeError,
        "rng: expected an int from 0 to 2^64 - 1 or a key of jax.random with dropout_p > 0, "
        "got None",
    ),
    "forward over forward of dropout": (
        lambda: jax.jacfwd(jax.jacfwd(lambda q: interop.attention(q, Q, Q, dropout_p=0.5, rng=1)))(
            Q
        ),
        NotImplementedError,
        "dropout_p: third derivatives and forward mode over forward mode are not available with "
        "dropout",
    ),
}


NO_ARRAYS = ["1", ["1"], [[1.0], [1.0, 2.0]], slice(3), 2**70]


@pytest.mark.parametrize("x", [*NO_ARRAYS, None], ids=repr)
@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("function", [interop.attention, interop.dot_product_attention])
def test_operands_that_are_no_arrays(function, name, x):
    with pytest.raises(TypeError, match=f"^{name}: expected an array, got <class"):
        function(**{"query": Q, "key": Q, "value": Q, name: x})


@pytest.mark.parametrize("x", [*NO_ARRAYS[:-1], 1j], ids=repr)
@pytest.mark.parametrize("name", ["attn_mask", "where", "scale", "sinks", "alibi_slopes"])
def test_options_that_are_no_arrays(name, x):
    with pytest.raises(TypeError, match=f"^{name}: expected "):
        interop.attention(Q, Q, Q, **{name: x})


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    call, error, expected = REFUSED[what]
    assert message(error, call) == expected


def test_a_traced_scale_is_an_operand():
    found = jax.jit(lambda scale: interop.attention(Q, Q, Q, scale=scale))(1.0)
    assert_close(found, interop.attention(Q, Q, Q, scale=1.0))


def test_a_traced_softcap_is_refused():
    with pytest.raises(TypeError, match=r"^softcap: expected a .*number.*, got .*[Tt]race"):
        jax.jit(lambda softcap: interop.attention(Q, Q, Q, softcap=softcap))(1.0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("transform", [lambda f: f, jax.grad, jax.hessian])
def test_a_softcap_beyond_the_range_is_none(rng, dtype, transform):
    x, beyond = jnp.asarray(rng.standard_normal((3, 4))).astype(dtype), float(np.finfo(dtype).max)
    found, expected = (
        transform(lambda x, cap=cap: jnp.sin(interop.attention(x, x, x, softcap=cap)).sum())(x)
        for cap in (beyond, None)
    )
    assert_close(found, expected)


@pytest.mark.parametrize("length", [-1, 4])
def test_traced_lengths_are_checked_when_they_are_known(length):
    f = jax.jit(lambda n: interop.attention(Q, Q, Q, key_lengths=n))
    message = f"key_lengths: expected integers from 0 to Lk = 3, got {length}"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        f(length).block_until_ready()
    assert np.isfinite(f(3)).all()


@pytest.mark.parametrize("offset", [2**60 + 1, -(2**63)])
def test_traced_offsets_are_checked_when_they_are_known(offset):
    f = jax.jit(lambda n: interop.attention(Q, Q, Q, query_offset=n, window=(2, 2)))
    message = rf"query_offset: expected integers from -2\^60 to 2\^60, got {offset}"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        f(jnp.int64(offset)).block_until_ready()
    assert not np.asarray(f(jnp.int64(2**60))).any()


@pytest.mark.parametrize("transform", [jax.grad, jax.jacfwd, jax.hessian])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_slopes_are_constants(rng, transform, wrap):
    """A derivative in them is refused, not 0; in the others it is there."""
    q, slopes = normal(rng, 2, 3, 4), jnp.array([0.5, 0.25])
    f = wrap(lambda q, slopes: jnp.sin(interop.attention(q, q, q, alibi_slopes=slopes)).sum())
    expected = "alibi_slopes: has no derivative; wrap it in jax.lax.stop_gradient, or add its bias"
    with pytest.raises(NotImplementedError, match=expected):
        transform(f, 1)(q, slopes)
    assert np.asarray(transform(f)(q, slopes)).any()
    still = transform(lambda slopes: f(slopes.sum() * q, jax.lax.stop_gradient(slopes)))
    assert np.asarray(still(slopes)).any()


def test_no_memory_is_an_error(rng):
    from sdpa import _core

    f = jax.jit(lambda q: interop.attention(q, q, q))
    q = normal(rng, 2, 300, 64)
    expected = f(q)
    _core._alloc_fail_after(0)
    try:
        # JAX chooses the type of the exception.
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="sdpa: no memory"):
            f(q).block_until_ready()
    finally:
        _core._alloc_fail_after(-1)
    assert np.array_equal(f(q), expected)


def test_invariant(rng):
    """A row computed alone has the bits of the same row in a batch, compiled or not."""
    q, k, v = (normal(rng, 1, 2, 70, 8) for _ in range(3))
    rows = functools.partial(interop.attention, is_causal=True, invariant=True)
    whole = rows(q, k, v)
    one = interop.attention(q[:, :, 9:10], k[:, :, :10], v[:, :, :10], invariant=True)
    assert np.array_equal(one, whole[:, :, 9:10])
    assert np.array_equal(jax.jit(rows)(q, k, v), whole)


@pytest.mark.parametrize("name", ["", *interop.__all__])
def test_each_has_an_example(name):
    assert ">>> " in (getattr(interop, name) if name else interop).__doc__
