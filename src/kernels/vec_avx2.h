/* AVX2 with FMA and F16C, as in x86-64-v3. */
#ifndef SDPA_KERNEL_VEC_AVX2_H
#define SDPA_KERNEL_VEC_AVX2_H

#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "needs the compiler flags of x86-64-v3"
#endif

#include <immintrin.h>

#define VEC_BYTES 32
#include "vec_types.h"

#if SDPA_REAL == 32
typedef __m256 native;
#define NATIVE(op) _mm256_##op##_ps
#else
typedef __m256d native;
#define NATIVE(op) _mm256_##op##_pd
#endif

INLINE vec vmax2(vec a, vec b) { return (vec)NATIVE(max)((native)a, (native)b); }
INLINE vec vmin2(vec a, vec b) { return (vec)NATIVE(min)((native)a, (native)b); }
#define HAVE_FMA
INLINE vec vmuladd(vec a, vec b, vec c) { return (vec)NATIVE(fmadd)((native)a, (native)b, (native)c); }
INLINE vec vmulsub(vec a, vec b, vec c) { return (vec)NATIVE(fmsub)((native)a, (native)b, (native)c); }
INLINE bool vany(ivec m) { return NATIVE(movemask)((native)m) != 0; }

INLINE vec vload_partial(const real *p, int n) {
#if SDPA_REAL == 32
    const ivec lane = {0, 1, 2, 3, 4, 5, 6, 7};
#else
    const ivec lane = {0, 1, 2, 3};
#endif
    return (vec)NATIVE(maskload)(p, (__m256i)(lane < (real_bits)n));
}

/* Stores in halves, because AMD's processors execute a masked store in microcode. */
INLINE void vstore_partial(real *p, vec x, int n) {
    if (n & VL) NATIVE(storeu)(p, (native)x);
#if SDPA_REAL == 32
    __m128 low = _mm256_castps256_ps128((__m256)x);
    if (n & 4) {
        _mm_storeu_ps(p, low);
        low = _mm256_extractf128_ps((__m256)x, 1);
        p += 4;
    }
    if (n & 2) {
        _mm_storel_pi((__m64 *)p, low);
        low = _mm_movehl_ps(low, low);
        p += 2;
    }
    if (n & 1) _mm_store_ss(p, low);
#else
    __m128d low = _mm256_castpd256_pd128((__m256d)x);
    if (n & 2) {
        _mm_storeu_pd(p, low);
        low = _mm256_extractf128_pd((__m256d)x, 1);
        p += 2;
    }
    if (n & 1) _mm_store_sd(p, low);
#endif
}

INLINE wide_vec vmultiply_even(wide_vec x, uint32_t factor) {
    return (wide_vec)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi32((int)factor));
}

INLINE uint32_t vbits(const void *p) {
    return ~(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_loadu_si256(p), _mm256_setzero_si256()));
}

#define HAVE_F16
INLINE float widen_f16(uint16_t h) { return _cvtsh_ss(h); }
INLINE uint16_t narrow_f16(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#if SDPA_REAL == 32
INLINE vec vwiden_f16(const void *p) { return (vec)_mm256_cvtph_ps(_mm_loadu_si128(p)); }
INLINE void vnarrow_f16(void *p, vec x) {
    _mm_storeu_si128(p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#endif

#if SDPA_REAL == 32
#define HAVE_FOURS
INLINE vec vfours(const real *p, int64_t step) {
    return (vec)_mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps(p + step), 1);
}
#endif

#if SDPA_REAL == 32
#define HAVE_BF16
/* Moves each element to the high half of a lane by one operation beside the load; widening and shifting would be
 * two. */
INLINE vec vwiden_bf16(const void *p) {
    const __m256i from = _mm256_broadcastsi128_si256(_mm_loadu_si128(p)),
                  to = _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7, -1, -1, 8, 9, -1, -1,
                                        10, 11, -1, -1, 12, 13, -1, -1, 14, 15);
    return (vec)_mm256_shuffle_epi8(from, to);
}
#endif

#undef NATIVE
#endif
