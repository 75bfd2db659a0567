/* softmax_lanes: the softmax family for one row per lane. It sums in the order of softmax_rows (softmax.h). */
#ifndef SDPA_KERNEL_SOFTMAX_LANES_H
#define SDPA_KERNEL_SOFTMAX_LANES_H

#include "softmax.h"

/* Rows of at most this many elements are transposed into the lanes, which is cheaper than sums over the lanes: in the
 * forward, and in the backward, which transposes twice as much (docs/history/attempts.md). */
#define SHORT_ROW ((VEC_BYTES == 32 ? 8 : 2) * VL)
#define SHORT_ROW_BACKWARD ((VEC_BYTES == 32 && SDPA_REAL == 32 ? 3 : 1) * VL)

NOINLINE vec lanes_max(const real *x, int64_t col, int64_t n) {
    vec m[2] = {vset1(-(real)INFINITY), vset1(-(real)INFINITY)};
    int64_t j = 0;
    for (; j + 2 <= n; j += 2) {
        m[0] = vmax2(m[0], vload(x + j * col));
        m[1] = vmax2(m[1], vload(x + j * col + col));
    }
    if (j < n) m[0] = vmax2(m[0], vload(x + j * col));
    return vmax2(m[0], m[1]);
}

/* Per lane: what to subtract, the sum and its rounding error. */
typedef struct lanes_stats {
    vec shift, sum, low;
} lanes_stats;

/* Rows in the lanes: elements of x, g a column apart, what to subtract, and, unless NULL, where terms go. */
typedef struct lane_rows {
    const real *x, *g;
    real *e;
    int64_t x_col, g_col, e_col, n;
    vec m;
} lane_rows;

typedef struct lane_terms {
    vec x[AT_ONCE], g[AT_ONCE], term[AT_ONCE];
} lane_terms;

/* The terms of `count` elements from j on. */
INLINE lane_terms lanes_terms(int count, enum sum_kind kind, const softmax_constants *k, const lane_rows *r,
                              int64_t j) {
    lane_terms t;
    EACH(i, count) t.x[i] = vload(r->x + (j + i) * r->x_col);
    EACH(i, count) t.g[i] = r->g ? vload(r->g + (j + i) * r->g_col) : (vec){0};
    softmax_terms(t.term, count, kind, k, r->m, t.x, t.g);
    for (int i = 0; i < count && r->e; i++) vstore(r->e + (j + i) * r->e_col, t.term[i]);
    return t;
}

/* The sum of slot l. */
INLINE vec slot_sum(vec *low, enum sum_kind kind, const softmax_constants *k, const lane_rows *r, int l) {
    vec sum = {0};
    *low = (vec){0};
    for (int64_t j0 = l; j0 < r->n; j0 += SUM_CHAIN * SUM_CHAINS * VL) {
        const int64_t most = j0 - l + SUM_CHAIN * SUM_CHAINS * VL, end = most < r->n ? most : r->n;
        vec acc[SUM_CHAINS];
        EACH(a, SUM_CHAINS) acc[a] = (vec){0};
        int64_t j = j0;
        while (j < end) {
            EACH(a, SUM_CHAINS) {
                if (j >= end) break;
                const lane_terms t = lanes_terms(1, kind, k, r, j);
                acc[a] = add_term(kind, acc[a], t.term[0], t.x[0], t.g[0]);
                j += VL;
            }
        }
        add_exactly(&sum, low, sum_of_four(acc, 1));
    }
    return sum;
}

/* Adds the term of element j to its slot, which the first one sets. */
INLINE void add_to_slot(vec *slot, vec *low, int64_t j, vec term) {
    const vec zero = {0};
    slot[j % VL] = (j < VL ? zero : slot[j % VL]) + term;
    low[j % VL] = zero;
}

