"""Keys and values of 16 bits beside a float32 query: the same bits as after widening them.

test_properties.py draws shapes and options; here are the paths that keys take to the kernels.
"""

import numpy as np
import pytest
from support.guard import guarded
from support.helpers import (
    BFLOAT16,
    LAYOUTS,
    assert_same_bits,
    assert_widened_first,
    check_attention,
    normal,
)

import sdpa

pytestmark = pytest.mark.usefixtures("isa")


@pytest.fixture(params=["f16", "bf16"])
def narrow(request):
    """The dtype of key and value."""
    return {"f16": np.dtype(np.float16), "bf16": BFLOAT16}[request.param]


# query heads, key heads, queries, keys, d_k, d_v
SHAPES = {
    "one query": (2, 2, 1, 150, 64, 48),
    "one query, widths of no whole vectors": (2, 2, 1, 150, 33, 20),
    "one query, wide rows": (1, 1, 1, 700, 128, 300),
    "one query, values alone of whole vectors": (2, 2, 1, 150, 33, 64),
    "one query, keys alone of whole vectors": (2, 2, 1, 150, 64, 33),
    "one query, two parts": (1, 1, 1, 8400, 16, 32),
    "one query, grouped": (8, 2, 1, 150, 64, 64),
    "few queries": (4, 2, 5, 150, 32, 32),
    "few keys": (2, 1, 10, 20, 16, 24),
    "many": (2, 1, 100, 300, 64, 40),
}


