"""Rows on additive attention beside the dot product; those that time differ from run to run."""

import tracemalloc
from math import log2

import numpy as np

from ..experiments.cost import cost, cost_exponents, cost_ratio, drawn, numpy_additive
from ..tools.estimate import Draws, Estimate, exact
from ..tools.inputs import stream
from .cited import publications
from .record import Claim, Expect, Measured, draws

WIDTHS = (16, 32, 64, 128)
"""At which time and memory are fitted over d."""


def additive_cost(seed: int, times: float) -> Measured:
    """Exponents in n and d of the time, of several turns."""
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
    return measured


def additive_memory(seed: int, times: float) -> Measured:
    """Exponent in d of what NumPy allocates for the formula at n = 256; nothing is random."""
    bytes_ = [_bytes_of_the_formula(256, d) for d in WIDTHS]
    slope = np.polyfit(np.log(WIDTHS), np.log(bytes_), 1)[0]
    return {"additive in NumPy, exponent in d of the memory": exact(slope)}


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
    """Time of additive attention over that of the dot product, of several turns.

    In eager code and of the package's two kernels, beside what was measured once on a GPU.
    """
    cited = publications()["additive-speed"]
    measured: dict[str, Draws | Estimate] = {
        row["figure"]: exact(row["ratio"]) for row in cited["rows"]
    }
    for where, pair, lengths in (
        ("eager code", ("additive, eager", "dot, eager"), (64, 256)),
        ("kernels", ("additive", "dot"), (256, 1024)),
    ):
        table = cost(pair, lengths, widths=(), turns=draws(20, times), seed=seed)
        for row in cost_ratio(table, *pair).rows:
            name = f"time of additive over dot, {where}, n={row['n']} d=64"
            measured[name] = drawn(row["ratio"])
    return measured


def parallelism(seed: int, times: float) -> Measured:
    """Work over span of the scores of one pair at several widths: exact counts of operations.

    Both kinds sum d products in a tree, of d - 1 additions and depth log2(d). Before it the dot
    product has d products, additive attention d additions, d tanh and d products.
    """
    measured: dict[str, Draws | Estimate] = {}
    for d in WIDTHS:
        dot = (2 * d - 1) / (1 + log2(d))
        additive = (4 * d - 1) / (3 + log2(d))
        measured[f"operations at a time, dot, d={d}"] = exact(dot)
        measured[f"operations at a time, additive, d={d}"] = exact(additive)
        measured[f"operations at a time, additive over dot, d={d}"] = exact(additive / dot)
    x = stream(seed, "tanh").standard_normal((draws(64, times), 64, 64)).astype(np.float32)
    parts = np.stack([np.tanh(part) for part in x[::-1]])[::-1]
    changed = float(abs(parts - np.tanh(x)).max())
    return measured | {"largest change if parts are computed apart": exact(changed)}


def tanh_range(seed: int, times: float) -> Measured:
    """tanh on a grid from -50 to 50; nothing is random."""
    x = np.linspace(-50, 50, 100_001)
    return {
        "largest |tanh|": exact(abs(np.tanh(x)).max()),
        "tanh(3)": exact(np.tanh(3.0)),
        "derivative of tanh at 3": exact(1 - np.tanh(3.0) ** 2),
    }


