/* One group of rows: staging what the kernels cannot read in place, sums of chunks, results. */
#include "softmax_group.h"

#include <math.h>
#include <string.h>

bool sdpa_softmax_is_close(const softmax_call *c, int v) {
    const sdpa_softmax_view *view = &c->view[v];
    const int64_t size = sdpa_size_of(view->dtype), row = row_stride(c, v), col = column_stride(c, v);
    if (view->swapped || c->n_reduced > 1) return false;
    if ((uintptr_t)view->data % (size_t)size || col % size) return false;
    for (int a = 0; a < c->n_kept; a++) {
        if (view->stride[a] % size) return false;
    }
    if (v == SDPA_SOFTMAX_X && c->view[SDPA_SOFTMAX_WHERE].data) return false;
    return c->lanes ? row == size : col == size || c->n == 1;
}

bool sdpa_softmax_is_direct(const softmax_call *c, int v) {
    return c->view[v].dtype == (c->f64 ? SDPA_F64 : SDPA_F32) && sdpa_softmax_is_close(c, v);
}

static bool usable(const softmax_call *c, int v, int64_t n_rows) {
    return c->direct[v] && !(c->lanes && (c->strips || n_rows % c->kernels->lanes));
}

/* A part of elements j0 .. j0+n-1 of a row that lies along the last axis: `length` elements from element j0 + at on,
 * `offset` bytes from the start of the row. */
typedef struct piece {
    int64_t at, length, offset;
} piece;

static inline piece piece_at(const softmax_call *c, int v, int64_t j0, int64_t n, int64_t at) {
    piece q = {at, n - at, 0};
    int64_t j = j0 + at;
    if (c->n_reduced <= 1) {
        q.offset = j * column_stride(c, v);
        return q;
    }
    for (int a = c->n_kept + c->n_reduced - 1; a >= c->n_kept; a--) {
        const bool last = a == c->n_kept + c->n_reduced - 1;
        int64_t index = j % c->size[a];
        if (last && c->size[a] - index < q.length) q.length = c->size[a] - index;
        q.offset += index * c->view[v].stride[a];
        j /= c->size[a];
    }
    return q;
}

/* Copies elements j0 .. j0+n-1 of n_rows rows of view v, the first of which is at `data`, to dst, in the layout that
 * the kernels take. */
static void stage(const softmax_call *c, int v, char *dst, const char *data, int64_t n_rows, int64_t j0, int64_t n) {
    const struct sdpa_kernels *kernels = c->kernels;
    const sdpa_softmax_view *view = &c->view[v];
    const int64_t size = (int64_t)real_size(c), row = row_stride(c, v), col = column_stride(c, v);
    if (c->lanes) {
        for (piece q = piece_at(c, v, j0, n, 0); q.at < n; q = piece_at(c, v, j0, n, q.at + q.length)) {
            kernels->load_lanes(dst + q.at * kernels->lanes * size, n, data + q.offset, n_rows, q.length, row, col,
                                view->dtype, view->swapped);
        }
    } else {
        for (int64_t i = 0; i < n_rows; i++) {
            for (piece q = piece_at(c, v, j0, n, 0); q.at < n; q = piece_at(c, v, j0, n, q.at + q.length)) {
                kernels->load(dst + (i * n + q.at) * size, data + i * row + q.offset, q.length, col, view->dtype,
                              view->swapped);
            }
        }
    }
}

/* Sets elements of a staged x that `where` leaves out to -inf. */
static void leave_out(const softmax_call *c, char *dst, const char *where, int64_t n_rows, int64_t j0, int64_t n) {
    const int v = SDPA_SOFTMAX_WHERE;
    const int64_t size = (int64_t)real_size(c), row = row_stride(c, v), col = column_stride(c, v);
    for (piece q = piece_at(c, v, j0, n, 0); q.at < n; q = piece_at(c, v, j0, n, q.at + q.length)) {
        if (c->lanes) {
            const int64_t lanes = c->kernels->lanes;
            for (int64_t i = 0; i < n_rows; i += lanes) {
                for (int64_t j = 0; j < q.length; j++) {
                    c->kernels->leave_out(dst + (i * n + (q.at + j) * lanes) * size,
                                          where + q.offset + i * row + j * col, least(lanes, n_rows - i), row);
                }
            }
        } else {
            for (int64_t i = 0; i < n_rows; i++) {
                c->kernels->leave_out(dst + (i * n + q.at) * size, where + q.offset + i * row, q.length, col);
            }
        }
    }
}

