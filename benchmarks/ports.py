"""What the panels of AVX-512 cost on Intel, counted in the assembly.

    python -m benchmarks.ports

There all arithmetic on 512 bits goes through ports 0 and 5, whatever it computes; a product keeps
both busy, so that every other operation takes time from it. The table has, for every width, these
operations beside the products, per vector of scores or results, and the share of the FMA peak that
is left if nothing else limits; then the loads per FMA, of which the CPU can do one. Loads, stores
and copies of registers take other ports or none, and whatever else a panel contains is one
operation (LLVM 19's tables for Sapphire Rapids). gcc alone is needed, not the CPU.
"""

import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

KERNELS = Path(__file__).parents[1] / "src/kernels"
FLAGS = [
    *("-O2", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-fopenmp-simd", "-fno-asynchronous-unwind-tables"),
]
AVX512 = ["-march=x86-64-v4", "-DSDPA_ISA=avx512", "-DSDPA_ISA_AVX512", "-DSDPA_REAL=32"]
WIDTHS = (32, 64, 128, 256)
LANES = 16
KEYS, QUERIES = 128, 96
"""A block of keys and a unit of queries, at all of these widths."""
LONG_CHAIN = 32
"""Longer products V dO^T are summed in two chains (tiles.h)."""

VECTOR = re.compile(r"%([xyz]mm|k)\d")
FREE = re.compile(
    r"v(mov|p?broadcast)\w*\t([^{]*\)[^{]*|(%[xyz]mm)\d+, \3\d+)$|vp?xor\w*\t(%\w+), \4, "
)
"""Loads and stores without a mask, copies that are renamed, and zeroing."""
LOAD = re.compile(r"\t[^%]*\(.*%zmm\d+$")

SCORES = {
    "K Q^T": "score_raw",
    "K Q^T + bias": "score_biased",
    "exp2(K Q^T), forward": "score_summed",
    "exp2(K Q^T + bias)": "score_biased_summed",
    "exp2(K Q^T), backward": "score_weights",
    "V dO^T, dS": "score_gradient",
    "V dO^T, dS, masked": "score_gradient_masked",
}
ROWS, COLUMNS = "P V, dS K", "P^T dO, dS^T Q"
CALLS = {
    "forward": ("exp2(K Q^T), forward", ROWS),
    "backward": ("exp2(K Q^T), backward", "V dO^T, dS", ROWS, COLUMNS, COLUMNS),
}


class Panel(NamedTuple):
    """What a tile of `vectors` vectors takes."""

    vectors: int
    loads: int
    """Of a step along the depth of the products."""
    rest: int
    """Operations on ports 0 and 5 beside the products."""
    second_chain: int = 0
    """Those of them that a second chain of products takes."""


class Product(NamedTuple):
    """A product of matrices: the panel of every vector of a row, and the depth."""

    panels: list[Panel]
    depth: int

    def beside(self) -> float:
        """Operations beside the products, per vector of results."""
        chained = self.depth > LONG_CHAIN
        rests = [(p.rest - (0 if chained else p.second_chain)) / p.vectors for p in self.panels]
        return sum(rests) / len(rests)

    def cost(self) -> float:
        """Operations per FMA."""
        return 1 + self.beside() / self.depth


def assembly(source: Path = KERNELS / "kernel.c", flags: Sequence[str] = AVX512) -> str:
    """A source, or the kernels for AVX-512 and float32, as gcc writes it."""
    command = ["gcc", *FLAGS, *flags, "-S", str(source), "-o", "-"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def jumps(lines: list[str]) -> Iterator[tuple[int, int]]:
    """Every jump, as its line and that of its label."""
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.match(r"\.L\w+:$", line)}
    for i, line in enumerate(lines):
        jump = re.match(r"\tj\w+\t(\.L\w+)$", line)
        if jump and jump[1] in labels:
            yield i, labels[jump[1]]


def operations(lines: list[str]) -> int:
    """Operations of these lines on ports 0 and 5: all work on vectors and masks."""
    return sum(bool(VECTOR.search(line)) and not FREE.match(line.strip()) for line in lines)


def function(text: str, name: str) -> list[str]:
    """The lines of a function."""
    found = re.search(rf"^{name}:\n(.*?)^\t\.size\t{name},", text, re.MULTILINE | re.DOTALL)
    if not found:
        raise LookupError(f"no function {name} in the assembly")
    return found[1].splitlines()


def loops_of(lines: list[str]) -> list[tuple[int, int]]:
    """The first and last line of every loop, the shortest first."""
    loops = [(b, a) for a, b in jumps(lines) if b < a]
    return sorted(loops, key=lambda loop: loop[1] - loop[0])


def is_innermost(loop: tuple[int, int], loops: list[tuple[int, int]]) -> bool:
    """Whether there is no other loop in this one."""
    return not any(loop[0] <= a and b <= loop[1] and (a, b) != loop for a, b in loops)


def panel(text: str, name: str, vectors: int) -> Panel:
    """The counts of a function: the loop over its tiles, without the loops of products in it."""
    lines = function(text, name)
    spans = list(jumps(lines))
    loops = loops_of(lines)

    def multiplies(a: int, b: int) -> bool:
        inner = is_innermost((a, b), loops)
        fmas = sum("fmadd" in line for line in lines[a:b])
        return inner and fmas == operations(lines[a:b]) == vectors

    products = sorted(loop for loop in loops if multiplies(*loop))
    if not products:
        raise LookupError(f"no loop of {vectors} products in {name}")
    (first, end), (last, last_end) = products[0], products[-1]
    a, b = next((a, b) for a, b in loops if a < first and b > last_end)
    rest = operations(lines[a:b]) - vectors * len(products)
    second_chain = 0
    if len(products) > 1:  # a jump leads around the second chain
        a, b = next((a, b) for a, b in spans if end < a < last and b > last_end)
        second_chain = operations(lines[a:b]) - vectors
    loads = sum(bool(LOAD.search(line)) for line in lines[first:end])
    return Panel(vectors, loads, rest, second_chain)


def tile_widths(vectors: int) -> list[int]:
    """The width of the tile of each vector of a row in P V and dS K (width_by_rows)."""
    if vectors == 0:
        return []
    width = 4 if vectors == 4 else min(vectors, 3)
    return [width] * width + tile_widths(vectors - width)


def every_product(text: str) -> dict[str, list[Product]]:
    """The products of forward and backward, each at every width."""
    found = {}
    for label, name in SCORES.items():
        tile = panel(text, name, 24)
        found[label] = [Product([tile], d) for d in WIDTHS]
    rows = {width: panel(text, f"gemm_{width}_rows", 24) for width in (2, 3, 4)}
    panels = [[rows[width] for width in tile_widths(d // LANES)] for d in WIDTHS]
    found[ROWS] = [Product(row, KEYS) for row in panels]
    columns = panel(text, "gemm_2_columns", 16)  # at all of these widths (width_by_columns)
    found[COLUMNS] = [Product([columns], QUERIES)] * len(WIDTHS)
    return found


def share(parts: tuple[Product, ...]) -> str:
    """Per cent of the peak of products that compute equally much."""
    return f"{100 * len(parts) / sum(part.cost() for part in parts):7.1f}"


def main() -> None:
    """Print a line for every product, then the limits of whole calls."""
    found = every_product(assembly())
    print(f"{'':22s}{'beside':>28s}{'% of the peak':>28s}")
    print(f"{'d =':22s}{2 * ''.join(f'{d:7d}' for d in WIDTHS)}  loads")
    for label, products in found.items():
        beside = "".join(f"{product.beside():7.1f}" for product in products)
        shares = "".join(share((product,)) for product in products)
        loads = max(p.loads / p.vectors for product in products for p in product.panels)
        print(f"{label:22s}{beside}{shares}{loads:7.2f}")
    for call, labels in CALLS.items():
        shares = "".join(map(share, zip(*(found[label] for label in labels), strict=True)))
        print(f"{call:50s}{shares}")


if __name__ == "__main__":
    main()
