"""Expressions in operations of the core only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

from sdpa._programs._graph import Graph, Node, reached
from sdpa._programs._operations import KEY, TILE, UNIT

# Floats as large as this are whole numbers.
_WHOLE = 2.0**52


def lowered(graph: Graph, roots: Iterable[Node]) -> dict[Node, Node]:
    """For each node that the roots need, one that computes the same in operations of the core."""
    plain = _plain(graph, roots)
    grouped = _mapped(graph, [plain[node] for node in roots], _regrouped)
    joined = _mapped(graph, [grouped[plain[node]] for node in roots], _with_keys)
    fused = _fused(graph, [joined[grouped[plain[node]]] for node in roots])
    return {node: fused[joined[grouped[plain[node]]]] for node in roots}


def _mapped(
    graph: Graph, roots: Iterable[Node], rule: Callable[[Graph, Node, Callable[[Node], bool]], Node]
) -> dict[Node, Node]:
    """For each node that the roots need, what a rule makes of it and of those that it alone reads.

    The rule gets a node of the section of pairs, in which simpler ones stand already, and whether
    one of its operands has no other reader.
    """
    nodes = reached(roots)
    uses = Counter(arg for node in nodes for arg in node.args) + Counter(set(roots))
    found: dict[Node, Node] = {}
    once: set[Node] = set()
    for node in nodes:
        args = tuple(found[arg] for arg in node.args)
        same = args == node.args
        own = node if same else graph.make(node.op, *args, payload=node.payload, kind=node.kind)
        found[node] = rule(graph, own, once.__contains__) if own.section == TILE else own
        if uses[node] == 1:
            once.add(found[node])
    return found


def _regrouped(graph: Graph, node: Node, is_once: Callable[[Node], bool]) -> Node:
    """(x - y) + c as (x + c) - y or x - (y - c): what belongs to keys is computed once a key."""
    if node.op not in ("add_i", "subtract_i"):
        return node
    for difference, c in (node.args, node.args[::-1])[: 2 if node.op == "add_i" else 1]:
        if difference.op != "subtract_i" or not is_once(difference) or c.section != UNIT:
            continue
        x, y = difference.args
        other = "subtract_i" if node.op == "add_i" else "add_i"
        if x.section == KEY:
            return graph.apply("subtract_i", graph.apply(node.op, x, c), y)
        if y.section == KEY:
            return graph.apply("subtract_i", x, graph.apply(other, y, c))
    return node


def _with_keys(graph: Graph, node: Node, is_once: Callable[[Node], bool]) -> Node:
    """An operation that reads an operand of its keys without spreading it over the lanes."""
    op = node.op
    if op == "real_of_i" and node.args[0].op == "difference_i" and is_once(node.args[0]):
        inner = node.args[0]
        return graph.make("difference_r", *inner.args, payload=inner.payload, kind="r")
    if op == "less_equal_i" and node.args[1].section == UNIT and node.args[0].op == "absolute_i":
        size, most = node.args
        (inner,) = size.args
        if inner.op == "difference_i" and is_once(size) and is_once(inner):
            return graph.make("within", *inner.args, most, kind="b")
    if op in ("subtract_i", "less_i", "less_equal_i", "equal_i"):
        x, y = node.args
        own = {"subtract_i": "difference_i"}.get(op, f"{op[:-2]}_key")
        kind = "i" if op == "subtract_i" else "b"
        if y.section == KEY != x.section:
            return graph.make(own, x, y, payload=0, kind=kind)
        if x.section == KEY != y.section:
            return graph.make(own, y, x, payload=1, kind=kind)
    return node


def _fused(graph: Graph, roots: Iterable[Node]) -> dict[Node, Node]:
    """Products that only a sum reads, joined with it: one rounding, and one pass over a strip."""
    nodes = reached(roots)
    uses = Counter(arg for node in nodes for arg in node.args) + Counter(set(roots))
    found: dict[Node, Node] = {}
    for node in nodes:
        args = tuple(found[arg] for arg in node.args)
        found[node] = (
            node
            if args == node.args
            else graph.make(node.op, *args, payload=node.payload, kind=node.kind)
        )
        for place in (1, 0) if node.op == "add_r" else (1,) if node.op == "subtract_r" else ():
            factors = node.args[place]
            if factors.op == "multiply_r" and uses[factors] == 1 and node.section == TILE:
                op = "add_product" if node.op == "add_r" else "subtract_product"
                a, b = (found[arg] for arg in factors.args)
                found[node] = graph.make(op, args[1 - place], a, b, kind="r")
                break
    return found


def _plain(graph: Graph, roots: Iterable[Node]) -> dict[Node, Node]:
    """For each node that the roots need, one in the operations of `TABLE` that the core has."""
    found: dict[Node, Node] = {}
    for node in reached(roots):
        args = tuple(found[arg] for arg in node.args)
        rule = _RULES.get(node.op)
        if rule is not None:
            found[node] = rule(graph, args[0], node)
        elif args == node.args:
            found[node] = node
        else:
            found[node] = graph.make(node.op, *args, payload=node.payload, kind=node.kind)
    return found


def _sign(graph: Graph, x: Node, _: Node) -> Node:
    zero, one = (graph.constant("r", value) for value in (0, 1))
    # x itself where it is neither above nor below 0: zero or NaN.
    below = graph.apply("select_r", graph.apply("less_r", x, zero), graph.constant("r", -1), x)
    return graph.apply("select_r", graph.apply("less_r", zero, x), one, below)


def _floor(graph: Graph, x: Node, _: Node) -> Node:
    whole = graph.apply("real_of_i", graph.apply("integer_of_r", x))
    less = graph.apply("subtract_r", whole, graph.constant("r", 1))
    down = graph.apply("select_r", graph.apply("less_r", x, whole), less, whole)
    size = graph.apply("absolute_r", x)
    small = graph.apply("less_r", size, graph.constant("r", _WHOLE))
    return graph.apply("select_r", small, down, x)


def _log1p(graph: Graph, x: Node, _: Node) -> Node:
    # log(u) x / (u - 1) with u = 1 + x as it was rounded: Higham, "Accuracy and stability of
    # numerical algorithms" (2002), section 1.14.1, for log1p.
    one = graph.constant("r", 1)
    u = graph.apply("add_r", one, x)
    share = graph.apply("divide", x, graph.apply("subtract_r", u, one))
    near = graph.apply("multiply_r", graph.apply("log", u), share)
    near = graph.apply("select_r", graph.apply("equal_r", u, one), x, near)
    large = graph.apply("less_r", one, graph.apply("absolute_r", x))
    return graph.apply("select_r", large, graph.apply("log", u), near)


def _expm1(graph: Graph, x: Node, _: Node) -> Node:
    # (u - 1) x / log(u) with u = exp(x) as it was rounded, from the same section.
    one = graph.constant("r", 1)
    u = graph.apply("exp", x)
    less = graph.apply("subtract_r", u, one)
    near = graph.apply("multiply_r", less, graph.apply("divide", x, graph.apply("log", u)))
    near = graph.apply("select_r", graph.apply("equal_r", u, one), x, near)
    large = graph.apply("less_r", one, graph.apply("absolute_r", x))
    return graph.apply("select_r", large, less, near)


def _sigmoid(graph: Graph, x: Node, _: Node) -> Node:
    one = graph.constant("r", 1)
    other = graph.apply("exp", graph.apply("negative_r", x))
    return graph.apply("divide", one, graph.apply("add_r", one, other))


def _power(graph: Graph, x: Node, node: Node) -> Node:
    n = node.payload
    size = abs(n)
    if size == 0.5:
        found = graph.apply("sqrt", x)
    elif size == int(size) and size <= 1024:
        found = multiplied(graph, "multiply_r", x, int(size))
    else:
        found = _rounded_power(graph, x, size)
    return graph.apply("divide", graph.constant("r", 1), found) if n < 0 else found


def multiplied(graph: Graph, op: str, x: Node, n: int) -> Node:
    """x multiplied n > 0 times, through the squares of x."""
    found = None
    while True:
        if n % 2:
            found = x if found is None else graph.apply(op, found, x)
        n //= 2
        if not n:
            return found or x
        x = graph.apply(op, x, x)


def _rounded_power(graph: Graph, x: Node, n: float) -> Node:
    """exp(n log(x)), for n > 0; a whole n is beyond 1024, and even ones take the absolute value."""
    even = math.fmod(n, 2) == 0
    base = graph.apply("absolute_r", x) if even else x
    logarithm = graph.apply("multiply_r", graph.constant("r", n), graph.apply("log", base))
    return graph.apply("exp", logarithm)


_RULES: dict[str, Callable[[Graph, Node, Node], Node]] = {
    "sign": _sign,
    "floor": _floor,
    "log1p": _log1p,
    "expm1": _expm1,
    "sigmoid": _sigmoid,
    "detached": lambda graph, x, node: x,
    "power": _power,
}
