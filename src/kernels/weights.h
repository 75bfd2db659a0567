/* The matrix of scores or weights. The result is n_q x n_k, but the extra memory is still one block. Weights take two
 * passes over the keys: the first finds maximum and sum of each query, the second writes 2^(c s - m) / l. */
#ifndef SDPA_KERNEL_WEIGHTS_H
#define SDPA_KERNEL_WEIGHTS_H

#include "forward.h"

/* out[i0 + i, j0 + j] = factor_i * s[j, i]; a factor of NULL means 1. */
NOINLINE void write_block(const sdpa_matrix *out, const real *s, int64_t s_row, const block *b, const real *factor,
                          real *lines) {
    const int64_t n_i = b->n_i, n = b->n_j, line_row = round_up(n, VL);
    for (int64_t i = 0; i < n_i; i += VL) {
        for (int64_t j = 0; j < n; j += VL) {
            vec r[VL];
            UNROLL for (int l = 0; l < VL; l++) {
                r[l] = (vec){0};
                if (j + l < n) r[l] = vload(s + (j + l) * s_row + i);
                /* A masked pair is 0 even in a row of NaN. */
                if (factor) r[l] = vselect((ivec)r[l] == SIGN_BIT, (vec){0}, r[l] * vload(factor + i));
            }
            vtranspose(r);
            UNROLL for (int l = 0; l < VL; l++) vstore(lines + l * line_row + j, r[l]);
        }
        for (int64_t l = 0; l < VL && i + l < n_i; l++) {
            store(out->data + (b->i0 + i + l) * out->row + b->j0 * out->col, lines + l * line_row, n, out->col,
                  out->dtype);
        }
    }
}

typedef struct weights_scratch {
    score_scratch scores; /* s holds the weights, too */
    running row;          /* per query; after the first pass l = 1 / l */
    real *r;              /* (block, s_row): dropout's factors, or NULL */
} weights_scratch;

NOINLINE weights_scratch weights_layout(const sdpa_problem *p, sdpa_arena *a) {
    weights_scratch w = {.scores = score_layout(p, unit_lanes(p), a)};
    const score_scratch *f = &w.scores;
    const array arrays[] = {
        ARRAY(w.row.m, f->n_lanes),
        ARRAY(w.row.low, f->n_lanes),
        ARRAY(w.row.l, f->n_lanes),
        ARRAY(w.r, p->dropout_p > 0 ? f->block * f->s_row : ABSENT),
    };
    take_arrays(arrays, COUNT(arrays), a);
    return w;
}

static size_t weights_bytes(const sdpa_problem *p) {
    sdpa_arena arena = {NULL, 0};
    weights_layout(p, &arena);
    return arena.used;
}

/* The first pass: maximum and inverse of the sum of each query. False if interrupted. */
NOINLINE bool weights_sums(const sdpa_unit *u, weights_scratch *w) {
    const sdpa_problem *p = u->problem;
    const score_scratch *f = &w->scores;
    int64_t j0, j1;
    unit_keys(u, &j0, &j1);
    start_running(&w->row, u, f->n_lanes);
    keys j = {.j0 = first_block(p, j0, j1)};
    while (next_seen(u, f->block, j1, &j)) {
        const rows k = pack_rows(&u->k, j.j0, j.n, p->d_k, 0, f->k, f->k_tail);
        PANELS (q, u->n_i) {
            const block b = block_of(u, q, &k);
            vec sum[SCORE_WIDTH], alpha[SCORE_WIDTH];
            scores t = panel_scores(f->q, q, &k, p->d_k, f->s, f->s_row);
            const enum bias_kind bias = bias_block(u, &b, (real)M_LOG2E, t.s, t.s_row, f->line);
            if (bias == BIAS_ALL_MASKED) continue;
            score_program own;
            use_program(&t, &own, u, &b, f->line);
            exact_keys(&w->row, &t, q, u, bias, NULL, sum, alpha);
        }
    }
    if (j.j0 < j1) return false;
    const double sink = sink_of(u);
    for (int64_t i = 0; i < f->n_lanes; i++) {
        real *m = &w->row.m[i], *l = &w->row.l[i], term;
        const real none = 0 * *l; /* NaN where a key is, whose row may have no maximum */
        const real factor = add_sink(sink, m, &w->row.low[i], l, &term);
        if (*m == -(real)INFINITY) *m = 0;
        *l = factor == 0 || *l == 0 ? none : 1 / *l;
    }
    return true;
}

