"""Floating masks of any type: rounded to that of the arithmetic, their gradients in their own."""

import inspect

import numpy as np
import pytest
from support.calls import ADDITIVE, ATTENTION, BILINEAR, CALLS, COSINE, SHAW, backward_operands
from support.guard import guarded
from support.helpers import BFLOAT16, LAYOUTS, assert_same_bits, compute_type, normal

import sdpa
from sdpa import _core, blocks

pytestmark = pytest.mark.usefixtures("isa")

MASKS = {
    "f16": np.dtype(np.float16),
    "bf16": BFLOAT16,
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f64 swapped": np.dtype(np.float64).newbyteorder(),
}
SHAPES = {
    "whole": (2, 4, 20, 33),
    "shared by heads": (2, 1, 20, 33),
    "pairs": (20, 33),
    "keys": (2, 1, 1, 33),
    "rows": (4, 20, 1),
    "one number": (),
}


def drawn(rng, dtype, n_q=20, n_k=33):
    sizes = {"query": (2, 4, n_q, 16), "key": (2, 4, n_k, 16), "value": (2, 4, n_k, 8)}
    return {name: normal(rng, size, dtype) for name, size in sizes.items()}


def bias(rng, shape, mask_dtype):
    """Numbers that 16 bits round, some of them -inf, where there are several."""
    x = normal(rng, shape, np.float64) * 3
    if x.size > 1:
        x[rng.random(shape) < 0.2] = -np.inf
    return x.astype(mask_dtype)


