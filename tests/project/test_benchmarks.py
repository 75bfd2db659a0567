"""The benchmark suite runs, counts and judges correctly; no test depends on speed."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from support import tiers

import sdpa

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # last: a build that is under test elsewhere stays in front

from support.results import run_of  # noqa: E402

from benchmarks import (  # noqa: E402
    contenders,
    counts,
    machine,
    peers,
    readme,
    report,
    targets,
    timing,
    variants,
    works,
)
from benchmarks.results import Results, load  # noqa: E402

pytest.importorskip("threadpoolctl")
pytestmark = pytest.mark.uninstrumented

# Not the sweep, which repeats forward at more shapes, and of the peers only what forward asks.
GROUPS = [group for group in works.GROUPS if group != "sweep"]


@pytest.fixture(scope="module", params=tiers.SLOW)
def quick(tmp_path_factory):
    """(results, what was printed) of a quick run."""
    path = tmp_path_factory.mktemp("bench") / "results.json"
    command = [sys.executable, "-m", "benchmarks", "--quick", "--threads", "1", "--json", str(path)]
    command += ["--only", *GROUPS, "import"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return path, done.stdout


@pytest.mark.slow
def test_quick_run_measures_every_work_of_every_group(quick):
    (run,) = json.loads(quick[0].read_text())
    assert run["quick"]
    assert run["threads"] == 1
    setting = contenders.Setting(1, [])
    expected = {(w.group, w.name) for w in works.works(setting, set(GROUPS))}
    measured = {(record["group"], record["name"]) for record in run["records"]}
    # With one thread there is nothing to compare threads with, and nobody who spins.
    assert measured == expected
    assert {group for group, _ in measured} == set(GROUPS) - {"threads", "after"}
    for record in run["records"]:
        for timed in record["contenders"].values():
            assert min(timed["rounds"]) > 0
            assert timed["flops"] > 0 or timed["bytes"] > 0
    assert all(rate > 0 for rate in run["peak"].values())
    assert min(run["import"]) > 0


def test_every_peer_is_measured_or_named(quick):
    (run,) = json.loads(quick[0].read_text())
    there = set(run["peers"])
    assert there | set(run["missing"]) == {kind.name for kind in peers.ALL}
    assert "numpy" in there
    forward = next(r for r in run["records"] if r["group"] == "forward")
    assert set(forward["contenders"]) == there | {"sdpa"}
    for name in run["missing"]:
        assert name in quick[1]
    # Lines fit whoever is the best, and by however much.
    for best in [*there, "sdpa"]:
        for record in run["records"]:
            for name, timed in record["contenders"].items():
                timed["rounds"] = [1e-4 if name == best else 0.099]
        lines = report.text(Results([run])).splitlines()
        assert all(len(line) <= report.WIDTH for line in lines), max(lines, key=len)


BESIDE = {
    "bridge": {"torch": ("torch", "installed", "function")},
    "calls": {"torch": ("torch", "installed", "function")},
    "jax": {"jax": ("bridge", "jax")},
    "onnx": {"onnx": ("onnx", "operators")},
    "variants": {name: (name,) for name in ("numpy", "torch", "jax")},
}


@pytest.mark.parametrize("group", BESIDE)
def test_bridges_and_variants_are_measured_beside_the_library(quick, group):
    (run,) = json.loads(quick[0].read_text())
    there = {package for package in BESIDE[group] if importlib.util.find_spec(package)}
    expected = {"sdpa"}.union(*(BESIDE[group][package] for package in there))
    records = [record for record in run["records"] if record["group"] == group]
    assert records
    assert all(set(record["contenders"]) == expected for record in records)


def test_a_tree_of_tokens_sees_the_past_its_ancestors_and_itself():
    mask = variants.tree_mask(2, 7)
    assert mask[:, :2].all()
    seen = [set(np.flatnonzero(row[2:])) for row in mask]
    assert seen == [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 4}, {0, 2, 5}, {0, 2, 6}]


def test_quick_run_gives_every_target_a_value(quick):
    results = load([quick[0]])
    found = list(targets.rows(results))
    assert all(math.isfinite(row.value) for row in found)
    assert {row.title for row in found} >= {*targets.FORWARD, "window 128", "std 900", "jvp"}
    assert len({row.key for row in found}) == len(found)
    assert len({(row.section, row.label) for row in found}) == len(found)
    # They mean nothing, so they are not judged.
    assert "QUICK" in quick[1]
    assert "MISSED" not in quick[1]


@pytest.mark.slow
def test_two_threads_are_compared_with_one(tmp_path):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one CPU")
    path = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks", "--quick", "--threads", "2", "--json", str(path)]
    subprocess.run([*command, "--only", "threads"], cwd=ROOT, check=True, capture_output=True)
    rows = list(targets.rows(load([path])))
    large = [row.title for row in rows if row.goal == targets.Goal(1.85)]
    assert large == [
        f"{shape} {direction}"
        for shape in ("1x2048x64", "8x1024x64")
        for direction in ("forward", "backward")
    ]
    small = [row for row in rows if row.title not in large]
    assert {row.section for row in small} == {"2 threads / one, no slower"}
    assert {row.goal for row in small} == {targets.Goal(0.97)}
    titles = {row.title for row in small}
    assert len(small) == len(titles) == 18
    assert titles >= {"128x1x8x32 backward", "one query, d = 128, 512 keys", "softmax (100, 100)"}


def test_one_thread_is_one_and_the_number_returns():
    setting = contenders.Setting(2, [])
    (build,) = (w.build for w in works.threads(setting) if w.name == "softmax (100, 100)")
    before = sdpa.get_num_threads()
    sdpa.set_num_threads(2)
    try:
        with build()["one"].within():
            assert sdpa.get_num_threads() == 1
        assert sdpa.get_num_threads() == 2
    finally:
        sdpa.set_num_threads(before)


@pytest.mark.parametrize("package", sorted({kind.package for kind in peers.ALL} - {"numpy"}))
def test_a_peer_that_is_not_installed_is_left_out_by_name(package, monkeypatch):
    for kind in peers.ALL:
        if kind.package not in ("numpy", package):
            monkeypatch.setattr(kind, "__init__", lambda self, threads: None)
    monkeypatch.setitem(sys.modules, package, None)
    found, missing = peers.find(1)
    expected = [kind.name for kind in peers.ALL if kind.package == package]
    assert set(expected) <= set(missing)
    assert not set(expected) & {peer.name for peer in found}


def test_a_contender_that_computes_something_else_is_refused():
    a = np.ones((2, 3), np.float32)
    contenders.check("same", a + np.float32(1e-6), a)
    for wrong in (a * 1.01, a * np.nan):
        with pytest.raises(RuntimeError, match="other: differs"):
            contenders.check("other", wrong, a)


def test_contenders_take_turns_in_both_orders(monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(timing, "SAMPLE", 0.0)
    called = []
    calls = {name: lambda name=name: called.append(name) for name in "abc"}
    best = timing.race(calls, timing.Effort(1, rounds=4, turn=0.0, seconds=40.0))
    assert "".join(called).startswith("aabbcc" + "cba" + "abc" + "cba")
    # A sample lasts one tick of this clock.
    assert {name: set(seconds) for name, seconds in best.items()} == {key: {1.0} for key in "abc"}


def test_a_contender_is_set_up_for_its_turns_only(monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(timing, "SAMPLE", 0.0)
    state, seen = [], {"a": set(), "b": set()}

    @contextmanager
    def within():
        state.append("on")
        yield
        state.pop()

    calls = {name: lambda name=name: seen[name].add(tuple(state)) for name in seen}
    timing.race(calls, timing.Effort(1, rounds=3, turn=0.0, seconds=20.0), {"b": within})
    assert seen == {"a": {()}, "b": {("on",)}}
    assert not state


def test_what_comes_before_a_call_is_done_each_time_outside_the_clock(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(timing, "SAMPLE", 0.0)
    done = []

    def last(seconds, what):
        done.append(what)
        clock[0] += seconds

    calls = {name: lambda name=name: last(1.0, name) for name in "ab"}
    before = {"b": lambda: last(9.0, "before")}
    best = timing.race(calls, timing.Effort(1, rounds=3, turn=5.0, seconds=40.0), None, before)
    assert set(best["b"]) == {1.0}
    assert all(done[i - 1] == "before" for i, what in enumerate(done) if what == "b")


def test_what_follows_a_product_is_built_for_two_threads():
    setting = contenders.Setting(2, peers.find(1)[0], quick=True)
    *calls, block = (work.build() for work in works.GROUPS["after"](setting))
    assert [list(found) for found in calls] == [["alone", "after a matmul"]] * 2
    assert set(block) - {"torch"} == {"sdpa", "numpy"}
    for each in (each for found in calls for each in found.values()):
        each.before()
    assert not list(works.GROUPS["after"](setting._replace(threads=1)))


def test_disturbed_calls_are_judged_by_their_middle_round():
    found = {"alone": (1.0, 9e9, 1), "after a matmul": (1.5, 9e9, 1)}
    block = {"sdpa": (1.0, 9e9, 1), "numpy": (3.0, 9e9, 1)}
    records = {("after", "forward"): found, ("after", "block"): block}
    forward, ahead = targets.rows(run_of(records, threads=2))
    assert (forward.value, forward.goal) == (1.5, targets.Goal(1.25, at_least=False))
    assert (ahead.value, ahead.goal) == (3.0, None)
    timing_of = run_of(records, threads=2).get(2, "after", "forward")["alone"]
    assert (timing_of.seconds, timing_of.middle) == (1.0, 1.5)


def test_the_bridge_is_judged_by_what_is_installed():
    found = {"sdpa": (1.0, 9e9, 1), "torch": (3.0, 9e9, 1), "installed": (1.2, 9e9, 1)}
    records = {("bridge", name): found for name in ("8x512x64", "8x128x64")}
    for isa, goal in (("avx512", targets.Goal(2.0)), ("avx2", None)):
        first, second = targets.rows(run_of(records, isa))
        assert first.value == second.value == pytest.approx(2.5)
        assert (first.goal, second.goal) == (goal, None)


def test_small_calls_are_judged_by_pytorchs_time():
    found = {"sdpa": (1.0, 9e9, 1), "torch": (2.0, 9e9, 1), "installed": (3.0, 9e9, 1)}
    records = {("calls", f"(1, 1, 10, 64) {what}"): found for what in ("forward", "both")}
    forward, both = targets.rows(run_of(records))
    assert forward.value == both.value == pytest.approx(1.5)
    assert (forward.goal, both.goal) == (targets.Goal(2.0, False), targets.Goal(1.8, False))


def test_passes_are_one_and_what_no_second_round_confirms_is_marked():
    once = run_of({("forward", "8x128x64"): {"sdpa": (1.0, 90e9, 1)}})
    assert once.get(1, "forward", "8x128x64")["sdpa"][:4] == (1.0, 90e9, 1, 1.0)
    assert "~90.0" in report.text(once)
    again = run_of({("forward", "8x128x64"): {"sdpa": (1.02, 90e9, 1)}})
    both = Results(once.runs + again.runs)
    assert both.get(1, "forward", "8x128x64")["sdpa"][:4] == (1.0, 90e9, 1, pytest.approx(0.02))
    assert "~90.0" not in report.text(both)
    assert "90.0" in report.text(both)


def test_the_page_is_written_whole(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("old")
    report.write_page(page, run_of({("forward", "8x128x64"): {"sdpa": (1.0, 90e9, 1)}}))
    text = page.read_text()
    assert text.startswith("<!-- Generated by `python -m benchmarks --page page.md`")
    assert "CPU, OS, kernels avx2\nmeasured 2026-01-31, sdpa 1.2\n" in text
    assert "8x128x64" in text
    assert "old" not in text


def test_readme_reads_the_tables_that_the_report_writes():
    found = {"sdpa": (1.0, 90e9, 1), "torch": (2.0, 90e9, 1), "ort": (3.0, 90e9, 1)}
    slow = {"sdpa": (20e-6, 1, 1), "torch": (0.25, 1, 1)}
    text = report.text(run_of({("forward", "8x128x64"): found, ("decode", "8:8 heads"): slow}))
    assert readme.tables(text) == {
        "forward, 1 thread, GF/s": {"8x128x64": {"sdpa": 90.0, "torch": 45.0, "ort": 30.0}},
        "decode, 1 thread, us": {"8:8 heads": {"sdpa": 20.0, "torch": 250000.0}},
    }


PAGES = sorted((ROOT / "docs" / "performance").glob("*.md"))
MEASURED = [path for path in PAGES if path.stem not in ("amx", "arm")]


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_committed_pages_are_what_the_report_writes(path):
    page = path.read_text(encoding="utf-8")
    (isa,) = set(re.findall(r"^# Figures: \w+, kernels (\w+)$", page, re.MULTILINE))
    (text,) = re.findall(r"^```text\n(.*?)\n```$", page, re.MULTILINE | re.DOTALL)
    assert page == report.PAGE.format(file=path.name, name=path.stem, isa=isa, text=text)
    assert "forward, 1 thread, GF/s" in readme.tables(page)


def test_amx_costs_by_the_page_what_was_foreseen():
    page = (ROOT / "docs" / "performance" / "amx.md").read_text(encoding="utf-8")
    off = re.findall(r"^\| (\w+) \| (\w+) \| .* \| (\d+) % \|", page, re.MULTILINE)
    assert {(dtype, panel) for dtype, panel, _ in off} == {
        (dtype, panel) for dtype in ("bfloat16", "float32") for panel in ("tiles", "weights")
    }
    assert all(int(per_cent) <= 20 for *_, per_cent in off)


def test_picture_and_table_of_the_readme_are_those_of_the_page():
    page = readme.PAGE.read_text(encoding="utf-8")
    text = readme.README.read_text(encoding="utf-8")
    assert readme.PICTURE.read_text(encoding="utf-8") == readme.picture(page)
    assert text == readme.with_table(text, page)
    shown = readme.figures(readme.tables(page), readme.ROWS[0])
    assert f"| **{shown['sdpa']:.1f}** |" in text
    with pytest.raises(ValueError, match="marks"):
        readme.with_table("no marks", page)


def test_cores_are_different_cpus():
    usable = os.sched_getaffinity(0)
    assert len(set(machine.cores(len(usable))) & usable) == len(usable)
    with pytest.raises(SystemExit, match="--threads"):
        machine.cores(len(usable) + 1)


def test_a_share_is_of_the_peak_beside_the_fastest_call():
    fast, slow = (run_of({("forward", "8x1024x64"): {"sdpa": (s, 90e9, 1)}}) for s in (1.0, 1.1))
    for run, peak in ((fast, 95.0), (slow, 120.0)):
        run.runs[0]["records"][0]["peak"] = {"avx2_f32": peak}
    for runs in (fast.runs + slow.runs, slow.runs + fast.runs):
        (share,) = targets.rows(Results(runs))
        assert share.value == pytest.approx(100 * 90 / 95)
        assert "beside the fastest calls: 95.0" in report.text(Results(runs))


def test_shares_ratios_and_verdicts_are_arithmetic():
    found = {"sdpa": (1.0, 90e9, 1), "torch": (1.5, 90e9, 1), "ort": (1.05, 90e9, 1)}
    share, ratio = targets.rows(run_of({("forward", "8x1024x64"): found}))
    assert share.value == pytest.approx(90)  # of 100 GF/s
    assert share.goal.margin(share.value) == pytest.approx(90 / 85 - 1)
    assert (ratio.value, ratio.beside) == (pytest.approx(1.05), "ort")
    assert ratio.goal.margin(ratio.value) == pytest.approx(1.05 / 1.1 - 1)
    text = report.text(run_of({("forward", "8x1024x64"): found}))
    assert "MISSED by 5 %" in text
    assert text.endswith("\ntargets: 1 of 2 met, 50 %, avx2")
    assert "left out: jax" in text


def test_a_page_names_the_cpu_where_the_run_does():
    old, new, other = (
        run_of({("forward", "8x1024x64"): {"sdpa": (1.0, 90e9, 1)}}) for _ in range(3)
    )
    assert "\nCPU, OS, kernels avx2\n" in f"\n{report.text(old)}"
    new.runs[0]["cpu"], other.runs[0]["cpu"] = "family 25 model 1", "family 6 model 207"
    for runs in (new.runs, old.runs + new.runs, new.runs + old.runs):
        text = report.text(Results(runs))
        assert text.startswith("CPU, family 25 model 1, OS, kernels avx2\n")
        assert text.endswith("\ntargets: 1 of 1 met, 100 %, family 25 model 1, avx2")
    with pytest.raises(ValueError, match="one CPU, got family 25 model 1, family 6 model 207"):
        Results(new.runs + other.runs)


def test_the_cpu_is_named_by_family_and_model(monkeypatch):
    lines = "processor : 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n"
    monkeypatch.setattr(machine.Path, "read_text", lambda path: lines)
    assert machine.cpu() == "family 25 model 17"
    monkeypatch.setattr(machine.Path, "read_text", lambda path: "processor : 0\nCPU part : 0xd0c\n")
    assert machine.cpu() == ""


def test_a_target_is_met_where_every_run_that_measured_it_meets_it():
    """The best of both meets all three; the second run misses one, and did not measure another."""
    names = ("8x1024x64", "8x512x64", "8x2048x128")
    times = ((1.0, 1.0, 1.0), (1.0, 1.1, None))
    # Another best peer in the other run is the same row.
    peers = ({"torch": (1.5, 90e9, 1)}, {"ort": (1.6, 90e9, 1)})
    apart = [
        run_of(
            {
                ("forward", name): {"sdpa": (s, 90e9, 1), **peer}
                for name, s in zip(names, run, strict=True)
                if s
            }
        )
        for run, peer in zip(times, peers, strict=True)
    ]
    text = report.text(Results([run for each in apart for run in each.runs]), apart)
    found = dict(re.findall(r"^(8x\w+(?:, against \w+)?) .*?(met.*|MISSED.*)$", text, re.MULTILINE))
    assert found == {
        "8x1024x64": "met in 2 of 2",
        "8x512x64": "MISSED by 4 % (met in 1 of 2)",
        "8x2048x128": "met",
        "8x1024x64, against torch": "met in 2 of 2",
        "8x512x64, against torch": "met in 2 of 2",
        "8x2048x128, against torch": "met",
    }
    assert text.endswith("\ntargets: 5 of 6 met, 83 %, avx2")
    assert all(len(line) <= report.WIDTH for line in text.splitlines())


def test_short_heads_are_compared_across_the_numbers_of_threads():
    one, two = (
        run_of({("short", "256x1x16x64 backward"): {"sdpa": (s, 90e9, 1)}}, threads=count)
        for count, s in ((1, 1.0), (2, 0.6))
    )
    rows = list(targets.rows(Results(one.runs + two.runs)))
    assert [(row.title, row.value, row.goal) for row in rows] == [
        ("256x1x16x64 backward, a thread", pytest.approx(90), targets.Goal(60)),
        ("256x1x16x64 backward, a thread", pytest.approx(75), targets.Goal(60)),
        ("256x1x16x64 backward", pytest.approx(1 / 0.6), targets.Goal(1.8)),
    ]
    # Neither file has the last row for itself.
    text = report.text(Results(one.runs + two.runs), [one, two])
    assert re.search(r"^256x1x16x64 backward +1.67 x +>= 1.8 +MISSED by 7 %$", text, re.MULTILINE)


def test_softmax_is_judged_by_the_bytes_it_moves():
    records = {
        ("softmax", "(64, 8192)"): {"sdpa": (2, 0, 20), "copy": (1, 0, 20), "ort": (2.2, 0, 20)},
        ("softmax", "logsumexp (64, 8192)"): {"sdpa": (1, 0, 10), "copy": (1, 0, 20)},
        ("softmax", "softmax_backward (64, 8192)"): {"sdpa": (2, 0, 30), "copy": (1, 0, 20)},
    }
    ort, *shares = targets.rows(run_of(records))
    assert (ort.value, ort.goal, ort.beside) == (pytest.approx(1.1), targets.Goal(1.15), "ort")
    assert [row.value for row in shares] == [50, 50, 75]


@pytest.mark.parametrize(("name", "arrays"), [("log_softmax", 2), ("logsumexp", 1)])
def test_relatives_of_softmax_count_what_they_read_and_write(name, arrays):
    works_of = {w.name: w for w in works.softmax(contenders.Setting(1, peers.find(1)[0]))}
    found = works_of[f"{name} (64, 8192)"].build()
    size = 4 * 64 * 8192
    assert found["copy"].bytes == 2 * size
    assert arrays * size <= found["sdpa"].bytes < (arrays + 0.01) * size
    backward = works_of["softmax_backward (64, 8192)"].build()
    assert backward["sdpa"].bytes == 3 * size


def test_growth_keeps_its_rate_and_decode_stays_ahead_of_numpy():
    records = {
        ("growth", f"backward {n}"): {"sdpa": (s, 9e9, 1)} for n, s in ((2048, 1), (16384, 2))
    }
    records["decode", "8:8 heads, 4096 keys"] = {"sdpa": (2, 0, 9), "numpy": (1.8, 0, 9)}
    (numpy,) = targets.rows(run_of(records, threads=2))
    assert (numpy.value, numpy.goal) == (pytest.approx(0.9), targets.Goal(1.0))
    _, growth = targets.rows(run_of(records))
    assert (growth.value, growth.goal) == (0.5, targets.Goal(0.95))


def test_long_backwards_keep_their_rate_and_stay_ahead_of_torch():
    records = {
        ("long", f"d = 128, n = {n}"): {"sdpa": (s, 9e9, 1), "torch": (2.0, 9e9, 1)}
        for n, s in ((1024, 1.0), (16384, 1.6))
    }
    short, long, growth = targets.rows(run_of(records))
    assert [short.value, long.value] == [2, 1.25]
    assert short.goal == targets.Goal(1.1)
    assert (growth.value, growth.goal) == (0.625, targets.Goal(0.95))


def test_targets_are_those_of_the_instruction_set():
    found = {"sdpa": (1.0, 90e9, 1)}
    records = {("forward", "8x1024x64"): found}
    (row,) = targets.rows(run_of(records, "avx512"))
    assert (row.value, row.goal) == (pytest.approx(45), targets.Goal(87))
    for isa, bound in (("avx512", 86), ("avx2", 85)):
        (row,) = targets.rows(run_of(records, isa, "Intel(R) Xeon(R) Processor"))
        assert row.goal == targets.Goal(bound)
    records[("causal", "forward")] = {"full": (1.0, 2, 1), "causal": (0.5, 1, 1)}
    _, causal = targets.rows(run_of(records))
    assert causal.value == 0.5
    assert causal.goal.margin(causal.value) > 0 > causal.goal.margin(0.57)


def test_the_exponent_of_growth_is_fitted():
    records = {
        ("growth", f"forward {n}"): {"sdpa": (1e-9 * n**1.7, 1, 1)} for n in (512, 2048, 4096, 8192)
    }
    lengths, _, exponent = report.slope(run_of(records), "forward")
    assert lengths == [512, 2048, 4096, 8192]
    assert exponent == pytest.approx(1.7)


def test_plots_are_written_from_the_figures(quick, tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks import plots

    (run,) = json.loads(quick[0].read_text())
    forward = next(r for r in run["records"] if r["group"] == "forward")["contenders"]
    run["records"] += [
        {"group": "sweep", "name": name, "contenders": forward}
        for name in ("n=16", "n=32", "d=16", "d=32")
    ]
    run["memory"] = {name: {"256": 10**6, "512": 4 * 10**6} for name in forward}
    written = list(plots.write(Results([run]), tmp_path))
    assert sorted(path.name for path in written) == sorted(
        f"{name}.{kind}"
        for name in ("roofline", "speed", "growth", "memory")
        for kind in ("svg", "png")
    )
    assert all(path.stat().st_size > 1000 for path in written)
    speed = (tmp_path / "speed.svg").read_text()
    assert all(f">{name}<" in speed for name in forward)


def test_memory_of_a_forward_grows_with_the_matrix_in_numpy_and_not_in_sdpa():
    from benchmarks.memory import over_length

    n = 1024
    matrix, result = 4 * n * n, 4 * n * 64
    found = over_length(["sdpa", "numpy"], (n,))
    # The matrix itself, and for sdpa less than one.
    assert found["numpy"][n] >= 0.9 * matrix
    assert found["sdpa"][n] < matrix / 2
    assert result < matrix / 2


def test_counts_that_differ():
    recorded = {"avx2": {"forward": 1000, "gone": 5}, "neon": {"forward": 7}}
    found = {"avx2": {"forward": 1029, "new": 3}}
    assert list(counts.differences(found, recorded)) == [
        "avx2 gone: 5 on record, None here",
        "avx2 new: None on record, 3 here",
    ]
    found = {"avx2": {"forward": 1031, "gone": 5}}
    assert list(counts.differences(found, recorded)) == [
        "avx2 forward: 1000 on record, 1031 here, +3.1 %"
    ]


def test_counts_to_renew_are_named_and_no_difference():
    recorded = {"avx2": {"forward": None, "backward": 5}}
    found = {"avx2": {"forward": 10, "backward": 5}, "neon": {"forward": 7}}
    assert list(counts.differences(found, recorded)) == []
    assert list(counts.unknown(found, recorded)) == ["avx2 forward", "neon"]


def test_counts_on_record_name_all_works():
    recorded = json.loads(counts.RECORD.read_text())["counts"]
    assert {"generic", "avx2"} <= recorded.keys()
    names = recorded["avx2"].keys()
    assert {isa: works.keys() for isa, works in recorded.items()} == {
        isa: set(counts.FEW.get(isa, names)) for isa in recorded
    }
    # Wider vectors execute less.
    widest = recorded.get("avx512", recorded["avx2"])
    for name in names:
        assert widest[name] is None or recorded["avx2"][name] > widest[name] / 1.1
    for name in counts.FEW["generic"]:
        assert recorded["generic"][name] > recorded["avx2"][name]


def test_cpus_are_counted_where_a_process_cannot_choose_them(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert machine.cores(3) == [0, 1, 2]
    with pytest.raises(SystemExit, match="3 CPUs"):
        machine.cores(4)
