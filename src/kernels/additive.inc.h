/* Additive scores (Bahdanau et al. 2015): s = sum_c w[c] tanh(a[c] + b[c]) over the channels of a query's projection a and
 * a key's b.
 *
 * One exponential per token and channel, not one per pair: with A = e^(2a) and B = e^(2b), computed once,
 *
 *     tanh(a + b) = (A B - 1) / (A B + 1),
 *
 * and two channels share a division: w0 n0 / d0 + w1 n1 / d1 = (w0 n0 d1 + w1 n1 d0) / (d0 d1). The product A B is rounded
 * once and near 1, where tanh is near 0, A B - 1 not at all: |error of tanh| <= 8 u in all, u the unit roundoff, of which
 * (1 - tanh^2) u comes from A and B being rounded (tests/test_additive_precision.py). An identity of sums such as
 * (ta + tb) / (1 + ta tb) has no such bound: its denominator cancels.
 *
 * Where |a| or |b| is so large that A or B might leave the range of the type, it is NaN instead (exponentials), the score
 * comes out as NaN, and is computed again from a + b. This depends on the pair alone, so that no row's bits depend on
 * another row. A row of q or k holds its channels, padded to an even number, then their exponentials. */

#define additive_pair FN(additive_pair)
#define additive_scores FN(additive_scores)
#define additive_block FN(additive_block)
#define additive_gradients FN(additive_gradients)
#define additive_slopes FN(additive_slopes)

/* Keys at a time, which hide the latency of one another's divisions. */
#define ADDITIVE_ROWS 4

/* Channels, and keys in the backward, that are summed from zero, then added: bounds the rounding of long sums. */
#define ADDITIVE_TERMS 16

/* A B - 1 is cut off here: tanh is 1 long before, and products of two stay finite. */
#define ADDITIVE_MOST ((real)(SDPA_REAL == 32 ? 0x1p30 : 0x1p60))

/* w0 tanh(a0 + b0) + w1 tanh(a1 + b1). */
INLINE vec additive_pair(vec a0, vec a1, real b0, real b1, real w0, real w1) {
    vec n0 = vmin2(vset1(ADDITIVE_MOST), a0 * b0 - 1), n1 = vmin2(vset1(ADDITIVE_MOST), a1 * b1 - 1);
    vec d0 = n0 + 2, d1 = n1 + 2;
    return ((w0 * n0) * d1 + (w1 * n1) * d0) / (d0 * d1);
}

/* s (n, s_row) = the scores of n keys, rows of k, by nv vectors of queries, columns of q (d_k, q_row). */
NOINLINE void additive_scores(const sdpa_problem *p, const real *q, int64_t q_row, int nv, const rows *k, int64_t n,
                              real *s, int64_t s_row) {
    const int64_t channels = p->d_k / 2;
    const real *w = p->w_score;
    for (int64_t j = 0; j < n; j += ADDITIVE_ROWS) {
        const real *key[ADDITIVE_ROWS];
        UNROLL for (int i = 0; i < ADDITIVE_ROWS; i++) key[i] = k->p + (j + i < n ? j + i : n - 1) * k->row;
        for (int x = 0; x < nv; x++) {
            const real *a = q + x * VL, *e = a + channels * q_row;
            vec sum[ADDITIVE_ROWS] = {{0}};
            for (int64_t c0 = 0; c0 < channels; c0 += ADDITIVE_TERMS) {
                const int64_t c1 = channels - c0 < ADDITIVE_TERMS ? channels : c0 + ADDITIVE_TERMS;
                vec part[ADDITIVE_ROWS] = {{0}};
                for (int64_t c = c0; c < c1; c += 2) {
                    vec e0 = vload(e + c * q_row), e1 = vload(e + (c + 1) * q_row);
                    UNROLL for (int i = 0; i < ADDITIVE_ROWS; i++) {
                        const real *b = key[i] + channels + c;
                        part[i] += additive_pair(e0, e1, b[0], b[1], w[c], w[c + 1]);
                    }
                }
                UNROLL for (int i = 0; i < ADDITIVE_ROWS; i++) sum[i] += part[i];
            }
            for (int i = 0; i < ADDITIVE_ROWS && j + i < n; i++) {
                ivec finite = sum[i] - sum[i] == 0;
                if (vany(~finite)) {
                    vec direct = {0};
                    for (int64_t c = 0; c < channels; c++) direct += w[c] * vtanh(vload(a + c * q_row) + key[i][c]);
                    sum[i] = vselect(finite, sum[i], direct);
                }
                vstore(s + (j + i) * s_row + x * VL, sum[i]);
            }
        }
    }
}

/* One pair of blocks in the backward. */
typedef struct additive_block {
    const real *q, *ds; /* (d_k, row), (n, row): queries in the lanes */
    rows k;
    real *dq;   /* like q */
    real *part; /* (n, 2, VL) of scratch */
    const unsigned char *seen;
    int64_t row, panel, j0, n;
} additive_block;

/* With t = tanh(a + b) of each pair and channel, adds to dq the sum over keys of dS (1 - t^2) and, in its second half, of
 * dS t; to rows j0 .. of dK the sum over queries of dS (1 - t^2). `known`: no exponential is missing; else they are looked
 * for, and a masked pair, marked -0, is left out whatever it holds. */
