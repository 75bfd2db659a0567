"""Memory that one forward takes beyond its operands, each in a separate process.

python -m benchmarks.memory CONTENDER N    prints bytes
"""

import subprocess
import sys

from benchmarks import contenders, peers
from benchmarks.machine import ROOT

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
QUICK_LENGTHS = (64, 128)


def growth(name: str, n: int) -> int:
    """Largest resident memory during a forward of one head, d = 64, less that before it, in bytes.

    The result is in it, and what the system does at its first call for these shapes; so are pages
    that a library keeps for later.
    """
    x = contenders.operands(1, n, 64)
    if name == "sdpa":
        call = contenders.ours(contenders.operands(1, 16, 64))["forward"].call
        call()
        call = contenders.ours(x)["forward"].call
    else:
        (kind,) = [kind for kind in peers.ALL if kind.name == name]
        peer = kind(1)
        small = peer.forward(contenders.operands(1, 16, 64))
        assert small is not None
        small()
        found = peer.forward(x)
        assert found is not None
        call = found
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the high-water mark starts again from what is resident now
    before = _status("VmRSS")
    call()
    return max(_status("VmHWM") - before, 0)


def _status(field: str) -> int:
    with open("/proc/self/status") as lines:
        (value,) = [line.split()[1] for line in lines if line.startswith(field + ":")]
    return 1024 * int(value)


def over_length(names: list[str], lengths: tuple[int, ...]) -> dict[str, dict[int, int]]:
    """{contender: {length: bytes}}."""
    found: dict[str, dict[int, int]] = {}
    for name in names:
        for n in lengths:
            command = [sys.executable, "-m", "benchmarks.memory", name, str(n)]
            result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
            found.setdefault(name, {})[n] = int(result.stdout.split()[-1])
            print(f"memory {name} n={n}: {found[name][n] / 1e6:.1f} MB", file=sys.stderr)
    return found


if __name__ == "__main__":
    print(growth(sys.argv[1], int(sys.argv[2])))
