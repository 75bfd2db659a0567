"""A trained head on sequences longer than those of its training, by the factor of its scores.

The recall task (`sdpa_lab.training.recall`) with 512 symbols of 64 components: the head is trained
on sequences of `TRAINED` keys, and its weights stay what they are. On n keys its scores are
multiplied with a factor that is 1 at the trained length, where s = n / TRAINED:

    as trained       1
    sqrt(ln n)       (ln n / ln TRAINED)^(1/2)
    ln n             ln n / ln TRAINED (Su 2021; Chiang & Cholak 2022)
    SSMax            the same, in a head that learns its factor of ln n (Nakanishi 2025)
    0.1 ln s + 1     once
    YaRN             (0.1 ln s + 1)^2: Peng et al. 2023 multiply the query and the key with
                     0.1 ln s + 1, so that scores get its square, DeepSeek's mscale^2
    best             that of the least loss

Equal keys below one that stands out weigh together as many times what one of them weighs as there
are: this is what ln n makes up for. But the scores of a trained head spread, and the largest of
more of them is higher, so that a part of the loss stays whatever the factor is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import log
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import sdpa

from .. import style
from ..tools.estimate import LEVEL, Draws, Estimate, exact
from ..tools.inputs import stream
from ..tools.machine import one_blas_thread
from ..tools.table import Cell, Table
from .criteria import BOOTSTRAP, peak

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..training.recall import Trained

Floats = npt.NDArray[np.float64]

TRAINED, SYMBOLS, WIDTH = 32, 512, 64
"""Keys in training; symbols; d_model, d_k and d_v."""

QUERIES = 2048
"""Per model and length."""

RULES: dict[str, Callable[[float], float]] = {
    "as trained": lambda s: 1.0,
    "sqrt(ln n)": lambda s: _log(s) ** 0.5,
    "ln n": lambda s: _log(s),
    "SSMax": lambda s: _log(s),
    "0.1 ln s + 1": lambda s: 0.1 * log(s) + 1,
    "YaRN": lambda s: (0.1 * log(s) + 1) ** 2,
}
"""The factor of the scores, from s = n / TRAINED."""

GRID = tuple(2.0 ** (i / 4) for i in range(-2, 9))
"""Factors among which, and between which, the best one is searched: 0.71 to 4."""

MARKERS = {
    "as trained": "o",
    "0.1 ln s + 1": "D",
    "sqrt(ln n)": "s",
    "YaRN": "v",
    "ln n": "^",
    "best": "*",
}


def _log(s: float) -> float:
    return log(s * TRAINED) / log(TRAINED)


def longer(
    *,
    n: Iterable[int] = (32, 128, 512),
    steps: int = 2000,
    draws: int = 8,
    seed: int = 0,
) -> Table:
    """What a head that was trained on 32 keys is worth on more, by the factor of its scores.

    Parameters
    ----------
    n : iterable of int
        Keys, 2 to 512.
    steps : int
        Of training under Adam, at the best of three learning rates.
    draws : int
        Models, each with its own symbols.
    seed : int

    Returns
    -------
    Table
        n; rule, a key of RULES, "best", or "grid" for each factor of GRID; factor; loss in nats
        (guessing has 2.08); key, the weight on the key that is asked for; gap, by which its score
        is above the mean of the others, and spread, the standard deviation of those (both after the
        factor). The best factor is searched on other data than the loss is measured on; its
        interval is that of bootstrap samples of models.

    Raises
    ------
    ImportError
        autograd is not installed.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> table = lab.longer(n=[128], steps=300, draws=2)
    >>> plain, by_log = (table.row(rule=rule)["loss"] for rule in ("as trained", "ln n"))
    >>> by_log.estimate().value < plain.estimate().value
    True
    """
    models = {rule: _models(rule, steps, draws, seed) for rule in ("sqrt d_k", "learned")}
    rows: list[dict[str, Cell]] = []
    for length in n:
        search, test = (
            {rule: _Scores(model, length, purpose) for rule, model in models.items()}
            for purpose in ("longer, choice", "longer, test")
        )
        for rule, of in RULES.items():
            factor = of(length / TRAINED)
            scores = test["learned" if rule == "SSMax" else "sqrt d_k"]
            rows.append({"n": length, "rule": rule, "factor": exact(factor), **scores.at(factor)})
        losses = [search["sqrt d_k"].loss(factor) for factor in GRID]
        chosen = stream(seed, "bootstrap").integers(0, draws, (BOOTSTRAP, draws))
        least = _least(np.stack(losses, axis=1), chosen)
        found = test["sqrt d_k"].at(least.value)
        rows.append({"n": length, "rule": "best", "factor": least, **found})
        for value in GRID:
            found = test["sqrt d_k"].at(value)
            rows.append({"n": length, "rule": "grid", "factor": exact(value), **found})
    return Table(f"Heads trained on {TRAINED} keys in {steps} steps, on n keys", rows)


def _models(rule: str, steps: int, draws: int, seed: int) -> Trained:
    """The models of the best learning rate."""
    from ..training import recall

    setting = recall.Setting(
        d_k=WIDTH,
        d_v=WIDTH,
        d_model=WIDTH,
        n=TRAINED,
        symbols=SYMBOLS,
        rule=rule,
        rates=(1e-3, 3e-3, 1e-2),
        seeds=draws,
        steps=steps,
    )
    trained = recall.trained(setting, seed)
    best = trained.best()
    one = recall.Trained(replace(setting, rates=(setting.rates[best],)), seed)
    own = slice(best * draws, (best + 1) * draws)
    one.parameters = {name: w[own] for name, w in trained.parameters.items()}
    return one


class _Scores:
    """Queries, keys and values of all models on fresh data of one length."""

    def __init__(self, model: Trained, n: int, purpose: str) -> None:
        self.model = model
        self.batch = next(model.batches(purpose, max(1, QUERIES // n), n))
        parameters = model.parameters
        with one_blas_thread():
            query, key, self.value = model.project(parameters, self.batch)
        self.scale: float = model.setting.scale
        if "log scale" in parameters:
            query, self.scale = query * np.exp(parameters["log scale"])[..., None], 1.0
        self.query, self.key = query, key

    def loss(self, factor: float) -> Floats:
        """Cross-entropy of each model: (models,)."""
        out = sdpa.attention(self.query, self.key, self.value, scale=factor * self.scale)
        with one_blas_thread():
            return np.asarray(self.model.read(self.model.parameters, out, self.batch), np.float64)

    def at(self, factor: float) -> dict[str, Cell]:
        """Columns of the table."""
        n, scale = self.key.shape[-2], factor * self.scale
        scores = sdpa.attention_weights(self.query, self.key, scale=scale, stage="scores")
        lse = sdpa.attention_statistics(self.query, self.key, scale=scale).lse[..., None]
        own = np.take_along_axis(scores, self.batch.answer, axis=-1)
        weight = np.exp(own - lse).mean(axis=(1, 2, 3), dtype=np.float64)
        own = own[..., 0].astype(np.float64)
        others = (scores.sum(axis=-1, dtype=np.float64) - own) / (n - 1)
        squares = (np.square(scores, dtype=np.float64).sum(axis=-1) - own**2) / (n - 1)
        variance = np.maximum(squares - others**2, 0).mean(axis=(1, 2))
        return {
            "loss": Draws(self.loss(factor), "positive"),
            "key": Draws(weight),
            "gap": Draws((own - others).mean(axis=(1, 2))),
            "spread": Draws(variance, "root_mean"),
        }


def _least(losses: Floats, chosen: npt.NDArray[np.int64]) -> Estimate:
    """The factor of the least mean loss; `losses` (models, GRID), `chosen` (samples, models)."""
    grid = np.array(GRID)
    value = float(peak(np.exp(-losses.mean(axis=0)), grid))
    samples = peak(np.exp(-losses[chosen].mean(axis=1)), grid)
    low, high = np.quantile(samples, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, min(float(low), value), max(float(high), value), len(losses))


# ---------------------------------------------------------------------- plots


def _draw_factors(axes: Any, table: Table) -> None:
    lengths = sorted({int(n) for n in table["n"]})
    for length, (color, _) in zip(lengths, style.cycle(len(lengths)), strict=True):
        curve = table.where(n=length, rule="grid")
        _, low, high = curve.interval("loss")
        axes.plot(curve["factor"], curve["loss"], color=color, linewidth=1.2)
        axes.fill_between(curve["factor"], low, high, color=color, alpha=0.15, linewidth=0)
        axes.annotate(
            f"n = {length}",
            (curve["factor"][-1], curve["loss"][-1]),
            xytext=(4, 0),
            textcoords="offset points",
            color=color,
            va="center",
        )
        # At the trained length all factors are 1.
        for rule, marker in MARKERS.items() if length != TRAINED else [("as trained", "o")]:
            some = table.where(n=length, rule=rule)
            axes.plot(some["factor"], some["loss"], marker, color=color, markersize=6.5)
    for rule, marker in MARKERS.items():
        label = "YaRN, $(0.1\\,\\ln s + 1)^2$" if rule == "YaRN" else rule
        axes.plot([], [], marker, color="#555555", markersize=6.5, label=label)
    style.log_axis(axes, "x", (0.7, 1, 1.4, 2, 2.8, 4))
    axes.set(
        xlabel="factor of the scores",
        ylabel="loss, nats",
        title=f"a head trained on {TRAINED} keys, on n keys",
    )
    axes.legend(loc="upper left", bbox_to_anchor=(1.13, 1.0))


def _draw_random(axes: Any, table: Table) -> None:
    rules = {
        "1/sqrt(d_k)": "1",
        "sqrt(ln n)": "sqrt(ln n)",
        "ln n": "ln n",
        "keeps the number of keys": "what keeps their number",
    }
    for (rule, label), (color, marker) in zip(rules.items(), style.cycle(len(rules)), strict=True):
        some = table.where(rule=rule)
        options = {"color": color, "marker": marker, "label": label}
        style.intervals(axes, some["n"], *some.interval("keys"), line=True, **options)
    style.log_axis(axes, "x", sorted({int(n) for n in table["n"]}))
    style.log_axis(axes, "y", (10, 100, 1000, 10000))
    axes.set(
        xlabel="keys n",
        ylabel=r"keys that count, $e^{\mathrm{entropy}}$",
        title="random scores, 1/sqrt(d_k) times",
    )
    axes.legend()


@style.plot
def plot_longer(table: Table, random: Table | None = None) -> Figure:
    """The loss over the factor of the scores, a curve per length; marks are the rules.

    Parameters
    ----------
    table : Table
        Returned by `longer`.
    random : Table, optional
        Returned by `scale_over_length`: a panel on the left with the keys that count among random
        ones.
    """
    figure, axes = style.subplots(1, 2 if random else 1, size=(4.6, 3.7), squeeze=False)
    if random:
        _draw_random(axes[0, 0], random)
    _draw_factors(axes[0, -1], table)
    return figure
