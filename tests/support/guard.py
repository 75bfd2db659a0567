"""Arrays whose memory lies between two pages without access.

Tests copy arguments there. The C core allocates results through NumPy, so its allocator is replaced
during the call.
"""

import contextlib
import ctypes
import mmap
import weakref

import numpy as np

PAGE = mmap.PAGESIZE

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
