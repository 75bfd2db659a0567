/* Forward of heads with few keys, straight from the rows of the operands. forward.inc.h transposes, copies and goes by blocks,
 * which for (10, 64) costs twice what the products do; here the vectors run along d and nothing is brought into place.
 *
 * Tiles of 4 queries x 3 keys: 7 loads for 12 FMAs. 2 x 4 (6 loads for 8) was a tenth slower, since rows of 256 bytes crowd
 * the same banks of L1. AVX2, in turns with forward.inc.h, us per head, d = 64: (10, 10) 1.25 to 0.68, (4, 40) 2.1 to 0.84,
 * (32, 32) 5.0 to 4.1, (48, 48) 9.3 to 8.6; float64 1.92 to 1.23, 2.9 to
 * 1.7, 10.2 to 8.3, 18.6 to 17.1. */
#if VEC_BYTES >= 32 && !defined(__OPTIMIZE_SIZE__)
#define SMALL 1

/* From here on the sums over the lanes cost more than transposed queries do at d = 16; at d = 64 from 60 on. */
#define SMALL_KEYS 32
#define SMALL_ROWS 4

INLINE bool FN(is_small)(const sdpa_unit *u) {
    const sdpa_problem *p = u->problem;
    const bool plain = !p->has_lower && !u->mask.data && !u->sinks.data && !u->alibi_slopes.data && !p->w_score &&
                       p->softcap == 0 && p->dropout_p == 0 && p->scale > 0x1p-60 && p->scale < 0x1p60;
    if (!plain || p->n_k > SMALL_KEYS || p->d_k % VL || p->d_v % VL) return false;
    const bool in_place = is_direct(&u->q) && is_direct(&u->k) && is_direct(&u->v) && u->o.data &&
                          u->o.dtype == u->q.dtype && u->o.col == u->q.col;
    if (!in_place || !p->has_upper) return in_place;
    /* NaN or infinity against a weight of a masked pair is for gemm_masked. */
    return all_finite((const real *)u->v.data, u->v.row / (int64_t)sizeof(real), p->n_k, p->d_v);
}

/* Row i, or the last one of n. */
INLINE const real *FN(row_of)(const sdpa_matrix *m, int64_t i, int64_t n) {
    return (const real *)(m->data + (i < n ? i : n - 1) * m->row);
}

/* o and lse of queries i0 .. i0+n-1, n at most SMALL_ROWS; c = scale * log2(e). */
NOINLINE void FN(small_rows)(const sdpa_unit *u, int64_t i0, int64_t n, real c) {
    enum { KEYS = 3 };
    const sdpa_problem *p = u->problem;
    int64_t j0, n_k;
    sdpa_visible_keys(u, i0, n, &j0, &n_k);
    real s[(SMALL_KEYS + KEYS) * SMALL_ROWS + VL]; /* (n_k, SMALL_ROWS): a vector holds several keys */
    const real *x[SMALL_ROWS];
    ivec end; /* of the keys that a lane's query sees */
    UNROLL for (int l = 0; l < VL; l++) end[l] = l % SMALL_ROWS;
    int64_t least = p->has_upper ? i0 + 1 + u->upper : n_k;
    least = least < -SMALL_ROWS ? -SMALL_ROWS : least > n_k ? n_k : least;
    end += (int)least;
    end = (ivec)vselect(end < (int)n_k, (vec)end, (vec)((int)n_k - (ivec){0}));
    UNROLL for (int i = 0; i < SMALL_ROWS; i++) x[i] = FN(row_of)(&u->q, i0 + i, i0 + n);
    vec m = vset1(-INFINITY);
    for (int64_t j = 0; j < n_k; j += KEYS) {
        const real *y[KEYS];
        vec acc[KEYS][SMALL_ROWS];
        UNROLL for (int k = 0; k < KEYS; k++) {
            y[k] = FN(row_of)(&u->k, j + k, n_k);
            UNROLL for (int i = 0; i < SMALL_ROWS; i++) acc[k][i] = (vec){0};
        }
        for (int64_t d = 0; d < p->d_k; d += VL) {
            vec key[KEYS];
            UNROLL for (int k = 0; k < KEYS; k++) key[k] = vload(y[k] + d);
            UNROLL for (int i = 0; i < SMALL_ROWS; i++) {
                const vec query = vload(x[i] + d);
                UNROLL for (int k = 0; k < KEYS; k++) acc[k][i] += query * key[k];
            }
        }
        UNROLL for (int k = 0; k < KEYS; k++) {
            const vec four = vselect(end > (int)(j + k), vsum4(acc[k]), vset1(-INFINITY));
            m = vmax2(four, m);
            vstore(s + (j + k) * SMALL_ROWS, four);
        }
    }
    const vec shift = vselect(m == -(real)INFINITY, (vec){0}, m);
    const real d_min = (SDPA_REAL == 32 ? -127 : -1023) / c;
    vec l = {0};
    for (int64_t j = 0; j < n_k * SMALL_ROWS; j += VL) {
        const vec weight = vexp2_product(vload(s + j) - shift, c, c, 0, d_min);
        vstore(s + j, weight);
        l += weight;
    }
    UNROLL for (int h = SMALL_ROWS; h < VL; h *= 2) l += vswap(l, h);
    const vec factor = vselect(l == 0, (vec){0}, 1 / l);

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
#else
#define SMALL 0
#endif
