"""What a row of the ledger consists of, before and after it is judged."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite, isinf
from textwrap import fill
from typing import Any, NamedTuple

from .. import minilm, smollm2
from ..tools.estimate import Draws, Estimate
from .rule import DEPENDS, clearance, distance
from .sentences import Sentence, of_row

WIDTH = 100  # of a line of text

VERDICTS = {
    "reproduced": "复现",
    "corrected": "修正",
    "refuted": "推翻",
    DEPENDS: "取决于步数",
    "undecided": "未定",
}
"""The verdicts, and their names in Chinese."""

HORIZONS = (150, 600, 1200)
"""Steps of training after which a row that depends on their number is judged."""

Margin = float | tuple[float | None, float | None]
Measured = Mapping[str, Draws | Estimate]


class Figure(NamedTuple):
    """A measured figure with its interval, from `n` independent draws."""

    name: str
    value: float
    low: float
    high: float
    n: int


class Expect(NamedTuple):
    """What a claim says of one figure, and within which margin we accept it."""

    figure: str
    claimed: float
    margin: Margin
    """How far below and above the claim a figure still agrees with it; None is any distance."""
    law: float | None = None
    """Our own prediction, where it differs. Its values leave a gap to those claimed, and its margin
    is no wider than the claim's, in itself or in relation to the values; where the claim is open to
    one side, no wider than the gap. Else it would be the claim's complement, and it is refused."""
    law_margin: Margin | None = None
    """That of the law, where `margin` is open to one side and would let every law pass."""
    law_figure: str | None = None
    """The figure that the law is about, where that is another expression than the note's."""
    horizon: int | None = None
    """The steps of training after which it is measured, where the row is judged at several."""

    def claimed_region(self) -> tuple[float, float]:
        """Ends of the values that agree with the claim."""
        return _region(self.claimed, self.margin)

    def law_region(self) -> tuple[float, float] | None:
        """Ends of the values that agree with the law, if there is one."""
        margin = self.margin if self.law_margin is None else self.law_margin
        return None if self.law is None else _region(self.law, margin)


def _region(centre: float, margin: Margin) -> tuple[float, float]:
    below, above = margin if isinstance(margin, tuple) else (margin, margin)
    low = -float("inf") if below is None else centre - below
    return low, float("inf") if above is None else centre + above


def at_horizons(*expect: Expect, horizons: Iterable[int] = HORIZONS) -> tuple[Expect, ...]:
    """The same of each figure after every number of steps; names of figures end in it.

    Examples
    --------
    >>> from sdpa_lab.claims.record import Expect, at_horizons
    >>> [e.figure for e in at_horizons(Expect("loss", 0.0, 0.1), horizons=(150, 600))]
    ['loss, 150 steps', 'loss, 600 steps']
    """
    return tuple(
        e._replace(
            figure=f"{e.figure}, {steps} steps",
            law_figure=e.law_figure and f"{e.law_figure}, {steps} steps",
            horizon=steps,
        )
        for steps in horizons
        for e in expect
    )


def shown_at(figure: str, horizons: Iterable[int] = HORIZONS) -> str:
    """The places of a figure after every number of steps, for a sentence.

    Examples
    --------
    >>> from sdpa_lab.claims.record import shown_at
    >>> shown_at("loss")
    '{loss, 150 steps}, {loss, 600 steps} and {loss, 1200 steps}'
    """
    *first, last = (f"{{{figure}, {steps} steps}}" for steps in horizons)
    return f"{', '.join(first)} and {last}"


