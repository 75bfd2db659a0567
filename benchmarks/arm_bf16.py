"""What a forward in bfloat16 gains on Arm's cores by its products, as counted by arm.py.

benchmarks/bf16_arm.c calls the parts, once on kernels that widen and once on those that multiply
pairs of bfloat16 (BFMMLA).
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import qemu

CORES = ("neoverse-v1", "neoverse-v2")
"""Those of arm.py's cores that have bfloat16."""
PANELS = 12
"""Of eight queries, in a unit, for which a block of keys and values is packed once."""
ISAS = ("neon", "neonbf16")
PARTS = ("pack a block of K", "pack a block of V", "K Q^T, exp2", "round P", "P V")
HALF = ("pack float16's K", "pack float16's V")

Step = tuple[str, str]
Costs = dict[tuple[int, str, str], tuple[float, ...]]
"""By width, instruction set and part: the cycles for a panel of queries and a block of keys, by
core."""


def costs(programs: Mapping[str, Path], cycles: Callable[[Sequence[Step], str], int]) -> Costs:
    """Return the cycles of all parts of the program of every instruction set."""
    found = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for isa, program in programs.items():
            sections, output = qemu.sections([program], isa=isa)
            names = re.findall(r"^d = +(\d+)  (.+)$", output, re.MULTILINE)
            for (width, part), section in zip(names, sections, strict=True):
                steps = section.instructions()
                taken = pool.map(lambda core, steps=steps: cycles(steps, core), CORES)
                shared = PANELS if part.startswith("pack") else 1
                found[int(width), isa, part] = tuple(n / shared for n in taken)
    return found


def total(found: Costs, d: int, isa: str, parts: Sequence[str]) -> tuple[float, ...]:
    """Return the cycles of some parts together, by core, for a panel and a block."""
    none = (0.0,) * len(CORES)
    return tuple(map(sum, zip(*(found.get((d, isa, part), none) for part in parts), strict=True)))


def table(found: Costs) -> str:
    """Return the cycles as a table in Markdown, and how much faster a forward is."""
    heads = [f"{core}, {isa}" for core in CORES for isa in ISAS]
    lines = [f"| for 8 queries, 128 keys | d | {' | '.join(heads)} |"]
    lines.append("|---|" + "---:|" * (1 + len(heads)))

    def row(name: str, d: int, of: Mapping[str, tuple[float, ...]], form: str) -> None:
        cells = [form.format(of[w][i]) if w in of else "" for i in range(len(CORES)) for w in ISAS]
        lines.append(f"| {name} | {d} | {' | '.join(cells)} |")

    for d in sorted({d for d, _, _ in found}):
        for part in PARTS:
            row(part, d, {isa: total(found, d, isa, [part]) for isa in ISAS}, "{:.0f}")
        sums = {isa: total(found, d, isa, PARTS) for isa in ISAS}
        row("forward", d, sums, "{:.0f}")
        slow = sums[ISAS[0]]
        gains = {i: tuple(a / b for a, b in zip(slow, sums[i], strict=True)) for i in ISAS}
        row("times as fast", d, gains, "{:.2f}")
        row("pack float16's K and V", d, {"neon": total(found, d, "neon", HALF)}, "{:.0f}")
    return "\n".join(lines)
