"""sdpa.blocks in a process of its own: what it holds in memory, and an interrupt."""

import pytest
from support.machine import LINUX, POSIX
from support.process import run

LONGER_THAN_MEMORY = """
from sdpa import blocks

class Made:
    # Two gigabytes of numbers that exist only once they are read.
    shape, dtype = (2**22, 128), np.dtype(np.float32)

    def __getitem__(self, index):
        rows = index[0]
        return np.full((rows.stop - rows.start, 128), rows.start % 7, np.float32)

query = rng.standard_normal((16, 128), np.float32)
found = blocks.attend(query, Made(), Made(), key_lengths=5000)
given = dict(grad_out=query, query=query, keys=Made(), values=Made(), out=found.out, lse=found.lse)

def forward(small):
    return blocks.attend(query, Made(), Made(), key_lengths=100 if small else None)

def backward(small):
    lengths = 100 if small else None
    return blocks.attend_backward(**given, needs=("query",), key_lengths=lengths).query

print(peak(forward), peak(backward))
"""


@pytest.mark.slow
@LINUX
@pytest.mark.uninstrumented
def test_memory_is_that_of_a_few_blocks():
    """A block of keys and values is 8 MB; two to three are held, of four gigabytes."""
    for grown in map(int, run(LONGER_THAN_MEMORY).split()):
        assert grown < 32e6


MERGED_IN_PLACE = """
from sdpa import blocks

query = np.zeros((2**17, 64), np.float32)
keys = np.zeros((1000, 64), np.float32)

def forward(small):
    rows = slice(0, small or 2**17)
    return blocks.attend(query, keys, keys, rows=rows, block=250)

print(peak(forward) / query.nbytes)
"""


@LINUX
@pytest.mark.uninstrumented
def test_results_are_merged_in_place():
    """Beside the result lies that of one block, and no union of them."""
    assert float(run(MERGED_IN_PLACE)) < 1.4


INTERRUPTED = """
import os, signal, threading, time
from sdpa import blocks

class Long:
    shape, dtype = (2**16, 8), np.dtype(np.float32)
    interrupted = False

    def __getitem__(self, index):
        rows = index[0]
        if rows.start >= 50 and not Long.interrupted:
            Long.interrupted = True  # once: a second Ctrl-C would end the waiting, too
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
        return np.zeros((rows.stop - rows.start, 8), np.float32)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
query = rng.standard_normal((4, 8), np.float32)
start = time.monotonic()
try:
    blocks.attend(query, Long(), Long(), block=10)
except KeyboardInterrupt:
    print(time.monotonic() - start, threading.active_count())
"""


@POSIX
def test_an_interrupt_ends_it_and_its_thread():
    seconds, threads = run(INTERRUPTED).split()
    assert float(seconds) < 10
    assert threads == "1"


STARTING = """
import threading
from sdpa import blocks

start = threading.Thread.start

def interrupted(thread):
    start(thread)
    raise KeyboardInterrupt

threading.Thread.start = interrupted
x = np.zeros((64, 8), np.float32)
try:
    blocks.attend(x, x, x, block=10)
except KeyboardInterrupt:
    for thread in threading.enumerate()[1:]:
        thread.join(5)
    print(threading.active_count())
"""


def test_an_interrupt_while_its_thread_starts_ends_that_thread():
    assert run(STARTING).split() == ["1"]


HANGING = """
from sdpa import blocks

class Hanging:
    shape, dtype = (2**10, 8), np.dtype(np.float32)

    def __getitem__(self, index):
        rows = index[0]
        if rows.start == AT < rows.stop:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            time.sleep(600)
        return np.zeros((rows.stop - rows.start, 8), np.float32)

signal.signal(signal.SIGINT, signal.default_int_handler)
query = rng.standard_normal((1024, 8), np.float32)
lse = np.zeros(1024, np.float32)

def forward():
    blocks.attend(query, Hanging(), Hanging(), block=10)

def backward():
    blocks.attend_backward(query, query, Hanging(), Hanging(), query, lse, block=10)

for function in forward, backward:
    start = time.monotonic()
    try:
        function()
    except KeyboardInterrupt:
        print(function.__name__, time.monotonic() - start)
"""


@POSIX
@pytest.mark.uninstrumented
@pytest.mark.parametrize("at", [0, 500, 1020])
def test_an_interrupt_ends_it_though_its_store_hangs(at):
    """In less than a second; nor does the end of the process wait for the store."""
    names, seconds = zip(
        *map(str.split, run(HANGING.replace("AT", str(at)), timeout=30).splitlines()), strict=True
    )
    assert names == ("forward", "backward")
    assert max(map(float, seconds)) < 1.1  # and a tenth until it comes
