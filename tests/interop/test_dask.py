"""sdpa.interop.dask in one process, with either planner of Dask's arrays."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.blocks import Store
from support.calls import message
from support.helpers import assert_same_bits, normal
from support.protocols import OnlyArray, OnlyDlpack

import sdpa
from sdpa import blocks

dask = pytest.importorskip("dask", reason="needs dask: pip install '.[dask]'")
import dask.array as da  # noqa: E402
import zarr  # noqa: E402

from sdpa.interop import dask as lazy  # noqa: E402

N_Q, N_K, D_K, D_V, BLOCK = 50, 60, 8, 5, 20
PLANNER = "DASK_ARRAY__QUERY_PLANNING"
EXPRESSIONS = os.environ.get(PLANNER) == "True"
NAMES = ("query", "key", "value")


@pytest.fixture(autouse=True)
def one_thread():
    with dask.config.set(scheduler="sync"):
        yield


@pytest.fixture
def x(rng):
    return {
        "query": normal(rng, (2, 4, N_Q, D_K), np.float64),
        "key": normal(rng, (2, 4, N_K, D_K), np.float64),
        "value": normal(rng, (2, 4, N_K, D_V), np.float64),
    }


class Files:
    """Zarr arrays in a folder."""

    def __init__(self, folder):
        self.folder, self.count = folder, 0

    def path(self):
        self.count += 1
        return str(self.folder / f"{self.count}.zarr")

    def save(self, array, rows=BLOCK):
        chunks = (*array.shape[:-2], rows, array.shape[-1])
        return zarr.create_array(self.path(), data=array, chunks=chunks)

    def new(self, shape, dtype=np.float64, rows=10, axis=-2, **options):
        chunks = list(shape)
        chunks[axis] = rows
        return zarr.create_array(self.path(), shape=shape, dtype=dtype, chunks=chunks, **options)


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


def in_chunks(array, rows, axis=-2):
    chunks = list(array.shape)
    chunks[axis] = rows
    return da.from_array(array, chunks=tuple(chunks))


def again(target):
    """The array as another process sees it."""
    return zarr.open_array(target.store_path)


OPTIONS = {
    "none": {},
    "causal": {"is_causal": True},
    "lower right": {"is_causal": "lower_right", "key_lengths": [60, 31]},
    "window": {"window": (7, 2), "query_offset": np.array([0, 9])},
    "no bounds": {"window": (2**70, sys.maxsize), "query_offset": [-(2**60), 2**60]},
    "sinks": {"sinks": np.linspace(-1, 1, 4), "softcap": 3.0, "scale": 0.2},
    "alibi": {"alibi_slopes": np.linspace(0, 1, 4), "key_lengths": 17, "workers": 1},
    "mask": {"attn_mask": np.random.default_rng(0).random((4, N_Q, N_K)) < 0.5},
    "bias": {"attn_mask": np.random.default_rng(1).standard_normal((N_Q, N_K))},
}
PACKED = {"cu_seqlens_q": [0, 13, 50], "cu_seqlens_k": [0, 31, 60]}
SOURCES = ("stores", "queries in memory", "all in memory")


def arguments(x, files, source):
    stores = [files.save(a) for a in x.values()]
    if source == "stores":
        return stores
    if source == "queries in memory":
        return in_chunks(x["query"], BLOCK), *stores[1:]
    return [in_chunks(a, BLOCK) for a in x.values()]


def test_the_planner_is_the_one_asked_for():
    assert ("_array_expr" in da.Array.__module__) == EXPRESSIONS


@pytest.mark.slow
def test_with_the_other_planner():
    """Every kind of graph once more, in a process whose Dask plans array expressions."""
    if PLANNER in os.environ:
        return
    chosen = (
        "planner_is or gradients or causal or results_go or tasks or packed or grouped or graph"
    )
    arguments = [
        __file__,
        str(Path(__file__).with_name("test_dask_leading.py")),
        "-k",
        chosen,
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--import-mode=importlib",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        env=os.environ | {PLANNER: "True"}, cwd=Path(__file__).parents[2], capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


SPLIT = pytest.mark.parametrize("split", ["queries", "keys"])
CASES = {name: ("stores", options) for name, options in OPTIONS.items()}
CASES |= {f"causal, {source}": (source, {"is_causal": True}) for source in SOURCES[1:]}


@SPLIT
@pytest.mark.parametrize("case", CASES)
def test_every_option(case, split, x, files):
    source, options = CASES[case]
    expected = sdpa.attention_forward(*x.values(), **options)
    made = lazy.attention(
        *arguments(x, files, source), split=split, block=BLOCK, return_lse=True, **options
    )
    assert [a.shape for a in made] == [a.shape for a in expected]
    for actual, true in zip(dask.compute(*made), expected, strict=True):
        np.testing.assert_allclose(actual, true, rtol=0, atol=1e-12)


def test_bits_are_those_of_the_calls_by_hand(x, files):
    made = lazy.attention(*arguments(x, files, "stores"), block=BLOCK, is_causal=True).compute()
    by_hand = [
        blocks.attend(*x.values(), block=BLOCK, rows=slice(i, i + BLOCK), is_causal=True).out
        for i in range(0, N_Q, BLOCK)
    ]
    assert_same_bits(made, np.concatenate(by_hand, axis=-2))


@SPLIT
@pytest.mark.parametrize("source", SOURCES)
def test_grouped_heads_and_broadcasting(source, split, rng, files):
    x = {
        "query": normal(rng, (4, N_Q, D_K), np.float32),
        "key": normal(rng, (3, 2, N_K, D_K), np.float32),
        "value": normal(rng, (3, 2, N_K, D_V), np.float32),
    }
    made = lazy.attention(*arguments(x, files, source), split=split, block=BLOCK, enable_gqa=True)
    expected = sdpa.attention(*x.values(), enable_gqa=True)
    assert made.shape == expected.shape
    assert made.dtype == expected.dtype
    np.testing.assert_allclose(made.compute(), expected, rtol=0, atol=1e-6)


@SPLIT
@pytest.mark.parametrize("in_memory", [False, True])
def test_packed_sequences(in_memory, split, x, files):
    x = {name: a[0].swapaxes(0, 1) for name, a in x.items()}
    options = PACKED | {"is_causal": True}
    stores = [
        in_chunks(a, 25, 0) if in_memory else zarr.array(a, chunks=(25, 4, 5)) for a in x.values()
    ]
    out, lse = files.new((N_Q, 4, D_V), rows=25, axis=0), files.new((4, N_Q), rows=5, axis=1)
    lazy.attention(
        *stores, split=split, block=25, out=(out, lse), return_lse=True, **options
    ).compute()
    expected = sdpa.attention_forward(*x.values(), **options)
    np.testing.assert_allclose(out[...], expected.out, rtol=0, atol=1e-12)
    np.testing.assert_allclose(lse[...], expected.lse, rtol=0, atol=1e-12)


def test_float16(x, files):
    x = {name: a.astype(np.float16) for name, a in x.items()}
    made = lazy.attention(*arguments(x, files, "stores"), block=BLOCK)
    assert made.dtype == made.compute().dtype == np.float16
    expected = sdpa.attention(*x.values()).astype(float)
    np.testing.assert_allclose(made.compute().astype(float), expected, rtol=0, atol=2e-3)


def test_stores_have_a_shape_a_dtype_and_slices_alone(x):
    expected = sdpa.attention(*x.values())
    made = lazy.attention(*(Store(a) for a in x.values()), block=BLOCK, chunks=BLOCK)
    np.testing.assert_allclose(made.compute(), expected, rtol=0, atol=1e-12)


@SPLIT
def test_labelled_arrays_are_stores(split, x):
    xarray = pytest.importorskip("xarray", reason="needs xarray: pip install '.[peers]'")
    expected = sdpa.attention(*x.values())
    labelled = [xarray.DataArray(a, dims=("batch", "head", "place", "d")) for a in x.values()]
    made = lazy.attention(*labelled, split=split, block=BLOCK, chunks=BLOCK)
    np.testing.assert_allclose(made.compute(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("convert", [OnlyArray, OnlyDlpack])
def test_options_of_other_libraries(convert, x):
    options = {"sinks": np.linspace(-1, 1, 4), "key_lengths": np.array([60, 31])}
    expected = sdpa.attention(*x.values(), **options)
    made = lazy.attention(*x.values(), **{name: convert(a) for name, a in options.items()})
    np.testing.assert_allclose(made.compute(), expected, rtol=0, atol=1e-12)


@SPLIT
@pytest.mark.parametrize("in_memory", [False, True])
def test_weights_of_blocks_whose_lse_is_large(in_memory, split):
    """As in attention/test_blocks.py."""
    query = np.full((4, 1), 2.0**24, np.float32)
    keys = np.array([1, 1, 1, 0, 0, 1, 0, 0], np.float32)[:, None]
    values = np.arange(8, dtype=np.float32)[:, None]
    if in_memory:
        keys, values = in_chunks(keys, 4), in_chunks(values, 4)
    made = lazy.attention(query, keys, values, split=split, block=4, scale=1.0, return_lse=True)
    assert [a.dtype for a in made] == [a.dtype for a in dask.compute(*made)] == [np.float32] * 2
    np.testing.assert_allclose(made[0].compute(), (0 + 1 + 2 + 5) / 4, rtol=1e-6)


def test_no_queries_or_keys(x):
    few = x | {"query": x["query"][:, :, :0]}
    assert lazy.attention(*few.values()).compute().shape == (2, 4, 0, D_V)
    few = x | {name: x[name][:, :, :0] for name in ("key", "value")}
    out, lse = dask.compute(*lazy.attention(*few.values(), return_lse=True, split="keys"))
    assert not out.any()
    assert np.isneginf(lse).all()


# ------------------------------------------------------------------------------------ targets


@SPLIT
@pytest.mark.parametrize("stored", [{}, {"shards": (2, 4, 20, D_V)}], ids=["chunks", "shards"])
def test_results_go_to_a_store(stored, split, x, files):
    sources = arguments(x, files, "stores")
    expected = dask.compute(*lazy.attention(*sources, split=split, block=BLOCK, return_lse=True))
    out = files.new((2, 4, N_Q, D_V), rows=10, **stored)
    lse = files.new((2, 4, N_Q), rows=5, axis=-1)
    todo = lazy.attention(*sources, split=split, block=BLOCK, out=(out, lse), return_lse=True)
    assert [again(a).attrs["complete"] for a in (out, lse)] == [False, False]
    todo.compute()
    for target, true in zip((out, lse), expected, strict=True):
        assert again(target).attrs["complete"] is True
        assert_same_bits(again(target)[...], true)


def test_tasks_per_block_of_queries(x, files):
    """Beside it reading the queries, marking the target, and the result of that.

    Array expressions leave the block's number a task of its own.
    """
    sources, out = arguments(x, files, "stores"), files.new((2, 4, N_Q, D_V))
    todo = lazy.attention(*sources, block=10, out=out)
    graph = dict(dask.optimize(todo)[0].__dask_graph__())
    assert len(graph) <= (3 if EXPRESSIONS else 2) * 3 + 3
    assert len(graph) >= 3 + 1


def test_no_tasks_need_two_blocks_of_keys(x):
    """A contraction inside `blockwise` would load all of them."""
    arrays = [in_chunks(a, BLOCK) for a in x.values()]
    sizes = []

    def attend(*args, **kwargs):
        sizes.append(kwargs["key"].shape[-2] if "key" in kwargs else args[1].shape[-2])
        return forward(*args, **kwargs)

    forward = blocks._core.attention_forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks._core, "attention_forward", attend)
        lazy.attention(*arrays).compute()
    assert max(sizes) == BLOCK
    assert sizes.count(BLOCK) == 9


TARGETS = {
    "chunks": (
        {"rows": 15},
        ValueError,
        "out: expected chunks along axis -2 that end where the blocks of the tasks do, got chunks "
        "of 15 and blocks that end at 20: two tasks would write to the same one, and data would be "
        "lost",
    ),
    "large chunks": (
        {"rows": N_Q},
        ValueError,
        "out: expected chunks along axis -2 that end where the blocks of the tasks do, got chunks "
        "of 50 and blocks that end at 20: two tasks would write to the same one, and data would be "
        "lost",
    ),
    "shards": (
        {"rows": 10, "shards": (2, 4, 30, D_V)},
        ValueError,
        "out: expected shards along axis -2 that end where the blocks of the tasks do, got shards "
        "of 30 and blocks that end at 20: two tasks would write to the same one, and data would be "
        "lost",
    ),
    "dtype": ({"dtype": np.float32}, TypeError, "out: expected float64, got float32"),
    "shape": (
        {"shape": (2, 4, N_Q, D_K)},
        ValueError,
        "out: expected shape (2, 4, 50, 5), got (2, 4, 50, 8)",
    ),
}


@pytest.mark.parametrize("case", TARGETS)
def test_targets_that_would_lose_data_are_refused(case, x, files):
    changes, exception, expected = TARGETS[case]
    out = files.new(**({"shape": (2, 4, N_Q, D_V)} | changes))
    sources = arguments(x, files, "stores")
    assert message(exception, lazy.attention, *sources, out=out) == expected
    assert "complete" not in again(out).attrs


def test_other_targets_are_refused(x, files):
    sources = arguments(x, files, "stores")
    array = np.zeros((2, 4, N_Q, D_V))
    assert message(TypeError, lazy.attention, *sources, out=array) == (
        "out: expected a Zarr array, got ndarray"
    )
    memory = zarr.create_array({}, shape=array.shape, dtype=array.dtype, chunks=(2, 4, 10, 5))
    assert message(ValueError, lazy.attention, *sources, out=memory) == (
        "out: expected a store that all workers see, got a MemoryStore"
    )
    closed = zarr.open_array(files.new(array.shape).store.root, mode="r")
    assert message(ValueError, lazy.attention, *sources, out=closed) == (
        "out: expected a store that can be written, got a read-only one"
    )
    text = message(TypeError, lazy.attention, *sources, out=array, return_lse=True)
    assert text.startswith("out: expected a pair (out, lse), got ")
    archive = zarr.storage.ZipStore(f"{files.path()}.zip", mode="w")
    zipped = zarr.create_array(archive, shape=array.shape, dtype=array.dtype, chunks=(2, 4, 20, 5))
    assert message(ValueError, lazy.attention, *sources, out=zipped) == (
        "out: expected a store that several workers can write, got a ZipStore"
    )


def test_targets_are_no_inputs_and_apart(rng, files, monkeypatch):
    """Tasks would read what others have written, by whatever path the array was opened."""
    query, key, value, grads = (files.save(normal(rng, (40, 8), np.float32)) for _ in range(4))
    monkeypatch.chdir(files.folder)
    opened = zarr.open_array(Path(value.store.root).name)
    assert message(ValueError, lazy.attention, query, key, value, out=opened) == (
        f"out: expected another array than value, got the same one, {value.store.root}"
    )
    lse = files.new((40,), np.float32, rows=20, axis=-1)
    given = [grads, query, key, value, files.save(value[...]), lse]
    into = {"query": grads, "key": files.new((40, 8), np.float32, rows=20)}
    into["value"] = again(into["key"])
    needs = ["query", "key"]
    first = {name: into[name] for name in needs}
    assert message(ValueError, lazy.attention_backward, *given, into=first, needs=needs) == (
        f"into['query']: expected another array than grad_out, got the same one, {grads.store.root}"
    )
    needs = ["key", "value"]
    both = {name: into[name] for name in needs}
    assert message(ValueError, lazy.attention_backward, *given, into=both, needs=needs) == (
        f"into['value']: expected another array than into['key'], got the same one, "
        f"{both['key'].store.root}"
    )
    for unmarked in (value, grads, both["key"]):
        assert "complete" not in again(unmarked).attrs


@pytest.mark.parametrize("order", [("<f4", ">f4"), (">f4", "<f4"), (">f4", ">f4")], ids=str)
def test_byte_orders(order, rng, files):
    """Results are of native order, and targets may be of any, as Zarr converts."""
    arrays = normal(rng, (3, N_Q, D_K), np.float32)
    sources = [files.save(a.astype(order[0])) for a in arrays]
    expected, lse = sdpa.attention_forward(*arrays)
    lazily = lazy.attention(*sources)
    assert lazily.dtype == lazily.compute().dtype == np.float32
    assert lazily.dtype.isnative
    targets = files.new(expected.shape, order[1]), files.new(lse.shape, order[1], axis=-1)
    lazy.attention(*sources, out=targets, return_lse=True).compute()
    np.testing.assert_allclose(targets[0][...], expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(targets[1][...], lse, rtol=0, atol=1e-6)
    given = [files.save(expected), *sources, files.save(expected), lse]
    true = sdpa.attention_backward(expected, *arrays, expected, lse)
    made = lazy.attention_backward(*given)
    for name in NAMES:
        assert getattr(made, name).dtype == getattr(made, name).compute().dtype == np.float32
    into = {name: files.new((N_Q, D_K), order[1], rows=BLOCK) for name in NAMES}
    lazy.attention_backward(*given, into=into).compute()
    for name in NAMES:
        np.testing.assert_allclose(into[name][...], getattr(true, name), rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------ refusals


def test_refusals(x, files):
    sources = arguments(x, files, "stores")
    arrays = [in_chunks(a, BLOCK) for a in x.values()]
    wanted = da.from_array(np.ones(N_Q, bool), chunks=BLOCK)
    unknown = arrays[0].swapaxes(0, 2)[wanted].swapaxes(0, 2)
    refused = [
        (
            ValueError,
            sources,
            {"split": "heads"},
            "split: expected 'queries' or 'keys', got 'heads'",
        ),
        (
            TypeError,
            sources,
            {"return_lse": "no"},
            "return_lse: expected True or False, got 'no'",
        ),
        (ValueError, sources, {"chunks": 0}, "chunks: expected at least 1, got 0"),
        (ValueError, sources, {"block": 0}, "block: expected at least 1, got 0"),
        (
            ValueError,
            arrays,
            {"chunks": 9},
            "chunks: expected None, because query is a Dask array and has its own",
        ),
        (
            TypeError,
            [*arrays[:2], sources[2]],
            {},
            f"value: expected {type(arrays[1]).__name__} like key, got Array",
        ),
        (
            ValueError,
            [unknown, *sources[1:]],
            {},
            "query: expected known lengths, got shape (2, 4, nan, 8); those of a Dask array are "
            "found by its compute_chunk_sizes()",
        ),
        (
            ValueError,
            [*arrays[:2], in_chunks(x["value"], 30)],
            {},
            "value: expected the chunks of key, (20, 20, 20), got (30, 30)",
        ),
        *(
            (
                TypeError,
                sources,
                {"score_mod": lambda s, b, h, q, k, t: s + t[q], "score_args": given},
                f"score_args: expected a tuple of arrays, got {given!r:.60}; put it in a tuple",
            )
            for given in (5, np.ones(N_Q), da.ones(N_Q))
        ),
        (
            TypeError,
            sources,
            {"is_causl": True},
            "attention() got an unexpected keyword argument 'is_causl'. Did you mean 'is_causal'?",
        ),
    ]
    for exception, operands, options, expected in refused:
        assert message(exception, lazy.attention, *operands, **options) == expected


def test_dropout_is_refused(x, files):
    text = message(ValueError, lazy.attention, *arguments(x, files, "stores"), dropout_p=0.5)
    assert text.startswith("dropout_p: expected 0, because")


# ------------------------------------------------------------------------------------ backward


def saved(x, options):
    out, lse = sdpa.attention_forward(*x.values(), **options)
    grads = np.random.default_rng(2).standard_normal(out.shape)
    return grads, out, lse, np.random.default_rng(3).standard_normal(lse.shape)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients(options, x, files):
    grads, out, lse, grad_lse = saved(x, options)
    expected = sdpa.attention_backward(grads, *x.values(), out, lse, grad_lse=grad_lse, **options)
    stores = [files.save(a) for a in (grads, *x.values(), out)]
    made = lazy.attention_backward(*stores, lse, grad_lse=grad_lse, block=BLOCK, **options)
    assert made.attn_mask is made.sinks is None
    into = {name: files.new(x[name].shape, rows=BLOCK) for name in NAMES}
    todo = lazy.attention_backward(
        *stores, lse, grad_lse=grad_lse, block=BLOCK, into=into, **options
    )
    assert not any(again(a).attrs["complete"] for a in into.values())
    todo.compute()
    for name in NAMES:
        actual, true = getattr(made, name).compute(), getattr(expected, name)
        np.testing.assert_allclose(actual, true, rtol=0, atol=1e-11)
        assert_same_bits(again(into[name])[...], actual)
        assert again(into[name]).attrs["complete"] is True


@pytest.mark.parametrize("options", [{}, PACKED], ids=["batch", "packed"])
@pytest.mark.parametrize("grad_lse", [None, np.float32, np.float64])
def test_gradients_of_float16(options, grad_lse, x, files):
    """Values of mean 64 need an out that was not rounded: see test_narrow_gradients.py."""
    x["value"] += 64
    if options:
        x = {name: a[0].swapaxes(0, 1) for name, a in x.items()}
    x = {name: a.astype(np.float16) for name, a in x.items()}
    out, lse = sdpa.attention_forward(*x.values(), **options)
    grads = np.random.default_rng(2).standard_normal(out.shape).astype(np.float16)
    ones = None if grad_lse is None else np.ones_like(lse, grad_lse)
    stores = [zarr.array(a, chunks=a.shape) for a in (grads, *x.values(), out)]
    made = lazy.attention_backward(*stores, lse, block=BLOCK, chunks=20, grad_lse=ones, **options)

    wide = [a.astype(float) for a in x.values()]
    saved = sdpa.attention_forward(*wide, **options)
    ones = None if grad_lse is None else np.ones_like(saved.lse)
    exact = sdpa.attention_backward(grads.astype(float), *wide, *saved, grad_lse=ones, **options)
    for name in NAMES:
        actual, true = getattr(made, name).compute(), getattr(exact, name)
        assert actual.dtype == np.float16
        assert np.linalg.norm(actual - true) <= 2.0**-11 * np.linalg.norm(true)


def test_some_gradients(x):
    grads, out, lse, _ = saved(x, {})
    made = lazy.attention_backward(grads, *x.values(), out, lse, needs=("value",), chunks=30)
    assert made.query is made.key is None
    expected = sdpa.attention_backward(grads, *x.values(), out, lse).value
    np.testing.assert_allclose(made.value.compute(), expected, rtol=0, atol=1e-12)


def test_refusals_of_gradients(x, files):
    grads, out, lse, _ = saved(x, {})
    given = [grads, *x.values(), out, lse]

    def refused(exception, operands=given, **options):
        return message(exception, lazy.attention_backward, *operands, **options)

    assert refused(ValueError, needs=("sinks",)) == (
        "needs: expected names among 'query', 'key', 'value', got 'sinks'"
    )
    key = files.new(x["key"].shape, rows=15)
    assert refused(ValueError, into={"key": key}) == (
        "into: expected arrays for ['key', 'query', 'value'], got ['key']"
    )
    assert refused(ValueError, into={"key": key, 5: key}).endswith("got ['key', 5]")
    for other in (key, ["key"], 5):
        assert refused(TypeError, into=other) == (
            f"into: expected a mapping from names of gradients to Zarr arrays, got {type(other)}"
        )
    assert refused(ValueError, into={"key": key}, needs=["key"], chunks=20).startswith(
        "into['key']: expected chunks along axis -2 that end where the blocks of the tasks do"
    )
    assert "complete" not in again(key).attrs
