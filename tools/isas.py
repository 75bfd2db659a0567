"""The instruction sets of src/runtime/isas.inc, for the build, the analysers and the tests."""

import re
from pathlib import Path

LIST = Path(__file__).parents[1] / "src" / "runtime" / "isas.inc"
ROW = re.compile(r'^ISA\((\w+), (\w+), (\w+), "([\d,]+)", "(.*)"\)$', re.MULTILINE)


def kernels(machine: str, *, stand_ins: bool = False) -> dict[str, list[str]]:
    """Return {unit: compiler flags} of an architecture's kernels, those of the plainest first.

    With `stand_ins`, those for instruction sets that the machine may lack are among them.
    """
    units = [
        (name, base, bits, flags)
        for name, architecture, base, types, flags in ROW.findall(LIST.read_text(encoding="utf-8"))
        if architecture in ("any", machine) or (stand_ins and architecture == "test")
        for bits in types.split(",")
    ]
    shared = {(base, bits) for name, base, bits, _ in units if name != base}
    found = {}
    for name, base, bits, flags in units:
        macros = [f"-DSDPA_ISA={name}", f"-DSDPA_ISA_{name.upper()}", f"-DSDPA_REAL={bits}"]
        macros += [f"-DSDPA_BASE={base}"] if (base, bits) in shared else []
        found[f"{name}_f{bits}"] = [*flags.split(), *macros]
    return found
