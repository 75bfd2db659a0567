"""One head of attention with the settings of the explorer, computed by the C routines."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import log, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

import sdpa

from . import style, theory
from .tools.inputs import digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = npt.NDArray[np.float64]

SCALES: dict[str, Callable[[int], float]] = {
    "1/sqrt(d_k)": lambda d_k: 1 / sqrt(d_k),
    "1": lambda d_k: 1.0,
    "1/(2 sqrt(d_k))": lambda d_k: 0.5 / sqrt(d_k),
    "1/ln(d_k)": lambda d_k: 1 / log(d_k),
    "1/d_k": lambda d_k: 1 / d_k,
}

INPUTS = ("random", "digits")

DRAWS = 40
"""Of values and upstream gradients, which show how far those of one draw scatter."""

D_V = 64
"""Width of values and of the upstream gradient, and of the images before projection."""


class Explored(NamedTuple):
    """One draw."""

    d_k: int
    scale: float
    correlation: float
    scores: Array
    """(n, n)"""
    weights: Array
    entropy: float
    """Mean over rows, nats."""
    jacobian: float
    """Root mean square over rows of the Frobenius norm of the softmax Jacobian."""
    spread: float
    """Standard deviation of the scores within a row, root mean square over rows."""
    gradients: dict[str, Array]
    """Norms of the rows of dL/dQ, dL/dK and dL/dV, for L = sum(g * out), g ~ N(0, 1)."""
    laws: dict[str, float]
    """Their predicted root mean squares, by `gradient_laws`; for images that of dL/dV alone,
    because their values depend on each other."""
    scatter: dict[str, tuple[float, float]]
    """Between which lie the root mean squares of all but two of DRAWS other draws of g, and of v
    where it is random, with the same scores."""


def explore(
    d_k: int = 64,
    n: int = 16,
    scale: str | float = "1/sqrt(d_k)",
    correlation: float = 0.0,
    seed: int = 0,
    input: str = "random",
) -> Explored:
    """Scores, weights and gradients of one head on one draw.

    With random input q_i, z_i, v_i ~ N(0, 1) and k_i = r q_i + sqrt(1 - r^2) z_i, r the
    correlation. With digits, rows of pixels as `sdpa_lab.digits` has them, projected by W^Q and
    W^K = r W^Q + sqrt(1 - r^2) W', all of variance 1/64.

    Parameters
    ----------
    d_k, n : int
        Width of queries and keys; positions, for digits at most 8 * 1797.
    scale : str or float
        One of SCALES, or the factor itself.
    correlation : float
        From 0 to 1.
    seed : int
    input : {"random", "digits"}

    Returns
    -------
    Explored

    Raises
    ------
    ImportError
        Digits without scikit-learn.
    ValueError
        `scale` or `input` is unknown, or infinite for this `d_k`, or `correlation` is out of range.

    Examples
    --------
    >>> from sdpa_lab.explore import explore
    >>> scaled, unscaled = (explore(256, scale=scale) for scale in ("1/sqrt(d_k)", "1"))
    >>> scaled.entropy > explore(256, scale=0.2).entropy > unscaled.entropy
    True
    """
    if input not in INPUTS:
        raise ValueError(f"input: expected one of {', '.join(INPUTS)}, got {input!r}")
    if isinstance(scale, str) and scale not in SCALES:
        raise ValueError(f"scale: expected a number or one of {', '.join(SCALES)}, got {scale!r}")
    if scale == "1/ln(d_k)" and d_k < 2:
        raise ValueError(f"d_k: expected at least 2 for the scale 1/ln(d_k), got {d_k}")
    if not 0 <= correlation <= 1:
        raise ValueError(f"correlation: expected 0 to 1, got {correlation}")
    factor = SCALES[scale](d_k) if isinstance(scale, str) else float(scale)
    query, key, value, grad_out = _operands(d_k, n, correlation, seed, input)

    forward = sdpa.attention_forward(query, key, value, scale=factor)
    gradients = sdpa.attention_backward(grad_out, query, key, value, *forward, scale=factor)
    rows = sdpa.attention_statistics(query, key, scale=factor)
    jacobian = rows.sum_p2 - 2 * rows.sum_p3 + rows.sum_p2**2
    laws = gradient_laws(query, key, factor)
    return Explored(
        d_k=d_k,
        scale=factor,
        correlation=correlation,
        scores=sdpa.attention_weights(query, key, scale=factor, stage="scores"),
        weights=sdpa.attention_weights(query, key, scale=factor),
        entropy=float(rows.entropy.mean()),
        jacobian=float(np.maximum(jacobian, 0).mean()) ** 0.5,
        spread=float(rows.score_var.mean()) ** 0.5,
        gradients=_norms(gradients),
        laws={name: law for name, law in laws.items() if input == "random" or name == "V"},
        scatter=_scatter(query, key, value, factor, seed, input),
    )


def _norms(gradients: sdpa.AttentionGradients) -> dict[str, Array]:
    targets = {"Q": gradients.query, "K": gradients.key, "V": gradients.value}
    return {name: np.linalg.norm(np.asarray(x), axis=1) for name, x in targets.items()}


def _scatter(
    query: Array, key: Array, value: Array, scale: float, seed: int, input: str
) -> dict[str, tuple[float, float]]:
    """All but the smallest and the largest root mean square of DRAWS draws."""
    rng = np.random.default_rng([seed, DRAWS])
    found: dict[str, list[float]] = {"Q": [], "K": [], "V": []}
    for _ in range(DRAWS):
        grad_out = rng.standard_normal(value.shape)
        if input == "random":
            value = rng.standard_normal(value.shape)
        forward = sdpa.attention_forward(query, key, value, scale=scale)
        gradients = sdpa.attention_backward(grad_out, query, key, value, *forward, scale=scale)
        for name, norms in _norms(gradients).items():
            found[name].append(_rms(norms))
    return {name: (sorted(draws)[1], sorted(draws)[-2]) for name, draws in found.items()}


def _operands(
    d_k: int, n: int, correlation: float, seed: int, input: str
) -> tuple[Array, Array, Array, Array]:
    """Query, key, value and upstream gradient, as `explore` describes them."""
    rng = np.random.default_rng([seed, d_k, n])
    height = n if input == "random" else D_V
    rest = sqrt(1 - correlation**2)
    query: Array = rng.standard_normal((height, d_k))
    key: Array = correlation * query + rest * rng.standard_normal((height, d_k))
    value: Array = rng.standard_normal((height, D_V))
    if input == "digits":
        images = digits(-(-n // 8), d_model=D_V, seed=seed)
        x = images.reshape(-1, D_V)[:n].astype(np.float64) / sqrt(D_V)
        query, key, value = x @ query, x @ key, x @ value
    return query, key, value, rng.standard_normal((n, D_V))


def gradient_laws(query: Array, key: Array, scale: float) -> dict[str, float]:
    """Root mean square over rows of dL/dQ, dL/dK and dL/dV, expected over v and g of N(0, 1).

    Row i of the weights p has the Jacobian J = diag(p) - p p^T and passes on ds = J V g. V g has
    independent elements of variance D_V, so with the mean key m = sum_j p_j k_j

        |dL/dq_i|^2   D_V scale^2 |J K|^2 = D_V scale^2 sum_j p_j^2 |k_j - m|^2
        |dL/dk_j|^2   D_V scale^2 sum_i |q_i|^2 (J J)_jj, in the sum over j |q_i|^2 |J|^2
        |dL/dv_j|^2   D_V sum_i p_ij^2

    Parameters
    ----------
    query, key : (n, d_k) ndarray
    scale : float

    Returns
    -------
    dict of float
        For "Q", "K" and "V".

    Examples
    --------
    >>> import numpy as np
    >>> from sdpa_lab.explore import gradient_laws
    >>> zeros = np.zeros((4, 2))  # equal weights of 1/4
    >>> gradient_laws(zeros, zeros, 1.0)
    {'Q': 0.0, 'K': 0.0, 'V': 4.0}
    """
    p = sdpa.attention_weights(query, key, scale=scale)
    rows = sdpa.attention_statistics(query, key, scale=scale)
    jacobian = rows.sum_p2 - 2 * rows.sum_p3 + rows.sum_p2**2
    mean = sdpa.attention(query, key, key, scale=scale)
    apart = (key**2).sum(axis=1) - 2 * mean @ key.T + (mean**2).sum(axis=1)[:, None]
    squares = {
        "Q": scale**2 * (p**2 * apart).sum(axis=1),
        "K": scale**2 * (query**2).sum(axis=1) * jacobian,
        "V": rows.sum_p2,
    }
    # Rounding may give less than 0 where one weight is 1.
    return {name: sqrt(D_V * max(0.0, float(x.mean()))) for name, x in squares.items()}


@cache
def _laws(n: int) -> tuple[Array, Array, Array]:
    """Standard deviations; entropy and root mean square norm of the Jacobian there."""
    sigma = np.geomspace(0.05, 64.0, 21)
    laws = [theory.weights(n, float(s)) for s in sigma]
    return sigma, np.array([w.entropy for w in laws]), np.array([w.jacobian**0.5 for w in laws])


@style.plot
def plot_explored(explored: Explored) -> Figure:
    """Histogram of the scores, weights, entropy, Jacobian and gradients, with the laws as curves.

    Parameters
    ----------
    explored : Explored
    """
    n = len(explored.weights)
    figure, axes = style.subplots(2, 3, size=(3.7, 2.9))
    (histogram, weights, gradients), (entropy, jacobian, numbers) = axes
    _plot_scores(histogram, explored)
    sdpa.plot.weights(explored.weights, ax=weights)
    weights.images[0].set_clim(0, 1)  # the same colours at every setting
    weights.grid(visible=False)
    weights.set_title("weights")

    names = list(explored.gradients)
    gradients.boxplot([np.maximum(g, 1e-8) for g in explored.gradients.values()], whis=(0, 100))
    places = np.arange(1, len(names) + 1)
    found = [_rms(explored.gradients[name]) for name in names]
    gradients.plot(places, np.maximum(found, 1e-8), "o", color=style.VERMILION, label="rms")
    laws = np.maximum([explored.laws.get(name, np.nan) for name in names], 1e-8)
    gradients.hlines(laws, places - 0.35, places + 0.35, color=style.BLACK, label="its law")
    low, high = np.maximum(np.transpose([explored.scatter[name] for name in names]), 1e-8)
    gradients.vlines(places + 0.3, low, high, color=style.SKY, lw=4, label="other draws")
    gradients.legend()
    gradients.set_xticks(places, [f"dL/d{name}" for name in names])
    gradients.set(yscale="log", ylim=(1e-8, 1e3), title="norms of the gradient's rows")

    sigma, law_entropy, law_jacobian = _laws(n)
    for ax, law, value, title in (
        (entropy, law_entropy, explored.entropy, "entropy of a row, nats"),
        (jacobian, law_jacobian, explored.jacobian, "norm of the Jacobian"),
    ):
        style.prediction(ax, sigma, law, label=f"{n} independent normal scores")
        ax.plot([explored.spread], [value], "o", color=style.VERMILION, label="this draw")
        style.log_axis(ax, "x", [0.1, 1, 10])
        ax.set(xlabel="std of scores within a row", title=title, ylim=(0, None))
        ax.legend(loc="lower left")
    numbers.axis("off")
    scatter = explored.scatter
    shares = [
        f"dL/d{name}: rms {rms:.3g}"
        + (f", law {explored.laws[name]:.3g}" if name in explored.laws else "")
        for name, rms in zip(names, found, strict=True)
    ]
    ranges = [f"dL/d{name}: {low:.3g} to {high:.3g}" for name, (low, high) in scatter.items()]
    lines = [f"scale {explored.scale:.4g}", f"entropy {explored.entropy:.4f}"]
    lines += [f"Jacobian {explored.jacobian:.4f}", *shares]
    lines += ["", "One draw scatters about its law.", f"{DRAWS - 2} of {DRAWS} others have"]
    lines += ranges
    numbers.text(0, 1, "\n".join(lines), va="top", family="monospace")
    return figure


def _plot_scores(axes: Axes, explored: Explored) -> None:
    n, d_k, r = len(explored.scores), explored.d_k, explored.correlation
    axes.hist(explored.scores.ravel(), bins=31, density=True, color=style.SKY)
    x = np.linspace(*axes.get_xlim(), 201)
    spread = abs(explored.scale) * sqrt(d_k)
    if spread > 0:
        itself = _normal(x, r * explored.scale * d_k, spread * sqrt(1 + r * r))
        density = ((n - 1) * _normal(x, 0.0, spread) + itself) / n
        style.prediction(axes, x, density, label="independent rows")
        axes.legend()
    axes.set(xlabel="score", title="density of the scores")


def _normal(x: Array, mean: float, spread: float) -> Any:
    return np.exp(-(((x - mean) / spread) ** 2) / 2) / (spread * sqrt(2 * np.pi))


def _rms(x: Array) -> float:
    return float(np.sqrt(np.mean(x**2)))
