"""Effects on the process: forks, exits, interruption, interpreters."""

import subprocess
import sys

import pytest
from support.machine import POSIX
from support.process import run

# --------------------------------------------------------------------------------------- fork


@pytest.mark.forks
@POSIX
def test_twenty_children_in_a_row():
    program = """
for i in range(20):
    check_child(in_child(works), i)
    works()
print("ok")
"""
    assert run(program) == "ok"


@pytest.mark.forks
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


@pytest.mark.forks
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


@pytest.mark.forks
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


@POSIX
def test_a_signal_handler_may_compute_during_a_call_that_keeps_the_gil():
    """Its own call, a long one, has released the GIL; the short one then has nothing to take."""
    program = """
from ctypes import pythonapi
from functools import partial

def handler(number, frame):
    works()
    handled.append(number)

handled, y = [], np.ones((4, 2, 2))
signal.signal(signal.SIGINT, handler)
signal_comes = partial(pythonapi.PyErr_SetInterruptEx, signal.SIGINT)
steps = signal_comes, partial(sdpa.attention, y, y, y, workers=1), partial(len, handled)
time.sleep(0.2)  # calls look for signals seldom
# Called by C, between whose calls no Python code looks for them.
_, result, n_handled = map(partial.__call__, steps)
assert n_handled == 1
np.testing.assert_array_equal(result, y)
print("ok")
"""
    assert run(program) == "ok"


@pytest.mark.forks
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
