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
    sdpa_matrix across;     /* likewise, by rows_across */
} rows;

/* A block of scores: queries i0 .. i0+n_i-1, counted from the head's first, by keys j0 .. j0+n_j-1. */
typedef struct block {
    int64_t i0, n_i, j0, n_j;
} block;

INLINE block block_of(const sdpa_unit *u, panel q, const rows *k) { return (block){u->i0 + q.i, q.n_i, k->j0, k->n}; }

/* vtranspose out of line, for places where waiting for memory takes longer than the call. */
NOINLINE void transpose(vec *r) { vtranspose(r); }

/* Whether neighbouring rows lie closer together than a row's own elements. Strides in bytes. */
INLINE bool across_rows(int64_t row, int64_t col) { return (row < 0 ? -row : row) < (col < 0 ? -col : col); }

/* The column after j from which the next VL of n, `size` bytes each, are read: the start of a cache line, except for the
 * first and the last. Rows 4096 bytes apart share a set of L1, and a line that two vectors share would be evicted in
 * between. */
INLINE int64_t next_columns(const char *row, int64_t j, int64_t n, int64_t size) {
    const int64_t last = n - VL, next = j + VL - (int64_t)((uintptr_t)(row + j * size) % (uintptr_t)(VL * size)) / size;
    return j >= last ? n : next < last ? next : last;
}

/* dst (n, dst_row) = the transpose of n_rows <= VL rows of n elements, 0 in the lanes without a row. Strides of src in
 * bytes. */
#define load_across OF_BASE(load_across)
SHARED void load_across(real *dst, int64_t dst_row, const char *src, int n_rows, int64_t n, int64_t row, int64_t col,
                        sdpa_dtype dtype, bool swapped);

#if OWNS_SHARED
/* load_across of whole vectors: n >= VL elements of `dtype`, a constant, next to each other. */
INLINE void load_across_as(sdpa_dtype dtype, real *dst, int64_t dst_row, const char *src, int n_rows, int64_t n,
                           int64_t row) {
    static const real zeros[VL];
    const int64_t size = sdpa_size_of(dtype);
    for (int64_t j = 0; j < n; j = next_columns(src, j, n, size)) {
        vec r[VL];
        if (dtype == REAL_DTYPE && n_rows == VL) {
            vload_transposed(r, (const real *)(src + j * size), row / size);
        } else {
            UNROLL for (int i = 0; i < VL; i++) {
                r[i] = i < n_rows ? vload_as(dtype, src + i * row + j * size) : vload(zeros);
            }
            vtranspose(r);
        }
        UNROLL for (int t = 0; t < VL; t++) vstore(dst + (j + t) * dst_row, r[t]);
    }
}

SHARED void load_across(real *dst, int64_t dst_row, const char *src, int n_rows, int64_t n, int64_t row, int64_t col,
                        sdpa_dtype dtype, bool swapped) {
    const int64_t size = sdpa_size_of(dtype);
    const bool direct = !swapped && col == size && row % size == 0 && (uintptr_t)src % (uintptr_t)size == 0;
    if (direct && n >= VL) {
        if (dtype == REAL_DTYPE) {
            load_across_as(REAL_DTYPE, dst, dst_row, src, n_rows, n, row);
            return;
        }
        if (SDPA_REAL == 32 && dtype == SDPA_F16) {
            load_across_as(SDPA_F16, dst, dst_row, src, n_rows, n, row);
            return;
        }
        if (SDPA_REAL == 32 && dtype == SDPA_BF16) {
            load_across_as(SDPA_BF16, dst, dst_row, src, n_rows, n, row);
            return;
        }
    }
    for (int64_t j = 0; j < n; j += VL) {
        /* The last vectors overlap the ones before, if there are any. */
        if (n - j < VL && n > VL) j = n - VL;
        const int width = n - j < VL ? (int)(n - j) : VL;
        vec r[VL];
        for (int i = 0; i < VL; i++) {
            const char *from = src + i * row + j * col;
            r[i] = (vec){0}; /* not all at once, by `rep stos` */
            if (i >= n_rows) continue;
            if (direct && dtype == REAL_DTYPE) { /* then there is but one vector */
                r[i] = vload_partial((const real *)from, width);
            } else {
                load(r + i, from, width, col, dtype, swapped);
            }
        }
        transpose(r);
        for (int t = 0; t < width; t++) vstore(dst + (j + t) * dst_row, r[t]);
    }
}
#endif

/* to (n, to_row) = rows of m from j0 on, d columns; zeros up to to_row, which holds whole vectors. */
NOINLINE void load_rows(real *to, int64_t to_row, const sdpa_matrix *m, int64_t j0, int64_t n, int64_t d) {
    const char *first = m->data + j0 * m->row;
    if (across_rows(m->row, m->col)) {
        for (int64_t c = 0; c < d; c += VL) {
            load_across(to + c, to_row, first + c * m->col, d - c < VL ? (int)(d - c) : VL, n, m->col, m->row, m->dtype,
                        m->swapped);
        }
        d = round_up(d, VL);
    } else {
        for (int64_t j = 0; j < n; j++) load(to + j * to_row, first + j * m->row, d, m->col, m->dtype, m->swapped);
    }
    for (int64_t j = 0; j < n && d < to_row; j++) {
        for (int64_t c = d; c < to_row; c++) to[j * to_row + c] = 0;
    }
}

