"""No byte outside the arrays of functions is read, nor outside their gradients written: each table
ends, or begins, at a forbidden page, and indices reach both of its ends.

A violation is a segmentation fault in the test that pytest names last.
"""

import itertools

import numpy as np
import pytest
from support.guard import guarded, guarded_results
from support.helpers import normal

import sdpa

pytestmark = pytest.mark.usefixtures("isa")

HEADS = 2
LENGTHS = (1, 2, 7, 8, 9, 17, 33, 49, 97, 130)


def score(s, b, h, q, k, by_key, by_query, by_distance, bias, kinds):
    """Reads a table by each section of a program: of keys, queries, distances and pairs."""
    n_q = by_query.shape[0]
    s = s + by_key[k] * by_query[q] + by_distance[k - q + (n_q - 1)]
    return s + bias[h, q, k] * by_key[kinds[k]]


def mask(b, h, q, k, open_, place):
    return open_[h, q] & (place[k] <= place[0] + 3)


def tables(rng, pages, dtype, n_q, n_k):
    """(score_args, mask_args) between guard pages, in the types that the kernels read in place."""
    real = np.float64 if dtype == np.float64 else np.float32
    shapes = (n_k,), (n_q,), (n_q + n_k - 1,), (HEADS, n_q, n_k)
    floats = [guarded(pages, normal(rng, shape, real)) for shape in shapes]
    kinds = np.arange(n_k, dtype=np.int64)[::-1]
    opened = rng.random((HEADS, n_q)) < 0.8
    place = np.arange(n_k, dtype=np.int64) % 5
    return (*floats, guarded(pages, kinds)), (guarded(pages, opened), guarded(pages, place))


@pytest.mark.parametrize("n_q", LENGTHS)
def test_tables_and_their_gradients(rng, dtype, pages, n_q):
    for n_k, d in itertools.product(LENGTHS[::3], (1, 9)):
        query, key, value, grad = (
            guarded(pages, normal(rng, (HEADS, *shape), dtype))
            for shape in ((n_q, d), (n_k, d), (n_k, d), (n_q, d))
        )
        score_args, mask_args = tables(rng, pages, dtype, n_q, n_k)
        options = {
            "score_mod": score, "score_args": score_args, "mask_mod": mask, "mask_args": mask_args,
        }  # fmt: skip
        tangents = [*(guarded(pages, x) for x in score_args[:-1]), None]
        needs = ("query", "key", "value", "score_args")
        with guarded_results(pages):
            out, lse = sdpa.attention_forward(query, key, value, **options)
            saved = guarded(pages, out), guarded(pages, lse)
            found = sdpa.attention_backward(grad, query, key, value, *saved, needs=needs, **options)
            sdpa.attention_jvp(
                query, key, value, query, key, value, score_args_t=tangents, **options
            )
            sdpa.attention_double_backward(
                query, key, value, grad, query, key, value, *saved, gg_score_args=tangents,
                needs=needs, **options,
            )  # fmt: skip
            sdpa.attention_weights(query, key, **options)
        assert [x is None or x.shape for x in found.score_args] == [
            *(x.shape for x in score_args[:-1]), True,
        ]  # fmt: skip


def test_a_table_of_one_element(rng, dtype, pages):
    """Its index is the same for all pairs."""
    query, key, value = (guarded(pages, normal(rng, (HEADS, 20, 4), dtype)) for _ in range(3))
    one = guarded(pages, np.full((), 0.5, np.float64 if dtype == np.float64 else np.float32))
    options = {"score_mod": lambda s, b, h, q, k, x: s * x, "score_args": (one,)}
    with guarded_results(pages):
        out, lse = sdpa.attention_forward(query, key, value, **options)
        sdpa.attention_backward(
            value, query, key, value, out, lse, needs=("score_args",), **options
        )
    plain = sdpa.attention(query, key, value, scale=0.5 / np.sqrt(4))
    atol = 2e-2 if dtype not in (np.float32, np.float64) else 1e-6
    np.testing.assert_allclose(out.astype(float), plain.astype(float), atol=atol)
