/* exp2 and tanh on vectors, and log. Errors are in ulp of the exact result; as relative errors they are at most 8 times
 * 2^-24 (2^-53). tests/c/test_vmath.c checks every bound, for float32 at every number. Numbers in parentheses are those
 * for float64. */
#ifndef SDPA_KERNEL_VMATH_H
#define SDPA_KERNEL_VMATH_H

#include <math.h>
#include "vec.h"

/* Adding this to a small x rounds it to an integer and leaves that, plus the exponent's bias, in the low bits. */
#define EXP2_MAGIC ((real)(SDPA_REAL == 32 ? 0x1.8p23 + 127 : 0x1.8p52 + 1023))

/* EXP2_MAGIC plus the largest integer n whose 2^n is 0 here. */
#define EXP2_LEAST (EXP2_MAGIC - (SDPA_REAL == 32 ? 127 : 1023))
#define EXP2_MOST (EXP2_MAGIC + (SDPA_REAL == 32 ? 127 : 1023)) /* with 2^n finite */

/* Chains of dependent operations leave a CPU idle unless several are in its reach at once. So functions whose names end
 * in s take a constant number of vectors, and do each step to all of them. */
enum { MOST_AT_ONCE = 4 };
#define EACH(i, n) UNROLL for (int i = 0; i < (n); i++)

/* (2^f - 1) / f on [-1/2, 1/2], of the minimax polynomials of 2^f of degree 6 (1.9e-9) and 11 (3.1e-18). */
INLINE void exp2_slopes(vec *p, const vec *f, int n) {
#if SDPA_REAL == 32
    const real c[] = {1.5345812161311629e-4f, 1.3399931177239737e-3f, 9.6184889563311816e-3f,
                      5.5503287771053248e-2f, 2.4022646890645521e-1f, 6.9314720573719575e-1f};
#else
    const real c[] = {4.4352827069572771511e-10, 7.0741056135081427963e-9, 1.0178198021671930844e-7,
                      1.321543308967639918e-6,   1.5252733489988525649e-5, 1.5403530462514432062e-4,
                      1.3333558146789921722e-3,  9.6181291075883352443e-3, 5.5504108664819921605e-2,
                      2.4022650695910156204e-1,  6.9314718055994533046e-1};
#endif
    EACH(i, n) p[i] = vset1(c[0]);
    EACH(k, (int)(sizeof c / sizeof c[0]) - 1) EACH(i, n) p[i] = vmuladd(p[i], f[i], vset1(c[k + 1]));
}

/* With HAVE_SCALE, n in 2^x = 2^n 2^f is x rounded to 4 (0) bits after the point, and 2^(n - floor n) comes from a table,
 * which saves float32 two FMAs. Adding EXP2_GRID to a small x rounds it so; the sum's last bits select from the
 * table. */
#define EXP2_GRID ((real)(SDPA_REAL == 32 ? 0x1.8p19 : 0x1.8p52))
#define EXP2_LEAST_NORMAL (SDPA_REAL == 32 ? -126 : -1022)

/* out = 2^(n + f) for n next to x and f = x - n, where n was rounded to EXP2_GRID with HAVE_SCALE, else to EXP2_MAGIC,
 * and t is n with that added. With HAVE_SCALE the result is 0 where x is below the exponents of normal numbers. */
INLINE void vexp2_finishes(vec *out, const vec *x, const vec *t, const vec *n, const vec *f, int count) {
#if defined(HAVE_SCALE) && SDPA_REAL == 32
    const vec powers = {1,           1.04427373f, 1.09050775f, 1.13878858f, 1.18920708f, 1.24185777f,
                        1.29683959f, 1.35425556f, 1.41421354f, 1.47682619f, 1.54221082f, 1.61049032f,
                        1.68179286f, 1.75625217f, 1.8340081f,  1.91520655f};
    vec p[MOST_AT_ONCE], power[MOST_AT_ONCE];
    EACH(i, count) power[i] = vchoose(powers, t[i]);
    /* minimax 1.6e-9 on [-1/32, 1/32] */
    EACH(i, count) p[i] = vmuladd(vset1(5.5502136502564352e-2f), f[i], vset1(2.4023428801394678e-1f));
    EACH(i, count) p[i] = vmuladd(p[i], f[i], vset1(6.9314718266662956e-1f));
    EACH(i, count) p[i] = vmuladd(p[i], power[i] * f[i], power[i]);
    EACH(i, count) out[i] = vscale(p[i], n[i], x[i], EXP2_LEAST_NORMAL);
#else
    vec p[MOST_AT_ONCE];
    exp2_slopes(p, f, count);
    EACH(i, count) p[i] = vmuladd(p[i], f[i], vset1(1));
#ifdef HAVE_SCALE
    (void)t;
    EACH(i, count) out[i] = vscale(p[i], n[i], x[i], EXP2_LEAST_NORMAL);
#else
    (void)x, (void)n;
    EACH(i, count) out[i] = p[i] * (vec)((ivec)t[i] << (SDPA_REAL == 32 ? 23 : 52));
#endif
#endif
}

