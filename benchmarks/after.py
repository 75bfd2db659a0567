"""Calls right after a product of matrices on all threads, whose workers still spin for a while."""

import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

import sdpa
from benchmarks.contenders import (
    Array,
    Contender,
    Contenders,
    Setting,
    Work,
    check,
    operands,
    ours,
    title,
)
from benchmarks.peers import numpy_weights
from sdpa_lab.tools.clock import Call

SHAPE = (8, 1024, 64)
MATRIX = 1024
SPIN = 0.1
"""Seconds after which no worker of NumPy's OpenBLAS spins any more: by default it does so for 2^26
cycles."""
MOST = 1.25
"""What a call may take there of its time alone."""


def after(setting: Setting) -> Iterator[Work]:
    """Forward and backward, alone and after a product; a block of a model, which alternates."""
    if setting.threads == 1:
        return
    heads, n, d = SHAPE
    n = setting.length(n)
    for direction in ("forward", "backward"):
        yield Work("after", direction, partial(_disturbed, (heads, n, d), direction))
    yield Work("after", f"block, {title(*SHAPE)}", lambda: _block(setting, heads, n, d))


def _disturbed(shape: tuple[int, int, int], direction: str) -> Contenders:
    mine = ours(operands(*shape))[direction]
    a = np.random.default_rng(0).standard_normal((MATRIX, MATRIX), np.float32)
    return {
        "alone": mine._replace(before=lambda: time.sleep(SPIN)),
        "after a matmul": mine._replace(before=lambda: a @ a),
    }


def _block(setting: Setting, heads: int, n: int, d: int) -> Contenders:
    """Projections of n tokens, attention, projection: NumPy's products around each attention."""
    rng = np.random.default_rng(0)
    width = heads * d
    x = rng.standard_normal((n, width), np.float32)
    w = rng.standard_normal((4, width, width), np.float32) / np.float32(width**0.5)

    def around(attention: Callable[..., Array]) -> Call:
        def call() -> Array:
            q, k, v = ((x @ part).reshape(n, heads, d).swapaxes(0, 1) for part in w[:3])
            return attention(q, k, v).swapaxes(0, 1).reshape(n, width) @ w[3]

        return call

    calls: dict[str, Call] = {
        "sdpa": around(sdpa.attention),
        "numpy": around(lambda query, key, value: numpy_weights(query, key) @ value),
    }
    peer = setting.torch()
    if peer is not None:
        calls[peer.name] = peer.block(x, w, heads)
    expected = calls["sdpa"]()
    for name, call in calls.items():
        check(name, np.asarray(call()), np.asarray(expected))
    count = 8.0 * n * width**2 + 4.0 * heads * n * n * d
    return {name: Contender(call, count) for name, call in calls.items()}
