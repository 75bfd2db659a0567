"""Figures of weights, of their statistics, and of what masks leave to compute."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from math import ceil, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sdpa import _core, _table
from sdpa._arguments import arrays, checked_options
from sdpa.plot._checks import checked_tokens, checked_weights, figure_of, hidden_pairs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = "cividis"  # its lightness grows evenly, for every eye
LABEL = 0.095
"""Inches that a token takes on an axis; where there are more, every second, third, ... is named."""
DOTS = 100
"""Pixels an inch, of matplotlib's figures unless told otherwise. A map that has more numbers would
leave out some of them, and so whole diagonals."""

LEGEND = 58
"""Letters of the three entries of a pattern's legend that fit side by side."""

# Colours of Okabe and Ito, "Color Universal Design" (2008).
KINDS = ("skipped", "masked pair by pair", "computed whole")
KIND_COLORS = ("#eeeeee", "#E69F00", "#0072B2")


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"sdpa.plot needs matplotlib ({error}): pip install matplotlib"
        ) from error

    class NotebookFigure(Figure):
        """Without pyplot, this method is all that IPython needs to show a figure."""

        def _repr_png_(self) -> bytes:
            data = BytesIO()
            self.savefig(data, format="png", dpi=110)
            return data.getvalue()

    return NotebookFigure(figsize=(width, height), layout="constrained")


