/* Forward: one unit is a block of queries against all its visible keys, streamed in blocks (online softmax, Dao et al.
 * 2022; Milakov & Gimelshein 2018). Scores are kept in units of log2: p = 2^(c s - m), c = scale * log2(e).
 *
 * The first key block finds the maximum m of each query; later blocks keep it and take exp2 in the accumulators without
 * looking for a maximum. A query whose scores then exceed m by STALE_LIMIT gets a new one: the block is redone with one
 * pass for the maximum and one for exp2. So are the blocks that follow, since the scores are spread out, but m still
 * moves by the same rule, query by query, so no row's bits depend on another row. If a result overflows because m was
 * stale, the unit is redone with the true maximum of the queries concerned. Units of few queries (fast/few_queries.h)
 * move their maxima in every block. */
#ifndef SDPA_KERNEL_FORWARD_H
#define SDPA_KERNEL_FORWARD_H

#include "additive.h"
#include "fast/few_queries.h"
#ifdef HAVE_AMX
#include "amx_scores.h"
#endif
#include "fast/bf16_pairs.h"
#include "pass.h"

/* With these features a block of keys may be split where causality begins to hide some: its second part does not begin
 * at the first key of the block. */
enum {
    SPLIT_CAN = SDPA_FEATURES_OF_UNITS | SDPA_FEATURE_SOFTCAP | SDPA_FEATURE_DROPOUT | SDPA_FEATURE_SINKS |
                SDPA_FEATURE_ALIBI | SDPA_FEATURE_SCORE_MOD
};

typedef struct forward_scratch {
    real *q;     /* pack_panels of d_k, signed so that c >= 0 */
    real *few;   /* few_queries, if there are only a few; pack_rows of q for fast/few_keys.h */
    real *o;     /* (n_lanes, d_v rounded up to VL) */
    running row; /* per query */
    real *exact; /* per query: not 0 if m must be the true maximum */
    real *s;     /* (block, s_row): scores of a panel, then P^T */
    real *given; /* scores that no tile computes: additive ones (block, s_row), few_scores of a block */
    real *r;     /* (block, s_row): dropout's factors, or NULL */
    real *k, *v; /* pack_rows */
    real *k_tail;
    real *line; /* VL rows of queries or of masks */
    int64_t n_lanes, s_row, o_row, block;
    int period;      /* of few_scores; 0: a unit of many queries */
    bool bf16_pairs; /* q, k, v and P^T hold pairs of bfloat16, along d or along keys, instead of widened elements */
    real *l_rounded; /* with `bf16_pairs`, per query: the sum of the weights as rounded for the product; l is for lse */
#ifdef HAVE_AMX
    amx_scratch amx;
#endif
} forward_scratch;

#ifdef HAVE_AMX
#define MOST_QUERIES AMX_QUERIES
#else
#define MOST_QUERIES SDPA_QUERY_BLOCK
#endif

/* Queries of a unit, of the forward and of statistics; at most MOST_QUERIES. */
static int64_t queries_at_once(const sdpa_problem *p) {
#ifdef HAVE_AMX
    if (amx_can(p)) return amx_queries(p);
#endif
    return sdpa_query_block(p);
}

INLINE int64_t lanes_at_once(const sdpa_problem *p) {
    const int64_t most = queries_at_once(p);
    return round_up(p->n_q < most ? p->n_q : most, VL);
}

NOINLINE forward_scratch forward_layout(const sdpa_problem *p, sdpa_arena *a) {
    forward_scratch w = {
        .block = run_keys(p, p->d_k + p->d_v), .n_lanes = lanes_at_once(p), .o_row = round_up(p->d_v, VL)};
    w.s_row = panel_lanes(w.n_lanes);
    const int64_t n = w.n_lanes, pairs = w.block * w.s_row, most_few = p->n_q == 1 ? 1 : few_period(FEW_QUERIES);
    const int64_t few_given = round_up(w.block * most_few, SCORE_ROWS * VL) + VL;
    const array arrays[] = {
        ARRAY(w.q, p->d_k * n),
        ARRAY(w.few, (p->n_k <= FEW_KEYS && n > most_few ? n : most_few) * row_stride(p->d_k)),
        ARRAY(w.o, n * w.o_row),
        ARRAY(w.row.m, n),
        ARRAY(w.row.low, n),
        ARRAY(w.exact, n),
        ARRAY(w.row.l, n),
        ARRAY(w.l_rounded, BF16_PAIRS ? n : ABSENT),
        ARRAY(w.s, pairs + MAX_TILE_ROWS),
        ARRAY(w.given, p->scores == SDPA_ADDITIVE ? pairs : few_given),
        ARRAY(w.r, p->dropout_p > 0 ? pairs : ABSENT),
        ARRAY(w.k, w.block * row_stride(p->d_k)),
        ARRAY(w.v, w.block * row_stride(p->d_v)),
        ARRAY(w.k_tail, SCORE_ROWS * p->d_k),
        ARRAY(w.line, line_size(p, w.block)),
    };
    UNROLL for (int i = 0; i < COUNT(arrays); i++) take_array(&arrays[i], a);
#ifdef HAVE_AMX
    amx_layout(&w.amx, p, n, w.s_row, w.block, a);
#endif
    return w;
}

