"""Strides of results of sdpa.interop.torch: those of PyTorch's own function."""

import warnings

import pytest
from support.pytorch import ITS_OWN_WARNINGS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[peers]'")

import torch.nn.functional as F

from sdpa.interop import torch as interop

pytestmark = [
    ITS_OWN_WARNINGS,
    pytest.mark.usefixtures("torch_itself"),
]

# (order of the axes in memory) of (batch, heads, L, d).
ORDERS = {
    "contiguous": (0, 1, 2, 3),
    "rows of heads": (0, 2, 1, 3),
    "length first": (2, 0, 1, 3),
    "d first": (0, 1, 3, 2),
}


def tensor(order, *shape, dtype=torch.float32):
    """Normal numbers of this shape, in memory in this order."""
    axes = ORDERS[order]
    x = torch.randn([shape[axis] for axis in axes], dtype=dtype)
    return x.permute([axes.index(axis) for axis in range(4)])


# ((heads, Lq) of query, heads of key, options), of which each decides on PyTorch's kernel.
CASES = {
    "plain": ((3, 5), 3, {}),
    "causal": ((3, 5), 3, {"is_causal": True}),
    "one head": ((1, 5), 1, {}),
    "one query": ((3, 1), 3, {}),
    "mask": ((3, 5), 3, {"attn_mask": torch.zeros(5, 7)}),
    "boolean mask": ((3, 5), 3, {"attn_mask": torch.ones(2, 1, 5, 7, dtype=torch.bool)}),
    "mask of three axes": ((3, 5), 3, {"attn_mask": torch.zeros(3, 5, 7)}),
    "mask turned": ((3, 5), 3, {"attn_mask": torch.zeros(7, 5).T}),
    "trained mask": ((3, 5), 3, {"attn_mask": torch.zeros(5, 7, requires_grad=True)}),
    "dropout": ((3, 5), 3, {"dropout_p": 0.5}),
    "grouped": ((6, 5), 3, {"enable_gqa": True}),
    "one key head": ((3, 5), 1, {}),
}


def operands(name, order, dtype=torch.float32):
    (heads, n), key_heads, options = CASES[name]
    q = tensor(order, 2, heads, n, 8, dtype=dtype)
    k, v = (tensor(order, 2, key_heads, 7, 8, dtype=dtype) for _ in range(2))
    return q, k, v, options


def is_fused(out):
    """Whether PyTorch's fused kernel gave `out`, or that with an axis which was then removed."""
    last = out.grad_fn
    return any("Flash" in type(node).__name__ for node in (last, last.next_functions[0][0]))


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", CASES)
def test_strides_of_the_output(name, order, needs_grad):
    q, k, v, options = operands(name, order)
    leaves = [x.requires_grad_(needs_grad) for x in (q, k, v)]
    theirs, ours, function = (
        f(*leaves, **options)
        for f in (
            F.scaled_dot_product_attention,
            interop.scaled_dot_product_attention,
            interop.attention,
        )
    )
    assert ours.stride() == function.stride() == theirs.stride()
    if not options.get("dropout_p"):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", CASES)
def test_strides_of_the_gradients(name, order):
    """Those of PyTorch's fused kernel; its other way has the keys' as its products leave them."""
    q, k, v, options = operands(name, order)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    theirs = F.scaled_dot_product_attention(*leaves, **options)
    ours = interop.scaled_dot_product_attention(*leaves, **options)
    expected, found = (
        torch.autograd.grad(out, leaves, torch.ones(out.shape)) for out in (theirs, ours)
    )
    if is_fused(theirs):
        assert [x.stride() for x in found] == [x.stride() for x in expected]
    else:
        assert all(x.is_contiguous() for x in found)
        assert found[0].stride() == expected[0].stride()
    if not options.get("dropout_p"):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("order", ORDERS)
def test_strides_of_other_types(order, dtype):
    q, k, v, _ = operands("plain", order, getattr(torch, dtype))
    theirs, ours = (
        f(q, k, v) for f in (F.scaled_dot_product_attention, interop.scaled_dot_product_attention)
    )
    assert ours.stride() == theirs.stride()
    assert ours.dtype == theirs.dtype


