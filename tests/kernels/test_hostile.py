"""Arguments that change others while they are converted: a call sees them as they are afterwards.

Under the address sanitizer (`make sanitize`) each of these calls would end the process if it read
or wrote where an array no longer is.
"""

import contextlib
import sys

import numpy as np
import pytest
from support import hostile
from support.calls import ADDITIVE, ATTENTION, CALLS, MERGE, SOFTMAX, everything
from support.hostile import SequenceHook, subclassed

import sdpa

pytestmark = pytest.mark.filterwarnings("ignore:attn_mask")  # a mask that has grown holds zeros

# Written in C: no code of the caller's runs once they look at arrays.
COMPILED = [*ATTENTION, *ADDITIVE, *SOFTMAX, *MERGE, sdpa.scaled_dot_product_attention]
COMPOSED = [function for function in CALLS if function not in COMPILED]
WITH_OUT = (sdpa.attention, sdpa.attention_forward)
SCALARS = {
    "scale": 0.5,
    "softcap": 2.0,
    "window": (3, 4),
    "rng": 7,
    "workers": 2,
    "dropout_p": 0.5,
    "sequence": None,
    "axis": -1,
    "temperature": 2.0,
    "needs": ("query", "key"),
}


def name_of(function):
    return f"{function.__module__}.{function.__qualname__}"


def scalars_of(function):
    """Scalars that this function takes."""
    parameters = function.__text_signature__ or ""
    return {n: x for n, x in SCALARS.items() if f" {n}=" in parameters and x is not None}


def plain(x):
    """A copy that no hook reaches."""
    if isinstance(x, np.ndarray):
        return np.array(x, copy=True, subok=False)
    return [plain(y) for y in x] if isinstance(x, list) else x


def outcome(function, arguments):
    """The exception's type, or the results as a list of arrays."""
    try:
        found = function(**arguments)
    except (TypeError, ValueError, MemoryError) as error:
        return type(error)
    found = found if isinstance(found, tuple) else (found,)
    return [None if x is None else np.array(x) for x in found]


def same(a, b):
    if isinstance(a, type) or isinstance(b, type):
        return a is b
    return all(
        x is y if x is None or y is None else np.array_equal(x, y, equal_nan=True)
        for x, y in zip(a, b, strict=True)
    )


def arrays_in(arguments):
    """The arrays among the arguments, those in lists too: (name, array, what replaces it)."""
    for name, x in arguments.items():
        if isinstance(x, np.ndarray):
            yield name, x, lambda y, name=name: arguments.__setitem__(name, y)
        elif isinstance(x, list):
            for i, y in enumerate(x):
                yield f"{name}[{i}]", y, lambda z, x=x, i=i: x.__setitem__(i, z)


def changed_calls(function, scalars):
    """Calls in which one argument changes another: (label, arguments, the victim before)."""
    n = len(list(arrays_in(everything(function))))
    for at in range(n + len(scalars)):
        for victim_at in range(n):
            for change in hostile.CHANGES:
                for hook in hostile.ARRAYS if at < n else [hostile.scalar]:
                    arguments = everything(function)
                    found = list(arrays_in(arguments))
                    name, victim, _ = found[victim_at]
                    if at < n:
                        own, array, replace = found[at]
                    else:
                        own, array = list(scalars.items())[at - n]
                        replace = lambda y, own=own, x=arguments: x.__setitem__(own, y)  # noqa: E731
                    before = plain(victim)

                    def act(victim=victim, change=change, before=before, done=[]):  # noqa: B006
                        if not done:
                            done.append(True)
                            change(victim)

                    replace(hook(array, act))
                    yield (own, name, change.__name__, hook.__name__), arguments, before


@pytest.mark.parametrize("function", COMPILED, ids=name_of)
def test_a_call_sees_arguments_as_its_hooks_leave_them(function):
    n_calls = 0
    for label, arguments, before in changed_calls(function, scalars_of(function)):
        own, name, *_ = label
        if own == "out" and function in WITH_OUT:
            continue  # it must be an array
        found = outcome(function, arguments)
        n_calls += 1
        # As the hooks left them: the hostile object answers as before, without acting.
        quiet = {n: plain(answer(x)) for n, x in arguments.items()}
        expected = [outcome(function, quiet)]
        if name in ("key_lengths", "out"):  # copied at once, or only written to
            expected.append(outcome(function, quiet | {name: before}))
        assert any(same(found, x) for x in expected), (label, found, expected)
    assert n_calls > 5


def answer(x):
    """What a hostile object stands for."""
    if isinstance(x, list):
        return [answer(y) for y in x]
    if isinstance(x, hostile.Number):
        return x.value
    if isinstance(x, hostile.LookupHook):
        return x.mine[0]
    return getattr(x, "array", x)


@pytest.mark.parametrize("function", COMPOSED, ids=name_of)
def test_composed_functions_end_whatever_hooks_do(function):
    """They may find a shape changed under their hands and raise anything; the sanitizer judges."""
    for _, arguments, _ in changed_calls(function, {}):
        with contextlib.suppress(Exception):
            function(**arguments)
    function(**CALLS[function]())  # nothing is left behind that breaks the next call


@pytest.mark.parametrize("exception", hostile.RAISES)
@pytest.mark.parametrize("function", COMPILED, ids=name_of)
def test_interruptions_and_lack_of_memory_pass_through_every_hook(function, exception):
    """Other exceptions may become a TypeError, with the original as its cause."""
    # NumPy itself takes a sequence whose hooks raise for one object.
    hooks = [hook for hook in hostile.ARRAYS if hook not in (SequenceHook, subclassed)]
    scalars = scalars_of(function)
    n = len(list(arrays_in(everything(function))))
    for at in range(n + len(scalars)):
        for hook in hooks if at < n else [hostile.scalar]:
            arguments = everything(function)
            found = list(arrays_in(arguments))
            if at < n:
                own, array, replace = found[at]
            else:
                own, array = list(scalars.items())[at - n]
                replace = lambda y, own=own, x=arguments: x.__setitem__(own, y)  # noqa: E731
            if own == "out" and function in WITH_OUT:
                continue  # it must be an array
            replace(hook(array, hostile.raising(exception)))
            allowed = (exception, TypeError) if exception is hostile.Boom else exception
            with pytest.raises(allowed) as caught:
                function(**arguments)
            if isinstance(caught.value, TypeError):
                assert isinstance(caught.value.__cause__, exception), (own, hook, caught.value)


def looked_at_by(act, call):
    """Run `call`, with `act` in the Python code of NumPy that looks for memory that out shares."""

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_name == "shares_memory":
            sys.setprofile(None)
            act()

    sys.setprofile(profile)
    try:
        return call()
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("name", ["attention", "softmax"])
def test_out_that_changes_while_it_is_looked_at(name):
    both = np.zeros((64, 2, 16), np.float32)
    x, out = both[:, 0], both[:, 1]  # no element in common, but their ranges overlap
    arguments = (x, x, x) if name == "attention" else (x,)

    def act():
        x.shape = out.shape = 64, 16, 1

    found = looked_at_by(act, lambda: getattr(sdpa, name)(*arguments, out=out))
    want = np.full((64, 16), 0 if name == "attention" else 1 / 16, np.float32)
    np.testing.assert_array_equal(found.reshape(64, 16), want)
    assert not both[:, 0].any()


def test_an_exception_while_out_is_looked_at_passes_through():
    both = np.zeros((64, 2, 16), np.float32)

    def act():
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        looked_at_by(act, lambda: sdpa.softmax(both[:, 0], out=both[:, 1]))
