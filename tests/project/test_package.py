"""The Python package: public names, cost of the import, layers of the modules."""

import ast
import graphlib
import importlib
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import sdpa
import sdpa_lab

PACKAGE, LABORATORY = (Path(package.__file__).parent for package in (sdpa, sdpa_lab))


def run(code):
    """The output of a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_importing_loads_only_the_extension():
    code = "import sys, sdpa; print(*(name for name in sys.modules if name.startswith('sdpa')))"
    assert set(run(code)) == {"sdpa", "sdpa._core", "sdpa._threads"}


@pytest.mark.parametrize(
    ("name", "module"),
    [("rotary_embedding", "rotary"), ("cosine_attention", "cosine"), ("ShawGradients", "shaw")],
)
def test_a_name_loads_its_own_mechanism(name, module):
    code = (
        f"import sys; from sdpa import {name}; "
        "print(*(name for name in sys.modules if name.startswith('sdpa.mechanisms.')))"
    )
    public = {name for name in run(code) if not name.startswith("sdpa.mechanisms._")}
    assert public == {f"sdpa.mechanisms.{module}"}


@pytest.mark.parametrize("name", sdpa.__all__)
def test_public_names(name):
    found = getattr(sdpa, name)
    assert name in dir(sdpa)
    assert getattr(sdpa, name) is found


def test_the_directory_is_the_public_names_alone():
    assert dir(sdpa) == sdpa.__all__


MODULES = ("bias", "blocks", "interop", "plot", "reference")


@pytest.mark.parametrize("name", MODULES)
def test_a_module_resolves_at_its_first_use(name):
    assert name in sdpa.__all__
    assert run(f"import sdpa; print(sdpa.{name}.__name__)") == [f"sdpa.{name}"]


def test_modules_load_nothing_but_numpy():
    code = f"""if True:
        import sys, numpy, sdpa
        known = {{name.partition(".")[0] for name in sys.modules}}
        for name in {MODULES}:
            getattr(sdpa, name)
        found = {{name.partition(".")[0] for name in sys.modules}} - known - sys.stdlib_module_names
        print(*found, "sdpa.interop.torch" in sys.modules)
    """
    assert run(code) == ["False"]


DOORS = sorted(path.stem for path in (PACKAGE / "interop").iterdir() if path.stem[0] != "_")


def test_doors_are_known_but_not_opened():
    code = "import sys, sdpa; print(*dir(sdpa.interop), len(sys.modules)); "
    *names, before = run(code)
    assert names == DOORS == sdpa.interop.__all__
    assert run(code + "import sdpa.interop; print(len(sys.modules))")[-1] == before


def test_a_door_resolves_at_its_first_use():
    pytest.importorskip("autograd")
    code = "import sdpa; print(sdpa.interop.autograd.__name__)"
    assert run(code) == ["sdpa.interop.autograd"]


def test_a_door_without_its_library_says_what_it_needs():
    code = f"""if True:
        import sys, sdpa
        sys.modules |= dict.fromkeys({DOORS})
        for name in {DOORS}:
            try:
                getattr(sdpa.interop, name)
            except ImportError as error:
                print(str(error).partition(" needs ")[0])
    """
    assert run(code) == [f"sdpa.interop.{name}" for name in DOORS]


def test_lazy_names_are_public_names_of_their_modules():
    assert set(sdpa._LAZY) <= set(sdpa.__all__)
    for name, module in sdpa._LAZY.items():
        assert getattr(sdpa, name).__module__ == "sdpa"
        assert name in sys.modules[module].__all__


@pytest.mark.parametrize(
    "name", [name for name in sdpa.__all__ if isinstance(getattr(sdpa, name), type)]
)
def test_classes_can_be_pickled(name):
    found = getattr(sdpa, name)
    assert pickle.loads(pickle.dumps(found)) is found


FUNCTIONS = [name for name in sdpa.__all__ if isinstance(getattr(sdpa, name), Callable)]
SUBMODULES = ["bias", "blocks", "interop", "plot", "reference", *(f"interop.{x}" for x in DOORS)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_pickles_do_not_hold_where_a_name_is_defined(name):
    found = getattr(sdpa, name)
    assert found.__module__ == "sdpa"
    text = pickle.dumps(found)
    assert pickle.loads(text) is found
    assert b"sdpa." not in text


def test_pickles_of_objects_hold_public_names_alone():
    x = np.ones((2, 1, 3, 4), np.float32)
    cache, layer = sdpa.KVCache(2, 1, 4, capacity=5), sdpa.MultiHeadAttention(4, 2, rng=0)
    cache.append(x, x)
    gradients = sdpa.cosine_attention_backward(x, x, x, x, *sdpa.cosine_attention_forward(x, x, x))
    view = sdpa.plot.view(np.ones((1, 2, 2)))
    for given in cache, layer, gradients, view:
        text = pickle.dumps(given)
        assert type(pickle.loads(text)) is type(given)
        assert re.search(rb"sdpa\.(_|mechanisms|plot\._)", text) is None
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(cache)).key, cache.key)
    same = pickle.loads(pickle.dumps(layer))(x[0, 0])
    np.testing.assert_array_equal(same, layer(x[0, 0]))


@pytest.mark.parametrize("name", SUBMODULES)
def test_modules_list_their_public_names(name):
    """`dir` and completion show them alone; each but the oracle's says the module that users know.

    The oracle imports nothing, and its names are no contract.
    """
    try:
        module = importlib.import_module(f"sdpa.{name}")
    except ImportError as error:
        pytest.skip(str(error))
    assert dir(module) == sorted(module.__all__)
    # The doors in `interop` are modules, some of which need their peer.
    for public in module.__all__ if name not in ("reference", "interop") else ():
        found = getattr(getattr(module, public), "__module__", None)
        assert found is None or not found.startswith(f"{module.__name__}.")


@pytest.mark.parametrize("module", [sdpa, sdpa.interop], ids=["sdpa", "interop"])
def test_unknown_name(module):
    expected = f"^module '{module.__name__}' has no attribute 'atention'$"
    with pytest.raises(AttributeError, match=expected):
        module.atention  # noqa: B018


def imported_by(path, root=PACKAGE.parent):
    """Full names of all modules, or of names in modules, that a file below `root` imports."""
    package = path.relative_to(root).parent.parts
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def test_imports_are_read_whatever_their_form(tmp_path):
    path = tmp_path / "sdpa" / "lab" / "module.py"
    path.parent.mkdir(parents=True)
    path.write_text("import a.b\nfrom .. import c\nfrom ..d import e\nfrom . import f\n")
    assert imported_by(path, tmp_path) >= {"a.b", "sdpa.c", "sdpa.d.e", "sdpa.lab.f"}


def test_nothing_else_imports_the_oracle():
    """The tests compare the package with `sdpa.reference`, which therefore shares no code with it.

    `sdpa` names it, so that checkers of types know `sdpa.reference`; no other module needs an
    exception: the laboratory measures the product, not the oracle.
    """
    oracle = PACKAGE / "reference"
    users = {
        path
        for package in (PACKAGE, LABORATORY)
        for path in package.rglob("*.py")
        if oracle not in path.parents
        and any(f"{name}.".startswith("sdpa.reference.") for name in imported_by(path))
    }
    assert users == {PACKAGE / "__init__.py"}


def test_the_oracle_imports_only_itself():
    outside = {
        name
        for path in (PACKAGE / "reference").glob("*.py")
        for name in imported_by(path)
        if f"{name}.".startswith("sdpa.") and not name.startswith("sdpa.reference")
    }
    assert outside == set()


# --------------------------------------------------------------------------- layers

# For each part of the package those that it may import; "base" are the modules in sdpa/ whose
# names begin with an underscore, with the extension.
MAY_IMPORT = {
    "base": {"base"},
    "bias": {"base"},
    "blocks": {"base"},
    "mechanisms": {"base", "mechanisms"},
    "plot": {"base", "plot"},
    "sdpa": {"base", "bias", "blocks", "mechanisms", "interop", "plot", "reference"},
    "interop": {"base", "bias", "blocks", "mechanisms", "sdpa", "interop"},
    "reference": {"reference"},
    "__main__": set(),
}


def part(module):
    _, _, name = module.partition(".")
    name = name.partition(".")[0] or module
    return "base" if name.startswith("_") and name != "__main__" else name


def arrows():
    """{module: the modules of the package that it imports}"""
    names = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    known = {*names, "sdpa._core"}

    def module(name):
        while name and name not in known:
            name = name.rpartition(".")[0]
        return name

    # A function whose code another module's function gets imports its own module.
    return {name: {*map(module, imported_by(path))} - {"", name} for name, path in names.items()}


def test_no_import_runs_back_up():
    found = {
        (name, imported)
        for name, modules in arrows().items()
        for imported in modules
        if part(imported) not in MAY_IMPORT[part(name)]
    }
    assert found == set()


def test_no_modules_import_each_other():
    order = list(graphlib.TopologicalSorter(arrows()).static_order())
    assert order.index("sdpa._core") < order.index("sdpa._arguments") < order.index("sdpa")
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(arrows() | {"sdpa._arrays": {"sdpa._cache"}}).prepare()


# --------------------------------------------------------------------------- the laboratory


def of_laboratory(names):
    return {name for name in names if name.partition(".")[0] == "sdpa_lab"}


def test_only_the_command_imports_the_laboratory():
    """`python -m sdpa` runs it; no other module of the package names it in an import."""
    users = {p for p in PACKAGE.rglob("*.py") if of_laboratory(imported_by(p))}
    assert users == {PACKAGE / "__main__.py"}


def test_nothing_loads_the_laboratory():
    """Not even the module of the command, of which a part must run."""
    code = """if True:
        import importlib, sys, sdpa
        for name in sdpa.__all__:
            getattr(sdpa, name)
        for name in "__main__", "_options", "_stream", "reference":
            importlib.import_module(f"sdpa.{name}")
        print(*(name for name in sys.modules if name.startswith("sdpa")))
    """
    loaded = set(run(code))
    assert loaded > {"sdpa.__main__", "sdpa.bias", "sdpa.reference"}
    assert of_laboratory(loaded) == set()


def test_tests_of_the_library_do_without_the_laboratory():
    """Its own tests, those of the project, and those of the programs that use it may import it."""
    folder = Path(__file__).parents[1]
    others = ("lab", "project", "examples")
    files = {path: path.relative_to(folder) for path in folder.rglob("*.py")}
    imported = {name: imported_by(path, folder) for path, name in files.items()}
    users = {name.as_posix() for name in imported if of_laboratory(imported[name])}
    helpers = {"support/claims.py", "support/examples.py"}
    assert {name for name in users if not name.startswith(others)} == helpers
    modules = tuple(name.removesuffix("py").replace("/", ".") for name in helpers)
    helped = {
        file.as_posix()
        for file, names in imported.items()
        if any(name.startswith(modules) for name in names)
    }
    assert helped
    assert {name for name in helped if not name.startswith(others)} == set()


@pytest.mark.parametrize("command", [["-c", "import sdpa"], ["-m", "sdpa"]])
def test_a_clone_that_hides_the_installed_package_says_so(tmp_path, command):
    """Python searches the folder that it is started in first, where a clone has no extension."""
    shutil.copytree(PACKAGE, tmp_path / "sdpa", ignore=shutil.ignore_patterns("_core*.so"))
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    found = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert found.returncode != 0
    assert f"sdpa: expected the extension _core in {tmp_path / 'sdpa'}, got none" in found.stderr
    assert "pip install --editable ." in found.stderr
