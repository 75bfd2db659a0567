"""The softmax family against the oracle and PyTorch, within bounds derived from the arithmetic."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.guard import Pages, guarded
from support.helpers import BFLOAT16, LAYOUTS, assert_within, compute_type, normal, unit_roundoff

import sdpa
from sdpa import reference
from sdpa.reference import rows as row_oracle

pytestmark = pytest.mark.usefixtures("isa")

# Around the vectors of every type, the longest transposed row, a block of the sum, a chunk.
LENGTHS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 127, 128, 129, 511, 512, 513)
LONG = (2049, 8191, 8192, 8193, 16385)
CHUNK = 8192


def rounded(error, magnitude, dtype):
    """Error after rounding a result of this magnitude to dtype."""
    grain = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    return error + unit_roundoff(dtype) * magnitude + unit_roundoff(dtype) * error + grain / 2


def assert_family(x, g, axis=-1, temperature=1.0, where=None):
    """Every routine on x, and on gradient g, against the oracle.

    Bounds, with u the unit roundoff of the arithmetic (that of the oracle added), d = x - m, t the
    temperature. e = exp(d / t) errs by |d| u / t, from the subtraction, and 4 u, from polynomial
    and reduction; the sums (softmax.h) by 11 u, and those of the oracle by less than 5 u, of
    the sum of magnitudes; e below the smallest normal number is 0. Longer rows than a chunk have
    e relative to the chunk's maximum; a factor with an error of 2 u, and one rounding, make up for
    it in l and p.

    l = sum e            relative r = sum p |d| u / t + 20 u
    p = e / l            relative |d| u / t + 4 u + r + 3 u
    y = d / t - log l    2 |d| u / t + r + 3 u log l + u |y|
    lse = m + log l      the same without d
    p (g - s) / t        s = sum p g errs by 17 u sum |p g|; three more roundings
    (g - e^y s) / t      s = sum g errs by 17 u sum |g|; e^y by 4 u; three more
    g exp(x - lse)       |x - lse| u + 6 u
    """
    dtype = x.dtype.newbyteorder("=") if x.dtype != BFLOAT16 else x.dtype
    u = unit_roundoff(compute_type(dtype)) + 2 * unit_roundoff(np.float64)
    tiny = float(np.finfo(compute_type(dtype)).tiny)

    def total(z):
        return z.sum(axis=axis, keepdims=True)

    def check(name, actual, expected, error):
        assert actual.dtype == dtype, name
        magnitude = np.where(np.isfinite(expected), abs(expected), 0)
        bound = rounded(error, magnitude, dtype)
        assert np.isfinite(bound).all(), name
        assert_within(actual, expected, bound, name)

    with np.errstate(all="ignore"):
        included = row_oracle.included(x, where)
        m = row_oracle.finite_max(included, axis)
        d = np.where(included == -np.inf, 0, abs(included - m)) / temperature
        p = reference.softmax(x, axis, temperature=temperature, where=where)
        n = max(1, x.size)
        scaled = 3 * u * (x.size > CHUNK * m.size)
        r = total(p * d) * u + 20 * u + scaled + n * tiny
        options = {"temperature": temperature, "where": where}
        check(
            "softmax",
            sdpa.softmax(x, axis, **options),
            p,
            p * (d * u + r + 7 * u + scaled) + 2 * tiny,
        )

        y = reference.log_softmax(x, axis, **options)
        log_l = np.log(np.maximum(total(np.exp(np.where(p > 0, -d, -np.inf))), 1))
        error = d * (2 * u) + r + 3 * u * log_l + u * abs(np.where(np.isfinite(y), y, 0))
        # The oracle subtracts the whole lse from x, and rounds by their magnitude.
        error = error + 4 * unit_roundoff(np.float64) * (abs(m) / temperature + log_l)
        check("log_softmax", sdpa.log_softmax(x, axis, **options), y, error)

        lse = reference.logsumexp(x, axis, where=where, keepdims=True)
        d1 = d * temperature
        p1 = reference.softmax(x, axis, where=where)
        error = total(p1 * d1) * u + 20 * u + scaled + n * tiny + 3 * u * np.log(n)
        ours = sdpa.logsumexp(x, axis, where=where, keepdims=True)
        check("logsumexp", ours, lse, error)
        if where is None:
            check_logsumexp_backward(x, g, ours, axis, included, u, tiny, check)
        # The backward functions get our own results, which are exactly representable.
        check_backward(
            g,
            sdpa.softmax(x, axis, **options),
            sdpa.log_softmax(x, axis, **options),
            *(axis, temperature, u, tiny, check),
        )


def check_backward(g, weights, log_weights, axis, temperature, u, tiny, check):
    """softmax_backward and log_softmax_backward; bounds as derived in `assert_family`."""

    def total(z):
        return z.sum(axis=axis, keepdims=True)

    wide = abs(weights.astype(np.float64))
    wide_g = abs(g.astype(np.float64))
    s = total(wide * wide_g)
    error = wide * (17 * u * s + 5 * u * (wide_g + s)) / temperature
    check(
        "softmax_backward",
        sdpa.softmax_backward(g, weights, axis, temperature=temperature),
        reference.softmax_backward(g, weights, axis, temperature=temperature),
        error + tiny,
    )
    e = np.exp(log_weights.astype(np.float64))
    s = total(np.where(log_weights == -np.inf, 0, wide_g))
    error = (e * 25 * u * s + 5 * u * (wide_g + e * s)) / temperature
    check(
        "log_softmax_backward",
        sdpa.log_softmax_backward(g, log_weights, axis, temperature=temperature),
        reference.log_softmax_backward(g, log_weights, axis, temperature=temperature),
        error + tiny * (1 + s) / temperature,
    )


def check_logsumexp_backward(x, g, lse, axis, included, u, tiny, check):
    row_g = np.asarray(g.astype(np.float64).max(axis=axis, keepdims=True, initial=-1))
    row_g = row_g.astype(lse.dtype)
    expected = reference.logsumexp_backward(row_g, x, lse, axis)
    distance = np.where(expected != 0, abs(included - lse.astype(np.float64)), 0)
    check(
        "logsumexp_backward",
        sdpa.logsumexp_backward(row_g, x, lse, axis),
        expected,
        abs(expected) * (distance * u + 8 * u) + 2 * tiny * abs(row_g.astype(np.float64)),
    )


def check_jacobian(weights, axis, temperature):
    expected = reference.softmax_jacobian(weights, axis, temperature=temperature)
    u = unit_roundoff(compute_type(weights.dtype)) + unit_roundoff(np.float64)
    bound = rounded(4 * u * abs(expected), abs(expected), weights.dtype)
    actual = sdpa.softmax_jacobian(weights, axis, temperature=temperature)
    assert actual.dtype == weights.dtype
    assert_within(actual, expected, bound, "softmax_jacobian")


def sample(rng, shape, dtype, std=1.0):
    """x with some -inf, and g."""
    x = normal(rng, shape, dtype, std)
    x[rng.random(shape) < 0.05] = -np.inf
    return x, normal(rng, shape, dtype)


# ------------------------------------------------------------------------------------------ shapes


@pytest.mark.parametrize("n", LENGTHS)
def test_lengths(rng, dtype, n):
    for rows in (1, 5, 40):
        for shape, axis in (((rows, n), 1), ((n, rows), 0)):
            x, g = sample(rng, shape, dtype)
            assert_family(x, g, axis)
            assert_family(x, g, axis, 0.3, rng.random(shape) < 0.6)


@pytest.mark.parametrize("n", LONG)
def test_long_rows(rng, dtype, n):
    for shape, axis in (((3, n), 1), ((n, 20), 0)):
        x, g = sample(rng, shape, dtype, std=3)
        assert_family(x, g, axis)
        assert_family(x, g, axis, 2.5, rng.random(shape) < 0.6)


@pytest.mark.parametrize("n", [65_536, 65_537, 140_000])
def test_rows_of_several_parts(rng, dtype, n):
    """Along rows alone: NumPy's own sums over columns of this length are less precise."""
    x, g = sample(rng, (3, n), dtype, std=3)
    assert_family(x, g)
    assert_family(x, g, -1, 2.5, rng.random(x.shape) < 0.6)


