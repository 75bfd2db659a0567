"""ONNX's operators Attention, FlexAttention, Softmax and LogSoftmax, computed by sdpa.

`reference_ops` gives them to `onnx.reference.ReferenceEvaluator`, which then runs whole models with
sdpa's kernels. `Backend` has the interface of `onnx.backend.base.Backend` and runs every graph that
consists of these operators. Attention is supported in opsets 23, 24 and 25, Softmax and LogSoftmax
in every opset, FlexAttention in version 1 of the preview domain: its `score_mod` becomes a program,
without a tensor of all scores, and its `prob_mod` has to be a constant times the probabilities.
Some points may surprise a reader of the standard:

- Scores, softmax and sums are computed in float32 (float64 for float64 inputs), so
  `softmax_precision` has an effect only if it asks for more: DOUBLE computes in float64.
- `qk_matmul_output_mode=0` gives the scaled product before `softcap`, as the text of the operator
  says.
- Integer masks are refused: the type list admits them, but the text gives them no meaning.
- A query that attends to no key has the result 0.

Source: ONNX operator specification, Attention-23, -24, -25, Softmax-1, -11, -13,
ai.onnx.preview.FlexAttention-1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import sdpa
from sdpa import _arguments, _warnings
from sdpa._table import OPTIONS

try:
    import onnx
    from onnx import TensorProto, defs, helper, numpy_helper
    from onnx.reference.op_run import OpRun
except ImportError as _error:
    raise ImportError("sdpa.interop.onnx needs onnx: pip install onnx") from _error

from sdpa.interop.onnx import _graphs

if TYPE_CHECKING:
    # Not all that look at the types have onnx.
    class _Backend:
        @classmethod
        def run_model(
            cls, model: Any, inputs: Any, device: str = "CPU", **kwargs: Any
        ) -> tuple[Any, ...]: ...

        @classmethod
        def run_node(
            cls,
            node: Any,
            inputs: Any,
            device: str = "CPU",
            outputs_info: Any = None,
            **kwargs: Any,
        ) -> tuple[Any, ...] | None: ...

    class _BackendRep: ...

else:
    from onnx.backend.base import Backend as _Backend
    from onnx.backend.base import BackendRep as _BackendRep

__all__ = [
    "Backend",
    "BackendRep",
    "prepare",
    "reference_ops",
    "run_model",
    "run_node",
    "supports_device",
]

_STAGES = ("scores", "capped", "biased", "weights")
_INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")


def _heads_first(name: str, x: Any, attribute: str, heads: int | None) -> Any:
    """(batch, L, heads * d) as a view (batch, heads, L, d)."""
    if heads is None:
        raise ValueError(f"{name}: 3-D of shape {x.shape}, which needs the attribute {attribute}")
    if heads < 1 or x.shape[2] % heads:
        raise ValueError(f"{name}: last axis {x.shape[2]} is no multiple of {attribute}={heads}")
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).swapaxes(1, 2)


def _padded_mask(mask: Any, keys: int) -> Any:
    """The mask with its last axis extended to all keys; the added ones are masked."""
    if mask.dtype != np.bool_ and not _arguments.is_float(mask.dtype):
        remedy = "write attn_mask != 0 for a mask of ones and zeros"
        raise TypeError(
            f"attn_mask: expected bool or floating point, got {mask.dtype}"
            + (f"; {remedy}" if mask.dtype.kind in "iu" else "")
        )
    if mask.ndim == 0 or mask.shape[-1] >= keys:
        return mask
    fill = False if mask.dtype == np.bool_ else -np.inf
    padded = np.full((*mask.shape[:-1], keys), fill, mask.dtype)
    padded[..., : mask.shape[-1]] = mask
    return padded


def _compute_dtype(operands: Sequence[Any], softmax_precision: int | None) -> np.dtype[Any]:
    types = {x.dtype for x in operands}
    if len(types) > 1:  # NumPy has no type for both of 16 bits
        types = {np.promote_types(x, np.float32) for x in types}
    dtype = np.result_type(*types)
    if softmax_precision not in (None, *_graphs.REALS):
        expected = ", ".join(f"{x} ({TensorProto.DataType.Name(x)})" for x in _graphs.REALS)
        raise ValueError(f"softmax_precision: expected one of {expected}, got {softmax_precision}")
    return np.dtype(np.float64) if softmax_precision == TensorProto.DOUBLE else dtype


def _window(left: int, right: int) -> tuple[int | None, int | None] | None:
    for name, size in (("left_window_size", left), ("right_window_size", right)):
        if size < -1:
            raise ValueError(f"{name}: expected -1 (unbounded) or a size >= 0, got {size}")
    if left == right == -1:
        return None
    return (None if left == -1 else left, None if right == -1 else right)


def _check_attention(
    version: int, named: dict[str, Any], attributes: dict[str, Any]
) -> tuple[Any, Any, Any]:
    """Query, key and value as (batch, heads, L, d), after checks that sdpa itself cannot make."""
    query, key, value = named["Q"], named["K"], named["V"]
    q_heads, kv_heads = attributes.get("q_num_heads"), attributes.get("kv_num_heads")
    if not query.ndim == key.ndim == value.ndim or query.ndim not in (3, 4):
        raise ValueError(
            "Q, K, V: expected three 3-D or three 4-D tensors, "
            f"got shapes {query.shape}, {key.shape}, {value.shape}"
        )
    if query.ndim == 3:
        query = _heads_first("Q", query, "q_num_heads", q_heads)
        key = _heads_first("K", key, "kv_num_heads", kv_heads)
        value = _heads_first("V", value, "kv_num_heads", kv_heads)
    elif version >= 25 and (q_heads is not None or kv_heads is not None):
        raise ValueError(
            "q_num_heads, kv_num_heads: for 3-D inputs only since opset 25, "
            f"got Q of shape {query.shape}"
        )
    past_key, past_value = named["past_key"], named["past_value"]
    if (past_key is None) != (past_value is None):
        raise ValueError("past_key, past_value: expected both or neither, got one")
    if past_key is not None and named["nonpad_kv_seqlen"] is not None:
        raise ValueError("nonpad_kv_seqlen: cannot be combined with past_key and past_value")
    if past_key is not None:
        tokens = past_key.shape[2] if past_key.ndim == 4 else "n"
        for name, past, new in (("past_key", past_key, key), ("past_value", past_value, value)):
            expected = (*new.shape[:2], tokens, new.shape[3])
            if past.shape != expected:
                raise ValueError(f"{name}: expected shape {expected}, got {past.shape}")
    mode = attributes.get("qk_matmul_output_mode", 0)
    if mode not in range(len(_STAGES)):
        raise ValueError(f"qk_matmul_output_mode: expected 0, 1, 2 or 3, got {mode}")
    return query, key, value


def _checked_lengths(lengths: Any, batch: int, n_k: int) -> Any:
    name = "nonpad_kv_seqlen"
    lengths = _arguments.integers(name, lengths)
    if lengths.shape != (batch,):
        raise ValueError(f"{name}: expected shape {(batch,)}, got {lengths.shape}")
    outside = lengths[(lengths < 0) | (lengths > n_k)]
    if outside.size:
        raise ValueError(f"{name}: expected integers from 0 to {n_k}, the keys, got {outside[0]}")
    return lengths


@_warnings.silenced()  # the operator says what a mask of numbers means
def _attention(
    version: int,
    inputs: Sequence[Any],
    attributes: dict[str, Any],
    wanted: Sequence[bool],
    opsets: dict[str, int],
) -> list[Any]:
    named = dict.fromkeys(_INPUTS) | dict(zip(_INPUTS, inputs, strict=False))
    query, key, value = _check_attention(version, named, attributes)
    mask, past_key, past_value, lengths = list(named.values())[3:]
    offset: Any = None
    if past_key is not None:
        offset = past_key.shape[2]
        key = np.concatenate((past_key, key), axis=2)
        value = np.concatenate((past_value, value), axis=2)
    elif lengths is not None:
        lengths = _checked_lengths(lengths, query.shape[0], key.shape[2])
        offset = lengths - query.shape[2]

    dtype = _compute_dtype((query, key, value), attributes.get("softmax_precision"))
    if mask is not None:
        mask = _padded_mask(mask, key.shape[2])
        if mask.dtype not in (np.bool_, np.float32, dtype):
            mask = mask.astype(dtype)
    options = {name: x for name, x in attributes.items() if name in OPTIONS} | {
        "attn_mask": mask,
        "is_causal": bool(attributes.get("is_causal", 0)),
        "softcap": attributes.get("softcap", 0.0) or None,
        "window": _window(
            attributes.get("left_window_size", -1), attributes.get("right_window_size", -1)
        ),
        "key_lengths": lengths,
        "query_offset": offset,
        "enable_gqa": True,
    }
    q, k, v = (x.astype(dtype, copy=False) for x in (query, key, value))
    out = sdpa.attention(q, k, v, **options).astype(query.dtype, copy=False)
    if inputs[0].ndim == 3:
        batch, heads, n_q, d = out.shape
        out = out.swapaxes(1, 2).reshape(batch, n_q, heads * d)
    outputs = [out, key, value]
    if len(wanted) < 4 or not wanted[3]:
        return [*outputs, None]
    stage = _STAGES[attributes.get("qk_matmul_output_mode", 0)]
    scores = sdpa.attention_weights(q, k, stage=stage, **options)
    return [*outputs, scores.astype(query.dtype, copy=False)]


def _flex_attention(
    version: int,
    inputs: Sequence[Any],
    attributes: dict[str, Any],
    wanted: Sequence[bool],
    opsets: dict[str, int],
) -> list[Any]:
    query, key, value = inputs
    for name, x in zip("QKV", inputs, strict=True):
        if x.ndim != 4:
            raise ValueError(f"{name}: expected a tensor of four axes, got shape {x.shape}")
        if x.shape[0] != query.shape[0]:
            raise ValueError(f"{name}: expected Q's batch of {query.shape[0]}, got shape {x.shape}")
    shape = (*query.shape[:3], key.shape[2])
    options: dict[str, Any] = {"scale": attributes.get("scale")}
    if "score_mod" in attributes:
        options |= _graphs.score_options(attributes["score_mod"], opsets, shape)
    if "prob_mod" in attributes:
        factor = _graphs.probability_factor(attributes["prob_mod"], opsets, shape)
        # In 16 bits the products might be beyond the largest number.
        value = value.astype(np.result_type(value, np.float32)) * factor
    dtype = _compute_dtype((query, key, value), attributes.get("softmax_precision"))
    q, k, v = (x.astype(dtype, copy=False) for x in (query, key, value))
    out = sdpa.attention(q, k, v, enable_gqa=True, **options)
    return [out.astype(inputs[2].dtype, copy=False)]


def _rows(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    def run(
        version: int,
        inputs: Sequence[Any],
        attributes: dict[str, Any],
        wanted: Sequence[bool],
        opsets: dict[str, int],
    ) -> list[Any]:
        (x,) = inputs
        if version >= 13:
            return [function(x, axis=attributes.get("axis", -1))]
        # Before opset 13 a row was everything from the axis on.
        first = attributes.get("axis", 1)
        if not -x.ndim <= first <= x.ndim:
            raise ValueError(f"axis: expected -{x.ndim} to {x.ndim}, got {first}")
        first += x.ndim if first < 0 else 0
        if first == x.ndim:
            return [function(x[..., np.newaxis], axis=-1)[..., 0]]
        return [function(x, axis=tuple(range(first, x.ndim)))]

    return run


_PREVIEW = "ai.onnx.preview"


class _Operator(NamedTuple):
    """The function; the versions, since later ones might have attributes that change the result."""

    run: Callable[..., list[Any]]
    versions: tuple[int, ...]
    domain: str = ""


_OPERATORS = {
    "Attention": _Operator(_attention, (23, 24, 25)),
    "FlexAttention": _Operator(_flex_attention, (1,), _PREVIEW),
    "Softmax": _Operator(_rows(sdpa.softmax), (1, 11, 13)),
    "LogSoftmax": _Operator(_rows(sdpa.log_softmax), (1, 11, 13)),
}


def _check_device(device: str) -> None:
    if not Backend.supports_device(device):
        raise ValueError(f"device: expected 'CPU', got {device!r}")


def _check_operator(node: Any, opsets: dict[str, int]) -> None:
    """Raise an error unless the node is one of our operators, in a version that we know."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    name = f"{domain or 'ai.onnx'}::{node.op_type}"
    operator = _OPERATORS.get(node.op_type)
    if operator is None or domain != operator.domain:
        raise NotImplementedError(f"{name}: this backend has {', '.join(_OPERATORS)}")
    version = _schema_of(node, opsets).since_version
    if version not in operator.versions:
        versions = ", ".join(map(str, operator.versions))
        word = "versions" if len(operator.versions) > 1 else "version"
        raise NotImplementedError(f"{name}-{version}: this backend has the {word} {versions}")