/* row_sum for lanes: sums one slot after the other. */
INLINE vec lanes_sum(vec *low_out, enum sum_kind kind, const softmax_constants *k, const lane_rows *r) {
    vec slot[VL], slot_low[VL];
    const int n_slots = r->n < VL ? (int)r->n : VL;
    if (r->n > 2 * VL) {
        for (int l = 0; l < VL; l++) slot[l] = slot_sum(slot_low + l, kind, k, r, l);
    } else {
        /* So few terms are one in each partial sum of row_sum, and nothing is fused. */
        int64_t j = 0;
        for (; j + AT_ONCE <= r->n && kind == SUM_EXP; j += AT_ONCE) {
            const lane_terms t = lanes_terms(AT_ONCE, kind, k, r, j);
            EACH(i, AT_ONCE) add_to_slot(slot, slot_low, j + i, t.term[i]);
        }
        for (; j < r->n; j++) add_to_slot(slot, slot_low, j, lanes_terms(1, kind, k, r, j).term[0]);
    }
    for (int h = VL / 2; h > 0; h /= 2) {
        for (int l = 0; l < h && l + h < n_slots; l++) {
            slot_low[l] += slot_low[l + h];
            add_exactly(slot + l, slot_low + l, slot[l + h]);
        }
    }
    *low_out = vselect(slot_low[0] == slot_low[0], slot_low[0], (vec){0});
    return slot[0];
}

NOINLINE vec lanes_sum_exp(vec *low, const softmax_constants *k, const lane_rows *r) {
    return lanes_sum(low, SUM_EXP, k, r);
}

NOINLINE vec lanes_sum_product(vec *low, const softmax_constants *k, const lane_rows *r) {
    return lanes_sum(low, SUM_PRODUCT, k, r);
}

NOINLINE vec lanes_sum_gradient(vec *low, const softmax_constants *k, const lane_rows *r) {
    return lanes_sum(low, SUM_GRADIENT, k, r);
}

/* One vector of the rows of a block: their first elements, and the number of the first row. */
typedef struct lanes_at {
    const real *x, *g;
    real *out;
    int64_t i;
} lanes_at;

INLINE void lanes_write(sdpa_softmax_op op, bool exp_first, const softmax_constants *k, const lanes_stats *stats,
                        const sdpa_softmax_block *b, lanes_at at) {
    const bool gradient = op == SDPA_SOFTMAX_BACKWARD || op == SDPA_LOG_SOFTMAX_BACKWARD;
    const lanes_stats t = *stats; /* a copy that no store can alias */
    const bool kept = op == SDPA_SOFTMAX && !exp_first;
    const real *x = kept ? at.out : at.x;
    const int64_t x_col = kept ? b->out_col : b->x_col;
    for (int64_t j = 0; j < b->n; j++) {
        vec y = vload(x + j * x_col);
        const vec z = gradient ? vload(at.g + j * b->g_col) : (vec){0};
        if (exp_first) y = softmax_term(SUM_EXP, k, t.shift, y, z);
        softmax_results(op, k, &t.shift, &t.sum, &t.low, 0, &y, &z, 1);
        vstore(at.out + j * b->out_col, y);
    }
}

/* Fills the lanes whose sum is NaN. */
COLD NOINLINE void lanes_fill_nan(ivec nan, const sdpa_softmax_block *b, lanes_at at) {
    const vec left_out = vset1(b->op == SDPA_SOFTMAX ? 0 : -(real)INFINITY);
    for (int64_t j = 0; j < b->n; j++) {
        vec y = vselect(vload(at.x + j * b->x_col) == -(real)INFINITY, left_out, vset1((real)NAN));
        vstore(at.out + j * b->out_col, vselect(nan, y, vload(at.out + j * b->out_col)));
    }
}

/* The sums of logsumexp in lanes with +inf. */
COLD NOINLINE void sums_at_infinity(const sdpa_softmax_block *b, const real *x, lanes_stats *t) {
    real shift[VL], sum[VL];
    vstore(shift, t->shift);
    vstore(sum, t->sum);
    for (int i = 0; i < VL; i++) {
        if (shift[i] == (real)INFINITY) sum[i] = sum_at_infinity(x + i, b->x_col, b->n);
    }
    t->sum = vload(sum);
}

