"""Derivatives of expressions, by forward mode with respect to one leaf.

A derivative that is zero everywhere is None, so nothing is ever multiplied by it: the derivative of
where(c, a, b) is where(c, a', b'), in which the branch not taken may be infinite.
"""

from __future__ import annotations

from collections.abc import Callable

from sdpa._programs._graph import Graph, Node, reached

Derivative = Node | None


def derivative(graph: Graph, root: Node, leaf: Node) -> Derivative:
    """d root / d leaf; None if the expression does not depend on the leaf, or only in steps."""
    found: dict[Node, Derivative] = {leaf: graph.constant("r", 1)}
    for node in reached([root]):
        if node is leaf:
            continue
        moved = [found[arg] for arg in node.args]
        rule = _RULES.get(node.op)
        known = rule is not None and any(moved)
        found[node] = rule(graph, node, *moved) if rule and known else None
    return found.get(root)


def total(graph: Graph, x: Derivative, y: Derivative) -> Derivative:
    """x + y."""
    if x is None or y is None:
        return y if x is None else x
    return graph.apply("add_r", x, y)


def product(graph: Graph, x: Derivative, y: Node) -> Derivative:
    """x y, of a derivative and a value; two constant factors become one."""
    if x is None:
        return None
    (a, u), (b, v) = _factors(x), _factors(y)
    if a is None or b is None:
        return graph.apply("multiply_r", x, y)
    found = graph.apply("multiply_r", a, b)
    for part in (u, v):
        found = found if part is None else graph.apply("multiply_r", found, part)
    return found


def _factors(x: Node) -> tuple[Node | None, Node | None]:
    """The constant factor of a product, and the other one; None for a factor that is not there."""
    if x.is_constant:
        return x, None
    if x.op == "multiply_r":
        for one, other in (x.args, x.args[::-1]):
            if one.is_constant:
                return one, other
    return None, x


def _negative(graph: Graph, x: Derivative) -> Derivative:
    return None if x is None else graph.apply("negative_r", x)


def _choice(graph: Graph, condition: Node, yes: Derivative, no: Derivative) -> Node:
    zero = graph.constant("r", 0)
    return graph.apply("select_r", condition, yes or zero, no or zero)


def _multiply(graph: Graph, node: Node, da: Derivative, db: Derivative) -> Derivative:
    a, b = node.args
    if a is b:
        return product(graph, product(graph, da, a), graph.constant("r", 2))
    return total(graph, product(graph, da, b), product(graph, db, a))


def _divide(graph: Graph, node: Node, da: Derivative, db: Derivative) -> Derivative:
    top = total(graph, da, _negative(graph, product(graph, db, node)))
    return top and graph.apply("divide", top, node.args[1])


def _absolute(graph: Graph, node: Node, dx: Node) -> Derivative:
    x, zero = node.args[0], graph.constant("r", 0)
    below = _choice(graph, graph.apply("less_r", x, zero), _negative(graph, dx), None)
    return _choice(graph, graph.apply("less_r", zero, x), dx, below)


def _minimum(graph: Graph, node: Node, da: Derivative, db: Derivative) -> Derivative:
    a, b = node.args
    return _choice(graph, graph.apply("less_r", a, b), da, db)


def _maximum(graph: Graph, node: Node, da: Derivative, db: Derivative) -> Derivative:
    a, b = node.args
    return _choice(graph, graph.apply("less_r", b, a), da, db)


def _select(graph: Graph, node: Node, _: Derivative, da: Derivative, db: Derivative) -> Derivative:
    return _choice(graph, node.args[0], da, db)


def _power(graph: Graph, node: Node, dx: Node) -> Derivative:
    n = node.payload
    slope = power(graph, node.args[0], n - 1)
    return product(graph, product(graph, dx, slope), graph.constant("r", n))


def power(graph: Graph, x: Node, n: float) -> Node:
    """x ** n."""
    if n == 0:
        return graph.constant("r", 1)
    return x if n == 1 else graph.apply("power", x, payload=float(n))


def _sigmoid(graph: Graph, node: Node, dx: Node) -> Derivative:
    other = graph.apply("sigmoid", graph.apply("negative_r", node.args[0]))
    return product(graph, dx, graph.apply("multiply_r", node, other))


def _tanh(graph: Graph, node: Node, dx: Node) -> Derivative:
    one = graph.constant("r", 1)
    slope = graph.apply("subtract_r", one, graph.apply("multiply_r", node, node))
    return product(graph, dx, slope)


def _sqrt(graph: Graph, node: Node, dx: Node) -> Derivative:
    half = graph.constant("r", 0.5)
    return graph.apply("divide", graph.apply("multiply_r", dx, half), node)


def _log1p(graph: Graph, node: Node, dx: Node) -> Derivative:
    return graph.apply("divide", dx, graph.apply("add_r", graph.constant("r", 1), node.args[0]))


# Operations that are not here have the derivative 0 wherever they have one.
_RULES: dict[str, Callable[..., Derivative]] = {
    "add_r": lambda graph, node, da, db: total(graph, da, db),
    "subtract_r": lambda graph, node, da, db: total(graph, da, _negative(graph, db)),
    "multiply_r": _multiply,
    "divide": _divide,
    "negative_r": lambda graph, node, dx: _negative(graph, dx),
    "absolute_r": _absolute,
    "minimum_r": _minimum,
    "maximum_r": _maximum,
    "select_r": _select,
    "sqrt": _sqrt,
    "exp": lambda graph, node, dx: product(graph, dx, node),
    "log": lambda graph, node, dx: graph.apply("divide", dx, node.args[0]),
    "tanh": _tanh,
    "log1p": _log1p,
    "expm1": lambda graph, node, dx: product(graph, dx, graph.apply("exp", node.args[0])),
    "sigmoid": _sigmoid,
    "power": _power,
}
