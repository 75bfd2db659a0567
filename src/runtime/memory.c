#include "memory.h"

#include <stdatomic.h>

#include "system.h"

static _Atomic int64_t fail_after = -1;

/* Enough for a small problem, its backward included. Each thread keeps it, because allocating and freeing would be a
 * noticeable part of such a call. */
enum { KEPT_BYTES = 64 << 10 };
static _Thread_local char room[KEPT_BYTES + SDPA_ALIGNMENT];
static _Thread_local bool kept_is_used;

/* Aligned by hand: the loader of wine aligns the data of a thread to 16 bytes, whatever is declared. */
static inline char *kept_block(void) {
    return room + (SDPA_ALIGNMENT - (uintptr_t)room % SDPA_ALIGNMENT) % SDPA_ALIGNMENT;
}

void *sdpa_alloc(size_t bytes) {
    if (atomic_load_explicit(&fail_after, memory_order_relaxed) >= 0 && atomic_fetch_sub(&fail_after, 1) == 0) {
        return NULL;
    }
    if (bytes > PTRDIFF_MAX - SDPA_ALIGNMENT) {
        return NULL;
    }
    if (bytes <= KEPT_BYTES && !kept_is_used) {
        char *const kept = kept_block();
        kept_is_used = true;
        ASAN_UNPOISON_MEMORY_REGION(kept, KEPT_BYTES);
        ASAN_POISON_MEMORY_REGION(kept + bytes, KEPT_BYTES - bytes);
        return kept;
    }
    /* At least one byte, so that NULL always means failure. */
    return sdpa_aligned_alloc(SDPA_ALIGNMENT, bytes ? bytes : 1);
}

void sdpa_free(void *pointer) {
    char *const kept = kept_block();
    if (pointer != kept) {
        sdpa_aligned_free(pointer);
        return;
    }
    kept_is_used = false;
    ASAN_POISON_MEMORY_REGION(kept, KEPT_BYTES);
}

void *sdpa_alloc_pieces(sdpa_layout *take_pieces, void *owner) {
    sdpa_arena size = {NULL, 0}, arena = {NULL, 0};
    take_pieces(owner, &size);
    arena.base = sdpa_alloc(size.used);
    if (arena.base) take_pieces(owner, &arena);
    return arena.base;
}

void sdpa_alloc_fail_after(int64_t n) { atomic_store(&fail_after, n); }
