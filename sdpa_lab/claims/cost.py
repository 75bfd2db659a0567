"""Rows on time and memory, measured then and there: their figures differ from run to run."""

import mmap
import operator
import time
from functools import partial
from typing import Any

import numpy as np

import sdpa

from ..experiments.eager import framework, one_thread
from ..experiments.memory import peaks
from ..tools.clock import Call, sample
from ..tools.estimate import Draws
from ..tools.inputs import stream
from .record import Claim, Expect, Measured, draws

Array = np.ndarray[Any, np.dtype[np.float32]]

SIZES = (1024, 2048, 4096)
"""Lengths at which memory is measured."""


def scale_cost(seed: int, times: float) -> Measured:
    """Time with the scale over time without, alternately, of several pairs of times.

    Both have the same scores: without the scale the queries are divided before the clock runs. A
    kernel would else rescale more often where scores are larger.
    """
    rng = stream(seed, "scale-cost")
    measured: dict[str, Draws] = {}
    for n, d_k, loops in ((10, 64, 100), (256, 64, 5), (1024, 64, 1), (1024, 16, 1)):
        query, key, value = rng.standard_normal((3, n, d_k), np.float32)
        divided = query * np.float32(d_k**-0.5)

        def attend(
            query: Array, scale: float | None, key: Array = key, value: Array = value
        ) -> None:
            sdpa.attention(query, key, value, scale=scale, workers=1)

        ratio = _turns(
            partial(attend, query, None), partial(attend, divided, 1.0), loops, draws(30, times)
        )
        measured[f"time with the scale over without, n={n} d_k={d_k}"] = Draws(ratio, "median")
    return measured


def scale_pass(seed: int, times: float) -> Measured:
    """The division as a pass of its own over the scores, in eager code, of several pairs."""
    rng, code = stream(seed, "scale-pass"), framework()
    measured: dict[str, Draws] = {}
    for n, loops in ((100, 20), (256, 5), (1024, 1)):
        operands = rng.standard_normal((3, n, 64), np.float32)
        query, key, value = map(code.array, operands)
        divided, scores = code.array(operands[0] / np.float32(8)), query @ key.T

        def attend(query: Any, divisor: float | None, key: Any = key, value: Any = value) -> Any:
            s = query @ key.T
            return code.softmax(s if divisor is None else s / divisor) @ value

        pairs = {
            "time of eager attention with the division over without": (
                partial(attend, query, 8.0),
                partial(attend, divided, None),
            ),
            "time of the division over that of the product": (
                partial(operator.truediv, scores, 8.0),
                partial(operator.matmul, query, key.T),
            ),
        }
        for name, (one, other) in pairs.items():
            with one_thread():
                ratio = _turns(one, other, loops, draws(30, times))
            measured[f"{name}, n={n} d_k=64"] = Draws(ratio, "median")
    return measured


def _turns(one: Call, other: Call, loops: int, turns: int) -> np.ndarray:
    """CPU time of `one` over that of `other`, the shortest of three samples in each turn.

    CPU time, because other processes would lengthen long calls more than short ones. Who comes
    first alternates: the second finds the caches and the clock as the first left them. A draw is
    the geometric mean of two turns, one in each order.
    """

    def seconds(call: Call) -> float:
        return min(sample(call, loops, time.process_time) for _ in range(3))

    one(), other()
    ratios = np.empty((turns, 2))
    for ratio in ratios:
        ratio[0] = seconds(one) / seconds(other)
        first = seconds(other)
        ratio[1] = seconds(one) / first
    return np.asarray(np.sqrt(ratios.prod(axis=1)))


def memory(seed: int, times: float) -> Measured:
    """Peak memory of one call beyond its operands, of several calls in a process of their own.

    The system counts whole pages, so that a reading misses the size by up to one. An error drawn
    from that range is added to each: equal readings would else claim to be exact.
    """
    rng, page = stream(seed, "pages"), mmap.PAGESIZE
    found = {
        kind: sizes + rng.uniform(-page, page, len(sizes))
        for kind, sizes in peaks(SIZES, calls=draws(6, times), seed=seed).items()
    }
    measured: dict[str, Draws] = {}
    for (name, n), sizes in found.items():
        who = {"numpy": "formula"}.get(name, name)
        measured[f"extra memory over 4 n^2 bytes, {who}, n={n}"] = Draws(sizes / (4 * n**2))
    small, large = (found["numpy", n] for n in SIZES[1:])
    measured["exponent in n of the formula's memory"] = Draws(np.log2(large / small))
    return measured


