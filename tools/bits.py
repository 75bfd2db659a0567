"""Digests of the results of many calls, a line for each instruction set of this machine.

They must not depend on Python, NumPy, the compiler or its flags: `make test-pythons` compares them.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

import sdpa
from sdpa import _core

SHAPES = [(5, 9, 32), (37, 50, 24), (300, 410, 64), (1, 900, 64), (200, 200, 128)]  # Lq, Lk, d
OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": "upper_left"},
    {"softcap": 5.0},
    {"window": (20, 3)},
    {"alibi_slopes": np.full(2, 0.1, np.float32)},
    {"sinks": np.ones(2, np.float32)},
    {"dropout_p": 0.3, "rng": 1},
]


def attention(dtype: type[np.floating], shape: tuple[int, int, int]) -> Iterator[Any]:
    """Results of the functions of attention, with each option."""
    n_q, n_k, d = shape
    rng = np.random.default_rng(n_q)
    q, k, v, g = (rng.standard_normal((2, n, d)).astype(dtype) for n in (n_q, n_k, n_k, n_q))
    for options in OPTIONS:
        out, lse = sdpa.attention_forward(q, k, v, **options)
        yield from (out, lse)
        yield from sdpa.attention_backward(g, q, k, v, out, lse, **options)
        yield from sdpa.attention_jvp(q, k, v, q, k, v, **options)
        yield sdpa.attention_weights(q, k, **options)
        if "dropout_p" not in options:
            yield from sdpa.attention_statistics(q, k, **options)


def softmax(dtype: type[np.floating], n: int) -> Iterator[Any]:
    """Results of the softmax family along rows and columns."""
    x = np.random.default_rng(n).standard_normal((37, n)).astype(dtype)
    for axis in (0, 1):
        yield sdpa.softmax(x, axis)
        yield sdpa.log_softmax(x, axis)
        yield sdpa.logsumexp(x, axis)
        yield sdpa.softmax_backward(x, x, axis)
        yield sdpa.log_softmax_backward(x, -abs(x), axis)


def digest() -> str:
    """The digest of all results for the instruction set in use."""
    found = hashlib.sha256()
    for dtype in (np.float32, np.float64, np.float16):
        for shape in SHAPES:
            for result in attention(dtype, shape):
                if result is not None:
                    found.update(np.ascontiguousarray(result).tobytes())
        for n in (3, 50, 700, 3000):
            for result in softmax(dtype, n):
                found.update(np.ascontiguousarray(result).tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    for name, available in _core._isas().items():
        if available:
            _core._use_isa(name)
            print(name, digest())
