/* The table of kernels that each instruction set provides for each type: the only symbol that a kernel object
 * exports. */
#ifndef SDPA_KERNELS_H
#define SDPA_KERNELS_H

#include "../drivers.h"
#include "../runtime/memory.h"
#include "../runtime/parallel.h"
#include "../problem.h"

/* Queries per unit, and keys per block. Units are smaller under a band, which makes blocks on the diagonal partly
 * useless, and where a single head of up to 16 blocks has to keep all threads busy. P V and the row sums are summed
 * from zero over one key block and then added, which bounds their rounding. Partitions depend on the shape only, so
 * results do not depend on the number of threads. */
#define SDPA_QUERY_BLOCK 96
static inline int64_t sdpa_query_block(const sdpa_problem *p) {
    const bool single = p->n_head == 1 && p->n_q > 64 && p->n_q <= 16 * SDPA_QUERY_BLOCK;
    return single || p->has_lower || p->has_upper ? SDPA_QUERY_BLOCK / 2 : SDPA_QUERY_BLOCK;
}

static inline int64_t sdpa_key_block(const sdpa_problem *p) { return p->d_k + p->d_v <= 512 ? 128 : 64; }

/* Consecutive queries i0 .. i0+n_i-1, at most a block of them. They are rows `row` .. of the result, and start at
 * `lane` in arrays that have one lane per query and begin each span on a whole vector. */
typedef struct sdpa_span {
    int64_t i0, n_i, row, lane;
} sdpa_span;

/* What a boolean mask shows a unit (outline.h): for each panel of queries and SDPA_STRETCH keys whether any pair is
 * shown, and whether any is hidden. It is found in strips of SDPA_STRIP keys, since memory is read fastest where many
 * bytes of a row follow each other. */
#define SDPA_STRETCH 32
#define SDPA_STRIP 4096
typedef struct sdpa_outline {
    _Atomic int64_t *found; /* per strip, 0 at first; NULL: there is no outline */
    unsigned char *shown;   /* (panels, row) */
    int64_t row;            /* 0: all panels see the same */
} sdpa_outline;

/* The order in which the units of a group (backward.c) add to the same dK and dV. */
typedef struct sdpa_turn sdpa_turn;

/* Part of one (batch, head): query rows i0 .. i0+n_i-1, at most SDPA_QUERY_BLOCK. Matrices start at row 0. */
typedef struct sdpa_unit {
    const sdpa_problem *problem;
    int64_t batch, head;
    double scale, scale_t; /* the head's, and its tangent; logits.h makes factors of them */
    int64_t i0, n_i;
    int64_t lower, upper;   /* query i sees keys i + lower .. i + upper (has_lower, has_upper), */
    int64_t first_key;      /* and none before first_key or from key_length on */
    sdpa_turn *turns;       /* of the group; NULL: units run one after the other */
    int64_t turn;           /* the unit's index there */
    bool ordered;           /* units of the group end in order */
    bool fetches;           /* the next head's rows are to be asked for */
    bool fresh;             /* dq, dk and dv are not initialised, and no other unit adds to them */
    bool own_dq;            /* dq is not initialised, and no other unit adds to its rows */
    struct sdpa_sums *sums; /* for the gradients of score_mod's arrays (program.h); NULL: not wanted */
    sdpa_outline mask_outline, where_outline;
    bool *begun; /* of each key block, whether dk and dv are initialised; NULL: all are, or the unit is fresh */
    sdpa_run *run;
#define SDPA_INTEGER(name, rows, columns) int64_t name;
#define SDPA_VECTOR(name, rows, columns) char *name; /* element of query 0 */
#define SDPA_MATRIX(name, rows, columns) sdpa_matrix name;
    SDPA_INTEGERS(SDPA_INTEGER)
    SDPA_VECTORS(SDPA_VECTOR)
    SDPA_MATRICES(SDPA_MATRIX)
#undef SDPA_INTEGER
#undef SDPA_VECTOR
#undef SDPA_MATRIX
} sdpa_unit;

/* The keys *j0 <= j < *j1 include all that a query of i0 .. i0+n_i-1 can see. */
static inline void sdpa_visible_keys(const sdpa_unit *u, int64_t i0, int64_t n_i, int64_t *j0, int64_t *j1) {
    const sdpa_problem *p = u->problem;
    *j0 = u->first_key;
    *j1 = u->key_length;
    if (p->has_lower && i0 + u->lower > *j0) *j0 = i0 + u->lower;
    if (p->has_upper && i0 + n_i + u->upper < *j1) *j1 = i0 + n_i + u->upper;
    if (*j1 < *j0) *j1 = *j0;
}

