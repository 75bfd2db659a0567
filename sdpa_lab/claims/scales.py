"""Rows on dividing by something else than sqrt(d_k), at the start of training."""

from math import log, sqrt

import numpy as np

import sdpa

from ..experiments.growth import Array, matrices
from ..measure import Figures
from ..theory import best_scale
from ..tools.estimate import Draws
from . import trained
from .record import Claim, Expect, Measured, draws

HALF = 0.5
"""A row counts as saturated on average when one weight exceeds all others together."""

LARGEST_LOG = 0.285
"""`theory.attention(64, 64, 1 / log(64)).max_weight`."""

# `theory.attention(n, 64).grad_score` over that with `theory.best_scale(n, 64)`
GRADIENT = {10: 0.973, 64: 0.579, 1024: 0.169}

FIFTH = 0.2
"""A region rather than a point: as far as a fifth from the largest."""


def _variances(seed: int, times: float, name: str, divisor: float) -> Draws:
    """Mean squares of q.k over the divisor, for matrices of 64 x 64."""

    def square(query: Array, key: Array) -> Figures:
        rows = sdpa.attention_statistics(query, key, scale=1 / divisor)
        return {"variance": (rows.score_var + rows.score_mean**2).mean(1)}

    d_k = int(name.rpartition("=")[2])
    found = matrices(seed, ("other scales", name), draws(300, times), square, (64, d_k))
    return Draws(found["variance"])


def by_width(seed: int, times: float) -> Measured:
    """Variance times d_k of scores divided by d_k; a draw is a matrix."""
    measured = {}
    for d_k in (64, 512):
        found = _variances(seed, times, f"d_k={d_k}", float(d_k))
        measured[f"variance times d_k, divided by d_k, d_k={d_k}"] = Draws(found.values * d_k)
    return measured


def by_twice_the_root(seed: int, times: float) -> Measured:
    """Variance of scores divided by 2 sqrt(d_k); a draw is a matrix."""
    return {
        f"variance divided by 2 sqrt(d_k), d_k={d_k}": _variances(
            seed, times, f"twice d_k={d_k}", 2 * sqrt(d_k)
        )
        for d_k in (64, 512)
    }


def by_the_root(seed: int, times: float) -> Measured:
    """Variance of scores divided by powers of d_k around 1/2; a draw is a matrix."""
    return {
        f"variance divided by d_k^({quarters}/4), d_k={d_k}": _variances(
            seed, times, f"power {quarters} d_k={d_k}", d_k ** (quarters / 4)
        )
        for d_k in (16, 64, 512)
        for quarters in (1, 2, 3)
    }


def evenness(seed: int, times: float) -> Measured:
    """Entropy over ln n, and the largest weight over 1/n, of scores divided by d_k."""

    def weights(query: Array, key: Array) -> Figures:
        n, d_k = query.shape[1:]
        rows = sdpa.attention_statistics(query, key, scale=1 / d_k)
        return {
            "entropy over ln n": rows.entropy.mean(1) / log(n),
            "largest weight over 1/n": rows.max_weight.mean(1) * n,
        }

    measured: dict[str, Draws] = {}
    for d_k, n in ((64, 10), (64, 64), (512, 64)):
        found = matrices(seed, ("evenness", d_k, n), draws(200, times), weights, (n, d_k))
        measured |= {f"{name}, d_k={d_k} n={n}": Draws(values) for name, values in found.items()}
    return measured


def by_the_logarithm(seed: int, times: float) -> Measured:
    """Largest weight of scores divided by ln d_k; a draw is a matrix."""

    def largest(query: Array, key: Array) -> Figures:
        rows = sdpa.attention_statistics(query, key, scale=1 / log(query.shape[2]))
        return {"largest": rows.max_weight.mean(1)}

    measured: dict[str, Draws] = {}
    for d_k, n, count in ((64, 10, 4000), (64, 64, 400), (512, 64, 200)):
        found = matrices(seed, ("logarithm", d_k, n), draws(count, times), largest, (n, d_k))
        measured[f"largest weight divided by ln d_k, d_k={d_k} n={n}"] = Draws(found["largest"])
    return measured


