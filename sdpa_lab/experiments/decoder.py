"""Scores of the heads of a trained decoder, on texts of more than a thousand tokens.

SmolLM2 (`sdpa_lab.smollm2`) is causal, turns its queries and keys by position (RoPE) and was
trained with the scale 1/sqrt(64). It reads the docstrings of a module, cut after `TOKENS` tokens.
Figures are those of the last `QUERIES` of them, so that every row has between 769 and 1024 keys. As
for the encoder (`sdpa_lab.experiments.heads`), queries and keys stay those of the trained model
when the scale is removed.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import sdpa

from .. import smollm2, style
from ..corpus import documents
from ..measure import SATURATED, Figures
from ..smollm2 import D_K, HEADS, LAYERS, MODEL, SmolLM2
from ..tools.estimate import Draws
from ..tools.inputs import stream
from ..tools.table import Cell, Table
from .criteria import BOOTSTRAP, best
from .symmetry import draw_shares

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TOKENS, QUERIES = 1024, 256

FACTORS = tuple(2.0 ** (i / 2) for i in range(-6, 9))
"""Factors of the scale 1/sqrt(64), from 1/8 to 16; 8 is no scale."""

TRAINED, REMOVED = FACTORS.index(1.0), FACTORS.index(8.0)

Floats = npt.NDArray[np.float64]


def texts(model: SmolLM2, draws: int, seed: int) -> list[list[int]]:
    """The first 1024 tokens of `draws` random modules' docstrings."""
    found: list[list[int]] = []
    candidates = documents()
    for i in stream(seed, "documents").permutation(len(candidates)):
        if len(found) == draws:
            break
        tokens = model.tokens(candidates[i])
        if len(tokens) >= TOKENS:
            found.append(tokens[:TOKENS])
    if not 2 <= draws <= len(found):
        raise ValueError(f"draws: expected 2 to {len(found)} texts, got {draws}")
    return found


def decoder_figures(*, draws: int = 8, seed: int = 0, model: SmolLM2 | None = None) -> Figures:
    """What `decoder_heads` shows, per text: arrays (texts, layers, heads).

    Parameters
    ----------
    draws, seed, model
        As for `decoder_heads`.

    Returns
    -------
    dict of arrays
        "variance", of the scaled scores within a row; "jacobian", (texts, layers, heads, factors),
        the mean of |J|^2 by the factor of the scale; and for "trained" and "removed":
        "relative_entropy NAME", "keys NAME", exp(entropy), "max_weight NAME", "saturated NAME" and
        "first NAME", the weight on the first token.
    """
    model = _model() if model is None else model
    rows: list[Figures] = []
    for tokens in texts(model, draws, seed):
        layers: list[Figures] = []

        def attend(
            layer: int,
            query: npt.NDArray[np.float32],
            kept: sdpa.KVCache,
            into: list[Figures] = layers,
        ) -> npt.NDArray[np.float32]:
            into.append(_figures(query[0], kept.key[0]))
            return smollm2.attention(layer, query, kept)

        model.hidden(tokens, model.caches(TOKENS), attention=attend)
        rows.append({name: np.stack([part[name] for part in layers]) for name in layers[0]})
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


@cache
def _model() -> SmolLM2:
    return SmolLM2.load()


def _figures(query: npt.NDArray[np.float32], key: npt.NDArray[np.float32]) -> Figures:
    """Of one layer: (heads,), "jacobian" (heads, factors)."""
    query = query[:, -QUERIES:]
    groups = HEADS // key.shape[0]
    firsts = np.repeat(key[:, 0], groups, axis=0)
    sink = np.einsum("hid,hd->hi", query, firsts, dtype=np.float64)
    keys = np.arange(TOKENS - QUERIES, TOKENS) + 1
    found: Figures = {}
    squares = []
    for factor in FACTORS:
        scale = factor / D_K**0.5
        rows = sdpa.attention_statistics(
            query, key, scale=scale, is_causal="lower_right", enable_gqa=True
        )
        p2, p3 = (np.asarray(a, np.float64) for a in (rows.sum_p2, rows.sum_p3))
        squares.append(np.maximum(p2 - 2 * p3 + p2**2, 0).mean(axis=1))
        if factor not in (1.0, 8.0):
            continue
        name = "trained" if factor == 1 else "removed"
        found |= {
            f"relative_entropy {name}": (rows.entropy / np.log(keys)).mean(axis=1),
            f"keys {name}": np.exp(rows.entropy).mean(axis=1, dtype=np.float64),
            f"max_weight {name}": rows.max_weight.mean(axis=1, dtype=np.float64),
            f"saturated {name}": (rows.max_weight > SATURATED).mean(axis=1),
            f"first {name}": np.exp(scale * sink - rows.lse).mean(axis=1),
        }
        if factor == 1:
            found["variance"] = rows.score_var.mean(axis=1, dtype=np.float64)
    return found | {"jacobian": np.stack(squares, axis=-1)}


