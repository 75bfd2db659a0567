"""The build: symbols, instructions, wheel and sdist."""

import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import numpy
import pytest
from support import tiers

from sdpa import _core

ROOT = Path(__file__).parents[2]


KERNELS = list(runpy.run_path(str(ROOT / "tools/isas.py"))["kernels"](platform.machine()))
x86_64_only = pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86-64 instructions")


def run(*command, cwd=None):
    """Standard output of a command, without what this process or its core may have been given."""
    ours = {"LD_PRELOAD", "PYTHONPATH", "SDPA_WERROR", "SDPA_SANITIZE", "SDPA_COVERAGE"}
    env = {key: value for key, value in os.environ.items() if key not in ours}
    done = subprocess.run(command, cwd=cwd, env=env, text=True, capture_output=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


class Built:
    """The sdist, the wheel built from it, and the directory where that happened."""

    build_sdist = "from setuptools.build_meta import build_sdist; build_sdist('..')"

    def __init__(self, folder):
        copy = folder / "copy"
        copy.mkdir()
        ignore = shutil.ignore_patterns("__pycache__", "*.so")
        for name in ("src", "sdpa", "sdpa_lab", "tests", "tools"):
            shutil.copytree(ROOT / name, copy / name, ignore=ignore)
        for path in ROOT.iterdir():
            if path.is_file():
                shutil.copy(path, copy)
        run(sys.executable, "-c", self.build_sdist, cwd=copy)
        (self.sdist,) = folder.glob("*.tar.gz")
        with tarfile.open(self.sdist) as archive:
            # The parameter of this name is younger than some Pythons 3.11.
            archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
            archive.extractall(folder)
        self.tree = folder / self.sdist.name.removesuffix(".tar.gz")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        options = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", "."]
        run(*pip, "wheel", *options, self.tree, cwd=folder)
        (self.wheel,) = folder.glob("*.whl")
        (self.objects,) = self.tree.glob("build/temp*/release")
        with zipfile.ZipFile(self.wheel) as archive:
            self.names = archive.namelist()
            (name,) = [name for name in self.names if name.endswith(".so")]
            self.extension = Path(archive.extract(name, folder / "unpacked"))

    def sdist_again(self):
        """The sdist of a copy made later, by someone with other permissions."""
        copy, before = self.sdist.parent / "later" / "copy", os.umask(0o077)
        shutil.copytree(self.sdist.parent / "copy", copy)
        for path in copy.rglob("*"):
            path.chmod(path.stat().st_mode & 0o700)
        run(sys.executable, "-c", self.build_sdist, cwd=copy)
        os.umask(before)
        (found,) = copy.parent.glob("*.tar.gz")
        return found

    def kernel(self, name):
        """The object of the kernels of one instruction set and type."""
        return self.objects / name / "src/kernels/kernel.o"


@pytest.fixture(scope="module", params=tiers.SLOW)
def built(tmp_path_factory):
    return Built(tmp_path_factory.mktemp("built"))


def functions(path):
    """Name and instructions of each function of an object: (address, text) pairs."""
    listing = run("objdump", "--disassemble", "--no-show-raw-insn", path)
    for part in re.split(r"\n(?=[0-9a-f]+ <)", listing):
        head, *lines = part.splitlines()
        name = re.search(r"<(.*)>:", head)
        if name:
            found = (re.match(r" *([0-9a-f]+):\t(.*)", line) for line in lines)
            yield name[1], [(int(m[1], 16), m[2]) for m in found if m]


def hot_loops(instructions):
    """Instructions of each innermost loop, found by its conditional jump back."""
    spans = []
    for address, text in instructions:
        jump = re.match(r"j(?!mp)\w+ +([0-9a-f]+) ", text)
        if jump and int(jump[1], 16) <= address:
            spans.append((int(jump[1], 16), address))
    for begin, end in spans:
        others = [span for span in spans if span != (begin, end)]
        inside = any(begin <= b and e <= end for b, e in others)
        if not inside:
            yield [text for address, text in instructions if begin <= address <= end]


# ------------------------------------------------------------------------------------ symbols


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_object_exports_its_table_and_what_other_sets_share_with_it(built, name):
    symbols = run("nm", "--extern-only", "--defined-only", built.kernel(name))
    table, *shared = sorted(line.split()[-1] for line in symbols.splitlines())
    assert table == f"sdpa_{name}"
    assert all(symbol.startswith(f"{table}_") for symbol in shared)
    assert bool(shared) == (name == "avx512_f32")


def test_every_kernel_was_built(built):
    assert {path.parts[-4] for path in built.objects.rglob("kernel.o")} == set(KERNELS)


def test_a_changed_docstring_compiles_one_file_and_a_changed_header_its_users(built, tmp_path):
    """Whatever is compiled again replaces an object, so that its time changes."""

    def recompiled(path, old, new):
        before = {path: path.stat().st_mtime_ns for path in objects.rglob("*.o")}
        path.write_text(path.read_text().replace(old, new))
        run(sys.executable, "setup.py", "build_ext", cwd=tree)
        return {p.stem for p, time in before.items() if p.stat().st_mtime_ns != time}

    tree = tmp_path / "tree"
    shutil.copytree(built.tree, tree)
    (objects,) = tree.glob("build/temp*/release")
    for path in objects.rglob("*.d"):  # they name the files of the first tree, if in full
        assert str(built.tree) not in path.read_text()
    text, header = tree / "src/python/doc/softmax.txt", tree / "src/python/docstring.h"
    assert recompiled(text, "Softmax", "The softmax") == {"docstrings"}
    assert recompiled(header, "/* Functions", "/* The functions") == {
        path.stem for path in (tree / "src/python").glob("*.c") if "docstring.h" in path.read_text()
    }


def test_the_extension_exports_its_init_and_the_number_of_threads(built):
    symbols = run("nm", "--dynamic", "--extern-only", "--defined-only", built.extension)
    names = {line.split()[-1] for line in symbols.splitlines()}
    assert names == {"PyInit__core", "sdpa_get_num_threads", "sdpa_set_num_threads"}


def test_the_extension_needs_the_c_library_alone(built):
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "--dynamic", built.extension))
    assert all(re.match(r"lib(c|m|pthread)\.so|ld-linux", name) for name in needed), needed


