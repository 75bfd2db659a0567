"""Rows on the step size: how much the learning rate matters, and how far one step moves scores.

The margins of the sensitivity are those of the other rows on training.
"""

from functools import cache

from ..experiments.first_step import first_step_exponents
from ..tools.estimate import Draws
from ..tools.table import Cell
from .record import HORIZONS, Claim, Expect, at_horizons, shown_at
from .training import Measured, drawn, harmless, harms, n_seeds, saves

SWEPT = "models of several learning rates"
"""What the rows of `sensitivities` and `caps` share: those with 1/sqrt(d_k) alone."""

NAMES = {"none": "unscaled", "1/sqrt(d_k)": "scaled", "QK-norm": "QK-norm"}


def _sweep(names: dict[str, str], seeds: int, seed: int) -> dict[int, dict[str, dict[str, Cell]]]:
    """Rows by horizon and name, of the variants that `names` has names for.

    Seven rates of three decades at d_k = 64.
    """
    from ..training import stability

    table = stability.sensitivity(
        HORIZONS, variants=tuple(names), rates=stability.RATES[::2], seeds=seeds, seed=seed
    )
    return {
        steps: {name: table.row(steps=steps, variant=key) for key, name in names.items()}
        for steps in HORIZONS
    }


@cache
def sensitivities(seed: int, times: float) -> Measured:
    """Sensitivity to the learning rate at d_k = 64, seven rates of three decades.

    Without a scale, with it, and with queries and keys of length 1 and a learned temperature.
    """
    found: Measured = {}
    for steps, rows in _sweep(NAMES, n_seeds(3 * times), seed).items():
        for name, row in rows.items():
            found[f"sensitivity, {name}, {steps} steps"] = drawn(row, "sensitivity")
            found[f"decades of good rates, {name}, {steps} steps"] = drawn(row, "window")
            found[f"log10 of the highest rate, {name}, {steps} steps"] = drawn(row, "highest")
            found[f"loss at the best rate, {name}, {steps} steps"] = drawn(row, "best")
        scaled = drawn(rows["scaled"], "sensitivity").values
        for name, figure in (
            ("unscaled", "sensitivity added without the scale"),
            ("QK-norm", "sensitivity added by QK-norm in place of the scale"),
        ):
            other = drawn(rows[name], "sensitivity").values
            found[f"{figure}, {steps} steps"] = Draws(other - scaled)
        best = [drawn(rows[name], "best").values for name in ("QK-norm", "scaled")]
        found[f"loss added by QK-norm at the best rate, {steps} steps"] = Draws(best[0] - best[1])
    return found


@cache
def caps(seed: int, times: float) -> Measured:
    """Sensitivity with 1/sqrt(d_k) alone, and with softcap at 50 or QK-clip at 100 besides."""
    names = {"1/sqrt(d_k)": "scaled", "softcap 50": "softcap", "QK-clip 100": "QK-clip"}
    found: Measured = {}
    for steps, rows in _sweep(names, n_seeds(times), seed).items():
        for name, row in rows.items():
            found[f"sensitivity, {name}, {steps} steps"] = drawn(row, "sensitivity")
            found[f"log10 of the highest rate, {name}, {steps} steps"] = drawn(row, "highest")
        scaled = drawn(rows["scaled"], "sensitivity").values
        for name in ("softcap", "QK-clip"):
            saved = Draws(scaled - drawn(rows[name], "sensitivity").values)
            found[f"sensitivity saved by {name}, {steps} steps"] = saved
    return found


def first_step(seed: int, times: float) -> Measured:
    """Exponents in d_k of the change of the scaled scores in one step; a draw is a model."""
    table = first_step_exponents(draws=n_seeds(times), seed=seed)
    return {
        f"exponent, {row['optimiser']}, divided by {row['divisor']}": drawn(row, "exponent")
        for row in table.rows
    }


def _cap(id: str, name: str, claim: str, claim_zh: str) -> Claim:
    """A row of `caps`."""
    loses = (
        "averaged over three decades of learning rates, training loses "
        f"{shown_at(f'sensitivity, {name}')} nats against its best rate after 150, 600 and 1200 "
        f"steps, {shown_at('sensitivity, scaled')} without it."
    )
    return Claim(
        id=id,
        claim=claim,
        claim_zh=claim_zh,
        expect=at_horizons(saves(f"sensitivity saved by {name}")),
        holds=f"It does: {loses} The highest rate that trains at all after 600 steps is "
        f"10^{{log10 of the highest rate, {name}, 600 steps:.1f}} against "
        "10^{log10 of the highest rate, scaled, 600 steps:.1f}.",
        law=loses[:1].upper() + loses[1:],
        experiment=caps,
        shares=SWEPT,
        slow=True,
        more=2,
    )


