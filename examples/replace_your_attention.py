"""Attention in twenty lines of NumPy, then by one call of sdpa, on the same tensors.

python examples/replace_your_attention.py [--lengths 512 2048] [--heads 8]. Needs NumPy and Linux.
Times are those of the fastest call in a second; memory is what one call adds to a new process.
"""

import argparse
import os
import subprocess
import sys
from functools import partial

import numpy as np

import sdpa
from sdpa_lab.tools.clock import shortest


def before(query, key, value):
    """Causal attention as it is usually written: (heads, n, d) each."""
    n, d = query.shape[-2:]
    scores = query @ key.swapaxes(-1, -2)
    scores /= np.sqrt(d, dtype=scores.dtype)

    # A query must not see later keys.
    future = np.triu(np.ones((n, n), bool), 1)
    scores = np.where(future, -np.inf, scores).astype(scores.dtype, copy=False)

    # Softmax, shifted by the largest score so that exp cannot overflow.
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores, out=scores)
    weights /= weights.sum(axis=-1, keepdims=True)

    return weights @ value


def after(query, key, value):
    return sdpa.attention(query, key, value, is_causal=True)


def operands(heads, n):
    return np.random.default_rng(0).standard_normal((3, heads, n, 64), np.float32)


def memory(function, heads, n):
    """Bytes that a call adds to a new process, including the result."""
    command = [sys.executable, __file__, "--memory-of", function.__name__]
    command += ["--heads", str(heads), "--lengths", str(n)]
    # With a fixed threshold malloc returns every freed array to the system.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


def added(function, heads, n):
    function(*operands(heads, 64))  # threads and code
    tensors = operands(heads, n)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM starts again from what is resident now
    resident = status("VmRSS")
    function(*tensors)
    return status("VmHWM") - resident


def status(field):
    with open("/proc/self/status") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--memory-of", choices=["before", "after"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        print(added(globals()[options.memory_of], options.heads, options.lengths[0]))
        return

    print(f"{options.heads} heads of 64, causal, float32, {sdpa.get_num_threads()} threads\n")
    print("tokens      NumPy                 sdpa                  faster   largest difference")
    for n in options.lengths:
        tensors = operands(options.heads, n)
        old, new = (shortest(partial(f, *tensors), 1, 1.0) for f in (before, after))
        much, little = memory(before, options.heads, n), memory(after, options.heads, n)
        print(
            f"{n:6d} {1e3 * old:9.1f} ms {much / 1e6:7.1f} MB {1e3 * new:9.1f} ms "
            f"{little / 1e6:7.1f} MB {old / new:7.1f} x   "
            f"{abs(before(*tensors) - after(*tensors)).max():.1e}"
        )


if __name__ == "__main__":
    main()
