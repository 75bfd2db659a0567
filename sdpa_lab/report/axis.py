"""One judged figure on one little axis: claim with its margin, measurement with its interval, law.

The picture has a lane for each of the three, so that marks which agree do not hide each other.
"""

from collections.abc import Iterable
from html import escape
from math import ceil, floor, inf, isfinite, log10

from ..claims import Expect, Figure
from ..claims.cli import interval
from .words import both

WIDTH, EDGE = 360, 22  # of the picture, and of the space left and right of the axis
CLAIMED, MEASURED, LAW, LINE = 10, 25, 40, 51  # the lanes, and the axis below them
HEIGHT = 68
TICKS = 4


def decisive(figures: Iterable[Figure], expect: Iterable[Expect]) -> tuple[Figure, Expect] | None:
    """The judged figure whose interval is furthest outside its margin; None if none is measured.

    "Furthest" is the gap between margin and interval as a share of what both and the gap take up.
    The first one, where all are inside.
    """
    found = {figure.name: figure for figure in figures}
    pairs = [(found[e.figure], e) for e in expect if e.figure in found]

    def gap(pair: tuple[Figure, Expect]) -> float:
        figure, (low, high) = pair[0], pair[1].claimed_region()
        between = max(0.0, figure.low - high, low - figure.high)
        ends = [x for x in (low, high, figure.low, figure.high) if isfinite(x)]
        return between / (max(ends) - min(ends)) if between else 0.0

    return max(pairs, key=gap, default=None)


def drawn(figure: Figure, expect: Expect) -> str:
    """An <svg> that repeats what `described` says, and is hidden from screen readers."""
    low, high = expect.claimed_region()
    law = expect.law if expect.law_figure is None else None
    marks = [expect.claimed, figure.value, figure.low, figure.high, low, high]
    finite = [x for x in [*marks, law] if x is not None and isfinite(x)]
    middle, half = (max(finite) + min(finite)) / 2, (max(finite) - min(finite)) / 2
    half = 1.06 * half or 0.5 * abs(middle) or 1.0  # one point: zero or its double at the ends

    def x(value: float) -> float:
        share = (value - middle + half) / (2 * half)
        return round(EDGE + (WIDTH - 2 * EDGE) * min(1.02, max(-0.02, share)), 1)

    left, right = x(low), x(high)
    parts = [
        f'<rect class="margin" x="{left}" width="{max(2.0, right - left):.1f}" y="1" '
        f'height="{LINE - 1}"/>',
        f'<path class="axis" d="M0 {LINE}H{WIDTH}"/>',
    ]
    for tick in _ticks(middle - half, middle + half):
        parts.append(f'<path class="axis" d="M{x(tick)} {LINE}v4"/>')
        parts.append(f'<text x="{x(tick)}" y="{HEIGHT - 3}">{tick:.4g}</text>')
    parts.append(f'<circle class="claimed" cx="{x(expect.claimed)}" cy="{CLAIMED}" r="4.5"/>')
    parts.append(f'<path class="interval" d="M{x(figure.low)} {MEASURED}H{x(figure.high)}"/>')
    parts.append(f'<circle class="measured" cx="{x(figure.value)}" cy="{MEASURED}" r="4.5"/>')
    if law is not None:
        parts.append(f'<path class="law-mark" d="M{x(law)} {LAW - 6}l6 6l-6 6l-6-6z"/>')
    return (
        f'<svg class="verdict-axis" viewBox="0 0 {WIDTH} {HEIGHT}" aria-hidden="true">'
        f"{''.join(parts)}</svg>"
    )


def described(figure: Figure, expect: Expect) -> str:
    """The same as a list of terms with their values, which is the legend of the axis, too."""
    terms = [("claimed", "○", claimed(expect)), ("measured", "●", escape(interval(figure)))]
    if expect.law is not None:
        law = f"{expect.law:.4g}"
        about = expect.law_figure
        terms.append(("law", "◆", both("law-of", law=law, figure=about) if about else law))
    rows = [
        f'<div><dt><i class="{name}" aria-hidden="true">{mark}</i> {both(name)}</dt>'
        f"<dd>{text}</dd></div>"
        for name, mark, text in terms
    ]
    return f"<dl>{''.join(rows)}</dl>"


def claimed(expect: Expect) -> str:
    """The values that agree with a claim, in words, as HTML.

    Examples
    --------
    >>> from sdpa_lab.claims import Expect
    >>> from sdpa_lab.report.axis import claimed
    >>> claimed(Expect("x", 1.0, 0.05))
    '1 ± 0.05'
    >>> claimed(Expect("x", 0.5, (None, 0)))
    '<span class="en" lang="en">at most 0.5</span><span class="zh" lang="zh">至多 0.5</span>'
    """
    low, high = expect.claimed_region()
    if low == -inf:
        return both("at-most", high=high)
    if high == inf:
        return both("at-least", low=low)
    if isinstance(expect.margin, tuple):
        return both("that-is", claimed=expect.claimed, low=low, high=high)
    return f"{expect.claimed:.4g} ± {expect.margin:.3g}"


def _ticks(low: float, high: float) -> list[float]:
    """About TICKS round numbers between the ends."""
    raw = (high - low) / TICKS
    power = 10.0 ** floor(log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    return [i * step + 0.0 for i in range(ceil(low / step), floor(high / step) + 1)]
