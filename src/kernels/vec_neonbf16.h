/* NEON with products of bfloat16. */
#ifndef SDPA_KERNEL_VEC_NEONBF16_H
#define SDPA_KERNEL_VEC_NEONBF16_H

#ifndef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#error "needs +bf16"
#endif

#include "vec_neon.h"

#define HAVE_BF16_PAIRS
#define HAVE_BF16_QUADS
#define FEW_PASSES
INLINE bfloat16x8_t of_pairs(vec x) { return vreinterpretq_bf16_f32((float32x4_t)x); }
INLINE vec vdot(vec sum, int32_t pair, vec pairs) {
    int32x4_t all = vdupq_n_s32(pair);
    __asm__("" : "+w"(all)); /* GCC 12 writes a constant of bfloat16 as one of float16 */
    return (vec)vbfdotq_f32((float32x4_t)sum, of_pairs((vec)all), of_pairs(pairs));
}
INLINE vec vpair(vec even, vec odd) {
    const uint16x8_t low = vreinterpretq_u16_bf16(vcvtq_low_bf16_f32((float32x4_t)even)),
                     high = vreinterpretq_u16_bf16(vcvtq_low_bf16_f32((float32x4_t)odd));
    return (vec)vzip1q_u16(low, high);
}
INLINE vec vdot_quads(vec sum, vec a, vec b) { return (vec)vbfmmlaq_f32((float32x4_t)sum, of_pairs(a), of_pairs(b)); }
INLINE vec vload_twos(const real *p, const real *q) { return (vec)vcombine_f32(vld1_f32(p), vld1_f32(q)); }

#endif
