"""Attention against the oracle over shapes, layouts, masks and options, and against PyTorch.

The tolerance of every comparison is the bound that bounds.AttentionBounds derives for its data.
"""

import itertools

import numpy as np
import pytest
from support.helpers import LAYOUTS, SIZES, AttentionBounds, assert_within, check_attention, normal

import sdpa
from sdpa import reference

pytestmark = pytest.mark.usefixtures("isa")


def operands(rng, dtype, lead, n_q, n_k, d_k, d_v, kv_lead=None):
    """query, key, value, grad_out, grad_lse of N(0, 1)."""
    kv_lead = lead if kv_lead is None else kv_lead
    return (
        normal(rng, (*lead, n_q, d_k), dtype),
        normal(rng, (*kv_lead, n_k, d_k), dtype),
        normal(rng, (*kv_lead, n_k, d_v), dtype),
        normal(rng, (*lead, n_q, d_v), dtype),
        rng.standard_normal((*lead, n_q)).astype(np.float64 if dtype == np.float64 else np.float32),
    )


@pytest.mark.parametrize("n_q", SIZES)
def test_lengths(rng, dtype, n_q):
    for n_k, d, is_causal in zip(
        SIZES, itertools.cycle([1, 8, 5, 16, 3]), itertools.cycle([False, True]), strict=False
    ):
        q, k, v, g, g_lse = operands(rng, dtype, (2,), n_q, n_k, d, d + 2)
        check_attention(q, k, v, grad_out=g, grad_lse=g_lse, is_causal=is_causal)


@pytest.mark.parametrize(
    "d_k", [0, 1, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 128, 129, 257]
)
def test_widths(rng, dtype, d_k):
    for d_v in (0, 1, 7, 16, 33, 64, 130):
        q, k, v, g, g_lse = operands(rng, dtype, (1,), 19, 37, d_k, d_v)
        check_attention(q, k, v, grad_out=g, grad_lse=g_lse)


@pytest.mark.parametrize("n_q", [1, 2, 3, 5, 17])
@pytest.mark.parametrize("n_k", [256, 1000, 4099])
def test_few_queries_many_keys(rng, dtype, n_q, n_k):
    q, k, v, g, g_lse = operands(rng, dtype, (4,), n_q, n_k, 32, 32, kv_lead=(2,))
    check_attention(q, k, v, grad_out=g, grad_lse=g_lse, enable_gqa=True)


@pytest.mark.parametrize("is_causal", [False, True, "lower_right"])
@pytest.mark.parametrize("n_k", [1, 2, 3, 7, 10, 31, 32, 33])
def test_few_keys(rng, dtype, n_k, is_causal):
    widths = [(8, 16), (64, 24), (16, 64), (5, 3)]
    for n_q in (1, 3, 4, 10, 34, 101):
        for d_k, d_v in widths[(n_q + n_k) % 2 :: 2]:
            q, k, v, g, g_lse = operands(rng, dtype, (4,), n_q, n_k, d_k, d_v, kv_lead=(2,))
            options = {"is_causal": is_causal, "enable_gqa": True}
            check_attention(q, k, v, grad_out=g, grad_lse=g_lse, **options)
            large = (30 * q).astype(dtype)  # which NumPy 2.0 widens if it is a bfloat16
            check_attention(large, k, v, grad_out=g, key_lengths=n_k - 1, **options)


