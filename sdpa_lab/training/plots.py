"""One plot for each experiment on training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import style
from ..experiments.first_step import draw_step_exponents
from ..tools.table import Table
from .recall import CHANCE, SOLVED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RULES = {
    "1": (style.UNSCALED, "s"),
    "log d_k": (style.ORANGE, "v"),
    "sqrt d_k": (style.SCALED, "o"),
    "2 sqrt d_k": (style.SKY, "P"),
    "4 sqrt d_k": (style.BLACK, "X"),
    "d_k": (style.GREEN, "^"),
    "learned": (style.PURPLE, "D"),
}
"""The same in every plot."""

VARIANTS = {
    "none": RULES["1"],
    "1/sqrt(d_k)": RULES["sqrt d_k"],
    "1/d_k": RULES["d_k"],
    "QK-norm": (style.PURPLE, "D"),
    "softcap 50": (style.ORANGE, "v"),
    "QK-clip 100": (style.SKY, "P"),
}
TEX = {
    "1": "$1$",
    "log d_k": r"$\log d_k$",
    "sqrt d_k": r"$\sqrt{d_k}$",
    "2 sqrt d_k": r"$2\sqrt{d_k}$",
    "4 sqrt d_k": r"$4\sqrt{d_k}$",
    "d_k": "$d_k$",
    "none": "no scale",
    "1/sqrt(d_k)": r"$1/\sqrt{d_k}$",
    "1/d_k": "$1/d_k$",
}
"""What stands in legends for the names of rules and variants."""


def _lines(axes: Any, table: Table, x: str, y: str, by: str) -> None:
    """A line with intervals for every value in the column `by`; each rule has its own colour."""
    kinds = dict.fromkeys(row[by] for row in table.rows)
    for kind, (color, marker) in zip(kinds, style.cycle(len(kinds)), strict=True):
        if by in ("rule", "variant"):
            color, marker = (RULES | VARIANTS)[str(kind)]
        part, label = table.where(**{by: kind}), TEX.get(str(kind), str(kind))
        style.columns(axes, part, x, y, color=color, marker=marker, label=label, line=True)


def _loss_axis(axes: Any) -> None:
    axes.axhline(CHANCE, color=style.BLACK, linewidth=1, linestyle=":")
    axes.set_yscale("log")
    axes.set_ylim(None, 5)


FOLDS = {
    "none": "scale in the kernel",
    "initial": "folded into $W^Q$",
    "compensated": "folded with its rate",
}


@style.plot
def plot_scale_rules(table: Table) -> Figure:
    """Loss against learning rate: a panel per d_k and fold, a line per rule; guessing is dotted."""
    widths = list(dict.fromkeys(table["d_k"].tolist()))
    folds = list(dict.fromkeys(table["fold"].tolist()))
    if len(widths) > 1:
        figure, grid = style.subplots(
            len(folds), len(widths), size=(2.9, 2.5), sharex=True, sharey=True, squeeze=False
        )
        panels = grid
    else:
        figure, grid = style.subplots(1, len(folds), size=(3.3, 3.1), sharey=True, squeeze=False)
        panels = grid.T
    for row, fold in zip(panels, folds, strict=True):
        for axes, d_k in zip(row, widths, strict=True):
            part = table.where(d_k=d_k, fold=fold)
            _lines(axes, part, "rate", "loss", "rule")
            style.log_axis(axes, "x", sorted(set(part["rate"].tolist())))
            _loss_axis(axes)
            axes.set_title(f"$d_k = {d_k:g}$, {FOLDS[fold]}", fontsize="small")
            axes.tick_params(axis="x", labelrotation=45)
    for axes in grid[-1]:
        axes.set(xlabel="learning rate")
    for axes in grid[:, 0]:
        axes.set(ylabel="test loss, nats")
    # Not every rule can be folded; the first panel has all.
    rules = panels[0, 0].get_legend_handles_labels()
    grid[0, -1].legend(*rules, title="divided by", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


@style.plot
def plot_divisors(table: Table) -> Figure:
    """Loss at the best learning rate over the divisor: too small harms, too large does not.

    Losses of models that have solved the task are drawn as `recall.SOLVED`.
    """
    figure, axes = style.subplots(size=(5.6, 3.6))
    steps = list(dict.fromkeys(table["steps"].tolist()))
    widths = list(dict.fromkeys(table["d_k"].tolist()))
    for width, (color, marker) in zip(widths, style.cycle(len(widths)), strict=True):
        for count, filled in zip(steps, ("white", color), strict=False):
            part = table.where(d_k=width, steps=count)
            ends = [np.maximum(column, SOLVED) for column in part.interval("loss")]
            label = f"$d_k = {width:g}$, {count:g} steps"
            style.intervals(
                axes, part["ratio"], *ends, color=color, marker=marker, line=True, label=label
            )
            axes.containers[-1].lines[0].set_markerfacecolor(filled)
    _loss_axis(axes)
    axes.set_ylim(SOLVED / 1.6, None)
    axes.annotate(
        "solved",
        (max(table["ratio"]), SOLVED),
        (0, -12),
        ha="right",
        fontsize="small",
        textcoords="offset points",
    )
    axes.axvline(1, color="#777777", linewidth=0.8)
    ratios = sorted(table["ratio"].tolist())
    axes.set(xscale="log", xlabel=r"divisor over $\sqrt{d_k}$", ylabel="test loss, nats")
    ticks = [2.0**i for i in range(-4, 5) if ratios[0] <= 2.0**i <= ratios[-1]]
    style.log_axis(axes, "x", ticks)
    axes.legend()
    return figure


@style.plot
def plot_steps_needed(table: Table) -> Figure:
    """Steps to a loss of a tenth of guessing against d_k."""
    figure, axes = style.subplots()
    _lines(axes, table, "d_k", "steps", "rule")
    style.log_axis(axes, "x", sorted(set(table["d_k"].tolist())))
    axes.set(xlabel="$d_k$", yscale="log", ylabel="steps to a tenth of the loss of guessing")
    axes.legend(title="divided by")
    return figure


@style.plot
def plot_mechanisms(table: Table) -> Figure:
    """Loss at the best learning rate against d_k."""
    figure, axes = style.subplots(size=(5.4, 3.6))
    named = [row | {"kind": f"{row['mechanism']}, {row['rule']}"} for row in table.rows]
    _lines(axes, Table(table.title, named, level=table.level), "d_k", "loss", "kind")
    style.log_axis(axes, "x", sorted(set(table["d_k"].tolist())))
    _loss_axis(axes)
    axes.set(xlabel="$d_k$", ylabel="test loss, nats")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


@style.plot
def plot_lengths(table: Table) -> Figure:
    """Loss at the best learning rate against the length n."""
    figure, axes = style.subplots()
    _lines(axes, table, "n", "loss", "rule")
    style.log_axis(axes, "x", sorted(set(table["n"].tolist())))
    _loss_axis(axes)
    axes.set(xlabel="$n$", ylabel="test loss, nats")
    axes.legend(title="divided by")
    return figure


@style.plot
def plot_other_scale(table: Table) -> Figure:
    """Loss against the scale of the run over that of the training."""
    figure, axes = style.subplots()
    _lines(axes, table, "factor", "loss", "rule")
    factors = sorted(set(table["factor"].tolist()))
    style.log_axis(axes, "x", [f for f in factors if np.log2(f).is_integer()])
    _loss_axis(axes)
    axes.axvline(1, color=style.BLACK, linewidth=0.8)
    axes.set(xlabel="scale of the run / scale of training", ylabel="test loss, nats")
    axes.legend(title="trained divided by")
    return figure


@style.plot
def plot_curves(table: Table) -> Figure:
    """Loss, gradient of W^Q and entropy while models learn."""
    figure, panels = style.subplots(1, 3, size=(3.6, 3.2))
    names = {
        "loss": "test loss, nats",
        "grad W^Q": "norm of the gradient to $W^Q$",
        "entropy": "entropy of a row, nats",
    }
    for axes, (column, label) in zip(panels, names.items(), strict=True):
        _lines(axes, table, "step", column, "rule")
        axes.set(xlabel="step", ylabel=label)
    panels[1].set(yscale="log")
    panels[0].legend(title="divided by")
    return figure


@style.plot
def plot_learning_rates(table: Table) -> Figure:
    """Loss against learning rate, a panel per number of steps; guessing is dotted."""
    horizons = list(dict.fromkeys(table["steps"].tolist()))
    figure, panels = style.subplots(1, len(horizons), sharey=True, squeeze=False)
    for axes, steps in zip(panels[0], horizons, strict=True):
        _draw_rates(axes, table, steps)
    panels[0][0].set(ylabel="test loss, nats")
    return figure


@style.plot
def plot_entropy_collapse(table: Table) -> Figure:
    """Entropy, largest score and weight on the key that is asked for, while models learn."""
    figure, panels = style.subplots(1, 3, size=(3.6, 3.2))
    _draw_entropy(panels, table, ("entropy", "logit", "found"))
    return figure


@style.plot
def plot_stability(rates: Table, collapse: Table) -> Figure:
    """Loss against learning rate; entropy and what it is spent on at a good rate and a large one.

    Parameters
    ----------
    rates, collapse : Table
        Returned by `learning_rates`, of which the most steps are drawn, and `entropy_collapse`.
    """
    figure, panels = style.subplots(1, 3, size=(3.8, 3.4))
    _draw_rates(panels[0], rates, max(rates["steps"]))
    panels[0].set(ylabel="test loss, nats")
    _draw_entropy(panels[1:], collapse, ("entropy", "found"))
    return figure


def _draw_rates(axes: Any, table: Table, steps: int) -> None:
    part = table.where(steps=steps)
    _lines(axes, part, "rate", "loss", "variant")
    _loss_axis(axes)
    axes.set(xscale="log", xlabel="learning rate", title=f"{steps} steps")
    axes.legend()


SHARPNESS = {
    "entropy": "entropy of a row, nats",
    "logit": "largest score, in absolute value",
    "found": "weight on the key asked for",
}


def _draw_entropy(panels: Any, table: Table, columns: Sequence[str]) -> None:
    rates = sorted(set(table["rate"].tolist()))
    kinds = dict.fromkeys((str(row["rule"]), float(str(row["rate"]))) for row in table.rows)
    for rule, rate in kinds:
        part, (color, marker) = table.where(rule=rule, rate=rate), RULES[rule]
        if rate != rates[0]:  # the same colour for one rule, another mark for the larger rate
            marker = {"s": "D", "o": "^"}[marker]
        for axes, column in zip(panels, columns, strict=True):
            label = f"{TEX[rule]}, rate {rate:g}"
            style.columns(
                axes, part, "step", column, color=color, marker=marker, label=label, line=True
            )
    for axes, column in zip(panels, columns, strict=True):
        axes.set(xlabel="step", ylabel=SHARPNESS[column])
        if column == "logit":
            axes.set(yscale="log")
    panels[0].legend(title="divided by")


NORMS = (
    ("sum", r"$|W^Q + W^K|$", style.ORANGE, "s"),
    ("difference", r"$|W^Q - W^K|$", style.BLUE, "."),
    ("control", "random walk", style.BLACK, ""),
)


@style.plot
def plot_divergence(table: Table) -> Figure:
    """Norms of W^Q - W^K and W^Q + W^K per task; and when the first task's difference grows."""
    tasks = list(dict.fromkeys(str(task) for task in table["task"]))
    figure, panels = style.subplots(1, len(tasks) + 1, size=(3.5, 3.2))
    for axes, task in zip(panels, tasks, strict=False):
        part = table.where(task=task)
        for column, label, color, marker in NORMS:
            style.columns(
                axes, part, "step", column, color=color, marker=marker, label=label, line=True
            )
            if column == "sum":  # the difference may lie on it
                axes.containers[-1].lines[0].set(markerfacecolor="white", markersize=6)
        axes.set_title(task.replace(", ", "\n").replace("W^Q = W^K", "$W^Q = W^K$") + " task")
        axes.set(xlabel="step")
        axes.sharey(panels[0])
    panels[0].set(ylabel="norm / that of independent starts")
    panels[0].legend()
    _draw_speed(panels[-1], table.where(task=tasks[0]))
    panels[-1].set_title(f"when: {tasks[0]} task")
    return figure


