/* The matrix products: one register tile, instantiated per shape.
 *
 * A tile holds mr x nv accumulators; each step broadcasts mr scalars of a against nv vectors of b. With 32 registers
 * the score tile is 8 x 3 (24 accumulators, 3 vectors of b, 1 broadcast) and the others fill 24 as well; with 16 it is
 * 4 x 3, with NEON 8 x 2 (tile_by_lanes). Other shapes spill or wait for loads: docs/history/attempts.md has the figures. */
#ifndef SDPA_KERNEL_PRODUCTS_H
#define SDPA_KERNEL_PRODUCTS_H

#include "fast/bf16_quads.h"
#include "pack.h"
#include "tiles.h"

/* sum + a x; with `bf16_pairs`, a and x hold pairs of bfloat16. */
INLINE vec multiply_add(bool bf16_pairs, vec sum, real a, vec x) {
    if (!BF16_PAIRS || !bf16_pairs) return vmuladd(vset1(a), x, sum);
    int32_t pair;
    memcpy(&pair, &a, sizeof pair);
    return vdot(sum, pair, x);
}

/* The first steps of a tile, in which a vector of a serves VL rows, where they are adjacent, or VL steps: this saves most
 * loads of single elements. Returns the number of these steps. */
INLINE int64_t tile_by_lanes(vec acc[][MAX_WIDTH], int mr, int nv, bool a_rows_adjacent, const real *a, int64_t a_row,
                             int64_t a_col, const real *b, int64_t b_row, int64_t depth) {
    if (!HAS_LANES) return 0;
    const bool fits = a_rows_adjacent ? mr % VL == 0 : mr * nv <= 16; /* the vectors of a need registers, too */
    if (!fits) return 0;
    const bool backward = !a_rows_adjacent && a_col < 0;
    const int steps = a_rows_adjacent ? 1 : VL, loads = a_rows_adjacent ? mr / VL : mr;
    int64_t k = 0;
    for (; k + steps <= depth; k += steps) {
        const real *first = a + k * a_col - (backward ? VL - 1 : 0);
        vec s[MAX_TILE_ROWS];
        UNROLL for (int i = 0; i < loads; i++) s[i] = vload(first + (a_rows_adjacent ? i * VL : i * a_row));
        UNROLL for (int l = 0; l < steps; l++) {
            vec x[MAX_WIDTH];
            UNROLL for (int j = 0; j < nv; j++) x[j] = vload(b + (k + l) * b_row + j * VL);
            UNROLL for (int i = 0; i < mr; i++) {
                const int lane = a_rows_adjacent ? i % VL : backward ? VL - 1 - l : l;
                const vec from = s[a_rows_adjacent ? i / VL : i];
                UNROLL for (int j = 0; j < nv; j++) acc[i][j] = vmuladd_lane(from, lane, x[j], acc[i][j]);
            }
        }
    }
    return k;
}

/* acc (mr, nv) += a (mr, depth) b (depth, nv vectors), a[i, k] = a[i * a_row + k * a_col]; a_row is 1 where a's rows are
 * adjacent, otherwise a_col is 1 or -1. mr, nv, a_rows_adjacent and bf16_pairs are constants. */
INLINE void tile(vec acc[][MAX_WIDTH], int mr, int nv, bool a_rows_adjacent, bool bf16_pairs, const real *a,
                 int64_t a_row, int64_t a_col, const real *b, int64_t b_row, int64_t depth) {
    /* A base pointer for every 8 rows: from a single base, the distances of 24 rows would take 24 registers. */
    enum { ROWS = 8 };
    const real *rows[MOST_SCORE_ROWS / ROWS + 1];
    UNROLL for (int i = 0; i < mr; i += ROWS) rows[i / ROWS] = a + i * a_row;
    int64_t k = bf16_pairs ? tile_by_quads(acc, mr, nv, a_rows_adjacent, a, a_row, a_col, b, b_row, depth)
                           : tile_by_lanes(acc, mr, nv, a_rows_adjacent, a, a_row, a_col, b, b_row, depth);
    for (; k < depth; k++) {
        vec x[MAX_WIDTH];
        UNROLL for (int j = 0; j < nv; j++) x[j] = vload(b + k * b_row + j * VL);
        UNROLL for (int i = 0; i < mr; i++) {
            const real s = rows[i / ROWS][i % ROWS * a_row + k * a_col];
            UNROLL for (int j = 0; j < nv; j++) acc[i][j] = multiply_add(bf16_pairs, acc[i][j], s, x[j]);
        }
    }
}

