"""The numbers that a figure shows, read from what is drawn."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .table import Cell, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Cell]


def drawn(figure: Figure) -> Table:
    """Every number that a figure shows: of lines, intervals, bars, areas, histograms and maps.

    Parameters
    ----------
    figure : matplotlib.figure.Figure

    Returns
    -------
    Table
        panel, the title of the axes or the name of their y axis; series, as in the legend ("" where
        it has no name); x and y; low and high, the ends of an interval or area (NaN without);
        value, of a cell of a map (NaN elsewhere). Auxiliary lines across a whole panel are left
        out.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> from sdpa_lab import style
    >>> figure, axes = style.subplots()
    >>> style.intervals(axes, [16, 64], [1.0, 2.0], [0.9, 1.8], [1.1, 2.2], label="measured")
    >>> print(lab.drawn(figure).select("series", "x", "y", "low", "high"))
      series    x    y   low high
    measured 16.0 1.00 0.900 1.10
    measured 64.0 2.00  1.80 2.20
    """
    rows: list[Row] = []
    for number, axes in enumerate(figure.axes):
        panel = _written(axes.title) or _written(axes.yaxis.label) or str(number)
        for series, *cells in _of(axes):
            names = ("x", "y", "low", "high", "value")
            numbers = dict(zip(names, map(float, cells), strict=True))
            rows.append({"panel": panel, "series": series, **numbers})
    return Table("", rows)


def _of(axes: Axes) -> Iterator[tuple[Any, ...]]:
    """(series, x, y, low, high, value) of everything on the axes."""
    from matplotlib.collections import PolyCollection, QuadMesh
    from matplotlib.container import BarContainer, ErrorbarContainer

    nan, done = np.nan, set()
    for container in axes.containers:
        label = _name(container.get_label())
        if isinstance(container, ErrorbarContainer):
            line, caps, bars = container.lines
            done |= {line, *caps}
            ends = bars[0].get_segments()
            along = int(container.has_yerr)  # the coordinate that the interval is of
            for x, y, segment in zip(*_points(line), ends, strict=True):
                yield label, x, y, *np.sort(segment[:, along]), nan
        elif isinstance(container, BarContainer):
            for bar in container.patches:
                across = container.orientation == "horizontal"
                place = bar.get_y() + bar.get_height() / 2, bar.get_x() + bar.get_width() / 2
                size = bar.get_width(), bar.get_height()
                yield (
                    label,
                    *((size[0], place[0]) if across else (place[1], size[1])),
                    nan,
                    nan,
                    nan,
                )
    for line in axes.lines:
        if line not in done and line.get_transform() == axes.transData:
            for x, y in zip(*_points(line), strict=True):
                yield _name(line.get_label()), x, y, nan, nan, nan
    for collection in axes.collections:
        if isinstance(collection, PolyCollection):
            yield from _area(collection)
        elif isinstance(collection, QuadMesh):
            yield from _cells(collection.get_array())
    for image in axes.images:
        yield from _cells(image.get_array())


def _points(line: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    x, y = line.get_data()
    return np.asarray(x), np.asarray(y)


def _area(collection: Any) -> Iterator[tuple[Any, ...]]:
    """Its outline visits every x below and above."""
    name = _name(collection.get_label())
    for path in collection.get_paths():
        x, y = path.vertices.T
        for place in np.unique(x):
            at = y[x == place]
            yield name, place, np.nan, at.min(), at.max(), np.nan


def _cells(matrix: Any) -> Iterator[tuple[Any, ...]]:
    for (row, column), value in np.ndenumerate(np.ma.filled(matrix, np.nan)):
        yield "", column, row, np.nan, np.nan, value


def _written(text: Any) -> str:
    """Before its formulas were set."""
    return str(text.get_label() if text.get_text() else "") or str(text.get_text())


def _name(label: object) -> str:
    """As the legend shows it; matplotlib gives names of its own, such as _child3, to the others."""
    text = str(label)
    return "" if re.fullmatch(r"_(child|container|nolegend)\w*", text) else text.removeprefix("_")
