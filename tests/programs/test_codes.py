"""Codes of programs against the functions they come from, in float64."""

import numpy as np
import pytest
from support.programs import run

from sdpa._programs import _prepare

BATCH, HEADS, QUERIES, KEYS = 2, 3, 7, 6
N = max(QUERIES, KEYS)
GRID = dict(zip(("batch", "head", "query", "key"), np.ogrid[:BATCH, :HEADS, :QUERIES, :KEYS],
                strict=True))  # fmt: skip
RNG = np.random.default_rng(47)
SCORE = RNG.normal(size=(BATCH, HEADS, QUERIES, KEYS)) * 3
SLOPES = 2.0 ** -np.arange(1, HEADS + 1)
TABLE = RNG.normal(size=(HEADS, 2 * N - 1))
GRAPH = RNG.normal(size=(HEADS, 5))
DISTANCES = RNG.integers(0, 5, size=(BATCH, N, N))
DOCUMENTS = np.arange(N) // 3
OFFSETS = np.array([0, 3, 6, N])
BUCKETS = RNG.normal(size=(8, HEADS))
ANCESTORS = RNG.random((N, N)) < 0.5
GLOBAL = np.arange(N) == 2


def alibi(score, b, h, q, k, slopes):
    return score - slopes[h] * abs(q - k)


def softcap(score, b, h, q, k):
    return 20 * np.tanh(score / 20)


def capped_alibi(score, b, h, q, k, slopes):
    return np.where(q >= k, 20 * np.tanh(score / 20) - slopes[h] * (q - k), -np.inf)


def relative(score, b, h, q, k, table):
    return score + table[h, q - k + N - 1]


def scaled_relative(score, b, h, q, k, table, slopes):
    bias = table[h, q - k + N - 1]
    return score * np.exp(slopes[h] * bias) + bias * bias


def graph(score, b, h, q, k, bias, distances):
    return score + bias[h, distances[b, q, k]]


def log_relu(score, b, h, q, k):
    return np.log(np.maximum(score, 0) + 0.25)


def gate(score, b, h, q, k):
    return score / (1 + np.exp(-score))


def distance_scaled(score, b, h, q, k):
    return score * np.sqrt(1.0 + abs(q - k)) / np.log(q + 2.0)


def temperature(score, b, h, q, k, t, cap):
    return cap * np.tanh(score * np.exp(-t[h]) / cap)


def buckets(score, b, h, q, k, table):
    distance = np.maximum(q - k, 0)
    far = 2 + np.floor(np.log(np.maximum(distance, 1) / 2) / np.log(4.0) * 6).astype(int)
    return score + table[np.where(distance < 2, distance, np.minimum(far, 7)), h]


def mixed(score, b, h, q, k, slopes):
    low = np.clip(score, -1.5, 2.0) * np.sign(score)
    high = np.square(score) ** 1.5 + np.expm1(score / 4) - np.log1p(np.abs(score))
    return np.minimum(low, high) + np.abs(slopes[h] - score) + 2.0 ** -(h + 1.0) * score**3


def steps(score, b, h, q, k):
    whole, rest = divmod(q, 3)
    side = np.sign(k - q) * rest + np.trunc(k) + np.ceil(whole) + np.array(0.5)
    cut = np.select([q > k, q == k], [1.0, 0 - score[...]], np.trunc(+score / 2))
    seen = np.minimum(q > 1, k < 5) != (k > 1)
    return np.where(seen, cut * 2 ** (k % 3), side - score)


SCORES = [
    (alibi, (SLOPES,)),
    (softcap, ()),
    (capped_alibi, (SLOPES,)),
    (relative, (TABLE,)),
    (scaled_relative, (TABLE, SLOPES)),
    (graph, (GRAPH, DISTANCES)),
    (log_relu, ()),
    (gate, ()),
    (distance_scaled, ()),
    (temperature, (SLOPES, 7.0)),
    (buckets, (BUCKETS,)),
    (mixed, (SLOPES,)),
    (steps, ()),
]


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return abs(q - k) <= 2


