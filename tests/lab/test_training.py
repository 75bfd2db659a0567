"""The laboratory's training: models learn the task, controls hold, runs are reproducible."""

import copy
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("autograd", reason="needs autograd: pip install '.[lab]'")

import autograd.numpy as anp
from autograd import grad
from autograd.test_util import check_grads
from support.helpers import assert_same_bits

import sdpa_lab as lab
from sdpa_lab import corpus, training
from sdpa_lab.tools.estimate import Draws
from sdpa_lab.training import dynamics, experiments, layers, models, optimise, plots, recall

SMALL = recall.Setting(d_k=8, rates=(0.02,), seeds=3, steps=60)


# -------------------------------------------------------------------------------- proof


@pytest.mark.slow
def test_digits_reach_95_percent():
    pytest.importorskip("sklearn")
    result = training.classify_digits()
    assert result.n_test == 449
    assert result.accuracy >= 0.95
    assert all(w.dtype == np.float32 for w in result.parameters.values())


@pytest.mark.slow
def test_characters_beat_the_trigram():
    result = training.model_characters(steps=400)
    assert result.n_test > 50_000
    assert result.bits < result.trigram_bits


@pytest.mark.parametrize("train", [training.classify_digits, training.model_characters])
def test_the_same_bits_twice(train):
    if train is training.classify_digits:
        pytest.importorskip("sklearn")
    first, second, other = (train(seed, steps=3, d_model=16) for seed in (1, 1, 2))
    assert_same_bits(first.losses, second.losses)
    for name, w in first.parameters.items():
        assert_same_bits(w, second.parameters[name], name)
    assert (first.losses != other.losses).all()


def test_nothing_that_is_tested_is_trained_on(monkeypatch):
    """Held-out images and modules have no effect on the parameters."""
    pytest.importorskip("sklearn")
    images, labels = models._patches()
    before = training.classify_digits(steps=3, d_model=16)
    order = models.stream(0, "digits", "split").permutation(len(images))[: before.n_test]
    changed = images.copy()
    changed[order] = 0
    monkeypatch.setattr(models, "_patches", lambda: (changed, labels))
    after = training.classify_digits(steps=3, d_model=16)
    assert_same_bits(before.parameters["in"], after.parameters["in"])
    assert before.accuracy != after.accuracy


# --------------------------------------------------------------------------------- text


def test_docstrings_are_split_by_module(tmp_path, monkeypatch):
    letters = "abcdefghijklmnopqrst"
    for i in range(20):
        source = (
            f'"""Module {i}."""\ntry:\n    def f():\n        """Function {letters[i]}."""\n'
            'except OSError:\n    class C:\n        async def g(self):\n            """Nested."""\n'
        )
        (tmp_path / f"m{i:02}.py").write_text(source, encoding="utf-8")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "t.py").write_text('"""ZZZZZZZZ"""', encoding="utf-8")
    (tmp_path / "broken.py").write_text('"""QQQQ"""\ndef (', encoding="utf-8")
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere.py")
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(corpus, "RARE", 1)
    for seed in range(3):
        found = training.docstrings(seed)
        assert found.modules == (18, 2)
        both = [
            "".join(found.alphabet[i] for i in codes if i) for codes in (found.train, found.test)
        ]
        assert [part.count("Nested.") for part in both] == [18, 2]
        for letter in letters:
            marks = [f"Function {letter}." in part for part in both]
            # A letter that only held-out modules use is a rare character.
            assert marks in ([True, False], [False, letter in found.alphabet])
        assert "ZZ" not in both[0] + both[1]
        assert "QQ" not in both[0] + both[1]


def test_no_sources_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="sources"):
        training.docstrings()


@pytest.mark.parametrize("order", [1, 2, 3])
def test_witten_bell_by_counting(rng, order):
    """The definition, character by character, from dictionaries."""
    train, test = rng.integers(4, size=60), rng.integers(5, size=40)  # 4 is never seen

    def probability(history, x):
        if history is None:
            return 1 / 5
        shorter = history[1:] if history else None
        n = len(history)
        followers = [
            train[i + n] for i in range(len(train) - n) if tuple(train[i : i + n]) == history
        ]
        p = probability(shorter, x)
        if not followers:
            return p
        kinds = len(set(followers))
        return (followers.count(x) + kinds * p) / (len(followers) + kinds)

    p = [probability(tuple(test[i - order + 1 : i]), test[i]) for i in range(order - 1, len(test))]
    expected = -np.log2(p).mean()
    assert training.witten_bell_bits(train, test, 5, order) == pytest.approx(expected, rel=1e-12)


