/* The problem descriptor: what one call computes. src/python fills and checks it once; below that it is const.
 *
 * Invariants (checked by the binding, relied upon everywhere else):
 *   - sizes are >= 0; n_head is a multiple of every tensor's `group`; all sizes times strides fit in int64_t;
 *   - q, k, v (and do where present) share `dtype`; outputs are native byte order and aligned, inputs may be anything;
 *   - an output never overlaps an input or another output, and no two elements of an output share memory,
 *     except along broadcast axes of gradients (stride 0), where the driver accumulates;
 *   - scale is finite.
 */
#ifndef SDPA_PROBLEM_H
#define SDPA_PROBLEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum sdpa_status { SDPA_OK = 0, SDPA_NO_MEMORY, SDPA_INTERRUPTED } sdpa_status;

typedef enum sdpa_dtype { SDPA_BOOL, SDPA_F16, SDPA_BF16, SDPA_F32, SDPA_F64, SDPA_I64 } sdpa_dtype;

/* NumPy's limit on dimensions is 64; heads, rows and columns are not batch axes. */
#define SDPA_MAX_AXES 61

/* A NumPy buffer seen as (batch axes..., heads, rows, columns). Strides are in bytes, 0 where it broadcasts. */
typedef struct sdpa_tensor {
    char *data; /* first element; NULL: absent */
    int64_t row, col;
    int64_t head;  /* stride from one of its own heads to the next */
    int64_t group; /* consecutive query heads that share one of its heads (GQA); 1 otherwise */
    sdpa_dtype dtype;
    bool swapped;                 /* byte order is not the machine's */
    int64_t batch[SDPA_MAX_AXES]; /* the first n_axes are set */
} sdpa_tensor;

/* One (batch, head) of a tensor. */
typedef struct sdpa_matrix {
    char *data;
    int64_t row, col;
    sdpa_dtype dtype;
    bool swapped;
} sdpa_matrix;

typedef struct sdpa_problem {
    int n_axes; /* batch axes, after broadcasting */
    int64_t axis[SDPA_MAX_AXES];
    int64_t n_batch; /* product of axis[] */
    int64_t n_head;  /* query heads */
    int64_t n_q, n_k, d_k, d_v;
    sdpa_dtype dtype; /* of q, k, v, o; arithmetic is float64 for F64, else float32 */

    sdpa_tensor q, k, v;
    sdpa_tensor o;    /* (n_q, d_v) */
    sdpa_tensor lse;  /* (n_q): only row is used; float32, float64 for F64. Output of forward, input of backward */
    sdpa_tensor mask; /* (n_q, n_k), BOOL (true = attend) or a float type (added to the scaled scores) */

    /* Additive attention (additive.c): rows of q and k are d_k / 2 projections, then as many exponentials of them, and the
     * score is sum_c w_score[c] tanh(q[c] + k[c]) instead of q k^T. Of the compute type, d_k / 2 even; NULL otherwise. */
    const void *w_score;

    double scale;
    double softcap;           /* > 0: scaled scores become softcap * tanh(score / softcap); 0: none */
    sdpa_tensor alibi_slopes; /* scalar per (batch, head): -slope * |i + offset - j| is added. Absent: none */
    sdpa_tensor sinks;        /* scalar per (batch, head): one more logit, without a value. Absent: none */
    double dropout_p;         /* in [0, 1]; the pattern depends on seed, batch, head, i, j only */
    uint64_t seed;

    /* Key j is visible to query i when j < key_length, and, with t = i + offset,
     * j >= t + lower (has_lower) and j <= t + upper (has_upper). */
    bool has_lower, has_upper;
    int64_t lower, upper;
    sdpa_tensor offset;     /* I64 scalar per batch entry; absent: 0 */
    sdpa_tensor key_length; /* I64 scalar per batch entry; absent: n_k */

    /* backward: do, dlse are inputs (dlse may be absent); an absent gradient is not computed.
     * Gradients have stride 0 on axes over which they are summed, and arrive zero-filled. */
    sdpa_tensor dout, dlse;
    sdpa_tensor dq, dk, dv, dmask, dsinks;

    /* forward mode and double backward: tangents, each may be absent (zero). o_t is an output. For the double backward
     * they are the gradients of the gradients, and dq .. dsinks the derivatives of <tangents, backward(...)>. */
    sdpa_tensor q_t, k_t, v_t, mask_t, sinks_t;
    sdpa_tensor o_t; /* like o; for the double backward the derivative with respect to dout; may be absent */

    int n_workers;            /* >= 1 */
    int (*interrupted)(void); /* polled by the calling thread; non-zero ends the call. May be NULL */
} sdpa_problem;

/* Byte offset of (batch, head) in `t`; `batch` is the flat index over p->axis, `head` a query head. */
static inline int64_t sdpa_offset(const sdpa_problem *p, const sdpa_tensor *t, int64_t batch, int64_t head) {
    /* Without a division where none is needed: for (128, 10, 64) they were a twentieth of the call. */
    int64_t offset = (t->group == 1 ? head : head / t->group) * t->head;
    for (int a = p->n_axes - 1; a > 0; a--) {
        offset += batch % p->axis[a] * t->batch[a];
        batch /= p->axis[a];
    }
    return p->n_axes ? offset + batch * t->batch[0] : offset;
}

static inline sdpa_matrix sdpa_matrix_at(const sdpa_problem *p, const sdpa_tensor *t, int64_t batch, int64_t head) {
    sdpa_matrix m = {NULL, t->row, t->col, t->dtype, t->swapped};
    if (t->data) {
        m.data = t->data + sdpa_offset(p, t, batch, head);
    }
    return m;
}

#endif
