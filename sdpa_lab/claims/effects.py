"""Rows on what the scale does to rounding, to gradients, to depth, and to what can be expressed."""

from collections.abc import Callable
from math import sqrt

import numpy as np

import sdpa

from .. import theory
from ..experiments.depth import perturbation
from ..experiments.gradients import gradient_norms
from ..experiments.growth import Array
from ..tools.estimate import Draws
from ..tools.inputs import stream
from .record import Claim, Expect, Measured, draws

N = 64
"""Keys, where nothing else is said."""


# ---------------------------------------------------------------------- rounding


def rounding(seed: int, times: float) -> Measured:
    """Error of attention in float32, by its three operations, without the scale over with it.

    A draw is a head; an error is relative to the size of the output.
    """
    measured: dict[str, Draws] = {}
    for d_k in (64, 512):
        rng = stream(seed, "rounding", d_k)
        operands = rng.standard_normal((3, draws(160, times), N, d_k)).astype(np.float32)
        errors, bad = {}, {}
        for name, scale in (("scaled", d_k**-0.5), ("unscaled", 1.0)):
            single = _attend(*operands, scale=scale)
            double = _attend(*operands.astype(np.float64), scale=scale)
            error = np.linalg.norm(single - double, axis=(1, 2))
            errors[name] = error / np.linalg.norm(double, axis=(1, 2))
            bad[name] = (~np.isfinite(single)).mean(axis=(1, 2))
            bits = Draws(np.log2(errors[name] * 2**24))
            measured[f"bits of 24 that are lost, {name} d_k={d_k}"] = bits
        ratio = Draws(errors["unscaled"] / errors["scaled"])
        measured[f"error unscaled over scaled, d_k={d_k}"] = ratio
        measured[f"numbers that are not finite, unscaled d_k={d_k}"] = Draws(
            bad["unscaled"], "share"
        )
    return measured


def _attend(query: Array, key: Array, value: Array, *, scale: float) -> Array:
    scores = query @ key.swapaxes(-1, -2) * query.dtype.type(scale)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True) @ value)


def error_law(d_k: int) -> float:
    """Error of the output without the scale over that with it, where that of the scores rules.

    An error e of the scores moves a row by J e, and e is sqrt(d_k) times as large without the
    scale; the output has the size (sum p^2)^(1/2).

    Examples
    --------
    >>> from sdpa_lab.claims.effects import error_law
    >>> [round(error_law(d), 1) for d in (64, 512)]
    [2.7, 4.5]
    """
    laws = [theory.weights(N, sigma) for sigma in (sqrt(d_k), 1.0)]
    sizes = [sqrt(law.jacobian / law.sum_p2) for law in laws]
    return sqrt(d_k) * sizes[0] / sizes[1]


# ---------------------------------------------------------------------- gradients


def evenness(seed: int, times: float) -> Measured:
    """How unevenly the rows of a head share its gradient to the queries; a draw is a head.

    The standard deviation of |dL/dq_i| over the rows, in units of their mean.
    """
    measured: dict[str, Draws] = {}
    for d_k in (64, 512):
        found = gradient_norms(d_k, 10, targets=("query",), seed=seed, draws=draws(200, times))
        spread = {}
        for name in ("scaled", "unscaled"):
            norms = np.sqrt(found[f"query {name}"])
            spread[name] = norms.std(axis=1, ddof=1) / norms.mean(axis=1)
            measured[f"spread of |dL/dQ| over its mean, {name} d_k={d_k}"] = Draws(spread[name])
        measured[f"spread unscaled over scaled, d_k={d_k}"] = Draws(
            spread["unscaled"] / spread["scaled"]
        )
    return measured


def depth(seed: int, times: float) -> Measured:
    """Gradient that reaches the first layer without the scale over that with it, by depth."""
    measured: dict[str, Draws] = {}
    count = draws(64, times)
    for stack in ("with skip connections", "attention of normalised tokens"):
        ratios = {}
        for layers in LAYERS:
            logs = perturbation(layers, stack=stack, draws=count, seed=seed)
            ratios[layers] = np.exp(logs["unscaled"] - logs["scaled"])
            name = f"gradient unscaled over scaled, {stack}, layers={layers}"
            measured[name] = Draws(ratios[layers], "median")
        growth = ratios[LAYERS[-1]] / ratios[1]
        measured[f"growth of the ratio from 1 to 16 layers, {stack}"] = Draws(growth, "median")
    return measured


LAYERS = (1, 4, 16)


