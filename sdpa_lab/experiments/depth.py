"""What one layer makes of the size of its values, and what many make of the rank of their input.

One layer: n independent values of variance 1 leave with variance sum p^2 per component, whose mean
over rows of normal scores of standard deviation sigma is `theory.weights(n, sigma).sum_p2`; well
below freezing that is e^(sigma^2)/n. Where any two values correlate by c it is c + (1 - c) sum p^2.

Many layers: with x_i = u + z_i, one u for all tokens, the scores of row i are those that all rows
share plus z_i A z_j, A = scale W^Q (W^K)^T. The outputs of two rows differ by as much as their
weights do, times z_j: by the third power of the size of z (Dong, Cordonnier & Loukas 2021,
arXiv:2103.03404, whose bound is a third power as well; `residual_law` is our mean).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import sdpa
from sdpa._arguments import choice

from .. import style, theory
from ..tools.estimate import Draws
from ..tools.inputs import stream
from ..tools.table import Cell, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]

D_K = 64
D_MODEL = 64
SCALES = {"1/sqrt(d_k)": D_K**-0.5, "1": 1.0}
STACKS = {
    "attention alone": (False, False),
    "attention of normalised tokens": (False, True),
    "with skip connections": (True, True),
}
"""Whether the input of a layer is added to its output, and whether the layer sees each token
divided by its root mean square, as in a Transformer that normalises first."""


def output_scale(
    n: Iterable[int] = (16, 64, 256, 1024, 4096),
    sigma: Iterable[float] = (0.0, 1.0, 2.0, 8.0),
    common: Iterable[float] = (0.0, 0.5),
    *,
    draws: int = 200,
    seed: int = 0,
) -> Table:
    """Standard deviation of the output of attention over values of variance 1.

    Parameters
    ----------
    n : iterable of int
        Keys.
    sigma : iterable of float
        Standard deviation of the scores: 1 with 1/sqrt(d_k), sqrt(d_k) without.
    common : iterable of float in [0, 1)
        Correlation of any two values.
    draws : int
        Single queries, each with keys and values of its own.
    seed : int

    Returns
    -------
    Table
        n, sigma, common, std (its prediction is exact).

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> table = lab.output_scale(n=[64, 1024], sigma=[1.0], common=[0.0])
    >>> short, long = table["std"]
    >>> round(short / long)                                      # the root of 1024/64
    4
    """
    spreads, shares = tuple(sigma), tuple(common)
    rows: list[dict[str, Cell]] = []
    for length in n:
        rng = stream(seed, "output scale", length)
        # One component: scores are sigma times the keys, exactly normal.
        key = rng.standard_normal((draws, length, 1))
        value = rng.standard_normal((draws, length, D_K))
        shared = rng.standard_normal((draws, 1, D_K))
        for width in spreads:
            mixed = sdpa.attention(np.ones((draws, 1, 1)), key, value, scale=float(width))
            spread = theory.weights(length, float(width)).sum_p2
            for share in shares:
                out = sqrt(share) * shared + sqrt(1 - share) * mixed
                law = sqrt(share + (1 - share) * spread)
                std = Draws((out**2).mean(axis=(1, 2)), "root_mean", law)
                place: dict[str, Cell] = {"n": length, "sigma": float(width)}
                rows.append({**place, "common": float(share), "std": std})
    return Table("Standard deviation of softmax(s) V, values of variance 1", rows)


def rank_collapse(
    layers: int = 10,
    *,
    stacks: Iterable[str] = tuple(STACKS),
    n: int = 32,
    draws: int = 64,
    seed: int = 0,
) -> Table:
    """How much of the tokens differs from token to token, layer by layer.

    The residual is |X - mean token| / |X|, 1 for tokens without anything in common and 0 for a
    matrix X of rank one whose rows are all equal; 1e-15 is rounding. Layers have one head each with
    projections of their own, N(0, 1/64), d_k = d_model = 64; a draw is an input and a stack.

    Parameters
    ----------
    layers : int
    stacks : iterable of str
        Of STACKS.
    n : int
        Tokens.
    draws, seed

    Returns
    -------
    Table
        stack, scale, layer, residual (median over draws).

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> table = lab.rank_collapse(3, stacks=["attention alone"], draws=8)
    >>> table.where(scale="1/sqrt(d_k)")["residual"][-1] < 1e-5
    np.True_
    """
    rows: list[dict[str, Cell]] = []
    for stack in [choice("stacks", name, STACKS) for name in stacks]:
        skip, normalised = STACKS[stack]
        for name, scale in SCALES.items():
            rng = stream(seed, "rank collapse")  # the same inputs and projections for all
            x = rng.standard_normal((draws, n, D_MODEL))
            for layer in range(layers + 1):
                place: dict[str, Cell] = {"stack": stack, "scale": name, "layer": layer}
                rows.append({**place, "residual": Draws(_residual(x), "median")})
                seen = x / _rms(x)[:, :, None] if normalised else x
                x = _layer(seen, scale, rng) + (x if skip else 0)
    return Table("Share of the tokens that differs from token to token", rows)


def residual_law(residual: float, n: int, scale: float) -> float:
    """Residual after a layer, in rms, of tokens that agree up to independent residuals.

    With x_i = u + z_i, components of variance 1 - r^2 and r^2, r small, and w_i = z_i A,

        out_i - mean = (1/n) sum_j (w_i . (z_j - z)) (z_j - z) W^V + O(r^4)
        rms = scale sqrt(d_k) r^3 ((1 - 1/n) ((n - 1)^2 + (n - 1)(d + 1)) / (d n^2))^(1/2)

    by E |Z^T Z w|^2 = r^4 m (m + d + 1) |w|^2 of a Wishart matrix with m = n - 1, d = d_model.
    """
    m = n - 1
    factor = (1 - 1 / n) * (m * m + m * (D_MODEL + 1)) / (D_MODEL * n * n)
    return scale * sqrt(D_K) * residual**3 * sqrt(factor)


def rank_step(
    residual: Iterable[float] = (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128),
    *,
    n: int = 32,
    draws: int = 64,
    seed: int = 0,
) -> Table:
    """One layer of attention alone over tokens that differ by a given residual.

    Parameters
    ----------
    residual : iterable of float in (0, 1]
        Standard deviation of what differs from token to token, of components of variance 1.
    n, draws, seed

    Returns
    -------
    Table
        scale, residual, after (rms over draws; predicted: `residual_law`).

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> table = lab.rank_step([1 / 16, 1 / 32], draws=16).where(scale="1/sqrt(d_k)")
    >>> round(float(table["after"][0] / table["after"][1]))
    8
    """
    rows: list[dict[str, Cell]] = []
    for share in residual:
        for name, scale in SCALES.items():
            rng = stream(seed, "rank step", str(share))
            shared = rng.standard_normal((draws, 1, D_MODEL))
            own = rng.standard_normal((draws, n, D_MODEL))
            out = _layer(sqrt(1 - share**2) * shared + share * own, scale, rng)
            square = ((out - out.mean(axis=1, keepdims=True)) ** 2).mean(axis=(1, 2))
            law = residual_law(share, n, scale)
            after = Draws(square, "root_mean", law)
            rows.append({"scale": name, "residual": float(share), "after": after})
    return Table("Residual after one layer", rows)


def perturbation(
    layers: int,
    *,
    stack: str = "with skip connections",
    n: int = 32,
    draws: int = 64,
    seed: int = 0,
) -> dict[str, Floats]:
    """How much a stack magnifies a small change of its input, with the scale and without.

    The change has a random direction, so that its magnification is the size of the Jacobian in root
    mean square: that of the gradient which reaches the first layer.

    Parameters
    ----------
    layers : int
    stack : str
        One of STACKS.
    n, draws, seed

    Returns
    -------
    dict of ndarray
        "scaled" and "unscaled": ln of the magnification per draw.

    Examples
    --------
    >>> from sdpa_lab.experiments.depth import perturbation
    >>> found = perturbation(1, draws=8)
    >>> bool((found["scaled"] > 0).all())                      # a skip connection adds to it
    True
    """
    choice("stack", stack, STACKS)
    rng = stream(seed, "perturbation")
    x = rng.standard_normal((draws, n, D_MODEL))
    step = 1e-6 * rng.standard_normal(x.shape)
    found = {}
    for name, scale in (("scaled", D_K**-0.5), ("unscaled", 1.0)):
        outs = [_stack(start, layers, stack, scale, seed) for start in (x + step, x - step)]
        change = np.linalg.norm(outs[0] - outs[1], axis=(1, 2))
        found[name] = np.log(change / np.linalg.norm(2 * step, axis=(1, 2)))
    return found


def _stack(x: Floats, layers: int, stack: str, scale: float, seed: int) -> Floats:
    skip, normalised = STACKS[stack]
    rng = stream(seed, "perturbation", "projections")
    for _ in range(layers):
        seen = x / _rms(x)[:, :, None] if normalised else x
        x = _layer(seen, scale, rng) + (x if skip else 0)
    return x


def _layer(x: Floats, scale: float, rng: np.random.Generator) -> Floats:
    """One head of attention with fresh projections of variance 1/d_model."""
    shape = (len(x), D_MODEL, D_K)
    query, key = (x @ rng.standard_normal(shape) / D_MODEL**0.5 for _ in range(2))
    value = x @ rng.standard_normal((len(x), D_MODEL, D_MODEL)) / D_MODEL**0.5
    return np.asarray(sdpa.attention(query, key, value, scale=scale))


def _rms(x: Floats) -> Floats:
    return np.asarray((x**2).mean(axis=-1) ** 0.5)


def _residual(x: Floats) -> Floats:
    """|X - mean token| / |X| per draw."""
    apart = x - x.mean(axis=1, keepdims=True)
    return np.asarray(((apart**2).sum(axis=(1, 2)) / (x**2).sum(axis=(1, 2))) ** 0.5)


# ---------------------------------------------------------------------- plots


WIDTHS = {
    1.0: (style.SCALED, "o", r", with $1/\sqrt{d_k}$"),
    2.0: (style.PURPLE, "D", ""),
    8.0: (style.UNSCALED, "s", ", without, $d_k = 64$"),
}
TEX = {"1/sqrt(d_k)": r"$1/\sqrt{d_k}$", "1": "none"}
LINES = {"1/sqrt(d_k)": (style.SCALED, "o"), "1": (style.UNSCALED, "s")}


@style.plot
def plot_output_scale(table: Table) -> Figure:
    """Standard deviation of the output over n, by that of the scores; solid: exact."""
    figure, axes = style.subplots()
    _draw_output(axes, table)
    return figure


@style.plot
def plot_rank_collapse(table: Table) -> Figure:
    """The residual over the layers, a panel per stack."""
    stacks = list(dict.fromkeys(table["stack"].tolist()))
    figure, panels = style.subplots(1, len(stacks), sharey=True, squeeze=False)
    for axes, stack in zip(panels[0], stacks, strict=True):
        _draw_stack(axes, table.where(stack=stack))
        axes.set_title(stack)
    panels[0][0].set(ylabel="residual: what differs between tokens")
    return figure


@style.plot
def plot_rank_step(table: Table) -> Figure:
    """The residual after a layer over that before it, with the law of the third power."""
    figure, axes = style.subplots()
    for name, (color, marker) in LINES.items():
        some, label = table.where(scale=name), TEX[name]
        style.columns(axes, some, "residual", "after", color=color, marker=marker, label=label)
    style.log_axis(axes, "x", sorted(set(table["residual"].tolist())))
    axes.set(xlabel="residual before", ylabel="residual after", yscale="log")
    axes.tick_params(axis="x", labelrotation=45)
    axes.legend(title="scale; lines: law")
    return figure


@style.plot
def plot_depth(output: Table, collapse: Table) -> Figure:
    """Output over the length, and the residual over the layers without and with skip connections.

    Parameters
    ----------
    output, collapse : Table
        Returned by `output_scale` and `rank_collapse`.
    """
    figure, panels = style.subplots(1, 3, size=(3.7, 3.4))
    _draw_output(panels[0], output)
    for axes, stack in zip(panels[1:], ("attention alone", "with skip connections"), strict=True):
        _draw_stack(axes, collapse.where(stack=stack))
        axes.set(title=stack, ylabel="residual: what differs between tokens")
    panels[0].set(title="one layer")
    panels[2].set(yscale="linear", ylim=(0, 1.05))
    return figure


def _draw_output(axes: Any, table: Table) -> None:
    table = table.where(common=table["common"][0])
    for sigma in dict.fromkeys(table["sigma"].tolist()):
        color, marker, note = WIDTHS.get(sigma, (style.GREEN, "^", ""))
        some, label = table.where(sigma=sigma), f"{sigma:g}{note}"
        style.columns(axes, some, "n", "std", color=color, marker=marker, label=label)
    style.log_axis(axes, "x", sorted(set(table["n"].tolist())))
    axes.set(xlabel="keys $n$", ylabel="standard deviation of the output", yscale="log")
    axes.legend(title=r"$\sigma$ of the scores")


def _draw_stack(axes: Any, table: Table) -> None:
    for name, (color, marker) in LINES.items():
        some = table.where(scale=name)
        label = TEX[name]
        style.columns(
            axes, some, "layer", "residual", color=color, marker=marker, label=label, line=True
        )
    axes.set(xlabel="layer", yscale="log")
    axes.legend(title="scale")
