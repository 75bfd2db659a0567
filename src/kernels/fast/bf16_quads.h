/* Pairs of bfloat16 where the instruction set has products of two rows by two columns (BF16_QUADS): two pairs are one
 * step, a quad. Rows of pairs that lie in the lanes are kept two by two: in place of rows k and k + 1, k even, the first
 * has both pairs of lanes 0 and 1 of every vector, the second those of lanes 2 and 3. A last row without a partner stays
 * as it is. */
#ifndef SDPA_KERNEL_FAST_BF16_QUADS_H
#define SDPA_KERNEL_FAST_BF16_QUADS_H

#include "../tiles.h"

#define PAIR_OF_ONES 0x3f803f80

#ifdef HAVE_BF16_QUADS
#define BF16_QUADS 1
_Static_assert(VL == 4, "a product of quads has four sums");

INLINE vec zip_low(vec a, vec b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
INLINE vec zip_high(vec a, vec b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
INLINE vec join_low(vec a, vec b) { return __builtin_shufflevector(a, b, 0, 1, 4, 5); }
INLINE vec join_high(vec a, vec b) { return __builtin_shufflevector(a, b, 2, 3, 6, 7); }

/* Stores a vector of row k of pairs at `to`; the row before is `row` elements back. */
INLINE void store_pairs(real *to, int64_t row, int64_t k, vec pairs) {
    if (k % 2 == 0) {
        vstore(to, pairs);
        return;
    }
    const vec before = vload(to - row);
    vstore(to - row, zip_low(before, pairs));
    vstore(to, zip_high(before, pairs));
}

/* pair_rows of all whole quads; returns their rows. */
INLINE int64_t quad_rows(real *p, int64_t row, int64_t n, int64_t width, vec *sum) {
    const int64_t whole = n / 4 * 4;
    for (int64_t c = 0; c < width; c += VL) {
        vec all = sum ? sum[c / VL] : (vec){0};
        for (int64_t j = 0; j < whole; j += 4) {
            const real *from = p + j * row + c;
            const vec low = vpair(vload(from), vload(from + row)),
                      high = vpair(vload(from + 2 * row), vload(from + 3 * row));
            vstore(p + j / 2 * row + c, zip_low(low, high));
            vstore(p + (j / 2 + 1) * row + c, zip_high(low, high));
            if (sum) all = vdot(vdot(all, PAIR_OF_ONES, low), PAIR_OF_ONES, high);
        }
        if (sum) sum[c / VL] = all;
    }
    return whole;
}

/* The two rows at `to` that hold the quads of four rows of bfloat16, d columns, m_row bytes apart; d is a multiple of
 * 2 VL. */
INLINE void pack_quads(real *to, int64_t row, const char *m, int64_t m_row, int64_t d) {
    typedef uint16_t halves __attribute__((vector_size(16), aligned(2), may_alias));
    for (int64_t c = 0; c < d; c += 2 * VL) {
        halves r[4];
        UNROLL for (int i = 0; i < 4; i++) r[i] = *(const halves *)(m + i * m_row + 2 * c);
        UNROLL for (int h = 0; h < 2; h++) {
            vec x[2];
            UNROLL for (int i = 0; i < 2; i++) {
                const halves a = r[2 * i], b = r[2 * i + 1];
                x[i] = h ? (vec)__builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
                         : (vec)__builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
            }
            vstore(to + c + h * VL, zip_low(x[0], x[1]));
            vstore(to + row + c + h * VL, zip_high(x[0], x[1]));
        }
    }
}

/* A vector of row k of pairs, of `depth` rows, as store_pairs was given it. */
INLINE vec load_pairs(const real *from, int64_t row, int64_t k, int64_t depth) {
    if (k % 2 == 0 && k + 1 == depth) return vload(from);
    const vec low = vload(k % 2 ? from - row : from), high = vload(k % 2 ? from : from + row);
    return k % 2 ? __builtin_shufflevector(low, high, 1, 3, 5, 7) : __builtin_shufflevector(low, high, 0, 2, 4, 6);
}

/* The first steps of a tile of pairs (products.h); returns their number. Sums have the bits of vdot's. mr is even and,
 * where a's rows are adjacent, a multiple of 4. */
INLINE int64_t tile_by_quads(vec acc[][MAX_WIDTH], int mr, int nv, bool a_rows_adjacent, const real *a, int64_t a_row,
                             int64_t a_col, const real *b, int64_t b_row, int64_t depth) {
    vec sum[MOST_SCORE_ROWS / 2][2 * MAX_WIDTH];
    UNROLL for (int i = 0; i < mr; i += 2) {
        UNROLL for (int j = 0; j < nv; j++) {
            sum[i / 2][2 * j] = join_low(acc[i][j], acc[i + 1][j]);
            sum[i / 2][2 * j + 1] = join_high(acc[i][j], acc[i + 1][j]);
        }
    }
    int64_t k = 0;
    for (; k + 2 <= depth; k += 2) {
        vec x[2 * MAX_WIDTH];
        UNROLL for (int j = 0; j < 2 * nv; j++) x[j] = vload(b + (k + j % 2) * b_row + j / 2 * VL);
        UNROLL for (int i = 0; i < mr; i += 2) {
            const real *rows = a + k * a_col + (a_rows_adjacent ? i / 4 * 4 + i % 4 / 2 * a_col : i * a_row);
            const vec y = a_rows_adjacent ? vload(rows) : vload_twos(rows, rows + a_row);
            UNROLL for (int j = 0; j < 2 * nv; j++) sum[i / 2][j] = vdot_quads(sum[i / 2][j], y, x[j]);
        }
    }
    UNROLL for (int i = 0; i < mr; i += 2) {
        UNROLL for (int j = 0; j < nv; j++) {
            acc[i][j] = join_low(sum[i / 2][2 * j], sum[i / 2][2 * j + 1]);
            acc[i + 1][j] = join_high(sum[i / 2][2 * j], sum[i / 2][2 * j + 1]);
        }
    }
    return k;
}

#else
#define BF16_QUADS 0
INLINE void store_pairs(real *to, int64_t row, int64_t k, vec pairs) { (void)row, (void)k, vstore(to, pairs); }
INLINE int64_t quad_rows(real *p, int64_t row, int64_t n, int64_t width, vec *sum) {
    return (void)p, (void)row, (void)n, (void)width, (void)sum, 0;
}
INLINE void pack_quads(real *to, int64_t row, const char *m, int64_t m_row, int64_t d) {
    (void)to, (void)row, (void)m, (void)m_row, (void)d;
}
INLINE vec load_pairs(const real *from, int64_t row, int64_t k, int64_t depth) {
    return (void)row, (void)k, (void)depth, vload(from);
}
INLINE int64_t tile_by_quads(vec acc[][MAX_WIDTH], int mr, int nv, bool a_rows_adjacent, const real *a, int64_t a_row,
                             int64_t a_col, const real *b, int64_t b_row, int64_t depth) {
    return (void)acc, (void)mr, (void)nv, (void)a_rows_adjacent, (void)a, (void)a_row, (void)a_col, (void)b,
           (void)b_row, (void)depth, 0;
}
#endif

#endif
