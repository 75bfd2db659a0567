"""Every training experiment on its full grid: python -m sdpa_lab.training [--save DIR].

Prints the tables; with --save writes them (.npz), their plots (.svg, .pdf, .png, and the numbers
that they show, .csv) and the text. Ten minutes of one core, half of it scale_rules; --only NAME ...
runs some of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from .. import style
from ..cli import folder, in_range
from ..tools.progress import progress
from ..tools.table import Table
from . import dynamics, experiments, models, plots, stability

WIDTHS = (4, 16, 64, 256, 512)
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)

GRID: dict[str, tuple[int, Callable[..., Table], dict[str, Any]]] = {
    "scale_rules": (
        14 * len(WIDTHS),
        experiments.scale_rules,
        {"d_k": WIDTHS, "rates": RATES, "seeds": 8},
    ),
    "divisors": (12, experiments.divisors, {}),
    "steps_needed": (6, experiments.steps_needed, {}),
    "mechanisms": (
        6 * 4,
        experiments.mechanisms,
        {"d_k": (4, 8, 32, 128), "rates": (1e-3, 3e-3, 1e-2, 3e-2), "seeds": 8},
    ),
    "lengths": (6, experiments.lengths, {}),
    "other_scale": (2, experiments.other_scale, {}),
    "curves": (3, dynamics.curves, {}),
    "learning_rates": (4, stability.learning_rates, {}),
    "entropy_collapse": (2, stability.entropy_collapse, {}),
    "divergence": (4, dynamics.divergence, {}),
    "correlation": (4, dynamics.correlation, {"d_k": (8, 32, 128, 512)}),
    "trained_exponents": (6, dynamics.trained_exponents, {}),
    "tied_paths": (1, dynamics.tied_paths, {}),
    "tying": (8, experiments.tying, {"widths": (4, 8, 16, 32)}),
    "saturation": (4, experiments.saturation, {}),
    "trained_scores": (12, experiments.trained_scores, {"rules": ("1", "sqrt d_k", "d_k")}),
    "start_symmetry": (2, experiments.start_symmetry, {}),
    "gradients_differ": (2, experiments.gradients_differ, {}),
}
"""Name, number of settings, experiment and its grid."""


def main() -> None:
    """Run the grids."""
    parser = argparse.ArgumentParser(prog="python -m sdpa_lab.training", description=__doc__)
    parser.add_argument("--save", metavar="DIR", type=folder, help="where to write")
    parser.add_argument("--seed", type=in_range(int, low=0), default=0, help="default 0")
    names = [*GRID, "models"]
    parser.add_argument(
        "--only", metavar="NAME", nargs="+", choices=names, default=names, help=", ".join(names)
    )
    options = parser.parse_args()
    for name, (settings, experiment, grid) in GRID.items():
        if name not in options.only:
            continue
        with progress(name, settings) as move:
            table = experiment(seed=options.seed, progress=move, **grid)
        print(f"{name}\n{table}\n", flush=True)
        if options.save is not None:
            table.save(options.save / name)
            style.save(plots.PLOTS[name](table), options.save / name)
    if "models" in options.only:
        with progress("digits", 600) as move:
            digits = models.classify_digits(options.seed, progress=move)
        print(f"digits: {100 * digits.accuracy:.1f} % of {digits.n_test} held-out images")
        with progress("characters", 500) as move:
            text = models.model_characters(options.seed, progress=move)
        print(f"characters: {text.bits:.3f} bits, Witten-Bell trigram {text.trigram_bits:.3f}")


if __name__ == "__main__":
    main()
