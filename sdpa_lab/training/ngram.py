"""An n-gram model of characters, which a trained model of text has to beat."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..corpus import Codes


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
    >>> from sdpa_lab.training import witten_bell_bits
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
    """The place of each of `wanted` in the sorted `values`, and whether it is there."""
    at = np.searchsorted(values, wanted).clip(max=len(values) - 1)
    return at, values[at] == wanted
