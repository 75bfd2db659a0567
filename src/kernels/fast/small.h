/* Heads with few keys, directly from the rows of the operands: their forward, and the products for fast/short.h. The
 * general way transposes, copies and cuts into blocks, which for small heads costs more than their products; here
 * vectors run along d and nothing is moved. Tiles are 4 queries x 3 keys, or 4 x 4 where there are enough registers: the
 * sums over the lanes of all sixteen then make one vector. */
#ifndef SDPA_KERNEL_FAST_SMALL_H
#define SDPA_KERNEL_FAST_SMALL_H

#include "../forward.h"

#if SMALL
/* The keys of a tile, and those whose sums over the lanes fit in a vector. */
#if VEC_BYTES == 64
enum { TILE_KEYS = 4, SUMMED_KEYS = VL / SMALL_ROWS };
#else
enum { TILE_KEYS = 3, SUMMED_KEYS = 1 };
#endif
#define SMALL_SIZE ((SMALL_KEYS + 2) * SMALL_ROWS + VL)

enum { SMALL_CAN = SDPA_FEATURE_UPPER | SDPA_FEATURE_OFFSET | SDPA_FEATURE_LENGTHS };

/* Whether transposing the unit's queries costs less than sums over 16 lanes: there are at least `least` keys, and hardly
 * a lane stays empty. */
INLINE bool fills_lanes(const sdpa_unit *u, int64_t least) {
    return VL == 16 && u->problem->n_k >= least && 16 * u->n_i >= 15 * round_up(u->n_i, VL);
}

/* Whether the forward of the unit goes through forward_small. */
INLINE bool forward_takes_rows(const sdpa_unit *u) {
    const sdpa_problem *p = u->problem;
    const bool small = p->n_k <= SMALL_KEYS && u->scale > 0x1p-60 && u->scale < 0x1p60;
    return small && !(p->features & ~SMALL_CAN) && !fills_lanes(u, 2 * VL);
}

/* Row i of x, or its last row if i is n or more. */
INLINE const real *row_or_last(const rows *x, int64_t i, int64_t n) { return x->p + (i < n ? i : n - 1) * x->row; }

/* s[k * s_row + i] = the sum over the lanes of acc[k][i]. If s_row is SMALL_ROWS, whole vectors are written, over whose
 * ends the next sums go. */
INLINE void store_sums(real *s, int64_t s_row, const vec (*acc)[SMALL_ROWS]) {
    UNROLL for (int k = 0; k < TILE_KEYS; k += SUMMED_KEYS) {
#if VEC_BYTES == 64
        const vec sums = vsums(acc + k);
#else
        const vec sums = vsum4(acc[k]);
#endif
        if (s_row == SMALL_ROWS) {
            vstore(s + k * s_row, sums);
            continue;
        }
        UNROLL for (int l = 0; l < SUMMED_KEYS; l++) {
            memcpy(s + (k + l) * s_row, (const real *)&sums + l * SMALL_ROWS, SMALL_ROWS * sizeof(real));
        }
    }
}

/* s[j * s_row + r] = x[i + r] y[j] for SMALL_ROWS rows of x, which has n, and all n_k rows of y. Rows after the last
 * repeat it; s has room for those of whole tiles. y is a copy that no store can alias. */
INLINE void row_products(real *s, int64_t s_row, const rows *x, int64_t i, int64_t n, rows y, int64_t n_k,
                         int64_t depth) {
    const real *row[SMALL_ROWS];
    UNROLL for (int r = 0; r < SMALL_ROWS; r++) row[r] = row_or_last(x, i + r, n);
    for (int64_t j = 0; j < n_k; j += TILE_KEYS) {
        const real *key[TILE_KEYS];
        vec acc[TILE_KEYS][SMALL_ROWS];
        UNROLL for (int k = 0; k < TILE_KEYS; k++) {
            key[k] = row_or_last(&y, j + k, n_k);
            UNROLL for (int r = 0; r < SMALL_ROWS; r++) acc[k][r] = (vec){0};
        }
        for (int64_t d = 0; d < depth; d += VL) {
            vec part[TILE_KEYS];
            UNROLL for (int k = 0; k < TILE_KEYS; k++) part[k] = vload(key[k] + d);
            UNROLL for (int r = 0; r < SMALL_ROWS; r++) {
                const vec other = vload(row[r] + d);
                UNROLL for (int k = 0; k < TILE_KEYS; k++) acc[k][r] = vmuladd(other, part[k], acc[k][r]);
            }
        }
        store_sums(s + j * s_row, s_row, (const vec(*)[SMALL_ROWS])acc);
    }
}

