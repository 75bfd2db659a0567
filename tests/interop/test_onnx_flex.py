"""Graphs of ONNX's FlexAttention as programs, beside ONNX's evaluator of whole tensors."""

import json
import re

import numpy as np
import pytest

pytest.importorskip("onnx", reason="needs onnx: pip install '.[peers]'")

from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from support.calls import message

from sdpa.interop.onnx import Backend, _graphs, reference_ops

DOMAIN = "ai.onnx.preview"
SHAPE = (2, 4, 7, 9)
SIZES = ("shape = Shape(scores)", "l = Gather(shape, two)", "s = Gather(shape, three)")
POSITIONS = (
    *SIZES,
    "q1 = Range(zero, l, one)", "q = Unsqueeze(q1, one1)",
    "k1 = Range(zero, s, one)", "k = Unsqueeze(k1, zero1)",
)  # fmt: skip
NUMBERS = {
    "zero": 0, "one": 1, "two": 2, "three": 3, "zero1": [0], "one1": [1], "half": np.float32(0.5),
    "low": np.float32(-np.inf), "buckets": 12, "five": 5,
    "order": [2, 0, 1], "minus3": -3, "minus1": np.float32(-1), "size": [4, 7, 9],
    "bytes": np.array([3, 250, 7, 200, 1, 0, 9, 255, 4], np.uint8), "small": np.float32(0.01),
    "column": [1, -1, 1], "nothing": 0, "five0": np.zeros(5, np.float32), "zeros": [0, 0, 0],
    "flat": [-1], "wide": [3, 4, 7, 9],
    "table": np.linspace(-1, 1, 48, dtype=np.float32).reshape(12, 4),
    "bias": np.linspace(-2, 2, 4 * 9, dtype=np.float32).reshape(4, 1, 9),
    "document": np.array([0, 0, 0, 1, 1, 1, 2, 2, 2]),
}  # fmt: skip
# Each line: result = Operator(operands, attributes); _ stands for no operand.
SCORES = {
    "causal": (*POSITIONS, "m = GreaterOrEqual(q, k)", "y = Where(m, scores, low)"),
    "softplus": ("a = Softplus(scores)", "b = Sigmoid(scores)", "y = Mul(a, b)"),
    "dense bias": ("a = Add(scores, bias)", "y = Tanh(a)"),
    "T5": (
        *POSITIONS, "d = Sub(k, q)", "i = Add(d, five)", "j = Mod(i, buckets)",
        "t = Gather(table, j)", "u = Transpose(t, perm=[2, 0, 1])", "y = Add(scores, u)",
    ),
    "division": (
        *POSITIONS, "d = Sub(k, q)", "e = Div(d, two)", "f = Cast(e, to=1)", "y = Sub(scores, f)",
    ),
    "documents": (
        *SIZES, "own = Gather(document, q0)", "a = Unsqueeze(document, zero1)",
        "b = Unsqueeze(own, one1)", "m = Equal(a, b)", "y = Where(m, scores, low)",
    ),
    "remainders towards zero": (
        *POSITIONS, "d = Sub(k, q)", "r = Mod(d, minus3, fmod=1)", "f = Cast(r, to=1)",
        "y = Add(scores, f)",
    ),
    "casts": (
        "a = Cast(scores, to=7)", "b = Cast(a, to=9)", "c = Cast(b, to=7)", "d = Cast(c, to=11)",
        "e = Cast(d, to=1)", "f = Cast(a, to=1)", "y = Add(e, f)",
    ),
    "power of integers": (
        *POSITIONS, "r = Pow(k, half)", "f = Cast(r, to=1)", "y = Add(scores, f)",
    ),
    "small integers": (
        *POSITIONS, "a = Gather(bytes, k)", "b = Gather(bytes, q)", "d = Sub(a, b)",
        "f = Cast(d, to=1)", "g = Mul(f, small)", "y = Add(scores, g)",
    ),
    "the second output": (
        "a,b = Split(table, num_outputs=2, axis=1)", "c = ReduceSum(b)", "y = Add(scores, c)",
    ),
    "clip": ("a = Clip(scores, _, half)", "y = Clip(a, minus1)"),
    "squeezed and expanded": (
        *POSITIONS, "a = Squeeze(q)", "b = Unsqueeze(a, one1)", "c = Squeeze(b, one1)",
        "d = Unsqueeze(c, one1)", "e = Expand(d, size)", "f = Cast(e, to=1)", "y = Mul(scores, f)",
    ),
    "a node of a constant": (
        "c = Constant(value_int=3)", "d = Cast(c, to=1)", "y = Mul(scores, d)",
    ),
    "range of fixed tensors": (
        *POSITIONS, "c = CumSum(k1, zero)", "f = Cast(c, to=1)", "y = Add(scores, f)",
    ),
}  # fmt: skip
NUMBERS["q0"] = np.arange(7)
POSITIONS_OF_PROBS = (
    "shape = Shape(probs)", "s = Gather(shape, three)", "k = Range(zero, s, one)",
    "f = Cast(k, to=1)",
)  # fmt: skip


