"""Closed forms and exact quadratures at finite n and d_k; docs/theory.md derives each.

Throughout, q and k have independent components of mean 0 and variance 1 (normal where a function
says so), scores are s_j = scale q.k_j, and p = softmax(s) are the weights of one row of n keys.
Given q, the scores of a row with normal keys are exactly independent N(0, sigma^2) with sigma =
|scale| |q|: `weights(n, sigma)` is the law at fixed sigma, `attention(n, d_k, scale)` its mean over
|q|.
"""

from collections.abc import Callable
from functools import cache
from math import erf, exp, lgamma, log, log1p, pi, sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

STEP = 0.35
"""Of the trapezoidal rule in v = ln u.

Its integrands are u^k exp(-u), analytic for |Im v| < pi/2: the rule errs by about exp(-pi^2 / STEP)
times 2 (2 pi / STEP)^(k - 1/2), 1e-8 for k = 4."""

GREGORY = np.array([95 / 288, 317 / 240, 23 / 30, 793 / 720, 157 / 160])
"""End weights of the trapezoidal rule that make it of order 6 (Hildebrand, section 5.9)."""

REACH = 8.5
"""Standard normal numbers beyond it, 2e-17 of them, are left out."""


# ---------------------------------------------------------------------- scores


def score_variance(
    d_k: int,
    scale: float = 1.0,
    *,
    var_query: float = 1.0,
    var_key: float = 1.0,
    mean_query: float = 0.0,
    mean_key: float = 0.0,
) -> float:
    """Variance of scale q.k: scale^2 d_k (v_q v_k + m_q^2 v_k + m_k^2 v_q).

    Examples
    --------
    >>> from sdpa_lab import theory
    >>> theory.score_variance(64), theory.score_variance(64, 0.125)
    (64.0, 1.0)
    >>> theory.score_variance(64, 0.125, mean_key=2)
    5.0
    """
    product = var_query * var_key + mean_query**2 * var_key + mean_key**2 * var_query
    return scale**2 * d_k * product


def row_variance(
    d_k: int,
    scale: float = 1.0,
    *,
    var_query: float = 1.0,
    var_key: float = 1.0,
    mean_query: float = 0.0,
) -> float:
    """Variance of scale q.k within a row, all that softmax depends on: q is fixed there.

    scale^2 d_k (v_q + m_q^2) v_k: the mean of the keys shifts a whole row and drops out.
    """
    return scale**2 * d_k * (var_query + mean_query**2) * var_key


def excess_kurtosis(d_k: int, m4_query: float = 3.0, m4_key: float = 3.0) -> float:
    """Of q.k, for components with these fourth moments: (m4_q m4_k - 3) / d_k; 6/d_k for normal."""
    return (m4_query * m4_key - 3) / d_k


def mean_square_spread(n_query: int, n_key: int, d_k: int) -> float:
    """Relative variance of the mean square of the scores of one matrix, for normal components.

    2/(n m) + 2/(n d) + 2/(m d) + 2/(n m d) with n queries and m keys: entries of a row share q, of
    a column k, so that it falls like 1/n and not like 1/n^2.
    """
    n, m, d = n_query, n_key, d_k
    return 2 / (n * m) + 2 / (n * d) + 2 / (m * d) + 2 / (n * m * d)


def outside(bound: float, d_k: int | None = None) -> float:
    """Probability that |q.k| / sqrt(d_k) exceeds `bound`, for normal components.

    Given q it is 2 (1 - Phi(bound sqrt(d_k) / |q|)); None means the limit of large d_k.

    Examples
    --------
    >>> from sdpa_lab import theory
    >>> round(theory.outside(3), 5), round(theory.outside(3, 64), 5)
    (0.0027, 0.0033)
    """
    if d_k is None:
        return 1 - erf(bound / sqrt(2))
    length, weight = query_lengths(d_k, nodes=40)
    tails = [1 - erf(bound * sqrt(d_k / 2) / r) for r in length]
    return float(weight @ tails)


