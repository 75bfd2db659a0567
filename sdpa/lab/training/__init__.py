"""Training, through `sdpa.interop.autograd`, with NumPy only: needs the extra `lab`."""

from .experiments import (
    correlation,
    curves,
    divergence,
    gradients_differ,
    lengths,
    mechanisms,
    other_scale,
    saturation,
    scale_rules,
    start_symmetry,
    tied_paths,
    trained_scores,
    tying,
)
from .models import CharactersResult, DigitsResult, classify_digits, model_characters
from .optimise import Adam, Descent, warm_up_and_cosine
from .text import Text, docstrings, witten_bell_bits

__all__ = [
    "Adam",
    "CharactersResult",
    "Descent",
    "DigitsResult",
    "Text",
    "classify_digits",
    "correlation",
    "curves",
    "divergence",
    "docstrings",
    "gradients_differ",
    "lengths",
    "mechanisms",
    "model_characters",
    "other_scale",
    "saturation",
    "scale_rules",
    "start_symmetry",
    "tied_paths",
    "trained_scores",
    "tying",
    "warm_up_and_cosine",
    "witten_bell_bits",
]
