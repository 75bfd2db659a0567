"""Arrays and constants that a function captures, and programs that are known from before."""

import functools
import pickle
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from support.calls import message
from support.helpers import BFLOAT16
from support.programs import run

import sdpa
from sdpa import reference
from sdpa._programs import FOREIGN, Foreign, _prepare, _program, lifted

GRID = dict(zip(("batch", "head", "query", "key"), np.ogrid[:1, :2, :5, :5], strict=True))
SCORE = np.random.default_rng(50).normal(size=(1, 2, 5, 5))
GLOBAL = np.arange(5.0)


def values(function, args=()):
    """What the code of a function of scores computes."""
    return run(_prepare(False, function, args), 0, GRID | {"score": SCORE})[0][0]


def plus(x):
    return np.broadcast_to(SCORE + x, SCORE.shape)


def of_closure(array):
    return lambda score, b, h, q, k: score + array[k]


def of_list(array):
    parts = [{"table": array}, 2]
    return lambda score, b, h, q, k: score + parts[0]["table"][k]


def of_inner(array):
    def inner(k):
        return array[k]

    return lambda score, b, h, q, k: score + inner(k)


def of_default(array):
    return lambda score, b, h, q, k, *, own=array: score + own[k]


def of_partial(array):
    return functools.partial(lambda own, score, b, h, q, k: score + own[k], array)


@pytest.mark.parametrize("make", [of_closure, of_list, of_inner, of_default, of_partial])
def test_captured_arrays(make):
    """Their values are those of each call, and they have no gradient."""
    for array in (np.arange(5.0), np.arange(5.0) ** 2):
        prepared = _prepare(False, make(array), None)
        assert prepared.n_args == 0
        assert prepared.arrays[0] is array
        assert prepared.codes[4] is None
        np.testing.assert_array_equal(values(make(array)), plus(array))


def test_globals():
    np.testing.assert_array_equal(
        values(lambda score, b, h, q, k: score + GLOBAL[q]), plus(GLOBAL[:, None])
    )


def test_globals_that_an_inner_function_reads():
    def f(score, b, h, q, k):
        return (lambda i: score + GLOBAL[i])(k)

    np.testing.assert_allclose(values(f), plus(GLOBAL))


def test_one_array_under_two_names_and_two_arrays():
    """Codes of one array must not serve two of the same shape."""

    def make(first, second):
        return lambda score, b, h, q, k: score + (first[k] - second[k])

    x, y = np.arange(5.0), np.ones(5)
    np.testing.assert_array_equal(values(make(x, x)), plus(0 * x))
    np.testing.assert_array_equal(values(make(x, y)), plus(x - y))


@pytest.mark.parametrize(
    "constants", [(1, 1.0, True), (0.0, -0.0), (2, 3), (BFLOAT16.type(0.5), np.float16(0.25))]
)
def test_constants_are_part_of_the_program(constants):
    def make(c):
        return lambda score, b, h, q, k: (
            score / (c + 1) + (k + c) / 2 + np.where(c * score > k, 1, c)
        )

    for c in constants:
        number = c if isinstance(c, int) else float(c)
        expected = make(number)(SCORE, *GRID.values())
        np.testing.assert_allclose(values(make(c)), expected, rtol=1e-14)


def test_objects_are_asked_each_time():
    settings = SimpleNamespace(window=1)

    def near(b, h, q, k):
        return abs(q - k) <= settings.window

    for settings.window in (1, 2):
        outputs, _ = run(_prepare(True, near, None), 0, GRID)
        np.testing.assert_array_equal(
            outputs[0], np.broadcast_to(near(*GRID.values()), SCORE.shape)
        )


def test_functions_of_one_code():
    """Each is told from the others wherever it stands, also behind both."""

    def times(c):
        return lambda score: score * c

    def make(first, second, third):
        return lambda score, b, h, q, k: first(score) + 10 * second(score) + 100 * third(score)

    two, three = times(2.0), times(3.0)
    np.testing.assert_allclose(values(make(two, three, two)), SCORE * 232)
    np.testing.assert_allclose(values(make(two, three, three)), SCORE * 332)


