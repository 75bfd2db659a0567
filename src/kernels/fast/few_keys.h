/* Heads with few keys, directly from the rows of the operands: their forward, and the products for
 * one_block_backward.h. The general way transposes, copies and cuts into blocks, which for small heads costs more than
 * their products; here vectors run along d and nothing is moved. Tiles are 4 queries x 3 keys, or 4 x 4 where there are
 * enough registers: the sums over the lanes of all sixteen then make one vector. */
#ifndef SDPA_KERNEL_FAST_FEW_KEYS_H
#define SDPA_KERNEL_FAST_FEW_KEYS_H

#include "../forward.h"

#if ROW_PATHS
/* The keys of a tile, and those whose sums over the lanes fit in a vector. */
#if VEC_BYTES == 64
enum { TILE_KEYS = 4, SUMMED_KEYS = VL / ROWS_AT_ONCE };
#else
enum { TILE_KEYS = 3, SUMMED_KEYS = 1 };
#endif
#define FEW_KEYS_SIZE ((FEW_KEYS + 2) * ROWS_AT_ONCE + VL)

enum { FEW_KEYS_CAN = SDPA_FEATURE_UPPER | SDPA_FEATURE_OFFSET | SDPA_FEATURE_LENGTHS };

/* Whether transposing the unit's queries costs less than sums over 16 lanes: there are at least `least` keys, and hardly
 * a lane stays empty. */
INLINE bool fills_lanes(const sdpa_unit *u, int64_t least) {
    return VL == 16 && u->problem->n_k >= least && 16 * u->n_i >= 15 * round_up(u->n_i, VL);
}

/* Whether the forward of the unit goes through forward_few_keys. */
INLINE bool forward_takes_rows(const sdpa_unit *u) {
    const sdpa_problem *p = u->problem;
    const bool few = p->n_k <= FEW_KEYS && u->scale > 0x1p-60 && u->scale < 0x1p60;
    return few && !(p->features & ~FEW_KEYS_CAN) && !fills_lanes(u, 2 * VL);
}

/* Row i of x, or its last row if i is n or more. */
INLINE const real *row_or_last(const rows *x, int64_t i, int64_t n) { return x->p + (i < n ? i : n - 1) * x->row; }

/* s[k * s_row + i] = the sum over the lanes of acc[k][i]. If s_row is ROWS_AT_ONCE, whole vectors are written, over
 * whose ends the next sums go. */
INLINE void store_sums(real *s, int64_t s_row, const vec (*acc)[ROWS_AT_ONCE]) {
    UNROLL for (int k = 0; k < TILE_KEYS; k += SUMMED_KEYS) {
#if VEC_BYTES == 64
        const vec sums = vsums(acc + k);
#else
        const vec sums = vsum4(acc[k]);
#endif
        if (s_row == ROWS_AT_ONCE) {
            vstore(s + k * s_row, sums);
            continue;
        }
        UNROLL for (int l = 0; l < SUMMED_KEYS; l++) {
            memcpy(s + (k + l) * s_row, (const real *)&sums + l * ROWS_AT_ONCE, ROWS_AT_ONCE * sizeof(real));
        }
    }
}

/* s[j * s_row + r] = x[i + r] y[j] for ROWS_AT_ONCE rows of x, which has n, and all n_k rows of y. Rows after the last
 * repeat it; s has room for those of whole tiles. y is a copy that no store can alias. */
INLINE void row_products(real *s, int64_t s_row, const rows *x, int64_t i, int64_t n, rows y, int64_t n_k,
                         int64_t depth) {
    const real *row[ROWS_AT_ONCE];
    UNROLL for (int r = 0; r < ROWS_AT_ONCE; r++) row[r] = row_or_last(x, i + r, n);
    for (int64_t j = 0; j < n_k; j += TILE_KEYS) {
        const real *key[TILE_KEYS];
        vec acc[TILE_KEYS][ROWS_AT_ONCE];
        UNROLL for (int k = 0; k < TILE_KEYS; k++) {
            key[k] = row_or_last(&y, j + k, n_k);
            UNROLL for (int r = 0; r < ROWS_AT_ONCE; r++) acc[k][r] = (vec){0};
        }
        for (int64_t d = 0; d < depth; d += VL) {
            vec part[TILE_KEYS];
            UNROLL for (int k = 0; k < TILE_KEYS; k++) part[k] = vload(key[k] + d);
            UNROLL for (int r = 0; r < ROWS_AT_ONCE; r++) {
                const vec other = vload(row[r] + d);
                UNROLL for (int k = 0; k < TILE_KEYS; k++) acc[k][r] = vmuladd(other, part[k], acc[k][r]);
            }
        }
        store_sums(s + j * s_row, s_row, (const vec(*)[ROWS_AT_ONCE])acc);
    }
}

