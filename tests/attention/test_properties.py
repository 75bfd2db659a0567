"""Laws that hold for any shape, layout, dtype and option; hypothesis looks for exceptions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.helpers import (
    ARGUMENTS,
    BFLOAT16,
    LAYOUTS,
    SIZES,
    AttentionBounds,
    assert_widened_first,
    assert_within,
    check_attention,
    compute_type,
    named_alignment,
    unit_roundoff,
)

import sdpa

pytestmark = pytest.mark.usefixtures("isa")

lengths = st.one_of(st.integers(0, 20), st.sampled_from(SIZES), st.integers(0, 150))
widths = st.one_of(st.integers(0, 20), st.sampled_from([31, 32, 33, 63, 64, 65]))
layouts = st.sampled_from(sorted(LAYOUTS))


@st.composite
def broadcastable(draw, lead):
    """A shape that broadcasts to `lead`: some axes 1, some missing from the left."""
    return tuple(draw(st.sampled_from([n, 1])) for n in lead[draw(st.integers(0, len(lead))) :])


def drawn_mask(draw, rng, shape, kind, dtype):
    """None, a boolean mask, or a bias; it may hide no pair, some, or all."""
    if kind is None:
        return None
    mask = rng.random(shape) >= draw(st.sampled_from([0, 0.1, 0.5, 0.95, 1]))
    if kind == "bool":
        return mask
    bias = np.where(mask, rng.standard_normal(shape), -np.inf)
    return bias.astype(dtype if kind == "own" else np.float32)


def drawn_options(draw, rng, array, lead, n_k):
    """Each option half of the time, independently of the others."""
    options = {}
    if draw(st.booleans()):
        bound = st.one_of(st.none(), st.integers(0, 150))
        options["window"] = draw(st.one_of(st.none(), st.tuples(bound, bound)))
    if draw(st.booleans()):
        options["key_lengths"] = rng.integers(0, n_k + 1, draw(broadcastable(lead[:-1])))
    if draw(st.booleans()):
        options["query_offset"] = rng.integers(-20, 150, draw(broadcastable(lead[:-1])))
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.3, 1.5, 20.0, 1e4]))
    if draw(st.booleans()):
        sinks = array(draw(broadcastable(lead)), std=draw(st.sampled_from([1, 8])))
        if draw(st.booleans()):
            sinks = np.where(rng.random(sinks.shape) < 0.5, -np.inf, 1).astype(sinks.dtype)
        options["sinks"] = sinks
    if draw(st.booleans()):
        options["alibi_slopes"] = array(draw(broadcastable(lead)))
    if draw(st.booleans()):
        options["dropout_p"] = draw(st.sampled_from([0.1, 0.5, 0.99, 1.0]))
        options["rng"] = draw(st.integers(0, 2**64 - 1))
    return options


def key_dtypes(dtype):
    """The dtypes that key and value may have beside a query of `dtype`."""
    return [dtype, np.dtype(np.float16), BFLOAT16] if dtype == np.float32 else [dtype]


@st.composite
def problems(draw, dtype, narrow=False):
    """Keyword arguments of helpers.check_attention; `narrow`: key and value have 16 bits."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    batch = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    n_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    n_q, n_k = draw(lengths), draw(lengths)
    d_k, d_v = draw(widths), draw(widths)
    enable_gqa = draw(st.booleans())
    lead = (*batch, n_kv * group)
    if enable_gqa:
        q_lead = lead
        k_lead, v_lead = ((*draw(broadcastable(batch)), n_kv) for _ in range(2))
    elif draw(st.booleans()):
        q_lead, k_lead, v_lead = (draw(broadcastable(lead)) for _ in range(3))
        lead = np.broadcast_shapes(q_lead, k_lead, v_lead)
    else:
        q_lead = k_lead = v_lead = lead

    std = draw(st.sampled_from([1, 1, 1, 8, 25]))
    key_dtype = draw(st.sampled_from(key_dtypes(dtype)[1 if narrow else 0 :]))

    def array(shape, dtype=dtype, std=1):
        x = np.asarray(std * rng.standard_normal(shape)).astype(dtype)
        return LAYOUTS[draw(layouts)](x) if x.ndim > 1 else x

    shape = draw(broadcastable((*lead, n_q, n_k)))
    kind = draw(st.sampled_from([None, None, "bool", "own", "float32"]))
    mask = drawn_mask(draw, rng, shape, kind, dtype)
    drawn_bool = draw(st.sampled_from([None, None, "bool"]))
    scale = draw(st.sampled_from([None, None, 0.5, -0.25, 0.0, "array"]))
    options = drawn_options(draw, rng, array, lead, n_k)
    causal = [False, "upper_left"] + ["lower_right"] * ("query_offset" not in options)
    causal += [True] * (n_q > 1 or n_k <= 1 or "query_offset" in options)  # else it warns
    options |= {
        "query": array((*q_lead, n_q, d_k), std=std),
        "key": array((*k_lead, n_k, d_k), key_dtype),
        "value": array((*v_lead, n_k, d_v), key_dtype),
        "attn_mask": mask,
        "grad_out": array((*lead, n_q, d_v)),
        "grad_lse": draw(
            st.sampled_from([None, rng.standard_normal((*lead, n_q)).astype(compute_type(dtype))])
        ),
        "is_causal": draw(st.sampled_from(causal)),
        "scale": array(draw(broadcastable(lead))) if scale == "array" else scale,
        "where": drawn_mask(draw, rng, draw(broadcastable((*lead, n_q, n_k))), drawn_bool, dtype),
        "enable_gqa": enable_gqa,
    }
    additive = kind in ("own", "float32")
    tangents = []
    for name in ARGUMENTS:
        x = options.get(name)
        given = isinstance(x, np.ndarray) and (name != "attn_mask" or additive)
        given = given and draw(st.integers(0, 3)) > 0
        tangents.append(array(x.shape, x.dtype) if given else None)
    return options | {"tangents": tangents}


