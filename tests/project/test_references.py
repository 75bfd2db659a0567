"""The bibliography: made from one file, and whatever a text cites is in it."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
made = runpy.run_path(str(ROOT / "tools/references.py"))
ENTRIES = made["entries"]()

GLOBS = ("README.md", "docs/*.md", "docs/zh/*.md", "docs/models/*.md", "notebooks/*.py")
GLOBS += ("sdpa/**/*.py", "sdpa_lab/**/*.py", "examples/**/*.py", "benchmarks/**/*.py")
# The ledger quotes the package; the bibliography is what the others are checked against.
TEXTS = sorted({path for glob in GLOBS for path in ROOT.glob(glob)} - {made["PAGE"]})

NAME = r"[A-Z][\w\-]+"
LAST = rf",? (?:&|and) {NAME}"
CITATION = re.compile(
    rf"\b({NAME})(?:{LAST}| et al\.|(?:, {NAME})+(?:{LAST})?(?: et al\.)?)?"
    r",? (?:\"[^\"]{3,120}\",? )?\(?((?:19|20)\d\d)\b(?!-\d)"
)
NO_CITATION = {"After", "Before", "On", "OpenVINO", "Ubuntu", "Windows", "SSMax", "ICLR"}
NO_CITATION |= {"November", "December"}


def flat(path):
    """The text with its lines joined, comment signs left out."""
    return re.sub(r"\s*\n\s*(?:# )?\s*", " ", path.read_text(encoding="utf-8"))


def cited(text):
    return {(name, int(year)) for name, year in CITATION.findall(text) if name not in NO_CITATION}


def known(name, year, entries=ENTRIES):
    """An author of one of the sources of that year, by surname."""
    return any(
        entry["year"] == year and any(name in author.split(" ") for author in entry["authors"])
        for entry in entries.values()
    )


@pytest.mark.parametrize("path", made["made"](), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_files_are_made_from_the_list(path):
    text = path.read_text(encoding="utf-8")
    assert text == made["made"]()[path], "python tools/references.py"


@pytest.mark.parametrize("path", [made["ENGLISH"], made["CHINESE"]], ids=("english", "chinese"))
def test_the_page_on_the_root_of_d_k_lists_what_it_cites(path):
    listed = {key: entry for key, entry in ENTRIES.items() if "about_zh" in entry}
    assert all(entry["about_zh"].endswith("。") for entry in listed.values())
    text = path.read_text(encoding="utf-8").partition(made["MARKS"][0])[0]
    assert ("Wortsman", 2023) in cited(text)
    assert {source for source in cited(text) if not known(*source, listed)} == set()


def test_every_source_has_what_it_needs():
    labels = [made["label"](entry) for entry in ENTRIES.values()]
    assert len(set(labels)) == len(labels), "two sections of one name"
    for key, entry in ENTRIES.items():
        assert {"authors", "title", "year", "subject", "about"} <= set(entry), key
        assert key.endswith(str(entry["year"])) or key[:-3].endswith(str(entry["year"])), key
        assert re.fullmatch(r"\d{4}\.\d{4,5}", entry.get("arxiv", "0000.00000")), key
        assert entry["about"].endswith((".", ")")), key


def test_citations_are_found_in_a_text():
    text = """Chiang & Cholak 2022, as in Su (2021); Blanchard, Higham and Higham 2021; Dao et al.
    (2022), Luo et al., "Cosine normalization" (2018). Measured on December 2025, and 2025-01-02."""
    assert cited(re.sub(r"\s+", " ", text)) == {
        ("Chiang", 2022),
        ("Su", 2021),
        ("Blanchard", 2021),
        ("Dao", 2022),
        ("Luo", 2018),
    }
    assert known("Cholak", 2022)
    assert not known("Cholak", 2021)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_a_text_cites_is_in_the_list(path):
    text = flat(path)
    assert {source for source in cited(text) if not known(*source)} == set()
    numbers = set(re.findall(r"(?:arXiv:|arxiv\.org/abs/)(\d{4}\.\d{4,5})", text))
    assert numbers <= {entry.get("arxiv") for entry in ENTRIES.values()}
