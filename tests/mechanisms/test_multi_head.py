"""MultiHeadAttention: its formula and gradients, rounding and scale rules."""

import math
import re

import numpy as np
import pytest
from support.bounds import AttentionBounds, Number
from support.helpers import (
    BFLOAT16,
    assert_same_bits,
    assert_within,
    normal,
    unit_roundoff,
)
from support.layers import D_CONTEXT, D_MODEL, HEADS, LAYERS, made

import sdpa

RULES = (None, "1/sqrt d_k", "1/d_k", "1/log d_k", "1/(2 sqrt d_k)", "learned", 1.0, -0.3, 0)
EVERY_LAYER = pytest.mark.parametrize("name", LAYERS)


def rotated(torch, layer, x, positions):
    """Rotation of pairs as multiplication of complex numbers."""
    r = layer.d_k if layer.rotary_dim is None else layer.rotary_dim
    pairs = x[..., :r].reshape(*x.shape[:-1], *((-1, 2) if layer.rotary_interleaved else (2, -1)))
    pairs = pairs if layer.rotary_interleaved else pairs.transpose(-1, -2)
    angles = positions[..., None] * layer.rotary_base ** (-torch.arange(0, r, 2).double() / r)
    pairs = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_real(pairs)
    pairs = pairs if layer.rotary_interleaved else pairs.transpose(-1, -2)
    return torch.cat([pairs.reshape(*x.shape[:-1], r), x[..., r:]], dim=-1)


