"""How the kernel works, in steps that can be looked at: tiles, online softmax, merging."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import sdpa

from .. import style
from ..tools.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SKIPPED, MIXED, WHOLE = 0, 1, 2
"""Kinds of tiles: no pair visible, some, all."""


def tiles(
    n_q: int, n_k: int, *, rows: int = 96, columns: int = 128, **options: Any
) -> npt.NDArray[np.int64]:
    """Which tiles of the score matrix a mask hides, and which it hides in part.

    Parameters
    ----------
    n_q, n_k : int
        Queries and keys.
    rows, columns : int
        Of a tile.
    **options
        Masks of `sdpa.attention`: is_causal, window, key_lengths, query_offset.

    Returns
    -------
    (ceil(n_q / rows), ceil(n_k / columns)) int64
        SKIPPED, which the kernel does not compute; MIXED, where it masks pairs; WHOLE.

    Examples
    --------
    >>> from sdpa_lab.experiments import tiling
    >>> tiling.tiles(4, 4, rows=2, columns=2, is_causal=True)
    array([[1, 0],
           [2, 1]])
    """
    biased = sdpa.attention_weights(np.ones((n_q, 1)), np.ones((n_k, 1)), stage="biased", **options)
    visible = np.isfinite(biased)
    kinds = [
        [_kind(visible[i : i + rows, j : j + columns]) for j in range(0, n_k, columns)]
        for i in range(0, n_q, rows)
    ]
    return np.array(kinds, np.int64)


def _kind(visible: npt.NDArray[np.bool_]) -> int:
    return WHOLE if visible.all() else MIXED if visible.any() else SKIPPED


def online(
    query: npt.NDArray[Any],
    key: npt.NDArray[Any],
    value: npt.NDArray[Any],
    *,
    block: int = 128,
    **options: Any,
) -> Table:
    """Attention of one query by online softmax, one block of keys at a time.

    Each step attends to one more block and merges it with what was seen before:
    lse' = ln(e^lse + e^lse_block), out' = e^(lse - lse') out + e^(lse_block - lse') out_block
    (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, section 3).

    Parameters
    ----------
    query : (1, d_k) ndarray
    key : (n, d_k) ndarray
    value : (n, d_v) ndarray
    block : int
        Keys per step.
    **options
        Of `sdpa.attention_forward`.

    Returns
    -------
    Table
        keys, seen so far; largest, score so far; lse, of the scores so far; kept, the factor
        e^(lse - lse') of what was seen before; share, e^(lse - lse of all), the weight that the
        keys so far will have in the end; difference, largest |out so far - out of all|.

    Raises
    ------
    ValueError
        `query` does not hold exactly one query.

    Examples
    --------
    >>> import numpy as np
    >>> from sdpa_lab.experiments import tiling
    >>> query, key, value = (np.random.default_rng(0).standard_normal((n, 8)) for n in (1, 6, 6))
    >>> tiling.online(query, key, value, block=2)["keys"]
    array([2, 4, 6])
    """
    if query.ndim != 2 or query.shape[0] != 1:
        raise ValueError(f"query: expected one query, (1, d_k), got {query.shape}")
    whole = sdpa.attention_forward(query, key, value, **options)
    scores = sdpa.attention_weights(query, key, stage="scores", **options)[0]
    rows: list[dict[str, float]] = []
    parts: list[Any] = []
    for end in range(block, len(key) + block, block):
        seen = slice(end - block, end)
        parts.append(sdpa.attention_forward(query, key[seen], value[seen], **options))
        merged = sdpa.merge_attention(*zip(*parts, strict=True))
        before = parts[0].lse if len(parts) > 1 else np.array([-np.inf])
        parts = [merged]
        rows.append(
            {
                "keys": min(end, len(key)),
                "largest": float(scores[:end].max()),
                "lse": float(merged.lse[0]),
                "kept": float(np.exp(before - merged.lse)[0]),
                "share": float(np.exp(merged.lse - whole.lse)[0]),
                "difference": float(abs(merged.out - whole.out).max()),
            }
        )
    return Table(f"One query, {len(key)} keys in blocks of {block}", rows)


@style.plot
def plot_online(table: Table, kinds: npt.NDArray[np.int64]) -> Figure:
    """Tiles of a masked matrix; the course of the largest score, lse and output of one query.

    Parameters
    ----------
    table : Table
        Of `online`.
    kinds : (rows, columns) int64
        Of `tiles`.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    figure, (matrix, course, distance) = style.subplots(1, 3, size=(4.0, 3.6))
    colors = ["#eeeeee", style.ORANGE, style.BLUE]
    matrix.pcolormesh(kinds, cmap=ListedColormap(colors), vmin=0, vmax=2, edgecolors="white")
    matrix.invert_yaxis()
    matrix.set(xlabel="block of keys", ylabel="block of queries")
    names = ("skipped", "masked pair by pair", "whole")
    handles = [Patch(color=color, label=name) for color, name in zip(colors, names, strict=True)]
    matrix.legend(handles=handles, loc="upper right", frameon=True)

    keys = table["keys"]
    course.plot(keys, table["lse"], color=style.BLUE, marker="o", label="log-sum-exp so far")
    course.plot(
        keys, table["largest"], color=style.ORANGE, marker="s", label="largest score so far"
    )
    course.set(xlabel="keys seen", ylabel="scaled score", ylim=(0, None))
    distance.plot(keys, table["difference"], color=style.BLUE, marker="o")
    distance.set(xlabel="keys seen", ylabel="largest distance to the final output", ylim=(0, None))
    course.legend()
    return figure
