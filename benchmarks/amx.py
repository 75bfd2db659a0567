"""What AMX's passes cost, counted in the assembly, not measured.

    python -m benchmarks.amx                    print the tables
    python -m benchmarks.amx --page             write them into docs/performance/amx.md

gcc compiles the loops of benchmarks/amx.c; llvm-mca says how many operations they start on the
ports for vectors of Sapphire Rapids, and how many cycles it takes for them by its own table. It
knows no time of the tiles' instructions, which are counted. Nothing runs, and no CPU with AMX is
needed. Debian's packages: gcc, llvm-22.
"""

import runpy
from typing import NamedTuple

from benchmarks import counted, ports
from benchmarks.counted import ROOT

PAGE = ROOT / "docs/performance/amx.md"
CORE, TRIPLE = "sapphirerapids", "x86_64-linux-gnu"
LANES, BLOCK, QUERIES, LONG = 16, 128, 384, 4096
"""Of a vector; a block of keys, the queries of a unit, the keys of a sequence."""
WIDTH = 64
"""Of a head, as in amx.c."""
PRODUCT, LOAD, TILE = 16, 8, 1024
"""Cycles of TDPBF16PS and TILELOADD (Intel's optimization manual), and the bytes of a tile."""
TYPES = {1: ("bfloat16", 2), 2: ("float16", 2), 3: ("float32", 4)}
"""By the number of parts: the type and its bytes."""
TERMS = {1: 1, 2: 4, 3: 6}
"""Products of parts in a product."""
FORESEEN = {
    "tiles": {1: (4, 4), 3: (24, 24)},
    "weights": {1: (4.5, 6), 3: (10, 12)},
}
"""The least and most cycles by a count of operations, before these loops were written."""
ITERATIONS = 100


class Cost(NamedTuple):
    """Cycles: of the two ports for vectors, and by llvm-mca's table."""

    by_ports: float
    by_table: float

    def times(self, factor: float) -> "Cost":
        """So many of it."""
        return Cost(self.by_ports * factor, self.by_table * factor)


def cost(lines: list[str]) -> Cost:
    """What one turn of a loop costs."""
    text = counted.mca("\n".join(lines), TRIPLE, CORE, f"-iterations={ITERATIONS}")
    pressure = counted.ports(text)
    return Cost((pressure[0] + pressure[5]) / 2, counted.cycles(text) / ITERATIONS)


class Loop(NamedTuple):
    """The first innermost loop of a function that has an instruction so many times."""

    inside: list[str]
    around: list[str]
    """What the next loop has besides."""


def find(text: str, name: str, instruction: str, least: int) -> Loop:
    """Find it."""
    lines = ports.function(text, name)
    loops = ports.loops_of(lines)
    first, last = min(
        loop
        for loop in loops
        if ports.is_innermost(loop, loops)
        and sum(instruction in line for line in lines[slice(*loop)]) >= least
    )
    around = [(a, b) for a, b in loops if a < first and b > last]
    a, b = around[0] if around else (first, last)
    return Loop(lines[first : last + 1], lines[a:first] + lines[last + 1 : b + 1])


def stores(lines: list[str]) -> int:
    """Vectors that are stored."""
    return sum(line.endswith(")") and "%zmm" in line and "vmov" in line for line in lines)


def packing(text: str, parts: int) -> tuple[Cost, Cost]:
    """Those of a key and of a value."""
    keys = find(text, f"keys_{parts}", "vmov", parts).inside
    key = cost(keys).times(WIDTH / 32 * parts / stores(keys))
    values = find(text, f"values_{parts}", "vmov", parts)
    sixteen = cost(values.inside).times(LANES * parts / stores(values.inside))
    rest = cost(values.around)
    value = Cost(sixteen.by_ports + rest.by_ports, sixteen.by_table + rest.by_table)
    return key, value.times(WIDTH / LANES / 32)


def costs(text: str, parts: int) -> dict[str, Cost]:
    """Those of a vector of scores: one key and sixteen queries."""
    vectors = QUERIES / LANES
    key, value = packing(text, parts)
    found = {
        "weights": cost(find(text, f"weights_{parts}", "vscalefps", 8).inside).times(1 / 8),
        "maxima": cost(find(text, "maxima", "vmaxps", 4).inside).times(1 / 4),
        "packing K": key.times(1 / vectors),
        "packing V": value.times(1 / vectors),
    }
    if parts == 3:
        found["sums of P V"] = cost(find(text, "amx_add_values", "vfmadd", 1).inside).times(
            WIDTH / BLOCK
        )
    total = [sum(column) for column in zip(*found.values(), strict=True)]
    return found | {"all on vectors": Cost(*total)}


