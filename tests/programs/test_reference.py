"""Functions of the user in the oracle: forward by formula, derivatives by differences."""

import numpy as np
import pytest
from programs.test_codes import differences

from sdpa import reference
from sdpa.reference import arrays

LEAD, HEADS, QUERIES, KEYS, WIDTH = (2, 2), 3, 5, 6, 4
RNG = np.random.default_rng(48)
QUERY, GRAD = RNG.normal(size=(2, *LEAD, HEADS, QUERIES, WIDTH))
KEY, VALUE = RNG.normal(size=(2, *LEAD, HEADS, KEYS, WIDTH))
TABLE = RNG.normal(size=(HEADS, 2 * (QUERIES + KEYS)))
SLOPES = RNG.normal(size=4)
TYPES = np.array([0, 1, 1, 0, 1, 2])


def score(x, b, h, q, k, table, slopes, types):
    """Depends on everything, with a gradient for two arguments."""
    near = np.where(types[k] > 0, np.tanh(x), x**2 / 4)
    return near * np.exp(slopes[b] / 4) + table[h][q - k + QUERIES]


def mask(b, h, q, k, types):
    return (types[k] <= b) & (q + h >= k - 1)


ARGS = (TABLE, SLOPES, TYPES)
OPTIONS = {"score_mod": score, "score_args": ARGS, "mask_mod": mask, "mask_args": (TYPES,),
           "query_offset": np.array([[0, 1], [1, 2]]), "softcap": 4.0, "scale": 0.7,
           "alibi_slopes": np.array([0.1, 0.2, 0.3])}  # fmt: skip


def logits(query, key, args):
    """The logits of OPTIONS, pair by pair."""
    z = np.full((*LEAD, HEADS, QUERIES, KEYS), -np.inf)
    for index in np.ndindex(z.shape):
        *lead, h, i, k = index
        b, q = 2 * lead[0] + lead[1], i + OPTIONS["query_offset"][tuple(lead)]
        if mask(b, h, q, k, TYPES):
            x = 4 * np.tanh(0.7 * (query[*lead, h, i] @ key[*lead, h, k]) / 4)
            z[index] = score(x, b, h, q, k, *args) - OPTIONS["alibi_slopes"][h] * abs(k - q)
    return z


@np.errstate(all="ignore")
def test_forward():
    z = logits(QUERY, KEY, ARGS)
    got = reference.attention_weights(QUERY, KEY, stage="biased", **OPTIONS)
    np.testing.assert_allclose(got, z, rtol=1e-13)
    out, lse = reference.attention_forward(QUERY, KEY, VALUE, **OPTIONS)
    np.testing.assert_allclose(lse, np.log(np.exp(z).sum(-1)), rtol=1e-13)
    np.testing.assert_allclose(out, np.nan_to_num(np.exp(z - lse[..., None])) @ VALUE, rtol=1e-12)


@pytest.mark.parametrize(
    "bounds", [{"min": -0.2, "max": 0.3}, {"max": 0.3, "min": -0.2}, {"max": 0.3}, {"min": -0.2}]
)
def test_gradients_of_clip(bounds):
    """By names in any order, and with one bound alone."""

    def by_name(x, b, h, q, k):
        return np.clip(x, **bounds)

    def in_order(x, b, h, q, k):
        return np.clip(x, bounds.get("min"), bounds.get("max"))

    def by_hand(x, b, h, q, k):
        return np.minimum(np.maximum(x, bounds.get("min", -9)), bounds.get("max", 9))

    def gradients(function):
        saved = reference.attention_forward(QUERY, KEY, VALUE, score_mod=function)
        return reference.attention_backward(GRAD, QUERY, KEY, VALUE, *saved, score_mod=function)

    for function in (by_name, in_order):
        for got, expected in zip(gradients(function)[:3], gradients(by_hand)[:3], strict=True):
            np.testing.assert_array_equal(got, expected)


def moved(names, t, moves):
    """Operands and options, those in `names` moved along their directions."""
    found = {"query": QUERY, "key": KEY, "value": VALUE}
    found = {name: x + t * moves[name] if name in names else x for name, x in found.items()}
    if "score_args" in names:
        pairs = zip(ARGS, moves["score_args"], strict=True)
        return found | OPTIONS | {
            "score_args": tuple(x if d is None else x + t * d for x, d in pairs)
        }  # fmt: skip
    return found | OPTIONS


def directions(rng):
    found = {name: rng.normal(size=x.shape)
             for name, x in (("query", QUERY), ("key", KEY), ("value", VALUE))}  # fmt: skip
    return found | {"score_args": (rng.normal(size=TABLE.shape), rng.normal(size=4), None)}


def dot(gradient, direction):
    if isinstance(gradient, tuple):
        return sum(dot(g, d) for g, d in zip(gradient, direction, strict=True) if d is not None)
    return (gradient * direction).sum()


NAMES = ("query", "key", "value", "score_args")


