/* Scores of few queries, as in decoding, which would leave most lanes of a tile idle. Here vectors run along d, and sums
 * over their lanes give the scores of several keys in one vector: lane l holds query l % period and key l / period of
 * that vector. Later steps treat it as a tile with one query per lane, and fold its maxima and sums. Rows are read one
 * after the other, because memory delivers them fastest in that order. */
#ifndef SDPA_KERNEL_FAST_FEW_QUERIES_H
#define SDPA_KERNEL_FAST_FEW_QUERIES_H

#include "../logits.h"

enum {
    FEW_QUERIES_CAN =
        SDPA_FEATURES_OF_UNITS | SDPA_FEATURE_SOFTCAP | SDPA_FEATURE_DROPOUT | SDPA_FEATURE_SINKS | SDPA_FEATURE_ALIBI
};

INLINE bool few_can(const sdpa_problem *p) { return !(p->features & ~FEW_QUERIES_CAN); }

/* The number of lanes after which vectors repeat n queries, n <= FEW_QUERIES. */
INLINE int few_period(int64_t n) { return n == 1 ? 1 : n <= 4 ? (VL < 4 ? VL : 4) : 8; }

/* Packs the unit's queries into q (d_k / VL rounded up, period, VL). Columns past d_k are 0; the last query is repeated
 * up to `period`. `line` holds d_k rounded up to VL. */
static void few_queries(real *q, int period, const sdpa_unit *u, real *line) {
    const sdpa_problem *p = u->problem;
    const int64_t d = round_up(p->d_k, VL);
    for (int64_t i = 0; i < period; i++) {
        const int64_t row = i < u->n_i ? i : u->n_i - 1;
        for (int64_t c = p->d_k; c < d; c++) line[c] = 0;
        load(line, u->q.data + (u->i0 + row) * u->q.row, p->d_k, u->q.col, u->q.dtype, u->q.swapped);
        for (int64_t c = 0; c < d; c += VL) {
            const vec x = vload(line + c);
            vstore(q + c * period + i * VL, u->scale < 0 ? -x : x);
        }
    }
}

/* The products of a key with the queries, before the sum over lanes. period and the key's dtype are constants. */
INLINE void few_products(vec *sum, const real *q, int period, sdpa_dtype dtype, const char *k, int64_t depth) {
    const int64_t size = sdpa_is_narrow(dtype) ? 2 : sizeof(real);
    vec acc[4][8]; /* one chain alone would wait for each of its sums */
    const int chains = period == 1 ? 4 : 1;
    UNROLL for (int i = 0; i < period; i++) acc[0][i] = acc[1][i] = acc[2][i] = acc[3][i] = (vec){0};
    int64_t c = 0;
    for (; c + chains * VL <= depth; c += chains * VL) {
        UNROLL for (int h = 0; h < chains; h++) {
            const vec key = vload_as(dtype, k + (c + h * VL) * size);
            const real *from = q + (c + h * VL) * period;
            UNROLL for (int i = 0; i < period; i++) acc[h][i] = vmuladd(vload(from + i * VL), key, acc[h][i]);
        }
    }
    for (; c < depth; c += VL) {
        const bool whole = sdpa_is_narrow(dtype) || depth - c >= VL; /* see is_narrow */
        const vec key = whole ? vload_as(dtype, k + c * size) : vload_partial((const real *)k + c, (int)(depth - c));
        UNROLL for (int i = 0; i < period; i++) acc[0][i] = vmuladd(vload(q + c * period + i * VL), key, acc[0][i]);
    }
    UNROLL for (int i = 0; i < period; i++) sum[i] =
        chains == 4 ? (acc[0][i] + acc[1][i]) + (acc[2][i] + acc[3][i]) : acc[0][i];
}

/* Fills the last vector after the n-th key. */
INLINE void few_fill(real *s, int period, int64_t n, real fill) {
    for (int64_t l = n * period; l < round_up(n * period, VL); l++) s[l] = fill;
}

#if VEC_BYTES == 64 && SDPA_REAL == 32
/* few_products of two keys and eight queries, whose vectors are loaded once for both keys. */
INLINE void few_products_of_two(vec *sum, const real *q, const real *first, const real *second, int64_t depth) {
    vec acc[2][8] = {{{0}}};
    for (int64_t c = 0; c < depth; c += VL) {
        const bool whole = depth - c >= VL;
        const vec x = whole ? vload(first + c) : vload_partial(first + c, (int)(depth - c)),
                  y = whole ? vload(second + c) : vload_partial(second + c, (int)(depth - c));
        UNROLL for (int i = 0; i < 8; i++) {
            const vec query = vload(q + c * 8 + i * VL);
            acc[0][i] = vmuladd(query, x, acc[0][i]);
            acc[1][i] = vmuladd(query, y, acc[1][i]);
        }
    }
    UNROLL for (int i = 0; i < 8; i++) {
        sum[i] = acc[0][i];
        sum[8 + i] = acc[1][i];
    }
}
#endif

