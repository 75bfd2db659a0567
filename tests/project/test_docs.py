"""The pages under docs/: their examples run, the tests they name exist, lines and links hold."""

import ast
import doctest
import re
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from support import doctests
from support.markdown import wrapped_bullets

import sdpa

ROOT = Path(__file__).parents[2]
PAGES = {
    path.name: path.read_text(encoding="utf-8")
    for folder in ("docs", "docs/history")
    for path in (ROOT / folder).glob("*.md")
}
PAGES |= {
    f"zh/{path.name}": path.read_text(encoding="utf-8")
    for path in (ROOT / "docs" / "zh").glob("*.md")
}
EVERY_PAGE = pytest.mark.parametrize("page", sorted(PAGES))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{2,3} (.*)$", re.MULTILINE)
CONTINUED = {"beyond_memory.md", "derivations.md"}  # each section goes on from those above
# Programs without prompts read files, so they run in a folder of their own.
# page: (what makes the files, after the page's example; what then holds)
PROGRAMS = {
    "onnx.md": (
        "onnx.save(model, 'model.onnx'); x = feed['x']",
        "np.array_equal(outputs[0], ours)",
    ),
    "transformers.md": (
        "from transformers import AutoModelForCausalLM; model.save_pretrained(path := 'model')",
        "torch.equal(model(tokens, attention_mask=padding).logits[padding.bool()], "
        "results['c_attention'][0])",
    ),
}


def test_installations_are_those_of_a_package_that_is_on_no_index():
    """Extras are named from the clone, '.[...]', and exist; in messages, code and pages alike."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras, named, wrong = project["optional-dependencies"], 0, []
    folders = ["benchmarks", "docs", "examples", "notebooks", "sdpa", "sdpa_lab", "src", "tests"]
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    for path in [*paths, *ROOT.glob("*.md")]:
        if path.suffix not in (".md", ".rst", ".py", ".ipynb", ".txt", ".sh", ".h", ".c"):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if re.search(r"pip install (-\S+ )*['\"]?sdpa\b|\bsdpa\[[a-z]", text):
            wrong.append(path.name)
        for names in re.findall(r"'\.\[([\w,]+)\]'", text):
            named += 1
            wrong += [f"{path.name}: {name}" for name in names.split(",") if name not in extras]
    assert wrong == []
    assert named > 50


def examples_only(text):
    """`text` with every line outside its pycon blocks blank, so that line numbers stay."""
    kept = [""] * len(text.splitlines())
    for block in FENCE.finditer(text):
        if block[1] == "pycon":
            start = text[: block.start(2)].count("\n")
            lines = block[2].splitlines()
            kept[start : start + len(lines)] = lines
    return "\n".join(kept) + "\n"


def sections():
    """(page, heading, examples to run before, examples, their first line) where there are any."""
    found = []
    for page, text in sorted(PAGES.items()):
        text = examples_only(text).splitlines(keepends=True)
        original = PAGES[page].splitlines()
        starts = [i for i, line in enumerate(original) if HEADING.match(line)]
        for start, end in zip(starts, [*starts[1:], len(original)], strict=True):
            examples = "".join(text[start:end])
            if ">>>" in examples:
                heading = HEADING.match(original[start])[1]
                before = start if page in CONTINUED else starts[0]
                found.append((page, heading, "".join(text[:before]), examples, start))
    return found


SECTIONS = {f"{page}: {heading}": rest for page, heading, *rest in sections()}


def test_pages_are_there():
    first = {"claims.md", "derivations.md", "features.md", "mechanisms.md", "migration.md"}
    assert set(PAGES) >= first | {"performance.md", "theory.md"}
    assert len(SECTIONS) == len(sections()), "two sections of one page have the same heading"


@pytest.mark.parametrize("section", SECTIONS)
def test_examples(section, request):
    """Each section after the examples that open its page (or after all above it)."""
    opening, examples, line = SECTIONS[section]
    assert ">>> " in opening + examples
    names = doctests.run(opening, section, request)
    doctests.run(examples, section, request, line=line, namespace=names)


@pytest.mark.parametrize("page", PROGRAMS)
def test_programs(page, request, tmp_path, monkeypatch):
    """The page's program beside its own example, which makes what the program reads."""
    monkeypatch.chdir(tmp_path)
    _, examples, line = SECTIONS[f"{page}: An example"]
    names = doctests.run(examples, page, request, line=line)
    before, after = PROGRAMS[page]
    (program,) = (block[2] for block in FENCE.finditer(PAGES[page]) if block[1] == "py")
    for part in before, program:
        exec(compile(part, page, "exec"), names)
    assert eval(after, names)


@EVERY_PAGE
def test_no_wrapped_line_is_a_bullet(page):
    assert wrapped_bullets(PAGES[page]) == []


