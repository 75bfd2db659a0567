"""The answers to static analysers: `make analyze` compares them with what the tools find."""

import tomllib
from pathlib import Path

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
