"""ALiBi's slopes and T5's bias: values, memory, gradients down to the buckets."""

import tracemalloc

import numpy as np
import pytest
from support.helpers import LAYOUTS, assert_same_bits, normal

import sdpa
from sdpa import bias, reference

# ------------------------------------------------------------------------------- alibi


def test_slopes_of_a_power_of_two():
    np.testing.assert_array_equal(bias.alibi(8), 2.0 ** -np.arange(1, 9))
    np.testing.assert_allclose(bias.alibi(16), 2.0 ** (-np.arange(1, 17) / 2), rtol=1e-15)
    np.testing.assert_array_equal(bias.alibi(1), [2.0**-8])


def test_slopes_of_another_number():
    """12 heads take the slopes of 8 heads, then the first, third, ... of 16."""
    expected = np.concatenate([bias.alibi(8), bias.alibi(16)[::2][:4]])
    np.testing.assert_array_equal(bias.alibi(12), expected)
    for heads in range(1, 40):
        assert bias.alibi(heads).shape == (heads,)
        assert len(set(bias.alibi(heads))) == heads


def test_slopes_in_attention(rng, isa):
    x = rng.standard_normal((3, 6, 4))
    slopes = bias.alibi(3)
    distance = abs(np.arange(6)[:, None] - np.arange(6))
    out = sdpa.attention(x, x, x, alibi_slopes=slopes)
    added = sdpa.attention(x, x, x, -slopes[:, None, None] * distance)
    np.testing.assert_allclose(out, added, rtol=0, atol=1e-15)


# ------------------------------------------------------------------------------- t5

T5 = [
    {},
    {"bidirectional": False},
    {"query_offset": 9, "max_distance": 20},
    {"query_offset": -3, "bidirectional": False},
]


