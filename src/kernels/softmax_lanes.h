/* softmax_lanes: the softmax family for one row per lane. It sums in the order of softmax_rows (softmax.h). */
#ifndef SDPA_KERNEL_SOFTMAX_LANES_H
#define SDPA_KERNEL_SOFTMAX_LANES_H

#include "softmax.h"

/* Rows of at most this many elements are transposed into the lanes, which is cheaper than sums over the lanes: in the
 * forward, and in the backward, which transposes twice as much (docs/history/attempts.md). */
#define SHORT_ROW ((VEC_BYTES == 32 ? 8 : 2) * VL)
#define SHORT_ROW_BACKWARD ((VEC_BYTES == 32 && SDPA_REAL == 32 ? 3 : 1) * VL)

/* Elements in a round of all partial sums, and in a block of rounds (softmax.h). */
enum { ROUND = SUM_CHAINS * VL, BLOCK = SUM_CHAIN * ROUND };
/* Half of the slots, the first ones, to which the others are added. */
enum { HALF = VL / 2 };
/* Vectors of rows that are summed at a time in the backward, where additions would wait for each other. */
enum { SUMMED = VEC_BYTES == 64 ? 4 : 2 };

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

/* n elements of rows in the lanes, a column apart, and where their exponentials go (e; NULL: nowhere). */
typedef struct lane_rows {
    const real *x;
    real *e;
    int64_t x_col, e_col, n;
    vec m;
} lane_rows;

/* Exponentials of `count` elements from j on, added to partial sums; `first`: nothing has been added yet. */
INLINE void add_exps(vec *sum, bool first, const softmax_constants *k, const lane_rows *r, int64_t j, int count) {
    vec e[AT_ONCE];
    EACH(i, count) e[i] = vload(r->x + (j + i) * r->x_col) - r->m;
    softmax_exps(k, e, count);
    EACH(i, count) {
        if (r->e) vstore(r->e + (j + i) * r->e_col, e[i]);
        sum[i] = first ? e[i] : sum[i] + e[i];
    }
}

/* The partial sums of the exponentials of a block, in the order of its elements. Those beyond r->n are not set. */
INLINE void exp_sums(vec *sum, const softmax_constants *k, const lane_rows *r) {
    for (int64_t j0 = 0; j0 < r->n; j0 += ROUND) {
        const int64_t end = j0 + ROUND < r->n ? j0 + ROUND : r->n;
        int64_t j = j0;
        for (; j + AT_ONCE <= end && j0 == 0; j += AT_ONCE) add_exps(sum + j - j0, true, k, r, j, AT_ONCE);
        for (; j < end && j0 == 0; j++) add_exps(sum + j - j0, true, k, r, j, 1);
        for (; j + AT_ONCE <= end; j += AT_ONCE) add_exps(sum + j - j0, false, k, r, j, AT_ONCE);
        for (; j < end; j++) add_exps(sum + j - j0, false, k, r, j, 1);
    }
}

/* The sum of n <= VL slots as a binary tree. */
INLINE vec slots_sum(vec *low_out, vec *slot, vec *low, int n) {
    for (int h = VL / 2; h > 0; h /= 2) {
        for (int l = 0; l + h < n && l < h; l++) {
            low[l] += low[l + h];
            add_exactly(slot + l, low + l, slot[l + h]);
        }
    }
    *low_out = vselect(low[0] == low[0], low[0], (vec){0});
    return slot[0];
}

/* slots_sum of VL slots that have been added in pairs, `step` vectors apart. */
INLINE vec pairs_sum(vec *low_out, const vec *pair, const vec *pair_low, int step) {
    vec slot[HALF], low[HALF];
    EACH(l, HALF) slot[l] = pair[l * step];
    EACH(l, HALF) low[l] = pair_low[l * step];
    UNROLL for (int h = HALF / 2; h > 0; h /= 2){EACH(l, h){low[l] += low[l + h];
    add_exactly(slot + l, low + l, slot[l + h]);
}
}
*low_out = vselect(low[0] == low[0], low[0], (vec){0});
return slot[0];
}