def tiles(text: str) -> tuple[float, float]:
    """Products of a vector of scores for one term, and loads of a product."""
    lines = ports.function(text, "amx_step_3")
    products = sum("tdpbf16ps" in line for line in lines)
    operands = sum("tileloadd" in line and line.endswith(("tmm6", "tmm7")) for line in lines)
    return 2 * WIDTH / 32 / LANES, operands / products


def against(name: str, parts: int, cycles: float) -> str:
    """What was foreseen, and how far the cycles are from it."""
    if parts not in FORESEEN.get(name, {}):
        return "|"
    least, most = FORESEEN[name][parts]
    off = max(least / cycles, cycles / most, 1) - 1
    span = f"{least:g}" if least == most else f"{least:g} to {most:g}"
    return f"{span} | {100 * off:.0f} %"


def cycle_table(text: str) -> str:
    """Cycles per vector of scores."""
    lines = ["| type | panel | by ports | foreseen | off by | by LLVM's table |"]
    lines.append("|---|---|---:|---:|---:|---:|")
    products, loads = tiles(text)
    for parts, (dtype, _) in TYPES.items():
        taken = TERMS[parts] * products * PRODUCT
        lines.append(f"| {dtype} | tiles | {taken:.1f} | {against('tiles', parts, taken)} | |")
        loaded = TERMS[parts] * products * loads * LOAD
        lines.append(f"| {dtype} | loads of tiles | {loaded:.1f} | | | |")
        for name, found in costs(text, parts).items():
            beside = against(name, parts, found.by_ports)
            row = f"{found.by_ports:.1f} | {beside} | {found.by_table:.1f}"
            lines.append(f"| {dtype} | {name} | {row} |")
    return "\n".join(lines)


def byte_table(text: str) -> str:
    """Mebibytes that a unit streams."""
    lines = ["| type | K and V | copies, written and read | into tiles | of K and V per cycle |"]
    lines.append("|---|---:|---:|---:|---:|")
    products, loads = tiles(text)
    vectors = QUERIES / LANES * LONG
    for parts, (dtype, size) in TYPES.items():
        rows = 2 * WIDTH * LONG * size
        copied = WIDTH * LONG * 2 * parts * (1 if parts == 1 else 2)
        loaded = vectors * TERMS[parts] * products * loads * TILE
        least = vectors * max(
            TERMS[parts] * products * PRODUCT, costs(text, parts)["all on vectors"].by_ports
        )
        mebibytes = " | ".join(f"{n / 2**20:.1f}" for n in (rows, 2 * copied, loaded))
        lines.append(f"| {dtype} | {mebibytes} | {rows / least:.2f} bytes |")
    return "\n".join(lines)


class Pass(NamedTuple):
    """A pass that takes scores as given: its products, and how often a unit does what."""

    queries: int
    products: int
    scores: int
    """The products that are scores."""
    packed: int
    added: int
    """Times that a product is added to others or moved."""


PASSES = {
    "statistics": Pass(QUERIES, 1, 1, 1, 0),
    "forward mode": Pass(96, 6, 3, 2, 2),
    "double backward": Pass(96, 16, 8, 6, 6),
}


def pass_table(text: str) -> str:
    """Cycles per vector of scores, of the products that are scores."""
    lines = ["| pass | type | by FMAs | tiles | loads of tiles | packing | adding | all products |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|---:|")
    products, loads = tiles(text)
    adding = cost(find(text, "adding", "vfmadd", 1).inside).by_ports
    for name, of in PASSES.items():
        for parts, (dtype, _) in TYPES.items():
            inside = find(text, f"rows_{parts}", "vmov", parts).inside
            key = cost(inside).by_ports * WIDTH / 32 * parts / stores(inside)
            taken = of.scores * TERMS[parts] * products / 2 * PRODUCT
            row = (
                of.scores * WIDTH / 2,
                taken,
                taken * loads * LOAD / PRODUCT,
                of.packed * key / (of.queries / LANES),
                of.added * adding,
                of.products * WIDTH / 2,
            )
            lines.append(f"| {name} | {dtype} | " + " | ".join(f"{x:.1f}" for x in row) + " |")
    sums = cost(find(text, "statistics", "vfmadd", 3).inside)
    squares = cost(find(text, "squares", "vfmadd", 1).inside)
    rest = sums.by_ports + squares.by_ports
    return "\n".join(lines) + f"\n\nBeside its product, statistics take {rest:.1f} cycles."


def tables() -> str:
    """All tables."""
    flags = runpy.run_path(str(ROOT / "tools/isas.py"))["kernels"]("x86_64")["amx_f32"]
    assembly = ports.assembly(ROOT / "benchmarks/amx.c", flags)
    return f"{cycle_table(assembly)}\n\n{byte_table(assembly)}\n\n{pass_table(assembly)}"


if __name__ == "__main__":
    counted.main("benchmarks.amx", __doc__, PAGE, {"counts": tables})
