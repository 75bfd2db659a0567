"""Rows on how well and how soon models learn, judged after 150, 600 and 1200 steps.

The task and the margins are those of `training`. A model that has solved the task is kept as it is
(`recall.compare_at`); all others go on, from 150 steps to 600 and 1200. Where learning is slow, a
figure is on its way across its margin after 600 steps, whatever the number of draws: those rows
have no second look.
"""

from functools import cache
from math import log

from ..tools.estimate import Draws
from .record import HORIZONS, Claim, Expect, at_horizons, shown_at
from .training import (
    Measured,
    Values,
    drawn,
    harmless,
    harms,
    loss,
    n_seeds,
    saturated_start,
)

SLOW, FAST = (1e-3, 3e-3, 1e-2), (3e-3, 1e-2, 3e-2)
"""Learning rates: those that suit unscaled models of 32 or more dimensions, and all others."""


def _added(name: str, found: dict[int, Values], base: dict[int, Values]) -> Measured:
    return {f"{name}, {h} steps": Draws(found[h] - base[h]) for h in HORIZONS}


def _losses(name: str, found: dict[int, Values]) -> Measured:
    return {f"{name}, {h} steps": loss(found[h]) for h in HORIZONS}


def no_scale_training(seed: int, times: float) -> Measured:
    """Best loss with and without the scale at d_k = 4, 32 and 64; the scale folded into W^Q."""
    from ..training.experiments import steps_needed
    from ..training.recall import Setting, compare, compare_at

    base = Setting(seeds=n_seeds(times))
    found: Measured = {}
    for d_k, rates in ((4, FAST), (32, SLOW), (64, SLOW)):
        without = compare_at(HORIZONS, base, seed=seed, d_k=d_k, rule="1", rates=rates)
        scaled = compare_at(HORIZONS, base, seed=seed, d_k=d_k, rates=FAST)
        found |= _added(f"loss added without the scale, d_k={d_k}", without, scaled)
        found |= _losses(f"loss unscaled d_k={d_k}", without)
        found |= _losses(f"loss scaled d_k={d_k}", scaled)
    for fold, chosen in (("initial", SLOW), ("compensated", FAST)):
        folded = compare(base, seed=seed, d_k=64, fold=fold, rates=chosen)
        found[f"loss {fold} fold d_k=64"] = loss(folded)
    table = steps_needed((64,), seeds=base.seeds, seed=seed)
    steps = {str(row["rule"]): drawn(row, "steps").values for row in table.rows}
    found["steps without the scale over steps with it, d_k=64"] = Draws(
        steps["1"] / steps["sqrt d_k"], "positive"
    )
    return found


def no_scale_length(seed: int, times: float) -> Measured:
    """Best loss at n = 32 over that at n = 8, without the scale and with it; d_k = 32."""
    from ..training.recall import Setting, compare_at

    base = Setting(seeds=n_seeds(times))
    found: Measured = {}
    for name, rule, rates in (("unscaled", "1", SLOW), ("scaled", "sqrt d_k", FAST)):
        short, long = (
            compare_at(HORIZONS, base, seed=seed, n=n, rule=rule, rates=rates) for n in (8, 32)
        )
        found |= _added(f"loss {name} n=32 over n=8", long, short)
        found |= _losses(f"loss {name} n=32", long)
    return found


def dk_independence(seed: int, times: float) -> Measured:
    """Best loss with 1/sqrt(d_k) at every d_k against that at 32."""
    from ..training.recall import Setting, compare_at

    base = Setting(seeds=n_seeds(times), rates=FAST)
    losses = {d_k: compare_at(HORIZONS, base, seed=seed, d_k=d_k) for d_k in (1, 2, 4, 32, 64)}
    found: Measured = {}
    for d_k, each in losses.items():
        found |= _losses(f"loss d_k={d_k}", each)
        if d_k != 32:
            found |= _added(f"loss added from d_k=32 to {d_k}", each, losses[32])
    return found


def stop_learning(seed: int, times: float) -> Measured:
    """Loss of training that starts saturated, scores 64 times as large, and of others; d_k = 32."""
    seeds = n_seeds(8 * times)
    found: Measured = {}
    for steps in HORIZONS:
        row = saturated_start(8, seed, seeds=seeds, rates=(1e-2,), steps=steps)
        found[f"loss over ln 8, {steps} steps"] = loss(row["loss"] / log(8))
    plain = saturated_start(1, seed, seeds=seeds)
    found["loss unsaturated after 150 steps over ln 8"] = loss(plain["loss"] / log(8))
    found["largest weight of a row at the start"] = Draws(row["max weight"])
    return found


