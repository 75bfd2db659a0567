"""Runs static analysers on the C sources: `make analyze`.

The analysers are GCC's -fanalyzer, clang --analyze (which scan-build runs), cppcheck and
clang-tidy; one that is missing is an error. GCC's does not terminate on the kernels; the others
read these as they are compiled for each instruction set and type of this architecture. Every
finding is fixed in the source or answered in tools/answers.toml; an answer without a finding is an
error.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy
from isas import kernels

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "analyze"
TOOLS = {
    "gcc": ("gcc",),
    "clang": ("clang-22", "clang"),
    "cppcheck": ("cppcheck",),
    "clang-tidy": ("clang-tidy", "clang-tidy-16"),
}
"""Their names as commands, the first that is installed counts."""
KERNEL = "src/kernels/kernel.c"
FLAGS = ["-std=gnu11", "-Wall", "-Wextra", "-pthread", "-fno-math-errno", "-fno-trapping-math"]
TIDY = (
    "-*,bugprone-*,cert-*,clang-analyzer-*,concurrency-*,"
    # Every signature has shapes and strides side by side; the binding has checked sizes.
    "-bugprone-easily-swappable-parameters,-bugprone-narrowing-conversions,"
    # Rules under a second name, and a rule against the names that C reserves.
    "-cert-dcl37-c,-cert-dcl51-cpp,-bugprone-reserved-identifier,"
    # Elements of arrays of pointers are counted and cleared here.
    "-bugprone-sizeof-expression,"
    # This rule wants memcpy_s and snprintf_s, which no C library here has.
    "-clang-analyzer-security.insecureAPI.DeprecatedOrUnsafeBufferHandling,"
    # Unused results are those of snprintf into buffers that are large enough, of fclose after
    # reading, and of fscanf, whose count is checked. The environment is read once, when the library
    # is loaded or first used.
    "-cert-err33-c,-cert-err34-c,-concurrency-mt-unsafe"
)


class Finding(NamedTuple):
    """A finding of a tool in a file."""

    tool: str
    file: str
    check: str
    line: int
    text: str

    @property
    def name(self) -> str:
        """What it is called in answers.toml: clang --analyze and clang-tidy run the same checks."""
        return f"{self.file}: {self.check.removeprefix('clang-analyzer-')}"


def sources() -> dict[str, list[str]]:
    """{source: the flags it needs}."""
    numpy_version = "NPY_2_0_API_VERSION"
    python = [
        *(f"-D{name}={numpy_version}" for name in ("NPY_NO_DEPRECATED_API", "NPY_TARGET_VERSION")),
        *("-DPy_LIMITED_API=0x030B0000", '-DSDPA_VERSION="0"', '-DSDPA_BUILD_FLAGS=""'),
        *(f"-I{BUILD}", "-isystem", sysconfig.get_path("include")),
        *("-isystem", numpy.get_include()),
    ]
    core = [*ROOT.glob("src/*.c"), *ROOT.glob("src/runtime/*.c")]
    found = {str(path.relative_to(ROOT)): [] for path in sorted(core)}
    return found | {str(p.relative_to(ROOT)): python for p in sorted(ROOT.glob("src/python/*.c"))}


def instructions(flags: list[str]) -> list[str]:
    """The macros that say what -march=... allows, for an analyser that does not know it."""
    macros = ["gcc", *(f for f in flags if f.startswith("-m")), "-dM", "-E", "-xc", os.devnull]
    said = subprocess.run(macros, text=True, capture_output=True, check=True).stdout
    return [f"-D{name}" for name in re.findall(r"^#define (__(?:AVX|FMA|F16C)\w*) 1$", said, re.M)]


def command_of(tool: str, source: str, flags: list[str]) -> list[str]:
    """The command with which `tool` reads `source`."""
    name = installed(tool)
    if tool == "cppcheck":
        own = [flag for flag in flags if flag.startswith(("-D", f"-I{BUILD}"))]
        checks = ["--enable=warning,performance,portability", "--library=posix", "--std=c11"]
        # Memory of tensors is addressed in bytes; the dtype beside it says what is read, and it is
        # aligned for that.
        checks += ["--suppress=invalidPointerCast", *instructions(flags)]
        return [name, "--quiet", "--template=gcc", *checks, *own, source]
    if tool == "clang-tidy":
        return [name, "--quiet", f"--checks={TIDY}", source, "--", *FLAGS, *flags]
    if tool == "clang":
        # No warnings of the compiler, which builds elsewhere.
        return [name, *FLAGS, *flags, "--analyze", "--analyzer-output", "text", "-w", source]
    return [name, *FLAGS, "-O2", "-fanalyzer", *flags, "-c", "-o", os.devnull, source]


def findings(tool: str, source: str, flags: list[str]) -> Iterator[Finding]:
    """The findings of one tool in one source, without those in other headers."""
    command = command_of(tool, source, flags)
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    said = done.stdout + done.stderr
    line = re.compile(
        r"^(\S+?):(\d+):\d+: (?:warning|error|portability|performance): (.*) \[(.*)\]$"
    )
    any_found = False
    for match in filter(None, map(line.match, said.splitlines())):
        file = os.path.relpath(ROOT / match[1], ROOT)
        any_found = True
        file = source if file.startswith("..") else file
        yield Finding(tool, file, match[4], int(match[2]), match[3])
    if done.returncode != 0 and not any_found:
        sys.exit(f"{' '.join(command)}\n{said}")


def make_docstrings() -> None:
    """Write the header that the build makes, which src/python/docstring.c includes."""
    BUILD.mkdir(parents=True, exist_ok=True)
    names = set()
    for path in ROOT.glob("src/python/doc/*.txt"):
        names |= set(re.findall(r"^== (\w+)$", path.read_text(), re.MULTILINE))
    lines = [f'static const char doc_{name}[] = "";\n' for name in sorted(names)]
    (BUILD / "docstrings.h").write_text("".join(lines))


def main() -> None:
    """Run all tools; print findings without an answer, and answers without a finding."""
    missing = [tool for tool in TOOLS if not installed(tool)]
    if missing:
        sys.exit(f"not installed: {', '.join(missing)}")
    make_docstrings()
    answers = tomllib.loads((ROOT / "tools" / "answers.toml").read_text())["answers"]
    answered = {name for findings in answers.values() for name in findings}
    isas = kernels(platform.machine()).values()
    readings = [*sources().items(), *((KERNEL, flags) for flags in isas)]
    tasks = [(t, *r) for t in TOOLS for r in readings if (t, r[0]) != ("gcc", KERNEL)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = {
            f for result in pool.map(lambda task: list(findings(*task)), tasks) for f in result
        }

    open_ones = sorted(finding for finding in found if finding.name not in answered)
    idle = sorted(answered - {finding.name for finding in found})
    for finding in open_ones:
        print(f"{finding.file}:{finding.line}: {finding.text} [{finding.check}] ({finding.tool})")
    for name in idle:
        print(f"no such finding any more: {name}")
    print(
        f"{len(tasks)} readings by {', '.join(map(version, TOOLS))}, of the kernels those for"
        f" {platform.machine()}, which gcc does not read;"
    )
    print(f"{len(found)} findings, {len(open_ones)} open")
    sys.exit(bool(open_ones or idle))


def installed(tool: str) -> str:
    """The command of a tool; empty where it is not installed."""
    return next(filter(None, map(shutil.which, TOOLS[tool])), "")


def version(tool: str) -> str:
    """The name of a tool and its version."""
    said = subprocess.run([installed(tool), "--version"], text=True, capture_output=True).stdout
    return f"{tool} {re.search(r'[0-9]+[.][0-9.]*[0-9]', said)[0]}"


if __name__ == "__main__":
    main()
