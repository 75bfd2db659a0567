/* The backward of consecutive units of a group, a batch. A head's K, V, dK and dV seldom fit into L2, and P of a unit does
 * not either if there are many keys. So a batch takes a range of keys one unit after the other, then the next range, and
 * P is computed where it is used. Each sum over units or keys has the order of units that come one by one.
 *
 * A unit whose rows must be completed keeps its P (backward.h). It goes through all its keys alone. */
#ifndef SDPA_KERNEL_BATCH_H
#define SDPA_KERNEL_BATCH_H

#include "fast/one_block_backward.h"

/* A unit between the steps of its batch. */
typedef struct backward_state {
    backward_scratch w;
    backward_rows own;
    head_sums sums;
    int64_t j0, j1; /* the keys that it sees */
    real c;         /* |scale| log2(e) */
    bool kept;      /* P is there */
} backward_state;

/* Key blocks in a range. */
INLINE int64_t range_blocks(const sdpa_problem *p) {
    const int64_t bytes = sdpa_key_block(p) * 2 * (1 + p->d_k + p->d_v) * (int64_t)sizeof(real);
    return bytes < RANGE_BYTES ? (RANGE_BYTES + bytes / 2) / bytes : 1;
}

/* The most units of a batch: one where all keep their P or see a single range. */
static int64_t backward_most(const sdpa_problem *p) {
    return completes_all(p) || blocks_of(p, p->n_k) <= range_blocks(p) ? 1 : BATCH_UNITS;
}

/* The states of n units. */
NOINLINE backward_state *batch_layout(const sdpa_problem *p, int64_t n, sdpa_arena *a) {
    backward_state *states = sdpa_take(a, (size_t)n * sizeof *states);
    const backward_scratch common = common_layout(p, a);
    for (int64_t i = 0; i < n; i++) {
        backward_scratch w = common;
        take_unit(&w, p, a);
        if (states) states[i].w = w;
    }
    return states;
}

static size_t backward_bytes(const sdpa_problem *p) {
    sdpa_arena arena = {NULL, 0};
    batch_layout(p, backward_most(p), &arena);
    return arena.used;
}

/* What a unit does before it adds to any gradient, but for its rows of P. Returns whether there are far rows, which are
 * completed from their maxima. */
NOINLINE bool begin_unit(const sdpa_unit *u, backward_state *s) {
    const sdpa_problem *p = u->problem;
    const backward_scratch *w = &s->w;
    unit_keys(u, &s->j0, &s->j1);
    s->c = product_factor(u, M_LOG2E);
    s->sums = (head_sums){0};
    clear_keys(u, (keys){0});
    const bool far = load_lse(u, w);
    memset(w->dq, 0, sizeof(real) * (size_t)(w->n_lanes * w->k_row));
    memset(w->dmask, 0, sizeof(real) * (size_t)w->n_lanes);
    if (p->scores == SDPA_ADDITIVE) memset(w->dq_lanes, 0, sizeof(real) * (size_t)(p->d_k * w->n_lanes));
    if (s->j0 < s->j1) pack_panels(w->q, &u->q, u->i0, u->n_i, p->d_k, sign_of_scale(u), w->line);
#ifdef HAVE_AMX
    if (w->amx.can && s->j0 < s->j1) begin_tiles(u, &s->w);
#endif
    if (!far) s->w.low = NULL;
    return far;
}

/* Completes the rows of a unit, if it must, and scales its queries. False if interrupted. */
NOINLINE bool prepare_unit(const sdpa_unit *u, backward_state *s, bool completes, bool far) {
    const sdpa_problem *p = u->problem;
    backward_scratch *w = &s->w;
    double sunk[SDPA_QUERY_BLOCK];
    weigh_sink(u, w, sunk);
    if (completes && !complete_rows(u, w, s->j0, s->j1, s->c, far, sunk)) return false;
    s->kept = completes;
    s->own = (backward_rows){.dout = scale_queries(u, w)};
#ifdef HAVE_AMX
    for (int64_t i = 0; w->amx.can && i < u->n_i; i++) w->amx.factor[i] = (real)w->factor[i];
#endif
    s->own.q = pack_rows(&u->q, u->i0, u->n_i, p->d_k, s->j1 - s->j0, w->q_rows, NULL);
    s->own.finite = !may_mask(u) || (rows_finite(&s->own.q, p->d_k) && rows_finite(&s->own.dout, p->d_v));
    /* A sink's logit has no value, so its dP is 0: dS = -P delta. */
    for (int64_t i = 0; u->dsinks.data && i < u->n_i; i++) s->sums.dsinks -= sunk[i] * w->delta[i];
    return true;
}

