"""The HTML report of the main job, and the explorer: one file each, which opens without a network.

`page` shows the results of `python -m sdpa`; `explorer` is the interactive part alone. Styles,
scripts, data and plots are inside the file, whose content policy forbids it to load anything. Every
text is there in English and in Chinese, between which two buttons switch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache, partial
from html import escape
from pathlib import Path
from typing import Any

from ..claims import Row
from ..claims.record import VERDICTS
from ..experiments.scale import ScaleRow, plot_scale_effect
from ..experiments.speed import plot_speed
from ..measure import DEAD, SATURATED
from . import printout, screen
from .cards import ledger
from .pictures import inline
from .words import LANGUAGES, both, say, sentences, spans

__all__ = ["VERDICTS", "explorer", "page"]

FOLDER = Path(__file__).parent
SCRIPTS = ("attention.js", "drawing.js", "steps.js", "explorer.js")

SECTIONS = ("answer", "explorer", "ledger", "speed", "machine")

PANELS = {
    "entropy": ("Entropy", "entropy"),
    "saturated": ("Share of queries with a weight near 1", "saturated"),
    "gradient": ("Median norm of the gradient", "median_grad_query"),
}
"""What a screen reader says and the column that it reads, by panel of the first figure."""

SCRIPTED = ("title", "explorer-title", "gradients", "option-", "script-", "aria-")
"""Beginnings of the names of what scripts say."""

NAMES = {"en": "English", "zh": "中文"}


def explorer(language: str = "en") -> str:
    """The explorer as a separate page.

    Parameters
    ----------
    language : str
        In which it opens, "en" or "zh".

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
    return _document("explorer-title", body, language)


def page(
    result: Mapping[str, Any], rows: Sequence[Row] = (), left_out: int = 0, language: str = "en"
) -> str:
    """The report.

    Parameters
    ----------
    result : mapping
        machine, seed, draws, notes, digits, random, first_step and speed, as the main job has them.
    rows : sequence of Row
        Of the ledger.
    left_out : int
        Rows of the ledger that were not judged in this run.
    language : str
        In which it opens, "en" or "zh".

    Returns
    -------
    str
        An HTML document. Plots are missing from it where matplotlib is not installed, and it says
        so.
    """
    links = "".join(f'<a href="#{name}">{both(f"section-{name}")}</a>' for name in SECTIONS)
    parts = [
        f"<h1>{both('title')}</h1>",
        f'<nav aria-label="Sections" data-label="aria-sections">{links}</nav>',
        *(f'<p class="note">{escape(note)}</p>' for note in result["notes"]),
        _section("answer", _answer(result)),
        _explorer(),
        _section("ledger", ledger(rows, left_out)),
        f"<script>\n{_file('cards.js')}</script>",
        _section("speed", _speed(result)),
        _section("machine", f"<pre>{escape(printout.machine_text(result['machine']))}</pre>"),
    ]
    return _document("title", "\n".join(parts), language)


def _document(title: str, body: str, language: str) -> str:
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    )
    words = {name: texts for name, texts in sentences().items() if name.startswith(SCRIPTED)}
    # A script element ends at the first "</".
    data = json.dumps(words, ensure_ascii=False).replace("</", "<\\/")
    buttons = "".join(
        f'<button type="button" lang="{name}" data-language="{name}">{NAMES[name]}</button>'
        for name in LANGUAGES
    )
    return f"""<!doctype html>
<html lang="{language}" data-title="{title}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{say(title, language)}</title>
<style>
{_file("page.css")}</style>
</head>
<body>
<main>
<div class="languages" role="group" aria-label="Language" data-label="aria-language">{buttons}</div>
<script type="application/json" id="words">{data}</script>
<script>
{_file("language.js")}</script>
{body}
</main>
</body>
</html>
"""


def _section(name: str, content: str) -> str:
    heading = f'<h2 id="{name}-title">{both(f"section-{name}")}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">{heading}\n{content}\n</section>'


