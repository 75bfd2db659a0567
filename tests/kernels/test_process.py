"""Effects on the process: forks, exits, interruption, memory."""

import subprocess
import sys

import numpy as np
import pytest
from support.machine import LINUX, POSIX
from support.process import run

import sdpa
from sdpa import _core

# --------------------------------------------------------------------------------------- fork


@POSIX
def test_twenty_children_in_a_row():
    program = """
for i in range(20):
    check_child(in_child(works), i)
    works()
print("ok")
"""
    assert run(program) == "ok"


@POSIX
def test_children_of_children_and_many_at_once():
    program = """
def family():
    works()
    for i in range(3):
        check_child(in_child(works), i)

for pid in [in_child(family) for _ in range(4)]:
    check_child(pid, pid)
print("ok")
"""
    assert run(program) == "ok"


@POSIX
def test_children_while_other_threads_compute():
    program = """
busy = True

def compute():
    while busy:
        works()

threads = [threading.Thread(target=compute) for _ in range(2)]
for thread in threads:
    thread.start()
for i in range(20):
    time.sleep(0.003 * (i % 5))
    check_child(in_child(works), i)
busy = False
for thread in threads:
    thread.join()
print("ok")
"""
    assert run(program) == "ok"


@POSIX
def test_multiprocessing():
    program = """
import multiprocessing

with multiprocessing.get_context("fork").Pool(2) as pool:
    for result in pool.map(lambda_free, range(8)):
        assert result == out.tobytes()
print("ok")
"""
    define = """
def lambda_free(_):
    return sdpa.attention(x, x, x, workers=2).tobytes()
"""
    assert run(define + program) == "ok"


# --------------------------------------------------------------------------------------- exit


@pytest.mark.parametrize(
    "last", ["", "sys.exit(0)", "os._exit(0)", "del sdpa, sys.modules['sdpa']"]
)
def test_exit_after_use(last):
    run(f"works()\n{last}", timeout=30)


def test_exit_while_a_daemon_thread_computes():
    # Work that takes far longer than the timeout, in units that wait for each other.
    program = """
n = 1 << 17
y = np.ones((n, 64), np.float32)
args = (y, y, y, y, y, np.ones(n, np.float32))
for target in sdpa.attention_backward, sdpa.attention_backward:
    threading.Thread(target=target, args=args, kwargs={"workers": 3}, daemon=True).start()
time.sleep(0.3)
print("leaving", flush=True)
"""
    assert run(program, timeout=30) == "leaving"


@pytest.mark.parametrize("joins", [False, True])
def test_a_daemon_thread_that_computes_at_exit_ends_without_a_traceback(joins):
    """This holds even if another exit handler, run after that of sdpa, waits for the thread."""
    program = f"""
import atexit

n = 1 << 17
y = np.ones((n, 64), np.float32)
options = {{"workers": 3}}
thread = threading.Thread(target=sdpa.attention, args=(y, y, y), kwargs=options, daemon=True)

def join():
    thread.join()
    print("joined")

atexit.unregister(sdpa._core._close_pool)
if {joins}:
    atexit.register(join)
atexit.register(sdpa._core._close_pool)
sys.stderr = sys.stdout  # Python writes the tracebacks of threads there
thread.start()
time.sleep(0.3)
"""
    assert run(program, timeout=30) == ("joined" if joins else "")


# ------------------------------------------------------------------------------- interruption


