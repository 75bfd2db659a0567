"""sdpa.interop.jax in whole processes: devices, threads, memory, imports, the end."""

import threading
import warnings

import numpy as np
import pytest
from support import process

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    jax = pytest.importorskip("jax", reason="needs jax: pip install '.[peers]'")

import jax.numpy as jnp

from sdpa.interop.jax import attention, dot_product_attention

SHARDED = """
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
from sdpa.interop.jax import dot_product_attention

assert len(jax.devices()) == 2
mesh = Mesh(np.array(jax.devices()), ("x",))
q, k, v = jax.random.normal(jax.random.key(0), (3, 4, 6, 2, 8))
bias = jax.random.normal(jax.random.key(1), (2, 6, 6))

def plain(q, k, v, bias):
    return dot_product_attention(q, k, v, bias, is_causal=True)

def total(f):
    return lambda *x: jnp.sin(f(*x)).sum()

# The bias is shared by the batch, and cut where the heads are.
SPECS = {"batch": (P("x"), P()), "heads": (P(None, None, "x"), P("x"))}
for spec, of_bias in SPECS.values():
    f = jax.shard_map(plain, mesh=mesh, in_specs=(spec, spec, spec, of_bias), out_specs=spec)
    for transform in (
        lambda f: f,
        lambda f: jax.grad(total(f), (0, 1, 2, 3)),
        lambda f: lambda *x: jax.jvp(jax.grad(total(f), (0, 3)), x, x),
        lambda f: jax.hessian(total(f), 3),
    ):
        found, expected = (jax.jit(transform(g))(q, k, v, bias) for g in (f, plain))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
assert len(jax.jit(f)(q, k, v, bias).sharding.device_set) == 2
"""

JIT = """
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from sdpa.interop.jax import attention, dot_product_attention

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
keys = iter(jax.random.split(jax.random.key(0), 99))

def normal(*shape):
    return jax.random.normal(next(keys), shape)

def spread(x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))

def spec_of(x):
    return (*x.sharding.spec, *[None] * x.ndim)[: x.ndim]

# f and its derivatives have the values of one device, and stay where the operands are.
def check(f, given, specs, out_spec, gathers=False):
    def total(*x):
        return jnp.sin(f(*x)).sum()
    numbers = tuple(range(len(given)))
    lying = [spread(x, *spec) for x, spec in zip(given, specs, strict=True)]
    for g in (f, jax.grad(total, numbers), lambda *x: jax.jvp(jax.grad(total, numbers), x, x)):
        g = jax.jit(g)
        found, expected = g(*lying), g(*given)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        assert ("all-gather" in g.lower(*lying).compile().as_text()) == gathers
    assert spec_of(jax.jit(f)(*lying)) == out_spec, jax.jit(f)(*lying).sharding
    for x, spec, a in zip(given, specs, jax.jit(jax.grad(total, numbers))(*lying), strict=True):
        wanted = (*spec, *[None] * x.ndim)[: x.ndim]
        assert gathers or spec_of(a) == wanted, (spec_of(a), wanted)
"""

