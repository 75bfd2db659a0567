"""What the factor 1/sqrt(d_k) changes in one attention layer before any training.

For each input x (n, d_model), with its own random projections,

    q = x W^Q, k = x W^K, v = x W^V       W ~ N(0, w), independent; d_v = d_model
    s = scale q k^T, p = softmax(s), out = p v
    L = sum(g * out)                      g (n, d_v) ~ N(0, 1)

so that inputs are independent draws of all that is random. out, and the gradients of L to q, k and
v, come from `sdpa.attention_forward` and `sdpa.attention_backward`, s and p from
`sdpa.attention_weights`.

Predictions
-----------
Expectations over the projections, given x (w the variance of W^Q and W^K, m the mean of |x_i|^2
over i):

    mean square of s                      scale^2 d_k w^2 m^2, since E (q_i k_j)^2 is
                                          d_k w^2 |x_i|^2 |x_j|^2, and the mean of s is 0
    variance of s within a row            scale^2 d_k w^2 m sum_j |x_j - mean x|^2 / (n - 1)

With independent components of x of mean 0 and variance 1, and w = 1/d_model, they are scale^2 d_k:
the footnote of Vaswani et al., "Attention is all you need" (2017), section 3.2.1. With the w of
Glorot & Bengio (2010), 2 / (d_model + d_k), they are (d_model w)^2 times that.

Expectations of the squared norms of the gradients over W^V and g, given x, q, k and hence p. Row i
of p has the Jacobian J = diag(p) - p p^T and passes on ds = J V g. The covariance of V g is d_v C
with C_jl = w_v x_j . x_l, so that of ds is d_v M with M = J C J, in elements

    M_jl = p_j p_l (C_jl - (C p)_j - (C p)_l + p C p)

and

    |dL/dq_i|^2   scale^2 d_v sum_jl M_jl k_j . k_l
    |dL/dk_j|^2   scale^2 d_v sum_i |q_i|^2 M_jj, M of row i; rows have independent g
    |dL/dv_j|^2   d_v sum_i p_ij^2

For independent values, C = 1: E |ds|^2 = d_v (sum p^2 - 2 sum p^3 + (sum p^2)^2), which is 0 where
one weight is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

import sdpa

from .. import style
from ..measure import DEAD, SATURATED
from ..tools import estimate
from ..tools.estimate import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

VARIANCES: dict[str, Callable[[int, int], float]] = {
    "1/d_model": lambda d_model, d_out: 1 / d_model,
    "glorot": lambda d_model, d_out: 2 / (d_model + d_out),
}
"""Of the elements of a projection (d_model, d_out)."""

FEWEST_DRAWS = 30
"""With fewer draws, intervals from a normal distribution are too short."""

CHUNK = 128  # inputs at a time: the random numbers are drawn in this order, so results depend on it


class ScaleRow(NamedTuple):
    """One choice of projections, d_k and scale; every estimate is a mean over inputs."""

    projection: str
    """"1/d_model" or "glorot": the variance of W^Q, W^K and W^V."""
    d_k: int
    scale: float
    iid_variance: float
    """Variance of s for independent components of x: the footnote's d_k, times scale and factor."""
    total_variance: Estimate
    """Mean square of s; predicted given x."""
    row_variance: Estimate
    """Variance of s within a row, the part that softmax depends on; predicted given x."""
    entropy: Estimate
    """-sum_j p_ij log p_ij; log n where the weights are equal."""
    max_weight: Estimate
    saturated: Estimate
    """Share of rows whose largest weight exceeds SATURATED."""
    rms_grad_query: Estimate
    """Root of the mean of |dL/dq_i|^2; predicted given x, q and k."""
    rms_grad_key: Estimate
    rms_grad_value: Estimate
    median_grad_query: Estimate
    """Median of |dL/dq_i|."""
    median_grad_key: Estimate
    median_grad_value: Estimate
    dead_grad_query: Estimate
    """Share of rows with |dL/dq_i| < DEAD sqrt(d_v)."""
    dead_grad_key: Estimate
    dead_grad_value: Estimate


Arrays = dict[str, npt.NDArray[np.float64]]


