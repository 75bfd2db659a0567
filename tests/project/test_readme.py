"""The documents are true: examples run, commands and names exist, figures are ours."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import sdpa
import sdpa_lab as lab
from sdpa_lab.report.printout import scale_text

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
API, DEMO, FEATURES = (
    (ROOT / "docs" / name).read_text(encoding="utf-8")
    for name in ("api.md", "demo.md", "features.md")
)


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_examples_run():
    namespace = {}
    for block in blocks(README, "python"):
        assert "assert " in block
        exec(compile(block, "README.md", "exec"), namespace)
    assert len(blocks(README, "python")) == 3


def test_readme_is_short():
    assert len(README.splitlines()) <= 160


def test_features_are_those_of_the_page():
    """Each row of the README has the cells of the page of features, and links to its section."""
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", FEATURES, re.MULTILINE)
    page = {number: [cell.strip() for cell in row.split("|")] for number, row in rows}
    shown = re.findall(r"^\| \[(.*)\]\(docs/features\.md#(.*)\) \| (.*) \|$", README, re.MULTILINE)
    assert len(shown) > 10
    for title, anchor, cells in shown:
        number = anchor.partition("-")[0]
        feature, sdpa_cell, torch, _, jax, _, ort, *_ = page[number]
        assert title == feature
        assert cells.split(" | ") == [sdpa_cell, torch, jax, ort]
        slug = re.sub(r"[^a-z0-9 -]", "", f"{number} {feature}".lower()).replace(" ", "-")
        assert anchor == slug


def test_table_is_what_the_main_job_prints():
    """Compare word by word, numbers to one unit of the last digit: another CPU rounds otherwise."""
    pytest.importorskip("sklearn")
    (block,) = blocks(DEMO, "text")
    start, end = block.index("\ndigits: scores and weights"), block.index("\nSpeed against")
    printed = scale_text("digits", lab.scale_effect(lab.digits()))
    expected, ours = block[start:end].splitlines(), printed.splitlines()
    assert len(expected) == len(ours)
    number = re.compile(r"\d*\.?\d+")
    for a, b in zip(expected, ours, strict=True):
        assert number.sub("#", a).split() == number.sub("#", b).split()
        for x, y in zip(number.findall(a), number.findall(b), strict=True):
            unit = 10.0 ** -min(len(z.partition(".")[2]) for z in (x, y))
            assert abs(float(x) - float(y)) <= 1.001 * unit, (a, b)


def test_functions_are_there_and_all_are_mentioned():
    tables = API[API.index("## Functions") : API.index("## Options of attention")]
    rows = "".join(re.findall(r"^\|.*$", tables, re.MULTILINE))
    mentioned = set(re.findall(r"`(?:sdpa\.)?(\w+)[`(.]", rows)) - {"x", "alibi_slopes"}
    functions = {name for name in sdpa.__all__ if name[0].islower()}
    functions |= {"MultiHeadAttention", "KVCache"}
    assert mentioned == functions


def test_options_are_there_and_all_are_mentioned():
    section = API[API.index("## Options of attention") : API.index("## Worth knowing")]
    signature = sdpa.attention.__text_signature__
    options = re.findall(r"(\w+)=", signature)
    assert sorted(options) == sorted(re.findall(r"^- `(\w+)`: ", section, re.MULTILINE))


def make_targets():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    names = re.search(r"^\.PHONY: ((?:.*\\\n)*.*)$", makefile, re.MULTILINE)[1]
    return set(names.replace("\\", "").split())


def test_help_names_every_target():
    text = subprocess.check_output(["make", "help"], cwd=ROOT, text=True)
    named = re.findall(r"^  make (\S+) +\S", text, re.MULTILINE)
    assert sorted(named) == sorted(make_targets() - {"help"})


def test_ci_runs_every_check_or_says_that_it_does_not():
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    steps_or_queue = r"^(?: *steps|printf '%s\\n') ([a-z][a-z -]*)"
    lanes = " ".join(re.findall(steps_or_queue, text, re.MULTILINE)).split()
    suite = re.findall(r"^suite ([a-z-]+)", text, re.MULTILINE)
    assert suite == ["test", "test-all"]
    steps = {*lanes, *suite}
    assert len(steps) > len(lanes) > 5
    left_out = set(re.search(r'^left_out="(.*)"$', text, re.MULTILINE)[1].split())
    no_checks = {"demo", "help", "build", "stubs", "format", "clean", "release-check"}
    assert steps | left_out | no_checks == make_targets()
    assert not steps & left_out


@pytest.mark.parametrize("text", [README, CONTRIBUTING], ids=["README", "CONTRIBUTING"])
def test_commands_exist(text):
    targets = make_targets()
    used = set(re.findall(r"\bmake ([a-z][a-z0-9-]*)", text)) - {"and"}
    assert {"demo", "test"} <= used <= targets
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra in re.findall(r"(?:\.|sdpa)\[(\w+)\]", text):
        assert extra in extras["optional-dependencies"]


@pytest.mark.parametrize("text", [README, CONTRIBUTING], ids=["README", "CONTRIBUTING"])
def test_files_exist(text):
    names = re.findall(r"\]\(((?!http)[^)#]+)\)", text)
    names += re.findall(r"`((?:src|sdpa|tests|\.ci)/[\w./]*)`", text)
    assert names
    for name in names:
        assert (ROOT / name).exists(), name


def test_environment_variables_are_read():
    sources = [*ROOT.glob("src/**/*.c"), ROOT / "setup.py"]
    read = "".join(path.read_text(encoding="utf-8") for path in sources)
    public, of_build = (
        set(
            re.findall(
                r"^\| `([A-Z]+_\w+)", text[text.index("| environment variable") :], re.MULTILINE
            )
        )
        for text in (API, CONTRIBUTING)
    )
    assert public == {"SDPA_ISA", "SDPA_NUM_THREADS", "OMP_NUM_THREADS"}
    assert of_build == {"SDPA_WERROR", "SDPA_SANITIZE", "SDPA_STAND_INS", "SDPA_COVERAGE"}
    for name in public | of_build:
        assert f'"{name}"' in read, name