/* s (n_k, SMALL_ROWS) = y x^T for SMALL_ROWS rows of x, which has n, from i on. */
NOINLINE void small_products(real *s, const rows *x, int64_t i, int64_t n, const rows *y, int64_t n_k, int64_t depth) {
    row_products(s, SMALL_ROWS, x, i, n, *y, n_k, depth);
}

/* s (n_k, n_lanes) = y x^T, x with n rows; the other lanes of their last vector are 0 or repeat the last row. */
NOINLINE void lane_products(real *s, int64_t n_lanes, const rows *x, int64_t n, const rows *y, int64_t n_k,
                            int64_t depth) {
    for (int64_t j = 0; j < n_k && n % VL; j++) vstore(s + j * n_lanes + n / VL * VL, (vec){0});
    for (int64_t i = 0; i < n; i += SMALL_ROWS) row_products(s + i, n_lanes, x, i, n, *y, n_k, depth);
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

/* The unit's queries, and the keys and values that they see. */
typedef struct small_rows {
    rows q, k, v;
} small_rows;

/* Computes o and lse of n <= SMALL_ROWS queries from the unit's i-th on. c = scale * log2(e). */
NOINLINE void small_forward(const sdpa_unit *u, const forward_scratch *w, const small_rows *x, int64_t i, int64_t n,
                            real c) {
    const sdpa_problem *p = u->problem;
    const int64_t i0 = u->i0 + i;
    int64_t j0, n_k;
    sdpa_visible_keys(u, i0, n, &j0, &n_k);
    real s[SMALL_SIZE];
    vec m;
    small_products(s, &x->q, i, u->n_i, &x->k, n_k, p->d_k);
    const vec l = small_weights(u, i0, n_k, c, s, &m), factor = vselect(l == 0, (vec){0}, 1 / l);

    const bool direct = u->o.data && is_direct(&u->o) && p->d_v == w->o_row;
    const int64_t o_row = direct ? u->o.row / (int64_t)sizeof(real) : w->o_row;
    real *o = direct ? (real *)(u->o.data + i0 * u->o.row) : w->o;
    for (int64_t d = 0; d < w->o_row;) {
        const int left = (int)((w->o_row - d) / VL), nv = left >= MAX_WIDTH ? MAX_WIDTH : left >= 2 ? 2 : 1;
        const real *b = x->v.p + d;
        if (nv == MAX_WIDTH) {
            small_values(o + d, o_row, n, MAX_WIDTH, s, b, x->v.row, n_k, factor);
        } else if (nv == 2) {
            small_values(o + d, o_row, n, 2, s, b, x->v.row, n_k, factor);
        } else {
            small_values(o + d, o_row, n, 1, s, b, x->v.row, n_k, factor);
        }
        d += nv * VL;
    }
    for (int64_t r = 0; r < n; r++) {
        if (!direct && u->o.data) {
            store(u->o.data + (i0 + r) * u->o.row, o + r * o_row, p->d_v, u->o.col, u->o.dtype);
        }
        if (u->lse) {
            const real lse = (real)(m[r] * u->scale + log(l[r]));
            memcpy(u->lse + (i0 + r) * p->lse.row, &lse, sizeof lse);
        }
    }
}

/* False, having done nothing, where the unit is not small. */
NOINLINE bool forward_small(const sdpa_unit *u, void *scratch) {
    const sdpa_problem *p = u->problem;
    if (!forward_takes_rows(u)) return false;
    SDPA_TAKE(SMALL);
    sdpa_arena arena = {scratch, 0};
    const forward_scratch w = forward_layout(p, &arena);
    const real c = product_factor(u, M_LOG2E);
    int64_t j0, n_k;
    sdpa_visible_keys(u, u->i0, u->n_i, &j0, &n_k);
    const small_rows x = {.q = pack_rows(&u->q, u->i0, u->n_i, p->d_k, 1, w.few, NULL),
                          .k = pack_rows(&u->k, 0, n_k, p->d_k, 1, w.k, NULL),
                          .v = pack_rows(&u->v, 0, n_k, p->d_v, 1, w.v, NULL)};
    /* A masked pair must not meet NaN or Inf. A query on its own sees all the keys that it is multiplied with. */
    const bool finite = !p->has_upper || all_finite(x.v.p, x.v.row, n_k, p->d_v);
    const int64_t step = finite ? SMALL_ROWS : 1;
    for (int64_t i = 0; i < u->n_i; i += step) {
        small_forward(u, &w, &x, i, u->n_i - i < step ? u->n_i - i : step, c);
    }
    return true;
}
#else
INLINE bool forward_small(const sdpa_unit *u, void *scratch) { return (void)u, (void)scratch, false; }
#endif

#endif
