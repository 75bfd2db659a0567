"""Training, through `sdpa.interop.autograd`, with NumPy only: needs the extra `lab`."""

from ..corpus import Text, docstrings
from .dynamics import correlation, curves, divergence, tied_paths
from .experiments import (
    gradients_differ,
    lengths,
    mechanisms,
    other_scale,
    saturation,
    scale_rules,
    start_symmetry,
    trained_scores,
    tying,
)
from .models import CharactersResult, DigitsResult, classify_digits, model_characters
from .ngram import witten_bell_bits
from .optimise import Adam, Descent, warm_up_and_cosine
from .plots import (
    plot_correlation,
    plot_curves,
    plot_divergence,
    plot_gradients_differ,
    plot_lengths,
    plot_mechanisms,
    plot_other_scale,
    plot_saturation,
    plot_scale_rules,
    plot_start_symmetry,
    plot_tied_paths,
    plot_trained_scores,
    plot_tying,
)

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
    "plot_correlation",
    "plot_curves",
    "plot_divergence",
    "plot_gradients_differ",
    "plot_lengths",
    "plot_mechanisms",
    "plot_other_scale",
    "plot_saturation",
    "plot_scale_rules",
    "plot_start_symmetry",
    "plot_tied_paths",
    "plot_trained_scores",
    "plot_tying",
    "saturation",
    "scale_rules",
    "start_symmetry",
    "tied_paths",
    "trained_scores",
    "tying",
    "warm_up_and_cosine",
    "witten_bell_bits",
]
