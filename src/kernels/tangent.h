/* Forward mode and second order. With tangents a, b, c, e of q, k, v and the mask:
 *   T  = slope * scale (a K^T + Q b^T) + e        tangent of the logits (slope: of the cap)
 *   mu = rowsum(P * T), and O_t = (P * (T - mu)) V + P c.
 * <a, dQ> + <b, dK> + <c, dV> + <e, dMask>, the double backward's function of the gradients, is <dO, O_t> (plus <dlse,
 * mu>): differentiating that once more, with G = dO V^T, C = dO c^T, D = rowsum(dO * O) - dlse,
 *   dS  = P * (G - D)                             what T is multiplied with
 *   dS' = P * ((T - mu) * (G - D) + C - rowsum(dO * O_t))
 * and the derivatives are dS' K + dS b for q, dS'^T Q + dS^T a for k (times scale and slope), (P * (T - mu))^T dO for
 * v, dS' for the mask, O_t for dO. A cap adds slope' * T_0 * dS to what reaches the scores, T_0 = T before slope and e.
 * A score_mod f, also of arrays with tangents, has T = f' T_0 + sum of df/dt times the tangent of t, and adds dT/dscore *
 * dS to what reaches the scores. A head's own scale with tangent s adds s Q K^T to T_0. Dropout multiplies P by R wherever
 * it meets a value: in O_t, G, C and v's derivative. Products per pair of blocks: 6 in forward mode, 6 + 10 in the double
 * backward; the matrix unit has those with scores: 3, and 3 + 5. */
#ifndef SDPA_KERNEL_TANGENT_H
#define SDPA_KERNEL_TANGENT_H

#include "amx_given.h"

typedef struct tangent_scratch {
    real *q, *q_t;           /* pack_panels of d_k */
    real *o, *o_t;           /* (n_lanes, v_row) */
    real *m, *l, *mu;        /* per query: maximum, sum, and mean of T */
    real *sunk;              /* per query: the sink's weight */
    real *s, *t;             /* (block, n_lanes): scores, their tangent */
    real *h, *r, *e;         /* (block, n_lanes): the cap's tanh, dropout's factors, the mask's tangent; NULL: none */
    real *raw;               /* (block, n_lanes): the scores that score_mod gets; NULL: none */
    real *slope, *bend, *t0; /* of second order with score_mod: its slopes, dT/dscore, its input's tangent; or NULL */
    real *k, *k_t, *v, *v_t; /* pack_rows */
    real *k_tail, *k_t_tail;
    real *line;
    int64_t n_lanes, k_row, v_row, block;
    amx_given amx;
} tangent_scratch;

/* n_pairs: those of amx_given.h that products need. */
NOINLINE tangent_scratch tangent_layout(const sdpa_problem *p, int n_pairs, sdpa_arena *a) {
    tangent_scratch w = {.block = block_keys(p, sdpa_key_block(p)),
                         .n_lanes = unit_lanes(p),
                         .k_row = round_up(p->d_k, VL),
                         .v_row = round_up(p->d_v, VL)};
    const int64_t n = w.n_lanes, tiles = (w.block + MAX_TILE_ROWS) * n, rows = round_up(w.block, SCORE_ROWS);
    const array arrays[] = {
        ARRAY(w.q, p->d_k * n),
        ARRAY(w.q_t, p->d_k * n),
        ARRAY(w.o, n * w.v_row),
        ARRAY(w.o_t, n * w.v_row),
        ARRAY(w.m, n),
        ARRAY(w.l, n),
        ARRAY(w.mu, n),
        ARRAY(w.sunk, n),
        ARRAY(w.s, tiles),
        ARRAY(w.t, tiles),
        ARRAY(w.h, is_linear(p) ? ABSENT : tiles),
        ARRAY(w.raw, p->score_mod ? tiles : ABSENT),
        ARRAY(w.r, p->dropout_p > 0 ? tiles : ABSENT),
        ARRAY(w.e, p->mask_t.data ? tiles : ABSENT),
        ARRAY(w.k, rows * row_stride(p->d_k)),
        ARRAY(w.k_t, rows * row_stride(p->d_k)),
        ARRAY(w.v, rows * row_stride(p->d_v)),
        ARRAY(w.v_t, rows * row_stride(p->d_v)),
        ARRAY(w.k_tail, SCORE_ROWS * p->d_k),
        ARRAY(w.k_t_tail, SCORE_ROWS * p->d_k),
        ARRAY(w.line, line_size(p, w.block)),
    };
    take_arrays(arrays, COUNT(arrays), a);
    w.amx = amx_given_layout(p, n_pairs, n, w.block, n, a);
    return w;
}