CLAIMS = (
    Claim(
        id="additive-time",
        claim="Additive attention takes time of the order of n^2 d^2: each pair is projected.",
        claim_zh="加性注意力的时间复杂度为 O(n^2 d^2)：每个词对都要做投影。",
        # At these sizes softmax and projections count beside the leading term.
        expect=(
            Expect("additive, exponent in d", 2.0, 0.3, law=1.0),
            Expect("additive, exponent in n", 2.0, 0.3),
        ),
        holds="It does: the exponent in d is {additive, exponent in d}.",
        law="Each token is projected once, n d^2, and each pair takes d tanh: time n^2 d + n d^2, "
        "the order of the dot product where n > d. Measured: n^{additive, exponent in n:.2f} "
        "d^{additive, exponent in d:.2f}. A program that projects every pair anew, as the note "
        "counts, scales as d^{additive, each pair, exponent in d:.2f}.",
        experiment=additive_cost,
        slow=True,
        timed=True,
    ),
    Claim(
        id="dot-time",
        claim="The dot product takes time of the order of n^2 d.",
        claim_zh="点积注意力的时间复杂度为 O(n^2 d)。",
        expect=(
            Expect("dot, exponent in d", 1.0, 0.3),
            Expect("dot, exponent in n", 2.0, 0.3),
        ),
        holds="It does: n^{dot, exponent in n:.2f} d^{dot, exponent in d:.2f}.",
        law="It takes n^{dot, exponent in n:.2f} d^{dot, exponent in d:.2f}.",
        experiment=additive_cost,
        slow=True,
        timed=True,
    ),
    Claim(
        id="additive-memory",
        claim="Additive attention computed step by step takes memory of the order of n^2 + n d.",
        claim_zh="逐步计算的加性注意力，空间复杂度为 O(n^2 + n d)。",
        expect=(Expect("additive in NumPy, exponent in d of the memory", 0.0, 0.3, law=1.0),),
        holds="It does: at n = 256 its memory does not depend on d.",
        law="As the formula is written the sums of all pairs are held, n^2 d numbers: at n = 256 "
        "the memory grows with exponent {additive in NumPy, exponent in d of the memory:.2f} in d. "
        "In tiles no such array is needed.",
        experiment=additive_memory,
    ),
    Claim(
        id="additive-speed",
        claim="The dot product is orders of magnitude faster than additive attention, as programs "
        "in a framework are written.",
        claim_zh="按框架代码的写法，点积注意力比加性注意力快几个数量级。",
        # One order of magnitude is the least that could be meant.
        expect=tuple(
            Expect(f"time of additive over dot, eager code, n={n} d=64", 10.0, (0, None))
            for n in (64, 256)
        ),
        holds="It is: operation by operation on one thread additive attention takes {time of "
        "additive over dot, eager code, n=64 d=64} times as long at 64 keys and {time of additive "
        "over dot, eager code, n=256 d=64} at 256. On a GPU, which the note speaks of, the factor "
        "is smaller for one head and grows with n, d and the number of heads. Not measured in this "
        "run but on one NVIDIA H200 with PyTorch 2.11, 27 November 2026: {H200, one head, n=256 "
        "d=64:.1f} and {H200, one head, n=2048 d=64:.0f} times for one head of 256 and 2048 keys, "
        "{H200, 16 heads, n=2048 d=64:.0f} for 16 heads of 2048, and {H200, 16 heads over the "
        "fused kernel, n=2048 d=64:.0f} over its fused kernel, {H200, 16 heads over the fused "
        "kernel, bfloat16, n=2048 d=64:.0f} in bfloat16.",
        law="Operation by operation it takes {time of additive over dot, eager code, n=64 d=64} "
        "times as long at 64 keys and {time of additive over dot, eager code, n=256 d=64} at 256.",
        experiment=additive_speed,
        slow=True,
        timed=True,
    ),
    Claim(
        id="additive-kernels",
        claim="The dot product is orders of magnitude faster than additive attention, however well "
        "this is implemented.",
        claim_zh="无论加性注意力实现得多好，点积注意力都快几个数量级。",
        expect=tuple(
            Expect(
                f"time of additive over dot, kernels, n={n} d=64", 10.0, (0, None), 3.5, (2, 3.25)
            )
            for n in (256, 1024)
        ),
        holds="It is, by a factor of {time of additive over dot, kernels, n=1024 d=64}.",
        law="Not where both are implemented well: {time of additive over dot, kernels, n=1024 "
        "d=64:.1f} times at n = 1024 on one thread of a CPU. tanh(a + b) follows from exponentials "
        "of a and of b, which are taken once per token, with three operations and half a division "
        "for each pair, and no array of n^2 d numbers goes through memory.",
        experiment=additive_speed,
        slow=True,
        timed=True,
    ),
    Claim(
        id="dot-faster",
        claim="The dot product with its scale is faster than additive attention.",
        claim_zh="点积加缩放比加性注意力更快。",
        expect=(
            *(
                Expect(f"time of additive over dot, kernels, n={n} d=64", 1.0, (0, None))
                for n in (256, 1024)
            ),
            *(
                Expect(f"time of additive over dot, eager code, n={n} d=64", 1.0, (0, None))
                for n in (64, 256)
            ),
        ),
        holds="It is: {time of additive over dot, eager code, n=256 d=64} times at 256 keys in "
        "eager code and {time of additive over dot, kernels, n=256 d=64} times where both have a "
        "kernel of their own.",
        law="Not always: {time of additive over dot, kernels, n=1024 d=64} times.",
        experiment=additive_speed,
        slow=True,
        timed=True,
    ),
    Claim(
        id="tanh-parallel",
        claim="tanh is elementwise, and so the parallelism of additive attention is limited.",
        claim_zh="加性注意力的 tanh 是逐元素操作，并行度受限。",
        # Limited: half as many operations at a time as in the dot product, or fewer.
        expect=tuple(
            Expect(
                f"operations at a time, additive over dot, d={d}",
                0.5,
                (None, 0),
                law=1.5,
                law_margin=0.25,
            )
            for d in WIDTHS
        ),
        holds="It has fewer operations that could be done at a time.",
        law="The reverse: no tanh waits for another, so that elementwise work is the most parallel "
        "there is. Work over span, the operations that could be done at a time, is {operations at "
        "a time, additive, d=64:.0f} for each pair at d = 64, and {operations at a time, dot, "
        "d=64:.0f} for the dot product. What makes it slow is memory: n^2 d numbers are written "
        "and read where a matrix product keeps its sums in registers.",
        experiment=parallelism,
    ),
    Claim(
        id="tanh-range",
        claim="tanh saturates and lies in [-1, 1].",
        claim_zh="tanh 自带饱和特性，输出范围为 [-1, 1]。",
        expect=(
            Expect("largest |tanh|", 1.0, 1e-15),
            Expect("derivative of tanh at 3", 0.0, 0.01),
        ),
        holds="It does: at 3 its derivative is {derivative of tanh at 3:.3f}. The score of "
        "additive attention is a weighted sum of such numbers and has no bound of its own.",
        law="The largest |tanh| is {largest |tanh|}.",
        experiment=tanh_range,
    ),
)
