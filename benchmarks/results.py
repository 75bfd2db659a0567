"""What one or several runs of the benchmark found, as data: what the report and the plots read."""

import json
import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

Run = dict[str, Any]
"""One process: "threads", "isa", "quick", "date", "machine", "cpu" (family and model; not in older
files), "peers" {name: version}, "missing" [name], "peak" {name: best of the run}, "records", each
with "group", "name", "contenders" {name: {"rounds" [seconds], "flops", "bytes"}} and "peak" {name:
the better right before and after}, one per pass; where measured "import" [seconds] and "memory"
{contender: {length: bytes}}."""


class Timing(NamedTuple):
    """The shortest call of one contender, and what it amounts to."""

    seconds: float
    flops: float
    bytes: float
    again: float
    """How much longer the second-best round took, as a fraction; inf where there was but one."""
    middle: float
    """Seconds of the median round, for calls that something disturbs on purpose."""
    peak: dict[str, float]
    """What the machine did at best right before and after the pass of that call: its clock drifts
    by several per cent within minutes."""

    @property
    def gflops(self) -> float:
        return self.flops / self.seconds / 1e9

    @property
    def per_flop(self) -> float:
        return self.seconds / self.flops


class Results:
    """Look-up over runs on one machine; passes and runs that timed the same work are one."""

    def __init__(self, runs: list[Run]) -> None:
        if len({run["isa"] for run in runs}) != 1:
            raise ValueError("runs: expected runs of one instruction set")
        cpus = {run["cpu"]: None for run in runs if run.get("cpu")}
        if len(cpus) > 1:
            raise ValueError(f"runs: expected runs on one CPU, got {', '.join(cpus)}")
        self.cpu = next(iter(cpus), "")
        self.runs = runs
        self.isa = str(runs[0]["isa"])
        self.processor = str(runs[0]["machine"]["processor"])
        self.quick = any(run["quick"] for run in runs)
        rounds: dict[tuple[int, str, str], dict[str, list[float]]] = {}
        self._records: dict[tuple[int, str, str], dict[str, Timing]] = {}
        for run in runs:
            for record in run["records"]:
                key = (run["threads"], record["group"], record["name"])
                seen = rounds.setdefault(key, {})
                timings = self._records.setdefault(key, {})
                for name, each in record["contenders"].items():
                    seen.setdefault(name, []).extend(each["rounds"])
                    first, *rest = sorted(seen[name])
                    timings[name] = Timing(
                        first,
                        each["flops"],
                        each["bytes"],
                        rest[0] / first - 1 if rest else math.inf,
                        statistics.median(seen[name]),
                        record.get("peak", run["peak"])
                        if name not in timings or first < timings[name].seconds
                        else timings[name].peak,
                    )

    def get(self, threads: int, group: str, name: str) -> dict[str, Timing]:
        """{contender: timing}, empty if it was not measured."""
        return self._records.get((threads, group, name), {})

    def timings(self) -> list[Timing]:
        """Every timing on record."""
        return [timing for found in self._records.values() for timing in found.values()]

    def names(self, threads: int, group: str) -> list[str]:
        """Names of the works of a group, in order."""
        return [name for t, g, name in self._records if (t, g) == (threads, group)]

    def groups(self, threads: int) -> list[str]:
        """Names of the groups measured, in order."""
        return list(dict.fromkeys(group for t, group, _ in self._records if t == threads))

    def threads(self) -> list[int]:
        """Numbers of threads measured, ascending."""
        return sorted({run["threads"] for run in self.runs})

    def peers(self) -> set[str]:
        """Names of the peers measured."""
        return {name for run in self.runs for name in run["peers"]}

    def peaks(self, name: str) -> list[float]:
        """Best of each run of peak.c's figure `name`."""
        return [run["peak"][name] for run in self.runs if name in run["peak"]]

    def fma_peak(self, real: str = "f32") -> float | None:
        """GF/s of one core with this instruction set: the best of all runs."""
        return max(self.peaks(f"{self._prefix()}_{real}"), default=None)

    def rate(self, timing: Timing, what: str = "f32") -> float | None:
        """The best speed of one core while `timing` ran: GF/s of `what`, or 1e9 "tanh" of sums."""
        return timing.peak.get(f"{self._prefix()}_{what}")

    def _prefix(self) -> str:
        names = {"avx512bf16": "avx512", "amx": "avx512", "neon": "native", "neonbf16": "native"}
        return names.get(self.isa, self.isa)

    def read_speed(self) -> float:
        """Speed of reading memory with one core, GB/s."""
        return max(self.peaks("read_GBps"))

    def latest(self, key: str) -> Any:
        """The figures "import" or "memory" of the last run that has them, or None."""
        return next((run[key] for run in reversed(self.runs) if run.get(key)), None)


def load(paths: list[Path]) -> Results:
    """Results of files that `python -m benchmarks --json` wrote."""
    return Results([run for path in paths for run in json.loads(path.read_text(encoding="utf-8"))])
