"""Rows on the time of additive attention, measured then and there: figures differ between runs."""

import tracemalloc

import numpy as np

from ..experiments.cost import cost, cost_exponents, cost_ratio, drawn, numpy_additive
from ..tools.estimate import Draws, Estimate, exact
from .record import Claim, Expect, Measured, draws

WIDTHS = (16, 32, 64, 128)
"""At which time and memory are fitted over d."""


def additive_cost(seed: int, times: float) -> Measured:
    """Exponents in n and d of the time, and of the memory of the formula, of several turns."""
    turns = draws(20, times)
    tables = (
        cost(lengths=(256, 512, 1024), widths=WIDTHS, n=512, turns=turns, seed=seed),
        cost(
            ["additive, each pair"],
            lengths=(48, 96),
            widths=(64, 128, 256),
            n=96,
            turns=turns,
            seed=seed,
        ),
    )
    measured: dict[str, Draws | Estimate] = {}
    for table in tables:
        for row in cost_exponents(table).rows:
            measured[f"{row['kind']}, exponent in {row['axis']}"] = drawn(row["exponent"])
    bytes_ = [_bytes_of_the_formula(256, d) for d in WIDTHS]
    slope = np.polyfit(np.log(WIDTHS), np.log(bytes_), 1)[0]
    return measured | {"additive in NumPy, exponent in d of the memory": exact(slope)}


def _bytes_of_the_formula(n: int, d: int) -> int:
    """That NumPy allocates at once during a call."""
    query = np.zeros((n, d), np.float32)
    weight = np.zeros((d, d), np.float32)
    tracemalloc.start()
    numpy_additive(query, query, query, weight, weight, weight[0])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def additive_speed(seed: int, times: float) -> Measured:
    """Time of additive attention over that of the dot product, of several turns."""
    measured: dict[str, Draws | Estimate] = {}
    for pair, lengths in ((("additive", "dot"), (256, 1024)), (IN_NUMPY, (256,))):
        table = cost(pair, lengths, widths=(), turns=draws(20, times), seed=seed)
        for row in cost_ratio(table, *pair).rows:
            measured[f"time of {pair[0]} over {pair[1]}, n={row['n']} d=64"] = drawn(row["ratio"])
    return measured


IN_NUMPY = ("additive, NumPy", "dot, NumPy")

CLAIMS = (
    Claim(
        id="additive-cost",
        notes=("004",),
        claim="Additive attention takes time of the order of n^2 d^2, the dot product n^2 d; both "
        "take memory of the order of n^2 + n d.",
        claim_zh="加性注意力的时间复杂度为 O(n^2 d^2)，点积注意力为 O(n^2 d)；两者的空间复杂度均为 "
        "O(n^2 + n d)。",
        # At these sizes softmax and projections count beside the leading term.
        expect=(
            Expect("additive, exponent in d", 2.0, 0.3, law=1.0),
            Expect("additive, exponent in n", 2.0, 0.3),
            Expect("dot, exponent in d", 1.0, 0.3),
            Expect("dot, exponent in n", 2.0, 0.3),
            Expect("additive in NumPy, exponent in d of the memory", 0.0, 0.3, law=1.0),
        ),
        holds="It does: the exponent in d is {additive, exponent in d}.",
        law="Each token is projected once, n d^2, and each pair takes d tanh: time n^2 d + n d^2, "
        "the order of the dot product where n > d; measured n^{additive, exponent in n:.2f} "
        "d^{additive, exponent in d:.2f} against n^{dot, exponent in n:.2f} d^{dot, exponent in "
        "d:.2f}. The note counts both projections for every pair, and a program that does so has "
        "d^{additive, each pair, exponent in d:.2f}. As the formula is written the sums of all "
        "pairs are held, n^2 d numbers; in tiles neither kind needs a matrix.",
        experiment=additive_cost,
        slow=True,
        timed=True,
    ),
    Claim(
        id="additive-speed",
        notes=("004",),
        claim="The dot product is orders of magnitude faster than additive attention.",
        claim_zh="点积注意力比加性注意力快几个数量级。",
        # One order of magnitude is the least that could be meant.
        expect=tuple(
            Expect(f"time of additive over dot, n={n} d=64", 10.0, (0, None)) for n in (256, 1024)
        ),
        holds="It is, by a factor of {time of additive over dot, n=1024 d=64}.",
        law="Not where both are implemented well: {time of additive over dot, n=1024 d=64:.1f} "
        "times at n = 1024. tanh(a + b) follows from exponentials of a and of b, which are taken "
        "once per token, with three operations and half a division for each pair. As NumPy users "
        "write it, with a tanh per pair and channel, it is {time of additive, NumPy over dot, "
        "NumPy, n=256 d=64:.0f} times.",
        experiment=additive_speed,
        slow=True,
        timed=True,
    ),
)
