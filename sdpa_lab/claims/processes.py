"""Rows that time something, or read the size of a process: a draw is a process.

The turns of one process share its memory and the mood of its machine. An interval made of them says
what that process would give once more, and another run falls outside. So the whole experiment runs
in several processes, one after the other, and the figures of each are one draw.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module

import numpy as np

from ..tools.estimate import Draws, Estimate
from ..tools.machine import one_blas_thread
from .record import Measured

Experiment = Callable[[int, float], Measured]

PROCESSES, MOST, LEAST = 8, 16, 4
"""Usually, and however many draws are asked for."""

PROGRAM = "from sdpa_lab.claims.processes import serve; serve()"


@cache
def measured(experiment: Experiment, seed: int, times: float) -> Measured:
    """The figures of an experiment, of each process one draw; cached for rows that share it.

    Parameters
    ----------
    experiment : callable
        A function of a module, by whose name the processes find it.
    seed : int
    times : float
        Multiplies the number of processes; all together take the draws of one.

    Returns
    -------
    Measured
        Figures that are the same in all processes and without chance stay as they are.

    Raises
    ------
    ImportError
        The experiment needs a package that is not installed.
    """
    count = min(MOST, max(LEAST, round(PROCESSES * times)))
    runs = [_run(experiment, seed, times / count) for _ in range(count)]
    found: dict[str, Draws | Estimate] = {}
    for name, (value, random) in runs[0].items():
        values = np.array([run[name][0] for run in runs])
        found[name] = Draws(values) if random else Estimate(value, value, value, 1)
    return found


def _run(experiment: Experiment, seed: int, times: float) -> dict[str, tuple[float, bool]]:
    """By figure its value in a new process, and whether it is one of chance."""
    place = (experiment.__module__, experiment.__name__)
    command = [sys.executable, "-c", PROGRAM, *place, str(seed), repr(times)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        missing = last.startswith(("ImportError: ", "ModuleNotFoundError: "))
        raise ImportError(last.partition(": ")[2]) if missing else RuntimeError(done.stderr)
    return {name: (value, random) for name, value, random in json.loads(done.stdout)}


def serve() -> None:
    """What each process does: run the experiment that its arguments name, and print its figures."""
    module, name, seed, times = sys.argv[1:]
    with one_blas_thread():
        figures = getattr(import_module(module), name)(int(seed), float(times))
    cells = [
        (
            figure,
            (cell.estimate() if isinstance(cell, Draws) else cell).value,
            isinstance(cell, Draws),
        )
        for figure, cell in figures.items()
    ]
    print(json.dumps(cells))
