"""The spread of scores that lets the largest gradient through, for each target and each measure.

One head before any training: x (n, d_model) of independent N(0, 1) numbers,

    q = x W^Q, k = x W^K      W ~ N(0, 1/d_model);  W^K = rho W^Q + sqrt(1 - rho^2) W'
    s = (sigma / sqrt(d_k)) q k^T, p = softmax(s), out = p v,  v and g = dL/dout ~ N(0, 1)

so that sigma = 1 is the scale 1/sqrt(d_k), sigma = sqrt(d_k) none, and rho correlates queries with
keys, as training does. Targets are S (the scaled scores), Q, K, V and W (W^Q).

By the mean of squares the gradient of S has a maximum in sigma; that of Q, K and W, which have a
factor sigma more, goes on growing, and that of V tends to its limit. The medians of S, Q and K all
have a maximum. So "the scale that keeps gradients alive" has several answers, and none of them is
sigma = 1 at every length: `best_sigma` measures where they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import sdpa

from .. import style, theory
from ..measure import DEAD
from ..tools.estimate import LEVEL, Draws, Estimate
from ..tools.inputs import stream
from ..tools.table import Cell, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]

D_MODEL = 64
TARGETS = ("S", "Q", "K", "V", "W")
SIGMAS = tuple(2.0 ** (i / 2) for i in range(-4, 11))  # 1/4 to 32
BOOTSTRAP = 400


def gradients_over_sigma(
    *,
    n: Iterable[int] = (16, 128, 1024),
    d_k: Iterable[int] = (64,),
    rho: Iterable[float] = (0.0,),
    sigma: Iterable[float] = SIGMAS,
    draws: int = 40,
    seed: int = 0,
) -> Table:
    """The gradients that reach S, Q, K, V and W over the spread of the scores.

    Parameters
    ----------
    n, d_k : iterables of int
    rho : iterable of float in [-1, 1]
        Correlation of W^Q with W^K.
    sigma : iterable of float
        In units of the scale 1/sqrt(d_k).
    draws : int
        Heads, each with its own weights and input; all sigma share the heads of one n, d_k and rho.
    seed : int

    Returns
    -------
    Table
        n, d_k, rho, sigma, target, and of the norms of the rows of the gradient, in units of the
        norm of a row of g: rms (predicted where rho = 0, but for W, by `theory.attention`, with
        d_k the one of the law), median (within a head; mean over heads), dead (share of rows below
        0.01). W is one matrix per head: its norm over that of g, the median that of heads.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> table = lab.gradients_over_sigma(n=[64], sigma=[1, 8])
    >>> one, eight = (table.row(sigma=s, target="Q")["median"].estimate().value for s in (1, 8))
    >>> 1.5 < eight / one < 9
    True
    """
    rows: list[dict[str, Cell]] = []
    spreads = tuple(sigma)
    for length, width, correlation in product(n, d_k, rho):
        measured = _measured(length, width, correlation, spreads, draws, seed)
        for i, spread in enumerate(spreads):
            laws = _laws(length, width, spread) if correlation == 0 else {}
            for target in TARGETS:
                square, median, dead = (
                    measured[target, name][:, i] for name in ("rms", "median", "dead")
                )
                cells: dict[str, Cell] = {
                    "rms": Draws(square, "root_mean", laws.get(target)),
                    "median": Draws(median, "median" if target == "W" else "mean"),
                    "dead": Draws(dead, "share"),
                }
                place = {"n": length, "d_k": width, "rho": correlation, "sigma": float(spread)}
                rows.append({**place, "target": target, **cells})
    return Table("Gradients in units of the upstream gradient", rows)


def best_sigma(
    *,
    n: Iterable[int] = (8, 32, 128, 512),
    d_k: Iterable[int] = (16, 64, 256),
    rho: Iterable[float] = (0.0,),
    sigma: Iterable[float] = SIGMAS,
    draws: int = 20,
    seed: int = 0,
) -> Table:
    """The spread of scores at which the gradient that reaches each target is largest.

    1/sqrt(d_k) is sigma = 1: the figure says how many times too small that scale is for the largest
    gradient.

    Parameters
    ----------
    n, d_k, rho, sigma, draws, seed
        As for `gradients_over_sigma`. The maximum is searched on the grid `sigma`, of numbers above
        0, and between its points by a parabola in ln(sigma) through the largest and its neighbours.

    Returns
    -------
    Table
        n, d_k, rho, target, by_rms and by_median: the sigma of the maximum. Intervals are
        percentiles over bootstrap samples of the heads (Efron & Tibshirani 1993, chapter 13), which
        are somewhat too short where `draws` is small; for S `lab.best_scale` is exact. Where
        the gradient still grows at the end of the grid, that end is given, as a lower bound;
        grows_rms and grows_median are the shares of samples in which it does.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> table = lab.best_sigma(n=[64], d_k=[64], draws=20)
    >>> 2 < table.where(target="S")["by_rms"][0] < 5, table.where(target="Q")["grows_rms"][0] > 0.9
    (np.True_, np.True_)
    """
    rows: list[dict[str, Cell]] = []
    grid = np.unique(np.array(tuple(sigma), np.float64))
    if not (grid > 0).all() or not len(grid):
        raise ValueError(f"sigma: expected numbers above 0, got {grid.tolist()}")
    for length, width, correlation in product(n, d_k, rho):
        measured = _measured(length, width, correlation, tuple(grid), draws, seed)
        chosen = stream(seed, "bootstrap", length, width).integers(0, draws, (BOOTSTRAP, draws))
        for target in TARGETS:
            place: dict[str, Cell] = {"n": length, "d_k": width, "rho": correlation}
            cells: dict[str, Cell] = {}
            for name in ("rms", "median"):
                largest, grows = best(measured[target, name], grid, chosen)
                cells |= {f"by_{name}": largest, f"grows_{name}": grows}
            rows.append({**place, "target": target, **cells})
    return Table("sigma of the largest gradient; 1 with 1/sqrt(d_k)", rows)


def averaging(
    *,
    n: Iterable[int] = (8, 32, 128, 512, 2048),
    common: Iterable[float] = (0.0, 0.5, 0.9),
    d_k: int = 64,
    draws: int = 40,
    seed: int = 0,
) -> Table:
    """Gradients with scaling on, over the length and over what the tokens have in common.

    The tokens share a part, x = sqrt(common) u + sqrt(1 - common) z with one vector u per sequence,
    as deep layers make them (Dong et al. 2021, rank collapse; Noci et al. 2022); v = x W^V, and the
    upstream gradient is the same g for all rows, as it is under mean pooling.

    Parameters
    ----------
    n : iterable of int
    common : iterable of float in [0, 1)
        Correlation of any two tokens.
    d_k, draws, seed

    Returns
    -------
    Table
        n, common; query, key, value: rms of the norms of the rows of dL/dQ, dL/dK, dL/dV, in units
        of |g|; w_query, w_key, w_value: rms norm of dL/dW over n |g|. query has a prediction: with
        A the covariance of x under the weights of a row, dL/dq = scale (W^K)^T A W^V g, so that

            |dL/dq|^2 / |g|^2 = (1 - common)^2 ((1 - sum p^2)^2 / d_model + fluctuations of A)

        The fluctuations are the law of independent values, `theory.attention`, and fall like 1/n;
        the first term does not, since values and keys come from the same tokens. W^K and the
        weights are taken as independent, which is right to O(1/d_model).

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> table = lab.averaging(n=[128], common=[0.0, 0.9])
    >>> apart, alike = table["query"]
    >>> 8 < apart / alike < 13                                  # 1 - common: not saturation
    np.True_
    """
    rows: list[dict[str, Cell]] = []
    for length, share in product(n, common):
        rng = stream(seed, "averaging", length, str(share))
        shared = rng.standard_normal((draws, 1, D_MODEL), np.float32)
        x = rng.standard_normal((draws, length, D_MODEL), np.float32)
        x = np.float32(sqrt(share)) * shared + np.float32(sqrt(1 - share)) * x
        query, key, value = (
            x @ (rng.standard_normal((draws, D_MODEL, d), np.float32) / np.float32(sqrt(D_MODEL)))
            for d in (d_k, d_k, D_MODEL)
        )
        upstream = np.broadcast_to(rng.standard_normal((draws, 1, D_MODEL), np.float32), x.shape)
        out, lse = sdpa.attention_forward(query, key, value)
        grads = sdpa.attention_backward(upstream, query, key, value, out, lse)
        cells: dict[str, Cell] = {}
        for name in ("query", "key", "value"):
            law = _averaging_law(length, share, d_k) if name == "query" else None
            square = _row_squares(getattr(grads, name)).mean(axis=1) / D_MODEL
            cells[name] = Draws(square, "root_mean", law)
        for name in ("query", "key", "value"):
            weight = x.swapaxes(1, 2) @ np.asarray(getattr(grads, name))
            square = _row_squares(weight).sum(axis=1) / (D_MODEL * length**2)
            cells[f"w_{name}"] = Draws(square, "root_mean")
        rows.append({"n": length, "common": share, **cells})
    return Table("Gradients with 1/sqrt(d_k), tokens that share a part", rows)


# ---------------------------------------------------------------------- plots


@style.plot
def plot_gradients_over_sigma(table: Table) -> Figure:
    """A panel per target, a colour per n: rms, with its law where there is one, and median."""
    targets = list(dict.fromkeys(table["target"].tolist()))
    lengths = sorted({int(n) for n in table["n"]})
    figure, axes = style.subplots(1, len(targets), size=(2.7, 3.2), squeeze=False)
    for ax, target in zip(axes[0], targets, strict=True):
        for length, (color, marker) in zip(lengths, style.cycle(len(lengths)), strict=True):
            some = table.where(target=target, n=length)
            style.columns(
                ax, some, "sigma", "rms", color=color, marker=marker, label=f"n = {length}"
            )
            style.columns(ax, some, "sigma", "median", color=color, marker=".", line=True)
        ax.axvline(1, color="#777777", linewidth=0.8)
        ax.set(
            xscale="log", yscale="log", title=f"dL/d{target}", xlabel="sigma; 1 with 1/sqrt(d_k)"
        )
    axes[0, 0].set(ylabel="norm of a row / |g|")
    axes[0, 0].legend(title="marks: rms, dots: median")
    return figure


@style.plot
def plot_best_sigma(table: Table) -> Figure:
    """The best sigma over n, by rms and by median, a colour per target and a mark per d_k.

    A mark is missing where a gradient still grows at the end of the grid.
    """
    figure, axes = style.subplots(1, 2, size=(4.4, 3.5), sharey=True)
    targets = list(dict.fromkeys(table["target"].tolist()))
    widths = sorted({int(d) for d in table["d_k"]})
    lengths = sorted({int(n) for n in table["n"]})
    for ax, name in zip(axes, ("by_rms", "by_median"), strict=True):
        for target, (color, _) in zip(targets, style.cycle(len(targets)), strict=True):
            for i, width in enumerate(widths):
                some = table.where(target=target, d_k=width)
                kept = some[f"grows_{name.removeprefix('by_')}"] < 0.5
                points = (ends[kept] for ends in some.interval(name))
                label = f"dL/d{target}" if i == 0 else None
                place = some["n"][kept] * 1.06**i
                mark = style.MARKERS[i]
                style.intervals(
                    ax, place, *points, color=color, marker=mark, line=True, label=label
                )
        ax.axhline(1, color="#777777", linewidth=0.8)
        style.log_axis(ax, "x", lengths)
        ax.set(xlabel="keys n", title=f"largest {name.removeprefix('by_')}")
    fine = np.unique(np.geomspace(lengths[0], lengths[-1], 15).round().astype(int))
    exact = [theory.best_sigma(int(n)) for n in fine]
    style.prediction(axes[0], fine, exact, label="dL/dS, exact")
    style.log_axis(axes[0], "y", (1, 2, 4, 8, 16))
    axes[0].set(ylabel="sigma of the largest gradient; 1 with 1/sqrt(d_k)")
    axes[0].legend(handles=axes[0].lines[-1:])
    title = f"marks from the left:\nd_k = {', '.join(map(str, widths))}"
    axes[1].legend(title=title, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


@style.plot
def plot_averaging(table: Table) -> Figure:
    """Gradients over n with scaling on: dL/dQ with its law, and those of the projections."""
    names = {"query": "dL/dQ, rms of rows / |g|", "w_query": "dL/dW^Q, / $n |g|$"}
    names |= {"w_key": "dL/dW^K, / $n |g|$", "w_value": "dL/dW^V, / $n |g|$"}
    figure, axes = style.subplots(1, len(names), size=(3.0, 3.2), sharey=True)
    shares = list(dict.fromkeys(table["common"].tolist()))
    for ax, (name, title) in zip(axes, names.items(), strict=True):
        for share, (color, marker) in zip(shares, style.cycle(len(shares)), strict=True):
            label = f"correlation of tokens {share:g}"
            some = table.where(common=share)
            style.columns(ax, some, "n", name, color=color, marker=marker, label=label)
        style.log_axis(ax, "x", sorted({int(n) for n in table["n"]}))
        ax.set(xlabel="tokens n", yscale="log", title=title)
    axes[0].set(ylabel="gradient, in units of the upstream one")
    axes[0].legend()
    return figure


# ---------------------------------------------------------------------- measuring


def _measured(
    n: int, d_k: int, rho: float, sigma: tuple[float, ...], draws: int, seed: int
) -> dict[tuple[str, str], Floats]:
    """(target, "rms" | "median" | "dead") to (draws, sigmas); rms are mean squares."""
    rng = stream(seed, "gradients", n, d_k, str(rho))
    parts: dict[tuple[str, str], list[Floats]] = {}
    for _ in range(draws):
        x, query, key, value, upstream = _head(n, d_k, rho, rng)
        norms = {target: np.empty((len(sigma), n)) for target in TARGETS}
        for i, spread in enumerate(sigma):
            squares = _squares(query, key, value, upstream, spread / sqrt(d_k), x)
            for target in TARGETS:
                norms[target][i] = squares[target][0]
        for target, square in norms.items():
            for name, figure in (
                ("rms", square.mean(axis=1)),
                ("median", np.median(np.sqrt(square), axis=1)),
                ("dead", (square < DEAD**2).mean(axis=1)),
            ):
                parts.setdefault((target, name), []).append(figure)
    return {name: np.array(part) for name, part in parts.items()}


def _head(n: int, d_k: int, rho: float, rng: np.random.Generator) -> list[npt.NDArray[np.float32]]:
    """x, query, key, value, g: (1, n, ...)."""
    x, value, upstream = rng.standard_normal((3, 1, n, D_MODEL), np.float32)
    w_query, other = rng.standard_normal((2, D_MODEL, d_k), np.float32) / np.float32(sqrt(D_MODEL))
    w_key = np.float32(rho) * w_query + np.float32(sqrt(1 - rho**2)) * other
    return [x, x @ w_query, x @ w_key, value, upstream]


def _squares(
    query: npt.NDArray[np.float32],
    key: npt.NDArray[np.float32],
    value: npt.NDArray[np.float32],
    upstream: npt.NDArray[np.float32],
    scale: float,
    x: npt.NDArray[np.float32] | None = None,
) -> dict[str, Floats]:
    """Squared norms of the rows of each gradient over the mean one of g: (draws, n).

    For S from the statistics: its mean over values and g is exact, so neither is drawn.
    """
    out, lse = sdpa.attention_forward(query, key, value, scale=scale)
    grads = sdpa.attention_backward(upstream, query, key, value, out, lse, scale=scale)
    stats = sdpa.attention_statistics(query, key, scale=scale)
    p2, p3 = np.asarray(stats.sum_p2, np.float64), np.asarray(stats.sum_p3, np.float64)
    d_v = value.shape[-1]
    squares = {"S": np.maximum(p2 - 2 * p3 + p2**2, 0)}
    for target, name in (("Q", "query"), ("K", "key"), ("V", "value")):
        squares[target] = _row_squares(getattr(grads, name)) / d_v
    if x is not None:
        # |dL/dW|^2 by row of g, the same for all rows: a matrix has one norm.
        whole = _row_squares(x.swapaxes(1, 2) @ np.asarray(grads.query)).sum(axis=1)
        squares["W"] = np.broadcast_to((whole / (d_v * x.shape[1]))[:, None], x.shape[:2])
    return squares


def _row_squares(rows: npt.NDArray[Any]) -> Floats:
    squares: Floats = (np.asarray(rows, np.float64) ** 2).sum(axis=-1)
    return squares


def _laws(n: int, d_k: int, sigma: float) -> dict[str, float]:
    """Exact for independent normal q, k: here they share x, which the measurement may show."""
    law = theory.attention(n, d_k, sigma / sqrt(d_k))
    return {"S": law.grad_score, "Q": law.grad_query, "K": law.grad_key, "V": law.grad_value}


def _averaging_law(n: int, common: float, d_k: int) -> float:
    # Softmax depends on q . (k_j - mean k), of variance (1 - common) |q|^2 / d_k; the part of the
    # values that counts has variance 1 - common, too.
    law = theory.attention(n, d_k, sqrt((1 - common) / d_k))
    steady = ((1 - common) * (1 - law.sum_p2)) ** 2 / D_MODEL
    return sqrt((1 - common) * law.grad_query**2 + steady)


def best(values: Floats, grid: Floats, chosen: npt.NDArray[np.int64]) -> tuple[Estimate, float]:
    """Where the mean over draws is largest, and in which share of bootstrap samples at the end.

    `values` (draws, grid); `chosen` (samples, draws) are the draws of each bootstrap sample.
    """
    tails = (1 - LEVEL) / 2
    found = peak(values[chosen].mean(axis=1), grid)
    low, high = np.quantile(found, [tails, 1 - tails])
    value = float(peak(values.mean(axis=0), grid))
    place = Estimate(value, min(float(low), value), max(float(high), value), len(values))
    return place, float((found == grid[-1]).mean())


def peak(curves: Floats, grid: Floats) -> Floats:
    """Where curves over an ascending grid, (..., grid), are largest, by the parabola through the
    largest and its neighbours in the logarithms of both; or at an end."""
    i = np.argmax(curves, axis=-1)
    if len(grid) < 3:
        return np.asarray(grid[i])
    inner = np.clip(i, 1, len(grid) - 2)
    left, middle, right = (
        np.log(np.take_along_axis(curves, inner[..., None] + step, axis=-1)[..., 0] + 1e-300)
        for step in (-1, 0, 1)
    )
    below, above = np.log(grid[inner] / grid[inner - 1]), np.log(grid[inner + 1] / grid[inner])
    rise, fall = (middle - left) / below, (middle - right) / above
    between = i == inner  # where the curve bends down, so that it has a vertex
    bend = np.where(between, 2 * (rise + fall), 1)
    offset = np.where(between, (rise * above - fall * below) / bend, 0)
    return np.asarray(grid[i] * np.exp(offset))
