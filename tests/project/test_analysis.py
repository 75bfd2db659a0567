"""The answers to static analysers: `make analyze` compares them with what the tools find."""

import importlib
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ANSWERS = tomllib.loads((ROOT / "tools" / "answers.toml").read_text(encoding="utf-8"))["answer"]


def test_an_answer_names_a_source_and_a_reason():
    assert ANSWERS
    for answer in ANSWERS:
        assert (ROOT / answer["file"]).is_file(), answer
        assert answer["tool"] in ("gcc", "clang", "cppcheck", "clang-tidy"), answer
        assert answer["checks"], answer
        assert len(answer["reason"].split()) > 3, answer


def test_no_finding_is_answered_twice():
    keys = [(a["tool"], a["file"], check) for a in ANSWERS for check in a["checks"]]
    assert len(keys) == len(set(keys))


def test_a_missing_tool_is_an_error(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    analyze = importlib.import_module("analyze")
    monkeypatch.setattr(analyze, "TOOLS", {"absent": ("no-such-analyser",), "gcc": ("gcc",)})
    monkeypatch.setattr(analyze, "findings", lambda *_: [])
    with pytest.raises(SystemExit, match="not installed: absent"):
        analyze.main()
