/* The parts of a forward in bfloat16, each alone, on the kernels that the flags choose: those that multiply pairs, or
 * those that widen. Every part is called once between two calls of mark(), for `python -m benchmarks.arm`. */
#define PARTS_ALONE
#include "panels.c"

static uint16_t m[KEYS * MOST_D] __attribute__((aligned(64)));
static float packed[KEYS * (MOST_D + 16)] __attribute__((aligned(64))), line[MOST_D];

#define STEP(part, call)                                                                                               \
    do {                                                                                                               \
        mark();                                                                                                        \
        call;                                                                                                          \
        mark();                                                                                                        \
        printf("d = %3d  %s\n", d, part);                                                                              \
    } while (0)

int main(void) {
    for (int d = 64; d <= MOST_D; d *= 2) {
        const int64_t row = row_stride(d);
        const sdpa_matrix bf16 = {(char *)m, 2 * d, 2, SDPA_BF16, false}, f16 = {(char *)m, 2 * d, 2, SDPA_F16, false};
        float zero[QUERIES] = {0};
        vec sum[SCORE_WIDTH] = {{0}};
        scores t = {.x = x,
                    .y = y,
                    .y_row = row,
                    .n = KEYS,
                    .depth = BF16_PAIRS ? d / 2 : d,
                    .bf16_pairs = BF16_PAIRS,
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
                  .depth = BF16_PAIRS ? KEYS / 2 : KEYS,
                  .bf16_pairs = BF16_PAIRS,
                  .alpha = 1};
        if (BF16_PAIRS) {
            STEP("pack a block of K", pack_bf16_pairs(&bf16, 0, KEYS, d, packed, NULL, line));
            STEP("pack a block of V", pack_row_bf16_pairs(&bf16, 0, KEYS, d, packed, false));
            STEP("round P", pair_rows(s, QUERIES, KEYS, QUERIES, sum));
        } else {
            STEP("pack a block of K", pack_rows(&bf16, 0, KEYS, d, 0, packed, NULL));
            STEP("pack a block of V", pack_rows(&bf16, 0, KEYS, d, UNIT, packed, NULL));
            STEP("pack float16's K", pack_rows(&f16, 0, KEYS, d, 0, packed, NULL));
            STEP("pack float16's V", pack_rows(&f16, 0, KEYS, d, UNIT, packed, NULL));
        }
        STEP("K Q^T, exp2", score(&t, SCORE_WIDTH, SCORE_SUMMED));
        STEP("P V", multiply(&g, true, true));
    }
}
