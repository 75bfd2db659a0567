/* Backward of units that see one block of keys. The general way prepares for rows that come in several blocks: weights
 * are completed before any gradient, and the factor that lse lost is carried to dO in double. With one block every sum
 * is known at once, P takes the factor itself, and rows of dO and O stay where they are. */
#ifndef SDPA_KERNEL_FAST_ONE_BLOCK_BACKWARD_H
#define SDPA_KERNEL_FAST_ONE_BLOCK_BACKWARD_H

#include "../backward.h"
#include "few_keys.h"

#if ROW_PATHS
enum { ONE_BLOCK_CAN = SDPA_FEATURES_OF_PAIRS | SDPA_FEATURE_ALIBI };

/* w->lse = lse in log2 units, rounded to integers, for weigh_keys; `lse_residue` = 2^(rounded lse - lse), by which its
 * weights must still be multiplied. Like load_lse, but in vectors, and rounded to nearest; false if there are far
 * rows. */
NOINLINE bool round_lse(const sdpa_unit *u, const backward_scratch *w, real *lse_residue) {
    const sdpa_problem *p = u->problem;
    const double unit = log2_e_of(u);
    const real high = (real)unit, low = (real)(unit - high), infinity = (real)INFINITY;
    ivec lane, far = {0};
    UNROLL for (int l = 0; l < VL; l++) lane[l] = l;
    vstore(w->lse + (u->n_i - 1) / VL * VL, (vec){0});
    load(w->lse, u->lse + u->i0 * p->lse.row, u->n_i, p->lse.row, p->lse.dtype, p->lse.swapped);
    for (int64_t i = 0; i < u->n_i; i += VL, lane += VL) {
        const vec lse = vload(w->lse + i), whole = vmax2(vset1(-REAL_MAX), vmin2(vset1(REAL_MAX), high * lse));
        const vec rest = vmuladd(vset1(low), lse, vmulsub(vset1(high), lse, whole));
        const vec rounded = vselect(is_huge(whole), whole, (whole + EXP2_MAGIC) - EXP2_MAGIC);
        const vec exponent = vmax2(vset1(-64), vmin2(vset1(64), (rounded - whole) - rest));
        const ivec finite = lse - lse == 0;
        far |= finite & ((whole > FAR_LSE) | (whole < -FAR_LSE));
        /* A query that sees no key has -inf, and its weights are 0; so are those of the lanes without a query. */
        const vec special = vselect(lse == -infinity, vset1(infinity), lse);
        vstore(w->lse + i, vselect(lane >= (int)u->n_i, vset1(HUGE_SCORE), vselect(finite, rounded, special)));
        vstore(lse_residue + i, vselect(finite, vexp2(exponent), vset1(1)));
    }
    return !vany(far);
}

/* Whether O, in 16 bits, is too coarse for delta. */
INLINE bool is_coarse(const sdpa_unit *u) { return SDPA_REAL == 32 && sdpa_is_narrow(u->o.dtype); }

/* Whether products with keys and values come from rows of the operands, not from panels of queries, in which few lanes
 * would be filled. Rows are not negated, so scale must be positive. Where O is coarse, it is done as in the forward: rows
 * of large scores are only complete (finish_rows) if both sum in the same order. */
INLINE bool takes_rows(const sdpa_unit *u) {
    const sdpa_problem *p = u->problem;
    if (is_coarse(u)) return forward_takes_rows(u);
    return p->n_k <= FEW_KEYS && u->scale > 0 && !fills_lanes(u, VL);
}

/* delta = rowsum(dO * O) - dlse. */
NOINLINE void delta_by_outputs(const sdpa_unit *u, const backward_scratch *w, const rows *dout) {
    const sdpa_problem *p = u->problem;
    const rows o = pack_rows(&u->o, u->i0, u->n_i, p->d_v, 1, w->o_rows, NULL);
    for (int64_t i = 0; i < u->n_i; i += ROWS_AT_ONCE) {
        const real *x[ROWS_AT_ONCE], *y[ROWS_AT_ONCE];
        vec sum[ROWS_AT_ONCE];
        UNROLL for (int r = 0; r < ROWS_AT_ONCE; r++) {
            x[r] = row_or_last(dout, i + r, u->n_i);
            y[r] = row_or_last(&o, i + r, u->n_i);
            sum[r] = (vec){0};
        }
        for (int64_t d = 0; d < p->d_v; d += VL) {
            UNROLL for (int r = 0; r < ROWS_AT_ONCE; r++) sum[r] = vmuladd(vload(x[r] + d), vload(y[r] + d), sum[r]);
        }
        const vec delta = vsum4(sum);
        memcpy(w->delta + i, &delta, ROWS_AT_ONCE * sizeof(real));
    }
    if (!u->dlse) return;
    load(w->dlse, u->dlse + u->i0 * p->dlse.row, u->n_i, p->dlse.row, p->dlse.dtype, p->dlse.swapped);
    for (int64_t i = 0; i < u->n_i; i++) w->delta[i] -= w->dlse[i];
}

