"""Do gradients vanish? Their mean, median and share of dead rows, by target, over d_k and length.

Queries, keys, values and the upstream gradient g have independent N(0, 1) components. They are
taken as the parts of one input x = [q k v] of width 2 d_k + d_v, so that W^Q and W^K pick columns
out of x (any orthonormal projections of a normal input have this law) and dL/dW^Q = x^T dL/dQ is
defined. Loss L = sum(g * attention(q, k, v)).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

import sdpa

from .. import style, theory
from ..measure import DEAD
from ..tools.estimate import Draws, checked_slope
from ..tools.inputs import stream
from ..tools.table import Cell, Table
from .growth import CHUNK, Array
from .saturation import SCALES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TARGETS = ("score", "query", "key", "value", "weight")
"""S, the scaled scores; Q; K; V; W^Q, the projection that makes Q."""


def gradients(
    d_k: Iterable[int] = (4, 16, 64, 256, 1024),
    n: Iterable[int] = (10, 64),
    *,
    d_v: int = 64,
    seed: int = 0,
    draws: int = 100,
) -> Table:
    """Norms of the rows of the gradients with respect to S, Q, K, V and W^Q; a draw is one head.

    Returns
    -------
    Table
        Columns scale, d_k, n, and for each target rms_TARGET, the root mean square of the norms of
        rows, with the law of `theory.attention` (none for weight); median_TARGET; and dead_TARGET,
        the share of rows whose norm is below `measure.DEAD` times that of a row of g, sqrt(d_v)
        (for weight, whose rows sum over the n tokens, sqrt(n d_v)).

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> table = lab.gradients([256], [10], draws=30).where(scale="unscaled")
    >>> bool(table["dead_query"][0] > 0.1), bool(table["rms_query"][0] > 10)
    (True, True)
    """
    rows: list[dict[str, Cell]] = []
    for width, length in product(d_k, n):
        found = gradient_norms(width, length, d_v=d_v, seed=seed, draws=draws)
        for name, scale in SCALES.items():
            law = theory.attention(length, width, scale, d_v=d_v)
            row: dict[str, Cell] = {"scale": name, "d_k": width, "n": length}
            for target in TARGETS:
                square = found[f"{target} {name}"]
                predicted = getattr(law, f"grad_{target}", None)
                tokens = length if target == "weight" else 1
                dead = square < DEAD**2 * d_v * tokens
                row |= {
                    f"rms_{target}": Draws(square.mean(axis=1), "root_mean", predicted),
                    f"median_{target}": Draws(square**0.5, "median"),
                    f"dead_{target}": Draws(dead.mean(axis=1), "share"),
                }
            rows.append(row)
    return Table(f"Norms of rows of gradients, d_v = {d_v}", rows)


def gradient_norms(
    d_k: int,
    n: int,
    *,
    d_v: int = 64,
    targets: Iterable[str] = TARGETS,
    seed: int = 0,
    draws: int = 100,
) -> dict[str, Array]:
    """Squared norms of rows, (draws, rows), by "TARGET SCALE"."""
    wanted = tuple(targets)
    rng = stream(seed, "gradients", d_k, n)
    some = max(1, CHUNK // ((2 * d_k + d_v) * max(n, d_k)))
    parts = []
    for start in range(0, draws, some):
        count = min(some, draws - start)
        x = rng.standard_normal((count, n, 2 * d_k + d_v))
        parts.append(_squares(x, rng.standard_normal((count, n, d_v)), d_k, wanted))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _squares(x: Array, g: Array, d_k: int, targets: Iterable[str]) -> dict[str, Array]:
    query, key, value = x[..., :d_k], x[..., d_k : 2 * d_k], x[..., 2 * d_k :]
    found = {}
    for name, scale in SCALES.items():
        out, lse = sdpa.attention_forward(query, key, value, scale=scale)
        grads = sdpa.attention_backward(g, query, key, value, out, lse, scale=scale)
        assert grads.query is not None
        for target in targets:
            if target == "score":
                weights = sdpa.attention_weights(query, key, scale=scale)
                gradient = sdpa.softmax_backward(g @ value.swapaxes(-1, -2), weights)
            elif target == "weight":
                gradient = x.swapaxes(-1, -2) @ grads.query
            else:
                gradient = getattr(grads, target)
            found[f"{target} {name}"] = np.square(gradient).sum(axis=-1)
    return found


def log_gradients(
    d_k: int, n: int, *, d_v: int = 64, seed: int = 0, draws: int = 100
) -> dict[str, Array]:
    """Mean of ln |dL/dq_i| over the rows of each head, by scale: (draws,).

    In float64 and without cancellation. dL/ds_j = p_j (y_j - sum_k p_k y_k), y = V g, is computed
    as p_j sum_k p_k (y_j - y_k): of a row that is one-hot to rounding, the difference of the first
    form is nothing but rounding error. Without the scale |dL/dq| of a saturated row is about
    sqrt(2 d_k) |y_1 - y_2| e^-gap, the gap being that of its two largest scores, so that

        E ln |dL/dq| = constant + ln(d_k) / 2 - E|q| theory.top_gap(n)

    Examples
    --------
    >>> from sdpa_lab.experiments.gradients import log_gradients
    >>> found = log_gradients(1024, 10, draws=40)
    >>> bool(found["unscaled"].mean() < found["scaled"].mean() - 8)
    True
    """
    rng = stream(seed, "log gradients", d_k, n)
    found: dict[str, list[float]] = {name: [] for name in SCALES}
    for _ in range(draws):
        query, key = rng.standard_normal((2, n, d_k))
        value, upstream = rng.standard_normal((2, n, d_v))
        y = upstream @ value.T
        for name, scale in SCALES.items():
            p = sdpa.attention_weights(query, key, scale=scale)
            grad = p * np.einsum("ijk,ik->ij", y[:, :, None] - y[:, None, :], p)
            factor = d_k**-0.5 if scale is None else scale
            norms = factor * np.linalg.norm(grad @ key, axis=1)
            found[name].append(float(np.log(norms).mean()))
    return {name: np.array(values) for name, values in found.items()}


def exponents(
    d_k: Iterable[int] = (16, 32, 64, 128, 256, 512, 1024),
    n: Iterable[int] = (10, 64),
    *,
    d_v: int = 64,
    seed: int = 0,
    draws: int = 320,
    batches: int = 16,
    typical: bool = True,
) -> Table:
    """Exponent of the gradient to Q in d_k: slope of ln(norm) over ln(d_k), by least squares.

    The draws are cut into `batches` independent parts; each gives one slope.

    Returns
    -------
    Table
        Columns scale, n; rms, the exponent of the root mean square of |dL/dq_i|, with the slope
        of the law on the same d_k; typical, that of its geometric mean over rows, by
        `log_gradients`. Without the scale it is no power of d_k, and the slope depends on the range
        of d_k. Left out unless `typical`.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> table = lab.exponents([16, 64], [10], draws=40, batches=4)
    >>> bool(table.where(scale="unscaled")["rms"][0] > 0)
    True
    """
    widths = list(d_k)
    checked_slope("d_k", widths)
    rows: list[dict[str, Cell]] = []
    for length in n:
        norms = [
            gradient_norms(w, length, d_v=d_v, targets=("query",), seed=seed, draws=draws)
            for w in widths
        ]
        logs = [
            log_gradients(w, length, d_v=d_v, seed=seed, draws=draws) if typical else {}
            for w in widths
        ]
        for name, scale in SCALES.items():
            cut = [np.array_split(norm[f"query {name}"], batches) for norm in norms]
            laws = [theory.attention(length, w, scale, d_v=d_v).grad_query for w in widths]

            def slopes(number: Callable[[Array], float], cut: list[list[Array]] = cut) -> Array:
                values = [[number(part) for part in parts] for parts in cut]
                return np.asarray(np.polyfit(np.log(widths), values, 1)[0])

            row: dict[str, Cell] = {"scale": name, "n": length}
            row["rms"] = Draws(
                slopes(lambda square: 0.5 * np.log(square.mean())),
                predicted=float(np.polyfit(np.log(widths), np.log(laws), 1)[0]),
            )
            if typical:
                parts = [np.array_split(log[name], batches) for log in logs]
                means = [[part.mean() for part in log] for log in parts]
                row["typical"] = Draws(np.polyfit(np.log(widths), means, 1)[0])
            rows.append(row)
    return Table("Exponents of the gradient to Q in d_k", rows)


@style.plot
def plot_exponents(table: Table) -> Figure:
    """Exponents of the root mean square and of the typical row over n."""
    figure, panels = style.subplots(1, 2, sharex=True)
    titles = {"rms": "root mean square", "typical": "geometric mean over rows"}
    for axes, (column, title) in zip(panels, titles.items(), strict=True):
        for name, color in (("scaled", style.SCALED), ("unscaled", style.UNSCALED)):
            some = table.where(scale=name)
            style.columns(axes, some, "n", column, color=color, label=name)
        for power in (0, -1):
            axes.axhline(power, color=style.BLACK, linewidth=0.8, linestyle=":")
        style.log_axis(axes, "x", np.unique(table["n"]))
        axes.set(xlabel="keys n", title=title)
    panels[0].set(ylabel="exponent of |dL/dq| in d_k; dotted: 0 and -1")
    panels[0].legend()
    return figure


@style.plot
def plot_gradient_rows(found: Table) -> Figure:
    """Norms of single rows of dL/dQ over d_k, with the scale and without, at the first n.

    Parameters
    ----------
    found : Table
        Returned by `gradients`. Up to 100 rows of each setting are drawn, from its first draws;
        root mean square and median are those of all.
    """
    found = found.where(n=found["n"][0])
    figure, panels = style.subplots(1, 2, size=(4.4, 3.5), sharey=True)
    titles = {"scaled": "with 1/sqrt(d_k)", "unscaled": "without the scale"}
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        some = found.where(scale=name)
        color = style.SCALED if name == "scaled" else style.UNSCALED
        for row in some.rows:
            cell = row["median_query"]
            norms = cell.values.ravel()[:100] if isinstance(cell, Draws) else np.zeros(0)
            place = row["d_k"] * np.geomspace(0.75, 1.33, len(norms))
            axes.plot(place, np.maximum(norms, LEAST), ".", color=color, markersize=3, alpha=0.5)
        for column, line, text in (("rms", "-", "root mean square"), ("median", "--", "median")):
            y = np.maximum(some[f"{column}_query"], LEAST)
            axes.plot(some["d_k"], y, line, color=style.BLACK, label=text)
        axes.set(yscale="log", xlabel="d_k", title=title)
        style.log_axis(axes, "x", np.unique(some["d_k"]))
    panels[0].set(ylabel="|dL/dq| of a row", ylim=(LEAST / 2, 300))
    panels[1].legend(loc="lower left")
    return figure


LEAST = 1e-6
"""A norm below it is drawn there."""


@style.plot
def plot_gradients(table: Table) -> Figure:
    """Root mean square, median and dead rows of dL/dQ over d_k."""
    figure, panels = style.subplots(1, 3, size=(3.8, 3.3))
    for axes, kind in zip(panels, ("rms", "median", "dead"), strict=True):
        for name, color in (("scaled", style.SCALED), ("unscaled", style.UNSCALED)):
            for length, marker in zip(np.unique(table["n"]), style.MARKERS, strict=False):
                some = table.where(scale=name, n=length)
                label = f"{name}, n = {length}"
                column = f"{kind}_query"
                style.columns(axes, some, "d_k", column, color=color, marker=marker, label=label)
        style.log_axis(axes, "x", np.unique(table["d_k"]))
        axes.set(xlabel="d_k")
    style.log_axis(panels[0], "y", (1, 2, 5, 10, 20, 50))
    panels[0].set(ylabel="root mean square of |dL/dq|")
    panels[1].set(yscale="log", ylabel="median of |dL/dq|")
    panels[2].set(ylabel="share of rows without gradient")
    panels[2].legend()
    return figure
