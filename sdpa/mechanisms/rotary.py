"""Rotary position embedding and its gradient."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from sdpa import _arguments
from sdpa._arguments import (
    arrays,
    boolean,
    checked_broadcast,
    checked_float,
    checked_rows,
    is_real,
    rotary_base,
)
from sdpa._arrays import Array, native, widen
from sdpa._public import publish

__all__ = ["rotary_embedding", "rotary_embedding_backward"]


def rotary_embedding(
    x: ArrayLike,
    positions: ArrayLike,
    *,
    base: float = 10000.0,
    interleaved: bool = False,
    rotary_dim: int | None = None,
) -> Array:
    """Rotate pairs of components of queries or keys by angles in proportion to their positions.

    Pair i of the first r = rotary_dim components turns by the angle position * base^(-2 i / r):

        (a, b) -> (a cos - b sin, b cos + a sin)

    so the dot product of a query and a key depends on their positions only by the difference:
    Su et al., "RoFormer: enhanced transformer with rotary position embedding" (2021), section
    3.2.2. Angles are computed in float64, so that they stay accurate at far positions.

    Parameters
    ----------
    x : array_like, (..., L, d)
        float16, bfloat16, float32 or float64.
    positions : array_like of int or float, broadcastable to (..., L)
        One per row of x, such as np.arange(L); for positions (batch, L) of x
        (batch, heads, L, d) give positions[:, None].
    base : float, default 10000.0
        Above 0, with a finite reciprocal.
    interleaved : bool, default False
        Pair i is (x[2 i], x[2 i + 1]), as in the paper; otherwise (x[i], x[i + r / 2]), as in
        GPT-NeoX and Llama.
    rotary_dim : int, optional
        r, even, at most d; the other components are unchanged. None means d.

    Returns
    -------
    ndarray, (..., L, d)
        Of x's dtype, computed in float32 (float64 for float64).

    Raises
    ------
    TypeError
        x or positions has a dtype that is not accepted.
    ValueError
        Shapes do not fit, or a value is out of range.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> x = np.array([[1.0, 0.0], [1.0, 0.0]])
    >>> sdpa.rotary_embedding(x, [0, np.pi / 2]).round(12)
    array([[1., 0.],
           [0., 1.]])
    """
    return _rotated("x", x, positions, base, interleaved, rotary_dim, 1.0)


def rotary_embedding_backward(
    grad: ArrayLike,
    positions: ArrayLike,
    *,
    base: float = 10000.0,
    interleaved: bool = False,
    rotary_dim: int | None = None,
) -> Array:
    """Gradient of <grad, rotary_embedding(x, ...)> with respect to x: grad, rotated back.

    Parameters
    ----------
    grad : array_like, (..., L, d)
        Of the shape and dtype of x.
    positions, base, interleaved, rotary_dim : array_like, float, bool, int
        As in the forward call.

    Returns
    -------
    ndarray, (..., L, d)
        Of grad's dtype.

    Raises
    ------
    TypeError, ValueError
        As `rotary_embedding`.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> x, positions = np.array([[3.0, 4.0]]), [17]
    >>> turned = sdpa.rotary_embedding(x, positions)
    >>> sdpa.rotary_embedding_backward(turned, positions).round(12)  # the inverse rotation
    array([[3., 4.]])
    """
    return _rotated("grad", grad, positions, base, interleaved, rotary_dim, -1.0)


def checked_positions(name: str, at: Array, shape: tuple[int, ...]) -> None:
    """Raise if these are no positions of rows of this shape."""
    if at.dtype == bool or not is_real(at.dtype):
        raise TypeError(f"{name}: expected integers or floating point, got {at.dtype}")
    checked_broadcast(name, at.shape, shape)


@np.errstate(all="ignore")
def _rotated(
    name: str,
    value: ArrayLike,
    positions: ArrayLike,
    base: float,
    interleaved: bool,
    rotary_dim: int | None,
    direction: float,
) -> Array:
    x, at = arrays(**{name: value}, positions=positions)
    checked_float(name, x)
    checked_rows(name, x, "L, d")
    r = x.shape[-1] if rotary_dim is None else _arguments.integer("rotary_dim", rotary_dim)
    if not 0 <= r <= x.shape[-1] or r % 2:
        raise ValueError(
            f"rotary_dim: expected an even number from 0 to {name}'s last axis {x.shape[-1]}, "
            f"got {r}"
        )
    base, interleaved = rotary_base("base", base), boolean("interleaved", interleaved)
    checked_positions("positions", at, x.shape[:-1])

    wide = widen(x)
    frequencies = base ** (-np.arange(0, r, 2) / max(r, 1))
    angles = direction * at.astype(np.float64)[..., None] * frequencies
    cos, sin = np.cos(angles).astype(wide.dtype), np.sin(angles).astype(wide.dtype)
    if interleaved:
        first, second = slice(0, r, 2), slice(1, r, 2)
    else:
        first, second = slice(0, r // 2), slice(r // 2, r)
    a, b = wide[..., first], wide[..., second]
    out = np.empty(x.shape, native(x.dtype))
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    out[..., r:] = x[..., r:]
    return out


publish("sdpa", globals())