/* The sums of a chunk. `most` receives its maxima, -inf where it has none. */
INLINE lanes_stats lanes_sums(const sdpa_softmax_block *b, const softmax_constants *k, lanes_at at, vec *most) {
    lanes_stats t = {{0}, {0}, {0}};
    lane_rows r = {.x = at.x, .x_col = b->x_col, .g = at.g, .g_col = b->g_col, .n = b->n};
    *most = vset1(-(real)INFINITY);
    if (b->op == SDPA_SOFTMAX_BACKWARD) {
        t.sum = lanes_sum_product(&t.low, k, &r);
        return t;
    }
    if (b->op == SDPA_LOG_SOFTMAX_BACKWARD) {
        t.sum = lanes_sum_gradient(&t.low, k, &r);
        return t;
    }
    *most = lanes_max(at.x, b->x_col, b->n);
    t.shift = r.m = vselect(*most == -(real)INFINITY, (vec){0}, *most);
    r.e = b->keeps ? at.out : NULL;
    r.e_col = b->out_col;
    t.sum = lanes_sum_exp(&t.low, k, &r);
    if (b->op == SDPA_LOGSUMEXP && vany(t.shift == (real)INFINITY)) sums_at_infinity(b, at.x, &t);
    return t;
}

INLINE void store_doubles(double *restrict dst, vec x) {
    real from[VL];
    vstore(from, x);
    SIMD for (int i = 0; i < VL; i++) dst[i] = (double)from[i];
}

INLINE vec load_doubles(const double *restrict src) {
    real x[VL];
    SIMD for (int i = 0; i < VL; i++) x[i] = (real)src[i];
    return vload(x);
}

/* Stores the sums of a chunk. */
INLINE void lanes_store(const sdpa_softmax_block *b, int64_t i, const lanes_stats *t, vec most) {
    store_doubles(b->stats.m + i, most);
    store_doubles(b->stats.l + i, t->sum);
    store_doubles(b->stats.l_low + i, t->low);
}

/* Sets the s and s_low of softmax_results, from t or, in the phase WRITE, from stored sums. Returns which lanes are
 * NaN. */
INLINE ivec lanes_finish(const sdpa_softmax_block *b, int64_t i, lanes_stats *t) {
    if (b->phase == SDPA_SOFTMAX_WHOLE) {
        const ivec nan = t->sum != t->sum;
        softmax_finishes(b->op, t->sum, t->low, &t->sum, &t->low);
        return nan;
    }
    const vec sum = load_doubles(b->row.l + i);
    if (b->op == SDPA_LOGSUMEXP_BACKWARD || b->op == SDPA_SOFTMAX_JACOBIAN) {
        *t = (lanes_stats){load_doubles(b->row.m + i), sum, {0}};
        return (ivec){0};
    }
    const bool softmax = b->op == SDPA_SOFTMAX;
    real shift[VL], s[VL], s_low[VL];
    for (int l = 0; l < VL; l++) {
        shift[l] = softmax_shift(softmax ? b->stats.m[i + l] : b->row.m[i + l]);
        softmax_finish(b->op, b->row.l[i + l], b->row.l_low[i + l], softmax ? b->stats.factor[i + l] : 1, s + l,
                       s_low + l);
    }
    *t = (lanes_stats){vload(shift), vload(s), vload(s_low)};
    return sum != sum;
}

INLINE void lanes_result(const sdpa_softmax_block *b, const softmax_constants *k, const lanes_stats *t, lanes_at at) {
    switch (b->op) {
    case SDPA_SOFTMAX:
        if (b->keeps) {
            lanes_write(SDPA_SOFTMAX, false, k, t, b, at);
        } else {
            lanes_write(SDPA_SOFTMAX, true, k, t, b, at);
        }
        break;
    case SDPA_LOG_SOFTMAX:
        lanes_write(SDPA_LOG_SOFTMAX, false, k, t, b, at);
        break;
    case SDPA_SOFTMAX_BACKWARD:
        lanes_write(SDPA_SOFTMAX_BACKWARD, false, k, t, b, at);
        break;
    case SDPA_LOG_SOFTMAX_BACKWARD:
        lanes_write(SDPA_LOG_SOFTMAX_BACKWARD, false, k, t, b, at);
        break;
    case SDPA_LOGSUMEXP_BACKWARD:
        lanes_write(SDPA_LOGSUMEXP_BACKWARD, false, k, t, b, at);
        break;
    case SDPA_SOFTMAX_JACOBIAN:
        lanes_write(SDPA_SOFTMAX_JACOBIAN, false, k, t, b, at);
        break;
    case SDPA_LOGSUMEXP:
        break;
    }
}

