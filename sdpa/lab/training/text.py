"""Text that every Python carries: the docstrings of its standard library; and a model to beat."""

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

# Tests are no text, and not every installation has them; the others are not part of the language.
SKIPPED = {"__pycache__", "idlelib", "lib2to3", "site-packages", "test", "tests", "turtledemo"}

RARE = 20
"""Characters that are rarer than this in the training text become one symbol."""

Codes = npt.NDArray[np.intp]
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Text(NamedTuple):
    """Two texts as numbers of characters below `len(alphabet)`."""

    train: Codes
    test: Codes
    alphabet: str
    """The character of each number; U+FFFD stands for all rare ones."""
    modules: tuple[int, int]
    """Number of modules in either."""


def docstrings(seed: int = 0, *, held_out: float = 0.1) -> Text:
    """The docstrings of the installed standard library, a part of its modules held out as a test.

    A module is one file, and all of its docstrings are in the same part.

    Parameters
    ----------
    seed : int
        Of the choice of the modules that are held out.
    held_out : float
        Their share.

    Examples
    --------
    >>> from sdpa.lab.training import docstrings
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
    """The docstrings of each file that has some, in the order of their names."""
    modules = []
    for path in sorted(_sources(root)):
        source = path.read_text(encoding="utf-8", errors="replace")
        try:
            found = [ast.get_docstring(node) for node in _documented(ast.parse(source))]
        except SyntaxError:
            continue
        if any(found):
            modules.append("\n\n".join(text for text in found if text) + "\n\n")
    return tuple(modules)


def _sources(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - SKIPPED
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _documented(node: ast.AST) -> Iterator[ast.Module | ast.ClassDef | Function]:
    """The module and its classes and functions, each before what it holds.

    Only statements hold them: to pass by the expressions, as `ast.walk` does not, is much faster.
    """
    if isinstance(node, ast.Module | ast.ClassDef | Function):
        yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _documented(child)


def _code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def witten_bell_bits(train: Codes, test: Codes, n_symbols: int, order: int = 3) -> float:
    """Bits per character of an interpolated n-gram model with Witten-Bell smoothing.

    With c the counts in the training text, h the last order - 1 characters, h' the same without
    the first of them, and T(h) the number of different characters seen after h,

        p(x | h) = (c(h x) + T(h) p(x | h')) / (c(h) + T(h)),

    p(x | h') where h was never seen, and 1/n_symbols below the empty history: Witten and Bell,
    "The zero-frequency problem" (1991), method C, interpolated as in Chen and Goodman, "An
    empirical study of smoothing techniques for language modeling" (1999), section 2.5.

    Parameters
    ----------
    train, test : (length,) int, of numbers below n_symbols
    n_symbols : int
    order : int
        3 is a trigram.

    Returns
    -------
    float
        Mean of -log2 p over the characters of the test text from its `order`-th on.

    Examples
    --------
    >>> import numpy as np
    >>> from sdpa.lab.training import witten_bell_bits
    >>> text = np.array([0, 1] * 50)
    >>> round(witten_bell_bits(text, text, 2, order=1), 3)  # one coin per character
    1.0
    """
    p = np.full(len(test) - order + 1, 1 / n_symbols)
    for n in range(1, order + 1):
        seen, counts = np.unique(_grams(train, n, n_symbols), return_counts=True)
        histories = seen // n_symbols
        contexts, first = np.unique(histories, return_index=True)
        total = np.add.reduceat(counts, first)
        kinds = np.diff(first, append=len(seen))

        gram = _grams(test[order - n :], n, n_symbols)
        at, known = _find(seen, gram)
        c = np.where(known, counts[at], 0)
        at, known = _find(contexts, gram // n_symbols)
        p = np.where(known, (c + kinds[at] * p) / (total[at] + kinds[at]), p)
    return float(-np.log2(p).mean())


def _grams(text: Codes, n: int, n_symbols: int) -> Codes:
    """Every n characters in a row as one number, the last character its last digit."""
    grams = np.zeros(len(text) - n + 1, np.intp)
    for i in range(n):
        grams = grams * n_symbols + text[i : len(text) - n + 1 + i]
    return grams


def _find(values: Codes, wanted: Codes) -> tuple[Codes, npt.NDArray[np.bool_]]:
    """Where each of `wanted` stands in the sorted `values`, and whether it is there."""
    at = np.searchsorted(values, wanted).clip(max=len(values) - 1)
    return at, values[at] == wanted
