"""The functions on attention accept every kind of array, layout, number of axes and `out`."""

import array
import inspect
import sys

import numpy as np
import pytest
from support.calls import F32, message, operands
from support.helpers import LAYOUTS
from support.protocols import OnlyArray, OnlyDlpack

import sdpa
from sdpa import _core


@pytest.mark.parametrize(
    "convert",
    [
        lambda x: x.tolist(),
        lambda x: tuple(map(tuple, x.tolist())),
        memoryview,
        lambda x: memoryview(array.array("d", x.ravel())).cast("B").cast("d", x.shape),
        OnlyArray,
        OnlyDlpack,
        lambda x: x.view(np.matrix),
        lambda x: x.view(np.recarray),
    ],
    ids=["list", "tuple", "memoryview", "array.array", "__array__", "DLPack", "matrix", "subclass"],
)
@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_anything_that_numpy_takes(convert):
    rng = np.random.default_rng(0)
    q, k, v, mask = (rng.standard_normal(s) for s in ((5, 8), (7, 8), (7, 3), (5, 7)))
    expected = sdpa.attention_forward(q, k, v, mask)
    got = sdpa.attention_forward(*map(convert, (q, k, v, mask)))
    assert type(got.out) is np.ndarray
    np.testing.assert_array_equal(got.out, expected.out)
    np.testing.assert_array_equal(got.lse, expected.lse)
    grads = sdpa.attention_backward(*map(convert, (got.out, q, k, v, got.out)), got.lse, mask)
    assert all(type(g) is np.ndarray for g in grads[:3])


def test_torch_tensors(torch):
    rng = np.random.default_rng(0)
    x = [rng.standard_normal((2, 5, 8)).astype(F32) for _ in range(3)]
    tensors = [torch.from_numpy(a) for a in x]
    np.testing.assert_array_equal(sdpa.attention(*tensors), sdpa.attention(*x))
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    got = sdpa.attention(*map(OnlyDlpack, tensors), mask)
    np.testing.assert_array_equal(got, sdpa.attention(*x, np.tri(5, dtype=bool)))
    empty = [torch.empty(0, 8), torch.empty(0, 8), torch.empty(0, 3)]
    assert sdpa.attention(*empty).shape == (0, 3)
    needs_grad = [tensors[0].requires_grad_(), *tensors[1:]]
    assert message(TypeError, sdpa.attention, *needs_grad).startswith("query: expected an array")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_change_no_bit(layout, dtype):
    rng = np.random.default_rng(0)
    shapes = {"query": (2, 4, 5, 8), "key": (2, 2, 7, 8), "value": (2, 2, 7, 3)}
    x = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    x["attn_mask"] = rng.standard_normal((4, 5, 7)).astype(dtype)
    options = {"enable_gqa": True, "key_lengths": [7, 4], "query_offset": [1]}
    before = {name: a.copy() for name, a in x.items()}
    out, lse = sdpa.attention_forward(**x, **options)
    needs = tuple(x)
    grads = sdpa.attention_backward(out, **x, out=out, lse=lse, needs=needs, **options)
    lay = LAYOUTS[layout]
    y = {name: lay(a) for name, a in x.items()}
    got = sdpa.attention_forward(**y, **options)
    assert got.out.dtype == dtype
    assert got.out.dtype.isnative
    np.testing.assert_array_equal(got.out, out)
    np.testing.assert_array_equal(got.lse, lse)
    again = sdpa.attention_backward(
        lay(out), **y, out=lay(out), lse=lay(lse), needs=needs, **options
    )
    for name in needs:
        np.testing.assert_array_equal(getattr(again, name), getattr(grads, name))
        assert getattr(again, name).dtype.isnative
        np.testing.assert_array_equal(x[name], before[name])
        np.testing.assert_array_equal(y[name], before[name])


def test_broadcast_views():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(s) for s in ((3, 1, 5, 8), (4, 7, 8), (7, 2)))
    expected = sdpa.attention(q, k, v)
    assert expected.shape == (3, 4, 5, 2)
    full = [np.broadcast_to(x, (3, 4, *x.shape[-2:])) for x in (q, k, v)]
    np.testing.assert_array_equal(sdpa.attention(*full), expected)
    np.testing.assert_array_equal(sdpa.attention(*(x.copy() for x in full)), expected)
    one = np.broadcast_to(np.float64(0.5), (2, 5, 8))
    np.testing.assert_array_equal(sdpa.attention(one, one, one), one)


