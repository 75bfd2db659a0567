"""Scores of the trained heads of a real model.

all-MiniLM-L6-v2 (`sdpa_lab.minilm`) reads docstrings; every text is an independent draw, with its
own length. A head is measured at the scale that the model was trained with, 1/sqrt(32), and at
others. Its queries, keys and values stay those of the trained model, so "without the scale" shows
what this head's softmax would pass on, not what training without the scale would have led to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from math import log
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

import sdpa

from .. import style, theory
from ..corpus import passages
from ..measure import Figures, cells, sequences
from ..minilm import D_K, HEADS, LAYERS, MODEL, Layer, MiniLM
from ..tools.estimate import LEVEL, Draws, Estimate
from ..tools.inputs import digits, normal, stream
from ..tools.table import Cell, Table
from .correlation import correlated, draw_exponents, exponent
from .criteria import BOOTSTRAP, D_MODEL, best
from .length import half_weight

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]

SHORTEST, LONGEST = 16, 128
"""Tokens of the texts."""

FACTORS = tuple(2.0 ** (i / 2) for i in range(-8, 9))
"""Factors of the scale 1/sqrt(d_k), from 1/16 to 16."""


def texts(model: MiniLM, draws: int, seed: int) -> list[list[int]]:
    """Tokens of `draws` random passages of 16 to 128 tokens."""
    candidates = passages()
    found: list[list[int]] = []
    for i in stream(seed, "texts").permutation(len(candidates)):
        if len(found) == draws:
            break
        tokens = model.tokens(candidates[i])
        if SHORTEST <= len(tokens) <= LONGEST:
            found.append(tokens)
    if not 2 <= draws <= len(found):
        raise ValueError(f"draws: expected 2 to {len(found)} texts, got {draws}")
    return found


def over_layers(
    figures: Callable[[Layer], Figures], *, draws: int, seed: int, model: MiniLM | None = None
) -> Figures:
    """The result of `figures` for every layer of every text: arrays (texts, layers, heads).

    Parameters
    ----------
    figures : callable
        From a `Layer` of one text to arrays (1, heads).
    draws : int
        Texts.
    seed : int
    model : MiniLM, optional
        Default: loaded, which takes half a second.

    Raises
    ------
    ImportError
        The model is not installed.
    """
    model = MiniLM.load() if model is None else model
    rows: list[Figures] = []
    for tokens in texts(model, draws, seed):
        layers: list[Figures] = []

        def attend(layer: Layer, into: list[Figures] = layers) -> None:
            into.append(figures(layer))

        model.hidden([tokens], attend=attend)
        rows.append({name: np.concatenate([part[name] for part in layers]) for name in layers[0]})
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def trained_heads(*, draws: int = 64, seed: int = 0, model: MiniLM | None = None) -> Table:
    """Scores, weights and gradients of every head, with its scale and without.

    Parameters
    ----------
    draws : int
        Texts.
    seed : int
    model : MiniLM, optional

    Returns
    -------
    Table
        layer (0 to 5), head (0 to 11, or "all": the mean over heads), scale ("1/sqrt(32)", "1"); n,
        tokens of a text; the columns of `measure`, and relative_entropy, entropy / ln n. Intervals
        are those between texts.

    Raises
    ------
    ImportError
        The model is not installed.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> table = lab.trained_heads(draws=2)
    >>> rows = [table.row(layer=0, head="all", scale=scale) for scale in ("1/sqrt(32)", "1")]
    >>> trained, removed = (row["entropy"].estimate().value for row in rows)
    >>> trained > 2 * removed
    True
    """
    scales = {"1/sqrt(32)": None, "1": 1.0}

    def figures(layer: Layer) -> Figures:
        found: Figures = {}
        for name, scale in scales.items():
            rng = stream(seed, "trained heads", layer.number)  # the same g for both scales
            part = sequences(layer.query, layer.key, layer.value, rng=rng, scale=scale)
            part["relative_entropy"] = part["entropy"] / log(layer.x.shape[1])
            part["n"] = np.full((1, HEADS), float(layer.x.shape[1]))
            found |= {f"{name} {figure}": numbers for figure, numbers in part.items()}
        return found

    found = over_layers(figures, draws=draws, seed=seed, model=model)
    rows: list[dict[str, Cell]] = []
    for layer in range(LAYERS):
        for head in (*range(HEADS), "all"):
            for scale in scales:
                place: dict[str, Cell] = {"layer": layer, "head": str(head), "scale": scale}
                rows.append({**place, **_cells(found, layer, head, f"{scale} ")})
    return Table(f"{MODEL} on {draws} docstrings", rows)


def trained_choice(*, draws: int = 32, seed: int = 0, model: MiniLM | None = None) -> Table:
    """Where trained heads lie between too even and too sharp.

    Returns
    -------
    Table
        layer, head; sigma, the standard deviation within a row of the scores as trained (root of
        the mean variance); freezing, that at which as many independent normal scores would freeze,
        sqrt(2 ln n); critical (median over rows, mean over texts), the factor of the scale at which
        the largest weight of a row would be 1/2; and the factors of the scale at which the largest
        gradient would pass: score_rms, score_median, query_rms, query_median, with intervals over
        bootstrap samples of texts. All these factors are 1 for the scale as trained; 16 is the
        largest that was tried.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> row = lab.trained_choice(draws=2).row(layer=0, head=0)
    >>> row["sigma"].estimate().value < row["freezing"]
    True
    """

    def figures(layer: Layer) -> Figures:
        found: Figures = {}
        for i, factor in enumerate(FACTORS):
            rng = stream(seed, "trained choice", layer.number)
            scale = factor / D_K**0.5
            part = sequences(layer.query, layer.key, layer.value, rng=rng, scale=scale)
            if factor == 1:
                found["sigma"] = part["row_variance"]
            for name in ("score_rms", "score_median", "query_rms", "query_median"):
                found[f"{name} {i}"] = part[name]
        scores = sdpa.attention_weights(layer.query, layer.key, stage="scores")
        n = scores.shape[-1]
        critical = half_weight(scores.reshape(-1, n)).reshape(1, HEADS, n)
        found["critical"] = np.median(critical, axis=-1)
        found["freezing"] = np.full((1, HEADS), theory.freezing(n))
        return found

    found = over_layers(figures, draws=draws, seed=seed, model=model)
    grid = np.array(FACTORS)
    chosen = stream(seed, "bootstrap").integers(0, draws, (BOOTSTRAP, draws))
    rows: list[dict[str, Cell]] = []
    for layer in range(LAYERS):
        for head in range(HEADS):
            row: dict[str, Cell] = {
                "layer": layer,
                "head": head,
                "sigma": Draws(found["sigma"][:, layer, head], "root_mean"),
                "freezing": float(found["freezing"][:, layer, head].mean()),
                "critical": Draws(found["critical"][:, layer, head]),
            }
            for name in ("score_rms", "score_median", "query_rms", "query_median"):
                columns = [found[f"{name} {i}"][:, layer, head] for i in range(len(grid))]
                row[name], _ = best(np.stack(columns, axis=1), grid, chosen)
            rows.append(row)
    return Table(f"Factors of 1/sqrt(32) that suit each head, {draws} docstrings", rows)


def jacobians(*, draws: int = 16, seed: int = 0, model: MiniLM | None = None) -> Floats:
    """Mean of |J|^2 over the rows of every head by `FACTORS`: (texts, layers, heads, factors).

    |J| is the gradient that softmax passes to the scores, in units of the upstream one
    (`sdpa_lab.measure`).

    Parameters
    ----------
    draws, seed, model
        As for `trained_heads`.
    """

    def figures(layer: Layer) -> Figures:
        found: Figures = {}
        for i, factor in enumerate(FACTORS):
            stats = sdpa.attention_statistics(layer.query, layer.key, scale=factor / D_K**0.5)
            p2, p3 = (np.asarray(a, np.float64) for a in (stats.sum_p2, stats.sum_p3))
            found[str(i)] = np.maximum(p2 - 2 * p3 + p2**2, 0).mean(axis=-1)
        return found

    found = over_layers(figures, draws=draws, seed=seed, model=model)
    return np.stack([found[str(i)] for i in range(len(FACTORS))], axis=-1)


def trained_growth(
    *,
    d_k: Sequence[int] = (2, 4, 8, 16, 32),
    draws: int = 32,
    seed: int = 0,
    model: MiniLM | None = None,
) -> Table:
    """How the spread of scores grows with the width of a trained head.

    The width of a trained head is fixed, but its queries and keys can be projected on d_k random
    directions, the same for both; figures are exact means over the directions (`projected`). The
    standard deviation of scores within rows grows like sqrt(d_k) if the components of a head add up
    independently, and like d_k if they agree.

    Parameters
    ----------
    d_k : sequence of int
        2 to 32.
    draws, seed, model
        As for `trained_heads`.

    Returns
    -------
    Table
        layer, head (0 to 11, or "all"), d_k; std, of unscaled scores within rows (root of the mean
        square); exponent, by which std grows from d_k // 2 to d_k, with an interval over bootstrap
        samples of texts; cosine, between query and key of the same token, both about their means
        over the tokens.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> table = lab.trained_growth(d_k=(16,), draws=2)
    >>> 0.4 < table.row(layer=0, head="0")["exponent"].value < 0.6  # independent components
    True
    """
    widths = sorted({part for width in d_k for part in (width // 2, width)})

    def figures(layer: Layer) -> Figures:
        stats = sdpa.attention_statistics(layer.query, layer.key, scale=1.0)
        whole = np.asarray(stats.score_var, np.float64).mean(axis=-1)
        q, k = (np.asarray(a - a.mean(axis=-2, keepdims=True)) for a in (layer.query, layer.key))
        lengths = [np.square(a, dtype=np.float64).sum(axis=-1) for a in (layer.query, k)]
        product = lengths[0].mean(axis=-1) * lengths[1].mean(axis=-1)
        cosine = (q * k).sum(axis=-1)
        cosine /= np.linalg.norm(q, axis=-1) * np.linalg.norm(k, axis=-1)
        return {
            "cosine": np.asarray(cosine.mean(axis=-1), np.float64),
            **{f"{width}_rms": projected(width, D_K, whole, product) for width in widths},
        }

    found = over_layers(figures, draws=draws, seed=seed, model=model)
    chosen = stream(seed, "bootstrap").integers(0, draws, (BOOTSTRAP, draws))
    rows: list[dict[str, Cell]] = []
    for layer in range(LAYERS):
        for head in (*range(HEADS), "all"):
            own = _cells(found, layer, head)
            for width in d_k:
                power = _exponent(found, layer, head, width, chosen)
                row: dict[str, Cell] = {"layer": layer, "head": str(head), "d_k": width}
                row |= {"std": own[f"{width}_rms"], "exponent": power, "cosine": own["cosine"]}
                rows.append(row)
    return Table(f"Spread of scores in random directions, {draws} docstrings", rows)


def projected(d_k: int, width: int, variance: Floats, lengths: Floats) -> Floats:
    """Variance within rows after projection on d_k random orthonormal directions, their mean.

    P, the projection, has E P_ij P_kl = a delta_ij delta_kl + b (delta_ik delta_jl + delta_il
    delta_jk), the only form that no rotation changes; from tr P = tr P^2 = d_k follow
    b = d_k (D - d_k) / (D (D - 1) (D + 2)) and a = (d_k / D)^2 - 2 b / D, so that

        E (q^T P k)^2 = (a + b) (q.k)^2 + b |q|^2 |k|^2

    Parameters
    ----------
    d_k, width : int
        d_k of D.
    variance, lengths : arrays
        Mean of (q.k)^2 and of |q|^2 |k|^2, with k about the mean of the keys.

    Examples
    --------
    >>> import numpy as np
    >>> from sdpa_lab.experiments.heads import projected
    >>> projected(8, 32, np.array([32.0]), np.array([32.0**2]))     # as independent as can be
    array([8.])
    """
    b = d_k * (width - d_k) / (width * (width - 1) * (width + 2))
    a = (d_k / width) ** 2 - 2 * b / width
    return np.asarray((a + b) * variance + b * lengths)


def inputs_compared(*, draws: int = 64, seed: int = 0, model: MiniLM | None = None) -> Table:
    """Random numbers, images, models trained here and a real model, with the scale and without.

    Parameters
    ----------
    draws : int
        Sequences of each kind.
    seed, model
        As for `trained_heads`.

    Returns
    -------
    Table
        input, scale ("1/sqrt(d_k)", "1"); the columns of `measure`. d_k is 32. Inputs are "random",
        n = 48, and "digits", n = 8, each with random projections of variance 1/d_model; "recall,
        untrained" and "recall, trained", up to 16 models that the laboratory trains itself
        (`sdpa_lab.training.recall`), n = 16, where a draw is a model; "MiniLM layer 0" to 5. Those
        whose packages (scikit-learn; autograd; the model) are not installed are left out.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> table = lab.inputs_compared(draws=2)
    >>> table.row(input="random", scale="1")["saturated"].estimate().value > 0.05
    True
    """
    found: dict[tuple[str, str], Figures] = {}
    inputs = {"random": normal(draws, 48, d_model=D_MODEL, seed=seed)}
    # Without scikit-learn or the model their rows are missing: the table shows what there is.
    with suppress(ImportError):
        inputs["digits"] = digits(draws, d_model=D_MODEL, seed=seed)
    arrays: dict[str, list[npt.NDArray[np.float32]]] = {}
    for kind, x in inputs.items():
        rng = stream(seed, "inputs compared", kind)
        query, key = (x @ w for w in correlated(draws, D_MODEL, D_K, 0.0, rng))
        value = x @ correlated(draws, D_MODEL, D_K, 0.0, rng)[0]
        arrays[kind] = [a[:, None] for a in (query, key, value)]
    with suppress(ImportError):
        arrays |= _recall(min(draws, 16), seed)
    for kind, (query, key, value) in arrays.items():
        for name, scale in {"1/sqrt(d_k)": None, "1": 1.0}.items():
            rng = stream(seed, "upstream", kind)
            found[kind, name] = sequences(query, key, value, rng=rng, scale=scale)
    rows: list[dict[str, Cell]] = [
        {"input": kind, "scale": name, **cells(figures)} for (kind, name), figures in found.items()
    ]
    columns = list(rows[0])[2:]
    with suppress(ImportError):
        for row in trained_heads(draws=draws, seed=seed, model=model).where(head="all").rows:
            name = "1" if row["scale"] == "1" else "1/sqrt(d_k)"
            kept = {column: row[column] for column in columns}
            rows.append({"input": f"MiniLM layer {row['layer']}", "scale": name, **kept})
    return Table(f"{draws} sequences of each kind", rows)


def _recall(models: int, seed: int) -> dict[str, list[npt.NDArray[np.float32]]]:
    """Query, key, value (models, 16 sequences, 16, 32) before and after training."""
    from ..training.recall import Setting, Trained, trained

    setting = Setting(d_k=D_K, seeds=models)
    after = trained(setting, seed)
    best = slice(after.best() * models, (after.best() + 1) * models)
    found = {}
    for name, each in (("untrained", Trained(setting, seed)), ("trained", after)):
        batch = next(each.batches("inputs compared", 16))
        found[f"recall, {name}"] = [a[best] for a in each.project(each.parameters, batch)]
    return found


# ---------------------------------------------------------------------- plots


@style.plot
def plot_trained_heads(table: Table) -> Figure:
    """Spread of scores, and rms and median of the gradients of queries, with the scale and without.

    A dash per head over the layers, marks the means of the layers.
    """
    names = {
        "row_variance": "variance of scores within a row",
        "query_rms": "gradient of queries: root mean square",
        "query_median": "gradient of queries: median",
    }
    scales = {
        "1/sqrt(32)": ("as trained, 1/sqrt(32)", style.SCALED, -0.12),
        "1": ("scale removed", style.UNSCALED, 0.12),
    }
    figure, axes = style.subplots(1, 3, size=(3.9, 3.5), sharex=True)
    axes[2].sharey(axes[1])  # so that one is seen to rise where the other falls
    for ax, (name, title) in zip(axes, names.items(), strict=True):
        for scale, (label, color, shift) in scales.items():
            some = table.where(scale=scale)
            heads, means = some["head"] != "all", some.where(head="all")
            place = some["layer"][heads] + shift
            ax.plot(place, some[name][heads], "_", color=color, markersize=9, alpha=0.45)
            style.intervals(
                ax, means["layer"] + shift, *means.interval(name), color=color, label=label
            )
        ax.set(title=title, yscale="log", xlabel="layer; dashes: its 12 heads")
    axes[0].axhline(1, color="#777777", linewidth=0.8)
    axes[1].set(ylabel="in units of the upstream gradient", ylim=(1e-4, 10))
    axes[0].legend()
    return figure


@style.plot
def plot_trained_choice(table: Table) -> Figure:
    """Heads over their sigma as trained: factors of the largest gradient, or of a key with half."""
    figure, axes = style.subplots(size=(5.4, 4.0))
    names = {"score_rms": "scores, rms", "query_median": "queries, median"}
    names |= {"critical": "a largest weight of 1/2"}
    for (name, label), (color, marker) in zip(names.items(), style.cycle(3), strict=True):
        style.columns(axes, table, "sigma", name, color=color, marker=marker, label=label)
    axes.axhline(1, color="#777777", linewidth=0.8)
    axes.set(
        xlabel="standard deviation of scores within a row, as trained",
        ylabel="factor of the scale; as trained: 1",
    )
    style.log_axis(axes, "x", (0.5, 1, 2, 4, 8))
    style.log_axis(axes, "y", (0.125, 0.25, 0.5, 1, 2, 4, 8, 16))
    axes.legend(title="factor for the largest gradient of")
    return figure


@style.plot
def plot_trained_growth(table: Table) -> Figure:
    """Exponent of the spread in d_k, a line per layer."""
    figure, axes = style.subplots(size=(5.0, 3.6))
    draw_exponents(axes, table)
    return figure


@style.plot
def plot_inputs_compared(table: Table) -> Figure:
    """Line by line each kind of input, with the scale and without."""
    names = {
        "row_variance": "variance within a row",
        "max_weight": "largest weight",
        "query_rms": "gradient of queries, rms",
        "query_dead": "rows without gradient",
    }
    figure, axes = style.subplots(1, len(names), size=(2.7, 3.2), sharey=True)
    kinds = list(dict.fromkeys(table["input"].tolist()))
    for ax, (name, label) in zip(axes, names.items(), strict=True):
        for scale, color in (("1/sqrt(d_k)", style.SCALED), ("1", style.UNSCALED)):
            some = table.where(scale=scale)
            places = [kinds.index(kind) for kind in some["input"]]
            value, low, high = some.interval(name)
            options = {"fmt": "o", "color": color, "label": f"scale {scale}"}
            ax.errorbar(value, places, xerr=np.maximum([value - low, high - value], 0), **options)
        ax.set(xlabel=label)
    axes[0].set(xscale="log")
    style.log_axis(axes[2], "x", (0.001, 0.01, 0.1, 1))
    axes[0].set_yticks(range(len(kinds)), kinds)
    axes[0].invert_yaxis()
    axes[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


# ----------------------------------------------------------------------


def _cells(found: Figures, layer: int, head: int | str, prefix: str = "") -> dict[str, Cell]:
    own = {
        name.removeprefix(prefix): numbers[:, layer]
        for name, numbers in found.items()
        if name.startswith(prefix)
    }
    return cells(own, head if isinstance(head, int) else slice(None))


def _exponent(
    found: Figures,
    layer: int,
    head: int | str,
    width: int,
    chosen: npt.NDArray[np.int64],
) -> Estimate:
    """Of std from half of `width`; percentiles over bootstrap samples of the texts."""
    heads = head if isinstance(head, int) else slice(None)
    low, high = (
        found[f"{d}_rms"][:, layer, heads].reshape(len(found["cosine"]), -1).mean(axis=1)
        for d in (width // 2, width)
    )
    ratio = width / (width // 2)
    powers = 0.5 * np.log(high[chosen].mean(axis=1) / low[chosen].mean(axis=1)) / log(ratio)
    ends = np.quantile(powers, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    value = exponent(low.mean() ** 0.5, high.mean() ** 0.5, ratio)
    return Estimate(value, float(ends[0]), float(ends[1]), len(low))
