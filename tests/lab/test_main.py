"""`python -m sdpa`: what its tables show on any machine, its output, the options it refuses."""

import json
import math
import os
import re
import subprocess
import sys
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

import sdpa
import sdpa_lab as lab
from sdpa.__main__ import main
from sdpa_lab import claims
from sdpa_lab.report import screen
from sdpa_lab.tools import estimate, wrap

DRAWS = 400

# All checks of intervals below together, some hundreds, should fail once in 10^4 seeds: each at
# most once in 10^7, which is 5.3 standard errors of a normal distribution.
Z = 5.3


def covers(figure, truth):
    """Whether `truth` lies within Z standard errors."""
    below, above = figure.value - figure.low, figure.high - figure.value
    return -Z * below <= (truth - figure.value) * estimate.Z <= Z * above


@pytest.fixture(scope="module")
def random_rows():
    return lab.scale_effect(lab.normal(DRAWS))


@pytest.fixture(scope="module")
def digits_rows():
    pytest.importorskip("sklearn")
    return lab.scale_effect(lab.digits(DRAWS))


@pytest.fixture(params=["random", "digits"])
def rows(request):
    return request.getfixturevalue(f"{request.param}_rows")


# ---------------------------------------------------------------------- facts


def test_rows_come_in_the_order_of_the_table(rows):
    assert [(row.projection, row.d_k, row.scale) for row in rows] == [
        (projection, d_k, scale)
        for projection in ("1/d_model", "glorot")
        for d_k in (16, 64, 256)
        for scale in (d_k**-0.5, 1.0)
    ]


def test_scaled_scores_of_random_inputs_have_variance_one(random_rows):
    for row in random_rows:
        if row.projection == "1/d_model":
            truth = row.d_k * row.scale**2
            assert row.iid_variance == pytest.approx(truth)
            # x_i takes part in q_i and in k_i: E |x|^4 = d_model^2 + 2 d_model.
            assert covers(row.total_variance, truth * (1 + 2 / (8 * 64)))
            assert row.total_variance.high - row.total_variance.low < 0.2 * truth


def test_glorot_multiplies_the_variance_by_its_factor(random_rows):
    for row in random_rows:
        if row.projection == "glorot":
            factor = (2 * 64 / (64 + row.d_k)) ** 2
            assert row.iid_variance == pytest.approx(factor * row.d_k * row.scale**2)
            assert covers(row.total_variance, row.iid_variance * (1 + 2 / (8 * 64)))


@pytest.mark.parametrize(
    "name",
    ["total_variance", "row_variance", "rms_grad_query", "rms_grad_key", "rms_grad_value"],
)
def test_predictions_hold(rows, name):
    for row in rows:
        figure = getattr(row, name)
        assert covers(figure, figure.predicted), (row.projection, row.d_k, row.scale, figure)


def test_digits_share_part_of_their_scores(digits_rows):
    """Neighbouring pixel rows and positions are alike, so much of the variance is between rows."""
    for row in digits_rows:
        assert row.row_variance.high < row.total_variance.low


def test_without_the_scale_weights_saturate_as_d_k_grows(rows):
    rows = [row for row in rows if row.projection == "1/d_model"]
    unscaled = [row for row in rows if row.scale == 1]
    for narrow, wide in pairwise(unscaled):
        assert wide.entropy.high < narrow.entropy.low
        assert wide.max_weight.low > narrow.max_weight.high
        assert wide.saturated.low > narrow.saturated.high
        assert wide.dead_grad_query.low > narrow.dead_grad_query.high
    narrow, _, wide = (row for row in rows if row.scale != 1)
    assert wide.entropy.low < narrow.entropy.high
    assert narrow.entropy.low < wide.entropy.high
    assert wide.saturated.value < 0.01


