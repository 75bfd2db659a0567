"""Figures and tables of docs/why.md and docs/zh/why.md.

`python -m sdpa_lab.report.why [NAME ...]` measures what they show and writes docs/why/NAME.svg, the
same with Chinese labels as NAME.zh.svg, and NAME.txt, the table behind it; NAME is one of FIGURES
or TABLES. All of them take some minutes, most of them for the models that are trained.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import sdpa_lab as lab

from .. import style, theory
from ..explore import explore
from ..tools.table import Cell, Table
from .pictures import inline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path("docs", "why")
N, D_K = 64, 64
"""The example of the page: keys, and components of a query and a key."""

WIDTHS = (4, 16, 64, 256, 1024)
SIZE = (4.6, 3.3)
PIXELS = 1.4
"""Per point of a figure, so that its letters are legible on a phone as well."""

LIGHT = {
    **{"page": "#ffffff", "ink": "#1b1f24", "quiet": "#57606a", "line": "#d8dee4"},
    **{"blue": "#0072b2", "point": "#d55e00", "orange": "#b06f00", "green": "#00805f"},
}
DARK = {
    **{"page": "#0d1117", "ink": "#e6edf3", "quiet": "#9198a1", "line": "#30363d"},
    **{"blue": "#56b4e9", "point": "#f0883e", "orange": "#e6b450", "green": "#2fc39a"},
}

CHINESE = {
    "one score": "一个分数",
    "±√dₖ": "±√dₖ",
    "the same, divided by √dₖ": "除以 √dₖ 之后",
    "score q·k": "分数 q·k",
    "largest weight of a row": "一行中最大的权重",
    "standard deviation of the scores": "分数的标准差",
    "divided by √dₖ": "除以 √dₖ",
    "not divided, dₖ = 64": "不缩放，dₖ = 64",
    "norm of ∂L/∂q": "∂L/∂q 的范数",
    "not divided: rms": "不缩放：均方根",
    "not divided: median": "不缩放：中位数",
    "divided by √dₖ: rms": "除以 √dₖ：均方根",
    "divided by √dₖ: median": "除以 √dₖ：中位数",
    "change in one step": "一步更新的变化量",
    "divided by": "除以",
    "not divided": "不缩放",
    "loss, nats": "损失（nat）",
    "divisor over √dₖ": "除数与 √dₖ 之比",
    "steps": "步",
}
"""Labels of the figures; letters, numbers and names of methods stay as they are."""


def spread() -> Table:
    """64 scores of a query by d_k, each with its divisor and without."""
    rows: list[dict[str, Cell]] = []
    for d_k in WIDTHS:
        scores = explore(d_k, N, "1", seed=1).scores
        # One key for each query, so that the scores are independent.
        scattered = np.diagonal(np.roll(scores, -1, axis=1))
        rows += [{"d_k": d_k, "score": float(s), "scaled": float(s) / d_k**0.5} for s in scattered]
    return Table("Scores of independent queries and keys", rows)


@style.plot
def plot_spread(table: Table) -> Figure:
    """Scores against d_k between the two curves of the root."""
    figure, axes = style.subplots(size=SIZE)
    shift = np.random.default_rng(0).uniform(0.85, 1.18, len(table))
    widths = np.geomspace(3, 1400, 60)
    axes.plot(table["d_k"] * shift, table["score"], ".", color=style.UNSCALED, label="one score")
    for sign in (1, -1):
        label = "±√dₖ" if sign == 1 else None
        axes.plot(widths, sign * widths**0.5, color=style.BLACK, linewidth=1.2, label=label)
    axes.plot(
        table["d_k"] * shift,
        table["scaled"],
        ".",
        color=style.SCALED,
        markersize=3,
        label="the same, divided by √dₖ",
    )
    style.log_axis(axes, "x", WIDTHS)
    axes.set(xlabel="dₖ", ylabel="score q·k")
    axes.legend(loc="upper left")
    return figure


def softmax() -> Table:
    """The largest weight over the standard deviation of scores, measured and by law."""
    return lab.saturation((1, 4, 16, 64, 256), (8, N, 1024), draws=20).where(scale="unscaled")


@style.plot
def plot_softmax(table: Table) -> Figure:
    """Curves of three n with their freezing points, and the two settings of the example."""
    figure, axes = style.subplots(size=SIZE)
    sigmas = np.geomspace(0.25, 32, 50)
    looks = zip((8, N, 1024), (style.ORANGE, style.BLACK, style.GREEN), "s^D", strict=True)
    for n, color, marker in looks:
        law = [theory.weights(n, float(sigma)).max_weight for sigma in sigmas]
        axes.plot(sigmas, law, color=color, linewidth=1.3)
        part = table.where(n=n)
        style.intervals(
            axes, part["d_k"] ** 0.5, *part.interval("max_weight"), color=color, marker=marker,
            label=f"n = {n}",
        )  # fmt: skip
        freezing = theory.freezing(n)
        axes.plot([freezing] * 2, [1.02, 0.97], color=color, linewidth=2.5)
        side = {8: "right", N: "center", 1024: "left"}[n]
        axes.text(freezing, 0.91, f"{freezing:.1f}", color=color, ha=side, fontsize="small")
    for sigma, name, color, place, side in (
        (1, "divided by √dₖ", style.SCALED, (0.25, 0.5), "left"),
        (D_K**0.5, "not divided, dₖ = 64", style.UNSCALED, (34, 0.4), "right"),
    ):
        weight = theory.weights(N, sigma).max_weight
        axes.plot(sigma, weight, "o", color=color, markersize=11, fillstyle="none", mew=2.2)
        axes.text(*place, name, color=color, ha=side)
    style.log_axis(axes, "x", (0.25, 0.5, 1, 2, 4, 8, 16, 32))
    axes.set(xlabel="standard deviation of the scores", ylabel="largest weight of a row")
    axes.set_ylim(0, 1.02)
    axes.legend(loc="upper left")
    return figure


def gradients() -> Table:
    """Norms of the gradient of a query by d_k: root mean square and median."""
    table = lab.gradients(WIDTHS, (N,), draws=100)
    return table.select("scale", "d_k", "n", "rms_query", "median_query", "dead_query")


@style.plot
def plot_gradients(table: Table) -> Figure:
    """Root mean square and median part without the scale."""
    figure, axes = style.subplots(size=SIZE)
    for scale, words, color in (
        ("unscaled", "not divided", style.UNSCALED),
        ("scaled", "divided by √dₖ", style.SCALED),
    ):
        part = table.where(scale=scale)
        for column, name, marker in (("rms_query", "rms", "o"), ("median_query", "median", "^")):
            style.intervals(
                axes, part["d_k"], *part.interval(column), color=color, marker=marker, line=True,
                label=f"{words}: {name}",
            )  # fmt: skip
    style.log_axis(axes, "x", WIDTHS)
    style.log_axis(axes, "y", (0.03, 0.1, 0.3, 1, 3, 10, 30))
    axes.set(xlabel="dₖ", ylabel="norm of ∂L/∂q")
    axes.legend(loc="lower left")
    return figure


def step() -> Table:
    """Change of the scaled scores in one step, by optimiser and divisor."""
    return lab.first_step(optimisers=("SGD", "Adam"))


@style.plot
def plot_step(table: Table) -> Figure:
    """A panel per optimiser, in units of the change at the smallest d_k; flat is what is sought."""
    figure, panels = style.subplots(1, 2, size=(2.5, 3.3), sharey=True)
    looks = {
        "1": ("1", style.UNSCALED, "s"),
        "sqrt(d_k)": ("√dₖ", style.SCALED, "o"),
        "d_k": ("dₖ", style.GREEN, "^"),
    }
    for axes, optimiser in zip(panels, ("SGD", "Adam"), strict=True):
        axes.axhline(1, color=style.BLACK, linewidth=0.8, linestyle=":")
        for divisor, (label, color, marker) in looks.items():
            part = table.where(optimiser=optimiser, divisor=divisor)
            ends = [column / part["change"][0] for column in part.interval("change")]
            style.intervals(
                axes, part["d_k"], *ends, color=color, marker=marker, line=True, label=label
            )
        axes.set(yscale="log", xlabel="dₖ", title=optimiser)
        style.log_axis(axes, "x", (8, 32, 128, 512))
    panels[0].set(ylabel="change in one step")
    panels[1].legend(title="divided by", loc="upper left")
    return figure


def step_exponents() -> Table:
    """The slopes of that figure."""
    return lab.first_step_exponents()


def divisors() -> Table:
    """Loss of models that are trained at the best of four rates, by divisor."""
    from ..training.experiments import divisors as trained

    return trained()


@style.plot
def plot_divisors(table: Table) -> Figure:
    """Loss over the divisor, in units of the root of d_k: it is the left side that hurts."""
    figure, axes = style.subplots(size=SIZE)
    colors = (style.ORANGE, style.UNSCALED, style.GREEN, style.BLACK)
    looks = iter(zip(colors, "soD^", strict=True))
    for d_k in dict.fromkeys(table["d_k"].tolist()):
        for steps in dict.fromkeys(table["steps"].tolist()):
            part = table.where(d_k=d_k, steps=steps)
            order = np.argsort(part["ratio"])
            color, marker = next(looks)
            values = [column[order] for column in part.interval("loss")]
            style.intervals(
                axes, part["ratio"][order], *values, color=color, marker=marker, line=True,
                label=f"dₖ = {d_k}, {steps} steps",
            )  # fmt: skip
    axes.axvline(1, color=style.SCALED, linewidth=1.2, linestyle="--")
    axes.axhline(np.log(8), color=style.BLACK, linewidth=0.8, linestyle=":")
    style.log_axis(axes, "x", (1 / 16, 1 / 4, 1, 4, 16))
    axes.set(xlabel="divisor over √dₖ", ylabel="loss, nats", ylim=(-0.05, 2.2))
    axes.legend(loc="upper right", bbox_to_anchor=(1, 0.93))
    return figure


def stability() -> Table:
    """Sensitivity to the learning rate after 600 steps: what each remedy of today is worth."""
    from ..training.stability import VARIANTS, sensitivity

    return sensitivity((600,), variants=tuple(VARIANTS))


def longer() -> Table:
    """A trained head at 1, 4 and 16 times its length, by the factor of its scores."""
    from ..experiments import longer as module

    table = module.longer()
    rows = [row for row in table.rows if row["rule"] != "grid"]
    return Table(table.title, rows)


def example() -> Table:
    """The example of the page, by law: 64 keys, scores of standard deviation 1 and 8."""
    rows: list[dict[str, Cell]] = []
    for sigma in (1.0, D_K**0.5):
        law = theory.weights(N, sigma)
        row = {"sigma": sigma, "largest weight": law.max_weight, "entropy": law.entropy}
        row |= {"freezing": theory.freezing(N), "ln n": float(np.log(N))}
        rows.append({name: float(value) for name, value in row.items()})
    return Table("The example: 64 keys", rows)


Measure = Callable[[], Table]

FIGURES: Mapping[str, tuple[Measure, Callable[[Table], Figure]]] = {
    "spread": (spread, plot_spread),
    "softmax": (softmax, plot_softmax),
    "gradients": (gradients, plot_gradients),
    "step": (step, plot_step),
    "divisors": (divisors, plot_divisors),
}
TABLES: Mapping[str, Measure] = {
    "example": example,
    "step_exponents": step_exponents,
    "stability": stability,
    "longer": longer,
}


def picture(figure: Figure, language: str) -> str:
    """The figure as a file of its own, which follows the reader's system from light to dark.

    It brings its ground along, so that it can be read on a page of either kind.
    """
    svg = inline(lambda: figure, "why", "")
    svg = svg.replace(' role="img" aria-label=""', "")
    svg = svg.replace(style.GREEN.lower(), "var(--green)")

    def rules(colors: Mapping[str, str]) -> str:
        return "".join(f"--{name}: {color}; " for name, color in colors.items())

    css = (
        f"svg {{ {rules(LIGHT)}color: var(--ink) }} "
        f"@media (prefers-color-scheme: dark) {{ svg {{ {rules(DARK)}}} }} "
        'text { font-family: system-ui, "Segoe UI", "PingFang SC", "Microsoft YaHei", '
        '"Noto Sans CJK SC", sans-serif; fill: currentcolor }'
    )
    ground = '<rect width="100%" height="100%" fill="var(--page)"/>'
    width, height = (round(72 * PIXELS * inches) for inches in figure.get_size_inches())
    head = f'\\1 width="{width}" height="{height}"><style>{css}</style>{ground}'
    svg = re.sub(r"(<svg[^>]*)>", head, svg, count=1)
    return svg if language == "en" else translated(svg)


def translated(svg: str) -> str:
    """With Chinese labels; other texts must be in both languages the same."""

    def chinese(match: re.Match[str]) -> str:
        text = match[2]
        if text in CHINESE:
            return f"{match[1]}{CHINESE[text]}</text>"
        return f"{match[1]}{text.replace(' steps', ' 步')}</text>"

    return re.sub(r"(<text[^>]*>)(.*?)</text>", chinese, svg)


def main(names: list[str], folder: Path = FOLDER) -> None:
    """Measure and write what is named, or all of it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or [*FIGURES, *TABLES]:
        measure, plot = FIGURES.get(name) or (TABLES[name], None)
        table = measure()
        (folder / f"{name}.txt").write_text(f"{table}\n", encoding="utf-8")
        print(f"{table}\n", flush=True)
        if plot is None:
            continue
        for language, suffix in (("en", ""), ("zh", ".zh")):
            text = picture(plot(table), language)
            (folder / f"{name}{suffix}.svg").write_text(text, encoding="utf-8")


__all__ = ["FIGURES", "TABLES", "main", "picture"]

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m sdpa_lab.report.why", description=__doc__)
    known = [*FIGURES, *TABLES]
    parser.add_argument("NAME", nargs="*", choices=known, help="default: all of them")
    main(parser.parse_args().NAME)
