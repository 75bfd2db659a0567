/* softmax_columns: functions of the softmax family that sum rows and whose results are as large as x, for rows of
 * float32 or 16 bits whose neighbours are neighbours in memory. It takes strips of COLUMNS rows. Lines of a strip, which
 * have one element of each row, are far apart in memory, where all may belong to one set of a cache: the forward keeps x,
 * and then exponentials, in scratch; the backward reads x and g twice, in long pieces. The function and the type are no
 * constants: one body for each would be a few per cent faster and twice as large. It sums in the order of softmax_rows
 * (softmax.h). */
#ifndef SDPA_KERNEL_SOFTMAX_COLUMNS_H
#define SDPA_KERNEL_SOFTMAX_COLUMNS_H

#include "softmax.h"

/* Vectors in a line of a strip: enough that no operation waits for another. */
enum { STRIP = MOST_AT_ONCE, COLUMNS = STRIP * VL };
/* Elements of a slot between two of one partial sum, and in a block of all partial sums (softmax.h). */
enum { ROUND = SUM_CHAINS * VL, BLOCK = SUM_CHAIN * ROUND };
/* Rows from which on all strips but the first begin at cache lines. */
enum { LED = 8 * COLUMNS };
/* Strips side by side that the backward takes at once: it reads their lines twice, in pieces of a page, as far as a CPU
 * fetches ahead. */
enum { STRIPS = 4096 / (STRIP * VEC_BYTES) };
/* The order in which sums of four slots are added as a binary tree, of FOURS or, in proportion, of fewer; and how many
 * of them wait for others. */
enum { FOURS = 4, LEVELS = 2 };
_Static_assert(VL <= 4 * FOURS, "");
static const unsigned char order[FOURS] = {0, 2, 1, 3};

/* One strip: its first elements of `dtype` in memory, strides in bytes; forward: scratch for n lines. */
typedef struct strip_rows {
    const char *x, *g;
    char *out;
    int64_t x_col, g_col, out_col, n;
    int64_t step; /* bytes from a strip to the next */
    sdpa_dtype dtype;
    real *kept;
} strip_rows;

/* The strip i places to the right. */
INLINE strip_rows strip_at(const strip_rows *r, int64_t i) {
    strip_rows at = *r;
    at.x += i * r->step;
    if (at.g) at.g += i * r->step;
    at.out += i * r->step;
    return at;
}

INLINE void line_load(sdpa_dtype dtype, vec *v, const char *p) {
    if (dtype == SDPA_F16) {
        EACH(w, STRIP) v[w] = vload_as(SDPA_F16, p + w * 2 * VL);
        return;
    }
    if (dtype == SDPA_BF16) {
        EACH(w, STRIP) v[w] = vload_as(SDPA_BF16, p + w * 2 * VL);
        return;
    }
    EACH(w, STRIP) v[w] = vload((const real *)p + w * VL);
}

INLINE void line_keep(real *p, const vec *v) { EACH(w, STRIP) vstore(p + w * VL, v[w]); }

INLINE void line_store(sdpa_dtype dtype, char *p, const vec *v) {
    if (dtype == SDPA_F16) {
        EACH(w, STRIP) vnarrow_f16(p + w * 2 * VL, v[w]);
        return;
    }
    if (dtype == SDPA_BF16) {
        EACH(w, STRIP) vnarrow_bf16(p + w * 2 * VL, v[w]);
        return;
    }
    line_keep((real *)p, v);
}

/* The sum of rows, its rounding error, and what exponents of SUM_EXP subtract. */
typedef struct strip_sums {
    vec sum[STRIP], low[STRIP], shift[STRIP];
} strip_sums;

/* Adds the terms of element j to `sum`. SUM_EXP takes x from scratch, where exponentials replace it if `keeps`. */
INLINE void add_line(enum sum_kind kind, bool keeps, const softmax_constants *k, const strip_rows *r,
                     const strip_sums *t, int64_t j, vec *sum) {
    vec x[STRIP], g[STRIP], term[STRIP];
    if (kind == SUM_EXP) {
        real *kept = r->kept + j * COLUMNS;
        EACH(w, STRIP) term[w] = vload(kept + w * VL) - t->shift[w];
        softmax_exps(k, term, STRIP);
        if (keeps) line_keep(kept, term);
        EACH(w, STRIP) sum[w] += term[w];
        return;
    }
    line_load(r->dtype, x, r->x + j * r->x_col);
    line_load(r->dtype, g, r->g + j * r->g_col);
    softmax_terms(term, STRIP, kind, k, x[0], x, g);
    EACH(w, STRIP) sum[w] = add_term(kind, sum[w], term[w], x[w], g[w]);
}

