/* How many instructions a call executes: `counts [NAME ...]` prints a line "NAME: INSTRUCTIONS" for each of its works, or
 * for those named, on the kernels that SDPA_ISA names. The work runs in a child that this process steps through one
 * instruction at a time: slow, but it works for every instruction set, where callgrind knows no AVX-512 and virtual
 * machines have no counters. Each turn of a repeated string instruction counts. With `marks` before the names nothing is
 * stepped: each work runs between two calls of mark(), for benchmarks/qemu.py. Built by tests/c/Makefile, run and
 * compared by `python -m benchmarks.counts`. */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../src/drivers.h"
#include "../src/runtime/isa.h"
#include "../src/softmax.h"

enum { ROOM = 1 << 15 }; /* elements of the largest operand */

typedef struct work {
    const char *name;
    int64_t n_head, n_q, n_k, d;
    sdpa_dtype dtype;
    enum { PLAIN, CAUSAL, MASKED, SQUARES, NOTHING, KEYS } kind; /* the last: a bias per key */
    sdpa_status (*driver)(const sdpa_problem *p);
} work;

/* 48 queries are a panel of three vectors of AVX-512. */
static const work works[] = {
    {"forward", 1, 48, 64, 64, SDPA_F32, PLAIN, sdpa_attention_forward},
    {"forward d=128", 1, 48, 32, 128, SDPA_F32, PLAIN, sdpa_attention_forward},
    {"forward causal", 1, 48, 48, 64, SDPA_F32, CAUSAL, sdpa_attention_forward},
    {"forward mask", 1, 48, 64, 64, SDPA_F32, MASKED, sdpa_attention_forward},
    {"forward bias of keys", 1, 48, 64, 64, SDPA_F32, KEYS, sdpa_attention_forward},
    {"forward nothing", 2, 144, 144, 64, SDPA_F32, NOTHING, sdpa_attention_forward},
    {"forward squares", 1, 48, 512, 64, SDPA_F32, SQUARES, sdpa_attention_forward},
    {"forward float64", 1, 48, 32, 64, SDPA_F64, PLAIN, sdpa_attention_forward},
    {"forward bfloat16", 1, 48, 64, 64, SDPA_BF16, PLAIN, sdpa_attention_forward},
    {"forward short", 4, 10, 10, 64, SDPA_F32, PLAIN, sdpa_attention_forward},
    {"one query", 1, 1, 256, 64, SDPA_F32, PLAIN, sdpa_attention_forward},
    {"one query float16", 1, 1, 256, 64, SDPA_F16, PLAIN, sdpa_attention_forward},
    {"eight queries", 1, 8, 128, 64, SDPA_F32, PLAIN, sdpa_attention_forward},
    {"backward", 1, 48, 40, 64, SDPA_F32, PLAIN, sdpa_attention_backward},
    {"backward causal", 1, 48, 48, 64, SDPA_F32, CAUSAL, sdpa_attention_backward},
    {"backward squares", 1, 48, 512, 64, SDPA_F32, SQUARES, sdpa_attention_backward},
    {"backward float64", 1, 24, 40, 64, SDPA_F64, PLAIN, sdpa_attention_backward},
    {"backward short", 4, 10, 10, 64, SDPA_F32, PLAIN, sdpa_attention_backward},
    {"statistics", 1, 48, 64, 64, SDPA_F32, PLAIN, sdpa_attention_statistics},
};
enum { N_WORKS = sizeof works / sizeof *works };

/* (n_head, rows, columns) of varied small numbers, in memory of its own. */
static sdpa_tensor tensor(sdpa_dtype dtype, int64_t n_head, int64_t rows, int64_t columns) {
    const int64_t size = sdpa_size_of(dtype), n = n_head * rows * columns;
    char *data = aligned_alloc(64, ROOM * 8);
    if (!data || n > ROOM) abort();
    for (int64_t i = 0; i < n; i++) {
        const double x = sin((double)i);
        const float f = (float)x;
        const uint16_t half = (uint16_t)(i % 2 ? 0x3c00 : 0xb800); /* 1, -0.5; in bfloat16 0.0078, -0.00003 */
        memcpy(data + i * size, size == 8 ? (const void *)&x : size == 4 ? (const void *)&f : &half, (size_t)size);
    }
    return (sdpa_tensor){
        .data = data, .row = columns * size, .col = size, .head = rows * columns * size, .group = 1, .dtype = dtype};
}

/* SQUARES shows 64 keys of 512. */
static sdpa_tensor mask(const work *w) {
    const int64_t rows = w->n_q, columns = w->n_k;
    char *data = malloc((size_t)(rows * columns));
    if (!data) abort();
    for (int64_t i = 0; i < rows * columns; i++) {
        data[i] = w->kind == MASKED ? i % 7 != 3 : w->kind == SQUARES && i % columns / 64 % 8 == 0;
    }
    return (sdpa_tensor){.data = data, .row = columns, .col = 1, .group = 1, .dtype = SDPA_BOOL};
}

