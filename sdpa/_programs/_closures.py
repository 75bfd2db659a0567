"""What a function captures: arrays, which become arrays of the program, and constants.

A function is read, never changed: `scan` lists what its closure, its globals and its defaults hold,
`replaced` makes a copy in which traced arrays stand for arrays.
"""

from __future__ import annotations

import builtins
import dis
import functools
import operator
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

_CONSTANTS = (str, bytes, type(None), type(...), np.dtype)
_FIXED = (types.MethodDescriptorType, types.WrapperDescriptorType, np.ufunc, type(np.where))
# Their functions and attributes do not change while a program runs.
_LIBRARIES = {"numpy", "torch", "math", "operator", "functools", "builtins", "ml_dtypes", "sdpa"}
# What these read is in none of the places that `captured` looks at.
_READERS = (builtins.globals, builtins.eval, builtins.exec, builtins.__import__)
_EMPTY = object()


class Foreign(NamedTuple):
    """How arrays of another library are used."""

    describe: Callable[[Any], tuple[Any, tuple[int, ...]]]
    """The dtype and the shape."""
    convert: Callable[[Any], np.ndarray[Any, Any]]
    """The array on the same memory."""
    is_constant: Callable[[Any], bool]
    """Whether it is one number that nothing is differentiated by."""


FOREIGN: dict[type, Foreign] = {}


def foreign(value: Any) -> Foreign | None:
    """How arrays of the type of this value are used; None if it is no array of another library."""
    if not FOREIGN:
        return None
    found = FOREIGN.get(type(value))
    if found is None:
        for kind, known in FOREIGN.items():
            if isinstance(value, kind):
                return known
    return found


# ------------------------------------------------------------------------------- reading


class Scan:
    """What a function captures.

    Attributes
    ----------
    tokens : list
        Equal for functions that are traced alike: code, constants, types and shapes of arrays.
    arrays, names : list
        The arrays, each once, and what the function calls them.
    unknown : list of (name, object)
        Objects whose contents may change without notice; a function with any is traced each time.
    """

    def __init__(self, function: Any) -> None:
        self.tokens: list[Any] = []
        self.arrays: list[Any] = []
        self.names: list[str] = []
        self.unknown: list[tuple[str, Any]] = []
        self._arrays: dict[int, int] = {}
        self._functions: dict[int, int] = {}
        self._read("", function)

    def _read(self, name: str, value: Any) -> None:
        kind = type(value)
        if kind is int or kind is bool:
            self.tokens.append((kind, value))
        elif kind is float or isinstance(value, np.generic):
            self.tokens.append((kind, repr(value)))
        elif kind is types.FunctionType:
            self._read_function(value)
        elif kind is np.ndarray or isinstance(value, np.ndarray):
            self._read_array(name, value, value.dtype, value.shape)
        elif isinstance(value, _CONSTANTS):
            self.tokens.append(value)
        elif kind is tuple or kind is list:
            self._read_parts(kind, [(f"{name}[{i}]", part) for i, part in enumerate(value)])
        elif kind is dict:
            self.tokens.append(tuple([(type(key), key) for key in value]))
            self._read_parts(kind, [(f"{name}[{key!r}]", part) for key, part in value.items()])
        elif kind is functools.partial:
            self._read_parts(kind, [("", value.func), ("", value.args), ("", value.keywords)])
        else:
            known = foreign(value)
            if known is not None:
                self._read_array(name, value, *known.describe(value))
            elif _is_fixed(value):
                self.tokens.append(value)
            else:
                self.unknown.append((name, value))

    def _read_array(self, name: str, value: Any, dtype: Any, shape: tuple[int, ...]) -> None:
        number = self._arrays.setdefault(id(value), len(self.arrays))
        self.tokens.append((type(value), dtype, shape, number))
        if number == len(self.arrays):
            self.arrays.append(value)
            self.names.append(name)

    def _read_parts(self, kind: type, parts: list[tuple[str, Any]]) -> None:
        self.tokens.append((kind, len(parts)))
        for name, part in parts:
            self._read(name, part)

    def _read_function(self, function: types.FunctionType) -> None:
        known = id(function) in self._functions
        number = self._functions.setdefault(id(function), len(self._functions))
        names = (*vars(function),), (*(function.__kwdefaults__ or ()),)
        self.tokens.append((function.__code__, number, *names))
        if not known:
            for name, value in captured(function):
                self._read(name, value)


