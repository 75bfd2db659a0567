/* A call of the softmax family, and what is done with one group of its rows (softmax_shape.c). */
#ifndef SDPA_SOFTMAX_GROUP_H
#define SDPA_SOFTMAX_GROUP_H

#include "kernels/kernels.h"
#include "runtime/isa.h"
#include "runtime/parallel.h"
#include "softmax.h"

/* Doubles per row: the members of sdpa_softmax_stats. */
#define STATS_MEMBERS 4

typedef struct softmax_call {
    const sdpa_isa *isa;
    const struct sdpa_kernels *kernels;
    sdpa_softmax_op op;
    bool f64, lanes;
    bool strips;  /* lanes: all operands are staged */
    bool columns; /* the kernel takes whole rows of any type as they lie, side by side */
    int n_kept, n_reduced;
    int64_t size[SDPA_SOFTMAX_AXES];
    sdpa_softmax_view view[SDPA_SOFTMAX_VIEWS];
    int64_t n;     /* elements in a row */
    int64_t inner; /* rows along the last kept axis */
    int64_t group; /* rows in a call of the kernel */
    int64_t lead;  /* rows that the first group of a line has less than others */
    int64_t groups_per_line;
    int64_t n_groups, groups_per_unit;
    int64_t chunk, n_chunks;         /* of a row: elements, and how many there are */
    int64_t units_per_group;         /* that threads share */
    bool direct[SDPA_SOFTMAX_VIEWS]; /* see sdpa_softmax_is_direct */
    sdpa_softmax_scale scale;
    char *scratch;
    size_t scratch_bytes;     /* per worker: of the staged rows of out, x and g together */
    size_t staged_bytes;      /* of the staged rows of one of them */
    double *stats;            /* per worker or, where threads share rows, per group; see stats_at */
    int64_t n_stats;          /* of each of them */
    sdpa_softmax_phase phase; /* of threads that share rows */
} softmax_call;

static inline bool is_backward(sdpa_softmax_op op) {
    return op == SDPA_SOFTMAX_BACKWARD || op == SDPA_LOG_SOFTMAX_BACKWARD;
}

static inline size_t real_size(const softmax_call *c) { return c->f64 ? sizeof(double) : sizeof(float); }

static inline int64_t magnitude(int64_t x) { return x < 0 ? -x : x; }

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t row_stride(const softmax_call *c, int v) {
    return c->n_kept ? c->view[v].stride[c->n_kept - 1] : 0;
}

static inline int64_t column_stride(const softmax_call *c, int v) {
    return c->n_reduced ? c->view[v].stride[c->n_kept + c->n_reduced - 1] : 0;
}

/* Whether the call sums its rows; if not, their constants are given. */
static inline bool sums(const softmax_call *c) {
    return c->op != SDPA_LOGSUMEXP_BACKWARD && c->op != SDPA_SOFTMAX_JACOBIAN;
}

/* Whether elements of view v lie side by side, in columns of lanes or in rows. */
bool sdpa_softmax_is_close(const softmax_call *c, int v);

/* Whether the kernel can use view v in place, except where a group ends within a vector of lanes. */
bool sdpa_softmax_is_direct(const softmax_call *c, int v);

/* The phases of a group, whose n_rows rows have their first elements at data[]. `owner` has its stats, a worker or,
 * where threads share rows, a group. The first sets the stats of chunks first .. last-1, or writes these chunks from the
 * stats of whole rows. It ends early in a run (may be NULL) that is stopped: the rows of one group may be long. */
void sdpa_softmax_chunks(const softmax_call *c, sdpa_softmax_phase phase, char *const *data, int64_t n_rows,
                         int64_t first, int64_t last, int64_t owner, char *scratch, sdpa_run *run);

/* Sets the stats of rows from those of their chunks. */
void sdpa_softmax_join(const softmax_call *c, int64_t n_rows, int64_t owner);

/* Between sums and results: loads constants that are given, writes lse. */
void sdpa_softmax_finish(const softmax_call *c, char *const *data, int64_t n_rows, int64_t owner);

/* All phases. */
void sdpa_softmax_group(const softmax_call *c, char *const *data, int64_t n_rows, int64_t owner, char *scratch,
                        sdpa_run *run);

#endif
