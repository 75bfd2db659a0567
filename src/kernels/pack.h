/* Bringing blocks of the operands into the form the tiles read: in place where memory already has it, else a copy. */
#ifndef SDPA_KERNEL_PACK_H
#define SDPA_KERNEL_PACK_H

#include "common.h"
#include "convert.h"
#include "tiles.h"

/* Elements between rows of d that pack_rows copies: whole vectors, but no multiple of 256 bytes, which would crowd the
 * rows of a block into a few sets of L1. */
INLINE int64_t row_stride(int64_t d) {
    const int64_t row = round_up(d, VL), line = 64 / (int64_t)sizeof(real);
    return row % (4 * line) ? row : row + line;
}

/* A panel: queries i .. i+n_i-1 of a unit, in nv vectors. */
typedef struct panel {
    int64_t i, n_i;
    int nv;
} panel;

/* The panel that begins with query i, of n. */
INLINE panel panel_from(int64_t i, int64_t n) {
    const int64_t n_i = panel_of(n - i);
    return (panel){i, n_i, (int)(round_up(n_i, VL) / VL)};
}

/* A loop over the panels of n queries. */
#define PANELS(q, n) for (panel q = panel_from(0, n); q.n_i > 0; q = panel_from(q.i + q.n_i, n))

INLINE bool is_direct(const sdpa_matrix *m) {
    return m->dtype == REAL_DTYPE && !m->swapped && m->col == (int64_t)sizeof(real) &&
           m->row % (int64_t)sizeof(real) == 0 && (uintptr_t)m->data % sizeof(real) == 0;
}

/* A block of rows of K, V, Q or dO. `tail` holds a copy of the rows after the last multiple of SCORE_ROWS, padded with
 * zero rows to SCORE_ROWS: a tile reads SCORE_ROWS rows but never beyond the array. */
typedef struct rows {
    const real *p, *tail;
    int64_t row, tail_row;  /* elements */
    int64_t j0, n;          /* rows */
    bool looked_at, finite; /* see rows_finite */
    sdpa_matrix narrow;     /* set by narrow_rows instead of p: `data` is row j0; otherwise `data` is NULL */
} rows;

/* A block of scores: queries i0 .. i0+n_i-1, counted from the head's first, by keys j0 .. j0+n_j-1. */
typedef struct block {
    int64_t i0, n_i, j0, n_j;
} block;

INLINE block block_of(const sdpa_unit *u, panel q, const rows *k) { return (block){u->i0 + q.i, q.n_i, k->j0, k->n}; }

/* Rows j0 .. j0+n-1 of m, d columns. They are copied to `copy` (n, row_stride(d)), n rounded up to SCORE_ROWS if
 * there is a tail, in three cases: type or stride are not those of the kernel; they are read in whole vectors, which d
 * does not fill; they are read so often that vectors across two cache lines (NumPy aligns to 16 bytes) cost more than
 * the copy. n_reads is the number of rows that they are multiplied with in whole vectors. `tail` is (SCORE_ROWS, d), or
 * NULL if no tail is read. */
NOINLINE rows pack_rows(const sdpa_matrix *m, int64_t j0, int64_t n, int64_t d, int64_t n_reads, real *copy,
                        real *tail) {
    rows r = {.j0 = j0, .n = n};
    int64_t full = n / SCORE_ROWS * SCORE_ROWS;
    const char *first = m->data + j0 * m->row;
    const bool direct = is_direct(m),
               often = direct && n_reads >= OFTEN && ((uintptr_t)first | (uintptr_t)m->row) % VEC_BYTES != 0;
    if (direct && !often && (n_reads == 0 || d % VL == 0)) {
        r.p = (const real *)first;
        r.row = m->row / (int64_t)sizeof(real);
        r.tail = tail;
        r.tail_row = d;
        if (tail && full < n) {
            for (int64_t j = full; j < n; j++) memcpy(tail + (j - full) * d, r.p + j * r.row, sizeof(real) * (size_t)d);
            memset(tail + (n - full) * d, 0, sizeof(real) * (size_t)((SCORE_ROWS - n + full) * d));
        }
        return r;
    }
    int64_t padded = row_stride(d);
    for (int64_t j = 0; j < n; j++) {
        real *to = copy + j * padded;
        if (often && d % VL == 0) {
            const real *from = (const real *)(first + j * m->row);
            for (int64_t c = 0; c < d; c += VL) vstore(to + c, vload(from + c));
        } else {
            load(to, first + j * m->row, d, m->col, m->dtype, m->swapped);
        }
        for (int64_t c = d; c < padded; c++) to[c] = 0;
    }
    for (int64_t j = n * padded; tail && j < round_up(n, SCORE_ROWS) * padded; j++) copy[j] = 0;
    r.p = copy;
    r.row = r.tail_row = padded;
    r.tail = copy + full * padded;
    return r;
}

