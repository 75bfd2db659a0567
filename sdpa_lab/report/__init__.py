"""The HTML report of the main job, and the explorer: one file each, which opens without a network.

`page` shows the results of `python -m sdpa`; `explorer` is the interactive part alone. Styles,
scripts, data and plots are inside the file, whose content policy forbids it to load anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from html import escape
from pathlib import Path
from typing import Any

from ..claims import Row
from ..experiments.scale import ScaleRow, plot_scale_effect
from ..experiments.speed import plot_speed
from ..measure import DEAD, SATURATED
from . import printout, screen
from .cards import VERDICTS, ledger
from .pictures import inline

__all__ = ["VERDICTS", "explorer", "page"]

FOLDER = Path(__file__).parent
SCRIPTS = ("attention.js", "drawing.js", "steps.js", "explorer.js")

SECTIONS = {
    "answer": "Answer",
    "explorer": "Explorer",
    "ledger": "Claims",
    "speed": "Speed",
    "machine": "Machine",
}

INPUTS = {"digits": "images of digits", "random": "sequences of random numbers"}

PANELS = {
    "entropy": (
        "Entropy of the weights of a query: ln 8 = 2.08 if all are equal, 0 if one key takes all.",
        "Entropy",
        "entropy",
    ),
    "saturated": (
        f"Queries with a weight above {SATURATED:g}: one key takes all.",
        "Share of queries with a weight near 1",
        "saturated",
    ),
    "gradient": (
        "Norm of the gradient of a query: root mean square (circles) and median (triangles). Where "
        "they part, few queries get most of it.",
        "Median norm of the gradient",
        "median_grad_query",
    ),
}
"""Caption, what a screen reader says and the column that it reads, by panel of the first figure."""


def explorer() -> str:
    """The explorer as a separate page.

    Returns
    -------
    str
        An HTML document.

    Examples
    --------
    >>> from sdpa_lab import report
    >>> report.explorer().startswith("<!doctype html>")
    True
    """
    body = _explorer().replace("<h2 id", "<h1 id").replace("</h2>", "</h1>")
    return _document("Explorer of the attention scale", body)


def page(result: Mapping[str, Any], rows: Sequence[Row] = (), left_out: int = 0) -> str:
    """The report.

    Parameters
    ----------
    result : mapping
        machine, seed, draws, notes, digits, random and speed, as the main job has them.
    rows : sequence of Row
        Of the ledger.
    left_out : int
        Rows of the ledger that were not judged in this run.

    Returns
    -------
    str
        An HTML document. Plots are missing from it where matplotlib is not installed, and it says
        so.
    """
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title in SECTIONS.items())
    parts = [
        "<h1>Why does attention divide by √d_k?</h1>",
        f"<nav aria-label='Sections'>{links}</nav>",
        *(f'<p class="note">{escape(note)}</p>' for note in result["notes"]),
        _section("answer", _answer(result)),
        _explorer(),
        _section("ledger", ledger(rows, left_out)),
        f"<script>\n{_file('cards.js')}</script>",
        _section("speed", _speed(result)),
        _section("machine", f"<pre>{escape(printout.machine_text(result['machine']))}</pre>"),
    ]
    return _document("Why attention divides by the root of d_k", "\n".join(parts))


def _document(title: str, body: str) -> str:
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>
{_file("page.css")}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def _section(name: str, content: str) -> str:
    heading = f'<h2 id="{name}-title">{SECTIONS[name]}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">{heading}\n{content}\n</section>'


def _explorer() -> str:
    # JSON may be put in a script element unchanged: there is no "<" in these numbers.
    data = f'<script type="application/json" id="explorer-data">{_file("explorer.json")}</script>'
    scripts = [f"<script>\n{_file(name)}</script>" for name in SCRIPTS]
    return "\n".join([_file("explorer.html"), data, *scripts])


@cache
def _file(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _answer(result: Mapping[str, Any]) -> str:
    """What the scale changes: in sentences, in a figure for each kind of input, in tables."""
    names = [name for name in INPUTS if result[name] is not None]
    lines = screen.answer(_plain(result[names[0]]))
    found = "".join(f"<li>{escape(line)}</li>" for line in lines).replace(" = ", "&nbsp;=&nbsp;")
    tables = [
        f"<details><summary>{name}: all figures</summary>"
        f"<pre>{escape(printout.scale_text(name, result[name]).strip())}</pre></details>"
        for name in names
    ]
    return "\n".join(
        [
            '<p class="lede">A score q·k is a sum of d_k products. Its standard deviation grows '
            "like √d_k, and the larger the scores, the nearer softmax is to picking one key. The "
            "factor 1/√d_k takes this growth out. Measured on this machine, before any training:"
            f'</p><ul class="found">{found}</ul>',
            *(_scale_figure(name, result[name], result["seed"]) for name in names),
            f"<details><summary>The setting</summary><pre>{escape(printout.SETTING.strip())}</pre>"
            "</details>",
            *tables,
        ]
    )


def _plain(rows: Sequence[ScaleRow]) -> list[ScaleRow]:
    """Those of the first kind of projections."""
    return [row for row in rows if row.projection == rows[0].projection]


def _scale_figure(name: str, rows: Sequence[ScaleRow], seed: int) -> str:
    try:
        panels = [_panel(panel, name, rows) for panel in PANELS]
    except ImportError as error:
        return _no_plot(error)
    widths = sorted({row.d_k for row in rows})
    caption = (
        f"What the scale changes from d_k = {widths[0]} to {widths[-1]}: with 1/√d_k and "
        f"without. {rows[0].entropy.n} {INPUTS[name]}, 8 keys for each query, seed {seed}; "
        "vertical bars are 95 % intervals, lines without marks the law of the root mean square. "
        f"A gradient counts as next to none below {DEAD:g} of the norm of a row of dL/dO, 8."
    )
    return (
        f'<figure class="plot numbered"><div class="row">{"".join(panels)}</div>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _panel(panel: str, name: str, rows: Sequence[ScaleRow]) -> str:
    caption, what, column = PANELS[panel]
    courses = []
    for words, scaled in (("with 1/√d_k", True), ("without", False)):
        course = [getattr(row, column).value for row in _plain(rows) if (row.scale != 1) == scaled]
        courses.append(f"{words} {', '.join(f'{value:.3g}' for value in course)}")
    widths = ", ".join(f"{row.d_k}" for row in _plain(rows) if row.scale == 1)
    label = f"{what} at d_k = {widths}: {'; '.join(courses)}"
    picture = inline(partial(plot_scale_effect, rows, panels=[panel]), f"{name}-{panel}", label)
    return f"<figure>{picture}<figcaption>{caption}</figcaption></figure>"


def _speed(result: Mapping[str, Any]) -> str:
    rows, threads = result["speed"], result["machine"]["sdpa"]["threads"]
    label = "; ".join(
        f"{' x '.join(map(str, row.shape))} {row.direction} {row.ratio:.1f}" for row in rows
    )
    caption = (
        "How many times as fast as the formula in NumPy sdpa is, by the shape of the operands, in "
        "float32: attention (forward) and its gradients (backward), the shortest of alternating "
        "calls. Where a bar ends left of the line at 1, NumPy is faster. "
        f"sdpa on {threads} threads, NumPy’s matrix products on as many as its BLAS takes."
    )
    table = escape(printout.speed_text(rows, threads).strip())
    try:
        picture = inline(partial(plot_speed, rows), "speed", label)
    except ImportError as error:
        picture = _no_plot(error)
    else:
        picture = (
            f'<figure class="plot numbered single">{picture}<figcaption>{caption}</figcaption>'
            "</figure>"
        )
    return f"{picture}<details><summary>Times</summary><pre>{table}</pre></details>"


def _no_plot(error: ImportError) -> str:
    return f'<p class="note">No plot: {escape(str(error))}</p>'
