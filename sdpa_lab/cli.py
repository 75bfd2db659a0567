"""Single experiments on the command line: `python -m sdpa lab`."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import getdoc, signature
from math import inf, isfinite
from pathlib import Path
from typing import Any

import sdpa
import sdpa_lab as lab

from . import style
from .tools.progress import progress
from .tools.table import Table

EXPERIMENTS: Mapping[str, str | None] = {
    "growth": "d_k",
    "normality": "n",
    "coverage": "d_k",
    "initialisers": "d_k",
    "overflow": "d_k",
    "saturation": "d_k",
    "freezing": "n",
    "scale_over_length": "n",
    "critical": "families",
    "longer": "n",
    "gradients": "d_k",
    "exponents": "n",
    "gradients_over_sigma": "n",
    "best_sigma": "n",
    "averaging": "n",
    "correlated_growth": "n",
    "first_step": "d_k",
    "first_step_exponents": None,
    "output_scale": "n",
    "rank_collapse": "stacks",
    "rank_step": "residual",
    "inputs_compared": None,
    "trained_heads": None,
    "trained_choice": None,
    "trained_growth": None,
    "decoder_heads": None,
    "symmetric_share": None,
    "kernel_smoothing": None,
    "kernel_rounding": None,
    "cost": None,
    "memory": None,
}
"""The experiments, each with a plot function plot_NAME, and the argument of their outermost loop.

Random numbers of a row do not depend on other rows, so the values of that argument may be measured
one by one, as progress; None where there is no such loop.
"""

FIRST, LAST = ("d_k", "n", "sigma", "rho"), ("draws", "seed")
"""The order of arguments: these, those of the experiment, these."""

RANGES: Mapping[str, Mapping[str, float]] = {
    "draws": {"low": 2},  # an interval needs two
    "matrices_each": {"low": 2},
    "batches": {"low": 2},
    "turns": {"low": 2},
    "base": {"low": 2},
    "n": {"low": 2},
    "seed": {"low": 0},
    "sigma": {"low": 0},
    "bandwidths": {"above": 0},
    "common": {"low": 0, "high": 1},
    "rho": {"low": -1, "high": 1},
}
"""Bounds of arguments; other integers are at least 1, other numbers finite."""

WIDEST, NARROWEST = 100, 40
VERSION = f"sdpa {sdpa.__version__}"

Results = dict[str, Any]


def columns() -> int:
    """Of the terminal, within what the text is written for; COLUMNS, or the widest, elsewhere."""
    return max(NARROWEST, min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns))


# ------------------------------------------------------------------------------- arguments


def in_range(
    kind: type[int] | type[float], *, low: float = -inf, high: float = inf, above: float = -inf
) -> Callable[[str], Any]:
    """A type for argparse: finite numbers from `low` to `high`, and more than `above`."""

    def number(text: str) -> Any:
        value = kind(text)
        if kind is float and not isfinite(value):
            raise argparse.ArgumentTypeError(f"expected a finite number, got {value}")
        if value <= above:
            raise argparse.ArgumentTypeError(f"expected more than {above}, got {value}")
        if not low <= value <= high:
            bounds = f"at least {low}" if high == inf else f"{low} to {high}"
            raise argparse.ArgumentTypeError(f"expected {bounds}, got {value}")
        return value

    number.__name__ = "integer" if kind is int else "number"  # for argparse's own message
    return number


def folder(name: str) -> Path:
    """A type for argparse: a folder to write into, made if it is not there."""
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {path}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {path}: no permission")
    return path


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """End the program, with the name of the file, if it cannot be written, as on a full disk."""
    try:
        yield
    except OSError as error:
        sys.exit(f"python -m sdpa: cannot write {path}: {error.strerror}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One command per experiment, with the arguments of its function."""
    parser.epilog = "python -m sdpa lab NAME --help lists the arguments of an experiment."
    commands = parser.add_subparsers(dest="experiment", metavar="NAME", title="experiments")
    for name in EXPERIMENTS:
        summary = (getdoc(getattr(lab, name)) or name).partition("\n\n")[0].replace("\n", " ")
        summary = summary.replace("%", "%%")
        command = commands.add_parser(name, help=summary, description=summary)
        for argument, default in arguments(name).items():
            _add_argument(command, argument, default)
        command.add_argument("--csv", metavar="PATH", help="write all columns to a file")
        command.add_argument("--pdf", metavar="PATH", help="write the plot; needs matplotlib")