def composed(torch, layer, p, x, context, bias, positions=None, context_positions=None):
    """The layer's formula in PyTorch's elementary operations: (out, weights)."""

    def split(y, kind):
        width = layer.d_v if kind == "value" else layer.d_k
        y = y @ p[f"w_{kind}"] + p.get(f"b_{kind}", 0)
        return y.reshape(*y.shape[:-1], -1, width).transpose(-3, -2)

    def placed(y, kind, positions):
        if layer.qk_norm:
            y = torch.nn.functional.rms_norm(y, (layer.d_k,), p[f"g_{kind}"], layer.norm_eps)
        if layer.rotary:
            at = torch.arange(y.shape[-2]) if positions is None else torch.as_tensor(positions)
            y = rotated(torch, layer, y, at[..., None, :].double())
        return y

    source = x if context is None else context
    q = placed(split(x, "query"), "query", positions)
    k = placed(split(source, "key"), "key", positions if context is None else context_positions)
    v = split(x if layer.swap_roles else source, "key" if layer.tied_kv else "value")
    k, v = (y.repeat_interleave(HEADS // layer.kv_heads, -3) for y in (k, v))
    factor = {"1/sqrt d_k": layer.d_k**-0.5, "1/d_k": 1 / layer.d_k}
    if layer.scale == "learned":
        q = q * p["scale"][:, None, None]
    elif not layer.fold_scale:
        q = q * factor[layer.scale]
    scores = k @ q.transpose(-1, -2) if layer.swap_roles else q @ k.transpose(-1, -2)
    weights = torch.softmax(scores + bias, dim=-1)
    out = (weights @ v).transpose(-3, -2)
    return out.reshape(*out.shape[:-2], -1) @ p["w_out"] + p.get("b_out", 0), weights


@EVERY_LAYER
def test_against_autograd_of_the_composed_formula(torch, rng, isa, name):
    """float64: to 1e-12 of the largest element."""
    layer, x, context = made(rng, name)
    weights = layer.attention_weights(x, context)
    bias = rng.standard_normal(weights.shape[-2:])
    out, saved = layer.forward(x, context, attn_mask=bias)
    grad_out = rng.standard_normal(out.shape)
    needs = ("parameters", "x", "context", "attn_mask")
    grads = layer.backward(grad_out, saved, needs=needs)

    inputs = {**layer.parameters, "x": x, "attn_mask": bias}
    if context is not None:
        inputs["context"] = context
    leaves = {n: torch.tensor(y, requires_grad=True) for n, y in inputs.items()}
    their_out, their_weights = composed(
        torch, layer, leaves, leaves["x"], leaves.get("context"), leaves["attn_mask"]
    )
    their_grads = torch.autograd.grad((their_out * torch.tensor(grad_out)).sum(), leaves.values())
    ours = {**grads.parameters, "x": grads.x, "attn_mask": grads.attn_mask}
    if context is not None:
        ours["context"] = grads.context
    else:
        assert grads.context is None
    unbiased = composed(
        torch, layer, leaves, leaves["x"], leaves.get("context"), torch.zeros(bias.shape)
    )[1]
    pairs = [("out", out, their_out), ("weights", weights, unbiased)]
    pairs += [(n, ours[n], g) for n, g in zip(leaves, their_grads, strict=True)]
    assert their_weights.shape == weights.shape
    pairs = [(what, a, b.detach().numpy()) for what, a, b in pairs]
    sizes = {what: abs(b).max() for what, _, b in pairs}
    # The bias of the columns shifts all scores of a row alike: its gradient is a sum that cancels.
    columns = "query" if layer.swap_roles else "key"
    sizes[f"b_{columns}"] = sizes[f"w_{columns}"]
    for what, a, b in pairs:
        assert a.shape == b.shape, what
        assert abs(a - b).max() <= 1e-12 * sizes[what], what
    assert set(grads.parameters) == set(layer.parameters)


@pytest.mark.parametrize("name", ["rotary", "rotary part", "all swapped tied"])
def test_positions(torch, rng, name):
    """Of each batch entry, or one row for all; None counts from 0; only differences matter."""
    layer, x, context = made(rng, name)
    at = {"positions": rng.integers(-9, 99, x.shape[:-1])}
    if context is not None:
        at["context_positions"] = rng.uniform(-9, 99, context.shape[-2])
    out, saved = layer.forward(x, context, **at)
    grad_out = rng.standard_normal(out.shape)
    grads = layer.backward(grad_out, saved)
    leaves = {n: torch.tensor(y, requires_grad=True) for n, y in layer.parameters.items()}
    tx, tc = (None if y is None else torch.tensor(y, requires_grad=True) for y in (x, context))
    expected, weights = composed(torch, layer, leaves, tx, tc, 0, **at)
    expected.backward(torch.tensor(grad_out))
    pairs = [
        (out, expected.detach()),
        (layer.attention_weights(x, context, **at), weights.detach()),
    ]
    pairs += [(grads.x, tx.grad), (layer(x, context, **at), expected.detach())]
    pairs += [(g, leaves[n].grad) for n, g in grads.parameters.items()]
    pairs += [] if context is None else [(grads.context, tc.grad)]
    for ours, theirs in pairs:
        assert abs(ours - theirs.numpy()).max() <= 1e-12 * abs(theirs).max()

    lengths = {"positions": x.shape[-2]} | ({} if context is None else {"context_positions": 7})
    for start in (0, 1000):
        at = {n: np.arange(start, start + length) for n, length in lengths.items()}
        np.testing.assert_allclose(layer(x, context, **at), layer(x, context), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("large", "eps"), [(1e25, 1e-6), (1e37, 1e-6), (1.0, 1e-320)])
def test_rows_of_zeros_have_a_norm(rng, compute_dtype, large, eps):
    """Their root mean square is that of eps, and large ones neither overflow nor count as 0."""
    layer = sdpa.MultiHeadAttention(8, 2, qk_norm=True, norm_eps=eps, dtype=compute_dtype, rng=0)
    x = normal(rng, (3, 5, 8), compute_dtype)
    x[0] = 0
    x[1] *= large if compute_dtype == np.float32 else large**8
    out, saved = layer.forward(x)
    grads = layer.backward(np.ones_like(out), saved)
    assert np.isfinite(grads.x).all()
    assert np.isfinite(grads.parameters["w_query"]).all()
    lengths = (saved.query[1] ** 2).mean(axis=-1)
    np.testing.assert_allclose(lengths, 1, rtol=1e-5)
    assert (saved.query[0] == 0).all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_against_torch_multi_head_attention(torch, rng, is_causal):
    theirs = torch.nn.MultiheadAttention(
        D_MODEL, HEADS, bias=False, batch_first=True, dtype=torch.float64
    )
    joint = theirs.in_proj_weight.detach().numpy()
    names = ("w_query", "w_key", "w_value")
    parameters = {n: w.T for n, w in zip(names, np.split(joint, 3), strict=True)}
    parameters["w_out"] = theirs.out_proj.weight.detach().numpy().T
    layer = sdpa.MultiHeadAttention(D_MODEL, HEADS, dtype=np.float64, rng=rng)
    x, context = rng.standard_normal((2, 6, D_MODEL)), rng.standard_normal((2, 6, D_MODEL))
    out, saved = layer.forward(x, context, parameters=parameters, is_causal=is_causal)
    tx, tc = (torch.tensor(y, requires_grad=True) for y in (x, context))
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1) if is_causal else None
    expected = theirs(tx, tc, tc, attn_mask=mask, need_weights=False)[0]
    np.testing.assert_allclose(out, expected.detach().numpy(), rtol=0, atol=1e-14)

    grad_out = rng.standard_normal(out.shape)
    expected.backward(torch.tensor(grad_out))
    grads = layer.backward(grad_out, saved)
    by_joint = np.split(theirs.in_proj_weight.grad.numpy(), 3)
    expected = {n: w.T for n, w in zip(names, by_joint, strict=True)}
    expected["w_out"] = theirs.out_proj.weight.grad.numpy().T
    for name, grad in grads.parameters.items():
        np.testing.assert_allclose(grad, expected[name], rtol=0, atol=1e-13)
    np.testing.assert_allclose(grads.x, tx.grad.numpy(), rtol=0, atol=1e-13)
    np.testing.assert_allclose(grads.context, tc.grad.numpy(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["learned grouped", "swapped cross", "tied", "all", "rotary part"])
def test_differences(rng, name):
    """Central differences; their truncation is measured by halving the step, of order 4."""
    layer, x, context = made(rng, name, n_q=3, n_k=4)
    out, saved = layer.forward(x, context)
    grad_out = rng.standard_normal(out.shape)
    grads = layer.backward(grad_out, saved)
    arguments = {**layer.parameters, "x": x, "context": context}
    analytic = {**grads.parameters, "x": grads.x, "context": grads.context}

    def loss(name, at, step):
        changed = {n: None if y is None else y.copy() for n, y in arguments.items()}
        changed[name][at] += step
        p = {n: changed[n] for n in layer.parameters}
        return (layer(changed["x"], changed["context"], parameters=p) * grad_out).sum()

    def difference(name, at, h):
        return (loss(name, at, h) - loss(name, at, -h)) / (2 * h)

    h, rounding = 1e-3, 200 * 2.0**-53 * abs(grad_out * out).sum()
    for name, y in arguments.items():
        if y is None:
            continue
        for flat in rng.permutation(y.size)[:6]:
            at = np.unravel_index(flat, y.shape)
            coarse, fine = difference(name, at, h), difference(name, at, h / 2)
            error = abs(coarse - fine) + 2 * rounding / h
            assert abs(analytic[name][at] - fine) <= error < 1e-4, (name, at)


# ------------------------------------------------------------------------------- rounding


def merged(x):
    """Numbers of (..., heads, L, width) side by side: (rows of all, heads width)."""

    def flat(y):
        y = np.swapaxes(y, -3, -2)
        return y.reshape(-1, y.shape[-2] * y.shape[-1])

    return Number(flat(x.size), flat(x.error), x.u)


def split(x, lead, heads):
    """The inverse of `merged`."""

    def wide(y):
        return np.swapaxes(y.reshape(*lead, heads, -1), -3, -2)

    return Number(wide(x.size), wide(x.error), x.u)


def test_rounding(rng, isa, compute_dtype):
    """Running error analysis through all products, forward and backward."""
    layer, x, context = made(rng, "cross", compute_dtype)
    out, saved = layer.forward(x, context, is_causal=True)
    grad_out = normal(rng, out.shape, compute_dtype)
    grads = layer.backward(grad_out, saved)

    exact = sdpa.MultiHeadAttention(D_MODEL, HEADS, d_context=D_CONTEXT, dtype=np.float64, rng=rng)
    exact.parameters = {n: y.astype(np.float64) for n, y in layer.parameters.items()}
    x, context, grad_out = (y.astype(np.float64) for y in (x, context, grad_out))
    expected, exact_saved = exact.forward(x, context, is_causal=True)
    expected_grads = exact.backward(grad_out, exact_saved)

    u = 2 * unit_roundoff(compute_dtype)  # of both, where both are float64

    def number(y):
        rows = abs(y).reshape(-1, y.shape[-1])
        return Number(rows, np.zeros_like(rows), u)

    def times(y, name):
        return number(y) @ number(exact.parameters[name])

    lead_q, lead_k = x.shape[:-1], context.shape[:-1]
    errors = [
        split(times(y, name), lead, HEADS).error
        for y, name, lead in (
            (x, "w_query", lead_q),
            (context, "w_key", lead_k),
            (context, "w_value", lead_k),
        )
    ]
    by_heads = split(number(grad_out) @ number(exact.parameters["w_out"]).t, lead_q, HEADS)
    exact_by_heads = np.swapaxes(
        (grad_out @ exact.parameters["w_out"].T).reshape(*lead_q, HEADS, -1), -3, -2
    )
    bounds = AttentionBounds(
        exact_saved.query, exact_saved.key, exact_saved.value, grad_out=exact_by_heads,
        errors=(*errors, by_heads.error), dtype=compute_dtype, is_causal=True,
    )  # fmt: skip
    heads = merged(Number(abs(exact_saved.out), bounds.out, u))
    dq, dk, dv = (merged(d) for d in (bounds.dq, bounds.dk, bounds.dv))
    p = {n: number(y) for n, y in exact.parameters.items()}
    of = {
        "w_query": number(x).t @ dq,
        "w_key": number(context).t @ dk,
        "w_value": number(context).t @ dv,
        "w_out": heads.t @ number(grad_out),
    }

    def within(actual, true, bound):
        assert actual.dtype == compute_dtype
        assert_within(actual, true, bound.rounded(compute_dtype).reshape(true.shape))

    within(out, expected, heads @ p["w_out"])
    for name, bound in of.items():
        within(grads.parameters[name], expected_grads.parameters[name], bound)
    within(grads.x, expected_grads.x, dq @ p["w_query"].t)
    within(grads.context, expected_grads.context, dk @ p["w_key"].t + dv @ p["w_value"].t)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=["f16", "bf16"])
@EVERY_LAYER
def test_16_bits_are_float32_rounded_once(rng, name, dtype):
    layer, x, context = made(rng, name, dtype)
    kwargs = LAYERS[name][0]
    wide = sdpa.MultiHeadAttention(D_MODEL, HEADS, **kwargs, dtype=np.float32, rng=rng)
    wide.parameters = {n: y.astype(np.float32) for n, y in layer.parameters.items()}
    bias = normal(rng, layer.attention_weights(x, context).shape[-2:], dtype)

    def floats(y):
        return None if y is None else y.astype(np.float32)

    out, saved = layer.forward(x, context, attn_mask=bias)
    wide_out, wide_saved = wide.forward(floats(x), floats(context), attn_mask=floats(bias))
    assert_same_bits(out, wide_out.astype(dtype))
    needs = ("parameters", "x", "context", "attn_mask")
    grads = layer.backward(out, saved, needs=needs)
    expected = wide.backward(floats(out), wide_saved, needs=needs)
    for n, grad in grads.parameters.items():
        assert_same_bits(grad, expected.parameters[n].astype(dtype), n)
    for grad, true in zip(grads[1:], expected[1:], strict=True):
        assert (grad is None) == (true is None)
        if grad is not None:
            assert_same_bits(grad, true.astype(dtype))


# ------------------------------------------------------------------------------- scale and roles


@pytest.mark.parametrize("rule", RULES)
def test_scale_rules(rng, rule):
    kwargs = {"dtype": np.float64, "scale": rule}
    layer = sdpa.MultiHeadAttention(16, 2, **kwargs, rng=1)
    x = rng.standard_normal((5, 16))
    q, k = ((x @ layer.parameters[n]).reshape(5, 2, 8).swapaxes(0, 1) for n in ("w_query", "w_key"))
    factors = {"1/log d_k": 1 / math.log(8), "1/(2 sqrt d_k)": 0.5 / math.sqrt(8), "1/d_k": 1 / 8}
    is_number = isinstance(rule, float | int)
    s = q @ k.swapaxes(-1, -2) * (rule if is_number else factors.get(rule, 1 / math.sqrt(8)))
    weights = np.exp(s) / np.exp(s).sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(layer.attention_weights(x), weights, rtol=1e-13)
    if rule == "learned":
        layer.parameters["scale"][:] = 0.0
        np.testing.assert_array_equal(layer.attention_weights(x), np.full((2, 5, 5), 0.2))
    else:
        folded = sdpa.MultiHeadAttention(16, 2, fold_scale=True, **kwargs, rng=1)
        np.testing.assert_allclose(folded.attention_weights(x), weights, rtol=1e-13)
        np.testing.assert_allclose(folded(x), layer(x), rtol=0, atol=1e-14)


@pytest.mark.parametrize(("optimizer", "bias"), [("sgd", False), ("sgd", True), ("adam", False)])
@pytest.mark.parametrize("scale", [None, -0.5])
def test_a_folded_scale_trains_along_the_same_path_with_its_learning_rates(
    rng, optimizer, bias, scale
):
    """Without the factors the path differs. Adam's epsilon is 0 here, for exact equality.

    It would enlarge the rounding of the key's bias, whose gradient is 0.
    """
    x, target = rng.standard_normal((4, 6, 16)), rng.standard_normal((4, 6, 16))

    def trained(fold_scale, corrected):
        layer = sdpa.MultiHeadAttention(
            16, 1, scale=scale, fold_scale=fold_scale, bias=bias, dtype=np.float64, rng=5
        )
        factors = layer.learning_rate_factors(optimizer)
        moments = {n: [np.zeros_like(w)] * 2 for n, w in layer.parameters.items()}
        for step in range(1, 6):
            out, saved = layer.forward(x)
            grads = layer.backward((out - target) / 24, saved).parameters
            for name, g in grads.items():
                rate = 0.05 * (factors[name] if corrected else 1)
                if optimizer == "adam":
                    m, v = moments[name]
                    m, v = moments[name] = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
                    g = m / (1 - 0.9**step) / np.sqrt(v / (1 - 0.99**step))
                layer.parameters[name] -= rate * g
        return layer(x)

    in_kernel = trained(False, True)
    np.testing.assert_allclose(trained(True, True), in_kernel, rtol=0, atol=1e-11)
    assert abs(trained(True, False) - in_kernel).max() > 1e-4


@pytest.mark.parametrize(("dtype", "scale"), [("float16", 1e6), ("float32", -1e39)])
def test_a_folded_scale_beyond_the_range(dtype, scale):
    text = f"scale: expected a factor with which w_query stays in the range of {dtype}, got {scale}"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        sdpa.MultiHeadAttention(8, 2, scale=scale, fold_scale=True, dtype=dtype, rng=0)


def test_learning_rate_factors_without_folding():
    layer = sdpa.MultiHeadAttention(8, 2, rng=0)
    assert set(layer.learning_rate_factors("sgd").values()) == {1.0}


def test_swapped_weights_are_not_the_transpose(rng):
    kwargs = {"dtype": np.float64, "rng": 2}
    layer = sdpa.MultiHeadAttention(8, 2, **kwargs)
    swapped = sdpa.MultiHeadAttention(8, 2, swap_roles=True, **kwargs)
    x = rng.standard_normal((6, 8))
    a, b = layer.attention_weights(x), swapped.attention_weights(x)
    np.testing.assert_allclose(a.sum(axis=-1), 1, rtol=1e-14)
    np.testing.assert_allclose(b.sum(axis=-1), 1, rtol=1e-14)
    assert abs(b - a.swapaxes(-1, -2)).max() > 0.01
    # Their scores are: the logarithms differ by a number per row and a number per column.
    difference = np.log(b) - np.log(a.swapaxes(-1, -2))
    by_row = difference - difference[:, :, :1]
    np.testing.assert_allclose(by_row, np.broadcast_to(by_row[:, :1], b.shape), rtol=0, atol=1e-13)


# ------------------------------------------------------------------------------- edges


@pytest.mark.parametrize("name", ["cross", "biased cross", "normed learned", "rotary part"])
def test_masked_context_cannot_matter(rng, isa, compute_dtype, name):
    layer, x, context = made(rng, name, compute_dtype)

    def run():
        out, saved = layer.forward(x, context, key_lengths=5)
        return out, layer.backward(np.ones_like(out), saved)

    clean_out, clean = run()
    context[:, 5:] = np.nan
    out, grads = run()
    assert_same_bits(out, clean_out)
    tolerance = 100 * unit_roundoff(compute_dtype)
    for name, grad in grads.parameters.items():
        true = clean.parameters[name]
        np.testing.assert_allclose(grad, true, rtol=0, atol=tolerance * abs(true).max())
    np.testing.assert_allclose(grads.context, clean.context, rtol=0, atol=tolerance)
    assert (grads.context[:, 5:] == 0).all()


def test_leading_axes(rng):
    """No leading axis, one, several; the gradient of a shared context is a sum."""
    layer, _, _ = made(rng, "cross")
    x, context = rng.standard_normal((3, 2, 5, D_MODEL)), rng.standard_normal((7, D_CONTEXT))
    out, saved = layer.forward(x, context)
    grad_out = rng.standard_normal(out.shape)
    grads = layer.backward(grad_out, saved)
    total = np.zeros_like(context)
    for i in np.ndindex(3, 2):
        one, one_saved = layer.forward(x[i], context)
        np.testing.assert_allclose(out[i], one, rtol=0, atol=1e-14)
        g = layer.backward(grad_out[i], one_saved)
        np.testing.assert_allclose(grads.x[i], g.x, rtol=0, atol=1e-14)
        total += g.context
    np.testing.assert_allclose(grads.context, total, rtol=0, atol=1e-13)


def test_nothing_in_the_batch(rng):
    layer = sdpa.MultiHeadAttention(8, 2, rng=0)
    out, saved = layer.forward(np.ones((0, 5, 8), np.float32))
    assert out.shape == (0, 5, 8)
    grads = layer.backward(out, saved)
    assert all((g == 0).all() for g in grads.parameters.values())
    context = np.ones((0, 8), np.float32)
    assert (layer(np.ones((5, 8), np.float32), context) == 0).all()


def test_arguments_are_not_written(rng, dtype):
    layer, x, context = made(rng, "learned grouped", dtype)
    grad_out = normal(rng, x.shape, dtype)
    everything = [x, context, grad_out, *layer.parameters.values()]
    before = [y.copy() for y in everything]
    for y in everything:
        y.flags.writeable = False
    out, saved = layer.forward(x, context, dropout_p=0.2, rng=1)
    layer.backward(grad_out, saved)
    assert out.dtype == dtype
    assert saved.lse.dtype == np.float64  # all digits, for the backward
    for y, copy in zip(everything, before, strict=True):
        assert_same_bits(y, copy)


@pytest.mark.parametrize(
    ("arguments", "said"), [((8,), "missing.*'heads'"), ((8, 2, 3), "too many positional")]
)
def test_a_call_without_its_arguments_names_the_layer(arguments, said):
    with pytest.raises(TypeError, match=rf"^MultiHeadAttention\(\) {said}"):
        sdpa.MultiHeadAttention(*arguments)
