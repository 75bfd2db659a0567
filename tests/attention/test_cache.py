"""KVCache: any sequence of appends, reorders and truncations against lists of arrays."""

import copy
import itertools
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.calls import message
from support.helpers import (
    AttentionBounds,
    assert_same_bits,
    assert_within,
    normal,
    unit_roundoff,
)
from support.hostile import interrupted_after
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

    def truncate(self, lengths):
        self.counts = np.maximum(self.counts - (self.lengths - lengths), 0)
        self.key = [x[:, :n] for x, n in zip(self.key, lengths, strict=True)]
        self.value = [x[:, :n] for x, n in zip(self.value, lengths, strict=True)]

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
    """The cache holds the model's last positions, at most `capacity` of them.

    They include all that the queries of the last append see, or these are refused.
    """
    held = cache.lengths
    left = cache.window[0] if cache.window else None
    assert (cache.positions == lists.lengths).all()
    if has_what_is_seen(cache, lists):
        assert (cache.query_offset == held - lists.counts).all()
    else:
        with pytest.raises(ValueError, match=r"^query_offset: expected at most"):
            _ = cache.query_offset
    assert cache.key.shape == (BATCH, HEADS, held.max(), D_K)
    assert cache.value.shape == (BATCH, HEADS, held.max(), D_V)
    assert held.max() <= cache.capacity
    for b in range(BATCH):
        least = lists.lengths[b] if left is None else min(lists.lengths[b], left)
        assert least <= held[b] <= lists.lengths[b]
        for x, all_ in ((cache.key, lists.key), (cache.value, lists.value)):
            assert_same_bits(x[b, :, : held[b]], all_[b][:, lists.lengths[b] - held[b] :])


def has_what_is_seen(cache, lists):
    """Whether all keys are held that the last append's queries see."""
    before = lists.lengths - lists.counts
    left = cache.window[0] if cache.window else None
    seen = before if left is None else np.minimum(before, left)
    return (cache.lengths >= seen + lists.counts).all()


def check_attention(cache, lists, rng):
    """Attention of the positions appended last is that over all there ever were, padding apart."""
    if not has_what_is_seen(cache, lists):
        return
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
        st.tuples(st.just("truncate"), st.lists(SIZES, min_size=BATCH, max_size=BATCH), st.none()),
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
        elif step == "truncate":
            truncate(cache, lists, what)
        else:
            key, value = (normal(rng, (BATCH, HEADS, what, d), np.float32) for d in (D_K, D_V))
            counts = [min(what, n) for n in lengths or [what] * BATCH]
            given = {} if lengths is None else {"lengths": counts}
            if left is None and (lists.lengths + counts > capacity).any():
                with pytest.raises(ValueError, match="key: expected at most"):
                    cache.append(key, value, **given)
            else:
                cache.append(key, value, **given)
                lists.append(key, value, counts)
        check_positions(cache, lists)
    check_attention(cache, lists, rng)


def truncate(cache, lists, removed):
    """Both take positions back, or the cache refuses, where the next query lacks keys."""
    held, left = cache.lengths, (cache.window or (None,))[0]
    dropped = lists.lengths - held
    after = held - removed
    if (after < np.where(dropped > 0, left or 0, 0)).any():
        with pytest.raises(ValueError, match=r"^lengths: expected integers from"):
            cache.truncate(after)
    else:
        cache.truncate(after)
        lists.truncate(lists.lengths - removed)


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


INTERRUPTED = {
    "append": lambda cache, token: cache.append(token, -token),
    "append of other lengths": lambda cache, token: cache.append(token, -token, lengths=[1, 0, 1]),
    "append of views": lambda cache, _: cache.append(cache.key[:, :, :2], cache.value[:, :, :2]),
    "append that drops": lambda cache, token: cache.append(
        np.tile(token, (1, 1, 6, 1)), np.tile(-token, (1, 1, 6, 1)), lengths=[6, 2, 5]
    ),
    "reorder": lambda cache, _: cache.reorder([2, 0, 0]),
    "truncate": lambda cache, _: cache.truncate([4, 3, 1]),
}


@pytest.mark.parametrize("call", INTERRUPTED)
@pytest.mark.parametrize("alike", [False, True])
def test_an_interrupt_finds_a_cache_as_before_or_after(call, alike):
    """On any line: keys beside the values of other positions would give wrong attention."""
    tokens = np.arange(1.0, 4).reshape(3, 1, 1, 1) + np.arange(6).reshape(1, 1, 6, 1) / 8

    def started():
        cache = sdpa.KVCache(3, 1, 1, capacity=8, dtype=np.float64, window=(3, 0))
        cache.append(tokens, -tokens, lengths=None if alike else [6, 5, 3])
        return cache

    def state(cache):
        pairs = zip(cache.key, cache.value, cache.lengths, strict=True)
        rows = [(k[0, :n].tolist(), v[0, :n].tolist()) for k, v, n in pairs]
        return rows, cache.positions.tolist(), cache._counts.tolist()

    before = state(started())
    after = started()
    INTERRUPTED[call](after, tokens[:, :, :1] * 16)
    after = state(after)
    for steps in itertools.count():
        cache = started()
        try:
            with interrupted_after(steps, sdpa._cache):
                INTERRUPTED[call](cache, tokens[:, :, :1] * 16)
        except KeyboardInterrupt:
            assert state(cache) in (before, after), steps
        else:
            break
    assert steps > 5
    assert state(cache) == after


