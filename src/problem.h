/* The problem descriptor: what one call computes. src/python fills and checks it once; below that it is const.
 *
 * Invariants (established by the binding, relied upon everywhere else, asserted by sdpa_problem_check):
 *   - sizes are >= 0; n_head is a multiple of every tensor's `group`; all sizes times strides fit in int64_t;
 *   - if there are queries, no axis of rows or columns is longer than SDPA_LARGEST_AXIS, and all heads together have at
 *     most SDPA_MOST_ROWS rows of queries and of keys (zero strides allow more), so that no number of bytes wraps around;
 *   - q (and dout where present) have `dtype`; k and v share it or, beside F32, are both F16 or both BF16; outputs have
 *     native byte order and are aligned, inputs may have any order and alignment;
 *   - an output never overlaps an input or another output, and no two elements of an output share memory,
 *     except along broadcast axes of gradients (stride 0), where the driver accumulates;
 *   - scale is finite;
 *   - `features` agrees with the other fields.
 *  */
#ifndef SDPA_PROBLEM_H
#define SDPA_PROBLEM_H

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* SDPA_FORKED: `interrupted` forked the process, and this is the child, which lacks the threads that computed. */
typedef enum sdpa_status { SDPA_OK = 0, SDPA_NO_MEMORY, SDPA_INTERRUPTED, SDPA_FORKED } sdpa_status;

typedef enum sdpa_dtype { SDPA_BOOL, SDPA_F16, SDPA_BF16, SDPA_F32, SDPA_F64, SDPA_I64 } sdpa_dtype;

/* Whether arithmetic on this type is done in a wider one. */
static inline bool sdpa_is_narrow(sdpa_dtype dtype) { return dtype == SDPA_F16 || dtype == SDPA_BF16; }

/* Bytes of an element. */
static inline int64_t sdpa_size_of(sdpa_dtype dtype) {
    return dtype == SDPA_F64 || dtype == SDPA_I64 ? 8 : dtype == SDPA_F32 ? 4 : dtype == SDPA_BOOL ? 1 : 2;
}

/* The softmax family (softmax.h). t is the temperature; sums run over a row, that is, over all reduced axes
 * together. */
typedef enum sdpa_softmax_op {
    SDPA_SOFTMAX,              /* out = p = exp(x / t) / sum exp(x / t) */
    SDPA_LOG_SOFTMAX,          /* out = log p */
    SDPA_LOGSUMEXP,            /* out = log sum exp(x), one per row */
    SDPA_SOFTMAX_BACKWARD,     /* x = p:      out = p (g - sum g p) / t */
    SDPA_LOG_SOFTMAX_BACKWARD, /* x = log p:  out = (g - p sum g) / t, 0 where p = 0 */
    SDPA_LOGSUMEXP_BACKWARD,   /* s = lse:    out = g exp(x - lse), 0 where x = -inf; g is one per row */
    SDPA_SOFTMAX_JACOBIAN,     /* x = p, s = p_i: out_ij = p_i (delta_ij - p_j) / t; the axes of i are kept ones */
} sdpa_softmax_op;

#define SDPA_LARGEST_AXIS (INT64_C(1) << 40)
#define SDPA_MOST_ROWS (INT64_C(1) << 48)

/* NumPy allows 64 dimensions; three of them, heads, rows and columns, are not batch axes. */
#define SDPA_MAX_AXES 61

/* A NumPy buffer seen as (batch axes..., heads, rows, columns). Strides are in bytes, 0 along broadcast axes. */
typedef struct sdpa_tensor {
    char *data; /* first element; NULL: absent */
    int64_t row, col;
    int64_t head;  /* stride between the tensor's own heads */
    int64_t group; /* consecutive query heads that share one of these (GQA), else 1 */
    sdpa_dtype dtype;
    bool swapped;         /* byte order is not the machine's */
    const int64_t *batch; /* (n_axes): strides of the batch axes, in memory of whoever filled the problem */
} sdpa_tensor;

/* One (batch, head) of a tensor. */
typedef struct sdpa_matrix {
    char *data;
    int64_t row, col;
    sdpa_dtype dtype;
    bool swapped;
} sdpa_matrix;

/* Indices along an axis, in any order, repeated or not. NULL: the whole axis; n is not used then. */
typedef struct sdpa_choice {
    const int64_t *index;
    int64_t n;
} sdpa_choice;

/* Adds one more differentiable option per head, which has no meaning: the test that options reach every interface
 * builds with it (tests/interop/test_every_door.py). */
#ifdef SDPA_DUMMY_OPTION
#define SDPA_DUMMY(X, ...) X(__VA_ARGS__)
#else
#define SDPA_DUMMY(X, ...)
#endif

