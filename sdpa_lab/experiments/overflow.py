"""Which scores overflow each dtype, with and without the row's maximum subtracted."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from math import erf, log, sqrt
from typing import TYPE_CHECKING

import numpy as np

import sdpa

from .. import style, theory
from ..tools.estimate import Draws
from ..tools.table import Cell, Table
from .growth import Array, matrices

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LARGEST = {
    "float16": 65504.0,
    "bfloat16": (2 - 2**-7) * 2.0**127,
    "float32": float(np.finfo(np.float32).max),
    "float64": float(np.finfo(np.float64).max),
}
"""Largest finite number of each dtype."""


def overflow(
    d_k: Iterable[int] = (16, 64, 256, 1024, 4096),
    n: Iterable[int] = (10, 64),
    *,
    seed: int = 0,
    draws: int = 100,
) -> Table:
    """Unscaled scores of independent N(0, 1) components against the range of each dtype.

    A draw is one n x n matrix of scores, computed in float64.

    Returns
    -------
    Table
        Columns dtype, d_k, n; score, the share of scores beyond the largest number of the dtype;
        plain, the share whose e^s is, which a softmax without the shift needs, with its law; row,
        the share of rows with such a score; shifted, the share of weights that are not finite with
        the maximum subtracted, as `sdpa.softmax` does, in that dtype where NumPy has it.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> table = lab.overflow([64], [10], draws=50)
    >>> [bool(share > 0) for share in table["plain"]]
    [True, False, False, False]
    """
    rows: list[dict[str, Cell]] = []
    for width, length in product(d_k, n):
        found = matrices(seed, ("overflow", width, length), draws, _shares, (length, width))
        for dtype, largest in LARGEST.items():
            rows.append(
                {
                    "dtype": dtype,
                    "d_k": width,
                    "n": length,
                    "score": Draws(found[f"score {dtype}"], "share"),
                    "plain": Draws(
                        found[f"plain {dtype}"],
                        "share",
                        theory.outside(log(largest) / sqrt(width), width) / 2,
                    ),
                    "row": Draws(found[f"row {dtype}"], "share"),
                    "shifted": Draws(found[f"shifted {dtype}"], "share"),
                }
            )
    return Table("Unscaled scores that overflow", rows)


def _shares(query: Array, key: Array) -> dict[str, Array]:
    raw = sdpa.attention_weights(query, key, scale=1.0, stage="scores")
    axes = (1, 2)
    found = {}
    for dtype, largest in LARGEST.items():
        beyond = raw > log(largest)
        found[f"score {dtype}"] = (abs(raw) > largest).mean(axis=axes)
        found[f"plain {dtype}"] = beyond.mean(axis=axes)
        found[f"row {dtype}"] = beyond.any(axis=2).mean(axis=1)
        # NumPy alone has no bfloat16; its range is that of float32.
        held = raw.astype("float32" if dtype == "bfloat16" else dtype)
        found[f"shifted {dtype}"] = (~np.isfinite(sdpa.softmax(held))).mean(axis=axes)
    return found


@style.plot
def plot_overflow(table: Table) -> Figure:
    """Share of scores whose exponential overflows, over d_k, by dtype."""
    figure, axes = style.subplots(size=(5.6, 3.6))
    table = table.where(n=table["n"][-1])
    fine = np.geomspace(table["d_k"].min(), table["d_k"].max(), 80)
    for (dtype, largest), (color, marker) in zip(LARGEST.items(), style.cycle(4), strict=True):
        some = table.where(dtype=dtype)
        seen = some["plain"] > 0
        points = (ends[seen] for ends in some.interval("plain"))
        style.intervals(axes, some["d_k"][seen], *points, color=color, marker=marker, label=dtype)
        normal = [(1 - erf(log(largest) / sqrt(2 * d))) / 2 for d in fine]
        style.prediction(
            axes, fine, normal, color=color, limit=True, label=f"_{dtype}, normal tail"
        )
        exact = [theory.outside(log(largest) / sqrt(d), round(d)) / 2 for d in fine]
        style.prediction(axes, fine, exact, color=color, label=f"_{dtype}, exact tail")
    style.log_axis(axes, "x", np.unique(table["d_k"]))
    axes.set(
        yscale="log",
        ylim=(1e-6, 1),
        xlabel="d_k",
        ylabel="share of unscaled scores s\nwhose e^s overflows",
    )
    axes.legend(title="solid: exact tail,\ndashed: normal tail")
    return figure
