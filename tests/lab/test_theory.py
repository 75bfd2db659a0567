"""The laboratory's closed forms against other derivations and against random draws."""

import math

import numpy as np
import pytest

import sdpa
from sdpa_lab import theory
from sdpa_lab.experiments.gradients import log_gradients


@pytest.mark.parametrize("sigma", [0.0, 0.3, 1.0, 5.0, 25.0])
def test_one_key_holds_everything(sigma):
    law = theory.weights(1, sigma)
    assert law.log_z == pytest.approx(0, abs=1e-9)
    assert law.entropy == pytest.approx(0, abs=1e-6)
    assert law.max_weight == 1
    assert law.sum_p2 == pytest.approx(1, abs=1e-9)
    assert law.jacobian == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("n", [2, 10, 1000])
def test_equal_scores(n):
    law = theory.weights(n, 0.0)
    assert law.log_z == pytest.approx(math.log(n), abs=1e-10)
    assert law.entropy == pytest.approx(math.log(n), abs=1e-10)
    assert law.max_weight == pytest.approx(1 / n)
    assert law.jacobian == pytest.approx(1 / n - 1 / n**2, rel=1e-6)


@pytest.mark.parametrize("sigma", [0.7, 1.0, 3.0, 12.0])
def test_two_keys_are_a_sigmoid(sigma):
    """With n = 2 everything is a function of one difference, N(0, 2 sigma^2)."""
    z = np.linspace(-9, 9, 40001)  # the trapezoidal rule
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    difference = sigma * math.sqrt(2) * z
    log_p, log_rest = -np.logaddexp(0, -difference), -np.logaddexp(0, difference)
    p = np.exp(log_p)
    law = theory.weights(2, sigma)
    entropy = -(p * log_p + (1 - p) * log_rest)
    assert law.entropy == pytest.approx(density @ entropy, rel=1e-6)
    assert law.sum_p2 == pytest.approx(density @ (p**2 + (1 - p) ** 2), rel=1e-8)
    assert law.max_weight == pytest.approx(density @ np.maximum(p, 1 - p), rel=1e-6)
    # The Jacobian is p (1 - p) [[1, -1], [-1, 1]].
    assert law.jacobian == pytest.approx(density @ (2 * p * (1 - p)) ** 2, rel=1e-6)
    along = 2 * (p * (1 - p) * math.sqrt(2) * z) ** 2
    assert law.along == pytest.approx(density @ along, abs=1e-7)


@pytest.mark.parametrize(("n", "sigma"), [(3, 0.5), (10, 1.0), (10, 8.0), (256, 4.0)])
def test_draws(n, sigma, rng):
    """Means over 20000 rows are within 5 standard errors; one of the 28 fails in 10^5 seeds."""
    s = sigma * rng.standard_normal((20000, n))
    p, log_z = sdpa.softmax(s), sdpa.logsumexp(s)
    p2, p3 = (p**2).sum(axis=1), (p**3).sum(axis=1)
    mean = (p * s).sum(axis=1, keepdims=True)
    along = (p**2 * (s - mean) ** 2).sum(axis=1) / sigma**2
    entropy = log_z - mean[:, 0]
    measured = (log_z, entropy, p.max(axis=1), p2, p3, p2 - 2 * p3 + p2**2, along)
    for name, law, draws in zip(
        theory.Weights._fields, theory.weights(n, sigma), measured, strict=True
    ):
        assert abs(draws.mean() - law) < 5 * draws.std() / len(draws) ** 0.5, name


@pytest.mark.parametrize("sigma", [0.0, 0.1, 1.0, 30.0])
def test_a_single_key_passes_no_gradient(sigma):
    """The quadrature misses 0 by 1e-8 to either side, and norms are roots of it."""
    assert theory.weights(1, sigma) == (0, 0, 1, 1, 1, 0, 0)
    law = theory.attention(1, 8, sigma)
    assert (law.grad_score, law.grad_query, law.grad_key, law.grad_value) == (0, 0, 0, 1)


def test_both_kinds_of_grid_meet_at_sigma_one():
    """They agree to the error of the quadrature; d ln Z / d sigma is sigma (1 - sum p^2)."""
    below, above = theory.weights(100, 1 - 1e-6), theory.weights(100, 1.0)
    slope = 1 - above.sum_p2
    assert above.log_z - below.log_z == pytest.approx(1e-6 * slope, abs=1e-10)
    assert above.jacobian == pytest.approx(below.jacobian, rel=1e-5)


