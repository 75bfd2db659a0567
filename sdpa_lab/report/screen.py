"""The first screen of the main job: the question, its answer, and where to go on."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ..claims import Row, chinese
from ..claims.rule import DEPENDS
from ..experiments.scale import ScaleRow
from ..experiments.speed import SpeedRow
from ..tools.table import layout
from ..tools.wrap import fill
from ..tools.wrap import width as columns_of
from .words import say

WIDEST, NARROWEST = 100, 40
"""Columns; on a terminal narrower than that lines are cut by the terminal."""

BOTH = 78
"""Columns that the table needs with both halves side by side."""

SURPRISING = (
    *("grad-law", "overflow-64", "softmax-scaled", "sigma-law", "maxweight-table"),
    *("weight-grad", "entropy-table", "value-index", "glorot-unit-var", "log-saturates"),
)
"""Claims that a reader is likely to believe, those first whose answer is furthest from it."""

SHOWN = 4

WIDTHS = (16, 64, 256)
"""Of d_k, where the power for each optimiser is measured: half a second."""

ALIKE = 0.2
"""An exponent that is called none: 2^(4/5) from d_k = 16 to 256."""

PAGES = {"en": "docs/why.md", "zh": "docs/zh/why.md"}
"""The whole answer."""


def text(
    result: dict[str, Any],
    rows: Sequence[Row],
    known: int,
    report: str | None,
    columns: int,
    language: str = "en",
) -> str:
    """The screen, in lines of at most `columns`, that is at most 45 lines from 60 columns on.

    Parameters
    ----------
    result : dict
        Of the main job: machine, draws, digits (or None), random, first_step, speed.
    rows : sequence of Row
        Those judged.
    known : int
        Rows of the whole ledger.
    report : str, optional
        Path of the report, where one is written.
    columns : int
        Of the terminal.
    language : str
        "en" or "zh".
    """
    width = max(NARROWEST, min(WIDEST, columns))
    name = "random" if result["digits"] is None else "digits"
    scale = [row for row in result[name] if row.projection == result[name][0].projection]
    config = result["machine"]["sdpa"]
    values = {name: config[name] for name in ("version", "isa", "threads")}
    inputs = say(name, language, number=scale[0].entropy.n)
    tell = partial(say, language=language)
    blocks = [
        [tell("head", **values, inputs=inputs)],
        [tell("question"), tell("why"), _table(scale, width, language)],
        [*answer(scale, language), power(result["first_step"], language), tell("use")],
        [_speed(result["speed"], language)],
        [_verdicts(rows, known, language)],
        [_next(report, width, language)],
    ]
    parts = [
        [part if "\n" in part else fill(part, width) for part in block if part] for block in blocks
    ]
    parts[4] += [_surprise(row, width, language) for row in surprising(rows)]
    return "\n\n".join(map("\n".join, parts))


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


def finding(row: Row, language: str) -> str:
    """What is right: in Chinese, if there is a sentence for the verdict, else in English."""
    translated = language == "zh" and chinese.finding(row.claim.id, row.verdict, row.figures)
    return translated or row.statement


def _table(rows: list[ScaleRow], width: int, language: str) -> str:
    """Without the scale to the right of, or on a narrow terminal below, with it."""
    names = [say(f"column-{name}", language) for name in ("entropy", "one-hot", "median")]
    halves = []
    for title, unscaled in (("scaled", False), ("unscaled", True)):
        cells: list[str | list[str]] = [
            [
                str(row.d_k),
                f"{row.entropy.value:.2f}",
                f"{100 * row.saturated.value:.0f} %",
                f"{row.median_grad_query.value:.2f}",
            ]
            for row in rows
            if (row.scale == 1) == unscaled
        ]
        halves.append([say(title, language), *layout(["d_k", *names], cells).split("\n")])
    note = fill(say("table", language), width)
    if width < BOTH:
        return "\n".join([note, *halves[0], *halves[1]])
    middle = max(map(columns_of, halves[0])) + 4
    lines = [
        left + " " * (middle - columns_of(left)) + right for left, right in zip_longest(*halves)
    ]
    return "\n".join([note, *lines])


def answer(rows: list[ScaleRow], language: str = "en") -> list[str]:
    """Three sentences, of which the measurement decides the words as well as the numbers."""
    scaled, unscaled = ([row for row in rows if (row.scale == 1) == one] for one in (False, True))
    first, last = unscaled[0], unscaled[-1]
    widths: dict[str, Any] = {"d_first": first.d_k, "d_last": last.d_k}
    entropies = [row.entropy.value for row in scaled]
    steady = max(entropies) - min(entropies) < 0.1 * max(entropies)
    grows = last.rms_grad_query.low > first.rms_grad_query.high
    falls = last.median_grad_query.high < first.median_grad_query.low
    tell = partial(say, language=language)
    return [
        tell(
            "steady" if steady else "moving",
            first=entropies[0],
            last=entropies[-1],
            **widths,
        ),
        tell(
            "without",
            first=first.entropy.value,
            last=last.entropy.value,
            share=100 * last.saturated.value,
            **widths,
        ),
        tell(
            "changes",
            what=tell("gather" if grows and falls else "gradients"),
            rms_first=first.rms_grad_query.value,
            rms_last=last.rms_grad_query.value,
            median_first=first.median_grad_query.value,
            median_last=last.median_grad_query.value,
            dead=100 * last.dead_grad_query.value,
            **widths,
        ),
    ]


def power(rows: Sequence[Mapping[str, Any]], language: str) -> str:
    """Which power of d_k each optimiser asks for, from rows of `first_step_exponents`."""
    found = {(row["optimiser"], row["divisor"]): row["exponent"].value for row in rows}
    sgd, adam = found["SGD", "sqrt(d_k)"], found["Adam", "d_k"]
    alike = say("alike", language) if max(abs(sgd), abs(adam)) < ALIKE else ""
    return say("power", language, sgd=sgd, adam=adam, alike=alike)


def _speed(rows: list[SpeedRow], language: str) -> str:
    large = [row for row in rows if row.shape == rows[-1].shape]
    tell = partial(say, language=language)
    ratios = [tell("ratio", ratio=row.ratio, direction=tell(row.direction)) for row in large]
    least = min(rows, key=lambda row: row.ratio)
    return tell(
        "speed",
        ratios=tell("comma").join(ratios),
        shape=" x ".join(map(str, large[0].shape)),
        least=least.ratio,
        least_shape=" x ".join(map(str, least.shape)),
        direction=tell(least.direction),
    )


def _verdicts(rows: Sequence[Row], known: int, language: str) -> str:
    tell = partial(say, language=language)
    counts = [
        tell("count", number=number, verdict=tell(verdict))
        for verdict, number in Counter(row.verdict for row in rows).most_common()
    ]
    return tell("judged", number=len(rows), known=known, counts=tell("comma").join(counts))


def _surprise(row: Row, width: int, language: str) -> str:
    """The claim, then its verdict and the start of what was found."""
    tell = partial(say, language=language)
    stated = row.claim.claim_zh if language == "zh" else row.claim.claim
    claim = fill(
        tell("quoted", claim=stated),
        width,
        initial_indent="  ",
        subsequent_indent="   ",
        max_lines=2,
        placeholder=" ...”",
    )
    found = fill(
        tell("found", verdict=tell(row.verdict), found=finding(row, language)),
        width,
        initial_indent="    ",
        subsequent_indent="    ",
        max_lines=2,
    )
    return f"{claim}\n{found}"


def _next(report: str | None, width: int, language: str = "en") -> str:
    tell = partial(say, language=language)
    page = PAGES[language]
    steps = [tell("next-why", path=page)] if Path(page).exists() else []
    steps += [tell("next-report", path=report)] if report else []
    steps += [tell("next-claims")]
    steps += [] if Path(page).exists() else [tell("next-lab")]
    indent = tell("next")
    # What is to be typed or opened stays on one line where it can.
    room = width - columns_of(indent) - 2
    kept = [s.replace(" ", "\0") if columns_of(s) <= room else s for s in steps]
    text = f"{indent}{' | '.join(kept)}".replace(" | ", "\0| ")
    return fill(text, width, subsequent_indent=" " * columns_of(indent))
