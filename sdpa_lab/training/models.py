"""Two models that show that training works: images of digits, and text character by character.

Both are transformers of a few layers in float32, all of whose attention is sdpa's; the rest is
matrix products by NumPy's BLAS. A run is a function of its seed: the same bits twice on a machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import log
from typing import Any, NamedTuple

import autograd.numpy as anp
import numpy as np
import numpy.typing as npt
from autograd import value_and_grad

from sdpa.interop import autograd as interop

from ..corpus import Codes, docstrings
from ..tools.inputs import stream
from ..tools.machine import one_blas_thread
from .layers import cross_entropy, embed, join_heads, linear, relu, rms_norm, split_heads
from .ngram import witten_bell_bits
from .optimise import Adam, Arrays, warm_up_and_cosine

Progress = Callable[[int], object] | None
Scale = float | None


class DigitsResult(NamedTuple):
    """A trained classifier of digits."""

    accuracy: float
    """Share of the test images that are classified correctly."""
    n_test: int
    losses: npt.NDArray[np.float64]
    """Of each step, on the images of that step, in nats."""
    parameters: Arrays


class CharactersResult(NamedTuple):
    """A trained model of text."""

    bits: float
    """Per character of the text that was held out."""
    trigram_bits: float
    """Of a trigram with Witten-Bell smoothing, trained and tested on the same characters."""
    n_test: int
    losses: npt.NDArray[np.float64]
    """Of each step, on the text of that step, in bits per character."""
    parameters: Arrays
    alphabet: str


def classify_digits(
    seed: int = 0,
    *,
    steps: int = 600,
    d_model: int = 32,
    heads: int = 4,
    rate: float = 5e-3,
    scale: Scale = None,
    progress: Progress = None,
) -> DigitsResult:
    """Train an attention classifier on scikit-learn's images of handwritten digits.

    An image is a sequence of 16 patches of 2 x 2 pixels; two layers of attention and of a hidden
    layer, then the mean over the patches. A quarter of the 1797 images, chosen by the seed, is held
    out and seen once, at the end.

    Parameters
    ----------
    seed : int
        Of the split, the start and the order of the images.
    steps : int
        Of 64 images each.
    d_model, heads : int
    rate : float
        Of Adam, at its highest.
    scale : float, optional
        Scale of attention; None means 1/sqrt(d_model / heads).
    progress : callable, optional
        Called with 1 after each step.

    Raises
    ------
    ImportError
        scikit-learn, which brings the images, is not installed.

    Examples
    --------
    >>> from sdpa_lab.training import classify_digits
    >>> result = classify_digits(steps=5)
    >>> result.n_test
    449
    """
    images, labels = _patches()
    order = stream(seed, "digits", "split").permutation(len(images))
    n_test = len(images) // 4
    test, train = order[:n_test], order[n_test:]

    rng = stream(seed, "digits", "start")
    parameters = _layers(rng, 2, d_model) | {
        "in": _matrix(rng, images.shape[-1], d_model),
        "positions": 0.3 * _matrix(rng, 1, images.shape[1] * d_model).reshape(-1, d_model),
        "out": _matrix(rng, d_model, 10),
    }

    def logits(p: Any, x: Any) -> Any:
        h = _transformer(p, linear(x, p["in"]) + p["positions"], 2, heads, scale=scale)
        return linear(anp.mean(rms_norm(h), axis=-2), p["out"])

    def loss(p: Any, x: Any, label: Any) -> Any:
        return anp.mean(cross_entropy(logits(p, x), label))

    draw = stream(seed, "digits", "order")

    def batches() -> Iterator[tuple[Any, Any]]:
        while True:
            at = draw.choice(train, 64, replace=False)
            yield images[at], labels[at]

    with one_blas_thread():
        losses = _fit(loss, parameters, batches(), steps, rate, progress)
    right = logits(parameters, images[test]).argmax(axis=-1) == labels[test]
    return DigitsResult(float(right.mean()), n_test, losses, parameters)


def _patches() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.intp]]:
    """Images as (1797, 16, 4), mean 0 and variance 1 over all; and their labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            f"the images come with scikit-learn ({error}): pip install scikit-learn"
        ) from error
    data = load_digits()
    pixels = (data.images - data.images.mean()) / data.images.std()
    patches = pixels.reshape(-1, 4, 2, 4, 2).swapaxes(2, 3).reshape(-1, 16, 4)
    return patches.astype(np.float32), data.target


