/* The softmax family, for rows in memory (softmax_rows) or one row per lane (softmax_lanes). A row takes up to three
 * passes: its maximum, the sum of exp(x - maximum), which is as accurate as the exponentials (Blanchard, Higham & Higham
 * 2021), and the result. Of a row longer than a chunk, each chunk has its own maximum and sum, which the driver puts
 * together (Milakov & Gimelshein 2018).
 *
 * Both kernels sum in the same order, so that a result does not depend on how its row lies in memory: element j belongs
 * to slot j % VL; each slot is cut into blocks of SUM_CHAINS * SUM_CHAIN elements, dealt to SUM_CHAINS partial sums
 * that start from zero; blocks, and then slots as a binary tree, are added with their rounding errors kept. The
 * relative error is at most (SUM_CHAIN + 3) u for any n, with u the unit roundoff, and a fraction of u on average; in
 * rows of several chunks of float64 the factors of the chunks add 3 u.
 * Elements have the compute type already; an element that is left out is -inf. */
#ifndef SDPA_KERNEL_SOFTMAX_H
#define SDPA_KERNEL_SOFTMAX_H

#include "common.h"
#include "vmath.h"

#define SUM_CHAINS 4
#define SUM_CHAIN 8
/* How many terms of a sum are computed in lockstep: more than one is faster with AVX2 (docs/history/attempts.md). */
#define AT_ONCE (VEC_BYTES == 32 ? MOST_AT_ONCE : 1)
_Static_assert(SUM_CHAINS % AT_ONCE == 0, "");
/* Whether the next row is fetched beside stores, and the bytes of a row up to which that pays: see
 * docs/history/attempts.md. */
#define FETCH_STORED (VEC_BYTES == 64 && SDPA_REAL == 32)
#define FETCH_ROW 4096

enum sum_kind { SUM_EXP, SUM_PRODUCT, SUM_GRADIENT };

typedef struct softmax_constants {
    real c, c_high, c_low, d_min, d_max, inverse;
} softmax_constants;

INLINE softmax_constants softmax_load(const sdpa_softmax_scale *s) {
    return (softmax_constants){(real)s->c,     (real)s->c_high, (real)s->c_low,
                               (real)s->d_min, (real)s->d_max,  (real)s->inverse};
}

/* d = exp(d / t) for n vectors d <= d_max or NaN, see vexp2_products; results below the normal numbers may be 0. */
INLINE void softmax_exps(const softmax_constants *k, vec *d, int n) {
    vexp2_products(d, n, k->c, k->c_high, k->c_low, k->d_min);
}

/* Mask of lanes 0 .. n-1. */
INLINE ivec first_lanes(int n) {
    ivec lane;
    UNROLL for (int l = 0; l < VL; l++) lane[l] = l;
    return lane < n;
}

/* A sum and its rounding error. */
typedef struct softmax_sum {
    real sum, low;
} softmax_sum;

/* The low part is NaN once the sum is infinite; 0 replaces it. */
INLINE softmax_sum sum_result(real sum, real low) { return (softmax_sum){sum, low == low ? low : 0}; }

/* The terms of n elements x, g in the sum of their row. Past the end x = -inf (0 in SUM_PRODUCT) and g = 0. */
INLINE void softmax_terms(vec *term, int n, enum sum_kind kind, const softmax_constants *k, vec m, const vec *x,
                          const vec *g) {
    switch (kind) {
    case SUM_EXP:
        EACH(i, n) term[i] = x[i] - m;
        softmax_exps(k, term, n);
        break;
    case SUM_PRODUCT:
        EACH(i, n) term[i] = x[i] * g[i];
        break;
    case SUM_GRADIENT:
        EACH(i, n) term[i] = vselect(x[i] == -(real)INFINITY, (vec){0}, g[i]);
        break;
    }
}

INLINE vec softmax_term(enum sum_kind kind, const softmax_constants *k, vec m, vec x, vec g) {
    vec term;
    softmax_terms(&term, 1, kind, k, m, &x, &g);
    return term;
}

