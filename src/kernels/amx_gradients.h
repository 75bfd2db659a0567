/* The products of the backward in the matrix unit. For a unit of queries and a block of keys, queries in the lanes:
 *
 *     S^T = K Q^T     dP^T = V dO^T     dV = P^T dO     dK = dS^T Q     dQ^T = K^T dS^T
 *
 * The first two are those of amx_scores.h, with dO and V in place of Q and K, and have the bits of the forward. In dV
 * and dK rows of P^T and dS^T lie as they are, 32 queries in a register's row, and pairs of queries' rows of dO and Q
 * are the other operand. dQ^T is like O^T of the forward.
 *
 * A pair is odd as in the forward, and then its S and dP go the ordinary way. Where dP is odd, dS may be as small as V or
 * dO. So dV of a block goes the ordinary way if a row of the unit's dO or a weight is odd, dK if a row of its Q or dO, of
 * the block's V or an element of dS is, and dQ of a query that has, or sees, such rows or elements. dO is multiplied as
 * it is: the factor that makes weights complete (backward.h) multiplies dP and P. */
#ifndef SDPA_KERNEL_AMX_GRADIENTS_H
#define SDPA_KERNEL_AMX_GRADIENTS_H

#include "amx_scores.h"

typedef struct amx_gradients {
    bool can;
    int64_t lanes, block; /* rounded up to AMX_DEPTH */
    int64_t row;          /* lanes, rounded up to vectors */
    /* Of a unit: q, odd and any_odd of Q and of dO; pairs of their rows, (parts, lanes / 2, d); per query the factor of
     * dP and P; dQ^T (d_k, row). */
    amx_scratch qk, ov;
    char *q_pairs, *dout_pairs;
    real *factor, *dq;
    /* Of the units of a batch: k of qk and ov are rows of K and V. */
    amx_scratch kt; /* v: K, transposed */
    char *halves;   /* (parts, block, lanes): P^T or dS^T */
    char *pairs;    /* (parts, block / 2, row): dS^T in pairs of keys */
    real *s, *dp;   /* (block, row) */
    real *sum;      /* a product: (block, d_k or d_v) or (d_k, row) */
    real *queries;  /* (row, d_k rounded up to vectors): dQ the ordinary way */
    amx_keys *keys, *values;
} amx_gradients;

/* The scratch that the units of a batch share. */
INLINE void amx_take_common(amx_gradients *w, const sdpa_problem *p, int64_t n_lanes, int64_t block, sdpa_arena *a) {
    const int parts = amx_parts(p);
    const int64_t d_k = round_up(p->d_k, AMX_DEPTH), d_v = round_up(p->d_v, AMX_DEPTH), d = d_k > d_v ? d_k : d_v;
    w->can = amx_can(p);
    w->lanes = round_up(n_lanes, AMX_DEPTH);
    w->block = round_up(block, AMX_DEPTH);
    w->row = n_lanes;
    w->qk = (amx_scratch){.parts = parts, .d_k = d_k};
    w->ov = (amx_scratch){.parts = parts, .d_k = d_v};
    w->kt = (amx_scratch){.parts = parts, .d_v = d_k};
    const int64_t size = 2 * parts, by_keys = w->block * d, by_queries = d_k * n_lanes;
    const array arrays[] = {
        ARRAY(w->qk.k, w->can ? size * w->block * d_k : ABSENT),
        ARRAY(w->ov.k, w->can ? size * w->block * d_v : ABSENT),
        ARRAY(w->kt.v, w->can ? size * w->block * d_k : ABSENT),
        ARRAY(w->halves, w->can ? size * w->block * w->lanes : ABSENT),
        ARRAY(w->pairs, w->can ? size * w->block * n_lanes : ABSENT),
        ARRAY(w->s, w->can ? w->block * n_lanes : ABSENT),
        ARRAY(w->dp, w->can ? w->block * n_lanes : ABSENT),
        ARRAY(w->sum, w->can ? (by_keys > by_queries ? by_keys : by_queries) : ABSENT),
        ARRAY(w->queries, w->can ? n_lanes * round_up(p->d_k, VL) : ABSENT),
        ARRAY(w->keys, w->can ? 1 : ABSENT),
        ARRAY(w->values, w->can ? 1 : ABSENT),
    };
    take_arrays(arrays, COUNT(arrays), a);
}

