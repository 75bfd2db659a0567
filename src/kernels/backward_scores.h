/* The scratch of a unit of the backward, and P of a block of keys: see backward.h. */
#ifndef SDPA_KERNEL_BACKWARD_SCORES_H
#define SDPA_KERNEL_BACKWARD_SCORES_H

#include "additive.h"
#ifdef HAVE_AMX
#include "amx_gradients.h"
#endif
#include "pass.h"

typedef struct backward_scratch {
    /* Of a unit: */
    real *q, *dout;           /* pack_panels of d_k and d_v */
    real *q_rows, *dout_rows; /* of pack_rows; q only if it cannot be read in place */
    real *lse;                /* per query: lse in log2 units, rounded to an integer; see set_far_rows */
    real *m, *low;            /* per query; `low` is what lse lacks in a far row, NULL in most units */
    real *delta, *dlse;       /* per query */
    bool *weighed;            /* per query: whether delta was summed with the weights */
    double *factor;           /* per query: the factor that 2^(c s - lse) needs to be P; dO and delta take it */
    real *dq;                 /* (n_lanes, d_k rounded up to VL) */
    real *dmask;              /* per query: the gradient of a mask that is broadcast over keys */
    real *dq_lanes;           /* (d_k, n_lanes): dQ^T of additive scores */
    /* Of the units of a batch, one after the other: */
    real *o_rows; /* as q_rows */
    real *p, *ds; /* (block, n_lanes): P^T, dS^T; n_slots blocks of p */
    real *given;  /* (block, n_lanes): additive scores, or room for `ready` */
    real *ready;  /* (block, n_lanes): products of queries and keys by one_block_by_rows or the matrix unit, or NULL */
    real *part;   /* (block, 2, VL + 1): see additive_gradients */
    unsigned char *state; /* (2, n_lanes / VL): enum panel_state of both pieces of a block, n_slots times */
    real *r;              /* (block, n_lanes): dropout's factors, or NULL */
    real *tanh;           /* (n_slots, block, n_lanes): the cap's tanh or score_mod's slopes (slope_at), or NULL */
    real *raw;            /* as tanh: the scores that score_mod gets, or NULL */
    real *zero;           /* per query */
    real *k, *v, *k_tail, *v_tail;
    real *line;
    int64_t n_lanes, k_row, block;
    int64_t n_slots; /* key blocks whose P is kept until the rows are complete; later blocks share the last slot */
#ifdef HAVE_AMX
    amx_gradients amx;
#endif
} backward_scratch;

/* Whether products go through the matrix unit. */
INLINE bool by_tiles(const backward_scratch *w) {
#ifdef HAVE_AMX
    return w->amx.can;
#else
    (void)w;
    return false;
#endif
}

/* Whether delta is summed with the weights, since O is not precise enough for it. */
INLINE bool weighs_delta(const sdpa_problem *p) { return sdpa_is_narrow(p->o.dtype) || p->scores == SDPA_ADDITIVE; }

/* The largest relative error of rounding to the 16 bits of O. */
INLINE real out_roundoff(const sdpa_problem *p) { return p->o.dtype == SDPA_BF16 ? 0x1p-8f : 0x1p-11f; }

/* How far from 1 the sum of a complete row may be, in log2 units, where |lse| is small: lse and the sum are rounded. lse
 * of a stale maximum is off by more (forward.h). Beside an O of 16 bits, a sixteenth of its rounding error: a row with
 * that much weight elsewhere is still better off with delta from these weights than from O. Rows of large scores, whose
 * rounding takes the sum further from 1, see is_own_delta. */
INLINE real completion_slack(const sdpa_problem *p) {
    return sdpa_is_narrow(p->o.dtype) ? out_roundoff(p) / 16 : 8 * REAL_EPSILON;
}

/* Whether lse has more digits than the kernel computes with, so that it lost none. */
INLINE bool is_wide_lse(const sdpa_problem *p) { return SDPA_REAL == 32 && p->lse.dtype == SDPA_F64; }

/* Whether all rows are completed: half an ulp of an lse of the compute type costs up to a quarter of the precision. The
 * bits of invariant results must depend neither on the number of keys, some of which may be hidden, nor on other rows. */
INLINE bool completes_all(const sdpa_problem *p) {
    return weighs_delta(p) || !is_wide_lse(p) || p->n_k <= COMPLETED_KEYS || p->invariant;
}

