/* Forward and backward of heads with few keys, straight from the rows of the operands. forward.inc.h transposes, copies and
 * goes by blocks, which for (10, 64) costs twice what the products do; here the vectors run along d and nothing is brought
 * into place.
 *
 * Tiles of 4 queries x 3 keys: 7 loads for 12 FMAs. 2 x 4 (6 loads for 8) was a tenth slower, since rows of 256 bytes crowd
 * the same banks of L1. AVX2, in turns with forward.inc.h and backward.inc.h, us per head, d = 64:
 *   forward (10, 10) 1.18 to 0.70, (4, 40) 2.1 to 0.84, (32, 32) 5.0 to 4.1, (48, 48) 9.3 to 8.6; float64 1.85 to 1.20
 *   backward (10, 10) 3.7 to 2.2, (32, 32) 14.6 to 11.7; float64 5.8 to 3.8, 30.5 to 25.7
 * AVX-512 has registers for 4 x 4, and the sums over lanes of all sixteen make one vector: of (4, 10) queries and keys 408 to
 * 272 cycles, 160 of them FMAs. */
#if SMALL
#define SMALL_SIZE ((SMALL_KEYS + 2) * SMALL_ROWS + VL)

INLINE bool FN(is_small)(const sdpa_unit *u) {
    const sdpa_problem *p = u->problem;
    return p->n_k <= SMALL_KEYS && !p->has_lower && !u->mask.data && !u->sinks.data && !u->alibi_slopes.data &&
           !p->w_score && p->softcap == 0 && p->dropout_p == 0 && p->scale > 0x1p-60 && p->scale < 0x1p60;
}

/* Rows i0 .. i0+n-1 of m, d columns, where they are, or a copy (n, d rounded up to VL) with zeros to whole vectors. */
NOINLINE sdpa_matrix FN(small_matrix)(const sdpa_matrix *m, int64_t i0, int64_t n, int64_t d, real *copy) {
    const int64_t row = round_up(d, VL), size = sizeof(real);
    const char *first = m->data + i0 * m->row;
    sdpa_matrix r = {(char *)first, m->row, size, SDPA_REAL == 32 ? SDPA_F32 : SDPA_F64, false};
    if (is_direct(m) && d == row) return r;
    for (int64_t i = 0; i < n; i++) {
        FN(load)(copy + i * row, first + i * m->row, d, m->col, m->dtype, m->swapped);
        for (int64_t x = d; x < row; x++) copy[i * row + x] = 0;
    }
    r.data = (char *)copy;
    r.row = row * size;
    return r;
}

/* Row i of a small_matrix, or the last one of n. */
INLINE const real *FN(row_of)(const sdpa_matrix *m, int64_t i, int64_t n) {
    return (const real *)(m->data + (i < n ? i : n - 1) * m->row);
}

/* s (n_k, SMALL_ROWS) = y x^T of small matrices, x of n rows, n at most SMALL_ROWS. A vector holds several keys; room for
 * 2 SMALL_ROWS + VL elements after the last one. */