/* The inverse of `stage`, for out. */
static void unstage(const softmax_call *c, char *data, const char *src, int64_t n_rows, int64_t j0, int64_t n) {
    const struct sdpa_kernels *kernels = c->kernels;
    const int v = SDPA_SOFTMAX_OUT;
    const sdpa_dtype dtype = c->view[v].dtype;
    const int64_t size = (int64_t)real_size(c), row = row_stride(c, v), col = column_stride(c, v);
    for (piece q = piece_at(c, v, j0, n, 0); q.at < n; q = piece_at(c, v, j0, n, q.at + q.length)) {
        if (c->lanes) {
            kernels->store_lanes(data + q.offset, src + q.at * kernels->lanes * size, n, n_rows, q.length, row, col,
                                 dtype);
        } else {
            for (int64_t i = 0; i < n_rows; i++) {
                kernels->store(data + i * row + q.offset, src + (i * n + q.at) * size, q.length, col, dtype);
            }
        }
    }
}

/* The rows of a group that kernels compute: those of a vector of lanes without a row of their own are computed too. */
static int64_t computed_rows(const softmax_call *c, int64_t n_rows) {
    const int64_t lanes = c->lanes ? c->kernels->lanes : 1;
    return (n_rows + lanes - 1) / lanes * lanes;
}

/* Loads one value per row of view v. */
static void load_column(const softmax_call *c, int v, const char *data, int64_t n_rows, double *dst) {
    const sdpa_softmax_view *view = &c->view[v];
    if (c->f64) {
        c->isa->f64->load(dst, data, n_rows, row_stride(c, v), view->dtype, view->swapped);
        return;
    }
    float x[SDPA_SOFTMAX_ROWS]; /* float32 kernels widen 16 bits by instructions */
    c->isa->f32->load(x, data, n_rows, row_stride(c, v), view->dtype, view->swapped);
    c->isa->f64->load(dst, (const char *)x, n_rows, sizeof *x, SDPA_F32, false);
}

/* Stores one value per row of out. */
static void store_column(const softmax_call *c, char *data, int64_t n_rows, const double *src) {
    const int64_t row = row_stride(c, SDPA_SOFTMAX_OUT);
    if (c->f64) {
        c->isa->f64->store(data, src, n_rows, row, SDPA_F64);
        return;
    }
    float x[SDPA_SOFTMAX_ROWS];
    c->isa->f64->store((char *)x, src, n_rows, sizeof *x, SDPA_F32);
    c->isa->f32->store(data, x, n_rows, row, c->view[SDPA_SOFTMAX_OUT].dtype);
}

/* Whether the sum of a row is NaN. Such rows are filled from x, which still tells what is left out. */
static bool any_nan(const sdpa_softmax_block *b) {
    bool nan = false;
    for (int64_t i = 0; i < b->n_rows; i++) nan |= b->row.l[i] != b->row.l[i];
    return nan;
}

