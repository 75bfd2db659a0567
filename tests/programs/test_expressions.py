"""Random expressions: values and all derivatives of their codes, against the oracle's numbers."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.programs import instructions, run

from sdpa import mask_program, score_program
from sdpa._programs import _prepare
from sdpa._programs._composed import Library, composed
from sdpa.reference.programs import Moved, indices_of, let_through, modified

SHAPE = (2, 3, 5, 4)
RNG = np.random.default_rng(49)
SCORE, SCORE_T, UPSTREAM, SECOND = RNG.normal(size=(4, *SHAPE)) * 1.5
TABLE, TABLE_T = RNG.normal(size=(2, 3, 12))
SLOPES, SLOPES_T = RNG.normal(size=(2, 3))
TYPES = RNG.integers(0, 4, size=12)
ARGS, ARGS_T = (TABLE, SLOPES, TYPES), (TABLE_T, SLOPES_T, None)
INDICES = indices_of(SHAPE, 2)
NUMPY = Library(np, np.asarray)
INPUTS = dict(zip(("batch", "head", "query", "key"), INDICES, strict=True))

# Each is a function of (score, b, h, q, k, table, slopes, types).
REALS = st.sampled_from(
    [
        lambda s, b, h, q, k, *_: s,
        lambda s, b, h, q, k, table, *_: table[h, q + k],
        lambda s, b, h, q, k, table, slopes, *_: slopes[h],
        lambda s, b, h, q, k, *_: 0.75,
        lambda s, b, h, q, k, *_: -2.0,
    ]
)
INTEGERS = st.sampled_from(
    [
        lambda s, b, h, q, k, *_: b,
        lambda s, b, h, q, k, *_: h,
        lambda s, b, h, q, k, *_: q,
        lambda s, b, h, q, k, *_: k,
        lambda s, b, h, q, k, t, a, types: types[q + k],
        lambda *_: 3,
        lambda *_: -2,
    ]
)
UNARY = [
    np.negative, np.abs, np.tanh, np.square, np.sign, np.floor, np.expm1,
    lambda x: np.exp(np.minimum(x, 3.0)), lambda x: np.log(np.abs(x) + 0.5),
    lambda x: np.log1p(np.square(x)), lambda x: np.sqrt(1.0 + x * x),
    lambda x: np.clip(x, -1.5, 2.5), lambda x: x**3, lambda x: np.reciprocal(2.0 + np.square(x)),
    lambda x: np.exp2(np.clip(x, -3.0, 3.0)), lambda x: np.log2(1.5 + np.abs(x)), np.ceil,
    lambda x: (0.25 + np.abs(x)) ** 0.5, lambda x: (1.25 + np.abs(x)) ** -1.5,
]  # fmt: skip
BINARY = [np.add, np.subtract, np.multiply, np.maximum, np.minimum, lambda x, y: x / (1.5 + y * y)]
WHOLE = [np.add, np.subtract, np.multiply, np.maximum, np.minimum,
         lambda x, y: x // 3 - y, lambda x, y: x % 4 + y, lambda x, y: x // (y * y + 1),
         lambda x, y: (x & 7) | (y & 3), lambda x, y: x ^ y, lambda x, y: x >> (y & 3),
         lambda x, y: abs(x) << (y & 3)]  # fmt: skip
RELATIONS = [np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal]
LOGICAL = [np.logical_and, np.logical_or, np.logical_xor]


def unary(f, x):
    return lambda *given: f(x(*given))


def binary(f, x, y):
    return lambda *given: f(x(*given), y(*given))


def choice(condition, x, y):
    return lambda *given: np.where(condition(*given), x(*given), y(*given))


def whole(x):
    """Small again, so that no product leaves 64 bits."""
    return lambda *given: x(*given) % 16 - 5


def inner(score, b, h, q, k, table, slopes, types):
    """Depends on the score, and on an element of each argument."""
    return score * slopes[h] + table[h, q + k] / (types[k] + 1)


INTEGERS = st.recursive(
    INTEGERS,
    lambda inner: st.builds(binary, st.sampled_from(WHOLE), inner, inner).map(whole),
    max_leaves=4,
)
BOOLEANS = st.recursive(
    st.builds(binary, st.sampled_from(RELATIONS), INTEGERS, INTEGERS)
    | st.builds(binary, st.sampled_from(RELATIONS), REALS, INTEGERS),
    lambda inner: (
        st.builds(binary, st.sampled_from(LOGICAL), inner, inner)
        | st.builds(unary, st.just(np.logical_not), inner)
    ),
    max_leaves=4,
)
REALS = st.recursive(
    st.one_of(st.just(inner), REALS, INTEGERS.map(lambda x: lambda *given: x(*given) / 4)),
    lambda inner: (
        st.builds(unary, st.sampled_from(UNARY), inner)
        | st.builds(binary, st.sampled_from(BINARY), inner, inner)
        | st.builds(choice, BOOLEANS, inner, inner)
    ),
    max_leaves=8,
)


def assert_close(got, expected, size):
    """Equal to rounding, relative to the largest number that is computed."""
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-11 * size)


EACH = [lambda *given, f=f: f(inner(*given)) for f in UNARY]
EACH += [lambda *given, f=f: f(inner(*given), given[0] * given[0]) for f in BINARY]


@pytest.mark.parametrize("body", EACH, ids=range(len(EACH)))
def test_each_operation(body):
    check(*true_values(body))


def test_a_constant_beyond_the_integers_is_the_least():
    """As in the core; NumPy's is that of the processor."""
    program = mask_program(lambda b, h, q, k: np.where(q < 0, 1e20, 1e20).astype(int) < k)
    assert repr(program).endswith(f"{-(2**63)} < k")


