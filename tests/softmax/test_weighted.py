"""logsumexp with weights and signs, its gradients, against the oracle and by hand."""

import inspect
import itertools

import numpy as np
import pytest
from support.calls import message
from support.helpers import BFLOAT16, unit_roundoff
from support.protocols import OnlyDlpack

import sdpa
from sdpa import reference

INF, NAN = np.inf, np.nan
AXES = [-1, 0, (0, 2), None]


def draw(rng, dtype, shape=(5, 40, 6), b_shape=None, scale=8.0):
    """x, and weights of both signs of which some are 0."""
    b = rng.standard_normal(b_shape or shape) * (rng.random(b_shape or shape) > 0.2)
    return (scale * rng.standard_normal(shape)).astype(dtype), b.astype(dtype)


def condition(x, b, axis):
    """sum |b| exp(x) / |sum b exp(x)|: how much cancels."""
    lse, _ = reference.weighted_logsumexp(x, b, axis)
    return np.exp(reference.weighted_logsumexp(x, abs(np.float64(b)), axis)[0] - lse)


@pytest.mark.parametrize("axis", AXES, ids=str)
def test_against_the_oracle(rng, dtype, axis):
    """Sums of n terms in float64, whose exponents are off by roundoffs of x; then rounded.

    Both the oracle and the function may be off by so much.
    """
    x, b = draw(rng, dtype)
    lse, sign = sdpa.logsumexp(x, axis, b=b, return_sign=True)
    expected, expected_sign = reference.weighted_logsumexp(x, b, axis)
    assert type(lse) is type(sign) is type(sdpa.logsumexp(x, axis))
    assert lse.dtype == sign.dtype == dtype
    np.testing.assert_array_equal(sign.astype(float), expected_sign)
    spread = x.size + 2 * abs(x.astype(float)).max()
    bound = 2 * 2.0**-53 * spread * condition(x, b, axis) + unit_roundoff(dtype) * abs(expected)
    assert np.all(abs(lse.astype(float) - expected) <= bound)
    kept = sdpa.logsumexp(x, axis, b=b, return_sign=True, keepdims=True)
    shape = sdpa.logsumexp(x, axis, keepdims=True).shape
    for y, z in zip(kept, (lse, sign), strict=True):
        np.testing.assert_array_equal(y, z.reshape(shape))
    plain = np.float64(sdpa.logsumexp(x, axis, b=b))
    np.testing.assert_array_equal(plain, np.where(sign < 0, NAN, np.float64(lse)))


def test_weights_of_one_are_no_weights(rng):
    x = 8 * rng.standard_normal((30, 200))
    np.testing.assert_allclose(sdpa.logsumexp(x, b=1.0), sdpa.logsumexp(x), rtol=2e-15)
    mask = rng.random(x.shape) < 0.5
    for where in (mask, mask.tolist(), OnlyDlpack(mask)):
        got = sdpa.logsumexp(x, b=np.ones(200), where=where)
        np.testing.assert_allclose(got, sdpa.logsumexp(x, where=where), rtol=2e-15)


def test_the_sign_without_weights(dtype):
    x = np.array([[1.0, 2.0], [-INF, -INF], [INF, 0.0], [NAN, 0.0]]).astype(dtype)
    lse, sign = sdpa.logsumexp(x, return_sign=True)
    assert lse.dtype == sign.dtype == dtype
    np.testing.assert_array_equal(lse.astype(float), sdpa.logsumexp(x).astype(float))
    np.testing.assert_array_equal(sign.astype(float), [1, 0, 1, NAN])
    assert sdpa.logsumexp(np.float32([1, 2]), return_sign=True).sign == np.float32(1)


