"""Warnings at the line of the caller's that led to them."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from types import FrameType

# Between a caller and the package may stand the frameworks of its doors, their decorators, and the
# machinery that imports the package.
_BETWEEN = {
    *("sdpa", "autograd", "dask", "jax", "torch", "transformers"),
    *("contextlib", "functools", "importlib"),
}

_local = threading.local()


class silenced(contextlib.ContextDecorator):
    """No warning within: for conventions that are not ours, and for what was warned of already.

    A class, because a generator costs more than the smallest attention.
    """

    __slots__ = ("_before", "_when")

    def __init__(self, when: bool = True) -> None:
        self._when = when

    def _recreate_cm(self) -> silenced:
        return silenced(self._when)

    def __enter__(self) -> None:
        self._before = getattr(_local, "is_silent", False)
        _local.is_silent = self._before or self._when

    def __exit__(self, *_: object) -> None:
        _local.is_silent = self._before


def _is_between(frame: FrameType) -> bool:
    is_generated = frame.f_code.co_filename.startswith("<eval_with_key>")  # by torch.compile
    return is_generated or frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning at the innermost line outside of this package and its doors' frameworks.

    Functions composed of others may find the same thing twice; since both warnings are at one line,
    Python shows one.
    """
    if getattr(_local, "is_silent", False):
        return
    frame = sys._getframe()
    while frame.f_back and _is_between(frame):
        frame = frame.f_back
    warnings.warn_explicit(
        message, category, frame.f_code.co_filename, frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )  # fmt: skip
