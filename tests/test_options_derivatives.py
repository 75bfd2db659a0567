"""Options and derivatives of every order against PyTorch's autograd on the composed formula.

float64: results agree to 1e-11 of their largest element, which rounding cannot reach and a wrong
term cannot pass; float32: to 1e-4, some thousand roundings. The differential tests bound float32.
"""

import numpy as np
import pytest

import sdpa

HEADS, N_Q, N_K, D_K, D_V = 3, 37, 150, 19, 7
NEEDS = ("query", "key", "value", "attn_mask", "sinks")


def keep_factors(seed, batch, p):
    """0 or 1 / (1 - p) of every pair: Philox4x32-10 of (i, j // 4, head, batch), word j % 4."""
    low = np.uint64(0xFFFFFFFF)
    counters = np.meshgrid(
        *(np.arange(n, dtype=np.uint64) for n in (batch, HEADS, N_Q, -(-N_K // 4))), indexing="ij"
    )
    b, h, i, j = counters
    c = [i, j, h, b]
    keys = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)]
    for _ in range(10):
        one, two = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        shift = np.uint64(32)
        c = [(two >> shift) ^ c[1] ^ keys[0], two & low, (one >> shift) ^ c[3] ^ keys[1], one & low]
        keys = [(keys[0] + np.uint64(0x9E3779B9)) & low, (keys[1] + np.uint64(0xBB67AE85)) & low]
    words = np.stack(c, axis=-1).reshape(batch, HEADS, N_Q, -1)[..., :N_K]
    return np.where(words < round(p * 2**32), 0, 1 / (1 - p))


def composed(torch, q, k, v, mask, sinks, o, factors):
    """The definition, in PyTorch: (out, lse, weights before dropout, final scores)."""
    s = q @ k.transpose(-1, -2) * o.get("scale", D_K**-0.5)
    if "softcap" in o:
        s = o["softcap"] * torch.tanh(s / o["softcap"])
    distance = torch.arange(N_Q)[:, None] + o.get("query_offset", 0) - torch.arange(N_K)
    if "alibi_slopes" in o:
        s = s - torch.tensor(o["alibi_slopes"])[:, None, None] * distance.abs()
    if mask is not None:
        s = s + mask
    if o.get("is_causal"):
        s = s.masked_fill(distance < 0, -torch.inf)
    s = s.masked_fill(torch.arange(N_K) >= o.get("key_lengths", N_K), -torch.inf)
    logits = s
    if sinks is not None:
        logits = torch.cat([s, sinks[:, None, None].expand(*s.shape[:-1], 1)], dim=-1)
    w = torch.softmax(logits, dim=-1)[..., :N_K]
    return (w * factors) @ v, torch.logsumexp(logits, dim=-1), w, s


CASES = {
    "plain": {},
    "causal": {"is_causal": True, "query_offset": 5},
    "lengths": {"key_lengths": 131},
    "softcap": {"softcap": 1.3},
    "negative scale": {"scale": -0.4},
    "sinks": {"sinks": True},
    "alibi": {"alibi_slopes": np.array([0.3, 0.5, 0.01]), "query_offset": -3},
    "mask": {"mask": (HEADS, N_Q, N_K)},
    "mask over rows": {"mask": (1, HEADS, 1, N_K)},
    "mask over heads": {"mask": (2, 1, N_Q, N_K)},
    "dropout": {"dropout_p": 0.3, "rng": (1 << 40) + 77},
    "all": {
        "softcap": 1.7,
        "sinks": True,
        "alibi_slopes": np.array([0.3, 0.5, 0.01]),
        "mask": (HEADS, 1, N_K),
        "dropout_p": 0.3,
        "rng": 5,
        "is_causal": True,
        "query_offset": 9,
        "scale": -0.4,
        "key_lengths": 131,
        "workers": 2,
    },
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", [np.float64, np.float32], ids=["f64", "f32"])
def test_against_autograd(torch, isa, rng, kind, name):
    options = dict(CASES[name])
    mask_shape, has_sinks = options.pop("mask", None), options.pop("sinks", False)

    def random(*shape):
        return rng.standard_normal(shape).astype(kind)

    def leaf(x):
        return None if x is None else torch.tensor(x.astype(np.float64), requires_grad=True)

    # The key is shared by the batch, so that its gradient is a sum.
    inputs = [random(2, HEADS, N_Q, D_K), random(1, HEADS, N_K, D_K), random(2, HEADS, N_K, D_V)]
    inputs += [random(*mask_shape) if mask_shape else None, random(HEADS) if has_sinks else None]
    tangents = [None if x is None else random(*x.shape) for x in inputs]
    grad_out, grad_lse = random(2, HEADS, N_Q, D_V), random(2, HEADS, N_Q)
    factors = np.ones((2, HEADS, N_Q, N_K))
    if "rng" in options:
        factors = keep_factors(options["rng"], 2, options["dropout_p"])
    leaves = [leaf(x) for x in inputs]
    given = [x for x in leaves if x is not None]
    up = leaf(grad_out)
    out, lse, w, scores = composed(torch, *leaves, options, torch.tensor(factors))
    total = (out * up).sum() + (lse * torch.tensor(grad_lse.astype(np.float64))).sum()
    first = torch.autograd.grad(total, given, create_graph=True)
    along = [torch.tensor(t.astype(np.float64)) for t in tangents if t is not None]
    directed = sum((a * b).sum() for a, b in zip(first, along, strict=True))
    second = torch.autograd.grad(directed, [up, *given])

    def check(what, ours, true):
        true = true.detach().numpy() if hasattr(true, "detach") else true
        assert ours.shape == true.shape, what
        error = np.max(np.abs(ours - true)) / np.max(np.abs(true))
        assert error < (1e-11 if kind is np.float64 else 1e-4), (what, error)

    arguments = inputs[:3]
    options |= {"attn_mask": inputs[3], "sinks": inputs[4]}
    needs = tuple(n for n, x in zip(NEEDS, inputs, strict=True) if x is not None)
    result, our_lse = sdpa.attention_forward(*arguments, **options)
    check("out", result, out)
    check("lse", our_lse, lse)
    check(
        "weights",
        sdpa.attention_weights(*arguments[:2], **options)[0],
        (w.detach().numpy() * factors)[0],
    )
    grads = sdpa.attention_backward(
        grad_out, *arguments, result, our_lse, **options, grad_lse=grad_lse, needs=needs
    )
    for n, true in zip(needs, first, strict=True):
        check(f"gradient of {n}", getattr(grads, n), true)
    jvp = sdpa.attention_jvp(
        *arguments, *tangents[:3], **options, attn_mask_t=tangents[3], sinks_t=tangents[4]
    )
    check("out of jvp", jvp.out, out)
    check("jvp", jvp.out_t, second[0])
    twice = sdpa.attention_double_backward(
        *tangents[:3],
        grad_out,
        *arguments,
        result,
        our_lse,
        **options,
        gg_attn_mask=tangents[3],
        gg_sinks=tangents[4],
        grad_lse=grad_lse,
        needs=("grad_out", *needs),
    )
    for n, true in zip(("grad_out", *needs), second, strict=True):
        check(f"second derivative of {n}", getattr(twice, n), true)

    for unused in ("dropout_p", "rng"):
        options.pop(unused, None)
    s = sdpa.attention_statistics(*arguments[:2], **options)
    p, scores = w.detach().numpy(), scores.detach().numpy()
    check("statistics: lse", s.lse, lse)
    check("entropy", s.entropy, -(p * np.log(np.where(p > 0, p, 1))).sum(axis=-1))
    check("max_weight", s.max_weight, p.max(axis=-1))
    check("sum_p2", s.sum_p2, (p**2).sum(axis=-1))
    check("sum_p3", s.sum_p3, (p**3).sum(axis=-1))
    seen = np.isfinite(scores)
    count = seen.sum(axis=-1)
    mean = np.where(seen, scores, 0).sum(axis=-1) / count
    check("score_mean", s.score_mean, mean)
    spread = np.where(seen, scores - mean[..., None], 0)
    if name != "causal" and name != "all":  # where a row sees one key, its variance is 0
        check("score_var", s.score_var, (spread**2).sum(axis=-1) / count)


def test_second_order_does_not_depend_on_workers(isa, rng):
    x = [rng.standard_normal((2, 3, 200, 24)).astype(np.float32) for _ in range(7)]
    q, k, v, g, *tangents = x
    out, lse = sdpa.attention_forward(q, k, v, is_causal=True)
    calls = [
        lambda n: sdpa.attention_jvp(q, k, v, *tangents, is_causal=True, workers=n),
        lambda n: sdpa.attention_double_backward(
            *tangents, g, q, k, v, out, lse, is_causal=True, workers=n
        )[:4],
        lambda n: sdpa.attention_statistics(q, k, is_causal=True, workers=n),
    ]
    for call in calls:
        one = [a.tobytes() for a in call(1)]
        for n in (2, 3, 5):
            assert [a.tobytes() for a in call(n)] == one


def test_a_masked_row_with_a_sink(isa):
    q, v = np.ones((2, 3, 4)), np.full((2, 3, 4), np.nan)
    out, lse = sdpa.attention_forward(q, q, v, sinks=np.array([0.5, -2.0]), key_lengths=0)
    assert (out == 0).all()
    assert (lse == np.array([[0.5], [-2.0]])).all()


def test_statistics_at_65536_keys(isa, rng):
    """Against the weights themselves, a block of queries at a time."""
    q, k = rng.standard_normal((8, 16)), rng.standard_normal((65536, 16))
    s = sdpa.attention_statistics(q, k, scale=1.0)
    w = sdpa.attention_weights(q, k, scale=1.0)
    np.testing.assert_allclose(s.sum_p2, (w**2).sum(axis=-1), rtol=1e-11)
    np.testing.assert_allclose(s.entropy, -(w * np.log(np.where(w > 0, w, 1))).sum(-1), rtol=1e-11)
    np.testing.assert_allclose(s.max_weight, w.max(axis=-1), rtol=1e-11)