def test_maximum_in_a_later_chunk(dtype):
    """Sums and exponentials under a lower maximum are scaled down, by a little or to nothing."""
    for step in (0.5, 3, 60):
        for length in (CHUNK, 8 * CHUNK):
            x = np.repeat(np.arange(4) * step, length)[:-5].astype(dtype)
            assert_family(x, np.ones_like(x))
            assert_family(x[::-1], np.ones_like(x))


def test_maxima_that_rise_a_little_from_chunk_to_chunk():
    """Factors of chunks do not multiply: the error does not grow with the number of chunks."""
    x = np.repeat(np.arange(256) / 512, CHUNK)
    assert_family(x, np.ones_like(x))


def with_one_chunk(rng, dtype, value):
    """x, whose rows hold `value` in the first, second or last chunk, and g."""
    x, g = sample(rng, (3, 3 * CHUNK - 7), dtype)
    for at in range(3):
        x[at, at * CHUNK : (at + 1) * CHUNK] = value
    return x, g


@pytest.mark.parametrize("value", [-np.inf, -1000, 1000, "least", "largest"])
def test_chunk_that_is_unlike_the_others(rng, dtype, value):
    largest = float(ml_dtypes.finfo(dtype).max)
    assert_family(
        *with_one_chunk(rng, dtype, {"least": -largest, "largest": largest}.get(value, value))
    )


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_infinity_or_nan_in_one_chunk(rng, dtype, value):
    x, _ = with_one_chunk(rng, dtype, value)
    left_out = x == -np.inf
    assert_array_equal(sdpa.softmax(x).astype(float), np.where(left_out, 0, np.nan))
    assert_array_equal(sdpa.log_softmax(x).astype(float), np.where(left_out, -np.inf, np.nan))
    assert_array_equal(sdpa.logsumexp(x).astype(float), np.full(3, value))


