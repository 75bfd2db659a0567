"""invariant=True: the bits of a query's results do not depend on the rest of the call."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bounds import AttentionBounds
from support.helpers import BFLOAT16, assert_same_bits, assert_within, compute_type, normal

import sdpa
from sdpa import reference

pytestmark = pytest.mark.usefixtures("isa")

# Few and many keys, either side of a vector of queries, a panel, a unit and a block of keys.
lengths = st.one_of(st.integers(1, 40), st.sampled_from([47, 48, 49, 95, 96, 97, 127, 128, 129]))
widths = st.sampled_from([1, 8, 20, 64, 65, 300])


@dataclass
class Call:
    """Operands (batch, heads, L, d), and options with the axes that they are cut along."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    grad_out: np.ndarray
    tangents: tuple
    mask: np.ndarray | None = None
    sinks: np.ndarray | None = None
    slopes: np.ndarray | None = None
    offset: int = 0
    options: dict = field(default_factory=dict)

    def part(self, batch, groups, queries, n_keys):
        """A call of some batch entries, key heads and queries, and of the first n_keys keys."""
        group = self.query.shape[1] // self.key.shape[1]
        heads = slice(groups.start * group, groups.stop * group)
        keys = slice(n_keys)
        q_t, k_t, v_t = self.tangents
        return Call(
            self.query[batch, heads, queries],
            self.key[batch, groups, keys],
            self.value[batch, groups, keys],
            self.grad_out[batch, heads, queries],
            (
                q_t[batch, heads, queries],
                k_t[batch, groups, keys],
                v_t[batch, groups, keys],
            ),
            None if self.mask is None else self.mask[batch, heads, queries, keys],
            None if self.sinks is None else self.sinks[heads],
            None if self.slopes is None else self.slopes[heads],
            self.offset + queries.start,
            self.options,
        )

    def results(self, **more):
        """Everything that belongs to one query, as arrays (batch, heads, Lq, ...)."""
        rows = self.query, self.key, self.value
        options = self.options | {"attn_mask": self.mask, "enable_gqa": True, "invariant": True}
        options |= {"sinks": self.sinks, "alibi_slopes": self.slopes, "query_offset": self.offset}
        options |= more
        out, lse = sdpa.attention_forward(*rows, **options)
        weights = sdpa.attention_weights(*rows[:2], **options)
        backward = sdpa.attention_backward(
            self.grad_out, *rows, out, lse, needs=["query"], **options
        )
        second = sdpa.attention_double_backward(
            *self.tangents, self.grad_out, *rows, out, lse, needs=["grad_out", "query"], **options
        )
        return {
            "out": out,
            "lse": lse,
            "of attention": sdpa.attention(*rows, **options),
            "statistics": np.stack(sdpa.attention_statistics(*rows[:2], **options), -1),
            "tangent": sdpa.attention_jvp(*rows, *self.tangents, **options)[1],
            "grad_query": backward.query,
            "gg_grad_out": second.grad_out,
            "gg_query": second.query,
            "weights": weights,
        }


def drawn_mask(draw, rng, shape, dtype):
    kind = draw(st.sampled_from([None, "bool", "bias", "zero bias"]))
    if kind is None:
        return None
    visible = rng.random(shape) >= draw(st.sampled_from([0, 0.5, 0.95]))
    if kind == "bool":
        return visible
    bias = rng.standard_normal(shape) if kind == "bias" else np.zeros(shape)
    return np.where(visible, bias, -np.inf).astype(dtype)


@st.composite
def calls(draw, dtype):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    batch, groups, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    n_q, n_k, d_k, d_v = draw(lengths), draw(lengths), draw(widths), draw(widths)
    narrow = draw(st.sampled_from([dtype, np.float16, BFLOAT16]))
    dtypes = [dtype, narrow if dtype == np.float32 else dtype]
    std = draw(st.sampled_from([1.0, 1.0, 12.0]))
    q_shape, k_shape, v_shape, o_shape = (
        (batch, heads, n, d)
        for heads, n, d in (
            (groups * group, n_q, d_k),
            (groups, n_k, d_k),
            (groups, n_k, d_v),
            (groups * group, n_q, d_v),
        )
    )
    query = normal(rng, q_shape, dtypes[0], std)
    key, value = normal(rng, k_shape, dtypes[1]), normal(rng, v_shape, dtypes[1])
    tangents = [normal(rng, x.shape, x.dtype) for x in (query, key, value)]
    call = Call(query, key, value, normal(rng, o_shape, dtypes[0]), tuple(tangents))
    real = compute_type(dtypes[0])
    call.mask = drawn_mask(draw, rng, (batch, groups * group, n_q, n_k), real)
    call.offset = draw(st.sampled_from([0, 0, n_k - n_q, 3]))
    call.options["is_causal"] = draw(st.booleans())
    if draw(st.booleans()):
        bound = st.one_of(st.none(), st.integers(0, 140))
        call.options["window"] = draw(st.tuples(bound, bound))
    if draw(st.booleans()):
        call.options["softcap"] = 3.0
    if draw(st.booleans()):
        call.sinks = normal(rng, (groups * group,), real)
    if draw(st.booleans()):
        call.slopes = normal(rng, (groups * group,), real)
    return call


