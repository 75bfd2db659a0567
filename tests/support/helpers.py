"""Comparison with the oracle, layouts of arrays in memory, independent oracles."""

import itertools

import ml_dtypes
import numpy as np
from support import oracle
from support.bounds import AttentionBounds as AttentionBounds
from support.bounds import compute_type as compute_type
from support.bounds import unit_roundoff as unit_roundoff

import sdpa
from sdpa import _core
from sdpa.reference import arrays

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

# Sizes where a kernel may change its path: a vector of either type, a query block (48, 96), a key
# block (128), and their neighbours.
SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 47, 48, 49, 95, 96, 97, 127, 128, 129)


def normal(rng, shape, dtype, std=1.0):
    """N(0, std^2) rounded to dtype, for both the routines and the oracle."""
    return (std * rng.standard_normal(shape)).astype(dtype)


# ------------------------------------------------------------------------------------ comparison


def named_alignment(query, options):
    """The causal option by its name where there is one query, of which True warns."""
    if options.get("is_causal") is True and query.shape[-2] == 1:
        return {"is_causal": "upper_left"}
    return {}


def assert_within(actual, expected, bound, what=""):
    """Assert equal shapes, the same NaN and Inf, and all other elements within `bound`."""
    actual = np.asarray(actual)
    assert actual.shape == expected.shape, f"{what}: {actual.shape}, expected {expected.shape}"
    actual = actual.astype(np.float64)
    bound = np.broadcast_to(bound, expected.shape)
    with np.errstate(invalid="ignore"):
        distance = abs(actual - expected)
        if (distance <= bound).all():  # which NaN is not
            return
    finite = np.isfinite(expected)
    with np.errstate(invalid="ignore"):
        error = np.where(finite, distance, 0)
        same = np.where(finite, error <= bound, (actual == expected) | np.isnan(actual + expected))
        same &= np.isnan(actual) == np.isnan(expected)
    if same.all():
        return
    at = tuple(int(i) for i in np.argwhere(~same)[0])
    raise AssertionError(
        f"{what}: {np.count_nonzero(~same)} of {same.size} elements differ; at {at} "
        f"{actual[at]:.9g} for {expected[at]:.9g}, error {error[at]:.3g}, bound {bound[at]:.3g}"
    )


def check_attention(query, key, value, attn_mask=None, *, grad_out=None, tangents=None, **options):
    """The functions on attention against the oracle: dtypes, shapes, and values in the bounds.

    Forward, weights, what keys receive; the backward where grad_out is given, with grad_lse if that
    is; where `tangents` are, those of ARGUMENTS (None is zero), also forward mode, double backward,
    statistics and the other stages of the weights. Returns the result of the forward.
    """
    dtype = native(query.dtype)
    grad_lse = options.pop("grad_lse", None)
    options |= {"attn_mask": attn_mask}
    options |= named_alignment(query, options)
    operands = (query, key, value)
    bounds = oracle.bounds(
        *operands, grad_out=grad_out, grad_lse=grad_lse, tangents=tangents, **options
    )
    expected = oracle.attention_forward(*operands, **options)
    got = sdpa.attention_forward(*operands, **options)
    _check(got.out, expected.out, bounds.out, dtype, "out")
    _check(got.lse, expected.lse, bounds.lse, compute_type(dtype), "lse")
    assert_same_bits(sdpa.attention(*operands, **options), got.out)

    # Weights have no leading axes that only value and mask have.
    q, _ = arrays.broadcast(query, key, enable_gqa=options.get("enable_gqa", False))
    if q.shape[:-2] == bounds.lead:
        for stage, bound in bounds.stages.items():
            if stage == "weights" or tangents is not None:
                weights = sdpa.attention_weights(query, key, stage=stage, **options)
                true = oracle.attention_weights(query, key, stage=stage, **options)
                _check(weights, true, bound, dtype, stage)
        _check_chosen(query, key, bounds, options)
        if tangents is not None:
            _check_statistics(query, key, bounds, options)

    arguments = dict(zip(ARGUMENTS[:3], operands, strict=True)) | differentiable(options)
    needs = tuple(name for name, x in arguments.items() if x is not None)
    if grad_out is not None:
        options |= {"grad_lse": grad_lse, "needs": needs}
        ours = sdpa.attention_backward(grad_out, *operands, *got, **options)
        true = oracle.attention_backward(grad_out, *operands, *expected, **options)
        for name in needs:
            bound = bounds.scale_gradient if name == "scale" else getattr(bounds, name)
            _check_gradient(ours, true, name, bound, arguments[name])
    if tangents is not None:
        _check_second(operands, tangents, grad_out, got, expected, bounds, arguments, options)
    return got


ARGUMENTS = ("query", "key", "value", "attn_mask", "sinks", "scale")


def differentiable(options):
    """{name: array} of the options that have gradients; None where there is no such array."""
    mask, scale = options.get("attn_mask"), options.get("scale")
    return {
        "attn_mask": None if mask is None or mask.dtype == bool else mask,
        "sinks": options.get("sinks"),
        "scale": scale if isinstance(scale, np.ndarray) else None,
    }