def test_witten_bell_is_a_distribution(rng):
    """Over all next characters the probabilities of one history sum to 1."""
    train, history = rng.integers(4, size=200), [2, 1]
    bits = [training.witten_bell_bits(train, np.array([*history, x]), 6) for x in range(6)]
    assert (2.0 ** -np.array(bits)).sum() == pytest.approx(1, rel=1e-12)


# -------------------------------------------------------------------- layers, optimisers


@pytest.fixture
def autograd_draws_from_the_seed(rng):
    np.random.seed(rng.integers(2**31))  # noqa: NPY002


@pytest.mark.usefixtures("autograd_draws_from_the_seed")
def test_layers_against_differences(rng):
    x, w = rng.standard_normal((2, 3, 4)), rng.standard_normal((4, 5))
    index, target = rng.integers(6, size=(2, 3)), rng.integers(4, size=(2, 3))
    each = rng.standard_normal((4, 4, 5))
    check = {
        "linear": (layers.linear, (0, 1), (x, w)),
        "linear_each": (layers.linear_each, (0, 1), (np.stack([x, x + 1]).reshape(4, 3, 4), each)),
        "linear_each, shared": (layers.linear_each, (0, 1), (x, each)),
        "embed": (lambda t: layers.embed(t, index), 0, (rng.standard_normal((6, 4)),)),
        "relu": (layers.relu, 0, (x,)),
        "cross_entropy": (lambda y: layers.cross_entropy(y, target), 0, (x,)),
        "heads": (lambda y: layers.split_heads(y, 2) ** 2, 0, (x,)),
        "joined": (lambda y: layers.join_heads(y[None]) ** 2, 0, (x,)),
    }
    for f, argnum, arguments in check.values():
        check_grads(f, argnum, modes=["rev"], order=1)(*arguments)
    q, k = rng.standard_normal((2, 3, 4, 5)), rng.standard_normal((2, 3, 6, 5))
    v = rng.standard_normal((2, 5, 1))
    check_grads(recall.additive_scores, (0, 1, 2), modes=["rev"], order=1)(q, k, v)


def test_rms_norm_against_its_formula(rng):
    """Its constant is float32's, so differences in float64 would be too fine for it."""
    x, g = rng.standard_normal((2, 3, 8))
    formula = lambda x: x / anp.sqrt(anp.mean(x**2, axis=-1, keepdims=True) + 1e-5)  # noqa: E731
    np.testing.assert_allclose(layers.rms_norm(x), formula(x), rtol=1e-6)
    ours, theirs = (grad(lambda x, f=f: anp.sum(g * f(x)))(x) for f in (layers.rms_norm, formula))
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_optimisers_against_their_formulas(rng):
    steps = rng.standard_normal((5, 3))
    for kind in ("descent", "adam"):
        parameters = {"w": np.zeros(3)}
        optimiser = optimise.Adam(0.1) if kind == "adam" else optimise.Descent(0.1)
        for g in steps:
            optimiser.step(parameters, {"w": g}, factor=0.5)
        expected, m, s = np.zeros(3), np.zeros(3), np.zeros(3)
        for t, g in enumerate(steps, start=1):
            m, s = 0.9 * m + 0.1 * g, 0.95 * s + 0.05 * g**2
            adam = (m / (1 - 0.9**t)) / (np.sqrt(s / (1 - 0.95**t)) + 1e-8)
            expected -= 0.05 * (adam if kind == "adam" else g)
        np.testing.assert_allclose(parameters["w"], expected, rtol=1e-12)


