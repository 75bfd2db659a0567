"""Rows of the ledger that time something: a draw is a process."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.claims import claim
from support.examples import ROOT

from sdpa_lab import claims
from sdpa_lab.claims import Expect, processes
from sdpa_lab.tools.estimate import Draws, exact


def _by_process(seed, times):
    return {
        "x": Draws(np.array([os.getpid(), os.getpid() + 2.0, 1e9]), "median"),
        "times": Draws(np.array([times, times])),
        "seed": exact(float(seed)),
    }


def _needs_a_package(seed, times):
    import no_such_package  # noqa: F401


def _fails(seed, times):
    raise ArithmeticError("of its own")


@pytest.fixture
def importable(monkeypatch):
    """New processes find the experiments of this file."""
    for experiment in (_by_process, _needs_a_package, _fails):
        monkeypatch.setattr(experiment, "__module__", Path(__file__).stem)
    paths = [str(Path(__file__).parent), str(ROOT / "tests"), *filter(None, sys.path)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    processes.measured.cache_clear()


@pytest.mark.usefixtures("importable")
def test_a_draw_of_a_row_that_times_is_a_process():
    expect = [Expect("x", 0.0, (None, 1e12)), Expect("seed", 3.0, 0.0)]
    record = claim(expect, _by_process, holds="h {x}", timed=True)
    row = claims.judge(record, rows=1, seed=3, times=0.5)
    pids = row.draws["x"] - 2
    assert len(set(pids)) == processes.LEAST == len(pids)
    assert os.getpid() not in pids
    assert {figure.name: figure.n for figure in row.figures} == {"x": 4, "times": 4, "seed": 1}
    # All processes together take the draws that one would.
    assert row.draws["times"].tolist() == [0.125] * 4
    assert row.record()["timed"] is True
    assert row.verdict == "reproduced"


@pytest.mark.usefixtures("importable")
def test_what_fails_in_a_process_fails_in_the_ledger():
    record = claim([Expect("x", 0.0, 1.0)], _needs_a_package, timed=True)
    row = claims.judge(record, rows=1)
    assert row.verdict == "undecided"
    assert row.statement == "Not measured here: No module named 'no_such_package'"
    with pytest.raises(RuntimeError, match="ArithmeticError: of its own"):
        claims.judge(replace(record, experiment=_fails), rows=1)


def test_rows_that_time_something_are_marked():
    """Their modules alone have a clock or read the size of a process."""
    records = claims.claims()
    timed = {name for name, record in records.items() if record.timed}
    assert {"scale-cost", "memory", "additive-speed"} <= timed
    assert all(records[name].slow for name in timed)
