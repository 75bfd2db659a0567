"""The promise on precision: errors no larger than those of the better of PyTorch and plain NumPy.

On the same data in the same dtype, over ten draws or more, the root mean square of the errors
against exact arithmetic is at most 1.05 times, and the largest error of a draw, on average over the
draws, at most 1.25 times, the smaller of theirs; for out, lse and every gradient, at scores of
standard deviation 1, 8 and 25. Exact means float64. The promise does not cover float64 itself, nor
kernels without fused multiply-add on a machine whose peers have it: these are held to wider bounds
here, float64 against extended precision. For gradients of rows of more than 1024 keys 1.1 times is
promised in place of 1.05. Where the weights are rounded to bfloat16 for the product,
1.1 and 2 times are promised. (The largest error over all draws is up to a single element:
from seed to seed its ratio varies between 0.7 and 1.6, that of the average by 0.05.)
"""

import functools

import numpy as np
import pytest
from support.bounds import weights_roundoff
from support.helpers import BFLOAT16
from support.machine import SEED

import sdpa

PROMISED = {"rms": 1.05, "max": 1.25}
# Of gradients of rows of more than COMPLETED keys.
LONG = {"rms": 1.1, "max": 1.25}
COMPLETED = 1024
BEYOND_THE_PROMISE = {"rms": 1.25, "max": 2.0}
ROUNDED_WEIGHTS = {"rms": 1.1, "max": 2.0}
RESULTS = ("out", "lse", "query", "key", "value")

# (draws, heads, Lq, Lk, d, is_causal). NumPy is slow in extended precision, with which float64 is
# compared, and in float16, hence more draws of smaller sizes for them. The wider bounds of float64
# need a third of these draws.
LARGE = {
    "square": (10, 2, 512, 512, 64, False),
    "causal": (20, 2, 512, 512, 64, True),
    "odd": (60, 3, 77, 331, 41, False),
    # More keys than those whose weights the backward keeps.
    "long": (10, 1, 96, 8500, 64, False),
}
SMALL = {
    "square": (12, 4, 128, 128, 64, False),
    "causal": (12, 4, 128, 128, 64, True),
    "odd": (40, 3, 37, 91, 41, False),
    "long": (10, 1, 24, 8500, 64, False),
}


def draws(dtype, case, std):
    """Several (query, key, value, grad_out); the scores have this standard deviation."""
    n_draws, heads, n_q, n_k, d, _ = case
    for draw in range(n_draws):
        rng = np.random.default_rng([SEED, draw])
        shapes = ((n_q, d), (n_k, d), (n_k, d), (n_q, d))
        x = [rng.standard_normal((1, heads, *shape)) for shape in shapes]
        x[0] *= std
        yield [y.astype(dtype) for y in x]


def plain(q, k, v, g, is_causal):
    """The obvious NumPy code, in the dtype of the arguments: a dict of RESULTS."""
    dtype = q.dtype

    def matmul(a, b):
        # NumPy adds products of float16 and of bfloat16 in float32; BLAS does the same faster.
        wide = np.promote_types(dtype, np.float32)
        return (a.astype(wide) @ b.astype(wide)).astype(dtype)

    scale = dtype.type(1 / np.sqrt(q.shape[-1]))
    s = matmul(q, k.swapaxes(-1, -2)) * scale
    if is_causal:
        s = np.where(np.tri(*s.shape[-2:], dtype=bool), s, dtype.type(-np.inf))
    m = s.max(axis=-1, keepdims=True)
    e = np.exp(s - m)
    total = e.sum(axis=-1, keepdims=True)
    p = e / total
    out = matmul(p, v)
    dp = matmul(g, v.swapaxes(-1, -2))
    ds = p * (dp - (g * out).sum(axis=-1, keepdims=True)) * scale
    return {
        "out": out,
        "lse": (m + np.log(total))[..., 0],
        "query": matmul(ds, k),
        "key": matmul(ds.swapaxes(-1, -2), q),
        "value": matmul(p.swapaxes(-1, -2), g),
    }


def with_torch(torch, q, k, v, g, is_causal):
    def tensor(x):
        return (
            torch.tensor(x.astype(np.float32)).bfloat16()
            if x.dtype == BFLOAT16
            else torch.tensor(x)
        )

    def array(x):
        return x.detach().to(torch.float64).numpy()

    q, k, v, g = (tensor(x) for x in (q, k, v, g))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=is_causal)
    grads = torch.autograd.grad(out, inputs, g)
    # The operator behind the function above; only this one returns lse.
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    lse = fused(q, k, v, 0.0, is_causal)[1]
    return dict(zip(RESULTS, map(array, (out, lse, *grads)), strict=True))