def _check_graph(model: Any) -> None:
    for x in model.graph.sparse_initializer:
        raise NotImplementedError(f"{x.values.name}: this backend has no sparse initializers")
    opsets = _opsets_of(model)
    for node in model.graph.node:
        _check_operator(node, opsets)


def _check_node(node: Any, opsets: dict[str, int]) -> None:
    """As ONNX's checker; and whether it is one of our operators."""
    context = type(onnx.checker.DEFAULT_CONTEXT)()
    context.ir_version, context.opset_imports = onnx.IR_VERSION, opsets
    onnx.checker.check_node(node, context)
    _check_operator(node, opsets)


def _schema_of(node: Any, opsets: dict[str, int]) -> Any:
    domain = "" if node.domain == "ai.onnx" else node.domain
    return defs.get_schema(node.op_type, opsets.get(domain, 1), domain)


def _opsets_of(model: Any) -> dict[str, int]:
    """Versions by domain; that of ONNX itself is 1 if the model does not say."""
    found = {o.domain: o.version for o in model.opset_import}
    return {"": found.pop("ai.onnx", 1)} | found


def _check_type(formal: Any, x: Any) -> None:
    """Whether an input of reals has them: results in integers would be cut."""
    if x is not None and not any("int" in each for each in formal.types):
        _arguments.checked_float(formal.name, x)


