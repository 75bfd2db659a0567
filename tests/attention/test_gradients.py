"""Gradients against differences of the forward and PyTorch's autograd, and under its gradcheck."""

import numpy as np
import pytest
from support.helpers import (
    AttentionBounds,
    assert_within,
    compute_type,
    normal,
    torch_composed,
    unit_roundoff,
    visible_pairs,
)
from support.pytorch import ITS_OWN_WARNINGS

import sdpa

pytestmark = pytest.mark.usefixtures("isa")

# name: options, mask ("bool", "bias", or None), leading axes of query and of key and value
CASES = {
    "plain": ({}, None, (2,), (2,)),
    "causal": ({"is_causal": True}, None, (2,), (2,)),
    "lower right": ({"is_causal": "lower_right"}, None, (2,), (2,)),
    "scale": ({"scale": -0.7}, None, (2,), (2,)),
    "bool": ({}, "bool", (2,), (2,)),
    "bias": ({}, "bias", (2,), (2,)),
    "bias and causal": ({"is_causal": True}, "bias", (2,), (2,)),
    "grouped": ({"enable_gqa": True}, "bias", (2, 4), (2, 2)),
    "keys broadcast": ({}, "bias", (2, 3), (3,)),
    "queries broadcast": ({}, "bias", (), (2,)),
    "heads broadcast": ({}, "bool", (2, 3), (2, 1)),
}


def problem(rng, case, n_q, n_k, d_k, d_v, dtype=np.float64):
    """(options, inputs, attn_mask, grad_out, grad_lse); inputs by name, a bias among them."""
    options, kind, q_lead, k_lead = GRID[case]
    lead = q_lead if options.get("enable_gqa") else np.broadcast_shapes(q_lead, k_lead)
    inputs = {
        "query": normal(rng, (*q_lead, n_q, d_k), dtype),
        "key": normal(rng, (*k_lead, n_k, d_k), dtype),
        "value": normal(rng, (*k_lead, n_k, d_v), dtype),
    }
    mask = None
    if kind == "bool":
        mask = rng.random((n_q, n_k)) < 0.6
        mask[:, 0] = True
    if kind == "bias":
        mask = inputs["attn_mask"] = normal(rng, (*lead[:-1], 1, n_q, n_k), dtype)
    grad_out = normal(rng, (*lead, n_q, d_v), dtype)
    return options, inputs, mask, grad_out, normal(rng, (*lead, n_q), dtype)


