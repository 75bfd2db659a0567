"""Fixtures of the whole suite: every ISA of this machine, every dtype, one printed seed, the peers.

SDPA_SEED=n         draws other data (and lets hypothesis draw other cases)
SDPA_REQUIRE_ALL=1  makes any skipped test fail the session, by name
"""

import gc
import importlib.metadata
import importlib.util
import os
import re
import shutil
import warnings
import zlib

import hypothesis
import numpy as np
import pytest
import threadpoolctl
from support import oracle, tiers
from support.guard import Pages
from support.machine import DTYPES, ISAS, SEED

import sdpa
from sdpa import _core

hypothesis.settings.register_profile(
    "sdpa",
    deadline=None,
    derandomize="SDPA_SEED" not in os.environ,
    database=None,
    # The fixture `isa` stays the same for all examples of a test.
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("sdpa")

# NumPy's matrix products in the oracle are small; two threads spin longer than they work.
threadpoolctl.threadpool_limits(1, user_api="blas")

# Most of the time of the tests in JAX goes into compiling, which these emitters double. Processes
# that tests start have them. XLA ends a process that sets an option which it does not know.
if importlib.util.find_spec("jaxlib") and importlib.metadata.version("jaxlib") == "0.10.2":
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")

_skipped = []

# As `isa` takes those of the machine: tests of an instruction set that it lacks do not exist.
NEEDED = {
    "kernels/test_amx.py": {"amx"},
    "kernels/test_amx_model.py": {"amx", "amx_model"},  # a build with SDPA_STAND_INS
    "kernels/test_parts.py": {"avx512", "amx_model"},  # as well
}
collect_ignore = [path for path, isas in NEEDED.items() if not isas <= set(ISAS)]


def pytest_addoption(parser):
    parser.addoption(
        "--tier",
        choices=["quick", "rest", "all"],
        default="all",
        help="the tests that `make test` runs, the others, or all (the default)",
    )


def pytest_collection_finish():
    """Keep what stays until the end out of garbage collections, which took half a second each."""
    gc.collect()
    gc.freeze()


def pytest_report_header():
    return f"sdpa: SDPA_SEED={SEED}, ISAs {' '.join(ISAS)}"


@pytest.fixture(params=ISAS)
def isa(request):
    """The name of an ISA, in force during the test."""
    oracle.serve(_name_without_isa(request.node))
    previous = _core._use_isa(request.param)
    yield request.param
    _core._use_isa(previous)


@pytest.fixture(params=DTYPES)
def dtype(request):
    return DTYPES[request.param]


@pytest.fixture(params=["f32", "f64"])
def compute_dtype(request):
    """The types that kernels compute in; the others differ in how they are loaded and stored."""
    return DTYPES[request.param]


@pytest.fixture
def rng(request):
    """Data that depends on the seed and on the test, not on the ISA or on tests before it."""
    return np.random.default_rng([SEED, zlib.crc32(_name_without_isa(request.node).encode())])


@pytest.fixture(params=["after", "before"])
def pages(request):
    """Memory that ends, or begins, at a page that may not be touched."""
    return Pages(request.param == "after")


@pytest.fixture(scope="session")
def torch():
    """PyTorch, for comparison; the test is skipped where it is not installed.

    On one thread: the processes of pytest fill the cores, and threads of OpenMP wait by spinning.
    """
    module = _peer("torch")
    module.set_num_threads(1)
    return module


@pytest.fixture
def torch_itself(torch):
    """PyTorch's own attention is back in place afterwards."""
    yield torch
    importlib.import_module("sdpa.interop.torch").uninstall()


@pytest.fixture
def calls(monkeypatch):
    """The names of the functions of sdpa that a door calls by their public names."""
    seen = []

    def watched(name, f):
        def call(*args, **options):
            seen.append(name)
            return f(*args, **options)

        return call

    for name in "attention_forward", "attention_backward", "attention_weights":
        monkeypatch.setattr(sdpa, name, watched(name, getattr(sdpa, name)))
    return seen


def _peer(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError:
            pytest.skip(f"needs {name}: pip install '.[peers]'")


@pytest.fixture(scope="session")
def browser():
    """Chromium without a window; the test is skipped where it or playwright is missing."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        program = None
    if program is None:
        pytest.skip("needs playwright and chromium: pip install '.[browser]', make browser")
    with sync_playwright() as playwright:
        # Chromium has no sandbox for root, the usual user of a container; the pages are our own.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        # The sanitizers' library, which `make sanitize` loads first, keeps chromium from starting.
        env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        yield playwright.chromium.launch(executable_path=program, args=arguments, env=env)


@pytest.fixture(params=[(1280, "light"), (390, "dark")], ids=["desktop-light", "phone-dark"])
def context(browser, request):
    """A light desktop window and a dark phone window, without a network."""
    width, scheme = request.param
    context = browser.new_context(
        viewport={"width": width, "height": 844}, color_scheme=scheme, offline=True
    )
    yield context
    context.close()


def _name_without_isa(item):
    isa = getattr(item, "callspec", None) and item.callspec.params.get("isa")
    return re.sub(rf"(?<=[\[-]){isa}(?=[]-])", "", item.nodeid, count=1) if isa else item.nodeid


def pytest_collection_modifyitems(config, items):
    """Leave the tests of one tier, and let the ISAs of a test follow each other: see support/."""
    config.stash[tiers.ALL] = tuple(items)
    items[:] = tiers.drawn(items, config.getoption("tier"))
    left = set(items)
    config.hook.pytest_deselected(items=[x for x in config.stash[tiers.ALL] if x not in left])
    places = {}
    items.sort(key=lambda item: places.setdefault(_name_without_isa(item), len(places)))


def pytest_runtest_logreport(report):
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped.append(report.nodeid)


def pytest_collectreport(report):
    if report.skipped:
        _skipped.append(report.nodeid)


def pytest_sessionfinish(session, exitstatus):
    if _skipped and os.environ.get("SDPA_REQUIRE_ALL") == "1" and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    if _skipped and os.environ.get("SDPA_REQUIRE_ALL") == "1":
        terminalreporter.section("skipped although SDPA_REQUIRE_ALL=1", red=True)
        for name in _skipped:
            terminalreporter.line(name)
