"""What an experiment returns: named columns, printed with their intervals."""

import csv
from collections.abc import Mapping, Sequence
from functools import cached_property
from html import escape
from io import StringIO
from math import floor, log10
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
import numpy.typing as npt

from .estimate import LEVEL, Draws, Estimate
from .wrap import width

Cell = Draws | Estimate | str | float


class Table:
    """Rows of one experiment.

    Parameters
    ----------
    title : str
    rows : sequence of mappings
        The same names in every row. A cell is a number, a string, an `Estimate`, or `Draws`, of
        which the table shows the estimate.
    level : float
        Level of the intervals of `Draws`.

    Attributes
    ----------
    rows : list of dict
        The cells as given.
    columns : dict of str to ndarray
        One plain array per column. A column of estimates has companions: NAME_low and NAME_high,
        the ends of the interval; NAME_n, the number of draws; and NAME_predicted where a law
        predicts any of them (NaN where it does not). Computed once, so the arrays are read-only.

    Examples
    --------
    >>> import numpy as np
    >>> import sdpa_lab as lab
    >>> draws = lab.Draws(np.array([1.0, 2.0, 3.0]), predicted=2.5)
    >>> table = lab.Table("An example", [{"d_k": 64, "variance": draws}])
    >>> list(table.columns)
    ['d_k', 'variance', 'variance_low', 'variance_high', 'variance_n', 'variance_predicted']
    >>> print(table)
    An example
    d_k variance predicted
     64      2±2      2.50
    """

    def __init__(
        self, title: str, rows: Sequence[Mapping[str, Cell]], *, level: float = LEVEL
    ) -> None:
        self.title = title
        self.level = level
        self.rows: list[dict[str, Cell]] = [dict(row) for row in rows]
        names = list(self.rows[0]) if self.rows else []
        for row in self.rows:
            if list(row) != names:
                raise ValueError(f"rows: expected the columns {names}, got {list(row)}")
        self._cells = {name: [_estimated(row[name], level) for row in self.rows] for name in names}

    @cached_property
    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """One plain array per column."""
        columns: dict[str, npt.NDArray[Any]] = {}
        for name, cells in self._cells.items():
            estimates = [cell for cell in cells if isinstance(cell, Estimate)]
            if len(estimates) < len(cells):
                columns[name] = np.array(cells)
                continue
            columns[name] = np.array([cell.value for cell in estimates])
            columns[f"{name}_low"] = np.array([cell.low for cell in estimates])
            columns[f"{name}_high"] = np.array([cell.high for cell in estimates])
            columns[f"{name}_n"] = np.array([cell.n for cell in estimates])
            predicted = [cell.predicted for cell in estimates]
            if any(number is not None for number in predicted):
                columns[f"{name}_predicted"] = np.array(predicted, np.float64)
        for column in columns.values():
            column.flags.writeable = False
        return columns

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """One of `columns`."""
        return self.columns[name]

    def interval(self, name: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        """A column and the ends of its intervals, which are its own values where it has none.

        Examples
        --------
        >>> import numpy as np
        >>> import sdpa_lab as lab
        >>> table = lab.Table("", [{"variance": lab.Draws(np.array([1.0, 2.0, 3.0]))}])
        >>> value, low, high = table.interval("variance")
        >>> float(value[0]), bool(low[0] < 2 < high[0])
        (2.0, True)
        """
        value = self[name]
        low, high = (self.columns.get(f"{name}_{end}", value) for end in ("low", "high"))
        return value, low, high

    def estimates(self) -> list[dict[str, Estimate | str | float]]:
        """The rows, with an estimate in place of draws.

        Examples
        --------
        >>> import numpy as np
        >>> import sdpa_lab as lab
        >>> table = lab.Table("", [{"d_k": 4, "variance": lab.Draws(np.array([1.0, 2.0, 3.0]))}])
        >>> table.estimates()[0]["variance"].value
        2.0
        """
        names = list(self._cells)
        cells = zip(*self._cells.values(), strict=True)
        return [dict(zip(names, row, strict=True)) for row in cells]

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, **equal: object) -> "Table":
        """The rows whose cells have these values; a tuple stands for any of its values.

        Examples
        --------
        >>> import sdpa_lab as lab
        >>> table = lab.Table("", [{"d_k": 4, "n": 8}, {"d_k": 64, "n": 8}])
        >>> len(table.where(d_k=64, n=8)), len(table.where(d_k=(4, 64)))
        (1, 2)
        """
        wanted = {k: v if isinstance(v, tuple) else (v,) for k, v in equal.items()}
        kept = [row for row in self.rows if all(row[k] in v for k, v in wanted.items())]
        return Table(self.title, kept, level=self.level)

    def select(self, *names: str) -> "Table":
        """All rows with these columns only.

        Examples
        --------
        >>> import sdpa_lab as lab
        >>> print(lab.Table("", [{"d_k": 4, "n": 8}, {"d_k": 64, "n": 8}]).select("d_k"))
        d_k
          4
         64
        """
        kept = [{name: row[name] for name in names} for row in self.rows]
        return Table(self.title, kept, level=self.level)

    def row(self, **equal: object) -> dict[str, Cell]:
        """The one row whose cells have these values; KeyError where there are none or several."""
        found = self.where(**equal).rows
        if len(found) != 1:
            raise KeyError(f"expected one row with {equal}, found {len(found)}")
        return found[0]

    def to_pandas(self) -> Any:
        """`columns` as a pandas.DataFrame; ImportError where pandas is not installed."""
        import pandas

        return pandas.DataFrame(self.columns)

    def csv(self) -> str:
        """`columns` as text, a header above them.

        Examples
        --------
        >>> import sdpa_lab as lab
        >>> lab.Table("", [{"d_k": 4, "n": 8}, {"d_k": 64, "n": 8}]).csv()
        'd_k,n\\n4,8\\n64,8\\n'
        """
        text = StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(zip(*(c.tolist() for c in self.columns.values()), strict=True))
        return text.getvalue()

    def save(self, path: str | Path) -> None:
        """Write `path` with the suffixes .npz, `columns`, and .txt, what `print` shows.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> import sdpa_lab as lab
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lab.Table("Widths", [{"d_k": 4}, {"d_k": 64}]).save(f"{folder}/widths")
        ...     np.load(f"{folder}/widths.npz")["d_k"]
        array([ 4, 64])
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, Any] = self.columns
        np.savez_compressed(path.with_name(path.name + ".npz"), **arrays)
        path.with_name(path.name + ".txt").write_text(f"{self}\n", encoding="utf-8")

    def _grid(self) -> tuple[list[str], list[list[str]]]:
        """The names of the columns, and the texts of each row."""
        header, cells = [], []
        for name, column in self._cells.items():
            header.append(name)
            cells.append([_text(cell) for cell in column])
            laws = [cell.predicted if isinstance(cell, Estimate) else None for cell in column]
            if any(law is not None for law in laws):
                header.append("predicted")
                cells.append(["" if law is None else number(law) for law in laws])
        return header, [list(row) for row in zip(*cells, strict=True)]

    def __str__(self) -> str:
        return "\n".join(filter(None, [self.title, layout(*self._grid())]))

    def __repr__(self) -> str:
        names = ", ".join(self._grid()[0])
        text = f"Table {self.title!r}, {len(self)} rows: {names}"
        return "\n".join(wrap(text, 88, max_lines=4, subsequent_indent="    "))

    def _repr_html_(self) -> str:
        header, rows = self._grid()

        # JupyterLab sets that cells break, so the table's own style would not reach them.
        def line(tag: str, texts: list[str]) -> str:
            start = f'<{tag} style="white-space: nowrap">'
            return f"<tr>{''.join(f'{start}{escape(text)}</{tag}>' for text in texts)}</tr>"

        return (
            f"<table><caption>{escape(self.title)}</caption><thead>{line('th', header)}</thead>"
            f"<tbody>{''.join(line('td', row) for row in rows)}</tbody></table>"
        )


def _estimated(cell: Cell, level: float) -> Estimate | str | float:
    return cell.estimate(level) if isinstance(cell, Draws) else cell


def _text(cell: Estimate | str | float) -> str:
    if isinstance(cell, str):
        return cell
    return with_interval(cell) if isinstance(cell, Estimate) else number(cell)


def number(value: float) -> str:
    """An integer unchanged; three digits of anything else."""
    return str(value) if isinstance(value, int | np.integer) else f"{value:#.3g}".rstrip(".")


SKEWED = 1.5
"""An interval is shown by its ends where one side is this many times as long as the other."""


def with_interval(estimate: Estimate, *, skewed: bool = True) -> str:
    """value±half, half to one digit and without the zero before its point.

    Where the interval is skewed its ends stand in place of ±, unless `skewed` is False.

    Examples
    --------
    >>> from sdpa_lab.tools.estimate import Estimate
    >>> from sdpa_lab.tools.table import with_interval
    >>> with_interval(Estimate(0.4, 0.31, 0.49, 9)), with_interval(Estimate(0.0, 0.0, 0.06, 9))
    ('0.40±.09', '0.00 [0.00, 0.06]')
    """
    half = (estimate.high - estimate.low) / 2
    if not half > 0:  # NaN where nothing was measured
        return number(estimate.value)
    sides = sorted((estimate.value - estimate.low, estimate.high - estimate.value))
    if skewed and sides[1] > SKEWED * max(sides[0], 0.0) and np.isfinite(half):
        if half < 1e-5:
            return f"{estimate.value:.2g} [{estimate.low:.0e}, {estimate.high:.0e}]"
        decimals = max(0, -floor(log10(half)))
        ends = (f"{end:.{decimals}f}" for end in (estimate.low, estimate.high))
        return f"{estimate.value:.{decimals}f} [{', '.join(ends)}]"
    if half < 1e-5:
        return f"{estimate.value:.2g}±{half:.0e}"
    decimals = max(0, -floor(log10(half)))
    return f"{estimate.value:.{decimals}f}±" + f"{half:.{decimals}f}".removeprefix("0")


def layout(header: Sequence[str], rows: Sequence[str | list[str]]) -> str:
    """Columns aligned to the right, under names of one line or two; a string is kept as it is."""
    names = [name.rpartition("\n") for name in header]
    lines: list[str | list[str]] = [[upper for upper, _, _ in names]]
    lines += [[lower for _, _, lower in names]]
    lines += rows
    cells = [line for line in lines if not isinstance(line, str)]
    widths = [max(map(width, column)) for column in zip(*cells, strict=True)]

    def text(line: str | list[str]) -> str:
        if isinstance(line, str):
            return line
        padded = (" " * (w - width(cell)) + cell for cell, w in zip(line, widths, strict=True))
        return " ".join(padded).rstrip()

    return "\n".join(text(line) for line in lines if line != [""] * len(header))
