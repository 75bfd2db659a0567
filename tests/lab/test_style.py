"""The style of plots: what is drawn is what was measured, files are reproducible."""

import csv
import itertools
import sys
import warnings

import numpy as np
import pytest

import sdpa_lab as lab
from sdpa_lab import style
from sdpa_lab.tools.mathtext import mathematics

pytest.importorskip("matplotlib")


@style.plot
def drawn(table, **options):
    figure, axes = style.subplots()
    style.columns(axes, table, "d_k", "variance", **options)
    style.log_axis(axes, "x", [4, 16])
    return figure


@pytest.fixture
def table(rng):
    def row(d_k, predicted):
        return {"d_k": d_k, "variance": lab.Draws(rng.normal(d_k, 1.0, 50), predicted=predicted)}

    return lab.Table("", [row(4, 4.0), row(16, 16.0)])


def test_intervals_end_where_the_table_says(table):
    (axes,) = drawn(table).axes
    (bars,) = axes.containers[0].lines[2]
    ends = np.array([segment[:, 1] for segment in bars.get_segments()])
    np.testing.assert_array_equal(axes.containers[0].lines[0].get_ydata(), table["variance"])
    np.testing.assert_allclose(ends[:, 0], table["variance_low"], rtol=1e-14)
    np.testing.assert_allclose(ends[:, 1], table["variance_high"], rtol=1e-14)


def test_predictions_are_drawn_in_the_colour_of_the_measurement(table):
    (axes,) = drawn(table, color=style.GREEN).axes
    (line,) = [line for line in axes.lines if line.get_marker() == "None" and line.get_xdata().size]
    np.testing.assert_array_equal(line.get_ydata(), table["variance_predicted"])
    assert line.get_color() == style.GREEN


@pytest.mark.parametrize("write", [style.svg, style.png, style.pdf])
def test_a_busy_machine_does_not_warn_of_a_legend(table, write, monkeypatch):
    """matplotlib does, where finding its place took a second; a notebook would show that."""
    figure = drawn(table, label="measured")
    figure.axes[0].legend()
    clock = itertools.count(step=2)
    monkeypatch.setattr("matplotlib.legend.time.perf_counter", lambda: next(clock))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write(figure)
    assert next(clock) > 0, "the place was looked for"


def test_an_interval_whose_end_rounding_put_past_the_value_is_drawn():
    _, axes = style.subplots()
    style.intervals(axes, [1], [1.0], [np.nextafter(1.0, 2)], [1.5])


def test_ticks_are_the_sizes_measured(table):
    (axes,) = drawn(table).axes
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["4", "16"]
    assert not axes.xaxis.get_minorticklocs().size


def test_files_are_the_same_every_time(table, tmp_path):
    first = style.save(drawn(table), tmp_path / "first.plot")
    second = style.save(drawn(table), tmp_path / "second.plot")
    kinds = ("svg", "pdf", "png", "csv")
    assert [path.name for path in first] == [f"first.plot.{kind}" for kind in kinds]
    for a, b in zip(first, second, strict=True):
        assert a.read_bytes() == b.read_bytes()
    for path, start in zip(first, (b"<svg", b"%PDF", b"\x89PNG", b"panel,series,x,y"), strict=True):
        assert path.read_bytes().startswith(start)


def test_one_kind_of_file_is_written_and_an_unknown_one_refused(table, tmp_path):
    assert style.save(drawn(table), tmp_path / "plot", ["csv"]) == (tmp_path / "plot.csv",)
    with pytest.raises(ValueError, match=r"^kinds: expected some of \[.*\], got 'jpg'"):
        style.save(drawn(table), tmp_path / "other", ["csv", "jpg"])
    assert [path.name for path in tmp_path.iterdir()] == ["plot.csv"]


# ---------------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("written", "set_as"),
    [
        ("d_k", "$d_k$"),
        ("n", "$n$"),
        ("as trained, 1/sqrt(32)", r"as trained, $1/\sqrt{32}$"),
        ("divided by 2 sqrt d_k", r"divided by $2 \sqrt{d_k}$"),
        ("dotted: sqrt(2 ln n)", r"dotted: $\sqrt{2 \ln n}$"),
        ("sigma; 1 with 1/sqrt(d_k)", r"$\sigma$; 1 with $1/\sqrt{d_k}$"),
        ("dot, NumPy: n^1.86", "dot, NumPy: $n^{1.86}$"),
        ("dL/dW^Q, keys n", r"$\partial L/\partial W^Q$, keys $n$"),
        ("0.1376 / d_k", "$0.1376/d_k$"),
        ("d_k = d_v = 16", "$d_k = d_v = 16$"),
        ("1/d_model", r"$1/d_\mathrm{model}$"),
        ("$n$ keys n", "$n$ keys $n$"),
        ("4 n² bytes", "$4 n^{2}$ bytes"),
        # No formula.
        ("a largest weight of 1/2", "a largest weight of 1/2"),
        ("a note on nodes, and e", "a note on nodes, and e"),
    ],
)
def test_formulas_in_labels_are_set(written, set_as):
    assert mathematics(written) == set_as
    assert mathematics(set_as) == set_as


