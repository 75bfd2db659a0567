/* bfloat16 operands as pairs, which are multiplied without widening: pairs of adjacent elements for products over d,
 * pairs of adjacent rows for products over keys. Used if BF16_PAIRS is 1. */
#ifndef SDPA_KERNEL_FAST_BF16_PAIRS_H
#define SDPA_KERNEL_FAST_BF16_PAIRS_H

#include "../pack.h"
#include "bf16_quads.h"

enum {
    BF16_PAIRS_CAN = SDPA_FEATURES_OF_UNITS | SDPA_FEATURE_SOFTCAP | SDPA_FEATURE_DROPOUT | SDPA_FEATURE_SINKS |
                     SDPA_FEATURE_ALIBI | SDPA_FEATURE_INVARIANT
};

/* Rows 2 j and 2 j + 1 of p (n, row), `width` wide, become row j, a row of pairs of bfloat16. The last row, if it has
 * no partner, is paired with 0. `sum`, unless NULL, receives the sums of the columns after rounding. */
NOINLINE void pair_rows(real *p, int64_t row, int64_t n, int64_t width, vec *sum) {
    for (int64_t j = quad_rows(p, row, n, width, sum); j < n; j += 2) {
        for (int64_t c = 0; c < width; c += VL) {
            const vec odd = j + 1 < n ? vload(p + (j + 1) * row + c) : (vec){0},
                      pair = vpair(vload(p + j * row + c), odd);
            store_pairs(p + j / 2 * row + c, row, j / 2, pair);
            if (sum) sum[c / VL] = vdot(sum[c / VL], PAIR_OF_ONES, pair);
        }
    }
}

/* Rows j0 .. j0+n-1 of a bfloat16 matrix, d columns, in pairs of rows at `copy`, like those of pair_rows.
 * `checks_finite`: rows_finite will be called. */
NOINLINE rows pack_row_bf16_pairs(const sdpa_matrix *m, int64_t j0, int64_t n, int64_t d, real *copy,
                                  bool checks_finite) {
    typedef uint16_t halves __attribute__((vector_size(2 * VL), aligned(2), may_alias));
    if (!checks_finite && !m->swapped && m->row == 2 && m->col != 2) {
        const sdpa_matrix pairs = {m->data + 2 * j0, 4, m->col, SDPA_F32, false}; /* neighbours in memory */
        const int64_t row = row_stride(d);
        load_rows(copy, row, &pairs, 0, n / 2, d);
        for (int64_t c = 0; n % 2 && c < row; c++) {
            uint16_t half[2] = {0};
            if (c < d) memcpy(half, pairs.data + 2 * (n - 1) + c * m->col, 2);
            memcpy(copy + n / 2 * row + c, half, 4);
        }
        for (int64_t k = 1; BF16_QUADS && k < (n + 1) / 2; k += 2) {
            for (int64_t c = k * row; c < (k + 1) * row; c += VL) store_pairs(copy + c, row, k, vload(copy + c));
        }
        return (rows){.p = copy, .row = row, .j0 = j0, .n = n};
    }
    if (checks_finite || m->swapped || m->col != 2 || m->row % 2 != 0 || (uintptr_t)m->data % 2 != 0 || d % VL != 0) {
        rows r = pack_rows(m, j0, n, d, 1, copy, NULL);
        rows_finite(&r, d);
        pair_rows(copy, r.row, n, round_up(d, VL), NULL);
        return r;
    }
    const rows r = {.p = copy, .row = row_stride(d), .j0 = j0, .n = n};
    int64_t first = 0;
    for (; BF16_QUADS && d % (2 * VL) == 0 && first + 4 <= n; first += 4) {
        pack_quads(copy + first / 2 * r.row, r.row, m->data + (j0 + first) * m->row, m->row, d);
    }
    for (int64_t j = first; j < n; j += 2) {
        const char *even = m->data + (j0 + j) * m->row;
        for (int64_t c = 0; c < d; c += VL) {
            const halves *low = (const halves *)(even + 2 * c), *high = (const halves *)(even + m->row + 2 * c);
            ivec pair = __builtin_convertvector(*low, ivec);
            if (j + 1 < n) pair |= __builtin_convertvector(*high, ivec) << 16;
            store_pairs(copy + j / 2 * r.row + c, r.row, j / 2, (vec)pair);
        }
    }
    return r;
}

/* pack_rows of a bfloat16 matrix whose rows are read as pairs of adjacent elements. `line`: (d) of scratch. */
NOINLINE rows pack_bf16_pairs(const sdpa_matrix *m, int64_t j0, int64_t n, int64_t d, real *copy, real *tail,
                              real *line) {
    sdpa_matrix bf16_pairs = *m;
    bf16_pairs.dtype = SDPA_F32;
    bf16_pairs.col = sizeof(real);
    if (m->col == 2 && d % 2 == 0 && is_direct(&bf16_pairs)) return pack_rows(&bf16_pairs, j0, n, d / 2, 0, copy, tail);
    const int64_t row = row_stride((d + 1) / 2), full = n / SCORE_ROWS * SCORE_ROWS;
    memset(copy, 0, sizeof(real) * (size_t)(round_up(n, SCORE_ROWS) * row));
    if (halves_across(m, n, d)) copy_halves((char *)copy, 4 * row, m, j0, n, d);
    for (int64_t j = 0; j < n && !halves_across(m, n, d); j++) {
        load(line, m->data + (j0 + j) * m->row, d, m->col, m->dtype, m->swapped);
        store((char *)(copy + j * row), line, d, 2, SDPA_BF16);
    }
    return (rows){.p = copy, .tail = copy + full * row, .row = row, .tail_row = row, .j0 = j0, .n = n};
}
#endif