def along(tangents, pattern):
    """The tangents of options as keyword arguments, named like "{}_t"; None where not given."""
    return {
        pattern.format(name): tangent
        for name, tangent in zip(ARGUMENTS[3:], tangents[3:], strict=True)
    }


def native(dtype):
    """dtype in native byte order, the only one that ml_dtypes has."""
    return dtype if dtype == BFLOAT16 else dtype.newbyteorder("=")


def _check(actual, expected, bound, dtype, what):
    assert actual.dtype == dtype, what
    assert_within(actual, expected, bound, what)


def _check_gradient(ours, true, name, bound, argument):
    assert getattr(ours, name).shape == np.shape(argument), name
    actual, expected = (getattr(gradients, name) for gradients in (ours, true))
    _check(actual, expected, bound, native(argument.dtype), f"gradient of {name}")


def _check_chosen(query, key, bounds, options):
    """The weights, and those that keys receive, for all heads and queries and for some."""
    dtype = native(query.dtype)
    every = oracle.attention_weights(query, key, stage="weights", **options)
    heads = slice(None, None, -1) if len(bounds.lead) else None
    for choice in ({}, {"heads": heads, "queries": slice(1, None, 2)}, {"queries": [-1, 0, 0]}):
        if query.shape[-2] == 0 and "heads" not in choice:
            continue
        chosen = options | choice
        pick = (
            ...,
            choice.get("heads") or slice(None),
            choice.get("queries", slice(None)),
            slice(None),
        )
        pick = pick if heads else (..., *pick[2:])
        true = every[pick]
        total, largest = (bound[pick] for bound in bounds.received)
        ours = sdpa.attention_received(query, key, **chosen)
        kind = compute_type(dtype)
        _check(ours.total, true.sum(axis=-2), total.sum(axis=-2), kind, "total received")
        highest, allowed = (x.max(axis=-2, initial=0) for x in (true, largest))
        _check(ours.largest, highest, allowed, kind, "largest received")
        if choice:
            weights = sdpa.attention_weights(query, key, **chosen)
            _check(weights, true, bounds.stages["weights"][pick], dtype, "chosen weights")


def _check_statistics(query, key, bounds, options):
    options = {name: x for name, x in options.items() if name not in ("dropout_p", "rng")}
    ours = sdpa.attention_statistics(query, key, **options)
    true = oracle.attention_statistics(query, key, **options)
    for name, actual, expected, bound in zip(
        ours._fields, ours, true, bounds.statistics, strict=True
    ):
        _check(actual, expected, bound, compute_type(native(query.dtype)), name)


def _check_second(operands, tangents, grad_out, got, expected, bounds, arguments, options):
    """Forward mode and double backward."""
    plain = {name: x for name, x in options.items() if name not in ("grad_lse", "needs")}
    moves = along(tangents, "{}_t")
    ours = sdpa.attention_jvp(*operands, *tangents[:3], **plain, **moves)
    true = oracle.attention_jvp(*operands, *tangents[:3], **plain, **moves)
    dtype = native(operands[0].dtype)
    _check(ours.out, true.out, bounds.out, dtype, "out of jvp")
    _check(ours.out_t, true.out_t, bounds.out_t, dtype, "out_t")

    moves = along(tangents, "gg_{}")
    options = options | {"needs": ("grad_out", *options["needs"])} | moves
    ours = sdpa.attention_double_backward(*tangents[:3], grad_out, *operands, *got, **options)
    true = oracle.attention_double_backward(
        *tangents[:3], grad_out, *operands, *expected, **options
    )
    for name in options["needs"]:
        argument = grad_out if name == "grad_out" else arguments[name]
        _check_gradient(ours, true, name, bounds.second[name], argument)


def assert_widened_first(
    query, key, value, attn_mask=None, *, grad_out, grad_lse=None, tangents, **options
):
    """Every function of a float32 query and 16-bit keys and values, against widening them first.

    The bits are the same; gradients of key and value are those in float32, rounded once.
    """
    given = options | {"attn_mask": attn_mask, "grad_lse": grad_lse}
    narrow = {"query": query, "key": key, "value": value}
    wide = {name: x.astype(np.float32) for name, x in narrow.items()}
    wide_t = [x if x is None else x.astype(np.float32) for x in tangents[:3]] + tangents[3:]
    ours = _results(grad_out, narrow, tangents, given)
    expected = _results(grad_out, wide, wide_t, given)
    assert ours.keys() == expected.keys()
    for name, a in ours.items():
        b = expected[name]
        if name.startswith(("gradient of key", "gradient of value")):
            with np.errstate(over="ignore"):
                b = b.astype(native(key.dtype))
        assert_same_bits(a, b, name)


