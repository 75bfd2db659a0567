"""No function builds an Lq x Lk buffer; masked blocks and gradients not needed cost nothing.

Sizes are chosen so that one buffer of Lq x Lk elements would show, even of bytes. Costs are
compared as CPU time of one thread, which other processes on the machine hardly change.
"""

import itertools
import time

import numpy as np
import pytest
from support.machine import LINUX
from support.process import run

import sdpa

pytestmark = LINUX  # whose counters of memory are read

N_Q, N_K, D = 4096, 16384, 32
# Scratch of a few blocks per worker: a quarter of N_Q N_K bytes.
ALLOWED = 16e6

PROGRAM = f"""
n_q, n_k, d = {N_Q}, {N_K}, {D}

def normal(*shape):
    return rng.standard_normal(shape, np.float32)

q, k, v, g = normal(n_q, d), normal(n_k, d), normal(n_k, d), normal(n_q, d)
a, b, c = normal(n_q, d), normal(n_k, d), normal(n_k, d)
lse = np.full(n_q, 10, np.float32)

def forward(m, **options):
    return sdpa.attention_forward(q[:m], k, v, **options)

def backward(m, **options):
    return sdpa.attention_backward(g[:m], q[:m], k, v, g[:m], lse[:m], **options)

def jvp(m, **options):
    return sdpa.attention_jvp(q[:m], k, v, a[:m], b, c, **options)

def double(m, **options):
    return sdpa.attention_double_backward(
        a[:m], b, c, g[:m], q[:m], k, v, g[:m], lse[:m], **options
    )

def statistics(m, **options):
    return sdpa.attention_statistics(q[:m], k, **options)

def received(m, **options):
    return sdpa.attention_received(q[:m], k, **options)

def check(function, **options):
    grown = peak(lambda m: function(m, **options))
    assert grown < {ALLOWED}, (function.__name__, list(options), grown / 1e6)

"""

OPTIONS = {
    "plain": "",
    "dropout": "dropout_p=0.3, rng=7",
    "others": "softcap=3.0, sinks=np.ones(1, 'f4'), alibi_slopes=np.ones(1), window=(9000, 0)",
}
FUNCTIONS = ["forward", "backward", "jvp", "double", "statistics", "received"]


@pytest.mark.uninstrumented
@pytest.mark.parametrize(
    ("function", "options"),
    # Statistics describe the weights before dropout.
    [pair for pair in itertools.product(FUNCTIONS, OPTIONS) if pair != ("statistics", "dropout")],
)
def test_no_buffer_of_lq_by_lk(function, options):
    run(PROGRAM + f"check({function}, {OPTIONS[options]})", timeout=300)


@pytest.mark.uninstrumented
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_packed_sequences(dtype):
    """Two long ones and a thousand of one token; 16-bit gradients accumulate in float32."""
    program = f"""
q, k, v, g, a, b, c = (x[:, None].astype("{dtype}") for x in (q, k, v, g, a, b, c))
lse = lse[None]

def cu(total):
    return np.concatenate([np.arange(1001), [total // 2, total]])

def packed(function, *rows):
    def call(m):
        if m is not None:  # threads, code
            return function(*(x[:1] if x.ndim == 3 else x[:, :1] for x in rows),
                            cu_seqlens_q=[0, 1], cu_seqlens_k=[0, 1])
        return function(*rows, cu_seqlens_q=cu(n_q), cu_seqlens_k=cu(n_k))

    grown = peak(call)
    assert grown < {ALLOWED}, (function.__name__, grown / 1e6)

packed(sdpa.attention_forward, q, k, v)
packed(sdpa.attention_backward, g, q, k, v, g, lse)
packed(sdpa.attention_jvp, q, k, v, a, b, c)
packed(sdpa.attention_double_backward, a, b, c, g, q, k, v, g, lse)
packed(sdpa.attention_statistics, q, k)
"""
    run(PROGRAM + program, timeout=300)


# Leading axes, Lq, Lk and the shape of a mask that is broadcast over the axes named.
BROADCAST = {
    "rows": ((), N_Q, N_K, (1, N_K)),
    "keys": ((), N_Q, N_K, (N_Q, 1)),
    "heads": ((8,), 512, 4096, (512, 4096)),
    "batch": ((8, 1), 512, 4096, (512, 4096)),
}


