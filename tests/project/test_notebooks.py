"""The notebooks as committed: the form that notebooks/README.md gives, outputs that belong to it.

`make notebooks` runs them; what their cells assert is checked there.
"""

import ast
import doctest
import re
from pathlib import Path

import pytest
from support.markdown import wrapped_bullets

from sdpa_lab.claims import IDS, claims
from sdpa_lab.claims.chinese import FINDINGS
from sdpa_lab.claims.record import VERDICTS

jupytext = pytest.importorskip("jupytext", reason="needs jupytext: pip install '.[notebooks]'")

FOLDER = Path(__file__).parents[2] / "notebooks"
SOURCES = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}
NUMBERED = [name for name in SOURCES if name[0].isdigit()]
PICTURE = "A picture first"  # optional, for a question that is a picture before it is a formula
HEADINGS = ["Prediction", "In plain NumPy", "Measurement", "Figure", "Conclusion", "Exercises"]
LONGEST_CELL = 20  # lines of code; what needs more is a function of sdpa_lab


def read(name, suffix):
    return jupytext.read(FOLDER / f"{name}{suffix}")


def sections(notebook):
    """{heading: cells} below the title, in order; the title's own under ""."""
    found = {"": []}
    for cell in notebook.cells:
        heading = re.match(r"## (.*)", cell.source) if cell.cell_type == "markdown" else None
        if heading:
            found[heading[1]] = []
        found[list(found)[-1]].append(cell)
    return found


def code(cells):
    return [cell for cell in cells if cell.cell_type == "code"]


def has_assertion(cells):
    nodes = [node for cell in code(cells) for node in ast.walk(ast.parse(cell.source))]
    calls = [
        node.func.attr
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    return any(isinstance(node, ast.Assert) for node in nodes) or any(
        name.startswith("assert_") for name in calls
    )


def test_the_table_lists_every_notebook():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    numbers = re.findall(r"^\| (\d\d) \|", text, re.MULTILINE)
    assert numbers == [f"{number:02}" for number in range(22)]
    assert {name[:2] for name in NUMBERED} <= set(numbers)
    assert len({name[:2] for name in NUMBERED}) == len(NUMBERED)


@pytest.mark.parametrize("name", [*NUMBERED, "template"])
def test_form(name):
    found = sections(read(name, ".py"))
    assert [heading for heading in found if heading != PICTURE] == ["", *HEADINGS]
    assert PICTURE not in found or list(found)[1] == PICTURE
    (opening,) = found[""]
    assert re.match(r"# .*\?\n", opening.source), "the title is a question"
    assert "**Question.**" in opening.source
    assert "**Common misconception.**" in opening.source
    assert has_assertion(found["In plain NumPy"])
    assert "my_guess = " in code(found["In plain NumPy"])[-1].source, (
        "a guess before it is measured"
    )
    assert has_assertion(found["Measurement"])
    assert re.search(r"\b(sdpa_)?lab\b", "".join(cell.source for cell in found["Measurement"]))
    assert len(code(found["Figure"])) == 1
    text = "\n".join(cell.source for cell in found["Exercises"])
    assert re.findall(r"^(\d)\. ", text, re.MULTILINE) == ["1", "2", "3"]
    solutions = re.findall(
        r"<details><summary>Solution</summary>\n\n(.+?)\n\n</details>", text, re.DOTALL
    )
    assert len(solutions) == 3


@pytest.mark.parametrize("name", [*NUMBERED, "template"])
def test_no_wrapped_line_is_a_bullet(name):
    for cell in read(name, ".py").cells:
        if cell.cell_type == "markdown":
            assert wrapped_bullets(cell.source) == []


@pytest.mark.parametrize("name", [*NUMBERED, "template"])
def test_cells_call_what_sdpa_lab_computes(name):
    for cell in code(read(name, ".py").cells):
        lines = [line for line in cell.source.splitlines() if line.strip()]
        assert len(lines) <= LONGEST_CELL, cell.source


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "template"])
def test_outputs_belong_to_the_source(name):
    source, executed = read(name, ".py"), read(name, ".ipynb")
    assert [(cell.cell_type, cell.source) for cell in source.cells] == [
        (cell.cell_type, cell.source) for cell in executed.cells
    ], "make notebooks"
    cells = code(executed.cells)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    text = " ".join(str(output) for output in outputs)
    assert not re.search(r"(?<![\w/])/(?:tmp|home|root|work|opt|usr)/", text), "a path"
    assert all("execution" not in cell.metadata for cell in cells), "times of the run"


