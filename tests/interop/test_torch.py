"""sdpa.interop.torch: PyTorch's own checks of operators and derivatives, and its formula."""

import math
import warnings

import numpy as np
import pytest
from support import problems
from support.calls import message
from support.problems import CASES, WITH_FINITE_LSE, positional
from support.pytorch import ITS_OWN_WARNINGS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[peers]'")

import torch.nn.functional as F
from torch import func
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import sdpa
from sdpa._table import DIFFERENTIABLE
from sdpa.interop import torch as interop
from sdpa.interop.torch import _arrays, _operators
from sdpa.interop.torch._packed import is_packed, one_sequence

pytestmark = [
    ITS_OWN_WARNINGS,
    pytest.mark.usefixtures("torch_itself"),
]

EVERY_CASE = pytest.mark.parametrize("name", CASES)
DTYPES = ("float16", "bfloat16", "float32", "float64")


def normal(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape))


def problem(rng, name, dtype="float64"):
    """(operands that are differentiated, by name; the other options), as tensors."""
    operands, options = problems.problem(rng, name)
    dtype = getattr(torch, dtype)
    operands = {n: torch.from_numpy(x).to(dtype).requires_grad_() for n, x in operands.items()}
    arrays = {n: torch.from_numpy(x) for n, x in options.items() if isinstance(x, np.ndarray)}
    return operands, options | arrays


def formula(query, key, value, attn_mask=None, sinks=None, softcap=None):
    """Attention by PyTorch's own operations."""
    s = query @ key.mT / math.sqrt(query.shape[-1])
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if attn_mask is not None:
        s = s + attn_mask
    if sinks is None:
        return torch.softmax(s, -1) @ value
    column = torch.zeros_like(s[..., :1]) + sinks[..., None, None]
    return torch.softmax(torch.cat([s, column], -1), -1)[..., :-1] @ value


# ---------------------------------------------------------------------------------- the results


