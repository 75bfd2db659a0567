"""Faults around a call: no threads, no memory, files that shrink, other rounding modes."""

import ctypes
import itertools
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from support.guard import allocated_by
from support.machine import POSIX
from support.process import PRELUDE, run

import sdpa

CC = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or "cc"

FAILING = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

/* The first THREADS creations succeed, all later ones fail. */
int pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*f)(void *), void *x) {
    static _Atomic int n;
    static int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    if (n++ >= atoi(getenv("THREADS"))) return EAGAIN;
    if (!real) real = (int (*)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *))dlsym(RTLD_NEXT, "pthread_create");
    return real(t, a, f, x);
}

/* glibc's pthread_atfork. */
int __register_atfork(void (*a)(void), void (*b)(void), void (*c)(void), void *d) {
    static int (*real)(void (*)(void), void (*)(void), void (*)(void), void *);
    if (getenv("NO_ATFORK")) return ENOMEM;
    if (!real) real = (int (*)(void (*)(void), void (*)(void), void (*)(void), void *))dlsym(RTLD_NEXT, "__register_atfork");
    return real(a, b, c, d);
}
"""  # noqa: E501

# Python's functions cannot do this: NumPy frees memory while an exception is on its way.
DATA = r"""
#include <stdlib.h>

int left, kept; /* the block after `left` more fails; blocks in use */

static int fails(void) { return left-- == 0; }
static void *counted(void *block) { return kept += block != NULL, block; }
static void *new(void *x, size_t n) { return fails() ? NULL : counted(malloc(n)); }
static void *zeroed(void *x, size_t n, size_t m) { return fails() ? NULL : counted(calloc(n, m)); }
static void *resized(void *x, void *old, size_t n) { return fails() ? NULL : realloc(old, n); }
static void release(void *x, void *block, size_t n) { kept -= block != NULL, free(block); }

/* PyDataMem_Handler of NumPy's C API. */
struct {
    char name[127];
    unsigned char version;
    void *context;
    void *(*malloc)(void *, size_t), *(*calloc)(void *, size_t, size_t);
    void *(*realloc)(void *, void *, size_t);
    void (*free)(void *, void *, size_t);
} handler = {"failing", 1, NULL, new, zeroed, resized, release};
"""

MODES = r"""
#include <fenv.h>
#ifdef __SSE2__
#include <xmmintrin.h>
#endif

int set_mode(const char *name) {
    const int round = *name == 'd' ? FE_DOWNWARD : *name == 'u' ? FE_UPWARD : *name == 'z' ? FE_TOWARDZERO : FE_TONEAREST;
    fesetround(round);
#ifdef __SSE2__
    _mm_setcsr((_mm_getcsr() & ~0x8040u) | (*name == 'f' ? 0x8040u : 0));
#endif
    return fegetround() == round;
}
"""  # noqa: E501


def compiled(folder, source):
    (folder / "made.c").write_text(source)
    made = folder / "made.so"
    command = [CC, "-shared", "-fPIC", "-o", made, folder / "made.c", "-ldl", "-lm"]
    subprocess.run(command, check=True)
    return made


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("failing"), FAILING)


def run_with(library, program, **environment):
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PRELUDE + program],
        text=True,
        capture_output=True,
        timeout=120,
        # NumPy's BLAS also starts threads.
        env=os.environ | {"LD_PRELOAD": str(library), "OPENBLAS_NUM_THREADS": "1"} | environment,
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout.split()


# ------------------------------------------------------------------------------------ threads


@pytest.mark.uninstrumented
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="preloads functions of glibc")
class TestThreads:
    @pytest.mark.parametrize("n", range(6))
    def test_whatever_creation_fails_the_result_is_the_same(self, failing, n):
        """The first of the prelude's two calls asks for two more threads, and so does works()."""
        program = f"""
expected = sdpa.attention(x, x, x, workers=1)
tasks = len(os.listdir("/proc/self/task"))
for workers in 6, 2, 6:
    assert sdpa.attention(x, x, x, workers=workers).tobytes() == expected.tobytes()
works()
check_child(in_child(works), "child")
print(len(os.listdir("/proc/self/task")) - 1, min({n}, 5))
"""
        made, expected = run_with(failing, program, THREADS=str(n))
        assert made == expected

    def test_blocks_are_read_where_they_are_computed(self, failing):
        """Python has no thread to read ahead."""
        program = """
from sdpa import blocks
found = blocks.attend(x, x, x, block=70, is_causal=True)
gradients = blocks.attend_backward(x, x, x, x, *found, block=70, is_causal=True)
for array in (*found, *gradients[:3]):
    print(array.tobytes().hex()[:64])
print(len(os.listdir("/proc/self/task")))
"""
        *made, threads = run_with(failing, program, THREADS="0")
        *expected, _ = run_with(failing, program, THREADS="100")
        assert (made, threads) == (expected, "1")

    def test_without_handlers_of_fork_there_are_no_threads(self, failing):
        program = """
works()
check_child(in_child(works), "child")
print(len(os.listdir("/proc/self/task")))
"""
        assert run_with(failing, program, THREADS="100", NO_ATFORK="1") == ["1"]


