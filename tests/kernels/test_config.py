"""The configuration that sdpa reports, and forcing an ISA."""

import gc
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.calls import message

import sdpa
from sdpa import _core


def test_show_config(capsys):
    config = sdpa.show_config("dicts")
    assert json.loads(json.dumps(config)) == config
    assert list(config) == [
        "version",
        "isa",
        "isas_available",
        "isas_built",
        "threads",
        "cpus",
        "compiler",
        "build_flags",
    ]
    assert config["version"] == sdpa.__version__
    assert config["isas_built"] == list(_core._isas())
    assert config["isas_available"] == [name for name, has in _core._isas().items() if has]
    assert "generic" in config["isas_available"]
    assert config["isa"] in config["isas_available"]
    assert config["threads"] == sdpa.get_num_threads()
    assert "-fno-trapping-math" in config["build_flags"]
    assert "-ffp-contract=off" in config["build_flags"]  # see setup.py
    assert sdpa.show_config() is None
    assert capsys.readouterr().out == "".join(f"{key}: {value}\n" for key, value in config.items())
    assert sdpa.show_config(mode="stdout") is None


def test_use_isa(isa):
    assert sdpa.show_config("dicts")["isa"] == isa
    assert _core._use_isa("generic") == isa
    assert _core._use_isa(isa) == "generic"
    expected = f"name: expected an ISA that this machine has, one of {available()!r} "
    assert message(ValueError, _core._use_isa, "sse9").startswith(expected)
    assert message(TypeError, _core._use_isa, 3) == "name: expected a string, got 3"
    assert sdpa.show_config("dicts")["isa"] == isa


def test_arguments_of_private_functions():
    for call in (
        lambda: _core._use_isa("\ud800"),
        lambda: _core._arrays(**{"\ud800": 1}),
    ):
        with pytest.raises(UnicodeEncodeError):
            call()
    for call in (
        lambda: _core._arrays(1),
        lambda: _core._alloc_fail_after("x"),
        lambda: sdpa.show_config("dicts", "stdout"),
        _core._check_attention,
        _core._check_attention_backward,
    ):
        with pytest.raises(TypeError):
            call()


def test_more_threads_than_there_may_be():
    before = sdpa.get_num_threads()
    sdpa.set_num_threads(10**6)
    most = sdpa.get_num_threads()
    sdpa.set_num_threads(before)
    assert most == 1024


def available():
    return sdpa.show_config("dicts")["isas_available"]


def run(program, **environment):
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )


@pytest.fixture
def environment():
    """The environment in which a child process imports the same sdpa."""
    paths = os.pathsep.join(path or "." for path in sys.path)
    kept = {name: os.environ[name] for name in os.environ if not name.startswith("SDPA_")}
    return kept | {"PYTHONPATH": paths}


def test_best_isa_is_the_default(environment):
    """Pairs of bfloat16 are the last of a list, but not known to be the fastest everywhere."""
    done = run("import sdpa; print(sdpa.show_config('dicts')['isa'])", **environment, SDPA_ISA="")
    names = available()
    if names[-1] == "avx512bf16" and "AuthenticAMD" not in description_of_cpu():
        names.pop()
    if names[-1] == "neonbf16" and sys.platform == "darwin":
        names.pop()
    assert done.stdout.strip() == names[-1], done.stderr


def description_of_cpu():
    file = Path("/proc/cpuinfo")
    return file.read_text() if file.exists() else os.environ.get("PROCESSOR_IDENTIFIER", "")


@pytest.mark.parametrize("name", _core._isas())
def test_forced_isa(environment, name):
    done = run("import sdpa; print(sdpa.show_config('dicts')['isa'])", **environment, SDPA_ISA=name)
    if name in available():
        assert done.stdout.strip() == name, done.stderr
    else:
        assert "ImportError: SDPA_ISA: expected an ISA that this machine has" in done.stderr


def test_unknown_isa_is_refused(environment):
    done = run("import sdpa", **environment, SDPA_ISA="sse9")
    assert done.returncode == 1
    built = list(_core._isas())
    assert done.stderr.strip().splitlines()[-1] == (
        f"ImportError: SDPA_ISA: expected an ISA that this machine has, one of {available()!r} "
        f"(built: {built!r}), got 'sse9'"
    )


def test_import_brings_nothing_but_numpy(environment):
    """Importing takes at most 10 ms, most of it threadpoolctl's where that is installed."""
    program = """import sys, numpy
try: import threadpoolctl
except ImportError: pass
before = set(sys.modules)
import sdpa
print(*sys.modules.keys() - before)"""
    done = run(program, **environment)
    assert "sdpa" in done.stdout.split(), done.stderr
    assert set(done.stdout.split()) <= {"sdpa", "sdpa._core", "sdpa._threads", "atexit"}


def test_import_leaves_a_free_threaded_python_without_its_gil(environment):
    program = """import sys, sysconfig, sdpa
has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
print(has_gil, not sysconfig.get_config_var("Py_GIL_DISABLED"))"""
    done = run(program, **environment)
    has_gil, should = done.stdout.split()
    assert has_gil == should, done.stderr


def imported_again():
    """A second module object."""
    spec = importlib.util.spec_from_file_location("sdpa._core", _core.__file__)
    other = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(other)
    return other


def test_an_overlap_that_numpy_cannot_decide(monkeypatch):
    """Elements that interleave: too hard a problem counts as an overlap, other exceptions pass."""

    def fails(*args):
        raise error

    monkeypatch.setattr(np, "shares_memory", fails)
    core = imported_again()
    x = np.ones((2, 3, 4))
    for error in np.exceptions.TooHardError(), KeyError("other"):
        expected = ValueError if isinstance(error, RuntimeError) else KeyError
        with pytest.raises(expected):
            core.attention(x[0, :, ::2], x[0, :, ::2], x[0, :, ::2], out=x[0, :, 1::2])


def test_a_second_module_object():
    """Each module object has its own state, so a second import works beside the first."""
    other = imported_again()
    x = np.ones((3, 4))
    np.testing.assert_array_equal(other.attention(x, x, x), sdpa.attention(x, x, x))
    assert other.attention_forward(x, x, x)._fields == ("out", "lse")
    assert other.AttentionForward is not sdpa.AttentionForward
    attention = other.attention
    del other
    gc.collect()
    np.testing.assert_array_equal(attention(x, x, x), x)
    np.testing.assert_array_equal(sdpa.attention(x, x, x), x)


def test_a_module_object_takes_its_types_along():
    def types():
        gc.collect()
        found = [x for x in gc.get_objects() if type(x) is type]  # isinstance asks PyTorch's, too
        return sum(x.__name__ == "AttentionForward" for x in found)

    before = types()
    other = imported_again()
    assert types() == before + 1
    del other
    assert types() == before
