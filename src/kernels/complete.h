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

/* The largest finite norm of rows i .. i+n-1 of x. */
COLD NOINLINE double largest_norm(const sdpa_matrix *x, int64_t i, int64_t n, int64_t d, real *line) {
    real most = 0;
    for (const char *row = x->data + i * x->row; n > 0; n--, row += x->row) {
        load(line, row, d, x->col, x->dtype, x->swapped);
        real sum = 0;
        _Pragma("omp simd reduction(+ : sum)") for (int64_t c = 0; c < d; c++) sum += line[c] * line[c];
        if (sum > most && sum < (real)INFINITY) most = sum;
    }
    return sqrt(most);
}

/* Whether `delta`, summed with the weights of row i, and O, of 16 bits, differ by no more than the rounding of O. */
COLD NOINLINE bool agrees_with_outputs(const sdpa_unit *u, const backward_scratch *w, int64_t i, double delta) {
    const sdpa_problem *p = u->problem;
    const double least = p->o.dtype == SDPA_BF16 ? 0x1p-126 : 0x1p-14; /* smaller elements have fewer digits */
    real *dout = w->line, *o = w->line + round_up(p->d_v, VL);
    load(dout, u->dout.data + (u->i0 + i) * u->dout.row, p->d_v, u->dout.col, u->dout.dtype, u->dout.swapped);
    load(o, u->o.data + (u->i0 + i) * u->o.row, p->d_v, u->o.col, u->o.dtype, u->o.swapped);
    double sum = 0, most = 0;
    for (int64_t c = 0; c < p->d_v; c++) {
        sum += (double)dout[c] * o[c];
        most += fabs((double)dout[c]) * fmax(fabs((double)o[c]), least);
    }
    return fabs(delta - sum) <= out_roundoff(p) * most;
}

/* Whether row i, which is not complete, takes `delta`, summed with its weights, all the same, since O has 16 bits: the
 * sum of the weights is as close to 1 as the rounding of the scores may leave that of a whole row, and O does not
 * contradict. If the row is a part of a larger one nevertheless, that costs no more than rounding O may. Scores of the
 * forward and of the backward are sums in any order: every step is off by up to epsilon / 2 of what may be |q| |k|, and
 * d independent steps by sqrt(d) times that. `longest`: the largest |k| of keys j0 .. j1-1, negative before it is
 * known. */
COLD NOINLINE bool is_own_delta(const sdpa_unit *u, const backward_scratch *w, int64_t i, int64_t j0, int64_t j1,
                                double total, double delta, double *longest) {
    const sdpa_problem *p = u->problem;
    if (!(total > 0) || !agrees_with_outputs(u, w, i, delta)) return false;
    if (*longest < 0) *longest = largest_norm(&u->k, j0, j1 - j0, p->d_k, w->line);
    const double product = *longest * largest_norm(&u->q, u->i0 + i, 1, p->d_k, w->line) * fabs(u->scale) * M_LOG2E;
    const double rounding = 2 * REAL_EPSILON * ((sqrt((double)p->d_k) + 1) * product + fabs(w->lse[i]));
    return fabs(log2(total)) <= completion_slack(p) + rounding;
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
    const bool coarse = sdpa_is_narrow(p->o.dtype) && p->scores != SDPA_ADDITIVE; /* those have one order of sums */
    const int64_t first = j0 / sdpa_key_block(p), end = j0 < j1 ? j1 : 0;         /* a sink may be all that is seen */
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
    double longest = -1;
    for (int64_t i = 0; i < u->n_i; i++) {
        const double total = w->factor[i] * (sum[i] + sunk[i]), excess = log2(total);
        const double own = delta[i] * w->factor[i] / total;
        const bool complete = all && fabs(excess) <= slack + 2 * REAL_EPSILON * fabs((double)w->lse[i]);
        const bool ready = total > 0 && (complete || whole[i]);
        w->weighed[i] = by_weights && (ready || (coarse && is_own_delta(u, w, i, j0, end, total, own, &longest)));
        if (w->weighed[i]) w->delta[i] = (real)own - w->dlse[i];
        if (ready) w->factor[i] /= total;
    }
    return true;
}

#endif
