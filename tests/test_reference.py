"""The oracle itself: against PyTorch's autograd on the composed formula, in float64, and paper.

PyTorch serves as an independent implementation of matmul, softmax, logsumexp and of derivatives;
its own fused attention is not involved. Nothing here runs the C core.
"""

import doctest
import itertools

import numpy as np
import pytest
from helpers import torch_composed, visible_pairs

from sdpa import reference
from sdpa.reference import forward, logits

OPTIONS = [
    {},
    {"scale": -0.3},
    {"scale": 0.0},
    {"is_causal": True},
    {"is_causal": "upper_left"},
    {"is_causal": "lower_right"},
    {"window": (2, 1)},
    {"window": (None, 0)},
    {"window": (1, None), "is_causal": True},
    {"query_offset": -3, "is_causal": True},
    {"query_offset": 2, "window": (1, 1)},
    {"key_lengths": 4},
    {"key_lengths": 0},
    {"key_lengths": 3, "is_causal": "lower_right"},
    {"key_lengths": 5, "is_causal": "lower_right", "window": (2, 0)},
]


@pytest.mark.parametrize("page", [forward, logits])
def test_doctest(page):
    result = doctest.testmod(page)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize(("n_q", "n_k"), [(5, 7), (7, 5), (1, 1)])