/* The sum of 2 <= n <= 4 terms, n <= VL, in the order of lanes_sum. n is a constant here and below. */
INLINE vec few_sum(vec *low, const vec *term, int n) {
    const vec zero = {0};
    vec slot[4], rest[4];
    EACH(j, n) slot[j] = zero + term[j];
    EACH(j, n) rest[j] = zero;
    if (n > 2) add_exactly(slot, rest, slot[2]);
    if (n > 3) add_exactly(slot + 1, rest + 1, slot[3]);
    rest[0] += rest[1];
    add_exactly(slot, rest, slot[1]);
    *low = vselect(rest[0] == rest[0], rest[0], zero);
    return slot[0];
}

/* lanes_vector for n <= 4 elements, which stay in registers. */
INLINE void lanes_few(const sdpa_softmax_block *b, const softmax_constants *k, lanes_at at, int n) {
    const bool forward = is_forward(b->op);
    vec x[4], g[4], term[4], most = vset1(-(real)INFINITY);
    lanes_stats t = {{0}, {0}, {0}};
    EACH(j, n) term[j] = x[j] = vload(at.x + j * b->x_col);
    EACH(j, n) g[j] = at.g ? vload(at.g + j * b->g_col) : (vec){0};
    if (b->phase != SDPA_SOFTMAX_WRITE) {
        EACH(j, n) most = forward ? vmax2(most, x[j]) : most;
        t.shift = vselect(most == -(real)INFINITY, (vec){0}, most);
        softmax_terms(term, n,
                      forward                          ? SUM_EXP
                      : b->op == SDPA_SOFTMAX_BACKWARD ? SUM_PRODUCT
                                                       : SUM_GRADIENT,
                      k, t.shift, x, g);
        t.sum = few_sum(&t.low, term, n);
        if (b->op == SDPA_LOGSUMEXP && vany(t.shift == (real)INFINITY)) sums_at_infinity(b, at.x, &t);
    }
    if (b->phase == SDPA_SOFTMAX_SUM) {
        lanes_store(b, at.i, &t, most);
        return;
    }
    const ivec nan = lanes_finish(b, at.i, &t);
    EACH(j, n) term[j] = b->op == SDPA_SOFTMAX ? term[j] : x[j];
    const vec m = t.shift, s = t.sum, s_low = t.low; /* in registers: t has an address */
    softmax_results(b->op, k, &m, &s, &s_low, 0, term, g, n);
    EACH(j, n) vstore(at.out + j * b->out_col, term[j]);
    if (forward && vany(nan)) lanes_fill_nan(nan, b, at);
}

INLINE void lanes_vector(const sdpa_softmax_block *b, const softmax_constants *k, lanes_at at) {
    lanes_stats t = {{0}, {0}, {0}};
    if (b->phase != SDPA_SOFTMAX_WRITE) {
        vec most;
        t = lanes_sums(b, k, at, &most);
        if (b->phase == SDPA_SOFTMAX_SUM) {
            lanes_store(b, at.i, &t, most);
            return;
        }
    }
    const ivec nan = lanes_finish(b, at.i, &t);
    lanes_result(b, k, &t, at);
    if (is_forward(b->op) && vany(nan)) lanes_fill_nan(nan, b, at);
}

/* The next vector of rows. */
INLINE void lanes_next(const sdpa_softmax_block *b, lanes_at *at) {
    at->i += VL;
    at->x += b->x_row;
    if (at->g) at->g += b->g_row;
    if (at->out) at->out += b->out_row;
}

static void softmax_lanes(const sdpa_softmax_block *b) {
    const softmax_constants k = softmax_load(b->scale);
    lanes_at at = {b->x, b->g, b->out, 0};
    /* From phase to phase the last chunk of a long row of softmax has its exponentials in out, or none. */
    const bool split = b->op == SDPA_SOFTMAX && b->phase != SDPA_SOFTMAX_WHOLE;
    switch (b->n <= VL && !split ? b->n : 0) {
    case 2:
        for (; at.i < b->n_rows; lanes_next(b, &at)) lanes_few(b, &k, at, 2);
        break;
    case 3:
        for (; at.i < b->n_rows; lanes_next(b, &at)) lanes_few(b, &k, at, 3);
        break;
    case 4:
        for (; at.i < b->n_rows; lanes_next(b, &at)) lanes_few(b, &k, at, 4);
        break;
    default:
        for (; at.i < b->n_rows; lanes_next(b, &at)) lanes_vector(b, &k, at);
    }
}

#endif
