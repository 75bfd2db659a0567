"""Every argument of the softmax family that is refused: the exception, and that it says which."""

import re

import numpy as np
import pytest
from helpers import BFLOAT16

import sdpa

X = np.zeros((3, 4), np.float32)
FORWARD = [sdpa.softmax, sdpa.log_softmax, sdpa.logsumexp]
TEMPERED = [sdpa.softmax, sdpa.log_softmax]
BACKWARD = [sdpa.softmax_backward, sdpa.log_softmax_backward]


def refused(error, *parts):
    """The message holds these parts, in this order."""
    return pytest.raises(error, match=".*".join(map(re.escape, parts)))


def every(axis):
    """Each routine, as a function of x alone."""
    return {
        "softmax": lambda x: sdpa.softmax(x, axis),
        "log_softmax": lambda x: sdpa.log_softmax(x, axis),
        "logsumexp": lambda x: sdpa.logsumexp(x, axis),
        "softmax_backward": lambda x: sdpa.softmax_backward(X, x, axis),
        "log_softmax_backward": lambda x: sdpa.log_softmax_backward(X, x, axis),
        "logsumexp_backward": lambda x: sdpa.logsumexp_backward(X[:, 0], x, X[:, 0], axis),
        "softmax_jacobian": lambda x: sdpa.softmax_jacobian(x, axis),
    }


NAMES = {
    "softmax_backward": "weights",
    "log_softmax_backward": "log_weights",
    "softmax_jacobian": "weights",
}


@pytest.mark.parametrize("name", every(-1))
@pytest.mark.parametrize(
    "dtype", [np.longdouble, np.complex64, np.complex128, object, "M8[s]", "U3", "V4"]
)
def test_dtype(name, dtype):
    with refused(TypeError, NAMES.get(name, "x") + ": expected float16", "got"):
        every(-1)[name](np.zeros((3, 4), dtype))


@pytest.mark.parametrize("name", every(-1))
def test_what_is_no_array(name):
    with refused(TypeError, NAMES.get(name, "x") + ": "):
        every(-1)[name](object())
    with refused(TypeError, NAMES.get(name, "x") + ": "):
        every(-1)[name]([[1.0], [1.0, 2.0]])


@pytest.mark.parametrize("name", every(-1))
def test_axis(name):
    for axis in (2, -3, 2**70, (0, 2)):
        with refused(ValueError, "axis: expected -2 to 1", "(3, 4)", "got"):
            every(axis)[name](X)
    for axis in ((0, 0), (1, -1)):
        with refused(ValueError, "axis: expected each axis once"):
            every(axis)[name](X)
    for axis in (1.0, "0", [0], (0.5,), object()):
        with refused(TypeError, "axis: expected an integer"):
            every(axis)[name](X)


def test_axis_of_a_scalar():
    for axis in (1, -2, (0, 0)):
        with refused(ValueError, "axis: "):
            sdpa.softmax(1.0, axis)


@pytest.mark.parametrize("temperature", [0, 0.0, -1.0, np.nan, np.inf, -np.inf, 10**400])
def test_temperature(temperature):
    for f in TEMPERED:
        with refused(ValueError, "temperature: expected"):
            f(X, temperature=temperature)
    for f in BACKWARD:
        with refused(ValueError, "temperature: expected"):
            f(X, X, temperature=temperature)
    with refused(ValueError, "temperature: expected"):
        sdpa.softmax_jacobian(X, temperature=temperature)


@pytest.mark.parametrize("temperature", ["1", None, [1.0, 2.0], 1j])
def test_temperature_that_is_no_number(temperature):
    with refused(TypeError, "temperature: expected"):
        sdpa.softmax(X, temperature=temperature)


@pytest.mark.parametrize("f", FORWARD)
def test_where(f):
    for where in (np.ones((3, 4), int), np.ones((3, 4), np.float32), 1, [0, 1, 0, 1], "yes"):
        with refused(TypeError, "where: expected bool"):
            f(X, where=where)
    for shape in ((3,), (4, 3), (2, 4), (1, 3, 4), (0,), (5, 3, 4)):
        with refused(ValueError, "where: expected a shape that broadcasts to (3, 4)", str(shape)):
            f(X, where=np.ones(shape, bool))
    with refused(ValueError, "where: ", "(2,)"):
        f(np.zeros((3, 1)), where=np.ones(2, bool))