@pytest.mark.parametrize("seed", range(20))
def test_any_batch_axes(seed):
    """Axes of size 1, axes that can be joined to one and axes that cannot, up to NumPy's limit."""
    rng = np.random.default_rng(seed)
    lead = tuple(rng.choice([1, 1, 2, 3], size=rng.integers(1, 6)))
    axes = rng.permutation(len(lead))

    def make(*inner):
        shape = tuple(n if rng.random() < 0.7 else 1 for n in lead)
        drop = int(rng.integers(0, len(lead) + 1)) if rng.random() < 0.3 else 0
        x = rng.standard_normal((*(shape[a] for a in axes), *inner))
        x = x.transpose(*np.argsort(axes), *range(len(lead), x.ndim))
        return x[(0,) * drop]

    q, k, v, mask = make(4, 5, 3), make(4, 6, 3), make(1, 6, 2), make(4, 1, 6)
    batch = np.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    while mask.ndim > len(batch) + 3:
        mask = mask[0]
    mask = mask[tuple(slice(0, 1) for _ in mask.shape[:-3])]
    lengths = rng.integers(0, 7, batch)
    got = sdpa.attention_forward(q, k, v, mask, key_lengths=lengths, is_causal=True)
    needs = ("query", "key", "value", "attn_mask")
    grads = sdpa.attention_backward(
        got.out, q, k, v, *got, mask, key_lengths=lengths, is_causal=True, needs=needs
    )
    totals = dict.fromkeys(needs, 0.0)
    x = dict(zip(needs, (q, k, v, mask), strict=True))
    for at in np.ndindex(batch):
        one = [np.broadcast_to(a, batch + a.shape[-3:])[at] for a in x.values()]
        n = int(lengths[at])
        out, lse = sdpa.attention_forward(*one, key_lengths=n, is_causal=True)
        np.testing.assert_array_equal(got.out[at], out)
        np.testing.assert_array_equal(got.lse[at], lse)
        part = sdpa.attention_backward(
            out, *one[:3], out, lse, one[3], key_lengths=n, is_causal=True, needs=needs
        )
        for name in needs:
            totals[name] += float((getattr(part, name) * 1.25).sum())
    for name in needs:
        assert getattr(grads, name).shape == x[name].shape
        np.testing.assert_allclose(1.25 * getattr(grads, name).sum(), totals[name], atol=1e-11)


def test_as_many_axes_as_numpy_has():
    shape = (1,) * 20 + (2,) + (1,) * 20 + (3,) + (1,) * 19
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((*shape, *s)) for s in ((2, 5, 4), (2, 6, 4), (2, 6, 3)))
    assert q.ndim == 64
    got = sdpa.attention(q, k, v)
    expected = sdpa.attention(*(x.squeeze() for x in (q, k, v)))
    np.testing.assert_array_equal(got.squeeze(), expected)


def bilinear(x):
    return sdpa.bilinear_attention(x, x, x, np.eye(4))


def shaw(x):
    return sdpa.shaw_attention(x, x, x, *np.ones((2, 3, 4)))


def layer(x):
    made = sdpa.MultiHeadAttention(4, 2, dtype=np.float64, rng=0)
    out, saved = made.forward(x, x)
    return made.backward(out, saved).x


def weighted(x):
    return sdpa.logsumexp_backward(x.sum(-1), x, sdpa.logsumexp(x, -1, b=2.0 * x), b=2.0 * x).b


@pytest.mark.parametrize("function", [bilinear, shaw, layer, weighted])
def test_composed_functions_of_many_axes(rng, function):
    x = abs(rng.standard_normal((2, *(1,) * 30, 3, *(1,) * 28, 5, 4)))
    got, expected = function(x), function(x.squeeze())
    np.testing.assert_allclose(got.squeeze(), expected, rtol=1e-12, atol=1e-12)


def test_numpy_scalars_as_options():
    x = operands()
    expected = sdpa.attention(**x, is_causal=True, scale=0.5, window=(1, 0), key_lengths=6)
    got = sdpa.attention(
        **x,
        is_causal=np.True_,
        scale=F32(0.5),
        window=[np.int8(1), np.uint64(0)],
        key_lengths=np.int16(6),
        workers=np.int32(1),
        enable_gqa=np.False_,
        dropout_p=0,
    )
    np.testing.assert_array_equal(got, expected)
    unbounded = sdpa.attention(**x, window=(10**30, 2**63 - 1), query_offset=2**60)
    np.testing.assert_array_equal(unbounded, sdpa.attention(**x))


def test_a_scale_that_is_an_array_for_numpy_alone():
    scale = np.array(0.5)
    expected = sdpa.attention(**operands(), scale=scale)
    np.testing.assert_array_equal(sdpa.attention(**operands(), scale=OnlyArray(scale)), expected)


