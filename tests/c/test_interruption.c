/* A part of test_disturbed: an interrupted call ends soon, and wherever it is. */
#include "interruption.h"

#include <time.h>

#include "../../src/drivers.h"
#include "../../src/runtime/parallel.h"
#include "../../src/softmax.h"
#include "case.h"
#include "check.h"

static double interrupt_at;

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int poll_clock(void) { return seconds() >= interrupt_at; }

/* A call of many seconds ends within one second of its interruption, with many units, units that wait for each other,
 * or a single unit. */
static void interruption(void) {
    const int64_t n_queries[] = {32768, 32768, 90}, n_keys[] = {1 << 20, 32768, 1 << 26};
    for (int shape = 0; shape < 3; shape++) {
        test_case c = {.n_batch = 1, .n_head = 1, .group = 1, .d_k = 64, .d_v = 64, .dtype = SDPA_F32, .scale = 0.125};
        fixture *f = new_fixture(&c, 0);
        sdpa_problem p = f->p;
        const int64_t n_q = n_queries[shape], n_k = n_keys[shape];
        p.n_q = n_q;
        p.n_k = n_k;
        p.interrupted = poll_clock;
        p.o = new_tensor(f, c.dtype, 1, n_q, 64, NULL);
        p.dq = new_tensor(f, c.dtype, 1, n_q, 64, NULL);
        p.lse = new_tensor(f, c.dtype, 1, n_q, 1, NULL);
        p.q = p.dout = p.k = p.v = new_tensor(f, c.dtype, 1, 1, 64, NULL);
        p.dlse.data = NULL;
        p.q.row = p.dout.row = p.k.row = p.v.row = 0; /* inputs may share memory */
        if (shape == 1) {
            p.dk = new_tensor(f, c.dtype, 1, n_k, 64, NULL);
            p.dv = new_tensor(f, c.dtype, 1, n_k, 64, NULL);
        }
        for (int routine = 0; routine < 2; routine++) {
            for (p.n_workers = 1; p.n_workers <= 3; p.n_workers++) {
                double start = seconds();
                interrupt_at = start + 0.1;
                sdpa_status status = routine == 0 ? sdpa_attention_forward(&p) : sdpa_attention_backward(&p);
                double took = seconds() - start;
                CHECK(status == SDPA_INTERRUPTED && took < TIME_LIMIT,
                      "routine %d shape %d workers %d: status %d after %.3f s", routine, shape, p.n_workers,
                      (int)status, took);
            }
        }
        free_fixture(f);
    }
}

/* --- each step */

static int polls_left;

int poll_countdown(void) { return polls_left-- <= 0; }

void check_interrupted(const char *what, int n_workers, sdpa_status (*run)(void *), void *context) {
    bool stopped = true;
    int n = 0;
    sdpa_poll_always(true);
    for (; stopped && n < 1000000; n += n_workers == 1 ? 1 : 1 + n / 4) {
        polls_left = n;
        const sdpa_status status = run(context);
        stopped = polls_left < 0;
        CHECK(status == (stopped ? SDPA_INTERRUPTED : SDPA_OK), "%s, workers %d, poll %d: %d", what, n_workers, n,
              (int)status);
    }
    sdpa_poll_always(false);
    CHECK(!stopped && n > 1, "%s, workers %d: ends after %d polls", what, n_workers, n);
}

typedef struct attention_call {
    sdpa_status (*driver)(const sdpa_problem *);
    sdpa_problem p;
} attention_call;

static sdpa_status run_attention(void *context) {
    const attention_call *call = context;
    return call->driver(&call->p);
}

static const struct {
    const char *name;
    test_case c;
} cases[] = {
    {"blocks", {.n_q = 100, .n_k = 300}},
    {"skipped blocks", {.n_q = 300, .n_k = 300, .has_upper = true}},
    {"outlines", {.n_q = 130, .n_k = 650, .mask = BOOL_MASK, .in_blocks = true}},
    {"bias", {.n_q = 100, .n_k = 150, .mask = BIAS_MASK}},
    {"far lse", {.n_q = 100, .n_k = 300, .scale = 1e9}},
    {"one block", {.n_q = 40, .n_k = 100}},
    {"few queries", {.n_q = 4, .n_k = 2100}},
};

