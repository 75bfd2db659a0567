"""How scores grow with d_k, how normal they are, and which initialisers meet the assumption."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

import sdpa
from sdpa._arguments import choice

from .. import style, theory
from ..tools.estimate import LEVEL, Draws, Z, mean
from ..tools.inputs import stream
from ..tools.table import Cell, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = npt.NDArray[np.float64]
Sampler = Callable[[np.random.Generator, tuple[int, ...]], Array]

COMPONENTS: dict[str, tuple[Sampler, float]] = {
    "normal": (lambda rng, shape: rng.standard_normal(shape), 3.0),
    "uniform": (lambda rng, shape: rng.uniform(-(3**0.5), 3**0.5, shape), 1.8),
    "sign": (lambda rng, shape: rng.choice([-1.0, 1.0], shape), 1.0),
}
"""Independent components of mean 0 and variance 1, and their fourth moments."""

CHUNK = 2**22  # numbers at a time


def matrices(
    seed: int,
    key: Sequence[str | int],
    draws: int,
    measure: Callable[[Array, Array], dict[str, Array]],
    shape: tuple[int, int],
    components: str = "normal",
) -> dict[str, Array]:
    """Measure pairs (query, key) of independent components, in chunks.

    Parameters
    ----------
    seed, key
        Of the stream of random numbers.
    draws : int
    measure : callable
        Takes query and key, both (some draws, *shape), and returns arrays whose first axis counts
        these draws.
    shape : (n, d_k)
    components : str
        One of COMPONENTS.

    Returns
    -------
    dict of ndarray
        What `measure` returned, of all draws.
    """
    rng, sample = stream(seed, *key), COMPONENTS[components][0]
    some = max(1, CHUNK // (shape[0] * max(shape)))
    parts = []
    for start in range(0, draws, some):
        query, key_ = sample(rng, (2, min(some, draws - start), *shape))
        parts.append(measure(query, key_))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def growth(
    d_k: Iterable[int] = (1, 4, 16, 64, 256, 1024),
    n: Iterable[int] = (8, 64),
    *,
    components: str = "normal",
    mean_key: float = 0.0,
    seed: int = 0,
    draws: int = 400,
) -> Table:
    """Moments of raw and scaled scores of independent components; a draw is one n x n matrix.

    Parameters
    ----------
    d_k, n : iterables of int
        Every pair of them.
    components : str
        "normal", "uniform" or "sign", each of mean 0 and variance 1.
    mean_key : float
        Added to every component of every key.
    seed, draws : int

    Returns
    -------
    Table
        Columns components, d_k, n; mean and variance (about 0) of q.k; variance_scaled, that of
        q.k/sqrt(d_k); variance_row, that of the scaled scores within a row; kurtosis (excess) and
        spread, the squared deviation of the variance of one matrix from its law, relative to that.
        Laws: `theory.score_variance`, `row_variance`, and for keys of mean 0 `excess_kurtosis` and,
        if components are normal, `mean_square_spread`.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> table = lab.growth([64], [8], draws=100)
    >>> bool(50 < table["variance"][0] < 80)
    True
    """
    m4 = COMPONENTS[choice("components", components, COMPONENTS)][1]
    rows: list[dict[str, Cell]] = []
    for width, length in product(d_k, n):
        key = ("growth", components, width, length)

        def moments(query: Array, key: Array) -> dict[str, Array]:
            return _moments(query, key + mean_key)

        found = matrices(seed, key, draws, moments, (length, width), components)
        variance, scaled = (
            theory.score_variance(width, scale, mean_key=mean_key) for scale in (1.0, width**-0.5)
        )
        spread = theory.mean_square_spread(length, length, width)
        rows.append(
            {
                "components": components,
                "d_k": width,
                "n": length,
                "mean": Draws(found["mean"], predicted=0.0),
                "variance": Draws(found["square"], predicted=variance),
                "variance_scaled": Draws(found["scaled"], predicted=scaled),
                "variance_row": Draws(
                    found["row"], predicted=theory.row_variance(width, width**-0.5)
                ),
                "kurtosis": Draws(
                    found["fourth"] / variance**2 - 3,
                    predicted=None if mean_key else theory.excess_kurtosis(width, m4, m4),
                ),
                "spread": Draws(
                    (found["square"] / variance - 1) ** 2,
                    predicted=spread if components == "normal" and not mean_key else None,
                ),
            }
        )
    note = f", keys of mean {mean_key:g}" if mean_key else ""
    return Table(f"Scores of independent {components} components{note}", rows)


def _moments(query: Array, key: Array) -> dict[str, Array]:
    raw = sdpa.attention_weights(query, key, scale=1.0, stage="scores")
    scaled = sdpa.attention_weights(query, key, stage="scores")
    axes = (1, 2)
    n = query.shape[1]
    return {
        "mean": raw.mean(axis=axes),
        "square": (raw**2).mean(axis=axes),
        "fourth": (raw**4).mean(axis=axes),
        "scaled": (scaled**2).mean(axis=axes),
        "row": scaled.var(axis=2, ddof=1).mean(axis=1) if n > 1 else np.zeros(len(raw)),
    }


def normality(
    d_k: Iterable[int] = (2, 4, 8, 16, 32, 64, 128, 256, 512),
    n: Iterable[int] = (8, 64),
    *,
    seed: int = 0,
    draws: int = 400,
) -> Table:
    """How far q.k/sqrt(d_k) is from N(0, 1), for normal components; a draw is one n x n matrix.

    Returns
    -------
    Table
        Columns d_k, n; distance, half the difference between the share of scores in [-x, x] and
        that of the normal distribution, at x = 0.742 where Edgeworth's series has its largest
        difference, with its law; kolmogorov, the largest distance at any x, by
        `theory.normal_distance`; beyond_3, the share of scores outside [-3, 3], with its law. No
        law has n in it: a longer sequence has more scores, each of the same distribution.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> table = lab.normality([2], [16], draws=200)
    >>> bool(table["distance"][0] > 0.04)
    True
    """
    x = (3 - 6**0.5) ** 0.5
    inside = 1 - theory.outside(x)

    def measure(query: Array, key: Array) -> dict[str, Array]:
        size = abs(sdpa.attention_weights(query, key, stage="scores"))
        return {
            "near": (size <= x).mean(axis=(1, 2)),
            "beyond": (size > 3).mean(axis=(1, 2)),
        }

    rows: list[dict[str, Cell]] = []
    for length, width in product(n, d_k):
        shape = (length, width)
        found = matrices(seed, ("normality", width, length), draws, measure, shape)
        law = float(theory.normal_excess(x, width))
        rows.append(
            {
                "d_k": width,
                "n": length,
                "distance": Draws((found["near"] - inside) / 2, predicted=law),
                "kolmogorov": theory.normal_distance(width),
                "beyond_3": Draws(found["beyond"], predicted=theory.outside(3, width)),
            }
        )
    return Table("Distance of scaled scores to the normal distribution", rows)


def coverage(
    d_k: Iterable[int] = (16, 64),
    n: Iterable[int] = (8, 32, 128),
    *,
    matrices_each: int = 20,
    seed: int = 0,
    draws: int = 100,
) -> Table:
    """How often 95 % intervals for the variance of a score cover it, computed in two ways.

    From the n^2 entries of one matrix, as if they were independent; and from the mean squares of
    several matrices. A draw is one set of `matrices_each` matrices.

    Returns
    -------
    Table
        Columns d_k, n; entries, the share of intervals from entries that cover the truth, d_k, with
        the law 2 Phi(1.96 r) - 1, r the ratio of the standard error they assume, sqrt(2 + 6/d_k)/n,
        to the true one (`theory.mean_square_spread`); and draws, of those from matrices.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> table = lab.coverage([16], [64], draws=20)
    >>> bool(table["entries"][0] < table["draws"][0])
    True
    """
    rows: list[dict[str, Cell]] = []
    for width, length in product(d_k, n):
        count = draws * matrices_each
        key = ("coverage", width, length)
        found = matrices(seed, key, count, _squares, (length, width))
        half = Z * found["std"] / length
        entries = (abs(found["square"] - width) <= half).reshape(draws, matrices_each)
        sets = found["square"].reshape(draws, matrices_each)
        intervals = [mean(part) for part in sets]
        covers = np.array([found.low <= width <= found.high for found in intervals], np.float64)
        assumed = (2 + 6 / width) ** 0.5 / length
        true = theory.mean_square_spread(length, length, width) ** 0.5
        rows.append(
            {
                "d_k": width,
                "n": length,
                "entries": Draws(
                    entries.mean(axis=1), "share", 1 - theory.outside(Z * assumed / true)
                ),
                "draws": Draws(covers, "share", LEVEL),
            }
        )
    return Table("Share of 95 % intervals that cover the variance", rows)


def _squares(query: Array, key: Array) -> dict[str, Array]:
    square = sdpa.attention_weights(query, key, scale=1.0, stage="scores") ** 2
    return {"square": square.mean(axis=(1, 2)), "std": square.std(axis=(1, 2), ddof=1)}


INITIALISERS: dict[str, Callable[[int, int], float]] = {
    "1/d_model": lambda d_model, d_k: 1 / d_model,
    "Glorot": lambda d_model, d_k: 2 / (d_model + d_k),
    "Glorot, all heads": lambda d_model, d_k: 1 / d_model,
    "Kaiming": lambda d_model, d_k: 2 / d_model,
    "PyTorch Linear": lambda d_model, d_k: 1 / (3 * d_model),
    "PyTorch MultiheadAttention": lambda d_model, d_k: 1 / (2 * d_model),
    "BERT, 0.02": lambda d_model, d_k: 0.02**2,
}
"""Variance of the elements of W^Q and W^K (d_model, d_k) of one head.