@EVERY_PAGE
def test_every_example_is_in_a_block_that_runs(page):
    assert PAGES[page].count(">>> ") == examples_only(PAGES[page]).count(">>> ")
    languages = {block[1] for block in FENCE.finditer(PAGES[page])}
    assert languages <= {"", "pycon", "sh", "text"} | ({"py"} if page in PROGRAMS else set())


@pytest.mark.parametrize("page", ["theory.md", "derivations.md"])
def test_formulas_are_typeset(page):
    """In TeX, none in an indented block, and none with a line end inside: forges differ on it."""
    text = FENCE.sub("", PAGES[page])
    blocks = re.compile(r"^\$\$\n(.*?)\n\$\$$", re.MULTILINE | re.DOTALL)
    assert len(blocks.findall(text)) > 12
    text = re.sub(r"`[^`]*`", "", blocks.sub("", text))
    assert not re.search(r"^    \S", text, re.MULTILINE)
    assert len(re.findall(r"\$[^$\n]+\$", text)) > 80
    assert "$" not in re.sub(r"\$[^$\n]+\$", "", text)


def test_fast_paths_have_their_figures():
    """Each has its reasons in docs/kernels.md, its attempts and a row with its gain in history."""
    design, attempts = PAGES["kernels.md"], PAGES["attempts.md"]
    table = attempts[attempts.index("## Fast paths") : attempts.index("## vec")]
    paths = [path.stem for path in (ROOT / "src" / "kernels" / "fast").glob("*.h")]
    assert len(paths) >= 4
    for path in paths:
        assert f"\n## fast/{path}\n" in design
        assert f"\n## fast/{path}\n" in attempts
        assert re.search(rf"^\| .*\b{path}\b", table, re.MULTILINE), path


def test_the_design_of_the_kernels_is_short():
    assert len(PAGES["kernels.md"].splitlines()) <= 200


def test_counts_of_architectures_are_those_of_their_table():
    row = r"^\| [^ |]+ \| ([a-z* ]+) \| [^|]*\| [^|]*\|$"
    table = re.findall(row, PAGES["architectures.md"], re.MULTILINE)[1:]  # below the heading
    bridge = PAGES["transformers.md"]
    counts = re.findall(r"^\| ([a-z* ]+) \| (\d+) \| ", bridge, re.MULTILINE)
    assert {name: int(number) for name, number in counts} == Counter(table)
    assert f"Of {len(table)} architectures" in bridge


def test_the_first_page_of_the_site_runs():
    page = ROOT / "docs" / "site" / "index.rst"
    failed, tried = doctest.testfile(str(page), module_relative=False, encoding="utf-8")
    assert tried > 5
    assert failed == 0


def test_the_reference_has_every_public_name():
    pages = (ROOT / "docs" / "site" / "reference").glob("*.rst")
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    described = re.findall(r"^\.\. auto\w+:: sdpa\.(\w+)$", text, re.MULTILINE)
    assert len(described) == len(set(described))
    assert set(sdpa.__all__) - {"__version__"} <= set(described)


# ------------------------------------------------------------------------------ features.md


@cache
def names_of_tests_in(path):
    """Names of the tests in a file, `Class::method` for those of a class, without running it."""

    def named(body):
        return [
            node.name
            for node in body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ]

    body = ast.parse(path.read_text(encoding="utf-8")).body
    names = set(named(body))
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            names |= {f"{node.name}::{name}" for name in named(node.body)}
    return names


def table_rows():
    """{number: (feature, cells)} of both tables."""
    rows = re.findall(r"^\| *(\d+) \|(.*)\|$", PAGES["features.md"], re.MULTILINE)
    cells = {int(n): [cell.strip() for cell in row.split("|")] for n, row in rows}
    assert len(cells) == len(rows)
    return {n: (feature, rest) for n, (feature, *rest) in cells.items()}


def feature_sections():
    """{number: (title, text)} of the explanations below the tables."""
    found = re.findall(r"^### (\d+)\. (.*)\n((?:(?!^##).*\n)*)", PAGES["features.md"], re.MULTILINE)
    return {int(n): (title, text) for n, title, text in found}


def test_every_row_is_explained():
    rows, explained = table_rows(), feature_sections()
    assert list(rows) == list(range(1, len(rows) + 1))
    assert len(rows) > 30
    assert {n: feature for n, (feature, _) in rows.items()} == {
        n: title for n, (title, _) in explained.items()
    }
    assert all(all(cells) and len(cells) in (8, 9) for _, cells in rows.values())


def test_each_cell_of_ours_is_backed_by_tests_that_exist():
    text = Path(__file__).with_name("features.toml").read_text(encoding="utf-8")
    backed = tomllib.loads(text)
    assert list(map(int, backed)) == sorted(table_rows())
    for tests in backed.values():
        assert tests
        for name in tests:
            path, _, test = name.partition("::")
            assert test in names_of_tests_in(ROOT / path), name