def backward(options, inputs, mask, grad_out, grad_lse):
    q, k, v = (inputs[name] for name in ("query", "key", "value"))
    saved = sdpa.attention_forward(q, k, v, mask, **options)
    return sdpa.attention_backward(
        grad_out, q, k, v, *saved, mask, grad_lse=grad_lse, needs=tuple(inputs), **options
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("n_q", "n_k", "d_k", "d_v"), [(3, 4, 2, 3), (5, 3, 3, 1), (2, 18, 9, 8)])
def test_differences(rng, case, n_q, n_k, d_k, d_v):
    """Each partial derivative against a central difference.

    The difference itself is off by its truncation, measured by halving the step (an error of order
    h^2 falls by 4, so a third of the change, doubled for safety), and by the rounding of the two
    losses over 2 h.
    """
    options, inputs, mask, grad_out, grad_lse = problem(rng, case, n_q, n_k, d_k, d_v)
    seen = np.isfinite(sdpa.attention_forward(*list(inputs.values())[:3], mask, **options).lse)
    grad_lse = np.where(seen, grad_lse, 0)
    grads = backward(options, inputs, mask, grad_out, grad_lse)
    bounds = AttentionBounds(*list(inputs.values())[:3], mask, grad_out, **options)
    rounding = (np.abs(grad_out) * bounds.out).sum() + (np.abs(grad_lse) * bounds.lse).sum()

    def loss(changed):
        x = inputs | changed
        m = x.get("attn_mask", mask)
        out, lse = sdpa.attention_forward(x["query"], x["key"], x["value"], m, **options)
        return (out * grad_out).sum() + np.where(seen, lse, 0).ravel() @ grad_lse.ravel()

    def difference(name, at, step):
        up, down = inputs[name].copy(), inputs[name].copy()
        up[at] += step
        down[at] -= step
        return (loss({name: up}) - loss({name: down})) / (2 * step)

    step = 1e-4
    for name, x in inputs.items():
        grad = getattr(grads, name)
        for at in rng.permutation(list(np.ndindex(x.shape)))[:12]:
            at = tuple(at)
            coarse, fine = difference(name, at, step), difference(name, at, step / 2)
            error = 2 * abs(coarse - fine) / 3 + 4 * rounding / step
            assert abs(grad[at] - fine) <= error, (name, at, grad[at], fine, error)
            assert error < 1e-5, "a difference too coarse to say anything"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("n_q", "n_k", "d_k", "d_v"),
    [(3, 4, 2, 3), (17, 33, 16, 7), (70, 150, 24, 40), (150, 70, 5, 64)],
)
def test_autograd_of_the_composed_formula(torch, rng, compute_dtype, case, n_q, n_k, d_k, d_v):
    """PyTorch differentiates matmul, masked_fill and softmax in float64."""
    options, inputs, mask, grad_out, grad_lse = problem(
        rng, case, n_q, n_k, d_k, d_v, compute_dtype
    )
    grads = backward(options, inputs, mask, grad_out, grad_lse)
    q, k, v = (inputs[name] for name in ("query", "key", "value"))
    bounds = AttentionBounds(q, k, v, mask, grad_out, grad_lse=grad_lse, **options)

    tensors = {
        name: torch.tensor(x, dtype=torch.float64, requires_grad=True) for name, x in inputs.items()
    }
    visible = visible_pairs(n_q, n_k, options.get("is_causal", False))
    if mask is not None and mask.dtype == bool:
        visible = visible & mask
    group = q.shape[-3] // k.shape[-3] if options.get("enable_gqa") else 1
    tq, tk, tv = (tensors[name] for name in ("query", "key", "value"))
    if group > 1:
        tk, tv = (x.repeat_interleave(group, -3) for x in (tk, tv))
    out, lse = torch_composed(
        torch,
        *(tq, tk, tv),
        visible=torch.tensor(visible),
        bias=tensors.get("attn_mask"),
        scale=options.get("scale"),
    )
    lse = torch.where(torch.isfinite(lse), lse, 0)
    loss = (out * torch.tensor(grad_out)).sum() + (lse * torch.tensor(grad_lse)).sum()
    expected = torch.autograd.grad(loss, list(tensors.values()))
    for name, theirs in zip(inputs, expected, strict=True):
        assert_within(getattr(grads, name), theirs.numpy(), getattr(bounds, name), name)


# name: options of any function, mask, leading axes; sinks True: two of them, differentiated as well
GRID = CASES | {
    "softcap": ({"softcap": 0.9}, "bias", (2,), (2,)),
    "sinks": ({"sinks": True}, None, (2,), (2,)),
    "ALiBi": ({"alibi_slopes": np.array([0.4, -0.1])}, None, (2,), (2,)),
    "window": ({"window": (1, 1), "query_offset": 1}, None, (2,), (2,)),
    "lengths": ({"key_lengths": np.array([2, 5, 0])}, None, (3, 2), (3, 2)),
    "dropout": ({"dropout_p": 0.4, "rng": 2**35 + 1}, "bias", (2,), (2,)),
    "everything": (
        {
            "softcap": 0.9,
            "sinks": True,
            "alibi_slopes": np.array([0.4, -0.1]),
            "window": (3, 2),
            "is_causal": True,
            "query_offset": 2,
            "key_lengths": np.array([4, 5]),
            "dropout_p": 0.3,
            "rng": 11,
            "scale": -0.8,
            "enable_gqa": True,
        },
        "bias",
        (2, 2),
        (1, 1),
    ),
}


class Call:
    """One problem, as a differentiable function of tensors for PyTorch's own checks."""

    def __init__(self, options, inputs, mask):
        self.options = options | {"attn_mask": mask}
        self.names = tuple(inputs)

    def arguments(self, tensors):
        """(operands, options with the differentiated bias and sinks)."""
        x = dict(zip(self.names, (t.detach().numpy() for t in tensors), strict=True))
        operands = [x.pop(name) for name in ("query", "key", "value")]
        return operands, self.options | x

    def forward(self, *tensors):
        operands, options = self.arguments(tensors)
        return operands, options, sdpa.attention_forward(*operands, **options)


def tensors_of(torch, arrays):
    return tuple(torch.tensor(x) for x in arrays)


def differentiable_once(torch):
    """The function of (call, *inputs) that returns (out, lse)."""

    class WithLse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, call, *tensors):
            ctx.call, (*ctx.saved, result) = call, call.forward(*tensors)
            ctx.result = result
            return tensors_of(torch, result)

        @staticmethod
        def backward(ctx, grad_out, grad_lse):
            operands, options = ctx.saved
            grads = sdpa.attention_backward(
                grad_out.numpy(), *operands, *ctx.result, grad_lse=grad_lse.numpy(),
                needs=ctx.call.names, **options,
            )  # fmt: skip
            return (None, *tensors_of(torch, [getattr(grads, name) for name in ctx.call.names]))

    return WithLse