def normal_excess(x: npt.ArrayLike, d_k: int) -> Array:
    """F(x) - Phi(x), where F is the distribution of q.k / sqrt(d_k), for normal components.

    F(x) = E Phi(x sqrt(d_k) / |q|). Edgeworth's first term is kurtosis/24 (3 x - x^3) phi(x) with
    kurtosis 6/d_k.
    """
    length, weight = query_lengths(d_k, nodes=40)
    x = np.asarray(x, np.float64)[..., None]
    phi = np.vectorize(erf, otypes=[float])
    return np.asarray((phi(x * sqrt(d_k / 2) / length) - phi(x / sqrt(2))) @ weight / 2)


def normal_distance(d_k: int) -> float:
    """Kolmogorov distance of q.k / sqrt(d_k) to the normal distribution, for normal components.

    The largest |F(x) - Phi(x)| of `normal_excess`: about 0.1376 / d_k, at x^2 = 3 - sqrt(6). There
    is no term in 1/sqrt(d_k), since the skewness is 0.

    Examples
    --------
    >>> from sdpa_lab import theory
    >>> round(64 * theory.normal_distance(64), 3), round(512 * theory.normal_distance(512), 3)
    (0.138, 0.138)
    """
    return float(np.max(np.abs(normal_excess(np.linspace(0.3, 1.3, 401), d_k))))


def query_lengths(d_k: int, nodes: int = 18) -> tuple[Array, Array]:
    """Lengths |q| of normal queries and their probabilities: a quadrature rule for means over q.

    The trapezoidal rule in z = ln |q|, whose density is proportional to exp(d_k z - e^(2 z) / 2):
    nearly normal with variance 1 / (2 d_k), with a long left tail where d_k is small.
    """
    spread = 1 / sqrt(2 * d_k)
    z = np.arange(-6.5 * spread - 40 / d_k, 6.5 * spread, min(0.15, 13 * spread / nodes))
    exponent = d_k * (z - np.exp(2 * z) / 2)
    weight = np.exp(exponent - exponent.max())
    kept = weight > 1e-17
    return np.exp(z[kept]) * sqrt(d_k), weight[kept] / weight[kept].sum()


# ---------------------------------------------------------------------- weights


class Weights(NamedTuple):
    """Expectations over a row of n weights."""

    log_z: float
    """ln sum_j e^(s_j), the log-sum-exp."""
    entropy: float
    """-sum p ln p."""
    max_weight: float
    sum_p2: float
    sum_p3: float
    jacobian: float
    """Squared Frobenius norm of the softmax Jacobian, sum p^2 - 2 sum p^3 + (sum p^2)^2.

    d_v times it is E |dL/ds|^2 for values and upstream gradients of variance 1.
    """
    along: float
    """Squared length of the Jacobian times s / sigma: what reaches q along q itself."""


def freezing(n: int) -> float:
    """The sigma above which, for large n, a few weights hold everything: sqrt(2 ln n) (Derrida)."""
    return sqrt(2 * log(n))


def top_gap(n: int) -> float:
    """Expected distance of the largest of n independent N(0, 1) numbers to the second largest.

    E X(n) - E X(n-1) = n times the integral of F^(n-1) (1 - F) (David & Nagaraja 2003, 3.1).

    Examples
    --------
    >>> from sdpa_lab import theory
    >>> round(theory.top_gap(10), 3), round(theory.top_gap(64), 3)
    (0.537, 0.381)
    """
    x = np.linspace(-REACH, REACH, 4001)
    below = np.vectorize(lambda a: (1 + erf(a / sqrt(2))) / 2, otypes=[float])(x)
    return float(n * (below ** (n - 1) * (1 - below)).sum() * (x[1] - x[0]))


def entropy_limit(n: int, sigma: float) -> float:
    """Entropy in Derrida's random energy model, large n: ln n - sigma^2/2, O(1) above freezing."""
    return max(0.0, log(n) - sigma**2 / 2)


