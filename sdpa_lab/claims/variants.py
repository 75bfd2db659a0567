"""Rows on other scales and scores, normalised inputs, and where unscaled weights gather."""

from contextlib import suppress
from math import log, sqrt

import numpy as np
import numpy.typing as npt

import sdpa

from ..experiments.correlation import correlated
from ..experiments.growth import Array, matrices
from ..measure import Figures
from ..theory import best_scale
from ..tools.estimate import Draws
from ..tools.inputs import N_IMAGES, digits, stream
from . import trained
from .record import Claim, Expect, Measured, draws

SCALES = {"scaled": None, "unscaled": 1.0}

HALF = 0.5
"""A row counts as saturated on average when one weight exceeds all others together."""


# ---------------------------------------------------------------------- other scales


def _divisors(d_k: int) -> dict[str, float]:
    return {
        "d_k": float(d_k),
        "ln d_k": log(d_k),
        "2 sqrt(d_k)": 2 * sqrt(d_k),
        "sqrt(d_k)": sqrt(d_k),
    }


LARGEST_LOG = 0.285
"""`theory.attention(64, 64, 1 / log(64)).max_weight`."""

# `theory.attention(64, d_k, 1.0).max_weight` by d_k
LARGEST_UNSCALED = {64: 0.791, 512: 0.927}

# `theory.attention(n, 64).grad_score` over that with `theory.best_scale(n, 64)`
GRADIENT = {64: 0.579, 1024: 0.169}


