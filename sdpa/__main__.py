"""The package's main job, `python -m sdpa`, and its parts."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from math import ceil
from typing import Any

from sdpa import lab
from sdpa.lab.inputs import N_IMAGES
from sdpa.lab.progress import progress as progress_bar
from sdpa.lab.scale import DEAD, FEWEST_DRAWS, SATURATED, ScaleRow
from sdpa.lab.speed import SHAPES, SpeedRow
from sdpa.lab.table import layout, with_interval

SETTING = f"""
What does dividing the scores of attention by sqrt(d_k) change, before any training?

Each input is a sequence of n = 8 rows x_i of d_model = 64 numbers:
  digits  the 8 pixel rows of an image, standardised, through a fixed random map, plus positions
  random  independent N(0, 1) numbers
It has random projections of its own: q = x W^Q and k = x W^K of width d_k, v = x W^V of width 64.
Scores s = scale q.k, weights p = softmax of a row of s, out = p v; gradients of sum(g * out) with
g ~ N(0, 1), so that a row of g has norm 8. All from sdpa's own routines in float32.
± is half the length of a 95 % interval, from the spread between independent inputs.

variance    mean square of s (its mean is 0); i.i.d.: d_k scale^2, times the factor of the
            projections, if q and k have independent components; given x: for these inputs
in row      variance of s within a row; softmax does not feel what all of a row has in common
entropy     of a row of p; ln 8 = 2.08 where all weights are equal
max p       the largest weight of a row; saturated: share of rows where it exceeds {SATURATED:g}
rms         root mean square of the norms of the gradient's rows; law: its expectation over W^V
            and g, from x, q, k and p (help(sdpa.lab.scale) derives it)
median      of these norms; none: share of rows with a norm below {DEAD:g} of that of a row of g"""

PROJECTIONS = {
    "1/d_model": "projections of variance 1/d_model",
    "glorot": "Glorot, variance 2/(d_model + width): factor (2 d_model/(d_model + d_k))^2 = ",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = _parser().parse_args(arguments)
    if options.command == "info":
        machine = lab.machine()
        print(_json(machine) if options.json else _machine_text(machine))
    elif options.command == "claims":
        _claims(options)
    else:
        _main_job(options.draws, options.seed, options.json)


def _parser() -> argparse.ArgumentParser:
    def integer(least: int) -> Callable[[str], int]:
        def read(text: str) -> int:
            value = int(text)
            if value < least:
                raise argparse.ArgumentTypeError(f"expected at least {least}, got {value}")
            return value

        return read

    parser = argparse.ArgumentParser(
        prog="python -m sdpa",
        description="Measure what the factor 1/sqrt(d_k) changes in attention, on images of "
        "handwritten digits and on random numbers, and the speed against NumPy.",
    )
    as_json = "print the same as JSON"
    parser.add_argument("--json", action="store_true", help=as_json)
    parser.add_argument("--seed", type=integer(0), default=0, help="default %(default)s")
    parser.add_argument(
        "--draws",
        type=integer(FEWEST_DRAWS),
        default=N_IMAGES,
        help=f"inputs of each kind, from {FEWEST_DRAWS}; default %(default)s, which is all images",
    )
    commands = parser.add_subparsers(dest="command", title="parts")
    info = commands.add_parser("info", help="the machine, and the kernels chosen for it")
    # Without a default, which would undo a --json that stands before the command.
    info.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=as_json)
    claims = commands.add_parser("claims", help="every claim of the notes, judged by measurement")
    claims.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=as_json)
    claims.add_argument("--seed", type=integer(0), default=argparse.SUPPRESS, help="default 0")
    claims.add_argument("--only", metavar="ID", nargs="+", help="these rows alone")
    claims.add_argument("--save", metavar="DIR", help="write what was measured per draw to DIR")
    claims.add_argument(
        "--times", type=float, default=1.0, help="multiplies the numbers of draws; default 1"
    )
    return parser


def _claims(options: argparse.Namespace) -> None:
    from sdpa.lab import claims
    from sdpa.lab.claims import cli

    names = options.only or list(claims.claims())
    with progress_bar("claims", len(names)) as progress:
        try:
            rows = claims.ledger(names, seed=options.seed, times=options.times, progress=progress)
        except ValueError as error:
            sys.exit(f"python -m sdpa claims: {error}")
    if options.save:
        cli.save(rows, options.save)
    print(_json([row.record() for row in rows]) if options.json else cli.text(rows))


def _main_job(draws: int, seed: int, as_json: bool) -> None:
    def say(text: str) -> None:
        if not as_json:
            print(text, flush=True)

    machine = lab.machine()
    say(f"{_machine_text(machine)}\nseed {seed}, {draws} draws\n{SETTING}")
    result: dict[str, Any] = {"machine": machine, "seed": seed, "draws": draws, "notes": []}
    try:
        inputs = {"digits": lab.digits(min(draws, N_IMAGES), seed=seed)}
    except ImportError as error:
        inputs = {}
        result["digits"] = None
        result["notes"].append(f"digits: {error}")
        say(f"\nNo table of digits: {error}")
    inputs["random"] = lab.normal(draws, seed=seed)
    for name, x in inputs.items():
        with progress_bar(name, 6 * len(x)) as progress:
            result[name] = lab.scale_effect(x, seed=seed, progress=progress)
        say(_scale_text(name, result[name]))
    with progress_bar("speed", 2 * len(SHAPES)) as progress:
        result["speed"] = lab.speed(seed=seed, progress=progress)
    say(_speed_text(result["speed"], machine["sdpa"]["threads"]))
    if as_json:
        print(_json(result))


def _json(value: Any) -> str:
    def plain(value: Any) -> Any:
        if hasattr(value, "_asdict"):
            value = value._asdict()
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return value

    return json.dumps(plain(value), indent=1, allow_nan=False)


# ---------------------------------------------------------------------- text


def _machine_text(machine: dict[str, Any]) -> str:
    config = machine["sdpa"]
    return (
        f"sdpa {config['version']}, kernels {config['isa']} "
        f"(of {', '.join(config['isas_available'])}), {config['threads']} threads\n"
        f"{machine['processor']}, {config['cpus']} CPUs, {machine['system']}\n"
        f"Python {machine['python']}, NumPy {machine['numpy']} with {machine['blas']}"
    )


def _scale_text(name: str, rows: list[ScaleRow]) -> str:
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
    """What changes from the smallest to the largest d_k, with the first kind of projections."""
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


def _speed_text(rows: list[SpeedRow], threads: int) -> str:
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
        "\nSpeed against the formula in NumPy, float32, in turns, the shortest call of each;\n"
        f"sdpa on {threads} threads, NumPy's matrix products on as many as its BLAS takes\n"
        f"{layout(header, cells)}"
    )


def _percent(estimate: lab.Estimate) -> str:
    """A share; half the interval is rounded up."""
    value, half = 100 * estimate.value, 50 * (estimate.high - estimate.low)
    decimals = 1 if value < 9.95 else 0
    half = ceil(half * 10**decimals) / 10**decimals
    return f"{value:.{decimals}f}±" + f"{half:.{decimals}f}".removeprefix("0")


if __name__ == "__main__":
    if isinstance(sys.stdout, TextIOWrapper):
        # A terminal that cannot show ± is no reason to stop.
        sys.stdout.reconfigure(errors="replace")
    try:
        main()
    except BrokenPipeError:
        # Who reads, such as head, has seen enough; what is left to write would raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
