"""Estimates with intervals from independent draws.

The first axis of every array counts draws, which are independent; values of one draw (the rows of
one image) may depend on each other in any way. Intervals use only the spread between draws. They
treat the mean as normal: exact for normal draws, good for others from about thirty draws, more
where the draws are very skewed or the level is high.
"""

from collections.abc import Callable, Collection
from functools import cache
from math import pi, sqrt, tan
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

LEVEL = 0.95
Z = 1.959964  # of the normal distribution, 2.5 % lie above it

Values = npt.NDArray[np.float64]


class Estimate(NamedTuple):
    """A measured figure."""

    value: float
    low: float
    high: float
    n: int
    """Independent draws."""
    predicted: float | None = None
    """By a law, which the function that returns the estimate names."""


class Draws(NamedTuple):
    """What an experiment measured: one number, or one row of numbers, per independent draw.

    Kept instead of an `Estimate` where the level of the interval is chosen later, or the draws
    themselves are saved or plotted.

    Examples
    --------
    >>> import numpy as np
    >>> import sdpa_lab as lab
    >>> lab.Draws(np.array([1.0, 2.0, 3.0])).estimate().value
    2.0
    """

    values: Values
    """(draws,), or (draws, rows) for the median of all rows."""
    statistic: str = "mean"
    """"mean", "positive", "root_mean" (of squares), "share" or "median"."""
    predicted: float | None = None

    def estimate(self, level: float = LEVEL) -> Estimate:
        """The statistic and its interval at a level in (0, 1)."""
        found = STATISTICS[self.statistic](self.values, level=level)
        return found._replace(predicted=self.predicted)


def checked_slope(name: str, values: Collection[float]) -> None:
    """Raise a ValueError where a slope over these values is not defined."""
    if len(set(values)) < 2:
        raise ValueError(f"{name}: expected at least 2 different values, got {list(values)}")


def exact(value: float, predicted: float | None = None) -> Estimate:
    """A figure without randomness: one draw, an interval of length 0."""
    return Estimate(float(value), float(value), float(value), 1, predicted)


def mean(draws: Values, predicted: float | None = None, *, level: float = LEVEL) -> Estimate:
    """Mean of one number per draw."""
    value = draws.mean()
    half = student(level, len(draws) - 1) * _standard_error(draws)
    return Estimate(float(value), float(value - half), float(value + half), len(draws), predicted)


def positive(draws: Values, *, level: float = LEVEL) -> Estimate:
    """Mean of one number > 0 per draw, with an interval in its logarithm.

    Student's interval of ln(mean), whose standard error is that of the mean over the mean (delta
    method): of a loss near 0 no end is below 0, and the longer side is that of the longer tail.

    Examples
    --------
    >>> import numpy as np
    >>> from sdpa_lab.tools.estimate import positive
    >>> [round(number, 2) for number in positive(np.array([0.1, 0.2, 0.9]))[:3]]
    [0.4, 0.03, 5.99]
    """
    value = draws.mean()
    half = student(level, len(draws) - 1) * _standard_error(draws)
    factor = np.exp(half / value) if value > 0 else np.inf
    return Estimate(float(value), float(value / factor), float(value * factor), len(draws))


def root_mean(draws: Values, predicted: float | None = None, *, level: float = LEVEL) -> Estimate:
    """Square root of the mean of one number >= 0 per draw: the ends are the roots of its ends."""
    value, low, high, n, _ = mean(draws, level=level)
    return Estimate(value**0.5, max(low, 0.0) ** 0.5, high**0.5, n, predicted)


def share(draws: Values, *, level: float = LEVEL) -> Estimate:
    """Mean of one share, in [0, 1], per draw.

    Wilson's interval ("Probable inference", 1927) for the number of trials that would have the
    spread of the draws; even a share of 0 then has an upper end. A mean of trials cannot spread
    more than a single trial, so there are at least as many trials as draws.
    """
    n, value = len(draws), float(draws.mean())
    z = Z if level == LEVEL else NormalDist().inv_cdf((1 + level) / 2)
    error = _standard_error(draws)
    trials = max(n, value * (1 - value) / error**2) if error > 0 else n
    weight = trials / (trials + z**2)
    centre = weight * value + (1 - weight) / 2
    half = weight * z * (value * (1 - value) / trials + (z / trials) ** 2 / 4) ** 0.5
    # At 0 and 1 rounding may put an end on the wrong side of the value or of the range.
    low, high = max(0.0, min(value, centre - half)), min(1.0, max(value, centre + half))
    return Estimate(value, low, high, n)


def median(rows: Values, *, level: float = LEVEL) -> Estimate:
    """Median of all elements of (draws, rows), or of (draws,).

    The interval is that of Woodruff, "Confidence intervals for medians and other position
    measures" (1952): the share of rows below the median has an interval, and the quantiles at its
    ends are the ends.
    """
    rows = rows.reshape(len(rows), -1)
    value = float(np.median(rows))
    half = student(level, len(rows) - 1) * _standard_error((rows <= value).mean(axis=1))
    low, high = np.quantile(rows, np.clip([0.5 - half, 0.5 + half], 0, 1))
    return Estimate(value, float(low), float(high), len(rows))


STATISTICS: dict[str, Callable[..., Estimate]] = {
    "mean": mean,
    "positive": positive,
    "root_mean": root_mean,
    "share": share,
    "median": median,
}


@cache
def student(level: float, freedom: int) -> float:
    """Half width, in standard errors, of Student's interval at `level`.

    With t = sqrt(freedom) / tan(a) the density of t is proportional to sin(a)^(freedom - 1), whose
    integral up to the wanted a is (1 - level) / 2 of that up to pi. From 1000 degrees of freedom on
    the first term of the expansion in 1 / freedom is enough: relative error below 5e-5 up to level
    1 - 1e-7.

    Examples
    --------
    >>> from sdpa_lab.tools.estimate import student
    >>> round(student(0.95, 9), 4), round(student(0.95, 1000), 4)
    (2.2622, 1.9623)
    """
    if freedom < 1:
        raise ValueError(f"draws: expected at least 2 for an interval, got {freedom + 1}")
    if freedom >= 1000:
        z = NormalDist().inv_cdf((1 + level) / 2)
        return z + (z**3 + z) / (4 * freedom)
    nodes, weights = np.polynomial.legendre.leggauss(200)

    def area(angle: float) -> float:
        a = angle * (nodes + 1) / 2
        return float((weights * np.sin(a) ** (freedom - 1)).sum()) * angle / 2

    wanted = (1 - level) * area(pi / 2)
    low, high = 0.0, pi / 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if area(middle) < wanted else (low, middle)
    return sqrt(freedom) / tan(high)


def _standard_error(draws: Values) -> float:
    return float(draws.std(ddof=1)) / sqrt(len(draws))
