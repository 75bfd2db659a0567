"""What cosine and bilinear attention refuse: before anything is computed, by name, with shapes."""

import numpy as np
import pytest
from calls import F32, FLOATS, message, ones, operands

import sdpa
from sdpa import _core, scores

COSINE = (sdpa.cosine_attention, sdpa.cosine_attention_forward)
BILINEAR = (sdpa.bilinear_attention, sdpa.bilinear_attention_forward)


def bilinear_operands():
    return operands() | {"query": ones(2, 4, 5, 6), "weight": ones(6, 8)}


# (exception, message, what differs from the operands)
BOTH = {
    "dtypes differ": (
        TypeError,
        "key: expected query's dtype float32, got float64",
        {"key": np.ones((2, 4, 7, 8))},
    ),
    "Lk": (
        ValueError,
        "value: expected (..., 7, 3) to match key's rows 7, got (..., 6, 3)",
        {"value": ones(2, 4, 6, 3)},
    ),
    "heads": (
        ValueError,
        "key: expected leading axes that broadcast with (2, 4), got (2, 3)",
        {"key": ones(2, 3, 7, 8)},
    ),
    "mask shape": (
        ValueError,
        "attn_mask: expected a shape that broadcasts to (2, 4, 5, 7), got (5, 6)",
        {"attn_mask": ones(5, 6)},
    ),
    "integers": (
        TypeError,
        f"query: expected {FLOATS}, got int64",
        {"query": np.ones((2, 4, 5, 8), int), "weight": np.ones((8, 8), int)},
    ),
    "lengths": (
        ValueError,
        "key_lengths: expected integers from 0 to Lk = 7, got 8",
        {"key_lengths": 8},
    ),
    "workers": (
        ValueError,
        "workers: expected None, -1 (all CPUs) or at least 1, got 0",
        {"workers": 0},
    ),
}
COSINE_ONLY = {
    "d_k": (
        ValueError,
        "key: expected (..., 7, 8) to match query's last axis 8, got (..., 7, 6)",
        {"key": ones(2, 4, 7, 6)},
    ),
    "axes": (
        ValueError,
        "query: expected at least two axes, (..., Lq, d_k), got (8,)",
        {"query": ones(8)},
    ),
    "temperature 0": (
        ValueError,
        "temperature: expected a number above 0, got 0",
        {"temperature": 0},
    ),
    "temperature nan": (
        ValueError,
        "temperature: expected a number above 0, got nan",
        {"temperature": np.nan},
    ),
    "temperature so small that 1 / temperature overflows": (
        ValueError,
        "temperature: expected a number above 0, got 1e-320",
        {"temperature": 1e-320},
    ),
    "temperature text": (
        TypeError,
        "temperature: expected a finite number, got 'warm'",
        {"temperature": "warm"},
    ),
    "eps": (ValueError, "eps: expected a number above 0, got -1e-12", {"eps": -1e-12}),
    "eps None": (TypeError, "eps: expected a finite number, got None", {"eps": None}),
}
BILINEAR_ONLY = {
    "weight sizes": (
        ValueError,
        "weight: expected (..., 6, 8) to match query's last axis 6 and key's last axis 8, "
        "got (..., 8, 6)",
        {"weight": ones(8, 6)},
    ),
    "weight axes": (
        ValueError,
        "weight: expected at least two axes, (..., d_q, d_k), got (8,)",
        {"weight": ones(8)},
    ),
    "query axes": (
        ValueError,
        "query: expected at least two axes, (..., Lq, d_q), got (6,)",
        {"query": ones(6)},
    ),
    "key axes": (
        ValueError,
        "key: expected at least two axes, (..., Lk, d_k), got (8,)",
        {"key": ones(8)},
    ),
    "weight heads": (
        ValueError,
        "weight: expected leading axes that broadcast with (2, 4), got (3,)",
        {"weight": ones(3, 6, 8)},
    ),
    "weight dtype": (
        TypeError,
        "weight: expected query's dtype float32, got float16",
        {"weight": ones(6, 8, dtype=np.float16)},
    ),
    "scale": (ValueError, "scale: expected a finite number, got inf", {"scale": np.inf}),
}


@pytest.fixture
def nothing_computed(monkeypatch):
    """What prepares and computes raises if it is reached."""

    def reached(*args, **kwargs):
        raise AssertionError("something was computed")

    for name in ("widen", "forward", "_Unit", "rounded"):
        monkeypatch.setattr(scores, name, reached)
    monkeypatch.setattr(scores._core, "attention_backward", reached)


