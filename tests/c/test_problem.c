/* The checks on entry to the drivers: a problem that breaks an invariant of the descriptor ends the process. */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../src/drivers.h"
#include "check.h"

enum { N_HEAD = 2, N_Q = 3, N_K = 4, D = 2 };

static float q[N_HEAD * N_Q * D], k[N_HEAD * N_K * D], v[N_HEAD * N_K * D], o[N_HEAD * N_Q * D], lse[N_HEAD * N_Q],
    dout[N_HEAD * N_Q * D], dq[N_HEAD * N_Q * D], dk[N_HEAD * N_K * D], mask[N_Q * N_K];

static sdpa_tensor tensor(float *data, int64_t rows, int64_t cols) {
    return (sdpa_tensor){(char *)data, 4 * cols, 4, 4 * rows * cols, 1, SDPA_F32, false, NULL};
}

static sdpa_problem sound(void) {
    sdpa_problem p = {.n_batch = 1,
                      .n_head = N_HEAD,
                      .n_q = N_Q,
                      .n_k = N_K,
                      .d_k = D,
                      .d_v = D,
                      .dtype = SDPA_F32,
                      .scale = 1,
                      .has_upper = true,
                      .upper = 1,
                      .n_workers = 1};
    p.q = tensor(q, N_Q, D);
    p.k = tensor(k, N_K, D);
    p.v = tensor(v, N_K, D);
    p.o = tensor(o, N_Q, D);
    p.lse = tensor(lse, N_Q, 1);
    p.dout = tensor(dout, N_Q, D);
    p.dq = tensor(dq, N_Q, D);
    p.dk = tensor(dk, N_K, D);
    p.features = sdpa_problem_features(&p);
    return p;
}

/* The signal that ends the call, in a child whose error output is discarded; 0 if the call returns. */
static int ended_by(const sdpa_problem *p, sdpa_status (*driver)(const sdpa_problem *)) {
    int status = 0;
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        freopen("/dev/null", "w", stderr);
        signal(SIGABRT, SIG_DFL);
        _exit(driver(p) != SDPA_OK);
    }
    waitpid(child, &status, 0);
    return WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status) ? -1 : 0;
}

#define BREAKS(driver, change)                                                                                         \
    do {                                                                                                               \
        sdpa_problem p = sound();                                                                                      \
        change;                                                                                                        \
        const int signal = ended_by(&p, driver);                                                                       \
        CHECK(signal == SIGABRT, "%s goes unnoticed: %d", #change, signal);                                            \
    } while (0)

#define FORWARD_BREAKS(change) BREAKS(sdpa_attention_forward, change)
#define BACKWARD_BREAKS(change) BREAKS(sdpa_attention_backward, change)

void test_problem(void) {
    const sdpa_problem whole = sound();
    CHECK(ended_by(&whole, sdpa_attention_forward) == 0, "a sound problem");
    CHECK(ended_by(&whole, sdpa_attention_backward) == 0, "a sound problem");

    FORWARD_BREAKS(p.n_q = -1);
    FORWARD_BREAKS(p.n_batch = 2);
    FORWARD_BREAKS(p.n_workers = 0);
    FORWARD_BREAKS(p.scale = NAN);
    FORWARD_BREAKS(p.dropout_p = 1.5);
    FORWARD_BREAKS(p.k.group = 3);
    FORWARD_BREAKS(p.k.row = INT64_MAX);
    FORWARD_BREAKS(p.k.dtype = SDPA_F64);
    FORWARD_BREAKS(p.lse.dtype = SDPA_F16);
    FORWARD_BREAKS(p.o.dtype = SDPA_F16);
    BACKWARD_BREAKS(p.o.dtype = SDPA_F64);
    /* Sizes that zero strides allow and whose bytes could wrap around. */
    FORWARD_BREAKS((p.n_k = SDPA_LARGEST_AXIS + 1, p.k.row = p.v.row = 0));
    FORWARD_BREAKS((p.n_k = SDPA_LARGEST_AXIS, p.n_head = 1 << 9, p.k.row = p.v.row = p.k.head = p.v.head = 0));
    /* Features that were not set again after the fields. */
    FORWARD_BREAKS(p.features = 0);
    FORWARD_BREAKS(p.mask = tensor(mask, N_Q, N_K));
    FORWARD_BREAKS(p.softcap = 1);
    FORWARD_BREAKS(p.scores = SDPA_ADDITIVE);
    /* Outputs. */
    FORWARD_BREAKS(p.o.swapped = true);
    FORWARD_BREAKS(p.o.data += 1);
    FORWARD_BREAKS(p.o.row = 0);
    FORWARD_BREAKS(p.o.data = p.q.data);
    FORWARD_BREAKS(p.lse.data = p.o.data + 8);
    BACKWARD_BREAKS(p.dq.data = p.k.data);
    BACKWARD_BREAKS(p.dk.data = p.dq.data);
    BACKWARD_BREAKS(p.dk.swapped = true);
    BACKWARD_BREAKS(p.dk.col = 8);
}
