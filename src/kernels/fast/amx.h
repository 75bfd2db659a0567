/* The forward of a unit by the products of amx_products.h. The scores of a panel and a block of keys go through memory:
 * first their maximum is found, then their exponentials are taken, so there is no stale maximum. */
#ifndef SDPA_KERNEL_FAST_AMX_H
#define SDPA_KERNEL_FAST_AMX_H

#include "../amx_scores.h"

/* A block of keys, with its values: the rows, and what is odd among them. */
typedef struct amx_block {
    amx_keys k;
    rows v;
    bool any_odd_value;
    bool odd_value[AMX_MOST_KEYS];
} amx_block;

NOINLINE void amx_pack_block(const sdpa_unit *u, const forward_scratch *w, keys b, amx_block *block) {
    const sdpa_problem *p = u->problem;
    const amx_scratch *amx = &w->amx;
    const rows k = amx_rows(&u->k, b.j0, b.n, p->d_k, amx->parts, w->k);
    amx_take_keys(amx, &u->k, &k, p->d_k, w->line, &block->k);
    block->v = amx_rows(&u->v, b.j0, b.n, p->d_v, amx->parts, w->v);
    block->any_odd_value = amx_pack_values(amx, &block->v, p->d_v, NULL);
    if (!block->any_odd_value) return;
    amx_find_odd(&u->v, b.j0, b.n, p->d_v, amx->parts, w->line, block->odd_value);
    amx_pack_values(amx, &block->v, p->d_v, block->odd_value);
}

/* A panel and the keys of a block that are added to it in one go. */
typedef struct amx_piece {
    panel q;
    keys b;
    real *scores; /* (n, s_row) */
    char *p;      /* weights in parts */
    bool live;    /* not all pairs are masked */
    vec alpha[SCORE_WIDTH];
    vec sees[SCORE_WIDTH]; /* with odd values: see amx_odd_values */
} amx_piece;

INLINE amx_task amx_piece_scores(const forward_scratch *w, const amx_block *block, const amx_piece *piece) {
    return amx_scores(&w->amx, &block->k, piece->q, piece->b, piece->scores, w->s_row);
}

/* Computes the scores of odd queries and odd keys of a panel anew. */
COLD NOINLINE void amx_odd_scores(const sdpa_unit *u, const forward_scratch *w, const amx_block *block,
                                  const amx_piece *piece) {
    const panel q = piece->q;
    const keys b = piece->b;
    const rows k = pack_rows(&u->k, b.j0, b.n, u->problem->d_k, 0, w->k, w->k_tail);
    amx_ordinary(w->q, q, &k, u->problem->d_k, w->s, w->s_row);
    amx_replace_odd_scores(&w->amx, &block->k, q, b, piece->scores, w->s, w->s_row);
}

/* The scores of a panel, from their products by c, their maxima, and where their weights go in parts. */
typedef struct amx_logits {
    const real *s; /* (n, row) */
    real *p;       /* (parts, .., row) */
    int64_t n, row, part;
    real c;
    vec shift[SCORE_WIDTH];
    const real *low; /* per query */
} amx_logits;

/* 2^x for x below 127, or 0 where that is below the normal numbers. Beside 16 bits an error of 2.4 ulp does not show, and
 * vexp2 takes three operations more. */
INLINE vec amx_exp2(vec x, int parts) {
#ifdef HAVE_SCALE
    if (parts == 3) return vexp2(x);
    const real c[] = {1.86712993e-3f, 9.0170307e-3f, 5.5799913e-2f, 2.40164444e-1f, 6.93151295e-1f, 1}; /* 8.2e-8 */
    const vec f = vrest_above(x);
    vec y = vset1(c[0]);
    UNROLL for (int i = 1; i < 6; i++) y = vmuladd(y, f, vset1(c[i]));
    return vscale_all(y, x);
#else
    (void)parts;
    return vexp2(x);
#endif
}

/* Stores a pair of keys' weights in parts. */
INLINE void amx_store_pair(const amx_logits *t, int64_t pair, int x, vec even, vec odd, int parts) {
    real *to = t->p + pair * t->row + x * VL;
    ivec first[AMX_MOST_PARTS], second[AMX_MOST_PARTS];
    amx_split(even, parts, true, first);
    amx_split(odd, parts, true, second);
    UNROLL for (int i = 0; i < parts; i++) vstore(to + i * t->part, (vec)amx_pair(first[i], second[i]));
}

