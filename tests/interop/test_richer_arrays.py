"""Arrays that are more than their numbers: those with a mask or a unit are refused by name."""

import re
import subprocess
import sys

import numpy as np
import pytest
from support.calls import CALLS, everything

import sdpa
from sdpa import blocks


def masked():
    return np.ma.array(np.ones(3), mask=[0, 1, 0])


def astropy_masked():
    return pytest.importorskip("astropy.utils.masked").Masked(np.ones(3), [0, 1, 0])


def percent():
    return np.ones(3) * pytest.importorskip("astropy.units").percent


def unyt():
    return pytest.importorskip("unyt").unyt_array(np.ones(3), "m")


def pint():
    return pytest.importorskip("pint").UnitRegistry().Quantity(np.ones(3), "m")


def quantities():
    return np.ones(3) * pytest.importorskip("quantities").m


MASK = (
    "whose mask would be dropped; pass its data, and the mask by where= or as a boolean attn_mask"
)
UNIT = "whose unit would be dropped; pass "
RICHER = {
    masked: MASK,
    astropy_masked: MASK,
    percent: UNIT + "x.to_value('')",
    unyt: UNIT + "x.to_value('')",
    pint: UNIT + "x.m_as('')",
    quantities: UNIT + "x.rescale('').magnitude",
}


@pytest.mark.parametrize("make", RICHER, ids=lambda make: make.__name__)
def test_its_class_and_the_remedy_are_named(make):
    x = make()
    text = re.escape(f"x: expected a plain array, got {type(x)}, {RICHER[make]}")
    with pytest.raises(TypeError, match=text):
        sdpa.softmax(x)


def arrays(x, found):
    """The arguments in which `found` stands in place of an array: one at a time."""
    for name, value in x.items():
        if isinstance(value, np.ndarray):
            yield name, x | {name: found(value)}
        elif isinstance(value, list):
            yield f"{name}[0]", x | {name: [found(value[0]), *value[1:]]}


@pytest.mark.parametrize("function", CALLS, ids=lambda f: f"{f.__module__}.{f.__qualname__}")
def test_every_array_of_every_function(function):
    for name, arguments in arrays(everything(function), np.ma.array):
        with pytest.raises(TypeError, match=re.escape(f"{name}: expected a plain array")):
            function(**arguments)


class Given:
    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


def test_what_an_object_converts_to():
    with pytest.raises(TypeError, match=r"x: expected a plain array, got .*MaskedArray"):
        sdpa.softmax(Given(masked()))


def test_what_a_store_returns():
    class Store:
        shape, dtype = (9, 4), np.dtype(np.float32)

        def __getitem__(self, index):
            return np.ma.ones(self.shape, np.float32)[index]

    x = np.ones((9, 4), np.float32)
    with pytest.raises(TypeError, match=r"key: expected a plain array, got .*MaskedArray"):
        blocks.attend(x, Store(), x)


@pytest.mark.parametrize("like", [np.recarray, np.matrix])
@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_other_subclasses_are_the_arrays_that_they_are(rng, like):
    x = rng.standard_normal((3, 4, 5))[0]
    np.testing.assert_array_equal(sdpa.softmax(x.view(like)), sdpa.softmax(x))
    out = x.view(like).copy()
    assert sdpa.softmax(x, out=out) is out
    np.testing.assert_array_equal(np.asarray(out), sdpa.softmax(x))


QUAD = """
import numpy as np, sdpa
from numpy_quaddtype import QuadPrecDType
x = np.ones((2, 3, 4))
quad = x.astype(QuadPrecDType())
calls = [
    lambda: sdpa.attention(quad, quad, quad),
    lambda: sdpa.attention(x, x, quad),
    lambda: sdpa.attention(x, x, x, np.ones((3, 3)).astype(QuadPrecDType())),
    lambda: sdpa.attention(x, x, x, sinks=np.ones(2).astype(QuadPrecDType())),
    lambda: sdpa.softmax(quad),
    lambda: sdpa.softmax(x, out=quad.copy()),
    lambda: sdpa.merge_attention([quad], [quad[..., 0]]),
    lambda: sdpa.rotary_embedding(quad, np.arange(3)),
]
for call in calls:
    try:
        call()
    except (TypeError, ValueError) as error:
        assert "QuadPrecDType" in str(error), error
        print("refused")
"""


def test_dtypes_without_a_number_are_not_taken_for_bfloat16():
    """Until the first array of bfloat16 is seen, nobody knows its number: a fresh process."""
    pytest.importorskip("numpy_quaddtype")
    done = subprocess.run([sys.executable, "-c", QUAD], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["refused"] * 8
