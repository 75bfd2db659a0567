"""`lse_dtype`: a float64 lse beside operands of fewer digits."""

import numpy as np
import pytest
from support.helpers import BFLOAT16

import sdpa

NARROW = (np.float32, np.float16, BFLOAT16)


def operands(rng, n_q, n_k, d=16, dtype=np.float32, heads=2):
    shapes = ((n_q, d), (n_k, d), (n_k, d), (n_q, d))
    return [rng.standard_normal((heads, *shape)).astype(dtype) for shape in shapes]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("n", [(1, 5), (3, 20), (50, 300), (2, 3000)])
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": "upper_left"}, {"sinks": np.ones(2, np.float32)}]
)
def test_the_digits_that_float32_rounds_away(rng, dtype, n, options):
    q, k, v, _ = operands(rng, *n, dtype=dtype)
    out, lse = sdpa.attention_forward(q, k, v, **options)
    same, wide = sdpa.attention_forward(q, k, v, **options, lse_dtype=np.float64)
    assert (lse.dtype, wide.dtype) == (np.float32, np.float64)
    np.testing.assert_array_equal(wide.astype(np.float32), lse)
    np.testing.assert_array_equal(same, out)
    s = q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2) / 4
    if options.get("is_causal"):
        s[:, ~np.tri(*n, dtype=bool)] = -np.inf
    exact = np.exp(s).sum(-1) + (np.e if "sinks" in options else 0)
    np.testing.assert_allclose(np.exp(wide), exact, rtol=2e-6)


def test_rows_without_keys(rng):
    q, k, v, g = operands(rng, 4, 6)
    out, lse = sdpa.attention_forward(q, k, v, key_lengths=0, lse_dtype="float64")
    assert lse.dtype == np.float64
    assert (lse == -np.inf).all()
    grads = sdpa.attention_backward(g, q, k, v, out, lse, key_lengths=0)
    assert not any(x.any() for x in grads[:3])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", NARROW)
def test_the_backward_takes_either_type(rng, dtype):
    for n in (20, 200, 1300):
        q, k, v, g = operands(rng, 40, n, dtype=dtype)
        out, lse = sdpa.attention_forward(q, k, v)
        wide = sdpa.attention_forward(q, k, v, lse_dtype=np.float64).lse
        for grad_lse in (None, np.ones_like(lse), np.ones_like(wide)):
            a, b = (
                sdpa.attention_backward(g, q, k, v, out, x, grad_lse=grad_lse) for x in (lse, wide)
            )
            for x, y in zip(a[:3], b[:3], strict=True):
                np.testing.assert_allclose(
                    x.astype(np.float32), y.astype(np.float32), rtol=1e-2, atol=2e-5
                )


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (300, 20)}])
def test_long_rows_have_the_same_bits_for_any_number_of_threads(rng, dtype, options):
    """Batches of units and the dealing to threads must not show."""
    q, k, v, g = operands(rng, 1700, 1700, dtype=dtype, heads=1)
    for factor in (1, 40):  # with rows that are completed, and without
        out, lse = sdpa.attention_forward(factor * q, k, v, **options)
        results = [
            sdpa.attention_backward(g, factor * q, k, v, out, lse, workers=n, **options)
            for n in (1, 2, 3, 7)
        ]
        for result in results[1:]:
            for x, y in zip(result[:3], results[0][:3], strict=True):
                assert x.tobytes() == y.tobytes()


def test_packed_sequences_have_the_bits_of_one_call_each(rng):
    q, k, v, g = (x.swapaxes(0, 1) for x in operands(rng, 1500, 1500))
    bounds = np.array([0, 1200, 1500])
    packed = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    out, lse = sdpa.attention_forward(q, k, v, **packed, lse_dtype=np.float64)
    grads = sdpa.attention_backward(g, q, k, v, out, lse, **packed)
    for a, b in ((0, 1200), (1200, 1500)):
        one = [x[a:b].swapaxes(0, 1) for x in (q, k, v, g)]
        saved = sdpa.attention_forward(*one[:3], lse_dtype=np.float64)
        assert saved.lse.tobytes() == np.ascontiguousarray(lse[:, a:b]).tobytes()
        alone = sdpa.attention_backward(one[3], *one[:3], *saved)
        for x, y in zip(grads[:3], alone[:3], strict=True):
            np.testing.assert_array_equal(x[a:b].swapaxes(0, 1), y)


