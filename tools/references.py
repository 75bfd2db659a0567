"""docs/references.md and docs/references.bib, from docs/references.toml.

python tools/references.py
"""

import re
import tomllib
from pathlib import Path
from textwrap import fill
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
SOURCE, PAGE, BIBTEX = (DOCS / f"references.{kind}" for kind in ("toml", "md", "bib"))

HEAD = """# References

What the documentation, the notebooks and the docstrings cite, by subject, and what for.
[references.bib](references.bib) has the same for LaTeX. Both are written by `tools/references.py`
from `docs/references.toml`, where a source is added.
"""

Entry = dict[str, Any]


def entries() -> dict[str, Entry]:
    """The sources by key, in the order of the file."""
    found: dict[str, Entry] = tomllib.loads(SOURCE.read_text(encoding="utf-8"))
    return found


def surname(author: str) -> str:
    """The last word of a name, or the name of a team."""
    return author if author.endswith("Team") else author.rpartition(" ")[2]


def label(entry: Entry) -> str:
    """How a text cites it, and the heading of its section."""
    first, *rest = entry["authors"]
    names = surname(first)
    if len(rest) == 1:
        names += f" and {surname(rest[0])}"
    elif rest:
        names += " et al."
    return f"{names} {entry['year']}"


def address(entry: Entry) -> str:
    """Where to read it; "" if that is not known."""
    if "arxiv" in entry:
        return f"https://arxiv.org/abs/{entry['arxiv']}"
    return str(entry.get("url", ""))


def page() -> str:
    """The text of the page."""
    subjects: dict[str, list[Entry]] = {}
    for entry in entries().values():
        subjects.setdefault(entry["subject"], []).append(entry)
    parts = [HEAD]
    for subject, some in subjects.items():
        parts.append(f"## {subject[0].upper()}{subject[1:]}\n")
        for entry in sorted(some, key=lambda e: (e["year"], e["authors"])):
            authors = ", ".join(entry["authors"]).replace(", others", " et al.")
            title = f'"{entry["title"]}"'
            if address(entry):
                title = f"[{title}]({address(entry)})"
            where = " ".join(str(entry[part]) for part in ("where", "year") if part in entry)
            if re.search(r"20\d\d|,|\d$", entry.get("where", "")):
                where = f"{entry['where']} ({entry['year']})"
            if "arxiv" in entry:
                where += f", arXiv:{entry['arxiv']}"
            # A break inside a link or between Chinese letters would be shown as a space.
            text = f"{authors}: {title}, {where}."
            about = fill(entry["about"], 100, break_on_hyphens=False)
            parts.append(f"### {label(entry)}\n\n{text}\n{about}\n")
    return "\n".join(parts)


def bibtex() -> str:
    """The same for LaTeX."""
    return "\n".join(_bibtex(key, entry) for key, entry in entries().items())


def _bibtex(key: str, entry: Entry) -> str:
    # Double braces keep the capitals of a title and the name of a team.
    names = (f"{{{name}}}" if name.endswith("Team") else name for name in entry["authors"])
    fields = {"author": " and ".join(names), "title": f"{{{entry['title']}}}"}
    fields["year"] = str(entry["year"])
    if "where" in entry:
        fields["howpublished"] = re.sub(r"(?<!\\)&", r"\\&", entry["where"])
    if "arxiv" in entry:
        fields |= {"eprint": entry["arxiv"], "archiveprefix": "arXiv"}
    if address(entry):
        fields["url"] = address(entry)
    lines = ",\n".join(f"  {name} = {{{value}}}" for name, value in fields.items())
    return f"@misc{{{key},\n{lines}\n}}\n"


def main() -> None:
    """Write both files."""
    PAGE.write_text(page(), encoding="utf-8")
    BIBTEX.write_text(bibtex(), encoding="utf-8")


if __name__ == "__main__":
    main()
