"""The results as text."""

import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks import targets
from benchmarks.results import Results, Timing


def text(results: Results) -> str:
    """Everything that was measured: machine, tables by group, targets, growth."""
    return "\n".join(
        [
            *_heading(results),
            *(line for threads in results.threads() for line in _tables(results, threads)),
            *_memory(results),
            *_growth(results),
            *(_targets(results) if not results.quick else ()),
        ]
    )


UNCONFIRMED = 0.05
"""A shortest call that no other round came so close to is marked."""

UNITS = {
    **dict.fromkeys(("small", "softmax", "decode"), "us"),
    "additive": "tanh per nanosecond",
}
"""Of groups that are not about GF/s."""

WIDTH = 100
"""Characters of a line at most, as on every page."""

MARKS = ("<!-- figures -->", "<!-- end of figures -->")


def write_page(page: Path, results: Results) -> None:
    """Put the text between the page's marks, in place of what stands there."""
    old = page.read_text(encoding="utf-8")
    before, mark, rest = old.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not (mark and end):
        raise ValueError(f"{page}: expected the marks {MARKS[0]} and {MARKS[1]}, found none")
    new = f"{before}{mark}\n\n```text\n{text(results)}\n```\n\n{end}{after}"
    page.write_text(new, encoding="utf-8")


def _heading(results: Results) -> Iterator[str]:
    run = results.runs[-1]
    machine = run["machine"]
    yield f"{machine['processor']}, {machine['system']}, kernels {results.isa}"
    versions = {k: v for run in results.runs for k, v in run["peers"].items()}
    yield from _wrapped(", ".join(f"{name} {version}" for name, version in versions.items()))
    missing = sorted({name for run in results.runs for name in run["missing"]} - set(versions))
    if missing:
        yield from _wrapped("not installed, left out: " + ", ".join(missing))
    peaks = {name: results.peaks(name) for name in run["peak"]}
    rates = ", ".join(f"{name} {_range(values)}" for name, values in peaks.items())
    yield from _wrapped(f"one core, best of all runs of peak.c: {rates}")
    beside = [rate for t in results.timings() if (rate := results.rate(t))]
    if beside:
        yield f"FMA peak beside the fastest calls: {_range(beside)}"
    yield f"~ before a figure: no second round came within {100 * UNCONFIRMED:.0f} % of that call"
    if results.quick:
        yield "QUICK: small problems, one round; the figures mean nothing"


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent="  ")


def _range(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{high:.1f}" if high - low < 0.1 else f"{low:.1f} to {high:.1f}"


def _tables(results: Results, threads: int) -> Iterator[str]:
    plural = "thread" if threads == 1 else "threads"
    for group in results.groups(threads):
        unit = UNITS.get(group, "GF/s")
        yield f"\n{group}, {threads} {plural}, {unit}"
        columns: list[tuple[str, ...]] = []
        for name in results.names(threads, group):
            found = results.get(threads, group, name)
            peers = {k: t for k, t in found.items() if k in results.peers()}
            if columns != [tuple(found)]:
                columns = [tuple(found)]
                yield _line("", found, {k: k for k in found}, "best peer" if peers else "")
            figures = {k: _figure(t, unit) for k, t in found.items()}
            yield _line(name, found, figures, _ratio(found, peers))


def _line(name: str, found: dict[str, Timing], cells: dict[str, str], last: str) -> str:
    body = "".join(f"{cells[key]:>{max(8, len(key) + 1)}}" for key in found)
    return f"{name:24}{body}  {last}".rstrip()


def _figure(timing: Timing, unit: str) -> str:
    value = 1e6 * timing.seconds if unit == "us" else timing.gflops
    shown = (
        f"{value:.1f}" if value < 1e3 else f"{value:.0f}" if value < 1e5 else f"{value / 1e6:.2f}M"
    )
    return "~" * (timing.again > UNCONFIRMED) + shown


def _ratio(found: dict[str, Timing], peers: dict[str, Timing]) -> str:
    if not peers:
        return ""
    best = min(peers, key=lambda k: peers[k].seconds)
    return f"{peers[best].seconds / found['sdpa'].seconds:.2f} {best}"


def _memory(results: Results) -> Iterator[str]:
    memory = results.latest("memory")
    if memory:
        yield "\nmemory that a forward takes beyond its operands, MB (one head, d = 64)"
        lengths = list(dict.fromkeys(n for found in memory.values() for n in found))
        yield f"  {'n':12}" + "".join(f"{n:>9}" for n in lengths)
        for name, found in memory.items():
            cells = (f"{found[n] / 1e6:.1f}" if n in found else "-" for n in lengths)
            yield f"  {name:12}" + "".join(f"{cell:>9}" for cell in cells)


FITTED_FROM = 2048
"""The length from which on the growth of time is fitted."""


def slope(results: Results, direction: str) -> tuple[list[int], list[float], float]:
    """(lengths, seconds, exponent of n fitted from FITTED_FROM on) of the group growth."""
    names = [n for n in results.names(1, "growth") if n.startswith(direction)]
    lengths = [int(name.split()[1]) for name in names]
    seconds = [results.get(1, "growth", name)["sdpa"].seconds for name in names]
    points = [(n, s) for n, s in zip(lengths, seconds, strict=True) if n >= FITTED_FROM]
    if len(points) < 2:
        return lengths, seconds, float("nan")
    x, y = np.log(points).T
    return lengths, seconds, float(np.polyfit(x, y, 1)[0])


def _growth(results: Results) -> Iterator[str]:
    for direction in ("forward", "backward"):
        lengths, seconds, exponent = slope(results, direction)
        if lengths:
            yield (
                f"\n{direction}, one head, d = 64: {seconds[-1]:.3g} s at n = {lengths[-1]};"
                f" time grows as n^{exponent:.3f} from n = {FITTED_FROM} on"
            )


def _targets(results: Results) -> Iterator[str]:
    section = None
    met = missed = 0
    for row in targets.rows(results):
        if row.section != section:
            section = row.section
            yield f"\n{section}"
        line = f"{row.title:47}{row.value:8.3g} {row.unit:12}"
        if row.goal is not None:
            margin = row.goal.margin(row.value)
            sign = ">=" if row.goal.at_least else "<="
            met, missed = met + (margin >= 0), missed + (margin < 0)
            verdict = "met" if margin >= 0 else f"MISSED by {-100 * margin:.0f} %"
            line += f"target {sign} {row.goal.bound:<5g}{verdict}"
        yield line.rstrip()
    yield f"\ntargets: {met} met, {missed} missed"