"Glorot" takes one head's matrix as the layer, "all heads" the (d_model, d_model) matrix of all
heads; PyTorch's Linear draws from U(-1/sqrt(d_model), 1/sqrt(d_model)), its MultiheadAttention from
Glorot's uniform distribution for the stacked (3 d_model, d_model) matrix.
"""

UNIFORM = {"Glorot", "Glorot, all heads", "PyTorch Linear", "PyTorch MultiheadAttention"}
"""Those whose elements are uniform; of the others they are normal."""


def _projections(name: str, rng: np.random.Generator, d_model: int, d_k: int) -> tuple[Array, ...]:
    """W^Q and W^K of one head, drawn as the initialiser draws them."""
    std = INITIALISERS[name](d_model, d_k) ** 0.5
    shape = (2, d_model, d_k)
    if name in UNIFORM:
        bound = std * 3**0.5
        return tuple(rng.uniform(-bound, bound, shape))
    return tuple(std * rng.standard_normal(shape))


def initialisers(
    d_k: Iterable[int] = (16, 64, 256),
    n: Iterable[int] = (8, 64),
    *,
    d_model: int = 512,
    names: Iterable[str] = tuple(INITIALISERS),
    seed: int = 0,
    draws: int = 60,
) -> Table:
    """Variance of the components of q and of the scaled scores that initialisers give.

    The input x (n, d_model) has independent N(0, 1) components, as after a LayerNorm at its start;
    q = x W^Q and k = x W^K, with projections drawn as each initialiser draws them. A draw is one
    input with its own projections.

    Returns
    -------
    Table
        Columns initialiser, d_k, n, components (their variance, law d_model w with w the variance
        of the elements) and scores (variance of q.k/sqrt(d_k), law (d_model w)^2 (1 + 2/(n
        d_model)): x_i is on both sides of the diagonal).

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> table = lab.initialisers([64], [8], names=["Glorot"], draws=30)
    >>> bool(abs(table["components"][0] - 2 * 512 / (512 + 64)) < 0.1)
    True
    """
    rows: list[dict[str, Cell]] = []
    known = [choice("names", name, INITIALISERS) for name in names]
    for width, length, name in product(d_k, n, known):
        rng = stream(seed, "initialisers", name, width, length)
        found = []
        for _ in range(draws):
            x = rng.standard_normal((length, d_model))
            w_query, w_key = _projections(name, rng, d_model, width)
            query = x @ w_query
            scores = sdpa.attention_weights(query, x @ w_key, stage="scores")
            found.append(((query**2).mean(), (scores**2).mean()))
        components, squares = np.array(found).T
        factor = d_model * INITIALISERS[name](d_model, width)
        law = factor**2 * (1 + 2 / (length * d_model))
        rows.append(
            {
                "initialiser": name,
                "d_k": width,
                "n": length,
                "components": Draws(components, predicted=factor),
                "scores": Draws(squares, predicted=law),
            }
        )
    return Table(f"Variance of q and of scaled scores at initialisation, d_model = {d_model}", rows)


@style.plot
def plot_growth(table: Table, shifted: Table | None = None) -> Figure:
    """Variance over d_k, at the last n: of raw scores, of scaled ones, and within a row.

    Parameters
    ----------
    table : Table
        Returned by `growth`.
    shifted : Table, optional
        Returned by `growth` with `mean_key`: a second panel.
    """
    tables = [table] if shifted is None else [table, shifted]
    figure, panels = style.subplots(1, len(tables), size=(4.4, 3.5), sharey=True, squeeze=False)
    columns = {
        "variance": ("q.k", style.UNSCALED, "o"),
        "variance_scaled": ("q.k / sqrt(d_k)", style.SCALED, "o"),
        "variance_row": ("the same, within a row", style.GREEN, "x"),
    }
    for axes, each in zip(panels[0], tables, strict=True):
        some = each.where(n=each["n"][-1])
        for column, (label, color, marker) in columns.items():
            style.columns(axes, some, "d_k", column, color=color, marker=marker, label=label)
        axes.set(yscale="log", xlabel="d_k")
        style.log_axis(axes, "x", np.unique(some["d_k"]))
    panels[0, 0].set(ylabel="variance of the scores")
    panels[0, 0].legend()
    if shifted is not None:
        panels[0, 0].set(title="components of mean 0")
        panels[0, 1].set(title="keys with a mean in common")
    return figure


@style.plot
def plot_coverage(table: Table) -> Figure:
    """Share of intervals that cover, from entries and from draws."""
    figure, axes = style.subplots()
    widths = np.unique(table["d_k"])
    for width, marker in zip(widths, style.MARKERS, strict=False):
        some = table.where(d_k=width)
        for column, color in (("entries", style.UNSCALED), ("draws", style.SCALED)):
            label = f"from {column}, d_k = {width}"
            style.columns(axes, some, "n", column, color=color, marker=marker, label=label)
    style.log_axis(axes, "x", np.unique(table["n"]))
    axes.set(xlabel="n", ylim=(0, 1.02), ylabel="share of 95 % intervals that cover")
    axes.legend(title="lines: laws")
    return figure


@style.plot
def plot_normality(table: Table) -> Figure:
    """Kolmogorov distance and share beyond three sigma over d_k."""
    figure, (left, right) = style.subplots(1, 2)
    lengths = np.unique(table["n"])
    for length, (color, marker) in zip(lengths, style.cycle(len(lengths)), strict=True):
        some = table.where(n=length)
        options = {"color": color, "marker": marker, "label": f"n = {length}"}
        style.columns(left, some, "d_k", "distance", **options)
        style.columns(right, some, "d_k", "beyond_3", **options)
    widths = some["d_k"]
    style.prediction(left, widths, some["kolmogorov"], color=style.GREEN, label="largest")
    style.prediction(left, widths, 0.13764 / widths, limit=True, label="0.1376 / d_k")
    left.set(yscale="log", ylabel="distance to normal; points: at x = 0.742")
    normal = np.full(len(widths), theory.outside(3))
    style.prediction(right, widths, normal, limit=True, label="normal: 0.27 %")
    right.set(ylabel="share of scaled scores beyond ±3")
    for axes in (left, right):
        style.log_axis(axes, "x", widths)
        axes.set(xlabel="d_k")
        axes.legend()
    return figure


@style.plot
def plot_initialisers(table: Table) -> Figure:
    """Variance of scaled scores by initialiser and d_k."""
    figure, axes = style.subplots(size=(6.4, 3.6))
    table = table.where(n=table["n"][-1])
    alike: dict[tuple[float, ...], list[str]] = {}
    for name in dict.fromkeys(table["initialiser"]):
        alike.setdefault(tuple(table.where(initialiser=name)["scores_predicted"]), []).append(name)
    for names, (color, marker) in zip(alike.values(), style.cycle(len(alike)), strict=True):
        some = table.where(initialiser=names[0])
        label = "\n= ".join(names)
        style.columns(axes, some, "d_k", "scores", color=color, marker=marker, label=label)
    axes.axhline(1, color=style.BLACK, linewidth=0.8, linestyle=":")
    axes.set(yscale="log", xlabel="d_k", ylabel="variance of q.k / sqrt(d_k)")
    style.log_axis(axes, "x", np.unique(table["d_k"]))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