def test_a_copy_of_adam_goes_on_independently(rng):
    """Its moments belong to its number of steps."""
    first, second, third = rng.standard_normal((3, 4))
    adam, parameters = optimise.Adam(0.1), {"w": np.zeros(4)}
    adam.step(parameters, {"w": first})
    twin, kept = copy.copy(adam), {"w": parameters["w"].copy()}
    adam.step(parameters, {"w": second})
    twin.step(kept, {"w": third})
    alone, expected = optimise.Adam(0.1), {"w": np.zeros(4)}
    for g in (first, third):
        alone.step(expected, {"w": g})
    np.testing.assert_array_equal(kept["w"], expected["w"])


# -------------------------------------------------------------------------------- recall


@pytest.mark.parametrize("mechanism", recall.MECHANISMS)
def test_every_mechanism_learns(mechanism):
    rule = "1" if mechanism == "additive" else "sqrt d_k"
    trained = recall.train(replace(SMALL, mechanism=mechanism, rule=rule))
    start = recall.Trained(trained.setting, 0)
    assert (trained.test_loss() < 0.6 * start.test_loss()).all()
    assert abs(start.test_loss().mean() - recall.CHANCE) < 0.5


def test_runs_do_not_affect_each_other():
    """A model trained with others equals the one trained alone, up to the order of sums."""
    many = recall.train(replace(SMALL, rates=(0.01, 0.02), seeds=3, steps=5))
    one = recall.train(replace(SMALL, rates=(0.02,), seeds=2, steps=5))
    for name, w in one.parameters.items():
        among = many.parameters[name].reshape(2, 3, *w.shape[1:])[1, :2]
        np.testing.assert_allclose(among.reshape(w.shape), w, rtol=1e-4, atol=1e-6)


def test_gradients_of_the_whole_model():
    """In float64, by differences along a random direction."""
    models_ = recall.Trained(replace(SMALL, rule="learned"), 0)
    batch = next(models_.batches("test", 2))
    p = {name: w.astype(np.float64) for name, w in models_.parameters.items()}
    batch = batch._replace(x=batch.x.astype(np.float64), y=batch.y.astype(np.float64))
    check_grads(lambda p: models_.losses(p, batch), modes=["rev"], order=1)(p)


@pytest.mark.parametrize("optimiser", ["adam", "descent"])
def test_a_compensated_fold_is_the_same_trajectory(optimiser):
    """The control: scale in the kernel, or in W^Q with its learning rate times c (c^2)."""
    rate = 0.02 if optimiser == "adam" else 1.0
    base = replace(SMALL, d_k=16, optimiser=optimiser, rates=(rate,), steps=20)
    kernel, folded, initial = (
        recall.train(replace(base, fold=fold)) for fold in ("none", "compensated", "initial")
    )
    scale = recall.RULES["sqrt d_k"](16)
    # float32 roundings accumulated over 20 steps; Adam divides by small gradients.
    np.testing.assert_allclose(
        folded.parameters["W^Q"], scale * kernel.parameters["W^Q"], atol=2e-3
    )
    np.testing.assert_allclose(folded.test_loss(), kernel.test_loss(), atol=5e-3)
    assert np.abs(initial.parameters["W^Q"] - folded.parameters["W^Q"]).max() > 0.02
    assert np.abs(initial.test_loss() - kernel.test_loss()).max() > 0.05


def test_scores_are_those_of_the_model(rng):
    for mechanism in recall.MECHANISMS:
        models_ = recall.Trained(replace(SMALL, mechanism=mechanism), 0)
        scores = models_.scores()
        batch = next(models_.batches("scores", 16))
        query, key, value = models_.project(models_.parameters, batch)
        out = models_.attend(models_.parameters, query, key, value, None)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(p[0] @ value, out, atol=1e-5)


def test_the_answer_is_at_the_answer():
    models_ = recall.Trained(replace(SMALL, symmetric=True), 0)
    batch = next(models_.batches("test", 4))
    at = batch.answer[..., 0][..., None]
    asked = np.take_along_axis(batch.x * np.float32(2**0.5), at, axis=-2)
    # A key without its symbol is its class.
    rest = asked - batch.y
    which = np.arange(3)[:, None, None]
    np.testing.assert_allclose(rest, models_.class_vectors[which, batch.target], atol=1e-5)


