"""sdpa.blocks: any source, any blocks, every option, against a call on the whole and the oracle."""

import contextvars
import inspect
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from support.blocks import N_K, N_Q, Store, tensors
from support.helpers import BFLOAT16, assert_same_bits

import sdpa
from sdpa import _core, blocks, reference
from sdpa._options import BlockOptions
from sdpa._programs import _program
from sdpa._stream import ScoreMatrix

NEEDS = ("query", "key", "value")


def whole(x):
    return x["query"], x["keys"], x["values"]


LENGTHS = np.array([53, 20])
SEEN = np.random.default_rng(3).random((2, 1, N_Q, N_K)) < 0.7
BIAS = np.random.default_rng(4).standard_normal((4, N_Q, N_K))
OPTIONS = {
    "none": {},
    "causal": {"is_causal": True},
    "lower right": {"is_causal": "lower_right"},
    "lower right, lengths": {"is_causal": "lower_right", "key_lengths": LENGTHS},
    "offset": {"is_causal": True, "query_offset": np.array([-9, 30])},
    "scale": {"scale": -0.3},
    "softcap": {"softcap": 0.7},
    "window": {"window": (6, 3)},
    "causal window, offset": {"is_causal": True, "window": (5, None), "query_offset": 11},
    "right": {"window": (None, 2), "query_offset": [-40, 4]},
    "sinks": {"sinks": np.linspace(-1, 2, 4)},
    "options that are lists": {"sinks": [-1.0, 0.0, 1.0, 2.0], "scale": [0.5, 0.4, 0.3, 0.2]},
    "alibi": {"alibi_slopes": np.linspace(0, 0.5, 4), "query_offset": 7},
    "lengths": {"key_lengths": np.array([0, 31]), "sinks": np.ones(4)},
    "one length": {"key_lengths": 17},
    "boolean mask": {"attn_mask": SEEN},
    "bias": {"attn_mask": BIAS, "window": (20, 4)},
    "bias of keys": {"attn_mask": BIAS[0, 0]},
    "bias of queries": {"attn_mask": BIAS[..., :1]},
    "bias of one axis": {"attn_mask": BIAS[0, 0, :1]},
    "bias without axes": {"attn_mask": BIAS[0, 0, 0]},
    "boolean mask of keys": {"attn_mask": SEEN[0, 0, 0]},
    "boolean mask without axes": {"attn_mask": np.array(True)},
    "scale of each head": {"scale": np.linspace(-1, 2, 4)},
    "where": {"where": SEEN, "attn_mask": BIAS},
    "where of keys": {"where": SEEN[0, 0, 0], "attn_mask": SEEN},
    "workers": {"workers": 2},
    "functions": {
        "score_mod": lambda s, b, h, q, k, table, u: s * u[b] + table[h, q - k + 100],
        "score_args": (np.random.default_rng(6).standard_normal((4, 201)), np.array([0.5, 2.0])),
        "mask_mod": lambda b, h, q, k, part: (part[k] == part[q]) | (q >= k + h),
        "mask_args": (np.arange(100) // 20,),
    },
    "score_mod": {
        "score_mod": lambda s, b, h, q, k, t: s + t[q, k] * np.tanh(s),
        "score_args": (np.random.default_rng(7).standard_normal((100, 100)),),
        "query_offset": [3, 9],
        "is_causal": True,
    },
    "mask_mod": {"mask_mod": sdpa.mask_program(lambda b, h, q, k: abs(q - k) < 9)},
    "all": {
        "attn_mask": BIAS,
        "where": SEEN[..., :1, :],
        "is_causal": True,
        "scale": np.linspace(0.2, 1, 4),
        "softcap": 2.0,
        "window": (30, None),
        "sinks": np.zeros(4),
        "alibi_slopes": np.full(4, 0.1),
        "key_lengths": LENGTHS,
        "query_offset": [3, 9],
    },
}


def test_every_option_has_a_case():
    """All that attention takes; dropout is refused, out, packed and grouped are below."""
    known = set(BlockOptions.__annotations__) - {"dropout_p", "rng"}
    known -= {"cu_seqlens_q", "cu_seqlens_k", "enable_gqa"}
    assert known == {name for options in OPTIONS.values() for name in options}
    taken = inspect.signature(sdpa.attention).parameters
    operands = {"query", "key", "value", "out"}
    # Blocks are merged, which their sizes show.
    assert set(taken) - operands - {"invariant"} == set(BlockOptions.__annotations__)


def floating(options):
    """The options whose gradients there are."""
    return [
        name
        for name in ("attn_mask", "sinks", "scale", "score_args")
        if name in options and not (name == "attn_mask" and boolean(options))
    ]


def boolean(options):
    return np.asarray(options.get("attn_mask", 0.0)).dtype == bool


def check(x, options, block, parts=(slice(0, 9), slice(9, None)), atol=1e-12):
    """Forward and backward by blocks against the same on the whole."""
    expected = sdpa.attention_forward(*whole(x), **options)
    stores = {name: Store(a) for name, a in x.items()}
    got = blocks.attend(**stores, block=block, **options)
    axis = -3 if "cu_seqlens_q" in options else -2
    np.testing.assert_allclose(got.out, expected.out, rtol=0, atol=atol)
    np.testing.assert_allclose(got.lse, expected.lse, rtol=0, atol=atol)
    rng = np.random.default_rng(5)
    grads = rng.standard_normal(got.out.shape).astype(got.out.dtype)
    grad_lse = rng.standard_normal(got.lse.shape).astype(got.lse.dtype)
    needs = (*NEEDS, *floating(options))
    true = sdpa.attention_backward(
        grads, *whole(x), *expected, grad_lse=grad_lse, needs=needs, **options
    )
    pieces = [
        blocks.attend_backward(
            Store(grads), **stores, out=Store(got.out), lse=Store(got.lse), block=block,
            rows=part, columns=part, grad_lse=Store(grad_lse), needs=needs, **options,
        )
        for part in parts
    ]  # fmt: skip
    for name in NEEDS:
        joined = np.concatenate([getattr(piece, name) for piece in pieces], axis=axis)
        np.testing.assert_allclose(joined, getattr(true, name), rtol=0, atol=10 * atol)
    for name in floating(options):
        if name == "score_args":
            for total, *shares in zip(
                true.score_args, *(p.score_args for p in pieces), strict=True
            ):
                assert all(share.dtype == total.dtype for share in shares)
                np.testing.assert_allclose(sum(shares), total, rtol=0, atol=100 * atol)
            continue
        shares = [getattr(piece, name) for piece in pieces]
        split = name == "attn_mask" and shares[0].shape != options[name].shape
        joined = np.concatenate(shares, axis=-2) if split else sum(shares)
        np.testing.assert_allclose(joined, getattr(true, name), rtol=0, atol=10 * atol)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("keys", [2, 12, 40, 100])
def test_keys_out_of_sight_whose_weights_are_below_the_rounding_of_lse(keys, dtype):
    """The share of the others in rowsum(grad_out * out) counts if their values are large."""
    weight = 8 * float(np.finfo(dtype).eps)
    query, key = np.zeros((10, 8), dtype), np.zeros((keys + 1, 8), dtype)
    value = np.vstack([np.arange(keys)[:, None] % 3, [[1 / weight]]]).astype(dtype)
    mask = np.zeros((10, keys + 1), dtype)
    mask[:, -1] = np.log(weight * keys)
    saved = sdpa.attention_forward(query, key, value, mask)
    grad_out = np.ones((10, 1), dtype)
    part = sdpa.attention_backward(
        grad_out, query, key[:keys], value[:keys], *saved, mask[:, :keys], needs=("attn_mask",)
    )
    p = np.exp(mask.astype(float)) / np.exp(mask.astype(float)).sum(-1, keepdims=True)
    dp = value.astype(float).T
    true = p * (dp - (p * dp).sum(-1, keepdims=True))
    np.testing.assert_allclose(part.attn_mask, true[:, :keys], rtol=0, atol=100 * weight / keys)


@pytest.mark.parametrize("block", [7, 16, 1000])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option(options, block, rng):
    check(tensors(rng), options, block)


def test_the_oracle_agrees(rng):
    x = tensors(rng)
    for options in OPTIONS.values():
        options = {name: value for name, value in options.items() if name != "workers"}
        expected = reference.attention_forward(*whole(x), **options)
        got = blocks.attend(**x, block=10, **options)
        np.testing.assert_allclose(got.out, expected.out, rtol=0, atol=1e-12)
        np.testing.assert_allclose(got.lse, expected.lse, rtol=0, atol=1e-12)


@pytest.mark.parametrize("key_lead", [(2, 2), (4,), (1, 1), ()], ids=str)
def test_grouped_and_broadcast_heads(key_lead, rng):
    x = tensors(rng, key_lead=key_lead)
    check(x, {"enable_gqa": key_lead == (2, 2), "is_causal": True}, 16)


def test_two_axes(rng):
    check(tensors(rng, lead=()), {"is_causal": True, "sinks": np.array(0.5)}, 8)


CU_Q, CU_K = np.array([0, 0, 12, 30, 37]), np.array([0, 8, 20, 41, 53])
PACKED = {
    "plain": {},
    "causal": {"is_causal": True},
    "lower right": {"is_causal": "lower_right", "key_lengths": [2, 12, 15, 0]},
    "window": {"window": (4, 1), "query_offset": [0, -3, 5, 2]},
    "alibi": {"alibi_slopes": np.ones(4), "is_causal": True, "sinks": np.ones(4)},
    "functions": {
        "score_mod": lambda s, b, h, q, k, u, t: s * u[b] + t[h, q, k],
        "score_args": (
            np.linspace(0.5, 2, 4),
            np.random.default_rng(8).standard_normal((4, 40, 40)),
        ),
        "mask_mod": lambda b, h, q, k: (q >= k) | (b == 2),
    },
}


@pytest.mark.parametrize("block", [1, 9, 100])
@pytest.mark.parametrize("options", PACKED.values(), ids=PACKED)
def test_packed_sequences(options, block, rng):
    x = {name: a[0].swapaxes(0, 1) for name, a in tensors(rng).items()}
    check(x, options | {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}, block)


@pytest.mark.parametrize("block", [1, 9, 100])
@pytest.mark.parametrize("options", PACKED.values(), ids=PACKED)
def test_rows_behind_the_last_sequence(options, block, rng):
    """They give zeros and lse -inf, and their NaN reaches nothing."""
    options = options | {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "block": block}
    x = {name: a[0].swapaxes(0, 1) for name, a in tensors(rng).items()}

    def padded(a, n):
        return np.concatenate([a, np.full((n, *a.shape[1:]), np.nan, a.dtype)])

    y = {name: padded(a, 4 if name == "query" else 30) for name, a in x.items()}
    n_q, n_k = len(x["query"]), len(x["keys"])
    stores = {name: Store(a) for name, a in y.items()}
    got, true = blocks.attend(**stores, **options), blocks.attend(**x, **options)
    np.testing.assert_array_equal(got.out, np.pad(true.out, ((0, 4), (0, 0), (0, 0))))
    np.testing.assert_array_equal(got.lse[:, :n_q], true.lse)
    assert (got.lse[:, n_q:] == -np.inf).all()
    grad = rng.standard_normal(true.out.shape).astype(true.out.dtype)
    saved = {
        "out": padded(true.out, 4),
        "lse": np.pad(true.lse, ((0, 0), (0, 4)), constant_values=np.nan),
    }
    g = blocks.attend_backward(padded(grad, 4), **stores, **saved, **options, needs=NEEDS)
    true_g = blocks.attend_backward(grad, **x, **true._asdict(), **options, needs=NEEDS)
    for name, n in zip(NEEDS, (n_q, n_k, n_k), strict=True):
        np.testing.assert_array_equal(getattr(g, name)[:n], getattr(true_g, name))
        assert (getattr(g, name)[n:] == 0).all()


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32], ids=str)
def test_results_are_rounded_once(dtype, rng):
    """Sums of 16-bit types are float32, so that one block and many differ in the last bit only."""
    x = tensors(rng, dtype)
    expected = sdpa.attention_forward(*whole(x))
    if dtype != BFLOAT16:  # which some kernels multiply without widening
        assert_same_bits(blocks.attend(**x).out, expected.out)
    got = blocks.attend(**x, block=2)
    assert got.out.dtype == dtype
    ulp = 1e-6 if dtype == np.float32 else 2**-7
    np.testing.assert_allclose(
        got.out.astype(float), expected.out.astype(float), rtol=ulp, atol=ulp
    )
    grads = np.ones_like(got.out)
    true = sdpa.attention_backward(grads, *whole(x), *expected)
    ours = blocks.attend_backward(grads, **x, out=expected.out, lse=expected.lse, block=2)
    for name in NEEDS:
        a, b = getattr(ours, name), getattr(true, name)
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a.astype(float), b.astype(float), rtol=4 * ulp, atol=4 * ulp)