/* Every tensor of a problem, as X(name, rows, columns). Declarations, clearing, checks and units are generated from
 * these lists, so a new tensor is added here and nowhere else.
 *
 * mask: BOOL (true = attend) or a float type (added to the scaled scores). where: BOOL, beside a mask only.
 * alibi_slopes: -slope * |i + offset - j| is added. sinks: one extra logit per row, without a value. scales: the scale
 * of each head, in place of the problem's. Any of these may be absent, and so may v. */
#define SDPA_INPUTS(X)                                                                                                 \
    X(q, p->n_q, p->d_k)                                                                                               \
    X(k, p->n_k, p->d_k)                                                                                               \
    X(v, p->n_k, p->d_v)                                                                                               \
    X(mask, p->n_q, p->n_k)                                                                                            \
    X(where, p->n_q, p->n_k)                                                                                           \
    X(alibi_slopes, 1, 1)                                                                                              \
    X(sinks, 1, 1)                                                                                                     \
    X(scales, 1, 1)                                                                                                    \
    X(dout, p->n_q, p->d_v)                                                                                            \
    SDPA_DUMMY(X, dummy, 1, 1)

/* o is an input of the backward. The drivers of weights, statistics and received weights write their result to it. o_t
 * is the derivative of o along the tangents or, in the double backward, the derivative with respect to dout. */
#define SDPA_RESULTS(X)                                                                                                \
    X(o, p->n_q, p->d_v)                                                                                               \
    X(o_t, p->n_q, p->d_v)

/* A gradient that is absent is not computed. Gradients have stride 0 on axes over which they are summed. The caller
 * fills every gradient for which sdpa_clears is false with zeros. Rows of dk and dv have no gaps between columns. */
#define SDPA_GRADIENTS(X)                                                                                              \
    X(dq, p->n_q, p->d_k)                                                                                              \
    X(dk, p->n_k, p->d_k)                                                                                              \
    X(dv, p->n_k, p->d_v)                                                                                              \
    X(dmask, p->n_q, p->n_k)                                                                                           \
    SDPA_HEAD_GRADIENTS(X)

/* Those of one number per head, to which all units of a head add. Packed sequences share them. */
#define SDPA_HEAD_GRADIENTS(X) X(dsinks, 1, 1) X(dscales, 1, 1) SDPA_DUMMY(X, ddummy, 1, 1)

/* Inputs of forward mode and of the double backward; an absent one counts as zero. In the double backward they are the
 * gradients of the gradients, and the gradients are the derivatives of <tangents, backward(...)>. */
#define SDPA_TANGENTS(X)                                                                                               \
    X(q_t, p->n_q, p->d_k)                                                                                             \
    X(k_t, p->n_k, p->d_k)                                                                                             \
    X(v_t, p->n_k, p->d_v)                                                                                             \
    X(mask_t, p->n_q, p->n_k)                                                                                          \
    X(sinks_t, 1, 1)                                                                                                   \
    X(scales_t, 1, 1)                                                                                                  \
    SDPA_DUMMY(X, dummy_t, 1, 1)

#define SDPA_MATRICES(X) SDPA_INPUTS(X) SDPA_RESULTS(X) SDPA_GRADIENTS(X) SDPA_TANGENTS(X)

/* One number per query; only the stride `row` is used. float32, or float64, for F64 always. lse is an output of the
 * forward and an input of the backward; dlse may be absent. */
#define SDPA_VECTORS(X)                                                                                                \
    X(lse, p->n_q, 1)                                                                                                  \
    X(dlse, p->n_q, 1)

/* Offsets beyond this on either side are refused before the core, whose sums with them could overflow. */
#define SDPA_LARGEST_OFFSET (INT64_C(1) << 60)

/* One I64 per batch entry, or per packed sequence, `row` bytes apart. An absent offset counts as 0, an absent
 * key_length as n_k. */
#define SDPA_INTEGERS(X)                                                                                               \
    X(offset, 1, 1)                                                                                                    \
    X(key_length, 1, 1)

#define SDPA_TENSORS(X) SDPA_MATRICES(X) SDPA_VECTORS(X) SDPA_INTEGERS(X)

/* The inputs with gradients, as X(name, tensor, n_inner): the argument `name` is the problem's `tensor`, which has the
 * gradient d`tensor`, the tangent `tensor`_t and n_inner axes behind the heads. */
#define SDPA_OPERANDS(X) X(query, q, 2) X(key, k, 2) X(value, v, 2)
#define SDPA_COMMON_OPTIONS(X) X(attn_mask, mask, 2) X(sinks, sinks, 0) SDPA_DUMMY(X, dummy, dummy, 0)
#define SDPA_DOT_OPTIONS(X) X(scale, scales, 0) /* additive attention takes numbers only */
#define SDPA_DIFFERENTIABLE_OPTIONS(X) SDPA_COMMON_OPTIONS(X) SDPA_DOT_OPTIONS(X)
#define SDPA_DIFFERENTIABLE(X) SDPA_OPERANDS(X) SDPA_DIFFERENTIABLE_OPTIONS(X)