def problem(rng, shape, narrow):
    """Arguments of assert_widened_first and check_attention."""
    h, h_k, n_q, n_k, d_k, d_v = shape
    sizes = {"query": (2, h, n_q, d_k), "key": (2, h_k, n_k, d_k), "value": (2, h_k, n_k, d_v)}
    dtypes = {"query": np.float32, "key": narrow, "value": narrow}

    def drawn():
        return {name: normal(rng, size, dtypes[name]) for name, size in sizes.items()}

    rest = {
        "grad_out": normal(rng, (2, h, n_q, d_v), np.float32),
        "grad_lse": normal(rng, (2, h, n_q), np.float32),
        "tangents": [*drawn().values(), None, None, None],
        "enable_gqa": h != h_k,
    }
    return drawn() | rest


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_bits_are_those_of_widening_first(rng, narrow, shape):
    x = problem(rng, shape, narrow)
    assert_widened_first(**x)
    n_q, n_k = shape[2:4]
    assert_widened_first(**x, attn_mask=rng.random((2, 1, n_q, n_k)) < 0.7)
    assert_widened_first(**x, is_causal="lower_right", softcap=2.0, key_lengths=[n_k, n_k // 2])
    assert_widened_first(**x, dropout_p=0.3, rng=5, sinks=normal(rng, shape[:1], np.float32))


@pytest.mark.parametrize("shape", ["one query", "few keys", "many"])
def test_within_the_bounds(rng, narrow, shape):
    check_attention(**problem(rng, SHAPES[shape], narrow))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", ["one query", "few keys", "many"])
def test_layouts(rng, narrow, shape, layout):
    x = problem(rng, SHAPES[shape], narrow)
    expected = sdpa.attention(x["query"], x["key"], x["value"], enable_gqa=x["enable_gqa"])
    for name in ("key", "value"):
        x[name] = LAYOUTS[layout](x[name])
    got = sdpa.attention(x["query"], x["key"], x["value"], enable_gqa=x["enable_gqa"])
    assert_same_bits(got, expected)
    assert_widened_first(**x)


@pytest.mark.parametrize("shared", ["key", "value", "both"])
def test_gradients_summed_over_a_batch_are_rounded_once(rng, narrow, shared):
    x = problem(rng, (2, 2, 7, 40, 8, 8), narrow)
    for i, name in enumerate(("key", "value"), 1):
        if shared in (name, "both"):
            x[name] = x[name][:1]
            x["tangents"][i] = x["tangents"][i][:1]
    assert_widened_first(**x)


@pytest.mark.parametrize("n_q", [1, 3, 40])
def test_every_number_of_the_type(narrow, n_q):
    """Subnormal, infinite and NaN values; contents behind a mask do not matter."""
    bits = np.arange(1 << 16, dtype=np.uint16).view(narrow).reshape(-1, 64)
    with np.errstate(invalid="ignore"):  # on Arm NumPy tells of NaN that signal
        wide = bits.astype(np.float32)
    query, key = np.zeros((n_q, 16), np.float32), np.zeros((1, 16), narrow)
    for value, expected in zip(bits, wide, strict=True):
        out = sdpa.attention(query, key, value[None])
        np.testing.assert_array_equal(out, np.broadcast_to(expected, out.shape))
    n_k = len(bits)
    finite = (abs(wide) < 2.0**100).all(axis=-1)  # as is the sum of them
    key = np.zeros((n_k, 16), narrow)
    key[~finite] = np.nan
    got = sdpa.attention(query, key, bits, np.broadcast_to(finite, (n_q, n_k)))
    clean = np.where(finite[:, None], bits, np.zeros((), narrow))
    assert np.isfinite(got).all()
    assert_same_bits(got, sdpa.attention(query, key, clean, np.broadcast_to(finite, (n_q, n_k))))


@pytest.mark.parametrize("shape", ["one query", "one query, wide rows", "few queries", "few keys"])
def test_no_byte_beside_keys_and_values_is_read(rng, narrow, pages, shape):
    x = problem(rng, SHAPES[shape], narrow)
    key, value = (guarded(pages, x[name]) for name in ("key", "value"))
    got = sdpa.attention(x["query"], key, value, enable_gqa=x["enable_gqa"])
    expected = sdpa.attention(x["query"], x["key"], x["value"], enable_gqa=x["enable_gqa"])
    assert_same_bits(got, expected)


def test_results_are_float32(rng, narrow):
    x = problem(rng, SHAPES["few keys"], narrow)
    operands = [x[name] for name in ("query", "key", "value")]
    out, lse = sdpa.attention_forward(*operands, enable_gqa=True)
    assert out.dtype == lse.dtype == np.float32
    place = np.empty_like(out)
    assert sdpa.attention(*operands, enable_gqa=True, out=place) is place
    assert_same_bits(place, out)
    gradients = sdpa.attention_backward(x["grad_out"], *operands, out, lse, enable_gqa=True)
    assert [g.dtype for g in gradients[:3]] == [np.float32, narrow, narrow]
    wide = [a.astype(np.float32) for a in operands]
    for a, b in zip(merged(operands), merged(wide), strict=True):
        assert_same_bits(a, b)


def merged(operands):
    """From two sets of keys."""
    q, k, v = operands
    parts = [
        sdpa.attention_forward(q, k[..., keys, :], v[..., keys, :], enable_gqa=True)
        for keys in (slice(7), slice(7, None))
    ]
    return sdpa.merge_attention(*zip(*parts, strict=True))


def composed(query, key, value):
    """{name: (forward, backward, further operands)} of the scores that are made of attention."""
    d_k, d_v = query.shape[-1], value.shape[-1]
    rel_key, rel_value = np.ones((5, d_k), np.float32), np.ones((5, d_v), np.float32)
    return {
        "cosine": (sdpa.cosine_attention_forward, sdpa.cosine_attention_backward, ()),
        "bilinear": (
            sdpa.bilinear_attention_forward,
            sdpa.bilinear_attention_backward,
            (np.eye(d_k, dtype=np.float32),),
        ),
        "shaw": (
            sdpa.shaw_attention_forward,
            sdpa.shaw_attention_backward,
            (rel_key, rel_value),
        ),
    }


@pytest.mark.parametrize("scores", ["cosine", "bilinear", "shaw"])
@pytest.mark.parametrize("n_q", [1, 20])
def test_other_scores(rng, narrow, scores, n_q):
    """They widen their operands anyway."""
    x = problem(rng, (2, 2, n_q, 40, 8, 16), narrow)
    results = []
    for dtype in (narrow, np.float32):
        operands = [x["query"], *(x[name].astype(dtype) for name in ("key", "value"))]
        forward, backward, more = composed(*operands)[scores]
        saved = forward(*operands, *more)
        results.append((saved, backward(x["grad_out"], *operands, *more, *saved)))
    (saved, got), (true_saved, true) = results
    for a, b in zip(saved, true_saved, strict=True):
        assert_same_bits(a, b)
    assert_same_bits(got.query, true.query)
    for a, b in ((got.key, true.key), (got.value, true.value)):
        assert_same_bits(a, b.astype(narrow))