/* delta of the queries in the lanes from i on: delta_by_outputs or, in `complete` lanes, rowsum(P * dP) - dlse, for which
 * w->ds holds dP^T or, if `weighed`, P^T * dP^T. P^T has n keys and must still be
 * multiplied by `factor`. */
COLD NOINLINE vec delta_by_weights(const sdpa_unit *u, const backward_scratch *w, int64_t i, int64_t n, vec factor,
                                   ivec complete, bool weighed) {
    vec sum = {0};
    for (int64_t at = i; at < n * w->n_lanes; at += w->n_lanes) {
        const vec p = vload(w->p + at), x = vload(w->ds + at);
        sum += vselect((ivec)p == SIGN_BIT, (vec){0}, weighed ? x : p * x);
    }
    const vec dlse = u->dlse ? vload(w->dlse + i) : (vec){0};
    return vselect(complete, factor * sum - dlse, vload(w->delta + i));
}

/* Completes P^T of n keys: divides each row by its sum or, if lse belongs to a larger set of keys, multiplies it with
 * the residue of its lse; w->weighed tells which: see complete_rows. With `gradients` also dS^T, of which w->ds holds
 * dP^T. */
NOINLINE void finish_rows(const sdpa_unit *u, const backward_scratch *w, int64_t n, const real *sum,
                          const real *lse_residue, bool gradients) {
    const real slack = completion_slack(u->problem), epsilon = REAL_EPSILON;
    const bool coarse = is_coarse(u);
    for (int64_t i = 0; i < u->n_i; i += VL) {
        const vec total = vload(sum + i), lse = vload(w->lse + i), lack = vload(lse_residue + i);
        const vec excess = vmulsub(lack, total, vset1(1)), most = slack + 2 * epsilon * vmax2(lse, -lse);
        const ivec complete = (total > 0) & (excess <= most) & (-excess <= most);
        const vec factor = vselect(complete, 1 / total, lack);
        vec delta = {0};
        if (gradients) {
            delta = coarse ? delta_by_weights(u, w, i, n, factor, complete, false) : vload(w->delta + i);
        }
        for (int l = 0; coarse && l < VL && i + l < u->n_i; l++) w->weighed[i + l] = complete[l] != 0;
        for (int64_t at = i; at < n * w->n_lanes; at += w->n_lanes) {
            const vec p = factor * vload(w->p + at);
            vstore(w->p + at, p);
            if (!gradients) continue;
            vstore(w->ds + at, vselect((ivec)p == SIGN_BIT, p, p * (vload(w->ds + at) - delta)));
        }
    }
}

/* dS^T of n keys from P^T * dP^T in w->ds. */
COLD NOINLINE void subtract_delta(const sdpa_unit *u, const backward_scratch *w, int64_t n) {
    for (int64_t i = 0; i < u->n_i; i += VL) {
        ivec complete = {0};
        for (int l = 0; l < VL && i + l < u->n_i; l++) complete[l] = -w->weighed[i + l];
        const vec delta = delta_by_weights(u, w, i, n, vset1(1), complete, true);
        for (int64_t at = i; at < n * w->n_lanes; at += w->n_lanes) {
            const vec p = vload(w->p + at);
            vstore(w->ds + at, vselect((ivec)p == SIGN_BIT, p, vload(w->ds + at) - p * delta));
        }
    }
}

