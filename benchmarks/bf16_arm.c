/* A forward in bfloat16 on NEON, panel by panel: the kernels' own, which widen, beside products of pairs (BFDOT) and of
 * blocks of two by four (BFMMLA). To be counted by `python -m benchmarks.arm`, not to be run for its results: qemu shall
 * tell every instruction, and its disassembler knows neither. So the kernels' FMA by a lane stands for BFDOT in panels
 * of half the depth, and UABA, which nothing else uses, for the others. Rounds as cheaply as possible: ties go up. */
#include <arm_neon.h>
#define PARTS_ALONE
#include "panels.c"

_Static_assert(SCORE_ROWS == 8 && QUERIES == 8, "tiles of BFMMLA are as large as those of the kernels");
typedef uint16x8_t halves;
INLINE vec stand_in(vec sum, vec a, vec b) {
    __asm__("uaba %0.16b, %1.16b, %2.16b" : "+w"(sum) : "w"(a), "w"(b));
    return sum;
}

static uint16_t k_bf16[KEYS * MOST_D], v_bf16[KEYS * MOST_D] __attribute__((aligned(64)));
static float packed[KEYS * (MOST_D + 16)] __attribute__((aligned(64))), p[QUERIES * KEYS] __attribute__((aligned(64))),
    rounded_sum[QUERIES];

INLINE vec join_low(vec a, vec b) { return (vec)vzip1q_u64((uint64x2_t)a, (uint64x2_t)b); }
INLINE vec join_high(vec a, vec b) { return (vec)vzip2q_u64((uint64x2_t)a, (uint64x2_t)b); }
INLINE halves of_rows(const uint16_t *m, int64_t row, int64_t j, int64_t c) { return vld1q_u16(m + j * row + c); }

/* Rows in pairs, for BFDOT over keys. */
NOINLINE void pack_pairs(const uint16_t *m, int64_t d, float *to) {
    for (int64_t j = 0; j < KEYS; j += 2) {
        for (int64_t c = 0; c < d; c += 8, to += 2 * VL) {
            const halves even = of_rows(m, d, j, c), odd = of_rows(m, d, j + 1, c);
            vstore(to, (vec)vzip1q_u16(even, odd));
            vstore(to + VL, (vec)vzip2q_u16(even, odd));
        }
    }
}

/* Tiles of eight rows: four vectors for every four columns, each of two rows by four. */
NOINLINE void pack_blocks(const uint16_t *m, int64_t d, float *to) {
    for (int64_t j = 0; j < KEYS; j += 2) {
        float *at = to + j / 8 * 4 * d + j % 8 / 2 * VL;
        for (int64_t c = 0; c < d; c += 8, at += 8 * VL) {
            const vec a = (vec)of_rows(m, d, j, c), b = (vec)of_rows(m, d, j + 1, c);
            vstore(at, join_low(a, b));
            vstore(at + 4 * VL, join_high(a, b));
        }
    }
}

/* The same of the transposed matrix: tiles of eight columns, vectors of two columns by four rows. */
NOINLINE void pack_transposed_blocks(const uint16_t *m, int64_t d, float *to) {
    for (int64_t j = 0; j < KEYS; j += 4) {
        for (int64_t c = 0; c < d; c += 8) {
            const halves a = of_rows(m, d, j, c), b = of_rows(m, d, j + 1, c), e = of_rows(m, d, j + 2, c),
                         f = of_rows(m, d, j + 3, c), ae = vzip1q_u16(a, e), bf = vzip1q_u16(b, f),
                         ae_high = vzip2q_u16(a, e), bf_high = vzip2q_u16(b, f);
            float *at = to + c / 8 * 4 * KEYS + j * VL;
            vstore(at, (vec)vzip1q_u16(ae, bf));
            vstore(at + VL, (vec)vzip2q_u16(ae, bf));
            vstore(at + 2 * VL, (vec)vzip1q_u16(ae_high, bf_high));
            vstore(at + 3 * VL, (vec)vzip2q_u16(ae_high, bf_high));
        }
    }
}

/* Weights of two keys as pairs, and the sum of the rounded ones; with `blocks`, two queries by four keys. */
INLINE void round_weights(const float *from, float *to, bool blocks) {
    const uint32x4_t half = vdupq_n_u32(0x8000);
    const halves ones = vdupq_n_u16(0x3f80);
    UNROLL for (int v = 0; v < QUERIES; v += VL) {
        vec sum = {0};
        for (int64_t j = 0; j < KEYS; j += 4) {
            halves pair[2];
            UNROLL for (int i = 0; i < 2; i++) {
                const float *two = from + (j + 2 * i) * QUERIES + v;
                const uint32x4_t even = (uint32x4_t)vload(two) + half, odd = (uint32x4_t)vload(two + QUERIES) + half;
                pair[i] = vtrn2q_u16((halves)even, (halves)odd);
                sum = stand_in(sum, (vec)pair[i], (vec)ones);
            }
            if (blocks) {
                vstore(to + j * VL + 2 * v, (vec)vzip1q_u32((uint32x4_t)pair[0], (uint32x4_t)pair[1]));
                vstore(to + j * VL + 2 * v + VL, (vec)vzip2q_u32((uint32x4_t)pair[0], (uint32x4_t)pair[1]));
            } else {
                vstore(to + j / 2 * QUERIES + v, (vec)pair[0]);
                vstore(to + (j / 2 + 1) * QUERIES + v, (vec)pair[1]);
            }
        }
        vstore(rounded_sum + v, sum);
    }
}
NOINLINE void round_to_pairs(const float *from, float *to) { round_weights(from, to, false); }
NOINLINE void round_to_blocks(const float *from, float *to) { round_weights(from, to, true); }

