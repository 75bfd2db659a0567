"""Attention beyond memory: files beside memory, two workers beside one, a model of many.

python -m benchmarks.beyond files      [--tokens 262144]   from Zarr, beside the same in memory
python -m benchmarks.beyond scaling    [--tokens 65536]    one worker, two, the model's constants
python -m benchmarks.beyond plot                           the model, drawn with those constants
python -m benchmarks.beyond picture                        Dask's dashboard while a job runs

Figures and pictures go to docs/beyond_memory and into its page, or to the folder after --save.
Needs pip install '.[dask]'; plot also '.[lab]', picture '.[browser]', bokeh, chromium.
"""

import argparse
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

import sdpa
from benchmarks.machine import ROOT
from benchmarks.pictures import example
from sdpa import blocks
from sdpa_lab import style
from sdpa_lab.tools.progress import progress

FOLDER = ROOT / "docs" / "beyond_memory"
PAGE = ROOT / "docs" / "beyond_memory.md"
D = 64
UNITS = {
    "flops": "FLOP/s of a worker",
    "bandwidth": "bytes/s",
    "task": "s of the scheduler",
    "one worker": "s",
    "two workers": "s",
    "CPU of one": "s",
    "CPU of the busier of two": "s",
    "model, one": "s",
    "model, two": "s",
    "load": "processes that wanted one of the CPUs, one minute's mean",
}

# ------------------------------------------------------------------------------- the model


@dataclass(frozen=True)
class Constants:
    """What the time of a run is made of, as `scaling` measures it."""

    flops: float
    """A worker's, a second, on one thread."""
    bandwidth: float
    """Of the store, in bytes a second, all workers together."""
    task: float
    """Seconds of the scheduler per task."""


@dataclass(frozen=True)
class Run:
    """Causal attention of some heads of 64 in float32, tasks of `rows` queries."""

    tokens: int
    heads: int
    rows: int

    @property
    def tasks(self) -> float:
        return self.tokens / self.rows

    @property
    def flops(self) -> float:
        """Two products of 2 D operations for each of the visible pairs, half of all."""
        return 4 * D * self.heads * self.tokens**2 / 2

    @property
    def bytes(self) -> float:
        """A task reads the keys and values up to its last query; query and result move once."""
        row = 4 * D * self.heads
        return 2 * row * self.tasks * (self.tokens + self.rows) / 2 + 2 * row * self.tokens

    def seconds(self, constants: Constants, workers: float) -> dict[str, float]:
        """Time by each of the limits; tasks run in rounds of as many as there are workers."""
        longest = 4 * D * self.heads * self.tokens * self.rows
        return {
            "compute": max(self.flops / workers, longest) / constants.flops,
            "storage": self.bytes / constants.bandwidth,
            "scheduler": self.tasks * constants.task,
        }

    def total(self, constants: Constants, workers: float) -> float:
        """Workers read while they compute, so the slower counts; the scheduler comes on top."""
        parts = self.seconds(constants, workers)
        return max(parts["compute"], parts["storage"]) + parts["scheduler"]


# ------------------------------------------------------------------------------- measuring