def test_bounds(rows):
    for row in rows:
        assert 0 <= row.entropy.value <= math.log(8)
        assert 1 / 8 <= row.max_weight.value <= 1
        for name, figure in row._asdict().items():
            if isinstance(figure, lab.Estimate):
                assert figure.low <= figure.value <= figure.high, name
                assert figure.n == DRAWS
            if name == "saturated" or name.startswith("dead"):
                assert figure.low >= 0
                assert 0 < figure.high <= 1


def test_without_a_row_of_weights_above_099_nothing_is_saturated():
    """Equal rows of x give equal scores: weights 1/n, and no gradient to Q."""
    x = np.repeat(lab.normal(30)[:, :1], 8, axis=1)
    for row in lab.scale_effect(x, d_k=[16]):
        assert row.entropy.value == pytest.approx(math.log(8), rel=1e-6)
        assert row.max_weight.value == pytest.approx(1 / 8, rel=1e-6)
        assert row.saturated.value == 0
        assert row.row_variance.value < 1e-9
        assert row.dead_grad_query.value == 1
        assert row.dead_grad_value.value == 0
        # Each row of dL/dV is the mean of 8 rows of g: 64 components of variance 1/8.
        assert covers(row.rms_grad_value, math.sqrt(64 / 8))


def test_the_seed_decides():
    x = lab.normal(60)
    assert lab.scale_effect(x, d_k=[16], seed=1) == lab.scale_effect(x, d_k=[16], seed=1)
    assert lab.scale_effect(x, d_k=[16], seed=1) != lab.scale_effect(x, d_k=[16], seed=2)
    assert (lab.normal(60, seed=1) != x).all()


def test_progress_counts_every_input():
    done = []
    lab.scale_effect(lab.normal(150), d_k=[4, 8], progress=done.append)
    assert sum(done) == 2 * 2 * 150


# ---------------------------------------------------------------------- inputs


def test_digits():
    datasets = pytest.importorskip("sklearn.datasets")
    x = lab.digits()
    assert x.shape == (1797, 8, 64)
    assert x.dtype == np.float32
    assert np.mean(np.square(x, dtype=np.float64)) == pytest.approx(1, abs=1e-6)
    # One linear map plus a constant per row: the difference of two images has rank at most 8.
    assert np.linalg.matrix_rank(np.float64(x[:300] - x[300:600]).reshape(-1, 64), tol=1e-3) == 8
    # No image repeats, so each position has as many different rows as its pixels have values.
    pixels = datasets.load_digits().images
    for row in range(8):
        assert len(np.unique(x[:, row], axis=0)) == len(np.unique(pixels[:, row], axis=0))
    assert (lab.digits(100) == x[:100]).all()
    assert (lab.digits(100, seed=1) != x[:100]).any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lab.digits(0), "draws: expected 1 to 1797 images, got 0"),
        (lambda: lab.digits(1798), "draws: expected 1 to 1797 images, got 1798"),
        (lambda: lab.digits(d_model=63), "d_model: expected an even number, got 63"),
        (lambda: lab.scale_effect(lab.normal(29)), r"x: expected .* got \(29, 8, 64\)"),
        (lambda: lab.scale_effect(lab.normal(30, 1)), r"x: expected .* got \(30, 1, 64\)"),
        (lambda: lab.scale_effect(lab.normal(30)[0]), r"x: expected .* got \(8, 64\)"),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ---------------------------------------------------------------------- intervals


def test_intervals_cover_as_often_as_they_say(rng):
    """Of 2000 intervals, from 100 draws of four dependent rows each, 1900 should cover.

    The binomial law allows that number to be off by 50 once in 10^6 times; that the distribution is
    not quite normal after 100 draws, least of all for squares, costs another 20.
    """
    hits = np.zeros(4)
    for _ in range(2000):
        common = rng.standard_normal((100, 1))
        rows = common + rng.standard_normal((100, 4))
        figures = [
            (estimate.mean(rows.mean(axis=1)), 0),
            (estimate.root_mean((rows**2).mean(axis=1)), math.sqrt(2)),
            (estimate.median(rows), 0),
            (estimate.share((rows > 0).mean(axis=1)), 0.5),
        ]
        hits += [figure.low <= truth <= figure.high for figure, truth in figures]
    assert (hits > 1900 - 70).all(), hits
    assert (hits < 1900 + 70).all(), hits


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_share_of_nothing_or_all_has_an_interval(value):
    figure = estimate.share(np.full(100, value))
    # Wilson's for 0 of 100: z^2 / (n + z^2)
    assert figure.value == value
    assert max(figure.high - value, value - figure.low) == pytest.approx(0.036995, rel=1e-4)
    assert 0 <= figure.low <= figure.high <= 1