def other_scales(seed: int, times: float) -> Measured:
    """Variance, entropy, largest weight and gradient with other divisors; a draw: a matrix."""
    measured: dict[str, Draws] = {}

    def weights(query: Array, key: Array) -> Figures:
        found: Figures = {}
        for name, divisor in _divisors(query.shape[2]).items():
            rows = sdpa.attention_statistics(query, key, scale=1 / divisor)
            found[f"variance divided by {name}"] = (rows.score_var + rows.score_mean**2).mean(1)
            found[f"entropy over ln n divided by {name}"] = rows.entropy.mean(1) / log(64)
            found[f"largest weight divided by {name}"] = rows.max_weight.mean(1)
        return found

    for d_k in (64, 512):
        found = matrices(seed, ("other scales", d_k), draws(100, times), weights, (64, d_k))
        measured |= {f"{name}, d_k={d_k} n=64": Draws(x) for name, x in found.items()}

    def gradient(query: Array, key: Array) -> Figures:
        n, d_k = query.shape[1:]
        squares = []
        for scale in (d_k**-0.5, best_scale(n, d_k)):
            rows = sdpa.attention_statistics(query, key, scale=scale)
            squares.append((rows.sum_p2 - 2 * rows.sum_p3 + rows.sum_p2**2).mean(axis=1))
        return {"ratio": np.sqrt(squares[0] / squares[1])}

    for n in (16, 64, 1024):
        count = draws(max(4, 3200 // n), times)
        found = matrices(seed, ("gradient of scores", n), count, gradient, (n, 64))
        measured[f"|dL/dS| divided by sqrt(d_k) over the largest, d_k=64 n={n}"] = Draws(
            found["ratio"]
        )
    return measured | trained.gradient_kept(seed, times)


# ---------------------------------------------------------------------- other scores


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
    return measured | trained.variance(seed, times)


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
        id="other-scales",
        notes=("000", "001"),
        claim="d_k divides too much and makes the weights even, ln d_k too little and leaves them "
        "saturated, 2 sqrt(d_k) gives variance 1/4, which is too small; sqrt(d_k) is optimal.",
        claim_zh="除以 d_k 会使权重过于平坦，除以 log(d_k) 仍会饱和，除以 2 sqrt(d_k) 时方差为 "
        "1/4、量级过小；sqrt(d_k) 是最优的。",
        expect=(
            Expect("variance divided by 2 sqrt(d_k), d_k=64 n=64", 0.25, 0.0125),
            Expect("variance divided by 2 sqrt(d_k), d_k=512 n=64", 0.25, 0.0125),
            Expect("entropy over ln n divided by d_k, d_k=64 n=64", 1.0, 0.02),
            Expect("entropy over ln n divided by d_k, d_k=512 n=64", 1.0, 0.02),
            Expect(
                "largest weight divided by ln d_k, d_k=64 n=64",
                HALF,
                (0, None),
                law=LARGEST_LOG,
                law_margin=0.03,
            ),
            Expect("largest weight divided by ln d_k, d_k=512 n=64", HALF, (0, None)),
            # Optimal: no other scale passes on a tenth more.
            *(
                Expect(
                    f"|dL/dS| divided by sqrt(d_k) over the largest, d_k=64 n={n}",
                    1.0,
                    0.1,
                    law=GRADIENT[n],
                    law_margin=0.05,
                )
                for n in (64, 1024)
            ),
        ),
        holds="All four hold.",
        law="Dividing by d_k does make the weights even and by 2 sqrt(d_k) the variance 1/4. "
        "Dividing by ln d_k leaves scores of standard deviation sqrt(d_k)/ln d_k, and the largest "
        "of 64 weights is {largest weight divided by ln d_k, d_k=64 n=64} at d_k = 64 and "
        "{largest weight divided by ln d_k, d_k=512 n=64} at 512. sqrt(d_k) is the divisor that "
        "gives variance 1 at every width, but it does not let the most gradient through to "
        "the scores: |dL/dS| is {|dL/dS| divided by sqrt(d_k) over the largest, d_k=64 n=16:.2f}, "
        "{|dL/dS| divided by sqrt(d_k) over the largest, d_k=64 n=64:.2f} and {|dL/dS| divided by "
        "sqrt(d_k) over the largest, d_k=64 n=1024:.2f} of what a smaller divisor passes on, at "
        "16, 64 and 1024 keys. The best divisor depends on the length.",
        trained=trained.GRADIENT_KEPT,
        experiment=other_scales,
        slow=True,
    ),
    Claim(
        id="cosine-bilinear",
        notes=("003",),
        claim="Cosine and bilinear attention may need no scaling; relative positions add a factor "
        "of their own.",
        claim_zh="余弦注意力与双线性注意力可能不需要缩放；相对位置编码会带来额外的缩放因子。",
        expect=(
            Expect("largest weight, cosine d_k=64", HALF, (None, 0)),
            Expect("largest weight, cosine d_k=512", HALF, (None, 0)),
            *(
                Expect(
                    f"largest weight, bilinear unscaled d_k={d}",
                    HALF,
                    (None, 0),
                    law=LARGEST_UNSCALED[d],
                    law_margin=0.03,
                )
                for d in (64, 512)
            ),
            Expect("variance with relative vectors over without, d_k=64", 2.0, 0.1),
            Expect("variance with relative vectors over without, d_k=512", 2.0, 0.1),
        ),
        holds="Neither saturates, and relative vectors of variance 1 double the variance.",
        law="Cosines do not saturate, but need a factor that sharpens them: the largest of 64 "
        "weights is {largest weight, cosine d_k=64:.3f}, hardly more than 1/64. The bilinear form "
        "with weights of variance 1/d_k has the variance d_k of the dot product and saturates "
        "like it ({largest weight, bilinear unscaled d_k=64} at d_k = 64, {largest weight, "
        "bilinear scaled d_k=64} divided by sqrt(d_k)). Relative vectors of variance 1 double the "
        "variance of the scores; rotations do not change it.",
        experiment=other_scores,
    ),
    Claim(
        id="layer-norm",
        notes=("002",),
        claim="Layer normalisation has a role like that of the scale; initialisation by Xavier or "
        "Kaiming also controls the variance.",
        claim_zh="Layer Normalization 起着与缩放类似的作用；Xavier/Kaiming 初始化也用于控制方差。",
        expect=(
            *(
                Expect(
                    f"variance unscaled d_k={d}, inputs normalised",
                    1.0,
                    0.1,
                    law=float(d),
                    law_margin=0.05 * d,
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
        id="unscaled-position",
        notes=("003",),
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
