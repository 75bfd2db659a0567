/* Tiles of scores: keys by queries, queries in the lanes. One template for the products K Q^T and V dO^T of forward and
 * backward. The step after the product is applied to the accumulators while they are in registers. */
#ifndef SDPA_KERNEL_SCORES_H
#define SDPA_KERNEL_SCORES_H

#include "masks.h"
#include "products.h"
#include "vmath.h"

/* The rows of K and V that follow this block. Units of few queries wait for memory, so they prefetch these rows into
 * L2: a few rows every FETCH_DEPTH steps of the product if the lanes are queries, one row of K and one of V per key in
 * fast/few_queries.h. A single query does not prefetch, because the hardware fetches its rows faster by itself. Nor
 * does a unit with less than FETCH_BYTES of keys and values, which the caches hold. */
typedef struct ahead {
    const char *p[2];
    int64_t stride[2]; /* bytes from one row of K, of V, to the next */
    int64_t width[2];  /* bytes of a row */
    int64_t n_rows;
} ahead;

INLINE void fetch_ahead(const ahead *a, int64_t j0, int64_t n) {
    for (int64_t j = j0; j < j0 + n && j < a->n_rows; j++) {
        for (int x = 0; x < 2; x++) sdpa_fetch_row(a->p[x] + j * a->stride[x], a->width[x]);
    }
}

/* Sums over the keys of a block, for sum_of_four: successive tiles add to SUMS running sums in rotation. */
typedef vec tile_sums[SUMS][SCORE_WIDTH];

/* What a product is multiplied by before a cap's tanh, and the rounding error of that, which has the same sign and is not
 * 0: the two parts of an infinite product are the same infinity. */
typedef struct score_cap {
    real factor, low;
} score_cap;

typedef struct scores {
    const real *x;      /* (depth, nv vectors): a panel of transposed queries, or of dO */
    const real *y;      /* (n, depth), rows y_row apart: keys, or values */
    const real *y_tail; /* the last n % SCORE_ROWS rows, padded to SCORE_ROWS, tail_row apart */
    const real *given;  /* NULL, or scores to use instead of the products x y; shaped like s, or s itself */
    int64_t y_row, tail_row, n, depth;
    bool bf16_pairs;               /* x and y hold pairs of bfloat16, `depth` of them */
    const ahead *next;             /* or NULL */
    struct score_program *program; /* what products become before the mode's step, or NULL */
    int64_t j0;                    /* the first key, which a program sees */
    real *raw;                     /* NULL, or shaped like s: the scores that the program gets */
    real *s;                       /* (n rounded up to SCORE_ROWS, s_row) */
    real *ds;                      /* shaped like s; with a program NULL, or its slopes */
    int64_t s_row;
    const real *shift;    /* per query */
    const real *key_bias; /* per key, finite */
    real *extreme;        /* per query: running maximum or sum; SCORE_WEIGHTS: tile_sums */
    real c;
    score_cap cap;
} scores;

/* t restricted to keys first .. first+n-1; `first` is a multiple of SCORE_ROWS. */
COLD NOINLINE scores part_of(const scores *t, int64_t first, int64_t n) {
    scores part = *t;
    part.n = n;
    part.j0 += first;
    part.y += first * t->y_row;
    part.s += first * t->s_row;
    if (t->ds) part.ds += first * t->s_row;
    if (t->raw) part.raw += first * t->s_row;
    if (t->key_bias) part.key_bias += first;
    if (t->given) part.given += first * t->s_row;
    return part;
}

/* The operands of a column of a tile besides its accumulators, and the maximum or sum that it gathers. */
typedef struct tile_column {
    vec c, least, shift, extreme;
} tile_column;