/* The scratch that the units of a batch use one after the other. */
INLINE backward_scratch common_layout(const sdpa_problem *p, sdpa_arena *a) {
    backward_scratch w = {
        .block = block_keys(p, sdpa_key_block(p)), .n_lanes = unit_lanes(p), .k_row = round_up(p->d_k, VL)};
    const int64_t n_blocks = blocks_of(p, p->n_k), n = w.n_lanes;
    const int64_t pairs = w.block * n, tiles = (w.block + MAX_TILE_ROWS) * n;
    const bool additive = p->scores == SDPA_ADDITIVE;
    w.n_slots = !completes_all(p) ? 1 : n_blocks < KEPT_BLOCKS ? n_blocks : KEPT_BLOCKS;
    const array arrays[] = {
        ARRAY(w.o_rows, n * row_stride(p->d_v)),
        ARRAY(w.p, w.n_slots * tiles),
        ARRAY(w.state, w.n_slots * 2 * SDPA_QUERY_BLOCK / VL),
        ARRAY(w.ds, tiles),
        ARRAY(w.given, additive || p->n_k <= FEW_KEYS ? tiles : ABSENT),
        ARRAY(w.part, additive ? w.block * 2 * (VL + 1) : ABSENT),
        ARRAY(w.r, p->dropout_p > 0 ? pairs : ABSENT),
        ARRAY(w.tanh, is_straight(p) ? ABSENT : w.n_slots * pairs),
        ARRAY(w.raw, p->score_mod ? w.n_slots * pairs : ABSENT),
        ARRAY(w.zero, n),
        ARRAY(w.k, w.block * row_stride(p->d_k)),
        ARRAY(w.v, w.block * row_stride(p->d_v)),
        ARRAY(w.k_tail, SCORE_ROWS * p->d_k),
        ARRAY(w.v_tail, SCORE_ROWS * p->d_v),
        ARRAY(w.line, line_size(p, w.block)),
    };
    UNROLL for (int i = 0; i < COUNT(arrays); i++) take_array(&arrays[i], a);
#ifdef HAVE_AMX
    amx_take_common(&w.amx, p, n, w.block, a);
    w.ready = w.amx.s;
#endif
    return w;
}

/* Adds the scratch of a unit to that of its batch. */
INLINE void take_unit(backward_scratch *w, const sdpa_problem *p, sdpa_arena *a) {
    const int64_t n = w->n_lanes;
    const array arrays[] = {
        ARRAY(w->q, p->d_k * n),
        ARRAY(w->dout, p->d_v * n),
        ARRAY(w->q_rows, n * row_stride(p->d_k)),
        ARRAY(w->dout_rows, n * row_stride(p->d_v)),
        ARRAY(w->lse, n),
        ARRAY(w->m, n),
        ARRAY(w->low, n),
        ARRAY(w->delta, n),
        ARRAY(w->weighed, n),
        ARRAY(w->dlse, n),
        ARRAY(w->factor, n),
        ARRAY(w->dq, n * w->k_row),
        ARRAY(w->dmask, n),
        ARRAY(w->dq_lanes, p->scores == SDPA_ADDITIVE ? p->d_k * n : ABSENT),
    };
    UNROLL for (int i = 0; i < COUNT(arrays); i++) take_array(&arrays[i], a);
#ifdef HAVE_AMX
    amx_take_unit(&w->amx, a);
#endif
}

/* Beyond this, in log2 units, the rounding error of lse could take P out of the range of its type. */
#define FAR_LSE (16 / REAL_EPSILON)

/* Loads lse in log2 units. Queries that see no key get lse = +inf, and padding lanes, whose scores are 0, a large one:
 * their P is exactly 0. Returns whether there are far rows. */
COLD NOINLINE bool load_lse(const sdpa_unit *u, const backward_scratch *w) {
    const sdpa_problem *p = u->problem;
    const double log2_e = log2_e_of(u);
    bool far = false;
    for (int64_t i = 0; i < w->n_lanes; i++) {
        w->lse[i] = i < u->n_i ? (real)INFINITY : HUGE_SCORE;
        w->delta[i] = w->dlse[i] = w->zero[i] = 0;
        w->weighed[i] = false;
        w->factor[i] = 1;
        if (i >= u->n_i) continue;
        if (u->dlse) w->dlse[i] = query_scalar(u->dlse, &p->dlse, u->i0 + i);
        const double lse = query_double(u->lse, &p->lse, u->i0 + i);
        if (lse == -INFINITY) continue;
        double log2_lse = lse * log2_e;
        if (isfinite(lse)) log2_lse = fmax(-REAL_MAX, fmin(REAL_MAX, log2_lse)); /* see mask_block */
        /* Rounded down, so that the factor is at most 1 and dO times it stays finite. Where lse is so large that it has
         * no digits after the point, P is only as precise as lse, but the factor must not become 0 or infinite. */
        w->lse[i] = (real)floor(log2_lse);
        if (isfinite(lse)) w->factor[i] = exp2(fmax(-64, fmin(64, w->lse[i] - log2_lse)));
        far |= isfinite(lse) && fabs(log2_lse) > FAR_LSE;
    }
    return far;
}

