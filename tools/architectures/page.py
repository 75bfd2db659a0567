"""The pages on every architecture, from build/architectures.json: counts and table."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BRIDGE, TABLE = ROOT / "docs" / "transformers.md", ROOT / "docs" / "architectures.md"
RECORD = ROOT / "build" / "architectures.json"
MARKS = (
    "<!-- architectures: written by tools/architectures -->\n",
    "<!-- end of architectures -->\n",
)
RESULTS = {  # name in the record: (name in the pages, what it means)
    "equal": (
        "equal",
        'the model calls `"c_attention"`, and would show it if attention gave zeros',
    ),
    "own": ("keeps its own", "it never calls it, and its result is the same"),
    "refused": (
        "refused by name",
        "loading or calling raises an exception that names what is missing",
    ),
    "not built": ("not built", "no small model was found that runs; the table has the reason"),
    "wrong": ("**wrong**", "its results differ"),
}


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _versions(record: dict[str, Any]) -> str:
    return ", ".join(f"{name} {number}" for name, number in record["versions"].items())


def counts(record: dict[str, Any]) -> str:
    """What each result means, with the number of architectures that have it."""
    rows = record["rows"]
    found = Counter(row["verdict"] for row in rows.values())
    lines = [_wrapped(f"Of {len(rows)} architectures, with {_versions(record)}:"), ""]
    lines += ["| result | architectures | means |", "|---|---|---|"]
    lines += [
        f"| {name} | {found[key]} | {meaning} |"
        for key, (name, meaning) in RESULTS.items()
        if found[key]
    ]
    return "\n".join(lines) + "\n"


def table(record: dict[str, Any]) -> str:
    """A row for each architecture, and the remarks."""
    lines = [
        *(f"With {_versions(record)}.", ""),
        *("| architecture | result | difference | allowed |", "|---|---|---|---|"),
    ]
    remarks: dict[str, list[str]] = {}
    for name, row in sorted(record["rows"].items()):
        figures = [each for each in row["classes"] if each.get("cases")]
        worst = max(figures, key=lambda each: each["difference"] / each["allowed"], default={})
        numbers = [f"{worst[name]:.1e}" if worst else "" for name in ("difference", "allowed")]
        lines.append(f"| {name} | {RESULTS[row['verdict']][0]} | {' | '.join(numbers)} |")
        if remark := row.get("why", "").partition("; ")[0]:  # a refusal goes on with the remedy
            remarks.setdefault(remark, []).append(name)
    lines.append("")
    for remark, names in remarks.items():
        text = remark.replace("<", "&lt;").replace("*", "\\*")
        lines.append(_wrapped(f"- {', '.join(names)}: {text}", "  "))
    return "\n".join(lines) + "\n"


def between_marks(page: str, text: str) -> str:
    before, rest = page.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    return before + MARKS[0] + "\n" + text + "\n" + MARKS[1] + after


def write() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    for page, text in (BRIDGE, counts(record)), (TABLE, table(record)):
        page.write_text(between_marks(page.read_text(encoding="utf-8"), text), encoding="utf-8")
