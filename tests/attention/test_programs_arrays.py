"""Arrays that functions of the user read: gradients of large ones, indices, what is refused."""

import numpy as np
import pytest
from support.calls import message
from support.helpers import assert_same_bits, normal, without_memory

import sdpa

pytestmark = pytest.mark.usefixtures("isa")

F32, F64 = np.float32, np.float64
SHAPE = (2, 4)  # batch, heads
N = 150
OFFSET = 25  # of the queries, at most
WIDTH = 2 * (N + OFFSET + 1)  # of a table of distances
LARGE = 20_000  # columns of a table whose gradient is summed where a unit reaches alone


def score(s, b, h, q, k, table, own, order, unused):
    far = table.shape[-1] // 2
    near = table[h, q - k + far] * s + table[h, order[k] - q + far]
    return near + own[b, h, q] * table[h, far]


def arguments(rng):
    """The table, a factor of each query, and an order of the keys; another table has no reader."""
    order = rng.permutation(N)
    own = normal(rng, (*SHAPE, N + OFFSET), F64)
    return normal(rng, (4, WIDTH), F64), own, order, np.ones(3)


def widened(table):
    """The same around the middle, and numbers that nothing reads."""
    beside = (LARGE - table.shape[-1]) // 2
    return np.pad(table, [(0, 0), (beside, beside)], constant_values=9)


def narrowed(table):
    beside = (LARGE - WIDTH) // 2
    assert not table[:, :beside].any()
    assert not table[:, -beside:].any()
    return table[:, beside:-beside]


NEEDS = ("query", "key", "value", "score_args")
LIMITS = {
    "all": {},
    "lower right": {"is_causal": "lower_right"},
    "lengths": {"key_lengths": np.array([0, 33])},
    "offset": {"query_offset": np.array([0, OFFSET])},
}


def backward(x, args, options):
    saved = sdpa.attention_forward(*x[:3], score_args=args, **options)
    return sdpa.attention_backward(x[3], *x[:3], *saved, needs=NEEDS, score_args=args, **options)


def double_backward(x, args, options):
    saved = sdpa.attention_forward(*x[:3], score_args=args, **options)
    moves = [np.cos(a) if a.dtype.kind == "f" else None for a in args]
    return sdpa.attention_double_backward(
        *x[:3], x[3], *x[:3], *saved, needs=NEEDS, score_args=args, gg_score_args=moves, **options
    )


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("function", [backward, double_backward])
def test_gradients_of_a_large_table(rng, function, limit):
    """They are those of a small one; those of an array without a reader are 0."""
    options = LIMITS[limit] | {"score_mod": score}
    x = [normal(rng, (*SHAPE, n, 8), F64) for n in (N, N - 60, N - 60, N)]
    table, *others = arguments(rng)
    small = function(x, (table, *others), options)
    large = function(x, (widened(table), *others), options)
    for a, b in zip(small[1:3], large[1:3], strict=True):
        np.testing.assert_array_equal(a, b)
    of_table, of_own, of_order, of_unused = small.score_args
    assert of_order is large.score_args[2] is None
    assert not of_unused.any()
    assert abs(of_table).max() > 0
    bound = {"rtol": 0, "atol": 1e-12 * (1 + abs(of_table).max())}
    np.testing.assert_allclose(narrowed(large.score_args[0]), of_table, **bound)
    np.testing.assert_allclose(large.score_args[1], of_own, **bound)