@pytest.mark.parametrize("power", [20, 24, 30])
def test_weights_of_blocks_whose_lse_is_large(power):
    """Exact scores, of which three in one block and one in the next are the largest."""
    query = np.full((4, 1), 2.0**power, np.float32)
    keys = np.array([1, 1, 1, 0, 0, 1, 0, 0], np.float32)[:, None]
    values = np.arange(8, dtype=np.float32)[:, None]
    got = blocks.attend(query, keys, values, block=4, scale=1.0)
    np.testing.assert_allclose(got.out, (0 + 1 + 2 + 5) / 4, rtol=1e-6)


def test_lse_is_rounded_once():
    x = np.zeros((1, 4), np.float32), *np.zeros((2, 3000, 4), np.float32)
    assert blocks.attend(*x, block=5).lse == np.float32(np.log(3000))


def test_float32_queries_over_16_bit_keys(rng):
    x = tensors(rng, np.float32)
    x |= {name: x[name].astype(np.float16) for name in ("keys", "values")}
    got = blocks.attend(**x, block=11)
    assert got.out.dtype == np.float32
    np.testing.assert_allclose(got.out, sdpa.attention(*whole(x)), rtol=0, atol=1e-6)


def test_equal_blocks_give_equal_bits(rng):
    """From a store or memory, all queries of a block or others, any number of threads."""
    x = tensors(rng, np.float32, lead=(3,))
    x = {name: np.repeat(a, 40, axis=-2) for name, a in x.items()}
    stores = {name: Store(a) for name, a in x.items()}
    options = {"is_causal": True, "block": 300, "rows": slice(200, 456)}
    first = blocks.attend(**x, **options)
    for workers in (1, 2):
        again = blocks.attend(**stores, workers=workers, **options)
        assert_same_bits(first.out, again.out)
        assert_same_bits(first.lse, again.lse)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_gradients_of_narrower_options_are_rounded_once(rng, dtype):
    x = tensors(rng)
    options = {"scale": np.full(4, 0.25, dtype), "attn_mask": BIAS[..., :1].astype(dtype)}
    saved = sdpa.attention_forward(*whole(x), **options)
    given = {"grad_lse": np.ones_like(saved.lse), "needs": ("scale", "attn_mask")}
    found = blocks.attend_backward(saved.out, **x, **saved._asdict(), **given, **options, block=1)
    wide = {name: a.astype(np.float64) for name, a in options.items()}
    true = sdpa.attention_backward(saved.out, *whole(x), *saved, **given, **wide)
    for name in given["needs"]:
        ours, exact = getattr(found, name), getattr(true, name)
        assert ours.dtype == dtype
        np.testing.assert_allclose(ours, exact, rtol=0.51 * np.finfo(dtype).eps, atol=0)