def scale_effect(
    x: npt.NDArray[np.float32],
    *,
    d_k: Iterable[int] = (16, 64, 256),
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> list[ScaleRow]:
    """Scores, weights and gradients with and without 1/sqrt(d_k), for two kinds of projections.

    Rows that differ only in scale share their draws; all others have their own.

    Parameters
    ----------
    x : (draws, n, d_model) float32
        Inputs, independent of each other: at least 30, of at least 2 rows.
    d_k : iterable of int
    seed : int
        Of the projections and of g.
    progress : callable, optional
        Called with the number of inputs just done, 2 * len(d_k) * draws in all.

    Returns
    -------
    list of ScaleRow
        For each projection, each d_k: first scale = 1/sqrt(d_k), then scale = 1.

    Raises
    ------
    ValueError
        `x` does not have three axes, or has too few draws or rows.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> scaled, unscaled = lab.scale_effect(lab.normal(200), d_k=[64])[:2]
    >>> scaled.scale, unscaled.scale
    (0.125, 1.0)
    >>> scaled.entropy.low > unscaled.entropy.high
    True
    """
    if x.ndim != 3 or x.shape[0] < FEWEST_DRAWS or x.shape[1] < 2:
        raise ValueError(
            f"x: expected (draws, n, d_model) with at least {FEWEST_DRAWS} draws and 2 rows, "
            f"got {x.shape}"
        )
    d_model = x.shape[-1]  # and d_v
    rows = []
    for (kind, projection), width in product(enumerate(VARIANCES), d_k):
        rng = np.random.default_rng([seed, kind, width])
        scales = (width**-0.5, 1.0)
        measured: list[list[Arrays]] = [[] for _ in scales]
        for start in range(0, len(x), CHUNK):
            layer = _draw(x[start : start + CHUNK], projection, width, rng)
            for scale, parts in zip(scales, measured, strict=True):
                parts.append(_measure(layer, scale))
            if progress is not None:
                progress(len(layer.x))
        factor = (d_model * VARIANCES[projection](d_model, width)) ** 2
        for scale, parts in zip(scales, measured, strict=True):
            joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            iid = scale**2 * width * factor
            rows.append(_row(projection, width, scale, iid, joined, d_model))
    return rows


class _Layer(NamedTuple):
    """Inputs and the random numbers drawn for them; the first axis counts inputs."""

    x: npt.NDArray[np.float32]
    q: npt.NDArray[np.float32]
    k: npt.NDArray[np.float32]
    v: npt.NDArray[np.float32]
    g: npt.NDArray[np.float32]
    w: float
    """Variance of the elements of W^Q and W^K."""
    w_value: float


def _draw(
    x: npt.NDArray[np.float32], projection: str, d_k: int, rng: np.random.Generator
) -> _Layer:
    draws, _, d_model = x.shape

    def project(d_out: int) -> tuple[npt.NDArray[np.float32], float]:
        w = VARIANCES[projection](d_model, d_out)
        matrix = rng.standard_normal((draws, d_model, d_out), np.float32)
        return x @ (np.float32(w**0.5) * matrix), w

    (q, w), (k, _), (v, w_value) = project(d_k), project(d_k), project(d_model)
    return _Layer(x, q, k, v, rng.standard_normal(v.shape, np.float32), w, w_value)


def _measure(layer: _Layer, scale: float) -> Arrays:
    """Each quantity and its prediction: one number per input; of gradients, one per row."""
    _, q, k, v, g, _, _ = layer
    s = np.asarray(sdpa.attention_weights(q, k, scale=scale, stage="scores"), np.float64)
    p = np.asarray(sdpa.attention_weights(q, k, scale=scale), np.float64)
    out, lse = sdpa.attention_forward(q, k, v, scale=scale)
    grads = sdpa.attention_backward(g, q, k, v, out, lse, scale=scale)
    result = {
        "total": (s**2).mean(axis=(1, 2)),
        "row": s.var(axis=2, ddof=1).mean(axis=1),
        "entropy": -(p * np.log(np.where(p > 0, p, 1))).sum(axis=2).mean(axis=1),
        "max": p.max(axis=2).mean(axis=1),
        "saturated": (p.max(axis=2) > SATURATED).mean(axis=1),
    }
    for name in ("query", "key", "value"):
        result[f"square_{name}"] = (np.asarray(getattr(grads, name), np.float64) ** 2).sum(axis=2)
    return result | _predict(layer, scale, p)


def _predict(layer: _Layer, scale: float, p: npt.NDArray[np.float64]) -> Arrays:
    """The predictions derived in the docstring of the module: one number per input."""
    x, q, k = (np.asarray(a, np.float64) for a in layer[:3])
    n, d_k, d_v = x.shape[1], q.shape[2], layer.v.shape[2]
    m = (x**2).sum(axis=2).mean(axis=1)
    spread = ((x - x.mean(axis=1, keepdims=True)) ** 2).sum(axis=(1, 2)) / (n - 1)
    norm = (scale * layer.w) ** 2 * d_k

    # Axes: b input, i query, j and l keys.
    c = layer.w_value * x @ x.swapaxes(1, 2)
    cp = p @ c
    pcp = (cp * p).sum(axis=2)
    jcj = c[:, None] - cp[:, :, :, None] - cp[:, :, None, :] + pcp[:, :, None, None]
    jcj *= p[:, :, :, None] * p[:, :, None, :]
    kk = k @ k.swapaxes(1, 2)
    qq = (q**2).sum(axis=2)
    return {
        "expected_total": norm * m**2,
        "expected_row": norm * m * spread,
        "expected_query": scale**2 * d_v * np.einsum("bijl,bjl->b", jcj, kk) / n,
        "expected_key": scale**2 * d_v * np.einsum("bijj,bi->b", jcj, qq) / n,
        "expected_value": d_v * (p**2).sum(axis=(1, 2)) / n,
    }


def _row(projection: str, d_k: int, scale: float, iid: float, draws: Arrays, d_v: int) -> ScaleRow:
    targets = ("query", "key", "value")
    square = {name: draws[f"square_{name}"] for name in targets}
    expected = {
        name: float(draws[f"expected_{name}"].mean()) for name in ("total", "row", *targets)
    }
    rms = {
        f"rms_grad_{name}": estimate.root_mean(square[name].mean(axis=1), expected[name] ** 0.5)
        for name in targets
    }
    medians = {f"median_grad_{name}": estimate.median(square[name] ** 0.5) for name in targets}
    dead = {
        f"dead_grad_{name}": estimate.share((square[name] < DEAD**2 * d_v).mean(axis=1))
        for name in targets
    }
    return ScaleRow(
        projection=projection,
        d_k=d_k,
        scale=scale,
        iid_variance=iid,
        total_variance=estimate.mean(draws["total"], expected["total"]),
        row_variance=estimate.mean(draws["row"], expected["row"]),
        entropy=estimate.mean(draws["entropy"]),
        max_weight=estimate.mean(draws["max"]),
        saturated=estimate.share(draws["saturated"]),
        **rms,
        **medians,
        **dead,
    )


@style.plot
def plot_scale_effect(
    rows: Sequence[ScaleRow],
    projection: str = "1/d_model",
    panels: Sequence[str] = ("entropy", "saturated", "gradient"),
) -> Figure:
    """Entropy, saturated rows, rms and median of dL/dQ against d_k, scaled and not.

    Parameters
    ----------
    rows : sequence of ScaleRow
        Of `scale_effect`.
    projection : str
        The kind of projections to show.
    panels : sequence of str
        Which of the three to draw, side by side.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> rows = lab.scale_effect(lab.normal(30), d_k=[16, 64])
    >>> [axes.get_xlabel() for axes in lab.plot_scale_effect(rows).axes]
    ['$d_k$', '$d_k$', '$d_k$']
    """
    rows = [row for row in rows if row.projection == projection]
    scaled, unscaled = ([row for row in rows if (row.scale == 1) == one] for one in (False, True))
    lines = (scaled, style.SCALED, "1/sqrt(d_k)"), (unscaled, style.UNSCALED, "no scale")
    draw = {"entropy": _entropy, "saturated": _saturated, "gradient": _gradient}
    figure, grid = style.subplots(1, len(panels), size=(3.6, 3.2), squeeze=False)
    for axes, panel in zip(grid[0], panels, strict=True):
        draw[panel](axes, lines)
        axes.set_xlabel("d_k")
        style.log_axis(axes, "x", sorted({row.d_k for row in rows}))
        axes.legend()
    return figure


Lines = Iterable[tuple[Sequence[ScaleRow], str, str]]  # rows, colour, label


def _entropy(axes: Axes, lines: Lines) -> None:
    for rows, color, label in lines:
        _line(axes, rows, "entropy", line=True, color=color, label=label)
    axes.set(ylabel="entropy of a row of weights, nats", ylim=(0, None))


def _saturated(axes: Axes, lines: Lines) -> None:
    for rows, color, label in lines:
        _line(axes, rows, "saturated", 100.0, line=True, color=color, label=label)
    axes.set(ylabel=f"rows with a weight above {SATURATED:g}, %")


def _gradient(axes: Axes, lines: Lines) -> None:
    for rows, color, label in lines:
        laws = np.array([row.rms_grad_query.predicted for row in rows], float)
        first = None if axes.lines else "law of the rms"
        style.prediction(axes, [row.d_k for row in rows], laws, label=first)
        _line(axes, rows, "rms_grad_query", color=color, label=f"{label}: rms")
        median = f"{label}: median"
        _line(axes, rows, "median_grad_query", color=color, label=median, marker="^", line=True)
    style.log_axis(axes, "y", [1, 3, 10, 30])
    axes.set(ylabel="norm of a row of dL/dQ", ylim=(None, 80))


def _line(
    axes: Axes, rows: Sequence[ScaleRow], name: str, factor: float = 1.0, **options: Any
) -> None:
    figures = factor * np.array([getattr(row, name)[:3] for row in rows]).T
    style.intervals(axes, [row.d_k for row in rows], *figures, **options)
