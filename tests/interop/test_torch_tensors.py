"""sdpa.interop.torch: all kinds of tensors, in every mode that PyTorch has for them."""

import copy
import inspect
import itertools
import pickle
import warnings
from typing import ClassVar

import pytest
from support.pytorch import ITS_OWN_WARNINGS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[peers]'")

import torch.nn.functional as F
from torch import func

import sdpa
from sdpa._table import PROGRAMS
from sdpa.interop import torch as interop
from sdpa.interop.torch import _operators

pytestmark = [
    ITS_OWN_WARNINGS,
    pytest.mark.usefixtures("torch_itself"),
]


def normal(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape))


def close(found, expected, eps=1e-12):
    """Sums of at most 100 terms of size 1, in float64."""
    torch.testing.assert_close(found, expected, rtol=eps, atol=eps)


# ------------------------------------------------------------------------------ strides and sizes

VIEWS = {
    "rows of heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "columns": lambda x: x.mT.contiguous().mT,
    "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "one of a stack": lambda x: torch.stack([x, x], 2)[:, :, 1],
    "expanded batch": lambda x: x[:1].expand(*x.shape),
    "expanded heads": lambda x: x[:, :1].expand(*x.shape),
    "expanded rows": lambda x: x[:, :, :1].expand(*x.shape),
    "expanded columns": lambda x: x[..., :1].expand(*x.shape),
    "no batch": lambda x: x[:0],
    "no heads": lambda x: x[:, :0],
    "no columns": lambda x: x[..., :0],
    "matrix": lambda x: x[0, 0],
    "heads": lambda x: x[0],
    "five axes": lambda x: x[None],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("door", ["attention", "install"])
def test_strides_and_sizes(rng, view, door):
    """Results and gradients are PyTorch's, into the views and through them into the leaves."""
    leaves = [normal(rng, 2, 3, n, 8).requires_grad_() for n in (5, 7, 7)]

    def results(f):
        views = [VIEWS[view](x) for x in leaves]
        out = f(*views)
        return out, *torch.autograd.grad(out.square().sum(), [*views, *leaves])

    expected = results(F.scaled_dot_product_attention)
    if door == "attention":
        found = results(interop.attention)
    else:
        with interop.install():
            found = results(F.scaled_dot_product_attention)
    close(found, expected)


@pytest.mark.parametrize("n", [(0, 7), (5, 0), (0, 0)])
def test_no_queries_and_no_keys(rng, n):
    q, k, v = (normal(rng, 2, 3, length, 8).requires_grad_() for length in (n[0], n[1], n[1]))
    out, lse = interop.attention_forward(q, k, v)
    assert torch.equal(out, torch.zeros(2, 3, n[0], 8))
    assert torch.equal(lse, torch.full((2, 3, n[0]), -torch.inf))
    for x, grad in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert torch.equal(grad, torch.zeros_like(x))


# ------------------------------------------------------------------------------ who needs gradients


def test_every_choice_of_who_needs_a_gradient(rng):
    shapes = [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), (5, 7), (3,)]
    x = [normal(rng, *shape) for shape in shapes]

    def gradients(needs):
        leaves = [y.clone().requires_grad_(need) for y, need in zip(x, needs, strict=True)]
        out = interop.attention(*leaves[:4], sinks=leaves[4])
        assert out.requires_grad == any(needs)
        if any(needs):
            out.square().sum().backward()
        return [y.grad for y in leaves]

    everything = gradients([True] * 5)
    for needs in itertools.product([False, True], repeat=5):
        for grad, need, whole in zip(gradients(needs), needs, everything, strict=True):
            assert torch.equal(grad, whole) if need else grad is None


def test_no_grad_and_inference_mode(rng):
    q = normal(rng, 2, 5, 8).requires_grad_()
    expected = interop.attention(q, q, q)
    with torch.no_grad():
        out = interop.attention(q, q, q)
        assert out.grad_fn is None
        assert torch.equal(out, expected)
        with torch.enable_grad():
            assert interop.attention(q, q, q).grad_fn is not None
    with torch.inference_mode():
        out = interop.attention(q, q, q)
        assert out.is_inference()
        assert torch.equal(out, expected)


