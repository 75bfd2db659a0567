/* The weights that each key receives: their sum and maximum over the queries. The first pass sums the rows, as for the
 * matrix of weights. In the second a unit keeps one block of keys while all queries pass. Each lane of a key adds up
 * panels in order, together with their rounding errors, so a total has only the errors of its weights, for any number
 * of queries. */
#ifndef SDPA_KERNEL_RECEIVED_H
#define SDPA_KERNEL_RECEIVED_H

#include "weights.h"

typedef struct received_scratch {
    weights_scratch w;
    real *total, *low,
        *most; /* (block, VL): a key's sums over the queries of each lane, their rounding, their maxima */
} received_scratch;

NOINLINE received_scratch received_layout(const sdpa_problem *p, sdpa_arena *a) {
    received_scratch r = {.w = weights_layout(p, a)};
    const int64_t n = r.w.scores.block * VL;
    const array arrays[] = {ARRAY(r.total, n), ARRAY(r.low, n), ARRAY(r.most, n)};
    take_arrays(arrays, COUNT(arrays), a);
    return r;
}

static size_t received_bytes(const sdpa_problem *p) {
    sdpa_arena arena = {NULL, 0};
    received_layout(p, &arena);
    return arena.used;
}

/* The running softmax of n lanes. */
INLINE running sums_at(const sdpa_unit *u, real *sums, int64_t n) {
    return (running){sums, sums + n, sums + 2 * n, may_round(u->problem)};
}

/* weights_sums of the unit's queries. Padding lanes get weight 0. */
COLD static void received_sums(const sdpa_unit *u, void *sums, void *scratch) {
    const sdpa_problem *p = u->problem;
    sdpa_arena arena = {scratch, 0};
    weights_scratch w = weights_layout(p, &arena);
    score_scratch *f = &w.scores;
    f->n_lanes = round_up(u->n_i, VL);
    w.row = sums_at(u, sums, f->n_lanes);
    pack_panels(f->q, &u->q, u->i0, u->n_i, p->d_k, sign_of_scale(u), f->line);
    if (!weights_sums(u, &w)) return;
    for (int64_t i = u->n_i; i < f->n_lanes; i++) w.row.l[i] = 0;
}

/* Adds the weights that keys k receive from a panel. */
NOINLINE void receive_panel(const sdpa_unit *u, const received_scratch *r, const rows *k, panel q) {
    const weights_scratch *w = &r->w;
    const block b = block_of(u, q, k);
    const score_scratch *f = &w->scores;
    const real factor = stage_scores(u, f, k, q, SDPA_WEIGHTS);
    draw_factors(u, &b, w->r, f->s_row);
    for (int64_t j = 0; j < k->n; j++) {
        vec sum = {0}, most = vload(r->most + j * VL);
        for (int x = 0; x < q.nv; x++) {
            const int64_t at = j * f->s_row + x * VL, lane = q.i + x * VL;
            const vec e = weight_of(w, factor, vload(f->s + at), at, lane);
            const vec l = vload(w->row.l + lane);
            /* A masked pair is 0 even in a row of NaN. So is a pair of a padding lane, which repeats a query. */
            const vec weight = vselect(((ivec)e == SIGN_BIT) | (l == 0), (vec){0}, e * l);
            sum += weight;
            most = vmax2(weight, most);
        }
        vec total = vload(r->total + j * VL), low = vload(r->low + j * VL);
        add_exactly(&total, &low, sum);
        vstore(r->total + j * VL, total);
        vstore(r->low + j * VL, low);
        vstore(r->most + j * VL, most);
    }
}

/* Sum and maximum of each of n keys, to rows j0 .. of u->o. */
NOINLINE void store_received(const sdpa_unit *u, const received_scratch *r, int64_t j0, int64_t n) {
    for (int64_t j = 0; j < n; j++) {
        double total = 0;
        real most = 0;
        for (int64_t l = j * VL; l < (j + 1) * VL; l++) {
            total += (double)r->total[l] + r->low[l];
            most = r->most[l] > most ? r->most[l] : most;
        }
        /* A maximum may lose a NaN; the sum does not. */
        const real row[SDPA_N_RECEIVED] = {(real)total, total == total ? most : (real)NAN};
        store(u->o.data + (j0 + j) * u->o.row, row, SDPA_N_RECEIVED, u->o.col, u->o.dtype);
    }
}

COLD static void received_unit(const sdpa_unit *u, int64_t n_keys, const sdpa_span *spans, int64_t n_spans,
                               const void *sums, void *scratch) {
    const sdpa_problem *p = u->problem;
    sdpa_arena arena = {scratch, 0};
    received_scratch r = received_layout(p, &arena);
    const score_scratch *f = &r.w.scores;
    sdpa_unit part = *u;
    const int64_t j0 = u->first_key, end = j0 + n_keys;
    if (end < u->key_length) part.key_length = end;
    for (int64_t i = 0; i < n_keys * VL; i++) r.total[i] = r.low[i] = r.most[i] = 0;
    if (part.key_length > j0) {
        const rows k = pack_rows(&u->k, j0, part.key_length - j0, p->d_k, 0, f->k, f->k_tail);
        for (const sdpa_span *s = spans; s < spans + n_spans; s++) {
            int64_t first, last;
            part.i0 = s->i0;
            part.n_i = s->n_i;
            unit_keys(&part, &first, &last);
            if (first >= last) continue;
            if (sdpa_run_stopped(u->run)) return;
            r.w.row = sums_at(u, (real *)sums + 3 * s->lane, round_up(s->n_i, VL));
            pack_panels(f->q, &u->q, s->i0, s->n_i, p->d_k, sign_of_scale(u), f->line);
            PANELS (q, s->n_i) {
                sdpa_visible_keys(&part, s->i0 + q.i, q.n_i, &first, &last);
                if (first < last) receive_panel(&part, &r, &k, q);
            }
        }
    }
    store_received(u, &r, j0, n_keys);
}

#endif