/* s (n_k, ROWS_AT_ONCE) = y x^T for ROWS_AT_ONCE rows of x, which has n, from i on. */
NOINLINE void few_keys_products(real *s, const rows *x, int64_t i, int64_t n, const rows *y, int64_t n_k,
                                int64_t depth) {
    row_products(s, ROWS_AT_ONCE, x, i, n, *y, n_k, depth);
}

/* s (n_k, n_lanes) = y x^T, x with n rows; the other lanes of their last vector are 0 or repeat the last row. */
NOINLINE void lane_products(real *s, int64_t n_lanes, const rows *x, int64_t n, const rows *y, int64_t n_k,
                            int64_t depth) {
    for (int64_t j = 0; j < n_k && n % VL; j++) vstore(s + j * n_lanes + n / VL * VL, (vec){0});
    for (int64_t i = 0; i < n; i += ROWS_AT_ONCE) row_products(s + i, n_lanes, x, i, n, *y, n_k, depth);
}

/* s, as few_keys_products left it, becomes 2^(c (s - m)), with m the largest score that each of the queries from i0 on
 * (of the head) sees; masked pairs become -0. Returns the sums over the keys. */
NOINLINE vec few_keys_weights(const sdpa_unit *u, int64_t i0, int64_t n_k, real c, real *s, vec *m) {
    ivec visible, key; /* of each lane: how many keys its query sees, and its key */
    UNROLL for (int l = 0; l < VL; l++) {
        visible[l] = l % ROWS_AT_ONCE;
        key[l] = l / ROWS_AT_ONCE;
    }
    const ivec all_keys = (int)n_k - (ivec){0};
    const int64_t first = u->problem->has_upper ? i0 + 1 + u->upper : n_k;
    visible += (int)(first < -ROWS_AT_ONCE ? -ROWS_AT_ONCE : first > n_k ? n_k : first);
    visible = (ivec)vselect(visible < all_keys, (vec)visible, (vec)all_keys);

    vec most = vset1(-INFINITY), l = {0};
    for (int64_t j = 0; j < n_k * ROWS_AT_ONCE; j += VL, key += VL / ROWS_AT_ONCE) {
        const vec x = vselect(visible > key, vload(s + j), vset1(-INFINITY));
        vstore(s + j, x);
        most = vmax2(x, most);
    }
    UNROLL for (int h = ROWS_AT_ONCE; h < VL; h *= 2) most = vmax2(most, vswap(most, h));
    const vec shift = vselect(most == -(real)INFINITY, (vec){0}, most);
    const real d_min = (SDPA_REAL == 32 ? -127 : -1023) / c;
    for (int64_t j = 0; j < n_k * ROWS_AT_ONCE; j += VL) {
        const vec x = vload(s + j), weight = vexp2_product(x - shift, c, c, 0, d_min);
        vstore(s + j, vselect(x == -(real)INFINITY, vset1(-0.0), weight));
        l += weight;
    }
    UNROLL for (int h = ROWS_AT_ONCE; h < VL; h *= 2) l += vswap(l, h);
    *m = most;
    return l;
}

/* o (n, nv vectors) = factor * s^T v, where s (n_k, ROWS_AT_ONCE) holds weights and n is at most ROWS_AT_ONCE. */
INLINE void few_keys_values(real *o, int64_t o_row, int64_t n, int nv, const real *s, const real *v, int64_t v_row,
                            int64_t n_k, vec factor) {
    vec acc[ROWS_AT_ONCE][MAX_WIDTH] = {{{0}}};
    tile(acc, ROWS_AT_ONCE, nv, true, false, s, 1, ROWS_AT_ONCE, v, v_row, n_k);
    UNROLL for (int i = 0; i < ROWS_AT_ONCE; i++) {
        if (i >= n) break;
        UNROLL for (int j = 0; j < nv; j++) vstore(o + i * o_row + j * VL, factor[i] * acc[i][j]);
    }
}

/* The unit's queries, and the keys and values that they see. */
typedef struct few_keys_rows {
    rows q, k, v;
    real *o; /* (ROWS_AT_ONCE, o_row), where results are not written in place */
    int64_t o_row;
} few_keys_rows;

