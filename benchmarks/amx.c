/* The loops on vectors of AMX's passes, each in a function of its own whose constants are known, for `python -m
 * benchmarks.amx`, which reads the assembly. Nothing here runs. */
#include "../src/kernels/kernels.h"
#include "../src/kernels/vec.h"

#pragma GCC diagnostic ignored "-Wunused-function"

#include "../src/kernels/batch.h"
#include "../src/kernels/fast/few_keys.h"
#include "../src/kernels/forward.h"
#include "../src/kernels/statistics.h"
#include "../src/kernels/tangent.h"

enum { WIDTH = 64 };

#define PANEL(name, ...) __attribute__((used)) NOINLINE void name(__VA_ARGS__)

PANEL(maxima, const real *s, int64_t s_row, int64_t n, vec *most) { amx_maxima(s, s_row, n, SCORE_WIDTH, most); }

PANEL(sums, const forward_scratch *w, const amx_piece *piece) { amx_add_values(w, piece); }

PANEL(statistics, block_sums *b, const real *s, int64_t n, vec shift, vec low, real factor) {
    sum_logits(b, s, SCORE_WIDTH * VL, n, shift, low, factor, false);
}

PANEL(squares, vec *sum, const real *s, int64_t n, vec mean, real factor) {
    *sum = squares_from(s, SCORE_WIDTH * VL, n, mean, factor, false);
}

PANEL(adding, real *t, const real *s, int64_t row, int64_t n, real factor) {
    put_panel(t, s, row, (panel){.nv = SCORE_WIDTH}, n, factor, true);
}

/* Keys of 16 bits that other products have had widened. */
#define ROWS_OF(parts)                                                                                                 \
    PANEL(rows_##parts, amx_scratch w, rows k) {                                                                       \
        k.n = AMX_MOST_KEYS, w.d_k = WIDTH;                                                                            \
        if (amx_pack_keys_as(&w, &k, SDPA_F32, WIDTH, parts)) __builtin_trap();                                        \
    }
ROWS_OF(1)
ROWS_OF(2)
ROWS_OF(3)

/* By the number of parts, with the type that has so many. */
#define PANELS_OF(parts, dtype)                                                                                        \
    PANEL(weights_##parts, const amx_logits *t, vec *sum, amx_queue *queue) {                                          \
        amx_weights(t, SCORE_WIDTH, parts, false, sum, queue);                                                         \
    }                                                                                                                  \
    PANEL(keys_##parts, amx_scratch w, rows k) {                                                                       \
        k.n = AMX_MOST_KEYS, w.d_k = WIDTH;                                                                            \
        if (amx_pack_keys_as(&w, &k, dtype, WIDTH, parts)) __builtin_trap();                                           \
    }                                                                                                                  \
    PANEL(values_##parts, amx_scratch w, rows v) {                                                                     \
        v.n = AMX_MOST_KEYS, w.d_v = WIDTH;                                                                            \
        if (amx_pack_values_as(&w, &v, dtype, WIDTH, parts, NULL)) __builtin_trap();                                   \
    }
PANELS_OF(1, SDPA_BF16)
PANELS_OF(2, SDPA_F16)
PANELS_OF(3, SDPA_F32)
