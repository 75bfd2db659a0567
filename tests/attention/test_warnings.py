"""Arguments that are valid and probably not meant warn, at the caller's line, with the remedy."""

import inspect
import warnings

import ml_dtypes
import numpy as np
import pytest
from support.calls import ADDITIVE, ATTENTION, BILINEAR, COSINE, SHAW

import sdpa
from sdpa import blocks

MASK = "attn_mask: expected a bias.* pass attn_mask != 0"
CAUSAL = 'is_causal: True lets one query see key 0 alone.*"lower_right".*query_offset='
FUNCTIONS = {**ATTENTION, **ADDITIVE, **COSINE, **BILINEAR, **SHAW}


def call(function, **options):
    """A call with Lq = 5 and Lk = 7, or with the shapes of `options`."""
    return function(**FUNCTIONS[function](), **options)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [np.float32, "f4"])
def test_a_floating_mask_of_zeros_and_ones(function, dtype):
    with pytest.warns(UserWarning, match=MASK) as caught:
        call(function, attn_mask=np.tri(5, 7, dtype=dtype))
    assert caught[0].filename == __file__  # where the user reads it


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("order", ["=", "S"])
@pytest.mark.parametrize("shape", [(40, 70), (3, 40, 70), (40, 1), (70,), (3, 1, 70)])
def test_every_layout_of_such_a_mask(rng, dtype, order, shape):
    x = np.zeros((3, 40, 4), dtype), np.zeros((3, 70, 4), dtype)
    mask = (rng.random(shape) < 0.5).astype(dtype)
    mask.flat[[0, -1]] = 0, 1

    def layouts(m):
        m = m.astype(m.dtype.newbyteorder(order))
        return m, np.asfortranarray(m), m[..., ::-1], np.repeat(m, 2, -1)[..., ::2]

    for m in layouts(mask):
        with pytest.warns(UserWarning, match=MASK):
            sdpa.attention_weights(*x, attn_mask=m)
    for other in (2, -1, 0.5, -np.inf, np.nan):
        changed = mask.copy()
        changed.flat[rng.integers(mask.size)] = other
        for m in layouts(changed):
            sdpa.attention_weights(*x, attn_mask=m)  # warnings are errors in these tests


def test_masks_that_are_not_meant_as_such_do_not_warn():
    x = np.zeros((5, 4), np.float32), np.zeros((7, 4), np.float32)
    for mask in (
        np.zeros((5, 7), np.float32),
        np.ones((5, 7), np.float32),
        -np.zeros((5, 7), np.float32),
        np.tri(5, 7, dtype=bool),
        np.where(np.tri(5, 7), np.float32(0), -np.inf).astype(np.float32),
        np.zeros((5, 0), np.float32)[:, :0].reshape(5, 0),
    ):
        key = x[1][: mask.shape[1]]
        sdpa.attention_weights(x[0], key, attn_mask=mask)
    value = np.ones((7, 4), np.float32)
    sdpa.scaled_dot_product_attention(*x, value, np.tri(5, 7, dtype=np.float32))  # PyTorch's


def one_query(function):
    """The arguments of FUNCTIONS with a single query, before the cache of keys."""
    x = FUNCTIONS[function]()
    rows = ("query", "query_t", "gg_query", "grad_out", "out")
    return {
        name: a[..., :1, :] if name in rows else a[..., :1] if name == "lse" else a
        for name, a in x.items()
    }


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_one_causal_query_over_many_keys(function):
    x = one_query(function)
    with pytest.warns(UserWarning, match=CAUSAL) as caught:
        function(**x, is_causal=True)
    assert caught[0].filename == __file__
    for options in (
        {"is_causal": "upper_left"},
        {"is_causal": "lower_right"},
        {"is_causal": True, "query_offset": 6},
        {"is_causal": False},
    ):
        function(**x, **options)


def test_one_causal_query_of_a_packed_sequence():
    x = np.ones((4, 2, 8), np.float32), np.ones((9, 2, 8), np.float32)
    cu = {"cu_seqlens_q": [0, 3, 4], "cu_seqlens_k": [0, 3, 9]}
    with pytest.warns(UserWarning, match=CAUSAL):
        sdpa.attention_statistics(*x, is_causal=True, **cu)
    sdpa.attention_statistics(*x, is_causal="lower_right", **cu)
    same = {"cu_seqlens_q": [0, 3, 4], "cu_seqlens_k": [0, 8, 9]}
    sdpa.attention_statistics(*x, is_causal=True, **same)  # one query, one key


def test_one_causal_query_over_the_keys_of_a_length():
    x, key = np.ones((1, 4), np.float32), np.ones((5, 4), np.float32)
    with pytest.warns(UserWarning, match=CAUSAL):
        sdpa.attention(x, key, key, is_causal=True, key_lengths=2)
    sdpa.attention(x, key, key, is_causal=True, key_lengths=1)


