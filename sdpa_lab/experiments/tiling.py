"""How the kernel works, in steps that can be looked at: online softmax, merging."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import sdpa

from .. import style
from ..tools.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
        Of `sdpa.attention`, without out and workers. Keys that no mask lets through are there, with
        the score -inf.

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
    n, visible = len(key), options.pop("where", True)
    whole = sdpa.attention_forward(query, key, value, where=visible, **options)
    scores = sdpa.attention_weights(query, key, where=visible, stage="biased", **options)[0]
    rows: list[dict[str, float]] = []
    total: sdpa.AttentionForward | None = None
    for end in range(block, n + block, block):
        # Keys keep their places, of which masks and biases speak.
        own = (np.arange(n) < end) & (np.arange(n) >= end - block)
        part = sdpa.attention_forward(query, key, value, where=own & visible, **options)
        # A sink stands beside the keys of all blocks together.
        options.pop("sinks", None)
        before = np.array([-np.inf]) if total is None else total.lse
        total = part if total is None else sdpa.merge_attention(*zip(total, part, strict=True))
        rows.append(
            {
                "keys": min(end, n),
                "largest": float(scores[:end].max()),
                "lse": float(total.lse[0]),
                "kept": _factor(before, total.lse),
                "share": _factor(total.lse, whole.lse),
                "difference": float(abs(total.out - whole.out).max()),
            }
        )
    return Table(f"One query, {len(key)} keys in blocks of {block}", rows)


def _factor(lse: npt.NDArray[Any], later: npt.NDArray[Any]) -> float:
    """e^(lse - later); 0 where nothing was seen yet."""
    return float(np.exp(lse - later)[0]) if lse > -np.inf else 0.0


@style.plot
def plot_online(table: Table, shape: tuple[int, int], **options: Any) -> Figure:
    """Tiles of a masked matrix; the course of the largest score, lse and output of one query.

    Parameters
    ----------
    table : Table
        Of `online`.
    shape, **options
        Of `sdpa.plot.pattern`.
    """
    figure, (matrix, course, distance) = style.subplots(1, 3, size=(4.3, 3.8))
    sdpa.plot.pattern(shape, ax=matrix, **options)
    matrix.set_title(matrix.get_title().replace("tiles of ", "tiles of\n"))
    matrix.grid(visible=False)
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