SHARED = {
    "batch and heads": """
qkv = [normal(4, 6, n, 8) for n in (5, 7, 7)]
check(lambda *x: attention(*x, is_causal=True), qkv, [("a", "b")] * 3, ("a", "b", None, None))
check(attention, qkv, [(("a", "b"),)] * 3, (("a", "b"), None, None, None))
""",
    "the order of jax.nn": """
qkv = [normal(4, n, 6, 8) for n in (5, 7, 7)]
check(
    dot_product_attention, [*qkv, normal(1, 6, 5, 7)], [("a", None, "b")] * 3 + [(None, "b")],
    ("a", None, "b", None),
)
""",
    "groups of heads": """
f = lambda *x: attention(*x, enable_gqa=True)
qkv = normal(4, 8, 5, 8), normal(4, 2, 7, 8), normal(4, 2, 7, 8)
check(f, qkv, [("a", "b")] * 3, ("a", "b", None, None))
qkv = normal(4, 8, 5, 8), normal(4, 1, 7, 8), normal(4, 1, 7, 8)
check(f, qkv, [("a", "b"), ("a",), ("a",)], ("a", "b", None, None))
""",
    "keys in common and options": """
given = normal(4, 6, 5, 8), normal(1, 6, 7, 8), normal(6, 7, 8), normal(4, 1, 5, 7), normal(6)
def f(q, k, v, mask, sinks):
    return attention(q, k, v, mask, sinks=sinks, alibi_slopes=jnp.arange(6.0), scale=0.3)
specs = [("a", "b"), (None, "b"), ("b",), ("a",), ("b",)]
check(f, given, specs, ("a", "b", None, None))
g = jax.jit(lambda q, k, v, lengths: attention(q, k, v, key_lengths=lengths))
given = [normal(4, 6, n, 8) for n in (5, 7, 7)] + [jnp.array([7, 0, 3, 5])]
lying = [spread(x, *("a", "b")[: x.ndim]) for x in given]
np.testing.assert_array_equal(g(*lying), g(*given))
assert "all-gather" not in g.lower(*lying).compile().as_text()
""",
    "what cannot be cut": """
qkv = [normal(4, 6, n, 8) for n in (8, 8, 8)]
f = jax.jit(lambda *x: attention(*x, dropout_p=0.5, rng=3))
lying = [spread(x, "a", "b") for x in qkv]
np.testing.assert_array_equal(f(*lying), f(*qkv))  # the pattern is that of the whole
f = jax.jit(lambda *x: attention(*x, is_causal=True))
for spec in [(None, None, "a", "b"), ("a", None, "b")]:  # rows and widths are gathered
    lying = [spread(x, *spec) for x in qkv]
    np.testing.assert_allclose(f(*lying), f(*qkv), atol=1e-6)
""",
    "packed": """
cu = jnp.array([0, 3, 12])
g = lambda *x: attention(*x, cu_seqlens_q=cu, cu_seqlens_k=cu, is_causal=True)
check(g, [normal(12, 6, 8) for _ in range(3)], [(None, "b")] * 3, (None, "b", None))
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SHARED)
def test_jit_keeps_batch_and_heads_where_they_are(case):
    process.run(JIT + SHARED[case], timeout=300)


@pytest.mark.slow
def test_shard_map_over_two_devices():
    process.run(SHARDED, timeout=300)


def test_threads(rng):
    """Calls in flight on many threads, while they all also want the interpreter."""
    x = [jnp.asarray(a, jnp.float32) for a in rng.standard_normal((3, 2, 200, 2, 16))]
    f = jax.jit(jax.grad(lambda *x: dot_product_attention(*x).sum(), (0, 1, 2)))
    expected = f(*x)
    wrong = []

    def work():
        for _ in range(20):
            found = f(*x)
            sum(range(1000))
            found = jax.block_until_ready(found)
            if not all(map(np.array_equal, found, expected)):
                wrong.append(found)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not wrong


def test_calls_that_nobody_waits_for(rng):
    """Many calls in flight at once have the bits of one."""
    q = jnp.asarray(rng.standard_normal((2, 300, 2, 16)), jnp.float32)
    f = jax.jit(lambda q: dot_product_attention(q, q, q))
    expected = f(q)
    many = [f(q) for _ in range(20)]
    assert all(np.array_equal(x, expected) for x in many)


MEMORY = """
import jax
import jax.numpy as jnp
from sdpa.interop.jax import dot_product_attention

N = 8192  # a float32 matrix of the weights would take 256 MiB
q, k, v = jax.random.normal(jax.random.key(0), (3, 1, N, 1, 32))

def total(*x):
    return jnp.sin(dot_product_attention(*x, is_causal=True)).sum()

def hvp(*x):
    return jax.jvp(jax.grad(total, (0, 1, 2)), x, x)[1]

for f in dot_product_attention, jax.grad(total, (0, 1, 2)), hvp:
    compiled = jax.jit(f).lower(q, k, v).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * q.nbytes
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM = VmRSS
    before = status("VmRSS")
    jax.block_until_ready(compiled(q, k, v))
    assert status("VmHWM") - before < 64 * 2**20, (f, status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.uninstrumented
def test_memory_is_a_block():
    process.run(MEMORY, timeout=300)


@pytest.mark.slow
def test_the_end_with_a_call_in_flight():
    process.run("""
import jax
import jax.numpy as jnp
from sdpa.interop.jax import attention
q = jnp.ones((8, 4000, 64))
f = jax.jit(attention)
f(q, q, q)
f(q, q, q)
""")


def test_jax_is_imported_with_the_bridge_alone():
    process.run("""
import sdpa.interop
assert "jax" not in sys.modules
import sdpa.interop.jax
assert "jax" in sys.modules
""")


def test_eager_calls_are_compiled_once(rng):
    from sdpa.interop.jax import _primitives

    q = jnp.asarray(rng.standard_normal((2, 5, 4)), jnp.float32)
    attention(q, q, q, scale=0.123)
    before = _primitives._compiled.cache_info()
    attention(q, q, q, scale=0.123)
    after = _primitives._compiled.cache_info()
    assert after.misses == before.misses
    assert after.hits == before.hits + 1


def test_threads_that_xla_starts_keep_no_modes_of_its_own():
    """Its threads flush subnormal numbers to zero, and the pool's inherit that from them."""
    process.run("""
import jax
import jax.numpy as jnp
from sdpa.interop.jax import attention
sdpa.set_num_threads(8)  # more than there are
q = jnp.ones((8, 300, 16))
jax.jit(attention)(q, q, q).block_until_ready()
q, k = rng.standard_normal((2, 64, 300, 16), np.float32)
v = np.full((64, 300, 16), 1e-40, np.float32)
alone = sdpa.attention(q, k, v, workers=1)
assert alone.all()
for _ in range(10):
    np.testing.assert_array_equal(sdpa.attention(q, k, v, workers=8), alone)
""")