static size_t tangent_bytes(const sdpa_problem *p) {
    sdpa_arena arena = {NULL, 0};
    tangent_layout(p, AMX_VALUES, &arena);
    return arena.used;
}

/* pack_rows of a matrix that may be absent, in which case p is NULL. */
INLINE rows tangent_rows(const sdpa_matrix *m, int64_t j, int64_t n, int64_t d, int64_t n_reads, real *copy,
                         real *tail) {
    if (!m->data) return (rows){0};
    return pack_rows(m, j, n, d, n_reads, copy, tail);
}

/* A block of keys and values with their tangents. */
typedef struct tangent_block {
    rows k, k_t, v, v_t;
} tangent_block;

/* t = factor times s or, with `adds`, t + that, for a panel of n keys, rows `row` apart. */
INLINE void put_panel(real *t, const real *s, int64_t row, panel q, int64_t n, real factor, bool adds) {
    for (int64_t j = 0; j < n; j++) {
        for (int64_t at = j * row; at < j * row + q.nv * VL; at += VL) {
            vstore(t + at, adds ? vmuladd(vset1(factor), vload(s + at), vload(t + at)) : factor * vload(s + at));
        }
    }
}

/* score_tangents by the matrix unit, whose room still holds S of the panel. w->q_t is the tangent of Q in any case: that of
 * scale Q would have more digits than its parts. */
NOINLINE void tile_tangents(const sdpa_unit *u, const tangent_scratch *w, const tangent_block *b, panel q) {
    const real factor = scale_factor(u);
    const int64_t row = w->n_lanes, n = b->k.n;
    real *t = w->t + q.i, *s = amx_room(&w->amx, q.i);
    if (own_scale(u)) put_panel(t, s, row, q, n, sign_of_scale(u) * (real)u->scale_t, false);
    amx_product(&w->amx, AMX_TANGENTS, AMX_SCORES, q, n, s);
    put_panel(t, s, row, q, n, factor, own_scale(u));
    if (!b->k_t.p) return;
    amx_product(&w->amx, AMX_SCORES, AMX_TANGENTS, q, n, s);
    put_panel(t, s, row, q, n, factor, true);
}

/* T_0 of a panel. Where the head has its own scale, w->q_t holds the tangent of scale Q, except in the matrix unit. */
NOINLINE void score_tangents(const sdpa_unit *u, const tangent_scratch *w, const tangent_block *b, panel q) {
    const int64_t d_k = u->problem->d_k;
    vec unused[SCORE_WIDTH] = {{0}};
    if (amx_gives(&w->amx)) {
        tile_tangents(u, w, b, q);
        return;
    }
    scores of_q = panel_scores(w->q_t, q, &b->k, d_k, w->t + q.i, w->n_lanes),
           of_k = panel_scores(w->q, q, &b->k_t, d_k, w->t + q.i, w->n_lanes);
    of_q.extreme = of_k.extreme = (real *)unused;
    if (own_scale(u) && b->k_t.p) {
        score(&of_k, q.nv, SCORE_RAW);
        scale_panel(&of_k, q, scale_factor(u));
        score(&of_q, q.nv, SCORE_ADDED);
        return;
    }
    score(&of_q, q.nv, SCORE_RAW);
    if (own_scale(u)) return;
    if (b->k_t.p) score(&of_k, q.nv, SCORE_ADDED);
    scale_panel(&of_q, q, scale_factor(u));
}

/* Turns T_0 of a panel, in t, into T by score_mod, from whose input w->raw comes; of second order also sets slope, bend
 * and t0. score_mod gets the tangent of capped scores. */
