"""What `make mutation` changes, which tests it asks, and its answers to mutants that live."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIG = tomllib.loads((ROOT / "tools" / "mutants.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def mutants():
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines(changes, source):
    """The sources that the changes make."""
    return [source[:start] + new + source[end:] for start, end, new in changes]


def test_changes_of_c(mutants):
    source = "    if (!a && b < 2) x->y = -*p + 1; /* 3 < 4 */\n"
    assert sorted(lines(mutants.c_changes(source), source)) == sorted(
        f"    {changed} /* 3 < 4 */\n"
        for changed in (
            "if (a && b < 2) x->y = -*p + 1;",
            "if (!a || b < 2) x->y = -*p + 1;",
            "if (!a && b <= 2) x->y = -*p + 1;",
            "if (!a && b < 1) x->y = -*p + 1;",
            "if (!a && b < 2) x->y = -*p - 1;",
            "if (!a && b < 2) x->y = -*p + 0;",
            ";",
        )
    )


@pytest.mark.parametrize(
    "source",
    [
        "#define LIMIT (a < 3 \\\n    + 1)\n",
        '/* a < b;\n    x = 1; */\nconst char *text = "a < 1";\n',
        "    const int n = m;\n    assert(a < b);\n    char *x = y;\n",
    ],
)
def test_what_c_is_left_alone(mutants, source):
    assert lines(mutants.c_changes(source), source) == []


def test_changes_of_python(mutants):
    source = (
        "def f(a: int = None, *b) -> 'x < y':\n    '1 < 2'\n    if a is not b:\n        a.n += -1\n"
    )
    found = lines(mutants.python_changes(source), source)
    assert source.replace("is not", "is ") in found
    assert source.replace("+=", "-=") in found
    assert source.replace("a.n += -1", "pass") in found
    assert len(found) == 4
    assert all(compile(text, "mutant", "exec") for text in found)


def test_names_do_not_depend_on_other_lines(mutants, tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    (tmp_path / "a.c").write_text("    x = y + 12;\n    x = y + 12;\n")
    before = [mutant.name for mutant in mutants.mutants_of("a.c")]
    (tmp_path / "a.c").write_text("\n\n\n    x = y + 12;\n    x = y + 12;\n")
    assert [mutant.name for mutant in mutants.mutants_of("a.c")] == before
    assert len(set(before)) == len(before) == 6


def test_a_file_is_listed_by_any_path_to_it(mutants):
    listed = "kernel.o: ../../src/kernels/kernel.c \\\n ../../src/kernels/fast/../pack.h"
    found = ("src/kernels/kernel.c", "src/kernels/pack.h", "src/kernels/fast/few_keys.h", "ack.h")
    assert [mutants.is_listed(file, listed) for file in found] == [True, True, False, False]


def test_tests_exist_for_every_file():
    main = (ROOT / "tests" / "c" / "main.c").read_text(encoding="utf-8")
    files = [str(path.relative_to(ROOT)) for path in mutated()]
    assert all(any(re.match(pattern, file) for pattern in CONFIG["tests"]) for file in files)
    for pattern, names in CONFIG["tests"].items():
        assert any(re.match(pattern, file) for file in files), pattern
        for name in names:
            of_c = name.startswith("c ")
            assert f'{{"{name[2:]}", ' in main if of_c else (ROOT / name).exists(), name


def mutated():
    """The files that are mutated, but for those left out."""
    patterns = [pattern for group in CONFIG["files"].values() for pattern in group]
    found = {path for pattern in patterns for path in ROOT.glob(pattern)}
    left_out = tuple(CONFIG["left_out"])
    return {path for path in found if not str(path.relative_to(ROOT)).startswith(left_out)}


def test_every_file_is_mutated_or_left_out_with_a_reason():
    for start, reason in CONFIG["left_out"].items():
        assert list(ROOT.glob(f"{start}*")), start
        assert len(reason.split()) > 3, start
    for path in [*ROOT.glob("src/**/*.[ch]"), *ROOT.glob("sdpa/**/*.py")]:
        left_out = str(path.relative_to(ROOT)).startswith(tuple(CONFIG["left_out"]))
        assert left_out or path in mutated(), path


def test_an_answer_names_a_change_of_one_kind_and_a_reason(mutants):
    files = [str(path.relative_to(ROOT)) for path in mutated()]
    changes = [mutant.change for file in files for mutant in mutants.mutants_of(file)]
    for reason, parts in CONFIG["answers"].items():
        assert len(reason.split()) > 3, reason
        for part in parts:
            assert len({change for change in changes if re.search(part, change)}) == 1, part
