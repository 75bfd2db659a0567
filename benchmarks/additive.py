"""Additive attention beside the best formulations in NumPy and PyTorch; counted in tanh, n^2 h.

Written as one expression the sums of all pairs go through memory, n^2 h numbers; blocks of rows
that stay in the cache are faster in both libraries, so those are what is timed, and PyTorch's
compiled expression, which keeps nothing. With gradients PyTorch is left to its own autograd.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import sdpa
from benchmarks.peers import Peer
from sdpa_lab.tools.clock import Call

Array = npt.NDArray[Any]

SHAPES = ((512, 64), (1024, 64))
"""(n, d): n queries and keys of width d, d values, d hidden channels."""

ROWS = 16
"""Queries in a block of the others: what was fastest among 1, 4 and 16."""


class Additive(NamedTuple):
    """Arguments of `sdpa.additive_attention` without a bias, and an upstream gradient."""

    query: Array
    key: Array
    value: Array
    w_query: Array
    w_key: Array
    w_score: Array
    grad_out: Array

    @property
    def count(self) -> float:
        return float(len(self.query) * len(self.key) * self.w_score.size)


def draw(n: int, d: int) -> Additive:
    """N(0, 1) operands, float32; projections of standard deviation 1, scores of about 0.6."""
    rng = np.random.default_rng(0)
    query, key, value, grad_out = rng.standard_normal((4, n, d), np.float32)
    w_query, w_key = rng.standard_normal((2, d, d), np.float32) * np.float32(d**-0.5)
    w_score = rng.standard_normal(d, np.float32) * np.float32(d**-0.5)
    return Additive(query, key, value, w_query, w_key, w_score, grad_out)


def calls(x: Additive, peers: list[Peer], direction: str, *, compiled: bool) -> dict[str, Call]:
    """Calls of everybody who does the work, each returning out; "both" with all gradients."""
    arguments = x[:6]
    names = {peer.name for peer in peers}
    if direction == "forward":
        found: dict[str, Call] = {"sdpa": lambda: sdpa.additive_attention(*arguments)}
        if "numpy" in names:
            found["numpy"] = lambda: in_numpy(*arguments)
    else:
        found = {"sdpa": lambda: with_gradients(x)}
    if "torch" in names:
        import torch

        expression = in_blocks if direction == "forward" else as_written
        found["torch"] = in_torch(torch, x, direction, expression)
        if compiled:
            found["torch compiled"] = in_torch(torch, x, direction, torch.compile(as_written))
    return found


def with_gradients(x: Additive) -> Array:
    """out; the gradients are computed and dropped."""
    out, lse = sdpa.additive_attention_forward(*x[:6])
    sdpa.additive_attention_backward(x.grad_out, *x[:6], None, out, lse)
    return out


def in_numpy(
    query: Array, key: Array, value: Array, w_query: Array, w_key: Array, w_score: Array
) -> Array:
    """In blocks of ROWS queries, in place."""
    a, b = query @ w_query, key @ w_key
    s = np.empty((len(a), len(b)), a.dtype)
    hidden = np.empty((ROWS, *b.shape), a.dtype)
    for i in range(0, len(a), ROWS):
        part = hidden[: len(a) - i]
        np.add(a[i : i + ROWS, None], b, out=part)
        np.matmul(np.tanh(part, out=part), w_score, out=s[i : i + ROWS])
    s -= s.max(axis=-1, keepdims=True)
    np.exp(s, out=s)
    return np.asarray((s @ value) / s.sum(axis=-1, keepdims=True))


def as_written(query: Any, key: Any, value: Any, w_query: Any, w_key: Any, w_score: Any) -> Any:
    """The formula, for tensors."""
    hidden = (query @ w_query)[:, None] + key @ w_key
    return (hidden.tanh() @ w_score).softmax(-1) @ value


def in_blocks(query: Any, key: Any, value: Any, w_query: Any, w_key: Any, w_score: Any) -> Any:
    """As `in_numpy`, for tensors."""
    a, b = query @ w_query, key @ w_key
    s = a.new_empty((len(a), len(b)))
    for i in range(0, len(a), ROWS):
        s[i : i + ROWS] = (a[i : i + ROWS, None] + b).tanh_() @ w_score
    return s.softmax(-1) @ value


def in_torch(torch: Any, x: Additive, direction: str, expression: Any) -> Call:
    """A call of an expression on tensors of x, with gradients to all arguments for "both"."""
    tensors = [torch.from_numpy(a) for a in x[:6]]
    if direction == "forward":

        def forward() -> Array:
            with torch.no_grad():
                return np.asarray(expression(*tensors))

        return forward
    inputs = [tensor.clone().requires_grad_() for tensor in tensors]
    upstream = torch.from_numpy(x.grad_out)

    def both() -> Array:
        out = expression(*inputs)
        torch.autograd.grad(out, inputs, upstream)
        return np.asarray(out.detach())

    return both
