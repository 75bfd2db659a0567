/* Attention by its definition, in double, with the bounds on the rounding errors of an implementation. */
#ifndef SDPA_NAIVE_H
#define SDPA_NAIVE_H

#include "../../src/problem.h"

typedef enum mask_kind { NO_MASK, BOOL_MASK, BIAS_MASK } mask_kind;

/* Random numbers in (0, 1) and N(0, 1), the same ones after every naive_seed. */
void naive_seed(void);
double naive_uniform(void);
double naive_normal(void);

/* The description of a call. Arrays are contiguous (batch, head, row, column); k and v have n_head / group heads; the
 * mask is (n_q, n_k), the same for every batch entry and head. */
typedef struct test_case {
    int64_t n_batch, n_head, group, n_q, n_k, d_k, d_v;
    sdpa_dtype dtype;
    sdpa_dtype narrow; /* of k and v, if it differs from dtype; else 0 */
    mask_kind mask;
    bool in_blocks; /* the mask hides or shows 40 queries and 200 keys together */
    bool has_lower, has_upper;
    int64_t lower, upper;
    bool offset, key_length; /* per batch entry: naive_offset, naive_key_length */
    int64_t offset_base;
    bool poisoned; /* contents that no query may see are NaN */
    double scale;
} test_case;

int64_t naive_offset(const test_case *c, int64_t batch);
int64_t naive_key_length(const test_case *c, int64_t batch);

enum { SHARED = -1 };

/* A quantity and, element by element, the largest error that its computation may have. */
typedef struct bounded {
    int64_t n, heads, rows, cols; /* (n_batch, heads, rows, cols), or (rows, cols) where heads is SHARED */
    double *x, *bound;
    double *rounded; /* what kernels err more that round p, and its gradient, before the last products */
} bounded;

typedef struct naive {
    double *q, *k, *v, *mask, *dout, *dlse; /* inputs; mask holds the bias: 0 or -inf for BOOL_MASK */
    double *q_t, *k_t, *v_t;                /* tangents */
    bounded w, o, o_t, lse, statistics, dq, dk, dv, dmask;
} naive;

/* The type of k and v, and of their gradients. */
static inline sdpa_dtype naive_key_dtype(const test_case *c) { return c->narrow ? c->narrow : c->dtype; }

/* Unit roundoff of a type. */
double naive_roundoff(sdpa_dtype dtype);

bool naive_visible(const test_case *c, int64_t batch, int64_t i, int64_t j, double bias);

/* An array of zeros, with bounds of zero. */
bounded naive_bounded(const test_case *c, int64_t heads, int64_t rows, int64_t cols);
void naive_free_bounded(bounded *b);

/* Allocates the arrays for `c`; draws nothing. */
naive naive_new(const test_case *c);
void naive_free(naive *a);

/* Computes everything else from the inputs. */
void naive_compute(const test_case *c, naive *a);

#endif
