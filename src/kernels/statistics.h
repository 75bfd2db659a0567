/* Statistics of each row of weights without the matrix: streamed like the forward, one product per pair of blocks. With
 * x = s - m and e = exp(x), everything but the moments of the scores follows from sums of e, e x, e^2 and e^3; mean and
 * variance of the logits over the visible keys are merged from those of the blocks (Chan, Golub & LeVeque 1983). Logits
 * are natural, not in log2 units, whose rounded factor would affect mean and variance. Where squares of finite logits are
 * beyond the type, a second pass sums those of MOMENT_SCALE times the logits. */
#ifndef SDPA_KERNEL_STATISTICS_H
#define SDPA_KERNEL_STATISTICS_H

#include "amx_given.h"

/* A power of two with which no sum over logits or their squares overflows. */
#define MOMENT_SCALE ((real)(SDPA_REAL == 32 ? 0x1p-80 : 0x1p-560))

/* Per query, as vectors: sums relative to the maximum m + m_low (m_low is the rounding error of m where that is
 * finite); count, mean and sum of squared deviations of the logits, the last two as sums of a high and a low part. */
typedef struct row_sums {
    vec m, m_low, l, ex, e2, e3, n, mean, mean_low, m2, m2_low;
} row_sums;

/* Sums over the keys of a block; successive tiles of 8 keys add to four sums in rotation. */
typedef struct block_sums {
    vec l[4], ex[4], e2[4], e3[4], count, total, total_low;
} block_sums;

/* The block_sums of n logits factor * s, rows s_row apart, reduced by shift + low. `masked`, a constant: leaves out
 * logits of -inf; else they make `total` infinite or NaN. The others have the same bits either way. */
INLINE void sum_logits(block_sums *b, const real *s, int64_t s_row, int64_t n, vec shift, vec low, real factor,
                       bool masked) {
    /* log2 e as the sum of two, the first with at most half the bits of a significand. */
    const double c_high = SDPA_REAL == 32 ? 0x1.714p0 : 0x1.715476p0, c_low = M_LOG2E - c_high + 2.0355273740931033e-17,
                 limit = SDPA_REAL == 32 ? 127 : 1023;
    *b = (block_sums){.count = vset1(masked ? 0 : (real)n)};
    for (int64_t tile = 0; tile < n; tile += 8) {
        const int64_t end = tile + 8 < n ? tile + 8 : n, part = tile / 8 % 4;
        vec of_s = {0}, of_e = {0}, of_ex = {0}, of_e2 = {0}, of_e3 = {0};
        for (int64_t j = tile; j < end; j++) {
            const vec x = vload(s + j * s_row), d = vmulsub(vset1(factor), x, shift) - low;
            const vec e = vexp2_product(d, (real)M_LOG2E, (real)c_high, (real)c_low, (real)(-limit / M_LOG2E));
            const ivec hidden = masked ? factor * x == -(real)INFINITY : (ivec){0};
            const vec square = e * e;
            of_e += e;
            of_e2 += square;
            of_e3 = vmuladd(square, e, of_e3);
            of_ex = vmuladd(e, masked ? vselect(hidden, (vec){0}, d) : d, of_ex);
            of_s = vmuladd(vset1(factor), masked ? vselect(hidden, (vec){0}, x) : x, of_s);
            if (masked) b->count += vselect(hidden, (vec){0}, vset1(1));
        }
        b->l[part] += of_e;
        b->ex[part] += of_ex;
        b->e2[part] += of_e2;
        b->e3[part] += of_e3;
        add_exactly(&b->total, &b->total_low, of_s);
    }
}

/* The sum of squared differences of n logits from `mean`. */
INLINE vec squares_from(const real *s, int64_t s_row, int64_t n, vec mean, real factor, bool masked) {
    vec squares[4] = {{0}};
    for (int64_t tile = 0; tile < n; tile += 8) {
        const int64_t end = tile + 8 < n ? tile + 8 : n;
        vec of_d2 = {0};
        for (int64_t j = tile; j < end; j++) {
            const vec x = vload(s + j * s_row), from_mean = vmulsub(vset1(factor), x, mean);
            const vec d = masked ? vselect(factor * x == -(real)INFINITY, (vec){0}, from_mean) : from_mean;
            of_d2 = vmuladd(d, d, of_d2);
        }
        squares[tile / 8 % 4] += of_d2;
    }
    return sum_of_four(squares, 1);
}

/* Adds n logits, factor * s of rows s_row apart, the greatest of them factor * most, to the sums of a vector of
 * queries. Inlined into its only caller, since an out-of-line call is far slower. */