@pytest.mark.parametrize("name", NAMES)
def test_backward(name, rng):
    moves, grad_lse = directions(rng), rng.normal(size=(*LEAD, HEADS, QUERIES))
    seen = np.isfinite(reference.attention_forward(QUERY, KEY, VALUE, **OPTIONS).lse)

    def loss(t):
        out, lse = reference.attention_forward(**moved([name], t, moves))
        return (GRAD * out).sum() + (grad_lse * np.where(seen, lse, 0)).sum()

    saved = reference.attention_forward(QUERY, KEY, VALUE, **OPTIONS)
    got = reference.attention_backward(
        GRAD, QUERY, KEY, VALUE, *saved, grad_lse=grad_lse, needs=NAMES, **OPTIONS
    )
    if name == "score_args":
        assert got.score_args[2] is None
    np.testing.assert_allclose(
        dot(getattr(got, name), moves[name]), differences(loss, 0.0), rtol=1e-7
    )


def test_forward_mode(rng):
    moves = directions(rng)
    tangents = {f"{name}_t": moves[name] for name in NAMES}
    got = reference.attention_jvp(QUERY, KEY, VALUE, **tangents, **OPTIONS)
    expected = differences(lambda t: reference.attention_forward(**moved(NAMES, t, moves)).out, 0.0)
    np.testing.assert_allclose(got.out_t, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["grad_out", *NAMES])
def test_double_backward(name, rng):
    moves, along = directions(rng), directions(rng)
    moves["grad_out"] = rng.normal(size=GRAD.shape)
    gg = {f"gg_{key}": along[key] for key in NAMES}

    def phi(t):
        own = moved([name], t, moves)
        grad = GRAD + t * moves["grad_out"] if name == "grad_out" else GRAD
        saved = reference.attention_forward(**own)
        got = reference.attention_backward(grad, out=saved.out, lse=saved.lse, needs=NAMES, **own)
        return sum(dot(getattr(got, key), along[key]) for key in NAMES)

    saved = reference.attention_forward(QUERY, KEY, VALUE, **OPTIONS)
    got = reference.attention_double_backward(
        gg["gg_query"], gg["gg_key"], gg["gg_value"], GRAD, QUERY, KEY, VALUE, *saved,
        gg_score_args=gg["gg_score_args"], needs=("grad_out", *NAMES), **OPTIONS,
    )  # fmt: skip
    np.testing.assert_allclose(
        dot(getattr(got, name), moves[name]), differences(phi, 0.0), rtol=1e-6
    )


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_packed_sequences(dropout_p, rng):
    """b is the sequence, positions begin anew, gradients of arguments are sums."""
    cu = [0, 3, 3, 8]
    x = rng.normal(size=(4, 8, HEADS, WIDTH))
    query, key, value, grad = x
    own = {name: OPTIONS[name] for name in ("score_mod", "score_args", "mask_mod", "mask_args")}
    own |= {"dropout_p": dropout_p, "rng": 3}
    arguments = {"query": query, "key": key, "value": value} | own
    out, lse = reference.packed(reference.attention_forward, cu, cu, **arguments)
    got = reference.packed(
        reference.attention_backward, cu, cu, grad_out=grad, out=out, lse=lse,
        needs=NAMES, **arguments,
    )  # fmt: skip
    total = [np.zeros(TABLE.shape), np.zeros(4)]
    for s, rows in enumerate((slice(0, 3), slice(3, 8))):
        b = 2 * s  # the second sequence is empty
        # Entry b of a batch, the others without a gradient.
        q, k, v, g = (
            np.stack([y[rows].swapaxes(0, 1)] * (b + 1)) for y in (query, key, value, grad)
        )
        g[:b] = 0
        o, one = reference.attention_forward(q, k, v, **own)
        np.testing.assert_allclose(out[rows].swapaxes(0, 1), o[b], rtol=1e-13)
        part = reference.attention_backward(g, q, k, v, o, one, needs=NAMES, **own)
        np.testing.assert_allclose(got.query[rows].swapaxes(0, 1), part.query[b], rtol=1e-12)
        total = [a + b for a, b in zip(total, part.score_args, strict=False)]
    for a, b in zip(got.score_args, (*total, None), strict=True):
        if b is None:
            assert a is None
        else:
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


def test_pairs_that_a_mask_hides_are_never_asked_about():
    table = np.arange(float(QUERIES))
    got = reference.attention_weights(
        QUERY, KEY, is_causal=True, stage="biased", score_args=(table,),
        score_mod=lambda score, b, h, q, k, table: table[q - k] + 0 * score,
    )  # fmt: skip
    i, j = np.ogrid[:QUERIES, :KEYS]
    expected = np.where(i >= j, np.float64(i - j), -np.inf)
    np.testing.assert_array_equal(got, np.broadcast_to(expected, got.shape))


def test_one_head_without_an_axis():
    query, key = QUERY[0, 0, 0], KEY[0, 0, 0]
    own = {"score_mod": lambda score, b, h, q, k: score + b + 2 * h + q - k}
    got = reference.attention_weights(query, key, stage="biased", **own)
    i, j = np.ogrid[:QUERIES, :KEYS]
    np.testing.assert_allclose(got, query @ arrays.transpose(key) / 2 + i - j, rtol=1e-13)