/* Adds that of a unit. */
INLINE void amx_take_unit(amx_gradients *w, sdpa_arena *a) {
    const int64_t size = 2 * w->qk.parts;
    const array arrays[] = {
        ARRAY(w->qk.q, w->can ? size * w->qk.d_k * w->row : ABSENT),
        ARRAY(w->ov.q, w->can ? size * w->ov.d_k * w->row : ABSENT),
        ARRAY(w->qk.odd, w->can ? w->row : ABSENT),
        ARRAY(w->ov.odd, w->can ? w->row : ABSENT),
        ARRAY(w->q_pairs, w->can ? size * w->qk.d_k * w->lanes : ABSENT),
        ARRAY(w->dout_pairs, w->can ? size * w->ov.d_k * w->lanes : ABSENT),
        ARRAY(w->factor, w->can ? w->row : ABSENT),
        ARRAY(w->dq, w->can ? w->qk.d_k * w->row : ABSENT),
    };
    take_arrays(arrays, COUNT(arrays), a);
}

/* ------------------------------------------------------------------------------------ packing */

/* to (parts, lanes / 2, d rounded up to AMX_DEPTH) = pairs of rows of x, of which there are n. */
INLINE void amx_pair_rows_as(char *to, int64_t lanes, const rows *x, int64_t n, int64_t d, int parts) {
    const int64_t width = round_up(d, AMX_DEPTH);
    for (int64_t i = 0; i < lanes; i += 2) {
        for (int64_t c = 0; c < width; c += VL) {
            ivec part[2][AMX_MOST_PARTS];
            UNROLL for (int half = 0; half < 2; half++) {
                const bool there = i + half < n && c < d;
                amx_split(there ? vload(x->p + (i + half) * x->row + c) : (vec){0}, parts, false, part[half]);
            }
            UNROLL for (int k = 0; k < parts; k++) {
                vstore((real *)to + (k * lanes / 2 + i / 2) * width + c, (vec)amx_pair(part[0][k], part[1][k]));
            }
        }
    }
}

NOINLINE void amx_pair_rows(char *to, int64_t lanes, const rows *x, int64_t n, int64_t d, int parts) {
    if (parts == 1) {
        amx_pair_rows_as(to, lanes, x, n, d, 1);
    } else if (parts == 2) {
        amx_pair_rows_as(to, lanes, x, n, d, 2);
    } else {
        amx_pair_rows_as(to, lanes, x, n, d, 3);
    }
}

/* w->halves = the parts of x (n, w->row), of n_i queries, times `factor`, or NULL, per query. Returns whether a product is
 * odd. */
INLINE bool amx_pack_halves_as(const amx_gradients *w, const real *x, int64_t n_i, int64_t n, const real *factor,
                               int parts) {
    amx_range range = amx_no_range();
    for (int64_t j = 0; j < round_up(n, AMX_DEPTH); j++) {
        for (int64_t l = 0; l < n_i; l += AMX_DEPTH) {
            vec y[2];
            ivec part[2][AMX_MOST_PARTS];
            UNROLL for (int half = 0; half < 2; half++) {
                const int64_t lane = l + half * VL;
                const bool there = j < n && lane < n_i;
                y[half] = there ? vload(x + j * w->row + lane) : (vec){0};
                if (there && factor) y[half] *= vload(factor + lane);
                amx_see(&range, y[half], 1);
                amx_split(y[half], parts, true, part[half]);
            }
            UNROLL for (int k = 0; k < parts; k++) {
                vstore((real *)(w->halves + 2 * ((k * w->block + j) * w->lanes + l)),
                       amx_high_halves(part[0][k], part[1][k]));
            }
        }
    }
    return vany(amx_is_odd(&range));
}

NOINLINE bool amx_pack_halves(const amx_gradients *w, const real *x, int64_t n_i, int64_t n, const real *factor) {
    if (w->qk.parts == 1) return amx_pack_halves_as(w, x, n_i, n, factor, 1);
    if (w->qk.parts == 2) return amx_pack_halves_as(w, x, n_i, n, factor, 2);
    return amx_pack_halves_as(w, x, n_i, n, factor, 3);
}

/* w->pairs = the parts of x (n, w->row), of n_i queries, in pairs of keys. */
INLINE void amx_pack_pairs_as(const amx_gradients *w, const real *x, int64_t n_i, int64_t n, int parts) {
    for (int64_t j = 0; j < round_up(n, AMX_DEPTH); j += 2) {
        for (int64_t l = 0; l < n_i; l += VL) {
            ivec part[2][AMX_MOST_PARTS];
            UNROLL for (int half = 0; half < 2; half++) {
                amx_split(j + half < n ? vload(x + (j + half) * w->row + l) : (vec){0}, parts, true, part[half]);
            }
            UNROLL for (int k = 0; k < parts; k++) {
                vstore((real *)w->pairs + (k * w->block + j) / 2 * w->row + l, (vec)amx_pair(part[0][k], part[1][k]));
            }
        }
    }
}