INLINE void add_logits(row_sums *r, const real *s, int64_t s_row, int64_t n, vec most, real factor, bool masked) {
    const vec maximum = factor * most, lost = vmulsub(vset1(factor), most, maximum),
              rest = vselect(lost - lost == 0, lost, (vec){0});
    const vec m = vmax2(maximum, r->m), shift = vselect(m == -(real)INFINITY, (vec){0}, m),
              low = vselect(maximum > r->m, rest, vselect(maximum == r->m, vmax2(rest, r->m_low), r->m_low));
    block_sums b;
    if (!masked) {
        sum_logits(&b, s, s_row, n, shift, low, factor, false);
        masked = vany(b.total - b.total != 0);
    }
    if (masked) sum_logits(&b, s, s_row, n, shift, low, factor, true);
    const vec count = b.count, total = b.total, total_low = b.total_low;
    const vec mean = vselect(count == 0, (vec){0}, total / count),
              lacking = vselect(count == 0, (vec){0}, (total_low - vmulsub(mean, count, total)) / count);
    const vec squares =
        masked ? squares_from(s, s_row, n, mean, factor, true) : squares_from(s, s_row, n, mean, factor, false);
    const vec m2 = vmuladd(-count * lacking, lacking, squares);
    /* The old sums move to the new maximum: e shrinks by a, x grows by `down`. */
    const vec moved = (r->m - shift) + (r->m_low - low), down = vselect(r->m == -(real)INFINITY, (vec){0}, moved),
              a = vexp2((real)M_LOG2E * moved);
    r->ex = vmuladd(a, vmuladd(down, r->l, r->ex), sum_of_four(b.ex, 1));
    r->l = vmuladd(a, r->l, sum_of_four(b.l, 1));
    r->e2 = vmuladd(a * a, r->e2, sum_of_four(b.e2, 1));
    r->e3 = vmuladd(a * a * a, r->e3, sum_of_four(b.e3, 1));
    r->m_low = low;
    r->m = m;
    const vec all = r->n + count, part = vselect(all == 0, (vec){0}, count / all), d = mean - r->mean,
              d_low = lacking - r->mean_low;
    add_exactly(&r->m2, &r->m2_low, m2);
    r->m2_low = vmuladd((d + d_low) * (d + d_low) * r->n, part, r->m2_low);
    add_exactly(&r->mean, &r->mean_low, d * part);
    r->mean_low = vmuladd(d_low, part, r->mean_low);
    r->n = all;
}

typedef struct statistics_scratch {
    score_scratch scores;
    amx_given amx;
} statistics_scratch;

INLINE statistics_scratch statistics_layout(const sdpa_problem *p, sdpa_arena *a) {
    statistics_scratch w = {.scores = score_layout(p, lanes_at_once(p), a)};
    w.amx = amx_given_layout(p, 1, w.scores.n_lanes, w.scores.block, w.scores.s_row, a);
    return w;
}

static size_t statistics_bytes(const sdpa_problem *p) {
    sdpa_arena arena = {NULL, 0};
    statistics_layout(p, &arena);
    return arena.used;
}

/* Adds keys k to one panel, each logit times `small`. */
NOINLINE void statistics_keys(const sdpa_unit *u, const statistics_scratch *scratch, row_sums *sums, const rows *k,
                              panel q, real small) {
    const sdpa_problem *p = u->problem;
    const score_scratch *w = &scratch->scores;
    const block b = block_of(u, q, k);
    vec maximum[SCORE_WIDTH];
    for (int x = 0; x < q.nv; x++) maximum[x] = vset1(-INFINITY);
    scores t = panel_scores(w->q, q, k, p->d_k, w->s, w->s_row);
    t.extreme = (real *)maximum;
    const enum bias_kind bias = bias_block(u, &b, 1, t.s, t.s_row, w->line);
    if (bias == BIAS_ALL_MASKED) return;
    score_program own;
    use_program(&t, &own, u, &b, w->line);
    if (amx_gives(&scratch->amx)) amx_give(&scratch->amx, 0, q, bias == BIAS_NONE && is_straight(p), &t);
    real factor = score_products(&t, q.nv, u, bias, 1);
    bool huge = false;
    for (int x = 0; x < q.nv; x++) huge |= vany(is_huge(factor * maximum[x]));
    if (huge && may_round(p) && factor != 1) { /* see `running` */
        scale_panel(&t, q, factor);
        for (int x = 0; x < q.nv; x++) maximum[x] *= factor;
        factor = 1;
    }
    factor *= small;
    for (int x = 0; x < q.nv; x++) {
        add_logits(&sums[q.i / VL + x], t.s + x * VL, t.s_row, k->n, maximum[x], factor, bias == BIAS_SOME_MASKED);
    }
}

