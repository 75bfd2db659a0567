"""sdpa.interop.dask on arrays that are cut along batch and heads, as Dask arrays come."""

import numpy as np
import pytest
from support.calls import message
from support.helpers import assert_same_bits, normal

import sdpa

dask = pytest.importorskip("dask", reason="needs dask: pip install '.[dask]'")
import dask.array as da  # noqa: E402
import zarr  # noqa: E402

from sdpa.interop import dask as lazy  # noqa: E402
from sdpa.interop.dask._leading import kept  # noqa: E402

N_Q, N_K, D_K, D_V = 10, 12, 8, 5
NAMES = ("query", "key", "value")
SPLIT = pytest.mark.parametrize("split", ["queries", "keys"])


@pytest.fixture(autouse=True)
def one_thread():
    with dask.config.set(scheduler="sync"):
        yield


def operands(rng, dtype=np.float64, batch=(3,), heads=4, k_batch=None, k_heads=None):
    k_lead = (*(batch if k_batch is None else k_batch), heads if k_heads is None else k_heads)
    return {
        "query": normal(rng, (*batch, heads, N_Q, D_K), dtype),
        "key": normal(rng, (*k_lead, N_K, D_K), dtype),
        "value": normal(rng, (*k_lead, N_K, D_V), dtype),
    }


def cut(array, *lead, rows=None):
    """A Dask array whose leading axes have these chunks, and all others one, or rows of these."""
    inner = array.shape[len(lead) :]
    chunks = (*lead, *inner) if rows is None else (*lead, rows, *inner[1:])
    return da.from_array(np.asarray(array), chunks=chunks)


def close(actual, expected, atol=1e-12):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def mask(kind):
    allowed = np.random.default_rng(0).random((3, 4, N_Q, N_K)) < 0.6
    return allowed if kind == "where" else np.where(allowed, 0.5, -np.inf)


OPTIONS = {
    "none": {},
    "causal": {"is_causal": True},
    "lengths": {"key_lengths": np.array([12, 0, 5]), "is_causal": "lower_right"},
    "lengths in a list": {"key_lengths": [12, 0, 5]},
    "offsets": {"query_offset": np.array([0, -3, 2]), "window": (4, 1)},
    "mask": {"attn_mask": mask("attn_mask")},
    "mask of heads": {"attn_mask": mask("attn_mask")[:1]},
    "mask of batch": {"where": mask("where")[:, :1]},
    "both": {"attn_mask": mask("attn_mask")[0, 0], "where": mask("where")},
    "per head": {"sinks": np.linspace(-1, 1, 4), "alibi_slopes": np.linspace(0, 1, 4)},
    "per entry and head": {"scale": np.linspace(0.1, 1, 12).reshape(3, 4)},
    "sinks in a list": {"sinks": [-1.0, 0.0, 1.0, 2.0], "scale": 0.3},
    "functions": {
        "score_mod": lambda s, b, h, q, k, t, u: s * u[b, h] + t[q, k],
        "score_args": (
            np.random.default_rng(1).standard_normal((N_Q, N_K)),
            np.random.default_rng(2).standard_normal((3, 4)),
        ),
        "mask_mod": sdpa.mask_program(lambda b, h, q, k: (q + h >= k) | (b == 1)),
    },
}


