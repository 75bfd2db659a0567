/* Helpers of the tests that are compiled once per instruction set and type: names, random bits, and memory between two
 * inaccessible pages. */
#ifndef SDPA_UNIT_H
#define SDPA_UNIT_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#ifdef _WIN32
#include <windows.h>
/* Names of ours. */
#undef TEXT
#undef near
#else
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "../../src/kernels/vec.h"

/* UNIT_NAME(test_vec): test_vec_avx2_f32, as main.c declares it. */
#define UNIT_NAME_2(test, isa, bits) test##_##isa##_f##bits
#define UNIT_NAME_1(test, isa, bits) UNIT_NAME_2(test, isa, bits)
#define UNIT_NAME(test) UNIT_NAME_1(test, SDPA_ISA, SDPA_REAL)

/* Begins the message of every check. */
#define TEXT_1(x) #x
#define TEXT(x) TEXT_1(x)
#define WHERE TEXT(SDPA_ISA) " f" TEXT(SDPA_REAL)

static inline uint64_t random_bits(void) {
    static uint64_t state = 1;
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

/* The same bits, or NaN both. */
static inline bool same(real a, real b) { return (a != a && b != b) || memcmp(&a, &b, sizeof a) == 0; }

typedef struct guarded {
    char *begin, *end; /* begin: NULL if there is no memory */
} guarded;

enum { GUARDED_PAGES = 2 };

#ifdef _WIN32
static inline guarded guard_map(void) {
    const size_t page = 4096, n = GUARDED_PAGES;
    char *const base = VirtualAlloc(NULL, (n + 2) * page, MEM_RESERVE, PAGE_NOACCESS);
    if (!base || !VirtualAlloc(base + page, n * page, MEM_COMMIT, PAGE_READWRITE)) return (guarded){0};
    return (guarded){base + page, base + (n + 1) * page};
}

static inline void guard_unmap(guarded g) { VirtualFree(g.begin - 4096, 0, MEM_RELEASE); }
#else
static inline guarded guard_map(void) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), n = GUARDED_PAGES;
    char *const base = mmap(NULL, (n + 2) * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED || mprotect(base + page, n * page, PROT_READ | PROT_WRITE) != 0) return (guarded){0};
    return (guarded){base + page, base + (n + 1) * page};
}

static inline void guard_unmap(guarded g) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    munmap(g.begin - page, (size_t)(g.end - g.begin) + 2 * page);
}

#endif

#endif