CLAIMS = (
    Claim(
        id="unstable-training",
        claim="Without the scale training is unstable.",
        claim_zh="不缩放则训练不稳定。",
        expect=at_horizons(harms("sensitivity added without the scale")),
        holds="It is, if instability means sensitivity to the learning rate (Wortsman et al. "
        "2023): averaged over three decades of rates, training loses "
        f"{shown_at('sensitivity, unscaled')} nats against the best rate without the scale after "
        "150, 600 and 1200 steps, "
        f"{shown_at('sensitivity, scaled')} with it.",
        law="Averaged over three decades of rates, training loses "
        f"{shown_at('sensitivity, unscaled')} nats against the best rate without the scale after "
        f"150, 600 and 1200 steps, {shown_at('sensitivity, scaled')} with it.",
        depends="Where training is long enough to learn without the scale, it is, if instability "
        "means sensitivity to the learning rate (Wortsman et al. 2023): averaged over three "
        f"decades of rates, training loses {shown_at('sensitivity, unscaled')} nats against the "
        "best rate without the scale after 150, 600 and 1200 steps, "
        f"{shown_at('sensitivity, scaled')} with it. At first no rate has got far without the "
        "scale: the best one has a loss of {loss at the best rate, unscaled, 150 steps} after 150 "
        "steps. After 600 the rates within a tenth of the best span {decades of good rates, "
        "unscaled, 600 steps} decades against {decades of good rates, scaled, 600 steps}; the "
        "highest that trains at all is 10^{log10 of the highest rate, unscaled, 600 steps:.1f} "
        "against 10^{log10 of the highest rate, scaled, 600 steps:.1f}.",
        experiment=sensitivities,
        shares=SWEPT,
        slow=True,
        more=2,
    ),
    Claim(
        id="qk-norm",
        claim="Normalisation plays a role like that of the scale: with queries and keys normalised "
        "and a learned temperature, training is as stable.",
        claim_zh="归一化起着与缩放类似的作用：对 q、k 做归一化并学习温度，训练同样稳定。",
        expect=at_horizons(
            harmless("sensitivity added by QK-norm in place of the scale"),
            harmless("loss added by QK-norm at the best rate"),
        ),
        holds="It does the work of the scale, and more: averaged over three decades of learning "
        f"rates, training with QK-norm and no scale loses {shown_at('sensitivity, QK-norm')} nats "
        "against its best rate after 150, 600 and 1200 steps, with 1/sqrt(d_k) "
        f"{shown_at('sensitivity, scaled')}. After 600 steps the rates within a tenth of the best "
        "span {decades of good rates, QK-norm, 600 steps} decades against {decades of good rates, "
        "scaled, 600 steps}.",
        law=f"Training with QK-norm and no scale loses {shown_at('sensitivity, QK-norm')} nats "
        "against its best rate after 150, 600 and 1200 steps, with 1/sqrt(d_k) "
        f"{shown_at('sensitivity, scaled')}; its best loss exceeds that with the scale by "
        "{loss added by QK-norm at the best rate, 600 steps} after 600.",
        experiment=sensitivities,
        shares=SWEPT,
        slow=True,
        more=2,
    ),
    _cap(
        "softcap",
        "softcap",
        "A softcap on the scores (Gemma 2) makes training more stable than 1/sqrt(d_k) alone.",
        "用 softcap 限制分数（Gemma 2），训练比只除以 sqrt(d_k) 更稳定。",
    ),
    _cap(
        "qk-clip",
        "QK-clip",
        "QK-clip (Kimi K2) makes training more stable than 1/sqrt(d_k) alone.",
        "用 QK-clip 限制分数（Kimi K2），训练比只除以 sqrt(d_k) 更稳定。",
    ),
    Claim(
        id="first-step",
        claim="Dividing by sqrt(d_k) makes training independent of d_k: one step changes the "
        "scores alike at every d_k.",
        claim_zh="除以 sqrt(d_k) 使训练与 d_k 无关：无论 d_k 多大，一步更新对分数的改变都相同。",
        # In the exponent of d_k; the law is half a power.
        expect=(
            Expect("exponent, SGD, divided by sqrt(d_k)", 0.0, 0.2),
            Expect("exponent, Adam, divided by sqrt(d_k)", 0.0, 0.2, law=0.5),
            Expect("exponent, Muon, divided by sqrt(d_k)", 0.0, 0.2),
        ),
        holds="The exponents are {exponent, SGD, divided by sqrt(d_k)} with SGD and {exponent, "
        "Adam, divided by sqrt(d_k)} with Adam.",
        law="It depends on the optimiser. At one learning rate, the change of the scaled scores in "
        "the first step is constant in d_k with sqrt(d_k) under SGD (exponent {exponent, SGD, "
        "divided by sqrt(d_k)}) and Muon ({exponent, Muon, divided by sqrt(d_k)}), but with d_k "
        "under Adam ({exponent, Adam, divided by d_k}; with sqrt(d_k) {exponent, Adam, divided by "
        "sqrt(d_k)}). SGD's step carries the scale c, so the change is c c d_k; Adam's does not, "
        "and it is c d_k, the reason for 1/d_k in muP (Yang, Hu et al. 2022). This is the first "
        "step, at a fixed d_model and components of variance 1 at the start.",
        experiment=first_step,
        more=4,
    ),
)
