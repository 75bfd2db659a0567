"""What a forward in bfloat16 would gain on Arm's cores by BFDOT or BFMMLA, as counted by arm.py.

benchmarks/bf16_arm.c has the panels, in which other instructions stand for these two.
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

Step = tuple[str, str]
Costs = dict[tuple[int, str, str], tuple[float, ...]]
"""By width, way and part: the cycles for a panel of queries and a block of keys, by core."""

PARTS = ("pack a block of K", "pack a block of V", "K Q^T, exp2", "round P", "P V")
WAYS = ("today", "BFDOT", "BFMMLA")
HALF = "today, float16"
LANE = re.compile(r"(v\d+)\.4s, (v\d+)\.4s, (v\d+)\.s\[(\d)\]")
WHOLE = re.compile(r"(v\d+)\.16b, (v\d+)\.16b, (v\d+)\.16b")


def meant(steps: Sequence[Step], way: str, part: str) -> list[Step]:
    """The steps, with BFDOT, which sums rounded weights, too, and BFMMLA for their stand-ins."""
    blocks = "bfmmla" if part != "round P" else "bfdot"

    def one(name: str, operands: str) -> Step:
        if name == "uaba" and (match := WHOLE.fullmatch(operands)):
            return blocks, "{}.4s, {}.8h, {}.8h".format(*match.groups())
        if way == "BFDOT" and name == "fmla" and (match := LANE.fullmatch(operands)):
            return "bfdot", "{}.4s, {}.8h, {}.2h[{}]".format(*match.groups())
        return name, operands

    return [one(*step) for step in steps]


def costs(program: Path, cycles: Callable[[Sequence[Step], str], int]) -> Costs:
    """The cycles of all parts."""
    sections, output = qemu.sections([program])
    names = re.findall(r"^d = +(\d+)  (.+): (.+)$", output, re.MULTILINE)
    found = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for (width, way, part), section in zip(names, sections, strict=True):
            steps = meant(section.instructions(), way, part)
            taken = pool.map(lambda core, steps=steps: cycles(steps, core), CORES)
            shared = PANELS if part.startswith("pack") else 1
            found[int(width), way, part] = tuple(n / shared for n in taken)
    return found


def total(found: Costs, d: int, way: str) -> tuple[float, ...]:
    """The cycles of a forward by core, for a panel and a block."""
    none = (0.0,) * len(CORES)
    return tuple(map(sum, zip(*(found.get((d, way, part), none) for part in PARTS), strict=True)))


def table(found: Costs) -> str:
    """The cycles as a table in Markdown, and how much faster a forward would be."""
    heads = [f"{core}, {way}" for core in CORES for way in WAYS]
    lines = [f"| for 8 queries, 128 keys | d | {' | '.join(heads)} |"]
    lines.append("|---|" + "---:|" * (1 + len(heads)))

    def row(name: str, d: int, of: Mapping[str, tuple[float, ...]], form: str) -> None:
        cells = [form.format(of[w][i]) if w in of else "" for i in range(len(CORES)) for w in WAYS]
        lines.append(f"| {name} | {d} | {' | '.join(cells)} |")

    for d in sorted({d for d, _, _ in found}):
        none = (0.0,) * len(CORES)
        for part in PARTS:
            row(part, d, {way: found.get((d, way, part), none) for way in WAYS}, "{:.0f}")
        sums = {way: total(found, d, way) for way in WAYS}
        row("forward", d, sums, "{:.0f}")
        gains = {w: tuple(a / b for a, b in zip(sums["today"], sums[w], strict=True)) for w in WAYS}
        row("times as fast", d, gains, "{:.2f}")
        packs = [found[d, HALF, part] for part in PARTS[:2]]
        half = {"today": tuple(map(sum, zip(*packs, strict=True)))}
        row("pack float16's K and V", d, half, "{:.0f}")
    return "\n".join(lines)
