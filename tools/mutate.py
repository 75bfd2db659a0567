"""Mutation testing: `make mutation`.

A mutant is the project with one token changed or one statement dropped. The tests must fail on it:
those of tests/c first, where its file is C, then those that tools/mutants.toml names for the file.
A survivor that makes no difference to a result or a bound has its reason there too; any other is an
error. Of the kernels, those for AVX2 in float32 are mutated, for vec_plain.h the generic ones.

Mutants are drawn by a seed, are the same whatever else changes in their file, and are judged once:
verdicts are kept in build/mutate, and a run goes on where the last one stopped.
"""

import argparse
import ast
import contextlib
import hashlib
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import analyze
import hypothesis  # noqa: F401 - ready for the tests, which run in forks
import ml_dtypes  # noqa: F401
import numpy.testing  # noqa: F401
import pytest
from mutants import Mutant, is_listed, mutants_of

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "mutate"
CPU_SECONDS, WALL_SECONDS = 120, 300
CONFIG = tomllib.loads((ROOT / "tools" / "mutants.toml").read_text(encoding="utf-8"))
ANSWERS = [re.compile(part) for parts in CONFIG["answers"].values() for part in parts]


def limit() -> None:
    """Bound the time of this process, whose share of a busy machine is smaller."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    share = max(1, os.getloadavg()[0] / (os.cpu_count() or 1))
    signal.alarm(int(WALL_SECONDS * share))  # kept by exec


def run(
    command: list[str], folder: Path, wanted: Callable[[str], bool], env: dict[str, str]
) -> bool:
    """Whether a command ends well; it is ended at its first line that is not wanted."""
    process = subprocess.Popen(
        command, cwd=folder, env=os.environ | env, text=True, errors="replace", preexec_fn=limit,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    good = all(wanted(line) for line in process.stdout)
    if not good:
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait() == 0 and good


def sync(tree: Path) -> None:
    """Copy what the tests need into a separate tree, which is mutated."""
    names = [
        "src",
        "sdpa",
        "sdpa_lab",
        "tests",
        "benchmarks",
        "tools",
        "docs",
        "pyproject.toml",
        "setup.py",
    ]
    done = subprocess.run(["git", "ls-files", *names], cwd=ROOT, capture_output=True, text=True)
    others = [str(path.relative_to(ROOT)) for path in (ROOT / "sdpa").glob("_core*.so")]
    if not others:
        sys.exit("sdpa: expected a compiled extension in this folder, got none; make build")
    for name in done.stdout.splitlines() + others:
        source, copy = ROOT / name, tree / name
        if source.is_file() and not (copy.exists() and copy.read_bytes() == source.read_bytes()):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)


def make_docstrings() -> Path:
    """Write the sources that the build makes, the header where `analyze` says that it lies."""
    wanted = ("quoted", "docstrings", "write_docstrings")
    setup = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    setup.body = [n for n in setup.body if isinstance(n, ast.FunctionDef) and n.name in wanted]
    found: dict[str, Any] = {"re": re, "Path": Path}
    exec(compile(setup, "setup.py", "exec"), found)
    analyze.BUILD.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(ROOT):
        made: Path = found["write_docstrings"](analyze.BUILD)
    return made


class Core:
    """The C core in the tree, of which a mutant compiles anew what depends on its file."""

    flags = "-O1 -fPIC -DTIME_LIMIT=60"

    def __init__(self, work: Path) -> None:
        tree = work / "tree"
        self.work, self.folder, self.out = work, tree / "tests" / "c", work / "c"
        make = ["make", "-s", "-C", str(self.folder), f"BUILD={self.out}", f"FLAGS={self.flags}"]
        make += [f"-j{os.cpu_count()}", "VECTORS=avx2_f32 generic_f32", "STRIDE=40001"]
        subprocess.run(make, check=True)
        listed = subprocess.run([*make, "-n", "-B"], capture_output=True, text=True, check=True)
        self.commands = {}
        for line in listed.stdout.splitlines():
            if match := re.search(r" -c -o (\S+) ", line):
                self.commands[Path(match[1])] = line
        python = shlex.join(analyze.sources()["src/python/call.c"])
        binding = f"{self.flags} -std=gnu11 -pthread {python}"
        made = make_docstrings()
        newest = max(path.stat().st_mtime for path in tree.glob("src/**/*.*"))
        for path in [*sorted(tree.glob("src/python/*.c")), made]:
            name = self.out / "python" / f"{path.stem}.o"
            name.parent.mkdir(exist_ok=True)
            self.commands[name] = f"gcc -MMD {binding} -c -o {name} {path}"
            if not name.exists() or name.stat().st_mtime < newest:
                subprocess.run(self.commands[name], cwd=self.folder, shell=True, check=True)

    def depending(self, file: str) -> list[Path]:
        """The objects to compile for a mutant of this file."""
        plain = Path(file).name in ("vec_generic.h", "vec_plain.h")
        kernel = f"{'generic' if plain else 'avx2'}_f32"
        found = []
        for path in self.commands:
            depends = is_listed(file, path.with_suffix(".d").read_text())
            if depends and (path.parent.name != "kernels" or path.stem == kernel):
                found.append(path)
        return found

    def judge(self, file: str, tests: dict[str, list[str]]) -> str:
        """The verdict on the tree, in which this file is a mutant."""
        changed = {}
        for path in self.depending(file):
            new = self.work / "new" / path.relative_to(self.out)
            new.parent.mkdir(parents=True, exist_ok=True)
            command = self.commands[path].replace("-Werror", "-w").replace(str(path), str(new))
            if subprocess.run(command, cwd=self.folder, shell=True, capture_output=True).returncode:
                return "does not compile"
            if new.read_bytes() != path.read_bytes():
                changed[path] = new
        return self.tried(changed, tests) if changed else "same code"

    def tried(self, changed: dict[Path, Path], tests: dict[str, list[str]]) -> str:
        """The verdict on the core with these objects in the place of others."""
        objects = [str(changed.get(path, path)) for path in self.commands]
        driver = [o for o in objects if "/python/" not in o]
        subprocess.run(["gcc", "-pthread", "-o", self.work / "driver", *driver, "-lm"], check=True)
        failed = re.compile(r"\S+\.[ch]:\d+: ")
        isa = "generic" if any(path.stem == "generic_f32" for path in changed) else "avx2"
        env = {"SDPA_ISA": isa}
        for name in tests["c"]:
            command = [str(self.work / "driver"), name]
            if not run(command, self.folder, lambda line: not failed.match(line), env):
                return f"killed by tests/c {name}"
        extension = [o for o in objects if "/c/test/" not in o and "/new/test/" not in o]
        library = next(self.work.glob("tree/sdpa/_core*.so"))
        subprocess.run(["gcc", "-pthread", "-shared", "-o", library, *extension, "-lm"], check=True)
        # Only a whole build knows its version and flags.
        return suite(self.work, tests["python"], isa, " and not f64 and not show_config")


def suite(work: Path, tests: list[str], isa: str = "avx2", further: str = "") -> str:
    """The verdict of these tests on the tree: they run in a fork, which has pytest ready.

    Only the tests for one ISA, which those that name none take as well; none of seconds, which fail
    on a busy machine.
    """
    others = {"generic", "avx2", "avx512"} - {isa} | {"within_a_second"}
    selected = " and ".join(f"not {other}" for other in sorted(others)) + further
    if not tests:
        return "survived"
    said = work / "pytest.txt"
    said.unlink(missing_ok=True)  # of a run that was ended
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        limit()
        for stream in (1, 2):
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        os.chdir(work / "tree")
        os.environ["SDPA_ISA"] = isa
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(work / "tree"))
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=line"]
        options += ["-W", "ignore:Module already imported", "-k", selected]
        os._exit(pytest.main([*options, *tests]))
    good = os.waitpid(pid, 0)[1] == 0
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what the tests started
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said.read_text(errors="replace"), re.MULTILINE)
    said.unlink()
    return "survived" if good else f"killed by {failed[1] if failed else 'an end of the process'}"


def tests_for(file: str) -> dict[str, list[str]]:
    """The tests for a file, by the last pattern that its path begins with."""
    names = [names for pattern, names in CONFIG["tests"].items() if re.match(pattern, file)][-1]
    return {
        "c": [name.removeprefix("c ") for name in names if name.startswith("c ")],
        "python": [name for name in names if not name.startswith("c ")],
    }


def is_answered(mutant: Mutant) -> bool:
    """Whether mutants.toml says why the mutant may live."""
    return any(answer.search(mutant.change) for answer in ANSWERS)


def report(record: dict[str, str], drawn: list[Mutant]) -> int:
    """Print the score of each file and the survivors without an answer; return their number."""
    rows: dict[str, list[int]] = {}
    open_ones = []
    for mutant in drawn:
        verdict = record.get(mutant.name)
        if verdict in (None, "does not compile"):
            continue
        row = rows.setdefault(mutant.file, [0, 0, 0, 0])
        survived = 3 - is_answered(mutant)
        kind = 0 if verdict.startswith("killed") else 1 if verdict == "same code" else survived
        row[kind] += 1
        if kind == 3:
            open_ones.append(mutant)
    total = [sum(column) for column in zip(*rows.values(), strict=True)]
    print(f"{'file':36} killed  same code  explained  open")
    for file, row in [*sorted(rows.items()), ("all", total)]:
        print(f"{file:36} {row[0]:6} {row[1]:10} {row[2]:10} {row[3]:5}")
    for mutant in open_ones:
        print(f"{mutant.file}:{mutant.line}: {mutant.was}  ->  {mutant.now}")
    return len(open_ones)


def chosen(options: argparse.Namespace) -> list[Mutant]:
    """As many mutants of each file as are wanted, in an order that the seed alone decides."""
    patterns = options.files or CONFIG["files"][options.group]
    files = sorted({str(p.relative_to(ROOT)) for pattern in patterns for p in ROOT.glob(pattern)})

    def order(mutant: Mutant) -> bytes:
        return hashlib.sha256(f"{options.seed} {mutant.name}".encode()).digest()

    drawn = []
    for file in files:
        if options.files or not file.startswith(tuple(CONFIG["left_out"])):
            drawn += sorted(mutants_of(file), key=order)[: options.mutants]
    return sorted(drawn, key=order)


def without_mutant(
    work: Path, core: Core | None, record: dict[str, str], drawn: list[Mutant]
) -> str | None:
    """How tests that no mutant has survived fail on the project itself, if they do."""
    judged = [m for m in drawn if m.name in record]
    passed = [tests_for(m.file) for m in judged if record[m.name] == "survived"]
    for mutant in judged:
        tests = tests_for(mutant.file)
        if tests not in passed:
            passed.append(tests)
            verdict = core.tried({}, tests) if core else suite(work, tests["python"])
            if verdict != "survived":
                return f"{mutant.file}, {verdict}"
    return None


@contextlib.contextmanager
def mutated(tree: Path, mutant: Mutant) -> Iterator[None]:
    """The tree holds the mutant, afterwards the file as it was, its age too, for make."""
    path = tree / mutant.file
    source, times = path.read_text(encoding="utf-8"), path.stat()
    path.write_text(source[: mutant.start] + mutant.new + source[mutant.end :], encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(source, encoding="utf-8")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def main() -> None:
    """Judge mutants until there is no more time, and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("group", choices=CONFIG["files"])
    parser.add_argument("--mutants", type=int, default=5, help="of each file")
    parser.add_argument("--seconds", type=float, default=3600, help="0: report alone")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--again", action="store_true", help="judge open survivors once more")
    parser.add_argument("files", nargs="*", help="by default, those that mutants.toml names")
    options = parser.parse_intermixed_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    work = WORK / options.group
    work.mkdir(parents=True, exist_ok=True)
    path = work / "record.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    drawn = chosen(options)

    def is_left(mutant: Mutant) -> bool:
        verdict = record.get(mutant.name)
        once_more = options.again and verdict == "survived" and not is_answered(mutant)
        return options.seconds > 0 and (verdict is None or once_more)

    left = sorted(filter(is_left, drawn), key=is_answered)  # those that may be open first
    core = None
    if left:
        sync(work / "tree")
        core = Core(work) if options.group != "python" else None
    end = time.monotonic() + options.seconds
    for mutant in left:
        if time.monotonic() > end:
            break
        tests = tests_for(mutant.file)
        with mutated(work / "tree", mutant):
            verdict = core.judge(mutant.file, tests) if core else suite(work, tests["python"])
        print(f"{verdict}: {mutant.name}", flush=True)
        record[mutant.name] = verdict
        path.write_text(json.dumps(record, indent=0, ensure_ascii=False))
    if left and (broken := without_mutant(work, core, record, drawn)):
        sys.exit(f"the tests must pass without a mutant: {broken}")
    sys.exit(report(record, drawn) > 0)


if __name__ == "__main__":
    main()