def test_more_steps_continue_fewer():
    """One run serves all horizons: the same bits as a run of its own, in any order."""
    long, short = (replace(SMALL, steps=steps) for steps in (20, 5))
    first = recall.trained(short, 7)
    kept = first.parameters["W^Q"].copy()
    for setting in (long, short, replace(SMALL, steps=12)):
        again, alone = recall.trained(setting, 7), recall.train(setting, seed=7)
        assert again.setting == setting
        for name, w in alone.parameters.items():
            assert_same_bits(again.parameters[name], w, name)
    assert_same_bits(first.parameters["W^Q"], kept)


def test_entries_that_models_share_are_those_of_every_such_model(rng):
    x, w = rng.standard_normal((2, 3, 5, 4)), rng.standard_normal((6, 4, 7))
    expected = [x[i % 2] @ w[i] for i in range(6)]
    np.testing.assert_allclose(layers.linear_each(x, w), expected, rtol=1e-12)


def test_more_seeds_keep_the_models_of_fewer(monkeypatch):
    """Blocks of seeds are trained once and go on, and give the bits of a run of all together."""
    started = []

    class Noted(recall.Run):
        def __init__(self, setting, seed, first=0):
            started.append((first, setting.seeds))
            super().__init__(setting, seed, first)

    several = replace(SMALL, rates=(0.01, 0.02))
    monkeypatch.setattr(recall, "BLOCK", 2 * 2 * recall.TOKENS * (2 * several.d_k + several.d_v))
    monkeypatch.setattr(recall, "Run", Noted)
    for seeds, steps, new in (
        (2, 5, [(0, 2)]),
        (5, 5, [(2, 2), (4, 1)]),
        (5, 8, []),
        (6, 8, [(4, 2)]),
        (4, 5, []),
    ):
        started.clear()
        setting = replace(several, seeds=seeds, steps=steps)
        found = recall.trained(setting, 11)
        assert started == new
        together = recall.train(setting, seed=11)
        assert found.setting == setting
        for name, w in together.parameters.items():
            assert_same_bits(found.parameters[name], w, name)
        assert_same_bits(found.test_loss(), together.test_loss())


def test_models_that_have_solved_the_task_are_kept(monkeypatch):
    found = recall.compare_at((20, 60, 80), SMALL)
    assert list(found) == [20, 60, 80]
    assert (found[80] < found[20]).all()
    assert_same_bits(found[60], recall.compare(replace(SMALL, steps=60)))
    between = (found[20].mean() + found[60].mean()) / 2
    monkeypatch.setattr(recall, "SOLVED", between)
    kept = recall.compare_at((20, 60, 80), SMALL)
    assert_same_bits(kept[80], found[60])


@pytest.mark.parametrize("power", [0.0, 0.5, 1.25])
def test_divisors_of_every_power_are_equal_at_32(power):
    at_32, other = (recall.Setting(d_k=d_k, power=power) for d_k in (32, 128))
    assert at_32.scale == pytest.approx(32**-0.5)
    assert other.scale == pytest.approx(32**-0.5 * 4**-power)


def test_a_softcap_caps_what_the_model_sees(rng):
    models_ = recall.Trained(replace(SMALL, gain=4.0, softcap=2.0), 0)
    batch = next(models_.batches("scores", 16))
    scores = models_.scores()[0]
    assert 1.9 < np.abs(scores).max() <= 2
    query, key, value = models_.project(models_.parameters, batch)
    p = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    out = models_.attend(models_.parameters, query, key, value, None)
    np.testing.assert_allclose(p @ value, out, atol=1e-5)


