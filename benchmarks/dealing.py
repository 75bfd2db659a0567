"""How threads that share the backward's units spend their time: a simulation of the dealing.

`python -m benchmarks.dealing` prints how many times as fast some threads are as one. Two numbers
describe a machine: the floating-point operations of a core, and the bytes that all cores together
can move between their caches. A step is one unit of queries on one block of keys. Its K, V, dK and
dV are moved if another core had them last, while all cores that move share the way. Units of a head
follow each other block by block, as in src/deal.c.

On 16 cores (Intel Xeon, 16 heads of 1024 x 64) the dealing of units in turn, each head's next unit
to the next free thread, gained 2.9, 4.5 and 6.2 on 4, 8 and 16 threads. FITTED gives 3.1, 4.6 and
6.0.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

UNIT, BLOCK = 96, 128
NOISE = 0.05
"""Steps take up to so much more or less: on no machine do threads stay in step."""
MOST = 4
"""Units of a batch (BATCH_UNITS in src/kernels/tiles.h)."""


class Machine(NamedTuple):
    flops: float
    bytes: float


FITTED = Machine(flops=100e9, bytes=13e9)


class Head(NamedTuple):
    """Heads of n x d, and whether their weights are completed, one unit at a time."""

    heads: int
    n: int
    d: int
    most: int = MOST

    @property
    def units(self) -> int:
        return -(-self.n // UNIT)

    @property
    def blocks(self) -> int:
        return -(-self.n // BLOCK)


@dataclass
class Thread:
    """Its clock, and what it does next: (head, units from, to) and steps of it."""

    number: int
    clock: float = 0.0
    steps: Iterator[tuple[int, int, int]] | None = None
    step: tuple[int, int, int] | None = None


Deal = Callable[[Head, list[int], Thread, int], tuple[int, int] | None]
"""From the units left of each head, the thread and the number of threads to (head, units)."""


def in_turn(work: Head, left: list[int], thread: Thread, n_threads: int) -> tuple[int, int] | None:
    """The next unit of the head that is least far."""
    head = max(range(work.heads), key=lambda h: left[h])
    return (head, 1) if left[head] else None


def by_home(work: Head, left: list[int], thread: Thread, n_threads: int) -> tuple[int, int] | None:
    """Units of the thread's own head; if there are none, of the head with the most left."""
    homes = range(thread.number, work.heads, n_threads)
    head = next((h for h in homes if left[h]), None)
    if head is None:
        head = max(range(work.heads), key=lambda h: left[h])
    if not left[head]:
        return None
    busy = sum(x > 0 for x in left)
    share = left[head] // (2 * -(-n_threads // busy)) if n_threads > 1 else left[head]
    return head, max(1, min(work.most, share))


def order(work: Head, head: int, first: int, n: int) -> Iterator[tuple[int, int, int]]:
    """The steps (head, unit, block) of a batch: range by range, unit by unit."""
    size = max(1, 256 * 1024 // (BLOCK * 16 * work.d)) if n > 1 else work.blocks
    for start in range(0, work.blocks, size):
        for unit in range(first, first + n):
            for block in range(start, min(start + size, work.blocks)):
                yield head, unit, block


def seconds(work: Head, n_threads: int, deal: Deal, machine: Machine = FITTED) -> float:
    """The time until all units are done."""
    compute = 10 * UNIT * BLOCK * work.d / machine.flops
    moved = 4 * BLOCK * 4 * work.d * n_threads / machine.bytes
    left = [work.units] * work.heads
    done: dict[tuple[int, int, int], float] = {}
    owner: dict[tuple[int, int], int] = {}
    worker: dict[tuple[int, int], Thread] = {}
    threads = [Thread(i) for i in range(n_threads)]
    rng = random.Random(0)
    active = list(threads)
    while active:
        thread = min(active, key=lambda t: t.clock)
        if thread.step is None:
            thread.step = next(thread.steps, None) if thread.steps else None
        if thread.step is None:
            taken = deal(work, left, thread, n_threads)
            if taken is None:
                active.remove(thread)
                continue
            head, n = taken
            first = work.units - left[head]
            thread.steps = order(work, head, first, n)
            worker |= {(head, unit): thread for unit in range(first, first + n)}
            left[head] -= n
            continue
        head, unit, block = thread.step
        before = done.get((head, unit - 1, block)) if unit else 0.0
        if before is None:  # wait until its thread has gone on
            thread.clock = worker[head, unit - 1].clock + 1e-9
            continue
        alone = owner.setdefault((head, block), thread.number) == thread.number
        owner[head, block] = thread.number
        thread.clock = max(thread.clock, before) + (0 if alone else moved)
        thread.clock += compute * rng.uniform(1 - NOISE, 1 + NOISE)
        done[thread.step] = thread.clock
        thread.step = None
    return max(t.clock for t in threads)


def seconds_by_keys(work: Head, n_threads: int, size: int, machine: Machine = FITTED) -> float:
    """The time of one head if a thread owned ranges of `size` blocks of keys, in turn.

    dK and dV would stay where they are. A unit's dQ would go from thread to thread, and each thread
    would read its queries and upstream gradients.
    """
    n_ranges = -(-work.blocks // size)
    compute = 10 * UNIT * BLOCK * size * work.d / machine.flops
    moved = 4 * UNIT * 3 * work.d * n_threads / machine.bytes if n_threads > 1 else 0.0
    done = [0.0] * work.units  # the unit's last range
    clocks = [0.0] * n_threads
    for first in range(0, n_ranges, n_threads):
        for unit in range(work.units):
            for thread in range(min(n_threads, n_ranges - first)):
                start = max(clocks[thread], done[unit])
                clocks[thread] = done[unit] = start + compute + moved
    return max(clocks)


CASES = {
    "16 heads of 1024 x 64": Head(16, 1024, 64, most=1),
    "16 heads of 4096 x 64": Head(16, 4096, 64),
    "17 heads of 1024 x 64": Head(17, 1024, 64, most=1),
    "one head of 2048 x 64": Head(1, 2048, 64),
    "one head of 4096 x 64": Head(1, 4096, 64),
}


def gain(work: Head, n_threads: int, deal: Deal, machine: Machine = FITTED) -> float:
    """How many times as fast as one thread."""
    return seconds(work, 1, deal, machine) / seconds(work, n_threads, deal, machine)


def main() -> None:
    counts = (2, 4, 8, 16)
    print("threads".ljust(34), *(f"{n:6}" for n in counts))
    for name, work in CASES.items():
        for title, deal in (("in turn", in_turn), ("by home", by_home)):
            gains = (f"{gain(work, n, deal):6.1f}" for n in counts)
            print(f"{name}, {title}".ljust(34), *gains)
        if work.heads == 1:
            for size in (1, 2):
                alone = seconds_by_keys(work, 1, size)
                gains = (f"{alone / seconds_by_keys(work, n, size):6.1f}" for n in counts)
                print(f"{name}, by {size * BLOCK} keys".ljust(34), *gains)


if __name__ == "__main__":
    main()
