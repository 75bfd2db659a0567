"""Memory that a call of attention needs beyond its operands, and that of the formula in NumPy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .. import style
from ..tools.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTHS = (1024, 2048, 4096, 8192)

PROGRAM = """
import ctypes
import sys
import numpy as np
import sdpa
from sdpa_lab.experiments.speed import numpy_weights


def kilobytes(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name))


def formula(q, k, v):
    return numpy_weights(q, k) @ v


trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)
rng = np.random.default_rng(int(sys.argv[1]))
for name, function in (("numpy", formula), ("sdpa", sdpa.attention)):
    for n in map(int, sys.argv[3:]):
        q, k, v = rng.standard_normal((3, n, 64), np.float32)
        function(q, k, v)  # starts threads and fills what BLAS keeps
        for _ in range(int(sys.argv[2])):
            trim(0)
            with open("/proc/self/clear_refs", "w") as peak:
                peak.write("5")
            before = kilobytes("VmRSS")
            out = function(q, k, v)
            print(name, n, 1024 * (kilobytes("VmHWM") - before))
            del out
"""


def peaks(
    lengths: Sequence[int] = LENGTHS, *, calls: int = 3, seed: int = 0
) -> dict[tuple[str, int], npt.NDArray[np.int64]]:
    """Growth of the largest resident size during single calls, in a separate process.

    Parameters
    ----------
    lengths : sequence of int
        n: one head of n queries and n keys, 64 numbers wide, float32.
    calls : int
        Of each kind, after a first one that starts threads and fills buffers kept between calls.
    seed : int

    Returns
    -------
    dict
        (calls,) bytes, result included, for "numpy", the formula, and "sdpa" at each n.

    Raises
    ------
    ImportError
        The system has no /proc/self.
    """
    command = [sys.executable, "-c", PROGRAM, str(seed), str(calls), *map(str, lengths)]
    # Memory that is resident already would hide what a call needs. With a fixed threshold glibc
    # returns large arrays to the system when they are freed, and malloc_trim what else is free.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    if "clear_refs" in done.stderr:
        raise ImportError("the peak of a call is read from /proc/self, which this system lacks")
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[tuple[str, int], list[int]] = {}
    for line in done.stdout.splitlines():
        name, n, peak = line.split()
        found.setdefault((name, int(n)), []).append(int(peak))
    return {key: np.array(values) for key, values in found.items()}


def memory(lengths: Sequence[int] = LENGTHS) -> Table:
    """Memory of one call on one float32 head, n queries and n keys, 64 numbers wide.

    The formula holds a matrix of n^2 scores, 4 n^2 bytes; sdpa blocks of a fixed size per thread,
    and its result of 256 n bytes.

    Parameters
    ----------
    lengths : sequence of int
        n.

    Returns
    -------
    Table
        n; numpy and sdpa, in bytes, the largest of three calls of `peaks`; matrix, 4 n^2 bytes.

    Raises
    ------
    ImportError
        The system has no /proc/self.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> (row,) = lab.memory([2048]).rows
    >>> row["sdpa"] < row["matrix"] <= row["numpy"] * 1.1
    True
    """
    found = peaks(lengths)
    rows = [
        {
            "n": n,
            **{name: int(found[name, n].max()) for name in ("numpy", "sdpa")},
            "matrix": 4 * n * n,
        }
        for n in lengths
    ]
    return Table("Bytes that one call needs beyond its operands", rows)


@style.plot
def plot_memory(table: Table) -> Figure:
    """Bytes against the length, beside the size of the matrix of scores."""
    figure, axes = style.subplots(size=(6.0, 3.6))
    mebi = 2.0**20
    for name, color, marker in ("numpy", style.ORANGE, "s"), ("sdpa", style.BLUE, "o"):
        label = {"numpy": "the formula in NumPy", "sdpa": "sdpa.attention"}[name]
        axes.plot(table["n"], table[name] / mebi, color=color, marker=marker, label=label)
    style.prediction(axes, table["n"], table["matrix"] / mebi, label="4 n² bytes")
    style.log_axis(axes, "x", [int(n) for n in table["n"]])
    style.log_axis(axes, "y", [0.1, 1, 10, 100, 1000])
    axes.set(xlabel="n queries and n keys", ylabel="memory added by the call, MiB")
    axes.set_ylim(0.05, 1.5 * float(np.max([table["numpy"], table["matrix"]])) / mebi)
    axes.legend()
    return figure
