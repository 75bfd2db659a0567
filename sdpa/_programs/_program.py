"""Programs: functions of the user that were traced, and what the core gets of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from sdpa import _core
from sdpa._programs._closures import FOREIGN, Copies, Scan, foreign, unseen_arrays
from sdpa._programs._codes import Constants, Effect, code
from sdpa._programs._derivatives import derivative, product, total
from sdpa._programs._functions import converted
from sdpa._programs._graph import Graph, Node, reached
from sdpa._programs._lowering import lowered
from sdpa._programs._values import Traced, TracedArray, as_node, element, kind_of

_LETTERS = {"r": "f", "i": "i", "b": "b"}
_REMEMBERED = 512

Array = np.ndarray[Any, Any]
Signature = tuple[tuple[Any, tuple[int, ...]], ...]
Code = bytes | None


class Prepared(NamedTuple):
    """What the core gets of a program; src/program.h describes codes."""

    codes: tuple[Code, ...]
    reals: bytes
    integers: bytes
    arrays: tuple[Any, ...]
    kinds: str
    n_args: int
    masks: bool
    names: tuple[str, ...]
    name: str


class Trace:
    """A function as a graph.

    Parameters
    ----------
    is_mask : bool
    function : callable
    signature : sequence of (dtype, shape)
        Of its arguments.
    """

    def __init__(
        self, is_mask: bool, function: Callable[..., Any], signature: Signature, scan: Scan
    ) -> None:
        self.is_mask, self.function, self.signature = is_mask, function, signature
        self.graph = Graph(_argument(is_mask), name_of(function))
        self.kinds = ""
        self.held: list[Any] = []
        self._numbers: dict[int, int] = {}
        self.graph.foreign = self._foreign
        self.graph.unseen = unseen_arrays(function, scan)
        self.captured_names = {
            id(array): name for array, name in zip(scan.arrays, scan.names, strict=True)
        }
        names = _argument_names(is_mask, function, len(signature), self.graph)
        args = [self._array(*each) for each in zip(names, signature, strict=True)]
        inputs = [] if is_mask else ["score"]
        inputs += ["batch", "head", "query", "key"]
        values = [Traced(self.graph, self.graph.input(name)) for name in inputs]
        traced = Copies(self._captured).of(function)
        self.root = self._result(traced(*values, *args))

    def _array(self, name: str, described: tuple[Any, tuple[int, ...]]) -> Any:
        """A new array of the program."""
        dtype, shape = described
        kind = kind_of(dtype)
        if kind is None:
            raise self.graph.refused(
                "arrays of floats, integers or booleans", f"{name} of {dtype}", ""
            )
        number = len(self.kinds)
        self.kinds += _LETTERS[kind]
        self.graph.names.append(name)
        return element(self.graph, number, kind, shape, [None] * len(shape))

    def _captured(self, array: Any) -> Any:
        """What stands for an array that the function captures."""
        number = self._numbers.get(id(array))
        known = foreign(array)
        described = known.describe(array) if known else (array.dtype, array.shape)
        if number is None:
            self._numbers[id(array)] = len(self.kinds)
            self.held.append(array)
            name = self.captured_names.get(id(array)) or f"array {len(self.kinds)}"
            return self._array(name, described)
        shape = described[1]
        kind = kind_of(described[0]) or ""
        return element(self.graph, number, kind, shape, [None] * len(shape))

    def _foreign(self, value: Any) -> Any:
        """What stands for an array of another library; None if the value is none."""
        if isinstance(value, (Traced, TracedArray)):
            return value
        known = foreign(value)
        if known is None:
            return None
        return known.convert(value).item() if known.is_constant(value) else self._captured(value)

    def _result(self, value: Any) -> Node:
        graph = self.graph
        wanted = "a boolean per pair" if self.is_mask else "a score per pair"
        if not isinstance(value, (Traced, bool, int, float, np.generic)):
            value = graph.foreign(value) if graph.foreign(value) is not None else value
        try:
            node = as_node(graph, value)
        except TypeError:
            raise graph.refused(f"{wanted} as result", repr(value)[:60], "return it") from None
        if self.is_mask and node.kind != "b":
            raise graph.refused(f"{wanted} as result", graph.text(node), "write != 0")
        if not self.is_mask and node.kind == "b":
            raise graph.refused(
                f"{wanted} as result", graph.text(node), "write np.where(condition, score, -np.inf)"
            )
        return node if self.is_mask else converted(graph, node, "r")


def _argument(is_mask: bool) -> str:
    return "mask_mod" if is_mask else "score_mod"


def name_of(function: Any) -> str:
    """What a message calls the function."""
    while hasattr(function, "func"):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _argument_names(
    is_mask: bool, function: Callable[..., Any], n_args: int, graph: Graph
) -> list[str]:
    """The function's own names for its further arguments."""
    own = ["b", "h", "q", "k"] if is_mask else ["score", "b", "h", "q", "k"]
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a compiled function
        return [f"{graph.argument[:-3]}args[{i}]" for i in range(n_args)]
    try:
        bound = signature.bind(*own, *range(n_args))
    except TypeError:
        expected = f"a function of ({', '.join(own)}) and {n_args} arrays"
        raise TypeError(
            f"{graph.argument}: expected {expected}, got {graph.function}{signature}; pass as many "
            f"arrays in {graph.argument[:-3]}args as it takes"
        ) from None
    names = []
    for name, value in bound.arguments.items():
        rest = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        values = value if rest else [value]
        names += [f"{name}[{i}]" if rest else name for i, each in enumerate(values)
                  if isinstance(each, int)]  # fmt: skip
    return names