@POSIX
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize(
    "call",
    [
        "sdpa.attention(y, y, y, workers=WORKERS)",
        "sdpa.attention(y, y, y, is_causal=True, workers=WORKERS)",
        "sdpa.attention(row, huge, huge, workers=WORKERS)",
        "sdpa.attention_backward(y, y, y, y, y, ones, workers=WORKERS)",
        "sdpa.attention_backward(y, y, y, y, y, ones, is_causal=True, workers=WORKERS)",
        "sdpa.attention_backward(row, row, huge, huge, row, one, **query, workers=WORKERS)",
        "sdpa.additive_attention(y, y, y, w, w, w[0], workers=WORKERS)",
        "sdpa.additive_attention_backward(y, y, y, y, w, w, w[0], None, y, ones, workers=WORKERS)",
        "sdpa.set_num_threads(WORKERS) or sdpa.logsumexp(tall)",
        "sdpa.set_num_threads(WORKERS) or sdpa.softmax(tall[: 1 << 17], axis=0)",
        "sdpa.attention_received(z, z, **packed, queries=rng.permutation(len(z)), workers=WORKERS)",
    ],
)
def test_ctrl_c_ends_a_long_call_within_a_second(call, workers):
    program = f"""
y = np.ones((1 << 18, 64), np.float32)
row = y[:1]
huge = np.broadcast_to(row, (1 << 27, 64))
tall = np.broadcast_to(row[0, 0], (1 << 23, 4096))
query = {{"needs": ("query",)}}
ones = np.ones(1 << 18, np.float32)
one = ones[:1]
w = np.ones((64, 64), np.float32)
z = y[:, None]
starts = np.minimum(np.arange(1 << 22), len(z))
packed = dict(cu_seqlens_q=starts, cu_seqlens_k=starts)
sent = None

def interrupt():
    global sent
    time.sleep(0.2)
    sent = time.perf_counter()
    os.kill(os.getpid(), signal.SIGINT)

# Whoever runs the tests in the background may have told them to ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
thread = threading.Thread(target=interrupt)
thread.start()
try:
    {call.replace("WORKERS", str(workers))}
except KeyboardInterrupt:
    took = time.perf_counter() - sent
    assert took < 1, took
    works()
    print("interrupted")
thread.join()
"""
    assert run(program, timeout=60) == "interrupted"


@POSIX
def test_a_signal_handler_runs_during_a_call_and_may_compute():
    program = """
y = np.ones((1 << 14, 64), np.float32)
handled = []

def handler(number, frame):
    works()
    handled.append(time.perf_counter())

signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.05)
while not handled:
    result = sdpa.attention(y, y, y, workers=2)
finished = time.perf_counter()
np.testing.assert_allclose(result, 1, rtol=1e-5)
print("ok")
"""
    assert run(program) == "ok"


@pytest.mark.slow
@POSIX
@pytest.mark.parametrize("poll", ["raises", "returns"])
def test_a_child_forked_by_a_signal_handler_during_a_call_has_no_result(poll):
    """Rows that other threads were computing exist in the parent alone: no child may return."""
    program = f"""
y = rng.standard_normal((1 << 14, 64), np.float32)
expected = sdpa.attention(y, y, y, workers=4)
parent, children = os.getpid(), []

def handler(number, frame):
    pid = os.fork()
    if pid:
        children.append(pid)
    else:
        signal.alarm(60)
        works()  # the child's own calls do
        if {poll == "raises"}:
            raise LookupError

signal.signal(signal.SIGALRM, handler)
for attempt in range(4):
    signal.setitimer(signal.ITIMER_REAL, 0.03 + 0.03 * attempt)
    try:
        result = sdpa.attention(y, y, y, workers=4)
    except (RuntimeError, LookupError) as error:
        assert os.getpid() != parent
        assert isinstance(error, LookupError) == {poll == "raises"}
        assert {poll == "raises"} or "a signal handler forked the process" in str(error)
        works()
        os._exit(7)
    if os.getpid() != parent:
        os._exit(1)
    assert result.tobytes() == expected.tobytes()
    works()
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
assert codes and set(codes) == {{7}}, codes
print("ok")
"""
    assert run(program, timeout=300) == "ok"


@POSIX
def test_a_child_forked_during_a_call_on_one_thread_finishes_it():
    program = """
y = rng.standard_normal((1 << 13, 64), np.float32)
expected = sdpa.attention(y, y, y)
parent, children = os.getpid(), []

def handler(number, frame):
    pid = os.fork()
    if pid:
        children.append(pid)

signal.signal(signal.SIGALRM, handler)
while not children and os.getpid() == parent:
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    result = sdpa.attention(y, y, y, workers=1)
assert result.tobytes() == expected.tobytes()
if os.getpid() != parent:
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 7
print("ok")
"""
    assert run(program) == "ok"


# ------------------------------------------------------------------------------- interpreters


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="NumPy cannot be imported there")
@pytest.mark.parametrize("end", ["interpreters.destroy(number)", ""], ids=["destroyed", "left"])
def test_a_process_ends_that_has_used_another_interpreter(end):
    """NumPy loads in one interpreter of a process; here the first has not imported it."""
    program = f"""
import _xxsubinterpreters as interpreters
number = interpreters.create()
interpreters.run_string(number, '''
import warnings
warnings.simplefilter("ignore")
import numpy as np
import sdpa
y = np.ones((1 << 14, 64), np.float32)
assert abs(sdpa.attention(y, y, y, workers=2) - 1).max() < 1e-5
assert (sdpa.softmax(np.ones((1 << 24, 2), np.float32), axis=0) == 2.0**-24).all()  # polls
''')
{end}
print("ok")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.returncode) == ("ok\n", 0), done.stderr


# ------------------------------------------------------------------------------------- memory


@pytest.mark.slow
@LINUX
@pytest.mark.uninstrumented
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_memory_of_long_sequences(workers):
    program = f"""