def graph(lines, name="scores"):
    nodes = []
    for line in lines:
        result, call = line.split(" = ", 1)
        op, rest = call.rstrip(")").split("(")
        attributes = re.findall(r"(\w+)=(\[.*?\]|[\w.]+)", rest)
        operands = re.findall(r"\w+", re.sub(r"(, )?\w+=.*", "", rest))
        operands = ["" if x == "_" else x for x in operands]
        given = {key: json.loads(value) for key, value in attributes}
        nodes.append(helper.make_node(op, operands, result.split(","), **given))
    used = {x for node in nodes for x in node.input} & set(NUMBERS)
    constants = []
    for x in sorted(used):
        value = np.asarray(NUMBERS[x])
        constants.append(numpy_helper.from_array(value, x))
    pairs = [
        helper.make_tensor_value_info(x, TensorProto.FLOAT, ["B", "H", "L", "S"])
        for x in (name, "y")
    ]
    return helper.make_graph(nodes, "graph", pairs[:1], pairs[1:], constants)


def model(opset=26, **graphs):
    node = helper.make_node("FlexAttention", ["Q", "K", "V"], ["Y"], domain=DOMAIN, **graphs)
    infos = [helper.make_tensor_value_info(x, TensorProto.FLOAT, list("abcd")) for x in "QKVY"]
    whole = helper.make_graph([node], "model", infos[:3], infos[3:])
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(whole, opset_imports=opsets, ir_version=10)


def operands(rng):
    batch, heads, n_q, n_k = SHAPE
    shapes = ((batch, heads, n_q, 8), (batch, 2, n_k, 8), (batch, 2, n_k, 5))
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


@pytest.mark.parametrize("case", SCORES)
def test_score_mod(rng, case):
    given = model(score_mod=graph(SCORES[case]))
    inputs = dict(zip("QKV", operands(rng), strict=True))
    (expected,) = ReferenceEvaluator(given).run(None, inputs)
    (y,) = ReferenceEvaluator(given, new_ops=reference_ops()).run(None, inputs)
    np.testing.assert_allclose(y, expected, rtol=2e-5, atol=2e-6)
    (again,) = Backend.prepare(given).run(list(inputs.values()))
    np.testing.assert_array_equal(again, y)


def test_axes_were_attributes(rng):
    """Before opset 13; with as many keys as queries, since these would be taken for each other."""
    lines = (
        *SIZES, "q1 = Range(zero, l, one)", "a = Reshape(q1, column)", "b = Squeeze(a, axes=[0])",
        "c = Unsqueeze(b, axes=[0, 1])", "f = Cast(c, to=1)", "y = Add(scores, f)",
    )  # fmt: skip
    given = model(opset=12, score_mod=graph(lines))
    x = rng.standard_normal((1, 1, 7, 8), np.float32)
    (expected,) = ReferenceEvaluator(given).run(None, dict.fromkeys("QKV", x))
    (y,) = Backend.prepare(given).run([x, x, x])
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_positions_become_positions():
    """No tensor of all pairs stands for them."""
    options = _graphs.score_options(graph(SCORES["causal"]), {"": 26}, SHAPE)
    assert options["score_args"] is None
    assert "x1 = q >= k" in repr(options["score_mod"])


