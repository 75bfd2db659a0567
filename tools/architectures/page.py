"""The table of docs/transformers.md, from build/architectures.json."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE, RECORD = ROOT / "docs" / "transformers.md", ROOT / "build" / "architectures.json"
MARKS = (
    "<!-- architectures: written by tools/architectures -->\n",
    "<!-- end of architectures -->\n",
)
RESULTS = {
    "equal": "equal",
    "own": "keeps its own",
    "refused": "refused by name",
    "not built": "not built",
    "wrong": "**wrong**",
}


def _wrapped(text: str) -> str:
    text = text.replace("<", "&lt;").replace("*", "\\*")
    return textwrap.fill(
        text, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def table(record: dict[str, Any]) -> str:
    """Counts of all results, a row for each architecture, and the remarks."""
    rows = record["rows"]
    counts = Counter(row["verdict"] for row in rows.values())
    total = ", ".join(f"{counts[name]} {text}" for name, text in RESULTS.items() if counts[name])
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    lines = [
        *(f"Of {len(rows)} architectures:", f"{total}.", f"With {versions}.", ""),
        *("| architecture | result | difference | allowed |", "|---|---|---|---|"),
    ]
    remarks: dict[str, list[str]] = {}
    for name, row in sorted(rows.items()):
        figures = [each for each in row["classes"] if each.get("cases")]
        worst = max(figures, key=lambda each: each["difference"] / each["allowed"], default={})
        numbers = [f"{worst[name]:.1e}" if worst else "" for name in ("difference", "allowed")]
        lines.append(f"| {name} | {RESULTS[row['verdict']]} | {' | '.join(numbers)} |")
        if remark := row.get("why", "").partition("; ")[0]:  # a refusal goes on with the remedy
            remarks.setdefault(remark, []).append(name)
    lines.append("")
    lines += [_wrapped(f"- {', '.join(names)}: {remark}") for remark, names in remarks.items()]
    return "\n".join(lines) + "\n"


def with_table(page: str, record: dict[str, Any]) -> str:
    before, rest = page.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    return before + MARKS[0] + "\n" + table(record) + "\n" + MARKS[1] + after


def write() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")
