"""Claims and figures made up for tests of the ledger."""

import os
import time

import numpy as np

import sdpa
from sdpa_lab.claims import Claim, Expect
from sdpa_lab.claims.record import at_horizons
from sdpa_lab.tools.estimate import Draws, Estimate, exact

HARM = at_horizons(Expect("x", 1.0, 0.1, law=2.0), horizons=(10, 20, 30))
"""A figure at three horizons."""


def figure(low, high):
    return Estimate((low + high) / 2, low, high, 10)


def claim(expect, experiment, **other):
    text = {"claim": "c", "claim_zh": "c", "holds": "holds: {x}", "law": "law: {x:.1f}"}
    record = {"id": "test", **text, **other}
    return Claim(expect=tuple(expect), experiment=experiment, **record)


def by_process(seed, times):
    """Experiment: two draws of the process that it runs in, when it ran, and sdpa's threads."""
    return {
        "x": Draws(np.array([os.getpid(), os.getpid() + 2.0])),
        "time": exact(time.time()),
        "threads": exact(sdpa.get_num_threads()),
    }


def by_process_too(seed, times):
    """Another one."""
    return by_process(seed, times)


def endless(seed, times):
    """Experiment: takes longer than any test."""
    time.sleep(600)
    return by_process(seed, times)


def failing(seed, times):
    """Experiment: fails."""
    raise ArithmeticError("of its own")