NOINLINE void amx_pack_pairs(const amx_gradients *w, const real *x, int64_t n_i, int64_t n) {
    if (w->qk.parts == 1) {
        amx_pack_pairs_as(w, x, n_i, n, 1);
    } else if (w->qk.parts == 2) {
        amx_pack_pairs_as(w, x, n_i, n, 2);
    } else {
        amx_pack_pairs_as(w, x, n_i, n, 3);
    }
}

/* ------------------------------------------------------------------------------------ products */

/* w->sum (n keys, d) = products of w->halves and pairs of n_i queries, d a multiple of AMX_DEPTH. */
NOINLINE void amx_key_products(const amx_gradients *w, const char *pairs, int64_t d, int64_t n_i, int64_t n) {
    const int64_t row = 2 * w->lanes, b_row = d * (int64_t)sizeof(real);
    for (int64_t c = 0; c < d; c += AMX_DEPTH) {
        amx_task t = {.c = w->sum + c,
                      .c_row = d,
                      .c_step = AMX_DEPTH * d,
                      .a = {w->halves, row, VL * row, 2 * AMX_DEPTH, w->block * row},
                      .b = {pairs + c * (int64_t)sizeof(real), b_row, VEC_BYTES, VL * b_row, w->lanes / 2 * b_row},
                      .a_step = AMX_DEPTH * row,
                      .steps = round_up(n_i, AMX_DEPTH) / AMX_DEPTH,
                      .parts = w->qk.parts,
                      .nv = 2,
                      .blocks = round_up(n, AMX_DEPTH) / AMX_DEPTH};
        amx_run(&t);
    }
}

/* w->sum (d_k, w->row) = products of K^T and w->pairs, for a unit of n_i queries and n keys. */
NOINLINE void amx_query_products(const amx_gradients *w, int64_t n_i, int64_t n) {
    const int64_t d = w->kt.d_v, column = w->kt.parts * AMX_BYTES, lanes = w->row * (int64_t)sizeof(real);
    PANELS (q, n_i) {
        amx_task t = {.c = w->sum + q.i,
                      .c_row = w->row,
                      .c_step = AMX_DEPTH * w->row,
                      .a = {w->kt.v, VEC_BYTES, column, d / VL * column, AMX_BYTES},
                      .b = {w->pairs + q.i * (int64_t)sizeof(real), lanes, VEC_BYTES, VL * lanes, w->block / 2 * lanes},
                      .a_step = 2 * column,
                      .steps = round_up(n, AMX_DEPTH) / AMX_DEPTH,
                      .parts = w->kt.parts,
                      .nv = q.nv,
                      .blocks = d / AMX_DEPTH};
        amx_run(&t);
    }
}

/* ------------------------------------------------------------------------------------ scores */

/* w->s = the products of a panel and keys k, of which w->keys was made; x: pack_panels of the queries. */
NOINLINE void amx_backward_scores(const amx_gradients *w, const real *x, panel q, const rows *k, int64_t d) {
    const keys b = {k->j0, k->n};
    real *s = w->s + q.i, *ordinary = w->dp + q.i;
    amx_multiply_keys(&w->qk, w->keys, q, b, s, w->row);
    if (!w->keys->any_odd && !w->qk.any_odd) return;
    amx_ordinary(x, q, k, d, ordinary, w->row);
    amx_replace_odd_scores(&w->qk, w->keys, q, b, s, ordinary, w->row);
}

/* ds = P * (dP - shift) of a panel and values v, of which w->values was made, where dP is the product times w->factor; x:
 * pack_panels of dO, with that factor. Masked pairs of p and ds are -0. */
NOINLINE void amx_panel_gradient(const amx_gradients *w, const real *x, panel q, const rows *v, int64_t d,
                                 const real *p, real *ds, const real *shift) {
    const bool any = w->values->any_odd || w->ov.any_odd;
    amx_multiply_keys(&w->ov, w->values, q, (keys){v->j0, v->n}, w->dp + q.i, w->row);
    if (any) amx_ordinary(x, q, v, d, ds + q.i, w->row);
    for (int64_t i = q.i; i < q.i + q.nv * VL; i += VL) {
        const vec factor = vload(w->factor + i), less = vload(shift + i);
        for (int64_t j = 0; j < v->n; j++) {
            const int64_t at = j * w->row + i;
            const vec weight = vload(p + at);
            vec gradient = weight * vmulsub(factor, vload(w->dp + at), less);
            if (any) {
                const ivec odd = amx_odd_pairs(&w->ov, w->values, j, i);
                gradient = vselect(odd, weight * (vload(ds + at) - less), gradient);
            }
            vstore(ds + at, vselect((ivec)weight == SIGN_BIT, weight, gradient));
        }
    }
}

