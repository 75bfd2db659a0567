"""Instructions of a fixed set of calls, compared with those on record: a guard that needs no clock.

    python -m benchmarks.counts             compare, on every instruction set of this machine
    python -m benchmarks.counts --renew     write what is counted here to counts.json
    python -m benchmarks.counts --renew --keep      and keep what cannot be counted here
    python -m benchmarks.counts --renew --keep --changed softmax        except this work
    python -m benchmarks.counts --emulate           count AVX-512 in Bochs where it is missing

NEON's are counted under qemu where there are qemu and the same compiler for aarch64, which
`make test-arm` installs.

Counts depend on the compiler, so those on record name theirs, and another one is refused. After a
change of all kernels, counts of instruction sets that this machine lacks would be wrong: --renew
drops them, unless --emulate counts them. Use --keep if the change does not concern them, and
--changed for works it does concern: null takes their place, and a machine that has the instruction
set says that they are to be renewed.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import sdpa
from benchmarks import qemu

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_name("counts.json")
BUILD = ROOT / "build/c/counts"
TOLERANCE = 0.03
"""Of a count: no speed that anybody notices is hidden in less."""

FEW = {"generic": ("forward", "backward", "softmax"), "neonbf16": ("forward bfloat16",)}
"""The works counted where not all are: plain kernels take ten times the steps, 20 us each, and
products of bfloat16 serve one."""

# glibc copies and clears with AVX-512 where the processor has it, in half as many instructions; and
# with repeated string instructions, which count once per byte, from some size on, which depends on
# the processor. The same copies everywhere:
SAME_COPIES = ":".join(
    (
        "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW",
        "glibc.cpu.x86_rep_stosb_threshold=1000000000",
        "glibc.cpu.x86_rep_movsb_threshold=1000000000",
    )
)

Counts = dict[str, int]
Recorded = dict[str, int | None]
"""None: the code has changed since, on a machine without the instruction set."""


def compiler(command: str = "gcc") -> str:
    """Its version, which the record is for."""
    found = subprocess.run(
        [command, "-dumpfullversion"], check=True, text=True, capture_output=True
    )
    return f"gcc {found.stdout.strip()}"


def build(folder: Path, *flags: str, compiler: str = "gcc") -> None:
    """The program counts.c in `folder`, with the kernels as in the extension."""
    target = f"../../{folder.relative_to(ROOT)}"
    command = ["make", "-C", "tests/c", f"-j{os.cpu_count()}", f"CC={compiler}", f"BUILD={target}"]
    command += [f"FLAGS={' '.join(['-O2', '-USDPA_ASSERT', *flags])}", f"{target}/counts"]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def count(isa: str, command: Sequence[str | Path] = (BUILD / "counts",)) -> Counts:
    """The instructions of every work on the kernels of `isa`."""
    env = os.environ | {"SDPA_ISA": isa, "GLIBC_TUNABLES": SAME_COPIES}
    run = subprocess.run(
        [*command, *FEW.get(isa, ())], check=True, text=True, stdout=subprocess.PIPE, env=env
    )
    lines = re.findall(r"^(.+): (\d+)$", run.stdout, re.MULTILINE)
    return {name: int(n) for name, n in lines}


def count_emulated() -> Counts:
    """Those of AVX-512, of which an emulator with its own Linux takes a quarter of an hour."""
    folder = ROOT / "build/c/counts-static"
    build(folder, "-static")
    return count("avx512", [ROOT / "tests/c/emulate.sh", "avx512", folder, "counts"])


def can_count_neon() -> bool:
    """Whether there are qemu and the same compiler for aarch64, as after `make test-arm`."""
    tools = shutil.which("qemu-aarch64") and shutil.which(qemu.COMPILER)
    return bool(tools) and compiler(qemu.COMPILER) == compiler()


def count_neon() -> dict[str, Counts]:
    """Those of NEON without and with products of bfloat16, under qemu."""
    folder = ROOT / "build/c/counts-aarch64"
    build(folder, "-static", compiler=qemu.COMPILER)
    counts = {}
    for isa in ("neon", "neonbf16"):
        command = [folder / "counts", "marks", *FEW.get(isa, ())]
        found, names = qemu.sections(command, isa)
        counts[isa] = {
            name: section.executed()
            for name, section in zip(names.splitlines(), found, strict=True)
        }
    return counts


def unknown(found: dict[str, Counts], recorded: dict[str, Recorded]) -> Iterator[str]:
    """What was counted here and is not on record, which is no error."""
    for isa in found:
        if isa not in recorded:
            yield isa
        else:
            yield from (f"{isa} {name}" for name, n in recorded[isa].items() if n is None)


def differences(found: dict[str, Counts], recorded: dict[str, Recorded]) -> Iterator[str]:
    """Lines on counts that are not within TOLERANCE of those on record, or missing on one side."""
    for isa in found.keys() & recorded.keys():
        to_renew = {name for name, n in recorded[isa].items() if n is None}
        for name in sorted((found[isa].keys() | recorded[isa].keys()) - to_renew):
            here, there = found[isa].get(name), recorded[isa].get(name)
            if here is None or there is None:
                yield f"{isa} {name}: {there} on record, {here} here"
            elif abs(here / there - 1) > TOLERANCE:
                change = 100 * (here / there - 1)
                yield f"{isa} {name}: {there} on record, {here} here, {change:+.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.counts", description=__doc__)
    parser.add_argument("--renew", action="store_true", help="write counts.json")
    parser.add_argument("--keep", action="store_true", help="keep instruction sets not found here")
    parser.add_argument(
        "--changed", nargs="+", default=[], metavar="WORK", help="with --keep: except these"
    )
    parser.add_argument("--emulate", action="store_true", help="AVX-512 on any machine")
    options = parser.parse_args()
    if options.changed and not (options.renew and options.keep):
        parser.error("--changed: needs --renew and --keep")
    record = json.loads(RECORD.read_text())
    works = {name for counts in record["counts"].values() for name in counts}
    if other := set(options.changed) - works:
        parser.error(f"--changed: expected some of {sorted(works)}, got {sorted(other)}")
    same = record["compiler"] == compiler()
    if not same and (options.keep or not options.renew):
        sys.exit(f"counts.json is for {record['compiler']}, this is {compiler()}: --renew alone")
    build(BUILD)
    isas = sdpa.show_config("dicts")["isas_available"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip(isas, pool.map(count, isas), strict=True))
    if options.emulate and "avx512" not in found:
        found["avx512"] = count_emulated()
    if "neon" not in found and can_count_neon():
        found |= count_neon()
    wrong = list(differences(found, record["counts"]))
    if not options.renew:
        for name in unknown(found, record["counts"]):
            print(f"{name}: not on record, --renew")
    for line in wrong:
        print(line)
    print(f"{sum(map(len, found.values()))} counts, {len(wrong)} differ")
    if options.renew:
        kept = record["counts"] if options.keep else {}
        for counts in kept.values():
            counts |= {name: None for name in options.changed if name in counts}
        new = {"compiler": compiler(), "counts": kept | found}
        RECORD.write_text(json.dumps(new, indent=1, sort_keys=True) + "\n")
    elif wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
