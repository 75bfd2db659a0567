"""The oracle itself: against PyTorch's autograd on the composed formula, in float64, and paper.

PyTorch serves as an independent implementation of matmul, softmax, logsumexp and of derivatives;
its own fused attention is not involved. Nothing here runs the C core.
"""

import functools
import itertools

import numpy as np
import pytest
from support.helpers import torch_composed, visible_pairs
from support.pytorch import ITS_OWN_WARNINGS

from sdpa import reference
from sdpa.reference import logits

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
    {"softcap": 0.8},
    {"sinks": True},
    {"sinks": True, "key_lengths": 0},
    {"alibi_slopes": [0.5, 0.1, -0.3], "query_offset": 2},
    {"alibi_slopes": 0.5, "is_causal": "lower_right"},
    {"dropout_p": 0.4, "rng": 2**40 + 3},
    {"softcap": 1.3, "sinks": True, "alibi_slopes": [0.5, 0.1, 0.3], "dropout_p": 0.4, "rng": 1}
    | {"scale": -0.7, "is_causal": True, "key_lengths": 6, "query_offset": 1},
]


def composed(torch, options, visible, n_q, n_k):
    """The definition by torch_composed: a function of query, key, value, bias, sinks."""
    offset = options.get("query_offset", 0)
    if options.get("is_causal") == "lower_right":
        offset = options.get("key_lengths", n_k) - n_q
    distance = abs(np.arange(n_q)[:, None] + offset - np.arange(n_k))
    slopes = np.broadcast_to(options.get("alibi_slopes", 0), 3)[:, None, None]
    factors = logits.dropout_factors(
        (2, 3, n_q, n_k), options.get("dropout_p", 0.0), options.get("rng")
    )
    return functools.partial(
        torch_composed,
        torch,
        visible=torch.tensor(visible),
        scale=options.get("scale"),
        softcap=options.get("softcap"),
        alibi=torch.tensor(-slopes * distance),
        factors=torch.tensor(factors),
    )


def problem(rng, options, mask, n_q, n_k):
    """(options, {name: operand to differentiate}, attn_mask, which pairs are visible)."""
    options = dict(options)
    if "key_lengths" in options:
        options["key_lengths"] = min(options["key_lengths"], n_k)
    pairs = {name: options[name] for name in ("is_causal", "window", "query_offset")
             if name in options}  # fmt: skip
    visible = visible_pairs(n_q, n_k, key_length=options.get("key_lengths"), **pairs)
    visible = np.broadcast_to(visible, (2, 3, n_q, n_k))
    inputs = {
        name: rng.standard_normal(shape)
        for name, shape in (
            ("query", (2, 3, n_q, 4)),
            ("key", (2, 3, n_k, 4)),
            ("value", (2, 3, n_k, 6)),
        )
    }
    attn_mask = None
    if mask == "bool":
        attn_mask = rng.random((3, n_q, n_k)) < 0.6
        visible = visible & attn_mask
    elif mask is not None:
        attn_mask = inputs["attn_mask"] = rng.standard_normal((2, 1, n_q, n_k))
    if mask == "-inf":
        hidden = rng.random(attn_mask.shape) < 0.4
        visible = visible & ~hidden
        attn_mask = np.where(hidden, -np.inf, attn_mask)
    if options.pop("sinks", False):
        inputs["sinks"] = options["sinks"] = rng.standard_normal(3)
    return options, inputs, attn_mask, visible


