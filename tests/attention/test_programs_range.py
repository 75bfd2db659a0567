"""Functions of scores whose results leave the range of their type, or are its lowest number."""

import numpy as np
import pytest
from support.helpers import normal

import sdpa

pytestmark = pytest.mark.usefixtures("isa")

F32, F64 = np.float32, np.float64
N_K = 90
TABLE = np.full(N_K, 1e20)

# They hide the keys behind the query. Derivatives are infinite there, or NaN.
OVERFLOWS = {
    "exponential": lambda s, b, h, q, k, t: np.where(k > q, -np.exp(1000 + s), s + t[k] * 0),
    "of distances": lambda s, b, h, q, k, t: s - t[k] * 1e-20 * np.exp(1e3 * (k - q)) * 1e-30,
    "product": lambda s, b, h, q, k, t: np.where(k > q, s - t[k] * 1e200 * 1e200, s),
    "power": lambda s, b, h, q, k, t: np.where(k > q, -((abs(s) * 1e30 + 1e10) ** 50), s),
    "square": lambda s, b, h, q, k, t: np.where(k > q, -np.square((s + 1e9) * t[k] * 1e290), s),
    "equal": lambda s, b, h, q, k, t: np.where((k <= q) | (s == t[k]), s, -np.exp(1000 + s)),
    "largest": lambda s, b, h, q, k, t: np.where(k > q, -np.maximum(s, t[k] * 1e280) * 1e20, s),
    "quotient": lambda s, b, h, q, k, t: np.where(k > q, s - 1e200 / (t[k] * 1e-320), s),
    "of a negative": lambda s, b, h, q, k, t: np.where(k > q, 1e300 / (-abs(s) - 1e-30) * t[k], s),
    "infinite": lambda s, b, h, q, k, t: np.where(k > q, np.exp(s) - t[k] * np.inf, s),
    "number": lambda s, b, h, q, k, t: np.where(k > q, -(abs(s) + t[k] + 1) * 1e300 * 1e9, s),
}


def every(x, options):
    """All results of one function of scores."""
    query, key, value, grad_out, *tangents = x
    given = options | {"score_args": (TABLE,)}
    needs = ("query", "key", "value", "score_args")
    saved = sdpa.attention_forward(query, key, value, **given)
    first = sdpa.attention_backward(grad_out, query, key, value, *saved, needs=needs, **given)
    moved = sdpa.attention_jvp(query, key, value, *tangents, **given)
    second = sdpa.attention_double_backward(
        *tangents, grad_out, query, key, value, *saved, needs=("grad_out", *needs), **given
    )
    received = sdpa.attention_received(query, key, **given)
    return [*saved, *first[:3], moved.out_t, *second[:4], *received]


@pytest.mark.parametrize("n_q", [1, 4, 70])
@pytest.mark.parametrize("name", OVERFLOWS)
def test_an_overflow_to_minus_infinity_masks(rng, name, n_q):
    for dtype in (F32, F64):
        shapes = [(2, n, 8) for n in (n_q, N_K, N_K, n_q, n_q, N_K, N_K)]
        x = [normal(rng, shape, dtype) for shape in shapes]
        x[2][:, n_q:] = np.nan
        hides = {"score_mod": lambda s, b, h, q, k, t: np.where(k > q, -np.inf, s)}
        ours, expected = (every(x, o) for o in ({"score_mod": OVERFLOWS[name]}, hides))
        for a, b in zip(ours, expected, strict=True):
            bound = (1e-4 if dtype is F32 else 1e-12) * (1 + abs(b).max())
            np.testing.assert_allclose(a, b, rtol=0, atol=bound)


@pytest.mark.parametrize("n_q", [1, 4, 70])
@pytest.mark.parametrize("share", [0.6, 0.8, 1])
def test_the_lowest_number_does_not_mask(rng, n_q, share):
    """A query with nothing else sees all keys alike, as where the number is in attn_mask."""
    for dtype in (F32, F64):
        query, key, value, grad_out = (normal(rng, (2, n, 8), dtype) for n in (n_q, N_K, N_K, n_q))
        lowest = share * float(np.finfo(dtype).min)
        q, k = np.ogrid[:n_q, :N_K]
        mask = np.where((k > q) | (q % 3 == 0), lowest, 0).astype(dtype)
        options = {
            "score_mod": lambda s, b, h, q, k, low=lowest: np.where((k > q) | (q % 3 == 0), low, s)
        }
        ours = sdpa.attention_forward(query, key, value, **options)
        expected = sdpa.attention_forward(query, key, value, mask)
        bound = {"rtol": 1e-6, "atol": 1e-5 if dtype is F32 else 1e-13}
        np.testing.assert_allclose(ours.out, expected.out, **bound)
        np.testing.assert_allclose(ours.lse, expected.lse, **bound)
        gradients = sdpa.attention_backward(grad_out, query, key, value, *ours, **options)
        others = sdpa.attention_backward(grad_out, query, key, value, *expected, mask)
        np.testing.assert_allclose(gradients.value, others.value, **bound)
        assert not gradients.query[:, ::3].any()
