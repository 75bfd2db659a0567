"""How long a call takes."""

import time
from collections.abc import Callable

Call = Callable[[], object]


def sample(call: Call, loops: int, clock: Callable[[], float]) -> float:
    """Seconds of one call, the mean of `loops` calls in a row.

    Examples
    --------
    >>> import time
    >>> from sdpa_lab.tools.clock import sample
    >>> sample(lambda: None, 100, time.perf_counter) < 1
    True
    """
    start = clock()
    for _ in range(loops):
        call()
    return (clock() - start) / loops


def shortest(call: Call, loops: int, seconds: float) -> float:
    """The shortest sample of `loops` calls; samples are taken for `seconds`, at least one."""
    end = time.perf_counter() + seconds
    best = sample(call, loops, time.perf_counter)
    while time.perf_counter() < end:
        best = min(best, sample(call, loops, time.perf_counter))
    return best
