"""sdpa._core._views on tables of DLPack's functions in C that no library has: made by ctypes."""

import ctypes

import numpy as np
import pytest
from support.calls import message

from sdpa import _core

NAME = b"dlpack_exchange_api"
FLOAT, BOOL, COMPLEX = 2, 6, 5


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Functions(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("others", ctypes.c_void_p * 4),
        ("look", ctypes.c_void_p),
    )


LOOK = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Tensor))
ctypes.pythonapi.PyCapsule_New.restype = ctypes.py_object


@LOOK
def look(made, to):
    to[0] = made.tensor
    return 0


def object_with(tensor=None, function=look, version=1):
    """An object whose type has a table with this function, which tells of this tensor."""
    function = ctypes.cast(function, ctypes.c_void_p)
    table = Functions(version=(version, 0), look=function)
    capsule = ctypes.pythonapi.PyCapsule_New(ctypes.byref(table), NAME, None)
    return type(
        "Made", (), {"tensor": tensor, "table": table, "__dlpack_c_exchange_api__": capsule}
    )()


def tensor(x, **changes):
    """What DLPack tells of a contiguous array, without strides."""
    shape = (ctypes.c_int64 * x.ndim)(*x.shape)
    bits = 8 * x.itemsize
    known = {"data": x.ctypes.data, "device": (1, 0), "ndim": x.ndim, "code": FLOAT, "bits": bits}
    return Tensor(**known | {"lanes": 1, "shape": shape} | changes)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_tensor_without_strides_is_contiguous(dtype):
    x = np.arange(12, dtype=dtype).reshape(3, 4)
    (found,) = _core._views(object_with(tensor(x)))
    np.testing.assert_array_equal(found, x)
    assert found.dtype == x.dtype
    assert np.shares_memory(found, x)


X = np.ones((3, 4), np.float32)
REFUSED = {
    "type": ({"code": COMPLEX, "bits": 64}, "code 5 of 64 bits on 1"),
    "lanes": ({"lanes": 2}, "code 2 of 32 bits on 1"),
    "bits": ({"bits": 128}, "code 2 of 128 bits on 1"),
    "bits of a bool": ({"code": BOOL, "bits": 1}, "code 6 of 1 bits on 1"),
    "device": ({"device": (2, 0)}, "code 2 of 32 bits on 2"),
    "axes": ({"ndim": 1000}, "code 2 of 32 bits on 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_tensors_are_refused(case):
    changes, text = REFUSED[case]
    said = message(BufferError, _core._views, object_with(tensor(X, **changes)))
    assert said == f"expected floating numbers or bools on the CPU, got {text}"


@pytest.mark.parametrize(("version", "function"), [(2, look), (1, None)])
def test_other_tables_are_refused(version, function):
    said = message(BufferError, _core._views, object_with(function=function, version=version))
    assert said == f"expected version 1 of DLPack with views, got version {version}"


def test_what_fails_raises():
    """A function of the table, here one that asks for the truth of its object; NumPy."""
    made = object_with(function=ctypes.pythonapi.PyObject_IsTrue)
    type(made).__bool__ = lambda self: 1 / 0
    message(ZeroDivisionError, _core._views, made)
    shape = (ctypes.c_int64 * 2)(-3, 4)
    message(ValueError, _core._views, object_with(tensor(X, shape=shape)))