# ---------------------------------------------------------------------- the scale in the weights


def expressiveness(seed: int, times: float) -> Measured:
    """Attention with the scale and W^Q against attention without it and W^Q/sqrt(d_k)."""
    measured: dict[str, Draws] = {}
    for d_k in (32, 128):
        rng = stream(seed, "expressiveness", d_k)
        x = rng.standard_normal((draws(40, times), 32, d_k))
        weights = rng.standard_normal((3, len(x), d_k, d_k)) / sqrt(d_k)
        query, key, value = (x @ w for w in weights)
        with_scale = sdpa.attention(query, key, value)
        without = sdpa.attention(x @ (weights[0] / sqrt(d_k)), key, value, scale=1.0)
        difference = np.linalg.norm(without - with_scale, axis=(1, 2))
        size = np.linalg.norm(with_scale, axis=(1, 2))
        measured[f"relative difference, d_k={d_k}"] = Draws(difference / size)
    return measured


def folded(seed: int, times: float) -> Measured:
    """The scale in the initial W^Q and W^K, d_k^(-1/4) in each, against the scale in the kernel.

    Output at the start, and how far one step at the same rate moves the scores.
    """
    rng, d_k = stream(seed, "folded"), 32
    count = draws(40, times)
    x = rng.standard_normal((count, 16, d_k))
    w_query, w_key = rng.standard_normal((2, count, d_k, d_k)) / sqrt(d_k)
    value, grad_out = rng.standard_normal((2, count, 16, d_k))
    starts = {"kernel": (1.0, d_k**-0.5), "folded": (d_k**-0.25, 1.0)}
    outs: dict[str, Array] = {}
    moves: dict[str, dict[str, Array]] = {}
    for name, (factor, scale) in starts.items():
        pair = (factor * w_query, factor * w_key)
        query, key = x @ pair[0], x @ pair[1]
        out, lse = sdpa.attention_forward(query, key, value, scale=scale)
        grads = sdpa.attention_backward(grad_out, query, key, value, out, lse, scale=scale)
        assert grads.query is not None
        assert grads.key is not None
        gradients = [x.swapaxes(-1, -2) @ grad for grad in (grads.query, grads.key)]
        outs[name] = out
        moves[name] = {
            rule: scale * _moved(x, pair, [step(gradient) for gradient in gradients])
            for rule, step in STEPS.items()
        }
    difference = np.linalg.norm(outs["folded"] - outs["kernel"], axis=(1, 2))
    measured = {
        "relative difference at the start": Draws(
            difference / np.linalg.norm(outs["kernel"], axis=(1, 2))
        )
    }
    for rule in STEPS:
        ratio = moves["folded"][rule] / moves["kernel"][rule]
        measured[f"step of the scores folded over in the kernel, {rule}"] = Draws(ratio)
    return measured


STEPS: dict[str, Callable[[Array], Array]] = {"descent": lambda g: g, "signs": np.sign}
"""Of plain descent, and of Adam at its first step, which is the sign of the gradient."""


def _moved(x: Array, weights: tuple[Array, Array], steps: list[Array]) -> Array:
    """Size of the change of X W^Q W^K^T X^T, to first order, that the steps make."""
    tokens = x.swapaxes(-1, -2)
    changed = (x @ steps[0]) @ (weights[1].swapaxes(-1, -2) @ tokens)
    changed += (x @ weights[0]) @ (steps[1].swapaxes(-1, -2) @ tokens)
    return np.asarray(np.linalg.norm(changed, axis=(1, 2)))