NOINLINE void program_tangents(const sdpa_unit *u, const tangent_scratch *w, const block *b, panel q) {
    const sdpa_problem *p = u->problem;
    const int64_t row = w->n_lanes;
    const bool second = w->slope;
    const real inverse = inverse_cap(p);
    program_run r;
    for (int64_t at = q.i; at < b->n_j * row; at += row) {
        for (int x = 0; x < q.nv * VL; x += VL) {
            const vec h = inverse * vload(w->raw + at + x), t = vmuladd(-h, h, vset1(1)) * vload(w->t + at + x);
            vstore(w->t + at + x, t);
            if (second) vstore(w->t0 + at + x, t);
        }
    }
    begin_program(&r, p->score_mod, second ? SDPA_CODE_SECOND : SDPA_CODE_TANGENT, u, b, w->line);
    for (int64_t j = 0; j < b->n_j; j += SCORE_ROWS) {
        const int64_t at = j * row + q.i;
        r.in[0] = (program_input){w->raw + at, row};
        r.in[1] = (program_input){w->t + at, row};
        r.out[SDPA_OUT_TANGENT] = (program_output){w->t + at, row};
        r.out[SDPA_OUT_SLOPE] = (program_output){lane_of(w->slope, at), row};
        r.out[SDPA_OUT_BEND] = (program_output){lane_of(w->bend, at), row};
        run_tile(&r, b->j0 + j, b->n_j - j < SCORE_ROWS ? b->n_j - j : SCORE_ROWS, NULL, 0);
    }
    if (!second || !is_capped(p)) return;
    for (int64_t at = q.i; at < b->n_j * row; at += row) {
        for (int x = 0; x < q.nv * VL; x += VL) {
            const vec h = inverse * vload(w->raw + at + x), cap = vmuladd(-h, h, vset1(1));
            const vec slope = vload(w->slope + at + x), bend = vset1(-2 * inverse) * h * vload(w->t0 + at + x);
            vstore(w->bend + at + x, vmuladd(cap, vload(w->bend + at + x), slope * bend));
            vstore(w->slope + at + x, cap * slope);
        }
    }
}

/* For a panel: logits s in log2 units, their maximum over keys, T_0 = scale (a K^T + Q b^T) in t, and h; with a score_mod
 * T in place of T_0. False, computing nothing, if all pairs are masked. */
NOINLINE bool tangent_scores(const sdpa_unit *u, const tangent_scratch *w, const tangent_block *b, panel q,
                             vec *maximum) {
    const sdpa_problem *p = u->problem;
    const block pairs = block_of(u, q, &b->k);
    scores t = panel_scores(w->q, q, &b->k, p->d_k, w->s + q.i, w->n_lanes);
    t.ds = lane_of(w->h, q.i);
    t.extreme = (real *)maximum;
    const enum bias_kind bias = bias_block(u, &pairs, (real)M_LOG2E, t.s, t.s_row, w->line);
    if (bias == BIAS_ALL_MASKED) return false;
    score_program own;
    t.raw = lane_of(w->raw, q.i);
    use_program(&t, &own, u, &pairs, w->line);
    if (amx_gives(&w->amx)) amx_give(&w->amx, q.i, q, false, &t);
    score_logits(&t, q.nv, u, bias, M_LOG2E);
    score_tangents(u, w, b, q);
    if (p->score_mod) program_tangents(u, w, &pairs, q);
    return true;
}

/* Sets w->e to the mask's tangent of a panel, transposed; false if it is 0. */
INLINE bool tangent_mask(const sdpa_unit *u, const tangent_scratch *w, const tangent_block *b, panel q) {
    const block pairs = block_of(u, q, &b->k);
    return u->mask_t.data && mask_block(&u->mask_t, &pairs, 1, w->e + q.i, w->n_lanes, w->line) != BIAS_NONE;
}

/* Updates m, l and mu of a vector of queries with n keys, and leaves P^T (not divided by l) in s and P^T * (T - mu) in
 * t, both with dropout. Masked pairs become -0. Sets *alpha, the factor by which earlier sums shrink, and *moved, the
 * change of mu; returns the lanes that have masked pairs. */
INLINE ivec tangent_weights(const sdpa_problem *p, const tangent_scratch *w, int64_t lane, int64_t n, bool biased,
                            vec maximum, vec *alpha, vec *moved) {
    ivec any_masked = {0};
    vec old = vload(w->m + lane), m = vmax2(maximum, old), sums[4] = {{0}}, sums_t[4] = {{0}};
    vstore(w->m + lane, m);
    m = vselect(m == -(real)INFINITY, (vec){0}, m);
    *alpha = vexp2(old - m);
    for (int64_t tile = 0; tile < n; tile += 8) {
        const int64_t end = tile + 8 < n ? tile + 8 : n;
        vec part = {0}, part_t = {0};
        for (int64_t j = tile; j < end; j++) {
            const int64_t at = j * w->n_lanes + lane;
            vec s = vload(w->s + at), t = vload(w->t + at), probability = vexp2(s - m);
            ivec hidden = s == -(real)INFINITY;
            t *= slope_at(p, w->h, at);
            if (biased) t += vload(w->e + at);
            part += probability;
            part_t += vselect(hidden, (vec){0}, probability * t);
            any_masked |= hidden;
            vstore(w->s + at, vselect(hidden, vset1(-0.0), probability));
            vstore(w->t + at, t);
        }
        sums[tile / 8 % 4] += part;
        sums_t[tile / 8 % 4] += part_t;
    }
    /* T is measured from its mean so far, and earlier sums are moved to the new mean. Subtracting mu only at the end
     * would lose the digits that mu O and P T V have in common. */
    const vec sum = sum_of_four(sums, 1), sum_t = sum_of_four(sums_t, 1);
    vec l = *alpha * vload(w->l + lane), mu = vload(w->mu + lane);
    vec mean = vselect(l + sum == 0, (vec){0}, vmuladd(l, mu, sum_t) / (l + sum));
    vstore(w->l + lane, l + sum);
    vstore(w->mu + lane, mean);
    *moved = mean - mu;
    for (int64_t j = 0; j < n; j++) {
        const int64_t at = j * w->n_lanes + lane;
        vec probability = vload(w->s + at);
        ivec hidden = (ivec)probability == SIGN_BIT;
        probability *= factor_at(w->r, at);
        vstore(w->s + at, probability);
        vstore(w->t + at, vselect(hidden, probability, probability * (vload(w->t + at) - mean)));
    }
    return any_masked;
}

