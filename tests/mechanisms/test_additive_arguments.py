"""Additive attention: arguments, memory, and no access beyond its arrays."""

import subprocess
import sys

import numpy as np
import pytest
from support.additive import check_additive, draw
from support.calls import ADDITIVE, F32, additive_operands, message, ones
from support.guard import guarded, guarded_results
from support.helpers import normal
from support.machine import POSIX

import sdpa


def test_bias_may_be_none():
    x = ADDITIVE[sdpa.additive_attention_backward]() | {"bias": None}
    assert sdpa.additive_attention_backward(**x).bias is None


def test_options_are_by_keyword():
    x = additive_operands()
    text = message(TypeError, sdpa.additive_attention, *x.values(), np.ones((5, 7), bool))
    words = "takes from 6 to 7 positional arguments but 8 were given"
    assert text == f"additive_attention() {words}"


@pytest.mark.parametrize("name", list(additive_operands()))
def test_overlap_of_out(name):
    """`out` may not overlap any operand or weight."""
    x = additive_operands() | {"query": ones(2, 5, 20), "w_query": ones(20, 4)}
    memory = np.ones(4000, F32)
    x[name] = memory[: x[name].size].reshape(x[name].shape)
    out = memory[x[name].size - 1 :][:30].reshape(2, 5, 3)
    text = message(ValueError, sdpa.additive_attention, **x, out=out)
    assert (
        text == f"out: expected memory not shared with an input, got an array that overlaps {name}"
    )


@POSIX
@pytest.mark.uninstrumented
def test_memory_grows_with_the_length_only():
    """Peak memory of a forward and a backward against the promise of 4 L h each."""
    code = """if True:
        import resource
        import numpy as np, sdpa
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        n, h = 6000, 16
        x = np.ones((n, 4), np.float32)
        w = np.ones((4, h), np.float32)
        def run(m):
            a = (x[:m], x[:m], x[:m], w, w, w[0])
            out, lse = sdpa.additive_attention_forward(*a)
            sdpa.additive_attention_backward(out, *a, None, out, lse)
        run(200)
        before = peak()
        run(n)
        print(peak() - before, n, h)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown, n, h = map(int, done.stdout.split())
    # Exponentials and sums of queries and keys, in float32; results and gradients; the turns of
    # the backward. The matrix would be n^2 floats.
    promised = 4 * (2 * n * 4 * h + 12 * 4 * n)
    assert grown <= promised + 2**21
    assert promised + 2**21 < 4 * n * n / 10


@pytest.mark.parametrize("n_q", [1, 3, 8, 17, 49])
def test_no_byte_outside_is_touched(isa, dtype, rng, pages, n_q):
    for n_k, d, h in ((1, 1, 1), (5, 3, 2), (9, 8, 7), (33, 17, 8), (129, 5, 9)):
        x = draw(rng, dtype, n_q, n_k, d, d + 1, d, h)
        x = {name: guarded(pages, a) for name, a in x.items()}
        g = guarded(pages, normal(rng, (2, n_q, d), dtype))
        with guarded_results(pages):
            out, lse = sdpa.additive_attention_forward(*x.values(), is_causal="upper_left")
            sdpa.additive_attention_backward(g, *x.values(), out, lse, is_causal="upper_left")
    check_additive(x, g, is_causal="upper_left")


def test_a_key_of_more_columns_than_memory_holds():
    x, w = np.ones((3, 2), np.float32), np.ones((2, 2), np.float32)
    key, columns = np.broadcast_to(x[:, :1], (3, 1 << 41)), np.broadcast_to(w[:1], (1 << 41, 2))
    with pytest.raises(MemoryError, match="no memory for additive attention of h = 2, d_k = "):
        sdpa.additive_attention(x, key, x, w, columns, w[0])