def _is_fixed(value: Any) -> bool:
    """Whether it is a module, function or class of a library whose names keep their meaning.

    Other objects of a library have contents that change, as those of a cache do.
    """
    if isinstance(value, types.ModuleType):
        return _of_library(value.__name__)
    if isinstance(value, types.BuiltinFunctionType):
        of_module = value.__self__ is None or isinstance(value.__self__, types.ModuleType)
        return of_module and value not in _READERS
    if isinstance(value, type):
        return _of_library(getattr(value, "__module__", None))
    return value is _EMPTY or isinstance(value, _FIXED)


def _is_library(function: types.FunctionType) -> bool:
    """Whether a function is one of the libraries' own.

    Its globals say so: functools.wraps gives a function of the user the `__module__` of another.
    """
    return _of_library(function.__globals__.get("__name__"))


def _of_library(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in _LIBRARIES


def captured(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Names and contents of the closure, globals, imports, attributes and defaults of a function.

    Of a library's function the closure alone, which may hold functions of the user.
    """
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield name, _contents(cell)
    if _is_library(function):
        return
    contents = function.__globals__
    names = _names(code)
    for name in names.globals:
        yield name, contents[name] if name in contents else getattr(builtins, name, _EMPTY)
    for name in names.imports:
        yield name, sys.modules.get(name, object())
    yield from vars(function).items()
    defaults = function.__defaults__
    if defaults:
        parameters = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        yield from zip(parameters, defaults, strict=True)
    if function.__kwdefaults__:
        yield from function.__kwdefaults__.items()


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


class _Names(NamedTuple):
    globals: tuple[str, ...]
    imports: tuple[str, ...]


@functools.lru_cache(1024)
def _names(code: types.CodeType) -> _Names:
    """The names that the code, or the functions in it, look up."""
    found = []
    for operations in (("LOAD_GLOBAL", "LOAD_NAME"), ("IMPORT_NAME",)):
        steps = dis.get_instructions(code)
        found.append(dict.fromkeys(s.argval for s in steps if s.opname in operations))
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            for own, inner in zip(found, _names(part), strict=True):
                own.update(dict.fromkeys(inner))
    return _Names(*map(tuple, found))


# ------------------------------------------------------------------------------- replacing


class Copies:
    """Copies of functions in which `replace` has its say on every array.

    Parameters
    ----------
    replace : callable
        From an array to what stands for it.
    """

    def __init__(self, replace: Callable[[Any], Any]) -> None:
        self._replace = replace
        self._known: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        """The value, or its copy."""
        kind = type(value)
        if isinstance(value, np.ndarray) or foreign(value):
            return self._replace(value)
        if kind is types.FunctionType and (value.__closure__ or not _is_library(value)):
            return self._function(value)
        if kind is tuple or kind is list:
            return kind(self.of(part) for part in value)
        if kind is dict:
            return {key: self.of(part) for key, part in value.items()}
        if kind is functools.partial:
            keywords = self.of(value.keywords)
            return functools.partial(self.of(value.func), *self.of(value.args), **keywords)
        if kind is types.MethodType:
            return types.MethodType(self.of(value.__func__), value.__self__)
        return value

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        known = self._known.get(id(function))
        if known is not None:
            return known  # type: ignore[no-any-return]
        code = function.__code__
        cells = tuple(types.CellType() for _ in code.co_freevars)
        contents = dict(function.__globals__)
        copy = types.FunctionType(code, contents, function.__name__, None, cells)
        # Known before its parts are copied, which may name it.
        self._known[id(function)] = copy
        copy.__defaults__ = self.of(function.__defaults__)
        copy.__kwdefaults__ = self.of(function.__kwdefaults__)
        copy.__dict__ = self.of(vars(function))
        for cell, own in zip(cells, function.__closure__ or (), strict=True):
            content = _contents(own)
            if content is not _EMPTY:
                cell.cell_contents = self.of(content)
        for name in _names(code).globals:
            if name in contents:
                contents[name] = self.of(contents[name])
        return copy


def unseen_arrays(function: Any, scan: Scan) -> str:
    """The arrays among the attributes of unknown objects, as the function may have named them."""
    words = operator.attrgetter("co_names")
    code = getattr(function, "__code__", None)
    names = words(code) if code else ()
    found = [
        f"{name}.{word}"
        for name, value in scan.unknown
        for word in names
        if isinstance(getattr(value, word, None), np.ndarray)
    ]
    return ", ".join(found)
