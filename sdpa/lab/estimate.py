"""Estimates with 95 % intervals from independent draws.

The first axis of every argument counts draws, which are independent; what lies behind it (the rows
of one image) may depend on each other as it likes. Intervals take the spread between draws only.
They are normal ones, so there should be some thirty draws or more.
"""

from math import sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Z = 1.959964  # of the normal distribution, 2.5 % lie above it


class Estimate(NamedTuple):
    """A measured figure."""

    value: float
    low: float
    high: float
    n: int
    """Independent draws."""
    predicted: float | None = None
    """By a law that the function which returns the estimate names."""


def mean(draws: npt.NDArray[np.float64], predicted: float | None = None) -> Estimate:
    """Mean of one number per draw."""
    value = draws.mean()
    half = Z * _standard_error(draws)
    return Estimate(float(value), float(value - half), float(value + half), len(draws), predicted)


def root_mean(draws: npt.NDArray[np.float64], predicted: float | None = None) -> Estimate:
    """Square root of the mean of one number >= 0 per draw: the ends are the roots of its ends."""
    value, low, high, n, _ = mean(draws)
    return Estimate(value**0.5, max(low, 0.0) ** 0.5, high**0.5, n, predicted)


def share(draws: npt.NDArray[np.float64]) -> Estimate:
    """Mean of one share, in [0, 1], per draw.

    Wilson's interval ("Probable inference", 1927) for as many trials as would give the spread that
    the draws have: a share of 0 still has an upper end. A mean of trials cannot spread more than a
    single trial, so there are never fewer of them than draws.
    """
    n, value = len(draws), float(draws.mean())
    error = _standard_error(draws)
    trials = max(n, value * (1 - value) / error**2) if error > 0 else n
    weight = trials / (trials + Z**2)
    centre = weight * value + (1 - weight) / 2
    half = weight * Z * (value * (1 - value) / trials + (Z / trials) ** 2 / 4) ** 0.5
    # At 0 and 1 rounding may put an end on the wrong side of the value or of the range.
    low, high = max(0.0, min(value, centre - half)), min(1.0, max(value, centre + half))
    return Estimate(value, low, high, n)


def median(rows: npt.NDArray[np.float64]) -> Estimate:
    """Median of all elements of (draws, rows).

    The interval is that of Woodruff, "Confidence intervals for medians and other position
    measures" (1952): the share of rows below the median has an interval, and the quantiles at its
    ends are the ends.
    """
    value = float(np.median(rows))
    half = Z * _standard_error((rows <= value).mean(axis=1))
    low, high = np.quantile(rows, np.clip([0.5 - half, 0.5 + half], 0, 1))
    return Estimate(value, float(low), float(high), len(rows))


def _standard_error(draws: npt.NDArray[np.float64]) -> float:
    return float(draws.std(ddof=1)) / sqrt(len(draws))