@pytest.fixture(params=MASKS.values(), ids=MASKS)
def mask_dtype(request):
    return request.param


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_bits_are_those_of_the_rounded_mask(rng, dtype, mask_dtype, shape):
    x, mask = drawn(rng, dtype), bias(rng, shape, mask_dtype)
    same = mask.astype(compute_type(dtype))
    saved = sdpa.attention_forward(**x, attn_mask=mask)
    expected = sdpa.attention_forward(**x, attn_mask=same)
    assert saved.out.dtype == dtype
    assert_same_bits(saved.out, expected.out)
    assert_same_bits(saved.lse, expected.lse)
    assert_same_bits(sdpa.scaled_dot_product_attention(*x.values(), mask), expected.out)
    rows = {name: x[name] for name in ("query", "key")}
    for function in (sdpa.attention_statistics, sdpa.attention_received):
        for a, b in zip(
            function(**rows, attn_mask=mask), function(**rows, attn_mask=same), strict=True
        ):
            assert_same_bits(a, b)
    assert_same_bits(
        sdpa.attention_weights(**rows, attn_mask=mask),
        sdpa.attention_weights(**rows, attn_mask=same),
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_derivatives_in_the_masks_own_type(rng, dtype, mask_dtype, shape):
    """A gradient is the one of the rounded mask, rounded to the mask's type."""
    x, mask = drawn(rng, dtype), bias(rng, shape, mask_dtype)
    wide = compute_type(dtype)
    own, same = mask_dtype.newbyteorder("="), mask.astype(wide)
    out, lse = sdpa.attention_forward(**x, attn_mask=mask)
    x |= {"grad_out": normal(rng, out.shape, dtype), "out": out, "lse": lse}
    moved = normal(rng, shape, np.float64).astype(mask_dtype)
    needs = ("query", "key", "value", "attn_mask")

    def check(function, tangent, more):
        got = function(**more, attn_mask=mask, **{tangent: moved} if tangent else {})
        moved_same = {tangent: moved.astype(wide)} if tangent else {}
        true = function(**more, attn_mask=same, **moved_same)
        for name, a, b in zip(got._fields, got, true, strict=True):
            if name == "attn_mask":
                assert a.dtype == own
                assert a.shape == mask.shape
                if own.itemsize == 2:  # by way of float32
                    b = b.astype(np.float32)
                with np.errstate(over="ignore"):
                    assert_same_bits(a, b.astype(own), name)
            elif b is not None:
                assert_same_bits(a, b, name)

    check(sdpa.attention_backward, None, x | {"needs": needs})
    operands = {name: x[name] for name in ("query", "key", "value")}
    tangents = {name: normal(rng, a.shape, dtype) for name, a in operands.items()}
    check(
        sdpa.attention_jvp,
        "attn_mask_t",
        operands | {f"{name}_t": a for name, a in tangents.items()},
    )
    twice = {f"gg_{name}": a for name, a in tangents.items()} | {"needs": ("grad_out", *needs)}
    check(sdpa.attention_double_backward, "gg_attn_mask", x | twice)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(rng, dtype, layout):
    x, mask = drawn(rng, dtype), bias(rng, (2, 4, 20, 33), np.dtype(np.float64))
    expected = sdpa.attention(**x, attn_mask=mask)
    assert_same_bits(sdpa.attention(**x, attn_mask=LAYOUTS[layout](mask)), expected)


@pytest.mark.parametrize("n_q", [1, 3, 20])
def test_no_byte_beside_the_mask_is_read(rng, compute_dtype, pages, n_q):
    x, mask = drawn(rng, compute_dtype, n_q), bias(rng, (n_q, 33), np.dtype(np.float64))
    got = sdpa.attention(**x, attn_mask=guarded(pages, mask))
    assert_same_bits(got, sdpa.attention(**x, attn_mask=mask))


def test_numbers_and_lists(rng, dtype):
    x = drawn(rng, dtype)
    expected = sdpa.attention_forward(**x, attn_mask=np.full((1, 1), 0.75, compute_type(dtype)))
    for mask in (0.75, [[0.75] * 33] * 20, np.float64(0.75)):
        got = sdpa.attention_forward(**x, attn_mask=mask)
        np.testing.assert_array_equal(got.out, expected.out)
        np.testing.assert_array_equal(got.lse, expected.lse)
        g = sdpa.attention_backward(
            got.out, **x, **got._asdict(), attn_mask=mask, needs=("attn_mask",)
        )
        assert g.attn_mask.dtype == np.float64
        assert g.attn_mask.shape == np.shape(mask)


def test_the_usual_mask_of_where(rng, dtype):
    """np.where makes float64 of Python numbers."""
    x, seen = drawn(rng, dtype), rng.random((20, 33)) < 0.6
    seen[3] = False
    got = sdpa.attention(**x, attn_mask=np.where(seen, 0, -np.inf))
    assert_same_bits(got, sdpa.attention(**x, attn_mask=seen))


@pytest.mark.parametrize("lowest", [np.finfo(np.float64).min, -1e300, -3.5e38])
def test_numbers_below_the_range_mask(rng, dtype, lowest):
    """Rounded to float32 they are -inf; float64 holds them, and adds them."""
    x, seen = drawn(rng, dtype), rng.random((20, 33)) < 0.6
    seen[3] = False
    mask = np.where(seen, 0, lowest)
    got = sdpa.attention_forward(**x, attn_mask=mask)
    if compute_type(dtype) == np.float64:
        assert got.lse[..., 3].max() < lowest / 2
        np.testing.assert_array_equal(got.out[..., 3, :].all(axis=-1), True)
        return
    expected = sdpa.attention_forward(**x, attn_mask=seen)
    assert_same_bits(got.out, expected.out)
    assert_same_bits(got.lse, expected.lse)
    assert (got.lse[..., 3] == -np.inf).all()
    x["value"][..., -1, :] = np.nan
    mask[:, -1] = lowest
    assert np.isfinite(sdpa.attention(**x, attn_mask=mask)).all()


def test_numbers_above_the_range_are_infinite(rng):
    x = drawn(rng, np.float32)
    lse = sdpa.attention_forward(**x, attn_mask=np.full((20, 1), 1e300)).lse
    np.testing.assert_array_equal(
        lse, sdpa.attention_forward(**x, attn_mask=np.full((20, 1), np.inf, np.float32)).lse
    )


def test_no_warning_of_numpy(rng):
    """A number that becomes -inf is no overflow to warn of, one that becomes 0 no underflow."""
    x = drawn(rng, np.float32)
    small = np.full((20, 33), -1e-300)
    out, lse = sdpa.attention_forward(**x, attn_mask=small)
    with np.errstate(all="raise"):
        blocks.attend_backward(
            out, *x.values(), out, lse, attn_mask=small, needs=("query", "attn_mask")
        )
        sdpa.attention(**x, attn_mask=np.full((20, 33), -1e300))
        sdpa.cosine_attention(**x, attn_mask=np.full((20, 33), -1e300))


MECHANISMS = [*ADDITIVE, *COSINE, *BILINEAR, *SHAW]


@pytest.mark.parametrize("function", MECHANISMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_mechanisms(rng, function, softcap):
    """Functions composed around attention, and additive attention."""
    x = CALLS[function]()
    x |= {n: normal(rng, a.shape, a.dtype) for n, a in x.items() if isinstance(a, np.ndarray)}
    mask = bias(rng, (5, 7), np.dtype(np.float64))
    options = {"softcap": softcap}
    if "grad_out" in x:
        names = inspect.signature(function).parameters
        default = names["needs"].default
        options["needs"] = (*(default or [n for n in x if n not in ("out", "lse", "grad_out")]),)
        options["needs"] += ("attn_mask",)
    got = function(**x, attn_mask=mask, **options)
    true = function(**x, attn_mask=mask.astype(np.float32), **options)
    if isinstance(got, np.ndarray):
        got, true = (got,), (true,)
    for name, a, b in zip(getattr(got, "_fields", ["out"]), got, true, strict=True):
        if name == "attn_mask":
            assert a.dtype == np.float64
            assert_same_bits(a, b.astype(np.float64), name)
        elif b is not None:
            assert_same_bits(a, b, name)


def test_table_of_t5(rng):
    x = {name: a[0] for name, a in drawn(rng, np.float32).items()}
    table = normal(rng, (32, 4), np.float64)
    results = []
    for own in (table, table.astype(np.float32)):
        mask = sdpa.bias.t5_relative(own, 20, 33)
        saved = sdpa.attention_forward(**x, attn_mask=mask)
        g = sdpa.bias.t5_attention_backward(saved.out, **x, **saved._asdict(), table=own)
        assert g.table.dtype == own.dtype
        results.append((*saved, *g[:3]))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


def test_layer(rng):
    layer = sdpa.MultiHeadAttention(8, 2, rng=0)
    x, mask = normal(rng, (2, 5, 8), layer.dtype), bias(rng, (5, 5), np.dtype(np.float64))
    same = layer(x, attn_mask=mask.astype(layer.dtype))
    assert_same_bits(layer(x, attn_mask=mask), same)


def test_blocks(rng, dtype, mask_dtype):
    """The mask is read in its own type, and its gradient is summed in it or in a wider one."""
    x, mask = drawn(rng, dtype), bias(rng, (20, 33), mask_dtype)
    x = {"query": x["query"], "keys": x["key"], "values": x["value"]}
    same = mask.astype(compute_type(dtype))
    saved = blocks.attend(**x, attn_mask=mask, block=16)
    expected = blocks.attend(**x, attn_mask=same, block=16)
    assert_same_bits(saved.out, expected.out)
    grad = normal(rng, saved.out.shape, dtype)
    needs = ("query", "attn_mask")
    g = blocks.attend_backward(grad, **x, **saved._asdict(), attn_mask=mask, needs=needs, block=16)
    true = blocks.attend_backward(
        grad, **x, **saved._asdict(), attn_mask=same, needs=needs, block=16
    )
    assert_same_bits(g.query, true.query)
    assert g.attn_mask.dtype == mask_dtype.newbyteorder("=")
    np.testing.assert_allclose(
        g.attn_mask.astype(float), true.attn_mask.astype(g.attn_mask.dtype).astype(float), rtol=1e-2
    )


def test_every_function_is_here():
    """A function with attn_mask that is in no list would go untested."""
    tested = {*ATTENTION, sdpa.scaled_dot_product_attention, *MECHANISMS}
    with_mask = {f for f in CALLS if "attn_mask" in getattr(inspect.signature(f), "parameters", {})}
    assert with_mask <= tested
    assert _core._check_attention_backward(**backward_operands(), attn_mask=0.5) is None
