/* Packed sequences, one after the other in arrays (total, heads, columns): every driver gives the bits of one call per
 * sequence for any number of threads, and survives faults and interruption. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../src/drivers.h"
#include "../../src/runtime/isa.h"
#include "../../src/runtime/memory.h"
#include "check.h"
#include "interruption.h"
#include "naive.h"

enum { HEADS = 4, KEY_HEADS = 2, D = 24, MOST = 24 };

typedef struct layout {
    int64_t n_sequences, cu_q[12], cu_k[12];
    int64_t padding_q, padding_k; /* rows behind the last sequence */
} layout;

/* Empty sequences, single tokens, edges of blocks, and one sequence that is most of the work, which threads have to
 * share. */
static const layout layouts[] = {
    {6, {0, 5, 5, 135, 136, 184, 201}, {0, 7, 10, 107, 108, 108, 308}, 0, 0},
    {3, {0, 3, 403, 420}, {0, 3, 503, 520}, 0, 0},
    {3, {0, 1, 2, 4}, {0, 9000, 9001, 18000}, 0, 0},
    {0, {0}, {0}, 0, 0},
    {3, {0, 3, 60, 60}, {0, 3, 59, 70}, 40, 5},
    {0, {0}, {0}, 3, 2},
};

typedef struct fixture {
    sdpa_problem p;
    char *buffers[MOST];
    size_t sizes[MOST]; /* in bytes */
    int n_buffers;
} fixture;

/* Draws a number of N(0, 1); a 16-bit type gets its upper half, as bfloat16. */
static void put(char *at, sdpa_dtype dtype) {
    const double x = naive_normal();
    const float f = (float)x;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    const uint16_t half = (uint16_t)(bits >> 16);
    memcpy(at,
           dtype == SDPA_F64   ? (const void *)&x
           : dtype == SDPA_F32 ? (const void *)&f
                               : &half,
           (size_t)sdpa_size_of(dtype));
}

/* Makes (total, heads, columns), of exactly that size, so that sanitizers see reads beyond; zeros unless drawn. */
static sdpa_tensor new_tensor(fixture *f, sdpa_dtype dtype, int64_t total, int64_t heads, int64_t columns, bool drawn) {
    const int64_t size = sdpa_size_of(dtype), n = total * heads * columns;
    char *data = calloc((size_t)(n * size) + (n == 0), 1);
    for (int64_t i = 0; drawn && i < n; i++) put(data + i * size, dtype);
    f->sizes[f->n_buffers] = (size_t)(n * size);
    f->buffers[f->n_buffers++] = data;
    return (sdpa_tensor){.data = data,
                         .row = heads * columns * size,
                         .head = columns * size,
                         .col = size,
                         .group = HEADS / heads,
                         .dtype = dtype};
}

/* Makes (heads, total) of the compute type, or one number per head if total is 0. */
static sdpa_tensor new_vector(fixture *f, sdpa_dtype dtype, int64_t total, bool drawn) {
    const sdpa_dtype wide = dtype == SDPA_F64 ? SDPA_F64 : SDPA_F32;
    sdpa_tensor t = new_tensor(f, wide, HEADS, 1, total ? total : 1, drawn);
    t.head = t.row;
    t.row = total ? t.col : 0;
    t.group = 1;
    return t;
}

static fixture *new_fixture(const layout *l, sdpa_dtype dtype) {
    fixture *f = calloc(1, sizeof *f);
    sdpa_problem *p = &f->p;
    const int64_t n_q = l->cu_q[l->n_sequences] + l->padding_q, n_k = l->cu_k[l->n_sequences] + l->padding_k;
    *p = (sdpa_problem){.n_batch = 1,
                        .n_head = HEADS,
                        .n_q = n_q,
                        .n_k = n_k,
                        .d_k = D,
                        .d_v = D,
                        .dtype = dtype,
                        .scale = 0.2,
                        .has_upper = n_q == n_k,
                        .cu_q = l->cu_q,
                        .cu_k = l->cu_k,
                        .n_sequences = l->n_sequences,
                        .n_workers = 1};
    p->q = new_tensor(f, dtype, n_q, HEADS, D, true);
    p->k = new_tensor(f, dtype, n_k, KEY_HEADS, D, true);
    p->v = new_tensor(f, dtype, n_k, KEY_HEADS, D, true);
    p->q_t = new_tensor(f, dtype, n_q, HEADS, D, true);
    p->k_t = new_tensor(f, dtype, n_k, KEY_HEADS, D, true);
    p->v_t = new_tensor(f, dtype, n_k, KEY_HEADS, D, true);
    p->dout = new_tensor(f, dtype, n_q, HEADS, D, true);
    p->dlse = new_vector(f, dtype, n_q, true);
    p->sinks = new_vector(f, dtype, 0, true);
    p->o = new_tensor(f, dtype, n_q, HEADS, D, false);
    p->lse = new_vector(f, dtype, n_q, false);
    p->features = sdpa_problem_features(p);
    return f;
}