static size_t forward_bytes(const sdpa_problem *p) {
    sdpa_arena arena = {NULL, 0};
    forward_layout(p, &arena);
    return arena.used;
}

/* The state of n queries of a unit before their first key. */
INLINE void start_running(running *row, const sdpa_unit *u, int64_t n) {
    row->rounded = may_round(u->problem);
    for (int64_t i = 0; i < n; i++) {
        row->m[i] = -(real)INFINITY;
        row->l[i] = row->low[i] = 0;
    }
}

/* l = alpha l + sum of a panel. */
INLINE void add_to_sums(real *l, panel q, const vec *alpha, const vec *sum) {
    for (int x = 0; x < q.nv; x++) {
        real *to = l + q.i + x * VL;
        vstore(to, vmuladd(alpha[x], vload(to), sum[x]));
    }
}

/* Weights 2^(c s - m - low) of a panel's scores t in two passes: one for the maximum, one for the weights, whose sums
 * are added to l. `exact`: see move_maximum. Returns whether any pair is masked. */
INLINE bool exact_keys(const running *row, scores *t, panel q, const sdpa_unit *u, enum bias_kind bias,
                       const real *exact, vec *sum, vec *alpha) {
    vec shift[SCORE_WIDTH] = {{0}};
    for (int x = 0; x < q.nv; x++) sum[x] = vset1(-INFINITY);
    t->extreme = (real *)sum;
    const real factor = score_products(t, q.nv, u, bias, M_LOG2E);
    move_maximum(row, q.i, q.nv, exact, factor, sum, alpha, shift);
    const bool masked = exponentiate(t->s, t->s_row, t->n, q.nv, factor, (const real *)shift, row->low + q.i,
                                     (real *)sum, bias == BIAS_SOME_MASKED, row->rounded);
    add_to_sums(row->l, q, alpha, sum);
    return masked;
}

/* If the panel has not seen a key yet, computes the scores of its first keys and sets m to their maximum, unless they
 * are so spread out that m would soon move. Each row is decided by its own scores, so its bits do not depend on other
 * rows. Returns the number of keys whose scores s now holds. */
INLINE int64_t first_keys(const running *row, const scores *t, panel q) {
    bool first = false;
    for (int x = 0; x < q.nv; x++) first |= vany(vload(row->m + q.i + x * VL) == -(real)INFINITY);
    if (!first || t->n < 4 * FIRST_KEYS) return 0;
    SDPA_TAKE(FIRST);
    vec most[SCORE_WIDTH];
    scores some = part_of(t, 0, FIRST_KEYS);
    some.extreme = (real *)most;
    for (int x = 0; x < q.nv; x++) most[x] = vset1(-INFINITY);
    score(&some, q.nv, SCORE_RAW);
    for (int x = 0; x < q.nv; x++) {
        real *m = row->m + q.i + x * VL;
        vec least = most[x];
        for (int j = 0; j < FIRST_KEYS; j++) least = vmin2(least, vload(t->s + j * t->s_row + x * VL));
        const vec old = vload(m), new = most[x] * t->c, lowest = vset1(t->c) * least;
        const ivec close = new - lowest <= FIRST_SPREAD, ordinary = (new < HUGE_SCORE) & (new > -HUGE_SCORE);
        vstore(m, vselect((old == -(real)INFINITY) & close & ordinary, new, old));
    }
    return FIRST_KEYS;
}