def test_objects_of_libraries_are_asked_each_time():
    """A cache, and a polynomial, which has no hash."""
    cache, token = sdpa.KVCache(1, 1, 1, capacity=8), np.ones((1, 1, 1, 1))
    for position in (1, 2):
        cache.append(token, token)
        found = values(lambda score, b, h, q, k: score + int(cache.positions[0]))
        np.testing.assert_array_equal(found, plus(position))
    line = np.polynomial.Polynomial([0.0, 1.0])
    for line.coef in ([0.0, 2.0], [0.0, 3.0]):
        found = values(lambda score, b, h, q, k: score * line.coef[1])
        np.testing.assert_allclose(found, SCORE * line.coef[1])


def test_attributes_of_functions():
    def f(score, b, h, q, k):
        return score + f.table[k] * f.factor

    for f.factor in (1.0, 2.0):
        for f.table in (np.arange(5.0), np.ones(5)):
            np.testing.assert_array_equal(values(f), plus(f.table * f.factor))


def test_names_of_attributes_and_of_keyword_defaults():
    """The same values under names that have changed places."""

    def f(score, b, h, q, k):
        return score * f.first + f.second

    for names in (("first", "second"), ("second", "first")):
        vars(f).clear()
        vars(f).update(zip(names, (2.0, 3.0), strict=True))
        np.testing.assert_array_equal(values(f), SCORE * f.first + f.second)

    def g(score, b, h, q, k, *, first=2.0, second=3.0):
        return score * first + second

    for g.__kwdefaults__ in ({"first": 2.0, "second": 3.0}, {"second": 2.0, "first": 3.0}):
        np.testing.assert_array_equal(values(g), g(SCORE, *GRID.values()))


def test_globals_of_a_function_that_wraps_one_of_numpy():
    """It has NumPy's module, but is none of NumPy's functions."""
    contents = {"wrapped": functools.wraps(np.where)}
    exec("@wrapped\ndef shifted(score, k): return score * factor + table[k]", contents)
    shifted = contents["shifted"]
    assert shifted.__module__ == "numpy"
    for contents["factor"] in (1.0, 2.0):
        for contents["table"] in (np.arange(5.0), np.ones(5)):
            found = values(lambda score, b, h, q, k: shifted(score, k))
            np.testing.assert_array_equal(found, shifted(SCORE, np.arange(5)))


def test_what_a_function_imports(monkeypatch):
    settings = ModuleType("settings_of_a_test")
    monkeypatch.setitem(sys.modules, settings.__name__, settings)

    def by_name(score, b, h, q, k):
        import settings_of_a_test

        return score + settings_of_a_test.bias

    def by_value(score, b, h, q, k):
        from settings_of_a_test import bias

        return score + bias

    for settings.bias in (1.0, 2.0):
        for function in (by_name, by_value):
            np.testing.assert_array_equal(values(function), plus(settings.bias))


@pytest.mark.parametrize("read", ["globals()['offset']", "eval('offset')"])
def test_globals_read_by_name(read):
    contents = {}
    exec(f"def f(score, b, h, q, k): return score + {read}", contents)
    for contents["offset"] in (1.0, 2.0):
        np.testing.assert_array_equal(values(contents["f"]), plus(contents["offset"]))


def test_keys_of_a_dictionary():
    """1 and 1.0 are equal, and integers alone have a remainder."""

    def make(table):
        def f(score, b, h, q, k):
            for key in table:
                score = score + k % key
            return score

        return f

    np.testing.assert_array_equal(values(make({2: None})), plus(np.arange(5) % 2))
    with pytest.raises(TypeError, match="expected integers around // and %"):
        values(make({2.0: None}))


def test_a_masked_array_is_refused():
    array = np.ma.masked_array(np.arange(5.0), [False, True, False, False, False])
    for make in (of_closure, of_list, of_default, of_partial):
        assert "whose mask would be dropped" in message(TypeError, values, make(array))


def of_import(array):
    def f(score, b, h, q, k):
        import numpy

        return score + numpy.abs(array[k]) * len(array)

    return f