def far_operands(rng):
    """Long rows with an lse that float32 rounds so much that they would be completed."""
    q, k, v, g = operands(rng, 60, 1100)
    return 40 * q, k, v, g


def exact_gradients(q, k, v, g):
    out, lse = sdpa.attention_forward(q, k, v, lse_dtype=np.float64)
    assert abs(lse).max() > 16
    return sdpa.attention_backward(g, q, k, v, out, lse)[:3]


def test_pytorch_saves_a_float64_lse(torch, rng):
    from sdpa.interop import torch as ours

    x = far_operands(rng)
    inputs = [torch.tensor(y, requires_grad=True) for y in x[:3]]
    found = torch.autograd.grad(ours.attention(*inputs), inputs, torch.tensor(x[3]))
    for a, b in zip(found, exact_gradients(*x), strict=True):
        assert a.numpy().tobytes() == b.tobytes()
    assert ours.attention_forward(*inputs).lse.dtype == torch.float32


def test_autograd_saves_a_float64_lse(rng):
    autograd = pytest.importorskip("autograd")
    from sdpa.interop import autograd as ours

    q, k, v, g = far_operands(rng)
    found = autograd.grad(lambda x: (g * ours.attention(*x)).sum())((q, k, v))
    for a, b in zip(found, exact_gradients(q, k, v, g), strict=True):
        assert a.tobytes() == b.tobytes()
    assert ours.attention_forward(q, k, v)[1].dtype == np.float32


@pytest.mark.parametrize(
    "given", ["float16", int, "no such type", "f4,,", {"names": ["x"]}], ids=str
)
def test_other_types_are_refused(rng, given):
    q, k, v, _ = operands(rng, 4, 6)
    with pytest.raises(TypeError) as raised:
        sdpa.attention_forward(q, k, v, lse_dtype=given)
    expected = f"lse_dtype: expected np.float32, np.float64 or None, got {given!r}"
    assert str(raised.value) == expected


def test_float32_beside_float64_is_refused(rng):
    q, k, v, _ = operands(rng, 4, 6, dtype=np.float64)
    with pytest.raises(TypeError) as raised:
        sdpa.attention_forward(q, k, v, lse_dtype=np.float32)
    assert str(raised.value) == (
        "lse_dtype: expected float64 to match query's dtype float64, got float32; "
        "write lse_dtype=None"
    )


def test_a_float64_lse_beside_float64_is_the_default(rng):
    q, k, v, _ = operands(rng, 4, 6, dtype=np.float64)
    a, b = (sdpa.attention_forward(q, k, v, lse_dtype=x) for x in (None, np.float64))
    assert a.lse.tobytes() == b.lse.tobytes()


# Columns and options: units go through ranges of keys together, unless one range holds all keys.
LONG = {
    "invariant": (16, {"invariant": True}),
    "few columns": (1, {}),
    "many columns": (600, {}),
    "window": (16, {"window": (300, 20)}),
}


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("case", LONG)
def test_gradients_of_long_rows(rng, case):
    """They are near those in float64, and the same with an lse of the other byte order."""
    d, options = LONG[case]
    n_q = 1300 if "window" in options else 60
    q, k, v, g = (x[0] for x in operands(rng, n_q, 1300, d, heads=1))
    out, lse = sdpa.attention_forward(q, k, v, **options, lse_dtype=np.float64)
    found = sdpa.attention_backward(g, q, k, v, out, lse, **options)
    exact = [x.astype(np.float64) for x in (q, k, v)]
    saved = sdpa.attention_forward(*exact, **options)
    expected = sdpa.attention_backward(g.astype(np.float64), *exact, *saved, **options)
    other = sdpa.attention_backward(g, q, k, v, out, lse.astype(">f8"), **options)
    for ours, true, again in zip(found[:3], expected[:3], other[:3], strict=True):
        np.testing.assert_allclose(ours, true, rtol=0, atol=1e-5 * abs(true).max())
        assert ours.tobytes() == again.tobytes()