/* Whether a panel's weights may be computed directly from the products, with its present maxima. */
INLINE bool may_fuse(const forward_scratch *w, panel q) {
    bool fused = true;
    for (int64_t i = q.i; i < q.i + q.n_i && fused; i += VL) {
        fused = !vany(is_huge(vload(w->row.m + i)) | (vload(w->exact + i) != 0));
    }
    return fused;
}

/* Weights of a panel in one pass, without looking for a maximum. For the first n_scores keys s already holds the
 * scores. If a maximum is stale, returns false, and s is undefined. */
INLINE bool fused_keys(const running *row, const scores *t, panel q, int64_t n_scores, enum score_mode mode, vec *sum,
                       vec *alpha) {
    for (int x = 0; x < q.nv; x++) {
        sum[x] = (vec){0};
        alpha[x] = vset1(1);
    }
    if (n_scores > 0) {
        exponentiate(t->s, t->s_row, n_scores, q.nv, t->c, t->shift, row->low + q.i, (real *)sum, false, row->rounded);
    }
    scores rest = part_of(t, n_scores, t->n - n_scores);
    rest.extreme = (real *)sum;
    score(&rest, q.nv, mode);
    bool stale = false;
    for (int x = 0; x < q.nv; x++) stale |= vany(~(sum[x] <= STALE_SUM) | (sum[x] < 0));
    if (!stale) add_to_sums(row->l, q, alpha, sum);
    return !stale;
}

/* Sets *a to the rows of K and V that the unit reads from key j on, except rows with strided columns, which are not
 * worth prefetching. Returns whether the rows are too large for the caches. */
INLINE bool rows_ahead(const sdpa_unit *u, int64_t j, ahead *a) {
    const sdpa_problem *p = u->problem;
    const sdpa_matrix *m[2] = {&u->k, &u->v};
    const int64_t d[2] = {p->d_k, p->d_v};
    a->n_rows = u->key_length - j;
    for (int x = 0; x < 2; x++) {
        const int64_t size = sdpa_size_of(m[x]->dtype);
        a->p[x] = m[x]->data + j * m[x]->row;
        a->stride[x] = m[x]->row;
        a->width[x] = m[x]->col == size ? d[x] * size : 0;
    }
    return u->key_length * (a->width[0] + a->width[1]) >= FETCH_BYTES;
}

/* o = alpha o + P V of a panel, with dropout. w->s holds P^T (n, stride). With `masked`, pairs marked -0 there must not
 * be multiplied. */
NOINLINE void forward_values(const sdpa_unit *u, const forward_scratch *w, rows *v, panel q, keys b, int64_t stride,
                             const vec *alpha, bool masked) {
    const sdpa_problem *p = u->problem;
    const block pairs = {u->i0 + q.i, q.n_i, b.j0, b.n};
    const int64_t first = b.j0 - v->j0;
    if (draw_factors(u, &pairs, w->r, w->period ? VL : w->s_row)) {
        if (w->period) few_pack(w->r, w->period, b.n, 0);
        for (int64_t x = 0; x < b.n * stride; x += VL) vstore(w->s + x, vload(w->r + x) * vload(w->s + x));
    }
    if (masked && !v->p) *v = pack_rows(&u->v, v->j0, v->n, p->d_v, u->n_i, w->v, NULL);
    const bool finite = !masked || rows_finite(v, p->d_v);
    gemm g = {.c = w->o + q.i * w->o_row,
              .c_row = w->o_row,
              .a = w->s,
              .a_stride = stride,
              .b = v->p + (w->bf16_pairs ? first / 2 : first) * v->row,
              .b_row = v->row,
              .narrow = v->narrow,
              .across = v->across,
              .m = q.n_i,
              .n = finite && !v->across.data ? w->o_row : p->d_v,
              .depth = b.n,
              .diagonal = diagonal_at(u, pairs.i0, b.j0),
              .row_scale = (const real *)alpha,
              .alpha = 1,
              .in_order = p->invariant};
    if (BF16_PAIRS && w->bf16_pairs) {
        if (p->dropout_p > 0) pair_rows(w->s, w->s_row, b.n, q.nv * VL, NULL);
        g.depth = (b.n + 1) / 2;
        g.bf16_pairs = true;
    }
    /* A single query reads runs longer than a block, but no sum may be that long. */
    const int64_t size = sdpa_key_block(p);
    for (int64_t k = 0; k < b.n; k += size) {
        gemm part = g;
        if (b.n > size) part.depth = b.n - k < size ? b.n - k : size;
        part.a += k * stride;
        part.b += k * v->row;
        if (part.narrow.data) part.narrow.data += k * v->narrow.row;
        if (part.across.data) part.across.data += k * v->across.row;
        if (k > 0) part.row_scale = NULL;
        multiply(&part, true, finite);
    }
}

