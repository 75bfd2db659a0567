/* The matrix products: one register tile, instantiated per shape.
 *
 * A tile holds mr x nv accumulators; each step broadcasts mr scalars of a against nv vectors of b. With 32 registers the
 * score tile is 8 x 3 (24 accumulators, 3 vectors of b, 1 broadcast) and the others fill 24 as well; with 16 it is 4 x 3.
 * Alone in L1, share of the FMA peak (AVX-512): 8x3 98 %, 12x2 97, 6x4 95, 8x1 85; AVX2: 4x3 98, 6x2 97, and 3x4 or
 * 2x6 only 45, because they spill.
 *
 * Panels of transposed queries lie one after the other (pack_panels): in rows of all the unit's queries a panel of d = 256
 * touches 32 KB of L1 for its 24. Forward GF/s at n = 512, in turns: d = 64 80.8 to 82.0, d = 128 82.5 to 84.7, d = 256 79 to 82;
 * panels of two vectors on their accumulators: (8, 128, 64) 73.1 to 75.2, backward 71.4 to 73.6. No gain (all within 1 %):
 * the next tile's keys prefetched, values packed by columns of tiles.
 *
 * On Zen 3 (AVX2; benchmarks/tiles.c) b from L2 costs 2 to 5 points, rows a multiple of 512 bytes apart 3, and vectors
 * across cache lines, which NumPy's alignment to 16 bytes makes, 7 to 8: hence pack_rows. A vector store or permutation
 * takes the issue of two FMAs, a masked store some 40 cycles. */

#define gemm_column FN(gemm_column)
#define gemm FN(gemm)
#define added FN(added)
#define tile FN(tile)
#define gemm_columns FN(gemm_columns)
#define gemm_rows FN(gemm_rows)
#define few_columns FN(few_columns)
#define few_turns FN(few_turns)
#define few_width FN(few_width)
#define gemm_few_rows FN(gemm_few_rows)

/* sum + a x, or the products of pairs. */
INLINE vec FN(multiply_add)(bool pairs, vec sum, real a, vec x) {
#if PAIRS
    int32_t pair;
    memcpy(&pair, &a, sizeof pair);
    if (pairs) return vdot(sum, pair, x);
#endif
    (void)pairs;
    return sum + a * x;
}

/* acc (mr, nv) += a (mr, depth) b (depth, nv vectors), a[i, k] = a[i * a_row + k * a_col]. mr, nv and pairs are constants. */
INLINE void tile(vec acc[][MAX_WIDTH], int mr, int nv, bool pairs, const real *a, int64_t a_row, int64_t a_col,
                 const real *b, int64_t b_row, int64_t depth) {
    /* For 24 rows, which would take 24 registers from one base, three bases: eight queries over 65536 keys 1.15 times as
     * fast (Zen 5). */
    enum { ROWS = 8 };
    const real *rows[MOST_SCORE_ROWS / ROWS + 1];
    UNROLL for (int i = 0; i < mr; i += ROWS) {
        rows[i / ROWS] = a + i * a_row;
        if (mr > MAX_TILE_ROWS) __asm__("" : "+r"(rows[i / ROWS]));
    }
    for (int64_t k = 0; k < depth; k++) {
        vec x[MAX_WIDTH];
        UNROLL for (int j = 0; j < nv; j++) x[j] = vload(b + k * b_row + j * VL);
        UNROLL for (int i = 0; i < mr; i++) {
            real s = rows[i / ROWS][i % ROWS * a_row + k * a_col];
            UNROLL for (int j = 0; j < nv; j++) acc[i][j] = FN(multiply_add)(pairs, acc[i][j], s, x[j]);
        }
    }
}

/* c (m, n) = c + alpha * a b or, where row_scale is not NULL, row_scale[i] * c + a b. The product is summed from zero.
 * b's rows must be readable to whole vectors, a's rows to a multiple of the tile height; c is written exactly. */
typedef struct gemm {
    real *c;
    const real *a, *b, *row_scale;
    int64_t c_row, a_stride, b_row; /* elements; a's other stride is 1 */
    int64_t m, n, depth;
    int64_t seen; /* by the first query, of the keys; by each later one, one more: else a is 0; 0: all see all */
    real alpha;
    bool pairs; /* a and b hold pairs of bfloat16, `depth` of them */
} gemm;

/* What becomes of `old` in row i of c. */
INLINE vec added(const gemm *g, int64_t i, vec old, vec product) {
    return g->row_scale ? g->row_scale[i] * old + product : g->alpha * product + old;
}

