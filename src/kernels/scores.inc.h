/* Tiles of scores: keys by queries, queries in the lanes. One template for the forward's and the backward's products
 * K Q^T and V dO^T, with what follows them fused onto the accumulators while they are in registers. */

#define scores FN(scores)
#define ahead FN(ahead)
#define fetch_ahead FN(fetch_ahead)
#define panel_of FN(panel_of)
#define finish_column FN(finish_column)
#define cap_column FN(cap_column)
#define finish_tile FN(finish_tile)
#define score_panel FN(score_panel)
#define score_whole_tiles FN(score_whole_tiles)

/* Rows of K and V that come after the block's. Where a unit has so few queries that they come from memory faster than they
 * are needed, or nearly so, a panel brings them into L2 as it goes, from FETCH_BYTES of keys and values on: where caches hold
 * them it costs 5 to 10 %. Queries in the lanes bring a few rows every FETCH_DEPTH steps of their product, which so goes on
 * meanwhile (Zen 5, eight queries, d = 128: 5.9 to 4.8 ms over 65536 keys); few.inc.h brings a row of each per key (Zen 4,
 * eight queries, d = 128: 5.4 to 4.3 ms; spread over the products with the values 5.4). A single query waits for nothing else
 * than its rows, and the hardware brings them faster by itself. */
typedef struct ahead {
    const char *p[2];
    int64_t row[2], bytes[2], n; /* bytes, bytes, rows */
} ahead;

INLINE void fetch_ahead(const ahead *a, int64_t j0, int64_t n) {
    for (int64_t j = j0; j < j0 + n && j < a->n; j++) {
        for (int x = 0; x < 2; x++) {
            const char *row = a->p[x] + j * a->row[x];
            for (int64_t at = 0; at < a->bytes[x]; at += 64) __builtin_prefetch(row + at, 0, 2);
        }
    }
}

/* Sums over the keys of a block, tile by tile in turn: the fewer terms a running sum has, the less it errs. */
typedef vec FN(tile_sums)[SUMS][SCORE_WIDTH];

INLINE vec FN(add_sums)(const FN(tile_sums) sum, int x) { return (sum[0][x] + sum[1][x]) + (sum[2][x] + sum[3][x]); }

typedef struct scores {
    const real *x;      /* (depth, nv vectors): a panel of transposed queries, or of dO */
    const real *y;      /* (n, depth), rows y_row apart: keys, or values */
    const real *y_tail; /* the last n % SCORE_ROWS rows, padded to SCORE_ROWS, tail_row apart */
    const real *given;  /* like s, or s itself: the products, where they are not x y; else NULL */
    int64_t x_row;      /* elements; 0: nv vectors */
    int64_t y_row, tail_row, n, depth;
    int64_t seen;      /* as of gemm: scores beyond need not be computed */
    bool pairs;        /* x and y hold pairs of bfloat16, `depth` of them */
    const ahead *next; /* or NULL */
    real *s;           /* (n rounded up to SCORE_ROWS, s_row) */
    real *ds;          /* like s */
    int64_t s_row;
    const real *shift;    /* per query */
    real *extreme;        /* per query: running maximum or sum; SCORE_WEIGHTS: tile_sums */
    real c, cap, cap_low; /* cap_low: what rounding took from cap */
} scores;

/* Of keys first .. first+n-1, `first` a multiple of SCORE_ROWS. */
COLD NOINLINE scores FN(part_of)(const scores *t, int64_t first, int64_t n) {
    scores part = *t;
    part.n = n;
    part.y += first * t->y_row;
    part.s += first * t->s_row;
    if (t->ds) part.ds += first * t->s_row;
    if (t->given) part.given += first * t->s_row;
    return part;
}

/* How many of n_i queries that are left the next panel takes: a panel of one vector leaves most of a tile idle, so four
 * vectors are split evenly. */