/* The sum over lanes of each of VL products, side by side in one vector. */
INLINE void few_sums(real *to, const vec *sum) {
#if VEC_BYTES == 64
    vstore(to, vsums((const vec(*)[4])sum));
#elif VEC_BYTES == 32
    for (int i = 0; i < VL; i += 4) vstore(to + i, vsum4(sum + i));
#else
    for (int i = 0; i < VL; i++) to[i] = vreduce_add(sum[i]);
#endif
}

/* s (n * period, rounded up to VL) = products of few_queries q and n keys of `depth`, then -inf. s has room for VL more
 * reals. */
#define few_scores OF_BASE(few_scores)
SHARED void few_scores(real *s, const real *q, int period, const real *k, int64_t k_row, int64_t n, int64_t depth,
                       const ahead *next);

#if OWNS_SHARED
SHARED void few_scores(real *s, const real *q, int period, const real *k, int64_t k_row, int64_t n, int64_t depth,
                       const ahead *next) {
    for (int64_t j = 0; j < n; j += VL / period) {
        vec sum[VL];
        for (int i = 0; i < VL; i += period) {
            const real *key = k + (j + i / period < n ? j + i / period : n - 1) * k_row;
            if (next) fetch_ahead(next, j + i / period, 1);
            if (period == 1) {
                few_products(sum + i, q, 1, REAL_DTYPE, (const char *)key, depth);
#if VEC_BYTES == 64 && SDPA_REAL == 32
            } else if (period == 8) {
                const int64_t second = j + 1 < n ? j + 1 : n - 1;
                if (next) fetch_ahead(next, j + 1, 1);
                few_products_of_two(sum, q, key, k + second * k_row, depth);
                break;
#else
            } else if (VL > 4 && period == 8) {
                few_products(sum + i, q, 8, REAL_DTYPE, (const char *)key, depth);
#endif
            } else {
                few_products(sum + i, q, VL < 4 ? VL : 4, REAL_DTYPE, (const char *)key, depth);
            }
        }
        few_sums(s + j * period, sum);
    }
    few_fill(s, period, n, -(real)INFINITY);
}
#endif

INLINE void few_scores_of(real *s, const real *q, sdpa_dtype dtype, const rows *k, int64_t depth) {
    for (int64_t j = 0; j < k->n; j += VL) {
        vec sum[VL];
        for (int i = 0; i < VL; i++) {
            const int64_t key = j + i < k->n ? j + i : k->n - 1;
            few_products(sum + i, q, 1, dtype, k->narrow.data + key * k->narrow.row, depth);
        }
        few_sums(s + j, sum);
    }
    few_fill(s, 1, k->n, -(real)INFINITY);
}

/* few_scores of one query and narrow_rows. */
#define few_scores_narrow OF_BASE(few_scores_narrow)
SHARED void few_scores_narrow(real *s, const real *q, const rows *k, int64_t depth);

#if OWNS_SHARED
SHARED void few_scores_narrow(real *s, const real *q, const rows *k, int64_t depth) {
    if (WIDENS_F16 && k->narrow.dtype == SDPA_F16) {
        few_scores_of(s, q, SDPA_F16, k, depth);
    } else {
        few_scores_of(s, q, SDPA_BF16, k, depth);
    }
}
#endif

/* few_scores of rows_across. Each element of K is read once, along the keys, and nothing is transposed. */
#define few_scores_across OF_BASE(few_scores_across)
SHARED void few_scores_across(real *s, const real *q, int period, const rows *k, int64_t depth);

#if OWNS_SHARED
/* Sums at once, and vectors of keys for which each row of columns is read: memory delivers neighbouring lines faster. */
enum { SUMS_ACROSS = VEC_BYTES == 32 ? 8 : 16, MOST_ACROSS = 4 };
INLINE int few_across(int period) {
    const int n = SUMS_ACROSS / (period == 1 ? 4 : period);
    return n < MOST_ACROSS ? n : MOST_ACROSS;
}