/* Adds a tile to n elements of rows i0 .. i0+mr-1 of c, n not whole vectors. */
NOINLINE void FN(add_partial)(const gemm *g, const vec (*acc)[MAX_WIDTH], int mr, int64_t i0, int64_t n, real *c) {
    for (int i = 0; i < mr && i0 + i < g->m; i++) {
        real *row = c + (i0 + i) * g->c_row;
        for (int64_t j = 0; j < n; j += VL) {
            const int width = n - j < VL ? (int)(n - j) : VL;
            vstore_partial(row + j, added(g, i0 + i, vload_partial(row + j, width), acc[i][j / VL]), width);
        }
    }
}

/* One column of tiles: nv vectors wide from c, b; `n` elements of them are real, n > (nv - 1) * VL. */
INLINE void gemm_column(const gemm *g, int mr, int nv, bool a_rows_adjacent, bool pairs, int64_t n, const real *b,
                        real *c) {
    int64_t a_row = a_rows_adjacent ? 1 : g->a_stride, a_col = a_rows_adjacent ? g->a_stride : 1;
    int last = (int)(n - (nv - 1) * VL);
    for (int64_t i0 = 0; i0 < g->m; i0 += mr) {
        vec acc[MAX_TILE_ROWS][MAX_WIDTH];
        UNROLL for (int i = 0; i < mr; i++) { UNROLL for (int j = 0; j < nv; j++) acc[i][j] = (vec){0}; }
        const real *a = g->a + i0 * a_row;
        if (a_rows_adjacent) {
            int64_t depth = g->depth, seen = i0 + mr - 1 + g->seen;
            if (pairs) seen = (seen + 1) / 2;
            if (g->seen && seen < depth) depth = seen;
            tile(acc, mr, nv, pairs, a, a_row, a_col, b, g->b_row, depth);
        } else {
            const int64_t first = g->seen && i0 >= g->seen ? i0 + 1 - g->seen : 0;
            /* From the last query to the first: under a causal mask the first ones weigh most, and small terms added
             * first leave less rounding. */
            tile(acc, mr, nv, pairs, a + (g->depth - 1) * a_col, a_row, -a_col, b + (g->depth - 1) * g->b_row,
                 -g->b_row, g->depth - first);
        }
        if (last < VL) {
            vec copy[MAX_TILE_ROWS][MAX_WIDTH]; /* so that acc can stay in registers */
            UNROLL for (int i = 0; i < mr; i++) { UNROLL for (int j = 0; j < nv; j++) copy[i][j] = acc[i][j]; }
            FN(add_partial)(g, (const vec(*)[MAX_WIDTH])copy, mr, i0, n, c);
            continue;
        }
        UNROLL for (int i = 0; i < mr; i++) {
            if (i0 + i >= g->m) break;
            real *row = c + (i0 + i) * g->c_row;
            UNROLL for (int j = 0; j < nv; j++) vstore(row + j * VL, added(g, i0 + i, vload(row + j * VL), acc[i][j]));
        }
    }
}

#define DEFINE_GEMM(nv, adjacent_rows, mr)                                                                             \
    NOINLINE void FN(gemm_##nv##_##adjacent_rows)(const gemm *g, int64_t n, const real *b, real *c) {                  \
        gemm_column(g, mr, nv, adjacent_rows, false, n, b, c);                                                         \
    }
#if MAX_WIDTH == 4
DEFINE_GEMM(1, 1, 12)
DEFINE_GEMM(2, 1, 12)
DEFINE_GEMM(3, 1, 8)
DEFINE_GEMM(4, 1, 6)
DEFINE_GEMM(1, 0, 8)
DEFINE_GEMM(2, 0, 8)
DEFINE_GEMM(3, 0, 8)
#else
DEFINE_GEMM(1, 1, 12)
DEFINE_GEMM(2, 1, 6)
DEFINE_GEMM(1, 0, 8)
DEFINE_GEMM(2, 0, 6)
#if GEMM_WIDTH == 3
DEFINE_GEMM(3, 1, 4)
DEFINE_GEMM(3, 0, 4)
#endif
#endif
#undef DEFINE_GEMM

#if PAIRS
NOINLINE void FN(gemm_1_pairs)(const gemm *g, int64_t n, const real *b, real *c) {
    gemm_column(g, 12, 1, true, true, n, b, c);
}
NOINLINE void FN(gemm_4_pairs)(const gemm *g, int64_t n, const real *b, real *c) {
    gemm_column(g, 6, 4, true, true, n, b, c);
}
#endif

