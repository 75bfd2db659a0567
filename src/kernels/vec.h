/* Vectors of `real` for one instruction set, and their operations. The headers vec_NAME.h are the only files with
 * intrinsics.
 *
 * Arithmetic (+ - * /), casts and shuffles are vector extensions of GCC and Clang and are the same for every instruction
 * set. A compiler may not fuse a * b + c on its own (-ffp-contract=off): whether it does depends on the code around, and
 * results that have to agree come from different code. Each header vec_NAME.h defines the rest, under these names:
 *
 *   vmax2, vmin2      b if the comparison fails, so a NaN in b always propagates; with NEON so does a NaN in a, and +0
 *                     is larger than -0
 *   vmuladd, vmulsub  a * b + c and a * b - c, rounded once with HAVE_FMA
 *   vany              whether any lane of a mask is set
 *   vload_partial, vstore_partial
 *                     the first n lanes, 0 <= n <= VL (load: the other lanes are 0); no other memory is touched
 *   vmultiply_even    products of the even 32-bit words with a 32-bit factor, as 64-bit words
 *   vbits             bit l: whether byte l of 32 is not 0
 *
 * Some headers define more, and a macro that says so:
 *
 *   HAVE_FMA          see vmuladd
 *   HAVE_F16          vwiden_f16, vnarrow_f16 (float32 only): VL elements, of any alignment; widen_f16, narrow_f16: one
 *   HAVE_BF16         vwiden_bf16 (float32 only): VL elements, of any alignment
 *   HAVE_MUL_FINITE   vmul_finite
 *   HAVE_SCALE        vrest: x minus the nearest multiple of 2^-bits (a constant), 0 for +-inf; vscale: x 2^floor(n),
 *                     or 0 where y < least; vchoose (float32 only): lane by lane, the one of 16 numbers that the last
 *                     four bits of `index` select
 *   HAVE_BF16_PAIRS   float32 kernels multiply pairs of bfloat16, each pair in place of a float. vdot: sum + the
 *                     products of the high halves and of the low halves of `pair` and each lane; vpair: each lane's
 *                     even and odd, rounded to nearest, as its low and its high half
 *   HAVE_BF16_QUADS   beside pairs, for VL = 4. vdot_quads: sum, two rows of two columns, + a b, with two pairs of each row
 *                     of a and of each column of b; vload_twos: two elements from p on and two from q on
 *   HAVE_AMX          amx_begin, amx_end: around what uses the eight registers of 16 rows of 64 bytes; AMX_ZERO,
 *                     AMX_LOAD, AMX_STORE (p, bytes between rows), AMX_MULTIPLY: c += a b, see amx_multiply in
 *                     vec_amx_model.h; vmost_bits, vleast_bits: the larger and the smaller words
 *   HAVE_FOURS        vfours: a vector of VL / 4 times four elements, `step` apart
 *   HAVE_LANES        vmuladd_lane: a[lane] * b + c (lane is a constant), at the price of vmuladd
 *   FEW_PASSES        few passes gain by these instructions: others use another set's kernels (isa.c, kernel.c)
 *
 * Loads and stores need no more than the alignment of an element. tests/c/test_vec.c compares every operation with
 * plain C. */
#ifndef SDPA_KERNEL_VEC_H
#define SDPA_KERNEL_VEC_H

#if defined(SDPA_ISA_AMX)
#include "vec_amx.h"
#elif defined(SDPA_ISA_AMX_MODEL)
#include "vec_amx_model.h"
#elif defined(SDPA_ISA_AVX512BF16)
#include "vec_avx512bf16.h"
#elif defined(SDPA_ISA_AVX512)
#include "vec_avx512.h"
#elif defined(SDPA_ISA_AVX2)
#include "vec_avx2.h"
#elif defined(SDPA_ISA_NEONBF16)
#include "vec_neonbf16.h"
#elif defined(SDPA_ISA_NEON)
#include "vec_neon.h"
#elif defined(SDPA_ISA_WIDE)
#include "vec_wide.h"
#else
#include "vec_generic.h"
#endif

/* Large functions that are the same in all sets of one base, SDPA_BASE (runtime/isas.inc), are SHARED and named by
 * OF_BASE: the base's unit has their code, where OWNS_SHARED is 1, and the others call it. A SHARED_TABLE is one of such
 * functions. */