static void free_buffers(fixture *f, int from) {
    while (f->n_buffers > from) free(f->buffers[--f->n_buffers]);
}

enum routine { FORWARD, TANGENT, BACKWARD, SECOND, N_ROUTINES };

static sdpa_status run(enum routine routine, const sdpa_problem *p) {
    static sdpa_status (*const drivers[])(const sdpa_problem *) = {sdpa_attention_forward, sdpa_attention_tangent,
                                                                   sdpa_attention_backward, sdpa_attention_second};
    return drivers[routine](p);
}

/* The problem with new results for the routine. */
static sdpa_problem with_results(fixture *f, enum routine routine) {
    sdpa_problem p = f->p;
    const sdpa_dtype dtype = p.dtype;
    if (routine == TANGENT || routine == SECOND) p.o_t = new_tensor(f, dtype, p.n_q, HEADS, D, false);
    if (routine == FORWARD || routine == TANGENT) {
        p.o = new_tensor(f, dtype, p.n_q, HEADS, D, false);
        p.lse = new_vector(f, dtype, p.n_q, false);
        return p;
    }
    p.dq = new_tensor(f, dtype, p.n_q, HEADS, D, false);
    p.dk = new_tensor(f, dtype, p.n_k, KEY_HEADS, D, false);
    p.dv = new_tensor(f, dtype, p.n_k, KEY_HEADS, D, false);
    p.dsinks = new_vector(f, dtype, 0, false);
    return p;
}

/* One call per sequence: every tensor of rows moved to the sequence's first. */
static sdpa_status run_each(enum routine routine, const sdpa_problem *packed) {
    sdpa_status status = SDPA_OK;
    for (int64_t s = 0; s < packed->n_sequences && status == SDPA_OK; s++) {
        sdpa_problem p = *packed;
        const int64_t q = p.cu_q[s], k = p.cu_k[s];
        sdpa_tensor *queries[] = {&p.q, &p.q_t, &p.dout, &p.o, &p.o_t, &p.dq, &p.lse, &p.dlse};
        sdpa_tensor *keys[] = {&p.k, &p.v, &p.k_t, &p.v_t, &p.dk, &p.dv};
        for (int i = 0; i < 8; i++) queries[i]->data += queries[i]->data ? q * queries[i]->row : 0;
        for (int i = 0; i < 6; i++) keys[i]->data += keys[i]->data ? k * keys[i]->row : 0;
        p.n_q = p.cu_q[s + 1] - q;
        p.n_k = p.cu_k[s + 1] - k;
        p.cu_q = p.cu_k = NULL;
        status = run(routine, &p);
    }
    return status;
}

/* lse in the rows of padding, which no call per sequence writes. */
static void pad_lse(const layout *l, const sdpa_problem *p) {
    for (int64_t h = 0; h < HEADS; h++) {
        for (int64_t i = l->cu_q[l->n_sequences]; i < p->n_q; i++) {
            char *at = p->lse.data + h * p->lse.head + i * p->lse.row;
            if (p->lse.dtype == SDPA_F64) {
                *(double *)at = -INFINITY;
            } else {
                *(float *)at = -INFINITY;
            }
        }
    }
}

/* Fills the results that the driver writes whole with what none of them holds. */
static void spoil(const fixture *f, int first, const sdpa_problem *p) {
    const char *const whole[] = {p->o.data, p->o_t.data, p->dq.data, p->dk.data, p->dv.data};
    for (int i = first; i < f->n_buffers; i++) {
        for (int j = 0; j < 5 && p->n_q; j++) {
            if (f->buffers[i] == whole[j]) memset(f->buffers[i], 0xab, f->sizes[i]);
        }
    }
}

