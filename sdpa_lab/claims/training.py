"""Rows on training: models on the task of `sdpa_lab.training.recall`, 16 seeds of each setting.

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


Values = npt.NDArray[np.float64]
Measured = dict[str, Draws]


def n_seeds(times: float) -> int:
    return max(4, round(SEEDS * times))


def drawn(row: Mapping[str, Cell], column: str) -> Draws:
    cell = row[column]
    if not isinstance(cell, Draws):
        raise TypeError(f"{column}: expected draws, got {cell!r}")
    return cell


def _loss(values: Values) -> Draws:
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
    return found | {"loss": _loss(own)} | pretrained.other_scale(seed, times)


def no_scale_training(seed: int, times: float) -> Measured:
    """Best loss with and without the scale over d_k and n; and the scale folded into W^Q."""
    from ..training.recall import Setting, compare

    base = Setting(seeds=n_seeds(times))
    found: Measured = {}
    for d_k in (4, 32, 64):
        without = compare(base, seed=seed, d_k=d_k, rule="1")
        with_scale = compare(base, seed=seed, d_k=d_k)
        found[f"loss added without the scale, d_k={d_k}"] = Draws(without - with_scale)
        found[f"loss unscaled d_k={d_k}"] = _loss(without)
        found[f"loss scaled d_k={d_k}"] = _loss(with_scale)
    for fold, rates in (("initial", (1e-3, 3e-3)), ("compensated", base.rates)):
        folded = compare(base, seed=seed, d_k=64, fold=fold, rates=rates)
        found[f"loss {fold} fold d_k=64"] = _loss(folded)
    longer = compare(base, seed=seed, d_k=64, rule="1", rates=(1e-3, 3e-3), steps=600)
    found["loss unscaled d_k=64 after 600 steps"] = _loss(longer)
    short, long = (compare(base, seed=seed, n=n, rule="1") for n in (8, 32))
    found["loss unscaled n=32 over n=8"] = Draws(long - short)
    short, long = (compare(base, seed=seed, n=n) for n in (8, 32))
    found["loss scaled n=32 over n=8"] = Draws(long - short)
    return found


def dk_independence(seed: int, times: float) -> Measured:
    """Best loss with 1/sqrt(d_k) at every d_k against that at 32."""
    from ..training.recall import Setting, compare

    base = Setting(seeds=n_seeds(times))
    losses = {d_k: compare(base, seed=seed, d_k=d_k) for d_k in (1, 2, 4, 32, 64)}
    found = {
        f"loss added from d_k=32 to {d_k}": Draws(x - losses[32])
        for d_k, x in losses.items()
        if d_k != 32
    }
    return found | {f"loss d_k={d_k}": _loss(x) for d_k, x in losses.items()}


def additive_small_dk(seed: int, times: float) -> Measured:
    """Additive attention against the unscaled dot product, each at its best learning rate."""
    from ..training.recall import Setting, compare

    base = Setting(seeds=n_seeds(times), rule="1")
    found: Measured = {}
    for d_k, rates in ((4, (1e-2, 3e-2)), (8, (1e-2, 3e-2)), (32, (3e-3, 1e-2))):
        dot = compare(base, seed=seed, d_k=d_k)
        additive = compare(base, seed=seed, d_k=d_k, mechanism="additive", rates=rates)
        found[f"loss dot over additive d_k={d_k}"] = Draws(dot - additive)
        found[f"loss additive d_k={d_k}"] = _loss(additive)
        found[f"loss dot d_k={d_k}"] = _loss(dot)
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
        "loss unscaled": _loss(without),
        "loss scaled": _loss(with_scale),
        "largest score": Draws(largest, "positive"),
        "sum of |w|": Draws(np.abs(w).sum(axis=-1)),
    }


def divergence(seed: int, times: float) -> Measured:
    """Norm of W^Q - W^K over that of its start, on a directed task and on a symmetric one."""
    from ..training import dynamics

    table = dynamics.divergence(
        ("directed", "symmetric"), every=75, seed=seed, seeds=n_seeds(times)
    )

    def at(task: str, step: int, column: str) -> Values:
        return drawn(table.row(task=task, step=step), column).values

    found: Measured = {}
    for task in ("directed", "symmetric"):
        for column in ("difference", "sum", "control"):
            growth = at(task, 150, column) / at(task, 0, column) - 1
            found[f"growth of the {column}, {task} task"] = Draws(growth)
    start, middle, end = (at("directed", step, "difference") for step in (0, 75, 150))
    found["acceleration, directed task"] = Draws((end - middle - (middle - start)) / start)
    return found


def tied_kv(seed: int, times: float) -> Measured:
    """One projection for keys and values against two of the same width, and their gradients."""
    from ..training import dynamics
    from ..training.recall import Setting, compare

    seeds = n_seeds(times)
    found: Measured = {}
    for width in (8, 32):
        base = Setting(seeds=seeds, d_k=width, d_v=width)
        two, one = compare(base, seed=seed), compare(base, seed=seed, tied=True)
        found[f"loss added by tying, width {width}"] = Draws(one - two)
        found[f"loss tied width {width}"] = _loss(one)
        found[f"loss separate width {width}"] = _loss(two)
    for width in (8, 32):
        table = dynamics.tied_paths(seed=seed, seeds=seeds, d_k=width, d_v=width, every=15)
        cosines = [drawn(row, "cosine").values for row in table.rows]
        found[f"cosine of the two gradients width {width}"] = Draws(np.mean(cosines, axis=0))
    return found


def always_in_range(seed: int, times: float) -> Measured:
    """Variance of the scaled scores before and after training, here and in a pretrained model."""
    from ..training import experiments

    table = experiments.trained_scores((32, 64), seed=seed, seeds=n_seeds(times))
    found: Measured = {}
    for row in table.rows:
        for when in ("before", "after"):
            found[f"variance {when} training d_k={row['d_k']}"] = drawn(row, when)
    return found | pretrained.variance(seed, times)


def stop_learning(seed: int, times: float) -> Measured:
    """Loss of training that starts saturated, scores 64 times as large, and of others; d_k = 32."""
    seeds = n_seeds(times)
    found: Measured = {}
    for steps in (150, 300, 900):
        row = _saturated(8, seed, seeds=seeds, rates=(1e-2,), steps=steps)
        found[f"loss after {steps} steps over ln 8"] = _loss(row["loss"] / log(8))
    plain = _saturated(1, seed, seeds=seeds)
    found["loss unsaturated after 150 steps over ln 8"] = _loss(plain["loss"] / log(8))
    found["largest weight of a row at the start"] = Draws(row["max weight"])
    return found


def saturated_gradient(seed: int, times: float) -> Measured:
    """Gradients to q, k and v where training starts saturated, over those of another start."""
    seeds = n_seeds(times)
    plain, saturated = (_saturated(gain, seed, seeds=seeds, steps=0) for gain in (1, 8))
    found = {"largest weight of a row at the start": Draws(saturated["max weight"])}
    for name in ("query", "key", "value"):
        ratio = saturated[f"grad {name}"] / plain[f"grad {name}"]
        found[f"gradient to {name} over unsaturated"] = Draws(ratio, "positive")
    return found


def _saturated(gain: float, seed: int, **settings: Any) -> dict[str, Values]:
    from ..training import experiments

    (row,) = experiments.saturation((gain,), seed=seed, **settings).rows
    return {name: cell.values for name, cell in row.items() if isinstance(cell, Draws)}


def trained_exponent(seed: int, times: float) -> Measured:
    """Exponent of std(q.k) in d_k before, at the start of, and after training; d_k = 8 to 128."""
    from ..training import dynamics

    found: Measured = {}
    for rule, name in (("d_k", "1/d_k"), ("sqrt d_k", "1/sqrt(d_k)")):
        table = dynamics.correlation(
            (8, 32, 128), rule=rule, steps=(0, 1, 150), seed=seed, seeds=n_seeds(times)
        )
        for step in (0, 1, 150):
            row = table.row(step=step)
            found[f"exponent, {name}, step {step}"] = drawn(row, "exponent")
            if step:
                change = drawn(row, "exponent of change")
                found[f"exponent of the change, {name}, step {step}"] = change
            cosine = drawn(row, "cosine d_k=128")
            found[f"cosine of query and its key, {name}, d_k=128, step {step}"] = cosine
    return found


def init_symmetric(seed: int, times: float) -> Measured:
    """W^Q and W^K at Glorot's initialisation, d_model = 64."""
    from ..training import experiments

    table = experiments.start_symmetry((16, 64), draws=max(30, round(400 * times)), seed=seed)
    found: Measured = {}
    for row in table.rows:
        for column in ("mean entry", "log ratio", "skew"):
            found[f"{column} d_k={row['d_k']}"] = drawn(row, column)
    return found


