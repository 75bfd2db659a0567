"""Figures of attention on your own queries and keys, at any length, without the score matrix.

For every row s of scaled scores and p of weights, all from `sdpa.attention_statistics`:

    variance        of s within the row, the part that softmax depends on
    entropy, largest weight, effective keys exp(entropy)
    score gradient  |J|, J = diag(p) - p p^T, |J|^2 = sum p^2 - 2 sum p^3 + (sum p^2)^2

|J| sqrt(d_v) is the root mean square of |dL/ds| over values and upstream gradients g = dL/dout of
independent N(0, 1) numbers, so |J| is the gradient that reaches the scores in units of the norm of
a row of g. With values given, g is drawn and `sdpa.attention_backward` run, and the gradients come
in the same units, so that they compare between heads, lengths and inputs:

    |dL/dq_i| / (sqrt(d_v) std(value) std(key)),  |dL/dk_j| / (sqrt(d_v) std(value) std(query)),
    |dL/dv_j| / sqrt(d_v)

where std is the standard deviation of all components about their means over the tokens; softmax
does not depend on these means. If several query heads share a key head, its gradient is their sum
and std(query) is taken over all of them. Queries that see no key and keys that no query sees, such
as padding, count nowhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import sdpa
from sdpa import _core

from . import style
from .tools.estimate import Draws, exact
from .tools.inputs import stream
from .tools.table import Cell, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Figures = dict[str, npt.NDArray[np.float64]]

SATURATED = 0.99
"""A row of weights is saturated when the largest exceeds this."""

DEAD = 0.01
"""A row has no gradient when its norm is below this share of sqrt(d_v), the norm of a row of g."""

STATISTIC = {"rms": "root_mean", "dead": "share", "saturated": "share"}
"""How sequences are combined, by the last word of a figure's name; the default is the mean."""


def measure(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike | None = None,
    *,
    seed: int = 0,
    **options: Any,
) -> Table:
    """Variance, entropy, largest weight and gradients of attention, by head.

    Parameters
    ----------
    query : (..., heads, Lq, d_k) or (Lq, d_k)
        Axes before the heads count sequences. Extra memory is O(Lq + Lk) rows.
    key : (..., heads, Lk, d_k) or (Lk, d_k)
        With the same axes before the heads.
    value : (..., heads, Lk, d_v) or (Lk, d_v), optional
        Adds the gradients that reach query, key and value.
    seed : int
        Seed of the upstream gradient, which is needed with `value`.
    **options
        Options of `sdpa.attention`: scale, is_causal, softcap, window, key_lengths, ...; without
        dropout and workers. Queries that see no key and keys that no query sees are left out.

    Returns
    -------
    Table
        A row per head, then "all", the mean over heads. Columns, each a mean over the rows of a
        sequence: total_variance, row_variance (mean squared deviation), entropy (nats),
        effective_keys, max_weight, saturated (share of rows with a weight above 0.99), and for the
        gradient of scores (and query, key, value): NAME_rms, NAME_median, and NAME_dead, the share
        of rows below 0.01 of the unit (see the module). Medians are within a sequence.

        Intervals come from the spread between sequences, because rows of one sequence share its
        keys and heads are not random draws. A single sequence gives figures without intervals.

    Raises
    ------
    ValueError
        Axes before the heads differ, or those of key and value before the last, or `sdpa.attention`
        refuses the arguments.

    Examples
    --------
    >>> import numpy as np
    >>> import sdpa_lab as lab
    >>> query, key = np.random.default_rng(0).standard_normal((2, 20, 4, 128, 64))
    >>> print(lab.measure(query, key).where(head="all")["row_variance"].round(1))
    [1.]
    >>> print(lab.measure(query, key, scale=1.0).where(head="all")["score_dead"].round(1))
    [0.1]
    """
    query, key = _core._arrays(query=query, key=key)
    value = None if value is None else _core._arrays(value=value)[0]
    if query.shape[:-3] != key.shape[:-3]:
        raise ValueError(
            f"key: expected axes {query.shape[:-3]} before the heads, as query, got {key.shape}"
        )
    if value is not None and value.shape[:-1] != key.shape[:-1]:
        raise ValueError(
            f"value: expected axes {key.shape[:-1]} before the last, as key, got {value.shape}"
        )
    figures = sequences(query, key, value, rng=stream(seed, "measure"), **options)
    heads = next(iter(figures.values())).shape[1]
    rows = [{"head": str(head), **cells(figures, head)} for head in range(heads)]
    rows.append({"head": "all", **cells(figures)})
    n = query.shape[-2], key.shape[-2]
    return Table(f"{len(figures['entropy'])} sequences of {n[0]} queries and {n[1]} keys", rows)


def sequences(
    query: npt.NDArray[Any],
    key: npt.NDArray[Any],
    value: npt.NDArray[Any] | None = None,
    *,
    rng: np.random.Generator,
    **options: Any,
) -> Figures:
    """The figures of `measure`, one number per sequence and head: arrays (sequences, heads).

    Figures whose name ends in rms hold mean squares, ready for `Draws(..., "root_mean")`.
    """
    found = sdpa.attention_statistics(query, key, **options)
    stats = {name: _by_head(rows) for name, rows in found._asdict().items()}
    seen = np.isfinite(stats["score_mean"])
    entropy, largest = stats["entropy"], stats["max_weight"]
    p2, p3 = stats["sum_p2"], stats["sum_p3"]
    row = _mean(stats["score_var"], seen)
    centre = _mean(stats["score_mean"], seen)
    between = _mean((stats["score_mean"] - centre[..., None]) ** 2, seen)
    figures = {
        "total_variance": between + row,
        "row_variance": row,
        "entropy": _mean(entropy, seen),
        "effective_keys": _mean(np.exp(entropy), seen),
        "max_weight": _mean(largest, seen),
        "saturated": _mean(largest > SATURATED, seen),
        # Rounding may take the difference of nearly equal sums below 0.
        **_gradient("score", np.maximum(p2 - 2 * p3 + p2**2, 0), seen),
    }
    if value is not None:
        figures |= _gradients(query, key, value, seen, rng, options)
    return figures


