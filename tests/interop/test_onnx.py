"""ONNX's own backend suite, unchanged, run through both doors of sdpa.interop.onnx."""

import importlib
import re
import warnings
from functools import partial

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("onnx", reason="needs onnx: pip install '.[peers]'")

import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test import BackendTest, loader
from onnx.reference import ReferenceEvaluator
from support.calls import message
from support.protocols import OnlyDlpack

import sdpa
from sdpa.interop.onnx import Backend, reference_ops

BASE_CASE = re.compile(r"^test_(attention|flexattention|softmax|logsoftmax)_(?!.*expanded).*cpu$")
COUNTS = {"attention": 93, "flexattention": 11, "softmax": 7, "logsoftmax": 7}


class Evaluator(Backend):
    """ONNX's evaluator with our operators, behind the interface that the suite asks for."""

    class Prepared:
        def __init__(self, model):
            self.evaluator = ReferenceEvaluator(model, new_ops=reference_ops())
            assert {type(node) for node in self.evaluator.rt_nodes_} <= set(reference_ops())

        def run(self, inputs):
            return self.evaluator.run(
                None, dict(zip(self.evaluator.input_names, inputs, strict=True))
            )

    @classmethod
    def prepare(cls, model, device="CPU", **kwargs):
        return cls.Prepared(model)


def import_cases(package):
    """Load the cases of our operators alone."""
    for name in COUNTS:
        importlib.import_module(f"{package.__name__}.{name}")


def conformance(backend):
    """The base cases of the suite, without those it reports as skipped."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        # The suite computes the expected values of every operator as it loads, for 15 s.
        patch.setattr(loader, "import_recursive", import_cases)
        warnings.simplefilter("ignore")
        suite = BackendTest(backend, __name__).include(BASE_CASE.pattern)
        cases = suite.test_cases["OnnxBackendNodeModelTest"]
    for name in [name for name in vars(cases) if name.startswith("test_")]:
        if not BASE_CASE.match(name):
            delattr(cases, name)
    return cases


TestConformance = conformance(Backend)
TestEvaluatorConformance = conformance(Evaluator)


@pytest.mark.parametrize(
    "cases", [TestConformance, TestEvaluatorConformance], ids=["backend", "evaluator"]
)
def test_every_base_case_is_there(cases):
    found = [m[1] for m in map(BASE_CASE.match, vars(cases)) if m]
    assert {name: found.count(name) for name in COUNTS} == COUNTS


def evaluated(nodes, inputs, opset, outputs=("y",)):
    """The outputs of a graph of these nodes, by ONNX's evaluator with our operators."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in inputs],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
    )
    model = helper.make_model(graph, opset_imports=[opset])
    return ReferenceEvaluator(model, new_ops=reference_ops()).run(None, inputs)


def test_softmax_before_opset_13_normalises_from_the_axis_on(rng):
    x = rng.standard_normal((2, 3, 4)).astype(np.float32)
    node = helper.make_node("Softmax", ["x"], ["y"], axis=1)
    (y,) = Backend.run_node(node, [x], opset_version=11)
    np.testing.assert_array_equal(y, sdpa.softmax(x, axis=(1, 2)))
    opset = helper.make_opsetid("", 11)
    node = helper.make_node("Softmax", ["x"], ["y"])  # the axis of opset 11 is 1, of 13 it is -1
    assert np.array_equal(evaluated([node], {"x": x}, opset)[0], y)


@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
def test_softmax_before_opset_13_takes_axes_from_both_ends(rng, name):
    """The whole as one row, and behind the last axis: rows of one element."""
    x = rng.standard_normal((2, 3, 4)).astype(np.float32)
    function = sdpa.softmax if name == "Softmax" else sdpa.log_softmax

    def computed(axis):
        node = helper.make_node(name, ["x"], ["y"], axis=axis)
        return Backend.run_node(node, [x], opset_version=11)[0]

    np.testing.assert_array_equal(computed(-3), function(x, axis=(0, 1, 2)))
    np.testing.assert_array_equal(computed(3), np.full_like(x, name == "Softmax"))
    for axis in (-4, 4):
        assert message(ValueError, computed, axis) == f"axis: expected -3 to 3, got {axis}"