/* d[i, j0 + j] += dS[j, i] for the unit's queries and n keys, by squares of VL x VL. */
NOINLINE void add_transposed(const sdpa_unit *u, const sdpa_matrix *d, const real *ds, int64_t ds_row, int64_t j0,
                             int64_t n) {
    const bool direct = is_direct(d);
    for (int64_t i = 0; i < u->n_i; i += VL) {
        for (int64_t j = 0; j < n; j += VL) {
            const int lanes = u->n_i - i < VL ? (int)(u->n_i - i) : VL, keys = n - j < VL ? (int)(n - j) : VL;
            vec r[VL] = {{0}}, old = {0};
            for (int l = 0; l < keys; l++) r[l] = vload(ds + (j + l) * ds_row + i);
            transpose(r);
            char *to = d->data + (u->i0 + i) * d->row + (j0 + j) * d->col;
            for (int l = 0; l < lanes; l++, to += d->row) {
                if (direct && keys == VL) {
                    vstore((real *)to, vload((const real *)to) + r[l]);
                    continue;
                }
                load(&old, to, keys, d->col, d->dtype, false);
                old += r[l];
                store(to, &old, keys, d->col, d->dtype);
            }
        }
    }
}

/* dMask += dS (n, ds_row), summed over the axes on which the mask is broadcast (stride 0); `columns`: per query, where
 * it is broadcast over keys. dMask has the compute type or, where no sum crosses units, any float type. */
NOINLINE void add_mask_gradient(const sdpa_unit *u, const real *ds, int64_t ds_row, real *columns, int64_t j0,
                                int64_t n) {
    const sdpa_matrix *d = &u->dmask;
    if (d->row != 0 && d->col != 0) {
        add_transposed(u, d, ds, ds_row, j0, n);
        return;
    }
    for (int64_t j = 0; j < n; j++, ds += ds_row) {
        if (d->col == 0) {
            SIMD for (int64_t i = 0; i < u->n_i; i++) columns[i] += ds[i];
            continue;
        }
        char *element = d->data + (j0 + j) * d->col;
        real sum = 0, old;
        _Pragma("omp simd reduction(+ : sum)") for (int64_t i = 0; i < u->n_i; i++) sum += ds[i];
        load(&old, element, 1, 0, d->dtype, false);
        sum += old;
        store(element, &sum, 1, 0, d->dtype);
    }
}

/* P^T of a panel and keys k directly from the products, with its row sums in `sum`. If an lse is huge or a result is
 * NaN (a score was too low for vexp2_above), returns false with `sum` 0 and s undefined. */
INLINE bool quick_weights(scores *t, int nv, enum score_mode mode, tile_sums *sum) {
    bool quick = true;
    for (int x = 0; x < nv; x++) quick &= !vany(is_huge(vload(t->shift + x * VL)));
    t->extreme = (real *)sum;
    if (quick) score(t, nv, mode);
    for (int x = 0; x < nv; x++) {
        const vec all = sum_of_four(&(*sum)[0][x], SCORE_WIDTH);
        quick &= !vany(all != all);
    }
    if (!quick) memset(*sum, 0, sizeof *sum);
    return quick;
}

/* backward_weights where a finite number for each key is all that is added to its products. False if they must be
 * computed in another way. */
INLINE bool key_biased_weights(const sdpa_unit *u, const backward_scratch *w, panel q, const rows *k, real c,
                               tile_sums *sum) {
    const sdpa_problem *p = u->problem;
    const block b = block_of(u, q, k);
    if ((p->features & ~FUSED_CAN) || w->ready || w->low || !is_key_bias(u, &b, (real)M_LOG2E, w->line)) return false;
    scores t = panel_scores(w->q, q, k, p->d_k, w->p + q.i, w->n_lanes);
    t.shift = w->lse + q.i;
    t.c = c;
    t.key_bias = w->line;
    return quick_weights(&t, q.nv, SCORE_KEYS_WEIGHTS, sum);
}

