"""Text that every Python brings along: the docstrings of its standard library."""

import ast
import sysconfig
from functools import cache
from pathlib import Path

import numpy as np

MODULES = (
    "abc bdb bisect calendar code codecs configparser contextlib datetime difflib doctest "
    "fileinput functools gzip hmac imaplib inspect ipaddress mimetypes numbers pdb platform "
    "poplib queue random secrets selectors shutil smtplib socket socketserver ssl statistics "
    "subprocess tarfile textwrap threading timeit trace traceback typing uuid weakref"
)
"""Single files that are rich in docstrings: to parse the whole library takes ten times as long."""

SHORTEST = 60  # characters: below them a docstring is hardly a sentence


def docstrings(draws: int | None = None, *, seed: int = 0) -> list[str]:
    """Docstrings of modules, classes and functions of MODULES, which are read and not imported.

    Those of 60 characters and more, each once. Which they are depends on the version of Python.

    Parameters
    ----------
    draws : int, optional
        How many, chosen at random without repetition; all by default, in order of modules.
    seed : int
        Of the choice.

    Raises
    ------
    ValueError
        `draws` is below 1 or above their number.

    Examples
    --------
    >>> from sdpa.lab.text import docstrings
    >>> len(docstrings(100))
    100
    """
    texts = _all()
    if draws is None:
        return list(texts)
    if not 1 <= draws <= len(texts):
        raise ValueError(f"draws: expected 1 to {len(texts)} docstrings, got {draws}")
    chosen = np.random.default_rng(seed).permutation(len(texts))[:draws]
    return [texts[i] for i in chosen]


@cache
def _all() -> tuple[str, ...]:
    root = Path(sysconfig.get_path("stdlib"))
    texts: dict[str, None] = {}
    for name in MODULES.split():
        for node in ast.walk(ast.parse((root / f"{name}.py").read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= SHORTEST:
                    texts[text] = None
    return tuple(texts)
