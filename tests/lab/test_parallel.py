"""The ledger in several processes: the same rows as in one."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import closing

import pytest
from support.claims import by_process, by_process_too, claim, endless, failing
from support.examples import ROOT

from sdpa.__main__ import INTERRUPTED
from sdpa_lab import claims
from sdpa_lab.claims import Expect, cli, parallel, processes

ANY = [Expect("x", 0.0, (None, 1e12))]


def made_up(name, experiment, **other):
    return claim(ANY, experiment, id=name, holds="{x}", more=1, **other)


def judged(wanted, **options):
    return list(parallel.judged(wanted, **{"rows": 1, "seed": 0, "times": 1.0} | options))


def pid(row):
    return int(row.draws["x"][0])


def figures(row):
    return {figure.name: figure.value for figure in row.figures}


def plain(row):
    return row.record() | {"seconds": None, "draws": {n: x.tolist() for n, x in row.draws.items()}}


def test_rows_are_those_of_one_process_bit_for_bit():
    pytest.importorskip("autograd", reason="needs autograd: pip install '.[lab]'")
    # Two that share an experiment, one that trains, and others that draw random numbers.
    names = (
        "grad-law",
        "grad-constant",
        "additive-no-scale",
        "toy-512",
        "normal",
        "cosine-no-scale",
    )
    options = {"rows": len(claims.IDS), "seed": 3, "times": 0.2}
    wanted = claims.chosen(names)
    one, two = (judged(wanted, workers=n, **options) for n in (1, 2))
    assert [row.claim.id for row in one] == list(names)
    assert {row.claim.id: plain(row) for row in two} == {row.claim.id: plain(row) for row in one}


def test_rows_that_share_work_have_one_process_and_timed_rows_come_last(monkeypatch):
    paths = [str(ROOT / "tests"), *filter(None, sys.path)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    processes.measured.cache_clear()
    wanted = [
        made_up("timed", by_process, slow=True, timed=True),
        *(made_up(f"a{i}", by_process, slow=True) for i in range(2)),
        *(made_up(f"b{i}", by_process_too, slow=True) for i in range(2)),
    ]
    rows = judged(wanted, workers=2, times=0.1)
    found = {row.claim.id: row for row in rows}
    assert set(found) == {row.id for row in wanted}
    own = {name: pid(row) for name, row in found.items()}
    assert own["a0"] == own["a1"] != own["b0"] == own["b1"]
    assert os.getpid() not in own.values()
    assert rows[-1].claim.id == "timed"
    ends = {name: figures(row)["time"] for name, row in found.items()}
    assert ends["timed"] == max(ends.values())
    assert len(set(found["timed"].draws["x"])) == processes.LEAST  # by processes of its own
    # The CPUs are for the processes, not for threads of each.
    assert {figures(found[name])["threads"] for name in ("a0", "b0")} == {1}


def test_rows_that_are_quick_need_no_process():
    quick = [made_up("a", by_process), made_up("b", by_process_too)]
    assert {pid(row) for row in judged(quick, workers=2)} == {os.getpid()}
    slow = [made_up("a", by_process, slow=True), quick[1]]
    assert {pid(row) for row in judged(slow, workers=1)} == {os.getpid()}
    assert [row.claim.id for row in judged(slow, workers=1)] == ["a", "b"]


def test_units_share_work_and_slow_ones_are_first():
    groups = [[claim.id for claim in group] for group in parallel.units(claims.chosen())]
    assert sorted(name for group in groups for name in group) == sorted(claims.IDS)
    assert ["unstable-training", "qk-norm", "softcap", "qk-clip"] in groups
    (decoder,) = (group for group in groups if "layer-norm" in group)
    assert {"optimal-region", "always-in-range", "unscaled-position"} < set(decoder)
    slow = [any(claims.claims()[name].slow for name in group) for group in groups]
    assert slow == sorted(slow, reverse=True)


def test_who_leaves_early_does_not_wait(tmp_path):
    """Ctrl-C while a row takes minutes: its process ends, and what was judged is kept."""
    wanted = [made_up("a", by_process, slow=True), made_up("endless", endless, slow=True)]
    start = time.monotonic()
    with closing(parallel.judged(wanted, rows=1, seed=0, times=1.0, workers=2)) as judging:
        assert next(judging).claim.id == "a"
        assert len(multiprocessing.active_children()) == 2
    assert multiprocessing.active_children() == []
    assert time.monotonic() - start < 60


def test_what_fails_in_a_process_fails_here():
    wanted = [made_up("a", by_process, slow=True), made_up("failing", failing)]
    with pytest.raises(ArithmeticError, match="of its own"):
        judged(wanted, workers=2)
    assert multiprocessing.active_children() == []


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_ctrl_c_on_the_command_line(tmp_path):
    """The terminal sends it to all processes; the parent alone speaks, and the rest is kept."""
    pytest.importorskip("autograd", reason="needs autograd: pip install '.[lab]'")
    names = ["unstable-training", "toy-512", "softmax-raw"]
    command = [sys.executable, "-m", "sdpa", "claims", "--workers", "2", "--save", "draws"]
    run = subprocess.Popen(
        [*command, "--only", *names],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell lets its jobs in the background ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    # The first of the rows that a process judges beside the long one.
    while not (tmp_path / "draws/toy-512.npz").exists():
        assert run.poll() is None, run.stderr.read()
        time.sleep(0.1)
    os.killpg(run.pid, signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert run.returncode == INTERRUPTED
    assert out == ""
    assert "Traceback" not in err
    assert "rows are judged and kept in sdpa-claims.json" in err
    kept = json.loads((tmp_path / cli.KEPT).read_text(encoding="utf-8"))["rows"]
    assert "toy-512" in kept
    assert "unstable-training" not in kept
