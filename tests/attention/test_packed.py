"""Packed sequences: the bits of a call per sequence, for every function and option."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from support.guard import guarded
from support.helpers import (
    LAYOUTS,
    AttentionBounds,
    assert_same_bits,
    assert_within,
    compute_type,
    normal,
)

import sdpa
from sdpa import reference
from sdpa.reference import logits
from sdpa.reference.packed import one_sequence, sequence_arguments

pytestmark = pytest.mark.usefixtures("isa")

# Nothing, one token, and the neighbours of vectors, query blocks and key blocks.
LENGTHS = (0, 1, 2, 5, 16, 17, 47, 49, 96, 97, 130)


def cumulative(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


class Problem:
    """Random operands of sequences with these lengths, and the results of all functions."""

    def __init__(
        self,
        generator,
        dtype,
        n_q,
        n_k,
        *,
        key_heads=2,
        group=1,
        d=(16, 8),
        layout="contiguous",
        padding=(0, 0),
        **options,
    ):
        """`padding`: rows of NaN behind those of the sequences, of queries and of keys."""
        self.cu = {"cu_seqlens_q": cumulative(n_q), "cu_seqlens_k": cumulative(n_k)}
        self.n_sequences = len(n_q)
        self.options = options | {"enable_gqa": group > 1}
        if "sinks" in options:  # of the type that their gradients are added in
            self.options["sinks"] = options["sinks"].astype(compute_type(dtype))
        heads, (d_k, d_v) = key_heads * group, d
        self.in_use = {"q": sum(n_q), "k": sum(n_k)}
        padding = dict(zip("qk", padding, strict=True))

        def array(side, heads, d):
            x = normal(generator, (self.in_use[side] + padding[side], heads, d), dtype)
            x[self.in_use[side] :] = np.nan
            return LAYOUTS[layout](x)

        def operands():
            return array("q", heads, d_k), array("k", key_heads, d_k), array("k", key_heads, d_v)

        self.x = dict(zip(("query", "key", "value"), operands(), strict=True))
        self.tangents = list(operands())
        self.grad_out = array("q", heads, d_v)
        grad_lse = normal(generator, (heads, self.in_use["q"] + padding["q"]), compute_type(dtype))
        grad_lse[:, self.in_use["q"] :] = np.nan
        self.grad_lse = grad_lse

    def call(self, name, **more):
        """A function, with cu_seqlens."""
        return getattr(sdpa, name)(**self.cu, **more, **self.options)

    def calls(self):
        """{name: its arguments but options} of functions that return rows or gradients."""
        out, lse = self.call("attention_forward", **self.x)
        out[self.in_use["q"] :] = lse[:, self.in_use["q"] :] = np.nan
        x = self.x | {"grad_out": self.grad_out, "out": out, "lse": lse}
        x |= {"grad_lse": self.grad_lse, "needs": ("query", "key", "value")}
        along = dict(zip(("query_t", "key_t", "value_t"), self.tangents, strict=True))
        twice = dict(zip(("gg_query", "gg_key", "gg_value"), self.tangents, strict=True))
        twice |= {"needs": ("grad_out", "query", "key", "value")}
        if self.options.get("sinks") is not None:
            x["needs"] += ("sinks",)
            twice |= {"needs": (*twice["needs"], "sinks"), "gg_sinks": 2 * self.options["sinks"]}
            along["sinks_t"] = 2 * self.options["sinks"]
        calls = {
            "attention_forward": self.x,
            "attention_jvp": self.x | along,
            "attention_backward": x,
            "attention_double_backward": x | twice,
        }
        rows = {name: self.x[name] for name in ("query", "key")}
        calls["attention_received"] = rows
        if not self.options.get("dropout_p"):
            calls["attention_statistics"] = rows
        return calls

    def check_bits(self):
        """Every function returns the result of one call per sequence."""
        for name, x in self.calls().items():
            together = self.call(name, **x)
            alone = reference.packed(getattr(sdpa, name), **self.cu, **x, **self.options)
            for field in together._fields:
                one, other = getattr(together, field), getattr(alone, field)
                assert (one is None) == (other is None), (name, field)
                if one is not None:
                    assert one.dtype == other.dtype, (name, field)
                    np.testing.assert_array_equal(one, other, err_msg=f"{name} {field}")
        x = {name: self.x[name] for name in ("query", "key")}
        for s in range(self.n_sequences):
            for stage in ("biased", "weights"):
                got = self.call("attention_weights", **x, sequence=s, stage=stage)
                alone = one_sequence(
                    sdpa.attention_weights, s, **self.cu, **x, **self.options, stage=stage
                )
                np.testing.assert_array_equal(got, alone, err_msg=f"{stage} of sequence {s}")

    def check_oracle(self):
        """Forward and backward within the bounds of each sequence."""
        got = self.call("attention_forward", **self.x)
        more = {"grad_out": self.grad_out, "grad_lse": self.grad_lse}
        grads = self.call("attention_backward", **self.x, **more, **got._asdict())
        for s in range(self.n_sequences):
            own = sequence_arguments(s, **self.cu, **self.x, **more, **self.options)
            bounds = AttentionBounds(**own)
            upstream = {name: own.pop(name) for name in more}
            true = reference.attention_forward(**own)
            rows, keys = (slice(*cu[s : s + 2]) for cu in self.cu.values())
            assert_within(got.out[rows].swapaxes(0, 1), true.out, bounds.out, "out")
            assert_within(got.lse[:, rows], true.lse, bounds.lse, "lse")
            true_grads = reference.attention_backward(**own, **upstream, **true._asdict())
            for name, at in (("query", rows), ("key", keys), ("value", keys)):
                actual = getattr(grads, name)[at].swapaxes(0, 1)
                assert_within(actual, getattr(true_grads, name), getattr(bounds, name), name)


N_Q, N_K = (5, 0, 130, 1, 48, 17), (7, 3, 97, 1, 0, 200)

OPTIONS = {
    "none": {},
    "groups": {"group": 3},
    "upper left": {"is_causal": True},
    "lower right": {"is_causal": "lower_right"},
    "window": {"window": (20, 3), "is_causal": "lower_right"},
    "softcap, scale": {"softcap": 1.5, "scale": -0.3},
    "lengths": {"key_lengths": np.array([7, 0, 90, 1, 0, 150])},
    "lengths, lower right": {"key_lengths": [0, 3, 97, 1, 0, 17], "is_causal": "lower_right"},
    "one length": {"key_lengths": 0},
    "offsets": {"query_offset": [2, 0, -3, 0, 5, 100], "is_causal": True},
    "one offset": {"query_offset": 3, "window": (4, 0)},
    "sinks": {"sinks": np.array([0.5, -1.0])},
    "sinks, groups": {"sinks": np.array([0.5, -np.inf, 1, 2, 3, 4]), "group": 3},
    "one sink": {"sinks": np.array([0.5])},
    "slopes": {"alibi_slopes": np.array([0.5, 0.01]), "is_causal": "lower_right"},
    "dropout": {"dropout_p": 0.3, "rng": 2**63 + 5},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_bits_of_a_call_per_sequence(rng, dtype, name):
    Problem(rng, dtype, N_Q, N_K, **OPTIONS[name]).check_bits()


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "dropout"])
def test_oracle(rng, dtype, name):
    Problem(rng, dtype, N_Q, N_K, **OPTIONS[name]).check_oracle()


@settings(max_examples=25)
@given(data=st.data())
def test_any_lengths_and_options(dtype, data):
    draw = data.draw
    n = draw(st.integers(1, 5))
    length = st.one_of(st.sampled_from(LENGTHS), st.integers(0, 40))
    lengths = st.lists(length, min_size=n, max_size=n)
    n_q, n_k = draw(lengths), draw(lengths)
    if draw(st.booleans()):
        n_k = n_q
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    key_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    heads = key_heads * group
    options = {"is_causal": draw(st.sampled_from([False, "upper_left", "lower_right"]))}
    if draw(st.booleans()):
        bound = st.one_of(st.none(), st.integers(0, 60))
        options["window"] = draw(st.tuples(bound, bound))
    if draw(st.booleans()):
        options["key_lengths"] = rng.integers(0, np.array(n_k) + 1)
    if draw(st.booleans()) and options["is_causal"] != "lower_right":
        options["query_offset"] = rng.integers(-20, 60, n)
    if draw(st.booleans()):
        options["softcap"] = 2.0
    if draw(st.booleans()):
        options["sinks"] = normal(rng, heads, np.float64)
    if draw(st.booleans()):
        options["alibi_slopes"] = normal(rng, heads, np.float32)
    if draw(st.booleans()):
        options |= {"dropout_p": draw(st.sampled_from([0.2, 1.0])), "rng": 7}
    d = draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))
    layout = draw(st.sampled_from(sorted(LAYOUTS)))
    problem = Problem(
        rng, dtype, n_q, n_k, key_heads=key_heads, group=group, d=d, layout=layout, **options
    )
    problem.check_bits()


@pytest.mark.parametrize("heads", [1, 3])
def test_any_number_of_threads(rng, dtype, heads):
    """Also where one long sequence is most of the work and is shared by the threads."""
    n = (600, 16, 100, 3)
    x = Problem(
        rng, dtype, n, n, key_heads=heads, is_causal=True, sinks=normal(rng, heads, np.float64)
    )
    for name, arguments in x.calls().items():
        serial = x.call(name, **arguments, workers=1)
        for workers in (2, 3, 8):
            parallel = x.call(name, **arguments, workers=workers)
            for one, other in zip(serial, parallel, strict=True):
                if one is not None:
                    assert_same_bits(one, other, f"{name}, {workers} threads")
    x.check_bits()


@pytest.mark.parametrize("group", [1, 4])
def test_few_queries_of_many_keys(rng, dtype, group):
    """Decoding, where a separate call would cut the keys into parts or fold a group of heads."""
    problem = Problem(rng, dtype, (1, 1, 2, 1), (9000, 40, 13000, 1), key_heads=1, group=group)
    problem.check_bits()


def test_no_values(rng, dtype):
    """Rows of no elements have strides that mean nothing."""
    problem = Problem(rng, dtype, (1, 1, 1), (9000, 40, 300), key_heads=3, group=4, d=(16, 0))
    problem.check_bits()
    strided = np.zeros((*problem.x["value"].shape[:-1], 5), dtype)[..., :0]
    lse = problem.call("attention_forward", **problem.x).lse
    assert_same_bits(problem.call("attention_forward", **problem.x | {"value": strided}).lse, lse)


def test_one_operand_has_one_head(rng, dtype):
    """Heads broadcast, and gradients are summed over them."""
    problem = Problem(rng, dtype, N_Q, N_K, key_heads=3)
    problem.x["key"] = problem.x["key"][:, :1]
    problem.tangents[1] = problem.tangents[1][:, :1]
    problem.check_bits()


def test_no_sequences(dtype):
    x = np.zeros((0, 2, 4), dtype)
    out, lse = sdpa.attention_forward(x, x, x, cu_seqlens_q=[0], cu_seqlens_k=[0])
    assert out.shape == (0, 2, 4)
    assert lse.shape == (2, 0)
    g = sdpa.attention_backward(x, x, x, x, out, lse, cu_seqlens_q=[0], cu_seqlens_k=[0])
    assert g.key.shape == x.shape


def test_out(rng, dtype):
    """The caller's array, of any strides, is filled with the same bits."""
    problem = Problem(rng, dtype, N_Q, N_K)
    expected = problem.call("attention", **problem.x)
    out = np.full((*expected.shape[:2], 20), 7, dtype)[..., 1:17:2]
    assert problem.call("attention", **problem.x, out=out) is out
    np.testing.assert_array_equal(out, expected)


