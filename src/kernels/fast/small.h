/* Forward and backward of heads with few keys, directly from the rows of the operands. The general way transposes,
 * copies and cuts into blocks, which for small heads costs more than their products; here vectors run along d and
 * nothing is moved. Tiles are 4 queries x 3 keys, or 4 x 4 where there are enough registers: the sums over the lanes of
 * all sixteen then make one vector. */
#ifndef SDPA_KERNEL_FAST_SMALL_H
#define SDPA_KERNEL_FAST_SMALL_H

#include "../backward.h"
#include "../forward.h"

#if SMALL
#define SMALL_SIZE ((SMALL_KEYS + 2) * SMALL_ROWS + VL)

enum { SMALL_CAN = SDPA_FEATURE_UPPER | SDPA_FEATURE_OFFSET | SDPA_FEATURE_LENGTHS };

/* Whether transposing the unit's queries costs less than sums over 16 lanes: there are at least `least` keys, and hardly
 * a lane stays empty. */
INLINE bool fills_lanes(const sdpa_unit *u, int64_t least) {
    return VL == 16 && u->problem->n_k >= least && 16 * u->n_i >= 15 * round_up(u->n_i, VL);
}

INLINE bool is_small(const sdpa_unit *u) {
    const sdpa_problem *p = u->problem;
    return !(p->features & ~SMALL_CAN) && p->n_k <= SMALL_KEYS && p->scale > 0x1p-60 && p->scale < 0x1p60;
}

/* Rows i0 .. i0+n-1 of m, d columns: in place, or a copy (n, d rounded up to VL) padded with zeros to whole vectors. */
NOINLINE sdpa_matrix small_operand(const sdpa_matrix *m, int64_t i0, int64_t n, int64_t d, real *copy) {
    const int64_t row = round_up(d, VL), size = sizeof(real);
    const char *first = m->data + i0 * m->row;
    sdpa_matrix r = {(char *)first, m->row, size, SDPA_REAL == 32 ? SDPA_F32 : SDPA_F64, false};
    if (is_direct(m) && d == row) return r;
    for (int64_t i = 0; i < n; i++) {
        load(copy + i * row, first + i * m->row, d, m->col, m->dtype, m->swapped);
        for (int64_t x = d; x < row; x++) copy[i * row + x] = 0;
    }
    r.data = (char *)copy;
    r.row = row * size;
    return r;
}

/* Row i of a small_operand, or its last row if i is n or more. */
INLINE const real *operand_row(const sdpa_matrix *m, int64_t i, int64_t n) {
    return (const real *)(m->data + (i < n ? i : n - 1) * m->row);
}

/* s (n_k, SMALL_ROWS) = y x^T of two small operands, x with n <= SMALL_ROWS rows. A vector holds several keys; s has
 * room for 2 SMALL_ROWS + VL elements after the last one. */
NOINLINE void small_products(real *s, const sdpa_matrix *x, int64_t n, const sdpa_matrix *y, int64_t n_k,
                             int64_t depth) {
    enum { KEYS = VEC_BYTES == 64 ? 4 : 3 };
    const real *row[SMALL_ROWS];
    UNROLL for (int i = 0; i < SMALL_ROWS; i++) row[i] = operand_row(x, i, n);
    for (int64_t j = 0; j < n_k; j += KEYS) {
        const real *key[KEYS];
        vec acc[KEYS][SMALL_ROWS];
        UNROLL for (int k = 0; k < KEYS; k++) {
            key[k] = operand_row(y, j + k, n_k);
            UNROLL for (int i = 0; i < SMALL_ROWS; i++) acc[k][i] = (vec){0};
        }
        for (int64_t d = 0; d < depth; d += VL) {
            vec part[KEYS];
            UNROLL for (int k = 0; k < KEYS; k++) part[k] = vload(key[k] + d);
            UNROLL for (int i = 0; i < SMALL_ROWS; i++) {
                const vec other = vload(row[i] + d);
                UNROLL for (int k = 0; k < KEYS; k++) acc[k][i] = vmuladd(other, part[k], acc[k][i]);
            }
        }
#if VEC_BYTES == 64
        UNROLL for (int k = 0; k < KEYS; k += VL / SMALL_ROWS) {
            vstore(s + (j + k) * SMALL_ROWS, vsums((const vec(*)[SMALL_ROWS])acc + k));
        }
#else
        UNROLL for (int k = 0; k < KEYS; k++) vstore(s + (j + k) * SMALL_ROWS, vsum4(acc[k]));
#endif
    }
}

