/* The rows of P of a unit of the backward, made complete before any gradient: see backward.h. */
#ifndef SDPA_KERNEL_COMPLETE_H
#define SDPA_KERNEL_COMPLETE_H

#include "backward_scores.h"

/* Finds the maxima, m + low, of the logits of the unit's queries. False if interrupted. */
COLD NOINLINE bool find_maxima(const sdpa_unit *u, const backward_scratch *w, int64_t first, int64_t j1) {
    const sdpa_problem *p = u->problem;
    const running row = {.m = w->m, .low = w->low, .rounded = may_round(u->problem)};
    for (int64_t i = 0; i < w->n_lanes; i++) {
        w->m[i] = -(real)INFINITY;
        w->low[i] = 0;
    }
    for (keys b = {.j0 = first * sdpa_key_block(p)}; next_piece(u, j1, &b);) {
        if (sdpa_run_stopped(u->run)) return false;
        if (is_hidden(u, b.j0, b.n)) continue;
        const rows k = score_keys(u, w, b, 0);
        PANELS (q, u->n_i) {
            scores t;
            score_program own;
            enum bias_kind bias;
            vec most[SCORE_WIDTH], unused[2][SCORE_WIDTH];
            if (!begin_scores(u, w, q, &k, &t, &own, &bias)) continue;
            for (int x = 0; x < q.nv; x++) most[x] = vset1(-INFINITY);
            t.extreme = (real *)most;
            const real factor = score_products(&t, q.nv, u, bias, M_LOG2E);
            move_maximum(&row, q.i, q.nv, NULL, factor, most, unused[0], unused[1]);
        }
    }
    return true;
}

/* Prepares rows whose lse is so large that its rounding error, in the exponent, would be out of range. They are computed
 * from the maximum of their logits, and their sums replace lse. Its order of magnitude still tells whether it belongs
 * to a larger set of keys, beside which these have weight 0. */
COLD NOINLINE void set_far_rows(const sdpa_unit *u, const backward_scratch *w, double *sunk, bool *whole) {
    const double log2_e = log2_e_of(u), sink = sink_of(u);
    for (int64_t i = 0; i < w->n_lanes; i++) {
        const double given = i < u->n_i ? query_double(u->lse, &u->problem->lse, u->i0 + i) * log2_e : 0;
        const double lse = isfinite(given) ? fmax(-REAL_MAX, fmin(REAL_MAX, given)) : given; /* as logits are */
        const double keys = (double)w->m[i] + w->low[i], most = sink > keys ? sink : keys;
        if (!isfinite(lse) || fabs(lse) <= FAR_LSE) {
            w->low[i] = 0;
            continue;
        }
        whole[i] = most >= lse - 8 * REAL_EPSILON * fabs(lse);
        const bool seen = whole[i] && keys >= sink - HIGHEST_SINK; /* the keys have weights above 0 */
        w->lse[i] = seen ? w->m[i] : (real)INFINITY;
        w->factor[i] = 1;
        sunk[i] = seen ? exp2(sink - keys) : whole[i] ? 1 : 0;
    }
}

/* The sink's weight in each row, up to factor. */
INLINE void weigh_sink(const sdpa_unit *u, const backward_scratch *w, double *sunk) {
    const double sink = sink_of(u);
    for (int64_t i = 0; i < u->n_i; i++) sunk[i] = sink == -INFINITY ? 0 : exp2(sink - w->lse[i]);
}

/* Computes P and the sums of its rows. A sum should be 1 except for the rounding of lse, a relative error of ulp(lse) /
 * 2 for the whole row. If it is that close to 1, P is divided by it, through `factor`. If not, lse belongs to a larger
 * set of keys and needs no correction. Also sums delta with the weights where O is not precise enough. `sunk`: see
 * weigh_sink. False if interrupted. */
NOINLINE bool complete_rows(const sdpa_unit *u, backward_scratch *w, int64_t j0, int64_t j1, real c, bool far,
                            double *sunk) {
    const sdpa_problem *p = u->problem;
    const real slack = completion_slack(p);
    const bool by_weights = weighs_delta(p), all = completes_all(p);
    const int64_t first = j0 / sdpa_key_block(p), end = j0 < j1 ? j1 : 0; /* a sink may be all that is seen */
    if (by_weights) pack_panels(w->dout, &u->dout, u->i0, u->n_i, p->d_v, 1, w->line);
    real sum[SDPA_QUERY_BLOCK] = {0};
    double delta[SDPA_QUERY_BLOCK] = {0};
    bool whole[SDPA_QUERY_BLOCK] = {false};
    if (far && find_maxima(u, w, first, end)) {
        set_far_rows(u, w, sunk, whole);
    } else if (far) {
        return false;
    }
    for (keys b = {.j0 = first * sdpa_key_block(p)}; next_piece(u, end, &b);) {
        if (sdpa_run_stopped(u->run)) return false;
        const int64_t size = sdpa_key_block(p);
        if (is_hidden(u, b.j0 / size * size, size)) continue; /* as sweep_blocks */
        const backward_scratch kept = kept_piece(w, p, b.j0, first);
        const rows k = score_keys(u, w, b, 0);
        weigh_keys(u, &kept, &k, c, sum);
        if (by_weights) weigh_values(u, &kept, b, delta);
    }
    for (int64_t i = 0; i < u->n_i; i++) {
        const double total = w->factor[i] * (sum[i] + sunk[i]), excess = log2(total);
        const bool complete = all && fabs(excess) <= slack + 2 * REAL_EPSILON * fabs((double)w->lse[i]);
        if (!(total > 0) || !(complete || whole[i])) continue;
        if (by_weights) w->delta[i] = (real)(delta[i] * w->factor[i] / total) - w->dlse[i];
        w->weighed[i] = by_weights;
        w->factor[i] /= total;
    }
    return true;
}

#endif
