"""The listing of branches that no test takes: how counts are folded, and what the reasons name."""

import importlib.util
import tomllib
from collections import Counter
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
        "true: if («a < 2» && g(a,",
        "false: if (a < 2 && «g(a,»",
        "true: if (a < 2 && «g(a,»",
        "false: return «b» ? 1 : 2;",
    ]
    counts.add(listing("True: 1, False: 0", "True: 1, False: 0", "True: 0, False: 1", tmp_path))
    assert missed(branches, counts) == ["false: if (a < 2 && «g(a,»"]


def test_assertions_and_other_folders_do_not_count(counts):
    assert {branch.line for branch in counts.branches} == {5, 7}
    assert counts.lines == {(FILE, n): n != 6 for n in range(2, 9)}


def test_every_missed_branch_has_one_reason_and_every_reason_a_branch(branches, counts, capsys):
    names = missed(branches, counts)
    assert branches.compare(counts, [{"branches": {FILE: names}}]) == 0
    assert branches.compare(counts, [{"branches": {FILE: names[1:]}}]) == 1
    assert branches.compare(counts, [{"branches": {FILE: [*names, names[0]]}}]) == 1
    assert branches.compare(counts, []) == 4
    assert f"{FILE}:5: {names[0]}" in capsys.readouterr().out


def test_what_differs_from_run_to_run_may_be_taken(branches, counts):
    names = missed(branches, counts)
    taken = "true: return «b» ? 1 : 2;"
    reasons = [{"branches": {FILE: names}}, {"varies": True, "branches": {FILE: [taken]}}]
    assert branches.compare(counts, reasons) == 0


def test_a_branch_is_explained_once(branches, counts):
    names = missed(branches, counts)
    reasons = [
        {"why": "a", "varies": True, "branches": {FILE: [names[0], "true: return «b» ? 1 : 2;"]}},
        {"why": "b", "branches": {FILE: [*names[:3], names[0]]}},
    ]
    assert list(branches.explained(counts, reasons)) == [(1, "a"), (2, "b")]


def test_a_reason_says_why_and_names_lines_that_are_there():
    for reason in REASONS:
        assert len(reason["why"].split()) > 3, reason
        for file, names in reason["branches"].items():
            text = (ROOT / file).read_text(encoding="utf-8")
            lines = Counter(line.strip() for line in text.splitlines())
            for name, times in Counter(names).items():
                outcome, line = name.split(": ", 1)
                assert outcome in ("true", "false"), name
                assert times <= lines[line.replace("«", "").replace("»", "")], name