/* s, as small_products left it, becomes 2^(c (s - m)), with m the largest score that each of the queries from i0 on (of
 * the head) sees; masked pairs become -0. Returns the sums over the keys. */
NOINLINE vec small_weights(const sdpa_unit *u, int64_t i0, int64_t n_k, real c, real *s, vec *m) {
    ivec visible, key; /* of each lane: how many keys its query sees, and its key */
    UNROLL for (int l = 0; l < VL; l++) {
        visible[l] = l % SMALL_ROWS;
        key[l] = l / SMALL_ROWS;
    }
    const ivec all_keys = (int)n_k - (ivec){0};
    const int64_t first = u->problem->has_upper ? i0 + 1 + u->upper : n_k;
    visible += (int)(first < -SMALL_ROWS ? -SMALL_ROWS : first > n_k ? n_k : first);
    visible = (ivec)vselect(visible < all_keys, (vec)visible, (vec)all_keys);

    vec most = vset1(-INFINITY), l = {0};
    for (int64_t j = 0; j < n_k * SMALL_ROWS; j += VL, key += VL / SMALL_ROWS) {
        const vec x = vselect(visible > key, vload(s + j), vset1(-INFINITY));
        vstore(s + j, x);
        most = vmax2(x, most);
    }
    UNROLL for (int h = SMALL_ROWS; h < VL; h *= 2) most = vmax2(most, vswap(most, h));
    const vec shift = vselect(most == -(real)INFINITY, (vec){0}, most);
    const real d_min = (SDPA_REAL == 32 ? -127 : -1023) / c;
    for (int64_t j = 0; j < n_k * SMALL_ROWS; j += VL) {
        const vec x = vload(s + j), weight = vexp2_product(x - shift, c, c, 0, d_min);
        vstore(s + j, vselect(x == -(real)INFINITY, vset1(-0.0), weight));
        l += weight;
    }
    UNROLL for (int h = SMALL_ROWS; h < VL; h *= 2) l += vswap(l, h);
    *m = most;
    return l;
}

/* o (n, nv vectors) = factor * s^T v, where s (n_k, SMALL_ROWS) holds weights and n is at most SMALL_ROWS. */
INLINE void small_values(real *o, int64_t o_row, int64_t n, int nv, const real *s, const real *v, int64_t v_row,
                         int64_t n_k, vec factor) {
    vec acc[SMALL_ROWS][MAX_WIDTH] = {{{0}}};
    tile(acc, SMALL_ROWS, nv, false, s, 1, SMALL_ROWS, v, v_row, n_k);
    UNROLL for (int i = 0; i < SMALL_ROWS; i++) {
        if (i >= n) break;
        UNROLL for (int j = 0; j < nv; j++) vstore(o + i * o_row + j * VL, factor[i] * acc[i][j]);
    }
}

/* Computes o and lse of n <= SMALL_ROWS queries from i0 on (of the head) for keys k and values v, small operands. c =
 * scale * log2(e). */
