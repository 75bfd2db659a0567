"""How a call is timed: all contenders in turn, several rounds, the shortest call of each."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from sdpa_lab.tools.clock import Call, sample, shortest

SAMPLE = 5e-4  # least seconds of one sample, so that the clock's resolution does not matter


class Effort(NamedTuple):
    """How long to measure."""

    passes: int
    """How often all works are gone through. A core that shares its hardware with a neighbour runs
    at half speed for seconds on end: what one pass met disturbed, another meets alone."""
    rounds: int
    """At least so many turns of each contender in a pass."""
    turn: float
    """Seconds of a turn. Threads that spin for a while after their work take a CPU from whoever
    comes next: only what comes later in a turn shows a contender undisturbed."""
    seconds: float
    """Rounds of a pass go on for so long."""


Within = Callable[[], AbstractContextManager[Any]]
"""What holds while a contender has its turn."""

FULL = Effort(passes=3, rounds=3, turn=0.02, seconds=1.0)
QUICK = Effort(passes=1, rounds=1, turn=0.0, seconds=0.0)


def race(
    calls: dict[str, Call],
    effort: Effort,
    within: Mapping[str, Within] | None = None,
    before: Mapping[str, Call] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each contender's shortest call in each round of one pass; contenders alternate.

    Parameters
    ----------
    calls : {name: call}
    effort : Effort
    within : {name: context manager}, optional
        Entered for each turn of that contender, outside the clock.
    before : {name: call}, optional
        Done before that contender's call, outside the clock. Its turns are of one call.

    Returns
    -------
    {name: [seconds]}
        One number per round. Every other round goes in reverse order, so that nobody always follows
        the same neighbour. Where one round takes more than `seconds`, there is no other.
    """
    best: dict[str, list[float]] = {}
    loops, took = {}, 0.0
    around = dict.fromkeys(calls, nullcontext) | dict(within or {})
    first = before or {}

    def alone(name: str) -> float:
        if name in first:
            first[name]()
        return sample(calls[name], 1, time.perf_counter)

    for name in calls:
        with around[name]():
            once = alone(name)
            if once < 3.0:  # or else what is done once, compilation and first pages, counts little
                once = alone(name)
        took += once
        loops[name] = max(1, int(SAMPLE / once))
        best[name] = [once]
    done = 1
    rounds = effort.rounds if took < effort.seconds else 1
    end = time.perf_counter() + effort.seconds - took
    while done < rounds or time.perf_counter() < end:
        for name in list(calls)[:: -1 if done % 2 else 1]:
            with around[name]():
                best[name].append(
                    alone(name)
                    if name in first
                    else shortest(calls[name], loops[name], effort.turn)
                )
        done += 1
    return best