def test_sequences_do_not_meet(rng, dtype):
    """NaN in one sequence leaves the others as they are, forward and backward."""
    problem = Problem(rng, dtype, N_Q, N_K)
    calls = problem.calls()
    before = {name: problem.call(name, **x) for name, x in calls.items()}
    rows, keys = (slice(*cu[2:4]) for cu in problem.cu.values())
    for x in calls["attention_double_backward"].values():
        if isinstance(x, np.ndarray) and x.ndim == 3:
            x[rows if x.shape[0] == sum(N_Q) else keys] = np.nan
    for name, x in calls.items():
        after = problem.call(name, **x)
        for field, one, other in zip(before[name]._fields, before[name], after, strict=True):
            if one is None:
                continue
            axis = 0 if one.ndim == 3 else 1
            at = rows if one.shape[axis] == sum(N_Q) else keys
            np.testing.assert_array_equal(
                np.delete(one, at, axis), np.delete(other, at, axis), err_msg=f"{name} {field}"
            )


def test_dropout_is_that_of_a_padded_batch(rng, compute_dtype):
    """The pattern counts sequences as batch entries, so they do not share it."""
    n = (9, 30, 4)
    problem = Problem(rng, compute_dtype, n, n, dropout_p=0.5, rng=11)
    factors = logits.dropout_factors((len(n), 2, max(n), max(n)), 0.5, 11)
    x = {name: problem.x[name] for name in ("query", "key")}
    for s, length in enumerate(n):
        weights = problem.call("attention_weights", **x, sequence=s)
        np.testing.assert_array_equal(weights != 0, factors[s, :, :length, :length] != 0)


