"""The ledger on the command line: `python -m sdpa claims`."""

import re
from collections import Counter
from collections.abc import Sequence
from math import floor, log10
from pathlib import Path

import numpy as np

from .judge import ALPHA
from .record import Figure, Margin, Row


def text(rows: Sequence[Row]) -> str:
    """The ledger for people."""
    parts = [
        "Every claim of the notes, judged by measurement: reproduced, corrected (our law passes\n"
        "the test that the claim fails), refuted, or undecided. ± is half of a 95 % interval.\n"
        "Verdicts are by the intervals [low, high], of which all those of the whole ledger hold\n"
        f"together with probability {1 - ALPHA:g}."
    ]
    parts += [_row(row) for row in rows]
    count = Counter(row.verdict for row in rows)
    seconds = sum(row.seconds for row in rows)
    verdicts = ", ".join(f"{number} {verdict}" for verdict, number in count.most_common())
    parts.append(f"{len(rows)} rows in {seconds:.0f} s: {verdicts}")
    return "\n\n".join(parts)


def _row(row: Row) -> str:
    lines = [str(row)]
    for figure in row.figures:
        line = f"    {figure.name}: {interval(figure)}"
        if expect := row.expect.get(figure.name):
            line += f"; claimed {expect.claimed:.4g}, margin {margin(expect.margin)}"
            line += "" if expect.law is None else f"; law {expect.law:.4g}"
        lines.append(line)
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


def save(rows: Sequence[Row], directory: str) -> None:
    """What was measured per draw: DIRECTORY/ID.npz, one array per figure that has draws."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    for row in rows:
        if row.draws:
            arrays = {re.sub(r"[^\w=.-]+", "_", name): a for name, a in row.draws.items()}
            np.savez_compressed(folder / f"{row.claim.id}.npz", **arrays)
