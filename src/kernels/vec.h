/* Vectors of float and double for one ISA, and their operations: the only file with intrinsics.
 *
 * Arithmetic (+ - * /, a * b + c contracts to FMA), casts and shuffles are GCC/Clang vector extensions and look the same
 * for every ISA. What they lack is below, once per type with the suffix _f32 or _f64; templates use the names without
 * suffix, which FN resolves to the type being compiled (isa.inc.h). Loads and stores need element alignment only. */
#ifndef SDPA_VEC_H
#define SDPA_VEC_H

#include <float.h>
#include <stdint.h>
#include <string.h>

#if defined(SDPA_ISA_AVX512)
#if !defined(__AVX512F__) || !defined(__AVX512DQ__) || !defined(__AVX512BW__) || !defined(__AVX512VL__) ||             \
    !defined(__AVX512BF16__)
#error "avx512.c needs the compiler flags of x86-64-v4 and -mavx512bf16"
#endif
#include <immintrin.h>
#define VEC_BYTES 64
#elif defined(SDPA_ISA_AVX2)
#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "avx2.c needs -mavx2 -mfma -mf16c"
#endif
#include <immintrin.h>
#define VEC_BYTES 32
#elif defined(SDPA_ISA_NEON)
#include <arm_neon.h>
#define VEC_BYTES 16
#elif defined(SDPA_WIDE) /* tests: the tiles and lanes of AVX-512 on machines without */
#define VEC_BYTES 64
#else
#define VEC_BYTES 16
#endif

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))
#define COLD __attribute__((cold)) /* seldom, or once per unit: small rather than fast */
#define UNROLL _Pragma("GCC unroll 32")
#define SIMD _Pragma("omp simd") /* for loops over memory that are worth code for any length */

#define SDPA_PASTE_(name, type) name##_##type
#define SDPA_PASTE(name, type) SDPA_PASTE_(name, type)
#define FN(name) SDPA_PASTE(name, TYPE)

#define real FN(real)
#define vec FN(vec)
#define ivec FN(ivec) /* as wide as vec; also the type of a comparison: -1 true, 0 false */
#define VL FN(VL)
#define vload FN(vload)
#define vstore FN(vstore)
#define vload_partial FN(vload_partial)
#define vstore_partial FN(vstore_partial)
#define vset1 FN(vset1)
#define vmax2 FN(vmax2)
#define vmin2 FN(vmin2)
#define vmulsub FN(vmulsub)
#define vmul_finite FN(vmul_finite)
#define vround FN(vround)
#define vrest FN(vrest)
#define vscale FN(vscale)
#define vselect FN(vselect)
#define vany FN(vany)
#define vreduce_add FN(vreduce_add)
#define vreduce_max FN(vreduce_max)
#define vtranspose FN(vtranspose)
#define vswap FN(vswap)
#define vsum4 FN(vsum4)
#define vsums FN(vsums)

typedef float real_f32;
typedef double real_f64;
typedef float vec_f32 __attribute__((vector_size(VEC_BYTES)));
typedef double vec_f64 __attribute__((vector_size(VEC_BYTES)));
typedef int32_t ivec_f32 __attribute__((vector_size(VEC_BYTES)));
typedef int64_t ivec_f64 __attribute__((vector_size(VEC_BYTES)));
typedef float vecu_f32 __attribute__((vector_size(VEC_BYTES), aligned(4), may_alias));
typedef double vecu_f64 __attribute__((vector_size(VEC_BYTES), aligned(8), may_alias));
#define VL_f32 (VEC_BYTES / 4)
#define VL_f64 (VEC_BYTES / 8)

#define DEFINE_COMMON(T)                                                                                               \
    INLINE vec_##T vload_##T(const real_##T *p) { return *(const vecu_##T *)p; }                                       \
    INLINE void vstore_##T(real_##T *p, vec_##T x) { *(vecu_##T *)p = x; }                                             \
    INLINE vec_##T vset1_##T(real_##T x) { return x - (vec_##T){0}; }                                                  \
    INLINE vec_##T vselect_##T(ivec_##T mask, vec_##T yes, vec_##T no) {                                               \
        return (vec_##T)((mask & (ivec_##T)yes) | (~mask & (ivec_##T)no));                                             \
    }
