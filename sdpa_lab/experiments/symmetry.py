"""How symmetric training leaves W^Q W^K^T: the heads of an encoder and of a decoder.

A head's scores are x^T A y with A = W^Q W^K^T, and A is a symmetric matrix plus one that changes
its sign when query and key change places. The symmetric share

    |(A + A^T)/2|^2 / |A|^2 = (1 + <A, A^T> / |A|^2) / 2

is 1 where W^K = W^Q, 0 where scores are antisymmetric, and 1/2 up to 1/d_model where W^Q and W^K
are independent. Saponati et al. (2025) derive that training which predicts in both directions makes
A symmetric, and training on the next token alone does not.

MiniLM is an encoder, SmolLM2 a decoder. A is taken from the weights alone, so a figure has no
sampling error. SmolLM2 turns queries and keys by their positions; A is that of two tokens at the
same place. Three of its query heads share a key head. The gain of the norm before the projections
belongs to neither matrix and is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .. import minilm, smollm2, style
from ..minilm import MiniLM
from ..smollm2 import SmolLM2
from ..tools.inputs import stream
from ..tools.table import Cell, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]
Layers = Iterator[tuple[Floats, Floats]]


def symmetric_share(*, model: MiniLM | SmolLM2 | None = None) -> Table:
    """The symmetric share of W^Q W^K^T in every head of two models, by layer.

    Parameters
    ----------
    model : MiniLM or SmolLM2, optional
        That one alone; default: those that are installed.

    Returns
    -------
    Table
        model, layer, head (0, 1, ..., or "all": the mean over heads); share; crossed, the same of
        the head's W^Q with the W^K of another key head of its layer; cosine, between W^Q and W^K as
        vectors.

    Raises
    ------
    ImportError
        Neither model is installed.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> mean = lab.symmetric_share().where(model="all-MiniLM-L6-v2", head="all")
    >>> bool((mean["share"] > 0.53).all()), mean["crossed"].round(1)    # 1/2 at random
    (True, array([0.5, 0.5, 0.5, 0.5, 0.5, 0.5]))
    """
    models = _installed() if model is None else [model]
    rows: list[dict[str, Cell]] = []
    for each in models:
        layers = _encoder(each) if isinstance(each, MiniLM) else _decoder(each)
        name = minilm.MODEL if isinstance(each, MiniLM) else smollm2.MODEL
        for layer, (query, key) in enumerate(layers):
            rows += _rows(name, layer, query, key)
    return Table("Symmetric share of W^Q W^K^T", rows)


def _installed() -> list[MiniLM | SmolLM2]:
    found: list[MiniLM | SmolLM2] = []
    missing: list[ImportError] = []
    for model in (MiniLM, SmolLM2):
        try:
            found.append(model.load())
        except ImportError as error:
            missing.append(error)
    if not found:
        raise missing[0]
    return found


def share(query: Floats, key: Floats) -> float:
    """The symmetric share of W^Q W^K^T, of projections (d_model, d_k).

    From Gram matrices of d_k columns alone: |A|^2 = <W^Q^T W^Q, W^K^T W^K>, and <A, A^T> is the
    trace of the square of W^K^T W^Q.

    Examples
    --------
    >>> import numpy as np
    >>> from sdpa_lab.experiments.symmetry import share
    >>> w = np.eye(3)[:, :2]
    >>> share(w, w), share(w, w @ [[0.0, 1.0], [-1.0, 0.0]])
    (1.0, 0.0)
    """
    crossed = key.T @ query
    square = ((query.T @ query) * (key.T @ key)).sum()
    return float((1 + (crossed * crossed.T).sum() / square) / 2)


def random_share(d_model: int, d_k: int, *, draws: int = 100, seed: int = 0) -> Floats:
    """`share` of independent normal projections, per draw."""
    rng = stream(seed, "symmetric share", d_model, d_k)
    return np.array([share(*rng.standard_normal((2, d_model, d_k))) for _ in range(draws)])


def _rows(model: str, layer: int, query: Floats, key: Floats) -> list[dict[str, Cell]]:
    """Of one layer: query (heads, d_model, d_k), key (key heads, d_model, d_k)."""
    heads, groups = len(query), len(key)
    found = []
    for head, w in enumerate(query):
        own = head * groups // heads
        found.append((share(w, key[own]), share(w, key[own - 1]), _cosine(w, key[own])))
    found.append(tuple(np.mean(found, axis=0)))
    names = (*map(str, range(heads)), "all")
    return [
        {
            "model": model,
            "layer": layer,
            "head": name,
            "share": float(each[0]),
            "crossed": float(each[1]),
            "cosine": float(each[2]),
        }
        for name, each in zip(names, found, strict=True)
    ]


def _cosine(query: Floats, key: Floats) -> float:
    return float((query * key).sum() / np.linalg.norm(query) / np.linalg.norm(key))


def _encoder(model: MiniLM) -> Layers:
    """(heads, d_model, d_k) of queries and of keys, layer by layer."""
    for layer in range(minilm.LAYERS):
        name = f"encoder.layer.{layer}.attention.self"
        query, key = (model.weights[f"{name}.{role}.weight"] for role in ("query", "key"))
        yield _heads(query, minilm.D_K), _heads(key, minilm.D_K)


def _decoder(model: SmolLM2) -> Layers:
    both = smollm2.HEADS + smollm2.KEY_HEADS
    for layer in model.layers:
        w = _heads(layer.qkv[: both * smollm2.D_K], smollm2.D_K)
        yield w[: smollm2.HEADS], w[smollm2.HEADS :]


def _heads(w: npt.NDArray[np.float32], d_k: int) -> Floats:
    """(heads * d_k, d_model), as models keep it, to (heads, d_model, d_k)."""
    return w.reshape(-1, d_k, w.shape[-1]).swapaxes(1, 2).astype(np.float64)


# ---------------------------------------------------------------------- plots


@style.plot
def plot_symmetric_share(table: Table) -> Figure:
    """The share by layer, a panel per model; a dash per head, marks the means of the layers."""
    models = list(dict.fromkeys(table["model"].tolist()))
    figure, axes = style.subplots(1, len(models), size=(4.4, 3.2), sharey=True, squeeze=False)
    for ax, model in zip(axes[0], models, strict=True):
        draw_shares(ax, table.where(model=model))
        ax.set(title=model)
    axes[0, 0].legend()
    return figure


def draw_shares(axes: Axes, table: Table) -> None:
    """The panel of one model."""
    means, some = table.where(head="all"), table["head"] != "all"
    axes.plot(
        table["layer"][some], table["share"][some], "_", color=style.BLUE, markersize=6, alpha=0.4
    )
    axes.plot(means["layer"], means["share"], "o", color=style.BLUE, label="a head's $W^Q$, $W^K$")
    axes.plot(
        means["layer"], means["crossed"], "x", color=style.BLACK, label="with another head's $W^K$"
    )
    axes.axhline(0.5, color="#777777", linewidth=0.8)
    axes.set(xlabel="layer", ylabel=r"symmetric share of $W^Q (W^K)^\top$")
