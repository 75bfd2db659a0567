/* The softmax family: decides how the rows of a call go through the kernels, and cuts them into units.
 *
 * Kernels take rows as they lie in memory, or one row per lane. Lanes are for short rows that are summed, where a sum
 * over the lanes would cost most, and for rows whose neighbours are closer in memory than their own elements (a
 * reduction over the first axis of a C array). Operands are read in place where the kernel can; others (of another type
 * or byte order, with strides or `where`) are staged in scratch.
 *
 * A long row is summed in chunks, whose sums are put together in order: threads share the chunks where there are few
 * rows, and results do not depend on the number of threads. */
#include <math.h>
#include <string.h>

#include "runtime/memory.h"
#include "softmax_group.h"

/* What n_stats is a multiple of, so that no two workers write to one cache line. */
#define STATS_STEP (SDPA_ALIGNMENT / (int64_t)sizeof(double))
/* Elements of lanes are a large stride apart. More than STRIP_COLUMNS of them, which may all belong to one set of a cache,
 * are staged: strips of STRIP_LINE bytes each, where a strip stays below STRIP_BYTES. */
#define STRIP_COLUMNS 8
#define STRIP_LINE 1024
#define STRIP_BYTES 131072
/* Rows in a group of columns, at least: strips of them, of which one more is computed to reach a cache line. Rows of up
 * to FEW elements, which need no conversion, are as fast in lanes, in forward functions those of up to FEW_FORWARD. */
#define LEAST_COLUMNS 1024
#define FEW 4
#define FEW_FORWARD 32
/* Elements per unit: work for about as long as waking a thread takes. */
#define UNIT_ELEMENTS 65536
/* Scratch of up to this size comes from the stack, so that a small call allocates nothing. */
#define STACK_BYTES 8192

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

/* In log_softmax_backward exp(y) is p for any t, so the exponential takes t = 1. */
static sdpa_softmax_scale scale_for(const sdpa_softmax_problem *p) {
    const double log2e = 0x1.71547652b82fep+0, log2e_low = 0x1.777d0ffda0d24p-56;
    const bool f64 = p->dtype == SDPA_F64;
    const double t = p->op == SDPA_LOG_SOFTMAX_BACKWARD ? 1 : p->temperature;
    sdpa_softmax_scale s = {.inverse = 1 / p->temperature};
    s.c = log2e / t;
    s.c_high = truncated(s.c, f64 ? 26 : 12);
    s.c_low = (s.c - s.c_high) + (fma(-s.c, t, log2e) + log2e_low) / t;
    s.d_max = (f64 ? 1023 : 127) / s.c;
    s.d_min = -s.d_max;
    return s;
}

/* Whether any group of the call needs scratch. */
static bool stages(const softmax_call *c) {
    if (c->strips || (c->lanes && c->inner % c->kernels->lanes)) return true;
    return !(c->direct[SDPA_SOFTMAX_X] && (c->direct[SDPA_SOFTMAX_OUT] || c->op == SDPA_LOGSUMEXP) &&
             (c->direct[SDPA_SOFTMAX_G] || !is_backward(c->op)));
}

/* ---- units ---- */

/* Points data at the first elements of a group; returns its number of rows. */
static int64_t find_group(const softmax_call *c, int64_t group, char **data) {
    const int64_t part = group % c->groups_per_line, i = part ? part * c->group - c->lead : 0;
    int64_t line = group / c->groups_per_line;
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
    return (part + 1 == c->groups_per_line ? c->inner : (part + 1) * c->group - c->lead) - i;
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
        sdpa_softmax_group(c, data, n_rows, worker, scratch, run);
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
    sdpa_softmax_chunks(c, c->phase, data, n_rows, first, last, group, c->scratch + (size_t)worker * c->scratch_bytes,
                        run);
}