INLINE void finish_element(const scores *t, enum score_mode mode, vec a, int64_t key, int64_t at, tile_column *column) {
    real *s = t->s + at;
    switch (mode) {
    case SCORE_RAW:
        vstore(s, a);
        column->extreme = vmax2(a, column->extreme);
        break;
    case SCORE_ADDED:
        vstore(s, a + vload(s));
        break;
    case SCORE_BIASED: {
        vec bias = vload(s);
        a = vselect(bias == column->least, bias, vmuladd(column->c, a, bias));
        vstore(s, a);
        column->extreme = vmax2(a, column->extreme);
        break;
    }
    case SCORE_CAPPED:
        break; /* done by cap_column */
    case SCORE_SUMMED:
        a = vexp2_quick(vmulsub(column->c, a, column->shift));
        vstore(s, a);
        column->extreme += a;
        break;
    case SCORE_BIASED_SUMMED: {
        const vec bias = vload(s);
        const ivec masked = bias == column->least;
        a = vexp2_quick(vmuladd(column->c, a, bias) - column->shift);
        a = vselect(masked, vset1(-0.0), a);
        vstore(s, a);
        column->extreme += a;
        break;
    }
    case SCORE_KEYS_SUMMED:
        a = vexp2_quick(vmuladd(column->c, a, vset1(t->key_bias[key])) - column->shift);
        vstore(s, a);
        column->extreme += a;
        break;
    case SCORE_KEYS_WEIGHTS:
        a = vexp2_above(vset1(1), vmuladd(column->c, a, vset1(t->key_bias[key])), column->shift, false);
        vstore(s, a);
        column->extreme += a;
        break;
    case SCORE_WEIGHTS:
        a = vexp2_above(column->c, a, column->shift, false);
        vstore(s, a);
        column->extreme += a;
        break;
    case SCORE_GRADIENT:
        vstore(t->ds + at, vload(s) * a);
        break;
    case SCORE_GRADIENT_MASKED: {
        vec p = vload(s);
        ivec masked = (ivec)p == SIGN_BIT;
        vstore(t->ds + at, vselect(masked, p, p * a));
        break;
    }
    }
}

/* Whether the sums of tiles rotate among SUMS places. */
INLINE bool rotates(enum score_mode mode) { return mode == SCORE_WEIGHTS || mode == SCORE_KEYS_WEIGHTS; }

INLINE bool is_summed(enum score_mode mode) {
    return mode == SCORE_SUMMED || mode == SCORE_BIASED_SUMMED || mode == SCORE_KEYS_SUMMED || rotates(mode);
}

/* The place of the maximum or sum of the tile that begins at key j0. */
INLINE real *extreme_at(const scores *t, enum score_mode mode, int64_t j0) {
    return t->extreme + (rotates(mode) ? j0 / SCORE_ROWS % SUMS : 0) * SCORE_WIDTH * VL;
}

/* Finishes `rows` rows of a column. mode is a constant; `whole`: all rows, unrolled, so that acc stays in registers. */
INLINE void finish_column(const scores *t, enum score_mode mode, const vec (*acc)[MAX_WIDTH], int j, int64_t j0,
                          int64_t rows, bool whole) {
    const bool summed = is_summed(mode);
    const bool maximum = mode == SCORE_RAW || mode == SCORE_BIASED;
    const int64_t at = j0 * t->s_row + j * VL;
    real *to = maximum || summed ? extreme_at(t, mode, j0) + j * VL : NULL;
    tile_column column = {.c = vset1(t->c), .least = vset1(-INFINITY)};
    if (summed) column.shift = vload(t->shift + j * VL);
    if (maximum) column.extreme = vload(to);
    if (whole) {
        UNROLL for (int i = 0; i < SCORE_ROWS; i++) {
            finish_element(t, mode, acc[i][j], j0 + i, at + i * t->s_row, &column);
        }
    } else {
        for (int64_t i = 0; i < rows; i++) finish_element(t, mode, acc[i][j], j0 + i, at + i * t->s_row, &column);
    }
    if (summed) column.extreme += vload(to);
    if (maximum || summed) vstore(to, column.extreme);
}

/* The tanh of a product x. */
INLINE vec capped_tanh(const score_cap *cap, vec x) { return vtanh(vmuladd(vset1(cap->factor), x, cap->low * x)); }

