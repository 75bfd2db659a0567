/* For tests only (make test-c): the vectors, tiles and bfloat16 pairs of AVX-512 on machines without it. Flags with
 * AVX-512 give its vectors, as in vec_amx_model.h, whose base this is. */
#ifndef SDPA_KERNEL_VEC_WIDE_H
#define SDPA_KERNEL_VEC_WIDE_H

#ifdef __AVX512F__
#include "vec_avx512.h"
#else
#define VEC_BYTES 64
#include "vec_generic.h"
#endif

#if SDPA_REAL == 32
#define HAVE_BF16_PAIRS
INLINE vec vdot(vec sum, int32_t pair, vec pairs) {
    const ivec all = pair - (ivec){0}, other = (ivec)pairs;
    sum += (vec)(all & ~0xffff) * (vec)(other & ~0xffff);
    return sum + (vec)(all << 16) * (vec)(other << 16);
}
INLINE ivec vround_bf16(vec x) {
    const ivec bits = (ivec)x, rounded = bits + 0x7fff + (bits >> 16 & 1);
    return (ivec)vselect(x != x, (vec)(bits | 0x400000), (vec)rounded) & ~0xffff;
}
INLINE vec vpair(vec even, vec odd) { return (vec)(vround_bf16(odd) | (vround_bf16(even) >> 16 & 0xffff)); }
#endif

#endif