def test_clipped_models_end_at_the_limit_and_others_stay():
    models_ = recall.Trained(replace(SMALL, gain=3.0), 0)
    batch = next(models_.batches("train", 16))
    before = {name: w.copy() for name, w in models_.parameters.items()}

    def largest():
        query, key, _ = models_.project(models_.parameters, batch)
        return np.abs(models_.setting.scale * query @ key.swapaxes(-1, -2)).max(axis=(1, 2, 3))

    limit = float(np.sort(largest())[:2].mean())  # one model of three is below
    below = largest() < limit
    models_.shrink(batch, limit)
    np.testing.assert_allclose(largest()[~below], limit, rtol=1e-4)
    for name, w in models_.parameters.items():
        assert_same_bits(w[below], before[name][below])
        assert (name in ("W^Q", "W^K")) == (w[~below] != before[name][~below]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": "2"}, "rule: expected one of"),
        ({"mechanism": "dots"}, "mechanism: expected one of"),
        ({"fold": "yes"}, "fold: expected"),
        ({"n": 12}, "n: expected a divisor"),
        ({"mechanism": "additive", "clip": 9.0}, "mechanism: expected one with scores"),
    ],
)
def test_settings_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        recall.Setting(**changes)


# --------------------------------------------------------------------------- experiments

QUICK = {"seeds": 3, "steps": 12}


def cell(table, column, **where):
    found = table.row(**where)[column]
    assert isinstance(found, Draws)
    return found.values


def plotted(table, name):
    """How many panels the experiment's plot has; every one shows points and names its axes."""
    pytest.importorskip("matplotlib")
    axes = plots.PLOTS[name](table).axes
    for panel in axes:
        assert panel.containers
        assert panel.get_ylabel() or panel.get_title()
    assert any(panel.get_xlabel() for panel in axes)
    return len(axes)


def test_scale_rules_table():
    table = experiments.scale_rules([4, 16], rates=(0.01, 0.03), **QUICK)
    # Six rules in the kernel, four of them folded in two ways, at two rates and two d_k.
    assert len(table) == (6 + 4 * 2) * 2 * 2
    assert plotted(table, "scale_rules") == 6
    assert plotted(table.where(d_k=4), "scale_rules") == 3
    chosen = table.where(chosen=1)
    assert len(chosen) == len(table) / 2
    assert (table["loss"] > 0).all()


def test_steps_needed_are_those_at_which_the_loss_is_reached():
    few = {"rates": (0.02, 0.05), "seeds": 3}
    table = experiments.steps_needed((8,), rules=("sqrt d_k",), every=10, most=150, **few)
    assert plotted(table, "steps_needed") == 1
    needed = cell(table, "steps", d_k=8)
    for steps in (10, 20, *needed.astype(int)):
        models_ = recall.train(recall.Setting(d_k=8, steps=int(steps), **few))
        reached = (models_.test_loss() < 0.1 * recall.CHANCE).any(axis=0)
        assert (reached[needed == steps]).all()
        assert not reached[needed > steps].any()


def test_tying_is_compared_after_every_number_of_steps():
    table = experiments.tying((8,), steps=(10, 20), rates=(0.02,), seeds=3)
    assert [(row["tied"], row["steps"]) for row in table.rows] == [
        (0, 10),
        (0, 20),
        (1, 10),
        (1, 20),
    ]
    assert list(table.rows[0]) == ["width", "tied", "steps", "loss"]
    assert plotted(table, "tying") == 1
    setting = recall.Setting(d_k=8, d_v=8, tied=True, rates=(0.02,), seeds=3, steps=20)
    expected = recall.train(setting).test_loss()[0]
    assert_same_bits(cell(table, "loss", tied=1, steps=20), expected)


def test_divisors_are_measured_in_units_of_the_root():
    table = experiments.divisors((16,), rules=("1", "4 sqrt d_k"), rates=(0.02,), steps=(5, 10))
    assert table["ratio"].tolist() == [0.25, 0.25, 4, 4]
    assert plotted(table, "divisors") == 1


def test_other_scale_is_measured_against_its_own():
    table = experiments.other_scale((0.5, 1), rates=(0.02,), d_k=8, **QUICK)
    assert plotted(table, "other_scale") == 1
    assert not cell(table, "increase", rule="1", factor=1).any()
    assert cell(table, "increase", rule="1", factor=0.5).any()


def test_divergence_units_and_control():
    table = dynamics.divergence(every=1, d_k=64, **QUICK)
    for task in dynamics.TASKS:
        start = cell(table, "difference", task=task, step=0)
        if "=" in task.partition(",")[2]:
            assert not start.any()
        else:
            np.testing.assert_allclose(start, 1, atol=0.1)
        # The first step is the whole walk, so control^2 = start^2 + step^2 says how it turned.
        control = cell(table, "control", task=task, step=1)
        assert (control >= start).all()
    assert len(table) == len(dynamics.TASKS) * 13
    assert plotted(table, "divergence") == 5