CLAIMS = (
    Claim(
        id="scale-cost",
        claim="The division costs almost nothing.",
        claim_zh="这个除法几乎没有额外开销。",
        # Within a tenth is what nobody would notice.
        expect=tuple(
            Expect(f"time with the scale over without, n={n} d_k={d}", 1.0, (None, 0.1))
            for n, d in ((10, 64), (256, 64), (1024, 64), (1024, 16))
        ),
        holds="In a kernel that multiplies where it takes the exponential, time with the scale "
        "over time without is {time with the scale over without, n=10 d_k=64}, {time with the "
        "scale over without, n=256 d_k=64} and {time with the scale over without, n=1024 d_k=64} "
        "at 10, 256 and 1024 keys, for the same scores.",
        law="It costs a share of {time with the scale over without, n=1024 d_k=64}.",
        experiment=scale_cost,
        slow=True,
        timed=True,
    ),
    Claim(
        id="scale-pass",
        claim="As the notes' programs write it, a pass of its own over the scores, the division "
        "costs almost nothing beside the matrix products.",
        claim_zh="按笔记的代码逐步计算时（除法单独遍历一次分数矩阵），除法的开销也远小于矩阵乘法。",
        # The tenth of scale-cost; 100 is the length in the program of note 000.
        expect=tuple(
            Expect(
                f"time of eager attention with the division over without, n={n} d_k=64",
                1.0,
                (None, 0.1),
            )
            for n in (100, 1024)
        ),
        holds="Attention with the division takes {time of eager attention with the division over "
        "without, n=100 d_k=64} times as long as without it at 100 keys and {time of eager "
        "attention with the division over without, n=1024 d_k=64} at 1024. The pass takes {time of "
        "the division over that of the product, n=1024 d_k=64:.0%} of the time of the product Q "
        "K^T; counted in operations it would be 0.8 %, but a pass is bound by memory.",
        law="It can be noticed: attention with the division takes {time of eager attention with "
        "the division over without, n=100 d_k=64} times as long as without it at 100 keys, {time "
        "of eager attention with the division over without, n=256 d_k=64} at 256 and {time of "
        "eager attention with the division over without, n=1024 d_k=64} at 1024. The pass takes "
        "{time of the division over that of the product, n=1024 d_k=64:.0%} of the time of the "
        "product Q K^T at 1024; counted in operations it would be 0.8 %, but a pass is bound by "
        "memory and by the call itself.",
        experiment=scale_pass,
        slow=True,
        timed=True,
        more=2,
    ),
    Claim(
        id="memory",
        claim="Attention computed step by step, with the matrix of weights, takes memory of the "
        "order of n^2 + n d.",
        claim_zh="逐步计算的点积注意力，空间复杂度为 O(n^2 + n d)。",
        expect=(
            Expect("exponent in n of the formula's memory", 2.0, 0.1),
            Expect("extra memory over 4 n^2 bytes, formula, n=4096", 1.0, 0.25),
        ),
        holds="It does: {extra memory over 4 n^2 bytes, formula, n=4096} matrices of 4 n^2 bytes "
        "at n = 4096, with exponent {exponent in n of the formula's memory} in n.",
        law="Its memory grows with exponent {exponent in n of the formula's memory}.",
        experiment=memory,
        slow=True,
        timed=True,
    ),
    Claim(
        id="memory-needed",
        claim="Attention cannot do with less: it needs memory of the order of n^2.",
        claim_zh="注意力必须占用 O(n^2) 的空间。",
        expect=(
            Expect(
                "extra memory over 4 n^2 bytes, sdpa, n=4096",
                1.0,
                (0.1, None),
                law=0.0,
                law_margin=0.1,
            ),
        ),
        holds="It does.",
        law="Exact attention does not need the matrix: in tiles with a running maximum and sum, "
        "the extra memory, output included, is {extra memory over 4 n^2 bytes, sdpa, n=4096} of "
        "such a matrix at n = 4096, O(n d) for the output and a block per thread.",
        experiment=memory,
        slow=True,
        timed=True,
    ),
)
