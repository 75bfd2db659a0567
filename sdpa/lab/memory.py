"""Memory that a call of attention adds to the process, beside that of the formula in NumPy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import style
from .table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTHS = (256, 512, 1024, 2048, 4096)

# A process of its own for each call: its peak is a maximum, which no later call can lower. Not the
# ru_maxrss of getrusage, which a process takes over from the one that started it.
PROGRAM = """
import re, sys
import numpy as np
import sdpa
from sdpa.lab.speed import numpy_weights

who, n, d = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
def attend(n):
    q, k, v = np.random.default_rng(0).standard_normal((3, n, d), np.float32)
    return sdpa.attention(q, k, v) if who == "sdpa" else numpy_weights(q, k) @ v
def peak():
    status = open("/proc/self/status").read()
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+) kB", status)[1])
attend(16)
operands = np.random.default_rng(0).standard_normal((3, n, d), np.float32)
out = np.ones((n, d), np.float32)
del operands, out
before = peak()
attend(n)
print(peak() - before)
"""


def memory(lengths: Sequence[int] = LENGTHS, *, d: int = 64) -> Table:
    """Growth of the largest resident size by one call on one float32 head, n queries and n keys.

    Each figure is that of a new process, in which a call on 16 positions and arrays as large as
    the operands and the result came first: what is left is what the call needs to compute. The
    formula holds a matrix of n^2 scores, 4 n^2 bytes; sdpa blocks of a fixed size per thread.

    Parameters
    ----------
    lengths : sequence of int
        n.
    d : int
        Of queries, keys and values.

    Returns
    -------
    Table
        n; numpy and sdpa, in bytes; matrix, 4 n^2 bytes, the size of the scores.

    Examples
    --------
    >>> from sdpa import lab
    >>> (row,) = lab.memory([2048]).rows
    >>> row["sdpa"] < row["matrix"] <= row["numpy"] * 1.1
    True
    """
    rows = [
        {"n": n, "numpy": _grown("numpy", n, d), "sdpa": _grown("sdpa", n, d), "matrix": 4 * n * n}
        for n in lengths
    ]
    return Table("Bytes that one call adds", rows)


def _grown(who: str, n: int, d: int) -> int:
    command = [sys.executable, "-c", PROGRAM, who, str(n), str(d)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@style.plot
def plot_memory(table: Table) -> Figure:
    """Bytes against the length, beside the size of the matrix of scores.

    Parameters
    ----------
    table : Table
        Of `memory`.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ImportError
        matplotlib is not installed.
    """
    figure, axes = style.subplots(size=(6.0, 3.6))
    mebi = 2.0**20
    for name, color, marker in ("numpy", style.ORANGE, "s"), ("sdpa", style.BLUE, "o"):
        label = {"numpy": "the formula in NumPy", "sdpa": "sdpa.attention"}[name]
        axes.plot(table["n"], table[name] / mebi, color=color, marker=marker, label=label)
    style.prediction(axes, table["n"], table["matrix"] / mebi, label="4 n² bytes")
    style.log_axis(axes, "x", [int(n) for n in table["n"]])
    axes.set_yscale("symlog", linthresh=1)
    axes.set(xlabel="n queries and n keys", ylabel="memory added by the call, MiB")
    axes.legend()
    return figure
