"""Train a two-layer causal model on the docstrings of the installed Python, with NumPy alone.

python examples/characters.py [--seed 0] [--steps 500]; needs pip install '.[lab]'.
"""

import argparse

from sdpa_lab.tools.progress import progress
from sdpa_lab.training import model_characters

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=500)
options = parser.parse_args()

with progress("characters", options.steps) as move:
    result = model_characters(options.seed, steps=options.steps, progress=move)
print(
    f"{result.bits:.3f} bits per character on {result.n_test} characters of modules that were held "
    f"out; a trigram with Witten-Bell smoothing: {result.trigram_bits:.3f}"
)