/* Adds keys k with values v to a unit of few queries. Every block moves the maxima, which are cheap to find when a
 * vector holds several keys. */
NOINLINE void forward_few(const sdpa_unit *u, const forward_scratch *w, const rows *k, rows *v) {
    const sdpa_problem *p = u->problem;
    const int period = w->period;
    const panel q = {0, u->n_i, 1};
    const block b = block_of(u, q, k);
    vec most = vset1(-INFINITY), sum = {0}, alpha, shift;
    ahead next;
    const bool fetch = period > 1 && rows_ahead(u, k->j0 + k->n, &next);
    enum bias_kind bias = bias_block(u, &b, (real)M_LOG2E, w->s, VL, w->line);
    if (bias == BIAS_ALL_MASKED) return;
    if (bias != BIAS_NONE) {
        few_pack(w->s, period, k->n, -(real)INFINITY);
    } else if (!is_linear(p)) { /* tanh would turn the -inf that few_scores pads with into scores */
        memset(w->s, 0, sizeof(real) * (size_t)(k->n * period));
        few_fill(w->s, period, k->n, -(real)INFINITY);
        bias = BIAS_FINITE;
    }
    scores t = {.y = k->p,
                .given = bias == BIAS_NONE ? w->s : w->given,
                .n = (k->n * period + VL - 1) / VL,
                .s = w->s,
                .s_row = VL,
                .extreme = (real *)&most};
    if (k->across.data) {
        few_scores_across((real *)t.given, w->few, period, k, p->d_k);
    } else if (SDPA_REAL == 32 && k->narrow.data) {
        few_scores_narrow((real *)t.given, w->few, k, p->d_k);
    } else {
        few_scores((real *)t.given, w->few, period, k->p, k->row, k->n, p->d_k, fetch ? &next : NULL);
    }
    const real factor = score_products(&t, 1, u, bias, M_LOG2E);
    most = few_fold(most, period, true);
    move_maximum(&w->row, 0, 1, NULL, factor, &most, &alpha, &shift);
    const bool masked = exponentiate(w->s, VL, t.n, 1, factor, (const real *)&shift, w->row.low, (real *)&sum,
                                     bias == BIAS_SOME_MASKED, w->row.rounded);
    vstore(w->row.l, alpha * vload(w->row.l) + few_fold(sum, period, false));
    forward_values(u, w, v, q, (keys){k->j0, k->n}, period, &alpha, masked);
}

/* Turns the weights of a panel into pairs and adds up their sums as rounded; `sum` holds the sums before rounding. */
INLINE void forward_bf16_pairs(const sdpa_unit *u, const forward_scratch *w, panel q, int64_t n, const vec *alpha,
                               vec *sum) {
    if (u->problem->dropout_p == 0) { /* else they are paired after the multiplication with the factors */
        for (int x = 0; x < q.nv; x++) sum[x] = (vec){0};
        pair_rows(w->s, w->s_row, n, q.nv * VL, sum);
    }
    add_to_sums(w->l_rounded, q, alpha, sum);
}

/* Adds keys k and their values, which may be a part of v, to a panel. `two_passes`: find the maximum in a first pass
 * instead of trying one pass first; this affects speed only. Returns whether the next block should take two passes. */
