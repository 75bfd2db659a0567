/* The thread pool: every unit once, order of claiming, waiting, nested and concurrent callers, interruption, fork. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifndef PORTABLE
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

#include "../../src/runtime/parallel.h"
#include "check.h"

enum { MAX_UNITS = 5000, MAX_WORKERS = 64 };

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void sleep_ms(int ms) {
    struct timespec span = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&span, NULL);
}

/* --- every unit once, workers within bounds, no worker number shared by two threads at once */

typedef struct counts {
    _Atomic int units[MAX_UNITS];
    _Atomic int inside[MAX_WORKERS];
    _Atomic int worker_out_of_range, worker_shared;
    int n_workers;
} counts;

static void count_unit(void *context, int64_t unit, int worker, sdpa_run *run) {
    (void)run;
    counts *c = context;
    if (worker < 0 || worker >= c->n_workers) {
        atomic_fetch_add(&c->worker_out_of_range, 1);
        return;
    }
    if (atomic_fetch_add(&c->inside[worker], 1) != 0) {
        atomic_fetch_add(&c->worker_shared, 1);
    }
    atomic_fetch_add(&c->units[unit], 1);
    atomic_fetch_sub(&c->inside[worker], 1);
}

static counts *new_counts(int n_workers) {
    counts *c = calloc(1, sizeof *c);
    c->n_workers = n_workers;
    return c;
}

static void check_counts(counts *c, int64_t n_units, const char *what) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < MAX_UNITS; i++) {
        wrong += atomic_load(&c->units[i]) != (i < n_units);
    }
    CHECK(wrong == 0, "%s: n_units=%ld n_workers=%d: %ld units", what, (long)n_units, c->n_workers, (long)wrong);
    CHECK(c->worker_out_of_range == 0, "%s: n_units=%ld n_workers=%d", what, (long)n_units, c->n_workers);
    CHECK(c->worker_shared == 0, "%s: n_units=%ld n_workers=%d", what, (long)n_units, c->n_workers);
}

static void every_unit_once(void) {
    const int64_t sizes[] = {0, 1, 2, 3, 7, 64, 1000, MAX_UNITS};
    const int workers[] = {1, 2, 3, 5, 16, 2, 9, 1, 4}; /* up and down again */
    for (size_t w = 0; w < sizeof workers / sizeof workers[0]; w++) {
        for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
            counts *c = new_counts(workers[w]);
            CHECK(sdpa_parallel_for(sizes[s], workers[w], count_unit, c, NULL) == SDPA_OK, "n_units=%ld n_workers=%d",
                  (long)sizes[s], workers[w]);
            check_counts(c, sizes[s], "once");
            free(c);
        }
    }
    /* Calls in quick succession: late threads of one job must not disturb the next. */
    counts *c = new_counts(4);
    for (int i = 0; i < 2000; i++) {
        sdpa_parallel_for(3, 4, count_unit, c, NULL);
    }
    CHECK(c->units[0] == 2000 && c->units[1] == 2000 && c->units[2] == 2000, "succession: %d %d %d", c->units[0],
          c->units[1], c->units[2]);
    CHECK(c->worker_shared == 0 && c->worker_out_of_range == 0, "succession");
    free(c);
}

/* --- units run at the same time: asleep, so that this holds on a single CPU too */

static void sleeping_unit(void *context, int64_t unit, int worker, sdpa_run *run) {
    (void)unit;
    (void)worker;
    (void)run;
    atomic_fetch_add((_Atomic int *)context, 1);
    sleep_ms(100);
}

static void units_run_in_parallel(void) {
    for (int n_workers = 2; n_workers <= 8; n_workers += 3) {
        _Atomic int n_run = 0;
        double start = seconds();
        sdpa_parallel_for(n_workers, n_workers, sleeping_unit, (void *)&n_run, NULL);
        double took = seconds() - start;
        CHECK(n_run == n_workers && took < 0.19, "n_workers=%d: %d units in %.3f s", n_workers, n_run, took);
    }
}

/* --- a caller that has nothing to do but wait for the others sleeps */

static double cpu_seconds(void) {
    struct timespec used;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
    return (double)used.tv_sec + 1e-9 * (double)used.tv_nsec;
}