def test_tables_are_read_by_indices():
    options = _graphs.score_options(graph(SCORES["T5"]), {"": 26}, SHAPE)
    assert [x.shape for x in options["score_args"]] == [(12, 4)]


def test_a_constant_prob_mod(rng):
    lines = ("a = Mul(half, probs)", "b = Neg(a)", "y = Div(b, five1)")
    NUMBERS["five1"] = np.float32(5)
    given = model(prob_mod=graph(lines, "probs"))
    inputs = dict(zip("QKV", operands(rng), strict=True))
    (expected,) = ReferenceEvaluator(given).run(None, inputs)
    (y,) = Backend.prepare(given).run(list(inputs.values()))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_a_factor_of_probabilities_beyond_16_bits():
    """Twice the values is infinite in float16, their mean is 0."""
    NUMBERS["two0"] = np.float32(2)
    q = np.zeros((1, 1, 2, 4), np.float16)
    value = np.array([60000, -60000], np.float16).reshape(1, 1, 2, 1)
    node = model(prob_mod=graph(["y = Mul(probs, two0)"], "probs")).graph.node[0]
    (y,) = Backend.run_node(node, [q, q, value])
    assert y.dtype == np.float16
    np.testing.assert_array_equal(y, np.zeros((1, 1, 2, 1)))


