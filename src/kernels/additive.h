/* Additive scores (Bahdanau et al. 2015): s = sum_c w[c] tanh(a[c] + b[c]) over the channels of a query's projection a
 * and a key's b.
 *
 * One exponential per token and channel, not one per pair: with A = e^(2a) and B = e^(2b), computed once per token,
 *
 *     tanh(a + b) = (A B - 1) / (A B + 1),
 *
 * and two channels share a division: w0 n0 / d0 + w1 n1 / d1 = (w0 n0 d1 + w1 n1 d0) / (d0 d1). The product A B is
 * rounded once, and A B - 1 is exact where A B is near 1, that is, where tanh is near 0: in all |error of tanh| <= 8 u,
 * u the unit roundoff, of which (1 - tanh^2) u comes from the rounding of A and B (measured by
 * tests/mechanisms/test_additive_precision.py).
 *
 * docs/history/attempts.md lists other forms that were tried; they are less precise or no faster.
 *
 * Where |a| or |b| is so large that A or B might leave the range of the type, map_exponentials stores NaN. The score is
 * then NaN, and is computed again from a + b. This depends on the pair alone, so no row's bits depend on another row. A
 * row of q or k holds its channels, padded to an even number, then their exponentials. */
#ifndef SDPA_KERNEL_ADDITIVE_H
#define SDPA_KERNEL_ADDITIVE_H

#include "scores.h"

/* Sums of this many channels (in the backward, keys) start from zero and are then added, which bounds the rounding of
 * long sums. */
#define ADDITIVE_TERMS 16

/* A B is limited to this: tanh is 1 long before, and the product of two such numbers is finite. */
#define ADDITIVE_MOST ((real)(SDPA_REAL == 32 ? 0x1p30 : 0x1p60))

/* A B + one, with one = 1 or -1. */
INLINE vec additive_product(vec a, real b, real one) {
    return vmin2(vset1(ADDITIVE_MOST), vmuladd(a, vset1(b), vset1(one)));
}

/* The score without exponentials: columns a (channels, q_row) of queries, projections b of a key. */
NOINLINE vec additive_direct(const real *a, int64_t q_row, const real *b, const real *w, int64_t channels) {
    vec sum = {0};
    for (int64_t c = 0; c < channels; c++) sum = vmuladd(vset1(w[c]), vtanh(vload(a + c * q_row) + b[c]), sum);
    return sum;
}

/* additive_scores for nk keys by nv vectors of queries at a time, so that each division's latency hides behind the
 * others. nk and nv are constants. */
INLINE void additive_sums(const sdpa_problem *p, const real *q, int64_t q_row, const rows *k, int64_t n, real *s,
                          int64_t s_row, int nk, int nv) {
    enum { MOST_KEYS = 4 };
    const int64_t channels = p->channels;
    const real *w = p->w_score;
    for (int64_t j = 0; j < n; j += nk) {
        const real *key[MOST_KEYS];
        UNROLL for (int i = 0; i < nk; i++) key[i] = k->p + (j + i < n ? j + i : n - 1) * k->row;
        vec sum[MOST_KEYS][SCORE_WIDTH] = {{{0}}};
        for (int64_t c0 = 0; c0 < channels; c0 += ADDITIVE_TERMS) {
            const int64_t c1 = channels - c0 < ADDITIVE_TERMS ? channels : c0 + ADDITIVE_TERMS;
            vec part[MOST_KEYS][SCORE_WIDTH] = {{{0}}};
            for (int64_t c = c0; c < c1; c += 2) {
                const real *e = q + (channels + c) * q_row;
                const vec w0 = vset1(w[c]), w1 = vset1(-w[c + 1]);
                UNROLL for (int i = 0; i < nk; i++) {
                    const real *b = key[i] + channels + c;
                    UNROLL for (int x = 0; x < nv; x++) {
                        const vec n0 = additive_product(vload(e + x * VL), b[0], -1), d0 = n0 + 2;
                        const vec n1 = additive_product(vload(e + q_row + x * VL), b[1], -1), d1 = n1 + 2;
                        part[i][x] += vmulsub(w0 * n0, d1, (w1 * n1) * d0) / (d0 * d1);
                    }
                }
            }
            UNROLL for (int i = 0; i < nk; i++) { UNROLL for (int x = 0; x < nv; x++) sum[i][x] += part[i][x]; }
        }
        UNROLL for (int i = 0; i < nk; i++) {
            if (j + i >= n) break;
            UNROLL for (int x = 0; x < nv; x++) {
                const ivec finite = sum[i][x] - sum[i][x] == 0;
                if (vany(~finite)) {
                    const vec direct = additive_direct(q + x * VL, q_row, key[i], w, channels);
                    sum[i][x] = vselect(finite, sum[i][x], direct);
                }
                vstore(s + (j + i) * s_row + x * VL, sum[i][x]);
            }
        }
    }
}

NOINLINE void additive_1(const sdpa_problem *p, const real *q, int64_t q_row, const rows *k, int64_t n, real *s,
                         int64_t s_row) {
    additive_sums(p, q, q_row, k, n, s, s_row, 4, 1);
}

