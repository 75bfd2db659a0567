"""What the scale does to deep stacks, and to the stability of training."""

import numpy as np
import pytest

pytest.importorskip("autograd", reason="needs autograd: pip install '.[lab]'")

import sdpa
import sdpa_lab as lab
from sdpa_lab.experiments import depth
from sdpa_lab.tools.inputs import stream
from sdpa_lab.tools.table import Table
from sdpa_lab.training import plots, recall, stability

FEW = {"seeds": 3, "rates": (1e-2, 3e-1)}
LEVEL = 1 - 1e-6


# ------------------------------------------------------------------------------- depth


@pytest.mark.parametrize(
    ("name", "table", "slack"),
    [
        ("std", lambda: lab.output_scale(n=[16, 256, 1024], sigma=[0.0, 1.0, 8.0], seed=1), 0.0),
        # The law is the first term of an expansion: its relative error is about sigma^2 r^2.
        ("after", lambda: lab.rank_step([1 / 64, 1 / 128, 1 / 256], draws=200, seed=1), 0.03),
    ],
)
def test_laws(name, table, slack):
    table = table()
    table = Table(table.title, table.rows, level=LEVEL)
    low, high, law = (table[f"{name}_{end}"] for end in ("low", "high", "predicted"))
    assert (low <= law * (1 + slack)).all()
    assert (law * (1 - slack) <= high).all()
    assert ((high - low) < 0.3 * law).all()  # narrow enough to tell


def test_a_layer_is_attention_over_projected_tokens():
    x = stream(0, "tokens").standard_normal((2, 5, depth.D_MODEL))
    got = depth._layer(x, 0.5, stream(0, "layer"))
    rng = stream(0, "layer")
    shape = (2, depth.D_MODEL, depth.D_MODEL)
    w_q, w_k, w_v = (rng.standard_normal(shape) / 8 for _ in range(3))
    p = np.exp(0.5 * (x @ w_q) @ (x @ w_k).swapaxes(1, 2))
    p /= p.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(got, p @ (x @ w_v), rtol=1e-9, atol=1e-12)


def test_residual_is_0_at_rank_one_and_near_1_for_random_tokens():
    one = np.tile(np.arange(1.0, 5), (1, 3, 1))
    assert depth._residual(one) == 0
    many = stream(0, "residual").standard_normal((20, 400, 8))
    np.testing.assert_allclose(depth._residual(many), 1, atol=0.02)


def test_attention_alone_collapses_sooner_with_the_scale_and_skips_prevent_it():
    table = lab.rank_collapse(4, draws=20, seed=2)

    def left(stack, scale):
        return table.row(stack=stack, scale=scale, layer=4)["residual"].estimate()

    assert left("attention alone", "1/sqrt(d_k)").high < 1e-12
    assert left("attention alone", "1").low > 0.3
    assert left("attention of normalised tokens", "1/sqrt(d_k)").high < 1e-3
    for scale in depth.SCALES:
        assert left("with skip connections", scale).low > 0.8


def test_plots_of_depth():
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[lab]'")
    output, collapse = lab.output_scale(n=[16, 64], draws=9), lab.rank_collapse(2, draws=5)
    for figure, panels in (
        (lab.plot_output_scale(output), 1),
        (lab.plot_rank_collapse(collapse), 3),
        (lab.plot_rank_step(lab.rank_step(draws=5)), 1),
        (lab.plot_depth(output, collapse), 3),
    ):
        assert len(figure.axes) == panels
        assert all(axes.containers and axes.get_xlabel() for axes in figure.axes)


# --------------------------------------------------------------------------- stability


def test_sensitivity_by_hand():
    table = stability.sensitivity((30,), variants=("1/sqrt(d_k)",), d_k=8, **FEW)
    setting = recall.Setting(d_k=8, rule="sqrt d_k", steps=30, **FEW)
    models = recall.trained(setting, 0)
    losses, start = models.test_loss(), recall.Trained(setting, 0).test_loss()[0]
    best = losses[models.best()]
    (row,) = table.rows
    expected = [
        np.mean([min(loss, first) - least for loss in column])
        for column, first, least in zip(losses.T, start, best, strict=True)
    ]
    np.testing.assert_allclose(row["sensitivity"].values, expected, rtol=1e-12)
    assert (row["highest"].values == -2).all()  # 0.3 is too much
    assert (row["window"].values == np.log10(30)).all()


def test_every_rate_has_a_row_and_too_large_a_rate_is_worse_than_guessing():
    table = stability.learning_rates((30,), d_k=8, **FEW)
    assert list(table["rate"]) == [1e-2, 3e-1] * 2
    assert (table.where(rate=3e-1)["worse"] == 1).all()
    assert (table.where(rate=1e-2, variant="1/sqrt(d_k)")["worse"] == 0).all()


@pytest.mark.parametrize("variant", stability.VARIANTS)
def test_every_variant_is_swept_at_every_horizon(variant):
    table = stability.sensitivity((60, 50), variants=(variant,), d_k=8, **FEW)
    assert [row["steps"] for row in table.rows] == [60, 50]
    setting = recall.Setting(d_k=8, steps=60, **stability.VARIANTS[variant], **FEW)
    models = recall.train(setting)
    best = models.test_loss()[models.best()]
    np.testing.assert_array_equal(table.rows[0]["best"].values, best)


@pytest.mark.parametrize("norm", [0.5, 2.0, 6.0])
def test_no_row_of_a_norm_has_less_entropy_than_the_floor(norm):
    def entropy(rows):
        rows = rows - rows.mean(axis=-1, keepdims=True)
        p = sdpa.softmax(norm * rows / np.linalg.norm(rows, axis=-1, keepdims=True))
        return -(p * np.log(p)).sum(axis=-1)

    floor = stability.entropy_floor(norm, 5)
    assert (entropy(stream(0, "floor").standard_normal((10_000, 5))) >= floor).all()
    np.testing.assert_allclose(entropy(np.eye(5)[:1]), floor, rtol=1e-9)


def test_entropy_collapses_at_too_large_a_rate_with_and_without_the_scale():
    table = stability.entropy_collapse(16, every=30, steps=61, **FEW)
    assert list(dict.fromkeys(table["step"])) == [0, 30, 60]
    assert (table["entropy"] >= table["floor"]).all()
    end = table.where(step=60, rate=3e-1)
    assert (end["entropy"] < 0.1).all()
    assert (end["found"] < 0.2).all()
    good = table.row(step=60, rate=1e-2, rule="sqrt d_k")
    assert good["found"].estimate().low > 0.5
    # The largest singular value of a matrix bounds its action on any vector.
    models = recall.Trained(recall.Setting(d_k=16, rule="1", steps=61, **FEW), 0)
    w = models.parameters["W^Q"] @ models.parameters["W^K"].swapaxes(1, 2)
    action = np.linalg.norm(w @ np.ones(32), axis=-1).reshape(models.shape)
    spectral = table.row(step=0, rate=1e-2, rule="1")["spectral"].values
    assert (action[0] / 32**0.5 <= spectral * (1 + 1e-6)).all()


def test_plots_of_stability():
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[lab]'")
    rates = stability.learning_rates((6, 12), d_k=8, **FEW)
    collapse = stability.entropy_collapse(8, steps=11, **FEW)
    for figure, panels in (
        (plots.plot_learning_rates(rates), 2),
        (plots.plot_entropy_collapse(collapse), 3),
        (plots.plot_stability(rates, collapse), 3),
    ):
        assert len(figure.axes) == panels
        assert all(axes.containers and axes.get_xlabel() for axes in figure.axes)
