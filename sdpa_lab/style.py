"""One look for all plots: colours that stay apart for colour-blind readers, intervals drawn.

matplotlib comes with the extra `lab` and is imported when the first plot is made. A plot function
is decorated with `plot`, makes its axes with `subplots` and returns the figure, which a notebook
shows and `save` writes:

    @style.plot
    def plot_variance(table):
        figure, axes = style.subplots()
        style.columns(axes, table, "d_k", "variance", label="measured")
        axes.set(xlabel="d_k", ylabel="variance of q.k")
        axes.legend()
        return figure

Figures are made without `matplotlib.pyplot`, so nothing is registered, nothing has to be closed and
no window system is asked for.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import cleandoc, signature
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from .tools import mathtext
from .tools.drawn import drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .tools.table import Table

P = ParamSpec("P")
R = TypeVar("R", bound="Figure")

# Okabe and Ito, "Color Universal Design" (2008), without the yellow, which is faint on white.
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK = "#E69F00", "#56B4E9", "#000000"
COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
"""With COLORS, so that a line can be told without its colour."""

SCALED, UNSCALED = BLUE, VERMILION
"""The colours of 1/sqrt(d_k) and of no scale, the same in every plot."""

SEQUENTIAL, DIVERGING = "cividis", "PuOr"
"""Colour maps, for weights and for signed scores."""

RC: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#555555",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": "medium",
    "figure.constrained_layout.use": True,
    "figure.facecolor": "white",
    "font.size": 10.0,
    "grid.color": "#e0e0e0",
    "grid.linewidth": 0.6,
    "image.cmap": SEQUENTIAL,
    "legend.fontsize": "small",
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "savefig.facecolor": "white",
    # Text stays text: it can be searched, and read aloud.
    "svg.fonttype": "none",
    # Names inside an SVG are hashes of what they name.
    "svg.hashsalt": "sdpa",
}

DPI = 110
"""Of PNG files and of figures in notebooks."""


def plot(function: Callable[P, R]) -> Callable[P, R]:
    """Let a plot function draw in this style, set its labels, and complete its docstring.

    Labels are written like the names in tables, 1/sqrt(d_k), and their formulas are set by
    `sdpa_lab.tools.mathtext`.

    The docstring gets the sections that all plots share: what is returned and raised and, for the
    function plot_NAME of one table, that the table comes from NAME.

    Examples
    --------
    >>> from sdpa_lab import style
    >>> @style.plot
    ... def line():
    ...     figure, axes = style.subplots()
    ...     axes.plot([1, 2], [3, 4])
    ...     return figure
    >>> style.svg(line()).startswith("<svg")
    True
    """

    @wraps(function)
    def styled(*args: P.args, **kwargs: P.kwargs) -> R:
        with _styled():
            figure = function(*args, **kwargs)
            mathtext.set_mathematics(figure)
            return figure

    styled.__doc__ = _with_sections(function)
    return styled


TABLE = """
Parameters
----------
table : Table
    Returned by `{}`.
"""

RETURNS = """
Returns
-------
matplotlib.figure.Figure

Raises
------
ImportError
    matplotlib is not installed.
