"""Rows on W^Q, W^K and W^V while models learn, most of them judged at several horizons."""

from contextlib import suppress

import numpy as np

from .. import minilm, smollm2
from ..experiments import symmetry
from ..tools.estimate import Draws, Estimate, exact
from . import record
from .record import HORIZONS, Claim, Expect, Trained, at_horizons, shown_at
from .training import Measured, Values, drawn, harms, loss, n_seeds

EARLY = 60
"""Steps in which the loss of the directed task falls most."""


def divergence(seed: int, times: float) -> Measured:
    """Norm of W^Q - W^K over that of its start, on a directed task and on a symmetric one."""
    at = _Watched(("directed", "symmetric"), 150, seed, times)
    found: Measured = {}
    for task in ("directed", "symmetric"):
        start = {column: at(task, 0, column) for column in ("difference", "sum", "control")}
        for steps in HORIZONS:
            growth = {column: at(task, steps, column) / x - 1 for column, x in start.items()}
            for column, values in growth.items():
                found[f"growth of the {column}, {task} task, {steps} steps"] = Draws(values)
            beyond = Draws(growth["difference"] - growth["sum"])
            found[f"growth of the difference beyond the sum, {task} task, {steps} steps"] = beyond
    return found


def feedback(seed: int, times: float) -> Measured:
    """Whether |W^Q - W^K| and the gradients' difference grow faster and faster; directed task."""
    at = _Watched(("directed",), 15, seed, times)
    found: Measured = {}
    unit = at("directed", 0, "difference")
    gradient = at("directed", 0, "gradient")
    for steps in (EARLY, *HORIZONS):
        for column in ("difference", "sum"):
            start, middle, end = (at("directed", s, column) for s in (0, steps // 2, steps))
            found[f"acceleration of the {column}, {steps} steps"] = Draws(
                (end - middle - (middle - start)) / unit
            )
        ratio = at("directed", steps // 2, "gradient") / gradient
        found[f"difference of the gradients, half of {steps} steps"] = Draws(ratio, "positive")
        found[f"loss, {steps} steps"] = loss(at("directed", steps, "loss"))
    return found


class _Watched:
    """A column of `dynamics.divergence` by task and step, one number per model."""

    def __init__(self, tasks: tuple[str, ...], every: int, seed: int, times: float) -> None:
        from ..training import dynamics

        self._table = dynamics.divergence(
            tasks, every=every, seed=seed, seeds=n_seeds(times), steps=HORIZONS[-1]
        )

    def __call__(self, task: str, step: int, column: str) -> Values:
        return drawn(self._table.row(task=task, step=step), column).values


def tied_kv(seed: int, times: float) -> Measured:
    """One projection for keys and values against two of the same width."""
    from ..training.recall import Setting, compare_at

    base = Setting(seeds=n_seeds(4 * times))
    found: Measured = {}
    for width in (4, 8, 32):
        two, one = (
            compare_at(HORIZONS, base, seed=seed, d_k=width, d_v=width, tied=tied)
            for tied in (False, True)
        )
        for steps in HORIZONS:
            added = Draws(one[steps] - two[steps])
            found[f"loss added by tying, width {width}, {steps} steps"] = added
            found[f"loss tied width {width}, {steps} steps"] = loss(one[steps])
            found[f"loss separate width {width}, {steps} steps"] = loss(two[steps])
    return found


def tied_conflict(seed: int, times: float) -> Measured:
    """The cosine of the two gradients to a projection for keys and values, mean over the steps."""
    from ..training import dynamics

    found: Measured = {}
    for width in (8, 32):
        table = dynamics.tied_paths(
            seed=seed, seeds=n_seeds(times), d_k=width, d_v=width, every=15, steps=HORIZONS[-1]
        )
        for steps in HORIZONS:
            rows = [row for row in table.rows if float(str(row["step"])) < steps]
            cosines = np.array([drawn(row, "cosine").values for row in rows])
            name = f"width {width}, {steps} steps"
            found[f"cosine of the two gradients, {name}"] = Draws(cosines.mean(axis=0))
            found[f"least cosine of the two gradients, {name}"] = Draws(cosines.min(axis=0))
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


def trained_power(seed: int, times: float) -> Measured:
    """Exponent in d_k of std(q.k) after training, by the power of d_k in the divisor."""
    from ..training import dynamics

    found: Measured = {}
    for power, name in DIVISORS.items():
        table = dynamics.correlation(
            (8, 32, 128), steps=(0, *HORIZONS), power=power, seeds=n_seeds(times), seed=seed
        )
        for steps in (0, *HORIZONS):
            exponent = drawn(table.row(step=steps), "exponent")
            found[f"exponent of std(q k), {name}, {steps} steps"] = exponent
    return found


DIVISORS = {0.0: "divided by sqrt(32)", 0.5: "divided by sqrt(d_k)", 1.0: "divided by d_k"}
"""By the power of d_k; all of them are sqrt(32) at d_k = 32."""


def symmetric_share(seed: int, times: float) -> record.Measured:
    """Symmetric share of W^Q W^K^T: independent matrices, and the heads of pretrained models."""
    found: dict[str, Draws | Estimate] = {}
    for d_model, d_k in ((minilm.D_MODEL, minilm.D_K), (smollm2.D_MODEL, smollm2.D_K)):
        shares = symmetry.random_share(d_model, d_k, draws=record.draws(40, times), seed=seed)
        found[f"symmetric share at random, d_model={d_model} d_k={d_k}"] = Draws(shares)
    for name, model in PRETRAINED.items():
        with suppress(ImportError):
            table = symmetry.symmetric_share(model=model.load())
            for row in table.where(head="all").rows:
                share = exact(float(str(row["share"])))
                found[f"{name} symmetric share, layer {row['layer']}"] = share
            for column, words in (
                ("share", "all heads"),
                ("crossed", "with the key of another head"),
            ):
                mean = float(np.mean(table.where(head="all")[column]))
                found[f"{name} symmetric share, {words}"] = exact(mean)
            heads = table["share"][table["head"] != "all"]
            found[f"{name} share of heads below one half"] = exact(float(np.mean(heads < 0.5)))
    return found


PRETRAINED: dict[str, type[minilm.MiniLM] | type[smollm2.SmolLM2]] = {
    "MiniLM": minilm.MiniLM,
    "SmolLM2": smollm2.SmolLM2,
}


def _more(figure: str, horizon: int) -> Expect:
    """At least a fifth, about half of the growth; our law: within a tenth of 0."""
    return Expect(figure, 0.2, (0, None), law=0.0, law_margin=0.1, horizon=horizon)


CLAIMS = (
    Claim(
        id="divergence",
        claim="Training drives W^Q and W^K apart: the norm of their difference grows.",
        claim_zh="训练使 W^Q 与 W^K 分化：两者之差的范数不断增大。",
        expect=(
            *at_horizons(
                Expect("growth of the difference, directed task", 0.1, (0, None)),
                Expect(
                    "growth of the difference, symmetric task",
                    0.1,
                    (0, None),
                    law=-0.3,
                    law_margin=0.2,
                ),
            ),
            *(
                _more(f"growth of the difference beyond the sum, directed task, {h} steps", h)
                for h in HORIZONS
            ),
        ),
        holds="In 150, 600 and 1200 steps the difference grows by "
        f"{shown_at('growth of the difference, directed task')} if queries and keys use different "
        "embeddings, and by {growth of the difference, symmetric task, 150 steps} in 150 if they "
        "use the same.",
        law="The task decides. If queries and keys use different embeddings, W^Q - W^K grows by "
        "{growth of the difference, directed task, 150 steps} of its initial norm in 150 steps "
        "and {growth of the difference, directed task, 1200 steps} in 1200, but W^Q + W^K by as "
        "much ({growth of the sum, directed task, 150 steps}, {growth of the sum, directed task, "
        "1200 steps}): both matrices grow, they do not turn apart. If they use the same "
        "embeddings, W^Q - W^K changes by {growth of the difference, symmetric task, 150 steps} "
        "and {growth of the difference, symmetric task, 1200 steps}: the two matrices approach "
        "each other.",
        experiment=divergence,
        slow=True,
        more=2,
    ),
    Claim(
        id="feedback",
        claim="The difference of W^Q and W^K feeds on itself: it is amplified, and the gradients "
        "then differ more.",
        claim_zh="W^Q 与 W^K 的差异形成正反馈：差异被放大，下一步的梯度差异更大。",
        # Faster in the second half of the steps than in the first, by a twentieth of the start.
        expect=tuple(
            expect
            for h in (EARLY, *HORIZONS)
            for expect in (
                Expect(f"acceleration of the difference, {h} steps", 0.05, (0, None), horizon=h),
                Expect(
                    f"difference of the gradients, half of {h} steps", 1.2, (0, None), horizon=h
                ),
            )
        ),
        holds="From the first half of the steps to the second the growth of W^Q - W^K changes by "
        "{acceleration of the difference, 1200 steps} of its initial norm.",
        law="From the first half of the steps to the second the growth of W^Q - W^K changes by "
        "{acceleration of the difference, 150 steps} of its initial norm in 150 steps and "
        "{acceleration of the difference, 1200 steps} in 1200.",
        depends="There is a phase that reinforces itself, and it ends with the loss. In the first "
        "60 steps, while the loss falls to {loss, 60 steps}, the growth of W^Q - W^K gains "
        "{acceleration of the difference, 60 steps} of its initial norm from the first half to "
        "the second and the gradients' difference becomes {difference of the gradients, half of "
        "60 steps} times as large; but the growth of W^Q + W^K gains as much ({acceleration of "
        "the sum, 60 steps}), so it is learning that speeds up, not a divergence. Over 150 steps, "
        "to a loss of {loss, 150 steps}, the growth changes by {acceleration of the difference, "
        "150 steps}, over 1200 by {acceleration of the difference, 1200 steps}.",
        experiment=feedback,
        slow=True,
        more=2,
    ),
    Claim(
        id="tied-kv",
        claim="One projection for keys and values is a bottleneck of representation.",
        claim_zh="K 与 V 共用一个投影是表征瓶颈。",
        expect=at_horizons(
            harms("loss added by tying, width 8", law=True),
            harms("loss added by tying, width 32", law=True),
        ),
        holds="After 1200 steps tying adds {loss added by tying, width 8, 1200 steps} and {loss "
        "added by tying, width 32, 1200 steps} nats at widths 8 and 32.",
        law="Only where it is too narrow for both roles: at width 4 one projection in place of two "
        "adds {loss added by tying, width 4, 150 steps} nats after 150 steps and {loss added by "
        "tying, width 4, 1200 steps} after 1200. At width 8 it is slower and no bottleneck: "
        f"{shown_at('loss added by tying, width 8')} after 150, 600 and 1200; at width 32 "
        "{loss added by tying, width 32, 150 steps} after 150.",
        experiment=tied_kv,
        slow=True,
        more=2,
    ),
    Claim(
        id="tied-conflict",
        claim="The gradients of the two roles of a projection for keys and values are in conflict.",
        claim_zh="K 与 V 共用一个投影时，来自两条路径的梯度相互冲突。",
        # A conflict: half of the way from orthogonal to opposite.
        expect=at_horizons(
            *(
                Expect(f"cosine of the two gradients, width {w}", -0.5, 0.2, law=0.0)
                for w in (8, 32)
            )
        ),
        holds="The mean cosine of the two gradients is {cosine of the two gradients, width 8, 150 "
        "steps} at width 8.",
        law="They are nearly orthogonal: the mean cosine over 150 steps is {cosine of the two "
        "gradients, width 8, 150 steps} and {cosine of the two gradients, width 32, 150 steps} "
        "at widths 8 and 32, over 1200 {cosine of the two gradients, width 8, 1200 steps} and "
        "{cosine of the two gradients, width 32, 1200 steps}; the least cosine of a step at width "
        "8 is {least cosine of the two gradients, width 8, 1200 steps}.",
        experiment=tied_conflict,
        slow=True,
        more=2,
    ),
    Claim(
        id="init-symmetric",
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
        id="symmetric-share",
        claim="W^Q and W^K of a head are as unrelated after training as at initialisation: half of "
        "|W^Q (W^K)^T|^2 is symmetric.",
        claim_zh="训练之后，一个头的 W^Q 与 W^K 仍和初始化时一样互不相关：|W^Q (W^K)^T|^2 "
        "有一半是对称的。",
        expect=tuple(
            Expect(f"symmetric share at random, d_model={d_model} d_k={d_k}", 0.5, 0.02)
            for d_model, d_k in ((minilm.D_MODEL, minilm.D_K), (smollm2.D_MODEL, smollm2.D_K))
        ),
        holds="At initialisation it is: {symmetric share at random, d_model=384 d_k=32} and "
        "{symmetric share at random, d_model=576 d_k=64} with the widths of two pretrained models.",
        law="At initialisation it is {symmetric share at random, d_model=384 d_k=32} and "
        "{symmetric share at random, d_model=576 d_k=64}.",
        trained=tuple(
            Trained(
                model,
                (Expect(f"{name} symmetric share, all heads", 0.5, 0.02),),
                f"the symmetric share is {{{name} symmetric share, all heads:.3f}} averaged over "
                f"all heads, {{{name} symmetric share, with the key of another head:.3f}} where "
                f"W^Q meets the W^K of another head of its layer, and below one half in "
                f"{{{name} share of heads below one half:.0%}} of the heads.",
            )
            for name, model in (("MiniLM", minilm.MODEL), ("SmolLM2", smollm2.MODEL))
        ),
        experiment=symmetric_share,
        slow=True,
    ),
    Claim(
        id="trained-power",
        claim="After training, too, q.k has the size of sqrt(d_k), whatever it is divided by.",
        claim_zh="训练之后 q·k 的大小仍为 sqrt(d_k)，与除以什么无关。",
        expect=at_horizons(
            Expect("exponent of std(q k), divided by sqrt(d_k)", 0.5, 0.1),
            Expect("exponent of std(q k), divided by d_k", 0.5, 0.1),
        ),
        holds="Its exponent in d_k after 1200 steps is {exponent of std(q k), divided by "
        "sqrt(d_k), 1200 steps} where it is divided by sqrt(d_k) and {exponent of std(q k), "
        "divided by d_k, 1200 steps} where it is divided by d_k.",
        law="The divisor decides: the task asks for scaled scores of some size at every width, and "
        "q.k becomes as large as they need. From {exponent of std(q k), divided by sqrt(d_k), 0 "
        "steps} before training its exponent in d_k goes to "
        f"{shown_at('exponent of std(q k), divided by sqrt(d_k)')} after 150, 600 and 1200 steps "
        "of Adam where it is divided by sqrt(d_k), and to "
        f"{shown_at('exponent of std(q k), divided by d_k')} where it is divided by d_k. "
        "Divided by sqrt(32) at every width, it goes to {exponent of std(q k), divided by "
        "sqrt(32), 1200 steps} (d_k = 8, 32 and 128).",
        experiment=trained_power,
        slow=True,
        more=2,
    ),
)