INLINE int64_t panel_of(int64_t n_i) {
    const int64_t vectors = (n_i + VL - 1) / VL;
    const int64_t most = (vectors == SCORE_WIDTH + 1 ? SCORE_WIDTH - 1 : SCORE_WIDTH) * VL;
    return n_i < most ? n_i : most;
}

/* Element j0, j of s and ds from that of acc; what its column needs besides, or gathers. mode is a constant. */
typedef struct FN(column) {
    vec c, least, shift, extreme;
} FN(column);

INLINE void FN(finish_element)(const scores *t, enum score_mode mode, vec a, int64_t at, FN(column) * column) {
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
        a = vselect(bias == column->least, bias, column->c * a + bias);
        vstore(s, a);
        column->extreme = vmax2(a, column->extreme);
        break;
    }
    case SCORE_CAPPED:
        break; /* cap_column */
    case SCORE_SUMMED:
        a = vexp2_quick(vmulsub(column->c, a, column->shift));
        vstore(s, a);
        column->extreme += a;
        break;
    case SCORE_BIASED_SUMMED: {
        const vec bias = vload(s);
        const ivec masked = bias == column->least;
        a = vexp2_quick(column->c * a + bias - column->shift);
        a = vselect(masked, vset1(-0.0), a);
        vstore(s, a);
        column->extreme += a;
        break;
    }
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

INLINE bool FN(sums)(enum score_mode mode) {
    return mode == SCORE_SUMMED || mode == SCORE_BIASED_SUMMED || mode == SCORE_WEIGHTS;
}

/* The part of t->extreme that belongs to the tile of key j0. */
INLINE real *FN(extreme_at)(const scores *t, enum score_mode mode, int64_t j0) {
    return t->extreme + (mode == SCORE_WEIGHTS ? j0 / SCORE_ROWS % SUMS : 0) * SCORE_WIDTH * VL;
}

/* A column of a tile, `rows` of its rows. mode is a constant; `whole`: all rows, unrolled, with acc in registers. */
INLINE void finish_column(const scores *t, enum score_mode mode, const vec (*acc)[MAX_WIDTH], int j, int64_t j0,
                          int64_t rows, bool whole) {
    const bool summed = FN(sums)(mode);
    const bool maximum = mode == SCORE_RAW || mode == SCORE_BIASED;
    real factor = t->c, infinity = -(real)INFINITY;
    /* Read anew for each tile: a register that holds them meanwhile is one that the tile lacks. */
    if (mode == SCORE_BIASED || mode == SCORE_BIASED_SUMMED) __asm__("" : "+m"(factor), "+m"(infinity));
    const int64_t at = j0 * t->s_row + j * VL;
    real *to = maximum || summed ? FN(extreme_at)(t, mode, j0) + j * VL : NULL;
    FN(column) column = {.c = vset1(factor), .least = vset1(infinity)};
    if (summed) column.shift = vload(t->shift + j * VL);
    if (maximum) column.extreme = vload(to);
    if (whole) {
        UNROLL for (int i = 0; i < SCORE_ROWS; i++) {
            FN(finish_element)(t, mode, acc[i][j], at + i * t->s_row, &column);
        }
    } else {
        for (int64_t i = 0; i < rows; i++) FN(finish_element)(t, mode, acc[i][j], at + i * t->s_row, &column);
    }
    if (summed) column.extreme += vload(to);
    if (maximum || summed) vstore(to, column.extreme);
}

/* finish_column for SCORE_CAPPED. */
INLINE void cap_column(const scores *t, const vec (*acc)[MAX_WIDTH], int j, int64_t j0, int64_t rows) {
    const vec c = vset1(t->c);
    vec extreme = vload(t->extreme + j * VL);
    for (int64_t i = 0; i < rows && i < SCORE_ROWS; i++) {
        const int64_t at = (j0 + i) * t->s_row + j * VL;
        const vec bias = vload(t->s + at), h = vtanh(t->cap * acc[i][j] + t->cap_low * acc[i][j]);
        const vec a = vselect(bias == -(real)INFINITY, bias, c * h + bias);
        vstore(t->s + at, a);
        extreme = vmax2(a, extreme);
        /* A masked pair's tanh may be NaN, and its slope must not be. */
        if (t->ds) vstore(t->ds + at, vselect(a == -(real)INFINITY, (vec){0}, h));
    }
    vstore(t->extreme + j * VL, extreme);
}