/* c (m, n) = c + alpha * a b or, where row_scale is not NULL, row_scale[i] * c + a b, for a with adjacent rows alone. The
 * product is summed from zero. b's rows must be readable to whole vectors, a's rows to a multiple of the tile height; c
 * is written exactly. */
typedef struct gemm {
    real *c;
    const real *a, *b, *row_scale;
    sdpa_matrix narrow; /* b, if it is narrow_rows: then m is 1 and no pair is masked; else `data` is NULL */
    sdpa_matrix across; /* likewise, rows_across */
    int64_t c_row, a_stride, b_row; /* elements; a's other stride is 1 */
    int64_t m, n, depth;
    int64_t diagonal; /* query i sees only keys j < diagonal + i, and a is 0 elsewhere; 0: every query sees all keys */
    real alpha;
    bool bf16_pairs; /* a and b hold pairs of bfloat16, `depth` of them */
    bool in_order;   /* every element is a single sum, from the first step to the last */
    bool fresh;      /* c is not initialised and counts as 0 */
} gemm;

/* Whether to multiply row by row, which splits the steps of an element over several sums. */
INLINE bool by_few_rows(const gemm *g, bool a_rows_adjacent) {
    return a_rows_adjacent && g->m <= FEW_ROWS && !g->in_order;
}

/* The row of c that a tile adds to: zeros where c is fresh. */
INLINE const real *old_of(const gemm *g, const real *row) {
    static const real none[MAX_WIDTH * VL];
    return g->fresh ? none : row;
}

/* The new value of `old` in row i of c. */
INLINE vec added(const gemm *g, int64_t i, vec old, vec product) {
    return g->row_scale ? vmuladd(vset1(g->row_scale[i]), old, product) : vmuladd(vset1(g->alpha), product, old);
}

/* Adds a tile to n elements of rows i0 .. i0+mr-1 of c, where n is not a whole number of vectors. */
NOINLINE void add_partial(const gemm *g, const vec (*acc)[MAX_WIDTH], int mr, int64_t i0, int64_t n, real *c) {
    for (int i = 0; i < mr && i0 + i < g->m; i++) {
        real *row = c + (i0 + i) * g->c_row;
        const real *old = old_of(g, row);
        for (int64_t j = 0; j < n; j += VL) {
            const int width = n - j < VL ? (int)(n - j) : VL;
            vstore_partial(row + j, added(g, i0 + i, vload_partial(old + j, width), acc[i][j / VL]), width);
        }
    }
}

/* One column of tiles, nv vectors wide, starting at c and b; only n elements of it exist, n > (nv - 1) * VL. */
INLINE void gemm_column(const gemm *all, int mr, int nv, bool a_rows_adjacent, bool bf16_pairs, int64_t n,
                        const real *b, real *c) {
    gemm own = *all; /* a copy that no store can alias */
    const gemm *g = &own;
    if (!a_rows_adjacent) own.row_scale = NULL; /* it is: this tells the compiler */
    int64_t a_row = a_rows_adjacent ? 1 : g->a_stride, a_col = a_rows_adjacent ? g->a_stride : 1;
    int last = (int)(n - (nv - 1) * VL);
    for (int64_t i0 = 0; i0 < g->m; i0 += mr) {
        vec acc[MAX_TILE_ROWS][MAX_WIDTH];
        UNROLL for (int i = 0; i < mr; i++) { UNROLL for (int j = 0; j < nv; j++) acc[i][j] = (vec){0}; }
        const real *a = g->a + i0 * a_row;
        if (a_rows_adjacent) {
            int64_t depth = g->depth, visible = i0 + mr - 1 + g->diagonal;
            if (bf16_pairs) visible = BF16_QUADS ? (visible + 3) / 4 * 2 : (visible + 1) / 2;
            if (g->diagonal && visible < depth) depth = visible;
            tile(acc, mr, nv, true, bf16_pairs, a, a_row, a_col, b, g->b_row, depth);
        } else {
            const int64_t first = g->diagonal && i0 >= g->diagonal ? i0 + 1 - g->diagonal : 0;
            /* The sum goes from the last query to the first. Under a causal mask the first queries weigh most, and
             * adding small terms first leaves less rounding. */
            tile(acc, mr, nv, false, bf16_pairs, a + (g->depth - 1) * a_col, a_row, -a_col,
                 b + (g->depth - 1) * g->b_row, -g->b_row, g->depth - first);
        }
        if (last < VL) {
            vec copy[MAX_TILE_ROWS][MAX_WIDTH]; /* a copy whose address may be taken, so that acc stays in registers */
            UNROLL for (int i = 0; i < mr; i++) { UNROLL for (int j = 0; j < nv; j++) copy[i][j] = acc[i][j]; }
            add_partial(all, (const vec(*)[MAX_WIDTH])copy, mr, i0, n, c);
            continue;
        }
        UNROLL for (int i = 0; i < mr; i++) {
            if (i0 + i >= g->m) break;
            real *row = c + (i0 + i) * g->c_row;
            const real *old = old_of(g, row);
            UNROLL for (int j = 0; j < nv; j++) vstore(row + j * VL, added(g, i0 + i, vload(old + j * VL), acc[i][j]));
        }
    }
}

