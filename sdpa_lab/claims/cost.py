"""Rows on time and memory, measured then and there: their figures differ from run to run."""

import mmap
import time

import numpy as np

import sdpa

from ..experiments.memory import peaks
from ..experiments.speed import numpy_weights
from ..tools.clock import Call, sample
from ..tools.estimate import Draws
from ..tools.inputs import stream
from .record import Claim, Expect, Measured, draws

SIZES = (1024, 2048, 4096)
"""Lengths at which memory is measured."""


def scale_cost(seed: int, times: float) -> Measured:
    """Time with the scale over time without, alternately, of several pairs of times.

    In the kernel; and in NumPy the pass over the scores that multiplies them, over the product that
    makes them.
    """
    rng = stream(seed, "scale-cost")
    measured: dict[str, Draws] = {}
    for n, d_k, loops in ((10, 64, 100), (256, 64, 5), (1024, 64, 1), (1024, 16, 1)):
        query, key, value = rng.standard_normal((3, n, d_k), np.float32)

        def attend(scale: float | None, query=query, key=key, value=value) -> None:  # type: ignore[no-untyped-def]
            sdpa.attention(query, key, value, scale=scale, workers=1)

        ratio = _turns(lambda: attend(None), lambda: attend(1.0), loops, draws(30, times))
        measured[f"time with the scale over without, n={n} d_k={d_k}"] = Draws(ratio, "median")
    query, key = rng.standard_normal((2, 1024, 64), np.float32)
    scores = query @ key.T
    scaled, factor = np.empty_like(scores), np.float32(0.125)
    passes = _turns(
        lambda: np.multiply(scores, factor, out=scaled),
        lambda: np.matmul(query, key.T),
        2,
        draws(25, times),
    )
    measured["time of a separate pass in NumPy over the product, n=1024 d_k=64"] = Draws(
        passes, "median"
    )
    query, key = rng.standard_normal((2, 1024, 64), np.float32)
    whole = _turns(
        lambda: np.multiply(scores, factor, out=scaled),
        lambda: numpy_weights(query, key),
        1,
        draws(25, times),
    )
    measured["time of a separate pass in NumPy over all of softmax, n=1024 d_k=64"] = Draws(
        whole, "median"
    )
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
        notes=("000",),
        claim="The division costs almost nothing beside the matrix product.",
        claim_zh="与矩阵乘法相比，这个除法几乎没有额外开销。",
        # Within a tenth is what nobody would notice.
        expect=tuple(
            Expect(f"time with the scale over without, n={n} d_k={d}", 1.0, (None, 0.1))
            for n, d in ((10, 64), (256, 64), (1024, 64), (1024, 16))
        ),
        holds="In a kernel that multiplies where it takes the exponential, time with the scale "
        "over time without is {time with the scale over without, n=10 d_k=64}, {time with the "
        "scale over without, n=256 d_k=64} and {time with the scale over without, n=1024 d_k=64} "
        "at 10, 256 and 1024 keys. As a pass of its own over the scores, as the notes' programs "
        "write it, it takes {time of a separate pass in NumPy over the product, n=1024 "
        "d_k=64:.0%} of the CPU time of the product: counted in operations it would be 0.8 %, but "
        "a pass is bound by memory.",
        law="It costs a share of {time with the scale over without, n=1024 d_k=64}.",
        experiment=scale_cost,
        slow=True,
        timed=True,
    ),
    Claim(
        id="memory",
        notes=("004",),
        claim="Attention needs memory of the order of n^2 + n d.",
        claim_zh="注意力的空间复杂度为 O(n^2 + n d)。",
        expect=(
            Expect("exponent in n of the formula's memory", 2.0, 0.1),
            Expect(
                "extra memory over 4 n^2 bytes, sdpa, n=4096",
                1.0,
                (0.1, None),
                law=0.0,
                law_margin=0.1,
            ),
        ),
        holds="It does.",
        law="The formula does, if the matrix is kept ({extra memory over 4 n^2 bytes, formula, "
        "n=4096} matrices of 4 n^2 bytes at n = 4096); exact attention does not need it: in tiles "
        "with a running maximum and sum, the extra memory, output included, is {extra memory over "
        "4 n^2 bytes, sdpa, n=4096} of such a matrix, O(n d) for the output and a block per "
        "thread.",
        experiment=memory,
        slow=True,
        timed=True,
    ),
)
