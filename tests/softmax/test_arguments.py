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