/* One column of tiles, by its width: in gemm_by_rows a's rows are adjacent, in gemm_by_columns its columns. */
typedef void gemm_of_width(const gemm *g, int64_t n, const real *b, real *c);
#define gemm_by_rows OF_BASE(gemm_by_rows)
#define gemm_by_columns OF_BASE(gemm_by_columns)

/* The heights fill the registers. */
#if MAX_WIDTH == 4
enum { ROWS_OF_2 = HAS_LANES ? 8 : 12, ROWS_OF_3 = 8, COLUMNS_OF_2 = 8, COLUMNS_OF_3 = 8 };
#else
enum { ROWS_OF_2 = 6, ROWS_OF_3 = 4, COLUMNS_OF_2 = 6, COLUMNS_OF_3 = 4 };
#endif

#if OWNS_SHARED
NOINLINE void gemm_1_rows(const gemm *g, int64_t n, const real *b, real *c) {
    gemm_column(g, 12, 1, true, false, n, b, c);
}
NOINLINE void gemm_2_rows(const gemm *g, int64_t n, const real *b, real *c) {
    gemm_column(g, ROWS_OF_2, 2, true, false, n, b, c);
}
NOINLINE void gemm_3_rows(const gemm *g, int64_t n, const real *b, real *c) {
    gemm_column(g, ROWS_OF_3, 3, true, false, n, b, c);
}
NOINLINE void gemm_1_columns(const gemm *g, int64_t n, const real *b, real *c) {
    gemm_column(g, 8, 1, false, false, n, b, c);
}
NOINLINE void gemm_2_columns(const gemm *g, int64_t n, const real *b, real *c) {
    gemm_column(g, COLUMNS_OF_2, 2, false, false, n, b, c);
}
NOINLINE void gemm_3_columns(const gemm *g, int64_t n, const real *b, real *c) {
    gemm_column(g, COLUMNS_OF_3, 3, false, false, n, b, c);
}
#if MAX_WIDTH == 4
NOINLINE void gemm_4_rows(const gemm *g, int64_t n, const real *b, real *c) {
    gemm_column(g, 6, 4, true, false, n, b, c);
}
NOINLINE void gemm_4_columns(const gemm *g, int64_t n, const real *b, real *c) {
    gemm_column(g, 6, 4, false, false, n, b, c);
}
SHARED_TABLE gemm_of_width *const gemm_by_rows[] = {NULL, gemm_1_rows, gemm_2_rows, gemm_3_rows, gemm_4_rows};
SHARED_TABLE gemm_of_width *const gemm_by_columns[] = {NULL, gemm_1_columns, gemm_2_columns, gemm_3_columns,
                                                       SDPA_REAL == 32 ? gemm_4_columns : NULL};
#else
SHARED_TABLE gemm_of_width *const gemm_by_rows[] = {NULL, gemm_1_rows, gemm_2_rows, gemm_3_rows};
SHARED_TABLE gemm_of_width *const gemm_by_columns[] = {NULL, gemm_1_columns, gemm_2_columns, gemm_3_columns};
#endif
#else
extern gemm_of_width *const gemm_by_rows[], *const gemm_by_columns[];
#endif

#ifdef HAVE_BF16_PAIRS
NOINLINE void gemm_1_bf16_pairs(const gemm *g, int64_t n, const real *b, real *c) {
    gemm_column(g, 12, 1, true, true, n, b, c);
}
NOINLINE void gemm_2_bf16_pairs(const gemm *g, int64_t n, const real *b, real *c) {
    gemm_column(g, ROWS_OF_2, 2, true, true, n, b, c);
}
NOINLINE void gemm_4_bf16_pairs(const gemm *g, int64_t n, const real *b, real *c) {
    gemm_column(g, 6, 4, true, true, n, b, c);
}
static gemm_of_width *const gemm_by_bf16_pairs[] = {NULL, gemm_1_bf16_pairs, BF16_QUADS ? gemm_2_bf16_pairs : NULL,
                                                    NULL, BF16_QUADS ? NULL : gemm_4_bf16_pairs};