def dilated(b, h, q, k):
    return (abs(q - k) <= 4) & ((q - k) % 2 == 0)


def natten(b, h, q, k):
    x, y = q // 3, q % 3
    x, y = np.clip(x, 1, 2), np.clip(y, 1, 1)
    return (abs(x - k // 3) <= 1) & (abs(y - k % 3) <= 1)


def prefix(b, h, q, k):
    return (k < 3) | (q >= k)


def documents(b, h, q, k, document):
    return (document[q] == document[k]) & (q >= k)


def inner_documents(b, h, q, k):
    return (DOCUMENTS[q] == DOCUMENTS[k]) & (q - OFFSETS[DOCUMENTS[q]] >= k - OFFSETS[DOCUMENTS[k]])


def diffusion(b, h, q, k):
    noised, other = q < 4, k < 4
    block, of_key = (q % 4) // 2, (k % 4) // 2
    diagonal = (block == of_key) & (noised == other)
    return diagonal | ((block > of_key) & noised & ~other) | ((block >= of_key) & ~noised & ~other)


def longformer(b, h, q, k, is_global):
    return (abs(q - k) <= 1) | is_global[q] | is_global[k]


def tree(b, h, q, k, ancestors):
    inside = np.clip(k - 2, 0, N - 1)
    return (k < 2) | ancestors[q, inside] & (k - 2 <= q)


def bits(b, h, q, k):
    return ((q ^ k) & 1 == 0) ^ (q << 1 > k) | (k >> 1 == ~q + 3)


def heads(b, h, q, k):
    return np.where(h % 2 == 0, q >= k, k - q < 2.5) & np.logical_not(np.logical_xor(b, q > 5))


MASKS = [
    (causal, ()),
    (window, ()),
    (dilated, ()),
    (natten, ()),
    (prefix, ()),
    (documents, (DOCUMENTS,)),
    (inner_documents, ()),
    (diffusion, ()),
    (longformer, (GLOBAL,)),
    (tree, (ANCESTORS,)),
    (bits, ()),
    (heads, ()),
]


def ids(cases):
    return [function.__name__ for function, _ in cases]


@np.errstate(all="ignore")
def direct(function, args, *score):
    """The function itself, on arrays."""
    grids = np.broadcast_arrays(*GRID.values())
    return function(*score, *grids, *(np.asarray(x) for x in args))


def assert_close(got, expected, rtol=1e-12):
    np.testing.assert_allclose(got, expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(("function", "args"), MASKS, ids=ids(MASKS))
def test_masks(function, args):
    outputs, _ = run(_prepare(True, function, args), 0, GRID)
    np.testing.assert_array_equal(outputs[0], direct(function, args))


@pytest.mark.parametrize(("function", "args"), SCORES, ids=ids(SCORES))
def test_scores(function, args):
    prepared = _prepare(False, function, args)
    expected = direct(function, args, SCORE)
    for variant in (0, 1):
        outputs, _ = run(prepared, variant, GRID | {"score": SCORE})
        assert_close(outputs[0], expected)


def differences(f, x, step=1e-5):
    """df/dx of an array function that works element by element, of fourth order."""
    near, far = f(x + step) - f(x - step), f(x + 2 * step) - f(x - 2 * step)
    return np.where(np.isfinite(near), (8 * near - far) / (12 * step), 0)


@pytest.mark.parametrize(("function", "args"), SCORES, ids=ids(SCORES))
@np.errstate(all="ignore")
def test_slopes(function, args):
    outputs, _ = run(_prepare(False, function, args), 1, GRID | {"score": SCORE})
    assert_close(outputs[1], differences(lambda s: direct(function, args, s), SCORE), 1e-7)


@pytest.mark.parametrize(("function", "args"), SCORES, ids=ids(SCORES))
@np.errstate(all="ignore")
def test_tangents(function, args):
    """The tangent, and its derivative, when the score and the floating arguments move."""
    prepared = _prepare(False, function, args)
    args = [np.asarray(x) for x in args]
    moves = [RNG.normal(size=x.shape) if x.dtype.kind == "f" else None for x in args]
    moved = RNG.normal(size=SCORE.shape)
    inputs = GRID | {"score": SCORE, "tangent": moved}

    def along(t):
        there = [x if d is None else x + t * d for x, d in zip(args, moves, strict=True)]
        return direct(function, there, SCORE + t * moved)

    expected = differences(lambda t: along(t), 0.0)
    outputs, _ = run(prepared, 2, inputs, moves)
    assert_close(outputs[2], expected, 1e-7)
    outputs, _ = run(prepared, 3, inputs, moves)
    assert_close(outputs[2], expected, 1e-7)
    tangent = lambda s: run(prepared, 2, inputs | {"score": s}, moves)[0][2]  # noqa: E731
    assert_close(outputs[3], differences(tangent, SCORE), 1e-6)


@pytest.mark.parametrize(("function", "args"), SCORES, ids=ids(SCORES))
@np.errstate(all="ignore")
def test_gradients_of_arguments(function, args):
    prepared = _prepare(False, function, args)
    args = [np.asarray(x) for x in args]
    floating = [i for i, x in enumerate(args) if x.dtype.kind == "f"]
    if not floating:
        assert prepared.codes[4] is prepared.codes[5] is None
        return
    upstream, second, moved = RNG.normal(size=(3, *SCORE.shape))
    moves = [RNG.normal(size=x.shape) for x in args]
    inputs = GRID | {"score": SCORE, "upstream": upstream, "second": second, "tangent": moved}
    _, first = run(prepared, 4, inputs)
    _, both = run(prepared, 5, inputs, moves)
    for i in floating:

        def objective(x, i=i):
            own = _prepare(False, function, [*args[:i], x, *args[i + 1 :]])
            outputs, _ = run(own, 3, inputs, moves)
            value = direct(function, [*args[:i], x, *args[i + 1 :]], SCORE)
            value = np.where(np.isfinite(value), value, 0)
            return np.array([(upstream * value).sum(),
                             (second * value).sum() + (upstream * outputs[2]).sum()])  # fmt: skip

        for index in np.ndindex(args[i].shape):
            unit = np.zeros(args[i].shape)
            unit[index] = 1
            expected = differences(lambda t, u=unit: objective(args[i] + t * u), 0.0)  # noqa: B023
            assert_close([first[i][index], both[i][index]], expected, 1e-6)


def test_parts_of_arrays():
    """One index after the other, whole axes, and an index that is a constant."""

    def parts(b, h, q, k, distances):
        row = distances[b]
        other = distances[:, q]
        return (
            (row[q][k] == 3) | (other[b, 0] > distances[..., 1][1, k]) | (distances[-1, 0][2] > 9)
        )

    outputs, _ = run(_prepare(True, parts, (DISTANCES,)), 0, GRID)
    b, _, q, k = np.broadcast_arrays(*GRID.values())
    expected = (DISTANCES[b, q, k] == 3) | (DISTANCES[b, q, 0] > DISTANCES[1, k, 1])
    np.testing.assert_array_equal(outputs[0], expected)


def test_the_shape_of_an_array():
    """In the words of NumPy and of PyTorch."""

    def shaped(b, h, q, k, distances):
        assert distances.size == distances.numel() == BATCH * N * N
        assert distances.size() == distances.shape == (BATCH, N, N)
        assert distances.size(1) == N
        assert distances.dim() == distances.ndim == 3
        first, second = distances
        return (first[q, k] > second[q, k]) | (second[k, q] == len(distances))

    outputs, _ = run(_prepare(True, shaped, (DISTANCES,)), 0, GRID)
    _, _, q, k = np.broadcast_arrays(*GRID.values())
    expected = (DISTANCES[0, q, k] > DISTANCES[1, q, k]) | (DISTANCES[1, k, q] == BATCH)
    np.testing.assert_array_equal(outputs[0], expected)
