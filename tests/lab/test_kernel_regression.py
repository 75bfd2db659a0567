"""The laboratory's kernel sums: means are those of the kernel, errors those of the law."""

import numpy as np
import pytest

import sdpa_lab as lab


def test_means_are_weighted_by_the_kernel():
    table = lab.kernel_smoothing([0.1, 2.0], n=50)
    x, value = table["x"], table["value"]
    assert (np.diff(x) > 0).all()
    for h in (0.1, 2.0):
        weights = np.exp(-((x[:, None] - x) ** 2) / (2 * h**2))
        expected = weights @ value / weights.sum(axis=1)
        # Points within 30 bandwidths of their mean: 2^-53 30^2 is 1e-13.
        np.testing.assert_allclose(table[f"h = {h:g}"], expected, rtol=0, atol=1e-12)
    assert (lab.kernel_smoothing([2.0], n=50)["h = 2"] == table["h = 2"]).all()
    assert (lab.kernel_smoothing([2.0], n=50, seed=1)["h = 2"] != table["h = 2"]).all()


def test_errors_grow_with_the_square_of_the_distance():
    table = lab.kernel_rounding([10, 100, 1000, 100000], draws=10)
    assert list(table["dtype"]) == ["float32"] * 4 + ["float64"] * 4
    ratio = table["density"] / table["density_predicted"]
    assert ((ratio > 0.5) & (ratio < 5)).all(), ratio
    np.testing.assert_allclose(
        table["density_predicted"][4:], 2.0**-53 * table["distance"][4:] ** 2
    )
    near = table.where(distance=(10, 100))
    assert (near["smoothing"] < near["density"]).all()
    # A mean of values of standard deviation 1, wrong by more than that.
    assert table.row(dtype="float32", distance=100000)["smoothing"].estimate().value > 1


def test_the_plot_shows_both_tables():
    pytest.importorskip("matplotlib")
    smoothing, rounding = lab.kernel_smoothing(n=30), lab.kernel_rounding([10, 100], draws=3)
    curves, errors = lab.plot_kernel_regression(smoothing, rounding).axes
    names = ["x", "h = 0.02", "h = 0.15", "h = 1"]
    assert [line.get_label() for line in curves.lines] == ["points", *names[1:]]
    for line, name in zip(curves.lines, ["value", *names[1:]], strict=True):
        np.testing.assert_array_equal(line.get_ydata(), smoothing[name])
    for name in names[1:]:
        assert name in lab.plot_kernel_smoothing(smoothing).axes[0].get_legend_handles_labels()[1]
    many = lab.kernel_smoothing(range(1, 9), n=9)
    assert len(lab.plot_kernel_smoothing(many).axes[0].lines) == 9
    (alone,) = lab.plot_kernel_rounding(rounding).axes
    assert [len(line.get_ydata()) for line in alone.lines] == [
        len(line.get_ydata()) for line in errors.lines
    ]
    drawn = [line.get_ydata() for line in errors.lines if len(line.get_ydata()) == 2]
    for dtype in ("float32", "float64"):
        part = rounding.where(dtype=dtype)
        for column in ("density", "density_predicted"):
            assert any((values == part[column]).all() for values in drawn), (dtype, column)
