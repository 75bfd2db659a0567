"""What happens while models of the task of `recall` learn: experiments that watch every step.

As in `experiments`, every function has a seed, counts models that differ in the seed alone as
independent draws, and takes `settings` of `recall.Setting` as keywords.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import autograd.numpy as anp
import numpy as np
import numpy.typing as npt
from autograd import grad

import sdpa

from ..tools.estimate import Draws
from ..tools.table import Cell, Table
from .optimise import Arrays
from .recall import Progress, Rows, Setting, Trained, Values, square_norms, train


def curves(
    d_k: int = 128,
    *,
    rules: Sequence[str] = ("1", "sqrt d_k", "d_k"),
    every: int = 5,
    rate: float = 3e-3,
    seed: int = 0,
    progress: Progress = None,
    **settings: Any,
) -> Table:
    """Loss, gradients and scores while models learn, at one learning rate.

    Returns
    -------
    Table
        rule, step, loss (nats, on fresh data), grad W^Q, grad W^K, grad W^V (mean of the norms
        of the gradients of the parameters), entropy (of a row of weights, nats), score
        std (root of the mean variance within a row of scaled scores).
    """
    rows: Rows = []
    for rule in rules:

        def watch(step: int, models: Trained, gradients: Arrays, rule: str = rule) -> None:
            if step % every:
                return
            scores = models.scores()[0]
            p = np.asarray(sdpa.softmax(scores))
            entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(axis=-1)
            row: dict[str, Cell] = {"rule": rule, "step": step}
            row["loss"] = Draws(models.test_loss(purpose="curve")[0], "positive")
            for name in ("W^Q", "W^K", "W^V"):
                row[f"grad {name}"] = Draws(square_norms(gradients[name]) ** 0.5, "positive")
            row["entropy"] = Draws(entropy.mean(axis=(1, 2)))
            row["score std"] = Draws(scores.var(axis=-1).mean(axis=(1, 2)), "root_mean")
            rows.append(row)

        setting = Setting(d_k=d_k, rule=rule, rates=(rate,), **settings)
        train(setting, seed=seed, watch=watch)
        if progress is not None:
            progress(1)
    return Table("While models learn", rows)


TASKS: dict[str, dict[str, Any]] = {
    "directed": {},
    "directed, W^Q = W^K at the start": {"same_start": True},
    "symmetric": {"symmetric": True},
    "symmetric, W^Q = W^K at the start": {"symmetric": True, "same_start": True},
}
"""Whether what is asked for looks as the keys do, and where training starts."""


def divergence(
    tasks: Sequence[str] = tuple(TASKS),
    *,
    optimiser: str = "adam",
    rate: float = 1e-2,
    every: int = 5,
    seed: int = 0,
    progress: Progress = None,
    **settings: Any,
) -> Table:
    """Whether W^Q and W^K diverge.

    The unit of all norms is that of W^Q - W^K for independent W^Q and W^K at the start,
    (2 * 32 * d_k / 32)^(1/2). The control is the norm that W^Q - W^K would have if its steps had
    the same size but no common direction: the root of |start|^2 + sum |step|^2. Growth alone proves
    little: a random walk grows, too, and so does W^Q + W^K, which nobody calls divergence.

    Returns
    -------
    Table
        task, step, difference, sum (norms of W^Q - W^K and W^Q + W^K), control, speed (of the
        norm of the difference, per step), cosine (of W^Q and W^K as vectors), balance
        (|W^Q|^2 - |W^K|^2 over their sum: gradient flow keeps |W^Q|^2 - |W^K|^2 as it is), gradient
        (norm of the difference of the gradients to W^Q and W^K), loss (nats).
    """
    rows: Rows = []
    for task in tasks:
        setting = Setting(rates=(rate,), optimiser=optimiser, **TASKS[task], **settings)
        watch = _Distance(task, (2 * setting.d_k) ** 0.5, every)
        # One more step, so that the last state is watched, too; its update does not matter.
        train(replace(setting, steps=setting.steps + 1), seed=seed, watch=watch)
        rows += watch.rows
        if progress is not None:
            progress(1)
    return Table("W^Q and W^K while models learn", rows)


class _Distance:
    """Watches the models of one task; `rows` are those of `divergence`, one in `every` steps."""

    def __init__(self, task: str, unit: float, every: int) -> None:
        self.rows: Rows = []
        self._task, self._unit, self._every = task, unit, every
        self._before: Values | None = None
        self._walk: Values | float = 0.0
        """|start|^2 + sum |step|^2."""

    def __call__(self, step: int, models: Trained, gradients: Arrays) -> None:
        w_q, w_k = (models.parameters[name] for name in ("W^Q", "W^K"))
        now = np.asarray(w_q - w_k, np.float64)
        before = now if self._before is None else self._before
        self._walk = self._walk + square_norms(now if self._before is None else now - before)
        self._before = now
        if step % self._every:
            return
        norm = square_norms(now) ** 0.5 / self._unit
        squares = square_norms(w_q), square_norms(w_k)
        inner = (w_q * w_k).sum(axis=(1, 2), dtype=np.float64)
        self.rows.append(
            {
                "task": self._task,
                "step": step,
                "difference": Draws(norm),
                "sum": Draws(square_norms(w_q + w_k) ** 0.5 / self._unit),
                "control": Draws(self._walk**0.5 / self._unit),
                "speed": Draws(norm - square_norms(before) ** 0.5 / self._unit),
                "cosine": Draws(inner / (squares[0] * squares[1]) ** 0.5),
                "balance": Draws((squares[0] - squares[1]) / (squares[0] + squares[1])),
                "gradient": Draws(square_norms(gradients["W^Q"] - gradients["W^K"]) ** 0.5),
                "loss": Draws(models.test_loss(purpose="curve")[0], "positive"),
            }
        )


def correlation(
    d_k: Sequence[int] = (8, 32, 128),
    *,
    rule: str = "sqrt d_k",
    rate: float = 3e-3,
    steps: Sequence[int] = (0, 1, 2, 5, 10, 20, 50, 100, 150),
    seed: int = 0,
    progress: Progress = None,
    **settings: Any,
) -> Table:
    """How q and k correlate, and how the size of q.k depends on d_k, while models learn.

    The exponent is the slope of log std(q.k) over log d_k, by least squares, for each seed: 1/2
    where the components of q and k are independent, up to 1 where they agree in sign.

    Returns
    -------
    Table
        step, exponent (of the raw q.k), exponent of change (of q.k minus q.k before training; NaN
        at step 0), cosine d_k=... (of a query and the key that it asks for), loss d_k=... (nats).
    """
    found: dict[int, dict[int, _Spread]] = {}
    for width in d_k:
        setting = Setting(d_k=width, rule=rule, rates=(rate,), **settings)
        watch = _Scores(steps)
        train(replace(setting, steps=max(steps) + 1), seed=seed, watch=watch)
        found[width] = watch.found
        if progress is not None:
            progress(1)
    log_d = np.log(d_k) - np.mean(np.log(d_k))

    def exponent(spreads: Sequence[Values]) -> Values:
        return np.asarray((log_d[:, None] * np.log(spreads)).sum(axis=0) / (log_d**2).sum())

    rows: Rows = []
    for step in steps:
        at = {width: found[width][step] for width in d_k}
        growth = exponent([spread.raw for spread in at.values()])
        change = np.full(len(growth), np.nan)
        if step:
            change = exponent([spread.change for spread in at.values()])
        row: dict[str, Cell] = {"step": step, "exponent": Draws(growth)}
        row["exponent of change"] = Draws(change)
        row |= {f"cosine d_k={width}": Draws(spread.cosine) for width, spread in at.items()}
        row |= {f"loss d_k={w}": Draws(spread.loss, "positive") for w, spread in at.items()}
        rows.append(row)
    return Table("q and k while models learn", rows)


def trained_exponents(
    powers: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25),
    *,
    d_k: Sequence[int] = (8, 32, 128, 512),
    steps: int = 600,
    seeds: int = 8,
    seed: int = 0,
    progress: Progress = None,
    **settings: Any,
) -> Table:
    """How the size of q.k depends on d_k after training, by the power of d_k in the divisor.

    All divisors are that of 1/sqrt(d_k) at d_k = 32 (`recall.Setting.power`), and all widths learn
    at one rate.

    Returns
    -------
    Table
        power, start, trained (exponents of std(q.k) in d_k before and after `steps`), first (that
        of what the first step adds), scaled (that of the scaled scores after `steps`: trained -
        power), loss (nats, after training, at the width where it is largest on average).
    """
    rows: Rows = []
    for power in powers:
        own = {"power": power, "seeds": seeds} | settings
        table = correlation(d_k, steps=(0, 1, steps), seed=seed, **own)
        start, first, end = table.rows
        after = end["exponent"]
        assert isinstance(after, Draws)
        found = [end[f"loss d_k={width}"] for width in d_k]
        losses = [loss for loss in found if isinstance(loss, Draws)]
        rows.append(
            {
                "power": power,
                "start": start["exponent"],
                "first": first["exponent of change"],
                "trained": after,
                "scaled": Draws(after.values - power),
                "loss": max(losses, key=lambda loss: float(loss.values.mean())),
            }
        )
        if progress is not None:
            progress(1)
    return Table(f"Exponents in d_k of std(q.k), {steps} steps", rows)


class _Spread(NamedTuple):
    """Of the models of one width at one step."""

    raw: Values
    """Standard deviation of q.k."""
    change: Values
    """Standard deviation of q.k minus q.k at the first of the steps."""
    cosine: Values
    """Of a query and the key that it asks for."""
    loss: Values
    """In nats, on fresh data."""


class _Scores:
    """Watches the models of one width; `found` has their spreads by step."""

    def __init__(self, steps: Sequence[int]) -> None:
        self.found: dict[int, _Spread] = {}
        self._steps = steps
        self._start: Values | None = None

    def __call__(self, step: int, models: Trained, gradients: Arrays) -> None:
        if step not in self._steps:
            return
        batch = next(models.batches("scores", 16))
        q, k, _ = models.project(models.parameters, batch)
        raw = sdpa.attention_weights(q, k, scale=1.0, stage="scores").astype(np.float64)
        if self._start is None:
            self._start = raw
        q_unit, k_unit = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        cosines = np.take_along_axis(q_unit @ k_unit.swapaxes(-1, -2), batch.answer, axis=-1)
        self.found[step] = _Spread(
            raw.std(axis=(1, 2, 3)),
            (raw - self._start).std(axis=(1, 2, 3)),
            cosines.mean(axis=(1, 2, 3), dtype=np.float64),
            models.test_loss(purpose="curve")[0],
        )


def tied_paths(
    *,
    every: int = 5,
    rate: float = 1e-2,
    seed: int = 0,
    progress: Progress = None,
    **settings: Any,
) -> Table:
    """The two gradients that meet in W^K where W^V is the same matrix.

    Through the keys (what to look at) and through the values (what to hand on): their sum moves the
    matrix. A cosine below 0 is a conflict; two independent directions in 32 d_k dimensions have a
    cosine of about 0 +- (32 d_k)^(-1/2).

    Returns
    -------
    Table
        step, cosine (of the two), ratio (norm of the part through the keys over the other), loss.
    """
    setting = Setting(tied=True, rates=(rate,), **settings)
    rows: Rows = []

    def watch(step: int, models: Trained, gradients: Arrays) -> None:
        if step % every:
            return
        batch = next(models.batches("paths", 8))
        by_key, by_value = path_gradients(models, batch)
        squares = square_norms(by_key), square_norms(by_value)
        inner = (by_key * by_value).sum(axis=(1, 2), dtype=np.float64)
        rows.append(
            {
                "step": step,
                "cosine": Draws(inner / (squares[0] * squares[1]) ** 0.5),
                "ratio": Draws((squares[0] / squares[1]) ** 0.5),
                "loss": Draws(models.test_loss(purpose="curve")[0], "positive"),
            }
        )

    train(setting, seed=seed, watch=watch)
    if progress is not None:
        progress(1)
    return Table("The two gradients of a projection that is key and value", rows)


def path_gradients(models: Trained, batch: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Gradients of tied models to W^K through the keys alone and through the values alone."""

    def loss(as_key: Any, as_value: Any) -> Any:
        p = models.parameters
        query, key, _ = models.project(p | {"W^K": as_key}, batch)
        _, value, _ = models.project(p | {"W^K": as_value}, batch)
        out = models.attend(p, query, key, value, None)
        return anp.sum(models.read(p, out, batch))

    w = models.parameters["W^K"]
    by_key, by_value = grad(loss, (0, 1))(w, w)
    return by_key, by_value


__all__ = [
    "TASKS",
    "correlation",
    "curves",
    "divergence",
    "path_gradients",
    "tied_paths",
    "trained_exponents",
]