def test_none_is_absent():
    x = operands()
    options = {name: None for name, default, *_ in _core._options() if default == "None"}
    for function in ("attention", "attention_forward", "attention_weights"):
        call = getattr(sdpa, function)
        taken = inspect.signature(call).parameters
        args = [a for name, a in x.items() if name in taken]
        call(*args, **{name: None for name in options if name in taken})


@pytest.mark.parametrize("name", ["key_lengths", "query_offset"])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.tolist(),
        lambda x: x.astype(np.int8),
        lambda x: x.astype(np.uint64),
        lambda x: x.astype(">i2"),
        lambda x: np.repeat(x, 3)[::3],
        lambda x: x[::-1].copy()[::-1],
        lambda x: LAYOUTS["unaligned"](x),
        lambda x: LAYOUTS["read-only"](x),
    ],
    ids=["list", "i1", "u8", "swapped", "strided", "reversed", "unaligned", "read-only"],
)
def test_integers_of_any_kind(name, make):
    rng = np.random.default_rng(0)
    x = [rng.standard_normal(a.shape) for a in operands().values()]
    values = np.array([3, 6])
    got = sdpa.attention(*x, is_causal=True, **{name: make(values)})
    for b, n in enumerate(values):
        one = sdpa.attention(*(a[b] for a in x), is_causal=True, **{name: int(n)})
        np.testing.assert_array_equal(got[b], one)


def test_length_and_offset_arrays_are_copied():
    """Another thread could change them between the check and their use."""
    lengths = np.array([3, 7])
    references = sys.getrefcount(lengths)
    sdpa.attention(**operands(), key_lengths=lengths, is_causal="lower_right")
    assert sys.getrefcount(lengths) == references
    np.testing.assert_array_equal(lengths, [3, 7])


def test_out_interleaved_with_the_inputs():
    """One packed buffer (B, L, 4, H, d): bounds overlap, elements do not."""
    rng = np.random.default_rng(0)
    packed = rng.standard_normal((2, 9, 4, 3, 8)).astype(F32)
    q, k, v, out = (packed[:, :, i].swapaxes(1, 2) for i in range(4))
    expected = sdpa.attention(q.copy(), k.copy(), v.copy())
    assert sdpa.attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, expected)
    even, odd = packed.reshape(-1)[0::2], packed.reshape(-1)[1::2]
    q = even[:72].reshape(9, 8)
    sdpa.attention(q, q, q, out=odd[:72].reshape(9, 8))


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.empty((2, 4, 5, 3), F32),
        lambda: np.empty((3, 5, 4, 2), F32).T,
        lambda: np.empty((2, 5, 4, 3), F32).swapaxes(1, 2),
        lambda: np.empty((2, 4, 5, 3), F32)[::-1, :, ::-1, ::-1],
        lambda: np.empty((4, 8, 10, 9), F32)[::2, ::2, 1::2, ::3],
        lambda: np.empty((2, 4, 5, 3), [("a", "i4"), ("x", "f4")])["x"],
        lambda: np.einsum("bhidi->bhid", np.empty((2, 4, 5, 3, 5), F32)),
    ],
    ids=["contiguous", "fortran", "heads last", "reversed", "steps", "field", "diagonal"],
)
def test_out_of_any_strides(make):
    rng = np.random.default_rng(0)
    x = {name: rng.standard_normal(a.shape).astype(F32) for name, a in operands().items()}
    expected = sdpa.attention_forward(**x)
    out = make()
    assert sdpa.attention(**x, out=out) is out
    np.testing.assert_array_equal(out, expected.out)
    out = make()
    got = sdpa.attention_forward(**x, out=out)
    assert got.out is out
    np.testing.assert_array_equal(out, expected.out)
    np.testing.assert_array_equal(got.lse, expected.lse)


def test_merge_takes_stacked_arrays_and_iterators():
    rng = np.random.default_rng(0)
    outs, lses = rng.standard_normal((3, 2, 5, 4)), rng.standard_normal((3, 2, 5))
    expected = sdpa.merge_attention(list(outs), list(lses))
    for parts in ((outs, lses), (tuple(outs), lses), (iter(outs), (x for x in lses))):
        got = sdpa.merge_attention(*parts)
        np.testing.assert_array_equal(got.out, expected.out)
        np.testing.assert_array_equal(got.lse, expected.lse)


def test_merge_of_many_axes():
    x = np.ones((1,) * 30 + (2,) + (1,) * 31 + (5, 3))
    out, lse = sdpa.merge_attention([x, 3 * x], [0 * x[..., 0]] * 2)
    np.testing.assert_array_equal(out, 2 * x)
    np.testing.assert_allclose(lse, np.full(x.shape[:-1], np.log(2)), rtol=1e-15)
