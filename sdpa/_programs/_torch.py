"""PyTorch's functions and methods where they differ from NumPy's; PyTorch is not imported."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from sdpa._programs._functions import FUNCTIONS, converted, where
from sdpa._programs._graph import Graph, Node

Value = Callable[[Graph, Any], Node]
Kind = Callable[[Any], str | None]


class _Words:
    """PyTorch's words; `as_node` makes an expression of a value, `kind_of` a kind of its dtype."""

    def __init__(self, as_node: Value, kind_of: Kind) -> None:
        self.as_node, self.kind_of = as_node, kind_of

    def divided(self, graph: Graph, a: Any, b: Any, *, rounding_mode: str | None = None) -> Node:
        x, y = self.as_node(graph, a), self.as_node(graph, b)
        if rounding_mode == "floor" and "r" not in (x.kind, y.kind):
            return FUNCTIONS["floor_divide"](graph, x, y)
        found = FUNCTIONS["divide"](graph, x, y)
        word = {"floor": "floor", "trunc": "trunc"}.get(rounding_mode or "")
        return FUNCTIONS[word](graph, found) if word else found

    def reversed_difference(self, graph: Graph, a: Any, b: Any) -> Node:
        return FUNCTIONS["subtract"](graph, self.as_node(graph, b), self.as_node(graph, a))

    def larger(self, word: str) -> Callable[..., Node]:
        def apply(graph: Graph, *values: Any) -> Node:
            if len(values) != 2:
                raise graph.refused(f"torch.{word}imum of two values", f"torch.{word} of one")
            return FUNCTIONS[f"{word}imum"](graph, *(self.as_node(graph, x) for x in values))

        return apply

    def gelu(self, graph: Graph, x: Any, approximate: str = "none") -> Node:
        node = converted(graph, self.as_node(graph, x), "r")
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

    def cast(self, kind: str) -> Callable[..., Node]:
        return lambda graph, x, *_, **__: converted(graph, self.as_node(graph, x), kind)

    def to(self, graph: Graph, x: Any, *args: Any, dtype: Any = None, **_: Any) -> Node:
        """x.to(dtype), x.to(other): its kind; x.to(device) changes nothing."""
        node = self.as_node(graph, x)
        for other in (*args, dtype):
            kind = self.kind_of(getattr(other, "dtype", other)) if other is not None else None
            if kind:
                return converted(graph, node, kind)
        return node

    def full(self, value: Any) -> Callable[..., Node]:
        def apply(graph: Graph, x: Any, *args: Any, dtype: Any = None, **options: Any) -> Node:
            number = value
            if value is None:  # full_like(x, number), x.new_full(size, number)
                number = options.get("fill_value", args[-1] if args else 0)
            own = self.as_node(graph, x).kind
            kind = (dtype and self.kind_of(dtype)) or own
            return converted(graph, self.as_node(graph, number), kind)

        return apply

    def chosen(self, graph: Graph, x: Any, condition: Any, other: Any) -> Node:
        return where(graph, *(self.as_node(graph, value) for value in (condition, x, other)))

    def masked_fill(self, graph: Graph, x: Any, mask: Any, value: Any) -> Node:
        return self.chosen(graph, value, mask, x)

    def itself(self, graph: Graph, x: Any, *_: Any, **__: Any) -> Node:
        return self.as_node(graph, x)

    def detached(self, graph: Graph, x: Any) -> Node:
        node = self.as_node(graph, x)
        return graph.apply("detached", node) if node.kind == "r" else node


def names(as_node: Value, kind_of: Kind) -> dict[str, Callable[..., Node]]:
    """By name, what is called with the graph and the arguments of PyTorch's function or method."""
    words = _Words(as_node, kind_of)
    casts = {"r": ("float", "double", "half", "bfloat16"), "i": ("int", "long", "short")}
    return {
        "div": words.divided,
        "true_divide": words.divided,
        "rsub": words.reversed_difference,
        "max": words.larger("max"),
        "min": words.larger("min"),
        "gelu": words.gelu,
        "bool": words.cast("b"),
        **{name: words.cast(kind) for kind, found in casts.items() for name in found},
        "to": words.to,
        "type": words.to,
        "type_as": words.to,
        "full_like": words.full(None),
        "new_full": words.full(None),
        "new_ones": words.full(1),
        "new_zeros": words.full(0),
        "masked_fill": words.masked_fill,
        "Tensor.where": words.chosen,
        "clone": words.itself,
        "contiguous": words.itself,
        "detach": words.detached,
    }