/* sum + term, the term of x and g; products are not rounded first. */
INLINE vec add_term(enum sum_kind kind, vec sum, vec term, vec x, vec g) {
    return kind == SUM_PRODUCT ? vmuladd(x, g, sum) : sum + term;
}

/* Elements of out, n vectors of them: y holds x, and then the results. m and s belong to the row or, in SDPA_SOFTMAX, to
 * its chunk, see softmax_finish. s_low has the digits that s lacks; they matter where s cancels against g in
 * SDPA_SOFTMAX_BACKWARD, for a weight near 1. All vectors have the same m and s (step 0), or each its own (1). */
INLINE void softmax_results(sdpa_softmax_op op, const softmax_constants *k, const vec *m, const vec *s,
                            const vec *s_low, int step, vec *y, const vec *g, int n) {
    vec p[MOST_AT_ONCE];
    const vec left_out = vset1(-(real)INFINITY);
    switch (op) {
    case SDPA_SOFTMAX: /* y holds the exponentials */
        EACH(i, n) y[i] = vmuladd(y[i], s[i * step], y[i] * s_low[i * step]);
        break;
    case SDPA_LOG_SOFTMAX:
        EACH(i, n) y[i] = vmulsub(y[i] - m[i * step], vset1(k->inverse), s[i * step]);
        break;
    case SDPA_SOFTMAX_BACKWARD:
        EACH(i, n) y[i] = y[i] * ((g[i] - s[i * step]) - s_low[i * step]) * k->inverse;
        break;
    case SDPA_LOG_SOFTMAX_BACKWARD:
        EACH(i, n) p[i] = vmin2(vset1(k->d_max), y[i]);
        softmax_exps(k, p, n);
        EACH(i, n) y[i] = vselect(y[i] == left_out, (vec){0}, vmuladd(-p[i], s[i * step], g[i]) * k->inverse);
        break;
    case SDPA_LOGSUMEXP_BACKWARD:
        EACH(i, n) p[i] = vmin2(vset1(k->d_max), y[i] - m[i * step]);
        softmax_exps(k, p, n);
        EACH(i, n) y[i] = vselect(y[i] == left_out, (vec){0}, p[i] * s[i * step]);
        break;
    case SDPA_SOFTMAX_JACOBIAN:
        EACH(i, n) y[i] = y[i] * s[i * step];
        break;
    case SDPA_LOGSUMEXP:
        break;
    }
}

/* log(l + l_low), 0 for l = 0. */
INLINE double log_sum(double l, double l_low) {
    const double low = l_low == l_low ? l_low : 0, y = SDPA_REAL == 32 ? log_of(l + low) : log_of(l) + low / l;
    return l == 0 ? 0 : y;
}

/* The s of softmax_results from the sum of the row. In SDPA_SOFTMAX the chunk's exponentials times `factor` are those
 * relative to the row's maximum. */
INLINE void softmax_finish(sdpa_softmax_op op, double l, double l_low, double factor, real *s, real *s_low) {
    l_low = l_low == l_low ? l_low : 0;
    if (op == SDPA_SOFTMAX) {
        double r = l == 0 ? 0 : 1 / l, rest = l == 0 ? 0 : (fma(-r, l, 1) - r * l_low) * r, scaled = r * factor;
        *s = (real)scaled;
        *s_low = (real)((scaled - (double)*s) + fma(r, factor, -scaled) + rest * factor);
    } else if (op == SDPA_LOG_SOFTMAX) {
        *s = (real)log_sum(l, l_low);
        *s_low = 0;
    } else {
        *s = (real)(l + l_low);
        *s_low = *s - *s == 0 ? (real)((l - (double)*s) + l_low) : 0; /* s may be infinite */
    }
}