@x86_64_only
def test_the_compiler_keeps_the_prefetches(built):
    """GCC drops calls of functions that do nothing else; no result shows it."""
    (path,) = built.objects.rglob("fetch.o")
    assert "prefetch" in run("objdump", "--disassemble", path)
    users = [name for name in KERNELS if name.startswith("avx")]
    kernels = [run("nm", "--undefined-only", built.kernel(name)) for name in users]
    assert [name for name, text in zip(users, kernels, strict=True) if "sdpa_fetch_" in text] == [
        name for name in users if name != "avx512bf16_f32"
    ]


def test_instruction_sets_are_those_listed():
    names = dict.fromkeys(name.rpartition("_f")[0] for name in KERNELS)
    assert list(names) == list(_core._isas())


# ------------------------------------------------------------------------------------ sources

DEFINITION = re.compile(
    r"^(?:(?:static|inline|INLINE|NOINLINE|COLD) )+"  # what every function of a header begins with
    r"[^;={}()]*?\b(\w+)\(([^;{}]*)\) \{",
    re.MULTILINE,
)


def kernel_functions():
    """Name and file of each function that the headers of the kernels define."""
    for path in sorted((ROOT / "src/kernels").rglob("*.h")):
        for name, _ in DEFINITION.findall(path.read_text()):
            yield name, path.name


