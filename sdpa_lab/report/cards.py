"""The ledger in the report: a card for each claim, sorted by surprise, filtered by verdict."""

from collections import Counter
from collections.abc import Sequence
from html import escape

from ..claims import Row
from ..claims.cli import interval
from ..claims.record import VERDICTS
from . import axis
from .screen import by_surprise, finding
from .words import LANGUAGES, both, spans


def ledger(rows: Sequence[Row], left_out: int) -> str:
    """The cards, with the filter before them."""
    rest = both("claims-rest", number=left_out) if left_out else ""
    cards = "".join(map(card, by_surprise(rows)))
    return (
        f"<p>{both('claims-intro')}{rest}</p>{_filter(rows)}"
        f'<p class="quiet">{both("claims-order")}</p><div class="claims">{cards}</div>'
    )


def _filter(rows: Sequence[Row]) -> str:
    """Buttons of one choice, on which the style sheet alone acts."""
    count = Counter(row.verdict for row in rows)
    choices = [("all", len(rows)), *((verdict, count[verdict]) for verdict in VERDICTS)]
    labels = [
        f'<label class="{name.split()[0]}"><input type="radio" name="verdict" value="{name}"'
        f"{' checked' if name == 'all' else ''}{'' if number else ' disabled'}>"
        f"<b>{number} {both(name)}</b> <i>{both(f'means-{name}')}</i></label>"
        for name, number in choices
    ]
    return (
        f'<form class="filter" autocomplete="off"><fieldset><legend>{both("show")}</legend>'
        f"{''.join(labels)}</fieldset></form>"
    )


def card(row: Row) -> str:
    """One claim: verdict and claim; to be opened, what was found, the figure that decides, and all.

    Claims that are not as the notes say are open; a script closes them where the screen is narrow.
    """
    claim = row.claim
    kind = row.verdict.split()[0]
    cited = both("cited") if claim.cited else ""
    badge = f'<span class="verdict {kind}">{both(row.verdict)}{cited}</span>'
    opened = "" if row.verdict == "reproduced" else " open"
    found = spans({language: finding(row, language) for language in LANGUAGES})
    source = both("source", notes=" ".join(claim.notes), seed=row.seed)
    return f"""<article class="claim {kind}" id="claim-{claim.id}"><details{opened}>
<summary><h3>{badge} {claim.id}</h3> <q>{spans({"en": claim.claim, "zh": claim.claim_zh})}</q>
</summary>
<p class="found"><b>{both("found-heading")}</b>{found}</p>
{_decisive(row)}<details><summary>{both("all-figures")}</summary>
{_table(row)}<p class="quiet">{source}</p></details>
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
        cells = [escape(interval(figure))]
        cells.append("" if expect is None else axis.claimed(expect))
        cells.append("" if expect is None or expect.law is None else f"{expect.law:.4g}")
        rest = "".join(f"<td>{cell}</td>" for cell in cells)
        lines.append(f'<tr><th scope="row">{escape(figure.name)}</th>{rest}</tr>')
    header = ("figure", "measured", "claimed", "law")
    names = "".join(f'<th scope="col">{both(f"head-{name}")}</th>' for name in header)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Figures of {row.claim.id}">'
        f"<table><thead><tr>{names}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )
