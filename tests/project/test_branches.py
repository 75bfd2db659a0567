"""The listing of branches that no test takes: how counts are folded, and what the reasons name."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REASONS = tomllib.loads((ROOT / "tools" / "branches.toml").read_text(encoding="utf-8"))["reason"]
FILE = str(Path("src") / "a.c")
SOURCE = """
int f(int a, int b) {
    assert(a < 9 &&
           b < 9);
    if (a < 2 && g(a,
                   b)) return A;
    return b ? 1 : 2;
}
"""


@pytest.fixture
def branches(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("branches", ROOT / "tools" / "branches.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / FILE).write_text(SOURCE)
    return module


def listing(first, second, third, root):
    """What llvm-cov says of an object; each argument: the outcomes of a condition."""
    return f"""Coverage Report
{root}/{FILE}:
    1|       |
    2|  2.31k|int f(int a, int b) {{
    3|      2|    assert(a < 9 &&
  ------------------
  |  Branch (3:12): [True: 2, False: 0]
  ------------------
    4|      2|           b < 9);
  ------------------
  |  Branch (4:12): [True: 2, False: 0]
  ------------------
    5|      2|    if (a < 2 && g(a,
  ------------------
  |  Branch (5:9): [{first}]
  |  Branch (5:18): [{second}]
  ------------------
    6|      0|                   b)) return A;
    7|      2|    return b ? 1 : 2;
  ------------------
  |  Branch (7:12): [{third}]
  ------------------
    8|      2|}}
{root}/elsewhere.c:
    1|      0|int g;
"""


@pytest.fixture
def counts(branches, tmp_path):
    """Two objects: the second knows one outcome of the first condition when it is compiled."""
    found = branches.Counts()
    found.add(listing("True: 0, False: 2", "True: 0, False: 0", "True: 1.2k, False: 0", tmp_path))
    found.add(listing("Folded, False: 1", "Folded - Ignored", "True: 0, False: 0", tmp_path))
    return found


def missed(branches, counts):
    return [branches.name_of(branch) for branch in counts.missed()]


def test_an_outcome_counts_where_any_object_takes_it(branches, counts, tmp_path):
    assert missed(branches, counts) == [
        "true: a < 2",
        "false: g(a,",
        "true: g(a,",
        "false: b",
    ]
    counts.add(listing("True: 1, False: 0", "True: 1, False: 0", "True: 0, False: 1", tmp_path))
    assert missed(branches, counts) == ["false: g(a,"]


def test_assertions_and_other_folders_do_not_count(counts):
    assert {branch.line for branch in counts.branches} == {5, 7}
    assert counts.lines == {(FILE, n): n != 6 for n in range(2, 9)}


def known(branches, *names, varies=False, why="why"):
    return branches.patterns([{"why": why, "varies": varies, "branches": {r"src/.*\.c": names}}])


def test_every_missed_branch_has_a_reason_and_every_pattern_a_branch(branches, counts, capsys):
    missed = counts.missed()
    assert branches.compare(missed, known(branches, "true: a < 2", r".*: g\(a,", "false: b")) == 0
    assert branches.compare(missed, known(branches, "true: a < 2", r".*: g\(a,")) == 1
    assert f"{FILE}:7: false: b" in capsys.readouterr().out
    assert branches.compare(missed, known(branches, ".*: .*", "true: b")) == 1
    assert branches.compare(missed, known(branches, ": .*", ".*: a")) == 4 + 2
    assert branches.compare(missed, []) == 4


def test_what_differs_from_run_to_run_may_be_taken(branches, counts):
    reasons = [*known(branches, ".*"), *known(branches, "true: b", varies=True)]
    assert branches.compare(counts.missed(), reasons) == 0


def test_a_branch_is_explained_once(branches, counts):
    reasons = [*known(branches, "true: .*", why="a"), *known(branches, ".*", why="b")]
    assert branches.explained(counts.missed(), reasons) == {"a": 2, "b": 2}


def test_a_reason_says_why_and_names_files_and_outcomes_that_are_there(branches):
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "src").rglob("*.[ch]")]
    for pattern in branches.patterns(REASONS):
        assert len(pattern.why.split()) > 3, pattern
        assert any(re.fullmatch(pattern.file, file) for file in files), pattern
        assert re.match(r"\(?(true|false)\b", pattern.name), pattern