@pytest.mark.parametrize(("n", "sigma"), [(10, 2.0), (1024, 6.0)])
def test_log_z_grows_as_its_derivative_says(n, sigma):
    step = 1e-3
    up, down = theory.weights(n, sigma + step), theory.weights(n, sigma - step)
    slope = sigma * (1 - theory.weights(n, sigma).sum_p2)
    assert (up.log_z - down.log_z) / (2 * step) == pytest.approx(slope, rel=1e-5)


def test_limits_of_the_random_energy_model():
    # Frozen: far above sigma_c, at any n, the Jacobian is that of Poisson-Dirichlet weights.
    for n in (10**4, 10**6):
        sigma = 4 * theory.freezing(n)
        law, limit = theory.weights(n, sigma).jacobian, theory.frozen_jacobian(n, sigma)
        assert 0.6 < limit / law < 1.6
    # Below: ln n - sigma^2 / 2.
    assert theory.weights(10**6, 1.0).entropy == pytest.approx(
        theory.entropy_limit(10**6, 1.0), abs=1e-4
    )
    assert theory.entropy_limit(10, 5.0) == 0
    # science of finite n: at the critical point far from 0.
    at_freezing = [theory.weights(n, theory.freezing(n)).entropy for n in (10, 64, 1024)]
    assert at_freezing == pytest.approx([1.3, 1.9, 2.6], abs=0.06)


@pytest.mark.parametrize("d_k", [1, 2, 3, 8, 64, 1024])
def test_lengths_of_queries(d_k):
    length, probability = theory.query_lengths(d_k)
    assert probability.sum() == pytest.approx(1)
    assert probability @ length**2 == pytest.approx(d_k, rel=1e-8)
    assert probability @ length**4 == pytest.approx(d_k * (d_k + 2), rel=1e-8)


@pytest.mark.parametrize(("n", "d_k", "scale"), [(10, 16, None), (10, 16, 1.0), (32, 4, 0.7)])
def test_attention_and_its_gradients(n, d_k, scale, rng):
    """The package's own gradients: 7 figures, each within 5 standard errors of 3000 heads."""
    d_v = 5
    q, k = rng.standard_normal((2, 3000, n, d_k))
    v, g = rng.standard_normal((2, 3000, n, d_v))
    out, lse = sdpa.attention_forward(q, k, v, scale=scale)
    grads = sdpa.attention_backward(g, q, k, v, out, lse, scale=scale)
    s = sdpa.attention_statistics(q, k, scale=scale)
    p = sdpa.attention_weights(q, k, scale=scale)
    grad_score = sdpa.softmax_backward(g @ v.swapaxes(-1, -2), p)
    law = theory.attention(n, d_k, scale, d_v=d_v)

    def check(name, draws, root=False):
        value, wanted = draws.mean(), getattr(law, name) ** (2 if root else 1)
        assert abs(value - wanted) < 5 * draws.std() / 3000**0.5, name

    check("entropy", s.entropy.mean(axis=1))
    check("max_weight", s.max_weight.mean(axis=1))
    check("sum_p2", s.sum_p2.mean(axis=1))
    check("grad_score", (grad_score**2).sum(axis=2).mean(axis=1), root=True)
    for name in ("query", "key", "value"):
        check(f"grad_{name}", (getattr(grads, name) ** 2).sum(axis=2).mean(axis=1), root=True)


def test_scores(rng):
    """The sample mean square of 20000 matrices, its spread, and shares of the tail."""
    n, d_k = 6, 5
    q, k = rng.standard_normal((2, 20000, n, d_k))
    scaled = sdpa.attention_weights(q, k, stage="scores")
    square = (scaled**2).mean(axis=(1, 2))
    assert abs(square.mean() - 1) < 5 * square.std() / 20000**0.5
    # The spread of a variance from draws of kurtosis below 20.
    spread = theory.mean_square_spread(n, n, d_k)
    assert square.var() == pytest.approx(spread, rel=5 * (20 / 20000) ** 0.5)
    tail = (abs(scaled) > 2).mean(axis=(1, 2))
    assert abs(tail.mean() - theory.outside(2, d_k)) < 5 * tail.std() / 20000**0.5
    kurtosis = (scaled**4).mean(axis=(1, 2)) - 3 * 1
    law = theory.excess_kurtosis(d_k)
    assert abs(kurtosis.mean() - law) < 5 * kurtosis.std() / 20000**0.5


