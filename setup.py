"""Build of the C extension; everything else about the package is in pyproject.toml.

src/kernels/kernel.c is compiled once for each instruction set and type of src/runtime/isas.inc, all
other files without any ``-m`` flag, so that the extension loads on every machine of the
architecture and chooses its kernels when imported.

Environment: ``SDPA_WERROR=1`` makes warnings errors; ``SDPA_SANITIZE=1`` builds with the address
and undefined-behaviour sanitizers, ``SDPA_SANITIZE=thread`` with that of threads;
``SDPA_COVERAGE=FLAGS`` adds these flags, by which the compiler inserts counters;
``SDPA_STAND_INS=FLAGS`` adds the stand-ins for instruction sets that the machine may lack, which
these flags compile.
"""

import gzip
import os
import re
import runpy
import sys
import sysconfig
import tarfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist
from setuptools.modified import newer_group

WINDOWS = sys.platform == "win32"
# Pyodide's Python, which has no threads.
EMSCRIPTEN = sysconfig.get_platform().startswith("emscripten")
MACHINE = sysconfig.get_platform().rpartition("-")[2]
MACHINE = {"arm64": "aarch64", "amd64": "x86_64"}.get(MACHINE, MACHINE)
if WINDOWS:
    # MSVC has no vector types, and GCC does not align the stack for them on Windows. zig is clang
    # with MinGW's headers and libraries, and comes from the package index.
    zig = f'"{Path(sys.executable).as_posix()}" -m ziglang cc -target {MACHINE}-windows-gnu'
    os.environ.setdefault("CC", zig)


# {unit: flags} of the kernels of this architecture. Build frontends have no path to import from.
STAND_INS = os.environ.get("SDPA_STAND_INS")
KERNELS = runpy.run_path("tools/isas.py")["kernels"](MACHINE, stand_ins=STAND_INS is not None)
if "zig" in os.environ.get("CC", ""):  # which has names of its own
    SPELLED = (("x86-64-v", "x86_64_v"), ("-march=armv8.2-a", "-mcpu=generic+v8_2a"))
    for flags in KERNELS.values():
        for old, new in SPELLED:
            flags[:] = [flag.replace(old, new) for flag in flags]

# Archives must not depend on when and by whom they were built: files get the first second that a
# wheel can represent, and the usual permissions.
os.environ.setdefault("SOURCE_DATE_EPOCH", "315532800")
os.umask(0o022)

# No -ffast-math: at link time it makes the whole process flush subnormal numbers to zero.
# -ffp-contract=off: kernels fuse by vmuladd (vec.h). Left to themselves, compilers fuse copies of
# one function differently, and the bits of a row depend on how it lies in memory.
MACHINE_FLAGS = ["-msimd128"] if EMSCRIPTEN else ["-pthread"]
FLAGS = ["-std=gnu11", "-O2", "-g0", "-fvisibility=hidden", *MACHINE_FLAGS]
FLAGS += ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd"]
LINK_FLAGS = MACHINE_FLAGS + (["-s"] if sys.platform.startswith("linux") else [])
VARIANT = "release"
if os.environ.get("SDPA_WERROR") == "1":
    FLAGS += ["-Wall", "-Wextra", "-Werror"]
    VARIANT += "-werror"
SANITIZE = []
SANITIZERS = {"1": "address,undefined", "thread": "thread"}
if chosen := os.environ.get("SDPA_SANITIZE"):
    SANITIZE = [f"-fsanitize={SANITIZERS[chosen]}", "-fno-sanitize-recover=all"]
    FLAGS += ["-O1", "-g", "-fno-omit-frame-pointer", *SANITIZE]
    FLAGS += ["-DSDPA_ASSERT"]
    LINK_FLAGS = ["-pthread", *SANITIZE]
    VARIANT += f"-sanitize-{chosen}"
if counters := os.environ.get("SDPA_COVERAGE"):
    FLAGS += counters.split()
    LINK_FLAGS = ["-pthread", *counters.split()]
    VARIANT += "-coverage"