n = 32768
q, k, v, g = (rng.standard_normal((n, 64), np.float32) for _ in range(4))
lse = np.full(n, 12, np.float32)
grown = peak(lambda m: sdpa.attention_forward(q[:m], k[:m], v[:m], workers={workers}))
assert grown < 24e6, f"forward: {{grown / 1e6}} MB"
print(f"forward {{grown / 1e6:.1f}} MB", end=", ")

n_q = 4096
grown = peak(
    lambda m: sdpa.attention_backward(
        g[:n_q][:m], q[:n_q][:m], k[:m], v[:m], q[:n_q][:m], lse[:n_q][:m], workers={workers}
    )
)
assert grown < 48e6, f"backward: {{grown / 1e6}} MB"
print(f"backward {{grown / 1e6:.1f}} MB")
"""
    print(run(program, timeout=300))


# A round of `succeed` or `fail` is more than ten calls: 300 rounds are more than 3000 calls.
LEAKS = """
half = x.astype(np.float16)
mask = np.tril(np.ones((300, 300), bool))
bias = np.zeros((300, 300), np.float32)
rows = np.ascontiguousarray(x[0, :20])

def raises(error, function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except error:
        return
    raise AssertionError((function, "did not raise", error))

def succeed():
    s = rows[:8]
    o, l = sdpa.attention_forward(s, s, s)
    sdpa.attention(s, s, s, mask[:8, :8], is_causal=True, out=o)
    sdpa.attention(half[0, :8, ::2], half[0, :8, ::2], half[0, :8], scale=1.0)
    sdpa.attention([[1.0, 2.0]], [[1.0, 2.0]], [[1.0]])
    sdpa.scaled_dot_product_attention(s, s, s, bias[:8, :8])
    sdpa.attention_backward(o, s, s, s, o, l, bias[:8, :8], needs=("query", "attn_mask"))
    sdpa.attention_weights(s, s, stage="scores")
    sdpa.merge_attention([o, o], [l, l])
    w = sdpa.softmax(s, axis=(0, 1), where=s > 0)
    sdpa.softmax_backward(s, w, axis=(0, 1))
    sdpa.log_softmax_backward(s, sdpa.log_softmax(s))
    sdpa.logsumexp_backward(s[:, 0], s, sdpa.logsumexp(s))
    sdpa.softmax_jacobian(w[0])

def fail():
    s = rows[:8]
    raises(ValueError, sdpa.attention, s, s[:, :5], s)
    raises(ValueError, sdpa.attention, s, s, s[:5])
    raises(TypeError, sdpa.attention, s, s, s.astype(int))
    raises(TypeError, sdpa.attention, s, s, s, mask[:8, :8].astype(int))
    raises(TypeError, sdpa.attention, s, s, s, nonsense=1)
    raises(TypeError, sdpa.attention, s, s)
    raises(TypeError, sdpa.attention, s, s, s, is_causal=1.5)
    raises(ValueError, sdpa.attention, s, s, s, scale=float("nan"))
    raises(ValueError, sdpa.attention, s, s, s, workers=0)
    raises(ValueError, sdpa.attention, s, s, s, out=s)
    raises(ValueError, sdpa.attention_weights, s, s, stage="nonsense")
    raises(ValueError, sdpa.attention_backward, s, s, s, s, s, s[:, 0], needs=("nonsense",))
    raises((TypeError, ValueError), sdpa.merge_attention, [s], [s, s])
    raises(TypeError, sdpa.softmax, s.astype(complex))
    raises(ValueError, sdpa.softmax, s, temperature=-1.0)
    raises((IndexError, ValueError), sdpa.softmax, s, axis=7)

def no_memory():
    for n in range(10):
        sdpa._core._alloc_fail_after(n)
        try:
            sdpa.attention(x, x, x, workers=2)
        except MemoryError:
            pass
        finally:
            sdpa._core._alloc_fail_after(-1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("function", ["succeed", "fail", "no_memory"])
def test_no_object_leaks_over_3000_calls(function):
    program = f"""
import tracemalloc

arrays = [x, half, mask, bias, rows, np.float32, "query"]
if sys.version_info < (3, 12):
    arrays.append(None)  # later it is immortal: Python ceased to keep its count
tracemalloc.start()
for _ in range(300):  # caches of NumPy and of tracemalloc fill up
    {function}()
references = [sys.getrefcount(a) for a in arrays]
grown = []
for _ in range(3):
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(100):
        {function}()
    gc.collect()
    grown.append(tracemalloc.get_traced_memory()[0] - before)
# NumPy's buffers are traced too. One object lost in each round would be 100 times 24 bytes or
# more, every time; a cache that grows does so once.
assert min(grown) < 100 * 24, grown
changes = np.subtract([sys.getrefcount(a) for a in arrays], references)
# A reference lost in each round would be 300. None is shared with caches that grow and shrink.
assert (abs(changes) < 100).all(), changes
print("ok")
"""
    assert run(LEAKS + program, timeout=300) == "ok"


@pytest.mark.slow
@LINUX
@pytest.mark.uninstrumented
@pytest.mark.parametrize("function", ["succeed", "fail", "no_memory"])
def test_no_memory_leaks_over_3000_calls(function):
    program = f"""
for _ in range(100):
    {function}()
gc.collect()
before = status("VmRSS")
for _ in range(300):
    {function}()
gc.collect()
grown = status("VmRSS") - before
assert grown < 1 << 19, grown
print("ok")
"""
    assert run(LEAKS + program, timeout=300) == "ok"


@pytest.mark.usefixtures("isa")
def test_allocation_failure_gives_memory_error(dtype):
    x = np.ones((4, 200, 40), dtype)
    bias = np.ones((200, 200), dtype)
    lse = np.full((4, 200), 3, np.float64 if dtype == np.float64 else np.float32)
    routines = [
        lambda: sdpa.attention(x, x, x, bias, workers=2),
        lambda: sdpa.attention_backward(
            x, x, x, x, x, lse, bias, needs=("query", "key", "value", "attn_mask")
        ),
        lambda: sdpa.attention_weights(x, x, attn_mask=bias),
        lambda: sdpa.softmax(x, axis=(0, 1)),
        lambda: sdpa.softmax(np.broadcast_to(x, (3, *x.shape)), axis=(0, 1, 2, 3)),
    ]
    for number, routine in enumerate(routines):
        expected, failures = routine(), 0
        for n in range(100):
            _core._alloc_fail_after(n)
            try:
                result = routine()
                break
            except MemoryError:
                failures += 1
            finally:
                _core._alloc_fail_after(-1)
        assert failures == n
        assert failures >= 1 or number == 3
        expected, result = (r if isinstance(r, tuple) else (r,) for r in (expected, result))
        for a, b in zip(expected, result, strict=True):
            assert (a is None and b is None) or a.tobytes() == b.tobytes()


def test_too_large_a_result_gives_memory_error():
    row = np.broadcast_to(np.float32(1), (1 << 40, 1))
    with pytest.raises(MemoryError):
        sdpa.attention(row, row[:2], row[:2])
    with pytest.raises((MemoryError, ValueError)):
        sdpa.attention_weights(row, row)


BEYOND = [(3, 1 << 57), (3, 1 << 41), (1 << 41, 3)]


@pytest.mark.parametrize("shape", BEYOND)
def test_sizes_that_zero_strides_allow_and_no_memory_serves(shape):
    """Numbers of bytes would wrap around; the mechanisms come down to these calls."""
    x, value = np.broadcast_to(np.float32(1), shape), np.ones((shape[0] % (1 << 20) or 1, 2))
    x_or_value = x if shape[0] > 1 << 40 else value.astype(np.float32)
    rows = {"query": x, "key": x}
    operands = rows | {"value": x_or_value}
    tangents = {f"{name}_t": None for name in operands}
    gg = dict.fromkeys(("gg_query", "gg_key", "gg_value"))
    saved = {"grad_out": x_or_value, "out": x_or_value, "lse": x[:, 0]}
    calls = [
        (sdpa.attention, operands),
        (sdpa.attention_weights, rows),
        (sdpa.attention_received, rows),
        (sdpa.attention_statistics, rows),
        (sdpa.attention_jvp, operands | tangents),
        (sdpa.attention_backward, operands | saved),
        (sdpa.attention_double_backward, operands | saved | gg),
    ]
    for function, arguments in calls:
        with pytest.raises(MemoryError, match="no memory for attention of Lq = "):
            function(**arguments)


def test_sizes_of_additive_attention_that_no_memory_serves():
    x, w = np.ones((3, 2), np.float32), np.broadcast_to(np.float32(1), (2, 1 << 57))
    with pytest.raises(MemoryError, match="no memory for additive attention of h = "):
        sdpa.additive_attention(x, x, x, w, w, w[0])


def test_batches_of_zero_strides_and_empty_results():
    """Products of the sizes would wrap around, to no work at all."""
    query = np.broadcast_to(np.float32(1), (1 << 40, 1, 1, 2, 4))
    key = np.broadcast_to(np.float32(1), (1 << 40, 1, 3, 4))
    with pytest.raises(MemoryError, match="no memory"):
        sdpa.attention(query, key, key[..., :0])


def test_queries_of_many_packed_sequences_take_linear_time():
    """Each sequence looked at every chosen query: 40,000 sequences took 70 times as long."""
    n = 40_000
    x = np.ones((n, 1, 4), np.float32)
    packed = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), np.arange(n + 1))
    chosen = np.random.default_rng(0).integers(0, n, 3 * n)
    got = sdpa.attention_received(x, x, **packed, queries=chosen)
    np.testing.assert_array_equal(got.total[0], np.bincount(chosen, minlength=n))