def _draw_speed(axes: Any, table: Table) -> None:
    """Speed of the difference over its largest one, and loss over that at the start."""
    kinds = (
        ("speed", r"speed of $|W^Q - W^K|$", table["speed"].max(), style.BLUE),
        ("loss", "loss", table["loss"][0], style.VERMILION),
    )
    for column, label, unit, color in kinds:
        ends = [end / unit for end in table.interval(column)]
        style.intervals(axes, table["step"], *ends, color=color, marker=".", line=True, label=label)
    axes.set(xlabel="step", ylabel="share of the largest")
    axes.legend()


@style.plot
def plot_correlation(table: Table) -> Figure:
    """The exponent of std(q.k) in d_k, and the cosine of queries with the keys they ask for."""
    figure, (left, right) = style.subplots(1, 2)
    kinds = (("exponent", r"of $q\cdot k$"), ("exponent of change", r"of the change of $q\cdot k$"))
    for (column, label), (color, marker) in zip(kinds, style.cycle(2), strict=True):
        style.columns(
            left, table, "step", column, color=color, marker=marker, label=label, line=True
        )
    for height, label in ((0.5, "1/2: independent"), (1.0, "1: aligned")):
        left.axhline(height, color=style.BLACK, linewidth=1, linestyle=":")
        left.annotate(label, (table["step"][-1], height), ha="right", va="bottom", fontsize="small")
    left.set(xlabel="step", ylabel="exponent of the std in $d_k$", ylim=(0.4, 1.25))
    left.legend(loc="upper left")
    names = [name for name in table.rows[0] if str(name).startswith("cosine ")]
    for name, (color, marker) in zip(names, style.cycle(len(names)), strict=True):
        label = name.replace("cosine d_k=", "$d_k$ = ")
        style.columns(
            right, table, "step", name, color=color, marker=marker, label=label, line=True
        )
    right.set(xlabel="step", ylabel="cosine of $q$ and the key asked for")
    right.legend()
    return figure