/* The caller's own units last until another thread has begun one, which then takes much longer. */
static void slow_elsewhere_unit(void *context, int64_t unit, int worker, sdpa_run *run) {
    (void)unit;
    (void)run;
    _Atomic int *begun = context;
    double end = seconds() + 20;
    if (worker > 0) {
        atomic_store(begun, 1);
        sleep_ms(400);
        return;
    }
    while (seconds() < end && !atomic_load(begun)) {
        sleep_ms(1);
    }
}

static void a_waiting_caller_sleeps(void) {
    _Atomic int begun = 0;
    double start = cpu_seconds();
    sdpa_parallel_for(2, 2, slow_elsewhere_unit, &begun, NULL);
    double used = cpu_seconds() - start;
    CHECK(begun && used < 0.1, "%.3f s of CPU", used);
}

/* --- plain memory written by a unit is seen by the caller, and by a unit that waited for it */

enum { CHAIN = 400 };

typedef struct chain {
    int64_t plain[CHAIN];
    _Atomic int64_t done; /* units finished, in order */
} chain;

static void chain_unit(void *context, int64_t unit, int worker, sdpa_run *run) {
    (void)worker;
    chain *c = context;
    if (sdpa_run_wait(run, &c->done, unit)) {
        c->plain[unit] = unit == 0 ? 1 : c->plain[unit - 1] + unit;
        atomic_store_explicit(&c->done, unit + 1, memory_order_release);
    }
}

static void units_wait_for_earlier_ones(void) {
    for (int n_workers = 1; n_workers <= 8; n_workers++) {
        chain c = {{0}, 0};
        CHECK(sdpa_parallel_for(CHAIN, n_workers, chain_unit, &c, NULL) == SDPA_OK, "n_workers=%d", n_workers);
        CHECK(c.plain[CHAIN - 1] == 1 + (int64_t)CHAIN * (CHAIN - 1) / 2, "n_workers=%d: %ld", n_workers,
              (long)c.plain[CHAIN - 1]);
    }
}

/* --- claiming in increasing order: when a unit starts, all earlier ones have started, or their claimants are about to
 */

typedef struct order {
    _Atomic int64_t n_started;
    _Atomic int early; /* units that started while too few earlier ones had */
    int n_workers;
} order;

static void order_unit(void *context, int64_t unit, int worker, sdpa_run *run) {
    (void)worker;
    (void)run;
    order *o = context;
    if (unit > atomic_fetch_add(&o->n_started, 1) + o->n_workers - 1) {
        atomic_fetch_add(&o->early, 1);
    }
}

static void claimed_in_order(void) {
    for (int n_workers = 1; n_workers <= 5; n_workers++) {
        order o = {0, 0, n_workers};
        sdpa_parallel_for(MAX_UNITS, n_workers, order_unit, &o, NULL);
        CHECK(o.early == 0, "n_workers=%d: %d", n_workers, o.early);
    }
}

/* --- nested callers, concurrent callers */

static void nested_unit(void *context, int64_t unit, int worker, sdpa_run *run) {
    (void)worker;
    (void)run;
    counts *c = new_counts(4);
    sdpa_parallel_for(10 + unit, 4, count_unit, c, NULL);
    int64_t wrong = 0;
    for (int64_t i = 0; i < MAX_UNITS; i++) {
        wrong += atomic_load(&c->units[i]) != (i < 10 + unit);
    }
    if (wrong || c->worker_shared || c->worker_out_of_range) {
        atomic_fetch_add((_Atomic int *)context, 1);
    }
    free(c);
}

static void *concurrent_caller(void *context) {
    for (int i = 0; i < 50; i++) {
        int n_workers = i % 5 + 1;
        counts *c = new_counts(n_workers);
        sdpa_parallel_for(200, n_workers, count_unit, c, NULL);
        for (int64_t u = 0; u < MAX_UNITS; u++) {
            if (atomic_load(&c->units[u]) != (u < 200)) {
                atomic_fetch_add((_Atomic int *)context, 1);
            }
        }
        free(c);
        chain chained = {{0}, 0};
        sdpa_parallel_for(CHAIN, n_workers, chain_unit, &chained, NULL);
        if (chained.plain[CHAIN - 1] != 1 + (int64_t)CHAIN * (CHAIN - 1) / 2) {
            atomic_fetch_add((_Atomic int *)context, 1);
        }
    }
    return NULL;
}

