"""`python -m sdpa lab`, `claims` that are interrupted, and the text of both on narrow terminals."""

import csv
import io
import json
import re
import runpy
import sys
from inspect import signature

import numpy as np
import pytest

import sdpa
import sdpa_lab as lab
from sdpa.__main__ import INTERRUPTED, main
from sdpa_lab import claims, cli
from sdpa_lab.claims import cli as ledger
from sdpa_lab.claims import parallel
from sdpa_lab.experiments import criteria
from sdpa_lab.report import screen

LOOPS = [name for name, loop in cli.EXPERIMENTS.items() if loop]
QUICK = ("softmax-raw", "exp-digits", "shift")


def test_every_experiment_has_a_command():
    """All functions of the laboratory that make a table from numbers alone, with a plot."""
    made = {
        name
        for name in lab.__all__
        if hasattr(lab, f"plot_{name}")
        and signature(getattr(lab, name)).return_annotation == "Table"
        and all(p.default is not p.empty for p in signature(getattr(lab, name)).parameters.values())
    }
    assert set(cli.EXPERIMENTS) == made


@pytest.mark.parametrize("name", cli.EXPERIMENTS)
def test_arguments_have_one_order(name):
    found = list(cli.arguments(name))
    assert set(found) == set(signature(getattr(lab, name)).parameters) - {"model"}
    order = ("d_k", "n", "sigma", "rho", None, "draws", "seed")
    places = [order.index(x if x in order else None) for x in found]
    assert places == sorted(places)


def few(name):
    """Arguments of a small run."""
    small = {"draws": 4, "steps": 20, "layers": 2, "matrices_each": 2, "batches": 2, "d_model": 16}
    return {
        argument: tuple(default[:2]) if isinstance(default, tuple) else small.get(argument, default)
        for argument, default in cli.arguments(name).items()
    }


@pytest.mark.parametrize("name", LOOPS)
def test_the_parts_of_the_progress_are_one_run(name):
    given = few(name)
    whole = getattr(lab, name)(**given)
    table, complete = cli.measured(name, given)
    assert complete
    assert table.title == whole.title
    assert list(table.columns) == list(whole.columns)
    for column in whole.columns:
        np.testing.assert_array_equal(table[column], whole[column])


