/* Tiles of scores: keys by queries, queries in the lanes. One template for the forward's and the backward's products
 * K Q^T and V dO^T, with what follows them fused onto the accumulators while they are in registers. */

#define scores FN(scores)
#define few_scores FN(few_scores)
#define cap_tile FN(cap_tile)
#define score_tile FN(score_tile)
#define score_panel FN(score_panel)

typedef struct scores {
    const real *x;      /* (depth, x_row): transposed queries, or transposed dO */
    const real *y;      /* (n, depth), rows y_row apart: keys, or values */
    const real *y_tail; /* the last n % SCORE_ROWS rows, padded to SCORE_ROWS, tail_row apart */
    const real *given;  /* like s: the products, where they are not x y; else NULL */
    int64_t x_row, y_row, tail_row, n, depth;
    const real *few; /* (n_few, depth rounded up to VL): the queries as rows, where they are few (decode); else NULL */
    int n_few;
    real *s;  /* (n rounded up to SCORE_ROWS, s_row) */
    real *ds; /* like s */
    int64_t s_row;
    const real *shift;     /* per query */
    const real *shift_low; /* per query: what rounding took from shift (SCORE_WEIGHTS) */
    real *extreme;         /* per query: running maximum or sum */
    real *highest;         /* per query: running maximum of c * acc - shift (SCORE_SUMMED) */
    real c, cap;
} scores;

/* A tile for few queries, whose lanes would be mostly idle: the vectors run along d. s (SCORE_ROWS, VL). */
NOINLINE void few_scores(const scores *t, const real *y, int64_t y_row, real *s) {
    const int64_t few_row = round_up(t->depth, VL), whole = t->depth / VL * VL;
    const int rest = (int)(t->depth - whole);
    for (int q = 0; q < t->n_few && q < VL; q++) {
        const real *x = t->few + q * few_row;
        vec acc[SCORE_ROWS];
        UNROLL for (int i = 0; i < SCORE_ROWS; i++) acc[i] = (vec){0};
        for (int64_t c = 0; c < whole; c += VL) {
            vec a = vload(x + c);
            UNROLL for (int i = 0; i < SCORE_ROWS; i++) acc[i] += a * vload(y + i * y_row + c);
        }
        if (rest) {
            vec a = vload(x + whole);
            UNROLL for (int i = 0; i < SCORE_ROWS; i++) acc[i] += a * vload_partial(y + i * y_row + whole, rest);
        }
        UNROLL for (int i = 0; i < SCORE_ROWS; i++) s[i * VL + q] = vreduce_add(acc[i]);
    }
}

/* SCORE_CAPPED for one tile. tanh is worth more than the way through memory, and inlined 24 times it was a tenth of the
 * code. */
NOINLINE void cap_tile(const scores *t, const vec (*acc)[MAX_WIDTH], int nv, int64_t j0, int64_t rows) {
    const vec c = vset1(t->c);
    for (int j = 0; j < nv; j++) {
        vec extreme = vload(t->extreme + j * VL);
        for (int64_t i = 0; i < rows && i < SCORE_ROWS; i++) {
            const int64_t at = (j0 + i) * t->s_row + j * VL;
            const vec bias = vload(t->s + at), h = vtanh(t->cap * acc[i][j]);
            const vec a = vselect(bias == -(real)INFINITY, bias, c * h + bias);
            vstore(t->s + at, a);
            extreme = vmax2(a, extreme);
            /* A masked pair's tanh may be NaN, and its slope must not be. */
            if (t->ds) vstore(t->ds + at, vselect(a == -(real)INFINITY, (vec){0}, h));
        }
        vstore(t->extreme + j * VL, extreme);
    }
}

INLINE void score_tile(const scores *t, int nv, enum score_mode mode, const real *y, int64_t y_row, int64_t j0,
                       int64_t rows) {
    const bool gradient = mode == SCORE_GRADIENT || mode == SCORE_GRADIENT_MASKED;
    const bool summed = mode == SCORE_SUMMED || mode == SCORE_WEIGHTS;
    const bool maximum = mode == SCORE_RAW || mode == SCORE_BIASED;
    vec acc[SCORE_ROWS][MAX_WIDTH];
    UNROLL for (int i = 0; i < SCORE_ROWS; i++) {
        UNROLL for (int j = 0; j < nv; j++) acc[i][j] = gradient ? -vload(t->shift + j * VL) : (vec){0};
    }
    if ((maximum || mode == SCORE_CAPPED) && t->given) {
        UNROLL for (int i = 0; i < SCORE_ROWS; i++) {
            UNROLL for (int j = 0; j < nv; j++) acc[i][j] = vload(t->given + (j0 + i) * t->s_row + j * VL);
        }
    } else if (nv == 1 && !gradient && t->few) {
        real s[SCORE_ROWS * VL] = {0};
        few_scores(t, y, y_row, s);
        UNROLL for (int i = 0; i < SCORE_ROWS; i++) acc[i][0] = vload(s + i * VL);
    } else {
        tile(acc, SCORE_ROWS, nv, y, y_row, 1, t->x, t->x_row, t->depth);
    }
    if (mode == SCORE_CAPPED) {
        cap_tile(t, acc, nv, j0, rows);
        return;
    }

    UNROLL for (int j = 0; j < nv; j++) {
        const vec c = vset1(t->c);
        vec shift = {0}, extreme = {0}, highest = {0};
        if (summed) shift = vload(t->shift + j * VL);
        if (mode == SCORE_SUMMED) highest = vload(t->highest + j * VL);
        if (maximum) extreme = vload(t->extreme + j * VL);
        UNROLL for (int i = 0; i < SCORE_ROWS; i++) {
            if (i >= rows) break;
            real *s = t->s + (j0 + i) * t->s_row + j * VL;
            vec a = acc[i][j];
            switch (mode) {
            case SCORE_RAW:
                vstore(s, a);
                extreme = vmax2(a, extreme);
                break;
            case SCORE_ADDED:
                vstore(s, a + vload(s));
                break;
            case SCORE_BIASED: {
                vec bias = vload(s);
                a = vselect(bias == -(real)INFINITY, bias, t->c * a + bias);
                vstore(s, a);
                extreme = vmax2(a, extreme);
                break;
            }
            case SCORE_CAPPED:
                break; /* cap_tile */
            case SCORE_SUMMED:
                a = vmulsub(c, a, shift);
                highest = vmax2(a, highest);
                a = vexp2(a);
                vstore(s, a);
                extreme += a;
                break;
            case SCORE_WEIGHTS:
                a = vexp2(vmulsub(c, a, shift) - vload(t->shift_low + j * VL));
                vstore(s, a);
                extreme += a;
                break;
            case SCORE_GRADIENT:
                vstore(t->ds + (j0 + i) * t->s_row + j * VL, vload(s) * a);
                break;
            case SCORE_GRADIENT_MASKED: {
                vec p = vload(s);
                ivec masked = (ivec)p == SIGN_BIT;
                vstore(t->ds + (j0 + i) * t->s_row + j * VL, vselect(masked, p, p * a));
                break;
            }
            }
        }
        if (summed) extreme += vload(t->extreme + j * VL);
        if (maximum || summed) vstore(t->extreme + j * VL, extreme);
        if (mode == SCORE_SUMMED) vstore(t->highest + j * VL, highest);
    }
}

