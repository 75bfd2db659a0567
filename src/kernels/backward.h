/* Backward: one unit is a block of queries against all its visible keys (FlashAttention-2, Dao 2023, algorithm 2, with
 * the loops exchanged). Five products per pair of blocks: S = K Q^T, dP = V dO^T, dV += P^T dO, dK += dS^T Q, dQ += dS
 * K. P is recomputed from lse; dS = P * (dP - delta), delta = rowsum(dO * O) - dlse. With dropout's factors R the value
 * products use R * P and R * dP. A cap multiplies dS by its slope, 1 - tanh^2, after the mask's gradient is taken.
 *
 * lse and O arrive rounded to their types. A row of P sums to 1, so the sum of the row as computed here restores the
 * digits that lse lost. This costs nothing for key blocks whose P can be kept until the rows are complete, and one more
 * product for the others. 16-bit O is not precise enough for delta, nor is O of additive scores, where dS cancels in
 * dQ: delta is then recomputed with the weights.
 *
 * dQ stays in scratch until the unit ends. dK, dV and dMask accumulate in memory that units share. A unit touches key
 * block j only after all earlier units have, so every sum has the serial order for any number of threads. */
#ifndef SDPA_KERNEL_BACKWARD_H
#define SDPA_KERNEL_BACKWARD_H

#include "complete.h"

/* Applies dropout to a panel. P and ds = P * dP, without factors, become R * P and R * ds - P * delta; masked pairs
 * stay -0. */
NOINLINE void drop_panel(const sdpa_unit *u, const backward_scratch *w, panel q, const rows *v) {
    const block b = block_of(u, q, v);
    dropout_block(u, &b, w->r + q.i, w->n_lanes);
    for (int64_t j = 0; j < v->n; j++) {
        for (int x = 0; x < q.nv; x++) {
            int64_t at = j * w->n_lanes + q.i + x * VL;
            vec p = vload(w->p + at), r = vload(w->r + at),
                ds = vmulsub(r, vload(w->ds + at), p * vload(w->delta + q.i + x * VL));
            vstore(w->ds + at, vselect((ivec)p == SIGN_BIT, p, ds));
            vstore(w->p + at, r * p);
        }
    }
}

/* The unit's rows of q and dO. */
typedef struct backward_rows {
    rows q, dout;
    bool finite; /* no masked pair can meet NaN or Inf in them */
} backward_rows;

/* Computes the rows and panels of dO, scaled by `factor`, and delta. The factor belongs to P, but every product of P
 * has dO or delta as its other operand. delta, like dP, uses dO rounded after scaling, so this rounding cancels in
 * dS. */
NOINLINE rows scale_queries(const sdpa_unit *u, const backward_scratch *w) {
    const int64_t d_v = u->problem->d_v, row = row_stride(d_v), size = sizeof(real);
    const rows dout = pack_rows(&u->dout, u->i0, u->n_i, d_v, 1, w->dout_rows, NULL),
               o = pack_rows(&u->o, u->i0, u->n_i, d_v, 1, w->o_rows, NULL);
    for (int64_t i = 0; i < u->n_i; i++) {
        const real factor = (real)w->factor[i];
        vec sum[8] = {{0}};
        for (int64_t x = 0; x < d_v; x += VL) {
            const vec scaled = factor * vload(dout.p + i * dout.row + x);
            vstore(w->dout_rows + i * row + x, scaled);
            sum[x / VL % 8] = vmuladd(scaled, vload(o.p + i * o.row + x), sum[x / VL % 8]);
        }
        UNROLL for (int h = 4; h > 0; h /= 2) { UNROLL for (int x = 0; x < h; x++) sum[x] += sum[x + h]; }
        const real product = vreduce_add(sum[0]);
        w->delta[i] = w->weighed[i] ? factor * w->delta[i] : muladd(-factor, w->dlse[i], product);
    }
    const sdpa_matrix scaled = {(char *)w->dout_rows, row * size, size, REAL_DTYPE, false};
    pack_panels(w->dout, &scaled, 0, u->n_i, d_v, 1, w->line);
    return (rows){.p = w->dout_rows, .row = row, .n = u->n_i};
}

/* Adds to the sums of score_mod's arrays what keys b contribute: `variant` with ds and, in the double backward, further
 * inputs, all (b.n, row). */
NOINLINE void add_to_arrays(const sdpa_unit *u, enum sdpa_variant variant, keys b, const real *const in[4], int64_t row,
                            real *scratch) {
    PANELS (q, u->n_i) {
        const block pairs = {u->i0 + q.i, q.n_i, b.j0, b.n};
        program_run r;
        begin_program(&r, u->problem->score_mod, variant, u, &pairs, scratch);
        for (int64_t j = 0; j < b.n; j += SCORE_ROWS) {
            for (int x = 0; x < 4; x++) r.in[x] = (program_input){in[x] ? in[x] + j * row + q.i : NULL, row};
            run_tile(&r, b.j0 + j, b.n - j < SCORE_ROWS ? b.n - j : SCORE_ROWS, NULL, 0);
        }
    }
}

