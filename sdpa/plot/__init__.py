"""Attention to look at: figures of weights, statistics and masks, and a page to walk through.

The figures need matplotlib, which is imported when the first is drawn; `view` needs nothing.
"""

from sdpa._public import publish
from sdpa.plot._figures import pattern, statistics, weights
from sdpa.plot._view import View, view

__all__ = ["View", "pattern", "statistics", "view", "weights"]


def __dir__() -> list[str]:
    return __all__


publish(__name__, globals())