/* finish_column for SCORE_CAPPED. */
INLINE void cap_column(const scores *t, const vec (*acc)[MAX_WIDTH], int j, int64_t j0, int64_t rows) {
    const vec c = vset1(t->c);
    vec extreme = vload(t->extreme + j * VL);
    for (int64_t i = 0; i < rows && i < SCORE_ROWS; i++) {
        const int64_t at = (j0 + i) * t->s_row + j * VL;
        const vec x = acc[i][j], bias = vload(t->s + at), h = capped_tanh(&t->cap, x);
        const vec a = vselect(bias == -(real)INFINITY, bias, vmuladd(c, h, bias));
        vstore(t->s + at, a);
        extreme = vmax2(a, extreme);
        /* A masked pair gets 0: its tanh may be NaN, and the backward multiplies by the slope. */
        if (t->ds) vstore(t->ds + at, vselect(a == -(real)INFINITY, (vec){0}, h));
    }
    vstore(t->extreme + j * VL, extreme);
}

/* finish_column for all columns, in any mode; acc is in memory. */
#define finish_tile OF_BASE(finish_tile)
SHARED void finish_tile(const scores *t, enum score_mode mode, const vec (*acc)[MAX_WIDTH], int nv, int64_t j0,
                        int64_t rows);

#if OWNS_SHARED
SHARED void finish_tile(const scores *t, enum score_mode mode, const vec (*acc)[MAX_WIDTH], int nv, int64_t j0,
                        int64_t rows) {
    for (int j = 0; j < nv; j++) {
        switch (mode) {
#define FINISH(mode)                                                                                                   \
    case mode:                                                                                                         \
        finish_column(t, mode, acc, j, j0, rows, false);                                                               \
        break;
            FINISH(SCORE_RAW)
            FINISH(SCORE_ADDED)
            FINISH(SCORE_BIASED)
            FINISH(SCORE_SUMMED)
            FINISH(SCORE_BIASED_SUMMED)
            FINISH(SCORE_KEYS_SUMMED)
            FINISH(SCORE_WEIGHTS)
            FINISH(SCORE_KEYS_WEIGHTS)
            FINISH(SCORE_GRADIENT)
            FINISH(SCORE_GRADIENT_MASKED)
#undef FINISH
        case SCORE_CAPPED:
            cap_column(t, acc, j, j0, rows);
            break;
        }
    }
}
#endif

/* acc (tiles of SCORE_ROWS keys, nv vectors; in memory) += y x over `depth`, term by term. tiles and nv are
 * constants. */
INLINE void add_tiles(vec (*acc)[MAX_WIDTH], int tiles, int nv, bool bf16_pairs, const real *y, int64_t y_row,
                      const real *x, int64_t depth) {
    const int rows = tiles * SCORE_ROWS;
    vec sum[MOST_SCORE_ROWS][MAX_WIDTH];
    UNROLL for (int i = 0; i < rows; i++) { UNROLL for (int j = 0; j < nv; j++) sum[i][j] = acc[i][j]; }
    if (BF16_PAIRS && bf16_pairs) {
        tile(sum, rows, nv, false, true, y, y_row, 1, x, nv * VL, depth);
    } else {
        tile(sum, rows, nv, false, false, y, y_row, 1, x, nv * VL, depth);
    }
    UNROLL for (int i = 0; i < rows; i++) { UNROLL for (int j = 0; j < nv; j++) acc[i][j] = sum[i][j]; }
}

typedef void score_product(vec (*acc)[MAX_WIDTH], bool bf16_pairs, const real *y, int64_t y_row, const real *x,
                           int64_t depth);

NOINLINE void product_3x1(vec (*acc)[MAX_WIDTH], bool bf16_pairs, const real *y, int64_t y_row, const real *x,
                          int64_t depth) {
    add_tiles(acc, 3, 1, bf16_pairs, y, y_row, x, depth);
}

NOINLINE void product_1x1(vec (*acc)[MAX_WIDTH], bool bf16_pairs, const real *y, int64_t y_row, const real *x,
                          int64_t depth) {
    add_tiles(acc, 1, 1, bf16_pairs, y, y_row, x, depth);
}

NOINLINE void product_1x2(vec (*acc)[MAX_WIDTH], bool bf16_pairs, const real *y, int64_t y_row, const real *x,
                          int64_t depth) {
    add_tiles(acc, 1, 2, bf16_pairs, y, y_row, x, depth);
}

