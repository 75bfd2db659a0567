"""The activation of the pretrained models, in NumPy alone."""

import numpy as np
import numpy.typing as npt

# Of t = 1 / (1 + 0.3275911 z), the highest power first.
_COEFFICIENTS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
_BLOCK = 1 << 15
"""Numbers in a block, which then stay in the cache from step to step."""


def gelu(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """x Phi(x) with the normal distribution's Phi, in place.

    Hendrycks and Gimpel, "Gaussian error linear units" (2016). For z >= 0 the error function is 1 -
    t (a_1 + ... + a_5 t^4) exp(-z^2) within 1.5e-7: Abramowitz and Stegun, "Handbook of
    mathematical functions" (1964), 7.1.26. So x Phi(x) = max(x, 0) - abs(x) / 2 times that product
    at z = abs(x) / sqrt(2), which leaves negative x their relative error.

    Parameters
    ----------
    x : contiguous float32 array
        Overwritten.

    Returns
    -------
    `x`

    Raises
    ------
    ValueError
        x is not contiguous.

    Examples
    --------
    >>> import numpy as np
    >>> from sdpa_lab.tools.gelu import gelu
    >>> gelu(np.array([-1, 0, 1], np.float32)).round(4).tolist()
    [-0.15870000422000885, 0.0, 0.8413000106811523]
    """
    if not x.flags.c_contiguous:
        raise ValueError(f"x: expected a contiguous array, got strides {x.strides}")
    flat = x.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        part = flat[start : start + _BLOCK]
        size = np.abs(part)
        t = size * np.float32(0.3275911 * 0.5**0.5)
        t += 1
        np.reciprocal(t, out=t)
        p = t * np.float32(_COEFFICIENTS[0])
        for coefficient in _COEFFICIENTS[1:]:
            p += np.float32(coefficient)
            p *= t
        np.multiply(size, size, out=t)
        t *= np.float32(-0.5)
        p *= np.exp(t, out=t)
        p *= size
        p *= np.float32(0.5)
        np.maximum(part, 0, out=part)
        part -= p
    return x