static void nested_and_concurrent_callers(void) {
    _Atomic int wrong = 0;
    CHECK(sdpa_parallel_for(20, 4, nested_unit, &wrong, NULL) == SDPA_OK, "nested");
    CHECK(wrong == 0, "nested: %d", wrong);

    pthread_t threads[8];
    for (int t = 0; t < 8; t++) {
        pthread_create(&threads[t], NULL, concurrent_caller, &wrong);
    }
    for (int t = 0; t < 8; t++) {
        pthread_join(threads[t], NULL);
    }
    CHECK(wrong == 0, "concurrent: %d", wrong);
}

/* --- interruption */

static pthread_t calling_thread;
static _Atomic int n_polls, polled_elsewhere;
static double interrupt_at;

static int poll_clock(void) {
    atomic_fetch_add(&n_polls, 1);
    if (!pthread_equal(pthread_self(), calling_thread)) {
        atomic_fetch_add(&polled_elsewhere, 1);
    }
    return seconds() >= interrupt_at;
}

static void short_unit(void *context, int64_t unit, int worker, sdpa_run *run) {
    (void)unit;
    (void)worker;
    (void)run;
    atomic_fetch_add((_Atomic int *)context, 1);
    sleep_ms(1);
}

static void long_unit(void *context, int64_t unit, int worker, sdpa_run *run) {
    (void)unit;
    (void)worker;
    double end = seconds() + 20;
    while (seconds() < end && !sdpa_run_stopped(run)) {
    }
    atomic_fetch_add((_Atomic int *)context, 1);
}

/* Only the other threads work long: the caller polls while it waits for them to finish. Its own units last until one of
 * theirs has begun, or the caller could take them all before a thread has woken up. */
static _Atomic int begun_elsewhere;

static void long_elsewhere_unit(void *context, int64_t unit, int worker, sdpa_run *run) {
    if (worker > 0) {
        atomic_store(&begun_elsewhere, 1);
        long_unit(context, unit, worker, run);
        return;
    }
    double end = seconds() + 20;
    while (seconds() < end && !atomic_load(&begun_elsewhere)) {
        sleep_ms(1);
    }
}

static void endless_wait_unit(void *context, int64_t unit, int worker, sdpa_run *run) {
    (void)unit;
    (void)worker;
    static _Atomic int64_t never;
    if (!sdpa_run_wait(run, &never, 1)) {
        atomic_fetch_add((_Atomic int *)context, 1);
    }
}

/* Every unit waits for something that has already happened. */
static void satisfied_wait_unit(void *context, int64_t unit, int worker, sdpa_run *run) {
    (void)unit;
    (void)worker;
    static _Atomic int64_t past = 1;
    double end = seconds() + 20;
    while (seconds() < end && sdpa_run_wait(run, &past, 1)) {
    }
    atomic_fetch_add((_Atomic int *)context, 1);
}

static void check_interrupted(const char *what, int64_t n_units, int n_workers, sdpa_unit_fn *fn) {
    _Atomic int n_run = 0;
    calling_thread = pthread_self();
    n_polls = polled_elsewhere = 0;
    double start = seconds();
    interrupt_at = start + 0.1;
    sdpa_status status = sdpa_parallel_for(n_units, n_workers, fn, (void *)&n_run, poll_clock);
    double took = seconds() - start;
    CHECK(status == SDPA_INTERRUPTED, "%s: n_workers=%d: status %d", what, n_workers, (int)status);
    CHECK(took < TIME_LIMIT, "%s: n_workers=%d: %.3f s", what, n_workers, took);
    CHECK(polled_elsewhere == 0, "%s: n_workers=%d: %d", what, n_workers, polled_elsewhere);
    /* At most every 20 ms, give or take the coarse clock's 4 ms. */
    CHECK(n_polls >= 1 && n_polls <= 2 + took / 0.015, "%s: n_workers=%d: %d polls in %.3f s", what, n_workers, n_polls,
          took);
    CHECK(n_run < n_units || n_units <= n_workers, "%s: n_workers=%d: all %d units ran", what, n_workers, n_run);
    /* The pool is usable afterwards. */
    counts *c = new_counts(n_workers);
    CHECK(sdpa_parallel_for(100, n_workers, count_unit, c, NULL) == SDPA_OK, "%s", what);
    check_counts(c, 100, what);
    free(c);
}