def _results(grad_out, operands, tangents, options):
    """{name: array} of all that the functions on attention return."""
    options = dict(options)
    grad_lse = options.pop("grad_lse")
    q_and_k = {name: operands[name] for name in ("query", "key")}
    saved = sdpa.attention_forward(**operands, **options)
    found = dict(saved._asdict())
    q, _ = arrays.broadcast(*q_and_k.values(), enable_gqa=options.get("enable_gqa", False))
    if q.shape[:-2] == saved.lse.shape[:-1]:  # else value or mask has further axes
        for stage in ("scores", "capped", "biased", "weights"):
            found[stage] = sdpa.attention_weights(**q_and_k, stage=stage, **options)
        undropped = {name: x for name, x in options.items() if name not in ("dropout_p", "rng")}
        found |= sdpa.attention_statistics(**q_and_k, **undropped)._asdict()

    moves = along(tangents, "{}_t")
    jvp = sdpa.attention_jvp(*operands.values(), *tangents[:3], **moves, **options)
    needs = [*operands, *(name for name, x in differentiable(options).items() if x is not None)]
    options |= {"grad_lse": grad_lse}
    rest = (grad_out, *operands.values(), *saved)
    first = sdpa.attention_backward(*rest, needs=needs, **options)
    moves = along(tangents, "gg_{}")
    second = sdpa.attention_double_backward(
        *tangents[:3], *rest, needs=["grad_out", *needs], **moves, **options
    )
    found |= {"out of jvp": jvp.out, "out_t": jvp.out_t, "derivative": second.grad_out}
    for name in needs:
        found |= {f"gradient of {name}": getattr(first, name)}
        found |= {f"gradient of {name} again": getattr(second, name)}
    return found


def assert_same_bits(a, b, what=""):
    assert a.dtype == b.dtype, what
    assert a.shape == b.shape, what
    assert a.tobytes() == b.tobytes(), f"{what}: bits differ"


# ---------------------------------------------------------------------------------------- layouts


def _strided(x):
    big = np.full([2 * n + 1 for n in x.shape], np.nan, x.dtype)
    big[tuple(slice(1, None, 2) for _ in x.shape)] = x
    return big[tuple(slice(1, None, 2) for _ in x.shape)]


def _unaligned(x):
    buffer = np.zeros(x.nbytes + 1, np.uint8)[1:]
    y = np.ndarray(x.shape, x.dtype, buffer)
    y[...] = x
    return y


def _read_only(x):
    y = x.copy()
    y.flags.writeable = False
    return y


def _other_byte_order(x):
    # ml_dtypes knows bfloat16 in native order only.
    return x.copy() if x.dtype == BFLOAT16 else x.astype(x.dtype.newbyteorder())


# Functions that return equal arrays in another layout.
LAYOUTS = {
    "contiguous": np.ascontiguousarray,
    "fortran": np.asfortranarray,
    "reversed": lambda x: np.flip(np.flip(x).copy()),
    "strided": _strided,
    "columns reversed": lambda x: x[..., ::-1].copy()[..., ::-1],
    "rows reversed": lambda x: x[..., ::-1, :].copy()[..., ::-1, :],
    "heads after length": lambda x: x.swapaxes(-3, -2).copy().swapaxes(-3, -2) if x.ndim > 2 else x,
    "unaligned": _unaligned,
    "other byte order": _other_byte_order,
    "read-only": _read_only,
}


# ---------------------------------------------------------------------------- independent oracles


def without_memory(call):
    """What a call gives, and how many allocations of the core it needs: each fails once before."""
    for needed in itertools.count():
        _core._alloc_fail_after(needed)
        try:
            return call(), needed
        except MemoryError:
            pass
        finally:
            _core._alloc_fail_after(-1)


def visible_pairs(n_q, n_k, is_causal=False, window=None, key_length=None, query_offset=None):
    """(n_q, n_k) bool: the table in the design, pair by pair, without NumPy's broadcasting."""
    length = n_k if key_length is None else key_length
    offset = 0 if query_offset is None else query_offset
    if is_causal == "lower_right":
        offset = length - n_q
    left, right = window or (None, None)
    visible = np.zeros((n_q, n_k), bool)
    for i in range(n_q):
        for j in range(n_k):
            visible[i, j] = (
                j < length
                and not (is_causal and j > i + offset)
                and not (left is not None and j < i + offset - left)
                and not (right is not None and j > i + offset + right)
            )
    return visible


def torch_composed(
    torch,
    query,
    key,
    value,
    visible,
    bias=None,
    sinks=None,
    *,
    scale=None,
    softcap=None,
    alibi=None,
    factors=None,
):
    """(out, lse) from PyTorch's elementary operations, differentiable; heads are not repeated.

    alibi: the distance term, (..., Lq, Lk); factors: dropout's; sinks: (..., heads).
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    s = scale * (query @ key.transpose(-1, -2))
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    for added in (alibi, bias):
        s = s if added is None else s + added
    s = s.masked_fill(~visible.expand(s.shape), -torch.inf)
    if sinks is not None:
        column = sinks[..., None, None].expand(*s.shape[:-1], 1)
        s = torch.cat([s, column], dim=-1)
    some = (s != -torch.inf).any(-1, keepdim=True)
    # A row without keys would be 0/0: give it any finite scores and drop it afterwards.
    s = torch.where(some, s, 0)
    p = torch.where(some, torch.softmax(s, -1), 0)[..., : key.shape[-2]]
    lse = torch.where(some[..., 0], torch.logsumexp(s, -1), -torch.inf)
    return (p if factors is None else p * factors) @ value, lse