static const struct {
    const char *name;
    sdpa_status (*driver)(const sdpa_problem *);
} drivers[] = {{"forward", sdpa_attention_forward},      {"backward", sdpa_attention_backward},
               {"second", sdpa_attention_second},        {"tangent", sdpa_attention_tangent},
               {"weights", sdpa_attention_weights},      {"received", sdpa_attention_received},
               {"statistics", sdpa_attention_statistics}};

/* The problem of a fixture with all results of a driver. */
static sdpa_problem with_results(fixture *f, sdpa_status (*driver)(const sdpa_problem *)) {
    const test_case *c = &f->c;
    sdpa_problem p = f->p;
    p.q_t = p.q, p.k_t = p.k, p.v_t = p.v; /* inputs may share memory */
    if (driver == sdpa_attention_backward || driver == sdpa_attention_second) {
        p.dq = new_tensor(f, c->dtype, c->n_head, c->n_q, c->d_k, NULL);
        p.dk = new_tensor(f, c->dtype, c->n_head / c->group, c->n_k, c->d_k, NULL);
        p.dv = new_tensor(f, c->dtype, c->n_head / c->group, c->n_k, c->d_v, NULL);
        if (c->mask == BIAS_MASK) p.dmask = new_tensor(f, c->dtype, SHARED, c->n_q, c->n_k, NULL);
    } else {
        p.lse.data = NULL;
    }
    if (driver == sdpa_attention_second || driver == sdpa_attention_tangent) {
        p.o_t = new_tensor(f, c->dtype, c->n_head, c->n_q, c->d_v, NULL);
    }
    if (driver == sdpa_attention_weights) p.o = new_tensor(f, c->dtype, c->n_head, c->n_q, c->n_k, NULL);
    if (driver == sdpa_attention_received) p.o = new_tensor(f, SDPA_F32, c->n_head, c->n_k, SDPA_N_RECEIVED, NULL);
    if (driver == sdpa_attention_statistics) p.o = new_tensor(f, SDPA_F32, c->n_head, c->n_q, SDPA_N_STATISTICS, NULL);
    p.features = sdpa_problem_features(&p);
    p.interrupted = poll_countdown;
    return p;
}

static void attention(sdpa_dtype dtype) {
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        test_case c = cases[i].c;
        c.n_batch = 1;
        c.n_head = c.group = 2;
        c.d_k = c.d_v = 16;
        c.dtype = dtype;
        if (c.scale == 0) c.scale = 0.25;
        fixture *f = new_fixture(&c, 0);
        CHECK(sdpa_attention_forward(&f->p) == SDPA_OK, "%s", cases[i].name);
        for (size_t d = 0; d < sizeof drivers / sizeof *drivers; d++) {
            const int first = f->n_buffers;
            attention_call call = {drivers[d].driver, with_results(f, drivers[d].driver)};
            for (call.p.n_workers = 1; call.p.n_workers <= 3; call.p.n_workers += 2) {
                char what[64];
                snprintf(what, sizeof what, "%s, %s, dtype %d", cases[i].name, drivers[d].name, (int)dtype);
                check_interrupted(what, call.p.n_workers, run_attention, &call);
            }
            free_buffers(f, first);
        }
        free_fixture(f);
    }
}

static sdpa_status run_softmax(void *context) { return sdpa_softmax_run(context); }

/* Many rows, and one that threads share. */
static void softmax(void) {
    enum { N = 300000 };
    static float x[N], out[N];
    for (int shape = 0; shape < 2; shape++) {
        const int64_t n = shape == 0 ? 100 : N;
        sdpa_softmax_problem p = {.op = SDPA_SOFTMAX,
                                  .dtype = SDPA_F32,
                                  .n_kept = 1,
                                  .n_reduced = 1,
                                  .size = {N / n, n},
                                  .temperature = 1,
                                  .interrupted = poll_countdown};
        p.view[SDPA_SOFTMAX_X] = (sdpa_softmax_view){(char *)x, SDPA_F32, false, {4 * n, 4}};
        p.view[SDPA_SOFTMAX_OUT] = (sdpa_softmax_view){(char *)out, SDPA_F32, false, {4 * n, 4}};
        for (p.n_workers = 1; p.n_workers <= 3; p.n_workers += 2) {
            check_interrupted(shape ? "softmax of a long row" : "softmax", p.n_workers, run_softmax, &p);
        }
    }
}

void test_interruption(void) {
    interruption();
    attention(SDPA_BF16);
    attention(SDPA_F32);
    softmax();
}
