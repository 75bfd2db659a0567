"""PyTorch's functions and methods where they differ from NumPy's; PyTorch is not imported."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from sdpa._programs._functions import FUNCTIONS, converted, where
from sdpa._programs._graph import Graph, Node

Value = Callable[[Graph, Any], Node]


def names(as_node: Value, kind_of: Callable[[Any], str | None]) -> dict[str, Callable[..., Node]]:
    """By name, what is called with the graph and the arguments of PyTorch's function or method."""

    def divided(graph: Graph, a: Any, b: Any, *, rounding_mode: str | None = None) -> Node:
        x, y = as_node(graph, a), as_node(graph, b)
        if rounding_mode == "floor" and "r" not in (x.kind, y.kind):
            return FUNCTIONS["floor_divide"](graph, x, y)
        found = FUNCTIONS["divide"](graph, x, y)
        word = {"floor": "floor", "trunc": "trunc"}.get(rounding_mode or "")
        return FUNCTIONS[word](graph, found) if word else found

    def reversed_difference(graph: Graph, a: Any, b: Any) -> Node:
        return FUNCTIONS["subtract"](graph, as_node(graph, b), as_node(graph, a))

    def larger(word: str) -> Callable[..., Node]:
        def apply(graph: Graph, *values: Any) -> Node:
            if len(values) != 2:
                raise graph.refused(f"torch.{word}imum of two values", f"torch.{word} of one")
            return FUNCTIONS[f"{word}imum"](graph, *(as_node(graph, value) for value in values))

        return apply

    def gelu(graph: Graph, x: Any, approximate: str = "none") -> Node:
        node = converted(graph, as_node(graph, x), "r")
        if approximate != "tanh":
            raise graph.refused(
                "approximate='tanh'", f"gelu({graph.text(node)})", "programs have no erf"
            )
        cube = FUNCTIONS["multiply"](graph, FUNCTIONS["power"](graph, node, graph.constant("i", 3)),
                                     graph.constant("r", 0.044715))  # fmt: skip
        inner = graph.apply("add_r", node, cube)
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u.
        twice = graph.apply("multiply_r", graph.constant("r", 2 * math.sqrt(2 / math.pi)), inner)
        return graph.apply("multiply_r", node, graph.apply("sigmoid", twice))

    def cast(kind: str) -> Callable[..., Node]:
        return lambda graph, x, *_, **__: converted(graph, as_node(graph, x), kind)

    def to(graph: Graph, x: Any, *args: Any, dtype: Any = None, **_: Any) -> Node:
        """x.to(dtype), x.to(other): its kind; x.to(device) changes nothing."""
        node = as_node(graph, x)
        for other in (*args, dtype):
            kind = kind_of(getattr(other, "dtype", other)) if other is not None else None
            if kind:
                return converted(graph, node, kind)
        return node

    def full(value: Any) -> Callable[..., Node]:
        def apply(graph: Graph, x: Any, *args: Any, dtype: Any = None, **options: Any) -> Node:
            number = value
            if value is None:  # full_like(x, number), x.new_full(size, number)
                number = options.get("fill_value", args[-1] if args else 0)
            own = as_node(graph, x).kind
            return converted(graph, as_node(graph, number), (dtype and kind_of(dtype)) or own)

        return apply

    def chosen(graph: Graph, x: Any, condition: Any, other: Any) -> Node:
        return where(graph, *(as_node(graph, value) for value in (condition, x, other)))

    def masked_fill(graph: Graph, x: Any, mask: Any, value: Any) -> Node:
        return chosen(graph, value, mask, x)

    def itself(graph: Graph, x: Any, *_: Any, **__: Any) -> Node:
        return as_node(graph, x)

    def detached(graph: Graph, x: Any) -> Node:
        node = as_node(graph, x)
        return graph.apply("detached", node) if node.kind == "r" else node

    casts = {"r": ("float", "double", "half", "bfloat16"), "i": ("int", "long", "short")}
    return {
        "div": divided,
        "true_divide": divided,
        "rsub": reversed_difference,
        "max": larger("max"),
        "min": larger("min"),
        "gelu": gelu,
        "bool": cast("b"),
        **{word: cast(kind) for kind, words in casts.items() for word in words},
        "to": to,
        "type": to,
        "type_as": to,
        "full_like": full(None),
        "new_full": full(None),
        "new_ones": full(1),
        "new_zeros": full(0),
        "masked_fill": masked_fill,
        "Tensor.where": chosen,
        "clone": itself,
        "contiguous": itself,
        "detach": detached,
    }
