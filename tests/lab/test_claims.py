"""The ledger of claims: how rows are judged, its records, its output."""

import importlib.util
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from support.claims import HARM, claim, figure
from support.examples import ROOT

from sdpa_lab import claims, minilm, smollm2
from sdpa_lab.claims import Expect, cli
from sdpa_lab.claims.chinese import FINDINGS, bilingual
from sdpa_lab.claims.judge import ALPHA, LOOKS
from sdpa_lab.claims.record import VERDICTS, Trained, at_horizons
from sdpa_lab.claims.rule import DEPENDS
from sdpa_lab.tools import estimate
from sdpa_lab.tools.estimate import Draws, Estimate, exact, student
from sdpa_lab.tools.table import Table, with_interval

RECORDS = claims.claims()


def _tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ledger_page = _tool("ledger")


# ---------------------------------------------------------------------- how rows are judged


def test_the_record_has_distances_and_the_smallest_effects():
    def experiment(seed, times):
        values = {"x": figure(0.9, 1.0), "t": figure(1.9, 2.1), "z": exact(0.0)}
        return values | {"y": figure(1.9, 2.1)}

    record = claim([Expect("x", 1.0, 0.15), Expect("z", 0.0, 0.1)], experiment, trained=(ENCODER,))
    row = claims.judge(record, rows=1)
    plain = row.record()
    assert plain["distance"] == pytest.approx(0.5)
    assert plain["nearest"] == "x"
    assert plain["smallest_effect"] == pytest.approx({"x": 0.1, "z": 0.0, "y": 0.2})
    assert plain["distances"] == pytest.approx({"x": 0.5, "z": None, "y": 2.0})
    assert plain["trained_distance"] == pytest.approx({minilm.MODEL: 2.0})
    json.dumps(plain, allow_nan=False)
    assert "distance to the margin 0.5, smallest effect 0.1: x\n" in cli.text([row])
    exact_row = claims.judge(claim([Expect("x", 1.0, 0.1)], lambda s, t: {"x": exact(1.0)}), rows=1)
    assert exact_row.record()["distance"] is None
    assert "distance" not in cli.text([exact_row])


def test_a_row_that_depends_on_the_horizon_says_so():
    def experiment(seed, times):
        return {e.figure: exact(1.0 + (e.horizon == 10)) for e in HARM}

    text = {"holds": "h", "law": "l", "depends": "It is {x, 10 steps:.0f} at 10."}
    row = claims.judge(claim(HARM, experiment, **text), rows=1)
    assert row.verdict == "depends on the horizon"
    assert row.statement == (
        "Corrected after 10 steps, reproduced after 20 and 30 steps. It is 2 at 10."
    )
    assert row.record()["horizons"] == {"10": "corrected", "20": "reproduced", "30": "reproduced"}
    assert str(row).startswith("test: depends on the horizon\n")


def test_the_level_holds_for_the_whole_ledger():
    seen = []

    def experiment(seed, times):
        seen.append((seed, times))
        values = np.random.default_rng(seed).standard_normal(100)
        return {"x": Draws(values), "y": exact(3.0)}

    wide = claim([Expect("x", 0.0, 9.0), Expect("y", 3.0, 0.0)], experiment)
    row = claims.judge(wide, rows=50, seed=3, times=0.5)
    assert seen == [(3, 0.5)]
    assert row.verdict == "reproduced"
    assert row.level == 1 - ALPHA / (50 * 2 * LOOKS)
    values = np.random.default_rng(3).standard_normal(100)
    half = student(row.level, 99) * values.std(ddof=1) / 10
    assert row.figures[0][1:] == pytest.approx(
        (values.mean(), values.mean() - half, values.mean() + half, 100)
    )
    assert row.figures[1] == ("y", 3.0, 3.0, 3.0, 1)
    assert (row.draws["x"] == values).all()


