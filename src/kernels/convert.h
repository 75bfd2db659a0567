/* Rows between memory, of any stride and dtype, and the compute type. */
#ifndef SDPA_KERNEL_CONVERT_H
#define SDPA_KERNEL_CONVERT_H

#include "../problem.h"
#include "vec.h"

/* The dtype of `real`. */
#define REAL_DTYPE (SDPA_REAL == 32 ? SDPA_F32 : SDPA_F64)

#ifndef HAVE_F16
/* Exact. */
INLINE float widen_f16(uint16_t h) {
    /* Shift into float32's fields; the multiplication rebiases the exponent and normalises subnormals. */
    uint32_t bits = (uint32_t)(h & 0x7fff) << 13;
    if ((h & 0x7c00) == 0x7c00) bits |= 0x70000000;
    float x;
    memcpy(&x, &bits, 4);
    if ((h & 0x7c00) != 0x7c00) x *= 0x1p112f;
    return h & 0x8000 ? -x : x;
}

/* Round to nearest even; NaN stays NaN. */
INLINE uint16_t narrow_f16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00; /* 65520 and above round to infinity */
    if (bits < 0x38800000) {                      /* subnormal result: let an addition do the rounding */
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        memcpy(&bits, &magnitude, 4);
        return sign | (uint16_t)(bits - 0x3f000000);
    }
    bits += 0xfff + (bits >> 13 & 1);
    return sign | (uint16_t)((bits - 0x38000000) >> 13);
}
#endif

INLINE float widen_bf16(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE uint16_t narrow_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1), nan = bits | 0x400000;
    return (uint16_t)(((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded) >> 16);
}

/* Loads VL elements of `dtype`, a constant: the dtype of `real` or, in float32 kernels, a 16-bit one. */
INLINE vec vload_as(sdpa_dtype dtype, const char *p) {
#if SDPA_REAL == 32
    if (dtype == SDPA_F16) return vwiden_f16(p);
    if (dtype == SDPA_BF16) return vwiden_bf16(p);
#endif
    (void)dtype;
    return vload((const real *)p);
}

#if SDPA_REAL == 32
/* narrow_bf16 of VL elements. */
INLINE void vnarrow_bf16(void *p, vec x) {
    typedef uint16_t halves __attribute__((vector_size(2 * VL), aligned(1), may_alias));
    const ivec bits = (ivec)x, rounded = bits + 0x7fff + (bits >> 16 & 1);
    const ivec y = (ivec)vselect(x == x, (vec)rounded, (vec)(bits | 0x400000)) >> 16 & 0xffff;
    *(halves *)p = __builtin_convertvector(y, halves);
}
#endif

INLINE void load_f32(real *restrict dst, const char *src, int64_t n, int64_t stride, bool swapped) {
    if (!swapped && stride == 4 && (uintptr_t)src % 4 == 0) {
        const float *restrict s = (const float *)src;
        SIMD for (int64_t i = 0; i < n; i++) dst[i] = s[i];
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        float x;
        memcpy(&bits, src + i * stride, 4);
        if (swapped) bits = __builtin_bswap32(bits);
        memcpy(&x, &bits, 4);
        dst[i] = x;
    }
}

INLINE void load_f64(real *restrict dst, const char *src, int64_t n, int64_t stride, bool swapped) {
    if (!swapped && stride == 8 && (uintptr_t)src % 8 == 0) {
        const double *restrict s = (const double *)src;
        SIMD for (int64_t i = 0; i < n; i++) dst[i] = (real)s[i];
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        uint64_t bits;
        double x;
        memcpy(&bits, src + i * stride, 8);
        if (swapped) bits = __builtin_bswap64(bits);
        memcpy(&x, &bits, 8);
        dst[i] = (real)x;
    }
}

INLINE void load_f16(real *restrict dst, const char *src, int64_t n, int64_t stride, bool swapped) {
    int64_t i = 0;
#if SDPA_REAL == 32
    if (!swapped && stride == 2) {
        for (; i + VL <= n; i += VL) vstore(dst + i, vwiden_f16(src + 2 * i));
    }
#endif
    for (; i < n; i++) {
        uint16_t h;
        memcpy(&h, src + i * stride, 2);
        dst[i] = widen_f16(swapped ? __builtin_bswap16(h) : h);
    }
}

