"""Calls in a control group that grants little CPU time and memory, as a container's does.

``python tests/limits.py`` as root, or `make limits`. A quota of CPU time sets the number of
threads. Linux kills a process that touches more memory than its limit, whatever malloc said before.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
SECOND_VERSION = (ROOT / "cgroup.controllers").exists()

# Eight heads of 16384 tokens: the arrays take 269 MB, all scores would take 8.6 GB.
ATTENTION = """
rng = np.random.default_rng(0)
query, key, value, grad_out = (rng.standard_normal((8, 16384, 64), np.float32) for _ in range(4))
out, lse = sdpa.attention_forward(query, key, value)
sdpa.attention_backward(grad_out, query, key, value, out, lse)
"""
WEIGHTS = "sdpa.attention_weights(*np.ones((2, 8, 16384, 64), np.float32))"
THREADS = "print(sdpa.get_num_threads())"
LIMIT = 350 * 10**6


@contextlib.contextmanager
def group(controller: str, settings: dict[str, int | str]) -> Iterator[Path]:
    """A control group whose controller has these settings."""
    place = (ROOT if SECOND_VERSION else ROOT / controller) / "sdpa"
    place.mkdir()
    try:
        for name, value in settings.items():
            (place / f"{controller}.{name}").write_text(str(value))
        yield place
    finally:
        place.rmdir()


def run(code: str, place: Path) -> subprocess.CompletedProcess[str]:
    """A process that joins the control group before it starts Python."""
    command = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', place, sys.executable, "-c"]
    code = f"import numpy as np\nimport sdpa\n{code}"
    env = {name: value for name, value in os.environ.items() if "NUM_THREADS" not in name}
    return subprocess.run([*command, code], text=True, stdout=subprocess.PIPE, env=env)


def cpu() -> None:
    for cpus in 1, 2:
        if SECOND_VERSION:
            quota = {"max": f"{cpus}00000 100000"}
        else:
            quota = {"cfs_period_us": 100000, "cfs_quota_us": cpus * 100000}
        with group("cpu", quota) as place:
            found = int(run(THREADS, place).stdout)
        assert found == min(cpus, len(os.sched_getaffinity(0))), found
        print(f"threads where the quota is that of {cpus} CPUs: {found}")


def memory() -> None:
    with group("memory", {"max" if SECOND_VERSION else "limit_in_bytes": LIMIT}) as place:
        status = run(ATTENTION, place).returncode
        assert status == 0, status
        print(f"forward and backward of (8, 16384, 64) end within {LIMIT / 1e6:.0f} MB")
        status = run(WEIGHTS, place).returncode
        assert status == -signal.SIGKILL, status
        print("the weights do not, and the process is killed")


if __name__ == "__main__":
    if os.geteuid() != 0:
        sys.exit("limits.py makes control groups, for which it must be root")
    cpu()
    memory()
