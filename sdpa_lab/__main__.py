"""Every experiment on untrained attention and on a pretrained model: python -m sdpa_lab.

Prints the tables; with --save writes them (.npz, .txt) and their plots (.svg, .pdf, .png, and the
numbers that they show, .csv). Training has its own command, `python -m sdpa_lab.training`, and so
does the ledger, `python -m sdpa claims`.
`python -m sdpa lab NAME` runs one experiment with arguments of its own.
"""

from __future__ import annotations

import argparse
from inspect import signature

import sdpa_lab as lab

from . import style
from .cli import EXPERIMENTS, arguments, folder, in_range
from .tools.progress import progress

NAMES = tuple(name for name in EXPERIMENTS if "draws" in arguments(name))
"""The experiments whose number of draws may be chosen."""


def main() -> None:
    """Run the experiments, in some minutes with the usual draws."""
    parser = argparse.ArgumentParser(prog="python -m sdpa_lab", description=__doc__)
    parser.add_argument("--save", metavar="DIR", type=folder, help="where to write")
    parser.add_argument("--seed", type=in_range(int, low=0), default=0, help="default 0")
    times = in_range(int, low=1)
    parser.add_argument("--times", type=times, default=1, help="of the usual number of draws")
    parser.add_argument(
        "--only",
        metavar="NAME",
        nargs="+",
        choices=NAMES,
        default=NAMES,
        help="of `python -m sdpa lab`",
    )
    options = parser.parse_args()
    with progress("experiments", len(options.only)) as move:
        for name in options.only:
            experiment = getattr(lab, name)
            draws = options.times * signature(experiment).parameters["draws"].default
            try:
                table = experiment(seed=options.seed, draws=draws)
            except ImportError as error:
                print(f"{name}\nNot run here: {error}\n", flush=True)
                continue
            print(f"{name}\n{table}\n", flush=True)
            if options.save is not None:
                table.save(options.save / name)
                style.save(getattr(lab, f"plot_{name}")(table), options.save / name)
            move(1)


if __name__ == "__main__":
    main()