def grads_differ(seed: int, times: float) -> Measured:
    """Distance of dL/dQ and dL/dK for N(0, 1) inputs, d_k = 64."""
    from ..training import experiments

    table = experiments.gradients_differ((8, 64), draws=max(30, round(200 * times)), seed=seed)
    found: Measured = {}
    for row in table.rows:
        for column in ("distance", "cosine", "ratio", "distance Q=K"):
            found[f"{column} n={row['n']}"] = drawn(row, column)
    return found


CLAIMS = (
    Claim(
        id="infer-smaller",
        notes=("000",),
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
        notes=("000",),
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
        id="no-scale-training",
        notes=("000",),
        claim="Without the scale models train badly, the more so the larger d_k and the longer the "
        "sequences.",
        claim_zh="不缩放则收敛更差，d_k 越大、序列越长越严重。",
        expect=(
            harms("loss added without the scale, d_k=32"),
            harms("loss added without the scale, d_k=64"),
            harms("loss unscaled n=32 over n=8"),
        ),
        holds="Each at its best learning rate, the loss without the scale after 150 steps is "
        "{loss unscaled d_k=4}, {loss unscaled d_k=32} and {loss unscaled d_k=64} nats at d_k = "
        "4, 32 and 64 (the last after 600 steps: {loss unscaled d_k=64 after 600 steps}), with it "
        "{loss scaled d_k=4}, {loss scaled d_k=32} and {loss scaled d_k=64}; from n = 8 to 32 it "
        "grows by {loss unscaled n=32 over n=8} without the scale and by {loss scaled n=32 over "
        "n=8} with it. The scale need not be in the kernel: multiplied into the initial W^Q it "
        "gives a loss of {loss initial fold d_k=64} at d_k = 64 and, if the learning rate of W^Q "
        "is multiplied as well, {loss compensated fold d_k=64}.",
        law="Without the scale the loss is {loss unscaled d_k=4}, {loss unscaled d_k=32} and "
        "{loss unscaled d_k=64} nats at d_k = 4, 32 and 64, with it {loss scaled d_k=4}, "
        "{loss scaled d_k=32} and {loss scaled d_k=64}.",
        experiment=no_scale_training,
        slow=True,
        more=2,
    ),
    Claim(
        id="dk-independence",
        notes=("002",),
        claim="With the scale a model does well at every d_k: its performance does not depend on "
        "it.",
        claim_zh="有了缩放，模型性能与 d_k 无关，任何 d_k 下都表现良好。",
        expect=(
            harmless("loss added from d_k=32 to 1"),
            harmless("loss added from d_k=32 to 64"),
        ),
        holds="The loss is {loss d_k=1}, {loss d_k=4}, {loss d_k=32} and {loss d_k=64} nats at "
        "d_k = 1, 4, 32 and 64.",
        law="Not below a width that the task needs: the loss is {loss d_k=1}, {loss d_k=2}, "
        "{loss d_k=4}, {loss d_k=32} and {loss d_k=64} nats at d_k = 1, 2, 4, 32 and 64; the "
        "scale sets the size of the scores, not how many keys d_k numbers can tell apart.",
        experiment=dk_independence,
        slow=True,
        more=2,
    ),
    Claim(
        id="additive-small-dk",
        notes=("002",),
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
        notes=("002",),
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
        id="divergence",
        notes=("004",),
        claim="Training drives W^Q and W^K apart: the norm of their difference grows, in a "
        "positive feedback.",
        claim_zh="训练使 W^Q 与 W^K 分化：两者之差的范数不断增大，形成正反馈。",
        # Growth from 0 to 100 % against shrinking by as much; speeding up against slowing down.
        expect=(
            Expect("growth of the difference, directed task", 0.5, 0.5),
            Expect("growth of the difference, symmetric task", 0.5, 0.5, law=-0.5, law_margin=0.4),
            Expect("acceleration, directed task", 0.5, 0.5, law=-0.5, law_margin=0.4),
        ),
        holds="The difference grows by {growth of the difference, directed task} if queries and "
        "keys use different embeddings and by {growth of the difference, symmetric task} if they "
        "use the same, faster and faster.",
        law="It depends on the task, and there is no feedback. If queries and keys use different "
        "embeddings, W^Q - W^K grows by {growth of the difference, directed task} of its initial "
        "norm, but W^Q + W^K by as much ({growth of the sum, directed task}), and both more and "
        "more slowly. If they use the same embeddings, W^Q - W^K changes by {growth of the "
        "difference, symmetric task}: the two matrices approach each other.",
        experiment=divergence,
        slow=True,
        more=2,
    ),
    Claim(
        id="tied-kv",
        notes=("004",),
        claim="One projection for keys and values is a bottleneck, because the gradients of its "
        "two roles are in conflict.",
        claim_zh="K 与 V 共用一个投影是表征瓶颈，因为两条路径的梯度相互冲突。",
        # A conflict: half of the way from orthogonal to opposite.
        expect=(
            harms("loss added by tying, width 8"),
            harms("loss added by tying, width 32", law=True),
            Expect("cosine of the two gradients width 8", -0.5, 0.25, law=0.0, law_margin=0.15),
            Expect("cosine of the two gradients width 32", -0.5, 0.25, law=0.0, law_margin=0.15),
        ),
        holds="With one projection the loss is {loss tied width 8} and {loss tied width 32} nats "
        "at widths 8 and 32, with two {loss separate width 8} and {loss separate width 32}.",
        law="The bottleneck is the width, and the two gradients hardly conflict. At width 8 the "
        "loss is {loss tied width 8} nats tied and {loss separate width 8} separate, at width 32 "
        "{loss tied width 32} and {loss separate width 32}. The gradients are nearly orthogonal, "
        "with mean cosines of {cosine of the two gradients width 8} and {cosine of the two "
        "gradients width 32}.",
        experiment=tied_kv,
        slow=True,
        more=4,
    ),
    Claim(
        id="always-in-range",
        notes=("004",),
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
        id="stop-learning",
        notes=("004",),
        claim="Where weights are saturated the model stops learning.",
        claim_zh="权重饱和时，模型停止学习。",
        # It learns if it gets beyond a fifth of the way.
        expect=(Expect("loss after 900 steps over ln 8", 1.0, 0.2),),
        holds="Started with a largest weight of {largest weight of a row at the start}, models are "
        "still at {loss after 900 steps over ln 8} of the loss of guessing after 900 steps.",
        law="It keeps learning, slowly. Started with a largest weight of {largest weight of a row "
        "at the start}, models reach {loss after 150 steps over ln 8} of the loss of guessing in "
        "150 steps, {loss after 300 steps over ln 8} in 300 and {loss after 900 steps over ln 8} "
        "in 900; from an ordinary start they reach {loss unsaturated after 150 steps over ln 8} "
        "in 150. The verdict depends on the horizon: this row first used 150 steps, where it was "
        "reproduced.",
        experiment=stop_learning,
        slow=True,
        more=2,
    ),
    Claim(
        id="saturated-gradient",
        notes=("004",),
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
    Claim(
        id="init-symmetric",
        notes=("004",),
        claim="At Xavier initialisation W^Q and W^K are statistically equivalent, and the "
        "expectation of W^Q (W^K)^T is 0.",
        claim_zh="Xavier 初始化下 W^Q 与 W^K 统计等价，且 E[W^Q (W^K)^T] = 0。",
        # In units of the standard deviation of one entry; |W|^2 within 2 percent.
        expect=(
            Expect("mean entry d_k=16", 0.0, 0.02),
            Expect("mean entry d_k=64", 0.0, 0.02),
            Expect("log ratio d_k=16", 0.0, 0.02),
            Expect("log ratio d_k=64", 0.0, 0.02),
        ),
        holds="W^Q and W^K are equivalent: the mean entry of W^Q (W^K)^T is {mean entry d_k=64} "
        "standard deviations, log |W^Q|^2 - log |W^K|^2 is {log ratio d_k=64}. Each draw is far "
        "from symmetric, though: {skew d_k=64} of |W^Q (W^K)^T|^2 is in its antisymmetric part.",
        law="The mean entry is {mean entry d_k=64} standard deviations, log |W^Q|^2 - log |W^K|^2 "
        "is {log ratio d_k=64}.",
        experiment=init_symmetric,
    ),
    Claim(
        id="grads-differ",
        notes=("004",),
        claim="The gradients to Q and to K are different.",
        claim_zh="∂L/∂Q 与 ∂L/∂K 不相等。",
        # From 0, equal, over 1, orthogonal, to sqrt(2), opposite.
        expect=(
            Expect("distance n=8", 1.0, 0.5),
            Expect("distance n=64", 1.0, 0.5),
        ),
        holds="The distance between the two gradients is {distance n=8} and {distance n=64} of "
        "their joint norm at n = 8 and 64: they are orthogonal (cosine {cosine n=64}) and of the "
        "same size on average (ratio {ratio n=64}). Even if Q = K they differ, by {distance Q=K "
        "n=64}.",
        law="Their distance is {distance n=8} and {distance n=64} of their joint norm.",
        experiment=grads_differ,
    ),
    Claim(
        id="trained-exponent",
        notes=("000", "001", "003"),
        claim="q.k is of the size of sqrt(d_k), before training and after it: sqrt(d_k) is the "
        "divisor that makes its size independent of the width.",
        claim_zh="无论训练前后，q·k 的量级都是 sqrt(d_k)，因此除以 sqrt(d_k) 可使其量级与宽度无关"
        "。",
        expect=(
            Expect("exponent, 1/d_k, step 0", 0.5, 0.1),
            Expect("exponent of the change, 1/d_k, step 1", 0.5, 0.1, law=1.0, law_margin=0.2),
            Expect("exponent, 1/d_k, step 150", 0.5, 0.1, law=1.0, law_margin=0.15),
        ),
        holds="The exponent of std(q.k) in d_k is {exponent, 1/d_k, step 0} before training and "
        "{exponent, 1/d_k, step 150} after 150 steps.",
        law="Only before training. What one step of Adam adds to q.k grows with exponent "
        "{exponent of the change, 1/d_k, step 1}, since it moves q and k in a common direction "
        "and their products add up with one sign; after 150 steps under 1/d_k std(q.k) itself has "
        "exponent {exponent, 1/d_k, step 150} (at the start {exponent, 1/d_k, step 0}), under "
        "1/sqrt(d_k) {exponent, 1/sqrt(d_k), step 150}. This is the reason for 1/d_k in muP "
        "(Yang, Hu et al. 2022).",
        experiment=trained_exponent,
        slow=True,
        more=2,
    ),
)
