"""The instruction sets of src/runtime/isas.inc, for the build, the analysers and the tests."""

import re
from pathlib import Path

LIST = Path(__file__).parents[1] / "src" / "runtime" / "isas.inc"
ROW = re.compile(r'^ISA\((\w+), (\w+), \w+, "([\d,]+)", "(.*)"\)$', re.MULTILINE)


def kernels(machine: str, *, stand_ins: bool = False) -> dict[str, list[str]]:
    """Return {unit: compiler flags} of an architecture's kernels, those of the plainest first.

    With `stand_ins`, those for instruction sets that the machine may lack are among them.
    """
    found = {}
    for name, architecture, types, flags in ROW.findall(LIST.read_text(encoding="utf-8")):
        if architecture in ("any", machine) or (stand_ins and architecture == "test"):
            for bits in types.split(","):
                macros = [f"-DSDPA_ISA={name}", f"-DSDPA_ISA_{name.upper()}", f"-DSDPA_REAL={bits}"]
                found[f"{name}_f{bits}"] = [*flags.split(), *macros]
    return found