NOINLINE void product_1x3(vec (*acc)[MAX_WIDTH], bool bf16_pairs, const real *y, int64_t y_row, const real *x,
                          int64_t depth) {
    add_tiles(acc, 1, 3, bf16_pairs, y, y_row, x, depth);
}

/* The first step of the second of two chains (LONG_CHAIN); `depth` if there is one chain. */
INLINE int64_t second_chain(const scores *t, bool gradient) {
    return gradient && t->depth > LONG_CHAIN ? t->depth / 2 : t->depth;
}

/* acc (rows, nv vectors) = the products of keys from j0 on, or the scores given in their place. */
INLINE void accumulate_scores(const scores *t, int nv, bool gradient, bool given, int64_t j0, int64_t rows,
                              vec (*acc)[MAX_WIDTH]) {
    static score_product *const products[] = {NULL, product_1x1, product_1x2, SCORE_WIDTH == 3 ? product_1x3 : NULL};
    for (int j = 0; j < nv; j++) {
        const vec start = gradient ? -vload(t->shift + j * VL) : (vec){0};
        for (int64_t i = 0; i < rows; i++) acc[i][j] = given ? vload(t->given + (j0 + i) * t->s_row + j * VL) : start;
    }
    if (given) return;
    score_product *const product = rows > SCORE_ROWS ? product_3x1 : products[nv];
    const bool in_tail = t->n - j0 < SCORE_ROWS;
    const real *y = in_tail ? t->y_tail : t->y + j0 * t->y_row;
    const int64_t y_row = in_tail ? t->tail_row : t->y_row, x_row = nv * VL, second = second_chain(t, gradient),
                  parts = (t->depth + FETCH_DEPTH - 1) / FETCH_DEPTH,
                  each = parts > 1 ? (rows + parts - 1) / parts : rows;
    vec second_sum[MOST_SCORE_ROWS][MAX_WIDTH];
    for (int64_t i = 0; i < rows && second < t->depth; i++) {
        for (int j = 0; j < nv; j++) second_sum[i][j] = (vec){0};
    }
    for (int64_t k = 0, end, fetched = 0; k < t->depth; k = end, fetched += each) {
        end = k < second ? second : t->depth;
        if (t->next) {
            fetch_ahead(t->next, j0 + fetched, rows - fetched < each ? rows - fetched : each);
            if (end > k + FETCH_DEPTH) end = k + FETCH_DEPTH;
        }
        product(k < second ? acc : second_sum, t->bf16_pairs, y + k, y_row, t->x + k * x_row, end - k);
    }
    for (int64_t i = 0; i < rows && second < t->depth; i++) {
        for (int j = 0; j < nv; j++) acc[i][j] += second_sum[i][j];
    }
}

/* A panel of any width in any mode. A single vector takes three tiles at once: one tile has too few sums to hide the
 * latency of the FMAs. */
NOINLINE void score_panel(const scores *t, int nv, enum score_mode mode) {
    const bool gradient = mode == SCORE_GRADIENT || mode == SCORE_GRADIENT_MASKED;
    const bool logits = mode == SCORE_RAW || mode == SCORE_BIASED || mode == SCORE_CAPPED;
    for (int64_t j0 = 0, rows; j0 < t->n; j0 += rows) {
        vec acc[MOST_SCORE_ROWS][MAX_WIDTH];
        rows = nv == 1 && t->n - j0 >= MOST_SCORE_ROWS ? MOST_SCORE_ROWS : SCORE_ROWS;
        accumulate_scores(t, nv, gradient, logits && t->given, j0, rows, acc);
        for (int64_t i = 0; i < rows; i += SCORE_ROWS) {
            const int64_t left = t->n - j0 - i;
            finish_tile(t, mode, (const vec(*)[MAX_WIDTH])(acc + i), nv, j0 + i, left < SCORE_ROWS ? left : SCORE_ROWS);
        }
    }
}

