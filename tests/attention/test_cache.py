"""KVCache: any sequence of appends and reorders against lists of arrays."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.calls import message
from support.helpers import AttentionBounds, assert_same_bits, assert_within, normal
from support.machine import DTYPES

import sdpa
from sdpa import reference

BATCH, HEADS, D_K, D_V = 3, 2, 5, 3


class Lists:
    """A model of the cache: every position appended to each sequence, in lists."""

    def __init__(self, dtype):
        self.dtype = dtype
        self.key = [np.zeros((HEADS, 0, D_K), dtype) for _ in range(BATCH)]
        self.value = [np.zeros((HEADS, 0, D_V), dtype) for _ in range(BATCH)]
        self.counts = np.zeros(BATCH, int)

    def append(self, key, value, counts):
        for rows, new in ((self.key, key), (self.value, value)):
            for b, count in enumerate(counts):
                rows[b] = np.concatenate([rows[b], new[b, :, :count].astype(self.dtype)], axis=1)
        self.counts = np.array(counts)

    def reorder(self, index):
        self.key = [self.key[b] for b in index]
        self.value = [self.value[b] for b in index]
        self.counts = self.counts[index]

    @property
    def lengths(self):
        return np.array([x.shape[1] for x in self.key])


def attend(cache, query):
    return sdpa.attention(
        query,
        cache.key,
        cache.value,
        is_causal=True,
        key_lengths=cache.lengths,
        query_offset=cache.query_offset,
        window=cache.window,
    )


def check_positions(cache, lists):
    """The cache holds the model's last positions, at most `capacity` of them."""
    held = cache.lengths
    assert (cache.positions == lists.lengths).all()
    assert (cache.query_offset == held - lists.counts).all()
    assert cache.key.shape == (BATCH, HEADS, held.max(), D_K)
    assert cache.value.shape == (BATCH, HEADS, held.max(), D_V)
    assert held.max() <= cache.capacity
    left = cache.window[0] if cache.window else None
    for b in range(BATCH):
        least = lists.lengths[b] if left is None else min(lists.lengths[b], left + lists.counts[b])
        assert least <= held[b] <= lists.lengths[b]
        for x, all_ in ((cache.key, lists.key), (cache.value, lists.value)):
            assert_same_bits(x[b, :, : held[b]], all_[b][:, lists.lengths[b] - held[b] :])


def check_attention(cache, lists, rng):
    """Attention of the positions appended last is that over all there ever were, padding apart."""
    held = cache.lengths
    query = normal(rng, (BATCH, HEADS, max(lists.counts), D_K), lists.dtype)
    out = attend(cache, query)
    padding = (np.arange(held.max()) >= held[:, None])[:, None, :, None]
    apart = [np.where(padding, lists.dtype.type(np.nan), x) for x in (cache.key, cache.value)]
    options = {"is_causal": True, "window": cache.window}
    lengths = {"key_lengths": held, "query_offset": cache.query_offset}
    assert_same_bits(out, sdpa.attention(query, *apart, **options, **lengths))
    for b, n in enumerate(lists.counts):
        options["query_offset"] = int(lists.lengths[b] - n)
        operands = (query[b, :, :n], lists.key[b], lists.value[b])
        expected = reference.attention(*operands, **options)
        assert_within(out[b, :, :n], expected, AttentionBounds(*operands, **options).out)


SIZES = st.integers(0, 7)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), SIZES, st.none()),
        st.tuples(st.just("append"), SIZES, st.lists(SIZES, min_size=BATCH, max_size=BATCH)),
        st.tuples(
            st.just("reorder"),
            st.lists(st.integers(0, BATCH - 1), min_size=BATCH, max_size=BATCH),
            st.none(),
        ),
    ),
    max_size=12,
)
WINDOWS = st.one_of(
    st.none(),
    st.tuples(st.one_of(st.none(), st.integers(0, 9)), st.one_of(st.none(), st.integers(0, 3))),
)


@given(STEPS, WINDOWS, st.integers(1, 20), st.sampled_from(sorted(DTYPES)), st.integers(0, 2**32))
def test_any_sequence_of_calls(steps, window, capacity, name, seed):
    """Calls that do not fit are refused and change nothing; others agree with the lists."""
    left = window[0] if window else None
    capacity = max(capacity, 1 + (left or 0))
    rng, lists = np.random.default_rng(seed), Lists(np.dtype(DTYPES[name]))
    cache = sdpa.KVCache(
        BATCH, HEADS, D_K, D_V, capacity=capacity, dtype=lists.dtype, window=window
    )
    for step, what, lengths in steps:
        if step == "reorder":
            cache.reorder(what)
            lists.reorder(what)
        else:
            key, value = (normal(rng, (BATCH, HEADS, what, d), np.float32) for d in (D_K, D_V))
            counts = [min(what, n) for n in lengths or [what] * BATCH]
            given = {} if lengths is None else {"lengths": counts}
            kept = lists.lengths if left is None else np.minimum(lists.lengths, left)
            if (kept + counts > capacity).any():
                with pytest.raises(ValueError, match="key: expected at most"):
                    cache.append(key, value, **given)
            else:
                cache.append(key, value, **given)
                lists.append(key, value, counts)
        check_positions(cache, lists)
    check_attention(cache, lists, rng)