/* The sum of slot l. */
INLINE void add_slot(enum sum_kind kind, bool keeps, const softmax_constants *k, const strip_rows *r,
                     const strip_sums *t, int64_t l, vec *sum) {
    vec half[STRIP] = {{0}};
    EACH(w, STRIP) sum[w] = (vec){0};
    if (kind != SUM_EXP && l + VL >= r->n) {
        add_line(kind, keeps, k, r, t, l, sum);
        return;
    }
    int a = 0;
    for (; a < SUM_CHAINS && l + a * VL < r->n; a++) {
        vec chain[STRIP];
        EACH(w, STRIP) chain[w] = (vec){0};
        for (int64_t j = l + a * VL; j < r->n; j += ROUND) add_line(kind, keeps, k, r, t, j, chain);
        if (a % 2) {
            EACH(w, STRIP) sum[w] += chain[w];
        } else {
            EACH(w, STRIP) half[w] = sum[w];
            EACH(w, STRIP) sum[w] = chain[w];
        }
    }
    if (a > 2) EACH(w, STRIP) sum[w] += half[w];
}

/* t += other, in the order of row_sum. */
INLINE void add_sums(strip_sums *t, const strip_sums *other) {
    EACH(w, STRIP) t->low[w] += other->low[w];
    EACH(w, STRIP) add_exactly(t->sum + w, t->low + w, other->sum[w]);
}

/* The sum of those of the slots l and l + half that exist. */
INLINE void add_pair(enum sum_kind kind, bool keeps, const softmax_constants *k, const strip_rows *r, strip_sums *t,
                     int64_t l, int64_t half) {
    strip_sums slot = {{{0}}, {{0}}, {{0}}};
    EACH(w, STRIP) slot.shift[w] = t->shift[w];
    EACH(w, STRIP) t->low[w] = (vec){0};
    for (int64_t at = l; at <= l + half && at < r->n; at += half) {
        add_slot(kind, keeps, k, r, &slot, at, slot.sum);
        if (at == l) {
            EACH(w, STRIP) t->sum[w] = slot.sum[w];
        } else {
            EACH(w, STRIP) add_exactly(t->sum + w, t->low + w, slot.sum[w]);
        }
    }
}

/* The sum of slots l, l + half, and then of those half / 2 further, as far as they exist. */
INLINE void add_four(enum sum_kind kind, bool keeps, const softmax_constants *k, const strip_rows *r, strip_sums *t,
                     int64_t l, int64_t half) {
    strip_sums pair = {{{0}}, {{0}}, {{0}}};
    EACH(w, STRIP) pair.shift[w] = t->shift[w];
    for (int64_t at = l; at < l + half && at < r->n; at += half / 2) {
        add_pair(kind, keeps, k, r, &pair, at, half);
        if (at == l) {
            EACH(w, STRIP) t->sum[w] = pair.sum[w];
            EACH(w, STRIP) t->low[w] = pair.low[w];
        } else {
            add_sums(t, &pair);
        }
        if (half == 1) break;
    }
}

/* row_sum of n <= BLOCK elements of `strips` strips: slots are taken in an order in which few sums of the tree wait for
 * others. */
INLINE void add_strips(enum sum_kind kind, bool keeps, const softmax_constants *k, const strip_rows *r, strip_sums *t,
                       int strips) {
    strip_sums waiting[LEVELS][STRIPS];
    int64_t half = 1;
    while (half < VL / 2 && 2 * half < r->n) half *= 2;
    const int fours = half == 1 ? 1 : (int)half / 2;
    for (int i = 0; i < fours; i++) {
        const int64_t first = order[i] * fours / FOURS;
        for (int s = 0; s < strips; s++) {
            const strip_rows at = strip_at(r, s);
            strip_sums own = {{{0}}, {{0}}, {{0}}};
            int level = 0;
            EACH(w, STRIP) own.shift[w] = t[s].shift[w];
            bool some = first < r->n;
            if (some) add_four(kind, keeps, k, &at, &own, first, half);
            for (; i >> level & 1; level++) {
                strip_sums *left = waiting[level] + s;
                if (some) add_sums(left, &own);
                EACH(w, STRIP) own.sum[w] = left->sum[w];
                EACH(w, STRIP) own.low[w] = left->low[w];
                some = true;
            }
            strip_sums *to = i + 1 < fours ? waiting[level] + s : t + s;
            EACH(w, STRIP) to->sum[w] = own.sum[w];
            EACH(w, STRIP) to->low[w] = own.low[w];
        }
    }
}

/* Puts x into scratch; sets what exponents subtract. */
INLINE void strip_shift(const strip_rows *r, strip_sums *t) {
    vec x[STRIP], most[STRIP];
    EACH(w, STRIP) most[w] = vset1(-(real)INFINITY);
    for (int64_t j = 0; j < r->n; j++) {
        line_load(r->dtype, x, r->x + j * r->x_col);
        line_keep(r->kept + j * COLUMNS, x);
        EACH(w, STRIP) most[w] = vmax2(most[w], x[w]);
    }
    EACH(w, STRIP) t->shift[w] = vselect(most[w] == -(real)INFINITY, (vec){0}, most[w]);
}