#if SDPA_REAL == 32
/* Whether copy_halves takes n rows of m. */
INLINE bool halves_across(const sdpa_matrix *m, int64_t n, int64_t d) {
    return sdpa_is_narrow(m->dtype) && !m->swapped && m->row == 2 && d % 2 == 0 && n >= VL;
}

/* to (n, d), rows to_row bytes apart = rows j0 .. j0+n-1 of m, 16 bits that lie column by column. Columns are transposed
 * two at a time. */
NOINLINE void copy_halves(char *to, int64_t to_row, const sdpa_matrix *m, int64_t j0, int64_t n, int64_t d) {
    for (int64_t c = 0; c < d; c += 2 * VL) {
        const char *first = m->data + 2 * j0 + c * m->col;
        const int64_t width = d - c < 2 * VL ? d - c : 2 * VL;
        for (int64_t j = 0; j < n; j = next_columns(first, j, n, 2)) {
            vec r[VL];
            UNROLL for (int i = 0; i < VL; i++) {
                const char *low = first + 2 * j + (2 * i < width ? 2 * i : 0) * m->col;
                r[i] = (vec)(vload_halves(low) | vload_halves(low + m->col) << 16);
            }
            vtranspose(r);
            for (int t = 0; t < VL; t++) {
                char *row = to + (j + t) * to_row + 2 * c;
                if (width == 2 * VL) {
                    memcpy(row, r + t, sizeof *r);
                } else {
                    memcpy(row, r + t, (size_t)(2 * width));
                }
            }
        }
    }
}
#else
INLINE bool halves_across(const sdpa_matrix *m, int64_t n, int64_t d) { return (void)m, (void)n, (void)d, false; }
INLINE void copy_halves(char *to, int64_t to_row, const sdpa_matrix *m, int64_t j0, int64_t n, int64_t d) {
    (void)to, (void)to_row, (void)m, (void)j0, (void)n, (void)d;
}
#endif

static size_t copy_bytes(int64_t n, int64_t d) { return sizeof(real) * (size_t)(n * row_stride(d)); }

static void copy_rows(char *to, const sdpa_matrix *m, int64_t j0, int64_t n, int64_t d, void *lines_) {
    real *lines = lines_;
    const int64_t row = row_stride(d), size = sdpa_size_of(m->dtype);
    if (m->dtype == REAL_DTYPE && d % VL == 0) {
        load_rows((real *)to, d, m, j0, n, d);
        return;
    }
    if (halves_across(m, n, d)) {
        copy_halves(to, 2 * d, m, j0, n, d);
        return;
    }
    load_rows(lines, row, m, j0, n, d);
    for (int64_t j = 0; j < n; j++) store(to + j * d * size, lines + j * row, d, size, m->dtype);
}

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
    if (often && d % VL == 0) {
        for (int64_t j = 0; j < n; j++) {
            const real *from = (const real *)(first + j * m->row);
            for (int64_t c = 0; c < d; c += VL) vstore(copy + j * padded + c, vload(from + c));
            for (int64_t c = d; c < padded; c++) copy[j * padded + c] = 0;
        }
    } else {
        load_rows(copy, padded, m, j0, n, d);
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

/* Whether rows of the kernel's type lie side by side, so that products take vectors of them without a copy. */
INLINE bool lies_across(const sdpa_matrix *m) {
    const int64_t size = (int64_t)sizeof(real);
    return m->dtype == REAL_DTYPE && !m->swapped && m->row == size && m->col % size == 0 && m->col != size &&
           (uintptr_t)m->data % sizeof(real) == 0;
}

/* Rows j0 .. j0+n-1 of a matrix for which lies_across is true. */
INLINE rows rows_across(const sdpa_matrix *m, int64_t j0, int64_t n) {
    rows r = {.j0 = j0, .n = n, .across = *m};
    r.across.data += j0 * m->row;
    return r;
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

/* t (d, t_row) = sign * transpose of rows i0 .. i0+n-1 of m; lanes n .. round_up(n, VL)-1 are 0. `line`: (VL, d rounded
 * up to VL) of scratch. */
#define pack_transposed OF_BASE(pack_transposed)
SHARED void pack_transposed(real *t, int64_t t_row, const sdpa_matrix *m, int64_t i0, int64_t n, int64_t d, real sign,
                            real *line);

#if OWNS_SHARED
SHARED void pack_transposed(real *t, int64_t t_row, const sdpa_matrix *m, int64_t i0, int64_t n, int64_t d, real sign,
                            real *line) {
    const vec zero = {0};
    bool direct = is_direct(m);
    int64_t line_row = round_up(d, VL);
    if (across_rows(m->row, m->col)) { /* a lane's neighbours are its neighbours in memory */
        for (int64_t c = 0; c < d; c++) {
            real *to = t + c * t_row;
            load(to, m->data + i0 * m->row + c * m->col, n, m->row, m->dtype, m->swapped);
            for (int64_t i = 0; i < n; i++) to[i] *= sign;
            for (int64_t i = n; i < round_up(n, VL); i++) to[i] = 0;
        }
        return;
    }
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
#endif

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