INLINE void load_bf16(real *restrict dst, const char *src, int64_t n, int64_t stride, bool swapped) {
    if (!swapped && stride == 2 && (uintptr_t)src % 2 == 0) {
        const uint16_t *restrict s = (const uint16_t *)src;
        SIMD for (int64_t i = 0; i < n; i++) dst[i] = widen_bf16(s[i]);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        uint16_t h;
        memcpy(&h, src + i * stride, 2);
        dst[i] = widen_bf16(swapped ? __builtin_bswap16(h) : h);
    }
}

INLINE void load_bool(real *restrict dst, const char *src, int64_t n, int64_t stride) {
    if (stride == 1) {
        SIMD for (int64_t i = 0; i < n; i++) dst[i] = src[i] ? 0 : -(real)INFINITY;
        return;
    }
    for (int64_t i = 0; i < n; i++) dst[i] = src[i * stride] ? 0 : -(real)INFINITY;
}

/* dst[0..n-1] = the n elements at src, `stride` bytes apart, of any float type, or BOOL as a mask (true 0, false
 * -inf). */
NOINLINE void load(void *dst, const char *src, int64_t n, int64_t stride, sdpa_dtype dtype, bool swapped) {
    switch (dtype) {
    case SDPA_F32:
        load_f32(dst, src, n, stride, swapped);
        return;
    case SDPA_F64:
        load_f64(dst, src, n, stride, swapped);
        return;
    case SDPA_F16:
        load_f16(dst, src, n, stride, swapped);
        return;
    case SDPA_BF16:
        load_bf16(dst, src, n, stride, swapped);
        return;
    case SDPA_BOOL:
        load_bool(dst, src, n, stride);
        return;
    case SDPA_I64:
        break;
    }
}

/* Stores n reals as native elements of a float type, `stride` bytes apart, rounded to nearest even. float64 goes to 16
 * bits by way of float32. */
NOINLINE void store(char *dst, const void *src_, int64_t n, int64_t stride, sdpa_dtype dtype) {
    const real *restrict src = src_;
    if (dtype == REAL_DTYPE && stride == (int64_t)sizeof(real)) {
        memcpy(dst, src, (size_t)n * sizeof(real));
        return;
    }
    switch (dtype) {
    case SDPA_F32:
        if (stride == 4 && (uintptr_t)dst % 4 == 0) {
            float *restrict d = (float *)dst;
            SIMD for (int64_t i = 0; i < n; i++) d[i] = (float)src[i];
            return;
        }
        for (int64_t i = 0; i < n; i++) {
            float x = (float)src[i];
            memcpy(dst + i * stride, &x, 4);
        }
        return;
    case SDPA_F64:
        for (int64_t i = 0; i < n; i++) {
            double x = src[i];
            memcpy(dst + i * stride, &x, 8);
        }
        return;
    case SDPA_F16: {
        int64_t i = 0;
#if defined(HAVE_F16) && SDPA_REAL == 32
        if (stride == 2) {
            for (; i + VL <= n; i += VL) vnarrow_f16(dst + 2 * i, vload(src + i));
        }
#endif
        for (; i < n; i++) {
            uint16_t h = narrow_f16((float)src[i]);
            memcpy(dst + i * stride, &h, 2);
        }
        return;
    }
    case SDPA_BF16:
        if (SDPA_REAL == 32 && stride == 2 && (uintptr_t)dst % 2 == 0) {
            uint16_t *restrict d = (uint16_t *)dst;
            SIMD for (int64_t i = 0; i < n; i++) d[i] = narrow_bf16((float)src[i]);
            return;
        }
        for (int64_t i = 0; i < n; i++) {
            uint16_t h = narrow_bf16((float)src[i]);
            memcpy(dst + i * stride, &h, 2);
        }
        return;
    case SDPA_BOOL:
    case SDPA_I64:
        break;
    }
}

#endif
