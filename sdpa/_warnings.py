"""Warnings at the line of the caller's that led to them."""

import sys
import warnings


def warn(message: str) -> None:
    """Issue a UserWarning at the innermost line outside of this package.

    Functions composed of others may find the same thing twice; since both warnings are at one line,
    Python shows one.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "sdpa":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)
