"""Formulas in the labels of plots: written as in the tables, set as mathematics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUMBER = r"-?\d+(?:\.\d+)?"
SYMBOL = (
    r"(?:sqrt\([^()]*\)|\bsqrt d_k\b|\bd_(?:k|v|model)\b|\bsigma\b|\brho\b"
    r"|\b(?:ln|log) (?:n|s|d_k)\b|\bq\.k\b|\|dL/dq\||\bdL/d(?:W\^[QKVO]|[A-Za-z]\b)"
    r"|\bW\^[QKVO]\b|\|g\||n²"
    # One letter is a word of a text unless its neighbours say otherwise.
    r"|\b[nde](?=\^|\s=\s)|(?<=\bkeys )n\b|(?<=\btokens )n\b|(?<=\blarge )n\b|^n$"
    r"|\bn(?= queries| keys))"
)
FORMULA = re.compile(
    rf"(?:{NUMBER}\s?/\s?|{NUMBER} (?=sqrt|n²))?{SYMBOL}"
    rf"(?:\s?[/=^]\s?(?:{SYMBOL}|{NUMBER}|[A-Za-z]\b))*"
)
SET = (
    (r"sqrt\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"sqrt d_k", r"\\sqrt{d_k}"),
    (r"d_model", r"d_\\mathrm{model}"),
    (r"\b(sigma|rho)\b", r"\\\1"),
    (r"\b(ln|log) ", r"\\\1 "),
    (r"q\.k", r"q \\cdot k"),
    (r"dL/d", r"\\partial L/\\partial "),
    (r"²", "^2"),
    (rf"\^({NUMBER})", r"^{\1}"),
    (r"\s?/\s?", "/"),
)


def mathematics(text: str) -> str:
    r"""The formulas in a text between dollars, as matplotlib's mathtext sets them.

    Parameters
    ----------
    text : str
        What stands between dollars already is kept.

    Examples
    --------
    >>> from sdpa_lab.tools.mathtext import mathematics
    >>> print(mathematics("q.k / sqrt(d_k), n = 64"))
    $q \cdot k/\sqrt{d_k}$, $n = 64$
    >>> print(mathematics("root mean square of |dL/dq|"))
    root mean square of $|\partial L/\partial q|$
    """
    parts = re.split(r"(\$[^$]*\$)", text)
    return "".join(
        part if part.startswith("$") else FORMULA.sub(lambda m: f"${_latex(m[0])}$", part)
        for part in parts
    )


def _latex(formula: str) -> str:
    for pattern, latex in SET:
        formula = re.sub(pattern, latex, formula)
    return formula


def set_mathematics(figure: Figure) -> None:
    """Set the titles, names of axes, legends and notes of a figure.

    A text keeps what was written as its label, which matplotlib does not show.
    """
    for text in _texts(figure):
        written = text.get_text()
        if "monospace" not in text.get_fontfamily():
            text.set_label(written)
            text.set_text(mathematics(written))


@contextmanager
def plain_roots(figure: Figure) -> Iterator[None]:
    """While an SVG is written, whose text stays text: roots without the line above.

    The line is drawn for the glyphs of one font, and a page has another.
    """
    before = [(text, text.get_text()) for text in _texts(figure)]
    try:
        for text, shown in before:
            text.set_text(plain(shown))
        yield
    finally:
        for text, shown in before:
            text.set_text(shown)


ROOT = re.compile(r"\\sqrt\{([^{}]*)\}")


def plain(text: str) -> str:
    r"""Mathtext with roots as `plain_roots` has them.

    Examples
    --------
    >>> from sdpa_lab.tools.mathtext import plain
    >>> print(plain(r"$1/\sqrt{d_k}$: rms"))
    $1/√d_k$: rms
    """
    return ROOT.sub(lambda root: f"√({root[1]})" if " " in root[1] else f"√{root[1]}", text)


def _texts(figure: Figure) -> Iterator[Any]:
    yield from figure.texts
    for axes in figure.axes:
        yield from (axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts)
    for legend in (*figure.legends, *(axes.get_legend() for axes in figure.axes)):
        if legend is not None:
            yield from (legend.get_title(), *legend.get_texts())