/* Fills the rows whose sum is NaN. */
COLD NOINLINE void strip_fill_nan(sdpa_softmax_op op, const strip_rows *r, const ivec *nan) {
    const real left_out = op == SDPA_SOFTMAX ? 0 : -(real)INFINITY;
    const int64_t size = sdpa_size_of(r->dtype);
    for (int64_t j = 0; j < r->n; j++) {
        real x[COLUMNS];
        load(x, r->x + j * r->x_col, COLUMNS, size, r->dtype, false);
        for (int i = 0; i < COLUMNS; i++) {
            const real y = x[i] == -(real)INFINITY ? left_out : (real)NAN;
            if (nan[i / VL][i % VL]) store(r->out + j * r->out_col + i * size, &y, 1, size, r->dtype);
        }
    }
}

/* Sets sums to the s and s_low of softmax_results; returns which are NaN. */
INLINE void strip_finish(sdpa_softmax_op op, strip_sums *t, ivec *nan) {
    EACH(w, STRIP) nan[w] = t->sum[w] != t->sum[w];
    EACH(w, STRIP) t->low[w] = vselect(t->low[w] == t->low[w], t->low[w], (vec){0});
    for (int w = 0; w < STRIP; w++) softmax_finishes(op, t->sum[w], t->low[w], t->sum + w, t->low + w);
}

/* Writes `strips` strips. */
INLINE void write_strips(sdpa_softmax_op op, const softmax_constants *k, const strip_rows *r, const strip_sums *t,
                         int strips) {
    const bool forward = is_forward(op);
    for (int64_t j = 0; j < r->n; j++) {
        const char *x = forward ? (const char *)(r->kept + j * COLUMNS) : r->x + j * r->x_col;
        const char *g = forward ? x : r->g + j * r->g_col;
        char *out = r->out + j * r->out_col;
        for (int s = 0; s < strips; s++, x += r->step, g += r->step, out += r->step) {
            vec y[STRIP], z[STRIP];
            line_load(forward ? REAL_DTYPE : r->dtype, y, x);
            line_load(forward ? REAL_DTYPE : r->dtype, z, g);
            softmax_results(op, k, t[s].shift, t[s].sum, t[s].low, 1, y, z, STRIP);
            line_store(r->dtype, out, y);
        }
    }
}

/* The results of `strips` strips, in forward functions one. */
INLINE void strips_run(sdpa_softmax_op op, const softmax_constants *k, const strip_rows *r, int strips) {
    const bool forward = is_forward(op);
    strip_sums t[STRIPS];
    ivec nan[STRIP] = {{0}};
    for (int s = 0; s < strips; s++) EACH(w, STRIP) t[s].shift[w] = (vec){0};
    if (forward) strip_shift(r, t);
    add_strips(forward                       ? SUM_EXP
               : op == SDPA_SOFTMAX_BACKWARD ? SUM_PRODUCT
                                             : SUM_GRADIENT,
               op == SDPA_SOFTMAX, k, r, t, strips);
    for (int s = 0; s < strips; s++) strip_finish(op, t + s, nan);
    write_strips(op, k, r, t, strips);
    ivec any = nan[0];
    EACH(w, STRIP) any |= nan[w];
    if (forward && vany(any)) strip_fill_nan(op, r, nan);
}

/* All strips. The first and the last one may overlap their neighbours: then the others begin at cache lines, and rows
 * need not fill strips. */
static void softmax_columns(const sdpa_softmax_block *b) {
    const softmax_constants k = softmax_load(b->scale);
    const sdpa_softmax_op op = b->op;
    const int64_t size = sdpa_size_of(b->dtype), out_col = b->out_col * size, last = b->n_rows - COLUMNS,
                  line = COLUMNS * size < SDPA_ALIGNMENT ? COLUMNS * size : SDPA_ALIGNMENT,
                  past = out_col % line || last < LED ? 0 : (int64_t)((uintptr_t)b->out % (uintptr_t)line) / size;
    for (int64_t i = 0, next;; i = next < last ? next : last) {
        const strip_rows r = {.x = (const char *)b->x + i * size,
                              .x_col = b->x_col * size,
                              .g = is_forward(op) ? NULL : (const char *)b->g + i * size,
                              .g_col = b->g_col * size,
                              .out = (char *)b->out + i * size,
                              .out_col = out_col,
                              .n = b->n,
                              .step = COLUMNS * size,
                              .dtype = b->dtype,
                              .kept = b->kept};
        int strips = is_forward(op) || (i == 0 && past) ? 1 : (int)((last - i) / COLUMNS) + 1;
        if (strips > STRIPS) strips = STRIPS;
        strips_run(op, &k, &r, strips);
        next = i + strips * COLUMNS - (i == 0 ? past : 0);
        if (i == last || next >= b->n_rows) break;
    }
}

#endif
