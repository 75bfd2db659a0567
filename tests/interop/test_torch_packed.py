"""sdpa.interop.torch with packed sequences, against one call per sequence."""

import warnings

import numpy as np
import pytest
from support import problems
from support.calls import message
from support.problems import positional
from support.pytorch import ITS_OWN_WARNINGS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[peers]'")

from torch import func
from torch.autograd import gradcheck, gradgradcheck

import sdpa
from sdpa.interop import torch as interop

pytestmark = ITS_OWN_WARNINGS

LENGTHS_Q, LENGTHS_K = [2, 0, 5, 1], [3, 2, 4, 0]


def cumulative(lengths):
    return torch.tensor([0, *np.cumsum(lengths)])


CU = {"cu_seqlens_q": cumulative(LENGTHS_Q), "cu_seqlens_k": cumulative(LENGTHS_K)}


def operands(rng):
    """Query, key and value of four sequences, three query heads to each key head."""
    shapes = (sum(LENGTHS_Q), 6, 4), (sum(LENGTHS_K), 2, 4), (sum(LENGTHS_K), 2, 3)
    return tuple(torch.from_numpy(rng.standard_normal(shape)) for shape in shapes)


def together(q, k, v):
    return interop.attention(q, k, v, **CU, enable_gqa=True, is_causal=True, softcap=2.0)


def apart(q, k, v):
    """One call per sequence, on tensors that PyTorch cuts and joins."""
    parts = (x.split(n) for x, n in ((q, LENGTHS_Q), (k, LENGTHS_K), (v, LENGTHS_K)))
    options = {"enable_gqa": True, "is_causal": True, "softcap": 2.0}
    outs = (
        interop.attention(*(x.transpose(0, 1) for x in own), **options)
        for own in zip(*parts, strict=True)
    )
    return torch.cat([out.transpose(0, 1) for out in outs])


def loss(f):
    return lambda *x: f(*x).sin().sum()


TRANSFORMS = {
    "forward": lambda f: f,
    "grad": lambda f: func.grad(loss(f), (0, 1, 2)),
    "jvp": lambda f: lambda *x: func.jvp(f, x, tuple(map(torch.cos, x))),
    "hessian-vector product": lambda f: (
        lambda *x: func.jvp(func.grad(loss(f), (0, 1, 2)), x, tuple(map(torch.cos, x)))
    ),
    "jacrev": lambda f: func.jacrev(f, 1),
    "hessian": lambda f: func.hessian(loss(f), 1),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_call_per_sequence(rng, transform):
    x = operands(rng)
    found, expected = (TRANSFORMS[transform](f)(*x) for f in (together, apart))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def with_padding(q, k, v):
    """Rows of NaN behind the sequences, whose results are left out."""

    def padded(x, n):
        return torch.cat((x, x.new_full((n, *x.shape[1:]), torch.nan)))

    return together(padded(q, 3), padded(k, 2), padded(v, 2))[: len(q)]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_padding_at_the_end(rng, transform):
    x = operands(rng)
    found, expected = (TRANSFORMS[transform](f)(*x) for f in (with_padding, together))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_padding_of_lse_and_of_tangents(rng):
    """Results of padding are 0, lse -inf; tangents are 0 there, even along NaN."""
    q, k, v = operands(rng)
    x = tuple(torch.cat((y, y.new_full((2, *y.shape[1:]), torch.nan))) for y in (q, k, v))

    def f(*x):
        return interop.attention_forward(*x, **CU, enable_gqa=True)

    (out, lse), (out_t, lse_t) = func.jvp(f, x, x)
    for y in out[len(q) :], out_t[len(q) :], lse_t[:, len(q) :]:
        assert (y == 0).all()
    assert (lse[:, len(q) :] == -torch.inf).all()
    _, (_, expected) = func.jvp(f, (q, k, v), (q, k, v))
    torch.testing.assert_close(lse_t[:, : len(q)], expected)
    compiled = torch.compile(lambda *x: f(*x)[0], backend="eager")
    assert torch.equal(compiled(*x), out)


@pytest.mark.parametrize("place", [0, 2])
def test_vmap(rng, place):
    """Values and gradients per sample equal those of one call per sample."""
    q, k, v = operands(rng)
    queries = torch.stack([q, 2 * q, -q], place)
    for f in together, func.grad(loss(together), (0, 1, 2)):
        found = func.vmap(f, (place, None, None))(queries, k, v)
        expected = [f(x, k, v) for x in queries.unbind(place)]
        if not isinstance(found, tuple):
            found, expected = (found,), [(x,) for x in expected]
        for one, many in zip(found, zip(*expected, strict=True), strict=True):
            assert torch.equal(one, torch.stack(many))


@pytest.mark.parametrize("name", ["packed", "packed, dropout"])
@pytest.mark.parametrize("sequence", range(3))
def test_weights_of_a_sequence(rng, name, sequence):
    """The weights equal sdpa's, and have derivatives to second order."""
    arrays, options = problems.problem(rng, name)
    del arrays["value"]
    x = {n: torch.from_numpy(a).requires_grad_() for n, a in arrays.items()}
    tensors = {
        n: torch.from_numpy(a) if isinstance(a, np.ndarray) else a for n, a in options.items()
    }
    f = positional(interop.attention_weights, x, tensors | {"sequence": sequence})
    expected = sdpa.attention_weights(**arrays, **options, sequence=sequence)
    found = f(*x.values())
    assert np.array_equal(found.detach().numpy(), expected)
    if sequence != 1:  # which has no queries
        assert gradcheck(f, tuple(x.values()), check_forward_ad=True)
        assert gradgradcheck(f, tuple(x.values()), check_fwd_over_rev=True)


@pytest.mark.parametrize("transform", ["jvp", "grad", "vmap", "vmap of grad"])
def test_weights_of_a_sequence_under_torch_func(rng, transform):
    """All rows are checked before those of the sequence are taken, also where they are wrapped."""
    q, k, _ = operands(rng)
    sinks = torch.from_numpy(rng.standard_normal(6))
    own = tuple(slice(sum(n[:2]), sum(n[:3])) for n in (LENGTHS_Q, LENGTHS_K))

    def of_sequence(q, k, sinks):
        options = CU | {"sequence": 2, "enable_gqa": True, "sinks": sinks}
        return interop.attention_weights(q, k, **options)

    def alone(q, k, sinks):
        q, k = (x[rows].transpose(0, 1) for x, rows in zip((q, k), own, strict=True))
        return interop.attention_weights(q, k, enable_gqa=True, sinks=sinks)

    def result(f):
        if transform == "jvp":
            return func.jvp(f, (q, k, sinks), (q, k, sinks))
        of_one = func.grad(lambda *x: f(*x).square().sum(), (0, 1, 2))
        if transform == "grad":
            return of_one(q, k, sinks)
        batch = torch.stack([q, -q], 1), k, torch.stack([sinks, 2 * sinks])
        return func.vmap(f if transform == "vmap" else of_one, (1, None, 0))(*batch)

    torch.testing.assert_close(result(of_sequence), result(alone))


def test_another_default_device(rng):
    """Tensors that the bridge makes to cut out a sequence are on the CPU."""
    x = operands(rng)[1]
    cu, lengths = CU["cu_seqlens_k"], torch.tensor([1, 2, 3, 0])
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "key_lengths": lengths}
    expected = interop.attention_weights(x, x, **options, sequence=2)
    torch.set_default_device("meta")
    try:
        found = interop.attention_weights(x, x, **options, sequence=2)
    finally:
        torch.set_default_device(None)
    assert torch.equal(found, expected)


