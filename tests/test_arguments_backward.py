"""What backward, weights and merge refuse of their own: one test per input, message included."""

import gc
import sys

import numpy as np
import pytest
from calls import FLOATS, backward_operands, message, ones, operands
from helpers import BFLOAT16, compute_type

import sdpa

REFUSED_BACKWARD = {
    "grad_out shape": (
        ValueError,
        "grad_out: expected (2, 4, 5, 3), got (4, 5, 3)",
        {"grad_out": ones(4, 5, 3)},
    ),
    "grad_out dtype": (
        TypeError,
        "grad_out: expected float32, got float64",
        {"grad_out": ones(2, 4, 5, 3, dtype=float)},
    ),
    "out shape": (
        ValueError,
        "out: expected (2, 4, 5, 3), got (2, 4, 5, 8)",
        {"out": ones(2, 4, 5, 8)},
    ),
    "out dtype": (
        TypeError,
        "out: expected float32, got int64",
        {"out": ones(2, 4, 5, 3, dtype=np.int64)},
    ),
    "lse shape": (
        ValueError,
        "lse: expected (2, 4, 5), got (2, 4, 5, 1)",
        {"lse": ones(2, 4, 5, 1)},
    ),
    "lse dtype": (
        TypeError,
        "lse: expected float32, got float64",
        {"lse": ones(2, 4, 5, dtype=float)},
    ),
    "grad_lse shape": (
        ValueError,
        "grad_lse: expected (2, 4, 5), got (5,)",
        {"grad_lse": ones(5)},
    ),
    "grad_lse dtype": (
        TypeError,
        "grad_lse: expected float32, got float16",
        {"grad_lse": ones(2, 4, 5, dtype=np.float16)},
    ),
    "needs": (
        ValueError,
        "needs: expected names among 'query', 'key', 'value', 'attn_mask', 'sinks', got 'bias'",
        {"needs": ["query", "bias"]},
    ),
    "needs sinks": (
        ValueError,
        "needs: 'sinks' has a gradient only where sinks are given, got None",
        {"needs": ["sinks"]},
    ),
    "needs text": (
        TypeError,
        "needs: expected a sequence of names such as ('query', 'key'), got 'query'",
        {"needs": "query"},
    ),
    "needs None": (
        TypeError,
        "needs: expected a sequence of names such as ('query', 'key'), got None",
        {"needs": None},
    ),
    "needs no mask": (
        ValueError,
        "needs: 'attn_mask' has a gradient only where it is added to the scores, got None",
        {"needs": ["attn_mask"]},
    ),
    "needs boolean mask": (
        ValueError,
        "needs: 'attn_mask' has a gradient only where it is added to the scores, got a boolean one",
        {"needs": ["attn_mask"], "attn_mask": ones(5, 7, dtype=bool)},
    ),
}


@pytest.mark.parametrize("case", REFUSED_BACKWARD)
def test_refused_by_backward(case):
    exception, expected, differences = REFUSED_BACKWARD[case]
    x = backward_operands() | differences
    assert message(exception, sdpa.attention_backward, **x) == expected


def test_lse_dtype_follows_the_operands():
    for dtype in (np.float16, BFLOAT16, np.float64):
        x = {name: a.astype(dtype) for name, a in operands().items()}
        out, lse = sdpa.attention_forward(**x)
        assert out.dtype == dtype
        assert lse.dtype == compute_type(dtype)
        wrong = np.float32 if dtype == np.float64 else np.float64
        expected = f"lse: expected {lse.dtype}, got {np.dtype(wrong)}"
        call = (out, *x.values(), out, lse.astype(wrong))
        assert message(TypeError, sdpa.attention_backward, *call) == expected


def test_needs():
    x = backward_operands() | {"attn_mask": ones(4, 1, 7)}
    full = sdpa.attention_backward(**x, needs=("query", "key", "value", "attn_mask"))
    assert full._fields == ("query", "key", "value", "attn_mask", "sinks")
    assert full.sinks is None
    for name in ("query", "key", "value", "attn_mask"):
        assert getattr(full, name).shape == x[name].shape
        alone = sdpa.attention_backward(**x, needs=iter([name, name]))
        np.testing.assert_array_equal(getattr(alone, name), getattr(full, name))
        assert all(getattr(alone, other) is None for other in full._fields if other != name)
    assert sdpa.attention_backward(**x, needs=()) == (None,) * 5
    assert sdpa.attention_backward(**x).attn_mask is None


def test_refused_by_weights():
    x = {"query": ones(5, 8), "key": ones(7, 8)}
    stages = "stage: expected 'scores', 'capped', 'biased' or 'weights', got "
    assert message(ValueError, sdpa.attention_weights, **x, stage="p") == stages + "'p'"
    assert message(TypeError, sdpa.attention_weights, **x, stage=3) == stages + "3"
    got = message(TypeError, sdpa.attention_weights, **x, value=ones(7, 3))
    assert got.startswith("attention_weights() got an unknown argument 'value'")
    got = message(TypeError, sdpa.attention_weights, **x, out=ones(5, 7))
    assert got.startswith("attention_weights() got an unknown argument 'out'")


REFUSED_MERGE = {
    "number": (
        TypeError,
        "outs: expected a sequence of arrays, got 3",
        (3, [ones(5)]),
    ),
    "none": (ValueError, "outs: expected at least one part, got none", ([], [])),
    "counts": (
        ValueError,
        "lses: expected as many parts as outs, 1, got 2",
        ([ones(5, 3)], [ones(5), ones(5)]),
    ),
    "axes": (
        ValueError,
        "outs[0]: expected at least two axes, (..., Lq, d_v), got (5,)",
        ([ones(5)], [ones(5)]),
    ),
    "out dtype": (
        TypeError,
        f"outs[0]: expected {FLOATS}, got int64",
        ([ones(5, 3, dtype=np.int64)], [ones(5)]),
    ),
    "out dtypes": (
        TypeError,
        "outs[1]: expected float32, got float64",
        ([ones(5, 3), ones(5, 3, dtype=float)], [ones(5), ones(5)]),
    ),
    "out shapes": (
        ValueError,
        "outs[1]: expected (5, 3) to match outs[0], got (5, 4)",
        ([ones(5, 3), ones(5, 4)], [ones(5), ones(5)]),
    ),
    "lse dtype": (
        TypeError,
        "lses[0]: expected float32, got float64",
        ([ones(5, 3)], [ones(5, dtype=float)]),
    ),
    "lse shape": (
        ValueError,
        "lses[1]: expected (2, 5) to match outs[0], got (5,)",
        ([ones(2, 5, 3)] * 2, [ones(2, 5), ones(5)]),
    ),
}


@pytest.mark.parametrize("case", REFUSED_MERGE)
def test_refused_by_merge(case):
    exception, expected, args = REFUSED_MERGE[case]
    assert message(exception, sdpa.merge_attention, *args) == expected


def test_references():
    x = backward_operands() | {"attn_mask": None}

    def count():
        gc.collect()  # exceptions and the frames in their tracebacks refer to one another
        return {name: sys.getrefcount(value) for name, value in x.items() if name != "attn_mask"}

    before = count()
    for _ in range(3):
        sdpa.attention_backward(**x)
    for exception, _, differences in REFUSED_BACKWARD.values():
        message(exception, sdpa.attention_backward, **(x | differences))
    assert count() == before
