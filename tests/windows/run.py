"""Builds the package for Windows and tests it under wine.

``python tests/windows/run.py PLACE [ARGUMENTS OF PYTEST]``: PLACE keeps what is downloaded.

No Windows is needed. CPython's library and modules come from a wheel that carries them, that of
panda3d, its headers and standard library from Debian's source, the rest from the package index.
pip and setup.py run as they do on Windows, but for two things that wine cannot do:

- It cannot run zig. A stand-in for ziglang sends the compiler's arguments to this process, which
  runs the ziglang of this machine.
- It lacks functions of complex numbers that NumPy imports. NumPy gets them from a small library.

Needed are wine, objdump, apt-get and, in this Python, ziglang; `make test-windows` installs the
last and calls this with the folder ``build/windows``.
"""

import json
import os
import re
import shutil
import socketserver
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
VERSION = "3.11"
DLL = "python311"
CARRIER = "panda3d==1.10.16"
PACKAGES = ["numpy", "ml_dtypes", "pytest", "pytest-timeout", "hypothesis", "threadpoolctl", "tqdm"]
PACKAGES += ["colorama", "setuptools>=77.0.3", "pip"]
TARGET = ["-target", "x86_64-windows-gnu"]
TESTS = ["tests/attention", "tests/kernels", "tests/mechanisms", "tests/refusals", "tests/softmax"]


def call(*arguments, **options):
    """Run a program that must succeed; return what it prints."""
    arguments = [str(argument) for argument in arguments]
    return subprocess.run(
        arguments, check=True, stdout=subprocess.PIPE, text=True, **options
    ).stdout


def zig(*arguments, **options):
    """Run the ziglang of this Python."""
    return call(sys.executable, "-m", "ziglang", *arguments, **options)


def fetch_source(place):
    """Return the folder of CPython's source, as Debian has it."""
    folder = place / "source"
    if not folder.exists():
        mirror = re.search(
            r"^Debian (\S+/debian/?)$",
            call("apt-get", "indextargets", "--format", "$(ORIGIN) $(REPO_URI)"),
            re.MULTILINE,
        )[1]
        apt = place / "apt"
        (apt / "lists" / "partial").mkdir(parents=True, exist_ok=True)
        (apt / "source.list").write_text(f"deb-src {mirror} bookworm main\n")
        options = [f"Dir::Etc::sourcelist={apt}/source.list", "Dir::Etc::sourceparts=/dev/null"]
        options = [x for o in [*options, f"Dir::State::lists={apt}/lists"] for x in ("-o", o)]
        call("apt-get", *options, "update")
        call("apt-get", *options, "source", "--download-only", f"python{VERSION}", cwd=apt)
        (archive,) = apt.glob("*.orig.tar.*")
        call("tar", "--extract", "--file", archive, "--directory", apt)
        next(apt.glob("Python-*")).rename(folder)
    return folder


def install(*requirements, folder):
    """Install the wheels for Windows of these requirements into a folder."""
    options = ["--quiet", "--upgrade", "--platform=win_amd64", f"--python-version={VERSION}"]
    options += ["--only-binary=:all:", f"--target={folder}"]
    call(sys.executable, "-m", "pip", "install", *options, *requirements)


def definition(path, library, exports):
    """Write a module definition: {name: what it forwards to, or nothing}."""
    lines = [f"    {name} = {to}" if to else f"    {name}" for name, to in exports.items()]
    path.write_text("\n".join([f"LIBRARY {library}.dll", "EXPORTS", *lines, ""]))
    return path


def make_python(place, source):
    """Put a Python for Windows together; return its folder."""
    root, work = place / "python", place / "work"
    shutil.rmtree(root, ignore_errors=True)
    for folder in (root / "DLLs", root / "libs", work):
        folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source / "Lib", root / "Lib", ignore=shutil.ignore_patterns("test", "idlelib"))
    shutil.copytree(source / "Include", root / "Include")
    shutil.copy(source / "PC" / "pyconfig.h", root / "Include")

    carrier = work / "carrier"
    install("--no-deps", CARRIER, folder=carrier)
    for file in (carrier / "deploy_libs").iterdir():
        if not file.name.startswith("api-ms-win"):
            outside = file.stem in (DLL, "VCRUNTIME140")
            shutil.copy(file, root if outside else root / "DLLs")

    # python3.dll, the stable ABI, forwards to the library of one version.
    exports = re.findall(
        r"^EXPORT_(FUNC|DATA)\((\w+)\)", (source / "PC/python3dll.c").read_text(), re.MULTILINE
    )
    forwards = {name: f"{DLL}.{name}" + " DATA" * (kind == "DATA") for kind, name in exports}
    plain = {name + " DATA" * (kind == "DATA"): "" for kind, name in exports}
    empty = work / "empty.c"
    empty.write_text("int DllMainCRTStartup(void *a, unsigned b, void *c) { return 1; }\n")
    forward = definition(work / "forward.def", "python3", forwards)
    zig("cc", *TARGET, "-shared", "-nostdlib", empty, forward, "-o", root / "python3.dll")
    for library, names in (("python3", plain), (DLL, {"Py_Main": ""})):
        file = definition(work / f"{library}.def", library, names)
        importing = root / "libs" / f"{library}.lib"
        zig("dlltool", "-m", "i386:x86-64", "-d", file, "-D", f"{library}.dll", "-l", importing)
    main = work / "main.c"
    main.write_text(
        "#include <wchar.h>\n"
        "int Py_Main(int argc, wchar_t **argv);\n"
        "int wmain(int argc, wchar_t **argv) { return Py_Main(argc, argv); }\n"
    )
    zig("cc", *TARGET, "-municode", main, root / "libs" / f"{DLL}.lib", "-o", root / "python.exe")
    return root