/* Whether rows of 16 bits, d columns, can be read in place by products that widen while they multiply. */
INLINE bool is_narrow(const sdpa_matrix *m, int64_t d) {
    const bool widens = SDPA_REAL == 32 && (m->dtype == SDPA_BF16 || (WIDENS_F16 && m->dtype == SDPA_F16));
    return widens && !m->swapped && m->col == 2 && d % VL == 0;
}

/* Rows j0 .. j0+n-1 of a matrix for which is_narrow is true. */
INLINE rows narrow_rows(const sdpa_matrix *m, int64_t j0, int64_t n) {
    rows r = {.j0 = j0, .n = n, .narrow = *m};
    r.narrow.data += j0 * m->row;
    return r;
}

/* False if any of n rows of d elements is NaN or infinite. */
NOINLINE bool all_finite(const real *p, int64_t row, int64_t n, int64_t d) {
    ivec bad = {0};
    for (int64_t j = 0; j < n; j++) {
        for (int64_t c = 0; c < d; c += VL) {
            vec x = d - c < VL ? vload_partial(p + j * row + c, (int)(d - c)) : vload(p + j * row + c);
            bad |= (x - x) != (vec){0};
        }
    }
    return !vany(bad);
}

/* all_finite of d columns; the answer is kept in r. */
INLINE bool rows_finite(rows *r, int64_t d) {
    if (!r->looked_at) r->finite = all_finite(r->p, r->row, r->n, d);
    r->looked_at = true;
    return r->finite;
}

/* vtranspose out of line, for places where waiting for memory takes longer than the call. */
NOINLINE void transpose(vec *r) { vtranspose(r); }

/* t (d, t_row) = sign * transpose of rows i0 .. i0+n-1 of m; lanes n .. round_up(n, VL)-1 are 0. `line`: (VL, d rounded
 * up to VL) of scratch. */
NOINLINE void pack_transposed(real *t, int64_t t_row, const sdpa_matrix *m, int64_t i0, int64_t n, int64_t d, real sign,
                              real *line) {
    const vec zero = {0};
    bool direct = is_direct(m);
    int64_t line_row = round_up(d, VL);
    for (int64_t i = 0; i < n; i += VL) {
        int64_t lanes = n - i < VL ? n - i : VL;
        const char *first = m->data + (i0 + i) * m->row;
        if (!direct) {
            for (int64_t l = 0; l < lanes; l++) {
                load(line + l * line_row, first + l * m->row, d, m->col, m->dtype, m->swapped);
            }
        }
        const real *source = direct ? (const real *)first : line;
        int64_t source_row = direct ? m->row / (int64_t)sizeof(real) : line_row;
        for (int64_t c = 0; c < d; c += VL) {
            int columns = d - c < VL ? (int)(d - c) : VL;
            vec r[VL];
            const real *first_row = source + c;
            if (columns == VL) {
                UNROLL for (int l = 0; l < VL; l++) {
                    r[l] = sign * vload(l < lanes ? first_row + l * source_row : (const real *)&zero);
                }
                vtranspose(r);
                UNROLL for (int l = 0; l < VL; l++) vstore(t + (c + l) * t_row + i, r[l]);
                continue;
            }
            for (int l = 0; l < VL; l++) {
                r[l] = l < lanes ? sign * vload_partial(first_row + l * source_row, columns) : (vec){0};
            }
            transpose(r);
            for (int l = 0; l < columns; l++) vstore(t + (c + l) * t_row + i, r[l]);
        }
    }
}

/* Packs n queries from i0 on, panel after panel, each (d, its lanes). A tile reads the same panel again and again, so
 * each panel is contiguous. */
static void pack_panels(real *t, const sdpa_matrix *m, int64_t i0, int64_t n, int64_t d, real sign, real *line) {
    PANELS (q, n) pack_transposed(t + q.i * d, q.nv * VL, m, i0 + q.i, q.n_i, d, sign, line);
}

/* The place of query i, a multiple of VL, in t as pack_panels left it; *row is the distance between its d elements. */
INLINE real *panel_at(real *t, int64_t n, int64_t d, int64_t i, int64_t *row) {
    panel q = panel_from(0, n);
    while (i >= q.i + q.n_i) q = panel_from(q.i + q.n_i, n);
    *row = q.nv * VL;
    return t + q.i * d + (i - q.i);
}

#endif
