"""Reading the arguments of a call of `sdpa.MultiHeadAttention`, before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from sdpa import _core
from sdpa._arguments import arrays, checked_options, checked_rows, converted
from sdpa._arrays import Array, broadcast_shapes, compute_type, native
from sdpa._options import LayerOptions
from sdpa.mechanisms._definition import Definition, Positions
from sdpa.mechanisms.rotary import checked_positions

Own = tuple[Mapping[str, ArrayLike] | None, ArrayLike | None, ArrayLike | None]
"""parameters, positions and context_positions, as given."""

_MOST_AXES = 63


def checked_call(
    layer: Definition,
    function: Callable[..., Any],
    x: ArrayLike,
    context: ArrayLike | None,
    own: Own,
    options: Mapping[str, Any],
) -> tuple[dict[str, Array], Array, Array, Positions, dict[str, Any]]:
    """Parameters, x, context (x if there is none), positions and the options of the kernel."""
    parameters, positions, context_positions = own
    checked = checked_options(function, options, LayerOptions.__annotations__)
    checked["enable_gqa"] = layer.kv_heads != layer.heads
    given = checked_parameters(layer, layer.parameters if parameters is None else parameters)
    (x,), (given_context, *at), checked = converted(
        checked,
        {"context": context, "positions": positions, "context_positions": context_positions},
        x=x,
    )
    checked["scale"] = layer._kernel_scale(given)
    _check_input(layer, "x", x, layer.d_model)
    source = x if given_context is None else given_context
    if context is not None or layer.d_context != layer.d_model:
        _check_input(layer, "context" if context is not None else "x", source, layer.d_context)
    try:
        broadcast_shapes(x.shape[:-2], source.shape[:-2])
    except ValueError:
        raise ValueError(
            f"context: expected leading axes that broadcast with {x.shape[:-2]}, "
            f"got {source.shape[:-2]}"
        ) from None
    context_rows = None if given_context is None else given_context.shape[:-1]
    places = positions_of(layer, x.shape[:-1], context_rows, *at)

    def like(y: Array, heads: int, width: int) -> Array:
        shape = (*y.shape[:-2], heads, y.shape[-2], width)
        return np.broadcast_to(np.zeros((), layer.dtype), shape)

    query, key = like(x, layer.heads, layer.d_k), like(source, layer.kv_heads, layer.d_k)
    value = like(x if layer.swap_roles else source, layer.kv_heads, layer.d_v)
    query, key = (key, query) if layer.swap_roles else (query, key)
    _core._check_attention(query, key, value, **checked)
    if layer.scale == "learned":
        checked["scale"] = checked["scale"].astype(compute_type(layer.dtype), copy=False)
    return given, x, source, places, checked


def positions_of(
    layer: Definition,
    rows: tuple[int, ...],
    context_rows: tuple[int, ...] | None,
    at: Array | None,
    context_at: Array | None,
) -> Positions:
    """Positions of the rows (..., L) of x and of context, for their heads; None if not rotated."""
    named = {"positions": (rows, at), "context_positions": (context_rows, context_at)}
    found: list[Array | None] = []
    for name, (shape, given) in named.items():
        if given is not None:
            if shape is None or not layer.rotary:
                lacking = "without rotary=True" if not layer.rotary else "without context"
                raise ValueError(
                    f"{name}: expected None {lacking}, got an array of shape {given.shape}"
                )
            checked_positions(name, given, shape)
            given = np.expand_dims(given, -2) if given.ndim > 1 else given
        elif layer.rotary and shape is not None:
            given = np.arange(shape[-1])
        found.append(given)
    return found[0], found[0] if context_rows is None else found[1]


def _check_input(layer: Definition, name: str, x: Array, width: int) -> None:
    if native(x.dtype) != layer.dtype:
        raise TypeError(
            f"{name}: expected the layer's dtype {layer.dtype}, got {x.dtype}; "
            f"write {name}.astype(layer.dtype)"
        )
    checked_rows(name, x, f"L, {width}")
    if x.shape[-1] != width:
        raise ValueError(f"{name}: expected (..., L, {width}), got {x.shape}")
    if x.ndim > _MOST_AXES:
        raise ValueError(
            f"{name}: expected at most {_MOST_AXES} axes, beside which NumPy has one for heads, "
            f"got {x.ndim}"
        )


def check_names(layer: Definition, parameters: Any) -> None:
    """Raise an exception unless these are the names of the layer's parameters."""
    names = sorted(layer._shapes())
    if not isinstance(parameters, Mapping):
        raise TypeError(f"parameters: expected a mapping of {names}, got {type(parameters)}")
    given = sorted(parameters, key=str)
    if given != names:
        raise ValueError(f"parameters: expected {names}, got {given}")


def checked_parameters(layer: Definition, parameters: Mapping[str, ArrayLike]) -> dict[str, Array]:
    """The parameters as arrays; an exception for those that are not of the layer."""
    check_names(layer, parameters)
    shapes = layer._shapes()
    names = {f"parameters[{name!r}]": parameters[name] for name in shapes}
    given = dict(zip(shapes, arrays(**names), strict=True))
    for name, y in given.items():
        if native(y.dtype) != layer.dtype:
            raise TypeError(
                f"parameters[{name!r}]: expected the layer's dtype {layer.dtype}, got {y.dtype}"
            )
        if y.shape != shapes[name]:
            raise ValueError(f"parameters[{name!r}]: expected {shapes[name]}, got {y.shape}")
    return given