@style.plot
def plot_trained_exponents(table: Table) -> Figure:
    """The exponent of std(q.k) in d_k before and after training, over the power of the divisor."""
    figure, axes = style.subplots()
    _draw_exponents(axes, table)
    return figure


@style.plot
def plot_powers(first: Table, trained: Table) -> Figure:
    """Which divisor makes one step independent of d_k, by optimiser, and what training ends with.

    Parameters
    ----------
    first, trained : Table
        Returned by `sdpa_lab.first_step_exponents` and `trained_exponents`.
    """
    figure, (left, right) = style.subplots(1, 2, size=(4.9, 3.6))
    draw_step_exponents(left, first)
    _draw_exponents(right, trained)
    left.set_title("one step")
    right.set_title("after training by Adam")
    return figure


def _draw_exponents(axes: Any, table: Table) -> None:
    powers = table["power"]
    label = "scaled scores alike at every $d_k$"
    axes.plot(powers, powers, color=style.BLACK, linewidth=1, linestyle=":", label=label)
    kinds = (("start", "before training", style.SKY, "s"), ("trained", "after", style.BLUE, "o"))
    for column, label, color, marker in kinds:
        style.columns(
            axes, table, "power", column, color=color, marker=marker, label=label, line=True
        )
    axes.set(
        xlabel="divided by $d_k$ to this power",
        ylabel=r"exponent of $\operatorname{std}(q\cdot k)$ in $d_k$",
    )
    axes.set_ylim(-0.05, 1.6)
    axes.legend(loc="upper left")


