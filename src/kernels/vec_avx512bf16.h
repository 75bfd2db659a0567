/* AVX-512 with dot products of bfloat16. */
#ifndef SDPA_KERNEL_VEC_AVX512BF16_H
#define SDPA_KERNEL_VEC_AVX512BF16_H

#ifndef __AVX512BF16__
#error "needs -mavx512bf16"
#endif

#include "vec_avx512.h"

#define HAVE_BF16_PAIRS
#define FEW_PASSES
INLINE vec vdot(vec sum, int32_t pair, vec pairs) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)pairs);
}
INLINE vec vpair(vec even, vec odd) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (vec)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even));
}

#endif
