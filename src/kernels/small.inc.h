/* Forward and backward of heads with few keys, straight from the rows of the operands. forward.inc.h transposes, copies and
 * goes by blocks, which for (10, 64) costs twice what the products do; here the vectors run along d and nothing is brought
 * into place.
 *
 * Tiles of 4 queries x 3 keys: 7 loads for 12 FMAs. 2 x 4 (6 loads for 8) was a tenth slower, since rows of 256 bytes crowd
 * the same banks of L1. AVX2, in turns with forward.inc.h and backward.inc.h, us per head, d = 64:
 *   forward (10, 10) 1.18 to 0.70, (4, 40) 2.1 to 0.84, (32, 32) 5.0 to 4.1, (48, 48) 9.3 to 8.6; float64 1.85 to 1.20
 *   backward (10, 10) 3.7 to 2.2, (32, 32) 14.6 to 11.7; float64 5.8 to 3.8, 30.5 to 25.7 */
#if VEC_BYTES >= 32 && !defined(__OPTIMIZE_SIZE__)
#define SMALL 1

/* From here on the sums over the lanes cost more than transposed queries do at d = 16; at d = 64 from 60 on. */
#define SMALL_KEYS 32
#define SMALL_ROWS 4

/* `backward`: whether gradients are wanted instead of o. */
NOINLINE bool FN(is_small)(const sdpa_unit *u, bool backward) {
    const sdpa_problem *p = u->problem;
    const bool plain = !p->has_lower && !u->mask.data && !u->sinks.data && !u->alibi_slopes.data && !p->w_score &&
                       p->softcap == 0 && p->dropout_p == 0 && p->scale > 0x1p-60 && p->scale < 0x1p60;
    if (!plain || p->n_k > SMALL_KEYS || p->d_k % VL || p->d_v % VL) return false;
    const sdpa_matrix *m[] = {&u->v, &u->k, &u->q, &u->o, &u->dout, &u->dq};
    const int64_t n[] = {p->n_k, p->n_k, u->i0 + u->n_i, 0, u->i0 + u->n_i}, d[] = {p->d_v, p->d_k, p->d_k, 0, p->d_v};
    for (int x = 0; x < (backward ? 6 : 4); x++) {
        if (m[x]->data ? !is_direct(m[x]) : m[x] == &u->o) return false;
    }
    /* NaN or infinity against a masked pair is for gemm_masked. */
    for (int x = 0; x < (backward ? 5 : 1) && p->has_upper; x++) {
        if (!all_finite((const real *)m[x]->data, m[x]->row / (int64_t)sizeof(real), n[x], d[x])) return false;
    }
    return true;
}

/* s (n_k, SMALL_ROWS) = y x^T for rows i0 .. i0+n-1 of x, n at most SMALL_ROWS. A vector holds several keys; room for
 * 2 SMALL_ROWS + VL elements after the last one. */
NOINLINE void FN(small_products)(real *s, const sdpa_matrix *x, int64_t i0, int64_t n, const sdpa_matrix *y,
                                 int64_t n_k, int64_t depth) {
    enum { KEYS = 3 };
    const real *row[SMALL_ROWS];
    UNROLL for (int i = 0; i < SMALL_ROWS; i++) row[i] = (const real *)(x->data + (i0 + (i < n ? i : n - 1)) * x->row);
    for (int64_t j = 0; j < n_k; j += KEYS) {
        const real *key[KEYS];
        vec acc[KEYS][SMALL_ROWS];
        UNROLL for (int k = 0; k < KEYS; k++) {
            key[k] = (const real *)(y->data + (j + k < n_k ? j + k : n_k - 1) * y->row);
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
        UNROLL for (int k = 0; k < KEYS; k++) vstore(s + (j + k) * SMALL_ROWS, vsum4(acc[k]));
    }
}

/* s as of small_products = 2^(c (s - m)), m the largest score that each of queries i0 .. i0+n-1 sees, the other pairs 0.
 * Returns the sums. */
NOINLINE vec FN(small_weights)(const sdpa_unit *u, int64_t i0, int64_t n, int64_t n_k, real c, real *s, vec *m) {
    const sdpa_problem *p = u->problem;
    ivec end, key;
    UNROLL for (int l = 0; l < VL; l++) {
        end[l] = l % SMALL_ROWS;
        key[l] = l / SMALL_ROWS;
    }
    int64_t first = p->has_upper ? i0 + 1 + u->upper : n_k;
    first = first < -SMALL_ROWS ? -SMALL_ROWS : first > n_k ? n_k : first;
    end += (int)first;
    end = (ivec)vselect(end < (int)n_k, (vec)end, (vec)((int)n_k - (ivec){0}));

    FN(small_products)(s, &u->q, i0, n, &u->k, n_k, p->d_k);
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
        const vec weight = vexp2_product(vload(s + j) - shift, c, c, 0, d_min);
        vstore(s + j, weight);
        l += weight;
    }
    UNROLL for (int h = SMALL_ROWS; h < VL; h *= 2) l += vswap(l, h);
    *m = most;
    return l;
}

