"""No byte outside the arrays is touched: each array ends, or begins, at a forbidden page.

A violation is a segmentation fault in the test that pytest names last.
"""

import itertools

import numpy as np
import pytest
from support.guard import guarded, guarded_results
from support.helpers import (
    ARGUMENTS,
    along,
    check_attention,
    compute_type,
    differentiable,
    normal,
)
from support.machine import LINUX

import sdpa

pytestmark = pytest.mark.usefixtures("isa")

LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33)


@LINUX
def test_the_guard_guards(pages):
    """The next address after or before an array lies in a page without access."""
    with guarded_results(pages):
        result = np.empty(5, np.float32)
    for x in (guarded(pages, np.zeros(5, np.float32)), result):
        address = x.ctypes.data
        edge = address + x.nbytes if pages.at_end else address - 1
        with open("/proc/self/maps") as maps:
            ranges = [line.split()[:2] for line in maps]
        (rights,) = (
            rights
            for span, rights in ranges
            if int(span.split("-")[0], 16) <= edge < int(span.split("-")[1], 16)
        )
        assert rights.startswith("---")


def everything(pages, q, k, v, g, attn_mask=None, **options):
    """Call every function of attention between guard pages, then check the values."""
    with guarded_results(pages):
        out, lse = sdpa.attention_forward(q, k, v, attn_mask, **options)
        needs = ("query", "key", "value")
        if attn_mask is not None and attn_mask.dtype != bool:
            needs += ("attn_mask",)
        sdpa.attention_backward(g, q, k, v, out, lse, attn_mask, needs=needs, **options)
        sdpa.attention_weights(q, k, attn_mask=attn_mask, **options)
        sdpa.merge_attention([out, out], [lse, lse])
    mine = guarded(pages, np.zeros_like(out))
    sdpa.attention(q, k, v, attn_mask, out=mine, **options)
    np.testing.assert_array_equal(mine, out)
    check_attention(q, k, v, attn_mask, grad_out=g, **options)


@pytest.mark.parametrize("n_q", LENGTHS)
def test_sizes_around_the_lanes(rng, dtype, pages, n_q):
    for n_k, d in itertools.product(LENGTHS, (1, 3, 8, 17)):
        q, k, v, g = (
            guarded(pages, normal(rng, shape, dtype))
            for shape in ((n_q, d), (n_k, d), (n_k, d), (n_q, d))
        )
        options = {"is_causal": "upper_left" if (n_k + d) % 2 else False}
        out, lse = sdpa.attention_forward(q, k, v, **options)
        with guarded_results(pages):
            sdpa.attention_forward(q, k, v, **options)
            sdpa.attention_backward(g, q, k, v, guarded(pages, out), guarded(pages, lse), **options)
            sdpa.attention_weights(q, k, **options)


@pytest.mark.parametrize(("n_q", "n_k"), [(1, 130), (49, 129), (97, 127), (130, 33)])
@pytest.mark.parametrize("d", [1, 7, 16, 65])
def test_sizes_around_the_blocks(rng, dtype, pages, n_q, n_k, d):
    q, k, v, g = (
        guarded(pages, normal(rng, (2, *shape), dtype))
        for shape in ((n_q, d), (n_k, d), (n_k, d + 1), (n_q, d + 1))
    )
    bias = normal(rng, (2, n_q, n_k), compute_type(dtype))
    bias[..., n_k // 2] = -np.inf
    for mask in (None, bias, bias[:1], bias[:, :1], bias[..., :1], bias < 0.5, bias[0, 0] < 0.5):
        mask = None if mask is None else guarded(pages, mask)
        everything(pages, q, k, v, g, mask, is_causal="upper_left")


def test_reversed_and_interleaved(rng, dtype, pages):
    """Negative strides, and rows that several heads share."""
    for n_q, n_k, d in ((5, 9, 3), (33, 130, 17)):
        q, k, v, g = (
            guarded(pages, normal(rng, (n, 2, d), dtype)).swapaxes(0, 1)
            for n in (n_q, n_k, n_k, n_q)
        )
        mask = guarded(pages, normal(rng, (n_q, n_k), dtype))
        everything(pages, q, k, v, g, mask)
        back = np.s_[:, ::-1, ::-1]
        everything(pages, q[back], k[back], v[back], g[back], mask[::-1, ::-1])
        everything(pages, q[:, ::2], k[:, ::2], v[:, ::2], g[:, ::2])


OPTIONS = {
    "plain": {},
    "softcap, window": {"softcap": 1.5, "window": (20, 2)},
    "sinks, ALiBi, causal": {"sinks": 2, "alibi_slopes": 2, "is_causal": True, "query_offset": 3},
    "mask, lengths": {"attn_mask": "whole", "key_lengths": 0.75},
    "scale, where": {"scale": 2, "where": "whole", "attn_mask": "row"},
    "where over keys": {"where": "column", "attn_mask": "whole"},
    "mask over rows, dropout": {"attn_mask": "row", "dropout_p": 0.4, "rng": 9},
    "mask over keys": {"attn_mask": "column", "softcap": 2.0, "is_causal": "lower_right"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_and_second_order(rng, dtype, pages, name):
    """Every function with every option; arguments, tangents and results are guarded."""

    def argument(*shape):
        return guarded(pages, normal(rng, shape, dtype))

    for n_q, n_k, d in ((1, 1, 1), (5, 9, 3), (49, 130, 17), (97, 127, 8)):
        options = dict(OPTIONS[name])
        for per_head in {"sinks", "alibi_slopes", "scale"} & set(options):
            options[per_head] = argument(options[per_head])
        if "key_lengths" in options:
            options["key_lengths"] = int(options["key_lengths"] * n_k)
        shape = {"whole": (2, n_q, n_k), "row": (1, n_k), "column": (n_q, 1)}
        if "attn_mask" in options:
            options["attn_mask"] = argument(*shape[options["attn_mask"]])
        if "where" in options:
            options["where"] = guarded(pages, rng.random(shape[options["where"]]) < 0.7)
        q, k, v, g = (argument(2, *s) for s in ((n_q, d), (n_k, d), (n_k, d + 1), (n_q, d + 1)))
        a, b, c = (argument(*x.shape) for x in (q, k, v))
        tangents = [a, b, c]
        tangents += [
            None if x is None else argument(*x.shape) for x in differentiable(options).values()
        ]
        needs = [*ARGUMENTS[:3], *(x for x in ARGUMENTS[3:] if x in options)]
        grad_lse = guarded(pages, normal(rng, (2, n_q), compute_type(dtype)))
        undropped = {x: y for x, y in options.items() if x not in ("dropout_p", "rng")}
        with guarded_results(pages):
            saved = sdpa.attention_forward(q, k, v, **options)
            sdpa.attention_backward(g, q, k, v, *saved, grad_lse=grad_lse, needs=needs, **options)
            sdpa.attention_jvp(q, k, v, a, b, c, **along(tangents, "{}_t"), **options)
            sdpa.attention_double_backward(
                a, b, c, g, q, k, v, *saved, grad_lse=grad_lse, needs=["grad_out", *needs],
                **along(tangents, "gg_{}"), **options,
            )  # fmt: skip
            sdpa.attention_statistics(q, k, **undropped)
            for stage in ("scores", "capped", "biased", "weights"):
                sdpa.attention_weights(q, k, stage=stage, **options)
            sdpa.attention_received(q, k, **options)
        # Correct values show that nothing beside the arguments was read.
        check_attention(q, k, v, grad_out=g, grad_lse=grad_lse, tangents=tangents, **options)
