/* The softmax family: decides how the rows of a call go through the kernels, and cuts them into units.
 *
 * Kernels take rows as they lie in memory, or one row per lane. Lanes are for short rows that are summed, where a sum
 * over the lanes would cost most, and for rows whose neighbours are closer in memory than their own elements (a
 * reduction over the first axis of a C array). Operands are read in place where the kernel can; others (of another type
 * or byte order, with strides or `where`) are staged in scratch.
 *
 * A long row is summed in chunks, whose sums are put together in order: threads share the chunks where there are few
 * rows, and results do not depend on the number of threads. */
#include "softmax.h"

#include <math.h>
#include <string.h>

#include "runtime/isa.h"
#include "kernels/kernels.h"
#include "runtime/memory.h"
#include "runtime/parallel.h"

/* What n_stats is a multiple of, so that no two workers write to one cache line. */
#define STATS_STEP (SDPA_ALIGNMENT / (int64_t)sizeof(double))
/* Doubles per row: the members of sdpa_softmax_stats. */
#define STATS_MEMBERS 4
/* Elements of lanes are a large stride apart. More than STRIP_COLUMNS of them, which may all belong to one set of a cache,
 * are staged: strips of STRIP_LINE bytes each, where a strip stays below STRIP_BYTES. */
#define STRIP_COLUMNS 8
#define STRIP_LINE 1024
#define STRIP_BYTES 131072
/* Elements per unit: work for about as long as waking a thread takes. */
#define UNIT_ELEMENTS 65536
/* Scratch of up to this size comes from the stack, so that a small call allocates nothing. */
#define STACK_BYTES 8192

typedef struct softmax_call {
    const sdpa_isa *isa;
    const struct sdpa_kernels *kernels;
    sdpa_softmax_op op;
    bool f64, lanes;
    bool strips; /* lanes: all operands are staged */
    int n_kept, n_reduced;
    int64_t size[SDPA_SOFTMAX_AXES];
    sdpa_softmax_view view[SDPA_SOFTMAX_VIEWS];
    int64_t n;     /* elements in a row */
    int64_t inner; /* rows along the last kept axis */
    int64_t group; /* rows in a call of the kernel */
    int64_t groups_per_line;
    int64_t n_groups, groups_per_unit;
    int64_t chunk, n_chunks;         /* of a row: elements, and how many there are */
    int64_t units_per_group;         /* that threads share */
    bool direct[SDPA_SOFTMAX_VIEWS]; /* see is_direct */
    sdpa_softmax_scale scale;
    char *scratch;
    size_t scratch_bytes;     /* per worker: of the staged rows of out, x and g together */
    size_t staged_bytes;      /* of the staged rows of one of them */
    double *stats;            /* per worker or, where threads share rows, per group; see stats_at */
    int64_t n_stats;          /* of each of them */
    sdpa_softmax_phase phase; /* of threads that share rows */
} softmax_call;

static bool is_backward(sdpa_softmax_op op) { return op == SDPA_SOFTMAX_BACKWARD || op == SDPA_LOG_SOFTMAX_BACKWARD; }

static size_t real_size(const softmax_call *c) { return c->f64 ? sizeof(double) : sizeof(float); }

static int64_t magnitude(int64_t x) { return x < 0 ? -x : x; }

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- the shape of a call ---- */

/* Whether axes a and a + 1 can be merged in every operand. */
static bool contiguous_axes(const softmax_call *c, int a) {
    for (int v = 0; v < SDPA_SOFTMAX_VIEWS; v++) {
        const sdpa_softmax_view *view = &c->view[v];
        if (view->data && view->stride[a] != view->stride[a + 1] * c->size[a + 1]) return false;
    }
    return true;
}

static void remove_axis(softmax_call *c, int a) {
    int n = c->n_kept + c->n_reduced;
    for (int b = a; b + 1 < n; b++) {
        c->size[b] = c->size[b + 1];
        for (int v = 0; v < SDPA_SOFTMAX_VIEWS; v++) c->view[v].stride[b] = c->view[v].stride[b + 1];
    }
    *(a < c->n_kept ? &c->n_kept : &c->n_reduced) -= 1;
}

