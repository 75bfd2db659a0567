"""sdpa.blocks refuses bad arguments before it reads, and stores that fail leave nothing behind."""

import builtins
import contextlib
import gc
import sys
import threading
import weakref

import numpy as np
import pytest
from support.blocks import D_K, D_V, N_K, N_Q, Store, tensors
from support.calls import message
from support.helpers import assert_same_bits, normal

import sdpa
from sdpa import blocks


class Unread(Store):
    def __getitem__(self, index):
        raise AssertionError("was read")


class Failing(Store):
    def __getitem__(self, index):
        if index[-2].start == 20:
            raise OSError("the disk is gone")
        return super().__getitem__(index)


def refused(exception, function=blocks.attend, **changes):
    x = {name: Unread(a) for name, a in tensors(np.random.default_rng(0), np.float32).items()}
    if function is blocks.attend_backward:
        rest = {"grad_out": (2, 4, N_Q, D_V), "out": (2, 4, N_Q, D_V), "lse": (2, 4, N_Q)}
        x |= {name: Unread(np.zeros(shape, np.float32)) for name, shape in rest.items()}
    return message(exception, function, **(x | changes))


REFUSED = {
    "dropout": (
        ValueError,
        "dropout_p: expected 0, because the pattern of dropout depends on the index of a key in "
        "its call, which blocks change",
        {"dropout_p": 0.1},
    ),
    "block": (ValueError, "block: expected at least 1, got 0", {"block": 0}),
    "block type": (TypeError, "block: expected an integer, got 2.0", {"block": 2.0}),
    "rows": (TypeError, "rows: expected a slice, got 3", {"rows": 3}),
    "rows step": (
        ValueError,
        "rows: expected a slice of step 1, got slice(0, 9, 2)",
        {"rows": slice(0, 9, 2)},
    ),
    "rows type": (
        TypeError,
        "rows: expected a slice of integers, got slice(1.0, 2, None)",
        {"rows": slice(1.0, 2)},
    ),
    "values": (
        ValueError,
        "value: expected (..., 53, 5) to match key's rows 53, got (..., 52, 5)",
        {"values": np.zeros((2, 4, 52, 5), np.float32)},
    ),
    "dtype": (
        TypeError,
        "key: expected query's dtype float32, float16 or bfloat16, got float64; write "
        "key.astype(query.dtype) if np.sqrt(d), which is applied already, a table or np.zeros made "
        "key float64",
        {"keys": np.zeros((2, 4, N_K, D_K))},
    ),
    "mask": (
        TypeError,
        None,
        {"attn_mask": Unread(np.zeros((N_Q, N_K), int))},
    ),
    "lengths": (
        ValueError,
        "key_lengths: expected integers from 0 to Lk = 53, got 54",
        {"key_lengths": 54},
    ),
    "offset": (ValueError, None, {"is_causal": "lower_right", "query_offset": 1}),
}
REFUSED_BOTH = [pytest.param(*row, id=name) for name, row in REFUSED.items()]


@pytest.mark.parametrize("function", [blocks.attend, blocks.attend_backward])
@pytest.mark.parametrize(("exception", "text", "changes"), REFUSED_BOTH)
def test_refused_before_anything_is_read(function, exception, text, changes):
    got = refused(exception, function, **changes)
    if text is None:  # the words of the kernel, which its own tests know
        x = {
            name.rstrip("s"): a for name, a in tensors(np.random.default_rng(0), np.float32).items()
        }
        given = {name: getattr(a, "array", a) for name, a in changes.items()}
        text = message(exception, sdpa.attention, **x, **given)
    assert got == text


def test_unknown_options():
    expected = "attend() got an unexpected keyword argument 'is_causl'. Did you mean 'is_causal'?"
    assert refused(TypeError, is_causl=True) == expected


def test_out(rng):
    x = tensors(rng)
    rows = slice(3, 20)
    out = np.full((2, 4, 17, D_V), np.nan)
    got = blocks.attend(**x, block=10, rows=rows, out=out, is_causal=True)
    assert got.out is out
    assert_same_bits(out, blocks.attend(**x, block=10, rows=rows, is_causal=True).out)
    assert refused(ValueError, out=np.zeros((2, 4, N_Q, D_V + 1), np.float32)) == (
        "out: expected shape (2, 4, 37, 5), got (2, 4, 37, 6)"
    )
    text = message(ValueError, blocks.attend, **x, out=x["values"][:, :, :N_Q])
    assert text == "out: expected memory not shared with an input, got an array that overlaps value"


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(
    "name", ["sinks", "scale", "alibi_slopes", "key_lengths", "score_args", "captured"]
)
def test_out_is_apart_from_options(name, dtype, rng):
    """Also where they could be read before it is written."""
    x, out = tensors(rng, dtype), np.ones((2, 4, N_Q, D_V), dtype)
    per_head = out[0, :, 0, 0]
    options, place = {name: per_head}, name
    if name == "key_lengths":
        options = {name: out.reshape(-1).view(np.int8)[: 2 * out.itemsize : out.itemsize]}
    elif name == "score_args":
        options = {name: (per_head,), "score_mod": lambda s, b, h, q, k, t: s * t[h]}
        place = "score_args[0]"
    elif name == "captured":
        options = {"score_mod": lambda s, b, h, q, k: s * per_head[h]}
        place = "per_head of score_mod"
    text = message(ValueError, blocks.attend, **x, out=out, **options)
    assert text == (
        f"out: expected memory not shared with an input, got an array that overlaps {place}"
    )
    assert (out == 1).all()


