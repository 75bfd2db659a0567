"""What a function of the user sees while it is traced: a value per pair, and whole arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from sdpa._programs._functions import ALIASES, FUNCTIONS, converted
from sdpa._programs._graph import Graph, Node, Source
from sdpa._programs._torch import names as torch_names

_KINDS = {"f": "r", "i": "i", "u": "i", "b": "b"}
_DTYPES = {"r": np.dtype(np.float64), "i": np.dtype(np.int64), "b": np.dtype(np.bool_)}
_TRUTH = (
    "write np.where(condition, a, b) for if, & | ~ for and, or, not, (a < b) & (b < c) for "
    "a < b < c, np.maximum and np.minimum for max and min"
)
_KNOWN = "functions of NumPy that programs have"
_HELP = "see help(sdpa.score_program) for their list"
_ARRAYS = "give an index for each of its axes"


def kind_of(dtype: Any) -> str | None:
    """The kind of values of a type of NumPy, of Python or of another library; None if unknown."""
    try:
        found = np.dtype(dtype)
        return "r" if found.name == "bfloat16" else _KINDS.get(found.kind)
    except TypeError:
        name = str(dtype).rpartition(".")[2]
        words = {"float": "r", "bfloat": "r", "double": "r", "half": "r", "bool": "b"}
        words |= {"int": "i", "uint": "i", "long": "i", "short": "i"}
        return words.get(name.rstrip("0123456789"))


class Traced:
    """One value for each pair of a query and a key: a real number, an integer or a boolean.

    It takes part in Python's arithmetic and in functions of NumPy, which build the program.
    """

    __slots__ = ("_graph", "_node")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, graph: Graph, node: Node) -> None:
        self._graph, self._node = graph, node

    def __repr__(self) -> str:
        return self._graph.text(self._node)

    # ------------------------------------------------------------------------- protocols

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *args: Any, **options: Any) -> Any:
        name = f"np.{ufunc.__name__}"
        if method != "__call__":
            name += f".{method}"
        return _called(self._graph, name, args, options)

    def __array_function__(
        self, function: Callable[..., Any], types: Any, args: Any, options: Any
    ) -> Any:
        return _called(self._graph, f"np.{function.__name__}", args, options)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), options: Any = None
    ) -> Any:
        return _torch_called(function, args, options or {})

    def __getattr__(self, name: str) -> Any:
        graph, node = self._graph, self._node
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _METHODS:
            word = "Tensor.where" if name == "where" else name
            return lambda *args, **options: _called(graph, f"torch.{word}", (self, *args), options)
        if name in ("dtype", "device", "shape", "ndim"):
            return {
                "dtype": graph.dtypes.get(node.kind, _DTYPES[node.kind]),
                "device": "cpu",
                "shape": (),
                "ndim": 0,
            }[name]
        raise graph.refused(_KNOWN, f"({self}).{name}", _HELP)

    def _refused(self, expected: str, got: str, remedy: str) -> NoReturn:
        raise self._graph.refused(expected, got, remedy)

    def __bool__(self) -> bool:
        self._refused("one expression for all pairs", f"the truth of {self}", _TRUTH)

    def __int__(self) -> int:
        self._refused("a value per pair", f"int({self})", "write .astype(int)")

    def __float__(self) -> float:
        self._refused(
            "a value per pair and functions of NumPy",
            f"one number made of {self}",
            "write np.exp for math.exp, .astype(float) for float",
        )

    def __index__(self) -> int:
        self._unseen()

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        self._unseen()

    def _unseen(self) -> NoReturn:
        self._refused(
            "arrays that are arguments, or that the function's closure, globals or defaults name",
            f"{self} as an index or element of {self._graph.unseen or 'another array'}",
            f"pass it in {self._graph.argument[:-3]}args",
        )

    def __round__(self, *_: Any) -> NoReturn:
        self._refused("functions of NumPy", f"round({self})", "write np.floor(x + 0.5)")

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __iter__(self) -> Iterator[Any]:
        self._refused("no loop over a value per pair", f"iteration over {self}", "")

    def __len__(self) -> int:
        self._refused("a value per pair", f"len({self})", "take the len of an array")

    def __getitem__(self, index: Any) -> Any:
        # An index that is a value or an array must not be compared.
        if index is ... or (isinstance(index, tuple) and not index):
            return self
        self._refused("an array to index", f"({self})[...]", "it has one value per pair")

    # ------------------------------------------------------------------------- operators

    def __neg__(self) -> Any:
        return _called(self._graph, "negative", (self,))

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return _called(self._graph, "absolute", (self,))

    def __invert__(self) -> Any:
        return _called(self._graph, "invert", (self,))


def _binary(name: str, swapped: bool = False) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        return _called(self._graph, name, (other, self) if swapped else (self, other))

    return method


_ARITHMETIC = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "power",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "left_shift",
    "rshift": "right_shift",
}
_COMPARISONS = {
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
    "eq": "equal",
    "ne": "not_equal",
}
for _name, _word in _ARITHMETIC.items():
    setattr(Traced, f"__{_name}__", _binary(_word))
    setattr(Traced, f"__r{_name}__", _binary(_word, swapped=True))
for _name, _word in _COMPARISONS.items():
    setattr(Traced, f"__{_name}__", _binary(_word))


class TracedArray:
    """An array of the program: it is indexed, and nothing else is done with it as a whole.

    Parameters
    ----------
    indices : sequence of Node or None
        One for each axis; None for an axis that this part of the array still has.
    """

    def __init__(self, graph: Graph, source: Source, indices: Sequence[Node | None]) -> None:
        self._graph, self._source, self._indices = graph, source, tuple(indices)
        self._open = [axis for axis, node in enumerate(indices) if node is None]
        self.shape = tuple([source.shape[axis] for axis in self._open])
        self.ndim = len(self.shape)
        self.dtype = graph.dtypes.get(source.kind, _DTYPES[source.kind])
        self.device = "cpu"

    def __repr__(self) -> str:
        if len(self._open) == len(self._indices):
            return self._source.name
        given = [":" if node is None else self._graph.text(node) for node in self._indices]
        return f"{self._source.name}[{', '.join(given)}]"

    def __len__(self) -> int:
        return self.shape[0]

    def dim(self) -> int:
        """The number of axes, in PyTorch's words."""
        return self.ndim

    def numel(self) -> int:
        """The number of elements, in PyTorch's words."""
        return int(np.prod(self.shape))

    @property
    def size(self) -> Any:
        """The number of elements, as NumPy has it; called, the shape, as PyTorch has it."""
        return _Size(self.numel(), self.shape)

    def __getitem__(self, index: Any) -> Any:
        given = list(index) if isinstance(index, tuple) else [index]
        n_given = sum(item is not ... for item in given)
        if n_given > self.ndim:
            self._refuse(f"at most {self.ndim} indices of {self}", f"{n_given}", "")
        if any(item is ... for item in given):
            at = next(i for i, item in enumerate(given) if item is ...)
            given[at : at + 1] = [slice(None)] * (self.ndim - n_given)
        indices = list(self._indices)
        for axis, item in zip(self._open, given, strict=False):
            if not (isinstance(item, slice) and item == slice(None)):
                indices[axis] = self._index(item, self._source.shape[axis])
        return element(self._graph, self._source, indices)

    def _index(self, item: Any, size: int) -> Node:
        if isinstance(item, (slice, TracedArray, list)) or item is None:
            self._refuse("one integer per axis", f"{item!r:.60} as an index of {self}")
        node = as_node(self._graph, item)
        if node.kind != "i":
            self._refuse("integers as indices", f"{self._graph.text(node)} as an index of {self}",
                         "write .astype(int)")  # fmt: skip
        if not node.is_constant:
            return node
        position = node.payload + (size if node.payload < 0 else 0)
        if not 0 <= position < size:
            raise IndexError(
                f"{self._graph.argument}: expected indices below {size} in "
                f"{self._graph.function}, got {node.payload} as an index of {self}"
            )
        return self._graph.constant("i", position)

    def __iter__(self) -> Iterator[Any]:
        return (self[position] for position in range(len(self)))

    def _refuse(self, expected: str, got: str, remedy: str = _ARRAYS) -> NoReturn:
        raise self._graph.refused(expected, got, remedy)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *_: Any, **__: Any) -> Any:
        self._refuse("one value per pair", f"{self} in np.{ufunc.__name__}")

    def __array_function__(self, function: Callable[..., Any], *_: Any) -> Any:
        self._refuse("one value per pair", f"{self} in np.{function.__name__}")

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), options: Any = None
    ) -> Any:
        return _torch_called(function, args, options or {})

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("one value per pair", f"{self} as a whole")

    def __bool__(self) -> bool:
        self._refuse("one value per pair", f"the truth of {self}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse("one value per pair", f"{self}.{name}")


class _Size(int):
    def __new__(cls, number: int, shape: tuple[int, ...]) -> _Size:
        found = super().__new__(cls, number)
        found._shape = shape
        return found

    _shape: tuple[int, ...]

    def __call__(self, axis: int | None = None) -> Any:
        return self._shape if axis is None else self._shape[axis]


def _whole_array(where: str) -> Callable[..., Any]:
    def method(self: TracedArray, *_: Any) -> Any:
        self._refuse("one value per pair", f"{self} in {where}")

    return method


for _name in _ARITHMETIC:
    setattr(TracedArray, f"__{_name}__", _whole_array("arithmetic"))
    setattr(TracedArray, f"__r{_name}__", _whole_array("arithmetic"))
for _name in ("neg", "pos", "abs", "invert"):
    setattr(TracedArray, f"__{_name}__", _whole_array("arithmetic"))
for _name in _COMPARISONS:
    setattr(TracedArray, f"__{_name}__", _whole_array("a comparison"))
TracedArray.__hash__ = None  # type: ignore[method-assign, assignment]


def element(graph: Graph, source: Source, indices: Sequence[Node | None] | None = None) -> Any:
    """The element of an array if every axis has its index, or the part that remains."""
    indices = [None] * len(source.shape) if indices is None else indices
    known = [node for node in indices if node is not None]
    if len(known) == len(source.shape):
        return Traced(graph, graph.gather(source, known))
    return TracedArray(graph, source, indices)


# ------------------------------------------------------------------------------- calls


def as_node(graph: Graph, value: Any) -> Node:
    """The node of a traced value or of a number; a TypeError for anything else."""
    if isinstance(value, Traced):
        return value._node
    if isinstance(value, TracedArray):
        raise graph.refused("one value per pair", repr(value), _ARRAYS)
    if isinstance(value, (bool, np.bool_)):
        return graph.constant("b", value)
    if isinstance(value, (int, np.integer)):
        return graph.constant("i", value)
    if isinstance(value, (float, np.floating)):
        return graph.constant("r", value)
    foreign = graph.foreign(value)
    if foreign is not None:
        return as_node(graph, foreign)
    if isinstance(value, (np.ndarray, np.generic)):
        kind = kind_of(value.dtype)
        if not value.ndim and kind:
            return graph.constant(kind, value.item())
    if isinstance(value, np.ndarray):
        got = f"an array of shape {value.shape} and {value.dtype}"
        raise graph.refused("one value per pair", got, _ARRAYS)
    raise graph.refused("numbers and values per pair", repr(value)[:60], "")


def _called(graph: Graph, name: str, args: Any, options: dict[str, Any] | None = None) -> Any:
    """The result of a function by its name in NumPy or PyTorch, on traced values and numbers."""
    library, _, word = name.partition(".")
    special = _TORCH if library == "torch" else _SPECIAL
    if word in special:
        return Traced(graph, special[word](graph, *args, **options or {}))
    word = ALIASES.get(word or library, word or library)
    if word not in FUNCTIONS:
        shown = ", ".join(f"{arg!r:.60}" for arg in args)
        raise graph.refused(_KNOWN, f"{name}({shown})", _HELP)
    for option, value in (options or {}).items():
        if value is not False:  # PyTorch passes inplace=False
            raise graph.refused(f"{name} without options", f"{option}={value!r}")
    nodes = [as_node(graph, arg) for arg in args]
    return Traced(graph, FUNCTIONS[word](graph, *nodes))


def _torch_called(function: Callable[..., Any], args: Any, options: dict[str, Any]) -> Any:
    name = getattr(function, "__name__", repr(function))
    values = [*args, *options.values()]
    values += [part for value in values if isinstance(value, (tuple, list)) for part in value]
    traced = next(value for value in values if isinstance(value, (Traced, TracedArray)))
    graph = traced._graph
    if name == "__getitem__":
        array = graph.foreign(args[0])
        return traced.__array__() if array is None else array[args[1]]
    if name.startswith("__"):
        name = name.strip("_")
        name = _ARITHMETIC.get(name, name)
    if name == "where" and type(function).__name__ == "method_descriptor":
        name = "Tensor.where"
    return _called(graph, f"torch.{name}", args, options)


def _clip(graph: Graph, x: Any, low: Any = None, high: Any = None, **options: Any) -> Node:
    """np.clip(x, low, high) and torch.clamp(x, min, max)."""
    given = {"min": low, "max": high}
    for name, value in options.items():
        name = {"a_min": "min", "a_max": "max"}.get(name, name)
        if name not in given:
            raise graph.refused("np.clip without options", f"{name}={value!r}")
        given[name] = value
    node = as_node(graph, x)
    for word, bound in (("maximum", given["min"]), ("minimum", given["max"])):
        if bound is not None:
            node = FUNCTIONS[word](graph, node, as_node(graph, bound))
    return node


def _where(graph: Graph, condition: Any, *branches: Any) -> Node:
    if len(branches) != 2:
        raise graph.refused("np.where with three arguments", f"{1 + len(branches)}",
                            "write np.where(condition, a, b)")  # fmt: skip
    return FUNCTIONS["where"](graph, *(as_node(graph, x) for x in (condition, *branches)))


def _select(graph: Graph, conditions: Any, choices: Any, default: Any = 0) -> Node:
    if len(conditions) != len(choices):
        raise graph.refused("np.select with a choice for each condition",
                            f"{len(conditions)} conditions and {len(choices)} choices")  # fmt: skip
    found = as_node(graph, default)
    for condition, choice in [*zip(conditions, choices, strict=True)][::-1]:
        found = FUNCTIONS["where"](graph, as_node(graph, condition), as_node(graph, choice), found)
    return found


def _astype(graph: Graph, x: Any, dtype: Any, *_: Any, **__: Any) -> Node:
    """The value in the kind of a dtype."""
    node, kind = as_node(graph, x), kind_of(dtype)
    if kind is None:
        raise graph.refused("a type of floats, integers or booleans",
                            f"({graph.text(node)}).astype({dtype!r})")  # fmt: skip
    return converted(graph, node, kind)


def _like(value: int) -> Callable[..., Node]:
    return lambda graph, x, *_, **__: graph.constant(as_node(graph, x).kind, value)


_SPECIAL: dict[str, Callable[..., Node]] = {
    "where": _where,
    "select": _select,
    "clip": _clip,
    "clamp": _clip,
    "astype": _astype,
    "zeros_like": _like(0),
    "ones_like": _like(1),
}
_TORCH = _SPECIAL | torch_names(as_node, kind_of)
# What tensors, and in part arrays, have as methods.
_METHODS = {*FUNCTIONS, *ALIASES, *_TORCH}
