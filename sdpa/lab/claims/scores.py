"""Rows on numbers that the notes print: softmax and exp of given arguments."""

import numpy as np

import sdpa

from ..estimate import Estimate, exact
from .record import Claim, Expect


def softmax_raw(seed: int, times: float) -> dict[str, Estimate]:
    """The weights of [-24, -10, 0, 10, 24]; nothing is random."""
    weights = sdpa.softmax(np.array([-24.0, -10, 0, 10, 24]))
    return {f"weight {j + 1}": exact(weight) for j, weight in enumerate(weights)}


CLAIMS = (
    Claim(
        id="softmax-raw",
        notes=("002",),
        claim="softmax([-24, -10, 0, 10, 24]) is [0, 0, 0, 0, 1]: all weight on the largest score.",
        claim_zh="对 [-24, -10, 0, 10, 24] 做 softmax 得到 [0, 0, 0, 0, 1]，"
        "权重全部落在最大的分数上。",
        # The note prints no decimals: half a unit of the first one that could be printed.
        expect=tuple(Expect(f"weight {j}", float(j == 5), 0.05) for j in range(1, 6)),
        holds="To the note's precision it is; the largest weight is 1 - {weight 4:.2g}.",
        law="The weights are {weight 1}, {weight 2}, {weight 3}, {weight 4} and {weight 5}.",
        experiment=softmax_raw,
    ),
)