/* Sums over the unit's keys of the logits times `small`. False if the call was interrupted. */
NOINLINE bool statistics_pass(const sdpa_unit *u, const statistics_scratch *scratch, row_sums *sums, real small) {
    const score_scratch *w = &scratch->scores;
    const bool given = amx_gives(&scratch->amx);
    int64_t j0, j1;
    for (int64_t x = 0; x < w->n_lanes / VL; x++) sums[x] = (row_sums){.m = vset1(-INFINITY)};
    unit_keys(u, &j0, &j1);
    keys b = {.j0 = first_block(u->problem, j0, j1)};
    while (next_seen(u, w->block, j1, &b)) {
        rows k = pack_rows(&u->k, b.j0, b.n, u->problem->d_k, given, w->k, w->k_tail);
        if (given) amx_give_keys(&scratch->amx, AMX_SCORES, &u->k, &k, w->line);
        PANELS (q, u->n_i) {
            if (given && (k.n = amx_given_keys(u, q, b)) == 0) continue;
            statistics_keys(u, scratch, sums, &k, q, small);
        }
    }
    return b.j0 >= j1;
}

/* The variance of a query's logits. Where all are equal, the sum of squares may be rounded to below 0. */
INLINE double variance_of(const row_sums *r, int64_t x) {
    const double squares = (double)r->m2[x] + r->m2_low[x];
    return squares < 0 ? 0 : squares / r->n[x];
}

/* lse, entropy, max_weight, sum_p2, sum_p3, score_mean, score_var from the sums of one query. The sink is part of the
 * denominator only. A query without keys: -inf, 0, 0, 0, 0, nan, nan. */
INLINE void statistics_row(const row_sums *r, int64_t x, real sink, real row[7]) {
    /* p = factor e, and log p = x + m - lse. */
    const double m = (double)r->m[x] + r->m_low[x], most = m > sink ? m : sink;
    const bool keyless = r->n[x] == 0,
               empty = keyless && sink == -(real)INFINITY; /* m is -inf where all logits are NaN, too */
    const double shift = keyless ? 0 : exp(m - most), l = shift * r->l[x] + (empty ? 0 : exp(sink - most));
    const double factor = keyless ? 0 : shift / l, lse = empty ? -INFINITY : most + log(l);
    row[0] = (real)lse;
    row[1] = factor == 0 ? 0 : (real)(-factor * (r->ex[x] + r->l[x] * (m - most - log(l))));
    row[2] = (real)factor;
    row[3] = (real)(factor * factor * r->e2[x]);
    row[4] = (real)(factor * factor * factor * r->e3[x]);
    row[5] = keyless ? (real)NAN : r->mean[x] + r->mean_low[x];
    row[6] = keyless ? (real)NAN : (real)variance_of(r, x);
}

/* Whether moments of a row's logits overflowed, all of which are finite. */
INLINE bool moments_overflowed(const row_sums *r, int64_t x, const real row[7]) {
    const real sum = row[5] + row[6];
    return r->n[x] != 0 && r->m[x] - r->m[x] == 0 && row[0] == row[0] && sum - sum != 0;
}

/* Mean and variance from sums of MOMENT_SCALE times the logits. */
INLINE void moments_of_small(const row_sums *r, int64_t x, real row[7]) {
    row[5] = (real)(((double)r->mean[x] + r->mean_low[x]) / MOMENT_SCALE);
    row[6] = (real)(variance_of(r, x) / MOMENT_SCALE / MOMENT_SCALE);
}

/* statistics_row of the unit's queries, into the columns of u->o. */
COLD static void statistics_unit(const sdpa_unit *u, void *scratch) {
    const sdpa_problem *p = u->problem;
    sdpa_arena arena = {scratch, 0};
    statistics_scratch w = statistics_layout(p, &arena);
    row_sums sums[MOST_QUERIES / VL], small_sums[MOST_QUERIES / VL];
    pack_panels(w.scores.q, &u->q, u->i0, u->n_i, p->d_k, sign_of_scale(u), w.scores.line);
    if (amx_gives(&w.amx)) {
        SDPA_TAKE(AMX);
        amx_give_queries(&w.amx, AMX_SCORES, w.scores.q, u->n_i);
    }
    if (!statistics_pass(u, &w, sums, 1)) return;
    const real sink = scalar_of(&u->sinks, -(real)INFINITY);
    bool again = false;
    for (int64_t i = 0; i < u->n_i; i++) {
        const int64_t x = i % VL;
        real row[7];
        statistics_row(&sums[i / VL], x, sink, row);
        if (moments_overflowed(&sums[i / VL], x, row)) {
            if (!again && !statistics_pass(u, &w, small_sums, MOMENT_SCALE)) return;
            again = true;
            moments_of_small(&small_sums[i / VL], x, row);
        }
        store(u->o.data + (u->i0 + i) * u->o.row, row, 7, u->o.col, u->o.dtype);
    }
}

#endif