@pytest.mark.parametrize("options", T5, ids=str)
@pytest.mark.parametrize(("n_q", "n_k"), [(5, 9), (9, 5), (1, 300), (290, 1), (0, 4), (4, 0)])
def test_bias_against_the_oracle(rng, dtype, options, n_q, n_k):
    table = normal(rng, (32, 3), dtype)
    got = bias.t5_relative(table, n_q, n_k, **options)
    assert got.dtype == dtype
    np.testing.assert_array_equal(
        got.astype(np.float64), reference.t5_relative(table, n_q, n_k, **options)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_the_table(rng, dtype, layout):
    table = normal(rng, (32, 3), dtype)
    view = bias.t5_relative(LAYOUTS[layout](table), 5, 9)
    assert_same_bits(view, bias.t5_relative(table, 5, 9))
    back = bias.t5_relative_backward(LAYOUTS[layout](view), 32)
    assert_same_bits(back, bias.t5_relative_backward(view, 32))


@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_of_the_published_models(torch, bidirectional):
    """The published code's formula, with its precision, operations and defaults."""
    relative = torch.arange(-600, 600)
    n, start = 32, torch.zeros_like(relative)
    if bidirectional:
        n, start = 16, torch.where(relative > 0, 16, 0)
        distance = relative.abs()
    else:
        distance = (-relative).clamp(min=0)
    ratio = torch.log(distance.float() / (n // 2)) / np.log(128 / (n // 2))
    far = n // 2 + (ratio * (n - n // 2)).to(torch.long)
    expected = start + torch.where(distance < n // 2, distance, far.clamp(max=n - 1))
    table = np.arange(32.0)[:, None]
    got = bias.t5_relative(table, 1, 1200, bidirectional=bidirectional, query_offset=600)
    np.testing.assert_array_equal(got[0, 0], expected.numpy())


def test_bias_is_a_view_of_one_line(rng):
    table = normal(rng, (32, 4), np.float32)
    tracemalloc.start()
    view = bias.t5_relative(table, 20000, 20000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert view.nbytes == 4 * 20000**2 * 4
    assert peak < 100 * 40000
    assert not view.flags.writeable
    assert view[2, 12345, 6789] == view[2, 5556, 0]


def test_kernel_reads_the_view(rng, isa, dtype):
    query, key, value = (normal(rng, (2, 3, n, 8), dtype) for n in (150, 140, 140))
    view = bias.t5_relative(normal(rng, (32, 3), dtype), 150, 140)
    out = sdpa.attention(query, key, value, view, scale=1.0)
    assert_same_bits(out, sdpa.attention(query, key, value, view.copy(), scale=1.0))


@pytest.mark.parametrize("options", T5, ids=str)
@pytest.mark.parametrize(("n_q", "n_k"), [(5, 9), (9, 5), (1, 40), (40, 1), (0, 4), (4, 0)])
def test_gradient_is_the_transpose(rng, dtype, options, n_q, n_k):
    """<grad, bias(table)> = <backward(grad), table>, integers small enough to be exact."""
    table, grad = rng.integers(-2, 3, (32, 3)), rng.integers(-1, 2, (2, 3, n_q, n_k))
    table, grad = table.astype(dtype), grad.astype(dtype)
    back = bias.t5_relative_backward(grad, 32, **options)
    assert back.dtype == dtype
    assert back.shape == (32, 3)
    forward = bias.t5_relative(table, n_q, n_k, **options).astype(np.float64)
    assert (grad.astype(np.float64) * forward).sum() == (back.astype(np.float64) * table).sum()


CASES = [
    {},
    {"is_causal": True, "bidirectional": False},
    {"is_causal": "lower_right", "bidirectional": False},
    {"window": (30, 4), "query_offset": 7, "sinks": True, "softcap": 2.0},
    {"key_lengths": np.array([40, 77]), "scale": 1.0},
    {"enable_gqa": True, "max_distance": 40},
]


@pytest.mark.parametrize("options", CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("block", [32, 50, 1000])
def test_all_gradients_in_blocks(monkeypatch, rng, isa, options, block):
    """The gradients equal those of one call with the whole bias, in float64, to 1e-12."""
    monkeypatch.setattr(bias, "_BLOCK_ROWS", block)
    monkeypatch.setattr(bias, "_BLOCK_ELEMENTS", 0)
    options = dict(options)
    own = {n: options.pop(n) for n in ("bidirectional", "max_distance") if n in options}
    key_heads = 2 if "enable_gqa" in options else 4
    query, key, value = (
        rng.standard_normal((2, h, n, 8)) for h, n in ((4, 90), (key_heads, 77), (key_heads, 77))
    )
    table, grad_out = rng.standard_normal((32, 4)), rng.standard_normal((2, 4, 90, 8))
    grad_lse = rng.standard_normal((2, 4, 90))
    if "sinks" in options:
        options["sinks"] = rng.standard_normal(4)
    offset = (
        77 - 90 if options.get("is_causal") == "lower_right" else options.get("query_offset", 0)
    )
    view = bias.t5_relative(table, 90, 77, query_offset=offset, **own)
    saved = sdpa.attention_forward(query, key, value, view, **options)
    visible = np.isfinite(saved.lse)
    grad_lse = np.where(visible, grad_lse, 0)
    needs = ["query", "key", "value", *(["sinks"] if "sinks" in options else [])]
    grads = bias.t5_attention_backward(
        grad_out, query, key, value, table, *saved, grad_lse=grad_lse, needs=[*needs, "table"],
        **own, **options,
    )  # fmt: skip
    expected = sdpa.attention_backward(
        grad_out, query, key, value, *saved, view, grad_lse=grad_lse, needs=[*needs, "attn_mask"],
        **options,
    )  # fmt: skip
    by_table = bias.t5_relative_backward(expected.attn_mask, 32, query_offset=offset, **own)
    pairs = [(getattr(grads, n), getattr(expected, n)) for n in needs] + [(grads.table, by_table)]
    for ours, true in pairs:
        np.testing.assert_allclose(ours, true, rtol=0, atol=1e-12 * abs(true).max())


@pytest.mark.parametrize("block", [2, 1000])
def test_one_head_without_an_axis(monkeypatch, rng, block):
    monkeypatch.setattr(bias, "_BLOCK_ROWS", block)
    monkeypatch.setattr(bias, "_BLOCK_ELEMENTS", 0)
    query, key, value, grad_out = (rng.standard_normal((n, 4)) for n in (5, 7, 7, 5))
    table, options = rng.standard_normal((8, 1)), {"sinks": 0.3, "is_causal": "lower_right"}
    own = {"bidirectional": False, "max_distance": 9}
    view = bias.t5_relative(table, 5, 7, query_offset=2, **own)[0]
    saved = sdpa.attention_forward(query, key, value, view, **options)
    given = options | own | {"needs": ("query", "key", "value", "table", "sinks")}
    x = (grad_out, query, key, value), saved
    grads = bias.t5_attention_backward(*x[0], table, *x[1], **given)
    with_heads = [[y[None] for y in part] for part in x]
    expected = bias.t5_attention_backward(*with_heads[0], table, *with_heads[1], **given)
    for ours, one, like in zip(grads, expected, (query, key, value, table, 0.3), strict=True):
        np.testing.assert_array_equal(ours, one.reshape(np.shape(like)))
        assert np.shape(ours) == np.shape(like)


def test_gradients_in_blocks_of_16_bits(rng, dtype):
    """Sums over blocks stay in float32 and are rounded once."""
    query, key, value, grad_out = (normal(rng, (2, 70, 8), dtype) for _ in range(4))
    table = normal(rng, (32, 2), dtype)
    out, lse = sdpa.attention_forward(query, key, value, bias.t5_relative(table, 70, 70))
    got = bias.t5_attention_backward(grad_out, query, key, value, table, out, lse)
    wide = np.float64 if dtype == np.float64 else np.float32
    x = [y.astype(wide) for y in (grad_out, query, key, value)]
    expected = bias.t5_attention_backward(*x, table.astype(wide), out, lse)
    for a, b in zip(got, expected, strict=True):
        assert a is b is None or (a.dtype == dtype and (a == b.astype(dtype)).all())


def test_sums_beyond_the_range_do_not_warn(monkeypatch, rng):
    """As in `attention_backward`, whose sums are in C."""
    grad = np.full((2, 1, 3, 3), np.inf)
    grad[1] = -np.inf
    assert np.isnan(bias.t5_relative_backward(grad, 8)[0])
    monkeypatch.setattr(bias, "_BLOCK_ELEMENTS", 0)
    query, key, value = (normal(rng, (1, 80, 4), np.float32) for _ in range(3))
    table, grad_out = normal(rng, (32, 1), np.float32), np.full((1, 80, 4), 3e38, np.float32)
    out, lse = sdpa.attention_forward(query, key, value, bias.t5_relative(table, 80, 80))
    found = bias.t5_attention_backward(grad_out, query, key, value, table, out, lse)
    assert np.isinf(found.value).any()


def test_gradients_in_blocks_without_the_matrix(rng):
    """8192 x 8192 in float32 would be 256 MiB."""
    n = 8192
    query, key, value, grad_out = (normal(rng, (1, n, 4), np.float32) for _ in range(4))
    table = normal(rng, (32, 1), np.float32)
    out, lse = sdpa.attention_forward(query, key, value, bias.t5_relative(table, n, n))
    tracemalloc.start()
    bias.t5_attention_backward(grad_out, query, key, value, table, out, lse)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 << 20


def test_autograd(torch, rng):
    """The table's gradient, against PyTorch's through softmax and indexing."""
    query, key, value = (rng.standard_normal((2, n, 4)) for n in (6, 9, 9))
    table, grad_out = rng.standard_normal((8, 2)), rng.standard_normal((2, 6, 4))
    view = bias.t5_relative(table, 6, 9, max_distance=6)
    saved = sdpa.attention_forward(query, key, value, view, scale=1.0)
    grads = bias.t5_attention_backward(
        grad_out, query, key, value, table, *saved, max_distance=6, scale=1.0
    )
    tq, tk, tv, tt = (torch.tensor(y, requires_grad=True) for y in (query, key, value, table))
    buckets = [[reference.t5_bucket(j - i, 8, max_distance=6) for j in range(9)] for i in range(6)]
    s = tq @ tk.transpose(-1, -2) + tt[torch.tensor(buckets)].permute(2, 0, 1)
    out = torch.softmax(s, dim=-1) @ tv
    expected = torch.autograd.grad((out * torch.tensor(grad_out)).sum(), (tq, tk, tv, tt))
    for ours, true in zip(grads[:4], expected, strict=True):
        np.testing.assert_allclose(ours, true.numpy(), rtol=0, atol=1e-13)


# ------------------------------------------------------------------------------- refused

TABLE = np.ones((32, 2))
