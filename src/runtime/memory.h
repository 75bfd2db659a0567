/* The one allocation function of the core, so that faults can be injected. */
#ifndef SDPA_MEMORY_H
#define SDPA_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__has_feature) && !defined(__SANITIZE_ADDRESS__)
#if __has_feature(address_sanitizer) /* clang's way to say so */
#define __SANITIZE_ADDRESS__ 1
#endif
#endif

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#endif

#define SDPA_ALIGNMENT 64

/* Uninitialised memory aligned to SDPA_ALIGNMENT, or NULL. The caller owns it; release with sdpa_free, on the
 * same thread. */
void *sdpa_alloc(size_t bytes);
void sdpa_free(void *pointer);

/* For tests: lets the next `n` allocations succeed and the one after them fail, once. n < 0: off. */
void sdpa_alloc_fail_after(int64_t n);

/* Carves aligned pieces out of one block: run it with base NULL to learn the size, then again on the memory. */
typedef struct sdpa_arena {
    char *base;
    size_t used;
} sdpa_arena;

static inline void *sdpa_take(sdpa_arena *arena, size_t bytes) {
    char *piece = arena->base ? arena->base + arena->used : NULL;
    size_t used = (bytes + SDPA_ALIGNMENT - 1) / SDPA_ALIGNMENT * SDPA_ALIGNMENT;
#ifdef __SANITIZE_ADDRESS__
    /* A write past the end of a piece must not go unnoticed into the next. */
    used += SDPA_ALIGNMENT;
    if (piece) {
        ASAN_UNPOISON_MEMORY_REGION(piece, bytes);
        ASAN_POISON_MEMORY_REGION(piece + bytes, used - bytes);
    }
#endif
    arena->used += used;
    return piece;
}

/* Takes the pieces of `owner` from the arena. Called twice: without memory, to learn the size, and with it. */
typedef void sdpa_layout(void *owner, sdpa_arena *arena);

/* One block for all the pieces, which the caller frees; NULL if there is no memory. */
void *sdpa_alloc_pieces(sdpa_layout *take_pieces, void *owner);

#endif
