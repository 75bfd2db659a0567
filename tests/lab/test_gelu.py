"""The activation of the pretrained models."""

import math

import numpy as np
import pytest

from sdpa_lab.tools.gelu import gelu


def exact(x):
    return np.array([v * 0.5 * math.erfc(-v / math.sqrt(2)) for v in x.astype(float).flat])


@pytest.mark.parametrize("scale", [1e-3, 1.0, 10.0])
def test_error(rng, scale):
    """That of the polynomial, 1.5e-7 of abs(x) / 2, and some ten roundings."""
    x = (scale * rng.standard_normal((3, 50_001))).astype(np.float32)
    expected = exact(x).reshape(x.shape)
    size = abs(x.astype(float))
    found = gelu(x)
    assert found is x
    assert (abs(found - expected) <= (0.75e-7 + 10 * 2**-24) * size).all()


def test_ends():
    x = np.array([-100, -0.0, 0.0, 100, np.nan], np.float32)
    np.testing.assert_array_equal(gelu(x), np.array([0, 0, 0, 100, np.nan], np.float32))


def test_what_is_not_contiguous_is_refused():
    with pytest.raises(ValueError, match=r"^x: expected a contiguous array, got strides \(8,\)$"):
        gelu(np.zeros(8, np.float32)[::2])