/* One whole tile, finished in the accumulators. */
INLINE void score_whole_tile(const scores *t, enum score_mode mode, bool bf16_pairs, int64_t j0) {
    const bool gradient = mode == SCORE_GRADIENT || mode == SCORE_GRADIENT_MASKED;
    const int64_t second = second_chain(t, gradient);
    const real *y = t->y + j0 * t->y_row;
    vec acc[SCORE_ROWS][MAX_WIDTH];
    UNROLL for (int j = 0; j < SCORE_WIDTH; j++) {
        const vec start = gradient ? -vload(t->shift + j * VL) : (vec){0};
        UNROLL for (int i = 0; i < SCORE_ROWS; i++) acc[i][j] = start;
    }
    tile(acc, SCORE_ROWS, SCORE_WIDTH, false, bf16_pairs, y, t->y_row, 1, t->x, SCORE_WIDTH * VL, second);
    if (second < t->depth) {
        vec rest[SCORE_ROWS][MAX_WIDTH];
        UNROLL for (int i = 0; i < SCORE_ROWS; i++) {
            UNROLL for (int j = 0; j < SCORE_WIDTH; j++) rest[i][j] = (vec){0};
        }
        tile(rest, SCORE_ROWS, SCORE_WIDTH, false, bf16_pairs, y + second, t->y_row, 1,
             t->x + second * SCORE_WIDTH * VL, SCORE_WIDTH * VL, t->depth - second);
        UNROLL for (int i = 0; i < SCORE_ROWS; i++) {
            UNROLL for (int j = 0; j < SCORE_WIDTH; j++) acc[i][j] += rest[i][j];
        }
    }
    UNROLL for (int j = 0; j < SCORE_WIDTH; j++) {
        finish_column(t, mode, (const vec(*)[MAX_WIDTH])acc, j, j0, SCORE_ROWS, true);
    }
}

/* score_panel of SCORE_WIDTH vectors. mode and bf16_pairs are constants, so that whole tiles never leave the
 * registers. */
INLINE void score_constant(const scores *all, enum score_mode mode, bool bf16_pairs) {
    const scores t = *all; /* a copy that no store can alias */
    const bool logits = mode == SCORE_RAW || mode == SCORE_BIASED;
    const int64_t whole = logits && t.given ? 0 : t.n / SCORE_ROWS * SCORE_ROWS;
    for (int64_t j0 = 0; j0 < whole; j0 += SCORE_ROWS) score_whole_tile(&t, mode, bf16_pairs, j0);
    if (whole == t.n) return;
    scores rest = part_of(all, whole, t.n - whole);
    if (rotates(mode)) rest.extreme = extreme_at(all, mode, whole);
    score_panel(&rest, SCORE_WIDTH, mode);
}

/* score_constant without pairs, by its mode; NULL where score_panel serves. */
typedef void score_of_mode(const scores *t);
#define score_by_mode OF_BASE(score_by_mode)
#if OWNS_SHARED
NOINLINE void score_raw(const scores *t) { score_constant(t, SCORE_RAW, false); }
NOINLINE void score_biased(const scores *t) { score_constant(t, SCORE_BIASED, false); }
NOINLINE void score_summed(const scores *t) { score_constant(t, SCORE_SUMMED, false); }
NOINLINE void score_biased_summed(const scores *t) { score_constant(t, SCORE_BIASED_SUMMED, false); }
NOINLINE void score_keys_summed(const scores *t) { score_constant(t, SCORE_KEYS_SUMMED, false); }
NOINLINE void score_weights(const scores *t) { score_constant(t, SCORE_WEIGHTS, false); }
NOINLINE void score_keys_weights(const scores *t) { score_constant(t, SCORE_KEYS_WEIGHTS, false); }
NOINLINE void score_gradient(const scores *t) { score_constant(t, SCORE_GRADIENT, false); }
NOINLINE void score_gradient_masked(const scores *t) { score_constant(t, SCORE_GRADIENT_MASKED, false); }
SHARED_TABLE score_of_mode *const score_by_mode[SCORE_MODES] = {
    [SCORE_RAW] = score_raw,
    [SCORE_BIASED] = score_biased,
    [SCORE_SUMMED] = score_summed,
    [SCORE_BIASED_SUMMED] = score_biased_summed,
    [SCORE_KEYS_SUMMED] = score_keys_summed,
    [SCORE_WEIGHTS] = score_weights,
    [SCORE_KEYS_WEIGHTS] = score_keys_weights,
    [SCORE_GRADIENT] = score_gradient,
    [SCORE_GRADIENT_MASKED] = score_gradient_masked,
};
#else
extern score_of_mode *const score_by_mode[];
#endif