def test_variances():
    assert theory.score_variance(64) == 64
    assert theory.score_variance(64, 1 / 8) == 1
    assert theory.score_variance(10, mean_query=1, mean_key=2, var_key=3) == 10 * (3 + 3 + 4)
    assert theory.row_variance(10, mean_query=1, var_key=3) == 10 * 2 * 3
    assert theory.excess_kurtosis(64) == 6 / 64
    assert theory.excess_kurtosis(8, 1.8, 1.8) == pytest.approx((1.8**2 - 3) / 8)


def test_distance_to_the_normal():
    # d_k = 2: q.k is a Laplace variable, of density exp(-|s|)/2, std sqrt 2.
    x = np.linspace(0.3, 1.3, 100001)
    cdf = 1 - np.exp(-math.sqrt(2) * x) / 2
    normal = 0.5 + 0.5 * np.vectorize(math.erf)(x / math.sqrt(2))
    assert theory.normal_distance(2) == pytest.approx(abs(cdf - normal).max(), rel=1e-5)
    assert theory.outside(3, 2) == pytest.approx(math.exp(-3 * math.sqrt(2)), rel=1e-6)
    # Edgeworth: max of phi(x) |3 x - x^3| / (4 d_k), at x^2 = 3 - sqrt 6.
    x = math.sqrt(3 - math.sqrt(6))
    limit = math.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * (3 * x - x**3) / 4
    for d_k in (64, 256, 1024):
        assert d_k * theory.normal_distance(d_k) == pytest.approx(limit, rel=0.3 / d_k**0.5)
    assert theory.outside(3) == pytest.approx(0.0026998, rel=1e-4)


@pytest.mark.parametrize(("n", "sigma"), [(0, 1.0), (3, -1.0), (3, math.inf), (3, math.nan)])
def test_refused(n, sigma):
    with pytest.raises(ValueError, match="n, sigma: expected"):
        theory.weights(n, sigma)


# ---------------------------------------------------------------------- the best scale


def test_the_best_scale_has_no_better_neighbour():
    for n, d_k in ((8, 64), (64, 4), (512, 16)):
        best = theory.best_scale(n, d_k)
        at = [theory.attention(n, d_k, factor * best).grad_score for factor in (0.95, 1, 1.05)]
        assert at[1] > max(at[0], at[2]) * (1 + 1e-5)


def test_the_best_scale_of_wide_heads_is_that_of_fixed_spread():
    assert theory.best_scale(64, 10**5) * 10**2.5 == pytest.approx(theory.best_sigma(64), rel=1e-3)


def test_the_best_spread_approaches_twice_freezing():
    # m (1 - m) / 3 is largest at m = freezing / sigma = 1/2, where it is 1/12.
    ratios = [theory.best_sigma(n) / theory.freezing(n) for n in (8, 512, 10**6, 10**12)]
    assert ratios == pytest.approx([0.61, 1.43, 1.72, 1.85], abs=0.01)
    largest = [theory.weights(n, theory.best_sigma(n)).jacobian for n in (512, 10**6, 10**12)]
    assert (np.diff(np.abs(np.array(largest) - 1 / 12)) < 0).all()
    sigma = 2 * theory.freezing(10**6)
    assert theory.frozen_jacobian(10**6, sigma) == pytest.approx(1 / 12)


def test_few_keys_pass_most_when_weights_are_equal():
    assert theory.best_scale(4, 64) == 0
    grid = [theory.weights(4, sigma).jacobian for sigma in (0.0, 0.5, 1.0, 2.0)]
    assert grid == sorted(grid, reverse=True)


@pytest.mark.parametrize(("n", "d_k"), [(1, 64), (64, 0)])
def test_the_best_scale_of_nothing_is_refused(n, d_k):
    with pytest.raises(ValueError, match=rf"^n, d_k: expected n >= 2 .* got {n} and {d_k}$"):
        theory.best_scale(n, d_k)


def test_the_gap_of_the_largest(rng):
    draws = np.sort(rng.standard_normal((200_000, 10)), axis=1)
    gaps = draws[:, -1] - draws[:, -2]
    assert abs(gaps.mean() - theory.top_gap(10)) < 4.5 * gaps.std() / len(gaps) ** 0.5


def test_typical_gradients_follow_the_gap():
    """ln|dL/dQ| falls like sqrt(d_k) times the gap, which no power of d_k does."""
    logs = {d: log_gradients(d, 10, draws=150)["unscaled"].mean() for d in (256, 1024)}
    fall = logs[1024] - logs[256] - 0.5 * np.log(4)
    assert fall / 16 == pytest.approx(-theory.top_gap(10), rel=0.1)