def test_a_function_of_the_kernels_has_one_home():
    """Alternatives between #if and #else share it; each instruction set has its own operations."""
    homes = {}
    for name, file in kernel_functions():
        homes.setdefault(name, set()).add(file)
    assert len(homes) > 250
    operations = {
        name for name, files in homes.items() if any(file.startswith("vec_") for file in files)
    }
    shared = {name: files for name, files in homes.items() if len(files) > 1}
    assert not {name: files for name, files in shared.items() if name not in operations}
    # For instruction sets that lack them, vec.h and convert.h do these in plain C.
    lacking = {name for name in operations if homes[name] & {"vec.h", "convert.h"}}
    assert lacking <= {
        *("vdot", "vpair", "vmul_finite", "vmuladd_lane"),
        *("widen_f16", "narrow_f16", "vwiden_f16", "vwiden_bf16"),
    }
    for name in operations:
        others = {file for file in homes[name] if not file.startswith("vec_")}
        assert others <= {"vec.h", "convert.h"}, name


def test_no_macro_names_a_function_of_the_kernels():
    for path in sorted((ROOT / "src/kernels").rglob("*.[ch]")):
        macros = re.findall(r"^#define (\w+)", path.read_text(), re.MULTILINE)
        named = {name for name, file in kernel_functions() if file == path.name} & set(macros)
        assert not named, f"{path.name}: {named}"
        # A macro that defines functions of pasted names hides them from every index.
        bodies = re.findall(r"^#define (?:.*\\\n)*.*", path.read_text(), re.MULTILINE)
        hidden = [body for body in bodies if re.search(r"\w##\w*\([^)]*\)[\s\\]*\{", body)]
        assert not hidden, f"{path.name}: {hidden}"


# ------------------------------------------------------------------------------- instructions


@x86_64_only
def test_baseline_objects_run_on_every_x86_64(built):
    wide = {built.kernel(name) for name in KERNELS if not name.startswith("generic")}
    objects = [path for path in built.objects.rglob("*.o") if path not in wide]
    assert {"parallel", "module", "kernel"} <= {path.stem for path in objects}
    for path in objects:
        for function, instructions in functions(path):
            for _, text in instructions:
                # All AVX instructions, and they alone, start with v; verr and verw aside.
                avx = re.search(r"%[yz]mm|^v(?!err|erw)", text)
                assert not avx, f"{path.name}: {function}: {text}"


@x86_64_only
@pytest.mark.parametrize(("name", "register"), [("avx2", "%ymm"), ("avx512", "%zmm")])
@pytest.mark.parametrize(("bits", "suffix"), [(32, "ps"), (64, "pd")])
def test_products_of_tiles_are_fused_and_keep_to_registers(built, name, register, bits, suffix):
    n_loops = 0
    for function, instructions in functions(built.kernel(f"{name}_f{bits}")):
        if not re.match(r"score_(?!panel|product)|gemm_\d", function):
            continue
        frame = any(re.match(r"mov +%rsp,%rbp", text) for _, text in instructions)
        stack = re.compile(r"\(%r[sb]p" if frame else r"\(%rsp")
        for loop in hot_loops(instructions):
            n_fma = sum(bool(re.match(rf"vfn?m\w+{suffix} .*{register}", text)) for text in loop)
            if n_fma < 8 or n_fma < len(loop) / 3:
                continue  # what is done to a finished tile
            if any(text.startswith("vscalef") for text in loop):
                continue  # exponentials of a finished tile, in float64 FMAs for the most part
            n_loops += 1
            spilled = [text for text in loop if register in text and stack.search(text)]
            assert not spilled, f"{function}: {n_fma} FMAs, {spilled}"
            separate = [text for text in loop if re.match(rf"v(mul|add|sub){suffix} ", text)]
            assert not separate, f"{function}: {n_fma} FMAs, {separate}"
    # Panels of scores in seven modes, and at least five products.
    assert n_loops >= 10, f"{name}: {n_loops} such loops in {suffix}"


STATE = """
#include <xmmintrin.h>
unsigned state(void) { return _mm_getcsr() & ~_MM_EXCEPT_MASK; }
"""