static void swap_axes(softmax_call *c, int a, int b) {
    int64_t size = c->size[a];
    c->size[a] = c->size[b];
    c->size[b] = size;
    for (int v = 0; v < SDPA_SOFTMAX_VIEWS; v++) {
        int64_t stride = c->view[v].stride[a];
        c->view[v].stride[a] = c->view[v].stride[b];
        c->view[v].stride[b] = stride;
    }
}

/* Merges as many axes as possible. Kept axes are sorted by stride, so that neighbouring rows are neighbours in memory;
 * reduced axes keep their order, which is that of the sum. */
static void simplify(softmax_call *c) {
    for (int a = c->n_kept + c->n_reduced - 1; a >= 0; a--) {
        if (c->size[a] == 1) remove_axis(c, a);
    }
    const int64_t *stride = c->view[SDPA_SOFTMAX_X].stride;
    for (int a = 1; a < c->n_kept; a++) {
        for (int b = a; b > 0 && magnitude(stride[b]) > magnitude(stride[b - 1]); b--) swap_axes(c, b, b - 1);
    }
    for (int a = c->n_kept + c->n_reduced - 2; a >= 0; a--) {
        if (a == c->n_kept - 1 || !contiguous_axes(c, a)) continue;
        for (int v = 0; v < SDPA_SOFTMAX_VIEWS; v++) c->view[v].stride[a] = c->view[v].stride[a + 1];
        c->size[a] *= c->size[a + 1];
        remove_axis(c, a + 1);
    }
}

/* The first `bits` bits of the significand of x. */
static double truncated(double x, int bits) {
    int exponent;
    double f = frexp(x, &exponent);
    return ldexp(trunc(ldexp(f, bits)), exponent - bits);
}

/* Temperatures so extreme that 1/t or its multiples would leave the range of the type act like the nearest ones that do
 * not. In log_softmax_backward exp(y) is p for any t, so the exponential takes t = 1. */
static sdpa_softmax_scale scale_for(const sdpa_softmax_problem *p) {
    const double log2e = 0x1.71547652b82fep+0, log2e_low = 0x1.777d0ffda0d24p-56;
    const bool f64 = p->dtype == SDPA_F64;
    const double reach = f64 ? 0x1p1000 : 0x1p110;
    double t = p->temperature < 1 / reach ? 1 / reach : p->temperature > reach ? reach : p->temperature;
    sdpa_softmax_scale s = {.inverse = 1 / t};
    if (p->op == SDPA_LOG_SOFTMAX_BACKWARD) t = 1;
    s.c = log2e / t;
    s.c_high = truncated(s.c, f64 ? 26 : 12);
    s.c_low = (s.c - s.c_high) + (fma(-s.c, t, log2e) + log2e_low) / t;
    s.d_max = (f64 ? 1023 : 127) / s.c;
    s.d_min = -s.d_max;
    return s;
}

/* ---- one group of rows ---- */

static int64_t row_stride(const softmax_call *c, int v) { return c->n_kept ? c->view[v].stride[c->n_kept - 1] : 0; }

static int64_t column_stride(const softmax_call *c, int v) {
    return c->n_reduced ? c->view[v].stride[c->n_kept + c->n_reduced - 1] : 0;
}