/* ------------------------------------------------------------------------------------ gradients */

/* Adds alpha times the products of w->halves and pairs of n_i queries to the rows of keys b of d (.., width). */
NOINLINE void amx_add_products(const amx_gradients *w, const sdpa_matrix *d, int64_t width, int64_t n_i, keys b,
                               const char *pairs, real alpha) {
    const int64_t row = round_up(width, AMX_DEPTH);
    amx_key_products(w, pairs, row, n_i, b.n);
    for (int64_t j = 0; j < b.n; j++) {
        real *to = (real *)(d->data + (b.j0 + j) * d->row);
        const real *from = w->sum + j * row;
        int64_t c = 0;
        for (; c + VL <= width; c += VL) vstore(to + c, vmuladd(vset1(alpha), vload(from + c), vload(to + c)));
        if (c == width) continue;
        const int rest = (int)(width - c);
        vstore_partial(to + c, vmuladd(vset1(alpha), vload(from + c), vload_partial(to + c, rest)), rest);
    }
}

/* Sets odd[i] of n_i queries to whether query i is odd: it has an odd dO or gradient, or sees an odd key or value. */
COLD NOINLINE void amx_find_odd_queries(const amx_gradients *w, const real *ds, int64_t n_i, int64_t n,
                                        const bool *odd_key, real_bits *odd) {
    for (int64_t i = 0; i < n_i; i += VL) {
        amx_range range = amx_no_range();
        ivec any;
        memcpy(&any, w->ov.odd + i, sizeof any);
        for (int64_t j = 0; j < n; j++) {
            const vec x = vload(ds + j * w->row + i);
            amx_see(&range, x, 1);
            if ((odd_key && odd_key[j]) || (w->values->any_odd && w->values->odd[j])) any |= (ivec)x != SIGN_BIT;
        }
        any |= amx_is_odd(&range);
        memcpy(odd + i, &any, sizeof any);
    }
}

/* dQ += alpha dS K for keys k. The sums of the unit are at w->dq and, where a query is odd, at dq (n_i, dq_row): products
 * the ordinary way. `line` as for amx_find_odd; `odd_gradients`: dS may be odd. */
NOINLINE void amx_add_to_queries(const amx_gradients *w, const sdpa_matrix *m, const rows *k, int64_t d,
                                 const weight_block *ds, real alpha, bool odd_gradients, real *dq, int64_t dq_row,
                                 real *line) {
    bool odd_key[AMX_MOST_KEYS];
    real_bits odd[SDPA_QUERY_BLOCK] = {0};
    const bool any_key = amx_pack_values(&w->kt, k, d, NULL), any = any_key || odd_gradients;
    if (any_key) {
        amx_find_odd(m, k->j0, k->n, d, w->kt.parts, line, odd_key);
        amx_pack_values(&w->kt, k, d, odd_key);
    }
    if (any) amx_find_odd_queries(w, ds->p, ds->n_i, k->n, any_key ? odd_key : NULL, odd);
    amx_pack_pairs(w, ds->p, ds->n_i, k->n);
    amx_query_products(w, ds->n_i, k->n);
    for (int64_t c = 0; c < d; c++) {
        for (int64_t i = 0; i < ds->n_i; i += VL) {
            real *to = w->dq + c * w->row + i;
            const vec old = vload(to), new = vmuladd(vset1(alpha), vload(w->sum + c * w->row + i), old);
            ivec keep;
            memcpy(&keep, odd + i, sizeof keep);
            vstore(to, any ? vselect(keep, old, new) : new);
        }
    }
    if (!any) return;
    weight_block own = *ds;
    own.fresh = true;
    add_to_queries(w->queries, dq_row, d, &own, k, NULL, alpha, all_finite(k->p, k->row, k->n, d));
    for (int64_t i = 0; i < ds->n_i; i++) {
        for (int64_t c = 0; odd[i] && c < d; c++) dq[i * dq_row + c] += w->queries[i * dq_row + c];
    }
}

/* dq (n_i, dq_row) += the sums at w->dq. */
NOINLINE void amx_finish_queries(const amx_gradients *w, int64_t n_i, int64_t d, real *dq, int64_t dq_row) {
    for (int64_t i = 0; i < n_i; i += VL) {
        for (int64_t c = 0; c < d; c += VL) {
            vec r[VL];
            for (int l = 0; l < VL; l++) r[l] = vload(w->dq + (c + l) * w->row + i);
            transpose(r);
            for (int l = 0; l < VL; l++) {
                real *to = dq + (i + l) * dq_row + c;
                vstore(to, vload(to) + r[l]);
            }
        }
    }
}

#endif
