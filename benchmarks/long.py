"""The backward of long heads, alone: over n for three widths, on one thread, beside PyTorch's."""

from collections.abc import Iterator
from itertools import product

import numpy as np

import sdpa
from benchmarks.contenders import Contenders, Setting, Work, operands, ours

WIDTHS = (64, 128, 256)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
ROWS = 4096
"""At least as many in all heads together: where they are few, heads are more."""


def name_of(n: int, d: int) -> str:
    return f"d = {d}, n = {n}"


def long(setting: Setting) -> Iterator[Work]:
    """Speed of the backward over n."""
    for d, n in product(WIDTHS, LENGTHS):

        def build(n: int = n, d: int = d) -> Contenders:
            x = operands(max(ROWS // n, 1), setting.length(n), d)
            mine = ours(x)["backward"]
            out, lse = sdpa.attention_forward(*x[:3], lse_dtype=np.float64)
            wide = mine._replace(
                call=lambda: sdpa.attention_backward(x.grad_out, *x[:3], out, lse),
            )
            peer = setting.torch()
            theirs = {} if peer is None else {peer.name: mine._replace(call=peer.backward(x))}
            return {"sdpa": mine, "float64 lse": wide, **theirs}

        yield Work("long", name_of(n, d), build)
