/* Scores in the matrix unit: products of a unit's queries and a block of keys, S^T = K Q^T; in the backward also of dO and
 * values. They go through memory. Passes other than the forward take them as scores that are given (scores.h). */
#ifndef SDPA_KERNEL_AMX_SCORES_H
#define SDPA_KERNEL_AMX_SCORES_H

#include "amx_products.h"

/* A block of keys: the rows, their registers, and which of them are odd. */
typedef struct amx_keys {
    rows y;
    amx_operand at;
    bool any_odd;
    bool odd[AMX_MOST_KEYS];
} amx_keys;

/* Keys of bfloat16 are read in place, unless a register's rows would share few sets of L1. */
INLINE bool amx_in_place(const amx_scratch *w, const rows *y, int64_t d) {
    return w->parts == 1 && y->narrow.data && d == w->d_k && y->n % AMX_DEPTH == 0 && y->narrow.row <= 1024;
}

/* Makes k of rows y of m, which amx_rows or pack_rows read; w->k takes their registers. `line`: d elements. */
NOINLINE void amx_take_keys(const amx_scratch *w, const sdpa_matrix *m, const rows *y, int64_t d, real *line,
                            amx_keys *k) {
    const int64_t row = y->narrow.row, step = w->parts * AMX_BYTES;
    k->y = *y;
    k->any_odd = false;
    if (amx_in_place(w, y, d)) {
        k->at = (amx_operand){y->narrow.data, row, VL * row, 2 * AMX_DEPTH, 0};
        return;
    }
    k->at = (amx_operand){w->k, VEC_BYTES, w->d_k / AMX_DEPTH * step, step, AMX_BYTES};
    k->any_odd = amx_pack_keys(w, y, d);
    if (k->any_odd) amx_find_odd(m, y->j0, y->n, d, w->parts, line, k->odd);
}

/* s (b.n rounded up to whole registers, s_row) = products of a panel of the queries at w->q and keys b of a block. */
INLINE amx_task amx_scores(const amx_scratch *w, const amx_keys *k, panel q, keys b, real *s, int64_t s_row) {
    const int64_t lanes = q.nv * VEC_BYTES, n = round_up(b.n, AMX_DEPTH);
    amx_task t = {.c = s,
                  .c_row = s_row,
                  .c_step = AMX_DEPTH * s_row,
                  .a = k->at,
                  .b = {w->q + 2 * w->parts * w->d_k * q.i, lanes, VEC_BYTES, VL * lanes, w->d_k / 2 * lanes},
                  .a_step = 2 * k->at.next,
                  .steps = w->d_k / AMX_DEPTH,
                  .parts = w->parts,
                  .nv = q.nv,
                  .blocks = n / AMX_DEPTH};
    t.a.p += (b.j0 - k->y.j0) / VL * k->at.next;
    if (t.steps == 0) {
        fill_panel(s, s_row, q.nv, n, (vec){0});
        t.blocks = 0;
    }
    return t;
}

/* Computes the products of a task. */
NOINLINE void amx_run(const amx_task *t) {
    amx_registers registers;
    amx_queue queue = {.registers = &registers};
    amx_push(&queue, t);
    amx_begin(&registers);
    amx_advance(&queue, INT64_MAX);
    amx_end(&registers);
}

/* amx_scores, computed. */
NOINLINE void amx_multiply_keys(const amx_scratch *w, const amx_keys *k, panel q, keys b, real *s, int64_t s_row) {
    const amx_task t = amx_scores(w, k, q, b, s, s_row);
    amx_run(&t);
}

/* The keys of a block that a panel may see, from the first on, in whole registers unless these are all. */
INLINE int64_t amx_visible(const sdpa_unit *u, panel q, keys b) {
    int64_t first, last;
    sdpa_visible_keys(u, u->i0 + q.i, q.n_i, &first, &last);
    if (first >= b.j0 + b.n || last <= b.j0) return 0;
    const int64_t rounded = round_up(last - b.j0, AMX_DEPTH);
    return rounded < b.n ? rounded : b.n;
}

/* Whether a pair of key j of the block and queries from lane i on is odd. */
INLINE ivec amx_odd_pairs(const amx_scratch *w, const amx_keys *k, int64_t j, int64_t i) {
    const ivec all = (ivec){0} - 1;
    ivec queries;
    memcpy(&queries, w->odd + i, sizeof queries);
    return k->any_odd && k->odd[j] ? all : queries;
}

/* The scores of a panel and rows y by the vectors, into s; x: pack_panels of the queries. */
COLD NOINLINE void amx_ordinary(const real *x, panel q, const rows *y, int64_t d, real *s, int64_t s_row) {
    vec most[SCORE_WIDTH] = {{0}};
    scores t = panel_scores(x, q, y, d, s, s_row);
    t.extreme = (real *)most;
    score(&t, q.nv, SCORE_RAW);
}

/* Replaces those scores of a panel and keys b that are odd by the ordinary ones. */
COLD NOINLINE void amx_replace_odd_scores(const amx_scratch *w, const amx_keys *k, panel q, keys b, real *s,
                                          const real *ordinary, int64_t s_row) {
    for (int64_t j = 0; j < b.n; j++) {
        for (int x = 0; x < q.nv; x++) {
            const int64_t at = j * s_row + x * VL;
            const ivec odd = amx_odd_pairs(w, k, b.j0 - k->y.j0 + j, q.i + x * VL);
            vstore(s + at, vselect(odd, vload(ordinary + at), vload(s + at)));
        }
    }
}

#endif