def test_statements_show_the_interval_of_every_other_figure():
    values = np.random.default_rng(3).standard_normal(100)
    row = claims.judge(claim([Expect("x", 0.0, 9.0)], lambda s, t: {"x": Draws(values)}), rows=50)
    assert row.level > 0.999
    assert row.statement == f"holds: {with_interval(Draws(values).estimate(0.95))}"


def test_a_random_figure_without_an_interval_is_refused():
    equal = {"x": Draws(np.ones(16))}
    with pytest.raises(ValueError, match=r"^test: expected an interval around x, got 16 equal"):
        claims.judge(claim([Expect("x", 1.0, 0.1)], lambda s, t: equal), rows=1)
    # A share has one even so.
    share = {"x": Draws(np.ones(16), "share")}
    assert (
        claims.judge(claim([Expect("x", 1.0, 0.5)], lambda s, t: share), rows=1).figures[0].low < 1
    )


def test_undecided_rows_are_measured_again_with_more_draws():
    seen = []

    def experiment(seed, times):
        seen.append(times)
        return {"x": figure(0.5, 1.5) if times < 8 else figure(1.9, 2.1)}

    expect = [Expect("x", 1.0, 0.2)]
    assert claims.judge(claim(expect, experiment, more=8), rows=1).statement == "law: 2.0"
    assert seen == [1, 8]
    row = claims.judge(claim(expect, experiment, more=1), rows=1)
    assert seen == [1, 8, 1]
    assert row.verdict == "undecided"
    assert row.statement == "Not decided by these draws: x 1.0±.5 against 1."
    record = claim([Expect("x", 3.0, 0.2, law=1.0)], experiment, more=1)
    row = claims.judge(record, rows=1)
    assert row.statement == "Not decided by these draws: x 1.0±.5 against our law 1."


ENCODER = Trained(minilm.MODEL, (Expect("y", 2.0, 0.5),), "y is {y:.1f}.")
DECODER = Trained(smollm2.MODEL, (Expect("z", 3.0, 0.5),), "z is {z:.1f}.")


@pytest.mark.parametrize(("inside", "trained"), [(True, "reproduced"), (False, "refuted")])
def test_a_trained_model_has_a_verdict_of_its_own(inside, trained):
    def experiment(seed, times):
        found = {"y": exact(2.0 if inside else 4.0), "z": exact(3.0)}
        return {"x": Draws(np.array([0.9, 1.1])), **found}

    record = claim([Expect("x", 1.0, 1e5)], experiment, trained=(ENCODER, DECODER))
    row = claims.judge(record, rows=1)
    models = {minilm.MODEL: trained, smollm2.MODEL: "reproduced"}
    assert (row.verdict, row.trained) == ("reproduced", models)
    assert row.level == 1 - ALPHA / (3 * LOOKS)
    assert row.statement.endswith(
        f" For all-MiniLM-L6-v2 the claim is {trained}: y is {2 if inside else 4}.0. "
        "For SmolLM2-135M-Instruct the claim is reproduced: z is 3.0."
    )
    assert str(row).startswith(
        f"test: reproduced; all-MiniLM-L6-v2: {trained}; SmolLM2-135M-Instruct: reproduced\n"
    )
    plain = row.record()
    assert (plain["trained"], plain["decoder"]) == (trained, "reproduced")
    assert plain["predicted"] == {"x": 1.0, "y": 2.0, "z": 3.0}
    assert "; claimed 2, margin ±0.5" in cli.text([row])


def test_an_undecided_verdict_on_the_trained_model_asks_for_more_draws():
    seen = []

    def experiment(seed, times):
        seen.append(times)
        return {"x": exact(1.0), "y": figure(1.4, 1.6) if times == 1 else figure(1.6, 1.7)}

    record = claim([Expect("x", 1.0, 0.1)], experiment, trained=(ENCODER,))
    assert claims.judge(record, rows=1).trained == {minilm.MODEL: "reproduced"}
    assert seen == [1, 4]