#define SMALL_SIZE ((SMALL_KEYS + 2) * SMALL_ROWS + VL)

/* o and lse of queries i0 .. i0+n-1, n at most SMALL_ROWS; c = scale * log2(e). */
NOINLINE void FN(small_rows)(const sdpa_unit *u, int64_t i0, int64_t n, real c) {
    const sdpa_problem *p = u->problem;
    int64_t j0, n_k;
    real s[SMALL_SIZE];
    vec m;
    sdpa_visible_keys(u, i0, n, &j0, &n_k);
    const vec l = FN(small_weights)(u, i0, n, n_k, c, s, &m), factor = vselect(l == 0, (vec){0}, 1 / l);

    const int64_t v_row = u->v.row / (int64_t)sizeof(real);
    for (int64_t d = 0; d < p->d_v;) {
        const real *v = (const real *)u->v.data + d;
        const int nv = p->d_v - d < 2 * VL ? 1 : 2;
        vec acc[SMALL_ROWS][MAX_WIDTH] = {{{0}}};
        if (nv == 2) {
            tile(acc, SMALL_ROWS, 2, false, s, 1, SMALL_ROWS, v, v_row, n_k);
        } else {
            tile(acc, SMALL_ROWS, 1, false, s, 1, SMALL_ROWS, v, v_row, n_k);
        }
        UNROLL for (int i = 0; i < SMALL_ROWS; i++) {
            if (i >= n) break;
            real *o = (real *)(u->o.data + (i0 + i) * u->o.row) + d;
            vstore(o, factor[i] * acc[i][0]);
            if (nv == 2) vstore(o + VL, factor[i] * acc[i][1]);
        }
        d += nv * VL;
    }
    for (int64_t i = 0; u->lse && i < n; i++) {
        const real lse = (real)(m[i] * p->scale + log(l[i]));
        memcpy(u->lse + (i0 + i) * p->lse.row, &lse, sizeof lse);
    }
}

static void FN(forward_small)(const sdpa_unit *u) {
    const real c = (real)(u->problem->scale * M_LOG2E);
    for (int64_t i = 0; i < u->n_i; i += SMALL_ROWS) {
        FN(small_rows)(u, u->i0 + i, u->n_i - i < SMALL_ROWS ? u->n_i - i : SMALL_ROWS, c);
    }
}

/* Elements i0 .. i0+n-1 of a row statistic, again and again. */
NOINLINE vec FN(small_statistic)(const char *data, const sdpa_tensor *t, int64_t i0, int64_t n) {
    real x[VL] = {0};
    FN(load)(x, data + i0 * t->row, n, t->row, t->dtype, t->swapped);
    UNROLL for (int l = SMALL_ROWS; l < VL; l++) x[l] = x[l % SMALL_ROWS];
    return vload(x);
}