@pytest.mark.parametrize("n_head", [1, 4])
def test_gradients_of_packed_sequences_with_a_large_table(rng, n_head):
    """Sequences without queries or keys, and one head, whose arrays belong to its units."""
    cu = np.array([0, 40, 40, 70, N])
    x = [normal(rng, (N, n_head, 8), F64) for _ in range(4)]
    table, own, *others = arguments(rng)
    own = np.repeat(own[:, :n_head], 2, axis=0)
    options = {"score_mod": score, "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    small = backward(x, (table, own, *others), options).score_args
    large = backward(x, (widened(table), own, *others), options).score_args
    np.testing.assert_allclose(narrowed(large[0]), small[0], rtol=0, atol=1e-11)
    np.testing.assert_array_equal(large[1], small[1])
    assert abs(small[0]).max() > 0
    assert (abs(small[1][:, :, 0]).max(axis=-1) > 0).tolist() == [True, False, True, True]


def test_gradients_of_numbers(rng):
    """Arrays without axes share an index; with one axis, each has its own."""
    x = [normal(rng, (*SHAPE, n, 8), F64) for n in (20, 30, 30, 20)]
    numbers = np.array(1.5), np.array(0.3), np.array(-0.7)
    alone = {"score_mod": lambda s, b, h, q, k, t, u, w: s * t + u * k + w * b}
    listed = {"score_mod": lambda s, b, h, q, k, t, u, w: s * t[0] + u[0] * k + w[0] * b}
    got = backward(x, numbers, alone).score_args
    expected = backward(x, tuple(a[None] for a in numbers), listed).score_args
    np.testing.assert_allclose(got, [a[0] for a in expected], rtol=0, atol=1e-12)
    assert abs(got[0]) > 1e-3 < abs(got[1])


@pytest.mark.parametrize("shape", [(0, 4, 5, 8), (2, 0, 5, 8), (2, 4, 0, 8)])
def test_nothing_to_compute(shape):
    x, args = np.ones(shape), (np.ones(3),)
    options = {
        "score_mod": lambda s, b, h, q, k, t: s + t[k + 9],
        "score_args": args,
        "mask_mod": lambda b, h, q, k: q < k,
        "query_offset": np.arange(shape[0]),
    }
    assert sdpa.attention(x, x, x, **options).shape == shape


@pytest.mark.parametrize("packed", [False, True])
def test_no_memory(rng, packed):
    """Whichever allocation fails, MemoryError is raised and the next call is right."""
    shape = (N, 4, 8) if packed else (*SHAPE, N, 8)
    x = [normal(rng, shape, F64) for _ in range(4)]
    cu = np.array([0, 70, N])
    options = {"score_mod": score} | ({"cu_seqlens_q": cu, "cu_seqlens_k": cu} if packed else {})
    table, *others = arguments(rng)
    args = (widened(table), *others)
    expected = backward(x, args, options).score_args
    found, needed = without_memory(lambda: backward(x, args, options))
    assert needed > 2
    np.testing.assert_array_equal(found.score_args[0], expected[0])


INDICES = {
    "key": (
        lambda s, b, h, q, k, t: s + t[k],
        (10,),
        "axis 0, got 10 at b = 0, h = 0, q = 0, k = 10",
    ),
    "pair": (
        lambda s, b, h, q, k, t: s + t[q - k + 3],
        (100,),
        "axis 0, got -1 at b = 0, h = 0, q = 0, k = 4",
    ),
    "query": (
        lambda s, b, h, q, k, t: s + t[q],
        (5,),
        "axis 0, got 5 at b = 0, h = 0, q = 5, k = 0",
    ),
    "head": (
        lambda s, b, h, q, k, t: s + t[h],
        (1,),
        "axis 0, got 1 at b = 0, h = 1, q = 0, k = 0",
    ),
    "none": (
        lambda s, b, h, q, k, t: s + t[k],
        (0,),
        "expected an index from 0 to -1 on axis 0, got 0 at b = 0, h = 0, q = 0, k = 0",
    ),
    "real": (
        lambda s, b, h, q, k, t: s + t[np.floor(k / 2).astype(int)],
        (10,),
        "an index from 0 to 9 on axis 0 at b = 0, h = 0, q = 0, k = 20; mask such pairs",
    ),
    "axis": (
        lambda s, b, h, q, k, t: s + t[h, k],
        (4, 12),
        "axis 1, got 12 at b = 0, h = 0, q = 0, k = 12",
    ),
}


@pytest.mark.parametrize("case", INDICES)
def test_index_out_of_range(rng, case):
    function, shape, text = INDICES[case]
    query, key, value = (normal(rng, (*SHAPE, n, 8), F32) for n in (20, 30, 30))
    with pytest.raises(IndexError) as caught:
        sdpa.attention(
            query, key, value, score_mod=function, score_args=(np.zeros(shape),), workers=1
        )
    assert str(caught.value).startswith(
        "score_mod: <lambda> reads t out of range: expected an index"
    )
    assert text in str(caught.value)


def test_an_index_out_of_range_at_hidden_pairs_is_none(rng, dtype):
    query, key, value = (normal(rng, (*SHAPE, 60, 8), dtype) for _ in range(3))
    table = normal(rng, (60,), F64)
    out = sdpa.attention(
        query, key, value, is_causal=True,
        score_mod=lambda s, b, h, q, k, t: s + t[q - k], score_args=(table,),
    )  # fmt: skip
    options = {
        "score_mod": lambda s, b, h, q, k, t: s + t[np.maximum(q - k, 0)],
        "score_args": (table,),
    }
    np.testing.assert_array_equal(out, sdpa.attention(query, key, value, is_causal=True, **options))


@pytest.mark.parametrize("dtype", [np.int64, np.bool_])
@pytest.mark.parametrize("n", [0, 5])  # within the queries that are computed at once
def test_index_out_of_range_in_a_mask(rng, dtype, n):
    query, key, value = (normal(rng, (*SHAPE, 20, 8), F32) for _ in range(3))
    for mask, place in (
        (lambda b, h, q, k, t: t[k] == 0, f"q = 0, k = {n}"),
        (lambda b, h, q, k, t: (t[k] == 0) & (t[q] < 1), f"q = {n}, k = 0"),
    ):
        options = {"mask_mod": mask, "mask_args": (np.zeros(n, dtype),), "workers": 1}
        assert message(IndexError, sdpa.attention, query, key, value, **options) == (
            "mask_mod: <lambda> reads t out of range: expected an index from 0 to "
            f"{n - 1} on axis 0, got {n} at b = 0, h = 0, {place}; mask such pairs, or clip the "
            "index"
        )


@pytest.mark.parametrize("n", [5, 64, 128])  # within a tile, and at its end
def test_an_index_of_a_mask_is_checked_where_the_mask_may_let_through(rng, n):
    x = normal(rng, (2, 200, 8), F32)
    hides = {
        "mask_mod": lambda b, h, q, k, t: (k < n) & (t[k] == 0) & (q < n) & (t[q] == 0),
        "mask_args": (np.zeros(n, int),),
    }
    seen = np.zeros((200, 200), bool)
    seen[:n, :n] = True
    assert_same_bits(sdpa.attention(x, x, x, **hides), sdpa.attention(x, x, x, seen))
    shows = hides | {"mask_mod": lambda b, h, q, k, t: (k >= n) | (t[k] == 0)}
    with pytest.raises(IndexError, match=rf"got {n} at b = 0, h = 0, q = 0, k = {n};"):
        sdpa.attention(x, x, x, workers=1, **shows)


def test_an_index_of_real_numbers_is_not_blamed_for_another(rng):
    query, key, value = (normal(rng, (20, 8), F32) for _ in range(3))
    text = message(
        IndexError, sdpa.attention, query, key, value,
        score_mod=lambda s, b, h, q, k, t, u: s + t[np.floor(q / 2.0).astype(int)] * u[k],
        score_args=(np.ones(20), np.ones(7)), workers=1,
    )  # fmt: skip
    assert "reads u out of range: expected an index from 0 to 6 on axis 0, got 7 at" in text


@pytest.mark.parametrize("n", [1, 40_000])
def test_gradients_of_an_empty_array_are_refused(rng, n):
    """Also where the gradient of another is summed where a unit reaches alone."""
    x = normal(rng, (20, 8), F32)
    text = message(
        IndexError, sdpa.attention_backward, x, x, x, x, x, x[:, 0], needs=["score_args"],
        score_mod=lambda s, b, h, q, k, t, u: s + t[k] * u[h], score_args=(np.ones(0), np.ones(n)),
    )  # fmt: skip
    assert "got 0 at b = 0, h = 0, q = 0, k = 0" in text


def plus(s, b, h, q, k, *arrays):
    return s


REFUSED = {
    "many registers": (
        "score_mod: expected a function that needs at most 256 registers, got one of 604; give "
        "what it computes from one index as an array",
        {"score_mod": lambda s, b, h, q, k: sum(np.exp(s * i) for i in range(2, 602))},
    ),
    "many axes": (
        "score_args: expected arrays of at most 8 axes, got 9",
        {"score_mod": plus, "score_args": (np.ones((1,) * 9),)},
    ),
    "no arguments": (
        "score_args_t: expected None without score_mod",
        {"score_args_t": (np.ones(3),)},
    ),
    "other number": (
        "score_args_t: expected 1 arrays or None, one for each of score_args, got 2",
        {"score_mod": plus, "score_args": (np.ones(3),), "score_args_t": (1, 1)},
    ),
    "other shape": (
        "score_args_t[0]: expected score_args[0]'s shape and a floating dtype",
        {"score_mod": plus, "score_args": (np.ones(3),), "score_args_t": (np.ones(4),)},
    ),
    "other axes": (
        "score_args_t[0]: expected score_args[0]'s shape and a floating dtype",
        {"score_mod": plus, "score_args": (np.ones(3),), "score_args_t": (np.ones((1, 3)),)},
    ),
    "integers": (
        "score_args_t[1]: expected None, since score_args[1] holds no floating numbers",
        {
            "score_mod": plus,
            "score_args": (np.ones(3), np.arange(3), np.ones(3)),
            "score_args_t": (None, np.ones(3), None),
        },
    ),
    "many axes of a mask": (
        "mask_args: expected arrays of at most 8 axes, got 9",
        {"mask_mod": lambda b, h, q, k, *arrays: q > 2, "mask_args": (np.ones((1,) * 9),)},
    ),
    "integers beyond int64": (
        "score_mod: expected integers below 2^63 in x, got 9223372036854775809; to tell them "
        "apart alone, write x.view(np.int64)",
        {
            "score_mod": lambda s, b, h, q, k, x: s + x[k] % 2,
            "score_args": (np.array([0, 1, 2**63 + 1, 3, 4], np.uint64),),
        },
    ),
    "early positions": (
        "query_offset: expected positions from -2^31 to 2^31 - 1 with score_mod or mask_mod, got "
        "queries from -2147483649 to -2147483645 and keys up to 4",
        {"score_mod": plus, "query_offset": -(2**31) - 1},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    x = np.ones((5, 3))
    text, options = REFUSED[case]
    assert message(ValueError, sdpa.attention_jvp, x, x, x, x, x, x, **options) == text


def test_tangents_of_another_type_are_refused():
    x = np.ones((5, 3))
    for tangents, text in (
        ((np.arange(3),), "score_args_t[0]: expected score_args[0]'s shape and a floating dtype"),
        (([[1], [1, 2]],), "score_args_t[0]: "),
        (3, "score_args_t: expected a tuple of arrays, got 3; put it in a tuple"),
    ):
        options = {"score_mod": plus, "score_args": (np.ones(3),), "score_args_t": tangents}
        found = message(TypeError, sdpa.attention_jvp, x, x, x, x, x, x, **options)
        assert found.startswith(text)


def test_second_tangents_without_a_function_are_refused():
    x, lse = np.ones((5, 3)), np.ones(5)
    assert message(
        ValueError, sdpa.attention_double_backward, x, x, x, x, x, x, x, x, lse,
        gg_score_args=(np.ones(3),),
    ) == "gg_score_args: expected None without score_mod"  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"score_mod": plus}, {"mask_mod": lambda *x: x[2] > 1}])
