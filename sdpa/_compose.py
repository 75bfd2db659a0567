"""Calls of the compiled functions for what is composed around them: mechanisms and biases.

Each of these prepares the operands of `sdpa.attention_forward` and `attention_backward`, which do
the rest. 16-bit operands are widened to float32 once, so that prepared operands are not rounded
twice; results are rounded to the operands' dtype at the end.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

from sdpa import _core
from sdpa._arrays import Array, rounded, widen, widened_options


def seeded(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a function that returns out alone, with a seed for its dropout."""
    if "dropout_p" not in options or options.get("rng") is not None:
        return dict(options)
    return {**options, "rng": secrets.randbits(64)}


def forward(
    query: Array, key: Array, value: Array, options: dict[str, Any], like: Array
) -> _core.AttentionForward:
    """attention_forward of widened operands, out in the dtype of `like`."""
    out, lse = _core.attention_forward(query, key, value, **options)
    return _core.AttentionForward(cast(Array, rounded(out, like)), lse)


class Upstream(NamedTuple):
    """The rows of a backward call: the incoming gradients, and the results of the forward."""

    grad_out: Array
    out: Array
    lse: Array
    grad_lse: Array | None

    def block(self, rows: slice) -> Upstream:
        """The rows of a block of queries."""
        index = (..., rows, slice(None))
        grad_lse = None if self.grad_lse is None else self.grad_lse[..., rows]
        return Upstream(self.grad_out[index], self.out[index], self.lse[..., rows], grad_lse)


def checked_upstream(
    grad_out: Array,
    operands: tuple[Array, Array, Array],
    out: Array,
    lse: Array,
    grad_lse: Array | None,
    needs: Iterable[str],
    options: Mapping[str, Any],
) -> Upstream:
    """The rows after all checks of `attention_backward`.

    grad_out is widened. out is not: where it was rounded to 16 bits, attention_backward takes
    <grad_out, out> from the weights instead.
    """
    _core._check_attention_backward(
        grad_out, *operands, out, lse, grad_lse=grad_lse, needs=tuple(needs), **options
    )
    return Upstream(widen(grad_out), out, lse, grad_lse)


def composed_backward(
    upstream: Upstream,
    operands: tuple[Array, Array, Array],
    needs: Iterable[str],
    options: dict[str, Any],
) -> _core.AttentionGradients:
    """attention_backward of widened operands."""
    return _core.attention_backward(
        upstream.grad_out, *operands, upstream.out, upstream.lse, grad_lse=upstream.grad_lse,
        needs=tuple(needs), **widened_options(options, operands[0].dtype),
    )  # fmt: skip
