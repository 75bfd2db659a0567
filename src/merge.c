/* Attention over a union of sets of keys from the results over each set. Every row is independent; blocks of rows are
 * the units. Sums are in double, in the order of the parts, and rounded once. */
#include "drivers.h"
#include "runtime/memory.h"
#include "runtime/parallel.h"
#include "unit.h"

#include <math.h>

enum { MERGE_ROWS = 64 }; /* per unit */

static int64_t row_blocks(const sdpa_problem *p) { return (p->n_q + MERGE_ROWS - 1) / MERGE_ROWS; }

typedef struct merge_call {
    const sdpa_problem *problem;
    const struct sdpa_kernels *kernels, *wide; /* of the operands' type, of float64 */
    int64_t n_parts;
    const sdpa_tensor *outs, *lses;
    char *scratch;
    size_t scratch_bytes; /* per worker */
} merge_call;

typedef struct merge_scratch {
    sdpa_matrix *outs, *lses; /* (n_parts) */
    double *weight;           /* (n_parts): exp(lses[t] - lse); -1: the part is left out */
    double *sum;              /* (d_v) */
    void *line;               /* (d_v) of the compute type */
} merge_scratch;

static merge_scratch merge_layout(const merge_call *c, sdpa_arena *arena) {
    size_t d_v = (size_t)c->problem->d_v;
    size_t n_parts = (size_t)c->n_parts;
    merge_scratch w;
    w.outs = sdpa_take(arena, n_parts * sizeof *w.outs);
    w.lses = sdpa_take(arena, n_parts * sizeof *w.lses);
    w.sum = sdpa_take(arena, d_v * sizeof(double));
    w.weight = sdpa_take(arena, n_parts * sizeof(double));
    w.line = sdpa_take(arena, d_v * (c->problem->dtype == SDPA_F64 ? sizeof(double) : sizeof(float)));
    return w;
}

static double load_lse(const merge_call *c, const sdpa_matrix *from, int64_t row) {
    const char *place = from->data + row * from->row;
    double f64 = 0;
    float f32 = 0;
    if (from->dtype == SDPA_F64) {
        c->wide->load(&f64, place, 1, 0, from->dtype, from->swapped);
        return f64;
    }
    c->kernels->load(&f32, place, 1, 0, from->dtype, from->swapped);
    return f32;
}

static void store_lse(const merge_call *c, const sdpa_matrix *to, int64_t row, double lse) {
    char *place = to->data + row * to->row;
    const float narrow = (float)lse;
    if (to->dtype == SDPA_F64) {
        c->wide->store(place, &lse, 1, 0, to->dtype);
    } else {
        c->kernels->store(place, &narrow, 1, 0, to->dtype);
    }
}

/* Returns lse of the union and fills w->weight. lse is -inf if no part has seen a key; a NaN or +inf in any part makes
 * the weights NaN. The relative error of a weight, from exp and log in double and from rounding, is below (n_parts +
 * |lse|) 2^-52. */
static double merge_weights(const merge_call *c, const merge_scratch *w, int64_t row) {
    double m = -INFINITY, sum = 0;
    for (int64_t t = 0; t < c->n_parts; t++) {
        w->weight[t] = load_lse(c, &w->lses[t], row);
        if (w->weight[t] > m || isnan(w->weight[t])) m = w->weight[t];
        if (isnan(m)) break;
    }
    if (isnan(m) || m == INFINITY) {
        for (int64_t t = 0; t < c->n_parts; t++) w->weight[t] = NAN;
        return m;
    }
    for (int64_t t = 0; t < c->n_parts; t++) {
        bool empty = w->weight[t] == -INFINITY;
        w->weight[t] = empty ? -1 : exp(w->weight[t] - m);
        sum += empty ? 0 : w->weight[t];
    }
    for (int64_t t = 0; t < c->n_parts; t++) {
        if (w->weight[t] >= 0) w->weight[t] /= sum;
    }
    return m == -INFINITY ? m : m + log(sum);
}

static void merge_row(const merge_call *c, const merge_scratch *w, int64_t row, char *o) {
    const sdpa_problem *p = c->problem;
    for (int64_t d = 0; d < p->d_v; d++) w->sum[d] = 0;
    for (int64_t t = 0; t < c->n_parts; t++) {
        double weight = w->weight[t];
        if (weight < 0) continue; /* even a NaN in its output must not count */
        const sdpa_matrix *from = &w->outs[t];
        c->kernels->load(w->line, from->data + row * from->row, p->d_v, from->col, from->dtype, from->swapped);
        if (p->dtype == SDPA_F64) {
            const double *line = w->line;
            for (int64_t d = 0; d < p->d_v; d++) w->sum[d] += weight * line[d];
        } else {
            const float *line = w->line;
            for (int64_t d = 0; d < p->d_v; d++) w->sum[d] += weight * line[d];
        }
    }
    const void *line = w->sum;
    if (p->dtype != SDPA_F64) {
        float *narrow = w->line;
        for (int64_t d = 0; d < p->d_v; d++) narrow[d] = (float)w->sum[d];
        line = narrow;
    }
    c->kernels->store(o, line, p->d_v, p->o.col, p->o.dtype);
}

static void merge_unit(void *context, int64_t index, int worker, sdpa_run *run) {
    const merge_call *c = context;
    const sdpa_problem *p = c->problem;
    (void)run;
    sdpa_arena arena = {c->scratch + (size_t)worker * c->scratch_bytes, 0};
    merge_scratch w = merge_layout(c, &arena);

    int64_t blocks = row_blocks(p), bh = index / blocks, batch = bh / p->n_head, head = bh % p->n_head;
    for (int64_t t = 0; t < c->n_parts; t++) {
        w.outs[t] = sdpa_matrix_at(p, &c->outs[t], batch, head);
        w.lses[t] = sdpa_matrix_at(p, &c->lses[t], batch, head);
    }
    sdpa_matrix o = sdpa_matrix_at(p, &p->o, batch, head), lse = sdpa_matrix_at(p, &p->lse, batch, head);
    int64_t first = index % blocks * MERGE_ROWS, end = first + MERGE_ROWS;
    for (int64_t row = first; row < end && row < p->n_q; row++) {
        store_lse(c, &lse, row, merge_weights(c, &w, row));
        merge_row(c, &w, row, o.data + row * o.row);
    }
}

sdpa_status sdpa_attention_merge(const sdpa_problem *p, int64_t n_parts, const sdpa_tensor *outs,
                                 const sdpa_tensor *lses) {
    sdpa_problem_check(p, SDPA_PASS_FORWARD);
    int64_t n_units = p->n_batch * p->n_head * row_blocks(p);
    if (n_units == 0) return SDPA_OK;
    merge_call call = {p, sdpa_kernels_for(p->dtype), sdpa_kernels_for(SDPA_F64), n_parts, outs, lses, NULL, 0};
    sdpa_arena need = {NULL, 0};
    merge_layout(&call, &need);
    call.scratch_bytes = need.used;
    const double rows = (double)p->n_batch * (double)p->n_head * (double)p->n_q;
    const int workers = sdpa_workers(p->n_workers, n_units, rows * (double)n_parts * (double)(p->d_v + 8) / 1e5);
    call.scratch = sdpa_alloc((size_t)workers * call.scratch_bytes);
    if (!call.scratch) return SDPA_NO_MEMORY;
    sdpa_status status = sdpa_parallel_for(n_units, workers, merge_unit, &call, p->interrupted);
    sdpa_free(call.scratch);
    return status;
}
