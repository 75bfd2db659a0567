"""Floating-point operations of the operators, for `torch.utils.flop_counter`.

As PyTorch counts its own attentions: two for each multiplication of the products of matrices, also
of pairs that a mask leaves out; a backward computes the scores again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch

from sdpa.interop.torch._additive import WEIGHTS
from sdpa.interop.torch._operators import named, shape_of, split
from sdpa.interop.torch._packed import is_packed, spans


@contextlib.contextmanager
def _without_log(name: str) -> Iterator[None]:
    log = logging.getLogger(name)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


with _without_log("torch.utils.flop_counter"):  # it misses Triton, whose kernels are not ours
    from torch.utils.flop_counter import register_flop_formula

# How many products with (Lq, Lk) matrices have inner or outer width d_k, and how many d_v.
_PRODUCTS = {
    "forward": (1, 1),
    "weights": (1, 0),
    "backward": (3, 2),
    "jvp": (3, 2),
    "double_backward": (7, 5),
}


def _pairs(operands: Sequence[Any], options: Sequence[Any]) -> int:
    """The number of pairs of a query and a key, of all heads and batch entries."""
    args = (*operands, *options)
    *leading, n_q = shape_of(operands, options)
    if not is_packed(args):
        return prod(leading) * n_q * named(args)["key"].shape[-2]
    lengths = ((q.stop - q.start) * (k.stop - k.start) for q, k in spans(args))
    return prod(leading) * sum(lengths)


def _register(name: str, n_k: int, n_v: int) -> None:
    @register_flop_formula(getattr(torch.ops.sdpa, f"attention_{name}"), get_raw=True)
    def flops(*args: Any, out_val: Any = None) -> int:
        _, operands, options = split(args)
        query, _, value = operands[:3]
        return 2 * _pairs(operands, options) * (n_k * query.shape[-1] + n_v * value.shape[-1])


for _name, (_n_k, _n_v) in _PRODUCTS.items():
    _register(_name, _n_k, _n_v)


def _register_additive(name: str, n_hidden: int, n_v: int, n_projections: int) -> None:
    """A pair's score is a product of width h; query and key are projected to that width."""

    @register_flop_formula(getattr(torch.ops.sdpa, f"additive_{name}"), get_raw=True)
    def flops(*args: Any, out_val: Any = None) -> int:
        leading, operands, options = split(args)
        weights = dict(zip(WEIGHTS, leading[-len(WEIGHTS) :], strict=True))
        query, key, value = operands[:3]
        hidden, pairs = weights["w_query"].shape[-1], _pairs(operands, options)
        projected = (query.numel() + key.numel()) * hidden
        return 2 * (pairs * (n_hidden * hidden + n_v * value.shape[-1]) + n_projections * projected)


_register_additive("forward", 1, 1, 1)
_register_additive("backward", 3, 2, 3)