def test_no_room():
    cache = sdpa.KVCache(2, 1, 1, capacity=4, window=(None, 0))
    cache.append(np.ones((2, 1, 3, 1)), np.ones((2, 1, 3, 1)), lengths=[3, 1])
    text = "key: expected at most 1 new positions of sequence 0, which keeps 3 of capacity=4, got 3"
    more = np.zeros((2, 1, 3, 1))
    assert message(ValueError, cache.append, more, more) == text
    assert (cache.lengths == [3, 1]).all()
    assert (cache.query_offset == 0).all()
    assert (cache.key[0] == 1).all()


PROMPTS = {"longer than the cache": (0, 9), "behind others": (3, 9), "beside the window": (4, 4)}


@pytest.mark.parametrize("case", PROMPTS)
def test_a_prompt_longer_than_a_window_cache(case, dtype, rng):
    """Attended before it is appended; rotated tokens behind it agree with the whole sequence."""
    seen, n = PROMPTS[case]
    cache = sdpa.KVCache(1, 2, 4, capacity=6, dtype=dtype, window=(3, 0))
    length, step = seen + n + 8, slice(seen, seen + n)
    query, key, value = normal(rng, (3, 1, 2, length, 4), dtype)
    at = np.arange(length)
    options = {"is_causal": True, "window": (3, 0)}

    def rotated(x, step, positions=at):
        return sdpa.rotary_embedding(x[:, :, step], positions[step])

    parts = []
    cache.append(rotated(key, slice(0, seen)), value[:, :, :seen])
    if seen:
        parts.append(attend(cache, rotated(query, slice(0, seen))))
    new = rotated(key, step), value[:, :, step]
    held = cache.key, cache.value
    both = [np.concatenate(pair, axis=2) for pair in zip(held, new, strict=True)]
    offset = cache.lengths
    parts.append(sdpa.attention(rotated(query, step), *both, **options, query_offset=offset))
    cache.append(*new)
    assert (cache.lengths, cache.positions) == (6, seen + n)
    text = message(ValueError, getattr, cache, "query_offset")
    before = min(seen, 3)
    assert text == (
        f"query_offset: expected at most {6 - before} positions in the last append to sequence 0, "
        f"beside {before} of capacity=6 that its queries see, got {n}; attend over the keys held "
        f"and the new ones before they are appended"
    )
    for i in range(seen + n, length):
        assert cache.positions == i
        turned = (sdpa.rotary_embedding(x[:, :, [i]], cache.positions) for x in (query, key))
        token, new_key = turned
        cache.append(new_key, value[:, :, [i]])
        parts.append(attend(cache, token))
    operands = rotated(query, slice(None)), rotated(key, slice(None)), value
    expected, bounds = (
        reference.attention(*operands, **options),
        AttentionBounds(*operands, **options),
    )
    assert_within(np.concatenate(parts, axis=2), expected, bounds.out)


@pytest.mark.parametrize("window", [None, (3, 0)])
def test_speculative_decoding(window, dtype, rng):
    """Drafts of four tokens, of which each sequence accepts some, and a token behind these."""
    cache = sdpa.KVCache(BATCH, HEADS, D_K, D_V, capacity=40 if window is None else 8, dtype=dtype,
                         window=window)  # fmt: skip
    lists = Lists(np.dtype(dtype))

    def append(n):
        key, value = (normal(rng, (BATCH, HEADS, n, d), dtype) for d in (D_K, D_V))
        cache.append(key, value)
        lists.append(key, value, [n] * BATCH)
        check_positions(cache, lists)
        check_attention(cache, lists, rng)

    append(2)
    for _ in range(6):
        append(4)
        rejected = rng.integers(0, 5, BATCH)
        cache.truncate(cache.lengths - rejected)
        lists.truncate(lists.lengths - rejected)
        check_positions(cache, lists)
        check_attention(cache, lists, rng)
        append(1)


def test_one_length_for_all():
    cache = sdpa.KVCache(2, 1, 1, capacity=9)
    cache.append(np.ones((2, 1, 5, 1)), np.ones((2, 1, 5, 1)))
    cache.truncate(3)
    assert cache.lengths.tolist() == cache.positions.tolist() == [3, 3]
    cache.truncate(0)
    assert cache.key.shape == (2, 1, 0, 1)
    cache.append(np.ones((2, 1, 9, 1)), np.ones((2, 1, 9, 1)))