/* The options that are one number. scale: of all heads, without `scales`. softcap: > 0, scaled scores become softcap *
 * tanh(score / softcap); 0, none. dropout_p: in [0, 1]; the pattern depends on seed, batch, head, i, j only. */
#define SDPA_NUMBERS(X) X(scale) X(softcap) X(dropout_p)

/* How a pair is scored. With SDPA_ADDITIVE (additive.c) a row of q or k holds `channels` projections, then their
 * exponentials, and the score is sum_c w_score[c] tanh(q[c] + k[c]) instead of q k^T. */
typedef enum sdpa_scores { SDPA_DOT, SDPA_ADDITIVE } sdpa_scores;

/* The matrix of weights, and what it comes from. */
typedef enum sdpa_stage { SDPA_WEIGHTS, SDPA_SCORES, SDPA_CAPPED, SDPA_BIASED } sdpa_stage;

/* What a problem asks for beyond softmax(scale q k^T) v. Each fast path lists, next to its code, the features that it
 * supports; a problem with any other feature goes the general way. A new feature therefore needs no change in a fast
 * path. */
enum {
    SDPA_FEATURE_MASK = 1 << 0, /* boolean */
    SDPA_FEATURE_BIAS = 1 << 1, /* a mask of floats */
    SDPA_FEATURE_LOWER = 1 << 2,
    SDPA_FEATURE_UPPER = 1 << 3,
    SDPA_FEATURE_OFFSET = 1 << 4,
    SDPA_FEATURE_LENGTHS = 1 << 5,
    SDPA_FEATURE_SOFTCAP = 1 << 6,
    SDPA_FEATURE_DROPOUT = 1 << 7,
    SDPA_FEATURE_SINKS = 1 << 8,
    SDPA_FEATURE_ALIBI = 1 << 9,
    SDPA_FEATURE_ADDITIVE = 1 << 10,
    SDPA_FEATURE_INVARIANT = 1 << 11,
    SDPA_FEATURE_SCALES = 1 << 12,
    SDPA_FEATURE_WHERE = 1 << 13,
    SDPA_FEATURE_SCORE_MOD = 1 << 14,
    SDPA_FEATURE_MASK_MOD = 1 << 15,
    SDPA_FEATURE_UNKNOWN = 1 << 30, /* for tests: no path may name it */

    /* Which pairs are seen, and what is added to their logits: every path that works on blocks of pairs knows them. */
    SDPA_FEATURES_OF_PAIRS = SDPA_FEATURE_MASK | SDPA_FEATURE_BIAS | SDPA_FEATURE_LOWER | SDPA_FEATURE_UPPER |
                             SDPA_FEATURE_OFFSET | SDPA_FEATURE_LENGTHS,
    /* And what only a unit knows: the scale of its head, a second mask, a mask that is a program. */
    SDPA_FEATURES_OF_UNITS = SDPA_FEATURES_OF_PAIRS | SDPA_FEATURE_SCALES | SDPA_FEATURE_WHERE | SDPA_FEATURE_MASK_MOD,
};

typedef struct sdpa_problem {
    int64_t n_batch; /* product of axis[] */
    int64_t n_head;  /* query heads */
    int64_t n_q, n_k, d_k, d_v;
    sdpa_dtype dtype; /* of q and o; k, v: see above; arithmetic is float64 for F64, else float32 */

    sdpa_scores scores;
    int64_t channels;    /* ADDITIVE: even; d_k is twice this */
    const void *w_score; /* ADDITIVE: (channels) of the compute type */

#define SDPA_DECLARE(name) double name;
    SDPA_NUMBERS(SDPA_DECLARE)
#undef SDPA_DECLARE
    uint64_t seed;

    /* Key j is visible to query i when j < key_length, and, with t = i + offset,
     * j >= t + lower (has_lower) and j <= t + upper (has_upper). */
    bool has_lower, has_upper;
    int64_t lower, upper;

    /* The bits of a query's results depend only on the query, the keys that it sees, their positions and the options.
     * All shapes are then computed in one way, and blocks of keys begin at multiples of their size. */
    bool invariant;

    /* Functions of the user (program.h), or NULL: of the scores after scale and softcap, before the mask is added; of
     * which pairs are visible. Not with SDPA_ADDITIVE. */
    const struct sdpa_program *score_mod, *mask_mod;

    sdpa_choice heads, queries; /* the wanted ones; only weights and received weights allow a choice */
    sdpa_stage stage;           /* the wanted one of weights */

    unsigned features; /* sdpa_problem_features of the rest */

    int n_workers;            /* >= 1 */
    int (*interrupted)(void); /* polled by the calling thread; non-zero ends the call. May be NULL */

    /* NULL, or packed sequences (sequences.h): sequence s has queries cu_q[s] .. cu_q[s+1]-1 and keys cu_k[s] ..
     * cu_k[s+1]-1; n_q and n_k count all rows, those of padding behind the last sequence included. There are no batch
     * axes and no mask. The driver sums SDPA_HEAD_GRADIENTS over the sequences. */
    const int64_t *cu_q, *cu_k; /* (n_sequences + 1): from 0, not decreasing, up to n_q and n_k */
    int64_t n_sequences;
    int64_t first_batch; /* the number that dropout's generator uses for batch entry 0 */

    int n_axes;          /* batch axes, after broadcasting */
    const int64_t *axis; /* (n_axes): their sizes, in memory of whoever filled the problem */
#define SDPA_DECLARE(name, rows, columns) sdpa_tensor name;
    SDPA_TENSORS(SDPA_DECLARE)
#undef SDPA_DECLARE
} sdpa_problem;