# ---------------------------------------------------------------------- speed


def test_speed_compares_the_same_results():
    shapes = [(3, 5, 4), (40, 16)]
    rows = lab.speed(shapes, seconds=0.0)
    directions = ["forward", "backward"]
    assert [row.shape for row in rows] == [shape for shape in shapes for _ in directions]
    assert [row.direction for row in rows] == directions * 2
    for row in rows:
        assert row.turns == 5
        assert row.ratio == row.numpy_seconds / row.sdpa_seconds > 0
        # Results of order 1 with at most 40 terms in a sum.
        assert row.difference < 1e-4
    forward = rows[2]
    assert forward.gflops == pytest.approx(4 * 40 * 40 * 16 / forward.sdpa_seconds / 1e9)


# ---------------------------------------------------------------------- command line


def run(*arguments, code=0, prelude="", **environment):
    """Standard output and error of `python -m sdpa ARGUMENTS`."""
    program = f"{prelude}\nimport runpy\nrunpy.run_module('sdpa', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


WITHOUT_SKLEARN = "import sys; sys.modules['sklearn'] = sys.modules['sklearn.datasets'] = None"
BRIEFLY = """
from functools import partial
import sdpa_lab as lab
lab.speed = partial(lab.speed, seconds=0.0)
"""


@pytest.mark.slow
def test_text():
    pytest.importorskip("sklearn")
    out, err = run("--all", "--draws", "30", "--seed", "7", "--no-report", prelude=BRIEFLY)
    assert err == ""  # no progress bar if stderr is not a terminal
    assert f"kernels {sdpa.show_config('dicts')['isa']} " in out
    assert "seed 7, 30 draws" in out
    for title in ("digits", "random"):
        assert f"\n{title}: scores and weights, 30 inputs\n" in out
        assert f"\n{title}: gradients, 30 inputs\n" in out
    assert "= 2.56, 1, 0.16\n" in out
    assert "(8, 1024, 64)" in out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 100
    table = lines[lines.index("random: scores and weights, 30 inputs") + 3 :]
    assert table[0] == "projections of variance 1/d_model"
    assert [line.split()[:2] for line in table[1:7]] == [
        ["16", "1/4"],
        ["16", "1"],
        ["64", "1/8"],
        ["64", "1"],
        ["256", "1/16"],
        ["256", "1"],
    ]


@pytest.fixture(scope="module")
def screened():
    """What the first screen shows, but for its claims and shapes a small main job."""
    pytest.importorskip("sklearn")
    names = (
        "softmax-scaled",
        "log-saturates",
        "sigma-law",
        "softmax-raw",
        "universal",
        "dv-differs",
    )
    result = {
        "machine": lab.machine(),
        "digits": lab.scale_effect(lab.digits(60)),
        "random": None,
        "first_step": lab.first_step_exponents((16, 64), powers=(0.5, 1.0), draws=4).estimates(),
        "speed": lab.speed([(10, 64), (2, 64, 16)], seconds=0.0),
    }
    return result, claims.ledger(names)