DEFINE_COMMON(f32)
DEFINE_COMMON(f64)
#undef DEFINE_COMMON

/* HAVE_DOT: float32 kernels may multiply pairs of bfloat16, which stand in the place of a float each. vdot: sum + the
 * product of the high halves of `pair` and of each lane + that of the low halves. vpair: each lane's even and odd, rounded to
 * nearest, as its low and its high half. */

/* Products of the even 32-bit words with a 32-bit factor, as 64-bit words. */
typedef uint64_t wide_vec __attribute__((vector_size(VEC_BYTES)));
INLINE wide_vec vmultiply_even(wide_vec x, uint32_t factor) {
#if defined(SDPA_ISA_AVX512)
    return (wide_vec)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi32((int)factor));
#elif defined(SDPA_ISA_AVX2)
    return (wide_vec)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi32((int)factor));
#else
    return (x & 0xffffffff) * factor;
#endif
}

/* Bit l: whether byte l of 32 is not 0. */
INLINE uint32_t vbits(const void *p) {
#if defined(SDPA_ISA_AVX512)
    const __m256i x = _mm256_loadu_si256(p);
    return _mm256_test_epi8_mask(x, x);
#elif defined(SDPA_ISA_AVX2)
    return ~(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_loadu_si256(p), _mm256_setzero_si256()));
#else
    uint32_t bits = 0;
    for (int l = 0; l < 32; l++) bits |= (uint32_t)(((const char *)p)[l] != 0) << l;
    return bits;
#endif
}

/* vmulsub: a * b - c, rounded once where the ISA has FMA: for results that must agree with those of other places, since
 * whether the compiler contracts an expression depends on what surrounds it.
 * vmul_finite: a * x, but the largest finite number of its sign where a finite x would make it infinite.
 * vmax2, vmin2: b where the comparison fails, so a NaN in b always comes through. */
