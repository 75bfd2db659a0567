/* NEON, a part of every aarch64. */
#ifndef SDPA_KERNEL_VEC_NEON_H
#define SDPA_KERNEL_VEC_NEON_H

#include <arm_neon.h>

#define VEC_BYTES 16
#include "vec_plain.h"

#if SDPA_REAL == 32
typedef float32x4_t native;
#define NATIVE(op) op##q_f32
#else
typedef float64x2_t native;
#define NATIVE(op) op##q_f64
#endif

INLINE vec vmax2(vec a, vec b) { return (vec)NATIVE(vmax)((native)a, (native)b); }
INLINE vec vmin2(vec a, vec b) { return (vec)NATIVE(vmin)((native)a, (native)b); }
#define HAVE_FMA
INLINE vec vmuladd(vec a, vec b, vec c) { return (vec)NATIVE(vfma)((native)c, (native)a, (native)b); }
INLINE vec vmulsub(vec a, vec b, vec c) { return (vec)NATIVE(vfma)((native)-c, (native)a, (native)b); }
#define HAVE_LANES
INLINE vec vmuladd_lane(vec a, int lane, vec b, vec c) {
#if SDPA_REAL == 32
    switch (lane) {
    case 3:
        return (vec)vfmaq_laneq_f32(c, b, a, 3);
    case 2:
        return (vec)vfmaq_laneq_f32(c, b, a, 2);
    case 1:
        return (vec)vfmaq_laneq_f32(c, b, a, 1);
    }
    return (vec)vfmaq_laneq_f32(c, b, a, 0);
#else
    return (vec)(lane ? vfmaq_laneq_f64(c, b, a, 1) : vfmaq_laneq_f64(c, b, a, 0));
#endif
}

#define HAVE_F16
INLINE float widen_f16(uint16_t h) { return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(h))), 0); }
INLINE uint16_t narrow_f16(float x) { return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(x))), 0); }
#if SDPA_REAL == 32
INLINE vec vwiden_f16(const void *p) {
    uint16x4_t h;
    memcpy(&h, p, sizeof h);
    return (vec)vcvt_f32_f16(vreinterpret_f16_u16(h));
}
INLINE void vnarrow_f16(void *p, vec x) {
    const uint16x4_t h = vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x));
    memcpy(p, &h, sizeof h);
}

#define HAVE_BF16
INLINE vec vwiden_bf16(const void *p) {
    uint16x4_t h;
    memcpy(&h, p, sizeof h);
    return (vec)vshll_n_u16(h, 16);
}
#endif

#undef NATIVE
#endif