def test_gradients_of_score_args(rng):
    """Sums of blocks are float64, in a fixed order, and rounded once to the argument's type."""
    x = {name: np.repeat(a, 3, axis=-2) for name, a in tensors(rng, np.float32).items()}
    table = rng.standard_normal(500)

    def gradient(dtype, **options):
        options |= {
            "score_mod": lambda s, b, h, q, k, t, n: s + t[q - k + 250] * n[h],
            "score_args": (table.astype(dtype), np.arange(4)),
        }
        saved = blocks.attend(**x, block=50, **options)
        found = blocks.attend_backward(
            x["query"][..., :1] * np.ones(saved.out.shape[-1:], np.float32), **x, out=saved.out,
            lse=saved.lse, block=50, needs=["score_args"], **options,
        )  # fmt: skip
        assert found.query is None
        assert found.score_args[1] is None
        return found.score_args[0]

    exact = gradient(np.float64)
    for dtype in (np.float16, BFLOAT16, np.float32):
        ours = gradient(dtype)
        assert ours.dtype == dtype
        for workers in (1, 2):
            assert_same_bits(gradient(dtype, workers=workers), ours)
        np.testing.assert_allclose(
            ours.astype(float), exact, rtol=0, atol=abs(exact).max() * 4 * np.finfo(np.float16).eps
            if dtype != BFLOAT16 else abs(exact).max() / 32,
        )  # fmt: skip