/* Runs one chunk of one group: elements j0 .. j0+n-1 of the rows of b, whose first elements are at data[]. */
static void run_chunk(const softmax_call *c, sdpa_softmax_block *b, char *const *data, int64_t n_rows, int64_t j0,
                      int64_t n, char *scratch) {
    const int inputs[2] = {SDPA_SOFTMAX_X, SDPA_SOFTMAX_G};
    const int64_t size = (int64_t)real_size(c), lanes = c->kernels->lanes, staged_row = c->lanes ? n * lanes : n,
                  staged_col = c->lanes ? lanes : 1;
    const bool whole = b->phase == SDPA_SOFTMAX_WHOLE, in_place = usable(c, SDPA_SOFTMAX_OUT, n_rows);
    b->n_rows = computed_rows(c, n_rows);
    b->n = n;
    b->keeps = c->op == SDPA_SOFTMAX && (in_place || whole) && (b->phase != SDPA_SOFTMAX_WRITE || !any_nan(b));
    const bool reads = !b->keeps || b->phase != SDPA_SOFTMAX_WRITE;
    for (int k = 0; k < (is_backward(c->op) ? 2 : 1) && reads; k++) {
        const int v = inputs[k];
        const void *x;
        int64_t row = staged_row, col = staged_col;
        if (usable(c, v, n_rows)) {
            row = c->lanes ? lanes : row_stride(c, v) / size;
            col = column_stride(c, v) / size;
            x = data[v] + j0 * column_stride(c, v);
        } else {
            char *dst = scratch + (size_t)(k + 1) * c->staged_bytes;
            stage(c, v, dst, data[v], n_rows, j0, n);
            if (k == 0 && data[SDPA_SOFTMAX_WHERE]) leave_out(c, dst, data[SDPA_SOFTMAX_WHERE], n_rows, j0, n);
            x = dst;
        }
        *(k == 0 ? &b->x : &b->g) = x;
        *(k == 0 ? &b->x_row : &b->g_row) = row;
        *(k == 0 ? &b->x_col : &b->g_col) = col;
    }
    const int v = SDPA_SOFTMAX_OUT;
    const bool writes = b->phase != SDPA_SOFTMAX_SUM;
    if (in_place && (writes || b->keeps)) {
        b->out = data[v] + j0 * column_stride(c, v);
        b->out_row = c->lanes ? lanes : row_stride(c, v) / size;
        b->out_col = column_stride(c, v) / size;
    } else {
        b->out = scratch;
        b->out_row = staged_row;
        b->out_col = staged_col;
    }
    (c->lanes ? c->kernels->softmax_lanes : c->kernels->softmax_rows)(b);
    if (writes && !in_place) unstage(c, data[v], b->out, n_rows, j0, n);
}

/* The stats of a worker or a group, which has some: those of its rows and, if these have several chunks, then of each
 * chunk. */
static sdpa_softmax_stats stats_at(const softmax_call *c, int64_t owner, int64_t part) {
    double *m = c->stats + owner * c->n_stats + part * STATS_MEMBERS * c->group;
    return (sdpa_softmax_stats){m, m + c->group, m + 2 * c->group, m + 3 * c->group};
}

static sdpa_softmax_stats chunk_stats(const softmax_call *c, int64_t owner, int64_t chunk) {
    return stats_at(c, owner, c->n_chunks > 1 ? 1 + chunk : 0);
}

/* Sets the stats of the group's chunks first .. last-1, or writes them from those of the whole rows. Ends early in a run
 * (may be NULL) that is stopped: the rows of one group may be long. */
void sdpa_softmax_chunks(const softmax_call *c, sdpa_softmax_phase phase, char *const *data, int64_t n_rows,
                         int64_t first, int64_t last, int64_t owner, char *scratch, sdpa_run *run) {
    sdpa_softmax_block b = {.op = c->op, .phase = phase, .row = stats_at(c, owner, 0), .scale = &c->scale};
    for (int64_t x = first; x < last && !(run && x > first && sdpa_run_stopped(run)); x++) {
        const int64_t j = x * c->chunk;
        b.stats = chunk_stats(c, owner, x);
        run_chunk(c, &b, data, n_rows, j, c->n - j < c->chunk ? c->n - j : c->chunk, scratch);
    }
}

/* exp((m - most) / t) for m <= most, the maxima of a chunk and of its row; 0 for a chunk without one. The error is at
 * most 1 u more than that of exp2, besides the rounding of m - most; results below the normal numbers are less exact. */
static double factor_of(const sdpa_softmax_scale *s, double m, double most) {
    if (m == most) return 1;
    const double d = m - most, x = s->c * d;
    if (!(x > -1100)) return 0;
    const double rest = fma(s->c, d, -x) + (s->c_low - (s->c - s->c_high)) * d, e = exp2(x);
    return fma(e, rest * M_LN2, e);
}