def drawn_slice(draw, n):
    start = draw(st.integers(0, n - 1))
    return slice(start, draw(st.integers(start + 1, n)))


def last_visible(call, queries):
    """The number of keys that the queries need; all later ones are hidden from them."""
    n_k = call.key.shape[2]
    query, key = np.ogrid[: call.query.shape[2], :n_k]
    right = [0] if call.options["is_causal"] else []
    right += [r for r in (call.options.get("window", (None, None))[1],) if r is not None]
    visible = np.ones((call.query.shape[2], n_k), bool)
    for r in right:
        visible &= key <= query + call.offset + r
    if call.mask is not None:
        seen = call.mask if call.mask.dtype == bool else call.mask > -np.inf
        visible &= seen.any(axis=(0, 1))
    return int(np.flatnonzero(visible[queries].any(axis=0)).max(initial=0)) + 1


def assert_part(whole, part, index, n_keys, what):
    for name, expected in whole.items():
        expected = expected[index]
        got = part[name]
        if name == "weights":
            got, expected = got[..., :n_keys], expected[..., :n_keys]
        assert_same_bits(got, expected, f"{what}: {name}")


# Smaller problems would not cross a block of keys; more examples are drawn by SDPA_SEED.
@settings(max_examples=40)
@given(data=st.data())
def test_any_part_of_a_call(dtype, data):
    call = data.draw(calls(dtype))
    whole = call.results()
    batch, groups, queries = (
        drawn_slice(data.draw, n) for n in (*call.key.shape[:2], call.query.shape[2])
    )
    n_keys = data.draw(st.integers(last_visible(call, queries), call.key.shape[2]))
    part = call.part(batch, groups, queries, n_keys)
    group = call.query.shape[1] // call.key.shape[1]
    index = batch, slice(groups.start * group, groups.stop * group), queries
    assert_part(whole, part.results(), index, n_keys, "a part")


@settings(max_examples=15)
@given(data=st.data())
def test_padding_on_the_right(compute_dtype, data):
    """Keys beyond key_lengths, or hidden by a mask, do not matter, even if they hold NaN."""
    call = data.draw(calls(compute_dtype))
    whole = call.results()
    n_k, extra = call.key.shape[2], data.draw(st.integers(1, 140))
    padded = call.part(slice(None), slice(0, call.key.shape[1]), slice(0, None), n_k)
    pad = [(0, 0), (0, 0), (0, extra), (0, 0)]
    padded.key, padded.value = (
        np.pad(x, pad, constant_values=np.nan) for x in (call.key, call.value)
    )
    padded.tangents = call.tangents[0], *(np.pad(x, pad) for x in call.tangents[1:])
    if call.mask is not None:
        padded.mask = np.pad(call.mask, [(0, 0)] * 3 + [(0, extra)])
    assert_part(whole, padded.results(key_lengths=n_k), ..., n_k, "key_lengths")
    if call.mask is None or call.mask.dtype == bool:
        shown = np.ones((*call.query.shape[:3], n_k), bool) if call.mask is None else call.mask
        padded.mask = np.pad(shown, [(0, 0)] * 3 + [(0, extra)])
        assert_part(whole, padded.results(), ..., n_k, "a mask")


@pytest.mark.parametrize("options", [{"window": (20, 3)}, {"window": (150, None), "softcap": 2.0}])
def test_a_window_begins_anywhere(rng, compute_dtype, options):
    """Blocks of keys lie where they always do, not where the first visible key is."""
    q, k, v, grad_out = (normal(rng, (1, 2, 300, 16), compute_dtype) for _ in range(4))
    tangents = tuple(normal(rng, q.shape, compute_dtype) for _ in range(3))
    call = Call(q, k, v, grad_out, tangents, options={"is_causal": False} | options)
    whole = call.results()
    everything = slice(0, 1), slice(0, 2)
    for queries in (slice(299, 300), slice(77, 200), slice(1, 250)):
        part = call.part(*everything, queries, 300).results()
        assert_part(whole, part, (*everything, queries), 300, f"queries {queries}")


