/* exp2 and tanh on vectors, and conversion of rows between memory formats and the compute type. */

#define vexp2 FN(vexp2)
#define vexp2_finish FN(vexp2_finish)
#define vexp2_product FN(vexp2_product)
#define vexp2_above FN(vexp2_above)
#define vexp2_quick FN(vexp2_quick)
#define exp2_slope FN(exp2_slope)
#define vtanh FN(vtanh)

/* Adding this to a small x rounds it to an integer, which then stands, with the exponent's bias, in the low bits. */
#define EXP2_MAGIC ((real)(SDPA_REAL == 32 ? 0x1.8p23 + 127 : 0x1.8p52 + 1023))

/* The same for the largest integer n with 2^n = 0 here. */
#define EXP2_LEAST (EXP2_MAGIC - (SDPA_REAL == 32 ? 127 : 1023))
#define EXP2_MOST (EXP2_MAGIC + (SDPA_REAL == 32 ? 127 : 1023)) /* with 2^n finite */

/* (2^f - 1) / f on [-1/2, 1/2], of the minimax polynomials of 2^f of degree 6 (1.9e-9) and 11 (3.1e-18). */
INLINE vec exp2_slope(vec f) {
#if SDPA_REAL == 32
    vec p = vset1(1.5345812161311629e-4f);
    p = p * f + 1.3399931177239737e-3f;
    p = p * f + 9.6184889563311816e-3f;
    p = p * f + 5.5503287771053248e-2f;
    p = p * f + 2.4022646890645521e-1f;
    return p * f + 6.9314720573719575e-1f;
#else
    vec p = vset1(4.4352827069572771511e-10);
    p = p * f + 7.0741056135081427963e-9;
    p = p * f + 1.0178198021671930844e-7;
    p = p * f + 1.321543308967639918e-6;
    p = p * f + 1.5252733489988525649e-5;
    p = p * f + 1.5403530462514432062e-4;
    p = p * f + 1.3333558146789921722e-3;
    p = p * f + 9.6181291075883352443e-3;
    p = p * f + 5.5504108664819921605e-2;
    p = p * f + 2.4022650695910156204e-1;
    return p * f + 6.9314718055994533046e-1;
#endif
}

/* How AVX-512 takes 2^x = 2^n 2^f: n is x to EXP2_BITS bits after the point. With 4, 2^(n - floor n) comes from a table, which
 * spares two of seven FMAs: those are all that exponentials cost beside the products' (Zen 5), everything else running on
 * other units. */
#define EXP2_BITS (SDPA_REAL == 32 ? 4 : 0)
#define EXP2_LEAST_NORMAL (SDPA_REAL == 32 ? -126 : -1022)

/* 2^(n + f) for n next to x and f = x - n. With AVX-512 n is as above, and where x is below the exponents of normal numbers
 * there results 0; else n is an integer, with EXP2_MAGIC added, and f in about [-1/2, 1/2]. */
INLINE vec vexp2_finish(vec x, vec n, vec f) {
#if defined(SDPA_ISA_AVX512) && SDPA_REAL == 32
    const vec powers = {1,           1.04427373f, 1.09050775f, 1.13878858f, 1.18920708f, 1.24185777f,
                        1.29683959f, 1.35425556f, 1.41421354f, 1.47682619f, 1.54221082f, 1.61049032f,
                        1.68179286f, 1.75625217f, 1.8340081f,  1.91520655f};
    const vec power = vchoose_f32(powers, n + 0x1.8p19f);               /* the sum's last bit is worth 1/16 */
    vec p = vset1(5.5502136502564352e-2f) * f + 2.4023428801394678e-1f; /* minimax 1.6e-9 on [-1/32, 1/32] */
    p = p * f + 6.9314718266662956e-1f;
    return vscale(p * (power * f) + power, n, x, EXP2_LEAST_NORMAL);
#else
    const vec p = exp2_slope(f) * f + 1;
#if defined(SDPA_ISA_AVX512)
    return vscale(p, n, x, EXP2_LEAST_NORMAL);
#else
    (void)x;
    return p * (vec)((ivec)n << (SDPA_REAL == 32 ? 23 : 52));
#endif
#endif
}