NOINLINE void score_summed_bf16_pairs(const scores *t) { score_constant(t, SCORE_SUMMED, true); }

/* A program and what comes before it: c * product or, if capped, c * tanh(cap * product). */
typedef struct score_program {
    program_run run;
    bool capped;
    real c; /* as in struct scores */
    score_cap cap;
} score_program;

/* Gives the program its input from the products acc (rows, nv vectors); h = the tanh of the cap, if there is one. */
INLINE void begin_tile(const scores *t, const vec (*acc)[MAX_WIDTH], vec (*h)[MAX_WIDTH], int nv, int64_t j0,
                       int64_t rows) {
    const score_program *g = t->program;
    real *to = score_register(&g->run);
    for (int64_t i = 0; i < rows; i++) {
        for (int v = 0; v < nv; v++) {
            vec s = acc[i][v];
            if (g->capped) s = h[i][v] = capped_tanh(&g->cap, s);
            s *= g->c;
            vstore(to + (i * nv + v) * VL, s);
            if (t->raw) vstore(t->raw + (j0 + i) * t->s_row + v * VL, s);
        }
    }
}

/* After the program: -inf in acc becomes a masked pair of s, a finite number that the factor would make -inf the least
 * one (see store_mask), and slopes get the cap's factor, or 1 at masked pairs. */
INLINE void end_tile(const scores *t, vec (*acc)[MAX_WIDTH], vec (*h)[MAX_WIDTH], int nv, int64_t j0, int64_t rows,
                     bool biased) {
    const score_program *g = t->program;
    const bool masks = g->run.program->masks && biased;
    for (int64_t i = 0; i < rows && (masks || t->ds); i++) {
        for (int v = 0; v < nv; v++) {
            const int64_t at = (j0 + i) * t->s_row + v * VL;
            ivec hidden = biased ? vload(t->s + at) == -(real)INFINITY : (ivec){0};
            if (masks) {
                hidden |= acc[i][v] == -(real)INFINITY;
                const ivec beyond = vset1(t->c) * acc[i][v] == -(real)INFINITY;
                const vec least = vselect(hidden, vset1(-INFINITY), vset1(-REAL_MAX));
                vstore(t->s + at, vselect(hidden | beyond, least, vload(t->s + at)));
                acc[i][v] = vselect(hidden | beyond, (vec){0}, acc[i][v]);
            }
            if (!t->ds) continue;
            vec slope = vload(t->ds + at);
            if (g->capped) slope *= vmuladd(-h[i][v], h[i][v], vset1(1));
            vstore(t->ds + at, vselect(hidden, vset1(1), slope));
        }
    }
}

/* score_panel with a program. */
NOINLINE void score_by_program(const scores *t, int nv, enum score_mode mode) {
    program_run *r = &t->program->run;
    const bool biased = mode == SCORE_BIASED || mode == SCORE_BIASED_SUMMED;
    /* With rows of all vectors the value stays in its register. */
    vec(*const value)[MAX_WIDTH] = nv == MAX_WIDTH ? (vec(*)[MAX_WIDTH])value_register(r) : NULL;
    for (int64_t j0 = 0, rows; j0 < t->n; j0 += rows) {
        vec acc[MOST_SCORE_ROWS][MAX_WIDTH], h[MOST_SCORE_ROWS][MAX_WIDTH], (*found)[MAX_WIDTH] = value ? value : acc;
        rows = nv == 1 && t->n - j0 >= MOST_SCORE_ROWS ? MOST_SCORE_ROWS : SCORE_ROWS;
        accumulate_scores(t, nv, false, t->given, j0, rows, acc);
        const int64_t n = t->n - j0 < rows ? t->n - j0 : rows;
        const program_output result = {value ? NULL : (real *)acc, MAX_WIDTH * VL};
        begin_tile(t, (const vec(*)[MAX_WIDTH])acc, h, nv, j0, n);
        r->out[SDPA_OUT_VALUE] = result;
        r->out[SDPA_OUT_SLOPE] = (program_output){t->ds ? t->ds + j0 * t->s_row : NULL, t->s_row};
        run_tile(r, t->j0 + j0, n, biased ? t->s + j0 * t->s_row : NULL, t->s_row);
        end_tile(t, found, h, nv, j0, n, biased);
        for (int64_t i = 0; i < n; i += SCORE_ROWS) {
            finish_tile(t, mode, (const vec(*)[MAX_WIDTH])(found + i), nv, j0 + i,
                        n - i < SCORE_ROWS ? n - i : SCORE_ROWS);
        }
    }
}