@pytest.mark.forks
@POSIX
def test_forks_signals_and_exits_at_random_moments():
    """Ten seconds at most: each child forks, is interrupted or ends while threads compute."""
    program = """
import random

moments = random.Random(1)
signal.signal(signal.SIGUSR1, lambda *_: works())
end, n = time.monotonic() + 10, 0

def child():
    thread = threading.Thread(target=works, daemon=True)
    thread.start()
    time.sleep(moments.random() / 100)
    how = moments.randrange(3)
    if how == 0:
        os.kill(os.getpid(), signal.SIGUSR1)
    elif how == 1:
        check_child(in_child(works), "grandchild")
    works()

while n < 60 and time.monotonic() < end:
    moments.seed(n)
    pid = in_child(child)
    works()
    check_child(pid, n)
    n += 1
works()
print("many" if n >= 5 else n)
"""
    assert run(program) == "many"


@POSIX
def test_an_exception_of_a_signal_handler_ends_the_call():
    def stop(*_):
        raise KeyError("stop")

    x = np.ones((1 << 15, 64), np.float32)  # seconds of work
    previous = signal.signal(signal.SIGUSR1, stop)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(KeyError, match="stop"):
            sdpa.attention(x, x, x, workers=1)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, previous)


@pytest.mark.forks
@POSIX
def test_the_interpreter_ends_while_a_daemon_thread_computes():
    """At random moments: the process ends with its own code, whatever the call was doing."""
    program = """
import random

many = rng.standard_normal((8, 2000, 64), np.float32)  # long enough to be asked for signals

def compute():
    while True:
        works()
        sdpa.attention(many, many, many, workers=3)

for n in range(40):
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        threading.Thread(target=compute, daemon=True).start()
        time.sleep(random.Random(n).random() * 0.03)
        sys.exit(n)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == n, (code, n)
print("ok")
"""
    assert run(program) == "ok"


# ------------------------------------------------------------------------------------- memory


@POSIX
@pytest.mark.uninstrumented
def test_a_limit_of_memory_gives_memory_error_and_then_right_results():
    program = """
import resource

limit = status("VmSize") + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
row = np.broadcast_to(np.float32(1), (1 << 25, 64))
for call in (
    lambda: sdpa.attention(row, row[:2], row[:2], workers=2),
    lambda: sdpa.attention_weights(row[:1 << 15], row[:1 << 15]),
    lambda: sdpa.softmax(row),
):
    try:
        call()
    except MemoryError:
        works()
    else:
        raise AssertionError("no MemoryError")
print("ok")
"""
    assert run(program) == "ok"


ARRAYS = """
x, lse, mask = np.ones((2, 5, 4), np.float32), np.zeros((2, 5), np.float32), np.ones((5, 5), bool)
t, cu, bias = x.swapaxes(0, 1), np.array([0, 2, 5]), np.ones((5, 5), np.float32)
args = np.ones(5, ">f4"), np.ones(5), np.arange(5)

def score(s, b, h, q, k, one, two, order):
    return s * one[order[k]] + two[q]

def seen(b, h, q, k):
    return k <= q + 1

functions = dict(score_mod=score, score_args=args, mask_mod=seen)

class Own(np.ndarray):
    pass

class Elsewhere:
    def __array__(self, dtype=None, copy=None):
        return x

own, elsewhere, out = x.view(Own), Elsewhere(), np.empty_like(x)
deep = np.ones((2,) * 9 + (1, 1), np.float32)
"""