@pytest.mark.parametrize("documented", [Backend, reference_ops])
def test_each_has_an_example(documented):
    assert ">>> " in documented.__doc__


def test_integer_mask_is_refused(rng):
    q = rng.standard_normal((1, 1, 2, 4)).astype(np.float32)
    node = helper.make_node("Attention", ["q", "k", "v", "m"], ["y"])
    with pytest.raises(TypeError, match="attn_mask"):
        Backend.run_node(node, [q, q, q, np.ones((2, 2), np.int64)])


@pytest.mark.parametrize("kind", [np.complex64, "<U1"])
def test_masks_of_other_types_are_refused(rng, kind):
    """The imaginary part would be lost."""
    q = rng.standard_normal((1, 1, 2, 4)).astype(np.float32)
    node = helper.make_node("Attention", ["q", "k", "v", "m"], ["y"])
    text = message(TypeError, Backend.run_node, node, [q, q, q, np.ones((2, 2), kind)])
    assert text == f"attn_mask: expected bool or floating point, got {np.dtype(kind)}"


def test_lengths_of_any_integer_type(rng):
    """They become int64 before Lq is subtracted from them."""
    q, k = (rng.standard_normal((2, 1, n, 4)).astype(np.float32) for n in (5, 7))
    node = helper.make_node("Attention", ["q", "k", "v", "", "", "", "n"], ["y"], is_causal=1)
    wide = np.array([3, 7])
    expected = sdpa.attention(q, k, k, is_causal="lower_right", key_lengths=wide)
    for lengths in wide, wide.astype(np.uint8):
        inputs = [q, k, k, None, None, None, lengths]
        np.testing.assert_array_equal(Backend.run_node(node, inputs)[0], expected)
    for lengths, wrong in (([3, 8], 8), ([-(2**63), 3], -(2**63))):
        inputs[-1] = np.array(lengths)
        expected = f"nonpad_kv_seqlen: expected integers from 0 to 7, the keys, got {wrong}"
        assert message(ValueError, Backend.run_node, node, inputs) == expected


QKV = ("q", "k", "v")


def attention_node(inputs=QKV, outputs=("y",), **attributes):
    return helper.make_node("Attention", list(inputs), list(outputs), **attributes)


def twice(node, name, value):
    node.attribute.append(helper.make_attribute(name, value))
    return node