def test_functions_are_traced_once(rng, monkeypatch):
    """However many blocks there are, and whatever the function captures."""
    calls = []
    made = _program.traced

    def traced(*args, **options):
        calls.append(args)
        return made(*args, **options)

    monkeypatch.setattr(_program, "traced", traced)
    settings = SimpleNamespace(slope=0.5)
    x = tensors(rng, np.float64)
    found = []
    for n in (4, 100):
        calls.clear()
        blocks.attend(**x, block=n, score_mod=lambda s, b, h, q, k: s - abs(q - k) * settings.slope)
        found.append(len(calls))
    assert found[0] == found[1]


def test_functions_that_fail(rng):
    x = tensors(rng, np.float64)
    score = {"score_mod": lambda s, b, h, q, k, t: s + t[k], "score_args": (np.zeros(30),)}
    with pytest.raises(IndexError, match=r"got 30 at b = 0, h = 0, q = \d+, k = 30; mask such"):
        blocks.attend(**x, block=16, **score)
    with pytest.raises(ValueError, match="score_args: expected None without score_mod"):
        blocks.attend(**x, score_args=(np.zeros(3),))
    saved = blocks.attend(**x, score_mod=lambda s, b, h, q, k: s)
    with pytest.raises(ValueError, match="needs: 'score_args' have gradients only where they are"):
        blocks.attend_backward(
            saved.out, **x, out=saved.out, lse=saved.lse, needs=["score_args"],
            score_mod=lambda s, b, h, q, k: s,
        )  # fmt: skip