/* P^T and dS^T (n_k, row) of queries i0 .. i0+n-1 by the unit's n_k keys; c = scale * log2(e). */
NOINLINE void FN(small_gradients)(const sdpa_unit *u, int64_t i0, int64_t n, int64_t n_k, real c, real *weights,
                                  real *ds, int64_t row) {
    const sdpa_problem *p = u->problem;
    const double unit = FN(log2_e)(p);
    const real high = (real)unit, low = (real)(unit - high), epsilon = SDPA_REAL == 32 ? FLT_EPSILON : DBL_EPSILON;
    real s[SMALL_SIZE], t[SMALL_SIZE];
    vec m, delta[SMALL_ROWS];
    const vec l = FN(small_weights)(u, i0, n, n_k, c, s, &m);
    FN(small_products)(t, &u->dout, i0, n, &u->v, n_k, p->d_v);
    for (int i = 0; i < SMALL_ROWS; i++) {
        const int64_t at = i0 + (i < n ? i : n - 1);
        const real *o = (const real *)(u->o.data + at * u->o.row),
                   *dout = (const real *)(u->dout.data + at * u->dout.row);
        delta[i] = (vec){0};
        for (int64_t d = 0; d < p->d_v; d += VL) delta[i] += vload(o + d) * vload(dout + d);
    }
    vec shift = vsum4(delta);
    if (u->dlse) shift -= FN(small_statistic)(u->dlse, &p->dlse, i0, n);

    /* 2^(c m - lse), lse in log2 units and to two words. Rows of P sum to 1, as in complete_rows. */
    const vec lse = FN(small_statistic)(u->lse, &p->lse, i0, n), whole = high * lse;
    const vec rest = vmulsub(vset1(high), lse, whole) + low * lse;
    vec factor = vexp2(vmulsub(vset1(c), m, whole) - rest);
    const vec excess = factor * l - 1, size = vmax2(whole, -whole), most = 2 * epsilon * (4 + size);
    factor = vselect((excess <= most) & (-excess <= most), 1 / l, factor);
    factor = vselect(lse - lse == 0, factor, (vec)((ivec)lse & (lse != lse)));
    for (int64_t j = 0; j < n_k * SMALL_ROWS; j += VL) {
        const vec weight = factor * vload(s + j);
        vstore(s + j, weight);
        vstore(t + j, weight * (vload(t + j) - shift));
    }
    for (int64_t j = 0; j < n_k; j++) {
        memcpy(weights + j * row, s + j * SMALL_ROWS, SMALL_ROWS * sizeof(real));
        memcpy(ds + j * row, t + j * SMALL_ROWS, SMALL_ROWS * sizeof(real));
    }
}

/* FN(backward). weights, ds: (n_k + MAX_TILE_ROWS, row) of scratch. */
NOINLINE void FN(backward_small)(const sdpa_unit *u, real *weights, real *ds, int64_t row) {
    const sdpa_problem *p = u->problem;
    const int64_t size = sizeof(real);
    const real c = (real)(p->scale * M_LOG2E);
    int64_t j0, n_k;
    sdpa_visible_keys(u, u->i0, u->n_i, &j0, &n_k);
    for (int64_t i = 0; i < u->n_i; i += SMALL_ROWS) {
        FN(small_gradients)
        (u, u->i0 + i, u->n_i - i < SMALL_ROWS ? u->n_i - i : SMALL_ROWS, n_k, c, weights + i, ds + i, row);
    }
    const struct {
        const sdpa_matrix *to, *from;
        const real *a;
        int64_t to_row, from_row, m, n, depth;
        real alpha;
    } product[] = {
        {&u->dv, &u->dout, weights, 0, u->i0, n_k, p->d_v, u->n_i, 1},
        {&u->dk, &u->q, ds, 0, u->i0, n_k, p->d_k, u->n_i, (real)p->scale},
        {&u->dq, &u->k, ds, u->i0, 0, u->n_i, p->d_k, n_k, (real)p->scale},
    };
    if (!sdpa_turn_wait(u, 0)) return;
    for (int x = 0; x < 3; x++) {
        if (x == 2) {
            sdpa_turn_pass(u, 0);
            if (!sdpa_turn_wait_last(u)) return;
        }
        const sdpa_matrix *to = product[x].to, *from = product[x].from;
        if (!to->data) continue;
        gemm g = {.c = (real *)(to->data + product[x].to_row * to->row),
                  .c_row = to->row / size,
                  .a = product[x].a,
                  .a_stride = row,
                  .b = (const real *)(from->data + product[x].from_row * from->row),
                  .b_row = from->row / size,
                  .m = product[x].m,
                  .n = product[x].n,
                  .depth = product[x].depth,
                  .alpha = product[x].alpha};
        FN(multiply)(&g, x == 2, true);
    }
    sdpa_turn_end(u);
}
#else
#define SMALL 0
#endif