@pytest.mark.parametrize("name", ["query", "keys", "values"])
def test_out_is_written_when_all_has_been_read(name, rng):
    """A store may read from its memory, which nothing but the store knows."""
    arrays = normal(rng, (3, 2, 40, 8), np.float32)
    x = dict(zip(("query", "keys", "values"), arrays, strict=True))
    expected, out = blocks.attend(**x, block=10).out, x[name].copy()
    blocks.attend(**x | {name: Store(out)}, block=10, out=out)
    assert_same_bits(out, expected)


def test_out_may_be_another_map_of_a_file_that_is_read(rng, tmp_path):
    x = normal(rng, (2, 40, 8), np.float32)
    expected = blocks.attend(x, x, x, block=10).out
    x.tofile(tmp_path / "x")
    once, again = (np.memmap(tmp_path / "x", x.dtype, mode, shape=x.shape) for mode in ("r", "r+"))
    assert_same_bits(blocks.attend(once, once, once, block=10, out=again).out, expected)


def test_out_stays_as_it_is_where_a_store_fails(rng):
    x, out = tensors(rng, np.float32), np.ones((2, 4, N_Q, D_V), np.float32)
    with pytest.raises(OSError, match="the disk is gone"):
        blocks.attend(x["query"], Failing(x["keys"]), x["values"], block=10, out=out)
    assert (out == 1).all()


def test_out_is_an_array():
    x = {name.rstrip("s"): a for name, a in tensors(np.random.default_rng(0)).items()}
    expected = message(TypeError, sdpa.attention, **x, out=[0.0])
    assert refused(TypeError, out=[0.0]) == expected


def test_needs():
    got = refused(ValueError, blocks.attend_backward, needs=("keys",))
    assert got.startswith("needs: expected names among 'query', 'key', 'value'")


@pytest.mark.parametrize("shape", [None, 9], ids=str)
def test_a_store_without_a_shape(shape):
    """An empty dataset of h5py has None."""
    keys = Unread(np.zeros((2, 4, N_K, D_K), np.float32))
    keys.shape = shape
    assert refused(TypeError, keys=keys) == f"key: expected a store with a shape, got {shape}"


@pytest.mark.parametrize(
    ("n", "exception", "text"),
    [
        ("a", TypeError, "key.shape: expected an integer, got 'a'"),
        (5.5, TypeError, "key.shape: expected an integer, got 5.5"),
        (-1, ValueError, "key.shape: expected at least 0, got -1"),
        (2**70, ValueError, f"key.shape: expected at most 2^48, got {2**70}"),
    ],
)
def test_a_store_with_a_shape_that_is_none(n, exception, text):
    keys = Unread(np.zeros((2, 4, N_K, D_K), np.float32))
    keys.shape = (2, 4, n, D_K)
    assert refused(exception, keys=keys) == text


def test_unknown_lengths(rng):
    """Those of Dask arrays that were cut by their own values are nan."""
    keys = Unread(np.zeros((2, 4, N_K, D_K), np.float32))
    keys.shape = (2, 4, float("nan"), D_K)
    expected = (
        "key: expected known lengths, got shape (2, 4, nan, 8); those of a Dask array are found by "
        "its compute_chunk_sizes()"
    )
    assert refused(ValueError, keys=keys) == expected
    assert refused(ValueError, blocks.attend_backward, keys=keys) == expected


class Wrong(Store):
    """A store that declares another dtype than that of its arrays."""

    def __getitem__(self, index):
        return super().__getitem__(index).astype(np.float64)


def test_a_store_that_is_not_as_it_says(rng):
    x = tensors(rng, np.float32)
    text = message(ValueError, blocks.attend, x["query"], Wrong(x["keys"]), x["values"], block=10)
    assert text == (
        "key: expected its slice to be (2, 4, 0, 8) of float32, got (2, 4, 0, 8) of float64"
    )


def test_a_store_that_fails(rng):
    """Its own error, and the thread that reads is gone."""
    x = tensors(rng)
    before = threading.active_count()
    text = message(OSError, blocks.attend, x["query"], Failing(x["keys"]), x["values"], block=10)
    assert text == "the disk is gone"
    assert threading.active_count() == before


def test_a_failure_holds_no_memory(rng):
    """What had been read is gone with the exception, without waiting for the garbage collector."""
    read = []

    class Watched(Failing):
        def __getitem__(self, index):
            found = super().__getitem__(index)
            read.append(weakref.ref(found))
            return found

    x = {name: Watched(a) for name, a in tensors(rng).items()}
    gc.disable()
    try:
        with contextlib.suppress(OSError):
            blocks.attend(**x, block=10)
        assert read
        assert [found for found in read if found() is not None] == []
    finally:
        gc.enable()


def test_where_a_store_fails_is_in_the_traceback(rng):
    x = tensors(rng)
    with pytest.raises(OSError, match="the disk is gone") as caught:
        blocks.attend(x["query"], Failing(x["keys"]), x["values"], block=10)
    assert caught.traceback[-1].frame.code.raw.co_qualname.endswith("Failing.__getitem__")


def test_progress_without_tqdm(monkeypatch):
    monkeypatch.delitem(sys.modules, "tqdm", raising=False)
    ordinary = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] == "tqdm":
            raise ImportError(name)
        return ordinary(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    expected = "progress=True needs tqdm: pip install tqdm"
    assert refused(ImportError, progress=True) == expected
    assert refused(ImportError, blocks.attend_backward, progress=True) == expected
