"""Memory that gradients of score_args take, and their bits."""

import numpy as np
import pytest
from support.machine import LINUX
from support.process import run

import sdpa

HEADS, N = 2, 1024
# By the function: axes of the table; whether an element belongs to one block of queries.
TABLES = {
    "table[h, q, k]": ((HEADS, N, N), True),
    "table[k, h, q]": ((N, HEADS, N), True),
    "table[q, k]": ((N, N), False),
    "table[h, k, q]": ((HEADS, N, N), True),
    "table[h, abs(q - k), k % 64]": ((HEADS, N, 64), False),
}


def function_of(text):
    return eval(f"lambda s, b, h, q, k, table: s + {text}")


@pytest.mark.parametrize("text", TABLES)
def test_gradients_have_the_same_bits_for_any_number_of_threads(rng, text):
    shape, _ = TABLES[text]
    query, key, value, grad = rng.standard_normal((4, HEADS, N, 8), np.float32)
    given = {"score_mod": function_of(text), "score_args": (rng.standard_normal(shape),)}
    saved = sdpa.attention_forward(query, key, value, is_causal=True, **given)
    found = [
        sdpa.attention_backward(
            grad, query, key, value, *saved, is_causal=True, needs=("score_args",),
            workers=workers, **given,
        ).score_args[0]
        for workers in (1, 2, 3)
    ]  # fmt: skip
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)
    h, q, k = np.ogrid[:HEADS, :N, :N]
    weights = sdpa.attention_weights(query, key, is_causal=True, **given).astype(np.float64)
    change = grad.astype(np.float64) @ value.swapaxes(1, 2)
    change = weights * (change - (weights * change).sum(-1, keepdims=True))
    places = np.arange(np.prod(shape)).reshape(shape)
    at = np.broadcast_to(function_of(text)(0, 0, h, q, k, places), change.shape)
    wanted = np.bincount(at.ravel(), change.ravel(), places.size).reshape(shape)
    np.testing.assert_allclose(found[0], wanted, atol=2e-5)


@LINUX
@pytest.mark.uninstrumented
@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("text", ["table[h, q, k]", "table[q, k]"])
def test_memory_is_that_of_a_block_of_queries_per_thread(workers, text):
    """Eight bytes an element and, where heads share it, eight for those of a block per thread."""
    heads, n = 4, 2048
    axes = "heads, n, n" if "h" in text else "n, n"
    program = f"""
heads, n = {heads}, {n}
q, k, v, g = (rng.standard_normal((heads, n, 8), np.float32) for _ in range(4))
table = np.zeros(({axes}), np.float32)
options = dict(score_mod=lambda s, b, h, q, k, table: s + {text}, score_args=(table,))
out, lse = sdpa.attention_forward(q, k, v, **options)
grown = peak(
    lambda m: sdpa.attention_backward(
        *(x[:, :m] for x in (g, q, k, v, out)), lse[:, :m], needs=("score_args",),
        workers={workers}, **options
    ).score_args[0]
)
block = 96 * n * 8 if {text!r} == "table[q, k]" else 0
kept = 64 << 10  # of every thread, for small calls
assert grown < 2 * table.nbytes + {workers} * (block + kept + 2e6) + 2e6, grown / 1e6
"""
    run(program, timeout=300)