static sdpa_status run_shared(softmax_call *c, int workers, int (*interrupted)(void)) {
    const int64_t n_units = c->n_groups * c->units_per_group;
    c->phase = SDPA_SOFTMAX_SUM;
    const sdpa_status status = sums(c) ? sdpa_parallel_for(n_units, workers, chunks_unit, c, interrupted) : SDPA_OK;
    if (status != SDPA_OK) return status;
    for (int64_t g = 0; g < c->n_groups; g++) {
        char *data[SDPA_SOFTMAX_VIEWS];
        const int64_t n_rows = find_group(c, g, data);
        if (sums(c)) sdpa_softmax_join(c, n_rows, g);
        sdpa_softmax_finish(c, data, n_rows, g);
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

/* Whether the kernel of columns takes the call. */
static bool fits_columns(const softmax_call *c) {
    const sdpa_softmax_view *x = &c->view[SDPA_SOFTMAX_X], *g = &c->view[SDPA_SOFTMAX_G];
    if (!sums(c) || c->op == SDPA_LOGSUMEXP || c->view[SDPA_SOFTMAX_WHERE].data) return false;
    if (!c->kernels->columns) return false;
    if (c->n > c->kernels->most_in_columns || c->inner < c->kernels->columns) return false;
    if (c->n <= (is_backward(c->op) ? FEW : FEW_FORWARD) && x->dtype == SDPA_F32) return false;
    if (is_backward(c->op) && !(g->dtype == x->dtype && sdpa_softmax_is_close(c, SDPA_SOFTMAX_G))) return false;
    return sdpa_softmax_is_close(c, SDPA_SOFTMAX_X) && sdpa_softmax_is_close(c, SDPA_SOFTMAX_OUT);
}

/* Groups but the first of a line begin at cache lines of out; the last one has the rows that are left, too. */
static void set_columns(softmax_call *c) {
    const sdpa_softmax_view *out = &c->view[SDPA_SOFTMAX_OUT];
    const int64_t size = sdpa_size_of(out->dtype), columns = c->kernels->columns;
    c->group = UNIT_ELEMENTS / c->n;
    if (c->group < LEAST_COLUMNS) c->group = LEAST_COLUMNS;
    c->group = c->group / columns * columns;
    c->lead = (int64_t)((uintptr_t)out->data % SDPA_ALIGNMENT) / size;
    c->groups_per_line = (c->inner + c->lead) / c->group;
    if (c->groups_per_line < 1) c->groups_per_line = 1;
}

/* Decides whether rows go through the kernels in lanes, and how many at a time. */
static void set_group(softmax_call *c) {
    const int64_t lanes = c->kernels->lanes, size = (int64_t)real_size(c);
    const int most = is_backward(c->op) ? c->kernels->short_row_backward : c->kernels->short_row;
    const bool short_rows = sums(c) && c->n <= most;
    const bool dense = magnitude(row_stride(c, SDPA_SOFTMAX_X)) < magnitude(column_stride(c, SDPA_SOFTMAX_X));
    c->lanes = c->inner >= (lanes + 1) / 2 && (short_rows || dense);
    c->columns = c->lanes && dense && fits_columns(c);
    if (c->columns) {
        set_columns(c);
        return;
    }
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
    if (!c->columns) c->groups_per_line = (c->inner + c->group - 1) / c->group;
    c->n_groups = n_rows / c->inner * c->groups_per_line;
    c->groups_per_unit = UNIT_ELEMENTS / (c->group * (c->n ? c->n : 1));
    if (c->groups_per_unit < 1) c->groups_per_unit = 1;
    c->n_chunks = (c->n + c->chunk - 1) / c->chunk;
    c->units_per_group = (c->n * c->group + UNIT_ELEMENTS - 1) / UNIT_ELEMENTS;
    if (c->units_per_group > c->n_chunks) c->units_per_group = c->n_chunks;
    const bool whole = c->n_chunks == 1 && sums(c) && c->op != SDPA_LOGSUMEXP;
    const int64_t n_stats = (c->n_chunks > 1 ? 1 + c->n_chunks : 1) * c->group * STATS_MEMBERS;
    c->n_stats = whole ? 0 : (n_stats + STATS_STEP - 1) / STATS_STEP * STATS_STEP;

    for (int v = 0; v < SDPA_SOFTMAX_VIEWS; v++) c->direct[v] = c->view[v].data && sdpa_softmax_is_direct(c, v);
    if (c->columns) {
        c->scratch_bytes = is_backward(c->op) ? 0 : real_size(c) * (size_t)(c->n * c->kernels->columns);
    } else if (stages(c)) {
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