#else
#define gemm_by_bf16_pairs gemm_by_rows
#endif

/* The width of the next tiles, in vectors, where `vectors` of a row of c remain. Tiles three vectors wide fill the
 * registers best; other widths take the remainder, or leave fewer rows idle. */
INLINE int64_t width_by_rows(const gemm *g, int64_t vectors) {
#if MAX_WIDTH == 4
    if (g->bf16_pairs) return BF16_QUADS ? (vectors < 2 ? 1 : 2) : vectors < 4 ? 1 : 4;
    if (HAS_LANES && vectors == 4) return 2; /* six rows do not fill vectors */
    return vectors == 4 && (g->m <= 6 || g->m > 8) ? 4 : vectors < 3 ? vectors : 3;
#else
    const bool fits = vectors % 2 || (g->m + 3) / 4 * 4 < (g->m + 5) / 6 * 6; /* heights of 4 and 6 */
    return vectors >= 3 && vectors != 4 && fits ? 3 : vectors < 2 ? vectors : 2;
#endif
}

INLINE int64_t width_by_columns(const gemm *g, int64_t vectors) {
#if MAX_WIDTH == 4 /* heights of 6 and 8 */
    if (SDPA_REAL == 32 && vectors == 4 && (g->m + 5) / 6 * 6 < (g->m + 7) / 8 * 8) return 4;
    return vectors >= 3 && vectors % 2 ? 3 : vectors < 2 ? vectors : 2;
#else
    return width_by_rows(g, vectors);
#endif
}

/* The whole product by tiles; a's rows are adjacent (a[i + k * a_stride]) in P V and dS K, with a = P^T or dS^T, and
 * its columns (a[i * a_stride + k]) in P^T dO and dS^T Q. */
INLINE void gemm_tiles(const gemm *g, bool a_rows_adjacent) {
    gemm_of_width *const *columns = a_rows_adjacent ? gemm_by_rows : gemm_by_columns;
    if (BF16_PAIRS && g->bf16_pairs && a_rows_adjacent) columns = gemm_by_bf16_pairs;
    for (int64_t j = 0, n; j < g->n; j += n) {
        const int64_t vectors = (g->n - j + VL - 1) / VL,
                      width = a_rows_adjacent ? width_by_rows(g, vectors) : width_by_columns(g, vectors);
        n = g->n - j < width * VL ? g->n - j : width * VL;
        columns[width](g, n, g->b + j, g->c + j);
    }
}

/* The number of sums over which few_columns splits the steps of an element. Eight sums in all hide the latency of the
 * FMAs. */
INLINE int few_turns(int width) { return width < 8 ? 8 / width : 1; }

/* `width` vectors of one row of c, of which n elements exist; a's rows are adjacent. dtype, a constant, is that of
 * b. */
