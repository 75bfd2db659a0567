"""The error of a tanh, and of additive attention beside PyTorch and plain NumPy."""

import contextlib
import itertools

import numpy as np
import pytest
from support.additive import LARGEST, TANH, draw
from support.bounds import unit_roundoff
from support.helpers import normal
from support.machine import ISAS

import sdpa
from sdpa import _core

PROMISED = 1.25  # times the error of the better of PyTorch and NumPy: docs/additive.md
NAMES = ("out", "lse", "query", "key", "value", "w_query", "w_key", "w_score", "bias")


@contextlib.contextmanager
def using(isa):
    previous = _core._use_isa(isa)
    yield
    _core._use_isa(previous)


def sums(rng, dtype, kind, shape):
    """Projections of queries and keys: near 0, ordinary, beyond the exponentials, opposite."""
    largest = LARGEST[dtype.type]
    std = {"small": 1e-4, "ordinary": 2.0, "opposite": 1.0, "large": 2 * largest}[kind]
    a, b = (std * rng.standard_normal(n) for n in shape)
    if kind == "opposite":
        a, b = a + 0.95 * largest, b - 0.95 * largest
    return a.astype(dtype), b.astype(dtype)


@pytest.mark.parametrize("kind", ["small", "ordinary", "opposite", "large"])
def test_error_of_tanh(isa, compute_dtype, rng, kind):
    """With one key, one channel and a weight of 1, lse is the tanh itself."""
    a, b = sums(rng, compute_dtype, kind, (4000, 60))
    one = np.ones((1, 1), compute_dtype)
    lse = sdpa.additive_attention_forward(
        a[None, :, None], b[:, None, None], np.ones((60, 1, 1), compute_dtype), one, one, one[0]
    ).lse
    exact = np.tanh(a.astype(np.longdouble) + b[:, None].astype(np.longdouble))
    u = unit_roundoff(compute_dtype)
    # Beyond the range of the exponentials their sum is rounded, which bends what is not yet flat.
    total = abs(a.astype(np.longdouble) + b[:, None])
    rounded = (abs(a) > LARGEST[compute_dtype.type]) | (
        abs(b)[:, None] > LARGEST[compute_dtype.type]
    )
    bent = np.where(rounded, u * total / np.cosh(np.minimum(total, 30)) ** 2, 0)
    # lse = ln 2 (log2(e) s) + log 1: two roundings of it.
    assert (abs(lse - exact) <= TANH * u + bent + 2 * u * abs(exact)).all()


def composed(torch, x, g, g_lse, dtype):
    """out, lse and gradients of PyTorch's elementary operations, in this dtype, as float64."""
    t = [torch.tensor(a.astype(dtype), requires_grad=True) for a in x.values()]
    q, k, v, w_query, w_key, w_score, bias = t
    hidden = torch.tanh((q @ w_query + bias)[..., :, None, :] + (k @ w_key)[..., None, :, :])
    s = hidden @ w_score
    out, lse = torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)
    upstream = [torch.tensor(a.astype(dtype)) for a in (g, g_lse)]
    grads = torch.autograd.grad((out, lse), t, upstream)
    results = (a.detach().numpy().astype(np.float64) for a in (out, lse, *grads))
    return dict(zip(NAMES, results, strict=True))


def plain(x):
    """The forward alone, as anybody would write it in NumPy."""
    q, k, v, w_query, w_key, w_score, bias = x.values()
    s = np.tanh((q @ w_query + bias)[..., :, None, :] + (k @ w_key)[..., None, :, :]) @ w_score
    m = s.max(axis=-1, keepdims=True)
    p = np.exp(s - m)
    total = p.sum(axis=-1, keepdims=True)
    return {"out": p @ v / total, "lse": (m + np.log(total))[..., 0]}


@pytest.mark.parametrize("size", [1e3, 1e10, 1e12, 1e20, -1e20])
@pytest.mark.parametrize(("n_q", "n_k"), [(5, 7), (40, 300)])
def test_weights_of_rows_whose_lse_is_far(isa, compute_dtype, n_q, n_k, size):
    """Equal scores, beside which an lse has no digits: the weights of each row add up to 1."""
    tokens = [np.zeros((n, 2), compute_dtype) for n in (n_q, n_k)]
    value, grad_out = (np.ones((n, 3), compute_dtype) for n in (n_k, n_q))
    w_score, bias = np.array([size, 0], compute_dtype), np.full(2, 50, compute_dtype)
    x = *tokens, value, np.zeros((2, 2), compute_dtype), tokens[0][:2], w_score, bias
    saved = sdpa.additive_attention_forward(*x)
    grads = sdpa.additive_attention_backward(grad_out, *x, *saved)
    np.testing.assert_allclose(saved.out, 1, rtol=1e-5)
    np.testing.assert_allclose(grads.value, n_q / n_k, rtol=1e-5)
    np.testing.assert_allclose(grads.w_score, 0, atol=1e-3)


def rms(errors):
    return np.sqrt(np.mean(np.concatenate(errors) ** 2))


def tail(errors):
    """The error that one in a thousand exceeds; the largest of all depends on luck."""
    return np.quantile(abs(np.concatenate(errors)), 0.999)


@pytest.mark.parametrize("std", [0.3, 1.0, 4.0])
def test_no_less_precise_than_others(torch, rng, std):
    """Root mean square and tail of the errors of all results, pooled over draws.

    Where the slopes 1 - t^2 of all keys are nearly equal, dS, whose rows sum to 0, cancels in the
    gradients of queries and what belongs to them. They are allowed on top what is left of a
    backward that has the row sums of grad_out * out from the stored out; this one does not.
    """
    errors = {name: {} for name in (*ISAS, *(f"out of {isa}" for isa in ISAS), "torch", "numpy")}

    def note(who, results, exact):
        for name, result in results.items():
            errors[who].setdefault(name, []).append(np.ravel(result - exact[name]))

    for _ in range(6):
        x = draw(rng, np.dtype(np.float32), 64, 130, 32, 32, 16, 64, std=std)
        g = normal(rng, (2, 64, 16), np.float32)
        zero = np.zeros(g.shape[:-1], np.float32)
        exact = composed(torch, x, g, zero, np.float64)
        note("torch", composed(torch, x, g, zero, np.float32), exact)
        note("numpy", plain(x), exact)
        for isa in ISAS:
            with using(isa):
                out, lse = sdpa.additive_attention_forward(*x.values())
                grads = sdpa.additive_attention_backward(g, *x.values(), out, lse)[:7]
            note(isa, dict(zip(NAMES, (out, lse, *grads), strict=True)), exact)
            of_out = (g * (out - exact["out"])).sum(axis=-1)
            note(f"out of {isa}", composed(torch, x, g, -of_out, np.float64), exact)
    for measure, isa, name in itertools.product((rms, tail), ISAS, NAMES):
        peers = [measure(errors[p][name]) for p in ("torch", "numpy") if name in errors[p]]
        allowed = PROMISED * min(peers)
        if name in ("query", "w_query", "bias"):
            allowed += measure(errors[f"out of {isa}"][name])
        assert measure(errors[isa][name]) <= allowed, (isa, measure.__name__, name)
