/* Loops over some of the axes of (batch, head): groups of the backward, the matrices that a tensor has of its own. */
#ifndef SDPA_LOOP_H
#define SDPA_LOOP_H

#include "problem.h"

/* One axis of the loop over (batch, head): `size` steps of `batch_step` in the flat batch index and `head_step` heads. */
typedef struct sdpa_loop_axis {
    int64_t size, batch_step, head_step;
} sdpa_loop_axis;

typedef struct sdpa_loop {
    int n_axes;
    int64_t size; /* product */
    sdpa_loop_axis axis[SDPA_MAX_AXES + 2];
} sdpa_loop;

static inline void sdpa_loop_push(sdpa_loop *l, int64_t size, int64_t batch_step, int64_t head_step) {
    if (size == 1) return;
    l->axis[l->n_axes++] = (sdpa_loop_axis){size, batch_step, head_step};
    l->size *= size;
}

/* Adds the position of step `index` (row-major, last axis fastest). */
static inline void sdpa_loop_locate(const sdpa_loop *l, int64_t index, int64_t *batch, int64_t *head) {
    for (int a = l->n_axes - 1; a >= 0; a--) {
        *batch += index % l->axis[a].size * l->axis[a].batch_step;
        *head += index % l->axis[a].size * l->axis[a].head_step;
        index /= l->axis[a].size;
    }
}

/* Lays t out anew: contiguous n_rows x n_cols matrices of elements of `size` bytes, one where it has one of its own (an
 * axis of stride 0 stays one; where row or col is 0, n_rows or n_cols is 1). Returns the bytes that t->data is to have;
 * *matrices runs over the matrices, in order. */
static inline int64_t sdpa_own_memory(const sdpa_problem *p, sdpa_tensor *t, int64_t n_rows, int64_t n_cols,
                                      int64_t size, sdpa_loop *matrices) {
    int64_t stride = size, step = p->n_batch;
    if (t->col) t->col = stride;
    stride *= n_cols;
    if (t->row) t->row = stride;
    stride *= n_rows;
    *matrices = (sdpa_loop){.size = 1};
    for (int a = 0; a < p->n_axes; a++) {
        step /= p->axis[a];
        if (t->batch[a]) sdpa_loop_push(matrices, p->axis[a], step, 0);
    }
    if (t->head) {
        sdpa_loop_push(matrices, p->n_head / t->group, 0, t->group);
        t->head = stride;
        stride *= p->n_head / t->group;
    }
    for (int a = p->n_axes - 1; a >= 0; a--) {
        if (!t->batch[a]) continue;
        t->batch[a] = stride;
        stride *= p->axis[a];
    }
    return stride;
}

#endif
