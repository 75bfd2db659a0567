"""One step of training: the gradients, the change of the scores and the laws of their exponents."""

import numpy as np
import pytest

import sdpa_lab as lab
from sdpa_lab.experiments import first_step
from sdpa_lab.tools.inputs import stream

WIDE = (64, 128, 256, 512)


def test_gradients_by_differences():
    rng = stream(0, "task")
    task = first_step._task(6, rng)
    weights = rng.standard_normal((2, 6, 4))
    gradients = first_step._gradients(task, *weights, 0.5)

    def loss(w_query, w_key):
        x, y, target = task.batches[0]
        scores = 0.5 * (y @ w_query) @ (x @ w_key).swapaxes(1, 2)
        p = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
        logits = p @ x @ task.w_value @ task.w_out
        log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        return -np.take_along_axis(log_p, target[..., None], axis=-1).mean()

    for i in range(2):
        direction = rng.standard_normal((6, 4))
        ends = []
        for sign in (1, -1):
            moved = list(weights)
            moved[i] = moved[i] + sign * 1e-5 * direction
            ends.append(loss(*moved))
        slope = (ends[0] - ends[1]) / 2e-5
        assert (gradients[i] * direction).sum() == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("optimiser", first_step.OPTIMISERS)
def test_the_change_is_that_of_a_small_step(optimiser):
    """Scores before and after a step that is really made."""
    row = lab.first_step([16], optimisers=[optimiser], powers=[0.5], draws=2, seed=3).rows[0]
    for model in range(2):
        task = first_step._task(32, stream(3, "first step", model))
        rng = stream(3, "first step", model, 16)
        weights = rng.standard_normal((2, 32, 16)) / 32**0.5
        gradients = first_step._gradients(task, *weights, 0.25)
        x, y, _ = task.batches[1]
        direction = first_step.OPTIMISERS[optimiser].direction
        w_query, w_key = (w - 1e-6 * direction(g) for w, g in zip(weights, gradients, strict=True))
        after = 0.25 * (y @ w_query) @ (x @ w_key).swapaxes(1, 2)
        before = 0.25 * (y @ weights[0]) @ (x @ weights[1]).swapaxes(1, 2)
        size = np.sqrt(np.mean((after - before) ** 2)) / 1e-6
        assert row["change"].values[model] == pytest.approx(size, rel=1e-4)


@pytest.mark.parametrize("d_model", [16, 32])
def test_each_optimiser_has_its_power(d_model):
    """From d_k = 2 d_model on; without a scale the gradient of SGD loses to saturation."""
    table = lab.first_step_exponents(WIDE, d_model=d_model, draws=12, seed=5)
    assert len(table) == 9
    for row in table.rows:
        found = row["exponent"].estimate()
        slack = 0.45 if (row["optimiser"], row["divisor"]) == ("SGD", "1") else 0.12
        assert abs(found.value - found.predicted) < slack, row
    constant = {
        row["optimiser"]: row["divisor"] for row in table.rows if row["exponent"].predicted == 0
    }
    assert constant == {"SGD": "sqrt(d_k)", "Adam": "d_k", "Muon": "sqrt(d_k)"}


def test_muons_step_has_singular_values_of_one():
    gradient = stream(0, "muon").standard_normal((5, 3))
    step = first_step.OPTIMISERS["Muon"].direction(gradient)
    np.testing.assert_allclose(np.linalg.svd(step)[1], 1)
    assert (step * gradient).sum() > 0


def test_an_unknown_optimiser_is_refused():
    with pytest.raises(
        ValueError, match=r"^optimisers: expected some of \['SGD', 'Adam', 'Muon'\]"
    ):
        lab.first_step(optimisers=["Lion"])


def test_plots_of_the_first_step():
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[lab]'")
    table = lab.first_step([8, 16], draws=3, powers=[0.5, 0.75, 1.0])
    figure = lab.plot_first_step(table)
    assert len(figure.axes) == 3
    assert [len(axes.containers) for axes in figure.axes] == [3, 3, 3]
    (first,) = {bars.lines[0].get_ydata()[0] for bars in figure.axes[0].containers}
    assert first == 1
    assert len(lab.plot_first_step_exponents(lab.first_step_exponents([8, 16], draws=3)).axes) == 1