static void score(const scores *t, int nv, enum score_mode mode) {
    if (t->program) {
        score_by_program(t, nv, mode);
    } else if (BF16_PAIRS && t->bf16_pairs && nv == SCORE_WIDTH && mode == SCORE_SUMMED) {
        score_summed_bf16_pairs(t);
    } else if (!(BF16_PAIRS && t->bf16_pairs) && nv == SCORE_WIDTH && score_by_mode[mode]) {
        score_by_mode[mode](t);
    } else {
        score_panel(t, nv, mode);
    }
}

/* Lanes in which m is infinite or too large for vexp2_above. */
INLINE ivec is_huge(vec m) { return (m > HUGE_SCORE) | (m < -HUGE_SCORE); }

/* c * s - m. `rounded`: a huge m is taken from the rounded product (see `running`). */
INLINE vec below_maximum(real c, vec s, vec m, bool rounded) {
    const vec d = vmulsub(vset1(c), s, m);
    return rounded ? vselect(is_huge(m), c * s - m, d) : d;
}

/* Rounds c * s in huge lanes of n vectors, for exponentiate. */
COLD NOINLINE void round_products(real *s, int64_t s_row, int64_t n, ivec huge, real c) {
    for (int64_t i = 0; i < n; i++, s += s_row) vstore(s, vselect(huge, c * vload(s), vload(s)));
}

/* s (n, nv vectors) = 2^(c * s - shift - shift_low). shift_low may be NULL; shift then holds integers. With `biased`,
 * masked pairs become -0, and the result says whether there are any. Adds the sum over keys to `sum`, in the order of
 * the tiles: the rows of a tile first. The bits and the layout of `sum` are those of SCORE_SUMMED with shift_low, and
 * of SCORE_WEIGHTS without. `rounded`: see below_maximum. */
NOINLINE bool exponentiate(real *s, int64_t s_row, int64_t n, int nv, real c, const real *shift, const real *shift_low,
                           real *sum, bool biased, bool rounded) {
    const int n_sums = shift_low ? 1 : SUMS;
    ivec any = {0};
    for (int j = 0; j < nv; j++) {
        const vec m = vload(shift + j * VL), low = shift_low ? vload(shift_low + j * VL) : (vec){0};
        const ivec huge = is_huge(m);
        const vec integer = vselect(huge, (vec){0}, m);
        const bool any_huge = vany(huge), real_shift = shift_low || any_huge;
        vec factor = vset1(c);
        if (any_huge && rounded && c != 1) {
            round_products(s + j * VL, s_row, n, huge, c);
            factor = vselect(huge, vset1(1), factor);
        }
        for (int64_t i0 = 0; i0 < n; i0 += SCORE_ROWS) {
            vec part = {0};
            int64_t end = i0 + SCORE_ROWS < n ? i0 + SCORE_ROWS : n;
            for (int64_t i = i0; i < end; i++) {
                const vec x = vload(s + i * s_row + j * VL);
                vec p = {0};
                if (real_shift) p = vexp2(vmulsub(factor, x, m) - low);
                if (!shift_low) p = vselect(huge, p, vexp2_above(factor, x, integer, true));
                part += p;
                if (biased) {
                    ivec masked = x == -(real)INFINITY;
                    any |= masked;
                    p = vselect(masked, vset1(-0.0), p);
                }
                vstore(s + i * s_row + j * VL, p);
            }
            real *to = sum + i0 / SCORE_ROWS % n_sums * SCORE_WIDTH * VL + j * VL;
            vstore(to, vload(to) + part);
        }
    }
    return vany(any);
}

#endif