/* All modes and widths, by way of memory. */
NOINLINE void finish_tile(const scores *t, enum score_mode mode, const vec (*acc)[MAX_WIDTH], int nv, int64_t j0,
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
            FINISH(SCORE_WEIGHTS)
            FINISH(SCORE_GRADIENT)
            FINISH(SCORE_GRADIENT_MASKED)
#undef FINISH
        case SCORE_CAPPED:
            cap_column(t, acc, j, j0, rows);
            break;
        }
    }
}

/* acc (mr, nv vectors, in memory) += y x over `depth`, term by term. */
#define DEFINE_PRODUCT(mr, nv, pairs)                                                                                  \
    NOINLINE void FN(score_product_##mr##x##nv##_##pairs)(vec(*acc)[MAX_WIDTH], const real *y, int64_t y_row,          \
                                                          const real *x, int64_t x_row, int64_t depth) {               \
        vec sum[mr * SCORE_ROWS][MAX_WIDTH];                                                                           \
        UNROLL for (int i = 0; i < mr * SCORE_ROWS; i++) {                                                             \
            UNROLL for (int j = 0; j < nv; j++) sum[i][j] = acc[i][j];                                                 \
        }                                                                                                              \
        tile(sum, mr *SCORE_ROWS, nv, pairs, y, y_row, 1, x, x_row, depth);                                            \
        UNROLL for (int i = 0; i < mr * SCORE_ROWS; i++) {                                                             \
            UNROLL for (int j = 0; j < nv; j++) acc[i][j] = sum[i][j];                                                 \
        }                                                                                                              \
    }
#define DEFINE_PRODUCTS(pairs)                                                                                         \
    DEFINE_PRODUCT(3, 1, pairs) DEFINE_PRODUCT(1, 1, pairs) DEFINE_PRODUCT(1, 2, pairs) DEFINE_PRODUCT(1, 3, pairs)
