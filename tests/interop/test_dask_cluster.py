"""sdpa.interop.dask on two processes with a limit of memory: failures of every kind, nothing left.

The same tasks run under joblib as well, because `sdpa.blocks` knows no engine.
"""

import json
import logging
import multiprocessing
import os
import shutil
import threading

import numpy as np
import pytest
from support.calls import message
from support.helpers import assert_same_bits

import sdpa
from sdpa import blocks

distributed = pytest.importorskip("distributed", reason="needs dask: pip install '.[dask]'")
import dask  # noqa: E402
import dask.array as da  # noqa: E402
import zarr  # noqa: E402
from support.stores import Broken, KilledWriting, Killing, Store  # noqa: E402

from sdpa.interop import dask as lazy  # noqa: E402

pytestmark = [pytest.mark.uninstrumented, pytest.mark.slow]
LIMIT = 300_000_000
ROWS, BLOCK = 4096, 2048
OPTIONS = {"is_causal": True, "window": (700, 0)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two worker processes of one thread; their files and processes are gone afterwards."""
    folder = tmp_path_factory.mktemp("workers")
    before = set(multiprocessing.active_children())
    settings = {"distributed.admin.log-length": 0, "distributed.scheduler.allowed-failures": 3}
    with (
        dask.config.set(settings),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, memory_limit=LIMIT,
            dashboard_address=":0", local_directory=str(folder), silence_logs=logging.CRITICAL,
        ) as cluster,
        distributed.Client(cluster) as client,
    ):  # fmt: skip
        yield client
    assert set(multiprocessing.active_children()) <= before
    left = {path.name for path in folder.rglob("*") if path.is_file()}
    assert left <= {"global.lock", "purge.lock"}  # Dask's, by which processes clean up


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Zarr arrays of 1000 queries and keys, and out and lse of 125 queries a task."""
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("small")
    arrays = rng.standard_normal((3, 2, 1000, 16), np.float32)
    x = dict(zip(("query", "keys", "values"), arrays, strict=True))
    stores = {}
    for name, a in x.items():
        stores[name] = zarr.create_array(str(folder / name), data=a, chunks=(2, 125, 16))
    parts = [slice(i, i + 125) for i in range(0, 1000, 125)]
    true = [blocks.attend(**x, block=100, rows=part, is_causal=True) for part in parts]
    return stores, np.concatenate([part.out for part in true], axis=-2)


def target(folder, shape=(2, 1000, 16), rows=125, store=zarr.storage.LocalStore):
    chunks = (*shape[:-2], rows, shape[-1])
    return zarr.create_array(
        store(folder / "out"), shape=shape, dtype=np.float32, chunks=chunks, compressors=None
    )


def todo(stores, out):
    return lazy.attention(*stores.values(), block=100, is_causal=True, out=out)


def is_complete(out):
    return zarr.open_array(out.store.root).attrs["complete"]


def filled(path, shape, seed):
    """A Zarr array of random numbers, written block by block."""
    store = zarr.create_array(
        str(path), shape=shape, dtype=np.float32, chunks=(shape[0], BLOCK, shape[-1]),
        compressors=None,
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    for i in range(0, shape[1], ROWS):
        store[:, i : i + ROWS] = rng.standard_normal(store[:, i : i + ROWS].shape, np.float32)
    return store


def peaks():
    """The most memory that this process has had, of all pages."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


@pytest.fixture
def gone_afterwards(tmp_path):
    """A folder for large files, which pytest would keep."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def test_larger_than_the_memory_of_a_worker(cluster, gone_afterwards):
    """Values and results of 302 MB each, workers of 300 MB."""
    tmp_path = gone_afterwards
    tokens, heads, d_k, d_v = 18 * ROWS, 4, 8, 256
    query = filled(tmp_path / "query", (heads, tokens, d_k), 1)
    key = filled(tmp_path / "key", (heads, tokens, d_k), 2)
    value = filled(tmp_path / "value", (heads, tokens, d_v), 3)
    out = target(tmp_path, (heads, tokens, d_v), ROWS)
    assert value.nbytes > LIMIT
    assert out.nbytes > LIMIT
    work = lazy.attention(query, key, value, block=BLOCK, chunks=ROWS, out=out, **OPTIONS)
    work.compute()
    assert is_complete(out)
    for peak in cluster.run(peaks).values():
        assert peak < LIMIT
    for i in range(0, tokens, ROWS):
        rows = slice(i, i + ROWS)
        alone = blocks.attend(query, key, value, block=BLOCK, rows=rows, **OPTIONS)
        assert_same_bits(out[:, rows], alone.out)
    first = sdpa.attention(query[:, :ROWS], key[:, :ROWS], value[:, :ROWS], **OPTIONS)
    np.testing.assert_allclose(out[:, :ROWS], first, rtol=0, atol=1e-5)


def test_a_killed_worker(cluster, small, tmp_path):
    """A process is killed in the middle of its work; the results are the same bits."""
    stores, expected = small
    before = set(cluster.run(os.getpid).values())
    out = target(tmp_path)
    killing = Killing(stores["values"], tmp_path / "killed", out.store.root)
    todo(stores | {"values": killing}, out).compute()
    written = json.loads((tmp_path / "killed").read_text())
    assert 2 <= len(written) < 8  # chunks of the result
    assert_same_bits(out[...], expected)
    assert is_complete(out)
    cluster.wait_for_workers(2, timeout=240)
    after = set(cluster.run(os.getpid).values())
    assert len(before & after) == 1
    assert len(after) == 2


def test_a_worker_killed_while_it_writes(cluster, small, tmp_path):
    """What it had half written is gone in the end: no file but those of the array."""
    stores, expected = small
    tidy = set(files_of(target(tmp_path / "tidy", store=KilledWriting)))
    out = target(tmp_path / "killed", store=KilledWriting)
    todo(stores, out).compute()
    assert out.store.flag.exists()
    assert_same_bits(out[...], expected)
    assert is_complete(out)
    assert set(files_of(out)) - tidy == {f"c/0/{n}/0" for n in range(8)}
    cluster.wait_for_workers(2, timeout=240)


def files_of(array):
    root = array.store.root
    return [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]


def test_a_store_that_fails_once_is_tried_again(cluster, small, tmp_path):
    stores, expected = small
    out = target(tmp_path)
    failing = stores | {"keys": Store(stores["keys"], tmp_path / "failed")}
    text = message(OSError, todo(failing, out).compute)
    assert text == "the store failed"
    assert not is_complete(out)
    (tmp_path / "failed").unlink()
    todo(failing, out).compute(retries=2)
    assert (tmp_path / "failed").exists()
    assert_same_bits(out[...], expected)
    assert is_complete(out)


def test_a_task_that_always_fails(cluster, small, tmp_path):
    """Ends with its own error, and the target stays marked."""
    stores, expected = small
    out = target(tmp_path)
    broken = stores | {"values": Broken(stores["values"], tmp_path / "unused")}
    text = message(OSError, todo(broken, out).compute, retries=1)
    assert text == "the store is broken"
    assert is_complete(out) is False
    # The blocks that other tasks have written are right, the rest is as it was.
    for i in range(0, 1000, 125):
        block = out[:, i : i + 125]
        assert not block.any() or block.tobytes() == expected[:, i : i + 125].tobytes()


def test_gradients_on_the_cluster(cluster, small, tmp_path):
    stores, out = small
    rng = np.random.default_rng(5)
    lse = blocks.attend(**stores, block=100, is_causal=True).lse
    grads = rng.standard_normal(out.shape, np.float32)
    names = {"query": "query", "key": "keys", "value": "values"}
    into = {}
    for name in names:
        (tmp_path / name).mkdir()
        into[name] = target(tmp_path / name)
    given = [stores[name] for name in names.values()]
    options = {"block": 100, "is_causal": True}
    lazy.attention_backward(grads, *given, out, lse, into=into, **options).compute()
    arrays = [a[...] for a in given]
    expected = sdpa.attention_backward(grads, *arrays, out, lse, is_causal=True)
    for name in names:
        assert is_complete(into[name])
        actual = into[name][...]
        np.testing.assert_allclose(actual, getattr(expected, name), rtol=0, atol=1e-4)
        part = slice(125, 250)
        alone = blocks.attend_backward(
            grads, *arrays, out, lse, rows=part, columns=part, needs=(name,), **options
        )
        assert_same_bits(actual[:, part], getattr(alone, name))


@pytest.mark.parametrize("split", ["queries", "keys"])
def test_chunks_along_batch_and_heads_on_the_cluster(cluster, split):
    """Forward, backward and what lies before them in one graph, each option cut in its own way."""
    rng = np.random.default_rng(6)
    shape = (4, 4, 100, 16)
    arrays = rng.standard_normal((3, *shape), np.float32)
    bias = rng.standard_normal((4, 1, 100, 100)).astype(np.float32)
    lengths = np.array([100, 0, 31, 7])
    query, key, value = (
        da.from_array(a, chunks=(*lead, 100, 16))
        for a, lead in zip(arrays, [(1, 4), (2, (1, 3)), (4, 2)], strict=True)
    )
    options = {"is_causal": True, "scale": 0.3}
    lazily = {"attn_mask": da.from_array(bias, chunks=(3, 1, 100, 50)), "key_lengths": lengths}
    lazily["sinks"] = da.arange(4, chunks=1, dtype=np.float32)
    known = options | {
        "attn_mask": bias,
        "key_lengths": lengths,
        "sinks": np.arange(4.0, dtype="f4"),
    }
    out, lse = lazy.attention(query, key, value, split=split, return_lse=True, **options, **lazily)
    made = lazy.attention_backward(3 * out, query, key, value, out, lse, **options, **lazily)
    saved = sdpa.attention_forward(*arrays, **known)
    expected = sdpa.attention_backward(3 * saved.out, *arrays, *saved, **known)
    actual = dask.compute(out, made.query, made.key, made.value)
    for a, true in zip(actual, (saved.out, *expected[:3]), strict=True):
        np.testing.assert_allclose(a, true, rtol=0, atol=1e-4)


def test_either_threads_of_dask_or_of_a_task(small, tmp_path):
    """Never both: a worker of several threads computes each task with one."""
    stores, expected = small
    settings = {"n_workers": 1, "processes": False, "dashboard_address": ":0"}
    settings["local_directory"] = str(tmp_path)
    operands, threads = tuple(stores.values()), []
    options = {"block": 100, "is_causal": True}
    forward = blocks._core.attention_forward

    def noted(*args, workers=None, **kwargs):
        if threading.current_thread() is not threading.main_thread():
            threads.append(workers)
        return forward(*args, workers=workers, **kwargs)

    with (
        distributed.LocalCluster(threads_per_worker=2, **settings) as cluster,
        distributed.Client(cluster),
        pytest.MonkeyPatch.context() as patch,
    ):
        lazily = lazy.attention(*operands, workers=2, **options)
        assert message(ValueError, lazily.compute) == (
            "workers: expected None or 1 on a Dask worker of 2 threads, got 2; for more threads "
            "per task, start workers of one thread"
        )
        patch.setattr(blocks._core, "attention_forward", noted)
        for workers in (None, 1):
            for split in ("queries", "keys"):
                made = lazy.attention(*operands, workers=workers, split=split, **options).compute()
                np.testing.assert_allclose(made, expected, rtol=0, atol=1e-6)
        assert set(threads) == {1}
    with (
        distributed.LocalCluster(threads_per_worker=1, **settings) as cluster,
        distributed.Client(cluster),
    ):
        assert_same_bits(lazy.attention(*operands, workers=2, **options).compute(), expected)


def attended(stores, rows):
    return blocks.attend(**stores, block=100, rows=rows, is_causal=True).out


def test_the_same_tasks_under_joblib(small):
    joblib = pytest.importorskip("joblib", reason="needs joblib: pip install joblib")
    stores, expected = small
    parts = [slice(i, i + 125) for i in range(0, 1000, 125)]
    with joblib.parallel_config(backend="loky", n_jobs=2, inner_max_num_threads=1):
        outs = joblib.Parallel()(joblib.delayed(attended)(stores, part) for part in parts)
    assert_same_bits(np.concatenate(outs, axis=-2), expected)
    joblib.externals.loky.get_reusable_executor().shutdown(wait=True)