/* Computes dS = P * (dP - delta) of all queries and the keys of v, without the cap's slope; with dropout, which comes
 * before delta, from w->delta. Returns which of the keys the queries see. */
INLINE enum panel_state score_gradients(const sdpa_unit *u, const backward_scratch *w, const rows *v,
                                        const real *delta) {
    const bool drops = u->problem->dropout_p > 0, wanted = drops || wants_scores(u);
    bool masked = false, any = false;
    PANELS (q, u->n_i) {
        const unsigned char state = w->state[q.i / VL];
        masked |= state != PANEL_VISIBLE;
        any |= state != PANEL_HIDDEN;
        if (state == PANEL_HIDDEN) {
            fill_panel(w->ds + q.i, w->n_lanes, q.nv, v->n, vset1(-0.0));
        } else if (wanted) {
            panel_gradient(u, w, v, q, drops ? w->zero : delta);
            if (drops) drop_panel(u, w, q, v);
        }
    }
    return !any ? PANEL_HIDDEN : masked ? PANEL_MASKED : PANEL_VISIBLE;
}

#ifdef HAVE_AMX
#include "amx_backward.h"
#endif

/* Computes everything after P for one piece of keys and, with `anew`, P too. c = |scale| log2(e). */
NOINLINE void backward_keys(const sdpa_unit *u, const backward_scratch *w, const backward_rows *own, keys b, real c,
                            bool anew) {
    const sdpa_problem *p = u->problem;
    const rows k = score_keys(u, w, b, wants_queries(u) ? u->n_i : 0), v = gradient_values(u, w, b);
    real unused[SDPA_QUERY_BLOCK] = {0};
    if (anew) weigh_keys(u, w, &k, c, unused);
    const enum panel_state state = score_gradients(u, w, &v, w->delta);
    if (state == PANEL_HIDDEN) return;

    if (u->dmask.data) add_mask_gradient(u, w->ds, w->n_lanes, w->dmask, b.j0, b.n);
    if (u->sums) {
        add_to_arrays(u, SDPA_CODE_SCATTER, b, (const real *[4]){w->raw, NULL, w->ds, NULL}, w->n_lanes, w->line);
    }
    for (int64_t x = 0; x < b.n * w->n_lanes && w->tanh; x += VL) {
        vstore(w->ds + x, slope_at(p, w->tanh, x) * vload(w->ds + x));
    }
    /* A masked pair must not meet NaN or Inf. Where it might, its products are skipped instead of multiplied by
     * zero. */
    const bool finite = state == PANEL_VISIBLE || own->finite;
    weight_block weights = {.p = w->p,
                            .row = w->n_lanes,
                            .n_i = u->n_i,
                            .j0 = b.j0,
                            .n = b.n,
                            .diagonal = diagonal_at(u, u->i0, b.j0),
                            .in_order = p->invariant};
#ifdef HAVE_AMX
    if (w->amx.can) {
        tile_gradients(u, w, own, &k, &weights, finite);
        return;
    }
#endif
    add_to_keys(&u->dv, p->d_v, &weights, &own->dout, 1, finite);
    if (p->scores == SDPA_ADDITIVE) {
        const additive_block t = {.q = w->q,
                                  .ds = w->ds,
                                  .k = k,
                                  .dq = w->dq_lanes,
                                  .part = w->part,
                                  .lanes = w->given,
                                  .state = w->state,
                                  .row = w->n_lanes,
                                  .j0 = b.j0,
                                  .n = b.n};
        if (u->dq.data || u->dk.data) additive_gradients(u, &t);
        return;
    }
    weights.p = w->ds;
    const real scale = scale_of(u);
    add_to_keys(&u->dk, p->d_k, &weights, &own->q, scale, finite);
    if (!wants_queries(u)) return;
    const bool keys_finite = state == PANEL_VISIBLE || all_finite(k.p, k.row, b.n, p->d_k);
    add_to_queries(w->dq, w->k_row, p->d_k, &weights, &k, NULL, own_scale(u) ? 1 : scale, keys_finite);
}

/* The inner product of rows of q and dq (n_i, dq_row). An element of dq that is 0 may stand for masked pairs, whose q
 * may be NaN. */
NOINLINE double product_of_rows(const rows *q, const real *dq, int64_t dq_row, int64_t n_i, int64_t d) {
    double sum = 0;
    for (int64_t i = 0; i < n_i; i++) {
        for (int64_t x = 0; x < d; x++) {
            const double g = dq[i * dq_row + x];
            if (g != 0) sum += g * q->p[i * q->row + x];
        }
    }
    return sum;
}

/* Of a head with its own scale, w->dq holds dS K: the gradient of the scale is q times that, and dQ the scale times
 * that. Returns the former. */
NOINLINE double finish_scale(const sdpa_unit *u, const backward_scratch *w, const rows *q) {
    const double sum = u->dscales.data ? product_of_rows(q, w->dq, w->k_row, u->n_i, u->problem->d_k) : 0;
    for (int64_t x = 0; x < u->n_i * w->k_row; x++) w->dq[x] *= scale_of(u);
    return sum;
}

#endif
