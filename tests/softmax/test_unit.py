"""The softmax family against values worked out on paper, and the rules of its semantics."""

import inspect
import re

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support.helpers import LAYOUTS, unit_roundoff

import sdpa

pytestmark = pytest.mark.usefixtures("isa")

NAN, INF = np.nan, np.inf

# Around a vector, the longest row that is transposed, a block of the sum, a chunk, a unit.
LENGTHS = (0, 1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 64, 65, 128, 129, 511, 513, 8192, 8193, 20000, 65537)


def close(actual, expected, ulps=8):
    """Within `ulps` unit roundoffs of 1, of the type of `actual`, in relative terms."""
    error = abs(actual.astype(np.float64) - expected)
    bound = ulps * unit_roundoff(actual.dtype) * np.abs(expected)
    return actual.shape == np.shape(expected) and bool(np.all(error <= bound))


def same_bits(a, b):
    """Bitwise equality; a NaN equals any other, whose sign depends on the order of operands."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    words = [np.array(x, order="C").reshape(-1).view(f"u{x.dtype.itemsize}") for x in (a, b)]
    both_nan = np.isnan(a).ravel() & np.isnan(b).ravel()
    return bool(np.all((words[0] == words[1]) | both_nan))


# ------------------------------------------------------------------------------- values by hand


def test_softmax_of_logarithms(dtype):
    x = np.log2([1.0, 2.0, 1.0, 4.0]).astype(dtype)  # exact: 0, 1, 0, 2
    p = sdpa.softmax(x, temperature=1 / np.log(2))
    assert p.dtype == dtype
    assert close(p, np.array([1, 2, 1, 4]) / 8)


def test_temperature_divides():
    x = np.array([0.0, 4 * np.log(3.0)])
    assert close(sdpa.softmax(x, temperature=4.0), np.array([0.25, 0.75]))
    assert close(sdpa.log_softmax(x, temperature=4.0), np.log([0.25, 0.75]))


def reach(dtype):
    """Temperatures from 2^-reach to 2^reach are taken."""
    return 1000 if np.dtype(dtype) == np.float64 else 110


@pytest.mark.parametrize("share", [-1, -0.5, -0.2, 0.2, 0.5, 1])
def test_elements_of_the_order_of_extreme_temperatures(share):
    """x / t is what counts, and its power of two is none of the rounding."""
    for dtype in (np.float32, np.float64):
        t = 2.0 ** round(share * reach(dtype))
        x = np.array([[-1.5, 0.25, 1.0, 3.0]], dtype)
        p, y = sdpa.softmax(x), sdpa.log_softmax(x)
        large = (x * dtype(t)).astype(dtype)
        assert close(sdpa.softmax(large, temperature=t), p)
        assert close(sdpa.log_softmax(large, temperature=t), y)
        g = np.array([[0.5, -1.0, 2.0, 0.25]], dtype)
        for function, of in ((sdpa.softmax_backward, p), (sdpa.log_softmax_backward, y)):
            assert close(function((g * dtype(t)).astype(dtype), of, temperature=t), function(g, of))
        assert close(sdpa.softmax_jacobian(p, temperature=t) * dtype(t), sdpa.softmax_jacobian(p))


@pytest.mark.parametrize("sign", [-1, 1])
def test_temperatures_beyond_the_arithmetic_are_refused(dtype, sign):
    n = reach(dtype)
    name = "float64" if n == 1000 else "float32"
    x, t = np.ones(3, dtype), 2.0 ** (sign * n)
    beyond = t * 1.5**sign
    text = f"expected 2^-{n} to 2^{n}, the range of {name} arithmetic, got {beyond!r}; divide"
    calls = {
        sdpa.softmax: (x,),
        sdpa.log_softmax: (x,),
        sdpa.softmax_backward: (x, x),
        sdpa.log_softmax_backward: (x, x),
        sdpa.softmax_jacobian: (x,),
    }
    for function, arrays in calls.items():
        function(*arrays, temperature=t)
        with pytest.raises(ValueError, match=re.escape(text)):
            function(*arrays, temperature=beyond)


@pytest.mark.parametrize("temperature", [1e-300, 1e-33, 1e-30, 1e-5, 1e5, 1e30, 1e33, 1e300])
def test_extreme_temperatures(dtype, temperature):
    if abs(np.log2(temperature)) > reach(dtype):  # refused, as above
        temperature = 1e-33 if temperature < 1 else 1e33
    x = np.array([1, 2, 0, 2], dtype)
    hot = temperature > 1
    expected = np.full(4, 0.25) if hot else np.array([0, 0.5, 0, 0.5])
    p = sdpa.softmax(x, temperature=temperature)
    assert np.allclose(p.astype(float), expected, rtol=0, atol=1e-4 if temperature == 1e5 else 1e-6)
    y = sdpa.log_softmax(x, temperature=temperature).astype(float)
    assert not np.isnan(y).any()
    assert np.all(y[[1, 3]] == y[1])


def test_log_softmax_where_softmax_underflows(dtype):
    x = np.array([0, 1000], dtype)
    assert_array_equal(sdpa.log_softmax(x).astype(float), [-1000, 0])
    assert_array_equal(sdpa.softmax(x).astype(float), [0, 1])


def test_logsumexp_of_equal_values(dtype):
    x = np.full((3, 16), 4, dtype)
    assert close(sdpa.logsumexp(x), np.full(3, 4 + np.log(16)))


@pytest.mark.parametrize("n", [n for n in LENGTHS if n])
def test_uniform_rows(dtype, n):
    x = np.full((2, n), 3, dtype)
    assert close(sdpa.softmax(x), np.full((2, n), 1 / n))
    assert close(sdpa.log_softmax(x), np.full((2, n), -np.log(n)))
    assert close(sdpa.logsumexp(x), np.full(2, 3 + np.log(n)))


@pytest.mark.parametrize("n", [n for n in LENGTHS if n > 1])
def test_one_large_element_anywhere(dtype, n):
    """The maximum and the sum see every position; exp(-200) = 1e-87 is next to nothing."""
    at = np.unique(np.linspace(0, n - 1, 50).astype(int))
    x = np.zeros((len(at), n), dtype)
    x[np.arange(len(at)), at] = 200
    one_hot = (x != 0).astype(np.float64)
    assert_array_equal(sdpa.softmax(x).astype(float).round(30), one_hot)
    assert_array_equal(sdpa.log_softmax(x).astype(float).round(30), 200 * one_hot - 200)
    assert_array_equal(sdpa.logsumexp(x).astype(float), np.full(len(at), 200.0))
    assert_array_equal(sdpa.softmax(x.T, axis=0).astype(float).round(30), one_hot.T)


def test_largest_finite_values(dtype):
    big = ml_dtypes.finfo(dtype).max
    x = np.array([[big, big], [-big, -big], [big, -big]], dtype)
    assert_array_equal(sdpa.softmax(x).astype(float), [[0.5, 0.5], [0.5, 0.5], [1, 0]])
    assert_array_equal(sdpa.logsumexp(x).astype(float), x.max(axis=1).astype(float))
    x = np.array([big, big, -INF], dtype)
    assert_array_equal(sdpa.softmax(x).astype(float), [0.5, 0.5, 0])


def test_rows_of_softmax_sum_to_one(rng, dtype):
    for n in (1, 10, 100, 1000, 10000):
        p = sdpa.softmax((8 * rng.standard_normal((7, n))).astype(dtype))
        # Each element has a relative error of a few u, that of the oracle not counted.
        assert np.all(abs(p.astype(np.float64).sum(axis=1) - 1) <= 8 * unit_roundoff(dtype))


def test_backward_by_hand(dtype):
    p = np.array([0.25, 0.75], dtype)
    g = np.array([1, 0], dtype)
    assert_array_equal(sdpa.softmax_backward(g, p).astype(float), [0.1875, -0.1875])
    assert_array_equal(sdpa.softmax_backward(g, p, temperature=0.5).astype(float), [0.375, -0.375])
    y = np.array([-2, -1], dtype)
    expected = 2.0 * np.array([1 - np.exp(-2), -np.exp(-1)])
    assert close(sdpa.log_softmax_backward(g, y, temperature=0.5), expected)
    x = np.array([2, 3], dtype)
    lse = np.array(4, dtype)
    assert close(sdpa.logsumexp_backward(np.array(3, dtype), x, lse), 3 * np.exp([-2.0, -1.0]))
    assert close(sdpa.softmax_jacobian(p), np.array([[3, -3], [-3, 3]]) / 16)
    assert close(sdpa.softmax_jacobian(p, temperature=4.0), np.array([[3, -3], [-3, 3]]) / 64)


def test_jacobian_axes():
    p = np.arange(24).reshape(2, 3, 4) / 276
    for axis in (0, 1, 2, -1):
        j = sdpa.softmax_jacobian(p, axis)
        moved = np.moveaxis(p, axis, -1)
        assert j.shape == (*moved.shape, moved.shape[-1])
        for at in np.ndindex(moved.shape[:-1]):
            expected = np.diag(moved[at]) - np.outer(moved[at], moved[at])
            assert np.allclose(j[at], expected, rtol=1e-15, atol=0)
    j = sdpa.softmax_jacobian(p, (0, 2))
    assert j.shape == (3, 2, 4, 2, 4)
    for k in range(3):
        row = p[:, k].ravel()
        expected = np.diag(row) - np.outer(row, row)
        assert np.allclose(j[k].reshape(8, 8), expected, rtol=1e-15, atol=0)
    assert sdpa.softmax_jacobian(p, None).shape == (2, 3, 4, 2, 3, 4)
    assert sdpa.softmax_jacobian(p, ()).shape == p.shape
    assert sdpa.softmax_jacobian(np.ones((3, 0))).shape == (3, 0, 0)
    assert sdpa.softmax_jacobian(np.ones((0, 3))).shape == (0, 3, 3)


def test_jacobian_of_a_reversed_view():
    p = np.array([0.5, 0.125, 0.375])
    expected = np.diag(p) - np.outer(p, p)
    assert_array_equal(sdpa.softmax_jacobian(p[::-1]), expected[::-1, ::-1])


# --------------------------------------------------------------------------------- what is left out


def test_where_by_hand(dtype):
    x = np.array([[1, 7, 1], [2, 2, 5]], dtype)
    where = np.array([[True, False, True], [False, True, False]])
    assert_array_equal(sdpa.softmax(x, where=where).astype(float), [[0.5, 0, 0.5], [0, 1, 0]])
    y = sdpa.log_softmax(x, where=where)
    assert close(y[0, [0, 2]], np.log([0.5, 0.5]))
    assert_array_equal(y[~where].astype(float), [-INF] * 3)
    assert y[1, 1] == 0
    assert close(sdpa.logsumexp(x, where=where), np.array([1 + np.log(2), 2]))


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("axis", [0, 1])
def test_what_is_left_out_cannot_matter(rng, dtype, n, poison, axis):
    shape = (20, n) if axis else (n, 20)
    x = rng.standard_normal(shape).astype(dtype)
    where = rng.random(shape) < 0.7
    poisoned = x.copy()
    poisoned[~where] = poison
    for f, left_out in ((sdpa.softmax, 0), (sdpa.log_softmax, -INF), (sdpa.logsumexp, None)):
        expected = f(x, axis, where=where)
        assert same_bits(f(poisoned, axis, where=where), expected)
        assert not np.isnan(expected).any()
        if left_out is not None:
            assert np.all(expected[~where] == left_out)
            assert np.all(expected[where] != left_out)
    # -inf is excluded even without `where`.
    poisoned[~where] = -INF
    assert same_bits(sdpa.softmax(poisoned, axis), sdpa.softmax(x, axis, where=where))


@pytest.mark.parametrize("n", [n for n in LENGTHS if n])
def test_nothing_included(dtype, n):
    for x, where in (
        (np.full((3, n), -INF, dtype), None),
        (np.full((3, n), NAN, dtype), False),
        (np.full((3, n), 1, dtype), np.zeros((3, n), bool)),
    ):
        assert_array_equal(sdpa.softmax(x, where=where).astype(float), np.zeros((3, n)))
        assert_array_equal(sdpa.log_softmax(x, where=where).astype(float), np.full((3, n), -INF))
        assert_array_equal(sdpa.logsumexp(x, where=where).astype(float), [-INF] * 3)
        assert_array_equal(sdpa.softmax(x.T, 0, where=where if where is None else False), 0)


def test_gradients_of_what_is_left_out_are_zero(dtype):
    p = np.array([0.5, 0, 0.5], dtype)
    y = np.array([-1, -INF, -2], dtype)
    g = np.array([1, 2, 3], dtype)
    assert sdpa.softmax_backward(g, p)[1] == 0
    dx = sdpa.log_softmax_backward(np.array([1, NAN, 3], dtype), y)
    assert dx[1] == 0
    assert close(dx[[0, 2]], np.array([1, 3]) - 4 * np.exp([-1.0, -2.0]), ulps=16)
    nothing = np.full(3, -INF, dtype)
    assert_array_equal(sdpa.log_softmax_backward(g, nothing).astype(float), np.zeros(3))
    lse = np.array(-INF, dtype)
    assert_array_equal(sdpa.logsumexp_backward(lse + 1, nothing, lse).astype(float), np.zeros(3))
    assert_array_equal(sdpa.softmax_backward(g, np.zeros(3, dtype)).astype(float), np.zeros(3))


@pytest.mark.parametrize("n", [n for n in LENGTHS if n > 2])
@pytest.mark.parametrize("axis", [0, 1])
def test_nan_reaches_its_row_and_no_other(rng, dtype, n, axis):
    x = rng.standard_normal((40, n)).astype(dtype)
    rows = np.arange(0, 40, 3)
    at = rng.integers(0, n, len(rows))
    clean = x.copy()
    x[rows, at] = NAN
    x[rows, (at + 1) % n] = -INF  # left out all the same
    expected = np.zeros((40, n), bool)
    expected[rows] = True
    expected[rows, (at + 1) % n] = False
    others = np.setdiff1d(np.arange(40), rows)
    lay = (lambda a: a) if axis else (lambda a: np.ascontiguousarray(a.T))
    for f, left_out in ((sdpa.softmax, 0), (sdpa.log_softmax, -INF)):
        y = lay(f(lay(x), axis))
        assert_array_equal(np.isnan(y), expected)
        assert np.all(y[rows, (at + 1) % n] == left_out)
        assert same_bits(y[others], lay(f(lay(clean), axis))[others])
    assert_array_equal(np.isnan(sdpa.logsumexp(lay(x), axis)), expected.any(axis=1))


@pytest.mark.parametrize("n", [n for n in LENGTHS if n > 2])
@pytest.mark.parametrize("axis", [0, 1])
def test_plus_infinity(rng, dtype, n, axis):
    """softmax is NaN, from inf - inf; log-sum-exp has the limit inf."""
    x = rng.standard_normal((20, n)).astype(dtype)
    at = rng.integers(0, n, 20)
    x[np.arange(20), at] = INF
    x[3, (at[3] + 1) % n] = NAN
    lay = (lambda a: a) if axis else (lambda a: np.ascontiguousarray(a.T))
    assert np.isnan(sdpa.softmax(lay(x), axis)).all()
    assert np.isnan(sdpa.log_softmax(lay(x), axis)).all()
    lse = sdpa.logsumexp(lay(x), axis).astype(float)
    assert np.isnan(lse[3])
    assert_array_equal(np.delete(lse, 3), np.full(19, INF))


def test_nan_and_inf_in_gradients_propagate(dtype):
    p = np.array([0.5, 0.5], dtype)
    assert np.isnan(sdpa.softmax_backward(np.array([NAN, 1], dtype), p)).all()
    dx = sdpa.softmax_backward(np.array([INF, 1], dtype), p).astype(float)
    assert np.isnan(dx[0])
    assert dx[1] == -INF
    assert np.isnan(sdpa.log_softmax_backward(np.array([NAN, 1], dtype), -p)).all()


# ------------------------------------------------------------------------------ shapes and results


def test_axes(rng):
    x = rng.standard_normal((2, 3, 4))
    e = np.exp(x)
    for axis in (0, 1, 2, -1, -2, -3, (0, 1), (1, 0), (0, 2), (-1, 0), (0, 1, 2), None, ()):
        total = e.sum(axis=axis, keepdims=True)
        assert np.allclose(sdpa.softmax(x, axis), e / total, rtol=1e-14)
        assert np.allclose(sdpa.log_softmax(x, axis), np.log(e / total), rtol=1e-13)
        lse = sdpa.logsumexp(x, axis, keepdims=True)
        assert lse.shape == total.shape
        assert np.allclose(lse, np.log(total), rtol=1e-14)
        flat = sdpa.logsumexp(x, axis)
        assert np.shape(flat) == e.sum(axis=axis).shape
        assert same_bits(np.asarray(flat).ravel(), lse.ravel())


def test_scalars(dtype):
    x = np.array(3, dtype)
    for axis in (-1, 0, None, ()):
        assert sdpa.softmax(x, axis) == 1
        assert sdpa.log_softmax(x, axis) == 0
        assert sdpa.logsumexp(x, axis) == 3
        assert np.shape(sdpa.softmax(x, axis)) == ()
        assert sdpa.softmax(x, axis).dtype == dtype
    assert sdpa.softmax(5.0) == 1
    assert sdpa.logsumexp(np.array([0, 0], dtype)).dtype == dtype


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3), (0, 0)])
def test_empty(dtype, shape):
    x = np.empty(shape, dtype)
    for axis in (*range(len(shape)), None):
        for y in (
            sdpa.softmax(x, axis),
            sdpa.log_softmax(x, axis),
            sdpa.softmax_backward(x, x, axis),
        ):
            assert y.shape == shape
            assert y.dtype == dtype
        lse = np.asarray(sdpa.logsumexp(x, axis))
        assert lse.shape == np.zeros(shape).sum(axis=axis).shape
        assert lse.dtype == dtype
        assert np.all(lse == -INF)
        assert sdpa.logsumexp_backward(lse, x, lse, axis).shape == shape


@pytest.mark.parametrize("kind", ["?", "b", "B", "h", "i", "q", "Q", ">i4"])
def test_integers_and_bool_give_float64(kind):
    x = np.array([0, 1, 1], kind)
    for f in (sdpa.softmax, sdpa.log_softmax, sdpa.logsumexp):
        assert f(x).dtype == np.float64
        assert np.all(f(x) == f(x.astype(np.float64)))
    assert sdpa.softmax_backward(x, x).dtype == np.float64


def test_array_likes(dtype):
    class Array:
        def __array__(self, dtype=None, copy=None):
            return np.zeros(2)

    assert_array_equal(sdpa.softmax([0, 0]), [0.5, 0.5])
    assert_array_equal(sdpa.softmax(((0.0, 0.0),)), [[0.5, 0.5]])
    assert_array_equal(sdpa.softmax(memoryview(b"\0\0")), [0.5, 0.5])
    assert_array_equal(sdpa.softmax(Array()), [0.5, 0.5])


def test_out(rng, dtype):
    x = rng.standard_normal((5, 6)).astype(dtype)
    for f in (sdpa.softmax, sdpa.log_softmax):
        for make in (
            lambda: np.full((5, 6), NAN, dtype),
            lambda: np.full((6, 5), NAN, dtype).T,
            lambda: np.full((10, 12), NAN, dtype)[::-2, ::2],
        ):
            out = make()
            assert f(x, out=out) is out
            assert same_bits(out, f(x))
    around = np.full((7, 8), 7, dtype)
    sdpa.softmax(x, out=around[1:-1, 1:-1])
    assert np.all(around[[0, -1]] == 7)
    assert np.all(around[:, [0, -1]] == 7)
    out = np.empty((5, 1), dtype)
    assert sdpa.logsumexp(x, keepdims=True, out=out) is out
    assert same_bits(out[:, 0], sdpa.logsumexp(x))
    out = np.empty((), dtype)
    assert sdpa.logsumexp(x, None, out=out) is out
    assert out == sdpa.logsumexp(x, None)
    assert sdpa.softmax(x, out=None).shape == x.shape
    both = np.zeros((5, 12), dtype)  # interleaved with its input, but apart from it
    both[:, ::2] = x
    assert same_bits(sdpa.softmax(both[:, ::2], out=both[:, 1::2]), sdpa.softmax(x))


def test_sparse_out_of_rows_of_several_chunks(rng, dtype):
    """Exponentials are kept in a dense out, and computed again for a sparse one."""
    x = rng.standard_normal((3, 2 * 8192 + 5)).astype(dtype)
    x[1, 9000:] = -INF
    x[2, :9000] = NAN
    sparse = np.full((3, 2 * x.shape[1]), NAN, dtype)[:, ::2]
    assert same_bits(sdpa.softmax(x, out=sparse), sdpa.softmax(x))


def test_results_are_new_native_arrays_in_the_order_of_x(rng, dtype):
    x = rng.standard_normal((3, 4, 5)).astype(dtype)
    for y in (x, x.transpose(2, 0, 1), LAYOUTS["other byte order"](x), x[::-1]):
        p = sdpa.softmax(y)
        assert p.dtype == dtype
        assert p.dtype.isnative
        assert p.flags.owndata
        order = np.argsort(np.abs(y.strides))
        assert_array_equal(order, np.argsort(p.strides))
    assert type(sdpa.softmax(np.zeros(2, dtype).view(np.recarray))) is np.ndarray


def test_inputs_are_never_written(rng, dtype):
    for shape, axis in (((7, 9), 1), ((200, 33), 0), ((3, 9000), 1)):
        x, g = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
        where = rng.random(shape) < 0.5
        lse = sdpa.logsumexp(x, axis)
        arrays = [x, g, where, lse]
        before = [a.copy() for a in arrays]
        for a in arrays:
            a.flags.writeable = False
        sdpa.softmax(x, axis, where=where)
        sdpa.log_softmax(x, axis, where=where)
        sdpa.logsumexp(x, axis, where=where)
        sdpa.softmax_backward(g, x, axis)
        sdpa.log_softmax_backward(g, x, axis)
        sdpa.logsumexp_backward(lse, x, lse, axis)
        assert all(same_bits(a, b) for a, b in zip(arrays, before, strict=True))


# --------------------------------------------------------------------------- the same bits always


def every_routine(x, g, axis, where):
    """The result of each routine along one axis."""
    lse = sdpa.logsumexp(x, axis)
    return [
        sdpa.softmax(x, axis),
        sdpa.log_softmax(x, axis, temperature=0.7),
        lse,
        sdpa.softmax(x, axis, where=where),
        sdpa.softmax_backward(g, x, axis),
        sdpa.log_softmax_backward(g, -abs(x), axis, temperature=3.0),
        sdpa.logsumexp_backward(lse, x, lse, axis),
    ]


@pytest.mark.parametrize("n", [1, 3, 10, 16, 17, 64, 129, 130, 700, 9001])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_changes_no_bit(rng, dtype, layout, n):
    x, g = (rng.standard_normal((37, n)).astype(dtype) for _ in range(2))
    where = rng.random((37, n)) < 0.8
    lay = LAYOUTS[layout]
    expected = every_routine(x, g, 1, where)
    actual = every_routine(lay(x), lay(g), 1, lay(where))
    assert all(same_bits(a, b) for a, b in zip(actual, expected, strict=True))
    actual = every_routine(lay(x.T), lay(g.T), 0, lay(where.T))
    assert all(same_bits(a.T, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("step", [2, 4])
def test_gaps_between_elements_change_no_bit(rng, dtype, step):
    """Elements of 16 bits may lie as far apart as those of 32 or 64 are long."""
    x, g = (rng.standard_normal((37, 40)).astype(dtype) for _ in range(2))
    where = rng.random((37, 40)) < 0.8
    apart = [np.repeat(a, step, axis=1)[:, ::step] for a in (x, g, where)]
    for axis in (0, 1):
        results = every_routine(*apart[:2], axis, apart[2]), every_routine(x, g, axis, where)
        assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("n", [1, 3, 10, 16, 17, 64, 129, 130, 700, 9001])
def test_a_row_alone_has_the_same_bits(rng, dtype, n):
    x, g = (rng.standard_normal((37, n)).astype(dtype) for _ in range(2))
    where = rng.random((37, n)) < 0.8
    together = every_routine(x, g, 1, where)
    for i in (0, 15, 36):
        alone = every_routine(x[i], g[i], 0, where[i])
        assert all(same_bits(np.asarray(a), b[i]) for a, b in zip(alone, together, strict=True))


def test_several_axes_have_the_bits_of_one(rng, dtype):
    x, g = (rng.standard_normal((9, 5, 7, 11)).astype(dtype) for _ in range(2))
    where = rng.random(x.shape) < 0.8
    expected = every_routine(*(a.reshape(9, -1) for a in (x, g)), 1, where.reshape(9, -1))
    for order in ((0, 1, 2, 3), (1, 2, 3, 0), (3, 0, 1, 2), (2, 1, 0, 3)):
        # An equal array with its axes in another order in memory.
        lay = [
            np.moveaxis(np.moveaxis(a, order, (0, 1, 2, 3)).copy(), (0, 1, 2, 3), order)
            for a in (x, g, where)
        ]
        actual = every_routine(*lay[:2], (1, 2, 3), lay[2])
        assert all(same_bits(a.reshape(b.shape), b) for a, b in zip(actual, expected, strict=True))


@pytest.fixture
def threads():
    """sdpa.set_num_threads, undone after the test."""
    before = sdpa.get_num_threads()
    yield sdpa.set_num_threads
    sdpa.set_num_threads(before)


@pytest.mark.parametrize("shape", [(3000, 100), (60000, 10), (40, 20000), (2, 300, 500)])
def test_threads_change_no_bit(rng, dtype, shape, threads):
    x, g = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    where = rng.random(shape) < 0.8
    threads(1)
    expected = [every_routine(x, g, axis, where) for axis in (0, -1)]
    for n in (2, 3, 8):
        threads(n)
        actual = [every_routine(x, g, axis, where) for axis in (0, -1)]
        for ours, theirs in zip(actual, expected, strict=True):
            assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("n_rows", [1, 3, 17])
def test_neither_threads_nor_layout_change_a_bit_of_long_rows(rng, dtype, n_rows, threads):
    """Threads share a long row where there are few, in chunks of 8192 elements."""
    x, g = (rng.standard_normal((n_rows, 140_000)).astype(dtype) for _ in range(2))
    x[0, 100_000:] *= 30  # later chunks have a larger maximum, or nothing, or what is no number
    x[-1, 65_536:] = -INF
    x[n_rows // 2, :9000] = -1000
    for row, value in zip(x[5:8], (INF, NAN, -INF), strict=False):
        row[20_000:40_000] = value
    where = rng.random(x.shape) < 0.8
    threads(1)
    expected = every_routine(x, g, 1, where)
    columns = [np.ascontiguousarray(a.T) for a in (x, g, where)]
    for n in (1, 5):
        threads(n)
        for a, b in zip(every_routine(x, g, 1, where), expected, strict=True):
            assert same_bits(a, b)
        for a, b in zip(every_routine(*columns[:2], 0, columns[2]), expected, strict=True):
            assert same_bits(a.T, b)


@pytest.mark.parametrize("n", [8194, 8196, 8200])
def test_few_elements_after_a_chunk(rng, dtype, n):
    """The last chunk of rows in the lanes is as short as rows that stay in registers."""
    x, g = (rng.standard_normal((n, 40)).astype(dtype) for _ in range(2))
    where = rng.random(x.shape) < 0.8
    rows = every_routine(*(np.ascontiguousarray(a.T) for a in (x, g)), 1, where.T)
    for a, b in zip(every_routine(x, g, 0, where), rows, strict=True):
        assert same_bits(a.T, b)


@pytest.mark.parametrize("n", [2, 4, 5, 8, 9, 21, 70, 130])
def test_classes_of_pixels(rng, dtype, n):
    """Lines of pixels, of which the kernels cut off what is before the first whole cache line."""
    x, g = (rng.standard_normal((2, n, 700)).astype(dtype) for _ in range(2))
    x[0, n // 2, 3], x[1, 0, 5], x[1, n - 1, 7] = NAN, INF, -INF
    x[0, :, 9] = x[0, :-1, 698] = -INF
    where = rng.random(x.shape) < 0.8
    lines = [np.ascontiguousarray(a.swapaxes(1, 2)) for a in (x, g, where)]
    rows = every_routine(*lines[:2], 2, lines[2])
    for a, b in zip(every_routine(x, g, 1, where), rows, strict=True):
        assert same_bits(a if a.ndim == 2 else a.swapaxes(1, 2), b)
    for width in (64, 65, 127, 200):  # strips that overlap, or are alone
        part = every_routine(x[..., :width], g[..., :width], 1, where[..., :width])
        for a, b in zip(part, rows, strict=True):
            b = b[:, :width] if b.ndim == 2 else b[:, :width].swapaxes(1, 2)
            assert same_bits(a, b)
    for offset in (0, 1, 4, 31):
        memory = np.zeros(x.size + 64, dtype)
        out = memory[offset : offset + x.size].reshape(x.shape)
        sdpa.softmax(x, 1, out=out)
        assert same_bits(out.swapaxes(1, 2), rows[0])
        assert not memory[:offset].any()
        assert not memory[offset + x.size :].any()


# ------------------------------------------------------------------------------------- signatures

SIGNATURES = {
    "softmax": "(x, axis=-1, *, temperature=1.0, where=None, out=None)",
    "log_softmax": "(x, axis=-1, *, temperature=1.0, where=None, out=None)",
    "logsumexp": (
        "(x, axis=-1, *, b=None, return_sign=False, where=None, keepdims=False, out=None)"
    ),
    "softmax_backward": "(grad, weights, axis=-1, *, temperature=1.0)",
    "log_softmax_backward": "(grad, log_weights, axis=-1, *, temperature=1.0)",
    "logsumexp_backward": "(grad, x, lse, axis=-1, *, b=None, sign=None)",
    "softmax_jacobian": "(weights, axis=-1, *, temperature=1.0)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    assert str(inspect.signature(getattr(sdpa, name))) == SIGNATURES[name]
