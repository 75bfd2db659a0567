/* Backward of units that see one block of keys. The general way prepares for rows that come in several blocks: weights
 * are completed before any gradient, and the factor that lse lost is carried to dO in double. With one block, rows are
 * complete at once, P takes the factor itself, and rows of dO and O stay where they are. */
#ifndef SDPA_KERNEL_FAST_SHORT_H
#define SDPA_KERNEL_FAST_SHORT_H

#include "../backward.h"

#if SMALL && SDPA_REAL == 32
enum {
    SHORT_CAN = SDPA_FEATURE_MASK | SDPA_FEATURE_BIAS | SDPA_FEATURE_LOWER | SDPA_FEATURE_UPPER | SDPA_FEATURE_OFFSET |
                SDPA_FEATURE_LENGTHS | SDPA_FEATURE_ALIBI
};

/* w->lse = lse in log2 units, rounded to integers, for weigh_keys; `lacks` = 2^(rounded lse - lse), the factor that its
 * weights then lack. Like load_lse, which has more digits. */
NOINLINE void round_lse(const sdpa_unit *u, const backward_scratch *w, real *lacks) {
    const sdpa_problem *p = u->problem;
    const double unit = log2_e_of(p);
    const real high = (real)unit, low = (real)(unit - high), infinity = (real)INFINITY;
    load(w->lse, u->lse + u->i0 * p->lse.row, u->n_i, p->lse.row, p->lse.dtype, p->lse.swapped);
    for (int64_t i = u->n_i; i < w->n_lanes; i++) w->lse[i] = 0;
    for (int64_t i = 0; i < w->n_lanes; i += VL) {
        const vec lse = vload(w->lse + i), whole = vmax2(vset1(-REAL_MAX), vmin2(vset1(REAL_MAX), high * lse));
        const vec rest = vmuladd(vset1(low), lse, vmulsub(vset1(high), lse, whole));
        const vec rounded = vselect(is_huge(whole), whole, (whole + EXP2_MAGIC) - EXP2_MAGIC);
        const vec exponent = vmax2(vset1(-64), vmin2(vset1(64), (rounded - whole) - rest));
        const ivec finite = lse - lse == 0;
        /* A query that sees no key has -inf, and its weights are 0. */
        vstore(w->lse + i, vselect(finite, rounded, vselect(lse == -infinity, vset1(infinity), lse)));
        vstore(lacks + i, vselect(finite, vexp2(exponent), vset1(1)));
    }
    for (int64_t i = u->n_i; i < w->n_lanes; i++) w->lse[i] = HUGE_SCORE; /* weights of 0 */
}

/* P^T by all keys. Each row of P is divided by its sum or, if lse belongs to a larger set of keys, multiplied with what it
 * lacks; w->weighed tells which: see complete_rows. */
NOINLINE void short_weights(const sdpa_unit *u, const backward_scratch *w, const rows *k, real c, const real *lacks) {
    const real epsilon = REAL_EPSILON;
    real sum[SDPA_QUERY_BLOCK] = {0};
    weigh_keys(u, w, k, c, sum);
    for (int64_t i = 0; i < u->n_i; i += VL) {
        const vec total = vload(sum + i), lse = vload(w->lse + i), lack = vload(lacks + i);
        const vec excess = vmulsub(lack, total, vset1(1)), most = 2 * epsilon * (4 + vmax2(lse, -lse));
        const ivec complete = (total > 0) & (excess <= most) & (-excess <= most);
        const vec factor = vselect(complete, 1 / total, lack);
        for (int l = 0; l < VL && i + l < u->n_i; l++) w->weighed[i + l] = complete[l] != 0;
        for (int64_t j = 0; j < k->n; j++) {
            real *at = w->p + j * w->n_lanes + i;
            vstore(at, factor * vload(at));
        }
    }
}

INLINE real dlse_of(const sdpa_unit *u, int64_t i) {
    return u->dlse ? query_scalar(u->dlse, &u->problem->dlse, u->i0 + i) : 0;
}

/* delta = rowsum(dO * O) - dlse. */
NOINLINE void short_delta(const sdpa_unit *u, const backward_scratch *w, const rows *dout) {
    const sdpa_problem *p = u->problem;
    const rows o = pack_rows(&u->o, u->i0, u->n_i, p->d_v, 1, w->o_rows, NULL);
    for (int64_t i = 0; i < u->n_i; i++) {
        const real *x = dout->p + i * dout->row, *y = o.p + i * o.row;
        vec sum = {0}, other = {0};
        int64_t d = 0;
        for (; d + VL < p->d_v; d += 2 * VL) {
            sum = vmuladd(vload(x + d), vload(y + d), sum);
            other = vmuladd(vload(x + d + VL), vload(y + d + VL), other);
        }
        if (d < p->d_v) sum = vmuladd(vload(x + d), vload(y + d), sum);
        w->delta[i] = vreduce_add(sum + other) - dlse_of(u, i);
    }
}