static sdpa_problem problem_of(const work *w) {
    const sdpa_dtype wide = w->dtype == SDPA_F64 ? SDPA_F64 : SDPA_F32;
    sdpa_problem p = {.n_batch = 1,
                      .n_head = w->n_head,
                      .n_q = w->n_q,
                      .n_k = w->n_k,
                      .d_k = w->d,
                      .d_v = w->d,
                      .dtype = w->dtype == SDPA_F16 ? SDPA_F32 : w->dtype, /* float16: keys and values alone */
                      .scale = 1 / sqrt((double)w->d),
                      .has_upper = w->kind == CAUSAL,
                      .n_workers = 1};
    p.q = tensor(p.dtype, w->n_head, w->n_q, w->d);
    p.k = tensor(w->dtype, w->n_head, w->n_k, w->d);
    p.v = tensor(w->dtype, w->n_head, w->n_k, w->d);
    p.o = tensor(p.dtype, w->n_head, w->n_q, w->d);
    p.lse = tensor(wide, w->n_head, w->n_q, 1);
    if (w->driver == sdpa_attention_backward) {
        p.dout = tensor(p.dtype, w->n_head, w->n_q, w->d);
        p.dq = tensor(p.dtype, w->n_head, w->n_q, w->d);
        p.dk = tensor(w->dtype, w->n_head, w->n_k, w->d);
        p.dv = tensor(w->dtype, w->n_head, w->n_k, w->d);
    }
    if (w->driver == sdpa_attention_statistics) p.o = tensor(wide, w->n_head, w->n_q, SDPA_N_STATISTICS);
    if (w->kind == KEYS) {
        p.mask = tensor(SDPA_F32, 1, 1, w->n_k);
        p.mask.row = 0;
    } else if (w->kind > CAUSAL) {
        p.mask = mask(w);
    }
    p.features = sdpa_problem_features(&p);
    if (w->driver == sdpa_attention_backward && sdpa_attention_forward(&p) != SDPA_OK) abort();
    return p;
}

static bool stepped = true;

__attribute__((noinline)) static void mark(void) { __asm__ volatile("" ::: "memory"); }

/* The begin and the end of what is counted. */
static void edge(void) {
    mark();
    if (stepped) raise(SIGSTOP);
}

static void softmax_rows(void) {
    enum { ROWS = 8, COLUMNS = 512 };
    sdpa_softmax_problem p = {.op = SDPA_SOFTMAX,
                              .dtype = SDPA_F32,
                              .n_kept = 1,
                              .n_reduced = 1,
                              .size = {ROWS, COLUMNS},
                              .temperature = 1,
                              .n_workers = 1};
    for (int i = 0; i < 2; i++) {
        sdpa_softmax_view *view = &p.view[i ? SDPA_SOFTMAX_OUT : SDPA_SOFTMAX_X];
        *view = (sdpa_softmax_view){
            .data = tensor(SDPA_F32, 1, ROWS, COLUMNS).data, .dtype = SDPA_F32, .stride = {COLUMNS * 4, 4}};
    }
    for (int turn = 0; turn < 2; turn++) {
        if (turn) edge();
        if (sdpa_softmax_run(&p) != SDPA_OK) abort();
    }
    edge();
}

/* In the child: once for what is set up at the first call, then between two stops. */
static void run(int index) {
    if (index == N_WORKS) {
        softmax_rows();
        return;
    }
    const sdpa_problem p = problem_of(&works[index]);
    for (int turn = 0; turn < 2; turn++) {
        if (turn) edge();
        if (works[index].driver(&p) != SDPA_OK) abort();
    }
    edge();
}

/* Continues the child by `how` up to its next stop. False if it stopped for anything but SIGTRAP, or ended. */
static bool steps_on(pid_t child, int how) {
    int status;
    if (ptrace(how, child, NULL, NULL) != 0 || waitpid(child, &status, 0) != child || !WIFSTOPPED(status)) {
        fprintf(stderr, "counts: cannot step through a child\n");
        exit(1);
    }
    return WSTOPSIG(status) == SIGTRAP;
}

static long count(int index) {
    const pid_t child = fork();
    if (child == 0) {
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0) _exit(1);
        raise(SIGSTOP);
        run(index);
        _exit(0);
    }
    int status;
    if (child < 0 || waitpid(child, &status, 0) != child || !WIFSTOPPED(status)) exit(1);
    steps_on(child, PTRACE_CONT);
    long n = 0;
    while (steps_on(child, PTRACE_SINGLESTEP)) n++;
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    return n;
}

static bool is_wanted(const char *name, int n_names, char **names) {
    for (int i = 0; i < n_names; i++) {
        if (strcmp(name, names[i]) == 0) return true;
    }
    return n_names == 0;
}

int main(int argc, char **argv) {
    const char *isa = getenv("SDPA_ISA");
    if (!isa || !sdpa_isa_select(isa)) {
        fprintf(stderr, "counts: SDPA_ISA=%s names no kernels of this machine\n", isa ? isa : "");
        return 1;
    }
    stepped = argc < 2 || strcmp(argv[1], "marks") != 0;
    for (int i = 0; i <= N_WORKS; i++) {
        const char *name = i < N_WORKS ? works[i].name : "softmax";
        if (!is_wanted(name, argc - !stepped - 1, argv + !stepped + 1)) continue;
        if (stepped) {
            printf("%s: %ld\n", name, count(i));
        } else {
            printf("%s\n", name);
            run(i);
        }
        fflush(stdout);
    }
    return 0;
}
