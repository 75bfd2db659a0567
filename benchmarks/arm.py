"""How close the NEON kernels come to the FMA peak of Arm's cores: counted, not measured.

    python -m benchmarks.arm                    print the tables
    python -m benchmarks.arm --page             write them into docs/performance/arm.md

benchmarks/panels.c is compiled for aarch64 and run once under qemu, which tells every instruction
that the panels of forward and backward execute. llvm-mca says how many cycles a core takes for
them, with all data in L1 and every branch foreseen. Debian's packages: gcc-aarch64-linux-gnu,
libc6-dev-arm64-cross, qemu-user, llvm-22.
"""

import os
import re
import runpy
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import arm_bf16, counted, qemu
from benchmarks.counted import ROOT

PAGE = ROOT / "docs/performance/arm.md"
BUILD = ROOT / "build/arm"
CORES = ("neoverse-n1", "neoverse-v1", "neoverse-v2")
"""Those that LLVM has tables of: its table for apple-m1 is that of a core of 2013."""
LANES, KEYS, QUERIES, UNIT = 4, 128, 8, 96
"""Of panels.c with NEON: a block of keys, a panel and a unit of queries."""

ROWS, COLUMNS = "P V", "dS^T Q"
FORWARD, WEIGHTS, GRADIENT = "K Q^T, exp2 (forward)", "K Q^T, exp2 (backward)", "V dO^T, dS"
CALLS = {"forward": (FORWARD, ROWS), "backward": (WEIGHTS, GRADIENT, ROWS, COLUMNS, COLUMNS)}
"""The panels of a call, which multiply equally often."""

BRANCH = re.compile(r"(cbn?z|tbn?z|adrp?|b|b\..*)$")
CALL = re.compile(r"(blr?|br|ret)$")
FMA = ("fmla", "fmls")
Step = tuple[str, str]
Shares = dict[tuple[str, int], dict[str, float]]
"""By panel or call and width: by column."""


def build(name: str = "panels", isa: str = "neon") -> Path:
    """Compile NAME.c with the flags that setup.py gives to the kernels; return the program."""
    units = runpy.run_path(str(ROOT / "tools/isas.py"))["kernels"]("aarch64")
    program = BUILD / f"{name}-{isa}"
    BUILD.mkdir(parents=True, exist_ok=True)
    command = [qemu.COMPILER, "-O2", "-std=gnu11", "-static", "-ffp-contract=off"]
    command += ["-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd"]
    sources = [f"benchmarks/{name}.c"]
    if isa != "neon":  # which has what they share
        shared = f"{program}.o"
        base = [*command, *units["neon_f32"], "-c", "src/kernels/kernel.c", "-o", shared]
        subprocess.run(base, check=True, cwd=ROOT)
        sources.append(shared)
    command += [*units[f"{isa}_f32"], *sources, "-lm", "-o", str(program)]
    subprocess.run(command, check=True, cwd=ROOT)
    return program


def assembly(steps: Sequence[Step]) -> str:
    """The steps as llvm-mca reads them: it follows no branch, and wants no address.

    A call or a return becomes a jump, because llvm-mca takes a call for 100 cycles.
    """

    def line(name: str, operands: str) -> str:
        if CALL.match(name):
            return "b #4"
        if BRANCH.match(name):
            *registers, _ = operands.split(",")
            operands = ", ".join([*registers, "#0" if name.startswith("adr") else "#4"])
        return f"{name} {operands}"

    return "\n".join(line(*step) for step in steps)


def cycles(steps: Sequence[Step], core: str) -> int:
    """The cycles that a core takes for these steps."""
    options = "-iterations=1", "--resource-pressure=0"
    text = assembly(qemu.decoded(steps))
    return counted.cycles(counted.mca(text, "aarch64-linux-gnu", core, *options))


def fmas_needed(name: str, d: int) -> int:
    """The FMAs of vectors that a panel must do."""
    pairs = KEYS // 8 * UNIT if name == COLUMNS else KEYS * QUERIES
    return pairs * d // LANES


def shares(program: Path) -> Shares:
    """{(panel, d): {core: share of the core's FMA peak}}, and FMAs per instruction."""
    (peak, *sections), output = qemu.sections([program, "once"])
    names = re.findall(r"^d = +(\d+)  (.+)$", output, re.MULTILINE)
    found = {}
    steps = peak.instructions()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rates = {
            core: sum(name in FMA for name, _ in steps) / n
            for core, n in zip(
                CORES, pool.map(lambda core: cycles(steps, core), CORES), strict=True
            )
        }
        for (width, name), section in zip(names, sections, strict=True):
            d = int(width)
            if d < 64:
                continue
            trace, needed = section.instructions(), fmas_needed(name, d)
            taken = pool.map(lambda core, trace=trace: cycles(trace, core), CORES)
            found[name, d] = {"FMAs": needed / len(trace)} | {
                core: needed / n / rates[core] for core, n in zip(CORES, taken, strict=True)
            }
    return found


def calls(
    found: Shares,
) -> Shares:
    """The shares of whole calls, of those of their panels."""
    widths = sorted({d for _, d in found})
    return {
        (call, d): {
            column: len(parts) / sum(1 / found[part, d][column] for part in parts)
            for column in ("FMAs", *CORES)
        }
        for call, parts in CALLS.items()
        for d in widths
    }


def table(found: Shares) -> str:
    """The shares as a table in Markdown."""
    lines = [f"| panel | d | FMAs per instruction | {' | '.join(CORES)} |", "|---|" + "---:|" * 5]
    for (name, d), columns in found.items():
        per_cent = " | ".join(f"{100 * columns[core]:.0f} %" for core in CORES)
        lines.append(f"| {name} | {d} | {columns['FMAs']:.2f} | {per_cent} |")
    return "\n".join(lines)


def tables() -> str:
    """The table of panels and calls."""
    found = shares(build())
    return table(found | calls(found))


def bf16_table() -> str:
    """The table of a forward in bfloat16."""
    programs = {isa: build("bf16_arm", isa) for isa in arm_bf16.ISAS}
    return arm_bf16.table(arm_bf16.costs(programs, cycles))


if __name__ == "__main__":
    counted.main("benchmarks.arm", __doc__, PAGE, {"counts": tables, "bfloat16": bf16_table})
