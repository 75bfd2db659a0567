"""The benchmarks beyond memory: their arithmetic, and that they measure the same work."""

import sys

import pytest
from support.examples import ROOT

sys.path.append(str(ROOT))  # last: a build that is under test elsewhere stays in front

pytest.importorskip("zarr", reason="needs zarr: pip install '.[dask]'")
from benchmarks import beyond

CONSTANTS = beyond.Constants(flops=1e11, bandwidth=1e9, task=1e-3)


def test_operations_and_bytes_of_a_run():
    """Counted pair by pair and block by block."""
    work = beyond.Run(tokens=64, heads=3, rows=16)
    pairs = sum(2 * i + 1 for i in range(64)) / 2  # i + 1 keys, less half of the diagonal
    assert work.flops == 3 * pairs * 4 * beyond.D
    keys = sum(16 * (block + 1) for block in range(4))
    assert work.bytes == 3 * beyond.D * 4 * (2 * keys + 2 * 64)
    assert work.tasks == 4


def test_the_slower_of_computing_and_reading_counts():
    work = beyond.Run(tokens=2**20, heads=8, rows=8192)
    few, many = (work.seconds(CONSTANTS, n) for n in (2, 64))
    assert few["compute"] > few["storage"] > many["compute"]
    assert work.total(CONSTANTS, 2) == pytest.approx(few["compute"] + 0.128)
    assert work.total(CONSTANTS, 64) == pytest.approx(few["storage"] + 0.128)


def test_more_workers_than_tasks_wait_for_the_last():
    work = beyond.Run(tokens=2**16, heads=1, rows=2**14)
    longest = 4 * beyond.D * 2**30 / CONSTANTS.flops
    assert work.seconds(CONSTANTS, 100)["compute"] == longest


def test_files_beside_memory():
    found = beyond.files(3000, 1)
    assert found["tokens"] == 3000
    speeds = found["files GFLOP/s"], found["memory GFLOP/s"]
    assert min(speeds) > 0
    assert found["part of memory's speed"] == pytest.approx(speeds[0] / speeds[1])


def test_the_plot_shows_where_the_store_binds():
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[lab]'")
    figure = beyond.plot_model(CONSTANTS)
    for axes in figure.axes:
        solid, dashed = axes.lines[:2]
        assert dashed.get_linestyle() == "--"
        assert len(solid.get_ydata()) == len(dashed.get_ydata())


def test_figures_go_to_the_page():
    """Each command replaces its own block, whose text is a line per figure."""
    text = beyond.table({"tokens": 8, "one worker": 0.12345})
    assert text.split("\n") == [
        f"{'tokens':24s} {'8':>10s}",
        f"{'one worker':24s} {'0.123':>10s}  s",
    ]
    page = beyond.PAGE.read_text(encoding="utf-8")
    for what in ("files", "scaling"):
        assert beyond.quoted(page, what, text).count(text) == 1
    with pytest.raises(ValueError, match="no block after <!-- speed -->"):
        beyond.quoted(page, "speed", text)
