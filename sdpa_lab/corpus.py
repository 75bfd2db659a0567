"""Text that every Python carries: the docstrings of its standard library.

`passages` returns single docstrings and `documents` those of whole modules, for pretrained models
to read; `docstrings` returns all of them as one training text and one test text, for a model of
characters to learn.
"""

from __future__ import annotations

import ast
import os
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MODULES = (
    "abc bdb bisect calendar code codecs configparser contextlib datetime difflib doctest "
    "fileinput functools gzip hmac imaplib inspect ipaddress mimetypes numbers pdb platform "
    "poplib queue random secrets selectors shutil smtplib socket socketserver ssl statistics "
    "subprocess tarfile textwrap threading timeit trace traceback typing uuid weakref"
)
"""Where passages come from: single files rich in docstrings. Parsing the whole library is slow."""

SHORTEST = 60
"""Characters of a passage: a shorter docstring is hardly a sentence."""


# Folders left out of the training text: tests, which not every installation has, and folders that
# are not part of the language.
SKIPPED = {"__pycache__", "idlelib", "lib2to3", "site-packages", "test", "tests", "turtledemo"}

RARE = 20
"""Characters that occur less often than this in the training text become one symbol."""

Codes = npt.NDArray[np.intp]
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Text(NamedTuple):
    """Two texts as numbers of characters below `len(alphabet)`."""

    train: Codes
    test: Codes
    alphabet: str
    """The character of each number; U+FFFD stands for all rare ones."""
    modules: tuple[int, int]
    """Number of modules in either."""


def passages(draws: int | None = None, *, seed: int = 0) -> list[str]:
    """Docstrings of at least 60 characters from some modules of the standard library, each once.

    The modules are parsed, not imported. Their docstrings depend on the version of Python.

    Parameters
    ----------
    draws : int, optional
        How many, drawn at random without replacement; by default all, in the order of modules.
    seed : int
        Seed of the choice.

    Raises
    ------
    ValueError
        `draws` is below 1 or above the number of docstrings.

    Examples
    --------
    >>> from sdpa_lab.corpus import passages
    >>> len(passages(100))
    100
    """
    texts = _passages()
    if draws is None:
        return list(texts)
    if not 1 <= draws <= len(texts):
        raise ValueError(f"draws: expected 1 to {len(texts)} docstrings, got {draws}")
    chosen = np.random.default_rng(seed).permutation(len(texts))[:draws]
    return [texts[i] for i in chosen]


@cache
def _passages() -> tuple[str, ...]:
    root = Path(sysconfig.get_path("stdlib"))
    texts: dict[str, None] = {}
    for name in MODULES.split():
        for node in ast.walk(ast.parse((root / f"{name}.py").read_bytes())):
            if isinstance(node, Documented):
                text = ast.get_docstring(node) or ""
                if len(text) >= SHORTEST:
                    texts[text] = None
    return tuple(texts)


@cache
def documents() -> tuple[str, ...]:
    """All docstrings of each of the modules that `passages` reads, one text per module.

    Examples
    --------
    >>> from sdpa_lab.corpus import documents
    >>> len(documents()) > 30
    True
    """
    root = Path(sysconfig.get_path("stdlib"))
    return tuple(_document(root / f"{name}.py") for name in MODULES.split())


def docstrings(seed: int = 0, *, held_out: float = 0.1) -> Text:
    """All docstrings of the installed standard library, some of its modules held out as a test.

    A module is one file; all of its docstrings are in the same part.

    Parameters
    ----------
    seed : int
        Seed of the choice of modules to hold out.
    held_out : float
        The share of modules to hold out.

    Examples
    --------
    >>> from sdpa_lab.corpus import docstrings
    >>> text = docstrings()
    >>> len(text.test) < len(text.train) / 4
    True
    """
    modules = _modules(Path(sysconfig.get_path("stdlib")))
    if len(modules) < 2:
        raise FileNotFoundError("no sources of the standard library beside this Python")
    order = np.random.default_rng(seed).permutation(len(modules))
    n_test = max(1, round(held_out * len(modules)))
    test = "".join(modules[i] for i in sorted(order[:n_test]))
    train = "".join(modules[i] for i in sorted(order[n_test:]))

    symbols, counts = np.unique(_code_points(train), return_counts=True)
    kept = symbols[counts >= RARE]

    def encode(text: str) -> Codes:
        points = _code_points(text)
        at = np.searchsorted(kept, points).clip(max=len(kept) - 1)
        return np.where(kept[at] == points, at + 1, 0)

    alphabet = "\N{REPLACEMENT CHARACTER}" + "".join(map(chr, kept))
    return Text(encode(train), encode(test), alphabet, (len(modules) - n_test, n_test))


@cache
def _modules(root: Path) -> tuple[str, ...]:
    """The docstrings of each file that has any, ordered by the names of the files."""
    modules = []
    for path in sorted(_sources(root)):
        try:
            text = _document(path)
        except (OSError, SyntaxError):  # a link that leads nowhere
            continue
        if text:
            modules.append(text + "\n\n")
    return tuple(modules)


def _document(path: Path) -> str:
    """Docstrings of a file, in the order of their definitions."""
    tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
    return "\n\n".join(filter(None, map(ast.get_docstring, _documented(tree))))


def _sources(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - SKIPPED
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _documented(node: ast.AST) -> Iterator[Documented]:
    """The module and its classes and functions, each before those inside it.

    Only statements contain definitions. Skipping expressions is much faster than `ast.walk`.
    """
    if isinstance(node, Documented):
        yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _documented(child)


def _code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
