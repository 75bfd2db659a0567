/* From a problem to the units that its kernels work on. */
#ifndef SDPA_UNIT_H
#define SDPA_UNIT_H

#include <string.h>

#include "kernels/kernels.h"
#include "runtime/isa.h"

static inline const struct sdpa_kernels *sdpa_kernels_for(sdpa_dtype dtype) {
    return dtype == SDPA_F64 ? sdpa_isa_get()->f64 : sdpa_isa_get()->f32;
}

/* The kernels of a pass, of which an instruction set may have separate ones for some problems. */
static inline const struct sdpa_kernels *sdpa_pass_kernels_for(const sdpa_problem *p, sdpa_pass pass) {
    const struct sdpa_kernels *own = sdpa_isa_get()->own;
    const bool mine = p->dtype != SDPA_F64 && own->passes >> pass & 1 && own->types >> p->dtype & 1;
    return mine && (!own->asks || (own->asks(p) && sdpa_amx_permitted())) ? own : sdpa_kernels_for(p->dtype);
}

/* Number of units per head, each of `block` queries. */
static inline int64_t sdpa_units_of(const sdpa_problem *p, int64_t block) { return (p->n_q + block - 1) / block; }
static inline int64_t sdpa_units(const sdpa_problem *p) { return sdpa_units_of(p, sdpa_query_block(p)); }

/* The number of a tensor that has one per head, or `absent`. */
static inline double sdpa_head_number(const sdpa_matrix *m, double absent) {
    if (m->data) sdpa_isa_get()->f64->load(&absent, m->data, 1, 0, m->dtype, m->swapped);
    return absent;
}

/* Sets everything in a unit that depends only on its (batch, head), and zeroes the rest. */
static inline void sdpa_unit_set_head(sdpa_unit *u, const sdpa_problem *p, int64_t batch, int64_t head) {
    memset(u, 0, sizeof *u);
    u->problem = p;
    u->batch = p->first_batch + batch;
    u->head = head;
    u->lower = p->lower;
    u->upper = p->upper;
    u->key_length = p->n_k;
#define SET_MATRIX(name, rows, columns)                                                                                \
    if (p->name.data) u->name = sdpa_matrix_at(p, &p->name, batch, head);
#define SET_VECTOR(name, rows, columns)                                                                                \
    if (p->name.data) u->name = p->name.data + sdpa_offset(p, &p->name, batch, head);
#define SET_INTEGER(name, rows, columns)                                                                               \
    if (p->name.data) memcpy(&u->name, p->name.data + sdpa_offset(p, &p->name, batch, head), sizeof u->name);
    SDPA_MATRICES(SET_MATRIX)
    SDPA_VECTORS(SET_VECTOR)
    SDPA_INTEGERS(SET_INTEGER)
#undef SET_MATRIX
#undef SET_VECTOR
#undef SET_INTEGER
    u->lower += u->offset;
    u->upper += u->offset;
    u->scale = sdpa_head_number(&u->scales, p->scale);
    u->scale_t = sdpa_head_number(&u->scales_t, 0);
}

/* Makes u unit number `index` of its head, each of `block` queries. */
static inline void sdpa_unit_set_queries_of(sdpa_unit *u, int64_t index, int64_t block) {
    const int64_t n_q = u->problem->n_q;
    u->i0 = index * block;
    u->n_i = n_q - u->i0 < block ? n_q - u->i0 : block;
}
static inline void sdpa_unit_set_queries(sdpa_unit *u, int64_t index) {
    sdpa_unit_set_queries_of(u, index, sdpa_query_block(u->problem));
}

/* Makes u unit number `index` of all heads. */
static inline void sdpa_unit_set_of(sdpa_unit *u, const sdpa_problem *p, int64_t index, int64_t block, sdpa_run *run) {
    const int64_t blocks = sdpa_units_of(p, block), bh = index / blocks;
    sdpa_unit_set_head(u, p, bh / p->n_head, bh % p->n_head);
    sdpa_unit_set_queries_of(u, index % blocks, block);
    u->run = run;
}
static inline void sdpa_unit_set(sdpa_unit *u, const sdpa_problem *p, int64_t index, sdpa_run *run) {
    sdpa_unit_set_of(u, p, index, sdpa_query_block(p), run);
}

/* The number of workers: at most one per unit, and only as many as the work keeps busy. `work` counts portions that are
 * worth a thread's waking. */
static inline int sdpa_workers(int n_workers, int64_t n_units, double work) {
    int64_t n = n_workers < n_units ? n_workers : n_units;
    if ((double)n > work) n = (int64_t)work;
    return n < 1 ? 1 : (int)n;
}

/* The multiply-adds of a portion of work: 10 us in long sequences, 30 us in short ones. */
#define SDPA_PORTION 7e5

/* Pairs of a query and a key in all heads. */
static inline double sdpa_pairs(const sdpa_problem *p) {
    return (double)p->n_batch * (double)p->n_head * (double)p->n_q * (double)p->n_k;
}

/* The number of workers for a pass over so many pairs. */
static inline int sdpa_workers_for(const sdpa_problem *p, sdpa_pass pass, double pairs, int64_t n_units) {
    return sdpa_workers(p->n_workers, n_units, sdpa_pass_work(p, pass, pairs) / SDPA_PORTION);
}

#endif