def gradient_kept(seed: int, times: float) -> Measured:
    """|dL/dS| with sqrt(d_k) over that with the divisor that passes the most; a draw: a matrix."""

    def gradient(query: Array, key: Array) -> Figures:
        n, d_k = query.shape[1:]
        squares = []
        for scale in (d_k**-0.5, best_scale(n, d_k)):
            rows = sdpa.attention_statistics(query, key, scale=scale)
            squares.append((rows.sum_p2 - 2 * rows.sum_p3 + rows.sum_p2**2).mean(axis=1))
        return {"ratio": np.sqrt(squares[0] / squares[1])}

    measured: dict[str, Draws] = {}
    for n in GRADIENT:
        count = draws(max(4, 3200 // n), times)
        found = matrices(seed, ("gradient of scores", n), count, gradient, (n, 64))
        name = f"|dL/dS| divided by sqrt(d_k) over the largest, d_k=64 n={n}"
        measured[name] = Draws(found["ratio"])
    return measured | trained.gradient_kept(seed, times)


CLAIMS = (
    Claim(
        id="sqrt-optimal",
        claim="sqrt(d_k) is the optimal divisor, since it makes the variance of the scores exactly "
        "1.",
        claim_zh="sqrt(d_k) 是理论最优解：能够精确地将方差控制为 1。",
        expect=tuple(
            Expect(f"variance divided by d_k^(2/4), d_k={d}", 1.0, 0.05) for d in (16, 64, 512)
        ),
        holds="By this definition it is: no other power of d_k gives 1 at every width. At d_k = 64 "
        "the variance is {variance divided by d_k^(1/4), d_k=64} with d_k^(1/4), {variance divided "
        "by d_k^(2/4), d_k=64} with the root and {variance divided by d_k^(3/4), d_k=64:.3f} with "
        "d_k^(3/4). That a variance of 1 is best for learning does not follow; the paper itself "
        "only suspects that large scores are the trouble.",
        law="The variance is {variance divided by d_k^(2/4), d_k=64} at d_k = 64.",
        experiment=by_the_root,
    ),
    Claim(
        id="optimal-region",
        claim="Scores of variance 1 put the softmax into its optimal working region.",
        claim_zh="方差为 1 的分数使 Softmax 处在最优工作区间。",
        # Where it passes the largest gradient to its scores, or nearly.
        expect=(
            Expect("|dL/dS| divided by sqrt(d_k) over the largest, d_k=64 n=10", 1.0, FIFTH),
            *(
                Expect(
                    f"|dL/dS| divided by sqrt(d_k) over the largest, d_k=64 n={n}",
                    1.0,
                    FIFTH,
                    law=GRADIENT[n],
                    law_margin=0.05,
                )
                for n in (64, 1024)
            ),
        ),
        holds="It passes at least four fifths of the largest gradient to the scores.",
        law="At the notes' n = 10 it does; with more keys it does not. What reaches the scores is "
        "{|dL/dS| divided by sqrt(d_k) over the largest, d_k=64 n=10:.2f}, {|dL/dS| divided by "
        "sqrt(d_k) over the largest, d_k=64 n=64:.2f} and {|dL/dS| divided by sqrt(d_k) over the "
        "largest, d_k=64 n=1024:.2f} of the largest |dL/dS| that another divisor gives, at 10, 64 "
        "and 1024 keys: the best standard deviation of scores grows with the number of keys.",
        trained=trained.GRADIENT_KEPT,
        experiment=gradient_kept,
        slow=True,
    ),
    Claim(
        id="dk-variance",
        claim="Dividing by d_k makes the variance of the scores 1/d_k.",
        claim_zh="除以 d_k 时，方差缩小为 1/d_k。",
        expect=tuple(
            Expect(f"variance times d_k, divided by d_k, d_k={d}", 1.0, 0.05) for d in (64, 512)
        ),
        holds="It does: times d_k it is {variance times d_k, divided by d_k, d_k=64} at d_k = 64 "
        "and {variance times d_k, divided by d_k, d_k=512} at 512, before any training.",
        law="Times d_k it is {variance times d_k, divided by d_k, d_k=64} at d_k = 64.",
        experiment=by_width,
    ),
    Claim(
        id="dk-even",
        claim="Dividing by d_k makes the weights nearly equal.",
        claim_zh="除以 d_k 会使注意力权重过于平均，趋于均匀分布。",
        expect=tuple(
            Expect(f"entropy over ln n, d_k={d} n={n}", 1.0, 0.02)
            for d, n in ((64, 10), (64, 64), (512, 64))
        ),
        holds="It does at the start: the entropy is {entropy over ln n, d_k=64 n=64:.4f} of that "
        "of equal weights at d_k = 64, and the largest of 64 weights {largest weight over 1/n, "
        "d_k=64 n=64:.2f} times 1/64. Whether a model that is trained suffers from it is another "
        "question.",
        law="The entropy is {entropy over ln n, d_k=64 n=64:.4f} of that of equal weights.",
        experiment=evenness,
    ),
    Claim(
        id="two-sqrt-variance",
        claim="Dividing by 2 sqrt(d_k) makes the variance of the scores 1/4.",
        claim_zh="除以 2 sqrt(d_k) 时，方差缩小为 1/4。",
        expect=tuple(
            Expect(f"variance divided by 2 sqrt(d_k), d_k={d}", 0.25, 0.0125) for d in (64, 512)
        ),
        holds="It does: {variance divided by 2 sqrt(d_k), d_k=64} at d_k = 64 and {variance "
        "divided by 2 sqrt(d_k), d_k=512} at 512.",
        law="It is {variance divided by 2 sqrt(d_k), d_k=64} at d_k = 64.",
        experiment=by_twice_the_root,
    ),
    Claim(
        id="log-saturates",
        claim="log(d_k) divides too little: the weights are still saturated.",
        claim_zh="用 log(d_k) 缩放不足，仍然存在饱和问题。",
        expect=(
            Expect("largest weight divided by ln d_k, d_k=64 n=10", HALF, (0, None)),
            Expect(
                "largest weight divided by ln d_k, d_k=64 n=64",
                HALF,
                (0, None),
                law=LARGEST_LOG,
                law_margin=0.03,
            ),
            Expect("largest weight divided by ln d_k, d_k=512 n=64", HALF, (0, None)),
        ),
        holds="One weight exceeds all others together.",
        law="It depends on d_k and on the number of keys. The standard deviation is sqrt(d_k)/ln "
        "d_k, 1.9 at d_k = 64 and 3.6 at 512. At 64 the largest weight is {largest weight divided "
        "by ln d_k, d_k=64 n=10} of 10 keys, but {largest weight divided by ln d_k, d_k=64 n=64} "
        "of 64, where nothing is saturated; at 512 it is {largest weight divided by ln d_k, "
        "d_k=512 n=64} of 64. The base matters as well: log2(16) is sqrt(16).",
        experiment=by_the_logarithm,
    ),
)
