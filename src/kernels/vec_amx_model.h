/* For tests only: the matrix unit AMX in plain C, on machines without it. */
#ifndef SDPA_KERNEL_VEC_AMX_MODEL_H
#define SDPA_KERNEL_VEC_AMX_MODEL_H

#ifdef __AVX512F__
#include "vec_avx512.h"
#else
#define VEC_BYTES 64
#include "vec_generic.h"
#endif

#define HAVE_AMX
#define FEW_PASSES

typedef struct amx_registers {
    vec c[8][VL];
} amx_registers;

INLINE void amx_begin(amx_registers *r) { memset(r, 0, sizeof *r); }
INLINE void amx_end(amx_registers *r) { (void)r; }

static inline void amx_load(vec *c, const char *p, int64_t row) {
    for (int i = 0; i < VL; i++) memcpy(&c[i], p + i * row, sizeof c[i]);
}

static inline void amx_store(const vec *c, char *p, int64_t row) {
    for (int i = 0; i < VL; i++) memcpy(p + i * row, &c[i], sizeof c[i]);
}

/* Subnormal numbers count as 0. */
INLINE vec amx_flush(vec x) {
    const ivec magnitude = (ivec)x & ~SIGN_BIT;
    return vselect(magnitude < 0x800000, (vec)((ivec)x & SIGN_BIT), x);
}

/* TDPBF16PS: c (16 rows, 16 lanes) += a b, with 16 pairs of bfloat16 along the depth in the rows of a and in the columns
 * of b. Even and odd elements are summed apart, from zero, and each product is rounded together with its sum; then both
 * sums are added. Products of bfloat16 are exact in float32, so that adding one rounds like an FMA. */
static inline void amx_multiply(vec *c, const vec *a, const vec *b) {
    for (int i = 0; i < VL; i++) {
        vec even = {0}, odd = {0};
        for (int k = 0; k < VL; k++) {
            const ivec left = ((const ivec *)a)[i][k] - (ivec){0}, right = (ivec)b[k];
            even = amx_flush(even + amx_flush((vec)(left << 16)) * amx_flush((vec)(right << 16)));
            odd = amx_flush(odd + amx_flush((vec)(left & ~0xffff)) * amx_flush((vec)(right & ~0xffff)));
        }
        c[i] = amx_flush(amx_flush(c[i]) + amx_flush(even + odd));
    }
}

#define AMX_ZERO(r, x) memset((r)->c[x], 0, sizeof(r)->c[x])
#define AMX_LOAD(r, x, p, row) amx_load((r)->c[x], (const char *)(p), row)
#define AMX_STORE(r, x, p, row) amx_store((r)->c[x], (char *)(p), row)
#define AMX_MULTIPLY(r, x, a, b) amx_multiply((r)->c[x], (r)->c[a], (r)->c[b])

INLINE ivec vmost_bits(ivec a, ivec b) { return (ivec)vselect(a > b, (vec)a, (vec)b); }
INLINE ivec vleast_bits(ivec a, ivec b) { return (ivec)vselect(a < b, (vec)a, (vec)b); }

#endif