def frozen_jacobian(n: int, sigma: float) -> float:
    """Squared norm of the Jacobian above freezing, large n: m (1 - m) / 3, m = freezing / sigma.

    The weights are then Poisson-Dirichlet with parameter m (Ruelle 1987), for which E sum p^2 is
    1 - m, E sum p^3 is (1 - m)(2 - m)/2 and E (sum p^2)^2 is (1 - m)(3 - 2 m)/3. Its largest value
    is 1/12, at m = 1/2, that is sigma = 2 sqrt(2 ln n).
    """
    m = min(1.0, freezing(n) / sigma)
    return m * (1 - m) / 3


@cache
def weights(n: int, sigma: float) -> Weights:
    """Exact expectations over softmax of n independent N(0, sigma^2) scores, by quadrature.

    Errors are below 1e-7, that of the entropy below 1e-7 + 1e-9 sigma^2.

    With u = t e^(sigma x), x standard normal, and a_kl(t) = E[x^l u^k e^(-u)],

        E sum over distinct i, j, .. of p_i^k x_i^l p_j^k' x_j^l' ..
            = n (n - 1) .. / Gamma(k + k' + ..) integral of a_kl a_k'l' .. phi^(n - indices) dt / t
        phi(t) = a_00(t),    E ln Z = integral of (e^(-t) - phi^n) dt / t
        E entropy = E ln Z - sigma^2 (1 - E sum p^2)

    Parameters
    ----------
    n : int
        At least 1.
    sigma : float
        At least 0.

    Raises
    ------
    ValueError
        `n` or `sigma` is out of range.

    Examples
    --------
    >>> from sdpa_lab import theory
    >>> one = theory.weights(64, 1.0)
    >>> round(one.entropy, 3), round(one.max_weight, 4), round(one.jacobian, 4)
    (3.685, 0.1073, 0.0341)
    """
    if n < 1 or not 0 <= sigma < float("inf"):
        raise ValueError(f"n, sigma: expected n >= 1 and sigma >= 0, got {n} and {sigma}")
    if n == 1:  # the quadrature may miss a 0 to either side, and gradients are roots
        return Weights(0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0)
    row = _Row(n, sigma)
    p2, p3, p4 = (row.moment((k, 0)) for k in (2, 3, 4))
    p22 = row.moment((2, 0), (2, 0))
    # sum p^2 (x - m)^2 with m = sum p x, by how many of the indices coincide.
    squares = row.moment((2, 2))
    cross = row.moment((3, 2)) + row.moment((1, 1), (2, 1))
    mean = row.moment((4, 2)) + row.moment((2, 2), (2, 0)) + 2 * row.moment((3, 1), (1, 1))
    mean += row.moment((1, 1), (1, 1), (2, 0))
    log_z = row.log_z()
    return Weights(
        log_z=log_z,
        entropy=log_z - sigma**2 * (1 - p2),
        max_weight=_max_weight(n, sigma),
        sum_p2=p2,
        sum_p3=p3,
        jacobian=p2 - 2 * p3 + p4 + p22,
        along=squares - 2 * cross + mean,
    )