NOINLINE void additive_panel(const sdpa_problem *p, const real *q, int64_t q_row, const rows *k, int64_t n, real *s,
                             int64_t s_row) {
    additive_sums(p, q, q_row, k, n, s, s_row, 1, SCORE_WIDTH);
}

/* s (n, s_row) = the scores of n keys, rows of k, by nv vectors of queries, a panel q (d_k, nv vectors). */
static void additive_scores(const sdpa_problem *p, const real *q, int nv, const rows *k, int64_t n, real *s,
                            int64_t s_row) {
    if (nv == SCORE_WIDTH) {
        additive_panel(p, q, nv * VL, k, n, s, s_row);
        return;
    }
    for (int x = 0; x < nv; x++) additive_1(p, q + x * VL, nv * VL, k, n, s + x * VL, s_row);
}

/* A block of queries and a block of keys in the backward. */
typedef struct additive_block {
    real *q;        /* pack_panels of d_k */
    const real *ds; /* (n, row): queries in the lanes */
    rows k;
    real *dq;    /* (d_k, row) */
    real *lanes; /* scratch as large as ds: ds again, one vector of queries after the other */
    real *part;  /* (n, 2, VL) of scratch, then (n, 2) */
    const unsigned char *state;
    int64_t row, j0, n;
} additive_block;

/* Copies dS to t->lanes, one vector of queries after the other, and sums it over the keys. Lanes of padding are left out
 * like masked pairs: a bias is NaN there where they see what no query does, and dK sums over the lanes. */
INLINE void additive_columns(const sdpa_unit *u, const additive_block *t, real *sums) {
    for (int64_t i = 0; i < u->n_i; i += VL) {
        vec sum = {0};
        if (t->state[i / VL] == PANEL_HIDDEN) continue;
        for (int64_t j = 0; j < t->n; j++) {
            const vec ds = vload(t->ds + j * t->row + i);
            vstore(t->lanes + i * t->n + j * VL, ds);
            sum += ds;
        }
        vstore(sums + i, sum);
    }
    for (int64_t i = u->n_i; i % VL != 0; i++) {
        for (int64_t j = 0; j < t->n; j++) t->lanes[(i - i % VL) * t->n + j * VL + i % VL] = (real)-0.0;
    }
}

/* A vector of queries and two channels of the backward: their columns of q, exponentials and dS. */
typedef struct additive_queries {
    const real *q, *ds;
    int64_t q_row;
    vec e[2];
} additive_queries;

/* r = 1 / (A B + 1) of channels c and c + 1 for key j, whose exponentials are b. */
INLINE void additive_reciprocals(const additive_block *t, const additive_queries *a, int64_t c, int64_t j,
                                 const real *b, bool known, vec *r) {
    vec d[2];
    UNROLL for (int h = 0; h < 2; h++) d[h] = additive_product(a->e[h], b[h], 1);
    const vec both = 1 / (d[0] * d[1]);
    UNROLL for (int h = 0; h < 2; h++) {
        r[h] = both * d[1 - h];
        if (known) continue;
        const vec tanh = vtanh(vload(a->q + h * a->q_row) + t->k.p[j * t->k.row + c + h]);
        r[h] = vselect(both == both, r[h], vselect(d[h] == d[h], 1 / d[h], (1 - tanh) / 2));
        r[h] = vselect((ivec)vload(a->ds + j * VL) == SIGN_BIT, (vec){0}, r[h]);
    }
}

/* Adds the terms -dS r (1 - r) of each key to `part` (n, 2 vectors), their sums over the keys to `slopes`, and the sums
 * of dS r to `values`. */
INLINE void additive_terms(const additive_block *t, const additive_queries *queries, int64_t c, const real *b,
                           bool known, real *part, vec *slopes, vec *values) {
    const additive_queries a = *queries; /* a copy that no store can alias */
    const int64_t n = t->n;
    for (int64_t j0 = 0; j0 < n; j0 += ADDITIVE_TERMS) {
        const int64_t j1 = n - j0 < ADDITIVE_TERMS ? n : j0 + ADDITIVE_TERMS;
        vec r[ADDITIVE_TERMS][2], some_slopes[2] = {{0}}, some_values[2] = {{0}};
        for (int64_t j = j0; j < j1; j++) additive_reciprocals(t, &a, c, j, b + 2 * j, known, r[j - j0]);
        for (int64_t j = j0; j < j1; j++) {
            const vec ds = vload(a.ds + j * VL);
            UNROLL for (int h = 0; h < 2; h++) {
                const vec one = r[j - j0][h], value = ds * one, slope = vmulsub(value, one, value);
                real *to = part + (2 * j + h) * VL;
                vstore(to, vload(to) + slope);
                some_slopes[h] += slope;
                some_values[h] += value;
            }
        }
        UNROLL for (int h = 0; h < 2; h++) {
            slopes[h] += some_slopes[h];
            values[h] += some_values[h];
        }
    }
}