# ------------------------------------------------------------------------------- codes


class Codes(NamedTuple):
    """What depends on the expression only."""

    codes: tuple[Code, ...]
    reals: bytes
    integers: bytes


_CODES: dict[Any, Codes] = {}


def codes_of(trace: Trace) -> Codes:
    """The codes of a trace, compiled once for each expression."""
    graph, n_args = trace.graph, len(trace.signature)
    nodes = reached([trace.root])
    places = {node: place for place, node in enumerate(nodes)}
    key = (
        trace.is_mask,
        trace.kinds[:n_args],
        *(
            (
                node.op,
                node.payload.hex() if isinstance(node.payload, float) else node.payload,
                *(places[arg] for arg in node.args),
            )
            for node in nodes
        ),
    )
    found = _CODES.get(key)
    if found is None:
        constants = Constants()
        variants = _mask_effects(trace) if trace.is_mask else _score_effects(trace)
        codes: list[Code] = []
        for effects in variants:
            if effects is None:
                codes.append(None)
                continue
            simple = lowered(graph, [x for e in effects for x in (e.node, e.at) if x])
            effects = [e._replace(node=simple[e.node], at=e.at and simple[e.at]) for e in effects]
            codes.append(code(graph, effects, constants))
        found = _remember(_CODES, key, Codes(tuple(codes), *constants.to_bytes()))
    return found


def _mask_effects(trace: Trace) -> list[list[Effect] | None]:
    return [[Effect("output", 0, trace.root)]]


def _score_effects(trace: Trace) -> list[list[Effect] | None]:
    """value, slope, tangent, second, scatter, scatter_second."""
    graph, root, n_args = trace.graph, trace.root, len(trace.signature)
    parts = Derivatives(graph, root, n_args)
    zero = graph.constant("r", 0)
    value = Effect("output", 0, root)
    slope = Effect("output", 1, parts.slope or zero)
    tangent = Effect("output", 2, parts.tangent or zero)
    bend = derivative(graph, parts.tangent, graph.input("score")) if parts.tangent else None
    variants: list[list[Effect] | None] = [
        [value],
        [value, slope],
        [tangent],
        [slope, tangent, Effect("output", 3, bend or zero)],
    ]
    if "f" not in trace.kinds[:n_args]:
        return [*variants, None, None]
    first: list[Effect] = []
    second: list[Effect] = []
    upstream, above = graph.input("upstream"), graph.input("second")
    for leaf in parts.leaves:
        by = derivative(graph, root, leaf)
        onward = derivative(graph, parts.tangent, leaf) if parts.tangent else None
        once = product(graph, by, upstream)
        twice = total(graph, product(graph, by, above), product(graph, onward, upstream))
        for effects, change in ((first, once), (second, twice)):
            if change is not None:
                effects.append(Effect("scatter", leaf.payload, change, leaf.args[0]))
    return [*variants, first, second]