/* softmax_finish of SDPA_SOFTMAX for rows of a single chunk, whose l has the compute type. */
INLINE vec softmax_inverse(vec l, vec l_low, vec *s_low) {
#ifdef HAVE_FMA
    const ivec empty = l == 0;
    const vec s = 1 / l, rest = vmuladd(-s, l_low, vmulsub(-s, l, vset1(-1))) * s;
    *s_low = vselect(empty, (vec){0}, rest);
    return vselect(empty, (vec){0}, s);
#else
    vec s;
    for (int i = 0; i < VL; i++) {
        real inverse, low;
        softmax_finish(SDPA_SOFTMAX, (double)l[i], (double)l_low[i], 1, &inverse, &low);
        s[i] = inverse;
        (*s_low)[i] = low;
    }
    return s;
#endif
}

/* log_sum of vectors. */
NOINLINE vec log_sums_of(vec l, vec l_low) {
    real sum[VL], low[VL];
    vstore(sum, l);
    vstore(low, l_low);
    SIMD for (int i = 0; i < VL; i++) sum[i] = (real)log_sum((double)sum[i], (double)low[i]);
    return vload(sum);
}

/* softmax_finish for rows of a single chunk, whose l has the compute type. */
INLINE void softmax_finishes(sdpa_softmax_op op, vec l, vec l_low, vec *s, vec *s_low) {
    const vec zero = {0};
    *s_low = zero;
    if (op == SDPA_SOFTMAX) {
        *s = softmax_inverse(l, l_low, s_low);
    } else if (op == SDPA_LOG_SOFTMAX) {
        *s = log_sums_of(l, l_low);
    } else {
        *s = l;
        add_exactly(s, s_low, l_low);
        *s_low = vselect(*s - *s == 0, *s_low, zero); /* s may be infinite */
    }
}

/* What to subtract in a chunk whose maximum is m: 0 where it has none, so that exp(-inf - 0) = 0. */
INLINE real softmax_shift(double m) { return m == -INFINITY ? 0 : (real)m; }

/* A vector of a row of n elements from element j on, with `fill` past the end. */
INLINE vec row_part(const real *x, int64_t j, int64_t n, real fill) {
    if (n - j >= VL) return vload(x + j);
    vec part = vload_partial(x + j, (int)(n - j));
    return fill == 0 ? part : vselect(first_lanes((int)(n - j)), part, vset1(fill));
}

INLINE void row_part_store(real *out, vec x, int64_t j, int64_t n) {
    if (n - j >= VL) {
        vstore(out + j, x);
    } else {
        vstore_partial(out + j, x, (int)(n - j));
    }
}

/* NaN may be lost here; the sum detects it. */
NOINLINE real row_max(const real *x, int64_t n) {
    vec m[SUM_CHAINS];
    UNROLL for (int a = 0; a < SUM_CHAINS; a++) m[a] = vset1(-(real)INFINITY);
    int64_t j = 0;
    for (; j + SUM_CHAINS * VL <= n; j += SUM_CHAINS * VL) {
        UNROLL for (int a = 0; a < SUM_CHAINS; a++) m[a] = vmax2(m[a], vload(x + j + a * VL));
    }
    for (; j < n; j += VL) m[0] = vmax2(m[0], row_part(x, j, n, -(real)INFINITY));
    return vreduce_max(vmax2(vmax2(m[0], m[1]), vmax2(m[2], m[3])));
}

/* Sums over the lanes as a binary tree; lane 0 has the result. */
INLINE softmax_sum sum_lanes(vec sum, vec low) {
    UNROLL for (int h = VL / 2; h > 0; h /= 2) {
        vec other = vswap(sum, h);
        low += vswap(low, h);
        add_exactly(&sum, &low, other);
    }
    return sum_result(sum[0], low[0]);
}

/* The sum over a row. `e`, unless NULL, receives the terms. SUM_EXP fetches the next row, `next` elements away, and its
 * place in e where FETCH_STORED: see next_row. */