@pytest.mark.parametrize(
    "what",
    ["d_v", "three axes", "no batch", "no queries", "no keys", "expanded", "of a larger one"],
)
@pytest.mark.parametrize("order", ORDERS)
def test_strides_of_other_shapes(order, what):
    q, k, v, _ = operands("plain", order)
    if what == "d_v":
        v = v[..., :4]
    elif what == "three axes":
        q, k, v = q[0], k[0], v[0]
    elif what == "no batch":
        q, k, v = q[:0], k[:0], v[:0]
    elif what == "no queries":
        q = q[:, :, :0]
    elif what == "no keys":
        k, v = k[:, :, :0], v[:, :, :0]
    elif what == "expanded":
        q = q[:1].expand(2, -1, -1, -1)
    elif what == "of a larger one":
        q, k, v = (tensor(order, 2, 3, n, 16)[..., :8] for n in (5, 7, 7))
    theirs, ours = (
        f(q, k, v) for f in (F.scaled_dot_product_attention, interop.scaled_dot_product_attention)
    )
    assert ours.stride() == theirs.stride()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", [*CASES, "mask of one axis"])
def test_strides_without_a_batch(name, order):
    """PyTorch's fused kernel takes three axes since 2.14."""
    if name == "mask of one axis":
        q, k, v, options = operands("plain", order)
        options = {"attn_mask": torch.zeros(7)}
    else:
        q, k, v, options = operands(name, order)
    if options.get("attn_mask") is not None and options["attn_mask"].ndim == 4:
        options = {"attn_mask": options["attn_mask"][0]}
    leaves = [x[0].detach().requires_grad_() for x in (q, k, v)]
    theirs, ours = (
        f(*leaves, **options)
        for f in (F.scaled_dot_product_attention, interop.scaled_dot_product_attention)
    )
    assert ours.stride() == theirs.stride()
    expected, found = (torch.autograd.grad(out.sum(), leaves) for out in (theirs, ours))
    if not options.get("dropout_p"):
        torch.testing.assert_close((ours, *found), (theirs, *expected))
    if is_fused(theirs):
        assert [x.stride() for x in found] == [x.stride() for x in expected]


@pytest.mark.parametrize("order", ORDERS)
def test_second_derivatives_of_lse(order):
    """They go through an attention whose values have another width than query."""
    q, k, v, _ = operands("plain", order, torch.float64)

    def tangent(lse):
        return lambda q: torch.func.jvp(lse, (q,), (q.cos(),))[1]

    found, expected = (
        torch.func.grad(tangent(lse))(q)
        for lse in (
            lambda q: interop.attention_forward(q, k, v).lse.sum(),
            lambda q: (q @ k.mT / 8**0.5).logsumexp(-1).sum(),
        )
    )
    torch.testing.assert_close(found, expected)


def test_heads_are_joined_by_a_view():
    """What a model does with the output, and with the gradient of its projections."""
    q, k, v, _ = operands("plain", "rows of heads")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = interop.scaled_dot_product_attention(*leaves, is_causal=True)
    out.transpose(1, 2).view(2, 5, 24).sum().backward()
    found = torch.autograd.grad(interop.attention(*leaves).sum(), leaves)
    assert [x.transpose(1, 2).view(2, -1, 24).shape[1] for x in found] == [5, 7, 7]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["plain", "grouped", "trained mask", "one key head"])
def test_compiled_code_knows_the_strides(name, order):
    torch.compiler.reset()
    q, k, v, options = operands(name, order)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def f(*x, **options):
        return interop.scaled_dot_product_attention(*x, **options)

    eager = f(*leaves, **options)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")(*leaves, **options)
    assert compiled.stride() == eager.stride()
    found, expected = (
        torch.autograd.grad(out, leaves, torch.ones(out.shape)) for out in (compiled, eager)
    )
    assert [x.stride() for x in found] == [x.stride() for x in expected]
    torch.testing.assert_close(found, expected)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in leaves]
        given = {n: mode.from_tensor(x) for n, x in options.items() if n == "attn_mask"}
        assert f(*fake, **(options | given)).stride() == eager.stride()


def test_vmap_has_the_order_of_the_query():
    x = torch.randn(3, 2, 5, 3, 8).transpose(2, 3)

    def f(q):
        return interop.scaled_dot_product_attention(q, q, q).transpose(1, 2).view(2, 5, 24)

    found = torch.func.vmap(f)(x)
    assert torch.equal(found, torch.stack([f(q) for q in x]))


def test_packed_sequences_have_rows_of_heads():
    """Their three axes are not those of heads without a batch, which PyTorch's kernel takes."""
    x = torch.randn(7, 2, 8, requires_grad=True)
    cu = torch.tensor([0, 3, 7])
    out = interop.attention(x, x, x, cu_seqlens_q=cu, cu_seqlens_k=cu)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert out.is_contiguous()
    assert grad.is_contiguous()
    turned = x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    assert interop.attention(turned, x, x, cu_seqlens_q=cu, cu_seqlens_k=cu).is_contiguous()
