"""When does q.k grow like d_k, so that 1/d_k and not 1/sqrt(d_k) is the right scale?

Inputs of `rank` independent N(0, 1) numbers per token, x (n, rank), projections of which a part is
shared, W^K = rho W^Q + sqrt(1 - rho^2) W', with W^Q, W' of independent N(0, 1/rank) elements. For
different tokens x, y the score q.k = x^T M y, M = W^Q (W^K)^T, has mean 0 and variance E |M|_F^2;
|W^Q W'^T|_F^2 has the mean d_k, |W^Q (W^Q)^T|_F^2 the mean d_k + d_k (d_k + 1)/rank (Wishart), so

    Var(q.k) = d_k + rho^2 d_k (d_k + 1) / rank

and std(q.k) grows like sqrt(d_k) up to d_k = rank/rho^2 and like d_k beyond: correlation alone is
not enough, the tokens must lie in fewer directions than d_k. The footnote of Vaswani et al. (2017)
is the case rho = 0; the limit of training at large width, muP's 1/d_k (Yang, Hu et al. 2022), the
other. A token with itself has the mean score rho d_k besides.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from math import log, sqrt
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

import sdpa
from sdpa._arguments import count

from .. import style
from ..tools.estimate import Draws
from ..tools.inputs import stream
from ..tools.table import Cell, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTHS = (4, 8, 16, 32, 64, 128, 256, 512)


def score_std(d_k: int, rho: float, rank: int) -> float:
    """Standard deviation of q.k between different tokens, as derived above.

    Examples
    --------
    >>> from sdpa_lab.experiments.correlation import score_std
    >>> score_std(64, 0.0, 16), round(score_std(64, 1.0, 16), 1)
    (8.0, 18.0)
    """
    return sqrt(d_k + rho**2 * d_k * (d_k + 1) / rank)


def exponent(low: float, high: float, ratio: float) -> float:
    """The power of d_k with which a figure grows, from its values at d_k and ratio * d_k."""
    return log(high / low) / log(ratio)


def correlated_growth(
    *,
    d_k: Iterable[int] = WIDTHS,
    rho: Iterable[float] = (0.0, 0.25, 0.5, 1.0),
    rank: Iterable[int] = (8, 512),
    n: Iterable[int] = (8, 32),
    draws: int = 60,
    seed: int = 0,
) -> Table:
    """Spread of scores over d_k when queries and keys correlate.

    Parameters
    ----------
    d_k : iterable of int
        Ascending, from 2.
    rho : iterable of float in [-1, 1]
        Correlation of the elements of W^Q with those of W^K.
    rank : iterable of int
        Directions that the tokens span.
    n : iterable of int
        Tokens; the law does not have them.
    draws : int
        Heads, each with its own weights and tokens.
    seed : int

    Returns
    -------
    Table
        n, rank, rho, d_k; std of q.k between different tokens (root of the mean square, predicted);
        diagonal, the mean of q.k of a token with itself over d_k (predicted: rho); exponent, by
        which std grows from d_k/2 to d_k, of the law (1/2 to 1).

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> table = lab.correlated_growth(d_k=[256], rho=[0, 1], rank=[8], n=[32])
    >>> table["std"].round(-1), table["exponent"].round(2)
    (array([20., 90.]), array([0.5 , 0.98]))
    """
    rows: list[dict[str, Cell]] = []
    widths = [count("d_k", width, 2) for width in d_k]
    for length, directions, correlation, width in product(n, rank, rho, widths):
        rng = stream(seed, "correlation", directions, str(correlation), width, length)
        x = rng.standard_normal((draws, length, directions), np.float32)
        query, key = (x @ w for w in correlated(draws, directions, width, correlation, rng))
        scores = sdpa.attention_weights(query, key, scale=1.0, stage="scores")
        scores = np.asarray(scores, np.float64)
        off = ~np.eye(length, dtype=bool)
        law = score_std(width, correlation, directions)
        before = score_std(width // 2, correlation, directions)
        own = scores[:, ~off].mean(axis=1) / width
        rows.append(
            {
                "n": length,
                "rank": directions,
                "rho": float(correlation),
                "d_k": width,
                "std": Draws((scores[:, off] ** 2).mean(axis=1), "root_mean", law),
                "diagonal": Draws(own, predicted=float(correlation)),
                "exponent": exponent(before, law, width / (width // 2)),
            }
        )
    return Table("Scores of queries and keys that correlate", rows)


def correlated(
    draws: int, rows: int, columns: int, rho: float, rng: np.random.Generator
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """W^Q, W^K: (draws, rows, columns) of variance 1/rows, element by element correlated by rho."""
    first, other = rng.standard_normal((2, draws, rows, columns), np.float32)
    first, other = first / np.float32(sqrt(rows)), other / np.float32(sqrt(rows))
    return first, np.float32(rho) * first + np.float32(sqrt(1 - rho**2)) * other


@style.plot
def plot_correlated_growth(table: Table, heads: Table | None = None) -> Figure:
    """std(q.k) over d_k at the last n, a panel per rank, with the law; sqrt(d_k) and d_k dashed.

    Parameters
    ----------
    table : Table
        Returned by `correlated_growth`.
    heads : Table, optional
        Returned by `trained_growth`: one more panel has the exponents of the trained heads.
    """
    table = table.where(n=table["n"][-1])
    ranks = list(dict.fromkeys(table["rank"].tolist()))
    panels = len(ranks) + (heads is not None)
    figure, axes = style.subplots(1, panels, size=(4.2, 3.6), squeeze=False)
    for ax, rank in zip(axes[0], ranks, strict=False):
        ax.sharey(axes[0, 0])
        some = table.where(rank=rank)
        rhos = list(dict.fromkeys(some["rho"].tolist()))
        widths = np.array(sorted({int(d) for d in some["d_k"]}))
        for rho, (color, marker) in zip(rhos, style.cycle(len(rhos)), strict=True):
            label = f"correlation rho = {rho:g}"
            options = {"color": color, "marker": marker, "label": label}
            style.columns(ax, some.where(rho=rho), "d_k", "std", **options)
        style.prediction(ax, widths, widths**0.5, limit=True)
        style.prediction(ax, widths, widths / rank**0.5, limit=True)
        style.log_axis(ax, "x", widths.tolist())
        ax.set(xlabel="d_k", yscale="log", title=f"tokens span {rank} directions")
    axes[0, 0].set(ylabel="std of q.k; dashed: slopes 1/2 and 1")
    axes[0, 0].legend()
    if heads is not None:
        draw_exponents(axes[0, -1], heads)
        axes[0, -1].set(title="heads of MiniLM")
    return figure


def draw_exponents(axes: Axes, heads: Table) -> None:
    """Exponents of std(q.k) over d_k, a line per layer of `trained_growth`, all heads together."""
    layers = sorted({int(layer) for layer in heads["layer"]})
    widths = sorted({int(d) for d in heads["d_k"]})
    for layer, (color, marker) in zip(layers, style.cycle(len(layers)), strict=True):
        some = heads.where(layer=layer, head="all")
        options = {"color": color, "marker": marker, "label": f"layer {layer}"}
        style.columns(axes, some, "d_k", "exponent", line=True, **options)
    ends = (widths[0], widths[-1])
    style.prediction(axes, ends, (0.5, 0.5), limit=True, label="independent: 1/2")
    style.log_axis(axes, "x", widths)
    axes.set(
        xlabel="d_k, random directions of the trained heads",
        ylabel="power of d_k in the std of q.k",
    )
    axes.legend()