@pytest.mark.parametrize("make", [of_closure, of_import])
def test_a_known_function_is_not_traced(make, monkeypatch):
    function = make(np.arange(5.0))
    _prepare(False, function, None)

    def never(*_, **__):
        raise AssertionError

    monkeypatch.setattr(_program, "traced", never)
    _prepare(False, make(np.zeros(5)), None)
    with pytest.raises(AssertionError):
        _prepare(False, make(np.zeros(6)), None)


def test_the_function_stays_as_it_is():
    array = np.arange(5.0)
    function = of_closure(array)
    before = function.__closure__, function.__globals__.copy()
    _prepare(False, function, None)
    assert function.__closure__ == before[0]
    assert function.__closure__[0].cell_contents is array
    assert function.__globals__.keys() == before[1].keys()


# ------------------------------------------------------------------------------- programs


def test_a_program_takes_other_values():
    program = sdpa.score_program(lambda score, b, h, q, k, x: score + x[k], (np.zeros(5),))
    for x in (np.arange(5.0), np.arange(5, dtype=np.float32)):
        np.testing.assert_array_equal(values(program, (x,)), plus(x))
        np.testing.assert_array_equal(program(SCORE, *GRID.values(), x), plus(x))


def test_a_program_keeps_what_its_function_captured(rng):
    """Wherever it runs: in a call, block by block, as a function."""
    x = rng.standard_normal((3, 5, 4))
    factor, table = 2.0, np.zeros(5)
    program = sdpa.score_program(lambda score, b, h, q, k: score * factor + table[k])
    factor, table = 3.0, np.full(1, np.nan)
    expected = sdpa.attention(*x, scale=1.0)
    assert program(2.0, 0, 0, 0, 0) == 4.0
    for got in (sdpa.attention, reference.attention):
        np.testing.assert_allclose(got(*x, score_mod=program), expected, rtol=1e-12)
    got = sdpa.blocks.attend(*x, score_mod=program, block=2).out
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def by_global(score, b, h, q, k):
    return score + GLOBAL[k]


def test_a_program_is_pickled_with_its_function_s_name():
    program = pickle.loads(pickle.dumps(sdpa.score_program(by_global)))
    np.testing.assert_array_equal(values(program), plus(GLOBAL))
    np.testing.assert_array_equal(program(SCORE, *GRID.values()), plus(GLOBAL))


