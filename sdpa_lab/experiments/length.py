"""Sequence length: what dividing by sqrt(d_k) fixes, and what it leaves to n.

A row of n independent normal scores of standard deviation sigma has, for large n and sigma below
the freezing point sqrt(2 ln n), an entropy of ln n - sigma^2/2 (Derrida 1981, the random energy
model): at fixed sigma a fixed *share* exp(-sigma^2/2) of the keys is attended to, so that their
number grows like n and the largest weight falls to 0. The right sigma depends on the figure to be
kept: with sigma^2 proportional to ln n the entropy keeps its share of ln n; to keep the *number* of
keys sigma has to follow the freezing point, a sqrt(ln n) again but a steeper one; a factor ln n
(Su 2021; Chiang & Cholak 2022; Nakanishi 2025) is right where one key stands out from the others by
a gap that does not change with n. `critical` measures that: the inverse temperature at which the
largest weight is 1/2 is set by the gaps below the largest score (Hayase & Karakida 2026), and each
family of scores has its own law in n. `sdpa_lab.longer` asks a trained head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from math import log
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import sdpa
from sdpa._arguments import choice

from .. import style, theory
from ..tools.estimate import Draws
from ..tools.inputs import stream
from ..tools.table import Cell, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]

D_K = 4  # given q, a row of normal keys is exactly normal, whatever d_k
LENGTHS = (16, 64, 256, 1024, 4096)


# ---------------------------------------------------------------------- rules


def _kept(get: Callable[[theory.Weights], float], rising: bool) -> Callable[[int, int], float]:
    """The sigma that gives n keys the figure of `base` keys and sigma = 1; 0 where none does."""

    def sigma(n: int, base: int) -> float:
        wanted = get(theory.weights(base, 1.0))
        # Up to here entropy and largest weight are monotonic, and |J| is for n >= 28.
        low, high = 0.0, theory.freezing(n)
        for _ in range(50):
            middle = (low + high) / 2
            below = get(theory.weights(n, middle)) < wanted
            low, high = (middle, high) if below == rising else (low, middle)
        return low

    return sigma


RULES: dict[str, Callable[[int, int], float]] = {
    "1/sqrt(d_k)": lambda n, base: 1.0,
    "sqrt(ln n)": lambda n, base: (log(n) / log(base)) ** 0.5,
    "ln n": lambda n, base: log(n) / log(base),
    "keeps the number of keys": _kept(lambda law: law.entropy, rising=False),
    "keeps the largest weight": _kept(lambda law: law.max_weight, rising=True),
    "keeps the gradient": _kept(lambda law: law.jacobian, rising=True),
}
"""sigma(n, base), the standard deviation of the scores, 1 at n = base: by what the scale is
1/sqrt(d_k) times, or which figure of the weights it keeps."""


def scale_over_length(
    *,
    n: Iterable[int] = (64, 256, 1024, 4096, 16384),
    rules: Iterable[str] = tuple(RULES),
    base: int = 64,
    draws: int = 200,
    seed: int = 0,
) -> Table:
    """Which figures each rule for the scale keeps constant over the length.

    All rules agree at n = `base`, where the scores have standard deviation 1.

    Parameters
    ----------
    n : iterable of int
        Keys.
    rules : iterable of str
        Of RULES: 1/sqrt(d_k) times a power of ln n, or the scale that, by the exact laws, keeps one
        figure as it is at n = `base`.
    base : int
        At least 2.
    draws : int
        Rows, each with its own query and keys; all rules share the rows of one n.
    seed : int

    Returns
    -------
    Table
        rule, n, sigma, entropy, relative_entropy (entropy / ln n), keys (exp of the entropy),
        max_weight, jacobian; a column's prediction is exact.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> table = lab.scale_over_length(n=[64, 1024], rules=["1/sqrt(d_k)"], draws=300)
    >>> few, many = table["keys"]
    >>> round(many / few)
    16
    """
    known = [choice("rules", rule, RULES) for rule in rules]
    rows: list[dict[str, Cell]] = []
    for length in n:
        query, key = _unit_rows(draws, length, stream(seed, "scale over length", length))
        for rule in known:
            sigma = RULES[rule](length, base)
            found = _statistics(query, key, sigma)
            law = theory.weights(length, sigma)
            relative = law.entropy / log(length)
            rows.append(
                {
                    "rule": rule,
                    "n": length,
                    "sigma": sigma,
                    "entropy": Draws(found["entropy"], predicted=law.entropy),
                    "relative_entropy": Draws(found["entropy"] / log(length), predicted=relative),
                    "keys": Draws(np.exp(found["entropy"])),
                    "max_weight": Draws(found["max_weight"], predicted=law.max_weight),
                    "jacobian": Draws(found["jacobian"], predicted=law.jacobian),
                }
            )
    return Table(f"Rules for the scale that agree at n = {base}", rows)


@style.plot
def plot_scale_over_length(table: Table) -> Figure:
    """For each rule: sigma, keys that count, largest weight and gradient over n."""
    figure, axes = style.subplots(2, 2, size=(4.6, 3.1), sharex=True)
    labels = {
        "sigma": "standard deviation of scores",
        "keys": "keys that count, exp(entropy)",
        "max_weight": "largest weight",
        "jacobian": "mean squared Jacobian norm",
    }
    rules = list(dict.fromkeys(table["rule"].tolist()))
    for rule, (color, marker) in zip(rules, style.cycle(len(rules)), strict=True):
        some = table.where(rule=rule)
        for ax, (name, label) in zip(axes.flat, labels.items(), strict=True):
            points = some.interval(name)
            style.intervals(
                ax, some["n"], *points, color=color, marker=marker, line=True, label=rule
            )
            ax.set(ylabel=label)
            if name != "sigma":
                ax.set(yscale="log")
    for ax in axes.flat:
        style.log_axis(ax, "x", sorted({int(n) for n in table["n"]}))
    for ax in axes[1]:
        ax.set(xlabel="keys n")
    axes[0, 0].legend()
    return figure


# ---------------------------------------------------------------------- critical temperature


def _needle(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    scores = np.zeros(shape)
    scores[:, 0] = 3.0
    return scores


FAMILIES: dict[str, Callable[[np.random.Generator, tuple[int, int]], Floats]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "exponential": lambda rng, shape: rng.exponential(size=shape),
    "uniform": lambda rng, shape: rng.uniform(-(3**0.5), 3**0.5, size=shape),
    "one key 3 above the rest": _needle,
}
"""Scores of a row before the inverse temperature; the first three have variance 1."""


def critical_law(family: str, n: int) -> float:
    """How the inverse temperature at which the largest weight is 1/2 depends on n.

    For large n, and up to a constant factor, it is one over the gaps below the largest score:

    normal                    these are 1/sqrt(2 ln n) times those of exponential scores
    exponential               they do not depend on n
    uniform                   2 sqrt(3)/n
    one key 3 above the rest  exactly ln(n - 1)/3, where n - 1 weights together weigh as much as one
    """
    return {
        "normal": theory.freezing(n),
        "exponential": 1.0,
        "uniform": n / 12**0.5,
        "one key 3 above the rest": log(n - 1) / 3,
    }[family]


def critical(
    *,
    n: Iterable[int] = LENGTHS,
    families: Iterable[str] = tuple(FAMILIES),
    draws: int = 200,
    seed: int = 0,
) -> Table:
    """The inverse temperature at which the largest weight of a row is 1/2, over the length.

    Parameters
    ----------
    n : iterable of int
        Keys, at least 2.
    families : iterable of str
        Of FAMILIES.
    draws : int
        Rows.
    seed : int

    Returns
    -------
    Table
        family, n, beta (median over rows), ratio (beta / `critical_law`): constant over n where the
        law holds. For normal scores the law is that of large n.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> table = lab.critical(n=[64, 4096], families=["one key 3 above the rest"], draws=2)
    >>> table["ratio"].round(3)
    array([1., 1.])
    """
    rows: list[dict[str, Cell]] = []
    known = [choice("families", family, FAMILIES) for family in families]
    for family, length in product(known, n):
        scores = FAMILIES[family](stream(seed, "critical", family, length), (draws, length))
        beta = half_weight(scores)
        law = critical_law(family, length)
        rows.append(
            {
                "family": family,
                "n": length,
                "beta": Draws(beta, "median"),
                "ratio": Draws(beta / law, "median"),
            }
        )
    return Table("Inverse temperature at which the largest weight is 1/2", rows)


def half_weight(scores: npt.NDArray[Any]) -> Floats:
    """Per row of (rows, n): the inverse temperature at which the largest weight is 1/2.

    By bisection in ln(beta), between e^-12 and e^12, through `sdpa.attention_statistics`; infinity
    where it lies beyond or two scores share the maximum.
    """
    gaps = np.asarray(scores, np.float64)
    gaps = gaps - gaps.max(axis=1, keepdims=True)
    tied = (gaps == 0).sum(axis=1) > 1  # each then holds at most 1/2, and rounding may say more
    low, high = np.full(len(gaps), -12.0), np.full(len(gaps), 12.0)
    for _ in range(40):
        middle = (low + high) / 2
        beta = np.exp(middle)[:, None, None]
        # One component: the score is beta times the gap.
        largest = sdpa.attention_statistics(beta, gaps[:, :, None], scale=1.0).max_weight[:, 0]
        low, high = np.where(largest < 0.5, middle, low), np.where(largest < 0.5, high, middle)
    return np.where(tied | (high == 12.0), np.inf, np.exp(low))


@style.plot
def plot_critical(table: Table) -> Figure:
    """The critical inverse temperature over n, and the law of each family, fitted at the last n."""
    figure, axes = style.subplots(size=(5.2, 3.8))
    families = list(dict.fromkeys(table["family"].tolist()))
    lengths = sorted({int(n) for n in table["n"]})
    grid = np.geomspace(lengths[0], lengths[-1], 60)
    for family, (color, marker) in zip(families, style.cycle(len(families)), strict=True):
        some = table.where(family=family)
        points = some.interval("beta")
        style.intervals(axes, some["n"], *points, color=color, marker=marker, label=family)
        factor = some["ratio"][-1]
        curve = [factor * critical_law(family, round(x)) for x in grid]
        style.prediction(axes, grid, curve, color=color, limit=True, label=f"_{family}, law")
    style.log_axis(axes, "x", lengths)
    axes.set(xlabel="keys n", ylabel="inverse temperature for a largest weight 1/2", yscale="log")
    axes.legend()
    return figure


# ----------------------------------------------------------------------


def _unit_rows(
    draws: int, n: int, rng: np.random.Generator
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Queries of length sqrt(d_k), exactly, and normal keys: scores of variance d_k."""
    query = rng.standard_normal((draws, 1, D_K), np.float32)
    query *= np.float32(D_K**0.5) / np.linalg.norm(query, axis=-1, keepdims=True)
    return query, rng.standard_normal((draws, n, D_K), np.float32)


def _statistics(
    query: npt.NDArray[np.float32], key: npt.NDArray[np.float32], sigma: float
) -> dict[str, Floats]:
    """One number per draw, from a single query each."""
    found = sdpa.attention_statistics(query, key, scale=sigma / D_K**0.5)
    row = {name: np.asarray(x[:, 0], np.float64) for name, x in found._asdict().items()}
    row["jacobian"] = row["sum_p2"] - 2 * row["sum_p3"] + row["sum_p2"] ** 2
    return row