@pytest.mark.uninstrumented
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("axes", BROADCAST)
@pytest.mark.parametrize("function", ["backward", "double"])
def test_gradient_of_a_broadcast_mask(function, axes, dtype):
    """The gradient is summed in float32 as it arises; those of single pairs are never stored."""
    lead, n_q, n_k, shape = BROADCAST[axes]
    allowed = ALLOWED + 4 * np.prod(shape)
    assert allowed < np.prod((*lead, n_q, n_k)) * np.dtype(dtype).itemsize
    program = f"""
def narrow(*shape):
    return normal(*shape).astype("{dtype}")

q, a, g = (narrow(*{lead}, {n_q}, d) for _ in range(3))
k, v, b, c = (narrow({n_k}, d) for _ in range(4))
lse = np.full(q.shape[:-1], 10, np.float32)
mask = np.zeros({shape}, "{dtype}")

def backward(m, **options):
    return sdpa.attention_backward(
        g[..., :m, :], q[..., :m, :], k, v, g[..., :m, :], lse[..., :m], **options
    )

def double(m, **options):
    return sdpa.attention_double_backward(
        a[..., :m, :], b, c, g[..., :m, :], q[..., :m, :], k, v, g[..., :m, :], lse[..., :m],
        **options,
    )

def function(m):
    bias = mask[:m] if mask.shape[0] > 1 else mask
    return {function}(m, attn_mask=bias, needs=("query", "attn_mask"))

grown = peak(function)
assert grown < {allowed}, grown / 1e6
"""
    run(PROGRAM + program, timeout=300)


def cpu_seconds(*calls):
    """Seconds of one thread for each call: the least, after five rounds that lower none by 1 %."""
    best = [np.inf] * len(calls)
    rounds = 0
    while rounds < 5:
        rounds += 1
        for i, call in enumerate(calls):
            start = time.thread_time()
            call()
            took = time.thread_time() - start
            if took < 0.99 * best[i]:
                rounds = 0
            best[i] = min(best[i], took)
    return best


@pytest.fixture(scope="module")
def functions():
    """Each function on attention of one problem, on one thread."""
    rng = np.random.default_rng(0)
    q, k, v, g, a, b, c = rng.standard_normal((7, 2048, 64), np.float32)
    saved = sdpa.attention_forward(q, k, v)
    return {
        "forward": lambda **o: sdpa.attention_forward(q, k, v, workers=1, **o),
        "backward": lambda **o: sdpa.attention_backward(g, q, k, v, *saved, workers=1, **o),
        "jvp": lambda **o: sdpa.attention_jvp(q, k, v, a, b, c, workers=1, **o),
        "double": lambda **o: sdpa.attention_double_backward(
            a, b, c, g, q, k, v, *saved, workers=1, **o
        ),
        "statistics": lambda **o: sdpa.attention_statistics(q, k, workers=1, **o),
        "received": lambda **o: sdpa.attention_received(q, k, workers=1, **o),
    }


@pytest.mark.uninstrumented
@pytest.mark.parametrize("name", FUNCTIONS)
def test_wholly_masked_blocks_cost_nothing(functions, name):
    """Shares of pairs left: half (causal), an eighth (window), a quarter (lengths)."""
    function = functions[name]
    masks = {
        0.5: {"is_causal": True},
        0.125: {"window": (128, 128)},
        0.25: {"key_lengths": 512},
    }
    whole, *parts = cpu_seconds(
        function, *(lambda mask=mask: function(**mask) for mask in masks.values())
    )
    # A cut block costs as much as a whole one, plus half as much again for the mask,
    # and at the edges up to a query and a key block (of 2048 / 128).
    for share, seconds in zip(masks, parts, strict=True):
        assert seconds < (1.5 * share + 3 / 16) * whole, (share, seconds / whole)


@pytest.mark.uninstrumented
@pytest.mark.parametrize(
    ("name", "needs", "share"),
    [
        # The products that remain, over all products: S, dP, dV, dK, dQ.
        ("backward", ["value"], 2 / 5),
        ("backward", ["query"], 3 / 5),
        # S, T (2), O, O_t (2); then S, T (2), dV, and only for the others G, C, and two of each.
        ("double", ["grad_out"], 6 / 16),
        ("double", ["value"], 10 / 16),
        ("double", ["query"], 13 / 16),
    ],
)
def test_only_what_is_needed_is_computed(functions, name, needs, share):
    """The time exceeds that of the products needed by at most a quarter of the whole."""
    function = functions[name]
    whole, part = cpu_seconds(function, lambda: function(needs=needs))
    assert part < (share + 0.25) * whole, part / whole


@pytest.mark.uninstrumented
@pytest.mark.parametrize("function", ["forward", "backward"])
def test_memory_of_outlines(function):
    """They are shared by heads and take at most a byte for 192 of the mask."""
    program = f"""
heads = 16
q, g = (np.broadcast_to(a, (heads, *a.shape)) for a in (q, g))
lse = np.broadcast_to(lse, (heads, n_q))
mask = np.arange(n_k) % 400 < np.arange(n_q)[:, None]

def masked(m):
    if "{function}" == "forward":
        return sdpa.attention_forward(q[:, :m], k, v, attn_mask=mask[:m])
    return sdpa.attention_backward(
        g[:, :m], q[:, :m], k, v, g[:, :m], lse[:, :m], attn_mask=mask[:m]
    )

grown = peak(masked)
assert grown < {ALLOWED} + mask.size / 192, grown / 1e6
"""
    run(PROGRAM + program, timeout=300)