/* The scores of a panel and keys k, into w->p: *bias is what is there already. False if all are masked. */
INLINE bool begin_scores(const sdpa_unit *u, const backward_scratch *w, panel q, const rows *k, scores *t,
                         score_program *own, enum bias_kind *bias) {
    const sdpa_problem *p = u->problem;
    const block b = block_of(u, q, k);
    *t = panel_scores(w->q, q, k, p->d_k, w->p + q.i, w->n_lanes);
    *bias = bias_block(u, &b, (real)M_LOG2E, t->s, t->s_row, w->line);
    if (*bias == BIAS_ALL_MASKED) return false;
    if (p->scores == SDPA_ADDITIVE) {
        additive_scores(p, t->x, q.nv, k, k->n, w->given, w->n_lanes);
        t->given = w->given;
    } else {
#ifdef HAVE_AMX
        if (w->amx.can) amx_backward_scores(&w->amx, w->q, q, k, p->d_k);
#endif
        t->given = lane_of(w->ready, q.i);
    }
    t->ds = lane_of(w->tanh, q.i);
    t->raw = lane_of(w->raw, q.i);
    use_program(t, own, u, &b, w->line);
    return true;
}

/* P^T of a panel and keys k, its row sums added to `sum`, which is zero. Masked pairs are -0. */
NOINLINE enum panel_state backward_weights(const sdpa_unit *u, const backward_scratch *w, panel q, const rows *k,
                                           real c, tile_sums *sum) {
    const sdpa_problem *p = u->problem;
    scores t;
    score_program own;
    enum bias_kind bias;
    if (key_biased_weights(u, w, q, k, c, sum)) return PANEL_VISIBLE;
    if (!begin_scores(u, w, q, k, &t, &own, &bias)) return PANEL_HIDDEN;
    t.shift = w->lse + q.i;
    t.c = c;
    /* Additive scores are not fused, but not stored as rounded logits either: see may_round. */
    const bool plain = bias == BIAS_NONE && !(p->features & ~(FUSED_CAN | SDPA_FEATURE_ADDITIVE));
    if (plain && !t.given && quick_weights(&t, q.nv, SCORE_WEIGHTS, sum)) return PANEL_VISIBLE;
    vec unused[SCORE_WIDTH] = {{0}};
    t.extreme = (real *)unused;
    if (plain && t.given != t.s) {
        score(&t, q.nv, SCORE_RAW);
    } else if (!plain) {
        score_logits(&t, q.nv, u, bias, M_LOG2E);
    }
    const bool masked = exponentiate(t.s, t.s_row, k->n, q.nv, plain ? c : 1, t.shift, lane_of(w->low, q.i),
                                     (real *)sum, bias == BIAS_SOME_MASKED, may_round(u->problem));
    return masked ? PANEL_MASKED : PANEL_VISIBLE;
}

/* Whether dS K is wanted: for dQ, or for the gradient of the head's scale. */
INLINE bool wants_queries(const sdpa_unit *u) { return u->dq.data || u->dscales.data; }

/* Whether a gradient that goes through the scores is wanted; dV needs only the weights. */
INLINE bool wants_scores(const sdpa_unit *u) { return wants_queries(u) || u->dk.data || u->dmask.data || u->sums; }

/* The rows of K of a block, for weigh_keys and find_maxima. */
NOINLINE rows score_keys(const sdpa_unit *u, const backward_scratch *w, keys b, int64_t n_reads) {
    const rows k = pack_rows(&u->k, b.j0, b.n, u->problem->d_k, by_tiles(w) ? 1 : n_reads, w->k, w->k_tail);
#ifdef HAVE_AMX
    if (w->amx.can) amx_take_keys(&w->amx.qk, &u->k, &k, u->problem->d_k, w->line, w->amx.keys);
#endif
    return k;
}

/* The rows of V of a block, for panel_gradient. */
NOINLINE rows gradient_values(const sdpa_unit *u, const backward_scratch *w, keys b) {
    const rows v = pack_rows(&u->v, b.j0, b.n, u->problem->d_v, by_tiles(w), w->v, w->v_tail);
#ifdef HAVE_AMX
    if (w->amx.can) amx_take_keys(&w->amx.ov, &u->v, &v, u->problem->d_v, w->line, w->amx.values);
#endif
    return v;
}