static void interruption(void) {
    for (int n_workers = 1; n_workers <= 4; n_workers++) {
        check_interrupted("short", 100000, n_workers, short_unit);
        check_interrupted("long", 64, n_workers, long_unit);
        check_interrupted("wait", 64, n_workers, endless_wait_unit);
        check_interrupted("no wait", 64, n_workers, satisfied_wait_unit);
    }
    check_interrupted("one unit", 1, 1, long_unit);
    begun_elsewhere = 0;
    check_interrupted("elsewhere", 3, 3, long_elsewhere_unit);
    /* Nothing is interrupted unless the poll says so. */
    interrupt_at = seconds() + 1000;
    _Atomic int n_run = 0;
    CHECK(sdpa_parallel_for(300, 3, short_unit, (void *)&n_run, poll_clock) == SDPA_OK, "not interrupted");
    CHECK(n_run == 300, "%d", n_run);
}

#ifndef PORTABLE
/* --- signals belong to the program's threads */

static _Atomic int n_handled, handled_elsewhere;

static void on_signal(int number) {
    (void)number;
    atomic_fetch_add(&n_handled, 1);
    if (!pthread_equal(pthread_self(), calling_thread)) {
        atomic_fetch_add(&handled_elsewhere, 1);
    }
}

static void workers_mask_signals(void) {
    struct sigaction action = {.sa_handler = on_signal}, old;
    sigaction(SIGUSR1, &action, &old);
    calling_thread = pthread_self();
    _Atomic int n_run = 0;
    for (int i = 0; i < 20; i++) {
        kill(getpid(), SIGUSR1);
        sdpa_parallel_for(8, 4, short_unit, (void *)&n_run, NULL);
    }
    CHECK(n_handled > 0 && handled_elsewhere == 0, "%d of %d elsewhere", handled_elsewhere, n_handled);
    sigaction(SIGUSR1, &old, NULL);
}
#endif

/* --- stop and restart */

static void *call_for_long(void *context) {
    _Atomic int n_run = 0;
    *(sdpa_status *)context = sdpa_parallel_for(1000, 3, long_unit, &n_run, NULL);
    return NULL;
}

static void stop_and_restart(void) {
    for (int i = 0; i < 20; i++) {
        counts *c = new_counts(3);
        CHECK(sdpa_parallel_for(50, 3, count_unit, c, NULL) == SDPA_OK, "restart %d", i);
        check_counts(c, 50, "restart");
        free(c);
        sdpa_pool_stop();
    }
    sdpa_pool_stop();

    sdpa_status status = SDPA_OK;
    pthread_t thread;
    pthread_create(&thread, NULL, call_for_long, &status);
    sleep_ms(100);
    double start = seconds();
    sdpa_pool_stop();
    pthread_join(thread, NULL);
    CHECK(status == SDPA_INTERRUPTED && seconds() - start < TIME_LIMIT, "stop during a run: status %d, %.3f s",
          (int)status, seconds() - start);
}

void test_pool(void) {
    every_unit_once();
    units_run_in_parallel();
    a_waiting_caller_sleeps();
    units_wait_for_earlier_ones();
    claimed_in_order();
    nested_and_concurrent_callers();
    interruption();
#ifndef PORTABLE
    workers_mask_signals();
#endif
    stop_and_restart();
}

#ifndef PORTABLE
/* --- fork */

/* In the child the pool works, with new threads. The exit code says what failed. */
static int child_works(void) {
    alarm(20);
    for (int i = 0; i < 3; i++) {
        counts *c = new_counts(4);
        if (sdpa_parallel_for(500, 4, count_unit, c, NULL) != SDPA_OK) {
            return 1;
        }
        for (int64_t u = 0; u < MAX_UNITS; u++) {
            if (atomic_load(&c->units[u]) != (u < 500)) {
                return 2;
            }
        }
        free(c);
    }
    _Atomic int n_run = 0;
    double start = seconds();
    sdpa_parallel_for(4, 4, sleeping_unit, (void *)&n_run, NULL);
    if (n_run != 4 || seconds() - start > 0.35) {
        return 3;
    }
    sdpa_pool_stop();
    return 0;
}

