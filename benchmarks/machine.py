"""The CPUs that a process is given, the machine's peak, and the time of an import.

Imports nothing but the standard library: the CPUs are chosen before NumPy starts its threads.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def cores(count: int) -> list[int]:
    """`count` CPUs this process may use, on cores of their own as far as there are so many.

    macOS gives a process all of them, and keeps it on none.
    """
    chooses = hasattr(os, "sched_getaffinity")
    usable = sorted(os.sched_getaffinity(0)) if chooses else list(range(os.cpu_count() or 1))
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


def cpu() -> str:
    """Family and model, since virtual machines give CPUs of all kinds one name; "" if unknown."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    found = {name.strip(): value.strip() for name, _, value in (e.partition(":") for e in lines)}
    if not {"cpu family", "model"} <= found.keys():
        return ""
    return f"family {found['cpu family']} model {found['model']}"


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
