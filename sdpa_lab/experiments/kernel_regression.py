"""Attention as kernel regression: what a bandwidth does, and what distances cost in digits."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

import sdpa

from .. import style
from ..tools.estimate import Draws
from ..tools.inputs import stream
from ..tools.table import Cell, Table
from .growth import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NOISE = 0.3
"""Standard deviation around the curve sin(2 x) of `kernel_smoothing`."""
WIDTH = 2
"""Components of the points of `kernel_rounding`."""


def operands(
    x: Array, y: Array, h: float, centre: Array | float | None = None
) -> tuple[Array, Array, Array]:
    """Query and key of attention whose weights are exp(-|x - y|^2 / (2 h^2)), and |q|^2 / 2.

    The centre, the mean of y if None, is subtracted from the points, which are divided by h. The
    key has -|k|^2 / 2 in one more column, beside a 1 in the query; that of the query is the same
    for a whole row.

    Examples
    --------
    >>> import numpy as np
    >>> from sdpa_lab.experiments.kernel_regression import operands
    >>> x, y = np.random.default_rng(0).standard_normal((2, 5, 3))
    >>> query, key, square = operands(x, y, 0.5)
    >>> score = query @ key.T - square[:, None]
    >>> np.allclose(score, -((x[:, None] - y) ** 2).sum(axis=-1) / (2 * 0.5**2))
    True
    """
    if centre is None:
        centre = y.mean(axis=0)
    q, k = (x - centre) / h, (y - centre) / h
    query = np.column_stack([q, np.ones(len(q))])
    key = np.column_stack([k, -(k**2).sum(axis=1) / 2])
    return query, key, (q**2).sum(axis=1) / 2


def kernel_smoothing(
    bandwidths: Iterable[float] = (0.02, 0.15, 1.0), *, n: int = 200, seed: int = 0
) -> Table:
    """Points around sin(2 x), and the kernel's mean of their values by bandwidth.

    Parameters
    ----------
    bandwidths : iterable of float
    n : int
        Points, uniform in -3 to 3, with noise of standard deviation 0.3.
    seed : int

    Returns
    -------
    Table
        x, in order; value; and for each bandwidth h a column "h = ..." of the mean at x.

    Examples
    --------
    >>> import numpy as np
    >>> import sdpa_lab as lab
    >>> table = lab.kernel_smoothing([0.15], n=500)
    >>> bool(abs(table["h = 0.15"] - np.sin(2 * table["x"])).mean() < 0.1)
    True
    """
    rng = stream(seed, "kernel smoothing")
    x = np.sort(rng.uniform(-3, 3, n))[:, None]
    value = np.sin(2 * x) + NOISE * rng.standard_normal((n, 1))
    columns = {"x": x[:, 0], "value": value[:, 0]}
    for h in bandwidths:
        query, key, _ = operands(x, x, h)
        columns[f"h = {h:g}"] = sdpa.attention(query, key, value, scale=1.0)[:, 0]
    rows = [
        dict(zip(columns, map(float, row), strict=True))
        for row in zip(*columns.values(), strict=True)
    ]
    return Table(f"{n} points and their means by bandwidth", rows)


def kernel_rounding(
    distances: Iterable[float] = (1, 10, 100, 1000, 10000, 100000),
    *,
    n: int = 100,
    seed: int = 0,
    draws: int = 30,
) -> Table:
    """Errors of kernel sums over points far from their mean.

    The sum of products q.k - |k|^2 / 2 - |q|^2 / 2 is -|q - k|^2 / 2, a small difference of numbers
    as large as r^2, where r is the distance from the mean in bandwidths. Each of them is rounded
    with a relative error of at most u = 2^-53 (float64) or 2^-24 (float32), so the logarithm of a
    density is off by about u r^2. A draw is two clusters of unit variance, at r and at -r in a
    random direction of the plane, centred and divided in float64. Errors are those beside distances
    from differences in float64.

    Parameters
    ----------
    distances : iterable of float
        r.
    n : int
        Points, and as many queries, half of them in either cluster.
    seed, draws : int

    Returns
    -------
    Table
        dtype, distance; density, the largest error of ln of the density with its law u r^2;
        smoothing, that of the mean of values of standard deviation 1.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> table = lab.kernel_rounding([100], draws=5)
    >>> [bool(error < 1e-3) for error in table["density"]]
    [True, True]
    """
    rows: list[dict[str, Cell]] = []
    found = {r: _errors(float(r), n, seed, draws) for r in distances}
    for dtype in ("float32", "float64"):
        u = float(np.finfo(dtype).eps) / 2
        for r, errors in found.items():
            density, smoothing = errors[dtype]
            rows.append(
                {
                    "dtype": dtype,
                    "distance": r,
                    "density": Draws(density, "positive", u * r**2),
                    "smoothing": Draws(smoothing, "positive"),
                }
            )
    return Table("Errors of kernel sums by distance from the mean, in bandwidths", rows)


def _errors(r: float, n: int, seed: int, draws: int) -> dict[str, Array]:
    """{dtype: (2, draws)}: the largest error of the log density and of the mean in each draw."""
    rng = stream(seed, "kernel rounding", str(r))
    found = {dtype: np.empty((2, draws)) for dtype in ("float32", "float64")}
    for draw in range(draws):
        angle = rng.uniform(0, 2 * np.pi)
        place = np.where(np.arange(n) % 2, r, -r)[:, None] * [np.cos(angle), np.sin(angle)]
        x, y = place + rng.standard_normal((2, n, WIDTH))
        value = rng.standard_normal((n, 1))
        score = -((x[:, None] - y) ** 2).sum(axis=-1) / 2
        weights = np.exp(score)
        total = weights.sum(axis=-1)
        query, key, square = operands(x, y, 1.0)
        for dtype, errors in found.items():
            out, lse = sdpa.attention_forward(
                query.astype(dtype), key.astype(dtype), value.astype(dtype), scale=1.0
            )
            errors[0, draw] = abs(lse - square - np.log(total)).max()
            errors[1, draw] = abs(out - weights @ value / total[:, None]).max()
    return found


@style.plot
def plot_kernel_smoothing(table: Table) -> Figure:
    """Points and their means, a curve for each bandwidth."""
    figure, axes = style.subplots(size=(4.6, 3.6))
    _draw_means(axes, table)
    return figure


@style.plot
def plot_kernel_rounding(table: Table) -> Figure:
    """Errors of the density over the distance from the mean; lines are the law u r^2."""
    figure, axes = style.subplots(size=(4.6, 3.6))
    _draw_errors(axes, table)
    return figure


@style.plot
def plot_kernel_regression(smoothing: Table, rounding: Table) -> Figure:
    """Means of points by bandwidth; errors of the density over the distance from the mean.

    Parameters
    ----------
    smoothing : Table
        Of `kernel_smoothing`, with three bandwidths.
    rounding : Table
        Of `kernel_rounding`.
    """
    figure, (curves, errors) = style.subplots(1, 2, size=(4.6, 3.6))
    _draw_means(curves, smoothing)
    curves.set_title("three bandwidths")
    _draw_errors(errors, rounding)
    errors.set_title("rounding (lines: u r^2)")
    return figure


def _draw_means(axes: Axes, table: Table) -> None:
    axes.plot(table["x"], table["value"], ".", color=style.BLACK, markersize=3, label="points")
    names = [name for name in table.columns if name.startswith("h = ")]
    colors = style.GREEN, style.BLUE, style.VERMILION, style.PURPLE, style.ORANGE, style.SKY
    for name, color in zip(names, cycle(colors), strict=False):
        axes.plot(table["x"], table[name], color=color, label=name)
    axes.set(xlabel="x", ylabel="mean weighted by the kernel", ylim=(-1.8, 2.3))
    axes.legend(loc="upper center", ncols=2)


def _draw_errors(axes: Axes, table: Table) -> None:
    looks = {"float32": (style.VERMILION, "s"), "float64": (style.BLUE, "o")}
    for dtype, (color, marker) in looks.items():
        part = table.where(dtype=dtype)
        distance, law = part["distance"], part["density_predicted"]
        ends = part.interval("density")
        style.intervals(axes, distance, *ends, color=color, marker=marker, label=dtype)
        style.prediction(axes, distance, law, color=color, label=f"_{dtype}, u r^2")
    style.log_axis(axes, "x", np.unique(table["distance"]))
    axes.set(
        yscale="log",
        xlabel="r, distance from the mean in bandwidths",
        ylabel="error of the log density",
    )
    axes.legend(loc="upper left")
