/* The table of kernels that each ISA provides; such tables are all that a kernel object exports. */
#ifndef SDPA_KERNELS_H
#define SDPA_KERNELS_H

#include "../drivers.h"
#include "../parallel.h"
#include "../problem.h"
#include "../softmax.h"

#if defined(__x86_64__)
#define SDPA_FOR_EACH_ISA(X) X(generic) X(avx2) X(avx512) X(avx512bf16)
#elif defined(__aarch64__)
#define SDPA_FOR_EACH_ISA(X) X(generic) X(neon)
#else
#define SDPA_FOR_EACH_ISA(X) X(generic)
#endif

/* Queries per unit, fewer where a band makes blocks on the diagonal partly useless, and keys per block. P V and the row
 * sums are summed from zero over one key block, then added, which bounds their rounding; partitions depend on the shape
 * only, so results do not depend on the number of threads. */
#define SDPA_QUERY_BLOCK 96
static inline int64_t sdpa_query_block(const sdpa_problem *p) {
    return p->has_lower || p->has_upper ? SDPA_QUERY_BLOCK / 2 : SDPA_QUERY_BLOCK;
}

/* The same for the forward, whose units share no result: twice as many where that leaves units for all threads and q and o
 * take no more than two fifths of L2, so that half as many units bring the values into place and read the keys: AVX2,
 * (1, 1024, 64), 80.9 to 82.5 GF/s, (8, 2048, 128) 1.03 times as fast; four times as many again no faster. Units begin at
 * multiples of sdpa_query_block, and queries after the last whole unit are left to small ones, so that rows do not depend on
 * it. A window's key blocks do: they begin where the unit's first query sees a key. */
static inline int64_t sdpa_forward_block(const sdpa_problem *p) {
    const int64_t block = sdpa_query_block(p), wide = 2 * block, units = p->n_batch * p->n_head * (p->n_q / wide);
    const bool enough = units > 0 && (p->n_workers == 1 || units >= 4 * p->n_workers);
    return enough && !p->has_lower && wide * (p->d_k + p->d_v) <= 49152 ? wide : block;
}

static inline int64_t sdpa_key_block(const sdpa_problem *p) { return p->d_k + p->d_v <= 512 ? 128 : 64; }

/* Whose turn it is in the backward: units of one group (backward.c) add to the same dK and dV. */
typedef struct sdpa_turn sdpa_turn;

/* Part of one (batch, head): query rows i0 .. i0+n_i-1, at most SDPA_QUERY_BLOCK. Matrices start at row 0. */
typedef struct sdpa_unit {
    const sdpa_problem *problem;
    int64_t batch, head;
    sdpa_matrix q, k, v, o, mask, alibi_slopes, sinks;
    sdpa_matrix dout, dq, dk, dv, dmask, dsinks;
    sdpa_matrix q_t, k_t, v_t, o_t, mask_t, sinks_t;
    char *lse, *dlse; /* element of query 0 */
    int64_t i0, n_i;
    int64_t lower, upper;                  /* query i sees keys i + lower .. i + upper (has_lower, has_upper) */
    int64_t offset, first_key, key_length; /* and none before first_key or from key_length on */
    sdpa_turn *turns;                      /* of the group; NULL: units run one after the other */
    int64_t turn;                          /* this unit's */
    bool ordered;                          /* units of the group end in order */
    sdpa_run *run;
} sdpa_unit;

/* Keys that some query of i0 .. i0+n_i-1 can see: *j0 <= j < *j1. */
static inline void sdpa_visible_keys(const sdpa_unit *u, int64_t i0, int64_t n_i, int64_t *j0, int64_t *j1) {
    const sdpa_problem *p = u->problem;
    *j0 = u->first_key;
    *j1 = u->key_length;
    if (p->has_lower && i0 + u->lower > *j0) *j0 = i0 + u->lower;
    if (p->has_upper && i0 + n_i + u->upper < *j1) *j1 = i0 + n_i + u->upper;
    if (*j1 < *j0) *j1 = *j0;
}

