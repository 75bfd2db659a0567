"""Operands and masks with gaps between columns: the bits of the contiguous call, everywhere.

Keys and values that several units read are copied once, others are transposed block by block. Sizes
lie on both sides of that border, and beside whole vectors.
"""

import numpy as np
import pytest
from support.helpers import BFLOAT16, LAYOUTS, assert_same_bits, normal, without_memory

import sdpa

pytestmark = pytest.mark.usefixtures("isa")

GAPS = [name for name in LAYOUTS if name not in ("contiguous", "read-only")]
SHAPES = [
    (1, 70, 64),
    (1, 7, 300),
    (1, 2500, 36),
    (3, 150, 20),
    (5, 70, 33),
    (40, 37, 16),
    (150, 161, 36),
    (200, 64, 128),
]


def columns(x):
    """Each matrix column-major."""
    return x.swapaxes(-1, -2).copy().swapaxes(-1, -2)


def layouts():
    return {**{name: LAYOUTS[name] for name in GAPS}, "columns": columns}


def assert_same(got, expected, what=""):
    """`got` and `expected` are arrays, or tuples of them with None."""
    if not isinstance(expected, tuple):
        got, expected = (got,), (expected,)
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        if b is not None:
            assert_same_bits(a, b, f"{what} {i}")


def operands(rng, shape, dtype, heads=2):
    n_q, n_k, d = shape
    return [normal(rng, (heads, n, d), dtype) for n in (n_q, n_k, n_k)]


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_backward(rng, dtype, shape, layout):
    lay = layouts()[layout]
    x = operands(rng, shape, dtype)
    out, lse = sdpa.attention_forward(*x)
    assert_same(sdpa.attention_forward(*map(lay, x)), (out, lse))
    g = normal(rng, out.shape, dtype)
    expected = sdpa.attention_backward(g, *x, out, lse)
    assert_same(sdpa.attention_backward(*map(lay, (g, *x, out, lse))), expected)


@pytest.mark.parametrize("layout", ["columns", "reversed", "other byte order"])
@pytest.mark.parametrize("shape", [(5, 70, 33), (150, 161, 36)], ids=str)
def test_every_other_function(rng, dtype, shape, layout):
    lay = layouts()[layout]
    x = operands(rng, shape, dtype)
    t = operands(rng, shape, dtype)
    out, lse = sdpa.attention_forward(*x)
    g = normal(rng, out.shape, dtype)
    y, s = [*map(lay, x)], [*map(lay, t)]
    assert_same(sdpa.attention_jvp(*y, *s), sdpa.attention_jvp(*x, *t), "jvp")
    expected = sdpa.attention_double_backward(*t, g, *x, out, lse)
    again = sdpa.attention_double_backward(*s, lay(g), *y, lay(out), lse)
    assert_same(again, expected, "double backward")
    for name in ("attention_weights", "attention_statistics", "attention_received"):
        function = getattr(sdpa, name)
        assert_same(function(*y[:2]), function(*x[:2]), name)
    some = {"queries": [0, 3], "heads": [1]}
    assert_same(
        sdpa.attention_received(*y[:2], **some), sdpa.attention_received(*x[:2], **some), "some"
    )
    lengths = {"cu_seqlens_q": [0, 2, shape[0]], "cu_seqlens_k": [0, 3, shape[1] - 1]}
    packed = [a.swapaxes(0, 1).copy() for a in x]
    assert_same(
        sdpa.attention_forward(*map(lay, packed), **lengths),
        sdpa.attention_forward(*packed, **lengths),
        "packed",
    )
    if dtype != BFLOAT16:
        weights = [normal(rng, (shape[2], 8), dtype) for _ in range(2)] + [normal(rng, (8,), dtype)]
        expected = sdpa.additive_attention_forward(*x, *weights)
        assert_same(sdpa.additive_attention_forward(*y, *weights), expected, "additive")


