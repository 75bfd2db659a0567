"""Arguments whose hooks change other arguments or raise, before they answer.

NumPy and Python call these hooks while arguments are converted, so that a function that has looked
at one argument before it converts the next may find it changed.
"""

import contextlib
import itertools
import sys

import numpy as np


class Boom(Exception):
    """Raised by a hook."""


def reshape(victim):
    victim.shape = victim.shape[::-1]


def flatten(victim):
    victim.shape = (-1,)


def retype(victim):
    victim.dtype = np.uint8


def shrink(victim):
    """Free all of the memory but a few bytes; views of it then lead nowhere."""
    victim.resize((1,) * victim.ndim, refcheck=False)


def grow(victim):
    victim.resize([n + 3 for n in victim.shape], refcheck=False)


CHANGES = (reshape, flatten, retype, shrink, grow)


RAISES = (Boom, KeyboardInterrupt, MemoryError)


def raising(exception):
    """A hook's act."""

    def act():
        raise exception

    return act


@contextlib.contextmanager
def interrupted_after(lines, *modules):
    """A KeyboardInterrupt once so many lines of these modules have run."""
    paths = {module.__file__ for module in modules}
    left = itertools.count(lines, -1)

    def trace(frame, event, _):
        if frame.f_code.co_filename not in paths:
            return None
        if event == "line" and next(left) == 0:
            raise KeyboardInterrupt
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(outer)


# ---------------------------------------------------------------------- objects in place of arrays


class ArrayHook:
    def __init__(self, array, act):
        self.array, self.act = array, act

    def __array__(self, dtype=None, copy=None):
        self.act()
        return self.array


class DlpackHook:
    def __init__(self, array, act):
        self.array, self.act = array, act

    def __dlpack__(self, **kwargs):
        self.act()
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        self.act()
        return self.array.__dlpack_device__()


class InterfaceHook:
    def __init__(self, array, act):
        self.array, self.act = array, act

    @property
    def __array_interface__(self):
        self.act()
        return self.array.__array_interface__


class LookupHook:
    """Acts whenever it is asked for an attribute, and has none but what NumPy needs."""

    def __init__(self, array, act):
        self.__dict__["mine"] = array, act

    def __getattr__(self, name):
        array, act = self.mine
        act()
        return getattr(array, name)


class SequenceHook:
    """A sequence of rows: copies, since NumPy holds them while later ones may free the array."""

    def __init__(self, array, act):
        self.array, self.act = array, act

    def __len__(self):
        self.act()
        return len(self.array)

    def __getitem__(self, i):
        self.act()
        return self.array[i].copy()


class Subclass(np.ndarray):
    """An array that acts when NumPy makes another one from it, or calls a function with it."""

    act = staticmethod(lambda: None)

    def __array_finalize__(self, other):
        if other is not None:
            getattr(other, "act", lambda: None)()

    def __array_function__(self, function, types, args, kwargs):
        self.act()
        return super().__array_function__(function, types, args, kwargs)

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        self.act()
        return super().__array_ufunc__(ufunc, method, *inputs, **kwargs)


def subclassed(array, act):
    x = array.view(Subclass)
    x.act = act
    return x


ARRAYS = (ArrayHook, DlpackHook, InterfaceHook, LookupHook, SequenceHook, subclassed)

# --------------------------------------------------------------------- objects in place of scalars


class Number:
    """A number, index or truth value."""

    def __init__(self, value, act):
        self.value, self.act = value, act

    def __index__(self):
        self.act()
        return int(self.value)

    def __float__(self):
        self.act()
        return float(self.value)

    def __bool__(self):
        self.act()
        return bool(self.value)


class Pair(tuple):
    """A tuple that acts when it is measured or read."""

    __slots__ = ()
    act = None  # set on a subclass

    def __len__(self):
        type(self).act()
        return super().__len__()

    def __getitem__(self, i):
        type(self).act()
        return super().__getitem__(i)

    def __iter__(self):
        type(self).act()
        return super().__iter__()


def pair(value, act):
    return type("Pair", (Pair,), {"act": staticmethod(act)})(value)


def scalar(value, act):
    """The value as an object with hooks."""
    return pair(value, act) if isinstance(value, tuple) else Number(value, act)
