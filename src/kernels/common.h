/* Helpers of several passes: sums, scalars, rows in shared memory. */
#ifndef SDPA_KERNEL_COMMON_H
#define SDPA_KERNEL_COMMON_H

#include <math.h>
#include "convert.h"
#include "kernels.h"
#include "vec.h"

/* The total of four running sums, `stride` vectors apart. Every fourth term goes to the same sum: with a quarter of the
 * terms, each sum rounds less. */
INLINE vec sum_of_four(const vec *sum, int stride) {
    return (sum[0] + sum[stride]) + (sum[2 * stride] + sum[3 * stride]);
}

/* high += x, and low += the rounding error of that sum (Knuth's two-sum). */
INLINE void add_exactly(vec *high, vec *low, vec x) {
    const vec sum = *high + x, added = sum - *high;
    *low += (*high - (sum - added)) + (x - added);
    *high = sum;
}

/* The element of a matrix of one element, or `absent`. */
INLINE real scalar_of(const sdpa_matrix *m, real absent) {
    if (m->data) load(&absent, m->data, 1, 0, m->dtype, m->swapped);
    return absent;
}

/* Element i of a tensor with one element per query, whose element 0 is at `data`. */
INLINE real query_scalar(const char *data, const sdpa_tensor *t, int64_t i) {
    real x;
    load(&x, data + i * t->row, 1, 0, t->dtype, t->swapped);
    return x;
}

/* query_scalar, all digits of a float64. */
INLINE double query_double(const char *data, const sdpa_tensor *t, int64_t i) {
    uint64_t bits;
    double x;
    if (t->dtype != SDPA_F64) return query_scalar(data, t, i);
    memcpy(&bits, data + i * t->row, sizeof bits);
    if (t->swapped) bits = __builtin_bswap64(bits);
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Stores lse of query i. */
INLINE void store_lse(const sdpa_unit *u, int64_t i, double lse) {
    const sdpa_tensor *t = &u->problem->lse;
    const real rounded = (real)lse;
    if (t->dtype == SDPA_F64) {
        memcpy(u->lse + i * t->row, &lse, sizeof lse);
    } else {
        memcpy(u->lse + i * t->row, &rounded, sizeof rounded);
    }
}

/* Adds a row to a row in memory that units may share. */
INLINE void add_row(char *dst, int64_t stride, sdpa_dtype dtype, const real *row, int64_t n, real *line) {
    load(line, dst, n, stride, dtype, false);
    SIMD for (int64_t x = 0; x < n; x++) line[x] += row[x];
    store(dst, line, n, stride, dtype);
}

#endif
