"""Bad arguments are refused with an exact message, before anything is computed or written.

The tables are beside this file, one row per bad argument; all functions that take the argument
share the row.
"""

import contextlib
import gc
import inspect
import re
import sys

import numpy as np
import pytest
from refusals import (
    attention,
    cache,
    derivatives,
    mechanisms,
    others,
    packed,
    programs,
    softmax,
)
from support.calls import (
    ADDITIVE,
    ATTENTION,
    BILINEAR,
    CALLS,
    COSINE,
    SHAW,
    everything,
    message,
)

import sdpa
from sdpa import _core, bias

# Imported by now, since the tables name functions of each.
COMPOSED = [
    x for name, x in sys.modules.items() if re.match(r"sdpa\.(mechanisms\.|bias$|_compose$)", name)
]


def collected():
    """{function: {case: (exception, message, changes to a call that works)}}"""
    table = {}
    for module in (attention, packed, cache, derivatives, mechanisms, softmax, programs, others):
        for function, rows in module.TABLE:
            known = table.setdefault(function, {})
            assert not known.keys() & rows.keys(), (function, known.keys() & rows.keys())
            known |= rows
    return table


TABLE = collected()
CASES = [
    pytest.param(function, *row, id=f"{function.__qualname__}-{case}")
    for function, rows in TABLE.items()
    for case, row in rows.items()
]


def test_every_public_function_is_in_the_table():
    public = {getattr(sdpa, name) for name in sdpa.__all__}
    public |= {getattr(bias, name) for name in bias.__all__}
    public = {x for x in public if inspect.isroutine(x)} - {sdpa.get_num_threads}
    assert public <= TABLE.keys()
    assert TABLE.keys() == CALLS.keys()


# ---------------------------------------------------------------------------------------- refused


class Computed(Exception):
    """Raised where a computation starts."""


COMPUTING = ("_Unit", "forward", "project", "rounded", "widen", "widened_options")


@contextlib.contextmanager
def nothing_computed():
    """Functions that prepare operands or compute raise; C cannot allocate its scratch memory."""

    def reached(*args, **kwargs):
        raise Computed

    with pytest.MonkeyPatch.context() as patch:
        for module in COMPOSED:
            for name in COMPUTING:
                if hasattr(module, name):
                    patch.setattr(module, name, reached)
        for name in ("attention_forward", "attention_backward"):
            patch.setattr(_core, name, reached)
        _core._alloc_fail_after(0)
        try:
            yield
        finally:
            _core._alloc_fail_after(-1)


@pytest.mark.parametrize(
    "function", [*ATTENTION, *ADDITIVE, *COSINE, *BILINEAR, *SHAW], ids=lambda f: f.__name__
)
def test_what_computes_is_noticed(function):
    x = CALLS[function]()
    with nothing_computed(), pytest.raises((Computed, MemoryError)):
        function(**x)


def contents(x):
    """The dtypes, shapes and bytes of all arrays in x, at any depth."""
    if isinstance(x, np.ndarray):
        return x.dtype, x.shape, x.tobytes()
    if isinstance(x, dict):
        return {name: contents(y) for name, y in x.items()}
    return [contents(y) for y in x] if isinstance(x, (list, tuple)) else x


@pytest.mark.parametrize(("function", "exception", "text", "changed"), CASES)
def test_refused(function, exception, text, changed):
    """The message is exact, nothing is computed, and neither arguments nor `out` change."""
    right = CALLS[function]()
    wrong = right | changed
    before = contents(wrong)
    text = text.replace("{function}", function.__qualname__)
    with nothing_computed():
        assert message(exception, function, **wrong) == text
    if "out" in inspect.signature(function).parameters and "out" not in wrong:
        result = function(**right)
        out = np.full_like(getattr(result, "out", result), 7)
        with nothing_computed():
            assert message(exception, function, **wrong, out=out) == text
        assert (out == 7).all()
    assert contents(wrong) == before


# ----------------------------------------------------------------------------- memory, references


@pytest.mark.parametrize(
    ("function", "options"),
    [(function, {}) for function in (*ATTENTION, *ADDITIVE, sdpa.merge_attention)]
    + [(function, {"sinks": 0.5, "softcap": 3.0}) for function in ATTENTION],
    ids=lambda x: getattr(x, "__name__", "options" if x else ""),
)
def test_no_memory(function, options):
    """Whichever allocation fails, MemoryError is raised and the next call works."""
    x = CALLS[function]() | options
    needed = 0
    while True:
        _core._alloc_fail_after(needed)
        try:
            function(**x)
            break
        except MemoryError:
            needed += 1
        finally:
            _core._alloc_fail_after(-1)
    # Additive attention holds its projections and the blocks of the pairs.
    assert needed >= (2 if function in ADDITIVE else 1)
    function(**x)


@pytest.fixture(scope="module")
def frozen():
    """Collections do not look at what other tests left behind, which takes them a second."""
    gc.collect()
    gc.freeze()


@pytest.mark.parametrize("function", TABLE, ids=lambda f: f.__qualname__)
@pytest.mark.usefixtures("frozen")
def test_references(function):
    """Neither a valid nor a refused call keeps a reference to an argument."""
    x = everything(function)

    arrays = {name: a for name, a in x.items() if isinstance(a, np.ndarray)}

    def count():
        gc.collect()  # exceptions and the frames in their tracebacks refer to one another
        return {name: sys.getrefcount(a) for name, a in arrays.items()}

    before = count()
    for _ in range(3):
        function(**x)
    assert count() == before
    for exception, _, changed in TABLE[function].values():
        # A row about a missing option is valid here, where all options are given.
        with contextlib.suppress(exception):
            function(**(x | changed))
    assert count() == before