def test_a_prefix_that_sequences_share(dtype, rng):
    """Held once, and merged with each sequence's own positions: attention over both."""
    prefix = [normal(rng, (1, HEADS, 6, d), dtype) for d in (D_K, D_V)]
    cache = sdpa.KVCache(BATCH, HEADS, D_K, D_V, capacity=7, dtype=dtype)
    lists = Lists(np.dtype(dtype))
    for counts in ([4, 2, 3], [1, 1, 1]):
        n = max(counts)
        query = normal(rng, (BATCH, HEADS, n, D_K), dtype)
        new = [normal(rng, (BATCH, HEADS, n, d), dtype) for d in (D_K, D_V)]
        cache.append(*new, lengths=counts)
        lists.append(*new, counts)
        options = {"key_lengths": cache.lengths, "query_offset": cache.query_offset}
        own = sdpa.attention_forward(query, cache.key, cache.value, is_causal=True, **options)
        shared = sdpa.attention_forward(query, *prefix)
        out, _ = sdpa.merge_attention(*zip(shared, own, strict=True))
        for b, count in enumerate(counts):
            parts = [(prefix[0][0], lists.key[b]), (prefix[1][0], lists.value[b])]
            key, value = (np.concatenate(pair, axis=1) for pair in parts)
            offset = key.shape[1] - count
            q, options = query[b, :, :count], {"is_causal": True, "query_offset": offset}
            whole = reference.attention_forward(q, key, value, **options)
            each = AttentionBounds(q, key, value, **options)
            # As for any merge: the weights of the parts carry the errors of both lse. The parts
            # themselves are rounded, and may be larger than their sum.
            most = abs(value).max().astype(np.float64)
            bound = 2 * each.out + (4 * each.lse[..., None] + unit_roundoff(dtype)) * most
            assert_within(out[b, :, :count], whole.out, bound)


def test_tokens_of_another_type_and_layout(rng):
    """The short way is for arrays as the cache holds them; others take the same values."""
    x = normal(rng, (2, 1, 3, 1, 4), np.float64)
    plain, other = (sdpa.KVCache(1, 3, 4, capacity=2) for _ in range(2))
    plain.append(*x.astype(np.float32))
    other.append(x[0].astype(">f4"), np.asfortranarray(x[1]))
    assert_same_bits(plain.key, other.key)
    assert_same_bits(plain.value, other.value)


@pytest.mark.parametrize("counts", [[2, 2], [2, 1]])
@pytest.mark.parametrize("capacity", [4, 9])
def test_its_own_keys_may_become_values(rng, counts, capacity):
    x = normal(rng, (2, 1, 4, 3), np.float32)
    cache = sdpa.KVCache(2, 1, 3, capacity=capacity, window=(2, 0))
    cache.append(x, -x, lengths=[4, 2 + counts[1]])
    cache.truncate(cache.lengths - 2)
    stale = cache._key[:, :, 2:4]  # where the next keys go
    expected = stale.copy(), cache.value[:, :, :2].copy()
    cache.append(cache.value[:, :, :2], stale)
    for b, length in enumerate(cache.lengths):
        assert_same_bits(cache.key[b, :, length - 2 : length], expected[1][b])
        assert_same_bits(cache.value[b, :, length - 2 : length], expected[0][b])


def test_its_own_positions_may_be_appended(rng):
    """Also while a full cache moves them."""
    x = normal(rng, (2, 1, 4, 3), np.float32)
    cache = sdpa.KVCache(2, 1, 3, capacity=4, window=(2, 0))
    cache.append(x, -x)
    cache.append(cache.key[:, :, 1:3], cache.value[:, :, 1:3])
    order = [2, 3, 1, 2]
    assert_same_bits(cache.key, x[:, :, order])
    assert_same_bits(cache.value, -x[:, :, order])


@pytest.mark.parametrize("sizes", [(2**40, 2**40, 8), (2**20, 2**20, 2**20), (0, 2**48, 2**48)])
def test_more_bytes_than_there_are_numbers_for(sizes):
    with pytest.raises(MemoryError, match="no memory for an array of shape"):
        sdpa.KVCache(*sizes, capacity=2**47)


def test_values_beyond_float16_round_to_inf():
    cache = sdpa.KVCache(1, 1, 1, capacity=1, dtype=np.float16)
    cache.append(np.full((1, 1, 1, 1), 1e6), np.full((1, 1, 1, 1), -1e6))
    assert (cache.key[0], cache.value[0]) == (np.inf, -np.inf)


NAMED = """
import sdpa
try:
    sdpa.KVCache(1, 1, 1, capacity=1, dtype="bfloat16")
except TypeError as error:
    print(error)
import ml_dtypes
print(sdpa.KVCache(1, 1, 1, capacity=1, dtype="bfloat16").key.dtype)
"""


def test_a_name_that_numpy_does_not_know_yet():
    done = subprocess.run([sys.executable, "-c", NAMED], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "dtype: expected float16, bfloat16, float32 or float64, got 'bfloat16'; write "
        "ml_dtypes.bfloat16",
        "bfloat16",
    ]


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