#if defined(SDPA_ISA_AVX512)
INLINE vec_f32 vmax2_f32(vec_f32 a, vec_f32 b) { return (vec_f32)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vec_f64 vmax2_f64(vec_f64 a, vec_f64 b) { return (vec_f64)_mm512_max_pd((__m512d)a, (__m512d)b); }
INLINE vec_f32 vmin2_f32(vec_f32 a, vec_f32 b) { return (vec_f32)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE vec_f64 vmin2_f64(vec_f64 a, vec_f64 b) { return (vec_f64)_mm512_min_pd((__m512d)a, (__m512d)b); }
INLINE vec_f32 vmulsub_f32(vec_f32 a, vec_f32 b, vec_f32 c) {
    return (vec_f32)_mm512_fmsub_ps((__m512)a, (__m512)b, (__m512)c);
}
INLINE vec_f64 vmulsub_f64(vec_f64 a, vec_f64 b, vec_f64 c) {
    return (vec_f64)_mm512_fmsub_pd((__m512d)a, (__m512d)b, (__m512d)c);
}
#define INFINITIES 0x18 /* what fpclass is to look for */
/* Rounding towards 0 leaves infinity to infinite factors (in place of limits: Zen 4, 2.5 cycles less per vector). */
INLINE vec_f32 vmul_finite_f32(float a, vec_f32 x) {
    const __m512 factor = _mm512_set1_ps(a), y = _mm512_mul_ps(factor, (__m512)x);
    return (vec_f32)_mm512_mask_mul_round_ps(y, _mm512_fpclass_ps_mask(y, INFINITIES), factor, (__m512)x,
                                             _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
}
INLINE vec_f64 vmul_finite_f64(double a, vec_f64 x) {
    const __m512d factor = _mm512_set1_pd(a), y = _mm512_mul_pd(factor, (__m512d)x);
    return (vec_f64)_mm512_mask_mul_round_pd(y, _mm512_fpclass_pd_mask(y, INFINITIES), factor, (__m512d)x,
                                             _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
}
/* To the nearest multiple of 2^-bits, a constant; what that takes from x, which for +-inf is 0. */
#define VROUND(bits) ((bits) << 4 | _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define vround_f32(x, bits) ((vec_f32)_mm512_roundscale_ps((__m512)(x), VROUND(bits)))
#define vround_f64(x, bits) ((vec_f64)_mm512_roundscale_pd((__m512d)(x), VROUND(bits)))
#define vrest_f32(x, bits) ((vec_f32)_mm512_reduce_ps((__m512)(x), VROUND(bits)))
#define vrest_f64(x, bits) ((vec_f64)_mm512_reduce_pd((__m512d)(x), VROUND(bits)))
/* x 2^floor(n), or 0 where y < least. */
INLINE vec_f32 vscale_f32(vec_f32 x, vec_f32 n, vec_f32 y, float least) {
    const __mmask16 kept = _mm512_cmp_ps_mask((__m512)y, _mm512_set1_ps(least), _CMP_NLT_UQ);
    return (vec_f32)_mm512_maskz_scalef_ps(kept, (__m512)x, (__m512)n);
}
INLINE vec_f64 vscale_f64(vec_f64 x, vec_f64 n, vec_f64 y, double least) {
    const __mmask8 kept = _mm512_cmp_pd_mask((__m512d)y, _mm512_set1_pd(least), _CMP_NLT_UQ);
    return (vec_f64)_mm512_maskz_scalef_pd(kept, (__m512d)x, (__m512d)n);
}
/* Of 16 numbers that which the last four bits of each lane of `index` choose. */
INLINE vec_f32 vchoose_f32(vec_f32 numbers, vec_f32 index) {
    return (vec_f32)_mm512_permutexvar_ps((__m512i)index, (__m512)numbers);
}
INLINE bool vany_f32(ivec_f32 m) { return _mm512_movepi32_mask((__m512i)m) != 0; }
INLINE bool vany_f64(ivec_f64 m) { return _mm512_movepi64_mask((__m512i)m) != 0; }
/* The first n lanes, 0 <= n <= VL; other lanes are 0. */
INLINE vec_f32 vload_partial_f32(const float *p, int n) {
    return (vec_f32)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
}
INLINE vec_f64 vload_partial_f64(const double *p, int n) {
    return (vec_f64)_mm512_maskz_loadu_pd((__mmask8)((1u << n) - 1), p);
}
INLINE void vstore_partial_f32(float *p, vec_f32 x, int n) {
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)x);
}
INLINE void vstore_partial_f64(double *p, vec_f64 x, int n) {
    _mm512_mask_storeu_pd(p, (__mmask8)((1u << n) - 1), (__m512d)x);
}
INLINE vec_f32 vwiden_f16(const void *p) { return (vec_f32)_mm512_cvtph_ps(_mm256_loadu_si256(p)); }
INLINE void vnarrow_f16(void *p, vec_f32 x) {
    _mm256_storeu_si256(p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#define HAVE_VECTOR_F16
/* Compilers make nothing else of -mavx512bf16 than these two, and only avx512bf16's table leads to them. */
#define HAVE_DOT
INLINE vec_f32 vdot(vec_f32 sum, int32_t pair, vec_f32 pairs) {
    return (vec_f32)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)pairs);
}
INLINE vec_f32 vpair(vec_f32 even, vec_f32 odd) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (vec_f32)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even));
}

