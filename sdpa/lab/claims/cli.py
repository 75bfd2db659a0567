"""The ledger on the command line: `python -m sdpa claims`."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..tools.estimate import Estimate
from ..tools.table import with_interval
from .judge import ALPHA
from .record import Row


def text(rows: Sequence[Row]) -> str:
    """The ledger for people."""
    parts = [
        "Every claim of the notes, judged by measurement: reproduced, corrected (our law passes\n"
        "the test that the claim fails), refuted, or undecided. ± is half an interval; all\n"
        f"intervals of the whole ledger hold together with probability {1 - ALPHA:g}."
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
        shown = with_interval(Estimate(*figure[1:]))
        line = f"    {figure.name}: {shown} (n = {figure.n})"
        if expect := row.expect.get(figure.name):
            line += f"; claimed {expect.claimed:.4g}, margin {_margin(expect.margin)}"
            line += "" if expect.law is None else f"; law {expect.law:.4g}"
        lines.append(line)
    return "\n".join(lines)


def _margin(margin: float | tuple[float | None, float | None]) -> str:
    if not isinstance(margin, tuple):
        return f"±{margin:.3g}"
    below, above = ("any" if part is None else f"{part:.3g}" for part in margin)
    return f"-{below} +{above}".replace("-any", "any below").replace("+any", "any above")


def save(rows: Sequence[Row], directory: str) -> None:
    """What was measured per draw: DIRECTORY/ID.npz, one array per figure that has draws."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    for row in rows:
        if row.draws:
            arrays = {re.sub(r"[^\w=.-]+", "_", name): a for name, a in row.draws.items()}
            np.savez_compressed(folder / f"{row.claim.id}.npz", **arrays)
