/* The one allocation function of the core, so that faults can be injected. */
#ifndef SDPA_MEMORY_H
#define SDPA_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SDPA_ALIGNMENT 64

/* Uninitialised memory aligned to SDPA_ALIGNMENT, or NULL. The caller owns it; release with sdpa_free. */
void *sdpa_alloc(size_t bytes);
void sdpa_free(void *pointer);

/* Tests: let the next `n` allocations succeed and the one after them fail, once. n < 0: off. */
void sdpa_alloc_fail_after(int64_t n);

/* Carves aligned pieces out of one block: run it with base NULL to learn the size, then again on the memory. */
typedef struct sdpa_arena {
    char *base;
    size_t used;
} sdpa_arena;

static inline void *sdpa_take(sdpa_arena *arena, size_t bytes) {
    void *piece = arena->base ? arena->base + arena->used : NULL;
    arena->used += (bytes + SDPA_ALIGNMENT - 1) / SDPA_ALIGNMENT * SDPA_ALIGNMENT;
    return piece;
}

#endif