@pytest.mark.parametrize(("columns", "most"), [(200, 45), (100, 45), (60, 75), (40, 95)])
def test_the_first_screen(screened, columns, most):
    """One screen: the table, three sentences, speed, claims with what was found, where next."""
    out = screen.text(*screened, 53, "report.html", columns)
    lines = out.splitlines()
    assert max(map(len, lines)) <= min(columns, 100)
    assert len(lines) <= most
    assert "Why divide by sqrt(d_k)?" in lines
    why = "A score q.k is a sum of d_k products; its spread grows like sqrt(d_k)."
    assert why in (" ".join(out.split()) if columns < 75 else lines)
    sixteen = " ".join(line for line in lines if line.split()[:1] == ["16"]).replace("16 ", "")
    with_scale, without = np.array(sixteen.replace("%", "").split(), float).reshape(2, 3)
    assert with_scale[0] > 1.8 > 1.3 > without[0]  # entropies
    assert with_scale[2] < without[2]  # medians at d_k = 16
    flat = " ".join(out.split())
    assert "With the scale nothing depends on d_k" in flat
    assert "Gradients do not vanish, they gather" in flat
    assert "Which power of d_k? " in flat
    assert "What to use: 1/sqrt(d_k). " in flat
    assert "Speed against NumPy: " in flat
    assert "6 of 53 judged now: 3 corrected, 3 reproduced." in flat
    assert "“For components of variance sigma^2 the variance of q.k is dim sigma^2.”" in flat
    assert "Next: docs/why.md (the whole answer, ten minutes) | open report.html | " in flat
    if columns > 50:
        assert "python -m sdpa claims (all of them)" in out  # in one line


@pytest.mark.parametrize(("columns", "most"), [(100, 45), (60, 60), (40, 90)])
def test_the_first_screen_in_chinese(screened, columns, most):
    out = screen.text(*screened, 53, "report.html", columns, "zh")
    lines = out.splitlines()
    assert max(map(wrap.width, lines)) <= columns
    assert len(lines) <= most
    assert not [line for line in lines if line.lstrip()[:1] in set("，。；：）")]
    flat = "".join(out.split())
    assert "为什么要除以sqrt(d_k)？" in flat
    assert "标准差随sqrt(d_k)增长" in flat
    assert "除以d_k的几次方？" in flat
    assert "怎么用：除以sqrt(d_k)。" in flat
    assert "梯度没有消失，而是向少数行集中" in flat
    assert "检验6条（共53条）：修正3，复现3。" in flat
    english = screen.text(*screened, 53, "report.html", columns)
    # The same numbers up to the claims, whose findings have their own.
    parts = out.partition("五篇笔记")[0], english.partition("Claims of")[0]
    numbers = [sorted(re.findall(r"\d+\.\d\d", part)) for part in parts]
    assert numbers[0] == numbers[1]
    assert len(numbers[0]) > 15
    for row in screen.surprising(screened[1]):
        found = screen.finding(row, "zh")
        assert found != row.statement
        assert not {"{", "}"} & set(found)
        assert "".join(found.split())[:10] in flat
    if columns > 50:  # else the finding is cut before its end
        assert "0.002、0.015、0.041、0.112、0.829" in flat


def test_the_main_job_prints_the_first_screen(monkeypatch, capsys):
    monkeypatch.setattr(lab, "speed", partial(lab.speed, [(10, 64)], seconds=0.0))
    monkeypatch.setattr(claims, "quick", lambda: ["softmax-scaled"])
    monkeypatch.setenv("COLUMNS", "70")
    for name in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    main(["--draws", "30", "--no-report"])
    out = capsys.readouterr().out
    assert "30 sequences of random numbers" in " ".join(out.split())
    assert f"1 of {len(claims.IDS)} judged now: 1 corrected." in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 70


def test_the_words_of_the_first_screen_follow_the_measurement(random_rows):
    """Rows in the other order: what fell now rises, and the sentences do not say otherwise."""
    rows = [row for row in random_rows if row.projection == "1/d_model"]
    assert "they gather" in " ".join(screen.answer(rows))
    widths = dict(zip((16, 64, 256), (256, 64, 16), strict=True))
    turned = [row._replace(d_k=widths[row.d_k]) for row in rows[::-1]]
    turned = [row for pair in zip(turned[1::2], turned[::2], strict=True) for row in pair]
    assert "they gather" not in " ".join(screen.answer(turned))