NOINLINE void small_forward(const sdpa_unit *u, const forward_scratch *w, const sdpa_matrix *k, const sdpa_matrix *v,
                            int64_t i0, int64_t n, real c) {
    const sdpa_problem *p = u->problem;
    int64_t j0, n_k;
    sdpa_visible_keys(u, i0, n, &j0, &n_k);
    real s[SMALL_SIZE];
    vec m;
    const sdpa_matrix q = small_operand(&u->q, i0, n, p->d_k, w->few);
    small_products(s, &q, n, k, n_k, p->d_k);
    const vec l = small_weights(u, i0, n_k, c, s, &m), factor = vselect(l == 0, (vec){0}, 1 / l);

    const bool direct = u->o.data && is_direct(&u->o) && p->d_v == w->o_row;
    const int64_t o_row = direct ? u->o.row / (int64_t)sizeof(real) : w->o_row, v_row = v->row / (int64_t)sizeof(real);
    real *o = direct ? (real *)(u->o.data + i0 * u->o.row) : w->o;
    for (int64_t d = 0; d < w->o_row;) {
        const int left = (int)((w->o_row - d) / VL), nv = left >= MAX_WIDTH ? MAX_WIDTH : left >= 2 ? 2 : 1;
        const real *b = (const real *)v->data + d;
        if (nv == MAX_WIDTH) {
            small_values(o + d, o_row, n, MAX_WIDTH, s, b, v_row, n_k, factor);
        } else if (nv == 2) {
            small_values(o + d, o_row, n, 2, s, b, v_row, n_k, factor);
        } else {
            small_values(o + d, o_row, n, 1, s, b, v_row, n_k, factor);
        }
        d += nv * VL;
    }
    for (int64_t i = 0; i < n; i++) {
        if (!direct && u->o.data) {
            store(u->o.data + (i0 + i) * u->o.row, o + i * o_row, p->d_v, u->o.col, u->o.dtype);
        }
        if (u->lse) {
            const real lse = (real)(m[i] * p->scale + log(l[i]));
            memcpy(u->lse + (i0 + i) * p->lse.row, &lse, sizeof lse);
        }
    }
}

/* False, having done nothing, where the unit is not small. */
NOINLINE bool forward_small(const sdpa_unit *u, void *scratch) {
    const sdpa_problem *p = u->problem;
    if (!is_small(u) || fills_lanes(u, 2 * VL)) return false;
    SDPA_TAKE(SMALL);
    sdpa_arena arena = {scratch, 0};
    const forward_scratch w = forward_layout(p, &arena);
    const real c = (real)(p->scale * M_LOG2E);
    int64_t j0, n_k;
    sdpa_visible_keys(u, u->i0, u->n_i, &j0, &n_k);
    const sdpa_matrix k = small_operand(&u->k, 0, n_k, p->d_k, w.k), v = small_operand(&u->v, 0, n_k, p->d_v, w.v);
    /* A masked pair must not meet NaN or Inf. A query on its own sees all the keys that it is multiplied with. */
    const bool finite = !p->has_upper || all_finite((const real *)v.data, v.row / (int64_t)sizeof(real), n_k, p->d_v);
    const int64_t step = finite ? SMALL_ROWS : 1;
    for (int64_t i = 0; i < u->n_i; i += step) {
        small_forward(u, &w, &k, &v, u->i0 + i, u->n_i - i < step ? u->n_i - i : step, c);
    }
    return true;
}

/* One number per query for n queries from i0 on, repeated over the lanes. */
NOINLINE vec repeated_scalars(const char *data, const sdpa_tensor *t, int64_t i0, int64_t n) {
    real x[VL] = {0};
    load(x, data + i0 * t->row, n, t->row, t->dtype, t->swapped);
    UNROLL for (int l = SMALL_ROWS; l < VL; l++) x[l] = x[l % SMALL_ROWS];
    return vload(x);
}

