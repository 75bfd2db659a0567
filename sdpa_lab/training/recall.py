"""A task that attention alone can solve, small enough to train hundreds of models on it.

A sequence holds n pairs (symbol, class): the symbols are different ones of 32, the classes are
random ones of 8. Then all symbols are asked for in another order, and the model says the class of
each:

    keys, values   x_j = (a(symbol_j) + b(class_j)) / sqrt(2)        (n, 32)
    queries        y_i = a'(symbol asked for)                        (n, 32)

    logits = softmax(scale y W^Q (x W^K)^T) x W^V W^O,    W^Q, W^K (32, d_k), W^V (32, 32)

The vectors a, a' and b are drawn once per seed from N(0, 1) and fixed, so that x and y meet the
assumption of the footnote: with W ~ N(0, 1/32) the components of a query and a key have variance 1,
and Var(q.k) = d_k at the start. The models learn which a' belongs to which a. The loss is the
cross-entropy in nats; guessing has ln 8 = 2.08.

Models that differ in seed and learning rate alone are trained together, as leading axes (rates,
seeds) of all arrays, on the same data for all rates of a seed. They do not influence each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log
from typing import Any, NamedTuple

import autograd.numpy as anp
import numpy as np
import numpy.typing as npt
from autograd import value_and_grad
from autograd.extend import defvjp_argnums, primitive

import sdpa
from sdpa.interop import autograd as interop

from ..tools.inputs import stream
from ..tools.machine import one_blas_thread
from ..tools.table import Cell
from .layers import cross_entropy, linear_each, rms_norm
from .optimise import Adam, Arrays, Descent

D_MODEL, SYMBOLS, CLASSES = 32, 32, 8
CHANCE = log(CLASSES)
TOKENS = 128
"""Per step and model, whatever n is."""

Values = npt.NDArray[np.float64]
Rows = list[dict[str, Cell]]
Progress = Callable[[int], object] | None
"""Called with the number of steps, models or settings completed since the last call."""

RULES: dict[str, Callable[[int], float]] = {
    "1": lambda d_k: 1.0,
    "log d_k": lambda d_k: 1 / log(d_k),
    "sqrt d_k": lambda d_k: d_k**-0.5,
    "2 sqrt d_k": lambda d_k: 0.5 * d_k**-0.5,
    "4 sqrt d_k": lambda d_k: 0.25 * d_k**-0.5,
    "d_k": lambda d_k: 1 / d_k,
    "learned": lambda d_k: d_k**-0.5,  # at the start
}
"""The scale by the name of the rule."""

MECHANISMS = ("dot", "additive", "cosine", "bilinear")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to train; the models that share it differ in seed and learning rate."""

    d_k: int = 32
    n: int = 16
    symbols: int = SYMBOLS
    d_model: int = D_MODEL
    rule: str = "sqrt d_k"
    """One of RULES. Cosine and additive attention have a scale, too, 1 unless this says else."""
    fold: str = "none"
    """"none": the scale is in the kernel. "initial": W^Q is multiplied by it before training
    and the kernel has scale 1. "compensated": that, and the learning rate of W^Q is multiplied by
    it (squared for plain descent), which makes the trajectory the same."""
    mechanism: str = "dot"
    """One of MECHANISMS. "additive": w . tanh(q + k) with W^Q, W^K (32, d_k) and w (d_k). "cosine":
    q.k / |q||k|, times a learned factor that starts at d_k^(1/2), the size of its scores' inverse.
    "bilinear": y W x without d_k."""
    tied: bool = False
    """W^V is W^K; then d_v is d_k, in the models compared with it as well: see `d_v`."""
    d_v: int = D_MODEL
    symmetric: bool = False
    """Queries have the vectors of the keys: a' = a."""
    same_start: bool = False
    """W^K starts as a copy of W^Q."""
    gain: float = 1.0
    """Factor of W^Q and W^K at the start; gain^2 that of the scores."""
    power: float | None = None
    """Of d_k in the divisor, which is 32^(1/2) (d_k / 32)^power: that of `rule` "sqrt d_k" at 32,
    and in its place."""
    softcap: float | None = None
    """Scores s become softcap tanh(s / softcap)."""
    clip: float | None = None
    """QK-clip: after a step W^Q and W^K of a model whose largest |score| of the batch is above this
    are multiplied by the root of the ratio (Kimi K2, arXiv:2507.20534)."""
    optimiser: str = "adam"
    """"adam" or "descent"."""
    rates: tuple[float, ...] = (3e-3, 1e-2, 3e-2)
    seeds: int = 16
    steps: int = 150

    @property
    def scale(self) -> float:
        """Of the kernel at the start."""
        if self.power is not None:
            return float(D_MODEL**-0.5 * (self.d_k / D_MODEL) ** -self.power)
        return 1.0 if self.fold != "none" else RULES[self.rule](self.d_k)

    def __post_init__(self) -> None:
        for name, known in (("rule", RULES), ("mechanism", MECHANISMS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}: expected one of {list(known)}, got {getattr(self, name)!r}"
                )
        if self.fold not in ("none", "initial", "compensated"):
            raise ValueError(f"fold: expected none, initial or compensated, got {self.fold!r}")
        most = min(self.symbols, TOKENS)
        if not 1 <= self.n <= most or TOKENS % self.n:
            raise ValueError(f"n: expected a divisor of {TOKENS} up to {most}, got {self.n}")
        if self.mechanism == "additive" and (self.softcap or self.clip):
            raise ValueError("mechanism: expected one with scores q.k for softcap or clip")


