"""The stand-in for AMX beside the tiles: `SDPA_STAND_INS=-march=x86-64-v4 make build`."""

import ml_dtypes
import numpy as np
import pytest

import sdpa


@pytest.mark.parametrize("broken", [None, "query", "key", "value"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_the_stand_in_has_the_same_bits(dtype, rng, causal, broken):
    x = rng.standard_normal((3, 2, 200, 72)).astype(dtype)
    if broken:
        x[["query", "key", "value"].index(broken), 0, 5, :2] = np.inf, np.nan
    results = {}
    for name in "amx", "amx_model":
        previous = sdpa._core._use_isa(name)
        saved = sdpa.attention_forward(*x, is_causal=causal)
        gradients = sdpa.attention_backward(x[2], *x, *saved, is_causal=causal)
        statistics = sdpa.attention_statistics(*x[:2], is_causal=causal)
        tangents = sdpa.attention_jvp(*x, *x[::-1], is_causal=causal)
        second = sdpa.attention_double_backward(*x[::-1], x[2], *x, *saved, is_causal=causal)
        second = [y for y in second if y is not None]
        results[name] = [*saved, *gradients[:3], *statistics, *tangents, *second]
        sdpa._core._use_isa(previous)
    for a, b in zip(results["amx"], results["amx_model"], strict=True):
        assert a.tobytes() == b.tobytes()