NOINLINE bool forward_keys(const sdpa_unit *u, const forward_scratch *w, const rows *k, rows *v, panel q,
                           bool two_passes) {
    const sdpa_problem *p = u->problem;
    const block b = block_of(u, q, k);
    vec sum[SCORE_WIDTH], alpha[SCORE_WIDTH];
    scores t = panel_scores(w->q, q, k, p->d_k, w->s, w->s_row);
    t.shift = w->row.m + q.i;
    t.c = product_factor(u, M_LOG2E);
    t.bf16_pairs = w->bf16_pairs;
    if (w->bf16_pairs) t.depth = (p->d_k + 1) / 2;
    ahead next;
    if (u->n_i <= VL && rows_ahead(u, k->j0 + k->n, &next)) t.next = &next;
    const bool fuses = !(p->features & ~FUSED_CAN) && !two_passes;
    bool done = false;
    if (fuses && may_fuse(w, q) && is_key_bias(u, &b, (real)M_LOG2E, w->line)) {
        SDPA_TAKE(FUSED);
        t.key_bias = w->line;
        done = fused_keys(&w->row, &t, q, 0, SCORE_KEYS_SUMMED, sum, alpha);
        two_passes = !done;
    }
    enum bias_kind bias = done ? BIAS_FINITE : bias_block(u, &b, (real)M_LOG2E, t.s, t.s_row, w->line);
    if (bias == BIAS_ALL_MASKED) return two_passes;
    score_program own;
    use_program(&t, &own, u, &b, w->line);
    const bool plain = bias == BIAS_NONE && is_linear(p);
    if (p->scores == SDPA_ADDITIVE) {
        real *given = plain ? w->s : w->given; /* s holds the bias */
        additive_scores(p, t.x, q.nv, k, k->n, given, t.s_row);
        t.given = given;
    }

    bool masked = bias == BIAS_SOME_MASKED;
    if (!done && fuses && !two_passes) {
        const int64_t n_scores = plain ? first_keys(&w->row, &t, q) : 0;
        if (may_fuse(w, q)) {
            SDPA_TAKE(FUSED);
            done = fused_keys(&w->row, &t, q, n_scores, plain ? SCORE_SUMMED : SCORE_BIASED_SUMMED, sum, alpha);
            two_passes = !done;
            if (!done) {
                bias = bias_block(u, &b, (real)M_LOG2E, t.s, t.s_row, w->line);
                use_program(&t, &own, u, &b, w->line);
            }
        }
    }
    if (!done) masked = exact_keys(&w->row, &t, q, u, bias, is_linear(p) ? w->exact : NULL, sum, alpha);
    if (BF16_PAIRS && w->bf16_pairs) forward_bf16_pairs(u, w, q, k->n, alpha, sum);
    forward_values(u, w, v, q, (keys){k->j0, k->n}, w->s_row, alpha, masked);
    return two_passes;
}

#ifdef HAVE_AMX
#include "fast/amx.h"
#endif

/* Adds a block of keys to all queries of the unit. two_passes (see forward_keys) has one element per vector of
 * queries. */
NOINLINE void forward_panels(const sdpa_unit *u, const forward_scratch *w, keys b, bool *two_passes) {
    const sdpa_problem *p = u->problem;
    rows k, v;
    if (BF16_PAIRS && w->bf16_pairs) {
        k = pack_bf16_pairs(&u->k, b.j0, b.n, p->d_k, w->k, w->k_tail, w->line);
        v = pack_row_bf16_pairs(&u->v, b.j0, b.n, p->d_v, w->v, may_mask(u));
    } else {
        /* A single query reads each element once, so widening it on the way costs less than a copy. */
        const bool once = w->period == 1, narrow_k = once && is_narrow(&u->k, p->d_k),
                   narrow_v = once && is_narrow(&u->v, p->d_v);
        if (narrow_k || narrow_v) SDPA_TAKE(NARROW);
        const bool across_k = w->period && lies_across(&u->k),
                   across_v = w->period && w->period <= MOST_ACROSS_V && lies_across(&u->v);
        k = narrow_k   ? narrow_rows(&u->k, b.j0, b.n)
            : across_k ? rows_across(&u->k, b.j0, b.n)
                       : pack_rows(&u->k, b.j0, b.n, p->d_k, 0, w->k, w->k_tail);
        v = narrow_v   ? narrow_rows(&u->v, b.j0, b.n)
            : across_v ? rows_across(&u->v, b.j0, b.n)
                       : pack_rows(&u->v, b.j0, b.n, p->d_v, u->n_i, w->v, NULL);
    }
    if (w->period) {
        forward_few(u, w, &k, &v);
        return;
    }
    PANELS (q, u->n_i) {
        int64_t first, last;
        sdpa_visible_keys(u, u->i0 + q.i, q.n_i, &first, &last);
        if (first >= b.j0 + b.n || last <= b.j0) continue;
        /* Whole tiles, so that only the block's own last tile reads k.tail; masks hide the surplus. */
        const int64_t tiles = round_up(last - b.j0, SCORE_ROWS), visible = tiles < b.n ? tiles : b.n;
        const int64_t open = p->features & ~SPLIT_CAN ? 0 : open_keys(u, u->i0 + q.i, b.j0, visible);
        bool *panel_passes = &two_passes[q.i / VL];
        if (open > 0) {
            SDPA_TAKE(SPLIT);
            const rows part = part_of_rows(&k, b.j0, open);
            *panel_passes = forward_keys(u, w, &part, &v, q, *panel_passes);
        }
        const rows part = part_of_rows(&k, b.j0 + open, visible - open);
        *panel_passes = forward_keys(u, w, &part, &v, q, *panel_passes);
    }
}