/* acc (8, 2 vectors) = a b^T of two tiles of eight rows. */
INLINE void multiply_blocks(vec acc[][MAX_WIDTH], const float *a, const float *b, int64_t depth) {
    vec sum[4][4];
    UNROLL for (int i = 0; i < 4; i++) { UNROLL for (int j = 0; j < 4; j++) sum[i][j] = (vec){0}; }
    for (int64_t k = 0; k < depth; k += 4, a += 4 * VL, b += 4 * VL) {
        vec left[4], right[4];
        UNROLL for (int i = 0; i < 4; i++) left[i] = vload(a + i * VL);
        UNROLL for (int i = 0; i < 4; i++) right[i] = vload(b + i * VL);
        UNROLL for (int i = 0; i < 4; i++) {
            UNROLL for (int j = 0; j < 4; j++) sum[i][j] = stand_in(sum[i][j], left[i], right[j]);
        }
    }
    UNROLL for (int i = 0; i < 4; i++) {
        UNROLL for (int j = 0; j < 2; j++) {
            acc[2 * i][j] = join_low(sum[i][2 * j], sum[i][2 * j + 1]);
            acc[2 * i + 1][j] = join_high(sum[i][2 * j], sum[i][2 * j + 1]);
        }
    }
}

NOINLINE void score_blocks(const scores *all) {
    const scores t = *all;
    for (int64_t j0 = 0; j0 < KEYS; j0 += SCORE_ROWS) {
        vec acc[SCORE_ROWS][MAX_WIDTH];
        multiply_blocks(acc, t.y + j0 * t.depth / 2, t.x, t.depth);
        UNROLL for (int j = 0; j < SCORE_WIDTH; j++) {
            finish_column(&t, SCORE_SUMMED, (const vec(*)[MAX_WIDTH])acc, j, j0, SCORE_ROWS, true);
        }
    }
}

NOINLINE void multiply_by_values(const float *weights, const float *values, float *to, int64_t row, int64_t d) {
    for (int64_t n = 0; n < d; n += 8) {
        vec acc[8][MAX_WIDTH];
        multiply_blocks(acc, weights, values + n / 8 * 4 * KEYS, KEYS);
        UNROLL for (int i = 0; i < 8; i++) {
            UNROLL for (int j = 0; j < 2; j++) {
                float *at = to + i * row + n + j * VL;
                vstore(at, vmuladd(vset1(1), acc[i][j], vload(at)));
            }
        }
    }
}

#define STEP(way, part, call)                                                                                          \
    do {                                                                                                               \
        mark();                                                                                                        \
        call;                                                                                                          \
        mark();                                                                                                        \
        printf("d = %3d  %s: %s\n", d, way, part);                                                                     \
    } while (0)

int main(void) {
    for (int d = 64; d <= MOST_D; d *= 2) {
        const int64_t row = row_stride(d);
        sdpa_matrix k = {(char *)k_bf16, 2 * d, 2, SDPA_BF16, false}, f16 = {(char *)k_bf16, 2 * d, 2, SDPA_F16, false};
        float zero[QUERIES] = {0};
        tile_sums sum = {{{0}}};
        scores t = {.x = x,
                    .y = y,
                    .y_row = row,
                    .n = KEYS,
                    .depth = d,
                    .s = s,
                    .s_row = QUERIES,
                    .shift = zero,
                    .extreme = (float *)sum,
                    .c = 0.18f};
        gemm g = {.c = c,
                  .c_row = row,
                  .a = s,
                  .a_stride = QUERIES,
                  .b = y,
                  .b_row = row,
                  .m = QUERIES,
                  .n = d,
                  .depth = KEYS,
                  .alpha = 1};
        STEP("today", "pack a block of K", pack_rows(&k, 0, KEYS, d, 0, packed, NULL));
        STEP("today", "pack a block of V", pack_rows(&k, 0, KEYS, d, UNIT, packed, NULL));
        STEP("today, float16", "pack a block of K", pack_rows(&f16, 0, KEYS, d, 0, packed, NULL));
        STEP("today, float16", "pack a block of V", pack_rows(&f16, 0, KEYS, d, UNIT, packed, NULL));
        STEP("today", "K Q^T, exp2", score(&t, SCORE_WIDTH, SCORE_SUMMED));
        STEP("today", "P V", multiply(&g, true, true));
        STEP("BFMMLA", "pack a block of K", pack_blocks(k_bf16, d, packed));
        STEP("BFMMLA", "pack a block of V", pack_transposed_blocks(v_bf16, d, packed));
        STEP("BFMMLA", "K Q^T, exp2", score_blocks(&t));
        STEP("BFMMLA", "round P", round_to_blocks(s, p));
        STEP("BFMMLA", "P V", multiply_by_values(p, packed, c, row, d));
        t.depth = d / 2, g.depth = KEYS / 2;
        STEP("BFDOT", "pack a block of V", pack_pairs(v_bf16, d, packed));
        STEP("BFDOT", "K Q^T, exp2", score(&t, SCORE_WIDTH, SCORE_SUMMED));
        STEP("BFDOT", "round P", round_to_pairs(s, p));
        STEP("BFDOT", "P V", multiply(&g, true, true));
    }
}