@pytest.mark.parametrize("std", [1e-3, 1, 8, 25, 1000])
def test_spread(rng, dtype, std):
    for n in (10, 50, 700):
        x, g = sample(rng, (33, n), dtype, std)
        assert_family(x, g)


@pytest.mark.parametrize("temperature", [1e-3, 0.1, 1 / 3, 1.0, 7.0, 1e4])
def test_temperatures(rng, dtype, temperature):
    x, g = sample(rng, (20, 100), dtype, std=temperature)
    assert_family(x, g, -1, temperature)
    assert_family(x, g, 0, temperature)


@pytest.mark.parametrize("axis", [0, 1, 2, 3, (0, 1), (0, 2), (1, 3), (0, 3), (0, 1, 3), None, ()])
def test_axes(rng, dtype, axis):
    for shape in ((3, 4, 5, 6), (17, 1, 2, 18), (1, 33, 1, 3)):
        x, g = sample(rng, shape, dtype)
        where = rng.random((*shape[1:3], 1)) < 0.7
        assert_family(x, g, axis)
        assert_family(x, g, axis, where=where)


@pytest.mark.parametrize("n", [1, 2, 10, 17, 100])
def test_jacobian(rng, dtype, n):
    for shape, axis in (((n,), 0), ((3, n), 1), ((n, 20), 0), ((2, n, 3), 1)):
        p = sdpa.softmax(rng.standard_normal(shape), axis).astype(dtype)
        check_jacobian(p, axis, 1.0)
        check_jacobian(LAYOUTS["strided"](p), axis, 0.3)


# ------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(rng, dtype, layout):
    for shape in ((20, 10), (7, 70), (40, 600), (3, 5, 33)):
        x, g = sample(rng, shape, dtype)
        where = rng.random(shape) < 0.8
        lay = LAYOUTS[layout]
        for axis in range(len(shape)):
            assert_family(lay(x), g, axis)
            assert_family(x, lay(g), axis, where=lay(where))