/* Sets the stats of rows from those of their chunks. Sums of the backward have no maximum, and the factor 1. */
void sdpa_softmax_join(const softmax_call *c, int64_t n_rows, int64_t owner) {
    if (c->n_chunks == 1) return;
    const sdpa_softmax_stats row = stats_at(c, owner, 0);
    for (int64_t i = 0; i < computed_rows(c, n_rows); i++) {
        double m = -INFINITY, l = 0, l_low = 0;
        for (int64_t x = 0; x < c->n_chunks; x++) m = fmax(m, chunk_stats(c, owner, x).m[i]);
        for (int64_t x = 0; x < c->n_chunks; x++) {
            const sdpa_softmax_stats chunk = chunk_stats(c, owner, x);
            const double factor = factor_of(&c->scale, chunk.m[i], m), part = chunk.l[i] * factor, sum = l + part,
                         d = sum - l;
            l_low += (l - (sum - d)) + (part - d) + chunk.l_low[i] * factor;
            l = sum;
            chunk.factor[i] = factor;
        }
        row.m[i] = m;
        row.l[i] = l;
        row.l_low[i] = l_low;
    }
}

/* Between sums and results: loads constants that are given, writes lse. */
void sdpa_softmax_finish(const softmax_call *c, char *const *data, int64_t n_rows, int64_t owner) {
    const sdpa_softmax_stats t = stats_at(c, owner, 0);
    if (!sums(c)) {
        load_column(c, SDPA_SOFTMAX_S, data[SDPA_SOFTMAX_S], n_rows, t.m);
        if (c->op == SDPA_LOGSUMEXP_BACKWARD) {
            load_column(c, SDPA_SOFTMAX_G, data[SDPA_SOFTMAX_G], n_rows, t.l);
        } else {
            for (int64_t i = 0; i < n_rows; i++) t.l[i] = -t.m[i] * c->scale.inverse;
        }
        for (int64_t i = n_rows; i < computed_rows(c, n_rows); i++) t.m[i] = t.l[i] = 0;
        for (int64_t i = 0; i < computed_rows(c, n_rows); i++) t.l_low[i] = 0;
    }
    if (c->op != SDPA_LOGSUMEXP) return;
    double lse[SDPA_SOFTMAX_ROWS];
    c->kernels->log_sums(lse, &t, n_rows);
    store_column(c, data[SDPA_SOFTMAX_OUT], n_rows, lse);
}

static void run_columns(const softmax_call *c, char *const *data, int64_t n_rows, char *scratch) {
    const sdpa_softmax_view *x = &c->view[SDPA_SOFTMAX_X];
    const int64_t size = sdpa_size_of(x->dtype);
    const sdpa_softmax_block b = {.op = c->op,
                                  .phase = SDPA_SOFTMAX_WHOLE,
                                  .n_rows = n_rows,
                                  .n = c->n,
                                  .x = data[SDPA_SOFTMAX_X],
                                  .x_col = column_stride(c, SDPA_SOFTMAX_X) / size,
                                  .g = data[SDPA_SOFTMAX_G],
                                  .g_col = column_stride(c, SDPA_SOFTMAX_G) / size,
                                  .out = data[SDPA_SOFTMAX_OUT],
                                  .out_col = column_stride(c, SDPA_SOFTMAX_OUT) / size,
                                  .scale = &c->scale,
                                  .dtype = x->dtype,
                                  .kept = scratch};
    c->kernels->softmax_columns(&b);
}

void sdpa_softmax_group(const softmax_call *c, char *const *data, int64_t n_rows, int64_t owner, char *scratch,
                        sdpa_run *run) {
    if (c->columns) {
        run_columns(c, data, n_rows, scratch);
        return;
    }
    if (!c->n_stats) {
        sdpa_softmax_block b = {.op = c->op, .phase = SDPA_SOFTMAX_WHOLE, .scale = &c->scale};
        run_chunk(c, &b, data, n_rows, 0, c->n, scratch);
        return;
    }
    if (sums(c)) {
        sdpa_softmax_chunks(c, SDPA_SOFTMAX_SUM, data, n_rows, 0, c->n_chunks, owner, scratch, run);
        sdpa_softmax_join(c, n_rows, owner);
    }
    sdpa_softmax_finish(c, data, n_rows, owner);
    if (c->op != SDPA_LOGSUMEXP)
        sdpa_softmax_chunks(c, SDPA_SOFTMAX_WRITE, data, n_rows, 0, c->n_chunks, owner, scratch, run);
}