/* backward_keys for the key blocks b0 .. b1-1 that the unit sees, each in its turn. False if interrupted. */
NOINLINE bool sweep_blocks(const sdpa_unit *u, const backward_state *s, int64_t b0, int64_t b1) {
    const backward_scratch *w = &s->w;
    const int64_t size = sdpa_key_block(u->problem), first = s->j0 / size, end = blocks_of(u->problem, s->j1);
    const bool overfull = end - first > w->n_slots;
    const key_blocks own = blocks_to_pass(u, s->j0, s->j1);
    if (b0 < own.first) b0 = own.first;
    for (int64_t b = b0; b < b1 && b < own.last; b++) {
        if (sees_none_of(u, s->j0, s->j1, b)) {
            if (!sdpa_turn_skip(u, b)) return false;
            continue;
        }
        if (!sdpa_turn_wait(u, b)) return false;
        const bool anew = !s->kept || (overfull && b - first >= w->n_slots - 1);
        const int64_t j1 = (b + 1) * size < s->j1 ? (b + 1) * size : s->j1;
        for (keys piece = {.j0 = b * size}; next_piece(u, j1, &piece);) {
            const backward_scratch at = kept_piece(w, u->problem, piece.j0, s->kept ? first : b);
            backward_keys(u, &at, &s->own, piece, s->c, anew);
        }
        sdpa_turn_pass(u, b);
    }
    return true;
}

NOINLINE void end_unit(const sdpa_unit *u, backward_state *s) {
    const sdpa_problem *p = u->problem;
    const backward_scratch *w = &s->w;
    for (int64_t i = 0; p->scores == SDPA_ADDITIVE && i < u->n_i; i++) {
        for (int64_t x = 0; x < p->d_k; x++) w->dq[i * w->k_row + x] = w->dq_lanes[x * w->n_lanes + i];
    }
#ifdef HAVE_AMX
    if (w->amx.can && s->j0 < s->j1) amx_finish_queries(&w->amx, u->n_i, p->d_k, w->dq, w->k_row);
#endif
    if (own_scale(u)) s->sums.dscales = finish_scale(u, w, &s->own.q);
    store_gradients(u, w->dq, w->k_row, w->dmask, &s->sums, w->line);
}

/* Takes n units through their keys, range by range. False if interrupted. */
NOINLINE bool sweep_units(const sdpa_unit *units, backward_state *states, int64_t n) {
    int64_t first = INT64_MAX, end = 0;
    for (int64_t i = 0; i < n; i++) {
        const key_blocks own = blocks_to_pass(&units[i], states[i].j0, states[i].j1);
        if (own.first >= own.last) continue;
        if (own.first < first) first = own.first;
        if (own.last > end) end = own.last;
    }
    const int64_t step = n > 1 ? range_blocks(units->problem) : INT64_MAX / 2;
    for (int64_t b = first; b < end; b += step) {
        for (int64_t i = 0; i < n; i++) {
            if (!sweep_blocks(&units[i], &states[i], b, b + step)) return false;
        }
    }
    for (int64_t i = 0; i < n; i++) end_unit(&units[i], &states[i]);
    return true;
}

/* Computes dQ of the queries of n units, at most backward_most, and adds to dK, dV and dMask. dK and dV have the compute
 * type and unit column stride. */
NOINLINE void backward_any(const sdpa_unit *units, int64_t n, void *scratch) {
    sdpa_arena arena = {scratch, 0};
    backward_state *states = batch_layout(units->problem, n, &arena);
    int64_t done = 0;
    for (int64_t i = 0; i < n; i++) {
        const bool far = begin_unit(&units[i], &states[i]), completes = far || completes_all(units->problem);
        if (completes && !sweep_units(units + done, states + done, i - done)) return;
        if (!prepare_unit(&units[i], &states[i], completes, far)) return;
        if (!completes) continue;
        if (!sweep_units(units + i, states + i, 1)) return;
        done = i + 1;
    }
    sweep_units(units + done, states + done, n - done);
}

static void backward_units(const sdpa_unit *units, int64_t n, void *scratch) {
    if (n > 1 || !backward_one_block(units, scratch)) backward_any(units, n, scratch);
}

#endif
