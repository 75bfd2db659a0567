"""Whether training is stable: how much the learning rate matters, and how entropy collapses.

As in `experiments`, every function has a seed, counts models that differ in the seed alone as
independent draws, and takes `settings` of `recall.Setting` as keywords.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import sdpa

from ..tools.estimate import Draws
from ..tools.table import Cell, Table
from .optimise import Arrays
from .recall import CHANCE, Progress, Rows, Setting, Trained, Values, train, trained

RATES = tuple(float(f"{10 ** (power / 4):.2g}") for power in range(-14, -1))
"""Three decades in quarters: 0.00032 to 0.32."""

TENTH = 0.1 * CHANCE

VARIANTS: dict[str, dict[str, Any]] = {
    "none": {"rule": "1"},
    "1/sqrt(d_k)": {"rule": "sqrt d_k"},
    "1/d_k": {"rule": "d_k"},
    "QK-norm": {"mechanism": "cosine", "rule": "1"},
    "softcap 50": {"rule": "sqrt d_k", "softcap": 50.0},
    "QK-clip 100": {"rule": "sqrt d_k", "clip": 100.0},
}
"""What keeps scores in bounds, as settings of `recall.Setting`: nothing, a scale, queries and keys
of length 1 with a learned temperature, and 1/sqrt(d_k) with the cap of Gemma 2 or the clip of Kimi
K2, whose limits these are."""


def learning_rates(
    steps: Sequence[int] = (150, 600),
    *,
    variants: Sequence[str] = ("none", "1/sqrt(d_k)"),
    d_k: int = 64,
    rates: Sequence[float] = RATES,
    seeds: int = 8,
    seed: int = 0,
    progress: Progress = None,
    **settings: Any,
) -> Table:
    """Loss at every learning rate, with the scale and without; `variants` of VARIANTS.

    Returns
    -------
    Table
        steps, variant, rate, loss (nats), worse (share of models that end worse than guessing).
    """
    rows: Rows = []
    for variant, models in _swept(steps, variants, d_k, rates, seeds, seed, progress, settings):
        losses, setting = models.test_loss(), models.setting
        rows += [
            {
                "steps": setting.steps,
                "variant": variant,
                "rate": rate,
                "loss": Draws(losses[i], "positive"),
                "worse": Draws((losses[i] > CHANCE).astype(float), "share"),
            }
            for i, rate in enumerate(setting.rates)
        ]
    return Table("Test loss in nats; guessing is 2.08", rows)


def sensitivity(
    steps: Sequence[int] = (150, 600),
    *,
    variants: Sequence[str] = ("none", "1/sqrt(d_k)"),
    d_k: int = 64,
    rates: Sequence[float] = RATES,
    seeds: int = 8,
    seed: int = 0,
    progress: Progress = None,
    **settings: Any,
) -> Table:
    """How much is lost by a learning rate that is not the best: one number per variant and horizon.

    The sensitivity is that of Wortsman et al. 2023 (arXiv:2309.14322): the mean over `rates` of
    min(loss, loss before training) minus the loss at the best rate.

    Returns
    -------
    Table
        steps, variant, best (loss at the best rate), sensitivity (nats), window (decades of rates
        whose loss is within 0.21 nats, a tenth of that of guessing, of the best), highest (log10
        of the highest rate at which a model ends 0.21 nats or more below guessing).
    """
    rows: Rows = []
    for variant, models in _swept(steps, variants, d_k, rates, seeds, seed, progress, settings):
        losses, best = models.test_loss(), models.best()
        start = Trained(models.setting, seed).test_loss()
        decades = np.log10(models.setting.rates)
        width = (decades[-1] - decades[0]) / max(1, len(decades) - 1)
        learns = np.where(losses < CHANCE - TENTH, decades[:, None], -np.inf)
        rows.append(
            {
                "steps": models.setting.steps,
                "variant": variant,
                "best": Draws(losses[best], "positive"),
                "sensitivity": Draws((np.minimum(losses, start) - losses[best]).mean(axis=0)),
                "window": Draws(width * (losses < losses[best] + TENTH).sum(axis=0)),
                "highest": Draws(learns.max(axis=0)),
            }
        )
    return Table("Sensitivity to the learning rate", rows)


def _swept(
    steps: Sequence[int],
    variants: Sequence[str],
    d_k: int,
    rates: Sequence[float],
    seeds: int,
    seed: int,
    progress: Progress,
    settings: dict[str, Any],
) -> list[tuple[str, Trained]]:
    found: dict[tuple[int, str], Trained] = {}
    for variant in variants:
        own: dict[str, Any] = {"d_k": d_k, "rates": tuple(rates), "seeds": seeds}
        own |= VARIANTS[variant] | settings
        for horizon in sorted(steps):  # more steps continue fewer
            found[horizon, variant] = trained(Setting(**own, steps=horizon), seed)
            if progress is not None:
                progress(1)
    return [(variant, found[horizon, variant]) for horizon in steps for variant in variants]


def entropy_floor(norm: npt.ArrayLike, n: int) -> Values:
    """The least entropy that a row of n scores can have whose deviations have the given norm.

    One score is (n/(n - 1))^(1/2) norm above all others, which are equal (Zhai et al. 2023,
    arXiv:2303.06296, theorem 3.1, where the norm is bounded by a spectral norm).

    Examples
    --------
    >>> from sdpa_lab.training.stability import entropy_floor
    >>> entropy_floor([0, 4, 16], 16).round(3)
    array([2.773, 1.018, 0.   ])
    """
    gap = np.asarray(norm, np.float64) * (n / (n - 1)) ** 0.5
    others = (n - 1) * np.exp(-gap)
    return np.asarray(np.log1p(others) + gap * others / (1 + others))


def entropy_collapse(
    d_k: int = 64,
    *,
    rules: Sequence[str] = ("1", "sqrt d_k"),
    rates: Sequence[float] = (1e-2, 1e-1),
    every: int = 10,
    seeds: int = 8,
    seed: int = 0,
    progress: Progress = None,
    **settings: Any,
) -> Table:
    """Entropy of rows while models learn, and what bounds it from below.

    Low entropy is no fault in itself: the answer of this task is one key. `found` says whether it
    is the right one.

    Returns
    -------
    Table
        rule, rate, step, entropy (of a row, nats), floor (mean of `entropy_floor` over rows),
        logit (largest scaled score in absolute value), spectral (largest singular value of scale
        W^Q (W^K)^T), found (weight on the key that is asked for), loss (nats).
    """
    rows: Rows = []
    for rule in rules:

        def watch(step: int, models: Trained, gradients: Arrays, rule: str = rule) -> None:
            if step % every == 0:
                rows.extend(_sharpness(step, models, rule))

        own: dict[str, Any] = {
            "d_k": d_k,
            "rule": rule,
            "rates": tuple(rates),
            "seeds": seeds,
            "steps": 151,
        }
        train(Setting(**own | settings), seed=seed, watch=watch)
        if progress is not None:
            progress(1)
    return Table("Entropy while models learn", rows)


def _sharpness(step: int, models: Trained, rule: str) -> Rows:
    """The rows of one step of `entropy_collapse`, a row per learning rate."""
    scores = models.scores()
    n = scores.shape[-1]
    p = np.asarray(sdpa.softmax(scores))
    entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(axis=-1)
    norm = (n * scores.var(axis=-1)) ** 0.5
    found = models.found()
    w_q, w_k = (np.asarray(models.parameters[name], np.float64) for name in ("W^Q", "W^K"))
    product = models.setting.scale * w_q @ w_k.swapaxes(-1, -2)
    spectral = np.linalg.norm(product, 2, axis=(-2, -1)).reshape(models.shape)
    loss = models.test_loss(purpose="curve")
    rows: Rows = []
    for i, rate in enumerate(models.setting.rates):
        row: dict[str, Cell] = {"rule": rule, "rate": rate, "step": step}
        row["entropy"] = Draws(entropy[i].mean(axis=(1, 2)))
        row["floor"] = Draws(entropy_floor(norm[i], n).mean(axis=(1, 2)))
        row["logit"] = Draws(np.abs(scores[i]).max(axis=(1, 2, 3)), "positive")
        row["spectral"] = Draws(spectral[i], "positive")
        row["found"] = Draws(found[i])
        row["loss"] = Draws(loss[i], "positive")
        rows.append(row)
    return rows


__all__ = [
    "RATES",
    "VARIANTS",
    "entropy_collapse",
    "entropy_floor",
    "learning_rates",
    "sensitivity",
]
