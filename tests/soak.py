"""Calls the package from several threads for a while and watches what the process has allocated.

``python tests/soak.py SECONDS``, or `make soak`. Fails if a result changes, or if more memory is in
use at the end than after the first tenth of the time. Memory is looked at between rounds, when no
call runs. What counts is what was allocated and not freed: resident memory also grows where the
arenas of glibc, one for each thread, fragment.
"""

import ctypes
import gc
import os
import sys
import threading
import time

import numpy as np
from support.problems import CASES, problem

import sdpa

ROUNDS = 40
GROWTH, BLOCKS = 64 << 10, 100
"""How many bytes and blocks of Python may be in use more at the end than after the first rounds:
less than an array of one of the thousands of calls, and fewer than they are."""


class MallocInfo(ctypes.Structure):
    """Sizes in bytes and counts of all arenas; see mallinfo(3)."""

    _fields_ = [
        *[(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")],
        *[(name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks")],
        *[(name, ctypes.c_size_t) for name in ("fordblks", "keepcost")],
    ]


def in_use():
    """Return the bytes that malloc has given out, and the number of Python's own blocks."""
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallocInfo
    info = mallinfo2()
    return info.uordblks + info.hblkhd, sys.getallocatedblocks()


def resident():
    """Return the bytes of memory that the process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def refused(query):
    """Make a call that raises."""
    try:
        sdpa.attention(query, query[..., :1], query)
    except ValueError:
        return np.zeros(0)
    raise AssertionError("not refused")


def attention(name, dtype, seed):
    """Return the results of a case of attention and of its derivatives."""
    operands, options = problem(np.random.default_rng(seed), name, dtype)
    x = [operands[n] for n in ("query", "key", "value")]
    options |= {n: operands[n] for n in ("attn_mask", "sinks") if n in operands}
    out, lse = sdpa.attention_forward(*x, **options)
    grads = sdpa.attention_backward(out, *x, out, lse, **options)
    rest = [sdpa.softmax(out), sdpa.logsumexp(lse), refused(x[0])]
    cache = sdpa.KVCache(1, 1, 8, capacity=64, dtype=np.float32)
    cache.append(np.ones((1, 1, 3, 8), np.float32), np.ones((1, 1, 3, 8), np.float32))
    large = np.full((2, 200, 64), seed, dtype)
    rest += [sdpa.attention(large, large, large, is_causal=True, workers=3)]
    return [out, lse, *(g for g in grads if g is not None), *rest]


def main(seconds):
    """Run all rounds; return the number of calls, and bytes and blocks in use after each round."""
    cases = [(name, dtype, n) for n, name in enumerate(CASES) for dtype in (np.float32, np.float64)]
    expected = {case: [x.tobytes() for x in attention(*case)] for case in cases}
    calls, wrong, sizes = [0, 0, 0], [], np.zeros((ROUNDS, 2), np.int64)

    def call(thread, end):
        while time.monotonic() < end:
            case = cases[calls[thread] % len(cases)]
            if [x.tobytes() for x in attention(*case)] != expected[case]:
                wrong.append(case)
            calls[thread] += 1

    for i in range(ROUNDS):
        end = time.monotonic() + seconds / ROUNDS
        threads = [threading.Thread(target=call, args=(n, end)) for n in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sizes[i] = in_use()
    assert not wrong, wrong
    assert min(calls) > len(cases), calls
    return sum(calls), sizes


if __name__ == "__main__":
    n, sizes = main(float(sys.argv[1]))
    # The first rounds fill caches.
    first, last = (np.min(part, axis=0) for part in (sizes[4:8], sizes[-4:]))
    grown, blocks = (last - first).tolist()
    print(f"{n} calls; in use {grown / 1024:+.1f} KiB and {blocks:+d} blocks of Python", end=", ")
    print(f"resident {resident() >> 20} MiB")
    sys.exit(grown > GROWTH or blocks > BLOCKS)
