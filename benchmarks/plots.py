"""The results as plots: SVG and PNG."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.results import Results, Timing
from sdpa_lab import style

LINES = ("sdpa", "numpy", "torch", "jax", "ort", "ort-mha", "openvino")
LOOK = dict(zip(LINES, style.cycle(len(LINES)), strict=True))
"""Colour and marker of a contender, the same in every plot."""

KINDS = ("svg", "png")


def write(results: Results, folder: Path) -> Iterator[Path]:
    """Every plot whose work was measured, as NAME.svg and NAME.png."""
    for plot, groups in (
        (roofline, ("forward", "backward", "decode", "small")),
        (speed, ("sweep",)),
        (growth, ("growth",)),
    ):
        if set(groups) <= set(results.groups(1)):
            yield from style.save(plot(results), folder / plot.__name__, KINDS)
    if results.latest("memory"):
        yield from style.save(memory(results), folder / "memory", KINDS)


def _line(axes: Any, name: str, x: list[float], y: list[float], label: str | None = None) -> None:
    color, marker = LOOK[name]
    width = 2.2 if name == "sdpa" else 1.1
    axes.plot(x, y, color=color, marker=marker, linewidth=width, label=label or name)


@style.plot
def roofline(results: Results) -> Any:
    """Speed over FLOPs per byte that has to move, below the peak of FMA and of memory."""
    figure, axes = style.subplots(size=(6.4, 4.4))
    peak, read = results.fma_peak() or np.nan, results.read_speed()
    x = np.geomspace(0.25, 1024, 200)
    style.prediction(axes, x, np.minimum(peak, read * x), label="FMA peak and memory, one core")
    kinds = (
        ("forward", "forward", "o", style.BLUE),
        ("backward", "backward", "s", style.VERMILION),
        ("decode", "one query", "^", style.GREEN),
        ("small", "n = 10", "D", style.PURPLE),
    )
    for group, label, marker, color in kinds:
        works = [results.get(1, group, name) for name in results.names(1, group)]
        points = [_intensity(found["sdpa"]) for found in works]
        axes.plot(*zip(*points, strict=True), marker, color=color, label=f"sdpa, {label}")
        peers = [
            _intensity(min(others, key=lambda t: t.seconds))
            for found in works
            if (others := [t for k, t in found.items() if k in results.peers()])
        ]
        if peers:
            axes.plot(*zip(*peers, strict=True), marker, color=color, mfc="none")
    axes.plot([], [], "o", color=style.BLACK, mfc="none", label="hollow: the best peer")
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="GF/s, one thread, float32")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def _intensity(timing: Timing) -> tuple[float, float]:
    return timing.flops / timing.bytes, timing.gflops


@style.plot
def speed(results: Results) -> Any:
    """Forward over n at d = 64 and over d at n = 512, eight heads."""
    figure, both = style.subplots(1, 2, size=(4.8, 3.9), sharey=True)
    for axes, letter in zip(both, "nd", strict=True):
        names = [name for name in results.names(1, "sweep") if name.startswith(letter)]
        x = [int(name[2:]) for name in names]
        works = [results.get(1, "sweep", name) for name in names]
        for who in LINES:
            points = [(a, t[who].gflops) for a, t in zip(x, works, strict=True) if who in t]
            if points:
                _line(axes, who, *map(list, zip(*points, strict=True)))
        peak = results.fma_peak()
        if peak:
            axes.axhline(peak, color=style.BLACK, linestyle="--", linewidth=1.2, label="FMA peak")
        style.log_axis(axes, "x", x)
        axes.tick_params("x", labelrotation=45)
        axes.set(ylim=(0, None), title=f"8 heads, {'d = 64' if letter == 'n' else 'n = 512'}")
        axes.set(xlabel="length n" if letter == "n" else "width d")
    both[0].set_ylabel("forward, GF/s, one thread, float32")
    figure.legend(*both[0].get_legend_handles_labels(), loc="outside lower center", ncols=8)
    return figure


@style.plot
def growth(results: Results) -> Any:
    """Time over n, with the exponent fitted."""
    figure, axes = style.subplots(size=(5.4, 4.0))
    for direction, color, marker in (
        ("forward", style.BLUE, "o"),
        ("backward", style.VERMILION, "s"),
    ):
        lengths, seconds, exponent = report.slope(results, direction)
        label = f"{direction}: time ~ n^{exponent:.2f}"
        axes.plot(lengths, seconds, marker, color=color, label=label)
        x = np.array([n for n in lengths if n >= report.FITTED_FROM], float)
        level = np.mean(np.log(seconds[-len(x) :])) - exponent * np.mean(np.log(x))
        axes.plot(x, np.exp(level) * x**exponent, color=color, linewidth=1.0)
    lengths, _, _ = report.slope(results, "forward")
    style.log_axis(axes, "x", lengths)
    axes.tick_params("x", labelrotation=45)
    axes.set(yscale="log", xlabel="length n, one head, d = 64", ylabel="seconds, one thread")
    axes.legend()
    return figure


@style.plot
def memory(results: Results) -> Any:
    """Memory of a forward over n."""
    figure, axes = style.subplots(size=(5.4, 4.0))
    found: dict[str, dict[str, int]] = results.latest("memory")
    for who in (name for name in LINES if name in found):
        # A page is the least that can be seen.
        y = [max(b, 4096) / 1e6 for b in found[who].values()]
        _line(axes, who, [int(n) for n in found[who]], y)
    x = [int(n) for n in found["sdpa"]]
    matrix = [4 * n**2 / 1e6 for n in x]
    style.prediction(axes, x, matrix, limit=True, label="one n x n matrix")
    style.log_axis(axes, "x", x)
    axes.set(yscale="log", xlabel="length n, one head, d = 64", ylabel="MB beyond the operands")
    axes.legend()
    return figure