/* Takes delta of rows that are not complete from their weights where is_own_delta says so: then dS sums to dlse. */
NOINLINE void centre_rows(const sdpa_unit *u, const backward_scratch *w, keys b) {
    double longest = -1;
    for (int64_t i = 0; i < u->n_i; i += VL) {
        const int lanes = u->n_i - i < VL ? (int)(u->n_i - i) : VL;
        bool taken = true, any = false;
        for (int l = 0; l < lanes; l++) taken &= w->weighed[i + l];
        if (taken) continue;
        vec total = {0}, sum = {0}, lack = {0};
        for (int64_t at = i; at < b.n * w->n_lanes; at += w->n_lanes) {
            total += vload(w->p + at);
            sum += vload(w->ds + at);
        }
        for (int l = 0; l < lanes; l++) {
            if (w->weighed[i + l]) continue;
            const double dlse = u->dlse ? w->dlse[i + l] : 0, lacks = (double)sum[l] / total[l] - dlse;
            const double delta = w->delta[i + l] + dlse + lacks;
            if (!is_own_delta(u, w, i + l, b.j0, b.j0 + b.n, total[l], delta, &longest)) continue;
            lack[l] = (real)lacks;
            any = true;
        }
        for (int64_t at = i; any && at < b.n * w->n_lanes; at += w->n_lanes) {
            const vec p = vload(w->p + at);
            vstore(w->ds + at, vselect((ivec)p == SIGN_BIT, p, vload(w->ds + at) - p * lack));
        }
    }
}

/* P^T and dS^T of keys k, by products of rows. */
NOINLINE void one_block_by_rows(const sdpa_unit *u, backward_scratch *w, const backward_rows *own, const rows *k,
                                const rows *v, const real *lse_residue) {
    const sdpa_problem *p = u->problem;
    const bool wanted = wants_scores(u);
    real sum[SDPA_QUERY_BLOCK] = {0};
    w->ready = p->features ? w->given : w->p; /* a bias is written to p before the scores are */
    sdpa_fetch(u, SDPA_FETCH_DOUT_V, 0);
    lane_products(w->ready, w->n_lanes, &own->q, u->n_i, k, k->n, p->d_k);
    sdpa_fetch(u, SDPA_FETCH_DOUT_V, 1);
    if (wanted) lane_products(w->ds, w->n_lanes, &own->dout, u->n_i, v, v->n, p->d_v);
    sdpa_fetch(u, SDPA_FETCH_O_DV, 0);
    weigh_keys(u, w, k, product_factor(u, M_LOG2E), sum);
    sdpa_fetch(u, SDPA_FETCH_O_DV, 1);
    if (wanted) delta_by_outputs(u, w, &own->dout);
    finish_rows(u, w, k->n, sum, lse_residue, wanted);
}

/* P^T and dS^T of keys k, by panels of queries. */
NOINLINE void one_block_by_panels(const sdpa_unit *u, const backward_scratch *w, const backward_rows *own,
                                  const rows *k, const rows *v, const real *lse_residue) {
    const sdpa_problem *p = u->problem;
    real sum[SDPA_QUERY_BLOCK] = {0};
    pack_panels(w->q, &u->q, u->i0, u->n_i, p->d_k, sign_of_scale(u), w->line);
    sdpa_fetch(u, SDPA_FETCH_DOUT_V, 0);
    weigh_keys(u, w, k, product_factor(u, M_LOG2E), sum);
    finish_rows(u, w, k->n, sum, lse_residue, false);
    if (!wants_scores(u)) return;
    sdpa_fetch(u, SDPA_FETCH_DOUT_V, 1);
    pack_panels(w->dout, &u->dout, u->i0, u->n_i, p->d_v, 1, w->line);
    sdpa_fetch(u, SDPA_FETCH_O_DV, 0);
    delta_by_outputs(u, w, &own->dout);
    sdpa_fetch(u, SDPA_FETCH_O_DV, 1);
    if (is_coarse(u)) {
        score_gradients(u, w, v, memset(w->zero, 0, sizeof(real) * (size_t)w->n_lanes));
        subtract_delta(u, w, k->n);
    } else {
        score_gradients(u, w, v, w->delta);
    }
}

