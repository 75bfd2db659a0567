"""The ledger in the report: a card for each claim, sorted by surprise, filtered by verdict."""

from collections import Counter
from collections.abc import Sequence
from html import escape

from ..claims import Row
from ..claims.cli import interval
from ..claims.record import VERDICTS as CHINESE
from . import axis
from .screen import by_surprise

VERDICTS = {
    "reproduced": "measured as the note says",
    "corrected": "our law passes the test that the claim fails",
    "refuted": "measured otherwise",
    "depends on the horizon": "other verdicts after other numbers of steps",
    "undecided": "not decided by the draws of this run",
}


def ledger(rows: Sequence[Row], left_out: int) -> str:
    """The cards, with the filter before them."""
    rest = (
        f" {left_out} more claims take longer than this report should: "
        "<code>python -m sdpa claims</code> judges all of them."
        if left_out
        else ""
    )
    cards = "".join(map(card, by_surprise(rows)))
    return (
        "<p>What five notes say about the scale. Each claim is turned into figures and judged by "
        "one rule: every interval inside the margin around the claim means reproduced. All "
        "intervals hold together with probability 0.95. The rule was fixed before measuring, but "
        "not all of the margins: most of those from before 23 November 2026 were committed with "
        "their results, and some were set or changed later when a result was known. The ledger "
        f"(docs/ledger.md) lists these changes.{rest}</p>"
        f"{_filter(rows)}"
        '<p class="quiet">Those that most readers would not expect come first. Open a claim to see '
        "what was found. Its axis shows the figure furthest outside its margin, which is shaded; "
        f'“All figures” has the others.</p><div class="claims">{cards}</div>'
    )


def _filter(rows: Sequence[Row]) -> str:
    """Buttons of one choice, on which the style sheet alone acts."""
    count = Counter(row.verdict for row in rows)
    choices = [("all", len(rows), "of the claims that are quick to judge")]
    choices += [(verdict, count[verdict], meaning) for verdict, meaning in VERDICTS.items()]
    labels = [
        f'<label class="{name}"><input type="radio" name="verdict" value="{name}"'
        f"{' checked' if name == 'all' else ''}{'' if number else ' disabled'}>"
        f"<b>{number} {name}</b> <span>{meaning}</span></label>"
        for name, number, meaning in choices
    ]
    return (
        '<form class="filter" autocomplete="off"><fieldset><legend>Show</legend>'
        f"{''.join(labels)}</fieldset></form>"
    )


def card(row: Row) -> str:
    """One claim: verdict and claim; to be opened, what was found, the figure that decides, and all.

    Claims that are not as the notes say are open; a script closes them where the screen is narrow.
    """
    claim = row.claim
    cited = " (cited)" if claim.cited else ""
    chinese = f'<span lang="zh">{CHINESE[row.verdict]}</span>'
    badge = f'<span class="verdict {row.verdict}">{row.verdict}{cited} {chinese}</span>'
    opened = "" if row.verdict == "reproduced" else " open"
    return f"""<article class="claim {row.verdict}" id="claim-{claim.id}"><details{opened}>
<summary><h3>{badge} {claim.id}</h3> <q>{escape(claim.claim)}</q></summary>
<p lang="zh">{escape(claim.claim_zh)}</p>
<p class="found">{escape(row.statement)}</p>
{_decisive(row)}<details><summary>All figures</summary>
{_table(row)}<p class="quiet">Notes {" ".join(claim.notes)}; seed {row.seed}.</p></details>
</details></article>
"""


def _decisive(row: Row) -> str:
    found = axis.decisive(row.figures, row.claim.expect)
    if found is None:
        return ""
    name = escape(found[0].name)
    return (
        f'<figure class="decides"><figcaption>{name}</figcaption>{axis.drawn(*found)}'
        f"{axis.described(*found)}</figure>\n"
    )


def _table(row: Row) -> str:
    lines = []
    for figure in row.figures:
        expect = row.expect.get(figure.name)
        cells = [interval(figure)]
        cells.append("" if expect is None else axis.claimed(expect))
        cells.append("" if expect is None or expect.law is None else f"{expect.law:.4g}")
        rest = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        lines.append(f'<tr><th scope="row">{escape(figure.name)}</th>{rest}</tr>')
    header = ("figure", "measured [interval] (draws)", "claimed, with its margin", "our law")
    names = "".join(f'<th scope="col">{name}</th>' for name in header)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Figures of {row.claim.id}">'
        f"<table><thead><tr>{names}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )
