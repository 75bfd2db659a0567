#include "memory.h"

#include <stdatomic.h>
#include <stdlib.h>

static _Atomic int64_t fail_after = -1;

void *sdpa_alloc(size_t bytes) {
    if (atomic_load_explicit(&fail_after, memory_order_relaxed) >= 0 && atomic_fetch_sub(&fail_after, 1) == 0) {
        return NULL;
    }
    if (bytes > PTRDIFF_MAX - SDPA_ALIGNMENT) {
        return NULL;
    }
    void *pointer = NULL;
    /* One byte at least, so that NULL always means failure. */
    if (posix_memalign(&pointer, SDPA_ALIGNMENT, bytes ? bytes : 1) != 0) {
        return NULL;
    }
    return pointer;
}

void sdpa_free(void *pointer) { free(pointer); }

void sdpa_alloc_fail_after(int64_t n) { atomic_store(&fail_after, n); }