@pytest.mark.parametrize("name", NUMBERED)
def test_no_printed_table_has_more_than_eight_rows(name):
    """A title, a header and eight rows: what `Table` prints stands in one block of lines."""
    cells = code(sections(read(name, ".ipynb"))["Measurement"])
    printed = "\n\n".join(o["text"] for cell in cells for o in cell.outputs if "text" in o)
    blocks = [block.splitlines() for block in re.split(r"\n\s*\n", printed.strip())]
    assert max(map(len, blocks)) <= 10, name


@pytest.mark.parametrize("name", NUMBERED)
def test_there_is_one_figure(name):
    executed = sections(read(name, ".ipynb"))
    figures = {
        heading: sum(
            "image/png" in output.get("data", {}) for cell in code(cells) for output in cell.outputs
        )
        for heading, cells in executed.items()
    }
    shown = [heading for heading in (PICTURE, "Figure") if heading in executed]
    assert figures == {**dict.fromkeys(figures, 0), **dict.fromkeys(shown, 1)}


def judged(name):
    """The rows of the ledger that a notebook's cells judge, and the verdicts that they printed."""
    rows, printed = [], ""
    for cell in code(read(name, ".ipynb").cells):
        for listed in re.findall(r"\bledger\(\[([^]]*)\]", cell.source):
            rows += re.findall(r'"([^"]+)"', listed)
        printed += "".join(output.get("text", "") for output in cell.outputs)
    verdicts = "|".join(VERDICTS)
    return rows, dict(re.findall(rf"^([\w-]+): ({verdicts})\b", printed, re.MULTILINE))


@pytest.mark.parametrize("name", NUMBERED)
def test_the_rows_of_the_ledger_have_the_verdicts_of_its_page(name):
    rows, printed = judged(name)
    page = (FOLDER.parent / "docs/ledger.md").read_text(encoding="utf-8")
    assert set(rows) == set(printed)
    for row, verdict in printed.items():
        section = page.partition(f"\n## {row}\n")[2].partition("\n## ")[0]
        assert f"- Verdict: **{verdict}** " in section, row


@pytest.mark.parametrize("name", NUMBERED)
def test_what_the_rows_found_is_in_the_words_of_today(name):
    rows, _ = judged(name)
    printed = "".join(
        output.get("text", "")
        for cell in code(read(name, ".ipynb").cells)
        for output in cell.outputs
    )
    known = claims()
    for row in rows:
        (block,) = re.findall(rf"^{row}: .*(?:\n .*)*", printed, re.MULTILINE)
        english, _, chinese = " ".join(block.split()).partition(" 结论 ")
        record = known[row]
        assert f" claim {record.claim} found " in english, row
        undecided = "Not decided by these draws: "
        sentences = filter(None, (record.holds, record.law, record.depends, undecided))
        assert any(filled(sentence).search(english) for sentence in sentences), row
        assert filled(FINDINGS[row][1]).search(chinese), row


def filled(sentence):
    """A pattern of a sentence with values in the place of its fields."""
    parts = re.split(r"\{[^}]*\}", " ".join(sentence.split()))
    return re.compile(".{1,30}".join(map(re.escape, parts)))


def functions(code):
    """{name: the function, whatever its numbers are}, of top-level functions in pieces of code."""
    found = {}
    for piece in code:
        for node in ast.parse(piece).body:
            if isinstance(node, ast.FunctionDef):
                text = re.sub(r"Constant\(value=\d+\)", "Constant()", ast.dump(node))
                found[node.name] = text
    return found


def test_the_ten_attentions_are_those_of_their_page():
    page = (FOLDER.parent / "docs/programs.md").read_text(encoding="utf-8")
    listed = dict.fromkeys(re.findall(r"^\| \[(.*?)\]\(#.*\|$", page, re.MULTILINE))
    assert len(listed) == 10
    found = sections(read("attentions", ".py"))
    assert {heading.lower() for heading in found} >= {name.lower() for name in listed}
    examples = doctest.DocTestParser().get_examples(
        "".join(
            re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", page, re.M | re.S | re.I)[1]
            for name in listed
        )
    )
    theirs = functions(example.source for example in examples)
    theirs.pop("gradients")  # of the second derivatives
    ours = functions(cell.source for cells in found.values() for cell in code(cells))
    assert len(theirs) == 11  # a graph has two
    assert {name: ours.get(name) for name in theirs} == theirs


def test_every_notebook_judges_rows():
    assert [name for name in NUMBERED if not judged(name)[0]] == []


def test_the_exercise_on_many_rows_has_their_number():
    text = (FOLDER / "00_judging_a_claim.py").read_text(encoding="utf-8")
    assert f"The ledger has {len(IDS)} rows." in text
    assert text.count(str(len(IDS))) == 4