@pytest.mark.parametrize("n_k", [10, 40])
def test_gradients_of_some_of_the_keys(rng, dtype, n_k):
    """With lse and out of all keys, the gradients of parts add up to those of the whole."""
    q, k, v, g, g_lse = operands(rng, dtype, (2,), 13, n_k, 16, 24)
    q *= 5
    whole = sdpa.attention_forward(q, k, v)
    bounds = AttentionBounds(q, k, v, grad_out=g, grad_lse=g_lse)
    expected = reference.attention_backward(
        g, q, k, v, *reference.attention_forward(q, k, v), grad_lse=g_lse
    )
    parts = [
        sdpa.attention_backward(g, q, k[:, keys], v[:, keys], *whole, grad_lse=g_lse)
        for keys in (slice(None, n_k // 3), slice(n_k // 3, None))
    ]
    dq = sum(part.query.astype(np.float64) for part in parts)
    dk, dv = (
        np.concatenate([part[i].astype(np.float64) for part in parts], axis=1) for i in (1, 2)
    )
    assert_within(dq, expected.query, bounds.query, "query")
    assert_within(dk, expected.key, bounds.key, "key")
    assert_within(dv, expected.value, bounds.value, "value")


@pytest.mark.parametrize("is_causal", [False, True, "lower_right"])
def test_long(rng, dtype, is_causal):
    q, k, v, g, g_lse = operands(rng, dtype, (2,), 517, 645, 64, 48)
    check_attention(q, k, v, grad_out=g, grad_lse=g_lse, is_causal=is_causal)


# ------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["query", "key", "value", "attn_mask", "grad_out", "all"])
def test_layouts(rng, dtype, layout, which):
    for lead, n_q, n_k, d in (((2, 3), 21, 35, 19), ((1, 2), 130, 131, 32), ((), 3, 129, 8)):
        q, k, v, g, g_lse = operands(rng, dtype, lead, n_q, n_k, d, d + 1)
        mask = normal(rng, (n_q, n_k), dtype)
        x = {"query": q, "key": k, "value": v, "attn_mask": mask, "grad_out": g, "grad_lse": g_lse}
        for name in x if which == "all" else [which]:
            if name != "grad_lse" or x[name].ndim > 1:
                changed = LAYOUTS[layout](x[name])
                assert changed.astype(np.float64).tolist() == x[name].astype(np.float64).tolist()
                x[name] = changed
        check_attention(**x, is_causal=True)


@pytest.mark.parametrize("layout", ["fortran", "reversed", "strided", "unaligned"])
def test_layout_of_boolean_mask(rng, dtype, layout):
    q, k, v, g, g_lse = operands(rng, dtype, (2,), 21, 140, 5, 6)
    mask = rng.random((2, 21, 140)) < 0.5
    if layout != "strided":  # which fills the gaps with NaN
        mask = LAYOUTS[layout](mask)
    else:
        mask = np.repeat(np.repeat(mask, 2, axis=-1), 3, axis=-2)[:, ::3, ::2]
    check_attention(q, k, v, mask, grad_out=g, grad_lse=g_lse)


@pytest.mark.parametrize("n_k", [4, 8, 16, 24, 48, 304])
def test_bits_do_not_depend_on_where_a_bias_lies(rng, compute_dtype, n_k):
    """A bias is read in place at any alignment; the largest numbers stay finite."""
    q, k, v, *_ = operands(rng, compute_dtype, (2,), 40, n_k, 8, 8)
    most = np.finfo(compute_dtype).max
    bias = np.full((40, n_k), -most, compute_dtype)
    bias[3:] = rng.choice([-np.inf, -most, -most / 2, -1, 0, 1], bias[3:].shape)
    bias[-1] = rng.choice([0, most], n_k)
    expected = sdpa.attention_forward(q, k, v, np.asfortranarray(bias))
    assert np.isfinite(expected.out).all()
    np.testing.assert_array_less(expected.lse[:, :3], -most / 2)
    for first in range(17):
        place = np.empty(first + bias.size, compute_dtype)[first:].reshape(bias.shape)
        place[...] = bias
        for a, b in zip(sdpa.attention_forward(q, k, v, place), expected, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("n_k", "d"), [(10, 16), (35, 9)])
def test_layout_of_saved_results(rng, dtype, layout, n_k, d):
    """The backward accepts out and lse in any layout."""
    q, k, v, g, _ = operands(rng, dtype, (2, 3), 21, n_k, 8, d)
    out, lse = sdpa.attention_forward(q, k, v)
    one = sdpa.attention_backward(g, q, k, v, out, lse)
    two = sdpa.attention_backward(g, q, k, v, LAYOUTS[layout](out), LAYOUTS[layout](lse))
    for a, b in zip(one[:3], two[:3], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("n_k", "d"), [(10, 16), (35, 16)])
def test_bits_do_not_depend_on_the_layout(rng, dtype, layout, n_k, d):
    x = operands(rng, dtype, (2, 3), 21, n_k, d, d)[:4]
    results = []
    for q, k, v, g in (x, [LAYOUTS[layout](a) for a in x]):
        got = sdpa.attention_forward(q, k, v, is_causal=True)
        results += [*got, *sdpa.attention_backward(g, q, k, v, *got, is_causal=True)[:3]]
    for a, b in zip(results[:5], results[5:], strict=True):
        np.testing.assert_array_equal(a, b)


def test_zero_strides(rng, dtype):
    """Broadcast views: every row equal, every column equal, every head equal, one element."""
    for axis in (0, 1, 2, (1, 2), (0, 1, 2)):
        views = []
        for x in operands(rng, dtype, (3,), 20, 33, 6, 7)[:4]:
            one = tuple(
                slice(1) if a == axis or (isinstance(axis, tuple) and a in axis) else slice(None)
                for a in range(3)
            )
            views.append(np.broadcast_to(x[one], x.shape))
        q, k, v, g = views
        check_attention(q, k, v, grad_out=g)


# ------------------------------------------------------------------------------------ axes


@pytest.mark.parametrize(
    ("q_lead", "k_lead", "v_lead"),
    [
        ((), (), ()),
        ((1,), (1,), (1,)),
        ((3,), (), ()),
        ((), (3,), (3,)),
        ((3,), (1,), (3,)),
        ((2, 3), (3,), (2, 3)),
        ((2, 3), (1, 3), (2, 1)),
        ((1, 3), (2, 3), (2, 3)),
        ((2, 3), (2, 3), (1, 1)),
        ((2, 1, 3), (1, 4, 3), (4, 3)),
        ((2, 1, 1, 3), (2, 2, 1), (1, 1, 2, 3)),
        ((0, 3), (1, 3), (0, 3)),
        ((2, 0), (2, 0), (2, 0)),
        ((2,), (1,), (5, 2)),
    ],
)
def test_leading_axes_broadcast(rng, dtype, q_lead, k_lead, v_lead):
    lead = np.broadcast_shapes(q_lead, k_lead, v_lead)
    q = normal(rng, (*q_lead, 9, 5), dtype)
    k = normal(rng, (*k_lead, 11, 5), dtype)
    v = normal(rng, (*v_lead, 11, 6), dtype)
    g = normal(rng, (*lead, 9, 6), dtype)
    g_lse = normal(rng, (*lead, 9), np.float64 if dtype == np.float64 else np.float32)
    mask = normal(rng, (9, 11), dtype)
    check_attention(q, k, v, grad_out=g, grad_lse=g_lse)
    check_attention(q, k, v, mask, grad_out=g, is_causal=True)


@pytest.mark.parametrize(("n_head", "n_kv"), [(6, 2), (6, 1), (6, 6), (4, 2), (5, 1)])
@pytest.mark.parametrize(("n_q", "n_k"), [(1, 50), (3, 3), (40, 150), (100, 20)])
def test_grouped_query_heads(rng, dtype, n_head, n_kv, n_q, n_k):
    q, k, v, g, g_lse = operands(rng, dtype, (2, n_head), n_q, n_k, 8, 9, kv_lead=(2, n_kv))
    mask = normal(rng, (2, n_head, n_q, n_k), dtype)
    mask[rng.random(mask.shape) < 0.2] = -np.inf
    for m in (None, mask, mask[:1, :1], mask[:, :, :1] > 0):
        check_attention(q, k, v, m, grad_out=g, grad_lse=g_lse, enable_gqa=True, is_causal=True)
    check_attention(q, k[:1], v, grad_out=g, grad_lse=g_lse, enable_gqa=True)


# ------------------------------------------------------------------------------------ masks


@pytest.mark.parametrize(
    "shape",
    [
        (70,),
        (1, 70),
        (33, 1),
        (33, 70),
        (3, 1, 1),
        (3, 1, 70),
        (3, 33, 70),
        (2, 1, 1, 70),
        (2, 1, 33, 70),
        (1, 3, 33, 1),
        (2, 3, 33, 70),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["bool", "own", "float32"])
def test_mask_ranks(rng, dtype, shape, kind):
    q, k, v, g, g_lse = operands(rng, dtype, (2, 3), 33, 70, 8, 5)
    hidden = rng.random(shape) < 0.3
    if kind == "bool":
        mask = ~hidden
    else:
        mask = normal(rng, shape, dtype if kind == "own" else np.float32, std=2)
        mask[hidden] = -np.inf
    for is_causal in (False, True):
        check_attention(q, k, v, mask, grad_out=g, grad_lse=g_lse, is_causal=is_causal)


@pytest.mark.parametrize("keep", [0.0, 0.02, 0.5, 0.98, 1.0])
def test_mask_densities(rng, dtype, keep):
    """Blocks that are wholly, partly, or not masked."""
    q, k, v, g, g_lse = operands(rng, dtype, (2,), 150, 300, 16, 16)
    mask = rng.random((150, 300)) < keep
    mask[:, 130:260] = False
    mask[100:, 260:] = True
    check_attention(q, k, v, mask, grad_out=g, grad_lse=g_lse)
    bias = np.where(mask, normal(rng, mask.shape, np.float32), -np.inf).astype(np.float32)
    check_attention(q, k, v, bias, grad_out=g, grad_lse=g_lse)


SHAPES = [(5, 7), (7, 5), (1, 140), (140, 1), (130, 67), (67, 130), (100, 300), (300, 100)]


@pytest.mark.parametrize(("n_q", "n_k"), SHAPES)
@pytest.mark.parametrize("is_causal", [False, True, "upper_left", "lower_right"])
def test_causal(rng, dtype, is_causal, n_q, n_k):
    q, k, v, g, g_lse = operands(rng, dtype, (2,), n_q, n_k, 12, 10)
    for scale in (None, 0.7, -0.4, 0.0, 2):
        check_attention(
            q, k, v, grad_out=g, grad_lse=g_lse, is_causal=is_causal, scale=scale
        )  # fmt: skip


@pytest.mark.parametrize(("n_q", "n_k"), SHAPES)
@pytest.mark.parametrize("window", [(0, 0), (2, 3), (None, 1), (40, None), (None, None), (150, 20)])
@pytest.mark.parametrize("is_causal", [False, True, "lower_right"])
def test_windows(rng, dtype, is_causal, window, n_q, n_k):
    q, k, v, g, g_lse = operands(rng, dtype, (2,), n_q, n_k, 12, 10)
    check_attention(q, k, v, grad_out=g, grad_lse=g_lse, is_causal=is_causal, window=window)


@pytest.mark.parametrize(("n_q", "n_k"), [(7, 5), (1, 140), (67, 130), (130, 67)])
@pytest.mark.parametrize("is_causal", [False, True, "lower_right"])
@pytest.mark.parametrize("window", [None, (3, 1)])
def test_lengths_and_offsets(rng, dtype, window, is_causal, n_q, n_k):
    """One integer for all, or one per batch entry; some axes broadcast."""
    q, k, v, g, g_lse = operands(rng, dtype, (3, 2, 1), n_q, n_k, 8, 10)
    mask = rng.random((2, 1, n_q, n_k)) < 0.7
    for shape in ((), (2,), (3, 1), (3, 2)):
        options = {"is_causal": is_causal, "window": window}
        options["key_lengths"] = rng.integers(0, n_k + 1, shape)
        if is_causal != "lower_right":
            options["query_offset"] = rng.integers(-n_q, n_k, shape[-1:])
        check_attention(q, k, v, grad_out=g, grad_lse=g_lse, **options)
        check_attention(q, k, v, mask, grad_out=g, **options)


# ------------------------------------------------------------------------------------ merge


@pytest.mark.parametrize("parts", [[0, 9], [0, 4, 9], [0, 0, 3, 9], [0, 1, 2, 5, 5, 9]])
def test_merge(rng, dtype, parts):
    """The bounds of the parts hold, since the merge's weights are at most 1 and sum to 1."""
    q, k, v, _, _ = operands(rng, dtype, (2, 3), 7, 9, 8, 5)
    mask = rng.random((7, 9)) < 0.7
    mask[2] = False
    mask[4, :4] = False
    pieces = [(k[..., a:b, :], v[..., a:b, :], mask[:, a:b]) for a, b in itertools.pairwise(parts)]
    got = sdpa.merge_attention(*zip(*[sdpa.attention_forward(q, *p) for p in pieces], strict=True))
    exact = [reference.attention_forward(q, *p) for p in pieces]
    bounds = [AttentionBounds(q, *p) for p in pieces]
    expected = reference.merge_attention(*zip(*exact, strict=True))
    whole = reference.attention_forward(q, k, v, mask)
    np.testing.assert_allclose(expected.out, whole.out, rtol=1e-12, atol=1e-13)

    assert got.out.dtype == dtype
    u = np.finfo(got.lse.dtype).eps
    e_lse = np.max([b.lse for b in bounds], axis=0) + u * (8 + np.abs(whole.lse))
    e_lse = np.where(np.isfinite(whole.lse), e_lse, 0)
    e_out = np.max([b.out for b in bounds], axis=0) * 2
    e_out += 4 * e_lse[..., None] * np.max([np.abs(e.out) for e in exact], axis=0)
    assert_within(got.out, whole.out, e_out, "out")
    assert_within(got.lse, whole.lse, e_lse, "lse")


# ------------------------------------------------------------------------------------ PyTorch


@pytest.mark.parametrize("kind", ["plain", "bool", "bias", "causal", "gqa"])
@pytest.mark.parametrize(
    ("n_q", "n_k", "d"), [(5, 7, 4), (17, 17, 16), (64, 200, 64), (200, 131, 33)]
)
def test_against_torch(torch, rng, compute_dtype, kind, n_q, n_k, d):
    """The drop-in against the original; the errors of both are within the bound."""
    q, k, v, g, _ = operands(
        rng, compute_dtype, (2, 6), n_q, n_k, d, d, kv_lead=(2, 2 if kind == "gqa" else 6)
    )
    mask = None
    if kind == "bool":
        mask = rng.random((2, 1, n_q, n_k)) < 0.6
        mask[..., 0] = True
    if kind == "bias":
        mask = normal(rng, (2, 6, n_q, n_k), compute_dtype)
    options = {"is_causal": kind == "causal", "enable_gqa": kind == "gqa"}
    bounds = AttentionBounds(q, k, v, mask, g, **options)

    tensors = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *tensors, None if mask is None else torch.tensor(mask), 0.0, **options
    )
    ours = sdpa.scaled_dot_product_attention(q, k, v, mask, 0.0, **options)
    expected = theirs.detach().numpy().astype(np.float64)
    assert_within(ours, expected, 2 * bounds.out, "out")

    out, lse = sdpa.attention_forward(q, k, v, mask, **options)
    grads = sdpa.attention_backward(g, q, k, v, out, lse, mask, **options)
    expected = torch.autograd.grad(theirs, tensors, torch.tensor(g))
    for name, theirs in zip(("query", "key", "value"), expected, strict=True):
        ours, bound = getattr(grads, name), getattr(bounds, name)
        assert_within(ours, theirs.numpy().astype(np.float64), 2 * bound, name)
