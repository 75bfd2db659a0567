"""The benchmark of kernel sums: its contenders compute the same, and its tables are the page's."""

import re
import sys

import numpy as np
import pytest
from support.examples import ROOT

import sdpa_lab as lab

sys.path.append(str(ROOT))  # last: a build that is under test elsewhere stays in front

pytest.importorskip("sklearn", reason="needs scikit-learn: pip install '.[lab]'")
from benchmarks import kernel_regression
from benchmarks.beyond import quoted
from benchmarks.pictures import example

WORKS = list(kernel_regression.works(example("kernel_regression"), small=True))
WITHIN = {"sdpa, float32": 1e-3, "scikit-learn": 1e-4, "scikit-learn, rtol=1e-4": 1e-2}
"""float32: 2^-24 r^2 with r of some ten bandwidths; scikit-learn: what its bounds have left."""


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)
def test_contenders_compute_the_same(work):
    assert list(work.calls)[:2] == ["sdpa", "formula"]
    expected = work.calls["formula"]()
    for name, call in work.calls.items():
        got = call()
        assert got.shape == expected.shape
        bound = WITHIN.get(name, 1e-9) * max(1, abs(expected).max())
        assert abs(got - expected).max() < bound, name


def test_rows_of_a_work():
    calls = {"sdpa": lambda: np.ones(3), "formula": lambda: np.ones(3) + 1e-3}
    rows = kernel_regression.measured(kernel_regression.Work("w", calls), kernel_regression.QUICK)
    assert [row[0] for row in rows] == ["sdpa", "formula"]
    assert rows[0][2:] == ["1.00", "1e-03"]
    assert rows[1][3] == ""


def test_a_missing_peer_is_left_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.neighbors", None)
    monkeypatch.setitem(sys.modules, "ot", None)
    works = list(kernel_regression.works(example("kernel_regression"), small=True))
    names = {name for work in works for name in work.calls}
    assert "SciPy logpdf" in names
    assert not {name for name in names if "scikit" in name or "POT" in name}


def test_the_page_has_the_tables():
    page = kernel_regression.PAGE.read_text(encoding="utf-8")
    assert quoted(page, "times", "a table").count("\na table\n") == 1
    block = re.search(r"<!-- times -->\n\n```\n(.*?)\n```", page, re.DOTALL)[1]
    for work in kernel_regression.works(example("kernel_regression"), small=False):
        assert f"\n{work.name}\n" in block
    assert "pot is not installed" not in block
    digits = re.search(r"<!-- rounding -->\n\n```\n(.*?)\n```", page, re.DOTALL)[1].splitlines()
    made = str(lab.kernel_rounding()).splitlines()
    # Errors depend on the instruction set, laws and what was asked do not.
    assert [line.split()[:2] for line in digits] == [line.split()[:2] for line in made]


def test_the_picture_is_readable_on_light_and_on_dark():
    svg = kernel_regression.PICTURE.read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in svg
    assert not re.search("#[0-9a-f]{6}", re.sub("<style>.*?</style>", "", svg, flags=re.DOTALL))
    for words in ("three bandwidths", "error of the log density"):
        assert f">{words}</text>" in svg