def test_broadcast_inputs(rng, dtype):
    for shape in ((20, 10), (20, 200)):
        for axis in (0, 1):
            row = np.broadcast_to(normal(rng, shape[1:], dtype), shape)
            column = np.broadcast_to(normal(rng, (shape[0], 1), dtype), shape)
            where = np.broadcast_to(rng.random(shape[1:]) < 0.5, shape)
            assert_family(row, column, axis)
            assert_family(column, row, axis, where=where)
            assert_family(row, row, axis, where=where[:, :1])


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 100, 513])
@pytest.mark.parametrize("at_end", [True, False])
def test_guard_pages(rng, dtype, n, at_end):
    """Nothing outside an input is read, nothing outside `out` is written."""
    pages = Pages(at_end)
    for shape, axis in (((n,), 0), ((21, n), 1), ((n, 21), 0), ((16, n), 1), ((n, 16), 0)):
        x, g = (guarded(pages, normal(rng, shape, dtype)) for _ in range(2))
        where = guarded(pages, rng.random(shape) < 0.8)
        out = guarded(pages, np.zeros(shape, dtype))
        assert np.array_equal(sdpa.softmax(x, axis, out=out), sdpa.softmax(x.copy(), axis))
        assert np.array_equal(
            sdpa.log_softmax(x, axis, where=where, out=out),
            sdpa.log_softmax(x.copy(), axis, where=where.copy()),
        )
        sums = guarded(pages, np.zeros(x.sum(axis=axis).shape, dtype))
        lse = sdpa.logsumexp(x, axis, out=sums)
        assert np.array_equal(lse, sdpa.logsumexp(x.copy(), axis))
        for f in (sdpa.softmax_backward, sdpa.log_softmax_backward):
            assert np.array_equal(f(g, -abs(x), axis), f(g.copy(), -abs(x.copy()), axis))
        assert np.array_equal(
            sdpa.logsumexp_backward(lse, x, lse, axis),
            sdpa.logsumexp_backward(lse.copy(), x.copy(), lse.copy(), axis),
        )
        if n < 50:
            assert np.array_equal(
                sdpa.softmax_jacobian(x, axis), sdpa.softmax_jacobian(x.copy(), axis)
            )


# --------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("axis", [0, 1, (0, 2), None])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_finite_differences(rng, axis, temperature):
    """Directional derivatives, central differences in float64: error h^2 and rounding / h."""
    x, v, g = (rng.standard_normal((4, 5, 6)) for _ in range(3))
    where = rng.random((4, 5, 6)) < 0.7
    h = 1e-5

    def difference(f):
        y = [np.where(where, f(x + s * h * v), 0) for s in (1, -1)]
        return ((y[0] - y[1]) * g).sum() / (2 * h)

    t = {"temperature": temperature}
    p = sdpa.softmax(x, axis, where=where, **t)
    y = sdpa.log_softmax(x, axis, where=where, **t)
    for f, dx in (
        (sdpa.softmax, sdpa.softmax_backward(g, p, axis, **t)),
        (sdpa.log_softmax, sdpa.log_softmax_backward(g, y, axis, **t)),
    ):
        numeric = difference(lambda z, f=f: f(z, axis, where=where, **t))
        assert abs(numeric - (dx * v).sum()) < 1e-7
    lse = sdpa.logsumexp(x, axis, keepdims=True)
    row = rng.standard_normal(lse.shape)
    up, down = (sdpa.logsumexp(x + s * h * v, axis, keepdims=True) for s in (1, -1))
    numeric = ((up - down) * row).sum() / (2 * h)
    assert abs(numeric - (sdpa.logsumexp_backward(row, x, lse, axis) * v).sum()) < 1e-7


