"""The codes of a program: what the core computes in each pass."""

from __future__ import annotations

from typing import Any, NamedTuple

from sdpa._programs._codes import Constants, Effect, code
from sdpa._programs._derivatives import derivative, product, total
from sdpa._programs._graph import Graph, Node, Source, reached
from sdpa._programs._lowering import lowered
from sdpa._programs._trace import Trace

Effects = list[Effect]
_REMEMBERED = 512


class Codes(NamedTuple):
    """The codes, and the numbers that they share; src/program.h describes them."""

    codes: tuple[bytes | None, ...]
    reals: bytes
    integers: bytes


_CODES: dict[Any, Codes] = {}


def remembered(cache: dict[Any, Any], key: Any, value: Any) -> Any:
    """The value, kept in the cache, which forgets its oldest."""
    surplus = len(cache) + 1 - _REMEMBERED
    if surplus > 0:
        # A list, because other threads may change the cache between two steps of an iterator.
        for oldest in list(cache)[:surplus]:
            cache.pop(oldest, None)
    cache[key] = value
    return value


def codes_of(trace: Trace) -> Codes:
    """The codes of a trace, compiled once for each expression."""
    key = _shape(trace)
    found = _CODES.get(key)
    if found is None:
        constants = Constants()
        every = _mask_effects(trace.root) if trace.is_mask else _score_effects(trace)
        codes = tuple([None if e is None else _code(trace.graph, e, constants) for e in every])
        found = remembered(_CODES, key, Codes(codes, *constants.to_bytes()))
    return found


def _shape(trace: Trace) -> Any:
    """What two traces with the same codes share."""
    nodes = reached([trace.root])
    places = {node: place for place, node in enumerate(nodes)}

    def plain(payload: Any) -> Any:
        if isinstance(payload, float):
            return payload.hex()
        if isinstance(payload, tuple):
            return payload[0].number, payload[1]
        return payload.number if isinstance(payload, Source) else payload

    steps = [(node.op, plain(node.payload), *[places[arg] for arg in node.args]) for node in nodes]
    floats = any(source.kind == "r" for source in trace.sources[: trace.n_args])
    return trace.is_mask, trace.n_args, floats, *steps


def _code(graph: Graph, effects: Effects, constants: Constants) -> bytes:
    simple = lowered(graph, [x for e in effects for x in (e.node, e.at) if x])
    effects = [e._replace(node=simple[e.node], at=e.at and simple[e.at]) for e in effects]
    return code(graph, effects, constants)


def _mask_effects(root: Node) -> list[Effects | None]:
    return [[Effect("output", 0, root)]]


def _score_effects(trace: Trace) -> list[Effects | None]:
    """value, slope, tangent, second, scatter, scatter_second."""
    moved = Derivatives(trace.graph, trace.root, trace.n_args)
    zero = trace.graph.constant("r", 0)
    value = Effect("output", 0, trace.root)
    slope, tangent, bend = (
        Effect("output", number, node or zero)
        for number, node in enumerate((moved.slope, moved.tangent, moved.bend), start=1)
    )
    variants: list[Effects | None] = [[value], [value, slope], [tangent], [slope, tangent, bend]]
    if not any(source.kind == "r" for source in trace.sources[: trace.n_args]):
        return [*variants, None, None]
    return [*variants, *(_scattered(changes) for changes in moved.changes())]


def _scattered(changes: list[tuple[Node, Node]]) -> Effects:
    return [Effect("scatter", leaf.payload.number, x, leaf.args[0]) for leaf, x in changes]


class Derivatives:
    """What moves with a score and with elements of floating arguments; None where nothing does.

    Attributes
    ----------
    slope : df / dscore
    tangent : the change of f when the score moves by `tangent`, and arguments by their tangents
    bend : d tangent / dscore
    leaves : the elements of arguments that f reads
    """

    def __init__(self, graph: Graph, root: Node, n_args: int) -> None:
        self._graph, self._root = graph, root
        score = graph.input("score")
        self.leaves = [
            node
            for node in reached([root])
            if node.op == "gather_r" and node.payload.number < n_args
        ]
        self.slope = derivative(graph, root, score)
        self.tangent = product(graph, self.slope, graph.input("tangent"))
        for leaf in self.leaves:
            own = graph.make("gather_tangent", *leaf.args, payload=leaf.payload, kind="r")
            change = product(graph, derivative(graph, root, leaf), own)
            self.tangent = total(graph, self.tangent, change)
        self.bend = self.tangent and derivative(graph, self.tangent, score)

    def changes(self) -> tuple[list[tuple[Node, Node]], list[tuple[Node, Node]]]:
        """(leaf, its gradient): of upstream f, and of second f + upstream tangent."""
        graph, upstream = self._graph, self._graph.input("upstream")
        first, both = [], []
        for leaf in self.leaves:
            by = derivative(graph, self._root, leaf)
            onward = self.tangent and derivative(graph, self.tangent, leaf)
            once = product(graph, by, upstream)
            twice = total(
                graph, product(graph, by, graph.input("second")), product(graph, onward, upstream)
            )
            first += [(leaf, once)] if once else []
            both += [(leaf, twice)] if twice else []
        return first, both
