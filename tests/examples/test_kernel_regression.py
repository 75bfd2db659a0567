"""Sums over a Gaussian kernel, as examples/kernel_regression.py shows them, beside the formula."""

import re

import numpy as np
import pytest
from support.examples import load, run

H = 0.4
CLOSE = {"rtol": 0, "atol": 1e-12}
"""Points within 15 bandwidths of their mean: 2^-53 15^2 is 2.5e-14, and sums have 60 terms."""


@pytest.fixture(scope="module")
def example():
    return load("kernel_regression")


@pytest.fixture
def points(rng):
    """(x, y), far from the origin: whatever is not centred has lost six digits of its distances."""
    return rng.standard_normal((50, 3)) + 1000, rng.standard_normal((60, 3)) + 1000


def kernel(x, y, h=H):
    return np.exp(-((x[:, None] - y) ** 2).sum(axis=-1) / (2 * h**2))


def mean(x, y, values, h=H):
    weights = kernel(x, y, h)
    return weights @ values / weights.sum(axis=1, keepdims=True)


def test_log_density(example, points):
    x, y = points
    expected = np.log(kernel(x, y).sum(axis=1) / len(y) / (H * np.sqrt(2 * np.pi)) ** 3)
    np.testing.assert_allclose(example.log_density(x, y, H), expected, **CLOSE)


def test_log_density_is_that_of_scikit_learn_and_scipy(example, points):
    neighbors = pytest.importorskip("sklearn.neighbors", reason="needs scikit-learn: '.[lab]'")
    stats = pytest.importorskip("scipy.stats")
    x, y = points
    theirs = neighbors.KernelDensity(bandwidth=H, rtol=0, atol=0).fit(y).score_samples(x)
    np.testing.assert_allclose(example.log_density(x, y, H), theirs, rtol=0, atol=1e-10)
    # SciPy takes its bandwidth from the covariance: in its axes all bandwidths are the factor.
    whiten = np.linalg.inv(np.linalg.cholesky(np.cov(y.T))).T
    estimate = stats.gaussian_kde(y.T, bw_method=H)
    got = example.log_density(x @ whiten, y @ whiten, H) + np.linalg.slogdet(whiten)[1]
    np.testing.assert_allclose(got, estimate.logpdf(x.T), rtol=0, atol=1e-10)


def test_smoothing_and_its_gradients(example, points, rng):
    x, y = points
    values, grad_out = rng.standard_normal((60, 2)), rng.standard_normal((50, 2))
    np.testing.assert_allclose(example.smooth(x, y, values, H), mean(x, y, values), **CLOSE)
    arguments = [x, y, values, np.array(H)]
    gradients = example.smooth_backward(grad_out, x, y, values, H)
    for i, (argument, gradient) in enumerate(zip(arguments, gradients, strict=True)):
        assert np.shape(gradient) == argument.shape
        direction = rng.standard_normal(argument.shape)
        step = 1e-5 * direction
        ends = [
            (grad_out * mean(*arguments[:i], argument + sign * step, *arguments[i + 1 :])).sum()
            for sign in (1, -1)
        ]
        # Central differences: step^2 from the third derivative, 2^-53 / step from rounding x.
        assert (gradient * direction).sum() == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-5)


def test_sinkhorn(example, points, rng):
    x, y = points
    a, b = rng.uniform(0.5, 1.5, 50), rng.uniform(0.5, 1.5, 60)
    a, b = a / a.sum(), b / b.sum()
    reg = 2.0
    matrix = kernel(x, y, np.sqrt(reg / 2))
    u = np.ones(50)
    for _ in range(30):
        v = b / (matrix.T @ u)
        u = a / (matrix @ v)
    found = example.sinkhorn(x, y, a, b, reg, 30)
    np.testing.assert_allclose(found[0], np.log(u), rtol=0, atol=1e-10)
    np.testing.assert_allclose(found[1], np.log(v), rtol=0, atol=1e-10)


def test_mean_shift(example, points):
    y = expected = points[1]
    for _ in range(5):
        expected = mean(expected, y, y)
    # A coordinate near 1000 is rounded by 6e-14 in each step, which a ridge between modes enlarges.
    np.testing.assert_allclose(example.mean_shift(y, H, 5), expected, rtol=0, atol=1e-11)


def test_retrieval_lowers_the_energy(example, rng):
    patterns = rng.standard_normal((40, 16))
    states = patterns[:10] + 0.5 * rng.standard_normal((10, 16))
    found, before = example.retrieve(states, patterns, 0.7)
    scores = np.exp(0.7 * states @ patterns.T)
    expected = scores @ patterns / scores.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, **CLOSE)
    energy = (states**2).sum(axis=1) / 2 - np.log(scores.sum(axis=1)) / 0.7
    np.testing.assert_allclose(before, energy, **CLOSE)
    _, after = example.retrieve(found, patterns, 0.7)
    assert (after < before).all()
    twice, last = example.retrieve(states, patterns, 0.7, steps=2)
    np.testing.assert_array_equal(twice, example.retrieve(found, patterns, 0.7)[0])
    np.testing.assert_array_equal(last, after)


def test_e_step(example, points):
    x, y = points
    variance, outliers = 0.3, 0.2
    constant = (2 * np.pi * variance) ** 1.5 * outliers / (1 - outliers) * 60 / 50
    weights = kernel(x, y, np.sqrt(variance))
    weights /= weights.sum(axis=1, keepdims=True) + constant
    expected = weights.sum(axis=0), weights.sum(axis=1), weights.T @ x
    assert 0.2 < weights.sum() / 50 < 0.9  # the constant matters, and does not hide the rest
    for got, wanted in zip(example.e_step(x, y, variance, outliers), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)


def test_what_it_prints():
    out, _ = run("kernel_regression")
    words = ("log density", "smoothing", "Sinkhorn", "mean shift", "Hopfield", "point drift")
    assert [line.partition(":")[0] for line in out.splitlines()] == list(words)
    assert "integrates to 1.000000" in out
    bandwidth, wrong = map(float, re.search(r"becomes ([\d.]+) .* is ([\d.]+) off", out).groups())
    assert 0.05 < bandwidth < 0.3
    assert wrong < 0.1  # a third of the noise
    assert float(re.search(r"misses its weights by (\S+)", out)[1]) < 1e-6
    assert "2000 points end in 3 modes" in out
    assert int(re.search(r"(\d+) of 200 patterns", out)[1]) > 190
    assert float(re.search(r"found as ([\d.]+)", out)[1]) == pytest.approx(0.6, abs=0.02)
