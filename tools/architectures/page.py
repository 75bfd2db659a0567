"""The table of docs/transformers.md, from build/architectures.json."""

from __future__ import annotations

import json
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


def table(record: dict[str, Any]) -> str:
    """Counts of all results, then a row for each architecture."""
    rows = record["rows"]
    counts = Counter(row["verdict"] for row in rows.values())
    total = ", ".join(f"{counts[name]} {text}" for name, text in RESULTS.items() if counts[name])
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    lines = [
        f"Of {len(rows)} architectures: {total}. With {versions}.",
        "",
        "| architecture | result | difference | allowed | remarks |",
        "|---|---|---|---|---|",
    ]
    for name, row in sorted(rows.items()):
        figures = [each for each in row["classes"] if each.get("cases")]
        worst = max(figures, key=lambda each: each["difference"] / each["allowed"], default={})
        numbers = [f"{worst[name]:.1e}" if worst else "" for name in ("difference", "allowed")]
        # A refusal goes on to say what to do instead.
        remark = (
            row.get("why", "")
            .partition("; ")[0]
            .replace("|", "\\|")
            .replace("<", "&lt;")
            .replace("*", "\\*")
        )
        lines.append(f"| {name} | {RESULTS[row['verdict']]} | {' | '.join(numbers)} | {remark} |")
    return "\n".join(lines) + "\n"


def with_table(page: str, record: dict[str, Any]) -> str:
    before, rest = page.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    return before + MARKS[0] + "\n" + table(record) + "\n" + MARKS[1] + after


def write() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")
