/* The types of one compilation: `real` is float or double (SDPA_REAL = 32 or 64), and a vec holds VL of them. The
 * header of the instruction set (vec_NAME.h) defines VEC_BYTES, includes this file, and then defines its operations. */
#ifndef SDPA_KERNEL_VEC_TYPES_H
#define SDPA_KERNEL_VEC_TYPES_H

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))
#define COLD __attribute__((cold)) /* runs rarely, or once per unit: optimised for size */
#define UNROLL _Pragma("GCC unroll 32")
#define SIMD _Pragma("omp simd") /* for loops over memory that are worth vector code for any length */

#define VL (VEC_BYTES * 8 / SDPA_REAL)

/* -0, that is, SIGN_BIT alone, marks a masked pair in P and dS. An unmasked pair is never -0 in P, and in dS only by
 * underflow. */
#if SDPA_REAL == 32
typedef float real;
typedef int32_t real_bits;
#define REAL_MAX FLT_MAX
#define REAL_TRUE_MIN FLT_TRUE_MIN
#define REAL_EPSILON FLT_EPSILON
#define SIGN_BIT INT32_MIN
#else
typedef double real;
typedef int64_t real_bits;
#define REAL_MAX DBL_MAX
#define REAL_TRUE_MIN DBL_TRUE_MIN
#define REAL_EPSILON DBL_EPSILON
#define SIGN_BIT INT64_MIN
#endif

typedef real vec __attribute__((vector_size(VEC_BYTES)));
typedef real_bits ivec __attribute__((vector_size(VEC_BYTES))); /* also the type of comparisons: -1 true, 0 false */
typedef uint64_t wide_vec __attribute__((vector_size(VEC_BYTES)));
typedef real unaligned_vec __attribute__((vector_size(VEC_BYTES), aligned(sizeof(real)), may_alias));

INLINE vec vload(const real *p) { return *(const unaligned_vec *)p; }
INLINE void vstore(real *p, vec x) { *(unaligned_vec *)p = x; }
INLINE vec vset1(real x) { return x - (vec){0}; }
INLINE vec vselect(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

#endif