# ------------------------------------------------------------------------------------ reading


HIDDEN = {
    "causal": ({"is_causal": True}, slice(0, 37), [(0, 10), (10, 20), (20, 30), (30, 40)]),
    "causal, first": ({"is_causal": True}, slice(0, 10), [(0, 10)]),
    "causal, offset": ({"is_causal": True, "query_offset": -5}, slice(0, 10), [(0, 10)]),
    "causal, hidden": ({"is_causal": True, "query_offset": -10}, slice(0, 10), []),
    "lower right": ({"is_causal": "lower_right"}, slice(0, 3), [(0, 10), (10, 20)]),
    "window": ({"window": (2, 2)}, slice(12, 18), [(10, 20)]),
    "window, edge": ({"window": (2, 2)}, slice(12, 19), [(10, 20), (20, 30)]),
    "lengths": ({"key_lengths": [4, 20]}, slice(0, 37), [(0, 10), (10, 20)]),
    "apart": (
        {"window": (1, 1), "query_offset": [0, 45]},
        slice(0, 3),
        [(0, 10), (40, 50)],
    ),
    "window, apart": (
        {"window": (0, 0), "query_offset": [20, 45]},
        slice(0, 1),
        [(20, 30), (40, 50)],
    ),
    "no queries": ({}, slice(5, 5), []),
    "everything": ({}, slice(0, 1), [(i, min(i + 10, 53)) for i in range(0, 53, 10)]),
}


@pytest.mark.parametrize("case", HIDDEN)
def test_hidden_blocks_are_never_read(case, rng):
    options, rows, expected = HIDDEN[case]
    x = tensors(rng)
    stores = {name: Store(a) for name, a in x.items()}
    got = blocks.attend(**stores, block=10, rows=rows, **options)
    assert stores["keys"].rows() == stores["values"].rows() == expected
    assert stores["query"].rows() == ([(rows.start, rows.stop)] if rows.stop > rows.start else [])
    np.testing.assert_allclose(
        got.out, sdpa.attention(*whole(x), **options)[..., rows, :], rtol=0, atol=1e-12
    )


def test_hidden_queries_are_never_read(rng):
    x = tensors(rng)
    saved = sdpa.attention_forward(*whole(x), is_causal=True)
    stores = {name: Store(a) for name, a in x.items()}
    given = {"grad_out": Store(saved.out), "out": Store(saved.out), "lse": Store(saved.lse)}
    blocks.attend_backward(
        **stores, **given, block=10, columns=slice(15, 25), is_causal=True, needs=("key",)
    )
    expected = [(10, 20), (20, 30), (30, 37)]
    assert stores["query"].rows() == expected
    assert given["grad_out"].rows() == given["out"].rows() == expected
    assert given["lse"].rows(axis=-1) == expected
    assert stores["keys"].rows() == stores["values"].rows() == [(15, 25)]


@pytest.mark.parametrize(("name", "array"), [("attn_mask", BIAS), ("where", SEEN)])
def test_masks_are_read_in_blocks(rng, name, array):
    x, mask = tensors(rng), Store(array)
    got = blocks.attend(**x, block=20, rows=slice(4, 8), **{name: mask})
    assert [(i[-2].start, i[-1].start, i[-1].stop) for i in mask.read] == [
        (4, 0, 0), (4, 0, 20), (4, 20, 40), (4, 40, 53),
    ]  # fmt: skip
    expected = sdpa.attention(*whole(x), **{name: array})[:, :, 4:8]
    np.testing.assert_allclose(got.out, expected, rtol=0, atol=1e-12)


