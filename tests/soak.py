"""Calls the package from several threads for a while and watches the memory of the process.

``python tests/soak.py SECONDS``, or `make soak`. Fails if a result changes or memory grows.
"""

import os
import sys
import threading
import time

import numpy as np
from support.problems import CASES, problem

import sdpa

GROWTH = 1 << 20
"""Bytes that the process may hold more at the end than after a fifth of the time."""


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
    """Run until the time is over; return the number of calls and the growth in bytes."""
    cases = [(name, dtype, n) for n, name in enumerate(CASES) for dtype in (np.float32, np.float64)]
    expected = {case: [x.tobytes() for x in attention(*case)] for case in cases}
    end, calls, wrong = time.monotonic() + seconds, [0, 0, 0], []

    def call(thread):
        while time.monotonic() < end:
            case = cases[calls[thread] % len(cases)]
            if [x.tobytes() for x in attention(*case)] != expected[case]:
                wrong.append(case)
            calls[thread] += 1

    threads = [threading.Thread(target=call, args=(n,)) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    sizes = []
    while time.monotonic() < end:
        time.sleep(seconds / 100)
        sizes.append(resident())
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    assert min(calls) > len(cases), calls
    return sum(calls), max(sizes[-20:]) - max(sizes[:20])


if __name__ == "__main__":
    n, growth = main(float(sys.argv[1]))
    print(
        f"{n} rounds, {resident() >> 20} MiB held, {growth / 1024:+.0f} KiB in the last four fifths"
    )
    sys.exit(growth > GROWTH)