def test_without_the_trained_model_the_row_says_how_to_get_it():
    record = claim([Expect("x", 1.0, 0.1)], lambda s, t: {"x": exact(1.0)}, trained=(ENCODER,))
    row = claims.judge(record, rows=1)
    assert (row.verdict, row.trained) == ("reproduced", {})
    assert row.level == 1 - ALPHA / (2 * LOOKS)
    assert row.statement == (
        "holds: 1.00 With all-MiniLM-L6-v2 installed (make models) its heads are judged as well."
    )
    assert row.record()["trained"] is None
    assert row.record()["predicted"] == {"x": 1.0}


def test_a_missing_package_leaves_the_row_undecided_by_name():
    def experiment(seed, times):
        raise ImportError("needs a model: pip install it")

    row = claims.judge(claim([Expect("x", 0.0, 1.0)], experiment), rows=1)
    assert (row.verdict, row.figures) == ("undecided", ())
    assert row.statement == "Not measured here: needs a model: pip install it"


def test_student_quantiles_are_those_of_the_tables():
    # Fisher & Yates, "Statistical tables", table III: two-sided.
    for level, freedom, quantile in [
        (0.95, 1, 12.706),
        (0.95, 4, 2.776),
        (0.99, 10, 3.169),
        (0.999, 2, 31.599),
        (0.999, 30, 3.646),
        (0.999, 120, 3.373),
    ]:
        assert student(level, freedom) == pytest.approx(quantile, abs=6e-4)
    # Both branches where they meet, and the normal limit.
    assert student(0.9999, 999) == pytest.approx(student(0.9999, 1000), rel=5e-5)
    assert student(0.95, 10**9) == pytest.approx(estimate.Z, abs=1e-6)


# ---------------------------------------------------------------------- the records


@pytest.mark.parametrize("name", RECORDS)
def test_record(name):
    record = RECORDS[name]
    assert record.id == name
    assert record.expect
    assert set(record.notes) <= {"000", "001", "002", "003", "004"}
    assert re.search(r"[\u4e00-\u9fff]", record.claim_zh)
    assert record.claim.endswith(".")
    assert record.claim.isascii()
    for expect in record.judged:
        assert not set(expect.figure) & set(".:![]{}")
        assert all(math.isfinite(end) for end in (expect.claimed, expect.law or 0))
        low, high = expect.claimed_region()
        assert low <= expect.claimed <= high
        assert not (math.isinf(low) and math.isinf(high))


def test_every_row_has_its_finding_in_chinese():
    assert set(FINDINGS) == set(RECORDS)
    for verdict, finding in FINDINGS.values():
        assert verdict in VERDICTS
        assert re.search(r"[\u4e00-\u9fff]", finding)


@pytest.mark.parametrize("name", RECORDS)
def test_findings_in_chinese_have_figures_of_the_english_text_or_judged_ones(name):
    record, (_, finding) = RECORDS[name], FINDINGS[name]
    known = {expect.figure for expect in record.judged}
    for text in (record.holds, record.law, record.depends):
        known |= set(re.findall(r"\{([^:}]+)", text))
    for field in re.findall(r"\{([^}]*)\}", finding):
        figure, _, form = field.partition(":")
        assert figure in known
        assert form  # a value alone: the interval stands beside it in the ledger


def test_findings_in_chinese_carry_figures_where_something_random_was_measured():
    without = {name for name, (_, finding) in FINDINGS.items() if "{" not in finding}
    exact = {"exp-digits", "dv-differs", "backward"}
    assert without <= exact | {name for name, record in RECORDS.items() if record.cited}


def test_what_is_shown_in_chinese_has_its_numbers():
    (row,) = claims.ledger(["softmax-scaled"])
    numbers = [f"{figure.value:.3f}" for figure in row.figures[:5]]
    assert "、".join(numbers) in bilingual([row])
    assert "见英文" not in "".join(text for _, text in FINDINGS.values())
    assert bilingual([replace(row, verdict="undecided")]).endswith("结论     未定。")


def test_the_page_shows_the_finding_that_was_written_for_its_verdict():
    for name, (verdict, finding) in FINDINGS.items():
        section = PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]
        if "{" not in finding:
            assert (f"- Verdict: **{verdict}**" in section) == (finding in section), name


