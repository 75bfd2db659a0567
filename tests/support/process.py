"""Run a program in a new Python process, for forks, exits, interruption and memory."""

import os
import subprocess
import sys

PRELUDE = """
import gc, os, re, signal, sys, threading, time
import numpy as np
import sdpa

def status(field):
    return int(re.search(field + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

def peak(function):
    # Bytes that a call adds to the process at its highest, less the arrays that it returns.
    function(64)  # threads, code
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM = VmRSS
    before = status("VmRSS")
    result = function(None)
    result = result if isinstance(result, tuple) else (result,)
    return status("VmHWM") - before - sum(r.nbytes for r in result if r is not None)

def check_child(pid, what):
    _, code = os.waitpid(pid, 0)
    assert code == 0, (what, code)

rng = np.random.default_rng(0)
x = rng.standard_normal((4, 300, 64), np.float32)
out, lse = sdpa.attention_forward(x, x, x, workers=3)
grads = sdpa.attention_backward(x, x, x, x, out, lse, workers=3)

def works():
    again = sdpa.attention_forward(x, x, x, workers=3)
    assert again.out.tobytes() == out.tobytes() and again.lse.tobytes() == lse.tobytes()
    again = sdpa.attention_backward(x, x, x, x, out, lse, workers=3)
    for a, b in zip(again[:3], grads[:3]):
        assert a.tobytes() == b.tobytes()

def in_child(function):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.alarm(30)
        function()
        code = 0
    finally:
        os._exit(code)
"""


def run(program, timeout=500):
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PRELUDE + program],
        # XLA as users have it: see conftest.py.
        env={name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
        text=True,
        capture_output=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()
