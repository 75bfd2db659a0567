/* Staging for softmax (src/softmax_shape.c): brings rows of any strides and dtype side by side into the lanes, and back. */
#ifndef SDPA_KERNEL_STAGING_H
#define SDPA_KERNEL_STAGING_H

#include "pack.h"

/* Whether whole blocks are transposed in registers, which was tried with AVX2 alone (docs/history/attempts.md). */
#define IN_REGISTERS (VEC_BYTES == 32)

/* load_lanes of elements of `dtype` that are as close as they can be. */
INLINE void load_lanes_as(sdpa_dtype dtype, real *dst, int64_t line, const char *src, int64_t n_rows, int64_t n,
                          int64_t col) {
    const int64_t size = sdpa_size_of(dtype), whole = n_rows / VL * VL;
    for (int64_t j = 0; j < n; j++) {
        for (int64_t i = 0; i < whole; i += VL) {
            vstore(dst + i * line + j * VL, vload_as(dtype, src + j * col + i * size));
        }
        if (whole == n_rows) continue;
        real last[VL] = {0};
        load(last, src + j * col + whole * size, n_rows - whole, size, dtype, false);
        vstore(dst + whole * line + j * VL, vload(last));
    }
}

/* dst (vectors of rows, line, VL) = n_rows rows of n elements, one row per lane, 0 in lanes without a row. Strides in
 * bytes. */
static void load_lanes(void *dst_, int64_t line, const char *src, int64_t n_rows, int64_t n, int64_t row, int64_t col,
                       sdpa_dtype dtype, bool swapped) {
    real *dst = dst_;
    if (!across_rows(row, col)) {
        for (int64_t i = 0; i < n_rows; i += VL) {
            load_across(dst + i * line, VL, src + i * row, n_rows - i < VL ? (int)(n_rows - i) : VL, n, row, col, dtype,
                        swapped);
        }
        return;
    }
    const int64_t size = sdpa_size_of(dtype);
    const bool close = row == size && !swapped && (uintptr_t)src % (uintptr_t)size == 0 && col % size == 0;
    if (close && dtype == REAL_DTYPE) {
        load_lanes_as(REAL_DTYPE, dst, line, src, n_rows, n, col);
        return;
    }
    if (close && SDPA_REAL == 32 && dtype == SDPA_F16) {
        load_lanes_as(SDPA_F16, dst, line, src, n_rows, n, col);
        return;
    }
    if (close && SDPA_REAL == 32 && dtype == SDPA_BF16) {
        load_lanes_as(SDPA_BF16, dst, line, src, n_rows, n, col);
        return;
    }
    for (int64_t j = 0; j < n; j++) {
        for (int64_t i = 0; i < n_rows; i += VL) {
            real part[VL] = {0};
            load(part, src + j * col + i * row, n_rows - i < VL ? n_rows - i : VL, row, dtype, swapped);
            vstore(dst + i * line + j * VL, vload(part));
        }
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