def _compute(
    node: Any, opsets: dict[str, int], inputs: Sequence[Any], attributes: dict[str, Any]
) -> list[Any]:
    schema = _schema_of(node, opsets)
    if len(inputs) != len(node.input):
        raise ValueError(
            f"inputs: expected {len(node.input)} arrays, one for each input of the node, "
            f"got {len(inputs)}"
        )
    arrays = []
    for formal, x in zip(schema.inputs, inputs, strict=False):
        if x is None and formal.option == defs.OpSchema.FormalParameterOption.Single:
            raise TypeError(f"{formal.name}: expected an array, got None")
        array = None if x is None else sdpa._core._arrays(**{formal.name: x})[0]
        _check_type(formal, array)
        arrays.append(array)
    wanted = [bool(name) for name in node.output]
    run = _OPERATORS[node.op_type].run
    results = run(schema.since_version, arrays, attributes, wanted, opsets)
    return results[: len(wanted)]


def _attributes_of(node: Any) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


class BackendRep(_BackendRep):
    """A checked model, ready to run; made by `Backend.prepare`."""

    def __init__(self, model: Any) -> None:
        self._graph = model.graph
        self._opsets = _opsets_of(model)
        self._constants = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
        self._inputs = [i.name for i in model.graph.input if i.name not in self._constants]

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Run the graph on arrays, one for each input that is not an initializer.

        Parameters
        ----------
        inputs : sequence of array_like
            In the order of the graph's inputs, of their shapes and dtypes.

        Returns
        -------
        tuple of ndarray
            The graph's outputs, in its order.

        Raises
        ------
        ValueError, TypeError
            If the number of inputs differs, or an operator refuses its own.
        """
        if len(inputs) != len(self._inputs):
            raise ValueError(f"inputs: expected {len(self._inputs)} arrays, got {len(inputs)}")
        values = self._constants | dict(zip(self._inputs, inputs, strict=True))
        for node in self._graph.node:
            operands = [values[name] if name else None for name in node.input]
            results = _compute(node, self._opsets, operands, _attributes_of(node))
            values |= dict(zip(node.output, results, strict=True))
        return tuple(values[output.name] for output in self._graph.output)


class Backend(_Backend):
    """The operators on the CPU, in the interface of `onnx.backend.base.Backend`.

    Examples
    --------
    >>> import numpy as np
    >>> from onnx import helper
    >>> from sdpa.interop.onnx import Backend
    >>> node = helper.make_node("Softmax", ["x"], ["y"])
    >>> Backend.run_node(node, [np.zeros((1, 4), np.float32)])[0]
    array([[0.25, 0.25, 0.25, 0.25]], dtype=float32)
    """

    @classmethod
    def is_compatible(cls, model: Any, device: str = "CPU", **kwargs: Any) -> bool:
        """Whether this can run all operators of the model, in their versions, on the device."""
        try:
            _check_device(device)
            _check_graph(model)
        except (NotImplementedError, ValueError, defs.SchemaError):
            return False
        return True

    @classmethod
    def prepare(cls, model: Any, device: str = "CPU", **kwargs: Any) -> BackendRep:
        """Check a model (a ModelProto) and return an object that runs it.

        Raises
        ------
        onnx.checker.ValidationError
            If the model is not valid ONNX.
        NotImplementedError
            If it has another operator, or a later version of one, or a sparse initializer.
        ValueError
            If `device` is not "CPU".
        """
        _check_device(device)
        onnx.checker.check_model(model)
        _check_graph(model)
        return BackendRep(model)

    @classmethod
    def run_node(
        cls,
        node: Any,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Any = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Run one operator (a NodeProto) on its inputs, None for those left out.

        The keyword `opset_version` chooses the operator's version; without it the newest.
        Raises as `prepare` and `BackendRep.run` do.
        """
        _check_device(device)
        opsets = {"": kwargs.get("opset_version", defs.onnx_opset_version()), _PREVIEW: 1}
        _check_node(node, opsets)
        return tuple(_compute(node, opsets, inputs, _attributes_of(node)))

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether `device` is the CPU: "CPU" or "CPU:n"."""
        return device.split(":")[0] == "CPU"


prepare: Callable[..., BackendRep] = Backend.prepare
run_model: Callable[..., tuple[Any, ...]] = Backend.run_model
run_node: Callable[..., tuple[Any, ...]] = Backend.run_node
supports_device: Callable[[str], bool] = Backend.supports_device


class _ReferenceOperator(OpRun):
    """One of the operators, in the interface of ONNX's evaluator, which checks no model."""

    def __init__(self, onnx_node: Any, run_params: dict[str, Any], schema: Any = None) -> None:
        self._opsets = dict(run_params["opsets"])
        _check_node(onnx_node, self._opsets)
        super().__init__(onnx_node, run_params, schema)

    def run(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        results = super().run(*args, **kwargs)
        # The evaluator stores an output without a name as "", the name of absent inputs.
        return tuple(x if name else None for name, x in zip_longest(self.onnx_node.output, results))

    def _run(self, *inputs: Any, **attributes: Any) -> tuple[Any, ...]:
        # The other attributes are defaults of the newest opset, even for a model of an older one.
        # Graphs have become evaluators, which compute whole tensors.
        given = {
            a.name: a.g if a.HasField("g") else attributes[a.name] for a in self.onnx_node.attribute
        }
        results = _compute(self.onnx_node, self._opsets, inputs, given)
        return tuple(x for x in results if x is not None)  # the evaluator takes no None


# The evaluator finds an operator by its domain and the name of its class.
_REFERENCE_OPERATORS = [
    type(name, (_ReferenceOperator,), {"op_domain": operator.domain})
    for name, operator in _OPERATORS.items()
]


def reference_ops() -> list[type[Any]]:
    """The operators as classes for `onnx.reference.ReferenceEvaluator`.

    The evaluator runs every other operator of the model in NumPy. It hands `new_ops` to the bodies
    of If, Loop and Scan, but not to the model's local functions: inline these first, with
    `onnx.inliner.inline_local_functions`.

    Returns
    -------
    list of type
        Subclasses of `onnx.reference.op_run.OpRun`, for the evaluator's parameter `new_ops`. The
        evaluator raises `onnx.checker.ValidationError` for one of the operators that is not valid
        in the model's opset, and NotImplementedError for a later version of it.

    Examples
    --------
    >>> import numpy as np
    >>> from onnx import helper
    >>> from onnx.reference import ReferenceEvaluator
    >>> from sdpa.interop.onnx import reference_ops
    >>> node = helper.make_node("Softmax", ["x"], ["y"])
    >>> evaluator = ReferenceEvaluator(node, new_ops=reference_ops())
    >>> evaluator.run(None, {"x": np.zeros((1, 4), np.float32)})[0]
    array([[0.25, 0.25, 0.25, 0.25]], dtype=float32)
    """
    return list(_REFERENCE_OPERATORS)


def __dir__() -> list[str]:
    return __all__
