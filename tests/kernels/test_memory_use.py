"""Memory that calls take: peaks, the stack, nothing left behind, and errors where none is left."""

import numpy as np
import pytest
from support.machine import LINUX
from support.process import run

import sdpa
from sdpa import _core


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


@LINUX
@pytest.mark.uninstrumented
@pytest.mark.parametrize("workers", [1, 4, 16])
def test_memory_of_a_backward_is_bounded_per_thread(workers):
    """Half a megabyte at d = 32; P of 8192 keys, 3.2 MB more, where rows are completed."""
    program = f"""
n_q, n_k, d = 4096, 16384, 32
q, k, v, g = (rng.standard_normal((n, d), np.float32) for n in (n_q, n_k, n_k, n_q))
for dtype, each in (("f4", 37e5), ("f8", 5e5)):
    lse = np.full(n_q, 12, dtype)
    grown = peak(
        lambda m: sdpa.attention_backward(g[:m], q[:m], k, v, g[:m], lse[:m], workers={workers})
    )
    assert grown < 4e6 + each * {workers}, (dtype, grown / 1e6)
"""
    run(program, timeout=300)


@LINUX
@pytest.mark.uninstrumented
@pytest.mark.parametrize("workers", [1, 2])
def test_memory_of_column_major_operands_is_one_copy_of_keys_and_values(workers):
    """None for one query, and of heads that share a key head one."""
    program = f"""
n_q, n_k, d = 256, 32768, 64
q, g = (rng.standard_normal((d, n_q), np.float32).T for _ in range(2))
k, v = (np.broadcast_to(rng.standard_normal((d, n_k), np.float32).T, (4, n_k, d)) for _ in range(2))
copies = k[0].nbytes + v[0].nbytes
q4 = np.broadcast_to(q, (4, n_q, d))
grown = peak(lambda m: sdpa.attention_forward(q4[:, :m], k[:, :m], v[:, :m], workers={workers}))
assert 0.9 * copies < grown < copies + 8e6, grown / 1e6
lse = np.full(n_q, 12.0)
grown = peak(
    lambda m: sdpa.attention_backward(g[:m], q[:m], k[0][:m], v[0][:m], g[:m], lse[:m],
                                      workers={workers})
)
assert 0.9 * copies < grown < copies + 12e6, grown / 1e6
grown = peak(lambda m: sdpa.attention_forward(q4[:, :1], k[:, :m], v[:, :m], workers={workers}))
assert grown < 4e6, grown / 1e6
"""
    run(program, timeout=300)


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
def traced():
    # Python's cache of attributes holds names by their address until others take their places,
    # and None where it is empty.
    sys._clear_type_cache()
    gc.collect()
    return tracemalloc.get_traced_memory()[0]

tracemalloc.start()
for _ in range(300):  # caches of NumPy and of tracemalloc fill up
    {function}()
traced()
references = [sys.getrefcount(a) for a in arrays]
grown = []
for _ in range(3):
    before = traced()
    for _ in range(100):
        {function}()
    grown.append(traced() - before)
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