def test_results_that_are_overwritten_do_not_give_wrong_gradients(rng):
    """The backward reads out and the operands: PyTorch finds that they have changed."""
    q, k = normal(rng, 2, 5, 8).requires_grad_(), normal(rng, 2, 5, 8)
    for change in (lambda out: out.mul_(2), lambda out: (k.add_(1), out)[1]):
        out = change(interop.attention(q, k, k))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_scale_of_the_user(rng):
    """Numbers of other kinds are taken; no derivative is left out without a word."""
    q = normal(rng, 2, 5, 8)
    expected = interop.attention(q, q, q, scale=0.5, softcap=2.0)
    for half in torch.tensor(0.5), torch.tensor([0.5]), sdpa.softmax([0.0, 0.0])[0]:
        assert torch.equal(interop.attention(q, q, q, scale=half, softcap=4 * half), expected)
    learnt = torch.nn.Parameter(torch.tensor(0.5))
    with torch.no_grad():
        interop.attention(q, q, q, softcap=learnt)
    with pytest.raises(NotImplementedError) as raised:
        interop.attention(q, q, q, softcap=learnt)
    assert str(raised.value) == "softcap: has no derivative; pass a number"
    interop.attention(q, q, q, scale=learnt).sum().backward()
    assert learnt.grad.shape == ()


SOFTCAPS = {
    "jvp": lambda f, q: lambda c: func.jvp(lambda c: f(q, c), (c,), (c,)),
    "jvp over grad": lambda f, q: lambda c: func.jvp(lambda c: func.grad(f)(q, c), (c,), (c,)),
    "jvp over jvp": lambda f, q: (
        lambda c: func.jvp(lambda c: func.jvp(lambda q: f(q, c), (q,), (q,))[1], (c,), (c,))
    ),
    "grad over jvp": lambda f, q: func.grad(lambda c: func.jvp(lambda q: f(q, c), (q,), (q,))[1]),
    "jacfwd": lambda f, q: func.jacfwd(lambda c: f(q, c)),
    "jacfwd over vmap": lambda f, q: func.jacfwd(lambda c: func.vmap(f, (0, None))(q[None], c)),
}


@pytest.mark.parametrize("way", SOFTCAPS)
def test_a_softcap_has_no_derivative_on_any_level(rng, way):
    """A tangent is refused, not left out, and a softcap beside the tangents of others is taken."""
    q, cap = normal(rng, 2, 5, 8), torch.tensor(2.0, dtype=torch.float64)

    def f(q, softcap):
        return interop.attention(q, q, q, softcap=softcap).sum()

    with pytest.raises(NotImplementedError, match="softcap: has no derivative; pass a number"):
        SOFTCAPS[way](f, q)(cap)
    for softcap in cap, cap * 1:
        found = func.jvp(func.grad(lambda q, c=softcap: f(q, c)), (q,), (q.cos(),))[1]
        expected = func.jvp(func.grad(lambda q: f(q, 2.0)), (q,), (q.cos(),))[1]
        assert torch.equal(found, expected)


NO_SLOPES = "alibi_slopes: has no derivative; detach it, or add its bias as attn_mask"
SLOPES = {
    "backward": lambda f, s: f(s.clone().requires_grad_()).backward(),
    "func.grad": lambda f, s: func.grad(f)(s),
    "func.jvp": lambda f, s: func.jvp(f, (s,), (s,)),
    "compile": lambda f, s: torch.compile(f, backend="aot_eager")(
        s.clone().requires_grad_()
    ).backward(),
}


@pytest.mark.parametrize("way", SLOPES)
@pytest.mark.parametrize("name", ["attention", "attention_forward", "attention_weights"])
def test_slopes_are_constants(rng, way, name):
    """Neither a zero nor a gradient that is not there."""
    q = normal(rng, 2, 5, 8)
    args = (q, q) if name == "attention_weights" else (q, q, q)

    def f(slopes):
        found = getattr(interop, name)(*args, alibi_slopes=slopes)
        return (found.out if name == "attention_forward" else found).sum()

    torch.compiler.reset()
    # The compiler wraps an exception that is raised while it traces the backward.
    with pytest.raises(NotImplementedError if way != "compile" else Exception, match=NO_SLOPES):
        SLOPES[way](f, torch.ones(2, dtype=torch.float64))


def test_second_derivatives_in_slopes_are_refused_too(rng):
    slopes = torch.ones(2, dtype=torch.float64, requires_grad=True)
    q = normal(rng, 2, 5, 8).requires_grad_()
    with pytest.raises(NotImplementedError):
        interop.attention(q, q, q, alibi_slopes=slopes).sum().backward()
    interop.attention(q, q, q, alibi_slopes=slopes.detach()).sum().backward()
    with pytest.raises(NotImplementedError):
        func.jvp(
            lambda s: func.grad(lambda q: interop.attention(q, q, q, alibi_slopes=s).sum())(q),
            (slopes.detach(),),
            (slopes.detach(),),
        )