NOINLINE void additive_terms_known(const additive_block *t, const additive_queries *a, int64_t c, const real *b,
                                   real *part, vec *slopes, vec *values) {
    additive_terms(t, a, c, b, true, part, slopes, values);
}

COLD NOINLINE void additive_terms_missing(const additive_block *t, const additive_queries *a, int64_t c, const real *b,
                                          real *part, vec *slopes, vec *values) {
    additive_terms(t, a, c, b, false, part, slopes, values);
}

/* With r = 1 / (A B + 1), tanh = 1 - 2 r and its slope is 4 r (1 - r). Adds to dq the sums over keys of -dS r (1 - r)
 * and, in its second half, of dS tanh; to rows j0 .. of dK the sums over queries of -dS r (1 - r). `known`: no
 * exponential is missing. Otherwise missing ones are handled, and masked pairs, marked -0, are left out even if they
 * hold NaN. */
NOINLINE void additive_slopes(const sdpa_unit *u, const additive_block *t, bool known) {
    const int64_t channels = u->problem->channels;
    real *part = t->part, *b = part + 2 * VL * t->n, sums[SDPA_QUERY_BLOCK];
    additive_columns(u, t, sums);
    for (int64_t c = 0; c < channels; c += 2) {
        real *dq = t->dq + c * t->row;
        for (int64_t j = 0; j < t->n; j++) {
            /* Copied side by side, because the rows of a column of k share a few sets of the cache. */
            memcpy(b + 2 * j, t->k.p + j * t->k.row + channels + c, 2 * sizeof(real));
            UNROLL for (int h = 0; h < 2; h++) vstore(part + (2 * j + h) * VL, (vec){0});
        }
        for (int64_t i = 0; i < u->n_i; i += VL) {
            if (t->state[i / VL] == PANEL_HIDDEN) continue;
            additive_queries a = {.ds = t->lanes + i * t->n};
            vec slopes[2] = {{0}}, values[2] = {{0}};
            a.q = panel_at(t->q, u->n_i, 2 * channels, i, &a.q_row);
            a.q += c * a.q_row;
            UNROLL for (int h = 0; h < 2; h++) a.e[h] = vload(a.q + (channels + h) * a.q_row);
            if (known) {
                additive_terms_known(t, &a, c, b, part, slopes, values);
            } else {
                additive_terms_missing(t, &a, c, b, part, slopes, values);
            }
            UNROLL for (int h = 0; h < 2; h++) {
                real *to = dq + h * t->row + i, *second = to + channels * t->row;
                vstore(to, vload(to) + slopes[h]);
                vstore(second, vload(second) + (vload(sums + i) - 2 * values[h]));
            }
        }
        for (int64_t j = 0; j < t->n && u->dk.data; j++) {
            real *to = (real *)(u->dk.data + (t->j0 + j) * u->dk.row) + c;
            for (int h = 0; h < 2; h++) to[h] += vreduce_add(vload(part + (2 * j + h) * VL));
        }
    }
}

NOINLINE void additive_gradients(const sdpa_unit *u, const additive_block *t) {
    const int64_t channels = u->problem->channels;
    bool known = all_finite(t->k.p + channels, t->k.row, t->n, channels);
    for (int64_t i = 0; i < u->n_i && known; i += VL) {
        int64_t row;
        const real *q = panel_at(t->q, u->n_i, 2 * channels, i, &row);
        known = all_finite(q + channels * row, row, channels, VL);
    }
    additive_slopes(u, t, known);
}

#if SDPA_REAL == 64 /* the linear maps of additive attention are in float64 for all types: additive.c */
/* c (m, n) += a b, with `depth` terms. a is (m, depth) or, with `transposed`, (depth, m); its rows are a_row apart and
 * readable to a multiple of every tile's height (8, 12), b's rows to whole vectors. */
static void map_product(double *c, int64_t c_row, const double *a, int64_t a_row, bool transposed, const double *b,
                        int64_t b_row, int64_t m, int64_t n, int64_t depth) {
    gemm g = {.c = c,
              .c_row = c_row,
              .a = a,
              .a_stride = a_row,
              .b = b,
              .b_row = b_row,
              .m = m,
              .n = n,
              .depth = depth,
              .alpha = 1};
    multiply(&g, transposed, true);
}

/* e[0..n-1] = exp(2 x), NaN where 2 x log2(e) is beyond +-limit; both readable and writable to whole vectors. */
static void map_exponentials(double *e, const double *x, int64_t n, double limit) {
    const double c = 2 * M_LOG2E, c_high = (float)c,
                 c_low = 2 * 1.4426950408889634 - c_high + 2 * 2.0355273740931033e-17;
    for (int64_t i = 0; i < n; i += VL) {
        vec v = vload(x + i), y = c * v;
        ivec inside = (y >= -limit) & (y <= limit);
        v = vselect(inside, v, (vec){0});
        vstore(e + i, vselect(inside, vexp2_product(v, c, c_high, c_low, -limit / c), vset1(NAN)));
    }
}
#endif

#endif
