"""Rows on other scores, normalisation, initialisers, and where unscaled weights gather."""

from contextlib import suppress
from functools import cache
from math import log2, sqrt

import numpy as np
import numpy.typing as npt

import sdpa

from ..experiments.correlation import correlated
from ..experiments.growth import Array, initialisers, matrices
from ..measure import Figures
from ..tools.estimate import Draws
from ..tools.inputs import N_IMAGES, digits, stream
from . import trained
from .record import Claim, Expect, Measured, draws
from .scales import HALF

SCALES = {"scaled": None, "unscaled": 1.0}

# ---------------------------------------------------------------------- other scores


@cache
def other_scores(seed: int, times: float) -> Measured:
    """Cosine, bilinear and relative attention beside the dot product; a draw: a head of 64 keys.

    With the identity for values the result of any attention is its matrix of weights, and the
    variance of ln p within a row is that of the scores.
    """
    measured: dict[str, Draws] = {}
    eye = np.eye(64)
    for d_k in (64, 512):
        rng = stream(seed, "other scores", d_k)
        query, key = rng.standard_normal((2, draws(60, times), 64, d_k))
        form = rng.standard_normal((len(query), d_k, d_k)) / sqrt(d_k)
        distances = rng.standard_normal((len(query), 127, d_k))
        turned, turned_key = (sdpa.rotary_embedding(x, np.arange(64)) for x in (query, key))
        weights = {
            "cosine": sdpa.cosine_attention(query, key, eye),
            "bilinear unscaled": sdpa.bilinear_attention(query, key, eye, form, scale=1.0),
            "bilinear scaled": sdpa.bilinear_attention(query, key, eye, form),
            "bilinear of variance 1/d_k^2, unscaled": sdpa.bilinear_attention(
                query, key, eye, form / sqrt(d_k), scale=1.0
            ),
            "dot product scaled": sdpa.attention(query, key, eye),
            "relative vectors scaled": sdpa.shaw_attention(query, key, eye, distances),
            "rotary scaled": sdpa.attention(turned, turned_key, eye),
        }
        variance = {name: np.log(p).var(axis=2).mean(axis=1) for name, p in weights.items()}
        for name, p in weights.items():
            measured[f"largest weight, {name} d_k={d_k}"] = Draws(p.max(axis=2).mean(axis=1))
            measured[f"variance in row, {name} d_k={d_k}"] = Draws(variance[name])
        for name in ("relative vectors", "rotary"):
            ratio = variance[f"{name} scaled"] / variance["dot product scaled"]
            measured[f"variance with {name} over without, d_k={d_k}"] = Draws(ratio)
    return measured


# ---------------------------------------------------------------------- normalised inputs


