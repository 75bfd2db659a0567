"""Graphs of FlexAttention, score_mod and prob_mod, as functions of sdpa.

A tensor of such a graph is a function of its indices here. The graph's scores are the score of the
pair at hand, a Range is its index, and what is computed with them is the expression that
`sdpa.score_program` traces: no tensor of all pairs is made, unless the graph holds one. Sizes are
those of the call, so that what depends on Shape alone is a constant.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import sdpa
from sdpa._arguments import broadcasts

Index = tuple[Any, ...]
_REMEMBERED = 64


class _Tensor(NamedTuple):
    """A shape, and the element at given indices.

    Attributes
    ----------
    value : ndarray, None
        All elements, where they are known.
    is_fixed : bool
        Whether the scores do not matter, so that all elements could be known.
    """

    shape: tuple[int, ...]
    element: Callable[[Index], Any]
    value: Any = None
    is_fixed: bool = True


def _constant(value: Any) -> _Tensor:
    """A tensor whose elements are numbers of the expression."""
    value = np.asarray(value)
    return _Tensor(value.shape, lambda at: value[at] if value.ndim else value[()], value)


def _known(x: _Tensor) -> Any:
    """All elements of a fixed tensor."""
    if x.value is not None:
        return x.value
    return np.broadcast_to(x.element(tuple(np.indices(x.shape, sparse=True))), x.shape)


def _at(x: _Tensor, at: Index) -> Any:
    """The element of a tensor that is broadcast to more axes."""
    own = at[len(at) - len(x.shape) :] if x.shape else ()
    return x.element(tuple(0 if n == 1 else i for n, i in zip(x.shape, own, strict=True)))


class _Unknown(Exception):
    """What a node has that is not computed here."""


# ------------------------------------------------------------------------------- elementwise


def _divide(a: Any, b: Any) -> Any:
    """Of integers, towards zero."""
    if "r" in (_kind(a), _kind(b)):
        return a / b
    size = abs(a) // abs(b)
    return np.where((a < 0) ^ (b < 0), -size, size)


def _power(a: Any, b: Any) -> Any:
    """In the type of the base."""
    power = a**b
    return _whole(power) if _kind(a) == "i" and _kind(power) == "r" else power


def _kind(x: Any) -> str:
    """r, i or b, of an expression or a number."""
    node = getattr(x, "_node", None)
    return node.kind if node else {"i": "i", "u": "i", "b": "b"}.get(np.asarray(x).dtype.kind, "r")


def _folded(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: functools.reduce(function, args)


def _clipped(x: Any, low: Any = None, high: Any = None) -> Any:
    x = x if low is None else np.maximum(x, low)
    return x if high is None else np.minimum(x, high)


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": _divide,
    "Pow": _power,
    "Neg": lambda x: -x,
    "Abs": np.abs,
    "Exp": np.exp,
    "Log": np.log,
    "Sqrt": np.sqrt,
    "Reciprocal": lambda x: 1 / x,
    "Tanh": np.tanh,
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Softplus": lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))),
    "Relu": lambda x: np.maximum(x, 0),
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Sign": np.sign,
    "Min": _folded(np.minimum),
    "Max": _folded(np.maximum),
    "Sum": _folded(np.add),
    "Clip": _clipped,
    "Where": np.where,
    "Equal": np.equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "And": np.logical_and,
    "Or": np.logical_or,
    "Xor": np.logical_xor,
    "Not": np.logical_not,
    "BitwiseAnd": np.bitwise_and,
    "BitwiseOr": np.bitwise_or,
    "BitwiseXor": np.bitwise_xor,
    "BitwiseNot": np.invert,
    "Identity": lambda x: x,
}


_INTEGERS = (TensorProto.INT32, TensorProto.INT64)
REALS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
# Integers of the others wrap around, and they have other reals.
_TYPES = {
    np.dtype(helper.tensor_dtype_to_np_dtype(x)) for x in (TensorProto.BOOL, *_INTEGERS, *REALS)
}


def _cast(attributes: dict[str, Any]) -> Callable[[Any], Any]:
    """To the kind of a type; floats stay as they are computed."""
    to = attributes["to"]
    if to == TensorProto.BOOL:
        return lambda x: x != 0
    if to in REALS:
        return lambda x: x * 1.0
    if to not in _INTEGERS:
        raise _Unknown(f"Cast to {TensorProto.DataType.Name(to)}, which programs do not have")
    return lambda x: np.where(x, 1, 0) if _kind(x) == "b" else _whole(x)


def _whole(x: Any) -> Any:
    return x.astype(np.int64) if hasattr(x, "astype") else int(x)


def _remainder(attributes: dict[str, Any]) -> Callable[[Any, Any], Any]:
    """Of integers, with the sign of the divisor or, if fmod is 1, of the dividend."""

    def apply(a: Any, b: Any) -> Any:
        if "r" in (_kind(a), _kind(b)):
            raise _Unknown("Mod of floats, of which programs know no exact remainder")
        return a - b * _divide(a, b) if attributes.get("fmod", 0) else a % b

    return apply


_WITH_ATTRIBUTES = {"Cast": _cast, "Mod": _remainder}


def _elementwise(function: Callable[..., Any], operands: Sequence[_Tensor | None]) -> _Tensor:
    given = [x for x in operands if x is not None]
    shape = np.broadcast_shapes(*(x.shape for x in given))
    return _Tensor(
        shape,
        lambda at: function(*(None if x is None else _at(x, at) for x in operands)),
        is_fixed=all(x.is_fixed for x in given),
    )


# ------------------------------------------------------------------------------- shapes


def _range(operands: Sequence[_Tensor], attributes: dict[str, Any]) -> _Tensor:
    start, limit, step = (_known(x).item() for x in operands)
    return _Tensor((max(math.ceil((limit - start) / step), 0),), lambda at: at[0] * step + start)


def _rearranged(x: _Tensor, shape: Sequence[int]) -> _Tensor:
    """The elements in their order, in a shape that differs in axes of one element."""
    wide = [axis for axis, n in enumerate(x.shape) if n != 1]
    own = [axis for axis, n in enumerate(shape) if n != 1]
    if [x.shape[axis] for axis in wide] != [shape[axis] for axis in own]:
        raise _Unknown(f"Reshape of {x.shape} to {tuple(shape)}, more than axes of one element")

    def element(at: Index) -> Any:
        places = dict(zip(wide, own, strict=True))
        return x.element(tuple(at[places[a]] if a in places else 0 for a in range(len(x.shape))))

    return x._replace(shape=tuple(shape), element=element, value=None)


def _reshape(operands: Sequence[_Tensor], attributes: dict[str, Any]) -> _Tensor:
    x, wanted = operands[0], _known(operands[1]).tolist()
    if not attributes.get("allowzero", 0):
        wanted = [x.shape[axis] if n == 0 else n for axis, n in enumerate(wanted)]
    if -1 in wanted:
        rest = math.prod(n for n in wanted if n != -1)
        wanted[wanted.index(-1)] = math.prod(x.shape) // max(rest, 1)
    return _rearranged(x, wanted)


def _axes(operands: Sequence[_Tensor | None], attributes: dict[str, Any]) -> list[int] | None:
    """An operand; before opset 13 an attribute."""
    axes = operands[1] if len(operands) > 1 else None
    return attributes.get("axes") if axes is None else _known(axes).reshape(-1).tolist()


def _unsqueeze(operands: Sequence[_Tensor], attributes: dict[str, Any]) -> _Tensor:
    x, axes = operands[0], _axes(operands, attributes) or []
    n = len(x.shape) + len(axes)
    new = {axis % n for axis in axes}
    rest = iter(x.shape)
    return _rearranged(x, [1 if axis in new else next(rest) for axis in range(n)])


def _squeeze(operands: Sequence[_Tensor | None], attributes: dict[str, Any]) -> _Tensor:
    x, axes = operands[0], _axes(operands, attributes)
    assert x is not None
    old = None if axes is None else {a % len(x.shape) for a in axes}
    keep = (n for a, n in enumerate(x.shape) if (n != 1 if old is None else a not in old))
    return _rearranged(x, list(keep))


def _expand(operands: Sequence[_Tensor], attributes: dict[str, Any]) -> _Tensor:
    x, shape = operands[0], np.broadcast_shapes(operands[0].shape, tuple(_known(operands[1])))
    return x._replace(shape=shape, element=lambda at: _at(x, at), value=None)


def _transpose(operands: Sequence[_Tensor], attributes: dict[str, Any]) -> _Tensor:
    (x,) = operands
    perm = attributes.get("perm", range(len(x.shape))[::-1])
    places = np.argsort(perm).tolist()
    return x._replace(
        shape=tuple(x.shape[axis] for axis in perm),
        element=lambda at: x.element(tuple(at[place] for place in places)),
        value=None,
    )


def _gather(operands: Sequence[_Tensor], attributes: dict[str, Any]) -> _Tensor:
    data, index = operands
    axis = attributes.get("axis", 0) % len(data.shape)
    n, last = data.shape[axis], axis + len(index.shape)

    def element(at: Index) -> Any:
        i = index.element(at[axis:last])
        return data.element((*at[:axis], np.where(i < 0, i + n, i), *at[last:]))

    shape = (*data.shape[:axis], *index.shape, *data.shape[axis + 1 :])
    return _Tensor(shape, element, is_fixed=data.is_fixed and index.is_fixed)


_SHAPES: dict[str, Callable[..., _Tensor]] = {
    "Range": _range,
    "Reshape": _reshape,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Expand": _expand,
    "Transpose": _transpose,
    "Gather": _gather,
}
# Operands but the first are sizes or axes.
_SIZED = ("Reshape", "Unsqueeze", "Squeeze", "Expand", "Range")
# Larger than what they are made of.
_LAZY = ("Range", "Expand")

# ------------------------------------------------------------------------------- graphs


class Graph:
    """A graph of one input and one output.

    Parameters
    ----------
    name : str
        The attribute, for messages.
    graph : onnx.GraphProto
    opsets : dict of str to int
        The model's, by domain.
    shape : tuple of int
        (B, Hq, L, S)
    """

    def __init__(
        self, name: str, graph: Any, opsets: dict[str, int], shape: tuple[int, ...]
    ) -> None:
        self._name, self._graph, self._opsets, self._shape = name, graph, opsets, shape
        if len(graph.input) != 1 or len(graph.output) != 1:
            n = f"{len(graph.input)} and {len(graph.output)}"
            raise ValueError(f"{name}: expected a graph of one input and one output, got {n}")
        constants: dict[str, Any] = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant":
                (value,) = ReferenceEvaluator(node).run(None, {})
                constants[node.output[0]] = value
        # Tables: the expression reads them by indices, as arguments.
        self.tables: dict[str, Any] = {}
        self._known = dict(constants)
        for name, x in self._tensors(lambda at: None, ()).items():
            if x.value is not None:
                self._known[name] = x.value
        read = {name for node in graph.node for name in self._read(node)} | {graph.output[0].name}
        self.tables = {name: x for name, x in self._known.items() if x.size != 1 and name in read}

    def _read(self, node: Any) -> Sequence[str]:
        """The tensors whose elements are operands of an expression."""
        if node.output[0] in self._known:
            return ()
        return list(node.input)[: 1 if node.op_type in _SIZED else None]

    def element(self, score: Any, tables: Sequence[Any], pair: Sequence[Any]) -> Any:
        """The output at the indices of the pair that has this score."""
        pair = tuple(0 if n == 1 else i for n, i in zip(self._shape, pair, strict=True))

        def scores(at: Index) -> Any:
            if any(i is not own for i, own in zip(at, pair, strict=True)):
                raise _Unknown("scores of another pair than that of the result")
            return score

        found = self._tensors(scores, tables).get(self._graph.output[0].name)
        if found is None or not broadcasts(found.shape, self._shape):
            got = f"{found.shape}" if found else "another"
            raise ValueError(f"{self._name}: expected an output of shape {self._shape}, got {got}")
        with self._named():
            return _at(found, pair)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except _Unknown as error:
            raise NotImplementedError(f"{self._name}: {error}") from None

    def _tensors(self, scores: Callable[[Index], Any], tables: Sequence[Any]) -> dict[str, _Tensor]:
        """All tensors of the graph, by name."""
        known = {self._graph.input[0].name: _Tensor(self._shape, scores, is_fixed=False)}
        known |= {name: _constant(x) for name, x in self._known.items()}
        for (name, value), table in zip(self.tables.items(), tables, strict=True):
            read = lambda at, table=table: table[at]  # noqa: E731
            known[name] = _Tensor(value.shape, read, value)
        for node in self._graph.node:
            names = [name for name in node.output if name]
            if any(name not in known for name in names):
                known |= zip(names, self._computed(node, known), strict=True)
        return known

    def _computed(self, node: Any, known: dict[str, _Tensor]) -> Sequence[_Tensor]:
        op = node.op_type
        missing = [name for name in node.input if name and name not in known]
        if missing:
            raise NotImplementedError(
                f"{self._name}: {op} reads {missing[0]} of the graph around it"
            )
        operands = [known[name] if name else None for name in node.input]
        with self._named():
            try:
                found = self._results(node, operands)
            except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
                if isinstance(error, NotImplementedError):
                    raise
                shapes = ", ".join(str(x.shape) for x in operands if x is not None)
                raise ValueError(f"{self._name}: {op} of shapes {shapes}: {error}") from error
        if found is not None:
            return found
        domain = f"{node.domain}::" if node.domain else ""
        raise NotImplementedError(
            f"{self._name}: {domain}{op} of scores, which no program can compute pair by pair; "
            f"expected one of {', '.join(sorted({*_ELEMENTWISE, *_WITH_ATTRIBUTES}))}"
        )

    def _results(self, node: Any, operands: Sequence[Any]) -> Sequence[_Tensor] | None:
        """The outputs of a node, or None if no program can compute them."""
        op = node.op_type
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        given = [x for x in operands if x is not None]
        types = {x.value.dtype for x in given if x.value is not None} - _TYPES
        is_fixed = all(x.is_fixed for x in given)
        if types and not is_fixed:
            raise _Unknown(f"{op} of {types.pop()} beside scores, which programs do not have")
        if types or (op not in _LAZY and all(x.value is not None for x in given)):
            return self._fixed(node, [None if x is None else _known(x) for x in operands])
        if node.domain in ("", "ai.onnx"):
            if op == "Shape":
                return self._fixed(node, [np.broadcast_to(np.False_, operands[0].shape)])
            if op in _ELEMENTWISE and not attributes:
                return [_elementwise(_ELEMENTWISE[op], operands)]
            if op in _WITH_ATTRIBUTES:
                return [_elementwise(_WITH_ATTRIBUTES[op](attributes), operands)]
            if op in _SHAPES:
                return [_SHAPES[op](operands, attributes)]
        if is_fixed:
            return self._fixed(node, [None if x is None else _known(x) for x in operands])
        if op in _ELEMENTWISE and attributes:
            raise _Unknown(
                f"{op} with the attribute {next(iter(attributes))}, which is no longer one"
            )
        return None

    def _fixed(self, node: Any, operands: Sequence[Any]) -> Sequence[_Tensor]:
        """The named outputs of a node without scores, by ONNX's evaluator."""
        graph = helper.make_graph(
            [node],
            self._name,
            [onnx.ValueInfoProto(name=n) for n in node.input if n],
            [onnx.ValueInfoProto(name=n) for n in node.output if n],
        )
        opsets = [helper.make_opsetid(domain, version) for domain, version in self._opsets.items()]
        evaluator = ReferenceEvaluator(helper.make_model(graph, opset_imports=opsets))
        given = {n: x for n, x in zip(node.input, operands, strict=True) if n}
        results: Any = evaluator.run(None, given)
        return [_constant(x) for x in results]