/* Adds a block of keys to o, o_t, l and mu of a panel. */
NOINLINE void tangent_keys(const sdpa_unit *u, const tangent_scratch *w, tangent_block *b, panel q) {
    const sdpa_problem *p = u->problem;
    const block pairs = block_of(u, q, &b->k);
    vec alpha[SCORE_WIDTH], maximum[SCORE_WIDTH], moved[SCORE_WIDTH];
    ivec any_masked = {0};
    for (int x = 0; x < q.nv; x++) maximum[x] = vset1(-INFINITY);
    if (!tangent_scores(u, w, b, q, maximum)) return;
    const bool biased = tangent_mask(u, w, b, q);
    draw_factors(u, &pairs, lane_of(w->r, q.i), w->n_lanes);
    for (int x = 0; x < q.nv; x++) {
        any_masked |= tangent_weights(p, w, q.i + x * VL, b->k.n, biased, maximum[x], &alpha[x], &moved[x]);
    }
    real *o = w->o + q.i * w->v_row, *o_t = w->o_t + q.i * w->v_row;
    for (int64_t i = 0; i < q.n_i; i++) {
        const vec move = vset1(((const real *)moved)[i]);
        for (int64_t x = i * w->v_row; x < (i + 1) * w->v_row; x += VL) {
            vstore(o_t + x, vmuladd(-move, vload(o + x), vload(o_t + x)));
        }
    }

    const bool finite =
        !vany(any_masked) || (rows_finite(&b->v, p->d_v) && (!b->v_t.p || rows_finite(&b->v_t, p->d_v)));
    const int64_t width = finite ? w->v_row : p->d_v;
    const weight_block weights = {
        .p = w->s + q.i, .row = w->n_lanes, .n_i = q.n_i, .n = b->k.n, .in_order = p->invariant};
    weight_block tangents = weights;
    tangents.p = w->t + q.i;
    add_to_queries(o_t, w->v_row, width, &tangents, &b->v, alpha, 1, finite);
    add_to_queries(o, w->v_row, width, &weights, &b->v, alpha, 1, finite);
    add_to_queries(o_t, w->v_row, width, &weights, &b->v_t, NULL, 1, finite);
}

/* Divides o and o_t by l with the sink, which has no value but moves the mean mu. */
INLINE void tangent_finish(const sdpa_unit *u, const tangent_scratch *w) {
    const double sink = sink_of(u);
    const real sink_t = scalar_of(&u->sinks_t, 0);
    for (int64_t i = 0; i < u->n_i; i++) {
        real low = 0, term, *o = w->o + i * w->v_row, *o_t = w->o_t + i * w->v_row;
        const real keys = w->l[i];
        const real factor = add_sink(sink, &w->m[i], &low, &w->l[i], &term);
        const real inverse = w->l[i] == 0 ? 0 : 1 / w->l[i];
        w->sunk[i] = term * inverse;
        if (factor == 0) w->l[i] = INFINITY; /* the keys' weights are 0 beside the sink's */
        const real move = w->sunk[i] == 0 ? 0 : w->sunk[i] * (sink_t - w->mu[i]);
        /* The keys' share times their mean, because beside a large sink mu + move would cancel. */
        if (w->sunk[i] != 0) w->mu[i] = muladd(factor * keys * inverse, w->mu[i], w->sunk[i] * sink_t);
        for (int64_t x = 0; x < w->v_row; x += VL) {
            const vec mean = factor * inverse * vload(o + x);
            vstore(o + x, mean);
            vstore(o_t + x, vmulsub(vset1(factor * inverse), vload(o_t + x), move * mean));
        }
    }
}

