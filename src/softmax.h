/* The softmax family: the descriptor that src/python fills, and its driver. */
#ifndef SDPA_SOFTMAX_H
#define SDPA_SOFTMAX_H

#include "problem.h"

/* NumPy's limit on the dimensions of an array. */
#define SDPA_SOFTMAX_AXES 64

/* A NumPy buffer over the axes of the call. Strides are in bytes, 0 along axes over which it broadcasts or has one
 * value per row. */
typedef struct sdpa_softmax_view {
    char *data; /* first element; NULL: absent */
    sdpa_dtype dtype;
    bool swapped;
    int64_t stride[SDPA_SOFTMAX_AXES];
} sdpa_softmax_view;

enum { SDPA_SOFTMAX_X, SDPA_SOFTMAX_G, SDPA_SOFTMAX_S, SDPA_SOFTMAX_WHERE, SDPA_SOFTMAX_OUT, SDPA_SOFTMAX_VIEWS };

/* Temperatures t from 2^-REACH to 2^REACH are in the range of arithmetic in `dtype`, and so are 1/t and the parts of its
 * multiples that matter. */
static inline int sdpa_temperature_reach(sdpa_dtype dtype) { return dtype == SDPA_F64 ? 1000 : 110; }

/* Invariants: sizes >= 0; x has dtype `dtype` and so has out, which is native and overlaps nothing; temperature is
 * within its reach; `where` (BOOL, forward only) leaves elements out, like x = -inf. In a row without any element left,
 * softmax is 0, log_softmax and logsumexp are -inf. A NaN that is not left out makes all elements of its row NaN that
 * are not left out. */
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

/* Fills out. Extra memory: per worker one block of rows, and 32 bytes for each chunk of 8192 elements of a longer row.
 * Results depend on the values, the shape and the ISA alone, not on strides or workers: every path sums a row in the
 * same order (kernels/softmax.h). */
sdpa_status sdpa_softmax_run(const sdpa_softmax_problem *p);

#endif
