"""Outlines of boolean masks, biases per key: no bit depends on how the kernels read a mask.

What that costs and the memory that it takes: test_memory.py.
"""

import numpy as np
import pytest

import sdpa

N_Q, N_K = 200, 4400  # more keys than are looked at in one go


def documents(n_q, n_k, size):
    return (np.arange(n_q) // size)[:, None] == np.arange(n_k) // size


def squares(rng, n_q, n_k, size, share):
    chosen = rng.random((-(-n_q // size), -(-n_k // size))) < share
    return np.repeat(np.repeat(chosen, size, 0), size, 1)[:n_q, :n_k]


MASKS = {
    "documents": lambda rng: documents(N_Q, N_K, 70),
    "squares": lambda rng: squares(rng, N_Q, N_K, 300, 0.5),
    "elements": lambda rng: rng.random((N_Q, N_K)) < 0.3,
    "nothing": lambda rng: np.zeros((N_Q, N_K), bool),
    "everything": lambda rng: np.ones((N_Q, N_K), bool),
    "padding": lambda rng: np.arange(N_K)[None] < 4200,
    "of heads": lambda rng: np.stack([squares(rng, N_Q, N_K, s, 0.4) for s in (64, 150)]),
    "of the batch": lambda rng: np.stack([documents(N_Q, N_K, s) for s in (64, 128)])[:, None],
    "of other bytes": lambda rng: (squares(rng, N_Q, N_K, 90, 0.5) * np.uint8(6)).view(bool),
}
OPTIONS = {
    "alone": {},
    "causal": {"is_causal": True, "query_offset": 3000},
    "lengths": {"key_lengths": [4000, 300]},
    "invariant": {"invariant": True},
    "softcap": {"softcap": 3.0},
    "dropout": {"dropout_p": 0.25, "rng": 4},
}


def spaced(mask):
    """The same mask, in steps of two bytes, which has no outline."""
    return np.repeat(mask, 2, axis=-1)[..., ::2]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", MASKS)
def test_bits_do_not_depend_on_outlines(rng, isa, name, options):
    mask, options = MASKS[name](rng), OPTIONS[options]
    q, k, v, g = (rng.standard_normal((2, 2, n, 8), np.float32) for n in (N_Q, N_K, N_K, N_Q))
    bias = rng.standard_normal((N_Q, N_K), np.float32)
    for own, other in (
        ({"attn_mask": mask}, {"attn_mask": spaced(mask)}),
        ({"attn_mask": bias, "where": mask}, {"attn_mask": bias, "where": spaced(mask)}),
    ):
        expected = sdpa.attention_forward(q, k, v, workers=1, **other, **options)
        back = sdpa.attention_backward(g, q, k, v, *expected, workers=1, **other, **options)
        for workers in (1, 2):
            found = sdpa.attention_forward(q, k, v, workers=workers, **own, **options)
            grads = sdpa.attention_backward(g, q, k, v, *found, workers=workers, **own, **options)
            for a, b in zip((*found, *grads[:3]), (*expected, *back[:3]), strict=True):
                np.testing.assert_array_equal(a, b)


def test_two_masks_of_different_shapes(rng, isa):
    """Each has an outline of its own."""
    q, k, v = (rng.standard_normal((2, 2, n, 8), np.float32) for n in (N_Q, N_K, N_K))
    mask, where = documents(N_Q, N_K, 150), squares(rng, 1, N_K, 100, 0.5)
    expected = sdpa.attention_forward(q, k, v, spaced(mask & where))
    for a, b in zip(sdpa.attention_forward(q, k, v, mask, where=where), expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("name", ["jvp", "double backward", "statistics"])
def test_bits_of_other_passes(rng, name):
    mask = squares(rng, N_Q, N_K, 150, 0.4)
    q, k, v, g, a, b, c = (
        rng.standard_normal((2, n, 8), np.float32) for n in (N_Q, N_K, N_K, N_Q, N_Q, N_K, N_K)
    )

    def result(mask):
        if name == "statistics":
            return sdpa.attention_statistics(q, k, attn_mask=mask)
        if name == "jvp":
            return sdpa.attention_jvp(q, k, v, a, b, c, attn_mask=mask)
        saved = sdpa.attention_forward(q, k, v, mask)
        return sdpa.attention_double_backward(a, b, c, g, q, k, v, *saved, attn_mask=mask)

    for found, expected in zip(result(mask), result(spaced(mask)), strict=True):
        assert (found is None and expected is None) or found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("n_q", [8, 20, 130])
@pytest.mark.parametrize(
    "kind", ["finite", "infinite", "huge", "NaN", "of the batch", "float16", "reversed"]
)
@pytest.mark.parametrize("options", OPTIONS)
def test_bits_of_a_bias_per_key_are_those_of_its_copies(rng, isa, n_q, kind, options):
    """It is not written out for each query."""
    n_k = 300
    bias = rng.standard_normal((2, 1, 1, n_k), np.float32)
    bias = {
        "finite": bias[0],
        "infinite": np.where(rng.random(bias.shape) < 0.2, -np.inf, bias).astype(np.float32),
        "huge": bias * np.float32(3e37),
        "NaN": np.where(np.arange(n_k) == 150, np.nan, bias).astype(np.float32),
        "of the batch": bias,
        "float16": bias.astype(np.float16),
        "reversed": bias[..., ::-1],
    }[kind]
    chosen = OPTIONS[options] | ({"key_lengths": [300, 200]} if options == "lengths" else {})
    q, k, v, g = (rng.standard_normal((2, 2, n, 16), np.float32) for n in (n_q, n_k, n_k, n_q))
    results = []
    for mask in (bias, np.repeat(bias, n_q, axis=-2)):
        found = sdpa.attention_forward(q, k, v, mask, **chosen)
        grads = sdpa.attention_backward(g, q, k, v, *found, mask, **chosen)
        results.append((*found, *grads[:3]))
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)
