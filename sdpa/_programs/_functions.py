"""NumPy's functions on nodes, with NumPy's rules for mixed kinds; and PyTorch's names for them."""

from __future__ import annotations

import math
from collections.abc import Callable

from sdpa._programs._derivatives import power
from sdpa._programs._graph import Graph, Node
from sdpa._programs._lowering import multiplied

_ORDER = "bir"


def converted(graph: Graph, node: Node, kind: str) -> Node:
    """The node in another kind; to a boolean: whether it is not 0."""
    if node.kind == kind:
        return node
    if kind == "b":
        return graph.apply(f"not_equal_{node.kind}", node, graph.constant(node.kind, 0))
    return graph.apply(f"{_WORDS[kind]}_of_{node.kind}", node)


_WORDS = {"r": "real", "i": "integer"}


def _common(*nodes: Node, least: str = "b") -> str:
    return max((least, *(node.kind for node in nodes)), key=_ORDER.index)


def _arithmetic(name: str) -> Callable[[Graph, Node, Node], Node]:
    """An operation on integers and on reals; its third rule is that of two booleans."""
    logical = {
        "add": "logical_or",
        "multiply": "logical_and",
        "maximum": "logical_or",
        "minimum": "logical_and",
    }.get(name)

    def apply(graph: Graph, a: Node, b: Node) -> Node:
        kind = _common(a, b)
        if kind == "b":
            if logical:
                return graph.apply(logical, a, b)
            raise graph.refused(
                "a number", f"the boolean {graph.text(a)}", "write ^ or np.where(condition, 1, 0)"
            )
        return graph.apply(f"{name}_{kind}", converted(graph, a, kind), converted(graph, b, kind))

    return apply


def _negative(graph: Graph, x: Node) -> Node:
    if x.kind == "b":
        raise graph.refused("a number behind -", f"the boolean {graph.text(x)}", "write ~")
    return graph.apply(f"negative_{x.kind}", x)


def _absolute(graph: Graph, x: Node) -> Node:
    return x if x.kind == "b" else graph.apply(f"absolute_{x.kind}", x)


def _divide(graph: Graph, a: Node, b: Node) -> Node:
    return graph.apply("divide", converted(graph, a, "r"), converted(graph, b, "r"))


def _whole(name: str) -> Callable[[Graph, Node, Node], Node]:
    """// and %, which are the same in NumPy, in PyTorch and in the core for integers only."""

    def apply(graph: Graph, a: Node, b: Node) -> Node:
        if _common(a, b) == "r":
            given = graph.text(graph.make(name, a, b))
            raise graph.refused(
                "integers around // and %", given, "write np.floor(a / b), a - b * np.floor(a / b)"
            )
        return graph.apply(name, converted(graph, a, "i"), converted(graph, b, "i"))

    return apply


def _bitwise(name: str) -> Callable[[Graph, Node, Node], Node]:
    def apply(graph: Graph, a: Node, b: Node) -> Node:
        kind = _common(a, b)
        if kind == "r":
            given = graph.text(graph.make(f"bitwise_{name}", a, b))
            raise graph.refused(
                "integers or booleans around &, | and ^", given, "write parentheses: (a < b) & c"
            )
        op = f"{'logical' if kind == 'b' else 'bitwise'}_{name}"
        return graph.apply(op, converted(graph, a, kind), converted(graph, b, kind))

    return apply


def _invert(graph: Graph, x: Node) -> Node:
    if x.kind == "r":
        raise graph.refused("an integer or a boolean behind ~", graph.text(x), "compare it first")
    if x.kind == "b":
        return graph.apply("logical_not", x)
    return graph.apply("bitwise_xor", x, graph.constant("i", -1))


def _shift(name: str) -> Callable[[Graph, Node, Node], Node]:
    def apply(graph: Graph, a: Node, b: Node) -> Node:
        if "r" in (a.kind, b.kind):
            raise graph.refused("integers around << and >>", graph.text(graph.make(name, a, b)), "")
        return graph.apply(name, converted(graph, a, "i"), converted(graph, b, "i"))

    return apply


def _logical(name: str) -> Callable[..., Node]:
    def apply(graph: Graph, *nodes: Node) -> Node:
        return graph.apply(f"logical_{name}", *(converted(graph, x, "b") for x in nodes))

    return apply


def _less(graph: Graph, a: Node, b: Node) -> Node:
    return _ordered(graph, "less", a, b)