static void check_child(const char *what, int i) {
    pid_t pid = fork();
    if (pid == 0) {
        _exit(child_works());
    }
    int status = -1;
    waitpid(pid, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s: child %d: status %#x", what, i, (unsigned)status);
}

static _Atomic bool keep_busy;

static void *keep_pool_busy(void *context) {
    (void)context;
    while (atomic_load(&keep_busy)) {
        _Atomic int n_run = 0;
        sdpa_parallel_for(40, 4, short_unit, (void *)&n_run, NULL);
    }
    return NULL;
}

/* --- a fork in the middle of a run, by what it polls */

static int polls_before_fork;
static bool child_stops;
static _Atomic pid_t forked;

static int poll_and_fork(void) {
    if (polls_before_fork-- != 0) return 0;
    const pid_t child = fork();
    atomic_store(&forked, child);
    return child == 0 && child_stops;
}

/* Other threads are inside a unit until the process has forked. */
static void wait_for_fork(int worker) {
    const double end = seconds() + 20;
    if (worker > 0) atomic_store(&begun_elsewhere, 1);
    while (worker > 0 && !atomic_load(&forked) && seconds() < end) sleep_ms(1);
}

static void polling_unit(void *context, int64_t unit, int worker, sdpa_run *run) {
    (void)unit;
    for (int i = 0; i < 4; i++) sdpa_run_stopped(run);
    wait_for_fork(worker);
    atomic_fetch_add((_Atomic int *)context, 1);
}

/* The caller polls when it has no units left. */
static void late_unit(void *context, int64_t unit, int worker, sdpa_run *run) {
    if (worker == 0) long_elsewhere_unit(context, unit, worker, run);
    wait_for_fork(worker);
    atomic_fetch_add((_Atomic int *)context, 1);
}

/* In the child, which lacks the threads that had part of the work, the call has no result; in the parent it has. */
static void check_forked(const char *what, int n_workers, sdpa_unit_fn *fn, sdpa_status in_child) {
    enum { N_UNITS = 6 };
    const pid_t parent = getpid();
    for (int stops = 0; stops < 2; stops++) {
        _Atomic int n_run = 0;
        begun_elsewhere = 0;
        polls_before_fork = 2;
        child_stops = stops;
        atomic_store(&forked, 0);
        const sdpa_status status = sdpa_parallel_for(N_UNITS, n_workers, fn, (void *)&n_run, poll_and_fork);
        if (getpid() != parent) {
            const sdpa_status expected = stops && n_workers == 1 ? SDPA_INTERRUPTED : in_child;
            _exit(status == expected ? child_works() : 10 + (int)status);
        }
        CHECK(status == SDPA_OK && n_run == N_UNITS, "%s: status %d, %d units", what, (int)status, n_run);
        int code = -1;
        CHECK(waitpid(forked, &code, 0) == forked && code == 0, "%s: child: %#x", what, (unsigned)code);
    }
}

static void forks_within_runs(void) {
    sdpa_poll_always(true);
    check_forked("one thread", 1, polling_unit, SDPA_OK);
    check_forked("between units", 3, polling_unit, SDPA_FORKED);
    sdpa_poll_always(false);
    check_forked("at the end", 3, late_unit, SDPA_FORKED);
}

void test_fork(void) {
    _Atomic int n_run = 0;
    sdpa_parallel_for(8, 4, short_unit, (void *)&n_run, NULL);
    for (int i = 0; i < 20; i++) {
        check_child("idle", i);
        sdpa_parallel_for(8, 4, short_unit, (void *)&n_run, NULL);
    }
    CHECK(n_run == 21 * 8, "parent: %d", n_run);

    /* While another thread uses the pool, in every phase of its runs. */
    atomic_store(&keep_busy, true);
    pthread_t thread;
    pthread_create(&thread, NULL, keep_pool_busy, NULL);
    for (int i = 0; i < 20; i++) {
        sleep_ms(i % 7);
        check_child("busy", i);
    }
    atomic_store(&keep_busy, false);
    pthread_join(thread, NULL);
    forks_within_runs();
}
#endif
