"""Flags, numbers, words and names of the wrong kind, in every argument of every public function.

test_refusals.py has the exact messages. Here arguments are found by their annotations, those of new
functions as well, and each must be refused by name.
"""

import inspect
import re

import numpy as np
import pytest
from support.calls import ATTENTION, CALLS, LAYER, backward_operands, layer_operands, operands

import sdpa
from sdpa import _options, blocks
from sdpa._table import options_of


def with_keys(x):
    """The arguments under the names that `sdpa.blocks` gives them."""
    return {{"key": "keys", "value": "values"}.get(name, name): a for name, a in x.items()}


CALLABLES = CALLS | {
    blocks.attend: lambda: with_keys(operands()),
    blocks.attend_backward: lambda: with_keys(backward_operands()),
    LAYER.__call__: layer_operands,
}

# What no argument of the kind takes.
BOOLS = ["no", "", 1, 0.0, None, [True]]
FLOATS = ["1", b"1", None, [0.5], 1j, np.nan, np.inf, 10**400]
INTS = ["1", 2.5, np.float64(3), None, [3], np.array([3])]
WORDS = ["no such word", "", 1, True, None, ["weights"]]
WRONG = {
    "bool": BOOLS,
    "bool | Literal": ["no", 1, 0.0, None, [True]],
    "float": FLOATS,
    "float | None": [x for x in FLOATS if x is not None],
    "float | ArrayLike | None": [x for x in FLOATS if x not in (None, [0.5])],
    "int": INTS,
    "int | None": [x for x in INTS if x is not None],
    "int | np.random.Generator | None": ["1", 2.5, -1, np.random, [1.5]],
    "Literal": WORDS,
    "float | Literal | None": [b"1", [0.5], 1j, np.nan, np.inf, 10**400, "no such word", ""],
    "Iterable[str]": [5, "query", ["no such name"], [["query"]], None],
    "Iterable[str] | None": [5, "query", ["no such name"], [["query"]]],
    "DTypeLike": ["no such type", 2.5, np.int32],
    "DTypeLike | None": ["no such type", 2.5, np.float16],
    "slice | None": [3, "all", slice("a"), slice(0, 4, 2)],
    "tuple[int | None, int | None] | None": [3, "ab", (1,), (0.5, 1), ("a", None), (-1, 0)],
}


def kind(annotation):
    """The key of WRONG; None for arrays, and for what the function checks otherwise."""
    text = re.sub(r"Literal\[.*?\]|Initialiser|ScaleRule", "Literal", str(annotation))
    return text if text in WRONG else None


def annotations(function):
    """{name: annotation} of the arguments of a public function, its options included."""
    found = {}
    own = {name: x.annotation for name, x in options_of(function.__name__).items()}
    shared = {name: x.annotation for name, x in options_of("attention_forward").items()}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            options = re.fullmatch(r"Unpack\[(\w+)\]", parameter.annotation)[1]
            names = vars(_options)[options].__annotations__
            found |= {option: shared[option] for option in names}
        elif parameter.annotation is parameter.empty:
            found[name] = own.get(name)
        else:
            found[name] = parameter.annotation
    return found


ARGUMENTS = [
    pytest.param(function, name, kind(annotation), id=f"{function.__qualname__}-{name}")
    for function in CALLABLES
    for name, annotation in annotations(function).items()
    if kind(annotation) is not None
]


def test_arguments_are_found_by_their_annotations():
    found = {(x.values[0], x.values[1]): x.values[2] for x in ARGUMENTS}
    assert found[sdpa.rotary_embedding, "interleaved"] == "bool"
    assert found[sdpa.bias.t5_relative, "max_distance"] == "int"
    assert found[sdpa.MultiHeadAttention, "scale"] == "float | Literal | None"
    assert found[blocks.attend, "rows"] == "slice | None"
    for function in ATTENTION:
        assert found[function, "is_causal"] == "bool | Literal"
        assert found[function, "softcap"] == "float | None"
    assert found[sdpa.shaw_attention, "enable_gqa"] == "bool"
    # Of each kind at least one, or it should go from the list.
    assert {*found.values()} == WRONG.keys()


def refused(function, x):
    """The exception of the call, or None."""
    try:
        function(**x)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize(("function", "name", "kind"), ARGUMENTS)
def test_other_kinds_are_refused_by_name(function, name, kind):
    for value in WRONG[kind]:
        error = refused(function, CALLABLES[function]() | {name: value})
        assert type(error) in (TypeError, ValueError), value
        assert str(error).startswith(f"{name}: expected "), value


@pytest.mark.parametrize(("function", "name", "kind"), ARGUMENTS)
def test_huge_integers_are_refused_by_name_or_saturate(function, name, kind):
    for value in (10**30, -(10**30)):
        error = refused(function, CALLABLES[function]() | {name: value})
        if error is not None:
            assert type(error) in (TypeError, ValueError), value
            assert str(error).startswith(f"{name}: expected "), value
        else:
            assert kind.startswith(("int", "float")), value
