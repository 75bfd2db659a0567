"""What shaw_attention refuses: the type of the exception, its message, and nothing computed."""

import numpy as np
import pytest
from calls import message, ones, operands

import sdpa
from sdpa import _relative

REL = {"rel_key": ones(9, 8), "rel_value": ones(9, 3)}
REFUSED = {
    "dtypes differ": (
        TypeError,
        "key: expected query's dtype float32, got float64",
        {"key": np.ones((2, 4, 7, 8))},
    ),
    "query axes": (
        ValueError,
        "query: expected at least two axes, (..., Lq, d_k), got (8,)",
        {"query": ones(8)},
    ),
    "d_k": (
        ValueError,
        "key: expected (..., 7, 8) to match query's last axis 8, got (..., 7, 6)",
        {"key": ones(2, 4, 7, 6), "rel_key": ones(9, 6)},
    ),
    "rel_key of another width": (
        ValueError,
        "rel_key: expected (2 D + 1, 8) or (heads, 2 D + 1, 8), got (9, 6)",
        {"rel_key": ones(9, 6)},
    ),
    "rel_key of an even number of rows": (
        ValueError,
        "rel_key: expected (2 D + 1, 8) or (heads, 2 D + 1, 8), got (8, 8)",
        {"rel_key": ones(8, 8)},
    ),
    "rel_key of four axes": (
        ValueError,
        "rel_key: expected (2 D + 1, 8) or (heads, 2 D + 1, 8), got (1, 1, 9, 8)",
        {"rel_key": ones(1, 1, 9, 8)},
    ),
    "rel_key of other heads": (
        ValueError,
        "rel_key: expected key's number of heads, 4, got (3, 9, 8)",
        {"rel_key": ones(3, 9, 8)},
    ),
    "rel_key of another dtype": (
        TypeError,
        "rel_key: expected query's dtype float32, got float64",
        {"rel_key": np.ones((9, 8))},
    ),
    "rel_value of another width": (
        ValueError,
        "rel_value: expected (2 D + 1, 3) or (heads, 2 D + 1, 3), got (9, 8)",
        {"rel_value": ones(9, 8)},
    ),
    "rel_value of other rows": (
        ValueError,
        "rel_value: expected 9 rows as rel_key, got (7, 3)",
        {"rel_value": ones(7, 3)},
    ),
    "rel_value of other heads": (
        ValueError,
        "rel_value: expected value's number of heads, 4, got (2, 9, 3)",
        {"rel_value": ones(2, 9, 3)},
    ),
    "query_offset": (
        TypeError,
        "query_offset: expected one integer, got [0, 1]",
        {"query_offset": [0, 1]},
    ),
    "two offsets": (
        ValueError,
        "query_offset: expected None with is_causal='lower_right', which sets the offset itself",
        {"query_offset": 1, "is_causal": "lower_right"},
    ),
    "mask": (
        ValueError,
        "attn_mask: expected a shape that broadcasts to (2, 4, 5, 7), got (5, 6)",
        {"attn_mask": ones(5, 6)},
    ),
    "mask of integers": (
        TypeError,
        "attn_mask: expected bool (True = attend) or, to be added to the scores, float32, "
        "got int64; write attn_mask != 0 for a mask of ones and zeros, "
        "attn_mask.astype(query.dtype) for a bias",
        {"attn_mask": np.ones((5, 7), int)},
    ),
    "workers": (
        ValueError,
        "workers: expected None, -1 (all CPUs) or at least 1, got 0",
        {"workers": 0},
    ),
}


@pytest.fixture
def nothing_computed(monkeypatch):
    """What prepares and computes raises if it is reached."""

    def reached(*args, **kwargs):
        raise AssertionError("something was computed")

    for name in ("widen", "widened_options"):
        monkeypatch.setattr(_relative, name, reached)
    for name in ("attention_forward", "attention_backward"):
        monkeypatch.setattr(_relative._core, name, reached)


@pytest.mark.usefixtures("nothing_computed")
class TestRefused:
    @pytest.mark.parametrize("case", REFUSED)
    def test_arguments(self, case):
        exception, text, changed = REFUSED[case]
        x = operands() | REL | changed
        saved = {"grad_out": ones(2, 4, 5, 3), "out": ones(2, 4, 5, 3), "lse": ones(2, 4, 5)}
        for function in (sdpa.shaw_attention, sdpa.shaw_attention_forward):
            assert message(exception, function, **x) == text
        assert message(exception, sdpa.shaw_attention_backward, **x, **saved) == text

    @pytest.mark.parametrize("option", ["out", "temperature"])
    def test_options_that_are_not_taken(self, option):
        for name in ("shaw_attention", "shaw_attention_forward"):
            got = message(TypeError, getattr(sdpa, name), **operands(), **REL, **{option: 1})
            assert got == f"{name}() got an unexpected keyword argument '{option}'"

    @pytest.mark.parametrize(
        ("exception", "text", "changed"),
        [
            (
                ValueError,
                "grad_out: expected (2, 4, 5, 3), got (2, 4, 5, 2)",
                {"grad_out": ones(2, 4, 5, 2)},
            ),
            (TypeError, "lse: expected float32, got float64", {"lse": np.ones((2, 4, 5))}),
            (
                ValueError,
                "needs: 'rel_value' has a gradient only where it is given, got None",
                {"rel_value": None, "needs": ["rel_value"]},
            ),
            (
                ValueError,
                "needs: 'attn_mask' has a gradient only where it is added to the scores, got None",
                {"needs": ["attn_mask"]},
            ),
        ],
        ids=["grad_out", "lse", "rel_value", "attn_mask"],
    )
    def test_backward(self, exception, text, changed):
        saved = {"grad_out": ones(2, 4, 5, 3), "out": ones(2, 4, 5, 3), "lse": ones(2, 4, 5)}
        x = operands() | REL | saved | changed
        assert message(exception, sdpa.shaw_attention_backward, **x) == text