/* Adds the products of a row of columns, n_vectors from `key` on, with one element of each query. */
INLINE void add_across(vec (*acc)[8], int first, const real *q, int period, const real *key, int n_vectors, int width) {
    UNROLL for (int v = 0; v < n_vectors; v++) {
        const vec x = width == VL ? vload(key + v * VL) : vload_partial(key, width);
        UNROLL for (int i = 0; i < period; i++) { acc[v][first + i] = vmuladd(vset1(q[i * VL]), x, acc[v][first + i]); }
    }
}

/* s (n_vectors * VL, period) = the products of keys in the lanes, from k on, whose elements are k_col apart. A single
 * vector may hold `width` keys. The elements are added in the order of few_products and few_sums, as if each were in its
 * lane there. period and n_vectors are constants. */
INLINE void few_products_across(real *s, const real *q, int period, const real *k, int64_t k_col, int n_vectors,
                                int width, int64_t depth) {
    const int chains = period == 1 ? 4 : 1;
    const int64_t whole = depth / (chains * VL) * (chains * VL);
    vec lane[SUMS_ACROSS][VL];
    for (int l = 0; l < VL; l++) {
        vec acc[MOST_ACROSS][8];
        UNROLL for (int v = 0; v < n_vectors; v++) {
            UNROLL for (int x = 0; x < chains * period; x++) acc[v][x] = (vec){0};
        }
        int64_t c = l;
        for (; c < whole; c += chains * VL) {
            UNROLL for (int h = 0; h < chains; h++) {
                const real *from = q + (c - l + h * VL) * period + l;
                add_across(acc, h * period, from, period, k + (c + h * VL) * k_col, n_vectors, width);
            }
        }
        for (; c < depth; c += VL)
            add_across(acc, 0, q + (c - l) * period + l, period, k + c * k_col, n_vectors, width);
        UNROLL for (int v = 0; v < n_vectors; v++) {
            UNROLL for (int i = 0; i < period; i++) {
                lane[v * period + i][l] = chains == 4 ? (acc[v][0] + acc[v][1]) + (acc[v][2] + acc[v][3]) : acc[v][i];
            }
        }
    }
    for (int v = 0; v < n_vectors; v++) {
        for (int i = 0; i < period; i++) {
            real products[VL];
            vstore(products, vsum_of_lanes(lane[v * period + i]));
            for (int t = 0; t < width; t++) s[(v * VL + t) * period + i] = products[t];
        }
    }
}

INLINE void few_scores_of_columns(real *s, const real *q, int period, const rows *k, int64_t depth) {
    const int64_t size = (int64_t)sizeof(real), k_col = k->across.col / size, n = k->n;
    const int at_once = few_across(period);
    const real *first = (const real *)k->across.data;
    if (n < VL) few_products_across(s, q, period, first, k_col, 1, (int)n, depth);
    for (int64_t j = 0, next; n >= VL && j < n; j = next) {
        next = next_columns((const char *)first, j, n, size);
        if (next == j + VL && j + at_once * VL <= n) {
            few_products_across(s + j * period, q, period, first + j, k_col, at_once, VL, depth);
            next = j + at_once * VL;
            if (next > n - VL && next < n) next = n - VL;
        } else {
            few_products_across(s + j * period, q, period, first + j, k_col, 1, VL, depth);
        }
    }
    few_fill(s, period, n, -(real)INFINITY);
}

SHARED void few_scores_across(real *s, const real *q, int period, const rows *k, int64_t depth) {
    if (period == 1) {
        few_scores_of_columns(s, q, 1, k, depth);
    } else if (VL > 4 && period == 8) {
        few_scores_of_columns(s, q, 8, k, depth);
    } else {
        few_scores_of_columns(s, q, VL < 4 ? VL : 4, k, depth);
    }
}
#endif

/* Rearranges s (n, VL), which has a query per lane, into the order of few_scores, then `fill`. */
NOINLINE void few_pack(real *s, int period, int64_t n, real fill) {
    for (int64_t j = 0; j < n; j++) {
        for (int i = 0; i < period; i++) s[j * period + i] = s[j * VL + i];
    }
    few_fill(s, period, n, fill);
}

/* The maximum or the sum over the lanes of each query, in all of its lanes. */
INLINE vec few_fold(vec x, int period, bool maximum) {
    UNROLL for (int h = VL / 2; h > 0; h /= 2) {
        if (h >= period) x = maximum ? vmax2(x, vswap(x, h)) : x + vswap(x, h);
    }
    return x;
}

#endif