def test_every_row_has_its_record():
    assert list(RECORDS) == list(claims.IDS)  # what they judge: test_sentences.py


def test_verdicts_of_the_rows_that_take_no_time():
    """Claims that are quick to check, with seeds that were not used before."""
    reproduced = (
        "universal softmax-raw jacobian saturated shift dv-differs backward swap dot-no-params "
        "exp-digits exp-50 footnote tanh-range instances-differ fold-start"
    )
    corrected = (
        "softmax-scaled scaled-derivative weight-grad noncommute sigma-law implicit-assumption "
        "tanh-parallel grads-structure value-index fold-step expressiveness"
    )
    expected = dict.fromkeys(reproduced.split(), "reproduced")
    expected |= dict.fromkeys(corrected.split(), "corrected")
    expected |= {"table3-rowB": "refuted", "additive-attribution": "refuted"}
    rows = claims.ledger(expected, seed=20)
    assert {row.claim.id: row.verdict for row in rows} == expected
    figures = {figure.name: figure.value for row in rows for figure in row.figures}
    assert figures["sum of the weights"] == pytest.approx(1, abs=1e-15)
    assert figures["smallest p(1-p)"] == pytest.approx(0.00205, abs=1e-5)
    assert figures["relative error of X^T dL/dQ"] < 1e-8
    assert "{" not in "".join(row.statement for row in rows)


@pytest.mark.parametrize("name", claims.quick())
def test_no_random_figure_is_judged_without_an_interval(name):
    """With other seeds and a tenth of the draws; the slow rows are in the committed ledger."""
    (row,) = claims.ledger([name], seed=21, times=0.1)
    for cell in row.figures:
        if cell.name in row.expect and cell.name in row.draws:
            assert cell.low < cell.high, cell


# ---------------------------------------------------------------------- what is committed


def _rounded(tree):
    if isinstance(tree, dict):
        return {name: _rounded(item) for name, item in tree.items()}
    if isinstance(tree, list):
        return [_rounded(item) for item in tree]
    return float(f"{tree:.12g}") if isinstance(tree, float) else tree


def test_margins_are_those_that_were_frozen():
    """A changed margin needs `tools/ledger.py --margins` and a line in the list of changes."""
    frozen = json.loads((ROOT / "docs/margins.json").read_text(encoding="utf-8"))
    # Laws that use exp or tan are not the same bits with every build of NumPy.
    assert _rounded(frozen["rows"]) == _rounded(ledger_page.margins())
    gone = {
        row
        for change in frozen["changes"]
        if change["change"].startswith("removed:")
        for row in change["rows"].split(", ")
    }
    assert not gone & set(RECORDS)
    for change in frozen["changes"]:
        assert re.fullmatch(r"2026-\d\d-\d\d", change["date"])
        assert len(change["change"]) > 20
        assert change.get("known", True) is True
        assert set(change) <= {"date", "rows", "change", "known"}
        rows = re.sub(", of trained heads", "", change["rows"]).split(", ")
        assert set(rows) <= {*RECORDS, *gone, "all"}


def test_laws_and_horizons_are_frozen_with_the_margins(monkeypatch):
    expect = at_horizons(Expect("x", 1.0, (0, None), 0.0, 0.1, "y"), horizons=(150,))
    record = claim([*expect, Expect("z", 0.5, 0.1)], None)
    monkeypatch.setattr(ledger_page, "claims", lambda: {"test": record})
    law = {"law": 0.0, "law_margin": 0.1, "law_figure": "y, 150 steps"}
    assert ledger_page.margins()["test"] == {
        "x, 150 steps": {"claimed": 1.0, "margin": [0, None], **law, "horizon": 150},
        "z": {"claimed": 0.5, "margin": 0.1},
    }


def _judged(record):
    return {name for e in record.judged for name in (e.figure, e.law_figure) if name}