SATURATION = ("lab", "saturation", "--d-k", "4", "16", "--n", "7", "--draws", "30")


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_lab_prints_a_table_and_writes_its_columns(tmp_path, monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    main([*SATURATION, "--csv", str(tmp_path / "out.csv")])
    out, err = capsys.readouterr()
    assert err == ""
    expected = lab.saturation([4, 16], [7], draws=30)
    lines = out.splitlines()
    assert max(map(len, lines)) <= columns
    assert lines[0] == expected.title
    for name in expected.rows[0]:
        assert name in out.split()
    assert re.search(r"unscaled +16 +7", out)
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert header == list(expected.columns)
    for name, column in zip(header, zip(*rows, strict=True), strict=True):
        assert list(column) == [str(x) for x in expected[name].tolist()]


def test_lab_writes_the_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    main([*SATURATION, "--pdf", str(tmp_path / "out.pdf")])
    assert (tmp_path / "out.pdf").read_bytes().startswith(b"%PDF")


def test_lab_without_matplotlib_says_so_before_it_measures(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(cli, "measured", None)
    with pytest.raises(SystemExit) as caught:
        main([*SATURATION, "--pdf", str(tmp_path / "out.pdf")])
    assert "python -m sdpa lab saturation: plots need matplotlib" in str(caught.value)


def test_lab_alone_lists_the_experiments(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["lab"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert all(f"\n    {name}" in out for name in cli.EXPERIMENTS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("critical", "--families", "odd"),
            "python -m sdpa lab critical: families: expected 'normal', 'exponential', 'uniform' or",
        ),
        (("saturation", "--csv", "/"), "python -m sdpa: cannot write /"),
        (("saturation", "--pdf", ""), "python -m sdpa: cannot write .: it is a folder"),
        (
            ("saturation", "--csv", "/dev/null", "--pdf", "/dev/../dev/null"),
            "python -m sdpa lab saturation: --pdf: expected another file than that of --csv, got ",
        ),
        (
            ("growth", "--components", "odd"),
            "python -m sdpa lab growth: components: expected 'normal', 'uniform' or 'sign', got",
        ),
    ],
)
def test_lab_refuses(arguments, message):
    with pytest.raises(SystemExit) as caught:
        main(["lab", *arguments])
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lab", "saturation", "--draws", "1"), "--draws: expected at least 2, got 1"),
        (("lab", "saturation", "--n", "64", "0"), "--n: expected at least 2, got 0"),
        (("lab", "saturation", "--d-k", "0"), "--d-k: expected at least 1, got 0"),
        (("lab", "scale_over_length", "--base", "1"), "--base: expected at least 2, got 1"),
        (("lab", "saturation", "--seed", "-1"), "--seed: expected at least 0, got -1"),
        (("lab", "freezing", "--sigma", "-1"), "--sigma: expected at least 0, got -1.0"),
        (("lab", "growth", "--mean-key", "nan"), "--mean-key: expected a finite number, got nan"),
        (("lab", "averaging", "--common", "2"), "--common: expected 0 to 1, got 2.0"),
        (("lab", "best_sigma", "--rho", "-2"), "--rho: expected -1 to 1, got -2.0"),
        (("lab", "freezing", "--sigma", "x"), "--sigma: invalid number value: 'x'"),
        (("claims", "--times", "0"), "--times: expected more than 0, got 0.0"),
        (("claims", "--times", "nan"), "--times: expected a finite number, got nan"),
        (("claims", "--times", "inf"), "--times: expected a finite number, got inf"),
        (("claims", "--save", "/dev/null/x"), "--save: cannot write /dev/null/x: Not a directory"),
    ],
)
def test_values_out_of_range(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert f"error: argument {message}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        ("", "--times 0", "--times: expected at least 1, got 0"),
        ("", "--seed -1", "--seed: expected at least 0, got -1"),
        ("", "--save /dev/null/x", "--save: cannot write /dev/null/x: Not a directory"),
        (".training", "--seed -1", "--seed: expected at least 0, got -1"),
        (".training", "--save /dev/null/x", "--save: cannot write /dev/null/x: Not a directory"),
        (".report.why", "odd", "NAME: invalid choice: 'odd'"),
    ],
)
def test_other_commands_refuse(module, arguments, message, monkeypatch, capsys):
    module = f"sdpa_lab{module}"
    monkeypatch.setattr("sys.argv", [module, *arguments.split()])
    # What another test has imported is not run without a warning.
    for name in (f"{module}.__main__", "sdpa_lab.report.why"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SystemExit) as caught:
        runpy.run_module(module, run_name="__main__")
    assert caught.value.code == 2
    assert f"error: argument {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lab.exponents([16], [10]), "d_k: expected at least 2 different values, got [16]"),
        (
            lambda: lab.first_step_exponents([8, 8]),
            "d_k: expected at least 2 different values, got [8, 8]",
        ),
        (lambda: lab.correlated_growth(d_k=[4, 1]), "d_k: expected at least 2, got 1"),
    ],
)
def test_too_few_values_to_fit(call, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call()


@pytest.mark.parametrize("sigma", [(1.0,), (2.0, 1.0)])
def test_a_grid_without_neighbours_has_its_maximum_at_an_end(sigma):
    curves = np.array([[3.0, 1.0], [1.0, 3.0]])[:, : len(sigma)]
    found = criteria.peak(curves, np.array(sigma))
    np.testing.assert_array_equal(found, [sigma[0], sigma[-1]])


def test_an_interrupted_experiment_keeps_its_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    whole = lab.saturation

    def saturation(d_k, **options):
        if d_k == (16,):
            raise KeyboardInterrupt
        return whole(d_k, **options)

    saturation.__signature__ = signature(whole)
    monkeypatch.setattr(lab, "saturation", saturation)
    with pytest.raises(SystemExit) as caught:
        main([*SATURATION, "--csv", str(tmp_path / "out.csv")])
    assert caught.value.code == INTERRUPTED
    out, err = capsys.readouterr()
    assert "Interrupted: these rows were complete." in err
    assert out.rstrip() == cli.text(whole([4], [7], draws=30), 100)
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 3


# ---------------------------------------------------------------------- claims


def plain(rows):
    """What a row says, but for the time that it took."""
    return [row.record() | {"seconds": None} for row in rows]


def interrupted(monkeypatch, after):
    """Let the ledger be interrupted at its row number `after`; a list of the ids judged."""
    judge, judged = parallel.judge, []

    def interrupting(claim, **options):
        if len(judged) == after:
            raise KeyboardInterrupt
        judged.append(claim.id)
        return judge(claim, **options)

    monkeypatch.setattr(parallel, "judge", interrupting)
    return judged


def test_claims_go_on_after_an_interruption(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["claims", "--seed", "3", "--save", "draws", "--json", "--only", *QUICK]
    with monkeypatch.context() as patch:
        interrupted(patch, 2)
        with pytest.raises(SystemExit) as caught:
            main(command)
    assert caught.value.code == INTERRUPTED
    out, err = capsys.readouterr()
    assert out == ""
    assert "Interrupted: 2 of 3 rows are judged and kept in sdpa-claims.json" in err
    assert max(map(len, err.splitlines())) <= 80
    expected = claims.ledger(QUICK, seed=3)
    with monkeypatch.context() as patch:
        judged = interrupted(patch, None)
        main(command)
    assert judged == [QUICK[2]]
    found = json.loads(capsys.readouterr().out)
    wanted = json.loads(json.dumps(plain(expected)))
    assert [row | {"seconds": None} for row in found] == wanted
    assert not (tmp_path / ledger.KEPT).exists()
    saved = {path.stem for path in (tmp_path / "draws").glob("*.npz")}
    assert saved == {row.claim.id for row in expected if row.draws}


def test_a_run_of_some_rows_keeps_what_others_left(tmp_path, monkeypatch):
    file = tmp_path / "kept.json"
    with monkeypatch.context() as patch:
        interrupted(patch, 2)
        ledger.run(QUICK, seed=0, times=1.0, kept=file)
    for wanted, remain in (QUICK[:1], True), (QUICK, False):
        with monkeypatch.context() as patch:
            judged = interrupted(patch, None)
            rows, complete = ledger.run(wanted, seed=0, times=1.0, kept=file)
        assert complete
        assert [row.claim.id for row in rows] == list(wanted)
        assert judged == list(QUICK[2 : len(wanted)])
        assert file.exists() == remain


@pytest.mark.parametrize("text", ["", '{"rows": {', "[]", "{}"])
def test_a_file_that_is_cut_off_has_no_rows(text, tmp_path):
    file = tmp_path / "kept.json"
    file.write_text(text, encoding="utf-8")
    rows, complete = ledger.run(QUICK[:1], seed=0, times=1.0, kept=file)
    assert complete
    assert plain(rows) == plain(claims.ledger(QUICK[:1]))


def test_rows_that_cannot_be_kept(tmp_path, monkeypatch):
    interrupted(monkeypatch, 1)
    with pytest.raises(SystemExit, match="python -m sdpa: cannot write "):
        ledger.run(QUICK[:2], seed=0, times=1.0, kept=tmp_path)


def test_rows_of_other_arguments_are_not_taken(tmp_path, monkeypatch):
    file = tmp_path / "kept.json"
    with monkeypatch.context() as patch:
        interrupted(patch, 1)
        rows, complete = ledger.run(QUICK[:2], seed=0, times=1.0, kept=file)
    assert not complete
    assert [row.claim.id for row in rows] == [QUICK[0]]
    with monkeypatch.context() as patch:
        judged = interrupted(patch, None)
        rows, complete = ledger.run(QUICK[:2], seed=1, times=1.0, kept=file)
    assert complete
    assert judged == list(QUICK[:2])
    assert file.exists()
    assert plain(ledger.run(QUICK[:2], seed=0, times=1.0, kept=file)[0]) == plain(
        claims.ledger(QUICK[:2])
    )
    assert not file.exists()


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_claims_fit_the_terminal(width):
    rows = claims.ledger(["maxweight-table", "universal", "overflow-64"])
    text, wide = ledger.text(rows, width), ledger.text(rows, 1000)
    assert max(map(len, text.splitlines())) <= width
    assert text.split() == wide.split()  # no word is broken
    assert not re.search(r"\(n$|\(n =$", text, re.MULTILINE)


def test_claims_ask_the_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "63")
    main(["claims", "--only", "softmax-raw"])
    lines = capsys.readouterr().out.splitlines()
    assert 55 < max(map(len, lines)) <= 63


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_json_is_in_the_letters_that_the_output_has(monkeypatch, encoding):
    data = io.BytesIO()
    with monkeypatch.context() as patch:
        stream = io.TextIOWrapper(data, encoding=encoding, errors="replace")
        patch.setattr(sys, "stdout", stream)
        main(["claims", "--only", "softmax-raw", "--json"])
        stream.flush()
    text = data.getvalue().decode(encoding)
    chinese = claims.claims()["softmax-raw"].claim_zh
    assert json.loads(text)[0]["claim_zh"] == chinese
    assert (chinese in text) == (encoding == "utf-8")


# ---------------------------------------------------------------------- the rest


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"sdpa {sdpa.__version__}\n"


def test_the_screen_names_no_file_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert screen._next(None, 100) == (
        "Next: python -m sdpa claims (all of them) | python -m sdpa lab (one experiment)"
    )
    for language, page in screen.PAGES.items():
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).touch()
        assert page in screen._next(None, 100, language)