FOLDED = {
    "7 // 2": lambda c: c(7) // c(2),
    "-7 % 4": lambda c: c(-7) % c(4),
    "2 < 3": lambda c: (c(2) < c(3)).astype(float),
    "1 / (1 + exp(0.5))": lambda c: c(-0.5).sigmoid(),
    "2.5**3": lambda c: c(2.5) ** 3,
    "int(-2.75)": lambda c: c(-2.75).astype(int),
}


@pytest.mark.parametrize("text", FOLDED)
def test_operations_on_constants_are_computed_once(text):
    def f(score, b, h, q, k):
        return score + FOLDED[text](lambda number: np.where(q < 0, number, number))

    *_, step = repr(score_program(f)).splitlines()
    assert step == f"  1  score + {eval(text, {'exp': math.exp}) * 1.0}"


def test_text_of_a_program_without_a_step():
    assert repr(mask_program(lambda b, h, q, k: True)) == "mask program of <lambda>\n  True"


def test_text_of_a_long_program():
    """Its first and last steps, 24 lines."""

    def f(score, b, h, q, k):
        for number in range(40):
            score = np.tanh(score) + number / 7
        return score

    head, *lines = repr(score_program(f)).splitlines()
    assert head == "score program of f"
    assert len(lines) == 24
    assert lines[0].split() == ["1", "x1", "=", "tanh(score)"]
    assert lines[12].split() == ["(56", "more)"]
    assert lines[-1].split()[0] == "79"


@settings(max_examples=200)
@given(body=REALS)
def test_scores(body):
    *values, size = true_values(body)
    assume(size < 1e4)
    check(*values, size)


@np.errstate(all="ignore")
def true_values(body):
    """(the function, its values, what moves with them, the largest number among all)."""

    def f(score, b, h, q, k, table, slopes, types):
        return body(score, b, h, q, k, table, slopes, types)

    visible = np.ones(SHAPE, bool)
    value = modified(SCORE, visible, INDICES, f, ARGS)
    expected = Moved(SCORE, visible, INDICES, f, ARGS, SCORE_T, ARGS_T)
    size = max(1, *(np.abs(x).max() for x in (value, expected.tangent, expected.bend)))
    return f, value, expected, size


def check(f, value, expected, size):
    """The codes of a function of scores against the oracle."""
    prepared = _prepare(False, f, ARGS)
    with np.errstate(all="ignore"):
        assert_close(composed(NUMPY, False, f, ARGS, ARGS, **INPUTS, score=SCORE), value, size)
    inputs = INPUTS | {"score": SCORE, "tangent": SCORE_T}
    for variant, names in ((0, "value"), (1, "value slope"), (2, "- - tangent"),
                           (3, "- slope tangent bend")):  # fmt: skip
        outputs, _ = run(prepared, variant, inputs, ARGS_T)
        for number, name in enumerate(names.split()):
            if name != "-":
                true = value if name == "value" else getattr(expected, name)
                assert_close(outputs[number], true, size)
    inputs |= {"upstream": UPSTREAM, "second": SECOND}
    for variant, sums in ((4, (UPSTREAM,)), (5, (SECOND, UPSTREAM))):
        _, gradients = run(prepared, variant, inputs, ARGS_T)
        for number, true in enumerate(expected.of_arguments(*sums)[:2]):
            assert_close(gradients.get(number, 0), true, size * SCORE.size)


@settings(max_examples=200)
@given(body=BOOLEANS)
def test_masks(body):
    def f(b, h, q, k, table, slopes, types):
        return body(0.25, b, h, q, k, table, slopes, types)

    expected = let_through(np.ones(SHAPE, bool), INDICES, f, ARGS)
    outputs, _ = run(_prepare(True, f, ARGS), 0, INPUTS)
    np.testing.assert_array_equal(outputs[0], expected)
    again = composed(NUMPY, True, f, ARGS, ARGS, **INPUTS)
    np.testing.assert_array_equal(np.broadcast_to(again, SHAPE), expected)


@settings(max_examples=100)
@given(body=REALS)
def test_few_registers(body):
    """The section of pairs needs fewer registers than it has instructions."""
    prepared = _prepare(False, lambda *given: body(*given), ARGS)
    for code in prepared.codes:
        sections, n_registers = instructions(code)
        early = sum(map(len, sections[:3]))
        written = {row[1] for row in sections[3] if row[0] not in ("output", "scatter")}
        assert written == set(range(early, n_registers))
        assert len(written) <= len(sections[3])