@pytest.mark.parametrize("keepdims", [1, 0, None, "yes", np.ones(1, bool)])
def test_keepdims(keepdims):
    with refused(TypeError, "keepdims: expected True or False"):
        sdpa.logsumexp(X, keepdims=keepdims)


@pytest.mark.parametrize("f", FORWARD)
def test_out(f):
    shape = (3,) if f is sdpa.logsumexp else (3, 4)
    with refused(TypeError, "out: expected a numpy.ndarray"):
        f(X, out=[0.0])
    for wrong in ((4, 3), (3, 5), (3, 4, 1), (1, 3, 4), (), (1,)):
        with refused(ValueError, "out: expected shape", str(shape), str(wrong)):
            f(X, out=np.empty(wrong, np.float32))
    for dtype in (np.float64, np.float16, BFLOAT16, np.int32, ">f4"):
        with refused(ValueError, "out: expected dtype float32"):
            f(X, out=np.empty(shape, dtype))
    out = np.empty(shape, np.float32)
    out.flags.writeable = False
    with refused(ValueError, "out: ", "read-only"):
        f(X, out=out)
    with refused(ValueError, "out: ", "unaligned"):
        f(X, out=np.ndarray(shape, np.float32, np.zeros(49, np.uint8)[1:]))
    repeated = np.lib.stride_tricks.as_strided(np.zeros(12, np.float32), shape, (0,) * len(shape))
    with refused(ValueError, "out: ", "share memory"):
        f(X, out=repeated)
    if f is not sdpa.logsumexp:
        with refused(ValueError, "out: expected dtype float64"):
            f(np.zeros((3, 4), int), out=np.empty((3, 4), int))


def test_out_of_keepdims():
    with refused(ValueError, "out: expected shape (3, 1), got (3,)"):
        sdpa.logsumexp(X, keepdims=True, out=np.empty(3, np.float32))


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


@pytest.mark.parametrize("f", BACKWARD)
def test_grad(f):
    for shape in ((4, 3), (4,), (1, 4), (3, 4, 1), ()):
        with refused(ValueError, "grad: expected shape (3, 4)", str(shape)):
            f(np.zeros(shape, np.float32), X)
    for dtype in (np.float64, np.float16, BFLOAT16, int):
        with refused(TypeError, "grad: expected dtype float32"):
            f(np.zeros((3, 4), dtype), X)
    with refused(TypeError, "grad: expected float16"):
        f(np.zeros((3, 4), complex), X)


def test_rows_of_logsumexp_backward():
    row = np.zeros(3, np.float32)
    for shape in ((4,), (3, 4), (1, 3), (), (3, 1, 1)):
        wrong = np.zeros(shape, np.float32)
        with refused(ValueError, "grad: expected shape (3,) or (3, 1)", str(shape)):
            sdpa.logsumexp_backward(wrong, X, row)
        with refused(ValueError, "lse: expected shape (3,) or (3, 1)", str(shape)):
            sdpa.logsumexp_backward(row, X, wrong)
    for dtype in (np.float64, np.float16):
        with refused(TypeError, "grad: expected dtype float32"):
            sdpa.logsumexp_backward(row.astype(dtype), X, row)
        with refused(TypeError, "lse: expected dtype float32"):
            sdpa.logsumexp_backward(row, X, row.astype(dtype))
    with refused(TypeError, "lse: expected float16"):
        sdpa.logsumexp_backward(row, X, row.astype(complex))
    half = X.astype(np.float16)
    assert sdpa.logsumexp_backward(row, half, row).dtype == np.float16
    with refused(TypeError, "grad: expected dtype float16 of x or float32, got float64"):
        sdpa.logsumexp_backward(row.astype(float), half, row)


def test_jacobian_of_too_many_axes():
    with refused(ValueError, "axis: expected a Jacobian of at most 64 axes, got 80"):
        sdpa.softmax_jacobian(np.zeros((1,) * 40), None)


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


def test_nothing_is_written_when_refused():
    out = np.full((3, 4), 7, np.float32)
    for bad in ({"axis": 5}, {"temperature": 0}, {"where": np.ones(3, bool)}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            sdpa.softmax(X, out=out, **bad)
    assert np.all(out == 7)


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