INLINE vec amx_weight(const amx_logits *t, int64_t j, int x, int parts, bool biased) {
    const vec s = vload(t->s + j * t->row + x * VL), p = amx_exp2(vmulsub(vset1(t->c), s, t->shift[x]), parts);
    return biased ? vselect(s == -(real)INFINITY, vset1(-0.0), p) : p;
}

/* The weights of eight keys of a panel, of which n exist, as pairs. Adds their sums to `sum`. */
INLINE void amx_eight_weights(const amx_logits *t, int64_t j, int64_t n, int x, int parts, bool biased, vec *sum) {
    vec part = {0};
    UNROLL for (int i = 0; i < 8; i += 2) {
        const vec even = i < n ? amx_weight(t, j + i, x, parts, biased) : (vec){0},
                  odd = i + 1 < n ? amx_weight(t, j + i + 1, x, parts, biased) : (vec){0};
        part += even;
        part += odd;
        amx_store_pair(t, (j + i) / 2, x, even, odd, parts);
    }
    sum[x] += part;
}

/* The weights of a panel as pairs, and their sums over the keys. The products of the queue go on meanwhile. */
INLINE void amx_weights(const amx_logits *all, int nv, int parts, bool biased, vec *sum, amx_queue *queue) {
    const amx_logits t = *all; /* a copy that no store can alias */
    const int64_t n = round_up(t.n, AMX_DEPTH), steps = (amx_steps_left(queue) + n / 8 - 1) / (n / 8);
    for (int64_t j = 0; j < n; j += 8) {
        amx_advance(queue, steps);
        if (j + 8 <= t.n) {
            for (int x = 0; x < nv; x++) amx_eight_weights(&t, j, 8, x, parts, biased, sum);
        } else {
            for (int x = 0; x < nv; x++) amx_eight_weights(&t, j, t.n - j, x, parts, biased, sum);
        }
    }
}

/* amx_weights with whether there is a bias as a constant. */
INLINE void amx_weigh_parts(const amx_logits *t, int nv, int parts, bool biased, vec *sum, amx_queue *queue) {
    if (biased) {
        amx_weights(t, nv, parts, true, sum, queue);
    } else {
        amx_weights(t, nv, parts, false, sum, queue);
    }
}

/* amx_weights with the number of parts as a constant, too. */
NOINLINE void amx_weigh(const amx_logits *t, int nv, int parts, bool biased, vec *sum, amx_queue *queue) {
    if (parts == 1) {
        amx_weigh_parts(t, nv, 1, biased, sum, queue);
    } else if (parts == 2) {
        amx_weigh_parts(t, nv, 2, biased, sum, queue);
    } else {
        amx_weigh_parts(t, nv, 3, biased, sum, queue);
    }
}

/* amx_weights in steps: where weights are multiplied by dropout's factors, where maxima are huge, and where w->s has to
 * keep the weights. */
INLINE void amx_weights_in_steps(const sdpa_unit *u, const forward_scratch *w, const amx_logits *t, panel q, int parts,
                                 const block *b, vec *sum) {
    const bool drops = draw_factors(u, b, w->r, t->row);
    for (int x = 0; x < q.nv; x++) {
        vec total = {0};
        for (int64_t j0 = 0; j0 < t->n; j0 += 8) {
            vec part = {0};
            for (int64_t j = j0; j < t->n && j < j0 + 8; j++) {
                const int64_t at = j * t->row + x * VL;
                const vec s = vload(t->s + at), d = below_maximum(t->c, s, t->shift[x], w->row.rounded),
                          p = amx_exp2(d - vload(t->low + x * VL), parts);
                part += p;
                vstore(w->s + at, vselect(s == -(real)INFINITY, vset1(-0.0), drops ? p * vload(w->r + at) : p));
            }
            total += part;
        }
        for (int64_t j = 0; j < round_up(t->n, AMX_DEPTH); j += 2) {
            const vec none = {0}, even = j < t->n ? vload(w->s + j * t->row + x * VL) : none,
                      odd = j + 1 < t->n ? vload(w->s + (j + 1) * t->row + x * VL) : none;
            amx_store_pair(t, j / 2, x, even, odd, parts);
        }
        sum[x] = total;
    }
}