def test_integer_types(rng):
    problem = Problem(rng, np.float32, N_Q, N_K)
    expected = problem.call("attention", **problem.x)
    for kind in (np.int16, np.uint16, np.int64, np.uint64, list):
        cu = {
            name: list(map(int, x)) if kind is list else x.astype(kind)
            for name, x in problem.cu.items()
        }
        np.testing.assert_array_equal(sdpa.attention(**problem.x, **cu), expected)


# ------------------------------------------------------------------ rows behind the last sequence


PADDING = {"of both": (7, 5), "of queries": (40, 0), "of keys": (0, 3)}


@pytest.mark.parametrize("padding", PADDING.values(), ids=PADDING)
@pytest.mark.parametrize("name", OPTIONS)
def test_padding_at_the_end(rng, dtype, name, padding):
    """All functions: no NaN of the padding gets anywhere, not even into gradients that are sums."""
    problem = Problem(rng, dtype, N_Q, N_K, padding=padding, **OPTIONS[name])
    problem.check_bits()
    cut = {side: slice(n) for side, n in problem.in_use.items()}
    for function, x in problem.calls().items():
        alone = {
            key: a
            if not isinstance(a, np.ndarray)
            else a[:, cut["q"]]
            if a.ndim == 2
            else a[cut["k" if key in OF_KEYS else "q"]]
            if a.ndim == 3
            else a
            for key, a in x.items()
        }
        together, expected = problem.call(function, **x), problem.call(function, **alone)
        for field, got, true in zip(expected._fields, together, expected, strict=True):
            if true is not None:
                check_padding(field, got, true)


