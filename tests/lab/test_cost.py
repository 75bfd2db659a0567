"""The time of additive and of dot-product attention: what is timed, and how it is fitted."""

import numpy as np
import pytest

import sdpa
import sdpa_lab as lab
from sdpa_lab import claims
from sdpa_lab.experiments.cost import LEADING, each_pair, numpy_additive
from sdpa_lab.tools.estimate import Draws


@pytest.fixture
def power_law():
    """1e-9 n^2 d^1.5 s for one kind and ten times that for another, with a factor per turn."""
    turns = np.array([1.0, 1.2, 0.9, 1.1, 1.0])
    rows = [
        {"kind": kind, "axis": axis, "n": n, "d": d, "seconds": Draws(t * turns * n**2 * d**1.5)}
        for kind, t in (("dot", 1e-9), ("additive", 1e-8))
        for axis, n, d in (("n", 64, 8), ("n", 256, 8), ("d", 64, 4), ("d", 64, 16), ("d", 64, 64))
    ]
    return lab.Table("", rows)


def test_exponents_of_a_power_law(power_law):
    table = lab.cost_exponents(power_law)
    assert [(row["kind"], row["axis"]) for row in table.rows] == [
        *(("dot", "n"), ("dot", "d"), ("additive", "n"), ("additive", "d"))
    ]
    for row in table.rows:
        expected = {"n": 2.0, "d": 1.5}[row["axis"]]
        np.testing.assert_allclose(row["exponent"].values, expected, rtol=1e-12)
        assert row["exponent"].predicted == {"n": 2, "d": 1}[row["axis"]]


def test_ratio_is_taken_turn_by_turn(power_law):
    for row in lab.cost_ratio(power_law).rows:
        np.testing.assert_allclose(row["ratio"].values, 10, rtol=1e-12)


def test_every_kind_is_timed():
    table = lab.cost(LEADING, lengths=[16, 32], widths=[4, 8, 16], n=8, d=4, turns=3)
    assert list(dict.fromkeys(table["kind"])) == list(LEADING)
    for kind in LEADING:
        part = table.where(kind=kind)
        assert list(zip(part["n"], part["d"], strict=True)) == [
            *((16, 4), (32, 4), (8, 4), (8, 8), (8, 16))
        ]
    assert (table["seconds"] > 0).all()
    assert all(len(row["seconds"].values) == 3 for row in table.rows)
    panels = lab.plot_cost(table).axes
    assert [len(axes.get_lines()) >= len(LEADING) for axes in panels] == [True, True]


def test_a_longer_sequence_takes_more_time():
    (exponent,) = lab.cost_exponents(lab.cost(["dot"], [128, 1024], [], turns=5))["exponent"]
    assert 1 < exponent < 3


@pytest.mark.parametrize("function", [numpy_additive, each_pair])
def test_kinds_compute_the_same(rng, function):
    query, key, value = rng.standard_normal((3, 20, 8))
    weights = rng.standard_normal((8, 8)), rng.standard_normal((8, 8)), rng.standard_normal(8)
    np.testing.assert_allclose(
        function(query, key, value, *weights),
        sdpa.additive_attention(query, key, value, *weights),
        rtol=1e-12,
    )


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match=r"kinds: expected some of \['dot', .* got 'cosine'"):
        lab.cost(["cosine"])


@pytest.mark.parametrize(
    "name", ["additive-time", "dot-time", "additive-memory", "additive-speed", "additive-kernels"]
)
def test_rows_of_the_ledger_measure_what_they_judge(name):
    claim = claims.claims()[name]
    measured = claim.experiment(0, 0.1)
    assert {expect.figure for expect in claim.expect} <= set(measured)


def test_the_memory_of_the_formula_grows_with_the_width():
    measured = claims.claims()["additive-memory"].experiment(0, 1.0)
    memory = measured["additive in NumPy, exponent in d of the memory"]
    assert memory.value == pytest.approx(1, abs=0.1)