def test_no_sequences():
    x, none = torch.ones(0, 2, 4, requires_grad=True), torch.zeros(1, dtype=torch.int32)
    out, lse = interop.attention_forward(x, x, x, cu_seqlens_q=none, cu_seqlens_k=none)
    assert (out.shape, lse.shape) == ((0, 2, 4), (2, 0))
    ones = torch.ones_like(x)
    _, (_, lse_t) = func.jvp(
        lambda x: interop.attention_forward(x, x, x, cu_seqlens_q=none, cu_seqlens_k=none),
        (x,),
        (ones,),
    )
    assert lse_t.shape == (2, 0)


X = torch.ones(9, 2, 4)
CU_X = {"cu_seqlens_q": [0, 4, 9], "cu_seqlens_k": torch.tensor([0, 4, 9])}
REFUSED = {
    "one alone": (
        lambda: interop.attention(X, X, X, cu_seqlens_k=[0, 9]),
        ValueError,
        "cu_seqlens_q: expected an array, since cu_seqlens_q and cu_seqlens_k go together, "
        "got None",
    ),
    "rows": (
        lambda: interop.attention(X, X, X, **CU_X | {"cu_seqlens_k": [0, 4, 10]}),
        ValueError,
        "cu_seqlens_k: expected at most key's number of rows, 9, as its last element, got 10",
    ),
    "mask": (
        lambda: interop.attention(X, X, X, torch.ones(9, 9), **CU_X),
        ValueError,
        "attn_mask: expected None with cu_seqlens_q, got (9, 9); use mask_mod or score_mod",
    ),
    "no sequence": (
        lambda: interop.attention_weights(X, X, **CU_X),
        ValueError,
        "sequence: expected one of the 2 sequences of cu_seqlens_q, got None",
    ),
    "sequence beyond": (
        lambda: interop.attention_weights(X, X, **CU_X, sequence=2),
        ValueError,
        "sequence: expected one of the 2 sequences of cu_seqlens_q, from 0 on, got 2",
    ),
    "sequence alone": (
        lambda: interop.attention_weights(X, X, sequence=0),
        ValueError,
        "sequence: expected None without cu_seqlens_q, got 0",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    call, error, expected = REFUSED[what]
    assert message(error, call) == expected
