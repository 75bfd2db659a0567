"""The answers to static analysers: `make analyze` compares them with what the tools find."""

import importlib
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ANSWERS = tomllib.loads((ROOT / "tools" / "answers.toml").read_text(encoding="utf-8"))["answers"]


def test_an_answer_names_sources_and_a_reason():
    names = [name for findings in ANSWERS.values() for name in findings]
    assert len(names) == len(set(names)) > 20
    assert all((ROOT / name.partition(": ")[0]).is_file() for name in names)
    assert all(len(reason.split()) > 3 for reason in ANSWERS)


@pytest.mark.parametrize(
    ("check", "open_ones"),
    [("core.NullDereference", 0), ("clang-analyzer-core.NullDereference", 0), ("core.Other", 1)],
)
def test_findings_are_compared_with_the_answers(monkeypatch, capsys, tmp_path, check, open_ones):
    monkeypatch.syspath_prepend(ROOT / "tools")
    analyze = importlib.import_module("analyze")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/answers.toml").write_text("[answers]\n'' = ['a.c: core.NullDereference']\n")
    monkeypatch.setattr(analyze, "ROOT", tmp_path)
    monkeypatch.setattr(analyze, "BUILD", tmp_path)
    monkeypatch.setattr(analyze, "TOOLS", {"gcc": ("gcc",)})
    monkeypatch.setattr(analyze, "sources", lambda: {"a.c": []})
    finding = analyze.Finding("gcc", "a.c", check, 1, "text")
    monkeypatch.setattr(analyze, "findings", lambda *_: [finding])
    with pytest.raises(SystemExit) as end:
        analyze.main()
    assert end.value.code is bool(open_ones)
    said = capsys.readouterr().out
    assert f"1 findings, {open_ones} open" in said
    assert ("no such finding any more: a.c: core.NullDereference" in said) is bool(open_ones)


def test_a_missing_tool_is_an_error(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    analyze = importlib.import_module("analyze")
    monkeypatch.setattr(analyze, "TOOLS", {"absent": ("no-such-analyser",), "gcc": ("gcc",)})
    monkeypatch.setattr(analyze, "findings", lambda *_: [])
    with pytest.raises(SystemExit, match="not installed: absent"):
        analyze.main()