/* Before and after a unit works on key block `block`; before it adds to what is not divided by keys; at its end. The
 * waits return false when the call was interrupted. */
bool sdpa_turn_wait(const sdpa_unit *u, int64_t block);
void sdpa_turn_pass(const sdpa_unit *u, int64_t block);
bool sdpa_turn_wait_last(const sdpa_unit *u);
void sdpa_turn_end(const sdpa_unit *u);

/* Kernels of one compute type (float32 or float64). `real` below is that type. */
struct sdpa_kernels {
    int lanes; /* reals in a vector */

    /* n elements at src, `stride` bytes apart, of any float type or BOOL (true = 0, false = -inf: a mask), to real. */
    void (*load)(void *dst, const char *src, int64_t n, int64_t stride, sdpa_dtype dtype, bool swapped);
    /* n reals to native elements of a float type. */
    void (*store)(char *dst, const void *src, int64_t n, int64_t stride, sdpa_dtype dtype);

    /* One unit each; scratch of *_bytes(p), aligned to SDPA_ALIGNMENT. weights uses forward's. */
    size_t (*forward_bytes)(const sdpa_problem *p);
    void (*forward)(const sdpa_unit *u, void *scratch);
    /* The same by parts of the keys, first_key .. key_length-1 each, and their union. */
    size_t (*forward_part_bytes)(const sdpa_problem *p);
    void (*forward_part)(const sdpa_unit *u, void *scratch, void *part);
    void (*forward_join)(const sdpa_unit *u, void *scratch, const void *parts, int64_t n_parts);
    void (*weights)(const sdpa_unit *u, sdpa_stage stage, void *scratch);
    void (*statistics)(const sdpa_unit *u, void *scratch); /* forward's scratch; u->o is (n_q, 7) */
    size_t (*backward_bytes)(const sdpa_problem *p);
    void (*backward)(const sdpa_unit *u, void *scratch);
    size_t (*tangent_bytes)(const sdpa_problem *p);
    void (*tangent)(const sdpa_unit *u, void *scratch);
    size_t (*double_backward_bytes)(const sdpa_problem *p);
    void (*double_backward)(const sdpa_unit *u, void *scratch);

    /* Rows of the softmax family, and their staging into lanes (staging.inc.h). */
    void (*softmax_rows)(const sdpa_softmax_block *b);
    void (*softmax_lanes)(const sdpa_softmax_block *b);
    void (*load_lanes)(void *dst, const char *src, int64_t n_rows, int64_t n, int64_t row, int64_t col,
                       sdpa_dtype dtype, bool swapped);
    void (*store_lanes)(char *dst, const void *src, int64_t n_rows, int64_t n, int64_t row, int64_t col,
                        sdpa_dtype dtype);
    void (*leave_out)(void *dst, const char *where, int64_t n, int64_t stride);
};

struct sdpa_ops {
    const char *name;
    struct sdpa_kernels f32, f64, bf16; /* bf16: of float32, but for the forward of bfloat16 */

    /* The linear maps of additive attention, in float64 whatever its type (additive.inc.h). */
    void (*product)(double *c, int64_t c_row, const double *a, int64_t a_row, bool transposed, const double *b,
                    int64_t b_row, int64_t m, int64_t n, int64_t depth);
    void (*exponentials)(double *e, const double *x, int64_t n, double limit);
};

/* Whether the CPU computes vectors of 64 bytes in halves, as Zen 4 does. Speed depends on it, no bit of a result does. */
extern bool sdpa_half_vectors;

#define SDPA_DECLARE_ISA(isa) extern const struct sdpa_ops sdpa_isa_##isa;
SDPA_FOR_EACH_ISA(SDPA_DECLARE_ISA)
#undef SDPA_DECLARE_ISA

#endif
