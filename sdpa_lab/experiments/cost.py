"""Time of additive and of dot-product attention over the length and the width, and its exponents.

Both at equal n and d: n queries and keys of width d, values of width d, and d hidden channels. With
the projections of each token taken once, additive attention does n^2 d tanh and 4 n d^2 flops of
projections, so that its time grows as n^2 d where n is large beside d, as that of the dot product
does. Only where a program projects anew for each pair does it grow as n^2 d^2.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import sdpa

from .. import style
from ..tools.clock import Call, sample
from ..tools.estimate import Draws
from ..tools.inputs import stream
from ..tools.table import Cell, Table
from .eager import framework, one_thread
from .speed import numpy_weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = npt.NDArray[Any]

LEADING = {
    "dot": {"n": 2, "d": 1},
    "additive": {"n": 2, "d": 1},
    "dot, NumPy": {"n": 2, "d": 1},
    "additive, NumPy": {"n": 2, "d": 1},
    "dot, eager": {"n": 2, "d": 1},
    "additive, eager": {"n": 2, "d": 1},
    "additive, each pair": {"n": 2, "d": 2},
}
"""What is timed, and the exponents of its leading term in n and in d: both kinds of attention by
the package, both in NumPy and operation by operation in PyTorch (`eager`) with one projection per
token, and additive attention with both projections per pair, as the formula reads."""


def cost(
    kinds: Iterable[str] = ("dot", "additive"),
    lengths: Sequence[int] = (256, 512, 1024, 2048),
    widths: Sequence[int] = (16, 32, 64, 128, 256),
    *,
    n: int = 1024,
    d: int = 64,
    turns: int = 20,
    seed: int = 0,
) -> Table:
    """Seconds of one call in float32 on one thread, along n at width `d` and along d at length `n`.

    In each turn everything is timed once, as the shortest of three calls; a draw is one turn. Time
    is the thread's CPU time: other processes would lengthen long calls more than short ones.

    Parameters
    ----------
    kinds : iterable of str
        Of LEADING. "additive, NumPy" holds n^2 d numbers, "additive, each pair" three times that.
    lengths, widths : sequences of int
    n, d : int
        The length at which the widths vary, and the width at which the lengths vary.
    turns : int
    seed : int
        Seed of the data.

    Returns
    -------
    Table
        Columns kind; axis, "n" or "d", along which the row belongs; n; d; seconds.

    Raises
    ------
    ValueError
        `kinds` contains an unknown name.
    ImportError
        threadpoolctl, which keeps NumPy's kinds to one thread, is not installed.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> table = lab.cost(lengths=[16, 32], widths=[8, 16], n=16, d=8, turns=3)
    >>> list(table.columns)[:5]
    ['kind', 'axis', 'n', 'd', 'seconds']
    """
    kinds = list(kinds)
    points = [("n", length, d) for length in lengths] + [("d", n, width) for width in widths]
    keys = [(kind, *point) for kind in kinds for point in points]
    calls = [_call(kind, length, width, seed) for kind, _, length, width in keys]
    with _one_thread(kinds):
        for call in calls:
            call()
        seconds = [[_shortest(call) for call in calls] for _ in range(turns)]
    rows: list[dict[str, Cell]] = [
        {"kind": kind, "axis": axis, "n": length, "d": width, "seconds": Draws(column, "median")}
        for (kind, axis, length, width), column in zip(keys, np.transpose(seconds), strict=True)
    ]
    return Table("Seconds of one call, one thread, float32", rows)


def cost_exponents(table: Table) -> Table:
    """Slopes of ln(seconds) over ln(n) and ln(d), by least squares; a draw is a turn of `cost`.

    Returns
    -------
    Table
        Columns kind; axis; exponent, with that of the leading term as prediction. At sizes that can
        be timed other terms count as well: softmax, n^2 at any width; projections, n d^2.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> table = lab.cost(["dot"], lengths=[64, 512], widths=[8, 16], n=16, turns=5)
    >>> bool(lab.cost_exponents(table).where(axis="n")["exponent"][0] > 1)
    True
    """
    rows: list[dict[str, Cell]] = []
    for kind, axis in dict.fromkeys((row["kind"], row["axis"]) for row in table.rows):
        part = table.where(kind=kind, axis=axis)
        times = np.array([drawn(row["seconds"]).values for row in part.rows])
        slopes = np.polyfit(np.log(part[str(axis)]), np.log(times), 1)[0]
        predicted = LEADING[str(kind)][str(axis)]
        rows.append(
            {"kind": kind, "axis": axis, "exponent": Draws(slopes, "median", float(predicted))}
        )
    return Table("Exponents of the time in n and in d", rows)


def cost_ratio(table: Table, slow: str = "additive", fast: str = "dot") -> Table:
    """Time of one kind over that of another at equal n and d; a draw is a turn of `cost`.

    Returns
    -------
    Table
        Columns axis; n; d; ratio.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> table = lab.cost(lengths=[256], widths=[64], n=256, turns=5)
    >>> len(lab.cost_ratio(table))
    2
    """
    rows: list[dict[str, Cell]] = []
    for row in table.where(kind=fast).rows:
        place = {name: row[name] for name in ("axis", "n", "d")}
        other = table.row(kind=slow, **place)
        ratio = drawn(other["seconds"]).values / drawn(row["seconds"]).values
        rows.append({**place, "ratio": Draws(ratio, "median")})
    return Table(f"Time of {slow} over that of {fast}", rows)


def drawn(cell: Cell) -> Draws:
    """A cell of these tables, which hold draws."""
    if not isinstance(cell, Draws):
        raise TypeError(f"cell: expected draws, got {cell!r}")
    return cell


@style.plot
def plot_cost(table: Table) -> Figure:
    """Seconds over n and over d on logarithmic axes, with the fitted exponents.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> table = lab.cost(lengths=[16, 32], widths=[8, 16], n=16, d=8, turns=3)
    >>> lab.plot_cost(table).axes[0].get_ylabel()
    'ms'
    """
    figure, panels = style.subplots(1, 2, sharey=True)
    exponents = cost_exponents(table)
    kinds = list(dict.fromkeys(str(row["kind"]) for row in table.rows))
    for axes, axis, fixed in zip(panels, "nd", "dn", strict=True):
        for kind, (color, marker) in zip(kinds, style.cycle(len(kinds)), strict=True):
            part = table.where(kind=kind, axis=axis)
            (slope,) = exponents.where(kind=kind, axis=axis)["exponent"]
            points = (1e3 * ends for ends in part.interval("seconds"))
            label = f"{kind}: {axis}^{slope:.2f}"
            style.intervals(
                axes, part[axis], *points, color=color, marker=marker, line=True, label=label
            )
        at = table.where(axis=axis)[fixed][0]
        style.log_axis(axes, "x", sorted(set(table.where(axis=axis)[axis])))
        axes.set(xlabel=f"${axis}$, at {fixed} = {at}", yscale="log")
        axes.legend()
    panels[0].set_ylabel("ms")
    return figure


# ------------------------------------------------------------------------------ calls


def _call(kind: str, n: int, d: int, seed: int) -> Call:
    """One forward call on N(0, 1) data, scores of a standard deviation of about 1."""
    if kind not in LEADING:
        raise ValueError(f"kinds: expected some of {list(LEADING)}, got {kind!r}")
    rng = stream(seed, "cost", kind, n, d)
    query, key, value = rng.standard_normal((3, n, d), np.float32)
    w_query, w_key = rng.standard_normal((2, d, d), np.float32) * np.float32(d**-0.5)
    weights = w_query, w_key, rng.standard_normal(d, np.float32) * np.float32(d**-0.5)
    dot, additive = eager_calls(query, key, value, *weights)
    calls: dict[str, Call] = {
        "dot, eager": dot,
        "additive, eager": additive,
        "dot": lambda: sdpa.attention(query, key, value, workers=1),
        "additive": lambda: sdpa.additive_attention(query, key, value, *weights, workers=1),
        "dot, NumPy": lambda: numpy_weights(query, key) @ value,
        "additive, NumPy": lambda: numpy_additive(query, key, value, *weights),
        "additive, each pair": lambda: each_pair(query, key, value, *weights),
    }
    return calls[kind]


def numpy_additive(
    query: Array, key: Array, value: Array, w_query: Array, w_key: Array, w_score: Array
) -> Array:
    """softmax(tanh(query w_query + key w_key) w_score) value as NumPy users write it, in place."""
    hidden = (query @ w_query)[:, None] + key @ w_key
    return _attend(np.tanh(hidden, out=hidden) @ w_score, value)


def eager_calls(query: Array, key: Array, value: Array, *weights: Array) -> tuple[Call, Call]:
    """Both kinds, operation by operation, each into an array of its own."""
    code = framework()
    q, k, v, w_query, w_key, w_score = map(code.array, (query, key, value, *weights))

    def dot() -> Any:
        return code.softmax(q @ k.T / q.shape[1] ** 0.5) @ v

    def additive() -> Any:
        return code.softmax(code.tanh((q @ w_query)[:, None] + k @ w_key) @ w_score) @ v

    return dot, additive


def each_pair(
    query: Array, key: Array, value: Array, w_query: Array, w_key: Array, w_score: Array
) -> Array:
    """Like `numpy_additive`, but with both projections computed for every pair, n^2 of each."""
    pairs = (len(query), len(key), query.shape[1])
    hidden = np.broadcast_to(query[:, None], pairs).reshape(-1, pairs[2]) @ w_query
    hidden += np.broadcast_to(key, pairs).reshape(-1, pairs[2]) @ w_key
    return _attend((np.tanh(hidden, out=hidden) @ w_score).reshape(pairs[:2]), value)


def _attend(s: Array, value: Array) -> Array:
    s -= s.max(axis=-1, keepdims=True)
    np.exp(s, out=s)
    return np.asarray((s @ value) / s.sum(axis=-1, keepdims=True))


def _shortest(call: Call) -> float:
    return min(sample(call, 1, time.thread_time) for _ in range(3))


@contextmanager
def _one_thread(kinds: Sequence[str]) -> Iterator[None]:
    """Limits BLAS and PyTorch to one thread for the kinds that use them; needs threadpoolctl."""
    with ExitStack() as limits:
        if not set(kinds) <= {"dot", "additive"}:
            from threadpoolctl import threadpool_limits

            limits.enter_context(threadpool_limits(1, user_api="blas"))
        if {"dot, eager", "additive, eager"} & set(kinds):
            limits.enter_context(one_thread())
        yield