def _measured(record):
    """A row as the JSON has it, in which every figure has a value of its own."""
    shown = re.findall(r"\{([^:}]+)", FINDINGS[record.id][1])
    names = _judged(record) | set(shown)
    figures = [
        {"name": name, "value": 2.5 + i, "low": 2.0 + i, "high": 3.0 + i, "n": 9}
        for i, name in enumerate(sorted(names))
    ]
    row = {"id": record.id, "verdict": "refuted", "statement": "s", "seed": 0}
    row |= {"distance": None, "nearest": None, "distances": {}}
    return row | {"notes": ["000"], "figures": figures}


@pytest.mark.parametrize("name", RECORDS)
def test_every_value_on_the_page_is_that_of_the_figure_named_before_it(name):
    row = _measured(RECORDS[name])
    values = {figure["name"]: figure["value"] for figure in row["figures"]}
    section = " ".join(ledger_page.page([row]).split(f"\n## {name}\n")[1].split("\n## ")[0].split())
    # What stands between a name and a value contains no other name.
    printed = re.findall(r"`([^`]+)`[^`]*? measured (\S+)", section)
    expected = {figure: values[figure] for figure in _judged(RECORDS[name])}
    assert {figure: float(value) for figure, value in printed} == expected
    assert len(printed) == sum(1 + (e.law_figure is not None) for e in RECORDS[name].judged)


def test_fragile_verdicts_are_seen_in_the_table_of_the_page():
    rows = [_measured(RECORDS[name]) for name in ("swap", "shift", "universal")]
    for row, least in zip(rows, (0.09, 12.34, None), strict=True):
        nearest = RECORDS[row["id"]].expect[0].figure
        row |= {"distance": least, "nearest": nearest, "distances": {nearest: least}}
        row |= {"smallest_effect": {nearest: 0.0123}}
    text = ledger_page.page(rows)
    cells = {line.split("](")[0]: line.split(" | ")[2:] for line in text.split("\n")}
    assert cells["| [swap"] == ["refuted", "**0.09**", "0.012", "推翻 |"]
    assert cells["| [shift"] == ["refuted", "12", "0.012", "推翻 |"]
    assert cells["| [universal"] == ["refuted", "-", "-", "推翻 |"]
    section = " ".join(text.split("\n## swap\n")[1].split("\n## ")[0].split())
    assert (
        "- Verdict: **refuted** (推翻); distance **0.09**, smallest effect 0.012: `rel" in section
    )
    assert "(n = 9); distance **0.09** - " in section
    # The same from the page, of rows that another run does not judge.
    assert ledger_page.page(rows[:1], text) == text


def test_the_console_names_the_figure_of_a_law():
    record = claim([Expect("x", 0.0, 0.1, law=0.0, law_figure="y")], None, law="{x}")
    measured = {"x": exact(1.43), "y": exact(0.01)}
    text = cli.text([claims.judge(replace(record, experiment=lambda s, t: measured), rows=1)])
    assert "x: 1.43 (n = 1); claimed 0, margin ±0.1\n" in text
    assert "y: 0.01 (n = 1); law 0\n" in text


def test_the_page_shows_the_formula_of_the_note_beside_ours():
    """1.43 is the error of the note's formula; that of ours is one of rounding."""
    section = " ".join(PAGE.split("\n## weight-grad\n")[1].split("\n## ")[0].split())
    found = re.findall(r"`(relative error of [^`]+)`[^`]*? measured (\S+)", section)
    errors = {name: float(value) for name, value in found}
    assert errors["relative error of dL/dQ X^T"] == pytest.approx(1.43, abs=0.1)
    assert errors["relative error of X^T dL/dQ"] < 1e-8


def test_paragraphs_in_chinese_stand_on_one_line_each():
    """A browser shows a break between two Chinese characters as a space."""
    assert re.findall(r"[\u3000-\u9fff\uff00-\uffef]\n[^-|#\n]", PAGE) == []
    for record in RECORDS.values():
        assert f"\n{record.claim_zh}\n" in PAGE


