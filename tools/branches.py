"""Which lines and branches of the C sources no test reaches: `make coverage`.

A branch is one outcome of a condition as it is written, whatever copies compilers make of it. The
kernels are compiled once for each instruction set and type, and a header is part of many objects: a
branch counts as taken where any of them takes it. Each branch never taken has its reason in
tools/branches.toml, by a pattern of its file and one of its condition; a pattern without a branch
is an error. With `varies` in it, a reason holds for some runs or machines alone.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import sdpa

ROOT = Path(__file__).parents[1]
BRANCH = re.compile(r"^ *\|  Branch \((\d+):(\d+)\): \[(.*)\]$")
LINE = re.compile(r"^ *(\d+)\| *([\d.]+[kMGTPEZY]?)\|")
TOKEN = re.compile(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|/\*.*?\*/|&&|\|\||.", re.DOTALL)
ENDS = (")", "]", "}", ";", ",", "?", ":", "&&", "||")


class Branch(NamedTuple):
    """One outcome of the condition that starts at this place."""

    file: str
    line: int
    column: int
    outcome: str
    """true or false"""


class Counts:
    """Whether each line and branch of the sources was reached, in any object."""

    def __init__(self) -> None:
        self.lines: dict[tuple[str, int], bool] = {}
        self.branches: dict[Branch, bool] = {}

    def add(self, listing: str) -> None:
        """Add what `llvm-cov show` says of one object.

        An outcome that is known when the object is compiled has no count, and does not count.
        """
        file, sources = "", f"{ROOT}/src/"
        for text in listing.splitlines():
            if text.startswith("/") and text.endswith(":"):
                file = text[len(f"{ROOT}/") : -1] if text.startswith(sources) else ""
            elif file and (match := BRANCH.match(text)):
                line, column = int(match[1]), int(match[2])
                for outcome, count in re.findall(r"(True|False): (\S+?)(?:,|$)", match[3]):
                    branch = Branch(file, line, column, outcome.lower())
                    if not any(a <= (line, column) < b for a, b in assertions(file)):
                        self.branches[branch] = self.branches.get(branch, False) or count != "0"
            elif file and (match := LINE.match(text)):
                place = file, int(match[1])
                self.lines[place] = self.lines.get(place, False) or match[2] != "0"

    def missed(self) -> list[Branch]:
        """The branches that no object takes."""
        return sorted(branch for branch, taken in self.branches.items() if not taken)


@cache
def source(file: str) -> str:
    """The text of a file."""
    return (ROOT / file).read_text(encoding="utf-8")


def end_of(text: str, start: int, ends: tuple[str, ...]) -> int:
    """Where the first of the tokens `ends` begins, outside of parentheses opened since `start`."""
    depth = 0
    for match in TOKEN.finditer(text, start):
        if depth == 0 and match[0] in ends:
            return match.start()
        depth += (match[0] in "([{") - (match[0] in ")]}")
    return len(text)


@cache
def assertions(file: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """(line, column) of the start and the end of each assertion, which only debug builds have."""
    text = source(file)

    def place(at: int) -> tuple[int, int]:
        return text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)

    starts = [match.end() for match in re.finditer(r"\bassert\(", text)]
    return [(place(start), place(end_of(text, start, (")",)))) for start in starts]


def name_of(branch: Branch) -> str:
    """What a branch is called: its outcome and its condition, as far as its line goes."""
    text = source(branch.file)
    lines = text.splitlines(keepends=True)
    start = sum(map(len, lines[: branch.line - 1])) + branch.column - 1
    condition = text[start : end_of(text, start, ENDS)].partition("\n")[0].rstrip()
    return f"{branch.outcome}: {condition}"


def listings(profile: str, objects: list[str], llvm_cov: str) -> Iterator[str]:
    """What llvm-cov says of the sources of each object that this machine can run.

    Objects are asked for one by one: of functions that have one name in several objects, as those
    of the kernels have, llvm-cov would list one.
    """
    config = sdpa.show_config(mode="dicts")
    idle = sorted({*config["isas_built"]} - {*config["isas_available"]})
    print("left out, because this machine cannot run them:", ", ".join(idle) or "none")
    for name in objects:
        if any(re.search(rf"\b{isa}_f\d\d\b", name) for isa in idle):
            continue
        # Only listings in files say which source each of them is of.
        with tempfile.TemporaryDirectory() as folder:
            command = [llvm_cov, "show", name, f"--instr-profile={profile}"]
            command += ["--show-branches=count", f"--output-dir={folder}"]
            done = subprocess.run(command, text=True, capture_output=True)
            if done.returncode != 0:
                sys.exit(f"{' '.join(command)}\n{done.stderr}")
            for path in sorted(Path(folder).glob("coverage/**/*.txt")):
                yield path.read_text(encoding="utf-8")


def table(counts: Counts) -> None:
    """Print the lines and branches reached in each file."""
    print(f"{'':<32} {'lines':>10} {'branches':>10}  lines not reached")
    for file in sorted({file for file, _ in counts.lines}):
        lines = {line: hit for (name, line), hit in sorted(counts.lines.items()) if name == file}
        taken = [hit for branch, hit in counts.branches.items() if branch.file == file]
        missed = " ".join(str(line) for line, hit in lines.items() if not hit)
        numbers = [f"{sum(hits)}/{len(hits)}" for hits in ([*lines.values()], taken)]
        print(f"{file:<32} {numbers[0]:>10} {numbers[1]:>10}  {missed}".rstrip())


class Pattern(NamedTuple):
    """Branches that one reason is for."""

    file: str
    name: str
    varies: bool
    why: str

    def fits(self, branch: Branch) -> bool:
        """Whether it is for this branch."""
        return bool(
            re.fullmatch(self.file, branch.file) and re.fullmatch(self.name, name_of(branch))
        )


def patterns(reasons: list[dict[str, Any]]) -> list[Pattern]:
    """The patterns of branches.toml, in their order."""
    return [
        Pattern(file, name, reason.get("varies", False), reason["why"].strip())
        for reason in reasons
        for file, names in reason["branches"].items()
        for name in names
    ]


def compare(missed: list[Branch], known: list[Pattern]) -> int:
    """Print branches without a reason and patterns without a branch; return how many there are."""
    unexplained = [b for b in missed if not any(pattern.fits(b) for pattern in known)]
    idle = [p for p in known if not p.varies and not any(map(p.fits, missed))]
    for branch in unexplained:
        print(f"no reason: {branch.file}:{branch.line}: {name_of(branch)}")
    for pattern in idle:
        print(f"no such branch: {pattern.file}: {pattern.name}")
    return len(unexplained) + len(idle)


def explained(missed: list[Branch], known: list[Pattern]) -> Counter[str]:
    """How many branches each reason is for, the first of those that fit."""
    found = (next((p.why for p in known if p.fits(branch)), "") for branch in missed)
    return Counter(filter(None, found))


def percent(hits: list[bool]) -> str:
    """How many of these were reached."""
    return f"{sum(hits)} of {len(hits)}, {100 * sum(hits) / len(hits):.1f} %"


def main() -> None:
    """Fold the counts of all objects; say what no test reaches."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llvm-cov", default="llvm-cov")
    parser.add_argument("profile", help="of llvm-profdata merge")
    parser.add_argument("objects", nargs="+")
    args = parser.parse_args()
    counts = Counts()
    for listing in listings(args.profile, args.objects, args.llvm_cov):
        counts.add(listing)
    table(counts)
    known = patterns(tomllib.loads(source("tools/branches.toml"))["reason"])
    for why, n in explained(counts.missed(), known).most_common():
        print(f"{n:>4}  {why}")
    wrong = compare(counts.missed(), known)
    print(f"lines of C: {percent([*counts.lines.values()])}")
    print(f"branches of C: {percent([*counts.branches.values()])}")
    print(
        f"{len(counts.missed())} branches were never taken; {wrong} reasons or branches are missing"
    )
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
