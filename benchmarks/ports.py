"""What the panels of AVX-512 cost on Intel, counted in the assembly.

    python -m benchmarks.ports

There all arithmetic on 512 bits goes through ports 0 and 5, whatever it computes; a product keeps
both busy, so that every other operation takes time from it. The table has these operations beside
the products, per vector of scores or results, and the share of the FMA peak that is left if nothing
else limits. Loads, stores and copies of registers take other ports or
none. gcc alone is needed, not the CPU.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
KERNEL = ROOT / "src/kernels/kernel.c"
FLAGS = [
    *("-O2", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-fopenmp-simd", "-fno-asynchronous-unwind-tables"),
    *("-march=x86-64-v4", "-DSDPA_ISA=avx512", "-DSDPA_ISA_AVX512", "-DSDPA_REAL=32"),
]
WIDTHS = (32, 64, 128)
TILE = 24
"""Vectors of a tile: 8 keys by 3 vectors of queries."""

UOPS = {"vreduceps": 2, "vscalefps": 2}
"""What takes more than one micro-operation on ports 0 and 5 (uops.info, Skylake-X and later)."""
FREE = ("vmov", "vbroadcast", "vxorps", "vpxor\t")
"""Loads, stores, copies that are renamed, and zeroing."""

SCORES = {
    "K Q^T": "score_raw",
    "K Q^T, exp2, forward": "score_summed",
    "the same with a bias": "score_biased_summed",
    "K Q^T, exp2, backward": "score_weights",
    "V dO^T, dS": "score_gradient",
    "the same under a mask": "score_gradient_masked",
}
RESULTS = {"P V": ("gemm_3_rows", 128), "dS^T Q, P^T dO": ("gemm_3_columns", 96)}
"""Functions and depth: P V sums over a block of keys, the gradients over a unit of queries."""


class Panel(NamedTuple):
    """Operations on ports 0 and 5 for one tile."""

    step: int
    """Those of one step along the depth of the products."""
    rest: int
    """Those of everything else."""


def assembly() -> str:
    """The kernels for AVX-512 and float32, as gcc writes them."""
    command = ["gcc", *FLAGS, "-S", str(KERNEL), "-o", "-"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def loops(lines: list[str]) -> Iterator[tuple[int, int]]:
    """First and last line of every loop: a jump back to a label."""
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.match(r"\.L\w+:$", line)}
    for i, line in enumerate(lines):
        jump = re.match(r"\tj\w+\t(\.L\w+)$", line)
        if jump and labels.get(jump[1], i) < i:
            yield labels[jump[1]], i


def operations(lines: list[str]) -> int:
    """Micro-operations of these lines on ports 0 and 5: arithmetic on zmm, and masks made of it."""
    found = 0
    for line in lines:
        name, _, operands = line.strip().partition("\t")
        if "%zmm" in operands and not f"{name}\t".startswith(FREE):
            found += UOPS.get(name, 1)
    return found


def panel(text: str, name: str) -> Panel:
    """The counts of a function: its loop of products, and the loop over tiles around it."""
    function = re.search(rf"^{name}:\n(.*?)^\t\.size\t{name},", text, re.MULTILINE | re.DOTALL)
    if not function:
        raise LookupError(f"no function {name} in the assembly")
    lines = function[1].splitlines()
    all_loops = sorted(loops(lines), key=lambda loop: loop[1] - loop[0])
    inner = next(
        (a, b) for a, b in all_loops if sum("fmadd" in x for x in lines[a : b + 1]) >= TILE
    )
    outer = next((a, b) for a, b in all_loops if a < inner[0] and b > inner[1])
    rest = lines[outer[0] : inner[0]] + lines[inner[1] + 1 : outer[1]]
    return Panel(operations(lines[inner[0] : inner[1] + 1]), operations(rest))


def share(panels: list[tuple[Panel, int]]) -> str:
    """Per cent of the peak of panels that compute equally much, each with its depth."""
    times = [panel.step / TILE + panel.rest / TILE / depth for panel, depth in panels]
    return f"{100 * len(times) / sum(times):9.1f}"


def main() -> None:
    """Print a line for every panel, then the limits of whole calls."""
    text = assembly()
    scores = {label: panel(text, name) for label, name in SCORES.items()}
    results = {label: (panel(text, name), depth) for label, (name, depth) in RESULTS.items()}
    heads = "".join(f"{f'd = {d}':>9s}" for d in WIDTHS)
    print(f"{'':24s}{'beside':>8s}{heads}   % of the peak")
    for label, found in scores.items():
        shares = "".join(share([(found, d)]) for d in WIDTHS)
        print(f"{label:24s}{found.rest / TILE:8.1f}{shares}")
    for label, (found, depth) in results.items():
        print(f"{label:24s}{found.rest / TILE:8.1f}{share([(found, depth)]) * len(WIDTHS)}")
    forward, backward = scores["K Q^T, exp2, forward"], scores["K Q^T, exp2, backward"]
    gradient = results["dS^T Q, P^T dO"]
    limits = {"forward": "", "backward": ""}
    for d in WIDTHS:
        limits["forward"] += share([(forward, d), results["P V"]])
        limits["backward"] += share([(backward, d), (scores["V dO^T, dS"], d), *3 * [gradient]])
    for label, line in limits.items():
        print(f"{label:32s}{line}")


if __name__ == "__main__":
    main()
