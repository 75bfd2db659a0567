"""How sharp the weights are: entropy and largest weight over d_k, length and scale."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

import sdpa

from .. import style, theory
from ..tools.estimate import Draws
from ..tools.table import Cell, Table
from .growth import Array, matrices

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALES = {"scaled": None, "unscaled": 1.0}
"""The scales by the names that figures use: 1/sqrt(d_k), and none."""


def saturation(
    d_k: Iterable[int] = (4, 16, 64, 256, 1024),
    n: Iterable[int] = (10, 64, 1024),
    *,
    seed: int = 0,
    draws: int = 100,
) -> Table:
    """Entropy and largest weight of attention on independent N(0, 1) queries and keys.

    A draw is one (n, d_k) query and key; scaled and unscaled figures come from the same draws.

    Returns
    -------
    Table
        Columns scale ("scaled" or "unscaled"), d_k, n; entropy and max_weight, means over the rows
        of a matrix, with the laws of `theory.attention`; entropy_share, entropy over ln n;
        tensor_max, the largest weight of the whole matrix; saturated, share of rows with a weight
        above 0.99.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> table = lab.saturation([64], [10], draws=50)
    >>> [str(scale) for scale in table["scale"]], bool(table["entropy"][0] > table["entropy"][1])
    (['scaled', 'unscaled'], True)
    """
    rows: list[dict[str, Cell]] = []
    for width, length in product(d_k, n):
        key = ("saturation", width, length)
        found = matrices(seed, key, draws, _sharpness, (length, width))
        for name, scale in SCALES.items():
            law = theory.attention(length, width, scale)
            entropy = found[f"entropy {name}"]
            rows.append(
                {
                    "scale": name,
                    "d_k": width,
                    "n": length,
                    "entropy": Draws(entropy, predicted=law.entropy),
                    "entropy_share": Draws(
                        entropy / np.log(length), predicted=law.entropy / np.log(length)
                    ),
                    "max_weight": Draws(found[f"max {name}"], predicted=law.max_weight),
                    "tensor_max": Draws(found[f"tensor {name}"]),
                    "saturated": Draws(found[f"saturated {name}"], "share"),
                }
            )
    return Table("Weights of independent queries and keys", rows)


def _sharpness(query: Array, key: Array) -> dict[str, Array]:
    found = {}
    for name, scale in SCALES.items():
        row = sdpa.attention_statistics(query, key, scale=scale)
        found[f"entropy {name}"] = row.entropy.mean(axis=1)
        found[f"max {name}"] = row.max_weight.mean(axis=1)
        found[f"tensor {name}"] = row.max_weight.max(axis=1)
        found[f"saturated {name}"] = (row.max_weight > 0.99).mean(axis=1)
    return found


def freezing(
    sigma: Iterable[float] = (0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16),
    n: Iterable[int] = (10, 64, 1024),
    *,
    seed: int = 0,
    draws: int = 200,
) -> Table:
    """Entropy of softmax over n independent N(0, sigma^2) scores; a draw is one row.

    Returns
    -------
    Table
        Columns n, sigma, entropy and max_weight with the laws of `theory.weights`; limit, the
        entropy of the random energy model for large n (`theory.entropy_limit`).

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> len(lab.freezing([1.0], [10, 64], draws=50))
    2
    """
    rows: list[dict[str, Cell]] = []
    for length, width in product(n, sigma):
        # One column of keys, queries all 1: the scores of a row are sigma times the keys.
        found = matrices(
            seed, ("freezing", length, str(float(width))), draws, _row_of(width), (length, 1)
        )
        law = theory.weights(length, float(width))
        rows.append(
            {
                "n": length,
                "sigma": float(width),
                "entropy": Draws(found["entropy"], predicted=law.entropy),
                "max_weight": Draws(found["max"], predicted=law.max_weight),
                "limit": theory.entropy_limit(length, float(width)),
            }
        )
    return Table("Softmax of independent normal scores", rows)


def _row_of(sigma: float) -> Any:
    def measure(query: Array, key: Array) -> dict[str, Array]:
        row = sdpa.attention_statistics(np.ones((len(key), 1, 1)), key, scale=float(sigma))
        return {"entropy": row.entropy[:, 0], "max": row.max_weight[:, 0]}

    return measure


@style.plot
def plot_saturation(table: Table) -> Figure:
    """Entropy and largest weight over d_k, scaled and not, by length."""
    figure, panels = style.subplots(1, 2)
    lengths = np.unique(table["n"])
    for axes, column in zip(panels, ("entropy_share", "max_weight"), strict=True):
        for name, color in (("scaled", style.SCALED), ("unscaled", style.UNSCALED)):
            for length, marker in zip(lengths, style.MARKERS, strict=False):
                some = table.where(scale=name, n=length)
                label = f"{name}, n = {length}"
                style.columns(axes, some, "d_k", column, color=color, marker=marker, label=label)
        style.log_axis(axes, "x", np.unique(table["d_k"]))
        axes.set(xlabel="d_k", ylim=(0, 1.02))
    panels[0].set(ylabel="entropy of a row / ln n")
    panels[1].set(ylabel="largest weight of a row")
    panels[1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


@style.plot
def plot_ten_weights() -> Figure:
    """One row of ten keys at four standard deviations of its scores, a panel each.

    The scores are ten even quantiles of the normal distribution, times sigma: with the scale at any
    d_k, and without it at d_k = 16, 64 and 256. Nothing is drawn at random.
    """
    n, titles = 10, {1.0: "with 1/sqrt(d_k)", 4.0: "d_k = 16", 8.0: "d_k = 64", 16.0: "d_k = 256"}
    quantiles = np.array([NormalDist().inv_cdf((n - i - 0.5) / n) for i in range(n)])
    figure, panels = style.subplots(1, len(titles), size=(2.2, 2.5), sharey=True)
    for axes, (sigma, title) in zip(panels, titles.items(), strict=True):
        weights = sdpa.softmax(quantiles, temperature=1 / sigma)
        color = style.SCALED if sigma == 1 else style.UNSCALED
        axes.bar(range(1, n + 1), weights, color=color)
        for key, weight in enumerate(weights[:2], 1):
            place = {"xytext": (3, 3), "textcoords": "offset points"}
            axes.annotate(f"{weight:.2g}", (key, weight), **place)
        axes.set(
            xticks=(1, 5, 10),
            xlabel="key, by weight",
            title=f"{title}\nsigma = {sigma:g}",
            ylim=(0, 1.12),
        )
    panels[0].set(ylabel="weight")
    return figure


@style.plot
def plot_freezing(table: Table) -> Figure:
    """Entropy over sigma for each length, with the limit of large n.

    Grey: where scaled scores are at any d_k, and unscaled ones at d_k = 16, 64 and 256.
    """
    figure, axes = style.subplots(size=(6.4, 4.0))
    lengths = np.unique(table["n"])
    fine = np.geomspace(table["sigma"].min(), table["sigma"].max(), 60)
    for length, (color, marker) in zip(lengths, style.cycle(len(lengths)), strict=True):
        some = table.where(n=length)
        points, label = some.interval("entropy"), f"n = {length}"
        style.intervals(axes, some["sigma"], *points, color=color, marker=marker, label=label)
        exact = [theory.weights(int(length), float(s)).entropy for s in fine]
        style.prediction(axes, fine, exact, color=color, label=f"_{label}, exact")
        limit = [theory.entropy_limit(int(length), float(s)) for s in fine]
        style.prediction(axes, fine, limit, color=color, limit=True, label=f"_{label}, large n")
        axes.axvline(theory.freezing(int(length)), color=color, linewidth=0.7, linestyle=":")
    marks = {1.0: "scaled,\nany d_k", 4.0: "d_k = 16", 8.0: "64", 16.0: "256"}
    for sigma, text in marks.items():
        if table["sigma"].min() <= sigma <= table["sigma"].max():
            axes.axvline(sigma, color="#777777", linewidth=0.6)
            place = {"xy": (sigma, 1.0), "xycoords": ("data", "axes fraction")}
            axes.annotate(
                text, **place, xytext=(2, -2), textcoords="offset points", va="top", fontsize=8
            )
    style.log_axis(axes, "x", np.unique(table["sigma"]))
    axes.set(xlabel="standard deviation of the scores; unscaled sqrt(d_k)", ylabel="entropy (nats)")
    title = "solid: exact, dashed: large n,\ndotted: sqrt(2 ln n)"
    # Below the names of the marks; opaque, for their lines run through it.
    legend = axes.legend(title=title, loc="upper right", bbox_to_anchor=(1, 0.92), frameon=True)
    legend.get_frame().set(alpha=1, edgecolor="none")
    return figure
