"""How a claim is measured, judged by the rule and put into words."""

import time

from ..tools.estimate import LEVEL, Draws, Estimate
from ..tools.machine import one_blas_thread
from ..tools.table import with_interval
from . import processes
from .record import Claim, Expect, Figure, Measured, Row, Trained
from .rule import DEPENDS, compare, decide, decide_horizons, state

ALPHA = 0.05
"""Chance that any interval of the whole ledger misses its truth, at most."""

LOOKS = 2
"""A row that the first look leaves undecided is measured again, with more draws."""


def judge(claim: Claim, *, rows: int, seed: int = 0, times: float = 1.0) -> Row:
    """Measure a claim and compare.

    The interval of every figure is at level 1 - ALPHA / (rows * figures judged * LOOKS), so that
    all intervals of the ledger hold together with probability 1 - ALPHA (Bonferroni). Then

        reproduced   every interval lies inside the margin around what is claimed
        corrected    some lie outside; each of these lies inside the margin around our law, and so
                     does each that lies across the end of the claim's margin
        refuted      some lie outside both, or outside where there is no law
        undecided    else, after the last look: an interval lies across the end of a margin

    A row with figures at several horizons has a verdict at each of them, and one of its own where
    they agree; else it depends on the horizon (`decide_horizons`).

    A refuted row is measured again as well if the interval of another figure lies across an end:
    its sentence speaks of that figure, too.

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
                measured = _measured(claim, seed, times * factor)
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


def _measured(claim: Claim, seed: int, times: float) -> Measured:
    if claim.timed:
        return processes.measured(claim.experiment, seed, times)
    return claim.experiment(seed, times)


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


def _after(horizons: dict[int, str]) -> str:
    """The verdicts by number of steps, before a statement; nothing where there are none."""
    groups: dict[str, list[str]] = {}
    for steps, verdict in horizons.items():
        groups.setdefault(verdict, []).append(str(steps))
    parts = [f"{verdict} after {_listed(steps)} steps" for verdict, steps in groups.items()]
    return f"{', '.join(parts)}. ".capitalize() if parts else ""


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


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
        left = [_left_open(e, found) for e in claim.expect if state(e, found) in ("open", "both")]
        return f"Not decided by these draws: {'; '.join(left)}."
    texts = {"reproduced": claim.holds, DEPENDS: claim.depends}
    return _filled(texts.get(verdict) or claim.law, shown)


def _left_open(expect: Expect, found: dict[str, Estimate]) -> str:
    """A figure across the end of the claim's margin, or outside that and across the law's."""
    if compare(found[expect.figure], expect.claimed_region()) == "across":
        return f"{expect.figure} {with_interval(found[expect.figure])} against {expect.claimed:g}"
    name = expect.law_figure or expect.figure
    return f"{name} {with_interval(found[name])} against our law {expect.law:g}"


def _trained_statement(part: Trained, verdict: str | None, found: dict[str, Estimate]) -> str:
    if verdict is None:
        return f"With {part.model} installed (make models) its heads are judged as well."
    return f"For {part.model} the claim is {verdict}: {_filled(part.finding, found)}"


def _filled(text: str, found: dict[str, Estimate]) -> str:
    return text.format_map({name: _Shown(estimate) for name, estimate in found.items()})
