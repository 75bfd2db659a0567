/* A unit of the backward by the products of amx_gradients.h. */
#ifndef SDPA_KERNEL_AMX_BACKWARD_H
#define SDPA_KERNEL_AMX_BACKWARD_H

#include "backward_scores.h"

/* Packs the queries of a unit, which are at w->q, and their dO, and begins its sums. */
NOINLINE void begin_tiles(const sdpa_unit *u, backward_scratch *w) {
    const sdpa_problem *p = u->problem;
    amx_gradients *amx = &w->amx;
    const int parts = amx->qk.parts;
    SDPA_TAKE(AMX);
    const rows q = pack_rows(&u->q, u->i0, u->n_i, p->d_k, 1, w->q_rows, NULL),
               dout = pack_rows(&u->dout, u->i0, u->n_i, p->d_v, 1, w->dout_rows, NULL);
    pack_panels(w->dout, &u->dout, u->i0, u->n_i, p->d_v, 1, w->line);
    amx_pack_queries(&amx->qk, w->q, u->n_i, p->d_k);
    amx_pack_queries(&amx->ov, w->dout, u->n_i, p->d_v);
    amx_pair_rows(amx->q_pairs, amx->lanes, &q, u->n_i, p->d_k, parts);
    amx_pair_rows(amx->dout_pairs, amx->lanes, &dout, u->n_i, p->d_v, parts);
    memset(amx->dq, 0, sizeof(real) * (size_t)(amx->qk.d_k * amx->row));
    for (int64_t i = 0; i < amx->row; i++) amx->factor[i] = 1;
}

/* dV, dK and dQ of a block, from `weights`: those of w->p. `finite`: see backward_keys. */
NOINLINE void tile_gradients(const sdpa_unit *u, const backward_scratch *w, const backward_rows *own, const rows *k,
                             const weight_block *weights, bool finite) {
    const sdpa_problem *p = u->problem;
    const amx_gradients *amx = &w->amx;
    const keys b = {weights->j0, weights->n};
    const real scale = scale_of(u);
    weight_block gradients = *weights;
    gradients.p = w->ds;
    if (u->dv.data && (amx->ov.any_odd || amx_pack_halves(amx, w->p, u->n_i, b.n, amx->factor))) {
        add_to_keys(&u->dv, p->d_v, weights, &own->dout, 1, finite);
    } else if (u->dv.data) {
        amx_add_products(amx, &u->dv, p->d_v, u->n_i, b, amx->dout_pairs, 1);
    }
    if (!u->dk.data && !wants_queries(u)) return;
    const bool odd = amx_pack_halves(amx, w->ds, u->n_i, b.n, NULL) || amx->ov.any_odd || amx->values->any_odd;
    if (u->dk.data && (amx->qk.any_odd || odd)) {
        add_to_keys(&u->dk, p->d_k, &gradients, &own->q, scale, finite);
    } else if (u->dk.data) {
        amx_add_products(amx, &u->dk, p->d_k, u->n_i, b, amx->q_pairs, scale);
    }
    if (!wants_queries(u)) return;
    amx_add_to_queries(amx, &u->k, k, p->d_k, &gradients, own_scale(u) ? 1 : scale, odd, w->dq, w->k_row, w->line);
}

#endif