class _Row:
    """The integrands of `weights` on a grid of tau = ln t."""

    def __init__(self, n: int, sigma: float) -> None:
        self.n = n
        step = STEP / max(sigma, 1.0)
        x = step * np.arange(-np.ceil(REACH / step), np.ceil(REACH / step) + 1)
        density = np.exp(-(x**2) / 2)
        self.x, self.density = x, density / density.sum()
        # u^k e^(-u) lives around u = 1: it falls like u^k to the left, like e^(-u) to the right.
        self.tau = np.arange(-REACH * sigma - log(n) - 36, REACH * sigma + 4, STEP)
        if sigma >= 1:  # both grids have the same step in v: sums over x are correlations
            v = self.tau[0] + sigma * x[0] + STEP * np.arange(len(self.tau) + len(x) - 1)
        else:
            v = self.tau[:, None] + sigma * x
        self.v = np.minimum(v, 7.0)  # where e^(-u) is 0
        self.u = np.exp(self.v)
        # 1 - phi, not phi: for large n the answer lies in what phi lacks to 1.
        lack = np.minimum(self._mean(-np.expm1(-self.u), self.density), 1 - 1e-16)
        self.log_phi = np.log1p(-lack)
        self.a: dict[tuple[int, int], Array] = {}

    def _mean(self, values: Array, weight: Array) -> Array:
        """Over x, for every tau."""
        return values @ weight if values.ndim == 2 else np.correlate(values, weight, "valid")

    def log_z(self) -> float:
        head = np.exp(-np.exp(np.minimum(self.tau, 7.0)))
        return STEP * float((head - np.exp(self.n * self.log_phi)).sum())

    def moment(self, *powers: tuple[int, int]) -> float:
        """E of the sum over distinct indices of the product of p^k x^l."""
        if self.n < len(powers):
            return 0.0
        total = sum(k for k, _ in powers)
        left = self.n - len(powers)
        product = np.exp(left * self.log_phi) if left else np.ones_like(self.tau)
        for i, power in enumerate(powers):
            product = product * self._a(power) * (self.n - i)
        return STEP * float(product.sum()) / exp(lgamma(total))

    def _a(self, power: tuple[int, int]) -> Array:
        if power not in self.a:
            k, order = power
            self.a[power] = self._mean(np.exp(k * self.v - self.u), self.density * self.x**order)
        return self.a[power]


def _max_weight(n: int, sigma: float) -> float:
    """E max p = n E[1 / (1 + sum of e^(sigma (x_j - x))); all others below x].

    1 / (1 + r) is the integral of e^(-u) e^(-u r) over u, and the others are independent given x.
    """
    if n == 1 or sigma == 0:
        return 1 / n
    step = min(0.1, STEP / sigma)
    x = np.arange(-REACH, REACH + step, step)
    density = np.exp(-(x**2) / 2) * step / sqrt(2 * pi)
    v = np.arange(-log(n) - 36, 4, STEP)
    u = np.exp(v)
    # psi(u, x) is the integral of density(y) exp(-u e^(sigma (y - x))) over y < x: a convolution,
    # with Gregory's weights at the end where the integrand does not vanish.
    kernel = np.exp(-u[:, None] * np.exp(-sigma * step * np.arange(len(x))))
    kernel[:, : len(GREGORY)] *= GREGORY
    size = 1 << (2 * len(x) - 1).bit_length()
    spectrum = np.fft.rfft(kernel, size) * np.fft.rfft(density, size)
    psi = np.clip(np.fft.irfft(spectrum, size)[:, : len(x)], 0, 1)
    return float(n * (STEP * u * np.exp(-u)) @ psi ** (n - 1) @ density)


class Attention(NamedTuple):
    """Expectations over one head with n normal queries and keys, before any training.

    Values and the upstream gradient have independent components of mean 0 and variance 1 and d_v
    columns; gradients are root mean squares of the norms of rows.
    """

    entropy: float
    max_weight: float
    sum_p2: float
    jacobian: float
    grad_score: float
    """Of a row of dL/dS, S the scaled scores: sqrt(d_v E jacobian)."""
    grad_query: float
    """scale sqrt(d_v E[(d_k - 1) jacobian + along])."""
    grad_key: float
    """scale sqrt(d_v E[|q|^2 jacobian]), for as many queries as keys."""
    grad_value: float
    """sqrt(d_v E sum p^2), for as many queries as keys."""