/* A unit calls sdpa_turn_wait and sdpa_turn_pass before and after its work on key block `block`, or sdpa_turn_skip where
 * it sees nothing; sdpa_turn_wait_last before it adds to gradients that are not divided by keys; and sdpa_turn_end.
 * sdpa_turn_wait, _skip and _wait_last return false if the call was interrupted. sdpa_turn_blocks: sets the blocks
 * *first .. *last-1 to those that it must pass, where threads share its group. sdpa_turn_clear: initialises dk and dv of
 * a key block, if nothing has yet; sdpa_turn_wait does so, too. */
void sdpa_turn_blocks(const sdpa_unit *u, int64_t *first, int64_t *last);
void sdpa_turn_clear(const sdpa_unit *u, int64_t block);
bool sdpa_turn_wait(const sdpa_unit *u, int64_t block);
void sdpa_turn_pass(const sdpa_unit *u, int64_t block);
bool sdpa_turn_skip(const sdpa_unit *u, int64_t block);
bool sdpa_turn_wait_last(const sdpa_unit *u);
void sdpa_turn_end(const sdpa_unit *u);

/* Asks for the cache lines of a row. Inlined, since GCC drops calls of functions that do nothing else. */
__attribute__((always_inline)) static inline void sdpa_fetch_row(const char *row, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
}

/* What a backward reads and writes of a head. */
typedef enum sdpa_fetched { SDPA_FETCH_QK, SDPA_FETCH_DOUT_V, SDPA_FETCH_O_DV, SDPA_FETCH_DQ_DK } sdpa_fetched;

void sdpa_fetch_half(const sdpa_unit *u, sdpa_fetched what, int half);

/* If u fetches, asks for rows of the next head: for the first (0) or the second half (1) of each tensor's. A core can wait
 * for few cache lines at a time, so kernels ask for some between their steps, not for all at once. */
static inline void sdpa_fetch(const sdpa_unit *u, sdpa_fetched what, int half) {
    if (u->fetches) sdpa_fetch_half(u, what, half);
}

/* The longest part of a row that is summed in one go; longer rows are summed in chunks of this length. */
#define SDPA_SOFTMAX_CHUNK 8192
/* Rows per kernel call, at most: some vectors of any ISA. */
#define SDPA_SOFTMAX_ROWS 256

/* exp((x - m) / t) = 2^(c (x - m)), see vexp2_products; in backward functions exp(d) = 2^(c d). */
typedef struct sdpa_softmax_scale {
    double c, c_high, c_low, d_min, d_max;
    double inverse; /* 1 / t */
} sdpa_softmax_scale;

/* Of rows, or of a chunk of each: an element per row. Forward: its maximum m, and l + l_low = sum exp((x - m) / t).
 * Backward: l = sum g p or sum g, and m = -inf. logsumexp_backward: m = lse, l = g. Jacobian: l = -p_i / t. */
typedef struct sdpa_softmax_stats {
    double *m, *l, *l_low;
    double *factor; /* of a chunk: exp((m - M) / t), with M the maximum of its row; WRITE of SDPA_SOFTMAX needs it */
} sdpa_softmax_stats;

typedef enum sdpa_softmax_phase {
    SDPA_SOFTMAX_SUM,   /* set the stats of a chunk */
    SDPA_SOFTMAX_WRITE, /* write a chunk from the stats of its rows */
    SDPA_SOFTMAX_WHOLE, /* both, on the whole row; no stats are used */
} sdpa_softmax_phase;

/* n_rows rows of n elements of the compute type, strides in elements. softmax_rows needs unit column strides;
 * softmax_lanes takes rows in vectors, and row strides from one of them to the next. out is neither x nor g. */
typedef struct sdpa_softmax_block {
    sdpa_softmax_op op;
    sdpa_softmax_phase phase;
    int64_t n_rows, n;
    const void *x, *g;
    void *out;
    int64_t x_row, x_col, g_row, g_col, out_row, out_col;
    bool keeps;               /* SDPA_SOFTMAX: sums leave the exponentials in out, and WRITE takes them from there */
    sdpa_softmax_stats stats; /* of this chunk of each row; WRITE reads them for SDPA_SOFTMAX only */
    sdpa_softmax_stats row;   /* of the whole rows; read by WRITE */
    const sdpa_softmax_scale *scale;
    sdpa_dtype dtype; /* softmax_columns: of x, g and out */
    void *kept;       /* softmax_columns, in forward functions: room for n elements of `columns` rows */
} sdpa_softmax_block;

/* A kernel that runs one unit. `scratch` has bytes(p) bytes, aligned to SDPA_ALIGNMENT. */
typedef struct sdpa_unit_kernel {
    size_t (*bytes)(const sdpa_problem *p);
    void (*run)(const sdpa_unit *u, void *scratch);
} sdpa_unit_kernel;