@x86_64_only
def test_loading_leaves_the_mode_of_floating_point(built, tmp_path):
    """As -ffast-math would not: it links code that flushes subnormal numbers from then on."""
    (tmp_path / "state.c").write_text(STATE)
    run("gcc", "-shared", "-fPIC", tmp_path / "state.c", "-o", tmp_path / "state.so")
    program = f"""
import ctypes
state = ctypes.CDLL({str(tmp_path / "state.so")!r}).state
before = state()
ctypes.PyDLL({str(built.extension)!r})
print(before == state())
"""
    assert run(sys.executable, "-c", program).strip() == "True"


def test_subnormals_survive_import():
    program = """
        import threading, numpy as np

        def check():
            for dtype, bits in (np.float32, np.uint32), (np.float64, np.uint64):
                tiny = np.array([1], bits).view(dtype)
                normal = np.array([np.finfo(dtype).tiny])
                for result in tiny * 1, tiny + tiny, normal / 2:
                    assert result[0] > 0, dtype

        check()
        import sdpa
        check()
        x = np.ones((8, 400, 32), np.float32)
        sdpa.attention(x, x, x, workers=3)
        check()
        thread = threading.Thread(target=check)
        thread.start()
        thread.join()
        print("survived")
    """
    assert run(sys.executable, "-c", dedented(program)) == "survived\n"


def dedented(program):
    lines = program.strip("\n").splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join(line[indent:] for line in lines)


# ------------------------------------------------------------------------------------ archives


def test_extension_and_library_take_less_than_a_megabyte_and_a_half(built):
    """Compressed, without the laboratory; pytest -rP shows the parts."""
    parts = dict.fromkeys(("extension", "library", "laboratory"), 0)
    with zipfile.ZipFile(built.wheel) as archive:
        for entry in archive.infolist():
            extension = entry.filename == f"sdpa/{built.extension.name}"
            laboratory = entry.filename.startswith("sdpa_lab/")
            part = "extension" if extension else "laboratory" if laboratory else "library"
            parts[part] += entry.compress_size
    print(", ".join(f"{part} {size / 1000:.0f} kB" for part, size in parts.items()))
    assert all(parts.values())
    assert parts["extension"] + parts["library"] < 1_500_000


def test_the_wheel_is_stripped_and_for_every_python(built):
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        assert "-cp311-abi3-" in built.wheel.name
        assert built.extension.name == "_core.abi3.so"
    sections = run("readelf", "--sections", "--wide", built.extension)
    assert ".debug" not in sections
    assert ".symtab" not in sections


def test_contents_of_the_wheel(built):
    files = {
        str(path.relative_to(ROOT))
        for package in ("sdpa", "sdpa_lab")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".so")
    }
    assert "sdpa/py.typed" in files
    names = {name for name in built.names if ".dist-info/" not in name}
    assert names == files | {f"sdpa/{built.extension.name}"}
    with zipfile.ZipFile(built.wheel) as archive:
        (name,) = [name for name in built.names if name.endswith("/METADATA")]
        metadata = archive.read(name).decode()
    assert "License-Expression: MIT" in metadata
    assert "Requires-Python: >=3.11" in metadata
    required = re.findall("^Requires-Dist: (.*)$", metadata, re.MULTILINE)
    assert [line for line in required if "extra ==" not in line] == ["numpy>=2.0"]
    assert {"test", "lab", "peers"} <= set(
        re.findall("^Provides-Extra: (.*)$", metadata, re.MULTILINE)
    )
    assert any(name.endswith("/licenses/LICENSE") for name in built.names)


def metadata(built, folder, address):
    """The metadata of a copy of the sdist with this address."""
    tree = folder / f"at{len(address)}"
    shutil.copytree(built.tree, tree, ignore=shutil.ignore_patterns("build", "*.so"))
    project = tree / "pyproject.toml"
    text, changed = re.subn(
        r'^address = ".*"$', f'address = "{address}"', project.read_text(), flags=re.MULTILINE
    )
    assert changed == 1
    project.write_text(text)
    call = "from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel('.')"
    run(sys.executable, "-c", call, cwd=tree)
    (found,) = tree.glob("*.dist-info/METADATA")
    return found.read_text(encoding="utf-8")


