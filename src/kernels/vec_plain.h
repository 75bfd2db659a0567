/* Operations without intrinsics, for instruction sets that have nothing better. */
#ifndef SDPA_KERNEL_VEC_PLAIN_H
#define SDPA_KERNEL_VEC_PLAIN_H

#include "vec_types.h"

INLINE bool vany(ivec m) {
    real_bits any = 0;
    UNROLL for (int l = 0; l < VL; l++) any |= m[l];
    return any != 0;
}

INLINE vec vload_partial(const real *p, int n) {
    vec x = {0};
    for (int l = 0; l < n; l++) x[l] = p[l];
    return x;
}

INLINE void vstore_partial(real *p, vec x, int n) {
    for (int l = 0; l < n; l++) p[l] = x[l];
}

INLINE wide_vec vmultiply_even(wide_vec x, uint32_t factor) { return (x & 0xffffffff) * factor; }

INLINE uint32_t vbits(const void *p) {
    uint32_t bits = 0;
    for (int l = 0; l < 32; l++) bits |= (uint32_t)(((const char *)p)[l] != 0) << l;
    return bits;
}

#endif