if STAND_INS is not None:
    FLAGS += ["-DSDPA_WIDE", "-Wno-psabi"]
    for name in "wide_f32", "wide_f64", "amx_model_f32":
        KERNELS[name] += STAND_INS.split()
    VARIANT += "-stand-ins"

GIL_BUILD = not sysconfig.get_config_var("Py_GIL_DISABLED")
NUMPY = "NPY_2_0_API_VERSION"
MACROS = [("NPY_NO_DEPRECATED_API", NUMPY), ("NPY_TARGET_VERSION", NUMPY)]
if GIL_BUILD:
    MACROS += [("Py_LIMITED_API", "0x030B0000")]


def quoted(text):
    """Return `text` as a C string literal."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def docstrings(paths):
    """Return {name: text} of the blocks of these text files; attention.txt describes the format."""
    blocks = {}
    for path in paths:
        _, *parts = re.split(r"^== (\w+)\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for name, text in zip(parts[::2], parts[1::2], strict=True):
            if name in blocks:
                raise ValueError(f"{path}: a second block '{name}'")
            blocks[name] = text.strip("\n") + "\n"

    def composed(text):
        return re.sub(
            r"^\{([a-z_]+)\}\n", lambda line: composed(blocks[line[1]]), text, flags=re.MULTILINE
        )

    return {name: composed(text) for name, text in blocks.items()}


def write_docstrings(folder):
    """Write docstrings.h, which others include, and docstrings.c with the texts; return its path.

    A changed text changes only the latter, so that nothing else is compiled again.
    """
    blocks = docstrings(sorted(Path("src/python/doc").glob("*.txt")))
    about = "/* Made by setup.py from src/python/doc. */"
    header = [about, *(f"extern const char doc_{name}[];" for name in blocks)]
    source = [about, '#include "docstrings.h"']
    for name, text in blocks.items():
        literals = "\n".join(f"    {quoted(line)}" for line in text.splitlines(keepends=True))
        source.append(f"const char doc_{name}[] =\n{literals};")
    for path, lines in (folder / "docstrings.h", header), (folder / "docstrings.c", source):
        text = "\n".join(lines) + "\n"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    return folder / "docstrings.c"


def dependencies(object_):
    """Return the files that an object was compiled from, which the compiler listed beside it."""
    listed = Path(object_).with_suffix(".d")
    if not listed.exists():
        return []
    _, _, files = listed.read_text(encoding="utf-8").replace("\\\n", " ").partition(": ")
    return [file.replace("\\ ", " ") for file in re.split(r"(?<!\\)\s+", files.strip())]


class Unit(NamedTuple):
    """One compilation."""

    source: Path
    folder: str = ""
    """The object's folder in the build; a source that is compiled more than once needs several."""
    flags: Sequence[str] = ()
    macros: Sequence[tuple[str, str]] = ()
    includes: Sequence[str] = ()


