"""The ledger on the command line: `python -m sdpa claims`."""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from math import floor, inf, isfinite, log10
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

import sdpa

from ..cli import writing
from . import IDS, chosen
from .judge import ALPHA
from .parallel import judged
from .record import WIDTH, Claim, Expect, Figure, Margin, Row, folded

KEPT = "sdpa-claims.json"
"""Where the judged rows of an interrupted run are kept, in the current folder."""


def text(rows: Sequence[Row], width: int = WIDTH) -> str:
    """The ledger for people, in lines of at most `width`."""
    about = (
        "Every claim of the notes, judged by measurement: reproduced, corrected (our law passes "
        "the test that the claim fails), refuted, or undecided. ± is half of a 95 % interval. "
        "Verdicts are by the intervals [low, high], of which all those of the whole ledger hold "
        f"together with probability {1 - ALPHA:g}."
    )
    count = Counter(row.verdict for row in rows)
    seconds = sum(row.seconds for row in rows)
    verdicts = ", ".join(f"{number} {verdict}" for verdict, number in count.most_common())
    end = f"{len(rows)} rows in {seconds:.0f} s: {verdicts}"
    parts = [folded(about, width, "", 0), *(_row(row, width) for row in rows), fill(end, width)]
    return "\n\n".join(parts)


def _row(row: Row, width: int) -> str:
    lines = [row.text(width)]
    laws = {expect.law_figure: expect for expect in row.expect.values()}
    least, nearest = row.distance or (inf, "")
    if isfinite(least):
        effect = row.smallest_effect[nearest]
        line = f"distance to the margin {least:.2g}, smallest effect {effect:.2g}: {nearest}"
        lines.append(folded(line, width, "    ", 8))
    for figure in row.figures:
        line = f"{figure.name}: {interval(figure)}"
        if expect := row.expect.get(figure.name):
            line += f"; {fixed(expect)}"
        elif expect := laws.get(figure.name):
            line += f"; {law(expect)}"
        lines.append(folded(line, width, "    ", 8))
    return "\n".join(lines)


def interval(figure: Figure) -> str:
    """Value and the ends of its interval to the digits that these have, and the draws.

    Examples
    --------
    >>> from sdpa_lab.claims.cli import interval
    >>> from sdpa_lab.claims.record import Figure
    >>> interval(Figure("x", 0.4321, 0.41, 0.46, 16)), interval(Figure("x", 2.0, 2.0, 2.0, 1))
    ('0.432 [0.410, 0.460] (n = 16)', '2 (n = 1)')
    """
    length = figure.high - figure.low
    if not length > 0:
        return f"{figure.value:.4g} (n = {figure.n})"
    decimals = max(0, 1 - floor(log10(length)))
    if decimals > 6 and abs(figure.value) < 1000 * length:
        return f"{figure.value:.2g} [{figure.low:.2g}, {figure.high:.2g}] (n = {figure.n})"
    value, low, high = (f"{x:.{decimals}f}" for x in (figure.value, figure.low, figure.high))
    return f"{value} [{low}, {high}] (n = {figure.n})"


def fixed(expect: Expect) -> str:
    """What the record fixes of its figure: claim and margin, and a law of it.

    Examples
    --------
    >>> from sdpa_lab.claims.cli import fixed
    >>> from sdpa_lab.claims.record import Expect
    >>> fixed(Expect("x", 1.0, 0.1)), fixed(Expect("x", 1.0, 0.1, law=2.0, law_margin=0.5))
    ('claimed 1, margin ±0.1', 'claimed 1, margin ±0.1, law 2 ±0.5')
    """
    text = f"claimed {expect.claimed:.4g}, margin {margin(expect.margin)}"
    own = expect.law is not None and expect.law_figure is None
    return f"{text}, {law(expect)}" if own else text


def law(expect: Expect) -> str:
    """Our law, and its margin where that is another one than the claim's."""
    own = "" if expect.law_margin is None else f" {margin(expect.law_margin)}"
    return f"law {expect.law:.4g}{own}"


def margin(allowed: Margin) -> str:
    """How far off a figure may be.

    Examples
    --------
    >>> from sdpa_lab.claims.cli import margin
    >>> margin(0.05), margin((0, None)), margin((None, 0.1))
    ('±0.05', '-0 any above', 'any below +0.1')
    """
    if not isinstance(allowed, tuple):
        return f"±{allowed:.3g}"
    below, above = ("any" if part is None else f"{part:.3g}" for part in allowed)
    return f"-{below} +{above}".replace("-any", "any below").replace("+any", "any above")


def run(
    only: Sequence[str] | None,
    *,
    seed: int,
    times: float,
    workers: int | None = None,
    directory: str | None = None,
    progress: Callable[[int], object] = lambda n: None,
    kept: str | Path = KEPT,
) -> tuple[list[Row], bool]:
    """`sdpa_lab.claims.ledger` that may be interrupted.

    Parameters
    ----------
    only, seed, times, progress
        As for `ledger`.
    workers : int, optional
        Processes, as for `sdpa_lab.claims.parallel.judged`.
    directory : str, optional
        `save` each row there.
    kept : path
        Ctrl-C leaves the judged rows in this file. A run with the same arguments takes them from
        there, and removes the file when no other rows are left in it.

    Returns
    -------
    rows : list of Row
    complete : bool
        False after Ctrl-C.

    Raises
    ------
    ValueError
        `only` names a row that does not exist.
    """
    file = Path(kept)
    settings = {"version": sdpa.__version__, "seed": seed, "times": times, "save": directory}
    known, wanted = _kept(file, settings), chosen(only)
    found = {claim.id: _row_of(claim, known[claim.id]) for claim in wanted if claim.id in known}
    remaining = [claim for claim in wanted if claim.id not in found]
    progress(len(found))
    judging = judged(remaining, rows=len(IDS), seed=seed, times=times, workers=workers)
    complete = False
    try:
        with closing(judging):
            for row in judging:
                found[row.claim.id] = row
                if directory:
                    save([row], directory)
                progress(1)
        complete = True
    except KeyboardInterrupt:
        known |= {name: _values(row) for name, row in found.items()}
        with writing(file):
            file.write_text(json.dumps(settings | {"rows": known}), encoding="utf-8")
    if complete and known and known.keys() <= found.keys():
        file.unlink()
    return [found[claim.id] for claim in wanted if claim.id in found], complete


def _kept(file: Path, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows in the file, by id; none where it is cut off, or of a run with other settings."""
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except ValueError:
        return {}
    if not isinstance(found, dict):
        return {}
    rows: dict[str, dict[str, Any]] = found.pop("rows", {})
    return rows if found == settings else {}


def _row_of(claim: Claim, kept: dict[str, Any]) -> Row:
    values = dict(kept)
    figures = tuple(Figure(*figure) for figure in values.pop("figures"))
    horizons = {int(steps): verdict for steps, verdict in values.pop("horizons").items()}
    return Row(claim=claim, figures=figures, draws={}, horizons=horizons, **values)


def _values(row: Row) -> dict[str, Any]:
    names = ("verdict", "statement", "figures", "level", "seed", "seconds", "trained", "horizons")
    return {name: getattr(row, name) for name in names}


def save(rows: Sequence[Row], directory: str) -> None:
    """What was measured per draw: DIRECTORY/ID.npz, one array per figure that has draws."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    for row in rows:
        if row.draws:
            arrays = {re.sub(r"[^\w=.-]+", "_", name): a for name, a in row.draws.items()}
            np.savez_compressed(folder / f"{row.claim.id}.npz", **arrays)
