/* Staging for softmax (src/softmax_shape.c): brings rows of any strides and dtype side by side into the lanes, and back. */
#ifndef SDPA_KERNEL_STAGING_H
#define SDPA_KERNEL_STAGING_H

#include "pack.h"

/* Whether whole blocks are transposed in registers, which was tried with AVX2 alone (docs/history/attempts.md). */
#define IN_REGISTERS (VEC_BYTES == 32)

/* dst (vectors of rows, line, VL) = n_rows rows of n elements, one row per lane, 0 in lanes without a row. Strides in
 * bytes. */
static void load_lanes(void *dst_, int64_t line, const char *src, int64_t n_rows, int64_t n, int64_t row, int64_t col,
                       sdpa_dtype dtype, bool swapped) {
    real *dst = dst_, copy[SDPA_SOFTMAX_ROWS];
    const int64_t size = sizeof(real);
    const bool plain = dtype == REAL_DTYPE && !swapped && (uintptr_t)src % sizeof(real) == 0;
    if (!across_rows(row, col)) {
        for (int64_t i = 0; i < n_rows; i += VL) {
            load_across(dst + i * line, VL, src + i * row, n_rows - i < VL ? (int)(n_rows - i) : VL, n, row, col, dtype,
                        swapped);
        }
        return;
    }
    const bool in_place = plain && row == size && col % size == 0;
    for (int64_t j = 0; j < n; j++) {
        const real *from = (const real *)(src + j * col);
        if (!in_place) {
            load(copy, src + j * col, n_rows, row, dtype, swapped);
            from = copy;
        }
        int64_t i = 0;
        for (; i + VL <= n_rows; i += VL) vstore(dst + i * line + j * VL, vload(from + i));
        if (i < n_rows) vstore(dst + i * line + j * VL, vload_partial(from + i, (int)(n_rows - i)));
    }
}

/* The inverse of load_across, to native elements. */
static void store_across(char *dst, const real *src, int n_rows, int64_t n, int64_t row, int64_t col,
                         sdpa_dtype dtype) {
    bool direct = dtype == REAL_DTYPE && col == (int64_t)sizeof(real);
    for (int64_t j = 0; j < n; j += VL) {
        if (n - j < VL && n > VL) j = n - VL;
        int width = n - j < VL ? (int)(n - j) : VL;
        vec r[VL];
        if (IN_REGISTERS && direct && width == VL && n_rows == VL) {
            UNROLL for (int t = 0; t < VL; t++) r[t] = vload(src + (j + t) * VL);
            vtranspose(r);
            UNROLL for (int i = 0; i < VL; i++) vstore((real *)(dst + i * row) + j, r[i]);
            continue;
        }
        for (int t = 0; t < VL; t++) r[t] = t < width ? vload(src + (j + t) * VL) : (vec){0};
        transpose(r);
        for (int i = 0; i < n_rows; i++) {
            if (direct && width == VL) {
                vstore((real *)(dst + i * row) + j, r[i]);
            } else if (direct) {
                vstore_partial((real *)(dst + i * row) + j, r[i], width);
            } else {
                store(dst + i * row + j * col, r + i, width, col, dtype);
            }
        }
    }
}

/* The inverse of load_lanes, to native elements. */
static void store_lanes(char *dst, const void *src_, int64_t line, int64_t n_rows, int64_t n, int64_t row, int64_t col,
                        sdpa_dtype dtype) {
    const real *src = src_;
    real copy[SDPA_SOFTMAX_ROWS];
    if (!across_rows(row, col)) {
        for (int64_t i = 0; i < n_rows; i += VL) {
            store_across(dst + i * row, src + i * line, n_rows - i < VL ? (int)(n_rows - i) : VL, n, row, col, dtype);
        }
        return;
    }
    const bool in_place = dtype == REAL_DTYPE && row == (int64_t)sizeof(real);
    for (int64_t j = 0; j < n; j++) {
        real *to = in_place ? (real *)(dst + j * col) : copy;
        int64_t i = 0;
        for (; i + VL <= n_rows; i += VL) vstore(to + i, vload(src + i * line + j * VL));
        if (i < n_rows) vstore_partial(to + i, vload(src + i * line + j * VL), (int)(n_rows - i));
        if (!in_place) store(dst + j * col, copy, n_rows, row, dtype);
    }
}

/* dst[i] = -inf where `where`, a boolean, is false. */
static void leave_out(void *dst_, const char *where, int64_t n, int64_t stride) {
    real *dst = dst_;
    for (int64_t i = 0; i < n; i++) dst[i] = where[i * stride] ? dst[i] : -(real)INFINITY;
}

#endif
