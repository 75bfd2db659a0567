"""float32 as three bfloat16, by the stand-in for AMX: `SDPA_STAND_INS=-march=x86-64-v4 make build`.

Rows whose parts would leave the range of the matrix unit go the ordinary way. Errors are those of
float32 for operands of any size, and a row's bits do not depend on its neighbours.
"""

import ml_dtypes
import numpy as np
import pytest

import sdpa
from sdpa import reference

N, D = 80, 40
NAMES = ("query", "key", "value", "grad_out")


@pytest.fixture(autouse=True)
def stand_in():
    previous = sdpa._core._use_isa("amx_model")
    yield
    sdpa._core._use_isa(previous)


def results(operands, **options):
    """out, lse and the gradients of query, key and value."""
    *x, grad_out = operands
    saved = sdpa.attention_forward(*x, **options)
    return [*saved, *sdpa.attention_backward(grad_out, *x, *saved, **options)[:3]]


def exact(operands, **options):
    *x, grad_out = (y.astype(np.float64) for y in operands)
    out, lse = reference.attention_forward(*x, **options)
    gradients = reference.attention_backward(grad_out, *x, out, lse, **options)
    return [out, lse, *gradients[:3]]


def with_given_scores(operands, tangents, library=sdpa, **options):
    """Statistics, the tangent of out, and the gradients of the double backward."""
    *x, grad_out = operands
    saved = library.attention_forward(*x, **options)
    statistics = library.attention_statistics(*x[:2], **options)
    tangent = library.attention_jvp(*x, *tangents, **options)[1]
    gradients = library.attention_double_backward(*tangents, grad_out, *x, *saved, **options)
    return [*statistics, tangent, *(x for x in gradients if x is not None)]


def errors(found, true):
    """The rms error of each result beside its rms."""
    return [
        np.sqrt(np.mean((a - b) ** 2.0) / np.mean(b**2.0))
        for a, b in zip((x.astype(np.float64) for x in found), true, strict=True)
    ]


@pytest.mark.parametrize("power", [0, -45, -60, -100, -130, 61])
@pytest.mark.parametrize("which", NAMES)
def test_errors_are_those_of_float32(rng, which, power):
    """At most 1.05 times those of the vectors, or 2 ulp, or the spacing of subnormal results."""
    x = [rng.standard_normal((1, N, D)).astype(np.float32) for _ in NAMES]
    at = NAMES.index(which)
    x[at] = (x[at] * 2.0**power).astype(np.float32)
    options = {"scale": 0.2 * 2.0 ** (-power if at < 2 and power > -126 else 0)}
    true = exact(x, **options)
    ours = errors(results(x, **options), true)
    sdpa._core._use_isa("avx512")
    theirs = errors(results(x, **options), true)
    for name, a, b, y in zip(("out", "lse", *NAMES), ours, theirs, true, strict=False):
        spacing = 2.0**-149 / np.sqrt(np.mean(y**2))
        assert a <= max(1.05 * b, 2 * 2.0**-23, spacing), (name, a, b)


@pytest.mark.parametrize("std", [1, 8, 25])
def test_errors_are_below_those_of_the_vectors(rng, std):
    x = [rng.standard_normal((2, 300, 64)).astype(np.float32) for _ in NAMES]
    options = {"scale": std / 8}
    true = exact(x, **options)
    ours = errors(results(x, **options), true)
    sdpa._core._use_isa("avx512")
    theirs = errors(results(x, **options), true)
    assert all(a <= 1.05 * b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


def test_cancellation(rng):
    """Values near one number: dS is a small difference of large products."""
    x = [rng.standard_normal((2, 200, 64)).astype(np.float32) for _ in NAMES]
    x[2] = (1000 + x[2]).astype(np.float32)
    true = exact(x)
    ours = errors(results(x), true)
    sdpa._core._use_isa("avx512")
    theirs = errors(results(x), true)
    assert all(a <= 1.05 * b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


@pytest.mark.parametrize("broken", [np.nan, np.inf, 2.0**-70, 2.0**-140, 2.0**70])
@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_neighbours_do_not_change_bits(rng, which, broken):
    """A key or value that no query sees, or another query, may hold anything.

    By every set of kernels, an lse as large as that of 2^70 changes how the rows of its unit are
    rounded in the backward.
    """
    x = [rng.standard_normal((1, N, D)).astype(np.float32) for _ in NAMES]
    mask = np.ones((N, N), bool)
    mask[:, 7] = False
    before = results(x, where=mask)
    x[NAMES.index(which)][0, 7, :3] = broken
    after = results(x, where=mask)
    rows = np.arange(N) != 7 if which == "query" else np.full(N, True)
    n = 2 if (which, broken) == ("query", 2.0**70) else 3
    for a, b in zip(before[:n], after[:n], strict=True):
        assert a[:, rows].tobytes() == b[:, rows].tobytes()


@pytest.mark.parametrize("power", [0, -45, -60, 61])
@pytest.mark.parametrize("which", range(7))
def test_passes_with_given_scores_err_like_those_of_float32(rng, which, power):
    """At most 1.05 times as much as by the vectors, or 8 ulp."""
    x = [rng.standard_normal((1, N, D)).astype(np.float32) for _ in range(7)]
    x[which] = (x[which] * 2.0**power).astype(np.float32)
    options = {"scale": 0.2 * 2.0 ** (-power if which < 2 else 0)}
    wide = [y.astype(np.float64) for y in x]
    true = with_given_scores(wide[:4], wide[4:], reference, **options)
    ours = errors(with_given_scores(x[:4], x[4:], **options), true)
    sdpa._core._use_isa("avx512")
    theirs = errors(with_given_scores(x[:4], x[4:], **options), true)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a <= max(1.05 * b, 8 * 2.0**-23), (i, a, b)


@pytest.mark.parametrize("broken", [np.nan, np.inf, 2.0**-70, 2.0**-140, 2.0**70])
@pytest.mark.parametrize("which", ["query", "key", "query_t", "key_t"])
def test_neighbours_do_not_change_bits_of_given_scores(rng, which, broken):
    """Statistics and the tangent of out: of other queries, and beside a key that no query sees."""
    names = ("query", "key", "value", "query_t", "key_t", "value_t")
    x = [rng.standard_normal((1, N, D)).astype(np.float32) for _ in names]
    mask = np.ones((N, N), bool)
    mask[:, 7] = False

    def computed():
        statistics = sdpa.attention_statistics(*x[:2], where=mask)
        return [*statistics, sdpa.attention_jvp(*x, where=mask)[1]]

    before = computed()
    x[names.index(which)][0, 7, :3] = broken
    after = computed()
    rows = np.arange(N) != 7 if which.startswith("query") else np.full(N, True)
    for a, b in zip(before, after, strict=True):
        assert a[:, rows].tobytes() == b[:, rows].tobytes()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_the_tangent_of_a_heads_scale_has_more_digits_than_the_operands(rng, dtype):
    """It multiplies query, and so has no place among the parts of 16 bits."""
    x = [rng.standard_normal((3, N, D)).astype(dtype) for _ in range(6)]
    options = {"scale": np.array([0.3, -0.2, 0.1]), "scale_t": np.array([0.11, 0.23, 0.31])}
    exact = reference.attention_jvp(*(y.astype(np.float64) for y in x), **options)[1]

    def error():
        found = sdpa.attention_jvp(*x, **options)[1].astype(np.float64)
        return np.sqrt(np.mean((found - exact) ** 2))

    ours = error()
    sdpa._core._use_isa("avx512")
    assert ours <= 1.05 * error()