/* a's rows are adjacent (a[i + k * a_stride]): P V and dS K, with a = P^T or dS^T. */
INLINE void gemm_rows(const gemm *g) {
    static void (*const columns[PAIRS + 1][MAX_WIDTH + 1])(const gemm *, int64_t, const real *, real *) = {
#if GEMM_WIDTH == 4
        {NULL, FN(gemm_1_1), FN(gemm_2_1), FN(gemm_3_1), FN(gemm_4_1)},
#elif GEMM_WIDTH == 3
        {NULL, FN(gemm_1_1), FN(gemm_2_1), FN(gemm_3_1)},
#else
        {NULL, FN(gemm_1_1), FN(gemm_2_1)},
#endif
#if PAIRS
        {NULL, FN(gemm_1_pairs), NULL, NULL, FN(gemm_4_pairs)},
#endif
    };
    for (int64_t j = 0; j < g->n;) {
        int64_t n = g->n - j, vectors = (n + VL - 1) / VL;
        const real *b = g->b + j;
        real *c = g->c + j;
#if MAX_WIDTH == 4
        /* Tiles of three vectors have 8 rows and are the faster ones; 4 = 3 + 1 pays where those of four leave rows idle. */
        int64_t width = vectors == 4 && (g->m <= 6 || g->m > 8) ? 4 : vectors < 3 ? vectors : 3;
#else
        /* Tiles of three vectors have 4 rows, of two vectors 6. */
        const bool odd = vectors % 2 || (g->m + 3) / 4 * 4 < (g->m + 5) / 6 * 6;
        int64_t width = GEMM_WIDTH > 2 && vectors >= 3 && odd ? 3 : vectors < 2 ? vectors : 2;
#endif
        if (g->pairs && width < 4) width = vectors < 4 ? 1 : 4;
        if (n > width * VL) n = width * VL;
        columns[g->pairs][width](g, n, b, c);
        j += n;
    }
}

/* a's columns are adjacent (a[i * a_stride + k]): P^T dO and dS^T Q. Two vectors wide, since key blocks are multiples
 * of 8 rows and not of 6. */
INLINE void gemm_columns(const gemm *g) {
    static void (*const columns[])(const gemm *, int64_t, const real *, real *) = {
        NULL,
        FN(gemm_1_0),
        FN(gemm_2_0),
#if GEMM_WIDTH > 2
        FN(gemm_3_0)
#endif
    };
    for (int64_t j = 0; j < g->n;) {
        int64_t n = g->n - j, vectors = (n + VL - 1) / VL;
        const real *b = g->b + j;
        real *c = g->c + j;
        int64_t width = GEMM_WIDTH > 2 && vectors >= 3 && vectors % 2 ? 3 : vectors < 2 ? vectors : 2;
        if (n > width * VL) n = width * VL;
        columns[width](g, n, b, c);
        j += n;
    }
}

/* In how many turns few_columns sums: at least 8 sums hide the latency of the FMAs. */
INLINE int few_turns(int width) { return width < 8 ? 8 / width : 1; }

/* `width` vectors of one row of c, a's rows adjacent, every few_turns-th step to the same sums. `n` elements of c are real. */
INLINE void few_columns(const gemm *g, int width, int64_t i, int64_t j, int64_t n) {
    const int turns = few_turns(width), sums = turns * width;
    vec acc[16];
    UNROLL for (int x = 0; x < sums; x++) acc[x] = (vec){0};
    const real *a = g->a + i, *b = g->b + j;
    int64_t k = 0;
    for (; k + turns <= g->depth; k += turns) {
        UNROLL for (int x = 0; x < sums; x++) {
            const int64_t step = k + x / width;
            acc[x] += a[step * g->a_stride] * vload(b + step * g->b_row + x % width * VL);
        }
    }
    for (; k < g->depth; k++) {
        UNROLL for (int x = 0; x < width; x++) acc[x] += a[k * g->a_stride] * vload(b + k * g->b_row + x * VL);
    }
    UNROLL for (int x = width; x < sums; x++) acc[x % width] += acc[x];
    real *c = g->c + i * g->c_row + j;
    const int last = n < width * VL ? (int)(n - (width - 1) * VL) : VL;
    UNROLL for (int x = 0; x < width; x++) {
        const bool whole = x < width - 1 || last == VL;
        const vec old = whole ? vload(c + x * VL) : vload_partial(c + x * VL, last);
        if (whole) {
            vstore(c + x * VL, added(g, i, old, acc[x]));
        } else {
            vstore_partial(c + x * VL, added(g, i, old, acc[x]), last);
        }
    }
}

