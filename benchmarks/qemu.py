"""What a program for aarch64 executes, instruction by instruction, under qemu."""

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

COMPILER = "aarch64-linux-gnu-gcc"
DISASSEMBLER = "llvm-mc-22"
INSTRUCTION = re.compile(r"^0x(\w+):  \w+  (\S+) *(.*)$", re.MULTILINE)
STEP = re.compile(r"^Trace \d+: \S+ \[\w+/(\w+)/\S*\] (\S*)$|^IN:.*\n((?:0x.*\n)+)", re.MULTILINE)


class Section(NamedTuple):
    """What ran between two calls of mark(), without them."""

    blocks: list[int]
    """The addresses of its blocks, in order."""
    code: dict[int, list[tuple[str, str]]]
    """The instructions of every block, each a mnemonic and its operands."""

    def executed(self) -> int:
        """Return the number of instructions executed."""
        return sum(n * len(self.code[block]) for block, n in Counter(self.blocks).items())

    def instructions(self) -> list[tuple[str, str]]:
        """Return the instructions in the order in which they ran."""
        return [step for block in self.blocks for step in self.code[block]]


def parse(text: str) -> list[Section]:
    """Return the sections of a log of qemu."""
    code: dict[int, list[tuple[str, str]]] = {}
    found: list[Section] = []
    inside = False
    for match in STEP.finditer(text):
        address, symbol, block = match.groups()
        if block:
            steps = INSTRUCTION.findall(block)
            code[int(steps[0][0], 16)] = [(name, operands) for _, name, operands in steps]
        elif symbol == "mark":
            inside = not inside
            if inside:
                found.append(Section([], code))
        elif inside:
            found[-1].blocks.append(int(address, 16))
    return found


def decoded(steps: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the steps, with those that qemu's disassembler does not know in words."""
    unknown = sorted({operands for name, operands in steps if name == ".byte"})
    if not unknown:
        return list(steps)
    command = [DISASSEMBLER, "--disassemble", "--triple=aarch64", "--mattr=+bf16"]
    text = "\n".join(unknown).replace(",", "")
    run = subprocess.run(command, input=text, check=True, text=True, capture_output=True)
    lines = [tuple(line.split(maxsplit=1)) for line in run.stdout.splitlines() if line]
    known = dict(zip(unknown, lines, strict=True))
    return [known[step[1]] if step[0] == ".byte" else step for step in steps]


def sections(command: Sequence[str | Path], isa: str = "neon") -> tuple[list[Section], str]:
    """Run a program that brackets its sections by calls of mark(); return them and its output.

    The program is linked statically, because qemu names functions by its symbols. mark() has no
    branches, because qemu tells of each of its blocks. The CPU has no SVE, which glibc would use
    to copy.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        run = subprocess.run(
            [
                "qemu-aarch64",
                "-cpu",
                "max,sve=off,pauth=off",
                "-d",
                "in_asm,exec,nochain",
                "-D",
                log,
                *command,
            ],
            check=True,
            text=True,
            stdout=subprocess.PIPE,
            env=os.environ | {"SDPA_ISA": isa},
        )
        return parse(log.read_text()), run.stdout