def model_characters(
    seed: int = 0,
    *,
    steps: int = 500,
    d_model: int = 128,
    heads: int = 4,
    length: int = 64,
    rate: float = 4e-3,
    scale: Scale = None,
    progress: Progress = None,
) -> CharactersResult:
    """Train a causal model of two layers on the docstrings of Python's standard library.

    Positions enter through ALiBi alone (Press et al., 2022). A tenth of the modules is held out.
    All of their text but the first character is predicted, in stretches of `length` characters,
    each character from the ones before it in its stretch, so the first ones have almost no context.
    The trigram model that serves for comparison always sees two characters.

    Parameters
    ----------
    seed : int
        Of the split, the start and the order of the text.
    steps : int
        Of 16 stretches each.
    d_model, heads : int
    length : int
        Characters of a stretch.
    rate : float
        Of Adam, at its highest.
    scale : float, optional
        Scale of attention; None means 1/sqrt(d_model / heads).
    progress : callable, optional
        Called with 1 after each step.

    Examples
    --------
    >>> from sdpa_lab.training import model_characters
    >>> result = model_characters(steps=2, d_model=8)
    >>> 2 < result.trigram_bits < 4
    True
    """
    text = docstrings(seed)
    n_symbols = len(text.alphabet)
    rng = stream(seed, "characters", "start")
    parameters = _layers(rng, 2, d_model) | {
        "in": _matrix(rng, 1, n_symbols * d_model).reshape(n_symbols, d_model),
        "out": np.float32(0.5) * _matrix(rng, d_model, n_symbols),
    }
    # Steeper slopes than in Press et al.: a character depends most on the nearest ones.
    slopes = (4.0 ** (1 - np.arange(heads))).astype(np.float32)

    def losses_of(p: Any, window: Any) -> Any:
        h = embed(p["in"], window[:, :-1])
        h = _transformer(p, h, 2, heads, scale=scale, is_causal=True, alibi_slopes=slopes)
        return cross_entropy(linear(rms_norm(h), p["out"]), window[:, 1:])

    def loss(p: Any, window: Any) -> Any:
        return anp.mean(losses_of(p, window))

    draw = stream(seed, "characters", "order")

    def batches() -> Iterator[tuple[Any]]:
        while True:
            start = draw.integers(len(text.train) - length, size=16)
            yield (text.train[start[:, None] + np.arange(length + 1)],)

    losses = _fit(loss, parameters, batches(), steps, rate, progress) / log(2)
    nats = [losses_of(parameters, windows).ravel() for windows in _stretches(text.test, length)]
    bits = np.concatenate(nats, dtype=np.float64) / log(2)
    return CharactersResult(
        bits=float(bits.mean()),
        trigram_bits=witten_bell_bits(text.train, text.test, n_symbols),
        n_test=len(bits),
        losses=losses,
        parameters=parameters,
        alphabet=text.alphabet,
    )


def _stretches(text: Codes, length: int) -> Iterator[Codes]:
    """The whole text as stretches of `length` characters and the next one, up to 32 at a time."""
    windows = np.lib.stride_tricks.sliding_window_view(text, length + 1)[::length]
    yield from (windows[i : i + 32] for i in range(0, len(windows), 32))
    rest = text[len(windows) * length :]
    if len(rest) > 1:
        yield rest[None]


def _matrix(rng: np.random.Generator, rows: int, columns: int) -> npt.NDArray[np.float32]:
    """Elements from N(0, 1/rows)."""
    return rng.standard_normal((rows, columns), np.float32) / np.float32(rows**0.5)


def _layers(rng: np.random.Generator, layers: int, d_model: int) -> Arrays:
    """Projections and hidden layers; what is added to the stream starts at half the size."""
    parameters: Arrays = {}
    for i in range(layers):
        for name in ("W^Q", "W^K", "W^V", "W^O"):
            parameters[f"{name} {i}"] = _matrix(rng, d_model, d_model)
        parameters[f"up {i}"] = _matrix(rng, d_model, 4 * d_model)
        parameters[f"down {i}"] = _matrix(rng, 4 * d_model, d_model)
        for name in ("W^O", "down"):
            parameters[f"{name} {i}"] *= np.float32(0.5)
    return parameters


def _transformer(p: Any, h: Any, layers: int, heads: int, **options: Any) -> Any:
    """Normalisation first, as in Xiong et al., "On layer normalization" (2020): (..., L, d)."""
    for i in range(layers):
        x = rms_norm(h)
        query, key, value = (split_heads(linear(x, p[f"W^{c} {i}"]), heads) for c in "QKV")
        out = interop.attention(query, key, value, **options)
        h = h + linear(join_heads(out), p[f"W^O {i}"])
        h = h + linear(relu(linear(rms_norm(h), p[f"up {i}"])), p[f"down {i}"])
    return h


def _fit(
    loss: Callable[..., Any],
    parameters: Arrays,
    batches: Iterator[tuple[Any, ...]],
    steps: int,
    rate: float,
    progress: Progress,
) -> npt.NDArray[np.float64]:
    """Change the parameters in place by Adam; the loss of each step."""
    step_of = value_and_grad(loss)
    optimiser, factor = Adam(rate), warm_up_and_cosine(steps, max(1, steps // 20))
    losses = np.empty(steps)
    for step in range(steps):
        losses[step], gradients = step_of(parameters, *next(batches))
        optimiser.step(parameters, gradients, factor(step))
        if progress is not None:
            progress(1)
    return losses
