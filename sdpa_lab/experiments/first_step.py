"""Which power of d_k keeps learning independent of d_k: one step, by optimiser and by divisor.

The model is that of `sdpa_lab.training.recall` (16 keys hold a symbol and a class each, 16 queries
ask for the classes), in NumPy alone:

    logits = softmax(c y W^Q (x W^K)^T) x W^V W^O,    W^Q, W^K (d_model, d_k) of N(0, 1/d_model)

with c = d_k^-power. One step of size r along the direction that an optimiser makes of the
gradients G^Q and G^K moves the scaled scores, to first order in r, by

    r c (y G^Q k^T + q (x G^K)^T)

A gradient of W^Q carries c and, for each query, a mean of keys, whose length grows like
d_k^(1/2). So the scaled score of a query and a key moves by r times

    SGD    c^2 d_k       the step is the gradient itself, and c stands before it and in the score
    Adam   c d_k         every element moves by r, and d_k products add up with one sign
    Muon   c d_k^(1/2)   the step has spectral norm r, whatever d_k is, and meets one key

The powers that make these constant are 1/2, 1 and 1/2. Adam's and Muon's first steps are those
without momentum: the sign of the gradient, and U V^T of its singular value decomposition (Jordan et
al. 2024). Muon with steps of Adam's size, which some scale by the root of the width, is as Adam.

The conditions: d_model is fixed and d_k alone grows; one learning rate for all d_k, small enough
for the first order; the components of q and k start with variance 1; it is the first step. The law
is for d_k at least as large as d_model: below, the rank of W^Q (W^K)^T grows with d_k as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

import sdpa

from .. import style
from ..tools.estimate import Draws, checked_slope
from ..tools.inputs import stream
from ..tools.machine import one_blas_thread
from ..tools.table import Cell, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = npt.NDArray[np.float64]

N, SYMBOLS, CLASSES, SEQUENCES = 16, 32, 8, 8


def _orthogonal(gradient: Array) -> Array:
    left, _, right = np.linalg.svd(gradient, full_matrices=False)
    return np.asarray(left @ right)


class Optimiser(NamedTuple):
    """What an optimiser makes of a gradient at its first step, and what follows from it."""

    direction: Callable[[Array], Array]
    law: Callable[[float], float]
    """From the power of the divisor to the exponent of the change of the scaled scores."""


OPTIMISERS = {
    "SGD": Optimiser(lambda gradient: gradient, lambda power: 1 - 2 * power),
    "Adam": Optimiser(np.sign, lambda power: 1 - power),
    "Muon": Optimiser(_orthogonal, lambda power: 0.5 - power),
}
DIVISORS = {0.0: "1", 0.5: "sqrt(d_k)", 1.0: "d_k"}


def first_step(
    d_k: Iterable[int] = (8, 16, 32, 64, 128, 256, 512),
    *,
    optimisers: Iterable[str] = tuple(OPTIMISERS),
    powers: Iterable[float] = tuple(DIVISORS),
    d_model: int = 32,
    draws: int = 16,
    seed: int = 0,
) -> Table:
    """How far one step of training moves the scaled scores.

    Parameters
    ----------
    d_k : iterable of int
    optimisers : iterable of str
        Of OPTIMISERS.
    powers : iterable of float
        Of d_k in the divisor: 0 is no scale, 1/2 the one of Vaswani et al. 2017, 1 that of muP.
    d_model : int
    draws : int
        Models, each with vectors, weights and data of its own.
    seed : int

    Returns
    -------
    Table
        d_k, optimiser, divisor, change: root mean square over all scores of fresh sequences of the
        change of the scaled score, in units of the learning rate; the mean over models.

    Raises
    ------
    ValueError
        An optimiser is none of OPTIMISERS.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> table = lab.first_step([64, 256], optimisers=["SGD"], powers=[0.5], draws=8)
    >>> one, other = table["change"]
    >>> 0.8 < other / one < 1.25
    np.True_
    """
    named, exponents = _known(optimisers), tuple(powers)
    rows: list[dict[str, Cell]] = []
    for width in d_k:
        found = _changes(width, named, exponents, d_model, draws, seed)
        rows += [
            {
                "d_k": width,
                "optimiser": name,
                "divisor": _divisor(power),
                "change": Draws(found[name, power], "positive"),
            }
            for name in named
            for power in exponents
        ]
    return Table("Change of the scaled scores in one step, per unit of the rate", rows)


def first_step_exponents(
    d_k: Iterable[int] = (8, 16, 32, 64, 128, 256, 512),
    *,
    optimisers: Iterable[str] = tuple(OPTIMISERS),
    powers: Iterable[float] = tuple(DIVISORS),
    d_model: int = 32,
    draws: int = 16,
    seed: int = 0,
) -> Table:
    """Exponent in d_k of that change: slope of its logarithm over ln(d_k), model by model.

    Parameters
    ----------
    d_k, optimisers, powers, d_model, draws, seed
        As for `first_step`.

    Returns
    -------
    Table
        optimiser, divisor, exponent, with the law of this module as prediction. The law is a limit:
        without a scale softmax saturates as d_k grows, which takes from the gradient (SGD), and
        where d_k is smaller than d_model exponents are up to 0.1 lower.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> table = lab.first_step_exponents([64, 512], draws=8)
    >>> [(row["optimiser"], row["divisor"]) for row in table.rows if row["exponent"].predicted == 0]
    [('SGD', 'sqrt(d_k)'), ('Adam', 'd_k'), ('Muon', 'sqrt(d_k)')]
    """
    widths, named, exponents = tuple(d_k), _known(optimisers), tuple(powers)
    checked_slope("d_k", widths)
    found = [_changes(width, named, exponents, d_model, draws, seed) for width in widths]
    rows: list[dict[str, Cell]] = []
    for name in named:
        for power in exponents:
            logs = np.log([changes[name, power] for changes in found])
            slope = np.polyfit(np.log(widths), logs, 1)[0]
            cell = Draws(slope, predicted=OPTIMISERS[name].law(power))
            rows.append({"optimiser": name, "divisor": _divisor(power), "exponent": cell})
    return Table("Exponent in d_k of the change of the scaled scores in one step", rows)


def _known(optimisers: Iterable[str]) -> tuple[str, ...]:
    named = tuple(optimisers)
    if unknown := [name for name in named if name not in OPTIMISERS]:
        raise ValueError(f"optimisers: expected some of {list(OPTIMISERS)}, got {unknown}")
    return named


def _divisor(power: float) -> str:
    return DIVISORS.get(power, f"d_k^{power:g}")


# ---------------------------------------------------------------------- measuring


class _Task(NamedTuple):
    """One model but for W^Q and W^K, and two batches: one for the step, one for the scores."""

    w_value: Array
    w_out: Array
    batches: list[tuple[Array, Array, npt.NDArray[np.int64]]]


def _changes(
    d_k: int,
    optimisers: Sequence[str],
    powers: Sequence[float],
    d_model: int,
    draws: int,
    seed: int,
) -> dict[tuple[str, float], Array]:
    """By optimiser and power: the change of each model."""
    found: dict[tuple[str, float], list[float]] = {}
    with one_blas_thread():
        for model in range(draws):
            task = _task(d_model, stream(seed, "first step", model))
            rng = stream(seed, "first step", model, d_k)
            w_query, w_key = rng.standard_normal((2, d_model, d_k)) / d_model**0.5
            x, y, _ = task.batches[1]
            query, key = y @ w_query, x @ w_key
            for power in powers:
                scale = d_k**-power
                gradients = _gradients(task, w_query, w_key, scale)
                for name in optimisers:
                    step = [OPTIMISERS[name].direction(gradient) for gradient in gradients]
                    moved = (y @ step[0]) @ key.swapaxes(1, 2)
                    moved += query @ (x @ step[1]).swapaxes(1, 2)
                    size = scale * np.sqrt(np.mean(moved**2))
                    found.setdefault((name, power), []).append(float(size))
    return {name: np.array(sizes) for name, sizes in found.items()}


def _task(d_model: int, rng: np.random.Generator) -> _Task:
    keys, queries = rng.standard_normal((2, SYMBOLS, d_model))
    classes = rng.standard_normal((CLASSES, d_model))
    w_value = rng.standard_normal((d_model, d_model)) / d_model**0.5
    w_out = rng.standard_normal((d_model, CLASSES)) / d_model**0.5
    batches = []
    for _ in range(2):
        symbol = rng.random((SEQUENCES, SYMBOLS)).argsort(axis=-1)[:, :N]
        held = rng.integers(CLASSES, size=(SEQUENCES, N))
        order = rng.random((SEQUENCES, N)).argsort(axis=-1)
        x = (keys[symbol] + classes[held]) / 2**0.5
        y = queries[np.take_along_axis(symbol, order, axis=-1)]
        batches.append((x, y, np.take_along_axis(held, order, axis=-1)))
    return _Task(w_value, w_out, batches)


def _gradients(task: _Task, w_query: Array, w_key: Array, scale: float) -> tuple[Array, Array]:
    """Of the cross-entropy to W^Q and W^K."""
    x, y, target = task.batches[0]
    query, key, value = y @ w_query, x @ w_key, x @ task.w_value
    out, lse = sdpa.attention_forward(query, key, value, scale=scale)
    grad = np.array(sdpa.softmax(out @ task.w_out))
    at = target[..., None]
    np.put_along_axis(grad, at, np.take_along_axis(grad, at, axis=-1) - 1, axis=-1)
    upstream = grad @ task.w_out.T / target.size
    grads = sdpa.attention_backward(upstream, query, key, value, out, lse, scale=scale)
    by_query, by_key = (np.asarray(g).reshape(-1, w_query.shape[1]) for g in grads[:2])
    return y.reshape(len(by_query), -1).T @ by_query, x.reshape(len(by_key), -1).T @ by_key


# ---------------------------------------------------------------------- plots

TEX = {"1": "$1$", "sqrt(d_k)": r"$\sqrt{d_k}$", "d_k": "$d_k$"}
LOOKS = {
    "1": (style.UNSCALED, "s"),
    "sqrt(d_k)": (style.SCALED, "o"),
    "d_k": (style.GREEN, "^"),
}


def _looks(table: Table) -> dict[str, tuple[str, str]]:
    divisors = list(dict.fromkeys(str(row["divisor"]) for row in table.rows))
    cycled = dict(zip(divisors, style.cycle(len(divisors)), strict=True))
    return {name: LOOKS.get(name, cycled[name]) for name in divisors}


@style.plot
def plot_first_step(table: Table) -> Figure:
    """A panel per optimiser, a line per divisor: the flat line is the divisor to choose.

    Changes are in units of that at the smallest d_k.
    """
    names = list(dict.fromkeys(str(row["optimiser"]) for row in table.rows))
    figure, panels = style.subplots(1, len(names), size=(3.3, 3.3), sharey=True, squeeze=False)
    for axes, name in zip(panels[0], names, strict=True):
        axes.axhline(1, color=style.BLACK, linewidth=0.8, linestyle=":")
        for divisor, (color, marker) in _looks(table).items():
            part = table.where(optimiser=name, divisor=divisor)
            ends = [column / part["change"][0] for column in part.interval("change")]
            label = TEX.get(divisor, divisor)
            style.intervals(
                axes, part["d_k"], *ends, color=color, marker=marker, line=True, label=label
            )
        axes.set(yscale="log", xlabel="$d_k$", title=name)
        style.log_axis(axes, "x", np.unique(table["d_k"]))
    smallest = min(table["d_k"])
    panels[0][0].set(
        ylabel=f"change of the scaled scores\nin one step, over that at $d_k = {smallest:g}$"
    )
    panels[0][0].legend(title="divided by")
    return figure


@style.plot
def plot_first_step_exponents(table: Table) -> Figure:
    """Exponents with their laws; dotted is 0, where the change does not depend on d_k."""
    figure, axes = style.subplots(size=(5.0, 3.6))
    draw_step_exponents(axes, table)
    return figure


def draw_step_exponents(axes: Axes, table: Table) -> None:
    """The one panel of `plot_first_step_exponents`."""
    names = list(dict.fromkeys(str(row["optimiser"]) for row in table.rows))
    axes.axhline(0, color=style.BLACK, linewidth=1, linestyle=":")
    for divisor, (color, marker) in _looks(table).items():
        part = table.where(divisor=divisor)
        places = [names.index(str(row["optimiser"])) for row in part.rows]
        label = TEX.get(divisor, divisor)
        style.intervals(
            axes, places, *part.interval("exponent"), color=color, marker=marker, label=label
        )
        for place, law in zip(places, part["exponent_predicted"], strict=True):
            axes.plot([place - 0.2, place + 0.2], [law, law], color=color, linewidth=1)
    axes.set_xticks(range(len(names)), names)
    axes.set(
        xlim=(-0.5, len(names) - 0.5),
        ylabel="exponent in $d_k$ of the change\nof the scaled scores in one step",
    )
    axes.annotate("alike at every $d_k$", (-0.45, 0.02), va="bottom", fontsize="small")
    axes.legend(title="divided by; lines: law", ncols=3, loc="upper center", fontsize="small")
    axes.set_ylim(-1.3, 1.75)


__all__ = [
    "first_step",
    "first_step_exponents",
    "plot_first_step",
    "plot_first_step_exponents",
]
