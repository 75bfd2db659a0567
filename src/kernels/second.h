/* Double backward: the derivatives of tangent.h's <dO, O_t>. One unit is a block of queries. A forward-mode pass finds
 * the numbers per row; then a pass over the key blocks adds to shared gradients in the same order as the backward. */
#ifndef SDPA_KERNEL_SECOND_H
#define SDPA_KERNEL_SECOND_H

#include "backward.h"
#include "tangent.h"

typedef struct second_scratch {
    tangent_scratch forward;
    real *v_tail, *v_t_tail;
    real *dout;                          /* pack_panels of d_v */
    real *g, *c;                         /* (block, n_lanes): G and C, then the factors of K and of b */
    real *q_rows, *q_t_rows, *dout_rows; /* pack_rows */
    real *delta, *cross;                 /* per query: D, rowsum(dO * O_t) */
    real *dq;                            /* (n_lanes, d_k rounded up to VL) */
    real *first;                         /* as dq: dS K of heads with their own scale; NULL without such heads */
    real *ds;                            /* (block, n_lanes): dS of first order, for score_mod's arrays, or NULL */
    real *dmask;                         /* per query: the gradient of a mask that is broadcast over keys */
} second_scratch;

NOINLINE second_scratch second_layout(const sdpa_problem *p, sdpa_arena *a) {
    second_scratch w = {.forward = tangent_layout(p, AMX_PAIRS, a)};
    const int64_t n = w.forward.n_lanes, tiles = (w.forward.block + MAX_TILE_ROWS) * n;
    const array arrays[] = {
        ARRAY(w.v_tail, SCORE_ROWS * p->d_v),
        ARRAY(w.v_t_tail, SCORE_ROWS * p->d_v),
        ARRAY(w.dout, p->d_v * n),
        ARRAY(w.g, tiles),
        ARRAY(w.c, tiles),
        ARRAY(w.q_rows, n * row_stride(p->d_k)),
        ARRAY(w.q_t_rows, n * row_stride(p->d_k)),
        ARRAY(w.dout_rows, n * row_stride(p->d_v)),
        ARRAY(w.delta, n),
        ARRAY(w.cross, n),
        ARRAY(w.dq, n * w.forward.k_row),
        ARRAY(w.first, p->scales.data ? n * w.forward.k_row : ABSENT),
        ARRAY(w.dmask, n),
        ARRAY(w.ds, p->score_mod ? tiles : ABSENT),
        ARRAY(w.forward.slope, p->score_mod ? tiles : ABSENT),
        ARRAY(w.forward.bend, p->score_mod ? tiles : ABSENT),
        ARRAY(w.forward.t0, p->score_mod ? tiles : ABSENT),
    };
    take_arrays(arrays, COUNT(arrays), a);
    return w;
}

static size_t second_bytes(const sdpa_problem *p) {
    sdpa_arena arena = {NULL, 0};
    second_layout(p, &arena);
    return arena.used;
}

/* The unit's rows of q, its tangent and dO. Where the head has its own scale, q_t is the tangent of scale q. */
typedef struct second_rows {
    rows q, q_t, dout;
    bool finite; /* no masked pair can meet NaN or Inf in them */
} second_rows;

/* second_products by the matrix unit. */
NOINLINE void tile_second_products(const second_scratch *w, const tangent_block *b, panel q) {
    const amx_given *amx = &w->forward.amx;
    const int64_t n = b->v.n, row = w->forward.n_lanes;
    real *s = amx_room(amx, q.i);
    amx_product(amx, AMX_VALUES, AMX_VALUES, q, n, s);
    put_panel(w->g + q.i, s, row, q, n, 1, false);
    if (!b->v_t.p) return;
    amx_product(amx, AMX_VALUES, AMX_VALUE_TANGENTS, q, n, s);
    put_panel(w->c + q.i, s, row, q, n, 1, false);
}

/* G and C of a panel. */
INLINE void second_products(const sdpa_unit *u, const second_scratch *w, const tangent_block *b, panel q) {
    const int64_t n_lanes = w->forward.n_lanes, d_v = u->problem->d_v;
    if (amx_gives(&w->forward.amx)) {
        tile_second_products(w, b, q);
        return;
    }
    vec unused[SCORE_WIDTH] = {{0}};
    scores t = panel_scores(w->dout, q, &b->v, d_v, w->g + q.i, n_lanes);
    t.extreme = (real *)unused;
    score(&t, q.nv, SCORE_RAW);
    if (!b->v_t.p) return;
    t = panel_scores(w->dout, q, &b->v_t, d_v, w->c + q.i, n_lanes);
    t.extreme = (real *)unused;
    score(&t, q.nv, SCORE_RAW);
}

