"""sdpa._core._views: arrays on the memory of tensors, by DLPack's functions in C."""

import gc
import sys
import warnings
import weakref

import numpy as np
import pytest
from support.calls import message

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[peers]'")

import torch.nn.functional as F

from sdpa import _core
from sdpa.interop.torch import install

pytestmark = pytest.mark.usefixtures("torch_itself")

X = torch.randn(3, 4)
TENSORS = {
    "matrix": X,
    "turned": X.T,
    "part": torch.arange(10.0)[2::3],
    "expanded": X[:1].expand(5, 4),
    "number": torch.tensor(2.0),
    "empty": torch.zeros(0, 3),
    "float64": X.double(),
    "float16": X.half(),
    "bool": X > 0,
}


@pytest.mark.parametrize("name", TENSORS)
def test_the_same_as_numpys(name):
    x = TENSORS[name]
    (found,) = _core._views(x)
    expected = x.numpy()
    assert np.array_equal(found, expected)
    assert (found.dtype, found.strides) == (expected.dtype, expected.strides)
    assert str(found.flags) == str(expected.flags) or name == "empty"  # it has memory of its own
    assert np.shares_memory(found, expected) or name == "empty"


def test_tensors_that_need_gradients():
    x, y = X.clone().requires_grad_(), torch.nn.Parameter(X.clone())
    for tensor, found in zip((x, y, x), _core._views(x, y, x), strict=True):
        assert np.array_equal(found, X.numpy())
        found[0, 0] = 5
        assert tensor[0, 0] == 5
        found[0, 0] = X[0, 0]
    assert _core._views() == ()


def test_a_view_keeps_the_memory():
    x = torch.full((1000,), 3.0)
    count, gone = sys.getrefcount(x), weakref.ref(x)
    (found,) = _core._views(x)
    assert sys.getrefcount(x) == count + 1
    del x
    gc.collect()
    assert gone() is not None
    assert (found == 3).all()
    del found
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("dtype", ["bfloat16", "int32", "complex64", "uint8"])
def test_other_types_are_refused(dtype):
    x = torch.ones(2, dtype=getattr(torch, dtype))
    said = message(BufferError, _core._views, X, x)
    assert said.startswith("expected floating numbers or bools on the CPU, got code ")


def test_objects_without_these_functions_are_refused():
    assert "__dlpack_c_exchange_api__" in message(AttributeError, _core._views, X, 3)

    class Other:
        __dlpack_c_exchange_api__ = 1

    message(ValueError, _core._views, Other())


def test_a_negative_view_is_computed_before_the_kernel():
    """Its memory holds the opposite, of which DLPack tells nothing."""
    x = torch.randn(3, 1, 2, 5, 8)
    q, k, v = x.unbind()
    expected = F.scaled_dot_product_attention(-q, k, v)
    with install():
        found = F.scaled_dot_product_attention(torch._neg_view(q), k, v)
    torch.testing.assert_close(found, expected)
