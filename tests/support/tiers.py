"""The tiers of the tests: what `make test` runs, and what only `make test-all` does.

The quick tier is drawn by a rule. Of each test function it has cases in which every value of every
parameter appears, but not every combination of them. Tests marked slow are left to the rest.
"""

import zlib
from collections import defaultdict

import pytest
from support.machine import SEED

# The parameters of a fixture that takes long: its tests are slow, and keep their names.
SLOW = [pytest.param(None, marks=pytest.mark.slow, id=pytest.HIDDEN_PARAM)]
ALL = pytest.StashKey()  # in pytest's config: all tests, whatever the tier


def drawn(items, tier):
    """The test items of a tier: "quick", "rest" or "all"."""
    if tier == "all":
        return items
    chosen = quick(items)
    return [item for item in items if (item in chosen) == (tier == "quick")]


def quick(items):
    """The test items of the quick tier, a set."""
    functions = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("slow"):
            functions[item.nodeid.partition("[")[0]].append(item)
    return {case for cases in functions.values() for case in covering(cases)}


def covering(cases):
    """Few cases of one function in which every value of every parameter appears.

    Always the case with the most values that are missing (a greedy cover); among equals a hash
    decides, so that functions do not all pair the same instruction set with the same dtype.
    """
    order = sorted(cases, key=lambda case: zlib.crc32(f"{SEED} {case.nodeid}".encode()))
    values = {case: parameters(case) for case in order}
    missing = set().union(*values.values())
    chosen = []
    for least in range(max(map(len, values.values())), 0, -1):
        for case in order:
            if len(missing & values[case]) >= least:
                chosen.append(case)
                missing -= values[case]
    return chosen


def parameters(case):
    """(name, value) of each parameter; the function itself counts as one, which has one value."""
    callspec = getattr(case, "callspec", None)
    params = callspec.params if callspec else {}
    return {("", ""), *((name, repr(value)) for name, value in params.items())}
