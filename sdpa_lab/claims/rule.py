"""The one rule by which every claim is judged, and how far a verdict is from another one."""

from collections.abc import Iterable, Mapping
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..tools.estimate import Estimate
    from .record import Expect, Figure

DEPENDS = "depends on the horizon"

FRAGILE = 0.5
"""A verdict at a shorter `distance` is one that another margin might have changed."""

Found = Mapping[str, "Estimate | Figure"]
"""Figures with their intervals by name."""


def decide(expect: Iterable["Expect"], found: Found) -> tuple[str, bool]:
    """The verdict, and whether more draws could change neither it nor what is said of a figure.

    As long as the intervals hold the truth, more draws turn "undecided" into another verdict and no
    other verdict into anything.
    """
    states = [state(e, found) for e in expect]
    if "neither" in states:
        return "refuted", not {"open", "both"} & set(states)
    if "open" in states:
        return "undecided", False
    if "law" in states:
        return "corrected", True
    return ("undecided", False) if "both" in states else ("reproduced", True)


def state(expect: "Expect", found: Found) -> str:
    """Where a figure is certain to lie: at the "claim", outside it at the "law", at "neither", at
    the law and perhaps at "both"; or "open"."""
    claimed = compare(found[expect.figure], expect.claimed_region())
    if claimed == "inside":
        return "claim"
    region = expect.law_region()
    law = compare(found[expect.law_figure or expect.figure], region) if region else "outside"
    if law == "inside":
        return "law" if claimed == "outside" else "both"
    return "neither" if claimed == law == "outside" else "open"


def decide_horizons(expect: Iterable["Expect"], found: Found) -> tuple[str, bool, dict[int, str]]:
    """`decide` after each number of steps, where figures have a horizon; verdicts by horizon.

    The verdict is that of all horizons, or that it depends on them: figures without one count at
    each. Where two differ it depends on them, whatever others leave undecided; two differ, too,
    where the claim holds at one and falls at the other, if only its law there is undecided.
    """
    expect = tuple(expect)
    groups = _groups(expect)
    if not groups:
        return *decide(expect, found), {}
    judged = {steps: decide(group, found) for steps, group in groups.items()}
    verdicts = {steps: verdict for steps, (verdict, _) in judged.items()}
    decided = set(verdicts.values()) - {"undecided"}
    final = all(final for _, final in judged.values())
    if len(decided) > 1 or ("reproduced" in decided and any(_falls(e, found) for e in expect)):
        return DEPENDS, final, verdicts
    return "undecided" if "undecided" in verdicts.values() else decided.pop(), final, verdicts


def _falls(expect: "Expect", found: Found) -> bool:
    return compare(found[expect.figure], expect.claimed_region()) == "outside"


def _groups(expect: tuple["Expect", ...]) -> dict[int, list["Expect"]]:
    """The figures that count after each number of steps; none where no figure has a horizon."""
    horizons = sorted({e.horizon for e in expect if e.horizon is not None})
    return {steps: [e for e in expect if e.horizon in (None, steps)] for steps in horizons}


def compare(figure: "Estimate | Figure", region: tuple[float, float]) -> str:
    low, high = region
    if figure.low > high or figure.high < low:
        return "outside"
    return "inside" if low <= figure.low and figure.high <= high else "across"


def distance(expect: Iterable["Expect"], found: Found) -> tuple[float, str]:
    """How far the verdict is from another one: the `clearance` of the figure that it hangs on.

    That is the least of all figures; where some refute, one of which is enough, the largest of
    these. Of several horizons with one verdict it is that of the nearest; where the verdict depends
    on them it hangs on two that differ, the clearest ones. Returned with the name of that figure.
    """
    expect = tuple(expect)
    groups = _groups(expect) or {0: list(expect)}
    far = {steps: _distance(group, found) for steps, group in groups.items()}
    verdict, _, verdicts = decide_horizons(expect, found)
    return _between(expect, found, far, verdicts) if verdict == DEPENDS else min(far.values())


def _between(
    expect: Iterable["Expect"],
    found: Found,
    far: Mapping[int, tuple[float, str]],
    verdicts: Mapping[int, str],
) -> tuple[float, str]:
    """How far two horizons are from one verdict: one of them at the claim and the other outside it,
    or one at the law and the other outside both."""

    def clearest(verdict: str) -> tuple[float, str]:
        return max([far[steps] for steps in far if verdicts[steps] == verdict], default=(0.0, ""))

    falls = [
        (_clearance(found[e.figure], e.claimed_region()), e.figure)
        for e in expect
        if _falls(e, found)
    ]
    held, law, neither = (clearest(verdict) for verdict in ("reproduced", "corrected", "refuted"))
    return max(min(held, max(falls)), min(law, neither))


def _distance(expect: list["Expect"], found: Found) -> tuple[float, str]:
    clear = [(clearance(e, found), e.figure) for e in expect]
    refuting = [cell for cell, e in zip(clear, expect, strict=True) if state(e, found) == "neither"]
    return max(refuting) if refuting else min(clear)


def clearance(expect: "Expect", found: Found) -> float:
    """From an interval to the nearest end of a margin, that of the claim or where it lies outside
    of that of the law as well, over the length of the interval.

    0 where it lies across an end, infinite where it has no length. Below FRAGILE the end is nearer
    than the interval reaches to one side of its value.
    """
    where = state(expect, found)
    if where in ("open", "both"):
        return 0.0
    clear = _clearance(found[expect.figure], expect.claimed_region())
    region = expect.law_region()
    if where == "claim" or region is None:
        return clear
    return min(clear, _clearance(found[expect.law_figure or expect.figure], region))


def _clearance(figure: "Estimate | Figure", region: tuple[float, float]) -> float:
    first, last = region
    if not figure.low < figure.high:
        return inf
    inside = min(figure.low - first, last - figure.high)
    return max(inside, first - figure.high, figure.low - last) / (figure.high - figure.low)
