"""What the ledger says of the heads of pretrained models, where these are installed.

all-MiniLM-L6-v2 reads single docstrings (`sdpa_lab.experiments.heads`), SmolLM2 the docstrings of
whole modules (`sdpa_lab.experiments.decoder`): as they were trained, and with the scale removed. A
draw is a text. Means over all heads are judged by the margins of the row; the figures by layer say
where these means come from. Names of figures begin with the name of the model.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache

import numpy as np
import numpy.typing as npt

from .. import minilm, smollm2
from ..corpus import passages
from ..experiments import decoder
from ..experiments.heads import jacobians, over_layers, trained_heads
from ..measure import Figures
from ..tools.estimate import Draws
from .record import Expect, Trained, draws

TEXTS, MOST_TEXTS = 16, 512
"""That MiniLM reads: usually, and however many draws are asked for."""

LONG_TEXTS, MOST_LONG_TEXTS = 8, 16
"""The same for SmolLM2."""

MODELS = {"MiniLM": minilm.MODEL, "SmolLM2": smollm2.MODEL}
LAST = {"MiniLM": minilm.LAYERS - 1, "SmolLM2": smollm2.LAYERS - 1}


def other_scale(seed: int, times: float) -> dict[str, Draws]:
    """Cosine of MiniLM's embeddings with those at another scale of all layers; a draw is a text."""
    measured: dict[str, Draws] = {}
    with suppress(ImportError):
        model = minilm.MiniLM.load()
        texts = passages(min(MOST_TEXTS, draws(2 * TEXTS, times)), seed=seed)
        own = model.embed(texts).astype(np.float64)
        scale = minilm.D_K**-0.5
        for name, factor in (
            ("a quarter of the scale", 0.25),
            ("half the scale", 0.5),
            ("twice the scale", 2.0),
            ("no scale", 1 / scale),
        ):
            cosine = (own * model.embed(texts, scale=factor * scale)).sum(axis=1)
            measured[f"MiniLM cosine of embeddings with {name}"] = Draws(cosine)
    return measured


def other_scale_harms(name: str, lesser: str) -> Trained:
    """That MiniLM's embeddings turn at the first scale; the finding names both.

    An embedding that turns by a cosine of 0.95, 18 degrees, is another.

    Examples
    --------
    >>> from sdpa_lab.claims.trained import other_scale_harms
    >>> other_scale_harms("no scale", "twice the scale").expect[0].figure
    'MiniLM cosine of embeddings with no scale'
    """
    figure = "MiniLM cosine of embeddings with {}"
    return Trained(
        minilm.MODEL,
        (Expect(figure.format(name), 0.95, (None, 0)),),
        f"its embeddings turn. Their cosine with those of the trained scale is "
        f"{{{figure.format(lesser)}}} with {lesser} and {{{figure.format(name)}}} with {name}.",
    )


Places = Callable[[npt.NDArray[np.floating], npt.NDArray[np.floating]], Figures]


def variance(seed: int, times: float) -> dict[str, Draws]:
    """Of the scores within rows, by layer and scale; nothing of a model that is not installed."""
    measured: dict[str, Draws] = {}
    with suppress(ImportError):
        table = trained_heads(draws=min(MOST_TEXTS, draws(TEXTS, times)), seed=seed)
        names = {"1": "unscaled", "1/sqrt(32)": "scaled"}
        for row in table.where(head="all").rows:
            cell = row["row_variance"]
            assert isinstance(cell, Draws)
            name = f"MiniLM variance in row, {names[str(row['scale'])]}"
            measured[f"{name} layer {row['layer']}"] = cell
    with suppress(ImportError):
        heads = _decoder(seed, times)["variance"].mean(axis=2)
        for name, factor in (("unscaled", smollm2.D_K), ("scaled", 1)):
            for layer in range(smollm2.LAYERS):
                figure = f"SmolLM2 variance in row, {name} layer {layer}"
                measured[figure] = Draws(factor * heads[:, layer])
    for start in {name.rpartition(" layer ")[0] for name in measured}:
        layers = [cell.values for name, cell in measured.items() if name.startswith(f"{start} l")]
        measured[f"{start} all heads"] = Draws(np.mean(layers, axis=0))
    return measured


def variances(scales: tuple[str, ...], margin: float, finding: str) -> tuple[Trained, ...]:
    """The claim that `variance` finds 1 with these scales; MODEL and LAST in `finding` are filled.

    Examples
    --------
    >>> from sdpa_lab.claims.trained import variances
    >>> [part.finding for part in variances(("scaled",), 0.1, "MODEL, LAST")]
    ['MiniLM, 5', 'SmolLM2, 29']
    """
    return tuple(
        Trained(
            model,
            tuple(Expect(f"{name} variance in row, {s} all heads", 1.0, margin) for s in scales),
            finding.replace("MODEL", name).replace("LAST", str(LAST[name])),
        )
        for name, model in MODELS.items()
    )