CLAIMS = (
    Claim(
        id="numerical-stability",
        claim="The scale is what keeps attention numerically stable.",
        claim_zh="缩放保证了注意力的数值稳定性。",
        # Unstable: a digit more is lost to rounding.
        expect=tuple(
            Expect(
                f"error unscaled over scaled, d_k={d}",
                10.0,
                (0, None),
                law=error_law(d),
                law_margin=1.5,
            )
            for d in (64, 512)
        ),
        holds="Without it {error unscaled over scaled, d_k=64} times as much is lost to rounding "
        "at d_k = 64.",
        law="Not in the sense of numerical analysis. With the maximum subtracted attention is "
        "stable with the scale or without: in float32 the relative error of the output is {error "
        "unscaled over scaled, d_k=64} times as large without it at d_k = 64 and {error unscaled "
        "over scaled, d_k=512} times at 512, less than a digit, and nothing overflows. Errors of "
        "the scores are sqrt(d_k) times as large, but saturated rows hardly feel them, which "
        "leaves a growth as d_k^(1/4). What the notes call stability is the size of the scores at "
        "the start and what it does to gradients.",
        experiment=rounding,
    ),
    Claim(
        id="steadier-gradients",
        claim="With the scale the gradient is steadier.",
        claim_zh="缩放使梯度更新更稳定。",
        # Twice as even over the rows of a head.
        expect=tuple(
            Expect(f"spread unscaled over scaled, d_k={d}", 2.0, (0, None)) for d in (64, 512)
        ),
        holds="The rows of a head share its gradient more evenly: the standard deviation of "
        "|dL/dq| over its mean is {spread of |dL/dQ| over its mean, scaled d_k=64:.2f} with the "
        "scale and {spread of |dL/dQ| over its mean, unscaled d_k=64:.2f} without it at d_k = 64, "
        "{spread of |dL/dQ| over its mean, unscaled d_k=512:.2f} at 512 (n = 10): few rows have "
        "nearly all.",
        law="The spread is {spread unscaled over scaled, d_k=64} times as large without the scale "
        "at d_k = 64 and {spread unscaled over scaled, d_k=512} times at 512.",
        experiment=evenness,
    ),
    Claim(
        id="depth",
        claim="The scale matters the more the deeper the model is.",
        claim_zh="缩放在深层模型中尤其重要。",
        # At the start of training: what the lack of the scale does to the gradient that reaches
        # the first layer doubles, at least, from 1 layer to 16.
        expect=(
            Expect(
                "growth of the ratio from 1 to 16 layers, with skip connections", 2.0, (0, None)
            ),
        ),
        holds="At the start of training it does: the gradient that reaches the first of 1, 4 and "
        "16 layers with skip connections is {gradient unscaled over scaled, with skip connections, "
        "layers=1:.2f}, {gradient unscaled over scaled, with skip connections, layers=4:.2f} and "
        "{gradient unscaled over scaled, with skip connections, layers=16:.2f} times as large "
        "without the scale as with it: it explodes with depth. Without skip connections it is "
        "{gradient unscaled over scaled, attention of normalised tokens, layers=16:.2g} times at "
        "16 layers, for another reason as well: there the scale makes all tokens alike.",
        law="Not at the start of training: without the scale the gradient that reaches the first "
        "of 16 layers with skip connections is {gradient unscaled over scaled, with skip "
        "connections, layers=16:.2f} times that with it.",
        experiment=depth,
        slow=True,
    ),
    Claim(
        id="expressiveness",
        claim="The scale raises what the model can express; without it expressive power is lost.",
        claim_zh="缩放提升模型的表达能力；不缩放会降低表达能力。",
        expect=tuple(
            Expect(f"relative difference, d_k={d}", 0.1, (0, None), law=0.0, law_margin=1e-9)
            for d in (32, 128)
        ),
        holds="Attention without it cannot express what attention with it does.",
        law="Both express the same functions: attention without the scale and with W^Q/sqrt(d_k) "
        "gives the output of scaled attention with W^Q, to {relative difference, d_k=32:.0e}. What "
        "the scale changes is where training starts and how fast W^Q moves.",
        experiment=expressiveness,
    ),
    Claim(
        id="fold-start",
        claim="Scaling the initial weights instead has the same effect on the scores.",
        claim_zh="在初始化时缩放权重，与直接除以 sqrt(dim) 效果等价（就开始时的分数而言）。",
        expect=(Expect("relative difference at the start", 0.0, 1e-9),),
        holds="At the start it has: with d_k^(-1/4) in W^Q and in W^K the outputs agree to "
        "{relative difference at the start:.0e}.",
        law="The outputs differ by {relative difference at the start}.",
        experiment=folded,
    ),
    Claim(
        id="fold-step",
        claim="Scaling the initial weights instead has the same effect on training.",
        claim_zh="在初始化时缩放权重，与直接除以 sqrt(dim) 效果等价（就训练而言）。",
        expect=(
            Expect("step of the scores folded over in the kernel, descent", 1.0, 0.1, law=sqrt(32)),
        ),
        holds="One step moves the scores by as much.",
        law="Not at the same learning rate: one step of plain descent moves the scores sqrt(d_k) "
        "times as far as with the scale in the kernel ({step of the scores folded over in the "
        "kernel, descent:.2f} at d_k = 32), one of Adam d_k^(1/4) times ({step of the scores "
        "folded over in the kernel, signs:.2f}). With rates divided by these factors it is the "
        "same.",
        experiment=folded,
    ),
)
