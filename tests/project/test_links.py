"""Links from page to page, in Markdown and in notebooks: file and heading are there."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("*.md", "docs/**/*.md", "notebooks/*.md", "notebooks/*.ipynb", "examples/**/*.md")
PAGES = sorted(path.relative_to(ROOT).as_posix() for glob in FOLDERS for path in ROOT.glob(glob))
CODE = re.compile(r"^(`{3,}).*?^\1`*$|(`+)(?!`).+?(?<!`)\2(?!`)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!\w+:)([^)\s#]*)(?:#([^)\s]*))?\)")


@cache
def text(page):
    """The Markdown of a page, or of a notebook's cells."""
    source = (ROOT / page).read_text(encoding="utf-8")
    if not page.endswith(".ipynb"):
        return source
    cells = json.loads(source)["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def anchors(markdown):
    """The anchors of headings, as GitHub and MyST name them, and of HTML elements with an id."""
    without_blocks = re.sub(r"^(`{3,}).*?^\1`*$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    found = []
    for heading in re.findall(r"^#{1,6} +(.*?) *$", without_blocks, re.MULTILINE):
        shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        before = sum(bool(re.fullmatch(re.escape(slug) + r"(-\d+)?", name)) for name in found)
        found.append(f"{slug}-{before}" if slug in found else slug)
    return {*found, *re.findall(r'<\w+ [^>]*\bid="([^"]+)"', without_blocks)}


def broken(page, markdown):
    """Links of a page that lead nowhere."""
    found = []
    for target, anchor in LINK.findall(CODE.sub("", markdown)):
        path = (ROOT / page).parent / target if target else ROOT / page
        if not path.exists():
            found.append(target)
        elif anchor and path.suffix in (".md", ".ipynb"):
            there = markdown if not target else text(path.resolve().relative_to(ROOT).as_posix())
            found += [f"{target}#{anchor}"] if anchor not in anchors(there) else []
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    assert broken(page, text(page)) == []


def test_broken_links_are_found():
    page = "docs/claims.md"
    assert broken(page, "[a](nowhere.md) [b](theory.md) [c](../README.md)") == ["nowhere.md"]
    assert broken(page, "# A `b` c\n## A b, c!\n[a](#a-b-c) [b](#a-b-c-1)") == []
    assert broken(page, "# A\n[a](#b) [b](theory.md#nothing)") == ["#b", "theory.md#nothing"]
    assert broken(page, "`[a](nowhere.md)`\n\n```text\n[a](nowhere.md)\n```\n") == []
    assert broken(page, "[a](https://example.org/#b) [c](mailto:a@example.org)") == []
