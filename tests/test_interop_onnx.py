"""ONNX's own backend suite, unchanged, run through sdpa.interop.onnx."""

import re
import warnings

import numpy as np
import pytest

pytest.importorskip("onnx", reason="needs onnx: pip install 'sdpa[peers]'")

from onnx import helper
from onnx.backend.test import BackendTest

import sdpa
from sdpa.interop.onnx import Backend

BASE_CASE = re.compile(r"^test_(attention|softmax|logsoftmax)_(?!.*_expanded).*_cpu$")
COUNTS = {"attention": 93, "softmax": 7, "logsoftmax": 7}

with warnings.catch_warnings():
    # The suite computes the expected values of every operator as it loads.
    warnings.simplefilter("ignore")
    _suite = BackendTest(Backend, __name__).include(BASE_CASE.pattern)
    TestConformance = _suite.test_cases["OnnxBackendNodeModelTest"]

# The suite marks what was not asked for as skipped; here it does not appear at all.
for _name in [name for name in vars(TestConformance) if name.startswith("test_")]:
    if not BASE_CASE.match(_name):
        delattr(TestConformance, _name)


def test_every_base_case_is_there():
    found = [m[1] for m in map(BASE_CASE.match, vars(TestConformance)) if m]
    assert {name: found.count(name) for name in COUNTS} == COUNTS


def test_softmax_before_opset_13_normalises_from_the_axis_on(rng):
    x = rng.standard_normal((2, 3, 4)).astype(np.float32)
    node = helper.make_node("Softmax", ["x"], ["y"], axis=1)
    (y,) = Backend.run_node(node, [x], opset_version=11)
    np.testing.assert_array_equal(y, sdpa.softmax(x, axis=(1, 2)))


def test_integer_mask_is_refused(rng):
    q = rng.standard_normal((1, 1, 2, 4)).astype(np.float32)
    node = helper.make_node("Attention", ["q", "k", "v", "m"], ["y"])
    with pytest.raises(TypeError, match="attn_mask"):
        Backend.run_node(node, [q, q, q, np.ones((2, 2), np.int64)])


def test_other_operators_are_refused():
    node = helper.make_node("Relu", ["x"], ["y"])
    with pytest.raises(NotImplementedError, match="Relu"):
        Backend.run_node(node, [np.zeros(3, np.float32)])
