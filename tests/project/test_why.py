"""The page on why attention divides by the square root of d_k, in both languages."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from sdpa_lab.claims.cited import publications

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "why"
PAGES = {"en": ROOT / "docs" / "why.md", "zh": ROOT / "docs" / "zh" / "why.md"}
TEXTS = {language: path.read_text(encoding="utf-8") for language, path in PAGES.items()}
EVERY = pytest.mark.parametrize("language", PAGES)

PICTURE = re.compile(r"^!\[(.+)\]\((.+)\)$", re.MULTILINE)
NUMBER = re.compile(r"(?<![\d.:/-])-?\d+\.\d+(?!\.?\d)(?:±\.\d+)?")
TEXT = re.compile("<text[^>]*>(.*?)</text>")
CITED = re.compile(r"^- .*?(?=^(?:- |#|$))|^```text.*?^```", re.MULTILINE | re.DOTALL)


@EVERY
def test_five_figures_and_five_sentences(language):
    text = TEXTS[language]
    suffix = {"en": ".svg", "zh": ".zh.svg"}[language]
    pictures = [PAGES[language].parent / path for _, path in PICTURE.findall(text)]
    assert [path.name.removesuffix(suffix) for path in pictures] == figures()
    assert all(path.is_file() for path in pictures)
    assert len(re.findall(r"^> \*\*", text, re.MULTILINE)) == 5
    assert re.search("@misc{", text)


def figures():
    return ["spread", "softmax", "gradients", "step", "divisors"]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.svg")), ids=lambda path: path.name)
def test_figures_are_readable_on_light_and_on_dark(path):
    svg = path.read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in svg
    assert 'fill="var(--page)"' in svg
    # No colour but those of the two schemes.
    assert not re.search("#[0-9a-f]{6}", re.sub("<style>.*?</style>", "", svg, flags=re.DOTALL))
    words = [word for text in TEXT.findall(svg) for word in text.split()]
    assert words
    if path.name.endswith(".zh.svg"):
        english = {word for word in words if re.fullmatch("[A-Za-z:,]{2,}", word)}
        assert english <= {"SGD", "Adam"}


def test_pictures_are_made_from_figures():
    pytest.importorskip("matplotlib")
    from sdpa_lab.report import why

    assert list(why.FIGURES) == figures()
    written = {path.name for path in FOLDER.iterdir()}
    assert written == {f"{name}.txt" for name in (*why.FIGURES, *why.TABLES)} | {
        f"{name}{end}" for name in why.FIGURES for end in (".svg", ".zh.svg")
    }
    table = why.spread()
    for language, suffix in (("en", ""), ("zh", ".zh")):
        made = why.picture(why.plot_spread(table), language)
        committed = (FOLDER / f"spread{suffix}.svg").read_text(encoding="utf-8")
        assert TEXT.findall(made) == TEXT.findall(committed)
        assert len(TEXT.findall(made)) > 10


def test_tables_without_training_are_what_the_laboratory_says():
    from sdpa_lab.report import why

    for name in ("example", "spread"):
        table = (why.FIGURES.get(name) or (why.TABLES[name],))[0]()
        assert f"{table}\n" == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


@EVERY
def test_every_number_was_printed(language):
    """By the command whose tables lie in docs/why, by an example of the page, or by its source."""
    printed = "".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.txt"))
    examples = "".join(re.findall(r"^```pycon\n(.*?)^```", TEXTS[language], re.M | re.S))
    known = set(NUMBER.findall(printed)) | set(NUMBER.findall(examples))
    known |= {number.partition("±")[0] for number in known}
    text = CITED.sub("", TEXTS[language])
    said = set(NUMBER.findall(re.sub(r"\$.*?\$|`.*?`", "", text)))
    assert len(said) > 15
    # The ends of the learning rates.
    assert said - known == {"0.00032", "0.32"}


def test_the_count_of_models_is_that_of_the_census():
    counted = publications()["universal"]["census"]
    numbers = [counted[name] for name in ("with QK-norm", "with attention")]
    release = f"transformers\\s{counted['transformers']}"
    english = re.search(
        rf"(\d+) of the (\d+) model folders of {release} that have attention", TEXTS["en"]
    )
    chinese = re.search(rf"{release} 里带注意力的模型实现有 (\d+) 个，其中 (\d+) 个", TEXTS["zh"])
    assert [int(x) for x in english.groups()] == numbers
    assert [int(x) for x in chinese.groups()] == numbers[::-1]


def test_both_pages_have_the_same_numbers():
    found = [set(NUMBER.findall(CITED.sub("", text))) for text in TEXTS.values()]
    assert found[0] == found[1]


def test_lines_of_chinese_are_not_broken():
    """A browser shows a line end as a space, which Chinese has none of."""
    text = re.sub(r"^```.*?^```", "", TEXTS["zh"], flags=re.MULTILINE | re.DOTALL)
    lines = text.split("\n")
    starts = ("#", "|", ">", "!", "-", "1", "2", "3", "4", "5", "```")
    for line, following in pairwise(lines):
        assert not (line and following) or following.startswith(starts), line


@pytest.mark.parametrize(
    "place", ["README.md", "notebooks/README.md", "docs/site/index.rst", "docs/demo.md"]
)
def test_entries_lead_to_it(place):
    text = (ROOT / place).read_text(encoding="utf-8")
    assert len(re.findall(r"\bwhy(?:\.md\)|>`)", text)) >= 1
    if place == "README.md":
        assert text.count("docs/why.md") == 1


def test_screen_and_report_lead_to_it_first(monkeypatch):
    from sdpa_lab.report import screen, words

    monkeypatch.chdir(ROOT)
    for language, path in screen.PAGES.items():
        assert ROOT / path == PAGES[language]
        told = screen._next("report.html", 100, language)
        assert told.startswith(words.say("next", language) + path)