def _less_equal(graph: Graph, a: Node, b: Node) -> Node:
    return _ordered(graph, "less_equal", a, b)


def _turned(relation: Callable[[Graph, Node, Node], Node]) -> Callable[[Graph, Node, Node], Node]:
    def apply(graph: Graph, a: Node, b: Node) -> Node:
        found = relation(graph, b, a)
        graph.turned.add(found)
        return found

    return apply


def _ordered(graph: Graph, name: str, a: Node, b: Node) -> Node:
    """a < b or a <= b, exact for an integer beside a constant that is none."""
    kind = _common(a, b, least="i")
    for node, other, strict in ((a, b, math.floor), (b, a, math.ceil)):
        if node.kind == "i" and other.op == "constant_r" and abs(other.payload) < 2.0**62:
            # Beside a fraction, < and <= are one relation.
            whole = other.payload == int(other.payload)
            bound = graph.constant("i", strict(other.payload))
            pair = (node, bound) if node is a else (bound, node)
            return graph.apply(f"{name if whole else 'less_equal'}_i", *pair)
    return graph.apply(f"{name}_{kind}", converted(graph, a, kind), converted(graph, b, kind))


def _exact(graph: Graph, a: Node, b: Node) -> tuple[Node, Node]:
    """Both, a whole constant beside an integer as one: float32 does not tell large ones apart."""

    def beside(x: Node, other: Node) -> Node:
        whole = x.op == "constant_r" and x.payload.is_integer() and abs(x.payload) < 2.0**63
        return graph.constant("i", x.payload) if whole and other.kind != "r" else x

    return beside(a, b), beside(b, a)


def _equal(graph: Graph, a: Node, b: Node) -> Node:
    a, b = _exact(graph, a, b)
    kind = _common(a, b)
    if kind == "b":
        return graph.apply("logical_not", graph.apply("logical_xor", a, b))
    return graph.apply(f"equal_{kind}", converted(graph, a, kind), converted(graph, b, kind))


def _not_equal(graph: Graph, a: Node, b: Node) -> Node:
    a, b = _exact(graph, a, b)
    kind = _common(a, b)
    if kind == "b":
        return graph.apply("logical_xor", a, b)
    return graph.apply(f"not_equal_{kind}", converted(graph, a, kind), converted(graph, b, kind))


def where(graph: Graph, condition: Node, yes: Node, no: Node) -> Node:
    """NumPy's where, of three arguments."""
    condition, kind = converted(graph, condition, "b"), _common(yes, no)
    if kind == "b":
        first = graph.apply("logical_and", condition, yes)
        other = graph.apply("logical_not", condition)
        return graph.apply("logical_or", first, graph.apply("logical_and", other, no))
    branches = (converted(graph, branch, kind) for branch in (yes, no))
    return graph.apply(f"select_{kind}", condition, *branches)


def _power(graph: Graph, a: Node, b: Node) -> Node:
    if b.is_constant:
        n = b.payload
        if a.kind != "r" and b.kind != "r" and n >= 0:
            x = converted(graph, a, "i")
            return multiplied(graph, "multiply_i", x, int(n)) if n else graph.constant("i", 1)
        if math.isfinite(n):
            return power(graph, converted(graph, a, "r"), float(n))
    if a.is_constant and a.payload > 0:
        if a.is_value(2) and a.kind == b.kind == "i":
            return graph.apply("left_shift", graph.constant("i", 1), b)
        if _common(a, b) == "r":
            rate = graph.constant("r", math.log(a.payload))
            return graph.apply("exp", graph.apply("multiply_r", rate, converted(graph, b, "r")))
    given = f"{graph.text(a)} ** {graph.text(b)}"
    raise graph.refused(
        "a constant as base (a float above 0, or 2) or exponent of **",
        given,
        "write np.exp(exponent * np.log(base))",
    )


def _unary(name: str) -> Callable[[Graph, Node], Node]:
    return lambda graph, x: graph.apply(name, converted(graph, x, "r"))


def _sign(graph: Graph, x: Node) -> Node:
    if x.kind == "r":
        return graph.apply("sign", x)
    x, zero = converted(graph, x, "i"), graph.constant("i", 0)
    one, other = graph.constant("i", 1), graph.constant("i", -1)
    below = graph.apply("select_i", graph.apply("less_i", x, zero), other, zero)
    return graph.apply("select_i", graph.apply("less_i", zero, x), one, below)


def _floor(graph: Graph, x: Node) -> Node:
    return graph.apply("floor", x) if x.kind == "r" else x