static void check_bits(const layout *l, sdpa_dtype dtype) {
    fixture *f = new_fixture(l, dtype);
    CHECK(run(FORWARD, &f->p) == SDPA_OK, "forward");
    for (int routine = 0; routine < N_ROUTINES; routine++) {
        const int first = f->n_buffers;
        sdpa_problem alone = with_results(f, routine);
        const int n = f->n_buffers - first;
        CHECK(run_each(routine, &alone) == SDPA_OK, "alone");
        if (routine == FORWARD || routine == TANGENT) pad_lse(l, &alone);
        for (int workers = 1; workers <= 4; workers += 3) {
            sdpa_problem packed = with_results(f, routine);
            packed.n_workers = workers;
            spoil(f, first + n, &packed);
            CHECK(run(routine, &packed) == SDPA_OK, "packed");
            for (int i = 0; i < n; i++) {
                /* Calls per sequence add the gradients of sinks to one array, which rounds the same sums in another
                 * way. */
                if (f->buffers[first + n + i] == packed.dsinks.data) continue;
                CHECK(memcmp(f->buffers[first + i], f->buffers[first + n + i], f->sizes[first + i]) == 0,
                      "isa %s, routine %d, dtype %d, %ld sequences, workers %d: result %d differs",
                      sdpa_isa_get()->name, routine, (int)dtype, (long)l->n_sequences, workers, i);
            }
            free_buffers(f, first + n);
        }
        free_buffers(f, first);
    }
    free_buffers(f, 0);
    free(f);
}

/* If any allocation fails, the routine reports it and leaks nothing. */
static void faults(sdpa_dtype dtype) {
    fixture *f = new_fixture(&layouts[1], dtype);
    f->p.n_workers = 3;
    for (int routine = 0; routine < N_ROUTINES; routine++) {
        int n = 0;
        sdpa_status status = SDPA_NO_MEMORY;
        for (; status == SDPA_NO_MEMORY && n < 100; n++) {
            const int first = f->n_buffers;
            sdpa_problem p = with_results(f, routine);
            sdpa_alloc_fail_after(n);
            status = run(routine, &p);
            sdpa_alloc_fail_after(-1);
            free_buffers(f, first);
        }
        CHECK(status == SDPA_OK && n > 1, "routine %d dtype %d: status %d after %d allocations", routine, (int)dtype,
              (int)status, n);
    }
    free_buffers(f, 0);
    free(f);
}

typedef struct call {
    enum routine routine;
    sdpa_problem p;
} call;

static sdpa_status run_call(void *context) {
    const call *c = context;
    return c->routine < N_ROUTINES ? run(c->routine, &c->p) : sdpa_attention_received(&c->p);
}

/* Every routine, and the weights that keys receive from all queries and from some. */
static void interruption(const layout *l, int n_workers) {
    static const int64_t chosen[] = {7, 3, 4, 200, 130, 135}; /* of several sequences */
    fixture *f = new_fixture(l, SDPA_F32);
    f->p.interrupted = poll_countdown;
    for (int routine = 0; routine < N_ROUTINES + 2; routine++) {
        const int first = f->n_buffers;
        call c = {(enum routine)routine, f->p};
        if (routine < N_ROUTINES) {
            c.p = with_results(f, routine);
        } else {
            c.p.o = new_tensor(f, SDPA_F32, c.p.n_k, HEADS, SDPA_N_RECEIVED, false);
            c.p.lse.data = NULL;
            if (routine > N_ROUTINES) c.p.queries = (sdpa_choice){chosen, sizeof chosen / sizeof *chosen};
        }
        c.p.n_workers = n_workers;
        char what[32];
        snprintf(what, sizeof what, "packed, routine %d", routine);
        check_interrupted(what, n_workers, run_call, &c);
        free_buffers(f, first);
    }
    free_buffers(f, 0);
    free(f);
}

void test_packed(void) {
    static const sdpa_dtype dtypes[] = {SDPA_BF16, SDPA_F32, SDPA_F64};
    naive_seed();
    const char *before = sdpa_isa_get()->name;
    int n;
    const sdpa_isa *list = sdpa_isa_list(&n);
    long n_problems = 0;
    for (int i = 0; i < n; i++) {
        if (!select_isa(list[i].name)) continue;
        for (int t = 0; t < 3; t++) {
            for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++) {
                if (n_problems++ % SAMPLE == 0) check_bits(&layouts[l], dtypes[t]);
            }
        }
    }
    sdpa_isa_select(before);
    for (int t = 0; t < 3; t++) faults(dtypes[t]);
    interruption(&layouts[0], 1);
    interruption(&layouts[1], 3);
}