def differentiable_twice(torch):
    """The function of (call, *inputs) that returns out, also in forward mode."""

    class Gradients(torch.autograd.Function):
        @staticmethod
        def forward(ctx, call, grad_out, *tensors):
            operands, options, result = call.forward(*tensors)
            ctx.call, ctx.saved = call, (grad_out.numpy(), *operands, *result)
            ctx.options = options
            grads = sdpa.attention_backward(*ctx.saved, needs=call.names, **options)
            return tensors_of(torch, [getattr(grads, name) for name in call.names])

        @staticmethod
        def backward(ctx, *gg):
            gg = {name: x.numpy() for name, x in zip(ctx.call.names, gg, strict=True)}
            directions = [gg.pop(name) for name in ("query", "key", "value")]
            needs = ("grad_out", *ctx.call.names)
            second = sdpa.attention_double_backward(
                *directions, *ctx.saved, needs=needs, **ctx.options,
                **{f"gg_{name}": x for name, x in gg.items()},
            )  # fmt: skip
            return (None, *tensors_of(torch, [getattr(second, name) for name in needs]))

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, call, *tensors):
            ctx.call = call
            ctx.save_for_backward(*tensors)
            ctx.save_for_forward(*tensors)
            return torch.tensor(call.forward(*tensors)[2].out)

        @staticmethod
        def backward(ctx, grad_out):
            return (None, *Gradients.apply(ctx.call, grad_out, *ctx.saved_tensors))

        @staticmethod
        def jvp(ctx, _, *along):
            operands, options = ctx.call.arguments(ctx.saved_tensors)
            along = {
                name: None if x is None else x.numpy()
                for name, x in zip(ctx.call.names, along, strict=True)
            }
            directions = [along.pop(name) for name in ("query", "key", "value")]
            options |= {f"{name}_t": x for name, x in along.items()}
            return torch.tensor(sdpa.attention_jvp(*operands, *directions, **options).out_t)

    return Attention


def grid_problem(torch, rng, case):
    options, inputs, mask, *_ = problem(rng, case, 3, 5, 4, 3)
    if options.get("sinks"):
        inputs["sinks"] = rng.standard_normal(2)
        options = {name: x for name, x in options.items() if name != "sinks"}
    tensors = [torch.tensor(x, requires_grad=True) for x in inputs.values()]
    return Call(options, inputs, mask), tensors


@pytest.mark.parametrize("case", [name for name in GRID if name != "lengths"])
def test_gradcheck(torch, rng, case):
    """PyTorch's own check of out and lse in reverse mode; an lse of -inf has no differences."""
    call, tensors = grid_problem(torch, rng, case)
    function = differentiable_once(torch)
    assert torch.autograd.gradcheck(lambda *x: function.apply(call, *x), tensors)