@pytest.mark.parametrize(
    ("is_mask", "args", "exception", "message"),
    [
        (True, (), TypeError, "mask_mod: expected a mask program, got a score program; pass it as "
         "score_mod"),
        (False, (), TypeError, "score_args: expected the 1 arrays of f, got 0"),
        (False, (np.zeros(6),), ValueError, "score_args: expected table of shape (5,), as the "
         "program of f was made for, got (6,)"),
        (False, (np.zeros(5, int),), TypeError, "score_args: expected table of floats, as the "
         "program of f was made for, got int64"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_a_program(is_mask, args, exception, message):
    def f(score, b, h, q, k, table):
        return score + table[k]

    program = sdpa.score_program(f, (np.zeros(5),))
    with pytest.raises(exception) as raised:
        _prepare(is_mask, program, args)
    assert str(raised.value) == message


# ------------------------------------------------------------------------------- PyTorch


@pytest.fixture
def tensors(torch, monkeypatch):
    """PyTorch's tensors are known as arrays."""
    own = Foreign(
        lambda x: (x.dtype, tuple(x.shape)),
        lambda x: x.detach().numpy(),
        lambda x: not x.ndim and not x.requires_grad,
    )
    monkeypatch.setitem(FOREIGN, torch.Tensor, own)
    return torch


def test_functions_of_pytorch(tensors):
    torch = tensors
    slopes = torch.tensor([0.5, 0.25], dtype=torch.float64)
    low = torch.tensor(-3.0, dtype=torch.float64)

    def f(score, b, h, q, k):
        x = torch.where(q > k, torch.tanh(score), low) + torch.nn.functional.relu(score)
        x = x * torch.exp2(-(h + 1) * 8.0 / 2) + torch.clamp(q - k, min=0).to(score.dtype)
        x = x + slopes[h] * torch.abs(score).masked_fill(k == 2, 7.0) - torch.sigmoid(-score)
        return 2 - torch.maximum(x, torch.square(score)) + torch.logical_and(q > 1, h > 0).float()

    given = (torch.as_tensor(x) for x in (SCORE, *np.broadcast_arrays(*GRID.values())))
    np.testing.assert_allclose(values(f), f(*given).numpy(), rtol=1e-14)


def test_tensors_without_pytorch_s_door(torch, monkeypatch):
    """A call of NumPy takes them as arguments."""
    monkeypatch.delitem(FOREIGN, torch.Tensor, raising=False)
    table = torch.arange(5.0)
    assert message(TypeError, values, of_closure(table)).endswith(
        "got k as an index or element of another array; pass it in score_args"
    )
    found = values(lambda score, b, h, q, k, x: score + x[k], (table,))
    np.testing.assert_array_equal(found, plus(np.arange(5.0)))


def test_more_functions_of_pytorch(tensors):
    torch = tensors
    functional = torch.nn.functional

    def f(score, b, h, q, k):
        x = torch.div(q, 3, rounding_mode="floor") + torch.div(score, 2.0, rounding_mode="trunc")
        x = x + torch.max(score, q - k) - torch.min(score, x) + torch.rsub(score, 1.0)
        x = x + functional.gelu(score, approximate="tanh") + functional.silu(score)
        x = x + functional.softplus(score) * torch.full_like(score, 0.5) + score.new_full((), 2.0)
        return x.where(q > k, score.detach().contiguous()).clone()

    given = (torch.as_tensor(x) for x in (SCORE, *np.broadcast_arrays(*GRID.values())))
    np.testing.assert_allclose(values(f), f(*given).numpy(), rtol=1e-14, atol=1e-14)


def test_calls_of_pytorch_that_are_refused(tensors):
    functional = tensors.nn.functional

    def refused(body):
        return message(TypeError, sdpa.score_program, body)

    assert refused(lambda score, b, h, q, k: tensors.max(score)) == (
        "score_mod: expected torch.maximum of two values in <lambda>, got torch.max of one"
    )
    assert refused(lambda score, b, h, q, k: functional.gelu(score)) == (
        "score_mod: expected approximate='tanh' in <lambda>, got gelu(score); programs have no erf"
    )


def test_conversions_of_pytorch(tensors):
    """To a type, to that of another value, and to a device, which changes nothing."""

    def f(score, b, h, q, k):
        x = (q + k).to(tensors.float64).type_as(score) * (q > 2).to(score) + score.to("cpu")
        return x + (score * 3).to(tensors.int64).to(tensors.float64)

    given = (tensors.as_tensor(x) for x in (SCORE, *np.broadcast_arrays(*GRID.values())))
    np.testing.assert_allclose(values(f), f(*given).numpy(), rtol=1e-14)


def test_masks_of_pytorch(tensors):
    """Its own combinations capture the functions that they combine."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")

    def make(n):
        return flex.and_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: q - k < n)

    for n in (1, 2, 3):
        outputs, _ = run(_prepare(True, make(n), None), 0, GRID)
        q, k = GRID["query"], GRID["key"]
        np.testing.assert_array_equal(
            outputs[0], np.broadcast_to((q >= k) & (q - k < n), SCORE.shape)
        )


def test_tensors_become_arguments(tensors):
    """Captured ones, and parts of them that the function makes, in which gradients flow on."""
    torch = tensors
    table = torch.arange(10.0, dtype=torch.float64).reshape(2, 5).requires_grad_()

    def whole(score, b, h, q, k):
        return score + table[h, k]

    def part(score, b, h, q, k):
        return score * (2 * table[:, 1:])[h, k - 1]

    program, captured = lifted(False, whole, ())
    assert captured == [table]
    assert program._entry.n_args == 1
    program, (made,) = lifted(False, part, ())
    assert made.requires_grad
    assert made.shape == (2, 4)
    prepared = _prepare(False, program, (made.detach().numpy(),))
    assert prepared.codes[4] is not None
    with pytest.raises(TypeError, match=r"torch\.dot"):
        _prepare(False, lambda score, b, h, q, k: score + torch.dot(table[h], table[h]), None)
