"""Same bits for any number of threads; the GIL; the number of threads used."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.helpers import normal
from support.machine import LINUX

import sdpa
from sdpa._programs import _variants

# n_head, n_kv_head, n_q, n_k, d_k, d_v, options: much work, in few and in many units.
CASES = {
    "heads": (6, 6, 130, 150, 32, 32, {}),
    "long head": (1, 1, 700, 900, 32, 16, {}),
    "group": (6, 2, 200, 333, 16, 48, {"enable_gqa": True}),
    "causal": (2, 2, 500, 500, 32, 32, {"is_causal": True}),
    "lower right": (2, 2, 300, 500, 32, 32, {"is_causal": "lower_right"}),
    "decode": (8, 2, 1, 3000, 64, 64, {"enable_gqa": True}),
}


def run(program, *, timeout=60, **env):
    """Run a Python program in a new process with only these variables; return its output."""
    clean = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=clean | env,
        text=True,
        capture_output=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def everything(q, k, v, bias, grad_out, workers, options):
    """The bytes of every result that threads compute."""
    out, lse = sdpa.attention_forward(q, k, v, bias, workers=workers, **options)
    gradients = sdpa.attention_backward(
        grad_out,
        q,
        k,
        v,
        out,
        lse,
        bias,
        workers=workers,
        needs=("query", "key", "value", "attn_mask"),
        **options,
    )
    weights = sdpa.attention_weights(q, k, attn_mask=bias, workers=workers, **options)
    arrays = [out, lse, weights, *(g for g in gradients if g is not None)]
    assert len(arrays) == 7
    return [a.tobytes() for a in arrays]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("case", CASES)
def test_same_bits_for_any_number_of_workers(case, dtype, rng):
    n_head, n_kv_head, n_q, n_k, d_k, d_v, options = CASES[case]
    q = normal(rng, (2, n_head, n_q, d_k), dtype)
    k = normal(rng, (2, n_kv_head, n_k, d_k), dtype)
    v = normal(rng, (2, n_kv_head, n_k, d_v), dtype)
    bias = normal(rng, (n_head, n_q, n_k), dtype)
    grad_out = normal(rng, (2, n_head, n_q, d_v), dtype)
    expected = everything(q, k, v, bias, grad_out, 1, options)
    for workers in (1, 2, 3, 4, 5, None, -1):
        assert everything(q, k, v, bias, grad_out, workers, options) == expected, workers


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("is_causal", [False, "lower_right"])
def test_same_bits_of_few_keys_for_any_number_of_workers(dtype, rng, is_causal):
    """Many units of queries that add to the gradients of one head of keys."""
    q, g = normal(rng, (2, 2, 3000, 64), dtype)
    k, v = normal(rng, (2, 1, 32, 64), dtype)
    options = {"enable_gqa": True, "is_causal": is_causal}
    results = []
    for workers in (1, 2, 3, 5):
        got = sdpa.attention_forward(q, k, v, workers=workers, **options)
        grads = sdpa.attention_backward(g, q, k, v, *got, workers=workers, **options)
        results.append([a.tobytes() for a in (*got, *grads[:3])])
    assert all(result == results[0] for result in results)


@pytest.mark.usefixtures("isa")
def test_same_bits_of_softmax_for_any_number_of_workers(dtype, rng):
    x = normal(rng, (300, 3000), dtype, 3)
    for axis in 0, 1:
        results = set()
        for n in 1, 2, 3, 5:
            before = sdpa.get_num_threads()
            sdpa.set_num_threads(n)
            try:
                arrays = sdpa.softmax(x, axis), sdpa.log_softmax(x, axis), sdpa.logsumexp(x, axis)
            finally:
                sdpa.set_num_threads(before)
            results.add(b"".join(a.tobytes() for a in arrays))
        assert len(results) == 1


def test_same_bits_from_eight_threads_at_once(dtype, rng):
    n_head, n_kv_head, n_q, n_k, d_k, d_v, options = CASES["group"]
    q = normal(rng, (n_head, n_q, d_k), dtype)
    k = normal(rng, (n_kv_head, n_k, d_k), dtype)
    v = normal(rng, (n_kv_head, n_k, d_v), dtype)
    bias = normal(rng, (n_q, n_k), dtype)
    grad_out = normal(rng, (n_head, n_q, d_v), dtype)
    expected = everything(q, k, v, bias, grad_out, 1, options)
    start = threading.Barrier(8)

    def work(workers):
        start.wait()
        return [everything(q, k, v, bias, grad_out, workers, options) for _ in range(5)]

    with ThreadPoolExecutor(8) as threads:
        for results in threads.map(work, [1, 2, 3, 4, 5, None, -1, 2]):
            assert all(result == expected for result in results)


def long_arrays(seconds, dtype=np.float32):
    """Query, key and value whose attention takes about that long on one thread of this machine."""
    n = 1024
    while True:
        x = np.ones((n, 64), dtype)
        start = time.perf_counter()
        sdpa.attention(x, x, x, workers=1)
        took = time.perf_counter() - start
        if took > 0.02:
            break
        n *= 2
    return x, np.ones((int(n * seconds / took), 64), dtype)


def test_threads_share_the_programs_that_are_remembered(monkeypatch):
    """More functions than are kept: no thread stumbles over another, and the oldest go."""
    monkeypatch.setattr(_variants, "_REMEMBERED", 4)
    before, cache = sys.getswitchinterval(), {}
    sys.setswitchinterval(1e-7)
    try:
        with ThreadPoolExecutor(8) as pool:
            parts = [[(thread, i) for i in range(20000)] for thread in range(8)]
            kept = pool.map(
                lambda own: [_variants.remembered(cache, key, key) for key in own], parts
            )
            assert list(kept) == parts
    finally:
        sys.setswitchinterval(before)
    _variants.remembered(cache, None, None)
    assert len(cache) <= 4


def test_the_gil_is_released():
    q, k = long_arrays(1.0)
    thread = threading.Thread(target=sdpa.attention, args=(q, k, k), kwargs={"workers": 1})
    start = time.perf_counter()
    thread.start()
    pauses, last = [], start
    while thread.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
        pauses.append(now - last)
        last = now
    took = last - start
    # If the call held the GIL, there would be one pause as long as the call.
    assert len(pauses) > 10
    assert max(pauses) < took / 2


# ---------------------------------------------------------------------------------- how many


def expected_default():
    """The number of CPUs by affinity, or fewer under a cgroup quota."""
    return len(os.sched_getaffinity(0))


THREADS = "import sdpa; print(sdpa.get_num_threads())"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"SDPA_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "5"}, 5),
        ({"OMP_NUM_THREADS": "5,2"}, 5),
        ({"SDPA_NUM_THREADS": "3", "OMP_NUM_THREADS": "5"}, 3),
        ({"SDPA_NUM_THREADS": "many", "OMP_NUM_THREADS": "5"}, 5),
        ({"SDPA_NUM_THREADS": "0", "OMP_NUM_THREADS": "5"}, 5),
        ({"SDPA_NUM_THREADS": "-1", "OMP_NUM_THREADS": "5"}, 5),
        ({"SDPA_NUM_THREADS": "2.5", "OMP_NUM_THREADS": "5"}, 5),
        ({"SDPA_NUM_THREADS": "", "OMP_NUM_THREADS": "5"}, 5),
    ],
)
def test_environment(env, expected):
    assert run(THREADS, **env) == str(expected)


OWN, OMP = "SDPA_NUM_THREADS", "OMP_NUM_THREADS"
CPUS = "{} threads are used, one for each CPU of this process"


@pytest.mark.parametrize(
    ("env", "warning", "used"),
    [
        *(({OWN: x}, [OWN], CPUS) for x in ("0x10", "-1", "1e9", "", "0", "2.5", "é")),
        ({OWN: "0x10", OMP: "5"}, [OWN], "OMP_NUM_THREADS=5 is used"),
        ({OWN: "-1", OMP: "4,2"}, [OWN], "OMP_NUM_THREADS=4 is used"),
        ({OMP: "many"}, [OMP], CPUS),
        ({OWN: "x", OMP: "y"}, [OWN, OMP], CPUS),
        ({}, [], CPUS),
        ({OMP: "5,2"}, [], ""),
        ({OWN: " 7 "}, [], ""),
        ({OWN: "3", OMP: "many"}, [], ""),  # which nobody asks
    ],
)
def test_a_variable_that_is_not_understood_warns(env, warning, used):
    """At the line that imports sdpa, by name and value, of every variable that was asked."""
    program = """if True:
        import sys, warnings
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import sdpa  # line 5
        for x in caught:
            print(ascii(str(x.message)), x.category.__name__, x.filename, x.lineno, sep="|")
        print(sdpa.get_num_threads())
    """
    *warned, n = run(program, **env).splitlines()
    assert warned == [
        f"{text!a}|RuntimeWarning|<string>|5"
        for name in warning
        for text in [f"{name}: expected a positive integer, got '{env[name]}'; {used.format(n)}"]
    ]


def test_the_warning_may_be_an_error():
    program = """if True:
        import warnings
        warnings.simplefilter("error")
        try:
            import sdpa
        except RuntimeWarning as error:
            print(error)
        warnings.simplefilter("ignore")
        import sdpa
        print(sdpa.get_num_threads())
    """
    first, second = run(program, SDPA_NUM_THREADS="0x10", OMP_NUM_THREADS="5").splitlines()
    assert first.startswith("SDPA_NUM_THREADS: expected a positive integer, got '0x10'")
    assert second == "5"


@LINUX
def test_default_is_what_this_process_may_use():
    n = int(run(THREADS))
    assert 1 <= n <= expected_default()
    assert run(THREADS, SDPA_NUM_THREADS="none", OMP_NUM_THREADS="") == str(n)


@LINUX
def test_affinity_is_honoured():
    program = f"import os; os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}}); {THREADS}"
    assert run(program) == "1"


@LINUX
def test_number_of_threads_can_be_raised_and_lowered():
    # Threads start on first use, no more than requested; the caller is one of them.
    program = """if True:
        import os
        import re
        import threading
        import time
        import numpy as np

        def threads():
            return int(re.search(r"Threads:\\s+(\\d+)", open("/proc/self/status").read())[1])

        first = threading.Thread(target=int)  # with it a sanitizer starts a thread of its own
        first.start()
        first.join()
        while os.path.exists(f"/proc/self/task/{first.native_id}"):
            time.sleep(0.001)
        x = np.ones((8, 300, 64), np.float32)
        before = threads()
        import sdpa
        assert threads() == before
        sdpa.attention(x, x, x, workers=1)
        assert threads() == before
        sdpa.attention(x, x, x, workers=3)
        assert threads() == before + 2
        sdpa.set_num_threads(5)
        assert sdpa.get_num_threads() == 5
        sdpa.attention(x, x, x)
        assert threads() == before + 4
        sdpa.set_num_threads(2)
        sdpa.attention(x, x, x)
        sdpa.attention(x[:1, :2], x[:1], x[:1], workers=1000000)
        assert threads() == before + 4
        sdpa.set_num_threads(1)
        assert sdpa.get_num_threads() == 1
        print("ok")
    """
    assert run(program, OPENBLAS_NUM_THREADS="1") == "ok"


@LINUX
def test_worker_threads_take_no_signals_but_those_of_their_faults():
    program = """if True:
        import os
        import re
        import signal
        import threading
        import numpy as np
        import sdpa

        first = threading.Thread(target=int)  # with it a sanitizer starts a thread of its own
        first.start()
        first.join()
        before = set(os.listdir("/proc/self/task"))
        x = np.ones((8, 300, 64), np.float32)
        sdpa.attention(x, x, x, workers=3)
        tasks = set(os.listdir("/proc/self/task")) - before
        masks = set()
        while len(masks) != 1 or min(masks) >> 31 & 1:  # glibc's own, until a thread has begun
            texts = [open(f"/proc/self/task/{task}/status").read() for task in tasks]
            masks = {int(re.search(r"SigBlk:\\s+(\\w+)", text)[1], 16) for text in texts}
        (mask,) = masks
        print(*(signal.Signals(n).name for n in range(1, 32) if not mask >> (n - 1) & 1))
    """
    assert run(program) == "SIGILL SIGBUS SIGFPE SIGKILL SIGSEGV SIGSTOP"


@pytest.mark.parametrize("n", [0, -1, -5])
def test_set_num_threads_refuses(n):
    before = sdpa.get_num_threads()
    with pytest.raises(ValueError, match=str(n)):
        sdpa.set_num_threads(n)
    assert sdpa.get_num_threads() == before


def test_idle_threads_sleep():
    x = np.ones((8, 300, 64), np.float32)
    sdpa.attention(x, x, x, workers=4)
    time.sleep(0.01)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


@pytest.mark.parametrize("first", ["sdpa", "threadpoolctl"])
def test_threadpoolctl_limits_sdpa(first):
    second = {"sdpa": "threadpoolctl", "threadpoolctl": "sdpa"}[first]
    program = f"""if True:
        import {first}
        import {second}

        def ours():
            (info,) = [i for i in threadpoolctl.threadpool_info() if i["user_api"] == "sdpa"]
            return info["num_threads"]

        sdpa.set_num_threads(3)
        assert ours() == 3
        with threadpoolctl.threadpool_limits(2):
            assert sdpa.get_num_threads() == ours() == 2
            with threadpoolctl.threadpool_limits(1, user_api="sdpa"):
                assert sdpa.get_num_threads() == ours() == 1
        assert sdpa.get_num_threads() == 3
        with threadpoolctl.threadpool_limits({{"sdpa": 2**32 + 1}}):  # which is 1 in C's int
            assert ours() == 1024
        with threadpoolctl.threadpool_limits({{"sdpa": 1}}):
            assert sdpa.get_num_threads() == 1
        print("ok")
    """
    assert run(program) == "ok"
