"""Cosine and bilinear attention against PyTorch's autograd, its gradcheck, and differences."""

import numpy as np
import pytest
from support.helpers import torch_composed, visible_pairs

import sdpa

pytestmark = pytest.mark.usefixtures("isa")

INPUTS = {"cosine": ("query", "key", "value"), "bilinear": ("query", "key", "value", "weight")}
N_Q, N_K, D_Q, D_K, D_V = 4, 9, 3, 4, 2


@pytest.fixture(params=INPUTS)
def mechanism(request):
    return request.param


def inputs_of(rng, mechanism, heads=3, key_heads=1):
    shapes = {
        "query": (2, heads, N_Q, D_Q if mechanism == "bilinear" else D_K),
        "key": (2, key_heads, N_K, D_K),
        "value": (2, key_heads, N_K, D_V),
        "weight": (heads, D_Q, D_K),
    }
    return {name: rng.standard_normal(shapes[name]) for name in INPUTS[mechanism]}


def forward(mechanism, x, **options):
    return getattr(sdpa, f"{mechanism}_attention_forward")(*x.values(), **options)


def backward(mechanism, grad_out, x, saved, **options):
    function = getattr(sdpa, f"{mechanism}_attention_backward")
    return function(grad_out, *x.values(), *saved, **options)


def composed(torch, mechanism, x, temperature, visible, bias):
    """(out, lse) from PyTorch's elementary operations."""
    q, k, v = x["query"], x["key"], x["value"]
    if mechanism == "cosine":
        q, k = (torch.nn.functional.normalize(y, dim=-1, eps=1e-12) for y in (q, k))
        return torch_composed(torch, q / temperature, k, v, visible, bias, scale=1.0)
    return torch_composed(torch, q @ x["weight"], k, v, visible, bias)


@pytest.mark.parametrize("is_causal", [False, True])
def test_autograd_of_the_composed_formula(torch, rng, mechanism, is_causal):
    """float64: to 1e-11 of the largest element."""
    x = inputs_of(rng, mechanism)
    bias = rng.standard_normal((N_Q, N_K))
    grad_out, grad_lse = rng.standard_normal((2, 3, N_Q, D_V)), rng.standard_normal((2, 3, N_Q))
    options = {"attn_mask": bias, "is_causal": is_causal, "query_offset": 2}
    needs = [*x, "attn_mask"]
    if mechanism == "cosine":
        options["temperature"] = 0.4
        needs.append("temperature")
    saved = forward(mechanism, x, **options)
    grads = backward(mechanism, grad_out, x, saved, grad_lse=grad_lse, needs=needs, **options)

    leaves = {n: torch.tensor(y, requires_grad=True) for n, y in (x | {"attn_mask": bias}).items()}
    leaves["temperature"] = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    visible = torch.tensor(visible_pairs(N_Q, N_K, is_causal, query_offset=2))
    out, lse = composed(
        torch, mechanism, leaves, leaves["temperature"], visible, leaves["attn_mask"]
    )
    loss = (out * torch.tensor(grad_out)).sum() + (lse * torch.tensor(grad_lse)).sum()
    expected = torch.autograd.grad(loss, [leaves[n] for n in needs])
    for name, theirs in zip(needs, expected, strict=True):
        ours = getattr(grads, name)
        error = np.abs(ours - theirs.numpy()).max() / theirs.abs().max().item()
        assert error < 1e-11, (name, error)


@pytest.mark.parametrize("grouped", [False, True])
def test_gradcheck(torch, rng, mechanism, grouped):
    """PyTorch's own check against differences, on out and on lse, through a Function."""
    x = inputs_of(rng, mechanism, heads=4, key_heads=2 if grouped else 4)
    options = {"enable_gqa": grouped, "window": (3, 2)}

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.x = dict(zip(x, (t.detach().numpy() for t in tensors), strict=True))
            ctx.saved = forward(mechanism, ctx.x, **options)
            return tuple(torch.tensor(y) for y in ctx.saved)

        @staticmethod
        def backward(ctx, grad_out, grad_lse):
            grads = backward(
                mechanism, grad_out.numpy(), ctx.x, ctx.saved, grad_lse=grad_lse.numpy(), **options
            )
            return tuple(torch.tensor(getattr(grads, name)) for name in x)

    tensors = [torch.tensor(y, requires_grad=True) for y in x.values()]
    assert torch.autograd.gradcheck(Attention.apply, tensors)


@pytest.mark.parametrize("name", ["query", "key", "value", "weight", "temperature"])
def test_each_gradient_alone_equals_the_one_among_all(rng, mechanism, name):
    if name not in INPUTS[mechanism] and (mechanism, name) != ("cosine", "temperature"):
        return
    x = inputs_of(rng, mechanism)
    needs = (*x, "temperature") if mechanism == "cosine" else tuple(x)
    grad_out, saved = rng.standard_normal((2, 3, N_Q, D_V)), forward(mechanism, x)
    everything = backward(mechanism, grad_out, x, saved, needs=needs)
    alone = backward(mechanism, grad_out, x, saved, needs=[name])
    np.testing.assert_array_equal(getattr(alone, name), getattr(everything, name))
    assert [n for n in alone._fields if getattr(alone, n) is not None] == [name]


def test_default_needs_are_the_arrays(rng, mechanism):
    x = inputs_of(rng, mechanism)
    grads = backward(mechanism, np.ones((2, 3, N_Q, D_V)), x, forward(mechanism, x))
    assert tuple(n for n in grads._fields if getattr(grads, n) is not None) == INPUTS[mechanism]