def test_gradients_of_arguments_that_are_not_given_are_refused(options):
    x, lse = np.ones((5, 3)), np.ones(5)
    assert (
        message(
            ValueError, sdpa.attention_backward, x, x, x, x, x, lse, needs=["score_args"], **options
        )
        == "needs: 'score_args' have gradients only where they are given, got None"
    )


def test_keys_beyond_int32_are_refused():
    """They need no memory of their own, and are found before anything is computed."""
    x, key = np.ones((5, 3)), np.broadcast_to(1.0, (2**31 + 1, 3))
    text = message(ValueError, sdpa.attention, x, key, key, score_mod=plus)
    assert text.endswith("got queries from 0 to 4 and keys up to 2147483648")


def test_an_index_out_of_range_beside_a_mask(rng):
    """A hidden pair may read anything; the first one that is seen is named."""
    x, table = normal(rng, (1, 2, 40, 8), np.float32), np.ones(20, np.float32)
    options = {
        "score_mod": lambda score, b, h, q, k, table: score + table[k],
        "score_args": (table,),
    }
    seen = rng.random((40, 40)) < 0.9
    seen[:, 20:] = False
    assert np.isfinite(sdpa.attention(x, x, x, seen, **options)).all()
    seen[30, 25] = True
    with pytest.raises(IndexError, match=r"reads table out of range.*q = 30, k = 25"):
        sdpa.attention(x, x, x, seen, **options)


