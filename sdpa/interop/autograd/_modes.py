"""Helpers of all primitives: the results of a call, and derivatives by composed formulas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from autograd import make_jvp, make_vjp
from autograd.builtins import tuple as traced_tuple
from autograd.extend import defjvp, defvjp, primitive

from sdpa._arguments import is_float
from sdpa._arrays import compute_type, is_narrow, native

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


@primitive
def _as_type(x: Any, dtype: Any) -> Any:
    return np.asarray(x, dtype)


defvjp(
    _as_type,
    lambda ans, x, dtype: lambda g: _as_type(g, plain(x).dtype),
    argnums=(0,),
)
defjvp(_as_type, lambda t, ans, x, dtype: _as_type(t, dtype), argnums=(0,))


def array(x: Any) -> Any:
    """What a composed formula indexes in place of a list or an array of another library."""
    is_known = x is None or isinstance(plain(x), (np.ndarray, np.generic, float, int))
    return x if is_known else np.asarray(x)


def widened(x: Any) -> Any:
    """x in the type of the arithmetic, in which a composed formula computes."""
    x = array(x)
    dtype = getattr(plain(x), "dtype", None)
    if dtype is None or not is_float(dtype) or not is_narrow(dtype):
        return x
    return _as_type(x, compute_type(dtype))


def rounded(x: Any, like: Any) -> Any:
    """The result of a composed formula in the type of `like`, and so is its tangent."""
    dtype = getattr(plain(like), "dtype", None)
    return x if dtype is None else _as_type(x, native(dtype))


def vjp_of(composed: Function) -> Function:
    """Reverse mode of a primitive through a function of the same arguments."""

    def vjp_argnums(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Function:
        @np.errstate(all="ignore")  # of hidden pairs, as in `composed`
        def vjp(g: Any) -> Any:
            grads = make_vjp(composed, argnums)(*args, **kwargs)[0](g)
            return [grads[i] for i in range(len(argnums))]

        return vjp

    return vjp_argnums


def jvp_of(composed: Function) -> Function:
    """Forward mode of a primitive through a function of the same arguments."""

    @np.errstate(all="ignore")
    def jvp_argnums(argnums: Any, tangents: Any, ans: Any, args: Any, kwargs: Any) -> Any:
        return make_jvp(composed, argnums)(*args, **kwargs)(traced_tuple(tangents))[1]

    return jvp_argnums