INLINE void few_columns(const gemm *g, sdpa_dtype dtype, int width, int64_t i, int64_t j, int64_t n) {
    const int turns = few_turns(width), sums = turns * width;
    const bool narrow = sdpa_is_narrow(dtype);
    const int64_t size = narrow ? 2 : sizeof(real), b_row = narrow ? g->narrow.row : g->b_row * size;
    vec acc[16];
    UNROLL for (int x = 0; x < sums; x++) acc[x] = (vec){0};
    const real *a = g->a + i;
    const char *b = (narrow ? g->narrow.data : (const char *)g->b) + j * size;
    int64_t k = 0;
    for (; k + turns <= g->depth; k += turns) {
        UNROLL for (int x = 0; x < sums; x++) {
            const int64_t step = k + x / width;
            const vec row = vload_as(dtype, b + step * b_row + x % width * VL * size);
            acc[x] = vmuladd(vset1(a[step * g->a_stride]), row, acc[x]);
        }
    }
    for (; k < g->depth; k++) {
        UNROLL for (int x = 0; x < width; x++) {
            acc[x] = vmuladd(vset1(a[k * g->a_stride]), vload_as(dtype, b + k * b_row + x * VL * size), acc[x]);
        }
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

/* The number of vectors of c that few_columns takes of the n remaining elements: whole rows of b if there are registers
 * for them, since half rows come from memory far more slowly. */
INLINE int few_width(int64_t n) { return MAX_WIDTH == 4 && n > 15 * VL ? 16 : n > 7 * VL ? 8 : n > 3 * VL ? 4 : 1; }

INLINE void few_rows(const gemm *g, sdpa_dtype dtype) {
    for (int64_t i = 0; i < g->m; i++) {
        for (int64_t j = 0, width; j < g->n; j += width * VL) {
            const int64_t left = g->n - j;
            width = few_width(left);
            switch (width) {
#if MAX_WIDTH == 4
            case 16:
                few_columns(g, dtype, 16, i, j, left);
                break;
#endif
            case 8:
                few_columns(g, dtype, 8, i, j, left);
                break;
            case 4:
                few_columns(g, dtype, 4, i, j, left);
                break;
            default:
                few_columns(g, dtype, 1, i, j, left);
            }
        }
    }
}

/* The product for so few rows that most rows of a tile would be idle. */
#define gemm_few_rows OF_BASE(gemm_few_rows)
SHARED void gemm_few_rows(const gemm *g);

/* gemm_few_rows with narrow_rows for b. */
#define gemm_narrow OF_BASE(gemm_narrow)
SHARED void gemm_narrow(const gemm *g);

/* The product of at most MOST_ACROSS_V rows with rows_across for b, where it is faster than a copy: sums take turns as in
 * gemm_few_rows or, where that does not serve, one is as long as in the tiles. */
enum { MOST_ACROSS_V = VL == 16 ? FEW_QUERIES : VL == 8 ? 1 : 0 };
#define gemm_across OF_BASE(gemm_across)
SHARED void gemm_across(const gemm *g);

#if OWNS_SHARED
/* product (m) = a b for n <= VL columns of b, which lies across: squares of it are transposed in registers. m is a constant
 * or, at most, FEW_QUERIES. */
INLINE void across_columns(vec *product, const gemm *g, int m, int turns, int64_t j, int n) {
    const int64_t col = g->across.col / (int64_t)sizeof(real), whole = g->depth / turns * turns;
    const real *a = g->a, *b = (const real *)g->across.data + j * col;
    vec acc[FEW_QUERIES][8] = {{{0}}};
    for (int64_t k = 0; k < g->depth; k += VL) {
        const int width = g->depth - k < VL ? (int)(g->depth - k) : VL;
        vec r[VL];
        if (n == VL && k + VL <= whole) {
            vload_transposed(r, b + k, col);
            for (int i = 0; i < m; i++) {
                vec sum[8];
                UNROLL for (int x = 0; x < turns; x++) sum[x] = acc[i][x];
                UNROLL for (int t = 0; t < VL; t++) {
                    sum[t % turns] = vmuladd(vset1(a[i + (k + t) * g->a_stride]), r[t], sum[t % turns]);
                }
                UNROLL for (int x = 0; x < turns; x++) acc[i][x] = sum[x];
            }
            continue;
        }
        for (int i = 0; i < VL; i++) r[i] = i < n ? vload_partial(b + k + i * col, width) : (vec){0};
        vtranspose(r);
        for (int i = 0; i < m; i++) {
            vec sum[8]; /* a copy whose address may be taken, so that acc stays in registers */
            UNROLL for (int x = 0; x < turns; x++) sum[x] = acc[i][x];
            for (int t = 0; t < width; t++) {
                vec *to = &sum[k + t < whole ? t % turns : 0];
                *to = vmuladd(vset1(a[i + (k + t) * g->a_stride]), r[t], *to);
            }
            UNROLL for (int x = 0; x < turns; x++) acc[i][x] = sum[x];
        }
    }
    for (int i = 0; i < m; i++) {
        product[i] = acc[i][0];
        UNROLL for (int x = 1; x < turns; x++) product[i] += acc[i][x];
    }
}

INLINE void across_columns_by(vec *product, const gemm *g, int m, int turns, int64_t j, int n) {
    if (turns == 1) {
        across_columns(product, g, m, 1, j, n);
    } else if (turns == 2) {
        across_columns(product, g, m, 2, j, n);
    } else {
        across_columns(product, g, m, 8, j, n);
    }
}

SHARED void gemm_across(const gemm *g) {
    const bool splits = by_few_rows(g, true);
    for (int64_t j = 0, end = 0, turns = 1; j < g->n; j += VL) {
        if (j == end && splits) {
            const int width = few_width(g->n - j);
            turns = few_turns(width);
            end += width * VL;
        }
        const int n = g->n - j < VL ? (int)(g->n - j) : VL;
        vec product[FEW_QUERIES];
        if (MOST_ACROSS_V == 1 || g->m == 1) {
            across_columns_by(product, g, 1, (int)turns, j, n);
        } else {
            across_columns_by(product, g, (int)g->m, (int)turns, j, n);
        }
        for (int i = 0; i < g->m; i++) {
            real *c = g->c + i * g->c_row + j;
            vstore_partial(c, added(g, i, vload_partial(c, n), product[i]), n);
        }
    }
}

SHARED void gemm_few_rows(const gemm *g) { few_rows(g, REAL_DTYPE); }

SHARED void gemm_narrow(const gemm *g) {
    if (WIDENS_F16 && g->narrow.dtype == SDPA_F16) {
        few_rows(g, SDPA_F16);
    } else {
        few_rows(g, SDPA_BF16);
    }
}
#endif

/* The product, summed in the order of the tiles, where a masked pair may meet NaN or Inf. A masked pair is -0 in a, and
 * is skipped instead of multiplied. This is rare, so the loops are plain. */
COLD NOINLINE void gemm_masked(const gemm *g, bool a_rows_adjacent) {
    const int64_t a_row = a_rows_adjacent ? 1 : g->a_stride, a_col = a_rows_adjacent ? g->a_stride : 1;
    const bool few = by_few_rows(g, a_rows_adjacent);
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
                real *to = &sum[k < whole ? k % turns : 0];
                if (a != 0 || !signbit(a)) *to = muladd(a, g->b[k * g->b_row + j], *to);
            }
            for (int x = 1; x < turns; x++) sum[0] += sum[x];
            real *c = &g->c[i * g->c_row + j];
            *c = g->row_scale ? muladd(g->row_scale[i], *c, sum[0]) : muladd(g->alpha, sum[0], *c);
        }
    }
}

