"""Speed of attention and its gradients against the formula in plain NumPy, in the same minute."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

import sdpa

from .. import style
from ..tools.clock import sample, shortest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = npt.NDArray[Any]

SHAPES = ((10, 64), (1797, 8, 64), (8, 1024, 64))
"""(..., heads, L, d): one small matrix, the digits images, a layer of eight heads."""

SAMPLE = 1e-3  # least seconds of one sample, so that the clock's resolution does not matter

# Seconds. Threads that spin for a while after their work take a CPU from the other side; only the
# later calls of a turn are undisturbed.
TURN = 0.08


class SpeedRow(NamedTuple):
    """One shape, one direction."""

    shape: tuple[int, ...]
    """Of query, key, value and the upstream gradient, float32."""
    direction: str
    """"forward" or "backward"."""
    numpy_seconds: float
    """Of the shortest call in all turns; the same holds for sdpa_seconds."""
    sdpa_seconds: float
    ratio: float
    """numpy_seconds / sdpa_seconds."""
    gflops: float
    """Of sdpa, in 1e9 per second: 4 L^2 d per head forward, 10 L^2 d backward."""
    difference: float
    """Largest difference between the results of the two."""
    turns: int


def speed(
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    *,
    seconds: float = 2.0,
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> list[SpeedRow]:
    """Time sdpa and NumPy alternately, on N(0, 1) data, each with its default number of threads.

    Forward computes out from q, k and v. Backward computes the three gradients from the results of
    each side's own forward: NumPy keeps the weights p, sdpa keeps out and lse and recomputes p.

    Parameters
    ----------
    shapes : sequence of (..., L, d)
    seconds : float
        For each shape and direction; more where five turns of both take longer.
    seed : int
        Of the data.
    progress : callable, optional
        Called with 1 after each shape and direction, 2 * len(shapes) times in all.

    Returns
    -------
    list of SpeedRow

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> [row.direction for row in lab.speed([(10, 64)], seconds=0.01)]
    ['forward', 'backward']
    """
    rows = []
    for shape in shapes:
        for direction, flops, ours, theirs in _directions(shape, seed):
            pairs = zip(ours(), theirs(), strict=True)
            difference = max(float(abs(a - b).max()) for a, b in pairs)
            ours_best, numpy_best, turns = _race(ours, theirs, seconds)
            rows.append(
                SpeedRow(
                    shape=shape,
                    direction=direction,
                    numpy_seconds=numpy_best,
                    sdpa_seconds=ours_best,
                    ratio=numpy_best / ours_best,
                    gflops=flops / ours_best / 1e9,
                    difference=difference,
                    turns=turns,
                )
            )
            if progress is not None:
                progress(1)
    return rows


Call = Callable[[], tuple[Array, ...]]


def _directions(shape: tuple[int, ...], seed: int) -> list[tuple[str, float, Call, Call]]:
    """(direction, flops, call of sdpa, call of NumPy)."""
    rng = np.random.default_rng(seed)
    q, k, v, g = (rng.standard_normal(shape, np.float32) for _ in range(4))
    out, lse = sdpa.attention_forward(q, k, v)
    p = numpy_weights(q, k)
    products = float(np.prod(shape)) * shape[-2]
    return [
        (
            "forward",
            4 * products,
            lambda: (sdpa.attention(q, k, v),),
            lambda: (numpy_weights(q, k) @ v,),
        ),
        (
            "backward",
            10 * products,
            lambda: _present(sdpa.attention_backward(g, q, k, v, out, lse)),
            lambda: numpy_backward(g, q, k, v, p),
        ),
    ]


def _present(gradients: sdpa.AttentionGradients) -> tuple[Array, ...]:
    return tuple(gradient for gradient in gradients[:3] if gradient is not None)


def _race(ours: Call, theirs: Call, seconds: float) -> tuple[float, float, int]:
    """Shortest time of each, alternately for `seconds` and at least five times, and how many."""
    calls = ours, theirs
    loops = [max(1, int(SAMPLE / sample(call, 1, time.perf_counter))) for call in calls]
    best = [float("inf")] * 2
    turns = 0
    end = time.perf_counter() + seconds
    while turns < 5 or time.perf_counter() < end:
        for i, call in enumerate(calls):
            best[i] = min(best[i], shortest(call, loops[i], TURN))
        turns += 1
    return best[0], best[1], turns


def numpy_weights(q: Array, k: Array) -> Array:
    """softmax(q k^T / sqrt(d)) as NumPy users write it, in place where it can be."""
    s = q @ k.swapaxes(-1, -2)
    s *= np.float32(q.shape[-1] ** -0.5)
    s -= s.max(axis=-1, keepdims=True)
    np.exp(s, out=s)
    s /= s.sum(axis=-1, keepdims=True)
    return s


def numpy_backward(g: Array, q: Array, k: Array, v: Array, p: Array) -> tuple[Array, Array, Array]:
    """Gradients of sum(g * (p v)) to q, k and v, where p = numpy_weights(q, k)."""
    grad_v = p.swapaxes(-1, -2) @ g
    ds = g @ v.swapaxes(-1, -2)
    ds -= (ds * p).sum(axis=-1, keepdims=True)
    ds *= p
    ds *= np.float32(q.shape[-1] ** -0.5)
    return ds @ k, ds.swapaxes(-1, -2) @ q, grad_v


@style.plot
def plot_speed(rows: Sequence[SpeedRow]) -> Figure:
    """How many times as fast as NumPy sdpa is, by shape and direction.

    Parameters
    ----------
    rows : sequence of SpeedRow
        Of `speed`.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> from sdpa_lab.experiments.speed import SpeedRow
    >>> row = SpeedRow((10, 64), "forward", 3e-5, 1e-5, 3.0, 2.6, 1e-7, 5)
    >>> float(lab.plot_speed([row]).axes[0].patches[0].get_width())
    3.0
    """
    figure, axes = style.subplots(size=(4.2, 0.4 * len(rows) + 0.8))
    names = [f"{' x '.join(map(str, row.shape))}, {row.direction}" for row in rows]
    colors = [style.BLUE if row.direction == "forward" else style.ORANGE for row in rows]
    axes.barh(names, [row.ratio for row in rows], color=colors)
    for i, row in enumerate(rows):  # beside the axes, where no bar and no line crosses them
        text = f"{row.ratio:.1f}"
        axes.text(1.02, i, text, transform=axes.get_yaxis_transform(), verticalalignment="center")
    axes.axvline(1, color=style.BLACK, linewidth=1.0)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("time of NumPy / time of sdpa")
    return figure