/* amx_weights_in_steps with the number of parts as a constant. */
COLD NOINLINE void amx_weigh_in_steps(const sdpa_unit *u, const forward_scratch *w, const amx_logits *t, panel q,
                                      const block *b, vec *sum) {
    if (w->amx.parts == 1) {
        amx_weights_in_steps(u, w, t, q, 1, b, sum);
    } else if (w->amx.parts == 2) {
        amx_weights_in_steps(u, w, t, q, 2, b, sum);
    } else {
        amx_weights_in_steps(u, w, t, q, 3, b, sum);
    }
}

/* Sets sees to the queries of a piece that see an odd value, where w->s holds their weights. Their rows of w->o become
 * alpha o + P V, computed the ordinary way. */
COLD NOINLINE void amx_odd_values(const sdpa_unit *u, const forward_scratch *w, const amx_block *block,
                                  amx_piece *piece) {
    const sdpa_problem *p = u->problem;
    const amx_scratch *amx = &w->amx;
    const panel q = piece->q;
    const keys b = piece->b;
    const int64_t first = b.j0 - block->v.j0, row = q.nv * VL;
    ivec masked = {0};
    for (int x = 0; x < q.nv; x++) {
        ivec any = {0};
        for (int64_t j = 0; j < b.n; j++) {
            const ivec weight = (ivec)vload(w->s + j * w->s_row + x * VL);
            masked |= weight == SIGN_BIT;
            if (block->odd_value[first + j]) any |= weight != SIGN_BIT;
        }
        piece->sees[x] = (vec)any;
    }
    const real *old = amx->o + q.i * amx->d_v;
    for (int64_t i = 0; i < q.n_i; i++) {
        for (int64_t c = 0; c < w->o_row; c++) w->o[(q.i + i) * w->o_row + c] = old[c * row + i];
    }
    rows v = pack_rows(&u->v, b.j0, b.n, p->d_v, 1, w->v, NULL);
    const bool finite = !vany(masked) || rows_finite(&v, p->d_v);
    gemm g = {.c = w->o + q.i * w->o_row,
              .c_row = w->o_row,
              .a = w->s,
              .a_stride = w->s_row,
              .b = v.p,
              .b_row = v.row,
              .m = q.n_i,
              .n = finite ? w->o_row : p->d_v,
              .depth = b.n,
              .row_scale = (const real *)piece->alpha,
              .alpha = 1,
              .in_order = p->invariant};
    multiply(&g, true, finite);
}

/* o = alpha o + P V of a piece. Beside the rounding of 16 bits, that of a sum over all keys does not show, so o is scaled
 * at once and is the sum; beside float32 the product is summed from zero, and amx_add_values adds it. */
NOINLINE amx_task amx_values(const forward_scratch *w, const amx_block *block, const amx_piece *piece) {
    const amx_scratch *amx = &w->amx;
    const panel q = piece->q;
    const bool adds = amx->parts < 3;
    const int64_t row = adds ? q.nv * VL : w->s_row, column = amx->parts * AMX_BYTES, step = amx->d_v / VL * column,
                  lanes = w->s_row * (int64_t)sizeof(real);
    real *o = amx->o + q.i * amx->d_v;
    for (int x = 0; x < q.nv && adds; x++) {
        if (!vany(piece->alpha[x] != 1)) continue;
        for (int64_t c = 0; c < amx->d_v; c++) {
            vstore(o + c * row + x * VL, piece->alpha[x] * vload(o + c * row + x * VL));
        }
    }
    return (amx_task){
        .c = adds ? o : amx->sum,
        .c_row = row,
        .c_step = AMX_DEPTH * row,
        .a = {amx->v + (piece->b.j0 - block->v.j0) / AMX_DEPTH * step, VEC_BYTES, column, step, AMX_BYTES},
        .b = {piece->p, lanes, VEC_BYTES, VL * lanes, amx->block / 2 * lanes},
        .a_step = 2 * column,
        .steps = round_up(piece->b.n, AMX_DEPTH) / AMX_DEPTH,
        .parts = amx->parts,
        .nv = q.nv,
        .adds = adds,
        .blocks = amx->d_v / AMX_DEPTH};
}