def weights(
    weights: npt.ArrayLike,
    *,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    mask: npt.ArrayLike | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Weights as maps: a row for each query, a column for each key, a map for each head.

    Parameters
    ----------
    weights : (Lq, Lk) or (heads, Lq, Lk) array_like
        Of `sdpa.attention_weights`. All maps share the colours, from 0 to the largest weight. Where
        there are more weights than pixels, each cell shows the largest of several, and the colour
        bar says of how many.
    query_tokens : sequence of str, optional
        Lq texts, which stand at the rows instead of numbers. Long axes name some of them only.
    key_tokens : sequence of str, optional
        Lk texts. None: `query_tokens`, where Lq = Lk.
    mask : array_like, optional
        `attn_mask` of the call, which broadcasts to `weights`; the pairs that it forbids are
        hatched.
    ax : matplotlib.axes.Axes, optional
        Where to draw one head. None: in a new figure.

    Returns
    -------
    matplotlib.figure.Figure
        It shows itself in a notebook; `savefig` writes it.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    TypeError
        Weights are no numbers; tokens are one text; `mask` is neither bool nor floating.
    ValueError
        Weights have a batch axis, are NaN, infinite or negative; a shape or a number of tokens does
        not fit; `ax` is given for several heads.

    See Also
    --------
    view : The same as a page, with lines between tokens.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> x = np.eye(3)
    >>> weights = sdpa.attention_weights(x, x, is_causal=True)
    >>> figure = sdpa.plot.weights(weights, query_tokens=["the", "cat", "sat"])
    >>> [text.get_text() for text in figure.axes[0].get_yticklabels()]
    ['the', 'cat', 'sat']
    """
    (given,) = arrays(weights=weights)
    found = checked_weights(given)
    heads, n_q, n_k = found.shape
    tokens = checked_tokens(query_tokens, key_tokens, n_q, n_k)
    hidden = None if mask is None else hidden_pairs(mask, found.shape, given.dtype)
    if ax is not None and heads > 1:
        raise ValueError(f"ax: expected None for {heads} heads, got Axes; plot weights[0] alone")
    if ax is None:
        figure, places, inches = _panels(heads, n_q, n_k)
    else:
        figure, places = figure_of(ax), np.array([ax])
        inches = _inches(ax)
    most = found.max() or 1.0
    cells, _, size = _cells(found, inches)
    for head, (place, values) in enumerate(zip(places, cells, strict=False)):
        image = place.imshow(
            values, vmin=0, vmax=most, cmap=COLORS, interpolation="nearest", aspect="auto",
            extent=(-0.5, n_k - 0.5, n_q - 0.5, -0.5),
        )  # fmt: skip
        _uncover(place)
        if hidden is not None:
            _hatch(place, hidden[head])
        _label(place, tokens, (n_q, n_k), inches)
        if heads > 1:
            place.set_title(f"head {head}", fontsize="medium")
    label = "weight" if size is None else f"largest weight of {size} pairs"
    figure.colorbar(image, ax=list(places[:heads]), label=label)
    return figure


def _panels(heads: int, n_q: int, n_k: int) -> tuple[Figure, Any, tuple[float, float]]:
    """A figure, the axes of its heads, and about how high and wide these are in inches."""
    columns = ceil(sqrt(heads))
    rows = ceil(heads / columns)
    least, most = (3.6, 7.0) if heads == 1 else (2.2, 3.2)
    width = min(max(least, 0.22 * max(n_q, n_k)), most)
    height = width * min(max(n_q / n_k, 0.4), 2)
    figure = _figure(columns * width + 1.4, rows * height + 0.8)
    places = figure.subplots(rows, columns, squeeze=False).ravel()
    for place in places[heads:]:
        place.remove()
    return figure, places[:heads], (max(height - 0.8, 0.5), width - 0.8)


def _uncover(axes: Axes) -> None:
    """Move the frame off the cells at the edges, which may be as narrow as its line."""
    axes.spines[:].set_position(("outward", 1.5))


def _inches(axes: Axes) -> tuple[float, float]:
    """How high and wide axes are."""
    box, dpi = axes.get_window_extent(), figure_of(axes).dpi
    return box.height / dpi, box.width / dpi


def _starts(n: int, inches: float) -> npt.NDArray[np.intp]:
    """Where cells of a pixel at least begin, in n numbers along an axis.

    They are as long as one another but for one number: a short last one would have no pixel.
    """
    size = ceil(n / (DOTS * inches))
    count = ceil(n / size)
    return np.arange(count) * n // count


def _cells(
    weights: npt.NDArray[Any], inches: tuple[float, float]
) -> tuple[npt.NDArray[Any], list[npt.NDArray[np.intp]], str | None]:
    """The largest of each cell of the last two axes, where cells begin, how many each has."""
    starts = [_starts(n, by) for n, by in zip(weights.shape[-2:], inches, strict=True)]
    texts = []
    for axis, first in zip((-2, -1), starts, strict=True):
        texts.append(_count(first, weights.shape[axis]))
        if len(first) < weights.shape[axis]:
            weights = np.maximum.reduceat(weights, first, axis)
    return weights, starts, None if texts == ["1", "1"] else " x ".join(texts)


def _count(starts: npt.NDArray[np.intp], n: int) -> str:
    """How many of n numbers a cell has, in words."""
    sizes = np.diff(starts, append=n)
    return str(sizes.max()) if sizes.min() == sizes.max() else f"up to {sizes.max()}"


def _label(
    axes: Axes,
    tokens: tuple[list[str] | None, list[str] | None],
    shape: tuple[int, int],
    inches: tuple[float, float],
) -> None:
    axes.set(ylabel="query", xlabel="key")
    places = zip((axes.yaxis, axes.xaxis), tokens, shape, inches, strict=True)
    for axis, texts, n, length in places:
        if texts is None:
            from matplotlib.ticker import MaxNLocator

            # By default it names two at least, so on an axis of one place fractions as well.
            axis.set_major_locator(MaxNLocator(nbins="auto", integer=True, min_n_ticks=1))
            continue
        step = ceil(n / max(length // LABEL, 1))
        # A dollar sign would begin a formula.
        axis.set_ticks(range(0, n, step), [text.replace("$", r"\$") for text in texts[::step]])
    if tokens[1] is not None:
        axes.tick_params(axis="x", rotation=90)
    if max(shape) > 16:
        axes.tick_params(labelsize="x-small")


def _hatch(axes: Axes, hidden: npt.NDArray[np.bool_]) -> None:
    """Hatch pairs, as one shape: a rectangle for each run of them in a row."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    edges = np.diff(np.pad(hidden.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    (row, start), (_, stop) = np.nonzero(edges == 1), np.nonzero(edges == -1)
    if len(row) == 0:
        return
    corners = ((start, row), (stop, row), (stop, row + 1), (start, row + 1), (start, row))
    points = np.array([(x - 0.5, y - 0.5) for x, y in corners]).transpose(2, 0, 1)
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(row)
    path = Path(points.reshape(-1, 2), codes)
    patch = PathPatch(path, hatch="////", facecolor="#dddddd", edgecolor="#888888", linewidth=0)
    patch.set_gid("forbidden")
    axes.add_patch(patch)


def statistics(rows: _core.AttentionStatistics) -> Figure:
    """Entropy and largest weight of each row, by head and position.

    Parameters
    ----------
    rows : AttentionStatistics
        Of `sdpa.attention_statistics`, for (Lq, d) or (heads, Lq, d).

    Returns
    -------
    matplotlib.figure.Figure
        Two maps with a row for each head and a column for each query: the entropy in nats, and the
        largest weight. Where there are more queries than pixels, a column shows the mean of the
        entropies of several, and the largest of their weights; the titles say of how many.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    TypeError
        `rows` is no result of `sdpa.attention_statistics`.
    ValueError
        `rows` has a batch axis or no row, or holds NaN.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> x = np.random.default_rng(0).standard_normal((4, 32, 8))
    >>> figure = sdpa.plot.statistics(sdpa.attention_statistics(x, x))
    >>> [axes.get_title() for axes in figure.axes[:2]]
    ['entropy, nats', 'largest weight']
    """
    if not isinstance(rows, _core.AttentionStatistics):
        raise TypeError(
            "rows: expected the result of sdpa.attention_statistics, got an instance of "
            f"{type(rows).__name__}"
        )
    maps = [np.asarray(values, np.float64) for values in (rows.entropy, rows.max_weight)]
    shape = maps[0].shape
    if not 1 <= len(shape) <= 2 or maps[0].size == 0:
        raise ValueError(
            f"rows: expected (Lq) or (heads, Lq), none of them 0, got {shape}; choose one batch "
            "entry of query and key"
        )
    if np.isnan(maps).any():
        raise ValueError("rows: expected numbers, got nan: query or key is not finite")
    maps = [values.reshape(-1, shape[-1]) for values in maps]
    heads, n = maps[0].shape
    figure = _figure(8.0, 2.2 + 0.5 * heads)
    starts = _starts(n, 6)  # the maps are about six inches wide
    means = np.add.reduceat(maps[0], starts, -1) / np.diff(starts, append=n)
    largest = np.maximum.reduceat(maps[1], starts, -1)
    each = f", each of {_count(starts, n)} queries" if len(starts) < n else ""
    titles = f"{'mean ' if each else ''}entropy, nats{each}", f"largest weight{each}"
    for axes, values, top, title in zip(
        figure.subplots(2, 1), (means, largest), (means.max() or 1.0, 1.0), titles, strict=True
    ):
        image = axes.imshow(
            values, vmin=0, vmax=top, cmap=COLORS, interpolation="nearest", aspect="auto",
            extent=(-0.5, n - 0.5, heads - 0.5, -0.5),
        )  # fmt: skip
        _uncover(axes)
        axes.set(title=title, xlabel="query", ylabel="head")
        axes.locator_params(integer=True, min_n_ticks=1)
        figure.colorbar(image, ax=axes)
    return figure


def pattern(shape: tuple[int, int], *, ax: Axes | None = None, **options: Any) -> Figure:
    """Which tiles of the scores an option or a mask skips: how the kernels classify them.

    The kernels take the queries in panels and the keys in blocks. A tile, one panel by one block,
    is skipped where no pair in it is visible, and masked pair by pair where some are. Tiles are
    those of one head of at most 256 numbers a row, in float32, on this processor. Without
    `invariant` a kernel's blocks begin at the first key that its queries see, not at multiples of
    their size, so a `window` may skip up to one tile more than is shown.

    Parameters
    ----------
    shape : (int, int)
        Lq and Lk.
    ax : matplotlib.axes.Axes, optional
        Where to draw, instead of a new figure.
    **options
        Of `sdpa.attention_statistics`: attn_mask, where, is_causal, window, key_lengths,
        query_offset, mask_mod, mask_args, ...

    Returns
    -------
    matplotlib.figure.Figure
        The title says how many tiles are computed. Where there are more tiles than pixels, each
        cell shows the one of several that computes the most; the legend says of how many.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    TypeError, ValueError
        `shape` is not two positive numbers; what `sdpa.attention_statistics` raises for the
        options; those of packed sequences.

    Notes
    -----
    A tile of which two options hide all pairs together, but neither alone, is computed with a mask.

    Examples
    --------
    >>> import sdpa
    >>> figure = sdpa.plot.pattern((1024, 1024), is_causal=True)
    >>> figure.axes[0].get_ylabel()
    'query'
    """
    n_q, n_k = _checked_shape(shape)
    kinds, (rows, columns) = _tiles(n_q, n_k, checked_options(pattern, options, _known()))
    if ax is None:
        height = 4.4 * min(max(n_q / n_k, 0.3), 2)
        figure = _figure(5.6, 1.2 + height)
        axes = figure.subplots()
        inches = height - 0.6, 4.2
    else:
        figure, axes = figure_of(ax), ax
        inches = _inches(ax)

    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    # Of a row of cells at an edge, half a pixel may be cut off.
    cells, starts, size = _cells(kinds, (0.65 * inches[0], 0.65 * inches[1]))
    edges = [
        np.append(first * of_tile, n)
        for first, of_tile, n in zip(starts, (rows, columns), (n_q, n_k), strict=True)
    ]
    line = 0.5 if max(kinds.shape) <= 128 else 0
    axes.pcolormesh(
        edges[1], edges[0], cells, cmap=ListedColormap(KIND_COLORS), vmin=0, vmax=2,
        edgecolors="white", linewidth=line,
    )  # fmt: skip
    axes.invert_yaxis()
    _uncover(axes)
    axes.locator_params(integer=True, min_n_ticks=1)
    computed = int((kinds > 0).sum())
    axes.set(
        xlabel="key",
        ylabel="query",
        title=f"{computed} of {kinds.size} tiles of {rows} queries by {columns} keys computed",
    )
    axes.title.set_fontsize("medium")
    counts = [int((kinds == kind).sum()) for kind in range(3)]
    labels = [f"{name}: {n}" for name, n in zip(KINDS, counts, strict=True)]
    look: dict[str, Any] = {
        "handles": [
            Patch(facecolor=color, edgecolor="#888888", label=label)
            for color, label in zip(KIND_COLORS, labels, strict=True)
        ],
        "fontsize": "small",
        "title": None if size is None else f"each cell: the most of {size} tiles",
        "title_fontsize": "small",
    }
    if ax is None:
        columns = 3 if len("".join(labels)) <= LEGEND else 1
        figure.legend(loc="outside lower center", ncols=columns, **look)
    else:
        axes.legend(loc="upper right", framealpha=1, **look)
    return figure


def _known() -> list[str]:
    """The options that have a meaning for one head."""
    options = _table.options_of("attention_statistics").values()
    return [option.name for option in options if option.kind != "packing"]


def _checked_shape(shape: Any) -> tuple[int, int]:
    try:
        n_q, n_k = shape
    except (TypeError, ValueError):
        raise TypeError(f"shape: expected (Lq, Lk), got {shape!r}") from None
    if not all(isinstance(n, int | np.integer) and n > 0 for n in (n_q, n_k)):
        raise ValueError(f"shape: expected two positive integers, (Lq, Lk), got {shape!r}")
    return int(n_q), int(n_k)


def _tiles(
    n_q: int, n_k: int, options: dict[str, Any]
) -> tuple[npt.NDArray[np.uint8], tuple[int, int]]:
    """The kinds of the tiles, 0 (no pair), 1 (some) or 2 (all), and a tile's queries and keys."""
    # Nothing is read of the operands. 128: the d_k + d_v of a common head.
    one = np.zeros((1, 1), np.float32)
    query, key = (np.broadcast_to(one, (n, 128)) for n in (n_q, n_k))
    kinds, (rows, columns) = _core._pattern(query, key, **options)
    return kinds.astype(np.uint8), (int(rows), int(columns))