@pytest.mark.usefixtures("nothing_computed")
class TestRefused:
    @pytest.mark.parametrize("case", BOTH | COSINE_ONLY)
    @pytest.mark.parametrize("function", COSINE)
    def test_cosine(self, function, case):
        exception, text, changed = (BOTH | COSINE_ONLY)[case]
        changed = {name: x for name, x in changed.items() if name != "weight"}
        assert message(exception, function, **operands() | changed) == text

    @pytest.mark.parametrize("case", BOTH | BILINEAR_ONLY)
    @pytest.mark.parametrize("function", BILINEAR)
    def test_bilinear(self, function, case):
        exception, text, changed = (BOTH | BILINEAR_ONLY)[case]
        x = bilinear_operands() | changed
        assert message(exception, function, **x) == text

    @pytest.mark.parametrize("mechanism", ["cosine", "bilinear"])
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
                "needs: 'attn_mask' has a gradient only where it is added to the scores, got None",
                {"needs": ["attn_mask"]},
            ),
            (
                TypeError,
                "needs: expected a sequence of names such as ('query', 'key'), got 'query'",
                {"needs": "query"},
            ),
            (
                ValueError,
                "rng: expected the int of the forward call, since dropout_p is not 0, got None",
                {"dropout_p": 0.5},
            ),
        ],
        ids=["grad_out", "lse", "needs mask", "needs text", "rng"],
    )
    def test_backward(self, mechanism, exception, text, changed):
        x = operands() if mechanism == "cosine" else bilinear_operands()
        saved = {"grad_out": ones(2, 4, 5, 3), "out": ones(2, 4, 5, 3), "lse": ones(2, 4, 5)}
        function = getattr(sdpa, f"{mechanism}_attention_backward")
        got = message(exception, function, **x | saved | changed)
        assert got == text

    @pytest.mark.parametrize("mechanism", ["cosine", "bilinear"])
    def test_unknown_gradient(self, mechanism):
        x = operands() if mechanism == "cosine" else bilinear_operands()
        saved = {"grad_out": ones(2, 4, 5, 3), "out": ones(2, 4, 5, 3), "lse": ones(2, 4, 5)}
        function = getattr(sdpa, f"{mechanism}_attention_backward")
        own = "temperature" if mechanism == "cosine" else "weight"
        assert message(ValueError, function, **x | saved, needs=["wkey"]) == (
            f"needs: expected names among 'query', 'key', 'value', '{own}', 'attn_mask', 'sinks', "
            "got 'wkey'"
        )

    @pytest.mark.parametrize("suffix", ["", "_forward"])
    @pytest.mark.parametrize("option", ["out", "scale", "scope"])
    def test_unknown_option(self, suffix, option):
        name = f"cosine_attention{suffix}"
        text = f"{name}() got an unexpected keyword argument '{option}'"
        assert message(TypeError, getattr(sdpa, name), **operands(), **{option: 1.0}) == text


def test_options_are_those_of_the_table():
    """Of attention_forward without out; cosine attention without scale, which temperature is."""
    table = {name for name, _, _, _, where in _core._options() if where & 4}
    assert set(scores.ScaledOptions.__annotations__) == table - {"out"}
    assert set(scores.AttentionOptions.__annotations__) == table - {"out", "scale"}


def test_whatever_numpy_takes_is_taken():
    x = operands()
    lists = {name: y.astype(np.float64).tolist() for name, y in x.items()}
    expected = sdpa.cosine_attention(**{name: y.astype(np.float64) for name, y in x.items()})
    np.testing.assert_array_equal(sdpa.cosine_attention(**lists), expected)
    buffers = {name: memoryview(y) for name, y in x.items()}
    assert sdpa.cosine_attention(**buffers).dtype == F32
    weight = np.eye(8).tolist()
    np.testing.assert_array_equal(
        sdpa.bilinear_attention(**lists, weight=weight),
        sdpa.attention(*lists.values()),
    )


def test_results_are_named_tuples():
    x = operands()
    saved = sdpa.cosine_attention_forward(**x)
    assert type(saved) is sdpa.AttentionForward
    grads = sdpa.cosine_attention_backward(saved.out, *x.values(), *saved)
    assert type(grads) is sdpa.CosineGradients
    x = bilinear_operands()
    saved = sdpa.bilinear_attention_forward(*x.values())
    assert type(saved) is sdpa.AttentionForward
    grads = sdpa.bilinear_attention_backward(saved.out, *x.values(), *saved)
    assert type(grads) is sdpa.BilinearGradients