NOINLINE void FN(small_products)(real *s, const sdpa_matrix *x, int64_t n, const sdpa_matrix *y, int64_t n_k,
                                 int64_t depth) {
    enum { KEYS = VEC_BYTES == 64 ? 4 : 3 };
    const real *row[SMALL_ROWS];
    UNROLL for (int i = 0; i < SMALL_ROWS; i++) row[i] = FN(row_of)(x, i, n);
    for (int64_t j = 0; j < n_k; j += KEYS) {
        const real *key[KEYS];
        vec acc[KEYS][SMALL_ROWS];
        UNROLL for (int k = 0; k < KEYS; k++) {
            key[k] = FN(row_of)(y, j + k, n_k);
            UNROLL for (int i = 0; i < SMALL_ROWS; i++) acc[k][i] = (vec){0};
        }
        for (int64_t d = 0; d < depth; d += VL) {
            vec part[KEYS];
            UNROLL for (int k = 0; k < KEYS; k++) part[k] = vload(key[k] + d);
            UNROLL for (int i = 0; i < SMALL_ROWS; i++) {
                const vec other = vload(row[i] + d);
                UNROLL for (int k = 0; k < KEYS; k++) acc[k][i] += other * part[k];
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

/* s as of small_products = 2^(c (s - m)), m the largest score that each of the queries from i0 on (of all) sees; masked
 * pairs are -0. Returns the sums. */
NOINLINE vec FN(small_weights)(const sdpa_unit *u, int64_t i0, int64_t n_k, real c, real *s, vec *m) {
    ivec end, key;
    UNROLL for (int l = 0; l < VL; l++) {
        end[l] = l % SMALL_ROWS;
        key[l] = l / SMALL_ROWS;
    }
    const ivec most_keys = (int)n_k - (ivec){0};
    const int64_t first = u->problem->has_upper ? i0 + 1 + u->upper : n_k;
    end += (int)(first < -SMALL_ROWS ? -SMALL_ROWS : first > n_k ? n_k : first);
    end = (ivec)vselect(end < most_keys, (vec)end, (vec)most_keys);

    vec most = vset1(-INFINITY), l = {0};
    for (int64_t j = 0; j < n_k * SMALL_ROWS; j += VL, key += VL / SMALL_ROWS) {
        const vec x = vselect(end > key, vload(s + j), vset1(-INFINITY));
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
INLINE void FN(small_tile)(real *o, int64_t o_row, int64_t n, int nv, const real *s, const real *v, int64_t v_row,
                           int64_t n_k, vec factor) {
    vec acc[SMALL_ROWS][MAX_WIDTH] = {{{0}}};
    tile(acc, SMALL_ROWS, nv, false, s, 1, SMALL_ROWS, v, v_row, n_k);
    UNROLL for (int i = 0; i < SMALL_ROWS; i++) {
        if (i >= n) break;
        UNROLL for (int j = 0; j < nv; j++) vstore(o + i * o_row + j * VL, factor[i] * acc[i][j]);
    }
}

/* o and lse of n queries from i0 on (of all), n at most SMALL_ROWS, by keys k and values v, small matrices;
 * c = scale * log2(e). */
NOINLINE void FN(small_rows)(const sdpa_unit *u, const forward_scratch *w, const sdpa_matrix *k, const sdpa_matrix *v,
                             int64_t i0, int64_t n, real c) {
    const sdpa_problem *p = u->problem;
    int64_t j0, n_k;
    sdpa_visible_keys(u, i0, n, &j0, &n_k);
    real s[SMALL_SIZE];
    vec m;
    const sdpa_matrix q = FN(small_matrix)(&u->q, i0, n, p->d_k, w->few);
    FN(small_products)(s, &q, n, k, n_k, p->d_k);
    const vec l = FN(small_weights)(u, i0, n_k, c, s, &m), factor = vselect(l == 0, (vec){0}, 1 / l);

    const bool direct = u->o.data && is_direct(&u->o) && p->d_v == w->o_row;
    const int64_t o_row = direct ? u->o.row / (int64_t)sizeof(real) : w->o_row, v_row = v->row / (int64_t)sizeof(real);
    real *o = direct ? (real *)(u->o.data + i0 * u->o.row) : w->o;
    for (int64_t d = 0; d < w->o_row;) {
        const int left = (int)((w->o_row - d) / VL), nv = left >= MAX_WIDTH ? MAX_WIDTH : left >= 2 ? 2 : 1;
        const real *b = (const real *)v->data + d;
        if (nv == MAX_WIDTH) {
            FN(small_tile)(o + d, o_row, n, MAX_WIDTH, s, b, v_row, n_k, factor);
        } else if (nv == 2) {
            FN(small_tile)(o + d, o_row, n, 2, s, b, v_row, n_k, factor);
        } else {
            FN(small_tile)(o + d, o_row, n, 1, s, b, v_row, n_k, factor);
        }
        d += nv * VL;
    }
    for (int64_t i = 0; i < n; i++) {
        if (!direct && u->o.data) {
            FN(store)(u->o.data + (i0 + i) * u->o.row, o + i * o_row, p->d_v, u->o.col, u->o.dtype);
        }
        if (u->lse) {
            const real lse = (real)(m[i] * p->scale + log(l[i]));
            memcpy(u->lse + (i0 + i) * p->lse.row, &lse, sizeof lse);
        }
    }
}

/* False, having done nothing, where the unit is not small. */
static bool FN(forward_small)(const sdpa_unit *u, const forward_scratch *w) {
    const sdpa_problem *p = u->problem;
    if (!FN(is_small)(u)) return false;
    const real c = (real)(p->scale * M_LOG2E);
    int64_t j0, n_k;
    sdpa_visible_keys(u, u->i0, u->n_i, &j0, &n_k);
    const sdpa_matrix k = FN(small_matrix)(&u->k, 0, n_k, p->d_k, w->k),
                      v = FN(small_matrix)(&u->v, 0, n_k, p->d_v, w->v);
    /* A masked pair must not meet a NaN or Inf; a query by itself sees all the keys that it is multiplied with. */
    const bool exact = !p->has_upper || all_finite((const real *)v.data, v.row / (int64_t)sizeof(real), n_k, p->d_v);
    const int64_t step = exact ? SMALL_ROWS : 1;
    for (int64_t i = 0; i < u->n_i; i += step) {
        FN(small_rows)(u, w, &k, &v, u->i0 + i, u->n_i - i < step ? u->n_i - i : step, c);
    }
    return true;
}

/* n elements of a row statistic from row i0 on, again and again. */
NOINLINE vec FN(small_statistic)(const char *data, const sdpa_tensor *t, int64_t i0, int64_t n) {
    real x[VL] = {0};
    FN(load)(x, data + i0 * t->row, n, t->row, t->dtype, t->swapped);
    UNROLL for (int l = SMALL_ROWS; l < VL; l++) x[l] = x[l % SMALL_ROWS];
    return vload(x);
}

/* P^T and dS^T (n_k, n_lanes) of n queries from the unit's i-th on; q and dout: these queries'. */
NOINLINE void FN(small_gradients)(const sdpa_unit *u, const backward_scratch *w, const sdpa_matrix *q,
                                  const sdpa_matrix *dout, const sdpa_matrix *k, const sdpa_matrix *v, int64_t i,
                                  int64_t n, int64_t n_k, real c) {
    const sdpa_problem *p = u->problem;
    const double unit = FN(log2_e)(p);
    const real high = (real)unit, low = (real)(unit - high), epsilon = SDPA_REAL == 32 ? FLT_EPSILON : DBL_EPSILON;
    real s[SMALL_SIZE], t[SMALL_SIZE];
    vec m, shift = {0};
    FN(small_products)(s, q, n, k, n_k, p->d_k);
    FN(small_products)(t, dout, n, v, n_k, p->d_v);
    const vec l = FN(small_weights)(u, u->i0 + i, n_k, c, s, &m);

    /* 2^(c m - lse), lse in log2 units and to two words. Rows of P sum to 1, as in complete_rows. */
    const vec lse = FN(small_statistic)(u->lse, &p->lse, u->i0 + i, n), whole = high * lse;
    const vec rest = vmulsub(vset1(high), lse, whole) + low * lse;
    vec factor = vexp2(vmulsub(vset1(c), m, whole) - rest);
    const vec excess = factor * l - 1, most = 2 * epsilon * (4 + vmax2(whole, -whole));
    const ivec complete = (excess <= most) & (-excess <= most);
    factor = vselect(complete, 1 / l, factor);
    factor = vselect(lse - lse == 0, factor, (vec)((ivec)lse & (lse != lse)));

    /* delta: as 16-bit O is too coarse, of P where its rows are complete. */
    const sdpa_matrix o = FN(small_matrix)(&u->o, u->i0 + i, n, p->d_v, w->line);
    vec delta[SMALL_ROWS];
    for (int x = 0; x < SMALL_ROWS; x++) {
        delta[x] = (vec){0};
        for (int64_t d = 0; d < p->d_v; d += VL) {
            delta[x] += vload(FN(row_of)(&o, x, n) + d) * vload(FN(row_of)(dout, x, n) + d);
        }
    }
    for (int64_t j = 0; j < n_k * SMALL_ROWS; j += VL) {
        const vec x = vload(s + j), weight = vselect((ivec)x == SIGN_BIT, x, factor * x);
        vstore(s + j, weight);
        shift += vselect((ivec)x == SIGN_BIT, (vec){0}, weight * vload(t + j));
    }
    UNROLL for (int h = SMALL_ROWS; h < VL; h *= 2) shift += vswap(shift, h);
    if (p->dtype != SDPA_F16 && p->dtype != SDPA_BF16) shift = vsum4(delta);
    shift = vselect(complete, shift, vsum4(delta));
    if (u->dlse) shift -= FN(small_statistic)(u->dlse, &p->dlse, u->i0 + i, n);
    for (int64_t j = 0; j < n_k * SMALL_ROWS; j += VL) {
        const vec weight = vload(s + j);
        vstore(t + j, vselect((ivec)weight == SIGN_BIT, weight, weight * (vload(t + j) - shift)));
    }
    for (int64_t j = 0; j < n_k; j++) {
        memcpy(w->p + j * w->n_lanes + i, s + j * SMALL_ROWS, SMALL_ROWS * sizeof(real));
        memcpy(w->ds + j * w->n_lanes + i, t + j * SMALL_ROWS, SMALL_ROWS * sizeof(real));
    }
}

/* c (m, n) += alpha a b, b a small matrix. */
NOINLINE void FN(small_gradient)(const sdpa_matrix *c, const backward_scratch *w, const real *a, bool a_rows_adjacent,
                                 const sdpa_matrix *b, int64_t m, int64_t n, int64_t depth, real alpha, bool exact) {
    gemm g = {.c = (real *)c->data,
              .c_row = c->row / (int64_t)sizeof(real),
              .a = a,
              .a_stride = w->n_lanes,
              .b = (const real *)b->data,
              .b_row = b->row / (int64_t)sizeof(real),
              .m = m,
              .n = n,
              .depth = depth,
              .alpha = alpha};
    if (c->data) FN(multiply)(&g, a_rows_adjacent, exact);
}

/* False, having done nothing, where the unit is not small. */
NOINLINE bool FN(backward_small)(const sdpa_unit *u, const backward_scratch *w) {
    const sdpa_problem *p = u->problem;
    if (u->dmask.data || !FN(is_small)(u)) return false;
    const real scale = (real)p->scale, c = (real)(p->scale * M_LOG2E);
    const int64_t n_i = u->n_i;
    int64_t j0, n_k;
    sdpa_visible_keys(u, u->i0, n_i, &j0, &n_k);
    const sdpa_matrix q = FN(small_matrix)(&u->q, u->i0, n_i, p->d_k, w->q_rows),
                      dout = FN(small_matrix)(&u->dout, u->i0, n_i, p->d_v, w->dout_rows),
                      k = FN(small_matrix)(&u->k, 0, n_k, p->d_k, w->k),
                      v = FN(small_matrix)(&u->v, 0, n_k, p->d_v, w->v);
    for (int64_t i = 0; i < n_i; i += SMALL_ROWS) {
        sdpa_matrix some_q = q, some_dout = dout;
        some_q.data += i * q.row;
        some_dout.data += i * dout.row;
        FN(small_gradients)
        (u, w, &some_q, &some_dout, &k, &v, i, n_i - i < SMALL_ROWS ? n_i - i : SMALL_ROWS, n_k, c);
    }
    /* As in backward_keys: only a masked pair must not meet a NaN or Inf. */
    const int64_t size = sizeof(real);
    const bool exact = !p->has_upper || (all_finite((const real *)q.data, q.row / size, n_i, p->d_k) &&
                                         all_finite((const real *)dout.data, dout.row / size, n_i, p->d_v) &&
                                         all_finite((const real *)k.data, k.row / size, n_k, p->d_k));
    if (!sdpa_turn_wait(u, 0)) return true;
    FN(small_gradient)(&u->dv, w, w->p, false, &dout, n_k, p->d_v, n_i, 1, exact);
    FN(small_gradient)(&u->dk, w, w->ds, false, &q, n_k, p->d_k, n_i, scale, exact);
    sdpa_turn_pass(u, 0);
    if (!sdpa_turn_wait_last(u)) return true;
    const sdpa_matrix sum = {(char *)w->dq, w->k_row * size, size, p->dtype, false};
    sdpa_matrix dq = u->dq;
    dq.data = dq.data ? dq.data + u->i0 * dq.row : NULL;
    if (!dq.data || is_direct(&dq)) {
        FN(small_gradient)(&dq, w, w->ds, true, &k, n_i, p->d_k, n_k, scale, exact);
    } else {
        memset(w->dq, 0, (size_t)(n_i * sum.row));
        FN(small_gradient)(&sum, w, w->ds, true, &k, n_i, p->d_k, n_k, scale, exact);
        for (int64_t i = 0; i < n_i; i++) {
            FN(add_row)(dq.data + i * dq.row, dq.col, dq.dtype, w->dq + i * w->k_row, p->d_k, w->line);
        }
    }
    sdpa_turn_end(u);
    return true;
}
#endif