def test_a_mask_of_queries_alone(rng):
    x, seen = normal(rng, (1, 2, 40, 8), np.float32), rng.random(40) < 0.5
    found = sdpa.attention(x, x, x, mask_mod=lambda b, h, q, k, seen: seen[q], mask_args=(seen,))
    expected = sdpa.attention(x, x, x, np.broadcast_to(seen[:, None], (40, 40)))
    assert_same_bits(found, expected)


def test_gradients_of_a_large_array_to_its_end(rng):
    """Most pairs read the last of its elements, where their gradients, of sum 0, cancel."""
    x, table = normal(rng, (1, 2, 40, 8), np.float32), np.zeros(40_000, np.float32)

    def index(q, k):
        return np.clip((q * 40 + k) * 1000, 0, 39_999)

    def score(score, b, h, q, k, table):
        return score + table[index(q, k)]

    functions = {"score_mod": score, "score_args": (table,)}
    saved = sdpa.attention_forward(x, x, x, **functions)
    gradients = sdpa.attention_backward(x, x, x, x, *saved, **functions, needs=["score_args"])
    bias = np.zeros((2, 40, 40), np.float32)
    of_pairs = sdpa.attention_backward(x, x, x, x, *saved, bias, needs=["attn_mask"]).attn_mask
    expected = np.zeros(40_000)
    np.add.at(expected, index(*np.ogrid[:40, :40]), of_pairs.sum(axis=0))
    np.testing.assert_allclose(gradients.score_args[0], expected, rtol=1e-5, atol=1e-4)