@cache
def larger_divisors(seed: int, times: float) -> Measured:
    """Best loss with larger divisors against sqrt(d_k), and the weight on the key asked for."""
    from ..training.recall import Setting, compare_at, trained

    base = Setting(seeds=n_seeds(times), rates=FAST)
    found: Measured = {}
    for d_k in (64, 256):
        own = compare_at(HORIZONS, base, seed=seed, d_k=d_k)
        found |= _losses(f"loss divided by sqrt(d_k), d_k={d_k}", own)
        for rule, name in RULES.items():
            other = compare_at(HORIZONS, base, seed=seed, d_k=d_k, rule=rule)
            found |= _losses(f"loss divided by {name}, d_k={d_k}", other)
            found |= _added(f"loss added by {name}, d_k={d_k}", other, own)
    for rule, name in {"sqrt d_k": "sqrt(d_k)", "d_k": "d_k"}.items():
        setting = Setting(seeds=base.seeds, rates=FAST, d_k=64, rule=rule)
        models = trained(setting, seed)
        weight = models.found()[models.best()]
        found[f"weight on the key asked for, divided by {name}, d_k=64"] = Draws(weight)
    return found


RULES = {"2 sqrt d_k": "2 sqrt(d_k)", "4 sqrt d_k": "4 sqrt(d_k)", "d_k": "d_k"}

