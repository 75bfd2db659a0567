/* The softmax family: the descriptor that src/python fills, and what its driver hands to the kernels. */
#ifndef SDPA_SOFTMAX_H
#define SDPA_SOFTMAX_H

#include "problem.h"

/* With t = temperature and sums over a row (all the reduced axes together): */
typedef enum sdpa_softmax_op {
    SDPA_SOFTMAX,              /* out = p = exp(x / t) / sum exp(x / t) */
    SDPA_LOG_SOFTMAX,          /* out = log p */
    SDPA_LOGSUMEXP,            /* out = log sum exp(x), one per row */
    SDPA_SOFTMAX_BACKWARD,     /* x = p:      out = p (g - sum g p) / t */
    SDPA_LOG_SOFTMAX_BACKWARD, /* x = log p:  out = (g - p sum g) / t, 0 where p = 0 */
    SDPA_LOGSUMEXP_BACKWARD,   /* s = lse:    out = g exp(x - lse), 0 where x = -inf; g is one per row */
    SDPA_SOFTMAX_JACOBIAN,     /* x = p, s = p_i: out_ij = p_i (delta_ij - p_j) / t; the axes of i are kept ones */
} sdpa_softmax_op;

/* NumPy's limit on the dimensions of an array. */
#define SDPA_SOFTMAX_AXES 64

/* A NumPy buffer over the axes of the call. Strides are in bytes, 0 where it broadcasts or is one per row. */
typedef struct sdpa_softmax_view {
    char *data; /* first element; NULL: absent */
    sdpa_dtype dtype;
    bool swapped;
    int64_t stride[SDPA_SOFTMAX_AXES];
} sdpa_softmax_view;

enum { SDPA_SOFTMAX_X, SDPA_SOFTMAX_G, SDPA_SOFTMAX_S, SDPA_SOFTMAX_WHERE, SDPA_SOFTMAX_OUT, SDPA_SOFTMAX_VIEWS };

/* Invariants: sizes >= 0; x has dtype `dtype` and so has out, which is native and overlaps nothing; temperature is
 * finite and > 0; `where` (BOOL, forward only) leaves out an element as x = -inf does. A row of which nothing is left has
 * softmax 0, log_softmax and logsumexp -inf. NaN propagates to every element of a row that is not left out. */
typedef struct sdpa_softmax_problem {
    sdpa_softmax_op op;
    sdpa_dtype dtype; /* arithmetic is float64 for F64, else float32 */
    int n_kept, n_reduced;
    int64_t size[SDPA_SOFTMAX_AXES]; /* the kept axes, then the reduced ones */
    sdpa_softmax_view view[SDPA_SOFTMAX_VIEWS];
    double temperature;
    int n_workers;
    int (*interrupted)(void);
} sdpa_softmax_problem;

/* Fills out. Extra memory: one block of rows per worker. Results depend on the values, the shape and the ISA alone, not
 * on strides or workers: whatever path a row takes, its sum has the same order (softmax.inc.h). */
sdpa_status sdpa_softmax_run(const sdpa_softmax_problem *p);

/* Longest part of a row that is summed in one go; longer rows are read in chunks of it. */
#define SDPA_SOFTMAX_CHUNK 8192
/* Rows per kernel call: no ISA has more lanes. */
#define SDPA_SOFTMAX_ROWS 64

/* exp((x - m) / t) = 2^(c (x - m)), see vexp2_product; in backward functions exp(d) = 2^(c d). */
typedef struct sdpa_softmax_scale {
    double c, c_high, c_low, d_min, d_max;
    double inverse; /* 1 / t */
} sdpa_softmax_scale;

/* What is known of a row: forward, its maximum m and l + l_low = sum exp((x - m) / t) so far; backward, l = sum g p or
 * sum g; logsumexp_backward, m = lse and l = g; jacobian, l = -p_i / t. */
typedef struct sdpa_softmax_stats {
    double m, l, l_low;
} sdpa_softmax_stats;

typedef enum sdpa_softmax_phase {
    SDPA_SOFTMAX_SUM,   /* take a chunk into stats */
    SDPA_SOFTMAX_WRITE, /* write a chunk from stats */
    SDPA_SOFTMAX_WHOLE, /* both, on the whole row; stats are not used */
} sdpa_softmax_phase;

/* n_rows rows of n elements of the compute type, strides in elements. softmax_rows needs unit column strides;
 * softmax_lanes unit row strides and as many rows as there are lanes. out is neither x nor g. */
typedef struct sdpa_softmax_block {
    sdpa_softmax_op op;
    sdpa_softmax_phase phase;
    int64_t n_rows, n;
    const void *x, *g;
    void *out;
    int64_t x_row, x_col, g_row, g_col, out_row, out_col;
    sdpa_softmax_stats *stats;
    const sdpa_softmax_scale *scale;
} sdpa_softmax_block;

#endif