#elif defined(SDPA_ISA_AVX2)
INLINE vec_f32 vmax2_f32(vec_f32 a, vec_f32 b) { return (vec_f32)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vec_f64 vmax2_f64(vec_f64 a, vec_f64 b) { return (vec_f64)_mm256_max_pd((__m256d)a, (__m256d)b); }
INLINE vec_f32 vmin2_f32(vec_f32 a, vec_f32 b) { return (vec_f32)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE vec_f64 vmin2_f64(vec_f64 a, vec_f64 b) { return (vec_f64)_mm256_min_pd((__m256d)a, (__m256d)b); }
INLINE vec_f32 vmulsub_f32(vec_f32 a, vec_f32 b, vec_f32 c) {
    return (vec_f32)_mm256_fmsub_ps((__m256)a, (__m256)b, (__m256)c);
}
INLINE vec_f64 vmulsub_f64(vec_f64 a, vec_f64 b, vec_f64 c) {
    return (vec_f64)_mm256_fmsub_pd((__m256d)a, (__m256d)b, (__m256d)c);
}
INLINE bool vany_f32(ivec_f32 m) { return _mm256_movemask_ps((__m256)m) != 0; }
INLINE bool vany_f64(ivec_f64 m) { return _mm256_movemask_pd((__m256d)m) != 0; }
INLINE __m256i lane_mask_f32(int n) {
    const ivec_f32 lane = {0, 1, 2, 3, 4, 5, 6, 7};
    return (__m256i)(lane < n);
}
INLINE __m256i lane_mask_f64(int n) {
    const ivec_f64 lane = {0, 1, 2, 3};
    return (__m256i)(lane < (int64_t)n);
}
INLINE vec_f32 vload_partial_f32(const float *p, int n) { return (vec_f32)_mm256_maskload_ps(p, lane_mask_f32(n)); }
INLINE vec_f64 vload_partial_f64(const double *p, int n) { return (vec_f64)_mm256_maskload_pd(p, lane_mask_f64(n)); }
/* By halves: a masked store takes some 40 cycles on AMD's processors. */
INLINE void vstore_partial_f32(float *p, vec_f32 x, int n) {
    __m128 low = _mm256_castps256_ps128((__m256)x);
    if (n & 8) _mm256_storeu_ps(p, (__m256)x);
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
}
INLINE void vstore_partial_f64(double *p, vec_f64 x, int n) {
    __m128d low = _mm256_castpd256_pd128((__m256d)x);
    if (n & 4) _mm256_storeu_pd(p, (__m256d)x);
    if (n & 2) {
        _mm_storeu_pd(p, low);
        low = _mm256_extractf128_pd((__m256d)x, 1);
        p += 2;
    }
    if (n & 1) _mm_store_sd(p, low);
}
INLINE vec_f32 vwiden_f16(const void *p) { return (vec_f32)_mm256_cvtph_ps(_mm_loadu_si128(p)); }
INLINE void vnarrow_f16(void *p, vec_f32 x) {
    _mm_storeu_si128(p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#define HAVE_VECTOR_F16

#else /* no instructions of its own, but for NEON */
#if defined(SDPA_ISA_NEON)
INLINE vec_f32 vmax2_f32(vec_f32 a, vec_f32 b) { return (vec_f32)vmaxq_f32((float32x4_t)a, (float32x4_t)b); }
INLINE vec_f64 vmax2_f64(vec_f64 a, vec_f64 b) { return (vec_f64)vmaxq_f64((float64x2_t)a, (float64x2_t)b); }
INLINE vec_f32 vmin2_f32(vec_f32 a, vec_f32 b) { return (vec_f32)vminq_f32((float32x4_t)a, (float32x4_t)b); }
INLINE vec_f64 vmin2_f64(vec_f64 a, vec_f64 b) { return (vec_f64)vminq_f64((float64x2_t)a, (float64x2_t)b); }
INLINE vec_f32 vmulsub_f32(vec_f32 a, vec_f32 b, vec_f32 c) {
    return (vec_f32)vfmaq_f32((float32x4_t)-c, (float32x4_t)a, (float32x4_t)b);
}
INLINE vec_f64 vmulsub_f64(vec_f64 a, vec_f64 b, vec_f64 c) {
    return (vec_f64)vfmaq_f64((float64x2_t)-c, (float64x2_t)a, (float64x2_t)b);
}
INLINE vec_f32 vwiden_f16(const void *p) {
    uint16x4_t h;
    memcpy(&h, p, sizeof h);
    return (vec_f32)vcvt_f32_f16(vreinterpret_f16_u16(h));
}
INLINE void vnarrow_f16(void *p, vec_f32 x) {
    uint16x4_t h = vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x));
    memcpy(p, &h, sizeof h);
}
#define HAVE_VECTOR_F16
#else
INLINE vec_f32 vmax2_f32(vec_f32 a, vec_f32 b) { return vselect_f32(a > b, a, b); }
INLINE vec_f64 vmax2_f64(vec_f64 a, vec_f64 b) { return vselect_f64(a > b, a, b); }
INLINE vec_f32 vmin2_f32(vec_f32 a, vec_f32 b) { return vselect_f32(a < b, a, b); }
INLINE vec_f64 vmin2_f64(vec_f64 a, vec_f64 b) { return vselect_f64(a < b, a, b); }
INLINE vec_f32 vmulsub_f32(vec_f32 a, vec_f32 b, vec_f32 c) { return a * b - c; }
INLINE vec_f64 vmulsub_f64(vec_f64 a, vec_f64 b, vec_f64 c) { return a * b - c; }
#endif
#ifdef SDPA_WIDE
#define HAVE_DOT
INLINE vec_f32 vdot(vec_f32 sum, int32_t pair, vec_f32 pairs) {
    const ivec_f32 all = pair - (ivec_f32){0}, other = (ivec_f32)pairs;
    sum += (vec_f32)(all & ~0xffff) * (vec_f32)(other & ~0xffff);
    return sum + (vec_f32)(all << 16) * (vec_f32)(other << 16);
}
INLINE ivec_f32 vround_bf16(vec_f32 x) {
    const ivec_f32 bits = (ivec_f32)x, rounded = bits + 0x7fff + (bits >> 16 & 1);
    return (ivec_f32)vselect_f32(x != x, (vec_f32)(bits | 0x400000), (vec_f32)rounded) & ~0xffff;
}
INLINE vec_f32 vpair(vec_f32 even, vec_f32 odd) {
    return (vec_f32)(vround_bf16(odd) | (vround_bf16(even) >> 16 & 0xffff));
}
#endif
INLINE bool vany_f32(ivec_f32 m) {
    int32_t any = 0;
    UNROLL for (int l = 0; l < VL_f32; l++) any |= m[l];
    return any != 0;
}
INLINE bool vany_f64(ivec_f64 m) {
    int64_t any = 0;
    UNROLL for (int l = 0; l < VL_f64; l++) any |= m[l];
    return any != 0;
}
INLINE vec_f32 vload_partial_f32(const float *p, int n) {
    vec_f32 x = {0};
    for (int l = 0; l < n; l++) x[l] = p[l];
    return x;
}
INLINE vec_f64 vload_partial_f64(const double *p, int n) {
    vec_f64 x = {0};
    for (int l = 0; l < n; l++) x[l] = p[l];
    return x;
}
INLINE void vstore_partial_f32(float *p, vec_f32 x, int n) {
    for (int l = 0; l < n; l++) p[l] = x[l];
}
INLINE void vstore_partial_f64(double *p, vec_f64 x, int n) {
    for (int l = 0; l < n; l++) p[l] = x[l];
}
#endif

#if !defined(SDPA_ISA_AVX512)
#define DEFINE_MUL_FINITE(T, most)                                                                                     \
    INLINE vec_##T vmul_finite_##T(real_##T a, vec_##T x) {                                                            \
        const vec_##T y = vmin2_##T(vset1_##T(most), vmax2_##T(vset1_##T(-most), a * x));                              \
        return vselect_##T(x - x == 0, y, x);                                                                          \
    }
DEFINE_MUL_FINITE(f32, FLT_MAX)
DEFINE_MUL_FINITE(f64, DBL_MAX)
#undef DEFINE_MUL_FINITE
#endif

/* In-place transpose of VL x VL: a butterfly. Stage h swaps the h-blocks off the diagonal of each 2h-block. */
#define LOW(l, h, n) ((l) & (h) ? (n) + (l) - (h) : (l))
#define HIGH(l, h, n) ((l) & (h) ? (n) + (l) : (l) + (h))
#define LANES_2(F, h, n) F(0, h, n), F(1, h, n)
#define LANES_4(F, h, n) LANES_2(F, h, n), F(2, h, n), F(3, h, n)
#define LANES_8(F, h, n) LANES_4(F, h, n), F(4, h, n), F(5, h, n), F(6, h, n), F(7, h, n)
#define LANES_16(F, h, n)                                                                                              \
    LANES_8(F, h, n), F(8, h, n), F(9, h, n), F(10, h, n), F(11, h, n), F(12, h, n), F(13, h, n), F(14, h, n),         \
        F(15, h, n)
#define STAGE(h, n, vtype)                                                                                             \
    UNROLL for (int i = 0; i < n; i++) {                                                                               \
        if (!(i & h)) {                                                                                                \
            vtype a = r[i], b = r[i + h];                                                                              \
            r[i] = __builtin_shufflevector(a, b, LANES_##n(LOW, h, n));                                                \
            r[i + h] = __builtin_shufflevector(a, b, LANES_##n(HIGH, h, n));                                           \
        }                                                                                                              \
    }
#if VEC_BYTES == 64
INLINE void vtranspose_f32(vec_f32 *r){STAGE(8, 16, vec_f32) STAGE(4, 16, vec_f32) STAGE(2, 16, vec_f32)
                                           STAGE(1, 16, vec_f32)} INLINE
    void vtranspose_f64(vec_f64 *r){STAGE(4, 8, vec_f64) STAGE(2, 8, vec_f64) STAGE(1, 8, vec_f64)}
#elif VEC_BYTES == 32
INLINE void vtranspose_f32(vec_f32 *r){STAGE(4, 8, vec_f32) STAGE(2, 8, vec_f32) STAGE(1, 8, vec_f32)} INLINE
    void vtranspose_f64(vec_f64 *r){STAGE(2, 4, vec_f64) STAGE(1, 4, vec_f64)}
#else
INLINE void vtranspose_f32(vec_f32 *r){STAGE(2, 4, vec_f32) STAGE(1, 4, vec_f32)} INLINE
    void vtranspose_f64(vec_f64 *r) {
    STAGE(1, 2, vec_f64)
}
#endif
/* Lane l gets lane l ^ h, h a power of 2 below VL. */
#define FLIP(l, h, n) ((l) ^ (h))
#define SWAP(h, n)                                                                                                     \
    case h:                                                                                                            \
        return __builtin_shufflevector(x, x, LANES_##n(FLIP, h, n));
INLINE vec_f32 vswap_f32(vec_f32 x, int h) {
    switch (h) {
#if VEC_BYTES == 64
        SWAP(8, 16) SWAP(4, 16) SWAP(2, 16) SWAP(1, 16)
#elif VEC_BYTES == 32
        SWAP(4, 8) SWAP(2, 8) SWAP(1, 8)
#else
        SWAP(2, 4) SWAP(1, 4)
#endif
    }
    return x;
}
INLINE vec_f64 vswap_f64(vec_f64 x, int h) {
    switch (h) {
#if VEC_BYTES == 64
        SWAP(4, 8) SWAP(2, 8) SWAP(1, 8)
#elif VEC_BYTES == 32
        SWAP(2, 4) SWAP(1, 4)
#else
        SWAP(1, 2)
#endif
    }
    return x;
}
#undef SWAP
#undef FLIP

#if VEC_BYTES >= 32
#if VEC_BYTES == 64
#define SHUFFLE_f32(F, a, b, h) __builtin_shufflevector(a, b, LANES_16(F, h, 16))
#define SHUFFLE_f64(F, a, b, h) __builtin_shufflevector(a, b, LANES_8(F, h, 8))
#else
#define SHUFFLE_f32(F, a, b, h) __builtin_shufflevector(a, b, LANES_8(F, h, 8))
#define SHUFFLE_f64(F, a, b, h) __builtin_shufflevector(a, b, LANES_4(F, h, 4))
#endif
#define EVEN(l, h, n) ((l) / 4 * 4 + (l) % 2 * 2 + ((l)&2 ? (n) : 0))
#define ODD(l, h, n) (EVEN(l, h, n) + 1)
/* Lane i: the sum of x[i % 4]'s lanes of the same four; vsum4: of all of them. */
INLINE vec_f32 vfour_f32(const vec_f32 *x) {
    const vec_f32 a = SHUFFLE_f32(EVEN, x[0], x[1], 0) + SHUFFLE_f32(ODD, x[0], x[1], 0),
                  b = SHUFFLE_f32(EVEN, x[2], x[3], 0) + SHUFFLE_f32(ODD, x[2], x[3], 0);
    return SHUFFLE_f32(EVEN, a, b, 0) + SHUFFLE_f32(ODD, a, b, 0);
}
INLINE vec_f64 vfour_f64(const vec_f64 *x) {
    const vec_f64 a = SHUFFLE_f64(LOW, x[0], x[1], 1) + SHUFFLE_f64(HIGH, x[0], x[1], 1),
                  b = SHUFFLE_f64(LOW, x[2], x[3], 1) + SHUFFLE_f64(HIGH, x[2], x[3], 1);
    return SHUFFLE_f64(LOW, a, b, 2) + SHUFFLE_f64(HIGH, a, b, 2);
}
#define DEFINE_SUM(T)                                                                                                  \
    INLINE vec_##T vsum4_##T(const vec_##T *x) {                                                                       \
        vec_##T sum = vfour_##T(x);                                                                                    \
        UNROLL for (int h = 4; h < VL_##T; h *= 2) sum += vswap_##T(sum, h);                                           \
        return sum;                                                                                                    \
    }
DEFINE_SUM(f32)
DEFINE_SUM(f64)
#undef DEFINE_SUM
#if VEC_BYTES == 64
/* Lane 4 k + i: the sum of x[k][i]'s lanes, for the VL / 4 first k. */
#define FRONT(l, h, n) ((l) < (n) / 2 ? (l) : (n) / 2 + (l))
#define BACK(l, h, n) ((l) < (n) / 2 ? (n) / 2 + (l) : (n) + (l))
#define EVEN_FOURS(l, h, n) ((l) / 4 * 8 + (l) % 4)
#define ODD_FOURS(l, h, n) (EVEN_FOURS(l, h, n) + 4)
INLINE vec_f32 vsums_f32(const vec_f32 (*x)[4]) {
    const vec_f32 r[4] = {vfour_f32(x[0]), vfour_f32(x[1]), vfour_f32(x[2]), vfour_f32(x[3])};
    const vec_f32 a = SHUFFLE_f32(FRONT, r[0], r[1], 0) + SHUFFLE_f32(BACK, r[0], r[1], 0),
                  b = SHUFFLE_f32(FRONT, r[2], r[3], 0) + SHUFFLE_f32(BACK, r[2], r[3], 0);
    return SHUFFLE_f32(EVEN_FOURS, a, b, 0) + SHUFFLE_f32(ODD_FOURS, a, b, 0);
}
INLINE vec_f64 vsums_f64(const vec_f64 (*x)[4]) {
    const vec_f64 a = vfour_f64(x[0]), b = vfour_f64(x[1]);
    return SHUFFLE_f64(FRONT, a, b, 0) + SHUFFLE_f64(BACK, a, b, 0);
}
#undef ODD_FOURS
#undef EVEN_FOURS
#undef BACK
#undef FRONT
#endif
#undef ODD
#undef EVEN
#undef SHUFFLE_f64
#undef SHUFFLE_f32
#endif

/* Reductions over the lanes, a binary tree. vreduce_max: any lane if one is NaN. */
#define DEFINE_REDUCTIONS(T)                                                                                           \
    INLINE real_##T vreduce_add_##T(vec_##T x) {                                                                       \
        UNROLL for (int h = VL_##T / 2; h > 0; h /= 2) x += vswap_##T(x, h);                                           \
        return x[0];                                                                                                   \
    }                                                                                                                  \
    INLINE real_##T vreduce_max_##T(vec_##T x) {                                                                       \
        UNROLL for (int h = VL_##T / 2; h > 0; h /= 2) x = vmax2_##T(x, vswap_##T(x, h));                              \
        return x[0];                                                                                                   \
    }
DEFINE_REDUCTIONS(f32)
DEFINE_REDUCTIONS(f64)
#undef DEFINE_REDUCTIONS
#undef STAGE
#undef LANES_16
#undef LANES_8
#undef LANES_4
#undef LANES_2
#undef HIGH
#undef LOW

#endif
