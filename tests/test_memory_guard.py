"""No byte outside the arrays is touched: each of them ends, or begins, at a page that may not be.

Arguments are laid in such memory by hand; results are allocated by the C core through NumPy, whose
allocator is replaced during the call. A violation is a segmentation fault: the test that pytest
names last is the culprit.
"""

import contextlib
import ctypes
import itertools
import mmap
import weakref

import numpy as np
import pytest
from helpers import check_attention, compute_type, normal

import sdpa

pytestmark = pytest.mark.usefixtures("isa")

PAGE = mmap.PAGESIZE
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33)

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Pages:
    """Zeroed blocks of memory between two inaccessible pages, against the last or the first."""

    def __init__(self, at_end):
        self.at_end = at_end
        self.whole = {}

    def allocate(self, nbytes):
        inner = max(1, -(-nbytes // PAGE)) * PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        base = libc.mmap(None, inner + 2 * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        assert base != ctypes.c_void_p(-1).value
        assert libc.mprotect(base, PAGE, 0) == 0
        assert libc.mprotect(base + PAGE + inner, PAGE, 0) == 0
        address = base + PAGE + (inner - nbytes if self.at_end else 0)
        self.whole[address] = base, inner + 2 * PAGE
        return address

    def free(self, address):
        libc.munmap(*self.whole.pop(address))


@pytest.fixture(params=["after", "before"])
def pages(request):
    return Pages(request.param == "after")


def guarded(pages, x):
    """A contiguous copy of x with inaccessible pages around it."""
    y = np.ascontiguousarray(x)
    address = pages.allocate(y.nbytes)
    buffer = (ctypes.c_char * y.nbytes).from_address(address)
    weakref.finalize(buffer, pages.free, address)
    z = np.frombuffer(buffer, x.dtype).reshape(x.shape)
    z[...] = y
    return z


# ------------------------------------------------------------------------- NumPy's allocator

MALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
CALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
REALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Handler(ctypes.Structure):
    """PyDataMem_Handler of NumPy's C API (NEP 49)."""

    _fields_ = (
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        ("ctx", ctypes.c_void_p),
        ("malloc", MALLOC),
        ("calloc", CALLOC),
        ("realloc", REALLOC),
        ("free", FREE),
    )


def _handler(at_end):
    pages = Pages(at_end)

    def realloc(_, address, nbytes):
        base, size = pages.whole[address]
        old = base + size - PAGE - address if at_end else nbytes
        new = pages.allocate(nbytes)
        ctypes.memmove(new, address, min(old, nbytes))
        pages.free(address)
        return new

    handler = Handler(
        b"guard",
        1,
        None,
        MALLOC(lambda _, n: pages.allocate(n)),
        CALLOC(lambda _, n, size: pages.allocate(n * size)),
        REALLOC(realloc),
        FREE(lambda _, address, n: pages.free(address)),
    )
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = (
        ctypes.py_object,
        (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
    )
    return handler, new(ctypes.addressof(handler), b"mem_handler", None)


# Arrays outlive the call that made them, so these live as long as the process.
HANDLERS = {at_end: _handler(at_end) for at_end in (True, False)}


def _set_handler():
    """PyDataMem_SetHandler: entry 304 of NumPy's C API."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    table = pointer(np._core._multiarray_umath._ARRAY_API, None)
    entry = ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p))[304]
    return ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(entry)


@contextlib.contextmanager
def guarded_results(pages):
    """Every array that is allocated meanwhile is guarded."""
    set_handler = _set_handler()
    previous = set_handler(HANDLERS[pages.at_end][1])
    try:
        yield
    finally:
        set_handler(previous)


# ------------------------------------------------------------------------------------ tests


def test_the_guard_guards(pages):
    """The address beyond, or before, is in a page without access; and results are guarded, too."""
    with guarded_results(pages):
        result = np.empty(5, np.float32)
    for x in (guarded(pages, np.zeros(5, np.float32)), result):
        address = x.ctypes.data
        edge = address + x.nbytes if pages.at_end else address - 1
        with open("/proc/self/maps") as maps:
            ranges = [line.split()[:2] for line in maps]
        (rights,) = (
            rights
            for span, rights in ranges
            if int(span.split("-")[0], 16) <= edge < int(span.split("-")[1], 16)
        )
        assert rights.startswith("---")


def everything(pages, q, k, v, g, attn_mask=None, **options):
    """All routines of attention, arguments and results between guard pages; then the values."""
    with guarded_results(pages):
        out, lse = sdpa.attention_forward(q, k, v, attn_mask, **options)
        needs = ("query", "key", "value")
        if attn_mask is not None and attn_mask.dtype != bool:
            needs += ("attn_mask",)
        sdpa.attention_backward(g, q, k, v, out, lse, attn_mask, needs=needs, **options)
        sdpa.attention_weights(q, k, attn_mask, **options)
        sdpa.merge_attention([out, out], [lse, lse])
    mine = guarded(pages, np.zeros_like(out))
    sdpa.attention(q, k, v, attn_mask, out=mine, **options)
    np.testing.assert_array_equal(mine, out)
    check_attention(q, k, v, attn_mask, grad_out=g, **options)


@pytest.mark.parametrize("n_q", LENGTHS)
def test_sizes_around_the_lanes(rng, dtype, pages, n_q):
    for n_k, d in itertools.product(LENGTHS, (1, 3, 8, 17)):
        q, k, v, g = (
            guarded(pages, normal(rng, shape, dtype))
            for shape in ((n_q, d), (n_k, d), (n_k, d), (n_q, d))
        )
        options = {"is_causal": bool((n_k + d) % 2)}
        out, lse = sdpa.attention_forward(q, k, v, **options)
        with guarded_results(pages):
            sdpa.attention_forward(q, k, v, **options)
            sdpa.attention_backward(g, q, k, v, guarded(pages, out), guarded(pages, lse), **options)
            sdpa.attention_weights(q, k, **options)


@pytest.mark.parametrize(("n_q", "n_k"), [(1, 130), (49, 129), (97, 127), (130, 33)])
@pytest.mark.parametrize("d", [1, 7, 16, 65])
def test_sizes_around_the_blocks(rng, dtype, pages, n_q, n_k, d):
    q, k, v, g = (
        guarded(pages, normal(rng, (2, *shape), dtype))
        for shape in ((n_q, d), (n_k, d), (n_k, d + 1), (n_q, d + 1))
    )
    bias = normal(rng, (2, n_q, n_k), compute_type(dtype))
    bias[..., n_k // 2] = -np.inf
    for mask in (None, bias, bias[:1], bias[:, :1], bias[..., :1], bias < 0.5, bias[0, 0] < 0.5):
        mask = None if mask is None else guarded(pages, mask)
        everything(pages, q, k, v, g, mask, is_causal=True)


def test_reversed_and_interleaved(rng, dtype, pages):
    """Data that starts at its last byte, and rows that belong to several heads."""
    for n_q, n_k, d in ((5, 9, 3), (33, 130, 17)):
        q, k, v, g = (
            guarded(pages, normal(rng, (n, 2, d), dtype)).swapaxes(0, 1)
            for n in (n_q, n_k, n_k, n_q)
        )
        mask = guarded(pages, normal(rng, (n_q, n_k), dtype))
        everything(pages, q, k, v, g, mask)
        back = np.s_[:, ::-1, ::-1]
        everything(pages, q[back], k[back], v[back], g[back], mask[::-1, ::-1])
        everything(pages, q[:, ::2], k[:, ::2], v[:, ::2], g[:, ::2])


OPTIONS = {
    "plain": {},
    "softcap, window": {"softcap": 1.5, "window": (20, 2)},
    "sinks, ALiBi, causal": {"sinks": 2, "alibi_slopes": 2, "is_causal": True, "query_offset": 3},
    "mask, lengths": {"attn_mask": "whole", "key_lengths": 0.75},
    "mask over rows, dropout": {"attn_mask": "row", "dropout_p": 0.4, "rng": 9},
    "mask over keys": {"attn_mask": "column", "softcap": 2.0, "is_causal": "lower_right"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_and_second_order(rng, dtype, pages, name):
    """Every function with every option; the arguments of each, tangents too, and its results."""

    def argument(*shape):
        return guarded(pages, normal(rng, shape, dtype))

    for n_q, n_k, d in ((1, 1, 1), (5, 9, 3), (49, 130, 17), (97, 127, 8)):
        options = dict(OPTIONS[name])
        for per_head in {"sinks", "alibi_slopes"} & set(options):
            options[per_head] = argument(options[per_head])
        if "key_lengths" in options:
            options["key_lengths"] = int(options["key_lengths"] * n_k)
        shape = {"whole": (2, n_q, n_k), "row": (1, n_k), "column": (n_q, 1)}
        if "attn_mask" in options:
            options["attn_mask"] = argument(*shape[options["attn_mask"]])
        q, k, v, g = (argument(2, *s) for s in ((n_q, d), (n_k, d), (n_k, d + 1), (n_q, d + 1)))
        a, b, c = (argument(*x.shape) for x in (q, k, v))
        e, h = (
            None if x is None else argument(*x.shape)
            for x in (options.get("attn_mask"), options.get("sinks"))
        )
        needs = ["query", "key", "value"]
        needs += [x for x in ("attn_mask", "sinks") if x in options]
        grad_lse = guarded(pages, normal(rng, (2, n_q), compute_type(dtype)))
        undropped = {x: y for x, y in options.items() if x not in ("dropout_p", "rng")}
        with guarded_results(pages):
            saved = sdpa.attention_forward(q, k, v, **options)
            sdpa.attention_backward(g, q, k, v, *saved, grad_lse=grad_lse, needs=needs, **options)
            sdpa.attention_jvp(q, k, v, a, b, c, attn_mask_t=e, sinks_t=h, **options)
            sdpa.attention_double_backward(
                a, b, c, g, q, k, v, *saved, grad_lse=grad_lse, gg_attn_mask=e, gg_sinks=h,
                needs=["grad_out", *needs], **options,
            )  # fmt: skip
            sdpa.attention_statistics(q, k, **undropped)
            for stage in ("scores", "capped", "biased", "weights"):
                sdpa.attention_weights(q, k, stage=stage, **options)
        # Nothing that lies beside the arguments was read, either.
        check_attention(q, k, v, grad_out=g, grad_lse=grad_lse, tangents=(a, b, c, e, h), **options)