@pytest.mark.parametrize("shape", [(12, 40), (200, 70)], ids=str)
def test_broadcast_and_grouped_heads(rng, dtype, shape):
    """Copies keep the axes along which keys and values are broadcast, each on its own."""
    n_q, n_k = shape
    q = normal(rng, (3, 4, n_q, 20), dtype)
    k, v = normal(rng, (1, 2, n_k, 20), dtype), normal(rng, (3, 2, n_k, 5), dtype)
    expected = sdpa.attention(q, k, v, enable_gqa=True)
    assert_same(sdpa.attention(q, columns(k), columns(v), enable_gqa=True), expected)
    assert_same(sdpa.attention(q, columns(k), v, enable_gqa=True, workers=3), expected)
    shared = np.broadcast_to(columns(k)[:, :1], (3, 4, n_k, 20))
    assert_same(sdpa.attention(q, shared, shared), sdpa.attention(q, shared.copy(), shared.copy()))


def test_no_memory_for_copies(rng, dtype):
    x = operands(rng, (150, 161, 36), dtype)
    got, needed = without_memory(lambda: sdpa.attention(*map(columns, x)))
    expected, fewer = without_memory(lambda: sdpa.attention(*x))
    assert needed == fewer + 2
    assert_same(got, expected)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("narrow", [np.float16, BFLOAT16])
def test_narrow_keys_beside_float32(rng, narrow, invariant):
    for shape in SHAPES:
        q = normal(rng, (2, shape[0], shape[2]), np.float32)
        k, v = (normal(rng, (2, shape[1], shape[2]), narrow) for _ in range(2))
        got = sdpa.attention(q, columns(k), columns(v), invariant=invariant)
        assert_same(got, sdpa.attention(q, k, v, invariant=invariant), str(shape))


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("kind", ["bool", "open", "hidden", "bias", "both"])
def test_masks(rng, dtype, kind, layout):
    """Masks that hide some pairs, none, or whole blocks; of one query, and of odd sizes."""
    lay = layouts()[layout]
    for n_q, n_k in ((1, 70), (7, 33), (61, 300), (130, 129)):
        x = operands(rng, (n_q, n_k, 8), dtype, 1)
        some = rng.random((n_q, n_k)) < 0.7
        some[:, n_k // 2 :] &= kind != "hidden"
        more = {}
        if kind == "bias":
            mask = normal(rng, (n_q, n_k), dtype)
        elif kind == "both":
            mask, more = normal(rng, (n_q, n_k), np.float32), {"where": some}
        else:
            mask = some | (kind == "open")
        expected = sdpa.attention_forward(*x, mask, **more)
        got = sdpa.attention_forward(*x, lay(mask), **{name: lay(a) for name, a in more.items()})
        assert_same(got, expected, f"{n_q}, {n_k}")


@pytest.mark.parametrize("n_q", [1, 3, 6, 150])
def test_nan_in_masked_keys_stays_there(rng, dtype, n_q):
    x = operands(rng, (n_q, 161, 36), dtype)
    for a in x[1:]:
        a[:, 100:] = np.nan
    expected = sdpa.attention(*x, key_lengths=100)
    assert np.isfinite(expected.astype(np.float32)).all()
    assert_same(sdpa.attention(*map(columns, x), key_lengths=100), expected)


@pytest.mark.parametrize("n_q", [1, 5])
@pytest.mark.parametrize("beside", [0, 1])
def test_columns_at_odd_addresses(rng, beside, n_q):
    """Columns that lie a byte beside an element, all of them or one after the other."""
    q, k, v = operands(rng, (n_q, 70, 33), np.float32, 1)

    def moved(x):
        """The rows of a column side by side, and `beside` bytes between columns."""
        n, d = x.shape[-2:]
        memory = np.zeros(1 + d * (4 * n + beside), np.uint8)
        y = np.ndarray((1, n, d), x.dtype, memory, 1, (0, 4, 4 * n + beside))
        y[...] = x
        return y

    assert_same(sdpa.attention(q, moved(k), moved(v)), sdpa.attention(q, k, v))


def test_rows_that_overlap(rng, dtype):
    """Keys and values that are windows of one sequence, so that rows and columns lie as near."""
    q, k, v = operands(rng, (40, 70, 8), dtype, 1)
    k, v = (np.lib.stride_tricks.sliding_window_view(x.ravel()[:77], 8)[None] for x in (k, v))
    expected = sdpa.attention_forward(q, k.copy(), v.copy())
    assert k.strides[1:] == 2 * (k.itemsize,)
    assert_same(sdpa.attention_forward(q, k, v), expected)
    assert_same(sdpa.attention(q[:, :1], k, v), sdpa.attention(q[:, :1], k.copy(), v.copy()))
