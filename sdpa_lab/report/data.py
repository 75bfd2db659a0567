"""The data in explorer.json, which the explorer shows without computing it; `python -m
sdpa_lab.report.data` writes it anew, with scikit-learn and matplotlib.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from .. import theory
from ..style import SEQUENTIAL

FILE = Path(__file__).with_name("explorer.json")
IMAGES = 16
POSITIONS = (4, 8, 16, 32, 64, 128)
SIGMA = np.geomspace(0.05, 64.0, 39)


def explorer() -> dict[str, Any]:
    """Images, colours and curves.

    Returns
    -------
    dict
        digits, rows of 8 pixels from 0 to 16 of the first IMAGES images, with mean and std of all;
        colors, red, green and blue from 0 to 255 of the weights from 0 to 1; sigma, and curves: for
        every n, entropy and jacobian (root mean square of its norm) of a row of n weights whose
        scores are independent N(0, sigma^2).
    """
    import matplotlib
    from sklearn.datasets import load_digits

    pixels = load_digits().images
    colors = matplotlib.colormaps[SEQUENTIAL](np.linspace(0, 1, 65))[:, :3]
    laws = {n: [theory.weights(n, float(sigma)) for sigma in SIGMA] for n in POSITIONS}
    return {
        "digits": pixels[:IMAGES].astype(int).ravel().tolist(),
        "mean": float(pixels.mean()),
        "std": float(pixels.std()),
        "colors": np.rint(255 * colors).astype(int).tolist(),
        "sigma": SIGMA.round(5).tolist(),
        "curves": {
            str(n): {
                "entropy": [round(law.entropy, 5) for law in row],
                "jacobian": [round(law.jacobian**0.5, 5) for law in row],
            }
            for n, row in laws.items()
        },
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(explorer(), separators=(",", ":")) + "\n", encoding="utf-8")
