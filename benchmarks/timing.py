"""How a call is timed: all contenders in turn, several rounds, the shortest call of each."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

Call = Callable[[], object]

SAMPLE = 5e-4  # seconds that one sample lasts at least, so that the clock's grain cannot be seen


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


FULL = Effort(passes=3, rounds=3, turn=0.02, seconds=1.0)
QUICK = Effort(passes=1, rounds=1, turn=0.0, seconds=0.0)


def race(calls: dict[str, Call], effort: Effort) -> dict[str, list[float]]:
    """Seconds of the shortest call of each contender in each round of one pass, in turns.

    Parameters
    ----------
    calls : {name: call}
    effort : Effort

    Returns
    -------
    {name: [seconds]}
        One number per round. Every other round goes in reverse order, so that nobody always follows
        the same neighbour. Where one round takes more than `seconds`, there is no other.
    """
    best: dict[str, list[float]] = {}
    loops, took = {}, 0.0
    for name, call in calls.items():
        once = _sample(call, 1)
        if once < 3.0:  # or else what is done once, compilation and first pages, counts little
            once = _sample(call, 1)
        took += once
        loops[name] = max(1, int(SAMPLE / once))
        best[name] = [once]
    done = 1
    rounds = effort.rounds if took < effort.seconds else 1
    end = time.perf_counter() + effort.seconds - took
    while done < rounds or time.perf_counter() < end:
        for name in list(calls)[:: -1 if done % 2 else 1]:
            best[name].append(_turn(calls[name], loops[name], effort.turn))
        done += 1
    return best


def _turn(call: Call, loops: int, seconds: float) -> float:
    end = time.perf_counter() + seconds
    best = _sample(call, loops)
    while time.perf_counter() < end:
        best = min(best, _sample(call, loops))
    return best


def _sample(call: Call, loops: int) -> float:
    start = time.perf_counter()
    for _ in range(loops):
        call()
    return (time.perf_counter() - start) / loops


# ------------------------------------------------------------------------------ the machine


def cores(count: int) -> list[int]:
    """`count` CPUs this process may use, on cores of their own as far as there are so many."""
    usable = sorted(os.sched_getaffinity(0))
    seen: set[str] = set()
    first, siblings = [], []
    for cpu in usable:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        core = path.read_text() if path.exists() else str(cpu)
        (siblings if core in seen else first).append(cpu)
        seen.add(core)
    if len(usable) < count:
        raise SystemExit(f"--threads: {count} asked for, {len(usable)} CPUs may be used")
    return (first + siblings)[:count]


class Peak:
    """The program peak.c, run again and again during the measurements; the best of all runs."""

    def __init__(self) -> None:
        self.runs: list[dict[str, float]] = []
        self._program = ROOT / "build" / "peak"
        source = Path(__file__).with_name("peak.c")
        if not self._program.exists() or self._program.stat().st_mtime < source.stat().st_mtime:
            self._program.parent.mkdir(exist_ok=True)
            compiler = os.environ.get("CC", "gcc")
            flags = ["-O3", "-std=gnu11", "-ffp-contract=fast"]
            subprocess.run([compiler, *flags, source, "-o", self._program], check=True)

    def measure(self) -> dict[str, float]:
        """{name: figure} of one more run, which takes about a third of a second."""
        text = subprocess.run([self._program], capture_output=True, text=True, check=True).stdout
        pairs = (line.split() for line in text.splitlines())
        self.runs.append({name: float(value) for name, value in pairs})
        return self.runs[-1]

    def best(self, latest: int = 0) -> dict[str, float]:
        """{name: the largest figure of the `latest` runs}, or of all."""
        runs = self.runs[-latest:]
        return {name: max(run[name] for run in runs) for name in runs[0]}


def import_seconds(rounds: int) -> list[float]:
    """Seconds that `import sdpa` takes where NumPy is imported already, in fresh interpreters."""
    program = (
        "import time, numpy; start = time.perf_counter(); import sdpa;"
        "print(time.perf_counter() - start)"
    )
    command = [sys.executable, "-c", program]
    return [
        float(subprocess.run(command, capture_output=True, check=True, cwd=ROOT).stdout)
        for _ in range(rounds)
    ]
