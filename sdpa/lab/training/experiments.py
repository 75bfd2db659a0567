"""What training makes of the scale: experiments on the task of `recall`, each a table.

Every function has a seed, counts models that differ in the seed alone as independent draws, and
takes `settings` of `recall.Setting` (rates, seeds, steps, ...) as keywords. Where learning rates
are compared, the one with the least mean loss on data of its own is chosen for each setting, and
the loss is measured on other data: no rule is held back by a rate that suits another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import autograd.numpy as anp
import numpy as np
import numpy.typing as npt
from autograd import grad

import sdpa

from ..estimate import Draws
from ..inputs import stream
from ..table import Cell, Table
from .optimise import Arrays
from .recall import MECHANISMS, RULES, Setting, Trained, one_blas_thread, train, trained

Values = npt.NDArray[np.float64]
Progress = Callable[[int], object] | None
Rows = list[dict[str, Cell]]


def _each(settings: Sequence[Setting], seed: int, progress: Progress) -> Iterable[Trained]:
    for setting in settings:
        yield trained(setting, seed)
        if progress is not None:
            progress(1)


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
    before training and leaves the kernel without one: the same function at the start, so what is
    left of a difference to the scale in the kernel is one of learning rates. `compensated` changes
    the rate of W^Q, too (times the scale under Adam, times its square under plain descent): the
    same trajectory, up to rounding and Adam's epsilon.

    Returns
    -------
    Table
        d_k, rule, fold, rate, chosen (1 where this rate is the best of its setting), loss (nats).

    Examples
    --------
    >>> from sdpa.lab.training import scale_rules
    >>> table = scale_rules([8], rules=["1", "sqrt d_k"], folds=["none"], seeds=2, steps=5)
    >>> list(table["rule"][::3]), len(table)
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
                "loss": Draws(losses[i]),
            }
            for i, rate in enumerate(setting.rates)
        ]
    return Table("Test loss in nats; guessing is 2.08", rows)


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
    rows: Rows = []
    for models in _each(grid, seed, progress):
        best = models.best()
        rows.append(
            {
                "d_k": models.setting.d_k,
                "mechanism": models.setting.mechanism,
                "rule": models.setting.rule,
                "rate": models.setting.rates[best],
                "loss": Draws(models.test_loss()[best]),
            }
        )
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
    rows: Rows = []
    for models in _each(grid, seed, progress):
        best = models.best()
        rows.append(
            {
                "n": models.setting.n,
                "rule": models.setting.rule,
                "rate": models.setting.rates[best],
                "loss": Draws(models.test_loss()[best]),
            }
        )
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
                    "loss": Draws(loss),
                    "increase": Draws(loss - own),
                }
            )
    return Table("Test loss with another scale than in training", rows)


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
        rule, step, loss (nats, on fresh data), grad W^Q, grad W^K, grad W^V (root mean square of
        the norms of the gradients of the parameters), entropy (of a row of weights, nats), score
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
            row["loss"] = Draws(models.test_loss(purpose="curve")[0])
            for name in ("W^Q", "W^K", "W^V"):
                row[f"grad {name}"] = Draws(_square_norm(gradients[name]), "root_mean")
            row["entropy"] = Draws(entropy.mean(axis=(1, 2)))
            row["score std"] = Draws(scores.var(axis=-1).mean(axis=(1, 2)), "root_mean")
            rows.append(row)

        setting = Setting(d_k=d_k, rule=rule, rates=(rate,), **settings)
        train(setting, seed=seed, watch=watch)
        if progress is not None:
            progress(1)
    return Table("While models learn", rows)


def _square_norm(x: npt.NDArray[Any]) -> Values:
    """Of each model's array: (models, ...) -> (models,)."""
    norms: Values = np.square(x.reshape(len(x), -1), dtype=np.float64).sum(axis=1)
    return norms


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
    """Do W^Q and W^K go apart?

    The unit of all norms is that of W^Q - W^K for independent W^Q and W^K at the start,
    (2 * 32 * d_k / 32)^(1/2). The control is the norm that W^Q - W^K would have had if its steps
    had had their size but no common direction: the root of |start|^2 + sum |step|^2. Growth alone
    says little, for a random walk grows, too, and so does W^Q + W^K, which nobody calls going
    apart.

    Returns
    -------
    Table
        task, step, difference, sum (norms of W^Q - W^K and W^Q + W^K), control, speed (of the
        norm of the difference, per step), cosine (of W^Q and W^K as vectors), balance
        (|W^Q|^2 - |W^K|^2 over their sum: gradient flow keeps |W^Q|^2 - |W^K|^2 as it is).
    """
    rows: Rows = []
    for task in tasks:
        setting = Setting(rates=(rate,), optimiser=optimiser, **TASKS[task], **settings)
        unit = (2 * setting.d_k) ** 0.5
        state: dict[str, Values] = {}

        def watch(
            step: int,
            models: Trained,
            gradients: Arrays,
            task: str = task,
            unit: float = unit,
            state: dict[str, Values] = state,
        ) -> None:
            w_q, w_k = (models.parameters[name] for name in ("W^Q", "W^K"))
            now = np.asarray(w_q - w_k, np.float64)
            if step == 0:
                state["walk"] = _square_norm(now)
            else:
                state["walk"] = state["walk"] + _square_norm(now - state["before"])
            norm = _square_norm(now) ** 0.5 / unit
            before = _square_norm(state.get("before", now)) ** 0.5 / unit
            state["before"] = now
            if step % every:
                return
            squares = _square_norm(w_q), _square_norm(w_k)
            inner = (w_q * w_k).sum(axis=(1, 2), dtype=np.float64)
            rows.append(
                {
                    "task": task,
                    "step": step,
                    "difference": Draws(norm),
                    "sum": Draws(_square_norm(w_q + w_k) ** 0.5 / unit),
                    "control": Draws(state["walk"] ** 0.5 / unit),
                    "speed": Draws(norm - before),
                    "cosine": Draws(inner / (squares[0] * squares[1]) ** 0.5),
                    "balance": Draws((squares[0] - squares[1]) / (squares[0] + squares[1])),
                }
            )

        # One step more, whose update nobody sees: the last state is watched, too.
        train(replace(setting, steps=setting.steps + 1), seed=seed, watch=watch)
        if progress is not None:
            progress(1)
    return Table("W^Q and W^K while models learn", rows)


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
        at step 0), cosine d_k=... (of a query and the key that it asks for).
    """
    found: dict[tuple[int, int], tuple[Values, Values, Values]] = {}
    for width in d_k:
        start: dict[str, Values] = {}

        def watch(
            step: int,
            models: Trained,
            gradients: Arrays,
            width: int = width,
            start: dict[str, Values] = start,
        ) -> None:
            if step not in steps:
                return
            batch = next(models.batches("scores", 16))
            q, k, _ = models.project(models.parameters, batch)
            raw = sdpa.attention_weights(q, k, scale=1.0, stage="scores").astype(np.float64)
            raw0 = start.setdefault("raw", raw)
            # Whose class is asked for: the key with the same symbol.
            q_unit, k_unit = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
            cosines = np.take_along_axis(q_unit @ k_unit.swapaxes(-1, -2), batch.answer, axis=-1)
            found[width, step] = (
                raw.std(axis=(1, 2, 3)),
                (raw - raw0).std(axis=(1, 2, 3)),
                cosines.mean(axis=(1, 2, 3), dtype=np.float64),
            )

        setting = Setting(d_k=width, rule=rule, rates=(rate,), **settings)
        train(replace(setting, steps=max(steps) + 1), seed=seed, watch=watch)
        if progress is not None:
            progress(1)
    log_d = np.log(d_k) - np.mean(np.log(d_k))

    def exponent(step: int, which: int) -> Values:
        logs = np.log([found[width, step][which] for width in d_k])
        return np.asarray((log_d[:, None] * logs).sum(axis=0) / (log_d**2).sum())

    never = np.full(len(exponent(steps[0], 0)), np.nan)

    rows: Rows = []
    for step in steps:
        row: dict[str, Cell] = {"step": step, "exponent": Draws(exponent(step, 0))}
        row["exponent of change"] = Draws(exponent(step, 1) if step else never)
        row |= {f"cosine d_k={width}": Draws(found[width, step][2]) for width in d_k}
        rows.append(row)
    return Table("q and k while models learn", rows)


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
        squares = _square_norm(by_key), _square_norm(by_value)
        inner = (by_key * by_value).sum(axis=(1, 2), dtype=np.float64)
        rows.append(
            {
                "step": step,
                "cosine": Draws(inner / (squares[0] * squares[1]) ** 0.5),
                "ratio": Draws((squares[0] / squares[1]) ** 0.5),
                "loss": Draws(models.test_loss(purpose="curve")[0]),
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


def tying(
    widths: Sequence[int] = (8, 32),
    *,
    seed: int = 0,
    progress: Progress = None,
    **settings: Any,
) -> Table:
    """What one projection for keys and values costs, beside two of the same width.

    Returns
    -------
    Table
        width (d_k = d_v), tied (1 or 0), rate, loss (nats).
    """
    grid = [Setting(d_k=w, d_v=w, tied=tied, **settings) for w in widths for tied in (False, True)]
    rows: Rows = []
    for models in _each(grid, seed, progress):
        best = models.best()
        rows.append(
            {
                "width": models.setting.d_k,
                "tied": int(models.setting.tied),
                "rate": models.setting.rates[best],
                "loss": Draws(models.test_loss()[best]),
            }
        )
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
        best, start = models.best(), Trained(models.setting, seed)
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
            row[f"grad {name}"] = Draws(_square_norm(g)[: models.setting.seeds] ** 0.5)
        row["rate"] = models.setting.rates[best]
        row["loss"] = Draws(models.test_loss()[best])
        rows.append(row)
    return Table("Training that starts saturated", rows)


def start_symmetry(
    d_k: Sequence[int] = (16, 64),
    *,
    d_model: int = 64,
    draws: int = 400,
    seed: int = 0,
    progress: Progress = None,
) -> Table:
    """W^Q and W^K at Glorot's initialisation: N(0, 2/(d_model + d_k)), each drawn for itself.

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
        skew = _square_norm(a - a.swapaxes(-1, -2)) / (4 * _square_norm(a))
        rows.append(
            {
                "d_k": width,
                "mean entry": Draws(a.mean(axis=(1, 2)) / (std**2 * width**0.5), predicted=0.0),
                "log ratio": Draws(np.log(_square_norm(w_q) / _square_norm(w_k)), predicted=0.0),
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
            squares = _square_norm(grads.query), _square_norm(grads.key)
            apart = _square_norm(grads.query - grads.key)
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
    "MECHANISMS",
    "RULES",
    "TASKS",
    "correlation",
    "curves",
    "divergence",
    "gradients_differ",
    "lengths",
    "mechanisms",
    "other_scale",
    "saturation",
    "scale_rules",
    "start_symmetry",
    "tied_paths",
    "trained_scores",
    "tying",
]