/* gemm_masked for pairs of bfloat16, a's rows adjacent: b counts as 0 where a is -0. */
COLD NOINLINE void gemm_masked_bf16_pairs(const gemm *g) {
    for (int64_t i = 0; i < g->m; i++) {
        for (int64_t j = 0; j < g->n; j += VL) {
            vec acc[1][MAX_WIDTH] = {{{0}}};
            for (int64_t k = 0; k < g->depth; k++) {
                const int lane = (int)(i % VL);
                const int32_t pair =
                    (int32_t)((ivec)load_pairs(g->a + i - lane + k * g->a_stride, g->a_stride, k, g->depth))[lane];
                const int32_t low = (pair & 0xffff) == 0x8000 ? 0 : 0xffff, high = pair >> 16 == -0x8000 ? 0 : ~0xffff;
                acc[0][0] =
                    vdot(acc[0][0], pair,
                         (vec)((ivec)load_pairs(g->b + k * g->b_row + j, g->b_row, k, g->depth) & (low | high)));
            }
            add_partial(g, (const vec(*)[MAX_WIDTH])acc, 1, i, g->n - j < VL ? g->n - j : VL, g->c + j);
        }
    }
}

/* Clears c where it is fresh, for the functions that always add. */
COLD NOINLINE void clear_fresh(const gemm *g) {
    for (int64_t i = 0; i < g->m && g->fresh; i++) memset(g->c + i * g->c_row, 0, sizeof(real) * (size_t)g->n);
}

/* The product, for either layout of a. `finite`: no masked pair can meet NaN or Inf. */
NOINLINE void multiply(gemm *g, bool a_rows_adjacent, bool finite) {
    const bool few = by_few_rows(g, a_rows_adjacent) && !(BF16_PAIRS && g->bf16_pairs),
               narrow = SDPA_REAL == 32 && g->narrow.data, across = MOST_ACROSS_V > 0 && g->across.data;
    if (finite && !few && !narrow && !across) {
        gemm_tiles(g, a_rows_adjacent);
        return;
    }
    clear_fresh(g);
    if (narrow) {
        gemm_narrow(g);
    } else if (across) {
        gemm_across(g);
    } else if (finite) {
        gemm_few_rows(g);
    } else if (BF16_PAIRS && g->bf16_pairs) {
        gemm_masked_bf16_pairs(g);
    } else {
        gemm_masked(g, a_rows_adjacent);
    }
}

#endif
