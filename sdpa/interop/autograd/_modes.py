"""Helpers of all primitives: the results of a call, and derivatives by composed formulas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from autograd import make_jvp, make_vjp
from autograd.builtins import tuple as traced_tuple

Function = Callable[..., Any]


def refuse_out(options: Mapping[str, Any]) -> None:
    if "out" in options:
        raise TypeError("out: an array that is differentiated through cannot be written to")


class TracedCall:
    """The options of one call and its results, which all of its derivatives share.

    The kernels' derivatives take out and lse as results of the forward, not as variables, so these
    are kept as plain arrays at every level of differentiation.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        refuse_out(options)
        self.options = dict(options)
        rng = options.get("rng")
        if options.get("dropout_p") and rng is None:
            rng = np.random.default_rng()
        if isinstance(rng, np.random.Generator):
            self.options["rng"] = int.from_bytes(rng.bytes(8), "little")  # as sdpa.attention
        self.out = self.lse = np.zeros(0)


def plain(x: Any) -> Any:
    """The array inside any number of autograd's boxes."""
    while hasattr(x, "_value"):
        x = x._value
    return x


def vjp_of(composed: Function) -> Function:
    """Reverse mode of a primitive through a function of the same arguments."""

    def vjp_argnums(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Function:
        def vjp(g: Any) -> Any:
            grads = make_vjp(composed, argnums)(*args, **kwargs)[0](g)
            return [grads[i] for i in range(len(argnums))]

        return vjp

    return vjp_argnums


def jvp_of(composed: Function) -> Function:
    """Forward mode of a primitive through a function of the same arguments."""

    def jvp_argnums(argnums: Any, tangents: Any, ans: Any, args: Any, kwargs: Any) -> Any:
        return make_jvp(composed, argnums)(*args, **kwargs)(traced_tuple(tangents))[1]

    return jvp_argnums