/* From s, t, G and C of a vector of queries and n keys, computes the factors of the products (of dO in s, of q and k in
 * g, of their tangents in c) and the mask's gradient in t. Masked pairs become -0; returns the lanes that have any. */
INLINE ivec second_lanes(const sdpa_unit *u, const second_scratch *w, int64_t lane, int64_t n, bool biased) {
    const tangent_scratch *f = &w->forward;
    const real bend = bend_of(u->problem);
    const bool through = wants_scores(u), crossed = u->v_t.data;
    const vec m = vload(f->m + lane), inverse = vload(f->l + lane), mu = vload(f->mu + lane), mark = vset1(-0.0);
    const vec delta = vload(w->delta + lane), cross = vload(w->cross + lane);
    ivec any_masked = {0};
    for (int64_t j = 0; j < n; j++) {
        const int64_t at = j * f->n_lanes + lane;
        vec s = vload(f->s + at);
        ivec hidden = s == -(real)INFINITY;
        vec t0 = vload(f->t + at), slope = slope_at(u->problem, f->h, at), r = factor_at(f->r, at), c = {0};
        vec t = slope * t0;
        if (f->slope) slope = vload(f->slope + at); /* T itself was in t */
        if (biased) t += vload(f->e + at);
        vec probability = vexp2(s - m) * inverse;
        vstore(f->s + at, vselect(hidden, mark, r * probability * (t - mu)));
        any_masked |= hidden;
        if (!through) continue;
        if (crossed) c = r * vload(w->c + at);
        vec g = vmulsub(r, vload(w->g + at), delta), ds = probability * g;
        vec second = probability * (vmuladd(t - mu, g, c) - cross);
        vec h = f->h ? vload(f->h + at) : (vec){0};
        vec to_k = slope * vmuladd(bend * h * t0, ds, second);
        if (f->slope) {
            to_k = vmuladd(vload(f->bend + at), ds, slope * second);
            vstore(w->ds + at, vselect(hidden, mark, ds));
        }
        vstore(f->t + at, vselect(hidden, mark, second));
        vstore(w->g + at, vselect(hidden, mark, to_k));
        vstore(w->c + at, vselect(hidden, mark, slope * ds));
    }
    return any_masked;
}

/* second_lanes for all queries and a block of keys; returns which of the keys the queries see. */
NOINLINE enum panel_state second_scores(const sdpa_unit *u, const second_scratch *w, const tangent_block *b) {
    const tangent_scratch *f = &w->forward;
    bool any = false, masked = false;
    PANELS (q, u->n_i) {
        const block pairs = block_of(u, q, &b->k);
        vec unused[SCORE_WIDTH] = {{0}};
        if (!tangent_scores(u, f, b, q, unused)) {
            real *hidden[] = {f->s, f->t, w->g, w->c, w->ds};
            for (int x = 0; x < COUNT(hidden) && hidden[x]; x++)
                fill_panel(hidden[x] + q.i, f->n_lanes, q.nv, b->k.n, vset1(-0.0));
            masked = true;
            continue;
        }
        any = true;
        const bool biased = tangent_mask(u, f, b, q);
        if (wants_scores(u)) second_products(u, w, b, q);
        draw_factors(u, &pairs, lane_of(f->r, q.i), f->n_lanes);
        for (int x = 0; x < q.nv; x++) masked |= vany(second_lanes(u, w, q.i + x * VL, b->k.n, biased));
    }
    return !any ? PANEL_HIDDEN : masked ? PANEL_MASKED : PANEL_VISIBLE;
}