/* Kernels of one compute type (float32 or float64). `real` below is that type. */
struct sdpa_kernels {
    int lanes;   /* reals in a vector */
    int passes;  /* bits (1 << sdpa_pass) of the passes that these kernels run where a set has them beside others, */
    int types;   /* and of their types (1 << sdpa_dtype) */
    bool rounds; /* multiplies bfloat16 without widening it, so weights are rounded to it */
    /* Whether the system's permission is needed for a problem (sdpa_amx_permitted). Others have the bits of the set's other
     * kernels, which run instead. NULL: for none. */
    bool (*asks)(const sdpa_problem *p);
    int64_t (*queries)(const sdpa_problem *p); /* of a unit of the forward and of statistics */

    /* Loads n elements, `stride` bytes apart, of any float type or BOOL (a mask: true = 0, false = -inf), as real. */
    void (*load)(void *dst, const char *src, int64_t n, int64_t stride, sdpa_dtype dtype, bool swapped);
    /* Stores n reals as native elements of a float type. */
    void (*store)(char *dst, const void *src, int64_t n, int64_t stride, sdpa_dtype dtype);
    /* to (n, d) = rows j0 .. j0+n-1 of m, of its type and in native byte order. `lines` has copy_bytes(n, d). */
    size_t (*copy_bytes)(int64_t n, int64_t d);
    void (*copy_rows)(char *to, const sdpa_matrix *m, int64_t j0, int64_t n, int64_t d, void *lines);

    sdpa_unit_kernel pass[SDPA_N_PASSES]; /* SDPA_PASS_RECEIVED and _BACKWARD have kernels of their own, below */
    /* The backward of n consecutive units of a group, at most backward_most; scratch is that of its pass. */
    int64_t (*backward_most)(const sdpa_problem *p);
    void (*backward)(const sdpa_unit *units, int64_t n, void *scratch);
    /* The forward over parts of the keys, each from first_key to key_length-1, and the joining of the parts. */
    size_t (*forward_part_bytes)(const sdpa_problem *p);
    void (*forward_part)(const sdpa_unit *u, void *scratch, void *part);
    void (*forward_join)(const sdpa_unit *u, void *scratch, const void *parts, int64_t n_parts);
    /* Not a pass: u->o has a row for each panel of queries, a column for each block of keys (drivers.h). */
    sdpa_tile (*tile)(const sdpa_problem *p);
    sdpa_unit_kernel pattern;
    /* The weights that keys receive, in two steps. The first fills `sums`, three reals for each lane of a unit of
     * queries. The second computes rows first_key .. first_key+n_keys-1, at most a block, of u->o (n_k, 2) from the
     * sums of all n_spans units of a head; it does not use u->i0 and u->n_i. */
    size_t (*received_bytes)(const sdpa_problem *p);
    void (*received_sums)(const sdpa_unit *u, void *sums, void *scratch);
    void (*received)(const sdpa_unit *u, int64_t n_keys, const sdpa_span *spans, int64_t n_spans, const void *sums,
                     void *scratch);

    /* Rows of the softmax family, and their staging into lanes (staging.h), which pays where rows of at most short_row
     * elements are summed, in the backward short_row_backward. */
    int short_row, short_row_backward;
    void (*softmax_rows)(const sdpa_softmax_block *b);
    void (*softmax_lanes)(const sdpa_softmax_block *b);
    /* At least `columns` rows side by side, of at most most_in_columns elements. 0: the set has no such kernel. */
    int columns, most_in_columns;
    void (*softmax_columns)(const sdpa_softmax_block *b);
    void (*load_lanes)(void *dst, int64_t line, const char *src, int64_t n_rows, int64_t n, int64_t row, int64_t col,
                       sdpa_dtype dtype, bool swapped);
    void (*store_lanes)(char *dst, const void *src, int64_t line, int64_t n_rows, int64_t n, int64_t row, int64_t col,
                        sdpa_dtype dtype);
    void (*leave_out)(void *dst, const char *where, int64_t n, int64_t stride);
    /* lse[i] = m_i + log(l_i + l_low_i), -inf where l_i = 0; as exact as results of the type need. */
    void (*log_sums)(double *lse, const sdpa_softmax_stats *t, int64_t n);

    /* float64 only: the linear maps of additive attention, whatever its dtype (additive.h). */
    void (*product)(double *c, int64_t c_row, const double *a, int64_t a_row, bool transposed, const double *b,
                    int64_t b_row, int64_t m, int64_t n, int64_t depth);
    void (*exponentials)(double *e, const double *x, int64_t n, double limit);
};

#endif
