"""From a function of the user to its graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from sdpa import _core
from sdpa._programs._closures import Copies, Scan, foreign, unseen_arrays
from sdpa._programs._functions import converted
from sdpa._programs._graph import Graph, Node, Source, reached
from sdpa._programs._values import Traced, TracedArray, as_node, element, kind_of

Signature = tuple[tuple[Any, tuple[int, ...]], ...]
_OPERATIONS = "operators and functions of NumPy on one value per pair"
PAIR = ("batch", "head", "query", "key")


class Wrapper(NamedTuple):
    """What `_places` knows of a function around one of the user, which is its first argument."""

    names: tuple[str, ...]
    """The arguments that it adds before those of the user's function."""
    pair: Callable[..., tuple[int, ...]]
    """From its further options, these arguments, b, h, q and k to the b, h, q and k of the user."""


WRAPPERS: dict[Any, Wrapper] = {}


class Trace:
    """A function as a graph.

    Parameters
    ----------
    function : callable
    signature : sequence of (dtype, shape)
        Of its arguments.
    scan : Scan
        What it captures.
    lift : bool
        Whether captured arrays of another library become further arguments.
    in_place : bool
        Whether these stay in the function, which may then do more with them than index them.
    dtypes : sequence of (kind, dtype)
        See `Graph`.

    Attributes
    ----------
    root : Node
        The function's result.
    sources : list of Source
        The arrays, in the order of the core; the first `n_args` are arguments.
    pair : callable, None
        See `user_pair`.
    """

    def __init__(
        self,
        is_mask: bool,
        function: Callable[..., Any],
        signature: Signature,
        scan: Scan,
        *,
        lift: bool = False,
        in_place: bool = False,
        dtypes: tuple[tuple[str, Any], ...] = (),
    ) -> None:
        self.is_mask, self.in_place = is_mask, in_place
        self.graph = graph = Graph(argument_of(is_mask), name_of(function))
        graph.dtypes, graph.foreign = dict(dtypes), self._foreign
        graph.unseen = unseen_arrays(function, scan)
        self._names = dict(zip(map(id, scan.arrays), scan.names, strict=True))
        self._captured: dict[int, Source] = {}

        names = _argument_names(is_mask, function, len(signature), graph)
        given = [self._source(*each) for each in zip(names, signature, strict=True)]
        inputs = PAIR if is_mask else ("score", *PAIR)
        values = [Traced(graph, graph.input(name)) for name in inputs]
        values += [element(graph, source) for source in given]
        self.pair = user_pair(function)
        self.root = self._result(self._call(Copies(self._stand_in).of(function), values))

        read = {node.payload for node in reached([self.root]) if node.op.startswith("gather_")}
        captured = [source for source in self._captured.values() if source in read]
        lifted = [source for source in captured if lift and foreign(source.value)]
        rest = [source for source in captured if source not in lifted]
        self.sources = [*given, *lifted, *rest]
        self.n_args = len(given) + len(lifted)
        for number, source in enumerate(self.sources):
            source.number = number

    def _call(self, function: Callable[..., Any], values: list[Any]) -> Any:
        try:
            return function(*values)
        except TypeError as error:
            if str(error).startswith(f"{self.graph.argument}: "):
                raise
            raise self.graph.refused(_OPERATIONS, f"TypeError: {error}") from error

    def _source(
        self, name: str, described: tuple[Any, tuple[int, ...]], value: Any = None
    ) -> Source:
        dtype, shape = described
        kind = kind_of(dtype)
        if kind is None:
            raise self.graph.refused(
                "arrays of floats, integers or booleans", f"{name} of type {dtype}"
            )
        return Source(name, kind, tuple(shape), value)

    def _stand_in(self, array: Any) -> Any:
        """What stands for an array that the function captures."""
        return array if self.in_place and foreign(array) else self._element(array)

    def _element(self, array: Any) -> Any:
        source = self._captured.get(id(array))
        if source is None:
            known = foreign(array)
            described = known.describe(array) if known else (array.dtype, array.shape)
            name = self._names.get(id(array)) or f"array {len(self._captured)}"
            if not known:
                # One that is more than its numbers is refused, as it is among arguments.
                _core._arrays(**{f"{self.graph.argument}: {name}": array})
            source = self._captured[id(array)] = self._source(name, described, array)
        return element(self.graph, source)

    def _foreign(self, value: Any) -> Any:
        """What stands for an array of another library; None if the value is none."""
        if isinstance(value, (Traced, TracedArray)):
            return value
        known = foreign(value)
        if known is None:
            return None
        return known.convert(value).item() if known.is_constant(value) else self._element(value)

    def _result(self, value: Any) -> Node:
        graph = self.graph
        wanted = f"a {'boolean' if self.is_mask else 'score'} per pair as result"
        try:
            node = as_node(graph, value)
        except TypeError:
            raise graph.refused(wanted, f"{value!r:.60}") from None
        if self.is_mask and node.kind != "b":
            raise graph.refused(wanted, graph.text(node), "write != 0")
        if not self.is_mask and node.kind == "b":
            raise graph.refused(wanted, graph.text(node), "write np.where(mask, score, -np.inf)")
        return node if self.is_mask else converted(graph, node, "r")