#ifdef SDPA_BASE
#define SHARED __attribute__((noinline))
#define SHARED_TABLE
#define OF_BASE_2(base, bits, name) sdpa_##base##_f##bits##_##name
#define OF_BASE_1(base, bits, name) OF_BASE_2(base, bits, name)
#define OF_BASE(name) OF_BASE_1(SDPA_BASE, SDPA_REAL, name)
#else /* no other unit has this base */
#define SHARED NOINLINE
#define SHARED_TABLE static
#define OF_BASE(name) name
#endif
#ifdef FEW_PASSES
#define OWNS_SHARED 0
#else
#define OWNS_SHARED 1
#endif

#ifdef HAVE_BF16_PAIRS
#define BF16_PAIRS 1
#else
/* These stubs let code behind `if (BF16_PAIRS && ...)` compile everywhere. */
#define BF16_PAIRS 0
INLINE vec vdot(vec sum, int32_t pair, vec pairs) { return sum + (real)pair * pairs; }
INLINE vec vpair(vec even, vec odd) { return even + odd; }
#endif

#ifdef HAVE_LANES
#define HAS_LANES 1
#else
#define HAS_LANES 0
INLINE vec vmuladd_lane(vec a, int lane, vec b, vec c) { return vmuladd(vset1(a[lane]), b, c); }
#endif

/* One lane of vmuladd, and the same of doubles in any kernels. */
#ifdef HAVE_FMA
INLINE double muladd_double(double a, double b, double c) { return __builtin_fma(a, b, c); }
INLINE real muladd(real a, real b, real c) {
    return SDPA_REAL == 32 ? (real)__builtin_fmaf((float)a, (float)b, (float)c) : (real)muladd_double(a, b, c);
}
#else
INLINE double muladd_double(double a, double b, double c) { return a * b + c; }
INLINE real muladd(real a, real b, real c) { return a * b + c; }
#endif

/* Whether products widen float16 on the way: without an instruction for it, that saves little and takes much code. */
#ifdef HAVE_F16
#define WIDENS_F16 1
#else
#define WIDENS_F16 0
#endif

#if SDPA_REAL == 32
/* Loads VL elements of 16 bits, of any alignment, as integers. */
INLINE ivec vload_halves(const void *p) {
    typedef uint16_t halves __attribute__((vector_size(2 * VL), aligned(1), may_alias));
    return __builtin_convertvector(*(const halves *)p, ivec);
}

#ifndef HAVE_BF16
INLINE vec vwiden_bf16(const void *p) { return (vec)(vload_halves(p) << 16); }
#endif

#ifndef HAVE_F16
INLINE vec vwiden_f16(const void *p) {
    /* The same steps as in widen_f16 (convert.h). */
    const ivec h = vload_halves(p), bits = (h & 0x7fff) << 13, special = (h & 0x7c00) == 0x7c00;
    const vec x = vselect(special, (vec)(bits | 0x70000000), 0x1p112f * (vec)bits);
    return (vec)((ivec)x | (h & 0x8000) << 16);
}
#endif
#endif

#ifndef HAVE_MUL_FINITE
/* a * x for a finite a > 0; a finite x that would give an infinity gives the largest finite number of its sign. */
INLINE vec vmul_finite(real a, vec x) {
    const vec y = vmin2(vset1(REAL_MAX), vmax2(vset1(-REAL_MAX), a * x));
    return vselect(x - x == 0, y, x);
}
#endif

/* Shuffles. LANES(F, h) lists for each lane l of the result its source F(l, h): 0 .. VL-1 are lanes of a, VL .. 2 VL-1
 * of b. */
#define LANES_2(F, h) F(0, h), F(1, h)
#define LANES_4(F, h) LANES_2(F, h), F(2, h), F(3, h)
#define LANES_8(F, h) LANES_4(F, h), F(4, h), F(5, h), F(6, h), F(7, h)
#define LANES_16(F, h) LANES_8(F, h), F(8, h), F(9, h), F(10, h), F(11, h), F(12, h), F(13, h), F(14, h), F(15, h)
#if VL == 16
#define LANES LANES_16
#elif VL == 8
#define LANES LANES_8
#elif VL == 4
#define LANES LANES_4
#else
#define LANES LANES_2
#endif
#define SHUFFLE(F, a, b, h) __builtin_shufflevector(a, b, LANES(F, h))

