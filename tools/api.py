"""Writes tests/project/api.txt, the listing of the public interface: `python tools/api.py`.

Names of modules as arguments renew their sections alone.

It holds every public name with its parameters and defaults, the fields of results, methods and
properties of classes, the exceptions that docstrings promise, and the environment variables. A
change of any of them is then a line of a diff. `sdpa.reference` is left out, since its names are
no contract; types are in the stub.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

from sdpa import _options

ROOT = Path(__file__).parents[1]
LISTING = ROOT / "tests" / "project" / "api.txt"
MODULES = (
    "sdpa",
    *("sdpa.bias", "sdpa.blocks", "sdpa.plot"),
    *(f"sdpa.interop.{x}" for x in ("autograd", "dask", "jax", "onnx", "torch", "transformers")),
)
ENVIRONMENT = "environment"


def default(value: Any) -> str:
    """A default as it would be written; functions and types by their names."""
    return getattr(value, "__name__", None) or repr(value)


def parameters(function: Any) -> str:
    """The parameters as they are written, without types; options that a TypedDict lists by name."""
    texts: list[str] = []
    stars = {"VAR_KEYWORD": "**", "VAR_POSITIONAL": "*"}
    found = [p for n, p in inspect.signature(function).parameters.items() if n != "self"]
    for parameter in found:
        if parameter.kind is parameter.KEYWORD_ONLY and not any(t.startswith("*") for t in texts):
            texts.append("*")
        named = re.fullmatch(r"Unpack\[(\w+)\]", str(parameter.annotation))
        if named:
            texts += ["*"] * ("*" not in texts)
            texts += [f"{name}=..." for name in getattr(_options, named[1]).__annotations__]
            continue
        given = parameter.default is not parameter.empty
        text = f"{stars.get(parameter.kind.name, '')}{parameter.name}"
        texts.append(f"{text}={default(parameter.default)}" if given else text)
    n = sum(p.kind is p.POSITIONAL_ONLY for p in found)
    return ", ".join([*texts[:n], "/", *texts[n:]] if n else texts)


def exceptions(thing: Any) -> str:
    """The names below "Raises" in a docstring."""
    section = re.search(r"^Raises\n-+\n(.*?)(\n\n|\Z)", inspect.getdoc(thing) or "", re.M | re.S)
    names = re.findall(r"^([A-Z]\w+(?:, [A-Z]\w+)*)$", section[1], re.M) if section else []
    found = sorted({name for line in names for name in line.split(", ")})
    return f" raises {', '.join(found)}" if found else ""


def lines_of(name: str, thing: Any) -> list[str]:
    """The listing of a public name."""
    if isinstance(thing, ModuleType):
        return [f"{name}: module"]
    if not callable(thing) or not thing.__module__.startswith("sdpa"):
        return [f"{name}: {type(thing).__name__}"]
    if hasattr(thing, "_fields"):
        return [f"{name}: fields {', '.join(thing._fields)}"]
    lines = [f"{name}({parameters(thing)}){exceptions(thing)}"]
    if isinstance(thing, type):
        own = [kind for kind in thing.__mro__ if kind.__module__.startswith("sdpa")]
        for member in sorted({member for kind in own for member in vars(kind)}):
            found = inspect.getattr_static(thing, member)
            if member.startswith("_") and member != "__call__":
                continue
            if callable(found) or isinstance(found, classmethod | staticmethod):
                lines += lines_of(f"{name}.{member}", getattr(thing, member))
            else:
                lines.append(f"{name}.{member}: property")
    return lines


def section(module: str) -> str:
    """The listing of a module, which must be importable, or of the environment."""
    if module == ENVIRONMENT:
        sources = [*ROOT.glob("src/**/*.[ch]"), *ROOT.glob("sdpa/**/*.py")]
        texts = [path.read_text(encoding="utf-8") for path in sources]
        names = {n for text in texts for n in re.findall(r"\"((?:SDPA|OMP)_[A-Z_]+)\"", text)}
        lines = sorted(names)
    else:
        found = importlib.import_module(module)
        lines = [x for n in sorted(found.__all__) for x in lines_of(n, getattr(found, n))]
    wrapped = [
        textwrap.fill(
            line, 100, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )
        for line in lines
    ]
    return "\n".join([f"== {module}", *wrapped, ""])


def main(names: list[str]) -> None:
    """Renew the sections of these modules, or all."""
    listed = LISTING.read_text(encoding="utf-8") if LISTING.exists() else ""
    texts = {text.split("\n")[0]: text for text in re.split(r"^== ", listed, flags=re.M)[1:]}
    for name in names or [*MODULES, ENVIRONMENT]:
        texts[name] = section(name).removeprefix("== ")
    order = [name for name in (*MODULES, ENVIRONMENT) if name in texts]
    LISTING.write_text("\n".join(f"== {texts[n].strip()}\n" for n in order), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
