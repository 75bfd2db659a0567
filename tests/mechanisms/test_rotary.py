"""Rotary embedding: against complex numbers, its properties, its gradient."""

import numpy as np
import pytest
from support.helpers import (
    LAYOUTS,
    assert_same_bits,
    assert_within,
    compute_type,
    normal,
    unit_roundoff,
)

import sdpa
from sdpa import reference

OPTIONS = [
    {},
    {"interleaved": True},
    {"rotary_dim": 6},
    {"rotary_dim": 6, "interleaved": True},
    {"rotary_dim": 0},
    {"base": 500.0},
]


def bound(x, dtype, angle):
    """a cos - b sin: 3 roundings of the arithmetic, cos and sin off by the rounding of an angle of
    this size in float64, twice (the oracle's), and the result rounded to dtype."""
    size = abs(np.asarray(x, np.float64)).max()
    u = unit_roundoff(compute_type(dtype)) + unit_roundoff(np.float64)
    return size * (2 * (4 * u + 6 * angle * unit_roundoff(np.float64)) + 2 * unit_roundoff(dtype))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("backward", [False, True])
def test_against_the_oracle(rng, dtype, options, backward):
    x = normal(rng, (2, 3, 7, 10), dtype)
    positions = rng.integers(0, 5000, (2, 1, 7))
    name = "rotary_embedding_backward" if backward else "rotary_embedding"
    out = getattr(sdpa, name)(x, positions, **options)
    expected = getattr(reference, name)(x, positions, **options)
    assert out.dtype == dtype
    grain = 2.0**-24 if dtype == np.float16 else 0
    assert_within(out, expected, bound(x, dtype, 5000) + grain)
    r = options.get("rotary_dim", 10)
    assert_same_bits(out[..., r:], x[..., r:])


def test_far_positions_keep_their_angles(rng):
    """In float32 an angle of 1e6 would be off by 0.03."""
    x, positions = normal(rng, (4, 8), np.float32), np.array([1e6, 1e6 + 1, 2e6, 3e6])
    out = sdpa.rotary_embedding(x, positions)
    assert_within(out, reference.rotary_embedding(x, positions), bound(x, np.float32, 3e6))


def test_positions_of_any_number_type(rng, dtype):
    x = normal(rng, (4, 8), np.float32)
    out = sdpa.rotary_embedding(x, np.arange(4).astype(dtype))
    assert_same_bits(out, sdpa.rotary_embedding(x, np.arange(4)))


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_the_difference_of_positions(rng, interleaved):
    q, k = rng.standard_normal((1, 8)), rng.standard_normal((1, 8))

    def score(i, j):
        turned = (
            sdpa.rotary_embedding(x, [at], interleaved=interleaved) for x, at in ((q, i), (k, j))
        )
        a, b = turned
        return (a @ b.T).item()

    assert abs(score(3, 8) - score(100, 105)) < 1e-12
    assert abs(score(3, 8) - score(3, 9)) > 1e-3


def test_backward_is_the_transpose_and_the_inverse(rng):
    x, grad = rng.standard_normal((2, 5, 6, 8))
    positions = rng.uniform(-50, 50, (5, 6))
    out = sdpa.rotary_embedding(x, positions, rotary_dim=6)
    back = sdpa.rotary_embedding_backward(grad, positions, rotary_dim=6)
    assert abs((grad * out).sum() - (back * x).sum()) < 1e-12
    again = sdpa.rotary_embedding_backward(out, positions, rotary_dim=6)
    np.testing.assert_allclose(again, x, rtol=0, atol=1e-14)


def test_gradcheck(torch, rng):
    positions = np.arange(4)

    class Rotary(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.tensor(sdpa.rotary_embedding(x.detach().numpy(), positions))

        @staticmethod
        def backward(ctx, grad):
            return torch.tensor(sdpa.rotary_embedding_backward(grad.numpy(), positions))

    x = torch.tensor(rng.standard_normal((2, 4, 6)), requires_grad=True)
    assert torch.autograd.gradcheck(Rotary.apply, (x,))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(rng, dtype, layout):
    x = normal(rng, (2, 5, 6), dtype)
    laid = LAYOUTS[layout](x)
    before = laid.copy()
    out = sdpa.rotary_embedding(laid, np.arange(5))
    assert_same_bits(out, sdpa.rotary_embedding(x, np.arange(5)))
    np.testing.assert_array_equal(laid, before)


def test_empty():
    assert sdpa.rotary_embedding(np.ones((0, 4)), np.arange(0)).shape == (0, 4)
    assert sdpa.rotary_embedding(np.ones((3, 0)), np.arange(3)).shape == (3, 0)