@style.plot
def plot_measure(table: Table) -> Figure:
    """A mark per head: spread of scores, keys that count, largest weight, gradients."""
    names = {
        "row_variance": "variance within a row",
        "effective_keys": "keys that count, exp(entropy)",
        "max_weight": "largest weight",
    }
    gradients = [
        name for name in ("score", "query", "key", "value") if f"{name}_rms" in table.columns
    ]
    figure, axes = style.subplots(1, len(names) + 1, size=(2.9, 3.1))
    places = range(len(table))
    heads = table["head"].tolist()
    for ax, (name, label) in zip(axes, names.items(), strict=False):
        style.intervals(ax, places, *table.interval(name))
        ax.set(ylabel=label)
    for name, (color, marker) in zip(gradients, style.cycle(len(gradients)), strict=True):
        points = table.interval(f"{name}_median")
        style.intervals(axes[-1], places, *points, color=color, marker=marker, label=name)
    axes[-1].set(ylabel="median gradient, in units of the upstream one")
    axes[-1].legend()
    for ax in axes:
        ax.set_xticks(places, heads)
        ax.set(xlabel="head")
    return figure


def _gradients(
    query: npt.NDArray[Any],
    key: npt.NDArray[Any],
    value: npt.NDArray[Any],
    seen: npt.NDArray[np.bool_],
    rng: np.random.Generator,
    options: dict[str, Any],
) -> Figures:
    out, lse = sdpa.attention_forward(query, key, value, **options)
    grad_out = rng.standard_normal(out.shape, np.float32).astype(out.dtype)
    grads = sdpa.attention_backward(grad_out, query, key, value, out, lse, **options)
    heads, d_v = seen.shape[1], value.shape[-1]
    seen_keys = _seen_keys(query, key, options)
    query_spread, key_spread, value_spread = (
        _grouped(_spread(x, rows, seen_keys.shape[1]), heads)
        for x, rows in ((query, seen), (key, seen_keys), (value, seen_keys))
    )
    units = [value_spread * key_spread, value_spread * query_spread, np.ones_like(key_spread)]
    figures: Figures = {}
    for name, unit in zip(("query", "key", "value"), units, strict=True):
        square = _by_head((np.asarray(getattr(grads, name), np.float64) ** 2).sum(axis=-1))
        rows = seen if name == "query" else seen_keys
        figures |= _gradient(name, _grouped(square, heads) / (d_v * unit**2), _grouped(rows, heads))
    return figures


def _gradient(name: str, square: npt.NDArray[Any], seen: npt.NDArray[np.bool_]) -> Figures:
    """From squared norms of rows, (sequences, heads, L)."""
    rows = np.where(seen, square, np.nan)
    return {
        f"{name}_rms": _mean(square, seen),
        f"{name}_median": np.nanmedian(np.sqrt(rows), axis=-1),
        f"{name}_dead": _mean(square < DEAD**2, seen),
    }


def _mean(rows: npt.NDArray[Any], seen: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    return np.asarray(np.where(seen, rows, 0).sum(axis=-1) / seen.sum(axis=-1), np.float64)


def _by_head(rows: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """(sequences, heads, L) in float64, of (..., heads, L) or (L,)."""
    heads = rows.shape[-2] if rows.ndim > 1 else 1
    return np.asarray(rows, np.float64).reshape(-1, heads, rows.shape[-1])


def _seen_keys(
    query: npt.NDArray[Any], key: npt.NDArray[Any], options: dict[str, Any]
) -> npt.NDArray[np.bool_]:
    """The keys that some query sees: (sequences, key heads, Lk)."""
    # Without scores, slopes and sinks every weight that no mask forbids is far above 0.
    even = options | {"scale": 0.0, "alibi_slopes": None, "sinks": None}
    seen = _by_head(sdpa.attention_received(query, key, **even).total) != 0
    heads = key.shape[-3] if key.ndim > 2 else 1
    return np.asarray(seen.reshape(len(seen), heads, seen.shape[1] // heads, -1).any(axis=2))


def _spread(
    x: npt.NDArray[Any], rows: npt.NDArray[np.bool_], key_heads: int
) -> npt.NDArray[np.float64]:
    """Standard deviation of all components about their means over these rows, by key head.

    (sequences, key heads, 1); query heads that share a key head count together.
    """
    by_head = x.reshape(*rows.shape, x.shape[-1])
    variance = by_head.var(axis=-2, dtype=np.float64, where=rows.all() or rows[..., None])
    return np.asarray(np.sqrt(variance.reshape(len(rows), key_heads, -1).mean(-1, keepdims=True)))


def _grouped(x: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Figures of key heads, repeated for the query heads that share them."""
    return np.repeat(x, heads // x.shape[1], axis=1)


def cells(figures: Figures, head: int | slice = slice(None)) -> dict[str, Cell]:
    """Columns of a table: one head, or the mean over all; sequences are the draws."""

    def cell(name: str, numbers: npt.NDArray[np.float64]) -> Cell:
        numbers = numbers[:, head].reshape(len(numbers), -1).mean(axis=1)
        draws = Draws(numbers, STATISTIC.get(name.rpartition("_")[2], "mean"))
        if len(numbers) > 1:
            return draws
        return exact(numbers[0] ** 0.5 if draws.statistic == "root_mean" else numbers[0])

    return {name: cell(name, numbers) for name, numbers in figures.items()}