INLINE softmax_sum row_sum(enum sum_kind kind, const softmax_constants *constants, real m, const real *x, const real *g,
                           real *e, int64_t n, int64_t next) {
    const softmax_constants own = *constants, *k = &own; /* a copy that no store can alias */
    const real fill = kind == SUM_EXP ? -(real)INFINITY : 0;
    vec shift = vset1(m), sum = {0}, low = {0};
    for (int64_t j0 = 0; j0 < n; j0 += SUM_CHAIN * SUM_CHAINS * VL) {
        int64_t end = j0 + SUM_CHAIN * SUM_CHAINS * VL < n ? j0 + SUM_CHAIN * SUM_CHAINS * VL : n, j = j0;
        vec acc[SUM_CHAINS];
        UNROLL for (int a = 0; a < SUM_CHAINS; a++) acc[a] = (vec){0};
        for (; j + SUM_CHAINS * VL <= end; j += SUM_CHAINS * VL) {
            UNROLL for (int a0 = 0; a0 < SUM_CHAINS; a0 += AT_ONCE) {
                vec y[AT_ONCE], element[AT_ONCE], term[AT_ONCE];
                EACH(a, AT_ONCE) y[a] = g ? vload(g + j + (a0 + a) * VL) : (vec){0};
                EACH(a, AT_ONCE) element[a] = vload(x + j + (a0 + a) * VL);
                softmax_terms(term, AT_ONCE, kind, k, shift, element, y);
                EACH(a, AT_ONCE) {
                    const int64_t at = j + (a0 + a) * VL;
                    if (e) vstore(e + at, term[a]);
                    if (kind == SUM_EXP && (!e || FETCH_STORED)) __builtin_prefetch(x + next + at, 0, 2);
                    if (e && FETCH_STORED) __builtin_prefetch(e + next + at, 1, 2);
                    acc[a0 + a] = add_term(kind, acc[a0 + a], term[a], element[a], y[a]);
                }
            }
        }
        vec part[SUM_CHAINS]; /* indexed, hence in memory; acc stays in registers */
        UNROLL for (int a = 0; a < SUM_CHAINS; a++) part[a] = acc[a];
        for (int a = 0; j < end; a++, j += VL) {
            vec y = g ? row_part(g, j, n, 0) : (vec){0};
            vec element = row_part(x, j, n, fill), term = softmax_term(kind, k, shift, element, y);
            if (e) row_part_store(e, term, j, n);
            part[a] = add_term(kind, part[a], term, element, y);
        }
        add_exactly(&sum, &low, sum_of_four(part, 1));
    }
    return sum_lanes(sum, low);
}

NOINLINE softmax_sum row_sum_exp(const softmax_constants *k, real m, const real *x, real *e, int64_t n, int64_t next) {
    return row_sum(SUM_EXP, k, m, x, NULL, e, n, next);
}

NOINLINE softmax_sum row_sum_product(const softmax_constants *k, const real *x, const real *g, int64_t n) {
    return row_sum(SUM_PRODUCT, k, 0, x, g, NULL, n, 0);
}

NOINLINE softmax_sum row_sum_gradient(const softmax_constants *k, const real *x, const real *g, int64_t n) {
    return row_sum(SUM_GRADIENT, k, 0, x, g, NULL, n, 0);
}

/* `exp_first`: x is the input of SDPA_SOFTMAX rather than its exponentials. */
INLINE void row_write(sdpa_softmax_op op, bool exp_first, const softmax_constants *k, real m, real s, real s_low,
                      const real *x, const real *g, real *out, int64_t n) {
    const vec vm = vset1(m), vs = vset1(s), vs_low = vset1(s_low);
    int64_t j = 0;
    for (; AT_ONCE > 1 && !exp_first && j + AT_ONCE * VL <= n; j += AT_ONCE * VL) {
        vec y[AT_ONCE], z[AT_ONCE];
        EACH(a, AT_ONCE) y[a] = vload(x + j + a * VL);
        EACH(a, AT_ONCE) z[a] = g ? vload(g + j + a * VL) : (vec){0};
        softmax_results(op, k, &vm, &vs, &vs_low, 0, y, z, AT_ONCE);
        EACH(a, AT_ONCE) vstore(out + j + a * VL, y[a]);
    }
    for (; j < n; j += VL) {
        vec y = row_part(x, j, n, 0);
        const vec z = g ? row_part(g, j, n, 0) : (vec){0};
        if (exp_first) y = softmax_term(SUM_EXP, k, vm, y, z);
        softmax_results(op, k, &vm, &vs, &vs_low, 0, &y, &z, 1);
        row_part_store(out, y, j, n);
    }
}