def gradient_kept(seed: int, times: float) -> dict[str, Draws]:
    """|dL/dS| that a head's softmax passes as trained, over the largest at any other scale."""
    measured: dict[str, Draws] = {}
    squares: dict[str, npt.NDArray[np.float64]] = {}
    with suppress(ImportError):
        # The mean is near the end of the margin.
        texts = min(MOST_TEXTS, draws(4 * TEXTS, times))
        squares["MiniLM"] = jacobians(draws=texts, seed=seed)
    with suppress(ImportError):
        squares["SmolLM2"] = _decoder(seed, times)["jacobian"]
    for name, square in squares.items():
        factors = square.shape[-1]
        heads = decoder.kept(square, factors // 2 if name == "MiniLM" else decoder.TRAINED)
        for layer in range(heads.shape[1]):
            figure = f"{name} |dL/dS| as trained over the largest, layer {layer}"
            measured[figure] = Draws(heads[:, layer].mean(axis=1))
        figure = f"{name} |dL/dS| as trained over the largest, all heads"
        measured[figure] = Draws(heads.mean(axis=(1, 2)))
        figure = f"{name} share of heads that pass nine tenths or more"
        measured[figure] = Draws((heads >= 0.9).mean(axis=(1, 2)), "share")
    return measured


GRADIENT_KEPT = tuple(
    Trained(
        model,
        (Expect(f"{name} |dL/dS| as trained over the largest, all heads", 1.0, 0.2),),
        f"at its trained scale a head passes on average {{{name} |dL/dS| as trained over the "
        f"largest, all heads}} of the largest |dL/dS| that it would pass at any multiple of this "
        f"scale, and a share of {{{name} share of heads that pass nine tenths or more}} of the "
        f"heads passes nine tenths or more.",
    )
    for name, model in MODELS.items()
)


def positions(places: Places, seed: int, times: float) -> dict[str, Draws]:
    """Keys that count, and the weight on the ends of a text, with the scale and without.

    Parameters
    ----------
    places : callable
        From queries and keys to the figures of MiniLM's heads.
    seed, times
    """
    measured: dict[str, Draws] = {}
    with suppress(ImportError):
        count = min(MOST_TEXTS, draws(TEXTS, times))
        texts = over_layers(lambda x: places(x.query, x.key), draws=count, seed=seed)
        for name, heads in texts.items():
            for layer in range(minilm.LAYERS):
                measured[f"MiniLM {name} layer {layer}"] = Draws(heads[:, layer].mean(axis=1))
            measured[f"MiniLM {name} all heads"] = Draws(heads.mean(axis=(1, 2)))
        ends = "MiniLM weight on first and last key, {} all heads"
        ratio = measured[ends.format("unscaled")].values / measured[ends.format("scaled")].values
        measured["MiniLM weight on first and last key, unscaled over scaled"] = Draws(ratio)
    with suppress(ImportError):
        found = _decoder(seed, times)
        for name, when in (("scaled", "trained"), ("unscaled", "removed")):
            for what, label in (("keys", "keys that count"), ("first", "weight on first token")):
                heads = found[f"{what} {when}"]
                figure = f"SmolLM2 {label}, {name}"
                for layer in range(smollm2.LAYERS):
                    measured[f"{figure} layer {layer}"] = Draws(heads[:, layer].mean(axis=1))
                measured[f"{figure} all heads"] = Draws(heads.mean(axis=(1, 2)))
        sums = [found[f"first {when}"].mean(axis=(1, 2)) for when in ("removed", "trained")]
        measured["SmolLM2 weight on first token, unscaled over scaled"] = Draws(sums[0] / sums[1])
    return measured


# Gathered by the lack of the scale: at least twice what these positions have with it.
POSITIONS = (
    Trained(
        minilm.MODEL,
        (
            Expect("MiniLM keys that count, unscaled all heads", 3.0, (None, 0)),
            Expect("MiniLM weight on first and last key, unscaled over scaled", 2.0, (0, None)),
        ),
        "averaged over all heads, {MiniLM keys that count, unscaled all heads} keys count with the "
        "scale removed and {MiniLM keys that count, scaled all heads} as trained. Removing it "
        "gives the first and the last key, which are [CLS] and [SEP], only {MiniLM weight on first "
        "and last key, unscaled over scaled} times the weight that they have as trained, which is "
        "already {MiniLM weight on first and last key over 2/n, scaled all heads} times an equal "
        "share.",
    ),
    Trained(
        smollm2.MODEL,
        (
            Expect("SmolLM2 keys that count, unscaled all heads", 3.0, (None, 0)),
            Expect("SmolLM2 weight on first token, unscaled over scaled", 2.0, (0, None)),
        ),
        "of 769 to 1024 keys {SmolLM2 keys that count, unscaled all heads} count with the scale "
        "removed and {SmolLM2 keys that count, scaled all heads} as trained. The first token has "
        "{SmolLM2 weight on first token, scaled all heads} of all weight as trained and "
        "{SmolLM2 weight on first token, unscaled all heads} without the scale: the sink is "
        "learned, and removing the scale deepens it.",
    ),
)


def _decoder(seed: int, times: float) -> Figures:
    return _figures(min(MOST_LONG_TEXTS, draws(LONG_TEXTS, times)), seed)


@cache
def _figures(count: int, seed: int) -> Figures:
    # Four rows ask for them, and each text takes the model seconds.
    return decoder.decoder_figures(draws=count, seed=seed)