/* 2^x. Relative error: float32 at most 1.0 ulp, float64 at most 1.1 ulp. NaN gives NaN, +inf +inf (at least 2^127 or 2^1023
 * without AVX-512), and results below the smallest normal number are 0: a subnormal would cost more than it is worth in the
 * products that follow. */
INLINE vec vexp2(vec x) {
#if defined(SDPA_ISA_AVX512)
    const vec f = vrest(x, EXP2_BITS);
    return vexp2_finish(x, x - f, f);
#else
    const real limit = SDPA_REAL == 32 ? 127 : 1023;
    x = vmin2(vset1(limit + (real)0.49), vmax2(vset1(-limit), x));
    vec n = x + EXP2_MAGIC;
    return vexp2_finish(x, n, x - (n - EXP2_MAGIC));
#endif
}

/* Tried in place of the polynomial for the scores of a tile (Zen 3, AVX2, cycles per vector in the tile's epilogue, of which
 * d / 2 are the products'): vexp2 9.7, vexp2_quick 7.0, a table of 8 by permutation with a polynomial of degree 3 8.3, the
 * polynomial by Estrin's scheme 9.2, four vectors at a time stage by stage 7.8, the exponent added to the bits 7.8. */

/* vexp2 where -2^40 < x < 128 (1024), the same bits; beyond NaN or at least 2^127 (2^1023), below NaN or 0. */
INLINE vec vexp2_quick(vec x) {
#if defined(SDPA_ISA_AVX512) /* half a cycle less than by vreduceps, of 8 (Zen 4), but NaN for +inf */
    const vec n = vround(x, EXP2_BITS);
    return vexp2_finish(x, n, x - n);
#else
    const vec n = x + EXP2_MAGIC;
    return vexp2_finish(x, vmin2(vset1(EXP2_MOST), vmax2(vset1(EXP2_LEAST), n)), x - (n - EXP2_MAGIC));
#endif
}

/* 2^(c x - m) for integers m, |m| at most HUGE_SCORE, where vexp2_quick takes c x - m, or anywhere if `any` (a constant).
 * c x - m is split into n and a rest before anything is rounded, so that the error does not grow with |c x - m|: gradients of
 * values err by 6 % less, for an FMA. With AVX-512 results may be as small as 0.7 of the smallest normal number. */
INLINE vec vexp2_above(vec c, vec x, vec m, bool any) {
#if defined(SDPA_ISA_AVX512)
    (void)any;
    const vec whole = vround(c * x, EXP2_BITS), n = whole - m;
    return vexp2_finish(n, n, vmulsub(c, x, whole));
#else
    const vec down = m - EXP2_MAGIC, n = vmulsub(c, x, down), limited = vmax2(vset1(EXP2_LEAST), n);
    vec f = vmulsub(c, x, (any ? limited : n) + down);
    if (any) f = vmax2(vset1(-1), f);
    return vexp2_finish(n, limited, f);
#endif
}

/* 2^(c d) with c = c_high + c_low, where rounding c d would cost |c d| ulp. c_high has at most half the bits of a
 * significand and d >= d_min, where c d_min = -limit of vexp2; or d = -inf with AVX-512. Error as of vexp2. */
INLINE vec vexp2_product(vec d, real c, real c_high, real c_low, real d_min) {
#if defined(SDPA_ISA_AVX512)
    (void)d_min;
    vec x = c * d;
    vec n = vround(x, EXP2_BITS);
    vec whole = n;
#else
    d = vmax2(vset1(d_min), d);
    vec x = d;
    vec n = c * d + EXP2_MAGIC;
    vec whole = n - EXP2_MAGIC;
#endif
#if defined(__FMA__) || defined(__aarch64__)
    vec f = c_high * d - whole;
#else
    /* Products of half significands are exact. */
    ivec half = (ivec)d & (SDPA_REAL == 32 ? ~(int64_t)0xfff : ~(int64_t)0x7ffffff);
    vec d_high = (vec)half;
    vec f = (c_high * d_high - whole) + c_high * (d - d_high);
#endif
    f = c_low * d + f;
    return vexp2_finish(x, n, f);
}

