/* AVX-512 beside the matrix unit AMX. */
#ifndef SDPA_KERNEL_VEC_AMX_H
#define SDPA_KERNEL_VEC_AMX_H

#include "vec_avx512.h"

#define HAVE_AMX
#define FEW_PASSES

/* The registers are those of the thread. */
typedef struct amx_registers {
    char unused;
} amx_registers;

/* Assembly, because the intrinsics of GCC 12 do not say what memory they read and write. */
INLINE void amx_begin(amx_registers *r) {
    /* Palette 1, with eight registers of 16 rows by 64 bytes. */
    static const uint8_t config[64] = {
        [0] = 1,   [16] = 64, [18] = 64, [20] = 64, [22] = 64, [24] = 64, [26] = 64, [28] = 64, [30] = 64,
        [48] = 16, [49] = 16, [50] = 16, [51] = 16, [52] = 16, [53] = 16, [54] = 16, [55] = 16};
    (void)r;
    __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory");
}
INLINE void amx_end(amx_registers *r) {
    (void)r;
    __asm__ volatile("tilerelease" : : : "memory");
}
#define AMX_ZERO(r, c) __asm__ volatile("tilezero %%tmm" #c : : : "memory")
#define AMX_LOAD(r, c, p, row)                                                                                         \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #c : : "r"(p), "r"((int64_t)(row)) : "memory")
#define AMX_STORE(r, c, p, row)                                                                                        \
    __asm__ volatile("tilestored %%tmm" #c ", (%0,%1,1)" : : "r"(p), "r"((int64_t)(row)) : "memory")
#define AMX_MULTIPLY(r, c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c : : : "memory")

INLINE ivec vmost_bits(ivec a, ivec b) { return (ivec)_mm512_max_epi32((__m512i)a, (__m512i)b); }
INLINE ivec vleast_bits(ivec a, ivec b) { return (ivec)_mm512_min_epi32((__m512i)a, (__m512i)b); }

#endif