CALLS = {
    "attention": "sdpa.attention(x, x, x, mask, window=(3, 2), key_lengths=5, sinks=[1.0, 2.0])",
    "lists": "sdpa.attention(x.tolist(), x.tolist(), x.tolist())",
    "packed": "sdpa.attention(t, t, t, cu_seqlens_q=cu, cu_seqlens_k=cu)",
    "out": "sdpa.attention(own, own, own, out=out)",
    "deep": "sdpa.attention(deep, deep, deep)",
    "elsewhere": "sdpa.attention(elsewhere, elsewhere, elsewhere)",
    "float32 sinks": "sdpa.attention(x, x, x, sinks=lse[0, :2])",
    "refused scale": "sdpa.attention(x, x, x, scale=1e39)",
    "scale": "sdpa.attention_backward(x, x, x, x, x, lse, scale=0.5, needs=['scale']).scale",
    "lower right": """sdpa.attention(
        x[:, None], x[:, None], x[:, None], is_causal="lower_right", key_lengths=cu[1:])""",
    "packed lower right": """sdpa.attention(
        t, t, t, is_causal="lower_right", cu_seqlens_q=cu, cu_seqlens_k=cu)""",
    "fresh seed": "sdpa.attention(x, x, x, dropout_p=1.0)",
    "refused": "sdpa.attention(x, x[..., :2], x)",
    "refused shape": "sdpa.attention(x, x, x, out=np.empty(3, np.float32))",
    "refused dtype": "sdpa.attention(x, x, x.astype(float))",
    "refused name": "sdpa._core._use_isa('none')",
    "refused keyword": "sdpa.attention(x, x, x, is_casual=True)",
    "refused synonym": "sdpa.attention(x, x, x, dropout=0.5)",
    "forward": "sdpa.attention_forward(x, x, x)",
    "backward": "sdpa.attention_backward(x, x, x, x, x, lse, bias, needs=('query', 'attn_mask'))",
    "jvp": "sdpa.attention_jvp(x, x, x, x, x, x)",
    "double backward": "sdpa.attention_double_backward(x, x, x, x, x, x, x, x, lse)",
    "functions": "sdpa.attention(x, x, x, **functions)",
    "functions backward": """sdpa.attention_backward(
        x, x, x, x, x, lse, needs=["score_args"], **functions).score_args""",
    "functions jvp": """sdpa.attention_jvp(
        x, x, x, x, x, x, score_args_t=[*args[:2], None], **functions)""",
    "weights": "sdpa.attention_weights(x, x, heads=[1, 0], queries=slice(2))",
    "statistics": "sdpa.attention_statistics(x, x)",
    "received": "sdpa.attention_received(x, x)",
    "merge": "sdpa.merge_attention([x] * 21, [lse] * 21)",
    "merge subclass": "sdpa.merge_attention([own] * 2, [lse] * 2)",
    "softmax": "sdpa.softmax(x, axis=(0, 1), where=x > 0)",
    "softmax out": "sdpa.softmax(own, out=out)",
    "logsumexp": "sdpa.logsumexp(x, axis=None, keepdims=True)",
    "softmax backward": "sdpa.softmax_backward(x, x, axis=1, temperature=2.0)",
    "Jacobian": "sdpa.softmax_jacobian(x.tolist())",
    "log softmax": "sdpa.log_softmax(x, axis=0)",
    "log softmax backward": "sdpa.log_softmax_backward(x, x)",
    "logsumexp backward": "sdpa.logsumexp_backward(lse, x, lse)",
    "additive": "sdpa.additive_attention(x, x, x, x[0].T, x[0].T, lse[0])",
    "additive backward": """sdpa.additive_attention_backward(
        x, x, x, x, x[0].T, x[0].T, lse[0], lse[0], x, lse, attn_mask=bias)""",
    "PyTorch's": "sdpa.scaled_dot_product_attention(x, x, x, bias, enable_gqa=True)",
    "integers": "sdpa.softmax(np.arange(6))",
    "configuration": "sdpa.show_config('dicts')",
    "names": "sdpa._core._isas()",
    "options": "sdpa._core._options()",
    "handlers": "sorted(sdpa._core._xla_handlers())",
    "arguments": "sdpa._core._xla_arguments()",
    "operations": "sdpa._core._operations()",
    "arrays": "tuple(sdpa._core._arrays(x=own, y=[1.0]))",
    "pattern": "sdpa._core._pattern(x, x)",
}
WITHOUT_ARRAYS = {
    *("configuration", "names", "options", "handlers", "arguments", "operations"),
    *("refused", "refused name", "refused keyword", "refused synonym", "refused scale"),
    *("out", "softmax out"),
}
# These call functions in Python.
IN_PYTHON = {"elsewhere", "refused keyword", *(name for name in CALLS if "functions" in name)}