def lazily(options):
    """The options that are arrays as Dask arrays, one element a chunk where that can be."""
    return {
        name: da.from_array(x, chunks=tuple(max(1, n // 2) for n in x.shape))
        if isinstance(x, np.ndarray)
        else x
        for name, x in options.items()
    }


@SPLIT
@pytest.mark.parametrize("in_memory", [True, False], ids=["all in memory", "keys in a store"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_with_leading_axes(name, in_memory, split, rng, tmp_path):
    x, options = operands(rng), OPTIONS[name]
    expected = sdpa.attention_forward(*x.values(), **options)
    query = cut(x["query"], 1, (1, 3), rows=4)
    if in_memory:
        key, value = cut(x["key"], (2, 1), 2, rows=5), cut(x["value"], 3, 4, rows=5)
    else:
        key, value = (zarr.array(x[name], chunks=x[name].shape) for name in NAMES[1:])
    for given in options, lazily(options):
        made = lazy.attention(query, key, value, split=split, block=5, return_lse=True, **given)
        for actual, true in zip(made, expected, strict=True):
            assert actual.shape == true.shape
            assert actual.dtype == true.dtype
            close(actual.compute(), true)


def changed(*arrays):
    """In place, as the next step of a loop does."""
    for array in arrays:
        array[...] = False if array.dtype == bool else 1


CHANGED = ("lengths", "offsets", "mask", "mask of batch", "per head", "functions")


@SPLIT
@pytest.mark.parametrize("name", CHANGED)
def test_arrays_may_change_before_the_tasks_run(name, split, rng):
    """Results are those of the moment of the call, as of Dask's own functions."""
    x = operands(rng)
    options = {
        name: tuple(map(np.copy, a)) if isinstance(a, tuple) and name == "score_args"
        else a.copy() if isinstance(a, np.ndarray) else a
        for name, a in OPTIONS[name].items()
    }  # fmt: skip
    expected = sdpa.attention_forward(*x.values(), **options)
    grad = normal(rng, expected.out.shape, np.float64)
    gradients = sdpa.attention_backward(grad, *x.values(), *expected, **options)[:3]
    given = [*x.values(), grad, *map(np.copy, expected)]
    made = lazy.attention(*x.values(), split=split, block=5, chunks=4, **options)
    back = lazy.attention_backward(grad, *x.values(), *given[-2:], chunks=4, **options)[:3]
    changed(*given, *(a for a in options.values() if isinstance(a, np.ndarray)))
    changed(*options.get("score_args", ()))
    for actual, true in zip((made, *back), (expected.out, *gradients), strict=True):
        close(actual.compute(), true)


def test_which_arrays_are_not_copied(tmp_path):
    """Mapped files, and views that would take more memory."""
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(20, 8))
    bias = sdpa.bias.t5_relative(np.ones((32, 4), np.float32), 30, 40)
    for x in mapped, np.asarray(mapped)[2:], bias:
        assert np.shares_memory(kept(x), x)
    shared = np.broadcast_to(np.ones(8, np.float32), (20, 8))
    assert not np.shares_memory(kept(shared), shared)
    assert kept(shared).strides == shared.strides


def test_functions_of_two_batch_axes(rng):
    """b counts the leading axes as one."""
    x = operands(rng, batch=(2, 3))
    options = {
        "score_mod": lambda s, b, h, q, k, u: s * u[b] + h,
        "score_args": (np.linspace(0.5, 2, 6),),
        "mask_mod": lambda b, h, q, k: (b + q + h) % 3 != k % 3,
    }
    expected = sdpa.attention(*x.values(), **options)
    query = cut(x["query"], 1, (2, 1), (1, 3), rows=4)
    close(lazy.attention(query, x["key"], x["value"], block=5, **options).compute(), expected)


def test_functions_of_packed_sequences(rng):
    cu = np.array([0, 4, 4, 10])
    x = [rng.standard_normal((10, 4, 8)) for _ in range(3)]
    options = {
        "score_mod": lambda s, b, h, q, k, u: s * u[b] + h * (q - k),
        "score_args": (np.linspace(0.5, 2, 3),),
        "cu_seqlens_q": cu,
        "cu_seqlens_k": cu,
    }
    expected = sdpa.attention(*x, **options)
    query = da.from_array(x[0], chunks=(3, 1, 8))
    close(lazy.attention(query, *x[1:], block=4, **options).compute(), expected)


def test_sequences_that_are_dask_arrays(rng):
    """Lengths beside them can be checked by the tasks alone."""
    cu, x = np.array([0, 4, 4, 10]), [rng.standard_normal((10, 4, 8)) for _ in range(3)]
    lazy_cu = da.from_array(cu, chunks=2)
    for lengths in 0, [3, 0, 5], np.array([3, 0, 5]):
        options = {"cu_seqlens_q": cu, "key_lengths": lengths}
        expected = sdpa.attention(*x, cu_seqlens_k=cu, **options)
        close(lazy.attention(*x, cu_seqlens_k=lazy_cu, **options).compute(), expected)
    options["key_lengths"] = [3, 0, 7]
    with pytest.raises(ValueError, match=r"^key_lengths: expected integers from 0 to Lk"):
        lazy.attention(*x, cu_seqlens_k=lazy_cu, **options).compute()


def test_arguments_of_functions_are_in_memory(rng):
    x, t = operands(rng), da.ones(20)
    options = {"score_mod": lambda s, b, h, q, k, t: s + t[q], "score_args": (t,)}
    with pytest.raises(TypeError, match=r"score_args\[0\]: expected an array in memory.*compute"):
        lazy.attention(*x.values(), **options)
    options["score_args"] = (np.ones(20),)
    saved = sdpa.attention_forward(*x.values(), **options)
    with pytest.raises(ValueError, match=r"needs: .*'score_args'"):
        lazy.attention_backward(saved.out, *x.values(), *saved, needs=["score_args"], **options)


HEADS = {"groups": (2, 2), "parts of groups": 1, "across groups": (3, 3), "one": 6}


@SPLIT
@pytest.mark.parametrize("chunks", HEADS.values(), ids=HEADS)
def test_grouped_heads(chunks, split, rng):
    x = operands(rng, heads=6, k_heads=2)
    chunks = (2, 4) if chunks == (2, 2) else chunks
    arrays = [cut(x["query"], 2, chunks), cut(x["key"], 1, 1), cut(x["value"], 3, 2)]
    made = lazy.attention(*arrays, split=split, enable_gqa=True)
    close(made.compute(), sdpa.attention(*x.values(), enable_gqa=True))


BROADCAST = {
    "keys of one entry": {"k_batch": (1,)},
    "keys without batch": {"k_batch": ()},
    "one key head": {"k_heads": 1},
    "two axes": {"batch": (2, 3), "k_batch": (2, 1)},
    "queries of one entry": {"batch": (1,), "k_batch": (3,)},
}


@pytest.mark.parametrize("case", BROADCAST)
def test_broadcasting(case, rng):
    x = operands(rng, **BROADCAST[case])
    arrays = {name: cut(a, *(1,) * (a.ndim - 2)) for name, a in x.items()}
    out, lse = lazy.attention(*arrays.values(), return_lse=True)
    expected = sdpa.attention_forward(*x.values())
    close(out.compute(), expected.out)
    close(lse.compute(), expected.lse)
    grad_out = normal(rng, expected.out.shape, np.float64)
    made = lazy.attention_backward(
        cut(grad_out, *(1,) * (grad_out.ndim - 2)), *arrays.values(), out, lse
    )
    true = sdpa.attention_backward(grad_out, *x.values(), *expected)
    for name in NAMES:
        assert getattr(made, name).shape == x[name].shape
        close(getattr(made, name).compute(), getattr(true, name), 1e-11)


@pytest.mark.parametrize("shared", ["key", "value"])
def test_keys_or_values_alone_in_common(shared, rng, tmp_path):
    """One array cannot hold both gradients."""
    x = operands(rng)
    x[shared] = x[shared][0, :1]
    expected = sdpa.attention_forward(*x.values())
    grad_out = normal(rng, expected.out.shape, np.float64)
    given = cut(grad_out, 1, 2), *x.values(), *expected
    true = sdpa.attention_backward(grad_out, *x.values(), *expected)
    into = {
        name: zarr.create_array(tmp_path / name, shape=a.shape, dtype=a.dtype, chunks=(1,) * a.ndim)
        for name, a in x.items()
    }
    lazy.attention_backward(*given, into=into).compute()
    made = lazy.attention_backward(*given)
    for name in NAMES:
        close(getattr(made, name).compute(), getattr(true, name), 1e-11)
        close(into[name][...], getattr(true, name), 1e-11)


def test_options_have_known_lengths(rng):
    lengths = da.from_array(np.array([3, 5]))
    text = message(
        ValueError, lazy.attention, *operands(rng).values(), key_lengths=lengths[lengths > 0]
    )
    assert text == (
        "key_lengths: expected known lengths, got shape (nan,); those of a Dask array are found by "
        "its compute_chunk_sizes()"
    )


@SPLIT
def test_chunks_without_entries(split, rng):
    """As a selection by a boolean array leaves them, before the first key, too."""
    x = operands(rng)
    options = {"sinks": np.linspace(-1, 1, 4), "is_causal": True}
    chunks = ((0, 2, 1), (4, 0), (0, 7, 0, None), (None,))
    arrays = {
        name: da.from_array(a, -1).rechunk(
            tuple((*c[:-1], n - sum(c[:-1])) for c, n in zip(chunks, a.shape, strict=True))
        )
        for name, a in x.items()
    }
    made = lazy.attention(*arrays.values(), split=split, return_lse=True, **options)
    expected = sdpa.attention_forward(*x.values(), **options)
    for actual, true in zip(made, expected, strict=True):
        close(actual.compute(), true)
    grad_out = normal(rng, expected.out.shape, np.float64)
    whole = {name: a.rechunk({2: -1}) for name, a in arrays.items()}
    grads = lazy.attention_backward(grad_out, *whole.values(), *expected, **options)
    true = sdpa.attention_backward(grad_out, *x.values(), *expected, **options)
    for name in NAMES:
        close(getattr(grads, name).compute(), getattr(true, name), 1e-11)


def test_gradients_of_an_empty_batch(rng):
    """What all of it has in common keeps its shape, and its gradient is 0."""
    x = operands(rng, batch=(0,), k_batch=(1,))
    expected = sdpa.attention_forward(*x.values())
    made = lazy.attention_backward(expected.out, *x.values(), *expected)
    for name in NAMES:
        np.testing.assert_array_equal(getattr(made, name).compute(), np.zeros(x[name].shape))


@pytest.mark.parametrize("chunks", HEADS.values(), ids=HEADS)
def test_gradients_of_grouped_heads(chunks, rng):
    x = operands(rng, heads=6, k_heads=2)
    chunks = (2, 4) if chunks == (2, 2) else chunks
    expected = sdpa.attention_forward(*x.values(), enable_gqa=True)
    grad_out = normal(rng, expected.out.shape, np.float64)
    true = sdpa.attention_backward(grad_out, *x.values(), *expected, enable_gqa=True)
    made = lazy.attention_backward(
        cut(grad_out, 1, 6), cut(x["query"], 3, chunks), cut(x["key"], 1, 1), x["value"],
        *expected, enable_gqa=True,
    )  # fmt: skip
    for name in NAMES:
        close(getattr(made, name).compute(), getattr(true, name), 1e-11)


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_with_every_option(name, rng):
    x, options = operands(rng), OPTIONS[name]
    expected = sdpa.attention_forward(*x.values(), **options)
    grad_out, grad_lse = (normal(rng, a.shape, np.float64) for a in expected)
    true = sdpa.attention_backward(grad_out, *x.values(), *expected, grad_lse=grad_lse, **options)
    given = [cut(grad_out, 3, 2), cut(x["query"], 1, (1, 3)), x["key"], cut(x["value"], (2, 1), 4)]
    given += [cut(expected.out, 3, 4), cut(expected.lse, 1, 4)]
    for some in options, lazily(options):
        made = lazy.attention_backward(
            *given, grad_lse=cut(grad_lse, 2, 2), block=5, chunks=7, **some
        )
        for name in NAMES:
            close(getattr(made, name).compute(), getattr(true, name), 1e-11)


def test_forward_and_backward_in_one_graph(rng):
    """No array is stored in between, and no task sees more than one batch entry."""
    x = operands(rng)
    arrays = {name: cut(a, 1, 4) for name, a in x.items()}
    out, lse = lazy.attention(*arrays.values(), return_lse=True, is_causal=True)
    made = lazy.attention_backward(2 * out, *arrays.values(), out, lse, is_causal=True)
    saved = sdpa.attention_forward(*x.values(), is_causal=True)
    true = sdpa.attention_backward(2 * saved.out, *x.values(), *saved, is_causal=True)
    for name in NAMES:
        assert getattr(made, name).chunks[0] == (1, 1, 1)
        close(getattr(made, name).compute(), getattr(true, name), 1e-11)


@pytest.mark.parametrize("shared", [False, True], ids=["own keys", "keys in common"])
def test_gradients_of_float16_are_rounded_once(shared, rng):
    x = operands(rng, np.float16, k_batch=(1,) if shared else None)
    x["value"] += 64
    out, lse = sdpa.attention_forward(*x.values())
    grad_out = normal(rng, out.shape, np.float16)
    made = lazy.attention_backward(
        cut(grad_out, 1, 4), *(cut(a, 1, 2) for a in x.values()), out, cut(lse, 3, 1)
    )
    wide = [a.astype(float) for a in x.values()]
    exact = sdpa.attention_backward(grad_out.astype(float), *wide, *sdpa.attention_forward(*wide))
    for name in NAMES:
        actual, true = getattr(made, name).compute(), getattr(exact, name)
        assert actual.dtype == np.float16
        assert np.linalg.norm(actual - true) <= 2.0**-11 * np.linalg.norm(true)


@SPLIT
def test_packed_sequences_cut_along_heads(split, rng):
    x = {name: a[0].swapaxes(0, 1) for name, a in operands(rng).items()}
    packed = {"cu_seqlens_q": [0, 3, 10], "cu_seqlens_k": [0, 7, 12], "sinks": np.arange(4.0)}
    expected = sdpa.attention_forward(*x.values(), **packed)
    arrays = [da.from_array(a, chunks=(a.shape[0], 2, a.shape[2])) for a in x.values()]
    out, lse = lazy.attention(*arrays, split=split, return_lse=True, **packed)
    close(out.compute(), expected.out)
    close(lse.compute(), expected.lse)
    grad_out = normal(rng, out.shape, np.float64)
    made = lazy.attention_backward(grad_out, *arrays, *expected, **packed)
    true = sdpa.attention_backward(grad_out, *x.values(), *expected, **packed)
    for name in NAMES:
        close(getattr(made, name).compute(), getattr(true, name), 1e-11)


# ------------------------------------------------------------------------------------ targets


def target(folder, name, shape, chunks):
    return zarr.create_array(
        str(folder / name), shape=shape, dtype=np.float64, chunks=chunks, overwrite=True
    )


@SPLIT
def test_blocks_go_to_their_place_in_a_store(split, rng, tmp_path):
    x = operands(rng)
    arrays = [cut(a, 1, 2, rows=5) for a in x.values()]
    out = target(tmp_path, "out", (3, 4, N_Q, D_V), (1, 2, 5, D_V))
    lse = target(tmp_path, "lse", (3, 4, N_Q), (1, 1, 5))
    lazy.attention(*arrays, split=split, out=(out, lse), return_lse=True).compute()
    expected = sdpa.attention_forward(*x.values())
    close(out[...], expected.out)
    close(lse[...], expected.lse)
    into = {name: target(tmp_path, name, a.shape, (1, 1, *a.shape[2:])) for name, a in x.items()}
    grad_out = cut(expected.out, 1, 2)
    arrays = [cut(a, 1, 2) for a in x.values()]
    lazy.attention_backward(grad_out, *arrays, *expected, into=into).compute()
    made = lazy.attention_backward(grad_out, *arrays, *expected)
    for name in NAMES:
        assert_same_bits(into[name][...], getattr(made, name).compute())
        assert into[name].attrs["complete"] is True


def test_refusals(rng, tmp_path):
    x = operands(rng)
    arrays = [cut(a, 1, 2) for a in x.values()]
    out = target(tmp_path, "out", (3, 4, N_Q, D_V), (2, 4, N_Q, D_V))
    assert message(ValueError, lazy.attention, *arrays, out=out) == (
        "out: expected chunks along axis 0 that end where the blocks of the tasks do, got chunks "
        "of 2 and blocks that end at 1: two tasks would write to the same one, and data would be "
        "lost"
    )
    wide = da.from_array(x["query"], chunks=(1, 4, N_Q, 4))
    assert message(ValueError, lazy.attention, wide, *arrays[1:]) == (
        "query: expected one chunk along the last axis, got (4, 4); rechunk({-1: -1}) joins them"
    )
    saved = sdpa.attention_forward(*x.values())
    rows = cut(x["key"], 1, 2, rows=6)
    given = [saved.out, arrays[0], rows, arrays[2], *saved]
    assert message(ValueError, lazy.attention_backward, *given) == (
        "key: expected one chunk along axis 2, all of which every task reads, got (6, 6); "
        "rechunk({2: -1}) joins them, or write it to a store"
    )
    wrong = da.from_array(np.zeros(5), chunks=1)
    text = message(ValueError, lazy.attention, *arrays, sinks=wrong)
    assert text == message(ValueError, sdpa.attention, *x.values(), sinks=np.zeros(5))


def test_what_a_dask_array_holds_is_checked_by_the_tasks(rng):
    x = operands(rng)
    lengths = da.from_array(np.array([1, 2, N_K + 1]), chunks=1)
    made = lazy.attention(*(cut(a, 1, 4) for a in x.values()), key_lengths=lengths)
    with pytest.raises(ValueError, match=r"^key_lengths: "):
        made.compute()
