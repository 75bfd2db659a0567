"""Rows on numbers that the notes print, on overflow and on saturation of single rows."""

from math import exp, log

import numpy as np

import sdpa

from ..experiments.overflow import LARGEST, overflow
from ..tools.estimate import Draws, Estimate, exact
from ..tools.inputs import stream
from .record import Claim, Expect, Measured, draws

RAW = np.array([-24.0, -10, 0, 10, 24])
SCALED = np.array([-3.0, -1, 0, 1, 3])
PRINTED = (0.012, 0.089, 0.243, 0.661, 0.995)
EXPONENTIALS = (
    *((24, "2.6e10"), (-24, "3.8e-11"), (3, "20.1"), (-3, "0.05")),
    *((20, "4.85e8"), (-15, "3.06e-7"), (50, "5.18e21")),
)


def softmax_raw(seed: int, times: float) -> Measured:
    """The weights of [-24, -10, 0, 10, 24]; nothing is random."""
    return _weights(RAW)


def softmax_scaled(seed: int, times: float) -> Measured:
    """The weights of [-3, -1, 0, 1, 3] and their p (1 - p); nothing is random."""
    weights, printed = sdpa.softmax(SCALED), np.array(PRINTED)
    return _weights(SCALED) | {
        "smallest p(1-p)": exact((weights * (1 - weights)).min()),
        "smallest p(1-p) of the printed weights": exact((printed * (1 - printed)).min()),
        "sum of the weights": exact(weights.sum()),
    }


def _weights(scores: np.ndarray) -> dict[str, Estimate]:
    return {f"weight {j + 1}": exact(weight) for j, weight in enumerate(sdpa.softmax(scores))}


def exponentials(seed: int, times: float) -> Measured:
    """e^x over the printed value, as a ratio of two weights; nothing is random."""
    measured = {}
    for x, printed in EXPONENTIALS:
        weights = sdpa.softmax(np.array([float(x), 0.0]))
        measured[f"e^{x} over the printed value"] = exact(weights[0] / weights[1] / float(printed))
    return measured


def e_to_the_50(seed: int, times: float) -> Measured:
    """In how many of four dtypes e^50 overflows, and where each ends; nothing is random."""
    measured = {f"x at which e^x leaves {t}": exact(log(top)) for t, top in LARGEST.items()}
    beyond = sum(exp(50) > largest for largest in LARGEST.values())
    return measured | {"dtypes in which e^50 overflows": exact(beyond)}


def saturated(seed: int, times: float) -> Measured:
    """Weights and Jacobian of [50, 1, 1, 1], in float64 and float32; nothing is random."""
    measured: dict[str, Estimate] = {}
    for dtype in ("float64", "float32"):
        weights = sdpa.softmax(np.array([50, 1, 1, 1], dtype))
        jacobian = sdpa.softmax_jacobian(weights)
        if dtype == "float64":
            measured |= {f"weight {j + 1}": exact(w) for j, w in enumerate(weights)}
        measured[f"largest element of the Jacobian, {dtype}"] = exact(abs(jacobian).max())
    return measured


def shift(seed: int, times: float) -> Measured:
    """Softmax with the maximum subtracted against exp over its sum, where neither overflows."""
    rng = stream(seed, "shift")
    count = draws(200, times)
    measured: dict[str, Draws | Estimate] = {}
    for n in (8, 64, 1024):
        z = 8 * rng.standard_normal((count, n))
        plain = np.exp(z)
        plain /= plain.sum(axis=1, keepdims=True)
        error = exact(abs(sdpa.softmax(z) / plain - 1).max())
        measured[f"largest relative difference, float64, n={n}"] = error
    z = (50 * rng.standard_normal((count, 64))).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        plain = np.exp(z)
        plain /= plain.sum(axis=1, keepdims=True)
    for name, weights in (("plain", plain), ("shifted", sdpa.softmax(z))):
        bad = (~np.isfinite(weights)).any(axis=1).astype(float)
        measured[f"rows not finite, {name}, std 50, float32"] = Draws(bad, "share")
    return measured