class BuildExt(build_ext):
    """build_ext that compiles the kernels once for each instruction set and type."""

    def build_extension(self, ext):
        """Compile outdated objects, then link."""
        folder = Path(self.build_temp) / VARIANT
        if self.editable_mode:  # for which setuptools makes a new folder each time
            folder = Path(f"build/temp.{self.plat_name}-{sys.implementation.cache_tag}", VARIANT)
        folder.mkdir(parents=True, exist_ok=True)
        # Objects are outdated by another compiler, other flags from outside, another NumPy, too.
        tools, now = folder / "tools.txt", f"{self.compiler.compiler_so} NumPy {numpy.__version__}"
        if not tools.exists() or tools.read_text() != now:
            tools.write_text(now)
        common = ["setup.py", "pyproject.toml", "src/runtime/isas.inc", str(tools)]
        texts = write_docstrings(folder)
        includes = [str(folder), numpy.get_include(), *self.compiler.include_dirs]
        self.compiler.set_include_dirs([])

        def compile_one(unit):
            output = str(folder / unit.folder)
            (object_,) = self.compiler.object_filenames([str(unit.source)], output_dir=output)
            depfile = ["-MMD", "-MF", str(Path(object_).with_suffix(".d"))]
            made_from = dependencies(object_)
            # A header that is gone counts as changed.
            if self.force or not made_from or newer_group([*made_from, *common], object_, "newer"):
                self.compiler.compile(
                    [str(unit.source)],
                    output_dir=output,
                    macros=list(unit.macros),
                    include_dirs=list(unit.includes),
                    extra_postargs=[*FLAGS, *unit.flags, *depfile],
                )
            return object_

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            ext.extra_objects = list(pool.map(compile_one, self.units(includes, texts)))
        # Objects of another variant may be older than a library linked from this one: link always.
        ext.sources, self.force = [], True
        super().build_extension(ext)

    def get_libraries(self, ext):
        """Return what to link with: on Windows the library of the stable ABI, not of one Python."""
        if WINDOWS and GIL_BUILD:
            return [*ext.libraries, "python3"]
        return super().get_libraries(ext)

    def units(self, python_includes, texts):
        """Return all units, the slowest to compile first; `texts` has the docstrings."""
        about = [
            ("SDPA_VERSION", quoted(self.distribution.get_version())),
            ("SDPA_BUILD_FLAGS", quoted(" ".join(FLAGS))),
        ]
        # Some systems' Pythons compile with stack protectors. In the core, which reads no input of
        # unknown size, they cost instructions at every call.
        core = ["-fno-stack-protector"]
        for name, flags in reversed(KERNELS.items()):
            yield Unit(Path("src/kernels/kernel.c"), name, [*flags, *core])
        for folder in "src", "src/runtime":
            for path in sorted(Path(folder).glob("*.c")):
                yield Unit(path, "", core)
        for path in sorted(Path("src/python").glob("*.c")):
            yield Unit(path, "", (), MACROS + about, python_includes)
        yield Unit(texts)


class Sdist(sdist):
    """sdist without clock, owner or umask: equal sources give equal bytes."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, owner=None, group=None):
        """Write the folder `base_dir` as a .tar.gz, whatever `format`; return its path."""
        path, epoch = f"{base_name}.tar.gz", int(os.environ["SOURCE_DATE_EPOCH"])

        def anonymous(entry):
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            entry.mtime = epoch
            entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
            return entry

        with (
            open(path, "wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as stream,
            tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            archive.add(base_dir, filter=anonymous)  # in the order of names
        return path


def description(project, address):
    """Return the README for a package index, where its relative links would lead nowhere.

    The paths are those of GitHub, of which other hosts have the same.
    """

    def absolute(link):
        path = link[1]
        kind = "raw" if path.endswith((".svg", ".png")) else "blob"
        return f"]({address}/{kind}/v{project['version']}/{path})"

    text = Path("README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\((?!https?:|#)([^)]+)\)", absolute, text) if address else text


def metadata():
    """Return what the metadata say by the project's address."""
    told = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    project, address = told["project"], told["tool"]["sdpa"]["address"].rstrip("/")
    links = {
        "Source": address,
        "Issues": f"{address}/issues",
        "Changelog": f"{address}/blob/v{project['version']}/CHANGELOG.md",
    }
    return {
        "long_description": description(project, address),
        "long_description_content_type": "text/markdown",
        "project_urls": links if address else {},
    }


setup(
    **metadata(),
    ext_modules=[
        Extension(
            "sdpa._core",
            sources=[],
            extra_link_args=LINK_FLAGS,
            libraries=["m"],
            py_limited_api=GIL_BUILD,
        )
    ],
    cmdclass={"build_ext": BuildExt, "sdist": Sdist},
    options={
        **({"bdist_wheel": {"py_limited_api": "cp311"}} if GIL_BUILD else {}),
        **({"build_ext": {"compiler": "mingw32"}} if WINDOWS else {}),
        # The clone on Python's path. A finder, the default, loses to any folder named sdpa, such as
        # the clone itself, in the folder where Python starts.
        "editable_wheel": {"mode": "compat"},
    },
)
