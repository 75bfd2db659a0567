"""Build of the C extension; everything else about the package stands in pyproject.toml.

Each file of src/kernels is compiled for its own instruction set, the rest without any ``-m`` flag,
so that the extension loads on every machine of the architecture and chooses its kernels when
imported.

Environment: ``SDPA_WERROR=1`` makes warnings errors; ``SDPA_SANITIZE=1`` builds with the address
and undefined-behaviour sanitizers.
"""

import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

ISA_FLAGS = {
    "x86_64": {
        "generic": [],
        "avx2": ["-march=x86-64-v3"],
        "avx512": ["-march=x86-64-v4", "-mavx512bf16"],
    },
    "aarch64": {"generic": [], "neon": []},
}
# What of GCC's -O3 the code profits from, by folder: all of it would make the wheel a fifth larger,
# and no faster. Where other kernels exist, the generic one serves CPUs from before 2013 and may be
# a fifth slower for a third of its size. What GCC has scheduled compresses worse and runs no
# faster: CPUs reorder by themselves. Other compilers keep -O3.
GCC_FLAGS = {
    "src": ["-O2"],
    "python": ["-O2"],
    "kernels": ["-O2", "-fno-stack-protector", "-fno-schedule-insns2"],
    "generic": ["-Os", "-fno-stack-protector", "-fno-schedule-insns2", "-fno-thread-jumps"],
}
MACHINE = sysconfig.get_platform().rpartition("-")[2].replace("arm64", "aarch64")
KERNELS = ISA_FLAGS.get(MACHINE, {"generic": []})

# No -ffast-math: at link time it makes the whole process flush subnormal numbers to zero.
FLAGS = ["-std=gnu11", "-O3", "-g0", "-fvisibility=hidden", "-pthread"]
FLAGS += ["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd"]
LINK_FLAGS = ["-pthread"] + (["-s"] if sys.platform.startswith("linux") else [])
VARIANT = "release"
if os.environ.get("SDPA_WERROR") == "1":
    FLAGS += ["-Wall", "-Wextra", "-Werror"]
    VARIANT += "-werror"
SANITIZE = []
if os.environ.get("SDPA_SANITIZE") == "1":
    SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    # Error bounds rest on fused multiply-adds, which GCC's -O1 alone does not make.
    FLAGS += ["-O1", "-fexpensive-optimizations", "-g", "-fno-omit-frame-pointer", *SANITIZE]
    LINK_FLAGS = ["-pthread", *SANITIZE]
    VARIANT += "-sanitize"

GIL_BUILD = not sysconfig.get_config_var("Py_GIL_DISABLED")
NUMPY = "NPY_2_0_API_VERSION"
MACROS = [("NPY_NO_DEPRECATED_API", NUMPY), ("NPY_TARGET_VERSION", NUMPY)]
if GIL_BUILD:
    MACROS += [("Py_LIMITED_API", "0x030B0000")]


def quoted(text):
    """Return `text` as a C string literal."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


class BuildExt(build_ext):
    """build_ext that gives each kernel file its own flags and recompiles only what changed."""

    def build_extension(self, ext):
        """Compile every source of `ext` in parallel, then link."""
        temp = Path(self.build_temp) / VARIANT
        core = [*Path("src").glob("*.h"), Path("setup.py")]
        kernels = [*core, *Path("src/kernels").glob("*.h")]
        binding = [*kernels, *Path("src/python").glob("*.h"), Path("pyproject.toml")]
        version = [
            ("SDPA_VERSION", quoted(self.distribution.get_version())),
            ("SDPA_BUILD_FLAGS", quoted(" ".join(FLAGS))),
        ]
        about = subprocess.run([self.compiler.compiler_so[0], "--version"], capture_output=True)
        tuned = b"Free Software Foundation" in about.stdout and not SANITIZE
        python_includes = [numpy.get_include(), *self.compiler.include_dirs]
        self.compiler.set_include_dirs([])

        def compile_one(source):
            folder, flags, macros, includes = source.parent.name, FLAGS, [], []
            if tuned:
                small = source.stem == "generic" and len(KERNELS) > 1
                flags = [*flags, *GCC_FLAGS["generic" if small else folder]]
                flags += ["-fno-asynchronous-unwind-tables"]
            depends = [*core, Path("src/kernels/kernels.h")]
            if folder == "kernels":
                flags, depends = flags + KERNELS[source.stem], kernels
            elif folder == "python":
                macros, includes, depends = MACROS + version, python_includes, binding
            object_ = self.compiler.object_filenames([str(source)], output_dir=str(temp))[0]
            if self.force or newer_group([str(source), *map(str, depends)], object_):
                self.compiler.compile(
                    [str(source)],
                    output_dir=str(temp),
                    macros=macros,
                    include_dirs=includes,
                    extra_postargs=flags,
                )
            return object_

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            ext.extra_objects = list(pool.map(compile_one, map(Path, ext.sources)))
        # Objects of another variant may be older than a library linked from this one: link always.
        ext.sources, self.force = [], True
        super().build_extension(ext)


setup(
    ext_modules=[
        Extension(
            "sdpa._core",
            # The slowest to compile first.
            sources=[
                *(f"src/kernels/{name}.c" for name in reversed(KERNELS)),
                *sorted(map(str, Path("src").glob("*.c"))),
                *sorted(map(str, Path("src/python").glob("*.c"))),
            ],
            extra_link_args=LINK_FLAGS,
            libraries=["m"],
            py_limited_api=GIL_BUILD,
        )
    ],
    cmdclass={"build_ext": BuildExt},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if GIL_BUILD else {},
)
