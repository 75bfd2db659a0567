"""A line of work and its contenders: operands, sdpa's own calls, and the peers beside them.

FLOPs are those of the formula, counted once: 4 L_q L_k d per head for the forward, 2.5 times that
for the backward, half for causal; a product of matrices inside them is 2 L_q L_k d.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import sdpa
from benchmarks.peers import Operands, Peer, Torch
from benchmarks.timing import Within
from sdpa_lab.tools.clock import Call

Array = npt.NDArray[Any]


class Contender(NamedTuple):
    """One call and the work that it does."""

    call: Call
    flops: float = 0.0
    bytes: float = 0.0
    """That have to be read and written at least."""
    within: Within = nullcontext
    before: Call | None = None
    """Done outside the clock before each call."""


Contenders = dict[str, Contender]


class Work(NamedTuple):
    """Contenders that are timed in turn."""

    group: str
    name: str
    build: Callable[[], Contenders]


class Setting(NamedTuple):
    """What a process of the benchmarks measures with."""

    threads: int
    peers: list[Peer]
    quick: bool = False

    def torch(self) -> Torch | None:
        """The peer PyTorch, if it is installed."""
        return next((peer for peer in self.peers if isinstance(peer, Torch)), None)

    def length(self, n: int) -> int:
        """n, or a small part of it for a quick run."""
        return max(n // 32, 8) if self.quick else n


def operands(
    heads: int,
    n: int,
    d: int,
    *,
    dtype: Any = np.float32,
    batch: int = 1,
    key_heads: int | None = None,
    keys: int | None = None,
    is_causal: bool = False,
) -> Operands:
    """N(0, 1) operands, the same whenever they are asked for."""
    rng = np.random.default_rng(0)

    def draw(h: int, length: int) -> Array:
        return rng.standard_normal((batch, h, length, d), np.float32).astype(dtype)

    h_k, n_k = key_heads or heads, keys or n
    return Operands(draw(heads, n), draw(h_k, n_k), draw(h_k, n_k), draw(heads, n), is_causal)


def flops(x: Operands) -> float:
    """Floating-point operations of a forward."""
    return 4.0 * x.query.size * x.key.shape[-2] / (1 + x.is_causal)


def ours(x: Operands, workers: int | None = None, **options: Any) -> Contenders:
    """{"forward", "backward", "both"}: sdpa on x with these options."""
    q, k, v, g, is_causal = x
    options |= {"is_causal": is_causal, "workers": workers}
    if x.is_gqa:
        options["enable_gqa"] = True
    out, lse = sdpa.attention_forward(q, k, v, **options)

    def both() -> object:
        out, lse = sdpa.attention_forward(q, k, v, **options)
        return out, sdpa.attention_backward(g, q, k, v, out, lse, **options)

    count, size = flops(x), float(q.nbytes + k.nbytes + v.nbytes)
    back = 2 * size + 2 * out.nbytes
    return {
        "forward": Contender(lambda: sdpa.attention(q, k, v, **options), count, size + out.nbytes),
        "backward": Contender(
            lambda: sdpa.attention_backward(g, q, k, v, out, lse, **options), 2.5 * count, back
        ),
        "both": Contender(both, 3.5 * count, back),
    }


def against_peers(setting: Setting, x: Operands, direction: str) -> Contenders:
    """sdpa and every peer that can do it, after a look at whether they compute the same."""
    mine = ours(x)[direction]
    found = {"sdpa": mine}
    expected = sdpa.attention(*x[:3], is_causal=x.is_causal, enable_gqa=x.is_gqa)
    for peer in setting.peers:
        if direction == "forward":
            call = peer.forward(x)
            if call is not None:
                check(peer.name, peer.result(call), expected)
        else:
            call = peer.both(x)
        if call is not None:
            found[peer.name] = mine._replace(call=call)
    return found


def check(name: str, result: Array, expected: Array) -> None:
    """Refuse a contender that computes something else: a wrong scale, mask or layout."""
    tolerance = 0.05 if expected.dtype.itemsize == 2 else 1e-4
    difference = abs(np.asarray(result, np.float64) - np.asarray(expected, np.float64)).max()
    if not difference <= tolerance:
        raise RuntimeError(f"{name}: differs from sdpa by {difference:.2g}, is not the same work")


SHORT = (
    (1797, 1, 8, 64),
    (128, 1, 8, 32),
    (16, 8, 10, 64),
    (256, 1, 16, 64),
    (256, 1, 16, 32),
    (64, 8, 32, 32),
    (64, 8, 32, 64),
    (16, 8, 64, 64),
)
"""Batch, heads, length, width of short sequences."""

SHAPES = (
    (8, 1024, 64),
    (8, 512, 64),
    (8, 2048, 128),
    (8, 512, 256),
    (8, 512, 32),
    (8, 128, 64),
)
"""(heads, L, d) of the table of targets; the first one causal too."""


def title(heads: int, n: int, d: int, is_causal: bool = False) -> str:
    return f"{heads}x{n}x{d}" + (" causal" if is_causal else "")