def _ceil(graph: Graph, x: Node) -> Node:
    if x.kind != "r":
        return x
    return _negative(graph, graph.apply("floor", _negative(graph, x)))


def _trunc(graph: Graph, x: Node) -> Node:
    if x.kind != "r":
        return x
    below = graph.apply("less_r", x, graph.constant("r", 0))
    return graph.apply("select_r", below, _ceil(graph, x), _floor(graph, x))


def _scaled(name: str, inside: float = 1, outside: float = 1) -> Callable[[Graph, Node], Node]:
    """outside f(inside x)."""

    def apply(graph: Graph, x: Node) -> Node:
        x = graph.apply("multiply_r", converted(graph, x, "r"), graph.constant("r", inside))
        return graph.apply("multiply_r", graph.apply(name, x), graph.constant("r", outside))

    return apply


def _real_power(n: float) -> Callable[[Graph, Node], Node]:
    return lambda graph, x: power(graph, converted(graph, x, "r"), n)


def _relu(graph: Graph, x: Node) -> Node:
    return FUNCTIONS["maximum"](graph, x, graph.constant("i" if x.kind != "r" else "r", 0))


def _softplus(graph: Graph, x: Node) -> Node:
    x = converted(graph, x, "r")
    rest = graph.apply("exp", _negative(graph, _absolute(graph, x)))
    return graph.apply("add_r", _relu(graph, x), graph.apply("log1p", rest))


def _silu(graph: Graph, x: Node) -> Node:
    x = converted(graph, x, "r")
    return graph.apply("multiply_r", x, graph.apply("sigmoid", x))


# By NumPy's names.
FUNCTIONS: dict[str, Callable[..., Node]] = {
    name: _arithmetic(name) for name in ("add", "subtract", "multiply", "minimum", "maximum")
} | {
    "negative": _negative,
    "positive": lambda graph, x: x,
    "absolute": _absolute,
    "fabs": lambda graph, x: _absolute(graph, converted(graph, x, "r")),
    "divide": _divide,
    "floor_divide": _whole("floor_divide"),
    "remainder": _whole("remainder"),
    "power": _power,
    "float_power": lambda graph, a, b: _power(graph, converted(graph, a, "r"), b),
    "bitwise_and": _bitwise("and"),
    "bitwise_or": _bitwise("or"),
    "bitwise_xor": _bitwise("xor"),
    "invert": _invert,
    "left_shift": _shift("left_shift"),
    "right_shift": _shift("right_shift"),
    "logical_and": _logical("and"),
    "logical_or": _logical("or"),
    "logical_xor": _logical("xor"),
    "logical_not": _logical("not"),
    "less": _less,
    "less_equal": _less_equal,
    "greater": _turned(_less),
    "greater_equal": _turned(_less_equal),
    "equal": _equal,
    "not_equal": _not_equal,
    "where": where,
    "sqrt": _unary("sqrt"),
    "exp": _unary("exp"),
    "log": _unary("log"),
    "tanh": _unary("tanh"),
    "log1p": _unary("log1p"),
    "expm1": _unary("expm1"),
    "exp2": _scaled("exp", inside=math.log(2)),
    "log2": _scaled("log", outside=1 / math.log(2)),
    "log10": _scaled("log", outside=1 / math.log(10)),
    "square": lambda graph, x: FUNCTIONS["multiply"](graph, x, x),
    "reciprocal": lambda graph, x: _divide(graph, graph.constant("r", 1), x),
    "sign": _sign,
    "floor": _floor,
    "ceil": _ceil,
    "trunc": _trunc,
    "sigmoid": _unary("sigmoid"),
    "softplus": _softplus,
    "silu": _silu,
    "relu": _relu,
    "rsqrt": _real_power(-0.5),
}

# Other names: of NumPy's ufuncs, of PyTorch's functions, of methods of tensors.
ALIASES = {
    "true_divide": "divide",
    "mod": "remainder",
    "bitwise_not": "invert",
    "sub": "subtract",
    "mul": "multiply",
    "div": "divide",
    "neg": "negative",
    "abs": "absolute",
    "pow": "power",
    "eq": "equal",
    "ne": "not_equal",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
    "clamp_min": "maximum",
    "clamp_max": "minimum",
    "bitwise_left_shift": "left_shift",
    "bitwise_right_shift": "right_shift",
    "fix": "trunc",
    "sgn": "sign",
}