BY_HAND = {
    # x, b, log |sum b exp(x)|, sign
    "negative": ([1000.0, 1000.0], [1, -3], 1000 + np.log(2), -1),
    "cancels": ([3.0, 3.0], [1, -1], -INF, 0),
    "the largest cancel": ([2.0, 2.0, 0.0], [1, -1, -5], np.log(5), -1),
    "nearly 1": ([0.0, -40.0], [1, -1], np.log1p(-np.exp(-40.0)), 1),
    "zero hides NaN": ([NAN, INF, 2.0], [0, 0, 2], 2 + np.log(2), 1),
    "left out": ([-INF, 1.0], [INF, 1], 1, 1),
    "nothing": ([], [], -INF, 0),
    "nothing left": ([1.0, 2.0], [0, 0], -INF, 0),
    "infinite": ([INF, 800.0], [-2, 1e300], INF, -1),
    "infinities of both signs": ([INF, INF], [1, -1], NAN, NAN),
    "an infinite weight": ([-2000.0, 5.0], [-INF, 1], INF, -1),
    "NaN": ([NAN, 1.0], [1, 1], NAN, NAN),
    "NaN in b": ([INF, 1.0], [1, NAN], NAN, NAN),
    "large weights": ([0.0, 0.0], [1.5e308, 1.5e308], np.log(1.5e308) + np.log(2), 1),
    "tiny weights": ([1000.0, 0.0], [5e-324, 1], 1000 + np.log(5e-324), 1),
    "far apart": ([2000.0, 0.0], [1e-320, 1e300], 2000 + np.log(1e-320), 1),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_by_hand(case):
    x, b, expected, expected_sign = BY_HAND[case]
    lse, sign = sdpa.logsumexp(np.array(x), b=np.array(b), return_sign=True)
    np.testing.assert_allclose(lse, expected, rtol=1e-15, atol=0)
    np.testing.assert_array_equal(sign, expected_sign)
    oracle = reference.weighted_logsumexp(x, b)
    np.testing.assert_allclose(oracle[0], expected, rtol=1e-13, atol=2.0**-53)
    np.testing.assert_array_equal(oracle[1], expected_sign)


def test_gradients_of_infinite_terms():
    x, b = np.array([-INF, -INF, 2.0, 1.0]), np.array([INF, 1.0, 0.0, 3.0])
    for weights in (b, np.where(b == INF, NAN, b), [1.0, 2.0, 0.0, 0.0]):
        saved = sdpa.logsumexp(x, b=weights, return_sign=True)
        got = sdpa.logsumexp_backward(1.5, x, saved.lse, b=weights, sign=saved.sign)
        expected = reference.weighted_logsumexp_backward(1.5, x, weights, *saved)
        for y, z in zip(got, expected, strict=True):
            np.testing.assert_allclose(y, z, rtol=1e-14)


def test_dtypes():
    """That of x and b together; a Python number is of any, integers are float64."""
    types = ["f2", BFLOAT16, "f4", "f8", "i4", "?"]
    for a, b in set(itertools.product(types, types)) - {("f2", BFLOAT16), (BFLOAT16, "f2")}:
        floats = [np.dtype("f8" if np.dtype(t).kind in "bi" else t) for t in (a, b)]
        x, w = np.ones(3).astype(a), np.ones(3).astype(b)
        assert sdpa.logsumexp(x, b=w).dtype == np.result_type(*floats), (a, b)
    assert sdpa.logsumexp(np.ones(3, "f4"), b=2.0).dtype == np.float32
    assert sdpa.logsumexp(np.ones(3, ">f4"), b=np.ones(3, ">f4")).dtype == np.dtype("f4")
    assert sdpa.logsumexp(1, b=2).dtype == np.float64


def test_both_broadcast(rng):
    x, b = rng.standard_normal((4, 1, 2, 1)), rng.standard_normal((3, 1, 5))
    got = sdpa.logsumexp(x, (1, 3), b=b, return_sign=True)
    expected = reference.weighted_logsumexp(x, b, (1, 3))
    assert got.lse.shape == (4, 2)
    np.testing.assert_allclose(got.lse, expected[0], rtol=1e-13)
    grad = rng.standard_normal((4, 2))
    gradients = sdpa.logsumexp_backward(grad, x, got.lse, (1, 3), b=b, sign=got.sign)
    expected = reference.weighted_logsumexp_backward(grad, x, b, *got, (1, 3))
    for y, z in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(y, z, rtol=1e-12)


@pytest.mark.parametrize("axis", [0, -1, (0,), (-1,), (), None])
def test_axes_of_a_scalar(axis):
    """As without weights."""
    lse, sign = sdpa.logsumexp(1.0, axis, b=-2.0, return_sign=True)
    np.testing.assert_allclose([lse, sign], [1 + np.log(2), -1], rtol=1e-15)
    g = sdpa.logsumexp_backward(3.0, 1.0, lse, axis, b=-2.0, sign=sign)
    np.testing.assert_allclose([g.x, g.b], [3.0, -1.5], rtol=1e-15)
    assert g.x.shape == g.b.shape == np.shape(lse) == ()


def test_out(rng):
    x, b = draw(rng, np.float32, (4, 6))
    out = np.empty(4, np.float32)
    assert sdpa.logsumexp(x, b=b, out=out) is out
    np.testing.assert_array_equal(out, sdpa.logsumexp(x, b=b))
    assert sdpa.logsumexp(x, b=b, out=out, return_sign=True).lse is out
    expected = "out: expected memory not shared with an input, got an array that overlaps b"
    assert message(ValueError, sdpa.logsumexp, x[:, :1], b=b[:1], axis=0, out=b[0]) == expected
    assert message(ValueError, sdpa.logsumexp, x, b=b, out=out[:3]).startswith("out: ")
    n = np.zeros((3, 4), np.int64)  # computed as a copy in float64
    assert "overlaps x" in message(ValueError, sdpa.logsumexp, n, b=2.0, out=n.view(float)[:, 0])


# --------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("axis", AXES, ids=str)
@pytest.mark.parametrize("b_shape", [(5, 40, 6), (40, 1), (6,), ()], ids=str)
def test_gradients_against_the_oracle(rng, dtype, axis, b_shape):
    x, b = draw(rng, dtype, b_shape=b_shape)
    b = np.asarray(b + np.asarray(3, dtype), dtype)  # no sum is nearly 0
    lse, sign = sdpa.logsumexp(x, axis, b=b, return_sign=True)
    grad = rng.standard_normal(lse.shape).astype(dtype)
    got = sdpa.logsumexp_backward(grad, x, lse, axis, b=b, sign=sign)
    expected = reference.weighted_logsumexp_backward(grad, x, b, lse, sign, axis)
    for y, z, like in zip(got, expected, (x, b), strict=True):
        assert (y.shape, y.dtype) == (like.shape, like.dtype)
        # Relative errors of each term in float64, and one rounding.
        size = abs(z).max()
        bound = unit_roundoff(dtype) * abs(z) + 2.0**-53 * (x.size + 8 * abs(x).max()) * size
        bound += np.finfo(np.float32).smallest_subnormal + 6e-8 * (np.dtype(dtype) == np.float16)
        assert np.all(abs(y.astype(float) - z) <= bound)


def test_gradients_are_derivatives(rng):
    """Central differences, whose error is of second order."""
    x, b = draw(rng, np.float64, (3, 7), scale=1.0)
    g, h = rng.standard_normal(3), 1e-5
    for axis, grad in ((-1, g), (0, rng.standard_normal(7))):
        lse, sign = sdpa.logsumexp(x, axis, b=b, return_sign=True)
        got = sdpa.logsumexp_backward(grad, x, lse, axis, b=b, sign=sign)
        for name, array in (("x", x), ("b", b)):
            step = rng.standard_normal(array.shape) * (array != 0)
            ends = [
                sdpa.logsumexp(**{"x": x, "b": b} | {name: array + t * step}, axis=axis,
                               return_sign=True).lse
                for t in (h, -h)
            ]  # fmt: skip
            slope = (grad * (ends[0] - ends[1])).sum() / (2 * h)
            np.testing.assert_allclose((getattr(got, name) * step).sum(), slope, rtol=1e-5)


def test_an_element_of_weight_0_has_a_gradient_of_its_weight():
    x = np.log([1.0, 3.0, 4.0])
    b = np.array([1.0, 1.0, 0.0])
    g = sdpa.logsumexp_backward(1.0, x, sdpa.logsumexp(x, b=b), b=b)
    np.testing.assert_allclose(g.x, [0.25, 0.75, 0], rtol=1e-15)
    np.testing.assert_allclose(g.b, [0.25, 0.75, 1], rtol=1e-15)
    x[0] = -INF
    g = sdpa.logsumexp_backward(1.0, x, sdpa.logsumexp(x, b=b), b=b)
    np.testing.assert_allclose(g.b, [0, 1, 4 / 3], rtol=1e-15)


@pytest.mark.parametrize(
    ("of_x", "of_b", "given", "expected"),
    [
        (np.float32, np.float64, np.float32, "float64"),
        (np.float16, np.float16, np.float64, "float16 or float32"),
    ],
)
def test_gradients_have_the_dtype_of_x_and_b_together(of_x, of_b, given, expected):
    x, b = np.ones(3, of_x), np.ones(3, of_b)
    lse = sdpa.logsumexp(x, b=b)
    wrong = np.ones((), given)
    for name, rows in (("grad", (wrong, x, lse)), ("lse", (np.ones((), lse.dtype), x, wrong))):
        text = message(TypeError, sdpa.logsumexp_backward, *rows, b=b)
        end = f"of x and b together, got {wrong.dtype}"
        assert text == f"{name}: expected dtype {expected}, {end}"


def test_signatures():
    parameters = inspect.signature(sdpa.logsumexp).parameters
    assert [*parameters] == ["x", "axis", "b", "return_sign", "where", "keepdims", "out"]
    assert parameters["b"].kind is inspect.Parameter.KEYWORD_ONLY


def test_a_sum_of_0_that_no_gradient_reaches():
    """Its gradient of b is infinite, and counts only where g is not 0."""
    x, b = np.zeros((2, 2)), np.array([[0.0, 0.0], [1.0, 3.0]])
    lse = sdpa.logsumexp(x, axis=1, b=b)
    for g, row in ((0.0, 0.0), (2.0, np.inf)):
        of_x, of_b = sdpa.logsumexp_backward(np.array([g, 1.0]), x, lse, axis=1, b=b)
        np.testing.assert_allclose(of_x, [[0, 0], [0.25, 0.75]])
        np.testing.assert_allclose(of_b, [[row, row], [0.25, 0.25]])