/* q_t = the tangent of scale q: |scale| q_t + sign scale_t q, in n elements. */
NOINLINE void mix_tangent(const sdpa_unit *u, real sign, real *q_t, const real *q, int64_t n) {
    const real scale = sign * scale_of(u), scale_t = sign * (real)u->scale_t;
    for (int64_t x = 0; x < n; x++) q_t[x] = muladd(scale, q_t[x], scale_t * q[x]);
}

/* Begins block b for the products of the first n_pairs. */
NOINLINE void tile_keys(const sdpa_unit *u, const tangent_scratch *w, const tangent_block *b, int n_pairs) {
    const rows *const of[AMX_PAIRS] = {&b->k, &b->k_t, &b->v, &b->v_t};
    const sdpa_matrix *const m[AMX_PAIRS] = {&u->k, &u->k_t, &u->v, &u->v_t};
    for (int i = 0; i < n_pairs; i++) {
        if (of[i]->p) amx_give_keys(&w->amx, i, m[i], of[i], w->line);
    }
}

/* Packs the unit's queries and streams all visible keys: fills m, l (with the sink), mu, o and o_t. False if
 * interrupted. */
NOINLINE bool tangent_sweep(const sdpa_unit *u, tangent_scratch *w, int64_t j0, int64_t j1) {
    const sdpa_problem *p = u->problem;
    const bool given = amx_gives(&w->amx);
    const real sign = sign_of_scale(u);
    pack_panels(w->q, &u->q, u->i0, u->n_i, p->d_k, sign, w->line);
    if (u->q_t.data) {
        pack_panels(w->q_t, &u->q_t, u->i0, u->n_i, p->d_k, sign, w->line);
    } else {
        memset(w->q_t, 0, sizeof(real) * (size_t)(p->d_k * w->n_lanes));
    }
    if (own_scale(u) && !given) mix_tangent(u, sign, w->q_t, w->q, p->d_k * w->n_lanes);
    if (given) {
        SDPA_TAKE(AMX);
        amx_give_queries(&w->amx, AMX_SCORES, w->q, u->n_i);
        amx_give_queries(&w->amx, AMX_TANGENTS, w->q_t, u->n_i);
    }
    memset(w->o, 0, sizeof(real) * (size_t)(w->n_lanes * w->v_row));
    memset(w->o_t, 0, sizeof(real) * (size_t)(w->n_lanes * w->v_row));
    for (int64_t i = 0; i < w->n_lanes; i++) {
        w->m[i] = -(real)INFINITY;
        w->l[i] = w->mu[i] = 0;
    }
    keys j = {.j0 = first_block(p, j0, j1)};
    while (next_seen(u, w->block, j1, &j)) {
        tangent_block b = {.k = tangent_rows(&u->k, j.j0, j.n, p->d_k, given, w->k, w->k_tail),
                           .k_t = tangent_rows(&u->k_t, j.j0, j.n, p->d_k, given, w->k_t, w->k_t_tail),
                           .v = tangent_rows(&u->v, j.j0, j.n, p->d_v, u->n_i, w->v, NULL),
                           .v_t = tangent_rows(&u->v_t, j.j0, j.n, p->d_v, u->n_i, w->v_t, NULL)};
        if (given) tile_keys(u, w, &b, AMX_VALUES);
        PANELS (q, u->n_i) tangent_keys(u, w, &b, q);
    }
    if (j.j0 < j1) return false;
    tangent_finish(u, w);
    return true;
}

/* Computes o_t of the unit and, if it is wanted, o. */
COLD static void tangent_unit(const sdpa_unit *u, void *scratch) {
    const sdpa_problem *p = u->problem;
    sdpa_arena arena = {scratch, 0};
    tangent_scratch w = tangent_layout(p, AMX_VALUES, &arena);
    int64_t j0, j1;
    unit_keys(u, &j0, &j1);
    if (!tangent_sweep(u, &w, j0, j1)) return;
    for (int64_t i = 0; i < u->n_i; i++) {
        if (u->o.data) store(u->o.data + (u->i0 + i) * u->o.row, w.o + i * w.v_row, p->d_v, u->o.col, u->o.dtype);
        store(u->o_t.data + (u->i0 + i) * u->o_t.row, w.o_t + i * w.v_row, p->d_v, u->o_t.col, u->o_t.dtype);
    }
}

#endif