/* Fills a row whose sum is NaN. */
COLD NOINLINE void row_fill_nan(real left_out, const real *x, real *out, int64_t n) {
    for (int64_t j = 0; j < n; j++) out[j] = x[j] == -(real)INFINITY ? left_out : (real)NAN;
}

/* log sum exp is +inf in a row with +inf, for which the sum of exp(x - m) is NaN, but NaN in a row with NaN. */
INLINE real sum_at_infinity(const real *x, int64_t stride, int64_t n) {
    bool nan = false;
    for (int64_t j = 0; j < n; j++) nan |= x[j * stride] != x[j * stride];
    return nan ? (real)NAN : (real)INFINITY;
}

INLINE bool is_forward(sdpa_softmax_op op) {
    return op == SDPA_SOFTMAX || op == SDPA_LOG_SOFTMAX || op == SDPA_LOGSUMEXP;
}

/* How far the row is that row_sum_exp fetches, in elements; 0: none. While nothing is stored, there is room on the way to
 * memory. Beside stores it pays for short rows alone. */
INLINE int64_t next_row(const sdpa_softmax_block *b, const real *e) {
    if (!e) return b->x_row;
    return FETCH_STORED && b->n * (int64_t)sizeof(real) <= FETCH_ROW && b->x_row == b->out_row ? b->x_row : 0;
}

/* An element of sdpa_softmax_stats. */
typedef struct row_total {
    double m, l, l_low;
} row_total;

/* The stats of a chunk of row i. `most`: its maximum; `e`, unless NULL, receives exponentials. */
INLINE row_total row_stats(const sdpa_softmax_block *b, const softmax_constants *k, int64_t i, real most, real *e) {
    const real *x = (const real *)b->x + i * b->x_row, *g = (const real *)b->g + i * b->g_row;
    double m = -INFINITY;
    softmax_sum l = {0, 0};
    if (is_forward(b->op)) {
        m = (double)most;
        if (b->op == SDPA_LOGSUMEXP && most == (real)INFINITY) {
            l.sum = sum_at_infinity(x, 1, b->n);
        } else {
            l = row_sum_exp(k, softmax_shift(m), x, e, b->n, next_row(b, e));
        }
    } else if (b->op == SDPA_SOFTMAX_BACKWARD) {
        l = row_sum_product(k, x, g, b->n);
    } else { /* SDPA_LOG_SOFTMAX_BACKWARD: the other functions have no sums */
        l = row_sum_gradient(k, x, g, b->n);
    }
    return (row_total){m, (double)l.sum, (double)l.low};
}

/* The m and s of softmax_results for a chunk of a row, and the row's lse where that is given. */
typedef struct row_end {
    real m, s, s_low, lse;
    bool nan;
} row_end;

/* Of a row that is not whole: from the stats of its chunk and of the row. */
INLINE row_end row_finish(const sdpa_softmax_block *b, int64_t i) {
    const bool softmax = b->op == SDPA_SOFTMAX;
    const double m = b->row.m[i], l = b->row.l[i];
    row_end end = {.m = softmax_shift(softmax ? b->stats.m[i] : m), .lse = (real)m, .nan = l != l};
    softmax_finish(b->op, l, b->row.l_low[i], softmax ? b->stats.factor[i] : 1, &end.s, &end.s_low);
    return end;
}