CLAIMS = (
    Claim(
        id="no-scale-training",
        claim="Without the scale models are hard to bring to convergence, the more so the larger "
        "d_k.",
        claim_zh="不缩放则模型难以收敛，d_k 较大时尤其如此。",
        expect=at_horizons(
            harms("loss added without the scale, d_k=32"),
            harms("loss added without the scale, d_k=64"),
        ),
        holds="Each at its best learning rate, the loss without the scale at d_k = 64 is "
        f"{shown_at('loss unscaled d_k=64')} nats after 150, 600 and 1200 steps, with it "
        "{loss scaled d_k=64, 150 steps} after 150.",
        law="Each at its best learning rate, the loss without the scale at d_k = 64 is "
        f"{shown_at('loss unscaled d_k=64')} nats after 150, 600 and 1200 steps.",
        depends="They are slow, and not worse in the end: a loss of a tenth of guessing takes "
        "{steps without the scale over steps with it, d_k=64} times as many steps at d_k = 64, "
        "each at its best learning rate. The loss without the scale at d_k = 4, 32 and 64 is "
        "{loss unscaled d_k=4, 150 steps}, {loss unscaled d_k=32, 150 steps} and {loss unscaled "
        "d_k=64, 150 steps} nats after 150 steps and {loss unscaled d_k=4, 1200 steps}, {loss "
        "unscaled d_k=32, 1200 steps} and {loss unscaled d_k=64, 1200 steps} after 1200; with it "
        "{loss scaled d_k=4, 150 steps}, {loss scaled d_k=32, 150 steps} and {loss scaled d_k=64, "
        "150 steps} after 150. The scale need not be in the kernel: multiplied into the initial "
        "W^Q it gives {loss initial fold d_k=64} at d_k = 64 and, if the learning rate of W^Q is "
        "multiplied as well, {loss compensated fold d_k=64}.",
        experiment=no_scale_training,
        slow=True,
        more=1,
    ),
    Claim(
        id="no-scale-length",
        claim="Without the scale longer sequences do markedly worse.",
        claim_zh="不缩放时，长序列的性能会显著下降。",
        expect=at_horizons(harms("loss unscaled n=32 over n=8")),
        holds=f"From n = 8 to 32 the loss grows by {shown_at('loss unscaled n=32 over n=8')} nats "
        f"without the scale and by {shown_at('loss scaled n=32 over n=8')} with it.",
        law=f"From n = 8 to 32 the loss grows by {shown_at('loss unscaled n=32 over n=8')} nats "
        "without the scale.",
        depends="They learn more slowly, and reach the same in the end: from n = 8 to 32 the loss "
        f"grows by {shown_at('loss unscaled n=32 over n=8')} nats without the scale and by "
        "{loss scaled n=32 over n=8, 150 steps} with it.",
        experiment=no_scale_length,
        slow=True,
        more=1,
    ),
    Claim(
        id="dk-independence",
        claim="With the scale a model does well at every d_k: its performance does not depend on "
        "it.",
        claim_zh="有了缩放，模型性能与 d_k 无关，任何 d_k 下都表现良好。",
        expect=at_horizons(
            harmless("loss added from d_k=32 to 1"),
            harmless("loss added from d_k=32 to 64"),
        ),
        holds="After 1200 steps the loss is {loss d_k=1, 1200 steps}, {loss d_k=4, 1200 steps}, "
        "{loss d_k=32, 1200 steps} and {loss d_k=64, 1200 steps} nats at d_k = 1, 4, 32 and 64.",
        law="Not at every width: after 150, 600 and 1200 steps the loss is "
        f"{shown_at('loss d_k=1')} nats at d_k = 1 and {shown_at('loss d_k=2')} at d_k = 2. From "
        f"d_k = 4 on it is a matter of time: {shown_at('loss d_k=4')} at 4, "
        "{loss d_k=64, 150 steps} after 150 steps at 64. The scale "
        "sets the size of the scores, not how many keys d_k numbers can tell apart.",
        experiment=dk_independence,
        slow=True,
        more=2,
    ),
    Claim(
        id="stop-learning",
        claim="Where weights are saturated the model stops learning.",
        claim_zh="权重饱和时，模型停止学习。",
        # It learns if it gets beyond a fifth of the way.
        expect=at_horizons(Expect("loss over ln 8", 1.0, 0.2, law=0.4, law_margin=0.2)),
        holds="Started with a largest weight of {largest weight of a row at the start}, models are "
        "still at {loss over ln 8, 1200 steps} of the loss of guessing after 1200 steps.",
        law="It keeps learning. Started with a largest weight of {largest weight of a row at the "
        "start}, models reach {loss over ln 8, 150 steps} of the loss of guessing in 150 steps, "
        "{loss over ln 8, 600 steps} in 600 and {loss over ln 8, 1200 steps} in 1200.",
        depends="It keeps learning, slowly. Started with a largest weight of {largest weight of a "
        "row at the start}, models reach {loss over ln 8, 150 steps} of the loss of guessing in "
        "150 steps, {loss over ln 8, 600 steps} in 600 and {loss over ln 8, 1200 steps} in 1200; "
        "from an ordinary start they reach {loss unsaturated after 150 steps over ln 8} in 150.",
        experiment=stop_learning,
        slow=True,
        more=2,
    ),
    Claim(
        id="dk-selectivity",
        claim="Dividing by d_k makes the weights too even: the model loses its selectivity.",
        claim_zh="除以 d_k 会使注意力权重过于平均，模型失去选择性。",
        expect=(
            *at_horizons(
                harms("loss added by d_k, d_k=64", law=True),
                harms("loss added by d_k, d_k=256", law=True),
            ),
            # Selective: most of the weight is on the one key that is asked for.
            Expect(
                "weight on the key asked for, divided by d_k, d_k=64",
                0.5,
                (None, 0),
                law=0.9,
                law_margin=(0, 0.1),
            ),
        ),
        holds="At d_k = 64 and 256 dividing by d_k adds {loss added by d_k, d_k=64, 1200 steps} "
        "and {loss added by d_k, d_k=256, 1200 steps} nats after 1200 steps.",
        law="Only at the start. A model that is trained, at its best learning rate, becomes "
        "selective, if less so than with sqrt(d_k), and does as well: after 150 steps at d_k = 64 "
        "the key that is asked for has a weight of {weight on the key asked for, divided by d_k, "
        "d_k=64}, with sqrt(d_k) {weight on the key asked for, divided by sqrt(d_k), d_k=64}; the "
        "loss is {loss divided by d_k, d_k=64, 150 steps} nats against {loss divided by "
        "sqrt(d_k), d_k=64, 150 steps}, at d_k = 256 "
        "{loss divided by d_k, d_k=256, 150 steps} against {loss divided by sqrt(d_k), d_k=256, "
        "150 steps}. Too large a divisor does no harm here, too small a one does.",
        depends="At d_k = 64 and 256 dividing by d_k adds {loss added by d_k, d_k=64, 150 steps} "
        "and {loss added by d_k, d_k=256, 150 steps} nats after 150 steps, {loss added by d_k, "
        "d_k=64, 1200 steps} and {loss added by d_k, d_k=256, 1200 steps} after 1200.",
        experiment=larger_divisors,
        slow=True,
        more=2,
    ),
    Claim(
        id="two-sqrt-harm",
        claim="Dividing by 2 sqrt(d_k) makes the weights less effective.",
        claim_zh="除以 2 sqrt(d_k) 使输入量级过小，同样影响注意力权重的有效性。",
        expect=at_horizons(
            harms("loss added by 2 sqrt(d_k), d_k=64", law=True),
            harms("loss added by 2 sqrt(d_k), d_k=256", law=True),
        ),
        holds="At d_k = 64 and 256 it adds {loss added by 2 sqrt(d_k), d_k=64, 1200 steps} and "
        "{loss added by 2 sqrt(d_k), d_k=256, 1200 steps} nats after 1200 steps.",
        law="Not for a model that is trained, at its best learning rate: divided by sqrt(d_k), 2 "
        "sqrt(d_k) and 4 sqrt(d_k) the loss after 150 steps is {loss divided by sqrt(d_k), "
        "d_k=64, 150 steps}, {loss divided by 2 sqrt(d_k), d_k=64, 150 steps} and {loss divided "
        "by 4 sqrt(d_k), d_k=64, 150 steps} nats at d_k = 64 and {loss divided by sqrt(d_k), "
        "d_k=256, 150 steps}, {loss divided by 2 sqrt(d_k), d_k=256, 150 steps} and {loss divided "
        "by 4 sqrt(d_k), d_k=256, 150 steps} at 256.",
        depends="It adds {loss added by 2 sqrt(d_k), d_k=64, 150 steps} and {loss added by 2 "
        "sqrt(d_k), d_k=256, 150 steps} nats at d_k = 64 and 256 after 150 steps, {loss added by "
        "2 sqrt(d_k), d_k=64, 1200 steps} and {loss added by 2 sqrt(d_k), d_k=256, 1200 steps} "
        "after 1200.",
        experiment=larger_divisors,
        slow=True,
        more=2,
    ),
)
