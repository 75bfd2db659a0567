"""Judges a wheel for macOS by the load commands and symbols of its extension.

``python tests/macho.py WHEEL ARCHITECTURE MINIMUM``: MINIMUM is the oldest macOS, such as 11.0.
Prints what is wrong, and fails if anything is. Needed is lief, one of the judges. Whether symbols
of Python are in its stable ABI, abi3audit says.
"""

import re
import sys
import zipfile

import lief

SYSTEM = "/usr/lib/libSystem.B.dylib"
EXPORTS = {"_PyInit__core", "_sdpa_get_num_threads", "_sdpa_set_num_threads"}
LINKERS = {"__mh_dylib_header", "___dso_handle"}
"""What zig's linker exports from every library."""


def oldest(binary):
    """Return the oldest macOS for a binary: 10.14 has another load command than those before."""
    command, version = binary.build_version, binary.version_min
    if command:
        return f"{command.platform.name} {'.'.join(map(str, command.minos[:2]))}"
    return f"MACOS {'.'.join(map(str, version.version[:2]))}" if version else "any system"


def faults(extension, architecture, minimum):
    """Yield what is wrong with the bytes of an extension."""
    binary = lief.MachO.parse(list(extension)).at(0)
    if (found := binary.header.cpu_type.name.lower()) != architecture:
        yield f"made for {found}"
    if (found := oldest(binary)) != f"MACOS {minimum}":
        yield f"made for {found}"
    libraries = [library.name for library in binary.libraries if library.command.name != "ID_DYLIB"]
    if libraries != [SYSTEM]:
        yield f"needs the libraries {libraries}"
    if architecture == "arm64" and not binary.has_code_signature:
        yield "has no signature, which arm64 asks of all code"
    for path in set(re.findall(rb"\0(/[\w.-]+/[\w./-]+)", extension)):
        if path.decode() not in (SYSTEM, "/usr/lib/dyld"):
            yield f"names {path.decode()}"
    exported = {export.symbol.name for export in binary.dyld_info.exports} - LINKERS
    if exported != EXPORTS:
        yield f"exports {sorted(exported)}"
    # The linker has found a symbol in its stub of the system's library, or leaves it to the
    # process, of which only Python's are known to be there.
    for binding in binary.dyld_info.bindings:
        symbol = binding.symbol.name
        if not binding.has_library and not re.match("__?Py", symbol):
            yield f"imports {symbol}, which neither Python nor the system has"


def main(path, architecture, minimum):
    """Print the faults of a wheel; return their number."""
    lief.logging.disable()  # it asks symbols for data that functions do not have
    with zipfile.ZipFile(path) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".so")]
        found = list(faults(wheel.read(name), architecture, minimum))
    tag = f"-macosx_{minimum.replace('.', '_')}_{architecture}.whl"
    if not path.endswith(tag):
        found.append(f"its wheel's name does not end in {tag}")
    print(f"{name}, {architecture}, macOS {minimum}: {len(found)} faults", *found, sep="\n  ")
    return len(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) > 0)