def with_sdpa(q, k, v, g, is_causal, lse_dtype=None):
    out, lse = sdpa.attention_forward(q, k, v, is_causal=is_causal, lse_dtype=lse_dtype)
    grads = sdpa.attention_backward(g, q, k, v, out, lse, is_causal=is_causal)
    return {"out": out, "lse": lse, "query": grads.query, "key": grads.key, "value": grads.value}


def pooled(results, exact):
    """{result: (rms of the errors over all draws, mean of every draw's largest)}."""
    errors = {name: [] for name in RESULTS}
    for one, true in zip(results, exact, strict=True):
        for name in RESULTS:
            assert one[name].shape == true[name].shape
            error = (one[name].astype(true[name].dtype) - true[name]).ravel()
            errors[name].append(error.astype(np.float64))
    return {
        name: (np.sqrt(np.mean(np.square(e))), np.mean(np.max(np.abs(e), axis=1)))
        for name, e in errors.items()
    }


@functools.lru_cache(maxsize=1)
def exact_and_peers(torch, dtype, case, std):
    """The exact results of every draw, and the pooled errors of PyTorch and NumPy."""
    wide = np.longdouble if dtype == np.float64 else np.float64
    exact, peers = [], {"torch": [], "numpy": []}
    for x in draws(dtype, case, std):
        exact.append(plain(*(y.astype(wide) for y in x), case[-1]))
        peers["numpy"].append(plain(*x, case[-1]))
        peers["torch"].append(with_torch(torch, *x, case[-1]))
    return exact, {name: pooled(results, exact) for name, results in peers.items()}


def broken_bounds(ours, peers, bounds, of_gradients):
    """A line for each error beyond the bounds; those of gradients are `of_gradients`."""
    broken = []
    for result in RESULTS:
        allowances = bounds if result in ("out", "lse") else of_gradients
        for i, (kind, allowed) in enumerate(allowances.items()):
            theirs = {peer: errors[result][i] for peer, errors in peers.items()}
            ratio = ours[result][i] / min(theirs.values())
            if not ratio <= allowed:
                broken.append(
                    f"{result} {kind}: {ours[result][i]:.3g} is {ratio:.3f} of the better, "
                    f"torch {theirs['torch']:.3g}, numpy {theirs['numpy']:.3g}"
                )
    return broken


@pytest.mark.parametrize("std", [1, 8, 25])
@pytest.mark.parametrize("name", SMALL)
def test_as_exact_as_the_better_peer(torch, isa, dtype, name, std):
    case = (LARGE if dtype in (np.float32, BFLOAT16) else SMALL)[name]
    if dtype == np.float64:
        case = (case[0] // 3, *case[1:])
    exact, peers = exact_and_peers(torch, dtype, case, std)
    ours = pooled([with_sdpa(*x, case[-1]) for x in draws(dtype, case, std)], exact)
    bounds = BEYOND_THE_PROMISE if isa == "generic" or dtype == np.float64 else PROMISED
    if dtype == BFLOAT16 and weights_roundoff(dtype):
        bounds = ROUNDED_WEIGHTS
    is_long = bounds is PROMISED and dtype == np.float32 and case[3] > COMPLETED
    broken = broken_bounds(ours, peers, bounds, LONG if is_long else bounds)
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("std", [1, 8, 25])
@pytest.mark.parametrize("name", ["square", "long"])
def test_as_exact_with_a_float64_lse(torch, isa, name, std):
    """lse itself is float64 then, and must be at least as exact."""
    case = LARGE[name]
    exact, peers = exact_and_peers(torch, np.float32, case, std)
    found = [with_sdpa(*x, case[-1], np.float64) for x in draws(np.float32, case, std)]
    assert {x["lse"].dtype for x in found} == {np.dtype(np.float64)}
    bounds = BEYOND_THE_PROMISE if isa == "generic" else PROMISED
    is_long = bounds is PROMISED and case[3] > COMPLETED
    broken = broken_bounds(pooled(found, exact), peers, bounds, LONG if is_long else bounds)
    assert not broken, "\n".join(broken)


@pytest.mark.skipif(
    np.finfo(np.longdouble).eps == np.finfo(np.float64).eps,
    reason="here a long double is a double",
)
def test_exact_is_exact():
    """The formula in float64 and in extended precision differs by roundings of float64 only."""
    case = SMALL["causal"]
    x = next(draws(np.float64, case, 8))
    a, b = plain(*x, True), plain(*(y.astype(np.longdouble) for y in x), True)
    for name in RESULTS:
        size = np.sqrt(np.mean(b[name] ** 2))
        assert np.max(np.abs(a[name] - b[name])) < 1e3 * np.finfo(np.float64).eps * size