def test_the_page_names_the_margins_that_were_set_when_a_result_was_known():
    known = {"date": "2026-11-21", "rows": "swap", "change": "later", "known": True}
    text = ledger_page._changes([known, known | {"rows": "shift", "known": False}])
    about, changes = text.split("\n\n")[1:]
    assert about == (
        "Set or changed when a result was known, as they say themselves: swap (2026-11-21)."
    )
    assert changes == "- 2026-11-21, swap: later\n- 2026-11-21, shift: later"
    frozen = json.loads((ROOT / "docs/margins.json").read_text(encoding="utf-8"))
    assert ledger_page._changes(frozen["changes"]) in PAGE


def test_the_table_says_what_each_row_claims():
    for name, record in RECORDS.items():
        if f"| [{name}]" in PAGE:
            cell = record.claim.replace("|", r"\|")
            assert f"| [{name}](#{name.lower()}) | {cell} |" in PAGE


PAGE = (ROOT / "docs/ledger.md").read_text(encoding="utf-8")

OPEN = ("softcap", "qk-clip")
"""Rows that the draws leave undecided: after 150 steps, what a cap saves is near what counts."""


@pytest.mark.parametrize("name", RECORDS)
def test_the_committed_ledger_is_not_stale(name):
    """What does not depend on a measurement is as the records have it."""
    record = RECORDS[name]
    section = PAGE.split(f"## {name}\n")[1].split("\n## ")[0]
    assert ledger_page.heading(record) in PAGE
    if "Not judged in the run that made this page." in section:
        assert f"| [{name}]" not in PAGE
        return
    flat = " ".join(section.split())
    falls = []
    for expect in record.judged:
        start = f"`{expect.figure}`: {cli.fixed(expect)}"
        assert start in flat
        pattern = r"; measured (.*? \(n = \d+\))(?:; `[^`]+`: law [^;]*; measured (\S+))?"
        ((measured, ours),) = re.findall(re.escape(start) + pattern, flat)
        assert bool(ours) == (expect.law_figure is not None)
        # Whatever has more than one draw has an interval of some length.
        if not measured.endswith("(n = 1)"):
            ends = re.search(r"\[(\S+), (\S+)\]", measured)
            assert ends, measured
            low, high = float(ends[1]), float(ends[2])
            assert low < high
            # The draws suffice to say on which side of its margin it lies, or that our law holds.
            # One figure is enough to refute, and one number of steps leaves others open.
            first, last = expect.claimed_region()
            law = () if expect.law is None else expect.law_region()
            held = (first <= low and high <= last) or (law and law[0] <= low and high <= law[1])
            falls.append(high < first or last < low)
            told = "**refuted**" in section or f"**{DEPENDS}**" in section or name in OPEN
            assert held or falls[-1] or told
    assert any(falls) or not falls or "**refuted**" not in section
    assert (name in OPEN) == ("- Verdict: **undecided**" in section)
    for book in ledger_page.notebooks().get(name, []):
        assert f"{book}.ipynb" in section


@pytest.mark.parametrize("name", ["softmax-scaled", "universal", "temperature", "weight-grad"])
def test_committed_verdicts_are_those_of_today(name):
    (row,) = claims.ledger([name])
    (line,) = re.findall(rf"^\| \[{name}\].*$", PAGE, re.MULTILINE)
    assert f" | {row.verdict} | " in line


def test_the_seed_decides():
    one, again, other = (claims.ledger(["toy-512"], seed=seed, times=0.1) for seed in (5, 5, 6))
    assert one[0].figures == again[0].figures
    assert one[0].figures != other[0].figures


def test_an_unknown_row_is_refused():
    with pytest.raises(ValueError, match=r"only: expected ids of claims .* got \['mean'\]"):
        claims.ledger(["mean"])


# ---------------------------------------------------------------------- how it is shown