/* Computes o and lse of n <= ROWS_AT_ONCE queries from the unit's i-th on. c = scale * log2(e). */
NOINLINE void few_keys_forward(const sdpa_unit *u, const few_keys_rows *x, int64_t i, int64_t n, real c) {
    const sdpa_problem *p = u->problem;
    const int64_t i0 = u->i0 + i;
    int64_t j0, n_k;
    sdpa_visible_keys(u, i0, n, &j0, &n_k);
    real s[FEW_KEYS_SIZE];
    vec m;
    few_keys_products(s, &x->q, i, u->n_i, &x->k, n_k, p->d_k);
    const vec l = few_keys_weights(u, i0, n_k, c, s, &m), factor = vselect(l == 0, (vec){0}, 1 / l);

    const bool direct = u->o.data && is_direct(&u->o) && p->d_v == x->o_row;
    const int64_t o_row = direct ? u->o.row / (int64_t)sizeof(real) : x->o_row;
    real *o = direct ? (real *)(u->o.data + i0 * u->o.row) : x->o;
    for (int64_t d = 0; d < x->o_row;) {
        const int left = (int)((x->o_row - d) / VL), nv = left >= MAX_WIDTH ? MAX_WIDTH : left >= 2 ? 2 : 1;
        const real *b = x->v.p + d;
        if (nv == MAX_WIDTH) {
            few_keys_values(o + d, o_row, n, MAX_WIDTH, s, b, x->v.row, n_k, factor);
        } else if (nv == 2) {
            few_keys_values(o + d, o_row, n, 2, s, b, x->v.row, n_k, factor);
        } else {
            few_keys_values(o + d, o_row, n, 1, s, b, x->v.row, n_k, factor);
        }
        d += nv * VL;
    }
    for (int64_t r = 0; r < n; r++) {
        if (!direct && u->o.data) {
            store(u->o.data + (i0 + r) * u->o.row, o + r * o_row, p->d_v, u->o.col, u->o.dtype);
        }
        if (u->lse) {
            store_lse(u, i0 + r, m[r] * u->scale + log(l[r]));
        }
    }
}

#define forward_by_rows OF_BASE(forward_by_rows)
SHARED void forward_by_rows(const sdpa_unit *u, void *scratch);

#if OWNS_SHARED
SHARED void forward_by_rows(const sdpa_unit *u, void *scratch) {
    const sdpa_problem *p = u->problem;
    SDPA_TAKE(FEW_KEYS);
    const real c = product_factor(u, M_LOG2E);
    int64_t j0, n_k;
    sdpa_visible_keys(u, u->i0, u->n_i, &j0, &n_k);
    /* Less than forward_layout takes, which has these arrays among others. */
    const int64_t o_row = round_up(p->d_v, VL), d_k = row_stride(p->d_k), d_v = row_stride(p->d_v);
    const size_t size = sizeof(real);
    sdpa_arena arena = {scratch, 0};
    const few_keys_rows x = {
        .q = pack_rows(&u->q, u->i0, u->n_i, p->d_k, 1, sdpa_take(&arena, size * (size_t)(u->n_i * d_k)), NULL),
        .k = pack_rows(&u->k, 0, n_k, p->d_k, 1, sdpa_take(&arena, size * (size_t)(n_k * d_k)), NULL),
        .v = pack_rows(&u->v, 0, n_k, p->d_v, 1, sdpa_take(&arena, size * (size_t)(n_k * d_v)), NULL),
        .o = sdpa_take(&arena, size * (size_t)(ROWS_AT_ONCE * o_row)),
        .o_row = o_row};
    /* A masked pair must not meet NaN or Inf. A query on its own sees all the keys that it is multiplied with. */
    const bool finite = !p->has_upper || all_finite(x.v.p, x.v.row, n_k, p->d_v);
    const int64_t step = finite ? ROWS_AT_ONCE : 1;
    for (int64_t i = 0; i < u->n_i; i += step) {
        few_keys_forward(u, &x, i, u->n_i - i < step ? u->n_i - i : step, c);
    }
}
#endif

/* False, having done nothing, where the unit goes another way. */
INLINE bool forward_few_keys(const sdpa_unit *u, void *scratch) {
    if (!forward_takes_rows(u)) return false;
    forward_by_rows(u, scratch);
    return true;
}
#else
INLINE bool forward_few_keys(const sdpa_unit *u, void *scratch) { return (void)u, (void)scratch, false; }
#endif

#endif