class Derivatives:
    """The slope of a score and its tangent, when the score and the arguments move."""

    def __init__(self, graph: Graph, root: Node, n_args: int) -> None:
        score = graph.input("score")
        self.leaves = [
            node for node in reached([root]) if node.op == "gather_r" and node.payload < n_args
        ]
        self.slope = derivative(graph, root, score)
        self.tangent = product(graph, self.slope, graph.input("tangent"))
        for leaf in self.leaves:
            moved = graph.make("gather_tangent", *leaf.args, payload=leaf.payload, kind="r")
            self.tangent = total(
                graph, self.tangent, product(graph, derivative(graph, root, leaf), moved)
            )


def _may_mask(trace: Trace) -> bool:
    """Whether a score may become -inf because the function means it so."""
    for node in reached([trace.root]):
        if node.op == "constant_r" and not np.isfinite(node.payload):
            return True
        if node.op in ("log", "log1p"):
            return True
        if node.op == "power" and node.payload < 0:
            return True
        if node.op == "divide" and not (node.args[1].is_constant and node.args[1].payload):
            return True
    return False


# ------------------------------------------------------------------------------- calls


def _remember(cache: dict[Any, Any], key: Any, value: Any) -> Any:
    """Keep the value, and of more than _REMEMBERED ones the latest."""
    if len(cache) >= _REMEMBERED:
        cache.pop(next(iter(cache)), None)
    cache[key] = value
    return value


class Entry(NamedTuple):
    """A traced function, and which of the arrays that it captures the program reads."""

    codes: Codes
    kinds: str
    masks: bool
    names: tuple[str, ...]
    name: str
    sources: tuple[int, ...] | None
    """Positions among `Scan.arrays`; None if they are held."""
    held: tuple[Any, ...]


_ENTRIES: dict[Any, Entry] = {}


def given_arrays(is_mask: bool, args: Any) -> tuple[tuple[Any, ...], Signature]:
    """The arguments as arrays, with their types and shapes."""
    if args is None:
        return (), ()
    name = f"{_argument(is_mask)[:-3]}args"
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"{name}: expected a tuple of arrays, got {args!r:.60}; write ({name},)")
    if all(type(x) is np.ndarray for x in args):
        arrays = tuple(args)
    else:
        named = {f"{name}[{i}]": x for i, x in enumerate(args)}
        arrays = tuple(_core._arrays(**named))
    return arrays, tuple([(x.dtype, x.shape) for x in arrays])


def entry_of(trace: Trace, scan: Scan) -> Entry:
    """What is kept of a trace."""
    places = {id(array): place for place, array in enumerate(scan.arrays)}
    sources = [places.get(id(array)) for array in trace.held]
    return Entry(
        codes_of(trace),
        trace.kinds,
        False if trace.is_mask else _may_mask(trace),
        tuple(trace.graph.names),
        trace.graph.function,
        None if None in sources else tuple(sources),  # type: ignore[arg-type]
        tuple(trace.held) if None in sources else (),
    )


def prepare(is_mask: bool, function: Any, args: Any) -> Prepared:
    """What the core needs to run a function on these arguments."""
    arrays, signature = given_arrays(is_mask, args)
    if not callable(function):
        raise TypeError(
            f"{_argument(is_mask)}: expected a function of "
            f"({'' if is_mask else 'score, '}b, h, q, k, *args), got {function!r:.60}"
        )
    scan = Scan(function)
    key = (is_mask, signature, *scan.tokens)
    entry = None if scan.unknown else _ENTRIES.get(key)
    if entry is None:
        entry = entry_of(Trace(is_mask, function, signature, scan), scan)
        if not scan.unknown:
            _remember(_ENTRIES, key, entry)
    if entry.sources is None:
        captured = entry.held
    else:
        captured = tuple([scan.arrays[place] for place in entry.sources])
    if FOREIGN:
        captured = tuple([x if type(x) is np.ndarray else _as_array(x) for x in captured])
    return Prepared(
        *entry.codes[:3],
        arrays + captured,
        entry.kinds,
        len(arrays),
        entry.masks,
        entry.names,
        entry.name,
    )


def _as_array(value: Any) -> Any:
    known = foreign(value)
    return known.convert(value) if known else np.asarray(value)