/* Whether the kernel can use view v in place, except where a group ends within a vector of lanes. */
static bool is_direct(const softmax_call *c, int v) {
    const sdpa_softmax_view *view = &c->view[v];
    const int64_t size = (int64_t)real_size(c), row = row_stride(c, v), col = column_stride(c, v);
    if (view->dtype != (c->f64 ? SDPA_F64 : SDPA_F32) || view->swapped || c->n_reduced > 1) return false;
    if ((uintptr_t)view->data % (size_t)size || col % size) return false;
    for (int a = 0; a < c->n_kept; a++) {
        if (view->stride[a] % size) return false;
    }
    if (v == SDPA_SOFTMAX_X && c->view[SDPA_SOFTMAX_WHERE].data) return false;
    return c->lanes ? row == size : col == size || c->n == 1;
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

/* Whether any group of the call needs scratch. */
static bool stages(const softmax_call *c) {
    if (c->strips || (c->lanes && c->inner % c->kernels->lanes)) return true;
    return !(c->direct[SDPA_SOFTMAX_X] && (c->direct[SDPA_SOFTMAX_OUT] || c->op == SDPA_LOGSUMEXP) &&
             (c->direct[SDPA_SOFTMAX_G] || !is_backward(c->op)));
}

/* Whether the call sums its rows; if not, their constants are given. */
static bool sums(const softmax_call *c) { return c->op != SDPA_LOGSUMEXP_BACKWARD && c->op != SDPA_SOFTMAX_JACOBIAN; }

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
static void run_chunks(const softmax_call *c, sdpa_softmax_phase phase, char *const *data, int64_t n_rows,
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
static void join_chunks(const softmax_call *c, int64_t n_rows, int64_t owner) {
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
static void finish_rows(const softmax_call *c, char *const *data, int64_t n_rows, int64_t owner) {
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

static void run_group(const softmax_call *c, char *const *data, int64_t n_rows, int64_t owner, char *scratch,
                      sdpa_run *run) {
    if (!c->n_stats) {
        sdpa_softmax_block b = {.op = c->op, .phase = SDPA_SOFTMAX_WHOLE, .scale = &c->scale};
        run_chunk(c, &b, data, n_rows, 0, c->n, scratch);
        return;
    }
    if (sums(c)) {
        run_chunks(c, SDPA_SOFTMAX_SUM, data, n_rows, 0, c->n_chunks, owner, scratch, run);
        join_chunks(c, n_rows, owner);
    }
    finish_rows(c, data, n_rows, owner);
    if (c->op != SDPA_LOGSUMEXP) run_chunks(c, SDPA_SOFTMAX_WRITE, data, n_rows, 0, c->n_chunks, owner, scratch, run);
}

/* Points data at the first elements of a group; returns its number of rows. */
static int64_t find_group(const softmax_call *c, int64_t group, char **data) {
    int64_t line = group / c->groups_per_line, i = group % c->groups_per_line * c->group;
    for (int v = 0; v < SDPA_SOFTMAX_VIEWS; v++) {
        data[v] = c->view[v].data;
        if (data[v]) data[v] += i * row_stride(c, v);
    }
    for (int a = c->n_kept - 2; a >= 0; a--) {
        int64_t index = line % c->size[a];
        line /= c->size[a];
        for (int v = 0; v < SDPA_SOFTMAX_VIEWS; v++) {
            if (data[v]) data[v] += index * c->view[v].stride[a];
        }
    }
    return c->inner - i < c->group ? c->inner - i : c->group;
}

/* A unit of whole rows. */
static void softmax_unit(void *context, int64_t unit, int worker, sdpa_run *run) {
    const softmax_call *c = context;
    char *scratch = c->scratch + (size_t)worker * c->scratch_bytes;
    int64_t first = unit * c->groups_per_unit, last = first + c->groups_per_unit;
    if (last > c->n_groups) last = c->n_groups;
    for (int64_t g = first; g < last; g++) {
        if (run && sdpa_run_stopped(run)) return;
        char *data[SDPA_SOFTMAX_VIEWS];
        const int64_t n_rows = find_group(c, g, data);
        run_group(c, data, n_rows, worker, scratch, run);
    }
}

/* ---- rows that threads share ---- */

/* A unit of some chunks of one group. */
static void chunks_unit(void *context, int64_t unit, int worker, sdpa_run *run) {
    const softmax_call *c = context;
    char *data[SDPA_SOFTMAX_VIEWS];
    const int64_t group = unit / c->units_per_group, part = unit % c->units_per_group,
                  first = part * c->n_chunks / c->units_per_group, last = (part + 1) * c->n_chunks / c->units_per_group;
    const int64_t n_rows = find_group(c, group, data);
    run_chunks(c, c->phase, data, n_rows, first, last, group, c->scratch + (size_t)worker * c->scratch_bytes, run);
}

static sdpa_status run_shared(softmax_call *c, int workers, int (*interrupted)(void)) {
    const int64_t n_units = c->n_groups * c->units_per_group;
    c->phase = SDPA_SOFTMAX_SUM;
    const sdpa_status status = sums(c) ? sdpa_parallel_for(n_units, workers, chunks_unit, c, interrupted) : SDPA_OK;
    if (status != SDPA_OK) return status;
    for (int64_t g = 0; g < c->n_groups; g++) {
        char *data[SDPA_SOFTMAX_VIEWS];
        const int64_t n_rows = find_group(c, g, data);
        if (sums(c)) join_chunks(c, n_rows, g);
        finish_rows(c, data, n_rows, g);
    }
    c->phase = SDPA_SOFTMAX_WRITE;
    return c->op == SDPA_LOGSUMEXP ? SDPA_OK : sdpa_parallel_for(n_units, workers, chunks_unit, c, interrupted);
}

/* Writes out_ii = p_i (1 - p_i) / t, which the kernels of the Jacobian leave out. */
static void write_diagonal(const softmax_call *c, const sdpa_softmax_problem *p) {
    const int n_kept = p->n_kept - p->n_reduced, n_axes = p->n_kept;
    int64_t total = 1;
    for (int a = 0; a < n_axes; a++) total *= p->size[a];
    const sdpa_softmax_view *s = &p->view[SDPA_SOFTMAX_S], *out = &p->view[SDPA_SOFTMAX_OUT];
    for (int64_t flat = 0; flat < total; flat++) {
        const char *from = s->data;
        char *to = out->data;
        int64_t rest = flat;
        for (int a = n_axes - 1; a >= 0; a--) {
            int64_t index = rest % p->size[a];
            rest /= p->size[a];
            from += index * s->stride[a];
            to += index * (out->stride[a] + (a >= n_kept ? out->stride[a + p->n_reduced] : 0));
        }
        double x;
        c->isa->f64->load(&x, from, 1, 0, s->dtype, s->swapped);
        x = x * (1 - x) * c->scale.inverse;
        c->isa->f64->store(to, &x, 1, 0, out->dtype);
    }
}

/* Sets axes and views, simplified; returns the number of rows. */
static int64_t set_shape(softmax_call *c, const sdpa_softmax_problem *p) {
    const int n_axes = p->n_kept + p->n_reduced;
    int64_t n_rows = 1;
    c->n_kept = p->n_kept;
    c->n_reduced = p->n_reduced;
    c->n = 1;
    for (int a = 0; a < n_axes; a++) {
        c->size[a] = p->size[a];
        *(a < p->n_kept ? &n_rows : &c->n) *= p->size[a];
    }
    if (n_rows == 0 || (c->n == 0 && p->op != SDPA_LOGSUMEXP)) return 0;
    for (int v = 0; v < SDPA_SOFTMAX_VIEWS; v++) {
        const sdpa_softmax_view *from = &p->view[v];
        c->view[v].data = from->data;
        if (!from->data) continue;
        c->view[v].dtype = from->dtype;
        c->view[v].swapped = from->swapped;
        memcpy(c->view[v].stride, from->stride, (size_t)n_axes * sizeof *from->stride);
    }
    simplify(c);
    return n_rows;
}

/* Decides whether rows go through the kernels in lanes, and how many at a time. */
static void set_group(softmax_call *c) {
    const int64_t lanes = c->kernels->lanes, size = (int64_t)real_size(c);
    const int most = is_backward(c->op) ? c->kernels->short_row_backward : c->kernels->short_row;
    const bool short_rows = sums(c) && c->n <= most;
    const bool dense = magnitude(row_stride(c, SDPA_SOFTMAX_X)) < magnitude(column_stride(c, SDPA_SOFTMAX_X));
    c->lanes = c->inner >= (lanes + 1) / 2 && (short_rows || dense);
    if (!c->lanes) {
        c->group = least(least(c->n ? c->chunk / c->n : SDPA_SOFTMAX_ROWS, SDPA_SOFTMAX_ROWS), c->inner);
        if (c->group < 1) c->group = 1;
        return;
    }
    c->strips = dense && c->n > STRIP_COLUMNS && c->n <= c->chunk;
    c->group = c->strips ? least(STRIP_LINE / size, STRIP_BYTES / (c->n * size)) : dense ? SDPA_SOFTMAX_ROWS : lanes;
    c->group = least(c->group, c->inner + lanes - 1) / lanes * lanes;
    if (c->group < lanes || c->n > c->chunk) c->group = lanes;
}

/* Decides how rows are grouped into units, and how much scratch they need. */
static void set_groups(softmax_call *c, int64_t n_rows) {
    c->inner = c->n_kept ? c->size[c->n_kept - 1] : 1;
    c->chunk = SDPA_SOFTMAX_CHUNK;
    const int64_t longest = least(c->n, c->chunk);
    set_group(c);
    c->groups_per_line = (c->inner + c->group - 1) / c->group;
    c->n_groups = n_rows / c->inner * c->groups_per_line;
    c->groups_per_unit = UNIT_ELEMENTS / (c->group * (c->n ? c->n : 1));
    if (c->groups_per_unit < 1) c->groups_per_unit = 1;
    c->n_chunks = (c->n + c->chunk - 1) / c->chunk;
    c->units_per_group = (c->n * c->group + UNIT_ELEMENTS - 1) / UNIT_ELEMENTS;
    if (c->units_per_group > c->n_chunks) c->units_per_group = c->n_chunks;
    const bool whole = c->n_chunks == 1 && sums(c) && c->op != SDPA_LOGSUMEXP;
    const int64_t n_stats = (c->n_chunks > 1 ? 1 + c->n_chunks : 1) * c->group * STATS_MEMBERS;
    c->n_stats = whole ? 0 : (n_stats + STATS_STEP - 1) / STATS_STEP * STATS_STEP;

    for (int v = 0; v < SDPA_SOFTMAX_VIEWS; v++) c->direct[v] = c->view[v].data && is_direct(c, v);
    if (stages(c)) {
        sdpa_arena arena = {NULL, 0};
        sdpa_take(&arena, real_size(c) * (size_t)(longest * c->group));
        c->staged_bytes = arena.used;
        c->scratch_bytes = (is_backward(c->op) ? 3 : 2) * arena.used;
    }
}

sdpa_status sdpa_softmax_run(const sdpa_softmax_problem *p) {
    softmax_call c = {.isa = sdpa_isa_get(), .op = p->op, .f64 = p->dtype == SDPA_F64};
    c.kernels = c.f64 ? c.isa->f64 : c.isa->f32;
    const int64_t n_rows = set_shape(&c, p);
    if (n_rows == 0) return SDPA_OK;
    c.scale = scale_for(p);
    set_groups(&c, n_rows);

    /* A thread that has its row to itself writes it from the caches: threads share rows only where some would idle. */
    const bool shared = c.units_per_group > 1 && c.n_groups != p->n_workers && c.n_groups < 2 * (int64_t)p->n_workers;
    const int64_t n_units =
        shared ? c.n_groups * c.units_per_group : (c.n_groups + c.groups_per_unit - 1) / c.groups_per_unit;
    const int workers = p->n_workers < n_units ? p->n_workers : (int)n_units;
    const size_t scratch = (size_t)workers * c.scratch_bytes,
                 stats = sizeof *c.stats * (size_t)((shared ? c.n_groups : workers) * c.n_stats);
    char stack[STACK_BYTES] __attribute__((aligned(SDPA_ALIGNMENT)));
    const bool small = workers == 1 && scratch + stats <= sizeof stack;
    c.scratch = small ? stack : sdpa_alloc(scratch + stats);
    if (!c.scratch) return SDPA_NO_MEMORY;
    c.stats = (double *)(c.scratch + scratch);
    sdpa_status status = SDPA_OK;
    if (shared) {
        status = run_shared(&c, workers, p->interrupted);
    } else if (n_units == 1 && c.n_chunks == 1) {
        softmax_unit(&c, 0, 0, NULL);
    } else {
        status = sdpa_parallel_for(n_units, workers, softmax_unit, &c, p->interrupted);
    }
    if (!small) sdpa_free(c.scratch);
    if (status == SDPA_OK && p->op == SDPA_SOFTMAX_JACOBIAN) write_diagonal(&c, p);
    return status;
}
