"""What training makes of the scale: experiments on the task of `recall`, each a table.

Every function has a seed, counts models that differ in the seed alone as independent draws, and
takes `settings` of `recall.Setting` (rates, seeds, steps, ...) as keywords. Where learning rates
are compared, each setting gets the one with the least mean loss on data reserved for this choice,
and the loss is measured on other data: no rule is held back by a rate that suits another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd import grad

import sdpa

from ..tools.estimate import Draws
from ..tools.inputs import stream
from ..tools.machine import one_blas_thread
from ..tools.table import Cell, Table
from .recall import (
    CHANCE,
    Progress,
    Rows,
    Run,
    Setting,
    Trained,
    compare_at,
    square_norms,
    trained,
)


def _each(settings: Sequence[Setting], seed: int, progress: Progress) -> Iterable[Trained]:
    for setting in settings:
        yield trained(setting, seed)
        if progress is not None:
            progress(1)


def _at_best_rate(models: Trained) -> dict[str, Cell]:
    """The learning rate that was chosen, and the loss with it."""
    best = models.best()
    return {"rate": models.setting.rates[best], "loss": Draws(models.test_loss()[best], "positive")}


def scale_rules(
    d_k: Sequence[int] = (4, 32, 128),
    *,
    rules: Sequence[str] = ("1", "log d_k", "sqrt d_k", "2 sqrt d_k", "d_k", "learned"),
    folds: Sequence[str] = ("none", "initial", "compensated"),
    seed: int = 0,
    progress: Progress = None,
    **settings: Any,
) -> Table:
    """Every scale rule, in the kernel and folded into W^Q, at every learning rate.

    Folding is the control that tells what the scale does. `initial` multiplies W^Q by the scale
    before training and leaves the kernel without one: the same function at the start, so any
    remaining difference from the scale in the kernel is due to learning rates. `compensated`
    changes the rate of W^Q, too (times the scale under Adam, times its square under plain descent):
    the same trajectory, up to rounding and Adam's epsilon.

    Returns
    -------
    Table
        d_k, rule, fold, rate, chosen (1 where this rate is the best of its setting), loss (nats).

    Examples
    --------
    >>> from sdpa_lab.training import scale_rules
    >>> table = scale_rules([8], rules=["1", "sqrt d_k"], folds=["none"], seeds=2, steps=5)
    >>> table["rule"][::3].tolist(), len(table)
    (['1', 'sqrt d_k'], 6)
    """
    grid = [
        Setting(d_k=width, rule=rule, fold=fold, **settings)
        for width in d_k
        for rule in rules
        for fold in folds
        if not (fold != "none" and rule in ("1", "learned"))
    ]
    rows: Rows = []
    for models in _each(grid, seed, progress):
        losses, best = models.test_loss(), models.best()
        setting = models.setting
        rows += [
            {
                "d_k": setting.d_k,
                "rule": setting.rule,
                "fold": setting.fold,
                "rate": rate,
                "chosen": int(i == best),
                "loss": Draws(losses[i], "positive"),
            }
            for i, rate in enumerate(setting.rates)
        ]
    return Table("Test loss in nats; guessing is 2.08", rows)


def steps_needed(
    d_k: Sequence[int] = (4, 32, 64),
    *,
    rules: Sequence[str] = ("1", "sqrt d_k"),
    rates: Sequence[float] = (1e-3, 3e-3, 1e-2, 3e-2),
    every: int = 25,
    most: int = 1200,
    seed: int = 0,
    progress: Progress = None,
    **settings: Any,
) -> Table:
    """Steps until the loss is a tenth of that of guessing, model by model, at its best rate.

    Returns
    -------
    Table
        d_k, rule, steps (multiples of `every`; `most` where a model needs more).
    """
    rows: Rows = []
    for width, rule in ((width, rule) for width in d_k for rule in rules):
        run = Run(Setting(d_k=width, rule=rule, rates=tuple(rates), **settings), seed)
        needed = np.full(run.models.setting.seeds, float(most))
        for count in range(every, most, every):
            run.advance(count)
            reached = (run.models.test_loss() < 0.1 * CHANCE).any(axis=0)
            needed = np.minimum(needed, np.where(reached, count, most))
            if needed.max() < most:
                break
        rows.append({"d_k": width, "rule": rule, "steps": Draws(needed, "positive")})
        if progress is not None:
            progress(1)
    return Table("Steps to a loss of 0.21 nats", rows)


def divisors(
    d_k: Sequence[int] = (64, 256),
    *,
    rules: Sequence[str] = ("1", "log d_k", "sqrt d_k", "2 sqrt d_k", "4 sqrt d_k", "d_k"),
    steps: Sequence[int] = (150, 600),
    rates: Sequence[float] = (1e-3, 3e-3, 1e-2, 3e-2),
    seeds: int = 6,
    seed: int = 0,
    progress: Progress = None,
    **settings: Any,
) -> Table:
    """What a divisor that is too small or too large costs a model that is trained.

    Returns
    -------
    Table
        d_k, rule, steps, ratio (the divisor over d_k^(1/2)), loss (nats, at the best learning rate;
        a model that has solved the task is not trained on, see `recall.compare_at`).
    """
    rows: Rows = []
    for width, rule in ((width, rule) for width in d_k for rule in rules):
        base = Setting(d_k=width, rule=rule, rates=tuple(rates), seeds=seeds, **settings)
        losses = compare_at(sorted(steps), base, seed=seed)
        ratio = width**-0.5 / base.scale
        rows += [
            {
                "d_k": width,
                "rule": rule,
                "steps": count,
                "ratio": ratio,
                "loss": Draws(losses[count], "positive"),
            }
            for count in steps
        ]
        if progress is not None:
            progress(1)
    return Table("Test loss in nats at the best rate; guessing is 2.08", rows)


def mechanisms(
    d_k: Sequence[int] = (4, 32, 128),
    *,
    kinds: Sequence[tuple[str, str]] = (
        ("dot", "sqrt d_k"),
        ("dot", "1"),
        ("additive", "1"),
        ("additive", "sqrt d_k"),
        ("cosine", "learned"),
        ("bilinear", "sqrt d_k"),
    ),
    seed: int = 0,
    progress: Progress = None,
    **settings: Any,
) -> Table:
    """Dot product, additive, cosine and bilinear attention, each at its best learning rate.

    Returns
    -------
    Table
        d_k, mechanism, rule, rate (the chosen one), loss (nats).
    """
    grid = [
        Setting(d_k=width, mechanism=mechanism, rule=rule, **settings)
        for width in d_k
        for mechanism, rule in kinds
    ]
    rows = [
        {
            "d_k": models.setting.d_k,
            "mechanism": models.setting.mechanism,
            "rule": models.setting.rule,
            **_at_best_rate(models),
        }
        for models in _each(grid, seed, progress)
    ]
    return Table("Test loss in nats; guessing is 2.08", rows)


def lengths(
    n: Sequence[int] = (8, 16, 32),
    *,
    rules: Sequence[str] = ("1", "sqrt d_k"),
    seed: int = 0,
    progress: Progress = None,
    **settings: Any,
) -> Table:
    """The scale at several lengths, with as many tokens per step: n, rule, rate, loss (nats)."""
    grid = [Setting(n=length, rule=rule, **settings) for length in n for rule in rules]
    rows = [
        {
            "n": models.setting.n,
            "rule": models.setting.rule,
            **_at_best_rate(models),
        }
        for models in _each(grid, seed, progress)
    ]
    return Table("Test loss in nats; guessing is 2.08", rows)


def other_scale(
    factors: Sequence[float] = (1 / 8, 1 / 4, 1 / 2, 2**-0.5, 1, 2**0.5, 2, 4, 8),
    *,
    rules: Sequence[str] = ("1", "sqrt d_k"),
    seed: int = 0,
    progress: Progress = None,
    **settings: Any,
) -> Table:
    """Models trained with one scale, run with another.

    Returns
    -------
    Table
        rule, factor (the scale of the run over that of training), loss (nats), increase (of the
        loss over that with the scale of training, model by model).
    """
    grid = [Setting(rule=rule, **settings) for rule in rules]
    rows: Rows = []
    for models in _each(grid, seed, progress):
        best, scale = models.best(), models.setting.scale
        own = models.test_loss()[best]
        for factor in factors:
            loss = models.test_loss(factor * scale)[best]
            rows.append(
                {
                    "rule": models.setting.rule,
                    "factor": factor,
                    "loss": Draws(loss, "positive"),
                    "increase": Draws(loss - own),
                }
            )
    return Table("Test loss with another scale than in training", rows)


def tying(
    widths: Sequence[int] = (8, 32),
    *,
    steps: Sequence[int] = (150,),
    seed: int = 0,
    progress: Progress = None,
    **settings: Any,
) -> Table:
    """Loss with one projection for keys and values, compared with two of the same width.

    Returns
    -------
    Table
        width (d_k = d_v), tied (1 or 0), steps, loss (nats, at the best learning rate; a model that
        has solved the task is not trained on, see `recall.compare_at`).
    """
    rows: Rows = []
    for width, tied in ((width, tied) for width in widths for tied in (False, True)):
        base = Setting(d_k=width, d_v=width, tied=tied, **settings)
        losses = compare_at(sorted(steps), base, seed=seed)
        rows += [
            {
                "width": width,
                "tied": int(tied),
                "steps": count,
                "loss": Draws(losses[count], "positive"),
            }
            for count in steps
        ]
        if progress is not None:
            progress(1)
    return Table("Test loss in nats; guessing is 2.08", rows)


def trained_scores(
    d_k: Sequence[int] = (4, 32, 128),
    *,
    rules: Sequence[str] = ("sqrt d_k",),
    seed: int = 0,
    progress: Progress = None,
    **settings: Any,
) -> Table:
    """The variance of the scaled scores before and after training.

    Returns
    -------
    Table
        d_k, rule, before, after (variance of all scores of a model), within row (after).
    """
    grid = [Setting(d_k=width, rule=rule, **settings) for width in d_k for rule in rules]
    rows: Rows = []
    for models in _each(grid, seed, progress):
        best, start = models.best(), Trained(models.setting, seed)
        before, after = (each.scores()[best] for each in (start, models))
        rows.append(
            {
                "d_k": models.setting.d_k,
                "rule": models.setting.rule,
                "before": Draws(before.var(axis=(1, 2, 3))),
                "after": Draws(after.var(axis=(1, 2, 3))),
                "within row": Draws(after.var(axis=-1).mean(axis=(1, 2))),
            }
        )
    return Table("Variance of scaled scores", rows)


def saturation(
    gains: Sequence[float] = (1, 2, 4, 8),
    *,
    seed: int = 0,
    progress: Progress = None,
    **settings: Any,
) -> Table:
    """Training that starts saturated: W^Q and W^K `gain` times as large, scores gain^2 times.

    Returns
    -------
    Table
        gain, max weight (at the start), grad query, grad key, grad value (norms of the gradients
        to q, k and v at the start), rate, loss (nats, after training).
    """
    grid = [Setting(gain=gain, **settings) for gain in gains]
    rows: Rows = []
    for models in _each(grid, seed, progress):
        start = Trained(models.setting, seed)
        p = start.parameters
        batch = next(start.batches("start", 64))
        qkv = start.project(p, batch)

        def loss(q: Any, k: Any, v: Any, start: Trained = start, batch: Any = batch) -> Any:
            p = start.parameters
            return anp.sum(start.read(p, start.attend(p, q, k, v, None), batch))

        with one_blas_thread():
            grads = grad(loss, (0, 1, 2))(*qkv)
        weights = np.asarray(sdpa.softmax(start.scores()[0])).max(axis=-1)
        row: dict[str, Cell] = {
            "gain": models.setting.gain,
            "max weight": Draws(weights.mean((1, 2))),
        }
        for name, g in zip(("query", "key", "value"), grads, strict=True):
            row[f"grad {name}"] = Draws(square_norms(g)[: models.setting.seeds] ** 0.5)
        rows.append(row | _at_best_rate(models))
    return Table("Training that starts saturated", rows)


def start_symmetry(
    d_k: Sequence[int] = (16, 64),
    *,
    d_model: int = 64,
    draws: int = 400,
    seed: int = 0,
    progress: Progress = None,
) -> Table:
    """W^Q and W^K at Glorot's initialisation: N(0, 2/(d_model + d_k)), drawn independently.

    With A = W^Q (W^K)^T the scores are x A x'^T. Exchanging W^Q and W^K turns A into its transpose.

    Returns
    -------
    Table
        d_k, mean entry (of A, in units of its standard deviation; predicted 0), log ratio (of
        |W^Q|^2 to |W^K|^2; predicted mean 0), skew (share of |A|^2 in its antisymmetric part;
        (d_model - 1)/(2 d_model) if A and its transpose are unrelated).
    """
    rows: Rows = []
    for width in d_k:
        std = (2 / (d_model + width)) ** 0.5
        rng = stream(seed, "start symmetry", width)
        w_q, w_k = std * rng.standard_normal((2, draws, d_model, width))
        a = w_q @ w_k.swapaxes(-1, -2)
        skew = square_norms(a - a.swapaxes(-1, -2)) / (4 * square_norms(a))
        rows.append(
            {
                "d_k": width,
                "mean entry": Draws(a.mean(axis=(1, 2)) / (std**2 * width**0.5), predicted=0.0),
                "log ratio": Draws(np.log(square_norms(w_q) / square_norms(w_k)), predicted=0.0),
                "skew": Draws(skew, predicted=(d_model - 1) / (2 * d_model)),
            }
        )
        if progress is not None:
            progress(1)
    return Table("W^Q and W^K at the start", rows)


def gradients_differ(
    n: Sequence[int] = (8, 64),
    *,
    d_k: int = 64,
    draws: int = 200,
    seed: int = 0,
    progress: Progress = None,
) -> Table:
    """dL/dQ = scale dL/dS K and dL/dK = scale (dL/dS)^T Q for N(0, 1) inputs, by the C routines.

    Returns
    -------
    Table
        n, distance (|dQ - dK| over (|dQ|^2 + |dK|^2)^(1/2): 0 if equal, 1 if orthogonal), cosine,
        ratio (|dQ|/|dK|), and the distance where Q = K (equal operands), "distance Q=K".
    """
    rows: Rows = []
    for length in n:
        rng = stream(seed, "gradients differ", length)
        q, k, v, g = rng.standard_normal((4, draws, length, d_k))
        row: dict[str, Cell] = {"n": length}
        for name, key in (("distance", k), ("distance Q=K", q)):
            out, lse = sdpa.attention_forward(q, key, v)
            grads = sdpa.attention_backward(g, q, key, v, out, lse)
            assert grads.query is not None
            assert grads.key is not None
            squares = square_norms(grads.query), square_norms(grads.key)
            apart = square_norms(grads.query - grads.key)
            row[name] = Draws((apart / (squares[0] + squares[1])) ** 0.5)
            if key is k:
                inner = (grads.query * grads.key).sum(axis=(1, 2))
                row["cosine"] = Draws(inner / (squares[0] * squares[1]) ** 0.5)
                row["ratio"] = Draws((squares[0] / squares[1]) ** 0.5)
        rows.append(row)
        if progress is not None:
            progress(1)
    return Table("The gradients to Q and to K", rows)


__all__ = [
    "divisors",
    "gradients_differ",
    "lengths",
    "mechanisms",
    "other_scale",
    "saturation",
    "scale_rules",
    "start_symmetry",
    "steps_needed",
    "trained_scores",
    "tying",
]
