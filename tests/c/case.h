/* A case with its arrays, as the drivers get it. In any layout buffers have exactly the size needed, so that sanitizers
 * see accesses beyond. */
#ifndef SDPA_CASE_H
#define SDPA_CASE_H

#include "naive.h"

/* Layouts of a tensor in memory other than (batch, head, row, column). */
enum {
    LAYOUT_ROWS_FIRST = 1 << 0,    /* (batch, row, head, column) */
    LAYOUT_COLUMNS_FIRST = 1 << 1, /* (batch, column, row, head); goes before the other */
    LAYOUT_REVERSED = 1 << 2,      /* the last row first */
    LAYOUT_SPACED = 1 << 3,        /* every second element */
    LAYOUT_SHIFTED = 1 << 4,       /* inputs: not aligned */
    LAYOUT_SWAPPED = 1 << 5        /* inputs: the other byte order */
};

typedef struct fixture {
    test_case c;
    naive a;
    sdpa_problem p;
    sdpa_tensor q_t, k_t, v_t; /* tangents, for forward mode */
    unsigned layout;           /* of the tensors that are made next */
    struct {
        char *memory;
        size_t bytes;
        sdpa_dtype dtype;
    } buffers[48];
    int64_t strides[48]; /* of the batch, of the tensor in each buffer */
    int n_buffers;
} fixture;

enum { GARBAGE = 0x5a };

double get(const char *at, sdpa_dtype dtype);

/* Makes (n_batch, heads, rows, cols); heads = SHARED makes one matrix for every batch entry and head. An input takes
 * `values`, which are rounded to its type. For an output `values` is NULL; it holds GARBAGE if a driver has to write or
 * clear it, else zeros. */
sdpa_tensor new_tensor(fixture *f, sdpa_dtype dtype, int64_t heads, int64_t rows, int64_t cols, double *values);

/* Draws the inputs of a case and computes the expected results. */
fixture *new_fixture(const test_case *c, unsigned layout);
void free_fixture(fixture *f);
void free_buffers(fixture *f, int from);

void check_bounded(const fixture *f, const char *what, const sdpa_tensor *t, const bounded *expected);

/* Checks forward, backward, weights (all and chosen ones), the weights that keys receive, statistics, and
 * forward mode. */
void check_case(fixture *f);

#endif
