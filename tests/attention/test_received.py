"""The weights that keys receive, and the weights of chosen heads and queries."""

import itertools

import numpy as np
import pytest
from support.helpers import (
    AttentionBounds,
    assert_same_bits,
    assert_within,
    check_attention,
    compute_type,
    normal,
)
from support.machine import LINUX
from support.process import run

import sdpa
from sdpa import reference
from sdpa.reference.packed import sequence_arguments

OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True, "query_offset": -2},
    "window": {"window": (9, 3)},
    "dropout": {"dropout_p": 0.3, "rng": 5},
    "others": {"softcap": 2.0, "is_causal": "lower_right", "scale": -0.5},
}


def operands(rng, dtype, n_q=100, n_k=150, d=12):
    """Six query heads to two key heads."""
    return normal(rng, (2, 6, n_q, d), dtype), normal(rng, (2, 2, n_k, d), dtype)


@pytest.mark.parametrize("name", OPTIONS)
def test_against_the_oracle(rng, isa, dtype, name):
    for n_q, n_k, d in ((1, 1, 1), (5, 40, 8), (97, 130, 17), (200, 31, 3)):
        q, k = operands(rng, dtype, n_q, n_k, d)
        options = OPTIONS[name] | {
            "sinks": normal(rng, 6, dtype),
            "key_lengths": np.array([n_k // 2, n_k]),
            "attn_mask": rng.random((n_q, n_k)) < 0.8,
        }
        check_attention(q, k, k[..., :1], enable_gqa=True, **options)


@pytest.mark.parametrize("name", OPTIONS)
def test_bits_do_not_depend_on_workers_or_other_heads(rng, isa, dtype, name):
    q, k = operands(rng, dtype)
    options = {"enable_gqa": True} | OPTIONS[name]
    one = sdpa.attention_received(q, k, workers=1, **options)
    for workers in (2, 3, 5):
        again = sdpa.attention_received(q, k, workers=workers, **options)
        for a, b in zip(one, again, strict=True):
            assert_same_bits(a, b)
    some = sdpa.attention_received(q, k, heads=[4, 1], **options)
    for a, b in zip(one, some, strict=True):
        assert_same_bits(np.ascontiguousarray(a[:, [4, 1]]), b)


@pytest.mark.parametrize("name", OPTIONS)
def test_chosen_weights_are_those_of_the_whole(rng, isa, compute_dtype, name):
    """For any choice, each query keeps its place for masks, bias and dropout."""
    q, k = operands(rng, compute_dtype)
    bias = normal(rng, (6, 100, 150), compute_dtype)
    bias[rng.random(bias.shape) < 0.2] = -np.inf
    options = {"enable_gqa": True, "attn_mask": bias, "alibi_slopes": np.ones(6)} | OPTIONS[name]
    queries = (slice(30, 35), slice(None, None, -7), [99, -100, 3, 4, 5, 3], slice(0, 0))
    heads = (None, slice(1, None, 2), [5], [-1, 0, 0])
    for stage in ("scores", "capped", "biased", "weights"):
        whole = sdpa.attention_weights(q, k, stage=stage, **options)
        bound = AttentionBounds(q, k, k, **options).stages[stage]
        for rows, h in itertools.product(queries, heads):
            got = sdpa.attention_weights(q, k, stage=stage, heads=h, queries=rows, **options)
            pick = (slice(None), slice(None) if h is None else h)
            expected = whole[pick][:, :, rows].astype(np.float64)
            assert got.dtype == whole.dtype
            assert_within(got, expected, 2 * bound[pick][:, :, rows], stage)


def test_a_query_chosen_twice_counts_twice(rng, compute_dtype):
    q, k = operands(rng, compute_dtype)
    once, twice = (sdpa.attention_received(q, k, enable_gqa=True, queries=x) for x in ([7], [7, 7]))
    assert_same_bits(twice.total, 2 * once.total)
    assert_same_bits(twice.largest, once.largest)


def test_nothing_chosen(rng, dtype):
    q, k = operands(rng, dtype)
    for choice in ({"queries": slice(0, 0)}, {"queries": np.zeros(0, int)}):
        for x in sdpa.attention_received(q, k, enable_gqa=True, **choice):
            assert x.shape == (2, 6, 150)
            assert (x == 0).all()
    none = sdpa.attention_received(q, k, enable_gqa=True, heads=slice(0, 0))
    assert none.total.shape == none.largest.shape == (2, 0, 150)
    assert sdpa.attention_received(q, k[:, :, :0], enable_gqa=True).total.shape == (2, 6, 0)


def test_nan_reaches_those_who_see_it(rng, isa, compute_dtype):
    """A query of NaN spoils the keys that it sees; a key of NaN all keys that are seen with it."""
    q, k = normal(rng, (1, 70, 8), compute_dtype), normal(rng, (1, 70, 8), compute_dtype)
    clean = sdpa.attention_received(q, k, is_causal=True)
    broken = q.copy()
    broken[:, 40] = np.nan
    for x, y in zip(sdpa.attention_received(broken, k, is_causal=True), clean, strict=True):
        assert np.isnan(x[:, :41]).all()
        assert_same_bits(x[:, 41:].copy(), y[:, 41:].copy())
    broken = k.copy()
    broken[:, 60:] = np.nan
    for x, y in zip(
        sdpa.attention_received(q, broken, key_lengths=60),
        sdpa.attention_received(q, k, key_lengths=60),
        strict=True,
    ):
        assert_same_bits(x, y)
        assert (x[:, 60:] == 0).all()


N_K = 65536


@pytest.mark.parametrize("n", [1, 2, 7, 40, 200])
@pytest.mark.parametrize("sink", [0.0, 1e6])
@pytest.mark.parametrize("operand", ["query", "key"])
@pytest.mark.parametrize("at", [0, -1])
def test_nan_is_felt_beside_a_sink(rng, isa, compute_dtype, n, sink, operand, at):
    """Where one of two logits, the sink's and a key's that is NaN, outweighs the other."""
    x = {name: normal(rng, (1, n, 4), compute_dtype) for name in ("query", "key")}
    x[operand][0, at] = np.nan
    hide = {"mask_mod": lambda b, h, q, k: q >= k}
    for mask in ({}, {"is_causal": "lower_right"}, hide):
        options = {"sinks": np.full(1, sink, compute_dtype), **mask}
        expected = np.isnan(reference.attention_weights(**x, **options)).any(axis=-2)
        for found in sdpa.attention_received(**x, **options):
            np.testing.assert_array_equal(np.isnan(found), expected)


def test_at_65536_keys(rng, isa, compute_dtype):
    """Against the oracle, a block of queries at a time; grouped heads, the last queries chosen."""
    n_q, block, group = 40, 5, {"enable_gqa": True, "scale": 1.0}
    q, k = normal(rng, (4, n_q, 16), compute_dtype), normal(rng, (2, N_K, 16), compute_dtype)
    got = sdpa.attention_received(
        q, k, is_causal="lower_right", heads=[2], queries=slice(10, 30), **group
    )
    total, largest, e_total, e_largest = 0, 0, 0, 0
    for i in range(10, 30, block):
        x = q[2:3, i : i + block], k[1:2]
        here = {"is_causal": True, "query_offset": N_K - n_q + i, "scale": 1.0}
        here["sinks"] = None
        true = reference.attention_received(*x, **here)
        bound = AttentionBounds(*x, np.zeros((1, N_K, 0), compute_dtype), **here).received
        total, largest = total + true.total, np.maximum(largest, true.largest)
        e_total = e_total + bound[0].sum(axis=-2)
        e_largest = np.maximum(e_largest, bound[1].max(axis=-2))
    assert got.total.dtype == compute_type(compute_dtype)
    assert_within(got.total, total, e_total, "total")
    assert_within(got.largest, largest, e_largest, "largest")


@pytest.mark.slow
@LINUX
@pytest.mark.uninstrumented
def test_memory_at_65536_keys():
    """Chosen heads and rows take a few blocks, and three numbers per query, beyond the result."""
    run(
        f"""
n, d, block = {N_K}, 16, 16e6
q, k = (rng.standard_normal((heads, n, d), np.float32) for heads in (9, 3))

def received(m):
    return sdpa.attention_received(q[:, :m], k, enable_gqa=True, heads=[0, 8], is_causal=True)

def weights(m):
    rows = [-1, (m or n) // 2, 0]
    return sdpa.attention_weights(
        q[:, :m], k, enable_gqa=True, heads=[7], queries=rows, is_causal=True
    )

assert peak(received) < block + 2 * 3 * 4 * n
assert peak(weights) < block
""",
        timeout=600,
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_packed_with_chosen_heads_and_queries(rng, isa, dtype, name):
    """The bits of a call per sequence; queries are rows of the packed query, in any order."""
    cu_q, cu_k = np.array([0, 60, 60, 160, 170]), np.array([0, 30, 40, 170, 170])
    q, k = normal(rng, (170, 6, 12), dtype), normal(rng, (170, 2, 12), dtype)
    options = {"enable_gqa": True, "heads": [4, 1]} | OPTIONS[name]
    rows = rng.permutation(170)[:80]
    packed = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    found = sdpa.attention_received(q, k, queries=rows, **packed, **options)
    for s, (first, last) in enumerate(itertools.pairwise(cu_q)):
        own = sequence_arguments(s, **packed, query=q, key=k, **options)
        own["queries"] = rows[(first <= rows) & (rows < last)] - first
        if "dropout_p" in own:  # its pattern counts sequences
            for x in ("query", "key"):
                own[x] = np.broadcast_to(own[x], (s + 1, *own[x].shape))
        alone = sdpa.attention_received(**own)
        for a, b in zip(found, alone, strict=True):
            b = b[s] if "dropout_p" in own else b
            np.testing.assert_array_equal(a[:, cu_k[s] : cu_k[s + 1]], b)


def test_more_heads_than_are_in_flight(rng):
    """The last heads are fewer than those before them."""
    q, k = normal(rng, (100, 5, 4), np.float32), normal(rng, (100, 7, 4), np.float32)
    every = sdpa.attention_received(q, k)
    for head in 0, 63, 64, 99:
        one = sdpa.attention_received(q[head], k[head])
        assert_same_bits(every.total[head], one.total)


def test_more_queries_than_have_room(rng):
    """The sums of a single head are more than those that several heads may have together."""
    q, k = normal(rng, (2**18 + 1, 2), np.float32), normal(rng, (3, 2), np.float32)
    total, largest = sdpa.attention_received(q, k)
    weights = sdpa.attention_weights(q, k)
    np.testing.assert_allclose(total, weights.sum(0, dtype=np.float64), rtol=1e-6)
    np.testing.assert_allclose(largest, weights.max(0), rtol=1e-6)


@pytest.mark.parametrize("queries", [None, [1, 0]])
def test_packed_without_memory(queries):
    x, cu = np.ones((4, 1, 2), np.float32), [0, 2, 4]

    def received():
        return sdpa.attention_received(x, x, cu_seqlens_q=cu, cu_seqlens_k=cu, queries=queries)

    for n in range(10):
        sdpa._core._alloc_fail_after(n)
        try:
            with pytest.raises(MemoryError):
                received()
        except pytest.fail.Exception:
            break
        finally:
            sdpa._core._alloc_fail_after(-1)
    assert 0 < n < 9
    assert received().total.shape == (1, 4)


def test_queries_of_many_packed_sequences_take_linear_time():
    """Each sequence looked at every chosen query: 40,000 sequences took 70 times as long."""
    n = 40_000
    x = np.ones((n, 1, 4), np.float32)
    packed = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), np.arange(n + 1))
    chosen = np.random.default_rng(0).integers(0, n, 3 * n)
    got = sdpa.attention_received(x, x, **packed, queries=chosen)
    np.testing.assert_array_equal(got.total[0], np.bincount(chosen, minlength=n))