def normalised(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Rows less their mean, divided by their standard deviation (Ba et al. 2016, gain 1, bias 0).

    Examples
    --------
    >>> import numpy as np
    >>> from sdpa_lab.claims.variants import normalised
    >>> normalised(np.float32([[1, 3, 1, 3]]))
    array([[-1.,  1., -1.,  1.]], dtype=float32)
    """
    x = x - x.mean(axis=-1, keepdims=True)
    return np.asarray(x / x.std(axis=-1, keepdims=True))


def layer_norm(seed: int, times: float) -> Measured:
    """Scores of inputs of mean 1 and standard deviation 3, normalised or not; a draw: a head."""
    measured: dict[str, Draws] = {}
    for d_k in (64, 256):
        rng = stream(seed, "layer norm", d_k)
        count = draws(120, times)
        x = 1 + 3 * rng.standard_normal((count, 32, 256), np.float32)
        w_query, w_key = correlated(count, 256, d_k, 0.0, rng)
        inputs = {"raw": (x @ w_query, x @ w_key)}
        z = normalised(x)
        inputs["normalised"] = (z @ w_query, z @ w_key)
        query, key = inputs["raw"]
        inputs["raw, queries and keys normalised"] = (normalised(query), normalised(key))
        for name, (query, key) in inputs.items():
            for scale, number in SCALES.items():
                scores = sdpa.attention_weights(query, key, scale=number, stage="scores")
                square = np.square(scores, dtype=np.float64).mean(axis=(1, 2))
                measured[f"variance {scale} d_k={d_k}, inputs {name}"] = Draws(square)
                log_square = Draws(np.log2(square))
                measured[f"log2 of the variance {scale} d_k={d_k}, inputs {name}"] = log_square
    return measured | trained.variance(seed, times)


def batch_normalisation(seed: int, times: float) -> Measured:
    """Scaled scores of components of standard deviation 1 and 2; a draw is a matrix."""

    def moments(query: Array, key: Array) -> Figures:
        scores = sdpa.attention_weights(query, key, stage="scores")
        doubled = sdpa.attention_weights(2 * query, 2 * key, stage="scores")
        return {
            "variance of scaled scores, components of std 1": (scores**2).mean(axis=(1, 2)),
            "variance of scaled scores, components of std 2": (doubled**2).mean(axis=(1, 2)),
            "mean of scaled scores, components of std 1": scores.mean(axis=(1, 2)),
            "std of the means of rows": scores.mean(axis=2).std(axis=1, ddof=1),
        }

    found = matrices(seed, ("batch normalisation",), draws(600, times), moments, (64, 64))
    return {name: Draws(values) for name, values in found.items()}


def initial_control(seed: int, times: float) -> Measured:
    """Variance of a component of q with two initialisers at two widths of the input, d_k = 64."""
    measured: dict[str, Draws] = {}
    for d_model in (128, 2048):
        for row in initialisers(
            (64,),
            (16,),
            d_model=d_model,
            names=("Glorot", "Kaiming"),
            seed=seed,
            draws=draws(60, times),
        ).rows:
            components, scores = row["components"], row["scores"]
            assert isinstance(components, Draws)
            assert isinstance(scores, Draws)
            where = f"{row['initialiser']}, d_model={d_model}"
            measured[f"variance of q, {where}"] = components
            log2 = Draws(np.log2(components.values))
            measured[f"log2 of the variance of q, {where}"] = log2
            measured[f"variance of raw scores over d_k, {where}"] = scores
    return measured


# ---------------------------------------------------------------------- positions


def positions(seed: int, times: float) -> Measured:
    """Weight on the first and last key, and keys that count; a draw: a matrix, image or text."""
    measured: dict[str, Draws] = {}

    def places(query: npt.NDArray[np.floating], key: npt.NDArray[np.floating]) -> Figures:
        """Of the last three axes, (heads, n, d_k)."""
        found: Figures = {}
        for name, scale in SCALES.items():
            weights = sdpa.attention_weights(query, key, scale=scale)
            ends = weights[..., [0, -1]].sum(axis=-1)
            keys = np.exp(sdpa.attention_statistics(query, key, scale=scale).entropy)
            found[f"keys that count, {name}"] = keys.mean(axis=-1, dtype=np.float64)
            ends = ends.mean(axis=-1, dtype=np.float64)
            found[f"weight on first and last key, {name}"] = ends
            found[f"weight on first and last key over 2/n, {name}"] = ends * key.shape[-2] / 2
        return found

    for d_k, n, count in ((64, 32, 3000), (512, 32, 200), (64, 256, 40)):
        found = matrices(seed, ("positions", d_k, n), draws(count, times), places, (n, d_k))
        measured |= {f"{name} d_k={d_k} n={n}": Draws(x) for name, x in found.items()}
    with suppress(ImportError):
        x = digits(min(N_IMAGES, draws(600, times)), seed=seed)
        w_query, w_key = correlated(len(x), x.shape[2], 64, 0.0, stream(seed, "positions digits"))
        found = places(x @ w_query, x @ w_key)
        measured |= {f"digits {name} d_k=64 n=8": Draws(x) for name, x in found.items()}
    return measured | trained.positions(places, seed, times)


# ---------------------------------------------------------------------- records


CLAIMS = (
    Claim(
        id="cosine-no-scale",
        claim="Cosine similarity may need no scaling, since its vectors are normalised.",
        claim_zh="余弦相似度已归一化，可能不需要缩放。",
        # What the scale is there to prevent: that one weight exceeds all others together.
        expect=tuple(Expect(f"largest weight, cosine d_k={d}", HALF, (None, 0)) for d in (64, 512)),
        holds="None against saturation. But it needs a factor above 1 to be selective at all: the "
        "largest of 64 weights is {largest weight, cosine d_k=64:.3f} at d_k = 64, hardly more "
        "than 1/64, where scaled dot products have {largest weight, dot product scaled "
        "d_k=64:.3f}. QK-norm learns such a factor; nGPT multiplies by sqrt(d_k).",
        law="Cosines saturate: the largest of 64 weights is {largest weight, cosine d_k=64}.",
        experiment=other_scores,
    ),
    Claim(
        id="bilinear-no-scale",
        claim="Bilinear attention may need no scaling, since its matrix controls the size of the "
        "scores.",
        claim_zh="双线性注意力通过参数矩阵控制数值范围，可能不需要缩放。",
        expect=tuple(
            Expect(
                f"largest weight, bilinear of variance 1/d_k^2, unscaled d_k={d}", HALF, (None, 0)
            )
            for d in (64, 512)
        ),
        holds="It may: with a matrix whose elements begin with variance 1/d_k^2 the largest of 64 "
        "weights is {largest weight, bilinear of variance 1/d_k^2, unscaled d_k=64:.2f} at d_k = "
        "64, as that of the scaled dot product. The scale is then in the initialiser. With the "
        "usual variance 1/d_k it saturates like the dot product ({largest weight, bilinear "
        "unscaled d_k=64:.2f}).",
        law="The largest of 64 weights is {largest weight, bilinear of variance 1/d_k^2, unscaled "
        "d_k=64}.",
        experiment=other_scores,
    ),
    Claim(
        id="batchnorm-form",
        claim="The scale resembles batch normalisation: it divides by the standard deviation, the "
        "mean being 0 already.",
        claim_zh="缩放类似于批归一化的思想：均值已为 0，只除以标准差。",
        # Whatever the size of its input, batch normalisation gives variance 1.
        expect=(
            Expect("variance of scaled scores, components of std 1", 1.0, 0.5),
            Expect("variance of scaled scores, components of std 2", 1.0, 0.5, law=16.0),
        ),
        holds="The variance is 1 whatever the size of the components.",
        law="It divides by the standard deviation that the assumption gives, a constant; batch "
        "normalisation divides by the one it measures. With components of standard deviation 1 "
        "the variance is {variance of scaled scores, components of std 1}, with 2 it is {variance "
        "of scaled scores, components of std 2}: the fourth power of the size goes through. The "
        "mean over all scores is {mean of scaled scores, components of std 1}, that of one row is "
        "off by {std of the means of rows}.",
        experiment=batch_normalisation,
    ),
    Claim(
        id="layer-norm",
        claim="Layer normalisation has a role like that of the scale.",
        claim_zh="Layer Normalization 起着与缩放类似的作用。",
        expect=(
            *(
                Expect(
                    f"log2 of the variance unscaled d_k={d}, inputs normalised",
                    0.0,
                    0.15,
                    law=log2(d),
                )
                for d in (64, 256)
            ),
            Expect("variance scaled d_k=64, inputs normalised", 1.0, 0.1),
            Expect("variance scaled d_k=256, inputs normalised", 1.0, 0.1),
        ),
        holds="Normalised inputs give scores of variance 1 without the scale.",
        law="Layer normalisation does a different part of the work: it gives inputs the unit "
        "variance that the scale assumes (scaled scores then have variance {variance scaled "
        "d_k=64, inputs normalised}, and {variance scaled d_k=64, inputs raw} with raw inputs of "
        "mean 1 and standard deviation 3), but q.k of normalised inputs still has variance "
        "{variance unscaled d_k=64, inputs normalised} at d_k = 64. Normalising queries and keys "
        "themselves leaves the variance at d_k as well ({variance unscaled d_k=64, inputs raw, "
        "queries and keys normalised}). Nor does it keep the variance at 1 during training.",
        trained=trained.variances(
            ("unscaled", "scaled"),
            0.1,
            "every layer's input is normalised, and yet the variance within rows is {MODEL "
            "variance in row, unscaled all heads} without the scale and {MODEL variance in row, "
            "scaled all heads} with it, averaged over all heads.",
        ),
        experiment=layer_norm,
        slow=True,
    ),
    Claim(
        id="init-controls-variance",
        claim="Initialisation by Xavier or Kaiming controls the variance, too.",
        claim_zh="Xavier/Kaiming 初始化也用于控制方差。",
        # Of a component of q, within a factor of four of 1 at any width of the input.
        expect=tuple(
            Expect(f"log2 of the variance of q, {name}, d_model={d}", 0.0, 2.0)
            for name in ("Glorot", "Kaiming")
            for d in (128, 2048)
        ),
        holds="That of q and k, not that of their product: a component of q has variance "
        "{variance of q, Glorot, d_model=128:.2f} and {variance of q, Glorot, d_model=2048:.2f} "
        "at d_model = 128 and 2048 with Xavier, {variance of q, Kaiming, d_model=128:.2f} and "
        "{variance of q, Kaiming, d_model=2048:.2f} with Kaiming, where weights of variance 1 "
        "would give d_model. Unscaled scores still have {variance of raw scores over d_k, Glorot, "
        "d_model=2048:.1f} d_k.",
        law="A component of q has variance {variance of q, Glorot, d_model=2048} with Xavier.",
        experiment=initial_control,
    ),
    Claim(
        id="unscaled-position",
        claim="Without the scale the weights gather on a few positions, such as the first or the "
        "last word.",
        claim_zh="不缩放时，注意力权重会集中在少数位置，例如第一个或最后一个词。",
        expect=(
            *(
                Expect(f"keys that count, unscaled d_k={d} n={n}", 3.0, (None, 0))
                for d, n in ((64, 32), (512, 32), (64, 256))
            ),
            # Twice the even share of two keys of 32.
            Expect(
                "weight on first and last key, unscaled d_k=64 n=32",
                4 / 32,
                (0, None),
                law=2 / 32,
                law_margin=0.1 * 2 / 32,
            ),
        ),
        holds="They gather on the first and the last key.",
        law="They gather on {keys that count, unscaled d_k=64 n=32} of 32 keys at d_k = 64, "
        "{keys that count, unscaled d_k=64 n=256} of 256, but on no particular position: the first "
        "and the last key together have {weight on first and last key, unscaled d_k=64 n=32} of "
        "the weight, the 2/32 of any two keys. Positions are preferred where inputs or training "
        "tell them apart.",
        trained=trained.POSITIONS,
        experiment=positions,
        slow=True,
    ),
)
