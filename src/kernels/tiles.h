/* Tile shapes, modes and limits that the kernels share. docs/kernels.md gives the reasons for their values. */
#ifndef SDPA_KERNEL_TILES_H
#define SDPA_KERNEL_TILES_H

#include "vec.h"

#if VEC_BYTES == 64 || defined(HAVE_LANES) /* 32 registers */
#define SCORE_ROWS 8                       /* keys in a score tile */
#define MAX_WIDTH 4                        /* vectors in a row of a tile */
#else
#define SCORE_ROWS 4
#define MAX_WIDTH 3
#endif
#ifdef HAVE_LANES     /* registers hold 16 sums, 8 vectors of keys, 4 steps of each, and a row of queries */
#define SCORE_WIDTH 2 /* vectors of queries in a panel */
#else
#define SCORE_WIDTH 3
#endif
#define MOST_SCORE_ROWS (3 * SCORE_ROWS) /* of a single vector */
#define MAX_TILE_ROWS 12

/* The step applied to a tile of scores while it is in the accumulators. */
enum score_mode {
    SCORE_RAW,             /* s = acc;                              extreme = max over keys */
    SCORE_ADDED,           /* s = s + acc */
    SCORE_BIASED,          /* s = c * acc + s, or -inf where s was; extreme = max over keys */
    SCORE_CAPPED,          /* s = c * tanh(cap * acc) + s, like SCORE_BIASED; if ds is not NULL, ds = that tanh */
    SCORE_SUMMED,          /* s = exp2(c * acc - shift);            extreme = sum */
    SCORE_BIASED_SUMMED,   /* s = exp2(c * acc + s - shift), or -0 where s was -inf; extreme = sum */
    SCORE_KEYS_SUMMED,     /* s = exp2(c * acc + key_bias - shift); extreme = sum */
    SCORE_WEIGHTS,         /* s = exp2(c * acc - shift);            extreme = SUMS sums */
    SCORE_KEYS_WEIGHTS,    /* s = exp2(c * acc + key_bias - shift); extreme = SUMS sums */
    SCORE_GRADIENT,        /* ds = s * (acc - shift) */
    SCORE_GRADIENT_MASKED, /* SCORE_GRADIENT, and -0 where s is -0 */
};
#define SCORE_MODES (SCORE_GRADIENT_MASKED + 1)

/* The bias that masks add to a block of scores: nothing, finite numbers, -inf in some places, -inf everywhere. */
enum bias_kind { BIAS_NONE, BIAS_FINITE, BIAS_SOME_MASKED, BIAS_ALL_MASKED };

/* The pairs of a panel of queries and a key block that are visible: all, some, none. */
enum panel_state { PANEL_VISIBLE, PANEL_MASKED, PANEL_HIDDEN };

/* Products dO V^T longer than this are summed in two chains, which halves their rounding. Q K^T keeps one chain:
 * forward and backward must agree on it, and a second chain would cost the forward too much time. */
#define LONG_CHAIN 32

/* Running sums over the keys of a block (scores.h). */
#define SUMS 4

/* How far, in log2 units, scores may exceed a stale maximum before it moves (forward.h). */
#define STALE_LIMIT 64
#define STALE_SUM 0x1p64f /* 2^STALE_LIMIT */

/* For its first key block a panel takes the maximum over the first FIRST_KEYS keys (whole tiles). Like later blocks,
 * which reuse an earlier maximum, the block then needs only one pass. If the scores of these keys are more than
 * FIRST_SPREAD apart, in log2 units, the panel takes the maximum of the whole block instead. */
#define FIRST_KEYS 8
#define FIRST_SPREAD 32

/* Above this, in log2 units, the rounding error of a maximum is kept beside it (forward.h), and lse is too large to be
 * an integer argument of vexp2_above. */
#define HUGE_SCORE 0x1p19f

/* With a float64 lse beside float32 operands, rows of more than COMPLETED_KEYS keys are not completed (backward.h). P of
 * KEPT_BLOCKS key blocks is kept for completion: 8192 keys, 3.2 MB of float32 for 96 queries. */
#define COMPLETED_KEYS 1024
#define KEPT_BLOCKS 64

/* The backward takes BATCH_UNITS units through RANGE_BYTES of keys, values and their gradients before it goes on to the
 * next keys: a quarter of an L2 of a megabyte. The units take about as much. */
#define BATCH_UNITS 4
#define RANGE_BYTES (256 * 1024)

/* A row that will be read at least this often is first copied to the start of a cache line (pack.h). For vectors of 64
 * bytes the copy does not pay, although each unaligned vector crosses two lines, because there are too few reads per
 * FMA. */
#define OFTEN (VEC_BYTES == 64 ? INT64_MAX : 32)

/* At most this many queries are multiplied with vectors along d (fast/few_queries.h), instead of side by side in the
 * lanes. */
#define FEW_QUERIES (VL < 8 ? VL : 8)

/* A single query reads about RUN_BYTES of keys, then their values: longer runs let the hardware prefetch further ahead.
 * A run has at most RUN_KEYS keys, because their scores are kept. */
#define RUN_BYTES (256 * 1024)
#define RUN_KEYS 1024

/* At most this many rows of weights are multiplied with the values one by one. */
#define FEW_ROWS 3

/* Prefetching of rows (scores.h): the steps of a product between two prefetches, and the bytes of keys and values from
 * which it pays. */
#define FETCH_DEPTH 16
#define FETCH_BYTES (1 << 20)

/* Whether there are fast/few_keys.h and fast/one_block_backward.h: narrower vectors gain too little. Few keys are at most
 * FEW_KEYS; with more, sums over the lanes would cost more than transposing the queries. */
#if VEC_BYTES >= 32
#define ROW_PATHS 1
#else
#define ROW_PATHS 0
#endif
#define FEW_KEYS 32
#define ROWS_AT_ONCE 4 /* queries at a time */

INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/* The number of queries that the next panel takes of n_i remaining ones. */
INLINE int64_t panel_of(int64_t n_i) { return n_i < SCORE_WIDTH * VL ? n_i : SCORE_WIDTH * VL; }

#endif