/* o = alpha o + the product that amx_values began. */
NOINLINE void amx_add_values(const forward_scratch *w, const amx_piece *piece) {
    const panel q = piece->q;
    real *o = w->amx.o + q.i * w->amx.d_v;
    for (int64_t c = 0; c < w->amx.d_v; c++) {
        for (int x = 0; x < q.nv; x++) {
            real *to = o + (c * q.nv + x) * VL;
            vstore(to, vmuladd(piece->alpha[x], vload(to), vload(w->amx.sum + c * w->s_row + x * VL)));
        }
    }
}

/* Copies the rows of queries that see odd values, which amx_odd_values computed, to o. */
COLD NOINLINE void amx_replace_odd(const forward_scratch *w, const amx_piece *piece) {
    const panel q = piece->q;
    real *o = w->amx.o + q.i * w->amx.d_v;
    for (int64_t i = 0; i < q.n_i; i++) {
        if (((const real_bits *)piece->sees)[i] == 0) continue;
        for (int64_t c = 0; c < w->o_row; c++) o[c * q.nv * VL + i] = w->o[(q.i + i) * w->o_row + c];
    }
}

/* The maxima of n rows of scores. */
INLINE void amx_maxima(const real *s, int64_t s_row, int64_t n, int nv, vec *most) {
    enum { CHAINS = 4 };
    for (int x = 0; x < nv; x++) {
        vec chain[CHAINS];
        EACH(i, CHAINS) chain[i] = vset1(-INFINITY);
        int64_t j = 0;
        for (; j + CHAINS <= n; j += CHAINS) {
            EACH(i, CHAINS) chain[i] = vmax2(vload(s + (j + i) * s_row + x * VL), chain[i]);
        }
        for (; j < n; j++) chain[0] = vmax2(vload(s + j * s_row + x * VL), chain[0]);
        most[x] = vmax2(vmax2(chain[0], chain[1]), vmax2(chain[2], chain[3]));
    }
}

/* From the scores of a piece to its weights, while the products of the queue go on. False if all pairs are masked. */
NOINLINE bool amx_softmax(const sdpa_unit *u, const forward_scratch *w, const amx_block *block, amx_piece *piece,
                          amx_queue *queue) {
    const sdpa_problem *p = u->problem;
    const panel q = piece->q;
    const struct block pairs = {u->i0 + q.i, q.n_i, piece->b.j0, piece->b.n};
    if (block->k.any_odd || w->amx.any_odd) amx_odd_scores(u, w, block, piece);
    const enum bias_kind bias = bias_block(u, &pairs, (real)M_LOG2E, w->s, w->s_row, w->line);
    if (bias == BIAS_ALL_MASKED) return false;
    const bool plain = bias == BIAS_NONE && is_linear(p) && !p->score_mod;
    vec sum[SCORE_WIDTH];
    amx_logits t = {.s = plain ? piece->scores : w->s,
                    .p = (real *)piece->p,
                    .n = piece->b.n,
                    .row = w->s_row,
                    .part = w->amx.block / 2 * w->s_row,
                    .c = product_factor(u, M_LOG2E),
                    .low = w->row.low + q.i};
    if (plain) {
        amx_maxima(t.s, t.row, t.n, q.nv, sum);
    } else {
        scores logits = {
            .given = piece->scores, .j0 = pairs.j0, .n = t.n, .s = w->s, .s_row = t.row, .extreme = (real *)sum};
        score_program own;
        use_program(&logits, &own, u, &pairs, w->line);
        for (int x = 0; x < q.nv; x++) sum[x] = vset1(-INFINITY);
        t.c = score_products(&logits, q.nv, u, bias, M_LOG2E);
    }
    move_maximum(&w->row, q.i, q.nv, NULL, t.c, sum, piece->alpha, t.shift);
    bool in_steps = p->dropout_p > 0 || block->any_odd_value;
    for (int x = 0; x < q.nv; x++) in_steps |= vany(is_huge(t.shift[x]));
    const amx_modes modes = amx_flush_begin();
    if (in_steps) {
        amx_weigh_in_steps(u, w, &t, q, &pairs, sum);
    } else {
        amx_weigh(&t, q.nv, w->amx.parts, bias == BIAS_SOME_MASKED, sum, queue);
    }
    amx_flush_end(&modes);
    add_to_sums(w->row.l, q, piece->alpha, sum);
    return true;
}

