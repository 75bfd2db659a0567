"""Rows of the ledger in several processes.

A row depends on its claim, seed and number of draws alone, whichever process judges it and whatever
was judged before it, so that all rows are those of one process, bit for bit. Each process computes
on one thread. Rows that share work stay together in one, because what they share is cached there.
Rows that time something come last, one after the other, when no other process is left.
"""

import multiprocessing
import os
import signal
from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import partial
from threading import Thread

import sdpa

from .. import smollm2
from .judge import judge
from .record import Claim, Row

MOST = 8
"""Processes, where their number is not given: each needs some hundred megabytes."""


def default_workers() -> int:
    """As many processes as `sdpa` has threads, up to `MOST`."""
    return min(MOST, sdpa.get_num_threads())


def judged(
    wanted: Sequence[Claim], *, rows: int, seed: int, times: float, workers: int | None = None
) -> Generator[Row, None, None]:
    """Judge claims, and yield each row as soon as it is there.

    Parameters
    ----------
    wanted : sequence of Claim
        Their experiments are functions of modules, by whose names processes find them.
    rows, seed, times
        As for `judge`.
    workers : int, optional
        Processes; default: `default_workers()`. Without a slow row among `wanted`, or with 1, there
        is no other process than this one, and the rows have the order of `wanted`.

    Yields
    ------
    Row

    Raises
    ------
    ValueError
        As `judge`.
    concurrent.futures.process.BrokenProcessPool
        A process was ended from outside.
    """
    one = partial(judge, rows=rows, seed=seed, times=times)
    groups = units([claim for claim in wanted if not claim.timed])
    number = min(default_workers() if workers is None else workers, len(groups))
    if number > 1 and any(claim.slow for group in groups for claim in group):
        before = set(multiprocessing.active_children())
        spawn = multiprocessing.get_context("spawn")
        pools = [ProcessPoolExecutor(1, spawn, initializer=_start) for _ in range(number)]
        try:
            yield from _spread(one, groups, pools)
        except BaseException:
            # A row may take minutes: whoever leaves early, by Ctrl-C, does not wait for it.
            for process in set(multiprocessing.active_children()) - before:
                process.terminate()
            raise
        finally:
            for pool in pools:
                pool.shutdown(cancel_futures=True)
        wanted = [claim for claim in wanted if claim.timed]
    for claim in wanted:
        yield one(claim)


def units(wanted: Sequence[Claim]) -> list[list[Claim]]:
    """Claims in groups that share work: an experiment, models, or what a pretrained decoder gives.

    Slow groups come first, those with the most rows or figures before others, so that the end is
    left to short ones.
    """
    found: dict[object, list[Claim]] = {}
    for claim in wanted:
        decodes = any(part.model == smollm2.MODEL for part in claim.trained)
        shared = "decoder" if decodes else claim.shares or claim.experiment
        found.setdefault(shared, []).append(claim)
    return sorted(found.values(), key=_weight, reverse=True)


def _weight(group: list[Claim]) -> tuple[bool, int]:
    return any(claim.slow for claim in group), sum(len(claim.judged) for claim in group)


def _spread(
    one: "partial[Row]", groups: list[list[Claim]], pools: list[ProcessPoolExecutor]
) -> Generator[Row, None, None]:
    """Each process takes a group, one row at a time, and then the next group."""
    waiting = iter(groups)
    running: dict[Future[Row], tuple[ProcessPoolExecutor, list[Claim]]] = {}

    def start(pool: ProcessPoolExecutor, group: list[Claim]) -> None:
        if group := group or next(waiting, []):
            running[pool.submit(one, group[0])] = pool, group[1:]

    for pool in pools:
        start(pool, [])
    while running:
        for done in wait(running, return_when=FIRST_COMPLETED).done:
            pool, rest = running.pop(done)
            start(pool, rest)
            yield done.result()


def _start() -> None:
    """What a process does first: Ctrl-C is for the parent, without which there is no more to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sdpa.set_num_threads(1)
    Thread(target=_outlive, daemon=True).start()


def _outlive() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
