"""The options that change a single score, for formulas written out in Python.

The kernels apply these options where they compute the scores. A formula that adds something to the
scores first, or that autograd differentiates, has to apply them here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sdpa._arrays import softcapped
from sdpa._table import OPTIONS

_NAMES = {name for name, option in OPTIONS.items() if option.kind == "score"} - {"scale"}


def changes_scores(options: Mapping[str, Any]) -> bool:
    """Whether any of these options but the scale is given."""
    return any(options.get(name) is not None for name in _NAMES)


def changed_scores(
    scores: Any, options: Mapping[str, Any], tanh: Callable[[Any], Any] = np.tanh
) -> tuple[Any, Any]:
    """The scaled scores after these options, and their slope; None means a slope of 1."""
    softcap = options.get("softcap")
    if softcap is None:
        return scores, None
    return softcapped(scores, float(softcap), tanh)
