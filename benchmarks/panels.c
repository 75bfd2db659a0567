/* The panels that calls are made of, each alone on data in L1, as shares of the peak:
 *
 *   gcc -O2 -std=gnu11 -fno-math-errno -fno-trapping-math -fopenmp-simd -march=x86-64-v4 \
 *       -DSDPA_ISA=avx512 -DSDPA_ISA_AVX512 -DSDPA_REAL=32 benchmarks/panels.c -lm -o build/panels && build/panels
 *
 * or with the flags of another line of src/runtime/isas.inc. A panel is three vectors of queries (NEON: two) against 128
 * keys. `beside`: what it takes besides its FMAs, in cycles per vector of scores, a cycle being what the peak takes for
 * the FMA of a vector of 64 bytes (two of 32). Best of many turns. With the argument `once` every call is made once,
 * between two calls of mark(), and only its name is printed: `python -m benchmarks.arm` reads such a run instruction by
 * instruction. */
#include "../src/kernels/kernel.c"
#include "../src/program.c"
#include "seconds.h"
#include <stdio.h>
#include <stdlib.h>

/* Nobody interrupts, and there is no other unit to wait for. */
bool sdpa_run_stopped(sdpa_run *run) { return run == NULL; }
void sdpa_turn_blocks(const sdpa_unit *u, int64_t *first, int64_t *last) { (void)u, (void)first, (void)last; }
bool sdpa_turn_skip(const sdpa_unit *u, int64_t block) { return u && block >= 0; }
bool sdpa_turn_wait(const sdpa_unit *u, int64_t block) { return u && block >= 0; }
void sdpa_turn_pass(const sdpa_unit *u, int64_t block) { (void)u, (void)block; }
bool sdpa_run_wait(sdpa_run *r, const _Atomic int64_t *counter, int64_t value) { return r && counter && value; }
bool sdpa_turn_wait_last(const sdpa_unit *u) { return u != NULL; }
void sdpa_turn_end(const sdpa_unit *u) { (void)u; }
void sdpa_fetch_half(const sdpa_unit *u, sdpa_fetched what, int half) { (void)u, (void)what, (void)half; }

enum { KEYS = 128, MOST_D = 128, TURNS = 3000, CALLS = 8, QUERIES = SCORE_WIDTH * VL, UNIT = 96, STEPS = 2000 };
enum { SUMS_AT_ONCE = MAX_WIDTH == 4 ? 24 : 12 };

static bool once;
NOINLINE void mark(void) { __asm__ volatile("" ::: "memory"); }

static void fmas(void) {
    vec sum[SUMS_AT_ONCE], half = 0.5f - (vec){0};
    UNROLL for (int i = 0; i < SUMS_AT_ONCE; i++) sum[i] = (float)i - (vec){0}; /* else they would be one */
    for (int k = 0; k < STEPS; k++) {
        __asm__ volatile("" : "+m"(half));
        const vec x = half;
        UNROLL for (int i = 0; i < SUMS_AT_ONCE; i++) sum[i] = vmuladd(x, x, sum[i]);
    }
    vec all = {0};
    UNROLL for (int i = 0; i < SUMS_AT_ONCE; i++) all += sum[i];
    __asm__ volatile("" : : "m"(all));
}

#define BEST(best, call)                                                                                               \
    do {                                                                                                               \
        best = INFINITY;                                                                                               \
        for (int turn = 0; turn < TURNS && !once; turn++) {                                                            \
            const double start = seconds();                                                                            \
            for (int i = 0; i < CALLS; i++) call;                                                                      \
            best = fmin(best, (seconds() - start) / CALLS);                                                            \
        }                                                                                                              \
        mark();                                                                                                        \
        if (once) call;                                                                                                \
        mark();                                                                                                        \
    } while (0)

#define SHOW(name, flops, call)                                                                                        \
    do {                                                                                                               \
        double best;                                                                                                   \
        BEST(best, call);                                                                                              \
        const double cycles = (best * peak - (flops)) / (2 * 16) / ((flops) / (2.0 * d * VL));                         \
        printf("d = %3d  %s", d, name);                                                                                \
        if (!once)                                                                                                     \
            printf("%*s %5.1f %%  beside %5.2f", 22 - (int)strlen(name), "", 100 * (flops) / best / peak, cycles);     \
        printf("\n");                                                                                                  \
    } while (0)

static float x[QUERIES * MOST_D] __attribute__((aligned(64))), y[KEYS * (MOST_D + 16)] __attribute__((aligned(64))),
    s[QUERIES * (KEYS + 16)] __attribute__((aligned(64))), ds[UNIT * (KEYS + 16)] __attribute__((aligned(64))),
    c[KEYS * (MOST_D + 16)] __attribute__((aligned(64)));

#ifndef PARTS_ALONE /* see bf16_arm.c */
int main(int argc, char **argv) {
    once = argc > 1 && strcmp(argv[1], "once") == 0;
    double peak;
    BEST(peak, fmas());
    peak = 2.0 * VL * SUMS_AT_ONCE * STEPS / peak;
    if (!once) printf("peak %.1f GF/s\n", peak / 1e9);
    for (int d = 32; d <= MOST_D; d *= 2) {
        const int64_t row = row_stride(d);
        for (int i = 0; i < QUERIES * d; i++) x[i] = (float)rand() / (float)RAND_MAX - 0.5f;
        for (int i = 0; i < KEYS * row; i++) y[i] = (float)rand() / (float)RAND_MAX - 0.5f;
        memset(c, 0, sizeof c);
        float zero[QUERIES] = {0};
        tile_sums sum = {{{0}}};
        const scores t = {.x = x,
                          .y = y,
                          .y_row = row,
                          .n = KEYS,
                          .depth = d,
                          .s = s,
                          .ds = ds,
                          .s_row = QUERIES,
                          .shift = zero,
                          .extreme = (float *)sum,
                          .c = 0.18f};
        const double flops = 2.0 * QUERIES * KEYS * d;
        SHOW("K Q^T", flops, score(&t, SCORE_WIDTH, SCORE_RAW));
        SHOW("K Q^T, exp2 (forward)", flops, score(&t, SCORE_WIDTH, SCORE_SUMMED));
        SHOW("K Q^T, exp2 (backward)", flops, score(&t, SCORE_WIDTH, SCORE_WEIGHTS));
        SHOW("V dO^T, dS", flops, score(&t, SCORE_WIDTH, SCORE_GRADIENT));
        gemm g = {.c = c, .c_row = row, .a = s, .a_stride = QUERIES, .b = y, .b_row = row, .n = d, .alpha = 1};
        g.m = QUERIES, g.depth = KEYS;
        SHOW("P V", flops, multiply(&g, true, true));
        g.m = KEYS / 8, g.depth = UNIT, g.a = ds, g.a_stride = UNIT;
        SHOW("dS^T Q", 2.0 * UNIT * KEYS / 8 * d, multiply(&g, false, true));
    }
}
#endif
