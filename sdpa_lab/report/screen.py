"""The first screen of the main job: the question, its answer, and where to go on."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from ..claims import Row
from ..claims.record import DEPENDS
from ..experiments.scale import ScaleRow
from ..experiments.speed import SpeedRow
from ..tools.table import layout

WIDEST, NARROWEST = 100, 40
"""Columns; on a terminal narrower than that lines are cut by the terminal."""

BOTH = 78
"""Columns that the table needs with both halves side by side."""

SURPRISING = (
    *("grad-law", "overflow-64", "softmax-scaled", "sigma-law", "maxweight-table"),
    *("weight-grad", "entropy-table", "cosine-bilinear", "glorot-unit-var", "exp-values"),
)
"""Claims that a reader is likely to believe, those first whose answer is furthest from it."""

SHOWN = 4

NOTEBOOK = "notebooks/03_saturation.ipynb"


def text(
    result: dict[str, Any], rows: Sequence[Row], known: int, report: str | None, columns: int
) -> str:
    """The screen, in lines of at most `columns`, that is at most 45 lines from 60 columns on.

    Parameters
    ----------
    result : dict
        Of the main job: machine, draws, digits (or None), random, speed.
    rows : sequence of Row
        Those judged.
    known : int
        Rows of the whole ledger.
    report : str, optional
        Path of the report, where one is written.
    columns : int
        Of the terminal.
    """
    width = max(NARROWEST, min(WIDEST, columns))
    name = "random" if result["digits"] is None else "digits"
    scale = [row for row in result[name] if row.projection == result[name][0].projection]
    config = result["machine"]["sdpa"]
    what = {"digits": "images of digits", "random": "sequences of random numbers"}[name]
    head = (
        f"sdpa {config['version']}, {config['isa']}, {config['threads']} threads. Measured here on "
        f"{scale[0].entropy.n} {what}; all tables: --all."
    )
    blocks = [
        head,
        "Why divide by sqrt(d_k)?",
        _table(scale, width),
        *answer(scale),
        _speed(result["speed"]),
        _verdicts(rows, known),
    ]
    parts = [part if "\n" in part else fill(part, width) for part in blocks]
    spaced = ["\n".join(parts[:1]), "\n".join(parts[1:3]), "\n".join(parts[3:6]), *parts[6:]]
    claims = "\n".join(_surprise(row, width) for row in surprising(rows))
    return "\n\n".join([*spaced[:3], spaced[3], f"{spaced[4]}\n{claims}", _next(report, width)])


def surprising(rows: Sequence[Row]) -> list[Row]:
    """Of the rows that are not as the notes say, the most surprising ones."""
    found = [row for row in by_surprise(rows) if row.claim.id in SURPRISING]
    return [row for row in found if row.verdict in ("corrected", "refuted", DEPENDS)][:SHOWN]


def by_surprise(rows: Sequence[Row]) -> list[Row]:
    """Rows that are not as the notes say first, those of SURPRISING at their head; then those that
    are not decided, then those reproduced; else in the order given."""
    verdicts = (("corrected", "refuted", DEPENDS), ("undecided",), ("reproduced",))

    def place(row: Row) -> tuple[int, int]:
        name = row.claim.id
        surprise = SURPRISING.index(name) if name in SURPRISING else len(SURPRISING)
        return next(i for i, group in enumerate(verdicts) if row.verdict in group), surprise

    return sorted(rows, key=place)


def _table(rows: list[ScaleRow], width: int) -> str:
    halves = []
    for unscaled in (False, True):
        header = ["entropy", "one-hot\nrows", "median\n|dL/dQ|"]
        cells: list[list[str]] = [
            [
                f"{row.entropy.value:.2f}",
                f"{100 * row.saturated.value:.0f} %",
                f"{row.median_grad_query.value:.2f}",
            ]
            for row in rows
            if (row.scale == 1) == unscaled
        ]
        halves.append((header, cells))
    widths = [str(row.d_k) for row in rows if row.scale == 1]
    titles = ("with 1/sqrt(d_k)", "without")
    note = "8 weights per row: entropy 2.08 if all are equal, 0 if one key takes all"
    if width >= BOTH:
        (first, left), (second, right) = halves
        lines = layout(
            ["d_k", *first, " ", *second],
            [[d, *a, " ", *b] for d, a, b in zip(widths, left, right, strict=True)],
        ).split("\n")
        middle = lines[0].index("median") + len("median") + 1
        return "\n".join([note, f"    {titles[0]}".ljust(middle + 3) + titles[1], *lines])
    stacked = [fill(note, width)]
    for title, (header, cells) in zip(titles, halves, strict=True):
        part: list[str | list[str]] = [[d, *line] for d, line in zip(widths, cells, strict=True)]
        stacked += [title, layout(["d_k", *header], part)]
    return "\n".join(stacked)


def answer(rows: list[ScaleRow]) -> list[str]:
    """Three sentences, of which the measurement decides the words as well as the numbers."""
    scaled, unscaled = ([row for row in rows if (row.scale == 1) == one] for one in (False, True))
    first, last = unscaled[0], unscaled[-1]
    entropies = [row.entropy.value for row in scaled]
    steady = max(entropies) - min(entropies) < 0.1 * max(entropies)
    with_scale = (
        f"With the scale nothing depends on d_k: the entropy is {entropies[0]:.2f} at d_k = "
        f"{first.d_k} and {entropies[-1]:.2f} at {last.d_k}."
        if steady
        else f"With the scale the entropy goes from {entropies[0]:.2f} to {entropies[-1]:.2f}."
    )
    without = (
        f"Without it the entropy goes from {first.entropy.value:.2f} to {last.entropy.value:.2f}, "
        f"and {100 * last.saturated.value:.0f} % of the rows are one-hot at d_k = {last.d_k}."
    )
    grows = last.rms_grad_query.low > first.rms_grad_query.high
    falls = last.median_grad_query.high < first.median_grad_query.low
    gradients = "Gradients do not vanish, they gather" if grows and falls else "Gradients"
    changes = (
        f"{gradients}: from d_k = {first.d_k} to {last.d_k} the rms of dL/dQ goes from "
        f"{first.rms_grad_query.value:.1f} to {last.rms_grad_query.value:.1f}, its median from "
        f"{first.median_grad_query.value:.1f} to {last.median_grad_query.value:.1f}, and "
        f"{100 * last.dead_grad_query.value:.0f} % of the queries get next to none."
    )
    return [with_scale, without, changes]


def _speed(rows: list[SpeedRow]) -> str:
    large = [row for row in rows if row.shape == rows[-1].shape]
    ratios = ", ".join(f"{row.ratio:.1f} times {row.direction}" for row in large)
    shape = " x ".join(map(str, large[0].shape))
    least = min(rows, key=lambda row: row.ratio)
    return (
        f"Speed against NumPy: {ratios} ({shape}); at worst {least.ratio:.1f} times "
        f"({' x '.join(map(str, least.shape))}, {least.direction})."
    )


def _verdicts(rows: Sequence[Row], known: int) -> str:
    counts = Counter(row.verdict for row in rows).most_common()
    shown = ", ".join(f"{number} {verdict}" for verdict, number in counts)
    return f"Claims of five notes, {len(rows)} of {known} judged now: {shown}. Most surprising:"


def _surprise(row: Row, width: int) -> str:
    """The claim, then its verdict and the start of what was found."""
    claim = fill(
        f"“{row.claim.claim}”",
        width,
        initial_indent="  ",
        subsequent_indent="   ",
        max_lines=2,
        placeholder=" ...”",
    )
    found = fill(
        f"{row.verdict}: {row.statement}",
        width,
        initial_indent="    ",
        subsequent_indent="    ",
        max_lines=2,
        placeholder=" ...",
    )
    return f"{claim}\n{found}"


def _next(report: str | None, width: int) -> str:
    steps = [f"open {report}"] if report else []
    steps += ["python -m sdpa claims (all of them)"]
    steps += [NOTEBOOK if Path(NOTEBOOK).exists() else "python -m sdpa lab (one experiment)"]
    indent = "Next: "
    # What is to be typed or opened stays on one line where it can.
    kept = [s.replace(" ", "\0") if len(s) + len(indent) + 2 <= width else s for s in steps]
    text = f"{indent}{' | '.join(kept)}".replace(" | ", "\0| ")
    lines = fill(text, width, subsequent_indent=" " * len(indent), break_on_hyphens=False)
    return lines.replace("\0", " ")