CONSTANT = "prob_mod: expected a constant times the probabilities, got "
# (what is refused, what the message says)
REFUSED = {
    "softmax": (
        {"score_mod": graph(["y = Softmax(scores)"])},
        "score_mod: Softmax of scores, which no program can compute pair by pair; expected one of ",
    ),
    "transposed": (
        {"score_mod": graph(["t = Transpose(scores, perm=[0, 1, 3, 2])", "y = Tanh(t)"])},
        "score_mod: scores of another pair than that of the result",
    ),
    "outer": (
        {"score_mod": graph(["y = Add(scores, outside)"])},
        "score_mod: Add reads outside of the graph around it",
    ),
    "square": (
        {"prob_mod": graph(["y = Mul(probs, probs)"], "probs")},
        f"{CONSTANT}a product of two; ",
    ),
    "shift": (
        {"prob_mod": graph(["y = Add(probs, half)"], "probs")},
        CONSTANT,
    ),
    "table": (
        {"prob_mod": graph(["y = Mul(probs, bias)"], "probs")},
        f"{CONSTANT}a graph with the table bias; ",
    ),
    "quotient": (
        {"prob_mod": graph(["y = Div(probs, probs)"], "probs")},
        f"{CONSTANT}a quotient of two; ",
    ),
    "exponential": (
        {"prob_mod": graph(["y = Exp(probs)"], "probs")},
        f"{CONSTANT}np.exp; ",
    ),
    "choice": (
        {"prob_mod": graph(["m = Less(half, low)", "y = Where(m, probs, half)"], "probs")},
        f"{CONSTANT}np.where; ",
    ),
    "constant": (
        {"prob_mod": graph(["y = Add(half, low)"], "probs")},
        f"{CONSTANT}a constant; ",
    ),
    "reshape": (
        {"score_mod": graph(["y = Reshape(scores, flat)"])},
        "score_mod: Reshape of (2, 4, 9, 9) to (648,), more than axes of one element",
    ),
    "range": (
        {"prob_mod": graph((*POSITIONS_OF_PROBS, "y = Mul(probs, f)"), "probs")},
        f"{CONSTANT}a Range of positions; ",
    ),
    "transposed probabilities": (
        {"prob_mod": graph(["y = Transpose(probs, perm=[0, 1, 3, 2])"], "probs")},
        "prob_mod: scores of another pair than that of the result",
    ),
    "bytes": (
        {"score_mod": graph(["a = Cast(scores, to=2)", "y = Cast(a, to=1)"])},
        "score_mod: Cast to UINT8, which programs do not have",
    ),
    "short floats": (
        {"score_mod": graph(["a = Cast(scores, to=17)", "y = Cast(a, to=1)"])},
        "score_mod: Cast to FLOAT8E4M3FN, which programs do not have",
    ),
    "choice of bytes": (
        {
            "score_mod": graph(
                ["m = Less(scores, half)", "a = Where(m, bytes, bytes)", "y = Cast(a, to=1)"]
            )
        },
        "score_mod: Where of uint8 beside scores, which programs do not have",
    ),
    "attribute": (
        {"score_mod": graph(["y = Clip(scores, min=0.5)"])},
        "score_mod: Clip with the attribute min, which is no longer one",
    ),
    "remainder of floats": (
        {"score_mod": graph(["y = Mod(scores, half, fmod=1)"])},
        "score_mod: Mod of floats, of which programs know no exact remainder",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    graphs, start = REFUSED[case]
    ((name, given),) = graphs.items()
    function = _graphs.score_options if name == "score_mod" else _graphs.probability_factor
    text = message(NotImplementedError, function, given, {"": 26}, (2, 4, 9, 9))
    assert text.startswith(start), text


def test_a_graph_has_one_input_and_one_output():
    given = graph(["y = Tanh(scores)"])
    given.output.append(given.output[0])
    text = message(ValueError, _graphs.score_options, given, {"": 26}, SHAPE)
    assert text == "score_mod: expected a graph of one input and one output, got 1 and 2"


@pytest.mark.parametrize(
    ("lines", "got"),
    [(["y = Expand(half, wide)"], "(3, 4, 7, 9)"), (["z = Tanh(scores)"], "another")],
)
def test_the_output_has_the_shape_of_the_scores(lines, got):
    text = message(ValueError, _graphs.score_options, graph(lines), {"": 26}, SHAPE)
    assert text == f"score_mod: expected an output of shape {SHAPE}, got {got}"


# (lines, the operator and the shapes that the message has)
MISSHAPED = {
    "elementwise": (["y = Add(scores, five0)"], "Add of shapes (2, 4, 7, 9), (5,): "),
    "expand": (
        [*POSITIONS, "y = Expand(k, flat5)"], "Expand of shapes (1, 9), (2,): ",
    ),
    "reshape": ([*POSITIONS, "y = Reshape(k1, zeros)"], "Reshape of shapes (9,), (3,): "),
    "range": (["y = Range(zero, five, nothing)"], "Range of shapes (), (), (): "),
}  # fmt: skip
NUMBERS["flat5"] = [5, 5]


@pytest.mark.parametrize("case", MISSHAPED)
def test_shapes_that_do_not_fit_are_named(case):
    lines, start = MISSHAPED[case]
    text = message(ValueError, _graphs.score_options, graph(lines), {"": 26}, SHAPE)
    assert text.startswith(f"score_mod: {start}"), text


def test_a_query_without_keys_is_zero(rng):
    everything = graph(["m = Less(scores, low)", "y = Where(m, scores, low)"])
    (y,) = Backend.prepare(model(score_mod=everything)).run(operands(rng))
    assert np.all(y == 0)


@pytest.mark.parametrize("name", "KV")
def test_batches_are_equal(rng, name):
    """Broadcast, the scores would have another shape than the graph is told."""
    given = dict(zip("QKV", operands(rng), strict=True))
    given = {n: x if n == name else x[:1] for n, x in given.items()}
    node = model().graph.node[0]
    text = message(ValueError, Backend.run_node, node, list(given.values()))
    assert text == f"{name}: expected Q's batch of 1, got shape {given[name].shape}"


@pytest.mark.parametrize("name", "QKV")
def test_axes(rng, name):
    given = dict(zip("QKV", operands(rng), strict=True))
    given[name] = given[name][0]
    node = model().graph.node[0]
    text = message(ValueError, Backend.run_node, node, list(given.values()))
    assert text == f"{name}: expected a tensor of four axes, got shape {given[name].shape}"
