"""The HTML report of the main job, and the explorer: one file each, which opens without a network.

`page` shows the results of `python -m sdpa`; `explorer` is the interactive part alone. Styles,
scripts, data and plots are inside the file, whose content policy forbids it to load anything.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import style
from ..claims import Row
from ..experiments.scale import plot_scale_effect
from ..experiments.speed import plot_speed
from ..tools.estimate import Estimate
from ..tools.table import with_interval
from . import printout

if TYPE_CHECKING:
    from matplotlib import figure

__all__ = ["explorer", "page"]

FOLDER = Path(__file__).parent

VERDICTS = {
    "reproduced": "measured as the note says",
    "corrected": "our law passes the test that the claim fails",
    "refuted": "measured otherwise",
    "undecided": "not decided by the draws of this run",
}

SECTIONS = {
    "ledger": "Claims",
    "scale": "The scale",
    "speed": "Speed",
    "explorer": "Explorer",
    "machine": "Machine",
}


def explorer() -> str:
    """The explorer as a separate page.

    Returns
    -------
    str
        An HTML document.

    Examples
    --------
    >>> from sdpa.lab import report
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
    seed = f"Seed {result['seed']}, {result['draws']} inputs of each kind."
    parts = [
        f"<h1>Why attention divides by √d_k: measured on this machine</h1><p>{seed}</p>",
        f"<nav aria-label='Sections'>{links}</nav>",
        *(f'<p class="note">{escape(note)}</p>' for note in result["notes"]),
        _section("ledger", _ledger(rows, left_out)),
        _section("scale", _scale(result)),
        _section("speed", _speed(result)),
        _explorer(),
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
    scripts = [f"<script>\n{_file(name)}</script>" for name in ("attention.js", "explorer.js")]
    return "\n".join([_file("explorer.html"), data, *scripts])


@cache
def _file(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


# ---------------------------------------------------------------------- ledger


def _ledger(rows: Sequence[Row], left_out: int) -> str:
    count = Counter(row.verdict for row in rows)
    summary = " ".join(
        f'<li><span class="verdict {verdict}">{verdict}</span> {count[verdict]}: {meaning}</li>'
        for verdict, meaning in VERDICTS.items()
    )
    rest = (
        f"<p>{left_out} more rows take longer than a main job should: "
        "<code>python -m sdpa claims</code> judges all of them.</p>"
        if left_out
        else ""
    )
    return (
        "<p>What five notes say of the scale, each claim turned into a figure and judged by one "
        "rule that was fixed before measuring. Intervals come from independent draws and hold "
        f'for the whole ledger together.</p><ul class="verdicts">{summary}</ul>{rest}'
        f'<div class="claims">{"".join(map(_row, rows))}</div>'
    )


def _row(row: Row) -> str:
    claim = row.claim
    figures = []
    for figure in row.figures:
        cells = [with_interval(Estimate(*figure[1:])), str(figure.n)]
        expect = row.expect.get(figure.name)
        cells.append("" if expect is None else f"{expect.claimed:.4g}")
        cells.append("" if expect is None or expect.law is None else f"{expect.law:.4g}")
        figures.append(_cells(figure.name, cells))
    header = ("figure", "measured", "draws", "claimed", "our law")
    cited = " (cited)" if claim.cited else ""
    return f"""<article class="claim {row.verdict}" id="claim-{claim.id}">
<h3><span class="verdict {row.verdict}">{row.verdict}{cited}</span> {claim.id}</h3>
<p>{escape(claim.claim)}</p><p lang="zh">{escape(claim.claim_zh)}</p>
<p class="found">{escape(row.statement)}</p>
<details><summary>Figures; notes {" ".join(claim.notes)}, seed {row.seed}</summary>
{_table(header, figures)}</details>
</article>"""


def _table(header: Sequence[str], rows: Sequence[str]) -> str:
    names = "".join(f'<th scope="col">{name}</th>' for name in header)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Figures"><table>'
        f"<thead><tr>{names}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cells(name: str, cells: Sequence[str]) -> str:
    rest = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr><th scope="row">{escape(name)}</th>{rest}</tr>'


# ---------------------------------------------------------------------- scale and speed


def _scale(result: Mapping[str, Any]) -> str:
    parts = [
        f"<details><summary>The setting</summary><pre>{escape(printout.SETTING)}</pre></details>"
    ]
    for name in ("digits", "random"):
        if result[name] is None:
            continue
        rows = result[name]
        widths = sorted({row.d_k for row in rows})
        parts.append(
            _picture(
                f"{name}: entropy, saturated rows and the gradient of the queries against d_k, "
                f"from {widths[0]} to {widths[-1]}, with 1/√d_k and without; numbers are below",
                partial(plot_scale_effect, rows),
            )
        )
        parts.append(
            f"<details><summary>{name}: all figures</summary>"
            f"<pre>{escape(printout.scale_text(name, rows).strip())}</pre></details>"
        )
    return "\n".join(parts)


def _speed(result: Mapping[str, Any]) -> str:
    rows, threads = result["speed"], result["machine"]["sdpa"]["threads"]
    return _picture(
        "Time of the formula in NumPy divided by the time of sdpa, for each shape, forward and "
        "backward; the numbers are below",
        partial(plot_speed, rows),
    ) + (f"<pre>{escape(printout.speed_text(rows, threads).strip())}</pre>")


def _picture(alternative: str, plot: Callable[[], figure.Figure]) -> str:
    """The plot as an image; a sentence where matplotlib is missing."""
    try:
        svg = style.svg(plot())
    except ImportError as error:
        return f'<p class="note">No plot: {escape(str(error))}</p>'
    source = base64.b64encode(svg.encode()).decode()
    return (
        '<div class="wide" tabindex="0" role="region" aria-label="Plot">'
        f'<img alt="{escape(alternative)}" src="data:image/svg+xml;base64,{source}"></div>'
    )
