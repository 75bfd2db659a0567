/* AVX-512 as in x86-64-v4. */
#ifndef SDPA_KERNEL_VEC_AVX512_H
#define SDPA_KERNEL_VEC_AVX512_H

#if !defined(__AVX512F__) || !defined(__AVX512DQ__) || !defined(__AVX512BW__) || !defined(__AVX512VL__)
#error "needs the compiler flags of x86-64-v4"
#endif

#include <immintrin.h>

#define VEC_BYTES 64
#include "vec_types.h"

#if SDPA_REAL == 32
typedef __m512 native;
typedef __mmask16 native_mask;
#define NATIVE(op) _mm512_##op##_ps
#define NATIVE_MASK(op) _mm512_##op##_ps_mask
#else
typedef __m512d native;
typedef __mmask8 native_mask;
#define NATIVE(op) _mm512_##op##_pd
#define NATIVE_MASK(op) _mm512_##op##_pd_mask
#endif

INLINE vec vmax2(vec a, vec b) { return (vec)NATIVE(max)((native)a, (native)b); }
INLINE vec vmin2(vec a, vec b) { return (vec)NATIVE(min)((native)a, (native)b); }
#define HAVE_FMA
INLINE vec vmuladd(vec a, vec b, vec c) { return (vec)NATIVE(fmadd)((native)a, (native)b, (native)c); }
INLINE vec vmulsub(vec a, vec b, vec c) { return (vec)NATIVE(fmsub)((native)a, (native)b, (native)c); }

#define HAVE_MUL_FINITE
/* A product of finite factors that is rounded towards 0 stays finite. */
INLINE vec vmul_finite(real a, vec x) {
    enum { INFINITIES = 0x18 };
    const native factor = NATIVE(set1)(a);
    native y = NATIVE(mul)(factor, (native)x);
    __asm__("" : "+v"(y)); /* otherwise GCC 12 may merge the two products and round both towards 0 */
    return (vec)NATIVE(mask_mul_round)(y, NATIVE_MASK(fpclass)(y, INFINITIES), factor, (native)x,
                                       _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
}

#define HAVE_SCALE
/* 2^x for a polynomial y of the rest of x above the integer below it, which HAVE_SCALE's users compute. */
#define vrest_above(x) ((vec)NATIVE(reduce)((native)(x), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC))
INLINE vec vscale_all(vec y, vec x) { return (vec)NATIVE(scalef)((native)y, (native)x); }
#define vrest(x, bits) ((vec)NATIVE(reduce)((native)(x), (bits) << 4 | _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
INLINE vec vscale(vec x, vec n, vec y, real least) {
    const native_mask kept = NATIVE_MASK(cmp)((native)y, NATIVE(set1)(least), _CMP_NLT_UQ);
    return (vec)NATIVE(maskz_scalef)(kept, (native)x, (native)n);
}
#if SDPA_REAL == 32
INLINE vec vchoose(vec numbers, vec index) { return (vec)_mm512_permutexvar_ps((__m512i)index, (__m512)numbers); }
#endif

INLINE bool vany(ivec m) {
#if SDPA_REAL == 32
    return _mm512_movepi32_mask((__m512i)m) != 0;
#else
    return _mm512_movepi64_mask((__m512i)m) != 0;
#endif
}

INLINE vec vload_partial(const real *p, int n) { return (vec)NATIVE(maskz_loadu)((native_mask)((1u << n) - 1), p); }

INLINE void vstore_partial(real *p, vec x, int n) { NATIVE(mask_storeu)(p, (native_mask)((1u << n) - 1), (native)x); }

INLINE wide_vec vmultiply_even(wide_vec x, uint32_t factor) {
    return (wide_vec)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi32((int)factor));
}

INLINE uint32_t vbits(const void *p) {
    const __m256i x = _mm256_loadu_si256(p);
    return _mm256_test_epi8_mask(x, x);
}

#define HAVE_F16
INLINE float widen_f16(uint16_t h) { return _cvtsh_ss(h); }
INLINE uint16_t narrow_f16(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#if SDPA_REAL == 32
INLINE vec vwiden_f16(const void *p) { return (vec)_mm512_cvtph_ps(_mm256_loadu_si256(p)); }
INLINE void vnarrow_f16(void *p, vec x) {
    _mm256_storeu_si256(p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#endif

#if SDPA_REAL == 32
#define HAVE_FOURS
INLINE vec vfours(const real *p, int64_t step) {
    __m512 x = _mm512_castps128_ps512(_mm_loadu_ps(p));
    x = _mm512_mask_broadcast_f32x4(x, 0x00f0, _mm_loadu_ps(p + step));
    x = _mm512_mask_broadcast_f32x4(x, 0x0f00, _mm_loadu_ps(p + 2 * step));
    return (vec)_mm512_mask_broadcast_f32x4(x, 0xf000, _mm_loadu_ps(p + 3 * step));
}
#endif

#if SDPA_REAL == 32
#define HAVE_BF16
/* Moves each element to the high half of a lane by one operation; widening and shifting would be two. */
INLINE vec vwiden_bf16(const void *p) {
    const __m512i to = _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 7, 0, 6, 0, 5, 0, 4, 0, 3,
                                        0, 2, 0, 1, 0, 0, 0),
                  from = _mm512_castsi256_si512(_mm256_loadu_si256(p));
    return (vec)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, to, from);
}
#endif

#undef NATIVE_MASK
#endif