/* The sum of the partial sums of a slot, of which the last ones may have no term. */
INLINE vec partial_sums(const vec *sum, int64_t l, int64_t n) {
    vec s = sum[l];
    if (l + VL < n) s += sum[l + VL];
    if (l + 3 * VL < n) {
        s += sum[l + 2 * VL] + sum[l + 3 * VL];
    } else if (l + 2 * VL < n) {
        s += sum[l + 2 * VL];
    }
    return s;
}

/* row_sum of exponentials for lanes. */
NOINLINE vec lanes_sum_exp(vec *low_out, const softmax_constants *constants, const lane_rows *r) {
    const softmax_constants own = *constants, *k = &own; /* a copy that no store can alias */
    vec slot[VL], low[VL], sum[ROUND];
    if (r->n >= HALF && r->n <= BLOCK) {
        exp_sums(sum, k, r);
        for (int l = 0; l < HALF; l++) {
            vec s = partial_sums(sum, l, r->n), rest = {0};
            if (l + HALF < r->n) add_exactly(&s, &rest, partial_sums(sum, l + HALF, r->n));
            slot[l] = s;
            low[l] = rest;
        }
        return pairs_sum(low_out, slot, low, 1);
    }
    for (int64_t j = 0; j < r->n; j += BLOCK) {
        lane_rows part = *r;
        part.x += j * r->x_col;
        if (r->e) part.e += j * r->e_col;
        part.n = r->n - j < BLOCK ? r->n - j : BLOCK;
        exp_sums(sum, k, &part);
        for (int l = 0; l < VL && l < part.n; l++) {
            const vec s = partial_sums(sum, l, part.n);
            if (j == 0) {
                slot[l] = s;
                low[l] = (vec){0};
            } else {
                add_exactly(slot + l, low + l, s);
            }
        }
    }
    return slots_sum(low_out, slot, low, r->n < VL ? (int)r->n : VL);
}

/* Elements of rows in `dtype` for the sums of the backward, strides in bytes. */
typedef struct lane_pairs {
    const char *x, *g;
    int64_t x_col, g_col, n;
} lane_pairs;

/* sum + the terms of the elements at x and g of `count` neighbouring vectors. */
INLINE void plus_terms(enum sum_kind kind, sdpa_dtype dtype, vec *sum, const char *x_at, const char *g_at, int count) {
    EACH(u, count) {
        const vec x = vload_as(dtype, x_at + u * VL * sdpa_size_of(dtype)),
                  g = vload_as(dtype, g_at + u * VL * sdpa_size_of(dtype));
        const vec term = kind == SUM_PRODUCT ? x : vselect(x == -(real)INFINITY, (vec){0}, g);
        sum[u] = add_term(kind, sum[u], term, x, g);
    }
}

/* The sums of elements l, l + VL, ... of r. */
INLINE void slot_sums(enum sum_kind kind, sdpa_dtype dtype, vec *slot, const lane_pairs *r, int64_t l, int count) {
    vec sum[SUM_CHAINS][SUMMED];
    const char *x = r->x + l * r->x_col, *g = r->g + l * r->g_col;
    const int64_t x_next = VL * r->x_col, g_next = VL * r->g_col;
    int64_t left = (r->n - l - 1) / VL; /* after the first */
    EACH(a, SUM_CHAINS) EACH(u, count) sum[a][u] = (vec){0};
    plus_terms(kind, dtype, sum[0], x, g, count);
    if (left == 0) {
        EACH(u, count) slot[u] = sum[0][u];
        return;
    }
    plus_terms(kind, dtype, sum[1], x += x_next, g += g_next, count);
    for (; left >= 5; left -= SUM_CHAINS) {
        plus_terms(kind, dtype, sum[2], x += x_next, g += g_next, count);
        plus_terms(kind, dtype, sum[3], x += x_next, g += g_next, count);
        plus_terms(kind, dtype, sum[0], x += x_next, g += g_next, count);
        plus_terms(kind, dtype, sum[1], x += x_next, g += g_next, count);
    }
    if (left > 1) plus_terms(kind, dtype, sum[2], x += x_next, g += g_next, count);
    if (left > 2) plus_terms(kind, dtype, sum[3], x += x_next, g += g_next, count);
    if (left > 3) plus_terms(kind, dtype, sum[0], x += x_next, g += g_next, count);
    EACH(u, count) slot[u] = (sum[0][u] + sum[1][u]) + (sum[2][u] + sum[3][u]);
}

