"""Attention as the notes' programs write it: PyTorch, operation by operation, NumPy without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Eager(NamedTuple):
    """What the programs need of a framework beside operators that all arrays have."""

    name: str
    array: Callable[[npt.NDArray[np.float32]], Any]
    softmax: Callable[[Any], Any]
    tanh: Callable[[Any], Any]


def _softmax(scores: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def framework() -> Eager:
    """PyTorch, or NumPy where it is not installed.

    Examples
    --------
    >>> import numpy as np
    >>> from sdpa_lab.experiments.eager import framework
    >>> code = framework()
    >>> float(code.softmax(code.array(np.zeros((1, 4), np.float32)))[0, 0])
    0.25
    """
    try:
        import torch
    except ImportError:
        return Eager("NumPy", np.asarray, _softmax, np.tanh)
    return Eager("PyTorch", torch.from_numpy, lambda scores: scores.softmax(dim=-1), torch.tanh)


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch's operations on the thread that calls, where it is installed."""
    try:
        import torch
    except ImportError:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