def seconds_of(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def files(tokens: int, repeats: int) -> dict[str, Any]:
    """The work of examples/long_context.py from Zarr and in memory, block of queries by block.

    Both take turns on the same queries, and the shortest of each counts, because the machine may
    have other work.
    """
    long_context = example("long_context")
    spent = {"files": 0.0, "memory": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        stores = long_context.written(Path(folder), tokens)
        query, key, value = (stores[name][...] for name in ("query", "key", "value"))
        parts = [slice(i, i + long_context.ROWS) for i in range(0, tokens, long_context.ROWS)]
        with progress("files and memory", len(parts)) as move:
            for rows in parts:
                seen = slice(0, rows.stop)
                turns: dict[str, Callable[[], Any]] = {
                    "files": lambda rows=rows: blocks.attend(
                        stores["query"], stores["key"], stores["value"],
                        rows=rows, block=long_context.BLOCK, is_causal=True,
                    ),
                    "memory": lambda rows=rows, seen=seen: sdpa.attention(
                        query[rows], key[seen], value[seen],
                        is_causal=True, query_offset=rows.start,
                    ),
                }  # fmt: skip
                times: dict[str, list[float]] = {name: [] for name in turns}
                for _ in range(repeats):
                    for name, turn in turns.items():
                        times[name].append(seconds_of(turn))
                for name, found in times.items():
                    spent[name] += min(found)
                move(1)
    work = Run(tokens, 1, long_context.ROWS)
    return {
        "tokens": tokens,
        **{f"{name} GFLOP/s": work.flops / s / 1e9 for name, s in spent.items()},
        "part of memory's speed": spent["memory"] / spent["files"],
        "load": os.getloadavg()[0],
    }


@contextmanager
def cluster(workers: int, dashboard: str | None = None) -> Iterator[Any]:
    """A client of this many worker processes of one thread."""
    import distributed

    with (
        tempfile.TemporaryDirectory() as folder,
        distributed.LocalCluster(
            n_workers=workers, threads_per_worker=1, processes=True,
            dashboard_address=dashboard, local_directory=folder,
        ) as made,
        distributed.Client(made) as client,
    ):  # fmt: skip
        yield client


def job(stores: dict[str, Any], rows: int) -> Any:
    """The whole of it, from Zarr to Zarr."""
    from sdpa.interop.dask import attention

    operands = [stores[name] for name in ("query", "key", "value")]
    options = {"is_causal": True, "block": rows, "chunks": rows, "workers": 1}
    return attention(*operands, out=stores["out"], **options)


def constants(client: Any, stores: dict[str, Any], work: Run, repeats: int) -> Constants:
    """Each part alone: a worker's task in memory, reading, tasks that do nothing."""
    n = min(8 * work.rows, work.tokens)

    def task(turn: int) -> float:
        query, key, value = (stores[name][:n] for name in ("query", "key", "value"))
        start = time.perf_counter()
        rows = slice(n - work.rows, n)
        blocks.attend(query, key, value, rows=rows, block=work.rows, is_causal=True, workers=1)
        return time.perf_counter() - start

    products = 4 * D * work.rows * (n - work.rows / 2)
    compute = min(client.submit(task, turn).result() for turn in range(5 * repeats))
    keys = stores["key"]
    read = min(seconds_of(lambda: keys[...]) for _ in range(5 * repeats))

    def nothing(n: int, turn: int) -> int:
        return n

    tasks = 500
    empty = min(
        seconds_of(
            lambda turn=turn: client.gather(client.map(nothing, range(tasks), turn=turn))
        )
        for turn in range(repeats)
    )  # fmt: skip
    size = keys.shape[0] * D * 4
    return Constants(products / compute, size / read, empty / tasks)


def scaling(tokens: int, rows: int, repeats: int) -> dict[str, Any]:
    """One worker and two, alternating: the shortest run of each beside what the model predicts."""
    long_context = example("long_context")
    long_context.BLOCK = rows
    work = Run(tokens, 1, rows)
    with tempfile.TemporaryDirectory() as folder, cluster(2) as client:
        stores = long_context.written(Path(folder), tokens)
        addresses = list(client.scheduler_info()["workers"])
        found = constants(client, stores, work, repeats)
        client.compute(job(stores, rows), workers=addresses, allow_other_workers=False).result()
        taken: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
        with progress("one worker and two", 2 * repeats) as move:
            for _ in range(repeats):
                for workers, runs in taken.items():
                    runs.append(timed(client, job(stores, rows), addresses[:workers]))
                    move(1)
    one, two = (np.min(runs, axis=0) for runs in taken.values())
    return {
        "tokens": tokens, "rows": rows, **asdict(found),
        "one worker": one[0], "two workers": two[0], "speed-up": one[0] / two[0],
        "CPU of one": one[1], "CPU of the busier of two": two[1], "its speed-up": one[1] / two[1],
        "model, one": work.total(found, 1), "model, two": work.total(found, 2),
        "load": os.getloadavg()[0],
    }  # fmt: skip


def timed(client: Any, todo: Any, chosen: list[str]) -> tuple[float, float]:
    """Seconds of a run on these workers, and CPU seconds of the busiest of them.

    Other programs on the machine lengthen the first much and the second little.
    """
    before = client.run(time.process_time)
    seconds = seconds_of(
        lambda: client.compute(todo, workers=chosen, allow_other_workers=False).result()
    )
    after = client.run(time.process_time)
    return seconds, max(after[address] - before[address] for address in chosen)


# ------------------------------------------------------------------------------- pictures


SIZES = {"1M tokens": Run(2**20, 8, 8192), "10M tokens": Run(10 * 2**20, 8, 8192)}
STORES = {"100 MB/s": 1e8, "1 GB/s": 1e9, "10 GB/s": 1e10}
"""Bandwidths of a store that all workers share: a disk, a good file server, object storage."""


@style.plot
def plot_model(found: Constants) -> Any:
    """Time by the number of workers; where a curve is flat and dashed, storage binds."""
    figure, row = style.subplots(1, len(SIZES), size=(4.6, 3.6))
    widths = 4.5, 3.0, 1.5  # what stores have in common is drawn once for each, the widest below
    for axes, (name, work) in zip(row, SIZES.items(), strict=True):
        # More workers than tasks have nothing to do.
        workers = np.geomspace(1, work.tasks, 200)
        for color, width, (label, bandwidth) in zip(
            style.COLORS, widths, STORES.items(), strict=False
        ):
            given = Constants(found.flops, bandwidth, found.task)
            times = np.array([work.total(given, n) / 3600 for n in workers])
            parts = [work.seconds(given, n) for n in workers]
            bound = np.array([part["storage"] > part["compute"] for part in parts])
            look = {"color": color, "linewidth": width}
            axes.plot(workers, np.where(bound, np.nan, times), label=label, **look)
            axes.plot(workers, np.where(bound, times, np.nan), "--", **look)
        axes.set(xscale="log", yscale="log", xlabel="workers of one thread", ylabel="hours")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
        axes.set_title(f"{name}, 8 heads of 64, tasks of {work.rows} queries")
    row[0].legend(title="the store gives\n(dashed: it binds)", loc="lower left")
    return figure


def picture(folder: Path) -> None:
    """A photograph of Dask's dashboard: the graph of tasks of a running job."""
    from playwright.sync_api import sync_playwright

    import_module("bokeh")  # without it Dask serves an apology in place of the dashboard
    long_context = example("long_context")
    long_context.BLOCK = rows = 2048
    tokens = 16 * rows
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with (
        tempfile.TemporaryDirectory() as made, cluster(2, ":0") as client,
        sync_playwright() as playwright,
    ):  # fmt: skip
        stores = long_context.written(Path(made), tokens)
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=arguments)
        address = client.dashboard_link.removesuffix("/status")
        page = browser.new_page(viewport={"width": 1100, "height": 620})
        page.goto(f"{address}/graph")
        page.wait_for_timeout(3000)
        running = client.compute(job(stores, rows))
        page.wait_for_timeout(2000)
        page.screenshot(path=folder / "graph.png")
        running.result()
        print(f"wrote {folder / 'graph.png'}")
        browser.close()


# ------------------------------------------------------------------------------- command


def table(figures: dict[str, Any]) -> str:
    """A line per figure, with its unit."""
    lines = []
    for name, value in figures.items():
        text = f"{value:.3g}" if isinstance(value, float) else f"{value}"
        lines.append(f"{name:24s} {text:>10s}  {UNITS.get(name, '')}".rstrip())
    return "\n".join(lines)


def quoted(page: str, what: str, text: str) -> str:
    """The page with this text in the block behind the comment of that name."""
    block = re.compile(rf"(<!-- {what} -->\n\n```\n).*?(\n```)", re.DOTALL)
    if not block.search(page):
        raise ValueError(f"no block after <!-- {what} -->")
    return block.sub(lambda found: found[1] + text + found[2], page)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beyond")
    parser.add_argument("what", choices=("files", "scaling", "plot", "picture"))
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--rows", type=int, default=4096, help="queries of a task of `scaling`")
    parser.add_argument("--repeats", type=int, default=3, help="of every measurement")
    parser.add_argument("--save", type=Path, default=FOLDER, help="folder of figures and pictures")
    options = parser.parse_args()
    folder = options.save
    folder.mkdir(parents=True, exist_ok=True)
    saved = folder / "beyond.json"
    kept = json.loads(saved.read_text()) if saved.exists() else {}
    if options.what == "picture":
        picture(folder)
    elif options.what == "plot":
        if "scaling" not in kept:
            raise SystemExit(f"{saved} has no constants: python -m benchmarks.beyond scaling")
        known = Constants.__dataclass_fields__
        found = Constants(**{name: kept["scaling"][name] for name in known})
        (folder / "scaling.svg").write_text(style.svg(plot_model(found)), encoding="utf-8")
        print(f"wrote {folder / 'scaling.svg'}")
    else:
        measure = {
            "files": lambda: files(options.tokens or 262144, options.repeats),
            "scaling": lambda: scaling(options.tokens or 65536, options.rows, options.repeats),
        }
        kept[options.what] = measure[options.what]()
        saved.write_text(json.dumps(kept, indent=1) + "\n")
        print(table(kept[options.what]))
        if folder == FOLDER:
            page = PAGE.read_text(encoding="utf-8")
            PAGE.write_text(quoted(page, options.what, table(kept[options.what])), encoding="utf-8")


if __name__ == "__main__":
    main()