def traced(
    is_mask: bool, function: Callable[..., Any], signature: Signature, scan: Scan, **options: Any
) -> Trace:
    """The trace of a function.

    Where the stand-ins of another library's arrays do not do, the function gets these themselves.
    """
    try:
        return Trace(is_mask, function, signature, scan, **options)
    except TypeError:
        if not any(foreign(array) for array in scan.arrays):
            raise
    return Trace(is_mask, function, signature, scan, in_place=True, **options)


def argument_of(is_mask: bool) -> str:
    """What messages begin with."""
    return "mask_mod" if is_mask else "score_mod"


def name_of(function: Any) -> str:
    """What a message calls the function."""
    while hasattr(function, "func"):
        function = function.args[0] if function.func in WRAPPERS else function.func
    return getattr(function, "__name__", type(function).__name__)


def user_pair(function: Any) -> Callable[..., tuple[int, ...]] | None:
    """From the arrays of a wrapped function and b, h, q, k to those that its user counts.

    None if the function is the user's own.
    """
    wrapper = WRAPPERS.get(getattr(function, "func", None))
    if wrapper is None:
        return None
    inner, options, n = user_pair(function.args[0]), function.args[1:], len(wrapper.names)

    def pair(arrays: Any, *at: int) -> tuple[int, ...]:
        at = wrapper.pair(options, arrays[:n], *at)
        return inner(arrays[n:], *at) if inner else at

    return pair


def _argument_names(is_mask: bool, function: Any, n_args: int, graph: Graph) -> list[str]:
    """The function's own names for its further arguments."""
    own = ["b", "h", "q", "k"] if is_mask else ["score", "b", "h", "q", "k"]
    args = f"{graph.argument[:-4]}_args"
    added = WRAPPERS.get(getattr(function, "func", None))
    if added:
        inner = _argument_names(is_mask, function.args[0], n_args - len(added.names), graph)
        return [*added.names, *inner]
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a compiled function
        return [f"{args}[{i}]" for i in range(n_args)]
    try:
        bound = signature.bind(*own, *range(n_args))
    except TypeError:
        rest = f" and of the {n_args} arrays in {args}" if n_args else ""
        raise TypeError(
            f"{graph.argument}: expected a function of ({', '.join(own)}){rest}, got "
            f"{graph.function}{signature}; pass an array in {args} for each further parameter"
        ) from None
    names = []
    for name, value in bound.arguments.items():
        several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        for i, each in enumerate(value if several else [value]):
            if isinstance(each, int):
                names.append(f"{name}[{i}]" if several else name)
    return names