INLINE row_end row_finish_whole(sdpa_softmax_op op, row_total t) {
    vec s, low;
    softmax_finishes(op, vset1((real)t.l), vset1((real)t.l_low), &s, &low);
    return (row_end){.m = softmax_shift(t.m), .s = s[0], .s_low = low[0], .nan = t.l != t.l};
}

/* Writes a chunk of row i of the result. */
INLINE void row_result(const sdpa_softmax_block *b, const softmax_constants *k, int64_t i, const row_end *end) {
    const real *x = (const real *)b->x + i * b->x_row, *g = (const real *)b->g + i * b->g_row;
    real *out = (real *)b->out + i * b->out_row;
    const real m = end->m, s = end->s, s_low = end->s_low;
    const int64_t n = b->n;
    switch (b->op) {
    case SDPA_SOFTMAX:
        if (end->nan) {
            row_fill_nan(0, x, out, n);
        } else if (b->keeps) {
            row_write(SDPA_SOFTMAX, false, k, m, s, s_low, out, NULL, out, n);
        } else {
            row_write(SDPA_SOFTMAX, true, k, m, s, s_low, x, NULL, out, n);
        }
        break;
    case SDPA_LOG_SOFTMAX:
        if (end->nan) {
            row_fill_nan(-(real)INFINITY, x, out, n);
        } else {
            row_write(SDPA_LOG_SOFTMAX, false, k, m, s, 0, x, NULL, out, n);
        }
        break;
    case SDPA_SOFTMAX_BACKWARD:
        row_write(SDPA_SOFTMAX_BACKWARD, false, k, m, s, s_low, x, g, out, n);
        break;
    case SDPA_LOG_SOFTMAX_BACKWARD:
        row_write(SDPA_LOG_SOFTMAX_BACKWARD, false, k, m, s, 0, x, g, out, n);
        break;
    case SDPA_LOGSUMEXP_BACKWARD:
        row_write(SDPA_LOGSUMEXP_BACKWARD, false, k, end->lse, s, 0, x, NULL, out, n);
        break;
    case SDPA_SOFTMAX_JACOBIAN:
        row_write(SDPA_SOFTMAX_JACOBIAN, false, k, m, s, 0, x, NULL, out, n);
        break;
    case SDPA_LOGSUMEXP:
        break;
    }
}

static void softmax_rows(const sdpa_softmax_block *b) {
    const softmax_constants k = softmax_load(b->scale);
    const bool sums = b->phase != SDPA_SOFTMAX_WRITE, writes = b->phase != SDPA_SOFTMAX_SUM,
               maxima = sums && is_forward(b->op); /* there is at least one row */
    real most = maxima ? row_max(b->x, b->n) : 0;
    row_end before = {0};
    /* A row is written after the sum of the next one, and that one's maximum is taken before: nothing waits. */
    for (int64_t i = 0; i <= b->n_rows; i++) {
        row_end end = {0};
        if (i < b->n_rows) {
            row_total t = {0, 0, 0};
            if (sums) t = row_stats(b, &k, i, most, b->keeps ? (real *)b->out + i * b->out_row : NULL);
            if (maxima && i + 1 < b->n_rows) most = row_max((const real *)b->x + (i + 1) * b->x_row, b->n);
            if (writes) {
                end = sums ? row_finish_whole(b->op, t) : row_finish(b, i);
            } else {
                b->stats.m[i] = t.m;
                b->stats.l[i] = t.l;
                b->stats.l_low[i] = t.l_low;
            }
        }
        if (writes && i > 0) row_result(b, &k, i - 1, &before);
        before = end;
    }
}

static void log_sums(double *lse, const sdpa_softmax_stats *t, int64_t n) {
    const double *restrict m = t->m, *restrict l = t->l, *restrict low = t->l_low;
    double *restrict out = lse;
    SIMD for (int64_t i = 0; i < n; i++) {
        const double y = m[i] + log_sum(l[i], low[i]);
        out[i] = l[i] == 0 ? -(double)INFINITY : y;
    }
}

#endif