/* The pieces of a block: one or, where causality hides the last keys, two for a panel. */
INLINE int amx_pieces_of(const sdpa_unit *u, const forward_scratch *w, keys b, amx_piece *pieces) {
    int n = 0;
    PANELS (q, u->n_i) {
        const int64_t visible = amx_visible(u, q, b);
        if (visible == 0) continue;
        const int64_t open = open_keys(u, u->i0 + q.i, b.j0, visible) / AMX_DEPTH * AMX_DEPTH;
        if (open > 0) pieces[n++] = (amx_piece){.q = q, .b = {b.j0, open}};
        pieces[n++] = (amx_piece){.q = q, .b = {b.j0 + open, visible - open}};
    }
    for (int i = 0; i < n; i++) {
        pieces[i].scores = w->amx.scores[i % 2];
        pieces[i].p = w->amx.p[i % 2];
    }
    return n;
}

/* Adds a block of keys to all queries of the unit. While the weights of a piece are computed, so are P V of the one
 * before and the scores of the next. */
NOINLINE void amx_add_block(const sdpa_unit *u, const forward_scratch *w, keys b, amx_registers *registers) {
    amx_piece pieces[2 * AMX_QUERIES / (SCORE_WIDTH * VL) + 2];
    amx_block block;
    amx_pack_block(u, w, b, &block);
    const int n = amx_pieces_of(u, w, b, pieces);
    for (int i = -1; i <= n; i++) {
        amx_piece *now = i >= 0 && i < n ? &pieces[i] : NULL,
                  *before = i > 0 && pieces[i - 1].live ? &pieces[i - 1] : NULL;
        amx_queue queue = {.registers = registers};
        amx_task task;
        if (before) task = amx_values(w, &block, before), amx_push(&queue, &task);
        if (i + 1 < n) task = amx_piece_scores(w, &block, &pieces[i + 1]), amx_push(&queue, &task);
        if (now) now->live = amx_softmax(u, w, &block, now, &queue);
        amx_advance(&queue, INT64_MAX);
        if (before && w->amx.parts == 3) amx_add_values(w, before);
        if (before && block.any_odd_value) amx_replace_odd(w, before);
        if (now && now->live && block.any_odd_value) amx_odd_values(u, w, &block, now);
    }
}

/* forward_sweep in the matrix unit. */
NOINLINE bool amx_sweep(const sdpa_unit *u, forward_scratch *w) {
    const sdpa_problem *p = u->problem;
    amx_registers registers;
    int64_t j0, j1;
    SDPA_TAKE(AMX);
    unit_keys(u, &j0, &j1);
    j0 = first_block(p, j0, j1);
    pack_panels(w->q, &u->q, u->i0, u->n_i, p->d_k, sign_of_scale(u), w->line);
    amx_pack_queries(&w->amx, w->q, u->n_i, p->d_k);
    start_running(&w->row, u, w->n_lanes);
    memset(w->amx.o, 0, sizeof(real) * (size_t)(w->n_lanes * w->amx.d_v));
    amx_begin(&registers);
    keys b = {.j0 = j0};
    while (next_seen(u, w->block, j1, &b)) amx_add_block(u, w, b, &registers);
    amx_end(&registers);
    PANELS (q, u->n_i) {
        const real *from = w->amx.o + q.i * w->amx.d_v;
        for (int64_t c = 0; c < w->o_row; c += VL) {
            for (int x = 0; x < q.nv; x++) {
                vec r[VL];
                for (int l = 0; l < VL; l++) r[l] = vload(from + (c + l) * q.nv * VL + x * VL);
                transpose(r);
                for (int l = 0; l < VL; l++) vstore(w->o + (q.i + x * VL + l) * w->o_row + c, r[l]);
            }
        }
    }
    return b.j0 >= j1;
}

#endif
