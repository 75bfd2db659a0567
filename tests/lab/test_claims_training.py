"""The rows on training: what they measure is what they judge and what their sentences speak of."""

from dataclasses import replace
from string import Formatter

import numpy as np
import pytest

pytest.importorskip("autograd", reason="needs autograd: pip install '.[lab]'")

from sdpa_lab.claims import convergence, longer, projections, stability
from sdpa_lab.claims.record import HORIZONS
from sdpa_lab.tools.estimate import Draws
from sdpa_lab.training import recall

ROWS = {
    row.id: row
    for module in (convergence, longer, projections, stability)
    for row in module.CLAIMS
    if row.experiment.__name__ not in ("init_symmetric", "grads_differ", "symmetric_share")
}
WATCHED = ("divergence", "feedback", "tied-conflict", "trained-power")
"""Those that look at every step, so that their runs cannot be shortened here."""

SWEPT = ("unstable-training", "qk-norm", "softcap", "qk-clip")
"""Those that need a rate which has learned something."""


@pytest.fixture
def short(monkeypatch):
    """A fiftieth of the steps, and nothing is solved by then."""
    trained = recall.trained

    def few(setting, seed):
        return trained(replace(setting, steps=setting.steps // 50), seed)

    monkeypatch.setattr(recall, "trained", few)
    for module in ("stability", "experiments"):
        monkeypatch.setattr(f"sdpa_lab.training.{module}.trained", few)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in WATCHED else name
        for name in ROWS
        if name not in SWEPT
    ],
)
def test_sentences_speak_of_figures_that_are_measured(name):
    row = ROWS[name]
    measured = row.experiment(0, 0.2)
    assert {expect.figure for expect in row.expect} <= set(measured)
    for text in (row.holds, row.law, row.depends):
        assert {field for _, field, _, _ in Formatter().parse(text) if field} <= set(measured)
    for figure in measured.values():
        assert isinstance(figure, Draws)
        assert len(figure.values) >= 3


def test_rows_with_horizons_have_a_figure_at_each():
    for row in ROWS.values():
        horizons = {expect.horizon for expect in row.expect} - {None}
        usual = longer.HORIZONS if row in longer.CLAIMS else HORIZONS
        assert not horizons or set(usual) <= horizons, row.id
        for expect in row.expect:
            if expect.horizon is not None:
                assert f"{expect.horizon} steps" in expect.figure


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEPT)
def test_sentences_on_the_learning_rate(name, monkeypatch):
    monkeypatch.setattr(stability, "HORIZONS", (60, 150))
    with np.errstate(invalid="ignore"):  # so few draws leave losses infinite on both sides
        measured = ROWS[name].experiment(0, 0.2)
    for text in (ROWS[name].holds, ROWS[name].law, ROWS[name].depends):
        for _, field, _, _ in Formatter().parse(text):
            if field and field.endswith(", 150 steps"):
                assert field in measured


def test_sentences_on_pretrained_heads_speak_of_figures_that_are_measured():
    """Those of models that are not installed have no verdict."""
    (row,) = (row for row in projections.CLAIMS if row.id == "symmetric-share")
    measured = row.experiment(0, 0.2)
    names = {field for text in (row.holds, row.law) for _, field, _, _ in Formatter().parse(text)}
    for part, name in zip(row.trained, projections.PRETRAINED, strict=True):
        expected = {field for _, field, _, _ in Formatter().parse(part.finding)}
        expected |= {expect.figure for expect in part.expect}
        if any(figure.startswith(name) for figure in measured):
            names |= expected
        else:
            assert not expected & set(measured)
    assert names - {None} <= set(measured)