#if VL >= 8
/* Of each group of four lanes: elements 0 and 1, or 2 and 3, of a and of b in turn; of a, then of b. */
#define FIRSTS(l, h) ((l) / 4 * 4 + (l) % 4 / 2 + (l) % 2 * VL)
#define SECONDS(l, h) (FIRSTS(l, h) + 2)
#define FRONTS(l, h) ((l) / 4 * 4 + (l) % 2 + ((l)&2 ? VL : 0))
#define BACKS(l, h) (FRONTS(l, h) + 2)
/* In-place transpose of 4 x 4 in each group of four lanes. Each step here and for 16 lanes is one instruction without an
 * index, where the butterfly below permutes two registers by a third. */
INLINE void transpose_groups(vec *r) {
    vec t[4];
    UNROLL for (int i = 0; i < 4; i += 2) {
        t[i] = SHUFFLE(FIRSTS, r[i], r[i + 1], 0);
        t[i + 1] = SHUFFLE(SECONDS, r[i], r[i + 1], 0);
    }
    UNROLL for (int h = 0; h < 2; h++) {
        r[2 * h] = SHUFFLE(FRONTS, t[h], t[h + 2], 0);
        r[2 * h + 1] = SHUFFLE(BACKS, t[h], t[h + 2], 0);
    }
}

#undef BACKS
#undef FRONTS
#undef SECONDS
#undef FIRSTS
#endif

#if VL == 16
/* Groups 0 and 2, or 1 and 3, of a, then of b. */
#define EVEN_GROUPS(l, h) ((l) / 4 % 2 * 8 + (l) % 4 + (l) / 8 * VL)
#define ODD_GROUPS(l, h) (EVEN_GROUPS(l, h) + 4)

INLINE void vtranspose(vec *r) {
    vec t[VL];
    UNROLL for (int i = 0; i < VL; i += 4) transpose_groups(r + i);
    UNROLL for (int i = 0; i < 4; i++) {
        UNROLL for (int h = 0; h < VL; h += 8) {
            t[h + i] = SHUFFLE(EVEN_GROUPS, r[h + i], r[h + i + 4], 0);
            t[h + i + 4] = SHUFFLE(ODD_GROUPS, r[h + i], r[h + i + 4], 0);
        }
    }
    UNROLL for (int i = 0; i < 8; i++) {
        r[i] = SHUFFLE(EVEN_GROUPS, t[i], t[i + 8], 0);
        r[i + 8] = SHUFFLE(ODD_GROUPS, t[i], t[i + 8], 0);
    }
}
#undef ODD_GROUPS
#undef EVEN_GROUPS
#endif

/* In-place transpose of VL x VL: a butterfly. Stage h swaps the h-blocks off the diagonal of each 2h-block. */
#define LOW(l, h) ((l) & (h) ? VL + (l) - (h) : (l))
#define HIGH(l, h) ((l) & (h) ? VL + (l) : (l) + (h))
#define STAGE(h)                                                                                                       \
    UNROLL for (int i = 0; i < VL; i++) {                                                                              \
        if (!(i & h)) {                                                                                                \
            const vec a = r[i], b = r[i + h];                                                                          \
            r[i] = SHUFFLE(LOW, a, b, h);                                                                              \
            r[i + h] = SHUFFLE(HIGH, a, b, h);                                                                         \
        }                                                                                                              \
    }
#if VL != 16
INLINE void vtranspose(vec *r) {
#if VL > 4
    STAGE(4)
#endif
#if VL > 2
    STAGE(2)
#endif
    STAGE(1)
}
#endif
#undef STAGE

/* r = the transpose of VL rows of VL elements from p on, `row` apart. */
INLINE void vload_transposed(vec *r, const real *p, int64_t row) {
#ifdef HAVE_FOURS
    UNROLL for (int i = 0; i < VL; i += 4) {
        UNROLL for (int x = 0; x < 4; x++) r[i + x] = vfours(p + x * row + i, 4 * row);
        transpose_groups(r + i);
    }
#else
    UNROLL for (int i = 0; i < VL; i++) r[i] = vload(p + i * row);
    vtranspose(r);
#endif
}

/* Lane l of the result is lane l ^ h; h is a power of 2 below VL. */
#define FLIP(l, h) ((l) ^ (h))
INLINE vec vswap(vec x, int h) {
    switch (h) {
#if VL > 8
    case 8:
        return SHUFFLE(FLIP, x, x, 8);
#endif
#if VL > 4
    case 4:
        return SHUFFLE(FLIP, x, x, 4);
#endif
#if VL > 2
    case 2:
        return SHUFFLE(FLIP, x, x, 2);
#endif
    case 1:
        return SHUFFLE(FLIP, x, x, 1);
    }
    return x;
}
#undef FLIP

