"""What additive attention refuses, what memory it takes, and that it stays inside its arrays."""

import gc
import subprocess
import sys

import numpy as np
import pytest
from additive import check_additive, draw
from calls import F32, FLOATS, message, ones
from helpers import BFLOAT16, normal
from test_memory_guard import guarded, guarded_results
from test_memory_guard import pages as pages

import sdpa
from sdpa import _core


def operands():
    """Lq = 5, Lk = 7, d_q = 8, d_k = 6, d_v = 3, h = 4."""
    return {
        "query": ones(2, 5, 8),
        "key": ones(2, 7, 6),
        "value": ones(2, 7, 3),
        "w_query": ones(8, 4),
        "w_key": ones(6, 4),
        "w_score": ones(4),
        "bias": ones(4),
    }


def backward_operands():
    x = operands()
    out, lse = sdpa.additive_attention_forward(**x)
    return {"grad_out": ones(2, 5, 3), **x, "out": out, "lse": lse}


# (exception, message, what differs from operands())
REFUSED = {
    "query axes": (
        ValueError,
        "query: expected at least two axes, (..., Lq, d_k), got (8,)",
        {"query": ones(8)},
    ),
    "Lk": (
        ValueError,
        "value: expected (..., 7, 3) to match key's rows 7, got (..., 6, 3)",
        {"value": ones(2, 6, 3)},
    ),
    "leading axes": (
        ValueError,
        "key: expected leading axes that broadcast with (2,), got (3,)",
        {"query": ones(2, 5, 8), "key": ones(3, 7, 6)},
    ),
    "d_q": (
        ValueError,
        "w_query: expected (8, h) to match query's last axis 8, got (6, 4)",
        {"w_query": ones(6, 4)},
    ),
    "axes of w_query": (
        ValueError,
        "w_query: expected (8, h) to match query's last axis 8, got (2, 8, 4)",
        {"w_query": ones(2, 8, 4)},
    ),
    "d_k": (
        ValueError,
        "w_key: expected (6, 4) to match key's last axis and w_query's, got (8, 4)",
        {"w_key": ones(8, 4)},
    ),
    "h of w_key": (
        ValueError,
        "w_key: expected (6, 4) to match key's last axis and w_query's, got (6, 5)",
        {"w_key": ones(6, 5)},
    ),
    "w_score": (
        ValueError,
        "w_score: expected (4,) to match w_query's last axis 4, got (4, 1)",
        {"w_score": ones(4, 1)},
    ),
    "bias": (
        ValueError,
        "bias: expected (4,) to match w_query's last axis 4, got ()",
        {"bias": F32(1)},
    ),
    "dtype of query": (
        TypeError,
        f"query: expected {FLOATS}, got int64",
        {"query": ones(2, 5, 8, dtype=np.int64)},
    ),
    "dtype of weights": (
        TypeError,
        "w_key: expected query's dtype float32, got float64",
        {"w_key": ones(6, 4, dtype=np.float64)},
    ),
    "dtype of bias": (
        TypeError,
        "bias: expected query's dtype float32, got bfloat16",
        {"bias": ones(4).astype(BFLOAT16)},
    ),
    "mask": (
        ValueError,
        "attn_mask: expected a shape that broadcasts to (2, 5, 7), got (5, 6)",
        {"attn_mask": ones(5, 6)},
    ),
    "scale": (ValueError, "scale: expected a finite number, got nan", {"scale": np.nan}),
    "workers": (ValueError, None, {"workers": 0}),
}
FUNCTIONS = [sdpa.additive_attention, sdpa.additive_attention_forward]


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    exception, expected, differences = REFUSED[case]
    for function in FUNCTIONS:
        got = message(exception, function, **(operands() | differences))
        assert expected is None or got == expected
    x = backward_operands() | differences
    assert message(exception, sdpa.additive_attention_backward, **x) == got


def test_refused_by_the_backward():
    x = backward_operands()
    call = sdpa.additive_attention_backward
    assert message(ValueError, call, **(x | {"out": ones(5, 3)})) == (
        "out: expected (2, 5, 3), got (5, 3)"
    )
    assert message(ValueError, call, **x, needs=("gain",)) == (
        "needs: expected names among 'query', 'key', 'value', 'attn_mask', 'sinks', 'w_query', "
        "'w_key', 'w_score', 'bias', got 'gain'"
    )
    assert "w_query" not in message(
        ValueError, sdpa.attention_backward, *(ones(2, 2),) * 5, ones(2), needs=("w_query",)
    ).replace("got 'w_query'", "")
    expected = "needs: 'attn_mask' has a gradient only where it is added to the scores, got None"
    assert message(ValueError, call, **x, needs=("attn_mask",)) == expected
    assert call(**(x | {"bias": None})).bias is None


def test_options_are_by_keyword():
    x = operands()
    text = message(TypeError, sdpa.additive_attention, *x.values(), np.ones((5, 7), bool))
    assert text == "additive_attention() takes at most 7 arguments by position, got 8"


@pytest.mark.parametrize("name", list(operands()))
def test_overlap_of_out(name):
    """Of an operand or a weight, large enough to hold the result."""
    x = operands() | {"query": ones(2, 5, 20), "w_query": ones(20, 4)}
    memory = np.ones(4000, F32)
    x[name] = memory[: x[name].size].reshape(x[name].shape)
    out = memory[x[name].size - 1 :][:30].reshape(2, 5, 3)
    text = message(ValueError, sdpa.additive_attention, **x, out=out)
    assert text == f"out: expected memory of its own, got an array that overlaps {name}"


CALLS = {
    sdpa.additive_attention: operands,
    sdpa.additive_attention_forward: operands,
    sdpa.additive_attention_backward: backward_operands,
}
EVERY = pytest.mark.parametrize("function", CALLS, ids=lambda f: f.__name__)


@EVERY
def test_no_memory(function):
    x = CALLS[function]()
    needed = 0
    while True:
        _core._alloc_fail_after(needed)
        try:
            function(**x)
            break
        except MemoryError:
            needed += 1
        finally:
            _core._alloc_fail_after(-1)
    assert needed >= 2  # projections, and the blocks of the pairs
    function(**x)


@EVERY
def test_references(function):
    x = CALLS[function]() | {"attn_mask": ones(5, 7), "sinks": ones(2)}

    def count():
        gc.collect()
        return {name: sys.getrefcount(value) for name, value in x.items()}

    before = count()
    for _ in range(3):
        function(**x)
    assert count() == before
    for exception, _, differences in REFUSED.values():
        message(exception, function, **(x | differences))
    assert count() == before


@pytest.mark.uninstrumented
def test_memory_grows_with_the_length_only():
    """Peak of the process over a forward and a backward, against what is promised: 4 L h each."""
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
            out, lse = sdpa.additive_attention_forward(*x.values(), is_causal=True)
            sdpa.additive_attention_backward(g, *x.values(), out, lse, is_causal=True)
    check_additive(x, g, is_causal=True)