def test_the_next_block_is_read_while_one_is_computed(rng, monkeypatch):
    """Attention to a block overlaps with reading the next one: each waits for the other's start."""
    x = tensors(rng)
    reading = [threading.Event() for _ in range(6)]
    computing = [threading.Event() for _ in range(6)]

    class Waiting(Store):
        def __getitem__(self, index):
            n = index[-2].start // 10
            if index[-2].stop:
                reading[n].set()
                assert n == 0 or computing[n - 1].wait(30), "block was not computed meanwhile"
            return super().__getitem__(index)

    forward, count = _core.attention_forward, iter(range(-1, 6))

    def computed(*args, **kwargs):
        n = next(count)
        if n >= 0:
            assert n == 5 or reading[n + 1].wait(30), "the next block was not being read"
            computing[n].set()
        return forward(*args, **kwargs)

    monkeypatch.setattr(_core, "attention_forward", computed)
    keys = Waiting(x["keys"])
    blocks.attend(x["query"], keys, x["values"], block=10)
    assert len(keys.rows()) == 6
    assert threading.get_ident() not in keys.threads - {threading.get_ident()}
    assert len(keys.threads) == 2  # the empty block is read by the caller


def test_blocks_are_read_in_the_context_of_the_call(rng):
    factor = contextvars.ContextVar("factor", default=1.0)

    class Scaled(Store):
        def __getitem__(self, index):
            return super().__getitem__(index) * factor.get()

    def attend():
        factor.set(2.0)
        return blocks.attend(x["query"], Scaled(x["keys"]), x["values"], block=10).out

    x = tensors(rng)
    got = contextvars.copy_context().run(attend)
    expected = blocks.attend(x["query"], x["keys"] * 2, x["values"], block=10).out
    assert_same_bits(got, expected)


def test_errors_of_numpy_in_a_store_are_treated_as_the_caller_says(rng):
    class Logarithms(Store):
        def __getitem__(self, index):
            return np.log(super().__getitem__(index))

    x = tensors(rng)
    keys = np.abs(x["keys"])
    keys[:, :, 20:] *= -1  # behind the first block
    with np.errstate(invalid="raise"), pytest.raises(FloatingPointError):
        blocks.attend(x["query"], Logarithms(keys), x["values"], block=10)


@pytest.mark.parametrize("needs", [None, ("query",), ("key", "value")], ids=str)
def test_no_list_of_blocks_is_made_before_the_first_is_read(rng, monkeypatch, needs):
    """With blocks of one position, a store of any length answers at once."""
    x = tensors(rng)
    found = sdpa.attention_forward(*whole(x))
    looked, before, sees = [], [], ScoreMatrix.sees

    class Counting(Store):
        def __getitem__(self, index):
            if index[-2].start == 0 and index[-2].stop == 1:
                before.append(len(looked))
            return super().__getitem__(index)

    def counted(self, *parts):
        looked.append(parts)
        return sees(self, *parts)

    monkeypatch.setattr(ScoreMatrix, "sees", counted)
    stores = {name: Counting(a) for name, a in x.items()}
    if needs is None:
        blocks.attend(**stores, block=1, rows=slice(3, 7))
    else:
        part = {"rows" if "query" in needs else "columns": slice(3, 7)}
        blocks.attend_backward(Counting(found.out), **stores, out=found.out, lse=found.lse,
                               block=1, needs=needs, **part)  # fmt: skip
    assert before
    assert max(before) <= 2


def test_files(rng, tmp_path):
    h5py = pytest.importorskip("h5py", reason="needs h5py: pip install '.[peers]'")
    zarr = pytest.importorskip("zarr", reason="needs zarr: pip install '.[dask]'")
    x = tensors(rng, np.float32)
    expected = blocks.attend(**x, block=16, is_causal=True)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        group = zarr.open_group(tmp_path / "x.zarr")
        for name, a in x.items():
            file[name] = a
            group.create_array(name, data=a, chunks=(1, 2, 16, a.shape[-1]))
            np.save(tmp_path / f"{name}.npy", a)
        mapped = {name: np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in x}
        for source in (file, group, mapped):
            got = blocks.attend(*(source[name] for name in x), block=16, is_causal=True)
            assert_same_bits(got.out, expected.out)
            assert_same_bits(got.lse, expected.lse)


# ------------------------------------------------------------------------------------ progress


def test_progress(rng, capsys):
    x = tensors(rng)
    blocks.attend(**x, block=10, is_causal=True, progress=True)
    assert "4/4" in capsys.readouterr().err
    blocks.attend(**x, block=10, is_causal=True)
    assert capsys.readouterr().err == ""