/* short_delta of complete rows, summed with the weights: 16-bit O is too coarse. */
NOINLINE void short_delta_by_weights(const sdpa_unit *u, const backward_scratch *w, keys b) {
    double delta[SDPA_QUERY_BLOCK] = {0};
    memset(w->zero, 0, sizeof(real) * (size_t)w->n_lanes);
    weigh_values(u, w, b, delta);
    for (int64_t i = 0; i < u->n_i; i++) {
        if (w->weighed[i]) w->delta[i] = (real)delta[i] - dlse_of(u, i);
    }
}

/* Computes dV, dK and dQ from P^T and dS^T: writes them if the unit is fresh, otherwise adds. Adds to dMask. */
NOINLINE void write_gradients(const sdpa_unit *u, const backward_scratch *w, const backward_rows *own, const rows *k,
                              keys b, enum panel_state state) {
    const sdpa_problem *p = u->problem;
    const real scale = (real)p->scale;
    /* A masked pair must not meet NaN or Inf: see backward_keys. */
    const bool finite = state == PANEL_VISIBLE || own->finite;
    const bool keys_finite = state == PANEL_VISIBLE || all_finite(k->p, k->row, b.n, p->d_k);
    weight_block weights = {.p = w->p,
                            .row = w->n_lanes,
                            .n_i = u->n_i,
                            .j0 = b.j0,
                            .n = b.n,
                            .diagonal = diagonal_at(u, u->i0, b.j0),
                            .fresh = u->fresh};
    if (!sdpa_turn_wait(u, 0)) return;
    clear_keys(u, b);
    add_to_keys(&u->dv, p->d_v, &weights, &own->dout, 1, finite);
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
        add_to_queries(dq, u->dq.row / (int64_t)sizeof(real), p->d_k, &weights, k, NULL, scale, keys_finite);
        sdpa_turn_end(u);
        return;
    }
    weights.fresh = true;
    if (u->dq.data) add_to_queries(w->dq, w->k_row, p->d_k, &weights, k, NULL, scale, keys_finite);
    store_gradients(u, w->dq, w->k_row, w->dmask, 0, w->line);
}

/* False, having written nothing, if the unit must go the general way. */
NOINLINE bool backward_short(const sdpa_unit *u, void *scratch) {
    const sdpa_problem *p = u->problem;
    keys b = {0};
    int64_t j1;
    sdpa_visible_keys(u, u->i0, u->n_i, &b.j0, &j1);
    b.n = j1 - b.j0;
    if ((p->features & ~SHORT_CAN) || p->n_k > sdpa_key_block(p) || b.n == 0) return false;

    sdpa_arena arena = {scratch, 0};
    const backward_scratch w = backward_layout(p, &arena);
    real lacks[SDPA_QUERY_BLOCK];
    SDPA_TAKE(SHORT);
    sdpa_fetch(u, SDPA_FETCH_QK, 0, 1, 2);
    round_lse(u, &w, lacks);
    sdpa_fetch(u, SDPA_FETCH_QK, 1, 1, 2);
    pack_panels(w.q, &u->q, u->i0, u->n_i, p->d_k, p->scale < 0 ? -1 : 1, w.line);
    const rows k = pack_rows(&u->k, b.j0, b.n, p->d_k, 1, w.k, w.k_tail);
    sdpa_fetch(u, SDPA_FETCH_DOUT_V, 0, 1, 2);
    short_weights(u, &w, &k, (real)(fabs(p->scale) * M_LOG2E), lacks);

    sdpa_fetch(u, SDPA_FETCH_DOUT_V, 1, 1, 2);
    backward_rows own = {.dout = pack_rows(&u->dout, u->i0, u->n_i, p->d_v, 1, w.dout_rows, NULL),
                         .q = pack_rows(&u->q, u->i0, u->n_i, p->d_k, 1, w.q_rows, NULL)};
    own.finite = !may_mask(u) || (rows_finite(&own.q, p->d_k) && rows_finite(&own.dout, p->d_v));
    sdpa_fetch(u, SDPA_FETCH_O_DV, 0, 1, 2);
    pack_panels(w.dout, &u->dout, u->i0, u->n_i, p->d_v, 1, w.line);
    short_delta(u, &w, &own.dout);
    if (sdpa_is_narrow(p->dtype)) short_delta_by_weights(u, &w, b);
    sdpa_fetch(u, SDPA_FETCH_O_DV, 1, 1, 2);
    const rows v = pack_rows(&u->v, b.j0, b.n, p->d_v, 0, w.v, w.v_tail);
    sdpa_fetch(u, SDPA_FETCH_DQ_DK, 0, 1, 2);
    const enum panel_state state = score_gradients(u, &w, &v);
    sdpa_fetch(u, SDPA_FETCH_DQ_DK, 1, 1, 2);
    write_gradients(u, &w, &own, &k, b, state);
    return true;
}
#else
INLINE bool backward_short(const sdpa_unit *u, void *scratch) { return u == NULL || scratch == NULL; }
#endif

#endif