@style.plot
def plot_tied_paths(table: Table) -> Figure:
    """The cosine of the two gradients and the loss."""
    figure, (left, right) = style.subplots(1, 2)
    style.columns(left, table, "step", "cosine", line=True)
    for height, label in ((0.0, "orthogonal"), (-1.0, "in conflict"), (1.0, "in agreement")):
        left.axhline(height, color=style.BLACK, linewidth=1, linestyle=":")
        left.annotate(
            label,
            (table["step"][-1], height),
            xytext=(0, 5),
            textcoords="offset points",
            ha="right",
            fontsize="small",
        )
    left.set(xlabel="step", ylabel="cosine of the two gradients", ylim=(-1.1, 1.25))
    style.columns(right, table, "step", "loss", color=style.VERMILION, line=True)
    right.set(xlabel="step", ylabel="test loss, nats")
    return figure


@style.plot
def plot_saturation(table: Table) -> Figure:
    """Gradients at the start, and the loss after training, against the factor of W^Q and W^K."""
    figure, (left, right) = style.subplots(1, 2)
    for name, (color, marker) in zip(("query", "key", "value"), style.cycle(3), strict=True):
        style.columns(
            left, table, "gain", f"grad {name}", color=color, marker=marker, label=name, line=True
        )
    style.columns(right, table, "gain", "loss", line=True)
    right.axhline(CHANCE, color=style.BLACK, linewidth=1, linestyle=":")
    for axes in (left, right):
        style.log_axis(axes, "x", table["gain"].tolist())
        axes.set(xlabel="factor of $W^Q$ and $W^K$ at the start")
    left.set(ylabel="norm of the gradient at the start", ylim=(0, None))
    left.legend()
    right.set(ylabel="test loss after training, nats", ylim=(0, None))
    return figure


