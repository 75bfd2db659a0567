"""Rows on training: models on the task of `sdpa_lab.training.recall`, mostly 16 seeds of a setting.

One difference between two losses counts in all of them: a tenth of what guessing loses, 0.1 ln 8 =
0.21 nats. Something harms where that or more is lost on average, and does no harm where a quarter
of it or less is.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from math import log
from typing import Any

import numpy as np
import numpy.typing as npt

from ..tools.estimate import Draws
from ..tools.table import Cell
from . import trained as pretrained
from .record import Claim, Expect

SEEDS = 16
TENTH = 0.1 * log(8)
NO_HARM = TENTH / 4


def harms(figure: str, *, law: bool = False) -> Expect:
    """At least a tenth is lost; our law, where there is one: none, to a quarter of that."""
    if law:
        return Expect(figure, TENTH, (0, None), law=0.0, law_margin=NO_HARM)
    return Expect(figure, TENTH, (0, None))


def harmless(figure: str) -> Expect:
    """At most a quarter of a tenth is lost."""
    return Expect(figure, 0.0, (None, NO_HARM))


def saves(figure: str) -> Expect:
    """More than that is saved: what would do no harm is no gain either."""
    return Expect(figure, TENTH, (TENTH - NO_HARM, None))


Values = npt.NDArray[np.float64]
Measured = dict[str, Draws]


def n_seeds(times: float) -> int:
    return max(4, round(SEEDS * times))


def drawn(row: Mapping[str, Cell], column: str) -> Draws:
    cell = row[column]
    if not isinstance(cell, Draws):
        raise TypeError(f"{column}: expected draws, got {cell!r}")
    return cell


def loss(values: Values) -> Draws:
    return Draws(values, "positive")


@cache
def train_infer(seed: int, times: float) -> Measured:
    """Loss of models run with another scale than that of their training; d_k = 32."""
    from ..training import recall

    models = recall.trained(recall.Setting(d_k=32, seeds=n_seeds(times)), seed)
    best, scale = models.best(), models.setting.scale
    own = models.test_loss()[best]
    increase = {
        name: models.test_loss(scale * factor)[best] - own
        for name, factor in (
            ("a quarter of the scale", 0.25),
            ("half the scale", 0.5),
            ("twice the scale", 2.0),
            ("no scale", 1 / scale),
        )
    }
    found = {f"loss added with {name}": Draws(x) for name, x in increase.items()}
    return found | {"loss": loss(own)} | pretrained.other_scale(seed, times)


def additive_small_dk(seed: int, times: float) -> Measured:
    """Additive attention against the unscaled dot product, each at its best learning rate."""
    from ..training.recall import Setting, compare

    base = Setting(seeds=n_seeds(times), rule="1")
    found: Measured = {}
    for d_k, rates in ((4, (1e-2, 3e-2)), (8, (1e-2, 3e-2)), (32, (3e-3, 1e-2))):
        dot = compare(base, seed=seed, d_k=d_k)
        additive = compare(base, seed=seed, d_k=d_k, mechanism="additive", rates=rates)
        found[f"loss dot over additive d_k={d_k}"] = Draws(dot - additive)
        found[f"loss additive d_k={d_k}"] = loss(additive)
        found[f"loss dot d_k={d_k}"] = loss(dot)
    return found


def additive_no_scale(seed: int, times: float) -> Measured:
    """Additive attention with scale 1 and 1/sqrt(h), h = 32, and how large its scores become."""
    from ..training.recall import Setting, compare, trained

    plain = Setting(
        seeds=n_seeds(times), rule="1", d_k=32, mechanism="additive", rates=(3e-3, 1e-2)
    )
    scaled = replace(plain, rule="sqrt d_k", rates=(1e-2, 3e-2))
    without, with_scale = (compare(x, seed=seed) for x in (plain, scaled))
    models = trained(plain, seed)
    best = models.best()
    largest = np.abs(models.scores()).max(axis=(2, 3, 4))[best]
    w = models.parameters["w"].reshape(*models.shape, -1)[best].astype(np.float64)
    return {
        "loss unscaled over scaled": Draws(without - with_scale),
        "loss unscaled": loss(without),
        "loss scaled": loss(with_scale),
        "largest score": Draws(largest, "positive"),
        "sum of |w|": Draws(np.abs(w).sum(axis=-1)),
    }


def always_in_range(seed: int, times: float) -> Measured:
    """Variance of the scaled scores before and after training, here and in a pretrained model."""
    from ..training import experiments

    table = experiments.trained_scores((32, 64), seed=seed, seeds=n_seeds(times))
    found: Measured = {}
    for row in table.rows:
        for when in ("before", "after"):
            found[f"variance {when} training d_k={row['d_k']}"] = drawn(row, when)
    return found | pretrained.variance(seed, times)


def saturated_gradient(seed: int, times: float) -> Measured:
    """Gradients to q, k and v where training starts saturated, over those of another start."""
    seeds = n_seeds(times)
    plain, saturated = (saturated_start(gain, seed, seeds=seeds, steps=0) for gain in (1, 8))
    found = {"largest weight of a row at the start": Draws(saturated["max weight"])}
    for name in ("query", "key", "value"):
        ratio = saturated[f"grad {name}"] / plain[f"grad {name}"]
        found[f"gradient to {name} over unsaturated"] = Draws(ratio, "positive")
    return found


def saturated_start(gain: float, seed: int, **settings: Any) -> dict[str, Values]:
    from ..training import experiments

    (row,) = experiments.saturation((gain,), seed=seed, **settings).rows
    return {name: cell.values for name, cell in row.items() if isinstance(cell, Draws)}


CLAIMS = (
    Claim(
        id="infer-smaller",
        claim="A model must be run with the scale of its training: a smaller one does harm.",
        claim_zh="推理时的缩放必须与训练时一致：缩放变小会有损害。",
        expect=(harms("loss added with a quarter of the scale"),),
        holds="It does: models trained with 1/sqrt(32) to a loss of {loss} nats lose {loss added "
        "with a quarter of the scale} with a quarter of the scale and {loss added with half the "
        "scale} with half of it.",
        law="With a quarter of the scale they lose {loss added with a quarter of the scale} nats.",
        trained=(pretrained.other_scale_harms("a quarter of the scale", "half the scale"),),
        experiment=train_infer,
        slow=True,
        more=2,
    ),
    Claim(
        id="infer-unscaled",
        claim="A model must be run with the scale of its training: without any it fails.",
        claim_zh="推理时的缩放必须与训练时一致：推理时去掉缩放会有损害。",
        expect=(Expect("loss added with no scale", TENTH, (0, None), law=0.0, law_margin=NO_HARM),),
        holds="Models trained with 1/sqrt(32) lose {loss added with no scale} nats without it.",
        law="Not where the answer is a single key: sharper weights choose the same one. Models "
        "trained with 1/sqrt(32) to a loss of {loss} nats lose {loss added with no scale} without "
        "any scale, and {loss added with twice the scale} with twice the scale.",
        trained=(pretrained.other_scale_harms("no scale", "twice the scale"),),
        experiment=train_infer,
        slow=True,
        more=2,
    ),
    Claim(
        id="additive-small-dk",
        claim="Additive attention and the dot product without a scale do equally well at small "
        "d_k; at large d_k additive attention is better.",
        claim_zh="d_k 较小时，加性注意力与未缩放的点积注意力相当；d_k 较大时加性注意力更好。",
        expect=(
            Expect("loss dot over additive d_k=8", 0.0, TENTH),
            harms("loss dot over additive d_k=32"),
        ),
        holds="The loss of the dot product exceeds that of additive attention by "
        "{loss dot over additive d_k=8} nats at d_k = 8 and by {loss dot over additive d_k=32} at "
        "32, where additive attention reaches {loss additive d_k=32}. At d_k = 4, too narrow for "
        "either, it is {loss dot over additive d_k=4}.",
        law="The loss of the dot product exceeds that of additive attention by "
        "{loss dot over additive d_k=4}, {loss dot over additive d_k=8} and "
        "{loss dot over additive d_k=32} nats at d_k = 4, 8 and 32.",
        experiment=additive_small_dk,
        slow=True,
        more=2,
    ),
    Claim(
        id="additive-no-scale",
        claim="Additive attention needs no additional scale.",
        claim_zh="加性注意力不需要额外缩放。",
        expect=(Expect("loss unscaled over scaled", 0.0, TENTH),),
        holds="It needs none at this width: the loss without it exceeds that with 1/sqrt(32) by "
        "{loss unscaled over scaled} nats. It is not tanh that bounds the score, though: tanh lies "
        "in [-1, 1], the score w . tanh(...) within the sum of |w|, which is {sum of |w|} after "
        "training, and scores reach {largest score}.",
        law="The loss without a scale exceeds that with it by {loss unscaled over scaled} nats.",
        experiment=additive_no_scale,
        slow=True,
        more=2,
    ),
    Claim(
        id="always-in-range",
        claim="The scale guarantees that the input of softmax always stays in a range without "
        "saturation, that of scores of variance 1.",
        claim_zh="缩放保证 Softmax 的输入始终处于“合理”的、非饱和的范围，即方差为 1 的分数的范围。",
        expect=(
            Expect("variance before training d_k=32", 1.0, 0.5),
            Expect("variance after training d_k=32", 1.0, 0.5),
            Expect("variance after training d_k=64", 1.0, 0.5),
        ),
        holds="The variance is {variance before training d_k=32} before training and "
        "{variance after training d_k=32} after it.",
        law="Only at the start: a constant cannot follow what is learned. From {variance before "
        "training d_k=32} and {variance before training d_k=64} before training the variance of "
        "scaled scores grows to {variance after training d_k=32} and {variance after training "
        "d_k=64} at d_k = 32 and 64. How far depends on the task and on the length of training; "
        "we have no law for it, so the claim is refuted and not corrected.",
        experiment=always_in_range,
        slow=True,
        trained=pretrained.variances(
            ("scaled",),
            0.5,
            "the variance of scaled scores within a row is {MODEL variance in row, scaled all "
            "heads} averaged over all heads, {MODEL variance in row, scaled layer 0} in the first "
            "layer and {MODEL variance in row, scaled layer LAST} in the last.",
        ),
        more=2,
    ),
    Claim(
        id="saturated-gradient",
        claim="Where weights are saturated no gradient flows back.",
        claim_zh="权重饱和时梯度无法反向传播。",
        expect=tuple(
            Expect(f"gradient to {name} over unsaturated", 0.0, (0, 0.25))
            for name in ("query", "key", "value")
        ),
        holds="The norms of the gradients to Q, K and V are {gradient to query over unsaturated}, "
        "{gradient to key over unsaturated} and {gradient to value over unsaturated} times those "
        "of an unsaturated start.",
        law="Gradients do flow. With a largest weight of {largest weight of a row at the start} "
        "on average, the norms of the gradients to Q, K and V are {gradient to query over "
        "unsaturated}, {gradient to key over unsaturated} and {gradient to value over "
        "unsaturated} times those of an unsaturated start.",
        experiment=saturated_gradient,
        slow=True,
        more=4,
    ),
)
