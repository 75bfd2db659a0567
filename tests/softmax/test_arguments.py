"""Calls of the softmax family that do not fit, `out` that overlaps, memory that ends.

tests/refusals lists the arguments that are refused.
"""

import re

import numpy as np
import pytest

import sdpa

X = np.zeros((3, 4), np.float32)
TEMPERED = [sdpa.softmax, sdpa.log_softmax]


def refused(error, *parts):
    """The message holds these parts, in this order."""
    return pytest.raises(error, match=".*".join(map(re.escape, parts)))


@pytest.mark.parametrize("f", TEMPERED)
def test_out_that_overlaps(f):
    x = np.arange(20, dtype=np.float32).reshape(4, 5)
    before = x.copy()
    for view, out in (
        (x, x),
        (x[:3], x[1:]),
        (x[:, :4], x[:, 1:]),
        (x, x[::-1]),
        (x[:4, :4], x[:4, :4].T),
    ):
        with refused(ValueError, "out: ", "overlaps x"):
            f(view, out=out)
    where = x.view(np.uint8).reshape(4, 5, 4)[..., 0].view(bool)
    with refused(ValueError, "out: ", "overlaps where"):
        f(before, where=where, out=x)
    integers = np.zeros((2, 2), np.int64)
    with refused(ValueError, "out: ", "overlaps x"):
        f(integers, out=integers.view(np.float64))
    assert np.array_equal(x, before)


def test_out_of_logsumexp_that_overlaps():
    x = np.zeros((4, 4), np.float32)
    with refused(ValueError, "out: ", "overlaps x"):
        sdpa.logsumexp(x, out=x[0])


def test_calls_that_do_not_fit():
    for call in (
        lambda: sdpa.softmax(),
        lambda: sdpa.softmax(X, -1, 1.0),
        lambda: sdpa.softmax(X, x=X),
        lambda: sdpa.softmax(X, keepdims=True),
        lambda: sdpa.logsumexp(X, temperature=1.0),
        lambda: sdpa.softmax_backward(X),
        lambda: sdpa.softmax_backward(X, X, -1, 1.0),
        lambda: sdpa.logsumexp_backward(X, X),
        lambda: sdpa.softmax_jacobian(X, where=True),
    ):
        with pytest.raises(TypeError):
            call()
    with refused(TypeError, "temprature", "temperature"):
        sdpa.softmax(X, temprature=2.0)


def test_more_axes_than_an_array_can_have():
    with refused(ValueError, "axis: expected each axis once, got more than an array can have"):
        sdpa.softmax(X, axis=(0,) * 70)


def test_no_weights():
    """None, by position or by name, is what is not given."""
    np.testing.assert_array_equal(sdpa.logsumexp(X, b=None), sdpa.logsumexp(X))


@pytest.mark.parametrize("shape", [(10, 300), (300, 400), (2, 70000)])
def test_no_memory(shape):
    """The scratch of a call whose elements have to be staged cannot be allocated."""
    x = np.zeros(shape, np.float16)
    sdpa._core._alloc_fail_after(0)
    try:
        with pytest.raises(MemoryError):
            sdpa.softmax(x)
    finally:
        sdpa._core._alloc_fail_after(-1)
    assert sdpa.softmax(x).shape == shape


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("shape", [(40, 3), (5, 300)])
def test_elements_at_odd_distances(shape, kept, rng):
    """Fields of records of 4 n + 1 bytes: every element is read where it is."""
    last = shape[1] if kept else 1
    record = np.dtype({"names": ["x"], "formats": [("f4", (last,))], "itemsize": 4 * last + 1})
    x = np.zeros(shape[:1] if kept else shape, record)["x"]
    x = x if kept else x[..., 0]
    x[...] = rng.standard_normal(shape)
    assert x.strides[-2 if kept else -1] % 4 == 1
    for axis in 0, 1:
        assert np.array_equal(sdpa.softmax(x, axis=axis), sdpa.softmax(x.copy(), axis=axis))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("order", ["C", "F"])
def test_out_whose_elements_run_backwards(axis, order, rng):
    x = rng.standard_normal((19, 23)).astype(np.float32)
    for dtype in np.float32, np.float16:
        for rows in slice(None), slice(None, None, -1):
            for columns in slice(None), slice(None, None, -1):
                out = np.empty(x.shape, dtype, order)[rows, columns]
                expected = sdpa.softmax(x.astype(dtype), axis=axis)
                assert np.array_equal(sdpa.softmax(x.astype(dtype), axis=axis, out=out), expected)


def test_a_number_keeps_its_dimensions():
    assert sdpa.logsumexp(3.0, keepdims=True) == 3


def test_lse_of_another_type():
    x = np.zeros((2, 4), np.float16)
    lse = np.full(2, np.log(4), np.float32)
    assert sdpa.logsumexp_backward(np.ones(2, np.float16), x, lse).tolist() == [[0.25] * 4] * 2
    with pytest.raises(TypeError, match="dtype float16 of x or float32"):
        sdpa.logsumexp_backward(np.ones(2, np.float16), x, lse.astype(np.float64))