/* P^T and dS^T (n_k, n_lanes) of n queries from the unit's i-th on; q and dout are the rows of these queries. */
NOINLINE void small_gradients(const sdpa_unit *u, const backward_scratch *w, const sdpa_matrix *q,
                              const sdpa_matrix *dout, const sdpa_matrix *k, const sdpa_matrix *v, int64_t i, int64_t n,
                              int64_t n_k, real c) {
    const sdpa_problem *p = u->problem;
    const double unit = log2_e_of(p);
    const real high = (real)unit, low = (real)(unit - high), epsilon = REAL_EPSILON;
    real p_t[SMALL_SIZE], ds[SMALL_SIZE]; /* scores, then P^T; dP^T, then dS^T */
    vec m, shift = {0};
    sdpa_fetch(u, SDPA_FETCH_QK, i, n, u->n_i);
    small_products(p_t, q, n, k, n_k, p->d_k);
    sdpa_fetch(u, SDPA_FETCH_DOUT_V, i, n, u->n_i);
    small_products(ds, dout, n, v, n_k, p->d_v);
    sdpa_fetch(u, SDPA_FETCH_O_DV, i, n, u->n_i);
    const vec l = small_weights(u, u->i0 + i, n_k, c, p_t, &m);

    /* 2^(c m - lse), with lse in log2 units as a sum of two. As in complete_rows, rows of P sum to 1. */
    const vec lse = repeated_scalars(u->lse, &p->lse, u->i0 + i, n), whole = high * lse;
    const vec rest = vmuladd(vset1(low), lse, vmulsub(vset1(high), lse, whole));
    vec factor = vexp2(vmulsub(vset1(c), m, whole) - rest);
    const vec excess = vmulsub(factor, l, vset1(1)), most = 2 * epsilon * (4 + vmax2(whole, -whole));
    const ivec complete = (excess <= most) & (-excess <= most);
    factor = vselect(complete, 1 / l, factor);
    factor = vselect(lse - lse == 0, factor, (vec)((ivec)lse & (lse != lse)));

    /* 16-bit O is too coarse for delta, which is then summed with P, if the rows are complete. */
    const sdpa_matrix o = small_operand(&u->o, u->i0 + i, n, p->d_v, w->line);
    const real *o_row[SMALL_ROWS], *dout_row[SMALL_ROWS];
    vec delta[SMALL_ROWS];
    UNROLL for (int x = 0; x < SMALL_ROWS; x++) {
        o_row[x] = operand_row(&o, x, n);
        dout_row[x] = operand_row(dout, x, n);
        delta[x] = (vec){0};
    }
    for (int64_t d = 0; d < p->d_v; d += VL) {
        UNROLL for (int x = 0; x < SMALL_ROWS; x++) {
            delta[x] = vmuladd(vload(o_row[x] + d), vload(dout_row[x] + d), delta[x]);
        }
    }
    for (int64_t j = 0; j < n_k * SMALL_ROWS; j += VL) {
        const vec x = vload(p_t + j), weight = vselect((ivec)x == SIGN_BIT, x, factor * x);
        vstore(p_t + j, weight);
        shift += vselect((ivec)x == SIGN_BIT, (vec){0}, weight * vload(ds + j));
    }
    UNROLL for (int h = SMALL_ROWS; h < VL; h *= 2) shift += vswap(shift, h);
    sdpa_fetch(u, SDPA_FETCH_DQ_DK, i, n, u->n_i);
    if (!sdpa_is_narrow(p->dtype)) shift = vsum4(delta);
    shift = vselect(complete, shift, vsum4(delta));
    if (u->dlse) shift -= repeated_scalars(u->dlse, &p->dlse, u->i0 + i, n);
    for (int64_t j = 0; j < n_k * SMALL_ROWS; j += VL) {
        const vec weight = vload(p_t + j);
        vstore(ds + j, vselect((ivec)weight == SIGN_BIT, weight, weight * (vload(ds + j) - shift)));
    }
    for (int64_t j = 0; j < n_k; j++) {
        memcpy(w->p + j * w->n_lanes + i, p_t + j * SMALL_ROWS, SMALL_ROWS * sizeof(real));
        memcpy(w->ds + j * w->n_lanes + i, ds + j * SMALL_ROWS, SMALL_ROWS * sizeof(real));
    }
}