def kept(squares: Floats, trained: int = TRAINED) -> Floats:
    """The gradient that a softmax passes as trained, over the largest that any factor would.

    Parameters
    ----------
    squares : (..., factors)
        Mean of |J|^2 by factor of the scale.
    trained : int
        Place of the factor 1.

    Returns
    -------
    (...)
        In (0, 1].

    Examples
    --------
    >>> import numpy as np
    >>> from sdpa_lab.experiments.decoder import kept
    >>> kept(np.array([1.0, 9.0, 36.0]), trained=1)
    np.float64(0.5)
    """
    return np.asarray(np.sqrt(squares[..., trained] / squares.max(axis=-1)))[()]


def decoder_heads(*, draws: int = 8, seed: int = 0, model: SmolLM2 | None = None) -> Table:
    """The 270 heads of SmolLM2 on texts of 1024 tokens, with the scale as trained and without.

    Parameters
    ----------
    draws : int
        Texts, of other modules each.
    seed : int
    model : SmolLM2, optional
        Default: loaded, which takes a second.

    Returns
    -------
    Table
        layer (0 to 29), head (0 to 8, or "all": the mean over heads); variance, of scaled scores
        within rows; relative_entropy, entropy / ln of the number of keys; max_weight; first, the
        weight on the first token; those three again with the scale removed (_removed); kept, the
        gradient that the softmax passes to its scores as trained over the largest that any factor
        of the scale would pass; factor, which one that is (rms over rows and texts; for "all": over
        heads, too), its interval from bootstrap samples of texts. A row has 769 to 1024 keys.

    Raises
    ------
    ImportError
        The model is not installed.
    """
    found = decoder_figures(draws=draws, seed=seed, model=model)
    found["kept"] = kept(found["jacobian"])
    names = {
        "variance": "variance",
        "relative_entropy": "relative_entropy trained",
        "max_weight": "max_weight trained",
        "first": "first trained",
        "relative_entropy_removed": "relative_entropy removed",
        "max_weight_removed": "max_weight removed",
        "first_removed": "first removed",
        "kept": "kept",
    }
    grid = np.array(FACTORS)
    chosen = stream(seed, "bootstrap").integers(0, draws, (BOOTSTRAP, draws))
    rows: list[dict[str, Cell]] = []
    for layer in range(LAYERS):
        for head in (*range(HEADS), "all"):
            some = slice(None) if head == "all" else slice(int(head), int(head) + 1)
            row: dict[str, Cell] = {"layer": layer, "head": str(head)}
            for column, name in names.items():
                row[column] = Draws(found[name][:, layer, some].mean(axis=1))
            row["factor"], _ = best(found["jacobian"][:, layer, some].mean(axis=1), grid, chosen)
            rows.append(row)
    return Table(f"{MODEL} on {draws} texts of {TOKENS} tokens", rows)


@style.plot
def plot_decoder_heads(table: Table) -> Figure:
    """A dash per head over the layers, marks the means of the layers."""
    panels = {
        "variance of scores within a row": ("variance",),
        "entropy / $\\ln$(keys)": ("relative_entropy", "relative_entropy_removed"),
        "weight on the first token": ("first", "first_removed"),
        "factor that passes the largest gradient": ("factor",),
    }
    figure, axes = style.subplots(2, 2, size=(4.4, 2.7), sharex=True)
    for ax, (label, columns) in zip(axes.flat, panels.items(), strict=True):
        _draw(ax, table, label, *columns)
    style.log_axis(axes[1, 1], "y", (0.125, 0.5, 1, 2, 8, 16))
    for ax in (axes[0, 0], axes[1, 1]):
        ax.axhline(1, color="#777777", linewidth=0.8)
    for ax in axes[1]:
        ax.set(xlabel="layer; dashes: its 9 heads")
    axes[0, 1].legend()
    return figure


@style.plot
def plot_decoder_layers(table: Table, shares: Table) -> Figure:
    """Variance, weight on the first token and symmetric share over the layers.

    Parameters
    ----------
    table : Table
        Returned by `decoder_heads`.
    shares : Table
        Returned by `symmetric_share` for this model.
    """
    figure, axes = style.subplots(1, 3, size=(4.0, 3.3), sharex=True)
    _draw(axes[0], table, "variance of scaled scores within a row", "variance")
    axes[0].axhline(1, color="#777777", linewidth=0.8)
    _draw(axes[1], table, "weight on the first token", "first", "first_removed")
    draw_shares(axes[2], shares)
    for ax in axes:
        ax.set(xlabel="layer; dashes: its 9 heads")
    for ax in axes[1:]:
        ax.legend(loc="upper left")
    return figure


def _draw(axes: Axes, table: Table, label: str, *columns: str) -> None:
    some, means = table["head"] != "all", table.where(head="all")
    for name in columns:
        removed = name.endswith("_removed")
        color, shift = (style.UNSCALED, 0.15) if removed else (style.SCALED, -0.15)
        options: Any = {"color": color, "markersize": 5, "alpha": 0.4}
        axes.plot(table["layer"][some] + shift, table[name][some], "_", **options)
        text = "scale removed" if removed else "as trained, 1/sqrt(64)"
        place = means["layer"] + shift
        style.intervals(axes, place, *means.interval(name), color=color, label=text)
    if columns == ("variance",):
        style.log_axis(axes, "y", (0.1, 1, 10, 100))
    axes.set(ylabel=label)
