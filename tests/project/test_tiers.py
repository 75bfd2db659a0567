"""The rule by which the quick tests are drawn."""

import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import tiers

ROOT = Path(__file__).parents[2]


class Case:
    """As much of a test item as the rule looks at."""

    def __init__(self, name, *marks, **params):
        self.nodeid = f"{name}[{'-'.join(map(str, params.values()))}]"
        self.callspec = SimpleNamespace(params=params)
        self.get_closest_marker = {mark: mark for mark in marks}.get


@pytest.fixture(scope="module")
def everything(request):
    """All tests of this session, whatever its tier."""
    return request.config.stash[tiers.ALL]


@pytest.fixture(scope="module")
def quick(everything):
    return tiers.drawn(everything, "quick")


def of_function(items):
    """{function: what tiers.parameters says of its cases}"""
    table = {}
    for item in items:
        table.setdefault(item.nodeid.partition("[")[0], []).append(tiers.parameters(item))
    return table


def test_quick_tests_have_every_value_of_every_parameter(everything, quick):
    everything = of_function(x for x in everything if not x.get_closest_marker("slow"))
    quick = of_function(quick)
    assert quick.keys() == everything.keys()
    for name, cases in everything.items():
        assert set().union(*quick[name]) == set().union(*cases), name


def test_every_file_has_a_quick_test(everything, quick):
    """But those that start a cluster, JupyterLab or SciPy's own tests."""
    left_out = {item.path.name for item in everything} - {item.path.name for item in quick}
    assert left_out <= {
        "test_dask_cluster.py",
        "test_widgets.py",
        "test_every_door.py",
        "test_scipy.py",
    }


def test_every_test_is_in_one_tier(everything, quick):
    rest = tiers.drawn(everything, "rest")
    assert len(quick) + len(rest) == len(everything)
    assert {*quick, *rest} == {*everything}


def test_no_more_than_needed_is_drawn():
    cases = [Case("f", isa=isa, n=n, d=d) for isa, n, d in product("abcd", range(4), range(2))]
    assert len(tiers.covering(cases)) == 4
    assert len(tiers.covering([Case("f")])) == 1


def test_functions_differ_in_what_they_pair():
    pairs = set()
    for name in range(40):
        cases = [Case(f"f{name}", isa=isa, dtype=dtype) for isa, dtype in product("abcd", "wxyz")]
        pairs |= {tuple(case.callspec.params.values()) for case in tiers.covering(cases)}
    assert pairs == set(product("abcd", "wxyz"))


def test_slow_tests_are_not_drawn():
    fast, slow = Case("f", n=1), Case("f", "slow", n=2)
    assert tiers.drawn([fast, slow], "quick") == [fast]
    assert tiers.drawn([fast, slow], "rest") == [slow]


def test_option():
    def collected(tier):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", f"--tier={tier}"]
        output = subprocess.check_output(
            [*command, "tests/softmax/test_arguments.py"], cwd=ROOT, text=True
        )
        return re.findall(r"^tests/.*::.*$", output, re.MULTILINE)

    quick, rest, everything = map(collected, ("quick", "rest", "all"))
    assert quick
    assert rest
    assert sorted(quick + rest) == sorted(everything)