/* nv and mode are constants. */
INLINE void score_panel(const scores *t, int nv, enum score_mode mode) {
    for (int64_t j0 = 0; j0 < t->n; j0 += SCORE_ROWS) {
        const bool tail = t->n - j0 < SCORE_ROWS;
        score_tile(t, nv, mode, tail ? t->y_tail : t->y + j0 * t->y_row, tail ? t->tail_row : t->y_row, j0,
                   tail ? t->n - j0 : SCORE_ROWS);
    }
}

#define DEFINE_PANEL(nv, mode)                                                                                         \
    NOINLINE void FN(score_##nv##_##mode)(const scores *t) { score_panel(t, nv, mode); }
#define DEFINE_PANELS(mode)                                                                                            \
    DEFINE_PANEL(1, mode) DEFINE_PANEL(2, mode) DEFINE_PANEL(3, mode) INLINE void FN(mode)(const scores *t, int nv) {  \
        if (nv == 1) {                                                                                                 \
            FN(score_1_##mode)(t);                                                                                     \
        } else if (nv == 2) {                                                                                          \
            FN(score_2_##mode)(t);                                                                                     \
        } else {                                                                                                       \
            FN(score_3_##mode)(t);                                                                                     \
        }                                                                                                              \
    }
DEFINE_PANELS(SCORE_RAW)
DEFINE_PANELS(SCORE_ADDED)
DEFINE_PANELS(SCORE_BIASED)
DEFINE_PANELS(SCORE_CAPPED)
DEFINE_PANELS(SCORE_SUMMED)
DEFINE_PANELS(SCORE_WEIGHTS)
DEFINE_PANELS(SCORE_GRADIENT)
DEFINE_PANELS(SCORE_GRADIENT_MASKED)
#undef DEFINE_PANELS
#undef DEFINE_PANEL

/* s (n, nv vectors) = exp2(c * s - shift - shift_low), masked pairs marked -0 where `biased`; adds the sum over keys to
 * `sum`, a tile's rows first, as the tiles do. Returns whether any pair is masked. */
NOINLINE bool FN(exponentiate)(real *s, int64_t s_row, int64_t n, int nv, real c, const real *shift,
                               const real *shift_low, real *sum, bool biased) {
    ivec any = {0};
    for (int j = 0; j < nv; j++) {
        vec m = vload(shift + j * VL), low = shift_low ? vload(shift_low + j * VL) : (vec){0};
        vec total = vload(sum + j * VL);
        const vec factor = vset1(c);
        for (int64_t i0 = 0; i0 < n; i0 += SCORE_ROWS) {
            vec part = {0};
            int64_t end = i0 + SCORE_ROWS < n ? i0 + SCORE_ROWS : n;
            for (int64_t i = i0; i < end; i++) {
                vec x = vload(s + i * s_row + j * VL);
                vec p = vexp2(vmulsub(factor, x, m) - low);
                part += p;
                if (biased) {
                    ivec masked = x == -(real)INFINITY;
                    any |= masked;
                    p = vselect(masked, vset1(-0.0), p);
                }
                vstore(s + i * s_row + j * VL, p);
            }
            total += part;
        }
        vstore(sum + j * VL, total);
    }
    return vany(any);
}

/* s = the logits of a block in log2 units (`unit` = log2 e) or as they are (`unit` = 1), after scale, cap and bias, for
 * any options; t->extreme their maximum. `bias` tells what s already holds. */
NOINLINE void FN(score_logits)(scores *t, int nv, const sdpa_problem *p, enum bias_kind bias, real unit) {
    const real scale = (real)fabs(p->scale);
    t->c = unit * scale;
    if (bias == BIAS_NONE) {
        for (int64_t j = 0; j < t->n; j++) {
            for (int x = 0; x < nv; x++) vstore(t->s + j * t->s_row + x * VL, (vec){0});
        }
    }
    if (p->softcap > 0) {
        t->cap = (real)(fabs(p->scale) / p->softcap);
        t->c = unit * (real)p->softcap;
        FN(SCORE_CAPPED)(t, nv);
    } else {
        FN(SCORE_BIASED)(t, nv);
    }
}
