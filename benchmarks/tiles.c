/* The tile of P V stripped of all that is around it: c (24 queries, d) += a^T (128 keys, 24) b (128 keys, d), a and c in
 * L1, b one block that stays there or, in turn, the blocks of a sequence of 2048 keys, which come from L2. Tells what the
 * tile loses and what the way of the operands does. AVX2 with FMA:
 *   gcc -O2 -march=x86-64-v3 -ffp-contract=fast benchmarks/tiles.c -o build/tiles && build/tiles */
#include "seconds.h"
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { LANES = 8, QUERIES = 24, KEYS = 128, MOST_BLOCKS = 16, RUNS = 8000 };
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));

#define UNROLL _Pragma("GCC unroll 16")
#define DEFINE_TILE(name, rows, width)                                                                                 \
    __attribute__((noinline)) static void name(const float *a, const float *b, int64_t b_row, float *c, int64_t d) {   \
        vec sum[rows][width];                                                                                          \
        UNROLL for (int i = 0; i < rows; i++) { UNROLL for (int j = 0; j < width; j++) sum[i][j] = (vec){0}; }         \
        for (int k = 0; k < KEYS; k++) {                                                                               \
            vec x[width];                                                                                              \
            UNROLL for (int j = 0; j < width; j++) x[j] = *(const vec *)(b + k * b_row + j * LANES);                   \
            UNROLL for (int i = 0; i < rows; i++) {                                                                    \
                UNROLL for (int j = 0; j < width; j++) sum[i][j] += a[k * QUERIES + i] * x[j];                         \
            }                                                                                                          \
        }                                                                                                              \
        UNROLL for (int i = 0; i < rows; i++) {                                                                        \
            UNROLL for (int j = 0; j < width; j++) * (vec *)(c + i * d + j * LANES) += sum[i][j];                      \
        }                                                                                                              \
    }
DEFINE_TILE(tile_6x2, 6, 2)
DEFINE_TILE(tile_4x3, 4, 3)

typedef void tile_fn(const float *a, const float *b, int64_t b_row, float *c, int64_t d);

/* GF/s of the whole product, the best of many runs. */
static double rate(tile_fn *tile, int rows, int width, int64_t d, int64_t b_row, int64_t skip, int blocks) {
    float *a = calloc(KEYS * QUERIES, sizeof *a), *c = calloc((size_t)(QUERIES * d), sizeof *c);
    const size_t n_b = (size_t)((MOST_BLOCKS * KEYS + 8) * b_row);
    float *b = aligned_alloc(4096, sizeof *b * n_b);
    if (!a || !b || !c) exit(1);
    for (size_t i = 0; i < n_b; i++) b[i] = 0;
    double best = 1;
    for (int run = 0; run < RUNS; run++) {
        double start = seconds();
        for (int block = 0; block < MOST_BLOCKS; block++) {
            const float *own = b + skip + block % blocks * KEYS * b_row;
            for (int64_t j = 0; j < d; j += width * LANES) {
                for (int i = 0; i < QUERIES; i += rows) tile(a + i, own + j, b_row, c + i * d + j, d);
            }
        }
        double took = seconds() - start;
        if (took < best) best = took;
    }
    free(a), free(b), free(c);
    return 2e-9 * MOST_BLOCKS * QUERIES * KEYS * (double)d / best;
}

int main(void) {
    printf("GF/s %28s %8s\n", "b in L1", "from L2");
    const struct {
        const char *name;
        tile_fn *tile;
        int rows, width, d, b_row, skip; /* floats before b's first, which begins a page */
    } cases[] = {
        {"6 x 2 vectors, d = 64", tile_6x2, 6, 2, 64, 64, 0},
        {"the same, rows 320 bytes", tile_6x2, 6, 2, 64, 80, 0},
        {"the same, 16 bytes off", tile_6x2, 6, 2, 64, 64, 4},
        {"6 x 2 vectors, d = 128", tile_6x2, 6, 2, 128, 128, 0},
        {"the same, rows 576 bytes", tile_6x2, 6, 2, 128, 144, 0},
        {"the same, 16 bytes off", tile_6x2, 6, 2, 128, 128, 4},
        {"4 x 3 vectors, d = 48", tile_4x3, 4, 3, 48, 48, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int rows = cases[i].rows, width = cases[i].width, d = cases[i].d, b_row = cases[i].b_row;
        const int skip = cases[i].skip;
        double near = rate(cases[i].tile, rows, width, d, b_row, skip, 1);
        double far = rate(cases[i].tile, rows, width, d, b_row, skip, MOST_BLOCKS);
        printf("%-25s %7.1f %8.1f\n", cases[i].name, near, far);
    }
    return 0;
}