"""


def _with_sections(function: Callable[..., object]) -> str | None:
    """The docstring of a plot function with the sections that it shares with others."""
    if function.__doc__ is None:  # python -OO
        return None
    text, examples, example = cleandoc(function.__doc__).partition("\n\nExamples\n")
    if list(signature(function).parameters) == ["table"]:
        text += "\n" + TABLE.format(function.__name__.removeprefix("plot_"))
    text = text.rstrip() + "\n" + RETURNS
    return text.rstrip() + examples + example


def subplots(
    rows: int = 1, columns: int = 1, *, size: tuple[float, float] = (4.6, 3.3), **options: Any
) -> tuple[Figure, Any]:
    """A figure and its axes, as `matplotlib.pyplot.subplots` returns them.

    Parameters
    ----------
    rows, columns : int
    size : (float, float)
        Width and height of one of the axes, in inches.
    **options
        Of `matplotlib.figure.Figure.subplots`: sharex, sharey, squeeze, ...

    Returns
    -------
    figure : Figure
        Shows itself in a notebook.
    axes : Axes, or an array of them where there are several
    """
    with _styled():
        from matplotlib.figure import Figure

        class NotebookFigure(Figure):
            """Without pyplot, this method is all that IPython needs to show a figure."""

            def _repr_png_(self) -> bytes:
                return png(self)

        width, height = size
        figure = NotebookFigure(figsize=(width * columns, height * rows))
        return figure, figure.subplots(rows, columns, **options)


def intervals(
    axes: Axes,
    x: npt.ArrayLike,
    value: npt.ArrayLike,
    low: npt.ArrayLike,
    high: npt.ArrayLike,
    *,
    color: str = BLUE,
    marker: str = "o",
    line: bool = False,
    label: str | None = None,
) -> None:
    """Measured values with their intervals.

    Parameters
    ----------
    axes : Axes
    x, value, low, high : (points,) array_like
        `low` and `high` are the ends of the interval, not its halves.
    line : bool
        Join the points.
    label : str, optional
        In the legend.
    """
    value = np.asarray(value, float)
    # Rounding may put an end on the wrong side of its value, which matplotlib refuses.
    halves = np.maximum([value - np.asarray(low, float), np.asarray(high, float) - value], 0)
    axes.errorbar(
        np.asarray(x),
        value,
        yerr=halves,
        color=color,
        marker=marker,
        linestyle="-" if line else "none",
        linewidth=1.0,
        elinewidth=1.2,
        capsize=2.5,
        label=label,
    )


def columns(axes: Axes, table: Table, x: str, y: str, **options: Any) -> None:
    """The column `y` of a table, which holds estimates, against `x`; and its predictions, if any.

    Parameters
    ----------
    axes : Axes
    table : sdpa_lab.Table
    x, y : str
        Names of columns.
    **options
        Of `intervals`.
    """
    intervals(axes, table[x], *table.interval(y), **options)
    if f"{y}_predicted" in table.columns:
        law = {"color": options.get("color", BLUE)}
        if options.get("label"):
            law["label"] = f"_{options['label']}, law"  # not in the legend, but in the data
        prediction(axes, table[x], table[f"{y}_predicted"], **law)


def prediction(
    axes: Axes,
    x: npt.ArrayLike,
    y: npt.ArrayLike,
    *,
    color: str = BLACK,
    limit: bool = False,
    label: str | None = None,
) -> None:
    """A curve that was computed, not measured: solid where exact, dashed where a limit."""
    style = "--" if limit else "-"
    axes.plot(np.asarray(x), np.asarray(y), style, color=color, linewidth=1.2, label=label)


def log_axis(axes: Axes, letter: str, ticks: Sequence[int | float] | npt.NDArray[Any]) -> None:
    """Make the axis "x" or "y" logarithmic, with ticks only at measured points."""
    axes.set(**{f"{letter}scale": "log"})
    axis = axes.xaxis if letter == "x" else axes.yaxis
    axis.set_ticks([float(tick) for tick in ticks], [f"{tick:g}" for tick in ticks])
    axis.set_ticks([], minor=True)


def save(
    figure: Figure, path: str | Path, kinds: Sequence[str] = ("svg", "pdf", "png", "csv")
) -> tuple[Path, ...]:
    """Write a figure, and the numbers that it shows.

    A figure made anew gives the same bytes.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
    path : str or Path
        Without a suffix: every kind adds its own.
    kinds : sequence of str
        Of "svg", "pdf", "png" and "csv", the table of `sdpa_lab.drawn`.

    Returns
    -------
    tuple of Path
        The files.

    Raises
    ------
    ValueError
        A kind has another name, before anything is written.

    Examples
    --------
    >>> import tempfile
    >>> import sdpa_lab as lab
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     files = lab.save(lab.plot_growth(lab.growth(d_k=[4, 16], draws=9)), f"{folder}/growth")
    ...     [path.name for path in files], files[3].read_text().splitlines()[0]
    (['growth.svg', 'growth.pdf', 'growth.png', 'growth.csv'], 'panel,series,x,y,low,high,value')
    """
    content: dict[str, Callable[[], bytes]] = {
        "svg": lambda: svg(figure).encode(),
        "pdf": lambda: pdf(figure),
        "png": lambda: png(figure),
        "csv": lambda: drawn(figure).csv().encode(),
    }
    for kind in kinds:
        if kind not in content:
            raise ValueError(f"kinds: expected some of {list(content)}, got {kind!r}")
    path = Path(path)
    written = []
    for kind in kinds:
        written.append(path.with_name(f"{path.name}.{kind}"))
        written[-1].write_bytes(content[kind]())
    return tuple(written)


def svg(figure: Figure) -> str:
    """The figure as an <svg> element, to be put in an HTML page."""
    text = StringIO()
    with _styled(), mathtext.plain_roots(figure):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    _, start, rest = text.getvalue().partition("<svg")
    return start + rest


def png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    return _file(figure, "png", {"Software": None})


def pdf(figure: Figure) -> bytes:
    """The figure as a PDF file."""
    return _file(figure, "pdf", {"CreationDate": None, "Creator": None})


def _file(figure: Figure, kind: str, metadata: dict[str, None]) -> bytes:
    data = BytesIO()
    with _styled():
        figure.savefig(data, format=kind, dpi=DPI, metadata=metadata)
    return data.getvalue()


def cycle(n: int) -> Sequence[tuple[str, str]]:
    """(colour, marker) for each of `n` lines, all different up to 49."""
    if not 0 <= n <= len(COLORS) * len(MARKERS):
        raise ValueError(f"n: expected 0 to {len(COLORS) * len(MARKERS)} lines, got {n}")
    turns = [(i % len(COLORS), i // len(COLORS)) for i in range(n)]
    return [(COLORS[i], MARKERS[(i + turn) % len(MARKERS)]) for i, turn in turns]


@contextmanager
def _styled() -> Iterator[None]:
    try:
        import matplotlib
        from cycler import cycler
    except ImportError as error:
        raise ImportError(f"plots need matplotlib ({error}): pip install matplotlib") from error
    rc = RC | {"axes.prop_cycle": cycler(color=COLORS)}
    with warnings.catch_warnings(), matplotlib.rc_context(rc):
        # Finding the place of a legend takes a second on a busy machine, not on any other.
        warnings.filterwarnings("ignore", "Creating legend with loc")
        yield