INLINE vec vexp2_finish(vec x, vec t, vec n, vec f) {
    vec out;
    vexp2_finishes(&out, &x, &t, &n, &f, 1);
    return out;
}

/* 2^x. Error at most 1.0 (1.1) ulp, or 1.3 without FMA. NaN gives NaN. With AVX-512 +inf gives +inf, and results below
 * the smallest normal number are 0: a subnormal would slow down the products that follow. Without AVX-512 only results
 * below 0.7 of the smallest normal number are 0, and x above 127.49 (1023.49) counts as that number. */
INLINE vec vexp2(vec x) {
#ifdef HAVE_SCALE
    const vec f = vrest(x, SDPA_REAL == 32 ? 4 : 0), n = x - f;
    return vexp2_finish(x, n + EXP2_GRID, n, f);
#else
    const real limit = SDPA_REAL == 32 ? 127 : 1023;
    x = vmin2(vset1(limit + (real)0.49), vmax2(vset1(-limit), x));
    const vec t = x + EXP2_MAGIC, n = t - EXP2_MAGIC;
    return vexp2_finish(x, t, n, x - n);
#endif
}

/* The bits of vexp2 for -2^40 < x < 128 (1024); without AVX-512 for -2^40 < x < 127.49 (1023.49). Below that range NaN
 * or 0. Above it NaN, -inf, or at least 0.99 * 2^126 (2^1022): a sum shows it. */
INLINE vec vexp2_quick(vec x) {
#ifdef HAVE_SCALE /* x - n takes one operation less than vrest, but is NaN for +inf */
    const vec t = x + EXP2_GRID, n = t - EXP2_GRID;
    return vexp2_finish(x, t, n, x - n);
#else
    const vec t = x + EXP2_MAGIC, n = t - EXP2_MAGIC;
    return vexp2_finish(x, vmin2(vset1(EXP2_MOST), vmax2(vset1(EXP2_LEAST), t)), n, x - n);
#endif
}

/* 2^(c x - m) for integers m, |m| at most HUGE_SCORE, where -2^40 < c x - m < 127.49 (1023.49), or anywhere below that
 * if `any` (a constant). c x - m is split into n and a rest before anything is rounded, so that the error does not grow
 * with |c x - m|; this makes gradients of values more precise, for one FMA. Error at most 1.1 ulp, without FMA 0.7 |c
 * x| more, since c x is then rounded first. Results may be as small as 0.7 of the smallest normal number. */
INLINE vec vexp2_above(vec c, vec x, vec m, bool any) {
#ifdef HAVE_SCALE
    (void)any;
    const vec down = m - EXP2_GRID, t = vmulsub(c, x, down), n = t - EXP2_GRID;
    return vexp2_finish(n, t, n, vmulsub(c, x, t + down));
#else
    const vec down = m - EXP2_MAGIC, t = vmulsub(c, x, down), limited = vmax2(vset1(EXP2_LEAST), t);
    vec f = vmulsub(c, x, (any ? limited : t) + down);
    if (any) f = vmax2(vset1(-1), f);
    return vexp2_finish(t, limited, t, f);
#endif
}

/* d = 2^(c d) with c = c_high + c_low, where rounding c d would cost |c d| ulp. c_high has at most half the bits of a
 * significand and d >= d_min, where c d_min = -limit of vexp2; or d = -inf with AVX-512. Where c d is at most 127
 * (1023), the error is at most 1.3 ulp, or 1.6 without FMA. Results may be as small as 0.7 of the smallest normal
 * number. */