@pytest.mark.parametrize("mask", [None, "bool", "bias", "-inf"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_attention_and_gradients_against_torch(torch, rng, options, mask, n_q, n_k):
    q, k, v, g = (
        rng.standard_normal(shape)
        for shape in ((2, 3, n_q, 4), (2, 3, n_k, 4), (2, 3, n_k, 6), (2, 3, n_q, 6))
    )
    g_lse = rng.standard_normal((2, 3, n_q))
    attn_mask = bias = None
    pairs = dict(options)
    scale = pairs.pop("scale", None)
    pairs["key_length"] = min(pairs.pop("key_lengths", n_k), n_k)
    if "key_lengths" in options:
        options = options | {"key_lengths": pairs["key_length"]}
    visible = np.broadcast_to(visible_pairs(n_q, n_k, **pairs), (2, 3, n_q, n_k))
    if mask == "bool":
        attn_mask = rng.random((3, n_q, n_k)) < 0.6
        visible = visible & attn_mask
    elif mask is not None:
        attn_mask = bias = rng.standard_normal((2, 1, n_q, n_k))
    if mask == "-inf":
        hidden = rng.random(bias.shape) < 0.4
        visible = visible & ~hidden
        attn_mask = np.where(hidden, -np.inf, bias)

    out, lse = reference.attention_forward(q, k, v, attn_mask, scale=scale, **_without(options))
    needs = ("query", "key", "value") + (() if bias is None else ("attn_mask",))
    grads = reference.attention_backward(
        g, q, k, v, out, lse, attn_mask, grad_lse=g_lse, needs=needs, scale=scale,
        **_without(options),
    )  # fmt: skip

    inputs = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    if bias is not None:
        inputs.append(torch.tensor(bias, requires_grad=True))
    expected, expected_lse = torch_composed(
        torch, *inputs[:3], torch.tensor(visible), *inputs[3:], scale=scale
    )
    seen = torch.tensor(visible.any(-1))
    loss = (expected * torch.tensor(g)).sum()
    loss = loss + torch.where(seen, expected_lse * torch.tensor(g_lse), 0).sum()
    expected_grads = torch.autograd.grad(loss, inputs)

    np.testing.assert_allclose(out, expected.detach(), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(lse, expected_lse.detach(), rtol=1e-12, atol=1e-13)
    for name, grad in zip(needs, expected_grads, strict=True):
        np.testing.assert_allclose(getattr(grads, name), grad, rtol=1e-11, atol=1e-12, err_msg=name)


def _without(options):
    return {name: value for name, value in options.items() if name != "scale"}


def test_grouped_and_broadcast_operands_equal_repeated_ones(rng):
    q = rng.standard_normal((2, 1, 6, 5, 4))
    k = rng.standard_normal((3, 2, 7, 4))
    v = rng.standard_normal((2, 1, 2, 7, 3))
    mask = rng.standard_normal((3, 1, 5, 1))
    g = rng.standard_normal((2, 3, 6, 5, 3))

    whole = [np.broadcast_to(q, (2, 3, 6, 5, 4))]
    whole += [np.repeat(np.broadcast_to(x, (2, 3, *x.shape[-3:])), 3, axis=-3) for x in (k, v)]
    whole_mask = np.broadcast_to(mask, (2, 3, 6, 5, 7))
    needs = ("query", "key", "value", "attn_mask")

    few = reference.attention_forward(q, k, v, mask, enable_gqa=True)
    many = reference.attention_forward(*whole, whole_mask)
    np.testing.assert_allclose(few.out, many.out, rtol=1e-13)
    np.testing.assert_allclose(few.lse, many.lse, rtol=1e-13)
    few = reference.attention_backward(g, q, k, v, *few, mask, enable_gqa=True, needs=needs)
    many = reference.attention_backward(g, *whole, *many, whole_mask, needs=needs)
    np.testing.assert_allclose(few.query, many.query.sum(1, keepdims=True), atol=1e-12)
    by_head = many.key.reshape(2, 3, 2, 3, 7, 4)
    np.testing.assert_allclose(few.key, by_head.sum((0, 3)), atol=1e-12)
    by_head = many.value.reshape(2, 3, 2, 3, 7, 3)
    np.testing.assert_allclose(few.value, by_head.sum((1, 3))[:, None], atol=1e-12)
    over = many.attn_mask.sum((0, 2, 4))[:, None, :, None]
    np.testing.assert_allclose(few.attn_mask, over, atol=1e-12)


def test_lengths_and_offsets_per_batch_entry(rng):
    q, k, v = (rng.standard_normal((3, 2, n, 4)) for n in (4, 6, 6))
    lengths, offsets = np.array([0, 3, 6]), np.array([-2, 0, 5])
    got = reference.attention_forward(
        q, k, v, is_causal=True, key_lengths=lengths, query_offset=offsets
    )
    for b in range(3):
        pairs = visible_pairs(4, 6, True, None, lengths[b], offsets[b])
        one = reference.attention_forward(q[b], k[b], v[b], pairs)
        np.testing.assert_array_equal(got.out[b], one.out)
        np.testing.assert_array_equal(got.lse[b], one.lse)


def test_what_is_masked_cannot_be_felt(rng):
    q, k, v, g = (rng.standard_normal((2, 5, 3)) for _ in range(4))
    mask = rng.random((2, 5, 5)) < 0.5
    mask[:, :, 2] = False
    mask[:, 3] = False
    k_bad, v_bad, q_bad, g_bad = k.copy(), v.copy(), q.copy(), g.copy()
    k_bad[:, 2], v_bad[:, 2] = np.nan, np.inf
    q_bad[:, 3], g_bad[:, 3] = np.inf, np.nan
    for bias in (mask, np.where(mask, 0.25, -np.inf)):
        clean = reference.attention_forward(q, k, v, bias)
        dirty = reference.attention_forward(q_bad, k_bad, v_bad, bias)
        np.testing.assert_array_equal(clean.out, dirty.out)
        np.testing.assert_array_equal(clean.lse, dirty.lse)
        a = reference.attention_backward(g, q, k, v, *clean, bias)
        b = reference.attention_backward(g_bad, q_bad, k_bad, v_bad, *dirty, bias)
        for x, y in zip(a[:3], b[:3], strict=True):
            np.testing.assert_array_equal(x, y)


def test_what_is_not_masked_is_felt(rng):
    q, k, v = (rng.standard_normal((5, 3)) for _ in range(3))
    v[2, 1] = np.nan
    out = reference.attention(q, k, v, is_causal=True)
    assert np.isnan(out[2:, 1]).all()
    assert not np.isnan(out[:2]).any()
    assert not np.isnan(out[:, (0, 2)]).any()


@pytest.mark.parametrize("stage", ["scores", "capped", "biased", "weights"])
def test_stages(rng, stage):
    q, k, bias = (rng.standard_normal(shape) for shape in ((4, 3), (5, 3), (4, 5)))
    s = q @ k.T / np.sqrt(3)
    biased = np.where(np.arange(5) <= np.arange(4)[:, None], s + bias, -np.inf)
    weights = np.exp(biased) / np.exp(biased).sum(-1, keepdims=True)
    got = reference.attention_weights(q, k, bias, is_causal=True, stage=stage)
    expected = {"scores": s, "capped": s, "biased": biased, "weights": weights}[stage]
    np.testing.assert_allclose(got, expected, rtol=1e-14)


def test_merge_is_attention_over_all_keys(rng):
    q, k, v = (rng.standard_normal((2, n, 4)) for n in (3, 9, 9))
    whole = reference.attention_forward(q, k, v, is_causal="lower_right", query_offset=None)
    visible = visible_pairs(3, 9, "lower_right")
    parts = [
        reference.attention_forward(q, k[:, a:b], v[:, a:b], visible[:, a:b])
        for a, b in ((0, 4), (4, 4), (4, 8), (8, 9))
    ]
    outs, lses = zip(*parts, strict=True)
    merged = reference.merge_attention(outs, lses)
    np.testing.assert_allclose(merged.out, whole.out, rtol=1e-13)
    np.testing.assert_allclose(merged.lse, whole.lse, rtol=1e-13)
    nothing = reference.merge_attention([np.full((2, 3), np.nan)] * 2, [np.full(2, -np.inf)] * 2)
    np.testing.assert_array_equal(nothing.out, np.zeros((2, 3)))
    np.testing.assert_array_equal(nothing.lse, [-np.inf] * 2)


@pytest.mark.parametrize("axis", [-1, 0, 1, (0, 2), None])
def test_softmax_family_against_torch(torch, rng, axis):
    x = rng.standard_normal((3, 4, 5))
    # Something is included everywhere, since PyTorch answers NaN where nothing is.
    where = (rng.random(x.shape) < 0.7) | (x == x.max(axis, keepdims=True))
    axes = tuple(range(3)) if axis is None else axis
    t = torch.tensor(x, requires_grad=True)
    kept = torch.where(torch.tensor(where), t / 1.5, -torch.inf)
    lse = torch.logsumexp(kept, axes, keepdim=True)
    g = rng.standard_normal(x.shape)

    p = reference.softmax(x, axis, temperature=1.5, where=where)
    np.testing.assert_allclose(p, torch.exp(kept - lse).detach(), rtol=1e-13)
    log_p = reference.log_softmax(x, axis, temperature=1.5, where=where)
    np.testing.assert_allclose(log_p, (kept - lse).detach(), rtol=1e-12, atol=1e-14)
    total = reference.logsumexp(x / 1.5, axis, where=where)
    np.testing.assert_allclose(total, torch.logsumexp(kept, axes).detach(), rtol=1e-12, atol=1e-14)
    assert reference.logsumexp(x, axis, keepdims=True).shape == lse.shape

    grad = reference.softmax_backward(g, p, axis, temperature=1.5)
    loss = (torch.exp(kept - lse) * torch.tensor(g)).sum()
    np.testing.assert_allclose(grad, torch.autograd.grad(loss, t, retain_graph=True)[0], atol=1e-14)
    grad = reference.log_softmax_backward(g, log_p, axis, temperature=1.5)
    loss = torch.where(torch.tensor(where), (kept - lse) * torch.tensor(g), 0).sum()
    np.testing.assert_allclose(grad, torch.autograd.grad(loss, t, retain_graph=True)[0], atol=1e-13)
    g = rng.standard_normal(total.shape)
    grad = reference.logsumexp_backward(g, np.where(where, x / 1.5, -np.inf), total, axis) / 1.5
    loss = (torch.logsumexp(kept, axes) * torch.tensor(g)).sum()
    np.testing.assert_allclose(grad, torch.autograd.grad(loss, t)[0], atol=1e-14)


def test_softmax_of_nothing():
    x = np.array([[-np.inf, -np.inf], [0.0, -np.inf]])
    np.testing.assert_array_equal(reference.softmax(x), [[0, 0], [1, 0]])
    np.testing.assert_array_equal(reference.log_softmax(x), [[-np.inf, -np.inf], [0, -np.inf]])
    np.testing.assert_array_equal(reference.logsumexp(x), [-np.inf, 0])
    np.testing.assert_array_equal(reference.softmax(np.ones((2, 3)), where=False), np.zeros((2, 3)))
    assert reference.softmax(np.ones((2, 0))).shape == (2, 0)
    assert reference.logsumexp(np.ones(0)) == -np.inf


@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_jacobian_is_the_derivative(rng, axis):
    x = rng.standard_normal((2, 3, 4))
    p = reference.softmax(x, axis, temperature=0.7)
    jacobian = reference.softmax_jacobian(p, axis, temperature=0.7)
    n = x.shape[axis]
    rest = np.moveaxis(x, axis, -1).shape[:-1]
    assert jacobian.shape == (*rest, n, n)
    step = 1e-6
    for j in range(n):
        up = np.moveaxis(x, axis, -1).copy()
        down = up.copy()
        up[..., j] += step
        down[..., j] -= step
        difference = reference.softmax(up, temperature=0.7) - reference.softmax(
            down, temperature=0.7
        )
        np.testing.assert_allclose(jacobian[..., j], difference / (2 * step), atol=1e-9)


@pytest.mark.parametrize(
    ("n_q", "n_k", "d_k", "d_v"), list(itertools.product((0, 2), (0, 3), (0, 2), (0, 2)))
)
def test_empty_sizes(n_q, n_k, d_k, d_v):
    q, k, v = np.ones((2, n_q, d_k)), np.ones((2, n_k, d_k)), np.ones((2, n_k, d_v))
    out, lse = reference.attention_forward(q, k, v)
    assert out.shape == (2, n_q, d_v)
    np.testing.assert_array_equal(out, np.full(out.shape, min(n_k, 1.0)))
    if n_k:
        np.testing.assert_allclose(lse, np.full(lse.shape, np.log(n_k) + np.sqrt(d_k)))
    else:
        np.testing.assert_array_equal(lse, np.full(lse.shape, -np.inf))
    grads = reference.attention_backward(np.ones(out.shape), q, k, v, out, lse)
    assert [grad.shape for grad in grads[:3]] == [q.shape, k.shape, v.shape]
