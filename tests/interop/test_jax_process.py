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

# Without shard_map, the compiler gathers the operands.
from jax.sharding import NamedSharding
spread = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in (q, k, v)]
np.testing.assert_allclose(jax.jit(plain)(*spread, bias), plain(q, k, v, bias), atol=1e-6)
"""


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
