"""docs/references.md, docs/references.bib and the bibliographies of docs/why.md and docs/zh/why.md.

From docs/references.toml:

python tools/references.py
"""

import re
import tomllib
from pathlib import Path
from textwrap import fill
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
SOURCE, PAGE, BIBTEX = (DOCS / f"references.{kind}" for kind in ("toml", "md", "bib"))
ENGLISH, CHINESE = DOCS / "why.md", DOCS / "zh/why.md"
MARKS = (
    "<!-- bibliography: written by tools/references.py -->\n",
    "<!-- end of bibliography -->\n",
)

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


def _title(entry: Entry) -> str:
    """With a link, or the journal where there is none."""
    if address(entry):
        return f"[{entry['title']}]({address(entry)})"
    return f"{entry['title']}, {entry['where']}"


def page() -> str:
    """The text of the page."""
    subjects: dict[str, list[Entry]] = {}
    for entry in entries().values():
        subjects.setdefault(entry["subject"], []).append(entry)
    parts = [HEAD]
    for subject, some in subjects.items():
        parts.append(f"## {subject[0].upper()}{subject[1:]}\n")
        for entry in sorted(some, key=_date):
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


def why(path: Path) -> str:
    """The page on the root of d_k in one of its languages, with its bibliography."""
    some = [entry for entry in entries().values() if "about_zh" in entry]
    written = _chinese if path == CHINESE else _english
    lines = [written(entry) for entry in sorted(some, key=_date)]
    before, rest = path.read_text(encoding="utf-8").split(MARKS[0])
    return "".join([before, MARKS[0], "\n", *lines, "\n", MARKS[1], rest.partition(MARKS[1])[2]])


def _date(entry: Entry) -> tuple[int, list[str]]:
    return entry["year"], entry["authors"]


def _english(entry: Entry) -> str:
    return f"- {label(entry)}: {_title(entry)}. {entry['about']}\n"


def _chinese(entry: Entry) -> str:
    name, title = label(entry), entry["title"]
    if "author_zh" in entry:
        # A title in Chinese has a translation behind it.
        name, title = f"{entry['author_zh']} {entry['year']}", title.partition(" (")[0]
    return f"- {name}：{_title(entry | {'title': title})}。{entry['about_zh']}\n"


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


def made() -> dict[Path, str]:
    """The text of every file."""
    return {PAGE: page(), BIBTEX: bibtex()} | {path: why(path) for path in (ENGLISH, CHINESE)}


def main() -> None:
    """Write all files."""
    for path, text in made().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
