"""Train a small attention classifier on images of handwritten digits, with NumPy alone.

python examples/digits.py [--seed 0] [--steps 600]; needs pip install '.[lab]'.
"""

import argparse

from sdpa_lab.tools.progress import progress
from sdpa_lab.training import classify_digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=600)
options = parser.parse_args()

with progress("digits", options.steps) as move:
    result = classify_digits(options.seed, steps=options.steps, progress=move)
print(f"{100 * result.accuracy:.1f} % of {result.n_test} images that were held out")