def test_exponent_is_one_half_before_training():
    table = dynamics.correlation((8, 32, 128), steps=(0, 1), seeds=12)
    assert plotted(table, "correlation") == 2
    assert np.isnan(table["exponent of change"]).tolist() == [True, False]
    exponent = table.row(step=0)["exponent"].estimate(0.999)
    assert exponent.low < 0.5 < exponent.high
    assert exponent.high - exponent.low < 0.2


def test_the_divisor_decides_the_exponent_after_training():
    table = dynamics.trained_exponents((0.5, 1.0), d_k=(8, 64), steps=200, seeds=4, seed=1)
    assert plotted(table, "trained_exponents") == 1
    half, one = table.rows
    assert abs(table["start"] - 0.5).max() < 0.15
    assert half["trained"].estimate().high < one["trained"].estimate().low
    for row in (half, one):
        np.testing.assert_array_equal(row["scaled"].values, row["trained"].values - row["power"])
        assert row["loss"].estimate().high < 0.5


def test_plot_of_powers():
    pytest.importorskip("matplotlib")
    first = lab.first_step_exponents([8, 16], draws=3)
    trained = dynamics.trained_exponents((0.5, 1.0), d_k=(8, 16), **QUICK)
    assert [len(axes.containers) for axes in training.plot_powers(first, trained).axes] == [3, 2]


def test_paths_sum_to_the_gradient():
    models_ = recall.Trained(replace(SMALL, tied=True), 0)
    batch = next(models_.batches("paths", 4))
    by_key, by_value = dynamics.path_gradients(models_, batch)
    _, gradients = models_.gradients(batch)
    np.testing.assert_allclose(by_key + by_value, gradients["W^K"], atol=1e-5)
    assert np.abs(by_key).max() > 1e-3
    assert np.abs(by_value).max() > 1e-3


def test_remaining_experiments_return_what_they_say():
    columns = {
        "mechanisms": ["d_k", "mechanism", "rule", "rate", "loss"],
        "lengths": ["n", "rule", "rate", "loss"],
        "trained_scores": ["d_k", "rule", "before", "after", "within row"],
    }
    for name, expected in columns.items():
        table = getattr(experiments, name)(rates=(0.02,), **QUICK)
        assert list(table.rows[0]) == expected
        assert len(table) >= 2
        assert plotted(table, name) == 1
    curves = dynamics.curves(8, rules=("sqrt d_k",), every=6, seeds=3, steps=13)
    assert plotted(curves, "curves") == 3
    losses = [cell(curves, "loss", step=step).mean() for step in (0, 12)]
    assert losses[1] < losses[0]
    saturated = experiments.saturation((1, 8), rates=(0.02,), **QUICK)
    assert plotted(saturated, "saturation") == 2
    weights = [cell(saturated, "max weight", gain=gain).mean() for gain in (1, 8)]
    assert weights[1] > 0.9 > weights[0]
    tied = dynamics.tied_paths(every=6, d_k=16, d_v=16, **QUICK)
    assert plotted(tied, "tied_paths") == 2
    assert (np.abs(tied["cosine"]) <= 1).all()


def test_start_and_gradients_of_one_layer():
    table = experiments.start_symmetry((16,), draws=60)
    assert plotted(table, "start_symmetry") == 3
    start = table.rows[0]
    assert start["mean entry"].estimate(0.999).low < 0 < start["mean entry"].estimate(0.999).high
    table = experiments.gradients_differ((8,), draws=60)
    assert plotted(table, "gradients_differ") == 2
    both = table.rows[0]
    assert both["distance"].estimate(0.999).low > 0.5


@pytest.mark.parametrize("name", ["digits", "characters"])
def test_example_scripts_run(name, monkeypatch, capsys):
    if name == "digits":
        pytest.importorskip("sklearn")
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), "--steps", "2"])
    runpy.run_path(str(path))
    assert "held out" in capsys.readouterr().out.replace("\n", " ")