/* Whether there is any query. Without queries, drivers touch nothing. */
static inline bool sdpa_has_queries(const sdpa_problem *p) { return p->n_batch > 0 && p->n_head > 0 && p->n_q > 0; }

/* Whether `t`, a gradient of p, need not arrive zero-filled: the driver clears or overwrites it. */
static inline bool sdpa_clears(const sdpa_problem *p, const sdpa_tensor *t) {
    return sdpa_has_queries(p) && (t == &p->dq || t == &p->dk || t == &p->dv);
}

/* The largest number that the arithmetic on `dtype` still holds in units of log2, in which kernels take a scale, and a
 * softcap, which is none beyond it. */
static inline double sdpa_largest(sdpa_dtype dtype) { return (dtype == SDPA_F64 ? DBL_MAX : FLT_MAX) / M_LOG2E; }

/* The features implied by the other fields. Code that fills or changes a problem ends by storing them in
 * p->features. */
unsigned sdpa_problem_features(const sdpa_problem *p);

/* The result that a driver computes. It determines which tensors the driver writes. */
typedef enum sdpa_pass {
    SDPA_PASS_FORWARD, /* o, lse; so does merging */
    SDPA_PASS_WEIGHTS, /* o, whose columns are keys */
    SDPA_PASS_STATISTICS,
    SDPA_PASS_RECEIVED, /* o, whose rows are keys */
    SDPA_PASS_TANGENT,
    SDPA_PASS_BACKWARD,
    SDPA_PASS_SECOND,
    SDPA_N_PASSES
} sdpa_pass;

/* Multiply-adds of a pass over `pairs` of a query and a key, roughly. An exponential costs about 16. */
double sdpa_pass_work(const sdpa_problem *p, sdpa_pass pass, double pairs);

enum { SDPA_N_STATISTICS = 7, SDPA_N_RECEIVED = 2 }; /* columns of o that their drivers write */

/* With SDPA_ASSERT, which the tests of the core and the sanitized build define, every driver asserts the invariants of
 * its problem, and fast paths count how often they are taken. Otherwise both compile to nothing. */
enum sdpa_path {
    SDPA_PATH_FEW_KEYS,
    SDPA_PATH_ONE_BLOCK,
    SDPA_PATH_FEW_QUERIES,
    SDPA_PATH_NARROW,
    SDPA_PATH_BF16_PAIRS,
    SDPA_PATH_AMX,
    SDPA_PATH_FOLD,
    SDPA_PATH_PARTS,
    SDPA_PATH_FUSED,
    SDPA_PATH_FIRST,
    SDPA_PATH_SPLIT,
    SDPA_N_PATHS
};
#ifdef SDPA_ASSERT
void sdpa_problem_check(const sdpa_problem *p, sdpa_pass pass);
extern _Atomic long sdpa_taken[SDPA_N_PATHS];
#define SDPA_TAKE(path) ((void)sdpa_taken[SDPA_PATH_##path]++)
#else
static inline void sdpa_problem_check(const sdpa_problem *p, sdpa_pass pass) { (void)p, (void)pass; }
#define SDPA_TAKE(path) ((void)0)
#endif

/* Byte offset of (batch, head) in `t`; `batch` is the flat index over p->axis, `head` a query head. */
static inline int64_t sdpa_offset(const sdpa_problem *p, const sdpa_tensor *t, int64_t batch, int64_t head) {
    /* No division unless it is needed: divisions show in the time of small calls. */
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
