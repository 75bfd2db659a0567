"""Works of threads: all of the process against one, where they should gain and where not lose."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import numpy as np

import sdpa
from benchmarks.contenders import Contender, Contenders, Setting, Work, operands, ours, title
from benchmarks.peers import Operands

LARGE = ((1, 2048, 64), (8, 1024, 64))
SMALL = ((1, 1, 10, 64), (1, 1, 64, 64), (1, 1, 256, 64), (16, 8, 10, 64), (128, 1, 8, 32))
KEYS = (512, 4096, 65536)


def threads(setting: Setting) -> Iterator[Work]:
    """Heads, one query, and softmax of rows."""
    if setting.threads == 1:
        return

    def build(x: Operands, direction: str) -> Contenders:
        one, every = (ours(x, workers)[direction] for workers in (1, setting.threads))
        return {"one": one, "all": every}

    for (heads, n, d), direction in product(LARGE, ("forward", "backward")):

        def large(
            size: tuple[int, int, int] = (heads, setting.length(n), d), to: str = direction
        ) -> Contenders:
            return build(operands(*size), to)

        yield Work("threads", f"{title(heads, n, d)} {direction}", large)
    for (batch, heads, n, d), direction in product(SMALL, ("forward", "backward")):

        def small(
            b: int = batch, size: tuple[int, int, int] = (heads, n, d), to: str = direction
        ) -> Contenders:
            return build(operands(*size, batch=b), to)

        name = title(heads, n, d) if batch == 1 else f"{batch}x{title(heads, n, d)}"
        yield Work("threads", f"{name} {direction}", small)
    for d, keys in product((64, 128), KEYS):

        def query(d: int = d, keys: int = keys) -> Contenders:
            return build(operands(8, 1, d, keys=setting.length(keys)), "forward")

        yield Work("threads", f"one query, d = {d}, {keys} keys", query)
    for n in (100, 1000):
        yield Work("threads", f"softmax ({n}, {n})", lambda n=n: _softmax(n))


def _softmax(n: int) -> Contenders:
    a = np.random.default_rng(0).standard_normal((n, n), np.float32)
    every = Contender(lambda: sdpa.softmax(a), bytes=2.0 * a.nbytes)
    return {"one": every._replace(within=_one_thread), "all": every}


@contextmanager
def _one_thread() -> Iterator[None]:
    """For functions that have no `workers`."""
    before = sdpa.get_num_threads()
    sdpa.set_num_threads(1)
    try:
        yield
    finally:
        sdpa.set_num_threads(before)