def test_a_window_drops_only_when_full(rng):
    """The move costs a copy of the window, so it comes once in capacity - left tokens."""
    cache = sdpa.KVCache(1, 1, 2, capacity=10, window=(4, 0))
    lengths = []
    for _ in range(20):
        cache.append(np.ones((1, 1, 1, 2)), np.ones((1, 1, 1, 2)))
        lengths.append(int(cache.lengths[0]))
    assert lengths == [*range(1, 11), *range(5, 11), *range(5, 9)]
    assert cache.positions == 20


def test_views_share_the_memory_that_was_allocated_once(rng):
    cache = sdpa.KVCache(2, 3, 4, capacity=8, window=(2, 0))
    token = np.ones((2, 3, 1, 4))
    cache.append(token, token)
    key, value = cache.key, cache.value
    for i in range(20):
        cache.append(token * i, -token * i)
        cache.reorder([1, 0])
        assert np.shares_memory(cache.key, key)
        assert np.shares_memory(cache.value, value)
    assert cache.key.strides == key.strides


def test_no_room():
    cache = sdpa.KVCache(2, 1, 1, capacity=4, window=(2, 0))
    cache.append(np.ones((2, 1, 3, 1)), np.ones((2, 1, 3, 1)), lengths=[3, 1])
    text = "key: expected at most 2 new positions of sequence 0, which keeps 2 of capacity=4, got 3"
    more = np.zeros((2, 1, 3, 1))
    assert message(ValueError, cache.append, more, more) == text
    assert (cache.lengths == [3, 1]).all()
    assert (cache.query_offset == 0).all()
    assert (cache.key[0] == 1).all()


def test_its_own_positions_may_be_appended(rng):
    """Also while a full cache moves them."""
    x = normal(rng, (2, 1, 4, 3), np.float32)
    cache = sdpa.KVCache(2, 1, 3, capacity=4, window=(2, 0))
    cache.append(x, -x)
    cache.append(cache.key[:, :, 1:3], cache.value[:, :, 1:3])
    order = [2, 3, 1, 2]
    assert_same_bits(cache.key, x[:, :, order])
    assert_same_bits(cache.value, -x[:, :, order])


def test_values_beyond_float16_round_to_inf():
    cache = sdpa.KVCache(1, 1, 1, capacity=1, dtype=np.float16)
    cache.append(np.full((1, 1, 1, 1), 1e6), np.full((1, 1, 1, 1), -1e6))
    assert (cache.key[0], cache.value[0]) == (np.inf, -np.inf)


@pytest.mark.parametrize("batch", [0, 1])
def test_empty(batch):
    cache = sdpa.KVCache(batch, 0, 0, capacity=3)
    assert cache.key.shape == cache.value.shape == (batch, 0, 0, 0)
    cache.append(np.ones((batch, 0, 2, 0)), np.ones((batch, 0, 2, 0)))
    cache.reorder(np.zeros(batch, int))
    assert (cache.lengths == [2] * batch).all()


def test_what_is_returned_does_not_change_the_cache():
    cache = sdpa.KVCache(1, 1, 1, capacity=4)
    cache.append(np.ones((1, 1, 2, 1)), np.ones((1, 1, 2, 1)))
    for x in (cache.lengths, cache.positions, cache.query_offset):
        x += 1
    assert (cache.lengths, cache.positions, cache.query_offset) == (2, 2, 0)


COPIES = {
    "copy()": lambda cache: cache.copy(),
    "copy.copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("window", [None, (3, 0)])
def test_a_copy_and_its_original_go_on_independently(how, window, dtype, rng):
    """Both get other positions, until the window moves those held, and each agrees with lists."""
    caches = [sdpa.KVCache(BATCH, HEADS, D_K, D_V, capacity=9, dtype=dtype, window=window)]
    lists = [Lists(np.dtype(dtype))]

    def append(which, counts):
        key, value = (normal(rng, (BATCH, HEADS, 3, d), np.float32) for d in (D_K, D_V))
        caches[which].append(key, value, lengths=counts)
        lists[which].append(key, value, counts)

    append(0, [3, 1, 2])
    caches.append(COPIES[how](caches[0]))
    lists.append(copy.deepcopy(lists[0]))
    for which, counts in ((1, [3, 3, 0]), (0, [1, 2, 3]), (1, [1, 3, 2]), (0, [3, 3, 1])):
        append(which, counts)
        caches[which].reorder([2, 2, 0])
        lists[which].reorder([2, 2, 0])
        for cache, held in zip(caches, lists, strict=True):
            check_positions(cache, held)
            check_attention(cache, held, rng)
    assert caches[1].capacity == 9
    assert caches[1].window == window
    assert caches[1].key.dtype == dtype
    assert not np.shares_memory(caches[0].key, caches[1].key)
    assert not np.shares_memory(caches[0].value, caches[1].value)


class Named(sdpa.KVCache):
    name = None


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_a_subclass(how):
    cache = Named(1, 1, 1, capacity=2)
    cache.name = "first layer"
    twin = COPIES[how](cache)
    assert type(twin) is Named
    assert twin.name == "first layer"


def test_a_copy_takes_memory_for_the_positions_held_alone():
    cache = sdpa.KVCache(1, 1, 1, capacity=10**6)
    cache.append(np.ones((1, 1, 2, 1)), np.ones((1, 1, 2, 1)))
    assert len(pickle.dumps(cache)) < 2000
