"""Weights as a page that needs no server and no network."""

from __future__ import annotations

import base64
import html
import json
import os
import zlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sdpa._arguments import arrays
from sdpa.plot._checks import checked_tokens, checked_weights

FOLDER = Path(__file__).parent

MOST_WEIGHTS = 8 * 512 * 512
MOST_TOKENS = 16384
MOST_BYTES = 3_000_000
"""Of a page. MOST_WEIGHTS, incompressible and at 4 characters for 3 bytes, leave room for texts."""


class View:
    """A page of weights, made by `view`. A notebook shows it; `save` writes it.

    Attributes
    ----------
    html : str
        The whole page.
    """

    def __init__(
        self,
        weights: npt.NDArray[Any],
        query_tokens: list[str] | None,
        key_tokens: list[str] | None,
    ) -> None:
        self.shape = weights.shape
        largest = float(weights.max())
        # Square roots: in a row of many weights most are far below 1/255 of the largest.
        with np.errstate(under="ignore"):
            steps = np.rint(255 * np.sqrt(weights / (largest or 1.0))).astype(np.uint8)
        packed = base64.b64encode(zlib.compress(steps.tobytes(), 9)).decode()
        heads, n_q, n_k = weights.shape
        self._data = {
            "heads": heads,
            "queries": n_q,
            "keys": n_k,
            "largest": largest,
            "query_tokens": query_tokens,
            "key_tokens": key_tokens,
            "weights": packed,
        }

    @cached_property
    def html(self) -> str:
        """The whole page."""
        page, style, script = (
            (FOLDER / f"view.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
        )
        # "<" may not end the script that holds the data.
        data = json.dumps(self._data).replace("<", "\\u003c")
        for place, text in (("/*STYLE*/", style), ("/*SCRIPT*/", script), ("/*DATA*/", data)):
            page = page.replace(place, text)
        return page

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page.

        Parameters
        ----------
        path : path-like
            Of a file, usually with the suffix .html.

        Returns
        -------
        pathlib.Path

        Examples
        --------
        >>> import tempfile
        >>> import numpy as np, sdpa
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sdpa.plot.view(np.eye(3)).save(f"{folder}/weights.html").name
        'weights.html'
        """
        path = Path(path)
        path.write_text(self.html, encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        # A frame of its own keeps the page's style and names apart from the notebook's.
        return (
            f'<iframe title="Attention weights" srcdoc="{html.escape(self.html)}" '
            'style="width: 100%; height: 46rem; border: 0"></iframe>'
        )

    def __repr__(self) -> str:
        heads, n_q, n_k = self.shape
        return f"<sdpa.plot.View: heads={heads}, Lq={n_q}, Lk={n_k}; save(path) writes the page>"


def view(
    weights: npt.ArrayLike,
    *,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
) -> View:
    """Weights to walk through: maps of heads side by side, and lines between two columns of tokens.

    The result shows itself in a notebook, and `save` writes one file that any browser opens,
    without a server or a network. Pairs are pointed at or moved to with the arrow keys.

    Parameters
    ----------
    weights : (Lq, Lk) or (heads, Lq, Lk) array_like
        Of `sdpa.attention_weights`; at most as many as 8 heads of 512 queries and keys have.
    query_tokens : sequence of str, optional
        Lq texts. None: numbers.
    key_tokens : sequence of str, optional
        Lk texts. None: `query_tokens`, where Lq = Lk.

    Returns
    -------
    View
        Its page has at most 3 MB. It holds 8 bits of each weight, the square root of its share of
        the largest one, so it shows a weight within 1/255 of the largest, and small ones closer.

    Raises
    ------
    TypeError
        Weights are no numbers, or tokens are one text.
    ValueError
        Weights have a batch axis, are NaN, infinite or negative; there are too many of them, or
        too long tokens, for a page; the number of tokens does not fit.

    See Also
    --------
    weights : A figure of the same, for print.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> x = np.random.default_rng(0).standard_normal((8, 4, 16))
    >>> weights = sdpa.attention_weights(x, x)
    >>> sdpa.plot.view(weights, query_tokens=["the", "cat", "sat", "down"])
    <sdpa.plot.View: heads=8, Lq=4, Lk=4; save(path) writes the page>
    """
    (given,) = arrays(weights=weights)
    shape = given.shape
    if len(shape) in (2, 3) and (given.size > MOST_WEIGHTS or max(shape[-2:]) > MOST_TOKENS):
        raise ValueError(
            f"weights: expected at most {MOST_WEIGHTS} weights (8 heads of 512 queries and keys) "
            f"and {MOST_TOKENS} queries or keys, for a page of 3 MB, got {shape}; choose some with "
            "heads= and queries= of sdpa.attention_weights"
        )
    found = checked_weights(given)
    tokens = checked_tokens(query_tokens, key_tokens, *found.shape[1:])
    page = View(found, *tokens)
    if len(page.html.encode()) > MOST_BYTES:
        raise ValueError(
            f"query_tokens: expected texts that fit a page of 3 MB, got "
            f"{sum(len(text) for texts in tokens for text in texts or ())} characters in all; cut "
            "long ones"
        )
    return page
