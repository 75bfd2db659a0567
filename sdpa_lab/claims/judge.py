"""The one rule by which every claim is judged."""

import time
from collections.abc import Iterable

from ..tools.estimate import LEVEL, Draws, Estimate
from ..tools.machine import one_blas_thread
from ..tools.table import with_interval
from .record import DEPENDS, Claim, Expect, Figure, Measured, Row, Trained

ALPHA = 0.05
"""Chance that any interval of the whole ledger misses its truth, at most."""

LOOKS = 2
"""A row that the first look leaves undecided is measured again, with more draws."""


def judge(claim: Claim, *, rows: int, seed: int = 0, times: float = 1.0) -> Row:
    """Measure a claim and compare.

    The interval of every figure is at level 1 - ALPHA / (rows * figures judged * LOOKS), so that
    all intervals of the ledger hold together with probability 1 - ALPHA (Bonferroni). Then

        reproduced   every interval lies inside the margin around what is claimed
        corrected    some lie outside; each of these lies inside the same margin around our law
        refuted      some lie outside, and there is no such law
        undecided    else, after the last look

    A row with figures at several horizons has a verdict at each of them, and one of its own where
    they agree; else it depends on the horizon (`decide_horizons`).

    A row whose verdict is certain is measured again as well if one of its intervals crosses the end
    of the margin and does not lie inside that of the law: its sentence speaks of that figure, too.

    Statements about pretrained models (`Claim.trained`) get separate verdicts by the same rule, and
    count among the figures judged whether the models are installed or not. What a statement says
    of a figure comes with its 95 % interval, the one of every ± of this package; the verdict is by
    the wider ones, which the ledger prints as [low, high].

    Parameters
    ----------
    claim : Claim
    rows : int
        Of the ledger, whatever part of it is judged now.
    seed : int
    times : float
        Multiplies the numbers of draws.

    Returns
    -------
    Row
        Undecided, without figures, where the experiment needs a package that is not installed.

    Raises
    ------
    ValueError
        All draws of a judged figure are equal, so that its interval has no length.
    """
    start = time.perf_counter()
    level = 1 - ALPHA / (rows * max(1, len(claim.judged)) * LOOKS)
    for factor in (1, claim.more) if claim.more > 1 else (1,):
        trained: dict[str, str] = {}
        horizons: dict[int, str] = {}
        try:
            with one_blas_thread():
                measured = claim.experiment(seed, times * factor)
        except ImportError as error:
            verdict, statement, found, measured = "undecided", f"Not measured here: {error}", {}, {}
            break
        found, shown = _estimates(measured, level), _estimates(measured, LEVEL)
        _refuse_points(claim, measured, found)
        verdict, final, horizons = decide_horizons(claim.expect, found)
        statement = _after(horizons) + _statement(claim, verdict, found, shown)
        for part in claim.trained:
            if all(expect.figure in found for expect in part.expect):
                trained[part.model], final_trained = decide(part.expect, found)
                final = final and final_trained
            statement += " " + _trained_statement(part, trained.get(part.model), shown)
        if final:
            break
    return Row(
        claim=claim,
        verdict=verdict,
        statement=statement,
        figures=tuple(Figure(name, *cell[:4]) for name, cell in found.items()),
        level=level,
        seed=seed,
        seconds=time.perf_counter() - start,
        draws={name: cell.values for name, cell in measured.items() if isinstance(cell, Draws)},
        trained=trained,
        horizons=horizons,
    )


def _estimates(measured: Measured, level: float) -> dict[str, Estimate]:
    return {
        name: cell.estimate(level) if isinstance(cell, Draws) else cell
        for name, cell in measured.items()
    }


def _refuse_points(claim: Claim, measured: Measured, found: dict[str, Estimate]) -> None:
    """A random figure whose interval has no length would be judged with a certainty it lacks."""
    for expect in claim.judged:
        cell = measured.get(expect.figure)
        if isinstance(cell, Draws) and not found[expect.figure].low < found[expect.figure].high:
            raise ValueError(
                f"{claim.id}: expected an interval around {expect.figure}, "
                f"got {len(cell.values)} equal draws of {found[expect.figure].value}"
            )