def test_large_values_behind_a_maximum_that_rose(rng, compute_dtype):
    """A window of 41 keys over two blocks: the second block's scores exceed the first one's."""
    q = np.zeros((200, 8), compute_dtype)
    k = np.zeros((300, 8), compute_dtype)
    q[:, 0], k[128:, 0] = 1, 60 * np.log(2)
    largest = compute_dtype.type(np.finfo(compute_dtype).max * 2.0**-44)
    v = np.full((300, 8), largest)
    band = {"scale": 1.0, "window": (20, 20), "invariant": True}
    whole = sdpa.attention(q, k, v, **band)
    assert np.allclose(whole, largest, rtol=1e-5)
    alone = sdpa.attention(q[120:121], k, v, query_offset=120, **band)
    assert_same_bits(alone, whole[120:121])


@pytest.mark.parametrize("std", [1.0, 25.0])
def test_prompt_and_token_by_token(rng, dtype, std):
    """Causal attention over 300 tokens at once, and with a cache that grows by each of them."""
    q, k, v = (
        normal(rng, (1, heads, 300, 64), dtype, s) for heads, s in ((4, std), (2, 1), (2, 1))
    )
    whole = sdpa.attention(q, k, v, is_causal=True, enable_gqa=True, invariant=True)
    for n in range(1, 301):
        token = sdpa.attention(
            q[:, :, n - 1 : n], k[:, :, :n], v[:, :, :n], enable_gqa=True, invariant=True
        )
        assert_same_bits(token, whole[:, :, n - 1 : n], f"token {n}")


def test_long_keys_are_not_dealt_to_threads(rng, compute_dtype):
    """Few queries over many keys, which are cut into parts without the option."""
    k, v = (normal(rng, (1, 1, 10000, 8), compute_dtype) for _ in range(2))
    q = normal(rng, (1, 1, 40, 8), compute_dtype)
    whole = sdpa.attention(q, k, v, invariant=True, workers=2)
    for i in (0, 7, 39):
        row = sdpa.attention(q[:, :, i : i + 1], k, v, invariant=True, workers=2)
        assert_same_bits(row, whole[:, :, i : i + 1], f"query {i}")


def test_packed(rng, dtype):
    """A sequence has the same bits packed, padded and alone."""
    n = [5, 130, 1, 64]
    cu = np.cumsum([0, *n])
    q, k, v = (normal(rng, (cu[-1], 2, 40), dtype) for _ in range(3))
    packed = sdpa.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, invariant=True)
    for s in range(len(n)):
        own = slice(cu[s], cu[s + 1])
        for i in range(cu[s], cu[s + 1], 40):
            rows = slice(i, min(i + 40, cu[s + 1]))
            alone = sdpa.attention(
                *(x.swapaxes(0, 1) for x in (q[rows], k[own], v[own])), invariant=True
            )
            assert_same_bits(alone.swapaxes(0, 1), packed[rows], f"sequence {s}")


def test_the_ordinary_way_depends_on_the_split(rng):
    """Without the option bits do differ; otherwise it would be useless."""
    q, k, v = (normal(rng, (1, 2, 300, 64), np.float32) for _ in range(3))
    whole = sdpa.attention(q, k, v)
    rows = [sdpa.attention(q[:, :, i : i + 1], k, v) for i in range(300)]
    assert (np.concatenate(rows, axis=2) != whole).any()


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (40, 3), "softcap": 2.0}])
def test_against_the_oracle(rng, dtype, options):
    q, k, v, grad_out = (normal(rng, (2, 3, n, 64), dtype) for n in (150, 200, 200, 150))
    bounds = AttentionBounds(q, k, v, grad_out=grad_out, **options)
    expected = reference.attention_forward(q, k, v, **options)
    got = sdpa.attention_forward(q, k, v, invariant=True, **options)
    assert_within(got.out, expected.out, bounds.out, "out")
    assert_within(got.lse, expected.lse, bounds.lse, "lse")
    ours = sdpa.attention_backward(grad_out, q, k, v, *got, invariant=True, **options)
    true = reference.attention_backward(grad_out, q, k, v, *expected, **options)
    for name in ("query", "key", "value"):
        assert_within(getattr(ours, name), getattr(true, name), getattr(bounds, name), name)


def test_nothing_visible(compute_dtype):
    x = np.ones((5, 4), compute_dtype)
    out, lse = sdpa.attention_forward(x, x, x, key_lengths=0, invariant=True)
    assert (out == 0).all()
    assert (lse == -np.inf).all()
