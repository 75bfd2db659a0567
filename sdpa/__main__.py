"""The package's main job, `python -m sdpa`, and its parts.

The laboratory does the work. Of the whole package this module alone imports it, where a part runs.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

REPORT = "sdpa-report.html"
AS_JSON = "print the same as JSON"
INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C ended


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = _parser().parse_args(arguments)
    if options.command == "info":
        _info(options)
    elif options.command == "claims":
        _claims(options)
    elif options.command == "lab":
        _lab(options)
    elif options.command == "explorer":
        _explorer(options)
    else:
        _main_job(options)


def _parser() -> argparse.ArgumentParser:
    from sdpa_lab import cli
    from sdpa_lab.experiments.scale import FEWEST_DRAWS
    from sdpa_lab.report.words import LANGUAGES
    from sdpa_lab.tools.inputs import N_IMAGES

    parser = argparse.ArgumentParser(
        prog="python -m sdpa",
        description="Measure what the factor 1/sqrt(d_k) changes in attention, on images of "
        "handwritten digits and on random numbers, and the speed against NumPy.",
    )
    parser.add_argument("--version", action="version", version=cli.VERSION)
    parser.add_argument("--json", action="store_true", help=AS_JSON)
    parser.add_argument(
        "--all", action="store_true", help="print all tables and findings, in 100 columns"
    )
    parser.add_argument(
        "--lang",
        choices=LANGUAGES,
        help="language of the first screen, and in which the report opens; default: the system's",
    )
    parser.add_argument(
        "--seed", type=cli.in_range(int, low=0), default=0, help="default %(default)s"
    )
    parser.add_argument(
        "--draws",
        type=cli.in_range(int, low=FEWEST_DRAWS),
        default=N_IMAGES,
        help=f"inputs of each kind, from {FEWEST_DRAWS}; default %(default)s, all images",
    )
    destination = parser.add_mutually_exclusive_group()
    destination.add_argument(
        "--report", metavar="PATH", default=REPORT, help="the HTML report; default ./%(default)s"
    )
    destination.add_argument("--no-report", action="store_true", help="write no file")
    commands = parser.add_subparsers(dest="command", title="parts")
    info = commands.add_parser("info", help="the machine, and the kernels chosen for it")
    # No default here: it would overwrite a --json given before the command.
    info.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=AS_JSON)
    _add_claims(
        commands.add_parser("claims", help="every claim of the notes, judged by measurement")
    )
    cli.add_arguments(
        commands.add_parser(
            "lab", help="one experiment, with its own arguments; alone: the list of them"
        )
    )
    explorer = commands.add_parser(
        "explorer", help="write a page with knobs for the scale; it needs no network"
    )
    explorer.add_argument(
        "path", nargs="?", default="sdpa-explorer.html", help="default ./%(default)s"
    )
    return parser


def _add_claims(parser: argparse.ArgumentParser) -> None:
    from sdpa_lab import cli

    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=AS_JSON)
    parser.add_argument(
        "--seed", type=cli.in_range(int, low=0), default=argparse.SUPPRESS, help="default 0"
    )
    parser.add_argument("--only", metavar="ID", nargs="+", help="judge only these rows")
    parser.add_argument(
        "--save",
        metavar="DIR",
        type=cli.folder,
        help="write the measurements of every draw to DIR",
    )
    parser.add_argument(
        "--times",
        type=cli.in_range(float, above=0),
        default=1.0,
        help="multiplies the numbers of draws; default 1",
    )
    parser.add_argument(
        "--workers",
        type=cli.in_range(int, low=1),
        help="processes, for the rows that time nothing; default: as many as CPUs, up to 8",
    )


def _destination(name: str) -> Path:
    """Return the path of a file; end the program at once if it is not writable."""
    path = Path(name)
    try:
        if path.is_dir():
            reason = "it is a folder"
        elif not path.parent.exists():
            reason = f"there is no folder {path.parent}"
        elif not path.exists():
            # Only an attempt tells of names and file systems that allow none.
            path.resolve().touch()
            path.resolve().unlink()
            return path
        elif not os.access(path, os.W_OK):
            reason = "no permission"
        else:
            return path
    except OSError as error:
        reason = str(error.strerror)
    sys.exit(f"python -m sdpa: cannot write {path}: {reason}")


def _info(options: argparse.Namespace) -> None:
    import sdpa_lab as lab
    from sdpa_lab.report import printout

    machine = lab.machine()
    print(_json(machine) if options.json else printout.machine_text(machine))


def _explorer(options: argparse.Namespace) -> None:
    from sdpa_lab import report
    from sdpa_lab.cli import writing
    from sdpa_lab.report import words

    language = options.lang or words.preferred()
    path = _destination(options.path)
    with writing(path):
        path.write_text(report.explorer(language), encoding="utf-8")
    print(options.path)


def _claims(options: argparse.Namespace) -> None:
    from sdpa_lab.claims import chosen, cli
    from sdpa_lab.cli import columns
    from sdpa_lab.tools.progress import progress as progress_bar

    try:
        total = len(chosen(options.only))
    except ValueError as error:
        sys.exit(f"python -m sdpa claims: {error}")
    with progress_bar("claims", total) as progress:
        rows, complete = cli.run(
            options.only,
            seed=options.seed,
            times=options.times,
            workers=options.workers,
            directory=options.save and str(options.save),
            progress=progress,
        )
    if not complete:
        print(
            f"\nInterrupted: {len(rows)} of {total} rows are judged and kept in {cli.KEPT};\n"
            "the same command goes on from there.",
            file=sys.stderr,
        )
        sys.exit(INTERRUPTED)
    print(_json([row.record() for row in rows]) if options.json else cli.text(rows, columns()))


def _lab(options: argparse.Namespace) -> None:
    from sdpa_lab import cli

    if options.experiment is None:
        _parser().parse_args(["lab", "--help"])
    try:
        table, complete = cli.run(options, _destination)
    except (ImportError, ValueError) as error:
        sys.exit(f"python -m sdpa lab {options.experiment}: {error}")
    print(cli.text(table, cli.columns()))
    if not complete:
        print("\nInterrupted: these rows were complete.", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _main_job(options: argparse.Namespace) -> None:
    import sdpa_lab as lab
    from sdpa_lab import claims, report
    from sdpa_lab.cli import writing
    from sdpa_lab.experiments.speed import SHAPES
    from sdpa_lab.report import printout, screen, words
    from sdpa_lab.tools.inputs import N_IMAGES
    from sdpa_lab.tools.progress import progress as progress_bar

    def say(text: str) -> None:
        if options.all and not options.json:
            print(text, flush=True)

    destination = None if options.no_report else _destination(options.report)
    draws, seed = options.draws, options.seed
    language = options.lang or words.preferred()
    machine = lab.machine()
    say(
        f"{printout.machine_text(machine)}\nseed {seed}, {draws} draws\n\n{printout.SETTINGS['en']}"
    )
    result: dict[str, Any] = {"machine": machine, "seed": seed, "draws": draws, "notes": []}
    inputs = {}
    try:
        inputs["digits"] = lab.digits(min(draws, N_IMAGES), seed=seed)
    except ImportError as error:
        result["digits"] = None
        result["notes"].append(f"digits: {error}")
        say(f"\nNo table of digits: {error}")
    # The first screen shows one kind of input: the real one if it is installed.
    if options.all or options.json or not inputs:
        inputs["random"] = lab.normal(draws, seed=seed)
    result["random"] = None
    for name, x in inputs.items():
        with progress_bar(name, 6 * len(x)) as progress:
            result[name] = lab.scale_effect(x, seed=seed, progress=progress)
        say(printout.scale_text(name, result[name]))
    steps = lab.first_step_exponents(
        screen.WIDTHS, optimisers=("SGD", "Adam"), powers=(0.5, 1.0), seed=seed
    )
    result["first_step"] = steps.estimates()
    say(f"\n{steps}")
    with progress_bar("speed", 2 * len(SHAPES)) as progress:
        result["speed"] = lab.speed(seed=seed, progress=progress)
    say(printout.speed_text(result["speed"], machine["sdpa"]["threads"]))
    known, quick = claims.claims(), claims.quick()
    with progress_bar("claims", len(quick)) as progress:
        times = min(1.0, draws / N_IMAGES)
        rows = claims.ledger(quick, seed=seed, times=times, progress=progress)
    say(printout.ledger_text(rows, len(known)))
    if not options.all and not options.json:
        columns = shutil.get_terminal_size((screen.WIDEST, 45)).columns
        path = str(destination) if destination else None
        print(screen.text(result, rows, len(known), path, columns, language))
    if options.json:
        print(_json(result | {"claims": [row.record() for row in rows]}))
    if destination:
        page = report.page(result, rows, len(known) - len(rows), language)
        with writing(destination):
            destination.write_text(page, encoding="utf-8")
        say(f"\nThe report with plots and the explorer: {destination}")


def _json(value: Any) -> str:
    def plain(value: Any) -> Any:
        if hasattr(value, "_asdict"):
            value = value._asdict()
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return value

    text = json.dumps(plain(value), indent=1, allow_nan=False, ensure_ascii=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:  # a terminal without these letters would show others
        return json.dumps(plain(value), indent=1, allow_nan=False)
    return text


if __name__ == "__main__":
    if isinstance(sys.stdout, TextIOWrapper):
        # Replace ± on a terminal that cannot show it instead of stopping.
        sys.stdout.reconfigure(errors="replace")
    try:
        main()
    except BrokenPipeError:
        # The reader, such as head, has closed the pipe. Flushing at exit would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