# ------------------------------------------------------------------------------- score_mod


@functools.lru_cache(maxsize=_REMEMBERED)
def _score_program(
    text: bytes, opsets: tuple[tuple[str, int], ...], shape: tuple[int, ...]
) -> tuple[Any, tuple[Any, ...]]:
    graph = Graph("score_mod", onnx.GraphProto.FromString(text), dict(opsets), shape)

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any, *tables: Any) -> Any:
        return graph.element(score, tables, (b, h, q, k))

    tables = tuple(graph.tables.values())
    return sdpa.score_program(score_mod, tables), tables


def score_options(graph: Any, opsets: dict[str, int], shape: tuple[int, ...]) -> dict[str, Any]:
    """score_mod and score_args of a graph, for scores of this shape."""
    program, tables = _score_program(graph.SerializeToString(), tuple(opsets.items()), shape)
    return {"score_mod": program, "score_args": tables or None}


# ------------------------------------------------------------------------------- prob_mod


def _refuse(got: str) -> Any:
    raise NotImplementedError(
        f"prob_mod: expected a constant times the probabilities, got {got}; what depends on "
        "the probabilities of a pair in another way needs all of them in memory"
    )


class _Place:
    """An index of the probability, of which a Range makes a number."""

    def __mul__(self, x: Any) -> Any:
        _refuse("a Range of positions")