OF_KEYS = ("key", "value", "key_t", "value_t", "gg_key", "gg_value")


def check_padding(field, got, true):
    """Rows of sequences have the bits that they have without padding; here are those of padding."""
    axis = 0 if true.ndim == 3 else -1
    rows = np.arange(true.shape[axis])
    assert_same_bits(np.take(got, rows, axis), true, field)
    expected = {"lse": -np.inf, "score_mean": np.nan, "score_var": np.nan}.get(field, 0)
    np.testing.assert_array_equal(np.delete(got, rows, axis), expected, err_msg=field)


@pytest.mark.parametrize("side", ["q", "k"])
def test_padding_of_one_operand_with_one_head(rng, dtype, side):
    """Gradients of a shared head are summed in memory of their own."""
    problem = Problem(rng, dtype, N_Q, N_K, key_heads=3, padding=(4, 6))
    names = {"q": ["query"], "k": ["key", "value"]}[side]
    for name in names:
        problem.x[name] = problem.x[name][:, :1]
    for i, name in enumerate(("query", "key", "value")):
        if name in names:
            problem.tangents[i] = problem.tangents[i][:, :1]
    problem.check_bits()


@pytest.mark.parametrize("heads", [1, 3])
def test_padding_and_threads(rng, dtype, heads):
    n = (600, 16, 100, 3)
    x = Problem(
        rng, dtype, n, n, key_heads=heads, padding=(100, 50), sinks=normal(rng, heads, np.float64)
    )
    for name, arguments in x.calls().items():
        serial, parallel = (x.call(name, **arguments, workers=n) for n in (1, 4))
        for one, other in zip(serial, parallel, strict=True):
            if one is not None:
                assert_same_bits(one, other, name)
    x.check_bits()