def test_one_key_or_pytorchs_signature_does_not_warn():
    x = np.ones((1, 4), np.float32)
    sdpa.attention(x, x, x, is_causal=True)
    key = np.ones((5, 4), np.float32)
    sdpa.scaled_dot_product_attention(x, key, key, is_causal=True)


def test_blocks_warn_as_the_whole_would():
    x = np.ones((1, 4), np.float32), *np.ones((2, 9, 4), np.float32)
    with pytest.warns(UserWarning, match=CAUSAL):
        blocks.attend(*x, is_causal=True)
    with pytest.warns(UserWarning, match=MASK):
        blocks.attend(*np.ones((3, 9, 4), np.float32), attn_mask=np.tri(9, dtype=np.float32))


def test_one_key_of_a_cache_does_not_warn():
    x = np.ones((2, 1, 1, 4), np.float32), *np.ones((2, 2, 1, 9, 4), np.float32)
    sdpa.attention(*x, is_causal=True, key_lengths=1)
    sdpa.attention(*x, is_causal=True, key_lengths=[1, 0])
    with pytest.warns(UserWarning, match=CAUSAL):
        sdpa.attention(*x, is_causal=True, key_lengths=[1, 2])


FAR = np.array([-(2**63), 2**63 - 1])


@pytest.mark.parametrize(
    ("cu_q", "cu_k"),
    [(FAR, FAR), (None, [0, 9]), ([0, 9], None), (3, [0, 9]), ([0, 9], 3), ([0, 9], [0, 2, 9])],
)
def test_packed_sequences_that_are_refused_do_not_warn_first(cu_q, cu_k):
    x = np.ones((3, 9, 1, 4), np.float32)
    with pytest.raises(ValueError, match=r"cu_seqlens_[qk]: expected"):
        sdpa.attention(*x, is_causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


def test_operands_that_are_refused_do_not_warn_first():
    x = np.ones((5, 4), np.float32)
    with pytest.raises(ValueError, match="query: expected at least two axes"):
        sdpa.attention(x[0], x, x, is_causal=True)
    none = np.array([0])
    sdpa.attention(*x[:, None].repeat(3, 0).reshape(3, 5, 1, 4), is_causal=True,
                   cu_seqlens_q=none, cu_seqlens_k=none)  # fmt: skip


def test_a_part_of_a_bias_is_not_taken_for_a_mask():
    x = np.ones((3, 9, 4), np.float32)
    bias = np.tri(9, dtype=np.float32)
    bias[:, 4:] = 0.5
    blocks.attend(*x, block=4, attn_mask=bias)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        blocks.attend(*x, block=4, attn_mask=np.tri(9, dtype=np.float32))
    assert len(caught) == 1


def test_no_warning_of_an_argument_that_was_not_given():
    x = np.eye(4, dtype=np.float32)
    sdpa.shaw_attention(x, x, x, np.eye(7, 4, dtype=np.float32), scale=1.0)
    table = np.eye(32, 2, dtype=np.float32)
    x = np.ones((2, 4, 4), np.float32)
    out, lse = sdpa.attention_forward(x, x, x, sdpa.bias.t5_relative(table, 4, 4) + np.float32(0.5))
    sdpa.bias.t5_attention_backward(x, x, x, x, table, out, lse)


def test_a_warning_as_an_error_ends_the_call():
    x = np.ones((3, 5, 4), np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=MASK):
            sdpa.attention(x, x, x, np.tri(5, dtype=np.float32))
        with pytest.raises(UserWarning, match=CAUSAL):
            sdpa.attention(x[:, :1], x, x, is_causal=True)


def test_functions_composed_of_others_warn_once():
    x = np.ones((3, 5, 4), np.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        sdpa.cosine_attention(x, x, x, attn_mask=np.tri(5, dtype=np.float32))
    assert len(caught) == 1


# --------------------------------------------------------------------- a value in place of a mask

WHOLE_ROWS = (sdpa.attention_weights, sdpa.attention_statistics, sdpa.attention_received)


@pytest.mark.parametrize("function", WHOLE_ROWS, ids=lambda f: f.__name__)
def test_a_value_is_not_taken_for_a_mask(function):
    """With 64 tokens of width 64 it has the shape of a mask."""
    x = np.ones((64, 64), np.float32)
    with pytest.raises(TypeError, match=r"takes 2 positional arguments.*value is no argument"):
        function(x, x, x)
    with pytest.raises(TypeError, match="unexpected keyword argument 'value'"):
        function(x, x, value=x)
    options = list(inspect.signature(function).parameters.values())[2:]
    assert {p.kind for p in options} == {inspect.Parameter.KEYWORD_ONLY}
