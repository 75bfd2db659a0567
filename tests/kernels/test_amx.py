"""The tiles of AMX need the system's permission, which a process gets once, at its first use."""

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys
import numpy as np
import sdpa

libc = ctypes.CDLL(None, use_errno=True)


def permitted():
    mask = ctypes.c_uint64()
    ARCH_PRCTL, ARCH_GET_XCOMP_PERM = 158, 0x1022
    assert libc.syscall(ARCH_PRCTL, ARCH_GET_XCOMP_PERM, ctypes.byref(mask)) == 0
    return bool(mask.value >> 18 & 1)


def small_stack_for_signals(size=8192):
    class Stack(ctypes.Structure):
        _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

    memory = ctypes.create_string_buffer(size)
    stack = Stack(ctypes.addressof(memory), 0, size)
    assert libc.sigaltstack(ctypes.byref(stack), None) == 0
    return memory


def forward(dtype, n=40):
    x = np.random.default_rng(0).standard_normal((3, 2, n, 16)).astype(dtype)
    return sdpa.attention(*x)


"""


def run(program, isa="amx"):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + program],
        env={"PYTHONPATH": ":".join(path or "." for path in sys.path), "SDPA_ISA": isa},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_permission_is_asked_at_the_first_use(dtype):
    run(f"""
assert not permitted()
forward(np.float64), forward(np.{dtype}, n=8)  # few queries take no tiles
assert not permitted()
forward(np.{dtype})
assert permitted()
""")


def test_other_kernels_never_ask():
    run("forward(np.float16), forward(np.float32); assert not permitted()", "avx512")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_small_stack_for_signals_means_other_kernels(dtype):
    """The system refuses the tiles, whose state would not fit into a frame of a signal."""
    program = f"""
memory = small_stack_for_signals()
print(forward(np.{dtype}).tobytes().hex(), permitted())
"""
    assert run(program) == run(program, "avx512")
    assert run(program).endswith("False\n")
    expected = run(program.replace("memory = small_stack_for_signals()", ""), "avx512")
    assert run(program, "avx512") == expected


def test_signals_during_calls_keep_the_tiles():
    """A handler runs between two instructions of a unit and saves and restores its registers."""
    run("""
import signal
signal.signal(signal.SIGALRM, lambda *ignored: None)
x = np.random.default_rng(0).standard_normal((3, 4, 1000, 64)).astype(np.float16)
expected = sdpa.attention(*x, workers=1)
signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
for _ in range(20):
    assert np.array_equal(sdpa.attention(*x, workers=1), expected)
""")


def test_threads_and_forked_children_have_the_tiles():
    run("""
import os
expected = forward(np.float16)
child = os.fork()
if child == 0:
    os._exit(0 if permitted() and np.array_equal(forward(np.float16), expected) else 1)
assert os.waitpid(child, 0)[1] == 0
sdpa.set_num_threads(4)
x = np.random.default_rng(0).standard_normal((3, 8, 500, 64)).astype(np.float16)
assert np.array_equal(sdpa.attention(*x), sdpa.attention(*x, workers=1))
""")
