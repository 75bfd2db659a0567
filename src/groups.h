/* Grids of (batch, head): the groups of the backward and their members, the matrices of a tensor. */
#ifndef SDPA_GROUPS_H
#define SDPA_GROUPS_H

#include <assert.h>

#include "problem.h"

/* One axis of a grid: `size` steps of `batch_step` in the flat batch index and `head_step` heads. */
typedef struct sdpa_grid_axis {
    int64_t size, batch_step, head_step;
} sdpa_grid_axis;

/* A subset of all pairs (batch, head). A point of the grid is an index on each axis, and its pair is the sum of the
 * steps taken. */
typedef struct sdpa_grid {
    int n_axes;
    int64_t size; /* product */
    sdpa_grid_axis axis[SDPA_MAX_AXES + 2];
} sdpa_grid;

static inline void sdpa_grid_add_axis(sdpa_grid *g, int64_t size, int64_t batch_step, int64_t head_step) {
    if (size == 1) return;
    g->axis[g->n_axes++] = (sdpa_grid_axis){size, batch_step, head_step};
    g->size *= size;
}

/* Adds the position of point `index` (row-major) to *batch and *head. */
static inline void sdpa_grid_locate(const sdpa_grid *g, int64_t index, int64_t *batch, int64_t *head) {
    for (int a = g->n_axes - 1; a >= 0; a--) {
        *batch += index % g->axis[a].size * g->axis[a].batch_step;
        *head += index % g->axis[a].size * g->axis[a].head_step;
        index /= g->axis[a].size;
    }
}

/* Gives t the strides of contiguous n_rows x n_cols matrices, one after the other, with elements of `size` bytes; those
 * of the batch axes are written to `batch`, which may be NULL if there are none. Axes of stride 0 keep it; if row or
 * col is 0, n_rows or n_cols must be 1. Returns the number of bytes that t->data needs; *matrices enumerates the
 * matrices in order. */
static inline int64_t sdpa_tensor_compact(const sdpa_problem *p, sdpa_tensor *t, int64_t batch[SDPA_MAX_AXES],
                                          int64_t n_rows, int64_t n_cols, int64_t size, sdpa_grid *matrices) {
    assert(batch || p->n_axes == 0);
    int64_t stride = size, step = p->n_batch;
    if (t->col) t->col = stride;
    stride *= n_cols;
    if (t->row) t->row = stride;
    stride *= n_rows;
    *matrices = (sdpa_grid){.size = 1};
    for (int a = 0; a < p->n_axes; a++) {
        step /= p->axis[a];
        if (t->batch[a]) sdpa_grid_add_axis(matrices, p->axis[a], step, 0);
    }
    if (t->head) {
        sdpa_grid_add_axis(matrices, p->n_head / t->group, 0, t->group);
        t->head = stride;
        stride *= p->n_head / t->group;
    }
    for (int a = p->n_axes - 1; a >= 0; a--) {
        batch[a] = t->batch[a] ? stride : 0;
        if (t->batch[a]) stride *= p->axis[a];
    }
    t->batch = batch;
    return stride;
}

#endif