/* w->s = a panel's scores or logits at a stage (for SDPA_WEIGHTS in log2 units), up to a factor, which is returned. */
INLINE real stage_scores(const sdpa_unit *u, const score_scratch *w, const rows *k, panel q, sdpa_stage stage) {
    const sdpa_problem *p = u->problem;
    const block b = block_of(u, q, k);
    const double unit = stage == SDPA_WEIGHTS ? M_LOG2E : 1;
    vec unused[SCORE_WIDTH] = {{0}};
    scores t = panel_scores(w->q, q, k, p->d_k, w->s, w->s_row);
    t.extreme = (real *)unused;
    const bool whole = stage == SDPA_WEIGHTS || stage == SDPA_BIASED;
    const enum bias_kind bias = whole ? bias_block(u, &b, (real)unit, t.s, t.s_row, w->line) : BIAS_NONE;
    score_program own;
    if (bias == BIAS_ALL_MASKED) {
        fill_panel(t.s, t.s_row, q.nv, t.n, vset1(-INFINITY));
        return 1;
    }
    if (whole) use_program(&t, &own, u, &b, w->line);
    if (whole && (bias != BIAS_NONE || !is_linear(p))) {
        score_logits(&t, q.nv, u, bias, unit);
    } else if (stage == SDPA_CAPPED && is_capped(p)) {
        clear_bias(&b, t.s, t.s_row);
        score_capped(&t, q.nv, u, unit);
    } else {
        score(&t, q.nv, SCORE_RAW);
        return whole ? product_factor(u, unit) : (real)(fabs(u->scale) * unit);
    }
    return 1;
}

/* 2^(logit - maximum) times dropout's factor, for a vector s of stage_scores at SDPA_WEIGHTS; masked pairs give -0. */
INLINE vec weight_of(const weights_scratch *w, real factor, vec s, int64_t at, int64_t lane) {
    const vec d = below_maximum(factor, s, vload(w->row.m + lane), w->row.rounded);
    const vec e = vexp2(d - vload(w->row.low + lane));
    return vselect(factor * s == -(real)INFINITY, vset1(-0.0), e * factor_at(w->r, at));
}

/* Writes one stage of a panel and keys k. */
NOINLINE void weights_keys(const sdpa_unit *u, const weights_scratch *w, const rows *k, panel q, sdpa_stage stage) {
    const score_scratch *f = &w->scores;
    const block b = block_of(u, q, k);
    const bool weights = stage == SDPA_WEIGHTS;
    const real factor = stage_scores(u, f, k, q, stage);
    if (weights) draw_factors(u, &b, w->r, f->s_row);
    for (int64_t j = 0; j < k->n; j++) {
        for (int x = 0; x < q.nv; x++) {
            const int64_t at = j * f->s_row + x * VL, lane = q.i + x * VL;
            const vec s = vload(f->s + at);
            vstore(f->s + at, weights ? weight_of(w, factor, s, at, lane) : factor * s);
        }
    }
    write_block(&u->o, f->s, f->s_row, &b, weights ? w->row.l + q.i : NULL, f->line);
}

/* Writes the problem's stage of the unit's queries to u->o, whose columns are keys. */
COLD static void weights_unit(const sdpa_unit *u, void *scratch) {
    const sdpa_problem *p = u->problem;
    sdpa_arena arena = {scratch, 0};
    weights_scratch w = weights_layout(p, &arena);
    const score_scratch *f = &w.scores;
    pack_panels(f->q, &u->q, u->i0, u->n_i, p->d_k, sign_of_scale(u), f->line);
    if (p->stage == SDPA_WEIGHTS && !weights_sums(u, &w)) return;
    keys j = {0};
    while (next_keys(u, f->block, p->n_k, &j)) {
        const rows k = pack_rows(&u->k, j.j0, j.n, p->d_k, 0, f->k, f->k_tail);
        PANELS (q, u->n_i) weights_keys(u, &w, &k, q, p->stage);
    }
}

#endif