# ----------------------------------------------------------------------------------------- autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(rng, dtype, compiled):
    """Operands take its type as in PyTorch; masks in float32 and float64 operands keep theirs."""
    q, k, v = (normal(rng, 2, 5, 8).float().requires_grad_() for _ in range(3))
    bias = normal(rng, 5, 5).float()

    def f(*x):
        with torch.autocast("cpu", dtype):
            return interop.scaled_dot_product_attention(*x, softcap=4.0)

    torch.compiler.reset()
    run = torch.compile(f, fullgraph=True, backend="aot_eager") if compiled else f
    k = k.detach().to(torch.bfloat16).requires_grad_()
    found = run(q, k, v, bias)
    with torch.autocast("cpu", dtype):
        assert F.scaled_dot_product_attention(q, q, v).dtype == found.dtype == dtype
    casts = [x.to(dtype) for x in (q, k, v)]
    expected = interop.scaled_dot_product_attention(*casts, bias, softcap=4.0)
    assert torch.equal(found, expected)
    for x, y in zip(
        torch.autograd.grad(found.float().square().sum(), (q, k, v)),
        torch.autograd.grad(expected.float().square().sum(), (q, k, v)),
        strict=True,
    ):
        assert torch.equal(x, y)
    double = q.double()
    assert f(double, double, double).dtype == torch.float64


def test_autocast_of_the_rest(rng):
    """Also for additive attention; formulas composed of PyTorch's products keep their precision."""
    x = [normal(rng, *s).float() for s in [(2, 5, 4), (2, 6, 3), (2, 6, 2), (4, 7), (3, 7), (7,)]]
    with torch.autocast("cpu", torch.bfloat16):
        out = interop.additive_attention(*x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, interop.additive_attention(*(y.bfloat16() for y in x)))
    q = normal(rng, 2, 5, 8)

    def tangent():
        return func.jvp(lambda q: interop.attention_forward(q, q, q).lse, (q,), (q.cos(),))[1]

    expected = tangent()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(tangent(), expected)


# ----------------------------------------------------------------- subclasses, copies and defaults


class Named(torch.Tensor):
    """A subclass that adds nothing."""


class Counting(torch.Tensor):
    """A subclass that sees the operators called on it."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(str(function))
        return super().__torch_function__(function, types, args, kwargs or {})


def test_subclasses(rng):
    q, k, v = (normal(rng, 2, 5, 8).requires_grad_() for _ in range(3))
    expected = interop.attention(q, k, v)
    for kind in Named, Counting:
        x = q.detach().as_subclass(kind).requires_grad_()
        out = interop.attention(x, k, v)
        assert type(F.scaled_dot_product_attention(x, k, v)) is kind
        assert type(interop.attention(x.detach(), k.detach(), v.detach())) is kind
        assert torch.equal(out, expected)
        close(
            torch.autograd.grad(out.sum(), (x, k, v)),
            torch.autograd.grad(expected.sum(), (q, k, v), retain_graph=True),
        )
    assert any("sdpa.attention_forward" in name for name in Counting.seen)
    assert interop.attention(torch.nn.Parameter(q.detach()), k, v).requires_grad


def test_fake_and_meta(rng):
    """Shapes without data: by the operators; a tensor on meta is none on a CPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k = normal(rng, 2, 4, 5, 8), normal(rng, 2, 2, 7, 8)
    with FakeTensorMode() as mode:
        x = [mode.from_tensor(y) for y in (q, k, k)]
        out, lse = interop.attention_forward(*x, enable_gqa=True)
    assert (out.shape, out.dtype, lse.shape) == ((2, 4, 5, 8), torch.float64, (2, 4, 5))
    operands = dict(zip(("query", "key", "value"), (q, k, k), strict=True))
    meta = {name: x.to("meta") for name, x in operands.items()}
    args = _operators.ABSENT | meta | {"enable_gqa": True}
    assert torch.ops.sdpa.attention_forward(*args.values())[0].shape == (2, 4, 5, 8)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(8, 24)
        self.attention = interop.scaled_dot_product_attention

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.attention(q, k, v, is_causal=True)


def test_copies(rng):
    model, x = Model(), normal(rng, 2, 5, 8).float()
    expected = model(x)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    # PyTorch's own check of weights does not know the class of this test.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(
            pickle.loads(pickle.dumps(interop.attention))(x, x, x), interop.attention(x, x, x)
        )
    result = interop.attention_forward(x, x, x)
    again = pickle.loads(pickle.dumps(copy.deepcopy(result)))
    assert isinstance(again, interop.AttentionForward)
    assert all(map(torch.equal, again, result))


