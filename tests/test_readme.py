"""The documents say what is there: examples run, commands and names exist, figures are ours."""

import re
import tomllib
from pathlib import Path

import pytest

import sdpa
from sdpa import lab
from sdpa.lab.report.text import scale_text

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_examples_run():
    namespace = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), namespace)
    assert len(blocks("python")) == 2
    grads = namespace["grads"]
    assert grads.query.shape == grads.key.shape == grads.value.shape == (2, 8, 1024, 64)


def test_table_is_what_the_main_job_prints():
    """Word by word; numbers to one unit of their last digit, for another CPU rounds differently."""
    pytest.importorskip("sklearn")
    (block,) = blocks("text")
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
    table = README[README.index("## The functions") : README.index("Options of attention")]
    mentioned = set(re.findall(r"`(\w+)[`(]", table)) - {"x"}
    functions = {name for name in sdpa.__all__ if name[0].islower()} | {"MultiHeadAttention"}
    assert mentioned == functions


def test_options_are_there_and_all_are_mentioned():
    start = README.index("Options of attention")
    paragraph = README[start : README.index("\n\n", start)]
    signature = sdpa.attention.__text_signature__
    options = set(re.findall(r"(\w+)=", signature))
    assert options == set(re.findall(r"`(\w+)`", paragraph)) - {"True"}


@pytest.mark.parametrize("text", [README, CONTRIBUTING], ids=["README", "CONTRIBUTING"])
def test_commands_exist(text):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split())
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
    table = README[README.index("| environment variable") :]
    names = set(re.findall(r"`([A-Z]+_\w+)", table))
    assert {"SDPA_ISA", "SDPA_NUM_THREADS", "OMP_NUM_THREADS"} <= names
    for name in names:
        assert f'"{name}"' in read, name
