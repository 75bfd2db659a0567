"""Attention from files to files, and on labelled arrays, as the programs in examples/ show them."""

import re

import numpy as np
import pytest
from support.examples import load, run

import sdpa


def test_results_are_those_of_one_call(tmp_path, monkeypatch):
    pytest.importorskip("zarr", reason="needs zarr: pip install '.[dask]'")
    example = load("long_context")
    monkeypatch.setattr(example, "ROWS", 700)
    monkeypatch.setattr(example, "BLOCK", 250)
    stores = example.written(tmp_path, 2000)
    example.attend(stores)
    query, key, value = (stores[name][...] for name in ("query", "key", "value"))
    expected = sdpa.attention(query, key, value, is_causal=True)
    np.testing.assert_allclose(stores["out"][...], expected, rtol=0, atol=1e-6)
    assert example.error(stores, 1999) < 1e-6
    stores["out"][1999] += 1
    assert example.error(stores, 1999) > 0.9


@pytest.mark.uninstrumented
def test_what_long_context_prints(tmp_path):
    pytest.importorskip("zarr", reason="needs zarr: pip install '.[dask]'")
    out, err = run("long_context", "--tokens", 10000, "--folder", tmp_path)
    tokens, peak, before = map(
        int, re.search(r"^(\d+) tokens.*; (\d+) MB.* (\d+) before", out).groups()
    )
    assert tokens == 10000
    assert before < peak < 300
    errors = [float(e) for e in re.findall(r"^query \d+: error (\S+) beside float64$", out, re.M)]
    assert len(errors) == 3
    assert max(errors) < 1e-6
    assert "2/2" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_forecasts_from_similar_days():
    pytest.importorskip("xarray", reason="needs xarray: pip install '.[peers]'")
    pytest.importorskip("dask", reason="needs dask: pip install '.[dask]'")
    out, _ = run("analogues")
    assert "from chunks of two stations the same bits: True" in out
    analogues, before = map(float, re.findall(r"([\d.]+) degrees off", out))
    assert 2.0 < analogues < before  # the noise of a day is 2 degrees


def test_a_forecast_is_a_weighted_mean_of_the_past():
    example = load("analogues")
    rng = np.random.default_rng(0)
    key, value = rng.standard_normal((2, 20, 3)), rng.standard_normal((2, 20, 1))
    got = example.attend(key, key, value)
    assert not got[:, 0].any()  # without a past
    for station in range(2):
        for day in range(1, 20):
            distance = ((key[station, :day] - key[station, day]) ** 2).sum(axis=-1)
            weights = np.exp(-distance / (2 * example.WIDTH**2))
            expected = weights @ value[station, :day, 0] / weights.sum()
            assert abs(got[station, day] - expected) < 1e-12