/* A small operand as rows. */
INLINE rows operand_rows(const sdpa_matrix *m) {
    return (rows){.p = (const real *)m->data, .row = m->row / (int64_t)sizeof(real)};
}

/* False, having done nothing, where the unit is not small. */
NOINLINE bool backward_small(const sdpa_unit *u, void *scratch) {
    const sdpa_problem *p = u->problem;
    if (!is_small(u) || fills_lanes(u, VL) || p->n_k > SMALL_BACKWARD_KEYS) return false;
    SDPA_TAKE(SMALL);
    sdpa_arena arena = {scratch, 0};
    const backward_scratch w = backward_layout(p, &arena);
    const real scale = (real)p->scale, c = (real)(p->scale * M_LOG2E);
    const int64_t n_i = u->n_i;
    int64_t j0, n_k;
    sdpa_visible_keys(u, u->i0, n_i, &j0, &n_k);
    const sdpa_matrix q = small_operand(&u->q, u->i0, n_i, p->d_k, w.q_rows),
                      dout = small_operand(&u->dout, u->i0, n_i, p->d_v, w.dout_rows),
                      k = small_operand(&u->k, 0, n_k, p->d_k, w.k), v = small_operand(&u->v, 0, n_k, p->d_v, w.v);
    for (int64_t i = 0; i < n_i; i += SMALL_ROWS) {
        sdpa_matrix some_q = q, some_dout = dout;
        some_q.data += i * q.row;
        some_dout.data += i * dout.row;
        small_gradients(u, &w, &some_q, &some_dout, &k, &v, i, n_i - i < SMALL_ROWS ? n_i - i : SMALL_ROWS, n_k, c);
    }
    /* A masked pair must not meet NaN or Inf; see backward_keys. */
    const int64_t size = sizeof(real);
    const bool finite = !p->has_upper || (all_finite((const real *)q.data, q.row / size, n_i, p->d_k) &&
                                          all_finite((const real *)dout.data, dout.row / size, n_i, p->d_v) &&
                                          all_finite((const real *)k.data, k.row / size, n_k, p->d_k));
    const rows q_rows = operand_rows(&q), dout_rows = operand_rows(&dout), k_rows = operand_rows(&k);
    const weight_block weights = {.p = w.p, .row = w.n_lanes, .n_i = n_i, .n = n_k, .fresh = u->fresh};
    weight_block gradients = weights;
    gradients.p = w.ds;
    if (!sdpa_turn_wait(u, 0)) return true;
    clear_keys(u, (keys){0, n_k});
    add_to_keys(&u->dv, p->d_v, &weights, &dout_rows, 1, finite);
    add_to_keys(&u->dk, p->d_k, &gradients, &q_rows, scale, finite);
    sdpa_turn_pass(u, 0);
    if (u->dq.data && is_direct(&u->dq)) {
        if (!sdpa_turn_wait_last(u)) return true;
        real *dq = (real *)(u->dq.data + u->i0 * u->dq.row);
        add_to_queries(dq, u->dq.row / size, p->d_k, &gradients, &k_rows, NULL, scale, finite);
        sdpa_turn_end(u);
        return true;
    }
    if (u->dq.data) {
        gradients.fresh = true;
        add_to_queries(w.dq, w.k_row, p->d_k, &gradients, &k_rows, NULL, scale, finite);
    }
    store_gradients(u, w.dq, w.k_row, NULL, 0, w.line);
    return true;
}
#else
INLINE bool forward_small(const sdpa_unit *u, void *scratch) { return u == NULL || scratch == NULL; }
INLINE bool backward_small(const sdpa_unit *u, void *scratch) { return u == NULL || scratch == NULL; }
#endif

#endif