@EVERY_CASE
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_those_of_sdpa(rng, name, dtype):
    operands, options = problem(rng, name, dtype)
    arrays = {n: _arrays.to_array(x) for n, x in operands.items()}
    plain = {n: np.asarray(x) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    expected = sdpa.attention_forward(**arrays, **plain)
    out, lse = interop.attention_forward(**operands, **options)
    assert out.dtype == getattr(torch, dtype)
    assert lse.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    assert np.array_equal(_arrays.to_array(out), expected.out)
    assert np.array_equal(lse.detach().numpy(), expected.lse)
    assert torch.equal(out, interop.attention(**operands, **options))
    out.sum().backward()
    assert all(x.grad.dtype == x.dtype and x.grad.shape == x.shape for x in operands.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_copy_in_either_direction(dtype):
    """Any strides but negative ones, which PyTorch does not have."""
    x = torch.ones(2, 6, 3, 4, 8, dtype=getattr(torch, dtype))
    for view in x, x[:, :, 1].swapaxes(1, 2), x[:1].expand(4, 6, 3, 4, 8), x[..., ::2]:
        array = _arrays.to_array(view)
        assert array.__array_interface__["data"][0] == view.data_ptr()
        assert array.strides == tuple(n * x.itemsize for n in view.stride())
        back = _arrays.to_tensor(array)
        assert back.data_ptr() == view.data_ptr()
        assert back.dtype == view.dtype


def test_strided_operands(rng):
    packed = normal(rng, 2, 6, 3, 4, 8).float()
    q, k, v = (packed[:, :, n].swapaxes(1, 2) for n in range(3))
    expected = interop.attention(*(x.contiguous() for x in (q, k, v)))
    assert torch.equal(interop.attention(q, k, v), expected)
    assert torch.equal(interop.attention(*(x.neg()._neg_view() for x in (q, k, v))), expected)


def test_numbers_for_tensors(rng):
    q, k, v = normal(rng, 3, 2, 5, 4)
    out = interop.attention(q, k, v, sinks=0.5, key_lengths=4, query_offset=1, is_causal=True)
    options = {"sinks": torch.tensor(0.5), "key_lengths": torch.tensor(4)}
    options |= {"query_offset": torch.tensor(1), "is_causal": "upper_left"}
    assert torch.equal(out, interop.attention(q, k, v, **options))
    slopes = interop.attention(q, k, v, alibi_slopes=[0.5, 0.25])
    assert torch.equal(slopes, interop.attention(q, k, v, alibi_slopes=torch.tensor([0.5, 0.25])))


def test_dropout_draws_from_pytorch(rng):
    q, k, v = normal(rng, 3, 2, 5, 4)
    torch.manual_seed(3)
    first, second = (interop.attention(q, k, v, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(first, interop.attention(q, k, v, dropout_p=0.5))
    of_generator = [
        interop.attention(q, k, v, None, 0.5, rng=torch.Generator().manual_seed(9))
        for _ in range(2)
    ]
    assert torch.equal(*of_generator)


# -------------------------------------------------------------------------------- derivatives


@pytest.mark.slow
@EVERY_CASE
def test_attention_to_second_order(rng, name):
    operands, options = problem(rng, name)
    f = positional(interop.attention, operands, options)
    x = tuple(operands.values())
    batched = "dropout" not in name and name != "all"
    assert gradcheck(
        f,
        x,
        check_forward_ad=True,
        check_batched_grad=batched,
        check_batched_forward_grad=batched,
    )
    assert gradgradcheck(f, x, check_fwd_over_rev=True, check_batched_grad=batched)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_FINITE_LSE)
def test_out_and_lse_together_to_second_order(rng, name):
    operands, options = problem(rng, name)
    f = positional(interop.attention_forward, operands, options)
    assert gradcheck(f, tuple(operands.values()), check_forward_ad=True)
    assert gradgradcheck(f, tuple(operands.values()), check_fwd_over_rev=True)


@pytest.mark.parametrize("option", ["key_lengths", "attn_mask", "bias", "softcap and scale"])
def test_hidden_keys_of_lse_to_second_order(rng, option):
    """What they and their tangents hold reaches no derivative; of a key that is seen it does."""
    there = torch.arange(6) < 4
    options = {
        "key_lengths": {"key_lengths": 4},
        "attn_mask": {"attn_mask": there, "sinks": normal(rng, 2)},
        "bias": {"attn_mask": torch.where(there, 0.5, -torch.inf).double()},
        "softcap and scale": {"softcap": 2.0, "scale": normal(rng, 2), "key_lengths": 4},
    }[option]
    q, k, q_t, k_t = normal(rng, 4, 2, 6, 3)

    def moved(q, k, q_t, k_t):
        def lse(q, k):
            return interop.attention_forward(q, k, k, **options).lse.sin()

        return func.jvp(lse, (q, k), (q_t, k_t))[1]

    def derivatives(k, k_t):
        x = q, k, q_t, k_t
        found = moved(*x), *func.grad(lambda *x: moved(*x).sum(), (0, 1, 2, 3))(*x)
        return [y[:, :4] for y in found]

    def overwritten(x, rows):
        return x.index_fill(1, torch.tensor(rows), torch.nan)

    expected = derivatives(k, k_t)
    hidden = [4, 5]
    for a, b in ((overwritten(k, hidden), k_t), (k, overwritten(k_t, hidden))):
        for found, y in zip(derivatives(a, b), expected, strict=True):
            torch.testing.assert_close(found, y)
    for a, b in ((overwritten(k, [3]), k_t), (k, overwritten(k_t, [3]))):
        assert moved(q, a, q_t, b).isnan().all()


def test_lse_to_second_order_where_value_alone_has_a_batch(rng):
    """Value has no part in lse, but its axes do."""
    q, k, v = (
        torch.tensor(rng.standard_normal((b, 2, 3, 4)), requires_grad=True) for b in (1, 1, 3)
    )
    scale = torch.tensor(rng.random((3, 2)), requires_grad=True)

    def f(q, k, v, scale):
        return tuple(interop.attention_forward(q, k, v, scale=scale, is_causal=True))

    assert gradcheck(f, (q, k, v, scale), check_forward_ad=True)
    assert gradgradcheck(f, (q, k, v, scale), check_fwd_over_rev=True)


@pytest.mark.parametrize("name", ["plain", "row without keys", "sinks", "all"])
def test_weights_to_second_order(rng, name):
    operands, options = problem(rng, name)
    del operands["value"]
    f = positional(interop.attention_weights, operands, options)
    assert gradcheck(f, tuple(operands.values()), check_forward_ad=True)
    assert gradgradcheck(f, tuple(operands.values()), check_fwd_over_rev=True)


TRANSFORMS = {
    "grad": lambda f: func.grad(lambda *x: f(*x).sin().sum(), argnums=(0, 1, 2, 3, 4)),
    "vjp": lambda f: lambda *x: func.vjp(f, *x)[1](torch.ones_like(f(*x))),
    "jvp": lambda f: lambda *x: func.jvp(f, x, tuple(y.cos() for y in x)),
    "jacrev": lambda f: func.jacrev(f, argnums=(0, 3, 4)),
    "jacfwd": lambda f: func.jacfwd(f, argnums=(1, 2, 4)),
    "hessian": lambda f: func.hessian(lambda *x: f(*x).sin().sum(), argnums=(0, 1, 4)),
    "jacfwd over jacrev": lambda f: func.jacfwd(func.jacrev(f)),
    "jacrev over jacfwd": lambda f: func.jacrev(func.jacfwd(f)),
    "jacrev over jacrev": lambda f: func.jacrev(func.jacrev(f, argnums=1), argnums=2),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_torch_func(rng, transform):
    """Each transformation gives the same result on PyTorch's formula."""
    x = tuple(normal(rng, *s) for s in [(2, 3, 4), (2, 5, 4), (2, 5, 3), (2, 3, 5), (2,)])

    def ours(query, key, value, attn_mask, sinks):
        return interop.attention(query, key, value, attn_mask, sinks=sinks, softcap=1.5)

    def theirs(*x):
        return formula(*x, softcap=1.5)

    found, expected = (TRANSFORMS[transform](f)(*x) for f in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


BATCHES = {
    "all": ([(7, 2, 3, 4), (7, 2, 5, 4), (7, 2, 5, 3), (7, 3, 5), (7, 2)], (0, 0, 0, 0, 0)),
    "flat": ([(7, 3, 4), (5, 7, 4), (5, 3), (3, 5), ()], (0, 1, None, None, None)),
    "keys": ([(2, 2, 3, 4), (2, 5, 4, 7), (2, 5, 3), (3, 5), (2,)], (None, 3, None, None, None)),
    "sinks": ([(2, 3, 4), (2, 5, 4), (2, 5, 3), (3, 5), (2, 7)], (None, None, None, None, 1)),
}


@pytest.mark.parametrize("batch", BATCHES)
def test_vmap(rng, batch):
    """A value, per-sample gradients and Hessian-vector products, whichever operand is batched."""
    shapes, in_dims = BATCHES[batch]
    x = tuple(normal(rng, *s) for s in shapes)

    def call(attention):
        return lambda *x: attention(*x[:4], sinks=x[4])

    def product(attention, argnum):
        gradient = func.grad(lambda *x: call(attention)(*x).sin().sum(), argnums=argnum)
        return lambda *x: func.jvp(gradient, x, tuple(map(torch.ones_like, x)))

    pairs = [[product(f, n) for f in (interop.attention, formula)] for n in range(5)]
    for pair in [[call(interop.attention), call(formula)], *pairs]:
        found, expected = (func.vmap(f, in_dims)(*x) for f in pair)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_vmap_of_lse_weights_and_lengths(rng):
    q, k = normal(rng, 7, 2, 3, 4), normal(rng, 7, 2, 5, 4)
    lengths = torch.tensor([1, 2, 3, 4, 5, 3, 2])

    def f(q, k, n):
        out, lse = interop.attention_forward(q, k, k, key_lengths=n)
        return out, lse, interop.attention_weights(q, k, key_lengths=n)

    found = func.vmap(f)(q, k, lengths)
    for i, n in enumerate(lengths.tolist()):
        expected = f(q[i], k[i], n)
        torch.testing.assert_close(tuple(x[i] for x in found), expected, rtol=0, atol=0)
    nested = func.vmap(func.vmap(interop.attention, (0, None, None)), (None, 0, 0))(q, k, k)
    torch.testing.assert_close(nested[3, 2], interop.attention(q[2], k[3], k[3]))


def test_forward_ad(rng):
    operands, options = problem(rng, "bias")
    x = [y.detach() for y in operands.values()]
    t = [torch.cos(y) for y in x]
    with forward_ad.dual_level():
        dual = interop.attention(*map(forward_ad.make_dual, x, t), **options)
        found = forward_ad.unpack_dual(dual).tangent
    expected = func.jvp(formula, tuple(x), tuple(t))[1]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["attn_mask", "sinks"])
def test_masks_and_sinks_of_a_wider_type(rng, name):
    """Results and tangents keep their type; gradients have their argument's."""
    q, k, v = (normal(rng, 4, 6, 8).float() for _ in range(3))
    x = normal(rng, *{"attn_mask": (6, 6), "sinks": (4,)}[name])

    def f(x):
        return tuple(interop.attention_forward(q, k, v, **{name: x}))

    for results in func.jvp(f, (x,), (x.cos(),)):
        assert [y.dtype for y in results] == [torch.float32] * 2
    x.requires_grad_()
    for y, expected in zip(f(x), f(x.detach().float()), strict=True):
        torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
        (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert grad.dtype == torch.float64


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_checkpoint(rng, dropout_p):
    """The forward is computed twice, with one pattern of dropout."""
    from torch.utils.checkpoint import checkpoint

    operands, _ = problem(rng, "plain")
    x = tuple(operands.values())
    for use_reentrant in True, False:
        torch.manual_seed(1)
        out = checkpoint(
            lambda *x: interop.attention(*x, dropout_p=dropout_p), *x, use_reentrant=use_reentrant
        )
        found = torch.autograd.grad(out.sum(), x) if not use_reentrant else None
        if use_reentrant:
            out.sum().backward()
            found = tuple(y.grad for y in x)
        torch.manual_seed(1)
        expected = torch.autograd.grad(interop.attention(*x, dropout_p=dropout_p).sum(), x)
        assert all(map(torch.equal, found, expected))


# ------------------------------------------------------------------------- operators and compile


def leaf(x):
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x


def operator_arguments(rng, name):
    """Arguments of each operator, as the public function makes them."""
    from sdpa.interop.torch._attention import arguments_of

    operands, options = problem(rng, name)
    args = arguments_of(**operands, **options)
    out, lse = (x.detach() for x in _operators.forward(*args))
    t = [
        None if x is None or x.dtype == torch.bool else torch.ones_like(x)
        for x in args[: len(DIFFERENTIABLE)]
    ]
    needs = [x is not None for x in t]
    grads = out.clone().requires_grad_(), lse.clone().requires_grad_()
    own = [leaf(x) for x in one_sequence(args, 2)] if is_packed(args) else args
    return {
        "attention_forward": args,
        "attention_weights": ("weights", *own),
        "attention_backward": (*grads, out, lse, needs, *args),
        "attention_jvp": (*t, out, lse, *args),
        "attention_double_backward": (*t, *grads, out, lse, [True, *needs], *args),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "boolean mask", "lower right", "all", "packed"])
@pytest.mark.parametrize("operator", list(_operators.KERNELS))
def test_opcheck(rng, name, operator):
    args = operator_arguments(rng, name)[operator]
    if operator == "attention_double_backward":  # it has no derivative
        args = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
    torch.library.opcheck(getattr(torch.ops.sdpa, operator).default, tuple(args))


@pytest.mark.slow
@EVERY_CASE
def test_compile(rng, name):
    """One graph, and in it the gradients of out and lse."""
    torch.compiler.reset()
    operands, options = problem(rng, name)
    x = tuple(operands.values())

    def f(*x):
        named = dict(zip(operands, x, strict=True))
        out, lse = interop.attention_forward(**named, **options)
        return out.sin().sum() + torch.where(lse > -torch.inf, lse, 0).sum()

    found, expected = (
        torch.autograd.grad(g(*x), x)
        for g in (torch.compile(f, fullgraph=True, backend="aot_eager"), f)
    )
    assert all(map(torch.equal, found, expected))


def test_compile_with_dropout_and_other_lengths(rng):
    torch.compiler.reset()
    f = torch.compile(
        lambda q, n: interop.attention(q, q, q, dropout_p=0.5, key_lengths=n),
        fullgraph=True,
        backend="aot_eager",
        dynamic=True,
    )
    for n in 5, 7, 11:
        q, lengths = normal(rng, 2, 3, n, 4), torch.tensor([n, 4])
        assert f(q, lengths).shape == q.shape
        assert not torch.equal(f(q, lengths), f(q, lengths))


def test_export(rng):
    class Model(torch.nn.Module):
        def forward(self, q):
            return interop.scaled_dot_product_attention(q, q, q, is_causal=True, softcap=2.0)

    q = normal(rng, 2, 3, 5, 4)
    program = torch.export.export(Model(), (q,))
    assert torch.equal(program.module()(q), Model()(q))


# -------------------------------------------------------------------- scaled_dot_product_attention


def results(f, sample, dtype, **options):
    """(out, gradients) of a sample, computed in this type."""

    def cast(x):
        is_float = isinstance(x, torch.Tensor) and x.is_floating_point()
        return x.detach().to(dtype).requires_grad_(x.requires_grad) if is_float else x

    args = [cast(x) for x in (sample.input, *sample.args)]
    options = {name: cast(x) for name, x in (sample.kwargs | options).items()}
    out = f(*args, **options)
    leaves = [*args, options.get("attn_mask")]
    leaves = [x for x in leaves if x is not None and x.requires_grad]
    return out, *torch.autograd.grad(out.sum(), leaves)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_samples_of_pytorch(dtype):
    """The inputs with which PyTorch tests its own function: results, gradients, shapes, types.

    Exact is PyTorch in float64. The error of a weight is that of its score, up to 300 roundings of
    1, or as much as PyTorch's own; gradients are differences of products of two elements.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    (info,) = [op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention"]
    torch.manual_seed(0)
    samples = list(info.sample_inputs("cpu", dtype, requires_grad=True))
    assert len(samples) > 20
    functions = interop.scaled_dot_product_attention, F.scaled_dot_product_attention
    for sample in samples:
        if sample.kwargs.get("dropout_p"):  # another pattern
            ours, theirs = (f(sample.input, *sample.args, **sample.kwargs) for f in functions)
            assert ours.shape == theirs.shape
        ours, theirs = (results(f, sample, dtype, dropout_p=0.0) for f in functions)
        exact = results(functions[1], sample, torch.float64, dropout_p=0.0)
        largest = max(x.detach().abs().max() for x in (sample.input, *sample.args))
        for a, b, c in zip(ours, theirs, exact, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            rounding = torch.finfo(dtype).eps * max(c.abs().max(), largest**2)
            assert (a - c).abs().max() <= 4 * (b - c).abs().max() + 300 * rounding


def test_causal_bias(rng):
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    q, k, v = normal(rng, 1, 2, 3, 4), normal(rng, 1, 2, 5, 4), normal(rng, 1, 2, 5, 4)
    for bias in causal_lower_right(3, 5), causal_upper_left(3, 5):
        theirs = F.scaled_dot_product_attention(q, k, v, bias)
        torch.testing.assert_close(interop.scaled_dot_product_attention(q, k, v, bias), theirs)
        torch.testing.assert_close(interop.attention(q, k, v, bias), theirs)
        torch.testing.assert_close(interop.attention_weights(q, k, attn_mask=bias) @ v, theirs)


def test_a_causal_bias_that_is_not_for_this_call():
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    q, k = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4)
    with pytest.raises(ValueError, match=r"attn_mask: .* = \(3, 5\), got one made for \(4, 5\)"):
        interop.scaled_dot_product_attention(q, k, k, causal_lower_right(4, 5))
    for bias in causal_lower_right(3, 5), causal_upper_left(3, 5):
        with pytest.raises(ValueError, match="is_causal: expected False beside a CausalBias, got"):
            interop.scaled_dot_product_attention(q, k, k, bias, is_causal=True)


# ------------------------------------------------------------------------------- what is refused

Q = torch.zeros(2, 3, 4)
REFUSED = {
    "array": (
        lambda: interop.attention(Q.numpy(), Q, Q),
        TypeError,
        "query: expected a torch.Tensor, got ndarray",
    ),
    "device": (
        lambda: interop.attention(Q, Q.to("meta"), Q),
        ValueError,
        "key: expected a tensor on the CPU, got meta",
    ),
    "device of an option": (
        lambda: interop.attention_weights(Q, Q, sinks=torch.zeros(2, device="meta")),
        ValueError,
        "sinks: expected a tensor on the CPU, got meta",
    ),
    "type": (
        lambda: interop.attention(Q, Q.double(), Q),
        TypeError,
        "key: expected query's dtype float32, float16 or bfloat16, got float64; write "
        "key.astype(query.dtype) if np.sqrt(d), which is applied already, a table or np.zeros made "
        "key float64",
    ),
    "window": (
        lambda: interop.attention(Q, Q, Q, window=3),
        TypeError,
        "window: expected a pair (left, right), got 3",
    ),
    "is_causal": (
        lambda: interop.attention(Q, Q, Q, is_causal="none"),
        ValueError,
        "is_causal: expected False, True, 'upper_left' or 'lower_right', got 'none'",
    ),
    "seed": (
        lambda: interop.attention(Q, Q, Q, dropout_p=0.5, rng=-1),
        ValueError,
        "rng: expected an int from 0 to 2^64 - 1, got -1",
    ),
    "no seed": (
        lambda: interop.attention(Q, Q, Q, dropout_p=0.5, rng="1"),
        TypeError,
        "rng: expected an int from 0 to 2^64 - 1, a torch.Generator or None, got '1'",
    ),
    "vmap of dropout": (
        lambda: func.vmap(lambda q: interop.attention(q, q, q, dropout_p=0.5, rng=1))(Q),
        RuntimeError,
        "dropout_p: dropout is not available under torch.func.vmap",
    ),
    "forward over forward": (
        lambda: func.jacfwd(func.jacfwd(lambda q: interop.attention(q, Q, Q)))(Q),
        NotImplementedError,
        "sdpa.interop.torch: third derivatives and forward mode over forward mode are not "
        "available",
    ),
    "stage": (
        lambda: interop.attention_weights(Q, Q, stage=3),
        TypeError,
        "stage: expected 'scores', 'capped', 'biased' or 'weights', got 3",
    ),
    "derivative of scores": (
        lambda: func.grad(lambda q: interop.attention_weights(q, Q, stage="scores").sum())(Q),
        NotImplementedError,
        "stage: only 'weights' can be differentiated, got 'scores'",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    call, error, expected = REFUSED[what]
    assert message(error, call) == expected


@pytest.mark.parametrize("name", ["", *interop.__all__])
def test_each_has_an_example(name):
    documented = getattr(interop, name) if name else interop
    assert ">>> " in documented.__doc__ or isinstance(documented, type)