/* Packs the unit's queries, by few_queries or as panels. */
INLINE void forward_queries(const sdpa_unit *u, forward_scratch *w) {
    const sdpa_problem *p = u->problem;
    const real c = product_factor(u, M_LOG2E);
    if (u->n_i <= FEW_QUERIES && few_can(p) && c > 0) {
        SDPA_TAKE(FEW_QUERIES);
        w->period = few_period(u->n_i);
        few_queries(w->few, w->period, u, w->line);
        return;
    }
    pack_panels(w->q, &u->q, u->i0, u->n_i, p->d_k, sign_of_scale(u), w->line);
    if (!BF16_PAIRS || !w->bf16_pairs) return;
    PANELS (q, u->n_i) pair_rows(w->q + q.i * p->d_k, q.nv * VL, p->d_k, q.n_i, NULL);
}

/* Marks queries whose sums may have overflowed because of a stale maximum; with the true one, weights are at most 1. */
INLINE bool find_overflow(const sdpa_unit *u, const forward_scratch *w) {
    bool any = false;
    for (int64_t i = 0; i < u->n_i; i++) {
        const real l = w->row.l[i];
        if (l - l == 0 && all_finite(w->o + i * w->o_row, w->o_row, 1, u->problem->d_v)) continue;
        w->exact[i] = 1;
        any = true;
    }
    return any;
}

/* Computes o, m and l of the unit's queries over the keys that it sees, in scratch; o is not divided by l yet. False if
 * interrupted. */
NOINLINE bool forward_sweep(const sdpa_unit *u, forward_scratch *w) {
    int64_t j0, j1;
#ifdef HAVE_AMX
    if (amx_can(u->problem)) return amx_sweep(u, w);
#endif
    unit_keys(u, &j0, &j1);
    j0 = first_block(u->problem, j0, j1);
    if (j0 < j1 && is_hidden(u, j0, j1 - j0)) j1 = j0;
    if (j0 < j1) forward_queries(u, w);
    memset(w->exact, 0, sizeof(real) * (size_t)w->n_lanes);
    for (int attempt = 0; attempt < 2; attempt++) {
        bool two_passes[SDPA_QUERY_BLOCK / VL] = {false};
        start_running(&w->row, u, w->n_lanes);
        if (BF16_PAIRS) memset(w->l_rounded, 0, sizeof(real) * (size_t)w->n_lanes);
        memset(w->o, 0, sizeof(real) * (size_t)(w->n_lanes * w->o_row));
        keys b = {.j0 = j0};
        while (next_seen(u, w->block, j1, &b)) forward_panels(u, w, b, two_passes);
        if (b.j0 < j1) return false;
        if (w->period || j1 - j0 <= w->block || !find_overflow(u, w)) break;
    }
    return true;
}