def overflow_64(seed: int, times: float) -> Measured:
    """Unscaled scores at d_k = 64 against the range of each dtype."""
    table = overflow((64,), (16,), seed=seed, draws=draws(8000, times))
    measured: dict[str, Draws] = {}
    for row in table.rows:
        for column, name in (
            ("score", "share of scores beyond {}"),
            ("row", "share of rows with e^s beyond {}"),
            ("shifted", "share of weights not finite with the shift, {}"),
        ):
            cell = row[column]
            assert isinstance(cell, Draws)
            measured[name.format(row["dtype"])] = cell
    return measured


_exact = sdpa.softmax(SCALED)

CLAIMS = (
    Claim(
        id="softmax-raw",
        claim="softmax([-24, -10, 0, 10, 24]) is [0, 0, 0, 0, 1]: all weight on the largest score.",
        claim_zh="对 [-24, -10, 0, 10, 24] 做 softmax 得到 [0, 0, 0, 0, 1]，权重全部落在最大的"
        "分数"
        "上。",
        # The note prints no decimals; the first that its other vectors print is the third.
        expect=tuple(Expect(f"weight {j}", float(j == 5), 0.0005) for j in range(1, 6)),
        holds="It is, to the precision printed: the largest weight falls short of 1 by {weight "
        "4:.1e}.",
        law="The weights are {weight 1}, {weight 2}, {weight 3}, {weight 4} and {weight 5}.",
        experiment=softmax_raw,
    ),
    Claim(
        id="softmax-scaled",
        claim="softmax([-3, -1, 0, 1, 3]) is [0.012, 0.089, 0.243, 0.661, 0.995].",
        claim_zh="对 [-3, -1, 0, 1, 3] 做 softmax 得到 [0.012, 0.089, 0.243, 0.661, 0.995]。",
        expect=tuple(
            Expect(f"weight {j + 1}", printed, 0.0005, law=float(_exact[j]))
            for j, printed in enumerate(PRINTED)
        ),
        holds="The weights are those.",
        law="The printed numbers sum to 2.0 and so cannot be weights; the right ones are {weight "
        "1:.3f}, {weight 2:.3f}, {weight 3:.3f}, {weight 4:.3f}, {weight 5:.3f}.",
        experiment=softmax_scaled,
    ),
    Claim(
        id="scaled-derivative",
        claim="For the scores [-3, -1, 0, 1, 3] the derivative p (1 - p) exceeds 0.01 at every "
        "weight.",
        claim_zh="分数为 [-3, -1, 0, 1, 3] 时，每个权重的导数 p(1-p) 都大于 0.01。",
        expect=(
            Expect(
                "smallest p(1-p)",
                0.01,
                (0, None),
                law=float((_exact * (1 - _exact)).min()),
                law_margin=0.0005,
            ),
        ),
        holds="p (1 - p) exceeds 0.01.",
        law="It falls to {smallest p(1-p):.4f}, five times below the bound; even of the weights "
        "that the note prints the largest has only {smallest p(1-p) of the printed weights:.4f}.",
        experiment=softmax_scaled,
    ),
    Claim(
        id="exp-digits",
        claim="e^24 = 2.6e10, e^-24 = 3.8e-11, e^3 = 20.1, e^-3 = 0.05, e^20 = 4.85e8, e^-15 = "
        "3.06e-7, and e^50 = 5.18e21.",
        claim_zh="笔记给出的指数值：e^24 = 2.6e10，e^-24 = 3.8e-11，e^3 = 20.1，e^-3 = 0.05，"
        "e^20 = 4.85e8，e^-15 = "
        "3.06e-7，e^50 = 5.18e21。",
        # The rounding of the two or three digits that are printed; 2.6 stands for 2.649.
        expect=tuple(
            Expect(
                f"e^{x} over the printed value",
                1.0,
                0.025 if printed in ("2.6e10", "3.8e-11") else 0.005,
            )
            for x, printed in EXPONENTIALS
        ),
        holds="All seven are right to the digits printed.",
        law="Some differ in the digits printed.",
        experiment=exponentials,
    ),
    Claim(
        id="exp-50",
        claim="e^50 may exceed the range of floating-point numbers.",
        claim_zh="e^50 可能超出浮点数的表示范围。",
        # May: in one dtype at least.
        expect=(Expect("dtypes in which e^50 overflows", 1.0, (0, None)),),
        holds="In one of four dtypes, float16, which ends at e^{x at which e^x leaves "
        "float16:.2f}. bfloat16 and float32 reach e^{x at which e^x leaves float32:.1f} and "
        "float64 e^{x at which e^x leaves float64:.1f}.",
        law="It is inside the range of every dtype.",
        experiment=e_to_the_50,
    ),
    Claim(
        id="saturated",
        claim="For z = [50, 1, 1, 1] the weights are [1, 0, 0, 0] and the whole Jacobian is 0.",
        claim_zh="当 z = [50, 1, 1, 1] 时，权重为 [1, 0, 0, 0]，整个雅可比矩阵为 0。",
        expect=(
            *(Expect(f"weight {j}", float(j == 1), 0.0005) for j in range(1, 5)),
            Expect("largest element of the Jacobian, float64", 0.0, 0.0005),
            Expect("largest element of the Jacobian, float32", 0.0, 0.0005),
        ),
        holds="True to any digit one would print: the other weights are {weight 2:.1e}. The "
        "largest element of the Jacobian is 3 e^-49 = 1.6e-21 in exact arithmetic; in float64 p_1 "
        "rounds to 1 and leaves {largest element of the Jacobian, float64:.1e}.",
        law="The largest element of the Jacobian is {largest element of the Jacobian, float64}.",
        experiment=saturated,
    ),
    Claim(
        id="shift",
        claim="Subtracting the maximum of a row changes nothing mathematically and removes "
        "overflow.",
        claim_zh="减去每行的最大值在数学上不改变结果，并且消除溢出。",
        expect=(
            *(
                Expect(f"largest relative difference, float64, n={n}", 0.0, 1e-12)
                for n in (8, 64, 1024)
            ),
            Expect("rows not finite, shifted, std 50, float32", 0.0, (None, 0.1)),
            Expect("rows not finite, plain, std 50, float32", 1.0, (0.5, None)),
        ),
        holds="Both hold: differences are those of rounding, {largest relative difference, "
        "float64, n=64:.0e} of a weight, and of rows with scores of standard deviation 50 in "
        "float32 {rows not finite, plain, std 50, float32:.0%} overflow without the shift, none "
        "with it.",
        law="Differences are those of rounding; with the shift no row overflows.",
        experiment=shift,
    ),
    Claim(
        id="overflow-64",
        claim="At d_k = 64, where scores have standard deviation 8, the numbers that go into "
        "softmax may leave the range of floating-point numbers.",
        claim_zh="d_k = 64 时分数的标准差为 8，softmax 的输入可能超出浮点数的表示范围。",
        # May: one score in a hundred.
        expect=tuple(
            Expect(f"share of scores beyond {dtype}", 0.01, (0, None), law=0.0, law_margin=0.005)
            for dtype in LARGEST
        ),
        holds="One score in a hundred leaves the range.",
        law="Scores never leave the range of any dtype. Their exponentials do if the maximum is "
        "not subtracted, but only in float16 (beyond 11.09, in {share of rows with e^s beyond "
        "float16:.0%} of rows of 16 scores); float32 and bfloat16 would need a score of 88.7, "
        "which is eleven sigma, and float64 one of 709.8. With the maximum subtracted, as in "
        "every library, nothing overflows: saturation, not overflow, is what the scale prevents.",
        experiment=overflow_64,
    ),
)