# (node, opset): what onnx's checker refuses. local_window_size was in a draft of the operator.
INVALID = {
    "misspelt": (attention_node(is_casual=1), 25),
    "draft": (attention_node(local_window_size=2), 25),
    "before its opset": (attention_node(left_window_size=2), 23),
    "type": (attention_node(is_causal=1.0), 25),
    "integer scale": (attention_node(scale=2), 25),
    "twice": (twice(attention_node(is_causal=1), "is_causal", 0), 25),
    "eight inputs": (attention_node((*QKV, "", "", "", "", "q")), 25),
    "lengths before their opset": (attention_node((*QKV, "", "", "", "n")), 23),
    "two inputs": (attention_node(("q", "k")), 25),
    "required input": (attention_node(("q", "", "v")), 25),
    "five outputs": (attention_node(outputs=("y", "a", "b", "c", "d")), 25),
    "opset": (attention_node(), 22),
    "softmax": (helper.make_node("Softmax", ["q"], ["y"], axs=1), 13),
    "two inputs of softmax": (helper.make_node("LogSoftmax", ["q", "k"], ["y"]), 13),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_nodes_are_refused_as_by_onnx(rng, case):
    """By both doors, with the words of onnx's checker."""
    node, opset = INVALID[case]
    q = rng.standard_normal((1, 2, 3, 4)).astype(np.float32)
    named = {"q": q, "k": q, "v": q, "n": np.array([2])}
    inputs = [named.get(name) for name in node.input]
    text = message(
        onnx.checker.ValidationError, Backend.run_node, node, inputs, opset_version=opset
    )
    feed = {name: named[name] for name in node.input if name}
    arguments = [node], feed, helper.make_opsetid("", opset)
    assert message(onnx.checker.ValidationError, evaluated, *arguments) == text


# (attributes, arrays for the inputs, what the message says), of an Attention of opset 25
FOUR, THREE = np.zeros((2, 4, 3, 8), np.float32), np.zeros((2, 3, 8), np.float32)
PAST = {"past_key": FOUR, "past_value": FOUR}
REFUSED = {
    "axes": ({}, {"V": THREE}, "Q, K, V: expected three 3-D or three 4-D tensors, got shapes "
             "(2, 4, 3, 8), (2, 4, 3, 8), (2, 3, 8)"),
    "no heads": ({}, dict.fromkeys("QKV", THREE),
                 "Q: 3-D of shape (2, 3, 8), which needs the attribute q_num_heads"),
    "heads": ({"q_num_heads": 4, "kv_num_heads": 3}, dict.fromkeys("QKV", THREE),
              "K: last axis 8 is no multiple of kv_num_heads=3"),
    "no head": ({"q_num_heads": 0, "kv_num_heads": 2}, dict.fromkeys("QKV", THREE),
                "Q: last axis 8 is no multiple of q_num_heads=0"),
    "heads of four axes": ({"q_num_heads": 4}, {}, "q_num_heads, kv_num_heads: for 3-D inputs only "
                           "since opset 25, got Q of shape (2, 4, 3, 8)"),
    "half of the past": ({}, {"past_key": FOUR},
                         "past_key, past_value: expected both or neither, got one"),
    "past and lengths": ({}, PAST | {"nonpad_kv_seqlen": np.array([2, 2])},
                         "nonpad_kv_seqlen: cannot be combined with past_key and past_value"),
    "batch of the past": ({}, PAST | {"past_key": FOUR[:1]},
                          "past_key: expected shape (2, 4, 3, 8), got (1, 4, 3, 8)"),
    "width of the past": ({}, PAST | {"past_value": FOUR[..., :5]},
                          "past_value: expected shape (2, 4, 3, 8), got (2, 4, 3, 5)"),
    "length of the past": ({}, PAST | {"past_value": FOUR[:, :, :2]},
                           "past_value: expected shape (2, 4, 3, 8), got (2, 4, 2, 8)"),
    "axes of the past": ({}, dict.fromkeys(PAST, THREE),
                         "past_key: expected shape (2, 4, 'n', 8), got (2, 3, 8)"),
    "shape of lengths": ({}, {"nonpad_kv_seqlen": np.array([2])},
                         "nonpad_kv_seqlen: expected shape (2,), got (1,)"),
    "precision": ({"softmax_precision": 7}, {}, "softmax_precision: expected one of 1 (FLOAT), "
                  "11 (DOUBLE), 10 (FLOAT16), 16 (BFLOAT16), got 7"),
    "mode": ({"qk_matmul_output_mode": 4}, {},
             "qk_matmul_output_mode: expected 0, 1, 2 or 3, got 4"),
    "window": ({"left_window_size": -2}, {},
               "left_window_size: expected -1 (unbounded) or a size >= 0, got -2"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_onnx_lets_pass_is_refused_by_name(case):
    attributes, arrays, expected = REFUSED[case]
    names = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
    given = dict.fromkeys("QKV", FOUR) | arrays
    node = attention_node([name if name in given else "" for name in names], **attributes)
    inputs = [given.get(name) for name in names]
    assert message(ValueError, Backend.run_node, node, inputs) == expected


@pytest.mark.parametrize("name", ["Q", "K", "V", "past_key", "past_value"])
def test_integers_are_refused(name):
    """A result in the type of integer queries would be cut to integers."""
    given = dict.fromkeys("QKV", FOUR) | PAST
    given[name] = given[name].astype(np.int64)
    node = attention_node((*"QKV", "", *PAST))
    text = message(TypeError, Backend.run_node, node, [given.get(x) for x in node.input])
    assert text == (
        f"{name}: expected float16, bfloat16, float32 or float64, got int64; "
        f"write {name}.astype(np.float32)"
    )


def test_softmax_of_integers_is_refused():
    node = helper.make_node("Softmax", ["x"], ["y"])
    text = message(TypeError, Backend.run_node, node, [np.arange(3)])
    assert text == (
        "input: expected float16, bfloat16, float32 or float64, got int64; "
        "write input.astype(np.float32)"
    )


def test_a_batch_of_nothing(rng):
    empty = np.zeros((0, 3, 8), np.float32)
    node = attention_node(q_num_heads=4, kv_num_heads=4)
    assert Backend.run_node(node, [empty] * 3)[0].shape == (0, 3, 8)


def test_scores_without_a_name_stay_away(rng):
    q, k, v = rng.standard_normal((3, 1, 2, 3, 4)).astype(np.float32)
    node = attention_node(outputs=("y", "", "present", ""))
    y, present = evaluated(
        [node], {"q": q, "k": k, "v": v}, helper.make_opsetid("", 23), ("y", "present")
    )
    np.testing.assert_array_equal(y, sdpa.attention(q, k, v))
    np.testing.assert_array_equal(present, v)


def test_a_mask_of_another_float_type_is_rounded(rng):
    q = rng.standard_normal((1, 2, 3, 4)).astype(np.float32)
    mask = rng.standard_normal((3, 3))
    node = attention_node((*QKV, "m"))
    (y,) = Backend.run_node(node, [q, q, q, mask])
    np.testing.assert_array_equal(y, sdpa.attention(q, q, q, attn_mask=mask.astype(np.float32)))


@pytest.mark.parametrize("swapped", [False, True])
def test_values_of_another_16_bit_type(rng, swapped):
    """V has a type parameter of its own, and NumPy knows no type for both."""
    own, other = (np.float16, ml_dtypes.bfloat16)[:: -1 if swapped else 1]
    q = rng.standard_normal((1, 2, 3, 4)).astype(own)
    v = rng.standard_normal((1, 2, 3, 5)).astype(other)
    node = attention_node(outputs=("y", "", "present"))
    y, _, present = Backend.run_node(node, [q, q, v])
    assert (y.dtype, present.dtype) == (own, other)
    expected = sdpa.attention(*(x.astype(np.float32) for x in (q, q, v)))
    np.testing.assert_array_equal(y, expected.astype(own))


def test_another_device_is_refused(rng):
    q = rng.standard_normal((1, 2, 3, 4)).astype(np.float32)
    run = partial(Backend.run_node, attention_node(), [q, q, q])
    assert message(ValueError, run, device="CUDA") == "device: expected 'CPU', got 'CUDA'"


def test_a_model_counts_its_arrays(rng):
    q = rng.standard_normal((1, 2, 3, 4)).astype(np.float32)
    infos = [helper.make_tensor_value_info(x, TensorProto.FLOAT, q.shape) for x in (*QKV, "y")]
    graph = helper.make_graph([attention_node()], "graph", infos[:3], infos[3:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=10)
    prepared = Backend.prepare(model)
    assert message(ValueError, prepared.run, [q]) == "inputs: expected 3 arrays, got 1"


def test_sparse_initializers_are_refused(rng):
    shapes = dict.fromkeys((*QKV, "y"), (1, 2, 3, 3))
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()]
    parts = numpy_helper.from_array(np.float32([-5]), "m"), numpy_helper.from_array(np.array([4]))
    graph = helper.make_graph(
        [attention_node((*QKV, "m"))], "graph", infos[:3], infos[3:],
        sparse_initializer=[helper.make_sparse_tensor(*parts, (3, 3))],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=10)
    text = message(NotImplementedError, Backend.prepare, model)
    assert text == "m: this backend has no sparse initializers"
    assert not Backend.is_compatible(model)


def test_the_number_of_arrays_is_that_of_the_inputs(rng):
    q = rng.standard_normal((1, 2, 3, 4)).astype(np.float32)
    for arrays in ([q, q], [q, q, q, q]):
        assert message(ValueError, Backend.run_node, attention_node(), arrays) == (
            f"inputs: expected 3 arrays, one for each input of the node, got {len(arrays)}"
        )
    text = message(TypeError, Backend.run_node, attention_node(), [q, None, q])
    assert text == "K: expected an array, got None"


@pytest.mark.parametrize("name", ["Attention", "Softmax", "LogSoftmax"])
def test_later_versions_of_an_operator_are_refused(rng, name, monkeypatch):
    """They may have attributes of which this one knows nothing."""

    class Later:
        since_version = 99

    monkeypatch.setattr(onnx.defs, "get_schema", lambda *_: Later)
    node = attention_node() if name == "Attention" else helper.make_node(name, ["q"], ["y"])
    q = rng.standard_normal((1, 2, 3, 4)).astype(np.float32)
    known = "23, 24, 25" if name == "Attention" else "1, 11, 13"
    expected = f"ai.onnx::{name}-99: this backend has the versions {known}"
    inputs = [q] * len(node.input)
    assert message(NotImplementedError, Backend.run_node, node, inputs) == expected
    feed = dict.fromkeys(node.input, q)
    arguments = [node], feed, helper.make_opsetid("", 25)
    assert message(NotImplementedError, evaluated, *arguments) == expected


def test_is_compatible_looks_at_versions(monkeypatch):
    graph = helper.make_graph([attention_node()], "graph", [], [])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)])
    assert Backend.is_compatible(model)
    later = type("Later", (), {"since_version": 99})
    monkeypatch.setattr(onnx.defs, "get_schema", lambda *_: later)
    assert not Backend.is_compatible(model)


