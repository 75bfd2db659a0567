"""Compares the stub with the compiled extension, and counts untyped public names: `make types`.

stubtest compares the extension with its stub; every other module holds its types itself, which mypy
checks. pyright then counts the public symbols whose type a user's checker would have to guess, of
which there must be none.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def stubtest() -> bool:
    """Whether the stub agrees with the extension."""
    command = [Path(sys.executable).parent / "stubtest", "sdpa._core"]
    return (
        subprocess.run([*command, "--mypy-config-file", "pyproject.toml"], cwd=ROOT).returncode == 0
    )


def untyped(pyright: str) -> list[str]:
    """Public names without a full type."""
    options = ["--verifytypes", "sdpa", "--ignoreexternal", "--outputjson"]
    command = [pyright, *options, "--pythonpath", sys.executable]
    # An editable installation may lead to the package by code, which pyright does not run.
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE)
    symbols = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    public = [symbol for symbol in symbols if symbol["isExported"]]
    if not public:
        sys.exit(f"pyright has not found the package:\n{done.stdout}")
    missing = [s["name"] for s in public if not s["isTypeKnown"] or s["isTypeAmbiguous"]]
    print(f"{len(public)} public names, {len(missing)} without their full type")
    return sorted(missing)


def main() -> None:
    """Run both; print the names that fail."""
    right = stubtest()
    missing = untyped(sys.argv[1])
    for name in missing:
        print(f"without its full type: {name}")
    sys.exit(not right or bool(missing))


if __name__ == "__main__":
    main()