def test_links_of_the_metadata_come_from_the_address_alone(built, tmp_path):
    inside = r"\]\((?!https?:|#)"  # links within the page stay
    without = metadata(built, tmp_path, "")
    assert "Project-URL" not in without
    links = len(re.findall(inside, without))
    assert links > 10
    at = metadata(built, tmp_path, "https://example.org/a/sdpa/")
    assert "Project-URL: Source, https://example.org/a/sdpa\n" in at
    assert at.count("https://example.org/a/sdpa/") == links + 2, "Issues, Changelog and the README"
    assert not re.search(inside, at)
    version = re.search("^Version: (.*)$", at, re.MULTILINE)[1]
    assert f"](https://example.org/a/sdpa/blob/v{version}/docs/api.md)" in at
    assert re.search(r"\]\(https://example.org/a/sdpa/raw/.*\.svg\)", at)


def test_contents_of_the_sdist(built):
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = [path for path in (ROOT / "src").rglob("*") if path.is_file()]
    tracked += [*(ROOT / "tests").rglob("*.py"), *(ROOT / "tools").glob("*.py")]
    tracked += [*(ROOT / "tests/c").glob("*.[ch]"), ROOT / "tests/c/Makefile", ROOT / "Makefile"]
    missing = {str(path.relative_to(ROOT)) for path in tracked} - names
    assert not missing
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc"))]


def test_equal_sources_give_equal_sdists(built):
    """Two equal sdists. `make release-check` compares two wheels, which take minutes."""
    assert built.sdist_again().read_bytes() == built.sdist.read_bytes()


def test_archives_tell_no_time_and_no_owner(built):
    with tarfile.open(built.sdist) as archive:
        told = {(entry.mtime, entry.uid, entry.gid, entry.uname) for entry in archive}
    assert told == {(315532800, 0, 0, "")}
    with zipfile.ZipFile(built.wheel) as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


class Environment:
    """Python without packages but those of this one, so that no test needs the network."""

    def __init__(self, folder):
        venv.create(folder)
        self.python = folder / "bin" / "python"
        find = "import sysconfig; print(sysconfig.get_path('purelib'))"
        self.packages = run(self.python, "-c", find).strip()
        Path(self.packages, "ours.pth").write_text(str(Path(numpy.__file__).parents[1]))

    def install(self, *what):
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python]
        run(*pip, "install", "--no-deps", "--no-index", "--no-build-isolation", *what)


def test_an_editable_installation_is_found_from_a_folder_above_the_clone(built, tmp_path):
    """There the clone looks like a namespace package, to which a finder of setuptools loses."""
    clone = tmp_path / "sdpa"
    shutil.copytree(built.tree, clone)
    environment = Environment(tmp_path / "venv")
    environment.install("--editable", clone)
    for folder in tmp_path, clone, clone / "tests":
        file = run(environment.python, "-c", "import sdpa; print(sdpa.attention and sdpa.__file__)",
                   cwd=folder).strip()  # fmt: skip
        assert Path(file) == clone / "sdpa/__init__.py"


def test_the_wheel_installs_and_works_in_an_environment_of_its_own(built, tmp_path):
    environment = Environment(tmp_path / "venv")
    environment.install(built.wheel)
    program = """
        import numpy as np, sdpa
        x = np.eye(3)
        print(sdpa.__version__, sdpa.__file__, np.allclose(sdpa.attention(x, x, x).sum(-1), 1))
    """
    python = environment.python
    version, file, right = run(python, "-c", dedented(program), cwd=tmp_path).split()
    assert version == built.wheel.name.split("-")[1]
    assert file.startswith(environment.packages)
    assert right == "True"