INLINE void additive_slopes(const sdpa_unit *u, const additive_block *t, bool known) {
    const int64_t channels = u->problem->d_k / 2;
    for (int64_t c = 0; c < channels; c += 2) {
        const real *q = t->q + c * t->row, *exponentials = q + channels * t->row;
        real *dq = t->dq + c * t->row;
        for (int64_t j = 0; j < 2 * t->n; j++) vstore(t->part + j * VL, (vec){0});
        for (int64_t i = 0; i < u->n_i; i += VL) {
            if (t->seen[i / t->panel] == PANEL_HIDDEN) continue;
            vec e[2];
            UNROLL for (int h = 0; h < 2; h++) e[h] = vload(exponentials + h * t->row + i);
            for (int64_t j0 = 0; j0 < t->n; j0 += ADDITIVE_TERMS) {
                const int64_t j1 = t->n - j0 < ADDITIVE_TERMS ? t->n : j0 + ADDITIVE_TERMS;
                vec slopes[2] = {{0}}, values[2] = {{0}};
                for (int64_t j = j0; j < j1; j++) {
                    const real *b = t->k.p + j * t->k.row + c;
                    const vec ds = vload(t->ds + j * t->row + i);
                    vec n[2], d[2];
                    UNROLL for (int h = 0; h < 2; h++) {
                        n[h] = vmin2(vset1(ADDITIVE_MOST), e[h] * b[channels + h] - 1);
                        d[h] = n[h] + 2;
                    }
                    const vec both = 1 / (d[0] * d[1]);
                    UNROLL for (int h = 0; h < 2; h++) {
                        vec tanh = n[h] * (both * d[1 - h]);
                        if (!known) {
                            tanh = vselect(n[h] == n[h], n[h] / d[h], vtanh(vload(q + h * t->row + i) + b[h]));
                            tanh = vselect((ivec)ds == SIGN_BIT, (vec){0}, tanh);
                        }
                        const vec value = ds * tanh, slope = ds - value * tanh;
                        real *part = t->part + (2 * j + h) * VL;
                        vstore(part, vload(part) + slope);
                        slopes[h] += slope;
                        values[h] += value;
                    }
                }
                UNROLL for (int h = 0; h < 2; h++) {
                    real *to = dq + h * t->row + i, *second = to + channels * t->row;
                    vstore(to, vload(to) + slopes[h]);
                    vstore(second, vload(second) + values[h]);
                }
            }
        }
        for (int64_t j = 0; j < t->n && u->dk.data; j++) {
            real *to = (real *)(u->dk.data + (t->j0 + j) * u->dk.row) + c;
            for (int h = 0; h < 2; h++) to[h] += vreduce_add(vload(t->part + (2 * j + h) * VL));
        }
    }
}

NOINLINE void FN(additive_slopes_known)(const sdpa_unit *u, const additive_block *t) { additive_slopes(u, t, true); }
NOINLINE void FN(additive_slopes_missing)(const sdpa_unit *u, const additive_block *t) { additive_slopes(u, t, false); }

NOINLINE void additive_gradients(const sdpa_unit *u, const additive_block *t) {
    const int64_t channels = u->problem->d_k / 2;
    if (all_finite(t->q + channels * t->row, t->row, channels, u->n_i) &&
        all_finite(t->k.p + channels, t->k.row, t->n, channels)) {
        FN(additive_slopes_known)(u, t);
    } else {
        FN(additive_slopes_missing)(u, t);
    }
}

#if SDPA_REAL == 64 /* the linear maps of additive attention are in float64 for all types: additive.c */
/* c (m, n) += a b, depth terms each; a (m, depth), or with `transposed` (depth, m), a_row apart, its rows readable to a
 * multiple of MAX_TILE_ROWS; b's rows readable to whole vectors. */
static void FN(product)(double *c, int64_t c_row, const double *a, int64_t a_row, bool transposed, const double *b,
                        int64_t b_row, int64_t m, int64_t n, int64_t depth) {
    gemm g = {.c = c,
              .c_row = c_row,
              .a = a,
              .a_stride = a_row,
              .b = b,
              .b_row = b_row,
              .m = m,
              .n = n,
              .depth = depth,
              .alpha = 1};
    FN(multiply)(&g, transposed, true);
}

/* e[0..n-1] = exp(2 x), NaN where 2 x log2(e) is beyond +-limit; both readable and writable to whole vectors. */
static void FN(exponentials)(double *e, const double *x, int64_t n, double limit) {
    const double c = 2 * M_LOG2E, c_high = (float)c,
                 c_low = 2 * 1.4426950408889634 - c_high + 2 * 2.0355273740931033e-17;
    for (int64_t i = 0; i < n; i += VL) {
        vec v = vload(x + i), y = c * v;
        ivec inside = (y >= -limit) & (y <= limit);
        v = vselect(inside, v, (vec){0});
        vstore(e + i, vselect(inside, vexp2_product(v, c, c_high, c_low, -limit / c), vset1(NAN)));
    }
}
#endif