def test_nothing_but_padding(rng, dtype):
    for cu in ([0], [0, 0], [0, 0, 0]):
        x = normal(rng, (5, 2, 8), dtype)
        x[:] = np.nan
        packed = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
        out, lse = sdpa.attention_forward(x, x, x, **packed)
        np.testing.assert_array_equal(out, np.zeros_like(x))
        assert (lse == -np.inf).all()
        for g in sdpa.attention_backward(x, x, x, x, x, lse, **packed)[:3]:
            np.testing.assert_array_equal(g, np.zeros_like(x))
        second = sdpa.attention_double_backward(x, x, x, x, x, x, x, x, lse, **packed)
        for g in second[:4]:
            np.testing.assert_array_equal(g, np.zeros_like(x))
        for found in sdpa.attention_received(x, x, **packed):
            np.testing.assert_array_equal(found, np.zeros((2, 5)))
        assert (sdpa.attention_statistics(x, x, **packed).entropy == 0).all()


def test_padding_of_out(rng, dtype):
    """The caller's array is written to the end, and nothing beside it."""
    problem = Problem(rng, dtype, N_Q, N_K, padding=(6, 2))
    expected = problem.call("attention", **problem.x)
    memory = np.full((*expected.shape[:2], 20), 7, dtype)
    out = memory[..., 1:17:2]
    assert problem.call("attention", **problem.x, out=out) is out
    np.testing.assert_array_equal(out, expected)
    assert (memory[..., ::2] == 7).all()


@pytest.mark.parametrize("heads", [None, [1], [1, 0, 1]])
def test_chosen_queries_of_the_padding_give_nothing(rng, dtype, heads):
    problem = Problem(rng, dtype, N_Q, N_K, padding=(6, 2))
    x = {name: problem.x[name] for name in ("query", "key")}
    n = problem.in_use["q"]
    some = [3, n - 1, 140]
    expected = problem.call("attention_received", **x, queries=some, heads=heads)
    chosen = [n + 5, 3, n, n - 1, -1, 140]
    got = problem.call("attention_received", **x, queries=chosen, heads=heads)
    nothing = problem.call("attention_received", **x, queries=[-1, n], heads=heads)
    for one, other, none in zip(got, expected, nothing, strict=True):
        assert_same_bits(one, other)
        assert (none == 0).all()
        assert (one[:, problem.in_use["k"] :] == 0).all()


def test_no_byte_of_the_padding_is_read(rng, dtype, pages):
    """It lies behind the end of readable memory."""
    problem = Problem(rng, dtype, N_Q, N_K)
    for name, x in problem.calls().items():
        beyond = {
            key: behind(pages, a, 9) if isinstance(a, np.ndarray) and a.ndim == 3 else a
            for key, a in x.items()
        }
        for key in ("lse", "grad_lse"):
            if key in x:  # here the rows of padding lie between the heads
                beyond[key] = np.pad(x[key], ((0, 0), (0, 9)), constant_values=np.nan)
        together, expected = problem.call(name, **beyond), problem.call(name, **x)
        for field, got, true in zip(expected._fields, together, expected, strict=True):
            if true is not None:
                check_padding(field, got, true)


def behind(pages, x, n):
    """x with n more rows, whose memory cannot be read."""
    x = guarded(pages, x)
    return as_strided(x, (len(x) + n, *x.shape[1:]), x.strides)


def test_invariant_bits_with_padding(rng, dtype):
    problem = Problem(rng, dtype, N_Q, N_K, padding=(3, 3), invariant=True)
    got = problem.call("attention", **problem.x)
    plain = {
        name: a[: problem.in_use["q" if name == "query" else "k"]] for name, a in problem.x.items()
    }
    assert_same_bits(got[: problem.in_use["q"]], problem.call("attention", **plain))