/* Adds the contributions of keys j to dq, dk, dv and dmask. */
NOINLINE void second_keys(const sdpa_unit *u, const second_scratch *w, const second_rows *own, keys j) {
    const sdpa_problem *p = u->problem;
    const tangent_scratch *f = &w->forward;
    const bool given = amx_gives(&f->amx);
    const tangent_block b = {.k = tangent_rows(&u->k, j.j0, j.n, p->d_k, u->n_i, f->k, f->k_tail),
                             .k_t = tangent_rows(&u->k_t, j.j0, j.n, p->d_k, u->n_i, f->k_t, f->k_t_tail),
                             .v = tangent_rows(&u->v, j.j0, j.n, p->d_v, given, f->v, w->v_tail),
                             .v_t = tangent_rows(&u->v_t, j.j0, j.n, p->d_v, given, f->v_t, w->v_t_tail)};
    if (given) tile_keys(u, f, &b, wants_scores(u) ? AMX_PAIRS : AMX_VALUES);
    const enum panel_state state = second_scores(u, w, &b);
    if (state == PANEL_HIDDEN) return;

    if (u->dmask.data) add_mask_gradient(u, f->t, f->n_lanes, w->dmask, j.j0, j.n);
    if (u->sums) {
        const real *const in[] = {f->raw, f->t0, w->ds, f->t};
        add_to_arrays(u, SDPA_CODE_SCATTER_SECOND, j, in, f->n_lanes, f->line);
    }
    const bool finite = state == PANEL_VISIBLE || own->finite;
    const real scale = scale_of(u);
    const weight_block values = {
        .p = f->s, .row = f->n_lanes, .n_i = u->n_i, .j0 = j.j0, .n = j.n, .in_order = p->invariant};
    weight_block straight = values, tangents = values;
    straight.p = w->g;
    tangents.p = w->c;
    add_to_keys(&u->dv, p->d_v, &values, &own->dout, 1, finite);
    add_to_keys(&u->dk, p->d_k, &straight, &own->q, scale, finite);
    add_to_keys(&u->dk, p->d_k, &tangents, &own->q_t, own_scale(u) ? 1 : scale, finite);
    if (!wants_queries(u)) return;
    const bool keys_finite = state == PANEL_VISIBLE || (all_finite(b.k.p, b.k.row, j.n, p->d_k) &&
                                                        (!b.k_t.p || all_finite(b.k_t.p, b.k_t.row, j.n, p->d_k)));
    const real factor = own_scale(u) ? 1 : scale;
    add_to_queries(w->dq, f->k_row, p->d_k, &straight, &b.k, NULL, factor, keys_finite);
    add_to_queries(w->dq, f->k_row, p->d_k, &tangents, &b.k_t, NULL, factor, keys_finite);
    if (own_scale(u)) add_to_queries(w->first, f->k_row, p->d_k, &tangents, &b.k, NULL, 1, keys_finite);
}

/* The unit's rows of the tangent of scale q, which replace those of q_t. */
NOINLINE void mix_rows(const sdpa_unit *u, const second_scratch *w, second_rows *own) {
    const int64_t row = row_stride(u->problem->d_k);
    for (int64_t i = 0; i < u->n_i; i++) {
        for (int64_t x = 0; x < u->problem->d_k; x++) {
            const real q_t = own->q_t.p ? own->q_t.p[i * own->q_t.row + x] : 0;
            w->q_t_rows[i * row + x] = muladd(scale_of(u), q_t, (real)u->scale_t * own->q.p[i * own->q.row + x]);
        }
        for (int64_t x = u->problem->d_k; x < row; x++) w->q_t_rows[i * row + x] = 0;
    }
    own->q_t = (rows){.p = w->q_t_rows, .row = row, .n = u->n_i};
}

/* finish_scale of second order: w->dq holds dS' K + dS b, w->first dS K. */
NOINLINE double finish_second_scale(const sdpa_unit *u, const second_scratch *w, const rows *q) {
    const tangent_scratch *f = &w->forward;
    const int64_t d_k = u->problem->d_k;
    double sum = u->dscales.data ? product_of_rows(q, w->dq, f->k_row, u->n_i, d_k) : 0;
    if (u->dscales.data && u->q_t.data) {
        const rows q_t = pack_rows(&u->q_t, u->i0, u->n_i, d_k, 0, w->q_t_rows, NULL);
        sum += product_of_rows(&q_t, w->first, f->k_row, u->n_i, d_k);
    }
    for (int64_t x = 0; x < u->n_i * f->k_row; x++) {
        w->dq[x] = muladd(scale_of(u), w->dq[x], (real)u->scale_t * w->first[x]);
    }
    return sum;
}

