"""What depends on positions: rotary embedding, T5's buckets."""

import numpy as np


def rotary_embedding(x, positions, *, base=10000.0, interleaved=False, rotary_dim=None):
    """Pair i of components as a complex number, times exp(1j position base^(-2 i / rotary_dim)).

    Su et al., "RoFormer" (2021), section 3.2.2.
    """
    x = np.asarray(x, np.float64)
    r = x.shape[-1] if rotary_dim is None else rotary_dim
    if interleaved:
        first, second = np.arange(0, r, 2), np.arange(1, r, 2)
    else:
        first, second = np.arange(r // 2), np.arange(r // 2, r)
    angles = np.asarray(positions, np.float64)[..., None] * base ** (
        -np.arange(0, r, 2) / max(r, 1)
    )
    turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)
    out = x.copy()
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def rotary_embedding_backward(grad, positions, **options):
    """A rotation's transpose is its inverse: by the negative angles."""
    return rotary_embedding(grad, -np.asarray(positions, np.float64), **options)


def t5_bucket(relative, num_buckets, *, bidirectional=True, max_distance=128):
    """The bucket of one distance relative = j - i, an int. Raffel et al. (2020), section 2.1.

    Of n buckets, n // 2 hold one distance each; the k-th of the others begins at the distance
    exact (max_distance / exact)^(k / (n - exact)), exact = n // 2, and the last has no end.
    """
    start, n = 0, num_buckets
    if bidirectional:
        n //= 2
        start, relative = (n if relative > 0 else 0), -abs(relative)
    distance, exact = max(-relative, 0), n // 2
    if distance < exact:
        return start + distance
    begins = exact * (max_distance / exact) ** (np.arange(n - exact) / (n - exact))
    # Up to rounding, for a range may begin at a whole number.
    return start + exact - 1 + np.count_nonzero(begins <= distance * (1 + 1e-6))


def t5_relative(
    table, query_length, key_length, *, bidirectional=True, max_distance=128, query_offset=0
):
    """bias[h, i, j] = table[t5_bucket(j - i - query_offset), h]: (heads, Lq, Lk)."""
    table = np.asarray(table, np.float64)
    bias = np.empty((table.shape[1], query_length, key_length))
    for i, j in np.ndindex(query_length, key_length):
        bucket = t5_bucket(
            j - i - query_offset,
            len(table),
            bidirectional=bidirectional,
            max_distance=max_distance,
        )
        bias[:, i, j] = table[bucket]
    return bias