def test_another_default_device_and_type(rng):
    """Tensors that the bridge makes have the operands' device and type."""
    q = normal(rng, 2, 5, 8).requires_grad_()
    options = {"is_causal": True, "query_offset": 1, "alibi_slopes": [0.5, 0.25], "sinks": 0.5}
    options |= {"dropout_p": 0.5, "rng": 3}

    def results():
        out, lse = interop.attention_forward(q, q, q, **options)
        return out, *torch.autograd.grad(out.sum() + lse.sum(), q, create_graph=True)

    expected = results()
    torch.set_default_device("meta")
    try:
        found = results()
        interop.attention(q, q, q, dropout_p=0.5)
    finally:
        torch.set_default_device(None)
    assert all(map(torch.equal, found, expected))


def test_signatures_show_the_options():
    """The options are those of sdpa.attention, except out, and functions: no operator takes one."""
    left_out = ("out", *PROGRAMS)
    options = [n for n in inspect.signature(sdpa.attention).parameters if n not in left_out]
    for name in "attention", "attention_forward":
        assert list(inspect.signature(getattr(interop, name)).parameters) == options


def test_invariant():
    """A row computed alone has the bits of the same row in a batch, compiled or not."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 70, 8) for _ in range(3))

    def rows(*tensors):
        return interop.attention(*tensors, is_causal=True, invariant=True)

    whole = rows(q, k, v)
    one = interop.attention(q[:, :, 9:10], k[:, :, :10], v[:, :, :10], invariant=True)
    assert torch.equal(one, whole[:, :, 9:10])
    assert torch.equal(torch.compile(rows, backend="aot_eager", fullgraph=True)(q, k, v), whole)


# ------------------------------------------------------------------------------- what is refused

Q = torch.zeros(2, 3, 4)
NESTED = "query: expected a dense tensor, got a nested one"
REFUSED = {
    "nested": (lambda: interop.attention(nested(torch.strided), Q, Q), NESTED),
    "jagged": (lambda: interop.attention(nested(torch.jagged), Q, Q), NESTED),
    "sparse": (
        lambda: interop.attention(Q, Q[0].to_sparse(), Q),
        "key: expected a dense tensor, got torch.sparse_coo",
    ),
    "float8": (
        lambda: interop.attention(Q, Q, Q.to(torch.float8_e4m3fn)),
        "value: expected float16, bfloat16, float32 or float64, got float8_e4m3fn",
    ),
    "complex": (
        lambda: interop.attention(Q + 0j, Q + 0j, Q + 0j),
        "query: expected float16, bfloat16, float32 or float64, got complex64",
    ),
    "half a byte": (
        lambda: interop.attention(Q, Q, Q, sinks=torch.empty(2, dtype=torch.uint4)),
        "sinks: expected float16, bfloat16, float32 or float64, got uint4",
    ),
    "dropout_p": (
        lambda: interop.attention(Q, Q, Q, None, None),
        "dropout_p: expected a number, got None",
    ),
    "scale": (
        lambda: interop.attention(Q, Q, Q, scale="1"),
        "scale: expected a tensor or numbers, got '1'",
    ),
    "softcap": (
        lambda: interop.attention(Q, Q, Q, softcap=[1]),
        "softcap: expected a number or None, got [1]",
    ),
    "bounds of a window": (
        lambda: interop.attention(Q, Q, Q, window=(1.5, 0)),
        "window: expected an integer, got 1.5",
    ),
    "workers": (
        lambda: interop.attention(Q, Q, Q, workers=1.5),
        "workers: expected an integer, got 1.5",
    ),
    "fraction of a length": (
        lambda: interop.attention(Q, Q, Q, key_lengths=1.5),
        "key_lengths: expected integers, got float32",
    ),
    "fraction of an offset": (
        lambda: interop.attention(Q, Q, Q, query_offset=[1.5, 2]),
        "query_offset: expected integers, got float32",
    ),
    "seed that nobody needs": (
        lambda: interop.attention(Q, Q, Q, rng="x"),
        "rng: expected an int from 0 to 2^64 - 1, a torch.Generator or None, got 'x'",
    ),
    "sinks": (
        lambda: interop.attention(Q, Q, Q, sinks="x"),
        "sinks: expected a tensor or numbers, got 'x'",
    ),
    "unknown option": (
        lambda: interop.attention_weights(Q, Q, out=Q),
        "attention() got an unexpected keyword argument 'out'",
    ),
}


def nested(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, PyTorch says
        return torch.nested.nested_tensor([torch.zeros(3, 4), torch.zeros(2, 4)], layout=layout)


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    call, message = REFUSED[what]
    with pytest.raises(TypeError) as raised:
        call()
    assert str(raised.value) == message
