"""What the pages of figures that are counted, not measured, share: llvm-mca and their tables."""

import argparse
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
MCA = "llvm-mca-22"


def mca(assembly: str, triple: str, core: str, *options: str) -> str:
    """What llvm-mca says of instructions, with all data in L1 and every branch foreseen."""
    command = [MCA, f"-mtriple={triple}", f"-mcpu={core}", "--instruction-info=0", *options]
    return subprocess.run(
        command, input=assembly, check=True, text=True, capture_output=True
    ).stdout


def cycles(text: str) -> int:
    """The cycles of all iterations."""
    (total,) = re.findall(r"^Total Cycles: +(\d+)$", text, re.MULTILINE)
    return int(total)


def ports(text: str) -> list[float]:
    """The operations that each port starts in an iteration."""
    (row,) = re.findall(r"^Resource pressure per iteration:\n.*\n(.*)$", text, re.MULTILINE)
    return [0.0 if port == "-" else float(port) for port in row.split()]


def main(
    module: str, description: str | None, page: Path, parts: Mapping[str, Callable[[], str]]
) -> None:
    """Print what is counted; with --page, write each part between its marks in the page, too."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--page", action="store_true", help=f"write {page.relative_to(ROOT)}")
    options = parser.parse_args()
    for mark, count in parts.items():
        text = count()
        print(text, end="\n\n")
        if options.page:
            _write(page, mark, text)


def _write(page: Path, mark: str, text: str) -> None:
    """Replace what is between the page's two marks."""
    head, begin, rest = page.read_text().partition(f"<!-- {mark} -->\n")
    _, end, tail = rest.partition(f"<!-- end of {mark} -->\n")
    page.write_text(f"{head}{begin}\n{text}\n\n{end}{tail}")