def arguments(name: str) -> Results:
    """The arguments of an experiment that have a place on a command line, and their defaults."""
    found = {
        parameter.name: parameter.default
        for parameter in signature(getattr(lab, name)).parameters.values()
        if parameter.name != "model"
    }
    own = [argument for argument in found if argument not in (*FIRST, *LAST)]
    order = (*FIRST, *own, *LAST)
    return {argument: found[argument] for argument in order if argument in found}


def _add_argument(parser: argparse.ArgumentParser, name: str, default: Any) -> None:
    option = f"--{name.replace('_', '-')}"
    if isinstance(default, bool):
        parser.add_argument(
            option,
            action=argparse.BooleanOptionalAction,
            default=default,
            help=f"default {default}",
        )
        return
    values = default if isinstance(default, tuple) else (default,)
    kind: Callable[[str], Any] = str
    if not _any_is(str, values):
        whole = not _any_is(float, values)
        bounds = RANGES.get(name, {"low": 1} if whole else {})
        kind = in_range(int if whole else float, **bounds)
    shown = " ".join(f"{x:.4g}" if isinstance(x, float) else str(x) for x in values)
    parser.add_argument(
        option,
        type=kind,
        nargs="+" if isinstance(default, tuple) else None,
        default=default,
        metavar=name.upper(),
        help=f"default {shown}",
    )


def _any_is(kind: type, values: Iterable[Any]) -> bool:
    return any(isinstance(value, kind) for value in values)


# ------------------------------------------------------------------------------- running


def run(options: argparse.Namespace, writable: Callable[[str], Path]) -> tuple[Table, bool]:
    """Measure, and write the files asked for.

    Parameters
    ----------
    options : Namespace
        Of `add_arguments`.
    writable : callable
        From a name to a path; ends the program where nothing can be written.

    Returns
    -------
    table : Table
    complete : bool
        False after Ctrl-C: the table has what was measured until then.
    """
    name = options.experiment
    csv_path, pdf_path = (None if x is None else writable(x) for x in (options.csv, options.pdf))
    if csv_path and pdf_path and csv_path.resolve() == pdf_path.resolve():
        raise ValueError(f"--pdf: expected another file than that of --csv, got {pdf_path}")
    if pdf_path:
        style.subplots()  # an ImportError comes now, not after the measurement
    table, complete = measured(name, {x: getattr(options, x) for x in arguments(name)})
    if csv_path and len(table):
        with writing(csv_path):
            csv_path.write_text(table.csv(), encoding="utf-8", newline="")
    if pdf_path and len(table):
        page = style.pdf(getattr(lab, f"plot_{name}")(table))
        with writing(pdf_path):
            pdf_path.write_bytes(page)
    return table, complete


def measured(name: str, given: Results) -> tuple[Table, bool]:
    """The table of an experiment, one value of the outermost loop after the other.

    The second result is False after Ctrl-C.
    """
    experiment, loop = getattr(lab, name), EXPERIMENTS[name]
    parts: list[Results] = [{}] if loop is None else [{loop: (x,)} for x in given[loop]]
    tables: list[Table] = []
    with progress(name, len(parts)) as move:
        try:
            for part in parts:
                tables.append(experiment(**(given | part)))
                move(1)
        except KeyboardInterrupt:
            pass
    title = tables[0].title if tables else name
    rows = [row for table in tables for row in table.rows]
    return Table(title, rows), len(tables) == len(parts)


# ------------------------------------------------------------------------------- text


def text(table: Table, width: int) -> str:
    """The table, its columns below each other where they are wider than `width`.

    Columns that say what a row is about come first, and begin every block.
    """
    names = list(table.rows[0]) if table.rows else []
    about = [name for name in names if name in table.columns and f"{name}_n" not in table.columns]
    blocks: list[list[str]] = []
    for name in names:
        if name in about:
            continue
        wider = [*(blocks[-1] if blocks else about), name]
        if blocks and _width(table, wider) <= width:
            blocks[-1] = wider
        else:
            blocks.append([*about, name])
    title, *_ = str(table).splitlines()
    shown = [_lines(table, block) for block in blocks or [about]]
    return "\n".join([title, "\n\n".join(map("\n".join, shown))])


def _lines(table: Table, names: list[str]) -> list[str]:
    lines = str(table.select(*names)).splitlines()
    return lines[1:] if table.title else lines


def _width(table: Table, names: list[str]) -> int:
    return max(map(len, _lines(table, names)))