/* P of keys k by all queries of the unit; row sums are added to `sum`. */
NOINLINE void weigh_keys(const sdpa_unit *u, const backward_scratch *w, const rows *k, real c, real *sum) {
    PANELS (q, u->n_i) {
        tile_sums part = {{{0}}};
        const enum panel_state state = backward_weights(u, w, q, k, c, &part);
        for (int x = 0; x < q.nv; x++) {
            real *to = sum + q.i + x * VL;
            vstore(to, vload(to) + sum_of_four(&part[0][x], SCORE_WIDTH));
            w->state[q.i / VL + x] = (unsigned char)state;
        }
        if (state != PANEL_HIDDEN) continue;
        fill_panel(w->p + q.i, w->n_lanes, q.nv, k->n, vset1(-0.0));
        /* dS is multiplied by its slope, 1 */
        if (w->tanh) fill_panel(w->tanh + q.i, w->n_lanes, q.nv, k->n, vset1(u->problem->score_mod ? 1 : 0));
        if (w->raw) fill_panel(w->raw + q.i, w->n_lanes, q.nv, k->n, (vec){0});
    }
}

/* dS = P * (dP - shift) of a panel that is not hidden. */
INLINE void panel_gradient(const sdpa_unit *u, const backward_scratch *w, const rows *v, panel q, const real *shift) {
#ifdef HAVE_AMX
    if (w->amx.can) {
        amx_panel_gradient(&w->amx, w->dout, q, v, u->problem->d_v, w->p, w->ds, shift);
        return;
    }
#endif
    scores t = panel_scores(w->dout, q, v, u->problem->d_v, w->p + q.i, w->n_lanes);
    t.ds = w->ds + q.i;
    t.shift = shift + q.i;
    const bool masked = w->state[q.i / VL] == PANEL_MASKED;
    score(&t, q.nv, masked ? SCORE_GRADIENT_MASKED : SCORE_GRADIENT);
}

/* Adds rowsum(P * dP) over keys k to `sum`, with dropout rowsum(R * P * dP). */
NOINLINE void weigh_values(const sdpa_unit *u, const backward_scratch *w, keys k, double *sum) {
    const rows v = gradient_values(u, w, k);
    PANELS (q, u->n_i) {
        if (w->state[q.i / VL] == PANEL_HIDDEN) continue;
        panel_gradient(u, w, &v, q, w->zero);
        const block b = block_of(u, q, &v);
        draw_factors(u, &b, lane_of(w->r, q.i), w->n_lanes);
        for (int64_t l = q.i; l < q.i + q.n_i; l += VL) {
            vec part[4] = {{0}};
            for (int64_t j = 0; j < k.n; j++) {
                const int64_t at = j * w->n_lanes + l;
                part[j % 4] += factor_at(w->r, at) * vload(w->ds + at);
            }
            const vec total = sum_of_four(part, 1);
            for (int x = 0; x < VL; x++) sum[l + x] += total[x];
        }
    }
}

/* Moves k on to the next piece of keys before j1. A block in which causality begins to hide keys from the unit's
 * queries is split in two, and only the second piece takes masks. False at the end. */
INLINE bool next_piece(const sdpa_unit *u, int64_t j1, keys *k) {
    const int64_t size = sdpa_key_block(u->problem);
    k->j0 += k->n;
    const int64_t next = (k->j0 / size + 1) * size, left = (next < j1 ? next : j1) - k->j0;
    const int64_t open = open_keys(u, u->i0, k->j0, left);
    k->n = open > 0 ? open : left;
    return left > 0;
}

/* The scratch of the piece that begins at key j, `first` being the first block that the unit sees. */
COLD NOINLINE backward_scratch kept_piece(const backward_scratch *w, const sdpa_problem *p, int64_t j, int64_t first) {
    backward_scratch kept = *w;
    const int64_t size = sdpa_key_block(p), number = j / size - first, key = j % size;
    const int64_t slot = number < w->n_slots ? number : w->n_slots - 1;
    kept.p += (slot * (w->block + MAX_TILE_ROWS) + key) * w->n_lanes;
    kept.state += (2 * slot + (key > 0)) * (SDPA_QUERY_BLOCK / VL);
    kept.tanh = lane_of(w->tanh, (slot * w->block + key) * w->n_lanes);
    kept.raw = lane_of(w->raw, (slot * w->block + key) * w->n_lanes);
    return kept;
}

#endif