def attention(n: int, d_k: int, scale: float | None = None, *, d_v: int = 1) -> Attention:
    """The laws of `weights` averaged over the lengths of the queries.

    Parameters
    ----------
    n : int
        Keys, and queries.
    d_k : int
    scale : float, optional
        Default 1/sqrt(d_k).
    d_v : int
        Columns of the values.

    Examples
    --------
    >>> from sdpa_lab import theory
    >>> for scale in (None, 1.0):
    ...     print([round(theory.attention(10, d_k, scale).entropy, 2) for d_k in (16, 64, 256)])
    [1.93, 1.93, 1.92]
    [0.75, 0.35, 0.17]
    """
    scale = d_k**-0.5 if scale is None else abs(scale)
    length, probability = query_lengths(d_k)
    laws = [weights(n, scale * float(r)) for r in length]

    def mean(get: Callable[[Weights, float], float]) -> float:
        values = (get(law, float(r)) for law, r in zip(laws, length, strict=True))
        return float(sum(p * value for p, value in zip(probability, values, strict=True)))

    jacobian = mean(lambda law, r: law.jacobian)
    sum_p2 = mean(lambda law, r: law.sum_p2)
    return Attention(
        entropy=mean(lambda law, r: law.entropy),
        max_weight=mean(lambda law, r: law.max_weight),
        sum_p2=sum_p2,
        jacobian=jacobian,
        grad_score=sqrt(d_v * jacobian),
        grad_query=scale * sqrt(d_v * mean(lambda law, r: (d_k - 1) * law.jacobian + law.along)),
        grad_key=scale * sqrt(d_v * mean(lambda law, r: r**2 * law.jacobian)),
        grad_value=sqrt(d_v * sum_p2),
    )


# ---------------------------------------------------------------------- the best scale


def best_sigma(n: int) -> float:
    """The sigma of n independent normal scores whose softmax passes the largest gradient.

    The maximum of `weights(n, sigma).jacobian`, to 1e-4. In the limit of large n it is 2 sqrt(2 ln
    n), where m = 1/2 in `frozen_jacobian`, and the maximum is 1/12. With few keys it is 0: equal
    weights pass most.

    Parameters
    ----------
    n : int
        At least 2.

    Raises
    ------
    ValueError
        `n` is below 2: one weight is always 1.

    Examples
    --------
    >>> from sdpa_lab import theory
    >>> [round(theory.best_sigma(n), 2) for n in (4, 8, 64, 512)]
    [0.0, 1.24, 3.45, 5.06]
    """
    return best_scale(n, None)


def best_scale(n: int, d_k: int | None) -> float:
    """The scale at which softmax passes the largest gradient to its scores, before any training.

    The maximum of `attention(n, d_k, scale).grad_score`, to 1e-4 of 1/sqrt(d_k). For wide heads it
    is best_sigma(n) / sqrt(d_k): 1/sqrt(d_k) settles the width and leaves the length open.

    Parameters
    ----------
    n : int
        Keys of a row, at least 2. A causal row counts those that it sees.
    d_k : int or None
        Width of queries and keys, at least 1; None is the limit of wide heads, sqrt(d_k) scale.

    Raises
    ------
    ValueError
        `n` is below 2 or `d_k` below 1.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> round(lab.best_scale(1024, 64) * 64**0.5, 2)        # times 1/sqrt(d_k)
    5.61
    """
    if n < 2 or (d_k is not None and d_k < 1):
        raise ValueError(f"n, d_k: expected n >= 2 and d_k >= 1, got {n} and {d_k}")
    curve, end = _jacobians(n)
    length, weight = np.ones(1), np.ones(1)
    if d_k is not None:
        length, weight = query_lengths(d_k)
        length = length / sqrt(d_k)

    def passed(spread: Array) -> Array:
        # Beyond the end of the curve, where a query is many times longer than most: frozen.
        inside = np.minimum(spread[:, None] * length, end)
        return np.asarray(curve(np.log1p(inside)) @ weight)

    low, high = 0.0, 2.5 * freezing(n) + 2
    while high - low > 1e-4:
        spreads = np.linspace(low, high, 41)
        at = int(np.argmax(passed(spreads)))
        low, high = spreads[max(at - 1, 0)], spreads[min(at + 1, 40)]
    best = 0.0 if low == 0 else float(low + high) / 2
    return best if d_k is None else best / sqrt(d_k)


@cache
def _jacobians(n: int) -> tuple[np.polynomial.Chebyshev, float]:
    """`weights(n, sigma).jacobian` interpolated in ln(1 + sigma), and the last sigma."""
    end = 4 * freezing(n) + 8

    def values(t: Array) -> Array:
        return np.array([weights(n, float(np.expm1(x))).jacobian for x in t])

    domain = [0.0, log1p(end)]
    return np.polynomial.Chebyshev.interpolate(values, 40, domain=domain), end
