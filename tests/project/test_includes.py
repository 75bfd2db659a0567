"""Which file of src includes which, without circles; and that files named anywhere exist."""

import graphlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
FILES = sorted(SRC.rglob("*.[ch]"))
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def included(path):
    """The files of src that `path` includes; others are made by the build."""
    names = INCLUDE.findall(path.read_text(encoding="utf-8"))
    return {(path.parent / name).resolve() for name in names} & {file.resolve() for file in FILES}


def room(path):
    """A header and the source of the same name are one room."""
    return path.relative_to(SRC).with_suffix("")


def graph(files, node):
    edges = {}
    for path in files:
        edges.setdefault(node(path), set()).update(node(other) for other in included(path))
    return edges


def test_headers_have_no_circle():
    headers = graph([path for path in FILES if path.suffix == ".h"], lambda path: path)
    assert sum(map(len, headers.values())) > 20
    list(graphlib.TopologicalSorter(headers).static_order())


def test_rooms_have_no_circle():
    rooms = {name: others - {name} for name, others in graph(FILES, room).items()}
    assert len(rooms) > 40
    list(graphlib.TopologicalSorter(rooms).static_order())


def test_the_ground_floor_of_the_binding_stands_on_no_other_room():
    assert {path.parent.name for path in included(SRC / "python" / "binding.h")} == {"src"}


@pytest.mark.parametrize("folder", ["tools", "examples", "tests/fuzz"])
def test_no_program_hides_a_module_of_python(folder):
    """The folder of a program comes first on its path, for its neighbours too."""
    names = {path.stem for path in (ROOT / folder).glob("*.py")}
    assert names
    assert not names & sys.stdlib_module_names


NAMED = re.compile(
    r"(?<![\w/.-])((?:src|sdpa|sdpa_lab|tests|benchmarks|docs|tools|examples)/[\w./-]*\w\.(?:c|h|inc|py|pyi|md|txt))\b"
)


ELSEWHERE = {"docs/gguf.md"}
"""In the repository of ggml."""


@pytest.mark.parametrize(
    "folder", ["src", "sdpa", "sdpa_lab", "tests", "benchmarks", "docs", "tools"]
)
def test_files_that_comments_and_pages_name_exist(folder):
    texts = [
        path
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".c", ".h", ".inc", ".py", ".md"}
    ]
    missing = {
        (str(path.relative_to(ROOT)), name)
        for path in texts
        for name in NAMED.findall(path.read_text(encoding="utf-8"))
        if name not in ELSEWHERE and not (ROOT / name).exists()
    }
    assert texts
    assert not missing