class Batch(NamedTuple):
    """Inputs and targets of one step for every seed: (seeds, sequences, n, ...)."""

    x: Any
    """What keys and values are made of."""
    y: Any
    """What queries are made of."""
    target: Any
    """The class that each query asks for: (seeds, sequences, n)."""
    answer: Any
    """The position of the key that it asks for: (rates * seeds, sequences, n, 1)."""


class Trained:
    """Models of one setting. Arrays have leading axes (rates, seeds), flat in `parameters`.

    Those of the seeds from `first` on: a block of the models of a setting with more seeds.
    """

    def __init__(self, setting: Setting, seed: int, first: int = 0) -> None:
        self.setting: Setting = setting
        self.seed: int = seed
        self._numbers: range = range(first, first + setting.seeds)
        rates, seeds = len(setting.rates), setting.seeds
        self.shape: tuple[int, int] = (rates, seeds)

        def draw(*shape: int, variance: float = 1.0) -> Any:
            # One seed at a time, so that adding seeds does not change the first ones.
            drawn = [rng_of.standard_normal(shape) for rng_of in generators]
            return (variance**0.5 * np.array(drawn)).astype(np.float32)

        generators = [stream(seed, "recall", "start", i) for i in self._numbers]
        symbols, d_model = setting.symbols, setting.d_model
        self.key_vectors: Any = draw(symbols, d_model)
        self.class_vectors: Any = draw(CLASSES, d_model)
        self.query_vectors: Any = draw(symbols, d_model)
        if setting.symmetric:
            self.query_vectors = self.key_vectors
        width = d_model if setting.mechanism == "bilinear" else setting.d_k
        start = {
            "W^Q": setting.gain * draw(d_model, width, variance=1 / d_model),
            "W^K": setting.gain * draw(d_model, width, variance=1 / d_model),
            "W^V": draw(d_model, self.d_v, variance=1 / d_model),
            "W^O": draw(self.d_v, CLASSES, variance=1 / self.d_v),
        }
        if setting.same_start:
            start["W^K"] = start["W^Q"].copy()
        if setting.fold != "none":
            start["W^Q"] *= np.float32(RULES[setting.rule](setting.d_k))
        if setting.mechanism == "additive":
            start["w"] = draw(width, 1, variance=1 / width)
        if setting.rule == "learned" or setting.mechanism == "cosine":
            factor = setting.d_k**0.5 if setting.mechanism == "cosine" else setting.scale
            start["log scale"] = np.full((seeds, 1, 1), log(factor), np.float32)
        if setting.mechanism == "bilinear":
            del start["W^K"]
        if setting.tied:
            del start["W^V"]
        self.parameters: dict[str, Any] = {
            name: np.tile(w, (rates, 1, 1)) for name, w in start.items()
        }

    @property
    def d_v(self) -> int:
        """Width of the values."""
        return self.setting.d_k if self.setting.tied else self.setting.d_v

    # ------------------------------------------------------------------------- the model

    def batches(self, purpose: str, sequences: int, n: int | None = None) -> Iterator[Batch]:
        """Fresh data without end; every purpose has its own. Of another length where given."""
        n, seeds = self.setting.n if n is None else n, self.setting.seeds
        generators = [stream(self.seed, "recall", purpose, i) for i in self._numbers]
        which = np.arange(seeds)[:, None, None]
        while True:
            drawn = [
                (
                    rng.random((sequences, self.setting.symbols)).argsort(axis=-1)[:, :n],
                    rng.integers(CLASSES, size=(sequences, n)),
                    rng.random((sequences, n)).argsort(axis=-1),
                )
                for rng in generators
            ]
            symbols, classes, order = (np.array(part) for part in zip(*drawn, strict=True))
            x = self.key_vectors[which, symbols] + self.class_vectors[which, classes]
            y = self.query_vectors[which, np.take_along_axis(symbols, order, axis=-1)]
            target = np.take_along_axis(classes, order, axis=-1)
            answer = np.tile(order[..., None], (self.shape[0], 1, 1, 1))
            yield Batch(x * np.float32(0.5**0.5), y, target, answer)

    def project(self, parameters: Any, batch: Batch) -> tuple[Any, Any, Any]:
        """Query, key and value: (rates * seeds, sequences, n, width)."""
        query = linear_each(batch.y, parameters["W^Q"])
        if self.setting.mechanism == "bilinear":
            key = np.tile(batch.x, (self.shape[0], 1, 1, 1))
        else:
            key = linear_each(batch.x, parameters["W^K"])
        return query, key, key if self.setting.tied else linear_each(batch.x, parameters["W^V"])

    def attend(self, parameters: Any, query: Any, key: Any, value: Any, scale: float | None) -> Any:
        """Attention by the setting's mechanism; `scale` in place of the one it has."""
        if self.setting.mechanism == "additive":
            scores = self._additive_scores(parameters, query, key, scale)
            nothing = np.zeros((*query.shape[:-1], 0), np.float32)
            return interop.attention(nothing, nothing, value, scores)
        query, key, scale = self._factors(parameters, query, key, scale)
        return interop.attention(query, key, value, scale=scale, softcap=self.setting.softcap)

    def _additive_scores(self, parameters: Any, query: Any, key: Any, scale: float | None) -> Any:
        scale = self.setting.scale if scale is None else scale
        return scale * additive_scores(query, key, parameters["w"])

    def _factors(
        self, parameters: Any, query: Any, key: Any, scale: float | None
    ) -> tuple[Any, Any, float]:
        """Query, key and scale such that the scores are scale query key^T."""
        scale = self.setting.scale if scale is None else scale
        if self.setting.mechanism == "cosine":
            root = np.float32(query.shape[-1] ** -0.5)
            query, key, scale = rms_norm(query) * root, rms_norm(key) * root, 1.0
        if "log scale" in parameters:
            query, scale = query * anp.exp(parameters["log scale"])[..., None], 1.0
        return query, key, scale

    def losses(self, parameters: Any, batch: Batch, scale: float | None = None) -> Any:
        """Cross-entropy of each model: (rates * seeds,)."""
        out = self.attend(parameters, *self.project(parameters, batch), scale)
        return self.read(parameters, out, batch)

    def read(self, parameters: Any, out: Any, batch: Batch) -> Any:
        """Cross-entropy of each model from the output of attention."""
        logits = linear_each(out, parameters["W^O"])
        target = np.tile(batch.target, (self.shape[0], 1, 1))
        return anp.mean(cross_entropy(logits, target), axis=(1, 2))

    def gradients(self, batch: Batch) -> tuple[Values, Arrays]:
        """Loss and gradients of every model."""
        total = value_and_grad(lambda p: anp.sum(self.losses(p, batch)))
        value, grads = total(self.parameters)
        return value, grads

    def shrink(self, batch: Batch, limit: float) -> None:
        """Multiply W^Q and W^K of models with a score of the batch beyond `limit`, to end there."""
        query, key, _ = self.project(self.parameters, batch)
        query, key, scale = self._factors(self.parameters, query, key, None)
        scores = sdpa.attention_weights(query, key, scale=scale, stage="scores")
        largest = np.abs(scores).max(axis=(1, 2, 3))[:, None, None]
        factor = (limit / np.maximum(largest, limit)) ** 0.5
        for name in ("W^Q", "W^K"):
            self.parameters[name] *= factor.astype(np.float32)

    # ---------------------------------------------------------------------- what came out

    def test_loss(self, scale: float | None = None, *, purpose: str = "test") -> Values:
        """Cross-entropy in nats on fresh data, (rates, seeds); with another scale where given."""
        batch = next(self.batches(purpose, max(1, 1024 // self.setting.n)))
        with one_blas_thread():
            losses = self.losses(self.parameters, batch, scale)
        return np.asarray(losses, np.float64).reshape(self.shape)

    def best(self) -> int:
        """The learning rate with the least mean loss, on data that no test sees."""
        return int(np.nanargmin(self.test_loss(purpose="choice").mean(axis=1)))

    def found(self) -> Values:
        """Weight on the key that is asked for, on fresh data: (rates, seeds)."""
        p = np.asarray(sdpa.softmax(self.scores()))
        answer = next(self.batches("scores", 16)).answer.reshape(*p.shape[:-1], 1)
        weights: Values = np.take_along_axis(p, answer, axis=-1).mean(axis=(2, 3, 4))
        return weights

    def scores(self) -> Values:
        """Scaled scores on fresh data: (rates, seeds, sequences, n, n)."""
        batch = next(self.batches("scores", 16))
        query, key, _ = self.project(self.parameters, batch)
        if self.setting.mechanism == "additive":
            scores = self._additive_scores(self.parameters, query, key, None)
        else:
            query, key, scale = self._factors(self.parameters, query, key, None)
            scores = sdpa.attention_weights(query, key, scale=scale, stage="scores")
            if self.setting.softcap is not None:
                scores = self.setting.softcap * np.tanh(scores / self.setting.softcap)
        return np.asarray(scores, np.float64).reshape(*self.shape, *scores.shape[1:])


@primitive
def additive_scores(query: Any, key: Any, w: Any) -> Any:
    """w . tanh(q_i + k_j) of (runs, ..., Lq, h), (runs, ..., Lk, h) and (runs, h, 1).

    (runs, ..., Lq, Lk). The tanh of all pairs of one run at a time.
    """
    return np.stack([(_tanh(*pair) @ v)[..., 0] for *pair, v in zip(query, key, w, strict=True)])


def _tanh(query: Any, key: Any) -> Any:
    return np.tanh(query[..., :, None, :] + key[..., None, :, :])


def _additive_scores_vjp(argnums: Any, scores: Any, args: Any, kwargs: Any) -> Any:
    def vjp(g: Any) -> Any:
        grads = [np.empty_like(x) for x in args]
        for run, (query, key, w) in enumerate(zip(*args, strict=True)):
            t, g_run = _tanh(query, key), g[run][..., None]
            grads[2][run] = t.reshape(-1, t.shape[-1]).T @ g_run.reshape(-1, 1)
            t *= t
            t = (1 - t) * w[:, 0] * g_run
            grads[0][run], grads[1][run] = t.sum(axis=-2), t.sum(axis=-3)
        return [grads[i] for i in argnums]

    return vjp


defvjp_argnums(additive_scores, _additive_scores_vjp)


Watch = Callable[[int, Trained, Arrays], None]
"""Called before every step with its number, the models and their gradients."""


def train(
    setting: Setting,
    *,
    seed: int = 0,
    watch: Watch | None = None,
    progress: Progress = None,
) -> Trained:
    """Train all models of a setting.

    Parameters
    ----------
    setting : Setting
    seed : int
        Of vectors, starts and data.
    watch : callable, optional
        Called before every step with (step, models, gradients).
    progress : callable, optional
        Called with 1 after each step.

    Examples
    --------
    >>> from sdpa_lab.training import recall
    >>> models = recall.train(recall.Setting(d_k=8, rates=(0.03,), seeds=2, steps=60))
    >>> bool((models.test_loss() < 0.8 * recall.CHANCE).all())
    True
    """
    run = Run(setting, seed)
    run.advance(setting.steps, watch, progress)
    return run.models


class Run:
    """Training that can go on: rates are constant, so fewer steps are the first of more."""

    def __init__(self, setting: Setting, seed: int, first: int = 0) -> None:
        self.models, self.steps = Trained(setting, seed, first), 0
        rate = np.repeat(np.array(setting.rates, np.float32), setting.seeds)[:, None, None]
        rates: dict[str, Any] = dict.fromkeys(self.models.parameters, rate)
        factor = RULES[setting.rule](setting.d_k)
        if setting.fold == "compensated":
            rates["W^Q"] = rate * np.float32(factor if setting.optimiser == "adam" else factor**2)
        self._optimiser = {"adam": Adam, "descent": Descent}[setting.optimiser](rates)
        self._batches = self.models.batches("train", TOKENS // setting.n)

    def advance(self, steps: int, watch: Watch | None = None, progress: Progress = None) -> None:
        """Train until there have been so many steps."""
        with one_blas_thread():
            for step in range(self.steps, steps):
                batch = next(self._batches)
                _, gradients = self.models.gradients(batch)
                if watch is not None:
                    watch(step, self.models, gradients)
                self._optimiser.step(self.models.parameters, gradients)
                if self.models.setting.clip is not None:
                    self.models.shrink(batch, self.models.setting.clip)
                if progress is not None:
                    progress(1)
        self.steps = max(self.steps, steps)

    def at(self, setting: Setting) -> Trained:
        """The models after the steps of a setting, which further training leaves as they are."""
        self.advance(setting.steps)
        models = copy(self.models)
        models.setting = setting
        models.parameters = {name: w.copy() for name, w in self.models.parameters.items()}
        return models


BLOCK = 2**20
"""Numbers in the queries, keys and values of a block of models, at most.

With more they do not stay near the core of a CPU, and a step of a model takes up to twice as long.
"""


def block_size(setting: Setting) -> int:
    """Seeds that are trained together, a power of 2: a block does not depend on their number.

    Examples
    --------
    >>> from sdpa_lab.training.recall import Setting, block_size
    >>> block_size(Setting()), block_size(Setting(d_k=256)), block_size(Setting(seeds=2))
    (16, 4, 16)
    """
    fitting = BLOCK // (len(setting.rates) * TOKENS * (2 * setting.d_k + setting.d_v))
    return 1 << max(0, fitting.bit_length() - 1)


@lru_cache(maxsize=32)
def _run(setting: Setting, seed: int, first: int) -> Run:
    return Run(setting, seed, first)


@lru_cache(maxsize=1024)
def _block(setting: Setting, seed: int, first: int) -> Trained:
    run = _run(replace(setting, steps=0), seed, first)
    if run.steps > setting.steps:
        run = Run(setting, seed, first)
    return run.at(setting)


def trained(setting: Setting, seed: int) -> Trained:
    """`train` with a cache, because rows of the ledger share models.

    More steps continue fewer, and more seeds keep the models of fewer: they are trained in blocks.
    """
    size = block_size(setting)
    blocks = [
        _block(replace(setting, seeds=min(size, setting.seeds - first)), seed, first)
        for first in range(0, setting.seeds, size)
    ]
    models = Trained(setting, seed)
    for name, start in models.parameters.items():
        parts = [b.parameters[name].reshape(*b.shape, *start.shape[1:]) for b in blocks]
        models.parameters[name] = np.concatenate(parts, axis=1).reshape(start.shape)
    return models


SOLVED = CHANCE / 400
"""A loss in nats below which models are not trained on: a tenth of what the ledger calls no harm.
"""


def compare(setting: Setting, *, seed: int = 0, **changes: Any) -> Values:
    """Test loss of each seed at its setting's best learning rate, after `changes`: (seeds,)."""
    models = trained(replace(setting, **changes), seed)
    losses: Values = models.test_loss()[models.best()]
    return losses


def compare_at(
    steps: Sequence[int], setting: Setting, *, seed: int = 0, **changes: Any
) -> dict[int, Values]:
    """`compare` after each number of steps, in ascending order, by number of steps.

    Models that have solved the task, by their mean loss on the data that choose the rate, are kept
    as they are: no further step could change what a row says of them.
    """
    found: dict[int, Values] = {}
    for count in steps:
        models = trained(replace(setting, steps=count, **changes), seed)
        best = models.best()
        found[count] = models.test_loss()[best]
        if models.test_loss(purpose="choice")[best].mean() < SOLVED:
            return found | {later: found[count] for later in steps if later > count}
    return found


def square_norms(x: npt.NDArray[Any]) -> Values:
    """Of each model's array: (models, ...) -> (models,)."""
    norms: Values = np.square(x.reshape(len(x), -1), dtype=np.float64).sum(axis=1)
    return norms
