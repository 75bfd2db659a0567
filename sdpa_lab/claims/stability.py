"""The row on the stability of training; its margin is that of the other rows on training."""

from ..tools.estimate import Draws
from .record import Claim
from .training import Measured, drawn, harms, n_seeds


def unstable_training(seed: int, times: float) -> Measured:
    """Sensitivity to the learning rate with and without the scale, at d_k = 64."""
    from ..training import stability

    table = stability.sensitivity(seeds=n_seeds(times), seed=seed)
    found: Measured = {}
    for steps in (150, 600):
        with_scale, without = (table.row(steps=steps, rule=rule) for rule in ("sqrt d_k", "1"))
        for column, name in (("sensitivity", "sensitivity"), ("window", "decades of good rates")):
            pair = drawn(without, column), drawn(with_scale, column)
            found[f"{name}, unscaled, {steps} steps"] = pair[0]
            found[f"{name}, scaled, {steps} steps"] = pair[1]
            added = Draws(pair[0].values - pair[1].values)
            found[f"{name} added without the scale, {steps} steps"] = added
        gap = drawn(with_scale, "highest").values - drawn(without, "highest").values
        found[f"decades from the highest rate unscaled to that scaled, {steps} steps"] = Draws(gap)
        found[f"loss at the best rate, unscaled, {steps} steps"] = drawn(without, "best")
    return found


CLAIMS = (
    Claim(
        id="unstable-training",
        notes=("000", "003"),
        claim="Without the scale training is unstable.",
        claim_zh="不缩放则训练不稳定。",
        expect=(harms("sensitivity added without the scale, 600 steps"),),
        holds="It is, if instability means sensitivity to the learning rate (Wortsman et al. "
        "2023): averaged over three decades of rates, 600 steps lose {sensitivity, unscaled, 600 "
        "steps} nats against the best rate without the scale and {sensitivity, scaled, 600 steps} "
        "with it; the rates within a tenth of the best span {decades of good rates, unscaled, 600 "
        "steps} decades against {decades of good rates, scaled, 600 steps}. The highest rate that "
        "trains at all is only {decades from the highest rate unscaled to that scaled, 600 "
        "steps:.2f} decades lower. After 150 steps the sensitivities are {sensitivity, unscaled, "
        "150 steps} and {sensitivity, scaled, 150 steps}: without the scale the best rate still "
        "has a loss of {loss at the best rate, unscaled, 150 steps}.",
        law="Averaged over three decades of rates, 600 steps lose {sensitivity, unscaled, 600 "
        "steps} nats against the best rate without the scale, {sensitivity, scaled, 600 steps} "
        "with it.",
        experiment=unstable_training,
        slow=True,
        more=2,
    ),
)
