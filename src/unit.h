/* From a problem to the units that its kernels work on. */
#ifndef SDPA_UNIT_H
#define SDPA_UNIT_H

#include <string.h>

#include "isa.h"
#include "kernels/kernels.h"

static inline const struct sdpa_kernels *sdpa_kernels_for(sdpa_dtype dtype) {
    const struct sdpa_ops *ops = sdpa_ops_get();
    return dtype == SDPA_F64 ? &ops->f64 : dtype == SDPA_BF16 ? &ops->bf16 : &ops->f32;
}

/* Units of a head: whole ones of `most` queries, then small ones. */
static inline int64_t sdpa_units(const sdpa_problem *p, int64_t most) {
    const int64_t small = sdpa_query_block(p);
    return p->n_q / most + (p->n_q % most + small - 1) / small;
}

/* Everything of a unit that belongs to its (batch, head); the rest is zero. */
static inline void sdpa_unit_set_head(sdpa_unit *u, const sdpa_problem *p, int64_t batch, int64_t head) {
    *u = (sdpa_unit){
        .problem = p, .batch = batch, .head = head, .lower = p->lower, .upper = p->upper, .key_length = p->n_k};
    u->q = sdpa_matrix_at(p, &p->q, batch, head);
    u->k = sdpa_matrix_at(p, &p->k, batch, head);
    u->v = sdpa_matrix_at(p, &p->v, batch, head);
    u->o = sdpa_matrix_at(p, &p->o, batch, head);
    u->mask = sdpa_matrix_at(p, &p->mask, batch, head);
    u->alibi_slopes = sdpa_matrix_at(p, &p->alibi_slopes, batch, head);
    u->sinks = sdpa_matrix_at(p, &p->sinks, batch, head);
    u->q_t = sdpa_matrix_at(p, &p->q_t, batch, head);
    u->k_t = sdpa_matrix_at(p, &p->k_t, batch, head);
    u->v_t = sdpa_matrix_at(p, &p->v_t, batch, head);
    u->o_t = sdpa_matrix_at(p, &p->o_t, batch, head);
    u->mask_t = sdpa_matrix_at(p, &p->mask_t, batch, head);
    u->sinks_t = sdpa_matrix_at(p, &p->sinks_t, batch, head);
    u->lse = sdpa_matrix_at(p, &p->lse, batch, head).data;
    if (p->offset.data) {
        memcpy(&u->offset, sdpa_matrix_at(p, &p->offset, batch, head).data, sizeof u->offset);
        u->lower += u->offset;
        u->upper += u->offset;
    }
    if (p->key_length.data) {
        memcpy(&u->key_length, sdpa_matrix_at(p, &p->key_length, batch, head).data, sizeof u->key_length);
    }
}

/* Makes it the index-th of sdpa_units. */
static inline void sdpa_unit_set_queries(sdpa_unit *u, int64_t index, int64_t most) {
    const int64_t n_q = u->problem->n_q, whole = n_q / most, small = sdpa_query_block(u->problem);
    u->i0 = index < whole ? index * most : whole * most + (index - whole) * small;
    u->n_i = index < whole ? most : n_q - u->i0 < small ? n_q - u->i0 : small;
}

/* As many as there are units and as the work is worth: `work` in what a thread does in 100 us, since waking one costs 10. */
static inline int sdpa_workers(int n_workers, int64_t n_units, double work) {
    int64_t n = n_workers < n_units ? n_workers : n_units;
    if ((double)n > work) n = (int64_t)work;
    return n < 1 ? 1 : (int)n;
}

/* One per million multiply-adds. */
static inline int sdpa_workers_for(const sdpa_problem *p, int64_t n_units) {
    const double pairs = (double)p->n_batch * (double)p->n_head * (double)p->n_q * (double)p->n_k;
    return sdpa_workers(p->n_workers, n_units, pairs * (double)(p->d_k + p->d_v + 16) / 1e6);
}

#endif
