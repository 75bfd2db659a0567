"""What figures and pages refuse before they draw."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sdpa._arguments import arrays, is_float, is_real
from sdpa._arrays import widened_options

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def checked_weights(given: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Weights as (heads, Lq, Lk) of float64."""
    if not is_real(given.dtype):
        raise TypeError(f"weights: expected numbers, got {given.dtype}")
    if given.ndim > 3:
        first = ", ".join("0" * (given.ndim - 3))
        raise ValueError(
            f"weights: expected (Lq, Lk) or (heads, Lq, Lk), got {given.shape}; choose one batch "
            f"entry, weights[{first}]"
        )
    if given.ndim < 2 or given.size == 0:
        raise ValueError(
            f"weights: expected (Lq, Lk) or (heads, Lq, Lk), none of them 0, got {given.shape}"
        )
    found = given.astype(np.float64).reshape(-1, *given.shape[-2:])
    wrong = ~np.isfinite(found) | (found < 0)
    if wrong.any():
        head, query, key = (int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"weights: expected finite numbers from 0 on, got {found[head, query, key]} in head "
            f"{head}, query {query}, key {key}"
        )
    return found


def checked_tokens(
    query_tokens: Sequence[str] | None, key_tokens: Sequence[str] | None, n_q: int, n_k: int
) -> tuple[list[str] | None, list[str] | None]:
    """The texts of queries and keys; those of keys are those of queries where there are as many."""
    query = _tokens("query_tokens", query_tokens, n_q, "Lq")
    if key_tokens is None and n_q == n_k:
        return query, query
    return query, _tokens("key_tokens", key_tokens, n_k, "Lk")


def _tokens(name: str, tokens: Any, n: int, size: str) -> list[str] | None:
    if tokens is None:
        return None
    # Bytes hold numbers, and a set has no order.
    no_sequence = isinstance(tokens, str | bytes | bytearray | set | frozenset)
    if no_sequence or not isinstance(tokens, Iterable) or getattr(tokens, "ndim", 1) == 0:
        got = "one text; write list(text)" if isinstance(tokens, str) else repr(tokens)
        raise TypeError(f"{name}: expected a sequence of {n} texts, got {got}")
    texts = [str(token) for token in tokens]
    if len(texts) != n:
        raise ValueError(f"{name}: expected {size} = {n} texts, got {len(texts)}")
    return texts


def figure_of(ax: Axes) -> Figure:
    """The figure that these axes stand in."""
    from matplotlib.axes import Axes

    if not isinstance(ax, Axes):
        raise TypeError(f"ax: expected matplotlib.axes.Axes, got {ax!r}")
    figure = ax.figure.get_figure(root=True)
    assert figure is not None
    return figure


def hidden_pairs(
    mask: npt.ArrayLike, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> npt.NDArray[np.bool_]:
    """Which pairs of (heads, Lq, Lk) a mask of attention forbids; `dtype` is that of weights."""
    (given,) = arrays(mask=mask)
    if given.dtype != bool and not is_float(given.dtype):
        raise TypeError(
            f"mask: expected bool (True = attend) or floats that are added to the scores, got "
            f"{given.dtype}"
        )
    added = widened_options({"attn_mask": given}, dtype)["attn_mask"]
    hidden = ~added if added.dtype == bool else added == -np.inf
    try:
        return np.broadcast_to(hidden, shape)
    except ValueError:
        raise ValueError(
            f"mask: expected a shape that broadcasts to {shape}, got {given.shape}"
        ) from None
