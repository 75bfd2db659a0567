"""How results and layers show themselves: what they hold in a few lines, never all numbers."""

import inspect
import textwrap
from html import escape
from itertools import groupby
from typing import Any, TypeVar

import numpy as np

WIDTH = 88


def of_array(value: Any) -> tuple[str, str]:
    """The dtype and the shape of an array; of anything else what it is, and nothing."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return str(value.dtype), str(tuple(value.shape))
    if isinstance(value, dict):
        return f"dict of {len(value)}", ""
    if hasattr(value, "_fields"):
        return type(value).__name__, ""
    return textwrap.shorten(repr(value), WIDTH // 2, placeholder=" ..."), ""


def wrapped(name: str, parts: list[str], separator: str) -> str:
    """name(part, ...), of one part at least, in lines of WIDTH columns that break between parts."""
    words = [f"{part}{separator}" for part in parts[:-1]] + [f"{part})" for part in parts[-1:]]
    lines = [f"{name}("]
    for word in words:
        if len(lines[-1]) + 1 + len(word) > WIDTH and lines[-1].strip():
            lines.append("   ")
        lines[-1] += word if lines[-1].endswith("(") else f" {word}"
    return "\n".join(lines)


def result_text(result: Any) -> str:
    """The `__repr__` of a named tuple of arrays: names, dtypes and shapes."""
    fields = [(name, *of_array(value)) for name, value in zip(result._fields, result, strict=True)]
    groups = groupby(fields, key=lambda field: field[1:])
    parts = [
        f"{', '.join(name for name, *_ in group)}: {' '.join(filter(None, what))}"
        for what, group in groups
    ]
    return wrapped(type(result).__name__, parts, ";")


def result_html(result: Any) -> str:
    """The `_repr_html_` of a named tuple of arrays."""
    rows = [[name, *of_array(value)] for name, value in zip(result._fields, result, strict=True)]
    return table_html(type(result).__name__, ["field", "dtype", "shape"], rows)


def table_html(caption: str, header: list[str], rows: list[list[str]]) -> str:
    """An HTML table of texts, the first of each row its name."""

    def cells(tag: str, scope: str, texts: list[str]) -> str:
        return "".join(f'<{tag} scope="{scope}">{escape(text)}</{tag}>' for text in texts)

    body = "".join(
        f"<tr>{cells('th', 'row', row[:1])}"
        + "".join(f"<td>{escape(text)}</td>" for text in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        f'<table><caption style="text-align: left; white-space: nowrap">{escape(caption)}</caption>'
        f"<thead><tr>{cells('th', 'col', header)}</tr></thead><tbody>{body}</tbody></table>"
    )


def settings(thing: Any) -> dict[str, Any]:
    """The attributes that hold an argument of the constructor other than its default."""
    found = {}
    for name, parameter in inspect.signature(type(thing)).parameters.items():
        value = getattr(thing, name, None)
        if value is not None and (value != parameter.default or name == "dtype"):
            found[name] = value
    return found


def object_text(thing: Any) -> str:
    """The `__repr__` of an object whose `_shown` says its settings, and a line on what it holds."""
    given, state = thing._shown()
    parts = [f"{name}={_setting(value)}" for name, value in given.items()]
    held = textwrap.wrap(state, WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join([wrapped(type(thing).__name__, parts, ","), *held])


def object_html(thing: Any) -> str:
    """The `_repr_html_` of such an object."""
    given, state = thing._shown()
    rows = [[name, _setting(value)] for name, value in given.items()]
    name = type(thing).__name__
    return table_html(f"{name}: {state}", ["setting", "value"], rows)


def _setting(value: Any) -> str:
    return str(value) if isinstance(value, np.dtype) else repr(value)


T = TypeVar("T")


def shown(kind: type[T]) -> type[T]:
    """Let a class of results, or one with `_shown`, describe itself."""
    of_results = hasattr(kind, "_fields")
    methods = (result_text, result_html) if of_results else (object_text, object_html)
    for name, method in zip(("__repr__", "_repr_html_"), methods, strict=True):
        setattr(kind, name, method)
    return kind
