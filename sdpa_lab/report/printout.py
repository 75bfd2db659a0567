"""The figures of the main job as text."""

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from textwrap import fill
from typing import Any

from ..claims import Row
from ..experiments.scale import ScaleRow
from ..experiments.speed import SpeedRow
from ..measure import DEAD, SATURATED
from ..tools.estimate import Estimate
from ..tools.table import layout
from ..tools.table import with_interval as with_ends
from .words import LANGUAGES, say

SETTINGS = {
    language: say("setting-text", language, saturated=SATURATED, dead=DEAD)
    for language in LANGUAGES
}
"""What stands above the tables, by language."""

PROJECTIONS = {
    "1/d_model": "projections of variance 1/d_model",
    "glorot": "Glorot, variance 2/(d_model + width): factor (2 d_model/(d_model + d_k))^2 = ",
}


with_interval: Callable[..., str] = partial(with_ends, skewed=False)  # columns of one width


def machine_text(machine: dict[str, Any]) -> str:
    """The result of `sdpa_lab.machine` as text."""
    config = machine["sdpa"]
    return (
        f"sdpa {config['version']}, kernels {config['isa']} "
        f"(of {', '.join(config['isas_available'])}), {config['threads']} threads\n"
        f"{machine['processor']}, {config['cpus']} CPUs, {machine['system']}\n"
        f"Python {machine['python']}, NumPy {machine['numpy']} with {machine['blas']}"
    )


def scale_text(name: str, rows: list[ScaleRow]) -> str:
    """The result of `sdpa_lab.scale_effect`, for the inputs of this name, as tables."""
    forward = ["d_k", "scale", "variance", "i.i.d.", "given x", "in row", "given x"]
    forward += ["entropy", "max p", "satu-\nrated %"]
    backward = forward[:2]
    for letter in "QKV":
        backward += [f"dL/d{letter}:\nrms", "law", "median", "none\n%"]

    forward_rows: list[str | list[str]] = []
    backward_rows: list[str | list[str]] = []
    for i, row in enumerate(rows):
        if i == 0 or row.projection != rows[i - 1].projection:
            heading = PROJECTIONS[row.projection]
            if row.projection == "glorot":
                factors = [r.iid_variance / r.d_k for r in rows[i:] if r.scale == 1]
                heading += ", ".join(f"{factor:.3g}" for factor in factors)
            forward_rows.append(heading)
            backward_rows.append(heading)
        first = [str(row.d_k), "1" if row.scale == 1 else f"1/{1 / row.scale:.3g}"]
        total, in_row = row.total_variance, row.row_variance
        forward_rows.append(
            [
                *first,
                *(with_interval(total), f"{row.iid_variance:.3g}", f"{total.predicted:.3g}"),
                *(with_interval(in_row), f"{in_row.predicted:.3g}"),
                *(with_interval(row.entropy), with_interval(row.max_weight)),
                _percent(row.saturated),
            ]
        )
        cells = first
        for target in ("query", "key", "value"):
            rms, median = getattr(row, f"rms_grad_{target}"), getattr(row, f"median_grad_{target}")
            dead = getattr(row, f"dead_grad_{target}")
            cells = [*cells, with_interval(rms), f"{rms.predicted:.3g}", with_interval(median)]
            cells.append(_percent(dead))
        backward_rows.append(cells)

    inputs = f"{rows[0].entropy.n} inputs"
    return (
        f"\n{name}: scores and weights, {inputs}\n{layout(forward, forward_rows)}\n"
        f"\n{name}: gradients, {inputs}\n{layout(backward, backward_rows)}\n"
        f"\n{name} in short, {PROJECTIONS[rows[0].projection]}\n{_summary(rows)}"
    )


def _summary(rows: list[ScaleRow]) -> str:
    """The change from the smallest to the largest d_k, with the first kind of projections."""
    rows = [row for row in rows if row.projection == rows[0].projection]
    scaled, unscaled = ([row for row in rows if (row.scale == 1) == one] for one in (False, True))

    def course(rows: list[ScaleRow], get: Callable[[ScaleRow], float], decimals: int) -> str:
        return f"{get(rows[0]):.{decimals}f} to {get(rows[-1]):.{decimals}f}"

    quantities: list[tuple[str, int, Callable[[ScaleRow], float]]] = [
        ("entropy", 2, lambda row: row.entropy.value),
        ("saturated rows, %", 1, lambda row: 100 * row.saturated.value),
        ("dL/dQ: rms", 2, lambda row: row.rms_grad_query.value),
        ("median", 2, lambda row: row.median_grad_query.value),
        ("rows without, %", 1, lambda row: 100 * row.dead_grad_query.value),
    ]
    return layout(
        [f"d_k = {rows[0].d_k} to {rows[-1].d_k}", "with 1/sqrt(d_k)", "without"],
        [
            [what, course(scaled, get, decimals), course(unscaled, get, decimals)]
            for what, decimals, get in quantities
        ],
    )


def speed_text(rows: list[SpeedRow], threads: int) -> str:
    """The result of `sdpa_lab.speed` as a table."""
    header = ["shape", "", "NumPy\nms", "sdpa\nms", "NumPy/\nsdpa", "sdpa\nGF/s"]
    header += ["largest\ndifference", "turns"]
    cells: list[str | list[str]] = [
        [
            *(str(row.shape), row.direction),
            *(f"{1e3 * t:.4g}" for t in (row.numpy_seconds, row.sdpa_seconds)),
            *(f"{row.ratio:.1f}", f"{row.gflops:.1f}", f"{row.difference:.1e}", str(row.turns)),
        ]
        for row in rows
    ]
    return (
        "\nSpeed against the formula in NumPy, float32, alternating, the shortest call of each;\n"
        f"sdpa on {threads} threads, NumPy's matrix products on as many as its BLAS takes\n"
        f"{layout(header, cells)}"
    )


def ledger_text(rows: Sequence[Row], known: int) -> str:
    """The result of `sdpa_lab.claims.ledger`, a line or two for each row."""
    lines = [
        fill(
            row.statement,
            100,
            initial_indent=f"{row.claim.id:>18} {row.verdict:<10} ",
            subsequent_indent=" " * 30,
            break_on_hyphens=False,
        )
        for row in rows
    ]
    heading = f"Claims of the notes: {len(rows)} of {known}; python -m sdpa claims judges all"
    return "\n".join(["", heading, *lines])


def _percent(estimate: Estimate) -> str:
    """A share; half the interval is rounded up."""
    value, half = 100 * estimate.value, 50 * (estimate.high - estimate.low)
    decimals = 1 if value < 9.95 else 0
    half = ceil(half * 10**decimals) / 10**decimals
    return f"{value:.{decimals}f}±" + f"{half:.{decimals}f}".removeprefix("0")