@pytest.mark.parametrize("power", [0.0, 0.5])
def test_the_sentence_on_optimisers_follows_the_measurement(power):
    exponents = {"SGD": 1 - 2 * power, "Adam": 0.5 - power}
    rows = [
        {"optimiser": name, "divisor": divisor, "exponent": lab.Estimate(value, value, value, 16)}
        for name, value in exponents.items()
        for divisor in ("sqrt(d_k)", "d_k")
    ]
    said = screen.power(rows, "en")
    assert f"like d_k^{1 - 2 * power:.2f} with 1/sqrt(d_k) under SGD" in said
    assert said.endswith(": each as much at every d_k.") == (power == 0.5)


@pytest.mark.slow
def test_json_without_scikit_learn():
    out, err = run(
        "--json", "--draws", "30", "--no-report", prelude=f"{WITHOUT_SKLEARN}\n{BRIEFLY}"
    )
    assert err == ""
    result = json.loads(out)
    assert result["seed"] == 0
    assert result["draws"] == 30
    steps = [
        (row["optimiser"], row["divisor"], row["exponent"]["n"]) for row in result["first_step"]
    ]
    assert steps == [(o, d, 16) for o in ("SGD", "Adam") for d in ("sqrt(d_k)", "d_k")]
    assert result["machine"]["sdpa"]["isa"] in result["machine"]["sdpa"]["isas_available"]
    assert result["digits"] is None
    assert "pip install scikit-learn" in result["notes"][0]
    expected = lab.scale_effect(lab.normal(30))
    assert len(result["random"]) == len(expected) == 12
    for row, wanted in zip(result["random"], expected, strict=True):
        assert row["d_k"] == wanted.d_k
        assert row["total_variance"] == wanted.total_variance._asdict()
        assert row["median_grad_query"] == wanted.median_grad_query._asdict()
    assert {row["direction"] for row in result["speed"]} == {"forward", "backward"}


@pytest.mark.slow
def test_text_without_scikit_learn_says_how_to_get_it(monkeypatch, capsys):
    for name in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(lab, "speed", partial(lab.speed, [(10, 64)], seconds=0.0))
    main(["--all", "--draws", "30", "--no-report"])
    out = capsys.readouterr().out
    assert "No table of digits" in out
    assert "pip install scikit-learn" in out
    assert "digits: scores" not in out
    assert "random: gradients, 30 inputs" in out


@pytest.mark.slow
def test_a_reader_that_leaves_and_a_terminal_without_plus_minus():
    with subprocess.Popen(
        [sys.executable, "-m", "sdpa", "--all", "--draws", "30", "--no-report"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    ) as process:
        while not (line := process.stdout.readline()).startswith("? is half"):
            assert line, process.stderr.read()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=300) == 1


def test_info():
    out, _ = run("info")
    assert out.startswith(f"sdpa {sdpa.__version__}, kernels ")
    for arguments in (("info", "--json"), ("--json", "info")):
        machine = json.loads(run(*arguments)[0])
        assert machine["numpy"] == np.__version__
        assert machine["sdpa"]["version"] == sdpa.__version__


def test_json_without_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    main(["info", "--json"])


def test_the_environment_chooses_the_kernels():
    out, _ = run("info", "--json", SDPA_ISA="generic")
    assert json.loads(out)["sdpa"]["isa"] == "generic"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--draws", "29"), "--draws: expected at least 30, got 29"),
        (("--seed", "-1"), "--seed: expected at least 0, got -1"),
        (("--draws", "many"), "--draws: "),
        (("everything",), "invalid choice: 'everything'"),
    ],
)
def test_bad_arguments(arguments, message):
    out, err = run(*arguments, code=2)
    assert out == ""
    assert message in err