@pytest.mark.uninstrumented
@pytest.mark.parametrize("name", CALLS)
def test_whatever_allocation_of_the_binding_fails(name):
    """Python's own allocations fail in turn: MemoryError or the right result, no leak.

    `_core._alloc_fail_after` does this for the core's. Leaks are not looked for where functions in
    Python are called, since CPython itself loses blocks where a frame finds no memory.
    """
    pytest.importorskip("_testcapi")
    rounds = 0 if name in IN_PYTHON else 100
    program = f"""
from _testcapi import remove_mem_hooks, set_nomemory

{ARRAYS}
def bits():
    try:
        found = {CALLS[name]}
    except (TypeError, ValueError) as error:
        if not error.args and sys.version_info < (3, 11, 7):
            raise MemoryError  # PyErr_Format of these Pythons loses it
        return str(error)
    found = found if isinstance(found, tuple) else (found,)
    return [a.tobytes() if isinstance(a, np.ndarray) else repr(a) for a in found]

def fail_in_turn():
    failures = n = 0
    while n < failures + 20:  # Python itself does without some
        set_nomemory(n, n + 1)
        try:
            found = bits()
        except MemoryError:
            found = None
        remove_mem_hooks()
        failures += found is None
        assert found in (None, expected), found
        n += 1
    return failures

expected = bits()
assert isinstance(expected, str) == {name.startswith("refused")}, expected
for _ in range(5):  # Python keeps some exceptions, and learns
    assert fail_in_turn() > 0
# Python and NumPy keep some, for a while with every failure; a leak never ends.
grown = 0
for _ in range({rounds}):
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(10):
        fail_in_turn()
    gc.collect()
    grown = sys.getallocatedblocks() - before
    if grown < 5:
        break
assert grown < 5, grown
print("ok")
"""
    assert run(program) == "ok"


@pytest.mark.uninstrumented
def test_whatever_allocation_of_the_import_fails():
    """MemoryError, where NumPy's own import gives no ImportError; the last import is whole."""
    pytest.importorskip("_testcapi")
    program = """
import collections
from importlib.util import module_from_spec, spec_from_file_location
from _testcapi import remove_mem_hooks, set_nomemory

def cheap(name, fields, module):
    return type(name, (tuple,), {"_fields": tuple(fields.split())})

sys.settrace(None)  # what measures coverage would not find memory either, and crash
collections.namedtuple = cheap  # collections' own compiles Python
spec = spec_from_file_location("sdpa._core", sdpa._core.__file__)
failures = n = right = 0
while right < 20:  # Python itself does without some
    module = module_from_spec(spec)
    set_nomemory(n, n + 1)
    try:
        spec.loader.exec_module(module)
        failed = False
    except (MemoryError, ImportError) as error:
        failed = isinstance(error, MemoryError) or n < 9
        if not failed:
            raise
    remove_mem_hooks()
    failures += failed
    right = 0 if failed else right + 1
    n += 1
assert failures > 1000
assert dir(module) == dir(sdpa._core)
print("ok")
"""
    assert run(program) == "ok"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return ctypes.CDLL(compiled(tmp_path_factory.mktemp("data"), DATA))


@POSIX
@pytest.mark.parametrize("name", CALLS)
def test_whatever_allocation_of_an_array_fails(data, name):
    """NumPy takes the memory of arrays from elsewhere: MemoryError, and nothing is kept."""
    names = {"np": np, "sdpa": sdpa}
    exec(ARRAYS, names)
    left, kept = (ctypes.c_int.in_dll(data, of) for of in ("left", "kept"))
    handler = ctypes.addressof(ctypes.c_char.in_dll(data, "handler"))
    kept.value = 0
    for n in itertools.count():
        left.value = n
        with allocated_by(handler):
            try:
                eval(CALLS[name], names)
                failed = False
            except (MemoryError, TypeError, ValueError) as error:
                failed = isinstance(error, MemoryError)
        assert (failed, kept.value) == (left.value < 0, 0), n
        if not failed:
            break
    assert (n == 0) == (name in WITHOUT_ARRAYS)


