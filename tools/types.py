"""Compares the stub with the compiled extension, and counts untyped public names: `make types`.

stubtest compares the extension with its stub; mypy checks the types in all other modules. pyright
then counts the public symbols whose type a user's checker would have to guess.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
UNTYPED = {
    "sdpa.reference": "the oracle is read: shapes stand in its comments",
    "sdpa.interop.onnx": "its base classes are those of onnx, which has no types",
}


def stubtest() -> bool:
    """Whether the stub agrees with the extension."""
    command = [Path(sys.executable).parent / "stubtest", "sdpa._core"]
    return (
        subprocess.run([*command, "--mypy-config-file", "pyproject.toml"], cwd=ROOT).returncode == 0
    )


def untyped(pyright: str) -> list[str]:
    """Public names without a full type, outside the modules of UNTYPED."""
    options = ["--verifytypes", "sdpa", "--ignoreexternal", "--outputjson"]
    command = [pyright, *options, "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE)
    symbols = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    public = [symbol for symbol in symbols if symbol["isExported"]]
    open_ones = [s["name"] for s in public if not s["isTypeKnown"] or s["isTypeAmbiguous"]]
    excused = [name for name in open_ones if f"{name}.".startswith(tuple(f"{m}." for m in UNTYPED))]
    print(f"{len(public)} public names, {len(public) - len(open_ones)} with their full type,")
    print(f"{len(excused)} in modules that have none: {UNTYPED}")
    return sorted(set(open_ones) - set(excused))


def main() -> None:
    """Run both; print the names that fail."""
    right = stubtest()
    missing = untyped(sys.argv[1])
    for name in missing:
        print(f"without its full type: {name}")
    sys.exit(not right or bool(missing))


if __name__ == "__main__":
    main()