def test_json(tmp_path):
    command = [sys.executable, "-m", "sdpa", "claims", "--json", "--only", "softmax-raw"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    (row,) = json.loads(done.stdout)
    assert list(row) == [
        *("id", "notes", "claim", "claim_zh", "verdict", "statement", "figures"),
        *("predicted", "margin", "experiment", "seed", "seconds"),
        *("distance", "nearest", "distances", "smallest_effect"),
    ]
    assert list(row["figures"][0]) == ["name", "value", "low", "high", "n"]
    assert row["verdict"] == "reproduced"
    assert row["figures"][4]["value"] == pytest.approx(1 - 8.3e-7, abs=1e-8)
    assert row["predicted"]["weight 5"] == 1


def test_an_unknown_row_on_the_command_line():
    command = [sys.executable, "-m", "sdpa", "claims", "--only", "everything"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "got ['everything']" in done.stderr


def test_text_and_saved_draws(tmp_path):
    values = np.arange(11.0)
    record = claim([Expect("a figure", 5.0, (None, 9))], lambda s, t: {"a figure": Draws(values)})
    record = claim(record.expect, record.experiment, holds="so it is", cited=True)
    row = claims.judge(record, rows=1)
    shown = cli.text([row])
    assert "test: reproduced (cited)\n" in shown
    assert "a figure: 5.0 [2.4, 7.6] (n = 11); claimed 5, margin any below +9" in shown
    assert "1 reproduced" in shown
    cli.save([row], tmp_path / "draws")
    assert (np.load(tmp_path / "draws" / "test.npz")["a_figure"] == values).all()
    assert row.record()["cited"] is True
    json.dumps(row.record(), allow_nan=False)


# ---------------------------------------------------------------------- tables


def test_table():
    table = Table(
        "t",
        [
            {"d_k": 4, "rule": "none", "x": Draws(np.array([1.0, 3.0]), predicted=2.0)},
            {"d_k": 8, "rule": "none", "x": exact(5.0)},
        ],
    )
    assert len(table) == 2
    assert list(table["x"]) == [2.0, 5.0]
    assert list(table["x_n"]) == [2, 1]
    assert table["x_low"][0] == pytest.approx(2 - 12.7062)
    assert table["x_predicted"][0] == 2
    assert np.isnan(table["x_predicted"][1])
    assert table.row(d_k=8)["x"].value == 5
    assert list(table.where(rule="none")["d_k"]) == [4, 8]
    with pytest.raises(KeyError, match="found 2"):
        table.row(rule="none")
    assert str(table).splitlines()[1:] == [
        "d_k rule    x predicted",
        "  4 none 2±13      2.00",
        "  8 none 5.00",
    ]
    with pytest.raises(ValueError, match="rows: expected the columns"):
        Table("", [{"a": 1}, {"b": 1}])
    assert str(Table("empty", [])) == "empty"


def test_intervals_of_columns():
    table = Table("t", [{"d_k": 4, "x": Estimate(1.0, 0.5, 2.0, 9)}])
    assert [end.tolist() for end in table.interval("x")] == [[1.0], [0.5], [2.0]]
    assert [end.tolist() for end in table.interval("d_k")] == [[4], [4], [4]]
    with pytest.raises(KeyError, match="y"):
        table.interval("y")
    # Verdicts are computed once, so a reader must not be able to change them.
    with pytest.raises(ValueError, match="read-only"):
        table["x"][0] = 3.0


def test_a_table_becomes_a_data_frame_where_pandas_is_installed(monkeypatch):
    table = Table("t", [{"d_k": 4, "x": exact(1.0)}])
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=dict))
    assert list(table.to_pandas()) == ["d_k", "x", "x_low", "x_high", "x_n"]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pandas"):
        table.to_pandas()


def test_equal_readings_of_memory_do_not_claim_to_be_exact(monkeypatch):
    """The system counts pages; six equal counts are known to a page each, not to a byte."""
    from sdpa_lab.claims import cost

    same = {(kind, n): np.full(6, 4 * n**2) for kind in ("numpy", "sdpa") for n in cost.SIZES}
    monkeypatch.setattr(cost, "peaks", lambda *args, **kwargs: same)
    for name, draws in cost.memory(0, 1.0).items():
        found = draws.estimate()
        assert found.low < found.high, name
        assert found.high - found.low < 0.02
