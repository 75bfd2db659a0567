"""sdpa.interop.torch.install under vmap, of which PyTorch makes a loop and warns."""

import warnings

import pytest
from support.pytorch import ITS_OWN_WARNINGS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[peers]'")

import torch.nn.functional as F
from torch.func import grad, jacrev, vmap

import sdpa
from sdpa.interop.torch import install, uninstall

pytestmark = [ITS_OWN_WARNINGS, pytest.mark.usefixtures("torch_itself")]

N, B, H, L, D = 3, 2, 4, 5, 8
attention = F.scaled_dot_product_attention


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64)


def operands():
    return normal(N, B, H, L, D), normal(N, B, H, 7, D), normal(N, B, H, 7, D)


def theirs(call):
    """The results of PyTorch's loop, as a tuple."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        return as_tuple(call())


def ours(call):
    with install():
        return as_tuple(call())


def as_tuple(x):
    return x if isinstance(x, tuple) else (x,)


def check(call):
    """The values and strides of PyTorch's loop, without a warning."""
    torch.manual_seed(0)
    for found, expected in zip(ours(call), theirs(call), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        assert found.stride() == expected.stride()


@pytest.fixture
def calls(monkeypatch):
    """The shapes of the queries of the calls of sdpa."""
    seen = []
    for name, i in ("attention_forward", 0), ("attention_backward", 1):
        f = getattr(sdpa, name)

        def call(*args, f=f, i=i, **options):
            seen.append(args[i].shape)
            return f(*args, **options)

        monkeypatch.setattr(sdpa, name, call)
    return seen


def loss(*x, **options):
    return attention(*x, **options).sin().sum()


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": torch.arange(7) % 3 > 0}]
)
def test_one_call_for_the_whole_batch(calls, options):
    x = operands()
    options = dict(options)
    if "attn_mask" in options:
        options["attn_mask"] = options["attn_mask"].expand(L, 7)
    check(lambda: vmap(lambda *x: attention(*x, **options))(*x))
    check(lambda: vmap(grad(lambda *x: loss(*x, **options), (0, 1, 2)))(*x))
    assert calls == [(N * B, H, L, D)] * 3


MASKS = {
    "(Lq, Lk)": ((L, 7), None),
    "batch and heads": ((B, H, L, 7), None),
    "batch": ((B, 1, L, 7), None),
    "heads": ((1, H, L, 7), None),
    "of each entry": ((N, L, 7), 0),
    "of each entry, turned": ((L, N, 7), 1),
    "of each entry, batch": ((N, B, 1, L, 7), 0),
    "of each entry, heads": ((N, 1, H, L, 7), 0),
}


@pytest.mark.parametrize("of_mask_alone", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_masks(calls, name, of_mask_alone):
    shape, dim = MASKS[name]
    q, *kv = operands()
    if of_mask_alone and dim is None:
        dims, x = (0, None, None, None), (q, *(y[0] for y in kv))
    elif of_mask_alone:
        dims, x = (None, None, None, dim), (q[0], *(y[0] for y in kv))
    else:
        dims, x = (0, 0, 0, dim), (q, *kv)
    mask = normal(*shape)
    check(lambda: vmap(attention, dims)(*x, mask))
    assert calls == [(N * B, H, L, D)]


def test_operands_that_have_no_batch_or_another_axis():
    q, k, v = operands()
    check(lambda: vmap(attention, (0, None, None))(q, k[0], v[0]))
    check(lambda: vmap(attention, (None, 1, 2))(q[0], k.movedim(0, 1), v.movedim(0, 2)))
    rows_of_heads = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    check(lambda: vmap(attention)(*rows_of_heads))
    grouped = vmap(lambda *x: attention(*x, enable_gqa=True))
    check(lambda: grouped(q, k[:, :, :2], v[:, :, :2]))


def test_nested():
    x = [normal(2, N, B, H, L, D) for _ in range(3)]
    check(lambda: vmap(vmap(attention))(*x))
    check(lambda: vmap(vmap(attention, (0, None, None)))(x[0], x[1][:, 0], x[2][:, 0]))
    check(lambda: vmap(lambda q, k: vmap(lambda a: a.sum() * attention(q, k, k))(k))(*x[:2]))
    check(lambda: vmap(vmap(grad(loss, (0, 1, 2))))(*x))


def test_derivatives():
    x = operands()
    leaves = [y[0].requires_grad_() for y in x]
    batches = torch.eye(B * H, dtype=torch.float64).view(-1, B, H)

    def rows():
        out = attention(*leaves).sum((-1, -2))
        return torch.autograd.grad(out, leaves, batches, is_grads_batched=True)

    check(rows)
    check(lambda: jacrev(lambda *y: attention(*y).sum((-1, -2)), (0, 1, 2))(*leaves))

    def of_all():
        return grad(lambda *y: vmap(attention)(*y).sin().sum(), (0, 1, 2))(*x)

    torch.testing.assert_close(ours(of_all), theirs(of_all))


def test_an_undefined_gradient_is_0():
    class Stop(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad):
            return None

    x = operands()
    check(lambda: vmap(grad(lambda *x: Stop.apply(attention(*x)).sum(), (0, 1, 2)))(*x))


def test_compiled():
    torch.compiler.reset()
    x = operands()
    f = torch.compile(vmap(attention), backend="aot_eager", fullgraph=True)
    check(lambda: f(*x))


def test_16_bit_types_that_stay_with_pytorch(calls, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    q, k, v = (x.bfloat16() for x in operands())
    with install():
        found = vmap(attention)(q, k, v)
    assert not calls
    assert torch.equal(found, torch.stack([attention(*x) for x in zip(q, k, v, strict=True)]))


def test_undone():
    x = operands()
    with install():
        vmap(attention)(*x)
    uninstall()
    with pytest.warns(UserWarning, match="There is a performance drop"):
        vmap(attention)(*x)
