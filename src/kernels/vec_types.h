/* The types of one compilation: `real` is float or double (SDPA_REAL = 32 or 64), a vec holds VL of them. The header of the
 * instruction set (vec_NAME.h) defines VEC_BYTES and includes this one before it defines its operations. */
#ifndef SDPA_KERNEL_VEC_TYPES_H
#define SDPA_KERNEL_VEC_TYPES_H

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))
#define COLD __attribute__((cold)) /* seldom, or once per unit: small rather than fast */
#define UNROLL _Pragma("GCC unroll 32")
#define SIMD _Pragma("omp simd") /* for loops over memory that are worth code for any length */

#define VL (VEC_BYTES * 8 / SDPA_REAL)

/* SIGN_BIT alone, -0, marks a masked pair in P and dS: an unmasked one can never be -0 in P, and only by underflow in dS. */
#if SDPA_REAL == 32
typedef float real;
typedef int32_t real_bits;
#define REAL_MAX FLT_MAX
#define REAL_EPSILON FLT_EPSILON
#define SIGN_BIT INT32_MIN
#else
typedef double real;
typedef int64_t real_bits;
#define REAL_MAX DBL_MAX
#define REAL_EPSILON DBL_EPSILON
#define SIGN_BIT INT64_MIN
#endif

typedef real vec __attribute__((vector_size(VEC_BYTES)));
typedef real_bits ivec __attribute__((vector_size(VEC_BYTES))); /* also the type of a comparison: -1 true, 0 false */
typedef uint64_t wide_vec __attribute__((vector_size(VEC_BYTES)));
typedef real unaligned_vec __attribute__((vector_size(VEC_BYTES), aligned(sizeof(real)), may_alias));

INLINE vec vload(const real *p) { return *(const unaligned_vec *)p; }
INLINE void vstore(real *p, vec x) { *(unaligned_vec *)p = x; }
INLINE vec vset1(real x) { return x - (vec){0}; }
INLINE vec vselect(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

#endif
