/* What masks leave of each tile, a panel of queries by a block of keys: the kinds that the passes act upon. */
#ifndef SDPA_KERNEL_PATTERN_H
#define SDPA_KERNEL_PATTERN_H

#include "pass.h"

static sdpa_tile tile_of(const sdpa_problem *p) { return (sdpa_tile){SCORE_WIDTH * VL, run_keys(p, p->d_k)}; }

static size_t pattern_bytes(const sdpa_problem *p) {
    sdpa_arena arena = {NULL, 0};
    score_layout(p, unit_lanes(p), &arena);
    return arena.used;
}

/* Writes a row of u->o for each panel of the unit: 0 for a block of keys that is masked and skipped, 1 where pairs are
 * masked one by one, 2 where none is. */
COLD static void pattern_unit(const sdpa_unit *u, void *scratch) {
    const sdpa_problem *p = u->problem;
    static const real left[] = {[BIAS_NONE] = 2, [BIAS_FINITE] = 2, [BIAS_SOME_MASKED] = 1, [BIAS_ALL_MASKED] = 0};
    sdpa_arena arena = {scratch, 0};
    const score_scratch w = score_layout(p, unit_lanes(p), &arena);
    keys j = {0};
    for (char *column = u->o.data; next_keys(u, w.block, p->n_k, &j); column += u->o.col) {
        PANELS (q, u->n_i) {
            const block b = {u->i0 + q.i, q.n_i, j.j0, j.n};
            const enum bias_kind kind = fill_bias(u, &b, 1, w.s, w.s_row, w.line);
            store(column + b.i0 / (SCORE_WIDTH * VL) * u->o.row, &left[kind], 1, 0, u->o.dtype);
        }
    }
}

#endif