#if VEC_BYTES >= 32
/* Lane i: the sum of the four lanes of x[i % 4] that are in the same group of four as lane i. */
#define EVEN(l, h) ((l) / 4 * 4 + (l) % 2 * 2 + ((l)&2 ? VL : 0))
#define ODD(l, h) (EVEN(l, h) + 1)
INLINE vec vfour(const vec *x) {
#if SDPA_REAL == 32
    const vec a = SHUFFLE(EVEN, x[0], x[1], 0) + SHUFFLE(ODD, x[0], x[1], 0),
              b = SHUFFLE(EVEN, x[2], x[3], 0) + SHUFFLE(ODD, x[2], x[3], 0);
    return SHUFFLE(EVEN, a, b, 0) + SHUFFLE(ODD, a, b, 0);
#else
    const vec a = SHUFFLE(LOW, x[0], x[1], 1) + SHUFFLE(HIGH, x[0], x[1], 1),
              b = SHUFFLE(LOW, x[2], x[3], 1) + SHUFFLE(HIGH, x[2], x[3], 1);
    return SHUFFLE(LOW, a, b, 2) + SHUFFLE(HIGH, a, b, 2);
#endif
}
#undef ODD
#undef EVEN

/* Lane i: the sum of all lanes of x[i % 4]. */
INLINE vec vsum4(const vec *x) {
    vec sum = vfour(x);
    UNROLL for (int h = 4; h < VL; h *= 2) sum += vswap(sum, h);
    return sum;
}
#endif

#if VEC_BYTES == 64
/* Lane 4 k + i: the sum of all lanes of x[k][i], for k < VL / 4. */
#define FRONT(l, h) ((l) < VL / 2 ? (l) : VL / 2 + (l))
#define BACK(l, h) ((l) < VL / 2 ? VL / 2 + (l) : VL + (l))
#define EVEN_FOURS(l, h) ((l) / 4 * 8 + (l) % 4)
#define ODD_FOURS(l, h) (EVEN_FOURS(l, h) + 4)
INLINE vec vsums(const vec (*x)[4]) {
#if SDPA_REAL == 32
    const vec r[4] = {vfour(x[0]), vfour(x[1]), vfour(x[2]), vfour(x[3])};
    const vec a = SHUFFLE(FRONT, r[0], r[1], 0) + SHUFFLE(BACK, r[0], r[1], 0),
              b = SHUFFLE(FRONT, r[2], r[3], 0) + SHUFFLE(BACK, r[2], r[3], 0);
    return SHUFFLE(EVEN_FOURS, a, b, 0) + SHUFFLE(ODD_FOURS, a, b, 0);
#else
    const vec a = vfour(x[0]), b = vfour(x[1]);
    return SHUFFLE(FRONT, a, b, 0) + SHUFFLE(BACK, a, b, 0);
#endif
}
#undef ODD_FOURS
#undef EVEN_FOURS
#undef BACK
#undef FRONT
#endif
#undef HIGH
#undef LOW

/* x[0] + .. + x[VL - 1], lane by lane, in the order in which few_sums (fast/few_queries.h) adds the lanes of a vector. */
INLINE vec vsum_of_lanes(const vec *x) {
#if VEC_BYTES >= 32
    vec four[(VL + 3) / 4];
    UNROLL for (int i = 0; i < VL / 4; i++) four[i] = (x[4 * i] + x[4 * i + 1]) + (x[4 * i + 2] + x[4 * i + 3]);
    return VL == 16  ? (four[0] + four[2 % (VL / 4)]) + (four[1 % (VL / 4)] + four[3 % (VL / 4)])
           : VL == 8 ? four[0] + four[1 % (VL / 4)]
                     : four[0];
#else
    return VL == 4 ? (x[0] + x[2 % VL]) + (x[1] + x[3 % VL]) : x[0] + x[1];
#endif
}

/* Reductions over the lanes, as a binary tree. vreduce_max returns an arbitrary lane if one is NaN. */
INLINE real vreduce_add(vec x) {
    UNROLL for (int h = VL / 2; h > 0; h /= 2) x += vswap(x, h);
    return x[0];
}

INLINE real vreduce_max(vec x) {
    UNROLL for (int h = VL / 2; h > 0; h /= 2) x = vmax2(x, vswap(x, h));
    return x[0];
}

#undef SHUFFLE
#undef LANES
#undef LANES_16
#undef LANES_8
#undef LANES_4
#undef LANES_2

#endif