def test_every_text_of_a_plot_is_set_and_the_data_keep_what_was_written():
    @style.plot
    def plotted():
        figure, axes = style.subplots()
        axes.plot([1], [2], label="sigma = 1")
        axes.set(title="d_k = 8", xlabel="sqrt(d_k)", ylabel="q.k")
        axes.annotate("ln n", (1, 2))
        axes.text(1, 2, "dL/dq", family="monospace")
        axes.legend(title="rho")
        return figure

    figure = plotted()
    (axes,) = figure.axes
    legend = axes.get_legend()
    texts = [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
    texts += [legend.get_title(), *legend.get_texts()]
    assert [text.get_text() for text in texts] == [
        *("$d_k = 8$", r"$\sqrt{d_k}$", r"$q \cdot k$", r"$\ln n$", "dL/dq"),
        *(r"$\rho$", r"$\sigma = 1$"),
    ]
    assert style.png(figure)
    assert lab.drawn(figure).rows[0]["panel"] == "d_k = 8"
    assert lab.drawn(figure).rows[0]["series"] == "sigma = 1"


def test_an_svg_has_roots_that_fit_any_font():
    @style.plot
    def plotted():
        figure, axes = style.subplots()
        axes.set(xlabel="sqrt(d_k)", ylabel="sqrt(ln n)")
        return figure

    figure = plotted()
    svg = style.svg(figure)
    assert "$√d_k$" in svg  # its comments quote the text
    assert r"$√(\ln n)$" in svg
    assert "√</tspan>" in svg
    assert "Display" not in svg  # the font of the radical with a line above
    assert figure.axes[0].get_xlabel() == r"$\sqrt{d_k}$"


# ---------------------------------------------------------------------- what a figure shows


def read(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_data_of_a_figure_are_its_intervals_and_laws(table, tmp_path):
    (path,) = style.save(drawn(table, label="measured"), tmp_path / "plot", ["csv"])
    rows = read(path)
    assert [row["series"] for row in rows] == ["measured"] * 2 + ["measured, law"] * 2
    measured, law = rows[:2], rows[2:]
    assert [float(row["x"]) for row in measured] == [4, 16]
    for name, column in (("y", "variance"), ("low", "variance_low"), ("high", "variance_high")):
        found = [float(row[name]) for row in measured]
        np.testing.assert_allclose(found, table[column], rtol=1e-14)
    assert [float(row["y"]) for row in law] == [4, 16]
    assert law[0]["low"] == "nan"


def test_the_data_of_a_figure_hold_bars_areas_maps_and_sideways_intervals():
    figure, (bars, area, cells, image) = style.subplots(1, 4)
    bars.barh([1, 2], [0.5, 3.0])
    bars.bar([7], [9.0])
    area.fill_between([0.0, 1.0, 2.0], [1.0, 2.0, 3.0], [4.0, 6.0, 8.0], label="range")
    area.errorbar([5.0], [1.0], xerr=[[1.0], [3.0]], label="sideways")
    area.axhline(1)
    cells.pcolormesh(np.array([[1.0, 2.0]]))
    image.imshow(np.array([[3.0], [4.0]]))
    for number, axes in enumerate(figure.axes):
        axes.set(title=f"panel {number}")
    found = lab.drawn(figure)
    names = ("x", "y", "low", "high", "value")

    def panel(number):
        some = found.where(panel=f"panel {number}")
        return [tuple(row[name] for name in names) for row in some.rows], some["series"].tolist()

    nan = np.nan
    expected = [
        [(0.5, 1, nan, nan, nan), (3, 2, nan, nan, nan), (7, 9, nan, nan, nan)],
        [(5, 1, 4, 8, nan), (0, nan, 1, 4, nan), (1, nan, 2, 6, nan), (2, nan, 3, 8, nan)],
        [(0, 0, nan, nan, 1), (1, 0, nan, nan, 2)],
        [(0, 0, nan, nan, 3), (0, 1, nan, nan, 4)],
    ]
    for number, rows in enumerate(expected):
        np.testing.assert_allclose(panel(number)[0], rows)
    assert panel(1)[1] == ["sideways", "range", "range", "range"]


def test_the_data_of_the_laboratorys_figures_are_their_tables():
    table = lab.growth(d_k=[4, 16], n=[8], draws=9)
    found = lab.drawn(lab.plot_growth(table))
    for column in ("variance", "variance_scaled"):
        values = table[column][table["components"] == "normal"]
        assert set(values) <= set(found["y"])


def test_a_notebook_shows_it(table):
    assert drawn(table)._repr_png_().startswith(b"\x89PNG")


def test_the_style_is_left_as_it_was(table):
    import matplotlib

    before = dict(matplotlib.rcParams)
    drawn(table)
    assert dict(matplotlib.rcParams) == before


def test_lines_can_be_told_apart():
    assert len(set(style.cycle(49))) == 49
    assert len({color for color, _ in style.cycle(7)}) == 7
    with pytest.raises(ValueError, match="n: expected 0 to 49 lines, got 50"):
        style.cycle(50)


def test_every_experiment_of_the_main_job_has_its_plot():
    rows = lab.scale_effect(lab.normal(30), d_k=[16, 64])
    assert len(lab.plot_scale_effect(rows).axes) == 3
    speed = lab.speed([(10, 64)], seconds=0.0)
    bars = lab.plot_speed(speed).axes[0].patches
    assert [bar.get_width() for bar in bars] == [row.ratio for row in speed]


def test_every_experiment_that_make_lab_runs_has_its_plot():
    pytest.importorskip("autograd", reason="needs autograd: pip install '.[lab]'")
    from sdpa_lab.__main__ import NAMES
    from sdpa_lab.training.__main__ import GRID
    from sdpa_lab.training.plots import PLOTS

    assert {f"plot_{name}" for name in NAMES} <= set(lab.__all__)
    assert set(GRID) == set(PLOTS)


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        lab.plot_speed([])