/* How many vectors of c few_columns takes where `n` elements are left: whole rows of b, if there are registers for them, as
 * halves of rows come from memory at a third of the speed (Zen 4). */
INLINE int few_width(int64_t n) { return MAX_WIDTH == 4 && n > 15 * VL ? 16 : n > 7 * VL ? 8 : n > 3 * VL ? 4 : 1; }

/* gemm_rows for few rows, of which a tile would leave most idle. */
NOINLINE void gemm_few_rows(const gemm *g) {
    for (int64_t i = 0; i < g->m; i++) {
        for (int64_t j = 0, width; j < g->n; j += width * VL) {
            const int64_t left = g->n - j;
            width = few_width(left);
            switch (width) {
#if MAX_WIDTH == 4
            case 16:
                few_columns(g, 16, i, j, left);
                break;
#endif
            case 8:
                few_columns(g, 8, i, j, left);
                break;
            case 4:
                few_columns(g, 4, i, j, left);
                break;
            default:
                few_columns(g, 1, i, j, left);
            }
        }
    }
}

/* The same product, in the same order, for operands that may hold NaN or Inf where a pair is masked: a pair that is
 * masked carries -0 in a and is skipped, not multiplied. Rare, so plain loops. */
COLD NOINLINE void FN(gemm_masked)(const gemm *g, bool a_rows_adjacent) {
    const int64_t a_row = a_rows_adjacent ? 1 : g->a_stride, a_col = a_rows_adjacent ? g->a_stride : 1;
    const bool few = a_rows_adjacent && g->m <= FEW_ROWS;
    for (int64_t i = 0; i < g->m; i++) {
        int64_t end = 0;
        int turns = 1;
        for (int64_t j = 0; j < g->n; j++) {
            if (few && j == end) {
                const int width = few_width(g->n - j);
                turns = few_turns(width);
                end += width * VL;
            }
            const int64_t whole = g->depth / turns * turns;
            real sum[8] = {0};
            for (int64_t k = 0; k < g->depth; k++) {
                const real a = g->a[i * a_row + k * a_col];
                if (a != 0 || !signbit(a)) sum[k < whole ? k % turns : 0] += a * g->b[k * g->b_row + j];
            }
            for (int x = 1; x < turns; x++) sum[0] += sum[x];
            real *c = &g->c[i * g->c_row + j];
            *c = g->row_scale ? g->row_scale[i] * *c + sum[0] : g->alpha * sum[0] + *c;
        }
    }
}

#if PAIRS
/* gemm_masked of pairs, a's rows adjacent: what a -0 in a would be multiplied with is 0. */
COLD NOINLINE void FN(gemm_masked_pairs)(const gemm *g) {
    for (int64_t i = 0; i < g->m; i++) {
        for (int64_t j = 0; j < g->n; j += VL) {
            vec acc[1][MAX_WIDTH] = {{{0}}};
            for (int64_t k = 0; k < g->depth; k++) {
                int32_t pair;
                memcpy(&pair, &g->a[i + k * g->a_stride], sizeof pair);
                const int32_t low = (pair & 0xffff) == 0x8000 ? 0 : 0xffff, high = pair >> 16 == -0x8000 ? 0 : ~0xffff;
                acc[0][0] = vdot(acc[0][0], pair, (vec)((ivec)vload(g->b + k * g->b_row + j) & (low | high)));
            }
            FN(add_partial)(g, (const vec(*)[MAX_WIDTH])acc, 1, i, g->n - j < VL ? g->n - j : VL, g->c + j);
        }
    }
}
#endif

/* The product, whichever way a is stored; `exact`: no operand can put a NaN or Inf against a masked pair. */
NOINLINE void FN(multiply)(gemm *g, bool a_rows_adjacent, bool exact) {
    if (!exact) {
#if PAIRS
        if (g->pairs) {
            FN(gemm_masked_pairs)(g);
            return;
        }
#endif
        FN(gemm_masked)(g, a_rows_adjacent);
    } else if (a_rows_adjacent && g->m <= FEW_ROWS && !g->pairs) {
        gemm_few_rows(g);
    } else if (a_rows_adjacent) {
        gemm_rows(g);
    } else {
        gemm_columns(g);
    }
}