/* Computes dV, dK and dQ from P^T and dS^T: writes them if the unit is fresh, otherwise adds. Adds to dMask. */
NOINLINE void write_gradients(const sdpa_unit *u, const backward_scratch *w, const backward_rows *own, const rows *k,
                              keys b) {
    const sdpa_problem *p = u->problem;
    const real scale = scale_of(u);
    bool masked = false;
    PANELS (q, u->n_i) masked |= w->state[q.i / VL] != PANEL_VISIBLE;
    /* A masked pair must not meet NaN or Inf: see backward_keys. */
    const bool finite = !masked || own->finite, keys_finite = !masked || all_finite(k->p, k->row, b.n, p->d_k);
    weight_block weights = {.p = w->p,
                            .row = w->n_lanes,
                            .n_i = u->n_i,
                            .j0 = b.j0,
                            .n = b.n,
                            .diagonal = diagonal_at(u, u->i0, b.j0),
                            .fresh = u->fresh};
    sdpa_fetch(u, SDPA_FETCH_DQ_DK, 0);
    if (!sdpa_turn_wait(u, 0)) return;
    clear_keys(u, b);
    add_to_keys(&u->dv, p->d_v, &weights, &own->dout, 1, finite);
    sdpa_fetch(u, SDPA_FETCH_DQ_DK, 1);
    weights.p = w->ds;
    add_to_keys(&u->dk, p->d_k, &weights, &own->q, scale, finite);
    if (u->dmask.data) {
        memset(w->dmask, 0, sizeof(real) * (size_t)w->n_lanes);
        add_mask_gradient(u, w->ds, w->n_lanes, w->dmask, b.j0, b.n);
    }
    sdpa_turn_pass(u, 0);
    const bool by_query = u->dmask.data && u->dmask.col == 0; /* store_gradients adds it */
    if (u->dq.data && is_direct(&u->dq) && !by_query) {
        if (!sdpa_turn_wait_last(u)) return;
        real *dq = (real *)(u->dq.data + u->i0 * u->dq.row);
        weights.fresh = u->own_dq;
        add_to_queries(dq, u->dq.row / (int64_t)sizeof(real), p->d_k, &weights, k, NULL, scale, keys_finite);
        sdpa_turn_end(u);
        return;
    }
    weights.fresh = true;
    if (u->dq.data) add_to_queries(w->dq, w->k_row, p->d_k, &weights, k, NULL, scale, keys_finite);
    store_gradients(u, w->dq, w->k_row, w->dmask, &(head_sums){0}, w->line);
}

/* False, having written nothing, if the unit must go the general way. */
NOINLINE bool backward_one_block(const sdpa_unit *u, void *scratch) {
    const sdpa_problem *p = u->problem;
    keys b = {0};
    int64_t j1;
    sdpa_visible_keys(u, u->i0, u->n_i, &b.j0, &j1);
    b.n = j1 - b.j0;
    if ((p->features & ~ONE_BLOCK_CAN) || p->n_k > sdpa_key_block(p) || b.n == 0) return false;
#ifdef HAVE_AMX
    if (amx_can(p) && !forward_takes_rows(u)) return false; /* scores have the bits of the forward's */
#endif

    sdpa_arena arena = {scratch, 0};
    backward_scratch w = common_layout(p, &arena);
    take_unit(&w, p, &arena);
    const bool by_rows = takes_rows(u);
    w.low = w.ready = NULL;
#ifdef HAVE_AMX
    w.amx.can = false;
#endif
    real lse_residue[SDPA_QUERY_BLOCK];
    sdpa_fetch(u, SDPA_FETCH_QK, 0);
    if (!round_lse(u, &w, lse_residue)) return false;
    SDPA_TAKE(ONE_BLOCK);
    sdpa_fetch(u, SDPA_FETCH_QK, 1);
    backward_rows own = {.dout = pack_rows(&u->dout, u->i0, u->n_i, p->d_v, 1, w.dout_rows, NULL),
                         .q = pack_rows(&u->q, u->i0, u->n_i, p->d_k, 1, w.q_rows, NULL)};
    const rows k = pack_rows(&u->k, b.j0, b.n, p->d_k, 1, w.k, by_rows ? NULL : w.k_tail),
               v = pack_rows(&u->v, b.j0, b.n, p->d_v, by_rows, w.v, by_rows ? NULL : w.v_tail);
    own.finite = !may_mask(u) || (rows_finite(&own.q, p->d_k) && rows_finite(&own.dout, p->d_v));
    if (by_rows) {
        SDPA_TAKE(FEW_KEYS);
        one_block_by_rows(u, &w, &own, &k, &v, lse_residue);
    } else {
        one_block_by_panels(u, &w, &own, &k, &v, lse_residue);
    }
    if (is_coarse(u) && wants_scores(u)) centre_rows(u, &w, b);
    write_gradients(u, &w, &own, &k, b);
    return true;
}
#else
INLINE bool backward_one_block(const sdpa_unit *u, void *scratch) { return (void)u, (void)scratch, false; }
#endif

#endif