#define PRODUCTS(pairs)                                                                                                \
    {FN(score_product_3x1_##pairs), FN(score_product_1x1_##pairs), FN(score_product_1x2_##pairs),                      \
     FN(score_product_1x3_##pairs)},
DEFINE_PRODUCTS(0)
#if PAIRS
DEFINE_PRODUCTS(1)
#endif
/* By pairs, then by vectors; the first is that of three tiles of one vector. */
static void (*const FN(score_product)[PAIRS + 1][SCORE_WIDTH + 1])(vec (*)[MAX_WIDTH], const real *, int64_t,
                                                                   const real *, int64_t, int64_t) = {PRODUCTS(0)
#if PAIRS
                                                                                                          PRODUCTS(1)
#endif
};
#undef PRODUCTS
#undef DEFINE_PRODUCTS
#undef DEFINE_PRODUCT

/* Where the second of two chains begins (LONG_CHAIN), or depth. */
INLINE int64_t FN(second_chain)(const scores *t, bool gradient) {
    return gradient && t->depth > LONG_CHAIN ? t->depth / 2 : t->depth;
}

/* A panel of any width in any mode. A single vector goes through three tiles at once, for one would wait for its few sums. */
NOINLINE void score_panel(const scores *t, int nv, enum score_mode mode) {
    const bool gradient = mode == SCORE_GRADIENT || mode == SCORE_GRADIENT_MASKED;
    const bool logits = mode == SCORE_RAW || mode == SCORE_BIASED || mode == SCORE_CAPPED;
    const bool given = logits && t->given;
    const int64_t second = FN(second_chain)(t, gradient), x_row = t->x_row ? t->x_row : nv * VL;
    for (int64_t j0 = 0, n_tiles; j0 < t->n; j0 += n_tiles * SCORE_ROWS) {
        const int64_t left = t->n - j0;
        n_tiles = nv == 1 && left >= MOST_SCORE_ROWS ? MOST_SCORE_ROWS / SCORE_ROWS : 1;
        const real *y = left < SCORE_ROWS ? t->y_tail : t->y + j0 * t->y_row;
        const int64_t y_row = left < SCORE_ROWS ? t->tail_row : t->y_row;
        vec acc[MOST_SCORE_ROWS][MAX_WIDTH];
        for (int j = 0; j < nv; j++) {
            const vec start = gradient ? -vload(t->shift + j * VL) : (vec){0};
            for (int64_t i = 0; i < n_tiles * SCORE_ROWS; i++) {
                acc[i][j] = given ? vload(t->given + (j0 + i) * t->s_row + j * VL) : start;
            }
        }
        const int64_t rows = n_tiles * SCORE_ROWS, parts = (t->depth + FETCH_DEPTH - 1) / FETCH_DEPTH,
                      each = parts > 1 ? (rows + parts - 1) / parts : rows;
        vec second_sum[MOST_SCORE_ROWS][MAX_WIDTH];
        for (int64_t i = 0; i < rows && second < t->depth; i++) {
            for (int j = 0; j < nv; j++) second_sum[i][j] = (vec){0};
        }
        for (int64_t k = 0, end, fetched = 0; k < t->depth && !given; k = end, fetched += each) {
            end = k < second ? second : t->depth;
            if (t->next) {
                fetch_ahead(t->next, j0 + fetched, rows - fetched < each ? rows - fetched : each);
                if (end > k + FETCH_DEPTH) end = k + FETCH_DEPTH;
            }
            FN(score_product)
            [t->pairs][n_tiles > 1 ? 0 : nv](k < second ? acc : second_sum, y + k, y_row, t->x + k * x_row, x_row,
                                             end - k);
        }
        for (int64_t i = 0; i < rows && second < t->depth; i++) {
            for (int j = 0; j < nv; j++) acc[i][j] += second_sum[i][j];
        }
        for (int64_t i = 0; i < rows; i += SCORE_ROWS) {
            finish_tile(t, mode, (const vec(*)[MAX_WIDTH])(acc + i), nv, j0 + i,
                        left - i < SCORE_ROWS ? left - i : SCORE_ROWS);
        }
    }
}

#ifndef __OPTIMIZE_SIZE__ /* the generic kernels: without these no slower, and a tenth smaller */
/* finish_element of row j. `sum`: of the rows of its tile. */
INLINE void FN(finish_row)(const scores *t, enum score_mode mode, int nv, int64_t j, const vec *row, vec *sum) {
    UNROLL for (int x = 0; x < nv; x++) {
        FN(column) column = {.c = vset1(t->c), .least = vset1(-INFINITY), .extreme = sum[x]};
        column.shift = vload(t->shift + x * VL);
        FN(finish_element)(t, mode, row[x], j * t->s_row + x * VL, &column);
        sum[x] = column.extreme;
    }
}

/* The first `whole` keys, whole tiles, of modes that sum: a tile's rows are finished while the next tile is multiplied, each
 * after its share of the depth; or, with sdpa_half_vectors, before that. */
INLINE void FN(score_by_rows)(const scores *t, int nv, enum score_mode mode, bool pairs, int64_t whole) {
    const bool later = !sdpa_half_vectors;
    const int64_t behind = later ? SCORE_ROWS : 0, n_shares = later ? SCORE_ROWS : 1,
                  share = (t->depth + n_shares - 1) / n_shares;
    vec before[SCORE_ROWS][SCORE_WIDTH], sum[SCORE_WIDTH];
    for (int64_t j0 = 0; j0 < whole + behind; j0 += SCORE_ROWS) {
        vec acc[SCORE_ROWS][MAX_WIDTH];
        UNROLL for (int x = 0; x < nv; x++) {
            UNROLL for (int i = 0; i < SCORE_ROWS; i++) acc[i][x] = (vec){0};
            sum[x] = (vec){0};
        }
        for (int64_t i = 0; i < n_shares; i++) {
            const int64_t k = i * share, left = j0 < whole ? t->depth - k : 0;
            tile(acc, SCORE_ROWS, nv, pairs, t->y + j0 * t->y_row + k, t->y_row, 1, t->x + k * nv * VL, nv * VL,
                 left < share ? left : share);
            if (j0 > 0 && later) FN(finish_row)(t, mode, nv, j0 - SCORE_ROWS + i, before[i], sum);
        }
        UNROLL for (int i = 0; i < SCORE_ROWS; i++) { UNROLL for (int x = 0; x < nv; x++) before[i][x] = acc[i][x]; }
        /* From memory, which leaves registers for the constants; all eight rows unrolled are no faster. */
        _Pragma("GCC unroll 2") for (int i = 0; i < SCORE_ROWS && !later; i++) {
            FN(finish_row)(t, mode, nv, j0 + i, before[i], sum);
        }
        if (j0 >= behind) {
            real *to = FN(extreme_at)(t, mode, j0 - behind);
            UNROLL for (int x = 0; x < nv; x++) vstore(to + x * VL, sum[x] + vload(to + x * VL));
        }
    }
}

/* What panels do most, on the accumulators; all modes and widths so would be a fifth of the wheel. */
INLINE void score_whole_tiles(const scores *all, int nv, enum score_mode mode, bool pairs) {
    const scores t = *all; /* which no store can change */
    const bool gradient = mode == SCORE_GRADIENT, logits = mode == SCORE_RAW || mode == SCORE_BIASED;
    const int64_t second = FN(second_chain)(&t, gradient),
                  whole = logits && t.given ? 0 : t.n / SCORE_ROWS * SCORE_ROWS;
    const bool by_rows = BY_ROWS && FN(sums)(mode);
    if (by_rows) FN(score_by_rows)(&t, nv, mode, pairs, whole);
    for (int64_t j0 = 0; j0 < whole && !by_rows; j0 += SCORE_ROWS) {
        const real *y = t.y + j0 * t.y_row;
        vec acc[SCORE_ROWS][MAX_WIDTH];
        UNROLL for (int j = 0; j < nv; j++) {
            const vec start = gradient ? -vload(t.shift + j * VL) : (vec){0};
            UNROLL for (int i = 0; i < SCORE_ROWS; i++) acc[i][j] = start;
        }
        tile(acc, SCORE_ROWS, nv, pairs, y, t.y_row, 1, t.x, nv * VL, second);
        if (second < t.depth) {
            vec rest[SCORE_ROWS][MAX_WIDTH];
            UNROLL for (int i = 0; i < SCORE_ROWS; i++) { UNROLL for (int j = 0; j < nv; j++) rest[i][j] = (vec){0}; }
            tile(rest, SCORE_ROWS, nv, pairs, y + second, t.y_row, 1, t.x + second * nv * VL, nv * VL,
                 t.depth - second);
            UNROLL for (int i = 0; i < SCORE_ROWS; i++) { UNROLL for (int j = 0; j < nv; j++) acc[i][j] += rest[i][j]; }
        }
        UNROLL for (int j = 0; j < nv; j++) {
            finish_column(&t, mode, (const vec(*)[MAX_WIDTH])acc, j, j0, SCORE_ROWS, true);
        }
    }
    if (whole == t.n) return;
    scores rest = FN(part_of)(all, whole, t.n - whole);
    if (mode == SCORE_WEIGHTS) rest.extreme = FN(extreme_at)(all, mode, whole);
    score_panel(&rest, nv, mode);
}

#define DEFINE_SCORE(nv, name, mode, pairs)                                                                            \
    NOINLINE void FN(score_##nv##_##name)(const scores *t) { score_whole_tiles(t, nv, mode, pairs); }
DEFINE_SCORE(3, raw, SCORE_RAW, false)
DEFINE_SCORE(3, biased, SCORE_BIASED, false)
DEFINE_SCORE(3, summed, SCORE_SUMMED, false)
DEFINE_SCORE(3, weights, SCORE_WEIGHTS, false)
DEFINE_SCORE(3, gradient, SCORE_GRADIENT, false)
#if SDPA_REAL == 32 || BY_ROWS
DEFINE_SCORE(3, biased_summed, SCORE_BIASED_SUMMED, false)
#endif
#if SDPA_REAL == 32 /* of 128 queries a quarter; of float64's at most a sixteenth */
DEFINE_SCORE(2, summed, SCORE_SUMMED, false)
DEFINE_SCORE(2, weights, SCORE_WEIGHTS, false)
DEFINE_SCORE(2, gradient, SCORE_GRADIENT, false)
#endif
#if PAIRS
DEFINE_SCORE(3, summed_pairs, SCORE_SUMMED, true)
#endif
#undef DEFINE_SCORE
#endif

static void FN(score)(const scores *t, int nv, enum score_mode mode);

#if SKIPS
/* A panel whose later vectors see more keys: the first tiles are of all vectors, the next without the first, and so on. What
 * they leave out is masked in s and, as -0, in P and dS. */
COLD NOINLINE void FN(score_seen)(const scores *t, int nv, enum score_mode mode) {
    real *left_out = mode == SCORE_GRADIENT_MASKED ? t->ds : mode == SCORE_BIASED_SUMMED ? t->s : NULL;
    int64_t end;
    for (int64_t x = 0, j = 0; x < nv && j < t->n; x++, j = end) {
        end = x == nv - 1 ? t->n : round_up(t->seen + (x + 1) * VL - 1, SCORE_ROWS);
        if (end > t->n) end = t->n;
        scores part = FN(part_of)(t, j, end - j);
        part.seen = 0;
        part.x += x * VL;
        if (x > 0) part.x_row = nv * VL;
        part.s += x * VL;
        if (t->ds) part.ds += x * VL;
        if (t->given) part.given += x * VL;
        part.shift += x * VL;
        part.extreme += x * VL;
        for (int64_t i = j; i < t->n && left_out && x > 0; i++) {
            vstore(left_out + i * t->s_row + (x - 1) * VL, vset1(-0.0));
        }
        if (part.n > 0) FN(score)(&part, nv - (int)x, mode);
    }
}
#endif

static void FN(score)(const scores *t, int nv, enum score_mode mode) {
#if SKIPS
    if (t->seen) {
        FN(score_seen)(t, nv, mode);
        return;
    }
#endif
#ifndef __OPTIMIZE_SIZE__
    static void (*const quick[PAIRS + 1][SCORE_WIDTH + 1][SCORE_GRADIENT_MASKED + 1])(const scores *) = {
        [0][3] = {[SCORE_RAW] = FN(score_3_raw),
                  [SCORE_BIASED] = FN(score_3_biased),
                  [SCORE_SUMMED] = FN(score_3_summed),
#if SDPA_REAL == 32 || BY_ROWS
                  [SCORE_BIASED_SUMMED] = FN(score_3_biased_summed),
#endif
                  [SCORE_WEIGHTS] = FN(score_3_weights),
                  [SCORE_GRADIENT] = FN(score_3_gradient)},
#if SDPA_REAL == 32
        [0][2] = {[SCORE_SUMMED] = FN(score_2_summed),
                  [SCORE_WEIGHTS] = FN(score_2_weights),
                  [SCORE_GRADIENT] = FN(score_2_gradient)},
#endif
#if PAIRS
        [1][3] = {[SCORE_SUMMED] = FN(score_3_summed_pairs)},
#endif
    };
    if (quick[t->pairs][nv][mode] && !t->x_row) {
        quick[t->pairs][nv][mode](t);
        return;
    }
#endif
    score_panel(t, nv, mode);
}

/* Whether vexp2_above cannot take m as it is: too large, or infinite. */
INLINE ivec FN(is_huge)(vec m) { return (m > HUGE_SCORE) | (m < -HUGE_SCORE); }

/* s (n, nv vectors) = 2^(c * s - shift - shift_low), without shift_low where it is NULL: then shift holds integers.
 * Masked pairs are marked -0 where `biased`. Adds the sum over keys to `sum`, a tile's rows first, as the tiles do. Returns
 * whether any pair is masked. The bits and the form of `sum` are those of SCORE_SUMMED with shift_low and of SCORE_WEIGHTS
 * without. */
NOINLINE bool FN(exponentiate)(real *s, int64_t s_row, int64_t n, int nv, real c, const real *shift,
                               const real *shift_low, real *sum, bool biased) {
    const int n_sums = shift_low ? 1 : SUMS;
    ivec any = {0};
    for (int j = 0; j < nv; j++) {
        const vec m = vload(shift + j * VL), low = shift_low ? vload(shift_low + j * VL) : (vec){0}, factor = vset1(c);
        const ivec huge = FN(is_huge)(m);
        const vec integer = vselect(huge, (vec){0}, m);
        const bool real_shift = shift_low || vany(huge);
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

/* log2(e) as it is in a call's logits, whose factor is rounded: for between lse and log2 units, where that is a part of what
 * lse errs by. The weights do not mind. */
INLINE double FN(log2_e)(const sdpa_problem *p) {
    const double epsilon = SDPA_REAL == 32 ? FLT_EPSILON : DBL_EPSILON;
    const double factor = p->softcap > 0 ? p->softcap : fabs(p->scale), unit = (real)(factor * M_LOG2E) / factor;
    return fabs(unit - M_LOG2E) < epsilon ? unit : M_LOG2E; /* it is not where the factor is 0 or subnormal */
}

/* s = the logits of a block in log2 units (`unit` = log2 e) or as they are (`unit` = 1), after scale, cap and bias, for
 * any options; t->extreme their maximum. `bias` tells what s already holds. */
NOINLINE void FN(score_logits)(scores *t, int nv, const sdpa_problem *p, enum bias_kind bias, double unit) {
    t->c = (real)(unit * fabs(p->scale));
    if (bias == BIAS_NONE) {
        for (int64_t j = 0; j < t->n; j++) {
            for (int x = 0; x < nv; x++) vstore(t->s + j * t->s_row + x * VL, (vec){0});
        }
    }
    if (p->softcap > 0) {
        const double cap = fabs(p->scale) / p->softcap;
        t->cap = (real)cap;
        t->cap_low = (real)(cap - (double)t->cap);
        t->c = (real)(unit * p->softcap);
        FN(score)(t, nv, SCORE_CAPPED);
    } else {
        FN(score)(t, nv, SCORE_BIASED);
    }
}

/* The same but for a factor, which is returned: the products themselves where logits are nothing else. */
INLINE real FN(score_products)(scores *t, int nv, const sdpa_problem *p, enum bias_kind bias, double unit) {
    if (bias != BIAS_NONE || p->softcap > 0) {
        FN(score_logits)(t, nv, p, bias, unit);
        return 1;
    }
    if (t->given != t->s) {
        FN(score)(t, nv, SCORE_RAW);
    } else {
        for (int x = 0; x < nv; x++) {
            vec most = vload(t->extreme + x * VL);
            for (int64_t j = 0; j < t->n; j++) most = vmax2(vload(t->s + j * t->s_row + x * VL), most);
            vstore(t->extreme + x * VL, most);
        }
    }
    return (real)(fabs(p->scale) * unit);
}