/* row_sum for the backward of `count` vectors of HALF to BLOCK elements. */
INLINE void lanes_sum_block(enum sum_kind kind, sdpa_dtype dtype, vec *sum, vec *sum_low, const lane_pairs *r,
                            int count) {
    vec slot[HALF][SUMMED], low[HALF][SUMMED];
    for (int l = 0; l < HALF; l++) {
        vec s[SUMMED], other[SUMMED], rest[SUMMED];
        slot_sums(kind, dtype, s, r, l, count);
        EACH(u, count) rest[u] = (vec){0};
        if (l + HALF < r->n) {
            slot_sums(kind, dtype, other, r, l + HALF, count);
            EACH(u, count) add_exactly(s + u, rest + u, other[u]);
        }
        EACH(u, count) slot[l][u] = s[u];
        EACH(u, count) low[l][u] = rest[u];
    }
    EACH(u, count) sum[u] = pairs_sum(sum_low + u, slot[0] + u, low[0] + u, SUMMED);
}

/* row_sum for the backward of one vector. */
INLINE vec lanes_sum(enum sum_kind kind, sdpa_dtype dtype, vec *sum_low, const lane_pairs *rows) {
    vec slot[VL], low[VL];
    for (int64_t j = 0; j < rows->n; j += BLOCK) {
        lane_pairs r = *rows;
        r.x += j * r.x_col;
        r.g += j * r.g_col;
        r.n = r.n - j < BLOCK ? r.n - j : BLOCK;
        for (int l = 0; l < VL && l < r.n; l++) {
            vec s;
            slot_sums(kind, dtype, &s, &r, l, 1);
            if (j == 0) {
                slot[l] = s;
                low[l] = (vec){0};
            } else {
                add_exactly(slot + l, low + l, s);
            }
        }
    }
    return slots_sum(sum_low, slot, low, rows->n < VL ? (int)rows->n : VL);
}

/* The sums of SUMMED vectors of rows, or of one. */
INLINE void lanes_sum_as(sdpa_dtype dtype, enum sum_kind kind, vec *sum, vec *low, const lane_pairs *r, bool some) {
    if (some) {
        lanes_sum_block(kind, dtype, sum, low, r, SUMMED);
    } else {
        sum[0] = lanes_sum(kind, dtype, low, r);
    }
}

INLINE void lanes_sum_any(sdpa_dtype dtype, enum sum_kind kind, vec *sum, vec *low, const lane_pairs *r, bool some) {
#if SDPA_REAL == 32
    if (dtype == SDPA_F16) {
        lanes_sum_as(SDPA_F16, kind, sum, low, r, some);
        return;
    }
    if (dtype == SDPA_BF16) {
        lanes_sum_as(SDPA_BF16, kind, sum, low, r, some);
        return;
    }
#endif
    (void)dtype;
    lanes_sum_as(REAL_DTYPE, kind, sum, low, r, some);
}

NOINLINE void lanes_products(sdpa_dtype dtype, vec *sum, vec *low, const lane_pairs *r, bool some) {
    lanes_sum_any(dtype, SUM_PRODUCT, sum, low, r, some);
}

NOINLINE void lanes_gradients(sdpa_dtype dtype, vec *sum, vec *low, const lane_pairs *r, bool some) {
    lanes_sum_any(dtype, SUM_GRADIENT, sum, low, r, some);
}

/* x of `dtype`, not a constant. */
INLINE vec vload_any(sdpa_dtype dtype, const char *p) {
#if SDPA_REAL == 32
    if (dtype == SDPA_F16) return vload_as(SDPA_F16, p);
    if (dtype == SDPA_BF16) return vload_as(SDPA_BF16, p);
#endif
    (void)dtype;
    return vload_as(REAL_DTYPE, p);
}

/* The sums of logsumexp in lanes with +inf. */
COLD NOINLINE void sums_at_infinity(const sdpa_softmax_block *b, int64_t i, lanes_stats *t) {
    real shift[VL], sum[VL];
    vstore(shift, t->shift);
    vstore(sum, t->sum);
    const int64_t size = sdpa_size_of(b->dtype);
    for (int l = 0; l < VL; l++) {
        if (shift[l] != (real)INFINITY) continue;
        bool nan = false;
        for (int64_t j = 0; j < b->n; j++) {
            real x;
            load(&x, (const char *)b->x + (i / VL * b->x_row + j * b->x_col + l) * size, 1, size, b->dtype, false);
            nan |= x != x;
        }
        sum[l] = nan ? (real)NAN : (real)INFINITY;
    }
    t->sum = vload(sum);
}