def test_backward_applies_the_jacobian(rng):
    p = sdpa.softmax(rng.standard_normal((7, 9)))
    g = rng.standard_normal((7, 9))
    j = sdpa.softmax_jacobian(p, temperature=0.4)
    expected = np.einsum("ri,rij->rj", g, j)
    assert np.allclose(sdpa.softmax_backward(g, p, temperature=0.4), expected, atol=1e-14)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_pytorch(rng, axis):
    torch = pytest.importorskip("torch")
    for shape in ((3, 4, 5), (20, 70, 3), (2, 9, 300)):
        x, g = rng.standard_normal(shape), rng.standard_normal(shape)
        tx = torch.tensor(x, requires_grad=True)
        for name, ours, backward in (
            ("softmax", sdpa.softmax, sdpa.softmax_backward),
            ("log_softmax", sdpa.log_softmax, sdpa.log_softmax_backward),
        ):
            theirs = getattr(torch, name)(tx, axis)
            y = ours(x, axis)
            assert np.allclose(y, theirs.detach().numpy(), rtol=1e-13, atol=0)
            (dx,) = torch.autograd.grad(theirs, tx, torch.tensor(g))
            assert np.allclose(backward(g, y, axis), dx.numpy(), rtol=1e-12, atol=1e-14)
        theirs = torch.logsumexp(tx, axis)
        lse = sdpa.logsumexp(x, axis)
        assert np.allclose(lse, theirs.detach().numpy(), rtol=1e-14, atol=1e-15)
        row = rng.standard_normal(lse.shape)
        (dx,) = torch.autograd.grad(theirs, tx, torch.tensor(row))
        ours = sdpa.logsumexp_backward(row, x, lse, axis)
        assert np.allclose(ours, dx.numpy(), rtol=1e-12, atol=0)
    jacobian = torch.autograd.functional.jacobian(lambda z: torch.softmax(z, 0), tx[0, :, 0])
    ours = sdpa.softmax_jacobian(sdpa.softmax(x[0, :, 0]))
    assert np.allclose(ours, jacobian.numpy(), rtol=1e-12, atol=1e-16)


# -------------------------------------------------------------------------------------- properties


@st.composite
def calls(draw, dtype):
    """Arguments of assert_family: any shape, layout, axis, temperature, where."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = st.one_of(st.integers(0, 6), st.integers(0, 40), st.sampled_from([64, 130, 600]))
    shape = tuple(draw(st.lists(size, min_size=1, max_size=4)))
    while np.prod(shape, dtype=float) > 50000:
        shape = shape[:-1]
    ndim = len(shape)
    axes = st.lists(st.integers(-ndim, ndim - 1), unique_by=lambda a: a % ndim).map(tuple)
    axis = draw(st.one_of(st.none(), st.integers(-ndim, ndim - 1), axes))
    layouts = sorted(set(LAYOUTS) - ({"rows reversed"} if ndim < 2 else set()))
    lay = LAYOUTS[draw(st.sampled_from(layouts))]
    order = draw(st.permutations(range(ndim)))

    def arrange(a):
        a = np.transpose(np.transpose(a, order).copy(), np.argsort(order))
        return lay(a)

    x, g = sample(rng, shape, dtype, draw(st.sampled_from([1, 1, 8, 100])))
    where = None
    if draw(st.booleans()):
        keep = [n if draw(st.booleans()) else 1 for n in shape[draw(st.integers(0, ndim)) :]]
        where = rng.random(keep) < draw(st.sampled_from([0, 0.1, 0.5, 0.9, 1]))
    temperature = draw(st.one_of(st.just(1.0), st.floats(0.05, 20)))
    return {
        "x": arrange(x),
        "g": arrange(g),
        "axis": axis,
        "temperature": temperature,
        "where": where,
    }


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_anything_agrees_with_the_oracle(dtype, data):
    assert_family(**data.draw(calls(dtype)))


@settings(max_examples=30, deadline=None)
@given(data=st.data(), shift=st.integers(-8, 8))
def test_a_common_shift_changes_softmax_by_rounding_only(dtype, data, shift):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    # Multiples of 1/8 below 16: the shift is exact, and then so is every x - m.
    x = (rng.integers(-64, 64, (5, data.draw(st.integers(1, 300)))) / 8).astype(dtype)
    assert np.array_equal(sdpa.softmax(x), sdpa.softmax((x + dtype.type(shift)).astype(dtype)))