/* tanh x = E / (E + 2), E = e^(2|x|) - 1 = 2^n (2^f - 1) + (2^n - 1). Relative error at most 4 ulp, at 0 too. */
INLINE vec vtanh(vec x) {
    const ivec sign = (ivec)x & SIGN_BIT;
    const double c = 2 * M_LOG2E, c_high = (real)c;
    /* At 20 the result has long been 1. */
    vec a = vmin2(vset1(20), (vec)((ivec)x & ~SIGN_BIT));
    vec n = (real)c_high * a + EXP2_MAGIC;
    vec f = vmulsub(vset1((real)c_high), a, n - EXP2_MAGIC) + (real)(c - c_high) * a;
    vec power = (vec)((ivec)n << (SDPA_REAL == 32 ? 23 : 52));
    vec e = power * (exp2_slope(f) * f) + (power - 1);
    return (vec)((ivec)(e / (e + 2)) | sign);
}

#if SDPA_REAL == 32 /* the 16-bit formats are widened to float32 only; float64 reads them through it */
INLINE uint16_t swap16(uint16_t x) { return __builtin_bswap16(x); }

/* Exact. */
INLINE float widen_f16(uint16_t h) {
#ifdef HAVE_VECTOR_F16
    uint16_t lanes[VL] = {h};
    return vwiden_f16(lanes)[0];
#else
    /* Shift into float32's fields; the multiplication rebiases the exponent and normalises subnormals. */
    uint32_t bits = (uint32_t)(h & 0x7fff) << 13;
    if ((h & 0x7c00) == 0x7c00) bits |= 0x70000000;
    float x;
    memcpy(&x, &bits, 4);
    if ((h & 0x7c00) != 0x7c00) x *= 0x1p112f;
    return h & 0x8000 ? -x : x;
#endif
}

/* Round to nearest even; NaN stays NaN. */
INLINE uint16_t narrow_f16(float x) {
#ifdef HAVE_VECTOR_F16
    uint16_t lanes[VL];
    vnarrow_f16(lanes, vset1(x));
    return lanes[0];
#else
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
#endif
}

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
#endif

/* dst[0..n-1] = n elements at src, `stride` bytes apart, of any float type, or BOOL as a mask (true 0, false -inf). */
NOINLINE void FN(load)(void *dst_, const char *src, int64_t n, int64_t stride, sdpa_dtype dtype, bool swapped) {
    real *restrict dst = dst_;
    switch (dtype) {
    case SDPA_F32:
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
        return;
    case SDPA_F64:
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
        return;
    case SDPA_F16: {
        int64_t i = 0;
#if defined(HAVE_VECTOR_F16) && SDPA_REAL == 32
        if (!swapped && stride == 2) {
            for (; i + VL <= n; i += VL) vstore(dst + i, vwiden_f16(src + 2 * i));
        }
#endif
        for (; i < n; i++) {
            uint16_t h;
            memcpy(&h, src + i * stride, 2);
            dst[i] = widen_f16(swapped ? swap16(h) : h);
        }
        return;
    }
    case SDPA_BF16:
        if (!swapped && stride == 2 && (uintptr_t)src % 2 == 0) {
            const uint16_t *restrict s = (const uint16_t *)src;
            SIMD for (int64_t i = 0; i < n; i++) dst[i] = widen_bf16(s[i]);
            return;
        }
        for (int64_t i = 0; i < n; i++) {
            uint16_t h;
            memcpy(&h, src + i * stride, 2);
            dst[i] = widen_bf16(swapped ? swap16(h) : h);
        }
        return;
    case SDPA_BOOL:
        if (stride == 1) {
            SIMD for (int64_t i = 0; i < n; i++) dst[i] = src[i] ? 0 : -(real)INFINITY;
            return;
        }
        for (int64_t i = 0; i < n; i++) dst[i] = src[i * stride] ? 0 : -(real)INFINITY;
        return;
    case SDPA_I64:
        break;
    }
}

/* n reals to native elements of a float type, `stride` bytes apart, rounded to nearest even. */
NOINLINE void FN(store)(char *dst, const void *src_, int64_t n, int64_t stride, sdpa_dtype dtype) {
    const real *restrict src = src_;
    if (dtype == (SDPA_REAL == 32 ? SDPA_F32 : SDPA_F64) && stride == (int64_t)sizeof(real)) {
        memcpy(dst, src, (size_t)n * sizeof(real));
        return;
    }
    switch (dtype) {
    case SDPA_F32:
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
#if defined(HAVE_VECTOR_F16) && SDPA_REAL == 32
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