INLINE void vexp2_products(vec *d, int count, real c, real c_high, real c_low, real d_min) {
    vec t[MOST_AT_ONCE], n[MOST_AT_ONCE], f[MOST_AT_ONCE];
#ifdef HAVE_SCALE
    (void)d_min;
    EACH(i, count) t[i] = vmuladd(vset1(c), d[i], vset1(EXP2_GRID));
    EACH(i, count) n[i] = t[i] - EXP2_GRID;
#else
    EACH(i, count) d[i] = vmax2(vset1(d_min), d[i]);
    EACH(i, count) t[i] = vmuladd(vset1(c), d[i], vset1(EXP2_MAGIC));
    EACH(i, count) n[i] = t[i] - EXP2_MAGIC;
#endif
#ifdef HAVE_FMA
    EACH(i, count) f[i] = vmulsub(vset1(c_high), d[i], n[i]);
#else
    /* Products of half significands are exact. */
    EACH(i, count) {
        const ivec half = (ivec)d[i] & (SDPA_REAL == 32 ? ~(int64_t)0xfff : ~(int64_t)0x7ffffff);
        const vec d_high = (vec)half;
        f[i] = (c_high * d_high - n[i]) + c_high * (d[i] - d_high);
    }
#endif
    EACH(i, count) f[i] = vmuladd(vset1(c_low), d[i], f[i]);
    vexp2_finishes(d, n, t, n, f, count);
}

INLINE vec vexp2_product(vec d, real c, real c_high, real c_low, real d_min) {
    vexp2_products(&d, 1, c, c_high, c_low, d_min);
    return d;
}

/* tanh x = E / (E + 2), E = e^(2|x|) - 1 = 2^n (2^f - 1) + (2^n - 1). Error at most 4.2 ulp, also near 0. */
INLINE vec vtanh(vec x) {
    const ivec sign = (ivec)x & SIGN_BIT;
    const double c = 2 * M_LOG2E, c_high = (real)c;
    /* At 20 the result has long been 1. */
    vec a = vmin2(vset1(20), (vec)((ivec)x & ~SIGN_BIT));
    vec n = vmuladd(vset1((real)c_high), a, vset1(EXP2_MAGIC));
    vec f = vmuladd(vset1((real)(c - c_high)), a, vmulsub(vset1((real)c_high), a, n - EXP2_MAGIC));
    vec power = (vec)((ivec)n << (SDPA_REAL == 32 ? 23 : 52));
    vec slope;
    exp2_slopes(&slope, &f, 1);
    vec e = vmuladd(power, slope * f, power - 1);
    return (vec)((ivec)(e / (e + 2)) | sign);
}

/* log x for a normal number x, NaN for NaN. The error is below 0.9 ulp in float64 kernels, in float32 ones 2^-39 of the
 * result. The same operations in any loop, so that rows and lanes agree. */
INLINE double log_of(double x) {
    const uint64_t half_root = 0x3fe6a09e667f3bcd, one = 0x3ff0000000000000, mantissa = 0x000fffffffffffff;
    const double shifter = 0x1p52;
    uint64_t bits, exponent;
    double m, e;
    memcpy(&bits, &x, sizeof bits);
    bits += one - half_root; /* x = 2^e m with m from sqrt(1/2) to sqrt(2) */
    memcpy(&exponent, &shifter, sizeof exponent);
    exponent |= bits >> 52;
    bits = (bits & mantissa) + half_root;
    memcpy(&m, &bits, sizeof m);
    memcpy(&e, &exponent, sizeof e);
    e -= shifter + 1023;
    /* log m = f - (f^2 / 2 - s (f^2 / 2 + r)) with f = m - 1, s = f / (2 + f), r = 2 s^2 / 3 + 2 s^4 / 5 + ... */
    const double f = m - 1, s = f / (2 + f), z = s * s, square = 0.5 * f * f;
    const int terms = SDPA_REAL == 32 ? 6 : 10;
    double p = 2.0 / (2 * terms + 1);
    UNROLL for (int k = terms - 1; k > 0; k--) p = muladd_double(p, z, 2.0 / (2 * k + 1));
    const double ln2_high = 0x1.62e42feep-1, ln2_low = 0x1.a39ef35793c76p-33;
    const double y = e * ln2_high - ((square - muladd_double(s, muladd_double(z, p, square), e * ln2_low)) - f);
    return x == x ? y : x;
}

#endif
