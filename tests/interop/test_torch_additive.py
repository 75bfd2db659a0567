"""sdpa.interop.torch.additive_attention against sdpa, and under PyTorch's gradient checks."""

import warnings

import numpy as np
import pytest
from support.pytorch import ITS_OWN_WARNINGS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[peers]'")

from torch import func
from torch.autograd import gradcheck, gradgradcheck

import sdpa
from sdpa.interop.torch import _arrays, additive_attention

pytestmark = ITS_OWN_WARNINGS

HEADS, N_Q, N_K, H = 2, 3, 4, 3
KEEP = torch.arange(N_Q * N_K).reshape(N_Q, N_K) % 3 > 0
CASES = {
    "plain": {},
    "no bias": {"bias": None},
    "boolean mask": {"attn_mask": KEEP, "scale": 0.7},
    "float mask": {"attn_mask": (N_Q, N_K), "sinks": (HEADS,), "softcap": 1.5},
    "grouped": {"enable_gqa": True, "is_causal": True, "query_offset": 1, "window": (2, None)},
    "dropout": {"dropout_p": 0.4, "rng": 5, "key_lengths": 3},
}
EVERY_CASE = pytest.mark.parametrize("name", CASES)


def problem(rng, name, dtype=torch.float64):
    """(operands that are differentiated, by name; the other options)."""
    options = dict(CASES[name])
    kv_heads = 1 if options.get("enable_gqa") else HEADS
    shapes = {
        "query": (HEADS, N_Q, 4),
        "key": (kv_heads, N_K, 2),
        "value": (kv_heads, N_K, 2),
        "w_query": (4, H),
        "w_key": (2, H),
        "w_score": (H,),
    }
    if "bias" not in options:
        shapes["bias"] = (H,)
    for option in "attn_mask", "sinks":
        if isinstance(options.get(option), tuple):
            shapes[option] = options.pop(option)
    operands = {n: torch.from_numpy(rng.standard_normal(s)).to(dtype) for n, s in shapes.items()}
    return {n: x.requires_grad_() for n, x in operands.items()}, options


def positional(names, options):
    return lambda *x: additive_attention(**dict(zip(names, x, strict=True)), **options)


@EVERY_CASE
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_results_are_those_of_sdpa(rng, name, dtype):
    operands, options = problem(rng, name, getattr(torch, dtype))
    arrays = {n: _arrays.to_array(x) for n, x in operands.items()}
    plain = {n: np.asarray(x) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    out = additive_attention(**operands, **options)
    assert np.array_equal(_arrays.to_array(out), sdpa.additive_attention(**arrays, **plain))
    out.sum().backward()
    assert all(x.grad.dtype == x.dtype and x.grad.shape == x.shape for x in operands.values())


@pytest.mark.slow
@EVERY_CASE
def test_to_second_order(rng, name):
    operands, options = problem(rng, name)
    f, x = positional(operands, options), tuple(operands.values())
    batched = name != "dropout"
    assert gradcheck(f, x, check_forward_ad=True, check_batched_forward_grad=batched)
    assert gradgradcheck(f, x, check_fwd_over_rev=True)


def test_a_cap_beyond_the_range_is_none_to_second_order(rng):
    operands, options = problem(rng, "plain", torch.float32)
    x = tuple(operands.values())

    def second(**more):
        grads = torch.autograd.grad(
            positional(operands, options | more)(*x).sin().sum(), x, create_graph=True
        )
        return torch.autograd.grad(sum(g.square().sum() for g in grads), x)

    torch.testing.assert_close(second(softcap=1e300), second())


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_learnt_scale(rng, shape):
    operands, options = problem(rng, "float mask")
    fixed = {n: x.detach() for n, x in operands.items()}
    scale = torch.full(shape, 0.7, dtype=torch.float64, requires_grad=True)

    def f(scale):
        return additive_attention(**fixed, **options, scale=scale)

    torch.testing.assert_close(f(scale), f(0.7))
    assert gradcheck(f, scale, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(f, scale)


def test_torch_func(rng):
    operands, options = problem(rng, "float mask")
    f, x = positional(operands, options), tuple(y.detach() for y in operands.values())

    def loss(*x):
        return f(*x).sin().sum()

    found = func.grad(loss, argnums=3)(*x)
    leaves = [y.clone().requires_grad_() for y in x]
    torch.testing.assert_close(found, torch.autograd.grad(loss(*leaves), leaves[3])[0])
    batch = torch.stack([x[0], 2 * x[0]])
    in_dims = (0, *(None,) * (len(x) - 1))
    per_sample = func.vmap(func.grad(loss, argnums=3), in_dims)(batch, *x[1:])
    torch.testing.assert_close(per_sample[0], found)
    torch.testing.assert_close(per_sample[1], func.grad(loss, argnums=3)(batch[1], *x[1:]))


@pytest.mark.slow
@EVERY_CASE
def test_compile(rng, name):
    torch.compiler.reset()
    operands, options = problem(rng, name)
    f, x = positional(operands, options), tuple(operands.values())
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad(g(*x).sin().sum(), x) for g in (compiled, f))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", ["plain", "no bias", "boolean mask"])
def test_opcheck(rng, name):
    from sdpa.interop.torch._attention import arguments_of

    operands, options = problem(rng, name)
    weights = [operands.pop(n, None) for n in ("w_query", "w_key", "w_score", "bias")]
    options.pop("bias", None)
    args = (*weights, *arguments_of(**operands, **options))
    torch.library.opcheck(torch.ops.sdpa.additive_forward.default, args)


def test_refused(rng):
    operands, _ = problem(rng, "plain")
    operands["w_key"] = operands["w_key"].to("meta")
    with pytest.raises(ValueError, match=r"^w_key: expected a tensor on the CPU, got meta$"):
        additive_attention(**operands)