def decide(expect: Iterable[Expect], found: dict[str, Estimate]) -> tuple[str, bool]:
    """The verdict, and whether more draws could change neither it nor what is said of a figure."""
    expect = tuple(expect)
    claimed = [_compare(found[e.figure], e.claimed_region()) for e in expect]
    if "outside" not in claimed:
        return ("undecided", False) if "across" in claimed else ("reproduced", True)
    laws = [
        _compare(found[e.law_figure or e.figure], region) if (region := e.law_region()) else "none"
        for e in expect
    ]
    failed = [law for where, law in zip(claimed, laws, strict=True) if where == "outside"]
    # A figure at neither the claim nor our law leaves open what the sentence says of it.
    settled = all(
        where != "across" or law == "inside" for where, law in zip(claimed, laws, strict=True)
    )
    if all(law == "inside" for law in failed):
        return "corrected", settled
    return "refuted", settled and ("none" in failed or "outside" in failed)


def decide_horizons(
    expect: Iterable[Expect], found: dict[str, Estimate]
) -> tuple[str, bool, dict[int, str]]:
    """`decide` after each number of steps, where figures have a horizon; verdicts by horizon.

    The verdict is that of all horizons, or that it depends on them: figures without one count at
    each. Where two differ it depends on them, whatever others leave undecided.
    """
    expect = tuple(expect)
    horizons = sorted({e.horizon for e in expect if e.horizon is not None})
    if not horizons:
        return *decide(expect, found), {}
    judged = {
        steps: decide([e for e in expect if e.horizon in (None, steps)], found)
        for steps in horizons
    }
    verdicts = {steps: verdict for steps, (verdict, _) in judged.items()}
    decided = set(verdicts.values()) - {"undecided"}
    final = all(final for _, final in judged.values())
    if len(decided) > 1:
        return DEPENDS, final, verdicts
    return "undecided" if "undecided" in verdicts.values() else decided.pop(), final, verdicts


def _after(horizons: dict[int, str]) -> str:
    """The verdicts by number of steps, before a statement; nothing where there are none."""
    groups: dict[str, list[str]] = {}
    for steps, verdict in horizons.items():
        groups.setdefault(verdict, []).append(str(steps))
    parts = [f"{verdict} after {_listed(steps)} steps" for verdict, steps in groups.items()]
    return f"{', '.join(parts)}. ".capitalize() if parts else ""


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _compare(figure: Estimate, region: tuple[float, float]) -> str:
    low, high = region
    if figure.low > high or figure.high < low:
        return "outside"
    return "inside" if low <= figure.low and figure.high <= high else "across"


class _Shown:
    """An estimate in a statement: with its interval, or its value in a format."""

    def __init__(self, estimate: Estimate) -> None:
        self.estimate = estimate

    def __format__(self, form: str) -> str:
        return format(self.estimate.value, form) if form else with_interval(self.estimate)


def _statement(
    claim: Claim, verdict: str, found: dict[str, Estimate], shown: dict[str, Estimate]
) -> str:
    if verdict == "undecided":
        open_figures = [
            f"{e.figure} {with_interval(found[e.figure])} against {e.claimed:g}"
            for e in claim.expect
            if _compare(found[e.figure], e.claimed_region()) == "across"
        ]
        return f"Not decided by these draws: {'; '.join(open_figures)}."
    texts = {"reproduced": claim.holds, DEPENDS: claim.depends}
    return _filled(texts.get(verdict) or claim.law, shown)


def _trained_statement(part: Trained, verdict: str | None, found: dict[str, Estimate]) -> str:
    if verdict is None:
        return f"With {part.model} installed (make models) its heads are judged as well."
    return f"For {part.model} the claim is {verdict}: {_filled(part.finding, found)}"


def _filled(text: str, found: dict[str, Estimate]) -> str:
    return text.format_map({name: _Shown(estimate) for name, estimate in found.items()})
