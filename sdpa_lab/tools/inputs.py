"""Inputs x of the experiments: (draws, n, d_model) float32, mean square 1."""

import zlib

import numpy as np
import numpy.typing as npt

N_IMAGES = 1797


def stream(seed: int, *key: str | int) -> np.random.Generator:
    """Random numbers for one part of an experiment, whatever other parts draw and in which order.

    Examples
    --------
    >>> from sdpa_lab.tools.inputs import stream
    >>> stream(0, "growth", 64).random() == stream(0, "growth", 64).random()
    True
    """
    return np.random.default_rng([seed, *(zlib.crc32(str(part).encode()) for part in key)])


def digits(draws: int = N_IMAGES, *, d_model: int = 64, seed: int = 0) -> npt.NDArray[np.float32]:
    """Images of handwritten digits as sequences of their 8 pixel rows.

    x = (pixels E + positions) / rms. The pixels of all images together are standardised (mean 0,
    variance 1); E (8, d_model) ~ N(0, 1/8) is one random map for all images; the positions are the
    sines and cosines of Vaswani et al., "Attention is all you need" (2017), section 3.5; rms makes
    the mean square of all images together 1.

    Parameters
    ----------
    draws : int
        Number of images, chosen at random; at most 1797.
    d_model : int
        Even.
    seed : int
        Seed of the map and of the choice.

    Returns
    -------
    (draws, 8, d_model) float32

    Raises
    ------
    ImportError
        scikit-learn, which brings the images, is not installed.
    ValueError
        `draws` is below 1 or above 1797, or `d_model` is odd.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> lab.digits(100).shape
    (100, 8, 64)
    """
    if not 1 <= draws <= N_IMAGES:
        raise ValueError(f"draws: expected 1 to {N_IMAGES} images, got {draws}")
    if d_model % 2:
        raise ValueError(f"d_model: expected an even number, got {d_model}")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            f"the images come with scikit-learn ({error}): pip install scikit-learn"
        ) from error
    pixels = load_digits().images
    pixels = (pixels - pixels.mean()) / pixels.std()
    rng = np.random.default_rng(seed)
    n = pixels.shape[-1]
    x = pixels @ (rng.standard_normal((n, d_model)) / n**0.5) + _positions(n, d_model)
    x /= np.sqrt(np.mean(x**2))
    return np.asarray(x[rng.permutation(N_IMAGES)[:draws]], np.float32)


def normal(
    draws: int = N_IMAGES, n: int = 8, *, d_model: int = 64, seed: int = 0
) -> npt.NDArray[np.float32]:
    """Sequences of independent N(0, 1) numbers: (draws, n, d_model) float32.

    Examples
    --------
    >>> import sdpa_lab as lab
    >>> lab.normal(100).shape
    (100, 8, 64)
    """
    return np.random.default_rng(seed).standard_normal((draws, n, d_model), np.float32)


def _positions(n: int, d_model: int) -> npt.NDArray[np.float64]:
    """Sines in the even components, cosines in the odd ones: (n, d_model)."""
    angle = np.arange(n)[:, None] / 10000 ** (np.arange(0, d_model, 2) / d_model)
    return np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(n, d_model)
