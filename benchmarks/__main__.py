"""Speed and memory of sdpa beside its peers and beside what the machine can do.

Every contender in turn on the same data, the shortest call of each; FLOPs are those of the formula.
One process for each number of threads, which may use that many CPUs and no more, whatever a library
thinks of its settings. Peers that are not installed are left out by name.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import machine

GROUPS = [
    *("forward", "backward", "both", "causal", "dtypes", "threads", "small", "short", "decode"),
    *(
        "softmax",
        "options",
        "window",
        "derived",
        "received",
        "packed",
        "variants",
        "additive",
        "bridge",
    ),
    *("after", "calls", "jax", "onnx", "sweep", "growth", "long", "masks", "programs", "import"),
    "memory",
]


def main() -> None:
    options = _parse()
    if options.worker:
        _work(options)
        return
    paths = options.show
    with tempfile.TemporaryDirectory() as folder:
        if not paths:
            paths = [options.json or Path(folder) / "results.json"]
            runs = [_run(options, threads, Path(folder)) for threads in options.threads]
            paths[0].parent.mkdir(parents=True, exist_ok=True)
            paths[0].write_text(json.dumps(runs, indent=1), encoding="utf-8")
        from benchmarks import report, results

        found = results.load(paths)
        apart = [results.load([path]) for path in paths]
    print(report.text(found, apart))
    if options.page:
        report.write_page(options.page, found, apart)
    if options.plots:
        from benchmarks import plots

        options.plots.mkdir(parents=True, exist_ok=True)
        for path in plots.write(found, options.plots):
            print(f"wrote {path}")


def _parse() -> argparse.Namespace:
    first, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=first, epilog=rest)
    parser.add_argument("--only", nargs="+", choices=GROUPS, metavar="GROUP", default=GROUPS)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--quick", action="store_true", help="small problems, one round")
    parser.add_argument("--passes", type=int, help="how often to go through all (default 3)")
    parser.add_argument("--seconds", type=float, help="for each line in each pass (default 1)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write SVG and PNG there")
    parser.add_argument("--page", type=Path, metavar="FILE.md", help="write the tables there")
    parser.add_argument(
        "--show", nargs="+", type=Path, metavar="JSON", help="measure nothing; each file is a run"
    )
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.threads) < 1:
        parser.error(f"--threads: expected at least 1, got {min(options.threads)}")
    return options


def _run(options: argparse.Namespace, threads: int, folder: Path) -> dict[str, Any]:
    """One process with so many threads."""
    path = folder / f"{threads}.json"
    command = [sys.executable, "-m", "benchmarks", "--worker", str(path)]
    command += ["--threads", str(threads), "--only", *options.only]
    command += ["--quick"] * options.quick
    for name in ("passes", "seconds"):
        if getattr(options, name) is not None:
            command += [f"--{name}", str(getattr(options, name))]
    limits = {f"{who}_NUM_THREADS": str(threads) for who in ("OMP", "OPENBLAS", "MKL", "SDPA")}
    environment = os.environ | limits | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
    subprocess.run(command, check=True, cwd=machine.ROOT, env=environment)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _work(options: argparse.Namespace) -> None:
    """What the process of one number of threads does; the affinity comes before the imports."""
    (threads,) = options.threads
    chosen = machine.cores(threads)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, chosen)

    import sdpa
    import sdpa_lab as lab
    from benchmarks import contenders, memory, peers, timing, works

    sdpa.set_num_threads(threads)
    effort = timing.QUICK if options.quick else timing.FULL
    if options.seconds is not None:
        effort = effort._replace(seconds=options.seconds)
    if options.passes is not None:
        effort = effort._replace(passes=options.passes)
    found, missing = peers.find(threads)
    setting = contenders.Setting(threads, found, options.quick)
    peak = machine.Peak()
    peak.measure()
    run: dict[str, Any] = {
        "threads": threads,
        "isa": sdpa.show_config("dicts")["isa"],
        "quick": options.quick,
        "date": time.strftime("%Y-%m-%d"),
        "machine": lab.machine(),
        "cpu": machine.cpu(),
        "peers": {peer.name: peer.version for peer in found},
        "missing": missing,
        "records": [],
    }
    todo = works.works(setting, set(options.only))
    for work in todo * effort.passes:
        contenders = work.build()
        calls = {name: each.call for name, each in contenders.items()}
        within = {name: each.within for name, each in contenders.items()}
        before = {name: each.before for name, each in contenders.items() if each.before}
        rounds = timing.race(calls, effort, within, before)
        record = {
            name: {
                "rounds": rounds[name],
                "flops": each.flops,
                "bytes": each.bytes,
            }
            for name, each in contenders.items()
        }
        if not options.quick:  # whose figures mean nothing
            peak.measure()
        run["records"].append(
            {
                "group": work.group,
                "name": work.name,
                "contenders": record,
                "peak": peak.best(latest=2),
            }
        )
        shortest = "  ".join(f"{name} {1e6 * min(times):.4g}" for name, times in rounds.items())
        print(f"{threads} threads, {work.group} {work.name}, us: {shortest}", file=sys.stderr)
    if threads == 1 and "import" in options.only:
        run["import"] = machine.import_seconds(1 if options.quick else 20)
    if threads == 1 and "memory" in options.only:
        capable = ["sdpa", *(peer.name for peer in found)]
        lengths = memory.QUICK_LENGTHS if options.quick else memory.LENGTHS
        run["memory"] = memory.over_length(capable, lengths)
    run["peak"] = peak.best()
    options.worker.write_text(json.dumps(run), encoding="utf-8")


if __name__ == "__main__":
    main()
