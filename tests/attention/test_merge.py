"""merge_attention beyond the everyday: special values, layouts, threads."""

import itertools

import numpy as np
import pytest
from support.helpers import LAYOUTS, compute_type, unit_roundoff

import sdpa
from sdpa import reference

SPECIAL = (-np.inf, np.inf, np.nan, 0.0, 800.0, -800.0, 1.5)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 2.0])
def test_special_values(isa, dtype, poison):
    """A part with lse -inf has no keys and its out is ignored; NaN and +inf propagate."""
    pairs = np.array(list(itertools.product(SPECIAL, SPECIAL)))
    lses = list(pairs.T.astype(compute_type(dtype)))
    outs = [np.full((len(pairs), 3), poison, dtype), np.full((len(pairs), 3), 4, dtype)]
    got, expected = sdpa.merge_attention(outs, lses), reference.merge_attention(outs, lses)
    u = unit_roundoff(dtype) + 8 * unit_roundoff(np.float64)
    np.testing.assert_allclose(got.out.astype(np.float64), expected.out, rtol=u, atol=0)
    u = unit_roundoff(compute_type(dtype)) + 8 * unit_roundoff(np.float64)
    np.testing.assert_allclose(got.lse, expected.lse, rtol=u, atol=0)
    empty = sdpa.merge_attention(outs, [np.full_like(lses[0], -np.inf)] * 2)
    assert not empty.out.any()
    assert (empty.lse == -np.inf).all()


@pytest.mark.parametrize(
    "shape", [(5, 3), (63, 4), (2, 64, 1), (3, 1, 200, 7), (0, 3), (2, 0, 3), (4, 0)]
)
@pytest.mark.parametrize("parts", [1, 2, 7])
def test_bound(isa, dtype, rng, shape, parts):
    """Weights in double err by (lse range + parts) 2^-52; the results are rounded once."""
    outs = [rng.standard_normal(shape).astype(dtype) for _ in range(parts)]
    lses = [(5 * rng.standard_normal(shape[:-1])).astype(compute_type(dtype)) for _ in outs]
    got, expected = sdpa.merge_attention(outs, lses), reference.merge_attention(outs, lses)
    assert got.out.shape == shape
    assert got.out.dtype == dtype
    assert got.lse.shape == shape[:-1]
    exact = 200 * unit_roundoff(np.float64)
    weights = reference.softmax(np.stack(lses).astype(np.float64), axis=0)[..., None]
    size = (weights * abs(np.stack(outs).astype(np.float64))).sum(axis=0)
    grain = float(np.finfo(np.float16).smallest_subnormal) if dtype == np.float16 else 0.0
    error = abs(got.out.astype(np.float64) - expected.out)
    assert (error <= unit_roundoff(dtype) * abs(expected.out) + exact * size + grain / 2).all()
    error = abs(got.lse - expected.lse)
    assert (error <= unit_roundoff(got.lse.dtype) * abs(expected.lse) + 20 * exact).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("which", ["all", "one"])
def test_lse_of_float64_keeps_its_digits(isa, dtype, which, rng):
    """Beside outs of fewer digits, as lse_dtype=np.float64 makes them; one such part is enough."""
    outs = [rng.standard_normal((2, 70, 3)).astype(dtype) for _ in range(3)]
    lses = [300 + rng.standard_normal((2, 70)) for _ in outs]
    if which == "one":
        lses[1:] = [x.astype(np.float32) for x in lses[1:]]
    swapped = [lses[0].astype(lses[0].dtype.newbyteorder()), *lses[1:]]
    expected = reference.merge_attention(outs, lses)
    for given in lses, swapped:
        got = sdpa.merge_attention(outs, given)
        assert (got.out.dtype, got.lse.dtype) == (dtype, np.float64)
        # Sum and logarithm in double: (parts + |lse|) 2^-52, see merge.c.
        np.testing.assert_allclose(got.lse, expected.lse, rtol=0, atol=310 * 2.0**-52)
        narrow = sdpa.merge_attention(outs, [x.astype(np.float32) for x in given])
        assert narrow.lse.dtype == np.float32
        assert abs(narrow.lse - expected.lse).max() > 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_change_no_bit(layout, dtype, rng):
    outs = [rng.standard_normal((2, 3, 70, 5)).astype(dtype) for _ in range(3)]
    lses = [rng.standard_normal((2, 3, 70)).astype(compute_type(dtype)) for _ in range(3)]
    lay = LAYOUTS[layout]
    expected = sdpa.merge_attention(outs, lses)
    got = sdpa.merge_attention([lay(x) for x in outs], [lay(x) for x in lses])
    assert got.out.tobytes() == expected.out.tobytes()
    assert got.lse.tobytes() == expected.lse.tobytes()


def test_threads_change_no_bit(rng):
    outs = [rng.standard_normal((4, 3, 300, 64)) for _ in range(3)]
    lses = [rng.standard_normal((4, 3, 300)) for _ in range(3)]
    before = sdpa.get_num_threads()
    try:
        results = []
        for n in (1, 2, 5):
            sdpa.set_num_threads(n)
            results.append(sdpa.merge_attention(outs, lses))
    finally:
        sdpa.set_num_threads(before)
    for result in results[1:]:
        assert result.out.tobytes() == results[0].out.tobytes()
        assert result.lse.tobytes() == results[0].lse.tobytes()