/* D, rowsum(dO * O_t) and 1 / l of the unit's queries, after the forward-mode pass. */
INLINE void second_queries(const sdpa_unit *u, const second_scratch *w, const rows *dout) {
    const tangent_scratch *f = &w->forward;
    for (int64_t i = 0; i < f->n_lanes; i++) {
        w->delta[i] = w->cross[i] = w->dmask[i] = 0;
        if (i >= u->n_i || f->l[i] == 0) {
            f->m[i] = f->l[i] = 0; /* P = 0 */
            continue;
        }
        f->l[i] =
            1 / f->l[i]; /* P = 2^(s - m) / l, because the exponent of 2^(s - lse) would be rounded more coarsely */
        vec delta = {0}, cross = {0};
        for (int64_t x = 0; x < f->v_row; x += VL) {
            const vec g = vload(dout->p + i * dout->row + x);
            delta = vmuladd(g, vload(f->o + i * f->v_row + x), delta);
            cross = vmuladd(g, vload(f->o_t + i * f->v_row + x), cross);
        }
        w->delta[i] = vreduce_add(delta) - (u->dlse ? query_scalar(u->dlse, &u->problem->dlse, u->i0 + i) : 0);
        w->cross[i] = vreduce_add(cross);
    }
}

/* The derivative of the sink. A sink has no value, so its G and C are 0. */
INLINE double second_sink(const sdpa_unit *u, const second_scratch *w) {
    const tangent_scratch *f = &w->forward;
    const real sink_t = scalar_of(&u->sinks_t, 0);
    double sum = 0;
    for (int64_t i = 0; i < u->n_i; i++) {
        sum -= (double)f->sunk[i] * ((sink_t - f->mu[i]) * w->delta[i] + w->cross[i]);
    }
    return sum;
}

/* Computes dq and o_t of the unit and adds to the other gradients. */
COLD static void second_unit(const sdpa_unit *u, void *scratch) {
    const sdpa_problem *p = u->problem;
    sdpa_arena arena = {scratch, 0};
    second_scratch w = second_layout(p, &arena);
    tangent_scratch *f = &w.forward;
    int64_t j0, j1;
    unit_keys(u, &j0, &j1);
    if (!tangent_sweep(u, f, j0, j1)) return;

    second_rows own = {.q = pack_rows(&u->q, u->i0, u->n_i, p->d_k, j1 - j0, w.q_rows, NULL),
                       .q_t = tangent_rows(&u->q_t, u->i0, u->n_i, p->d_k, j1 - j0, w.q_t_rows, NULL),
                       .dout = pack_rows(&u->dout, u->i0, u->n_i, p->d_v, 1 + j1 - j0, w.dout_rows, NULL)};
    own.finite =
        rows_finite(&own.q, p->d_k) && rows_finite(&own.dout, p->d_v) && (!own.q_t.p || rows_finite(&own.q_t, p->d_k));
    if (own_scale(u)) mix_rows(u, &w, &own);
    pack_panels(w.dout, &u->dout, u->i0, u->n_i, p->d_v, 1, f->line);
    if (amx_gives(&f->amx)) amx_give_queries(&f->amx, AMX_VALUES, w.dout, u->n_i);
    memset(w.dq, 0, sizeof(real) * (size_t)(f->n_lanes * f->k_row));
    if (own_scale(u)) memset(w.first, 0, sizeof(real) * (size_t)(f->n_lanes * f->k_row));
    second_queries(u, &w, &own.dout);
    for (int64_t i = 0; i < u->n_i && u->o_t.data; i++) {
        store(u->o_t.data + (u->i0 + i) * u->o_t.row, f->o_t + i * f->v_row, p->d_v, u->o_t.col, u->o_t.dtype);
    }
    const int64_t size = sdpa_key_block(p);
    if (!wants_scores(u) && !u->dv.data) j1 = j0;
    const key_blocks blocks = blocks_to_pass(u, j0, j1);
    for (int64_t b = blocks.first; b < blocks.last; b++) {
        if (sees_none_of(u, j0, j1, b)) {
            if (!sdpa_turn_skip(u, b)) return;
            continue;
        }
        const int64_t left = j1 - b * size;
        if (!sdpa_turn_wait(u, b)) return;
        second_keys(u, &w, &own, (keys){b * size, left < size ? left : size});
        sdpa_turn_pass(u, b);
    }
    head_sums sums = {.dsinks = second_sink(u, &w)};
    if (own_scale(u)) sums.dscales = finish_second_scale(u, &w, &own.q);
    store_gradients(u, w.dq, f->k_row, w.dmask, &sums, f->line);
}

#endif