class _Multiple:
    """A constant times a probability: all that prob_mod may be."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __mul__(self, x: Any) -> _Multiple:
        if isinstance(x, _Multiple):
            _refuse("a product of two")
        return _Multiple(self.factor * float(x))

    __rmul__ = __mul__

    def __truediv__(self, x: Any) -> _Multiple:
        if isinstance(x, _Multiple):
            _refuse("a quotient of two")
        return _Multiple(self.factor / float(x))

    def __neg__(self) -> _Multiple:
        return _Multiple(-self.factor)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **_: Any) -> Any:
        if ufunc is np.multiply:
            return self * inputs[1 if inputs[0] is self else 0]
        if ufunc is np.divide and isinstance(inputs[0], _Multiple):
            return self / inputs[1]
        return _refuse(f"np.{ufunc.__name__}")

    def __array_function__(self, function: Any, *_: Any) -> Any:
        return _refuse(f"np.{function.__name__}")


def probability_factor(graph: Any, opsets: dict[str, int], shape: tuple[int, ...]) -> float:
    """The constant by which a graph multiplies probabilities; any other graph is refused."""
    found = Graph("prob_mod", graph, opsets, shape)
    one = _Multiple(1.0)
    try:
        if found.tables:
            _refuse(f"a graph with the table {next(iter(found.tables))}")
        result = found.element(one, (), [_Place() for _ in shape])
    except TypeError as error:
        _refuse(str(error))
    if not isinstance(result, _Multiple):
        _refuse("a constant")
    return float(result.factor)
