/* What the templates of both types share: tile shapes, modes, markers. */
#ifndef SDPA_TILES_H
#define SDPA_TILES_H

#include "vec.h"

#if VEC_BYTES == 64 || defined(SDPA_ISA_NEON) /* 32 registers */
#define SCORE_ROWS 8                          /* keys in a score tile */
#define MAX_WIDTH 4                           /* vectors in a row of a tile */
#else
#define SCORE_ROWS 4
#define MAX_WIDTH 3
#endif
#if defined(__OPTIMIZE_SIZE__) && MAX_WIDTH == 3
#define GEMM_WIDTH 2 /* of the other products: without three the generic kernels are a fortieth smaller */
#else
#define GEMM_WIDTH MAX_WIDTH
#endif
#ifdef HAVE_DOT
#define PAIRS_f32 1
#else
#define PAIRS_f32 0
#endif
#define PAIRS_f64 0
#define PAIRS FN(PAIRS) /* whether there are products of pairs */
#define SCORE_WIDTH 3   /* vectors of queries in a panel */
#define MOST_SCORE_ROWS (3 * SCORE_ROWS)
#define MAX_TILE_ROWS 12

/* What is done to a tile of scores, on the accumulators. */
enum score_mode {
    SCORE_RAW,             /* s = acc;                              extreme = max over keys */
    SCORE_ADDED,           /* s = s + acc */
    SCORE_BIASED,          /* s = c * acc + s, or -inf where s was; extreme = max over keys */
    SCORE_CAPPED,          /* s = c * tanh(cap * acc) + s, like SCORE_BIASED; ds = that tanh where ds is not NULL */
    SCORE_SUMMED,          /* s = exp2(c * acc - shift);            extreme = sum */
    SCORE_BIASED_SUMMED,   /* s = exp2(c * acc + s - shift), or -0 where s was -inf; extreme = sum */
    SCORE_WEIGHTS,         /* s = exp2(c * acc - shift);            extreme = SUMS sums */
    SCORE_GRADIENT,        /* ds = s * (acc - shift) */
    SCORE_GRADIENT_MASKED, /* the same, and -0 where s is -0 */
};

/* What the masks add to a block of scores: nothing, finite numbers, -inf to some, -inf to all. */
enum bias_kind { BIAS_NONE, BIAS_FINITE, BIAS_SOME_MASKED, BIAS_ALL_MASKED };

/* What a panel of queries sees of a key block: all pairs, some, none. */
enum panel_state { PANEL_SEEN, PANEL_MASKED, PANEL_HIDDEN };

/* -0 marks a masked pair in P and dS; an unmasked one can never be -0 in P, and only by underflow in dS. */
#define SIGN_BIT_f32 INT32_MIN
#define SIGN_BIT_f64 INT64_MIN
#define SIGN_BIT FN(SIGN_BIT)
#define REAL_MAX_f32 FLT_MAX
#define REAL_MAX_f64 DBL_MAX
#define REAL_MAX FN(REAL_MAX)

/* Longer products dO V^T are summed in two chains, with half the rounding of one: 1 % of the backward's time for 5 % of its
 * error. In Q K^T, where forward and backward must agree, they would take 35 % of all errors, and 4 % of the forward's time. */
#define LONG_CHAIN 32

/* Running sums over the keys of a block (scores.inc.h). */
#define SUMS 4

/* How far, in log2 units, scores may exceed a stale maximum before it moves (forward.inc.h). */
#define STALE_LIMIT 64
#define STALE_SUM 0x1p64f /* 2^STALE_LIMIT */

/* A panel's first block of keys goes by the maximum of so many, whole tiles, as the later ones go by that of the blocks
 * before, so that it takes one pass, too: (1, 256, 64) forward 72.8 to 76.4 GF/s, (1, 512, 64) 79.7 to 81.0. Where these few
 * lie further apart, in log2 units, all of the block are looked through. */
#define FIRST_KEYS 8
#define FIRST_SPREAD 32

/* Scores in log2 units beyond which the rounding of a maximum is kept (forward.inc.h), and an lse is no integer for
 * vexp2_above. */
#define HUGE_SCORE 0x1p20f

/* Key blocks whose P the backward keeps while it completes the rows: 8192 keys, 3.2 MB of float32 for 96 queries. */
#define KEPT_BLOCKS 64

/* From so many reads of a row on, copying it to whole cache lines is worth it (pack.inc.h). Vectors of 64 bytes, each across
 * two lines, are not read often enough beside their FMAs (Zen 4, in turns: without copies 1 to 3 % faster). */
#define OFTEN (VEC_BYTES == 64 ? INT64_MAX : 32)

/* Up to so many queries are multiplied with vectors along d, instead of side by side in the lanes (few.inc.h). */
#define FEW_QUERIES (VL < 6 ? VL : VL < 16 ? 6 : 8)

/* The keys of a single query and their values are read in turn, about so many bytes at a time: the longer, the further ahead
 * the hardware looks (Zen 4, 8 heads of 65536 keys, d = 64: a fifth slower with 64 KB, a tenth faster with 1 MB, whose scores
 * would take four times the scratch); at most RUN_KEYS of them. */
#define RUN_BYTES (256 * 1024)
#define RUN_KEYS 1024

/* Up to so many rows of weights are multiplied with the values one by one. */
#define FEW_ROWS 3

/* See fetch_ahead in scores.inc.h. */
#define FETCH_DEPTH 16
#define FETCH_BYTES (1 << 20)

/* Whether at the diagonal vectors of queries that see nothing are left out of a tile of scores: (8, 1024, 64) causal forward
 * 93.5 to 97.7 GF/s with vectors of 16; with those of 8 no gain. */
#define SKIPS (VEC_BYTES == 64 && SDPA_REAL == 32)

/* Whether the scores of a tile leave the registers before they become weights. Where vectors are whole, that is while the next
 * tile is multiplied: their exponentials take few of the FMA units' cycles, but wait long for each other. Share of the peak of
 * K Q^T with its exponentials (panels.c), Zen 5: d = 64 84.4 to 88.9, d = 32 74.5 to 80; with them products V dO^T fell from 92.3
 * to 90. Where they are computed in halves (sdpa_half_vectors), units are busy enough: Zen 4, d = 64, 88.6 from the registers,
 * 88.4 row by row at once, 85.9 with the next tile. AVX2 from the registers 80.1, row by row 77.7. */
#define BY_ROWS (VEC_BYTES == 64)

/* Problems of few keys have kernels of their own (small.inc.h), but where kernels are to be small. Beyond so many keys their
 * sums over the lanes cost more than transposed queries do at d = 16; at d = 64 from 60 on. */
#if VEC_BYTES >= 32 && !defined(__OPTIMIZE_SIZE__)
#define SMALL 1
#else
#define SMALL 0
#endif
#define SMALL_KEYS 32
#define SMALL_ROWS 4 /* queries at a time */

INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

#endif