# -------------------------------------------------------------------------------------- files


@pytest.fixture
def mapped(tmp_path, rng):
    path = tmp_path / "x.npy"
    np.save(path, rng.standard_normal((4096, 64)))
    return path


def test_a_read_only_memory_mapped_file_is_read_in_place(mapped):
    x = np.load(mapped, mmap_mode="r")
    assert np.array_equal(sdpa.attention(x, x, x), sdpa.attention(*[np.array(x)] * 3))
    with pytest.raises(ValueError, match="out"):
        sdpa.attention(x, x, x, out=x)


@POSIX
@pytest.mark.uninstrumented
def test_a_truncated_file_ends_the_process_as_the_page_says(mapped):
    program = f"""
x = np.load({str(mapped)!r}, mmap_mode="r")
os.truncate({str(mapped)!r}, 4096)
sdpa.attention(x, x, x)
"""
    command = [sys.executable, "-c", PRELUDE + program]
    assert subprocess.run(command, capture_output=True).returncode == -signal.SIGBUS


# ----------------------------------------------------------------------------------- rounding


@POSIX
@pytest.mark.parametrize("mode", ["down", "up", "zero", "flush"])
def test_results_in_another_mode_of_floating_point(mode, compute_dtype, isa, tmp_path):
    """The bits are those of the default mode, and the caller's own mode stays."""
    program = f"""
import ctypes

set_mode = ctypes.CDLL({str(compiled(tmp_path, MODES))!r}).set_mode
sdpa._core._use_isa({isa!r})
q, k, v, g = rng.standard_normal((4, 4, 300, 48)).astype("{np.dtype(compute_dtype).name}")
w, u = q[:2, :48]  # an additive score's
out, lse = sdpa.attention_forward(q, k, v)
weights, total = sdpa.softmax(q), sdpa.logsumexp(q)
added = sdpa.additive_attention_forward(q, k, v, w, u, u[0])
far = np.where(np.arange(48) % 3, q, -np.inf)  # and a row without any number
far[0, 0] = -np.inf
calls = (
    lambda n: sdpa.attention_forward(q, k, v, workers=n),
    lambda n: sdpa.attention_forward(q[:, :7], k[:, :7], v[:, :7], is_causal=True, workers=n),
    lambda n: sdpa.attention_forward(q, k, v, far[:, :, :1], softcap=2.0, workers=n),
    lambda n: sdpa.attention_backward(g, q, k, v, out, lse, workers=n),
    lambda n: sdpa.attention_jvp(q, k, v, g, v, k, workers=n),
    lambda n: sdpa.attention_double_backward(q, k, v, g, q, k, v, out, lse, workers=n),
    lambda n: sdpa.attention_weights(q, k, workers=n),
    lambda n: sdpa.attention_statistics(q, k, is_causal=True, workers=n),
    lambda n: sdpa.attention_received(q, k, workers=n),
    lambda n: sdpa.additive_attention_forward(q, k, v, w, u, u[0], workers=n),
    lambda n: sdpa.additive_attention_backward(g, q, k, v, w, u, u[0], None, *added, workers=n),
    lambda _: sdpa.merge_attention([out, out], [lse, lse - 1]),
    lambda _: sdpa.softmax(far, temperature=0.3),
    lambda _: sdpa.softmax(far, axis=1),
    lambda _: sdpa.log_softmax(far),
    lambda _: sdpa.logsumexp(far),
    lambda _: sdpa.softmax_backward(g, weights),
    lambda _: sdpa.log_softmax_backward(g, weights),
    lambda _: sdpa.logsumexp_backward(total, far, total),
    lambda _: sdpa.softmax_jacobian(weights[0]),
)

def bits(call, workers):
    found = call(workers)
    return [x.tobytes() for x in (found if isinstance(found, tuple) else (found,)) if x is not None]

expected = [bits(call, 1) for call in calls]
assert set_mode(b"{mode}") == 1
quotients = [1 / n for n in (3, 10)]  # one is rounded down, the other up
for workers in 1, 2:
    found = [bits(call, workers) for call in calls]
    assert [i for i, x in enumerate(found) if x != expected[i]] == []
assert quotients == [1 / n for n in (3, 10)]
set_mode(b"nearest")
print(quotients == [1 / n for n in (3, 10)])
"""
    assert run(program) == str(mode == "flush")