@ITS_OWN_WARNINGS
@pytest.mark.parametrize("case", GRID)
def test_gradgradcheck(torch, rng, case):
    """PyTorch's gradgradcheck of out in both modes, with gradients by the double backward."""
    call, tensors = grid_problem(torch, rng, case)
    function = differentiable_twice(torch)

    def attention(*x):
        return function.apply(call, *x)

    assert torch.autograd.gradcheck(attention, tensors, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(attention, tensors)


@pytest.mark.parametrize("which", ["query", "key", "value", "attn_mask"])
@pytest.mark.parametrize("n_k", [40, 140], ids=["one block of keys", "several"])
def test_each_gradient_alone_equals_the_one_among_all(rng, dtype, which, n_k):
    for case in ("bias", "grouped", "keys broadcast", "queries broadcast"):
        options, inputs, mask, grad_out, _ = problem(rng, case, 20, n_k, 8, 9, dtype)
        q, k, v = (inputs[name] for name in ("query", "key", "value"))
        saved = sdpa.attention_forward(q, k, v, mask, **options)
        everything = sdpa.attention_backward(
            grad_out, q, k, v, *saved, mask, needs=tuple(inputs), **options
        )
        alone = sdpa.attention_backward(grad_out, q, k, v, *saved, mask, needs=[which], **options)
        np.testing.assert_array_equal(getattr(alone, which), getattr(everything, which))
        assert [name for name in inputs if getattr(alone, name) is not None] == [which]


def test_gradients_of_parts_of_the_keys_add_up(rng, dtype):
    """With the out and lse of all keys, as a ring of processes calls it; rows then sum to less."""
    q, k, v, g = (normal(rng, (2, n, 16), dtype) for n in (21, 65, 65, 21))
    saved = sdpa.attention_forward(q, k, v)
    whole = sdpa.attention_backward(g, q, k, v, *saved)
    cuts = [slice(0, 5), slice(5, 25), slice(25, 65)]
    parts = [sdpa.attention_backward(g, q, k[:, cut], v[:, cut], *saved) for cut in cuts]
    sums = {
        "query": sum(part.query.astype(np.float64) for part in parts),
        "key": np.concatenate([part.key for part in parts], axis=1),
        "value": np.concatenate([part.value for part in parts], axis=1),
    }
    # The rounding of lse, of a few units, is the same relative error in a whole row.
    units = 40 if dtype == compute_type(dtype) else 8
    for name, total in sums.items():
        exact = getattr(whole, name).astype(np.float64)
        error = np.max(np.abs(total.astype(np.float64) - exact))
        assert error <= units * unit_roundoff(dtype) * np.max(np.abs(exact)), name


@pytest.mark.parametrize("n_k", [20, 100, 200], ids=["by rows", "by panels", "in blocks"])
def test_equal_keys_give_query_no_gradient(rng, dtype, n_k):
    """The gradient of a row of scores sums to 0, although a 16-bit out is far from exact."""
    key = np.broadcast_to(normal(rng, (16,), dtype), (n_k, 16))
    inputs = {"query": normal(rng, (17, 16), dtype), "key": key}
    inputs["value"] = normal(rng, (n_k, 16), dtype)
    grads = backward({}, inputs, None, normal(rng, (17, 16), dtype), None)
    rounding = np.finfo(compute_type(dtype)).eps
    assert np.max(np.abs(grads.query.astype(np.float64))) < 64 * rounding


@pytest.mark.parametrize("n_k", [1, 700])
def test_a_huge_grad_out_has_a_finite_gradient(rng, n_k):
    """dV averages grad_out's rows, so it is finite even if the kernel stores other factors of P."""
    q, k, v = (normal(rng, (60, n, 8), np.float32) for n in (1, n_k, n_k))
    grad_out = np.full((60, 1, 8), 3e38, np.float32)
    out, lse = sdpa.attention_forward(q, k, v)
    got = sdpa.attention_backward(grad_out, q, k, v, out, lse, needs=("value",)).value
    p = sdpa.attention_weights(*(x.astype(np.float64) for x in (q, k)))
    np.testing.assert_allclose(got, np.swapaxes(p, -1, -2) @ grad_out.astype(np.float64), rtol=1e-4)


@pytest.mark.parametrize("lead", [(300,), (2, 150), (300, 1)])
@pytest.mark.parametrize("needs", [("query", "key", "value"), ("query",), ("value",)])
def test_many_short_heads_have_the_gradients_of_each(rng, lead, needs):
    """Rows of the next head are fetched while a head is computed, if all exceed the caches."""
    g, q, k, v = normal(rng, (4, *lead, 32, 64), np.float32)
    every = sdpa.attention_backward(g, q, k, v, *sdpa.attention_forward(q, k, v), needs=needs)
    for at in (0,) * len(lead), tuple(n - 1 for n in lead):
        x = [a[at] for a in (g, q, k, v)]
        one = sdpa.attention_backward(*x, *sdpa.attention_forward(*x[1:]), needs=needs)
        for name in needs:
            assert np.array_equal(getattr(every, name)[at], getattr(one, name))


def test_scores_too_large_for_a_single_pass(rng):
    """One key has all the weight of a query, and lse is beyond 2^19 in log2 units."""
    q, k = normal(rng, (2, 100, 8), np.float32) * np.float32(3000)
    k = np.concatenate([k, -k, k / 2])
    v, g = normal(rng, (300, 8), np.float32), normal(rng, (100, 8), np.float32)
    fwd = sdpa.attention_forward(q, k, v)
    best = (q.astype(np.float64) @ k.T).argmax(1)
    assert np.array_equal(fwd.out, v[best])
    expected = np.zeros((300, 8))
    np.add.at(expected, best, g)
    found = sdpa.attention_backward(g, q, k, v, *fwd, needs=("value",))
    np.testing.assert_allclose(found.value, expected, rtol=1e-5, atol=1e-5)
