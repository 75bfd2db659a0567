"""The experiments on independent inputs: their laws hold, the seed decides, plots can be drawn."""

import re

import numpy as np
import pytest

import sdpa_lab as lab
from sdpa_lab import theory
from sdpa_lab.experiments import depth
from sdpa_lab.experiments.growth import COMPONENTS, INITIALISERS
from sdpa_lab.experiments.overflow import LARGEST

# At this level a figure of a table leaves its interval once in 10^6 seeds, as far as
# a mean of these draws is normal; some hundred figures are checked.
LEVEL = 1 - 1e-6


def check_laws(table, *names):
    """Every figure of these columns agrees with its law."""
    for row in table.rows:
        for name in names:
            found = row[name].estimate(LEVEL)
            assert found.predicted is not None, name
            # A law may be 0 or a tail too thin for these draws; the interval then ends at 0.
            assert found.low <= found.predicted <= found.high, (name, row, found)


@pytest.fixture(scope="module")
def growth():
    return lab.growth([4, 64, 256], [8, 32], draws=400)


@pytest.fixture(scope="module")
def saturation():
    return lab.saturation([16, 256], [10, 64], draws=100)


@pytest.fixture(scope="module")
def gradients():
    return lab.gradients([16, 256], [10, 32], draws=120)


def test_growth(growth):
    check_laws(growth, "mean", "variance", "variance_scaled", "variance_row", "kurtosis", "spread")
    assert list(growth["d_k"]) == [4, 4, 64, 64, 256, 256]