COMPLEX = """
#include <complex.h>
#include <math.h>
#define PARTS(real, f) \\
    real creal##f##_(real complex z) { return __real__ z; } \\
    real cimag##f##_(real complex z) { return __imag__ z; } \\
    real cabs##f##_(real complex z) { return hypot##f(__real__ z, __imag__ z); } \\
    real carg##f##_(real complex z) { return atan2##f(__imag__ z, __real__ z); } \\
    real complex cexp##f##_(real complex z) { \\
        real complex w; \\
        __real__ w = exp##f(__real__ z) * cos##f(__imag__ z); \\
        __imag__ w = exp##f(__real__ z) * sin##f(__imag__ z); \\
        return w; \\
    }
PARTS(double, )
PARTS(float, f)
"""
OWN = {
    f"{name}{suffix}": f"{name}{suffix.strip('l')}_"
    for name in ("creal", "cimag", "cabs", "carg", "cexp")
    for suffix in ("", "f", "l")  # a long double of Windows is a double
}
MATH = b"api-ms-win-crt-math-l1-1-0.dll\0"


def complete_math(root, work):
    """Build a library of mathematics without wine's gaps, and make NumPy's modules use it."""
    modules = [path for path in root.rglob("*.pyd") if MATH in path.read_bytes()]
    imported = set()
    for module in modules:
        for part in call("objdump", "--private-headers", module).split("DLL Name: ")[1:]:
            if part.lower().startswith(MATH[:-1].decode()):
                imported |= set(re.findall(r"^\s+[0-9a-f]+\s+\d+\s+(\w+)$", part, re.MULTILINE))
    assert imported
    exports = {name: OWN.get(name, f"ucrtbase.{name}") for name in imported}
    source, file = work / "complex.c", definition(work / "math.def", "sdpa-math", exports)
    source.write_text(COMPLEX)
    zig("cc", *TARGET, "-O1", "-shared", source, file, "-o", root / "sdpa-math.dll")
    for module in modules:
        name = b"sdpa-math.dll".ljust(len(MATH), b"\0")
        module.write_bytes(module.read_bytes().replace(MATH, name))


STAND_IN = """
import json, os, socket, sys
server = socket.create_connection(("127.0.0.1", int(os.environ["SDPA_ZIG_PORT"]))).makefile("rw")
print(json.dumps([os.getcwd(), sys.argv[1:]]), file=server, flush=True)
code, text = json.loads(server.readline())
sys.stdout.write(text)
sys.exit(code)
"""


def serve(prefix):
    """Run zig for processes under wine, from a thread; return the server's port."""

    def outside(argument):
        """Return an argument with the path that this machine has for a file of Windows."""
        if argument.startswith("-DSDPA"):
            return argument
        argument = argument.replace("\\", "/").replace("Z:/", "/")
        return argument.replace("C:/", f"{prefix}/drive_c/")

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            folder, arguments = json.loads(self.rfile.readline())
            done = subprocess.run(
                [sys.executable, "-m", "ziglang", *map(outside, arguments)],
                cwd=outside(folder),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            self.wfile.write(json.dumps([done.returncode, done.stdout]).encode() + b"\n")

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_address[1]


def wine(*arguments, **options):
    """Run a program of Windows; return its exit code. wine's Python wants pipes, not files."""
    with subprocess.Popen(
        ["wine", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        **options,
    ) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
    return process.returncode


def main(place, *pytest_arguments):
    """Build and test; return the exit code."""
    place = Path(place).resolve()
    place.mkdir(parents=True, exist_ok=True)
    root = make_python(place, fetch_source(place))
    site = root / "Lib" / "site-packages"
    install(*PACKAGES, folder=site)
    complete_math(root, place / "work")
    (site / "ziglang").mkdir()
    (site / "ziglang" / "__main__.py").write_text(STAND_IN)

    tree = place / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    for name in call("git", "ls-files", cwd=PROJECT).splitlines():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PROJECT / name, tree / name)
    prefix = place / "prefix"
    os.environ |= {"WINEPREFIX": str(prefix), "WINEDEBUG": "-all"}
    os.environ |= {"SDPA_ZIG_PORT": str(serve(prefix)), "SDPA_WERROR": "1"}
    python = root / "python.exe"
    pip = ["-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir=dist", "."]
    if code := wine(python, *pip, cwd=tree):
        return code
    (wheel,) = (tree / "dist").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    # Tests must find the package that is installed.
    for package in ("sdpa", "sdpa_lab"):
        shutil.rmtree(tree / package)
    return wine(python, "-m", "pytest", "-q", *(pytest_arguments or TESTS), cwd=tree)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