/* The sums of a chunk of forward functions. `most` receives its maxima, -inf where it has none. */
INLINE lanes_stats lanes_forward(const sdpa_softmax_block *b, const softmax_constants *k, int64_t i, vec *most) {
    lanes_stats t = {{0}, {0}, {0}};
    lane_rows r = {.x = (const real *)b->x + i / VL * b->x_row, .x_col = b->x_col, .n = b->n};
    *most = lanes_max(r.x, b->x_col, b->n);
    t.shift = r.m = vselect(*most == -(real)INFINITY, (vec){0}, *most);
    r.e = b->keeps ? (real *)b->e + i / VL * b->e_row : NULL;
    r.e_col = b->e_col;
    t.sum = lanes_sum_exp(&t.low, k, &r);
    if (b->op == SDPA_LOGSUMEXP && vany(t.shift == (real)INFINITY)) sums_at_infinity(b, i, &t);
    return t;
}

/* The sums of a chunk of backward functions, of SUMMED vectors of rows or of one. Returns how many. */
INLINE int lanes_backward(const sdpa_softmax_block *b, int64_t i, lanes_stats *t) {
    const int64_t size = sdpa_size_of(b->dtype), at = i / VL;
    const lane_pairs r = {(const char *)b->x + at * b->x_row * size, (const char *)b->g + at * b->g_row * size,
                          b->x_col * size, b->g_col * size, b->n};
    const bool next = b->x_row == VL && b->g_row == VL, /* vectors of rows lie side by side */
        some = next && i + SUMMED * VL <= b->n_rows && b->n >= HALF && b->n <= BLOCK;
    const int count = some ? SUMMED : 1;
    vec sum[SUMMED], low[SUMMED];
    if (b->op == SDPA_SOFTMAX_BACKWARD) {
        lanes_products(b->dtype, sum, low, &r, some);
    } else {
        lanes_gradients(b->dtype, sum, low, &r, some);
    }
    for (int u = 0; u < count; u++) t[u] = (lanes_stats){{0}, sum[u], low[u]};
    return count;
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

/* The results of x in forward functions where the sum of the row is NaN. */
INLINE vec nan_or_left_out(sdpa_softmax_op op, vec x) {
    const vec left_out = vset1(op == SDPA_SOFTMAX ? 0 : -(real)INFINITY);
    return vselect(x == -(real)INFINITY, left_out, vset1((real)NAN));
}

/* Stores the first n lanes of y as elements of `dtype`. */
NOINLINE void lanes_put_other(char *to, vec y, int64_t n, sdpa_dtype dtype) {
    if (n >= VL) {
        vstore_as(dtype, to, y);
    } else {
        real part[VL];
        vstore(part, y);
        store(to, part, n, sdpa_size_of(dtype), dtype);
    }
}

INLINE void lanes_put(char *to, vec y, int64_t n, sdpa_dtype dtype) {
    if (n >= VL && dtype == REAL_DTYPE) {
        vstore((real *)to, y);
    } else if (n >= VL && WIDENS_F16 && dtype == SDPA_F16 && SDPA_REAL == 32) {
        vstore_as(SDPA_F16, to, y);
    } else {
        lanes_put_other(to, y, n, dtype);
    }
}

/* Constants of the rows of a block, by lane. */
typedef struct lanes_constants {
    real shift[SDPA_SOFTMAX_ROWS], sum[SDPA_SOFTMAX_ROWS], low[SDPA_SOFTMAX_ROWS];
} lanes_constants;

/* The results of element j of all rows, for constant types. What is left out has its result whatever else the row has. A
 * kept exponential does not tell, so that rows with a NaN may keep none. */
INLINE void lanes_write(sdpa_softmax_op op, bool exp_first, sdpa_dtype dtype, sdpa_dtype out_dtype,
                        const softmax_constants *k, const lanes_constants *t, const sdpa_softmax_block *b, int64_t j) {
    const bool gradient = op == SDPA_SOFTMAX_BACKWARD || op == SDPA_LOG_SOFTMAX_BACKWARD,
               kept = op == SDPA_SOFTMAX && !exp_first;
    const int64_t size = sdpa_size_of(dtype), out_size = sdpa_size_of(out_dtype),
                  x_row = (kept ? b->e_row : b->x_row) * size, g_row = b->g_row * size, out_row = b->out_row * out_size,
                  n = b->n_rows;
    const char *x = (kept ? b->e : b->x), *g = b->g;
    char *out = (char *)b->out + j * b->out_col * out_size;
    x += j * (kept ? b->e_col : b->x_col) * size;
    if (gradient) g += j * b->g_col * size;
    for (int64_t i = 0; i < n; i += VL, x += x_row, g += gradient ? g_row : 0, out += out_row) {
        const vec shift = vload(t->shift + i), sum = vload(t->sum + i), low = vload(t->low + i), z = {0},
                  from = vload_as(dtype, x), grad = gradient ? vload_as(dtype, g) : z;
        vec y = from;
        if (exp_first) y = softmax_term(SUM_EXP, k, shift, y, z);
        softmax_results(op, k, shift, sum, low, &y, &grad, 1);
        if ((exp_first || op == SDPA_LOG_SOFTMAX) && vany(y != y)) y = vselect(y == y, y, nan_or_left_out(op, from));
        if (n - i >= VL) {
            vstore_as(out_dtype, out, y);
        } else {
            lanes_put_other(out, y, n - i, out_dtype);
        }
    }
}

/* All results, for constant types. */
INLINE void lanes_write_as(sdpa_softmax_op op, bool exp_first, sdpa_dtype dtype, sdpa_dtype out_dtype,
                           const softmax_constants *constants, const lanes_constants *t,
                           const sdpa_softmax_block *given) {
    const softmax_constants k = *constants; /* copies that no store can alias */
    const sdpa_softmax_block b = *given;
    for (int64_t j = 0; j < b.n; j++) lanes_write(op, exp_first, dtype, out_dtype, &k, t, &b, j);
}

INLINE void lanes_write_all(sdpa_softmax_op op, bool exp_first, const softmax_constants *k, const lanes_constants *t,
                            const sdpa_softmax_block *b) {
#if SDPA_REAL == 32
    const bool forward = is_forward(op);
    if (b->out_dtype == SDPA_F16) {
        lanes_write_as(op, exp_first, forward ? SDPA_F32 : SDPA_F16, SDPA_F16, k, t, b);
        return;
    }
    if (b->out_dtype == SDPA_BF16) {
        lanes_write_as(op, exp_first, forward ? SDPA_F32 : SDPA_BF16, SDPA_BF16, k, t, b);
        return;
    }
#endif
    lanes_write_as(op, exp_first, REAL_DTYPE, REAL_DTYPE, k, t, b);
}

NOINLINE void lanes_result(const sdpa_softmax_block *b, const softmax_constants *k, const lanes_constants *t) {
    switch (b->op) {
    case SDPA_SOFTMAX:
        if (b->keeps) {
            lanes_write_all(SDPA_SOFTMAX, false, k, t, b);
        } else {
            lanes_write_all(SDPA_SOFTMAX, true, k, t, b);
        }
        break;
    case SDPA_LOG_SOFTMAX:
        lanes_write_all(SDPA_LOG_SOFTMAX, false, k, t, b);
        break;
    case SDPA_SOFTMAX_BACKWARD:
        lanes_write_all(SDPA_SOFTMAX_BACKWARD, false, k, t, b);
        break;
    case SDPA_LOG_SOFTMAX_BACKWARD:
        lanes_write_all(SDPA_LOG_SOFTMAX_BACKWARD, false, k, t, b);
        break;
    case SDPA_LOGSUMEXP_BACKWARD:
        lanes_write_all(SDPA_LOGSUMEXP_BACKWARD, false, k, t, b);
        break;
    case SDPA_SOFTMAX_JACOBIAN:
        lanes_write_all(SDPA_SOFTMAX_JACOBIAN, false, k, t, b);
        break;
    case SDPA_LOGSUMEXP:
        break;
    }
}

/* The sum of n <= SDPA_SOFTMAX_FEW terms in the order of row_sum. n is a constant here and below. */
INLINE vec few_sum(vec *low, const vec *term, int n) {
    const int n_slots = n < VL ? n : VL;
    const vec zero = {0};
    vec slot[SDPA_SOFTMAX_FEW], rest[SDPA_SOFTMAX_FEW];
    EACH(l, n_slots) {
        slot[l] = zero + term[l];
        if (l + VL < n) slot[l] += term[l + VL];
        if (l + 2 * VL < n) slot[l] += l + 3 * VL < n ? term[l + 2 * VL] + term[l + 3 * VL] : term[l + 2 * VL];
        rest[l] = zero;
    }
    UNROLL for (int h = VL / 2; h > 0; h /= 2){EACH(l, n_slots){if (l >= h || l + h >= n_slots) continue;
    if (2 * h < n_slots) rest[l] += rest[l + h];
    add_exactly(slot + l, rest + l, slot[l + h]);
}
}
*low = vselect(rest[0] == rest[0], rest[0], zero);
return slot[0];
}

/* softmax_terms and softmax_results of n elements. */
INLINE void few_terms(vec *term, int n, enum sum_kind kind, const softmax_constants *k, vec m, const vec *x,
                      const vec *g) {
    softmax_terms(term, n < MOST_AT_ONCE ? n : MOST_AT_ONCE, kind, k, m, x, g);
    if (n > MOST_AT_ONCE) {
        softmax_terms(term + MOST_AT_ONCE, n - MOST_AT_ONCE, kind, k, m, x + MOST_AT_ONCE, g + MOST_AT_ONCE);
    }
}

INLINE void few_results(sdpa_softmax_op op, const softmax_constants *k, const lanes_stats *t, vec *y, const vec *g,
                        int n) {
    softmax_results(op, k, t->shift, t->sum, t->low, y, g, n < MOST_AT_ONCE ? n : MOST_AT_ONCE);
    if (n > MOST_AT_ONCE) {
        softmax_results(op, k, t->shift, t->sum, t->low, y + MOST_AT_ONCE, g + MOST_AT_ONCE, n - MOST_AT_ONCE);
    }
}

/* The n elements of a vector of rows, at `from`, which need conversion. */
NOINLINE void few_convert(sdpa_dtype dtype, vec *x, const char *from, int64_t col, int64_t n) {
    for (int64_t j = 0; j < n; j++) x[j] = vload_any(dtype, from + j * col);
}

INLINE void few_load(sdpa_dtype dtype, vec *x, const void *from, int64_t row, int64_t col, int64_t i, int n) {
    const int64_t size = sdpa_size_of(dtype);
    const char *p = (const char *)from + i / VL * row * size;
    if (dtype == REAL_DTYPE) {
        EACH(j, n) x[j] = vload((const real *)p + j * col);
    } else {
        few_convert(dtype, x, p, col * size, n);
    }
}

/* A vector of rows of n elements, which stay in registers. op is a constant, too. */
INLINE void few_rows_of(sdpa_softmax_op op, const sdpa_softmax_block *b, const softmax_constants *k, int64_t i, int n) {
    const bool forward = is_forward(op);
    vec x[SDPA_SOFTMAX_FEW], g[SDPA_SOFTMAX_FEW], term[SDPA_SOFTMAX_FEW], most = vset1(-(real)INFINITY);
    lanes_stats t = {{0}, {0}, {0}};
    few_load(b->dtype, x, b->x, b->x_row, b->x_col, i, n);
    EACH(j, n) g[j] = (vec){0};
    if (!forward) few_load(b->dtype, g, b->g, b->g_row, b->g_col, i, n);
    EACH(j, n) most = forward ? vmax2(most, x[j]) : most;
    t.shift = vselect(most == -(real)INFINITY, (vec){0}, most);
    few_terms(term, n, forward ? SUM_EXP : op == SDPA_SOFTMAX_BACKWARD ? SUM_PRODUCT : SUM_GRADIENT, k, t.shift, x, g);
    t.sum = few_sum(&t.low, term, n);
    if (op == SDPA_LOGSUMEXP) {
        if (vany(t.shift == (real)INFINITY)) sums_at_infinity(b, i, &t);
        lanes_store(b, i, &t, most);
        return;
    }
    const ivec nan = t.sum != t.sum;
    const int64_t size = sdpa_size_of(b->out_dtype), out_col = b->out_col * size;
    char *out = (char *)b->out + i / VL * b->out_row * size;
    softmax_finishes(op, t.sum, t.low, &t.sum, &t.low);
    EACH(j, n) term[j] = op == SDPA_SOFTMAX ? term[j] : x[j];
    few_results(op, k, &t, term, g, n);
    if (forward && vany(nan)) {
        EACH(j, n) term[j] = vselect(nan, nan_or_left_out(op, x[j]), term[j]);
    }
    EACH(j, n) lanes_put(out + j * out_col, term[j], b->n_rows - i, b->out_dtype);
}

#define FEW(n)                                                                                                         \
    case n:                                                                                                            \
        for (int64_t i = 0; i < b->n_rows; i += VL) few_rows_of(op, b, k, i, n);                                       \
        break
INLINE void lanes_few(sdpa_softmax_op op, const sdpa_softmax_block *given, const softmax_constants *constants) {
    const softmax_constants own = *constants, *k = &own; /* copies that no store can alias */
    const sdpa_softmax_block block = *given, *b = &block;
    switch (b->n) {
        FEW(2);
        FEW(3);
        FEW(4);
        FEW(5);
        FEW(6);
        FEW(7);
        FEW(8);
    }
}
#undef FEW

/* Whether rows of few elements are done. */
static bool few_done(const sdpa_softmax_block *b, const softmax_constants *k) {
    const sdpa_softmax_phase phase = b->op == SDPA_LOGSUMEXP ? SDPA_SOFTMAX_SUM : SDPA_SOFTMAX_WHOLE;
    if (b->n < 2 || b->n > SDPA_SOFTMAX_FEW || b->phase != phase) return false;
    switch (b->op) {
    case SDPA_SOFTMAX:
        lanes_few(SDPA_SOFTMAX, b, k);
        return true;
    case SDPA_LOG_SOFTMAX:
        lanes_few(SDPA_LOG_SOFTMAX, b, k);
        return true;
    case SDPA_LOGSUMEXP:
        lanes_few(SDPA_LOGSUMEXP, b, k);
        return true;
    case SDPA_SOFTMAX_BACKWARD:
        lanes_few(SDPA_SOFTMAX_BACKWARD, b, k);
        return true;
    case SDPA_LOG_SOFTMAX_BACKWARD:
        lanes_few(SDPA_LOG_SOFTMAX_BACKWARD, b, k);
        return true;
    case SDPA_LOGSUMEXP_BACKWARD:
    case SDPA_SOFTMAX_JACOBIAN:
        break;
    }
    return false;
}

/* Sums of all rows, and then results: sums take the elements of some rows one after the other, and results are written
 * line by line, as they lie in memory. */
NOINLINE bool lanes_many(const sdpa_softmax_block *b, const softmax_constants *k) {
    lanes_constants constants;
    bool any_nan = false;
    for (int64_t i = 0; i < b->n_rows;) {
        lanes_stats t[SUMMED];
        vec most = vset1(-(real)INFINITY);
        int count = 1;
        if (b->phase == SDPA_SOFTMAX_WRITE) {
        } else if (is_forward(b->op)) {
            t[0] = lanes_forward(b, k, i, &most);
        } else {
            count = lanes_backward(b, i, t);
        }
        for (int u = 0; u < count; u++, i += VL) {
            if (b->phase == SDPA_SOFTMAX_SUM) {
                lanes_store(b, i, t + u, most);
                continue;
            }
            any_nan |= vany(lanes_finish(b, i, t + u));
            vstore(constants.shift + i, t[u].shift);
            vstore(constants.sum + i, t[u].sum);
            vstore(constants.low + i, t[u].low);
        }
    }
    if (b->keeps && any_nan) return false;
    if (b->phase != SDPA_SOFTMAX_SUM) lanes_result(b, k, &constants);
    return true;
}

static bool softmax_lanes(const sdpa_softmax_block *b) {
    const softmax_constants k = softmax_load(b->scale);
    return few_done(b, &k) || lanes_many(b, &k);
}

#endif