@ITS_OWN_WARNINGS
@pytest.mark.parametrize(("n_q", "n_k"), [(5, 7), (7, 5), (1, 1)])
@pytest.mark.parametrize("mask", [None, "bool", "bias", "-inf"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_derivative_against_torch(torch, rng, options, mask, n_q, n_k):
    """out, lse, gradients, forward mode (torch.func.jvp) and autograd of the gradients."""
    options, inputs, attn_mask, visible = problem(rng, options, mask, n_q, n_k)
    g, g_lse = rng.standard_normal((2, 3, n_q, 6)), rng.standard_normal((2, 3, n_q))
    along = {name: rng.standard_normal(x.shape) for name, x in inputs.items()}

    function = composed(torch, options, visible, n_q, n_k)
    leaves = {name: torch.tensor(x, requires_grad=True) for name, x in inputs.items()}
    names = {"attn_mask": "bias"}
    seen = torch.tensor(np.isfinite(reference.logsumexp(
        reference.forward.with_sink(np.where(visible, 0.0, -np.inf), options.get("sinks"))
    )))  # fmt: skip

    def forward_of(tensors):
        out, lse = function(**{names.get(name, name): x for name, x in tensors.items()})
        return out, torch.where(seen, lse, 0)

    directions = {name: torch.tensor(x) for name, x in along.items()}
    true, true_t = torch.func.jvp(forward_of, (leaves,), (directions,))
    grad_out = torch.tensor(g, requires_grad=True)
    true_out, true_lse = forward_of(leaves)
    loss = (true_out * grad_out).sum() + (true_lse * torch.tensor(g_lse)).sum()
    true_grads = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    directed = sum((a * b).sum() for a, b in zip(true_grads, directions.values(), strict=True))
    true_second = torch.autograd.grad(directed, [grad_out, *leaves.values()])

    def check(ours, theirs, what):
        np.testing.assert_allclose(
            ours, theirs.detach().numpy(), rtol=1e-10, atol=1e-11, err_msg=what
        )

    operands = [inputs[name] for name in ("query", "key", "value")]
    options["attn_mask"] = attn_mask
    out, lse = reference.attention_forward(*operands, **options)
    check(out, true[0], "out")
    check(np.where(seen, lse, 0), true[1], "lse")
    assert (lse[~seen.numpy()] == -np.inf).all()
    needs = tuple(inputs)
    grads = reference.attention_backward(
        g, *operands, out, lse, **options, grad_lse=g_lse, needs=needs
    )
    for name, theirs in zip(needs, true_grads, strict=True):
        check(getattr(grads, name), theirs, name)
    tangents = [along[name] for name in ("query", "key", "value")]
    mask_t, sinks_t = along.get("attn_mask"), along.get("sinks")
    moved = reference.attention_jvp(
        *operands, *tangents, **options, attn_mask_t=mask_t, sinks_t=sinks_t
    )
    check(moved.out, true[0], "out of jvp")
    check(moved.out_t, true_t[0], "out_t")
    needs = ("grad_out", *needs)
    second = reference.attention_double_backward(
        *tangents, g, *operands, out, lse, **options,
        gg_attn_mask=mask_t, gg_sinks=sinks_t, grad_lse=g_lse, needs=needs,
    )  # fmt: skip
    for name, theirs in zip(needs, true_second, strict=True):
        check(getattr(second, name), theirs, f"second derivative by {name}")
    for gradients in (grads, second):
        unasked = set(gradients._fields) - set(needs)
        assert all(getattr(gradients, name) is None for name in unasked)


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


def test_what_is_masked_cannot_matter(rng):
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


def test_what_is_masked_cannot_matter_to_weights_of_layers(rng):
    q, k, v, w = (rng.standard_normal((5, 5)) for _ in range(4))
    mask = rng.random((5, 5)) < 0.5
    mask[:, 2] = mask[3] = False
    k_bad, q_bad = k.copy(), q.copy()
    k_bad[2], q_bad[3] = np.nan, np.inf
    for name, weights in (("bilinear", (w,)), ("additive", (w, w.T, w[0], w[1]))):
        forward, backward = (
            getattr(reference, f"{name}_attention_{which}") for which in ("forward", "backward")
        )
        a, b = (
            backward(v, q, k, v, *weights, *forward(q, k, v, *weights, attn_mask=mask),
                     attn_mask=mask)
            for q, k in ((q, k), (q_bad, k_bad))
        )  # fmt: skip
        for x, y in zip(a, b, strict=True):
            np.testing.assert_equal(x, y)


def test_gradients_that_are_not_asked_for_are_none(rng):
    x, w = rng.standard_normal((4, 3)), np.eye(3)
    saved = reference.bilinear_attention_forward(x, x, x, w)
    grads = reference.bilinear_attention_backward(x, x, x, x, w, *saved, needs=["key"])
    assert [name for name, g in grads._asdict().items() if g is not None] == ["key"]
    saved = reference.cosine_attention_forward(x, x, x)
    grads = reference.cosine_attention_backward(x, x, x, x, *saved, needs=["value"])
    assert [name for name, g in grads._asdict().items() if g is not None] == ["value"]


def test_visible_keys_matter(rng):
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
    capped = 2 * np.tanh(s / 2)
    distance = np.abs(np.arange(4)[:, None] - np.arange(5))
    biased = np.where(
        np.arange(5) <= np.arange(4)[:, None], capped + bias - 0.3 * distance, -np.inf
    )
    weights = np.exp(biased) / (np.exp(biased).sum(-1, keepdims=True) + np.exp(0.7))
    got = reference.attention_weights(
        q, k, attn_mask=bias, is_causal=True, softcap=2, alibi_slopes=0.3, sinks=0.7, stage=stage
    )
    expected = {"scores": s, "capped": capped, "biased": biased, "weights": weights}[stage]
    np.testing.assert_allclose(got, expected, rtol=1e-14)


def test_weights_after_dropout_times_value_are_out(rng):
    q, k, v = (rng.standard_normal((2, 3, n, 4)) for n in (5, 6, 6))
    options = {"dropout_p": 0.5, "rng": 2**33 + 1, "sinks": np.array([1.0, -np.inf, 0.0])}
    weights = reference.attention_weights(q, k, **options)
    out = reference.attention(q, k, v, **options)
    np.testing.assert_allclose(weights @ v, out, atol=1e-15)
    whole = reference.attention_weights(q, k, sinks=options["sinks"])
    assert set(np.unique(np.round(weights / whole, 12))) == {0.0, 2.0}


# From Random123's file of known answers (kat_vectors, "philox4x32 10"): counter, key, words.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, words):
    counter, key = ([int(x, 16) for x in text.split()] for text in (counter, key))
    assert [f"{int(x):08x}" for x in logits.philox4x32(counter, key)] == words.split()


def test_dropout_takes_words_by_position():
    """One pair worked out from a known answer: counter (i, j // 4, head, batch), word j % 4."""
    words = [int(x, 16) for x in KNOWN_ANSWERS[0][2].split()]
    for p in (words[1] / 2**32, (words[1] + 1) / 2**32):
        factors = logits.dropout_factors((1, 1, 1, 5), p, 0)
        dropped = [word < round(p * 2**32) for word in words]
        np.testing.assert_array_equal(factors[0, 0, 0, :4] == 0, dropped)
        np.testing.assert_array_equal(factors[factors > 0], 1 / (1 - p))
    whole = logits.dropout_factors((2, 2, 3, 4, 8), 0.5, 2**63 + 5)
    words = logits.philox4x32((3, 1, 2, 2), (5, 2**31))  # batch (1, 0) is the third of four
    np.testing.assert_array_equal(whole[1, 0, 2, 3, 4:] == 0, [w < 2**31 for w in words])
    assert not logits.dropout_factors((2, 3), 1.0, 7).any()
    assert (logits.dropout_factors((2, 3), 0.0, None) == 1).all()


def test_statistics(rng):
    q, k = rng.standard_normal((2, 3, 5, 4)), rng.standard_normal((2, 3, 7, 4))
    options = {"is_causal": True, "sinks": np.array([0.5, -1.0, -np.inf]), "softcap": 1.5}
    s = reference.attention_statistics(q, k, query_offset=-1, **options)
    p = reference.attention_weights(q, k, query_offset=-1, **options)
    z = reference.attention_weights(q, k, query_offset=-1, stage="biased", **options)
    np.testing.assert_allclose(s.lse, reference.logsumexp(
        reference.forward.with_sink(z, options["sinks"])))  # fmt: skip
    np.testing.assert_allclose(s.entropy, -(p * np.log(np.where(p > 0, p, 1))).sum(-1), atol=1e-14)
    np.testing.assert_array_equal(s.max_weight, p.max(-1))
    np.testing.assert_allclose(s.sum_p2, (p**2).sum(-1))
    np.testing.assert_allclose(s.sum_p3, (p**3).sum(-1))
    for i in range(1, 5):  # query i sees the keys before i
        np.testing.assert_allclose(s.score_mean[..., i], z[..., i, :i].mean(-1))
        np.testing.assert_allclose(s.score_var[..., i], z[..., i, :i].var(-1), atol=1e-15)
    assert np.isnan(s.score_mean[..., 0]).all()
    np.testing.assert_array_equal(s.lse[..., 0], np.broadcast_to(options["sinks"], (2, 3)))


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
    # Every row includes something, because PyTorch returns NaN for empty ones.
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


def test_numbers_beyond_the_arithmetic_never_raise():
    x, tiny = np.full((2, 4), 1e-200), np.full((2, 4), 1e-320)
    with np.errstate(all="raise"):
        reference.softmax_jacobian(x)
        reference.rotary_embedding(tiny, [0.0, 1e300])
        reference.bilinear_attention_forward(x, x, x, np.full((4, 4), 1e-200))


def test_infinity_and_nan_in_rows():
    """As in the core: no weights beside +inf, and no gradient of what was left out."""
    inf, nan = np.inf, np.nan
    np.testing.assert_array_equal(reference.log_softmax([-inf, 0, inf]), [-inf, nan, nan])
    for g in (nan, inf):
        got = reference.log_softmax_backward([1, g], [-inf, 0])
        np.testing.assert_array_equal(got, [0, nan])


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