/* Divides by l, with the sink, and stores o and lse. */
NOINLINE void forward_finish(const sdpa_unit *u, const forward_scratch *scratch) {
    const sdpa_problem *p = u->problem;
    const forward_scratch w = *scratch;
    const double sink = sink_of(u);
    const double log2_e = log2_e_of(u);
    const bool direct = u->o.data && is_direct(&u->o) && p->d_v == w.o_row;
    for (int64_t i = 0; i < u->n_i; i++) {
        real *o = w.o + i * w.o_row, l = w.row.l[i], factor = 1, sunk = 0;
        double m = w.row.m[i];
        if (sink != -INFINITY) {
            /* A sink may be so large that its rounding error, in the exponent, would be out of range. */
            const double keys = m + w.row.low[i];
            m = sink > keys ? sink : keys;
            factor = (real)exp2(keys - m);
            sunk = (real)exp2(sink - m);
            l = muladd(l, factor, sunk);
        }
        const real sum = BF16_PAIRS && w.bf16_pairs ? muladd(w.l_rounded[i], factor, sunk) : l;
        factor = l == 0 ? 0 : factor / sum;
        char *to = u->o.data + (u->i0 + i) * u->o.row;
        real *result = direct ? (real *)to : o;
        for (int64_t x = 0; x < w.o_row; x += VL) vstore(result + x, factor * vload(o + x));
        if (!direct && u->o.data) store(to, o, p->d_v, u->o.col, u->o.dtype);
        if (u->lse) {
            const bool saturated = fabs(m) == REAL_MAX; /* see mask_block */
            store_lse(u, u->i0 + i, saturated ? m : l == 0 ? -INFINITY : m / log2_e + log(l));
        }
    }
}

/* o and lse of the unit. With pairs of bfloat16 the weights are rounded to bfloat16, too. */
NOINLINE void forward_any(const sdpa_unit *u, void *scratch) {
    sdpa_arena arena = {scratch, 0};
    forward_scratch w = forward_layout(u->problem, &arena);
    w.bf16_pairs = BF16_PAIRS && u->problem->dtype == SDPA_BF16 && (u->n_i > FEW_QUERIES || u->problem->invariant) &&
                   !(u->problem->features & ~BF16_PAIRS_CAN);
    if (w.bf16_pairs) SDPA_TAKE(BF16_PAIRS);
    if (forward_sweep(u, &w)) forward_finish(u, &w);
}

/* The size of a unit's partial result over some of its keys: o, m, l and low per query. */
static size_t forward_part_bytes(const sdpa_problem *p) {
    sdpa_arena arena = {NULL, 0};
    const forward_scratch w = forward_layout(p, &arena);
    return sizeof(real) * (size_t)(w.n_lanes * (w.o_row + 3));
}

COLD static void forward_part(const sdpa_unit *u, void *scratch, void *part) {
    sdpa_arena arena = {scratch, 0};
    forward_scratch w = forward_layout(u->problem, &arena);
    if (!forward_sweep(u, &w)) return;
    real *to = part;
    for (int64_t i = 0; i < u->n_i; i++, to += w.o_row + 3) {
        memcpy(to, w.o + i * w.o_row, sizeof(real) * (size_t)w.o_row);
        to[w.o_row] = w.row.m[i];
        to[w.o_row + 1] = w.row.l[i];
        to[w.o_row + 2] = w.row.low[i];
    }
}

/* Computes o and lse from n_parts adjacent parts. */
COLD static void forward_join(const sdpa_unit *u, void *scratch, const void *parts, int64_t n_parts) {
    sdpa_arena arena = {scratch, 0};
    const forward_scratch w = forward_layout(u->problem, &arena);
    const int64_t part = w.n_lanes * (w.o_row + 3);
    for (int64_t i = 0; i < u->n_i; i++) {
        const real *first = (const real *)parts + i * (w.o_row + 3), *highest = first;
        for (int64_t x = 1; x < n_parts; x++) {
            if (first[x * part + w.o_row] > highest[w.o_row]) highest = first + x * part;
        }
        /* A part that has seen no key has m = -inf. Nothing is skipped: 0 * NaN is NaN, as in a single sweep. */
        const real m = highest[w.o_row] == -(real)INFINITY ? 0 : highest[w.o_row], low = highest[w.o_row + 2];
        real *o = w.o + i * w.o_row;
        memset(o, 0, sizeof(real) * (size_t)w.o_row);
        w.row.m[i] = highest[w.o_row];
        w.row.low[i] = low;
        w.row.l[i] = 0;
        for (int64_t x = 0; x < n_parts; x++) {
            const real *from = first + x * part;
            const real factor = (real)exp2((from[w.o_row] - m) + (from[w.o_row + 2] - low));
            for (int64_t y = 0; y < w.o_row; y += VL) {
                vstore(o + y, vmuladd(vset1(factor), vload(from + y), vload(o + y)));
            }
            w.row.l[i] = muladd(factor, from[w.o_row + 1], w.row.l[i]);
        }
    }
    forward_finish(u, &w);
}

#endif
