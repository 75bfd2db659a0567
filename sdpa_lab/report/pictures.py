"""Plots of matplotlib as part of a page: in its colours, without a ground, smaller."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING

from .. import style
from ..tools.mathtext import mathematics, plain
from .words import sentences

if TYPE_CHECKING:
    from matplotlib import figure

COLORS = {
    "#ffffff": "none",
    style.BLACK: "currentColor",
    style.RC["axes.edgecolor"]: "var(--quiet)",
    style.RC["grid.color"]: "var(--line)",
    style.SCALED: "var(--blue)",
    style.UNSCALED: "var(--point)",
    style.ORANGE: "var(--orange)",
}
"""What becomes of the colours of a plot; the variables are those of page.css."""


def inline(plot: Callable[[], figure.Figure], name: str, label: str) -> str:
    """The plot as an <svg> in a page, whose text and lines follow the page from light to dark.

    Labels that words.toml knows are there in every language, of which the page shows one.

    Parameters
    ----------
    plot : callable
    name : str
        Of letters; makes the ids in the picture different from those in others of the page.
    label : str
        What a screen reader says.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    """
    svg = style.svg(plot())
    # Metadata, and a style sheet that would hold for the whole page.
    svg = re.sub(r"\s*<(metadata|style).*?</\1>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg)
    svg = re.sub(r"font-family: [^;\"]*(?:; )?", "", svg)
    # Groups have ids that nothing refers to; those of clip paths and markers are hashes.
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
    svg = re.sub(r'(?<=id=")|(?<=href="#)|(?<=url\(#)', f"{name}-", svg)
    for color, variable in COLORS.items():
        svg = re.sub(rf"{color}\b", variable, svg, flags=re.IGNORECASE)
    for texts in (texts for name, texts in sentences().items() if name.startswith("label-")):
        svg = _bilingual(svg, texts["en"], texts["zh"])
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)


def _bilingual(svg: str, english: str, chinese: str) -> str:
    """The picture with a label in both languages.

    A formula in it is set letter by letter below a comment that has all of it; in Chinese the label
    is one text, in the middle of those that are turned.
    """
    text = f"<text([^>]*)>{re.escape(escape(english))}</text>"
    both = "".join(
        rf'<text class="{language}"\1>{escape(label)}</text>'
        for language, label in (("en", english), ("zh", chinese))
    )
    written = re.escape(escape(plain(mathematics(english))))
    formula = rf"(<!-- {written} -->\s*)(<g transform=[^>]*>)\s*<text>(.*?</text>)\s*</g>"

    def twice(match: re.Match[str]) -> str:
        start, moved, letters = match.groups()
        size = re.findall(r"font-size: ([\d.]+)px", letters)[0]
        ends = [float(x) for x in re.findall(r'<tspan x="([\d.]+)', letters)]
        middle = f' x="{max(ends) / 2:.1f}" text-anchor="middle"' if "rotate" in moved else ""
        return (
            f'{start}{moved}<text class="en">{letters}'
            f'<text class="zh"{middle} style="font-size: {size}px">{escape(chinese)}</text></g>'
        )

    return re.sub(formula, twice, re.sub(text, both, svg), flags=re.DOTALL)