# Depth of the stack of a fresh thread after a call, from the pages that are present.
STACK = """
import ctypes, struct
libc = ctypes.CDLL(None)
libc.pthread_self.restype = ctypes.c_void_p

def bounds():
    attributes, low, size = ctypes.create_string_buffer(64), ctypes.c_void_p(), ctypes.c_size_t()
    assert libc.pthread_getattr_np(ctypes.c_void_p(libc.pthread_self()), attributes) == 0
    libc.pthread_attr_getstack(attributes, ctypes.byref(low), ctypes.byref(size))
    return low.value, low.value + size.value

def depth(call):
    found = []
    def thread():
        low, high = bounds()
        call()
        with open("/proc/self/pagemap", "rb") as pages:
            pages.seek(low // 4096 * 8)
            n = (high - low) // 4096
            entries = struct.unpack(f"{n}Q", pages.read(8 * n))
        found.append(high - low - 4096 * next(i for i, x in enumerate(entries) if x >> 63))
    threading.stack_size(1 << 20)
    one = threading.Thread(target=thread)
    one.start()
    one.join()
    return found[0]

dtype = np.DTYPE
x, w = np.ones((2, 70, 24), dtype), np.ones((24, 24), dtype)
m = np.ones((70, 70), dtype) * 2
out, lse = sdpa.attention_forward(x, x, x)
needs = ("query", "key", "value", "attn_mask")
own = dict(needs=needs, attn_mask=m)
cu = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), [0, 30, 70])
p = x.swapaxes(0, 1)
base = depth(lambda: sdpa.set_num_threads(1))
calls = {
    "forward": lambda: sdpa.attention(x, x, x, m, is_causal=True),
    "backward": lambda: sdpa.attention_backward(x, x, x, x, out, lse, **own),
    "packed": lambda: sdpa.attention_backward(p, p, p, p, out.swapaxes(0, 1), lse, **cu),
    "jvp": lambda: sdpa.attention_jvp(x, x, x, x, x, x, m, attn_mask_t=m),
    "double": lambda: sdpa.attention_double_backward(x, x, x, x, x, x, x, out, lse, **own),
    "additive": lambda: sdpa.additive_attention_backward(x, x, x, x, w, w, w[0], None, out, lse),
    "statistics": lambda: sdpa.attention_statistics(x, x),
    "received": lambda: sdpa.attention_received(x, x),
    "softmax": lambda: sdpa.softmax(x, axis=(0, 1)),
    "merge": lambda: sdpa.merge_attention([out, out], [lse, lse]),
}
for isa, has in sdpa._core._isas().items():
    if not has:
        continue
    sdpa._core._use_isa(isa)
    for name, call in calls.items():
        call()
        used = depth(call) - base
        print(isa, name, used)
        assert used <= 48 << 10, (isa, name, used)
"""


@LINUX
@pytest.mark.uninstrumented
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_calls_need_at_most_48_kib_of_stack(dtype):
    print(run(STACK.replace("DTYPE", dtype)))