@style.plot
def plot_trained_scores(table: Table) -> Figure:
    """Variance of scaled scores before and after training against d_k, a panel per rule."""
    rules = list(dict.fromkeys(table["rule"].tolist()))
    figure, panels = style.subplots(1, len(rules), sharey=True, squeeze=False)
    for axes, rule in zip(panels[0], rules, strict=True):
        part = table.where(rule=rule)
        for name, (color, marker) in zip(
            ("before", "after", "within row"), style.cycle(3), strict=True
        ):
            label = "after, within a row" if name == "within row" else name
            style.columns(
                axes, part, "d_k", name, color=color, marker=marker, label=label, line=True
            )
        style.log_axis(axes, "x", part["d_k"].tolist())
        axes.axhline(1, color=style.BLACK, linewidth=1, linestyle=":")
        axes.set(xlabel="$d_k$", yscale="log", title=f"divided by {TEX.get(rule, rule)}")
    panels[0][0].set(ylabel="variance of scaled scores")
    panels[0][0].legend(title="training")
    return figure


@style.plot
def plot_tying(table: Table) -> Figure:
    """Loss with one projection and with two, against their width, after the most steps."""
    figure, axes = style.subplots()
    table = table.where(steps=max(table["steps"]))
    for tied, label, (color, marker) in zip(
        (0, 1), ("$W^K$, $W^V$", "$W^K = W^V$"), style.cycle(2), strict=True
    ):
        part = table.where(tied=tied)
        style.columns(
            axes, part, "width", "loss", color=color, marker=marker, label=label, line=True
        )
    style.log_axis(axes, "x", sorted(set(table["width"].tolist())))
    _loss_axis(axes)
    axes.set(xlabel="$d_k = d_v$", ylabel="test loss, nats")
    axes.legend()
    return figure


@style.plot
def plot_start_symmetry(table: Table) -> Figure:
    """Mean entry of W^Q (W^K)^T, log ratio of the norms and antisymmetric share against d_k."""
    figure, panels = style.subplots(1, 3, size=(3.4, 3.0))
    names = {
        "mean entry": "mean entry / its standard deviation",
        "log ratio": r"$\ln |W^Q|^2 - \ln |W^K|^2$",
        "skew": "share in the antisymmetric part",
    }
    for axes, (column, label) in zip(panels, names.items(), strict=True):
        style.columns(axes, table, "d_k", column)
        style.log_axis(axes, "x", table["d_k"].tolist())
        axes.set(xlabel="$d_k$", ylabel=label)
    return figure


@style.plot
def plot_gradients_differ(table: Table) -> Figure:
    """Distance, cosine and ratio of the gradients to Q and to K against n."""
    figure, (left, right) = style.subplots(1, 2)
    kinds = (("distance", "$Q$ and $K$ drawn apart"), ("distance Q=K", "$Q = K$"))
    for (column, label), (color, marker) in zip(kinds, style.cycle(2), strict=True):
        style.columns(left, table, "n", column, color=color, marker=marker, label=label)
    left.axhline(1, color=style.BLACK, linewidth=1, linestyle=":")
    left.set(ylabel=r"$|\partial_Q - \partial_K|$ / joint norm; 1: orthogonal", ylim=(0, 2**0.5))
    for column, (color, marker) in zip(("cosine", "ratio"), style.cycle(2), strict=True):
        style.columns(right, table, "n", column, color=color, marker=marker, label=column)
    right.set(ylabel=r"cosine and $|\partial_Q| / |\partial_K|$")
    for axes in (left, right):
        style.log_axis(axes, "x", table["n"].tolist())
        axes.set(xlabel="$n$")
        axes.legend()
    return figure


PLOTS = {
    "scale_rules": plot_scale_rules,
    "steps_needed": plot_steps_needed,
    "divisors": plot_divisors,
    "mechanisms": plot_mechanisms,
    "lengths": plot_lengths,
    "other_scale": plot_other_scale,
    "curves": plot_curves,
    "learning_rates": plot_learning_rates,
    "entropy_collapse": plot_entropy_collapse,
    "divergence": plot_divergence,
    "correlation": plot_correlation,
    "tied_paths": plot_tied_paths,
    "trained_exponents": plot_trained_exponents,
    "tying": plot_tying,
    "saturation": plot_saturation,
    "trained_scores": plot_trained_scores,
    "start_symmetry": plot_start_symmetry,
    "gradients_differ": plot_gradients_differ,
}
"""By the name of the experiment that makes the table."""