def _check_law(name: str, expect: Expect) -> None:
    """ValueError where the law is no prediction but, more or less, the complement of the claim."""
    law, region = expect.law, expect.law_region()
    if law is None or region is None:
        return
    (first, last), (low, high) = expect.claimed_region(), region
    gap = inf if expect.law_figure else max(first - high, low - last)
    if isinf(last - first):
        narrow = max(law - low, high - law) <= gap + TINY
    else:
        widths = (high - low) * abs(expect.claimed), (last - first) * abs(law)
        narrow = high - low <= last - first + TINY or 0 < widths[0] <= widths[1] + TINY
    if not narrow or gap <= TINY:
        raise ValueError(
            f"law: expected values apart from those claimed, [{first:.4g}, {last:.4g}], and no "
            f"wider, got [{low:.4g}, {high:.4g}] for {expect.figure} of {name}; narrow law_margin, "
            f"or leave the law out, so that the claim is refuted"
        )


TINY = 1e-12
"""What rounding may add to the difference of two ends."""


class Trained(NamedTuple):
    """The claim for the heads of a pretrained model: the notes speak of attention before training,
    so this gets a verdict of its own."""

    model: str
    expect: tuple[Expect, ...]
    finding: str
    """What the figures show, whatever the verdict."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One row of the ledger; `sdpa_lab.claims` says how to write one."""

    id: str
    claim: str
    claim_zh: str
    expect: tuple[Expect, ...]
    holds: str
    """The statement if it is reproduced; {FIGURE} and {FIGURE:FORMAT} stand for measured values."""
    law: str
    """The statement if it is not: the right law in one sentence."""
    depends: str = ""
    """The statement if it depends on the horizon; `law` where there is none."""
    experiment: Callable[[int, float], Measured]
    """(seed, times) to figures by name; `times` multiplies the numbers of draws."""
    cited: bool = False
    """The figures are those of a publication, with its rounding as interval."""
    more: float = 4
    """`times` at the second look; 1: there is none."""
    slow: bool = False
    """It trains or times something, or takes long: the main job leaves it out."""
    timed: bool = False
    """It times something or reads the size of a process, and a draw is a process."""
    shares: str = ""
    """Names the work that it shares with rows of other experiments: one process judges them all."""
    trained: tuple[Trained, ...] = ()
    """By pretrained model, judged where it is installed."""

    def __post_init__(self) -> None:
        for expect in self.judged:
            _check_law(self.id, expect)

    @property
    def said(self) -> tuple[Sentence, ...]:
        """What the notes say that the row judges; nothing where the row is our own."""
        return of_row(self.id)

    @property
    def notes(self) -> dict[str, list[str]]:
        """Lines by note."""
        lines: dict[str, list[str]] = {}
        for sentence in self.said:
            lines.setdefault(sentence.note, []).append(sentence.lines)
        return {note: list(dict.fromkeys(found)) for note, found in lines.items()}

    @property
    def judged(self) -> tuple[Expect, ...]:
        """All that the row may have to judge, whether the models are installed or not."""
        return self.expect + tuple(e for part in self.trained for e in part.expect)

    @property
    def experiment_name(self) -> str:
        """Module and name of the experiment."""
        return f"{self.experiment.__module__}.{self.experiment.__qualname__}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A judged claim."""

    claim: Claim
    verdict: str
    """One of VERDICTS."""
    statement: str
    figures: tuple[Figure, ...]
    level: float
    """Of each interval."""
    seed: int
    seconds: float
    draws: dict[str, Any]
    """What was measured per draw, by figure."""
    trained: Mapping[str, str]
    """Verdicts by pretrained model, of those that are installed."""
    horizons: Mapping[int, str] = field(default_factory=dict)
    """Verdicts by steps of training, of a row that is judged at several."""

    @property
    def expect(self) -> dict[str, Expect]:
        """What was judged, by figure."""
        found = {part.model: part.expect for part in self.claim.trained}
        judged = sum((found[model] for model in self.trained), self.claim.expect)
        return {expect.figure: expect for expect in judged}

    @property
    def distances(self) -> dict[str, float]:
        """By figure that was judged: how far it is from the nearest end of a margin.

        In lengths of its interval (`rule.clearance`).
        """
        found = self._found
        return {name: clearance(expect, found) for name, expect in self.expect.items() if found}

    @property
    def distance(self) -> tuple[float, str] | None:
        """That of the figure on which the verdict hangs, and its name; None without figures."""
        return distance(self.claim.expect, self._found) if self.figures else None

    @property
    def trained_distance(self) -> dict[str, float]:
        """The same by pretrained model, of those that are installed."""
        parts = {part.model: part.expect for part in self.claim.trained}
        return {model: distance(parts[model], self._found)[0] for model in self.trained}

    @property
    def smallest_effect(self) -> dict[str, float]:
        """By figure that was judged: the length of its interval.

        The interval around an effect as large as that leaves out 0 with the certainty of the
        verdict.
        """
        found = self._found
        return {name: found[name].high - found[name].low for name in self.expect if found}

    @property
    def _found(self) -> dict[str, Figure]:
        return {figure.name: figure for figure in self.figures}

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = WIDTH) -> str:
        """Verdict, claim and what is right, in lines of at most `width`; without the figures."""
        claim = self.claim
        cited = " (cited)" if claim.cited else ""
        trained = "".join(f"; {model}: {verdict}" for model, verdict in self.trained.items())
        notes = f", notes {' '.join(claim.notes)}" if claim.notes else ""
        verdict = f"{claim.id}: {self.verdict}{cited}{trained}{notes}"
        parts = {"": verdict, "  claim  ": claim.claim, "  found  ": self.statement}
        return "\n".join(folded(text, width, indent, 9) for indent, text in parts.items())

    def record(self) -> dict[str, Any]:
        """The row as plain data, the form of `python -m sdpa claims --json`."""
        claim = self.claim
        result = {
            "id": claim.id,
            "notes": list(claim.notes),
            "claim": claim.claim,
            "claim_zh": claim.claim_zh,
            "verdict": self.verdict,
            "statement": self.statement,
            "figures": [figure._asdict() for figure in self.figures],
            "predicted": {name: expect.claimed for name, expect in self.expect.items()},
            "margin": {name: expect.margin for name, expect in self.expect.items()},
            "experiment": claim.experiment_name,
            "seed": self.seed,
            "seconds": round(self.seconds, 3),
        } | self._distances()
        result |= {"cited": True} if claim.cited else {}
        result |= {"timed": True} if claim.timed else {}
        if self.horizons:
            result["horizons"] = {str(steps): verdict for steps, verdict in self.horizons.items()}
        keys = {minilm.MODEL: "trained", smollm2.MODEL: "decoder"}
        return result | {keys[part.model]: self.trained.get(part.model) for part in claim.trained}

    def _distances(self) -> dict[str, Any]:
        """The fields that say how far the verdict is from another one."""
        least, nearest = self.distance or (inf, None)
        result = {
            "distance": finite(least),
            "nearest": nearest,
            "distances": {name: finite(value) for name, value in self.distances.items()},
            "smallest_effect": self.smallest_effect,
        }
        models = {model: finite(value) for model, value in self.trained_distance.items()}
        return result | ({"trained_distance": models} if models else {})


def finite(value: float) -> float | None:
    """A number as JSON has it: None where it is infinite."""
    return value if isfinite(value) else None


def folded(text: str, width: int, indent: str, hang: int) -> str:
    """Lines of at most `width`, the first behind `indent` and the others behind `hang` spaces.

    Names of models are not broken at their hyphens, nor numbers from what they count.
    """
    kept = text.replace("(n = ", "(n\0=\0").replace(" %", "\0%")
    lines = fill(
        kept,
        width,
        initial_indent=indent,
        subsequent_indent=" " * hang,
        break_on_hyphens=False,
    )
    return lines.replace("\0", " ")


def draws(number: int, times: float, least: int = 8) -> int:
    """How many draws: `number` times `times`, but at least `least`; fewer hardly tell a spread."""
    return max(least, round(number * times))
