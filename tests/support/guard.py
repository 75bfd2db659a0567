"""Arrays whose memory lies between two pages without access.

Tests copy arguments there. The C core allocates results through NumPy, so its allocator is replaced
during the call.
"""

import contextlib
import ctypes
import mmap
import sys
import weakref

import numpy as np

PAGE = mmap.PAGESIZE

if sys.platform == "win32":
    kernel32 = ctypes.WinDLL("kernel32")
    kernel32.VirtualAlloc.restype = ctypes.c_void_p
    kernel32.VirtualAlloc.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_uint32] * 2)
    kernel32.VirtualProtect.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32),
        ctypes.POINTER(ctypes.c_uint32),
    )
    kernel32.VirtualFree.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32)
    COMMIT_AND_RESERVE, READ_AND_WRITE, NO_ACCESS, RELEASE = 0x3000, 4, 1, 0x8000

    def _map(nbytes):
        base = kernel32.VirtualAlloc(None, nbytes, COMMIT_AND_RESERVE, READ_AND_WRITE)
        assert base is not None
        return base

    def _forbid(address):
        before = ctypes.c_uint32()
        assert kernel32.VirtualProtect(address, PAGE, NO_ACCESS, ctypes.byref(before))

    def _unmap(base, nbytes):
        kernel32.VirtualFree(base, 0, RELEASE)
else:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def _map(nbytes):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        base = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        assert base != ctypes.c_void_p(-1).value
        return base

    def _forbid(address):
        assert libc.mprotect(address, PAGE, 0) == 0

    _unmap = libc.munmap


class Pages:
    """Zeroed blocks of memory between two inaccessible pages, against the last or the first."""

    def __init__(self, at_end):
        self.at_end = at_end
        self.whole = {}

    def allocate(self, nbytes):
        inner = max(1, -(-nbytes // PAGE)) * PAGE
        base = _map(inner + 2 * PAGE)
        _forbid(base)
        _forbid(base + PAGE + inner)
        address = base + PAGE + (inner - nbytes if self.at_end else 0)
        self.whole[address] = base, inner + 2 * PAGE
        return address

    def free(self, address):
        _unmap(*self.whole.pop(address))


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

    return Handler(
        b"guard",
        1,
        None,
        MALLOC(lambda _, n: pages.allocate(n)),
        CALLOC(lambda _, n, size: pages.allocate(n * size)),
        REALLOC(realloc),
        FREE(lambda _, address, n: pages.free(address)),
    )


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
def allocated_by(address):
    """The handler at this address, which must live as long as the arrays, allocates them."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    set_handler = _set_handler()
    previous = set_handler(new(address, b"mem_handler", None))
    try:
        yield
    finally:
        set_handler(previous)


def guarded_results(pages):
    """Every array that is allocated meanwhile is guarded."""
    return allocated_by(ctypes.addressof(HANDLERS[pages.at_end]))