def _explorer() -> str:
    # JSON may be put in a script element unchanged: there is no "<" in these numbers.
    data = f'<script type="application/json" id="explorer-data">{_file("explorer.json")}</script>'
    scripts = [f"<script>\n{_file(name)}</script>" for name in SCRIPTS]
    html = re.sub(r"{{([\w-]+)}}", lambda match: both(match[1]), _file("explorer.html"))
    return "\n".join([html, data, *scripts])


@cache
def _file(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _answer(result: Mapping[str, Any]) -> str:
    """What the scale changes: in sentences, in a figure for each kind of input, in tables."""
    names = [name for name in ("digits", "random") if result[name] is not None]
    rows = _plain(result[names[0]])
    found = {
        language: [*screen.answer(rows, language), screen.power(result["first_step"], language)]
        for language in LANGUAGES
    }
    lines = [dict(zip(found, line, strict=True)) for line in zip(*found.values(), strict=True)]
    items = "".join(f"<li>{text}</li>" for text in (*map(spans, lines), both("use")))
    items = items.replace(" = ", "&nbsp;=&nbsp;")
    tables = [
        f"<details><summary>{both('all-figures-of', name=_each(f'name-{name}'))}</summary>"
        f"<pre>{escape(printout.scale_text(name, result[name]).strip())}</pre></details>"
        for name in names
    ]
    return "\n".join(
        [
            f'<p class="lede">{both("lede")}</p><ul class="found">{items}</ul>',
            f"<p>{both('page')}</p>",
            *(_scale_figure(name, result[name], result["seed"]) for name in names),
            f"<details><summary>{both('setting')}</summary>{_setting()}</details>",
            *tables,
        ]
    )


def _each(name: str, **values: Any) -> dict[str, str]:
    """A sentence by language, as a value in another one."""
    return {language: say(name, language, **values) for language in LANGUAGES}


def _setting() -> str:
    """The text above the tables of the main job, which is preformatted."""
    return "".join(
        f'<pre class="{language}" lang="{language}">{escape(text.strip())}</pre>'
        for language, text in printout.SETTINGS.items()
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
    caption = both(
        "scale-figure",
        first=widths[0],
        last=widths[-1],
        inputs=_each(name, number=rows[0].entropy.n),
        seed=seed,
        dead=DEAD,
    )
    return (
        f'<figure class="plot numbered"><div class="row">{"".join(panels)}</div>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _panel(panel: str, name: str, rows: Sequence[ScaleRow]) -> str:
    what, column = PANELS[panel]
    courses = []
    for words, scaled in (("with 1/√d_k", True), ("without", False)):
        course = [getattr(row, column).value for row in _plain(rows) if (row.scale != 1) == scaled]
        courses.append(f"{words} {', '.join(f'{value:.3g}' for value in course)}")
    widths = ", ".join(f"{row.d_k}" for row in _plain(rows) if row.scale == 1)
    label = f"{what} at d_k = {widths}: {'; '.join(courses)}"
    picture = inline(partial(plot_scale_effect, rows, panels=[panel]), f"{name}-{panel}", label)
    caption = both(f"panel-{panel}", saturated=SATURATED)
    return f"<figure>{picture}<figcaption>{caption}</figcaption></figure>"


def _speed(result: Mapping[str, Any]) -> str:
    rows, threads = result["speed"], result["machine"]["sdpa"]["threads"]
    label = "; ".join(
        f"{' x '.join(map(str, row.shape))} {row.direction} {row.ratio:.1f}" for row in rows
    )
    table = escape(printout.speed_text(rows, threads).strip())
    try:
        picture = inline(partial(plot_speed, rows), "speed", label)
    except ImportError as error:
        picture = _no_plot(error)
    else:
        picture = (
            f'<figure class="plot numbered single">{picture}'
            f"<figcaption>{both('speed-figure', threads=threads)}</figcaption></figure>"
        )
    return f"{picture}<details><summary>{both('times')}</summary><pre>{table}</pre></details>"


def _no_plot(error: ImportError) -> str:
    return f'<p class="note">{both("no-plot", reason=str(error))}</p>'