ARGUMENTS = {
    "averaging": {"n": (8, 16), "common": (0.0, 0.5), "draws": 3},
    "best_sigma": {"n": (8, 16), "d_k": (4, 8), "rho": (0.0, 0.5), "sigma": (1, 2, 4), "draws": 3},
    "correlated_growth": {"d_k": (4, 8), "rho": (0.0, 0.5), "rank": (4, 8), "n": (4, 8)},
    "coverage": {"d_k": (4, 8), "n": (4, 8), "draws": 3, "matrices_each": 3},
    "critical": {"n": (8, 16), "families": ("normal", "uniform"), "draws": 3},
    "exponents": {"d_k": (4, 8), "n": (4, 8), "draws": 6, "batches": 2},
    "first_step": {"d_k": (4, 8), "optimisers": ("SGD", "Adam"), "powers": (0.0, 0.5), "draws": 2},
    "freezing": {"sigma": (1, 2), "n": (4, 8), "draws": 3},
    "gradients": {"d_k": (4, 8), "n": (4, 8), "draws": 3},
    "gradients_over_sigma": {
        "n": (8, 16),
        "d_k": (4, 8),
        "rho": (0, 1),
        "sigma": (1, 2),
        "draws": 3,
    },
    "growth": {"d_k": (4, 8), "n": (4, 8), "draws": 3},
    "initialisers": {"d_k": (4, 8), "n": (4, 8), "names": ("Glorot", "Kaiming"), "draws": 3},
    "normality": {"d_k": (4, 8), "n": (4, 8), "draws": 3},
    "output_scale": {"n": (8, 16), "sigma": (0, 1), "common": (0.0, 0.5), "draws": 3},
    "overflow": {"d_k": (4, 8), "n": (4, 8), "draws": 3},
    "saturation": {"d_k": (4, 8), "n": (4, 8), "draws": 3},
    "scale_effect": {"x": np.ones((30, 2, 4), np.float32), "d_k": (4, 8)},
    "scale_over_length": {"n": (8, 16), "rules": ("1/sqrt(d_k)", "ln n"), "draws": 3},
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_argument_may_be_read_once_only(name):
    """An iterator has no values left for the second round of a loop."""
    values, experiment = ARGUMENTS[name], getattr(lab, name)
    once = {
        key: iter(value) if isinstance(value, tuple) else value for key, value in values.items()
    }
    assert str(experiment(**once)) == str(experiment(**values))


@pytest.mark.parametrize(
    ("call", "start"),
    [
        (lambda: lab.initialisers(names=["Glorot", "He"]), "names: expected '1/d_model', 'Glorot'"),
        (lambda: lab.rank_collapse(1, stacks=["alone"]), "stacks: expected 'attention alone', "),
        (lambda: lab.scale_over_length(rules=["n"]), "rules: expected '1/sqrt(d_k)', "),
        (lambda: lab.critical(families=["cauchy"]), "families: expected 'normal', "),
        (lambda: depth.perturbation(1, stack="alone"), "stack: expected 'attention alone', "),
    ],
)
def test_unknown_names_are_refused_beside_those_that_are_known(call, start):
    with pytest.raises(ValueError, match=f"^{re.escape(start)}"):
        call()


def test_kurtosis_and_spread_of_keys_with_a_mean():
    """Of (q.k)^4 / Var(q.k)^2, which the mean of the keys spreads; their products are independent.

    For k = z + 2 the fourth moment is 3 + 6 4 + 16 = 43 and the variance about 0 is 5.
    """
    row = lab.growth([16], [16], mean_key=2.0, draws=400).row(d_k=16)
    law = theory.excess_kurtosis(16, 3.0, 43 / 25)
    found = row["kurtosis"].estimate(LEVEL)
    assert found.low < law < found.high < 1
    assert row["spread"].estimate().value < 0.5


@pytest.mark.parametrize("components", COMPONENTS)
def test_only_mean_and_variance_of_the_components_count(components):
    sampler, m4 = COMPONENTS[components]
    sample = sampler(np.random.default_rng(0), (200_000,))
    assert sample.mean() == pytest.approx(0, abs=0.02)
    assert sample.var() == pytest.approx(1, abs=0.03)
    assert np.mean(sample**4) == pytest.approx(m4, abs=0.15)
    table = lab.growth([16], [16], components=components, draws=400)
    check_laws(table, "variance", "variance_scaled", "kurtosis")


def test_a_row_of_one_has_no_variance():
    assert lab.growth([4], [1], draws=40)["variance_row"][0] == 0


def test_coverage():
    table = lab.coverage([16], [8, 64], draws=150)
    # The law of the entries is that of normal means.
    for row in table.rows:
        assert row["entries"].estimate().value == pytest.approx(row["entries"].predicted, abs=0.06)
        found = row["draws"].estimate(LEVEL)
        assert found.low <= 0.95 <= found.high
    assert table["entries"][1] < 0.75


def test_normality():
    table = lab.normality([2, 16], [32], draws=300)
    check_laws(table, "distance", "beyond_3")
    # x = 0.742 is where the distance is largest for large d_k.
    assert table["kolmogorov"] == pytest.approx(table["distance_predicted"], rel=0.15)
    assert (table["kolmogorov"] >= table["distance_predicted"]).all()


def test_initialisers():
    table = lab.initialisers([16, 64], [16], d_model=64, draws=60)
    check_laws(table, "components", "scores")
    assert set(table["initialiser"]) == set(INITIALISERS)
    assert INITIALISERS["Glorot"](512, 512) == INITIALISERS["1/d_model"](512, 512)
    # Each is drawn by itself: no two have the same error.
    errors = table["scores"] / table["scores_predicted"] - 1
    assert len(set(errors.round(6))) == len(table)
    # A uniform distribution on (-a, a) has variance a^2 / 3.
    assert INITIALISERS["PyTorch Linear"](64, 8) == (64**-0.5) ** 2 / 3
    assert INITIALISERS["PyTorch MultiheadAttention"](64, 8) == 6 / (64 + 3 * 64) / 3


def test_saturation(saturation):
    check_laws(saturation, "entropy", "max_weight", "entropy_share")
    unscaled = saturation.where(scale="unscaled", n=10)
    assert (np.diff(unscaled["entropy"]) < 0).all()
    assert (unscaled["tensor_max"] >= unscaled["max_weight"]).all()
    assert (saturation.where(scale="scaled")["saturated"] == 0).all()


def test_freezing():
    table = lab.freezing([0.5, 4.0], [10, 64], draws=400)
    check_laws(table, "entropy", "max_weight")
    assert table["limit"][0] == theory.entropy_limit(10, 0.5)


def test_gradients(gradients):
    check_laws(gradients, "rms_score", "rms_query", "rms_key", "rms_value")
    scaled, unscaled = (gradients.where(scale=name, n=10) for name in ("scaled", "unscaled"))
    # Root mean square, median and dead rows give three answers.
    assert unscaled["rms_query_low"][1] > unscaled["rms_query_high"][0]
    assert unscaled["median_query_high"][1] < unscaled["median_query_low"][0]
    assert unscaled["dead_query_low"][1] > unscaled["dead_query_high"][0]
    for target in ("score", "query", "key", "value", "weight"):
        assert (scaled[f"dead_{target}"] < 0.01).all()


def test_the_gradient_of_a_projection_is_a_sum_over_rows(gradients):
    """x has independent rows of N(0, 1): E |x^T dQ|^2 is about the width of x times E |dQ|^2."""
    row = gradients.row(scale="scaled", d_k=256, n=32)
    total = 32 * row["rms_query"].estimate().value ** 2  # sum over rows of dQ
    # dL/dQ_i depends on x_i and all keys but weakly, at this width.
    assert row["rms_weight"].estimate().value ** 2 == pytest.approx(total, rel=0.1)


def test_exponents():
    table = lab.exponents([16, 64, 256], [10], draws=320, batches=16)
    scaled, unscaled = table.rows
    assert scaled["scale"] == "scaled"
    assert scaled["rms"].predicted == pytest.approx(0, abs=0.01)
    for row in (scaled, unscaled):
        found = row["rms"].estimate(LEVEL)
        assert found.low <= found.predicted <= found.high
    assert unscaled["typical"].estimate(LEVEL).high < 0 < unscaled["rms"].estimate(LEVEL).low


def test_overflow():
    table = lab.overflow([64, 1024], [10], draws=300)
    check_laws(table.where(dtype="float16"), "plain")
    check_laws(table.where(dtype="float32", d_k=1024), "plain")
    assert (table["shifted"] == 0).all()
    for dtype in ("bfloat16", "float32", "float64"):
        assert table.row(dtype=dtype, d_k=64)["plain"].estimate().value == 0
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for dtype, largest in LARGEST.items():
        assert largest == float(ml_dtypes.finfo(np.dtype(dtype)).max)


def test_the_seed_decides(growth):
    again = lab.growth([4], [8], draws=400)
    assert (again.rows[0]["mean"].values == growth.rows[0]["mean"].values).all()
    other = lab.growth([4], [8], draws=400, seed=1)
    assert (other.rows[0]["mean"].values != growth.rows[0]["mean"].values).all()


@pytest.mark.slow
def test_plots(growth, saturation, gradients):
    style = pytest.importorskip("matplotlib") and lab.style
    tables = {
        "growth": growth,
        "saturation": saturation,
        "gradients": gradients,
        "coverage": lab.coverage([16], [8, 16], draws=10),
        "normality": lab.normality([4, 16], [8, 16], draws=40),
        "initialisers": lab.initialisers([16], [8], d_model=32, draws=20),
        "freezing": lab.freezing([1.0, 2.0], [10], draws=40),
        "overflow": lab.overflow([64, 256], [10], draws=20),
        "exponents": lab.exponents([16, 64], [10, 64], draws=40, batches=4),
    }
    for name, table in tables.items():
        picture = style.svg(getattr(lab, f"plot_{name}")(table))
        assert picture.startswith("<svg"), name