@settings(max_examples=100)
@given(data=st.data())
def test_anything_agrees_with_the_oracle(dtype, data):
    """Any combination of options: values, gradients, forward mode, second derivatives, figures."""
    check_attention(**data.draw(problems(dtype)))


@settings(max_examples=100)
@given(data=st.data())
def test_narrow_keys_are_those_widened_first(data):
    """Bit by bit, in every function and with any options; gradients are then rounded once."""
    assert_widened_first(**data.draw(problems(np.dtype(np.float32), narrow=True)))


@settings(max_examples=50)
@given(data=st.data())
def test_keys_may_come_in_any_order(dtype, data):
    x = data.draw(problems(dtype))
    n_k = x["key"].shape[-2]
    order = np.random.default_rng(0).permutation(n_k)
    options = {name: x[name] for name in ("scale", "enable_gqa")}
    q, k, v = x["query"], x["key"], x["value"]
    bounds = AttentionBounds(q, k, v, **options)
    one = sdpa.attention_forward(q, k, v, **options)
    two = sdpa.attention_forward(q, k[..., order, :], v[..., order, :], **options)
    assert_within(two.out, one.out.astype(np.float64), 2 * bounds.out)
    assert_within(two.lse, one.lse.astype(np.float64), 2 * bounds.lse)


@settings(max_examples=50)
@given(data=st.data(), cut=st.floats(0, 1))
def test_two_sets_of_keys_merge_into_one(dtype, data, cut):
    x = data.draw(problems(dtype))
    options = {name: x[name] for name in ("scale", "enable_gqa")}
    q, k, v = x["query"], x["key"], x["value"]
    n = round(cut * k.shape[-2])
    whole = sdpa.attention_forward(q, k, v, **options)
    parts = [
        sdpa.attention_forward(q, k[..., s, :], v[..., s, :], **options)
        for s in (slice(n), slice(n, None))
    ]
    merged = sdpa.merge_attention(*zip(*parts, strict=True))
    bounds = AttentionBounds(q, k, v, **options)
    # Each part is rounded to its dtype before it is merged.
    size = np.max([np.abs(p.out.astype(np.float64)) for p in parts], axis=0)
    assert_within(merged.lse, whole.lse.astype(np.float64), 4 * bounds.lse)
    e_out = 4 * bounds.out + (2 * unit_roundoff(dtype) + 8 * bounds.lse[..., None]) * size
    assert_within(merged.out, whole.out.astype(np.float64), e_out)


@settings(max_examples=50)
@given(data=st.data())
def test_rows_of_weights_sum_to_one_or_zero(dtype, data):
    x = data.draw(problems(dtype))
    q, k = x["query"], x["key"]
    options = {name: x[name] for name in ("is_causal", "scale", "enable_gqa")}
    if np.ndim(x["scale"]):
        options["scale"] = None  # heads of the value, which is not here, may be in its shape
    options |= named_alignment(q, options)
    w = sdpa.attention_weights(q, k, **options).astype(np.float64)
    assert (w >= 0).all()
    bounds = AttentionBounds(q, k, k, **options)
    assert_within(w.sum(axis=-1), w.any(axis=-1), bounds.stages["weights"].sum(axis=-1))
