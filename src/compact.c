/* Copies of keys and values without gaps between columns.
 *
 * Every unit reads all keys and values that its queries see. Kernels take them as they lie, but rows whose columns are
 * apart (a column-major array, a reversed or strided axis, another byte order) cost them more than products. Where
 * several units read a row, it is therefore copied once per call. A tensor that is broadcast is copied once. */
#include "drivers.h"
#include "groups.h"
#include "runtime/memory.h"
#include "runtime/parallel.h"
#include "unit.h"

/* Rows that are copied at a time, of one matrix. */
enum { ROWS = 64 };

typedef struct copied {
    sdpa_tensor from, *to;
    int64_t batch[SDPA_MAX_AXES];
    int64_t n_cols;
    size_t bytes;
    sdpa_grid matrices;
} copied;

typedef struct compact_call {
    sdpa_problem problem; /* with the copies in place of the tensors */
    const struct sdpa_kernels *kernels;
    copied tensors[4];
    int n_copied, n_workers;
    int64_t n_blocks;  /* of rows */
    size_t line_bytes; /* per worker */
    char *lines;
} compact_call;

/* Whether kernels cannot read rows of `t` in place. */
static bool has_gaps(const sdpa_tensor *t, int64_t n_cols) {
    const int64_t size = sdpa_size_of(t->dtype);
    return t->data && n_cols > 0 && (t->col != size || t->swapped || (t->row | (int64_t)(intptr_t)t->data) % size);
}

/* Adds t to the copies if several units read each of its rows. */
static void plan_copy(compact_call *c, sdpa_tensor *t, int64_t n_cols) {
    const sdpa_problem *p = &c->problem;
    copied *x = &c->tensors[c->n_copied];
    if (!has_gaps(t, n_cols)) return;
    x->from = *t;
    x->to = t;
    x->n_cols = n_cols;
    sdpa_tensor compact = *t;
    compact.row = compact.col = 1;
    compact.swapped = false;
    const int64_t size = sdpa_size_of(t->dtype);
    x->bytes = (size_t)sdpa_tensor_compact(p, &compact, x->batch, p->n_k, n_cols, size, &x->matrices);
    const double queries = (double)p->n_batch * (double)p->n_head * (double)p->n_q / (double)x->matrices.size;
    if (queries <= (double)sdpa_query_block(p)) return;
    *t = compact;
    const size_t line_bytes = c->kernels->copy_bytes(ROWS, n_cols);
    if (line_bytes > c->line_bytes) c->line_bytes = line_bytes;
    c->n_copied++;
}

static void take_pieces(void *owner, sdpa_arena *arena) {
    compact_call *c = owner;
    for (int i = 0; i < c->n_copied; i++) c->tensors[i].to->data = sdpa_take(arena, c->tensors[i].bytes);
    c->lines = sdpa_take(arena, c->line_bytes * (size_t)c->n_workers);
}

/* Copies a block of rows. */
static void copy_block(void *context, int64_t index, int worker, sdpa_run *run) {
    (void)run;
    const compact_call *c = context;
    const sdpa_problem *p = &c->problem;
    const copied *x = c->tensors;
    while (index >= x->matrices.size * c->n_blocks) index -= x++->matrices.size * c->n_blocks;
    const int64_t first = index % c->n_blocks * ROWS, n = p->n_k - first < ROWS ? p->n_k - first : ROWS;
    int64_t batch = 0, head = 0;
    sdpa_grid_locate(&x->matrices, index / c->n_blocks, &batch, &head);
    const sdpa_matrix from = sdpa_matrix_at(p, &x->from, batch, head), to = sdpa_matrix_at(p, x->to, batch, head);
    c->kernels->copy_rows(to.data + first * to.row, &from, first, n, x->n_cols,
                          c->lines + (size_t)worker * c->line_bytes);
}

static sdpa_status run_compact(compact_call *c, sdpa_status (*driver)(const sdpa_problem *p)) {
    const sdpa_problem *p = &c->problem;
    int64_t n_units = 0;
    double bytes = 0;
    for (int i = 0; i < c->n_copied; i++) {
        n_units += c->tensors[i].matrices.size * c->n_blocks;
        bytes += (double)c->tensors[i].bytes;
    }
    c->n_workers = sdpa_workers(p->n_workers, n_units, bytes / 2e5);
    void *memory = sdpa_alloc_pieces(take_pieces, c);
    if (!memory) return SDPA_NO_MEMORY;
    sdpa_status status = sdpa_parallel_for(n_units, c->n_workers, copy_block, c, p->interrupted);
    if (status == SDPA_OK) status = driver(p);
    sdpa_free(memory);
    return status;
}

sdpa_status sdpa_compact(const sdpa_problem *p, sdpa_status (*driver)(const sdpa_problem *p)) {
    const bool gaps =
        has_gaps(&p->k, p->d_k) || has_gaps(&p->v, p->d_v) || has_gaps(&p->k_t, p->d_k) || has_gaps(&p->v_t, p->d_v);
    if (!gaps || !sdpa_has_queries(p) || p->n_q == 1 || p->n_k == 0) return driver(p);
    compact_call *c = sdpa_alloc(sizeof *c); /* not on the stack, where it would take 10 kB */
    if (!c) return SDPA_NO_MEMORY;
    c->problem = *p;
    c->kernels = sdpa_kernels_for(p->dtype);
    c->n_copied = 0;
    c->line_bytes = 0;
    c->n_blocks = (p->n_k + ROWS - 1) / ROWS;
    plan_copy(c, &c->problem.k, p->d_k);
    plan_copy(c, &c->problem.v, p->d_v);
    plan_copy(c, &c->problem.k_t, p->d_k);
    plan_copy(c, &c->problem.v_t, p->d_v);
    const sdpa_status status = c->n_copied ? run_compact(c, driver) : driver(p);
    sdpa_free(c);
    return status;
}