def test_other_operators_are_refused():
    node = helper.make_node("Relu", ["x"], ["y"])
    with pytest.raises(NotImplementedError, match="Relu"):
        Backend.run_node(node, [np.zeros(3, np.float32)])


def test_evaluator_computes_with_sdpa(rng):
    """Bit for bit, also of an input that only DLPack brings to NumPy."""
    q, k, v = rng.standard_normal((3, 1, 2, 5, 8)).astype(np.float32)
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], softcap=2.0, is_causal=1)
    expected = sdpa.attention(q, k, v, softcap=2.0, is_causal=True)
    inputs = {"q": OnlyDlpack(q), "k": k, "v": v}
    got = evaluated([node], inputs, helper.make_opsetid("", 23))
    np.testing.assert_array_equal(got[0], expected)
    np.testing.assert_array_equal(Backend.run_node(node, [OnlyDlpack(q), k, v])[0], expected)


def test_absent_inputs_after_an_output_without_a_name(rng):
    """The evaluator keeps both under the empty name; a mask left out must stay so."""
    q, k, v, past_k, past_v = rng.standard_normal((5, 1, 2, 3, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Attention", ["q", "k", "v"], ["x", "", "", "scores"]),
        helper.make_node("Attention", ["x", "k", "v", "", "past_k", "past_v"], ["y"]),
    ]
    inputs = {"q": q, "k": k, "v": v, "past_k": past_k, "past_v": past_v}
    y, scores = evaluated(nodes, inputs, helper.make_opsetid("", 23), ("y", "scores"))
    x = sdpa.attention(q, k, v)
    past = np.concatenate((past_k, k), axis=2), np.concatenate((past_v, v), axis=2)
    np.testing.assert_array_equal(y, sdpa.attention(x, *past))
    np.testing.assert_array_equal(scores, sdpa.attention_weights(q, k, stage="scores"))


def test_attributes_of_a_function_reach_the_operator(rng):
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"])
    for name in ("q_num_heads", "kv_num_heads"):
        node.attribute.add(name=name, ref_attr_name="heads", type=onnx.AttributeProto.INT)
    opsets = [helper.make_opsetid("", 23)]
    function = helper.make_function(
        "own", "Heads", ["q", "k", "v"], ["y"], [node], opsets, ["heads"]
    )
    evaluator = ReferenceEvaluator(function, new_ops=reference_ops())
    x = rng.standard_normal((1, 5, 8)).astype(np.float32)
    (y,) = evaluator.run(None, {"q": x, "k": x, "v": x}, attributes={"heads": 4})
    heads = x.reshape(1, 5, 4, 2).swapaxes(1, 2)
    expected = sdpa.attention(heads, heads, heads).swapaxes(1, 2).reshape(1, 5, 8)
    np.testing.assert_array_equal(y, expected)


# -------------------------------------------------------------------------------- a whole model


def encoder(rng, layers=2, d=16, heads=4):
    """A transformer encoder: x (batch, length, d), boolean keep (batch, 1, length, length)."""
    nodes, weights = [], {}

    def weight(*shape):
        name = f"w{len(weights)}"
        weights[name] = (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
        return name

    def apply(op, *inputs, **attributes):
        name = f"t{len(nodes)}"
        nodes.append(helper.make_node(op, inputs, [name], **attributes))
        return name

    def linear(x, n_in, n_out):
        return apply("Add", apply("MatMul", x, weight(n_in, n_out)), weight(n_out))

    x = "x"
    for _ in range(layers):
        y = apply("LayerNormalization", x, weight(d), weight(d))
        qkv = [linear(y, d, d) for _ in range(3)]
        y = apply("Attention", *qkv, "keep", q_num_heads=heads, kv_num_heads=heads)
        x = apply("Add", x, linear(y, d, d))
        y = apply("LayerNormalization", x, weight(d), weight(d))
        x = apply("Add", x, linear(apply("Gelu", linear(y, d, 4 * d)), 4 * d, d))
    nodes.append(helper.make_node("Softmax", [linear(x, d, 5)], ["probabilities"]))
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "encoder",
        [
            info("x", TensorProto.FLOAT, ["batch", "length", d]),
            info("keep", TensorProto.BOOL, ["batch", 1, "length", "length"]),
        ],
        [info("probabilities", TensorProto.FLOAT, ["batch", "length", 5])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opsets = [helper.make_opsetid("", 23)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    onnx.checker.check_model(model)
    return model


def test_whole_model(rng, monkeypatch):
    model = encoder(rng)
    keep = np.arange(7) < np.array([7, 4])[:, None, None, None]
    feed = {
        "x": rng.standard_normal((2, 7, 16)).astype(np.float32),
        "keep": np.repeat(keep, 7, axis=2),  # ONNX Runtime broadcasts no queries
    }
    calls = []
    attention = sdpa.attention
    monkeypatch.setattr(sdpa, "attention", lambda *x, **y: calls.append(0) or attention(*x, **y))
    (got,) = ReferenceEvaluator(model, new_ops=reference_ops()).run(None, feed)
    assert len(calls) == 2
    (plain,) = ReferenceEvaluator(model).run(None, feed)
    assert len(calls) == 2
    np.testing.assert_allclose(got, plain, rtol=1e-5, atol=1e-6)
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install '.[peers]'")
    session = runtime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    np.testing.assert_allclose(got, session.run(None, feed)[0], rtol=1e-5, atol=1e-6)
